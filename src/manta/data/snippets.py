"""Pieces of Python's standard library, to tell from which package they are: text classification without a download."""

import sysconfig
from pathlib import Path

import numpy as np
import torch

from manta.data import Splits, TensorSet
from manta.data.text import tokens
from manta.errors import MantaError


def snippets(packages: list[str], block_size: int, split_seed: int = 0) -> Splits:
    """Blocks of `block_size` bytes with the number of their package; those of a split come from files of their own.

    A tenth of each package's files tests, chosen by a fixed seed; a tenth validates, which `split_seed` chooses.

    Raises:
        MantaError: a package has fewer than three files that are long enough.
    """
    parts: dict[str, list[tuple[torch.Tensor, int]]] = {"train": [], "val": [], "test": []}
    for number, package in enumerate(packages):
        folder = Path(sysconfig.get_path("stdlib")) / package
        files = [path.read_bytes() for path in sorted(folder.rglob("*.py"))]
        files = [content for content in files if len(content) >= block_size]
        if len(files) < 3:
            raise MantaError(
                f"data.dataset.packages: {folder} has {len(files)} files of {block_size} bytes or more; three are needed."
            )
        held = max(len(files) // 10, 1)
        files = [files[index] for index in np.random.default_rng(0).permutation(len(files))]
        rest = [files[held:][index] for index in np.random.default_rng(split_seed).permutation(len(files) - held)]
        for name, chosen in (("test", files[:held]), ("val", rest[:held]), ("train", rest[held:])):
            parts[name] += [(_blocks(content, block_size), number) for content in chosen]
    found = {}
    for name, blocks in parts.items():
        targets = torch.cat([torch.full((len(each),), number) for each, number in blocks])
        found[name] = TensorSet(torch.cat([each for each, _ in blocks]), targets, tokens)
    return Splits(**found, classes=tuple(packages))


def _blocks(content: bytes, size: int) -> torch.Tensor:
    count = len(content) // size
    return torch.frombuffer(bytearray(content[: count * size]), dtype=torch.uint8).view(count, size)
