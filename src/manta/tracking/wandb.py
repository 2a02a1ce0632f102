"""Weights & Biases. Rows are numbered by us, so that the server takes each once, and the axis is the optimizer step."""

import dataclasses
import os
import secrets
from typing import Any

from manta import runs
from manta.config import Config
from manta.runs import RunDir
from manta.search.record import STOPPED
from manta.tracking import Alive, Point, Told, place, results, state_of, update_state, wandb_mode

SAVE_EVERY = 50


class WandbTracker:
    def __init__(self, run: RunDir, config: Config, alive: Alive) -> None:
        self.run, self.config, self.alive = run, config, alive
        self.mode = wandb_mode(config.tracking.wandb)
        self._run: Any = None
        self._told = Told(run, "wandb")

    def begin(self) -> None:
        import wandb

        known = state_of(self.run, "wandb")
        identity = known.get("id") or secrets.token_hex(4)
        update_state(self.run, "wandb", id=identity, mode=self.mode)
        # The server knows the row it had last and takes only later ones; a directory written offline knows nothing.
        self._told = Told(self.run, "wandb", afresh=self.mode == "online" or known.get("mode") != self.mode)
        settings, where, objective = self.config.tracking.wandb, place(self.run, self.config), self.config.objective
        self._run = wandb.init(
            id=identity,
            resume="allow",
            mode=self.mode,  # type: ignore[arg-type]
            project=settings.project,
            entity=settings.entity,
            name=self.config.name if where.kind in ("train", "search") and self.config.name else where.name,
            group=group(self.run, self.config),
            job_type=settings.job_type or where.kind,
            notes=settings.notes,
            tags=self.config.tags,
            dir=str(self.run.path),
            config=dataclasses.asdict(self.config),
            settings=wandb.Settings(
                console="off", silent=True, reinit="create_new", init_timeout=self.config.tracking.finish_s,
                finish_timeout=self.config.tracking.finish_s, finish_timeout_raises=True, x_stats_pid=os.getppid(),
            ),
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric(objective.metric, step_metric="step", summary=objective.mode)

    def log(self, points: list[Point]) -> None:
        for count, point in enumerate(points, start=1):
            new = self._told.new(point)
            if new:
                row = {**new, "step": point.step, "epoch": point.epoch, "_timestamp": point.time}
                self._run.log(row, step=self._told.rows, commit=True)
                self._told.add(new, point.place)
            if count % SAVE_EVERY == 0:
                self._told.save()
        self._told.save()
        self.alive()

    def histograms(self, lines: list[dict[str, Any]]) -> None:
        import numpy as np
        import wandb

        for line in lines:
            if self._told.knows("histograms", [line["step"]]):
                continue
            row: dict[str, Any] = {"step": line["step"]}
            for name, found in line["histograms"].items():
                if found["counts"]:
                    edges = np.linspace(found["low"], found["high"], len(found["counts"]) + 1)
                    row[name] = wandb.Histogram(np_histogram=(np.array(found["counts"]), edges))
            self._run.log(row, step=self._told.rows, commit=True)
            self._told.add(["histograms"], [line["step"]])
        self._told.save()

    def end(self, state: str) -> None:
        if self._run is None:
            raise TimeoutError("the upload did not end in time")
        found, objective = results(self.run), self.config.objective
        self._run.summary.update({**found, "state": state})
        best = found.get(f"best/{objective.metric}")
        if best is not None:
            self._run.summary.update({objective.metric: {objective.mode: best}})
        if place(self.run, self.config).kind == "search":
            self._log_search()
        if self.config.tracking.wandb.save_checkpoint:
            self._log_checkpoint()
        run, self._run = self._run, None
        run.finish(exit_code={runs.FINISHED: 0, STOPPED: 0, runs.INTERRUPTED: 130}.get(state, 1))

    def _log_search(self) -> None:
        import pandas as pd
        import wandb

        found: dict[str, Any] = {}
        table, page = self.run.path / "trials.csv", self.run.path / "report.html"
        if table.is_file():
            found["trials"] = wandb.Table(dataframe=pd.read_csv(table))
        if page.is_file():
            found["report"] = wandb.Html(str(page))
        self._run.log(found, step=self._told.rows)

    def _log_checkpoint(self) -> None:
        import wandb

        path = runs.find_checkpoint(self.run.checkpoints, "best")
        if path is not None:
            artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint")
            artifact.add_dir(str(path))
            artifact.add_file(str(self.run.path / "config.yaml"))
            self._run.log_artifact(artifact, aliases=["best"])


def group(run: RunDir, config: Config) -> str | None:
    """The name that runs share which belong together: of the search, or what `group` says."""
    where = place(run, config)
    search = where.search or (run if where.kind == "search" else None)
    return config.group if search is None else place(search, config).name


make = WandbTracker
