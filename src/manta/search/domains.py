"""Domains: what one setting is searched over, a function of ray.tune with its arguments, written as a call.

A space of them is written as a tree like the configuration and known by flat keys (see `Space`). A call is read with `ast` and never evaluated. Imports nothing heavy.
"""

import ast
import json
import keyword
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from manta.errors import MantaError, nearest

LISTED = ("choice", "grid_search")
# Arguments in order, and the defaults of the last ones. Tune's `base` is left out: it has no effect.
SIGNATURES: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    "uniform": (("lower", "upper"), ()),
    "quniform": (("lower", "upper", "q"), ()),
    "loguniform": (("lower", "upper"), ()),
    "qloguniform": (("lower", "upper", "q"), ()),
    "randint": (("lower", "upper"), ()),
    "qrandint": (("lower", "upper", "q"), ()),
    "lograndint": (("lower", "upper"), ()),
    "qlograndint": (("lower", "upper", "q"), ()),
    "randn": (("mean", "sd"), (0.0, 1.0)),
    "qrandn": (("mean", "sd", "q"), ()),
}
NAMES = (*LISTED, *SIGNATURES)
# What population based training may change in mid-training, beside the optimizer's numbers.
MUTABLE = ("training.label_smoothing", "training.grad_clip_norm", "training.ema.decay")
WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class Domain:
    """What one setting is searched over: a function of ray.tune with its arguments."""

    name: str
    """One of NAMES."""
    arguments: tuple[Any, ...]
    """By position; of choice and grid_search the values."""
    text: str = field(default="", compare=False, repr=False)
    """As it was written."""

    @property
    def values(self) -> list[Any] | None:
        """All of them, if they are listed (choice, grid_search)."""
        return list(self.arguments) if self.name in LISTED else None

    @property
    def is_whole(self) -> bool:
        """Whether it samples whole numbers."""
        return "randint" in self.name

    @property
    def is_logarithmic(self) -> bool:
        return "log" in self.name

    @property
    def is_normal(self) -> bool:
        return self.name.endswith("randn")

    @property
    def q(self) -> float | None:
        """The step of a quantized domain."""
        return self.arguments[-1] if self.name.startswith("q") else None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The smallest and the largest value; None of listed values and of normal distributions, which have none."""
        if self.values is not None or self.is_normal:
            return None
        lower, upper = self.arguments[:2]
        return lower, upper - 1 if self.is_whole and self.q is None else upper

    @property
    def extremes(self) -> list[Any]:
        """The values to look at before launch: all that are listed, else the bounds (five sigmas of a normal one)."""
        if self.values is not None:
            return self.values
        if self.bounds is not None:
            return list(self.bounds) if self.is_whole else list(map(float, self.bounds))
        mean, sd = self.arguments[:2]
        return [float(mean - 5 * sd), float(mean + 5 * sd)]

    @property
    def numeric(self) -> bool:
        """Whether all its values are numbers."""
        return self.values is None or all(map(is_number, self.values))

    def contains(self, value: Any) -> bool:
        """Whether it could sample this value."""
        if self.values is not None:
            return any(value == known and type(value) is type(known) for known in self.values)
        if not is_number(value) or (self.is_whole and value != int(value)):
            return False
        if self.q is not None and not _divides(self.q, value):
            return False
        return self.bounds is None or self.bounds[0] <= value <= self.bounds[1]

    def tune(self) -> Any:
        """As ray.tune has it."""
        from ray import tune

        if self.values is not None:
            return getattr(tune, self.name)(self.values)
        return getattr(tune, self.name)(*self.arguments)

    def __str__(self) -> str:
        if self.text:
            return self.text
        listed = self.values is not None and len(self.values) == 1 and isinstance(self.values[0], list)
        shown = ", ".join(map(_shown, self.arguments))
        return f"{self.name}([{shown}])" if listed else f"{self.name}({shown})"


def parse(text: Any) -> Domain:
    """Read a domain.

    Raises:
        MantaError: what is wrong with it and the way out, to be put after its key.
    """
    call = _call(text)
    assert isinstance(call.func, ast.Name)
    name = call.func.id
    if name not in NAMES:
        hint = nearest(name, NAMES)
        raise MantaError(
            f"there is no domain {name}." + (f" Did you mean {hint}?" if hint else f" There are {', '.join(NAMES)}.")
        )
    given = [_value(node) for node in call.args]
    named = {str(word.arg): _value(word.value) for word in call.keywords}
    domain = _listed(name, given, named) if name in LISTED else _number(name, given, named)
    return replace(domain, text=text.strip())


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _call(text: Any) -> ast.Call:
    example = "A domain is written as a call of ray.tune's, e.g. loguniform(1e-4, 1e-1) or choice(32, 64)."
    if not isinstance(text, str):
        raise MantaError(f"this is a value and no domain. {example}")
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise MantaError(
            f"it cannot be read. {example} A word with other characters than letters, digits and _ is quoted: "
            "choice('a-b', c)."
        ) from error
    if isinstance(node, ast.Name) and node.id in NAMES:
        raise MantaError(f"it has no arguments. {example}")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise MantaError(f"this is a value and no domain. {example}")
    return node


def _value(node: ast.expr) -> Any:
    """A number, a word, a list; nothing is computed."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=word):
            return WORDS.get(word, word)
        case ast.Attribute():
            return ast.unparse(node)
        case ast.List() | ast.Tuple():
            return [_value(item) for item in node.elts]
        case ast.Call():
            raise MantaError(
                f"{ast.unparse(node)} is a domain inside a domain. What depends on an option is written below it: "
                "model: {choice: {mlp: {dropout: 'uniform(0, 0.5)'}, cnn: {}}}"
            )
    shown = ast.unparse(node)
    raise MantaError(
        f"{shown} is no number, word or list; nothing is computed here. Quote it if it is text: '{shown}'."
    )


def _listed(name: str, given: list[Any], named: dict[str, Any]) -> Domain:
    keyword_name = {"choice": "categories", "grid_search": "values"}[name]
    if unknown := next((word for word in named if word != keyword_name), None):
        raise MantaError(f"{name} has no argument {unknown}: write the values, {name}(32, 64).")
    if named:
        given = [named[keyword_name]]
    values = given[0] if len(given) == 1 and isinstance(given[0], list) else given
    for index, value in enumerate(values):
        if any(value == other and type(value) is type(other) for other in values[:index]):
            raise MantaError(f"{_shown(value)} is listed twice.")
        if isinstance(value, float) and not math.isfinite(value):
            raise MantaError(f"{_shown(value)} is not a finite number.")
    if not values:
        raise MantaError(f"it lists nothing: write the values, {name}(32, 64).")
    return Domain(name, tuple(values))


def _number(name: str, given: list[Any], named: dict[str, Any]) -> Domain:
    names, defaults = SIGNATURES[name]
    usage = f"{name}({', '.join(names)})"
    if len(given) > len(names):
        raise MantaError(f"{usage} takes {len(names)} arguments, not {len(given)}.")
    arguments = dict(zip(names, given, strict=False))
    for word, value in named.items():
        if word == "base":
            raise MantaError("base has no effect in Ray: leave it out.")
        if word not in names:
            hint = nearest(word, names)
            raise MantaError(
                f"{usage} has no argument {word}." + (f" Did you mean {hint}=?" if hint and hint not in named else "")
            )
        if word in arguments:
            raise MantaError(f"{word} is given twice.")
        arguments[word] = value
    for word, value in zip(names[len(names) - len(defaults) :], defaults, strict=True):
        arguments.setdefault(word, value)
    if missing := [word for word in names if word not in arguments]:
        raise MantaError(f"{usage} lacks {' and '.join(missing)}.")
    for word, value in arguments.items():
        if not is_number(value) or not math.isfinite(value):
            raise MantaError(f"{word}={_shown(value)} is not a finite number.")
    domain = Domain(name, tuple(arguments[word] for word in names))
    _check_numbers(domain, arguments)
    return domain


def _check_numbers(domain: Domain, arguments: dict[str, float]) -> None:
    name, q = domain.name, domain.q
    if q is not None and q <= 0:
        raise MantaError(f"q={q:g} is the step between values and must be > 0.")
    if domain.is_normal:
        if arguments["sd"] <= 0:
            raise MantaError(f"sd={arguments['sd']:g} is a standard deviation and must be > 0.")
        return
    lower, upper = arguments["lower"], arguments["upper"]
    if domain.is_whole and (broken := [word for word, value in arguments.items() if not isinstance(value, int)]):
        instead = name.replace("randint", "uniform")
        raise MantaError(f"{broken[0]}={arguments[broken[0]]:g} is not whole. Did you mean {instead}?")
    if lower > upper:
        raise MantaError(f"the lower bound comes first: {Domain(name, (upper, lower, *domain.arguments[2:]))}.")
    if domain.is_logarithmic and lower <= 0:
        raise MantaError(
            f"lower={lower:g}: a logarithmic scale starts above 0. "
            f"Set lower={min(1, upper / 10) if domain.is_whole else upper / 1000:g}, say."
        )
    if q is not None:
        for word in ("lower", "upper"):
            if not _divides(q, arguments[word]):
                raise MantaError(f"q={q:g} does not divide {word}={arguments[word]:g}: values are multiples of q.")
    if domain.bounds is not None and domain.bounds[0] >= domain.bounds[1]:
        exclusive = " (the upper bound is exclusive)" if domain.is_whole and q is None else ""
        raise MantaError(f"it has no more than one value{exclusive}: nothing to search. Set the value itself.")


def _divides(q: float, value: float) -> bool:
    return math.isclose(value / q, round(value / q), rel_tol=1e-9, abs_tol=1e-9)


def _shown(value: Any) -> str:
    """A value as it is written in a call."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, str):
        bare = all(part.isidentifier() and not keyword.iskeyword(part) for part in value.split("."))
        return value if bare and value not in WORDS else repr(value)
    return repr(value) if is_number(value) else json.dumps(value)


# --- many of them: a written space -------------------------------------------------------------------------------


def read(space: Any) -> tuple[dict[str, Domain], list[str]]:
    """The domains of a written space (a tree of dicts) by flat key, and what is wrong with those that cannot be read."""
    domains, problems = {}, []
    try:
        leaves = list(_leaves(_nested(space)))
    except MantaError as error:
        return {}, [str(error)]
    for key, leaf in leaves:
        try:
            domains[key] = leaf if isinstance(leaf, Domain) else parse(leaf)
        except MantaError as error:
            problems.append(f"search.space.{key}={leaf}: {error}")
    return domains, problems


def split_key(key: str) -> tuple[str, str | None, str | None]:
    """A flat key's setting, and the group and option it depends on: `model.choice.mlp.dropout` -> model.dropout."""
    group, depends, rest = key.partition(".choice.")
    if not depends:
        return key, None, None
    option, _, name = rest.partition(".")
    return f"{group}.{name}", group, option


def is_mutable(key: str, domain: Domain) -> bool:
    """Whether population based training may change this key in mid-training."""
    setting = split_key(key)[0]
    return setting in MUTABLE or (setting.startswith("optimizer.") and domain.numeric)


def combinations(domains: Mapping[str, Domain]) -> int:
    """How many trials a grid of listed values has."""

    def below(group: str, option: Any) -> int:
        return math.prod(len(d.arguments) for key, d in domains.items() if split_key(key)[1:] == (group, option))

    free = {key: domain for key, domain in domains.items() if split_key(key)[1] is None}
    return math.prod(sum(below(key, option) for option in domain.arguments) for key, domain in free.items())


def _nested(space: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that are written with dots as nested ones."""
    tree: dict[str, Any] = {}
    for name, value in space.items():
        *groups, last = str(name).split(".")
        value = _nested(value) if isinstance(value, Mapping) else value
        for group in reversed([*groups, last]):
            value = {group: value}
        tree = _joined(tree, value)
    return tree


def _joined(one: Any, other: Any, key: str = "search.space") -> Any:
    """Two parts of a tree; null, which takes a setting out of the search, wins."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = {name: _joined(one[name], other[name], f"{key}.{name}") for name in one if name in other}
        return {**one, **other, **both}
    if one is not None and other is not None:
        raise MantaError(f"{key} is given twice, {one} and {other}: leave one out.")
    return None


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flat keys with what is written there; options with settings of their own give the group's domain first."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and isinstance(value.get("choice"), dict):
            yield key, Domain("choice", tuple(value["choice"]))
            for option, below in value["choice"].items():
                if not isinstance(below, dict | None):
                    raise MantaError(
                        f"search.space.{key}.choice.{option}={below} must hold settings of {option}, "
                        f"e.g. search.space.{key}.choice.{option}.dropout='uniform(0, 0.5)', or {{}}."
                    )
                yield from _leaves(below or {}, f"{key}.choice.{option}.")
            yield from _leaves({inner: value[inner] for inner in value if inner != "choice"}, f"{key}.")
        elif isinstance(value, dict):
            yield from _leaves(value, f"{key}.")
        elif value is not None:
            yield key, value
