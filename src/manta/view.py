"""What the user sees: the plan, live progress, the result; and train.log, which gets all of it as plain text.

On a terminal there is one live line below the lines printed so far; elsewhere one line an epoch. Both are drawn from
the run's reports alone. A search has one live table of the trials that run; elsewhere one line a trial that ended.
Everything else that any process prints goes to train.log; what the researcher's own code
prints is also shown.
"""

import io
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from manta.config import Config

if TYPE_CHECKING:
    from manta.search.record import Record
    from manta.search.space import Space

MOST_ROWS = 8  # of the table of running trials
Rows = list[tuple[str, str]]


def table(title: str, rows: Rows) -> Text:
    """Two columns, what and value; values are never broken, so that commands can be copied."""
    width = max(len(what) for what, _ in rows) + 2
    text = Text(title, style="bold")
    for what, value in rows:
        text.append(f"\n{what:<{width}}", style="not bold cyan").append(value, style="not bold")
    return text


def number(value: float | None) -> str:
    """Four significant digits, as people read metrics."""
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e4 else f"{value:.4f}"


SPEEDS = ("samples_per_s", "tokens_per_s", "mfu")


def speed(values: dict[str, Any]) -> str:
    """What a report or a summary says of it."""
    tokens = f", {values['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in values else ""
    mfu = f", MFU {values['mfu']:.3f}" if "mfu" in values else ""
    return f"{values.get('samples_per_s', 0):,.0f} samples/s{tokens}{mfu}"


def brief(value: Any) -> str:
    """A value of a setting, floats with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def assignments(values: dict[str, Any]) -> str:
    """E.g. `model=mlp  optimizer.lr=0.0123`."""
    return "  ".join(f"{key}={brief(value)}" for key, value in values.items())


class Terminal(Console):
    """A console that falls silent when nobody reads it any more (`| head`): training goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())  # what it still buffers goes nowhere


@dataclass
class Trials:
    """What is shown of a search."""

    config: Config
    space: "Space"
    total: int | None
    """None = as many as the time allows."""
    ended: dict[int, str] = field(default_factory=dict)
    """The state that was shown of each trial that ended."""
    records: list["Record"] = field(default_factory=list)
    running: list["Record"] = field(default_factory=list)
    waiting: int = 0
    eta_s: float | None = None

    def best(self) -> "Record | None":
        from manta.search.record import ranked

        return next(iter(ranked(self.records, self.config.objective.mode)), None)

    def news(self) -> "list[Record]":
        """Trials that ended since the last call; one that is tried again ends again."""
        now = {each.number: each.state for each in self.records if each.state != "running"}
        new = [each for each in self.records if now.get(each.number) not in (None, self.ended.get(each.number))]
        self.ended = now
        return new

    def line(self, record: "Record") -> str:
        """A trial that ended."""
        metric, best = self.config.objective.metric, self.best()
        mark = "  best so far" if best is record else ""
        error = f"  {' '.join(record.error.split())}" if record.error else ""
        return (
            f"trial {record.number:>3}  {record.state:<8}  {metric} {number(record.value)}  {record.epochs} epochs  "
            f"{record.seconds:.1f} s  {assignments(self.space.active(record.values))}{mark}{error}"
        )

    def headline(self) -> str:
        states = Counter(each.state for each in self.records if each.state != "running")
        parts = [f"trials {len(self.records)}" + ("" if self.total is None else f"/{self.total}")]
        parts.append(f"running {len(self.running)}")
        parts += [f"waiting {self.waiting}"] if self.waiting else []
        parts += [f"{state} {states[state]}" for state in ("finished", "stopped", "failed") if states[state]]
        best = self.best()
        if best is not None:
            parts.append(f"best {self.config.objective.metric} {number(best.value)} (trial {best.number})")
        if self.eta_s is not None:
            parts.append(f"ETA {str(timedelta(seconds=round(self.eta_s))).removeprefix('0:')}")
        return " · ".join(parts)

    def table(self) -> RenderableType:
        """The headline and the first running trials, one line each whatever the width."""
        epochs = self.config.training.epochs
        of = "" if epochs is None else f"/{epochs}"
        text = Text(self.headline(), style="bold", no_wrap=True, overflow="ellipsis")
        for each in self.running[:MOST_ROWS]:
            values = assignments(self.space.active(each.values))
            row = f"\ntrial {each.number:>3}  epoch {each.epoch:>{max(len(of) - 1, 3)}}{of}  {number(each.value):>10}  {values}"
            text.append(row, style="not bold")
        more = len(self.running) - MOST_ROWS
        return text.append(f"\nand {more} more", style="not bold") if more > 0 else text


class View:
    """The terminal of one command."""

    def __init__(self, silent: bool = False) -> None:
        self.terminal = Terminal(file=sys.stdout, highlight=False, soft_wrap=True, quiet=silent)
        self.log: Console | None = None
        self._log_file: IO[str] | None = None
        self._aside: IO[str] | None = None
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._table: Live | None = None
        self._trials: Trials | None = None
        self._lock = threading.RLock()
        self._objective = ""
        self._latest: dict[str, Any] = {}
        self._last_step = -1

    # --- lines ---------------------------------------------------------------------------------------------------

    def say(self, what: RenderableType, style: str | None = None, log: bool = True) -> None:
        """Show a line or a table, and log it."""
        with self._lock:
            self.terminal.print(what, style=style, markup=False)
            if log and self.log is not None:
                self.log.print(what, markup=False)

    def note(self, text: str) -> None:
        """Log text without showing it."""
        with self._lock:
            if self._log_file is not None and text:
                self._log_file.write(text.rstrip("\n") + "\n")
                self._log_file.flush()

    def open_log(self, path: Path) -> None:
        self._log_file = open(path, "a", buffering=1)
        if self._aside is not None:
            self._redirect(self._log_file)
            self._aside.seek(0)
            self.note(self._aside.read())
        self.log = Console(file=self._log_file, width=120, highlight=False, no_color=True, soft_wrap=True)

    # --- progress ------------------------------------------------------------------------------------------------

    @contextmanager
    def progress(self, config: Config, total_steps: int | None) -> Iterator[None]:
        """Inside, `update` draws the reports it is given."""
        self._objective, self._last_step = config.objective.metric, -1
        if self.terminal.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("step {task.completed}" + ("/{task.total}" if total_steps else "")),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(compact=True),
                console=self.terminal,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._live.add_task("starting", total=total_steps, numbers="")
            self._live.start()
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        """Take the live line away (for the end, or for a debugger)."""
        with self._lock:
            for live in (self._live, self._table):
                if live is not None:
                    live.stop()
            self._live = self._table = None

    def update(self, line: dict[str, Any]) -> None:
        """Draw one report."""
        with self._lock:
            if line["step"] < self._last_step:
                self._latest = {}
            self._last_step = line["step"]
            self._latest.update(line)
            if any(key.startswith("val/") for key in line):
                self.say(self._epoch_line(line))
            if self._live is not None and self._task is not None:
                shown = self._latest
                parts = [f"loss {number(shown['train/loss'])}"] if "train/loss" in shown else []
                if self._objective in shown:
                    parts.append(f"{self._objective} {number(shown[self._objective])}")
                if "train/lr" in shown:
                    parts.append(f"lr {shown['train/lr']:.2e}")
                parts.append(speed(shown))
                self._live.update(
                    self._task, completed=line["step"], description=f"epoch {line['epoch']}", numbers="  ".join(parts)
                )

    @staticmethod
    def _epoch_line(line: dict[str, Any]) -> str:
        metrics = "  ".join(
            f"{key} {number(value)}"
            for key, value in line.items()
            if key not in ("step", "epoch", "time", *SPEEDS) and not key.endswith("/lr")
        )
        return f"epoch {line['epoch']:>3}  step {line['step']:>6}  {metrics}  {speed(line)}"

    # --- a search ------------------------------------------------------------------------------------------------

    @contextmanager
    def search_progress(
        self, config: Config, space: "Space", total: int | None, known: "list[Record] | None" = None
    ) -> Iterator[None]:
        """Inside, `trials` draws what it is given.

        Args:
            total: trials; None = as many as the time allows.
            known: of an earlier launch: what has ended then is not told again.
        """
        self._trials = Trials(config, space, total, records=list(known or []))
        self._trials.news()
        if self.terminal.is_terminal:
            # It is drawn by a thread of its own, four times a second, whatever happens here.
            self._table = Live(
                get_renderable=self._trials.table,
                console=self.terminal,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._table.start()
        try:
            yield
        finally:
            self.pause()
            self._trials = None

    def trials(self, records: "list[Record]", running: "list[Record]", waiting: int, eta_s: float | None) -> None:
        """What is known of all trials now.

        Args:
            records: all that were started.
            waiting: of these, those that have no resources yet.
            eta_s: seconds to the end; None = unknown.
        """
        shown = self._trials
        if shown is None:
            return
        with self._lock:
            shown.records, shown.running = list(records), list(running)
            shown.waiting, shown.eta_s = waiting, eta_s
            for record in shown.news():
                line = shown.line(record)
                # On a terminal the table counts them; only what failed says why.
                if self._table is None or record.state == "failed":
                    self.say(line)
                else:
                    self.note(line)

    # --- streams -------------------------------------------------------------------------------------------------

    def user_line(self, text: str) -> None:
        """A line the researcher's own code printed: shown above the live line, and logged."""
        with self._lock:
            self.terminal.print(text, markup=False, soft_wrap=True)
            self.note(text)

    @contextmanager
    def capture_prints(self) -> Iterator[None]:
        """This process's prints also go to train.log, and above the live line (training in this process)."""
        real_out, real_err, real_hook = sys.stdout, sys.stderr, sys.breakpointhook
        self.terminal.file = real_out

        def hook(*args: Any, **kwargs: Any) -> Any:
            # A debugger wants the terminal for itself.
            self.pause()
            sys.stdout, sys.stderr = real_out, real_err
            sys.breakpointhook = real_hook
            import pdb  # noqa: T100

            frame = sys._getframe(1)
            if os.environ.get("PYTHONBREAKPOINT") or real_hook is not sys.__breakpointhook__:
                return real_hook(*args, **kwargs)
            pdb.Pdb(nosigint=True).set_trace(frame)
            return None

        sys.stdout, sys.stderr, sys.breakpointhook = _Lines(self, real_out), _Lines(self, real_err), hook
        try:
            yield
        finally:
            sys.stdout, sys.stderr, sys.breakpointhook = real_out, real_err, real_hook

    @contextmanager
    def capture_descriptors(self) -> Iterator[None]:
        """Whatever this process or its libraries write to stdout or stderr goes to train.log only (Ray's chatter).

        Until there is a log (Ray starts before a run has a directory) it is kept aside.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        kept = os.dup(1), os.dup(2)
        before = self.terminal.file
        with os.fdopen(os.dup(kept[0]), "w", buffering=1) as terminal, tempfile.TemporaryFile("w+") as aside:
            self._aside, self.terminal.file = aside, terminal
            self._redirect(self._log_file or aside)
            try:
                yield
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                for descriptor, real in enumerate(kept, start=1):
                    os.dup2(real, descriptor)
                    os.close(real)
                self._aside, self.terminal.file = None, before

    @staticmethod
    def _redirect(file: IO[str]) -> None:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    def close(self) -> None:
        self.pause()
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = self.log = None


class _Lines(io.TextIOBase):
    """A stdout that hands whole lines to the view."""

    def __init__(self, view: View, real: IO[str]) -> None:
        self.view, self.real, self.partial = view, real, ""

    def write(self, text: str) -> int:
        *lines, self.partial = (self.partial + text).split("\n")
        for line in lines:
            self.view.user_line(line)
        return len(text)

    def flush(self) -> None:
        self.real.flush()

    def isatty(self) -> bool:
        return self.real.isatty()

    def fileno(self) -> int:
        return self.real.fileno()
