"""The loop: epochs, validations, checkpoints, and stopping; exact across ranks and interruptions."""

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from manta.checkpoints import continue_from, match_best
from manta.config import Config
from manta.data import Splits
from manta.errors import MantaError
from manta.session import Agreement, Session
from manta.training.checkpoint import CheckpointWriter, find_checkpoint, load_checkpoint
from manta.training.evaluation import Evaluator, make_loader
from manta.training.learner import Learner, MicroBatch, load_weights
from manta.training.loader import Batch
from manta.training.memory import AUTO, explain, find_micro_batch, out_of_memory, settled
from manta.training.rng import rng_state, seed_everything, seed_rank, set_rng_state
from manta.training.sampler import Step, epoch_order, training_steps


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


def epoch_length(config: Config, size: int) -> tuple[int, int]:
    """(samples, optimizer steps) of an epoch over `size` training samples."""
    batch = config.data.batch_size
    limits = [
        n * batch for n in (config.training.limit_train_batches, config.training.overfit_batches) if n is not None
    ]
    samples = min([size, *limits])
    return samples, math.ceil(samples / batch)


def training_length(config: Config, size: int) -> dict[str, int]:
    """The length of the whole training in each unit of a schedule."""
    settings, (_, per_epoch) = config.training, epoch_length(config, size)
    steps = min(
        settings.epochs * per_epoch if settings.epochs is not None else math.inf,
        settings.max_steps if settings.max_steps is not None else math.inf,
    )
    assert math.isfinite(steps), "checked with the configuration"
    epochs = math.ceil(steps / per_epoch)
    return {"step": int(steps), "epoch": epochs, "validation": math.ceil(epochs / settings.val_every_n_epochs)}


class Loop:
    """One rank's training of one run, from its `last` checkpoint if there is one."""

    def __init__(self, session: Session, config: Config, splits: Splits) -> None:
        self.session, self.config, self.splits = session, config, splits
        self.train_size = len(splits.train)  # type: ignore[arg-type]
        self.total = training_length(config, self.train_size)
        if config.training.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        seed_everything(config.seed)  # the weights: equal on every rank, whatever the number of ranks
        self.learner = Learner(session, config, self.total)
        seed_rank(config.seed, session.rank)
        self.loader = make_loader(session, config, splits, "train")
        self.progress = Progress()
        self.save_due = False
        self.snapshot: dict[str, Any] | None = None
        self.losses = torch.zeros(2, dtype=torch.float64, device=session.device)  # of this window, of this epoch
        self.watch = Stopwatch()
        self.agree = Agreement(session, config.training.checkpoint.every_s)
        settings = config.training.checkpoint
        self.writer = (
            CheckpointWriter(session.run.checkpoints, settings.keep, settings.asynchronous) if session.main else None
        )
        self._restore()
        if config.data.micro_batch_size == AUTO:
            self._settle()
        self.evaluate = Evaluator(session, self.config, splits, self.learner.task)

    @property
    def share(self) -> int:
        """Samples of a global batch that come to a rank, at most."""
        return math.ceil(self.config.data.batch_size / self.session.world_size)

    def _settle(self) -> None:
        """Put a number in the place of `data.micro_batch_size=auto`: that of the checkpoint, or what fits."""
        number = self.progress.micro_batch_size
        if number is None:
            number = find_micro_batch(self.learner, self.share)
            if self.session.main:
                print(f"data.micro_batch_size=auto: {number} of a worker's {self.share} samples fit at a time.")
        self.progress.micro_batch_size = number
        self.config = settled(self.config, number)

    # --- running -------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train until finished or asked to stop; {"state": "finished" | "interrupted" | "stopped" (by a search)}."""
        try:
            return self._run()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            said = f"{str(error).strip().splitlines()[0]:.200}"
        # Only here are the frames gone that hold what was on the device.
        raise explain(self.learner, self.config.data, said, self.share)

    def _run(self) -> dict[str, Any]:
        try:
            with self._profiler() as profiler:
                state = self._epochs(profiler)
            if self.writer is not None:
                self.writer.wait()
            self.session.barrier()
            look = state == "finished" and self.config.training.test and not self.session.watched
            test = self._test() if look else {}
            if self.session.main:
                self.session.run.write("summary.json", self._summary(state, test))
            return {"state": state}
        finally:
            if self.writer is not None:
                self.writer.close()

    def _epochs(self, profiler: Any) -> str:
        self.agree.begin(self.progress.step)
        while not self._done():
            if not self._epoch(profiler):
                self._save()
                return "interrupted"
            if self._end_epoch():
                return "stopped"
        return "finished"

    def _done(self) -> bool:
        settings, progress = self.config.training, self.progress
        patience = settings.early_stopping.patience
        return (
            progress.validated == progress.step
            and (progress.step >= self.total["step"] or (patience is not None and progress.stale >= patience))
        ) or (settings.epochs is not None and progress.epoch >= settings.epochs)

    def _steps(self) -> Iterator[Step]:
        """What is left of this epoch."""
        data, progress = self.config.data, self.progress
        samples, _ = epoch_length(self.config, self.train_size)
        if self.config.training.overfit_batches is not None:
            order = torch.arange(samples)
        else:
            order = epoch_order(self.train_size, self.config.seed, progress.epoch)[:samples]
        assert not isinstance(data.micro_batch_size, str), "settled"
        steps = training_steps(
            order, progress.offset, data.batch_size, self.session.rank, self.session.world_size, data.micro_batch_size
        )
        return itertools.islice(steps, max(self.total["step"] - progress.step, 0))

    def _epoch(self, profiler: Any) -> bool:
        """Train to the end of the epoch (or of the training); False if asked to stop before."""
        steps, ahead = itertools.tee(self._steps())
        batches = self.loader.batches((micro.indices for step in ahead for micro in step.micros), self.progress.epoch)
        self.watch.start()
        for step in steps:
            self.session.pulse.step = self.progress.step + 1
            loss = self.learner.step(self.progress.step + 1, step.size, self._load(step, batches))
            self.session.pulse.warm = True
            self._account(step, loss)
            if profiler is not None:
                profiler.step()
            stop, due = self.agree(self.progress.step)
            if stop:
                return False
            every = self.config.training.checkpoint.every_n_steps
            self.save_due |= due or (every is not None and self.progress.step % every == 0)
            # At the end of an epoch the checkpoint waits for the validation: one a step.
            if self.save_due and not self._epoch_over():
                self._save()
        self.watch.stop()
        return True

    def _load(self, step: Step, batches: Iterator[Batch]) -> list[MicroBatch]:
        found = []
        for micro in step.micros:
            self.session.pulse("loading a batch")
            found.append((*next(batches), micro.real))
        return found

    def _epoch_over(self) -> bool:
        samples, _ = epoch_length(self.config, self.train_size)
        return self.progress.offset >= samples or self.progress.step >= self.total["step"]

    def _account(self, step: Step, loss: torch.Tensor) -> None:
        progress = self.progress
        self.learner.schedule("step")
        self.losses += loss
        progress.step += 1
        progress.offset += step.size
        progress.window += step.size
        self.watch.samples += step.size
        if progress.step % self.config.training.log_every_n_steps == 0:
            total = self.session.sum(self.losses[0]).item()
            found = {"train/loss": total / progress.window, "train/lr": self.learner.lr}
            self._report("train", found, progress.epoch + 1)
            self.losses[0], progress.window = 0.0, 0

    def _report(self, kind: str, values: dict[str, float], epoch: int) -> None:
        self.progress.metrics.update(values)
        self.session.report(
            {"step": self.progress.step, "epoch": epoch, **values, "samples_per_s": round(self.watch.lap(kind), 1)}
        )

    # --- the end of an epoch -------------------------------------------------------------------------------------

    def _end_epoch(self) -> bool:
        """Validate and write a checkpoint where they are due; True if the search ends this run here."""
        progress, settings = self.progress, self.config.training
        samples, _ = epoch_length(self.config, self.train_size)
        ended = progress.offset >= samples
        epoch, last = progress.epoch + 1, progress.step >= self.total["step"]
        improved = False
        if last or (ended and epoch % settings.val_every_n_epochs == 0):
            improved = self._validate(epoch)
        if ended:
            progress.epoch, progress.offset = epoch, 0
            self.learner.schedule("epoch")
            self.losses[1] = 0.0
        every, watched = (
            settings.checkpoint.every_n_epochs,
            self.session.watched and progress.validated == progress.step,
        )
        if improved or last or watched or self.save_due or self._done() or (every and epoch % every == 0):
            self._save(improved)
        if not watched or self._done():
            return False
        if self.writer is not None:
            self.writer.wait()  # a trial may be paused, or copied by another, from here
        return self.session.milestone(progress.validation)

    def _validate(self, epoch: int) -> bool:
        """Evaluate on the validation split; True if it is the best so far."""
        progress, objective = self.progress, self.config.objective
        seen = progress.offset
        with self.learner.evaluating() as model:
            found = self.evaluate(model, "val")
        found["train/epoch_loss"] = self.session.sum(self.losses[1]).item() / max(seen, 1)
        self._report("val", found, epoch)
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
        self.learner.schedule("validation", value)
        return improved

    def _test(self) -> dict[str, float]:
        """The one look at the test split: the best checkpoint, after selection on validation."""
        path = find_checkpoint(self.session.run.checkpoints, "best")
        if self.splits.test is None or path is None:
            return {}
        load_weights(self.learner.model, load_checkpoint(path)[0]["learner"])
        self.learner.ema = None  # the averaged weights are in the model now
        with self.learner.evaluating() as model:
            return self.evaluate(model, "test")

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self, best: bool = False) -> None:
        self.watch.stop()
        self.session.pulse("writing a checkpoint")
        session, progress = self.session, self.progress
        ranks = session.gather({"rng": rng_state(session.device), "losses": self.losses.tolist()})
        if self.writer is not None:
            self.writer.wait()  # the memory of the last snapshot is used again
        if session.main or self.learner.sharded:
            self.snapshot = self.learner.state(self.snapshot)
        if self.writer is not None:
            state = {
                "learner": self.snapshot,
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
            self.writer.save(
                state, meta, best, partial(session.run.write, "summary.json", self._summary("running", {}))
            )
        self.learner.saved = True
        self.agree.saved()
        self.save_due = False
        self.watch.start()

    def _restore(self) -> None:
        state = self._state()
        if state is None:
            self.session.open_metrics(0)
            return
        self.learner.load(state["learner"])
        self.progress = Progress(**state["progress"])
        ranks = state["ranks"]
        if len(ranks) == self.session.world_size:
            mine = ranks[self.session.rank]
            set_rng_state(mine["rng"], self.session.device)
            self.losses.copy_(torch.tensor(mine["losses"], dtype=torch.float64))
        else:  # another world size: the sums go on, the generators start anew from here
            seed_rank(self.config.seed, self.session.rank + 1_000_003 * (self.progress.step + 1))
            if self.session.main:
                sums = torch.tensor([rank["losses"] for rank in ranks], dtype=torch.float64).sum(dim=0)
                self.losses.copy_(sums)
        self.session.open_metrics(state["metrics_bytes"])

    def _state(self) -> dict[str, Any] | None:
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
        if state is None:
            state, _ = load_checkpoint(run.checkpoints / told[0], verified=True)
        self.learner.saved = True
        state["progress"]["best"] = told[1]
        return state

    def _summary(self, state: str, test: dict[str, float]) -> dict[str, Any]:
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
            "throughput": {"samples_per_s": round(speed, 1)},
            "world_size": self.session.world_size,
            "resume_command": f"python train.py resume={self.session.run}",
        }

    def _profiler(self) -> AbstractContextManager[Any]:
        if not (self.config.training.profile and self.session.main):
            return nullcontext()
        folder = self.session.run.path / "profile"
        folder.mkdir(exist_ok=True)
        return torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=2, warmup=2, active=6, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(folder / "trace.json")),
        )
