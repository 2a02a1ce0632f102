"""Rules for a search, in the manner of manta.checks, which runs them. Imports nothing heavy."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from manta.config import Config, Search
from manta.errors import MantaError
from manta.search.domains import Domain, combinations, is_mutable, read
from manta.search.settings import (
    POPULATION,
    Asha,
    BohbBrackets,
    HyperBand,
    algorithm,
    missing_library,
    scheduler,
)

MOST_COMBINATIONS = 100_000


def names(config: Config) -> tuple[str | None, str | None]:
    """Those of the algorithm and of the scheduler."""
    return config.search.algorithm.get("name"), config.search.scheduler.get("name")


def asked_for(config: Config) -> Iterator[str]:
    """Settings of a search are not given without one."""
    if config.search.algorithm:
        return
    default = asdict(Search())
    for key, value in asdict(config.search).items():
        if value == default[key]:
            continue
        if key == "scheduler":
            name = value.get("name")
            yield f"search/scheduler={name} is for a search: add search=random, or one of its own: search={name}."
        else:
            shown = ", ".join(_flat(f"search.{key}", value))
            yield f"{shown} is for a search: add search=random, or another option of search/, or leave it out."


def arguments(config: Config) -> Iterator[str]:
    """The algorithm and the scheduler exist, take these arguments, and are installed."""
    if not config.search.algorithm:
        return
    for look in (lambda: algorithm(config.search), lambda: scheduler(config)):
        try:
            look()
        except MantaError as error:
            yield str(error)
    missing = missing_library(str(names(config)[0]))
    if missing:
        yield missing


def number_of_trials(config: Config) -> Iterator[str]:
    """A search ends."""
    search, (name, _) = config.search, names(config)
    if not search.algorithm:
        return
    if name != "grid":
        if search.num_samples is None and search.time_budget_s is None:
            yield (
                "search.num_samples=null and search.time_budget_s=null: the search would never end. "
                "Set search.num_samples=20, say, or search.time_budget_s=3600."
            )
        points = len(search.points_to_evaluate)
        if search.num_samples is not None and points > search.num_samples:
            yield (
                f"search.points_to_evaluate has {points} points, but search.num_samples={search.num_samples}: not all would be "
                f"tried. Set search.num_samples={points} or more."
            )
        return
    domains, problems = read(search.space)
    endless = [(key, domain) for key, domain in domains.items() if domain.values is None]
    for key, domain in endless:
        yield (
            f"search.space.{key}={domain} has no list of values for a grid. List them: "
            f"search.space.{key}='grid_search({_some(domain)})', or take search/algorithm=random."
        )
    if endless or problems or not domains:
        return
    count = combinations(domains)
    if search.num_samples is not None:
        yield (
            f"search.num_samples={search.num_samples}: a grid runs each of its {count} combinations once. "
            "Set search.num_samples=null, or take search/algorithm=random."
        )
    if count > MOST_COMBINATIONS:
        yield f"search.space has {count:,} combinations, too many for a grid. Take search/algorithm=random."
    if search.points_to_evaluate:
        yield "search.points_to_evaluate is not for a grid, which runs every point. Leave it out."


def algorithm_takes(config: Config) -> Iterator[str]:
    """Every domain is one that the algorithm samples as it is written."""
    name, _ = names(config)
    if name is None or name == "grid":
        return
    for key, domain in read(config.search.space)[0].items():
        start = f"search.space.{key}={domain}"
        if domain.name == "grid_search":
            values = Domain("choice", domain.arguments)
            yield (
                f"{start} is for search/algorithm=grid, not {name}. Set search/algorithm=grid, or "
                f"search.space.{key}='{values}'."
            )
        elif reason := _dropped(str(name), domain):
            yield f"{start}: search/algorithm={name} {reason}"


def _dropped(name: str, domain: Domain) -> str | None:
    """What Ray's wrapper of an algorithm would refuse, or drop from a domain with no more than a warning."""
    plain = Domain(domain.name.removeprefix("q"), domain.arguments[:2])
    if name == "bayesopt" and domain.name != "uniform":
        instead = "uniform(...)" if domain.bounds is None else f"uniform({domain.bounds[0]}, {domain.bounds[1]})"
        return f"knows only uniform(lower, upper). Set {instead}, or another algorithm, e.g. optuna."
    if name in ("optuna", "bohb") and domain.is_normal:
        return "knows no normal distributions. Set uniform(...), or search/algorithm=hyperopt."
    if (name == "bohb" and domain.q is not None) or (
        name == "optuna" and domain.q is not None and domain.is_logarithmic
    ):
        return f"would ignore q={domain.q}. Set {plain}, or search/algorithm=hyperopt."
    return None


def population(config: Config) -> Iterator[str]:
    """Population based training has something to change, and chooses the values itself."""
    name, which = names(config)
    if name is None or which not in POPULATION:
        return
    if name != "random":
        yield (
            f"search/scheduler={which} changes the values of its trials itself and starts from random ones: "
            f"search/algorithm={name} does not go with it. Set search/algorithm=random."
        )
    if config.search.num_samples is None or config.search.num_samples < 2:
        yield (
            f"search.num_samples={_null(config.search.num_samples)} is the population of search/scheduler={which}: "
            "set it to 2 or more."
        )
    domains, problems = read(config.search.space)
    mutable = {key: domain for key, domain in domains.items() if is_mutable(key, domain)}
    if domains and not mutable and not problems:
        yield (
            f"search.space has nothing that search/scheduler={which} can change in mid-training, only {', '.join(domains)}. "
            "It can change numbers of the optimizer, training.label_smoothing, training.grad_clip_norm and "
            "training.ema.decay: search/space=pbt, say."
        )
    if which == "pb2":
        for key, domain in mutable.items():
            if domain.name not in ("uniform", "loguniform"):
                lower, upper = min(domain.extremes), max(domain.extremes)
                yield (
                    f"search.space.{key}={domain}: search/scheduler=pb2 needs continuous bounds. Set "
                    f"uniform({lower}, {upper}), or search/scheduler=pbt."
                )


def schedule(config: Config) -> Iterator[str]:
    """The scheduler fits the length of a trial and the algorithm."""
    name, which = names(config)
    if name is None:
        return
    if (name == "bohb") != (which == "bohb"):
        yield (
            f"search/algorithm={name} with search/scheduler={which or 'none'}: bohb is an algorithm and a scheduler that "
            "need each other. Set search=bohb for both, or neither."
        )
    try:
        found = scheduler(config)
    except MantaError:  # said by `arguments`
        return
    epochs = config.training.epochs
    if not isinstance(found, Asha | HyperBand | BohbBrackets) or found.max_t is None:
        return
    if epochs is not None and found.max_t > epochs:
        yield (
            f"search.scheduler.max_t={found.max_t} is more than training.epochs={epochs}. Set search.scheduler.max_t=null for "
            f"all of them, or training.epochs={found.max_t}."
        )
    elif isinstance(found, Asha) and found.grace_period > found.max_t:
        yield (
            f"search.scheduler.grace_period={found.grace_period} is more than a trial's {found.max_t} epochs. "
            "Set search.scheduler.grace_period=1."
        )


def trials(config: Config) -> Iterator[str]:
    """Trials run on Ray, each with the same workers."""
    if not config.search.algorithm:
        return
    if config.scaling.num_workers == 0:
        yield "scaling.num_workers=0 (scaling=in_process): a search runs its trials on Ray. Leave it out: scaling=auto."
    if config.scaling.max_workers is not None:
        yield (
            f"scaling.max_workers={config.scaling.max_workers}: trials of a search are not elastic. "
            "Set scaling.max_workers=null."
        )
    if config.training.profile:
        yield "training.profile=true is for one run: find the configuration first. Set training.profile=false."


def _some(domain: Domain) -> str:
    """A few values of a domain."""
    lower, upper = domain.extremes
    return f"{lower}, {upper}"


def _flat(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)
    else:
        yield f"{key}={_null(value)}"


def _null(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    *(asked_for, arguments, number_of_trials, algorithm_takes, population, schedule, trials),
)
