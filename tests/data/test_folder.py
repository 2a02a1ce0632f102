"""image_folder: layouts, pixels, loading by workers, and messages. Image files are written with PIL."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from manta.config import Data
from manta.data.folder import image_folder
from manta.data.load import load_splits
from manta.errors import MantaError

PLAIN = {"mean": [0.0] * 3, "std": [1.0] * 3}


def write(root: Path, split: str, counts: dict[str, int], size=(8, 8), suffix="png") -> None:
    """Images of one colour: red says the class, green the number."""
    for position, (name, count) in enumerate(counts.items()):
        folder = root / split / name
        folder.mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", size, (50 * position, number, 255)).save(folder / f"{number}.{suffix}")


def ids(part) -> set[str]:
    return {str(Path(path).relative_to(Path(path).parents[2])) for path in part.paths}


def test_three_folders(tmp_path):
    for split, count in (("train", 3), ("val", 2), ("test", 1)):
        write(tmp_path, split, {"cat": count, "dog": count})
    splits = image_folder(str(tmp_path), [3, 8, 8], **PLAIN)
    assert splits.classes == ("cat", "dog")
    assert [len(p) for p in (splits.train, splits.val, splits.test)] == [6, 4, 2]
    image, target = splits.train[4]
    assert target == 1 and isinstance(target, int) and image.dtype == torch.float32
    torch.testing.assert_close(image, torch.tensor([50.0, 1, 255]).view(3, 1, 1).expand(3, 8, 8) / 255)


def test_missing_splits_are_carved_by_the_seed(tmp_path):
    write(tmp_path, "train", {"cat": 20, "dog": 30})
    one, same, two = (
        image_folder(str(tmp_path), [3, 4, 4], split_seed=s, val_fraction=0.2, **PLAIN) for s in (1, 1, 2)
    )
    parts = [ids(part) for part in (one.train, one.val, one.test)]
    assert [len(part) for part in parts] == [32, 8, 10] and len(set.union(*parts)) == 50
    assert torch.tensor(one.test.targets).bincount().tolist() == [4, 6]
    assert ids(one.val) == ids(same.val) and ids(one.val) != ids(two.val)
    assert all(Path(p).parent.name == ("cat", "dog")[t] for p, t in zip(one.val.paths, one.val.targets, strict=True))


def test_only_val_is_carved_where_test_exists(tmp_path):
    write(tmp_path, "train", {"a": 10, "b": 10})
    write(tmp_path, "test", {"a": 1, "b": 1})
    splits = image_folder(str(tmp_path), [3, 4, 4], **PLAIN)
    assert [len(p) for p in (splits.train, splits.val, splits.test)] == [18, 2, 2]


def test_images_are_scaled_to_cover_and_cut_evenly(tmp_path):
    folder = tmp_path / "train" / "only"
    folder.mkdir(parents=True)
    wide = np.zeros((10, 40, 3), np.uint8)
    wide[:, 15:25] = 200  # the middle square
    for number in range(3):
        Image.fromarray(wide).save(folder / f"{number}.png")
    splits = image_folder(str(tmp_path), [3, 10, 10], val_fraction=0.34, **PLAIN)
    torch.testing.assert_close(splits.train[0][0], torch.full((3, 10, 10), 200 / 255))


def test_grey_and_normalised(tmp_path):
    write(tmp_path, "train", {"a": 4, "b": 4})
    splits = image_folder(str(tmp_path), [1, 2, 2], mean=[0.5], std=[0.25], val_fraction=0.2)
    image, target = splits.train[len(splits.train) - 1]
    grey = (
        Image.new("RGB", (1, 1), (50 * target, int(Path(splits.train.paths[-1]).stem), 255))
        .convert("L")
        .getpixel((0, 0))
    )
    torch.testing.assert_close(image, torch.full((1, 2, 2), (grey / 255 - 0.5) / 0.25))


def test_large_jpegs_and_other_modes(tmp_path):
    write(tmp_path, "train", {"a": 3, "b": 3}, size=(640, 480), suffix="jpg")
    Image.new("RGBA", (20, 20), (10, 20, 30, 255)).save(tmp_path / "train" / "a" / "rgba.png")
    Image.new("P", (20, 20)).save(tmp_path / "train" / "a" / "palette.png")
    splits = image_folder(str(tmp_path), [3, 16, 16], val_fraction=0.2, **PLAIN)
    for part in (splits.train, splits.val, splits.test):
        for index in range(len(part)):
            image, target = part[index]
            assert image.shape == (3, 16, 16)
            if part.paths[index].endswith("jpg"):
                assert image[0].mean().item() == pytest.approx(50 * target / 255, abs=0.02)


def test_read_by_workers(tmp_path):
    write(tmp_path, "train", {"cat": 6, "dog": 6})
    train = image_folder(str(tmp_path), [3, 8, 8], val_fraction=0.1, **PLAIN).train
    batches = list(DataLoader(train, batch_size=4, num_workers=2))
    assert torch.cat([t for _, t in batches]).tolist() == train.targets
    assert torch.equal(torch.cat([x for x, _ in batches]), torch.stack([train[i][0] for i in range(len(train))]))


def test_a_damaged_image_is_named_even_from_a_worker(tmp_path):
    write(tmp_path, "train", {"cat": 5, "dog": 5})
    train = image_folder(str(tmp_path), [3, 8, 8], **PLAIN).train
    path = Path(train.paths[0])
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(MantaError, match=f"Cannot read the image {re.escape(str(path))}"):
        train[0]
    with pytest.raises(MantaError, match=re.escape(str(path))):
        list(DataLoader(train, num_workers=1))


@pytest.mark.parametrize("layout", ["nothing", "no train", "no class folder", "empty class", "a file"])
def test_absent_or_empty_folders(tmp_path, layout):
    root = tmp_path / "images"
    if layout != "nothing":
        root.mkdir()
    if layout == "no class folder":
        (root / "train").mkdir()
    if layout == "empty class":
        write(root, "train", {"cat": 2, "dog": 0})
    if layout == "a file":
        (root / "train").write_text("not a folder")
    with pytest.raises(
        MantaError, match=f"data.root={re.escape(str(root))}: .*\n.*{re.escape(str(root))}/train/<class>"
    ):
        image_folder(str(root), [3, 8, 8], **PLAIN)


def test_an_unreadable_folder(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    write(tmp_path, "train", {"cat": 2})
    monkeypatch.setattr("os.scandir", refuse)  # tests may run as root, whom no mode stops
    with pytest.raises(MantaError, match=r"Permission denied"):
        image_folder(str(tmp_path), [3, 8, 8], **PLAIN)


def test_classes_that_differ_between_splits(tmp_path):
    write(tmp_path, "train", {"cat": 4, "dog": 4})
    write(tmp_path, "val", {"cat": 1, "dgo": 1})
    with pytest.raises(MantaError, match=r"train and val must have the same.*dog only in train; dgo only in val"):
        image_folder(str(tmp_path), [3, 8, 8], **PLAIN)


def test_classes_that_differ_from_the_config(tmp_path):
    write(tmp_path, "train", {"cat": 10, "dog": 10})
    spec = {"_target_": "manta.data.folder.image_folder", "root": str(tmp_path), "input_shape": [3, 8, 8], **PLAIN}
    data = Data(name="image_folder", dataset=spec, input_shape=[3, 8, 8], num_classes=10)
    with pytest.raises(MantaError, match=r"data.num_classes=10.* 2 classes \(cat, dog\): 'data.num_classes=2'"):
        load_splits(data, ["manta"])
    data.num_classes = 2
    assert len(load_splits(data, ["manta"]).train) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": [4, 8, 8]}, r"input_shape=\[4, 8, 8\]"),
        ({"input_shape": [64]}, r"input_shape=\[64\]"),
        ({"input_shape": [1, 8, 8]}, "must have 1 values, one a channel"),
    ],
)
def test_bad_values(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        image_folder(str(tmp_path), **{"input_shape": [3, 8, 8], **PLAIN, **arguments})
