"""resume=<folder of a multirun>: run what is missing or failed, continue what was interrupted, leave what is finished."""

from functools import partial

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from manta import runs
from manta.checks import check
from manta.config import from_hydra
from manta.errors import FINISHED, INTERRUPTED
from manta.multirun.jobs import Folder, Job
from manta.multirun.running import Multirun, differences, frozen, here
from manta.request import Prepared, prepare
from manta.runs import RunDir


def resume(folder: Folder, cfg: DictConfig, overrides: list[str]) -> int:
    """Run what is left of a multirun; the exit code is known at its end.

    Args:
        cfg: composed from this command line; gives the values of what is overridden.

    Raises:
        MantaError: another command is running it.
        KeyboardInterrupt: it was interrupted.
    """
    more = [each for each in overrides if not each.startswith("resume=")]
    Multirun(folder).begin()
    left = [job for job in folder.jobs if job.state != runs.FINISHED]
    tried = [(job, frozen(job, partial(_again, job, cfg, more, folder.group), cfg.traceback)) for job in left]
    found = [(job, prepared) for job, prepared in tried if prepared is not None]
    launcher, at_most = _launcher(folder)
    if launcher == "ray":
        from manta.multirun.side_by_side import SideBySide, Start

        SideBySide(folder, [Start(job, prepared.config) for job, prepared in found], at_most).go()
        return FINISHED
    labels = differences(folder.jobs)
    for job, prepared in found:
        print(f"Job {job.number}: {labels[job.number]}", flush=True)
        if here(job, prepared) == INTERRUPTED:
            raise KeyboardInterrupt
    return FINISHED


def _launcher(folder: Folder) -> tuple[str, int | None]:
    """How the jobs are run: as they were, unless the command line says otherwise."""
    hydra = HydraConfig.get()
    if any(each.startswith("hydra/launcher=") for each in hydra.overrides.hydra):
        return str(hydra.runtime.choices["hydra/launcher"]), hydra.launcher.get("max_concurrent_jobs")
    return str(folder.settings["launcher"]), folder.settings.get("max_concurrent_jobs")


def _again(job: Job, cfg: DictConfig, more: list[str], group: str) -> Prepared:
    """What a job is now: continued if it has a run, else as frozen; composed again if it was too wrong to be frozen.

    Raises:
        MantaError: it is wrong, or `more` would make it another one.
    """
    if job.run is not None:
        mine = cfg.copy()
        mine.resume = str(job.run.path)
        return prepare(mine, [f"resume={job.run}", *more])
    command = [*job.overrides, *more]
    if not (job.folder / "config.yaml").is_file():
        mine = compose("config", command)
        mine.group = group if mine.group is None else mine.group
        return prepare(mine, command)
    from manta.resume import change, load
    from manta.search.space import Space

    kept = RunDir(job.folder)
    saved = load(kept, cfg.allowed_targets)
    change(saved, cfg, more, kept)
    config = from_hydra(saved)
    check(config)
    return Prepared(config, command, None, Space.load(kept, config) if config.search.algorithm else None)
