"""What a model is trained for: the loss, the metrics, and what a prediction is.

A task is a class named by `recipe.task._target_`; one of your own needs no change elsewhere, only `recipe.metrics` with the
names that it reports.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from manta.config import Config, Data
from manta.data.load import class_numbers
from manta.errors import MantaError
from manta.targets import build


class Task:
    """Metrics are exact: totals over samples, summed over all ranks, from which `metrics` makes the numbers.

    outputs: of the model, for a batch of n samples; targets: the data set's, (n, ...).
    """

    names: tuple[str, ...] = ("loss",)
    """What `metrics` gives."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The training loss summed over samples, a scalar."""
        raise NotImplementedError

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sums over samples, (any number,) float64; here those of the metrics themselves."""
        raise NotImplementedError

    def metrics(self, totals: list[float], count: float) -> dict[str, float]:
        """The metrics of `count` samples with these totals."""
        return {name: total / count for name, total in zip(self.names, totals, strict=True)}

    def predictions(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """What is predicted, (n,) or (n, k), and probabilities (n, classes), if there are classes."""
        return outputs, None

    def output_shape(self, data: Data) -> list[int] | None:  # noqa: ARG002
        """Of a sample's output, to check a model before it is trained; None = anything."""
        return None

    def tokens(self, data: Data) -> int | None:  # noqa: ARG002
        """How many tokens a sample has, for the speed that is shown; None = it has none."""
        return None

    def check_targets(self, where: str, targets: Tensor, data: Data) -> None:
        """Refuse targets that cannot be meant.

        Args:
            where: which split of which data set.

        Raises:
            MantaError: they are of the wrong type or out of range.
        """


def make_task(config: Config) -> Task:
    """The configured task.

    Raises:
        MantaError: as `manta.targets.build`, or it is none.
    """
    task = build(
        "recipe.task", config.recipe.task, config.allowed_targets, label_smoothing=config.training.label_smoothing
    )
    if not isinstance(task, Task):
        raise MantaError(
            f"recipe.task._target_={config.recipe.task['_target_']} makes no manta.training.tasks.Task. There are: "
            "recipe/task=classification, regression and language_modeling."
        )
    return task


class Classification(Task):
    """Cross-entropy over classes; outputs are logits (n, classes), targets class numbers (n,)."""

    names = ("loss", "accuracy")

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum", label_smoothing=self.label_smoothing)

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        correct = outputs.argmax(dim=-1) == targets
        return torch.stack([losses.double().sum(), correct.double().sum()])

    def predictions(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        exact = outputs if outputs.dtype == torch.float64 else outputs.float()
        return outputs.argmax(dim=-1), exact.softmax(dim=-1)

    def output_shape(self, data: Data) -> list[int]:
        return [data.num_classes]

    def check_targets(self, where: str, targets: Tensor, data: Data) -> None:
        class_numbers(where, targets, data)


class Regression(Task):
    """Squared error of `data.num_classes` numbers a sample; targets (n,) or (n, numbers) floating point.

    The loss is that of targets scaled to mean 0 and deviation 1 (`data.target_mean`, `data.target_std`), as the model's
    outputs are; other metrics and predictions are in the targets' own units. r2 is that of all numbers together.
    """

    names = ("loss", "rmse", "mae", "r2")

    def __init__(self, mean: float = 0.0, std: float = 1.0) -> None:
        if std <= 0:
            raise ValueError(f"std={std} must be > 0")
        self.mean, self.std = mean, std

    def _errors(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        scaled = (targets.reshape(outputs.shape).to(outputs.dtype) - self.mean) / self.std
        return outputs - scaled, scaled

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._errors(outputs, targets)[0].square().flatten(1).mean(dim=1).sum()

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors, scaled = (each.double().flatten(1) for each in self._errors(outputs, targets))
        return torch.stack(
            [each.mean(dim=1).sum() for each in (errors.square(), errors.abs(), scaled, scaled.square())]
        )

    def metrics(self, totals: list[float], count: float) -> dict[str, float]:
        square, absolute, first, second = (total / count for total in totals)
        variance = second - first**2
        r2 = 1 - square / variance if variance > 0 else math.nan
        return {"loss": square, "rmse": math.sqrt(square) * self.std, "mae": absolute * self.std, "r2": r2}

    def predictions(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        numbers = outputs.float() * self.std + self.mean
        return (numbers[:, 0] if numbers.shape[1] == 1 else numbers), None

    def output_shape(self, data: Data) -> list[int]:
        return [data.num_classes]

    def check_targets(self, where: str, targets: Tensor, data: Data) -> None:
        shapes = [[data.num_classes], *([[]] if data.num_classes == 1 else [])]
        if not targets.is_floating_point() or list(targets.shape[1:]) not in shapes:
            raise MantaError(
                f"{where} has targets of type {targets.dtype} and shape {list(targets.shape)}; recipe/task=regression takes "
                f"floating point numbers, data.num_classes={data.num_classes} a sample."
            )
        if not torch.isfinite(targets).all():
            raise MantaError(f"{where} has a target that is NaN or infinite.")


class LanguageModeling(Task):
    """The next token at every position; outputs are logits (n, length, vocabulary), targets (n, length) token ids.

    The loss is in nats a token. A sample is predicted as the token that comes after it.
    """

    names = ("loss", "perplexity", "bits_per_byte")

    def __init__(self, bytes_per_token: float = 1.0) -> None:
        """bytes_per_token: of the text, on average; 1 if tokens are bytes."""
        self.bytes_per_token = bytes_per_token

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._losses(outputs, targets).sum()

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs.flatten(0, 1), targets.long().flatten(), reduction="none")
        return losses.view(targets.shape).mean(dim=1)

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._losses(outputs, targets).double().sum().reshape(1)

    def metrics(self, totals: list[float], count: float) -> dict[str, float]:
        loss = totals[0] / count
        bits = loss / math.log(2) / self.bytes_per_token
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits}

    def predictions(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        probabilities = outputs[:, -1].float().softmax(dim=-1)
        return probabilities.argmax(dim=-1), probabilities

    def output_shape(self, data: Data) -> list[int]:
        return [*data.input_shape, data.num_classes]

    def tokens(self, data: Data) -> int:
        return data.input_shape[0]

    def check_targets(self, where: str, targets: Tensor, data: Data) -> None:
        if targets.is_floating_point() or list(targets.shape[1:]) != list(data.input_shape):
            raise MantaError(
                f"{where} has targets of type {targets.dtype} and shape {list(targets.shape)}; recipe/task=language_modeling "
                f"takes token ids, data.input_shape={list(data.input_shape)} a sample: the inputs, one further."
            )
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= data.num_classes:
            raise MantaError(
                f"data.num_classes={data.num_classes} is the size of the vocabulary, but token ids are from {low} to {high} "
                f"({where}): 'data.num_classes={high + 1}'"
            )
