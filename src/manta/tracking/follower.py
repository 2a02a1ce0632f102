"""The process that tells trackers of runs while they train: `python -m manta.tracking.follower <log>`.

It hears on its input which runs to follow and how they ended ({"follow": run, "number": n, "trackers": names, "state": of one
that has ended already}, {"end": n, "state": state}), and says on its output what becomes of each ({"number", "tracker", "what",
"text"}; what: begun, alive, down, say or ended). When the input closes, the process
that trains is gone: what is on disk is told to the end, then it ends too.
"""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from manta.beside import stand_back
from manta.config import Config
from manta.resume import load
from manta.runs import RunDir
from manta.tracking import (
    KILLED,
    Draws,
    Histograms,
    Point,
    Points,
    Tracker,
    make,
    reported,
    sole,
    told_all,
    update_state,
)
from manta.tracking.trouble import explain

POLL_S = 1.0
LONGEST_PAUSE_S = 30.0


class Feed(threading.Thread):
    """Tells one tracker of one run. Each has a thread, so that one that hangs keeps nobody waiting."""

    def __init__(self, name: str, run: RunDir, config: Config, tell: Callable[..., None], state: str | None) -> None:
        super().__init__(daemon=True)
        self.tracker_name, self.run_dir, self.config, self.tell = name, run, config, tell
        self.points = Points(run.metrics)
        self.histograms = Histograms(run.histograms)
        self.pending: list[Point] = []
        self.drawn: list[dict[str, Any]] = []
        self.begun = self.over = False
        self.state = state
        self.failures = 0
        self._shown: set[type[Exception]] = set()
        self._wake = threading.Event()

    def finish(self, state: str) -> None:
        """The run has ended; tell it the rest."""
        self.state = self.state or state
        self._wake.set()

    def run(self) -> None:
        ended = self.state is not None
        with sole(self.run_dir, self.tracker_name):
            if ended and told_all(self.run_dir, self.tracker_name):  # by the process before, meanwhile
                self.over = True
                self._say("ended")
                return
            tracker = make(self.tracker_name, self.run_dir, self.config, lambda: self._say("alive"))
            while not self.over:
                ending = self.state is not None
                try:
                    self._turn(tracker)
                except Exception as error:
                    self._failed(error)
                if not self.over and (self.failures or not ending):
                    self._wake.wait(min(POLL_S * 2**self.failures, LONGEST_PAUSE_S) if self.failures else POLL_S)
                    self._wake.clear()

    def _turn(self, tracker: Tracker) -> None:
        state, size = self.state, reported(self.run_dir)  # before the lines are read: at the end all of them are there
        if not self.begun:
            tracker.begin()
            update_state(self.run_dir, self.tracker_name, ended=None)
            self.begun = True
            self._say("begun")
        self.pending += self.points.new()
        if self.pending:
            tracker.log(self.pending)
            self.pending = []
        if isinstance(tracker, Draws):
            self.drawn += self.histograms.new()
            if self.drawn:
                tracker.histograms(self.drawn)
                self.drawn = []
        if state is not None:
            tracker.end(state)
            update_state(self.run_dir, self.tracker_name, ended=state, bytes=size)
            self.over = True
            self._say("ended")
        elif self.failures:
            self._say("say", "answers again.")
        self.failures = 0

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if type(error) not in self._shown:  # one that stays away is tried again and again
            self._shown.add(type(error))
            traceback.print_exception(error)
        else:
            print(
                f"{self.tracker_name} of {self.run_dir}: {explain(error, self.tracker_name, self.config)}", flush=True
            )
        if self.failures == 1:
            cause = explain(error, self.tracker_name, self.config)
            self._say("down", f"cannot be told ({cause}). Nothing is lost, and training goes on.")

    def _say(self, what: str, text: str = "") -> None:
        self.tell(tracker=self.tracker_name, what=what, text=text)


def main() -> None:
    stand_back()  # its libraries take seconds of a core to load
    out = os.fdopen(os.dup(1), "w")
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)  # what libraries print
    os.dup2(log, 2)
    feeds, longest = _serve(sys.stdin, out), 0.0
    for feed in feeds:
        feed.finish(KILLED)
        longest = max(longest, feed.config.tracking.finish_s)
    threading.Thread(target=_end_after, args=(longest,), daemon=True).start()
    for feed in feeds:
        feed.join()


def _serve(commands: IO[str], out: IO[str]) -> list[Feed]:
    """Until the input closes; the feeds that are not over then."""
    feeds: dict[int, list[Feed]] = {}
    lock = threading.Lock()

    def tell(number: int, **said: str) -> None:
        with suppress(OSError), lock:  # perhaps nobody listens any more
            out.write(json.dumps({"number": number, **said}) + "\n")
            out.flush()

    for line in commands:
        command: dict[str, Any] = json.loads(line)
        if "follow" in command:
            feeds[command["number"]] = _feeds(command, partial(tell, command["number"]))
        else:
            for feed in feeds[command["end"]]:
                feed.finish(command["state"])
            feeds = {number: [feed for feed in each if not feed.over] for number, each in feeds.items()}
    return [feed for each in feeds.values() for feed in each if not feed.over]


def _feeds(command: dict[str, Any], tell: Callable[..., None]) -> list[Feed]:
    """Started, one for each tracker."""
    run = RunDir(Path(command["follow"]))
    try:
        config = OmegaConf.to_object(load(run))
    except Exception as error:
        traceback.print_exc()
        for name in command["trackers"]:
            tell(tracker=name, what="down", text=f"cannot be told ({error}).")
        return []
    assert isinstance(config, Config)
    found = [Feed(name, run, config, tell, command["state"]) for name in command["trackers"]]
    for feed in found:
        feed.start()
    return found


def _end_after(seconds: float) -> None:
    threading.Event().wait(seconds)
    os._exit(1)


if __name__ == "__main__":
    main()
