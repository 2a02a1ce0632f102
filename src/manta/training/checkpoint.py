"""Checkpoints of one run: complete or absent, `last` and `best` always there, written beside training.

checkpoints/step-00000120/state.pt     everything a resume needs; loads with weights_only=True
checkpoints/step-00000120/meta.json    step, epoch, metrics, world size
checkpoints/last, checkpoints/best     links
"""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch

from manta.errors import MantaError
from manta.runs import META, finite, point
from manta.runs import find_checkpoint as find_checkpoint

STATE = "state.pt"
FORMAT = 1


class CheckpointWriter:
    """Writes the checkpoints of rank 0 into `folder`, keeping the `keep` newest and the best.

    A checkpoint is written aside, flushed to disk, then renamed into place, so a reader never sees half a one.
    """

    def __init__(self, folder: Path, keep: int, asynchronous: bool) -> None:
        self.folder, self.keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob(".writing-*"):
            left_over.unlink() if left_over.is_symlink() else shutil.rmtree(left_over, ignore_errors=True)
        self._pool = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None

    def save(self, state: dict[str, Any], meta: dict[str, Any], best: bool, published: Callable[[], None]) -> None:
        """Publish a checkpoint; with asynchronous writing, wait only for the one before.

        Args:
            state: independent of the live training state (see `parallel.whole`).
            best: it is the best so far.
            published: called once it is whole and `last` names it; what speaks of it is written then, not before.
        """
        self.wait()
        if self._pool is None:
            self._write(state, meta, best, published)
        else:
            self._pending = self._pool.submit(self._write, state, meta, best, published)

    def wait(self) -> None:
        """Return when what was saved is on disk; raises what the write raised."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()

    def _write(self, state: dict[str, Any], meta: dict[str, Any], best: bool, published: Callable[[], None]) -> None:
        name = f"step-{meta['step']:08d}"
        final, aside = self.folder / name, self.folder / f".writing-{name}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        with open(aside / STATE, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        size = (aside / STATE).stat().st_size
        _write_json(aside / META, {**meta, "format": FORMAT, "files": {STATE: size}})
        # Only one that no `last` pointed to when its writer died is ever written again.
        if final.exists():
            replaced = self.folder / f".writing-replaced-{name}"
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
            aside.rename(final)
            shutil.rmtree(replaced)
        else:
            aside.rename(final)
        _sync_folder(self.folder)
        if best:  # first: whoever finds this `last` finds the `best` that its state speaks of
            self._link("best", name)
        self._link("last", name)
        published()
        self._retire()

    def _link(self, link: str, name: str) -> None:
        point(self.folder / link, name)

    def _retire(self) -> None:
        linked = {(self.folder / link).resolve().name for link in ("last", "best")}
        steps = sorted(path for path in self.folder.glob("step-*") if path.is_dir())
        for path in steps[: -self.keep]:
            if path.name not in linked:
                shutil.rmtree(path)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(finite(value), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, meta) of a checkpoint directory, on the CPU. Runs no code from the file.

    Raises:
        MantaError: it is of another format, or not a whole checkpoint.
    """
    try:
        meta = json.loads((path / META).read_text())
        if meta.get("format") != FORMAT:
            raise MantaError(
                f"Checkpoint {path} has format {meta.get('format')!r}; this version of Manta reads {FORMAT}."
            )
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except (OSError, ValueError, EOFError, RuntimeError, AttributeError, LookupError, PickleError) as error:
        raise MantaError(f"Checkpoint {path} cannot be read: {error}") from error
    return state, meta
