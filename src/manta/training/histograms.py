"""Histograms of parameters and gradients, for trackers that show them (`tracking.watch`)."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

BINS = 64


class Histograms:
    """Appends a line to the run's histograms.jsonl every `every` steps; drawn by the follower, never sent from here.

    Args:
        what: gradients, parameters or all.
    """

    def __init__(self, path: Path, model: nn.Module, what: str, every: int) -> None:
        self.path, self.model, self.what, self.every = path, model, what, every

    def __call__(self, step: int) -> None:
        """After optimizer step `step`, while its gradients are still there."""
        if step % self.every:
            return
        found = {}
        for name, parameter in self.model.named_parameters():
            if self.what in ("parameters", "all"):
                found[f"parameters/{name}"] = _histogram(parameter.detach())
            if self.what in ("gradients", "all") and parameter.grad is not None:
                found[f"gradients/{name}"] = _histogram(parameter.grad)
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, "histograms": found}) + "\n")


def _histogram(tensor: Tensor) -> dict[str, object]:
    """Counts in equal bins between the smallest and the largest finite value."""
    values = tensor.float().flatten()
    values = values[values.isfinite()]
    if not len(values):
        return {"low": 0.0, "high": 0.0, "counts": []}
    low, high = values.min().item(), values.max().item()
    return {"low": low, "high": high, "counts": torch.histc(values, BINS, low, high).int().tolist()}
