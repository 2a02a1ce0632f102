"""`recipe=transformers`: models of Hugging Face, trained by its Trainer, with Manta's scaling, search, tracking and resume."""

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manta.config import Config
from manta.data import AnySet, Splits
from manta.errors import FAILED, MantaError
from manta.recipes import Outline, Prediction
from manta.recipes.extras import needs, use_device

needs("transformers", "transformers", "accelerate")

import transformers  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from transformers import AutoConfig, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from manta.data.load import load_splits  # noqa: E402
from manta.session import Session  # noqa: E402
from manta.targets import bind  # noqa: E402
from manta.training.checkpoint import find_checkpoint  # noqa: E402
from manta.training.evaluation import Evaluator, Prompt, continued, make_loader, predictions, to_evaluate  # noqa: E402
from manta.training.learner import build_optimizer, build_scheduler  # noqa: E402
from manta.training.loop import epoch_length, training_length  # noqa: E402
from manta.training.precision import Precision  # noqa: E402
from manta.training.record import Record  # noqa: E402
from manta.training.rng import seed_everything, seed_rank, set_rng_state  # noqa: E402
from manta.training.sampler import epoch_order  # noqa: E402
from manta.training.tasks import Classification, LanguageModeling, Task, make_task  # noqa: E402

SMALL = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 128,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
# Prefixes of arguments that other settings decide, and which.
INSTEAD = {
    "adam_": "optimizer",
    "auto_find_batch_size": "data.micro_batch_size=auto with recipe=pytorch",
    "bf16": "training.precision",
    "data_seed": "seed",
    "dataloader_": "data",
    "ddp_backend": "scaling",
    "deepspeed": "scaling",
    "disable_tqdm": "tracking",
    "do_": "nothing, it is done",
    "eval_": "training.val_every_n_epochs",
    "fp16": "training.precision",
    "fsdp": "scaling",
    "full_determinism": "training.deterministic",
    "gradient_accumulation_steps": "data.micro_batch_size",
    "group_by_length": "data",
    "ignore_data_skip": "nothing, resume is exact",
    "label_smoothing_factor": "training.label_smoothing",
    "learning_rate": "optimizer.lr",
    "load_best_model_at_end": "nothing, the best is kept",
    "log": "training.log_every_n_steps",
    "lr_scheduler": "scheduler",
    "max_grad_norm": "training.grad_clip_norm",
    "max_steps": "training.max_steps",
    "num_train_epochs": "training.epochs",
    "optim": "optimizer",
    "output_dir": "storage.path",
    "overwrite_output_dir": "storage.path",
    "per_device_": "data.batch_size",
    "push_to_hub": "scripts of your own, from checkpoints/best",
    "report_to": "tracking",
    "resume_from_checkpoint": "resume",
    "run_name": "name",
    "save_": "training.checkpoint",
    "seed": "seed",
    "torch_compile": "recipe=pytorch",
    "use_cpu": "scaling.use_gpu",
    "warmup_": "scheduler",
    "weight_decay": "optimizer.weight_decay",
}


class Logits(nn.Module):
    """A model of Hugging Face as `manta.training` knows models: token ids (n, length) -> logits."""

    def __init__(self, model: nn.Module, padded: bool) -> None:
        """padded: a token 0 is none."""
        super().__init__()
        self.model, self.padded = model, padded

    def forward(self, inputs: Tensor) -> Tensor:
        mask = {"attention_mask": (inputs != 0).long()} if self.padded else {}
        return self.model(input_ids=inputs, **mask).logits


class TransformersRecipe:
    """See `manta.recipes.Recipe` for what each method does, and docs/recipes.md for what Hugging Face changes."""

    def __init__(self, model: Any = None, arguments: dict[str, Any] | None = None) -> None:
        """
        Args:
            model: a dictionary with `model_type` and other values of the model's configuration; or a name of the hub or
                a folder, whose weights are where training starts. None = a small GPT-2.
            arguments: more of transformers.TrainingArguments.
        """
        self.model, self.arguments = SMALL if model is None else model, arguments or {}

    # --- before ------------------------------------------------------------------------------------------------------

    def check(self, config: Config, look_at_data: bool) -> Outline:
        task = make_task(config)
        self._refuse(config, task)
        for name in self.arguments:
            instead = next((key for prefix, key in INSTEAD.items() if name.startswith(prefix)), None)
            if instead is not None:
                raise MantaError(
                    f"recipe.settings.arguments.{name}={self.arguments[name]} is for Manta to decide: use {instead}."
                )
        bind("recipe.settings.arguments", TrainingArguments, (), self.arguments)
        rows = []
        optimized: nn.Module = nn.Linear(1, 1)
        if isinstance(self.model, dict) or look_at_data:
            with torch.device("meta"):
                optimized = self._model(config, task, meant=True)
            parameters = sum(p.numel() for p in optimized.parameters())
            rows.append(("model", f"{type(optimized).__name__}, {parameters:,} parameters"))
        else:
            rows.append(("model", str(self.model)))
        size = 1
        if look_at_data:
            splits = self._splits(config)
            parts = {name: getattr(splits, name) for name in ("train", "val", "test")}
            shown = ", ".join(f"{name} {len(part):,}" for name, part in parts.items() if part is not None)
            rows.append(("data", f"{config.data.name}: {shown}"))
            size = len(splits.train)  # type: ignore[arg-type]
        total = training_length(config, size)
        build_scheduler(config, build_optimizer(config, optimized), total)
        if look_at_data:
            rows.append(("training", f"{total['epoch']} epochs, {total['step']:,} steps, {config.training.precision}"))
        return Outline(rows, total["step"] if look_at_data else None)

    def _refuse(self, config: Config, task: Task) -> None:
        """Settings that would be ignored.

        Raises:
            MantaError: naming the first.
        """
        if config.data.input_dtype != "int64" or not isinstance(task, LanguageModeling | Classification):
            raise MantaError(
                f"data={config.data.name} with {type(task).__name__}: recipe=transformers takes token ids (data.input_dtype="
                "int64), for recipe/task=language_modeling or classification. Add data=text or data=snippets."
            )
        training, unit = config.training, config.scheduler["unit"]
        refused = {
            "scaling.strategy=fsdp2": (config.scaling.strategy == "fsdp2", "scaling.strategy=ddp"),
            "data.micro_batch_size=auto": (config.data.micro_batch_size == "auto", "a number, or null"),
            "training.ema.enabled=true": (training.ema.enabled, "training.ema.enabled=false, or recipe=pytorch"),
            "training.compile=true": (training.compile, "training.compile=false, or recipe=pytorch"),
            "training.profile=true": (training.profile, "training.profile=false, or recipe=pytorch"),
            "data.engine=ray": (config.data.engine == "ray", "data.engine=torch, or recipe=pytorch"),
            f"tracking.watch={config.tracking.watch}": (config.tracking.watch is not None, "tracking.watch=null"),
            f"scheduler.unit={unit}": (unit != "step", "a schedule by steps (scheduler=cosine, wsd or constant)"),
        }
        for setting, (given, instead) in refused.items():
            if given:
                raise MantaError(f"{setting} is not for recipe=transformers: {instead}.")

    # --- parts -------------------------------------------------------------------------------------------------------

    def _splits(self, config: Config) -> Splits:
        return load_splits(config.data, config.allowed_targets, make_task(config).check_targets)

    def _model(self, config: Config, task: Task, checkpoint: Path | None = None, meant: bool = False) -> nn.Module:
        """The model at its start, or with the weights of a checkpoint.

        Args:
            meant: only what it will be: without the weights of a hub or a folder.

        Raises:
            MantaError: Hugging Face does not know it, cannot get it, or refuses its values.
        """
        classes = isinstance(task, Classification)
        auto: Any = transformers.AutoModelForSequenceClassification if classes else transformers.AutoModelForCausalLM
        more = {"num_labels": config.data.num_classes, "pad_token_id": 0} if classes else {}
        quiet()
        try:
            if checkpoint is not None:
                return auto.from_pretrained(checkpoint, **more)
            if isinstance(self.model, str):
                if meant:
                    return auto.from_config(AutoConfig.from_pretrained(self.model, **more))
                # As saved it may be in half precision, which optimizers do not train well; autocast halves what may be.
                return auto.from_pretrained(self.model, dtype=torch.float32, **more)
            values = {"vocab_size": config.data.num_classes if not classes else 256, **more, **self.model}
            return auto.from_config(AutoConfig.for_model(values.pop("model_type", ""), **values))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise MantaError(f"recipe.settings.model={self.model}: {str(error).strip()[:500]}") from error

    def train(self, session: Session, config: Config) -> dict[str, Any]:
        return _Run(self, session, config).run()

    def _logits(self, session: Session, config: Config, checkpoint: Path) -> nn.Module:
        task = make_task(config)
        model = self._model(config, task, checkpoint)
        cast = Precision.make(config.training.precision, session.device).cast
        return Logits(cast(model.to(session.device)), isinstance(task, Classification)).eval()

    def evaluate(self, session: Session, config: Config, checkpoint: Path, splits: list[str]) -> dict[str, float]:
        data = self._splits(config)
        splits = to_evaluate(config, data, splits)
        evaluator, model = (
            Evaluator(session, config, data, make_task(config)),
            self._logits(session, config, checkpoint),
        )
        found: dict[str, float] = {}
        for split in splits:
            found |= evaluator(model, split)
        return found

    def predict(self, session: Session, config: Config, checkpoint: Path, dataset: AnySet) -> Iterator[Prediction]:
        return predictions(session, config, self._logits(session, config, checkpoint), dataset, make_task(config))

    def generate(self, session: Session, config: Config, checkpoint: Path, prompt: Prompt) -> str:
        return continued(session, config, self._logits(session, config, checkpoint), prompt)


def quiet() -> None:
    """No banners, warnings or bars of Hugging Face."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


class _Batches:
    """One rank's micro-batches of the epoch that the run is in, from where it is; equally many in every step."""

    def __init__(self, run: "_Run") -> None:
        self.run = run
        self.loader = make_loader(run.session, run.config, run.splits, "train")

    def __len__(self) -> int:
        return epoch_length(self.run.config, self.run.size)[1] * self.run.parts

    def _steps(self) -> Iterator[tuple[int, list[Tensor]]]:
        """(samples of a global batch, this rank's parts of it); a part may be empty."""
        config, session, progress = self.run.config, self.run.session, self.run.record.progress
        samples, _ = epoch_length(config, self.run.size)
        if config.training.overfit_batches is not None:
            order = torch.arange(samples)
        else:
            order = epoch_order(self.run.size, config.seed, progress.epoch)[:samples]
        for batch in order[progress.offset :].split(config.data.batch_size):
            share = batch[session.rank :: session.world_size]
            yield len(batch), list(torch.tensor_split(share, self.run.parts))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.run.use_rng()
        steps, ahead = itertools.tee(self._steps())
        stand_in = torch.zeros(1, dtype=torch.int64)
        asked = (part if len(part) else stand_in for _, parts in ahead for part in parts)
        batches = self.loader.batches(asked, self.run.record.progress.epoch)
        for size, parts in steps:
            for part in parts:
                self.run.session.pulse("loading a batch")
                inputs, targets = next(batches)
                yield {"input_ids": inputs, "targets": targets, "size": size, "mine": len(part)}


class _Trainer(Trainer):
    """Hugging Face's, fed with our batches and asked for the loss of our task."""

    loss_is_scaled_for_ga = True  # by `compute_loss`

    def __init__(self, run: "_Run", **arguments: Any) -> None:
        self.run = run
        super().__init__(**arguments)

    def get_train_dataloader(self) -> Any:
        return _Batches(self.run)

    def num_examples(self, dataloader: Any) -> int:  # noqa: ARG002
        return self.run.size

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """Gradients are those of the mean over all samples of the global batch: ranks are averaged, not summed."""
        run = self.run
        run.session.pulse("in the training step")
        mask = {"attention_mask": (inputs["input_ids"] != 0).long()} if run.padded else {}
        outputs = model(input_ids=inputs["input_ids"], **mask)
        loss = run.task.loss(outputs.logits, inputs["targets"])
        run.add(loss.detach() if inputs["mine"] else torch.zeros_like(loss.detach()), inputs["size"])
        return loss * (run.session.world_size / inputs["size"] if inputs["mine"] else 0.0)


class _Run:
    """One rank's training of one run."""

    def __init__(self, recipe: TransformersRecipe, session: Session, config: Config) -> None:
        self.recipe, self.session, self.config = recipe, session, config
        self.task, self.splits = make_task(config), recipe._splits(config)
        self.padded = isinstance(self.task, Classification)
        self.size = len(self.splits.train)  # type: ignore[arg-type]
        self.total = training_length(config, self.size)
        share, micro = math.ceil(config.data.batch_size / session.world_size), config.data.micro_batch_size
        assert not isinstance(micro, str), "refused"
        self.parts = math.ceil(share / micro) if micro else 1
        self.losses = torch.zeros(2, dtype=torch.float64, device=session.device)  # of this window, of this epoch
        self.record = Record(session, config)
        self.evaluate = Evaluator(session, config, self.splits, self.task)
        self.step_size = 0
        self.state = "finished"
        self.checkpoint: Path | None = None
        self._rng: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        """Train from the `last` checkpoint if there is one; what a recipe's `train` returns."""
        session, config, record = self.session, self.config, self.record
        if config.training.deterministic:
            torch.use_deterministic_algorithms(True)
        try:
            record.restore(self._load)
            self.trainer = self._trainer()
            seed_rank(config.seed, session.rank)  # the Trainer has seeded everything
            if not self.done:
                record.agree.begin(record.progress.step)
                self.trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
            record.settle()
            look = self.state == "finished" and config.training.test and not session.watched
            return record.finish(self.state, self._test() if look else {})
        finally:
            record.close()

    def _trainer(self) -> _Trainer:
        config, session, settings = self.config, self.session, self.config.training
        seed_everything(config.seed)  # the weights: equal on every rank
        precision = Precision.make(settings.precision, session.device)
        model = precision.cast(self.recipe._model(config, self.task).to(session.device))
        optimizer = build_optimizer(config, model)
        use_device(session.device.type)
        AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier run in this process
        cpu = session.device.type == "cpu"
        arguments = TrainingArguments(
            output_dir=str(session.run.path),
            per_device_train_batch_size=math.ceil(config.data.batch_size / session.world_size / self.parts),
            gradient_accumulation_steps=self.parts,
            num_train_epochs=self.total["epoch"],
            max_steps=self.total["step"],
            max_grad_norm=settings.grad_clip_norm or 0.0,
            bf16=settings.precision == "bf16",
            fp16=settings.precision == "fp16",
            use_cpu=cpu,
            ddp_backend="gloo" if cpu and session.world_size > 1 else None,
            seed=config.seed,
            ignore_data_skip=True,  # our batches begin where the run is
            eval_strategy="no",
            save_strategy="no",
            logging_strategy="no",
            logging_nan_inf_filter=False,
            report_to=[],
            disable_tqdm=True,
            log_level="error",
            log_level_replica="error",
            **self.recipe.arguments,
        )
        scheduler: Any = build_scheduler(config, optimizer, self.total)
        trainer = _Trainer(
            self, model=model, args=arguments, callbacks=[_Keeps(self)], optimizers=(optimizer, scheduler)
        )
        trainer.remove_callback(transformers.PrinterCallback)
        quiet()
        return trainer

    @property
    def model(self) -> nn.Module:
        model: Any = self.trainer.model
        return model

    @property
    def done(self) -> bool:
        epochs, progress = self.config.training.epochs, self.record.progress
        return (
            progress.validated == progress.step and (progress.step >= self.total["step"] or self.record.out_of_patience)
        ) or (epochs is not None and progress.epoch >= epochs)

    # --- one step ----------------------------------------------------------------------------------------------------

    def add(self, loss: Tensor, size: int) -> None:
        """Of a micro-batch, summed over its samples; size: of the global batch."""
        self.losses += loss
        self.step_size = size

    def guard(self) -> None:
        """Before the optimizer's step.

        Raises:
            MantaError: the gradient is not finite; the weights are untouched.
        """
        if not self.config.training.nonfinite_guard or self.config.training.precision == "fp16":
            return
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not torch.isfinite(torch.nn.utils.get_total_norm(gradients)).item():
            raise MantaError(
                f"Training diverged: the gradient is not finite at step {self.record.progress.step + 1} on rank "
                f"{self.session.rank}. Nothing was overwritten. Try a lower optimizer.lr or training.grad_clip_norm=1.0, and "
                f"continue from the last checkpoint, if there is one: python train.py resume={self.session.run}",
                code=FAILED,
            )

    def after_step(self) -> bool:
        """Account for a step; whether this part of the training ends here."""
        progress, settings, record = self.record.progress, self.config.training, self.record
        progress.step += 1
        progress.offset += self.step_size
        progress.window += self.step_size
        record.watch.samples += self.step_size
        self.session.pulse.step, self.session.pulse.warm = progress.step + 1, True
        if progress.step % settings.log_every_n_steps == 0:
            found = {"train/loss": self._sum(0) / progress.window, "train/lr": self._lr()}
            record.report("train", found, progress.epoch + 1)
            self.losses[0], progress.window = 0.0, 0
        stop, due = record.agree(progress.step)
        every = settings.checkpoint.every_n_steps
        record.save_due |= due or (every is not None and progress.step % every == 0)
        if stop:
            self.state = "interrupted"
            self.save()
        elif record.save_due and not self.epoch_over:
            self.save()
        return stop

    @property
    def epoch_over(self) -> bool:
        samples, _ = epoch_length(self.config, self.size)
        return self.record.progress.offset >= samples or self.record.progress.step >= self.total["step"]

    def _sum(self, index: int) -> float:
        return float(self.session.sum(self.losses[index]).item())

    def _lr(self) -> float:
        assert self.trainer.optimizer is not None
        return float(self.trainer.optimizer.param_groups[0]["lr"])

    # --- the end of an epoch -----------------------------------------------------------------------------------------

    def after_epoch(self) -> bool:
        """Validate and write a checkpoint where they are due; whether the training ends here."""
        progress, settings, record = self.record.progress, self.config.training, self.record
        record.watch.stop()
        samples, _ = epoch_length(self.config, self.size)
        ended, epoch, last = progress.offset >= samples, progress.epoch + 1, progress.step >= self.total["step"]
        improved = False
        if last or epoch % settings.val_every_n_epochs == 0:
            found = self._validation()
            found["train/epoch_loss"] = self._sum(1) / max(progress.offset, 1)
            improved = record.validated(found, epoch)
        if ended:
            progress.epoch, progress.offset, self.losses[1] = epoch, 0, 0.0
        watched = self.session.watched and progress.validated == progress.step
        every = settings.checkpoint.every_n_epochs
        if improved or last or watched or record.save_due or self.done or (every and epoch % every == 0):
            self.save(improved)
        if not self.done and watched and record.milestone():
            self.state = "stopped"
            return True
        return self.done

    def _validation(self) -> dict[str, float]:
        model = self.model
        model.eval()
        try:
            return self.evaluate(Logits(model, self.padded), "val")
        finally:
            model.train()

    def _test(self) -> dict[str, float]:
        """The one look at the test split: the best checkpoint, after selection on validation."""
        path = find_checkpoint(self.session.run.checkpoints, "best")
        if self.splits.test is None or path is None:
            return {}
        return self.evaluate(self.recipe._logits(self.session, self.config, path), "test")

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, best: bool = False) -> None:
        self._kept = self.session.gather(self.losses.tolist())
        self.record.save_files(self._write, best)

    def _write(self, folder: Path) -> None:
        """What Hugging Face's own checkpoints have, in its own files."""
        trainer = self.trainer
        trainer.save_model(str(folder), _internal_call=True)
        trainer._save_optimizer_and_scheduler(str(folder))
        trainer._save_scaler(str(folder))
        if self.session.main:
            with suppress(FileNotFoundError):
                (folder / "training_args.bin").unlink()  # a pickle, which nobody needs
            trainer.state.save_to_json(str(folder / "trainer_state.json"))
            torch.save(self._kept, folder / "losses.pt")

    def _load(self, state: dict[str, Any], path: Path) -> None:
        self.checkpoint = path
        kept = torch.load(path / "losses.pt", weights_only=True)
        ranks = state["ranks"]
        if len(ranks) == self.session.world_size:
            self._rng = ranks[self.session.rank]["rng"]
            self.losses.copy_(torch.tensor(kept[self.session.rank], dtype=torch.float64))
        elif self.session.main:  # another world size: the sums go on, the generators start anew
            self.losses.copy_(torch.tensor(kept, dtype=torch.float64).sum(dim=0))

    def use_rng(self) -> None:
        """As late as it goes: what was built on the way here has drawn from them."""
        if self._rng is not None:
            set_rng_state(self._rng, self.session.device)
            self._rng = None


class _Keeps(TrainerCallback):
    """Tells the run what the Trainer does."""

    def __init__(self, run: _Run) -> None:
        self.run = run

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.run.record.watch.start()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.run.guard()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        control.should_training_stop |= self.run.after_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if self.run.state != "interrupted":
            control.should_training_stop |= self.run.after_epoch()
