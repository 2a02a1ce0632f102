"""Config -> checked splits: mistakes between a data set and its config are found before training starts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from manta.config import Data
from manta.data import AnySet, Splits, TensorSet
from manta.data.stream import Stream
from manta.errors import MantaError
from manta.targets import build

CheckTargets = Callable[[str, Tensor, Data], None]
"""See `manta.training.tasks.Task.check_targets`."""


def class_numbers(where: str, targets: Tensor, data: Data) -> None:
    """Refuse targets that are no classes.

    Raises:
        MantaError: they are not integers in [0, num_classes), one a sample.
    """
    if targets.dim() != 1 or targets.dtype != torch.int64:
        raise MantaError(
            f"{where} has targets of type {targets.dtype} and shape {list(targets.shape)}; they must be class numbers: "
            "int64, one a sample."
        )
    low, high = int(targets.min()), int(targets.max())
    if low < 0:
        raise MantaError(f"{where} has the target {low}: class numbers start at 0.")
    if high >= data.num_classes:
        raise MantaError(
            f"data.num_classes={data.num_classes}, but a target is {high} ({where}): 'data.num_classes={high + 1}'"
        )


def load_splits(data: Data, allowed: Sequence[str], check_targets: CheckTargets = class_numbers) -> Splits:
    """Build `data.dataset` and check it against `data.input_shape` and `data.num_classes`.

    Args:
        check_targets: the task's.

    Raises:
        MantaError: as `manta.targets.build`; or a split is empty, its samples have another shape or type, its
            targets are not the task's, or the classes are not as many as `data.num_classes`.
    """
    splits = build("data.dataset", data.dataset, allowed)
    if not isinstance(splits, Splits):
        raise MantaError(
            f"data.dataset._target_={data.dataset['_target_']} returns a {type(splits).__name__}: "
            "it must return manta.data.Splits."
        )
    if splits.classes and len(splits.classes) != data.num_classes:
        raise MantaError(
            f"data.num_classes={data.num_classes}, but data set {data.name} has {len(splits.classes)} classes "
            f"({_listed(splits.classes)}): 'data.num_classes={len(splits.classes)}'"
        )
    for name in ("train", "val", "test"):
        part = getattr(splits, name)
        if part is None and name != "test":
            raise MantaError(
                f"data.dataset._target_={data.dataset['_target_']} returns Splits without a {name} split. To carve one off: "
                "manta.data.split.carve_fraction"
            )
        if data.engine == "ray" and part is not None and not isinstance(part, Stream):
            raise MantaError(
                f"data.engine=ray: data set {data.name} is not one that can be streamed (manta.data.stream.Stream). data=table is; "
                "for this one leave data.engine=torch."
            )
        if part is not None:
            _check_split(f"The {name} split of data set {data.name}", part, data, check_targets)
    return splits


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _check_split(where: str, part: AnySet, data: Data, check_targets: CheckTargets) -> None:
    """One split: not empty, first sample's shape and type, every target that can be seen without reading samples."""
    try:
        size = len(part)  # type: ignore[arg-type]
    except TypeError:
        raise MantaError(f"{where} has no length: use a TensorSet or a map-style torch.utils.data.Dataset.") from None
    if size == 0:
        raise MantaError(f"{where} is empty.")
    if isinstance(part, TensorSet):
        if len(part.inputs) != size:
            raise MantaError(f"{where} has {len(part.inputs)} inputs and {size} targets.")
        sample, targets = part.batch(torch.zeros(1, dtype=torch.int64, device=part.targets.device))[0][0], part.targets
    else:
        sample, target = _first(where, part)
        try:
            known = getattr(part, "targets", None)
            targets = torch.as_tensor(target)[None] if known is None else torch.as_tensor(known)
        except (TypeError, ValueError, RuntimeError):
            raise MantaError(f"{where}: a target is {target!r}; it must be a number (a class) or a tensor.") from None
    _check_sample(where, sample, data)
    check_targets(where, targets, data)


def _first(where: str, part: Any) -> tuple[Any, Any]:
    item = part[0]
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise MantaError(f"{where}: sample 0 is a {type(item).__name__}; it must be the pair (input, target).")
    return item[0], item[1]


def _check_sample(where: str, sample: Any, data: Data) -> None:
    kind = sample.dtype if isinstance(sample, Tensor) else type(sample).__name__
    fits = isinstance(sample, Tensor) and (
        sample.is_floating_point() if data.input_dtype == "float" else kind == torch.int64
    )
    if not fits:
        wanted = "a floating point" if data.input_dtype == "float" else "an int64"
        raise MantaError(
            f"{where} gives the model {kind}; with data.input_dtype={data.input_dtype} it must be {wanted} tensor (see "
            "TensorSet.prepare)."
        )
    if list(sample.shape) != list(data.input_shape):
        shape = str(list(sample.shape)).replace(" ", "")
        raise MantaError(
            f"data.input_shape={list(data.input_shape)}, but a sample has shape {list(sample.shape)} ({where}): "
            f"'data.input_shape={shape}'"
        )
