"""What a model is trained for: the loss, the metrics, and what a prediction is."""

import torch
from torch import Tensor
from torch.nn import functional as F


class Classification:
    """Cross-entropy over classes. Metrics are exact: sums over samples divided by their count."""

    metrics = ("loss", "accuracy")

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The training loss summed over samples, a scalar, from logits (n, classes) and targets (n,)."""
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self.label_smoothing)

    def totals(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sums over samples of each metric, (metrics,) float64."""
        losses = F.cross_entropy(logits, targets, reduction="none")
        correct = logits.argmax(dim=-1) == targets
        return torch.stack([losses.double().sum(), correct.double().sum()])

    def predictions(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The class of each sample, (n,) int64, as accuracy counts it, and probabilities (n, classes)."""
        exact = logits if logits.dtype == torch.float64 else logits.float()
        return logits.argmax(dim=-1), exact.softmax(dim=-1)
