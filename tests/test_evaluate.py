"""scripts/evaluate.py: the recorded metrics again, by any number of workers, from the run directory alone."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manta import arguments
from manta.evaluate import Arguments, evaluate, published
from manta.runs import RunDir, writing
from manta.training.checkpoint import load_checkpoint
from tests.conftest import ROOT, Lab, summary

# The learning rate is so high that the best epoch (the third) is not the last.
SETTINGS = (
    "scaling=in_process", "model=mlp", "scheduler=constant", "optimizer.lr=0.02", "training.epochs=4", "seed=3",
    "training.precision=fp64", "objective={metric: val/loss, mode: min}",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return Lab(tmp_path_factory.mktemp("evaluated")).run(*SETTINGS)


def command(*given: str) -> int:
    """What `python scripts/evaluate.py <given>` exits with."""
    return arguments.main(Arguments, evaluate, ["scripts/evaluate.py", *given], ROOT)


def evaluated(run: RunDir, *given: str, checkpoint: str = "best") -> dict[str, Any]:
    """The file that an evaluation writes."""
    assert command(f"run={run.path}", f"checkpoint={checkpoint}", *given) == 0
    return json.loads((run.path / f"evaluation-{checkpoint}.json").read_text())


def recorded(run: RunDir) -> dict[str, float]:
    """Validation and test metrics of the best checkpoint, as training found them."""
    found = summary(run)
    return {k: v for k, v in found["best"]["metrics"].items() if k.startswith("val/")} | found["test"]


def test_metrics_are_those_that_training_recorded(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(run)
    assert found.keys() == {"checkpoint", "step", "epoch", "metrics"}
    assert (found["checkpoint"], found["step"], found["epoch"]) == ("best", 69, 3)
    assert found["metrics"] == pytest.approx(recorded(run), rel=0, abs=1e-12)
    assert found["metrics"].keys() == {"val/loss", "val/accuracy", "test/loss", "test/accuracy"}
    shown = capsys.readouterr().out
    assert f"test        loss {found['metrics']['test/loss']:.4f}" in shown
    assert "evaluation-best.json" in shown


def test_averaged_weights_and_single_precision(lab: Lab) -> None:
    run = lab.run(*SETTINGS[:4], "training.epochs=2", "training.ema.enabled=true", "data.split_seed=5")
    assert evaluated(run)["metrics"] == pytest.approx(recorded(run), rel=0, abs=1e-6)


def test_other_checkpoints_and_splits(run: RunDir) -> None:
    best, last = recorded(run), evaluated(run, "splits=[val]", checkpoint="last")
    assert (last["step"], last["epoch"]) == (92, 4)
    assert last["metrics"].keys() == {"val/loss", "val/accuracy"}
    expected = {k: v for k, v in summary(run)["metrics"].items() if k.startswith("val/")}
    assert last["metrics"] == pytest.approx(expected, rel=0, abs=1e-12)
    assert last["metrics"]["val/loss"] > best["val/loss"] + 0.01
    assert evaluated(run, "splits=[val]", checkpoint="92")["metrics"] == last["metrics"]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_any_number_of_workers_gives_the_same(run: RunDir) -> None:
    here = evaluated(run)["metrics"]
    for workers in (1, 2):
        (run.path / "evaluation-best.json").unlink()
        found = evaluated(run, f"num_workers={workers}")["metrics"]
        assert found == pytest.approx(here, rel=0, abs=1e-12)
    assert not list(run.path.glob(".evaluating-*"))


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_mistakes_found_on_workers_are_the_users_words(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    run = lab.run(*SETTINGS[:4], "training.epochs=1", "data.download=false")
    saved = (run.path / "config.yaml").read_text().replace("- 256", "- 255")
    (run.path / "config.yaml").write_text(saved)
    assert command(f"run={run.path}", "num_workers=2") == 2
    errors = capsys.readouterr().err
    assert errors.startswith("Error: The checkpoint does not fit this model")
    assert "train.py resume" not in errors
    assert not list(run.path.glob(".evaluating-*"))


def test_whole_splits_whatever_training_looked_at(lab: Lab, run: RunDir) -> None:
    limited = lab.run(*SETTINGS, "training.limit_eval_batches=1")
    for name in ("best", "last"):  # the same weights by another name
        shutil.rmtree(limited.checkpoints)
        shutil.copytree(run.checkpoints, limited.checkpoints, symlinks=True)
        assert evaluated(limited, checkpoint=name) == evaluated(run, checkpoint=name)


def test_a_moved_run_from_where_the_command_is_typed(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "else" / "where"
    shutil.copytree(run.path, where, symlinks=True)
    saved = (where / "config.yaml").read_text()
    (where / "config.yaml").write_text(saved.replace(str(run.path.parents[1]), "/dev/null/not-on-this-machine"))
    (where / "evaluation-best.json").unlink(missing_ok=True)
    monkeypatch.chdir(where.parent)
    assert command("run=where") == 0
    found = json.loads((where / "evaluation-best.json").read_text())
    assert found["metrics"] == pytest.approx(recorded(run), rel=0, abs=1e-12)


def test_latest_below_storage_path(run: RunDir) -> None:
    (run.path / "evaluation-last.json").unlink(missing_ok=True)
    assert command("checkpoint=last", f"storage.path={run.path.parents[1]}") == 0
    assert (run.path / "evaluation-last.json").is_file()


def test_training_that_goes_on_takes_no_checkpoint_away(run: RunDir, tmp_path: Path) -> None:
    going_on = RunDir(Path(shutil.copytree(run.path, tmp_path / "run", symlinks=True)))
    with writing(going_on), published(going_on, "best") as checkpoint:
        shutil.rmtree(going_on.checkpoints / "step-00000069")
        assert load_checkpoint(checkpoint)[1]["step"] == 69
    assert not list(going_on.path.glob(".reading-*"))


BAD = {
    "chekpoint=last": ("there is no argument chekpoint", "Did you mean checkpoint?"),
    "learning=3": ("there is no argument learning", "There are: run, checkpoint, splits"),
    "checkpoint": ("checkpoint has no value",),
    "--num-workers=2": ("num_workers=value",),
    "splits=val": ("splits=val has a wrong value", "a list, written [a,b]"),
    "splits=[tset]": ("splits=[tset]", "Did you mean test?"),
    "num_workers=two": ("num_workers=two has a wrong value", "a whole number"),
    "num_workers=-1": ("num_workers=-1 is out of range",),
    "num_workers=4000": ("num_workers=4000: 4000 workers", "can never be placed"),
    "cluster.kind=existing": ("cluster.address=null", "host:port"),
    "cluster.num_cpu=3": ("there is no argument cluster.num_cpu", "Did you mean cluster.num_cpus?"),
    "checkpoint=7": ("checkpoint=7", "best, last, 69, 92"),
    "checkpoint=../checkpoints/best": ("checkpoint=../checkpoints/best", "best, last"),
    "run=nowhere": ("run=nowhere: no such directory",),
    f"run={ROOT}": ("is not a run directory",),
    "run=${nothing}": ("run=${nothing} has a wrong value",),
    "run=[": ("run=[ has a wrong value",),
}


@pytest.mark.parametrize("given", BAD)
def test_mistakes_are_explained(given: str, run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.path.rglob("*"))
    place = [] if given.startswith("run=") else [f"run={run.path}"]
    assert command(*place, given) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("Error: ")
    assert "Traceback" not in errors
    for part in BAD[given]:
        assert part in errors
    assert sorted(run.path.rglob("*")) == before


def test_an_argument_given_twice(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(f"run={run.path}", "run=latest") == 2
    assert "run is given twice" in capsys.readouterr().err


def test_tracebacks_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("run=nowhere", "traceback=true") == 2
    assert "Traceback" in capsys.readouterr().err


def test_help_explains_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("python scripts/evaluate.py [name=value ...]")
    lines = [line for line in shown.splitlines() if line.startswith("  ")]
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines), "an argument without explanation"
    known = ("run=latest", "splits=[]", "use_gpu=null", "cluster.wait_s=600.0", "storage.path=outputs")
    assert all(any(line.split()[0] == argument for line in lines) for argument in known)


@pytest.mark.parametrize("script", ["evaluate", "predict"])
def test_mistakes_are_found_before_anything_heavy_is_imported(script: str, run: RunDir) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['scripts/{script}.py', 'run={run.path}', 'checkpoint=7']\n"
        f"try:\n    runpy.run_path({str(ROOT / 'scripts' / f'{script}.py')!r}, run_name='__main__')\n"
        "except SystemExit as end:\n    print(end.code, {'torch', 'ray', 'pandas', 'pyarrow'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 set()\n"
    assert "checkpoint=7" in done.stderr
