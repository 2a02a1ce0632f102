"""Which samples a rank sees, and when: a function of (seed, epoch, rank, world size) and nothing else."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


def mix(*numbers: int) -> int:
    """One well-mixed 32-bit seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def epoch_order(size: int, seed: int, epoch: int) -> Tensor:
    """The order of samples in an epoch, (size,) int64: a permutation of (seed, epoch) alone."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(mix(seed, epoch)))


class Micro(NamedTuple):
    """One forward pass of one rank. Every rank has equally many in a step, so collectives always match."""

    indices: Tensor
    """(n,) int64, n >= 1."""
    real: bool
    """False: this rank has no sample left for it; it computes one stand-in sample whose weight is zero."""


def micro_batches(batch: Tensor, rank: int, world_size: int, micro_size: int | None) -> list[Micro]:
    """A rank's share of a batch (every world_size-th sample), split into forward passes of at most `micro_size`."""
    share = batch if world_size == 1 else batch[rank::world_size]
    largest = math.ceil(len(batch) / world_size)
    count = math.ceil(largest / (micro_size or largest))
    if count == 1:
        chunks: tuple[Tensor, ...] = (share,)
    else:
        chunks = torch.tensor_split(share, count)
    return [Micro(chunk, True) if len(chunk) else Micro(batch[:1], False) for chunk in chunks]


class Step(NamedTuple):
    """One optimizer step of one rank."""

    size: int
    """Samples in the global batch."""
    micros: list[Micro]


def training_steps(
    order: Tensor, offset: int, batch_size: int, rank: int, world_size: int, micro_size: int | None
) -> Iterator[Step]:
    """The optimizer steps of an epoch, from the `offset`-th sample of its order on."""
    for start in range(offset, len(order), batch_size):
        batch = order[start : start + batch_size]
        yield Step(len(batch), micro_batches(batch, rank, world_size, micro_size))
