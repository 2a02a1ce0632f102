"""From indices to batches on the device: by indexing tensors, or through DataLoader workers."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from manta.data import AnySet, BatchTransform, TensorSet
from manta.errors import MantaError
from manta.training.sampler import mix

Batch = tuple[Tensor, Tensor]


def first_target(dataset: AnySet | None) -> Tensor:
    """Of sample 0; a class if there is no data set."""
    if dataset is None:
        return torch.tensor(0)
    return dataset.targets[0] if isinstance(dataset, TensorSet) else torch.as_tensor(dataset[0][1])


class Loader:
    """Serves (inputs, targets) on `device` for each index tensor it is asked for, in order.

    A TensorSet is moved to the device once. Any other data set is read by `num_workers` processes which stay alive
    between epochs; each sample is drawn with generators seeded by (seed, epoch, index), so random augmentation
    does not depend on the number of workers or on where a run was resumed.
    """

    def __init__(
        self,
        dataset: AnySet,
        device: torch.device,
        dtype: torch.dtype,
        transform: BatchTransform | None = None,
        seed: int = 0,
        num_workers: int = 0,
        prefetch_factor: int = 4,
    ) -> None:
        self.device, self.dtype, self.transform = device, dtype, transform
        self.tensors = dataset.to(device) if isinstance(dataset, TensorSet) else None
        if not isinstance(dataset, TensorSet):
            self.plan = Plan()
            self.workers: DataLoader[Any] = DataLoader(
                SeededSamples(dataset, seed),
                batch_sampler=self.plan,
                num_workers=num_workers,
                pin_memory=device.type == "cuda",
                persistent_workers=num_workers > 0,
                prefetch_factor=prefetch_factor if num_workers else None,
            )

    def batches(self, indices: Iterable[Tensor], epoch: int = 0) -> Iterator[Batch]:
        """(inputs, targets) for each (n,) int64 index tensor; inputs floating point or token ids, (n, *input_shape)."""
        if self.tensors is not None:
            for chunk in indices:
                yield self._finish(*self.tensors.batch(chunk))
            return
        self.plan.chunks = (list(zip([epoch] * len(chunk), chunk.tolist(), strict=True)) for chunk in indices)
        try:
            for inputs, targets in self.workers:
                inputs, targets = (part.to(self.device, non_blocking=True) for part in (inputs, targets))
                yield self._finish(inputs, targets)
        except MantaError as error:  # a worker process puts its traceback before the message
            raise MantaError(str(error).rpartition("MantaError: ")[2].strip(), error.code) from error
        except (ConnectionError, EOFError) as error:  # of a worker process that died while it sent a batch
            if gone := self._gone():
                raise RuntimeError(f"DataLoader worker (pid(s) {', '.join(gone)}) exited unexpectedly") from error
            raise

    def _gone(self) -> list[str]:
        """Worker processes that have died, or are just dying."""
        processes = getattr(getattr(self.workers, "_iterator", None), "_workers", ())
        for process in processes:
            process.join(1 / len(processes))
        return [str(process.pid) for process in processes if not process.is_alive()]

    def _finish(self, inputs: Tensor, targets: Tensor) -> Batch:
        if self.transform is not None:
            inputs = self.transform(inputs)
        fine = inputs.dtype == self.dtype or not inputs.is_floating_point()
        return (inputs if fine else inputs.to(self.dtype)), targets


class Plan:
    """The batch sampler of a DataLoader whose workers outlive an epoch."""

    def __init__(self) -> None:
        self.chunks: Iterable[list[tuple[int, int]]] = ()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.chunks)


class SeededSamples(Dataset[Any]):
    """Reads sample (epoch, index) with every global generator seeded by (seed, epoch, index)."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
        seed = mix(self.seed, epoch, index)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            return self.dataset[index]
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
            torch.set_rng_state(kept[2])
