"""Where Ray comes from. `connect` gives a running Ray for the length of a launch; one we started is gone afterwards."""

import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from manta import plan
from manta.cluster.environment import Environment
from manta.cluster.own import on_loopback, session_folder
from manta.config import Cluster
from manta.errors import FAILED, MantaError
from manta.plan import Needs, Node, local_node

# Ours unless the user set them. Numbers measured on 2 cores: the health check also throttles how fast a run starts
# and ends (2 s by default); Ray's metrics and print patch add processes and double every line printed.
_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",  # as Ray Train sets it
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

_OWN = "MANTA_OWN_RAY"  # inherited by all processes of a Ray that `connect` starts

JOIN = "MANTA_JOIN_RAY"
"""In the environment of a multirun's jobs that run side by side: the address of the Ray that they share."""

ANSWER_S = 5
"""How long a cluster may take to answer."""
TELL_S = 15
"""How often a launch that waits says what for."""


def is_running() -> bool:
    """Whether this process is connected to a Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def is_own() -> bool:
    """Whether the Ray that this process is connected to was started by a launch and ends with it; also in its workers."""
    return is_running() and _OWN in os.environ


def is_shared() -> bool:
    """Whether others use the Ray that a launch gets, although it asks for one of its own."""
    return JOIN in os.environ or (is_running() and _kept.cluster is None)


class _Kept:
    """A Ray that outlives the launch that started or joined it."""

    wanted = False
    cluster: Cluster | None = None
    """What it was started or joined for; None = there is none."""
    end = ExitStack()

    def fits(self, cluster: Cluster) -> bool:
        """Whether a launch with these settings can have it."""
        import ray

        node: Any = ray._private.worker._global_node
        same = self.cluster is not None and replace(self.cluster, wait_s=cluster.wait_s) == cluster
        return same and not node.dead_processes()


_kept = _Kept()


def keep() -> None:
    """From now on launches leave Ray up for the next one that has the same settings of `cluster`, until `let_go`."""
    _kept.wanted = True


def let_go() -> None:
    """End the Ray that was kept, or leave it if it is not ours."""
    _kept.wanted, _kept.cluster = False, None
    _kept.end.close()


@contextmanager
def connect(
    cluster: Cluster, say: Callable[[str], None] = print, label_selector: Mapping[str, str] | None = None
) -> Iterator[list[Node]]:
    """A connected Ray and what its nodes with such labels have. Never joins a cluster that nobody asked for.

    Raises:
        MantaError: there is no cluster at the address, it does not let us in, it stays smaller than it should be, or no node has the
            labels.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized() and _kept.cluster is not None and not _kept.fits(cluster):
        let_go()
        keep()
    if ray.is_initialized():
        yield nodes(label_selector or {})
        return
    with ExitStack() as around:
        around.callback(ray.shutdown)
        if JOIN in os.environ:
            _join(replace(cluster, address=os.environ[JOIN]))
        else:
            os.environ.pop(_OWN, None)
            around.callback(os.environ.pop, _OWN, None)
            _join(cluster) if cluster.kind == "existing" else _start(cluster, around)
            _wait_for_nodes(cluster, say)
        if _kept.wanted:
            _kept.cluster, _kept.end = cluster, around.pop_all()
        yield nodes(label_selector or {})


def _start(cluster: Cluster, around: ExitStack) -> None:
    """A Ray of our own, for as long as `around` lasts."""
    import ray

    around.enter_context(on_loopback())
    node = local_node(cluster)
    os.environ[_OWN] = "1"
    with _deaf_to_batch_systems():
        ray.init(
            address="local",
            num_cpus=int(node["CPU"]),
            num_gpus=int(node["GPU"]),
            include_dashboard=False,
            object_store_memory=cluster.object_store_memory,
            logging_level=logging.WARNING,
        )
    around.enter_context(session_folder())


@contextmanager
def _deaf_to_batch_systems() -> Iterator[None]:
    """In a job of SLURM, what starts in here does not get SIGTERM, which is sent to every process when a job is cancelled.

    This process does, and writes a checkpoint: with Ray. (Ray itself keeps SIGINT from its processes in the same way.)
    """
    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _join(cluster: Cluster) -> None:
    """Connect to `cluster.address`. Ray alone would try for a quarter of an hour and not say why it failed.

    Raises:
        MantaError: nothing answers there, or it is no Ray, or its token, its versions or its nodes do not fit.
    """
    import ray
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    from ray.exceptions import AuthenticationError

    setting = f"cluster.address={cluster.address}"
    # `ray start --head` asks for a token wherever one exists; joining by address never sends it unless told.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        address = _address(cluster.address)
        _knock(address)
        ray.init(address=address, logging_level=logging.WARNING)
    except AuthenticationError as error:
        raise MantaError(
            f"{setting}: the Ray cluster there wants its token and {_token()} Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN "
            f"to the cluster's: `ray get-auth-token` prints it on its head node."
        ) from error
    except Exception as error:
        raise MantaError(f"{setting}: {_why(error)}") from error


def _address(given: str | None) -> str:
    """host:port of an address.

    Raises:
        ConnectionError: `auto`, and no Ray runs here, or several do and none of them is the last one started by hand.
    """
    from ray._private import services

    if given == "auto" and not os.environ.get("RAY_ADDRESS"):
        running, last = services.find_gcs_addresses(), services.find_bootstrap_address(None)
        if len(running) > 1 and last not in running:  # Ray would take any, also another run's own
            raise ConnectionError(f"{len(running)} run on this machine, name one of {', '.join(sorted(running))}")
    address = services.canonicalize_bootstrap_address(given or "auto")
    assert address is not None
    return address


def _knock(address: str) -> None:
    """Return if a Ray answers at an address and lets us in.

    Raises:
        ConnectionError: nothing answers in time, or what answers is no Ray.
        ray.exceptions.AuthenticationError: it wants another token.
    """
    import grpc
    from ray._private.gcs_utils import create_gcs_channel
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    with create_gcs_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=ANSWER_S)
        except grpc.FutureTimeoutError:
            raise ConnectionError(f"nothing answered at {address} within {ANSWER_S} s") from None
    GcsClient(address=address)


def _token() -> str:
    """Which token was sent, never its value."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return "none was sent."
    names = [name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)]
    source = names[0] if names else "~/.ray/auth_token"
    return f"did not accept the one of {source}."


def _why(error: Exception) -> str:
    """Why a cluster could not be joined, and the way out."""
    text = str(error)
    versions = re.findall(r"(Ray|Python): (\S+)", text)
    if "Version mismatch" in text and len(versions) == 4:
        theirs, ours = versions[:2], versions[2:]
        shown = [" and ".join(map(" ".join, side)) for side in (theirs, ours)]
        return (
            f"the cluster runs {shown[0]}, this command {shown[1]}. They must be the same: use an environment with the "
            f"cluster's versions (pip install ray=={theirs[0][1]}), or update the cluster."
        )
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__).rstrip(".")
    return (
        f"no Ray cluster could be joined ({reason}). Check the address, start one with `ray start --head`, or run on this "
        "machine alone: cluster=local"
    )


def nodes(label_selector: Mapping[str, str]) -> list[Node]:
    """The resources of every live node with such labels.

    Raises:
        MantaError: none has them.
    """
    found = live_nodes(label_selector)
    if not found:
        shown = [
            ", ".join(f"{key}={value}" for key, value in sorted(node["Labels"].items()) if key != "ray.io/node-id")
            for node in live_nodes({})
        ]
        raise MantaError(
            f"scaling.label_selector={dict(label_selector)}: no node of the cluster has such labels. They have: "
            f"{'; '.join(dict.fromkeys(each or 'none' for each in shown))}. Labels are given to `ray start --labels=name=value`."
        )
    kinds = ("node:", "memory", "object_store_memory")
    return [{key: value for key, value in node["Resources"].items() if not key.startswith(kinds)} for node in found]


def live_nodes(label_selector: Mapping[str, str]) -> list[dict[str, Any]]:
    """Ray's own descriptions of the live nodes with such labels."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and _has_labels(node["Labels"], label_selector)]


def _has_labels(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    for key, wanted in selector.items():
        values = re.split(r", ?", wanted.removeprefix("!").removeprefix("in(").removesuffix(")"))
        if (labels.get(key) in values) == wanted.startswith("!"):
            return False
    return True


def _wait_for_nodes(cluster: Cluster, say: Callable[[str], None]) -> None:
    """Return when the cluster has `cluster.min_nodes`.

    Raises:
        MantaError: it has not after `cluster.wait_s`.
    """

    def lacking() -> str | None:
        count = len(live_nodes({}))
        return f"cluster.min_nodes={cluster.min_nodes}; the cluster has {count}" if count < wanted else None

    wanted = cluster.min_nodes or 0
    wait(lacking, cluster.wait_s, say, "Look why the others do not come (`ray status` on its head), take fewer")


def wait(lacking: Callable[[], str | None], wait_s: float, say: Callable[[str], None], way_out: str) -> None:
    """Return when nothing is lacking any more; say what is waited for.

    Args:
        lacking: what, None = nothing.

    Raises:
        MantaError: it still is after `wait_s`.
    """
    began, told = time.monotonic(), -math.inf
    while (what := lacking()) is not None:
        waited = time.monotonic() - began
        if waited > wait_s:
            raise MantaError(
                f"cluster.wait_s={wait_s:g}: waited in vain for {what}. {way_out}, or wait longer: cluster.wait_s=3600",
                code=FAILED,
            )
        if waited - told >= TELL_S:
            say(f"Waiting for {what} (for up to {wait_s:g} s)")
            told = waited
        time.sleep(0.5)


def environment(cluster: Cluster) -> Environment:
    """Of this process, for the workers; those of a Ray of our own inherit it."""
    return Environment() if is_own() else Environment.of_this_process(cluster.env_vars)


def has_cuda(cluster: Cluster) -> bool:
    """Whether a worker that is given a GPU will find one (logical GPUs may be declared without any).

    On a cluster a worker is asked, so a GPU must be free.
    """
    import ray

    def probe() -> bool:
        import torch

        return torch.cuda.is_available()

    if cluster.kind == "local":
        return probe()
    return bool(ray.get(ray.remote(num_cpus=0, num_gpus=0.001, max_calls=1)(probe).remote()))


@contextmanager
def worker_lines(show: Any, note: Any) -> Iterator[None]:
    """Hand what workers print to `show`, and what Ray's own processes print to `note`."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    failed = set()  # processes that print a traceback, which the driver shows in its own way

    def handle(data: dict[str, Any]) -> None:
        if data.get("pid") == "autoscaler" or data.get("actor_name") == "PlacementGroupCleaner":
            return  # a line a second each, about nothing
        ours = data.get("actor_name") == "RayTrainWorker"
        for line in data.get("lines", []):
            if line.startswith("Error in training function"):
                failed.add(data.get("pid"))
            if ours and data.get("pid") not in failed and not _is_chatter(line):
                show(line)
            else:
                note(f"({data.get('actor_name') or 'ray'} pid={data.get('pid')}) {line}")

    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("manta", handle)
    try:
        yield
    finally:
        dispatcher.remove_handler("manta")


def _is_chatter(line: str) -> bool:
    """Lines of Ray's, torch's and a recipe's libraries' own loggers in a worker."""
    starts = ("[rank", "[W", "[E", "[Gloo]", "Setting up process group", "Moving model", "[LightGBM] [Info]")
    inside = (" core_worker", "ray/train/", "ray._private", "warnings.warn")
    xgboost = r"\[[\d:]+\] Task \d+ got rank"
    return line.startswith(starts) or any(mark in line for mark in inside) or re.match(xgboost, line) is not None


def wait_for_resources(cluster: Cluster, needs: Needs, say: Callable[[str], None]) -> None:
    """Return when the workers could be placed now; say what is waited for.

    Raises:
        MantaError: still busy after `cluster.wait_s`.
    """
    from ray._private.state import available_resources_per_node

    def lacking() -> str | None:
        eligible = {node["NodeID"] for node in live_nodes(needs.label_selector)}
        free = [node for name, node in available_resources_per_node().items() if name in eligible]
        if plan.room(needs.per_worker, free, needs.placement_strategy) >= needs.num_workers:
            return None
        have = {key: sum(node.get(key, 0) for node in free) for key in needs.per_worker}
        return f"{needs}; free now: {plan.shown(have)}"

    way_out = "Ask for less (scaling.num_workers, scaling.resources_per_worker)"
    wait(lacking, cluster.wait_s, say, way_out)
