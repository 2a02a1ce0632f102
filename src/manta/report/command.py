"""scripts/report.py: a run, a search or several runs as a page with pictures. Imports nothing heavy."""

import os
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from manta import runs
from manta.config import Storage, absolute
from manta.errors import FINISHED, MantaError
from manta.runs import RunDir
from manta.storage import bring_back
from manta.view import Rows, View, table

if TYPE_CHECKING:
    from manta.report.page import Page


@dataclass
class Arguments:
    """A page with charts, report.html, and each chart as a picture, report/*.png, of a run, a search, or several runs.

    For example: python scripts/report.py runs=outputs/2026-05-04/10-12-01,outputs/2026-05-04/10-15-40 output=comparison
    """

    run: str | None = None
    """`latest`, or the directory of a run or a search; it gets the page. Null = latest, unless `runs` or `group` is given."""
    runs: str | None = None
    """Directories, with commas between: compare them. Runs that differ only in `seed` become a mean and a band."""
    group: str | None = None
    """Compare the runs that were started with this `group`."""
    output: str | None = None
    """Folder of a comparison; null = comparison-<time> under `storage.path`."""
    storage: Storage = field(default_factory=Storage)
    """Where run=latest, and runs of a group, are looked for."""
    traceback: bool = False
    """Show Python tracebacks with errors."""


def report(arguments: Arguments) -> int:
    """Write the page and say where it is; an exit code.

    Raises:
        MantaError: the request is invalid, or a run cannot be read.
    """
    given = [key for key in ("run", "runs", "group") if getattr(arguments, key) is not None]
    if len(given) > 1:
        raise MantaError(f"{' and '.join(f'{key}=' for key in given)} are given together: give one of them.")
    if arguments.runs is not None or arguments.group is not None:
        rows = _compare(arguments)
    else:
        if arguments.output is not None:
            raise MantaError(f"output={arguments.output}: a run's page goes into its directory; output= is for runs=.")
        rows = _one(runs.find(arguments.run or "latest", arguments.storage, key="run"), arguments.storage)
    View().say(table("Report", rows))
    return FINISHED


def _one(run: RunDir, storage: Storage) -> Rows:
    from manta.search.best import is_search

    page = write_page(run)
    bring_back(run, storage, print)
    kind = "search" if is_search(run) else "run"
    return [(kind, str(run)), *_where(page)]


def write_page(run: RunDir) -> Path:
    """report.html and report/*.png of a run or a search, into its directory; the path of the page.

    Raises:
        MantaError: it cannot be read, or written there.
    """
    from manta.report.history import read_run
    from manta.search.best import is_search

    found = read_run(run)
    if is_search(run):
        from manta.report.search import search_page

        return _write(search_page(found), run.path)
    from manta.report.run import run_page

    return _write(run_page(found), run.path)


def _compare(arguments: Arguments) -> Rows:
    from manta.report.comparison import comparison_page
    from manta.report.history import find_group, read_run
    from manta.search.best import best_of, is_search

    root = absolute(str(arguments.storage.folder))
    if arguments.group is not None:
        found = [RunDir(path.resolve()) for path in find_group(arguments.group, Path(root))]
        if not found:
            raise MantaError(f"group={arguments.group}: no run under {root} was started with it.")
    else:
        specs = [spec.strip() for spec in (arguments.runs or "").strip("[]").split(",") if spec.strip()]
        found = [runs.find(spec, arguments.storage, key="runs") for spec in specs]
    found = [best_of(run, key="runs") if is_search(run) else run for run in dict.fromkeys(found)]
    if len(found) < 2:
        raise MantaError(
            f"A comparison needs two different runs or more; given: {', '.join(map(str, found)) or 'none'}."
        )
    folder = Path(absolute(arguments.output or os.path.join(root, time.strftime("comparison-%Y-%m-%d-%H-%M-%S"))))
    page = _write(comparison_page([read_run(run) for run in found], folder), folder)
    return [("runs", str(len(found))), *_where(page)]


def _write(page: "Page", folder: Path) -> Path:
    try:
        return page.write(folder)
    except OSError as error:
        raise MantaError(f"The report cannot be written to {folder}: {error.strerror}.") from error


def _where(page: Path) -> Rows:
    pictures = page.parent / "report"
    names = ", ".join(path.stem for path in sorted(pictures.glob("*.png")))
    return [("page", shlex.quote(runs.short(page))), ("pictures", f"{runs.short(pictures)}/*.png: {names or 'none'}")]
