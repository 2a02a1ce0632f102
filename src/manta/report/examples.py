"""What the best checkpoint says of the validation split: where classes are confused, and the samples it is most wrong about.

Only of the validation split: the test split was looked at once, by the run itself.
"""

import base64
import io
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from manta.config import Cluster
from manta.errors import MantaError
from manta.evaluate import published, saved_config
from manta.runs import RunDir

if TYPE_CHECKING:
    from manta.config import Config
    from manta.data import AnySet

MOST_SAMPLES = 10_000
MOST_S = 30.0
SHOWN = 18
MOST_PIXELS = 256  # of a side of a shown picture


@dataclass
class Example:
    """A sample whose class the checkpoint got wrong."""

    id: int
    target: str
    prediction: str
    probability: float
    """Of the prediction."""
    of_target: float
    picture: str = ""
    """A data URI; empty = the input is no image."""


@dataclass
class Examples:
    """Predictions on (a random part of) the validation split."""

    classes: list[str]
    counts: list[list[int]]
    """Samples by target and prediction."""
    seen: int
    size: int
    wrong: list[Example] = field(default_factory=list)


def find_examples(run: RunDir) -> Examples:
    """Predict the validation split with the best checkpoint, on CPU in this process.

    Raises:
        MantaError: there is no checkpoint, or the data set is not there.
        Exception: whatever the data set, the model or the recipe raise.
    """
    config = saved_config(run, 0, False, Cluster())
    offline = {**config.data.dataset, **({"download": False} if "download" in config.data.dataset else {})}
    config = replace(config, data=replace(config.data, download=False, num_workers=0, dataset=offline))
    with published(run, "best") as checkpoint:
        from manta.data.load import load_splits
        from manta.recipes import make_recipe
        from manta.session import plain
        from manta.training.tasks import make_task

        splits = load_splits(config.data, config.allowed_targets, make_task(config).check_targets)
        dataset, ids = _part(splits.val)
        recipe = make_recipe(config)
        session = plain(run, False, stop=lambda: False)
        found = _collect(recipe.predict(session, config, checkpoint, dataset), config, list(splits.classes))
    found.size = len(splits.val)  # type: ignore[arg-type]
    for example in found.wrong:
        picture = _picture(dataset, example.id, config)
        example.picture, example.id = picture, ids[example.id]
    return found


def _part(dataset: "AnySet") -> tuple["AnySet", list[int]]:
    """In random order, always the same, so that what fits into the time is a fair part; and the ids of its samples."""
    import torch
    from torch.utils.data import Subset

    from manta.data import TensorSet

    size = len(dataset)  # type: ignore[arg-type]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:MOST_SAMPLES]
    if isinstance(dataset, TensorSet):
        return TensorSet(dataset.inputs[order], dataset.targets[order], dataset.prepare), order.tolist()
    return Subset(dataset, order.tolist()), order.tolist()


def _collect(batches: Any, config: "Config", names: list[str]) -> Examples:
    import torch

    n = config.data.num_classes
    names = names or [str(number) for number in range(n)]
    counts = torch.zeros(n * n, dtype=torch.int64)
    wrong: list[Example] = []
    seen, began = 0, time.monotonic()
    for classes, probabilities, targets in batches:
        if probabilities is None or targets.dim() != 1 or probabilities.shape[1] != n or targets.is_floating_point():
            raise MantaError("The recipe predicts no classes.")
        counts += torch.bincount(targets * n + classes, minlength=n * n)
        for row in (classes != targets).nonzero().flatten().tolist():
            t, p = int(targets[row]), int(classes[row])
            of = probabilities[row]
            wrong.append(Example(seen + row, names[t], names[p], float(of[p]), float(of[t])))
        wrong = sorted(wrong, key=lambda example: example.of_target)[:SHOWN]
        seen += len(classes)
        if time.monotonic() - began > MOST_S:
            break
    return Examples(names, counts.view(n, n).tolist(), seen, seen, wrong)


def _picture(dataset: "AnySet", index: int, config: "Config") -> str:
    """A sample as a data URI: what the data set stores, scaled to the whole range of brightness; "" if it is no image."""
    import torch
    from PIL import Image

    from manta.data import TensorSet

    raw = dataset.inputs[index] if isinstance(dataset, TensorSet) else dataset[index][0]  # type: ignore[index]
    shape = config.data.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3) or list(raw.shape) != list(shape):
        return ""
    low, high = raw.min().float(), raw.max().float()
    if raw.dtype == torch.uint8:
        low, high = torch.tensor(0.0), torch.tensor(255.0 if high > 16 else float(high))
    pixels = ((raw.float() - low) / (high - low).clamp(min=1e-9) * 255).round().clamp(0, 255).to(torch.uint8)
    array = pixels.permute(1, 2, 0).numpy()
    image = Image.fromarray(array[:, :, 0] if shape[0] == 1 else array)
    image.thumbnail((MOST_PIXELS, MOST_PIXELS))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
