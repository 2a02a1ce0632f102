"""scripts/predict.py: one row an input, from data sets, folders of images and arrays, as CSV and Parquet."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
import torch
from PIL import Image

import manta.predict
from manta import arguments
from manta.data.digits import digits
from manta.data.inputs import array_file
from manta.predict import Arguments, predict
from manta.runs import RunDir
from tests.conftest import ROOT, Lab, make_config, summary

SETTINGS = ("scaling=in_process", "model=mlp", "seed=1")
PROBABILITIES = [f"p_{digit}" for digit in range(10)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Digits, split by another seed than the configuration's own; image files are read by a worker process."""
    lab = Lab(tmp_path_factory.mktemp("predicted"))
    return lab.run(*SETTINGS, "training.epochs=3", "data.split_seed=3", "data.num_workers=1", "training.precision=fp64")


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    """(30, 1, 8, 8) uint8 of the test split."""
    split = digits().test
    return split.inputs[:30].numpy()  # type: ignore[union-attr]


def command(*given: object) -> int:
    """What `python scripts/predict.py <given>` exits with."""
    call = ["scripts/predict.py", *map(str, given)]
    return arguments.main(Arguments, lambda typed: predict(typed, ROOT / "conf"), call, ROOT)


def predicted(run: RunDir, output: Path, *given: object) -> pd.DataFrame:
    """The rows that a prediction writes."""
    assert command(f"run={run.path}", f"output={output}", *given) == 0
    return pd.read_csv(output) if output.suffix == ".csv" else pd.read_parquet(output)


def test_accuracy_of_the_file_is_the_recorded_one(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(f"run={run.path}") == 0
    rows = pd.read_csv(run.path / "predictions.csv")
    assert list(rows) == ["id", "target", "prediction", "probability", *PROBABILITIES]
    assert list(rows["id"]) == list(range(180))
    accuracy = (rows["target"] == rows["prediction"]).mean()
    assert accuracy == summary(run)["test"]["test/accuracy"]
    assert list(rows["target"]) == digits().test.targets.tolist()  # type: ignore[union-attr]
    assert f"accuracy    {accuracy:.4f}" in capsys.readouterr().out


def test_probabilities(run: RunDir, tmp_path: Path) -> None:
    rows = predicted(run, tmp_path / "all.csv")
    np.testing.assert_allclose(rows[PROBABILITIES].sum(axis=1), 1, rtol=0, atol=1e-12)
    assert (rows["probability"] == rows[PROBABILITIES].max(axis=1)).all()
    assert (rows["prediction"] == rows[PROBABILITIES].to_numpy().argmax(axis=1)).all()
    likelihoods = rows[PROBABILITIES].to_numpy()[np.arange(180), rows["target"]]
    assert -np.log(likelihoods).mean() == pytest.approx(summary(run)["test"]["test/loss"], rel=0, abs=1e-12)


@pytest.mark.parametrize("asked", [(), ("data=digits",)])
def test_the_runs_own_splits(run: RunDir, tmp_path: Path, asked: tuple[str, ...]) -> None:
    """Also by name: never the split of another seed, in which the run's training samples would appear."""
    rows = predicted(run, tmp_path / "val.csv", "split=val", *asked)
    assert (rows["target"] == rows["prediction"]).mean() == summary(run)["best"]["metrics"]["val/accuracy"]
    assert len(predicted(run, tmp_path / "train.csv", "split=train", *asked)) == 1437


def test_checkpoints_differ(run: RunDir, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state_file, meta_file = (run.checkpoints / "best" / name for name in ("state.pt", "meta.json"))
    whole, meta = state_file.read_bytes(), meta_file.read_text()
    before = predicted(run, tmp_path / "best.csv", "checkpoint=best")
    state = torch.load(state_file, weights_only=True)
    for name in state["learner"]["model"]:
        state["learner"]["model"][name].zero_()
    try:
        torch.save(state, state_file)
        files = {"state.pt": {"bytes": state_file.stat().st_size, "sha256": None}}
        meta_file.write_text(json.dumps({**json.loads(meta), "files": files}))
        after = predicted(run, tmp_path / "zero.csv", "checkpoint=best")
    finally:
        state_file.write_bytes(whole)
        meta_file.write_text(meta)
    np.testing.assert_allclose(after[PROBABILITIES], 0.1)
    assert abs(before[PROBABILITIES] - 0.1).to_numpy().max() > 0.5


def test_parquet_is_csv(run: RunDir, tmp_path: Path) -> None:
    table, text = predicted(run, tmp_path / "a.parquet"), predicted(run, tmp_path / "a.csv")
    assert list(table["target"][:3]) == [str(number) for number in text["target"][:3]]  # names are text
    pd.testing.assert_frame_equal(table.astype({"target": int, "prediction": int}), text, check_exact=True)


def test_arrays(run: RunDir, tmp_path: Path, pixels: np.ndarray) -> None:
    own = predicted(run, tmp_path / "own.csv")[:30]
    np.save(tmp_path / "x.npy", pixels)
    np.savez(tmp_path / "x.npz", inputs=pixels.astype(np.float32), targets=np.zeros(30))
    for name in ("x.npy", "x.npz"):
        rows = predicted(run, tmp_path / "x.csv", f"data={tmp_path / name}")
        assert list(rows) == ["id", "prediction", "probability", *PROBABILITIES]
        pd.testing.assert_frame_equal(rows, own[list(rows)], check_exact=False, rtol=0, atol=1e-12)


def test_a_folder_of_images_is_the_array_of_its_pixels(run: RunDir, tmp_path: Path, pixels: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", pixels)
    folder = tmp_path / "images"
    (folder / "deep" / "er").mkdir(parents=True)
    names = [f"{'deep/er/' if number % 2 else ''}{number:02d}.png" for number in range(30)]
    for name, image in zip(names, pixels, strict=True):
        Image.fromarray(image[0]).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    from_images = predicted(run, tmp_path / "i.csv", f"data={folder}")
    from_array = predicted(run, tmp_path / "a.csv", f"data={tmp_path / 'x.npy'}")
    assert list(from_images["id"]) == sorted(names)
    order = [names.index(name) for name in from_images["id"]]
    expected = from_array.iloc[order].reset_index(drop=True)
    pd.testing.assert_frame_equal(from_images.drop(columns="id"), expected.drop(columns="id"), rtol=0, atol=1e-12)


def test_images_become_the_shape_that_the_model_takes(run: RunDir, tmp_path: Path, pixels: np.ndarray) -> None:
    """In colour and ten times as large: nearly the same prediction."""
    folder = tmp_path / "images"
    folder.mkdir()
    large = Image.fromarray(pixels[0, 0]).convert("RGB").resize((80, 80), Image.Resampling.NEAREST)
    large.save(folder / "large.png")
    Image.fromarray(pixels[0, 0]).save(folder / "small.png")
    rows = predicted(run, tmp_path / "i.csv", f"data={folder}")
    np.testing.assert_allclose(rows[PROBABILITIES].loc[0], rows[PROBABILITIES].loc[1], rtol=0, atol=0.1)


def test_another_data_set_by_its_name(lab: Lab) -> None:
    """Its own targets; classes without names are numbers, and transforms are those of the run."""
    run = lab.run(*SETTINGS[:2], "data=synthetic", "data.name=mine", "training.epochs=2", "data.batch_size=50")
    own = predicted(run, lab.folder / "own.csv", "split=val")
    other = predicted(run, lab.folder / "other.csv", "split=val", "data=synthetic")
    pd.testing.assert_frame_equal(own, other)
    assert own["target"][:2].tolist() == ["class 0", "class 1"]
    assert list(own)[4:6] == ["p_class 0", "p_class 1"]


def test_another_data_set_is_looked_for_where_the_run_has_its_data(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("data=synthetic", f"data.root={lab.folder}/here", "data.download=false")
    run = lab.run(*SETTINGS[:2], *place, "training.epochs=1")
    assert command(f"run={run.path}", "data=mnist") == 2
    assert f"MNIST cannot be read: {lab.folder}/here" in capsys.readouterr().err


def test_rows_are_written_as_they_are_made(
    run: RunDir, tmp_path: Path, pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manta.predict, "ROWS_A_WRITE", 64)
    predicted(run, tmp_path / "a.parquet")
    assert pyarrow.parquet.ParquetFile(tmp_path / "a.parquet").num_row_groups == 3
    np.save(tmp_path / "x.npy", pixels)
    dataset, _ = array_file(tmp_path / "x.npy", digits(), make_config().data, tmp_path)
    np.save(tmp_path / "y.npy", np.full_like(pixels, 7))
    with open(tmp_path / "x.npy", "r+b") as file:  # in place: whoever holds a copy does not see it
        file.write((tmp_path / "y.npy").read_bytes())
    assert (dataset.inputs == 7).all(), "the inputs are in memory"  # type: ignore[union-attr]


def test_a_broken_image_is_named_and_nothing_is_left_behind(
    run: RunDir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pixels: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manta.predict, "ROWS_A_WRITE", 1)
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(65):  # a batch that is written, and one more
        Image.fromarray(pixels[0, 0]).save(folder / f"a{number}.png")
    (folder / "b.png").write_bytes((folder / "a0.png").read_bytes()[:60])
    output = tmp_path / "kept.csv"
    output.write_text("kept")
    assert command(f"run={run.path}", f"data={folder}", f"output={output}") == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"Error: Cannot read the image {folder / 'b.png'}: ")
    assert "Traceback" not in errors
    assert output.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "kept.csv"]


def bad_files(folder: Path) -> None:
    np.save(folder / "shape.npy", np.zeros((5, 8, 8)))
    np.save(folder / "empty.npy", np.zeros((0, 1, 8, 8)))
    np.save(folder / "bright.npy", np.full((1, 1, 8, 8), 255, dtype=np.uint8))
    np.save(folder / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(folder / "two.npz", a=np.zeros(1), b=np.zeros(1))
    for name in ("text.npy", "text.npz", "inputs.txt"):
        (folder / name).write_text("no array")
    (folder / "none").mkdir()
    (folder / "bright").mkdir()
    Image.fromarray(np.full((8, 8), 255, dtype=np.uint8)).save(folder / "bright" / "white.png")


BAD = {
    "data=nowhere": ("data=nowhere: no such folder or file", "digits"),
    "data=digit": ("no such folder or file", "Did you mean digits?"),
    "data=mnist": ("data=mnist has inputs of shape [1, 28, 28]", "takes [1, 8, 8]"),
    "data=shape.npy": ("shape.npy holds torch.float64 of shape (5, 8, 8)", "takes (N, 1, 8, 8)"),
    "data=empty.npy": ("empty.npy holds", "shape (0, 1, 8, 8)"),
    "data=objects.npy": ("objects.npy cannot be read as an array of numbers",),
    "data=text.npy": ("text.npy cannot be read as an array of numbers",),
    "data=text.npz": ("text.npz cannot be read as an array of numbers",),
    "data=two.npz": ("two.npz has the arrays a, b",),
    "data=inputs.txt": ("inputs.txt: it must be a folder of images, or end in .npy or .npz",),
    "data=none": ("none has no image in it", ".png"),
    "data=bright": ("the value 255", "from 0 to 16"),
    "data=bright.npy": ("the value 255", "from 0 to 16"),
    "output=table.xlsx": ("output=table.xlsx", ".csv or .parquet"),
    "output=no/where.csv": ("no/where.csv cannot be written",),
    "split=tets": ("split=tets", "Did you mean test?"),
    "checkpoint=12": ("checkpoint=12", "best, last"),
    "run=nowhere": ("run=nowhere: no such directory",),
    "ouptut=x.csv": ("there is no argument ouptut", "Did you mean output?"),
}


@pytest.mark.parametrize("given", BAD)
def test_mistakes_are_explained(
    given: str, run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted([*tmp_path.rglob("*"), *run.path.rglob("*")])
    place = [] if given.startswith("run=") else [f"run={run.path}"]
    assert command(*place, given) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("Error: ")
    assert "Traceback" not in errors
    for part in BAD[given]:
        assert part in errors
    assert sorted([*tmp_path.rglob("*"), *run.path.rglob("*")]) == before


def test_help_explains_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("-h") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("python scripts/predict.py [name=value ...]")
    lines = [line for line in shown.splitlines() if line.startswith("  ")]
    assert [line.split("=")[0].strip() for line in lines] == [
        *("run", "checkpoint", "data", "split", "output", "prompt", "length", "temperature", "seed", "use_gpu"),
        *("storage.path", "storage.endpoint_url", "storage.cache", "storage.finish_s", "traceback"),
    ]
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines), "an argument without explanation"


def test_the_command(run: RunDir) -> None:
    """As a user types it, from elsewhere, with a path relative to there."""
    done = Lab(run.path.parents[1]).command("output=here.csv", script="scripts/predict.py")
    assert done.returncode == 0, done.stderr
    assert len(pd.read_csv(run.path.parents[1] / "here.csv")) == 180
