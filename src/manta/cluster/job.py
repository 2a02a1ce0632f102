"""cluster=job: the command goes to a Ray cluster through its Jobs API, runs on the head node, and is followed from here.

A job has a name that says where it is, `job:<id>@<address>`, so nothing about it is kept on this machine.
"""

import asyncio
import logging
import os
import re
import secrets
import shlex
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from manta.checks import refuse
from manta.cluster import elsewhere
from manta.cluster.package import pack
from manta.cluster.rules import dashboard
from manta.commandline import parse, quoted
from manta.config import Cluster, Config
from manta.errors import FAILED, FINISHED, INTERRUPTED, INVALID, MantaError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ray.job_submission import JobSubmissionClient

CONNECT_S, ANSWER_S = 5, 60
"""How long the cluster may take to take a connection, and to answer."""
QUIET_S = 10.0
"""A log that says nothing for so long: is the cluster still there?"""
RETRY_S = 120.0
"""How long a connection that was lost is tried again."""
STOP_S = 60
"""How long a job that is stopped has for its checkpoint; Ray's own default, 3 s, is too short for most."""
CACHE = "~/.cache/manta/s3"
"""Of a bucket's runs, on the head node: Ray removes the folder where the job runs."""


class Job(NamedTuple):
    """A job and its cluster."""

    id: str
    address: str

    def __str__(self) -> str:
        return f"job:{self.id}@{self.address}"

    @classmethod
    def parse(cls, name: str) -> "Job":
        """From `<id>@<address>`.

        Raises:
            MantaError: it is something else.
        """
        found, _, address = name.partition("@")
        if not found or not address:
            raise MantaError(f"job:{name}: a job is named as job:<id>@http://<head>:8265.")
        refuse(list(dashboard(address, "The address of a job")))
        return cls(found, address.rstrip("/"))

    def ways(self) -> str:
        """How to go on with it."""
        command = f"python scripts/runs.py {{}} {shlex.quote(str(self))}"
        return f"follow  {command.format('logs')}\nstop    {command.format('stop')}"


# --- handing it over ---------------------------------------------------------------------------------------------


def submit(request: elsewhere.Request) -> int:
    """Send the code and the command, and follow the job to its end.

    Returns:
        Its exit code; 130 if it was stopped, or if it was left to itself by Ctrl-C.

    Raises:
        MantaError: it cannot be sent, or how it ended cannot be told.
    """
    config = request.config
    address = (config.cluster.address or "").rstrip("/")
    command = entrypoint(arguments(request))
    client = _connect(address)
    job = Job(f"manta-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}", address)
    with _interruptible():
        try:
            with tempfile.TemporaryDirectory(prefix="manta-") as folder:
                _send(client, config, job, command, Path(folder))
        except KeyboardInterrupt:
            print(f"\nInterrupted while it was being sent. Should it be there all the same:\n{job.ways()}", flush=True)
            return INTERRUPTED
        try:
            return _follow(client, job)
        except KeyboardInterrupt:
            return _let_go(client, job, config.cluster.stop_on_interrupt)


def entrypoint(arguments: list[str]) -> str:
    """For the shell there, whose place the command takes: a signal to it is a signal to the command."""
    return f"exec python train.py {shlex.join(arguments)}"


def arguments(request: elsewhere.Request) -> list[str]:
    """Of train.py on the head node.

    Raises:
        MantaError: a path would lead into the folder of the job, which Ray removes.
    """
    config, settings = request.config, ["cluster=existing", "cluster.address=auto"]
    here = _relative(request, "storage.path", config.storage.path)
    if not here:
        settings.append(_path("storage.path", config.storage.path))
    elif not (config.resume or "").startswith(("/", "s3://")):
        raise MantaError(
            f"storage.path={here}: results would be lost with the job's own folder. Name a place that lasts, and that all nodes "
            "of the cluster see: storage.path=/shared/outputs or storage.path=s3://bucket/runs"
        )
    if config.cluster.wait_s != Cluster.wait_s:
        settings.append(f"cluster.wait_s={config.cluster.wait_s}")
    if config.storage.is_remote and _relative(request, "storage.cache", config.storage.cache):
        settings.append(_path("storage.cache", CACHE))
    if not config.resume:
        settings += _data_root(request)
    return request.arguments(*settings)


def _data_root(request: elsewhere.Request) -> list[str]:
    """Where data is on the cluster, for data sets that have files.

    Raises:
        MantaError: in the folder of the job: each submission would fetch it again.
    """
    data = request.config.data
    here = _relative(request, "data.root", data.root)
    if not here:
        return [_path("data.root", data.root)]
    if not _mentions(data.dataset, data.root):
        return []
    raise MantaError(
        f"data.root={here}: data={data.name} has files, which do not travel with the code. Name a folder that all nodes of the "
        "cluster see, with the data or to download it into: data.root=/shared/data"
    )


def _path(key: str, value: str) -> str:
    """A setting as Hydra reads it, quoted only where it must be."""
    return f"{key}={value if re.fullmatch(r'[A-Za-z0-9_/.:-]+', value) else quoted(value)}"


def _mentions(value: Any, text: str) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value == text or any(_mentions(each, text) for each in values)


def _relative(request: elsewhere.Request, key: str, value: str) -> str | None:
    """A path setting as it was given, if that means something else on another machine."""
    for override in parse(request.overrides):
        if override.key_or_group == key:
            typed = str(override.value())
            return None if "://" in typed or typed.startswith(("/", "~")) else typed
    here = Path.cwd()
    return str(Path(value).relative_to(here)) if Path(value).is_relative_to(here) else None


def _send(client: Any, config: Config, job: Job, command: str, folder: Path) -> None:
    from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE

    outside = (Path(config.data.root), config.storage.folder, Path(config.storage.cache))
    package = pack(elsewhere.PROJECT, folder / "code.zip", DASHBOARD_CLIENT_MAX_SIZE, outside)
    print(f"Package: {package}", flush=True)
    if (elsewhere.PROJECT / "conf" / "local" / "default.yaml").is_file():
        print(
            "conf/local/default.yaml stays here: what else it sets is to be typed, if it counts there too.", flush=True
        )
    with _explained(job.address):
        client.submit_job(
            entrypoint=command,
            submission_id=job.id,
            # Everybody who sees the dashboard sees this: nothing of our environment goes along.
            runtime_env={
                "working_dir": str(package.path),
                "env_vars": {"PYTHONPATH": "src", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S)},
            },
        )
    print(f"Submitted {job.id} to {job.address}\n{job.ways()}", flush=True)


@contextmanager
def _interruptible() -> "Iterator[None]":
    """SIGTERM as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _let_go(client: Any, job: Job, stop_it: bool) -> int:
    """After Ctrl-C."""
    if not stop_it:
        print(f"\nLeft alone; {job.id} goes on at {job.address}.\n{job.ways()}", flush=True)
        return INTERRUPTED
    print(f"\nStopping {job.id} after a checkpoint (Ctrl-C once more: leave it alone)", flush=True)
    try:
        with _explained(job.address):
            client.stop_job(job.id)
        return _follow(client, job)
    except KeyboardInterrupt:
        print(f"\n{job.ways()}", flush=True)
        return INTERRUPTED


# --- scripts/runs.py ---------------------------------------------------------------------------------------------


def logs(name: str) -> int:
    """Follow a job; its exit code.

    Raises:
        MantaError: there is no such job, or no such cluster.
    """
    job = Job.parse(name)
    return _follow(_connect(job.address), job)


def stop(name: str) -> int:
    """Ask a job to end after a checkpoint.

    Raises:
        MantaError: there is no such job, or no such cluster.
    """
    job = Job.parse(name)
    client = _connect(job.address)
    with _explained(job.address, job):
        if not client.stop_job(job.id):
            print(f"{job.id} has ended already: {client.get_job_info(job.id).status.lower()}.")
            return FINISHED
    print(f"{job.id} is asked to stop after a checkpoint.\n{job.ways().splitlines()[0]}")
    return FINISHED


# --- following ---------------------------------------------------------------------------------------------------


class _Log:
    """A job's log, printed as it comes: each character once, however often it is read from its beginning."""

    def __init__(self, job: Job) -> None:
        self.shown, self._line = 0, ""
        there = f"cluster=job cluster.address={shlex.quote(job.address)}"
        self._here = (
            ("cluster=existing cluster.address=auto", there),
            ("python train.py resume=", f"python train.py {there} resume="),
        )

    def show(self, text: str, position: int) -> int:
        """Text that stands at a position of the log; where it ends."""
        new = text[max(self.shown - position, 0) :]
        self.shown = max(self.shown, position + len(text))
        *lines, self._line = (self._line + new).split("\n")
        for line in lines:
            self._print(line)
        return position + len(text)

    def end(self) -> None:
        if self._line:
            self._print(self._line)
        self._line = ""

    def _print(self, line: str) -> None:
        if not line.startswith("Running entrypoint for job "):
            for theirs, ours in self._here:  # commands that it names are to be typed here
                line = line.replace(theirs, ours)
        print(line, flush=True)


def _follow(client: Any, job: Job) -> int:
    """Print a job's log to its end; its exit code.

    Raises:
        MantaError: the cluster is gone, or does not know the job.
    """
    import aiohttp
    import requests

    log, lost = _Log(job), 0.0
    while True:
        try:
            found = client.get_job_info(job.id)
            if lost:
                print("Connected again.", file=sys.stderr, flush=True)
                lost = 0.0
            if found.status.is_terminal():
                log.show(client.get_job_logs(job.id), 0)
                log.end()
                return _code(found, job)
            asyncio.run(_tail(client, job, log))
        except (requests.RequestException, aiohttp.ClientError, OSError, RuntimeError) as error:
            if "does not exist" in str(error) and "404" in str(error):
                raise MantaError(f"{job.address} knows no job {job.id}. `ray job list` shows what it knows.") from error
            if not lost:
                print(f"Connection to {job.address} lost; trying again for {RETRY_S:g} s", file=sys.stderr, flush=True)
                lost = time.monotonic()
            if time.monotonic() - lost > RETRY_S:
                raise MantaError(
                    f"{job.address} does not answer any more. The job may go on; when the cluster can be reached:\n{job.ways()}",
                    code=FAILED,
                ) from error
            time.sleep(1)


async def _tail(client: Any, job: Job, log: _Log) -> None:
    """Print until the job ends. Returns without complaint too when the cluster closes the connection."""
    stream, position = client.tail_job_logs(job.id), 0
    try:
        while True:
            coming = asyncio.ensure_future(anext(stream, None))
            while not (await asyncio.wait({coming}, timeout=QUIET_S))[0]:
                client.get_job_info(job.id)  # raises if nobody is there any more
            text = coming.result()
            if text is None:
                return
            position = log.show(text, position)
    finally:
        coming.cancel()


def _code(found: Any, job: Job) -> int:
    """The exit code of what a job's details tell, after words about what its log does not say."""
    code = found.driver_exit_code
    if found.status == "SUCCEEDED":
        return FINISHED
    if found.status == "STOPPED":
        print(f"{job.id} was stopped.", flush=True)
        return INTERRUPTED
    if code in (FAILED, INVALID, INTERRUPTED):
        return int(code)
    if code == 127:
        why = (
            "its head node has no `python`: start Ray there from the environment with the packages of requirements.lock"
        )
    elif code is not None:
        why = f"its process ended with {code}" + (f", signal {-code}" if code < 0 else "")
    else:
        why = str(found.message).strip()
    print(f"Error: {job.id} failed: {why}", file=sys.stderr, flush=True)
    return FAILED


# --- the cluster -------------------------------------------------------------------------------------------------


def _connect(address: str) -> "JobSubmissionClient":
    """Raises:
    MantaError: nobody is there, or it is no dashboard, or it wants another token.
    """
    # Ray's client would take these instead of what it is told.
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        os.environ.pop(name, None)
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        """One that never waits for ever."""

        def _do_request(self, *arguments: Any, **options: Any) -> Any:
            return super()._do_request(*arguments, timeout=(CONNECT_S, ANSWER_S), **options)

    for module in ("dashboard_sdk", "job.sdk"):
        logging.getLogger(f"ray.dashboard.modules.{module}").setLevel(logging.WARNING)
    with _explained(address):
        client = Client(address)
    theirs = client._server_ray_version
    if theirs != ray.__version__:
        print(
            f"The cluster has Ray {theirs}, this machine {ray.__version__}: the command runs there, with the cluster's "
            "versions of all packages.",
            flush=True,
        )
    return client


@contextmanager
def _explained(address: str, job: Job | None = None) -> "Iterator[None]":
    """What goes wrong between here and the cluster, in words.

    Raises:
        MantaError: with them.
    """
    import requests
    from ray.exceptions import AuthenticationError

    from manta.cluster import _token

    try:
        yield
    except AuthenticationError as error:
        raise MantaError(
            f"cluster.address={address}: the cluster wants its token and {_token()} Set RAY_AUTH_TOKEN to the cluster's (in the "
            "environment or .env): `ray get-auth-token` prints it on its head node."
        ) from error
    except (requests.RequestException, ConnectionError, KeyError) as error:
        _nobody(address, error)
    except RuntimeError as error:
        if job is not None and "does not exist" in str(error):
            raise MantaError(f"{address} knows no job {job.id}. `ray job list` shows what it knows.") from error
        reason = str(error).strip()
        if "Version check returned 404" in reason:
            _nobody(address, error)
        last = [line for line in reason.splitlines() if line.strip()][-1:]
        raise MantaError(f"cluster.address={address}: the cluster refused: {' '.join(last)[-500:]}") from error


def _nobody(address: str, error: Exception) -> NoReturn:
    raise MantaError(
        f"cluster.address={address}: no Ray dashboard answers there. Its port is 8265 (6379 and 10001 are for other things); the "
        "head listens on its own 127.0.0.1 unless started with `ray start --head --dashboard-host=0.0.0.0`. Through SSH: "
        "ssh -N -L 8265:localhost:8265 <head>, then cluster.address=http://localhost:8265"
    ) from error
