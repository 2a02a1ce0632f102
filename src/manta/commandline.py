"""The command line's mistakes in our words: Hydra's errors become one message with the way out."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from manta.config import expected, paths_of
from manta.errors import MantaError, nearest, suggest

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
    return (
        f"{override} cannot be read. Quote the whole for the shell, and a value with spaces or special "
        f"""characters once more: '{key}="{value.strip("'" + '"')}"'. Lists are [a,b], dictionaries {{a: 1}}."""
    )


def explain(error: Exception, arguments: Sequence[str], conf: Path) -> MantaError:
    """One message for an exception of Hydra's while it composed the configuration."""
    overrides = parse(check_arguments(arguments))
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    text = "\n".join(line for line in str(error).splitlines() if line) or str(cause)
    culprit = next((o for o in overrides if _mentions(text, o)), None)
    if isinstance(error, MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return MantaError(f"{mark.name}, line {mark.line + 1} is not valid YAML: {error.problem}.")
    known = _known(conf, overrides)
    if isinstance(error, MissingConfigException):
        return MantaError(_no_such_file(error, culprit, arguments, known))
    if (culprit and "requires --multirun" in text) or "Ambiguous value" in text:
        return MantaError(_several_values(text, culprit))
    if culprit and culprit.key_or_group not in known.keys and culprit.package is None:
        return MantaError(_unknown(culprit, arguments, known))
    if culprit and "An item is already at" in text:
        line = culprit.input_line or ""
        fixed = line.lstrip("+")
        return MantaError(f"{line}: {culprit.key_or_group} exists, so leave out the +.{_try(arguments, line, fixed)}")
    if culprit and isinstance(cause, OmegaConfBaseException):
        return MantaError(_wrong_value(culprit, cause))
    return MantaError(_in_a_file(text, culprit, known))


def _mentions(text: str, override: Override) -> bool:
    """Whether an error is about this override."""
    return (
        f"'{override.key_or_group}'" in text or f"'{override.key_or_group}/" in text or f"{override.input_line}" in text
    )


def _known(conf: Path, overrides: Sequence[Override]) -> Known:
    """Compose once more, with only the valid choices of groups from the command line, to see what names there are."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_dir(str(conf), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        groups = {name: loader.get_group_options(name) for name in loader.list_groups("") if name != "hydra"}
        choices = [f"{o.key_or_group}={o.value()}" for o in overrides if o.value() in groups.get(o.key_or_group, ())]
        for attempt in (choices, []):
            try:
                return Known(paths_of(compose("config", attempt)), groups)
            except (HydraException, OmegaConfBaseException):
                continue
    return Known([], groups)


def _try(arguments: Sequence[str], wrong: str, right: str) -> str:
    """The command that works."""
    return "\nTry: python train.py " + shlex.join(right if argument == wrong else argument for argument in arguments)


def _unknown(culprit: Override, arguments: Sequence[str], known: Known) -> str:
    """An unknown setting or group: the nearest there is, and the whole command with it."""
    key, line = culprit.key_or_group, culprit.input_line or ""
    value = line.partition("=")[2]
    found = suggest(key, [*known.keys, *known.groups])
    message = f"{key} (in {line}) is not a setting"
    plug_in = key.partition(".")[0]
    if plug_in in ("model", "optimizer", "scheduler") and "." in key and plug_in in known.keys:
        also = f"\nTo pass {plug_in} an argument that its file in conf/ does not list, add it: +{line.lstrip('+')}"
    else:
        also = ""
    if found is None:
        return f"{message}. {LIST_SETTINGS}{also}"
    if found in known.groups and value not in known.groups[found]:
        options = known.groups[found]
        option = nearest(value, options)
        message += f": did you mean {found}={option or '...'}? Options: {', '.join(options)}."
        return message + (_try(arguments, line, f"{found}={option}") if option else "")
    return f"{message}: did you mean {found}={value}?{_try(arguments, line, f'{found}={value}')}{also}"


def _no_such_file(
    error: MissingConfigException, culprit: Override | None, arguments: Sequence[str], known: Known
) -> str:
    """A group's option, or a file of a defaults list, that does not exist."""
    missing = error.missing_cfg_file or ""
    group, _, option = missing.rpartition("/")
    options = known.groups.get(group, list(error.options or ()))
    if not options:
        return f"{missing}.yaml is not in conf/. {LIST_SETTINGS}"
    where = re.match(r"In '(.+?)'", str(error))
    where_text = f" (named in conf/{where[1]}.yaml)" if where and where[1] != "config" else ""
    message = f"{group}={option}{where_text} does not exist. Options of {group}: {', '.join(options)}."
    hint = nearest(option, options)
    if hint is None:
        return message
    message += f" Did you mean {group}={hint}?"
    if culprit is None or culprit.input_line is None:
        return message
    return message + _try(arguments, culprit.input_line, culprit.input_line.replace(option, hint))


def _several_values(text: str, culprit: Override | None) -> str:
    """A sweep without --multirun."""
    line = (culprit and culprit.input_line) or text
    key, _, value = line.partition("=")
    return f"{line} has several values. Add -m to run one job for each, or write a list as '{key}=[{value}]'."


def _wrong_value(culprit: Override, cause: OmegaConfBaseException) -> str:
    """A value of the wrong type."""
    key = str(cause.full_key or culprit.key_or_group)
    wanted = expected(key)
    if culprit.is_delete():
        return f"{culprit.input_line}: {key} always exists; give it a value instead, e.g. {key}=null where null is allowed."
    if wanted is None:
        return f"{culprit.input_line}: {str(cause).splitlines()[0]}."
    return f"{culprit.input_line} has the wrong type: {key} must be {wanted}."


def _in_a_file(text: str, culprit: Override | None, known: Known) -> str:
    """A mistake inside a file of conf/, or one that Hydra explains best."""
    where = re.match(r"In '(.+?)'", text)
    key = re.search(r"full_key: (\S+)", text)
    if where and key and "not in" in text:
        found = suggest(key[1], known.keys)
        hint = f" Did you mean {found}?" if found else f" {LIST_SETTINGS}"
        return f"conf/{where[1]}.yaml: {key[1]} is not a setting.{hint}"
    if where and key:
        wanted = expected(key[1])
        problem = text.splitlines()[1]
        return f"conf/{where[1]}.yaml: {key[1]} must be {wanted or 'something else'}: {problem}."
    start = f"{culprit.input_line}: " if culprit else ""
    return start + " ".join(line for line in text.splitlines() if "To append" not in line and "https://" not in line)
