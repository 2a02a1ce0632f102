"""Rows as a table for the terminal, for a paper or for a program."""

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from manta.errors import MantaError
from manta.view import Terminal, number

FORMATS = ("table", "markdown", "latex", "csv", "json")
STYLES = {
    "finished": "green",
    "running": "cyan",
    "failed": "red",
    "interrupted": "yellow",
    "died": "red",
    "damaged": "red",
}
NARROWEST = 16  # characters of the column that gives way


@dataclass
class Column:
    """One column of a table."""

    title: str
    rank: int = 0
    """On a narrow terminal columns of the highest rank are left out first; 0 = never."""
    bends: bool = False
    """Its cells are cut where there is no room for them."""
    right: bool = False
    """Aligned to the right."""


@dataclass
class Table:
    """Cells as text, and for programs the same rows as values."""

    columns: list[Column]
    rows: list[list[str]]
    records: list[dict[str, Any]] = field(default_factory=list)
    bold: set[tuple[int, int]] = field(default_factory=set)
    """Cells (row, column) that are the best of their kind."""

    def without_empty(self) -> "Table":
        """Without columns that have no cell, of those that may be left out."""
        kept = [i for i, c in enumerate(self.columns) if c.rank == 0 or any(row[i] for row in self.rows)]
        rows = [[row[i] for i in kept] for row in self.rows]
        bold = {(row, kept.index(column)) for row, column in self.bold if column in kept}
        return Table([self.columns[i] for i in kept], rows, self.records, bold)


def render(table: Table, form: str, terminal: Terminal) -> None:
    """Print a table; only on a terminal cells are cut."""
    match form:
        case "table":
            terminal.print(plain(table, terminal.width if terminal.is_terminal else None), soft_wrap=True)
        case "markdown":
            write(terminal, markdown(table))
        case "latex":
            write(terminal, latex(table))
        case "csv":
            write(terminal, comma_separated(table.records), end="")
        case "json":
            write(terminal, json.dumps(table.records, indent=2))
        case _:
            raise MantaError(f"--format {form}: it must be of {', '.join(FORMATS)}.")


def write(terminal: Terminal, text: str, end: str = "\n") -> None:
    """Text as it is: no colours, nothing wrapped."""
    terminal.print(Text(text, end=""), end=end, soft_wrap=True)


def plain(table: Table, width: int | None = None) -> Text:
    """Aligned columns without lines, cut to `width` characters as far as the columns allow."""
    widths = _widths(table, width)
    last, text = max(widths), Text()
    for at, row in enumerate([[column.title for column in table.columns], *table.rows]):
        text.append("\n" if at else "")
        for i in widths:
            cell = _cut(row[i], widths[i], keep_end=at == 0)
            aligned = cell.rjust(widths[i]) if table.columns[i].right else cell.ljust(widths[i])
            style = "bold" if at == 0 or (at - 1, i) in table.bold else STYLES.get(cell, "")
            text.append(aligned.rstrip() if i == last else aligned + "  ", style=style)
    return text


def _widths(table: Table, width: int | None) -> dict[int, int]:
    """The columns that are shown, with their widths; None = as wide as they are."""
    columns = table.columns
    widths = {i: max(len(cell) for cell in (c.title, *(row[i] for row in table.rows))) for i, c in enumerate(columns)}
    if width is None:
        return widths
    for i in sorted(widths, key=lambda i: -columns[i].rank):
        least = sum((min(widths[j], NARROWEST) if columns[j].bends else widths[j]) + 2 for j in widths)
        if least <= width + 2:
            break
        if columns[i].rank > 0:
            del widths[i]
    bending = [i for i in widths if columns[i].bends]
    room = width - sum(widths[i] + 2 for i in widths if i not in bending)
    if room < 8 and len(bending) == 1:
        return {i: widths[i] for i in widths if i not in bending}
    each = (room + 2) // max(len(bending), 1) - 2
    return {i: min(widths[i], max(each, 1)) if i in bending else widths[i] for i in widths}


def _cut(text: str, width: int, keep_end: bool) -> str:
    """Text in so many characters; of a run that is a title its end tells it apart."""
    if len(text) <= width:
        return text
    return "…" + text[len(text) - width + 1 :] if keep_end else text[: width - 1] + "…"


def markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    rows = [
        [f"**{cell}**" if (at, i) in table.bold else cell for i, cell in enumerate(row)]
        for at, row in enumerate(table.rows)
    ]
    rule = ["---:" if column.right else "---" for column in table.columns]
    return "\n".join([line([column.title for column in table.columns]), line(rule), *map(line, rows)])


def latex(table: Table) -> str:
    r"""A tabular with the rules of booktabs (\usepackage{booktabs})."""
    lines = [r"\begin{tabular}{" + "".join("r" if column.right else "l" for column in table.columns) + "}", r"\toprule"]
    lines.append(" & ".join(tex(column.title) for column in table.columns) + r" \\")
    lines.append(r"\midrule")
    for at, row in enumerate(table.rows):
        cells = [rf"\textbf{{{tex(cell)}}}" if (at, i) in table.bold else tex(cell) for i, cell in enumerate(row)]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "…": r"\dots{}",
}  # fmt: skip


def tex(text: str) -> str:
    """Text with LaTeX's own characters escaped."""
    return re.sub("|".join(map(re.escape, _TEX)), lambda found: _TEX[found[0]], text)


def comma_separated(records: Sequence[dict[str, Any]]) -> str:
    """The union of keys as columns, one row a record."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(record.get(column)) for column in columns] for record in records)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)


# --- words -------------------------------------------------------------------------------------------------------


def span(seconds: float | None) -> str:
    """A time in its two largest units: 45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    for unit, size, below, small in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"


def age(seconds: float | None) -> str:
    """A time in its largest unit."""
    return " ".join(span(seconds).split()[:2])


def size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def value(found: Any) -> str:
    """A setting's value, compact."""
    if isinstance(found, bool) or found is None:
        return json.dumps(found)
    if isinstance(found, float):
        return f"{found:.4g}"
    return str(found).replace(", ", ",") if isinstance(found, list) else str(found)


def assignments(values: dict[str, Any]) -> str:
    """`model=cnn optimizer.lr=0.02`."""
    return " ".join(f"{key}={value(found)}" for key, found in values.items())


def metric(found: Any) -> str:
    """A metric; a dash where there is none."""
    return number(found) if isinstance(found, int | float) and not isinstance(found, bool) else "-"


def mode_of(name: str, objective: dict[str, Any]) -> str | None:
    """Whether a metric is better large (`max`) or small (`min`); None = nobody can tell.

    The objective says so for itself, on every split; of others their names do.
    """
    bare = name.rpartition("/")[2]
    if bare == str(objective.get("metric")).rpartition("/")[2]:
        return objective.get("mode")
    if re.search(r"loss|error|perplexity|\bppl\b|rmse|mse|mae|nll", bare):
        return "min"
    return "max" if re.search(r"acc|f1|auc|precision|recall|score|iou|r2|bleu", bare) else None
