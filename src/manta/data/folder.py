"""Your own images in class folders, read by DataLoader workers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder

from manta.data import BatchTransform, Splits
from manta.data.split import carve_fraction
from manta.data.stream import Stream
from manta.data.transforms import Normalize
from manta.errors import MantaError
from manta.limits import image_shape

MODES = {1: "L", 3: "RGB"}
PIECE = 256
"""Images that a task of Ray Data reads at a time."""


@dataclass
class Images(Dataset):
    """Image files as samples (float tensor of `shape`, class number).

    The image is scaled to cover `shape` and its overhang cut off evenly.
    """

    paths: list[str]
    targets: list[int]
    shape: tuple[int, int, int]
    prepare: BatchTransform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = torch.from_numpy(read_pixels(self.paths[index], self.shape))
        return self.prepare(pixels[None])[0], self.targets[index]

    def stream(self) -> Stream:
        """The same, to be read by Ray Data."""
        starts = range(0, len(self), PIECE)
        pieces = [(self.paths[i : i + PIECE], self.targets[i : i + PIECE]) for i in starts]
        return Stream(pieces, _Read(self.shape), len(self), self.prepare)

    def take(self, ids: Tensor) -> "Images":
        chosen = ids.tolist()
        return Images([self.paths[i] for i in chosen], [self.targets[i] for i in chosen], self.shape, self.prepare)


def read_pixels(path: str, shape: tuple[int, int, int]) -> np.ndarray:
    """An image as uint8 (channels, height, width), scaled to cover that and its overhang cut off evenly.

    Raises:
        MantaError: it cannot be read.
    """
    channels, height, width = shape
    try:
        with Image.open(path) as image:
            image.draft(None, (2 * width, 2 * height))  # JPEG decodes coarser: 2000x1500 to 64x64 in 12, not 59 ms
            fitted = ImageOps.fit(image.convert(MODES[channels]), (width, height), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what PIL raises for damage
        raise MantaError(f"Cannot read the image {path}: {error}") from error
    return np.array(fitted).reshape(height, width, channels).transpose(2, 0, 1)


@dataclass(frozen=True)
class _Read:
    """Reads a piece of a stream."""

    shape: tuple[int, int, int]

    def __call__(self, piece: tuple[list[str], list[int]]) -> tuple[np.ndarray, np.ndarray]:
        paths, targets = piece
        return np.stack([read_pixels(path, self.shape) for path in paths]), np.asarray(targets, dtype=np.int64)


def image_folder(
    root: str,
    input_shape: list[int],
    mean: list[float],
    std: list[float],
    split_seed: int = 0,
    val_fraction: float = 0.1,
    engine: Literal["torch", "ray"] = "torch",
) -> Splits:
    """root/{train,val,test}/<class>/<image>; a missing val or test is carved from train by `split_seed`.

    The names of train's class folders, sorted, are the classes. Images become `input_shape`, grey or in colour.
    mean, std: of pixels in 0..1, one value a channel.
    engine: torch = by DataLoader workers; ray = streamed by Ray Data.

    Raises:
        ValueError: `input_shape` is not [1 or 3, height, width], or mean and std are not one value a channel.
        MantaError: a folder is absent, empty or unreadable, or the splits' classes differ.
    """
    shape = image_shape(input_shape)
    if shape[0] not in MODES:
        raise ValueError(f"input_shape={list(input_shape)} must have 1 channel (grey) or 3 (colour)")
    if not len(mean) == len(std) == shape[0]:
        raise ValueError(f"mean={list(mean)} and std={list(std)} must have {shape[0]} values, one a channel")
    prepare, base = Normalize(tuple(mean), tuple(std)), Path(root).expanduser().absolute()
    train, classes = _scan(base / "train", shape, prepare)
    held = {}
    for name in ("test", "val"):
        if (base / name).exists():
            held[name], found = _scan(base / name, shape, prepare)
            _same_classes(base, name, classes, found)
        else:
            rest, carved = carve_fraction(train.targets, val_fraction, split_seed)
            train, held[name] = train.take(rest), train.take(carved)
    if engine == "ray":
        return Splits(train.stream(), held["val"].stream(), held["test"].stream(), classes)
    return Splits(train, held["val"], held["test"], classes)


def _scan(folder: Path, shape: tuple[int, int, int], prepare: Normalize) -> tuple[Images, tuple[str, ...]]:
    """The images of one split and its class names."""
    try:
        found = ImageFolder(folder)
    except OSError as error:
        raise MantaError(
            f"data.root={folder.parent}: {error}\nOne folder a class is expected there, with images in it: "
            f"{folder}/<class>/<image>, likewise val and test if they are not to be carved from train."
        ) from error
    return Images([path for path, _ in found.samples], found.targets, shape, prepare), tuple(found.classes)


def _same_classes(base: Path, name: str, expected: tuple[str, ...], found: tuple[str, ...]) -> None:
    if found != expected:
        only = [
            f"{', '.join(sorted(more - less))} only in {where}"
            for where, more, less in (("train", set(expected), set(found)), (name, set(found), set(expected)))
            if more - less
        ]
        raise MantaError(f"data.root={base}: train and {name} must have the same class folders, but {'; '.join(only)}.")
