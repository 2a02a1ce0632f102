"""recipe=deepspeed: a plain loop of your own under DeepSpeed, whose ZeRO stages share optimizer states, gradients and weights
out over the workers. Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054."""

import contextlib
import io
import logging
import math
import os
import shutil
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from manta.checkpoints import Damaged
from manta.config import Config
from manta.errors import MantaError
from manta.recipes import Outline
from manta.recipes.extras import needs, use_device
from manta.recipes.script import Run, Script
from manta.session import Session
from manta.training.record import Record
from manta.training.rng import rng_state

needs("deepspeed", "deepspeed")
OURS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16", "fp16",
        "optimizer", "scheduler")  # fmt: skip
"""What other settings of Manta say."""
DEEPSPEEDS = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
"""The classes that its checkpoints hold."""
GETATTR = "builtins.getattr"
"""With which some versions of Python (3.11.2) pickle the members of an Enum."""


class Sped(Run):
    """A `Run` whose model and optimizer are a DeepSpeed engine, `run.engine`."""

    def __init__(
        self, session: Session, config: Config, record: Record | None, checkpoint: Path | None, settings: dict[str, Any]
    ) -> None:
        super().__init__(session, config, record, checkpoint)
        self.settings = settings
        self.engine: Any = None

    def prepare(self, *things: Any) -> Any:
        """As `Run.prepare`, of one model and one optimizer; before the scheduler knows the optimizer is fine."""
        models = [thing for thing in things if isinstance(thing, nn.Module)]
        optimizers = [thing for thing in things if isinstance(thing, Optimizer)]
        if len(models) != 1 or len(optimizers) != 1:
            raise MantaError(
                f"run.prepare was given {len(models)} models and {len(optimizers)} optimizers; recipe=deepspeed makes an engine "
                "of one each."
            )
        training, precision = self.config.training, self.config.training.precision
        share = math.ceil(self.config.data.batch_size / self.world_size)
        settings = {
            "train_micro_batch_size_per_gpu": share,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 2**31,
            "gradient_clipping": training.grad_clip_norm or 0.0,
            **({precision: {"enabled": True}} if precision in ("bf16", "fp16") else {}),
            **self.settings,
        }
        with _quiet():
            import deepspeed

            try:
                self.engine, *_ = deepspeed.initialize(
                    model=models[0].to(self.device), optimizer=optimizers[0], config=settings, dist_init_required=False
                )
            except ValueError as error:
                raise MantaError(f"recipe.settings.config={self.settings}: DeepSpeed refuses it: {error}") from error
        return super().prepare(*things)

    def _ready(self, thing: Any, kept: dict[str, list[Any]]) -> Any:
        if isinstance(thing, nn.Module):
            kept["models"].append(self.engine)
            return self.engine
        if isinstance(thing, Optimizer):
            return _Steps(self.engine)
        return super()._ready(thing, kept)

    def backward(self, loss: Tensor) -> None:
        """The engine's."""
        self.engine.backward(loss)

    def _state(self) -> dict[str, Any]:
        return {"schedulers": [each.state_dict() for each in (self._kept or {})["schedulers"]]}

    def _save(self, record: Record, best: bool) -> None:
        mine = {"rng": rng_state(self.device), "losses": self._losses.item(), "logged": self._logged}
        record.save_files(self._write, best, mine, self._state())

    def _write(self, folder: Path) -> None:
        with _quiet():
            self.engine.save_checkpoint(str(folder), tag="engine", save_latest=False)
        self.session.barrier()
        if self.session.main:
            for path in (folder / "engine").iterdir():
                path.rename(folder / path.name)
            shutil.rmtree(folder / "engine")

    def _load(self, state: dict[str, Any], path: Path) -> None:
        only = self.record is None
        if not only and len(state["ranks"]) != self.world_size:
            raise MantaError(
                f"Checkpoint {path.name} is of {len(state['ranks'])} workers, each with its part of the optimizer; recipe=deepspeed "
                f"resumes with as many: scaling.num_workers={len(state['ranks'])}."
            )
        for file in path.glob("*.pt"):
            _refuse_code(file)
        with _quiet():
            self.engine.load_checkpoint(
                str(path.parent), tag=path.name, load_module_only=only, load_optimizer_states=not only
            )
        models, self._kept = self._kept, {**(self._kept or {}), "models": []}
        super()._load(state, path)
        self._kept = models


def _refuse_code(file: Path) -> None:
    """DeepSpeed unpickles whatever is in its files.

    Raises:
        Damaged: one holds more than tensors, plain values and what DeepSpeed itself puts there.
    """
    try:
        names = set(get_unsafe_globals_in_checkpoint(str(file)))
        if strange := sorted(names - DEEPSPEEDS - {GETATTR}):
            raise Damaged(file.parent, f"{file.name} holds {strange[0]}, which could run code")
        if GETATTR in names:
            known = [
                getattr(import_module(module), name) for module, _, name in (n.rpartition(".") for n in DEEPSPEEDS)
            ]
            with safe_globals([*known, (_member, GETATTR)]):
                torch.load(file, weights_only=True, mmap=True, map_location="meta")
    except UnpicklingError as error:
        raise Damaged(file.parent, f"{file.name} holds more than DeepSpeed puts there, which could run code") from error


def _member(kind: Any, name: str) -> Enum:
    """What getattr may be used for."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise UnpicklingError(name)
    return kind[name]


class _Steps:
    """The optimizer that the script sees: the engine steps, and clears gradients itself."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.param_groups = engine.optimizer.param_groups

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


class DeepSpeed(Script):
    """`recipe=deepspeed`; see `manta.recipes.Recipe` for what each method does."""

    def __init__(self, main: str, config: dict[str, Any] | None = None) -> None:
        """config: DeepSpeed's own, e.g. {zero_optimization: {stage: 2}}."""
        super().__init__(main)
        self.settings = config or {}

    def check(self, config: Config, look_at_data: bool) -> Outline:
        if wrong := [name for name in OURS if name in self.settings]:
            raise MantaError(
                f"recipe.settings.config.{wrong[0]} is said by data.batch_size, training.precision, training.grad_clip_norm, "
                "optimizer or scheduler. Leave it out."
            )
        if config.training.precision == "fp64":
            raise MantaError("training.precision=fp64: DeepSpeed has fp32, bf16 and fp16.")
        outline = super().check(config, look_at_data)
        stage = self.settings.get("zero_optimization", {}).get("stage", 0)
        return Outline([*outline.rows, ("deepspeed", f"ZeRO stage {stage}")], outline.total_steps)

    def train(self, session: Session, config: Config) -> dict[str, Any]:
        with _launched(session):
            return super().train(session, config)

    def evaluate(self, session: Session, config: Config, checkpoint: Path, splits: list[str]) -> dict[str, float]:
        with _launched(session):
            return super().evaluate(session, config, checkpoint, splits)

    def run(self, session: Session, config: Config, record: Record | None, checkpoint: Path | None) -> Run:
        use_device(session.device.type)
        return Sped(session, config, record, checkpoint, self.settings)


@contextlib.contextmanager
def _launched(session: Session) -> Iterator[None]:
    """With what DeepSpeed's own launcher sets; left behind it would tell others in this process that they are one of many.

    And with a process group also where there is one process, in process or a trial. It stays: DeepSpeed remembers it for ever.
    """
    ranks = {"LOCAL_RANK": session.local_rank, "RANK": session.rank, "WORLD_SIZE": session.world_size}
    before = {name: os.environ.get(name) for name in ranks}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    if not dist.is_initialized():
        library: Any = dist  # which does not export it to type checkers
        dist.init_process_group("gloo", store=library.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed and the compiler it calls tell what they do on loggers and on standard output."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
