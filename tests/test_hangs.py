"""Nothing hangs silently: what does not move is found, named, and ended."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from manta import watchdog
from manta.errors import FAILED
from manta.runs import RunDir
from manta.watchdog import Pulse, Verdict, Watchdog, begin, verdict
from tests.conftest import ROOT, Lab
from tests.test_failures import CPU, fails, fault, line_of

FAULTS = ROOT / "tests" / "faults.py"
SHORT = ("training.epochs=3", "scaling.timeout_s=3")


def stuck(where: str, call: int, rank: int = 0) -> tuple[str, ...]:
    """The settings of a model that gets stuck."""
    added = (f"+model.where={where}", f"+model.call={call}", f"+model.rank={rank}")
    return "allowed_targets=[manta,torch,tests]", "model._target_=tests.faults.Stuck", *added


def guilty(run: RunDir, rank: int) -> str:
    """How the message names a rank."""
    (entry,) = (each for each in run.read("workers.json")["ranks"] if each["rank"] == rank)
    return f"rank {rank} (pid {entry['pid']} on {entry['host']})"


@pytest.mark.parametrize(
    ("where", "rank", "phase", "line"),
    [
        ("forward", 1, "in the forward pass or the loss", "time.sleep(3600)"),
        pytest.param("backward", 0, "in the backward pass", "time.sleep(3600)", marks=pytest.mark.drill),
        pytest.param(
            "collective", 1, "in the forward pass or the loss", "dist.recv(torch.zeros", marks=pytest.mark.drill
        ),
    ],
)
@pytest.mark.usefixtures("ray_cluster")
def test_one_of_two_workers(lab: Lab, where: str, rank: int, phase: str, line: str) -> None:
    """The other one waits for its gradients: only the guilty is named, with its line; the stacks of both are there."""
    error = fails(lab, *CPU, *SHORT, *stuck(where, 30, rank))
    name = guilty(lab.latest, rank)
    place = f"{FAULTS}:{line_of(line, FAULTS)}"
    assert f"{name}, {phase} (step 30), at {place}" in str(error)
    assert "nothing has moved for 3 s (scaling.timeout_s)" in str(error)
    assert f"rank {1 - rank} (" not in str(error)
    assert f"train.py resume={lab.latest}" in str(error)
    for each in (0, 1):
        stack = (lab.latest.path / "stacks" / f"rank-{each}.txt").read_text()
        assert f"rank {each}, pid" in stack
        assert ("tests/faults.py" in stack) == (each == rank)
        assert "manta/training/loop.py" in stack
    assert "tests/faults.py" in lab.latest.log.read_text()  # the traceback


def test_in_this_process(lab: Lab) -> None:
    """What sleeps is woken with the error: the command ends as one that failed, and goes on later."""
    error = fails(lab, "scaling=in_process", *SHORT, *fault("HangAt", call=30, marker=lab.folder / "hung"))
    assert "loading a batch (step 30)" in str(error)
    assert f"{FAULTS}:{line_of('time.sleep(3600)', FAULTS)} in _sleep." in str(error)
    assert lab.latest.read("summary.json")["state"] == "failed"
    assert lab.launch("resume=latest") == 0
    assert lab.latest.read("summary.json")["step"] == 69


def test_in_native_code(lab: Lab) -> None:
    """What nothing can wake ends with the process, after everything is recorded."""
    done = lab.command("scaling=in_process", *SHORT, *stuck("native", 30))
    assert done.returncode == FAILED, done.stderr
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    place = f"{FAULTS}:{line_of('library.pthread_mutex_lock(mutex)', FAULTS) + 1}"
    assert f"in the forward pass or the loss (step 30), at {place} in forward" in message
    status = json.loads((lab.latest.path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", FAILED)
    assert message.removeprefix("Error: ") == status["error"].splitlines()[0]
    assert lab.latest.read("summary.json")["state"] == "failed"


class Rank:
    """A rank that makes some marks, then waits until the test is over."""

    def __init__(
        self, run: RunDir, rank: int, world_size: int, marks: int, timeout_s: float = 0.3, works: bool = False
    ) -> None:
        self.works = works
        self.pulse, self.moved, self.told, self.end = Pulse(), threading.Event(), threading.Event(), threading.Event()
        self.verdict: Verdict | None = None
        self.dog = Watchdog(run, self.pulse, timeout_s, rank, world_size, self._stuck)
        self.thread = threading.Thread(target=self._train, args=(marks,), name=f"rank {rank}", daemon=True)
        self.thread.start()
        self.moved.wait()

    def _train(self, marks: int) -> None:
        with self.dog:
            self.pulse.warm = True
            for _ in range(marks):
                self.pulse("in the forward pass or the loss")
            self.moved.set()
            while self.works:
                time.sleep(0.01)
            self.end.wait()

    def _stuck(self, found: Verdict, _over: Callable[[float], bool]) -> None:
        self.verdict = found
        self.told.set()

    def close(self) -> None:
        self.works = False
        self.end.set()
        self.thread.join()


def ranks(run: RunDir, stack: ExitStack, *marks: int, world_size: int = 0) -> list[Rank]:
    found = [Rank(run, rank, world_size or len(marks), each) for rank, each in enumerate(marks)]
    for each in found:
        stack.callback(each.close)
    return found


@pytest.mark.parametrize(
    ("marks", "blamed", "says"),
    [
        ((7, 5, 7), [1], "The other 2 waited for it."),
        ((5, 5, 7), [0, 1], "rank 1 (pid"),
        ((5, 5), [0, 1], "All wait, as if for each other."),
        ((5,), [0], "rank 0 (pid"),
    ],
)
def test_who_is_behind_is_to_blame(tmp_path: Path, marks: tuple[int, ...], blamed: list[int], says: str) -> None:
    """Every rank comes to the same verdict."""
    run = RunDir(tmp_path)
    with ExitStack() as stack:
        for each in ranks(run, stack, *marks):
            assert each.told.wait(60)
            assert each.verdict is not None
            assert each.verdict.ranks == blamed
            assert says in each.verdict.message
            assert f"in _train. Stacks: {run}/stacks/" in each.verdict.message.replace(f" {says}", "")
            assert "self.end.wait()" in each.verdict.stack
    found = verdict(run)
    assert found is not None
    assert found.ranks == blamed
    begin(run)
    assert verdict(run) is None


def test_a_rank_that_does_not_answer(tmp_path: Path) -> None:
    """Its interpreter never gives its own watchdog a turn."""
    run = RunDir(tmp_path)
    run.write("workers.json", {"ranks": [{"rank": 1, "pid": 4711, "host": "node7"}]})
    with ExitStack() as stack:
        (one,) = ranks(run, stack, 5, world_size=2)
        assert one.told.wait(60)
        assert one.verdict is not None
        assert one.verdict.ranks == [1]
        assert "rank 1 (pid 4711 on node7) does not answer, its interpreter is blocked." in one.verdict.message


def test_who_is_asked_to_wait_is_not_stuck(tmp_path: Path) -> None:
    """Rank 0 waits for the search, which may take its time; rank 1 does not."""
    with ExitStack() as stack:
        zero = Rank(RunDir(tmp_path), 0, 2, 3)
        stack.callback(zero.close)
        zero.pulse.paused = True
        one = Rank(RunDir(tmp_path), 1, 2, 5)
        stack.callback(one.close)
        assert one.told.wait(60)
        assert one.verdict is not None
        assert one.verdict.ranks == [1]
        assert zero.verdict is None


def test_who_waits_is_not_to_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between ranks that have come as far, it is the one that is not inside torch's own waiting (here, of threading)."""
    monkeypatch.setattr(watchdog, "_WAITING", ("threading.py",))
    with ExitStack() as stack:
        found = [Rank(RunDir(tmp_path), rank, 3, 5, works=rank == 1) for rank in range(3)]
        for each in found:
            stack.callback(each.close)
        for each in found:
            assert each.told.wait(60)
            assert each.verdict is not None
            assert each.verdict.ranks == [1]
            assert "The other 2 waited for it." in each.verdict.message


def test_who_was_stopped_is_not_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lid was closed, or Ctrl-Z: the clock went on, nobody was idle."""
    clock, looks = time.monotonic, 0
    ahead = 0.0

    def monotonic() -> float:
        nonlocal looks
        looks += 1
        return clock() + ahead

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=monotonic))
    rank = Rank(RunDir(tmp_path), 0, 1, 5, timeout_s=6)
    try:
        for _ in range(2):
            before = looks
            wait_until(lambda before=before: looks > before + 1)  # type: ignore[misc]
            ahead += 3600
        before = looks
        wait_until(lambda: looks > before + 1)
        assert 0 < rank.dog.idle_s < 6
        assert rank.verdict is None
    finally:
        rank.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def test_who_is_slow_is_not_stuck(tmp_path: Path) -> None:
    """Rank 1 asks for the third time while rank 0, behind, makes a mark now and then: nobody is to blame."""
    run = RunDir(tmp_path)
    with ExitStack() as stack:
        zero, one = ranks(run, stack, 1, 1000)
        for _ in range(12):
            assert not one.told.wait(0.1)
            zero.pulse("in the forward pass or the loss")
        assert (run.path / ".stuck" / "rank-0.json").is_file()  # it was asked
        one.pulse("in the backward pass")
        for _ in range(100):
            zero.pulse("in the forward pass or the loss")
            if one.told.wait(0.05) or not (run.path / ".stuck").exists():
                break
        assert not (run.path / ".stuck").exists()
        assert zero.verdict is None
        assert one.verdict is None
