"""What goes wrong on a worker: one message that names the cause, its rank and its line, and nothing is lost."""

import errno
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manta.errors import FAILED, MantaError
from manta.runs import RunDir
from manta.training.checkpoint import find_checkpoint, load_checkpoint
from manta.training.loader import Loader
from manta.workers import RemoteTraceback, WorkerFailed, _in_short, explain_failure
from tests.conftest import ROOT, Lab, history

CPU = ("scaling=cpu", "scaling.resources_per_worker.CPU=1")
PLACES = pytest.mark.parametrize(
    ("workers", "rank"), [(0, 0), (1, 0), (2, 1)], ids=["in process", "one worker", "two workers"]
)


def fault(name: str, **arguments: object) -> tuple[str, str]:
    """The settings that put a fault into the training batches."""
    listed = "".join(f", {key}: {value}" for key, value in arguments.items())
    return "allowed_targets=[manta,torch,tests]", f"data.transforms.train=[{{_target_: tests.faults.{name}{listed}}}]"


def placed(workers: int) -> tuple[str, ...]:
    return (*CPU, f"scaling.num_workers={workers}") if workers else ("scaling=in_process",)


def fails(lab: Lab, *settings: str) -> MantaError:
    with pytest.raises(MantaError) as failed:
        lab.launch(*settings)
    assert failed.value.code == FAILED
    status = lab.latest.read("status.json")
    assert (status["state"], status["exit_code"], status["error"]) == ("failed", FAILED, str(failed.value))
    return failed.value


def line_of(text: str, path: Path) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


@pytest.mark.usefixtures("ray_cluster")
def test_a_mistake_of_the_researchers(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 raises while rank 0 waits for its gradients."""
    error = fails(lab, *CPU, *fault("RaiseAt", call=30, rank=1))
    faults = ROOT / "tests" / "faults.py"
    place = f"{faults}:{line_of('raise ValueError', faults)}"
    first, second = str(error).splitlines()
    assert first == f"Training failed on rank 1: ValueError: the user's own mistake ({place})"
    assert second == f"Resume from the last checkpoint: python train.py resume={lab.latest}"
    # The whole traceback: on the terminal if tracebacks are asked for, else only in the log.
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "in _finish" in str(error.__cause__)
    terminal = "".join(capfd.readouterr())
    assert "Traceback" not in terminal
    assert "Error in training function" not in terminal
    log = lab.latest.log.read_text()
    assert "in _finish" in log
    assert "ValueError: the user's own mistake" in log
    # What was finished before is kept, and the run goes on from there.
    path = find_checkpoint(lab.latest.checkpoints, "last")
    assert path is not None
    assert load_checkpoint(path)[0]["progress"]["step"] == 23


@PLACES
@pytest.mark.usefixtures("ray_cluster")
def test_not_a_number(lab: Lab, workers: int, rank: int) -> None:
    """The loss of one rank is NaN in step 30, of 23 an epoch: the error says so before any weight is touched."""
    error = fails(lab, *placed(workers), *fault("PoisonAt", call=30, rank=rank))
    assert f"the loss is nan at step 30 on rank {rank}." in str(error)
    assert "optimizer.lr" in str(error)
    assert "resume=" in str(error)
    path = find_checkpoint(lab.latest.checkpoints, "last")
    assert path is not None
    state, meta = load_checkpoint(path)
    assert meta["step"] == 23
    assert all(torch.isfinite(tensor).all() for tensor in state["learner"]["model"].values())
    best = find_checkpoint(lab.latest.checkpoints, "best")
    assert best is not None
    assert best.name == path.name
    assert lab.latest.read("summary.json")["state"] == "failed"


def test_not_a_number_before_there_is_a_checkpoint(lab: Lab) -> None:
    """Nothing to continue from: no command that would, and the rate that was set."""
    error = fails(lab, *placed(0), *fault("PoisonAt", call=3, rank=0), "optimizer.lr=0.25")
    assert "Try a lower optimizer.lr (set to 0.25, 0.0441 at this step)" in str(error)
    assert "start anew: there is no checkpoint yet" in str(error)
    assert "resume=" not in str(error)


def test_a_worker_that_is_gone(tmp_path: Path) -> None:
    """Ray reports the dead one by its actor, the others by a broken connection."""
    run = RunDir(tmp_path)
    run.write("workers.json", {"ranks": [{"rank": 1, "pid": 4711, "host": "node7"}]})
    error = explain_failure(group({0: gone("Connection reset by peer"), 1: dead(RuntimeError("died"))}), run)
    assert "the process of rank 1 (pid 4711 on node7) is gone: killed, out of memory, or a crash" in str(error)
    assert "Actor" not in str(error)
    assert f"train.py resume={run}" in str(error)
    assert error.code == FAILED


class OutOfMemoryError(Exception):
    """As ray.exceptions has it."""


def group(failures: dict[int, BaseException]) -> BaseException:
    error = RuntimeError("Training failed due to worker errors")
    error.worker_failures = failures  # type: ignore[attr-defined]
    return error


def dead(why: BaseException) -> BaseException:
    error = RuntimeError("A worker health check failed.\nWorker info: Worker(Actor(...))")
    error.health_check_failure = why  # type: ignore[attr-defined]
    return error


def gone(text: str) -> WorkerFailed:
    return WorkerFailed(f"Training failed on rank 0: RuntimeError: {text} (learner.py:1)", "")


DIVERGED = MantaError("Training diverged: the loss is nan at step 5 on rank 1.", FAILED)
MISTAKE = WorkerFailed("Training failed on rank 1: KeyError: 'x' (mine.py:3)", "Traceback ...")


@pytest.mark.parametrize(
    ("failures", "says"),
    [
        ({0: gone("[...gloo/transport/tcp/pair.cc] Connection closed by peer"), 1: MISTAKE}, "KeyError: 'x' (mine.py:3)"),
        ({0: gone("NCCL error: remote process exited"), 1: MISTAKE}, "KeyError: 'x' (mine.py:3)"),
        ({0: MantaError("the gradient norm is nan at step 5 on rank 0.", FAILED), 1: DIVERGED}, "the loss is nan at step 5 on rank 1."),
        ({0: dead(RuntimeError()), 1: MISTAKE}, "KeyError: 'x' (mine.py:3)"),
        ({0: dead(OutOfMemoryError("..."))}, "rank 0 is gone: killed by Ray, the machine was running out of memory"),
        ({0: gone("Connection closed by peer")}, "Connection closed by peer"),
        ({1: RuntimeError("something new of Ray's")}, "Training failed on rank 1: something new of Ray's"),
        ({}, "Ray could not run the training: Training failed due to worker errors"),
    ],
)  # fmt: skip
def test_the_first_cause_is_told(tmp_path: Path, failures: dict[int, BaseException], says: str) -> None:
    error = explain_failure(group(failures), RunDir(tmp_path))
    assert says in str(error)
    assert error.code == FAILED


def test_a_mistake_in_a_data_loader_process() -> None:
    """Its line is known from the text that its process sent."""
    with pytest.raises(KeyError) as raised:
        list(torch.utils.data.DataLoader(Fragile(), num_workers=1))
    here = line_of("return {}" + "[index]", Path(__file__))
    assert _in_short(raised.value) == f"KeyError: 0 ({__file__}:{here})"


def test_a_data_loader_process_that_dies_while_it_sends() -> None:
    """What its pipe says then is not what happened; torch says so itself only where it waits for the process."""

    class Half:
        def __iter__(self) -> Iterator[Any]:
            raise ConnectionResetError(104, "Connection reset by peer")

    gone = multiprocessing.get_context("spawn").Process(target=int)
    gone.start()
    gone.join()
    half: Any = Half()
    loader = Loader(Fragile(), torch.device("cpu"), torch.float32)
    loader.workers, half._iterator = half, SimpleNamespace(_workers=[gone])
    with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid\(s\) {gone.pid}\) exited unexpectedly"):
        next(loader.batches([torch.tensor([0])]))
    half._iterator = None
    with pytest.raises(ConnectionResetError):
        next(loader.batches([torch.tensor([0])]))


@pytest.mark.parametrize(("workers", "rank"), [(0, 0), (2, 1)], ids=["in process", "two workers"])
@pytest.mark.usefixtures("ray_cluster")
def test_a_data_loader_process_that_is_killed(lab: Lab, workers: int, rank: int) -> None:
    """As the kernel does when memory is used up: told with its process, its rank, and what to change."""
    killing = (
        "data.dataset._target_=tests.faults.fragile_digits",
        "+data.dataset.call=400",
        f"+data.dataset.rank={rank}",
    )
    error = fails(lab, *placed(workers), *killing, "data.num_workers=2", "allowed_targets=[manta,torch,tests]")
    (entry,) = (each for each in lab.latest.read("workers.json")["ranks"] if each["rank"] == rank)
    first, second = str(error).splitlines()
    assert first.startswith(
        f"A process that loads data for rank {rank} (pid {entry['pid']} on {entry['host']}) is gone (pid "
    )
    assert "data.num_workers=1 (now 2), data.prefetch_factor=1 (now 4)" in first
    assert second.endswith(f"train.py resume={lab.latest} data.num_workers=1")


class Fragile(torch.utils.data.Dataset):
    """A data set with a mistake."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return {}[index]


def test_exit_codes_and_tracebacks_of_the_command(lab: Lab) -> None:
    """In this process the researcher's traceback is shown, for it is theirs to mend."""
    done = lab.command("scaling=in_process", *fault("RaiseAt", call=3))
    assert done.returncode == FAILED
    assert re.search(r'File ".*tests/faults.py", line \d+, in __call__', done.stderr)
    assert json.loads((lab.latest.path / "status.json").read_text())["error"] == "the user's own mistake"


@pytest.mark.parametrize(
    "settings",
    [
        "scaling=in_process",
        pytest.param("search=random search.num_samples=1 search.refit=false", marks=pytest.mark.drill),
    ],
)
def test_a_closed_pipe_does_not_stop_training(lab: Lab, settings: str) -> None:
    """`python train.py | head -1`: nobody reads any more, the run goes on to its end."""
    command = f"{sys.executable} {ROOT / 'train.py'} storage.path={lab.folder} {settings} training.epochs=3"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -1"], capture_output=True, text=True, cwd=lab.folder, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert lab.latest.read("status.json")["state"] == "finished"
    assert "Finished" in (lab.latest.path / "train.log").read_text()
    assert done.stderr == ""


def test_plug_ins_cannot_end_the_process(lab: Lab) -> None:
    """sys.exit(0) in the researcher's code is a failure, not a success."""
    exiting = "data.transforms.train=[{_target_: tests.faults.Exit}]"
    with pytest.raises(MantaError, match=r"sys\.exit\(0\)"):
        lab.launch("scaling=in_process", "allowed_targets=[manta,torch,tests]", exiting, "plan=true")
    done = lab.command(
        "scaling=in_process", "allowed_targets=[manta,torch,tests]", exiting.replace("Exit", "ExitLater")
    )
    assert done.returncode == 1
    assert "sys.exit(0)" in done.stderr
    assert lab.latest.read("status.json")["state"] == "failed"


def test_models_keep_their_own_dtypes(lab: Lab) -> None:
    run = lab.run(
        "scaling=in_process",
        "allowed_targets=[manta,torch,tests]",
        "training.epochs=1",
        "model={_target_: tests.faults.complex_model}",
    )
    state, _ = load_checkpoint(run.checkpoints / "last")
    assert state["learner"]["model"]["1.phase"].dtype == torch.complex64


@pytest.mark.parametrize("write", [1, 3], ids=["first checkpoint", "third"])
def test_a_full_disk_is_said_in_words(lab: Lab, monkeypatch: pytest.MonkeyPatch, write: int) -> None:
    """The write of a checkpoint fails for lack of space: exit 1, the place, and how to go on; then it goes on."""
    whole = lab.run("scaling=in_process", "training.epochs=4")
    real, calls = torch.save, []

    def full(*args: object, **kwargs: object) -> None:
        calls.append(1)
        if len(calls) == write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "state.pt")
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(MantaError, match=r"No space left on device .*resume=") as failed:
        lab.launch("scaling=in_process", "training.epochs=4")
    assert failed.value.code == 1
    assert lab.latest.read("status.json")["state"] == "failed"
    assert lab.launch("resume=latest") == 0
    assert history(lab.latest) == history(whole)
