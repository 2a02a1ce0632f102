"""Whether the nodes of a cluster share a folder: looked at before training, for Ray finds out at its first checkpoint."""

import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from manta.errors import MantaError
from manta.plan import Needs, room

ANSWER_S = 60.0
"""How long a node may take to start a task; one that does not is left to Ray, which waits for it or takes another."""


def other_nodes(needs: Needs) -> list[dict[str, Any]]:
    """Nodes that could get a worker, but for the one of this process."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    return [node for node in alive if room(needs.per_worker, [node["Resources"]])]


def check_shared(folder: Path, needs: Needs) -> None:
    """Write a small file here and read it on every node that could get a worker.

    Raises:
        MantaError: it cannot be written here, or nodes do not see it.
    """
    others = other_nodes(needs)
    if not others:
        return
    probe, content = folder / f".probe-{uuid.uuid4().hex}", uuid.uuid4().hex
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text(content)
    except OSError as error:
        raise MantaError(
            f"storage.path={folder} cannot be written: {error.strerror}. Choose another: storage.path=<folder>"
        ) from error
    try:
        found = _read_everywhere([node["NodeID"] for node in others], probe)
    finally:
        probe.unlink(missing_ok=True)
        if new:
            folder.rmdir()
    blind = [node for node in others if found.get(node["NodeID"], content) != content]
    if blind:
        names = [dict.fromkeys((node["NodeManagerHostname"], node["NodeManagerAddress"])) for node in blind]
        shown = ", ".join(" at ".join(name) for name in names)
        raise MantaError(
            f"storage.path={folder} is not shared by the nodes of the cluster: what {socket.gethostname()} writes there is "
            f"not seen on {shown}. It must be a folder that every node sees under this name (NFS, Lustre, ...): "
            "storage.path=/shared/outputs"
        )


def _read_everywhere(nodes: list[str], probe: Path) -> dict[str, str | None]:
    """What each node reads there; one that is lost meanwhile, or does not answer, is left out."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def read(path: str) -> str | None:  # by value: needs nothing of ours on the node
        try:
            with open(path) as file:
                return file.read()
        except OSError:
            return None

    def ask(node: str) -> Any:
        strategy: Any = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(num_cpus=0, max_calls=1, scheduling_strategy=strategy)(read).remote(str(probe))

    asked = {ask(node): node for node in nodes}
    answers, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
    found = {}
    for answer in answers:
        with suppress(ray.exceptions.RayError):
            found[asked[answer]] = ray.get(answer)
    return found
