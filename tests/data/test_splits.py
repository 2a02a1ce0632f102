"""Carving, the digits, made-up data, and what importing costs."""

import subprocess
import sys

import pytest
import torch

import manta.data.bundled
from manta.data import TensorSet
from manta.data.digits import digits
from manta.data.split import carve, carve_fraction
from manta.data.synthetic import synthetic
from manta.errors import MantaError


def test_carve_is_exact_stratified_and_complete():
    targets = torch.tensor([0] * 50 + [1] * 30 + [7] * 21)
    rest, carved = carve(targets, 20, seed=1)
    assert torch.cat([rest, carved]).sort().values.tolist() == list(range(101))
    assert targets[carved].bincount()[[0, 1, 7]].tolist() == [10, 6, 4]  # of 9.9, 5.9, 4.2
    assert carved.tolist() == sorted(carved.tolist())


def test_carve_depends_on_the_seed_alone():
    targets = torch.arange(1000) % 7
    before = torch.get_rng_state()
    first = carve(targets, 100, seed=3)[1]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(carve(targets.tolist(), 100, seed=3)[1], first)
    assert not torch.equal(carve(targets, 100, seed=4)[1], first)


def test_carve_limits():
    assert [len(part) for part in carve(torch.zeros(3), 0, 0)] == [3, 0]
    assert [len(part) for part in carve(torch.zeros(3), 3, 0)] == [0, 3]
    with pytest.raises(ValueError, match="cannot carve 4 of 3"):
        carve(torch.zeros(3), 4, 0)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 1e-9, 0.9999])
def test_a_fraction_that_leaves_nothing_is_refused(fraction):
    with pytest.raises(MantaError, match=f"data.val_fraction={fraction} of 10 "):
        carve_fraction(torch.zeros(10), fraction, 0)


def test_digits_are_scikit_learns():
    sklearn = pytest.importorskip("sklearn.datasets").load_digits()
    splits = digits()
    parts = [splits.train, splits.val, splits.test]
    assert [len(part) for part in parts] == [1437, 180, 180]
    ours = torch.cat([torch.cat([p.inputs.flatten(1), p.targets[:, None].to(torch.uint8)], 1) for p in parts])
    theirs = torch.cat([torch.tensor(sklearn.data), torch.tensor(sklearn.target)[:, None]], 1).to(torch.uint8)
    assert sorted(map(bytes, ours.numpy())) == sorted(map(bytes, theirs.numpy()))
    assert splits.classes == tuple("0123456789")


def test_digits_as_the_model_sees_them():
    train = digits().train
    inputs, targets = train.batch(torch.arange(len(train)))
    assert inputs.shape == (1437, 1, 8, 8) and inputs.dtype == torch.float32 and targets.dtype == torch.int64
    assert abs(inputs.mean().item()) < 0.01 and abs(inputs.std().item() - 1) < 0.01
    assert train.inputs.dtype == torch.uint8


def test_digits_splits_are_stratified_and_only_validation_moves_with_the_seed():
    one, two, same = digits(split_seed=1), digits(split_seed=2), digits(split_seed=1)
    for part in (one.train, one.val, one.test):
        counts = part.targets.bincount().double() / len(part)
        assert (counts - 0.1).abs().max() < 0.01
    assert torch.equal(one.test.inputs, two.test.inputs)
    assert torch.equal(one.val.inputs, same.val.inputs) and not torch.equal(one.val.inputs, two.val.inputs)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr(manta.data.bundled, "find_spec", lambda name: None)
    with pytest.raises(MantaError, match="pip install scikit-learn"):
        digits()


@pytest.mark.parametrize("shape", [[1, 28, 28], [5]])
def test_synthetic_is_the_same_in_memory_and_read_one_by_one(shape):
    whole = synthetic(shape, 3, num_samples=20, seed=4)
    single = synthetic(shape, 3, num_samples=20, seed=4, in_memory=False)
    for name, size in (("train", 20), ("val", 2), ("test", 2)):
        held, drawn = getattr(whole, name), getattr(single, name)
        assert isinstance(held, TensorSet) and len(held) == len(drawn) == size
        assert torch.equal(held.inputs, torch.stack([drawn[i][0] for i in range(size)]))
        assert held.targets.tolist() == [drawn[i][1] for i in range(size)]
    assert whole.train.inputs.shape == (20, *shape) and whole.train.targets[:4].tolist() == [0, 1, 2, 0]


def test_synthetic_depends_on_its_seed_alone():
    torch.manual_seed(1)
    first = synthetic([4], 2, num_samples=50).train.inputs
    torch.manual_seed(2)
    assert torch.equal(synthetic([4], 2, num_samples=50).train.inputs, first)
    assert not torch.isclose(synthetic([4], 2, num_samples=50, seed=1).train.inputs, first).any()


def test_synthetic_splits_share_no_noise():
    clean, noisy = (synthetic([4], 2, num_samples=40, noise=noise) for noise in (0.0, 1.0))
    noises = [getattr(noisy, name).inputs - getattr(clean, name).inputs for name in ("train", "val", "test")]
    assert len(torch.cat(noises).mul(1e4).round().unique(dim=0)) == 40 + 4 + 4


def test_synthetic_is_prototypes_plus_noise_and_generalises():
    clean, noisy = (synthetic([64], 5, num_samples=500, noise=noise) for noise in (0.0, 1.0))
    prototypes = clean.train.inputs[:5]
    assert torch.equal(clean.train.inputs[5:10], prototypes)
    assert (noisy.train.inputs - clean.train.inputs).std().item() == pytest.approx(1.0, abs=0.02)
    guess = torch.cdist(noisy.test.inputs, prototypes).argmin(1)
    assert torch.equal(guess, noisy.test.targets)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "num_samples=0"),
        ({"num_classes": 0}, "num_classes=0"),
        ({"input_shape": [0]}, r"input_shape=\[0\]"),
        ({"val_fraction": 0.0}, "val_fraction"),
        ({"noise": -1.0}, "noise=-1.0"),
    ],
)
def test_synthetic_bad_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        synthetic(**{"input_shape": [4], "num_classes": 2, **arguments})


def test_what_is_not_needed_is_not_imported():
    code = (
        "import sys; from manta.data.load import load_splits; from manta.config import Data;"
        "load_splits(Data(name='digits', dataset={'_target_': 'manta.data.digits.digits'}, input_shape=[1, 8, 8],"
        " num_classes=10), ['manta']); import manta.data.synthetic;"
        "print([name for name in ('torchvision', 'sklearn', 'ray', 'PIL') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
