"""Charts of a search, from its records and events."""

import json
import math
from dataclasses import dataclass
from typing import Any

import altair as alt

from manta import runs
from manta.report.charts import axis_scale, rows, x_axis, y_axis
from manta.report.history import Point, thin
from manta.report.page import ABSENT
from manta.search.record import STOPPED, Record, ranked
from manta.search.results import setting, settings, values_of
from manta.search.space import Space
from manta.view import brief, number

MOST_CURVES, MOST_FAILED = 120, 30
MOST_TRIAL_POINTS = 120  # of one trial's curve
MOST_LINES = 300  # of parallel coordinates
MOST_SPANS = 3000
JOINED_S = 1.0  # pauses in a trial's training that are not drawn
# In the order of the palette: blue, vermilion, green, purple, orange.
STATES = [runs.FINISHED, runs.FAILED, runs.INTERRUPTED, runs.RUNNING, STOPPED]
SHAPES = ["circle", "cross", "diamond", "square", "triangle-down"]


# --- curves ----------------------------------------------------------------------------------------------------------


def curves(
    records: list[Record], events: list[dict[str, Any]], metric: str, mode: str
) -> tuple[list[Record], list[Point], list[Point]]:
    """The trials that are shown, the points of their curves, and the last point of each."""
    by_rank = ranked(records, mode)
    failed = [record for record in records if record.state == runs.FAILED][:MOST_FAILED]
    shown = {record.number: record for record in [*by_rank[:MOST_CURVES], *failed]}
    lines: dict[int, list[Point]] = {}
    segments: dict[int, int] = {}
    for event in events:
        trial = event["trial"]
        if event["event"] == "exploited":
            segments[trial] = segments.get(trial, 0) + 1
        elif event["event"] == "reported" and trial in shown:
            y = event["metrics"].get(metric)
            y = float(y) if y is not None and math.isfinite(y) else None
            point = {"x": event["epoch"], "y": y, "trial": trial, "g": f"{trial}.{segments.get(trial, 0)}"}
            lines.setdefault(trial, []).append({**point, "state": shown[trial].state})
    points, ends = [], []
    for line in lines.values():
        kept = thin(line, MOST_TRIAL_POINTS)
        points += [{**point, "i": index} for index, point in enumerate(kept)]
        ends += [point for point in kept if point["y"] is not None][-1:]
    best = by_rank[0].number if by_rank else None
    for point in points:
        point["best"] = point["trial"] == best
    return list(shown.values()), points, ends


def curves_chart(points: list[Point], ends: list[Point], metric: str) -> Any:
    """A line a trial, coloured by how it ended; the mark of its end says so too."""
    states = [state for state in STATES if any(point["state"] == state for point in points)]
    colour = alt.Color(
        "state:N", title=None, scale=alt.Scale(domain=STATES),
        legend=alt.Legend(values=states),
    )  # fmt: skip
    tips: list[Any] = [
        alt.Tooltip("trial:Q"),
        "state:N",
        alt.Tooltip("x:Q", title="epoch"),
        alt.Tooltip("y:Q", title=metric, format=".5~g"),
    ]
    values = [point["y"] for point in points]
    base = alt.Chart(rows(points)).encode(
        x=x_axis("epoch"), y=y_axis(metric, values), detail="g:N", order="i:Q", tooltip=tips
    )
    thin_lines = base.mark_line(strokeWidth=1.4, strokeOpacity=0.6).encode(color=colour)
    best = base.transform_filter("datum.best").mark_line(style="strong")
    shape = alt.Shape(
        "state:N", title=None, scale=alt.Scale(domain=STATES, range=SHAPES), legend=alt.Legend(values=states)
    )
    if not ends:
        return alt.layer(thin_lines)
    end = alt.Chart(rows(ends)).encode(x="x:Q", y="y:Q", color=colour, shape=shape, tooltip=tips)
    return alt.layer(thin_lines, best, end.mark_point(filled=True, size=70, opacity=1))


# --- best so far -----------------------------------------------------------------------------------------------------


def best_so_far(events: list[dict[str, Any]], metric: str, mode: str) -> tuple[list[Point], list[Point]]:
    """Where the best value improved, by minutes since the first event ([] if times are not known) and by epochs trained."""
    sign, best = 1 if mode == "max" else -1, None
    times = [event.get("time") for event in events]
    start = None if None in times else min(times, default=0.0)  # type: ignore[type-var]
    at: dict[int, int] = {}
    epochs = 0
    by_time: list[Point] = []
    by_epochs: list[Point] = []
    for event in events:
        trial = event["trial"]
        if event["event"] == "exploited":
            at[trial] = event["epoch"]
        if event["event"] != "reported":
            continue
        epochs += max(event["epoch"] - at.get(trial, 0), 0)
        at[trial] = event["epoch"]
        value = event["metrics"].get(metric)
        better = value is not None and math.isfinite(value) and (best is None or sign * (value - best) > 0)
        best = value if better else best
        if best is not None:
            point = {"y": best, "trial": trial, "new": better}
            by_epochs.append({**point, "x": epochs})
            by_time += [{**point, "x": (event["time"] - start) / 60}] if start is not None else []
    return _steps(by_time), _steps(by_epochs)


def _steps(points: list[Point]) -> list[Point]:
    """Only improvements, and the end."""
    return [point for index, point in enumerate(points) if point["new"] or index == len(points) - 1]


def best_chart(points: list[Point], x: str, metric: str) -> Any:
    """A staircase; a point where a trial was better than all before."""
    tips: list[Any] = [
        "trial:Q",
        alt.Tooltip("y:Q", title=metric, format=".5~g"),
        alt.Tooltip("x:Q", title=x, format=".4~g"),
    ]
    base = alt.Chart(rows(points)).encode(
        x=x_axis(x, zero=True), y=y_axis(metric, [point["y"] for point in points]), tooltip=tips
    )
    line = base.mark_line(interpolate="step-after", style="accent", strokeWidth=2.5)
    return alt.layer(
        line, base.transform_filter("datum.new").mark_point(filled=True, size=60, opacity=1, style="accent")
    )


# --- settings --------------------------------------------------------------------------------------------------------


@dataclass
class Parallel:
    """Parallel coordinates."""

    chart: Any
    axes: int
    absent: bool
    """Some setting does not apply to some trial."""


ABSENT_Y = -0.12


def parallel(space: Space, records: list[Record], metric: str) -> Parallel | None:
    """A line a trial through its settings to its result; None if there is nothing to compare.

    Args:
        records: with a value, the best first.
    """
    records = records[:MOST_LINES]
    if len(records) < 2:
        return None
    values = [space.active(values_of(record)) for record in records]
    names = [*settings(space), metric]
    lines, ticks = [], []
    for name in names:
        if name == metric:
            places, marks = _numeric([record.value for record in records], log=False)
        else:
            places, marks = _places(space, name, values)
        ticks += [{"name": name, "y": y, "text": text} for y, text in marks]
        shown = [
            record.value if name == metric else each.get(name, ABSENT)
            for record, each in zip(records, values, strict=True)
        ]
        lines += [
            {
                "name": name,
                "y": y,
                "trial": r.number,
                "value": r.value,
                "text": _text(what),
                "best": i == 0,
                "i": names.index(name),
            }
            for i, (r, y, what) in enumerate(zip(records, places, shown, strict=True))
        ]
    absent = any(line["y"] == ABSENT_Y for line in lines)
    if absent:
        there = dict.fromkeys(line["name"] for line in lines if line["y"] == ABSENT_Y)
        ticks += [{"name": name, "y": ABSENT_Y, "text": ABSENT} for name in there]
    chart = _parallel_chart(lines[::-1], ticks, names, [float(record.value or 0.0) for record in records], metric)
    return Parallel(chart, len(names), absent)


def _text(value: Any) -> str:
    return brief(value) if isinstance(value, int | float | str) else json.dumps(value)


def _places(space: Space, name: str, values: list[dict[str, Any]]) -> tuple[list[float], list[tuple[float, str]]]:
    """Where each value stands on its axis, from 0 to 1, and the axis's marks."""
    domains = [domain for flat, domain in space.domains.items() if setting(flat) == name]
    listed = [option for domain in domains for option in domain.values or []]
    present = [each[name] for each in values if name in each]
    if not listed and all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        numbers = [float(each[name]) if name in each else None for each in values]
        return _numeric(numbers, any(domain.is_logarithmic for domain in domains))
    options = list(dict.fromkeys(json.dumps(option) for option in [*listed, *present]))
    step = 1 / max(len(options) - 1, 1)
    at = {option: index * step if len(options) > 1 else 0.5 for index, option in enumerate(options)}
    places = [at[json.dumps(each[name])] if name in each else ABSENT_Y for each in values]
    marks = [(at[option], _text(json.loads(option))) for option in options]
    return places, marks[:: max(len(marks) // 10, 1)]


def _numeric(column: list[float | None], log: bool) -> tuple[list[float], list[tuple[float, str]]]:
    known = [value for value in column if value is not None]
    log = (log and min(known, default=0) > 0) or axis_scale(list(known)).to_dict().get("type") == "log"
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if low == high:
        return [ABSENT_Y if value is None else 0.5 for value in column], [(0.5, brief(low))]

    def place(value: float) -> float:
        return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)

    def at(share: float) -> float:
        return low * (high / low) ** share if log else low + share * (high - low)

    marks = [(share, number(at(share)) if at(share) % 1 else brief(at(share))) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return [ABSENT_Y if value is None else place(value) for value in column], marks


def _parallel_chart(
    lines: list[dict[str, Any]], ticks: list[dict[str, Any]], names: list[str], values: list[float], metric: str
) -> Any:  # fmt: skip
    x = alt.X(
        "name:N", sort=names, title=None, scale=alt.Scale(type="point", padding=0.5, domain=names),
        axis=alt.Axis(orient="top", labelAngle=0, grid=False, domain=False, labelFontSize=12, labelLimit=max(1100 // len(names) - 20, 90), labelPadding=12),
    )  # fmt: skip
    low = min(lines, key=lambda line: line["y"])["y"]
    y = alt.Y("y:Q", title=None, axis=None, scale=alt.Scale(domain=[min(low, 0.0) - 0.03, 1.03], nice=False))
    # From the worst but for a tenth to the best: a few that diverged do not make all others look alike.
    ends = [values[0], values[max(math.ceil(len(values) * 0.9) - 1, 1)]]
    colour = alt.Color(
        "value:Q", scale=alt.Scale(type="linear", domain=ends[::-1], range="ramp", clamp=True, nice=False), legend=None
    )  # fmt: skip
    base = alt.Chart(rows(lines)).encode(x=x, y=y, detail="trial:N", order="i:Q", color=colour)
    tips: list[Any] = [
        "trial:N",
        alt.Tooltip("value:Q", title=metric, format=".5~g"),
        alt.Tooltip("name:N", title="setting"),
        "text:N",
    ]
    marks = alt.Chart(rows(ticks)).encode(x=x, y=y)
    axes = alt.Chart(rows([{"name": name} for name in names])).encode(x=x).mark_rule(style="faint", strokeWidth=1.5)
    return alt.layer(
        axes,
        base.mark_line(strokeOpacity=0.75, strokeWidth=1.6),
        base.transform_filter("datum.best").mark_line(strokeWidth=4.5),
        base.mark_point(filled=True, size=26, opacity=1, fillOpacity=0.9).encode(tooltip=tips),
        marks.mark_text(align="left", dx=9, style="halo").encode(text="text:N"),
        marks.mark_text(align="left", dx=9).encode(text="text:N"),
    )


# --- timeline --------------------------------------------------------------------------------------------------------


def spans(records: list[Record], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """When each trial trained, in minutes since the first event; [] if times were not recorded."""
    if not events or any("time" not in event for event in events):
        return []
    start = min(event["time"] for event in events)
    open_: dict[int, dict[str, Any]] = {}
    found: list[dict[str, Any]] = []
    for event in events:
        trial, end = event["trial"], event["time"] - start
        if event["event"] == "failed":
            found.append({"trial": trial, "from": end / 60, "to": end / 60, "state": runs.FAILED, "end": True})
        if event["event"] != "reported":
            continue
        began = max(end - event["seconds"], 0.0)
        last = open_.get(trial)
        if last is not None and began - last["to"] * 60 <= JOINED_S:
            last["to"], last["epoch"] = end / 60, event["epoch"]
            continue
        span = {
            "trial": trial,
            "from": began / 60,
            "to": end / 60,
            "state": records[trial].state,
            "epoch": event["epoch"],
        }
        open_[trial] = span
        found.append(span)
    return found[:MOST_SPANS]


def timeline_chart(found: list[dict[str, Any]]) -> Any:
    """A row a trial."""
    data = [{**span, "low": span["trial"] - 0.36, "high": span["trial"] + 0.36} for span in found]
    states = [state for state in STATES if any(span["state"] == state for span in data)]
    colour = alt.Color(
        "state:N", title=None, scale=alt.Scale(domain=STATES),
        legend=alt.Legend(values=states, symbolType="square", symbolStrokeWidth=0, symbolSize=90),
    )  # fmt: skip
    numbers = [span["trial"] for span in data]
    tips: list[Any] = ["trial:Q", "state:N", alt.Tooltip("from:Q", title="from (min)", format=".2f"),
            alt.Tooltip("to:Q", title="to (min)", format=".2f"), alt.Tooltip("epoch:Q", title="last epoch")]  # fmt: skip
    scale = alt.Scale(domain=[min(numbers) - 0.6, max(numbers) + 0.6], reverse=True, nice=False, zero=False)
    axis = alt.Axis(tickMinStep=1, format="d", grid=False)
    base = alt.Chart(rows(data)).encode(
        color=colour, tooltip=tips, x=x_axis("minutes since the start", "from", zero=True)
    )
    bar = base.mark_rect(cornerRadius=2, fillOpacity=0.9).encode(
        x2="to:Q", y=alt.Y("low:Q", title="trial", scale=scale, axis=axis), y2="high:Q"
    )
    if not any("end" in span for span in found):
        return alt.layer(bar)
    failed = base.transform_filter("datum.end").mark_point(shape="cross", filled=True, size=70, opacity=1, angle=45)
    return alt.layer(bar, failed.encode(y=alt.Y("trial:Q", scale=scale)))
