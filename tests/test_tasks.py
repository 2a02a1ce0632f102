"""What a model is trained for: regression and language modelling, exact for any batch; a task of one's own."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from torch import Tensor

from manta.config import Data
from manta.data.diabetes import diabetes
from manta.data.text import text
from manta.errors import MantaError
from manta.models.gpt import GPT, generate
from manta.predict import Arguments, predict
from manta.training.tasks import Classification, LanguageModeling, Regression, Task
from manta.training.throughput import speeds, training_flops
from tests.conftest import ROOT, Lab, history, summary

SMALL = ("scaling=in_process", "data=text", "model=gpt", "data.dataset.max_bytes=1_000_000", "data.input_shape=[64]")


# --- tasks alone -----------------------------------------------------------------------------------------------------


def in_parts(task: Task, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Its metrics, from totals of uneven parts."""
    sizes = [1, 5, len(outputs) - 6]
    parts = [task.totals(o, t) for o, t in zip(outputs.split(sizes), targets.split(sizes), strict=True)]
    return task.metrics(torch.stack(parts).sum(dim=0).tolist(), len(outputs))


@pytest.mark.parametrize("shape", [(40, 1), (40,)])
def test_regression_is_what_scikit_learn_says(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    targets, outputs = 50 + 20 * torch.randn(shape, dtype=torch.float64), torch.randn(40, 1, dtype=torch.float64)
    task = Regression(mean=50.0, std=20.0)
    found = in_parts(task, outputs, targets)
    truth, said = targets.flatten().numpy(), (outputs * 20 + 50).flatten().numpy()
    assert found["rmse"] == pytest.approx(root_mean_squared_error(truth, said))
    assert found["mae"] == pytest.approx(mean_absolute_error(truth, said))
    assert found["r2"] == pytest.approx(r2_score(truth, said))
    assert found["loss"] == pytest.approx((found["rmse"] / 20) ** 2)
    assert task.loss(outputs, targets).item() == pytest.approx(40 * found["loss"])
    predicted, probabilities = task.predictions(outputs)
    assert probabilities is None and predicted.numpy() == pytest.approx(said, rel=1e-6)


def test_language_modelling_counts_tokens() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(9, 7, 5, dtype=torch.float64), torch.randint(5, (9, 7))
    found = in_parts(LanguageModeling(bytes_per_token=2.0), outputs, targets)
    loss = -outputs.log_softmax(-1).gather(-1, targets[..., None]).mean().item()
    assert found == pytest.approx(
        {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2) / 2}, rel=1e-12
    )


@pytest.mark.parametrize(
    ("task", "targets", "message"),
    [
        (Classification(), torch.tensor([0, 3]), "'data.num_classes=4'"),
        (Regression(), torch.tensor([1, 2]), "takes floating point numbers, data.num_classes=3 a sample"),
        (Regression(), torch.zeros(2), "takes floating point numbers, data.num_classes=3 a sample"),
        (Regression(), torch.tensor([[0.0, 1.0, math.nan]]), "NaN or infinite"),
        (LanguageModeling(), torch.zeros(2, 4), r"takes token ids, data.input_shape=\[5\] a sample"),
        (LanguageModeling(), torch.full((2, 5), 3), "'data.num_classes=4'"),
        (LanguageModeling(), torch.full((2, 5), -1), "token ids are from -1"),
    ],
)
def test_targets_that_cannot_be_meant(task: Task, targets: Tensor, message: str) -> None:
    data = Data(name="mine", input_shape=[5], num_classes=3)
    with pytest.raises(MantaError, match=message):
        task.check_targets("The train split", targets, data)


class Ranking(Task):
    """A task of a researcher: a hinge loss, and how often the right class is among the best three."""

    names = ("loss", "top3")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.multi_margin_loss(outputs, targets, reduction="sum")

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        top = (outputs.topk(3).indices == targets[:, None]).any(dim=1)
        return torch.stack([self.loss(outputs, targets).double(), top.double().sum()])


def test_a_task_of_ones_own_needs_no_change_elsewhere(lab: Lab) -> None:
    run = lab.run(
        "scaling=in_process", "allowed_targets=[manta,torch,tests]", "recipe.task._target_=tests.test_tasks.Ranking",
        "recipe.metrics=[val/loss,val/top3]", "objective.metric=val/top3", "training.epochs=3",
    )  # fmt: skip
    assert summary(run)["best"]["metrics"]["val/top3"] > 0.97
    assert set(summary(run)["test"]) == {"test/loss", "test/top3"}
    assert predict(Arguments(run=str(run), output=str(lab.folder / "p.csv")), ROOT / "conf") == 0
    assert len(next(csv.reader(open(lab.folder / "p.csv")))) == 2 + 10  # id, target, and ten scores


# --- regression ------------------------------------------------------------------------------------------------------


def test_diabetes(lab: Lab) -> None:
    """Better than the mean; predictions are in the targets' own units."""
    run = lab.run("scaling=in_process", "data=diabetes")
    splits = diabetes()
    mean = splits.train.targets.mean()
    alone = (splits.test.targets - mean).square().mean().sqrt().item()
    found = summary(run)["test"]
    assert found["test/rmse"] < 0.85 * alone and found["test/r2"] > 0.3
    assert predict(Arguments(run=str(run)), ROOT / "conf") == 0
    rows = list(csv.DictReader(open(run.path / "predictions.csv")))
    said, truth = (np.array([float(row[key]) for row in rows]) for key in ("prediction", "target"))
    assert truth.tolist() == splits.test.targets.flatten().tolist()
    assert root_mean_squared_error(truth, said) == pytest.approx(found["test/rmse"], rel=1e-5)
    assert splits.train.inputs.mean(dim=0).abs().max() < 1e-4  # standardised by the training split alone
    assert {len(splits.train), len(splits.val), len(splits.test)} == {354, 44}


# --- language --------------------------------------------------------------------------------------------------------


def baselines(root: str, block: int, max_bytes: int) -> tuple[float, float]:
    """Bits a byte of the validation split by a unigram and by a bigram model, counted on the training split."""
    splits = text(root, block, [".py", ".txt", ".md"], max_bytes)
    before, after = (part.flatten().long() for part in (splits.train.inputs, splits.train.targets))
    x, y = (part.flatten().long() for part in (splits.val.inputs, splits.val.targets))
    unigram = torch.bincount(after, minlength=256).double() + 1
    unigram /= unigram.sum()
    pairs = torch.zeros(256, 256, dtype=torch.float64).index_put_(
        (before, after), torch.ones(len(after), dtype=torch.float64), accumulate=True
    )
    bigram = pairs + 2 * unigram  # smoothed by the unigram
    bigram /= bigram.sum(dim=1, keepdim=True)
    return -unigram[y].log2().mean().item(), -bigram[x, y].log2().mean().item()


def test_gpt_is_better_than_counting(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    run = lab.run(
        *SMALL,
        "model.dim=64",
        "model.depth=2",
        "optimizer.lr=1e-2",
        "training.max_steps=600",
        "training.peak_flops=1e12",
    )
    found = summary(run)
    unigram, bigram = baselines("stdlib", 64, 1_000_000)
    assert 4 < unigram < 5 and 3 < bigram < unigram
    assert found["best"]["metrics"]["val/bits_per_byte"] < bigram
    assert found["best"]["metrics"]["val/perplexity"] == pytest.approx(
        2 ** found["best"]["metrics"]["val/bits_per_byte"]
    )
    speed = found["throughput"]
    assert speed["tokens_per_s"] == pytest.approx(64 * speed["samples_per_s"], rel=0.01)
    assert 0 < speed["mfu"] < 1

    capsys.readouterr()
    texts = {}
    for key, more in {"a": {}, "b": {}, "seed": {"seed": 1}, "cold": {"temperature": 0.0}}.items():
        assert predict(Arguments(run=str(run), prompt="import ", length=80, **more), ROOT / "conf") == 0
        texts[key] = capsys.readouterr().out
    assert texts["a"] == texts["b"] != texts["seed"]
    assert all(each.startswith("import ") and len(each) > 60 for each in texts.values())
    assert sum(each in "abcdefghijklmnopqrstuvwxyz _\n" for each in texts["a"]) > 0.6 * len(texts["a"])
    for wrong in ({"length": 0}, {"temperature": -1.0}, {"output": "a.csv"}):
        with pytest.raises(MantaError):
            predict(Arguments(run=str(run), prompt="a", **wrong), ROOT / "conf")


def test_a_prompt_is_for_language_models(lab: Lab) -> None:
    run = lab.run("scaling=in_process", "training.epochs=1")
    with pytest.raises(MantaError, match=r"prompt='a' is for a language model.*trained for Classification"):
        predict(Arguments(run=str(run), prompt="a"), ROOT / "conf")


def test_tokens_that_are_not_bytes(lab: Lab) -> None:
    """They are predicted, but nobody knows how they are written."""
    tiny = (
        "data=text",
        "data.dataset.max_bytes=20_000",
        "data.input_shape=[8]",
        "model=gpt",
        "model.dim=8",
        "model.heads=1",
    )
    run = lab.run("scaling=in_process", *tiny, "data.num_classes=300", "training.max_steps=2", "training.test=false")
    with pytest.raises(MantaError, match="data=text has 300 tokens, so they are not bytes"):
        predict(Arguments(run=str(run), prompt="import"), ROOT / "conf")
    output = lab.folder / "predictions.parquet"
    assert predict(Arguments(run=str(run), output=str(output)), ROOT / "conf") == 0
    assert {"prediction", "p_299"} <= set(pd.read_parquet(output).columns)


def test_gpt_sees_no_further_than_here() -> None:
    torch.manual_seed(0)
    model = GPT([8], 11, dim=8, depth=2, heads=2).eval()
    tokens = torch.randint(11, (3, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    assert torch.allclose(model(tokens)[:, :5], model(changed)[:, :5], atol=1e-6)
    assert not torch.allclose(model(tokens)[:, 5:], model(changed)[:, 5:], atol=1e-3)
    written = generate(model, tokens[0], 12, 8, 0.0, torch.Generator())
    assert written[:8].tolist() == tokens[0].tolist() and len(written) == 20
    assert written[8] == model(tokens[:1])[0, -1].argmax()
    assert written[19] == model(written[None, 11:19])[0, -1].argmax()  # what it can look back on


def test_flops_are_those_of_the_layers() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.ReLU(), torch.nn.Linear(50, 7))
    flops = training_flops(model, torch.empty(2, 30, device="meta"))
    assert flops == 3 * 2 * (30 * 50 + 50 * 7)
    assert speeds(10, flops, 100 * flops)(25.0) == {"tokens_per_s": 250.0, "mfu": 0.25}
    assert speeds(None, None, None)(25.0) == {}


# --- any text --------------------------------------------------------------------------------------------------------


def test_files_of_a_folder_are_in_one_split_each(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_text(f"<{number:02d}>" * 50)
    (tmp_path / "other.bin").write_bytes(b"\xff" * 1000)
    one, two = (text(str(tmp_path), 16, [".txt"], split_seed=seed) for seed in (0, 1))
    seen = {}
    for name in ("train", "val", "test"):
        part = getattr(one, name)
        assert torch.equal(part.inputs[:, 1:], part.targets[:, :-1]) and 255 not in part.inputs
        inputs, _ = part.batch(torch.tensor([0]))
        assert inputs.dtype == torch.int64 and inputs.shape == (1, 16)
        seen[name] = {number for number in range(40) if f"<{number:02d}>".encode() in bytes(part.inputs.flatten())}
    assert seen["train"] | seen["val"] | seen["test"] == set(range(40))
    assert len(seen["train"]) + len(seen["val"]) + len(seen["test"]) == 40
    assert torch.equal(one.test.inputs, two.test.inputs) and not torch.equal(one.val.inputs, two.val.inputs)
    assert len(text(str(tmp_path), 16, [".txt"], max_bytes=2000).train) * 16 < 2000


def test_one_file(lab: Lab) -> None:
    path = lab.folder / "mine.log"
    path.write_bytes(bytes(range(32, 127)) * 400)
    splits = text(str(path), 10, [".txt"])
    whole = b"".join(bytes(getattr(splits, name).inputs.flatten()) for name in ("test", "val", "train"))
    assert abs(len(whole) - 38_000) <= 30
    run = lab.run("scaling=in_process", "data=text", f"data.root={path}", "model=gpt", "model.dim=16", "model.depth=1",
                  "data.input_shape=[10]", "training.max_steps=30", "optimizer.lr=1e-2")  # fmt: skip
    assert history(run)[-1]["val/bits_per_byte"] < 6.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "has no text in it"),
        ({"a.txt": b"short"}, "less than a block"),
        ({"a.bin": b"x" * 999}, "has no text in it"),
    ],
)
def test_no_text(tmp_path: Path, content: dict[str, bytes], message: str) -> None:
    for name, value in content.items():
        (tmp_path / name).write_bytes(value)
    with pytest.raises(MantaError, match=message):
        text(str(tmp_path), 64, [".txt"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=text"], r"MLP gives \[2, 256\] instead of \[2, 128, 256\], which LanguageModeling needs"),
        (["data=text", "model=cnn"], r"input_shape=\[128\] must be \[channels, height, width\]"),
        (["model=gpt"], r"input_shape=\[1, 8, 8\] must be \[context length\]"),
        (["data=text", "model=gpt", "recipe/task=classification"], "which Classification needs"),
        (["data=diabetes", "objective.metric=val/accuracy"], "val/accuracy is not reported"),
        (["data=diabetes", "objective.mode=max"], "would look for the worst val/rmse"),
        (["recipe.task._target_=manta.models.mlp.MLP"], "recipe.task"),
        (["+recipe.task.smoothing=1"], "recipe.task.smoothing is not an argument of Classification"),
        (["data=text", "model=gpt", "model.heads=3"], "dim=128 must be a multiple of heads=3"),
        (["data.input_dtype=int64"], "gives the model torch.float32; with data.input_dtype=int64"),
        (["recipe.settings.depth=3"], "recipe.settings.depth is not an argument of PyTorchRecipe. It takes: nothing"),
    ],
)
def test_what_does_not_fit_is_said(lab: Lab, overrides: list[str], message: str) -> None:
    with pytest.raises(MantaError, match=message):
        lab.launch("scaling=in_process", *overrides)
    assert not list(lab.folder.iterdir())


def test_saved_metrics_are_plain_numbers(lab: Lab) -> None:
    run = lab.run(*SMALL, "model.dim=16", "model.depth=1", "training.max_steps=5")
    assert all(
        isinstance(value, float) for value in json.loads((run.path / "summary.json").read_text())["test"].values()
    )
