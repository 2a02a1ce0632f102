"""Number formats of training."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from manta.errors import MantaError


@dataclass(frozen=True)
class Precision:
    """dtype: of weights and inputs; autocast: of the forward pass, None = the same."""

    dtype: torch.dtype
    autocast: torch.dtype | None
    device_type: str

    @classmethod
    def make(cls, name: str, device: torch.device) -> "Precision":
        """From `training.precision`.

        Raises:
            MantaError: the device cannot compute in it.
        """
        if name == "fp16" and device.type != "cuda":
            raise MantaError(
                f"training.precision=fp16 needs a GPU, this run computes on {device.type}. Use training.precision=bf16."
            )
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        return cls(torch.float64 if name == "fp64" else torch.float32, autocast, device.type)

    def cast(self, model: nn.Module) -> nn.Module:
        """The model with its real weights in double for fp64; whatever a model's own dtypes are, they stay otherwise."""
        if self.dtype == torch.float64:
            model._apply(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        return model

    def context(self) -> AbstractContextManager[object]:
        """The forward pass runs inside this."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast)

    def scaler(self) -> torch.amp.GradScaler:
        """Loss scaling; does nothing except in fp16."""
        return torch.amp.GradScaler(self.device_type, enabled=self.autocast is torch.float16)
