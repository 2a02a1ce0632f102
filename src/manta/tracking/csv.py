"""metrics.csv in the run directory: one row a report, a column for everything ever reported."""

import csv
import os
from typing import IO

from manta.config import Config
from manta.runs import RunDir
from manta.tracking import Alive, Point, Points


class CsvTracker:
    def __init__(self, run: RunDir, config: Config, alive: Alive) -> None:  # noqa: ARG002
        self.run = run

    def begin(self) -> None:
        pass

    def log(self, points: list[Point]) -> None:
        """Its columns are known at the end."""

    def end(self, state: str) -> None:  # noqa: ARG002
        aside = self.run.path / f".metrics.csv.{os.getpid()}"
        with open(aside, "w", newline="") as file:
            write(self.run, file)
        aside.replace(self.run.path / "metrics.csv")


def write(run: RunDir, file: IO[str]) -> None:
    """A run's history as CSV."""
    points = Points(run.metrics).new()
    names = list(dict.fromkeys(name for point in points for name in point.values))
    writer = csv.DictWriter(file, ["step", "epoch", "time", *names])
    writer.writeheader()
    for point in points:
        writer.writerow({"step": point.step, "epoch": point.epoch, "time": point.time, **point.values})


make = CsvTracker
