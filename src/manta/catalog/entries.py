"""Run directories as rows: what each is, how it stands, and finding the one that is meant. Damage is said, not raised."""

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from manta import runs
from manta.catalog.settings import Defaults, Differences, Flat, read_config, read_overrides
from manta.config import SCHEMA_VERSION
from manta.errors import MantaError, nearest
from manta.runs import RunDir
from manta.search.record import STOPPED

DIED, DAMAGED = "died", "damaged"
STATES = (runs.RUNNING, runs.FINISHED, STOPPED, runs.FAILED, runs.INTERRUPTED, DIED, DAMAGED)
SILENT_S = 600  # a process on another host that holds no lock and has written nothing for so long is gone
SPACE = "space.yaml"  # makes a directory a search's; as in search/space.py, which takes long to load
FILES = ("config.yaml", "status.json", "overrides.txt", "provenance.json")
_MULTIRUN = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-multirun$")
_DAY, _TIME = re.compile(r"\d{4}-\d\d-\d\d$"), re.compile(r"\d\d-\d\d-\d\d(-|$)")


@dataclass
class Entry:
    """One run directory, read when asked."""

    path: Path
    defaults: Defaults
    part: str | None = None
    """trial or refit: of which part of a search."""
    problems: list[str] = field(default_factory=list)
    """What could not be read, in words."""

    def __str__(self) -> str:
        return runs.short(self.path)

    @property
    def run(self) -> RunDir:
        return RunDir(self.path)

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the run; {} if it is missing or damaged, which is then a problem."""
        try:
            found = json.loads((self.path / name).read_bytes())
            if isinstance(found, dict):
                return found
            self._problem(f"{name} is damaged")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._problem(f"{name} is {'unreadable' if isinstance(error, OSError) else 'damaged'}")
        return {}

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    @cached_property
    def status(self) -> dict[str, Any]:
        found = self.json("status.json")
        if not found:
            self._problem("no status.json")
        return found

    @cached_property
    def summary(self) -> dict[str, Any]:
        return self.json("summary.json")

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Of the last attempt."""
        attempt = self.status.get("attempts") or 1
        return self.json(f"provenance-{attempt}.json") or self.json("provenance.json")

    @cached_property
    def config(self) -> Flat:
        try:
            found = read_config((self.path / "config.yaml").read_text())
        except FileNotFoundError:
            self._problem("no config.yaml")
            return {}
        except (OSError, ValueError) as error:
            self._problem(f"config.yaml is {'unreadable' if isinstance(error, OSError) else 'damaged'}")
            return {}
        if found.get("schema_version") != SCHEMA_VERSION:
            self._problem(f"configuration schema {found.get('schema_version')}, this code reads {SCHEMA_VERSION}")
        return found

    @cached_property
    def overrides(self) -> list[str]:
        try:
            return read_overrides((self.path / "overrides.txt").read_text())
        except (OSError, ValueError):
            return []

    @cached_property
    def differences(self) -> Differences:
        found = self.defaults.differences(self.config, self.overrides)
        if self.part:  # its search shared the resources out
            return Differences(found.choices, {k: v for k, v in found.values.items() if not k.startswith("scaling.")})
        return found

    # --- what it is ------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """run, multirun (a job of one), search, trial or refit."""
        if self.part:
            return self.part
        if is_search(self.path):
            return "search"
        return "multirun" if _MULTIRUN.search(self.group) else "run"

    @property
    def name(self) -> str:
        return str(self.config.get("name") or "")

    @property
    def group(self) -> str:
        return str(self.config.get("group") or "")

    @property
    def tags(self) -> list[str]:
        found = self.config.get("tags")
        return [str(tag) for tag in found] if isinstance(found, list) else []

    @cached_property
    def state(self) -> str:
        """As in status.json, but `died` if no process is behind it any more, and `damaged` if it cannot be told."""
        state = self.status.get("state")
        if state == runs.RUNNING:
            return runs.RUNNING if self.is_alive() else DIED
        return str(state) if state else DAMAGED

    def is_alive(self) -> bool:
        """Whether a process trains this run, or is about to."""
        if is_locked(self.run) or (self.kind == "search" and any(is_locked(RunDir(p)) for p in parts(self.path))):
            return True
        if self.status.get("host") == socket.gethostname():
            return _lives(self.status.get("pid"), self._time("attempt_started"))
        return time.time() - self._last_write() < SILENT_S

    def _last_write(self) -> float:
        """When the run last wrote something."""
        times = []
        for name in ("metrics.jsonl", "train.log", "status.json", "search.jsonl"):
            try:
                times.append((self.path / name).stat().st_mtime)
            except OSError:
                continue
        return max(times, default=0.0)

    # --- results and times -------------------------------------------------------------------------------------------

    @property
    def objective(self) -> dict[str, Any]:
        """{"metric", "mode", "value"} as far as known."""
        found = self.summary.get("objective")
        if isinstance(found, dict):
            return found
        known = {key: self.config.get(f"objective.{key}") for key in ("metric", "mode")}
        return {**known, "value": None}

    @property
    def value(self) -> float | None:
        """The best value of the objective."""
        found = self.objective.get("value")
        return float(found) if isinstance(found, int | float) else None

    def metrics(self, which: str) -> dict[str, Any]:
        """Of `best`, `last` or `test`."""
        found = self.summary.get({"last": "metrics"}.get(which, which))
        found = found.get("metrics") if which == "best" and isinstance(found, dict) else found
        return found if isinstance(found, dict) else {}

    def _time(self, name: str) -> float | None:
        try:
            return datetime.fromisoformat(self.status[name]).timestamp()
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def started(self) -> float | None:
        """Seconds since 1970; by its name if nothing else tells."""
        if (found := self._time("started")) is not None:
            return found
        try:
            return datetime.strptime(f"{self.path.parent.name} {self.path.name[:8]}", "%Y-%m-%d %H-%M-%S").timestamp()
        except ValueError:
            return None

    @property
    def duration(self) -> float | None:
        """Seconds of the last attempt."""
        start = self._time("attempt_started")
        end = time.time() if self.state == runs.RUNNING else self._time("finished") or self._last_write()
        return None if start is None else max(end - start, 0.0)

    @property
    def error(self) -> str:
        """Why it failed, in one line."""
        lines = str(self.status.get("error") or "").strip().splitlines()
        return " ".join(" ".join(lines[-1:] if lines and lines[0].startswith("Traceback") else lines).split())

    def read_all(self) -> None:
        """Meet all problems."""
        _ = self.config, self.status, self.summary


def is_locked(run: RunDir) -> bool:
    """Whether a process trains or launches this run; False where the locks cannot be looked at."""
    try:
        return runs.is_locked(run) or runs.launcher(run) is not None
    except OSError:
        return False


def _lives(pid: Any, since: float | None) -> bool:
    """Whether a process of this host lives, and is the one that was there at a time."""
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
        booted = next(
            line.split()[1] for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
        )
    except (OSError, TypeError, ValueError, StopIteration):
        return False
    born = int(booted) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] not in "ZX" and (since is None or born < since + 2)


def is_search(path: Path) -> bool:
    """Whether a directory is a search's; False for one that cannot be looked into."""
    return os.path.isfile(path / SPACE)


def parts(search: Path) -> list[Path]:
    """The trials and refits of a search."""
    found = [*_folders(search / "trials"), *(run for trial in _folders(search / "refit") for run in _folders(trial))]
    return [path for path in found if any(os.path.isfile(path / name) for name in FILES[:2])]


def _folders(path: Path, pattern: "re.Pattern[str] | None" = None) -> list[Path]:
    """Directories in a directory, by name; links to them too, for runs that were moved to another disk."""
    try:
        with os.scandir(path) as found:
            names = [entry.name for entry in found if entry.is_dir()]
    except OSError:
        return []
    return [path / name for name in sorted(names) if not name.startswith(".") and (not pattern or pattern.match(name))]


def is_run(path: Path) -> bool:
    """Whether a directory is a run's, whole or not: an empty one is of a run that was killed at once."""
    names = set(os.listdir(path))
    return bool(names & set(FILES)) or (not names and not path.name.endswith("-multirun"))


def _age(path: Path) -> tuple[str, str, list[Any]]:
    """Orders run directories by time; of one second by number."""
    tail = [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", path.name[8:])]
    return path.parent.name, path.name[:8], tail


def scan(storage: Path, defaults: Defaults, trials: bool = False) -> Iterator[Entry]:
    """All runs, the newest first.

    Args:
        trials: after each search, its trials and refits too.
    """
    for day in reversed(_folders(storage, _DAY)):
        for path in sorted(_folders(day, _TIME), key=_age, reverse=True):
            try:
                if not is_run(path):
                    continue
            except OSError as error:
                yield Entry(path, defaults, problems=[f"unreadable: {error.strerror}"])
                continue
            yield Entry(path, defaults)
            if trials and is_search(path):
                yield from (Entry(part, defaults, part_of(part)) for part in parts(path))


def part_of(path: Path) -> str | None:
    """trial or refit, if it is one of a search."""
    if path.parent.name == "trials" and is_search(path.parents[1]):
        return "trial"
    known = path.parents[1].name == "refit" and is_search(path.parents[2])
    return "refit" if known else None


def newest(storage: Path, defaults: Defaults) -> Entry:
    """The run that `latest` means.

    Raises:
        MantaError: there is none.
    """
    link = storage / "latest"
    if link.is_dir():
        return Entry(link.resolve(), defaults)
    found = next(scan(storage, defaults), None)
    if found is None:
        raise MantaError(f"There is no run under {runs.short(storage)} yet. Start one: python train.py")
    return found


def pick(spec: str, storage: Path, defaults: Defaults) -> Entry:
    """The run that is meant: `latest`, a path (from here or below the storage), or a unique part of its date, time and name.

    Raises:
        MantaError: there is none, or several.
    """
    if spec == "latest":
        return newest(storage, defaults)
    for path in (Path(spec).expanduser(), storage / spec):
        if path.is_dir() and spec.strip("./"):
            path = path.resolve()
            if any((path / name).exists() for name in FILES[:2]) or (
                path.parents[1] == storage.resolve() and is_run(path)
            ):
                return Entry(path, defaults, part_of(path))
    known = {f"{entry.path.parent.name}/{entry.path.name}": entry for entry in scan(storage, defaults)}
    wanted = spec.strip("/")
    found = [entry for name, entry in known.items() if wanted and wanted in name]
    exact = [entry for entry in found if wanted in (entry.path.name, entry.path.name[9:])]
    if len(found) == 1 or len(exact) == 1:
        return (exact or found)[0]
    if found:
        listed = "".join(f"\n  {entry}" for entry in found[:10]) + ("\n  ..." if len(found) > 10 else "")
        raise MantaError(f"{spec} means {len(found)} runs; give more of one of these:{listed}")
    close = nearest(
        spec, [part for name, entry in known.items() for part in (name, entry.path.name, entry.path.name[9:])]
    )
    hint = f" Did you mean {close}?" if close else " `python scripts/runs.py list` shows all."
    raise MantaError(
        f"{spec}: no run under {runs.short(storage)} has this in its name, and it is no run directory.{hint}"
    )
