"""Several Ray nodes on one machine, each with its own address, hostname and processes. Needs root, iproute2, util-linux.

Every node lives in a network, mount, pid and uts namespace of its own; they are connected by a bridge in yet another one, so
that this machine's own network is not touched.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from manta.cluster.own import LOOPBACK

NET = "10.77.0"
OWN_RAY = "MANTA_OWN_RAY", *LOOPBACK
"""Environment variables of a Ray of its own that the test process may have: another Ray must not inherit them."""
# Nodes that are gone are noticed within 3 s.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
}


def possible() -> bool:
    """Whether this machine lets us."""
    tools = all(shutil.which(name) for name in ("ip", "nsenter", "unshare", "setpriv"))
    if os.geteuid() != 0 or not tools:
        return False
    probe = subprocess.run(["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True)
    return probe.returncode == 0


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Nodes:
    """Node 1 is the head, without CPUs; the others have one each, unless told otherwise."""

    def __init__(self, folder: Path, tag: str, dashboard: bool = False) -> None:
        """Args: dashboard: of the head, at http://127.0.0.1:8265 of its own, and at its address."""
        self.folder, self.tag, self.dashboard = folder, tag, dashboard
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._nets: set[int] = set()
        self.ray = Path(
            tempfile.mkdtemp(prefix="n", dir="/tmp")
        )  # names of Ray's sockets have a limit, pytest's folders are long
        (folder / "home").mkdir()
        self.env = {**os.environ, **_ENVIRONMENT, "HOME": str(folder / "home")}
        for name in OWN_RAY:
            self.env.pop(name, None)
        switch = f"{tag}sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")

    @property
    def address(self) -> str:
        return f"{NET}.1:6379"

    def host(self, node: int) -> str:
        return f"{self.tag}{node}"

    def start(self, node: int, *more: str, before: str = "true") -> None:
        """Without waiting.

        Args:
            more: arguments of `ray start`.
            before: a shell command of the node, in its own file systems.
        """
        self._connect(node)
        place = self.ray / f"n{node}"
        shutil.rmtree(place, ignore_errors=True)
        (place / "tmp").mkdir(parents=True)
        hosts = self.folder / f"hosts{node}"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{NET}.{k} {self.host(k)}\n" for k in range(1, 10)))
        head = ["--head", "--port=6379", "--num-cpus=0", f"--include-dashboard={str(self.dashboard).lower()}"]
        head += ["--dashboard-host=0.0.0.0"] if self.dashboard else []
        role = head if node == 1 else [f"--address={self.address}", "--num-cpus=1"]
        role += more  # the last of two counts
        ray = [
            str(Path(sys.executable).parent / "ray"), "start", *role, f"--node-ip-address={NET}.{node}", f"--temp-dir={place}",
            "--object-store-memory=100000000", "--disable-usage-stats", "--block",
        ]  # fmt: skip
        script = f"hostname {self.host(node)}; mount --bind {hosts} /etc/hosts; {before} || exit; exec " + " ".join(ray)
        with open(self.folder / f"n{node}.log", "ab") as log:
            self.processes[node] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.host(node), "unshare", "--mount", "--uts",
                 "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "bash", "-c", script],
                env={**self.env, "TMPDIR": str(place / "tmp")}, stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def _connect(self, node: int) -> None:
        if node in self._nets:
            return
        name, switch, port = self.host(node), f"{self.tag}sw", f"p{node}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", name, "addr", "add", f"{NET}.{node}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        self._nets.add(node)

    def _first(self, node: int) -> int:
        """Pid, seen from here, of the node's first process."""
        process = self.processes[node]
        children, deadline = Path(f"/proc/{process.pid}/task/{process.pid}/children"), time.monotonic() + 60
        while process.poll() is not None or not children.read_text():  # it is just being started
            log = (self.folder / f"n{node}.log").read_text()
            assert process.poll() is None, f"node {node} ended with {process.poll()}:\n{log}"
            assert time.monotonic() < deadline, f"node {node} does not start:\n{log}"
            time.sleep(0.01)
        return int(children.read_text().split()[0])

    def command(self, node: int, *arguments: str) -> list[str]:
        """Arguments as a command on a node."""
        return [
            "nsenter",
            "-t",
            str(self._first(node)),
            "-m",
            "-n",
            "-u",
            "-p",
            f"--wd={os.getcwd()}",
            "--",
            *arguments,
        ]

    def run(self, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """To its end, on the head."""
        options = {"env": self.env, "timeout": 120, **options}
        return subprocess.run(
            self.command(1, *arguments),
            capture_output=True,
            text=True,
            check=False,
            **options,
        )

    def popen(self, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
        """Start on the head and return at once."""
        return subprocess.Popen(
            self.command(1, *arguments),
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    def alive(self) -> dict[str, str]:
        """Node ids by hostname."""
        code = (
            "import json; from ray._raylet import GcsClient; "
            f"nodes = GcsClient(address='{self.address}').get_all_node_info().values(); "
            "print(json.dumps({n.node_manager_hostname: n.node_id.hex() for n in nodes if n.state == 0}))"
        )
        done = self.run(sys.executable, "-c", code)
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def wait(self, *nodes: int) -> None:
        """Until exactly these are there."""
        wanted, deadline = {self.host(node) for node in nodes}, time.monotonic() + 180
        while set(self.alive()) != wanted:
            assert time.monotonic() < deadline, f"{self.alive()} instead of {wanted}"

    def kill(self, node: int) -> None:
        """All its processes at once."""
        first, process = self._first(node), self.processes.pop(node)
        os.kill(first, signal.SIGKILL)
        process.wait(20)

    def drain(self, node: int, deadline_s: int) -> None:
        """What a cloud announces before it takes a node away."""
        done = self.run(
            str(Path(sys.executable).parent / "ray"), "drain-node", f"--address={self.address}",
            f"--node-id={self.alive()[self.host(node)]}", "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot",
            f"--deadline-remaining-seconds={deadline_s}",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def close(self) -> None:
        for node in sorted(self.processes, reverse=True):
            with contextlib.suppress(OSError, IndexError, subprocess.TimeoutExpired):
                self.kill(node)
        for node in self._nets:
            subprocess.run(["ip", "netns", "del", self.host(node)], check=False)
        subprocess.run(["ip", "netns", "del", f"{self.tag}sw"], check=False)
        shutil.rmtree(self.ray, ignore_errors=True)
