"""Made-up data of any size: for tests, benchmarks and rehearsals."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from manta.data import AnySet, Splits, TensorSet
from manta.limits import flat_size, positive


class SyntheticSet(Dataset):
    """Samples drawn when they are read: sample i of a seed is always the same, whoever reads it."""

    def __init__(self, prototypes: Tensor, first: int, size: int, noise: float, seed: int) -> None:
        self.prototypes, self.first, self.noise, self.seed = prototypes, first, noise, seed
        self.targets = torch.arange(first, first + size) % len(prototypes)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        target = int(self.targets[index])
        shape = self.prototypes.shape[1:]
        noise = torch.randn(shape, generator=_generator(self.seed, self.first + index))
        return noise.mul_(self.noise).add_(self.prototypes[target]), target


def _generator(seed: int, stream: int) -> torch.Generator:
    # torch's CPU generator uses the low 32 bits of its seed only; the multiplier keeps the streams of seeds apart.
    return torch.Generator().manual_seed((seed * 2_654_435_761 + stream) % 2**32)


def synthetic(
    input_shape: list[int],
    num_classes: int,
    num_samples: int = 1000,
    val_fraction: float = 0.1,
    noise: float = 1.0,
    seed: int = 0,
    in_memory: bool = True,
) -> Splits:
    """Class prototypes of unit variance plus noise: float32 samples of any shape, learnable, the same for a seed.

    `num_samples` to train on, and round(val_fraction * num_samples) each to validate and to test, classes in
    turn. With in_memory=false the same samples are drawn as DataLoader workers read them.

    Raises:
        ValueError: a size below 1, a negative noise or seed.
    """
    flat_size(input_shape)
    held = round(val_fraction * num_samples)
    positive(num_classes=num_classes, num_samples=num_samples, **{"round(val_fraction * num_samples)": held})
    if noise < 0 or seed < 0:
        raise ValueError(f"noise={noise} and seed={seed} must be at least 0")
    prototypes = torch.randn(num_classes, *input_shape, generator=_generator(seed, -1))
    parts: list[AnySet] = []
    for first, size in ((0, num_samples), (num_samples, held), (num_samples + held, held)):
        part = SyntheticSet(prototypes, first, size, noise, seed)
        parts.append(_in_memory(part) if in_memory else part)
    return Splits(parts[0], parts[1], parts[2], tuple(f"class {label}" for label in range(num_classes)))


def _in_memory(part: SyntheticSet) -> TensorSet:
    """Every sample drawn now: 20 microseconds each for 28x28."""
    inputs = torch.empty(len(part), *part.prototypes.shape[1:])
    for index in range(len(part)):
        inputs[index] = part[index][0]
    return TensorSet(inputs, part.targets)
