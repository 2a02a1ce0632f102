"""The loop: epochs, validations, checkpoints, and stopping; exact across ranks and interruptions."""

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from manta.config import Config
from manta.data import Splits
from manta.data.stream import Stream
from manta.session import Session
from manta.training.checkpoint import find_checkpoint, load_checkpoint
from manta.training.evaluation import Evaluator, make_loader
from manta.training.learner import Learner, MicroBatch, load_weights, on_meta
from manta.training.loader import Batch
from manta.training.memory import AUTO, explain, find_micro_batch, out_of_memory, settled
from manta.training.record import Progress, Record
from manta.training.rng import rng_state, seed_everything, seed_rank, set_rng_state
from manta.training.sampler import Step, epoch_order, training_steps
from manta.training.throughput import Speeds, peak_flops, speeds, training_flops


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
        self.learner.train_set = splits.train
        seed_rank(config.seed, session.rank)
        self.loader = make_loader(session, config, splits, "train")
        self.record = Record(session, config)
        self.watch, self.agree, self.writer = self.record.watch, self.record.agree, self.record.writer
        self.record.speeds = self._speeds()
        self.snapshot: dict[str, Any] | None = None
        self.losses = torch.zeros(2, dtype=torch.float64, device=session.device)  # of this window, of this epoch
        self.record.restore(self._load_state)
        if config.data.micro_batch_size == AUTO:
            self._settle()
        self.evaluate = Evaluator(session, self.config, splits, self.learner.task)

    @property
    def progress(self) -> Progress:
        return self.record.progress

    @property
    def share(self) -> int:
        """Samples of a global batch that come to a rank, at most."""
        return math.ceil(self.config.data.batch_size / self.session.world_size)

    def _speeds(self) -> Speeds:
        config, session = self.config, self.session
        peak = config.training.peak_flops or peak_flops(session.device, config.training.precision)
        tokens = self.learner.task.tokens(config.data)
        if peak is None:
            return speeds(tokens, None, None)
        flops = training_flops(*on_meta(config))
        return speeds(tokens, flops, peak * session.world_size)

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
            self.record.settle()
            look = state == "finished" and self.config.training.test and not self.session.watched
            return self.record.finish(state, self._test() if look else {})
        finally:
            self.record.close()

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
        epochs, progress = self.config.training.epochs, self.progress
        return (
            progress.validated == progress.step and (progress.step >= self.total["step"] or self.record.out_of_patience)
        ) or (epochs is not None and progress.epoch >= epochs)

    def _steps(self) -> Iterator[Step]:
        """What is left of this epoch."""
        data, progress = self.config.data, self.progress
        samples, _ = epoch_length(self.config, self.train_size)
        if self.config.training.overfit_batches is not None or isinstance(
            self.splits.train, Stream
        ):  # it shuffles itself
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
            self.record.save_due |= due or (every is not None and self.progress.step % every == 0)
            # At the end of an epoch the checkpoint waits for the validation: one a step.
            if self.record.save_due and not self._epoch_over():
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
            self.record.report("train", found, progress.epoch + 1)
            self.losses[0], progress.window = 0.0, 0

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
        if improved or last or watched or self.record.save_due or self._done() or (every and epoch % every == 0):
            self._save(improved)
        if not watched or self._done():
            return False
        return self.record.milestone()

    def _validate(self, epoch: int) -> bool:
        """Evaluate on the validation split; True if it is the best so far."""
        seen = self.progress.offset
        with self.learner.evaluating() as model:
            found = self.evaluate(model, "val")
        found["train/epoch_loss"] = self.session.sum(self.losses[1]).item() / max(seen, 1)
        improved = self.record.validated(found, epoch)
        self.learner.schedule("validation", found[self.config.objective.metric])
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
        session = self.session
        ranks = session.gather({"rng": rng_state(session.device), "losses": self.losses.tolist()})
        if self.writer is not None:
            self.writer.wait()  # the memory of the last snapshot is used again
        if session.main or self.learner.sharded:
            self.snapshot = self.learner.state(self.snapshot)
        self.record.save(self.snapshot, ranks, best)
        self.learner.saved = True
        self.watch.start()

    def _load_state(self, state: dict[str, Any], _path: Path) -> None:
        self.learner.saved = True
        self.learner.load(state["learner"])
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

    def _profiler(self) -> AbstractContextManager[Any]:
        if not (self.config.training.profile and self.session.main):
            return nullcontext()
        folder = self.session.run.path / "profile"
        folder.mkdir(exist_ok=True)
        return torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=2, warmup=2, active=6, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(folder / "trace.json")),
        )
