"""Where results go: a folder that nodes do not share, a bucket (also one that is away), a disk that fails in mid-run."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import fs

from manta.catalog.commands import COMMANDS, Hand, parse
from manta.catalog.commands import main as catalog
from manta.checkpoints import verify
from manta.config import Storage
from manta.errors import MantaError
from manta.evaluate import Arguments, evaluate
from manta.launch import launch
from manta.runs import RunDir, find_checkpoint, read_lines
from manta.storage import remote
from manta.storage.bucket import Away
from manta.storage.mirror import Mirror
from manta.training.checkpoint import CheckpointWriter, load_checkpoint
from tests.conftest import ROOT, Lab, compose_run, history, make_config, summary, wait_for
from tests.test_cluster import SHORT, Head, free_port, start_head
from tests.test_failures import fault

# --- nodes that do not share it --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lonely() -> Iterator[tuple[Head, Path]]:
    """A Ray of two nodes; the second has another disk at the folder."""
    if not can_mount():
        pytest.skip("mounting a file system is not allowed here")
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
        tempfile.TemporaryDirectory(prefix="runs-") as runs,
        start_head(Path(folder), RAY_AUTH_MODE="disabled") as head,
        open(Path(folder) / "node.log", "w") as log,
    ):
        ray = Path(sys.executable).parent / "ray"
        node = subprocess.Popen(
            ["unshare", "--mount", "bash", "-c",
             f"mount -t tmpfs tmpfs {runs} && exec {ray} start --address={head.address} --block --num-cpus=2 "
             "--node-ip-address=127.0.0.1 --disable-usage-stats --object-store-memory=80000000"],
            env={**head.environment, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}, cwd=folder, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while "Ray runtime started" not in (Path(folder) / "node.log").read_text():
                assert node.poll() is None and time.monotonic() < deadline, (Path(folder) / "node.log").read_text()
                time.sleep(0.2)
            yield head, Path(runs)
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait(timeout=60)


def can_mount() -> bool:
    """Whether this user may have a mount namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    return tried.returncode == 0


@pytest.mark.ray
def test_a_folder_that_the_nodes_do_not_share(lonely: tuple[Head, Path]) -> None:
    """Refused before training, by name, and nothing is left in it."""
    head, runs = lonely
    arguments = (*SHORT, f"cluster.address={head.address}", "scaling=cpu", "scaling.resources_per_worker={CPU: 1}")
    done = Lab(runs).command(*arguments, env=head.environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"storage.path={runs} is not shared" in done.stderr
    found = re.search(r"not seen on (\S+)( at [\d.]+)?\. It must", done.stderr)
    assert found is not None and found[1] == socket.gethostname(), done.stderr
    assert done.stderr.rstrip().endswith("storage.path=/shared/outputs") and "Traceback" not in done.stderr
    assert os.listdir(runs) == []
    command = [sys.executable, str(ROOT / "train.py"), *arguments, "storage.path=s3://bucket/runs", "plan=true"]
    bucket = subprocess.run(command, env=head.environment, cwd=runs, capture_output=True, text=True, check=False)
    assert bucket.returncode == 2, bucket.stdout + bucket.stderr
    assert "storage.path=s3://bucket/runs: the cluster has 2 nodes" in bucket.stderr
    assert bucket.stderr.rstrip().endswith("Use a folder that all nodes share: storage.path=/shared/outputs")


@pytest.mark.ray
@pytest.mark.drill
def test_a_folder_that_the_nodes_share(lonely: tuple[Head, Path], lab: Lab) -> None:
    """Passes, and nothing is left in it."""
    head, _ = lonely
    arguments = (*SHORT, f"cluster.address={head.address}", "scaling=cpu", "plan=true")
    done = lab.command(*arguments, env=head.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(lab.folder.iterdir()) == []


# --- a bucket --------------------------------------------------------------------------------------------------------

KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "very-secret", "AWS_EC2_METADATA_DISABLED": "true"}
QUICK = ("scaling=in_process", "training.epochs=3", "training.limit_train_batches=6", "data.batch_size=32")

SEARCH = (
    "search=random", "search.num_samples=2", "search.max_concurrent_trials=1", "search.refit=false", "search.report=false",
    "scaling.num_workers=1", "scaling.resources_per_worker={CPU: 1}", "search.space.data.batch_size=null", "data.batch_size=32",
    "training.limit_train_batches=6",
)  # fmt: skip


class Server:
    """A real S3 API on loopback, behind a door that can be shut: connections are refused then."""

    def __init__(self, folder: Path) -> None:
        self.port, self.door = free_port(), Door()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(self.port)],
            env={**os.environ, **KEYS}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not answers(self.port):
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        self.door.open(self.port)
        self.files = fs.S3FileSystem(
            endpoint_override=f"http://127.0.0.1:{self.port}", access_key="testing", secret_key="testing",
            region="us-east-1", allow_bucket_creation=True, allow_bucket_deletion=True,
        )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.door.port}"

    def objects(self, path: str) -> dict[str, bytes]:
        """All objects below a path, by name from there."""
        found = self.files.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
        names = [each.path for each in found if each.type == fs.FileType.File]
        objects = {}
        for name in names:
            with suppress(FileNotFoundError):  # a run under way retires its checkpoints
                objects[name[len(path) + 1 :]] = self.files.open_input_stream(name).read()
        return objects

    def end(self) -> None:
        self.door.shut()
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


class Door:
    """Forwards connections of one port to another while it is open."""

    def __init__(self) -> None:
        self.port, self.server = free_port(), None
        self.through: list[socket.socket] = []

    def open(self, target: int) -> None:
        self.target = target
        self.server = socket.create_server(("127.0.0.1", self.port), reuse_port=True)
        threading.Thread(target=self._accept, args=(self.server,), daemon=True).start()

    def shut(self) -> None:
        assert self.server is not None
        for each in (self.server, *self.through):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self.through.clear()

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                here, _ = server.accept()
                there = socket.create_connection(("127.0.0.1", self.target))
                self.through += [here, there]
                for one, other in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    @staticmethod
    def _pump(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_WR)


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("s3"))
    try:
        yield found
    finally:
        found.end()


class Cloud(Lab):
    """A lab whose results go to a bucket of its own; `folder` is where they are on this machine."""

    def __init__(self, server: Server, here: Path, name: str) -> None:
        super().__init__(here / "cache" / name / "runs")
        self.server, self.name, self.here = server, name, here
        self.url = f"s3://{name}/runs"
        self.settings = (
            f"storage.path={self.url}",
            f"storage.endpoint_url={server.url}",
            f"storage.cache={here}/cache",
        )
        self.environment = {**os.environ, **KEYS}

    def launch(self, *overrides: str) -> int:
        config, previous, space = compose_run(*self.settings, *overrides)
        return launch(config, list(overrides), previous, space).code

    def command(self, *arguments: str, script: str = "train.py", **options: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, str(ROOT / script), *self.settings, *arguments],
            **{"capture_output": True, "text": True, "timeout": 240, "cwd": self.here, "env": self.environment, **options},
        )  # fmt: skip

    def start(self, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *self.settings, *arguments],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": self.here,
               "env": self.environment, **options},
        )  # fmt: skip

    def elsewhere(self, name: str) -> "Cloud":
        """The same bucket on another machine, where nothing of it is."""
        here = self.here.parent / name
        here.mkdir()
        return Cloud(self.server, here, self.name)

    def key(self, run: RunDir) -> str:
        return run.path.relative_to(self.folder).as_posix()

    def objects(self, run: RunDir | None = None) -> dict[str, bytes]:
        return self.server.objects(f"{self.name}/runs" + (f"/{self.key(run)}" if run else ""))


@pytest.fixture
def cloud(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "here").mkdir()
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    server.files.create_dir(name)
    return Cloud(server, tmp_path / "here", name)


def files_of(run: RunDir) -> dict[str, bytes]:
    """What a run directory should be in the bucket."""
    found = {}
    for folder, folders, names in os.walk(run.path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in [*folders, *names]:
            path = Path(folder, name)
            key = path.relative_to(run.path).as_posix()
            if path.is_symlink():
                found[f"{key}.link"] = os.readlink(path).encode()
            elif path.is_file() and not name.startswith("."):
                found[key] = path.read_bytes()
    return found


def test_a_run(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Everything of it is in the bucket at the end, and no key anywhere."""
    monkeypatch.setattr(remote, "TELL_S", 0.0)
    run = cloud.run(*QUICK)
    assert "Waiting for the rest to reach" in capfd.readouterr().out
    assert "Waiting for" not in run.log.read_text()  # which is on its way, or there already
    assert run.path.is_relative_to(cloud.here / "cache")
    there = cloud.objects(run)
    assert there == files_of(run)
    assert {"checkpoints/last.link", "checkpoints/best.link", "metrics.jsonl", "status.json"} <= set(there)
    assert json.loads(there["status.json"])["state"] == "finished"
    assert cloud.objects()["latest.link"].decode() == cloud.key(run)
    assert not [name for name, content in there.items() if b"very-secret" in content]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return Lab(tmp_path_factory.mktemp("undisturbed")).run(*QUICK)


def same(run: RunDir, other: RunDir) -> None:
    """Bit-identical weights and history."""
    one, two = (load_checkpoint(each.checkpoints / "last")[0]["learner"]["model"] for each in (run, other))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert history(run) == history(other)
    assert summary(run)["test"] == summary(other)["test"]


def wait_until(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


def is_all_there(cloud: Cloud, run: RunDir) -> bool:
    return cloud.objects(run) == files_of(run)


def test_killed_and_resumed_on_another_machine(
    cloud: Cloud, undisturbed: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a killed run has on disk still comes to the bucket; from there it goes on anywhere, and ends the same."""
    killed = cloud.start(*QUICK, *fault("KillAt", call=16, marker=cloud.here / "killed"))
    assert killed.wait(timeout=120) == -signal.SIGKILL
    here = cloud.latest
    wait_until(lambda: is_all_there(cloud, here))
    step = here.read("checkpoints/last/meta.json")["step"]
    assert step in (6, 12)  # they are written beside training

    there = cloud.elsewhere("there")
    assert there.launch("resume=latest") == 0
    assert "continuing" in capfd.readouterr().out
    same(there.latest, undisturbed)
    assert is_all_there(there, there.latest)
    assert there.latest.read("status.json")["attempts"] == 2

    # Back on the first machine: its own copy is older now, and has nothing that the bucket has not.
    assert evaluate(arguments(cloud, run="latest")) == 0
    same(here, undisturbed)
    assert [path.name for path in here.path.parent.iterdir()] == [here.path.name]


def test_what_was_never_brought_is_kept(cloud: Cloud, capfd: pytest.CaptureFixture[str]) -> None:
    """A copy here that is older than the bucket's, but has something of its own."""
    run, there = cloud.run(*QUICK), cloud.elsewhere("there")
    assert there.launch(f"resume={cloud.url}/{cloud.key(run)}", "training.epochs=4") == 0
    (run.path / "notes.txt").write_text("mine")
    assert cloud.launch("resume=latest", "training.epochs=5") == 0
    assert f"older-{run.path.name}" in capfd.readouterr().out
    kept = RunDir(run.path.with_name(f"older-{run.path.name}"))
    assert (kept.path / "notes.txt").read_text() == "mine"
    assert load_checkpoint(kept.checkpoints / "last")[1]["step"] == 18
    assert load_checkpoint(run.checkpoints / "last")[1]["step"] == 30
    assert is_all_there(cloud, run)


def arguments(cloud: Cloud, **given: Any) -> Arguments:
    storage = Storage(cloud.url, cloud.server.url, str(cloud.here / "cache"))
    return Arguments(storage=storage, **given)


def test_scripts_elsewhere(cloud: Cloud, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists show what is only in the bucket without its checkpoints; an evaluation brings those and leaves its result there."""
    run = cloud.run(*QUICK, "name=far")
    there = cloud.elsewhere("there")
    capfd.readouterr()
    monkeypatch.chdir(there.here)
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.server.url)
    assert catalog(["runs.py", "--storage", cloud.url, "list", "--format", "json"], ROOT) == 0
    (listed,) = json.loads(capfd.readouterr().out)
    assert listed["state"] == "finished" and listed["name"] == "far"
    copy = RunDir(there.here / "outputs" / "s3" / cloud.name / "runs" / cloud.key(run))
    assert not copy.checkpoints.exists()
    with pytest.raises(MantaError, match="no objects"):
        raise_of(["runs.py", "--storage", cloud.url, "rm", "--state", "finished"])
    assert evaluate(Arguments(run="latest", storage=Storage(cloud.url))) == 0
    found = json.loads(cloud.objects(run)["evaluation-best.json"])
    assert found["step"] == summary(run)["best"]["step"]
    test = {name: value for name, value in found["metrics"].items() if name.startswith("test/")}
    assert test == summary(run)["test"]


def raise_of(argv: list[str]) -> None:
    """What a command of scripts/runs.py raises."""
    found = parse(argv)
    COMMANDS[found.command](found, Hand(ROOT, found.storage))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("storage.path=s3://no-such-bucket/runs", ("storage.path=s3://no-such-bucket/runs: there is no bucket", "aws s3 mb")),
        ("storage.endpoint_url=http://127.0.0.1:1", ("storage.endpoint_url=http://127.0.0.1:1", "no S3 server answers")),
        ("keys", ("does not let these keys read and write", "AWS_ACCESS_KEY_ID")),
    ],
)  # fmt: skip
def test_refused_before_training(cloud: Cloud, wrong: str, said: tuple[str, ...]) -> None:
    """In seconds, with exit code 2, and nothing is left."""
    if wrong == "keys":
        authority(cloud.server, after=0)
    try:
        with pytest.raises(MantaError) as refused:
            cloud.launch(*QUICK, *(wrong,) * (wrong != "keys"))
    finally:
        authority(cloud.server, after=10**9)
    assert refused.value.code == 2
    assert all(each in str(refused.value) for each in said), str(refused.value)
    assert "very-secret" not in str(refused.value)
    assert not (cloud.here / "cache").exists()


def authority(server: Server, after: int) -> None:
    """After so many requests the server wants keys that it knows, and it knows none."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/moto-api/reset-auth", str(after).encode(), {"Content-Type": "text/plain"}
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("storage.path=gs://bucket/runs", ("there is nothing for gs://", "storage.endpoint_url")),
        ("storage.path=s3://key:secret@bucket/runs", ("written to files", "AWS_SECRET_ACCESS_KEY")),
        ("storage.path=s3://bucket/../other", ("must be s3://bucket/folder",)),
        ("storage.path=s3://Bucket", ("small letters",)),
        ("storage.endpoint_url=http://key:secret@host:9000", ("written to files",)),
        ("storage.endpoint_url=host:9000", ("must be http://host:port",)),
    ],
)
def test_addresses(wrong: str, said: tuple[str, ...]) -> None:
    """Refused before anything is loaded."""
    given = [wrong] if wrong.startswith("storage.path") else ["storage.path=s3://bucket/runs", wrong]
    with pytest.raises(MantaError) as refused:
        make_config(*given)
    assert all(each in str(refused.value) for each in said), str(refused.value)


class Memory:
    """A bucket that fails after so many changes, and does something just before each."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.left, self.changes, self.before = 10**9, 0, lambda: None
        self.url = "s3://memory"

    def _change(self) -> None:
        self.before()
        self.left, self.changes = self.left - 1, self.changes + 1
        if self.left < 0:
            raise Away("NETWORK_CONNECTION")

    def put(self, key: str, content: bytes) -> None:
        self._change()
        self.objects[key] = content

    def put_file(self, key: str, source: Path, size: int | None = None) -> None:
        self._change()
        self.objects[key] = source.read_bytes()[:size]

    def remove(self, key: str) -> None:
        self._change()
        self.objects.pop(key, None)

    def remove_folder(self, key: str) -> None:
        self._change()
        self.objects = {name: content for name, content in self.objects.items() if not name.startswith(f"{key}/")}


class Trained:
    """A search of one trial, which writes as training does: history, checkpoint, summary, then the search's log."""

    def __init__(self, folder: Path) -> None:
        self.search = RunDir(folder / "2026-11-30" / "10-00-00")
        self.trial = RunDir(self.search.path / "trials" / "00000")
        self.writer = CheckpointWriter(self.trial.checkpoints, keep=1, asynchronous=False)
        for run in (self.search, self.trial):
            (run.path / "config.yaml").write_text("seed: 0")
            run.write("status.json", {"state": "running"})
        self.step = 0

    def train(self) -> None:
        self.step += 1
        with open(self.trial.metrics, "a") as file:
            file.write(json.dumps({"step": self.step}) + "\n")
        metrics_bytes = self.trial.metrics.stat().st_size
        state = {
            "learner": {"step": torch.tensor(self.step)},
            "progress": {},
            "ranks": [],
            "metrics_bytes": metrics_bytes,
        }
        meta = {"step": self.step, "epoch": self.step, "metrics": {}, "metrics_bytes": metrics_bytes}
        self.writer.save(
            state,
            meta,
            self.step == 1 or self.step % 3 == 0,
            lambda: self.trial.write("summary.json", {"step": self.step}),
        )
        with open(self.search.path / "search.jsonl", "a") as file:
            file.write(json.dumps({"epoch": self.step}) + "\n")

    def resumable(self, objects: dict[str, bytes], folder: Path) -> int:
        """The step that the bucket's copy goes on from, with everything that this takes; 0 from the beginning."""
        for key, content in objects.items():
            path = folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            if key.endswith(".link"):
                path.with_name(path.name.removesuffix(".link")).symlink_to(content.decode())
            else:
                path.write_bytes(content)
        search = RunDir(folder / "run")
        trial, log = RunDir(search.path / "trials" / "00000"), read_lines(search.path / "search.jsonl")
        named = [find_checkpoint(trial.checkpoints, name) for name in ("last", "best")]
        step = load_checkpoint(named[0])[1]["step"] if named[0] else 0
        if named[0] is not None:
            assert named[1] is not None and verify(named[1])["step"] in (1, *range(0, 100, 3))
            assert trial.metrics.stat().st_size >= verify(named[0])["metrics_bytes"]
        assert trial.read("summary.json").get("step", 0) <= step
        assert all(line["epoch"] <= step for line in log)
        return int(step)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_the_bucket_can_be_resumed_from_at_any_moment(tmp_path: Path, meanwhile: bool) -> None:
    """Cut after each of its changes, also while training goes on and retires what is being brought."""
    cuts = 0
    while True:
        trained, bucket = Trained(tmp_path / f"{cuts}"), Memory()
        mirror = Mirror(trained.search.path, bucket, "run")  # type: ignore[arg-type]
        trained.train()
        assert mirror.turn()
        for _ in range(3):
            trained.train()
        bucket.left = cuts
        bucket.before = trained.train if meanwhile else bucket.before
        with suppress(Away):
            mirror.turn()
        step = trained.resumable(dict(bucket.objects), tmp_path / f"{cuts}-cut")
        assert 1 <= step <= trained.step
        bucket.before = lambda: None
        if bucket.left >= 0:
            break
        bucket.left = 10**9
        assert Mirror(trained.search.path, bucket, "run").turn()  # type: ignore[arg-type]
        assert {f"run/{name}": content for name, content in files_of(trained.search).items()} == bucket.objects
        cuts += 1
    assert cuts >= 10 and step >= 4


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.drill
def test_a_search(cloud: Cloud) -> None:
    """With its trials and its best; where nothing of it is here it goes on from the bucket, and trains only what is new."""
    assert cloud.launch(*SEARCH, "training.epochs=2") == 0
    search = cloud.latest
    assert is_all_there(cloud, search)
    there = cloud.elsewhere("there")
    assert there.launch("resume=latest", "search.num_samples=3") == 0
    assert summary(there.latest)["trials"] == {"running": 0, "finished": 3, "stopped": 0, "failed": 0}
    assert summary(there.latest)["epochs"] == 6
    assert is_all_there(there, there.latest)
    for old in ("trials/00000/metrics.jsonl", "trials/00001/metrics.jsonl"):
        assert (there.latest.path / old).read_bytes() == (search.path / old).read_bytes()


@pytest.mark.ray
@pytest.mark.drill
@pytest.mark.timeout(600)
def test_a_search_is_killed(cloud: Cloud, capfd: pytest.CaptureFixture[str]) -> None:
    """Killed in mid-search and resumed on another machine: no trial is lost or trained twice, and all of it is in the bucket."""
    marker = cloud.here / "killed"
    pid_file = cloud.here / "pid"
    settings = (*SEARCH, "training.epochs=2", "cluster.num_cpus=2")
    killed = cloud.start(*settings, *fault("KillAt", call=9, marker=marker, pid_file=pid_file))
    pid_file.write_text(str(killed.pid))
    assert killed.wait(timeout=200) == -signal.SIGKILL
    here = cloud.latest
    wait_until(lambda: is_all_there(cloud, here))
    before = cloud.objects(here)
    assert "trials/00000/checkpoints/last.link" in before
    there = cloud.elsewhere("there")
    done = there.command("resume=latest", "search.num_samples=3", "cluster.num_cpus=2")
    assert done.returncode == 0, done.stdout + done.stderr
    search = there.latest
    assert summary(search)["trials"] == {"running": 0, "finished": 3, "stopped": 0, "failed": 0}
    assert summary(search)["epochs"] == 6
    assert is_all_there(there, search)
    assert here.path.is_dir()
    assert evaluate(arguments(cloud, run="latest")) == 0
    assert f"{here} is a search: taking its best" in capfd.readouterr().out
    assert "best/evaluation-best.json" in cloud.objects(here)


# --- a bucket that is away ---------------------------------------------------------------------------------------------


def in_mid_run(cloud: Cloud, run: "subprocess.Popen[str]", step: int) -> RunDir:
    """The run, once a checkpoint of this step or later is in the bucket."""

    def there() -> bool:
        named = [content for name, content in cloud.objects().items() if name.endswith("checkpoints/last.link")]
        return any(int(content.decode().removeprefix("step-")) >= step for content in named)

    wait_for(there, run)
    return cloud.latest


SLOW = (*QUICK[:1], *QUICK[2:], *fault("Slow", seconds=0.3))


@pytest.mark.parametrize(
    "way",
    [
        "refuses",
        pytest.param("refuses for 30 s", marks=pytest.mark.drill),
        pytest.param("hangs", marks=pytest.mark.drill),
    ],
)
def test_an_outage(cloud: Cloud, way: str) -> None:
    """Said once; training goes on meanwhile, and in the end everything is there."""
    epochs = 24 if way == "hangs" else 6  # of 2 s; an answer is waited for 20 s
    started = cloud.start(*SLOW, f"training.epochs={epochs}")
    run = in_mid_run(cloud, started, 6)
    before = cloud.objects(run)
    if way == "hangs":
        cloud.server.process.send_signal(signal.SIGSTOP)
    else:
        cloud.server.door.shut()
    try:
        step = run.read("checkpoints/last/meta.json")["step"]
        wait_for(lambda: run.read("checkpoints/last/meta.json")["step"] >= step + 6, started)
        wait_for(lambda: "does not answer" in run.log.read_text(), started)
        if way == "refuses for 30 s":
            time.sleep(30)
    finally:
        if way == "hangs":
            cloud.server.process.send_signal(signal.SIGCONT)
        else:
            cloud.server.door.open(cloud.server.port)
    assert "checkpoints/last.link" in before
    output, _ = started.communicate(timeout=240)
    assert started.returncode == 0, output
    assert output.count("does not answer") == 1 and f"Storage {cloud.url} answers again." in output, output
    assert "Training goes on, retrying." in output
    assert len([line for line in history(run) if "val/accuracy" in line]) == epochs
    assert is_all_there(cloud, run)


def test_away_at_the_end(cloud: Cloud, capfd: pytest.CaptureFixture[str]) -> None:
    """It waits for a while, says where everything is, and how it comes to the bucket later; the exit code stays."""
    run = cloud.run(*QUICK)
    cloud.server.door.shut()
    try:
        assert cloud.launch("resume=latest", "training.epochs=4", "storage.finish_s=1") == 0
    finally:
        cloud.server.door.open(cloud.server.port)
    output = capfd.readouterr().out
    assert f"does not have all of this run. Nothing is lost, it is in {run}" in output
    assert f"python scripts/runs.py upload {run}" in output
    assert json.loads(cloud.objects(run)["summary.json"])["step"] == 18
    assert catalog(["runs.py", "upload", str(run.path)], ROOT) == 0
    assert json.loads(cloud.objects(run)["summary.json"])["step"] == 24
    assert is_all_there(cloud, run)


# --- a disk that fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["read-only", "gone"])
def test_lost_in_mid_run(lab: Lab, undisturbed: RunDir, way: str) -> None:
    """Exit 1 in plain words; when the directory is there again, the run goes on and ends the same."""
    if way == "read-only" and not can_mount():
        pytest.skip("mounting a file system is not allowed here")
    with pytest.raises(MantaError) as failed:
        lab.launch(*QUICK, *fault("LoseAt", call=9, folder=lab.folder, way=way))
    path = Path((lab.folder / "lost").read_text())
    if way == "gone":
        said = f"{path} is gone. The last whole checkpoint is kept"
        assert not path.exists()
        (lab.folder / "elsewhere").rename(path)
    else:
        said = f"Read-only file system ({path}/checkpoints/"
        subprocess.run(["umount", "--lazy", path / "checkpoints"], check=True)
    assert failed.value.code == 1
    assert str(failed.value).startswith(f"Storage failed: {said}"), str(failed.value)
    assert str(failed.value).endswith(f"python train.py resume={path}")
    assert lab.launch("resume=latest") == 0
    same(RunDir(path), undisturbed)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_full_disk_in_a_search(small_disk: Path) -> None:
    """The search says it as a run does, names itself, trains no further trial, and goes on when there is room again."""
    small, filler = Lab(small_disk), small_disk / "filler"
    full = fault("FillAt", call=9, path=filler, leave=60_000, once="'*/*/trials/*/summary.json'")
    with pytest.raises(MantaError) as failed:
        small.launch(*SEARCH, "training.epochs=3", *full)
    search = small.latest
    assert failed.value.code == 1
    assert str(failed.value).startswith("Storage failed: No space left on device ("), str(failed.value)
    assert str(failed.value).endswith(f"python train.py resume={search}")
    assert [run.path.parent.name for run in map(RunDir, search.path.glob("trials/*/metrics.jsonl"))] == ["00000"]
    filler.write_bytes(b"")
    assert small.launch("resume=latest") == 0
    assert summary(search)["trials"]["finished"] == 2
