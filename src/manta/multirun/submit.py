"""From what a sweeper of Hydra's asks for to jobs: composed, checked and frozen before the first one starts."""

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from manta.cluster import elsewhere
from manta.commandline import parse
from manta.errors import FINISHED, INTERRUPTED, JobError, MantaError, exit_code
from manta.multirun import jobs as folders
from manta.multirun.jobs import Job
from manta.multirun.running import Multirun, differences, frozen, here
from manta.multirun.side_by_side import SideBySide, Start
from manta.request import Prepared, prepare, run

_current: list[Multirun] = []  # of this command; a sweeper that optimises launches its jobs in batches


def launch(
    context: HydraContext,
    config: DictConfig,
    batch: Sequence[Sequence[str]],
    first: int,
    settings: Mapping[str, Any],
) -> list[JobReturn]:
    """Run a batch of jobs to their end.

    Args:
        config: composed without what is swept.
        first: number of the first job.
        settings: how they are run (multirun.json).

    Raises:
        MantaError: the jobs cannot be one multirun.
        KeyboardInterrupt: it was interrupted.
    """
    composed = [_compose(context, config, overrides, number) for number, overrides in enumerate(batch, first)]
    kinds = {each.cluster.kind for each in composed}
    if kinds & set(elsewhere.KINDS):
        raise JobError(_submit(config, composed, kinds))
    if any(each.plan for each in composed):
        returns = [_in_this_process(context, each, partial(_plan, each)) for each in composed]
        return _for_sweeper(config, returns)
    if not _current:
        multirun = Multirun(folders.claim(Path(os.path.abspath(config.hydra.sweep.dir)), settings))
        multirun.begin()
        _current.append(multirun)
    folder = _current[0].folder
    submitted = [folder.job(number) for number in range(first, first + len(batch))]
    for job, each in zip(submitted, composed, strict=True):
        job.note(overrides=_overrides(each))
    kept = {job.number: _freeze(job, each, folder.group) for job, each in zip(submitted, composed, strict=True)}
    if settings["launcher"] == "ray":
        returns = _side_by_side(context, composed, submitted, kept, settings["max_concurrent_jobs"])
    else:
        returns = _one_by_one(context, composed, submitted, kept)
    return _for_sweeper(config, returns)


# --- composing ---------------------------------------------------------------------------------------------------


def _compose(context: HydraContext, config: DictConfig, overrides: Sequence[str], number: int) -> DictConfig:
    """A job's configuration as Hydra's own launcher has it, with `hydra`."""
    composed = context.config_loader.load_sweep_config(config, list(overrides))
    with read_write(composed.hydra), open_dict(composed.hydra):
        composed.hydra.job.id, composed.hydra.job.num = str(number), number
        composed.hydra.runtime.output_dir = os.path.abspath(os.path.join(config.hydra.sweep.dir, "jobs", str(number)))
    return composed


def _overrides(composed: DictConfig) -> list[str]:
    found = OmegaConf.to_container(composed.hydra.overrides.task, resolve=False)
    assert isinstance(found, list)
    return [str(each) for each in found]


@contextmanager
def _settings_of(composed: DictConfig) -> Iterator[DictConfig]:
    """A job's own settings; in here what they take from `${hydra:...}` can be resolved."""
    singleton = HydraConfig.instance()
    before = singleton.cfg
    singleton.set_config(composed)
    try:
        cfg = copy.deepcopy(composed)
        with read_write(cfg), open_dict(cfg):
            del cfg["hydra"]
        yield cfg
    finally:
        singleton.cfg = before


def _freeze(job: Job, composed: DictConfig, group: str) -> Prepared | None:
    """Check a job and keep it; None = it is wrong, which is said and recorded."""
    with _settings_of(composed) as cfg:
        cfg.group = group if cfg.group is None else cfg.group
        return frozen(job, lambda: prepare(cfg, _overrides(composed)), composed.traceback)


# --- a cluster that is reached from outside ----------------------------------------------------------------------------


def _submit(config: DictConfig, composed: list[DictConfig], kinds: set[str]) -> int:
    """Hand the whole multirun over, once; the exit code of this command.

    Raises:
        MantaError: its jobs are for several kinds of cluster, or one is wrong.
    """
    if len(kinds) > 1:
        raise MantaError(
            f"cluster: the jobs of a multirun go to one kind of cluster, and these to {', '.join(sorted(kinds))}. "
            "Start a multirun for each."
        )
    checked = []
    for number, each in enumerate(composed):
        with _settings_of(each) as cfg:
            try:
                checked.append(prepare(cfg, _overrides(each)).config)
            except MantaError as error:
                raise MantaError(f"Job {number}: {error}\nNo job was submitted.", error.code) from error
    told = [str(each) for each in config.hydra.overrides.hydra if not each.startswith("hydra.mode=")]
    swept = [str(each) for each in OmegaConf.to_container(config.hydra.overrides.task, resolve=False) or ()]
    jobs = _all_jobs(config, swept)
    return elsewhere.submit(elsewhere.Request(checked[0], swept, jobs, ["-m", *told]))


def _all_jobs(config: DictConfig, swept: list[str]) -> list[list[str]]:
    """Of all batches; empty = only the sweeper knows, as it goes."""
    if not _is_basic(config):
        return []
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    return BasicSweeper.split_arguments(parse([*params, *swept]), None)[0]


# --- running -------------------------------------------------------------------------------------------------------


def _in_this_process(context: HydraContext, composed: DictConfig, go: Any) -> JobReturn:
    """Run a job as Hydra does, with its callbacks, environment and folder; `go` returns the exit code and the objective.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """

    def task(_: DictConfig) -> float | None:
        code, objective = go()
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code != FINISHED:
            raise JobError(code)
        return objective  # type: ignore[no-any-return]

    done = run_job(task, composed, "hydra.sweep.dir", "hydra.sweep.subdir", context)
    configure_log(composed.hydra.hydra_logging, composed.hydra.verbose)
    return done


def _plan(composed: DictConfig) -> tuple[int, None]:
    with _settings_of(composed) as cfg:
        return exit_code(lambda: run(cfg, _overrides(composed)).code, composed.traceback), None


def _one_by_one(
    context: HydraContext, composed: list[DictConfig], jobs: list[Job], kept: dict[int, Prepared | None]
) -> list[JobReturn]:
    labels = differences(jobs)

    def go(job: Job) -> tuple[int, float | None]:
        prepared = kept[job.number]
        if prepared is None:
            return int(job.record["code"]), None
        print(f"Job {job.number}: {labels[job.number]}", flush=True)
        return here(job, prepared), job.objective

    return [_in_this_process(context, each, partial(go, job)) for job, each in zip(jobs, composed, strict=True)]


def _side_by_side(
    context: HydraContext,
    composed: list[DictConfig],
    jobs: list[Job],
    kept: dict[int, Prepared | None],
    at_most: int | None,
) -> list[JobReturn]:
    returns = {job.number: JobReturn() for job in jobs}
    configs = {job.number: each for job, each in zip(jobs, composed, strict=True)}

    def begun(job: Job) -> None:
        context.callbacks.on_job_start(config=configs[job.number], task_function=lambda cfg: None)

    def ended(job: Job) -> None:
        done, each, code = returns[job.number], configs[job.number], job.record["code"]
        done.overrides, done.hydra_cfg = _overrides(each), OmegaConf.masked_copy(each, "hydra")
        with _settings_of(each) as done.cfg:
            done.working_dir, done.task_name = os.getcwd(), each.hydra.job.name
        done.status = JobStatus.COMPLETED if code == FINISHED else JobStatus.FAILED
        done.return_value = job.objective if code == FINISHED else JobError(code)
        context.callbacks.on_job_end(config=each, job_return=done)

    starts = []
    for job in jobs:
        prepared, hydra = kept[job.number], configs[job.number].hydra
        if prepared is None:
            begun(job)
            ended(job)
        else:
            environment = {str(name): str(value) for name, value in hydra.job.env_set.items()}
            starts.append(
                Start(job, prepared.config, environment, hydra.runtime.output_dir if hydra.job.chdir else None)
            )
    SideBySide(_current[0].folder, starts, at_most, begun, ended).go()
    return [returns[job.number] for job in jobs]


def _is_basic(config: DictConfig) -> bool:
    return str(config.hydra.sweeper._target_).endswith(".BasicSweeper")


def _for_sweeper(config: DictConfig, returns: list[JobReturn]) -> list[JobReturn]:
    """Hydra's own sweeper would leave out the batches after one with a failure; others decide for themselves."""
    for each in returns if _is_basic(config) else ():
        if each.status == JobStatus.FAILED:
            each.status, each._return_value = JobStatus.COMPLETED, None
    return returns
