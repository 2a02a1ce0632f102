"""A multirun of Hydra's: its jobs are frozen when it begins, run one by one or side by side, and resumed together.

Imports nothing: every command asks at its end whether it was a multirun.
"""

from collections.abc import Callable

_endings: list[Callable[[], int]] = []


def at_end(ending: Callable[[], int]) -> None:
    """Register what ends the multirun of this command and knows its exit code."""
    _endings.append(ending)


def end() -> int:
    """End the multirun, if this command is one; its exit code."""
    return _endings.pop()() if _endings else 0
