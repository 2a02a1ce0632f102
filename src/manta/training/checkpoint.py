"""The checkpoints of a run being written, beside training, and read back. `manta.checkpoints` has the layout."""

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from pickle import PickleError
from typing import IO, Any

import torch

from manta.checkpoints import FORMAT, REPLACED, STATE, Damaged, file_hash, finish_replacing, sizes, sync_folder, verify
from manta.errors import MantaError
from manta.runs import META, exchange, finite, point, short
from manta.runs import find_checkpoint as find_checkpoint

_PARTS = {"learner": dict, "progress": dict, "ranks": list, "metrics_bytes": int}


class CheckpointWriter:
    """Writes the checkpoints of rank 0 into `folder`, keeping the `keep` newest and the best.

    A checkpoint is written aside, flushed to disk, then renamed into place, so a reader never sees half a one. The links
    follow, and only when they are on disk too are older ones removed: `last` and `best` name whole ones at any moment.
    """

    def __init__(self, folder: Path, keep: int, asynchronous: bool) -> None:
        self.folder, self.keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        finish_replacing(folder)
        for left_over in folder.glob(".writing-*"):
            left_over.unlink() if left_over.is_symlink() else shutil.rmtree(left_over, ignore_errors=True)
        self._pool = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None

    def save(
        self,
        state: dict[str, Any],
        meta: dict[str, Any],
        best: bool,
        published: Callable[[], None],
        files: Path | None = None,
    ) -> None:
        """Publish a checkpoint; with asynchronous writing, wait only for the one before.

        Args:
            state: independent of the live training state (see `parallel.whole`).
            best: it is the best so far.
            published: called once it is whole and `last` names it; what speaks of it is written then, not before.
            files: a folder of other files that are moved into it.
        """
        self.wait()
        if self._pool is None:
            self._write(state, meta, best, published, files)
        else:
            self._pending = self._pool.submit(self._write, state, meta, best, published, files)

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

    def _write(
        self, state: dict[str, Any], meta: dict[str, Any], best: bool, published: Callable[[], None], files: Path | None
    ) -> None:
        name = f"step-{meta['step']:08d}"
        final, aside = self.folder / name, self.folder / f".writing-{name}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir()
            expected = {STATE: _write_state(aside / STATE, state)}
            expected |= {} if files is None else _take(files, aside)
            _write_json(aside / META, {**meta, "format": FORMAT, "files": expected})
            sync_folder(aside)
            self._put(aside, final)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)  # a full disk has room again
            raise
        sync_folder(self.folder)
        if best:  # first: whoever finds this `last` finds the `best` that its state speaks of
            point(self.folder / "best", name)
        point(self.folder / "last", name)
        sync_folder(self.folder)
        published()
        self._retire()

    def _put(self, aside: Path, final: Path) -> None:
        """Give a finished checkpoint its name, also if that is taken: a step is saved again when a resume validates it."""
        if not final.exists():
            aside.rename(final)
        elif exchange(aside, final):
            shutil.rmtree(aside)
        else:  # killed between these two, `finish_replacing` puts the old one back
            replaced = self.folder / f"{REPLACED}{final.name}"
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
            try:
                aside.rename(final)
            except OSError:
                replaced.rename(final)
                raise
            shutil.rmtree(replaced)

    def _retire(self) -> None:
        linked = {(self.folder / link).resolve().name for link in ("last", "best")}
        steps = sorted(path for path in self.folder.glob("step-*") if path.is_dir())
        for path in steps[: -self.keep]:
            if path.name not in linked:
                shutil.rmtree(path)


class _Hashed:
    """A file being written by torch.save, with the hash of what went into it.

    An exception would come out of torch.save as one that says nothing of the disk, so what the system said is kept.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sha256, self.bytes = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        if self.error is None:
            try:
                self.file.write(data)
                self.sha256.update(data)  # without the GIL, as the write: training goes on meanwhile
            except OSError as error:
                self.error = error
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        pass


def _write_state(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Write and flush to disk; what meta.json says of the file."""
    with open(path, "wb") as file:
        hashed = _Hashed(file)
        torch.save(state, hashed)  # type: ignore[arg-type]
        if hashed.error is not None:
            raise hashed.error
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": hashed.bytes, "sha256": hashed.sha256.hexdigest()}


def _take(files: Path, into: Path) -> dict[str, Any]:
    """Move files into a checkpoint, flushed to disk; what meta.json says of them."""
    found = {}
    for path in sorted(files.iterdir()):
        assert path.is_file() and path.name not in (STATE, META), path
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        found[path.name] = {"bytes": path.stat().st_size, "sha256": file_hash(path.parent, path.name)}
        path.rename(into / path.name)
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(finite(value), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def load_checkpoint(path: Path, verified: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, meta) of a checkpoint directory, on the CPU. Runs no code from the file.

    Args:
        verified: its contents have been compared with their hashes already.

    Raises:
        Damaged: it is not whole, or holds what no checkpoint of Manta does.
        MantaError: it is of a format that this version does not know, or cannot be read now.
    """
    meta = sizes(path) if verified else verify(path)
    try:
        with zipfile.ZipFile(path / STATE) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > meta["files"][STATE]["bytes"]:
            raise Damaged(path, f"{STATE} would unpack to {unpacked:,} bytes; Manta writes nothing compressed")
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except (MemoryError, OSError) as error:
        raise MantaError(f"Checkpoint {short(path)}: {STATE} cannot be read: {error}.") from error
    except PickleError as error:
        raise Damaged(path, f"{STATE} is refused, for it {_reason(error)}") from error
    except (zipfile.BadZipFile, ValueError, EOFError, RuntimeError, AttributeError, LookupError, TypeError) as error:
        if "allocate" in str(error):
            raise MantaError(f"Checkpoint {short(path)}: there is not enough memory for it.") from error
        raise Damaged(path, f"{STATE} is not what Manta writes ({_first_line(error)})") from error
    for name, kind in _PARTS.items():
        if not isinstance(state, dict) or type(state.get(name)) is not kind:
            raise Damaged(path, f"{STATE} is not what Manta writes: it has no {name}")
    return state, meta


def _reason(error: PickleError) -> str:
    """torch's own message goes on to advise how the code in the file could be run."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    what = f" ({found[1]})" if found else ""
    return f"holds more than tensors and plain values{what}, which could run code"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
