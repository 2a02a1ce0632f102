"""Launch after launch, also killed ones: no process, socket, shared memory or temporary directory of ours is left."""

import getpass
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, Lab, wait_for

SHORT = (
    "training.epochs=1",
    "training.limit_train_batches=2",
    "training.test=false",
    "scaling.resources_per_worker.CPU=1",
)
SEARCH = ("search=random", "search.num_samples=2", "search.refit=false", "search.report=false", *SHORT)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The temporary directory of the launches; its name is short, for Ray's sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="m"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def left(*folders: Path) -> list[str]:
    """Processes that have a file of these folders open (sockets and logs of Ray are in them) or work there."""
    found = []
    for process in psutil.process_iter():
        try:
            places = [os.readlink(file) for file in Path(f"/proc/{process.pid}/fd").iterdir()]
            places.append(process.cwd())
            if process.pid != os.getpid() and any(
                place.startswith(f"{folder}") for place in places for folder in folders
            ):
                found.append(f"{process.pid} {process.name()}")
        except (OSError, psutil.Error):
            continue
    return found


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch", "plasma", "sem.", "psm", "ray"))}


@pytest.mark.drill
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("runs", "searches", "kills"), [(2, 1, 1), (20, 5, 3)])
def test_nothing_is_left(lab: Lab, temporary: Path, runs: int, searches: int, kills: int) -> None:
    before = shared_memory()
    environment = {**os.environ, "TMPDIR": str(temporary), "RAY_TMPDIR": str(temporary)}
    for settings in [("scaling=cpu", *SHORT)] * runs + [SEARCH] * searches:
        done = lab.command(*settings, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    assert list(temporary.rglob("session_*")) == []
    slow = (
        "allowed_targets=[manta,torch,tests]",
        "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.05}]",
    )
    for _ in range(kills):
        last = lab.latest.path if (lab.folder / "latest").exists() else None
        process = lab.start(
            "scaling=cpu", "training.epochs=500", *SHORT[3:], *slow, env=environment, start_new_session=True
        )
        wait_for(lambda last=last: lab.latest.path != last and lab.latest.metrics.exists(), process)  # type: ignore[misc]
        process.kill()
        process.wait()
    clean = [sys.executable, str(ROOT / "scripts/runs.py"), "clean"]
    deadline = time.monotonic() + 60
    while (still := left(temporary, lab.folder)) and time.monotonic() < deadline:
        said = subprocess.run(clean, env=environment, capture_output=True, text=True, check=True).stdout
        assert said.startswith(("removed ", "nothing"))
    assert still == []
    subprocess.run(clean, env=environment, check=True)
    sessions = [path.name for path in temporary.rglob("session_*")]
    assert sessions == []
    assert {path.name for path in temporary.iterdir()} <= {
        "ray",
        f"torchinductor_{getpass.getuser()}",
    }  # a cache of torch's, which is meant to stay
    assert shared_memory() <= before
