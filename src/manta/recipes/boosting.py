"""What recipes of boosted trees share: rows in memory, one tree after another, our own metrics and checkpoints.

A boosting round is a step and an epoch: all training rows, once. `manta.recipes.xgboost` and `manta.recipes.lightgbm` say
how their library grows the trees.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from manta.config import Config
from manta.data import AnySet, Splits
from manta.data.load import load_splits
from manta.data.transforms import build_transforms
from manta.errors import MantaError
from manta.recipes import Outline, Prediction
from manta.search.domains import read
from manta.session import Session
from manta.training.checkpoint import find_checkpoint
from manta.training.evaluation import make_loader, predictions, to_evaluate
from manta.training.loop import epoch_length
from manta.training.record import Record
from manta.training.sampler import epoch_order
from manta.training.tasks import Classification, Regression, Task, make_task

READ = 8192
"""Rows read at a time."""
UNUSED = ("model", "optimizer", "scheduler", "data.batch_size")
"""Settings whose defaults stay in the configuration and mean nothing to trees."""


class Rows(NamedTuple):
    """Samples in memory: inputs (n, features) float32, targets (n, ...) as the task takes them."""

    inputs: np.ndarray
    targets: Tensor


class Trees(ABC):
    """Trees being grown over this rank's rows, by all ranks together."""

    @abstractmethod
    def boost(self, number: int) -> None:
        """Add round `number`, counted from 0. What is drawn at random depends on the seed and this number alone."""

    @abstractmethod
    def outputs(self, split: str) -> Tensor:
        """The task's outputs for the rows of train or val, on the CPU."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the trees into a file of the library's own format."""


Scorer = Callable[[np.ndarray], Tensor]
"""Inputs (n, features) to the task's outputs, on the CPU."""


@dataclass(frozen=True)
class Aim:
    """What trees are grown for, in plain words that each library has its own names for."""

    task: Task
    classes: int
    """0 for regression."""
    numbers: int
    """Numbers to predict; 0 for classes."""

    @property
    def trees(self) -> int:
        """Trees of a round."""
        return 1 if self.classes == 2 else self.classes or self.numbers

    def labels(self, targets: Tensor) -> np.ndarray:
        """Targets as the trees learn them: class numbers (n,), or numbers scaled as the task's outputs are (n, numbers)."""
        if isinstance(self.task, Regression):
            targets = ((targets.double() - self.task.mean) / self.task.std).float().reshape(-1, self.numbers)
            return targets[:, 0].numpy() if self.numbers == 1 else targets.numpy()
        return targets.numpy()

    def outputs(self, scores: np.ndarray) -> Tensor:
        """Sums over trees, (n,) or (n, k), as the task's outputs: logits (n, classes), or numbers (n, numbers)."""
        found = torch.from_numpy(scores).reshape(len(scores), self.trees)
        return torch.cat([torch.zeros_like(found), found], dim=1) if self.classes == 2 else found


def merged(named: dict[str, Any], params: dict[str, Any], ours: Mapping[str, str]) -> dict[str, Any]:
    """A library's parameters: those that are settings of their own, and others.

    Args:
        ours: which settings of Manta decide which parameters.

    Raises:
        ValueError: one is said twice.
    """
    for name in params:
        if name in ours or name in named:
            raise ValueError(f"params.{name} is set by {ours.get(name, f'recipe.settings.{name}')}")
    return {**named, **params}


class BoostingRecipe(ABC):
    """See `manta.recipes.Recipe` for what each method does.

    name: of the recipe; parameters: what its settings come to, by the library's names.
    """

    name: str
    parameters: dict[str, Any]

    # --- of each library ---------------------------------------------------------------------------------------------

    @abstractmethod
    def rehearse(self, aim: Aim, seed: int) -> None:
        """Grow one round on made-up rows, to see what the library says of its parameters.

        Raises:
            MantaError: it refuses one, or knows none of that name.
        """

    @abstractmethod
    def grow(
        self, session: Session, aim: Aim, seed: int, rows: dict[str, Rows], whole: Rows, start: Path | None
    ) -> AbstractContextManager[Trees]:
        """Trees, connected with those of the other ranks.

        Args:
            rows: of train and val, this rank's share.
            whole: all of train, from which every rank finds the same bins.
            start: a checkpoint to continue from.
        """

    @abstractmethod
    def scorer(self, session: Session, aim: Aim, checkpoint: Path) -> Scorer:
        """What a checkpoint's trees say."""

    def refused(self, aim: Aim) -> Iterator[str]:  # noqa: ARG002
        """What this library cannot do."""
        return iter(())

    # --- the recipe --------------------------------------------------------------------------------------------------

    def check(self, config: Config, look_at_data: bool) -> Outline:
        aim = self._aim(config)
        problems = [*_refused(self.name, config), *self.refused(aim)]
        if problems:
            raise MantaError("\n".join(problems))
        self.rehearse(aim, config.seed)
        build_transforms("data.transforms.eval", config.data.transforms.eval, config.allowed_targets)
        rounds = _rounds(config)
        rows = [
            (
                "model",
                f"{self.name}, {rounds} round{'s' if rounds > 1 else ''} of {aim.trees} tree{'s' if aim.trees > 1 else ''}",
            )
        ]
        if look_at_data:
            splits = _splits(config, aim.task)
            sizes = {
                name: len(part) for name in ("train", "val", "test") if (part := getattr(splits, name)) is not None
            }
            rows.append(("data", f"{config.data.name}: {', '.join(f'{name} {n:,}' for name, n in sizes.items())}"))
        rows.append(("not used", ", ".join(UNUSED)))
        return Outline(rows, rounds)

    def train(self, session: Session, config: Config) -> dict[str, Any]:
        aim, record = self._aim(config), Record(session, config)
        try:
            splits = _splits(config, aim.task)
            whole = _read(session, config, splits, "train")
            rows = {"train": _share(session, whole), "val": _share(session, _read(session, config, splits, "val"))}
            start: list[Path] = []
            record.restore(lambda _, path: start.append(path))
            with self.grow(session, aim, config.seed, rows, whole, start[0] if start else None) as trees:
                state = _boost(
                    session, config, record, trees, aim.task, {name: part.targets for name, part in rows.items()}
                )
            record.settle()
            best = find_checkpoint(session.run.checkpoints, "best")
            look = state == "finished" and config.training.test and not session.watched and splits.test is not None
            return record.finish(state, self.evaluate(session, config, best, ["test"]) if look and best else {})
        finally:
            record.close()

    def evaluate(self, session: Session, config: Config, checkpoint: Path, splits: list[str]) -> dict[str, float]:
        aim = self._aim(config)
        data, score = _splits(config, aim.task), self.scorer(session, aim, checkpoint)
        found: dict[str, float] = {}
        for split in to_evaluate(config, data, splits):
            inputs, targets = _share(session, _read(session, config, data, split))
            outputs = score(inputs) if len(inputs) else aim.outputs(np.zeros((0, aim.trees), np.float32))
            found |= _measure(session, aim.task, split, outputs, targets)
        return found

    def predict(self, session: Session, config: Config, checkpoint: Path, dataset: AnySet) -> Iterator[Prediction]:
        aim = self._aim(config)
        return predictions(session, config, _Scored(self.scorer(session, aim, checkpoint)), dataset, aim.task)

    def _aim(self, config: Config) -> Aim:
        """What the task means for trees.

        Raises:
            MantaError: they cannot learn it.
        """
        task, numbers = make_task(config), config.data.num_classes
        if isinstance(task, Classification) and numbers > 1:
            return Aim(task, numbers, 0)
        if isinstance(task, Regression):
            return Aim(task, 0, numbers)
        raise MantaError(
            f"recipe={self.name} learns recipe/task=classification (of two classes or more) and recipe/task=regression, not "
            f"{config.recipe.task['_target_']} with data.num_classes={numbers}. Use recipe=pytorch."
        )


class _Scored(nn.Module):
    """A model of trees where one of PyTorch is wanted."""

    def __init__(self, score: Scorer) -> None:
        super().__init__()
        self.score = score

    def forward(self, inputs: Tensor) -> Tensor:
        return self.score(_table(inputs))


def _refused(name: str, config: Config) -> Iterator[str]:
    """Settings that trees cannot honour."""
    training, data = config.training, config.data
    given: dict[str, tuple[Any, Any, str]] = {
        "training.precision": (training.precision, "fp32", "trees are grown in fp32"),
        "training.grad_clip_norm": (training.grad_clip_norm, None, "there is no gradient of weights"),
        "training.label_smoothing": (training.label_smoothing, 0.0, "the library's own loss has none"),
        "training.ema.enabled": (training.ema.enabled, False, "there are no weights to average"),
        "training.compile": (training.compile, False, "there is no torch model"),
        "training.profile": (training.profile, False, "there is no torch model"),
        "tracking.watch": (config.tracking.watch, None, "there are no parameters with gradients"),
        "data.micro_batch_size": (data.micro_batch_size, None, "a round takes all rows"),
        "data.input_dtype": (data.input_dtype, "float", "rows are numbers"),
        "scaling.strategy": (config.scaling.strategy, "ddp", "there is no torch model to shard"),
        "scaling.max_workers": (config.scaling.max_workers, None, "the library's workers are fixed"),
    }
    for key, (value, neutral, why) in given.items():
        if value != neutral:
            shown = "null" if neutral is None else str(neutral).lower()
            given_as = str(value).lower() if isinstance(value, bool) else value
            yield f"{key}={given_as} means nothing to recipe={name}: {why}. Set {key}={shown}, or use recipe=pytorch."
    if data.transforms.train != data.transforms.eval:
        yield (
            f"data.transforms.train differs from data.transforms.eval, and recipe={name} reads its rows once: an augmentation "
            "would be drawn once. Set data.transforms.train=[], or use recipe=pytorch."
        )
    unused = [key for key in read(config.search.space)[0] if any(f"{key}.".startswith(f"{each}.") for each in UNUSED)]
    if unused:
        yield (
            f"search.space has {', '.join(unused)}, which recipe={name} does not use: every trial would be the same. Add "
            f"search/space={name}, or name what to search: search.space.recipe.settings.max_depth='randint(2, 10)'"
        )


def _rounds(config: Config) -> int:
    """Boosting rounds to the end: an epoch and a step each."""
    limits = [n for n in (config.training.epochs, config.training.max_steps) if n is not None]
    return min(limits)


# --- rows --------------------------------------------------------------------------------------------------------------


def _splits(config: Config, task: Task) -> Splits:
    return load_splits(config.data, config.allowed_targets, task.check_targets)


def _read(session: Session, config: Config, splits: Splits, split: str) -> Rows:
    """All rows of a split, prepared, as far as `training.limit_*` and `overfit_batches` let them in."""
    size, training = len(getattr(splits, split)), config.training
    ids = torch.arange(size)
    if split == "train":
        used, _ = epoch_length(config, size)
        ids = (
            ids[:used]
            if training.overfit_batches is not None or used == size
            else epoch_order(size, config.seed, 0)[:used]
        )
    elif training.limit_eval_batches is not None:
        share = config.data.eval_batch_size or math.ceil(config.data.batch_size / session.world_size)
        ids = ids[: training.limit_eval_batches * share * session.world_size]
    session.pulse(f"reading {split}")
    parts = [
        (_table(inputs), targets.cpu())
        for inputs, targets in make_loader(session, config, splits, split).batches(ids.split(READ))
    ]
    return Rows(np.concatenate([part[0] for part in parts]), torch.cat([part[1] for part in parts]))


def _table(inputs: Tensor) -> np.ndarray:
    """(n, *input_shape) to (n, features) float32."""
    found: np.ndarray = inputs.flatten(1).float().cpu().contiguous().numpy()
    return found


def _share(session: Session, rows: Rows) -> Rows:
    """A rank's part of the rows, every world_size-th."""
    mine = slice(session.rank, None, session.world_size)
    return Rows(np.ascontiguousarray(rows.inputs[mine]), rows.targets[mine])


# --- rounds ------------------------------------------------------------------------------------------------------------


def _boost(
    session: Session, config: Config, record: Record, trees: Trees, task: Task, targets: dict[str, Tensor]
) -> str:
    """Round after round until the end, or until asked to stop; how it ended."""
    progress, training = record.progress, config.training
    rounds, count = _rounds(config), int(session.sum(torch.tensor(len(targets["train"]))))

    def train_loss() -> float:
        return session.sum(task.loss(trees.outputs("train"), targets["train"]).double()).item() / count

    record.agree.begin(progress.step)
    while progress.step < rounds and not record.out_of_patience:
        session.pulse.step = progress.step + 1
        record.watch.start()
        trees.boost(progress.step)
        record.watch.stop()
        session.pulse.warm = True
        progress.step = progress.epoch = progress.step + 1
        record.watch.samples += count
        if progress.step % training.log_every_n_steps == 0:
            record.report("train", {"train/loss": train_loss()}, progress.epoch)
        improved = False
        if progress.step == rounds or progress.epoch % training.val_every_n_epochs == 0:
            session.pulse("evaluating val")
            found = _measure(session, task, "val", trees.outputs("val"), targets["val"])
            improved = record.validated({**found, "train/epoch_loss": train_loss()}, progress.epoch)
        state = _end_round(record, trees, rounds, improved)
        if state is not None:
            return state
    return "finished"


def _end_round(record: Record, trees: Trees, rounds: int, improved: bool) -> str | None:
    """Write a checkpoint where one is due; how training ends here, if it does."""
    session, progress, settings = record.session, record.progress, record.config.training.checkpoint
    stop, due = record.agree(progress.step)
    last = progress.step == rounds or record.out_of_patience
    watched = session.watched and progress.validated == progress.step
    every = {settings.every_n_steps, settings.every_n_epochs or None} - {None}
    if improved or last or watched or stop or due or any(progress.step % n == 0 for n in every if n):
        record.save_files(lambda folder: trees.save(folder) if session.main else None, improved)
    if watched and not last and record.milestone():
        return "stopped"
    return "interrupted" if stop and not last else None


def _measure(session: Session, task: Task, split: str, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Exact metrics over the rows of all ranks."""
    totals = task.totals(outputs, targets).double()
    *summed, count = session.sum(torch.cat([totals, totals.new_tensor([len(targets)])])).tolist()
    return {f"{split}/{name}": value for name, value in task.metrics(summed, count).items()}
