"""Checkpoints as files: which are whole, and which one a run continues from. Imports nothing heavy.

checkpoints/step-00000120/state.pt     everything a resume needs; loads with weights_only=True
checkpoints/step-00000120/meta.json    step, epoch, metrics, world size; size and SHA-256 of the other files
checkpoints/last, checkpoints/best     links
checkpoints/damaged-step-00000120      found damaged when the run went on, and put aside

What is read here may come from a stranger: every type is checked, and no link is followed out of the folder.
"""

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from manta.errors import MantaError
from manta.runs import META, RunDir, find_checkpoint, point, short

FORMAT = 2
"""Of meta.json. In format 1 `files` had sizes only; both are read."""
STATE = "state.pt"
MOST_META_BYTES = 16 * 2**20
BUFFER_BYTES = 2**20
REPLACED = ".writing-replaced-"  # and the name of a checkpoint that is being replaced
_NAME = re.compile(r"(?:kept-\d+-)?step-(\d+)")
_REQUIRED = {"step": int, "epoch": int, "metrics": dict, "files": dict}
_OPTIONAL = {"metrics_bytes": int, "world_size": int, "exploits": int, "validation": dict}
# Errors that say something about the files themselves; others (permissions, a lost network disk) may pass.
_OF_THE_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)

T = TypeVar("T")


class Damaged(MantaError):
    """A checkpoint that is not, or not any more, what Manta writes."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"Checkpoint {short(path)} cannot be used: {why}.")
        self.path, self.why = path, why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.why)


# --- one checkpoint ----------------------------------------------------------------------------------------------


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint directory; `files` is {name: {"bytes", "sha256"}}, None = an older one without hashes.

    Raises:
        Damaged: it is not there, or not what Manta writes.
        MantaError: it is of a format that this version does not know.
    """
    if _size(path, META) > MOST_META_BYTES:
        raise Damaged(path, f"{META} has {(path / META).stat().st_size:,} bytes, far more than Manta writes")
    try:
        meta = json.loads((path / META).read_bytes())
    except OSError as error:
        raise _unreadable(path, META, error) from error
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"{META} is not JSON") from error
    version = meta.get("format") if isinstance(meta, dict) else None
    if type(version) is not int:
        raise Damaged(path, f"{META} does not say which format it has")
    if not 1 <= version <= FORMAT:
        raise MantaError(
            f"Checkpoint {short(path)} has format {version}; this version of Manta reads 1 to {FORMAT}. Use the version "
            "that wrote it (the commit is in provenance.json of its run)."
        )
    for key, kind in (_REQUIRED | _OPTIONAL).items():
        wrong = type(meta[key]) is not kind if key in meta else key in _REQUIRED
        if wrong or (kind is int and meta.get(key, 0) < 0):
            raise Damaged(path, f"{META} is not what Manta writes: {key} is {_shown(meta.get(key))}")
    meta["files"] = {name: _expected(path, name, entry) for name, entry in meta["files"].items()}
    return meta


def _expected(path: Path, name: str, entry: Any) -> dict[str, Any]:
    """What meta.json says of a file, in the present format."""
    entry = {"bytes": entry, "sha256": None} if type(entry) is int else entry
    sound = isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str | None)
    if not sound or name in ("", ".", "..", META) or "/" in name or not name.isprintable():
        raise Damaged(path, f"{META} is not what Manta writes: files has {_shown(name)}: {_shown(entry)}")
    return entry


def verify(path: Path, contents: bool = True) -> dict[str, Any]:
    """meta.json of a checkpoint directory that is whole.

    Args:
        contents: read all files and compare their hashes; else only their sizes.

    Raises:
        Damaged: it is not.
        MantaError: as `read_meta`.
    """
    meta = read_meta(path)
    for name, expected in {STATE: None, **meta["files"]}.items():
        size = _size(path, name)
        if expected is None:
            raise Damaged(path, f"{META} says nothing of {name}")
        if size != expected["bytes"]:
            raise Damaged(path, f"{name} has {size:,} bytes instead of {expected['bytes']:,}")
        if contents and expected["sha256"] not in (None, file_hash(path, name)):
            raise Damaged(path, f"the content of {name} is not what was written (its SHA-256 differs)")
    return meta


def sizes(path: Path) -> dict[str, Any]:
    """As `verify`, without reading the contents."""
    return verify(path, contents=False)


def file_hash(path: Path, name: str) -> str:
    """SHA-256 of a file of a checkpoint."""
    found, buffer = hashlib.sha256(), memoryview(bytearray(BUFFER_BYTES))
    try:
        with open(path / name, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                found.update(buffer[:count])
    except OSError as error:
        raise _unreadable(path, name, error) from error
    return found.hexdigest()


def _size(path: Path, name: str) -> int:
    """Of a plain file of a checkpoint: no link, no pipe, and not outside of the folder that the checkpoint is in."""
    try:
        found = os.lstat(path / name)
        inside = path.resolve(strict=True).is_relative_to(path.parent.resolve())
    except (OSError, RuntimeError) as error:
        raise _unreadable(path, name, error) from error
    if not inside:
        raise Damaged(path, "it is a link that leads out of its folder")
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(path, f"{name} is {'a link' if stat.S_ISLNK(found.st_mode) else 'no file'}")
    return found.st_size


def _unreadable(path: Path, name: str, error: Exception) -> MantaError:
    if isinstance(error, OSError) and error.errno not in _OF_THE_FILE:
        return MantaError(f"Checkpoint {short(path)}: {name} cannot be read: {error.strerror}.")
    if isinstance(error, FileNotFoundError):
        return Damaged(path, f"{name} is missing")
    return Damaged(path, f"{name} cannot be read ({getattr(error, 'strerror', None) or error})")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# --- those of a run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice(Generic[T]):
    """Where a run goes on."""

    path: Path
    found: T
    """What `look` said of it."""
    damaged: dict[str, str]
    """Names of checkpoints that are not whole, and why."""


def choose(run: RunDir, look: Callable[[Path], T]) -> Choice[T] | None:
    """`last`, or the newest whole checkpoint if that is damaged or not there; None if the run has not written one yet.

    Args:
        look: given a checkpoint directory; raises `Damaged` if it is not whole. (`verify`, say.)

    Raises:
        MantaError: there were some, and none is whole; or `last` has a format that this version does not know.
    """
    damaged: dict[str, str] = {}
    named = find_checkpoint(run.checkpoints, "last")
    if named is not None:
        try:
            return Choice(named, look(named), damaged)
        except Damaged as error:
            damaged[named.name] = error.why
    chosen: tuple[Path, T] | None = None
    for path in _newest_first(run.checkpoints):
        if path.name not in damaged:
            try:
                if chosen is None:
                    chosen = path, look(path)
                else:
                    verify(path)
            except Damaged as error:
                damaged[path.name] = error.why
    if chosen is not None:
        return Choice(*chosen, damaged)
    _refuse_if_gone(run, damaged)
    return None


def _newest_first(folder: Path) -> list[Path]:
    steps = [(int(match[1]), path) for path in folder.glob("*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(steps, reverse=True)]


def _refuse_if_gone(run: RunDir, damaged: dict[str, str]) -> None:
    """A run that had a checkpoint never begins again by itself.

    Raises:
        MantaError: it had.
    """
    left = sorted(path.name for path in run.checkpoints.glob("*") if not path.name.startswith("."))
    step = run.read("summary.json").get("step")
    if not left and not step:
        return
    there = " and ".join(str(path) for path in (run.checkpoints, run.path / "summary.json") if path.exists())
    again = f"to begin again with step 0, rename {there}, then resume."
    if damaged or left:
        listed = "; ".join(f"{name}: {why}" for name, why in sorted(damaged.items())) or f"there is {', '.join(left)}"
        raise MantaError(f"No checkpoint of {run} is whole ({listed}). Put a whole one back, or {again}")
    raise MantaError(
        f"The checkpoints of {run} are gone (its summary.json speaks of step {step}). Put {run}/checkpoints back, or {again}"
    )


def continue_from(run: RunDir, look: Callable[[Path], T], say: Callable[[str], None]) -> Choice[T] | None:
    """`choose`, and make the folder agree: damaged ones are put aside, `last` names the one to go on from.

    Only for the one process that writes the run.

    Args:
        say: told in one line if it is not the one that `last` named.
    """
    finish_replacing(run.checkpoints)
    _make_links(run)
    choice = choose(run, look)
    if choice is None or find_checkpoint(run.checkpoints, "last") == choice.path:
        return choice
    said = [put_aside(run, name, why) for name, why in choice.damaged.items()]
    if not said:
        said = ["checkpoints/last names no whole checkpoint"]
    point(run.checkpoints / "last", choice.path.name)
    sync_folder(run.checkpoints)
    say(f"{run}: {'; '.join(said)}; continuing from {choice.path.name}.")
    return choice


def _make_links(run: RunDir) -> None:
    """Where a copy of the run has directories instead of the links `last` and `best`."""
    for path in (run.checkpoints / "last", run.checkpoints / "best"):
        if path.is_dir() and not path.is_symlink():
            try:
                name = f"step-{read_meta(path)['step']:08d}"
            except Damaged as error:
                put_aside(run, path.name, error.why)
                continue
            taken = os.path.lexists(run.checkpoints / name)
            path.rename(run.checkpoints / (f"copied-{path.name}" if taken else name))
            point(path, name)


def put_aside(run: RunDir, name: str, why: str) -> str:
    """Keep a damaged checkpoint under a name that is never picked; what to say of it."""
    folder, kept, count = run.checkpoints, f"damaged-{name}", 1
    ours = _NAME.fullmatch(name) or name in ("last", "best")
    if not ours or not os.path.lexists(folder / name):
        return f"checkpoint {name} is gone"
    while os.path.lexists(folder / kept):
        count += 1
        kept = f"damaged-{name}-{count}"
    (folder / name).rename(folder / kept)
    return f"checkpoint {name} is damaged ({why}), kept as {kept}"


def match_best(run: RunDir, progress: dict[str, Any], metric: str, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Make `best` name the checkpoint that the state of `last` speaks of; the best from here on.

    If that one is not whole any more, it is `last` itself if that was validated, else the next to be validated.

    Args:
        progress: of the state of `last`.
    """
    best, folder = progress["best"], run.checkpoints
    if best is None:
        return None
    name = Path(best.get("checkpoint", f"step-{best['step']:08d}")).name
    last, validation = find_checkpoint(folder, "last"), progress["validation"]
    try:
        if last is None or name != last.name:  # that one has been looked at
            verify(folder / name)
    except Damaged as error:
        said = put_aside(run, name, error.why)
        best, name = None, ""
        value = validation["metrics"].get(metric) if validation.get("step") == progress["step"] else None
        if last is not None and value is not None and math.isfinite(value):
            best, name = {"value": value, **validation}, last.name
        say(f"{run}: best {said}; from here on it is {name or 'the next to be validated'}.")
    if best is None:
        (folder / "best").unlink(missing_ok=True)
    elif not (folder / "best").is_symlink() or os.readlink(folder / "best") != name:
        point(folder / "best", name)
    sync_folder(folder)
    return best


# --- writing -----------------------------------------------------------------------------------------------------


def finish_replacing(folder: Path) -> None:
    """After a kill between the two renames that replace a checkpoint: the old one gets its name back."""
    for old in folder.glob(f"{REPLACED}*"):
        final = folder / old.name.removeprefix(REPLACED)
        if not final.exists():
            old.rename(final)


def sync_folder(folder: Path) -> None:
    """Names made or changed in a folder outlive a power failure from here on."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
