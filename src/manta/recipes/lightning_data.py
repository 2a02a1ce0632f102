"""Data for Lightning: any DataLoader shared out over ranks without padding, in an order that a resume can repeat.

Lightning's own DistributedSampler repeats samples until ranks have equally many, in evaluation too, and a DataLoader that
shuffles begins another order after a resume.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from manta.config import Config
from manta.data import Splits
from manta.errors import MantaError
from manta.session import Session
from manta.training.evaluation import make_loader
from manta.training.loader import Plan, SeededSamples
from manta.training.record import Progress
from manta.training.rng import seeded
from manta.training.sampler import epoch_order, micro_batches, mix

SPLITS = ("train", "val", "test")
Read = Callable[[Iterable[Tensor], int], Iterator[Any]]
"""(index tensors, epoch) -> their batches."""


class Piece(NamedTuple):
    """One forward pass of this rank: its part of a global batch."""

    indices: Tensor
    size: int
    """Samples in the global batch."""
    mine: int
    """How many of them are here; 0 = a stand-in."""
    last: bool
    """The optimizer steps after it."""


class TrainBatches:
    """One rank's pieces of the epoch that the run is in, from where it is; read one at a time."""

    def __init__(self, shares: "Shares", plan: "Plans", read: Read, before_batch: Callable[[], None]) -> None:
        session, config = shares.session, shares.config
        self.session, self.config, self.progress = session, config, shares.progress
        self.plan, self.read, self.before_batch = plan, read, before_batch
        self.current: Piece | None = None
        """What was given out last."""
        largest, micro_size = max(map(len, self._batches(0))), config.data.micro_batch_size
        assert not isinstance(micro_size, str), "refused"
        self.parts = len(micro_batches(torch.arange(largest), 0, session.world_size, micro_size))
        """Forward passes of a full step."""

    def _batches(self, epoch: int) -> list[Tensor]:
        settings = self.config.training
        limits = [limit for limit in (settings.limit_train_batches, settings.overfit_batches) if limit is not None]
        # Overfitting takes the same batches in every epoch.
        batches = self.plan(None if settings.overfit_batches is not None else epoch)
        return batches[: min(limits, default=None)]

    def _pieces(self, epoch: int, offset: int) -> Iterator[Piece]:
        micro_size, session, seen = self.config.data.micro_batch_size, self.session, 0
        assert not isinstance(micro_size, str), "refused"
        for batch in self._batches(epoch):
            seen += len(batch)
            if seen <= offset:
                continue
            micros = micro_batches(batch, session.rank, session.world_size, micro_size)
            for index, micro in enumerate(micros):
                mine = len(micro.indices) if micro.real else 0
                yield Piece(micro.indices, len(batch), mine, index == len(micros) - 1)

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        return len(self._batches(self.progress().epoch))

    @property
    def samples(self) -> int:
        """Of this epoch, on all ranks."""
        return sum(map(len, self._batches(self.progress().epoch)))

    def __len__(self) -> int:
        return sum(1 for _ in self._pieces(self.progress().epoch, 0))

    def __iter__(self) -> Iterator[Any]:
        progress = self.progress()
        epoch = progress.epoch
        pieces, ahead = itertools.tee(self._pieces(epoch, progress.offset))
        batches = self.read((piece.indices for piece in ahead), epoch)
        for piece in pieces:
            self.before_batch()
            self.current = piece
            self.session.pulse("loading a batch")
            yield next(batches)


class EvalBatches:
    """One rank's share of a split; every rank has as many batches, none of them empty.

    Raises:
        MantaError: there are fewer samples than ranks.
    """

    def __init__(self, session: Session, config: Config, order: Tensor, batch: int, read: Read) -> None:
        """batch: samples of this rank in a batch at most; order: of all samples."""
        ranks = session.world_size
        if len(order) < ranks:
            raise MantaError(
                f"scaling.num_workers={ranks}: a split of {len(order)} samples cannot be evaluated by so many workers."
            )
        share = order[session.rank :: ranks]
        count = min(math.ceil(math.ceil(len(order) / ranks) / batch), len(order) // ranks)
        self.chunks = list(torch.tensor_split(share, count))[: config.training.limit_eval_batches]
        self.read = read
        self.samples = sum(map(len, self.chunks))

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[Any]:
        return self.read(iter(self.chunks), 0)


class Plans:
    """The global batches of each epoch of a DataLoader: a function of (seed, epoch) alone."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self.loader, self.seed = loader, seed
        sampler, batches = loader.sampler, loader.batch_sampler
        whole = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
        self.shuffled = whole and type(batches) is BatchSampler
        self._known: tuple[int, list[Tensor]] | None = None

    def __call__(self, epoch: int | None) -> list[Tensor]:
        """epoch: None = the data set's own order."""
        key = -1 if epoch is None else epoch
        if self._known is None or self._known[0] != key:
            self._known = key, self._make(epoch)
        return self._known[1]

    def _make(self, epoch: int | None) -> list[Tensor]:
        loader, size = self.loader, len(self.loader.dataset)  # type: ignore[arg-type]
        if loader.batch_size is not None and (self.shuffled or epoch is None):
            order = torch.arange(size) if epoch is None else epoch_order(size, self.seed, epoch)
            batches = list(order.split(loader.batch_size))
            return batches[:-1] if loader.drop_last and len(batches[-1]) < loader.batch_size else batches
        seed = mix(self.seed, epoch or 0)
        samplers: tuple[Any, ...] = loader.sampler, loader.batch_sampler
        for sampler in samplers:
            if getattr(sampler, "generator", None) is not None:
                sampler.generator.manual_seed(seed)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch or 0)
        assert loader.batch_sampler is not None, "refused"
        with seeded(seed):
            return [torch.as_tensor(list(batch)) for batch in itertools.islice(loader.batch_sampler, len(loader))]


class Shares:
    """Takes what a LightningDataModule gives, and gives each rank its share."""

    def __init__(self, session: Session, config: Config, progress: Callable[[], Progress]) -> None:
        self.session, self.config, self.progress = session, config, progress
        self.train: TrainBatches | None = None
        self.before_batch: Callable[[Trainer], None] = lambda _: None
        """Called before a batch of training is read."""
        self.samples = 0
        """Of this rank, in the split that is evaluated."""

    def of(self, datamodule: LightningDataModule) -> LightningDataModule:
        """The same module, its DataLoaders replaced where it gives them out."""
        for split in SPLITS:
            name = f"{split}_dataloader"
            if is_overridden(name, datamodule):
                setattr(datamodule, name, self._replacing(datamodule, getattr(datamodule, name), split))
        return datamodule

    def _replacing(self, datamodule: LightningDataModule, give: Callable[[], Any], split: str) -> Callable[[], Any]:
        def replaced() -> Any:
            given = give()
            loaders = given if isinstance(given, list | tuple) and split != "train" else [given]
            for loader in loaders:
                _check(loader, split)
            if split == "train":
                return self.training(datamodule, Plans(given, self.config.seed), _reader(given, self.config.seed))
            found = [self._evaluating(loader) for loader in loaders]
            self.samples = sum(each.samples for each in found)
            return found if loaders is given else found[0]

        return replaced

    def training(self, datamodule: LightningDataModule, plan: Plans, read: Read) -> TrainBatches:
        trainer = datamodule.trainer
        assert trainer is not None
        self.train = TrainBatches(self, plan, read, lambda: self.before_batch(trainer))
        trainer.accumulate_grad_batches = self.train.parts
        return self.train

    def _evaluating(self, loader: DataLoader[Any]) -> EvalBatches:
        batches = Plans(loader, self.config.seed)(0)
        largest = math.ceil(max(map(len, batches)) / self.session.world_size)
        return EvalBatches(self.session, self.config, torch.cat(batches), largest, _reader(loader, self.config.seed))


def _check(loader: Any, split: str) -> None:
    """What cannot be shared out exactly.

    Raises:
        MantaError: it is no DataLoader over a data set with a length, or shares out itself.
    """
    where = f"recipe.settings.datamodule: {split}_dataloader gives"
    if not isinstance(loader, DataLoader):
        raise MantaError(f"{where} a {type(loader).__name__}; it must be a torch.utils.data.DataLoader.")
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise MantaError(
            f"{where} one over an IterableDataset, or without batches of its own; only samples with numbers can be shared out "
            "and found again after a resume: use a map-style Dataset and a batch_size."
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise MantaError(
            f"{where} one with a DistributedSampler, but every batch is shared out over the workers already. Leave it out "
            "(shuffle=True); batch_size is that of all workers together."
        )


def _reader(loader: DataLoader[Any], seed: int) -> Read:
    """Reads any samples of a DataLoader's data set as it would, each with generators seeded by (seed, epoch, index)."""
    plan = Plan()
    workers = loader.num_workers
    reading: DataLoader[Any] = DataLoader(
        SeededSamples(loader.dataset, seed),
        batch_sampler=plan,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # else starting the workers would draw from the generator of dropout
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=workers > 0,
    )

    def read(indices: Iterable[Tensor], epoch: int) -> Iterator[Any]:
        plan.chunks = (list(zip([epoch] * len(chunk), chunk.tolist(), strict=True)) for chunk in indices)
        yield from reading

    return read


class MantaData(LightningDataModule):
    """`data=` of the configuration: batches (inputs, targets) as `recipe=pytorch` has them, on the device already."""

    def __init__(self, shares: Shares, splits: Splits) -> None:
        super().__init__()
        self.shares, self.splits = shares, splits

    def _read(self, split: str) -> Read:
        return make_loader(self.shares.session, self.shares.config, self.splits, split).batches

    def train_dataloader(self) -> TrainBatches:
        config = self.shares.config
        samples: Any = range(len(self.splits.train))  # type: ignore[arg-type]
        plan = Plans(DataLoader(samples, batch_size=config.data.batch_size, shuffle=True), config.seed)
        return self.shares.training(self, plan, self._read("train"))

    def _evaluating(self, split: str) -> EvalBatches:
        session, config = self.shares.session, self.shares.config
        data = config.data
        assert not isinstance(data.micro_batch_size, str), "refused"
        batch = data.eval_batch_size or data.micro_batch_size or math.ceil(data.batch_size / session.world_size)
        order = torch.arange(len(getattr(self.splits, split)))
        found = EvalBatches(session, config, order, batch, self._read(split))
        self.shares.samples = found.samples
        return found

    def val_dataloader(self) -> EvalBatches:
        return self._evaluating("val")

    def test_dataloader(self) -> EvalBatches:
        return self._evaluating("test")
