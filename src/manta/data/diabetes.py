"""Diabetes patients that ship with scikit-learn: 442 of them, no download."""

import gzip

import numpy as np
import torch

from manta.data import Splits, TensorSet
from manta.data.bundled import bundled

HELD_OUT = 44  # samples of validation, and as many of test


def _table(name: str, delimiter: str | None) -> torch.Tensor:
    with gzip.open(bundled("diabetes", name), "rt") as lines:
        return torch.from_numpy(np.loadtxt(lines, delimiter=delimiter, dtype=np.float32))


def diabetes(split_seed: int = 0) -> Splits:
    """354/44/44 patients: ten measurements (10,), standardised; a number (1,). The test split does not depend on the seed.

    B. Efron, T. Hastie, I. Johnstone and R. Tibshirani, Least Angle Regression, Annals of Statistics 32, 2004.

    Raises:
        MantaError: scikit-learn is not installed.
    """
    inputs, targets = _table("diabetes_data_raw.csv.gz", None), _table("diabetes_target.csv.gz", None).reshape(-1, 1)
    fixed = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    test, rest = fixed[:HELD_OUT], fixed[HELD_OUT:]
    order = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(split_seed))]
    val, train = order[:HELD_OUT], order[HELD_OUT:]
    inputs = (inputs - inputs[train].mean(dim=0)) / inputs[train].std(dim=0)
    parts = [TensorSet(inputs[ids], targets[ids]) for ids in (train, val, test)]
    return Splits(parts[0], parts[1], parts[2])
