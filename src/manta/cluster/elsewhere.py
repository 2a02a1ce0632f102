"""Clusters that are reached from outside: the command itself goes there, and runs there beside its Ray. Imports nothing heavy.

A module of this package per kind has `submit(request) -> int`, the exit code of the command that was typed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType

from manta.config import CLUSTER_KINDS, Config
from manta.errors import MantaError

KINDS = tuple(kind for kind in CLUSTER_KINDS if kind not in ("local", "existing"))

PROJECT = Path(__file__).resolve().parents[3]
"""Where train.py is."""


@dataclass(frozen=True)
class Request:
    """A command on its way to another machine."""

    config: Config
    """Composed from it and checked."""
    overrides: list[str]
    """As typed; of a multirun with its sweeps."""
    jobs: list[list[str]] = field(default_factory=list)
    """Of a multirun: the overrides of each job."""
    options: list[str] = field(default_factory=list)
    """Of a multirun: what Hydra is told beside the overrides, `-m` and settings of `hydra`."""

    def arguments(self, *settings: str, overrides: Sequence[str] | None = None) -> list[str]:
        """Of train.py on the other side: what was typed, but for the cluster and what `settings` give."""
        given = {name_of(setting) for setting in settings}
        kept = [
            override
            for override in (self.overrides if overrides is None else overrides)
            if not is_of_cluster(name_of(override)) and name_of(override) not in given
        ]
        return [*self.options, *kept, *settings]


def name_of(override: str) -> str:
    """The setting, or the group, that an override is about."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def is_of_cluster(name: str) -> bool:
    """Whether a setting says where Ray comes from."""
    return name == "cluster" or name.startswith("cluster.")


def check_overrides(kind: str, overrides: Sequence[str]) -> None:
    """Settings of one kind of cluster mean nothing to another; conf/local may have them for all.

    Raises:
        MantaError: one was typed.
    """
    for override in overrides:
        _, _, rest = name_of(override).partition("cluster.")
        group = rest.partition(".")[0]
        if group in KINDS and group != kind:
            raise MantaError(f"{override} is for cluster={group}, and this is cluster={kind}. Add cluster={group}.")


def submit(request: Request) -> int:
    """Hand the command over.

    Returns:
        The exit code of the command that was typed here.

    Raises:
        MantaError: it cannot be done.
    """
    return int(import_module(f"manta.cluster.{request.config.cluster.kind}").submit(request))


def find(spec: str) -> tuple[ModuleType, str] | None:
    """Of what is named `<kind>:<name>`, the module of its kind, which has `logs(name)` and `stop(name)`, and its name."""
    kind, colon, name = spec.partition(":")
    return (import_module(f"manta.cluster.{kind}"), name) if colon and kind in KINDS else None
