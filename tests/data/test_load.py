"""load_splits: what fits passes; what does not says which setting to change."""

import dataclasses
import sys
import types

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from manta.config import Data
from manta.data import Splits, TensorSet
from manta.data.load import load_splits
from manta.errors import MantaError


class Listed(Dataset):
    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(2, 3), 0


def tensors(count=4, shape=(2, 3), targets=None, dtype=torch.float32) -> TensorSet:
    return TensorSet(torch.zeros(count, *shape, dtype=dtype), torch.arange(count) if targets is None else targets)


@pytest.fixture
def load(monkeypatch):
    """Run load_splits on what a plug-in function returns."""
    module = types.ModuleType("fork_of_mine")
    monkeypatch.setitem(sys.modules, "fork_of_mine", module)

    def run(returned, **settings):
        def plug_in():
            return returned

        plug_in.__module__, module.data = "fork_of_mine", plug_in
        data = Data(name="mine", dataset={"_target_": "fork_of_mine.data"}, input_shape=[2, 3], num_classes=4)
        return load_splits(dataclasses.replace(data, **settings), ["manta", "fork_of_mine"])

    return run


def test_good_splits_pass_unchanged(load):
    splits = Splits(tensors(), Listed((torch.zeros(2, 3), 3)), tensors(2), classes=tuple("abcd"))
    assert load(splits) is splits
    assert load(Splits(tensors(), tensors())).test is None
    raw = TensorSet(torch.zeros(4, 6, dtype=torch.uint8), torch.arange(4), lambda x: x.float().view(-1, 2, 3))
    assert load(Splits(raw, raw)).train is raw


def test_digits_pass():
    data = Data(name="digits", dataset={"_target_": "manta.data.digits.digits"}, input_shape=[1, 8, 8], num_classes=10)
    assert len(load_splits(data, ["manta"]).train) == 1437
    with pytest.raises(MantaError, match=r"data.num_classes=9.*digits has 10 classes.*'data.num_classes=10'"):
        load_splits(dataclasses.replace(data, num_classes=9), ["manta"])
    with pytest.raises(MantaError, match=r"data.input_shape=\[1, 28, 28\].*\[1, 8, 8\].*'data.input_shape=\[1,8,8\]'"):
        load_splits(dataclasses.replace(data, input_shape=[1, 28, 28]), ["manta"])
    with pytest.raises(MantaError, match="Did you mean 'digits'"):
        load_splits(dataclasses.replace(data, dataset={"_target_": "manta.data.digits.digit"}), ["manta"])


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (tensors(0), "is empty"),
        (Listed(), "is empty"),
        (Endless(), "has no length"),
        (TensorSet(torch.zeros(3, 2, 3), torch.zeros(4).long()), "has 3 inputs and 4 targets"),
        (tensors(shape=(3, 2)), r"data.input_shape=\[2, 3\], but .* shape \[3, 2\].*'data.input_shape=\[3,2\]'"),
        (tensors(dtype=torch.uint8), "gives the model torch.uint8; with data.input_dtype=float it must be a floating point"),
        (tensors(targets=torch.zeros(4)), "targets of type torch.float32"),
        (tensors(targets=torch.zeros(4, 1).long()), r"shape \[4, 1\]"),
        (tensors(targets=torch.tensor([0, 1, -1, 2])), "has the target -1"),
        (tensors(5), "data.num_classes=4, but a target is 4 .*'data.num_classes=5'"),
        (Listed((torch.zeros(2, 3), 7)), "data.num_classes=4, but a target is 7"),
        (Listed((torch.zeros(3, 2), 0)), r"data.input_shape=\[2, 3\]"),
        (Listed((torch.zeros(2, 3), 0.5)), "targets of type torch.float32"),
        (Listed((torch.zeros(2, 3), "cat")), "target is 'cat'"),
        (Listed(torch.zeros(2, 3)), r"must be the pair \(input, target\)"),
        (Listed(("image", 0)), "gives the model str"),
    ],
)  # fmt: skip
def test_each_split_is_checked(load, split, bad, message):
    with pytest.raises(MantaError, match=message) as raised:
        load(Splits(**{"train": tensors(), "val": tensors(), "test": tensors(), split: bad}))
    assert f"The {split} split of data set mine" in str(raised.value)


def test_targets_that_can_be_seen_are_all_checked(load):
    listed = Listed((torch.zeros(2, 3), 0), (torch.zeros(2, 3), 9))
    listed.targets = [0, 9]
    with pytest.raises(MantaError, match="a target is 9"):
        load(Splits(listed, tensors()))


def test_class_names_must_match_num_classes(load):
    with pytest.raises(MantaError, match=r"has 2 classes \(cat, dog\): 'data.num_classes=2'"):
        load(Splits(tensors(), tensors(), classes=("cat", "dog")))


def test_another_return_value(load):
    with pytest.raises(MantaError, match=r"fork_of_mine.data returns a tuple: it must return manta.data.Splits"):
        load((tensors(), tensors()))
