"""Configurations of runs as flat settings, and which of them differ from the defaults.

A thousand configurations have few different parts, so each top-level part of a config.yaml is parsed once, by its
text: nothing needs to be stored beside the runs, and an edited file is read as it is.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml

from manta.config import Config, Storage, absolute, from_hydra, register
from manta.errors import MantaError

Flat = dict[str, Any]
"""Dotted setting -> value; lists are values, empty groups are left out."""

# Of one launch or one machine, or shown in a column of its own.
NOT_SETTINGS = ("schema_version", "storage", "resume", "plan", "traceback", "name", "tags", "group", "data.root")
_ORDER = ("experiment", "debug", "model", "data", "optimizer", "scheduler", "training", "objective", "recipe", "search", "seed")  # fmt: skip


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """As omegaconf reads YAML: 1e-3 is a number too."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def flatten(value: dict[str, Any], prefix: str = "") -> Flat:
    """A nested configuration as dotted settings."""
    flat: Flat = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat.update(flatten(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def read_config(text: str) -> Flat:
    """The settings in a config.yaml.

    Raises:
        ValueError: it is damaged.
    """
    flat: Flat = {}
    try:
        for block in re.split(r"^(?=[A-Za-z_]\w*:)", text, flags=re.MULTILINE):
            flat.update(_read_block(block))
    except (yaml.YAMLError, ValueError):  # written by hand in another layout, or damaged
        try:
            return _read_block(text)
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"it is not valid YAML: {' '.join(str(error).split())}") from error
    return flat


@lru_cache(maxsize=50_000)
def _read_block(text: str) -> Flat:
    found = read_yaml(text)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError("it is no configuration")
    return flatten(found)


def same(one: Any, other: Any) -> bool:
    """Equal values of a setting: 1 is 1.0, but not true."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def is_under(key: str, parents: tuple[str, ...]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def split_override(text: str) -> tuple[str, str]:
    """The setting or group that an override sets, and its value as typed."""
    name, _, value = text.lstrip("+~").partition("=")
    return name.partition("@")[0], value


def read_overrides(text: str) -> list[str]:
    """All overrides of a run, of one set by several attempts the latest; without what asks for a resume."""
    kept: dict[str, str] = {}
    for line in text.splitlines():
        try:
            words = shlex.split(line)
        except ValueError:  # half a line, of a process killed in the middle
            words = []
        for word in words:
            key = split_override(word)[0]
            kept.pop(key, None)
            kept[key] = word
    return [word for key, word in kept.items() if key not in ("resume", "plan", "traceback")]


@dataclass(frozen=True)
class Differences:
    """What distinguishes a run from `python train.py`."""

    choices: dict[str, str] = field(default_factory=dict)
    """Options of groups that were chosen: {"model": "cnn"}."""
    values: Flat = field(default_factory=dict)
    """Settings beyond what the options imply."""

    def all(self) -> Flat:
        """In the order in which people ask: model, data, optimizer, ..."""
        found: Flat = {**self.choices, **self.values}

        def rank(key: str) -> int:
            top = re.split(r"[./]", key)[0]
            return _ORDER.index(top) if top in _ORDER else len(_ORDER)

        return dict(sorted(found.items(), key=lambda item: rank(item[0])))


@dataclass(frozen=True)
class Option:
    """A file of conf/: what choosing it sets."""

    prefix: str
    """Where it lies in the configuration; "" = anywhere."""
    flat: Flat | None
    """As written, interpolations included; None = it cannot be told: the file is made of others, or is gone."""
    implies: dict[str, str]
    """Groups that it chooses in turn."""

    def sets(self, key: str, value: Any) -> bool:
        """Whether a setting has its value from here."""
        if self.prefix and not key.startswith(f"{self.prefix}."):
            return False
        if self.flat is None:
            return True
        inner = key[len(self.prefix) + 1 :] if self.prefix else key
        return inner in self.flat and (_refers(self.flat[inner]) or same(self.flat[inner], value))


def _refers(value: Any) -> bool:
    return "${" in str(value)


class Defaults:
    """What `python train.py` composes without overrides, read when it is first needed."""

    def __init__(self, conf: Path) -> None:
        self.conf = conf
        self._options: dict[tuple[str, str], Option] = {}

    @cached_property
    def _composed(self) -> tuple[Any, dict[str, Any]]:
        """The configuration, and the option of each group."""
        from hydra import compose, initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra
        from omegaconf import open_dict

        from manta.commandline import explain

        register()
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(str(self.conf), version_base="1.3"):
                cfg = compose("config", return_hydra_config=True)
        except Exception as error:
            raise explain(error, [], self.conf) from error
        choices = {str(group): option for group, option in cfg.hydra.runtime.choices.items()}
        with open_dict(cfg):
            del cfg["hydra"]
        return cfg, choices

    @cached_property
    def storage(self) -> Storage:
        found = self._composed[0].storage
        return Storage(**{**found, "path": absolute(str(found.path)), "cache": absolute(str(found.cache))})

    @cached_property
    def choices(self) -> dict[str, Any]:
        return self._composed[1]

    @cached_property
    def flat(self) -> Flat:
        try:
            return flatten(asdict(from_hydra(self._composed[0])))
        except MantaError:  # a default that must be set, say: what can be told is told
            return self.raw

    @cached_property
    def raw(self) -> Flat:
        """Interpolations as they are written."""
        from omegaconf import OmegaConf

        return flatten(OmegaConf.to_container(self._composed[0], resolve=False))  # type: ignore[arg-type]

    @cached_property
    def schema(self) -> Flat:
        return flatten(asdict(Config()))

    @cached_property
    def groups(self) -> frozenset[str]:
        """Folders of conf/."""
        folders = (path.relative_to(self.conf).as_posix() for path in self.conf.rglob("*") if path.is_dir())
        return frozenset(name for name in folders if not name.startswith(("hydra", ".", "__")))

    def option(self, group: str, name: str) -> Option:
        """A file of conf/, read once."""
        if (group, name) not in self._options:
            self._options[group, name] = self._read_option(group, name)
        return self._options[group, name]

    def _read_option(self, group: str, name: str) -> Option:
        prefix = group.replace("/", ".")
        try:
            text = (self.conf / group / f"{name}.yaml").read_text()
            found = read_yaml(text) or {}
            everywhere = re.search(r"^# *@package +_global_", text, re.MULTILINE) is not None
            listed = found.pop("defaults", [])
            flat = flatten(found)
        except (OSError, ValueError, AttributeError, yaml.YAMLError):
            return Option(prefix, None, {})
        if not everywhere:
            return Option(prefix, None if listed else flat, {})
        entries = [item for item in listed if isinstance(item, dict)]
        chosen = {key.removeprefix("override ").strip("/ "): value for each in entries for key, value in each.items()}
        return Option("", flat, {key: str(value) for key, value in chosen.items() if key in self.groups})

    def chosen(self, overrides: list[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Options that the command line chooses, and those that follow from its experiment."""
        typed = dict(map(split_override, overrides))
        explicit = {key: value.strip("'\"") for key, value in typed.items() if key in self.groups and value != "null"}
        implied: dict[str, str] = {}
        for group, value in explicit.items():
            for name in _names(value):
                implied.update(self.option(group, name).implies)
        return explicit, {group: name for group, name in implied.items() if group not in explicit}

    def choice(self, group: str, overrides: list[str]) -> str | None:
        """The option of a group that a run was made with."""
        explicit, implied = self.chosen(overrides)
        return {**self.choices, **implied, **explicit}.get(group)

    def differences(self, flat: Flat, overrides: list[str]) -> Differences:
        """How a run's configuration differs from the defaults.

        Args:
            overrides: of the run; with them options are told by name instead of by their settings.
        """
        explicit, implied = self.chosen(overrides)
        keys = (split_override(text)[0] for text in overrides)
        typed = tuple(key for key in keys if key not in self.groups)
        choices = {group: name for group, name in explicit.items() if name != self.choices.get(group)}
        options = [
            self.option(group, name) for group, value in {**implied, **choices}.items() for name in _names(value)
        ]
        values = {
            key: value
            for key, value in self._leaves(flat)
            if is_under(key, typed) or not self._follows(key, value, options)
        }
        return Differences(choices, values)

    def _leaves(self, flat: Flat) -> Iterator[tuple[str, Any]]:
        """Settings that are not as by default."""
        nothing = object()
        for key, value in flat.items():
            if not same(value, self.flat.get(key, nothing)) and not is_under(key, NOT_SETTINGS):
                yield key, value

    def _follows(self, key: str, value: Any, options: list[Option]) -> bool:
        """Whether a setting has its value because of an option, here or in what it refers to."""
        if any(option.sets(key, value) for option in options) or _refers(self.raw.get(key)):
            return True
        group = any(option.prefix and key.startswith(f"{option.prefix}.") for option in options)
        return group and key in self.schema and same(value, self.schema[key])


def _names(value: str) -> list[str]:
    """The options in `cnn`, or in `[wandb,mlflow]`."""
    return [name.strip() for name in value.strip("[]").split(",") if name.strip()]
