"""`recipe=lightning`: any LightningModule and LightningDataModule, with Manta's scaling, search, tracking and resume."""

import inspect
import logging
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manta.config import Config
from manta.data import AnySet
from manta.errors import FAILED, MantaError
from manta.recipes import Outline, Prediction
from manta.recipes.extras import needs

needs("lightning", "lightning")

from lightning.fabric.utilities.exceptions import MisconfigurationException  # noqa: E402
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import Checkpoint, ProgressBar  # noqa: E402
from lightning.pytorch.utilities.model_helpers import is_overridden  # noqa: E402

from manta.data.load import load_splits  # noqa: E402
from manta.recipes.lightning_data import MantaData, Shares  # noqa: E402
from manta.recipes.lightning_drive import (  # noqa: E402
    FILE,
    AfterHooks,
    Drive,
    Ended,
    Listener,
    across_ranks,
    make_strategy,
)
from manta.recipes.lightning_example import Example  # noqa: E402
from manta.recipes.pytorch import PyTorchRecipe  # noqa: E402
from manta.session import Session  # noqa: E402
from manta.targets import bind, build, locate  # noqa: E402
from manta.training.checkpoint import find_checkpoint  # noqa: E402
from manta.training.evaluation import predictions  # noqa: E402
from manta.training.learner import empty_batch  # noqa: E402
from manta.training.record import Progress, Record  # noqa: E402
from manta.training.rng import seed_everything, seed_rank  # noqa: E402
from manta.training.tasks import make_task  # noqa: E402

PRECISION: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp64": "64-true"}
# Arguments of Trainer that other settings decide, or that would stand in the way of them.
INSTEAD = {
    "accelerator": "scaling.use_gpu",
    "accumulate_grad_batches": "data.micro_batch_size",
    "barebones": None,
    "callbacks": "recipe.settings.callbacks",
    "check_val_every_n_epoch": "training.val_every_n_epochs",
    "default_root_dir": "storage.path",
    "deterministic": "training.deterministic",
    "devices": "scaling.num_workers",
    "enable_checkpointing": "training.checkpoint",
    "enable_model_summary": None,
    "enable_progress_bar": None,
    "fast_dev_run": "debug=limit",
    "gradient_clip_val": "training.grad_clip_norm",
    "limit_predict_batches": None,
    "limit_test_batches": "training.limit_eval_batches",
    "limit_train_batches": "training.limit_train_batches",
    "limit_val_batches": "training.limit_eval_batches",
    "log_every_n_steps": "training.log_every_n_steps",
    "logger": "tracking",
    "max_epochs": "training.epochs",
    "max_steps": "training.max_steps",
    "max_time": "training.max_steps",
    "min_epochs": None,
    "min_steps": None,
    "num_nodes": "scaling.num_workers",
    "num_sanity_val_steps": None,
    "overfit_batches": "training.overfit_batches",
    "plugins": None,
    "precision": "training.precision",
    "reload_dataloaders_every_n_epochs": None,
    "strategy": "recipe.settings.ddp",
    "use_distributed_sampler": None,
    "val_check_interval": "training.val_every_n_epochs",
}


class LightningRecipe:
    """See `manta.recipes.Recipe` for what each method does, and docs/recipes.md for what Lightning changes."""

    def __init__(
        self,
        module: dict[str, Any],
        datamodule: dict[str, Any] | None = None,
        callbacks: list[dict[str, Any]] | None = None,
        trainer: dict[str, Any] | None = None,
        ddp: dict[str, Any] | None = None,
    ) -> None:
        """Each of the first three is a `_target_` with its arguments.

        Args:
            module: a LightningModule; an argument named `config` gets the whole configuration.
            datamodule: a LightningDataModule; None = `data=` of the configuration.
            trainer: more arguments of lightning.pytorch.Trainer.
            ddp: arguments of torch's DistributedDataParallel, on several workers.
        """
        self.module, self.datamodule, self.callbacks = module, datamodule, callbacks or []
        self.trainer, self.ddp = trainer or {}, ddp or {}

    # --- before ------------------------------------------------------------------------------------------------------

    def check(self, config: Config, look_at_data: bool) -> Outline:
        self._refuse(config)
        allowed = config.allowed_targets
        module = _class("recipe.settings.module", self.module, LightningModule, config)
        rows, total = [("module", module.__name__)], None
        data = None
        if self.datamodule is not None:
            data = _class("recipe.settings.datamodule", self.datamodule, LightningDataModule, config)
        for index, spec in enumerate(self.callbacks):
            self._callback(f"recipe.settings.callbacks[{index}]", spec, allowed)
        for name in self.trainer:
            if name in INSTEAD:
                instead = f": use {INSTEAD[name]}" if INSTEAD[name] else ", not for recipe=lightning"
                raise MantaError(
                    f"recipe.settings.trainer.{name}={self.trainer[name]} is for Manta to decide{instead}."
                )
        bind("recipe.settings.trainer", Trainer, (), self.trainer)
        if module is Example and data is None:
            outline = PyTorchRecipe().check(config, look_at_data)
            return Outline([*rows, *outline.rows], outline.total_steps)
        if data is not None:
            rows.append(("data", data.__name__))
        elif look_at_data:
            splits = load_splits(config.data, allowed, make_task(config).check_targets)
            sizes = {name: getattr(splits, name) for name in ("train", "val", "test")}
            shown = ", ".join(f"{name} {len(part):,}" for name, part in sizes.items() if part is not None)
            rows.append(("data", f"{config.data.name}: {shown}"))
        return Outline(rows, total)

    def _refuse(self, config: Config) -> None:
        """Settings that would be ignored.

        Raises:
            MantaError: naming the first.
        """
        own = self.module.get("_target_") != f"{Example.__module__}.{Example.__qualname__}"
        training = config.training
        refused = {
            "scaling.strategy=fsdp2": (config.scaling.strategy == "fsdp2", "scaling.strategy=ddp"),
            "data.micro_batch_size=auto": (config.data.micro_batch_size == "auto", "a number, or null"),
            "data.engine=ray": (config.data.engine == "ray", "data.engine=torch, or recipe=pytorch"),
            "training.ema.enabled=true": (
                training.ema.enabled,
                "training.ema.enabled=false, and for averaged weights recipe=pytorch or a callback of Lightning",
            ),
            "training.profile=true": (
                training.profile,
                "training.profile=false and +recipe.settings.trainer.profiler=...",
            ),
            f"tracking.watch={config.tracking.watch}": (config.tracking.watch is not None, "tracking.watch=null"),
            "training.compile=true": (training.compile and own, "training.compile=false, and compile in your module"),
            f"training.label_smoothing={training.label_smoothing}": (
                training.label_smoothing > 0 and own,
                "training.label_smoothing=0, and smooth in your module",
            ),
        }
        for setting, (given, instead) in refused.items():
            if given:
                raise MantaError(
                    f"{setting} is not for recipe=lightning{' with a module of your own' if own else ''}: {instead}."
                )

    def _callback(self, key: str, spec: dict[str, Any], allowed: list[str]) -> Callback:
        made = build(key, spec, allowed)
        if not isinstance(made, Callback):
            raise MantaError(f"{key}._target_={spec['_target_']} is not a lightning.pytorch.Callback.")
        if isinstance(made, Checkpoint | ProgressBar):
            instead = "training.checkpoint.*" if isinstance(made, Checkpoint) else "metrics.jsonl and tracking="
            raise MantaError(f"{key}._target_={spec['_target_']}: that is Manta's to do, see {instead}. Leave it out.")
        return made

    # --- training ----------------------------------------------------------------------------------------------------

    def train(self, session: Session, config: Config) -> dict[str, Any]:
        with _quietly():
            seed_everything(config.seed)  # the weights: equal on every rank
            module = self._module(config)
            seed_rank(config.seed, session.rank)
            record = Record(session, config)
            shares = Shares(session, config, lambda: record.progress)
            data = self._data(shares, config)
            listener = Listener()
            drive = Drive(session, config, record, shares, listener)
            record.restore(drive.load)
            try:
                if not drive.done:
                    self._fit(config, module, data, drive)
                record.settle()
                look = drive.state == "finished" and config.training.test and not session.watched
                return record.finish(drive.state, self._test(session, config) if look else {})
            finally:
                record.close()

    def _fit(self, config: Config, module: LightningModule, data: LightningDataModule, drive: Drive) -> None:
        keys = [f"recipe.settings.callbacks[{index}]" for index in range(len(self.callbacks))]
        own = [
            self._callback(key, spec, config.allowed_targets) for key, spec in zip(keys, self.callbacks, strict=True)
        ]
        trainer = self._trainer(drive.shares, config, [drive, *own, AfterHooks(drive)], drive.listener)
        with _in_words():
            try:
                trainer.fit(module, datamodule=data, ckpt_path=drive.checkpoint, weights_only=True)
            except Ended:
                pass
            except SystemExit:  # what Lightning makes of a Ctrl-C
                raise KeyboardInterrupt from None

    def _trainer(self, shares: Shares, config: Config, callbacks: list[Callback], listener: Listener) -> Trainer:
        session, settings = shares.session, config.training
        strategy, environment = make_strategy(session, shares, self.ddp)
        epochs, steps, clip = settings.epochs, settings.max_steps, settings.grad_clip_norm
        trainer = Trainer(
            accelerator="gpu" if session.device.type == "cuda" else "cpu",
            devices=1,
            strategy=strategy,
            plugins=[environment],
            precision=PRECISION[settings.precision],
            max_epochs=-1 if epochs is None else epochs,
            max_steps=-1 if steps is None else steps,
            gradient_clip_val=clip,
            deterministic=settings.deterministic or None,
            callbacks=callbacks,
            logger=listener,
            log_every_n_steps=0,  # asked for by the drive, which knows the steps of a resumed run
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),
            default_root_dir=str(session.run.path),
            **self.trainer,
        )
        # SIGTERM is Manta's: a checkpoint, then the end. Lightning would raise in the middle of it.
        setattr(trainer._signal_connector, "register_signal_handlers", lambda: None)
        return trainer

    def _module(self, config: Config) -> LightningModule:
        module = build("recipe.settings.module", self.module, config.allowed_targets, config=config)
        if not isinstance(module, LightningModule):
            raise MantaError(f"recipe.settings.module._target_={self.module['_target_']} made no LightningModule.")
        return module

    def _data(self, shares: Shares, config: Config) -> LightningDataModule:
        if self.datamodule is None:
            return MantaData(shares, load_splits(config.data, config.allowed_targets, make_task(config).check_targets))
        return shares.of(build("recipe.settings.datamodule", self.datamodule, config.allowed_targets, config=config))

    # --- afterwards --------------------------------------------------------------------------------------------------

    def _test(self, session: Session, config: Config) -> dict[str, float]:
        """The one look at the test split: the best checkpoint, after selection on validation."""
        path = find_checkpoint(session.run.checkpoints, "best")
        return {} if path is None else self._measure(session, config, path, [], ("test",))

    def _measure(
        self, session: Session, config: Config, checkpoint: Path, splits: list[str], known: tuple[str, ...]
    ) -> dict[str, float]:
        """What the module logs in evaluation; splits: [] = those of `known` that there are."""
        shares = Shares(session, config, Progress)
        data, module = self._data(shares, config), self._module(config)
        found: dict[str, float] = {}
        there = [split for split in known if _has(data, module, split)]
        for split in splits:
            if split not in there:
                raise MantaError(f"splits=[{split}]: there is no {split} split, or the module does not evaluate it.")
        for split in splits or there:
            listener = Listener()
            trainer = self._trainer(shares, config, [_Pulse(session, split)], listener)
            look = trainer.validate if split == "val" else trainer.test
            with _in_words():
                look(module, datamodule=data, ckpt_path=checkpoint / FILE, verbose=False, weights_only=True)
            found |= across_ranks(session, listener.heard, shares.samples)
        return found

    def evaluate(self, session: Session, config: Config, checkpoint: Path, splits: list[str]) -> dict[str, float]:
        with _quietly():
            return self._measure(session, config, checkpoint, splits, ("val", "test"))

    def predict(self, session: Session, config: Config, checkpoint: Path, dataset: AnySet) -> Iterator[Prediction]:
        module = self._trained(config, checkpoint).to(session.device)
        if config.training.precision == "fp64":
            module = module.double()
        return predictions(session, config, module.eval(), dataset, make_task(config))

    def export(self, config: Config, checkpoint: Path) -> tuple[nn.Module, torch.Tensor]:
        module = self._trained(config, checkpoint)
        if not isinstance(module, Example):
            raise NotImplementedError  # what its forward takes is its own affair
        return module.model.float().eval(), empty_batch(config, "cpu").zero_()

    def _trained(self, config: Config, checkpoint: Path) -> LightningModule:
        module = self._module(config)
        with _in_words():
            state = torch.load(checkpoint / FILE, map_location="cpu", weights_only=True)
            module.configure_model()
            module.on_load_checkpoint(state)
            module.load_state_dict(state["state_dict"])
        return module


class _Pulse(Callback):
    """Marks every evaluated batch for the watchdog."""

    def __init__(self, session: Session, split: str) -> None:
        self.session, self.phase = session, f"evaluating {split}"

    def on_validation_batch_start(self, *_: Any) -> None:
        self.session.pulse(self.phase)

    def on_test_batch_start(self, *_: Any) -> None:
        self.session.pulse(self.phase)


def _class(key: str, spec: dict[str, Any], kind: type, config: Config) -> type:
    """The class that a `_target_` names, its arguments checked.

    Raises:
        MantaError: as `manta.targets.locate` and `bind`, or it is of another kind.
    """
    found: Any = locate(key, str(spec.get("_target_")), config.allowed_targets)
    arguments = {name: value for name, value in spec.items() if name != "_target_"}
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise MantaError(f"{key}._target_={spec['_target_']} is not a lightning.pytorch.{kind.__name__}.")
    if "config" in inspect.signature(found).parameters and arguments.get("config") is None:
        arguments["config"] = config
    bind(key, found, (), arguments)
    return found


def _has(data: LightningDataModule, module: LightningModule, split: str) -> bool:
    step = "validation_step" if split == "val" else f"{split}_step"
    given = getattr(data.splits, split) is not None if isinstance(data, MantaData) else True
    return given and is_overridden(f"{split}_dataloader", data) and is_overridden(step, module)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without Lightning's banners, tips and advice on how to call it."""
    logger = logging.getLogger("lightning.pytorch")
    fabric = logging.getLogger("lightning.fabric")
    levels = logger.level, fabric.level
    logger.setLevel(logging.ERROR)
    fabric.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\.(pytorch|fabric)")
        try:
            yield
        finally:
            logger.setLevel(levels[0])
            fabric.setLevel(levels[1])


@contextmanager
def _in_words() -> Iterator[None]:
    """Mistakes that Lightning finds, as ours.

    Raises:
        MantaError: it refuses what it was given, or the checkpoint does not fit.
    """
    try:
        yield
    except MisconfigurationException as error:
        raise MantaError(f"Lightning: {error}", code=FAILED) from error
    except pickle.UnpicklingError as error:
        raise MantaError(
            f"{FILE} holds more than tensors and plain values, most often arguments that save_hyperparameters() kept: leave them "
            f"out with its ignore=[...]. ({str(error).splitlines()[0]:.200})",
            code=FAILED,
        ) from error
