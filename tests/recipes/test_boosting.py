"""What is special to trees: rounds that draw alike after a resume, classes and numbers, what they refuse. See test_table too."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from manta import arguments, predict
from manta.errors import INTERRUPTED, MantaError
from manta.runs import RunDir, read_lines
from tests.conftest import ROOT, Lab, history, summary, wait_for

pytestmark = pytest.mark.recipes
HERE = "scaling=in_process"
RECIPES = ("xgboost", "lightgbm")
FILES = {"xgboost": "model.json", "lightgbm": "model.txt"}
RANDOM = {
    "xgboost": ("recipe.settings.subsample=0.7", "recipe.settings.colsample_bytree=0.7", "+recipe.settings.params.colsample_bynode=0.8"),
    "lightgbm": ("recipe.settings.bagging_fraction=0.7", "recipe.settings.feature_fraction=0.7", "+recipe.settings.params.extra_trees=true"),
}  # fmt: skip


def trees(run: RunDir, recipe: str, checkpoint: str = "last") -> str:
    """The saved trees; what follows them in LightGBM's file are parameters, with the seeds of the last round."""
    return (run.checkpoints / checkpoint / FILES[recipe]).read_text().partition("\nparameters:")[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_continued_exactly(lab: Lab, recipe: str) -> None:
    """Rows and columns are drawn at random, and a run in two parts, any round being the seam, ends with the same trees."""
    settings = (HERE, f"recipe={recipe}", *RANDOM[recipe])
    whole = lab.run(*settings, "training.epochs=14")
    for seam in (1, 8):
        part = lab.run(*settings, f"training.epochs={seam}")
        assert lab.launch(f"resume={part}", "training.epochs=14") == 0
        assert history(part) == history(whole)
        assert trees(part, recipe) == trees(whole, recipe)
        assert summary(part)["test"] == summary(whole)["test"]
    other = lab.run(*settings, "training.epochs=14", "seed=1")
    assert trees(other, recipe) != trees(whole, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_ended_by_a_signal_and_resumed(
    lab: Lab, recipe: str, kind: signal.Signals, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = (HERE, f"recipe={recipe}", "data=diabetes", "training.epochs=200", *RANDOM[recipe])
    whole = Lab(tmp_path_factory.mktemp("whole")).run(*settings)
    process = lab.start(*settings)
    wait_for(lambda: len(list(lab.folder.glob("*/*/metrics.jsonl"))) == 1, process)
    run = RunDir(next(lab.folder.glob("*/*/metrics.jsonl")).parent)
    wait_for(lambda: len(read_lines(run.metrics)) > 20, process)
    process.send_signal(kind)
    assert process.wait(60) == (INTERRUPTED if kind == signal.SIGINT else -kind)
    assert process.stdout is not None
    process.stdout.close()
    assert len(read_lines(run.metrics)) < len(read_lines(whole.metrics))
    assert lab.launch(f"resume={run}") == 0
    assert history(run) == history(whole)
    assert trees(run, recipe) == trees(whole, recipe)
    assert summary(run)["best"] == summary(whole)["best"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_predictions_are_those_that_were_counted(lab: Lab, recipe: str) -> None:
    classes = lab.run(HERE, f"recipe={recipe}", "training.epochs=12")
    rows = _predicted(classes)
    assert (rows["target"] == rows["prediction"]).mean() == summary(classes)["test"]["test/accuracy"]
    assert np.allclose(rows[[f"p_{digit}" for digit in range(10)]].sum(axis=1), 1, atol=1e-5)
    numbers = lab.run(HERE, f"recipe={recipe}", "data=diabetes", "training.epochs=12")
    rows = _predicted(numbers)
    error = float(np.sqrt(((rows["target"] - rows["prediction"]) ** 2).mean()))
    assert error == pytest.approx(summary(numbers)["test"]["test/rmse"], rel=1e-5)


def _predicted(run: RunDir) -> pd.DataFrame:
    call = ["scripts/predict.py", f"run={run}"]
    assert arguments.main(predict.Arguments, lambda typed: predict.predict(typed, ROOT / "conf"), call, ROOT) == 0
    return pd.read_csv(run.path / "predictions.csv")


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_classes_and_sets_that_are_read(lab: Lab, recipe: str) -> None:
    """Two classes have one tree a round; samples that are not in memory are read through, and come to the same."""
    settings = (
        HERE, f"recipe={recipe}", "data=synthetic", "data.num_classes=2", "data.input_shape=[6]", "training.epochs=12",
        "data.dataset.num_samples=600",
    )  # fmt: skip
    kept = lab.run(*settings, "data.dataset.in_memory=true")
    assert summary(kept)["test"]["test/accuracy"] >= 0.75  # 0.78 and 0.87; by chance 0.5
    assert "12 rounds of 1 tree\n" in kept.log.read_text()
    assert history(lab.run(*settings, "data.dataset.in_memory=false")) == history(kept)


def test_several_numbers(lab: Lab) -> None:
    with pytest.raises(MantaError, match=r"one number a sample\. Use recipe=xgboost"):
        lab.launch(HERE, "recipe=lightgbm", "data=diabetes", "data.num_classes=2")


@pytest.mark.parametrize("recipe", RECIPES)
def test_settings_of_the_loop(lab: Lab, recipe: str) -> None:
    """Patience, validations now and then, a share of the rows, and rounds counted as steps."""
    run = lab.run(
        HERE, f"recipe={recipe}", "data=diabetes", "training.early_stopping.patience=3", "training.epochs=300"
    )
    found = summary(run)
    assert found["step"] == found["epoch"] == found["best"]["epoch"] + 3 < 300
    run = lab.run(
        HERE,
        f"recipe={recipe}",
        "training.val_every_n_epochs=4",
        "training.max_steps=10",
        "training.log_every_n_steps=5",
    )
    assert [line["step"] for line in history(run) if "val/loss" in line] == [4, 8, 10]
    lines = [line for line in history(run) if "train/loss" in line]
    assert [line["step"] for line in lines] == [5, 10]
    assert lines[-1]["train/loss"] == pytest.approx(history(run)[-1]["train/epoch_loss"])
    some = lab.run(HERE, f"recipe={recipe}", "training.limit_train_batches=5", "training.epochs=3")
    state = torch.load(some.checkpoints / "last" / "state.pt", weights_only=True)
    assert state["progress"]["step"] == state["progress"]["epoch"] == 3
    assert history(some)[-1]["val/accuracy"] < history(run)[-1]["val/accuracy"]


REFUSED = [
    (("training.ema.enabled=true",), "training.ema.enabled=true means nothing to recipe={}"),
    (("training.precision=bf16",), "training.precision=bf16 means nothing"),
    (("training.grad_clip_norm=1",), "training.grad_clip_norm=1.0 means nothing"),
    (("training.label_smoothing=0.1",), "Set training.label_smoothing=0.0, or use recipe=pytorch"),
    (("data.transforms.train=[{{_target_: manta.data.transforms.RandomCropFlip}}]",), "data.transforms.train differs"),
    (("data=text", "model=gpt"), "not manta.training.tasks.LanguageModeling"),
    (("+recipe.settings.params.foo=1",), "recipe.settings.params: .*foo"),
    (("+recipe.settings.params.seed=1",), "params.seed is set by seed"),
    (("+recipe.settings.params.max_depth=1",), "params.max_depth is set by recipe.settings.max_depth"),
    (("recipe.settings.max_bin=1",), "refuses its parameters"),
    (("recipe.settings.max_dept=1",), "max_dept"),
    (("search=asha", "scaling=auto"), "search.space has optimizer.lr, data.batch_size, which recipe={} does not use"),
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[settings[0].split("=")[0] for settings, _ in REFUSED])
def test_refused(lab: Lab, recipe: str, settings: tuple[str, ...], message: str) -> None:
    where = () if "scaling=auto" in settings else (HERE,)
    with pytest.raises(MantaError, match=message.format(recipe)):
        lab.launch(*where, f"recipe={recipe}", *(each.format() for each in settings))
    assert not list(lab.folder.glob("????-*"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_foreign(lab: Lab, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither files where the command was typed nor words of the libraries."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", f"recipe={recipe}", HERE, f"storage.path={lab.folder}", "training.epochs=4"],
        capture_output=True, text=True, timeout=100, check=False, cwd=elsewhere,
    )  # fmt: skip
    assert (done.returncode, done.stderr, list(elsewhere.iterdir())) == (0, "", [])
    assert not any(word in done.stdout for word in ("[LightGBM]", "WARNING", "Task 0"))
    meta = json.loads((lab.latest.checkpoints / "last" / "meta.json").read_text())
    assert set(meta["files"]) == {"state.pt", FILES[recipe]}
    assert Path(lab.latest.checkpoints / "best" / FILES[recipe]).is_file()
