"""`python -m manta.cluster.nodes ADDRESS COUNT WAIT_S PID`: until a Ray has so many nodes. A part of scripts/slurm/job.sh."""

import os
import sys
import time

from manta.cluster import TELL_S
from manta.errors import FAILED, FINISHED


def wait_for(address: str, count: int, wait_s: float, starter: int) -> int:
    """Until `count` nodes are alive at `address`.

    Args:
        starter: the process that starts them: when it has ended, none will come.

    Returns:
        The exit code.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    client = GcsClient(address=address)
    began = told = time.monotonic()
    while True:
        alive = [node.node_manager_hostname for node in client.get_all_node_info().values() if node.state == 0]
        if len(alive) >= count:
            return FINISHED
        now, ended = time.monotonic(), not os.path.exists(f"/proc/{starter}")
        if ended or now - began > wait_s:
            why = "starting the others has ended, see above" if ended else f"after {wait_s:g} s (cluster.wait_s)"
            print(f"slurm: {len(alive)} of {count} nodes have joined Ray at {address} ({', '.join(alive)}): {why}")
            return FAILED
        if now - told > TELL_S:
            print(f"slurm: waiting for nodes, {len(alive)} of {count} have joined Ray ({', '.join(alive)})", flush=True)
            told = now
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(wait_for(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
