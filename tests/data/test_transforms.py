"""Normalisation, the per-sample crop and flip, and building transforms from config."""

import pickle

import pytest
import torch
from torch.nn import functional as F

from manta.data.transforms import Normalize, RandomCropFlip, build_transforms
from manta.errors import MantaError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


@pytest.mark.parametrize("device", DEVICES)
def test_normalize(device):
    pixels = torch.tensor([[[[0, 255]], [[51, 102]]]], dtype=torch.uint8, device=device)  # (1, 2, 1, 2)
    got = Normalize(mean=(0.5, 0.2), std=(0.25, 0.1))(pixels)
    expected = torch.tensor([[[[-2.0, 2.0]], [[0.0, 2.0]]]], device=device)
    torch.testing.assert_close(got, expected)
    assert got.dtype == torch.float32 and got.device.type == device
    torch.testing.assert_close(Normalize((0.5,), (0.25,))(pixels)[0, 1], (pixels[0, 1] / 255 - 0.5) / 0.25)


def test_normalize_first_used_in_inference_mode_is_fit_for_training():
    norm = pickle.loads(pickle.dumps(Normalize((0.123,), (0.456,))))
    with torch.inference_mode():
        norm(torch.zeros(1, 1, 2, 2))
    learned = torch.ones(1, 1, 2, 2, requires_grad=True)
    norm(learned).sum().backward()
    assert learned.grad.flatten().tolist() == pytest.approx([1 / (255 * 0.456)] * 4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_every_output_is_a_crop_or_mirrored_crop_of_its_own_input(device, dtype):
    torch.manual_seed(0)
    images = torch.randint(1, 250, (64, 2, 5, 6), device=device).to(dtype)
    out = RandomCropFlip(padding=2)(images)
    assert out.shape == images.shape and out.dtype == dtype and out.device == images.device
    moves = set()
    padded = F.pad(images, (2, 2, 2, 2))
    for index in range(64):
        crops = {
            (top, left, flip): window.flip(-1) if flip else window
            for top in range(5)
            for left in range(5)
            for flip in (False, True)
            for window in [padded[index, :, top : top + 5, left : left + 6]]
        }
        found = [move for move, crop in crops.items() if torch.equal(crop, out[index])]
        assert len(found) == 1
        moves.add(found[0])
    assert len(moves) > 30  # of 50: samples draw for themselves
    assert {top for top, _, _ in moves} == {left for _, left, _ in moves} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("device", DEVICES)
def test_draws_come_from_the_global_generator_alone(device):
    images = torch.rand(32, 3, 8, 8, device=device)
    transform = RandomCropFlip()
    torch.manual_seed(5)
    first, second = transform(images), transform(images)
    torch.manual_seed(5)
    assert torch.equal(RandomCropFlip()(images), first)
    assert torch.equal(transform(images), second) and not torch.equal(first, second)


def test_flip_probability_and_padding_are_obeyed():
    images = torch.rand(16, 1, 4, 4)
    assert torch.equal(RandomCropFlip(padding=0, flip=0.0)(images), images)
    assert torch.equal(RandomCropFlip(padding=0, flip=1.0)(images), images.flip(-1))
    torch.manual_seed(0)
    many = torch.arange(2.0).expand(4000, 1, 1, 2)
    assert RandomCropFlip(padding=0, flip=0.25)(many)[:, 0, 0, 0].mean().item() == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(("arguments", "message"), [({"padding": -1}, "padding=-1"), ({"flip": 1.5}, "flip=1.5")])
def test_bad_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        RandomCropFlip(**arguments)


def test_build_transforms_applies_them_in_order():
    key, allowed = "data.transforms.train", ["manta", "torch", "torchvision"]
    assert build_transforms(key, [], allowed) is None
    flip = {"_target_": "manta.data.transforms.RandomCropFlip", "padding": 0, "flip": 1.0}
    norm = {"_target_": "torchvision.transforms.v2.Normalize", "mean": [0.5], "std": [0.5]}
    images = torch.rand(3, 1, 4, 4)
    chain = build_transforms(key, [flip, norm], allowed)
    torch.testing.assert_close(chain(images), images.flip(-1) * 2 - 1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"_target_": "manta.data.transforms.RandomCropFlop"}, r"train\[1\]._target_=.*Did you mean 'RandomCropFlip'"),
        ({"_target_": "manta.data.transforms.RandomCropFlip", "pad": 1}, r"train\[1\]\.pad.*train\[1\]\.padding"),
        ({"_target_": "manta.data.transforms.RandomCropFlip", "flip": 2}, r"train\[1\]: .*flip=2"),
        ({"_target_": "manta.data.digits.digits"}, r"train\[1\]\._target_=manta.data.digits.digits gives a Splits"),
    ],
)
def test_messages_name_the_entry(spec, message):
    good = {"_target_": "manta.data.transforms.RandomCropFlip"}
    with pytest.raises(MantaError, match=message):
        build_transforms("data.transforms.train", [good, spec], ["manta"])
