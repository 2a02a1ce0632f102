"""What the loop does when: early stopping, retention, checkpoints by step and by time, limits, profiling."""

import itertools
import json
import time
from typing import Any

import pytest
import torch

from manta.runs import RunDir
from manta.training.checkpoint import load_checkpoint
from manta.training.sampler import epoch_order
from tests.conftest import Lab, history, summary

QUICK = ("scaling=in_process", "training.test=false")


def steps(run: RunDir) -> list[int]:
    """Steps of the checkpoints that are kept."""
    return sorted(int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*"))


def test_early_stopping(lab: Lab) -> None:
    """With a learning rate that changes nothing, the first validation stays the best and two more end the run."""
    run = lab.run(*QUICK, "optimizer.lr=1e-12", "training.early_stopping.patience=2", "training.epochs=50")
    assert summary(run)["epoch"] == 3
    assert summary(run)["best"]["epoch"] == 1


def test_min_delta(lab: Lab) -> None:
    """An improvement smaller than min_delta is kept as the best but does not count as progress."""
    run = lab.run(
        *QUICK, "objective.metric=val/loss", "objective.mode=min", "training.early_stopping.patience=2",
        "training.early_stopping.min_delta=1000", "training.epochs=50",
    )  # fmt: skip
    assert summary(run)["epoch"] == 3
    assert summary(run)["best"]["epoch"] == 3


@pytest.mark.parametrize("keep", [1, 3])
def test_retention(lab: Lab, keep: int) -> None:
    """The newest and the best are kept; the best is the argbest of the history."""
    run = lab.run(*QUICK, "training.epochs=8", f"training.checkpoint.keep={keep}")
    validations = [line for line in history(run) if "val/accuracy" in line]
    best = max(validations, key=lambda line: line["val/accuracy"])["step"]
    newest = [23 * epoch for epoch in range(9 - keep, 9)]
    assert steps(run) == sorted({best, *newest})
    assert json.loads((run.checkpoints / "best" / "meta.json").read_text())["step"] == best


def test_checkpoints_by_step(lab: Lab) -> None:
    run = lab.run(*QUICK, "training.epochs=2", "training.checkpoint.every_n_steps=10", "training.checkpoint.keep=99")
    assert steps(run) == [10, 20, 23, 30, 40, 46]


def test_checkpoints_by_time(lab: Lab) -> None:
    slow = "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.05}]"
    run = lab.run(
        *QUICK, "training.epochs=1", "training.checkpoint.every_s=0.3", "training.checkpoint.keep=99",
        "training.checkpoint.asynchronous=false", "allowed_targets=[manta,torch,tests]", slow,
    )  # fmt: skip
    assert steps(run)[-1] == 23
    *by_time, _ = [(run.checkpoints / f"step-{step:08d}" / "meta.json").stat().st_mtime for step in steps(run)]
    assert len(by_time) >= 2
    assert all(after - before >= 0.3 for before, after in itertools.pairwise(by_time))


def test_only_at_the_end(lab: Lab) -> None:
    run = lab.run(*QUICK, "training.epochs=3", "training.checkpoint.every_n_epochs=0", "training.checkpoint.keep=99",
                  "training.val_every_n_epochs=5")  # fmt: skip
    assert steps(run) == [69]
    assert [line["step"] for line in history(run) if "val/accuracy" in line] == [69]
    assert summary(run)["best"]["step"] == 69


def same(one: Any, other: Any) -> bool:
    """Whether two checkpoints' states are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_synchronous_and_asynchronous_writes_are_alike(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the next checkpoint is due before the last one is written."""
    real = torch.save

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.1)
        real(*args, **kwargs)

    monkeypatch.setattr(torch, "save", slow)
    settings = ("training.epochs=2", "training.checkpoint.every_n_steps=5", "training.checkpoint.keep=99")
    runs = [lab.run(*QUICK, *settings, f"training.checkpoint.asynchronous={way}") for way in ("true", "false")]
    assert history(runs[0]) == history(runs[1])
    assert steps(runs[0]) == steps(runs[1])
    for name in ("last", "best", *(f"step-{step:08d}" for step in steps(runs[0]))):
        paths = [(run.checkpoints / name).resolve() for run in runs]
        assert paths[0].name == paths[1].name
        states = [load_checkpoint(path)[0] for path in paths]
        for state in states:
            state.pop("metrics_bytes")  # lines hold times
        assert same(*states), name


def test_limits(lab: Lab) -> None:
    run = lab.run(*QUICK, "training.epochs=2", "training.limit_train_batches=3", "training.log_every_n_steps=1")
    assert [line["step"] for line in history(run) if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    run = lab.run(*QUICK, "training.epochs=null", "training.max_steps=30")
    assert (summary(run)["step"], summary(run)["epoch"]) == (30, 1)


def test_overfitting_one_batch(lab: Lab) -> None:
    run = lab.run(*QUICK, "training.overfit_batches=1", "training.epochs=60", "optimizer.lr=0.01", "scheduler=constant")
    assert history(run)[-1]["train/epoch_loss"] < 0.01


def test_profile(lab: Lab) -> None:
    run = lab.run(*QUICK, "training.profile=true", "training.epochs=1")
    trace = json.loads((run.path / "profile" / "trace.json").read_text())
    assert any("backward" in str(event.get("name")) for event in trace["traceEvents"])


def test_seeds(lab: Lab) -> None:
    """Another seed is another run; the same seed is the same."""
    first, again, other = (lab.run(*QUICK, "training.epochs=1", f"seed={seed}") for seed in (1, 1, 2))
    assert history(first) == history(again)
    assert history(first) != history(other)
    orders = [epoch_order(1000, seed, epoch) for seed, epoch in [(1, 0), (1, 0), (2, 0), (1, 1)]]
    assert torch.equal(orders[0], orders[1])
    assert not any(torch.equal(orders[0], order) for order in orders[2:])
