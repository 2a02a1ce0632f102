"""recipe=accelerate: a plain loop of your own under Hugging Face Accelerate. Sylvain Gugger et al. 2022."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manta.config import Config
from manta.errors import MantaError
from manta.recipes.extras import needs, use_device
from manta.recipes.script import Run, Script
from manta.session import Session
from manta.training.record import Record

needs("accelerate", "accelerate")


class Accelerated(Run):
    """A `Run` whose models and optimizers are prepared by an Accelerator, `run.accelerator`."""

    def __init__(
        self, session: Session, config: Config, record: Record | None, checkpoint: Path | None, settings: dict[str, Any]
    ) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        super().__init__(session, config, record, checkpoint)
        use_device(session.device.type)
        AcceleratorState._reset_state(reset_partial_state=True)  # of the trial that this process trained before
        os.environ.setdefault(
            "OMP_NUM_THREADS", str(os.cpu_count())
        )  # else it warns, and sets threads that Ray has set
        precision = {"fp32": "no", "fp64": "no"}.get(config.training.precision, config.training.precision)
        self.accelerator = Accelerator(cpu=session.device.type == "cpu", mixed_precision=precision, **settings)

    def distribute(self, model: nn.Module) -> nn.Module:
        prepared: nn.Module = self.accelerator.prepare_model(
            model.double() if self.precision.dtype == torch.float64 else model
        )
        return prepared

    def _ready(self, thing: Any, kept: dict[str, list[Any]]) -> Any:
        ready = super()._ready(thing, kept)
        return self.accelerator.prepare_optimizer(ready) if isinstance(thing, Optimizer) else ready

    def backward(self, loss: Tensor) -> None:
        """With loss scaling and accumulation as the Accelerator has them."""
        self.accelerator.backward(loss)


class Accelerate(Script):
    """`recipe=accelerate`; see `manta.recipes.Recipe` for what each method does."""

    def __init__(self, main: str, accelerator: dict[str, Any] | None = None) -> None:
        """accelerator: arguments of accelerate.Accelerator."""
        super().__init__(main)
        self.settings = accelerator or {}

    def run(self, session: Session, config: Config, record: Record | None, checkpoint: Path | None) -> Run:
        try:
            return Accelerated(session, config, record, checkpoint, self.settings)
        except (TypeError, ValueError) as error:
            raise MantaError(f"recipe.settings.accelerator={self.settings}: {error}") from error
