"""Exponential moving average of a model's weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Ema:
    """Averages the trainable parameters after each optimizer step; buffers are the model's own.

    Works on sharded (DTensor) parameters as on plain ones: the average is sharded the same way.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.live = [p for p in model.parameters() if p.requires_grad]
        self.average = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step `step` (from 1).

        The decay grows from 0.18 to its full value, so that the first weights, which are random, do not linger
        (the rule of TensorFlow's ExponentialMovingAverage with num_updates).
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.live], 1.0 - decay)

    @torch.no_grad()
    def adopt(self) -> None:
        """Set the average to the model's present weights."""
        for average, live in zip(self.average, self.live, strict=True):
            average.copy_(live)

    @torch.no_grad()
    def _swap(self) -> None:
        for average, live in zip(self.average, self.live, strict=True):
            kept = live.detach().clone()
            live.copy_(average)
            average.copy_(kept)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model carries the averaged weights inside this block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()
