"""The tracker's server, the bucket and a worker fail in the same minute: the run ends as one that was left alone."""

import os
import signal
from pathlib import Path

import pytest

from manta.runs import RunDir
from tests.conftest import Lab, wait_for
from tests.drills.test_kill_points import told
from tests.test_resume import RESOURCES, SETTINGS, assert_identical
from tests.test_storage import Cloud, Door, cloud, in_mid_run, is_all_there, server
from tests.test_tracking import Server, only_once
from tests.test_tracking import server as tracking_server

__all__ = ["cloud", "server", "tracking_server"]
pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]
SLOW = "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.2}]"


def test_everything_at_once(cloud: Cloud, tracking_server: Server, tmp_path: Path) -> None:
    door = Door()
    door.open(int(tracking_server.uri.rpartition(":")[2]))
    settings = ("scaling=cpu", *RESOURCES, *SETTINGS, SLOW)
    track = (
        "tracking=[mlflow,csv]",
        f"tracking.mlflow.tracking_uri=http://127.0.0.1:{door.port}",
        "tracking.finish_s=200",
    )
    quick = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "3", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    started = cloud.start(*settings, *track, "scaling.max_failures=1", env={**cloud.environment, **quick})
    run = in_mid_run(cloud, started, 30)
    before = tracking_server.id(run)

    def step() -> int:
        return int(run.read("checkpoints/last/meta.json")["step"])

    door.shut()
    cloud.server.door.shut()
    failed_at = step()
    os.kill(run.read("workers.json")["ranks"][1]["pid"], signal.SIGKILL)
    wait_for(lambda: step() >= failed_at + 10, started)  # with another worker; nobody has heard of it
    (restart,) = run.read("status.json")["restarts"]
    assert (restart["kind"], restart["world_size"]) == ("failure", 2)
    assert not any(f"checkpoints/step-{step():08d}" in name for name in cloud.objects(run))
    wait_for(lambda: "does not answer" in run.log.read_text(), started)
    cloud.server.door.open(cloud.server.port)
    door.open(int(tracking_server.uri.rpartition(":")[2]))

    output, _ = started.communicate(timeout=400)
    assert started.returncode == 0, output
    undisturbed: RunDir = Lab(tmp_path / "undisturbed").run(*settings, "tracking=csv")
    assert_identical(run, undisturbed)
    assert told(run) == told(undisturbed)
    assert tracking_server.id(run) == before
    assert tracking_server.run(run).info.status == "FINISHED"
    assert only_once(tracking_server.points(run), run)
    assert is_all_there(cloud, run)
