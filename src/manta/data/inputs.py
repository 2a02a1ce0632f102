"""Inputs that are no data set: a folder of images, or an array in a file. Each is prepared as a data set prepares its."""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from manta.config import Data
from manta.data import AnySet, BatchTransform, Splits, TensorSet
from manta.data.folder import MODES, Images
from manta.errors import MantaError

ARRAYS = (".npy", ".npz")


@dataclass(frozen=True)
class Checked:
    """A data set's `prepare`, which refuses values that the data set's own inputs cannot have."""

    prepare: BatchTransform
    name: str

    def __call__(self, inputs: Tensor) -> Tensor:
        peak, most = getattr(self.prepare, "peak", None), inputs.float().max().item()
        if peak is not None and most > peak:
            raise MantaError(
                f"An input has the value {most:g}, but those of data set {self.name} are from 0 to {peak:g}: scale alike."
            )
        return self.prepare(inputs)


def image_files(folder: Path, splits: Splits, data: Data) -> tuple[AnySet, list[str]]:
    """Every image below a folder, and its path relative to it. The targets mean nothing.

    Raises:
        MantaError: there is no image, or the data set's inputs are none.
    """
    if len(data.input_shape) != 3 or data.input_shape[0] not in MODES:
        raise MantaError(
            f"data={folder}: inputs of {data.name} have the shape {data.input_shape}, which is no image's."
        )
    if splits.prepare is None:
        raise MantaError(
            f"data={folder}: data set {data.name} does not say how it prepares images (see manta.data.Splits.prepare). "
            "Give prepared inputs as a .npy file."
        )
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS]
    names = sorted(path.as_posix() for path in found if not path.name.startswith("."))
    if not names:
        raise MantaError(f"data={folder} has no image in it ({', '.join(IMG_EXTENSIONS)}).")
    channels, height, width = data.input_shape
    paths = [str(folder / name) for name in names]
    prepare = Checked(splits.prepare, data.name)
    return Images(paths, [0] * len(names), (channels, height, width), prepare), names


def array_file(path: Path, splits: Splits, data: Data, scratch: Path) -> tuple[AnySet, Sequence[int]]:
    """The rows of an array, read when they are needed, and their positions. The targets mean nothing.

    Args:
        scratch: a folder for what an .npz has to be unpacked to.

    Raises:
        MantaError: it cannot be read, or is not (N, *input_shape) numbers.
    """
    try:
        if path.suffix.lower() == ".npz":
            with zipfile.ZipFile(path) as archive:
                path = Path(archive.extract(_member(path, archive.namelist()), scratch))
        # Copy on write: nothing is written, but torch wants writable memory.
        array: Any = np.load(path, mmap_mode="c", allow_pickle=False)
        inputs = torch.from_numpy(array)
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise MantaError(f"data={path} cannot be read as an array of numbers: {error}") from error
    if list(inputs.shape[1:]) != list(data.input_shape) or len(inputs) == 0 or inputs.is_complex():
        wanted = ", ".join(["N", *map(str, data.input_shape)])
        raise MantaError(
            f"data={path} holds {inputs.dtype} of shape {tuple(inputs.shape)}; the run's model takes ({wanted}) numbers."
        )
    targets = torch.zeros(1, dtype=torch.int64).expand(len(inputs))
    prepare = None if splits.prepare is None else Checked(splits.prepare, data.name)
    return TensorSet(inputs, targets, prepare), range(len(inputs))


def _member(path: Path, names: list[str]) -> str:
    """The array of inputs in an .npz."""
    if "inputs.npy" in names:
        return "inputs.npy"
    if len(names) != 1:
        arrays = ", ".join(name.removesuffix(".npy") for name in names)
        raise MantaError(f"data={path} has the arrays {arrays or '(none)'}: call the one to predict `inputs`.")
    return names[0]
