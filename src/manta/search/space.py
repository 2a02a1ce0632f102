"""The search space: domains, and how their values become the configuration of a trial.

Imports nothing heavy.
"""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from manta.checks import check
from manta.commandline import quoted
from manta.config import Config, from_hydra
from manta.errors import MantaError
from manta.runs import RunDir
from manta.schema import expected
from manta.search.domains import Domain, parse, split_key

FILE = "space.yaml"
BROKEN = (yaml.YAMLError, OmegaConfBaseException)


@dataclass
class Space:
    """All domains by flat key, and the configurations they are applied to.

    A flat key is the dotted path below search.space: `optimizer.lr`, `model` (a whole group), and
    `model.choice.mlp.dropout` for a setting that is searched only when `model` is `mlp`. A group comes before them.
    """

    domains: dict[str, Domain]
    bases: dict[str, DictConfig]
    """The composed configuration, interpolations unresolved, of every combination of options of searched groups, by
    "model=mlp,optimizer=sgd" (in the order of `domains`; "" without searched groups)."""
    points: list[dict[str, Any]] = field(default_factory=list)
    """search.points_to_evaluate, by flat key."""

    @property
    def groups(self) -> list[str]:
        """The searched groups."""
        return [part.partition("=")[0] for part in next(iter(self.bases)).split(",") if part]

    def active(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Without the values of options that were not chosen; conditional keys as settings (`model.dropout`)."""
        found = {}
        for key, value in values.items():
            setting, group, option = split_key(key)
            if group is None or values.get(group) == option:
                found[setting] = _plain(value)
        return found

    def overrides(self, values: Mapping[str, Any]) -> list[str]:
        """As they are typed on the command line, quoted for Hydra: `model=mlp`, `optimizer.lr=0.01`."""
        return [f"{setting}={_for_hydra(value)}" for setting, value in self.active(values).items()]

    def config(self, values: Mapping[str, Any]) -> Config:
        """The configuration of a trial, checked as that of a run; without the search.

        Raises:
            MantaError: these values do not go together.
        """
        settings = self.active(values)
        base = self.bases[",".join(f"{group}={settings.pop(group)}" for group in self.groups)]
        return applied(base, settings)

    def configs(self) -> dict[str, Config]:
        """The configuration of every combination of options, nothing else sampled: what plug-ins can be tried with."""
        return {chosen: applied(base, {}) for chosen, base in self.bases.items()}

    def grid(self) -> list[dict[str, Any]]:
        """Every combination of listed values once, the last key changing fastest; conditional keys under their option."""
        points: list[dict[str, Any]] = [{}]
        for key, domain in self.domains.items():
            _, group, option = split_key(key)
            points = [
                {**point, **more}
                for point in points
                for more in (
                    [{key: v} for v in domain.values or []] if group is None or point[group] == option else [{}]
                )
            ]
        return points

    def save(self, run: RunDir) -> None:
        """Into the search's directory (space.yaml)."""
        content = {
            "domains": {key: str(domain) for key, domain in self.domains.items()},
            "points": self.points,
            "bases": {key: OmegaConf.to_container(base, resolve=False) for key, base in self.bases.items()},
        }
        aside = run.path / f".{FILE}"
        aside.write_text(yaml.safe_dump(content, sort_keys=False))
        aside.replace(run.path / FILE)

    @staticmethod
    def load(run: RunDir, config: Config) -> "Space":
        """As saved, nothing of conf/ is read again; what may change on resume is taken from `config`.

        Raises:
            MantaError: the file is missing or damaged.
        """
        path = run.path / FILE
        try:
            content = yaml.safe_load(path.read_text())
            domains = {key: parse(text) for key, text in content["domains"].items()}
            now: dict[str, Any] = {name: asdict(getattr(config, name)) for name in ("scaling", "cluster", "storage")}
            now |= {"tags": config.tags, "allowed_targets": config.allowed_targets}
            bases = {
                key: OmegaConf.merge(OmegaConf.structured(Config), base, now) for key, base in content["bases"].items()
            }
        except (MantaError, OSError, ValueError, LookupError, TypeError, AttributeError, *BROKEN) as error:
            raise MantaError(f"{path} cannot be read, so the search cannot continue: {error}") from error
        return Space(domains, bases, content["points"])  # type: ignore[arg-type]


def applied(base: DictConfig, settings: Mapping[str, Any]) -> Config:
    """A base with these settings, checked.

    Raises:
        MantaError: they do not go together.
    """
    cfg = copy.deepcopy(base)
    for setting, value in settings.items():
        try:
            OmegaConf.update(cfg, setting, value, merge=False)
        except OmegaConfBaseException as error:
            raise MantaError(
                f"{setting}={value} has the wrong type: it must be {expected(Config, setting)}."
            ) from error
    config = from_hydra(cfg)
    check(config)
    return config


def _plain(value: Any) -> Any:
    """Searchers also return numpy's scalars, and tuples for lists."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else getattr(value, "item", lambda: value)()


def _for_hydra(value: Any) -> str:
    """A value as Hydra reads it; text is quoted unless it is a plain word."""
    if isinstance(value, list):
        return f"[{','.join(map(_for_hydra, value))}]"
    if isinstance(value, str):
        word = re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in (
            "true",
            "false",
            "null",
            "nan",
            "inf",
        )
        return value if word else quoted(value)
    return json.dumps(value)
