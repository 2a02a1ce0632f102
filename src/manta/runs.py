"""The run directory: its layout, what is recorded about a run, and finding runs. Imports nothing heavy.

The layout is a contract that other tools read; docs/run_directory.md describes it.
"""

import ctypes
import dataclasses
import errno
import fcntl
import json
import math
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from manta.config import Config, Storage, absolute
from manta.errors import FAILED as FAILED_CODE
from manta.errors import MantaError

RUNNING, FINISHED, FAILED, INTERRUPTED = "running", "finished", "failed", "interrupted"
SENT = ".sent.json"  # in code that was sent to a cluster, which has no .git: `version` of where it came from
META = "meta.json"  # makes a directory a checkpoint
RUN_FILE = (
    "MANTA_RUN_FILE"  # environment: a file that gets the run's directory, for a job that must resume its very run
)
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux

# Environment that changes results or behaviour; never a name that smells of a secret.
_ENV = re.compile(r"^(CUDA|NCCL|GLOO|OMP|MKL|TORCH|PYTORCH|RAY|HYDRA|SLURM|MANTA|WANDB|MLFLOW|XLA|LD_LIBRARY|PYTHON)")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|USER|URI|URL|DSN", re.IGNORECASE)


def now() -> str:
    """The time as stored in every file: ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def finite(value: Any) -> Any:
    """A value with every number that JSON lacks (NaN, infinity) as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a JSON file in one step, so that readers never see half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(aside, "w") as file:
        file.write(json.dumps(finite(value), indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())  # some file systems would have an empty file after a power failure
    aside.replace(path)


@dataclass(frozen=True)
class RunDir:
    """One run's directory."""

    path: Path

    def __str__(self) -> str:
        return short(self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def histograms(self) -> Path:
        """Of parameters and gradients, if `tracking.watch` asks for them."""
        return self.path / "histograms.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def stop_file(self) -> Path:
        """Its existence asks the run to checkpoint and stop."""
        return self.path / ".stop"

    @property
    def lock_file(self) -> Path:
        """Locked by rank 0 while it trains: a run has one writer."""
        return self.path / ".lock"

    @property
    def launch_file(self) -> Path:
        return self.path / ".launch.lock"

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the run; {} if it is not there.

        Raises:
            MantaError: it is damaged.
        """
        path = self.path / name
        try:
            found = json.loads(path.read_text()) if path.is_file() else {}
        except (OSError, ValueError) as error:
            raise MantaError(f"{path} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise MantaError(f"{path} cannot be read: it is no object of JSON, {{...}}.")
        return found

    def write(self, name: str, value: dict[str, Any]) -> None:
        write_json(self.path / name, value)

    def update_status(self, **fields: Any) -> None:
        self.write("status.json", {**self.read("status.json"), **fields})

    def save_config(self, config: Config) -> None:
        """config.yaml: resolved and complete; requests of one command line (resume, plan, traceback) are not part of it."""
        stored = dataclasses.replace(config, resume=None, plan=False, traceback=False)
        aside = self.path / ".config.yaml"
        aside.write_text(yaml.safe_dump(dataclasses.asdict(stored), sort_keys=False))
        aside.replace(self.path / "config.yaml")

    def begin(self, config: Config, overrides: list[str]) -> None:
        """Record a new attempt: the configuration, the command line, the provenance and the state."""
        self.save_config(config)
        with open(self.path / "overrides.txt", "a") as file:
            file.write(shlex.join(overrides) + "\n")
        status = self.read("status.json")
        attempt = status.get("attempts", 0) + 1
        self.write(
            "status.json",
            {
                "state": RUNNING,
                "started": status.get("started") or now(),
                "attempt_started": now(),
                "finished": None,
                "attempts": attempt,
                "restarts": status.get("restarts", []),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "error": None,
                "exit_code": None,
            },
        )
        self.write("provenance.json" if attempt == 1 else f"provenance-{attempt}.json", self._provenance(attempt))
        self.stop_file.unlink(missing_ok=True)

    def tell_name(self) -> None:
        """To who started this process and asked for it."""
        if asked := os.environ.get(RUN_FILE):
            aside = Path(f"{asked}.{os.getpid()}")
            aside.write_text(f"{self.path}\n")
            aside.replace(asked)

    def _provenance(self, attempt: int) -> dict[str, Any]:
        code = Path(__file__).resolve().parents[2]
        found, diff_file = version(code), None
        if found["diff"]:
            diff_file = "uncommitted.diff" if attempt == 1 else f"uncommitted-{attempt}.diff"
            (self.path / diff_file).write_text(found["diff"] + "\n")
        packages = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"]}
        return {
            "command": shlex.join([os.path.basename(sys.executable), *sys.argv]),
            "git": {**found, "diff": diff_file},
            "python": platform.python_version(),
            "ray": packages.get("ray"),
            "packages": dict(sorted(packages.items())),
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": _gpus(),
            "environment": {
                name: value
                for name, value in sorted(os.environ.items())
                if _ENV.match(name) and not _SECRET.search(name)
            },
        }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def version(code: Path, *without: str) -> dict[str, str | None]:
    """What git says of code: `commit`, `branch` and `diff`, its changes; of code that was sent to a cluster, what it said before.

    Args:
        without: what is not looked at, as git's pathspecs.
    """
    if (code / SENT).is_file():
        return json.loads((code / SENT).read_text())
    return {
        "commit": _git(code, "rev-parse", "HEAD"),
        "branch": _git(code, "rev-parse", "--abbrev-ref", "HEAD"),
        "diff": _git(code, "diff", "HEAD", "--", *without),
    }


def commit() -> str | None:
    """The git commit of this code."""
    return version(Path(__file__).resolve().parents[2])["commit"]


def _gpus() -> list[str]:
    """Names of the machine's NVIDIA GPUs, read from the driver's own files."""
    found = []
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        match = re.search(r"^Model:\s*(.+)$", information.read_text(), re.MULTILINE)
        found.append(match.group(1).strip() if match else "unknown")
    return found


def short(path: Path) -> str:
    """A path as the user would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def create(config: Config) -> RunDir:
    """Make a new run directory `<storage.path>/<date>/<time>[-<name>]`.

    Raises:
        MantaError: it cannot be written there.
    """
    root = config.storage.folder
    moment = datetime.now()
    stem = moment.strftime("%H-%M-%S") + (f"-{config.name}" if config.name else "")
    day = root / moment.strftime("%Y-%m-%d")
    try:
        day.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 10_000):
            path = day / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                path.mkdir()  # exclusive: two runs never share a directory
                break
            except FileExistsError:
                continue
    except OSError as error:
        raise MantaError(
            f"storage.{'cache' if config.storage.is_remote else 'path'}={root} cannot be written: {error.strerror}. "
            "Choose another: storage.path=<folder>"
        ) from error
    return RunDir(path)


def point_latest(root: Path, path: Path) -> None:
    """Make `latest` name a run, once it has all that a resume needs."""
    point(root / "latest", str(path.relative_to(root)))


def point(link: Path, target: str) -> None:
    """Make a link name `target` in one step."""
    aside = link.with_name(f".writing-{link.name}-{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    aside.replace(link)


def exchange(one: Path, other: Path) -> bool:
    """Let two directories exchange their names; False where the system or the file system cannot (macOS, NFS)."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    return bool(rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0)


STORAGE_FAILED = "Storage failed"


def storage_failure(error: BaseException, run: RunDir) -> MantaError | None:
    """What the disk did, in words, if that is what an error comes from; else None."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and _is_of_storage(cause, run)):
        cause = cause.__cause__
    if cause is None:
        return None
    assert isinstance(cause, OSError)
    whole = _launched(run)
    what = f"{cause.strerror} ({cause.filename or run})" if run.path.is_dir() else f"{run} is gone"
    return MantaError(
        f"{STORAGE_FAILED}: {what}. The last whole checkpoint is kept. When {whole} can be written again: "
        f"python train.py resume={shlex.quote(str(whole))}",
        code=FAILED_CODE,
    )


def with_way_out(message: str, run: RunDir, *changes: str) -> str:
    """A message of what went wrong, and how to go on; changes: settings that would help."""
    command = " ".join(["python train.py", f"resume={shlex.quote(str(run))}", *changes])
    return f"{message}\nResume from the last checkpoint: {command}"


def _is_of_storage(error: OSError, run: RunDir) -> bool:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN):
        return True
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return not run.path.is_dir()
    ours = isinstance(error.filename, str) and Path(error.filename).is_relative_to(run.path)
    return ours and error.errno in (errno.EACCES, errno.EPERM)


def _launched(run: RunDir) -> RunDir:
    """What a resume takes: of a trial or a refit, its search."""
    if run.path.parent.name == "trials":
        return RunDir(run.path.parents[1])
    return RunDir(run.path.parents[2]) if run.path.parents[1].name == "refit" else run


@contextmanager
def explaining(run: RunDir) -> Iterator[None]:
    """What the disk does in here is said in words.

    Raises:
        MantaError: it failed.
    """
    try:
        yield
    except OSError as error:
        failure = storage_failure(error, run)
        if failure is None:
            raise
        raise failure from error


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """A second name for a file; a copy where the file system has none."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)


def find(spec: str, storage: Storage, key: str = "resume") -> RunDir:
    """The run called `latest`, or the one at a path (from here, or below storage.path), or at an address of a bucket.

    Raises:
        MantaError: there is none, or it is no run directory.
    """
    storage = replace(storage, path=absolute(storage.path), cache=absolute(storage.cache))
    root, brought = storage.folder, None
    if spec.startswith("s3://") or (storage.is_remote and (spec == "latest" or not Path(spec).expanduser().exists())):
        from manta.storage import remote

        root, brought = Path(storage.path), remote.find(spec, storage, key)
        if brought is None:
            raise MantaError(f"{key}={spec}: there is no such run in {storage.path}.")
    if brought is not None:
        path = brought
    elif spec == "latest":
        path = root / "latest"
        if not path.exists():
            raise MantaError(f"{key}=latest: there is no run under {root} yet. Start one: python train.py")
    else:
        there = next((p for p in (Path(spec).expanduser(), root / spec) if p.exists()), None) or _named(root, spec, key)
        if there is None:
            raise MantaError(f"{key}={spec}: no such directory. Give a run directory, or `latest`.{_recent(root)}")
        path = there
    path = path.resolve()
    missing = [name for name in ("config.yaml", "status.json") if not (path / name).is_file()]
    if missing:
        raise MantaError(
            f"{key}={spec}: {path} is not a run directory (it has no {' and no '.join(missing)}).{_recent(root)}"
        )
    return RunDir(path)


def _named(root: Path, spec: str, key: str) -> Path | None:
    """The run with this in its date, time and name, as scripts/runs.py finds it.

    Raises:
        MantaError: there are several.
    """
    found = [
        path
        for path in sorted(root.glob("????-??-??/*/"))
        if spec.strip() and spec in f"{path.parent.name}/{path.name}"
    ]
    exact = [path for path in found if spec in (path.name, path.name[9:])]
    if len(found) > 1 and len(exact) != 1:
        shown = ", ".join(short(path) for path in found[-5:])
        raise MantaError(f"{key}={spec} means {len(found)} runs; give more of one of these: {shown}")
    return next(iter(exact or found), None)


def _recent(root: Path, count: int = 3) -> str:
    runs = sorted(root.glob("????-??-??/*/status.json"), key=lambda p: p.stat().st_mtime, reverse=True)[:count]
    return f" Recent runs: {', '.join(short(p.parent) for p in runs)}" if runs else ""


def find_checkpoint(folder: Path, name: str) -> Path | None:
    """The directory of checkpoint `name` (last, best, a step number or step-...) in this folder, or None."""
    candidates = [name, f"step-{int(name):08d}"] if name.isdigit() else [name]
    for candidate in candidates:
        path = folder / candidate
        if (path / META).is_file() and path.resolve().parent == folder.resolve():
            return path.resolve()
    return None


def read_lines(path: Path, size: int | None = None) -> list[dict[str, Any]]:
    """The complete lines of the first `size` bytes (all, if None) of a .jsonl; a writer killed in mid-line leaves half a one."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        return [json.loads(line) for line in file.read(size).splitlines(keepends=True) if line.endswith(b"\n")]


class MetricsFile:
    """metrics.jsonl: one line a report, append-only; a resume first drops what came after its checkpoint."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self._file = open(path, "ab")
        if self._file.tell() < keep_bytes:
            raise MantaError(
                f"{path} has {self._file.tell()} bytes, and {keep_bytes} of them belong to the checkpoint: one of the two was "
                "changed by hand, or comes from elsewhere. Put back the one that belongs to the other, or start a new run."
            )
        self._file.truncate(keep_bytes)
        self._file.seek(keep_bytes)

    def append(self, values: dict[str, Any]) -> None:
        self._file.write((json.dumps(values) + "\n").encode())
        self._file.flush()

    def sync(self) -> int:
        """Flush to disk; the size in bytes."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


@contextmanager
def writing(run: RunDir, wait_s: float = 30.0) -> Iterator[None]:
    """Hold the run's lock (rank 0 does while it trains): two processes never write one run.

    A run that is killed lets go at once; one that is still alive after `wait_s` is a mistake.

    Raises:
        MantaError: another process is still training this run.
    """
    with open(run.lock_file, "w") as file:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise MantaError(f"{run} is being trained by another process; wait for it or stop it.") from None
                time.sleep(0.1)
        yield


@contextmanager
def launching(run: RunDir) -> Iterator[None]:
    """Hold a run from before a launch writes anything of it: the lock of its rank 0 comes only with training.

    Raises:
        MantaError: another launch has it, or it cannot be written.
    """
    try:
        file = open(run.launch_file, "a+")
    except OSError as error:
        raise MantaError(f"{run} cannot be written: {error.strerror} ({error.filename}).") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise is_running(run, launcher(run) or {}) from None
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        yield


def launcher(run: RunDir) -> dict[str, Any] | None:
    """The process that has launched this run, `pid` and `host`; None: no process has it right now."""
    if not _is_held(run.launch_file):
        return None
    try:
        return run.read(run.launch_file.name)
    except MantaError:  # it is just writing its name
        return {}


def is_running(run: RunDir, process: dict[str, Any]) -> MantaError:
    """What a second launch of a run is told."""
    return MantaError(
        f"resume: {run} is running right now (pid {process.get('pid')} on {process.get('host')}). "
        "Wait for it, or stop it with Ctrl-C first."
    )


def is_locked(run: RunDir) -> bool:
    """Whether a process is training this run right now. Writes nothing, and several may ask at once."""
    return _is_held(run.lock_file)


def _is_held(path: Path) -> bool:
    try:
        file = open(path, "rb")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
