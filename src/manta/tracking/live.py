"""The side of the process that trains: starting the follower, telling it of runs, and waiting for it at the end."""

import atexit
import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from manta import runs
from manta.catalog.entries import parts
from manta.config import Config
from manta.runs import RunDir
from manta.tracking import FOLDER, KILLED, enabled, end_is_told, forget_end, remember_end, told_all

Say = Callable[[str], None]
DOWN_S = 2.0
"""How long the end of a run still waits for a tracker that did not answer before."""
AT_ONCE = 8
"""How many parts of a search one tracker is told of at a time, at the search's end."""


class Follower:
    """The follower of this process; it serves one run after another."""

    def __init__(self, log: str) -> None:
        self.lives: dict[int, Live] = {}
        self.answered: dict[str, float] = defaultdict(float)
        """When a tracker last answered, for whichever run."""
        self.numbers = itertools.count()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "manta.tracking.follower", log],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it died; its trackers are told later
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Let it tell what is left, and end by itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            if said["what"] != "down":
                self.answered[said["tracker"]] = time.monotonic()
            self.lives[said["number"]].hear(said["tracker"], said["what"], said["text"])


class Live:
    """Trackers of one run while it trains, all that are switched on or one of them; does nothing if none is."""

    def __init__(self, run: RunDir, config: Config, say: Say, only: str | None = None) -> None:
        self.run, self.finish_s, self.say = run, config.tracking.finish_s, say
        self.signs: dict[str, str] = dict.fromkeys([only] if only else enabled(config.tracking), "")
        """What each tracker said last: ended is the last of all, down that it cannot be told."""
        self.number: int | None = None
        self.told_end = 0.0
        if self.signs:
            self.follower = _follower(run)  # its imports take a second or two: now, while the run gets ready

    def start(self) -> None:
        """The run's history is open."""
        if self.signs and self.number is None:
            _open[self.run] = self
            forget_end(self.run)
            self._follow(None)

    def _follow(self, state: str | None) -> None:
        self.number = next(self.follower.numbers)
        self.follower.lives[self.number] = self
        self.follower.tell(follow=str(self.run.path), number=self.number, trackers=list(self.signs), state=state)

    def hear(self, tracker: str, what: str, text: str) -> None:
        self.signs[tracker] = what
        if text:
            later = f" Later: {sync_command(self.run, tracker)}" if what == "down" else ""
            self.say(f"{tracker} {text}{later}")

    def end(self, state: str, wait: bool = True) -> None:
        """Tell how the run ended.

        Args:
            wait: until trackers have it all, but no longer than `tracking.finish_s` without an answer.
        """
        if not self.signs:
            return
        self.send_end(state)
        _open.pop(self.run, None)
        _ended.append(self)
        if wait:
            drain()

    def send_end(self, state: str) -> None:
        remember_end(self.run, state)
        self.told_end = time.monotonic()
        if self.number is None:
            self._follow(state)
        else:
            self.follower.tell(end=self.number, state=state)

    def missing(self) -> dict[str, str]:
        """Trackers that have not been told all, and what they said last."""
        return {name: sign for name, sign in self.signs.items() if sign != "ended"}

    def wait(self) -> None:
        while (missing := self.missing()) and self.follower.alive():
            ends = [
                self.told_end + DOWN_S if sign == "down"
                else max(self.told_end, self.follower.answered[name]) + self.finish_s
                for name, sign in missing.items()
            ]  # fmt: skip
            if time.monotonic() > max(ends):
                return
            time.sleep(0.05)


_running: Follower | None = None
_open: dict[RunDir, Live] = {}
_ended: list[Live] = []


def drain() -> None:
    """Wait for the runs that have ended, and say once which tracker has not been told all."""
    late: dict[str, list[Live]] = defaultdict(list)
    while _ended:
        live = _ended.pop(0)
        live.wait()
        for name, sign in live.missing().items():
            if sign != "down":  # that was said
                late[name].append(live)
    for name, lives in late.items():
        first, more = lives[0], f" and of {len(lives) - 1} more" if len(lives) > 1 else ""
        first.say(f"{name} has not been told all of {first.run}{more}. Later: {sync_command(first.run, name)}")


def sync_command(run: RunDir, tracker: str) -> str:
    return f"python scripts/runs.py sync {run} --to {tracker}"


def _follower(run: RunDir) -> Follower:
    global _running
    if _running is None or not _running.alive():
        (run.path / FOLDER).mkdir(exist_ok=True)
        _running = Follower(str(run.path / FOLDER / "log.txt"))
        atexit.register(_running.close)
    return _running


def settle(run: RunDir, state: str, config: Config, say: Say) -> None:
    """Tell trackers how a run ended if its process could not; of a search also what they do not know of its parts.

    The processes of trials go as soon as the search is over, and with them what they had not told yet.
    """
    names = enabled(config.tracking)
    if not names:
        return
    down = set()
    if not end_is_told(run):
        live = _open.get(run) or Live(run, config, say)
        live.end(state, wait=False)
        down = {name for name, sign in live.signs.items() if sign == "down"}
    known = {RunDir(path): _end_of(RunDir(path)) for path in parts(run.path)}
    left = tell_rest(known, names, config, down)
    drain()
    for name, count in left.items():
        what = f"{count} of the {len(known)} trials and refits of {run}"
        say(f"{name} has not been told all of {what}. Later: {sync_command(run, name)}")


def _end_of(run: RunDir) -> str:
    """How it ended: as its own process said, or as its search knows."""
    said = run.read(f"{FOLDER}/end.json").get("state")
    known = str(said or run.read("status.json").get("state", KILLED))
    return KILLED if known == runs.RUNNING else known


@dataclass
class Rest:
    """What one tracker is still to be told, a few runs at a time."""

    name: str
    config: Config
    waiting: list[tuple[RunDir, str]]
    """Runs and how they ended."""
    until: float
    open: list[Live] = field(default_factory=list)

    def left(self) -> int:
        return len(self.waiting) + len(self.open)

    def goes_on(self) -> bool:
        """Let the next ones be told; whether there is something to wait for."""
        self.open = [live for live in self.open if live.missing()]
        while self.waiting and len(self.open) < AT_ONCE:
            run, state = self.waiting.pop(0)
            live = Live(run, self.config, lambda _: None, only=self.name)  # of many runs one line is said at the end
            live.send_end(state)
            self.open.append(live)
        now = time.monotonic()
        if any("down" in live.signs.values() for live in self.open):
            self.until = min(self.until, now + DOWN_S)
        return any(live.follower.alive() for live in self.open) and now < self.until


def tell_rest(ended: dict[RunDir, str], names: list[str], config: Config, down: set[str]) -> dict[str, int]:
    """Tell trackers what the processes of these runs did not, for `tracking.finish_s` in all.

    Args:
        ended: the runs and how they ended.
        down: trackers that do not answer.

    Returns:
        How many runs each tracker has not been told all of, if there are any.
    """
    now, rests, locked = time.monotonic(), {}, {run for run in ended if runs.is_locked(run)}
    for name in names:
        late = [(run, state) for run, state in ended.items() if run not in locked and not told_all(run, name)]
        until = now + (min(DOWN_S, config.tracking.finish_s) if name in down else config.tracking.finish_s)
        rests[name] = Rest(name, config, late, until)
    while sum(rest.goes_on() for rest in rests.values()):  # each of them, every time
        time.sleep(0.05)
    left = {name: rest.left() + len(locked) for name, rest in rests.items()}
    return {name: count for name, count in left.items() if count}
