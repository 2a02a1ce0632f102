"""Data that Ray Data reads while it is used: every row once, in an order of (seed, epoch) alone, whatever reads or asks."""

import os
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from manta import evaluate
from manta.config import Storage
from manta.data.stream import Stream
from manta.data.table import table
from manta.errors import FINISHED, MantaError
from manta.predict import Arguments, predict
from manta.runs import read_lines
from manta.training.feeder import Feeder
from tests.conftest import ROOT, Lab, history, summary, wait_for

pytestmark = pytest.mark.timeout(400)
ONE = ("scaling=cpu", "scaling.num_workers=1", "data.engine=ray")
BUFFER = "data.dataset.buffer=100"


def frame() -> pd.DataFrame:
    inputs, targets = load_digits(return_X_y=True)
    found = pd.DataFrame(inputs.astype("float32"), columns=[f"p{i:02d}" for i in range(64)])
    found["target"] = [f"digit {value}" for value in targets]
    return found.iloc[np.random.default_rng(0).permutation(len(found))[:360]].reset_index(drop=True)


def write(folder: Path, kind: str) -> Path:
    """Digits as files of one kind: three of 80 rows to train on, one of 60 each for val and test."""
    folder.mkdir()
    (folder / "train").mkdir()
    rows = frame()
    for name, part in {
        "train/a": rows[:80],
        "train/b": rows[80:160],
        "train/c": rows[160:240],
        "val": rows[240:300],
        "test": rows[300:],
    }.items():
        if kind == "parquet":
            part.to_parquet(folder / f"{name}.parquet", row_group_size=30)
        elif kind == "csv":
            part.to_csv(folder / f"{name}.csv", index=False)
        else:
            part.to_json(folder / f"{name}.jsonl", orient="records", lines=True)
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tables") / "parquet", "parquet")


def of(root: Path, *more: str) -> tuple[str, ...]:
    return (
        "data=table",
        f"data.root={root}",
        "data.input_shape=[64]",
        "data.num_classes=10",
        "data.batch_size=32",
        *more,
    )


# --- the order of rows -----------------------------------------------------------------------------------------------


def numbers(buffer: int) -> Stream:
    """97 rows in pieces of 10, each row its own number."""
    pieces = [list(range(start, min(start + 10, 97))) for start in range(0, 97, 10)]
    return Stream(pieces, _as_rows, 97, buffer=buffer)


def _as_rows(piece: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(piece)[:, None].astype(np.float32), np.asarray(piece)


@pytest.mark.parametrize("buffer", [25, 1000])
@pytest.mark.usefixtures("ray_cluster")
def test_every_row_once_in_an_order_of_seed_and_epoch(buffer: int) -> None:
    def epoch(feeder: Feeder, turn: int, epoch: int, batch: int, ranks: int) -> list[int]:
        found = [-1] * 97
        for start in range(0, 97, batch):
            rows = np.arange(start, min(start + batch, 97))
            for rank in range(ranks):
                mine = rows[rank::ranks]
                inputs, targets = feeder.take(turn, epoch, rank, mine)
                assert inputs[:, 0].tolist() == targets.tolist()
                for row, target in zip(mine, targets, strict=True):
                    found[row] = int(target)
        return found

    one = Feeder(numbers(buffer), 7, True, 1)
    first, second = epoch(one, 1, 0, 16, 1), epoch(one, 2, 1, 16, 1)
    assert sorted(first) == sorted(second) == list(range(97))
    assert first != second and first != list(range(97))
    three = Feeder(numbers(buffer), 7, True, 3)
    assert epoch(three, 1, 0, 20, 3) == first  # other batches, other ranks
    assert (
        sum(len(inputs) for inputs, _ in three.parts) <= 97 - 20 or buffer == 1000
    )  # rows that all are past are forgotten
    assert epoch(Feeder(numbers(buffer), 8, True, 1), 1, 0, 16, 1) != first
    plain = Feeder(numbers(buffer), 7, False, 1)
    assert epoch(plain, 1, 0, 16, 1) == list(range(97))
    late = Feeder(numbers(buffer), 7, True, 1)
    assert late.take(1, 0, 0, np.arange(60, 70))[1].tolist() == first[60:70]  # where a resume begins


@pytest.mark.usefixtures("ray_cluster")
def test_data_that_changed_is_said() -> None:
    stream = numbers(1000)
    stream.size = 120
    with pytest.raises(RuntimeError, match="has 97 rows, not the 120"):
        Feeder(stream, 0, False, 1).take(1, 0, 0, np.arange(100, 110))


# --- tables ----------------------------------------------------------------------------------------------------------


def test_kinds_of_files_hold_the_same(tmp_path: Path) -> None:
    sets = [table(str(write(tmp_path / kind, kind)), "target", "classification") for kind in ("parquet", "csv", "json")]
    assert sets[0].classes == tuple(f"digit {value}" for value in range(10))
    for other in sets[1:]:
        for name in ("train", "val", "test"):
            one, two = getattr(sets[0], name), getattr(other, name)
            assert torch.equal(one.inputs, two.inputs) and torch.equal(one.targets, two.targets)
    inputs, _ = sets[0].train.batch(torch.arange(240))
    varying = sets[0].train.inputs.std(dim=0) > 0
    assert inputs.mean(dim=0).abs().max() < 1e-4 and (inputs.std(dim=0, correction=0)[varying] - 1).abs().max() < 1e-3
    streams = table(str(tmp_path / "parquet"), "target", "classification", engine="ray")
    assert isinstance(streams.train, Stream) and len(streams.train) == 240 and len(streams.train.pieces) == 9
    assert torch.equal(streams.train.whole().inputs, sets[0].train.inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"root": "nowhere"}, "has no train split"),
        ({"target": "label"}, "there is no column label; there are p00"),
        ({"features": ["p01", "p99"]}, "there is no column p99"),
        ({"features": ["p01", "target"], "target": "p00"}, "an input column is no number"),
    ],
)
def test_tables_that_do_not_fit(digits: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(MantaError, match=message):
        table(**{"root": str(digits), "target": "target", "task": "classification", **change})  # type: ignore[arg-type]


def test_a_class_that_training_has_not_seen(tmp_path: Path) -> None:
    root = write(tmp_path / "t", "csv")
    text = (root / "val.csv").read_text().replace("digit 3", "digit x")
    (root / "val.csv").write_text(text)
    with pytest.raises(MantaError, match="target is digit x, not one of the training set's digit 0, digit 1"):
        table(str(root), "target", "classification")


def test_a_table_of_numbers(lab: Lab) -> None:
    random = np.random.default_rng(0)
    inputs = random.normal(size=(500, 3))
    rows = pd.DataFrame(inputs, columns=list("abc")).assign(target=3 * inputs[:, 0] - inputs[:, 2] + 10)
    for name, part in {"train": rows[:400], "val": rows[400:]}.items():
        part.to_csv(lab.folder / f"{name}.csv", index=False)
    run = lab.run(
        "scaling=in_process", "data=table", f"data.root={lab.folder}", "data.input_shape=[3]", "data.num_classes=1",
        "recipe/task=regression", "data.dataset.task=regression", "data.target_mean=10", "data.target_std=3", "optimizer.lr=1e-2",
    )  # fmt: skip
    assert summary(run)["best"]["metrics"]["val/r2"] > 0.98 and summary(run)["test"] == {}


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.drill
@pytest.mark.usefixtures("ray_cluster")
def test_workers_change_nothing(lab: Lab, digits: Path) -> None:
    """One worker and two: the same batches, so the same losses; both are streamed, and what was recorded is measured again."""
    settings = of(digits, BUFFER, "training.epochs=2", "training.precision=fp64", "training.log_every_n_steps=1")
    one = lab.run(*ONE, *settings)
    two = lab.run("scaling=cpu", "scaling.num_workers=2", "data.engine=ray", *settings)
    for mine, theirs in zip(history(one), history(two), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    assert summary(one)["best"]["metrics"]["val/accuracy"] > 0.3
    assert (
        evaluate.evaluate(
            evaluate.Arguments(run=str(two), num_workers=1, use_gpu=False, storage=Storage(str(lab.folder)))
        )
        == FINISHED
    )
    found = {**two.read("evaluation-best.json")["metrics"]}
    recorded = {**summary(two)["best"]["metrics"], **summary(two)["test"]}
    assert found == pytest.approx({key: recorded[key] for key in found}, rel=1e-9)
    assert set(found) == {"val/loss", "val/accuracy", "test/loss", "test/accuracy"}
    assert predict(Arguments(run=str(two)), ROOT / "conf") == FINISHED  # without Ray
    rows = pd.read_csv(two.path / "predictions.csv")
    assert (rows["prediction"] == rows["target"]).mean() == pytest.approx(found["test/accuracy"])


@pytest.mark.drill
def test_killed_in_the_middle_of_an_epoch_and_resumed(
    lab: Lab, digits: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = (
        *ONE, *of(digits, BUFFER), "training.epochs=3", "training.log_every_n_steps=1", "training.checkpoint.every_n_steps=3",
        "cluster.num_cpus=2",
    )  # fmt: skip
    whole = Lab(tmp_path_factory.mktemp("whole"))
    done = whole.command(*settings)
    assert done.returncode == FINISHED, done.stdout + done.stderr
    process = lab.start(*settings)
    wait_for(lambda: (lab.folder / "latest").exists() and len(read_lines(lab.latest.metrics)) >= 12, process, 200)
    os.kill(process.pid, signal.SIGKILL)  # in the second of three epochs, of eight steps each
    process.wait()
    assert lab.latest.read("status.json")["state"] == "running"
    again = lab.command("resume=latest")
    assert again.returncode == FINISHED, again.stdout + again.stderr
    assert history(lab.latest) == history(whole.latest)
    assert summary(lab.latest)["test"] == summary(whole.latest)["test"]


@pytest.mark.usefixtures("ray_cluster")
def test_images(lab: Lab) -> None:
    """A folder of images, streamed: what a pass over them says is what DataLoader workers read."""
    images, targets = load_digits(return_X_y=True)
    for index in range(200):
        place = (
            lab.folder
            / "images"
            / ("train" if index < 140 else "val" if index < 170 else "test")
            / str(targets[index] % 2)
        )
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((images[index].reshape(8, 8) * 15).astype(np.uint8)).save(place / f"{index}.png")
    settings = (
        "data=image_folder", f"data.root={lab.folder / 'images'}", "data.input_shape=[1,8,8]", "data.num_classes=2", "data.num_workers=0",
        "data.dataset.mean=[0.3]", "data.dataset.std=[0.3]", "training.epochs=2", "training.limit_train_batches=1",
        "optimizer.lr=1e-12", "scheduler=constant",
    )  # fmt: skip
    read, streamed = lab.run("scaling=in_process", *settings), lab.run(*ONE, *settings)
    for name in ("val/loss", "val/accuracy"):
        values = [[line[name] for line in history(run) if name in line] for run in (read, streamed)]
        assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("scaling=in_process", "data.engine=ray"), "scaling.num_workers=0 runs without it. Set scaling.num_workers=1"),
        ((*ONE, "data=digits"), "data set digits is not one that can be streamed"),
        ((*ONE, "recipe=script"), "data.engine=ray: a script decides that itself"),
    ],
)
def test_what_cannot_be_streamed(lab: Lab, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(MantaError, match=message):
        lab.launch(*settings)
