"""What a command asks for: from a composed configuration to an outcome. Imports nothing heavy before it is valid."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from manta.checks import check, check_cluster
from manta.cluster import elsewhere
from manta.config import Config, Storage, from_hydra
from manta.runs import RunDir
from manta.search.prepare import space_of

if TYPE_CHECKING:
    from manta.launch import Outcome
    from manta.search.space import Space


@dataclass(frozen=True)
class Prepared:
    """A valid request for a run or a search."""

    config: Config
    overrides: list[str]
    """Of the command line, or of one job of a multirun."""
    previous: RunDir | None = None
    """The run to continue."""
    space: "Space | None" = None
    """Of a search."""

    def launch(self, made: Callable[[RunDir], None] = lambda run: None) -> "Outcome":
        """Carry it out.

        Args:
            made: is told the run directory as soon as there is one.

        Raises:
            MantaError: it can never be satisfied, or training failed.
        """
        from manta.launch import launch

        return launch(self.config, self.overrides, self.previous, self.space, made)


def prepare(cfg: DictConfig, overrides: list[str]) -> Prepared:
    """Restore what is to be continued, and check everything.

    Raises:
        MantaError: the request is invalid.
    """
    elsewhere.check_overrides(cfg.cluster.kind, overrides)
    previous = None
    if cfg.resume and cfg.cluster.kind in elsewhere.KINDS:  # then what was saved counts, and it is there
        there = from_hydra(cfg)
        check_cluster(there)
        return Prepared(there, overrides)
    if cfg.resume:
        from manta.resume import restore

        cfg, previous = restore(cfg, overrides)
    config = from_hydra(cfg)
    check(config)
    return Prepared(config, overrides, previous, space_of(config, cfg, overrides, previous))


def run(cfg: DictConfig, overrides: list[str]) -> "Outcome":
    """Here, or on the cluster that is reached from outside.

    Raises:
        MantaError: the request is invalid or can never be satisfied, or training failed.
    """
    if cfg.cluster.kind in elsewhere.KINDS:
        config = prepare(cfg, overrides).config
        from manta.launch import Outcome

        return Outcome(elsewhere.submit(elsewhere.Request(config, overrides)), None)
    if cfg.resume:
        from manta.multirun import jobs, resume

        folder = jobs.find(cfg.resume, Storage(**cfg.storage))
        if folder is not None:
            from manta.launch import Outcome

            return Outcome(resume.resume(folder, cfg, overrides), None)
    return prepare(cfg, overrides).launch()
