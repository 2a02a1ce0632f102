"""The command line's mistakes in our words: Hydra's errors become one message with the way out."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError

from manta.config import Config
from manta.errors import MantaError, nearest, suggest
from manta.schema import expected, hint_of, paths_of
from manta.search import domains

LIST_SETTINGS = "`python train.py --cfg job` lists all settings, `--help` the groups."


@dataclass(frozen=True)
class Known:
    """The names there are: `keys` of the composed configuration, `groups` with their options."""

    keys: list[str]
    groups: dict[str, list[str]]


def check_arguments(arguments: Sequence[str]) -> list[str]:
    """The overrides among the arguments, after refusing what Hydra would misread or take silently.

    Raises:
        MantaError: an unknown option, an unreadable override, or a setting given twice (Hydra takes the last).
    """
    from hydra._internal.utils import get_args_parser

    options, unknown = get_args_parser().parse_known_args(arguments)
    if options.shell_completion:
        return []
    for argument in unknown:
        if not argument.startswith("-"):
            raise MantaError(f"{argument}: put options such as -m before all settings, or after them.")
        name = argument.lstrip("-").partition("=")[0].replace("-", "_")
        raise MantaError(f"{argument} is not an option: settings are written without dashes, {name}=value.")
    first: dict[tuple[str, str | None], Override] = {}
    for override in parse(options.overrides):
        given = first.setdefault((override.key_or_group, override.package), override)
        if given is not override:
            raise MantaError(
                f"{override.key_or_group} is given twice, {given.input_line} and {override.input_line}: leave one out."
            )
    return list(options.overrides)


def quoted(text: str) -> str:
    """Text as Hydra's grammar quotes it: backslashes count only before a quote and at the end."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + (found[2] and "\\'"), text) + "'"


def with_domains(arguments: Sequence[str]) -> list[str]:
    """Arguments with the domains of a search, and dictionaries that take any key, as Hydra can take them.

    `search.space.optimizer.lr=loguniform(1e-4, 1e-1)`: to Hydra choice(...) is a sweep, other calls are unknown, and so
    is a new key. The call becomes quoted text and the key is added by force; so is `scaling.label_selector={zone: a}`.
    """
    return [_with_domain(argument, arguments) for argument in arguments]


def _with_domain(argument: str, others: Sequence[str]) -> str:
    key, equals, value = argument.partition("=")
    name, value = key.lstrip("+"), value.strip()
    if not equals or not (name == "search.space" or name.startswith("search.space.")):
        return f"++{name}={value}" if equals and _takes_any_key(name) else argument
    if re.match(r"\w+\s*\(", value):
        whole = name.count(".") == 2  # a group: what a space file searches in it stays
        more = any(other.lstrip("+").startswith(f"{name}.") for other in others)
        if (whole or more) and (options := _options(value)) and all(map(str.isidentifier, options)):
            return f"++{name}.choice={{{', '.join(f'{option}: {{}}' for option in options)}}}"
        value = quoted(value)
    elif not set("'\"") & set(value):
        value = re.sub(r"\w+\([^()]*\)", lambda call: quoted(call[0]), value)
    return f"++{name}={value}"


def _takes_any_key(name: str) -> bool:
    """Whether a setting is a dictionary of the schema, or in one; those of a recipe are looked at by its constructor."""
    if name.startswith("recipe.settings."):
        return True
    hints = [hint_of(Config, key) for key in (name, name.rpartition(".")[0])]
    return any(get_origin(hint) is dict and get_args(hint)[1] is not Any for hint in hints)


def _options(value: str) -> list[str]:
    """Of a whole group, whose settings other arguments search: `search.space.model=choice(mlp, cnn)`."""
    try:
        return [option for option in domains.parse(value).values or () if isinstance(option, str)]
    except MantaError:
        return []


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse `key=value` arguments.

    Raises:
        MantaError: one cannot be read.
    """
    parser = OverridesParser.create()
    try:
        return parser.parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise MantaError(_unreadable(error.override)) from error


def _unreadable(override: str) -> str:
    """What to do about an argument that is no override."""
    if "=" not in override:
        return f"{override} has no value: settings are written name=value, e.g. {override.lstrip('+~')}=3."
    key, _, value = override.partition("=")
    if re.match(rf"({'|'.join(domains.NAMES)})\(", value.strip()):
        return f"{override}: a domain is searched below search.space: {_in_the_space(override)}"
    return (
        f"{override} cannot be read. Quote the whole for the shell, and a value with spaces or special "
        f"""characters once more: '{key}="{value.strip("'" + '"')}"'. Lists are [a,b], dictionaries {{a: 1}}."""
    )


def explain(error: Exception, arguments: Sequence[str], conf: Path) -> MantaError:
    """One message for an exception of Hydra's while it composed the configuration."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return MantaError(f"{mark.name}, line {mark.line + 1} is not valid YAML: {error.problem}.")
    overrides = parse(check_arguments(arguments))
    known = _known(conf, overrides)
    cause = error.__cause__ if isinstance(error, HydraException) else error
    text = str(error) or str(cause)
    culprit = next((o for o in overrides if _mentions(text, o)), None)
    if culprit is None and not isinstance(error, HydraException):
        culprit = next((o for o in overrides if _is_unknown(o, known)), None)
    if text.startswith("Config group override must be"):
        for o in overrides:
            if o.key_or_group in known.groups and not isinstance(o.value(), str | list):
                options = ", ".join(known.groups[o.key_or_group])
                return MantaError(f"{o.input_line}: a group has one of its options, {options}.")
    if isinstance(error, MissingConfigException):
        group = (error.missing_cfg_file or "").rpartition("/")[0]
        culprit = next((o for o in overrides if o.key_or_group == group), culprit)
        return MantaError(_no_such_file(error, culprit, arguments, known))
    if culprit is None or (re.match("In '", text) and "full_key" in text):
        return MantaError(_in_a_file(text, known))
    line = culprit.input_line or ""
    if "requires --multirun" in text or "Ambiguous value" in text:
        return MantaError(_several_values(line))
    if _is_unknown(culprit, known):
        return MantaError(_unknown(culprit, arguments, known))
    if "An item is already at" in text:
        return MantaError(f"{line}: it exists, so leave out the +.{_try(arguments, line, line.lstrip('+'))}")
    if isinstance(cause, OmegaConfBaseException):
        return MantaError(_wrong_value(culprit, cause, known))
    return MantaError(f"{line}: {_in_one_line(text)}")


def _is_unknown(override: Override, known: Known) -> bool:
    """Whether an override sets something that does not exist."""
    key = override.key_or_group
    elsewhere = override.package is not None or key.startswith("hydra")
    return not elsewhere and key not in known.keys and key not in known.groups


def _mentions(text: str, override: Override) -> bool:
    """Whether an error is about this override."""
    key = override.key_or_group + (f"@{override.package}" if override.package else "")
    line = override.input_line
    first = text.partition("\n")[0]
    return any(sign in text for sign in (f"'{key}'", f"'{key}/", f"'{line}'")) or first.endswith(f" override {line}")


def _known(conf: Path, overrides: Sequence[Override]) -> Known:
    """Compose once more, with only the valid choices of groups from the command line, to see what names there are."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_dir(str(conf), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        outer = [name for name in loader.list_groups("") if name != "hydra"]
        nested = [f"{name}/{inner}" for name in outer for inner in loader.list_groups(name)]
        groups = {name: loader.get_group_options(name) for name in (*outer, *nested)}
        choices = [f"{o.key_or_group}={o.value()}" for o in overrides if o.value() in groups.get(o.key_or_group, ())]
        try:
            return Known(paths_of(compose("config", choices)), groups)
        except (HydraException, OmegaConfBaseException):  # a broken file of conf/ is what the error is about
            return Known(paths_of(OmegaConf.structured(Config)), groups)


def _try(arguments: Sequence[str], wrong: str, right: str) -> str:
    """The command that works."""
    return "\nTry: python train.py " + shlex.join(right if argument == wrong else argument for argument in arguments)


def _unknown(culprit: Override, arguments: Sequence[str], known: Known) -> str:
    """An unknown setting or group: the nearest there is, and the whole command with it."""
    key, line = culprit.key_or_group, culprit.input_line or ""
    value = line.partition("=")[2]
    found = suggest(key, [*known.keys, *known.groups])
    message = f"{line}: there is no setting {key}"
    group = key.partition(".")[0]
    if (whole := key.rpartition(".")[0]) in known.keys and not any(k.startswith(f"{whole}.") for k in known.keys):
        message += f". Set {whole} as a whole: {whole}=..."
    elif found is None:
        siblings = [name.partition(".")[2] for name in known.keys if name.rpartition(".")[0] == group]
        message += f". {group} has {', '.join(siblings)}." if siblings else f". {LIST_SETTINGS}"
    elif (as_group := found.replace(".", "/")) in known.groups and value in known.groups[as_group]:
        message += f": did you mean {as_group}={value}?{_try(arguments, line, f'{as_group}={value}')}"
    elif found in known.groups and value not in known.groups[found]:
        option = nearest(value, known.groups[found])
        message += f": did you mean {found}={option or '...'}? Options of {found}: {', '.join(known.groups[found])}."
        message += _try(arguments, line, f"{found}={option}") if option else ""
    else:
        message += f": did you mean {found}={value}?{_try(arguments, line, f'{found}={value}')}"
    if group in ("model", "optimizer", "scheduler") and group in known.keys and not culprit.is_add():
        message += f"\nAn argument that conf/{group}/ does not list is passed with a plus: +{line}"
    return message


def _no_such_file(
    error: MissingConfigException, culprit: Override | None, arguments: Sequence[str], known: Known
) -> str:
    """A group's option, or a file of a defaults list, that does not exist."""
    missing = error.missing_cfg_file or ""
    group, _, option = missing.rpartition("/")
    options = known.groups.get(group, list(error.options or ()))
    if not options:
        return f"{missing}.yaml is not in conf/. {LIST_SETTINGS}"
    message = f"{group}={option} does not exist. Options of {group}: {', '.join(options)}."
    hint = nearest(option, options)
    if hint:
        message += f" Did you mean {group}={hint}?"
    if culprit is None or culprit.key_or_group != group:
        return f"{message} It is named in a file of conf/, not on the command line."
    if hint is None or culprit.input_line is None:
        return message
    name, _, value = culprit.input_line.partition("=")
    return message + _try(arguments, culprit.input_line, f"{name}={value.replace(option, hint)}")


def _several_values(line: str) -> str:
    """A sweep without --multirun."""
    key, _, value = line.partition("=")
    as_list = "" if "(" in value else f", or write a list as '{key}=[{value}]'"
    if value.startswith("choice("):
        as_list = f", or search over them: {_in_the_space(line)}"
    return f"{line} has several values. Add -m to run one job for each{as_list}."


def _in_the_space(line: str) -> str:
    """A setting that was given a domain, as a part of a search."""
    return "python train.py search=random " + shlex.quote(f"search.space.{line.lstrip('+')}")


def _wrong_value(culprit: Override, cause: OmegaConfBaseException, known: Known) -> str:
    """A value of the wrong type, one with an unknown key inside, or a setting that cannot be removed."""
    key = str(cause.full_key or culprit.key_or_group)
    wanted = expected(Config, key)
    if culprit.is_delete():
        return f"{culprit.input_line}: {key} cannot be removed. Give it another value: {key}=..."
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and not key.startswith("hydra."):
        found = suggest(key, known.keys)
        return f"{culprit.input_line}: there is no setting {key}." + (f" Did you mean {found}?" if found else "")
    if wanted is None:
        return f"{culprit.input_line}: {_in_one_line(str(cause))}"
    return f"{culprit.input_line} has the wrong type: {key} must be {wanted}."


def _in_a_file(text: str, known: Known) -> str:
    """A mistake inside a file of conf/, or one that Hydra explains best."""
    where = re.match(r"In '(.+?)'", text)
    key = re.search(r"full_key: (\S+)", text)
    if where is None or key is None:
        return _in_one_line(text)
    start = f"conf/{where[1]}.yaml: {key[1]}"
    wanted = expected(Config, key[1])
    if wanted:
        return f"{start} must be {wanted}: {text.splitlines()[1]}."
    found = suggest(key[1], known.keys)
    return f"{start} is not a setting." + (f" Did you mean {found}?" if found else f" {LIST_SETTINGS}")


def _in_one_line(text: str) -> str:
    """Hydra's or OmegaConf's own words without their advice and internals."""
    noise = ("To append", "See http", "full_key", "reference_type", "object_type")
    return " ".join(line.strip() for line in text.splitlines() if not line.strip().startswith(noise))
