"""A page: one self-contained HTML file that needs no network, and each of its charts as a PNG.

Charts are Vega-Lite; their library is put into the page once. Colours follow the reader's light or dark mode.
"""

import json
import os
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from manta.report.style import CONFIGS, CSS, SCRIPT

ABSENT = "\N{EN DASH}"  # where a setting does not apply
SHORT = 30  # cells that are not broken
PNG_WIDTH = {False: 560, True: 1000}


@dataclass
class Figure:
    """A chart with its words."""

    name: str
    """Of its file: report/<name>.png."""
    title: str
    chart: Any
    """Of Altair, without a size."""
    note: str = ""
    wide: bool = False
    height: int = 280
    least: int = 0
    """Width in pixels below which it is scrolled instead of squeezed."""


@dataclass
class Page:
    """Sections of HTML and figures, in order."""

    title: str
    head: str
    """HTML below the title."""
    sections: list[tuple[str, list[Any]]] = field(default_factory=list)
    """(heading, parts: HTML, or a Figure)."""

    def add(self, heading: str, *parts: "str | Figure | None") -> None:
        """A section; without any part it is left out."""
        there = [part for part in parts if part]
        if there:
            self.sections.append((heading, there))

    def figures(self) -> list[Figure]:
        return [part for _, parts in self.sections for part in parts if isinstance(part, Figure)]

    def write(self, folder: Path) -> Path:
        """report.html, in one step, and report/*.png; the path of the page."""
        pictures = folder / "report"
        pictures.mkdir(parents=True, exist_ok=True)
        specs = {figure.name: shared(figure.chart.to_dict(validate=False)) for figure in self.figures()}
        for figure in self.figures():
            (pictures / f"{figure.name}.png").write_bytes(_png(figure, specs[figure.name]))
        for old in pictures.glob("*.png"):
            if old.stem not in specs:
                old.unlink()
        aside = folder / f".report.html.{os.getpid()}"
        aside.write_text(self._html(specs), encoding="utf-8")
        aside.replace(folder / "report.html")
        return folder / "report.html"

    def _html(self, specs: dict[str, Any]) -> str:
        body = "\n".join(
            f"<section><h2>{escape(heading)}</h2>\n<div class='grid'>{''.join(map(_part, parts))}</div></section>"
            for heading, parts in self.sections
        )
        for figure in self.figures():
            specs[figure.name] = {
                **specs[figure.name], "width": "container", "height": figure.height,
                "autosize": {"type": "fit", "contains": "padding"},
            }  # fmt: skip
        charts = f"""<script type="application/json" id="charts">{_json({"specs": specs, "configs": CONFIGS})}</script>
<script>{_library()}</script>
<script>{SCRIPT}</script>"""
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(self.title)}</title>
<link rel="icon" href="data:,">
<style>{CSS}</style>
</head>
<body>
<main>
<header><h1>{escape(self.title)}</h1>
{self.head}</header>
{body}
</main>
{charts if specs else ""}
</body>
</html>
"""


def shared(spec: dict[str, Any]) -> dict[str, Any]:
    """A chart whose layers name their data instead of each having a copy."""
    names: dict[str, str] = {}
    datasets: dict[str, Any] = {}

    def named(part: Any) -> Any:
        if isinstance(part, list):
            return [named(item) for item in part]
        if not isinstance(part, dict):
            return part
        found = {key: named(value) for key, value in part.items() if key != "data"}
        if "data" in part:
            values = part["data"]["values"]
            name = names.setdefault(json.dumps(values), f"data-{len(names)}")
            datasets[name], found["data"] = values, {"name": name}
        return found

    return {**named(spec), "datasets": datasets}


def _png(figure: Figure, spec: dict[str, Any]) -> bytes:
    import vl_convert

    title = {"text": figure.title, "anchor": "start", "offset": 12}
    sized = {**spec, "width": PNG_WIDTH[figure.wide], "height": figure.height, "title": title}
    return bytes(
        vl_convert.vegalite_to_png(
            sized, vl_version=_version(), scale=2, config={**CONFIGS["light"], "background": "white", "padding": 16}
        )
    )


def _version() -> str:
    """Vega-Lite's, as Altair writes it: v6.4."""
    import altair

    return altair.SCHEMA_VERSION.rsplit(".", 1)[0]


def _library() -> str:
    """The JavaScript that draws the charts."""
    import vl_convert

    code = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", _version())
    return str(code).replace("</script", r"<\/script")


def _json(value: Any) -> str:
    """JSON that can stand in a script element whatever a name contains."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- parts -------------------------------------------------------------------------------------------------------


def _part(part: "str | Figure") -> str:
    if isinstance(part, str):
        return part
    note = f"<p class='note'>{escape(part.note)}</p>" if part.note else ""
    name = escape(part.name, quote=True)
    return f"""
<figure class="card{" wide" if part.wide else ""}">
<figcaption><h3>{escape(part.title)}</h3><a href="report/{name}.png">PNG</a>{note}</figcaption>
<div class="scroll"><div class="plot" id="{name}" role="img" aria-label="{escape(part.title, quote=True)}"
 style="min-height:{part.height}px;min-width:{part.least}px"></div></div>
</figure>
"""


def paragraph(text: str, kind: str = "note") -> str:
    """Words across the page; kind: note or error."""
    return f"<p class='{kind} wide'>{escape(text)}</p>"


def cards(rows: list[tuple[str, str, str]]) -> str:
    """Headline numbers: (what, value, words below); the first one is the largest."""
    shown = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd>{f'<small>{escape(more)}</small>' if more else ''}</div>"
        for what, value, more in rows
    )
    return f"<dl class='numbers'>{shown}</dl>"


def chips(state: str, tags: list[str]) -> str:
    """The state, and labels."""
    shown = "".join(f"<span class='chip'>{escape(str(tag))}</span>" for tag in tags)
    return f"<span class='chip state {escape(state, quote=True)}'>{escape(state)}</span>{shown}"


def command_line(label: str, text: str) -> str:
    """A command to copy."""
    return f"<p class='command'><span>{escape(label)}</span><code>{escape(text)}</code></p>"


def table(head: list[str], rows: list[list[Any]], wide: bool = True, title: str = "", links: bool = False) -> str:
    """Cells are escaped; numbers stand right.

    Args:
        links: the last cell of a row is a path that the first cell leads to.
    """
    lines = []
    for row in rows:
        cells = [escape(str(cell)) for cell in (row[:-1] if links else row)]
        short = [len(cell) < SHORT for cell in cells]
        if links:
            cells[0] = f"<a href='{escape(str(row[-1]), quote=True)}'>{cells[0]}</a>"
        lines.append(
            "<tr>"
            + "".join(f"<td{' class=short' * whole}>{cell}</td>" for cell, whole in zip(cells, short, strict=True))
            + "</tr>"
        )
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    top = "<tr>" + "".join(f"<th scope='col'>{escape(str(cell))}</th>" for cell in head) + "</tr>" if head else ""
    return (
        f"<div class='card{' wide' if wide else ''}'>{heading}<div class='scroll'><table><thead>{top}</thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div></div>"
    )


def details(title: str, text: str) -> str:
    """Long text, folded."""
    return f"<details class='card wide'><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def duration(seconds: float | None) -> str:
    """E.g. `1 h 02 min`, `3 min 05 s`, `4.2 s`."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours / 24:.1f} d"
