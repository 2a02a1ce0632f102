"""Trackers beside the run directory: W&B, MLflow, TensorBoard, CSV. Imports nothing heavy.

A run's files are the truth, and a tracker is told what is in them: while the run trains by a process of its own
(`follower.py`, started by `live.py`), later by `sync.py`. So no tracker can slow training down, stop it, draw from its
random generators, or miss anything for good; and what one has been told already it is not told again.
"""

import fcntl
import json
import math
import netrc
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from manta.catalog.entries import is_search
from manta.config import Config, Tracking, Wandb
from manta.runs import RunDir, short

NAMES = ("wandb", "mlflow", "tensorboard", "csv")
FOLDER = "tracking"
"""In a run directory: what each tracker knows of the run (`<name>.json`), and what went wrong."""
KILLED = "killed"
"""The state of a run whose process is gone without a word."""


@dataclass(frozen=True)
class Point:
    """A line of metrics.jsonl as trackers see it."""

    step: int
    """Optimizer steps done."""
    epoch: int
    time: float
    """Seconds since 1970."""
    segment: int
    """How many exploits of population based training came before: with one the steps may go back."""
    nth: int
    """How many lines came before at this very step."""
    values: dict[str, float]
    """Finite numbers."""

    @property
    def place(self) -> list[int]:
        """Grows from line to line of a run."""
        return [self.segment, self.step, self.nth]


class Tracker(Protocol):
    """One tracker's view of one run. A method that raises is called again later."""

    def begin(self) -> None:
        """Make the run there, or find the one that was made before."""
        ...

    def log(self, points: list[Point]) -> None:
        """Tell points, from the first of the run on; those it was told before are skipped."""
        ...

    def end(self, state: str) -> None:
        """Tell the summary and the files, and that the run is over."""
        ...


@runtime_checkable
class Draws(Protocol):
    """A tracker that shows histograms, too."""

    def histograms(self, lines: list[dict[str, Any]]) -> None:
        """Tell lines of histograms.jsonl, from the first of the run on; those it was told before are skipped."""
        ...


Alive = Callable[[], None]
"""Called by a tracker after every answer it gets."""


def make(name: str, run: RunDir, config: Config, alive: Alive = lambda: None) -> Tracker:
    """A tracker by name; its library is imported in `begin`."""
    tracker: Tracker = import_module(f"manta.tracking.{name}").make(run, config, alive)
    return tracker


def enabled(tracking: Tracking) -> list[str]:
    """The trackers that are switched on."""
    names = [name for name in NAMES if getattr(tracking, name).enabled]
    return [name for name in names if name != "wandb" or wandb_mode(tracking.wandb) != "disabled"]


def wandb_mode(settings: Wandb) -> str:
    """online, offline or disabled: never a question to the user."""
    chosen = settings.mode or os.environ.get("WANDB_MODE")
    return chosen or ("online" if _has_wandb_key() else "offline")


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].strip("/")
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def shown(config: Config) -> str:
    """The trackers of a run, for its plan; no secrets."""
    words = []
    for name in enabled(config.tracking):
        if name == "wandb":
            mode = wandb_mode(config.tracking.wandb)
            asked = config.tracking.wandb.mode or os.environ.get("WANDB_MODE")
            words.append(f"wandb {mode}" if asked or mode == "online" else "wandb offline (no WANDB_API_KEY)")
        elif name == "mlflow":
            uri = config.tracking.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
            default = "" if uri else f" {short(config.storage.folder / 'mlflow.db')}"
            words.append(f"mlflow{default}" if uri is None else f"mlflow {without_secrets(uri)}")
        else:
            words.append(name)
    return ", ".join(words)


def without_secrets(uri: str) -> str:
    """An address without user and password."""
    return re.sub("//[^/@]*@", "//", uri)


# --- a run as trackers name it ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a run stands: by itself, or in a search."""

    kind: str
    """train, search, trial or refit."""
    name: str
    search: RunDir | None = None
    """Of a trial or a refit."""


def place(run: RunDir, config: Config) -> Place:
    path = run.path.resolve()
    own = f"{path.parent.name}/{path.name}"
    for search in path.parents[1:3]:
        parts = path.relative_to(search).parts
        if parts[0] in ("trials", "refit") and is_search(search):
            whole = place(RunDir(search), config).name
            kind = "trial" if parts[0] == "trials" else "refit"
            return Place(kind, f"{whole} {kind} {parts[-1].removeprefix('seed-')}", RunDir(search))
    return Place("search" if is_search(path) else "train", own)


def state_of(run: RunDir, name: str) -> dict[str, Any]:
    """What a tracker knows of a run: its identity there and whether it heard of the end."""
    return run.read(f"{FOLDER}/{name}.json")


def update_state(run: RunDir, name: str, **fields: Any) -> None:
    (run.path / FOLDER).mkdir(exist_ok=True)
    run.write(f"{FOLDER}/{name}.json", {**state_of(run, name), **fields})


def remember_end(run: RunDir, state: str) -> None:
    """The process that trained has said how it ended."""
    (run.path / FOLDER).mkdir(exist_ok=True)
    run.write(f"{FOLDER}/end.json", {"state": state})


def forget_end(run: RunDir) -> None:
    (run.path / FOLDER / "end.json").unlink(missing_ok=True)


def end_is_told(run: RunDir) -> bool:
    return (run.path / FOLDER / "end.json").is_file()


def told_all(run: RunDir, name: str) -> bool:
    """Whether a tracker knows the end of a run, and all that was reported before."""
    known, end = state_of(run, name), run.read(f"{FOLDER}/end.json")
    size = reported(run)
    return "state" in end and known.get("ended") == end["state"] and known.get("bytes", size) == size


def reported(run: RunDir) -> int:
    """Bytes of metrics.jsonl."""
    return run.metrics.stat().st_size if run.metrics.is_file() else 0


@contextmanager
def sole(run: RunDir, name: str) -> Iterator[None]:
    """One process at a time tells a tracker of a run; waits for the other."""
    (run.path / FOLDER).mkdir(exist_ok=True)
    with open(run.path / FOLDER / f".{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- what there is to tell -------------------------------------------------------------------------------------------


class Points:
    """metrics.jsonl as it grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0
        self.segment, self.step, self.nth = 0, -1, 0

    def new(self) -> list[Point]:
        """Lines since the last call; all of them again after the file was cut back."""
        if not self.path.is_file():
            return []
        with open(self.path, "rb") as file:
            if file.seek(0, os.SEEK_END) < self.position:
                self.__init__(self.path)  # type: ignore[misc]
            file.seek(self.position)
            *whole, _ = file.read().split(b"\n")
        self.position += sum(len(line) + 1 for line in whole)
        return [self._point(json.loads(line)) for line in whole]

    def _point(self, line: dict[str, Any]) -> Point:
        exploit = line.get("exploit")
        self.segment += exploit is not None
        values = {
            key: float(value)
            for key, value in line.items()
            if key not in ("step", "epoch", "time") and isinstance(value, int | float) and math.isfinite(value)
        }
        if exploit is not None:
            values["exploit/donor"] = float(exploit["donor"])
        self.nth = self.nth + 1 if line["step"] == self.step else 0
        self.step = line["step"]
        return Point(line["step"], line["epoch"], line["time"], self.segment, self.nth, values)


class Told:
    """What a tracker has been told of a run, on disk: a run that goes on after anything is told the rest.

    A metric is known up to a place. Steps that a resume does again have the place they had.
    """

    def __init__(self, run: RunDir, name: str, afresh: bool = False) -> None:
        self.run, self.name = run, name
        known = {} if afresh else state_of(run, name)
        self.rows = known.get("rows", 0)
        """Rows written."""
        self._places: dict[str, list[int]] = known.get("told", {})

    def new(self, point: Point) -> dict[str, float]:
        """Its values that were not told yet."""
        return {key: value for key, value in point.values.items() if self._places.get(key, []) < point.place}

    def add(self, keys: Iterable[str], place: list[int], rows: int = 1) -> None:
        self._places |= dict.fromkeys(keys, place)
        self.rows += rows

    def knows(self, key: str, place: list[int]) -> bool:
        return self._places.get(key, []) >= place

    def save(self) -> None:
        update_state(self.run, self.name, rows=self.rows, told=self._places)


class Histograms:
    """histograms.jsonl as it grows: {"step", "histograms": {name: {"low", "high", "counts"}}}."""

    def __init__(self, path: Path) -> None:
        self.path, self.position, self.step = path, 0, 0

    def new(self) -> list[dict[str, Any]]:
        """Lines since the last call, without those that a resume wrote again."""
        if not self.path.is_file():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.position)
            *whole, _ = file.read().split(b"\n")
        self.position += sum(len(line) + 1 for line in whole)
        found = []
        for line in map(json.loads, whole):
            if line["step"] > self.step:
                found.append(line)
                self.step = line["step"]
        return found


def results(run: RunDir) -> dict[str, float]:
    """The numbers of summary.json that count at the end: the best validation, and the look at the test split."""
    summary = run.read("summary.json")
    best = summary.get("best") or {}
    found = {f"best/{key}": value for key, value in (best.get("metrics") or {}).items()}
    found |= {f"best/{key}": best[key] for key in ("epoch", "step", "trial") if key in best}
    found |= summary.get("test") or {}
    return {key: float(value) for key, value in found.items() if value is not None}


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
