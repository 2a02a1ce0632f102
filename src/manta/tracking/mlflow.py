"""MLflow, by its client alone: no active run, nothing global. The server's own history says what it has been told."""

import dataclasses
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import traceback
import uuid
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manta import runs
from manta.config import Config
from manta.runs import RunDir
from manta.search.record import STOPPED
from manta.tracking import Alive, Point, Told, place, results, sole, state_of, update_state, without_secrets

if TYPE_CHECKING:
    from mlflow.entities import Run

METRICS_A_BATCH, PARAMS_A_BATCH, LONGEST_KEY, LONGEST_VALUE, LONGEST_TAG = 1000, 100, 250, 500, 5000
"""What servers take; older ones take 500 characters of a parameter, newer ones 6,000."""
NO_EPOCH = -1
"""Of what is told at the end: its epochs were told with the lines."""
FILES = ("config.yaml", "overrides.txt", "provenance.json", "summary.json", "metrics.jsonl", "search.md", "trials.csv", "report.html")  # fmt: skip
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
_STATUS = {runs.FINISHED: "FINISHED", STOPPED: "FINISHED", runs.FAILED: "FAILED"}  # anything else: KILLED


class MlflowTracker:
    def __init__(self, run: RunDir, config: Config, alive: Alive) -> None:
        self.run, self.config, self.alive = run, config, alive
        self.settings = config.tracking.mlflow
        self._client: Any = None
        self._id = ""
        self._told = Told(run, "mlflow")

    # --- beginning ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        uri = tracking_uri(self.config)
        with sole(RunDir(self.config.storage.folder), "mlflow"):  # a new database is made by one process
            self._client = MlflowClient(uri)
            experiment = self._experiment(uri)
        self.alive()
        found, where = self._find(experiment), without_secrets(uri)
        if state_of(self.run, "mlflow").get("uri", where) != where:  # what another server was told does not count
            self._told = Told(self.run, "mlflow", afresh=True)
        if found is None:
            self._told = Told(self.run, "mlflow", afresh=True)
            found = self._client.create_run(experiment, run_name=self._name(), tags=self._tags())
        else:
            self._client.update_run(found.info.run_id, status="RUNNING")
        self._id = found.info.run_id
        update_state(self.run, "mlflow", run_id=self._id, experiment_id=experiment, uri=where)
        self._adopt(found)
        self._log_params(found)
        self.alive()

    def _experiment(self, uri: str) -> str:
        name = self.settings.experiment_name
        known = self._client.get_experiment_by_name(name)
        if known is not None:
            return str(known.experiment_id)
        # A server knows where files go; a database alone would put them where this process happens to stand.
        folder = None if uri.startswith("http") else (self.config.storage.folder / "mlflow-artifacts").as_uri()
        try:
            return str(self._client.create_experiment(name, artifact_location=folder))
        except Exception:
            known = self._client.get_experiment_by_name(name)  # another process was quicker
            if known is None:
                raise
            return str(known.experiment_id)

    def _find(self, experiment: str) -> "Run | None":
        """The run that was made before, also if its answer never came."""
        mark = state_of(self.run, "mlflow").get("mark")
        if mark is None:
            update_state(self.run, "mlflow", mark=uuid.uuid4().hex)
            return None
        found = self._client.search_runs([experiment], f"tags.`manta.mark` = '{mark}'", max_results=1)
        return found[0] if found else None

    def _name(self) -> str:
        where = place(self.run, self.config)
        return self.config.name if self.config.name and where.search is None else where.name

    def _tags(self) -> dict[str, str]:
        where, git = place(self.run, self.config), self.run.read("provenance.json").get("git", {})
        overrides = self.run.path / "overrides.txt"
        tags = {
            "manta.mark": state_of(self.run, "mlflow")["mark"],
            "manta.kind": where.kind,
            "manta.run": str(self.run.path),
            "manta.group": self.config.group,
            "manta.tags": ", ".join(self.config.tags) or None,
            "manta.overrides": overrides.read_text() if overrides.is_file() else None,
            "mlflow.source.name": "train.py",
            "mlflow.source.type": "LOCAL",
            "mlflow.source.git.commit": git.get("commit"),
            "mlflow.source.git.branch": git.get("branch"),
            **{f"tag.{tag}": "true" for tag in self.config.tags if re.fullmatch(r"[\w.\-/ ]{1,200}", tag)},
        }
        return {key: value[:LONGEST_TAG] for key, value in tags.items() if value}

    def _adopt(self, found: "Run") -> None:
        """Make a trial a child of its search's run, as soon as that is known."""
        search = place(self.run, self.config).search
        parent = state_of(search, "mlflow").get("run_id") if search is not None else None
        if parent is not None and found.data.tags.get("mlflow.parentRunId") != parent:
            self._client.set_tag(self._id, "mlflow.parentRunId", parent)

    def _log_params(self, found: "Run") -> None:
        """Parameters are written once: what a resume changed becomes a tag."""
        from mlflow.entities import Param, RunTag

        wanted = {_key(key): str(value)[:LONGEST_VALUE] for key, value in flat(dataclasses.asdict(self.config))}
        known = found.data.params
        new = [Param(key, value) for key, value in wanted.items() if key not in known]
        changed = [RunTag(f"resumed.{k}", v) for k, v in wanted.items() if k in known and known[k] != v]
        for batch in batches(new, PARAMS_A_BATCH):
            self._client.log_batch(self._id, params=batch)
        for tags in batches(changed, PARAMS_A_BATCH):
            self._client.log_batch(self._id, tags=tags)

    # --- while it trains ---------------------------------------------------------------------------------------------

    def log(self, points: list[Point]) -> None:
        """A batch whose answer got lost is sent again with the same times, which the server knows then."""
        from mlflow.entities import Metric

        new = ((point, key, value) for point in points for key, value in self._values(point).items())
        for batch in batches(new, METRICS_A_BATCH):
            metrics = [Metric(_key(key), value, int(point.time * 1000), point.step) for point, key, value in batch]
            self._client.log_batch(self._id, metrics=metrics)
            for point, key, _ in batch:
                self._told.add([key], point.place, rows=0)
            self._told.save()
            self.alive()

    def _values(self, point: Point) -> dict[str, float]:
        new = self._told.new(point)
        return {**new, "epoch": float(point.epoch)} if new and point.epoch != NO_EPOCH else new

    # --- the end -----------------------------------------------------------------------------------------------------

    def end(self, state: str) -> None:
        summary = self.run.read("summary.json")
        step = summary.get("step", (summary.get("best") or {}).get("step", 0))
        time = int(os.path.getmtime(self.run.path / "summary.json") * 1000) / 1000 if summary else 0.0
        found = results(self.run)
        if found:
            self.log([Point(step, NO_EPOCH, time, 0, 0, found)])
        self._client.set_tag(self._id, "manta.state", state)
        self._adopt(self._client.get_run(self._id))
        for name in FILES:
            if (self.run.path / name).is_file():
                self._client.log_artifact(self._id, str(self.run.path / name))
                self.alive()
        if (self.run.path / "report").is_dir():
            self._client.log_artifacts(self._id, str(self.run.path / "report"), "report")
            self.alive()
        if state == runs.FINISHED and place(self.run, self.config).kind != "trial":
            self._log_best()
        self._client.set_terminated(self._id, _STATUS.get(state, "KILLED"))

    def _log_best(self) -> None:
        where = RunDir(self.run.path / "best") if place(self.run, self.config).kind == "search" else self.run
        path = runs.find_checkpoint(where.checkpoints, "best")
        if path is None:
            return
        if self.settings.save_checkpoint:
            self._client.log_artifacts(self._id, str(path), "checkpoint")
            self.alive()
        if self.settings.log_model:
            with tempfile.TemporaryDirectory() as folder:
                if save_model(where, path, Path(folder) / "model", self.alive):
                    self._client.log_artifacts(self._id, str(Path(folder) / "model"), "model")
                    self.alive()


def tracking_uri(config: Config) -> str:
    """Of the settings, else the environment, else a database below `storage.path`."""
    uri = config.tracking.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        return f"sqlite:///{config.storage.folder.absolute()}/mlflow.db"
    return uri


def save_model(run: RunDir, checkpoint: Path, target: Path, alive: Alive) -> bool:
    """The best model as MLflow keeps models, with its signature; False if the recipe exports none."""
    import torch
    from mlflow import pytorch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec
    from omegaconf import OmegaConf

    from manta.recipes import make_recipe
    from manta.resume import load

    config = OmegaConf.to_object(load(run))
    assert isinstance(config, Config)
    recipe = make_recipe(config)
    if not hasattr(recipe, "export"):
        return False
    alive()
    try:
        model, example = recipe.export(config, checkpoint)
    except NotImplementedError:
        return False
    with torch.no_grad():
        output = model(example)
    alive()
    inputs, outputs = (Schema([TensorSpec(each.numpy().dtype, (-1, *each.shape[1:]))]) for each in (example, output))
    settings: dict[str, Any] = {
        "signature": ModelSignature(inputs, outputs),
        "input_example": example.numpy(),
        "pip_requirements": [f"torch=={torch.__version__.split('+')[0]}", "numpy"],
    }
    try:  # a traced graph: needs neither our code nor pickle
        pytorch.save_model(model, str(target), serialization_format="pt2", **settings)
    except Exception:
        traceback.print_exc()
        shutil.rmtree(target, ignore_errors=True)
        code = sorted({str(Path(__file__).parents[1]), *map(str, _sources(config))})
        pytorch.save_model(model, str(target), serialization_format="pickle", code_paths=code, **settings)
    return True


def _sources(config: Config) -> Iterator[Path]:
    """Packages of the researcher's own that the model comes from."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    top = sys.modules.get(str(config.model["_target_"]).split(".")[0])
    file = getattr(top, "__file__", None)
    if file is not None and not file.startswith(installed):
        path = Path(file)
        yield path.parent if path.name == "__init__.py" else path


def flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by their dotted names; lists as JSON."""
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(item) if isinstance(item, dict | list) else item


def _key(key: str) -> str:
    """A name with the characters that MLflow takes."""
    return re.sub(r"[^\w.\-/ ]", "_", key)[:LONGEST_KEY]


def batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


make = MlflowTracker
