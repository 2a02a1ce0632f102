"""Notices when nothing moves any more, finds out which rank the others wait for, and ends it in words.

Training marks what it does (`Pulse`, the same marks in the same order on every rank), and a thread of each rank watches
the marks. When one rank has not moved for too long, all ranks write down where they are; the one with the fewest marks is
the one that the others wait for.
"""

import json
import os
import shutil
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from manta.errors import FAILED
from manta.runs import RunDir, write_json

FIRST_STEP_S = 300.0
"""How long may pass in any case until the first step is done: imports, data, compilation, choice of kernels."""
_REPORTS, _VERDICT = ".stuck", "verdict-"
_WAITING = (os.path.join("torch", "distributed"), os.path.join("torch", "autograd", "graph.py"))
_DEBUGGERS = ("bdb", "pdb", "IPython.core.debugger", "pydevd", "debugpy")


class Pulse:
    """What this rank does; a mark costs 0.1 to 0.3 us.

    Attributes:
        step: the one that is under way.
        paused: it waits for something that may take its time.
        warm: a first step is done.
    """

    __slots__ = ("count", "paused", "phase", "step", "warm")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.count, self.step, self.phase = 0, 0, "getting ready"
        self.paused, self.warm = False, False

    def __call__(self, phase: str) -> None:
        """Begin something; only where every rank does."""
        self.phase = phase
        self.count += 1


@dataclass(frozen=True)
class Verdict:
    """Who is stuck, and where."""

    ranks: list[int]
    message: str
    stack: str
    """Of the training thread of the first of them."""


Stuck = Callable[[Verdict, Callable[[float], bool]], None]


class Watchdog:
    """Watches the thread that enters it until it leaves.

    Args:
        timeout_s: without a mark; None = never mind.
        stuck: called in the watching thread, with the verdict and with a function that waits so many seconds for the end of
            what is watched, and tells whether it came. What is stuck may never come back.
    """

    def __init__(
        self,
        run: RunDir,
        pulse: Pulse,
        timeout_s: float | None,
        rank: int = 0,
        world_size: int = 1,
        stuck: "Stuck | None" = None,
    ) -> None:
        self.run, self.pulse, self.timeout_s, self.rank, self.world_size = run, pulse, timeout_s, rank, world_size
        self.stuck = stuck or (lambda *_: os._exit(FAILED))
        self.reports = run.path / _REPORTS
        self.idle_s = 0.0
        self._over = threading.Event()

    def __enter__(self) -> "Watchdog":
        self.pulse.reset()
        self._ident = threading.get_ident()
        if self.timeout_s is not None:
            threading.Thread(target=self._watch, args=(self.timeout_s,), name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self, timeout_s: float) -> None:
        every_s = min(max(timeout_s / 20, 0.02), 5.0)
        grace_s = min(max(timeout_s / 4, 2.0), 30.0)
        count, looked, asked_s = -1, time.monotonic(), 0.0
        while not self._over.wait(every_s):
            now = time.monotonic()
            passed = min(now - looked, 2 * every_s)  # a process that was stopped (Ctrl-Z) has not been idle
            looked = now
            frame = sys._current_frames().get(self._ident)
            if self.pulse.count != count or self.pulse.paused or _debugged(frame):
                count, self.idle_s = self.pulse.count, 0.0
            else:
                self.idle_s += passed
            limit_s = timeout_s if self.pulse.warm else max(timeout_s, FIRST_STEP_S)
            if self.idle_s < limit_s:
                if asked_s:  # it was only slow
                    shutil.rmtree(self.reports, ignore_errors=True)
                    asked_s *= self.reports.is_dir()  # another rank was just writing its answer: once more
                elif self.reports.is_dir():  # somebody else asks
                    with suppress(Exception):
                        self._report(frame, limit_s)
                continue
            asked_s += passed
            try:
                self.reports.mkdir(exist_ok=True)
                self._report(frame, limit_s)
                verdict = self._judge(limit_s, asked_s > grace_s)
                if verdict is not None:
                    write_json(self.reports / f"{_VERDICT}{self.rank}.json", vars(verdict))
            except Exception as error:  # the disk is full, say: nobody can be asked
                if asked_s < grace_s:
                    continue
                what = f"{_doing(self.pulse.phase, self.pulse.step)}, at {place(frame)} ({error})"
                verdict = Verdict([self.rank], self._message([(f"rank {self.rank}", what)], limit_s), "")
            if verdict is not None and not self._over.is_set():
                self.stuck(verdict, self._over.wait)
                return

    def _report(self, frame: FrameType | None, limit_s: float) -> None:
        """Write down where this rank is: for the other ranks, and for people."""
        pulse = self.pulse
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        head = f"rank {self.rank}, pid {os.getpid()} on {socket.gethostname()}: {_doing(pulse.phase, pulse.step)}"
        texts = [f"{head}, not moved for {self.idle_s:.0f} s\n\nThe training thread:\n{stack}"]
        for ident, other in sys._current_frames().items():
            if ident not in (self._ident, threading.get_ident()):
                texts.append(f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(other))}")
        folder = self.run.path / "stacks"
        folder.mkdir(exist_ok=True)
        aside = folder / f".rank-{self.rank}"  # it is written again and again, and this process may end any moment
        aside.write_text("\n".join(texts))
        aside.replace(folder / f"rank-{self.rank}.txt")
        write_json(
            self.reports / f"rank-{self.rank}.json",
            {
                "rank": self.rank,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "count": pulse.count,
                "phase": pulse.phase,
                "step": pulse.step,
                "paused": pulse.paused,
                "idle_s": self.idle_s,
                "limit_s": limit_s,
                "waits": frame is not None and any(each in frame.f_code.co_filename for each in _WAITING),
                "place": place(frame),
                "stack": stack,
            },
        )

    def _judge(self, limit_s: float, all_were_asked: bool) -> Verdict | None:
        """Who is to blame; None while that cannot be said: somebody may still come."""
        found: dict[int, dict[str, Any]] = {}
        for rank in range(self.world_size):
            path = self.reports / f"rank-{rank}.json"
            if path.is_file():
                found[rank] = json.loads(path.read_text())
        silent = [rank for rank in range(self.world_size) if rank not in found]
        if silent and not all_were_asked:
            return None
        if silent:
            stack, places = (
                "",
                [(f"{self._name(rank)} does not answer", "its interpreter is blocked") for rank in silent],
            )
            return Verdict(silent, self._message(places, limit_s), stack)
        here = [report for report in found.values() if not report["paused"]]
        least = min(report["count"] for report in here)
        behind = [report for report in here if report["count"] == least]
        behind = [report for report in behind if not report["waits"]] or behind
        if any(report["idle_s"] < 0.9 * report["limit_s"] for report in behind):
            return None
        places = [
            (
                f"rank {report['rank']} (pid {report['pid']} on {report['host']})",
                f"{_doing(report['phase'], report['step'])}, at {report['place']}",
            )
            for report in behind
        ]
        return Verdict([report["rank"] for report in behind], self._message(places, limit_s), behind[0]["stack"])

    def _name(self, rank: int) -> str:
        ranks = {entry["rank"]: entry for entry in self.run.read("workers.json").get("ranks", [])}
        entry = ranks.get(rank)
        return f"rank {rank}" + (f" (pid {entry['pid']} on {entry['host']})" if entry else "")

    def _message(self, places: list[tuple[str, str]], limit_s: float) -> str:
        who = "; ".join(f"{name}, {where}" for name, where in places)
        waiting = self.world_size - len(places)
        others = (
            f" The other {waiting if waiting > 1 else 'one'} waited for it." if waiting and len(places) == 1 else ""
        )
        if len(places) == self.world_size > 1:
            others = " All wait, as if for each other."
        return (
            f"Stuck: nothing has moved for {limit_s:g} s (scaling.timeout_s): {who}.{others} Stacks: {self.run}/stacks/"
        )


def begin(run: RunDir) -> None:
    """Forget what was written about an earlier attempt; before any rank is watched."""
    shutil.rmtree(run.path / _REPORTS, ignore_errors=True)


def verdict(run: RunDir) -> Verdict | None:
    """What the watchdogs of this run's last attempt found."""
    paths = sorted((run.path / _REPORTS).glob(f"{_VERDICT}*.json"))
    return Verdict(**run.read(f"{_REPORTS}/{paths[0].name}")) if paths else None


def place(frame: FrameType | None) -> str:
    """The innermost line outside installed packages: the researcher's own."""
    if frame is None:
        return "?"
    frames = [(each.filename, each.lineno, each.name) for each in traceback.extract_stack(frame)]
    own = [each for each in frames if not is_installed(each[0])]
    file, line, name = (own or frames)[-1]
    return f"{file}:{line} in {name}"


def is_installed(file: str) -> bool:
    """Whether a file of Python code belongs to Python or to an installed package."""
    return file.startswith((*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, "<"))


def _doing(phase: str, step: int) -> str:
    return f"{phase} (step {step})" if step else phase


def _debugged(frame: FrameType | None) -> bool:
    """Whether a person looks at it in a debugger right now."""
    while frame is not None:
        if frame.f_globals.get("__name__") in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
