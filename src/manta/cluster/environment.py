"""Variables of this command that must reach processes on other nodes: those inherit what `ray start` had there.

They travel as a value between processes: a runtime_env would show them in the dashboard.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

_FAMILIES = ("AWS_", "CUBLAS_", "GLOO_", "HF_", "MLFLOW_", "NCCL_", "PYTORCH_", "TORCH_", "WANDB_")


@dataclass(frozen=True)
class Environment:
    """What is sent."""

    usual: dict[str, str] = field(default_factory=dict, repr=False)
    """Of the families that training and trackers read."""
    chosen: dict[str, str] = field(default_factory=dict, repr=False)
    """By name."""

    @classmethod
    def of_this_process(cls, chosen: Iterable[str]) -> "Environment":
        names = set(chosen)
        return cls(
            {name: value for name, value in os.environ.items() if name.startswith(_FAMILIES)},
            {name: value for name, value in os.environ.items() if name in names},
        )

    def receive(self) -> None:
        """Set it here. What a node has of its own stays, unless it was chosen: network interfaces may have other names there."""
        os.environ.update({**self.usual, **os.environ, **self.chosen})
