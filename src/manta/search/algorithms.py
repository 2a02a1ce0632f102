"""Who chooses the values of the next trial: at random, from a grid, or a searcher of Tune's that learns."""

import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
from ray import tune

from manta.config import Config
from manta.search.settings import algorithm as settings_of
from manta.search.space import Space

Values = dict[str, Any]


class Algorithm(Protocol):
    """Trials are known by their number."""

    exhausted: bool
    """There is nothing left to suggest."""

    def suggest(self, number: int) -> Values | None:
        """The values of a new trial; None if there are none now."""
        ...

    def repeat(self, number: int, values: Values) -> None:
        """This was suggested by an earlier launch."""
        ...

    def reported(self, number: int, result: dict[str, Any]) -> None: ...

    def ended(self, number: int, result: dict[str, Any], value: float | None) -> None:
        """With its best value of the objective."""
        ...

    def failed(self, number: int) -> None: ...


class Blind:
    """Learns nothing from results."""

    exhausted = False

    def repeat(self, number: int, values: Values) -> None:
        pass

    def reported(self, number: int, result: dict[str, Any]) -> None:
        pass

    def ended(self, number: int, result: dict[str, Any], value: float | None) -> None:
        pass

    def failed(self, number: int) -> None:
        pass


class Random(Blind):
    """Each trial's values depend on the seed and its number alone, so the order of events does not matter."""

    def __init__(self, space: Space, seed: int, points: list[Values]) -> None:
        self.domains = {key: domain.tune() for key, domain in space.domains.items()}
        self.seed, self.points = seed, points

    def suggest(self, number: int) -> Values:
        rng = np.random.default_rng([self.seed, number])
        values = {key: plain(domain.sample(random_state=rng)) for key, domain in self.domains.items()}
        return {**values, **(self.points[number] if number < len(self.points) else {})}


class Grid(Blind):
    """Every combination once, in order."""

    def __init__(self, space: Space, points: list[Values]) -> None:
        grid = space.grid()
        first = [values for point in points for values in grid if point.items() <= values.items()]
        self.grid = [*first, *(values for values in grid if values not in first)]

    def suggest(self, number: int) -> Values | None:
        self.exhausted = number >= len(self.grid)
        return None if self.exhausted else self.grid[number]


class Learning:
    """A searcher of Tune's. Listed values go to it as their places in the list, whatever they are."""

    def __init__(
        self,
        make: Callable[[list[Values] | None], Any],
        space: Space,
        seed: int,
        points: list[Values],
        config: Config,
        say: Callable[[str], None],
    ) -> None:
        self.lists = {key: domain.values for key, domain in space.domains.items() if domain.values is not None}
        self.metric, self.say = config.objective.metric, say
        self.exhausted = False
        self._live: set[int] = set()
        rest = Random(space, seed, points)
        complete = [self._encoded(rest.suggest(number)) for number in range(len(points))]
        domains = {
            key: tune.choice(list(range(len(self.lists[key])))) if key in self.lists else domain.tune()
            for key, domain in space.domains.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of searchers about their own arguments and the versions of libraries
            self.searcher = make(complete or None)
            self.searcher.set_search_properties(self.metric, config.objective.mode, domains)

    def suggest(self, number: int) -> Values | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = self.searcher.suggest(_id(number))
        if found is None or found == "FINISHED":
            self.exhausted = found is not None
            return None
        self._live.add(number)
        values = {key: plain(value) for key, value in found.items()}
        return {key: self.lists[key][int(value)] if key in self.lists else value for key, value in values.items()}

    def repeat(self, number: int, values: Values) -> None:
        if self.suggest(number) != values:
            self.say(
                f"trial {number}: another version of the search algorithm chose it; it knows its result all the same."
            )

    def reported(self, number: int, result: dict[str, Any]) -> None:
        if number in self._live:
            self.searcher.on_trial_result(_id(number), {**result, "training_iteration": result["epoch"]})

    def ended(self, number: int, result: dict[str, Any], value: float | None) -> None:
        if number in self._live:
            self._live.remove(number)
            told = None if value is None else {**result, self.metric: value}
            self.searcher.on_trial_complete(_id(number), result=told, error=told is None)

    def failed(self, number: int) -> None:
        if number in self._live:
            self._live.remove(number)
            self.searcher.on_trial_complete(_id(number), error=True)

    def _encoded(self, values: Values) -> Values:
        return {key: self.lists[key].index(value) if key in self.lists else value for key, value in values.items()}


def make_algorithm(config: Config, space: Space, say: Callable[[str], None]) -> Algorithm:
    """The algorithm of `search.algorithm`.

    Args:
        say: shows a line.
    """
    points = space.points
    search, arguments = config.search, asdict(settings_of(config.search))
    name = search.algorithm["name"]
    if name == "random":
        return Random(space, search.seed, points)
    if name == "grid":
        return Grid(space, points)
    make = {"optuna": _optuna, "hyperopt": _hyperopt, "bayesopt": _bayesopt, "bohb": _bohb}[name]
    return Learning(lambda first: make(search.seed, first, **arguments), space, search.seed, points, config, say)


def _optuna(seed: int, points: list[Values] | None, **arguments: Any) -> Any:
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed, **arguments)
    return OptunaSearch(sampler=sampler, points_to_evaluate=points)


def _hyperopt(seed: int, points: list[Values] | None, **arguments: Any) -> Any:
    from ray.tune.search.hyperopt import HyperOptSearch

    return HyperOptSearch(random_state_seed=seed, points_to_evaluate=points, **arguments)


def _bayesopt(seed: int, points: list[Values] | None, **arguments: Any) -> Any:
    from ray.tune.search.bayesopt import BayesOptSearch

    return BayesOptSearch(random_state=seed, points_to_evaluate=points, **arguments)


def _bohb(seed: int, points: list[Values] | None, **arguments: Any) -> Any:
    from ray.tune.search.bohb import TuneBOHB

    return TuneBOHB(seed=seed, points_to_evaluate=points, **arguments)


def plain(value: Any) -> Any:
    """A sampled value as plain Python."""
    return value.item() if isinstance(value, np.generic) else value


def _id(number: int) -> str:
    return f"{number:05d}"
