"""Data that is read while it is used: by Ray Data, in tasks on whatever CPUs the cluster has. No import of ray here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from manta.data import BatchTransform, TensorSet

Read = Callable[[Any], tuple[np.ndarray, np.ndarray]]
"""From a piece to its rows: raw inputs (n, ...) and targets (n, ...)."""


@dataclass
class Stream(Dataset):
    """A split that is read in pieces, for `data.engine=ray`; each piece in a task of Ray Data, where `read` may do as much as it
    likes.

    pieces: what `read` takes, each some thousand rows at best (a file, a row group). A training epoch shuffles them by (seed,
    epoch), and then `buffer` rows at a time. `read` gives the same rows, in the same order, whenever it is asked for a piece. A
    stream of no more than `buffer` rows is read once and kept.
    """

    pieces: Sequence[Any]
    read: Read
    size: int
    """Rows of all pieces."""
    prepare: BatchTransform | None = None
    """As of a TensorSet."""
    buffer: int = 10_000
    tasks: int = 2
    """Of Ray Data at once, at most."""
    cpus: float = 0.0
    """That each of them asks for; 0 = they run beside the workers."""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Sample 0 as the model sees it, for checks; others come by the stream only."""
        if index != 0:
            raise IndexError("a stream has no order to look things up by")
        inputs, targets = self.read(self.pieces[0])
        first = torch.from_numpy(np.ascontiguousarray(inputs[:1]))
        return (first if self.prepare is None else self.prepare(first))[0], torch.as_tensor(targets[0])

    def whole(self) -> TensorSet:
        """All of it in memory, without Ray."""
        parts = [self.read(piece) for piece in self.pieces]
        inputs, targets = (torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True))
        return TensorSet(inputs, targets, self.prepare)
