"""Workers that are started again: with which limits, and what is said and recorded of it."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from manta.config import Scaling
from manta.runs import RunDir
from manta.workers import FAILURE, PREEMPTION, Restarts, in_words, kind_of
from tests.conftest import Lab, history, make_config
from tests.test_failures import CPU, dead, gone, group

EVERY = ("training.checkpoint.every_n_steps=5", "training.epochs=3", "training.log_every_n_steps=4")


@pytest.mark.drill
@pytest.mark.usefixtures("ray_cluster")
def test_stuck_then_killed(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 hangs, then rank 1 is killed: each is told once, and the run ends as if nothing had been."""
    kill = f"{{_target_: tests.faults.KillAt, call: 28, rank: 1, marker: {lab.folder / 'killed'}}}"
    hang = f"{{_target_: tests.faults.HangAt, call: 18, rank: 0, marker: {lab.folder / 'hung'}}}"
    settings = (*CPU, *EVERY, "training.test=false", "allowed_targets=[manta,torch,tests]")
    run = lab.run(*settings, "scaling.max_failures=2", "scaling.timeout_s=4", f"data.transforms.train=[{kill},{hang}]")
    status = run.read("status.json")
    assert (status["state"], status["attempts"]) == ("finished", 1)
    first, second = status["restarts"]
    assert re.search(
        r"rank 0 \(pid \d+ on \S+\), loading a batch \(step 18\), at .*The other one waited", first["cause"]
    )
    assert re.fullmatch(r"the process of rank 1 \(pid \d+ on \S+\) is gone: killed, out of memory, .*", second["cause"])
    assert (first["kind"], first["step"], first["world_size"]) == ("failure", 15, 2)
    assert (second["kind"], second["step"], second["world_size"]) == ("failure", 40, 2)
    shown, log = capfd.readouterr().out, run.log.read_text()
    for text in (shown, log):
        assert text.count("; continuing from step 15, restart 1 of 2.") == 1
        assert text.count("; continuing from step 40, restart 2 of 2.") == 1
    assert "The process of rank 1 (pid" in shown
    same = lab.run("scaling=in_process", *EVERY, "training.test=false")
    assert [line["step"] for line in history(run)] == [line["step"] for line in history(same)]
    losses = [[line["val/loss"] for line in history(each) if "val/loss" in line] for each in (run, same)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.drill
def test_a_trial_of_two_workers_that_are_lost(lab: Lab) -> None:
    """Its own process starts others; the search hears every epoch once."""
    kill = f"{{_target_: tests.faults.KillAt, call: 8, rank: 1, marker: {lab.folder / 'killed'}}}"
    run = lab.run(
        "search=random", "search.num_samples=2", "search.refit=false", *CPU, "training.epochs=3", "training.test=false",
        "training.limit_train_batches=5", "scaling.max_failures=1", "allowed_targets=[manta,torch,tests]",
        f"data.transforms.train=[{kill}]", "search.max_concurrent_trials=1",
    )  # fmt: skip
    trials = [RunDir(run.path / "trials" / f"{number:05d}") for number in range(2)]
    assert [trial.read("status.json")["state"] for trial in trials] == ["finished", "finished"]
    (restart,) = trials[0].read("status.json")["restarts"]
    assert "the process of rank 1 (pid" in restart["cause"]
    assert (restart["step"], restart["world_size"]) == (5, 2)
    assert trials[0].log.read_text().count("; continuing from step 5, restart 1 of 1.") == 1
    assert [line["epoch"] for line in history(trials[0]) if "val/loss" in line] == [1, 2, 3]
    assert not trials[1].read("status.json").get("restarts")


def test_limits(tmp_path: Path) -> None:
    """Preemptions have a budget of their own; a restart before any checkpoint says so."""
    run, said = RunDir(tmp_path), []
    run.write("status.json", {"state": "running"})
    restarts = Restarts(run, Scaling(max_failures=1), said.append)
    assert restarts.allowed(FAILURE)
    restarts.record(FAILURE, "rank 1 fell over")
    assert not restarts.allowed(FAILURE)
    for _ in range(5):
        assert restarts.allowed(PREEMPTION)
        restarts.record(PREEMPTION, "the node of rank 0 was taken away")
    assert said[0] == "Rank 1 fell over; starting over, for there is no checkpoint yet, restart 1 of 1."
    assert said[-1].endswith("restart 5 after a preemption.")
    assert len(run.read("status.json")["restarts"]) == 6
    assert run.read("status.json")["state"] == "running"


def test_what_a_failure_is_charged_to(tmp_path: Path) -> None:
    """As Ray decides it: one worker on a node that was taken away makes it a preemption."""
    taken = RuntimeError("died")
    taken.preempted = True  # type: ignore[attr-defined]
    lost = group({0: gone("Connection reset by peer"), 1: dead(taken)})
    assert kind_of(lost) == PREEMPTION
    assert kind_of(group({0: gone("x"), 1: dead(RuntimeError())})) == FAILURE
    noticed = RuntimeError("preempted")
    noticed.preemption_info = SimpleNamespace(preempted_ranks=[1])  # type: ignore[attr-defined]
    run = RunDir(tmp_path)
    run.write("workers.json", {"ranks": [{"rank": 1, "pid": 4711, "host": "node7"}]})
    assert kind_of(noticed) == PREEMPTION
    assert in_words(noticed, run) == "the node of rank 1 (pid 4711 on node7) was taken away"
    assert in_words(lost, run).startswith("the process of rank 1 (pid 4711 on node7) is gone")


@pytest.mark.parametrize(
    ("scaling", "limits"),
    [("auto", (0, -1, None)), ("multi_gpu", (0, -1, None)), ("multi_node", (3, -1, None)), ("elastic", (3, -1, -1))],
)
def test_defaults(scaling: str, limits: tuple[int, int, int | None]) -> None:
    """Several nodes lose one now and then; on one machine what failed once fails again."""
    found = make_config(f"scaling={scaling}").scaling
    assert (found.max_failures, found.max_preemption_failures, found.controller_failure_limit) == limits
