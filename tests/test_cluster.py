"""cluster=existing: joining a Ray that is not ours, waiting for it, being refused by it, and leaving it running."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from manta import cluster
from manta.config import Cluster
from manta.errors import FAILED, INVALID, MantaError
from tests.conftest import ROOT, Lab, history, wait_for
from tests.nodes import OWN_RAY

SHORT = ("cluster=existing", "training.epochs=1", "training.limit_train_batches=3", "training.test=false")
TOKEN = "0123456789abcdef0123456789abcdef0123456789abcdef"


@dataclass
class Head:
    """A Ray started by hand."""

    address: str
    folder: Path
    process: "subprocess.Popen[bytes]"
    environment: dict[str, str]
    """To join it."""

    def does(self, code: str) -> "subprocess.Popen[str]":
        """Run code in a process that has joined this Ray."""
        start = f"import ray, time; ray.init({self.address!r}, logging_level='ERROR', log_to_driver=False)\n"
        return subprocess.Popen(
            [sys.executable, "-c", start + code], env=self.environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, cwd=self.folder,
        )  # fmt: skip


def environment(folder: Path, **auth: str) -> dict[str, str]:
    """Ours, without what would lead to another Ray or to another token."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name not in OWN_RAY}
    return {**kept, "RAY_TMPDIR": str(folder), "HOME": str(folder), **auth}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


@contextmanager
def start_head(folder: Path, **auth: str) -> Iterator[Head]:
    """`ray start --head` with 2 CPUs, ended by its own process id."""
    port, ours = free_port(), environment(folder, **auth)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    with open(folder / "ray.log", "w") as log:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=2",
             "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats",
             "--object-store-memory=80000000"],
            env={**ours, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}, cwd=elsewhere, stdout=log, stderr=log,
        )  # fmt: skip
    head = Head(f"127.0.0.1:{port}", folder, process, ours)
    try:
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in (folder / "ray.log").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "ray.log").read_text()
            time.sleep(0.2)
        yield head
        assert process.poll() is None, "somebody stopped a Ray that is not theirs"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


# Ray's sockets live in its folder, and their paths may have 107 characters: pytest's own folders are too deep.


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
        start_head(Path(folder), RAY_AUTH_MODE="disabled") as started,
    ):
        yield started


@pytest.fixture(scope="module")
def guarded() -> Iterator[Head]:
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
        start_head(Path(folder), RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as started,
    ):
        yield started


def join(address: str, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """What a launch does first, alone; prints the nodes."""
    code = (
        "import sys\nfrom manta.cluster import connect\nfrom manta.config import Cluster\n"
        "from manta.errors import exit_code\n"
        f"def command():\n with connect(Cluster(kind='existing', address={address!r})) as nodes: print(nodes)\n"
        " return 0\nsys.exit(exit_code(command))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.drill
def test_a_run_on_two_workers(lab: Lab, head: Head) -> None:
    """Started elsewhere, Ray still works where the user stands, and goes on afterwards."""
    done = lab.command(
        *SHORT, f"cluster.address={head.address}", "scaling=cpu", "allowed_targets=[manta,torch,tests]",
        "recipe._target_=tests.probes.Recipe", "model._target_=tests.probes.Net", "~model.hidden", "~model.dropout",
        "+model.nested={inner: []}", env=head.environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert json.loads((lab.latest.path / f"probe-{rank}.json").read_text())["cwd"] == str(lab.folder)
        assert done.stdout.count(f"hello from rank {rank}\n") == 1
    assert [rank["threads"] for rank in lab.latest.read("workers.json")["ranks"]] == [1, 1]
    assert "ray" not in done.stderr.lower()
    assert join(head.address, head.environment).stdout.strip() == "[{'CPU': 2.0}]"


HOLD = """
@ray.remote(num_cpus=2)
class Holder:
    def ready(self): return True
holder = Holder.remote()
ray.get(holder.ready.remote())
print("held", flush=True)
input()
"""


@pytest.mark.drill
def test_a_busy_cluster_is_waited_for(lab: Lab, head: Head) -> None:
    """Address auto: the Ray that was started by hand. It says what it waits for, and trains when that is free."""
    holder = head.does(HOLD)
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == "held\n"
    hasty = lab.command(*SHORT, "scaling.num_workers=1", "cluster.wait_s=0", env=head.environment)
    assert hasty.returncode == FAILED, hasty.stdout + hasty.stderr
    assert "cluster.wait_s=0: waited in vain for 1 worker with 1 CPU each; free now: nothing" in hasty.stderr
    assert lab.latest.read("status.json")["state"] == "failed"

    process = lab.start(*SHORT, "scaling.num_workers=1", env=head.environment)
    before = lab.latest.path
    wait_for(lambda: lab.latest.path != before and lab.latest.log.exists(), process)
    wait_for(lambda: "Waiting for 1 worker with 1 CPU each; free now: nothing" in lab.latest.log.read_text(), process)
    holder.communicate("\n", timeout=30)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.count("Waiting for 1 worker") >= 1


def test_infeasible_requests_are_refused(lab: Lab, head: Head) -> None:
    done = lab.command(*SHORT, f"cluster.address={head.address}", "scaling=cpu", "scaling.num_workers=3", env=head.environment)  # fmt: skip
    assert done.returncode == INVALID, done.stderr
    assert (
        "3 workers with 1 CPU each can never be placed. The cluster's nodes have: 2 CPU, which holds 2" in done.stderr
    )
    assert list(lab.folder.iterdir()) == []


def test_tokens(guarded: Head, tmp_path: Path) -> None:
    """A Ray with a token lets in who has it; who does not is told so at once."""
    right = join(guarded.address, environment(tmp_path, RAY_AUTH_TOKEN=TOKEN))
    assert right.stdout.strip() == "[{'CPU': 2.0}]", right.stderr
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(TOKEN)
    from_file = join(guarded.address, environment(tmp_path))
    assert from_file.stdout.strip() == "[{'CPU': 2.0}]", from_file.stderr

    began = time.monotonic()
    (tmp_path / ".ray" / "auth_token").write_text("f" * 48)
    for auth, says in (
        ({"RAY_AUTH_TOKEN": "wrong" * 8}, "did not accept the one of RAY_AUTH_TOKEN"),
        ({}, "did not accept the one of ~/.ray/auth_token"),
        ({"RAY_AUTH_MODE": "disabled"}, "none was sent"),
    ):
        refused = join(guarded.address, environment(tmp_path, **auth))
        assert refused.returncode == INVALID, refused.stderr
        (message,) = [line for line in refused.stderr.splitlines() if line.startswith("Error: ")]
        assert f"cluster.address={guarded.address}: the Ray cluster there wants its token and {says}." in message
        assert "RAY_AUTH_TOKEN" in message
        assert "wrongwrong" not in message
    assert time.monotonic() - began < 30


def test_a_token_is_no_obstacle_where_none_is_wanted(head: Head) -> None:
    done = join(head.address, {**environment(head.folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN})
    assert done.stdout.strip() == "[{'CPU': 2.0}]", done.stderr


@pytest.mark.parametrize("there", ["nothing", "something else", "no Ray on this machine"])
def test_no_ray_there(tmp_path: Path, there: str) -> None:
    """One message within seconds; Ray itself would try for a quarter of an hour."""
    began = time.monotonic()
    with socket.socket() as silent:
        silent.bind(("", 0))
        if there == "something else":
            silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        env = environment(tmp_path)
        if there == "no Ray on this machine":
            address, env = "auto", {**env, "RAY_ADDRESS": address}
        done = join(address, env)
    assert done.returncode == INVALID, done.stderr
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    for fragment in (
        f"cluster.address={address}: no Ray cluster",
        "nothing answered at",
        "ray start --head",
        "cluster=local",
    ):
        assert fragment in message
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 20


def test_other_versions(head: Head) -> None:
    """The cluster says it runs another Ray and another Python."""
    key = "b'CLUSTER_METADATA', {}, True, namespace=b'cluster'"
    pretend = (
        "import json\nfrom ray.experimental.internal_kv import _internal_kv_get as get, _internal_kv_put as put\n"
        "real = get(b'CLUSTER_METADATA', namespace=b'cluster')\n"
        "other = {**json.loads(real), 'ray_version': '2.1.0', 'python_version': '3.8.1'}\n"
        f"put({key.format('json.dumps(other).encode()')})\nprint('other', flush=True)\ninput()\nput({key.format('real')})\n"
    )
    pretender = head.does(pretend)
    assert pretender.stdout is not None
    assert pretender.stdout.readline() == "other\n"
    done = join(head.address, head.environment)
    pretender.communicate("\n", timeout=30)
    assert done.returncode == INVALID, done.stderr
    import ray

    ours = f"Ray {ray.__version__} and Python {sys.version.split()[0]}"
    assert f"the cluster runs Ray 2.1.0 and Python 3.8.1, this command {ours}." in done.stderr
    assert "pip install ray==2.1.0" in done.stderr
    assert join(head.address, head.environment).returncode == 0


def test_auto_is_never_somebody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several run, Ray would take any of them, also another run's own."""
    from ray._private import services

    from manta.cluster import _address

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"10.0.0.1:1", "10.0.0.1:2"})
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: None)
    with pytest.raises(ConnectionError, match=r"2 run on this machine, name one of 10.0.0.1:1, 10.0.0.1:2"):
        _address("auto")
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: "10.0.0.1:2")
    assert _address("auto") == "10.0.0.1:2"
    assert _address("10.0.0.1:9") == "10.0.0.1:9"


@pytest.mark.ray
@pytest.mark.drill
def test_own_rays_of_two_users_at_once() -> None:
    """On one host, in one folder for temporary files, where a dead Ray has left all it can: neither sees the other, or that."""
    with tempfile.TemporaryDirectory(prefix="mt") as shared:
        os.chmod(shared, 0o1777)
        dead = Path(shared) / "ray" / "session_2026-01-01_00-00-00_000000_1"
        (dead / "sockets").mkdir(parents=True)
        (Path(shared) / "ray").chmod(0o1777)
        (Path(shared) / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{free_port()}")
        (Path(shared) / "ray" / "session_latest").symlink_to(dead)
        slow = "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.3}]"
        command = [
            sys.executable, "-B", str(ROOT / "train.py"), "scaling=cpu", "training.epochs=1", "allowed_targets=[manta,torch,tests]",
            slow,
        ]  # fmt: skip
        started = []
        for name, user in (("mine", os.getuid()), ("theirs", 65534 if os.getuid() == 0 else os.getuid())):
            folder = Path(shared) / name  # pytest's own are closed to others
            folder.mkdir()
            os.chown(folder, user, -1)
            become = ["setpriv", f"--reuid={user}", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
            env = {**environment(folder), "RAY_TMPDIR": shared}
            process = subprocess.Popen(
                [*(become if user != os.getuid() else []), *command, f"storage.path={folder}"], env=env, cwd=folder, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            started.append((Lab(folder), process))
        for mine, process in started:
            wait_for(lambda mine=mine: (mine.latest.path / "workers.json").exists(), process)  # type: ignore[misc]
        assert all(process.poll() is None for _, process in started), "they ran at once"
        for _, process in started:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output
        one, other = (history(mine.latest) for mine, _ in started)
        assert one == other
        left = sorted(path.name for path in (Path(shared) / "ray").iterdir())
        assert left == ["ray_current_cluster", dead.name, "session_latest"] or left == [
            "ray_current_cluster",
            dead.name,
        ]


def test_nodes_that_are_still_to_come_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, said = iter([1, 1, 2, 3]), list[str]()
    monkeypatch.setattr(cluster, "live_nodes", lambda _: [{}] * next(counts))
    monkeypatch.setattr(cluster.time, "sleep", lambda _: None)
    cluster._wait_for_nodes(Cluster(min_nodes=3), said.append)
    assert list(counts) == []
    assert said == ["Waiting for cluster.min_nodes=3; the cluster has 1 (for up to 600 s)"]

    monkeypatch.setattr(cluster, "live_nodes", lambda _: [{}])
    cluster._wait_for_nodes(Cluster(min_nodes=1), said.append)
    with pytest.raises(
        MantaError, match=r"cluster.wait_s=0: waited in vain for cluster.min_nodes=2; the cluster has 1"
    ) as error:
        cluster._wait_for_nodes(Cluster(min_nodes=2, wait_s=0), said.append)
    assert error.value.code == FAILED


def test_a_cluster_that_stays_too_small(lab: Lab, head: Head) -> None:
    done = lab.command(
        *SHORT, f"cluster.address={head.address}", "cluster.min_nodes=2", "cluster.wait_s=0", env=head.environment
    )
    assert done.returncode == FAILED, done.stderr
    assert "cluster.wait_s=0: waited in vain for cluster.min_nodes=2; the cluster has 1" in done.stderr
    assert list(lab.folder.iterdir()) == []
