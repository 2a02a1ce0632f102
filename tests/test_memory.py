"""Memory that runs out: what fits is found by trying, and trying changes nothing."""

import os

import pytest
import torch

from manta.runs import RunDir
from manta.training.checkpoint import find_checkpoint, load_checkpoint
from tests.conftest import ROOT, Lab, history
from tests.test_failures import fails, placed

EPOCHS = ("training.epochs=2", "training.checkpoint.every_n_steps=5")


def hungry(most: int, **more: int) -> tuple[str, ...]:
    """The settings of a model that runs out of memory with more samples than these at a time."""
    given = [f"+model.{key}={value}" for key, value in {"most": most, **more}.items()]
    return "model._target_=tests.faults.Hungry", "allowed_targets=[manta,torch,tests]", *given


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    path = find_checkpoint(run.checkpoints, "last")
    assert path is not None
    found: dict[str, torch.Tensor] = load_checkpoint(path)[0]["learner"]["model"]
    return found


def assert_same(one: RunDir, other: RunDir) -> None:
    assert history(one) == history(other)
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, weights(other)[name]), name


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.drill)], ids=["in process", "two workers"])
@pytest.mark.usefixtures("ray_cluster")
def test_auto_is_what_fits(lab: Lab, capfd: pytest.CaptureFixture[str], workers: int) -> None:
    """Bit for bit the run with that number given, batch statistics and dropout included; on two workers, rank 1 decides."""
    model = hungry(20, **({"rank": 1} if workers else {}))
    auto = lab.run(*placed(workers), *EPOCHS, *model, "data.micro_batch_size=auto")
    share, fits = (32, 16) if workers else (64, 16)
    said = f"data.micro_batch_size=auto: {fits} of a worker's {share} samples fit at a time."
    assert capfd.readouterr().out.count(said) == 1
    given = lab.run(*placed(workers), *EPOCHS, *model, f"data.micro_batch_size={fits}")
    assert_same(auto, given)
    assert load_checkpoint(auto.checkpoints / "last")[1]["micro_batch_size"] == fits
    assert load_checkpoint(given.checkpoints / "last")[1]["micro_batch_size"] is None


def test_auto_stays_on_resume(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    """Resumed where more would fit, and evaluated: it is what was found at first."""
    settings = ("scaling=in_process", "scheduler=constant", *EPOCHS, "data.micro_batch_size=auto")
    whole = lab.run(*settings, *hungry(20))
    run = lab.run(*settings, *hungry(20), "training.epochs=1")
    (config := run.path / "config.yaml").write_text(config.read_text().replace("most: 20", "most: 50"))
    assert lab.launch("resume=latest", "training.epochs=2") == 0
    assert_same(run, whole)
    assert capfd.readouterr().out.count("fit at a time") == 2
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = lab.command(f"run={run.path}", script="scripts/evaluate.py", env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("workers", [0, 2], ids=["in process", "two workers"])
@pytest.mark.usefixtures("ray_cluster")
def test_what_would_fit_is_told(lab: Lab, workers: int) -> None:
    """Nothing was asked for: the number comes with the error, tried on the rank that failed, and it works."""
    error = fails(lab, *placed(workers), *EPOCHS, *hungry(20, **({"rank": 1} if workers else {})))
    first, second = str(error).splitlines()
    share, rank = (32, 1) if workers else (64, 0)
    assert first.startswith(f"Out of memory on cpu of rank {rank} (pid ")
    assert f" at step 1, with {share} samples at a time: CUDA out of memory. Tried to allocate 7.00 GiB." in first
    assert "data.micro_batch_size=16 fits (tried), with the same global batch and the same results." in first
    assert "data.micro_batch_size=auto finds it before training." in first
    assert second == f"Resume from the last checkpoint: python train.py resume={lab.latest} data.micro_batch_size=16"
    if not workers:
        assert lab.launch("resume=latest", "data.micro_batch_size=16") == 0


def test_in_evaluation(lab: Lab) -> None:
    error = fails(lab, "scaling=in_process", *EPOCHS, *hungry(100, eval_most=10))
    assert "data.eval_batch_size=8 fits (tried)" in str(error)
    assert str(error).endswith(f"resume={lab.latest} data.eval_batch_size=8")
    assert lab.launch("resume=latest", "data.eval_batch_size=8") == 0


@pytest.mark.parametrize("micro", ["auto", "null"])
def test_nothing_fits(lab: Lab, micro: str) -> None:
    error = fails(lab, "scaling=in_process", *EPOCHS, *hungry(0), f"data.micro_batch_size={micro}")
    assert "ot even one" in str(error)
    assert "training.precision=bf16" in str(error)
