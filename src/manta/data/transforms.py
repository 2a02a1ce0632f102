"""What happens to a whole batch between storage and the model, on the batch's device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manta.data import BatchTransform
from manta.errors import MantaError
from manta.targets import build


@dataclass(frozen=True)
class Normalize:
    """(N, C, ...) raw values to float32: (x / peak - mean) / std, per channel; one mean serves every channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    peak: float = 255.0

    def __call__(self, inputs: Tensor) -> Tensor:
        scale, shift = _affine(self, inputs.device)
        shape = (-1,) + (1,) * (inputs.dim() - 2)
        return torch.addcmul(shift.view(shape), inputs.float(), scale.view(shape))


@lru_cache(maxsize=32)
def _affine(norm: Normalize, device: torch.device) -> tuple[Tensor, Tensor]:
    """Per-channel (scale, shift) on `device`, made once so that a GPU batch does not wait for a copy."""
    with torch.inference_mode(False):
        mean, std = torch.tensor(norm.mean, dtype=torch.float64), torch.tensor(norm.std, dtype=torch.float64)
        return (1 / (norm.peak * std)).float().to(device), (-mean / std).float().to(device)


class RandomCropFlip:
    """Zero-pad, crop back to the same size at a random place and mirror at random: each sample draws its own.

    The augmentation of He et al. 2015 (arXiv:1512.03385, section 4.2) for 32x32 images. torchvision's v2
    transforms draw once a call, so on a batch every sample would be moved alike. Draws come from torch's global
    generator of the batch's device, which a checkpoint restores.

    padding: pixels on every side; flip: probability of mirroring left to right.
    """

    def __init__(self, padding: int = 4, flip: float = 0.5) -> None:
        if padding < 0:
            raise ValueError(f"padding={padding} must be at least 0")
        if not 0 <= flip <= 1:
            raise ValueError(f"flip={flip} must be a probability")
        self.padding, self.flip = padding, flip

    def __call__(self, inputs: Tensor) -> Tensor:
        """(N, C, H, W) of any dtype to the same shape and dtype."""
        count, _, height, width = inputs.shape
        device, pad = inputs.device, self.padding
        top, left = torch.randint(2 * pad + 1, (2, count), device=device)
        windows = F.pad(inputs, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
        cropped = windows[torch.arange(count, device=device), :, top, left]
        mirrored = torch.rand(count, device=device) < self.flip
        return torch.where(mirrored[:, None, None, None], cropped.flip(-1), cropped)


@dataclass(frozen=True)
class Chain:
    """Several transforms, applied in order."""

    steps: tuple[BatchTransform, ...]

    def __call__(self, inputs: Tensor) -> Tensor:
        for step in self.steps:
            inputs = step(inputs)
        return inputs


def build_transforms(key: str, specs: Sequence[Mapping[str, Any]], allowed: Sequence[str]) -> BatchTransform | None:
    """`data.transforms.train` or `.eval` as one function of a batch; None if the list is empty.

    Raises:
        MantaError: as `manta.targets.build`, naming the entry as key[i]; or what was built cannot be called.
    """
    steps = []
    for position, spec in enumerate(specs):
        step = build(f"{key}[{position}]", spec, allowed)
        if not callable(step):
            raise MantaError(
                f"{key}[{position}]._target_={spec['_target_']} gives a {type(step).__name__}, no function."
            )
        steps.append(step)
    return Chain(tuple(steps)) if steps else None
