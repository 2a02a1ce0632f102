"""recipe=lightning: the same science, search, tracking and resume with Lightning's Trainer inside."""

import json
import os
import re
import signal
from typing import Any

import pandas as pd
import pytest
import torch

import manta.evaluate
import manta.predict
from manta import arguments
from manta.errors import MantaError
from manta.recipes import make_recipe
from manta.runs import RunDir
from tests import wandb_files
from tests.conftest import ROOT, Lab, history, make_config, summary, wait_for
from tests.test_resume import kill_at, never

pytestmark = pytest.mark.recipes

LIGHTNING = ("recipe=lightning", "scaling=in_process")
ALLOWED = "allowed_targets=[manta,torch,torchvision,lightning,tests]"
DATA = "recipe.settings.datamodule={_target_: tests.recipes.own_lightning.Digits%s}"
OWN = (
    "recipe=lightning", ALLOWED, "recipe.settings.module._target_=tests.recipes.own_lightning.Net", DATA % "",
    "objective={metric: val_acc, mode: max}", "recipe.metrics=[val_loss,val_acc]",
)  # fmt: skip
# 29 steps an epoch, the last one uneven.
RESUMED = (
    "recipe=lightning", "model.dropout=0.2", "data.batch_size=50", "optimizer=sgd", "optimizer.momentum=0.9",
    "optimizer.lr=0.02", "training.epochs=4", "training.log_every_n_steps=4", "training.early_stopping.patience=3",
    "training.checkpoint.every_n_steps=5", "allowed_targets=[manta,torch,torchvision,tests]",
)  # fmt: skip
ONE, TWO = [("scaling=cpu", f"scaling.num_workers={n}", "scaling.resources_per_worker={CPU: 1}") for n in (1, 2)]


def noisy(transforms: str) -> str:
    """With random augmentation of batches before."""
    return transforms.replace("=[", "=[{_target_: torchvision.transforms.v2.GaussianNoise, sigma: 0.05},")


def close(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> bool:
    """Whether two histories have the same lines up to rounding."""
    assert [set(line) for line in found] == [set(line) for line in expected]
    return all(
        line == pytest.approx(other, rel=tolerance, abs=tolerance) for line, other in zip(found, expected, strict=True)
    )


def same(found: Any, expected: Any) -> bool:
    """Whether nested values are equal bit for bit."""
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
    if isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected


def assert_identical(run: RunDir, reference: RunDir) -> None:
    """Histories, weights, optimizers and schedules bit for bit."""
    assert history(run) == history(reference)
    for name in ("last", "best"):
        mine, theirs = ((each.checkpoints / name).resolve() for each in (run, reference))
        assert mine.name == theirs.name
        found, expected = (torch.load(path / "lightning.ckpt", weights_only=True) for path in (mine, theirs))
        assert found["lr_schedulers"] == expected["lr_schedulers"]
        for part in ("state_dict", "optimizer_states"):
            assert same(found[part], expected[part]), f"{name}: {part}"
    assert summary(run)["test"] == summary(reference)["test"]
    assert summary(run)["best"] == summary(reference)["best"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def run(shared: Lab) -> RunDir:
    """With everything at its default."""
    return shared.run(*LIGHTNING)


@pytest.fixture(scope="module")
def own(shared: Lab) -> RunDir:
    return shared.run(*OWN, "scaling=in_process", "training.epochs=6")


# --- learning --------------------------------------------------------------------------------------------------------


def test_learns_as_the_default_recipe_does(lab: Lab, run: RunDir) -> None:
    assert summary(run)["test"]["test/accuracy"] >= 0.95  # reached: 0.983
    default = lab.run("scaling=in_process")
    assert close(history(run), history(default), 1e-6)
    assert summary(run)["test"] == pytest.approx(summary(default)["test"], abs=1e-6)


@pytest.mark.parametrize(
    "settings",
    [("data.micro_batch_size=20",), ("scheduler=plateau", "training.val_every_n_epochs=2"), ("scheduler=step",),
     ("training.max_steps=50", "training.epochs=null"), ("training.limit_train_batches=7", "training.grad_clip_norm=0.5"),
     ("training.overfit_batches=2", "training.limit_eval_batches=1"),
     ("training.precision=fp64", "training.early_stopping.patience=1", "optimizer.lr=0.1"),
     ("data=synthetic", "data.dataset.num_samples=300", "data.dataset.in_memory=false"),
     ("data=diabetes", "recipe.settings.trainer={benchmark: false}")],
    ids=lambda settings: settings[0],
)  # fmt: skip
def test_every_group_keeps_its_meaning(lab: Lab, settings: tuple[str, ...]) -> None:
    length = () if any("epochs=null" in each for each in settings) else ("training.epochs=4",)
    found = lab.run(*LIGHTNING, *length, *settings)
    expected = lab.run("scaling=in_process", *length, *(each for each in settings if "recipe." not in each))
    assert close(history(found, "train/lr"), history(expected, "train/lr"), 1e-4)
    assert summary(found)["step"] == summary(expected)["step"]


def test_half_precision(lab: Lab) -> None:
    """Lightning has the metrics inside autocast too, where they are computed in single precision."""
    settings = ("training.precision=bf16", "training.epochs=4")
    assert close(history(lab.run(*LIGHTNING, *settings)), history(lab.run("scaling=in_process", *settings)), 1e-2)


def test_a_module_and_a_datamodule_of_ones_own(own: RunDir) -> None:
    """Its own names are the metrics: of steps, of the training epoch and of validation."""
    assert summary(own)["best"]["metrics"]["val_acc"] >= 0.9
    assert summary(own)["test"]["test_acc"] >= 0.9
    lines = history(own)
    assert {"train/loss", "train_loss", "train/lr"} <= set(lines[0])
    assert {"val_loss", "val_acc", "train/epoch_loss"} <= set(next(line for line in lines if "val_acc" in line))
    assert [line["epoch"] for line in lines if "train_acc" in line] == [1, 2, 3, 4, 5, 6]


def test_a_module_that_optimizes_by_itself(lab: Lab) -> None:
    settings = (*OWN[:2], "recipe.settings.module._target_=tests.recipes.own_lightning.ByHand", "recipe.metrics=[val_loss]",
                "objective={metric: val_loss, mode: min}", "scaling=in_process", "training.epochs=4")  # fmt: skip
    found = lab.run(*settings)
    assert summary(found)["best"]["metrics"]["val_loss"] < 0.6
    assert not any("train/loss" in line for line in history(found))
    with pytest.raises(MantaError, match=r"data\.micro_batch_size=8.*=null"):
        lab.launch(*settings, "data.micro_batch_size=8")


# --- scaling ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("workers", [ONE, TWO], ids=["one", "two"])
def test_workers_change_nothing(lab: Lab, run: RunDir, workers: tuple[str, ...]) -> None:
    found = lab.run("recipe=lightning", *workers)
    assert close(history(found), history(run), 2e-4)
    assert summary(found)["world_size"] == (1 if workers is ONE else 2)
    assert summary(found)["test"] == pytest.approx(summary(run)["test"], abs=1e-4)


@pytest.mark.usefixtures("ray_cluster")
def test_an_own_module_on_two_workers(lab: Lab) -> None:
    """Metrics over real samples: 37 validate, on ranks with 19 and 18. Without what batches do to each other it is the same."""
    data = DATA % ", val_size: 37"
    smooth = "objective={metric: val_loss, mode: min}"  # Lightning's means are single precision: accuracies may tie, or just not
    settings = (*OWN[:3], data, smooth, OWN[-1], "training.epochs=2", "+recipe.settings.module.normalised=false")
    one, two = lab.run(*settings, "scaling=in_process"), lab.run(*settings, *TWO)
    assert close(history(two, "train_loss"), history(one, "train_loss"), 1e-4)
    assert summary(two)["test"] == pytest.approx(summary(one)["test"], abs=1e-4)


@pytest.mark.usefixtures("ray_cluster")
def test_search(lab: Lab) -> None:
    assert lab.launch("recipe=lightning", *ONE, "search=asha", "search.num_samples=4", "training.epochs=4",
                      "search.refit_seeds=1") == 0  # fmt: skip
    trials = pd.read_csv(lab.latest.path / "trials.csv")
    assert len(trials) == 4
    assert (trials["status"] == "stopped").any()
    assert summary(lab.latest)["objective"]["value"] >= 0.8
    for trial in lab.latest.path.glob("trials/*"):
        assert "test" not in (trial / "metrics.jsonl").read_text()


# --- resume ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(shared: Lab) -> RunDir:
    return shared.run("scaling=in_process", noisy(never(shared)), *RESUMED)


@pytest.mark.parametrize("call", [38, 59])
def test_killed(lab: Lab, undisturbed: RunDir, call: int) -> None:
    """In mid-epoch, and in the first step of an epoch."""
    killed = lab.command("scaling=in_process", noisy(kill_at(call, lab.folder / "fired")), *RESUMED)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    assert lab.launch("resume=latest") == 0
    assert_identical(lab.latest, undisturbed)


@pytest.mark.usefixtures("ray_cluster")
def test_killed_worker_is_replaced(lab: Lab) -> None:
    whole = lab.run(*TWO, noisy(never(lab)), *RESUMED)
    found = lab.run(*TWO, "scaling.max_failures=1", noisy(kill_at(38, lab.folder / "fired", rank=1)), *RESUMED)
    assert (lab.folder / "fired").exists()
    assert_identical(found, whole)


@pytest.mark.parametrize(("call", "more"), [(38, ()), (59, ("training.checkpoint.every_n_steps=1000",))])
def test_killed_with_an_own_module(lab: Lab, call: int, more: tuple[str, ...]) -> None:
    """Random augmentation in loader processes, dropout, batch normalisation, a plateau that waits for a metric of training,
    a callback with a state; from the middle of an epoch, and from between two."""
    settings = (
        *OWN[:3], DATA % ", num_workers: 1", *OWN[4:], "scaling=in_process", "training.epochs=4",
        "training.log_every_n_steps=4", *(more or ("training.checkpoint.every_n_steps=5",)),
    )  # fmt: skip

    def counted(name: str) -> str:
        path = lab.folder / name
        return f"recipe.settings.callbacks=[{{_target_: tests.recipes.own_lightning.Counting, path: {path}}}]"

    whole = lab.run(*settings, counted("whole"))
    kill = (f"+recipe.settings.module.kill_at={call}", f"+recipe.settings.module.marker={lab.folder}/fired")
    killed = lab.command(*settings, *kill, counted("resumed"), env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/src"})
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    assert lab.launch("resume=latest", ALLOWED) == 0
    assert_identical(lab.latest, whole)
    assert (lab.folder / "resumed").read_text() == (lab.folder / "whole").read_text() == str(4 * 29)


def test_extended(lab: Lab) -> None:
    """A run made longer ends as one that was long from the start, from the end of an epoch and from the middle of one."""
    settings = (*LIGHTNING, "scheduler=constant", "training.epochs=null")
    whole = lab.run(*settings, "training.max_steps=60")
    for first in (46, 50):
        run = lab.run(*settings, f"training.max_steps={first}")
        assert lab.launch(f"resume={run.path}", "training.max_steps=60") == 0
        found = [line for line in history(run) if "train/loss" in line]
        assert found == [line for line in history(whole) if "train/loss" in line]


@pytest.mark.parametrize("scaling", [("scaling=in_process",), TWO], ids=["in process", "two workers"])
def test_interrupted(lab: Lab, scaling: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    """SIGTERM: a checkpoint, exit code 130, and the same run after all."""
    slow = "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.05}]"
    process = lab.start(*scaling, slow, *RESUMED)
    wait_for(lambda: (lab.folder / "latest").exists() and (lab.latest.checkpoints / "last").exists(), process, 100)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert lab.latest.read("status.json")["state"] == "interrupted"
    run = lab.latest
    if scaling is TWO:
        request.getfixturevalue("ray_cluster")
    assert lab.launch("resume=latest") == 0
    assert history(run) == history(lab.run(*scaling, slow.replace("0.05", "0.0"), *RESUMED))


# --- what else a run does --------------------------------------------------------------------------------------------


def test_trackers(lab: Lab) -> None:
    found = lab.run(
        *LIGHTNING, "tracking=all", "tracking.wandb.mode=offline", "training.epochs=2", "tracking.finish_s=200"
    )
    lines = history(found)
    told = wandb_files.read(found.path)
    losses = {(step, value) for key, step, value in told.points() if key == "val/loss"}
    assert losses == {(line["step"], line["val/loss"]) for line in lines if "val/loss" in line}
    assert {step for key, step, _ in told.points() if key == "train/loss"} == {10, 20, 30, 40}
    from mlflow import MlflowClient

    identity = json.loads((found.path / "tracking" / "mlflow.json").read_text())["run_id"]
    client = MlflowClient(f"sqlite:///{lab.folder}/mlflow.db")
    values = [m.value for m in client.get_metric_history(identity, "val/accuracy")]
    assert values == [line["val/accuracy"] for line in lines if "val/accuracy" in line]


@pytest.mark.parametrize("which", ["run", "own"])
def test_evaluate_finds_what_training_recorded(which: str, request: pytest.FixtureRequest, monkeypatch: Any) -> None:
    run: RunDir = request.getfixturevalue(which)
    monkeypatch.setenv("MANTA_ALLOWED_TARGETS", "tests")
    evaluate = ["scripts/evaluate.py", f"run={run.path}"]
    assert arguments.main(manta.evaluate.Arguments, manta.evaluate.evaluate, evaluate, ROOT) == 0
    found = json.loads((run.path / "evaluation-best.json").read_text())["metrics"]
    known = summary(run)
    recorded = {k: v for k, v in known["best"]["metrics"].items() if k.startswith("val")} | known["test"]
    assert found == pytest.approx(recorded, rel=0, abs=1e-9)


def test_predict(run: RunDir) -> None:
    call = ["scripts/predict.py", f"run={run.path}"]
    predict = manta.predict.predict
    assert arguments.main(manta.predict.Arguments, lambda typed: predict(typed, ROOT / "conf"), call, ROOT) == 0
    rows = pd.read_csv(run.path / "predictions.csv")
    assert (rows["target"] == rows["prediction"]).mean() == summary(run)["test"]["test/accuracy"]


def test_nothing_foreign_appears(lab: Lab) -> None:
    done = lab.command(
        *OWN, "scaling=in_process", "training.epochs=1", env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/src"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each.name for each in lab.folder.iterdir() if not re.fullmatch(r"latest|\d{4}-\d\d-\d\d", each.name)] == []
    assert {each.name for each in lab.latest.path.iterdir()}.isdisjoint({"lightning_logs", "checkpoint", "wandb"})
    assert "my own words" in done.stdout
    assert done.stderr == ""
    assert not re.search(r"lightning\.ai|💡|GPU available|Sanity|it/s|LOCAL_RANK|`Trainer|Warning", done.stdout)


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("training.ema.enabled=true",), ("training.ema.enabled=true", "recipe=pytorch")),
        (("training.profile=true",), ("training.profile=true", "profiler")),
        (("scaling=cpu", "scaling.strategy=fsdp2"), ("scaling.strategy=fsdp2", "scaling.strategy=ddp")),
        (("data.micro_batch_size=auto",), ("data.micro_batch_size=auto", "a number, or null")),
        (("tracking=tensorboard", "tracking.watch=all"), ("tracking.watch=all", "tracking.watch=null")),
        ((*OWN[1:], "training.compile=true"), ("training.compile=true", "in your module")),
        (("recipe.settings.trainer={max_epochs: 3}",), ("recipe.settings.trainer.max_epochs=3", "training.epochs")),
        (("recipe.settings.trainer={detect_anomly: true}",), ("trainer.detect_anomly", "Did you mean", "detect_anomaly")),
        (("recipe.settings.callbacks=[{_target_: lightning.pytorch.callbacks.ModelCheckpoint}]",), ("training.checkpoint",)),
        (("recipe.settings.callbacks=[{_target_: lightning.pytorch.callbacks.EarlyStopping}]",), ("monitor",)),
        (("recipe.settings.callbacks=[{_target_: lightning.pytorch.Trainer}]",), ("lightning.pytorch.callbacks",)),
        (("recipe.settings.module._target_=mylab.Net",), ("outside the allowed packages", "mylab")),
        (("recipe.settings.module._target_=manta.models.mlp.MLP",), ("is not a lightning.pytorch.LightningModule",)),
        ((*OWN[1:], "+recipe.settings.module.hiden=3"), ("recipe.settings.module.hiden", "hidden")),
        ((*OWN[1:], "recipe.settings.module._target_=tests.recipes.own_lightning.Silent"), ("logs nothing", "val_acc")),
        ((*OWN[1:5], "recipe.metrics=[val_f1]", "objective.metric=val_f1"), ("val_f1", "logs val_loss, val_acc")),
        (("optimizer=sgd", "optimizer.lr=1e30"), ("Training diverged", "step ")),
    ],
)  # fmt: skip
def test_refused(lab: Lab, given: tuple[str, ...], words: tuple[str, ...]) -> None:
    scaling = () if any("scaling=" in each for each in given) else ("scaling=in_process",)
    with pytest.raises(MantaError) as refused:
        lab.launch("recipe=lightning", *scaling, "training.epochs=1", *given)
    for word in words:
        assert word in str(refused.value)


def test_the_recipe_is_found() -> None:
    assert type(make_recipe(make_config("recipe=lightning"))).__name__ == "LightningRecipe"
