"""Batch transforms that break things on purpose, named by a test's `data.transforms.train`."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

from manta.data import Splits, TensorSet
from manta.data.digits import digits


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Slow:
    """Each training batch takes a little while, so that a test can act in the middle of a run."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, batch: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return batch


class Together:
    """The first training batch waits until `count` processes have come to theirs."""

    def __init__(self, folder: str, count: int) -> None:
        self.folder, self.count, self.met = Path(folder), count, False

    def __call__(self, batch: Tensor) -> Tensor:
        if not self.met:
            deadline = time.monotonic() + 200
            self.folder.mkdir(exist_ok=True)
            (self.folder / f"{socket.gethostname()}-{os.getpid()}").touch()
            while len(list(self.folder.iterdir())) < self.count:
                assert time.monotonic() < deadline, f"alone with {sorted(path.name for path in self.folder.iterdir())}"
                time.sleep(0.1)
            self.met = True
        return batch


class KillAt:
    """SIGKILL this process (or the one whose pid is in `pid_file`) at its `call`-th training batch, once."""

    def __init__(self, call: int, marker: str, rank: int = 0, pid_file: str = "") -> None:
        self.call, self.marker, self.rank, self.pid_file, self.calls = call, Path(marker), rank, pid_file, 0

    def __call__(self, batch: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call and _rank() == self.rank and not self.marker.exists():
            self.marker.touch()
            os.kill(int(Path(self.pid_file).read_text()) if self.pid_file else os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the driver's death ends this process too
        return batch


class KillInWrite:
    """SIGKILL as KillAt does, once half of the `call`-th checkpoint is written."""

    def __init__(self, call: int, marker: str, pid_file: str = "") -> None:
        import manta.training.checkpoint as checkpoint

        kill, write = KillAt(call, marker, pid_file=pid_file), checkpoint._write_state

        def half(path: Path, state: dict[str, object]) -> object:
            found = write(path, state)
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            kill(torch.empty(0))
            path.write_bytes(content)
            return found

        setattr(checkpoint, "_write_state", half)

    def __call__(self, batch: Tensor) -> Tensor:
        return batch


class DamageAt:
    """Rank 0 damages its newest checkpoint (one bit) and kills itself at its `call`-th training batch, once."""

    def __init__(self, call: int, marker: str) -> None:
        self.call, self.marker, self.calls = call, Path(marker), 0

    def __call__(self, batch: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call and _rank() == 0 and not self.marker.exists():
            self.marker.touch()
            runs = sorted(self.marker.parent.glob("????-??-??/*/checkpoints/last/state.pt"), key=os.path.getmtime)
            content = bytearray(runs[-1].read_bytes())
            content[len(content) // 2] ^= 1
            runs[-1].write_bytes(content)
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


class FillAt:
    """Fill the file system of `path` up to `leave` bytes at the `call`-th training batch, once a checkpoint is whole."""

    def __init__(self, call: int, path: str, leave: int, once: str = "*/*/summary.json") -> None:
        self.call, self.path, self.leave, self.once, self.calls = call, Path(path), leave, once, 0

    def __call__(self, batch: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call and not self.path.exists():
            while not list(self.path.parent.glob(self.once)):
                time.sleep(0.01)
            found = os.statvfs(self.path.parent)
            self.path.write_bytes(bytes(found.f_bavail * found.f_frsize - self.leave))
        return batch


class LoseAt:
    """At the `call`-th training batch, once a checkpoint is whole: the checkpoints can only be read any more, or are gone.

    Args:
        folder: of all runs; this is the only one.
    """

    def __init__(self, call: int, folder: str, way: str, once: str = "*/*/summary.json") -> None:
        self.call, self.folder, self.way, self.once, self.calls = call, Path(folder), way, once, 0

    def __call__(self, batch: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call and not (self.folder / "lost").exists():
            while not (found := list(self.folder.glob(self.once))):
                time.sleep(0.01)
            (self.folder / "lost").write_text(str(found[0].parent))
            if self.way == "gone":
                found[0].parent.rename(self.folder / "elsewhere")
            else:
                where = found[0].parent / "checkpoints"
                subprocess.run(["mount", "--bind", where, where], check=True)
                subprocess.run(["mount", "-o", "remount,bind,ro", where], check=True)
        return batch


class PoisonAt:
    """NaN in the `call`-th training batch of one rank."""

    def __init__(self, call: int, rank: int = 0) -> None:
        self.call, self.rank, self.calls = call, rank, 0

    def __call__(self, batch: Tensor) -> Tensor:
        self.calls += 1
        return batch * float("nan") if self.calls == self.call and _rank() == self.rank else batch


class Break:
    """A breakpoint in the researcher's code."""

    def __call__(self, batch: Tensor) -> Tensor:
        answer = 41 + 1
        breakpoint()  # noqa: T100
        assert answer
        return batch


class RaiseAt:
    """A mistake in the researcher's code: ValueError at the `call`-th training batch of one rank."""

    def __init__(self, call: int, rank: int = 0) -> None:
        self.call, self.rank, self.calls = call, rank, 0

    def __call__(self, batch: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call and _rank() == self.rank:
            raise ValueError("the user's own mistake")
        return batch


class Exit:
    """Ends the process as soon as it is built."""

    def __init__(self) -> None:
        sys.exit(0)


class ExitLater:
    """Ends the process in the first training batch."""

    def __call__(self, _batch: Tensor) -> Tensor:
        sys.exit(0)


class _Phase(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(64, 10, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.to(torch.complex64) @ self.phase).abs()


def complex_model(**_: object) -> nn.Module:
    """A model with a complex parameter; takes and ignores the arguments of the default one."""
    return nn.Sequential(nn.Flatten(), _Phase())


class HangAt:
    """Sleep for ever at the `call`-th training batch of one rank, once if there is a `marker`."""

    def __init__(self, call: int, rank: int = 0, marker: str = "") -> None:
        self.call, self.rank, self.marker, self.calls = call, rank, Path(marker or os.devnull), 0

    def __call__(self, batch: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call and _rank() == self.rank and not self.marker.is_file():
            self.marker.touch()
            _sleep()
        return batch


def _sleep() -> None:
    while True:
        time.sleep(3600)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:  # noqa: ARG004
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        _sleep()
        return gradient


class Stuck(nn.Module):
    """A linear model of the digits in which one rank gets stuck at its `call`-th training batch, in a part of the step."""

    def __init__(self, where: str, call: int, rank: int = 0, **_: object) -> None:
        super().__init__()
        self.where, self.call, self.rank, self.calls = where, call, rank, 0
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training and inputs.device.type != "meta"
        outputs: Tensor = self.layer(inputs.flatten(1))
        if self.calls == self.call and _rank() == self.rank:
            if self.where == "forward":
                _sleep()
            elif self.where == "backward":
                return _Backward.apply(outputs)  # type: ignore[no-any-return]
            elif self.where == "native":  # a mutex locked twice: no signal gets it out of there
                mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
                library.pthread_mutex_lock(mutex)
                library.pthread_mutex_lock(mutex)
            elif self.where == "collective":  # what the other rank never sends
                dist.recv(torch.zeros(1), src=1 - self.rank)
        return outputs


class _Fragile(Dataset[Any]):
    """Samples whose process, if it is one of a DataLoader's, is killed at its `call`-th sample."""

    def __init__(self, samples: TensorSet, call: int, rank: int) -> None:
        self.samples, self.call, self.mine, self.calls = samples, call, rank == _rank(), 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.calls += 1
        if self.mine and self.calls == self.call and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is used up
        inputs, targets = self.samples.batch(torch.tensor([index]))
        return inputs[0], int(targets[0])


def fragile_digits(call: int, rank: int = 0, split_seed: int = 0) -> Splits:
    """The digits as samples that are loaded one by one."""
    splits = digits(split_seed)
    assert isinstance(splits.train, TensorSet)
    return Splits(_Fragile(splits.train, call, rank), splits.val, splits.test)


class Hungry(nn.Module):
    """A model with batch statistics and dropout that runs out of memory with more than `most` samples at a time."""

    def __init__(self, most: int, eval_most: int = 10**9, rank: int | None = None, **_: object) -> None:
        super().__init__()
        self.most, self.eval_most, self.rank = most, eval_most, rank
        self.layers = nn.Sequential(
            nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.Dropout(0.2), nn.Linear(32, 10)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        most = self.most if self.training else self.eval_most
        if len(inputs) > most and self.rank in (None, _rank()) and inputs.device.type != "meta":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")
        outputs: Tensor = self.layers(inputs)
        return outputs
