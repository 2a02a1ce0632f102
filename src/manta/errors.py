"""MantaError, the one exception for mistakes a user can mend, and how errors are shown.

Exit codes of every Manta command: 0 finished; 1 training failed; 2 the request is invalid or can
never be satisfied; 130 interrupted (resumable).
"""

import difflib
from collections.abc import Iterable

FINISHED, FAILED, INVALID, INTERRUPTED = 0, 1, 2, 130


class MantaError(Exception):
    """A mistake the user can mend: the message names the setting, its value, what is allowed and the way out."""

    def __init__(self, message: str, code: int = INVALID) -> None:
        super().__init__(message)
        self.code = code


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to a mistyped one, or None if nothing is close."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
