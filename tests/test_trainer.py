"""What a start leaves out of Ray Train."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manta.config import Config
from manta.plan import Needs
from manta.runs import RunDir
from manta.session import Session
from manta.view import View
from manta.workers import on_workers


def found(session: Session, _config: Config) -> dict[str, Any]:
    """On a worker."""
    import os

    import torch.distributed as dist

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    return {
        "places": session.gather({name: os.environ[name] for name in names}),
        "interval": os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"],
        "backend": dist.get_backend(),
    }


@pytest.mark.usefixtures("ray_cluster")
def test_workers_of_our_own_ray(tmp_path: Path) -> None:
    """The variables that torchrun sets are there, and those of Ray Train."""
    result = on_workers(Config(), RunDir(tmp_path), Needs(2, False, {"CPU": 1}), View(), found, {})
    assert result["interval"] == "0.2"
    assert result["backend"] == "gloo"
    assert result["places"] == [
        {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
        for rank in ("0", "1")
    ]


def test_the_controller_needs_no_torch() -> None:
    code = "import sys, ray.train, manta.trainer, manta.workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
