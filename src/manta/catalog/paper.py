"""`table`: runs that differ only in their seed are one row, with mean and deviation over seeds."""

from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from manta.catalog import render
from manta.catalog.details import best_of
from manta.catalog.entries import Entry
from manta.catalog.render import Column, Table
from manta.catalog.settings import NOT_SETTINGS, Flat, is_under, same
from manta.errors import MantaError, nearest

NOT_SCIENCE = (*NOT_SETTINGS, "seed", "cluster", "tracking")


@dataclass
class Row:
    """Runs of one configuration, by seed."""

    config: Flat
    runs: dict[Any, Entry] = field(default_factory=dict)
    repeated: int = 0
    """Older runs of a seed that is there already: not counted."""


def collect(entries: list[Entry]) -> list[Row]:
    """Rows in the order in which their first runs were started.

    Args:
        entries: the newest first; of a seed that is there twice the first counts.
    """
    found: dict[str, Row] = {}
    for entry in entries:
        config = {key: value for key, value in entry.config.items() if not is_under(key, NOT_SCIENCE)}
        row = found.setdefault(repr(sorted(config.items())), Row(config))
        seed = entry.config.get("seed")
        row.repeated += seed in row.runs
        row.runs.setdefault(seed, entry)
    return list(reversed(found.values()))


def values_of(entry: Entry, metric: str) -> float | None:
    """A metric of a run: of its test, else of its best checkpoint, else its last."""
    for which in ("test", "best", "last"):
        found = entry.metrics(which).get(metric)
        if isinstance(found, int | float):
            return float(found)
    return None


def paper_table(entries: list[Entry], metrics: list[str] | None = None) -> Table:
    """Rows named by what distinguishes them from each other.

    Raises:
        MantaError: a metric that no run has.
    """
    known = list(dict.fromkeys(k for e in entries for which in ("test", "best", "last") for k in e.metrics(which)))
    metrics = metrics or _usual(entries, known)
    for name in metrics:
        if name not in known:
            close = nearest(name, known)
            hint = f" Did you mean {close}?" if close else f" They have {', '.join(known) or 'none'}."
            raise MantaError(f"--metrics {name}: none of these {len(entries)} runs has it.{hint}")
    rows = collect(entries)
    numbers = [[[values_of(run, name) for run in row.runs.values()] for name in metrics] for row in rows]
    table = Table([Column("setting"), *(Column(name, right=True) for name in metrics), Column("n", right=True)], [])
    for label, row, found in zip(_labels(rows), rows, numbers, strict=True):
        table.rows.append([label, *map(spread, found), str(len(row.runs))])
        table.records.append(_record(label, row, dict(zip(metrics, found, strict=True))))
    objective = entries[0].objective if entries else {}
    for column, name in enumerate(metrics):
        means = [_mean(found[column]) for found in numbers]
        for at in best_of(means, render.mode_of(name, objective)):
            table.bold.add((at, column + 1))
    return table


def _usual(entries: list[Entry], known: list[str]) -> list[str]:
    """The objective's metric on test, and the objective."""
    objectives = dict.fromkeys(str(entry.objective.get("metric")) for entry in entries)
    on_test = [f"test/{name.rpartition('/')[2]}" for name in objectives]
    return [name for name in (*on_test, *objectives) if name in known]


def _mean(found: list[float | None]) -> float | None:
    known = [value for value in found if value is not None]
    return mean(known) if known else None


def spread(found: list[float | None]) -> str:
    """Mean and deviation of the sample; those of fewer runs than the row has say so."""
    known = [value for value in found if value is not None]
    if not known:
        return "-"
    text = render.metric(mean(known)) + (f" ± {render.metric(stdev(known))}" if len(known) > 1 else "")
    return text if len(known) == len(found) else f"{text} (n={len(known)})"


def _labels(rows: list[Row]) -> list[str]:
    """What distinguishes each row from the others; settings that all rows share go without saying."""
    firsts = [next(iter(row.runs.values())).differences.all() for row in rows]
    for settings in firsts:
        for key in [key for key in settings if is_under(key, NOT_SCIENCE)]:
            del settings[key]
    nothing = object()
    keys = dict.fromkeys(key for settings in firsts for key in settings)
    shared = {
        k for k in keys if len(rows) > 1 and all(same(s.get(k, nothing), firsts[0].get(k, nothing)) for s in firsts)
    }
    return [
        render.assignments({k: v for k, v in settings.items() if k not in shared}).replace(" ", ", ") or "default"
        for settings in firsts
    ]


def _record(label: str, row: Row, found: dict[str, list[float | None]]) -> dict[str, Any]:
    record: dict[str, Any] = {"setting": label}
    for name, values in found.items():
        known = [value for value in values if value is not None]
        record[name] = mean(known) if known else None
        record[f"{name} std"] = stdev(known) if len(known) > 1 else None
    return {**record, "n": len(row.runs), "seeds": list(row.runs), "runs": [str(run) for run in row.runs.values()]}
