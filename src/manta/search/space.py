"""The search space: domains written as calls, parsed, checked against the configuration, and applied to it.

Imports nothing heavy.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from manta.config import Config
from manta.runs import RunDir


@dataclass(frozen=True)
class Domain:
    """What one setting is searched over: a function of ray.tune with its arguments."""

    name: str
    """choice, grid_search, uniform, quniform, loguniform, qloguniform, randint, qrandint, lograndint, qlograndint, randn, qrandn."""
    arguments: tuple[Any, ...]

    @property
    def values(self) -> list[Any] | None:
        """All of them, if they are listed (choice, grid_search)."""
        raise NotImplementedError


@dataclass
class Space:
    """All domains by flat key, and the configurations they are applied to.

    A flat key is the dotted path below search.space: `optimizer.lr`, `model` (a whole group), and
    `model.choice.mlp.dropout` for a setting that is searched only when `model` is `mlp`.
    """

    domains: dict[str, Domain]
    bases: dict[str, DictConfig]
    """The composed configuration, interpolations unresolved, of every combination of options of searched groups, by
    "model=mlp,optimizer=sgd" (in the order of `domains`; "" without searched groups)."""

    def active(self, values: dict[str, Any]) -> dict[str, Any]:
        """Without the values of options that were not chosen; conditional keys as settings (`model.dropout`)."""
        raise NotImplementedError

    def overrides(self, values: dict[str, Any]) -> list[str]:
        """As they are typed on the command line, quoted for Hydra: `model=mlp`, `optimizer.lr=0.01`."""
        raise NotImplementedError

    def config(self, values: dict[str, Any]) -> Config:
        """The configuration of a trial, checked as that of a run; without the search.

        Raises:
            MantaError: these values do not go together.
        """
        raise NotImplementedError

    def save(self, run: RunDir) -> None:
        """Into the search's directory (space.yaml)."""
        raise NotImplementedError

    @staticmethod
    def load(run: RunDir) -> "Space":
        """As saved; nothing of conf/ is read again."""
        raise NotImplementedError


def prepare(cfg: DictConfig, overrides: list[str]) -> Space:
    """Read and check `search.space` of a composed configuration; within Hydra, whose search path composes the options.

    Raises:
        MantaError: a key that does not exist, a domain that is none, a value of the wrong type or out of bounds.
    """
    raise NotImplementedError
