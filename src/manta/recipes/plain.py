"""A plain loop for recipe=script and recipe=accelerate: model, data, optimizer, scheduler and task of the configuration. The
example to start a script of your own from."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from manta.data import AnySet, TensorSet
from manta.data.load import load_splits
from manta.recipes.script import Run
from manta.training.learner import build_model, build_optimizer, build_scheduler
from manta.training.loop import training_length
from manta.training.tasks import make_task


def main(run: Run) -> None:
    """Train for the epochs that are left, and report the validation split after each."""
    config, settings = run.config, run.config.training
    task = make_task(config)
    splits = load_splits(config.data, config.allowed_targets, task.check_targets)
    train_loader = DataLoader(samples(splits.train), config.data.batch_size, shuffle=True)
    val_loader = DataLoader(samples(splits.val), config.data.batch_size)
    model = build_model(config)
    optimizer = build_optimizer(config, model)
    scheduler = build_scheduler(config, optimizer, training_length(config, len(train_loader.dataset)))  # type: ignore[arg-type]
    model, optimizer, scheduler, train_loader, val_loader = run.prepare(
        model, optimizer, scheduler, train_loader, val_loader
    )

    for _ in run.epochs():
        model.train()
        for inputs, targets in train_loader:
            loss = task.loss(model(inputs), targets) / len(targets)
            run.backward(loss)
            if settings.grad_clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss)
            if config.scheduler["unit"] == "step":
                scheduler.step()

        model.eval()
        totals, count = torch.zeros(()), 0
        with torch.no_grad():
            for inputs, targets in val_loader:
                totals = totals + task.totals(model(inputs), targets)
                count += len(targets)
        metrics = task.metrics(run.session.sum(totals).tolist(), run.sum(count))
        run.report({f"val/{name}": value for name, value in metrics.items()})
        if config.scheduler["unit"] == "epoch":
            scheduler.step()


def samples(dataset: AnySet) -> Any:
    """Prepared samples one by one, as a DataLoader takes them."""
    if isinstance(dataset, TensorSet):
        return TensorDataset(*dataset.batch(torch.arange(len(dataset))))
    return dataset
