"""Every recipe and task, each through everything that Manta does for a run: any scale, search, resume, trackers, evaluation."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from manta import evaluate
from manta.config import Storage
from manta.errors import FINISHED
from manta.runs import RunDir, read_lines
from tests import wandb_files
from tests.conftest import ROOT, Lab, history, summary


@dataclass(frozen=True)
class Case:
    """A recipe with its task."""

    settings: tuple[str, ...]
    floor: float
    """What the objective reaches, or better."""
    apart: float = 1e-3
    """How far numbers of two workers are from those of one, relatively."""
    space: str = "search.space.optimizer.lr=loguniform(1e-3, 1e-2)"
    kill_at: int = 5
    """Which report is the last before the kill."""
    tests: bool = True
    """Whether the recipe itself looks at the test split."""
    precision: str = "fp64"
    """Of the comparison of one worker and two."""
    extra: bool = False
    """Whether it needs a framework of its own (`make test-recipes`)."""


TEXT = (
    "data=text", "model=gpt", "data.dataset.max_bytes=600_000", "data.input_shape=[32]", "data.batch_size=16", "model.dim=32",
    "model.depth=1", "model.heads=2", "optimizer.weight_decay=0.1", "training.limit_train_batches=50",
)  # fmt: skip
CASES = {
    "pytorch-classification": Case(("training.epochs=4",), 0.93, 1e-4),
    "pytorch-regression": Case(("data=diabetes", "training.epochs=12", "data.eval_batch_size=7"), 52.0, 1e-4),
    "pytorch-language": Case((*TEXT, "training.max_steps=300"), 4.5, 1e-4),
    "script": Case(("recipe=script", "training.epochs=4"), 0.92, 2e-2, tests=False),
    "accelerate": Case(("recipe=accelerate", "training.epochs=4"), 0.92, 2e-2, tests=False, extra=True),
    "xgboost-classification": Case(
        ("recipe=xgboost", "training.epochs=15"), 0.93, 1e-6,
        "search.space.recipe.settings.eta=loguniform(0.03, 0.5)", precision="fp32", extra=True,
    ),
    "xgboost-regression": Case(
        ("recipe=xgboost", "data=diabetes", "training.epochs=15", "recipe.settings.max_depth=3"), 53.0, 1e-6,
        "search.space.recipe.settings.eta=loguniform(0.03, 0.5)", precision="fp32", extra=True,
    ),
    "lightgbm-classification": Case(
        ("recipe=lightgbm", "training.epochs=15"), 0.92, 5e-2,
        "search.space.recipe.settings.learning_rate=loguniform(0.03, 0.5)", precision="fp32", extra=True,
    ),
    "lightgbm-regression": Case(
        ("recipe=lightgbm", "data=diabetes", "training.epochs=30"), 51.0, 1e-6,
        "search.space.recipe.settings.learning_rate=loguniform(0.03, 0.5)", precision="fp32", extra=True,
    ),
    "lightning": Case(("recipe=lightning", "training.epochs=4"), 0.93, 1e-4, extra=True),
    "transformers-language": Case(
        (
            "recipe=transformers", "data=text", "data.dataset.max_bytes=600_000", "data.input_shape=[32]", "data.batch_size=16",
            "recipe.settings.model={model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 32, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0}",
            "training.limit_train_batches=50", "training.max_steps=300", "optimizer.lr=3e-3",
        ),
        4.5, 1e-3, "search.space.optimizer.weight_decay=loguniform(1e-3, 1)", precision="fp32", extra=True,
    ),
    "transformers-classification": Case(  # 0.54 without having learned anything
        (
            "recipe=transformers", "recipe/task=classification", "data=snippets", "data.dataset.packages=[unittest,xml]",
            "data.num_classes=2", "data.input_shape=[32]", "data.batch_size=64", "training.limit_train_batches=75", "optimizer.lr=6e-3",
            "recipe.settings.model={model_type: gpt2, n_layer: 1, n_head: 4, n_embd: 32, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0}",
            "training.max_steps=450",
        ),
        0.62, 1e-3, "search.space.optimizer.weight_decay=loguniform(1e-3, 1)", precision="fp32", extra=True,
    ),
    "deepspeed": Case(("recipe=deepspeed", "training.epochs=4"), 0.92, 2e-2, tests=False, precision="fp32", extra=True),
}  # fmt: skip
TABLE = [pytest.param(case, id=name, marks=[pytest.mark.recipes] if case.extra else []) for name, case in CASES.items()]
pytestmark = pytest.mark.timeout(400)


def better(value: float, than: float, run: RunDir) -> bool:
    return value >= than if summary(run)["objective"]["mode"] == "max" else value <= than


@pytest.mark.parametrize("case", TABLE)
def test_a_run_its_trackers_and_its_evaluation(lab: Lab, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quality; W&B and MLflow have what the history has; the run directory alone gives the same metrics again."""
    monkeypatch.chdir(lab.folder)
    trackers = "tracking=all", "tracking.wandb.mode=offline", "tracking.finish_s=200"
    run = lab.run("scaling=in_process", *case.settings, *trackers)
    found = summary(run)
    assert better(found["objective"]["value"], case.floor, run)
    assert case.tests == bool(found["test"]) and all(math.isfinite(value) for value in found["test"].values())
    assert found["throughput"]["samples_per_s"] > 0

    metric = found["objective"]["metric"]
    told = [(line["step"], line[metric]) for line in read_lines(run.metrics) if metric in line]
    assert [(step, value) for key, step, value in wandb_files.read(run.path).points() if key == metric] == told
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{lab.folder}/mlflow.db")
    there = client.get_run(json.loads((run.path / "tracking" / "mlflow.json").read_text())["run_id"])
    points = client.get_metric_history(there.info.run_id, metric)
    assert there.info.status == "FINISHED" and [(each.step, each.value) for each in points] == told

    assert (
        evaluate.evaluate(evaluate.Arguments(run=str(run), use_gpu=False, storage=Storage(str(lab.folder)))) == FINISHED
    )
    again = json.loads((run.path / "evaluation-best.json").read_text())["metrics"]
    recorded = {**found["best"]["metrics"], **found["test"]}
    assert again == pytest.approx({key: recorded[key] for key in again}, rel=1e-6)
    ours = {"latest", "mlflow.db", "mlflow-artifacts", "tracking", run.path.parent.name}
    assert {path.name for path in lab.folder.iterdir()} <= ours


@pytest.mark.parametrize("case", TABLE)
@pytest.mark.usefixtures("ray_cluster")
def test_two_workers_are_as_good_as_one(lab: Lab, case: Case) -> None:
    runs = [
        lab.run(*scaling, *case.settings, f"training.precision={case.precision}", "training.test=false")
        for scaling in (("scaling=in_process",), ("scaling=cpu", "scaling.num_workers=2"))
    ]
    metric = summary(runs[0])["objective"]["metric"]
    one, two = ([(x["step"], x[metric]) for x in history(run) if metric in x] for run in runs)
    assert [step for step, _ in two] == [step for step, _ in one]
    assert [value for _, value in two] == pytest.approx([value for _, value in one], rel=case.apart)


@pytest.mark.parametrize("case", TABLE)
@pytest.mark.usefixtures("ray_cluster")
def test_a_search(lab: Lab, case: Case) -> None:
    """ASHA over four trials of one worker; the best of them is in best/."""
    code = lab.launch(
        *case.settings, "scaling=cpu", "scaling.num_workers=1", "search=asha", "search/space=none", case.space,
        "search.num_samples=4", "search.refit=false", "search.report=false", "search.scheduler.grace_period=1",
    )  # fmt: skip
    assert code == FINISHED
    search = lab.latest
    trials = [RunDir(path) for path in sorted((search.path / "trials").iterdir())]
    values = [summary(trial)["objective"]["value"] for trial in trials]
    assert len(values) == 4 and len(set(values)) > 1
    best = max(values) if summary(trials[0])["objective"]["mode"] == "max" else min(values)
    assert summary(search)["objective"]["value"] == best
    assert all(summary(trial)["test"] == {} for trial in trials)


KILLED = """
import os, runpy, signal, sys
from manta.session import Session

report, left = Session.report, int(sys.argv.pop(1))

def report_and_die(self, values):
    global left
    report(self, values)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

Session.report = report_and_die
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


LOADER = Case(
    (
        "data=synthetic", "data.dataset.num_samples=300", "data.dataset.in_memory=false", "data.num_workers=1", "training.epochs=3",
        "model.dropout=0.5", "data.batch_size=16",
    ),
    0.0, kill_at=9,
)  # fmt: skip
"""Passes over a DataLoader draw numbers too: a resumed epoch has one pass more."""


@pytest.mark.parametrize("case", [*TABLE, pytest.param(LOADER, id="pytorch-loader")])
def test_killed_and_resumed(lab: Lab, case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The history and the result of a run that was killed are those of one that was not."""
    settings = (
        "scaling=in_process",
        "training.log_every_n_steps=3",
        "training.checkpoint.every_n_steps=7",
        *case.settings,
    )
    whole = Lab(tmp_path_factory.mktemp("whole")).run(*settings)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(case.kill_at), str(ROOT / "train.py"), f"storage.path={lab.folder}", *settings],
        cwd=lab.folder, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    run = lab.latest
    assert len(read_lines(run.metrics)) == case.kill_at < len(read_lines(whole.metrics))
    assert lab.launch("resume=latest") == FINISHED
    assert history(run) == history(whole)
    assert summary(run)["test"] == summary(whole)["test"]
    assert summary(run)["best"] == summary(whole)["best"]


def test_every_recipe_is_in_the_table() -> None:
    names = {path.stem for path in (ROOT / "conf" / "recipe").glob("*.yaml")}
    assert {name.partition("-")[0] for name in CASES} == names
