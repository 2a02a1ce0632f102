"""Exact evaluation: sums over real samples divided by their count, whatever the number of ranks."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manta.config import Config
from manta.data import AnySet, Splits, TensorSet
from manta.data.stream import Stream
from manta.data.transforms import build_transforms
from manta.errors import MantaError
from manta.models.gpt import generate
from manta.session import Session
from manta.training.loader import Loader, StreamLoader
from manta.training.precision import Precision
from manta.training.sampler import micro_batches
from manta.training.tasks import Task


def make_loader(session: Session, config: Config, splits: Splits, split: str) -> Loader:
    """The loader of one split; training batches are augmented, others get `data.transforms.eval`."""
    return _loader(session, config, getattr(splits, split), "train" if split == "train" else "eval")


def _loader(session: Session, config: Config, dataset: AnySet, kind: str) -> Loader:
    """Args: kind: which of `data.transforms`, train or eval."""
    data = config.data
    dtype = Precision.make(config.training.precision, session.device).dtype
    transform = build_transforms(f"data.transforms.{kind}", getattr(data.transforms, kind), config.allowed_targets)
    if isinstance(dataset, Stream):
        return StreamLoader(dataset, session, dtype, transform, config.seed, kind == "train")
    return Loader(
        dataset,
        session.device,
        dtype,
        transform,
        config.seed,
        data.num_workers,
        data.prefetch_factor,
    )


def to_evaluate(config: Config, data: Splits, asked: list[str]) -> list[str]:
    """The splits that are asked for; of nothing asked those of val and test that there are.

    Raises:
        MantaError: there is none of that name.
    """
    for split in asked:
        if getattr(data, split) is None:
            raise MantaError(f"splits=[{split}]: data set {config.data.name} has no {split} split.")
    return asked or [split for split in ("val", "test") if getattr(data, split) is not None]


class Evaluator:
    """Metrics of a model on a split; every rank calls it and gets the same numbers."""

    def __init__(self, session: Session, config: Config, splits: Splits, task: Task) -> None:
        self.session, self.config, self.splits, self.task = session, config, splits, task
        self.precision = Precision.make(config.training.precision, session.device)
        self.loaders: dict[str, Loader] = {}

    @torch.no_grad()
    def __call__(self, model: nn.Module, split: str) -> dict[str, float]:
        """E.g. {"val/loss": 0.1, "val/accuracy": 0.9}; model: in eval mode."""
        session, data = self.session, self.config.data
        if split not in self.loaders:
            self.loaders[split] = make_loader(session, self.config, self.splits, split)
        size = len(getattr(self.splits, split))
        assert not isinstance(data.micro_batch_size, str), "auto is settled by the recipe"
        batch = data.eval_batch_size or data.micro_batch_size or math.ceil(data.batch_size / session.world_size)
        micros = micro_batches(torch.arange(size), session.rank, session.world_size, batch)
        micros = micros[: self.config.training.limit_eval_batches]
        sums: Tensor | None = None
        batches = self.loaders[split].batches(micro.indices for micro in micros)
        for micro, (inputs, targets) in zip(micros, batches, strict=True):
            session.pulse(f"evaluating {split}")
            with self.precision.context():
                logits = model(inputs)
            totals = self.task.totals(logits, targets).double()
            found = torch.cat([totals, totals.new_tensor([len(targets)])])
            sums = torch.zeros_like(found) if sums is None else sums
            if micro.real:
                sums += found
        assert sums is not None, "every rank has a batch"
        *summed, count = session.sum(sums).tolist()
        metrics = self.task.metrics(summed, count) if count else dict.fromkeys(self.task.names, math.nan)
        return {f"{split}/{name}": value for name, value in metrics.items()}


@torch.no_grad()
def predictions(
    session: Session, config: Config, model: nn.Module, dataset: AnySet, task: Task
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """(predictions, probabilities, targets) of every sample in order, a batch at a time; model: in eval mode."""
    precision, data = Precision.make(config.training.precision, session.device), config.data
    assert not isinstance(data.micro_batch_size, str), "auto is settled by the recipe"
    size = data.eval_batch_size or data.micro_batch_size or data.batch_size
    parts: Iterable[AnySet] = [dataset]
    if isinstance(dataset, TensorSet):  # inputs may be a file larger than the device's memory
        starts = range(0, len(dataset), size)
        parts = (dataset.part(start, start + size) for start in starts)
    for part in parts:
        ids = torch.arange(len(part))  # type: ignore[arg-type]
        for inputs, targets in _loader(session, config, part, "eval").batches(ids.split(size)):
            with precision.context():
                logits = model(inputs)
            predicted, probabilities = task.predictions(logits)
            yield predicted.cpu(), None if probabilities is None else probabilities.cpu(), targets.cpu()


@dataclass(frozen=True)
class Prompt:
    """What a language model is to continue, and how."""

    text: str
    length: int
    """Tokens that are written."""
    temperature: float
    """0 = always the most probable one."""
    seed: int
    """Of the draws."""


def continued(session: Session, config: Config, model: nn.Module, prompt: Prompt) -> str:
    """A prompt and what a model of bytes makes of it.

    Raises:
        MantaError: its tokens are not bytes, or those of the prompt are not among them.
    """
    data = config.data
    if data.num_classes > 256:
        raise MantaError(
            f"data={data.name} has {data.num_classes} tokens, so they are not bytes, and how they are written is not known. "
            "With output= there are its predictions: python scripts/predict.py output=predictions.parquet"
        )
    start = torch.tensor(list(prompt.text.encode() or b"\n"), dtype=torch.int64)
    if int(start.max()) >= data.num_classes:
        raise MantaError(f"prompt={prompt.text!r} has bytes that are not among the {data.num_classes} tokens.")
    random = torch.Generator().manual_seed(prompt.seed)

    def bytes_only(tokens: Tensor) -> Tensor:  # a vocabulary may be larger than what is learned
        logits: Tensor = model(tokens)
        return logits[..., : data.num_classes]

    start, context = start.to(session.device), data.input_shape[0]
    found = generate(bytes_only, start, prompt.length, context, prompt.temperature, random)
    return bytes(found.tolist()).decode(errors="replace")
