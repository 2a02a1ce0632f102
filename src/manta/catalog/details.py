"""`show` and `compare`: all about one run, and what differs between several."""

import os
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

from manta import runs
from manta.catalog import render
from manta.catalog.entries import Entry
from manta.catalog.render import Column, Table
from manta.catalog.settings import NOT_SETTINGS, is_under, same
from manta.runs import find_checkpoint
from manta.view import SPEEDS, Rows, speed

OF_A_REPORT = ("step", "epoch", "time", *SPEEDS)
NOTHING = "-"


def show(entry: Entry) -> Rows:
    """What and value; parts that the run does not have are left out."""
    entry.read_all()
    status, summary, git = entry.status, entry.summary, entry.provenance.get("git") or {}
    rows: Rows = [("run", str(entry)), ("kind", entry.kind), ("state", _state(entry))]
    rows += [("problem", problem) for problem in entry.problems]
    rows += [("error", str(status["error"]).strip())] if status.get("error") else []
    named = {"name": entry.name, "tags": ", ".join(entry.tags), "group": entry.group}
    rows += [(what, text) for what, text in named.items() if text]
    rows.append(("command", str(entry.provenance.get("command") or NOTHING)))
    rows.append(("settings", "\n".join(map(_assignment, entry.differences.all().items())) or "the defaults"))
    rows += _results(entry)
    if entry.kind == "search":
        trials = summary.get("trials") or {}
        rows.append(("trials", "  ".join(f"{state} {count}" for state, count in trials.items()) or NOTHING))
    rows += [("checkpoints", "\n".join(checkpoints(entry.path)))] if (entry.path / "checkpoints").is_dir() else []
    rows.append(("code", _code(git)))
    rows.append(("host", f"{status.get('host', NOTHING)}, {summary.get('world_size', NOTHING)} worker(s)"))
    rows.append(("size", render.size(disk_usage(entry.path))))
    return rows + _commands(entry)


def _assignment(item: tuple[str, Any]) -> str:
    return render.assignments(dict([item]))


def _state(entry: Entry) -> str:
    """State, times and attempts in a line."""
    status, parts = entry.status, [entry.state]
    if entry.state == "died":
        parts.append(f"its process (pid {status.get('pid')} on {status.get('host')}) is gone")
    if entry.started is not None:
        parts.append(f"started {datetime.fromtimestamp(entry.started):%Y-%m-%d %H:%M:%S}")
    parts.append(
        f"took {render.span(entry.duration)}" if entry.state != "running" else f"for {render.span(entry.duration)}"
    )
    parts.append(f"attempt {status.get('attempts', NOTHING)}")
    if status.get("exit_code") is not None:
        parts.append(f"exit code {status['exit_code']}")
    return ", ".join(parts)


def _results(entry: Entry) -> Rows:
    """Best, last and test."""
    best, summary, rows = entry.summary.get("best"), entry.summary, []
    if isinstance(best, dict):
        trial = f"trial {best['trial']}, " if "trial" in best else ""
        rows.append(
            ("best", f"{trial}epoch {best.get('epoch')}, step {best.get('step')}: {_metrics(entry.metrics('best'))}")
        )
    if entry.metrics("last") and entry.kind != "search":
        at = f"epoch {summary.get('epoch')}, step {summary.get('step')}: "
        rows.append(("last", at + _metrics(entry.metrics("last"))))
    rows += [("test", _metrics(entry.metrics("test")))] if entry.metrics("test") else []
    throughput = summary.get("throughput") or {}
    return rows + ([("speed", speed(throughput))] if throughput.get("samples_per_s") else [])


def _metrics(found: dict[str, Any]) -> str:
    return "  ".join(f"{key} {render.metric(value)}" for key, value in found.items())


def checkpoints(run: Path) -> list[str]:
    """Each with its size, and what names it."""
    folder, lines = run / "checkpoints", []
    links = {name: found.name for name in ("best", "last") if (found := find_checkpoint(folder, name))}
    for path in sorted(folder.glob("step-*")):
        if not path.is_symlink():
            names = "".join(f", {name}" for name, target in links.items() if target == path.name)
            lines.append(f"{path.name}  {render.size(disk_usage(path))}{names}")
    return lines or [NOTHING]


def disk_usage(folder: Path) -> int:
    """Bytes of all files below; a file with several names counts once, what a link names does not."""
    seen: dict[tuple[int, int], int] = {}
    for top, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(top, name))
            except OSError:
                continue
            seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())


def _code(git: dict[str, Any]) -> str:
    if not git.get("commit"):
        return NOTHING
    changed = f", with changes that are not committed ({git['diff']})" if git.get("diff") else ", nothing changed"
    return f"commit {git['commit'][:10]} ({git.get('branch')}){changed}"


def _commands(entry: Entry) -> Rows:
    """What can be done with it next."""
    where, whole, rows = shlex.quote(str(entry)), bool(entry.config and entry.status), []
    if entry.kind == "search":
        has_checkpoint = (entry.path / "best" / "checkpoint").exists()
    else:
        has_checkpoint = find_checkpoint(entry.path / "checkpoints", "best") is not None
    if whole and entry.part is None and entry.state != "running":
        rows.append(("resume", f"python train.py resume={where}"))
    if whole and has_checkpoint:
        rows.append(("evaluate", f"python scripts/evaluate.py run={where}"))
        rows.append(("predict", f"python scripts/predict.py run={where}"))
    return [*rows, ("repeat", f"python scripts/runs.py rerun {where}")]


# --- compare -----------------------------------------------------------------------------------------------------


def compare(entries: list[Entry]) -> Table:
    """Rows: settings that differ, metrics with the better one marked, code and packages that differ."""
    table = Table([Column(""), *(Column(str(entry), bends=True) for entry in entries)], [])
    for entry in entries:
        entry.read_all()
    _add(table, "state", [entry.state for entry in entries])
    for name, cells in _choices(entries).items():
        _add(table, name, cells)
    for key in _differing(entries):
        cells = [render.value(entry.config[key]) if key in entry.config else NOTHING for entry in entries]
        _add(table, key, cells)
    for which in ("best", "last", "test"):
        _add_metrics(table, which, entries)
    _add(table, "time", [render.span(entry.duration) for entry in entries])
    for what, cells in _code_and_packages(entries):
        if len(set(cells)) > 1:
            _add(table, what, cells)
    titles = [column.title for column in table.columns[1:]]
    table.records = [
        {"run": title, **{row[0]: row[at] for row in table.rows}} for at, title in enumerate(titles, start=1)
    ]
    return table


def _add(table: Table, what: str, cells: list[str]) -> None:
    table.rows.append([what, *cells])


def _choices(entries: list[Entry]) -> dict[str, list[str]]:
    """Groups of which the runs have different options."""
    found = {}
    groups = dict.fromkeys(group for entry in entries for group in entry.differences.choices)
    for group in groups:
        options = [entry.defaults.choice(group, entry.overrides) or NOTHING for entry in entries]
        if len(set(options)) > 1:
            found[group] = options
    return found


def _differing(entries: list[Entry]) -> list[str]:
    """Settings that are not the same in all runs; targets are left to the choice that names them."""
    nothing, named = object(), tuple(group.replace("/", ".") for group in _choices(entries))
    keys = dict.fromkeys(key for entry in entries for key in entry.config)
    first = entries[0].config
    return [
        key
        for key in keys
        if not is_under(key, NOT_SETTINGS)
        and not (key.endswith("_target_") and is_under(key, named))
        and any(not same(entry.config.get(key, nothing), first.get(key, nothing)) for entry in entries[1:])
    ]


def _add_metrics(table: Table, which: str, entries: list[Entry]) -> None:
    found = [entry.metrics(which) for entry in entries]
    for key in dict.fromkeys(key for each in found for key in each):
        if key in OF_A_REPORT or key.endswith("/lr"):
            continue
        values = [each.get(key) for each in found]
        for at in best_of(values, render.mode_of(key, entries[0].objective)):
            table.bold.add((len(table.rows), at + 1))
        cells = [render.metric(value) for value in values]
        marked = {at - 1 for row, at in table.bold if row == len(table.rows)}
        _add(table, f"{which} {key}", [f"{cell} *" if at in marked else cell for at, cell in enumerate(cells)])


def best_of(values: list[Any], mode: str | None) -> list[int]:
    """Where the best of several numbers are; nowhere if it cannot be told, or all are the same."""
    known = [value for value in values if isinstance(value, int | float)]
    if mode is None or len(known) < 2 or len(set(known)) == 1:
        return []
    best = max(known) if mode == "max" else min(known)
    return [at for at, value in enumerate(values) if value == best]


def _code_and_packages(entries: list[Entry]) -> list[tuple[str, list[str]]]:
    """What the runs were made with."""
    git = [entry.provenance.get("git") or {} for entry in entries]
    packages = [entry.provenance.get("packages") or {} for entry in entries]
    found = [
        (
            "commit",
            [str(each.get("commit") or NOTHING)[:10] + (" + changes" if each.get("diff") else "") for each in git],
        ),
        ("python", [str(entry.provenance.get("python") or NOTHING) for entry in entries]),
        ("host", [str(entry.provenance.get("host") or NOTHING) for entry in entries]),
    ]
    names = sorted({name for each in packages for name in each}, key=str.lower)
    return found + [(f"package {name}", [str(each.get(name, NOTHING)) for each in packages]) for name in names]


def code_differs(entry: Entry) -> str | None:
    """One line if this checkout is not the code that a run was made with."""
    git = entry.provenance.get("git") or {}
    then, here = git.get("commit"), runs.commit()
    if then and here and then != here:
        return f"{entry} was made with commit {then[:10]}, this is {here[:10]}: results may differ."
    if git.get("diff"):
        return f"{entry} was made with changes that were not committed ({entry.path.name}/{git['diff']}): results may differ."
    return None
