"""recipe=script: a training script of your own, with a few lines changed. docs/recipes.md shows which."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from manta.config import Config
from manta.data import AnySet
from manta.errors import MantaError
from manta.recipes import Outline, Prediction
from manta.session import Session
from manta.targets import check_allowed, locate
from manta.training.checkpoint import load_checkpoint
from manta.training.parallel import bare, load_model, parallelise, whole
from manta.training.precision import Precision
from manta.training.record import Record
from manta.training.rng import rng_state, seed_everything, seed_rank, set_rng_state
from manta.training.sampler import mix


class Ended(BaseException):
    """Out of the script, when it is over before its last line; no Exception, so that no script holds it up."""

    def __init__(self, state: str) -> None:
        self.state = state


class Run:
    """What a script sees of Manta. Every rank calls `prepare`, `epochs` and `report` alike."""

    def __init__(self, session: Session, config: Config, record: Record | None, checkpoint: Path | None) -> None:
        """One of record and checkpoint: training, or one look at a checkpoint."""
        self.session, self.config, self.record = session, config, record
        self.device, self.rank, self.world_size = session.device, session.rank, session.world_size
        self.metrics: dict[str, float] | None = None
        """What was last reported."""
        self.precision = Precision.make(config.training.precision, session.device)
        self.skip = 0
        """Samples of the epoch that were used before it was resumed, and are still to be passed over."""
        self.counted: Shared | None = None
        """The DataLoader whose batches are steps."""
        self._checkpoint = checkpoint
        self._kept: dict[str, list[Any]] | None = None
        self._losses, self._logged = torch.zeros((), dtype=torch.float64, device=session.device), 0

    # --- before training -----------------------------------------------------------------------------------------

    def prepare(self, *things: Any) -> Any:
        """Models, optimizers, schedulers and DataLoaders, once and all together; they come back ready for this run.

        Models are moved to the device and, on several workers, wrapped in DistributedDataParallel. Of each batch of a DataLoader
        every worker gets its share, on the device; one that shuffles does it by (seed, epoch). All but the DataLoaders are
        part of checkpoints: they are restored here if the run continues, and the epoch goes on with the batches it has not
        seen. Those are batches of the first DataLoader that shuffles, which are the steps; another one that does begins its
        pass anew.
        """
        if self._kept is not None:
            raise MantaError("run.prepare was called twice. Give it everything at once.")
        kept: dict[str, list[Any]] = {"models": [], "optimizers": [], "schedulers": []}
        self._kept = kept
        ready = [self._ready(thing, kept) for thing in things]
        self._restore()
        return ready[0] if len(ready) == 1 else tuple(ready)

    def _ready(self, thing: Any, kept: dict[str, list[Any]]) -> Any:
        if isinstance(thing, nn.Module):
            kept["models"].append(thing)
            return self.distribute(thing)
        if isinstance(thing, Optimizer):
            kept["optimizers"].append(thing)
            return thing
        if isinstance(thing, LRScheduler):
            kept["schedulers"].append(thing)
            return thing
        if isinstance(thing, DataLoader):
            loader = Shared(thing, self)
            self.counted = self.counted or (loader if loader.trains else None)
            return loader
        raise MantaError(
            f"run.prepare was given a {type(thing).__name__}: it takes models, optimizers, schedulers and DataLoaders."
        )

    def distribute(self, model: nn.Module) -> nn.Module:
        """A model on the device, in `training.precision`, and on all ranks."""
        model = self.precision.cast(model.to(self.device))
        if self.precision.autocast is not None:
            model.forward = _autocast(model.forward, self.precision)
        trained = any(p.requires_grad for p in model.parameters())
        return parallelise(model, self.session, "ddp") if trained else model

    def _restore(self) -> None:
        seed_rank(self.config.seed, self.rank)
        if self._checkpoint is not None:
            self._load(load_checkpoint(self._checkpoint)[0], self._checkpoint)
        elif self.record is not None:
            self.record.restore(self._load)

    def _load(self, state: dict[str, Any], path: Path) -> None:
        assert self._kept is not None
        for kind, things in self._kept.items():
            found = state["learner"].get(kind, [])
            if len(found) != len(things):
                raise MantaError(f"Checkpoint {path.name} has {len(found)} {kind}, the script prepares {len(things)}.")
            for thing, values in zip(things, found, strict=True):
                try:
                    load_model(thing, values) if kind == "models" else thing.load_state_dict(values)
                except (RuntimeError, ValueError, KeyError) as error:
                    raise MantaError(f"Checkpoint {path.name} does not fit the script's {kind}: {error}") from error
        if self.record is None:
            return
        self.skip = self.record.progress.offset
        if len(state["ranks"]) == self.world_size:
            mine = state["ranks"][self.rank]
            set_rng_state(mine["rng"], self.device)
            self._losses.fill_(mine["losses"])
            self._logged = mine["logged"]
        else:
            seed_rank(self.config.seed, self.rank + 1_000_003 * (self.record.progress.step + 1))

    # --- training ------------------------------------------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs that are left, from 0. What an epoch left behind is saved when it is over."""
        if self._kept is None:
            raise MantaError("run.epochs was called before run.prepare: what is trained has to be known first.")
        if self.record is None:
            yield 0
            return
        progress, settings = self.record.progress, self.config.training
        while not self._over():
            self.metrics = None
            self.record.watch.start()
            yield progress.epoch
            self._end_epoch(self.record, settings.checkpoint.every_n_epochs)

    def _over(self) -> bool:
        assert self.record is not None
        settings, progress = self.config.training, self.record.progress
        return (
            (settings.epochs is not None and progress.epoch >= settings.epochs)
            or (settings.max_steps is not None and progress.step >= settings.max_steps)
            or self.record.out_of_patience
        )

    def _end_epoch(self, record: Record, every: int) -> None:
        record.watch.stop()
        progress, improved = record.progress, False
        if self.metrics is not None:
            improved = record.validated(self.metrics, progress.epoch + 1)
        progress.epoch, progress.offset = progress.epoch + 1, 0
        watched = self.session.watched and self.metrics is not None
        if improved or watched or record.save_due or self._over() or (every and progress.epoch % every == 0):
            self._save(record, improved)
        if watched and not self._over() and record.milestone():
            raise Ended("stopped")

    def _save(self, record: Record, best: bool) -> None:
        assert self._kept is not None
        mine = {"rng": rng_state(self.device), "losses": self._losses.item(), "logged": self._logged}
        ranks = self.session.gather(mine)
        state = {
            kind: [(bare(each) if kind == "models" else each).state_dict() for each in things]
            for kind, things in self._kept.items()
        }
        record.save(whole(state) if self.session.main else None, ranks, best)

    def report(self, metrics: dict[str, float]) -> None:
        """The epoch's validation, once an epoch; the objective's metric is one of them. Those of rank 0 count."""
        values = {name: float(value) for name, value in self.session.gather(dict(metrics))[0].items()}
        metric = self.config.objective.metric
        if metric not in values:
            raise MantaError(
                f"The script reports {', '.join(values) or 'nothing'}, not the objective {metric}. Report it, or set "
                "objective.metric (and objective.mode) to one that it does."
            )
        self.metrics = values
        if self.record is None:
            raise Ended("evaluated")

    def log(self, loss: Tensor | float) -> None:
        """The training loss of a step, if it is to be seen: every `training.log_every_n_steps` the mean since the last time."""
        self._losses += loss.detach() if isinstance(loss, Tensor) else loss
        self._logged += 1

    def backward(self, loss: Tensor) -> None:
        """loss.backward(), here; whatever a framework makes of it elsewhere."""
        loss.backward()

    def sum(self, value: Tensor | float) -> float:
        """Of all workers, on each."""
        return float(self.session.sum(torch.as_tensor(value, dtype=torch.float64)))

    def mean(self, total: Tensor | float, count: Tensor | float) -> float:
        """All workers' totals by all their counts."""
        return self.sum(total) / self.sum(count)

    def stepped(self, samples: int) -> None:
        """A training batch is done: count it, and end here if asked to."""
        assert self.record is not None
        record, progress, settings = self.record, self.record.progress, self.config.training
        progress.step += 1
        progress.offset += samples
        record.watch.samples += samples
        self.session.pulse.step, self.session.pulse.warm = progress.step, True
        if progress.step % settings.log_every_n_steps == 0 and self._logged:
            record.report("train", {"train/loss": self.mean(self._losses, self._logged)}, progress.epoch + 1)
            self._losses.zero_()
            self._logged = 0
        stop, due = record.agree(progress.step)
        every = settings.checkpoint.every_n_steps
        if stop or due or (every is not None and progress.step % every == 0):
            self._save(record, False)
        if stop:
            raise Ended("interrupted")

    @property
    def counting(self) -> bool:
        """Whether the script trains now, so that a batch is a step."""
        return (
            self.record is not None
            and torch.is_grad_enabled()
            and any(m.training for m in (self._kept or {})["models"])
        )


class Shared:
    """A DataLoader of which this rank gets its share; a pass over one that shuffles is (a part of) an epoch of training."""

    def __init__(self, loader: "DataLoader[Any]", run: Run) -> None:
        if loader.batch_size is None or not isinstance(loader.batch_sampler, BatchSampler):
            raise MantaError("run.prepare takes a DataLoader with a batch_size over a data set that has a length.")
        self.run, self.dataset, self.batch_size = run, loader.dataset, loader.batch_size
        self.trains = isinstance(loader.sampler, RandomSampler)
        sampler: Any = None if self.trains else loader.sampler
        self.shares = _Shares(len(loader.dataset), sampler, loader.batch_size, loader.drop_last, run)  # type: ignore[arg-type]
        # Else every pass would draw from the global generator, and a resumed epoch draw once more than an undisturbed one.
        self.generator = torch.Generator()
        self.inner: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self.shares,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            generator=self.generator,
        )

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[Any]:
        run = self.run
        if self.trains and run.record is None:
            return
        counting = self is run.counted and run.counting
        self.shares.skip = min(run.skip, sum(self.shares.sizes())) if counting else 0
        run.skip -= self.shares.skip
        epoch = 0 if run.record is None else run.record.progress.epoch
        self.generator.manual_seed(mix(run.config.seed, run.rank, epoch))
        sizes = iter(self.shares.left())
        for batch in self.inner:
            run.session.pulse("in the script")
            yield _moved(batch, run.device, run.precision.dtype)
            if counting:
                run.stepped(next(sizes))


class _Shares(Sampler[list[int]]):
    """This rank's share of every batch: each has at least one sample on every rank, so a last one that is too small for that is
    part of the one before."""

    def __init__(self, size: int, sampler: Sampler[int] | None, batch: int, drop_last: bool, run: Run) -> None:
        """sampler: the order; None = shuffled by (seed, epoch)."""
        self.size, self.sampler, self.batch, self.drop_last, self.run = size, sampler, batch, drop_last, run
        self.skip = 0
        """Samples to pass over."""
        if min(size, batch) < run.world_size:
            raise MantaError(
                f"A DataLoader of the script gives batches of {min(size, batch)}, fewer than {run.world_size} workers: each "
                f"needs a sample. Set scaling.num_workers={min(size, batch)}, or make the batch larger."
            )

    def sizes(self) -> list[int]:
        """Samples of each batch, of all ranks together."""
        length = self.size if self.sampler is None else len(self.sampler)  # type: ignore[arg-type]
        whole, rest = divmod(length, self.batch)
        sizes = [self.batch] * whole + ([rest] if rest and not self.drop_last else [])
        if len(sizes) > 1 and sizes[-1] < self.run.world_size:
            sizes[-2:] = [sizes[-2] + sizes[-1]]
        settings = self.run.config.training
        limit = settings.limit_train_batches if self.sampler is None else settings.limit_eval_batches
        return sizes[:limit]

    def left(self) -> list[int]:
        """`sizes` without those of batches that were used, and of those after the last step of the training."""
        sizes, skipped = self.sizes(), 0
        while sizes and skipped < self.skip:
            skipped += sizes.pop(0)
        most, record = self.run.config.training.max_steps, self.run.record
        if self.sampler is None and most is not None and record is not None:
            return sizes[: most - record.progress.step]
        return sizes

    def __len__(self) -> int:
        return len(self.sizes())

    def __iter__(self) -> Iterator[list[int]]:
        run, start = self.run, self.skip
        if self.sampler is not None:
            order = list(self.sampler)
        else:
            epoch = 0 if run.record is None else run.record.progress.epoch
            generator = torch.Generator().manual_seed(mix(run.config.seed, epoch))
            order = torch.randperm(self.size, generator=generator).tolist()
        for size in self.left():
            yield order[start : start + size][run.rank :: run.world_size]
            start += size


def _moved(value: Any, device: torch.device | None, dtype: torch.dtype) -> Any:
    """Tensors in tuples, lists and dictionaries on the device, those of numbers in a dtype."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)
    if isinstance(value, dict):
        return {key: _moved(each, device, dtype) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_moved(each, device, dtype) for each in value]
    return value


def _autocast(forward: Callable[..., Any], precision: Precision) -> Callable[..., Any]:
    """A forward pass in lower precision whose results are not."""

    def cast(*args: Any, **kwargs: Any) -> Any:
        with precision.context():
            found = forward(*args, **kwargs)
        return _moved(found, found.device if isinstance(found, Tensor) else None, precision.dtype)

    return cast


class Script:
    """`recipe=script`; see `manta.recipes.Recipe` for what each method does."""

    def __init__(self, main: str) -> None:
        """main: dotted name of a function that takes a `Run`."""
        self.main = main

    def run(self, session: Session, config: Config, record: Record | None, checkpoint: Path | None) -> Run:
        return Run(session, config, record, checkpoint)

    def check(self, config: Config, look_at_data: bool) -> Outline:  # noqa: ARG002
        self._function(config)
        refuse_what_scripts_decide(config)
        return Outline([("script", self.main), ("training", f"{config.training.epochs or '-'} epochs at most")])

    def _function(self, config: Config) -> Callable[[Run], Any]:
        key = "recipe.settings.main"
        check_allowed(key, {"_target_": self.main}, config.allowed_targets)
        function = locate(key, self.main, config.allowed_targets)
        try:
            inspect.signature(function).bind(None)
        except TypeError as error:
            raise MantaError(f"{key}={self.main} must take one argument, the run: {error}.") from error
        return function

    def train(self, session: Session, config: Config) -> dict[str, Any]:
        record = Record(session, config)
        try:
            seed_everything(config.seed)  # the weights: equal on every rank, whatever the number of ranks
            try:
                self._function(config)(self.run(session, config, record, None))
                state = "finished"
            except Ended as ended:
                state = ended.state
            if state == "finished" and record.progress.validated < 0:
                raise MantaError(
                    f"{self.main} is over and has reported no {config.objective.metric}. It must loop over run.epochs() and "
                    "call run.report({...}) in each."
                )
            record.settle()
            return record.finish(state, {})
        finally:
            record.close()

    def evaluate(self, session: Session, config: Config, checkpoint: Path, splits: list[str]) -> dict[str, float]:
        """The script itself, with nothing to train on, up to its first report."""
        run = self.run(session, config, None, checkpoint)
        seed_everything(config.seed)
        with suppress(Ended):
            self._function(config)(run)
        if run.metrics is None:
            raise MantaError(f"{self.main} reported nothing.")
        found = {key: value for key, value in run.metrics.items() if not splits or key.partition("/")[0] in splits}
        if not found:
            raise MantaError(f"splits={splits}: {self.main} reports {', '.join(run.metrics)}.")
        return found

    def predict(self, session: Session, config: Config, checkpoint: Path, dataset: AnySet) -> Iterator[Prediction]:  # noqa: ARG002
        raise MantaError(
            f"{config.recipe._target_.rpartition('.')[2]}: how {self.main} predicts is not known. Load its weights: "
            "torch.load(checkpoints/best/state.pt, weights_only=True)['learner']['models'][0]"
        )


def refuse_what_scripts_decide(config: Config) -> None:
    """Settings that only a loop of Manta's own can follow.

    Raises:
        MantaError: one of them is set.
    """
    training = config.training
    wrong = {
        "training.ema.enabled=true": training.ema.enabled,
        "training.compile=true": training.compile,
        "training.profile=true": training.profile,
        f"training.overfit_batches={training.overfit_batches}": training.overfit_batches is not None,
        f"training.label_smoothing={training.label_smoothing}": training.label_smoothing != 0,
        f"data.micro_batch_size={config.data.micro_batch_size}": config.data.micro_batch_size is not None,
        f"scaling.strategy={config.scaling.strategy}": config.scaling.strategy != "ddp",
        "data.engine=ray": config.data.engine == "ray",
        f"tracking.watch={config.tracking.watch}": config.tracking.watch is not None,
    }
    if found := [setting for setting, is_set in wrong.items() if is_set]:
        raise MantaError(
            f"{found[0]}: a script decides that itself. Leave it out, or take recipe=pytorch, whose loop does it."
        )
