"""An epoch of 60,000 images of 28x28 against the usual DataLoader over PIL images, alternating in one process.

    python benchmarks/epoch.py

Budget: at least 4 times faster, same accuracy. The images are `data=synthetic` in the shape of MNIST, in both.
"""

import statistics
import sys
import time
from typing import Any

import torch
from PIL import Image
from step import config, loop_of
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from manta.config import Config
from manta.data import TensorSet
from manta.data.load import load_splits
from manta.training.learner import build_model, build_optimizer, build_scheduler
from manta.training.loop import training_length

ROUNDS = 3


class PilImages(Dataset[Any]):
    """What torchvision's MNIST does for a sample: an array becomes a PIL image, then the transform's tensor."""

    def __init__(self, train: TensorSet) -> None:
        from torchvision.transforms import v2

        low, high = train.inputs.min(), train.inputs.max()
        self.images = ((train.inputs - low) / (high - low) * 255).to(torch.uint8)[:, 0].numpy()
        self.targets = train.targets.tolist()
        self.transform = v2.Compose(
            [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.5,), (0.25,))]
        )

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.images[index], mode="L")), self.targets[index]


def usual(cfg: Config, images: PilImages, val: TensorSet) -> tuple[float, float]:
    """(seconds of one epoch, validation accuracy) of the usual loop."""
    torch.manual_seed(0)
    model = build_model(cfg)
    optimizer = build_optimizer(cfg, model)
    scheduler = build_scheduler(cfg, optimizer, training_length(cfg, len(images)))
    loader = DataLoader(images, cfg.data.batch_size, shuffle=True, num_workers=2)
    started = time.perf_counter()
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    seconds = time.perf_counter() - started
    model.eval()
    scaled = PilImages(val)
    inputs = torch.stack([scaled[index][0] for index in range(len(scaled))])
    with torch.no_grad():
        return seconds, (model(inputs).argmax(1) == val.targets).double().mean().item()


def ours(cfg: Config) -> tuple[float, float]:
    with loop_of(cfg) as loop:
        started = time.perf_counter()
        loop._epoch(None)
        seconds = time.perf_counter() - started
        with loop.learner.evaluating() as model:
            return seconds, loop.evaluate(model, "val")["val/accuracy"]


def main() -> None:
    cfg = config(
        "data=synthetic", "data.input_shape=[1,28,28]", "data.dataset.num_samples=60000", "data.batch_size=128",
        "model=mlp", "training.epochs=1",
    )  # fmt: skip
    splits = load_splits(cfg.data, cfg.allowed_targets)
    assert isinstance(splits.train, TensorSet)
    assert isinstance(splits.val, TensorSet)
    images = PilImages(splits.train)
    ours(cfg)
    pairs = [(ours(cfg), usual(cfg, images, splits.val)) for _ in range(ROUNDS)]
    ratio = statistics.median(theirs[0] / mine[0] for mine, theirs in pairs)
    mine, theirs = pairs[-1]
    print(
        f"{len(images):,} images: manta {mine[0]:.2f} s (accuracy {mine[1]:.4f})  "
        f"DataLoader with 2 workers {theirs[0]:.2f} s (accuracy {theirs[1]:.4f})  {ratio:.1f}x faster (budget 4x)"
    )
    sys.exit(ratio < 4 or abs(mine[1] - theirs[1]) > 0.02)


if __name__ == "__main__":
    main()
