"""The process that keeps a run's copy in the bucket up to date: `python -m manta.storage.mirror <arguments as JSON>`.

It says on its output, a JSON string a line, what the user should know; the last line is true or false: whether everything is
in the bucket. When its input closes the run has ended, or the process that trains is gone: the rest is brought then.

At any moment the bucket holds a run that can be resumed. A turn brings, in this order: checkpoints; histories; what `last` and
`best` name (an object `last.link` holds the name); the small files that speak of them, as they were before the turn
looked at the checkpoints; the log of a search. What is gone here is removed there when all of this has come.
"""

import fcntl
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manta.beside import stand_back
from manta.config import Storage
from manta.runs import META, link_or_copy, write_json
from manta.storage.bucket import Away, Bucket

LINK = ".link"
RECORD = ".mirror.json"
"""In a run directory: what of it is in the bucket."""
LOCK = ".mirror.lock"
LOG_OF_SEARCH = "search.jsonl"
SMALL = (".json", ".yaml", ".txt", ".csv", ".md", ".diff")
POLL_S, LONGEST_PAUSE_S = 2.0, 30.0
TRIES = 5

Signature = list[int]
"""Size and time of a file, to see whether it has changed."""


@dataclass
class Seen:
    """What a turn has found in a run directory, by path from there."""

    checkpoints: dict[str, tuple[Path, Signature]] = field(default_factory=dict)
    """Files of checkpoints, held by a name of our own until they are uploaded."""
    others: dict[str, Signature] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    small: dict[str, bytes] = field(default_factory=dict)
    """Contents, as they were before the checkpoints were looked at."""
    sizes: dict[str, int] = field(default_factory=dict)
    """How much of a file belongs to this turn."""
    whole: bool = True
    """Nothing vanished while it was looked at."""


class Mirror:
    """One run directory and its copy in the bucket.

    Args:
        key: of the copy, below the storage's path.
    """

    def __init__(self, run: Path, bucket: Bucket, key: str) -> None:
        self.run, self.bucket, self.key = run, bucket, key
        self.record: dict[str, Any] = _read(run / RECORD)
        self.progressed = time.monotonic()
        """When something last came to the bucket."""

    # --- a turn --------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Bring what has changed; whether everything is there now.

        Raises:
            Away: the bucket is; what has come until then is remembered.
        """
        if not self.run.is_dir():
            return True
        pins = self.run / f".mirror-{os.getpid()}"
        before = dict(self.record)
        try:
            seen = self._look(pins)
            return self._bring(seen)
        finally:
            shutil.rmtree(pins, ignore_errors=True)
            if self.record != before:
                with suppress(OSError):  # of a disk that is full, say: it is brought again
                    write_json(self.run / RECORD, self.record)

    def missing(self) -> list[str]:
        """What is not in the bucket, or not as it is here."""
        seen = self._look(None)
        files = {**seen.others, **{name: signature for name, (_, signature) in seen.checkpoints.items()}}
        changed = [name for name, signature in files.items() if self.record.get(name) != signature]
        return changed + [name for name, target in seen.links.items() if self.record.get(name + LINK) != target]

    def take_as_there(self) -> None:
        """All of it came from the bucket."""
        seen = self._look(None)
        self.record = {**seen.others, **{name: signature for name, (_, signature) in seen.checkpoints.items()}}
        self.record |= {name + LINK: target for name, target in seen.links.items()}
        write_json(self.run / RECORD, self.record)

    def _bring(self, seen: Seen) -> bool:
        for name, (path, signature) in sorted(seen.checkpoints.items(), key=lambda item: item[0].endswith(META)):
            self._upload(name, path, signature)
        whole = seen.whole
        for name, signature in seen.others.items():
            if name not in seen.small and name != LOG_OF_SEARCH:
                try:
                    self._upload(name, self.run / name, signature)
                except OSError:
                    whole = False
        for name, target in seen.links.items():
            if self.record.get(name + LINK) != target:
                self._put(name + LINK, target.encode(), target)
        if not whole:  # what speaks of all this waits until all of this is there
            return False
        for name, content in sorted(seen.small.items(), key=lambda item: Path(item[0]).name == "status.json"):
            self._put(name, content, seen.others[name])
        if LOG_OF_SEARCH in seen.sizes and self.record.get(LOG_OF_SEARCH) != seen.others[LOG_OF_SEARCH]:
            self._upload(LOG_OF_SEARCH, self.run / LOG_OF_SEARCH, seen.others[LOG_OF_SEARCH], seen.sizes[LOG_OF_SEARCH])
        self._point_latest()
        self._remove_the_rest(seen)
        return True

    def _upload(self, name: str, path: Path, signature: Signature, size: int | None = None) -> None:
        if self.record.get(name) != signature:
            self.bucket.put_file(f"{self.key}/{name}", path, size)
            self._came(name, signature)

    def _put(self, name: str, content: bytes, mark: Any) -> None:
        self.bucket.put(f"{self.key}/{name}", content)
        self._came(name, mark)

    def _came(self, name: str, mark: Any) -> None:
        self.record[name] = mark
        self.progressed = time.monotonic()

    def _point_latest(self) -> None:
        """`latest` of the bucket, if it is this run here."""
        latest = self.run.parents[1] / "latest"
        if ":latest" not in self.record and latest.is_symlink() and latest.resolve() == self.run.resolve():
            self.bucket.put(f"latest{LINK}", self.key.encode())
            self.record[":latest"] = self.key

    def _remove_the_rest(self, seen: Seen) -> None:
        """What was brought once and is not here any more, whole folders at once."""
        here = {*seen.checkpoints, *seen.others, *(name + LINK for name in seen.links), ":latest"}
        gone = sorted(set(self.record) - here)
        used = {parent.as_posix() for name in here for parent in Path(name).parents}
        while gone:
            unused = [p.as_posix() for p in Path(gone[0]).parents if p.as_posix() not in used]
            if unused:
                self.bucket.remove_folder(f"{self.key}/{unused[-1]}")
                removed = [name for name in gone if name.startswith(f"{unused[-1]}/")]
            else:
                self.bucket.remove(f"{self.key}/{gone[0]}")
                removed = gone[:1]
            for name in removed:
                del self.record[name]
            gone = [name for name in gone if name not in removed]

    # --- looking -------------------------------------------------------------------------------------------------

    def _look(self, pins: Path | None) -> Seen:
        """Everything that belongs into the bucket.

        Args:
            pins: where files of checkpoints that have changed get a second name; None: they do not.
        """
        seen = Seen()
        log = self.run / LOG_OF_SEARCH
        if log.is_file():  # it never speaks of a checkpoint that is not written yet: its size now, checkpoints after it
            seen.others[LOG_OF_SEARCH] = _signature(log)
            seen.sizes[LOG_OF_SEARCH] = seen.others[LOG_OF_SEARCH][0]
        self._look_into("", seen, pins)
        return seen

    def _look_into(self, below: str, seen: Seen, pins: Path | None) -> None:
        folder = self.run / below
        try:
            for _ in range(TRIES):
                files, folders, links = _entries(folder)
                if META in files and "checkpoints" not in folders:
                    self._hold(below, files, seen, pins)
                    return
                if all((folder / target).exists() for target in links.values()):
                    break  # else `last` was pointed on between two looks, or it has been damaged by hand
            for name in files:
                self._look_at(f"{below}{name}", seen, pins)
        except FileNotFoundError:
            seen.whole = seen.whole and not folder.is_dir()  # its owner has retired or replaced it
            return
        named = {name for name, target in links.items() if (folder / target / META).exists()}
        for name in folders:
            self._look_into(f"{below}{name}/", seen, pins)
        for name, target in links.items():
            if name not in named or f"{below}{target}/{META}" in seen.checkpoints:
                seen.links[f"{below}{name}"] = target
            else:
                seen.whole = False

    def _look_at(self, path: str, seen: Seen, pins: Path | None) -> None:
        """A file that is none of a checkpoint."""
        if path == LOG_OF_SEARCH:
            return
        signature = _signature(self.run / path)
        if path.endswith(SMALL) and pins is not None and self.record.get(path) != signature:
            seen.small[path] = (self.run / path).read_bytes()
        seen.others[path] = signature

    def _hold(self, below: str, files: list[str], seen: Seen, pins: Path | None) -> None:
        """Files of a checkpoint: all of them, or none if it is retired meanwhile."""
        held = {}
        for name in files:
            path, signature = self.run / below / name, _signature(self.run / below / name)
            if pins is not None and self.record.get(f"{below}{name}") != signature:
                pin = pins / below / name
                pin.parent.mkdir(parents=True, exist_ok=True)
                pin.unlink(missing_ok=True)
                link_or_copy(path, pin)
                path = pin
            held[f"{below}{name}"] = path, signature
        seen.checkpoints.update(held)


def _entries(folder: Path) -> tuple[list[str], list[str], dict[str, str]]:
    """Files, folders and links in a folder, but for hidden ones: those are of the moment."""
    files, folders, links = [], [], {}
    with os.scandir(folder) as found:
        for entry in found:
            if entry.name.startswith("."):
                continue
            if entry.is_symlink():
                links[entry.name] = os.readlink(entry.path)
            elif entry.is_dir():
                folders.append(entry.name)
            elif entry.is_file():
                files.append(entry.name)
    return sorted(files), sorted(folders), links


def _signature(path: Path) -> Signature:
    found = os.lstat(path)
    return [found.st_size, found.st_mtime_ns]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):  # everything is brought again
        return {}
    return found if isinstance(found, dict) else {}


# --- the process -----------------------------------------------------------------------------------------------------


def follow(mirror: Mirror, end: threading.Event, finish_s: float, say: Callable[[str], None]) -> bool:
    """Turn after turn until the end; whether everything is in the bucket then."""
    failures, ended = 0, None
    while True:
        ending, began, whole = end.is_set(), time.monotonic(), False
        if ending and ended is None:
            ended = began
        try:
            whole = mirror.turn()
            if failures:
                say(f"Storage {mirror.bucket.url} answers again.")
            failures = 0
        except Away as error:
            failures += 1
            if failures == 1:
                say(f"Storage {mirror.bucket.url} does not answer ({error}). Training goes on, retrying.")
        except Exception as error:  # of our own disk, which training meets too, or one that nobody thought of
            traceback.print_exc()
            failures += 1
            if failures == 1:
                say(f"{mirror.run} cannot be brought to {mirror.bucket.url}: {error}. Retrying.")
        if ended is not None:
            if whole:
                return True
            if time.monotonic() - max(ended, mirror.progressed) > finish_s:
                return False
        pause = POLL_S * 2**failures if failures else max(POLL_S, time.monotonic() - began)
        if ended is None:
            end.wait(min(pause, LONGEST_PAUSE_S))
        else:
            time.sleep(min(pause / 8, 5.0))


def main() -> None:
    stand_back()
    arguments = json.loads(sys.argv[1])
    storage, end = Storage(**arguments["storage"]), threading.Event()

    def say(what: Any) -> None:
        with suppress(OSError):  # perhaps nobody listens any more
            print(json.dumps(what), flush=True)

    def listen() -> None:
        for _ in sys.stdin:
            break
        end.set()

    threading.Thread(target=listen, daemon=True).start()
    run = Path(arguments["run"])
    with open(run / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # that of a launch that was killed may still be at work
        for left_over in run.glob(".mirror-*/"):
            shutil.rmtree(left_over, ignore_errors=True)
        say(follow(Mirror(run, Bucket(storage), arguments["key"]), end, storage.finish_s, say))


if __name__ == "__main__":
    main()
