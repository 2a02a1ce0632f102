"""A tutorial's script brought in, and what a script may get wrong."""

import difflib
import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from manta.errors import FINISHED, MantaError
from manta.recipes.script import Run
from manta.runs import RunDir, read_lines
from manta.session import Agreement
from tests.conftest import ROOT, Lab, history, summary
from tests.recipes import quickstart

HERE = Path(__file__).parent
TRUST = "allowed_targets=[manta,torch,tests]"
QUICKSTART = (
    "recipe=script",
    "recipe.settings.main=tests.recipes.quickstart.main",
    TRUST,
    "training.epochs=5",
    "optimizer.lr=3e-3",
)


def test_ten_lines_are_enough() -> None:
    before, after = ((HERE / name).read_text().splitlines() for name in ("quickstart_before.py", "quickstart.py"))
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert 0 < len(changed) <= 10
    done = subprocess.run([sys.executable, HERE / "quickstart_before.py"], capture_output=True, text=True, check=True)
    assert "Epoch 5: accuracy 0.8" in done.stdout


@pytest.mark.usefixtures("ray_cluster")
def test_the_quickstart_at_any_scale(lab: Lab) -> None:
    """In process, on workers and in a search with MLflow: the script is the same."""
    alone = lab.run("scaling=in_process", *QUICKSTART)
    assert summary(alone)["objective"]["value"] > 0.85
    assert summary(alone)["throughput"]["samples_per_s"] > 0
    two = lab.run("scaling=cpu", "scaling.num_workers=2", *QUICKSTART)
    for one, other in zip(history(alone), history(two), strict=True):
        assert other == pytest.approx(one, rel=2e-3)

    code = lab.launch(
        "scaling=cpu", "scaling.num_workers=1", "search=asha", "tracking=mlflow", "search.num_samples=4", "search/space=none",
        "search.space.optimizer.lr=loguniform(1e-4, 1e-2)", "search.scheduler.grace_period=1", "search.report=false", *QUICKSTART[:-1],
    )  # fmt: skip
    assert code == FINISHED
    trials = [RunDir(path) for path in sorted((lab.latest.path / "trials").iterdir())]
    assert len({summary(trial)["objective"]["value"] for trial in trials}) == 4
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{lab.folder}/mlflow.db")
    for trial in trials:
        told = json.loads((trial.path / "tracking" / "mlflow.json").read_text())
        points = client.get_metric_history(told["run_id"], "val/accuracy")
        assert [p.value for p in points] == [
            x["val/accuracy"] for x in read_lines(trial.metrics) if "val/accuracy" in x
        ]


def batches(world_size: int, size: int, batch: int, *settings: str) -> list[list[list[int]]]:
    """Of every rank: the samples of every batch of one epoch of a loader that shuffles."""
    from types import SimpleNamespace

    from manta.training.record import Progress
    from tests.conftest import make_config

    config = make_config("scaling=in_process", *settings)
    found = []
    for rank in range(world_size):
        session = SimpleNamespace(device=torch.device("cpu"), rank=rank, world_size=world_size, pulse=lambda _: None)
        record = SimpleNamespace(progress=Progress())
        run = Run(session, config, record, None)  # type: ignore[arg-type]
        run.stepped = lambda samples, record=record: setattr(
            record.progress, "offset", record.progress.offset + samples
        )  # type: ignore[method-assign]
        run._kept = {"models": [nn.Linear(1, 1)]}
        loader = run._ready(DataLoader(TensorDataset(torch.arange(size)), batch, shuffle=True), {})
        found.append([x.tolist() for (x,) in loader])
        assert record.progress.offset == sum(loader.shares.left()) + loader.shares.skip
    return found


@pytest.mark.parametrize(("size", "batch"), [(64, 16), (70, 16), (66, 16), (65, 16), (16, 16)])
def test_batches_are_shared_out(size: int, batch: int) -> None:
    """Every sample once, and none but on one rank; the same batches for every number of workers; all ranks have all batches."""
    (alone,) = batches(1, size, batch)
    assert sorted(sample for part in alone for sample in part) == list(range(size))
    for world_size in (2, 3):
        ranks = batches(world_size, size, batch)
        together = [sorted(chain.from_iterable(parts)) for parts in zip(*ranks, strict=True)]
        whole = [sorted(part) for part in alone]
        if len(whole[-1]) < world_size and len(whole) > 1:
            whole[-2:] = [sorted(whole[-2] + whole[-1])]
        assert together == whole
        assert all(part for parts in ranks for part in parts)


def test_limits_of_batches() -> None:
    assert len(batches(2, 64, 16, "training.limit_train_batches=3")[0]) == 3
    assert len(batches(2, 64, 16, "training.max_steps=2")[0]) == 2


# --- mistakes --------------------------------------------------------------------------------------------------------


def silent(run: Run) -> None:
    run.prepare(nn.Linear(1, 1))
    for _ in run.epochs():
        pass


def other_metric(run: Run) -> None:
    run.prepare(nn.Linear(1, 1))
    for _ in run.epochs():
        run.report({"val/f1": 1.0})


def early(run: Run) -> None:
    for _ in run.epochs():
        pass


def twice(run: Run) -> None:
    run.prepare(nn.Linear(1, 1))
    run.prepare(nn.Linear(1, 1))


def strange(run: Run) -> None:
    run.prepare("a model")


def no_run() -> None:
    pass


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("silent", "has reported no val/accuracy"),
        ("other_metric", "reports val/f1, not the objective val/accuracy"),
        ("early", "run.epochs was called before run.prepare"),
        ("twice", "run.prepare was called twice"),
        ("strange", "was given a str"),
        ("no_run", "must take one argument, the run"),
        ("nowhere", "does not exist"),
    ],
)
def test_a_script_that_cannot_work(lab: Lab, name: str, message: str) -> None:
    with pytest.raises(MantaError, match=message):
        lab.launch(
            "scaling=in_process", "recipe=script", f"recipe.settings.main=tests.recipes.test_script.{name}", TRUST
        )


@pytest.mark.parametrize(
    "setting",
    ["training.ema.enabled=true", "data.micro_batch_size=8", "training.label_smoothing=0.1", "training.compile=true"],
)
def test_settings_that_a_script_decides(lab: Lab, setting: str) -> None:
    with pytest.raises(MantaError, match=f"{setting}: a script decides that itself"):
        lab.launch("scaling=in_process", *QUICKSTART, setting)


def test_predicting_is_the_scripts_own(lab: Lab) -> None:
    done = lab.run("scaling=in_process", *QUICKSTART[:-2], "training.epochs=1")
    state = torch.load(done.checkpoints / "best" / "state.pt", weights_only=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model.load_state_dict(state["learner"]["models"][0])
    accuracy = (model(quickstart.images[1500:]).argmax(1) == quickstart.labels[1500:]).double().mean().item()
    assert accuracy == pytest.approx(summary(done)["objective"]["value"])
    refused = subprocess.run(
        [sys.executable, ROOT / "scripts" / "predict.py", f"run={done}"], capture_output=True, text=True, check=False,
        env={"MANTA_ALLOWED_TARGETS": "tests", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": ""},
    )  # fmt: skip
    assert refused.returncode == 2 and "how tests.recipes.quickstart.main predicts is not known" in refused.stderr


def two_passes(run: Run) -> None:
    """An epoch of two passes; random numbers are drawn in both."""
    samples = TensorDataset(quickstart.images[:640], quickstart.labels[:640])
    loader = DataLoader(samples, 64, shuffle=True)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.epochs():
        model.train()
        for _ in range(2):
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss)
        run.report({"val/loss": float(loss) if run.record else 0.0, "val/accuracy": 0.5})


@pytest.mark.parametrize(
    ("main", "steps"), [("quickstart.main", 3 * 24), ("test_script.two_passes", 3 * 20)], ids=["one pass", "two passes"]
)
def test_interrupted_in_the_middle_of_an_epoch(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, main: str, steps: int
) -> None:
    """The epoch goes on with the batches it has not seen."""
    settings = (
        "scaling=in_process",
        "recipe=script",
        f"recipe.settings.main=tests.recipes.{main}",
        TRUST,
        "training.epochs=3",
    )
    whole = Lab(tmp_path_factory.mktemp("whole")).run(*settings)
    with monkeypatch.context() as patch:
        patch.setattr(Agreement, "__call__", lambda _, step: (step == 35, False))
        assert lab.launch(*settings) == 130
    assert summary(lab.latest)["step"] == 35
    assert lab.launch("resume=latest") == FINISHED
    assert history(lab.latest) == history(whole)
    assert summary(lab.latest)["step"] == steps
