"""The random generators of a rank: seeding, and taking them along in a checkpoint."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from manta.training.sampler import mix


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's (all devices') global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_rank(seed: int, rank: int) -> None:
    """Give each rank streams of its own (dropout, augmentation) once the weights, equal on all, are made."""
    seed_everything(mix(seed, rank))


def rng_state(device: torch.device) -> dict[str, Any]:
    """All generators of this rank as plain values and tensors (loads with weights_only=True)."""
    state: Any = np.random.get_state()  # a tuple, for the default generator
    name, keys, position, has_gauss, cached = state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "python": random.getstate(),
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `rng_state` gave."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    random.setstate(state["python"])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the generators of the CPU are seeded; afterwards they are as before."""
    kept = rng_state(torch.device("cpu"))
    seed_everything(seed)
    try:
        yield
    finally:
        set_rng_state(kept, torch.device("cpu"))
