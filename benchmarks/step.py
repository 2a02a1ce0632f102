"""A training step against a bare hand-written loop on the same batches, alternating in one process.

    python benchmarks/step.py

Budgets: 1.10x for the default MLP (a step is half a millisecond), 1.03x for models from 1 ms a step.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from torch.nn import functional as F

from manta.config import Config, from_hydra, register
from manta.data import TensorSet
from manta.data.load import load_splits
from manta.runs import RunDir
from manta.session import Session
from manta.training.learner import build_model, build_optimizer, build_scheduler
from manta.training.loop import Loop, training_length
from manta.training.sampler import epoch_order

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 9


def config(*overrides: str) -> Config:
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return from_hydra(compose("config", ["scaling=in_process", *overrides]))


@contextmanager
def loop_of(cfg: Config) -> Iterator[Loop]:
    """A fresh training loop in this process."""
    with tempfile.TemporaryDirectory() as folder:
        session = Session(RunDir(Path(folder)), torch.device("cpu"))
        loop = Loop(session, cfg, load_splits(cfg.data, cfg.allowed_targets))
        yield loop
        assert loop.writer is not None
        loop.writer.close()


def manta_seconds(cfg: Config, epochs: int) -> float:
    """Seconds a step through Manta's loop, checkpoints and validation aside (its own stopwatch)."""
    with loop_of(cfg) as loop:
        for _ in range(epochs):
            loop._epoch(None)
            loop.progress.epoch, loop.progress.offset = loop.progress.epoch + 1, 0
        return loop.watch.seconds / loop.progress.step


def bare_seconds(cfg: Config, epochs: int) -> float:
    """Seconds a step of the loop one would write by hand: same model, optimizer, schedule, order and batches."""
    train = load_splits(cfg.data, cfg.allowed_targets).train
    assert isinstance(train, TensorSet)
    model = build_model(cfg)
    optimizer = build_optimizer(cfg, model)
    scheduler = build_scheduler(cfg, optimizer, training_length(cfg, len(train)))
    steps, seconds = 0, 0.0
    for epoch in range(epochs):
        order = epoch_order(len(train), cfg.seed, epoch)
        started = time.perf_counter()
        for indices in order.split(cfg.data.batch_size):
            inputs, targets = train.batch(indices)
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            steps += 1
            if steps % 10 == 0:
                loss.item()
        seconds += time.perf_counter() - started
    return seconds / steps


def main() -> None:
    torch.set_num_threads(1)
    cases = [
        ("mlp on digits, batch 64", 20, 1.10, ("model=mlp", "training.epochs=20")),
        ("cnn on digits, batch 64", 2, 1.03, ("model=cnn", "training.epochs=20")),
        ("vit on digits, batch 64", 2, 1.03, ("model=vit", "training.epochs=20")),
    ]
    failed = False
    for name, epochs, budget, overrides in cases:
        cfg = config(*overrides)
        manta_seconds(cfg, 1), bare_seconds(cfg, 1)
        pairs = [(manta_seconds(cfg, epochs), bare_seconds(cfg, epochs)) for _ in range(ROUNDS)]
        ratio = statistics.median(ours / bare for ours, bare in pairs)
        ours, bare = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        failed |= ratio > budget
        print(f"{name:28} manta {ours:7.3f} ms  bare {bare:7.3f} ms  ratio {ratio:.3f} (budget {budget})")
    sys.exit(failed)


if __name__ == "__main__":
    main()
