"""Batch transforms that break things on purpose, named by a test's `data.transforms.train`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Slow:
    """Each training batch takes a little while, so that a test can act in the middle of a run."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, batch: Tensor) -> Tensor:
        time.sleep(self.seconds)
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
