"""`recipe=lightgbm`: gradient boosted trees by LightGBM (Ke et al., NeurIPS 2017)."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manta.errors import MantaError
from manta.recipes.boosting import Aim, BoostingRecipe, Rows, Scorer, Trees, merged
from manta.recipes.extras import needs
from manta.session import Session, address
from manta.training.sampler import mix

needs("lightgbm", "lightgbm")

import lightgbm  # noqa: E402

FILE = "model.txt"
OURS = {
    "objective": "recipe/task",
    "num_class": "data.num_classes",
    "seed": "seed",
    "bagging_seed": "seed",
    "feature_fraction_seed": "seed",
    "extra_seed": "seed",
    "num_threads": "scaling.resources_per_worker.CPU",
    "num_iterations": "training.epochs",
    "early_stopping_round": "training.early_stopping",
    "boosting": "this recipe (gbdt)",
    "bagging_freq": "bagging_fraction",
    "data_sample_strategy": "this recipe (bagging)",
    "tree_learner": "scaling.num_workers",
    "num_machines": "scaling.num_workers",
    "machines": "scaling.num_workers",
    "verbosity": "this recipe",
}
"""Parameters that something else decides, and what."""


class LightGBMRecipe(BoostingRecipe):
    """Settings have LightGBM's own names; `params` takes any other of its parameters.

    https://lightgbm.readthedocs.io/en/stable/Parameters.html
    """

    name = "lightgbm"

    def __init__(
        self,
        learning_rate: float = 0.1,
        num_leaves: int = 31,
        max_depth: int = -1,
        min_data_in_leaf: int = 20,
        min_sum_hessian_in_leaf: float = 1e-3,
        bagging_fraction: float = 1.0,
        feature_fraction: float = 1.0,
        lambda_l1: float = 0.0,
        lambda_l2: float = 0.0,
        max_bin: int = 255,
        params: dict[str, Any] | None = None,
    ) -> None:
        named = {name: value for name, value in locals().items() if name not in ("self", "params")}
        self.parameters = {"boost_from_average": False, **merged(named, params or {}, OURS)}

    def refused(self, aim: Aim) -> Iterator[str]:
        if aim.numbers > 1:
            yield f"data.num_classes={aim.numbers}: recipe=lightgbm predicts one number a sample. Use recipe=xgboost."

    def rehearse(self, aim: Aim, seed: int) -> None:
        draw, rows = np.random.default_rng(0), max(2 * aim.classes, 8)
        labels = np.arange(rows) % aim.classes if aim.classes else draw.random(rows)
        parameters = {**self.parameters, **_fixed(aim, seed, 0), "verbosity": 0}
        given = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        said = StringIO()
        try:
            with redirect_stdout(said):
                lightgbm.train(parameters, lightgbm.Dataset(draw.random((rows, 4)), labels, params=parameters), 1)
        except (lightgbm.basic.LightGBMError, ValueError, TypeError) as error:
            raise MantaError(f"recipe.settings: lightgbm refuses its parameters ({given}): {_reason(error)}") from error
        for line in said.getvalue().splitlines():
            if "Unknown parameter" in line or "will be ignored" in line:
                raise MantaError(f"recipe.settings.params: {line.removeprefix('[LightGBM] [Warning] ').strip()}")

    @contextmanager
    def grow(
        self, session: Session, aim: Aim, seed: int, rows: dict[str, Rows], whole: Rows, start: Path | None
    ) -> Iterator[Trees]:
        # Before the ranks are connected: each finds the bins of all rows by itself, so that they are the same for any number
        # of ranks. Connected, each would find those of some features in its share.
        fixed = {**self.parameters, **_fixed(aim, seed, 0)}
        bins = _dataset(aim, whole, fixed, None)
        train = bins if session.world_size == 1 else _dataset(aim, rows["train"], fixed, bins)
        trees = _Trees({**fixed, **_connection(session)}, aim, seed, train, rows, start)
        try:
            yield trees
        finally:
            if trees.booster is not None:
                trees.booster.free_network()

    def scorer(self, session: Session, aim: Aim, checkpoint: Path) -> Scorer:  # noqa: ARG002
        booster = lightgbm.Booster(model_file=checkpoint / FILE)
        return lambda inputs: aim.outputs(_raw(booster, inputs, 0, booster.current_iteration()))


class _Trees(Trees):
    """A Booster and its rows, with the sums over the trees so far for each row."""

    def __init__(
        self,
        parameters: dict[str, Any],
        aim: Aim,
        seed: int,
        data: "lightgbm.Dataset",
        rows: dict[str, Rows],
        start: Path | None,
    ) -> None:
        self.parameters, self.aim, self.seed, self.data, self.rows, self.start = (
            parameters,
            aim,
            seed,
            data,
            rows,
            start,
        )
        self.booster: lightgbm.Booster | None = None
        self.summed = {name: (0, np.zeros((len(part.targets), aim.trees))) for name, part in rows.items()}

    def boost(self, number: int) -> None:
        if self.booster is not None:
            self._forget(self.booster, number)
            self.booster.update()
            return

        def before(env: "lightgbm.callback.CallbackEnv") -> None:
            assert isinstance(env.model, lightgbm.Booster)
            self._forget(env.model, number)

        before.before_iteration = True  # type: ignore[attr-defined]
        file = None if self.start is None else self.start / FILE
        # Trees are continued only by a call that adds one.
        self.booster = lightgbm.train(
            self.parameters, self.data, 1, init_model=file, keep_training_booster=True, callbacks=[before]
        )

    def _forget(self, booster: "lightgbm.Booster", number: int) -> None:
        """Start all random generators anew, so that a resumed training draws what this one draws.

        The one of rows takes a new seed only with another setting of bagging, so that gets one for a moment.
        """
        parameters = {**self.parameters, **_seeds(self.seed, number)}
        booster.reset_parameter({**parameters, "bagging_freq": 2})
        booster.reset_parameter(parameters)

    def outputs(self, split: str) -> torch.Tensor:
        assert self.booster is not None, "after a round"
        done, sums = self.summed[split]
        now = self.booster.current_iteration()
        if now > done and len(sums):
            sums = sums + _raw(self.booster, self.rows[split].inputs, done, now).reshape(sums.shape)
            self.summed[split] = now, sums
        return self.aim.outputs(sums)

    def save(self, folder: Path) -> None:
        assert self.booster is not None, "after a round"
        self.booster.save_model(folder / FILE)


def _raw(booster: "lightgbm.Booster", inputs: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Sums over the trees of the rounds from `start` to before `stop`."""
    found = booster.predict(
        inputs, start_iteration=start, num_iteration=stop - start, raw_score=True, num_threads=_threads()
    )
    return np.asarray(found)


def _fixed(aim: Aim, seed: int, number: int) -> dict[str, Any]:
    """Parameters that `OURS` tells of, and those that make results repeat."""
    objective: dict[str, Any] = {"objective": "regression"}
    if aim.classes:
        objective = (
            {"objective": "binary"} if aim.classes == 2 else {"objective": "multiclass", "num_class": aim.classes}
        )
    repeat = {"deterministic": True, "force_col_wise": True}
    return {
        **objective,
        **repeat,
        **_seeds(seed, number),
        "bagging_freq": 1,
        "num_threads": _threads(),
        "verbosity": -1,
    }


def _seeds(seed: int, number: int) -> dict[str, int]:
    """Seeds of a round, so that a resumed training draws what one never interrupted draws."""
    names = ("seed", "bagging_seed", "feature_fraction_seed", "extra_seed")
    return {name: mix(seed, number, index) % 2**31 for index, name in enumerate(names)}


def _reason(error: Exception) -> str:
    """What is wrong with a value, without where in the library it was found."""
    return str(error).partition(" at /")[0].removeprefix("Check failed: ").strip()


def _threads() -> int:
    """Those of this rank: the session has set torch's by what it was given."""
    return torch.get_num_threads()


def _dataset(aim: Aim, rows: Rows, parameters: dict[str, Any], bins: "lightgbm.Dataset | None") -> "lightgbm.Dataset":
    """Rows in the bins of others, or in their own. The inputs are kept: a resumed training starts from what old trees say."""
    found = lightgbm.Dataset(
        rows.inputs, aim.labels(rows.targets), reference=bins, params=parameters, free_raw_data=False
    )
    return found.construct()


def _connection(session: Session) -> dict[str, Any]:
    """The ranks as LightGBM's machines.

    ray.train.lightgbm would name them by a backend of a trainer of its own; our one trainer, whose torch ranks the record
    needs, serves every recipe.
    """
    if session.world_size == 1:
        return {}
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    machines = session.gather(f"{address() or '127.0.0.1'}:{port}")
    return {
        "machines": ",".join(machines),
        "num_machines": len(machines),
        "local_listen_port": port,
        "tree_learner": "data",
    }
