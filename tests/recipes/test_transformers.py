"""recipe=transformers: Hugging Face's Trainer, with Manta's scaling, tracking and resume."""

import json
import signal
from typing import Any

import pytest
import torch

import manta.evaluate
from manta import arguments
from manta.errors import MantaError
from manta.runs import RunDir
from tests.conftest import ROOT, Lab, history, summary
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


def test_language_modelling(lab: Lab) -> None:
    """A small GPT-2 learns bytes, whose frequencies alone are worth 4.85 bits; reached: 3.31, in a minute on a busy CPU."""
    run = lab.run("recipe=transformers", "data=text", "scaling=in_process", "training.epochs=null", "training.max_steps=700",
                  "optimizer.lr=6e-3", "data.input_shape=[64]", "data.batch_size=16")  # fmt: skip
    assert summary(run)["best"]["metrics"]["val/bits_per_byte"] < 3.6
    assert {each.name for each in run.path.iterdir()}.isdisjoint({"runs", "trainer_output"})


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
    ],
)
def test_refused(lab: Lab, given: tuple[str, ...], words: tuple[str, ...]) -> None:
    data = () if "data=digits" in given else ("data=text",)
    with pytest.raises(MantaError) as refused:
        lab.launch("recipe=transformers", "scaling=in_process", *data, *given)
    for word in words:
        assert word in str(refused.value)
