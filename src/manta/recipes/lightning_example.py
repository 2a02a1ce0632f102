"""The LightningModule of `recipe=lightning` until you name your own: the configured model, task, optimizer and schedule."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from manta.config import Config
from manta.training.learner import build_model, build_optimizer, build_scheduler
from manta.training.tasks import make_task

Batch = tuple[Tensor, Tensor]
"""inputs (n, *data.input_shape), targets (n, ...)."""


class Example(LightningModule):
    """Trains `model=` with `optimizer=` and `scheduler=` for what `recipe/task` says, as `recipe=pytorch` does."""

    def __init__(self, config: Config) -> None:
        """config: of the whole run; given to any module whose constructor has an argument of this name."""
        super().__init__()
        self.config = config
        self.model = build_model(config)
        self.task = make_task(config)
        self.totals: Tensor | None = None
        if config.training.compile:
            self.model.compile()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def training_step(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        return self.task.loss(self(inputs), targets) * (1 / len(targets))  # the mean, as everywhere in Lightning

    # --- evaluation: sums over samples and ranks ---------------------------------------------------------------------

    def _add(self, batch: Batch) -> None:
        inputs, targets = batch
        totals = self.task.totals(self(inputs), targets).double()
        found = torch.cat([totals, totals.new_tensor([len(targets)])])
        self.totals = found if self.totals is None else self.totals + found

    def _log_metrics(self, split: str) -> None:
        assert self.totals is not None, "every rank has a batch"
        summed = self.trainer.strategy.reduce(self.totals, reduce_op="sum")
        self.totals = None
        *totals, count = summed.tolist()
        metrics = self.task.metrics(totals, count)
        self.log_dict({f"{split}/{name}": torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()})

    def validation_step(self, batch: Batch) -> None:
        self._add(batch)

    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val")

    def test_step(self, batch: Batch) -> None:
        self._add(batch)

    def on_test_epoch_end(self) -> None:
        self._log_metrics("test")

    # --- optimization ------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.config, self.model)
        unit, every = self.config.scheduler["unit"], self.config.training.val_every_n_epochs
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": build_scheduler(self.config, optimizer, self._length()),
                "interval": "step" if unit == "step" else "epoch",
                "frequency": every if unit == "validation" else 1,
                "monitor": self.config.objective.metric,
            },
        }

    def _length(self) -> dict[str, int]:
        """Of the training, in each unit of a schedule."""
        self.trainer.fit_loop.setup_data()  # `estimated_stepping_batches` does, but not if training.epochs=null
        steps = int(self.trainer.estimated_stepping_batches)
        per_epoch = -(-self.trainer.num_training_batches // self.trainer.accumulate_grad_batches)
        epochs = -(-steps // int(per_epoch))
        return {"step": steps, "epoch": epochs, "validation": -(-epochs // self.config.training.val_every_n_epochs)}
