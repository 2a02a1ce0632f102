"""The side of the process that trains: starting the follower, telling it of runs, and waiting for it at the end."""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
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
        self.heard: dict[tuple[str, str], dict[str, float]] = {}
        """Of a run and a tracker: when it last said what."""
        self.says: dict[str, Say] = {}
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
            run, tracker = said.pop("run"), said.pop("tracker")
            ((what, text),) = said.items()
            heard = self.heard.setdefault((run, tracker), {})
            heard[what] = heard["last"] = time.monotonic()
            if what == "say":
                heard.pop("down", None)
            if text and run in self.says:
                later = (
                    f" Later: python scripts/runs.py sync {RunDir(Path(run))} --to {tracker}" if what == "down" else ""
                )
                self.says[run](f"{tracker} {text}{later}")


class Live:
    """Trackers of one run while it trains; does nothing if none is switched on."""

    def __init__(self, run: RunDir, config: Config, say: Say) -> None:
        self.run, self.finish_s, self.say = run, config.tracking.finish_s, say
        self.names = enabled(config.tracking)
        self.key = str(run.path)
        if self.names:
            self.follower = _follower(run)  # its imports take a second or two: now, while the run gets ready

    def start(self) -> None:
        """The run's history is open."""
        if self.names and self.key not in self.follower.says:
            self.follower.says[self.key] = self.say
            for name in self.names:
                self.follower.heard[self.key, name] = {"last": time.monotonic()}
            self.follower.tell(follow=self.key, trackers=self.names)
            forget_end(self.run)

    def end(self, state: str, wait: bool = True) -> None:
        """Tell how the run ended.

        Args:
            wait: until trackers have it all, but no longer than `tracking.finish_s` without an answer.
        """
        if not self.names:
            return
        self.start()
        self.follower.tell(end=self.key, state=state)
        remember_end(self.run, state)
        _unfinished.append(self)
        if wait:
            drain()

    def drain(self) -> None:
        self._wait({"ended"})
        for name in self._missing({"ended"}):
            if "down" not in self.follower.heard[self.key, name]:
                self.say(
                    f"{name} has not been told all in {self.finish_s:g} s; later: python scripts/runs.py sync {self.run} "
                    f"--to {name}"
                )
        self.follower.says.pop(self.key, None)

    def _missing(self, signs: set[str]) -> list[str]:
        return [name for name in self.names if not signs & set(self.follower.heard.get((self.key, name), {}))]

    def _wait(self, signs: set[str]) -> None:
        began = time.monotonic()
        while (missing := self._missing(signs)) and self.follower.alive():
            heard = [self.follower.heard[self.key, name] for name in missing]
            limits = [began + DOWN_S if "down" in each else max(each["last"], began) + self.finish_s for each in heard]
            if time.monotonic() > max(limits):
                return
            time.sleep(0.05)


_running: Follower | None = None
_unfinished: list[Live] = []


def drain() -> None:
    """Wait for the runs whose end nobody has waited for."""
    while _unfinished:
        _unfinished.pop(0).drain()


def _follower(run: RunDir) -> Follower:
    global _running
    if _running is None or not _running.alive():
        (run.path / FOLDER).mkdir(exist_ok=True)
        _running = Follower(os.path.join(run.path, FOLDER, "log.txt"))
        atexit.register(_running.close)
    return _running


def settle(run: RunDir, config: Config, state: str, say: Say) -> None:
    """Tell trackers how a run ended whose process could not say so itself."""
    if enabled(config.tracking) and not end_is_told(run):
        Live(run, config, say).end(state)
