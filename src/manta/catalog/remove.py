"""`rm`: deletes run directories, and nothing else."""

import os
import shutil
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from manta import runs
from manta.catalog.details import disk_usage
from manta.catalog.entries import Entry, is_locked, newest, parts
from manta.catalog.settings import Defaults
from manta.errors import MantaError
from manta.runs import RunDir

STARTING_S = 60


def check(entry: Entry, storage: Path) -> None:
    """Refuse what must not be deleted.

    Raises:
        MantaError: it is outside the storage, no run directory, a part of a search, or being trained.
    """
    path, root = entry.path, storage.resolve()
    if entry.part:
        raise MantaError(f"{entry} is a part of a search, which would miss it. Delete the search as a whole.")
    if path.parent.parent.resolve() != root or path.is_symlink() or path.parent.is_symlink():
        raise MantaError(
            f"{entry} is not one of the run directories <date>/<time> below {runs.short(storage)}: nothing is deleted. "
            f"Name its storage if it is meant: --storage {path.parent.parent}"
        )
    if not entry.status and time.time() - path.stat().st_mtime < STARTING_S:
        raise MantaError(f"{entry} was made a moment ago and may be about to start. Try again in a minute.")
    if entry.status.get("state") == runs.RUNNING and entry.is_alive():
        raise MantaError(f"{entry} is being trained right now. Stop it first.")
    if any(is_locked(RunDir(folder)) for folder in (path, path / "best", *parts(path))):
        raise MantaError(f"{entry} is being trained right now. Stop it first.")


def sizes(entries: list[Entry]) -> list[int]:
    return [disk_usage(entry.path) for entry in entries]


def remove(entry: Entry, storage: Path) -> None:
    """Delete one run: first its name, in one step, then what is in it; links in it are deleted, not followed.

    Raises:
        MantaError: it is being trained, or may not be deleted.
    """
    check(entry, storage)
    aside = entry.path.with_name(f".deleting-{entry.path.name}-{os.getpid()}")
    try:
        with ExitStack() as stack:
            if entry.run.lock_file.is_file():
                stack.enter_context(runs.writing(entry.run, wait_s=0))
            entry.path.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise MantaError(f"{entry} cannot be deleted: {error.strerror} ({error.filename}).") from error
    with suppress(OSError):  # other runs are in it
        entry.path.parent.rmdir()


def mend_latest(storage: Path, defaults: Defaults) -> None:
    """`latest` names the newest run that is left; nothing is left, no link."""
    link = storage / "latest"
    if not link.is_symlink() or link.exists():
        return
    try:
        found = newest(storage, defaults)
    except MantaError:
        link.unlink()
        return
    runs.point_latest(storage, found.path)
