"""A researcher's own LightningModule and LightningDataModule, as their documentation teaches to write them."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from manta.data.digits import digits

NAMES = ("train", "val", "test")


class Images(Dataset):
    """Digits one by one, shifted at random in training."""

    def __init__(self, split: str, limit: int | None = None) -> None:
        part = getattr(digits(split_seed=0), split)
        self.inputs, self.targets = part.batch(torch.arange(len(part)))
        self.augmented = split == "train"
        self.size = limit or len(self.targets)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.inputs[index]
        if self.augmented:
            image = image.roll(int(torch.randint(0, 2, ())), dims=2)
        return image, self.targets[index]


class Digits(pl.LightningDataModule):
    def __init__(self, batch_size: int = 50, num_workers: int = 0, val_size: int | None = None) -> None:
        super().__init__()
        self.batch_size, self.num_workers, self.val_size = batch_size, num_workers, val_size

    def setup(self, stage: str) -> None:  # noqa: ARG002
        self.parts = {name: Images(name, self.val_size if name == "val" else None) for name in NAMES}

    def train_dataloader(self) -> Any:
        return DataLoader(self.parts["train"], self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> Any:
        return DataLoader(self.parts["val"], self.batch_size)

    def test_dataloader(self) -> Any:
        return DataLoader(self.parts["test"], self.batch_size)


class Net(pl.LightningModule):
    """Batch normalisation, dropout, a schedule that waits for a metric, and metrics of several kinds."""

    def __init__(
        self, hidden: int = 64, lr: float = 0.05, normalised: bool = True, kill_at: int = 0, marker: str = ""
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        between = (nn.BatchNorm1d(hidden), nn.Dropout(0.2)) if normalised else ()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), *between, nn.ReLU(), nn.Linear(hidden, 10))
        self.lr, self.kill_at, self.marker, self.calls = lr, kill_at, marker, 0
        print("my own words")

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        if self.calls == self.kill_at and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = batch
        logits = self(inputs)
        loss = F.cross_entropy(logits, targets)
        self.log("train_loss", loss)
        self.log("train_acc", (logits.argmax(1) == targets).float().mean(), on_step=False, on_epoch=True)
        return loss

    def _evaluate(self, batch: tuple[Tensor, Tensor], split: str) -> None:
        inputs, targets = batch
        logits = self(inputs)
        self.log(f"{split}_loss", F.cross_entropy(logits, targets), prog_bar=True)
        self.log(f"{split}_acc", (logits.argmax(1) == targets).float().mean())

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self._evaluate(batch, "test")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_acc"}}


class ByHand(pl.LightningModule):
    """Optimizes by itself, with two optimizers, and returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        loss = self._loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.second(self.first(inputs.flatten(1)).relu()), targets)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.first.parameters(), 0.01), torch.optim.SGD(self.second.parameters(), 0.1)]


class Silent(Net):
    """Logs nothing in validation."""

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        pass


class Counting(pl.Callback):
    """Counts training batches, over resumes too."""

    def __init__(self, path: str) -> None:
        self.path, self.count = path, 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def on_train_end(self, *_: Any) -> None:
        Path(self.path).write_text(str(self.count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
