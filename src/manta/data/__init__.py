"""Data sets. A data set is a function that returns `Splits`; its config is one file under conf/data/.

Small data is a `TensorSet`: tensors that are indexed by whole batches. Everything else is any map-style
`torch.utils.data.Dataset` of `(input, target)` samples, read by DataLoader workers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

BatchTransform = Callable[[Tensor], Tensor]


@dataclass
class TensorSet:
    """A data set in memory.

    inputs: (N, *input_shape), uint8 or floating point; targets: (N,) int64 class numbers, or what the task takes.
    prepare: turns raw inputs (any dtype) into what the model sees (see `data.input_dtype`), on whole batches
    and on the batch's device (scaling, normalisation); None = inputs are ready.
    """

    inputs: Tensor
    targets: Tensor
    prepare: BatchTransform | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The samples at `indices` (1-D int64 on the tensors' device), prepared."""
        inputs = self.inputs[indices]
        return (inputs if self.prepare is None else self.prepare(inputs)), self.targets[indices]

    def part(self, start: int, stop: int) -> "TensorSet":
        """The samples from `start` to before `stop`, without a copy."""
        return TensorSet(self.inputs[start:stop], self.targets[start:stop], self.prepare)

    def to(self, device: torch.device) -> "TensorSet":
        return TensorSet(self.inputs.to(device), self.targets.to(device), self.prepare)


AnySet = TensorSet | Dataset


@dataclass
class Splits:
    """What a data set function returns. Sample ids are positions within their split."""

    train: AnySet
    val: AnySet
    test: AnySet | None = None
    classes: tuple[str, ...] = ()
    """Names of the classes by target value; empty = unnamed."""

    @property
    def prepare(self) -> BatchTransform | None:
        """Turns raw inputs from elsewhere into what the model sees; None = they must be ready, or it is not known.

        It is the training split's own, of a TensorSet or of any data set that has an attribute `prepare`.
        """
        return getattr(self.train, "prepare", None)
