"""Fifty random moments: SIGKILL of a worker or of the driver, then a resume or a replaced worker, and the same end bit for bit.

What is compared with the run that was left alone: weights and averages of `last` and `best`, metrics.jsonl, summary.json, and
what a tracker was told (metrics.csv). MANTA_KILL_SEED=<number> tries other moments.
"""

import csv
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import pytest

from manta.errors import MantaError
from manta.runs import RunDir
from tests.conftest import Lab, summary, wait_for
from tests.test_resume import RESOURCES, SETTINGS, assert_identical
from tests.test_search_resume import SHORT, event_lines, trials

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]
DRAW = random.Random(int(os.environ.get("MANTA_KILL_SEED", 0)))
PHASES = ("epoch", "write", "validation", "end")
WORKERS = {
    0: ("scaling=in_process",),
    1: ("scaling=cpu", "scaling.num_workers=1"),
    2: ("scaling=cpu", "scaling.num_workers=2"),
}


@dataclass(frozen=True)
class Point:
    """Who dies, and when."""

    workers: int
    driver: bool
    phase: str
    call: int
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.workers} workers, {'driver' if self.driver else f'rank {self.rank}'}, {self.phase} {self.call}"

    def fault(self, marker: Path, pid_file: Path) -> str:
        """29 steps an epoch, 4 epochs; 24 checkpoints; 4 validations of 1 batch a worker and 4 or 7 such at once."""
        where = "eval" if self.phase == "validation" else "train"
        name = "KillInWrite" if self.phase == "write" else "KillAt"
        rank = "" if self.phase == "write" else f", rank: {self.rank}"
        pid = f", pid_file: '{pid_file}'" if self.driver and self.workers else ""
        return f"data.transforms.{where}=[{{_target_: tests.faults.{name}, call: {self.call}, marker: '{marker}'{rank}{pid}}}]"


def points() -> list[Point]:
    """Forty; ten more are inside a search."""
    calls: dict[str, Callable[[], int]] = {
        "epoch": lambda: DRAW.randint(7, 86), "write": lambda: DRAW.randint(2, 20),
        "validation": lambda: DRAW.randint(2, 3), "end": lambda: DRAW.randint(88, 115),
    }  # fmt: skip
    kinds = [(0, True)] * 4 + [(1, False), (2, True), (2, False), (1, True), (2, False), (1, False)]
    found = []
    for workers, driver in kinds:
        for phase in PHASES:
            rank = DRAW.randrange(workers) if workers and not driver and phase != "write" else 0
            found.append(Point(workers, driver, phase, calls[phase](), rank))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], RunDir]:
    """One run for each number of workers; none and one compute the same."""
    made: dict[int, RunDir] = {}

    def get(workers: int) -> RunDir:
        key = workers if workers == 2 else 0
        if key not in made:
            lab = Lab(tmp_path_factory.mktemp("undisturbed"))
            made[key] = lab.run(*WORKERS[key], *(RESOURCES if key else ()), "tracking=csv", *SETTINGS)
        return made[key]

    return get


def told(run: RunDir) -> list[dict[str, str]]:
    """What a tracker was told, without times."""
    with open(run.path / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k not in ("time", "samples_per_s")} for row in csv.DictReader(file)]


@pytest.mark.parametrize("point", points(), ids=str)
def test_killed_anywhere(
    lab: Lab, point: Point, undisturbed: Callable[[int], RunDir], request: pytest.FixtureRequest
) -> None:
    marker, pid_file = lab.folder / "fired", lab.folder / "pid"
    settings = (*WORKERS[point.workers], *(RESOURCES if point.workers else ()), "tracking=csv", *SETTINGS)
    fault = point.fault(marker, pid_file)
    if point.driver:
        process = lab.start(*settings, fault)
        pid_file.write_text(str(process.pid))
        assert process.wait(timeout=400) == -signal.SIGKILL
        request.getfixturevalue("ray_cluster")
        assert lab.launch("resume=latest") == 0
    else:
        request.getfixturevalue("ray_cluster")
        if point.workers == 2:
            lab.run(*settings, fault, "scaling.max_failures=1")  # replaced, by the same launch
        else:
            with pytest.raises(MantaError, match="resume="):
                lab.launch(*settings, fault)
            assert lab.launch("resume=latest") == 0
    assert marker.exists()
    reference = undisturbed(point.workers)
    assert_identical(lab.latest, reference)
    assert told(lab.latest) == told(reference)


@pytest.mark.usefixtures("ray_cluster")
def test_killed_in_a_search(lab: Lab) -> None:
    """Ten times in one search, the driver and the process of a trial in turn."""
    search = ("search=random", "search.num_samples=20", "search.max_failures=3", *SHORT)
    process = lab.start(*search, start_new_session=True)
    for number, moment in enumerate(sorted(DRAW.sample(range(2, 70), 10))):
        wait_for(lambda moment=moment: event_lines(lab) >= moment, process, 300)  # type: ignore[misc]
        if number % 2 == 0:
            process.kill()
            process.communicate()
            process = lab.start("resume=latest", start_new_session=True)
        else:
            while not (pids := _training(lab.latest, process)):
                assert process.poll() is None
                time.sleep(0.01)
            os.kill(pids[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    undisturbed = Lab(lab.folder / "undisturbed").run(*search, "scaling.use_gpu=false")
    pd.testing.assert_frame_equal(trials(lab.latest), trials(undisturbed))
    assert summary(lab.latest)["best"] == summary(undisturbed)["best"]


def _training(run: RunDir, launch: "subprocess.Popen[str]") -> list[int]:
    """The processes of trials that are under way; a number in a status.json may be another process's by now."""
    pids = [
        RunDir(path.parent).read("status.json").get("pid") for path in sorted(run.path.glob("trials/*/status.json"))
    ]
    with suppress(psutil.Error):
        family = {
            child.pid
            for child in psutil.Process(launch.pid).children(recursive=True)
            if "Trainable" in child.cmdline()[0]
        }
        return [pid for pid in pids if pid in family]
    return []
