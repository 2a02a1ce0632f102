"""What a run directory says, as curves: read once, thinned, with gaps where a number is missing. Imports nothing heavy."""

import math
import shlex
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from manta import runs
from manta.errors import MantaError
from manta.runs import RunDir, read_lines

MOST_POINTS = 2000  # of one curve
NO_METRICS = ("step", "epoch", "time", "exploit")
Point = dict[str, Any]
"""{"x", "y" (None = a gap), "g" (curves are not joined across), "i" (order)}, and "epoch", "step" for the reader."""


@dataclass
class Run:
    """One run, or one search, as its files tell it."""

    dir: RunDir
    config: dict[str, Any]
    status: dict[str, Any]
    summary: dict[str, Any]
    provenance: dict[str, Any]
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.dir.path.name

    @property
    def metric(self) -> str:
        """The objective."""
        return str(self.config["objective"]["metric"])

    @property
    def mode(self) -> str:
        return str(self.config["objective"]["mode"])

    @property
    def state(self) -> str:
        """As recorded; a search writes its page before it says that it has ended."""
        state = str(self.status.get("state"))
        if state != runs.RUNNING:
            return state
        return str(self.summary.get("state", runs.RUNNING))

    @property
    def commands(self) -> list[str]:
        """What was typed, one an attempt."""
        path = self.dir.path / "overrides.txt"
        given = path.read_text().splitlines() if path.is_file() else []
        return [f"python train.py {line}".rstrip() for line in given]

    def seconds(self, until: float | None = None) -> float | None:
        """From its start to its end, or to `until` (then to its last report) if it has not ended."""
        start, end = moment(self.status.get("started")), moment(self.status.get("finished"))
        if end is None:
            end = until or max((line.get("time") or 0.0 for line in self.lines), default=0.0)
        return max(end - start, 0.0) if start and end else None

    def metrics(self) -> list[str]:
        """All that was reported, in the order in which it came."""
        return list(dict.fromkeys(key for line in self.lines for key in line if key not in NO_METRICS))


def moment(text: str | None) -> float | None:
    """A time of status.json in seconds."""
    return None if not text else datetime.fromisoformat(text).timestamp()


def read_run(run: RunDir) -> Run:
    """Everything a page needs of a run.

    Raises:
        MantaError: a file is damaged.
    """
    path = run.path / "config.yaml"
    try:
        config = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        objective = config.get("objective") if isinstance(config, dict) else None
        if not isinstance(objective, dict) or not {"metric", "mode"} <= set(objective):
            raise ValueError("config.yaml has no objective" if config else "config.yaml is empty")
        lines = read_lines(run.metrics)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise MantaError(f"{run} cannot be read: {' '.join(str(error).split())}") from error
    provenance = run.read("provenance.json")
    return Run(run, config, run.read("status.json"), run.read("summary.json"), provenance, lines)


def curve(lines: list[dict[str, Any]], key: str, x: str = "step") -> list[Point]:
    """A metric over step or epoch; a new "g" begins where population based training took over another's weights."""
    points: list[Point] = []
    segment = 0
    for line in lines:
        if "exploit" in line:
            segment += 1
        elif key in line:
            y = line[key]
            y = float(y) if isinstance(y, int | float) and math.isfinite(y) else None
            points.append({"x": line[x], "y": y, "g": segment, "step": line["step"], "epoch": line["epoch"]})
    points = thin(points)
    for index, point in enumerate(points):
        point["i"] = index
    return points


def thin(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` of a curve's points: of each bucket the lowest and the highest, so that spikes stay; all gaps'
    first points, the first and the last point."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        bucket = range(start, min(start + size, len(points)))
        known = [i for i in bucket if points[i]["y"] is not None]
        if known:
            kept |= {min(known, key=lambda i: points[i]["y"]), max(known, key=lambda i: points[i]["y"])}
        if len(known) < len(bucket):
            kept.add(next(i for i in bucket if points[i]["y"] is None))
    return [points[i] for i in sorted(kept)]


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key; lists are values."""
    if not isinstance(values, dict):
        return {prefix: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def find_group(group: str, storage: Path) -> list[Path]:
    """The runs of a group, the oldest first."""
    found = []
    for path in sorted(storage.glob("????-??-??/*/config.yaml")):
        text = path.read_text()
        line = next((line for line in text.splitlines() if line.startswith("group:")), "")
        if line and (yaml.safe_load(line) or {}).get("group") == group:
            found.append(path.parent)
    return found


def command(script: str, path: Path) -> str:
    """E.g. `python scripts/report.py run=outputs/latest`."""
    return f"python scripts/{script}.py run={shlex.quote(runs.short(path))}"
