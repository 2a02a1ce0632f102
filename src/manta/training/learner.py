"""The learner: a model, its optimizer, and all else that changes with an optimizer step."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manta.config import Config
from manta.data import AnySet
from manta.errors import FAILED, MantaError
from manta.session import Session
from manta.targets import build
from manta.training.ema import Ema
from manta.training.histograms import Histograms
from manta.training.parallel import bare, gradient_sync, is_sharded, load_model, load_optimizer, parallelise, whole
from manta.training.precision import Precision
from manta.training.tasks import make_task

MicroBatch = tuple[Tensor, Tensor, bool]
"""inputs (n, *input_shape), targets (n, ...), and whether its samples count."""


def build_model(config: Config) -> nn.Module:
    """The configured model, its weights drawn from torch's global generator."""
    model = build("model", config.model, config.allowed_targets)
    if not isinstance(model, nn.Module):
        raise MantaError(
            f"model._target_={config.model['_target_']} made a {type(model).__name__}, not a torch.nn.Module."
        )
    return model


def empty_batch(config: Config, device: str) -> Tensor:
    """A batch of two inputs, of whatever is in memory."""
    dtype = torch.int64 if config.data.input_dtype == "int64" else torch.float32
    return torch.empty(2, *config.data.input_shape, dtype=dtype, device=device)


def on_meta(config: Config) -> tuple[nn.Module, Tensor]:
    """The model and a batch of two inputs, without memory for their values."""
    try:
        with torch.device("meta"):
            model = build_model(config)
    except NotImplementedError:  # a constructor that needs real numbers
        model = build_model(config).to("meta")
    return model, empty_batch(config, "meta")


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = build("optimizer", config.optimizer, config.allowed_targets, parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise MantaError(f"optimizer._target_={config.optimizer['_target_']} is not a torch.optim.Optimizer.")
    return optimizer


def build_scheduler(
    config: Config, optimizer: torch.optim.Optimizer, total: dict[str, int]
) -> torch.optim.lr_scheduler.LRScheduler:
    """The configured schedule; total: the training's length in each unit."""
    spec = {key: value for key, value in config.scheduler.items() if key != "unit"}
    length = total[config.scheduler["unit"]]
    scheduler = build("scheduler", spec, config.allowed_targets, optimizer, total=length, mode=config.objective.mode)
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise MantaError(f"scheduler._target_={spec['_target_']} is not a torch.optim.lr_scheduler.LRScheduler.")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and config.scheduler["unit"] != "validation":
        raise MantaError(
            f"scheduler.unit={config.scheduler['unit']}: {spec['_target_']} looks at the objective, so it can only step "
            "after a validation. Set scheduler.unit=validation."
        )
    return scheduler


def load_weights(model: nn.Module, state: dict[str, Any]) -> None:
    """Load the weights that are judged: averaged ones if the learner's state has them.

    Raises:
        MantaError: they are of another architecture.
    """
    try:
        load_model(model, {**state["model"], **(state["ema"] or {})})
    except RuntimeError as error:
        raise MantaError(f"The checkpoint does not fit this model: {error}") from error


class Learner:
    """Everything one optimizer step touches, on one rank.

    Args:
        total: the training's length in each unit of a schedule (step, epoch, validation).
    """

    def __init__(self, session: Session, config: Config, total: dict[str, int]) -> None:
        self.session, self.config = session, config
        self.precision = Precision.make(config.training.precision, session.device)
        self.task = make_task(config)
        model = self.precision.cast(build_model(config).to(session.device))
        if config.training.compile:
            model.compile()
        self.model = parallelise(model, session, config.scaling.strategy)
        self.sharded = any(is_sharded(p) for p in self.model.parameters())
        self.optimizer = build_optimizer(config, self.model)
        self.scheduler = build_scheduler(config, self.optimizer, total)
        self.scaler = self.precision.scaler()
        self.ema = Ema(bare(self.model), config.training.ema.decay) if config.training.ema.enabled else None
        self.histograms: Histograms | None = None
        if session.main and config.tracking.watch is not None:
            path, every = session.run.histograms, config.training.log_every_n_steps
            self.histograms = Histograms(path, bare(self.model), config.tracking.watch, every)
        self.train_set: AnySet | None = None
        """What is trained on, to try how much fits into memory."""
        self.saved = False
        """Whether there is a checkpoint of this run, perhaps still being written."""
        self._found, self._one = torch.zeros((), device=session.device), torch.ones((), device=session.device)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    # --- one optimizer step --------------------------------------------------------------------------------------

    def step(self, step: int, size: int, micros: list[MicroBatch]) -> Tensor:
        """One optimizer step on this rank's share of a global batch.

        Gradients are those of the mean loss over all `size` samples of the global batch, however they are shared
        out over ranks and micro-batches. Returns this rank's summed loss, a scalar on the device.

        Raises:
            MantaError: the loss or the gradient is not finite; the weights are untouched.
        """
        total: Tensor | None = None
        # DDP and FSDP2 average over ranks; the mean over samples needs the sum.
        factor = self.session.world_size / size
        pulse = self.session.pulse
        for index, (inputs, targets, real) in enumerate(micros):
            with gradient_sync(self.model, index == len(micros) - 1):
                pulse("in the forward pass or the loss")
                with self.precision.context():
                    loss = self.task.loss(self.model(inputs), targets)
                pulse("in the backward pass")
                self.scaler.scale(loss * (factor if real else 0.0)).backward()
            mine = loss.detach() if real else torch.zeros_like(loss)
            total = mine if total is None else total + mine
        assert total is not None
        pulse("in the optimizer step")
        self._use_gradients(step, total)
        return total

    def _use_gradients(self, step: int, loss: Tensor) -> None:
        settings = self.config.training
        if settings.grad_clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.get_total_norm(self._gradients())
            norm = norm.full_tensor() if is_sharded(norm) else norm
            torch.nn.utils.clip_grads_with_norm_(self.parameters, settings.grad_clip_norm, norm)
        if settings.nonfinite_guard:
            self._guard(step, loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.histograms is not None:
            self.histograms(step)
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(step)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _guard(self, step: int, loss: Tensor) -> None:
        # An infinite gradient is how fp16 loss scaling finds its scale; only the loss tells there.
        gradients = [] if self.scaler.is_enabled() else self._gradients()
        local = [g.to_local() if is_sharded(g) else g for g in gradients] if self.sharded else gradients
        # GradScaler's own check (times one): one kernel, 6 us where the norm of the default MLP's gradients takes 30.
        try:
            torch._amp_foreach_non_finite_check_and_unscale_([loss, *local], self._found.zero_(), self._one)
            found = bool(self._found.item())
        except (NotImplementedError, RuntimeError):  # complex or sparse gradients
            found = not all(
                bool(torch.isfinite(g.coalesce().values() if g.is_sparse else g).all()) for g in [loss, *local]
            )
        if not found:
            return
        what = "the gradient is not finite" if math.isfinite(loss.item()) else f"the loss is {loss.item()}"
        message = f"Training diverged: {what} at step {step} on rank {self.session.rank}."
        run = self.session.run
        again = (
            f"then continue from the last checkpoint: python train.py resume={run} optimizer.lr=..."
            if self.saved
            else "and start anew: there is no checkpoint yet."
        )
        set_to = self.config.optimizer.get("lr")
        advice = (
            f" Nothing was overwritten. Try a lower optimizer.lr (set to {set_to}, {self.lr:.3g} at this step) or "
            f"training.grad_clip_norm=1.0, {again}"
        )
        raise MantaError(message if self.session.watched else message + advice, code=FAILED)

    # --- schedule ------------------------------------------------------------------------------------------------

    def schedule(self, unit: str, value: float | None = None) -> None:
        """Advance the learning rate if the schedule counts in `unit`; value: the objective, at a validation."""
        if self.config.scheduler["unit"] != unit:
            return
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            assert value is not None
            self.scheduler.step(value)
        else:
            self.scheduler.step()

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    # --- evaluation ----------------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The model as it is judged: in eval mode, with averaged weights if EMA is on."""
        model = self.model if self.sharded else bare(self.model)
        model.eval()
        try:
            if self.ema is None:
                yield model
            else:
                with self.ema.applied():
                    yield model
        finally:
            model.train()

    # --- checkpoint ----------------------------------------------------------------------------------------------

    def _trained(self) -> list[str]:
        return [name for name, p in bare(self.model).named_parameters() if p.requires_grad]

    def state(self, into: dict[str, Any] | None = None) -> dict[str, Any]:
        """Everything, unsharded, in host memory. Sharded: every rank calls it; else only rank 0 need.

        Args:
            into: an earlier state that is no longer needed; its memory is used again.
        """
        live = {
            "model": bare(self.model).state_dict(),
            "ema": None if self.ema is None else dict(zip(self._trained(), self.ema.average, strict=True)),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        return {**whole(live, into), "optimizer_config": self.config.optimizer}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            MantaError: it is of another architecture.
        """
        if self.ema is not None:
            load_weights(self.model, state)
            self.ema.adopt()
        try:
            load_model(self.model, state["model"])
            load_optimizer(self.optimizer, state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise MantaError(f"The checkpoint does not fit this model and optimizer: {error}") from error
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self._apply_changes(state["optimizer_config"])

    def _apply_changes(self, before: dict[str, Any]) -> None:
        """Optimizer settings changed on the command line of a resume win over the checkpoint's."""
        changed = {key: value for key, value in self.config.optimizer.items() if before.get(key) != value}
        for group in self.optimizer.param_groups:
            group.update({key: value for key, value in changed.items() if key in group})
            if "lr" in changed:
                group["initial_lr"] = changed["lr"]
        if "lr" in changed and hasattr(self.scheduler, "base_lrs"):
            self.scheduler.base_lrs = [changed["lr"]] * len(self.scheduler.base_lrs)
        if isinstance(self.scheduler, torch.optim.lr_scheduler.LambdaLR):
            # A run made longer has another schedule: its lr here, not the old schedule's.
            rates = zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True)
            for group, (base, factor) in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = base * factor(self.scheduler.last_epoch)
