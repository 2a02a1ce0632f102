"""Reading a schema of dataclasses: what a dotted setting may be, its help text, and which keys there are."""

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}


def expected(schema: type, key: str) -> str | None:
    """What may be assigned to a setting, in words, with its help text; None if the schema does not say."""
    hint = hint_of(schema, key)
    if hint is None or hint is Any:
        return None
    text = help_text(schema, key)
    return in_words(hint) + (f" ({text.rstrip('.')})" if text else "")


def hint_of(schema: type, key: str) -> Any:
    """The annotation of a dotted setting; None if the schema does not say."""
    owner, name = _owner(schema, key)
    return typing.get_type_hints(owner).get(name) if owner else None


def help_text(schema: type, key: str) -> str | None:
    """The help text of a dotted setting."""
    owner, name = _owner(schema, key)
    return help_texts(owner).get(name) if owner else None


def help_texts(schema: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(node, ast.ClassDef)
    texts = {}
    for member, below in zip(node.body, node.body[1:], strict=False):
        match member, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


def paths_of(cfg: DictConfig) -> list[str]:
    """Every dotted key of a composed configuration, groups included."""
    return [key for key, _ in _nodes(cfg)]


def missing_keys(cfg: DictConfig) -> list[str]:
    """Keys whose value is `???`. OmegaConf's own function stumbles over interpolations that refer to them."""
    return [key for key, node in _nodes(cfg) if node._is_missing()]


def unknown_keys(cfg: DictConfig, schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of typed groups that the schema does not have, with their values: `+key=value` adds them unchecked."""
    hints = typing.get_type_hints(schema)
    for given in cfg:
        key, node = str(given), cfg._get_node(given)  # a number in {1: 2}
        if key not in hints:
            yield f"{prefix}{key}", node
        elif is_dataclass(hints[key]) and _is_open(node):
            yield from unknown_keys(typing.cast(DictConfig, node), typing.cast(type, hints[key]), f"{prefix}{key}.")


def _owner(schema: type, key: str) -> tuple[type | None, str]:
    """The dataclass that has a dotted setting's last part, and that part."""
    *groups, name = key.split(".")
    owner: Any = schema
    for group in groups:
        owner = typing.get_type_hints(owner).get(group)
        if not is_dataclass(owner):
            return None, name
    return typing.cast(type, owner), name


def _nodes(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its node; resolves nothing."""
    for given in cfg:
        key, node = str(given), cfg._get_node(given)  # a number in {1: 2}
        yield f"{prefix}{key}", node
        if _is_open(node):
            yield from _nodes(typing.cast(DictConfig, node), f"{prefix}{key}.")


def _is_open(node: Any) -> bool:
    """Whether a node has keys to look at: not null, `???` or an interpolation."""
    return isinstance(node, DictConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation())


def in_words(hint: Any) -> str:
    """A field's type for people."""
    if isinstance(hint, types.UnionType):
        return " or ".join(in_words(member) for member in typing.get_args(hint))
    if is_dataclass(hint):
        return f"a group of settings, {', '.join(member.name for member in fields(hint)[:3])} and so on"
    if typing.get_origin(hint) is list:
        return "a list, written [a,b]"
    if typing.get_origin(hint) is dict:
        return "a dictionary, written {a: 1}"
    return WORDS.get(hint, str(hint))
