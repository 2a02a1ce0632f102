"""metrics.csv in the run directory: one row a report, a column for everything ever reported."""

import os

from manta.catalog.render import comma_separated
from manta.config import Config
from manta.runs import RunDir, read_lines
from manta.tracking import Alive, Point


class CsvTracker:
    def __init__(self, run: RunDir, config: Config, alive: Alive) -> None:  # noqa: ARG002
        self.run = run

    def begin(self) -> None:
        pass

    def log(self, points: list[Point]) -> None:
        """Its columns are known at the end."""

    def end(self, state: str) -> None:  # noqa: ARG002
        lines = read_lines(self.run.metrics)
        if lines:
            aside = self.run.path / f".metrics.csv.{os.getpid()}"
            aside.write_text(comma_separated([dict.fromkeys(("step", "epoch", "time")) | line for line in lines]))
            aside.replace(self.run.path / "metrics.csv")


make = CsvTracker
