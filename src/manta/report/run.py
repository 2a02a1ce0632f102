"""The page of one run."""

from html import escape
from typing import Any

from manta import runs
from manta.errors import MantaError
from manta.report import charts
from manta.report.examples import Example, Examples, find_examples
from manta.report.history import Run, command, curve
from manta.report.page import Figure, Page, cards, chips, command_line, details, duration, paragraph, table
from manta.view import number

MOST_CLASSES = 60  # of a confusion matrix


def run_page(run: Run) -> Page:
    """All that is known of a run, and what its best checkpoint says of the validation split."""
    page = Page(f"Run {run.name}", head(run, _numbers(run)))
    if run.status.get("error"):
        page.add("Why it failed", paragraph(str(run.status["error"]), "error"))
    page.add("Curves", *_curves(run), None if run.lines else paragraph("Nothing has been reported yet."))
    page.add("Validation samples, by the best checkpoint", *_examples(run))
    page.add("Numbers", _metrics(run))
    page.add("How it was made", *made(run))
    return page


# --- parts that a search and a run share -----------------------------------------------------------------------------


def head(run: Run, numbers: list[tuple[str, str, str]]) -> str:
    """Below the title: where it is, its state, headline numbers, what to type."""
    tags = [str(tag) for tag in [run.config.get("group"), *run.config.get("tags", [])] if tag]
    where = f"<p class='path'>{escape(str(run.dir.path))}</p>"
    commands = [command_line("repeat", run.commands[0])] if len(run.commands) == 1 else []
    if run.state != runs.FINISHED and run.summary.get("resume_command"):
        commands.append(command_line("resume", run.summary["resume_command"]))
    return f"{where}{chips(run.state, tags)}{cards(numbers)}{''.join(commands)}"


def commit(run: Run) -> tuple[str, str, str]:
    git = run.provenance.get("git") or {}
    changed = " with uncommitted changes" if git.get("diff") else ""
    return ("commit", str(git.get("commit") or "-")[:8], f"{git.get('branch') or ''}{changed}")


def took(run: Run, until: float | None = None) -> tuple[str, str, str]:
    attempts = run.status.get("attempts") or 1
    return ("duration", duration(run.seconds(until)), f"with pauses, in {attempts} attempts" if attempts > 1 else "")


def made(run: Run) -> list[str]:
    """Commands, machine, versions, settings."""
    told, packages = run.provenance, run.provenance.get("packages", {})
    versions = {name.lower(): version for name, version in packages.items()}
    rows = [("command", text) for text in run.commands]
    rows += [("started", str(run.status.get("started") or "-")), ("host", str(told.get("host") or "-"))]
    rows.append(("hardware", f"{told.get('cpus') or '?'} CPUs, {', '.join(told.get('gpus') or []) or 'no GPU'}"))
    git = told.get("git") or {}
    rows.append(("commit", f"{git.get('commit') or '-'} {git.get('branch') or ''} {git.get('diff') or ''}".strip()))
    known = [f"{name} {versions[name]}" for name in ("torch", "ray", "hydra-core", "numpy") if name in versions]
    rows.append(("versions", ", ".join([f"Python {told.get('python') or '?'}", *known])))
    text = (run.dir.path / "config.yaml").read_text()
    return [table([], [list(row) for row in rows]), details("Configuration (config.yaml)", text)]


# --- headline and curves ---------------------------------------------------------------------------------------------


def _numbers(run: Run) -> list[tuple[str, str, str]]:
    best, objective = run.summary.get("best") or {}, run.summary.get("objective") or {}
    aim = "highest" if run.mode == "max" else "lowest"
    found = [(f"{run.metric}, {aim}", number(objective.get("value")), "" if best else "not validated yet")]
    if best:
        found.append(("best checkpoint", f"epoch {best['epoch']}", f"step {best['step']:,}"))
    found += [(key, number(value), "by the best checkpoint") for key, value in (run.summary.get("test") or {}).items()]
    speed = (run.summary.get("throughput") or {}).get("samples_per_s")
    if speed:
        workers = run.summary.get("world_size") or 1
        found.append(("throughput", f"{speed:,.0f}", f"samples/s, {workers} worker{'s' * (workers > 1)}"))
    return [*found, took(run), commit(run)]


def _curves(run: Run) -> list[Figure]:
    best = (run.summary.get("best") or {}).get("step")
    takeovers = [
        {"x": line["step"], "what": f"weights of trial {line['exploit'].get('donor')}"}
        for line in run.lines
        if "exploit" in line
    ]
    kinds: dict[str, dict[str, Any]] = {}
    for key in run.metrics():
        split, _, name = key.rpartition("/")
        if key not in ("train/epoch_loss", "train/lr", "samples_per_s"):
            kinds.setdefault(name, {})[f"{split} {name}".strip()] = curve(run.lines, key)
    figures = [
        _figure(
            name,
            f"{name[:1].upper()}{name[1:]}",
            charts.curves(series, "step", _only(series) or name, best, takeovers),
            series,
        )
        for name, series in kinds.items()
        if any(point["y"] is not None for line in series.values() for point in line)
    ]
    rate = {"learning rate": curve(run.lines, "train/lr")}
    if rate["learning rate"]:
        figures.append(_figure("learning_rate", "Learning rate", charts.curves(rate, "step", "learning rate"), rate))
    speed = {
        "training": curve([line for line in run.lines if "train/loss" in line or "exploit" in line], "samples_per_s")
    }
    if speed["training"]:
        chart = charts.curves(speed, "step", "samples per second")
        figures.append(_figure("throughput", "Training throughput", chart, speed))
    return figures


def _only(series: dict[str, Any]) -> str:
    """The name of the only curve."""
    return next(iter(series)) if len(series) == 1 else ""


def _figure(name: str, title: str, chart: Any, series: dict[str, Any]) -> Figure:
    gaps = sum(point["y"] is None for line in series.values() for point in line)
    note = f"{gaps:,} value{'s were' if gaps > 1 else ' was'} NaN or infinite: the curve has gaps." if gaps else ""
    return Figure("".join(c if c.isalnum() else "_" for c in name), title, chart, note)


def _metrics(run: Run) -> str | None:
    last, best = run.summary.get("metrics") or {}, (run.summary.get("best") or {}).get("metrics") or {}
    test = run.summary.get("test") or {}
    keys = list(dict.fromkeys([*best, *last, *test]))
    rows = [
        [key, number(best.get(key)) if key not in test else number(test[key]), number(last.get(key))] for key in keys
    ]
    return table(["metric", "best checkpoint", "last"], rows) if rows else None


# --- predictions -----------------------------------------------------------------------------------------------------


def _examples(run: Run) -> list["str | Figure"]:
    try:
        found = find_examples(run.dir)
    except Exception as error:  # the rest of the page is worth having
        reason = str(error) if isinstance(error, MantaError) else f"{type(error).__name__}: {error}"
        return [paragraph(f"There are no predictions here: {' '.join(reason.split())}")]
    right = sum(row[index] for index, row in enumerate(found.counts))
    part = "all" if found.seen == found.size else f"a random {found.seen:,} of"
    text = f"{right / max(found.seen, 1):.2%} of {part} {found.size:,} validation samples are right ({found.seen - right:,} wrong)."
    parts: list[str | Figure] = [paragraph(text)]
    if len(found.classes) <= MOST_CLASSES:
        size = min(max(26 * len(found.classes), 260), 620) + 90
        chart = charts.confusion(found.counts, found.classes)
        parts.append(Figure("confusion", "Confusion", chart, height=size))
    else:
        parts.append(_pairs(found))
    parts.append(_wrong(run, found.wrong))
    return parts


def _pairs(found: Examples) -> str:
    """Of many classes the pairs that are confused most."""
    pairs = [
        (count, found.classes[t], found.classes[p])
        for t, row in enumerate(found.counts)
        for p, count in enumerate(row)
        if t != p and count
    ]
    rows = [[target, prediction, count] for count, target, prediction in sorted(pairs, key=lambda pair: -pair[0])[:20]]
    return table(["target", "prediction", "samples"], rows, wide=False, title="Confused most")


def _wrong(run: Run, found: list[Example]) -> str:
    """Pictures of the samples whose own class got the lowest probability; a table where inputs are no images."""
    title = "Most wrong"
    if not found:
        return f"<div class='card'><h3>{title}</h3><p class='note'>Every sample is right.</p></div>"
    if not found[0].picture:
        rows = [[e.id, e.target, e.prediction, f"{e.probability:.3f}", f"{e.of_target:.3g}"] for e in found]
        return table(["sample", "target", "prediction", "probability", "of target"], rows, wide=False, title=title)
    shown = "".join(
        f"<figure><img src='{e.picture}' alt='validation sample {e.id}'><figcaption><b>{escape(e.target)}</b>, taken for "
        f"<b class='no'>{escape(e.prediction)}</b><small>p {e.probability:.2f}, of {escape(e.target)} {e.of_target:.2g}</small>"
        f"<small>sample {e.id}</small></figcaption></figure>"
        for e in found
    )
    note = "Target, what it was taken for, and the probability of both; lowest probability of the target first."
    again = escape(f"{command('predict', run.dir.path)} split=val")
    return (
        f"<div class='card'><h3>{title}</h3><p class='note'>{note}</p><div class='pictures'>{shown}</div>"
        f"<p class='note' style='margin-top:12px'>All of them as a table: <code>{again}</code></p></div>"
    )
