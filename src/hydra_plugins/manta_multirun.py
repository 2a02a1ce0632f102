"""Hydra's launchers of a multirun, in place of those that come with Hydra and with hydra-ray-launcher.

Hydra imports this at every start to see which plugins there are, so nothing is imported before a multirun begins.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class OneByOne(Launcher):
    """One job after the other in this process, on a Ray that stays up between them."""

    settings: Mapping[str, Any] = {"launcher": "basic"}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:  # noqa: ARG002
        self.context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from manta.multirun.submit import launch

        return launch(self.context, self.config, job_overrides, initial_job_idx, self.settings)


class SideBySide(OneByOne):
    """Jobs side by side on one Ray, each in a process of its own.

    Args:
        max_concurrent_jobs: at most; None = as many as the resources hold.
    """

    def __init__(self, max_concurrent_jobs: int | None = None) -> None:
        self.settings = {"launcher": "ray", "max_concurrent_jobs": max_concurrent_jobs}


def register() -> None:
    """Make `hydra/launcher=basic` and `ray` ours; after the other plugins, for the last one of a name counts."""
    Plugins.instance()
    options: dict[str, dict[str, Any]] = {"basic": {"_target_": f"{__name__}.OneByOne"}}
    options["ray"] = {"_target_": f"{__name__}.SideBySide", "max_concurrent_jobs": None}
    for name, node in options.items():
        ConfigStore.instance().store(group="hydra/launcher", name=name, node=node)
