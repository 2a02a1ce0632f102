"""Exact evaluation: sums over real samples divided by their count, whatever the number of ranks."""

import math

import torch
from torch import nn

from manta.session import Session
from manta.training.loader import Loader
from manta.training.precision import Precision
from manta.training.sampler import micro_batches
from manta.training.tasks import Classification


@torch.no_grad()
def evaluate(
    session: Session,
    model: nn.Module,
    task: Classification,
    precision: Precision,
    loader: Loader,
    size: int,
    batch_size: int,
    limit: int | None = None,
) -> dict[str, float]:
    """Metrics of `model` (in eval mode) over `size` samples; every rank calls it and gets the same numbers.

    Args:
        batch_size: samples per rank per forward pass.
        limit: forward passes at most.
    """
    micros = micro_batches(torch.arange(size), session.rank, session.world_size, batch_size)[:limit]
    sums = torch.zeros(len(task.metrics) + 1, dtype=torch.float64, device=session.device)
    batches = loader.batches(micro.indices for micro in micros)
    for micro, (inputs, targets) in zip(micros, batches, strict=True):
        with precision.context():
            logits = model(inputs)
        if micro.real:
            sums[:-1] += task.totals(logits, targets)
            sums[-1] += len(targets)
    *totals, count = session.sum(sums).tolist()
    return {name: total / count if count else math.nan for name, total in zip(task.metrics, totals, strict=True)}
