"""The page of a search."""

import os
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import yaml

from manta import runs
from manta.config import Objective
from manta.errors import MantaError
from manta.report import charts, trials
from manta.report.history import Run, command
from manta.report.page import ABSENT, Figure, Page, details, duration, paragraph, table
from manta.report.run import commit, head, made, took
from manta.runs import read_lines
from manta.search.domains import parse
from manta.search.record import STOPPED, Record, ranked, trial_dir
from manta.search.results import failures, settings, values_of
from manta.search.space import FILE, Space
from manta.search.study import EVENTS, records_of
from manta.view import brief, number

SHOWN = 25  # rows of the table of trials
WORDS = {STOPPED: "stopped early", runs.RUNNING: "not ended"}


def search_page(run: Run) -> Page:
    """All that is known of a search."""
    space, events = _space(run), _events(run)
    records = records_of(run.dir, Objective(run.metric, run.mode))
    if run.state != runs.RUNNING:
        records = [replace(each, state=runs.INTERRUPTED) if each.state == runs.RUNNING else each for each in records]
    last = max((event.get("time") or 0.0 for event in events), default=0.0) or None
    page = Page(f"Search {run.name}", head(run, _numbers(run, records, last)))
    if run.status.get("error"):
        page.add("Why it failed", paragraph(str(run.status["error"]), "error"))
    if not records:
        page.add("Trials", paragraph("No trial has begun yet."))
    page.add("How it went", *_progress(run, records, events))
    page.add("What mattered", *_settings(run, space, records))
    page.add("Best trials", _best(run, space, records))
    trained = bool((run.summary.get("refit") or {}).get("seeds"))
    page.add("The best, trained anew" if trained else "The best", *_refit(run))
    page.add("Failures", _failures(records))
    page.add("When trials ran", *_timeline(records, events))
    domains = [[key, str(domain)] for key, domain in space.domains.items()]
    page.add("How it was made", table(["setting", "searched over"], domains), *made(run))
    return page


def _space(run: Run) -> Space:
    """Its domains alone: no configuration is composed here."""
    path = run.dir.path / FILE
    try:
        content = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return Space({key: parse(text) for key, text in content["domains"].items()}, {})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError, MantaError) as error:
        raise MantaError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _events(run: Run) -> list[dict[str, Any]]:
    try:
        return read_lines(run.dir.path / EVENTS)
    except (OSError, ValueError) as error:
        raise MantaError(f"{run.dir.path / EVENTS} cannot be read: {error}") from error


# --- numbers and tables ----------------------------------------------------------------------------------------------


def _numbers(run: Run, records: list[Record], last: float | None) -> list[tuple[str, str, str]]:
    aim = "highest" if run.mode == "max" else "lowest"
    first = next(iter(ranked(records, run.mode)), None)
    where = f"trial {first.number}, epoch {first.best['epoch']}" if first and first.best else "no trial was validated"
    found = [(f"{run.metric}, {aim}", number(first.value if first else None), where)]
    refit = (run.summary.get("refit") or {}).get("test") or {}
    for key, value in (run.summary.get("test") or {}).items():
        spread, seeds = refit.get(key) or {}, len((run.summary.get("refit") or {}).get("seeds") or [])
        of = f"mean of {seeds} new seeds" if spread else "best checkpoint"
        found.append((key, spread_text(spread) if spread else number(value), of))
    states = Counter(record.state for record in records)
    told = ", ".join(f"{count} {WORDS.get(state, state)}" for state, count in states.most_common())
    found += [("trials", f"{len(records):,}", told), ("epochs trained", f"{sum(r.epochs for r in records):,}", "")]
    return [*found, took(run, last), commit(run)]


def spread_text(spread: dict[str, Any]) -> str:
    """Mean ± standard deviation."""
    return number(spread["mean"]) + ("" if spread.get("std") is None else f" ± {number(spread['std'])}")


def _best(run: Run, space: Space, records: list[Record]) -> str | None:
    keys, best = settings(space), ranked(records, run.mode)
    rows = []
    for record in best[:SHOWN]:
        values = space.active(values_of(record))
        shown = [brief(values[key]) if key in values else ABSENT for key in keys]
        cells = [f"trial {record.number}", number(record.value), (record.best or {}).get("epoch"), record.epochs]
        target = os.path.relpath(trial_dir(run.dir, record.number).path, run.dir.path)
        rows.append([*cells, duration(record.seconds), WORDS.get(record.state, record.state), *shown, target])
    head = ["trial", run.metric, "best epoch", "epochs", "time", "state", *keys]
    title = f"{len(rows)} of {len(records):,} trials" if len(records) > len(rows) else ""
    return table(head, rows, title=title, links=True) if rows else None


def _refit(run: Run) -> list[str]:
    refit = run.summary.get("refit") or {}
    seeds = [f"seed {seed}" for seed in refit.get("seeds") or []]
    rows = [
        [key, spread_text(spread), *map(number, spread["values"])]
        for split in ("val", "test")
        for key, spread in (refit.get(split) or {}).items()
    ]
    parts: list[str] = [table(["metric", "mean ± standard deviation", *seeds], rows)] if rows else []
    if run.summary.get("repeat_command"):
        parts.append(details("Command that trains the best again", run.summary["repeat_command"]))
    if run.summary.get("best"):
        look = command("report", run.dir.path / "best")
        parts.append(paragraph(f"Curves and wrong samples of the best: {look}"))
    return parts


def _failures(records: list[Record]) -> str | None:
    rows = [[count, message] for message, count in failures(records)]
    return table(["trials", "message"], rows) if rows else None


# --- charts ----------------------------------------------------------------------------------------------------------


def _progress(run: Run, records: list[Record], events: list[dict[str, Any]]) -> list["str | Figure"]:
    shown, points, ends = trials.curves(records, events, run.metric, run.mode)
    if not ends:
        return [paragraph(f"No trial has a value of {run.metric}.")] if records else []
    gaps = sum(point["y"] is None for point in points)
    note = ""
    if len(ranked(records, run.mode)) > trials.MOST_CURVES:
        note = (
            f"The best {trials.MOST_CURVES} of {len(records):,} trials, and at most {trials.MOST_FAILED} that failed. "
        )
    note += f"{gaps:,} values were NaN or infinite: curves have gaps. " if gaps else ""
    note += "The thick line is the best trial."
    note += " Curves break where weights of another trial were taken over." if any(r.exploits for r in shown) else ""
    parts: list[str | Figure] = [
        Figure("trials", f"{run.metric} of all trials", trials.curves_chart(points, ends, run.metric),
               note, wide=True, height=340)
    ]  # fmt: skip
    by_time, by_epochs = trials.best_so_far(events, run.metric, run.mode)
    if by_time:
        chart = trials.best_chart(by_time, "minutes since the start", run.metric)
        parts.append(Figure("best_by_time", "Best so far, over time", chart))
    elif by_epochs:
        parts.append(paragraph("When things happened was not recorded: curves over time are left out."))
    if by_epochs:
        chart = trials.best_chart(by_epochs, "epochs trained, all trials together", run.metric)
        parts.append(Figure("best_by_epochs", "Best so far, over compute", chart))
    return parts


def _settings(run: Run, space: Space, records: list[Record]) -> list["str | Figure"]:
    parts: list[str | Figure] = []
    share = run.summary.get("importance") or {}
    if share:
        figure = Figure("importance", "Importance of each setting", charts.bars(share, "share of what could be explained"),
                        "How much worse a forest predicts held-out trials when the setting is shuffled.",
                        wide=True, height=max(36 * len(share) + 50, 120))  # fmt: skip
        parts.append(figure)
    elif any(record.value is not None for record in records):
        parts.append(
            paragraph("What mattered cannot be told: there are too few trials, or their results look like chance.")
        )
    known = ranked(records, run.mode)
    parallel = trials.parallel(space, known, run.metric)
    if parallel:
        note = "One line a trial, from its settings to its result: the lighter the better, the thick one is the best"
        note += f"; the best {trials.MOST_LINES} of {len(known):,}." if len(known) > trials.MOST_LINES else "."
        note += (
            f" A setting that does not apply to a trial is passed at the bottom ({ABSENT})." if parallel.absent else ""
        )
        parts.append(
            Figure("parallel", "Settings and results", parallel.chart, note, True, 360, least=120 * parallel.axes)
        )
    return parts


def _timeline(records: list[Record], events: list[dict[str, Any]]) -> list["str | Figure"]:
    spans = trials.spans(records, events)
    if not spans:
        return []
    rows = len({span["trial"] for span in spans})
    height = min(max(16 * rows + 60, 120), 620)
    note = "Each bar is time in which a trial trained."
    return [Figure("timeline", "Timeline", trials.timeline_chart(spans), note, wide=True, height=height)]


def mean_and_sd(values: list[float], show: Callable[[float], str] = number) -> str:
    """E.g. `0.95 ± 0.01`."""
    if not values:
        return "-"
    return show(statistics.fmean(values)) + (f" ± {show(statistics.stdev(values))}" if len(values) > 1 else "")
