"""Carving one split out of another: stratified, and decided by a seed alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from manta.errors import MantaError


def carve(targets: Tensor | Sequence[int], size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Split positions into (rest, carved), `size` of them carved with every class in its share.

    targets: (N,) integers. Both results are sorted int64 positions. Shares are rounded by largest remainder,
    so the carved part has exactly `size` samples. The global random generators are not touched.

    Raises:
        ValueError: `size` is not in [0, N].
    """
    targets = torch.as_tensor(targets)
    total = len(targets)
    if not 0 <= size <= total:
        raise ValueError(f"cannot carve {size} of {total} samples")
    generator = torch.Generator().manual_seed(seed)
    _, member_of, counts = targets.unique(return_inverse=True, return_counts=True)
    exact = counts.double() * (size / max(total, 1))
    shares = exact.floor().long()
    remainders = (exact - shares).argsort(descending=True, stable=True)
    shares[remainders[: size - int(shares.sum())]] += 1
    chosen = torch.zeros(total, dtype=torch.bool)
    for label, share in enumerate(shares.tolist()):
        members = (member_of == label).nonzero()[:, 0]
        chosen[members[torch.randperm(len(members), generator=generator)[:share]]] = True
    return (~chosen).nonzero()[:, 0], chosen.nonzero()[:, 0]


def carve_fraction(targets: Tensor | Sequence[int], fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """`carve` by `data.val_fraction`.

    Raises:
        MantaError: the fraction is not between 0 and 1, or leaves one side without samples.
    """
    size = round(fraction * len(targets)) if 0 < fraction < 1 else 0
    if not 0 < size < len(targets):
        raise MantaError(
            f"data.val_fraction={fraction} of {len(targets)} training samples leaves none on one side: "
            "it must lie between 0 and 1, e.g. 'data.val_fraction=0.1'."
        )
    return carve(targets, size, seed)
