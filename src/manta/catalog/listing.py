"""`list`: one row a run."""

import json
import time
from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

from manta import runs
from manta.catalog import render
from manta.catalog.choose import chosen
from manta.catalog.entries import Entry, scan
from manta.catalog.render import Column, Table, comma_separated
from manta.catalog.settings import Defaults
from manta.errors import MantaError, nearest

SORTS = ("date", "objective", "duration")


def rows(arguments: Namespace, storage: Path, defaults: Defaults) -> list[Entry]:
    """The runs that are asked for, in order; no more are read than that takes."""
    if arguments.sort not in SORTS:
        close = nearest(arguments.sort, SORTS)
        hint = f" Did you mean {close}?" if close else ""
        raise MantaError(f"--sort {arguments.sort}: it must be of {', '.join(SORTS)}.{hint}")
    if arguments.limit is not None and arguments.limit < 1:
        raise MantaError(f"--limit {arguments.limit}: it must be at least 1.")
    found = chosen(scan(storage, defaults, arguments.trials), arguments, defaults)
    if arguments.sort == "date":
        return list(islice(found, arguments.limit))
    by = _by_objective if arguments.sort == "objective" else _by_duration
    return sorted(found, key=by)[: arguments.limit]


def _by_objective(entry: Entry) -> tuple[Any, ...]:
    """The best first, those with the same metric together; without a value last."""
    value, objective = entry.value, entry.objective
    sign = 1 if objective.get("mode") == "min" else -1
    return (value is None, str(objective.get("metric")), sign * (value or 0.0))


def _by_duration(entry: Entry) -> tuple[Any, ...]:
    return (-(entry.duration or 0.0),)


def table(entries: list[Entry]) -> Table:
    columns = [
        Column("run"), Column("kind", rank=3), Column("state"), Column("objective"),
        Column("settings", bends=True), Column("time", rank=2, right=True), Column("age", rank=1, right=True),
        Column("tags", rank=4), Column("group", rank=5),
    ]  # fmt: skip
    cells = [_cells(entry) for entry in entries]
    if all(row[1] == "run" for row in cells):
        cells = [[row[0], "", *row[2:]] for row in cells]
    return Table(columns, cells).without_empty()


def _cells(entry: Entry) -> list[str]:
    entry.read_all()
    objective, settings = entry.objective, render.assignments(entry.differences.all())
    score = "-" if entry.value is None else f"{objective.get('metric')} {render.metric(entry.value)}"
    said = "; ".join([*entry.problems, *([entry.error] if entry.error else [])])
    since = None if entry.started is None else max(time.time() - entry.started, 0.0)
    return [
        str(entry), entry.kind, entry.state, score, f"{settings} ({said})".strip() if said else settings,
        render.span(entry.duration), render.age(since), ",".join(entry.tags), entry.group,
    ]  # fmt: skip


def record(entry: Entry) -> dict[str, Any]:
    """A run for programs."""
    entry.read_all()
    return {
        "run": str(entry),
        "kind": entry.kind,
        "state": entry.state,
        "name": entry.name or None,
        "metric": entry.objective.get("metric"),
        "value": entry.value,
        "settings": entry.differences.all(),
        "started": entry.status.get("started"),
        "duration_s": None if entry.duration is None else round(entry.duration, 3),
        "attempts": entry.status.get("attempts"),
        "tags": entry.tags,
        "group": entry.group or None,
        "test": entry.metrics("test"),
        "error": entry.error or None,
        "problems": entry.problems,
    }


def nothing(storage: Path) -> str:
    """Why a list is empty."""
    if not storage.is_dir():
        return f"The folder {runs.short(storage)} does not exist. Start a run: python train.py"
    if next(iter(scan(storage, Defaults(Path()))), None):
        return f"No run under {runs.short(storage)} is like that."
    return f"There is no run under {runs.short(storage)} yet. Start one: python train.py"


def metrics_csv(entry: Entry) -> tuple[str, int]:
    """metrics.jsonl as CSV: the union of keys as columns, one row a report; and how many lines cannot be read.

    Raises:
        MantaError: there are no metrics.
    """
    if entry.kind == "search":
        raise MantaError(f"{entry} is a search: its table is {entry}/trials.csv, and its trials have metrics each.")
    lines: list[Any] = []
    try:
        for line in entry.run.metrics.read_bytes().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                lines.append(None)
    except OSError as error:
        raise MantaError(f"{entry} has no metrics.jsonl that can be read: {error.strerror}.") from error
    reports = [line for line in lines if isinstance(line, dict)]
    if not reports:
        raise MantaError(f"{entry} has reported no metrics yet.")
    text = comma_separated([dict.fromkeys(("step", "epoch", "time")) | line for line in reports])
    return text, len(lines) - len(reports)
