"""Which runs a command is about: its filters, and in what order they are shown."""

import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

from manta.catalog.entries import STATES, Entry
from manta.catalog.settings import Defaults, read_yaml, same
from manta.errors import MantaError, nearest, suggest

FILTERS = ("state", "tag", "group", "name", "since", "where")


def add_filters(parser: ArgumentParser) -> None:
    """The options that `chosen` reads."""
    parser.add_argument("--state", action="append", metavar="STATE", help=f"of {', '.join(STATES)}; again for more")
    parser.add_argument("--tag", action="append", metavar="TAG", help="with this tag; again: with all of them")
    parser.add_argument("--group", metavar="GROUP", help="of this group; * stands for anything")
    parser.add_argument("--name", metavar="NAME", help="of this name; * stands for anything")
    parser.add_argument(
        "--since", metavar="WHEN", help="started since: 2026-11-30, 2026-11-30T14:00, today, 90m, 12h, 3d"
    )
    parser.add_argument(
        "--where", action="append", metavar="SETTING=VALUE", help="model=cnn, optimizer.lr=0.01, seed!=0"
    )


def has_filters(arguments: Namespace) -> bool:
    return any(getattr(arguments, name) is not None for name in FILTERS)


def chosen(entries: Iterable[Entry], arguments: Namespace, defaults: Defaults) -> Iterator[Entry]:
    """The runs that pass all filters, one by one.

    Raises:
        MantaError: a filter means nothing.
    """
    states = [_state(state) for given in arguments.state or () for state in given.split(",")]
    since = _moment(arguments.since) if arguments.since else None
    conditions = [_Condition(text, defaults) for text in arguments.where or ()]
    for entry in entries:
        if _passes(entry, arguments, states, since, conditions):
            yield entry
    for condition in conditions:
        condition.refuse_unknown()


def _passes(
    entry: Entry, arguments: Namespace, states: list[str], since: float | None, conditions: list["_Condition"]
) -> bool:
    return (
        (since is None or (entry.started or 0.0) >= since)
        and (not states or entry.state in states)
        and all(tag in entry.tags for tag in arguments.tag or ())
        and (arguments.group is None or fnmatchcase(entry.group, arguments.group))
        and (arguments.name is None or fnmatchcase(entry.name, arguments.name))
        and all(condition.holds(entry) for condition in conditions)
    )


def _state(text: str) -> str:
    if text in STATES:
        return text
    found = nearest(text, STATES)
    raise MantaError(
        f"--state {text}: it must be of {', '.join(STATES)}." + (f" Did you mean {found}?" if found else "")
    )


def _moment(text: str) -> float:
    """Seconds since 1970."""
    if ago := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text):
        return time.time() - float(ago[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[ago[2]]
    midnight = datetime.now().replace(hour=0, minute=0, second=0, microsecond=0)
    if text in ("today", "yesterday"):
        return (midnight - timedelta(days=text == "yesterday")).timestamp()
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise MantaError(
            f"--since {text}: write a date (2026-11-30, 2026-11-30T14:00), today, or an age (90m, 12h, 3d)."
        ) from None


class _Condition:
    """One --where: on the option of a group, or the value of a setting."""

    def __init__(self, text: str, defaults: Defaults) -> None:
        match = re.fullmatch(r"([^=!]+)(!?=)=?(.*)", text)
        if not match:
            raise MantaError(f"--where {text}: write SETTING=VALUE or SETTING!=VALUE, e.g. --where optimizer.lr=0.01")
        self.text, self.key, self.negated, self.wanted = text, match[1].strip(), match[2] == "!=", match[3].strip()
        self.defaults, self.is_group = defaults, self.key in defaults.groups
        try:
            self.value = read_yaml(self.wanted)
        except Exception:
            self.value = self.wanted
        self.seen = self.is_group or self.key in defaults.flat
        """Whether there is such a setting; those of a model are known only from runs that have it."""

    def holds(self, entry: Entry) -> bool:
        return self._equals(entry) != self.negated

    def _equals(self, entry: Entry) -> bool:
        if self.is_group:
            return self.defaults.choice(self.key, entry.overrides) in (self.wanted, self.value)
        if self.key not in entry.config:
            return False
        self.seen, found = True, entry.config[self.key]
        return same(found, self.value) or str(found) == self.wanted

    def refuse_unknown(self) -> None:
        """After all runs were looked at.

        Raises:
            MantaError: none has such a setting, and the defaults do not either.
        """
        if not self.seen:
            found = suggest(self.key, [*self.defaults.flat, *self.defaults.groups])
            hint = f" Did you mean {found}={self.wanted}?" if found else " `python train.py --cfg job` lists all."
            raise MantaError(f"--where {self.text}: no run has a setting {self.key}.{hint}")
