"""scripts/evaluate.py: exact metrics of a checkpoint of a run, by any number of workers. Imports nothing heavy."""

import dataclasses
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from manta import plan, runs
from manta.checkpoints import Damaged, sizes, verify
from manta.checks import check
from manta.cluster import connect, is_running
from manta.config import Cluster, Config, Scaling, Storage, from_hydra
from manta.errors import FAILED, FINISHED, MantaError, nearest
from manta.resume import load
from manta.runs import RunDir, find_checkpoint, link_or_copy
from manta.search.best import best_of, is_search
from manta.storage import bring_back
from manta.view import View, number, table
from manta.workers import on_workers

SPLITS = ("val", "test")


@dataclass
class Arguments:
    """Metrics of a checkpoint, computed anew, into evaluation-<checkpoint>.json in the run directory.

    For example: python scripts/evaluate.py run=latest checkpoint=last splits=[val] num_workers=2
    """

    run: str = "latest"
    """`latest`, or the directory of a run, or of a search (then its best trial)."""
    checkpoint: str = "best"
    """`best`, `last`, or the step of one that was kept."""
    splits: list[str] = field(default_factory=list)
    """Of val and test; [] = those that the data set has."""
    num_workers: int = 0
    """Ray Train workers; 0 = in this process. The metrics are the same."""
    use_gpu: bool | None = None
    """Use GPUs, one a worker; null = if there are any."""
    cluster: Cluster = field(default_factory=Cluster)
    """Where Ray comes from."""
    storage: Storage = field(default_factory=Storage)
    """Where run=latest is looked for."""
    traceback: bool = False
    """Show Python tracebacks with errors."""


def evaluate(arguments: Arguments) -> int:
    """Evaluate, show, and write the metrics into the run directory; an exit code.

    Raises:
        MantaError: the request is invalid, or the evaluation failed.
    """
    for split in arguments.splits:
        if split not in SPLITS:
            hint = nearest(split, SPLITS)
            meant = f" Did you mean {hint}?" if hint else ""
            raise MantaError(f"splits=[{split}]: it must be of {', '.join(SPLITS)}.{meant}")
    view, name = View(), arguments.checkpoint
    run = find_run(arguments.run, arguments.storage, view)
    config = saved_config(run, arguments.num_workers, arguments.use_gpu, arguments.cluster)
    with published(run, name) as checkpoint:
        meta = sizes(checkpoint)
        if arguments.num_workers == 0:
            from manta.session import plain

            here = plain(run, arguments.use_gpu, stop=lambda: False)
            metrics = measure(here, config, checkpoint, arguments.splits)
        else:
            metrics = _on_ray(config, run, view, checkpoint, arguments.splits)
    path = run.path / f"evaluation-{name}.json"
    found = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
    try:
        runs.write_json(path, {"checkpoint": name, "step": meta["step"], "epoch": meta["epoch"], "metrics": found})
    except OSError as error:
        raise MantaError(f"{path} cannot be written: {error.strerror}.") from error
    bring_back(run, arguments.storage, view.say)
    rows = [("checkpoint", f"{name}: step {meta['step']}, epoch {meta['epoch']} of {run}")]
    for split in dict.fromkeys(key.partition("/")[0] for key in found):
        mine = [(key, value) for key, value in found.items() if key.startswith(f"{split}/")]
        rows.append((split, "  ".join(f"{key.partition('/')[2]} {number(value)}" for key, value in mine)))
    view.say(table("Evaluation", [*rows, ("written to", runs.short(path))]))
    return FINISHED


def find_run(spec: str, storage: Storage, view: View) -> RunDir:
    """The run that `run=` means; of a search its best.

    Raises:
        MantaError: there is none.
    """
    run = runs.find(spec, storage, key="run")
    if not is_search(run):
        return run
    best = best_of(run)
    view.say(f"{run} is a search: taking its best, trial {best.read('summary.json').get('trial')}, from {best}")
    return best


def saved_config(run: RunDir, num_workers: int, use_gpu: bool | None, cluster: Cluster) -> Config:
    """A run's own configuration, to be used on other resources and on whole splits.

    Raises:
        MantaError: as `manta.resume.load` and `manta.checks.check`.
    """
    config = from_hydra(load(run))
    scaling = Scaling(num_workers=num_workers, use_gpu=use_gpu, timeout_s=config.scaling.timeout_s)
    if num_workers != 0:  # a model may not fit on one device, here as in training
        scaling.strategy = config.scaling.strategy
    if num_workers == 0 and config.data.engine == "ray" and "engine" in config.data.dataset:  # there is no Ray here
        dataset = {**config.data.dataset, "engine": "torch"}
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, engine="torch", dataset=dataset))
    config = dataclasses.replace(
        config,
        scaling=scaling,
        cluster=cluster,
        storage=Storage(str(run.path.parent)),  # the run may have been moved
        training=dataclasses.replace(config.training, limit_eval_batches=None),
        data=dataclasses.replace(config.data, batch_size=max(config.data.batch_size, num_workers)),
    )
    check(config)
    return config


@contextmanager
def published(run: RunDir, name: str) -> Iterator[Path]:
    """The directory of a complete checkpoint, readable in here even if training goes on and retires it.

    Raises:
        MantaError: there is none of this name; or, also while it is read in here, it turns out to be damaged.
    """
    path = None if "/" in name else find_checkpoint(run.checkpoints, name)
    if path is None:
        raise MantaError(f"checkpoint={name}: {run} has {_whole(run) or 'no checkpoint yet'}.")
    around = RunDir(run.path.parent)
    place = around if is_search(around) else run  # a search may replace its best/ at any moment
    try:
        if place is run and not runs.is_locked(run):
            yield path
            return
        with TemporaryDirectory(dir=place.path, prefix=".reading-") as folder:
            copy = Path(folder) / path.name
            yield Path(shutil.copytree(path, copy, copy_function=link_or_copy, symlinks=True))
    except Damaged as error:
        whole = _whole(run, but=path)
        instead = f"Whole are: {whole}" if whole else "No other one is whole"
        raise MantaError(
            f"checkpoint={name}: {path.name} of {run} cannot be used: {error.why}. {instead}.", code=error.code
        ) from error


def _whole(run: RunDir, but: Path | None = None) -> str:
    """What `checkpoint=` can name, but for one."""
    there = set()
    for entry in run.checkpoints.glob("*/"):
        path = find_checkpoint(run.checkpoints, entry.name)
        with suppress(MantaError):
            there |= {entry.name} if path not in (None, but) and verify(entry) else set()
    steps = sorted(int(entry.removeprefix("step-")) for entry in there if entry.startswith("step-"))
    return ", ".join([*sorted(there & {"best", "last"}), *map(str, steps)])


def measure(session: Any, config: Config, checkpoint: Path, splits: list[str]) -> dict[str, float]:
    """On every rank: what the run's recipe says of a checkpoint."""
    from manta.recipes import make_recipe

    return make_recipe(config).evaluate(session, config, checkpoint, splits)


def _measure_on_worker(session: Any, config: Config, checkpoint: Path, splits: list[str]) -> dict[str, float]:
    from manta.session import loaders_in_words, watched

    with watched(session, config), loaders_in_words(session, config):
        return measure(session, config, checkpoint, splits)


def _on_ray(config: Config, run: RunDir, view: View, checkpoint: Path, splits: list[str]) -> dict[str, float]:
    """`measure` on Ray Train workers; Ray's own messages are kept only if it fails."""
    scratch = RunDir(run.path / f".evaluating-{os.getpid()}")
    arguments = {"checkpoint": checkpoint, "splits": splits}
    keep = False
    if config.cluster.kind == "local" and not is_running():
        plan.resolve(config, [plan.local_node(config.cluster)])  # refuses before Ray starts
    with view.capture_descriptors(), connect(config.cluster, view.say, config.scaling.label_selector) as nodes:
        needs = plan.resolve(config, nodes, own=config.cluster.kind == "local")
        scratch.path.mkdir()
        view.open_log(scratch.log)
        try:
            return on_workers(config, scratch, needs, view, _measure_on_worker, arguments, what="Evaluation")
        except MantaError as error:
            keep = error.code == FAILED
            raise
        finally:
            view.close()
            if not keep:
                shutil.rmtree(scratch.path, ignore_errors=True)
