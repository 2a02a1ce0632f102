"""A real SLURM on one machine, a namespace a node: tests/slurm_nodes.sh. Needs root, Debian's slurm-wlm and munge, iproute2."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

_TOOLS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey", "ip", "nsenter", "unshare")


def possible() -> bool:
    """Whether this machine has what it takes."""
    if os.geteuid() != 0 or not all(shutil.which(name) for name in _TOOLS):
        return False
    probe = subprocess.run(["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "true"], check=False)
    return probe.returncode == 0


class Slurm:
    """Nodes n1, n2, ... with 4 CPUs and 2 GPUs each; of neither SLURM looks whether they are there."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        with open(folder / "controller.log", "ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "bash", str(Path(__file__).with_name("slurm_nodes.sh")), str(folder), str(nodes)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.wait_for(lambda: self.login("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(nodes), 60)

    def _first(self) -> int:
        """Pid, seen from here, of the first process beside the controller."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def login(self, *command: str, timeout: float = 120, **environment: str) -> "subprocess.CompletedProcess[str]":
        """A command on the login node, in the folder `work`, to its end."""
        variables = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "HOME": str(self.folder / "home"),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.folder / "etc" / "slurm.conf"),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        }
        inside = [
            "nsenter",
            "-t",
            str(self._first()),
            "-p",
            "-m",
            "-n",
            "-i",
            "-u",
            f"--wd={self.folder / 'work'}",
            "--",
        ]
        return subprocess.run(
            [*inside, *command], env=variables, capture_output=True, text=True, timeout=timeout, check=False
        )

    def train(self, *overrides: str) -> "subprocess.CompletedProcess[str]":
        """`python train.py`, as typed on the login node."""
        return self.login(sys.executable, str(ROOT / "train.py"), *overrides)

    def job(self, number: str) -> dict[str, str]:
        """What SLURM knows of a job."""
        shown = self.login("scontrol", "show", "--oneliner", "job", number).stdout
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wait_for(self, condition: Any, timeout_s: float = 180, what: Any = "") -> None:
        """Until something is so.

        Args:
            what: shown when it is not; a function is called then.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self._process.poll() is None, (self.folder / "controller.log").read_text()
            assert time.monotonic() < deadline, what() if callable(what) else f"{what or 'timed out'}\n{self.logs()}"
            time.sleep(0.1)

    def wait(self, number: str, state: str, timeout_s: float = 240) -> dict[str, str]:
        """Until a job is in a state."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(lambda: self.job(number).get("JobState") in (state, *over), timeout_s)
        found = self.job(number)
        assert found["JobState"] == state, f"{found}\n{self.logs()}"
        return found

    def logs(self) -> str:
        """Of the jobs and of SLURM itself, from their ends."""
        files = [
            *self.folder.glob("**/clusters/*.log"),
            *(self.folder / "log").glob("*"),
            *self.folder.glob("work/*.out"),
        ]
        return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-4000:]}" for file in files)

    def close(self) -> None:
        first = self._first()
        if first:
            os.kill(first, signal.SIGKILL)
        self._process.wait(20)
