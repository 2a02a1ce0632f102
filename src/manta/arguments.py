"""Arguments of a script: `name=value`, typed by a dataclass whose field docstrings are the help text."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from manta.env import load_env_file
from manta.errors import FINISHED, MantaError, exit_code, suggest
from manta.schema import expected, help_text, paths_of

Schema = TypeVar("Schema")


def main(schema: type[Schema], command: Callable[[Schema], int], argv: Sequence[str], root: Path) -> int:
    """Run a script's command with its arguments; an exit code.

    Args:
        argv: the script, then what was typed.
        root: where `.env` lies.
    """
    script, *arguments = argv

    def call() -> int:
        if {"-h", "--help"} & set(arguments):
            print(usage(schema, script))
            return FINISHED
        load_env_file(root / ".env")
        return command(parse(schema, arguments))

    return exit_code(call, tracebacks="traceback=true" in map(str.lower, arguments))


def parse(schema: type[Schema], arguments: Sequence[str]) -> Schema:
    """Typed arguments.

    Raises:
        MantaError: one is unknown, given twice, unreadable or of the wrong type.
    """
    cfg = OmegaConf.structured(schema)
    known, given = paths_of(cfg), set()
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if key.startswith("-"):
            bare = key.lstrip("-").replace("-", "_")
            raise MantaError(f"{argument} is not an option: arguments are written without dashes, {bare}=value.")
        if key not in known:
            found = suggest(key, known)
            hint = f" Did you mean {found}?" if found else f" There are: {', '.join(_leaves(cfg))}."
            raise MantaError(f"{argument}: there is no argument {key}.{hint}")
        if not equals:
            raise MantaError(f"{argument} has no value: arguments are written name=value.")
        if key in given:
            raise MantaError(f"{key} is given twice: leave one out.")
        given.add(key)
        try:
            cfg = OmegaConf.merge(cfg, OmegaConf.from_cli([argument]))
            OmegaConf.select(cfg, key)  # resolves what it refers to
        except (OmegaConfBaseException, YAMLError) as error:
            reason = expected(schema, key) or "something else"
            raise MantaError(f"{argument} has a wrong value: {key} must be {reason}.") from error
    return cast(Schema, OmegaConf.to_object(cfg))


def usage(schema: type, script: str) -> str:
    """What `--help` shows: the schema's docstring, then each argument with its default and its help text."""
    cfg = OmegaConf.structured(schema)
    lines = [f"python {script} [name=value ...]", "", inspect.cleandoc(schema.__doc__ or ""), ""]
    shown = {key: f"{key}={_typed(OmegaConf.select(cfg, key))}" for key in _leaves(cfg)}
    width = max(map(len, shown.values())) + 2
    return "\n".join([*lines, *(f"  {text:<{width}}{help_text(schema, key) or ''}" for key, text in shown.items())])


def _leaves(cfg: DictConfig) -> list[str]:
    """The arguments that take a value."""
    known = paths_of(cfg)
    return [key for key in known if not any(other.startswith(f"{key}.") for other in known)]


def _typed(value: Any) -> str:
    """A default as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value).replace(" ", "").replace("'", "")
