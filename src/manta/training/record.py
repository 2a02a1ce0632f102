"""The account that a training keeps of itself, for any recipe: reports, the best validation, checkpoints, and when to end."""

import dataclasses
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from manta.checkpoints import continue_from, match_best
from manta.config import Config
from manta.errors import MantaError
from manta.session import Agreement, Session
from manta.training.checkpoint import CheckpointWriter, load_checkpoint
from manta.training.rng import rng_state
from manta.training.throughput import Speeds


@dataclass
class Progress:
    """Where a run is; the same on every rank."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs completed."""
    offset: int = 0
    """Samples of the current epoch already used."""
    window: int = 0
    """Samples since the last train line."""
    best: dict[str, Any] | None = None
    """{"value", "step", "epoch", "metrics"} of the best validation so far."""
    stale: int = 0
    """Validations since then."""
    validated: int = -1
    """Step of the last validation."""
    validation: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Itself: {"epoch", "step", "metrics"}."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """What was last reported."""
    micro_batch_size: int | None = None
    """What `data.micro_batch_size=auto` found."""


class Stopwatch:
    """Training speed, with evaluation and checkpoints not counted."""

    def __init__(self) -> None:
        self.samples, self.seconds = 0, 0.0
        self._marks: dict[str, tuple[int, float]] = {}
        self._started: float | None = None

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
            self._started = None

    def lap(self, name: str) -> float:
        """Samples per second since the last lap of this name."""
        seconds = self.seconds + (time.perf_counter() - self._started if self._started is not None else 0.0)
        before = self._marks.get(name, (0, 0.0))
        self._marks[name] = (self.samples, seconds)
        return (self.samples - before[0]) / max(seconds - before[1], 1e-9)


class Record:
    """One rank's account of one run. What changes it is called on every rank, with the same values."""

    def __init__(self, session: Session, config: Config) -> None:
        self.session, self.config = session, config
        self.progress = Progress()
        self.watch = Stopwatch()
        self.agree = Agreement(session, config.training.checkpoint.every_s)
        self.save_due = False
        self.speeds: Speeds = lambda _: {}
        settings = config.training.checkpoint
        self.writer = (
            CheckpointWriter(session.run.checkpoints, settings.keep, settings.asynchronous) if session.main else None
        )

    def restore(self, load: Callable[[dict[str, Any], Path], None]) -> bool:
        """Continue from the run's last whole checkpoint; False if there is none.

        Args:
            load: given the checkpoint's state and its directory, before the history is opened.
        """
        found = self._find()
        if found is None:
            self.session.open_metrics(0)
            return False
        state, path = found
        self.progress = Progress(**state["progress"])
        load(state, path)
        self.session.open_metrics(state["metrics_bytes"])
        return True

    def _find(self) -> tuple[dict[str, Any], Path] | None:
        """What to continue from, on every rank the same: rank 0 finds the newest whole checkpoint."""
        session, run, state = self.session, self.session.run, None
        told: tuple[str, dict[str, Any] | None] | MantaError | None = None
        if session.main:
            try:
                choice = continue_from(run, load_checkpoint, print)
                if choice is not None:
                    state, _ = choice.found
                    told = choice.path.name, match_best(run, state["progress"], self.config.objective.metric, print)
            except MantaError as error:  # else the other ranks would wait for nothing
                told = error
        told = session.gather(told)[0]
        if isinstance(told, MantaError):
            raise told
        if told is None:
            return None
        path = run.checkpoints / told[0]
        if state is None:
            state, _ = load_checkpoint(path, verified=True)
        state["progress"]["best"] = told[1]
        return state, path

    # --- reporting -----------------------------------------------------------------------------------------------

    def report(self, kind: str, values: dict[str, float], epoch: int) -> None:
        """A line of the history; kind: train or val, whose speed is measured apart."""
        self.progress.metrics.update(values)
        speed = self._speeds(self.watch.lap(kind))
        self.session.report({"step": self.progress.step, "epoch": epoch, **values, **speed})

    def _speeds(self, samples_per_s: float) -> dict[str, float]:
        return {"samples_per_s": round(samples_per_s, 1), **self.speeds(samples_per_s)}

    def validated(self, found: dict[str, float], epoch: int) -> bool:
        """After a validation: report it; True if it is the best so far.

        Args:
            found: has the objective's metric.
        """
        progress, objective = self.progress, self.config.objective
        self.report("val", found, epoch)
        value = found[objective.metric]
        sign = 1 if objective.mode == "max" else -1
        best = progress.best
        margin = self.config.training.early_stopping.min_delta
        improved = math.isfinite(value) and (best is None or sign * (value - best["value"]) > 0)
        worthwhile = improved and (best is None or sign * (value - best["value"]) > margin)
        progress.stale = 0 if worthwhile else progress.stale + 1
        if improved:
            progress.best = {"value": value, "step": progress.step, "epoch": epoch, "metrics": found}
        progress.validated = progress.step
        progress.validation = {"epoch": epoch, "step": progress.step, "metrics": found}
        return improved

    @property
    def out_of_patience(self) -> bool:
        """Whether `training.early_stopping` says to end."""
        patience = self.config.training.early_stopping.patience
        return patience is not None and self.progress.stale >= patience

    def milestone(self) -> bool:
        """After a validation of a trial and its checkpoint: whether the search ends this run here."""
        if self.writer is not None:
            self.writer.wait()  # a trial may be paused, or copied by another, from here
        return self.session.milestone(self.progress.validation)

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def save(
        self, learner: dict[str, Any] | None, ranks: list[dict[str, Any]], best: bool, files: Path | None = None
    ) -> None:
        """Publish a checkpoint.

        Args:
            learner: of rank 0, what changes with a step; {} if it is in `files`.
            ranks: what each rank keeps for itself.
            best: the last validation is the best so far.
            files: a folder of plain files that are moved into the checkpoint.
        """
        session, progress = self.session, self.progress
        if self.writer is not None:
            state = {
                "learner": learner,
                "progress": dataclasses.asdict(progress),
                "ranks": ranks,
                "metrics_bytes": session.metrics_size(),
            }
            meta = {
                "metrics_bytes": state["metrics_bytes"],
                "step": progress.step,
                "epoch": progress.epoch,
                "metrics": progress.metrics,
                "validation": progress.validation,
                "world_size": session.world_size,
                "micro_batch_size": progress.micro_batch_size,
            }
            told = partial(session.run.write, "summary.json", self.summary("running", {}))
            self.writer.save(state, meta, best, told, files)
        self.agree.saved()
        self.save_due = False

    def save_files(
        self,
        write: Callable[[Path], None],
        best: bool = False,
        mine: dict[str, Any] | None = None,
        learner: dict[str, Any] | None = None,
    ) -> None:
        """Publish a checkpoint of what a framework writes itself.

        Args:
            write: called on every rank with the same empty folder, for plain files in it.
            mine: what this rank keeps for itself; None = its random generators.
            learner: what changes with a step and is not in those files.
        """
        session, folder = self.session, self.session.run.checkpoints / ".writing-files"
        self.watch.stop()
        session.pulse("writing a checkpoint")
        if self.writer is not None:
            self.writer.wait()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        session.barrier()
        write(folder)
        ranks = session.gather(mine or {"rng": rng_state(session.device)})
        self.save(learner or {}, ranks, best, folder)
        self.watch.start()

    # --- the end -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Return when the last checkpoint is there to be read by every rank."""
        if self.writer is not None:
            self.writer.wait()
        self.session.barrier()

    def finish(self, state: str, test: dict[str, float]) -> dict[str, Any]:
        """Write the summary; what a recipe's `train` returns.

        Args:
            state: "finished" | "interrupted" | "stopped" (by a search).
            test: metrics of the test split, if it was looked at.
        """
        if self.session.main:
            self.session.run.write("summary.json", self.summary(state, test))
        return {"state": state}

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def summary(self, state: str, test: dict[str, float]) -> dict[str, Any]:
        """summary.json, see docs/run_directory.md."""
        progress, objective = self.progress, self.config.objective
        best = progress.best
        speed = self.watch.samples / self.watch.seconds if self.watch.seconds else 0.0
        return {
            "state": state,
            "objective": {
                "metric": objective.metric,
                "mode": objective.mode,
                "value": best["value"] if best else None,
            },
            "step": progress.step,
            "epoch": progress.epoch,
            "metrics": dict(progress.metrics),
            "best": best
            and {
                "epoch": best["epoch"],
                "step": best["step"],
                "checkpoint": best.get("checkpoint", f"checkpoints/step-{best['step']:08d}"),
                "metrics": best["metrics"],
            },
            "test": test,
            "throughput": self._speeds(speed),
            "world_size": self.session.world_size,
            "resume_command": f"python train.py resume={self.session.run}",
        }
