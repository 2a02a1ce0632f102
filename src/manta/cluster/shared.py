"""What the nodes of a cluster must share, looked at before training: the folder of results, and the same code."""

import hashlib
import socket
import sys
import uuid
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any

from manta.cluster import live_nodes
from manta.errors import MantaError
from manta.plan import Needs, room

ANSWER_S = 60.0
"""How long a node may take to start a task; one that does not is left to Ray, which waits for it or takes another."""


def other_nodes(needs: Needs) -> list[dict[str, Any]]:
    """Nodes that could get a worker, but for the one of this process."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    others = [node for node in live_nodes(needs.label_selector) if node["NodeID"] != here]
    return [node for node in others if room(needs.per_worker, [node["Resources"]])]


def check_nodes(folder: Path, needs: Needs) -> None:
    """Write a small file here and read it on every node that could get a worker; compare the code there with ours.

    Raises:
        MantaError: the folder cannot be written here, or nodes do not see it, or they have no or other code.
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
        found = _look_everywhere([node["NodeID"] for node in others], probe)
    finally:
        probe.unlink(missing_ok=True)
        if new:
            folder.rmdir()
    answered = [node for node in others if node["NodeID"] in found]
    blind = [node for node in answered if found[node["NodeID"]]["content"] != content]
    if blind:
        raise MantaError(
            f"storage.path={folder} is not shared by the nodes of the cluster: what {socket.gethostname()} writes there is "
            f"not seen on {_named(blind)}. It must be a folder that every node sees under this name (NFS, Lustre, ...): "
            "storage.path=/shared/outputs"
        )
    _check_code(answered, found)


def _check_code(nodes: list[dict[str, Any]], found: dict[str, dict[str, Any]]) -> None:
    """Raises:
    MantaError: a node would run other code than this command."""
    ours = look("")
    for key, what in (("code", "manta"), ("torch", "torch")):
        there = [(node, found[node["NodeID"]][key]) for node in nodes]
        if without := [node for node, theirs in there if theirs is None]:
            raise MantaError(
                f"{what} cannot be imported on {_named(without)}. Install the project in the environment of every node (pip "
                "install -e .), or have one on a folder that all nodes share, or let Ray bring the code: cluster=job"
            )
        if other := [node for node, theirs in there if theirs != ours[key]]:
            versions = "" if key == "code" else f" ({ours[key]} here, {found[other[0]['NodeID']][key]} there)"
            raise MantaError(
                f"{_named(other)} would run another {what} than this command{versions}. Update it there, or have one on a "
                "folder that all nodes share, or let Ray bring the code: cluster=job"
            )


def _named(nodes: list[dict[str, Any]]) -> str:
    names = [dict.fromkeys((node["NodeManagerHostname"], node["NodeManagerAddress"])) for node in nodes]
    return ", ".join(" at ".join(name) for name in names)


def look(probe: str) -> dict[str, Any]:
    """What a process sees: the content of a file, a digest of manta's code and torch's version; None for what is not there."""
    seen: dict[str, Any] = dict.fromkeys(("content", "code", "torch"))
    with suppress(OSError), open(probe) as file:
        seen["content"] = file.read()
    with suppress(metadata.PackageNotFoundError):
        seen["torch"] = metadata.version("torch")
    spec = util.find_spec("manta")
    if spec is not None and spec.origin is not None:
        digest, root = hashlib.sha256(), Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
        seen["code"] = digest.hexdigest()
    return seen


def _look_everywhere(nodes: list[str], probe: Path) -> dict[str, dict[str, Any]]:
    """What each node sees; one that is lost meanwhile, or does not answer, is left out."""
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def ask(node: str) -> Any:
        strategy: Any = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(num_cpus=0, max_calls=1, scheduling_strategy=strategy)(look).remote(str(probe))

    this = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(this)  # a node may not have it
    try:
        asked = {ask(node): node for node in nodes}
    finally:
        cloudpickle.unregister_pickle_by_value(this)
    answers, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
    found = {}
    for answer in answers:
        with suppress(ray.exceptions.RayError):
            found[asked[answer]] = ray.get(answer)
    return found
