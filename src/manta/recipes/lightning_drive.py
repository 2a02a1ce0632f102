"""What connects Lightning's Trainer with Manta: callbacks that keep the run's record, a logger that listens, strategies."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor

from manta.config import Config
from manta.errors import FAILED, MantaError
from manta.recipes.lightning_data import Shares
from manta.session import Session
from manta.training.record import Record
from manta.training.rng import seed_rank, set_rng_state

FILE = "lightning.ckpt"
"""In a checkpoint directory: what Lightning's own `Trainer.save_checkpoint` writes."""


class Ended(Exception):
    """Training ends at this point, its checkpoint written; how it ended is in `Drive.state`."""


class Listener(Logger):
    """Hears what a module logs at the end of an evaluation or of an epoch, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[str, float] = {}

    @property
    def name(self) -> str:
        return "manta"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *_arguments: Any, **_more: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # noqa: ARG002
        self.heard = {name: float(value) for name, value in metrics.items() if name != "epoch"}


def across_ranks(session: Session, found: dict[str, float], samples: int) -> dict[str, float]:
    """Means over the samples of all ranks of what each rank found; NaN without samples.

    Args:
        found: means over this rank's samples, or what is the same on all ranks (`sync_dist=True`, torchmetrics).
    """
    if session.world_size == 1:
        return found
    ranks: list[tuple[dict[str, float], int]] = session.gather((found, samples))
    counts = {name: sum(count for each, count in ranks if name in each) for name in found}
    return {
        name: sum(each[name] * count for each, count in ranks if name in each) / max(counts[name], 1) for name in found
    }


# --- strategies: gradients of the mean over all samples of a global batch, however it is shared out ----------------------


class _Weighted(Strategy):
    shares: Shares

    def backward(self, closure_loss: Tensor, *arguments: Any, **more: Any) -> Tensor:
        """A loss is the mean over a rank's samples, and ranks are averaged: wrong only where shares are unequal."""
        batches = self.shares.train
        assert batches is not None and batches.current is not None
        piece = batches.current
        weight = batches.parts * self.shares.session.world_size * piece.mine / piece.size
        weighted = closure_loss if weight == 1.0 else closure_loss * weight
        return super().backward(weighted, *arguments, **more)


class _OneDevice(_Weighted, SingleDeviceStrategy):
    pass


def make_strategy(session: Session, shares: Shares, ddp: dict[str, Any]) -> tuple[Strategy, Any]:
    """The strategy and the cluster environment of this rank.

    Args:
        ddp: arguments of DistributedDataParallel.
    """
    strategy: Any
    if session.world_size == 1:
        from lightning.fabric.plugins.environments.lightning import LightningEnvironment

        strategy = _OneDevice(device=session.device)
        environment = LightningEnvironment()  # named, for else in a job of SLURM Lightning takes over
    else:
        # Ray's strategy for a process group that stands already (ours, manta.trainer.ProcessGroup). `prepare_trainer` only
        # looks whether these two are there.
        from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment

        class RayDDP(_Weighted, RayDDPStrategy):
            @property
            def root_device(self) -> torch.device:  # Ray's get_device() says cuda:0 where a GPU is only declared
                return session.device

        strategy, environment = RayDDP(**ddp), RayLightningEnvironment()
    strategy.shares = shares
    return strategy, environment


# --- the record ----------------------------------------------------------------------------------------------------------


class Drive(Callback):
    """The first callback of a training: keeps the record, writes checkpoints, ends in time."""

    state = "finished"

    def __init__(self, session: Session, config: Config, record: Record, shares: Shares, listener: Listener) -> None:
        self.session, self.config, self.record = session, config, record
        self.shares, self.listener = shares, listener
        shares.before_batch = self.before_batch
        self.checkpoint: Path | None = None
        self.found: dict[str, float] | None = None
        self.improved = self.stopping = self.between = False
        self.losses = [0.0, 0.0]
        """Summed over this rank's samples of this window, of this epoch."""
        self.lossless = True
        """No loss was seen: the module optimizes by itself and returns none."""
        self.steps = self.samples = 0
        """Of an epoch."""
        self._pending: list[Tensor] = []
        self._kept: list[Any] = []
        self._means: dict[str, list[float]] = {}
        """Sums and counts behind what the module logs over a training epoch, to be taken up again."""
        self._rng: dict[str, Any] | None = None

    # --- where the training is ---------------------------------------------------------------------------------------

    @property
    def total(self) -> float:
        """Optimizer steps to the end."""
        settings = self.config.training
        epochs = math.inf if settings.epochs is None else settings.epochs
        return min(epochs * self.steps, math.inf if settings.max_steps is None else settings.max_steps)

    @property
    def done(self) -> bool:
        """Whether nothing is left to do, as far as that is known without the data."""
        settings, progress = self.config.training, self.record.progress
        over = settings.max_steps is not None and progress.step >= settings.max_steps
        return (progress.validated == progress.step and (over or self.record.out_of_patience)) or (
            settings.epochs is not None and progress.epoch >= settings.epochs
        )

    def load(self, state: dict[str, Any], path: Path) -> None:
        """Continue from a checkpoint, see `Record.restore`; Lightning loads its own file."""
        self.checkpoint = path / FILE
        ranks = state["ranks"]
        if len(ranks) == self.session.world_size:
            self._rng = ranks[self.session.rank]["rng"]
        else:  # another world size: the generators start anew from here
            seed_rank(self.config.seed, self.session.rank + 1_000_003 * (state["progress"]["step"] + 1))

    def _use_rng(self) -> None:
        """As late as it goes: what was built on the way here may have drawn from them."""
        if self._rng is not None:
            set_rng_state(self._rng, self.session.device)
            self._rng = None

    # --- beginning ---------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        # It was for `estimated_stepping_batches`. The end is ours, and with it Lightning takes a checkpoint between epochs
        # for one in the middle.
        trainer.fit_loop.epoch_loop.max_steps = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.shares.train is not None
        if self.shares.train.parts > 1 and not pl_module.automatic_optimization:
            raise MantaError(
                f"data.micro_batch_size={self.config.data.micro_batch_size}: a LightningModule that optimizes by itself "
                "accumulates gradients by itself. Set data.micro_batch_size=null."
            )
        self.steps, self.samples = self.shares.train.steps, self.shares.train.samples
        self._schedule_validation(trainer)
        self.record.agree.begin(self.record.progress.step)
        self.record.watch.start()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        if self.between:
            self._after_epoch(trainer, over=False)
        assert self.shares.train is not None
        self.samples = self.shares.train.samples
        self._schedule_validation(trainer)
        self._use_rng()
        self.record.watch.start()

    def _schedule_validation(self, trainer: Trainer) -> None:
        """Validate after this epoch, or after no epoch that comes."""
        progress, every = self.record.progress, self.config.training.val_every_n_epochs
        final = (progress.epoch + 1) * self.steps >= self.total
        due = final or (progress.epoch + 1) % every == 0
        trainer.check_val_every_n_epoch = 1 if due else trainer.current_epoch + 2

    # --- one step ----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, *_: Any) -> None:
        self.session.pulse.step = self.record.progress.step + 1
        self.session.pulse("in the training step")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:  # noqa: ARG002
        # An infinite gradient is how fp16 loss scaling finds its scale; only the loss tells there.
        if self.config.training.nonfinite_guard and self.config.training.precision == "fp16":
            self._guard(loss, f"the loss is {loss}")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:  # noqa: ARG002
        if self.config.training.nonfinite_guard and self.config.training.precision != "fp16":
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._guard(torch.nn.utils.get_total_norm(gradients), "the gradient is not finite")

    def _guard(self, value: Tensor, what: str) -> None:
        if not torch.isfinite(value).item():
            raise MantaError(
                f"Training diverged: {what} at step {self.record.progress.step + 1} on rank {self.session.rank}. Nothing was "
                "overwritten. Try a lower learning rate or training.grad_clip_norm=1.0, and continue from the last "
                f"checkpoint, if there is one: python train.py resume={self.session.run}",
                code=FAILED,
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:  # noqa: ARG002
        assert self.shares.train is not None and self.shares.train.current is not None
        self._resume_means(trainer)
        piece = self.shares.train.current
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._pending.append(
                loss.detach().double() * (piece.mine * self.shares.train.parts)
            )  # Lightning divided it
            self.lossless = False
        if not piece.last:
            return
        progress, settings = self.record.progress, self.config.training
        progress.step += 1
        progress.offset += piece.size
        progress.window += piece.size
        self.record.watch.samples += piece.size
        self.session.pulse.warm = True
        if progress.step % settings.log_every_n_steps == 0:
            self._report(trainer, piece.mine)
        stop, due = self.record.agree(progress.step)
        self.stopping |= stop
        every = settings.checkpoint.every_n_steps
        self.record.save_due |= due or (every is not None and progress.step % every == 0)
        if progress.step >= self.total:
            trainer.should_stop = True

    def before_batch(self, trainer: Trainer) -> None:
        """Before a batch of training is read, when everybody's hooks of the one before have run.

        Checkpoints in mid-epoch are written here; at the end of an epoch they wait for the validation.
        """
        self._use_rng()
        batches = self.shares.train
        if self.record.progress.offset == 0 or batches is None or batches.current is None or not batches.current.last:
            return
        if self.stopping or self.record.save_due:
            self._save(trainer)
        if self.stopping:
            self._end("interrupted")

    def _settle_losses(self) -> None:
        """Losses are fetched from the device when they are needed, not at every step."""
        if self._pending:
            total = torch.stack(self._pending).sum().item()
            self.losses = [each + total for each in self.losses]
            self._pending = []

    def _report(self, trainer: Trainer, samples: int) -> None:
        """The mean loss since the last report, and of what the module logged itself the last batch's."""
        self._settle_losses()
        progress = self.record.progress
        logged = trainer._logger_connector.metrics["log"]  # what a logger would get at this step
        found = across_ranks(self.session, {name: float(value) for name, value in logged.items()}, samples)
        if not self.lossless:
            found["train/loss"] = self._sum(self.losses[0]) / progress.window
        if trainer.optimizers:
            found["train/lr"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        self.record.report("train", found, progress.epoch + 1)
        self.losses[0], progress.window = 0.0, 0

    def _sum(self, value: float) -> float:
        return float(self.session.sum(torch.tensor(value, dtype=torch.float64)).item())

    # --- the end of an epoch -----------------------------------------------------------------------------------------

    def on_validation_start(self, *_: Any) -> None:
        self.record.watch.stop()
        self.listener.heard = {}

    def on_validation_batch_start(self, *_: Any) -> None:
        self.session.pulse("evaluating val")

    def on_validation_end(self, *_: Any) -> None:
        self.found = across_ranks(self.session, self.listener.heard, self.shares.samples)
        self.listener.heard = {}

    def end_epoch(self, trainer: Trainer) -> None:
        """After the hooks of everybody else, and before schedules that wait for a metric."""
        progress = self.record.progress
        self.record.watch.stop()
        self._settle_losses()
        # In an epoch that it resumed Lightning would leave out the schedules that wait for a metric.
        trainer.fit_loop._restarting = False
        epoch, ended = progress.epoch + 1, progress.offset >= self.samples
        if self.found is not None:
            self._check_objective(self.found)
            if not self.lossless:
                self.found["train/epoch_loss"] = self._sum(self.losses[1]) / max(progress.offset, 1)
            self.improved = self.record.validated(self.found, epoch)
            self.found = None
            trainer.should_stop |= self.record.out_of_patience
        if ended:
            progress.epoch, progress.offset, self.losses[1] = epoch, 0, 0.0
        self.between = True

    def _check_objective(self, found: dict[str, float]) -> None:
        metric = self.config.objective.metric
        if metric not in found:
            logged = ", ".join(found) or "nothing"
            raise MantaError(
                f"objective.metric={metric}: the LightningModule logs {logged} in validation. Log it there "
                f"(self.log({metric!r}, ...)), or name another: objective.metric=... and recipe.metrics=[...]"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._after_epoch(trainer, over=True)

    def _after_epoch(self, trainer: Trainer, over: bool) -> None:
        """Once schedules and everything else have taken in the epoch: its checkpoint, and whether to go on.

        Args:
            over: it was the last one.
        """
        progress, every = self.record.progress, self.config.training.checkpoint.every_n_epochs
        self._report_epoch()
        watched = self.session.watched and progress.validated == progress.step
        due = self.record.save_due or (every and progress.epoch % every == 0)
        if self.improved or watched or due or over or self.stopping:
            self._save(trainer, self.improved)
        self.between = self.improved = False
        if over:
            return
        if watched and self.record.milestone():
            self._end("stopped")
        if self.stopping:
            self._end("interrupted")

    def _report_epoch(self) -> None:
        """What the module logged over a whole training epoch."""
        found = across_ranks(self.session, self.listener.heard, max(self.samples, 1))
        self.listener.heard = {}
        if found:
            self.record.report("train", found, self.record.progress.epoch)

    def _end(self, state: str) -> None:
        self.state = state
        raise Ended

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, best: bool = False) -> None:
        self._settle_losses()
        self._kept = self.session.gather((self.losses, {} if self.between else _means(trainer)))
        self.record.save_files(lambda folder: trainer.save_checkpoint(folder / FILE, weights_only=False), best)

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": self._kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ranks = state_dict["ranks"]
        if len(ranks) == self.session.world_size:
            losses, self._means = ranks[self.session.rank]
            self.losses = list(losses)
        elif self.session.main:  # another world size: the sums go on
            self.losses = [sum(column) for column in zip(*(losses for losses, _ in ranks), strict=True)]

    def _resume_means(self, trainer: Trainer) -> None:
        """Lightning forgets them; a module that logs something again has a place for it."""
        results = trainer.fit_loop.epoch_loop._results
        for key in [key for key in self._means if key in results]:
            value, count = self._means.pop(key)
            results[key].value += value
            results[key].cumulated_batch_size += int(count)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Between epochs Lightning's counters are those of an epoch that is just beginning, or that ended too early."""
        if self.between:
            progress = self.record.progress
            begun = progress.epoch + (progress.offset > 0)
            for tracker in ("current", "total"):
                counters = checkpoint["loops"]["fit_loop"]["epoch_progress"][tracker]
                counters |= {"ready": begun, "started": begun, "processed": progress.epoch, "completed": progress.epoch}


def _means(trainer: Trainer) -> dict[str, list[float]]:
    """(weighted sum, samples) of each mean over the training epoch that is going on."""
    results = trainer.fit_loop.epoch_loop._results.items()
    return {
        key: [result.value.item(), int(result.cumulated_batch_size)]
        for key, result in results
        if result.is_tensor and result.meta.on_epoch and result.meta.is_mean_reduction
    }


class AfterHooks(Checkpoint):
    """Tells the drive of the end of an epoch when the module's own hooks have run: Lightning calls this class last."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self.drive.end_epoch(trainer)
