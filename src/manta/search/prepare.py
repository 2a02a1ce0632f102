"""Before a search: its space is read, its options are composed, and every value at an edge is tried as a run.

Imports nothing heavy.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from manta.checks import refuse
from manta.commandline import parse
from manta.config import Config, Search, absolute
from manta.errors import MantaError, nearest, suggest
from manta.runs import RunDir
from manta.schema import hint_of, in_words, paths_of
from manta.search.domains import Domain, read, split_key
from manta.search.space import Space, applied
from manta.targets import fits

# Settings that are the same for all trials, and why.
FIXED = {
    "search": "a search does not search itself",
    "cluster": "all trials run on the same machines",
    "scaling": "it changes the speed, not the result",
    "storage": "trials are kept in the directory of their search",
    "objective": "trials are compared by it",
    "recipe": "trials are compared by what it reports",
    "tracking": "it records and changes no result",
    "resume": "it is a request of one command line",
    "plan": "it is a request of one command line",
    "traceback": "it is a request of one command line",
    "name": "it is a label",
    "tags": "it is a label",
    "schema_version": "it is no setting",
    "allowed_targets": "it says what is trusted",
    "training.test": "trials never look at the test split",
    "training.checkpoint": "it changes no result",
    "training.profile": "it changes no result",
}
SEARCHED = "recipe.settings."
"""What is searched of those: arguments of the recipe, as many as its framework has."""
KINDS = (bool, int, float, str, list)


def space_of(config: Config, cfg: DictConfig, overrides: list[str], previous: RunDir | None) -> Space | None:
    """What a request searches: as saved in the directory of a search, else prepared; None for a run."""
    if not config.search.algorithm:
        return None
    return Space.load(previous, config) if previous else prepare(cfg, overrides)


def prepare(cfg: DictConfig, overrides: list[str]) -> Space:
    """Read and check `search.space` of a composed configuration; within Hydra, whose search path composes the options.

    Raises:
        MantaError: all problems: a key that does not exist, a domain that is none, a value of the wrong type or out of
            bounds, a point that is not in the space.
    """
    written = OmegaConf.to_container(cfg.search.space, resolve=True)
    assert isinstance(written, dict)
    domains, problems = read(written)
    given = [override for override in parse(overrides) if override.package is None]
    problems += [problem for key, domain in domains.items() for problem in _allowed(key, domain, given)]
    if not domains and not problems:
        problems = [
            "search.space is empty: nothing is searched. Set search/space=default, or a key: "
            "\"search.space.optimizer.lr='loguniform(1e-4, 1e-1)'\""
        ]
    refuse(problems)
    options = _options(domains)
    groups = {key: domain for key, domain in domains.items() if key in options and _is_group(cfg, key)}
    refuse([problem for key, domain in groups.items() for problem in _known_options(key, domain, options[key])])
    bases = _compose(cfg, overrides, groups)
    space = Space(domains, bases)
    for key, domain in domains.items():
        if key not in groups:
            problems += _setting(space, key, domain)
    points = OmegaConf.to_container(cfg.search.points_to_evaluate, resolve=True)
    assert isinstance(points, list)
    for index, point in enumerate(points):
        space.points.append(dict(_point(point)))
        problems += _known_point(f"search.points_to_evaluate[{index}]", space.points[-1], domains)
    refuse(problems)
    return space


# --- keys --------------------------------------------------------------------------------------------------------


def _shown(key: str, domain: Domain) -> str:
    return f"search.space.{key}={domain}"


def _fixed(setting: str) -> str | None:
    """Which of `FIXED` a setting is, or is part of."""
    if setting.startswith(SEARCHED):
        return None
    return next((fixed for fixed in FIXED if setting == fixed or setting.startswith(f"{fixed}.")), None)


def _allowed(key: str, domain: Domain, given: Sequence[Override]) -> Iterator[str]:
    """The setting may differ between trials, and the command line does not set it too."""
    setting, group, _ = split_key(key)
    fixed = _fixed(setting)
    if fixed is not None:
        yield f"{_shown(key, domain)}: {fixed} is not searched, {FIXED[fixed]}. Leave it out."
        return
    if domain.values is not None and len(domain.values) == 1 and group is None:
        yield (
            f"{_shown(key, domain)} has one value, nothing to search. Set {setting}={domain.values[0]} itself and "
            f"search.space.{key}=null, or add a value."
        )
    for override in given:
        if override.key_or_group == setting and not override.is_add():
            yield (
                f"{override.input_line} sets what search.space.{key}={domain} searches. Leave it out, or take the setting "
                f"out of the search: search.space.{key}=null"
            )


def _options(keys: Iterable[str]) -> dict[str, list[str]]:
    """Those of these keys that are groups of conf/, with their options."""
    loader = GlobalHydra.instance().config_loader()
    groups = loader.list_groups("")
    return {key: loader.get_group_options(key) for key in keys if key in groups}


def _is_group(cfg: DictConfig, key: str) -> bool:
    return isinstance(OmegaConf.select(cfg, key), DictConfig)


def _known_options(group: str, domain: Domain, known: list[str]) -> Iterator[str]:
    if domain.values is None:
        yield f"{_shown(group, domain)}: {group} is a group, searched by its options: choice({', '.join(known)})."
    for option in domain.values or ():
        if option not in known:
            hint = nearest(str(option), known)
            yield (
                f"{_shown(group, domain)}: {option} is not an option of {group}, which has {', '.join(known)}."
                + (f" Did you mean {hint}?" if hint else "")
            )


# --- bases -------------------------------------------------------------------------------------------------------


def _compose(cfg: DictConfig, overrides: list[str], groups: Mapping[str, Domain]) -> dict[str, DictConfig]:
    """The configuration of every combination of options."""
    bases = {}
    for combination in itertools.product(*(domain.values or () for domain in groups.values())):
        chosen = [f"{group}={option}" for group, option in zip(groups, combination, strict=True)]
        base = copy.deepcopy(cfg) if not chosen else _composed(overrides, chosen)
        with open_dict(base):
            base.search, base.resume, base.plan, base.traceback = Search(), None, False, False
            # A resume may be typed elsewhere.
            base.data.root, base.storage.path = absolute(base.data.root), absolute(base.storage.path)
            base.storage.cache = absolute(base.storage.cache)
        try:
            applied(base, {})
        except MantaError as error:
            raise MantaError(f"search.space with {' '.join(chosen)}: {error}") from error
        bases[",".join(chosen)] = base
    return bases


def _composed(overrides: list[str], chosen: list[str]) -> DictConfig:
    """One combination of options, under the settings of the command line.

    Raises:
        MantaError: a setting of the command line is one of other options.
    """
    name = HydraConfig.get().job.config_name if HydraConfig.initialized() else None
    name = name or "config"
    try:
        return compose(name, [*overrides, *chosen])
    except (HydraException, OmegaConfBaseException) as error:
        groups = [choice.partition("=")[0] for choice in chosen]
        rest = [o.input_line or "" for o in parse(overrides) if o.key_or_group.split(".")[0] not in groups]
        try:
            known = paths_of(compose(name, [*rest, *chosen]))
        except (HydraException, OmegaConfBaseException):
            known = None
        for override in parse(overrides):
            group, _, setting = override.key_or_group.partition(".")
            if known is not None and group in groups and override.key_or_group not in known:
                option = next(choice for choice in chosen if choice.startswith(f"{group}="))
                raise MantaError(
                    f"{override.input_line}: {option}, one of the options searched, has no {setting}. Leave it out, or give "
                    f"it to an option that has it: search.space.{group}.choice.<option>.{setting}='choice(...)'"
                ) from error
        raise MantaError(f"search.space with {' '.join(chosen)}: {' '.join(str(error).split())}") from error


# --- settings ----------------------------------------------------------------------------------------------------


def _setting(space: Space, key: str, domain: Domain) -> Iterator[str]:
    """A key is a setting, its domain is of the setting's type, and a run would take its extreme values."""
    setting, group, option = split_key(key)
    start = _shown(key, domain)
    if group is not None and (group not in space.groups or group != setting.partition(".")[0]):
        yield f"{start}: {group} is no group of conf/ that is searched. Write search.space.{setting}={domain}."
        return
    bases = [base for chosen, base in space.bases.items() if group is None or f"{group}={option}" in chosen.split(",")]
    if group is None and any(k != key and split_key(k)[0] == setting for k in space.domains):
        yield f"{start}: {setting} is also searched below an option. Leave one of them out."
        return
    for base in bases:
        if setting not in paths_of(base):
            here = f"{group}={option} has no setting {setting}." if group else _unknown(space, base, setting)
            yield f"{start}: {here}"
            return
    if isinstance(OmegaConf.select(bases[0], setting), DictConfig):
        below = [path for path in paths_of(bases[0]) if path.startswith(f"{setting}.")]
        yield f"{start}: {setting} is a group of settings. Search one of them: {', '.join(below[:4])}."
        return
    hint = _kind(bases[0], setting)
    if wrong := [value for value in domain.extremes if not fits(value, hint)]:
        yield f"{start}: {setting} must be {in_words(hint)}, not {_typed(wrong[0])}.{_instead(domain, hint)}"
        return
    for value in domain.extremes:
        try:
            applied(bases[0], {setting: value})
        except MantaError as error:
            yield f"{start}: {error}"
            if domain.values is None:
                return


def _unknown(space: Space, base: DictConfig, setting: str) -> str:
    """A setting that does not exist, or not with every option."""
    group = setting.partition(".")[0]
    having = [chosen for chosen, other in space.bases.items() if setting in paths_of(other)]
    if having:
        options = {part for part in having[0].split(",") if part.startswith(f"{group}=")}
        option = next(iter(options)).partition("=")[2] if options else "<option>"
        return (
            f"not every option searched has {setting}. Search it below those that have it: "
            f"search.space.{group}.choice.{option}.{setting.partition('.')[2]}"
        )
    names = [path for path in paths_of(base) if _fixed(path) is None]
    found = suggest(setting, [*names])
    message = f"there is no setting {setting}." + (f" Did you mean search.space.{found}?" if found else "")
    if group in ("model", "optimizer", "scheduler") and setting != group:
        message += f" An argument that conf/{group}/ does not list is added first: +{setting}=<value>"
    return message


def _kind(base: DictConfig, setting: str) -> Any:
    """The type of a setting: as annotated, in a plug-in that of the value it has; Any if nothing says."""
    hint = hint_of(Config, setting)
    if hint is not None:
        return hint
    value = OmegaConf.select(base, setting)
    if value is None:
        return Any
    if isinstance(value, ListConfig):
        return list
    if value == 0 and not isinstance(value, bool):  # how 0.0 is written, too
        return float
    return next((kind for kind in KINDS if type(value) is kind), Any)


def _instead(domain: Domain, hint: Any) -> str:
    """The domain of whole numbers that was meant."""
    whole = fits(1, hint) and not fits(0.5, hint)
    if domain.values is not None or domain.is_whole or domain.is_normal or not whole:
        return ""
    name = domain.name.replace("uniform", "randint")
    lower, upper, *q = domain.arguments
    if any(number != int(number) for number in domain.arguments):
        return f" Did you mean {name}?"
    numbers = (int(lower), int(upper) + (0 if q else 1), *map(int, q))
    return f" Did you mean {Domain(name, numbers)}?" + ("" if q else " (Its upper bound is exclusive.)")


def _typed(value: Any) -> str:
    return "text" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


# --- points ------------------------------------------------------------------------------------------------------


def _point(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A point by flat key; settings below an option choose it."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if not isinstance(value, dict):
            yield key, value
        elif list(value) == ["choice"] and isinstance(value["choice"], dict) and len(value["choice"]) == 1:
            (option,) = value["choice"]
            yield key, option
            yield from _point(value["choice"][option] or {}, f"{key}.choice.{option}.")
        else:
            yield from _point(value, f"{key}.")


def _known_point(start: str, point: Mapping[str, Any], domains: Mapping[str, Domain]) -> Iterator[str]:
    if not point:
        yield f"{start} is empty: write values, laid out as search.space, e.g. {{optimizer: {{lr: 0.1}}}}."
    for key, value in point.items():
        if key not in domains:
            found = suggest(key, domains)
            yield f"{start}: {key}={value} is not searched." + (
                f" Did you mean {found}?" if found else f" search.space has {', '.join(domains)}."
            )
        elif not domains[key].contains(value):
            yield f"{start}: {key}={value} is not in search.space.{key}={domains[key]}."
        elif (group := split_key(key)[1]) and point.get(group, split_key(key)[2]) != split_key(key)[2]:
            yield f"{start}: {key}={value} is for {group}={split_key(key)[2]}, and the point has {group}={point[group]}."
