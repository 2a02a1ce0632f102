"""What is known of one trial; everything at the end of a search is made from these. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Any

from manta.runs import RunDir

STOPPED = "stopped"  # beside the states of a run: ended early by the scheduler


@dataclass
class Record:
    """One trial, numbered from 0 in the order in which it was sampled."""

    number: int
    values: dict[str, Any]
    """What was sampled, by flat key (see `Space`); of the last exploit, under population based training."""
    state: str = "running"
    """running (or waiting), finished, stopped, failed."""
    epoch: int = 0
    """Of the last report."""
    epochs: int = 0
    """Trained by this trial itself."""
    best: dict[str, Any] | None = None
    """Its best validation so far: {"value", "epoch", "step", "metrics", "values"}."""
    seconds: float = 0.0
    error: str | None = None
    exploits: list[dict[str, Any]] = field(default_factory=list)
    """Under population based training: {"donor", "epoch", "values"} each time."""

    @property
    def value(self) -> float | None:
        """The best value of the objective."""
        return None if self.best is None else float(self.best["value"])


def trial_dir(search: RunDir, number: int) -> RunDir:
    """The run directory of a trial."""
    return RunDir(search.path / "trials" / f"{number:05d}")


def ranked(records: list[Record], mode: str) -> list[Record]:
    """Trials that have a value, the best first; of equals the earlier one."""
    sign = -1 if mode == "max" else 1
    return sorted((r for r in records if r.value is not None), key=lambda r: (sign * float(r.value or 0.0), r.number))
