"""Invariant 2: a run killed at any moment and resumed ends bit for bit like one that was never interrupted."""

import json
import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch

from manta.errors import MantaError
from manta.launch import launch
from manta.runs import RunDir, is_locked, launcher, launching
from manta.training.checkpoint import find_checkpoint, load_checkpoint
from tests.conftest import Lab, compose_run, history, summary, wait_for

# 29 steps an epoch, the last one uneven; everything that has a state is on. Killed in the second epoch after step 37.
SETTINGS = (
    "model=mlp", "model.dropout=0.2", "data.batch_size=50", "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.02",
    "scheduler=cosine", "training.epochs=4", "training.ema.enabled=true", "training.log_every_n_steps=4",
    "training.early_stopping.patience=3", "training.checkpoint.every_n_steps=5", "allowed_targets=[manta,torch,tests]",
)  # fmt: skip


def kill_at(call: int, marker: Path, **arguments: object) -> str:
    """The override that kills a process at its `call`-th training batch."""
    settings = {"_target_": "tests.faults.KillAt", "call": call, "marker": str(marker), **arguments}
    return (
        "data.transforms.train=[{"
        + ",".join(
            f"{key}: '{value}'" if isinstance(value, str) else f"{key}: {value}" for key, value in settings.items()
        )
        + "}]"
    )


def assert_identical(run: RunDir, reference: RunDir) -> None:
    assert history(run) == history(reference)
    for name in ("last", "best"):
        mine, theirs = find_checkpoint(run.checkpoints, name), find_checkpoint(reference.checkpoints, name)
        assert mine is not None
        assert theirs is not None
        assert mine.name == theirs.name
        for part in ("model", "ema"):
            expected = load_checkpoint(theirs)[0]["learner"][part]
            for key, tensor in load_checkpoint(mine)[0]["learner"][part].items():
                assert torch.equal(tensor, expected[key]), f"{name}: {key}"
    assert {k: v for k, v in summary(run).items() if k in ("best", "objective", "test", "state")} == {
        k: v for k, v in summary(reference).items() if k in ("best", "objective", "test", "state")
    }


def kept(run: RunDir) -> bytes:
    """The history that a resume keeps as it is, times included: what is trained again has other times."""
    position = run.read("checkpoints/last/meta.json")["metrics_bytes"]
    assert position > 0
    return run.metrics.read_bytes()[:position]


def never(lab: Lab) -> str:
    """The same transform that never fires, so that configurations are alike."""
    return kill_at(10**9, lab.folder / "never")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, RunDir]:
    """A never interrupted run by number of workers; 1 worker computes what no worker does."""
    lab = Lab(tmp_path_factory.mktemp("undisturbed"))
    return {0: lab.run("scaling=in_process", never(lab), *SETTINGS)}


@pytest.fixture(scope="module")
def undisturbed_on_two(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    lab = Lab(tmp_path_factory.mktemp("undisturbed"))
    return lab.run("scaling=cpu", *RESOURCES, never(lab), *SETTINGS)


RESOURCES = ("scaling.resources_per_worker={CPU: 1}",)


@pytest.mark.parametrize("call", [38, 58, 59, 86])
def test_killed_in_process(lab: Lab, undisturbed: dict[int, RunDir], call: int) -> None:
    """In mid-epoch, in the last step of an epoch, in the first of the next, and near the end."""
    marker = lab.folder / "fired"
    killed = lab.command("scaling=in_process", kill_at(call, marker), *SETTINGS)
    assert killed.returncode == -signal.SIGKILL
    assert marker.exists()
    assert json.loads((lab.latest.path / "status.json").read_text())["state"] == "running"
    before = kept(lab.latest)
    assert lab.launch("resume=latest") == 0
    assert lab.latest.metrics.read_bytes().startswith(before)
    assert_identical(lab.latest, undisturbed[0])
    status = lab.latest.read("status.json")
    assert (status["state"], status["attempts"]) == ("finished", 2)


def test_killed_after_the_best(lab: Lab) -> None:
    """Nothing is learned, so the first epoch is the best and three more end the run: a resume knows both."""
    settings = (*(each for each in SETTINGS if "lr=" not in each and "epochs=" not in each), "optimizer.lr=1e-12")
    whole = lab.run("scaling=in_process", never(lab), *settings)
    assert (summary(whole)["epoch"], summary(whole)["best"]["epoch"]) == (4, 1)
    killed = lab.command("scaling=in_process", kill_at(70, lab.folder / "fired"), *settings)
    assert killed.returncode == -signal.SIGKILL
    assert lab.launch("resume=latest") == 0
    assert_identical(lab.latest, whole)


@pytest.mark.usefixtures("ray_cluster")
def test_killed_single_worker(lab: Lab, undisturbed: dict[int, RunDir]) -> None:
    """One worker dies; the run fails, says how to resume, and resumes."""
    with pytest.raises(MantaError, match="resume=") as failed:
        lab.launch("scaling=cpu", "scaling.num_workers=1", *RESOURCES, kill_at(38, lab.folder / "fired"), *SETTINGS)
    assert failed.value.code == 1
    assert lab.latest.read("status.json")["state"] == "failed"
    before = kept(lab.latest)
    assert lab.launch("resume=latest") == 0
    assert lab.latest.metrics.read_bytes().startswith(before)
    assert_identical(lab.latest, undisturbed[0])


@pytest.mark.usefixtures("ray_cluster")
def test_killed_worker_is_replaced(lab: Lab, undisturbed_on_two: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    """One of two workers dies and scaling.max_failures allows another try: the same launch goes on by itself, and says so."""
    kill = kill_at(38, lab.folder / "fired", rank=1)
    run = lab.run("scaling=cpu", "scaling.max_failures=1", *RESOURCES, kill, *SETTINGS)
    assert (lab.folder / "fired").exists()
    assert_identical(run, undisturbed_on_two)
    (restart,) = run.read("status.json")["restarts"]
    assert re.fullmatch(
        r"the process of rank 1 \(pid \d+ on \S+\) is gone: killed, out of memory, .*", restart["cause"]
    )
    assert (restart["kind"], restart["step"], restart["world_size"]) == ("failure", 35, 2)
    said = f"T{restart['cause'][1:]}; continuing from step 35, restart 1 of 1."
    assert capfd.readouterr().out.count(said) == run.log.read_text().count(said) == 1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.drill
def test_killed_driver(lab: Lab, request: pytest.FixtureRequest, workers: int) -> None:
    """The driver dies, its Ray with it; nobody writes on, and a resume continues."""
    pid_file = lab.folder / "pid"
    kill = kill_at(38, lab.folder / "fired", pid_file=str(pid_file))
    process = lab.start("scaling=cpu", f"scaling.num_workers={workers}", *RESOURCES, kill, *SETTINGS)
    pid_file.write_text(str(process.pid))
    # Not communicate(): agents of the dead Ray may hold the pipe open for minutes.
    assert process.wait(timeout=200) == -signal.SIGKILL
    reference = (
        request.getfixturevalue("undisturbed_on_two") if workers == 2 else request.getfixturevalue("undisturbed")[0]
    )
    request.getfixturevalue("ray_cluster")
    before = kept(lab.latest)
    assert lab.launch("resume=latest") == 0
    assert lab.latest.metrics.read_bytes().startswith(before)
    assert not is_locked(lab.latest)
    assert_identical(lab.latest, reference)


def test_a_fresh_run_never_continues_another(lab: Lab) -> None:
    settings = ("scaling=in_process", "training.epochs=1", "training.test=false")
    first, second = lab.run(*settings), lab.run(*settings)
    assert first.path != second.path
    assert history(first) == history(second)
    assert history(second)[0]["step"] == 10


def test_finished_runs_say_so_and_can_be_extended(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    run = lab.run("scaling=in_process", "scheduler=constant", "training.epochs=2")
    before = run.metrics.read_bytes()
    assert lab.launch("resume=latest") == 0
    assert "is finished" in capsys.readouterr().out
    assert lab.launch("resume=latest", "training.epochs=4") == 0
    assert run.metrics.read_bytes().startswith(before)
    assert summary(run)["epoch"] == 4
    assert (run.path / "overrides.txt").read_text().splitlines() == [
        "scaling=in_process scheduler=constant training.epochs=2",
        "resume=latest training.epochs=4",
    ]
    # With a schedule that does not depend on the length, longer is the same as long from the start.
    whole = lab.run("scaling=in_process", "scheduler=constant", "training.epochs=4")
    assert history(run) == history(whole)


def test_optimizer_settings_changed_on_resume_are_used(lab: Lab) -> None:
    run = lab.run("scaling=in_process", "scheduler=constant", "training.epochs=1")
    assert lab.launch("resume=latest", "training.epochs=2", "optimizer.lr=0.00025") == 0
    rates = [line["train/lr"] for line in history(run) if "train/lr" in line]
    assert rates == [0.001, 0.001, 0.00025, 0.00025]


@pytest.mark.usefixtures("ray_cluster")
def test_resumed_on_another_number_of_workers(lab: Lab) -> None:
    """Allowed; without dropout the result agrees to rounding."""
    settings = ("data.batch_size=50", "training.precision=fp64", "training.log_every_n_steps=3", "training.epochs=3")
    whole = lab.run("scaling=in_process", *settings)
    lab.run("scaling=cpu", *RESOURCES, *settings, "training.max_steps=40", "scheduler.total=87")
    assert lab.launch("resume=latest", "training.max_steps=null", "scaling=in_process") == 0
    losses = [[line["train/loss"] for line in history(run) if "train/loss" in line] for run in (lab.latest, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-9)


def test_resumed_with_less_than_it_has_done(lab: Lab) -> None:
    """Nothing is left to train: it is judged and ends, in the middle of an epoch too."""
    checkpoints = ("training.checkpoint.every_n_steps=10", "training.checkpoint.keep=99")
    run = lab.run("scaling=in_process", "training.max_steps=30", "training.test=false", *checkpoints)
    assert lab.launch("resume=latest", "training.max_steps=10", "training.test=true") == 0
    assert summary(run)["step"] == 30
    assert "test/accuracy" in summary(run)["test"]
    (run.checkpoints / "last").unlink()
    (run.checkpoints / "last").symlink_to("step-00000020")
    assert lab.launch("resume=latest", "training.max_steps=11") == 0
    assert summary(run)["step"] == history(run)[-1]["step"] == 20
    assert "val/accuracy" in history(run)[-1]


def test_without_a_usable_last(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    """`last` is gone or names nothing: the newest whole checkpoint is used and said; history is kept."""
    run = lab.run("scaling=in_process", "scheduler=constant", "training.epochs=2", "training.checkpoint.keep=2")
    before = run.metrics.read_bytes()
    (run.checkpoints / "last").unlink()
    (run.checkpoints / "last").symlink_to("step-99999999")
    assert lab.launch("resume=latest", "training.epochs=3") == 0
    assert "continuing from step-00000046" in capfd.readouterr().out
    assert run.metrics.read_bytes().startswith(before)
    assert history(run)[-1]["step"] == 69


def test_without_any_checkpoint(lab: Lab) -> None:
    """The checkpoints were deleted: refused, and the history is still there."""
    run = lab.run("scaling=in_process", "training.epochs=2")
    before = history(run)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(MantaError, match="are gone"):
        lab.launch("resume=latest", "training.epochs=3")
    assert history(run) == before


def test_two_launches_of_one_run(lab: Lab) -> None:
    """The second is refused before it has written anything, also while the first has not begun to train."""
    run = lab.run("scaling=in_process", "training.limit_train_batches=2", "training.epochs=1", "training.test=false")
    more = (f"storage.path={lab.folder}", f"resume={run}", "training.epochs=2")
    config, previous, space = compose_run(*more)
    before = {path: path.read_bytes() for path in run.path.iterdir() if path.is_file() and path != run.launch_file}
    assert launcher(run) is None
    with launching(run):
        assert launcher(run) == {"pid": os.getpid(), "host": socket.gethostname()}
        says = rf"{run} is running right now \(pid {os.getpid()} on "
        with pytest.raises(MantaError, match=says):
            launch(config, [*more], previous, space)
        with pytest.raises(MantaError, match=says):
            compose_run(*more)
        assert {path: path.read_bytes() for path in before} == before
    slow = "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.1}]"
    first = lab.start(more[1], "training.epochs=500", slow, "allowed_targets=[manta,torch,tests]")
    wait_for(lambda: launcher(run) is not None and run.read("status.json")["attempts"] == 2, first)
    second = lab.command(*more[1:])
    assert second.returncode == 2, second.stdout
    assert f"is running right now (pid {first.pid} on " in second.stderr
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 130, output
    assert run.read("status.json")["attempts"] == 2
    assert launcher(run) is None
