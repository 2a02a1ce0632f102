"""A recipe and a model that write down what they find on a worker, for tests of what reaches it."""

import dataclasses
import json
import os
from typing import Any

from torch import Tensor, nn

from manta.config import Config
from manta.recipes.pytorch import PyTorchRecipe
from manta.session import Session


class Net(nn.Module):
    """One layer; keeps its arguments."""

    def __init__(self, input_shape: list[int], num_classes: int, nested: dict[str, list[Any]]) -> None:
        super().__init__()
        self.arguments = {"input_shape": input_shape, "nested": nested, "inner": nested["inner"]}
        self.layer = nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.flatten(1))


class Recipe(PyTorchRecipe):
    """The default recipe; every rank writes probe-<rank>.json into the run directory and prints a line."""

    def train(self, session: Session, config: Config) -> dict[str, Any]:
        from manta.targets import build

        model = build("model", config.model, config.allowed_targets)
        found = {
            "cwd": os.getcwd(),
            "data_root": config.data.root,
            "tags": config.tags,
            "device": str(session.device),
            "arguments": {name: type(value).__name__ for name, value in model.arguments.items()},
            "foreign": sorted(_foreign(dataclasses.asdict(config))),
        }
        (session.run.path / f"probe-{session.rank}.json").write_text(json.dumps(found))
        print(f"hello from rank {session.rank}")
        return super().train(session, config)


def _foreign(value: Any) -> set[str]:
    """Types in a configuration that are not plain Python."""
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    else:
        inner = list(value) if isinstance(value, list) else []
    plain = type(value) in (dict, list, str, int, float, bool, type(None))
    return (set() if plain else {type(value).__name__}).union(*map(_foreign, inner))
