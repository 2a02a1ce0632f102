"""Arguments of the algorithms and schedulers of a search, with Tune's own names; times are in epochs.

Imports nothing heavy.
"""

import importlib.metadata
import importlib.util
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from manta.config import Config, Search
from manta.errors import MantaError, nearest
from manta.targets import fits


@dataclass
class Random:
    """Samples each trial independently."""


@dataclass
class Grid:
    """Every combination of the listed values once."""


@dataclass
class Optuna:
    """Tree-structured Parzen estimators of Optuna."""

    n_startup_trials: int = 10
    """Trials sampled at random first."""
    multivariate: bool = True
    """Model the settings together instead of one by one."""


@dataclass
class HyperOpt:
    """Tree-structured Parzen estimators of HyperOpt."""

    n_initial_points: int = 20
    """Trials sampled at random first."""
    gamma: float = 0.25
    """Share of the trials that counts as good."""


@dataclass
class BayesOpt:
    """Gaussian processes of bayesian-optimization; for a few continuous settings."""

    random_search_steps: int = 10
    """Trials sampled at random first."""


@dataclass
class Bohb:
    """Parzen estimators of HpBandSter, fed by the scheduler of the same name."""


@dataclass
class Asha:
    """Asynchronous successive halving: of the trials that have come so far only the best fraction goes on."""

    max_t: int | None = None
    """Epochs at most; null = `training.epochs`."""
    grace_period: int = 1
    """Epochs that every trial gets."""
    reduction_factor: float = 3
    """One in so many goes on."""
    brackets: int = 1
    """Brackets, each with a longer grace period than the one before; 1 stops earliest."""


@dataclass
class HyperBand:
    """Successive halving in brackets that wait for all their trials."""

    max_t: int | None = None
    """Epochs at most; null = `training.epochs`."""
    reduction_factor: float = 3
    """One in so many goes on."""


@dataclass
class MedianStopping:
    """Stops a trial whose best is worse than the median of the others' averages."""

    grace_period: int = 1
    """Epochs that every trial gets."""
    min_samples_required: int = 3
    """Trials there must be to take a median of."""


@dataclass
class Pbt:
    """Population based training: bad trials continue from good ones' weights with changed values."""

    perturbation_interval: int = 1
    """Epochs between changes."""
    burn_in_period: int = 0
    """Epochs before the first."""
    quantile_fraction: float = 0.25
    """Share of the population that is replaced, and that is copied."""
    resample_probability: float = 0.25
    """How often a value is sampled anew instead of changed by a fifth."""
    synch: bool = False
    """Wait for the whole population at each change (repeatable, slower)."""


@dataclass
class Pb2:
    """Population based bandits: PBT whose new values come from a Gaussian process."""

    perturbation_interval: int = 1
    """Epochs between changes."""
    quantile_fraction: float = 0.25
    """Share of the population that is replaced, and that is copied."""


@dataclass
class BohbBrackets:
    """HyperBand for the algorithm of the same name."""

    max_t: int | None = None
    """Epochs at most; null = `training.epochs`."""
    reduction_factor: float = 3
    """One in so many goes on."""


Algorithm = Random | Grid | Optuna | HyperOpt | BayesOpt | Bohb
Scheduler = Asha | HyperBand | MedianStopping | Pbt | Pb2 | BohbBrackets

ALGORITHMS: dict[str, type] = {
    "random": Random, "grid": Grid, "optuna": Optuna, "hyperopt": HyperOpt, "bayesopt": BayesOpt, "bohb": Bohb
}  # fmt: skip
SCHEDULERS: dict[str, type] = {
    "asha": Asha, "hyperband": HyperBand, "median_stopping": MedianStopping, "pbt": Pbt, "pb2": Pb2, "bohb": BohbBrackets
}  # fmt: skip
POPULATION = ("pbt", "pb2")

# What an algorithm imports, and the extra of pyproject.toml that has it.
LIBRARIES: dict[str, tuple[tuple[str, ...], str]] = {
    "optuna": (("optuna",), "search"),
    "hyperopt": (("hyperopt",), "search"),
    "bayesopt": (("bayes_opt",), "search"),
    "bohb": (("hpbandster", "ConfigSpace"), "bohb"),
}


def algorithm(search: Search) -> Algorithm:
    """Who chooses the values, with all arguments.

    Raises:
        MantaError: an unknown name or argument, or one of the wrong type.
    """
    return _read("search.algorithm", search.algorithm, ALGORITHMS)


def scheduler(config: Config) -> Scheduler | None:
    """Who stops trials early, with all arguments, `max_t` as a number.

    Raises:
        MantaError: as `algorithm`, or nothing says how long a trial is.
    """
    if not config.search.scheduler:
        return None
    found: Scheduler = _read("search.scheduler", config.search.scheduler, SCHEDULERS)
    if hasattr(found, "max_t") and found.max_t is None:
        if config.training.epochs is None:
            raise MantaError(
                "search.scheduler.max_t=null is training.epochs, which is null too: the scheduler does not know how long a "
                "trial is. Set training.epochs=10, say."
            )
        found.max_t = config.training.epochs
    return found


def missing_library(name: str) -> str | None:
    """What to install for an algorithm, in words; None if all is there."""
    modules, extra = LIBRARIES.get(name, ((), ""))
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    start = f"search.algorithm.name={name} needs"
    way_out = f"In the project's folder: pip install -e '.[{extra}]'"
    if missing:
        return f"{start} {' and '.join(missing)}, not installed here. {way_out}"
    if name == "bayesopt" and (found := importlib.metadata.version("bayesian-optimization")).partition(".")[0] != "1":
        return f"{start} bayesian-optimization 1.x, which Ray's wrapper is for; {found} is installed. {way_out}"
    return None


def _read(key: str, given: Mapping[str, Any], known: Mapping[str, type]) -> Any:
    name = given.get("name")
    if not isinstance(name, str) or name not in known:
        hint = nearest(str(name), known)
        raise MantaError(
            f"{key}.name={'null' if name is None else name} must be one of {', '.join(known)}."
            + (f" Did you mean {key}.name={hint}?" if hint else "")
        )
    arguments = {argument: value for argument, value in given.items() if argument != "name"}
    names, hints = [member.name for member in fields(known[name])], typing.get_type_hints(known[name])
    for argument, value in arguments.items():
        if argument not in names:
            hint = nearest(argument, names)
            raise MantaError(
                f"{key}.{argument}={value} is not an argument of {name}. "
                + (f"Did you mean {key}.{hint}?" if hint else f"It takes {', '.join(names) or 'none'}.")
            )
        if not fits(value, hints[argument]):
            wanted = {int: "a whole number", float: "a number", bool: "true or false"}
            words = wanted.get(hints[argument], "a whole number or null")
            raise MantaError(f"{key}.{argument}={value} has the wrong type: it must be {words}.")
    return known[name](**arguments)
