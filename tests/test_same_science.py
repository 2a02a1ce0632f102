"""Invariant 1 and 3: the number of workers and of micro-batches changes speed, not losses, weights or metrics."""

import pytest
import torch

from manta.runs import RunDir
from manta.training.checkpoint import load_checkpoint
from tests.conftest import Lab, history, summary

# 1,437 samples in batches of 50: the last batch has 37, which neither 2 nor 3 workers nor 2 or 4 micro-batches divide.
# With micro-batches of one, two of three workers have nothing left for the last one. Every gradient is clipped.
SETTINGS = (
    "model=mlp", "data.batch_size=50", "training.epochs=2", "training.precision=fp64", "training.log_every_n_steps=1",
    "training.grad_clip_norm=0.01", "training.ema.enabled=true", "seed=7",
)  # fmt: skip


def outcome(run: RunDir) -> tuple[list[float], list[dict[str, float]], dict[str, torch.Tensor]]:
    """(loss of every step, validation lines, final weights)."""
    lines = history(run)
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    validations = [{k: v for k, v in line.items() if k.startswith("val/")} for line in lines if "val/loss" in line]
    state, _ = load_checkpoint(run.checkpoints / "last")
    return losses, validations, state["learner"]["model"] | {f"ema.{k}": v for k, v in state["learner"]["ema"].items()}


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[float], list[dict[str, float]], dict[str, torch.Tensor]]:
    lab = Lab(tmp_path_factory.mktemp("reference"))
    return outcome(lab.run("scaling=in_process", *SETTINGS))


def assert_same(found: RunDir, reference: tuple[list[float], list[dict[str, float]], dict[str, torch.Tensor]]) -> None:
    losses, validations, weights = outcome(found)
    assert len(losses) == 2 * 29
    assert losses == pytest.approx(reference[0], rel=0, abs=1e-9)
    for mine, theirs in zip(validations, reference[1], strict=True):
        assert mine == pytest.approx(theirs, rel=0, abs=1e-12)
    assert weights.keys() == reference[2].keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, reference[2][name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("micro", [25, 13])
def test_accumulation(lab: Lab, reference, micro: int) -> None:
    assert_same(lab.run("scaling=in_process", f"data.micro_batch_size={micro}", *SETTINGS), reference)


@pytest.mark.parametrize(
    ("workers", "micro"), [(1, "null"), (2, "null"), (2, 7), pytest.param(3, 1, marks=pytest.mark.drill)]
)
@pytest.mark.usefixtures("ray_cluster")
def test_workers(lab: Lab, reference, workers: int, micro: object) -> None:
    scaling = ("scaling=cpu", f"scaling.num_workers={workers}", "scaling.resources_per_worker={CPU: 1}")
    assert_same(lab.run(*scaling, f"data.micro_batch_size={micro}", *SETTINGS), reference)


@pytest.mark.usefixtures("ray_cluster")
def test_metrics_of_splits_that_cannot_be_shared_evenly(lab: Lab) -> None:
    """11 samples to validate and to test by, on three workers, one at a time: the last rank has none for the last turn."""
    settings = ("data=synthetic", "data.dataset.num_samples=110", "data.eval_batch_size=1", "training.epochs=1",
                "training.precision=fp64")  # fmt: skip
    runs = [
        lab.run(*scaling, *settings)
        for scaling in (
            ("scaling=in_process",),
            ("scaling=cpu", "scaling.num_workers=3", "scaling.resources_per_worker={CPU: 1}"),
        )
    ]
    found = [{**summary(run)["best"]["metrics"], **summary(run)["test"]} for run in runs]
    assert found[0] == pytest.approx(found[1], rel=0, abs=1e-9)


@pytest.mark.usefixtures("ray_cluster")
def test_fsdp2_matches_ddp(lab: Lab, reference) -> None:
    scaling = ("scaling=cpu", "scaling.strategy=fsdp2", "scaling.resources_per_worker={CPU: 1}")
    run = lab.run(*scaling, "data.micro_batch_size=7", *SETTINGS)
    assert_same(run, reference)
    # Its checkpoint is a whole one: a single process goes on from it.
    assert lab.launch("resume=latest", "scaling=in_process", "scaling.strategy=ddp", "training.epochs=3") == 0
