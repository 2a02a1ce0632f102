"""Handwritten digits that ship with scikit-learn: 1,797 real images, no download."""

import gzip

import numpy as np
import torch

from manta.data import Splits, TensorSet
from manta.data.bundled import bundled
from manta.data.split import carve
from manta.data.transforms import Normalize

HELD_OUT = 180  # samples of validation, and as many of test


def digits(split_seed: int = 0) -> Splits:
    """1437/180/180 images (1, 8, 8) uint8 in 0..16, stratified by class; the test split does not depend on the seed.

    E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI repository, 1998.

    Raises:
        MantaError: scikit-learn is not installed.
    """
    with gzip.open(bundled("digits", "digits.csv.gz"), "rt") as lines:
        table = torch.from_numpy(np.loadtxt(lines, delimiter=",", dtype=np.uint8))
    inputs, targets = table[:, :64].reshape(-1, 1, 8, 8), table[:, 64].long()
    rest, test = carve(targets, HELD_OUT, seed=0)
    train, val = carve(targets[rest], HELD_OUT, split_seed)
    prepare = Normalize(mean=(0.306,), std=(0.376,), peak=16.0)
    parts = [TensorSet(inputs[ids], targets[ids], prepare) for ids in (rest[train], rest[val], test)]
    return Splits(parts[0], parts[1], parts[2], classes=tuple("0123456789"))
