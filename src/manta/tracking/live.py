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
from typing import Any

from manta.config import Config
from manta.runs import RunDir
from manta.tracking import FOLDER, enabled, end_is_told, forget_end, remember_end

Say = Callable[[str], None]
DOWN_S = 2.0
"""How long the end of a run still waits for a tracker that did not answer before."""


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
    """Trackers of one run while it trains; does nothing if none is switched on."""

    def __init__(self, run: RunDir, config: Config, say: Say) -> None:
        self.run, self.finish_s, self.say = run, config.tracking.finish_s, say
        self.signs: dict[str, str] = dict.fromkeys(enabled(config.tracking), "")
        """What each tracker said last: ended is the last of all, down that it cannot be told."""
        self.number: int | None = None
        self.told_end = 0.0
        if self.signs:
            self.follower = _follower(run)  # its imports take a second or two: now, while the run gets ready

    def start(self) -> None:
        """The run's history is open."""
        if self.signs and self.number is None:
            self.number = next(self.follower.numbers)
            self.follower.lives[self.number] = _open[self.run] = self
            forget_end(self.run)
            self.follower.tell(follow=str(self.run.path), number=self.number, trackers=list(self.signs))

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
        self.start()
        self.follower.tell(end=self.number, state=state)
        self.told_end = time.monotonic()
        remember_end(self.run, state)
        _open.pop(self.run, None)
        _ended.append(self)
        if wait:
            drain()

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


def settle(ended: dict[RunDir, str], config: Config, say: Say) -> None:
    """Tell trackers how runs ended whose processes could not say so themselves."""
    if enabled(config.tracking):
        for run, state in ended.items():
            if not end_is_told(run):
                (_open.get(run) or Live(run, config, say)).end(state, wait=False)
        drain()
