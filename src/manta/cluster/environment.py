"""Variables of this command that must reach processes on other nodes: those inherit what `ray start` had there.

They travel as a value between processes: a runtime_env would show them in the dashboard.
"""

import os
from collections.abc import Iterable, Mapping

_FAMILIES = ("AWS_", "CUBLAS_", "GLOO_", "HF_", "MLFLOW_", "NCCL_", "PYTORCH_", "TORCH_", "WANDB_")


def to_send(chosen: Iterable[str]) -> dict[str, str]:
    """Of the families that training and trackers read, and those chosen by name."""
    return {name: value for name, value in os.environ.items() if name.startswith(_FAMILIES) or name in set(chosen)}


def receive(sent: Mapping[str, str], chosen: Iterable[str]) -> None:
    """Set them here. What a node has of its own stays, unless it was chosen: network interfaces may have other names there."""
    for name, value in sent.items():
        if name in set(chosen):
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)
