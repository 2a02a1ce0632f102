"""The page of several runs: runs that differ only in `seed` are one line, their mean, with a band from lowest to highest."""

import json
import os
import statistics
from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import altair as alt

from manta.report.charts import DASHES, FEW, rows, x_axis, y_axis
from manta.report.history import Point, Run, curve, flat
from manta.report.page import ABSENT, Figure, Page, cards, command_line, paragraph, table
from manta.report.search import mean_and_sd
from manta.view import brief, number

# Where a run is, what it is called and what it was asked for: no difference between experiments.
NO_DIFFERENCE = (
    "seed",
    "name",
    "tags",
    "group",
    "storage",
    "resume",
    "plan",
    "traceback",
    "tracking",
    "schema_version",
    "search",
)
MOST_GROUPS, MOST_RUNS = 14, 120  # that are drawn
LONGEST_LABEL = 60


@dataclass
class Group:
    """Runs that differ only in their seed."""

    label: str
    runs: list[Run]
    settings: dict[str, Any]


def comparison_page(found: list[Run], folder: Path) -> Page:
    """Args: folder: where the page will be."""
    groups, differing = _groups(found)
    page = Page(f"Comparison of {len(found)} runs", _head(found, groups))
    shown = groups[:MOST_GROUPS]
    parts: list[str | Figure] = []
    if len(shown) < len(groups):
        parts.append(paragraph(f"Only the first {len(shown)} of {len(groups)} configurations are drawn."))
    page.add("Curves", *parts, *_figures(shown))
    page.add("Results", _results(groups))
    page.add("What differs", _differences(groups, differing))
    page.add("Runs", _runs(groups, folder))
    return page


def _groups(found: list[Run]) -> tuple[list[Group], list[str]]:
    """Groups in the order given, and the settings in which they differ."""
    settings = [
        {key: value for key, value in flat(run.config).items() if key.split(".")[0] not in NO_DIFFERENCE}
        for run in found
    ]
    keys = dict.fromkeys(key for each in settings for key in each)
    differing = [key for key in keys if len({_key(each.get(key, ...)) for each in settings}) > 1]
    gathered: dict[str, Group] = {}
    for run, each in zip(found, settings, strict=True):
        mine = {key: each[key] for key in differing if key in each}
        gathered.setdefault(_key(mine), Group("", [], mine)).runs.append(run)
    groups = list(gathered.values())
    for index, group in enumerate(groups):
        group.label = _label(index, group, len(groups) == 1)
    return groups, differing


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _label(index: int, group: Group, alone: bool) -> str:
    """A letter, and what it is: its differences if they are short, else its runs' name."""
    letter = chr(ord("A") + index) if index < 26 else f"#{index + 1}"
    told = ", ".join(f"{key.removesuffix('._target_')}={_short(value)}" for key, value in group.settings.items())
    names = list(dict.fromkeys(str(run.config.get("name") or run.name) for run in group.runs))
    if alone or not told or len(told) > LONGEST_LABEL:
        told = names[0] if len(names) == 1 else f"{names[0]} and others"
    return f"{letter}: {told[:LONGEST_LABEL]}"


def _short(value: Any) -> str:
    """A target by its last part."""
    if isinstance(value, str) and value.count(".") > 1 and "/" not in value:
        return value.rpartition(".")[2]
    return brief(value) if isinstance(value, str | float) else json.dumps(value, default=str)


def _head(found: list[Run], groups: list[Group]) -> str:
    metric, mode = found[0].metric, found[0].mode
    known = [(statistics.fmean(values), group) for group in groups if (values := _best(group, metric))]
    best = (max if mode == "max" else min)(known, key=lambda pair: pair[0], default=None)
    numbers = [("best configuration", best[1].label if best else "-", "by the mean over its seeds")]
    if best:
        aim = "highest" if mode == "max" else "lowest"
        numbers.append(
            (
                f"{metric}, {aim}",
                mean_and_sd(_best(best[1], metric)),
                f"{len(best[1].runs)} run{'s' * (len(best[1].runs) > 1)}",
            )
        )
    numbers += [("configurations", str(len(groups)), ""), ("runs", str(len(found)), _states(found))]
    commits = list(dict.fromkeys(str((run.provenance.get("git") or {}).get("commit") or "-")[:8] for run in found))
    numbers.append(("commit", commits[0] if len(commits) == 1 else f"{len(commits)} different", ""))
    metrics = {(run.metric, run.mode) for run in found}
    warning = f"<p class='note'>The objectives differ; {escape(metric)} is compared.</p>" if len(metrics) > 1 else ""
    given = ",".join(os.path.relpath(run.dir.path) for run in found)
    again = command_line("repeat", f"python scripts/report.py runs={given}") if len(given) < 400 else ""
    return f"{cards(numbers)}{warning}{again}"


def _states(found: list[Run]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(run.state for run in found).most_common())


def _best(group: Group, metric: str) -> list[float]:
    """The best value of each run that has one."""
    values = (((run.summary.get("best") or {}).get("metrics") or {}).get(metric) for run in group.runs)
    return [float(value) for value in values if value is not None]


# --- curves ----------------------------------------------------------------------------------------------------------


def _figures(groups: list[Group]) -> list[Figure]:
    keys = dict.fromkeys(key for group in groups for run in group.runs for key in run.metrics())
    first = groups[0].runs[0].metric
    wanted = [key for key in keys if key.startswith("val/") or key == "train/epoch_loss" or key == first]
    wanted.sort(key=lambda key: key != first)
    drawn = [(key, "epoch") for key in wanted]
    drawn += [("train/loss", "step")] if "train/loss" in keys else []
    figures = []
    for key, x in drawn:
        lines, bands, single = _overlay(groups, key, x)
        if any(point["y"] is not None for point in [*lines, *single]):
            name = "".join(c if c.isalnum() else "_" for c in key)
            several = any(len(group.runs) > 1 for group in groups)
            note = (
                "Mean over seeds; the band reaches from the lowest to the highest." if several and key == first else ""
            )
            chart = _overlay_chart(lines, bands, single, [group.label for group in groups], x, key)
            figures.append(Figure(name, key, chart, note, wide=key == first, height=340 if key == first else 280))
    return figures


def _overlay(groups: list[Group], key: str, x: str) -> tuple[list[Point], list[Point], list[Point]]:
    """Means, bands, and the runs themselves."""
    means: list[Point] = []
    bands: list[Point] = []
    single: list[Point] = []
    count = 0
    for group in groups:
        at: dict[float, list[float]] = {}
        for run in group.runs:
            points = curve(run.lines, key, x)
            for point in points:
                if point["y"] is not None:
                    at.setdefault(point["x"], []).append(point["y"])
            count += 1
            if count <= MOST_RUNS:
                name = f"{group.label} {run.dir.path.name}"
                single += [
                    {**point, "s": group.label, "g": f"{name} {point['g']}", "run": run.name} for point in points
                ]
        # A mean is of all runs that got as far; where one has ended the mean would jump for that reason alone.
        full = [(x_, values) for x_, values in sorted(at.items()) if len(values) == len(group.runs)]
        means += [{"x": x_, "y": statistics.fmean(values), "s": group.label, "n": len(values)} for x_, values in full]
        if len(group.runs) > 1:
            bands += [{"x": x_, "y": min(values), "high": max(values), "s": group.label} for x_, values in full]
    return means, bands, single


def _overlay_chart(
    means: list[Point], bands: list[Point], single: list[Point], names: list[str], x: str, key: str
) -> Any:  # fmt: skip
    colour = alt.Color(
        "s:N", title=None, scale=alt.Scale(domain=names), sort=names, legend=alt.Legend(columns=2, symbolOpacity=1)
    )
    x_, y_ = x_axis(x), y_axis(key, [point["y"] for point in [*means, *single]])
    tips = [alt.Tooltip("s:N", title="configuration"), alt.Tooltip("y:Q", title=f"mean {key}", format=".5~g"),
            alt.Tooltip("x:Q", title=x), alt.Tooltip("n:Q", title="runs")]  # fmt: skip
    band = (
        alt.Chart(rows(bands)).encode(x=x_, y=y_, y2="high:Q", color=colour, detail="s:N").mark_area(fillOpacity=0.18)
    )
    thin = alt.Chart(rows(single)).encode(
        x=x_, y=y_, color=colour, detail="g:N", order="i:Q",
        tooltip=["run:N", alt.Tooltip("y:Q", title=key, format=".5~g"), alt.Tooltip("x:Q", title=x)],
    )  # fmt: skip
    line = alt.Chart(rows(means)).encode(x=x_, y=y_, color=colour, tooltip=tips)
    strong = line.mark_line(strokeWidth=2.6)
    if 1 < len(names) <= FEW:
        scale = alt.Scale(domain=names, range=DASHES[: len(names)])
        strong = strong.encode(
            strokeDash=alt.StrokeDash("s:N", title=None, scale=scale, legend=alt.Legend(columns=2, symbolOpacity=1))
        )
    layers = [band] if bands else []
    layers += [thin.mark_line(strokeWidth=1, strokeOpacity=0.35)] if single else []
    layers.append(strong)
    if len(means) <= 60 * len(names):
        layers.append(line.mark_point(filled=True, size=34, opacity=1))
    return alt.layer(*layers, line.mark_point(filled=True, size=160, opacity=1, fillOpacity=0))


# --- tables ----------------------------------------------------------------------------------------------------------


def _results(groups: list[Group]) -> str:
    """Mean ± standard deviation over the seeds: validation by the best checkpoint, then test."""
    everyone = [run for group in groups for run in group.runs]
    best = dict.fromkeys(key for run in everyone for key in (run.summary.get("best") or {}).get("metrics") or {})
    test = dict.fromkeys(key for run in everyone for key in run.summary.get("test") or {})
    first = everyone[0].metric
    keys = sorted((key for key in best if key.startswith("val/") or key == first), key=lambda key: key != first)
    lines = []
    for group in groups:
        cells = [mean_and_sd(_best(group, key)) for key in keys]
        for key in test:
            values = [(run.summary.get("test") or {}).get(key) for run in group.runs]
            cells.append(mean_and_sd([float(value) for value in values if value is not None]))
        speed = [(run.summary.get("throughput") or {}).get("samples_per_s") for run in group.runs]
        cells.append(mean_and_sd([float(value) for value in speed if value], lambda value: f"{value:,.0f}"))
        lines.append([group.label, len(group.runs), *cells])
    return table(["configuration", "runs", *keys, *test, "samples/s"], lines)


def _differences(groups: list[Group], differing: list[str]) -> str:
    if not differing:
        return paragraph("Nothing but the seed.")
    lines = [
        [key, *(_short(group.settings[key]) if key in group.settings else ABSENT for group in groups)]
        for key in differing
    ]
    return table(["setting", *(group.label.partition(":")[0] for group in groups)], lines)


def _runs(groups: list[Group], folder: Path) -> str:
    lines = []
    for group in groups:
        for run in group.runs:
            summary = run.summary
            value = ((summary.get("best") or {}).get("metrics") or {}).get(run.metric)
            epoch = (summary.get("best") or {}).get("epoch", "-")
            test = "  ".join(f"{key} {number(value)}" for key, value in (summary.get("test") or {}).items()) or "-"
            target = os.path.relpath(run.dir.path, folder)
            letter = group.label.partition(":")[0]
            lines.append([run.name, letter, run.config.get("seed"), run.state, number(value), epoch, test, target])
    return table(["run", "configuration", "seed", "state", groups[0].runs[0].metric, "best epoch", "test", ], lines, links=True)  # fmt: skip
