"""What tests share: runs through the real entry, in this process or as a command, and one Ray for all of them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads that spin make small tests slow on a busy machine

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from manta.checks import check
from manta.commandline import with_domains
from manta.config import Config, from_hydra, register
from manta.launch import launch
from manta.resume import restore
from manta.runs import RunDir, read_lines
from manta.search.prepare import space_of
from manta.search.space import Space
from manta.view import SPEEDS

ROOT = Path(__file__).resolve().parents[1]


def make_config(*overrides: str) -> Config:
    """The configuration that `python train.py <overrides>` would run."""
    return compose_run(*overrides)[0]


def compose_run(*overrides: str) -> tuple[Config, RunDir | None, Space | None]:
    """The configuration, the run that `resume=` continues with it, and the space of a search."""
    register()
    GlobalHydra.instance().clear()
    given = with_domains(overrides)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", given)
        cfg, previous = restore(cfg, given) if cfg.resume else (cfg, None)
        config = from_hydra(cfg)
        check(config)
        space = space_of(config, cfg, given, previous)
    return config, previous, space


class Lab:
    """Runs experiments with their results under one temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *overrides: str) -> RunDir:
        """Train in this process (Ray workers if asked for) and expect success."""
        before = set(self.folder.glob("????-??-??/*"))
        assert self.launch(*overrides) == 0
        (made,) = set(self.folder.glob("????-??-??/*")) - before
        return RunDir(made)

    def launch(self, *overrides: str) -> int:
        """What `python train.py` does after Hydra; the exit code, or the error raised."""
        config, previous, space = compose_run(f"storage.path={self.folder}", *overrides)
        return launch(config, list(overrides), previous, space).code

    def command(self, *arguments: str, script: str = "train.py", **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a script of the project to its end as a user would."""
        return subprocess.run(
            [sys.executable, str(ROOT / script), f"storage.path={self.folder}", *arguments],
            capture_output=True, text=True, timeout=240, check=False, cwd=self.folder, **options,
        )  # fmt: skip

    def start(self, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
        """Start train.py and return at once."""
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), f"storage.path={self.folder}", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder, **options,
        )  # fmt: skip

    @property
    def latest(self) -> RunDir:
        return RunDir((self.folder / "latest").resolve())


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray for every test that runs workers from this process; 4 CPUs and 2 GPUs are declared."""
    from manta.cluster import connect
    from manta.config import Cluster

    with connect(Cluster(kind="local", num_cpus=4, num_gpus=2)):
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a file system is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def history(run: RunDir, *without: str) -> list[dict[str, Any]]:
    """metrics.jsonl without the keys that are times."""
    dropped = {"time", *SPEEDS, *without}
    return [{k: v for k, v in line.items() if k not in dropped} for line in read_lines(run.metrics)]


def summary(run: RunDir) -> dict[str, Any]:
    return json.loads((run.path / "summary.json").read_text())


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]", timeout_s: float = 120) -> None:
    """Return when the condition holds; fail if the process ends or the time is over before."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)
