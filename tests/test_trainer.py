"""What a start leaves out of Ray Train, and that this Ray still has it to leave out."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manta.config import Config
from manta.plan import Needs
from manta.runs import RunDir, read_lines
from manta.session import Session
from manta.view import View
from manta.workers import on_workers


def found(session: Session, _config: Config) -> dict[str, Any]:
    """On a worker."""
    import os

    import ray
    import torch.distributed as dist

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    return {
        "runtime_env": ray.get_runtime_context().get_runtime_env_string(),
        "places": session.gather({name: os.environ[name] for name in names}),
        "interval": os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"],
        "backend": dist.get_backend(),
    }


@pytest.mark.usefixtures("ray_cluster")
def test_workers_of_our_own_ray(tmp_path: Path) -> None:
    """No runtime_env, but its variables; the variables that torchrun sets are there."""
    result = on_workers(Config(), RunDir(tmp_path), Needs(2, False, {"CPU": 1}), View(), found, {})
    assert result["runtime_env"] == "{}"
    assert result["interval"] == "0.2"
    assert result["backend"] == "gloo"
    assert result["places"] == [
        {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
        for rank in ("0", "1")
    ]


def test_the_controller_needs_no_torch() -> None:
    code = "import sys, ray.train, manta.trainer, manta.workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ray_has_what_is_left_out() -> None:
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.execution.worker_group import WorkerGroup

    from manta.trainer import lean

    trainer = TorchTrainer(print)
    names = {type(each).__name__ for each in trainer._create_default_callbacks()}  # type: ignore[attr-defined]
    left = {type(each).__name__ for each in lean(TorchTrainer)(print)._create_default_callbacks()}
    assert names - left == {"DatasetsCallback", "PlacementGroupCleanerCallback"}
    assert callable(TorchTrainer._initialize_and_run_controller)  # type: ignore[attr-defined]
    assert callable(WorkerGroup._get_worker_runtime_env)


def test_ray_tells_of_restarts(tmp_path: Path) -> None:
    """The callback and the states by which the controller records why it starts workers again."""
    from ray.train.v2._internal.execution.controller import state

    from manta.trainer import recorders

    (recorder,) = recorders(RunDir(tmp_path), tmp_path / "restarts.jsonl")
    error = RuntimeError("Training failed")
    error.worker_failures = {1: RuntimeError("something new of Ray's")}  # type: ignore[attr-defined]
    resized = SimpleNamespace(num_workers=3)
    for now in (state.RestartingState(error), state.ResizingState(resized), state.ErroredState(error)):  # type: ignore[arg-type]
        recorder.after_controller_state_update(state.RunningState(), now)
    failure, resize = read_lines(tmp_path / "restarts.jsonl")
    assert (failure["kind"], failure["cause"]) == ("failure", "Training failed on rank 1: something new of Ray's")
    assert (resize["kind"], resize["cause"]) == ("resize", "nodes came or went, there will be 3 workers")
