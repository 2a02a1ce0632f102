"""`recipe=xgboost`: gradient boosted trees by XGBoost (Chen and Guestrin 2016, arXiv:1603.02754)."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manta.errors import MantaError
from manta.recipes.boosting import Aim, BoostingRecipe, Rows, Scorer, Trees, merged
from manta.recipes.extras import needs
from manta.session import Session, address
from manta.training.sampler import mix

needs("xgboost", "xgboost")

import xgboost  # noqa: E402
from xgboost.collective import CommunicatorContext  # noqa: E402

FILE = "model.json"
OURS = {
    "objective": "recipe/task",
    "num_class": "data.num_classes",
    "seed": "seed",
    "nthread": "scaling.resources_per_worker.CPU",
    "device": "scaling.use_gpu",
    "booster": "this recipe (gbtree)",
    "tree_method": "this recipe (hist)",
    "updater": "this recipe",
    "process_type": "this recipe",
    "verbosity": "this recipe",
    "learning_rate": "recipe.settings.eta",
    "min_split_loss": "recipe.settings.gamma",
    "lambda": "recipe.settings.reg_lambda",
    "alpha": "recipe.settings.reg_alpha",
}
"""Parameters that something else decides, and what."""


class XGBoostRecipe(BoostingRecipe):
    """Settings have XGBoost's own names; `params` takes any other of its tree parameters.

    https://xgboost.readthedocs.io/en/stable/parameter.html#parameters-for-tree-booster
    """

    name = "xgboost"

    def __init__(
        self,
        eta: float = 0.3,
        max_depth: int = 6,
        min_child_weight: float = 1.0,
        gamma: float = 0.0,
        subsample: float = 1.0,
        colsample_bytree: float = 1.0,
        reg_lambda: float = 1.0,
        reg_alpha: float = 0.0,
        max_bin: int = 256,
        params: dict[str, Any] | None = None,
    ) -> None:
        named = {name: value for name, value in locals().items() if name not in ("self", "params")}
        self.parameters = merged(named, params or {}, OURS)

    def rehearse(self, aim: Aim, seed: int) -> None:
        draw = np.random.default_rng(0)
        labels = np.arange(aim.classes) if aim.classes else draw.random((8, aim.numbers))
        data = xgboost.DMatrix(draw.random((len(labels), 4)), labels)
        given = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        try:
            with warnings.catch_warnings(record=True) as said, xgboost.config_context(verbosity=1):
                warnings.simplefilter("always")
                booster = xgboost.Booster({**self.parameters, **_fixed(aim, seed, torch.device("cpu"))}, cache=[data])
                booster.update(data, 0)
        except (xgboost.core.XGBoostError, ValueError, TypeError) as error:
            raise MantaError(f"recipe.settings: xgboost refuses its parameters ({given}): {_reason(error)}") from error
        for text in (str(each.message) for each in said):
            if "are not used" in text:
                unknown = text.partition("{")[2].partition("}")[0].strip().replace('"', "")
                raise MantaError(f"recipe.settings.params: xgboost has no use for {unknown}.")

    @contextmanager
    def grow(
        self, session: Session, aim: Aim, seed: int, rows: dict[str, Rows], whole: Rows, start: Path | None
    ) -> Iterator[Trees]:
        # Before the ranks are connected: each finds the bins of all rows by itself, so that they are the same for any number
        # of ranks. Connected, they would merge sketches of their shares.
        with xgboost.config_context(verbosity=0):
            bins = self._matrix(aim, whole, None)
            with _connected(session):
                train = bins if session.world_size == 1 else self._matrix(aim, rows["train"], bins)
                val = xgboost.DMatrix(rows["val"].inputs)
                yield _Trees(self.parameters, aim, seed, session.device, {"train": train, "val": val}, start)

    def _matrix(self, aim: Aim, rows: Rows, ref: "xgboost.QuantileDMatrix | None") -> "xgboost.QuantileDMatrix":
        return xgboost.QuantileDMatrix(
            rows.inputs, aim.labels(rows.targets), max_bin=self.parameters["max_bin"], ref=ref, nthread=_threads()
        )

    def scorer(self, session: Session, aim: Aim, checkpoint: Path) -> Scorer:
        booster = xgboost.Booster(
            {"device": _device(session.device), "nthread": _threads()}, model_file=checkpoint / FILE
        )
        return lambda inputs: aim.outputs(booster.predict(xgboost.DMatrix(inputs), output_margin=True))


class _Trees(Trees):
    """A Booster and its rows. It keeps its sums over trees for matrices that it has seen, so outputs cost one round each."""

    def __init__(
        self,
        parameters: dict[str, Any],
        aim: Aim,
        seed: int,
        device: torch.device,
        data: dict[str, "xgboost.DMatrix"],
        start: Path | None,
    ) -> None:
        self.aim, self.seed, self.data = aim, seed, data
        self.updater = "grow_gpu_hist" if device.type == "cuda" else "grow_quantile_histmaker"
        fixed = _fixed(aim, seed, device)
        file = None if start is None else start / FILE
        self.booster = xgboost.Booster({**parameters, **fixed}, cache=list(data.values()), model_file=file)
        samples = [name for name in parameters if name == "subsample" or name.startswith("colsample")]
        self.random = any(parameters[name] < 1 for name in samples)

    def boost(self, number: int) -> None:
        if self.random:
            self._forget(mix(self.seed, number))
        self.booster.update(self.data["train"], number)

    def _forget(self, seed: int) -> None:
        """Start all random generators anew, so that a resumed training draws what this one draws.

        The one of columns lives in the updater and is seeded when that is made, so another one takes its place for a moment.
        """
        self.booster.set_param({"updater": "refresh"})
        self.booster.save_config()  # applies it
        self.booster.set_param({"updater": self.updater, "seed": seed % 2**31})

    def outputs(self, split: str) -> torch.Tensor:
        data = self.data[split]
        if data.num_row() == 0:
            return self.aim.outputs(np.zeros((0, self.aim.trees), np.float32))
        return self.aim.outputs(self.booster.predict(data, output_margin=True))

    def save(self, folder: Path) -> None:
        self.booster.save_model(folder / FILE)


def _fixed(aim: Aim, seed: int, device: torch.device) -> dict[str, Any]:
    """Parameters that `OURS` tells of."""
    objective: dict[str, Any] = {"objective": "reg:squarederror"}
    if aim.classes:
        objective = {"objective": "binary:logistic"} if aim.classes == 2 else {"objective": "multi:softprob"}
        objective |= {"num_class": aim.classes} if aim.classes > 2 else {}
    return {**objective, "tree_method": "hist", "seed": seed % 2**31, "nthread": _threads(), "device": _device(device)}


def _threads() -> int:
    """Those of this rank: the session has set torch's by what it was given."""
    return torch.get_num_threads()


def _device(device: torch.device) -> str:
    return f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"


def _reason(error: Exception) -> str:
    """What is wrong with a value, without where in the library it was found."""
    text = str(error).split("Stack trace:")[0].strip()
    return text.splitlines()[-1] if "Check failed" not in text else text.partition("Check failed: ")[2]


@contextmanager
def _connected(session: Session) -> Iterator[None]:
    """The ranks as XGBoost's workers.

    Rank 0 has the tracker that introduces them. ray.train.xgboost would start its own on the driver, by a backend of a
    trainer of its own; our one trainer, whose torch ranks the record needs, serves every recipe.
    """
    if session.world_size == 1:
        yield
        return
    tracker = None
    if session.main:
        tracker = xgboost.RabitTracker(session.world_size, host_ip=address() or "127.0.0.1", sortby="task")
        tracker.start()
    arguments = session.gather(tracker.worker_args() if tracker else None)[0]
    with CommunicatorContext(**arguments, dmlc_task_id=f"{session.rank:08}"):
        yield
