"""Recipes: training functions that see only a Session. `recipe=` chooses one; every other group keeps its meaning."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from manta.config import Config
from manta.data import AnySet
from manta.session import Session
from manta.targets import build
from manta.training.evaluation import Prompt


@dataclass
class Outline:
    """What a run will be, told before it starts."""

    rows: list[tuple[str, str]]
    """Lines of the plan: (what, value)."""
    total_steps: int | None = None
    """Optimizer steps to the end, if the driver can know."""


Prediction = tuple[Tensor, Tensor | None, Tensor]
"""Of n samples, on the CPU: what is predicted (n,) or (n, k), classes int64; probabilities (n, classes) if there are
classes; targets (n, ...)."""


class Recipe(Protocol):
    """What a class named by `recipe._target_` offers; `recipe.settings` are its constructor's arguments."""

    def check(self, config: Config, look_at_data: bool) -> Outline:
        """On the driver, before anything starts: refuse what cannot work, describe what will run.

        Args:
            look_at_data: the driver sees the same files as the workers, so the data set is opened too.

        Raises:
            MantaError: the configuration cannot work.
        """
        ...

    def train(self, session: Session, config: Config) -> dict[str, Any]:
        """On every rank: train until finished or asked to stop; {"state": "finished" | "interrupted"}.

        Continues from the run's `last` checkpoint if there is one.
        """
        ...

    def evaluate(self, session: Session, config: Config, checkpoint: Path, splits: list[str]) -> dict[str, float]:
        """On every rank: exact metrics of a checkpoint directory on each named split, e.g. {"val/loss": 0.1}.

        Args:
            splits: of val and test; empty = those that the data set has.
        """
        ...

    def predict(self, session: Session, config: Config, checkpoint: Path, dataset: AnySet) -> Iterator[Prediction]:
        """In one process: what a checkpoint says of each sample, in order, batch by batch.

        Args:
            dataset: gives prepared inputs, as a split does; targets are handed through.
        """
        ...

    def export(self, config: Config, checkpoint: Path) -> tuple[nn.Module, Tensor]:
        """For a model registry, in any process: the trained model in float32 on the CPU, and an example batch of two.

        May be left out, or raise NotImplementedError: then only checkpoints are kept.
        """
        ...

    def generate(self, session: Session, config: Config, checkpoint: Path, prompt: Prompt) -> str:
        """In one process: a text that begins with the prompt's.

        May be left out: a recipe that models no language.
        """
        ...


def make_recipe(config: Config) -> Recipe:
    """The configured recipe.

    Raises:
        MantaError: as `manta.targets.build`.
    """
    spec = {**config.recipe.settings, "_target_": config.recipe._target_}
    recipe: Recipe = build("recipe.settings" if config.recipe.settings else "recipe", spec, config.allowed_targets)
    return recipe
