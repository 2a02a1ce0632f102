"""Trackers: told everything once, whatever happens to the run or to them; and never a burden."""

import dataclasses
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import yaml

from manta.catalog.commands import main
from manta.errors import FINISHED, INVALID, MantaError
from manta.runs import RunDir, read_lines
from manta.tracking import Points, make, place, remember_end, sole, told_all
from manta.tracking.live import settle, tell_rest
from manta.tracking.sync import sync
from manta.tracking.trouble import explain
from manta.training.checkpoint import load_checkpoint
from tests import wandb_files
from tests.conftest import ROOT, Lab, history, make_config, summary, wait_for

# Runs wait for trackers as long as it takes on a busy machine.
SHORT = (
    "scaling=in_process",
    "training.limit_train_batches=8",
    "training.log_every_n_steps=2",
    "tracking.finish_s=200",
)
TRIALS = (*SHORT[1:], "search.refit_seeds=1")
pytestmark = pytest.mark.timeout(400)


def points(run: RunDir) -> list[tuple[str, int, float]]:
    """(metric, optimizer step, value) of every number in metrics.jsonl."""
    return [(key, point.step, value) for point in Points(run.metrics).new() for key, value in point.values.items()]


def only_once(found: list[tuple[str, int, float]], run: RunDir) -> bool:
    """Whether these are the run's own, each once; tests and bests of the end aside."""
    told = [each for each in found if not each[0].startswith(("test/", "best/")) and each[0] != "epoch"]
    assert Counter(map(reproducible, told)) == Counter(map(reproducible, points(run)))
    return bool(told)


def reproducible(point: tuple[str, int, float]) -> tuple[str, int, float]:
    """Steps that are done again take another time."""
    key, step, _ = point
    return (key, step, 0.0) if key == "samples_per_s" else point


# --- a real MLflow server --------------------------------------------------------------------------------------------


@dataclass
class Server:
    uri: str
    process: "subprocess.Popen[bytes]"

    @property
    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.uri)

    def points(self, run: RunDir) -> list[tuple[str, int, float]]:
        client, identity = self.client, self.id(run)
        keys = client.get_run(identity).data.metrics
        return [(m.key, m.step, m.value) for key in keys for m in client.get_metric_history(identity, key)]

    def id(self, run: RunDir) -> str:
        return str(json.loads((run.path / "tracking" / "mlflow.json").read_text())["run_id"])

    def run(self, run: RunDir) -> Any:
        return self.client.get_run(self.id(run))

    def files(self, run: RunDir) -> set[str]:
        return {file.path for file in self.client.list_artifacts(self.id(run))}


def start_server(folder: Path, port: int) -> Server:
    command = [
        sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/server.db",
        "--artifacts-destination", str(folder / "artifacts"), "--port", str(port), "--workers", "1",
    ]  # fmt: skip
    log = open(folder / "server.log", "ab")
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=folder)
    uri = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return requests.get(f"{uri}/health", timeout=2).ok
        except requests.RequestException:
            return False

    wait_for(answers, process, timeout_s=180)  # type: ignore[arg-type]
    return Server(uri, process)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    os.environ.update(MLFLOW_HTTP_REQUEST_TIMEOUT="10", MLFLOW_HTTP_REQUEST_MAX_RETRIES="1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = start_server(tmp_path_factory.mktemp("mlflow"), port)
    yield found
    os.killpg(found.process.pid, signal.SIGKILL)
    found.process.wait()


# --- one run ---------------------------------------------------------------------------------------------------------


def test_a_run_in_every_tracker(lab: Lab, server: Server) -> None:
    run = lab.run(
        *SHORT, "tracking=all", f"tracking.mlflow.tracking_uri={server.uri}", "training.epochs=3", "tags=[first,second]",
        "group=together", "name=here", "tracking.wandb.notes=a note", "tracking.watch=all", "model.hidden=[16]",
    )  # fmt: skip
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    found = summary(run)
    best = found["best"]["metrics"]["val/accuracy"]

    written = wandb_files.read(run.path)
    assert only_once(written.points(), run)
    assert [row["epoch"] for row in written.rows if "val/loss" in row] == [1, 2, 3]
    assert written.config["optimizer"] == config["optimizer"]  # nested, resolved
    assert written.config["model"]["input_shape"] == [1, 8, 8]
    assert set(written.run.tags) == {"first", "second"}
    assert (written.run.run_group, written.run.job_type, written.run.display_name) == ("together", "train", "here")
    assert written.run.notes == "a note"
    assert written.summary["val/accuracy"] == {"max": best}  # not the last
    assert written.summary["best/val/accuracy"] == best
    assert written.summary["test/accuracy"] == found["test"]["test/accuracy"]
    assert written.exit_codes == [0]
    drawn = [
        row["gradients/layers.1.weight.values"] for row in written.rows if "gradients/layers.1.weight.values" in row
    ]
    assert len(drawn) == 3 * 8 // 2
    assert sum(drawn[0]) == 64 * 16

    assert only_once(server.points(run), run)
    epochs = [(step, value) for key, step, value in server.points(run) if key == "epoch"]
    lines = Counter((line["step"], line["epoch"]) for line in read_lines(run.metrics))
    assert epochs and set(epochs) == set(lines)
    assert Counter(epochs) <= lines  # two lines of one step and one millisecond are one point to MLflow
    there = server.run(run)
    assert there.info.status == "FINISHED"
    assert there.info.run_name == "here"
    assert there.data.params["optimizer.lr"] == str(config["optimizer"]["lr"])
    assert there.data.params["model.input_shape"] == "[1, 8, 8]"
    assert there.data.metrics["test/accuracy"] == found["test"]["test/accuracy"]
    assert "tags=[first,second]" in there.data.tags["manta.overrides"]
    assert there.data.tags["mlflow.source.git.commit"] == run.read("provenance.json")["git"]["commit"]
    assert {"config.yaml", "metrics.jsonl", "summary.json", "model"} <= server.files(run)
    check_model(server, run)

    scalars, hparams, histograms = read_tensorboard(run.path / "tensorboard")
    assert only_once(scalars, run)
    assert hparams["optimizer.lr"] == config["optimizer"]["lr"]
    assert histograms == 2 * 4 * (3 * 8 // 2)
    rows = (run.path / "metrics.csv").read_text().splitlines()
    assert rows[0].startswith("step,epoch,time,")
    assert len(rows) == 1 + len(read_lines(run.metrics))


def check_model(server: Server, run: RunDir) -> None:
    """It loads by MLflow alone, and says what the best checkpoint says."""
    import mlflow

    from manta.recipes.pytorch import PyTorchRecipe

    found = mlflow.artifacts.download_artifacts(run_id=server.id(run), artifact_path="model", tracking_uri=server.uri)
    model, _ = PyTorchRecipe().export(make_config("model.hidden=[16]"), run.checkpoints / "best")
    inputs = torch.rand(5, 1, 8, 8)
    expected = model(inputs).detach()
    assert torch.allclose(mlflow.pytorch.load_model(found)(inputs), expected, atol=1e-6)
    served = mlflow.pyfunc.load_model(found)
    assert torch.allclose(torch.as_tensor(served.predict(inputs.numpy())), expected, atol=1e-6)
    assert served.metadata.signature.inputs.to_dict()[0]["tensor-spec"]["shape"] == (-1, 1, 8, 8)


def read_tensorboard(folder: Path) -> tuple[list[tuple[str, int, float]], dict[str, Any], int]:
    """Scalars, hyperparameters and the number of histograms in the event files."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    scalars, hparams, histograms = [], {}, 0
    for path in folder.glob("events*"):
        data, position = path.read_bytes(), 0
        while position < len(data):
            length = int.from_bytes(data[position : position + 8], "little")
            event = Event.FromString(data[position + 12 : position + 12 + length])
            position += 12 + length + 4
            for value in event.summary.value:
                plugin = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                for key, item in plugin.session_start_info.hparams.items():
                    hparams[key] = getattr(item, item.WhichOneof("kind"))
                if value.HasField("simple_value"):
                    scalars.append((value.tag, event.step, value.simple_value))
                histograms += value.HasField("histo")
    singles = {torch.tensor(value, dtype=torch.float32).item(): value for _, _, value in points(RunDir(folder.parent))}
    return [(tag, step, singles.get(value, value)) for tag, step, value in scalars], hparams, histograms


def test_no_tracker_draws_from_the_random_generators(lab: Lab) -> None:
    """A run is the same run with trackers: weights, history and the states of all generators."""
    settings = (*SHORT, "training.epochs=2", "model.dropout=0.2")
    plain, tracked = lab.run(*settings), lab.run(*settings, "tracking=[wandb,tensorboard]")
    assert history(plain) == history(tracked)
    states = [load_checkpoint(run.checkpoints / "last")[0] for run in (plain, tracked)]
    assert str(states[0]["ranks"]) == str(states[1]["ranks"])
    for name, tensor in states[0]["learner"]["model"].items():
        assert tensor.equal(states[1]["learner"]["model"][name])


def test_without_trackers_none_is_imported(lab: Lab) -> None:
    code = (
        "import sys, runpy\nsys.argv[1:] = sys.argv[2:]\n"
        "try:\n    runpy.run_path(sys.argv[0] and 'train.py', run_name='__main__')\n"
        "except SystemExit as end:\n    print(end.code, {'wandb', 'mlflow', 'tensorboardX'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", code, "train.py", f"storage.path={lab.folder}", *SHORT, "training.max_steps=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.stdout.endswith("0 set()\n"), done.stdout + done.stderr
    assert not (lab.latest.path / "tracking").exists()


# --- the same run, after anything -------------------------------------------------------------------------------------


@pytest.mark.drill
def test_one_run_through_a_killed_worker_and_a_resume(lab: Lab, server: Server) -> None:
    kill = f"[{{_target_: tests.faults.KillAt, call: 13, marker: {lab.folder}/killed}}]"
    arguments = (
        "scaling=cpu", "scaling.max_failures=1", "training.epochs=2", *SHORT[1:], "training.checkpoint.every_n_steps=5",
        "allowed_targets=[manta,torch,tests]", f"data.transforms.train={kill}", "tracking=[wandb,mlflow]",
        f"tracking.mlflow.tracking_uri={server.uri}", "tracking.mlflow.log_model=false",
    )  # fmt: skip
    done = lab.command(*arguments)
    assert done.returncode == FINISHED, done.stdout + done.stderr
    assert (lab.folder / "killed").exists()
    run = lab.latest
    identity = server.id(run)
    assert only_once(server.points(run), run)
    assert only_once(wandb_files.read(run.path).points(), run)
    # So fast that it forgets: the best is one of the attempt before.
    fast = ("optimizer.lr=3", "training.nonfinite_guard=false")
    assert lab.launch(f"resume={run.path}", "training.epochs=3", "scaling=in_process", *fast) == FINISHED
    assert read_lines(run.metrics)[-1]["epoch"] == 3
    assert summary(run)["best"]["epoch"] <= 2
    written = wandb_files.read(run.path)
    assert len(written.ids) == 1
    assert only_once(written.points(), run)
    assert [row["_step"] for row in written.rows] == list(range(len(written.rows)))
    assert written.summary["val/accuracy"] == {
        "max": summary(run)["best"]["metrics"]["val/accuracy"]
    }  # of all attempts
    assert server.id(run) == identity
    assert only_once(server.points(run), run)
    assert server.run(run).info.status == "FINISHED"
    assert server.run(run).data.tags["resumed.training.epochs"] == "3"


def test_failed_and_interrupted(lab: Lab, server: Server) -> None:
    track = ("tracking=[wandb,mlflow]", f"tracking.mlflow.tracking_uri={server.uri}", SHORT[-1])
    poison = "data.transforms.train=[{_target_: tests.faults.PoisonAt, call: 3}]"
    with pytest.raises(MantaError, match="nan"):
        lab.launch(*SHORT[:-1], *track, "allowed_targets=[manta,torch,tests]", poison)
    assert server.run(lab.latest).info.status == "FAILED"
    assert wandb_files.read(lab.latest.path).exit_codes == [1]
    slow = "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.05}]"
    process = lab.start(*SHORT[:1], *track, "allowed_targets=[manta,torch,tests]", slow)
    before = lab.latest
    wait_for(lambda: lab.latest != before and len(read_lines(lab.latest.metrics)) > 1, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 130, output
    assert server.run(lab.latest).info.status == "KILLED"
    assert only_once(server.points(lab.latest), lab.latest)


def test_exploits_may_take_steps_back(tmp_path: Path) -> None:
    """What a receiver reports after it took over weights is new, even at a step it was at before."""
    run = RunDir(tmp_path)
    lines = [
        {"step": 5, "epoch": 1, "val/loss": 0.5}, {"step": 10, "epoch": 2, "val/loss": 0.4},
        {"step": 5, "epoch": 1, "exploit": {"donor": 3}}, {"step": 10, "epoch": 2, "val/loss": 0.3},
    ]  # fmt: skip
    run.metrics.write_text("".join(json.dumps({**line, "time": 1.0}) + "\n" for line in lines))
    config = make_config("tracking=wandb", "tracking.wandb.mode=offline")
    for _ in range(2):
        tracker = make("wandb", run, config)
        tracker.begin()
        tracker.log(Points(run.metrics).new())
        tracker.end("finished")
    found = wandb_files.read(tmp_path)
    assert [row["val/loss"] for row in found.rows if "val/loss" in row] == [0.5, 0.4, 0.3]
    assert [row["exploit/donor"] for row in found.rows if "exploit/donor" in row] == [3]


# --- a search --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.drill
def test_a_search_and_its_trials(lab: Lab, server: Server) -> None:
    run = lab.run(
        "search=asha", "search.num_samples=8", "training.epochs=4", *TRIALS, "tracking=[wandb,mlflow]",
        f"tracking.mlflow.tracking_uri={server.uri}", "scaling.use_gpu=false", "tags=[searched]",
    )  # fmt: skip
    parent, name = server.id(run), place(run, make_config()).name
    ids = set()
    for number in range(8):
        trial = RunDir(run.path / "trials" / f"{number:05d}")
        written = wandb_files.read(trial.path)
        ids |= written.ids
        assert only_once(written.points(), trial)
        assert (written.run.run_group, written.run.job_type) == (name, "trial")
        assert (
            written.config["optimizer"]["lr"]
            == yaml.safe_load((trial.path / "config.yaml").read_text())["optimizer"]["lr"]
        )
        assert list(written.run.tags) == ["searched"]
        there = server.run(trial)
        assert there.data.tags["mlflow.parentRunId"] == parent
        assert there.data.tags["manta.state"] == trial.read("status.json")["state"]
        assert there.info.status == "FINISHED"
        assert only_once(server.points(trial), trial)
        assert "model" not in server.files(trial)
    assert len(ids) == 8
    there = server.run(run)
    assert there.info.status == "FINISHED"
    assert there.data.metrics["best/val/accuracy"] == summary(run)["objective"]["value"]
    assert {"trials.csv", "search.md", "model"} <= server.files(run)
    refits = [RunDir(path.parent) for path in run.path.glob("refit/*/*/config.yaml")]
    assert [server.run(each).data.tags["mlflow.parentRunId"] for each in refits] == [parent]
    assert wandb_files.read(run.path).run.job_type == "search"


def searched(lab: Lab, *trials: str, uri: str) -> RunDir:
    """A search as its processes leave it when the trials' trackers were too slow: two lines a trial, none of them told."""
    run = RunDir(lab.folder / "2026-11-30" / "12-00-00-search")
    for each in (run, *(RunDir(run.path / name) for name in trials)):
        each.path.mkdir(parents=True)
        each.save_config(
            make_config("tracking=[mlflow,csv]", uri, f"storage.path={lab.folder}", "tracking.finish_s=100")
        )
        each.write("status.json", {"state": "finished"})
        if each != run:
            lines = [{"step": step, "epoch": 1, "time": step, "train/loss": step / 4} for step in (1, 2)]
            each.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
            each.write("summary.json", {"best": {"epoch": 1, "step": 2, "metrics": {"val/loss": 0.25}}})
    (run.path / "space.yaml").write_text("{}")
    return run


def test_what_trials_could_not_tell_their_search_tells(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes of trials go with the search, perhaps before a tracker answered: none is left out, and none in silence."""
    from mlflow import MlflowClient

    said: list[str] = []
    uri = f"tracking.mlflow.tracking_uri=sqlite:///{lab.folder}/mlflow.db"
    names = ("trials/00000", "trials/00001", "refit/00000/seed-2")
    run = searched(lab, *names, uri=uri)
    remember_end(RunDir(run.path / names[0]), "stopped")  # said, but not heard
    config = make_config("tracking=[mlflow,csv]", uri, f"storage.path={lab.folder}", "tracking.finish_s=100")
    settle(run, "finished", config, said.append)
    assert said == []
    client = MlflowClient(f"sqlite:///{lab.folder}/mlflow.db")
    parent = run.read("tracking/mlflow.json")["run_id"]
    for part in (RunDir(run.path / name) for name in names):
        there = client.get_run(part.read("tracking/mlflow.json")["run_id"])
        assert (there.data.tags["mlflow.parentRunId"], there.info.status) == (parent, "FINISHED")
        assert there.data.metrics["train/loss"] == 0.5
        epochs = client.get_metric_history(there.info.run_id, "epoch")
        assert [(m.step, m.value) for m in epochs] == [(1, 1.0), (2, 1.0)]  # with each report, and not once more
        assert there.data.metrics["best/val/loss"] == 0.25
        assert told_all(part, "mlflow")
        assert told_all(part, "csv")
        assert (part.path / "metrics.csv").is_file()
    assert there.data.tags["manta.state"] == "finished"
    # All is told: nothing is done again, and nobody waits.
    before = [(run.path / name / "tracking" / "mlflow.json").stat().st_mtime_ns for name in names]
    assert tell_rest({RunDir(run.path / name): "finished" for name in names[1:]}, ["mlflow"], config, set()) == {}
    assert before == [(run.path / name / "tracking" / "mlflow.json").stat().st_mtime_ns for name in names]
    # More was reported than was told, and there is no time.
    with open(run.path / names[1] / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "epoch": 1, "time": 3, "train/loss": 0.1}\n')
    short = dataclasses.replace(config, tracking=dataclasses.replace(config.tracking, finish_s=0.0))
    with sole(RunDir(run.path / names[1]), "mlflow"):  # it hangs
        settle(run, "finished", short, said.append)
    command = f"python scripts/runs.py sync {run} --to mlflow"
    assert [line for line in said if line.startswith("mlflow")] == [
        f"mlflow has not been told all of 1 of the 3 trials and refits of {run}. Later: {command}"
    ]
    assert main(["scripts/runs.py", "--storage", str(lab.folder), *shlex.split(command)[2:]], ROOT) == FINISHED
    assert capsys.readouterr().out.count("mlflow has it all") == 4
    assert told_all(RunDir(run.path / names[1]), "mlflow")
    there = client.get_run(RunDir(run.path / names[1]).read("tracking/mlflow.json")["run_id"])
    assert there.data.metrics["train/loss"] == 0.1


def finished(folder: Path, *overrides: str) -> RunDir:
    """A run with two lines, as it ends."""
    run = RunDir(folder / "2026-11-30" / "13-00-00")
    run.path.mkdir(parents=True)
    run.save_config(make_config(f"storage.path={folder}", *overrides))
    run.write("status.json", {"state": "finished"})
    lines = [{"step": step, "epoch": 1, "time": step, "train/loss": step / 4} for step in (1, 2)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_sync_says_what_is_not_there(tmp_path: Path) -> None:
    run, said = finished(tmp_path), list[str]()
    with open(run.metrics, "a") as file:
        file.write('{"step": 3, "epo')
    sync(run, "csv", said.append)
    assert said == [f"{run}: csv has it all but the last line of metrics.jsonl, which is cut off"]
    assert len((run.path / "metrics.csv").read_text().splitlines()) == 3
    text = run.metrics.read_text()
    run.metrics.write_text("no report\n" + text)
    with pytest.raises(MantaError, match=r"metrics.jsonl is damaged: line 1 is no report"):
        sync(run, "csv", said.append)
    run.metrics.unlink()
    for name in ("csv", "mlflow", "tensorboard"):
        with pytest.raises(MantaError, match=f"no metrics.jsonl any more: there is nothing to tell {name}") as raised:
            sync(run, name, said.append)
        assert raised.value.code == INVALID
    assert len(said) == 1


def test_one_damaged_trial_keeps_no_other_back(lab: Lab) -> None:
    run, said = searched(lab, "trials/00000", "trials/00001", uri="tracking.mlflow.experiment_name=x"), list[str]()
    (run.path / "trials/00000/metrics.jsonl").unlink()
    with pytest.raises(MantaError, match=r"csv has been told all but 1 of .*\n.*00000 has no metrics.jsonl") as raised:
        sync(run, "csv", said.append)
    assert raised.value.code == INVALID
    assert f"{run}/trials/00001: csv has it all" in said
    assert told_all(RunDir(run.path / "trials/00001"), "csv")


def test_sync_tells_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead address in the run's settings: said whole; --tracking-uri names another, and each has everything once."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run, said = finished(tmp_path, "tracking=mlflow", "tracking.mlflow.tracking_uri=http://127.0.0.1:9"), list[str]()
    with pytest.raises(MantaError) as raised:
        sync(run, "mlflow", said.append)
    assert str(raised.value) == (
        f"mlflow could not be told of {run}: no answer from http://127.0.0.1:9 (connection refused); "
        "it is tracking.mlflow.tracking_uri of the run. To tell another server: --tracking-uri URI."
    )
    databases = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "other")]
    command = ["scripts/runs.py", "--storage", str(tmp_path), "sync", "latest", "--to", "mlflow", "--tracking-uri"]
    (tmp_path / "latest").symlink_to(run.path)
    sync(run, "mlflow", said.append, databases[0])
    with open(run.metrics, "a") as file:
        file.write('{"step": 3, "epoch": 1, "time": 3, "train/loss": 0.1}\n')
    assert main([*command, databases[1]], ROOT) == FINISHED
    sync(run, "mlflow", said.append, databases[0])  # what the other was told counts for nothing here
    for uri in databases:
        client = MlflowClient(uri)
        (experiment,) = [e.experiment_id for e in client.search_experiments() if e.name == "manta"]
        (there,) = client.search_runs([experiment])
        history = client.get_metric_history(there.info.run_id, "train/loss")
        assert sorted((m.step, m.value) for m in history) == [(1, 0.25), (2, 0.5), (3, 0.1)]
    assert main([*command, "ftp://nowhere"], ROOT) == INVALID
    with pytest.raises(MantaError, match="--tracking-uri is of mlflow"):
        sync(run, "csv", said.append, databases[0])


def test_errors_of_databases_are_one_line(tmp_path: Path) -> None:
    config = make_config(f"storage.path={tmp_path}", "tracking=mlflow")
    pages = (
        "(sqlite3.OperationalError) table spans already exists\n[SQL: \nCREATE TABLE spans (...)\n]\n"
        "(Background on this error at: https://sqlalche.me/e/20/e3q8)"
    )
    assert explain(RuntimeError(pages), "mlflow", config) == (
        f"the database {tmp_path}/mlflow.db is half made ((sqlite3.OperationalError) table spans already exists). "
        f"If it has no other runs, delete it: rm {tmp_path}/mlflow.db"
    )
    away = make_config("tracking=mlflow", f"tracking.mlflow.tracking_uri=sqlite:///{tmp_path}/no/m.db")
    assert explain(RuntimeError("(sqlite3.OperationalError) unable to open"), "mlflow", away) == (
        f"the folder of {tmp_path}/no/m.db does not exist; it is tracking.mlflow.tracking_uri of the run"
    )


@pytest.mark.drill
@pytest.mark.usefixtures("ray_cluster")
def test_trials_that_take_over_weights(lab: Lab) -> None:
    """Paused, resumed and with another's weights, in any process: one run each, every point once."""
    run = lab.run(
        "search=pbt", "search.num_samples=4", "training.epochs=6", *TRIALS, "search.report=false", "training.test=false",
        "search.space.optimizer.lr=loguniform(1e-6,1e-1)", "tracking=wandb", "tracking.wandb.mode=offline",
    )  # fmt: skip
    exploits = 0
    for number in range(4):
        trial = RunDir(run.path / "trials" / f"{number:05d}")
        written = wandb_files.read(trial.path)
        assert len(written.ids) == 1
        assert only_once(written.points(), trial)
        exploits += sum("exploit/donor" in row for row in written.rows)
    assert exploits > 0


@pytest.mark.usefixtures("ray_cluster")
def test_bad_trials_end_in_trackers_too(lab: Lab, server: Server) -> None:
    run = lab.run(
        "search=grid", "search/space=none", "search.space.seed=choice(1,2,4)", *TRIALS, "search.refit=false", "search.report=false",
        "allowed_targets=[manta,torch,tests]", "recipe._target_=tests.probes.Troubled", "tracking=mlflow",
        f"tracking.mlflow.tracking_uri={server.uri}", "training.epochs=2", "search.max_concurrent_trials=1",
    )  # fmt: skip
    states = [server.run(RunDir(run.path / "trials" / f"{number:05d}")).info.status for number in range(3)]
    assert states == ["FINISHED", "FAILED", "FAILED"]  # trained, raised, killed


# --- trackers that are away ------------------------------------------------------------------------------------------


@pytest.mark.drill
def test_a_server_that_hangs_or_dies_hurts_nobody(lab: Lab, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """SIGSTOP, later SIGKILL; one warning, exit 0; afterwards it is told what it missed, once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path / "server"
    folder.mkdir()
    away = start_server(folder, port)
    request.addfinalizer(lambda: away.process.poll() is None and os.killpg(away.process.pid, signal.SIGKILL))
    slow = "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.02}]"
    process = lab.start(
        *SHORT[:1], "training.epochs=80", "training.limit_train_batches=20", "allowed_targets=[manta,torch,tests]", slow,
        "tracking=mlflow", f"tracking.mlflow.tracking_uri={away.uri}", "tracking.finish_s=6",
        env={**os.environ, "MLFLOW_HTTP_REQUEST_TIMEOUT": "3"},
    )  # fmt: skip
    wait_for(lambda: (lab.latest.path / "tracking" / "mlflow.json").exists() and "run_id" in
             lab.latest.read("tracking/mlflow.json"), process)  # fmt: skip
    os.killpg(away.process.pid, signal.SIGSTOP)
    seen = len(read_lines(lab.latest.metrics))
    wait_for(lambda: len(read_lines(lab.latest.metrics)) >= seen + 3, process)
    os.killpg(away.process.pid, signal.SIGKILL)
    away.process.wait()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == FINISHED, output
    assert output.count("scripts/runs.py sync") == 1, output
    run = lab.latest
    assert len(read_lines(run.metrics)) >= 80
    back = start_server(folder, port)
    try:
        sync(run, "mlflow", print)
        assert only_once(back.points(run), run)
        assert back.run(run).info.status == "FINISHED"
        with sqlite3.connect(folder / "server.db") as database:
            rows = [
                database.execute(f"select count(*) from {table}").fetchone() for table in ("metrics", "runs", "params")
            ]
            sync(run, "mlflow", print)
            assert rows == [
                database.execute(f"select count(*) from {table}").fetchone() for table in ("metrics", "runs", "params")
            ]
    finally:
        os.killpg(back.process.pid, signal.SIGKILL)
        back.process.wait()


def test_twenty_at_once_in_one_database(lab: Lab) -> None:
    """A new SQLite file and twenty runs that are told at the same time, from four processes."""
    runs = []
    for number in range(20):
        run = RunDir(lab.folder / f"run-{number}")
        run.path.mkdir()
        uri = f"tracking.mlflow.tracking_uri=sqlite:///{lab.folder}/mlflow.db"
        run.save_config(
            make_config("tracking=mlflow", uri, f"storage.path={lab.folder}", "tracking.mlflow.log_model=false")
        )
        lines = [{"step": step, "epoch": 1, "time": step, "train/loss": number + step / 50} for step in range(1, 51)]
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs.append(run)
    followers = []
    for first in range(0, 20, 5):
        process = subprocess.Popen(
            [sys.executable, "-m", "manta.tracking.follower", str(lab.folder / f"log-{first}")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        followers.append(process)
        assert process.stdin is not None
        for run in runs[first : first + 5]:
            number = runs.index(run)
            follow = {"follow": str(run.path), "number": number, "trackers": ["mlflow"], "state": None}
            process.stdin.write(json.dumps(follow) + "\n")
            process.stdin.write(json.dumps({"end": number, "state": "finished"}) + "\n")
        process.stdin.flush()
    for process in followers:
        assert process.stdout is not None
        killer = threading.Timer(200, process.kill)
        killer.start()
        ended = 0
        while ended < 5 and (line := process.stdout.readline()):
            ended += json.loads(line)["what"] == "ended"
        killer.cancel()
        assert ended == 5, (lab.folder / "log-0").read_text()
        process.stdin.close()  # type: ignore[union-attr]
        process.wait(30)
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{lab.folder}/mlflow.db")
    for run in runs:
        found = client.get_metric_history(run.read("tracking/mlflow.json")["run_id"], "train/loss")
        assert [(m.key, m.step, m.value) for m in sorted(found, key=lambda m: m.step)] == points(run)


def test_a_tracker_that_cannot_be_reached_is_said_once(lab: Lab) -> None:
    """W&B online where nothing answers: the run ends well, and its files have everything."""
    away = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = lab.command(*SHORT[:-1], "tracking=wandb", "tracking.finish_s=4", env={**os.environ, **away})
    assert done.returncode == FINISHED, done.stdout + done.stderr
    assert "wandb online" in done.stdout
    assert done.stdout.count("scripts/runs.py sync") == 1
    assert "Finished" in done.stdout


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_keys_are_nowhere(lab: Lab, server: Server, tmp_path: Path) -> None:
    """Neither those of the environment nor those of .env."""
    keys = {name: secrets.token_hex(20) for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN")}
    filed = {name: secrets.token_hex(20) for name in ("MY_SECRET", "MLFLOW_TRACKING_USERNAME")}
    place = tmp_path / "project"
    place.mkdir()
    shutil.copy2(ROOT / "train.py", place)
    shutil.copytree(ROOT / "conf", place / "conf")
    (place / ".env").write_text("".join(f"{name}={value}\n" for name, value in filed.items()))
    command = [
        sys.executable, str(place / "train.py"), *SHORT, "tracking=all", "tracking.wandb.mode=offline", "training.epochs=1",
        f"tracking.mlflow.tracking_uri={server.uri}", f"storage.path={lab.folder}/results",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env={**os.environ, **keys})
    assert done.returncode == FINISHED, done.stdout + done.stderr
    files = [path for path in (lab.folder / "results").rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(path.suffix == ".wandb" for path in files)
    database = (Path(server.process.args[5].removeprefix("sqlite:///"))).read_bytes()  # type: ignore[index,union-attr]
    for key in [*keys.values(), *filed.values()]:
        assert key not in done.stdout + done.stderr
        assert [path for path in files if key.encode() in path.read_bytes()] == []
        assert key.encode() not in database
