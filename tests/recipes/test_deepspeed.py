"""DeepSpeed's stages on several workers, and what is said when something does not fit."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from manta import evaluate
from manta.checkpoints import file_hash
from manta.config import Storage
from manta.errors import FINISHED, MantaError
from manta.runs import RunDir
from tests.conftest import Lab, history, summary

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(400)]
TWO = ("recipe=deepspeed", "scaling=cpu", "scaling.num_workers=2", "training.checkpoint.every_n_steps=20")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The same script without DeepSpeed."""
    lab = Lab(tmp_path_factory.mktemp("plain"))
    return lab.run("recipe=script", "scaling=in_process", "training.epochs=2")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.usefixtures("ray_cluster")
def test_stages_share_out_and_change_nothing(lab: Lab, plain: RunDir, stage: int) -> None:
    """Each rank has its part of the optimizer; the numbers are those without DeepSpeed; a resume goes on exactly."""
    setting = f"recipe.settings.config.zero_optimization.stage={stage}"
    run = lab.run(*TWO, setting, "training.epochs=2")
    files = {path.name for path in (run.checkpoints / "last").resolve().iterdir()}
    assert {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)} <= files
    values = [[line["val/loss"] for line in history(each) if "val/loss" in line] for each in (run, plain)]
    assert values[0] == pytest.approx(values[1], rel=2e-2)
    first = lab.run(*TWO, setting, "training.epochs=1", "scheduler.total=46")
    assert lab.launch(f"resume={first}", "training.epochs=2") == FINISHED
    whole = lab.run(*TWO, setting, "training.epochs=2", "scheduler.total=46")
    assert history(first)[-1] == history(whole)[-1]
    with pytest.raises(MantaError, match="is of 2 workers, each with its part of the optimizer"):
        lab.launch(f"resume={first}", "training.epochs=3", "scaling.num_workers=1")
    if stage < 3:
        assert evaluate.evaluate(evaluate.Arguments(run=str(run), storage=Storage(str(lab.folder)))) == FINISHED
        found = json.loads((run.path / "evaluation-best.json").read_text())["metrics"]
        assert found["val/loss"] == pytest.approx(summary(run)["best"]["metrics"]["val/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("recipe.settings.config.gradient_clipping=1.0", "recipe.settings.config.gradient_clipping is said by"),
        ("training.precision=fp64", "DeepSpeed has fp32, bf16 and fp16"),
        ("scaling.strategy=fsdp2", "fsdp2"),
        ("recipe.settings.config.zero_optimization.stage=9", "DeepSpeed refuses it: .*Input should be 0, 1, 2, 3"),
    ],
)
def test_what_does_not_fit(lab: Lab, setting: str, message: str) -> None:
    with pytest.raises(MantaError, match=f"(?s){message}"):
        lab.launch("recipe=deepspeed", "scaling=in_process", setting)


def make(marker: Path) -> tuple[object, ...]:
    return os.mkdir, (str(marker),)


def wander(_: Path) -> tuple[object, ...]:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return getattr, (ZeroStageEnum, "__subclasses__")


def member(_: Path) -> tuple[object, ...]:
    """As some versions of Python pickle an Enum."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return getattr, (ZeroStageEnum, "weights")


@pytest.mark.parametrize(
    ("reduced", "message"),
    [
        (make, "holds posix.mkdir, which could run code"),
        (wander, "holds more than DeepSpeed puts there, which could run code"),
        (member, None),
    ],
    ids=["a function", "an attribute", "of an Enum"],
)
def test_code_in_a_checkpoint_is_refused(
    lab: Lab, reduced: Callable[[Path], tuple[object, ...]], message: str | None
) -> None:
    """Also if meta.json says that it belongs there."""
    run = lab.run("recipe=deepspeed", "scaling=in_process", "training.epochs=1", "training.test=false")
    folder, marker = (run.checkpoints / "best").resolve(), lab.folder / "ran"
    file = folder / "mp_rank_00_model_states.pt"

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return reduced(marker)

    torch.save({**torch.load(file, weights_only=False), "more": Bomb()}, file)
    meta = json.loads((folder / "meta.json").read_text())
    meta["files"][file.name] = {"bytes": file.stat().st_size, "sha256": file_hash(folder, file.name)}
    (folder / "meta.json").write_text(json.dumps(meta))
    call = evaluate.Arguments(run=str(run), storage=Storage(str(lab.folder)))
    if message is None:
        assert evaluate.evaluate(call) == FINISHED
    else:
        with pytest.raises(MantaError, match=message):
            evaluate.evaluate(call)
    assert not marker.exists()


def test_others_in_the_process_are_not_one_of_many(lab: Lab) -> None:
    settings = ("scaling=in_process", "training.epochs=1")
    runs = [lab.run(f"recipe={name}", *settings) for name in ("deepspeed", "accelerate", "deepspeed", "lightning")]
    assert not {"LOCAL_RANK", "RANK", "WORLD_SIZE"} & set(os.environ)
    values = [summary(each)["objective"]["value"] for each in runs]
    assert values[0] == values[2] == pytest.approx(values[1], abs=0.02) == pytest.approx(values[3], abs=0.02)


def test_nothing_lies_about(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lab.folder)
    done = lab.command("scaling=in_process", "recipe=deepspeed", "training.epochs=1")
    assert done.returncode == FINISHED, done.stdout + done.stderr
    assert "DeepSpeed" not in done.stdout and "gcc" not in done.stdout + done.stderr
    assert {path.name for path in Path(lab.folder).iterdir()} == {"latest", lab.latest.path.parent.name}
