"""Where Ray comes from. `connect` gives a running Ray for the length of a launch; one we started is gone afterwards."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manta import plan
from manta.config import Cluster
from manta.errors import MantaError
from manta.plan import Needs, Node, local_node

# Ours unless the user set them. Numbers measured on 2 cores: the health check also throttles how fast a run starts
# and ends (2 s by default); Ray's metrics and print patch add processes and double every line printed.
_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def is_running() -> bool:
    """Whether this process is connected to a Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


@contextmanager
def connect(cluster: Cluster) -> Iterator[list[Node]]:
    """A connected Ray and what its nodes have. Never joins a cluster that nobody asked for.

    Raises:
        MantaError: there is no cluster at the address, or it does not let us in.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():  # inside a job of hydra/launcher=ray: its cluster is ours
        yield nodes()
        return
    if cluster.kind == "existing":
        _join(cluster)
    else:
        node = local_node(cluster)
        ray.init(
            address="local",
            num_cpus=int(node["CPU"]),
            num_gpus=int(node["GPU"]),
            include_dashboard=False,
            object_store_memory=cluster.object_store_memory,
            logging_level=logging.WARNING,
        )
    try:
        yield nodes()
    finally:
        ray.shutdown()


def _join(cluster: Cluster) -> None:
    import ray
    import ray.exceptions

    token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if token or (Path.home() / ".ray" / "auth_token").is_file():
        # `ray start --head` asks for a token wherever one exists; joining by address never sends it unless told.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        ray.init(address=cluster.address, logging_level=logging.WARNING)
    except (ConnectionError, ray.exceptions.RayError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MantaError(
            f"cluster.address={cluster.address}: no Ray cluster answered there ({reason}). Start one with "
            f"`ray start --head`, check the address, and if it uses tokens set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN."
        ) from error


def nodes() -> list[Node]:
    """The resources of every live node."""
    import ray

    kinds = ("node:", "memory", "object_store_memory")
    return [
        {key: value for key, value in node["Resources"].items() if not key.startswith(kinds)}
        for node in ray.nodes()
        if node["Alive"]
    ]


def has_cuda(cluster: Cluster) -> bool:
    """Whether a worker that is given a GPU will find one (logical GPUs may be declared without any)."""
    import ray

    if cluster.kind == "local":
        import torch

        return torch.cuda.is_available()

    @ray.remote(num_cpus=0, num_gpus=0.001)
    def probe() -> bool:
        from manta.plan import gpu_count

        return gpu_count() > 0

    return bool(ray.get(probe.remote(), timeout=120))


@contextmanager
def worker_lines(show: Any, note: Any) -> Iterator[None]:
    """Hand what workers print to `show`, and what Ray's own processes print to `note`."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    def handle(data: dict[str, Any]) -> None:
        if data.get("pid") == "autoscaler" or data.get("actor_name") == "PlacementGroupCleaner":
            return  # a line a second each, about nothing
        ours = data.get("actor_name") == "RayTrainWorker"
        for line in data.get("lines", []):
            if ours and not _is_chatter(line):
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
    """Lines of Ray's and torch's own loggers in a worker."""
    return line.startswith(("[rank", "[W", "[E", "[Gloo]", "Setting up process group", "Moving model")) or any(
        mark in line for mark in (" core_worker", "ray/train/", "ray._private", "warnings.warn")
    )


def wait_for_resources(cluster: Cluster, needs: Needs, say: Callable[[str], None]) -> None:
    """Return when the workers could be placed now; say what is waited for.

    Raises:
        MantaError: still busy after `cluster.wait_s`.
    """
    import ray
    from ray._private.state import available_resources_per_node

    deadline, told = time.monotonic() + cluster.wait_s, 0.0
    while True:
        free = list(available_resources_per_node().values())
        if plan.room(needs.per_worker, free) >= needs.num_workers:
            return
        now = time.monotonic()
        total = ray.available_resources()
        have = plan.shown({key: total.get(key, 0) for key in needs.per_worker})
        wanted = f"{needs.num_workers} workers with {plan.shown(needs.per_worker)} each; free now: {have}"
        if now > deadline:
            raise MantaError(f"Waited {cluster.wait_s:.0f} s (cluster.wait_s) for {wanted}.")
        if now - told > 15:
            say(f"Waiting for {wanted}.")
            told = now
        time.sleep(0.5)
