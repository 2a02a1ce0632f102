"""TensorBoard files in the run directory, with the hparams plugin. Written anew at every start: they are only a view."""

import dataclasses
import json
import shutil
from typing import Any

from manta.config import Config
from manta.runs import RunDir
from manta.tracking import Alive, Point, results
from manta.tracking.mlflow import flat


class TensorboardTracker:
    def __init__(self, run: RunDir, config: Config, alive: Alive) -> None:
        self.run, self.config, self.alive = run, config, alive
        self._writer: Any = None

    def begin(self) -> None:
        from tensorboardX import SummaryWriter

        folder = self.run.path / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder), flush_secs=5)

    def log(self, points: list[Point]) -> None:
        for point in points:
            for key, value in {**point.values, "epoch": point.epoch}.items():
                self._writer.add_scalar(key, value, point.step, point.time)
        self._writer.flush()
        self.alive()

    def histograms(self, lines: list[dict[str, Any]]) -> None:
        import numpy as np

        for line in lines:
            for name, found in line["histograms"].items():
                if found["counts"]:
                    counts = np.array(found["counts"], dtype=float)
                    edges = np.linspace(found["low"], found["high"], len(counts) + 1)
                    middle = (edges[:-1] + edges[1:]) / 2
                    self._writer.add_histogram_raw(
                        name, min=found["low"], max=found["high"], num=counts.sum(), sum=(counts * middle).sum(),
                        sum_squares=(counts * middle**2).sum(), bucket_limits=edges[1:].tolist(),
                        bucket_counts=counts.tolist(), global_step=line["step"],
                    )  # fmt: skip

    def end(self, state: str) -> None:  # noqa: ARG002
        from tensorboardX.summary import hparams

        found = results(self.run)
        values = {
            key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in flat(dataclasses.asdict(self.config))
            if value is not None
        }
        for summary in hparams(values, found):
            self._writer.file_writer.add_summary(summary)
        step = self.run.read("summary.json").get("step", 0)
        for key, value in found.items():
            self._writer.add_scalar(key, value, step)
        self._writer.close()


make = TensorboardTracker
