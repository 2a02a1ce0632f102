"""`python -m manta.cluster.nodes ADDRESS COUNT WAIT_S PID`: until a Ray has so many nodes. A part of scripts/slurm/job.sh."""

import os
import sys

from manta.cluster import wait
from manta.errors import FAILED, FINISHED, MantaError, exit_code


def wait_for(address: str, count: int, wait_s: float, starter: int) -> int:
    """Until `count` nodes are alive at `address`.

    Args:
        starter: the process that starts them: when it has ended, none will come.

    Returns:
        The exit code.

    Raises:
        MantaError: they do not come.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    client = GcsClient(address=address)

    def lacking() -> str | None:
        alive = [node.node_manager_hostname for node in client.get_all_node_info().values() if node.state == 0]
        if len(alive) >= count:
            return None
        joined = f"{len(alive)} of {count} nodes have joined Ray at {address} ({', '.join(alive)})"
        if not os.path.exists(f"/proc/{starter}"):
            raise MantaError(f"{joined}, and starting the others has ended, see above.", code=FAILED)
        return f"nodes; {joined}"

    wait(lacking, wait_s, lambda text: print(f"slurm: {text}", flush=True), "Look at the others' logs, take fewer")
    return FINISHED


if __name__ == "__main__":
    sys.exit(exit_code(lambda: wait_for(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))))
