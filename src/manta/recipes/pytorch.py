"""The default recipe: a plain PyTorch loop for classification."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manta.config import Config
from manta.data import AnySet, Splits
from manta.data.load import load_splits
from manta.data.transforms import build_transforms
from manta.errors import MantaError
from manta.recipes import Outline, Prediction
from manta.session import Session
from manta.training.checkpoint import load_checkpoint
from manta.training.evaluation import Evaluator, Prompt, continued, predictions, to_evaluate
from manta.training.learner import build_model, build_optimizer, build_scheduler, empty_batch, load_weights, on_meta
from manta.training.loop import Loop, training_length
from manta.training.memory import settled_for
from manta.training.parallel import bare, parallelise
from manta.training.precision import Precision
from manta.training.tasks import Task, make_task


class PyTorchRecipe:
    """`recipe=pytorch`; see `manta.recipes.Recipe` for what each method does."""

    def check(self, config: Config, look_at_data: bool) -> Outline:
        task = make_task(config)
        reported = [f"val/{name}" for name in task.names]
        if config.objective.metric not in reported:
            raise MantaError(
                f"objective.metric={config.objective.metric} is in recipe.metrics, but {type(task).__name__} reports "
                f"{', '.join(reported)}."
            )
        model = _checked_model(config, task)
        parameters = sum(p.numel() for p in model.parameters())
        name = config.model["_target_"].rsplit(".", 1)[-1]
        rows = [("model", f"{name}, {parameters:,} parameters")]
        for split in ("train", "eval"):
            specs = getattr(config.data.transforms, split)
            build_transforms(f"data.transforms.{split}", specs, config.allowed_targets)
        train_size = 1
        if look_at_data:
            splits = _splits(config)
            sizes = {name: _size(splits, name) for name in ("train", "val", "test")}
            train_size = sizes["train"]
            shown = ", ".join(f"{name} {size:,}" for name, size in sizes.items() if size)
            rows.append(("data", f"{config.data.name}: {shown}"))
        total = training_length(config, train_size)
        build_scheduler(config, build_optimizer(config, model), total)
        if look_at_data:
            rows.append(("training", f"{total['epoch']} epochs, {total['step']:,} steps, {config.training.precision}"))
        return Outline(rows, total["step"] if look_at_data else None)

    def train(self, session: Session, config: Config) -> dict[str, Any]:
        return Loop(session, config, _splits(config)).run()

    def evaluate(self, session: Session, config: Config, checkpoint: Path, splits: list[str]) -> dict[str, float]:
        data = _splits(config)
        splits = to_evaluate(config, data, splits)
        config = settled_for(config, checkpoint)
        evaluator, model = Evaluator(session, config, data, make_task(config)), _trained(session, config, checkpoint)
        found: dict[str, float] = {}
        for split in splits:
            found |= evaluator(model, split)
        return found

    def predict(self, session: Session, config: Config, checkpoint: Path, dataset: AnySet) -> Iterator[Prediction]:
        config = settled_for(config, checkpoint)
        return predictions(session, config, _trained(session, config, checkpoint), dataset, make_task(config))

    def generate(self, session: Session, config: Config, checkpoint: Path, prompt: Prompt) -> str:
        return continued(session, config, _trained(session, config, checkpoint), prompt)

    def export(self, config: Config, checkpoint: Path) -> tuple[nn.Module, torch.Tensor]:
        model = build_model(config)
        load_weights(model, load_checkpoint(checkpoint)[0]["learner"])
        return model.float().eval(), empty_batch(config, "cpu").zero_()


def _trained(session: Session, config: Config, checkpoint: Path) -> nn.Module:
    """The model with a checkpoint's weights, in eval mode."""
    precision = Precision.make(config.training.precision, session.device)
    model = parallelise(precision.cast(build_model(config).to(session.device)), session, config.scaling.strategy)
    load_weights(model, load_checkpoint(checkpoint)[0]["learner"])
    return bare(model).eval()


def _size(splits: Splits, name: str) -> int:
    dataset = getattr(splits, name)
    return 0 if dataset is None else len(dataset)


def _splits(config: Config) -> Splits:
    return load_splits(config.data, config.allowed_targets, make_task(config).check_targets)


def _checked_model(config: Config, task: Task) -> nn.Module:
    """The model without memory for its weights, after a forward pass that checks its shapes.

    Raises:
        MantaError: it does not take `data.input_shape` or give what the task needs.
    """
    shape = [2, *config.data.input_shape]
    model, inputs = on_meta(config)
    try:
        output = model(inputs)
    except NotImplementedError:
        return model
    except (RuntimeError, ValueError, IndexError) as error:
        kind = " of token ids" if config.data.input_dtype == "int64" else ""
        raise MantaError(
            f"model: {config.model['_target_']} cannot take a batch of shape {shape}{kind}: {error}"
            + (". model=gpt can." if kind else "")
        ) from error
    wanted = task.output_shape(config.data)
    if not isinstance(output, torch.Tensor) or (wanted is not None and list(output.shape) != [2, *wanted]):
        got = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise MantaError(
            f"model: for a batch of shape {shape}, {config.model['_target_']} gives {got} instead of "
            f"{[2, *(wanted or [])]}, which {type(task).__name__} needs (data.num_classes={config.data.num_classes})."
        )
    if not output.requires_grad:
        raise MantaError(
            f"model: the output of {config.model['_target_']} does not depend on any parameter that can be trained "
            "(detached, or computed under torch.no_grad)."
        )
    return model
