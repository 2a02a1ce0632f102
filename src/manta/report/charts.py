"""Charts that several pages share: curves, and what is drawn over them."""

import math
from typing import Any

import altair as alt

from manta.report.history import Point

ORDERED = 200.0  # a range of positive values with a larger ratio is drawn on a logarithmic axis
MOST_GUIDES = 12
FEW = 4  # as many series are told apart by dashes, too
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]


def rows(points: list[Any]) -> alt.Data:
    """Data of a chart."""
    return alt.Data(values=points)


def axis_scale(values: list[float | None]) -> alt.Scale:
    """Linear without zero, or logarithmic for positive values over several orders of magnitude."""
    known = [value for value in values if value is not None]
    wide = known and min(known) > 0 and max(known) / min(known) > ORDERED
    return alt.Scale(type="log", nice=False) if wide else alt.Scale(zero=False, nice=True, padding=6)


def x_axis(title: str, field: str = "x", zero: bool = False) -> alt.X:
    """Steps, epochs or minutes."""
    whole = title in ("step", "epoch")
    expression = "datum.value % 1 ? '' : format(datum.value, ',d')"  # of a short axis Vega also marks halves
    axis = alt.Axis(tickCount=8, labelExpr=expression) if whole else alt.Axis(tickCount=8)
    return alt.X(f"{field}:Q", title=title, scale=alt.Scale(zero=zero, nice=False, padding=8), axis=axis)


def y_axis(title: str, values: list[float | None], field: str = "y") -> alt.Y:
    scale = axis_scale(values)
    if scale.to_dict().get("type") != "log":
        return alt.Y(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(tickCount=6))
    known = [value for value in values if value is not None]
    axis = alt.Axis(values=decades(min(known), max(known)), format="~g")
    return alt.Y(f"{field}:Q", title=f"{title} (logarithmic)", scale=scale, axis=axis)


def decades(low: float, high: float) -> list[float]:
    """Marks of a logarithmic axis: powers of ten, and if these are few, three times them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if len(powers) > 4 else (1, 3)
    found = [float(f"{step}e{power}") for power in powers for step in steps]
    return [value for value in found if low <= value <= high] or [low, high]


def curves(
    series: dict[str, list[Point]], x: str, y: str, best: int | None = None, takeovers: list[dict[str, Any]] | None = None
) -> Any:  # fmt: skip
    """Lines by name; sparse ones with points.

    Args:
        x, y: titles of the axes.
        best: where the best checkpoint was.
        takeovers: {"x", "what"}: where population based training took over weights.
    """
    points = [{**point, "s": name} for name, line in series.items() for point in line]
    names, values = list(series), [point["y"] for point in points]
    tips = [alt.Tooltip("s:N", title="curve")] if len(names) > 1 else []
    tips += [alt.Tooltip("y:Q", title=y, format=".5~g"), alt.Tooltip("step:Q", format=","), alt.Tooltip("epoch:Q")]
    base = alt.Chart(rows(points)).encode(
        x=x_axis(x),
        y=y_axis(y, values),
        color=alt.Color("s:N", title=None, scale=alt.Scale(domain=names), legend=alt.Legend() if len(names) > 1 else None),
        detail="g:N",
        order="i:Q",
        tooltip=tips,
    )  # fmt: skip
    line = base.mark_line()
    if 1 < len(names) <= FEW:
        dash = alt.StrokeDash("s:N", title=None, scale=alt.Scale(domain=names, range=DASHES[: len(names)]))
        line = line.encode(strokeDash=dash)
    sparse = [name for name, found in series.items() if len(found) <= 60]
    layers = [
        line,
        base.mark_point(filled=True, size=34, opacity=1).transform_filter(alt.FieldOneOfPredicate("s", sparse)),
    ]
    layers.append(base.mark_point(size=160, opacity=1, fillOpacity=0, filled=True))  # what the pointer finds
    rules = [*([{"x": best, "what": "best checkpoint"}] if best is not None else []), *(takeovers or [])]
    return alt.layer(*layers, *guides(rules, max((point["x"] for point in points), default=0)))


def guides(rules: list[dict[str, Any]], end: float) -> list[Any]:
    """Vertical lines with words beside them, towards the middle of the chart."""
    layers = []
    for index, rule in enumerate(rules[:MOST_GUIDES]):
        mark = alt.Chart(rows([rule])).encode(x="x:Q", tooltip=alt.Tooltip("what:N", title=" "))
        layers.append(mark.mark_rule(style="guide", strokeDash=[4, 3], strokeWidth=1.2))
        side: Any = {"align": "right", "dx": -5} if rule["x"] > end / 2 else {"align": "left", "dx": 5}
        words = mark.encode(text="what:N", y=alt.value(2 + 14 * (index % 4)))
        layers.append(words.mark_text(style="soft", baseline="top", **side))
    return layers


def bars(found: dict[str, float], title: str) -> Any:
    """Shares of 1, the largest on top."""
    values = [{"name": name, "share": share} for name, share in found.items()]
    base = alt.Chart(rows(values)).encode(
        x=alt.X("share:Q", title=title, axis=alt.Axis(format="%", tickCount=5, grid=True),
                scale=alt.Scale(domain=[0, max(max(found.values()) * 1.12, 0.01)], nice=False)),
        y=alt.Y("name:N", title=None, sort=list(found), axis=alt.Axis(labelLimit=260)),
        tooltip=[alt.Tooltip("name:N", title="setting"), alt.Tooltip("share:Q", format=".1%")],
    )  # fmt: skip
    bar = base.mark_bar(style="accent", cornerRadiusEnd=3, height={"band": 0.62})
    text = base.mark_text(align="left", dx=5).encode(text=alt.Text("share:Q", format=".0%"))
    return alt.layer(bar, text)


def confusion(counts: list[list[int]], names: list[str]) -> Any:
    """Rows are targets, columns predictions; colour is the share of the row."""
    cells = [
        {"target": names[t], "prediction": names[p], "count": count, "share": count / max(sum(row), 1)}
        for t, row in enumerate(counts)
        for p, count in enumerate(row)
        if count
    ]
    few = len(names) <= 20
    axis = alt.Axis(labelAngle=0 if max(map(len, names)) <= 3 else -40, labelLimit=110, domain=False, grid=False)
    base = alt.Chart(rows(cells)).encode(
        x=alt.X("prediction:N", sort=names, scale=alt.Scale(domain=names), title="prediction", axis=axis),
        y=alt.Y("target:N", sort=names, scale=alt.Scale(domain=names), title="target",
                axis=alt.Axis(labelLimit=110, domain=False, grid=False)),
        tooltip=["target:N", "prediction:N", "count:Q", alt.Tooltip("share:Q", title="share of target", format=".1%")],
    )  # fmt: skip
    colour = alt.Color(
        "share:Q", title="share of the target's samples", scale=alt.Scale(domain=[0, 1]),
        legend=alt.Legend(format="%", orient="top", gradientLength=200, gradientThickness=8),
    )  # fmt: skip
    layers = [base.mark_rect(cornerRadius=2).encode(color=colour)]
    if few:
        ink = alt.condition("datum.share > 0.6", alt.value("#101010"), alt.value("#ffffff"))
        layers.append(base.mark_text(fontSize=11).encode(text="count:Q", color=ink))
    return alt.layer(*layers)
