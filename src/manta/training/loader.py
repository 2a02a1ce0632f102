"""From indices to batches on the device: by indexing tensors, or through DataLoader workers."""

import random
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from manta.data import AnySet, BatchTransform, TensorSet
from manta.data.stream import Stream
from manta.errors import MantaError
from manta.session import Session
from manta.training.feeder import Feeder
from manta.training.sampler import mix

Batch = tuple[Tensor, Tensor]
STREAM_AHEAD = 2
"""Batches of a stream that are asked for ahead."""


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
                # Its own: each pass draws a seed for its processes, and a resumed epoch is one pass more than an undisturbed one.
                generator=torch.Generator(),
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


class StreamLoader(Loader):
    """The same for a stream: index tensors are numbers of rows in the stream's order, ascending, those of all ranks close together.

    Every rank makes one alike.

    Args:
        shuffle: it is the training split.
    """

    def __init__(
        self,
        stream: Stream,
        session: Session,
        dtype: torch.dtype,
        transform: BatchTransform | None,
        seed: int,
        shuffle: bool,
    ) -> None:
        self.device, self.dtype, self.transform = session.device, dtype, transform
        self.session, self.stream, self.turn = session, stream, 0
        self.feeder = session.serve(Feeder, stream, seed, shuffle, session.world_size)

    def batches(self, indices: Iterable[Tensor], epoch: int = 0) -> Iterator[Batch]:
        self.turn += 1
        waiting: deque[Any] = deque()
        for chunk in indices:
            waiting.append(self.feeder.take.remote(self.turn, epoch, self.session.rank, chunk.numpy()))
            if len(waiting) > STREAM_AHEAD:
                yield self._fetched(waiting.popleft())
        while waiting:
            yield self._fetched(waiting.popleft())

    def _fetched(self, answer: Any) -> Batch:
        # Copies: what comes from Ray's object store is read-only.
        inputs, targets = (torch.tensor(part).to(self.device) for part in self.session.fetch(answer))
        return self._finish(inputs if self.stream.prepare is None else self.stream.prepare(inputs), targets)


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
