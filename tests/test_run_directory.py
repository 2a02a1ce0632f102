"""The run directory is a contract: other tools read it. See docs/run_directory.md."""

import json
import os
import shlex
from datetime import datetime
from pathlib import Path

import pytest
import torch
import yaml

from manta.runs import read_lines
from tests.conftest import Lab, compose_run, make_config


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """One run made by the command, with secrets in its environment."""
    lab = Lab(tmp_path_factory.mktemp("contract"))
    secrets = {"WANDB_API_KEY": "planted-in-environment", "MLFLOW_TRACKING_PASSWORD": "planted-in-environment"}
    done = lab.command(
        "scaling=in_process", "training.epochs=2", "name=it's", "tags=[a,b]", env={**os.environ, **secrets, "CUDA_TEST": "seen"}
    )  # fmt: skip
    assert done.returncode == 2, "names with quotes are refused"
    done = lab.command(
        "scaling=in_process", "training.epochs=2", "name=first", "tags=[a, b]", env={**os.environ, **secrets, "CUDA_TEST": "seen"}
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (lab.folder / "stdout").write_text(done.stdout)
    return lab


def read(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())


def test_layout(lab: Lab) -> None:
    run = lab.latest.path
    assert run.name.endswith("-first")
    assert run.parent.parent == lab.folder
    assert os.readlink(lab.folder / "latest") == str(run.relative_to(lab.folder))
    expected = {"config.yaml", "overrides.txt", "provenance.json", "status.json", "metrics.jsonl", "summary.json",
                "checkpoints", "train.log", "workers.json", ".launch.lock", ".lock"}  # fmt: skip
    assert {path.name for path in run.iterdir()} - {"uncommitted.diff"} == expected


def test_config_repeats_the_run(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lab.folder)  # where the command was typed
    run = lab.latest.path
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert "${" not in (run / "config.yaml").read_text()
    assert saved["training"]["epochs"] == 2
    assert saved["model"]["input_shape"] == [1, 8, 8]
    assert saved["tags"] == ["a", "b"]
    overrides = shlex.split((run / "overrides.txt").read_text())
    assert overrides == [
        f"storage.path={lab.folder}",
        "scaling=in_process",
        "training.epochs=2",
        "name=first",
        "tags=[a, b]",
    ]
    again, _, _ = compose_run(f"storage.path={lab.folder}", "resume=latest")
    assert again == make_config(*overrides)


def test_status_and_provenance(lab: Lab) -> None:
    status, provenance = read(lab.latest.path / "status.json"), read(lab.latest.path / "provenance.json")
    assert {key: status[key] for key in ("state", "attempts", "error", "exit_code")} == {
        "state": "finished", "attempts": 1, "error": None, "exit_code": 0,
    }  # fmt: skip
    times = [datetime.fromisoformat(str(status[name])) for name in ("started", "attempt_started", "finished")]
    assert times == sorted(times)
    assert times[0] < times[2]
    assert provenance["python"]
    assert provenance["packages"]["torch"] == torch.__version__.split("+")[0]  # type: ignore[index]
    assert provenance["environment"]["CUDA_TEST"] == "seen"  # type: ignore[index]
    assert set(provenance) == {"command", "git", "python", "ray", "packages", "host", "platform", "cpus", "memory_bytes",
                               "gpus", "environment"}  # fmt: skip


def test_metrics_and_summary(lab: Lab) -> None:
    lines = read_lines(lab.latest.metrics)
    assert [line["step"] for line in lines] == [10, 20, 23, 30, 40, 46]
    assert all({"step", "epoch", "time", "samples_per_s"} <= line.keys() for line in lines)
    assert [line["epoch"] for line in lines] == [1, 1, 1, 2, 2, 2]
    summary = read(lab.latest.path / "summary.json")
    assert {
        "state",
        "objective",
        "metrics",
        "best",
        "test",
        "throughput",
        "world_size",
        "resume_command",
    } <= summary.keys()
    assert summary["state"] == "finished"
    validations = [line for line in lines if "val/accuracy" in line]
    best = max(validations, key=lambda line: line["val/accuracy"])
    assert summary["objective"] == {"metric": "val/accuracy", "mode": "max", "value": best["val/accuracy"]}
    assert summary["best"]["step"] == best["step"]  # type: ignore[index]
    assert (lab.latest.path / summary["best"]["checkpoint"]).is_dir()  # type: ignore[index]
    assert set(summary["test"]) == {"test/loss", "test/accuracy"}  # type: ignore[call-overload]


def test_checkpoints_run_no_code(lab: Lab) -> None:
    folder = lab.latest.checkpoints
    assert os.readlink(folder / "last") == "step-00000046"
    state = torch.load(folder / "best" / "state.pt", weights_only=True)
    assert set(state["learner"]["model"]) == set(
        torch.load(folder / "last" / "state.pt", weights_only=True)["learner"]["model"]
    )
    assert [path.name for path in folder.glob(".*")] == []


def test_the_log_has_what_the_terminal_showed(lab: Lab) -> None:
    log, shown = (lab.latest.path / "train.log").read_text(), (lab.folder / "stdout").read_text()
    assert "val/accuracy" in shown
    for line in shown.splitlines():
        assert line.rstrip() in log
    assert "\x1b" not in log


def test_secrets_are_nowhere(lab: Lab) -> None:
    for path in lab.folder.rglob("*"):
        if path.is_file():
            assert b"planted-in-environment" not in path.read_bytes(), path
