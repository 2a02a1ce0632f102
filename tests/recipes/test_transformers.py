"""recipe=transformers: Hugging Face's Trainer, with Manta's scaling, tracking and resume."""

import json
import os
import re
import signal
from typing import Any

import pandas as pd
import pytest
import torch

import manta.evaluate
from manta import arguments, predict
from manta.errors import FINISHED, INTERRUPTED, MantaError
from manta.runs import RunDir, read_lines
from tests.conftest import ROOT, Lab, history, summary, wait_for
from tests.test_resume import kill_at, never

pytestmark = pytest.mark.recipes

# A model as small as it goes, with dropout; 6 steps an epoch, the last one uneven.
TINY = (
    "recipe=transformers", "data=snippets", "data.input_shape=[32]", "recipe/task=classification",
    "recipe.settings.model={model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16}", "training.limit_eval_batches=2",
    "training.max_steps=14", "training.epochs=null", "training.limit_train_batches=6", "training.log_every_n_steps=2",
    "allowed_targets=[manta,torch,tests]",
)  # fmt: skip
STILL = "recipe.settings.model={model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0}"
TWO = ("scaling=cpu", "scaling.num_workers=2", "scaling.resources_per_worker={CPU: 1}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    lab = Lab(tmp_path_factory.mktemp("whole"))
    return lab.run("scaling=in_process", *TINY, "training.checkpoint.every_n_steps=4", never(lab))


def close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    assert [set(line) for line in found] == [set(line) for line in expected]
    return all(line == pytest.approx(other, rel=1e-4) for line, other in zip(found, expected, strict=True))


def test_language_modelling(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """A small GPT-2 learns bytes, whose frequencies alone are worth 4.85 bits; reached: 3.31, in a minute on a busy CPU.

    And writes some.
    """
    run = lab.run("recipe=transformers", "data=text", "scaling=in_process", "training.epochs=null", "training.max_steps=700",
                  "optimizer.lr=6e-3", "data.input_shape=[64]", "data.batch_size=16")  # fmt: skip
    assert summary(run)["best"]["metrics"]["val/bits_per_byte"] < 3.6
    capsys.readouterr()
    texts = []
    for seed in (0, 0, 1):
        call = predict.Arguments(run=str(run), prompt="import ", length=80, seed=seed)
        assert predict.predict(call, ROOT / "conf") == FINISHED
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("import ") and len(texts[0]) > 60
    assert sum(each.isalnum() or each in " _\n" for each in texts[0]) > 0.6 * len(texts[0])


def test_killed(lab: Lab, run: RunDir) -> None:
    """In mid-epoch: the same history, weights and test, bit for bit."""
    kill = kill_at(11, lab.folder / "fired")
    killed = lab.command("scaling=in_process", *TINY, "training.checkpoint.every_n_steps=4", kill)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    assert lab.launch("resume=latest") == 0
    assert history(lab.latest) == history(run)
    assert summary(lab.latest)["test"] == summary(run)["test"]
    from safetensors.torch import load_file  # not without the extra

    found, expected = (load_file(each.checkpoints / "last" / "model.safetensors") for each in (lab.latest, run))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_evaluate(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """On whole splits, which training here did not look at; from the run directory alone."""
    monkeypatch.setenv("MANTA_ALLOWED_TARGETS", "tests")
    call = ["scripts/evaluate.py", f"run={run.path}"]
    assert arguments.main(manta.evaluate.Arguments, manta.evaluate.evaluate, call, ROOT) == 0
    found = json.loads((run.path / "evaluation-best.json").read_text())["metrics"]
    assert set(found) == {"val/loss", "val/accuracy", "test/loss", "test/accuracy"}
    assert predict.predict(predict.Arguments(run=str(run)), ROOT / "conf") == FINISHED
    rows = pd.read_csv(run.path / "predictions.csv")
    assert (rows["prediction"] == rows["target"]).mean() == pytest.approx(found["test/accuracy"])


def test_interrupted(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    """SIGTERM in mid-epoch: a checkpoint, and the same run after all."""
    slow = "data.transforms.train=[{_target_: tests.faults.Slow, seconds: %s}]"
    whole = Lab(tmp_path_factory.mktemp("quick")).run("scaling=in_process", *TINY, slow % 0)
    process = lab.start("scaling=in_process", *TINY, slow % 0.3)
    wait_for(lambda: (lab.folder / "latest").exists() and len(read_lines(lab.latest.metrics)) > 1, process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == INTERRUPTED, said
    assert 4 <= lab.latest.read("checkpoints/last/meta.json")["step"] < 14
    assert lab.launch("resume=latest") == FINISHED
    assert history(lab.latest) == history(whole)


def test_half_precision(lab: Lab) -> None:
    """Nearly the numbers of single precision; the weights are kept in it."""
    given = [STILL if "model_type" in each else each for each in TINY]
    runs = [lab.run("scaling=in_process", *given, f"training.precision={name}") for name in ("fp32", "bf16")]
    fp32, bf16 = ([line["train/loss"] for line in history(each) if "train/loss" in line] for each in runs)
    assert fp32 != bf16 == pytest.approx(fp32, rel=1e-2)
    from safetensors.torch import load_file  # not without the extra

    kept = load_file(runs[1].checkpoints / "last" / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}


@pytest.mark.parametrize("half", [False, True], ids=["as saved", "saved in half precision"])
def test_from_a_folder(lab: Lab, run: RunDir, half: bool) -> None:
    """The weights of another run, or of anybody: where they begin is where that one was best."""
    folder = run.checkpoints / "best"
    if half:
        import transformers  # not without the extra

        folder = lab.folder / "half"
        found = transformers.AutoModelForSequenceClassification.from_pretrained(run.checkpoints / "best")
        found.to(torch.bfloat16).save_pretrained(folder)
    model = f"recipe.settings.model={folder}"
    still = ("optimizer.lr=1e-12", "scheduler=constant", "training.max_steps=1", "training.test=false")
    more = lab.run("scaling=in_process", *(each for each in TINY if "model_type" not in each), model, *still)
    expected = summary(run)["best"]["metrics"]["val/loss"]
    assert summary(more)["best"]["metrics"]["val/loss"] == pytest.approx(expected, rel=1e-2 if half else 1e-6)
    assert "GPT2ForSequenceClassification, " in more.log.read_text()
    from safetensors.torch import load_file  # not without the extra

    kept = load_file(more.checkpoints / "last" / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}


def test_nothing_foreign_appears(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bars, banners and folders of Hugging Face."""
    monkeypatch.chdir(lab.folder)
    done = lab.command("scaling=in_process", *TINY, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/src"})
    assert (done.returncode, done.stderr) == (FINISHED, "")
    assert not re.search(r"it/s|%\||train_runtime|Loading weights|Warning|WARNING|\{'", done.stdout)
    assert {path.name for path in lab.folder.iterdir()} == {"latest", lab.latest.path.parent.name}
    mine = {path.name for path in lab.latest.path.iterdir()}
    assert mine.isdisjoint({"runs", "trainer_output", "tmp_trainer"}) and not any(
        "checkpoint-" in name for name in mine
    )


@pytest.mark.parametrize("settings", [("data.micro_batch_size=5",), TWO], ids=["accumulated", "two workers"])
def test_same_science(lab: Lab, settings: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    given = [STILL if "model_type" in each else each for each in TINY if "limit_eval" not in each]
    whole = lab.run("scaling=in_process", *given)
    if settings is TWO:
        request.getfixturevalue("ray_cluster")
    found = lab.run(*(settings if settings is TWO else ("scaling=in_process", *settings)), *given)
    assert close(history(found), history(whole))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("data=digits",), ("data=digits", "data=text or data=snippets")),
        (("scheduler=step",), ("scheduler.unit=epoch", "scheduler=cosine")),
        (("training.ema.enabled=true",), ("training.ema.enabled=true", "recipe=pytorch")),
        (("recipe.settings.arguments={learning_rate: 0.1}",), ("arguments.learning_rate=0.1", "optimizer.lr")),
        (("recipe.settings.arguments={neftune: 0.1}",), ("recipe.settings.arguments.neftune", "neftune_noise_alpha")),
        (("recipe.settings.model={model_type: gtp2}",), ("recipe.settings.model", "gtp2")),
        (("recipe.settings.model=nobody/nothing",), ("recipe.settings.model=nobody/nothing", "connect")),
        (("recipe.settings.model=/no/such/folder",), ("recipe.settings.model=/no/such/folder",)),
    ],
)
def test_refused(lab: Lab, given: tuple[str, ...], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    data = () if "data=digits" in given else ("data=text",)
    with pytest.raises(MantaError) as refused:
        lab.launch("recipe=transformers", "scaling=in_process", *data, *given)
    for word in words:
        assert word in str(refused.value)
    assert not list(lab.folder.iterdir()), "nothing was begun"
