"""Jobs of a multirun side by side: each a process, started when the one Ray has room for its workers."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from manta import plan
from manta.cluster import JOIN, connect
from manta.config import Config
from manta.errors import FAILED, FINISHED, INTERRUPTED, MantaError
from manta.launch import Interrupts
from manta.multirun.jobs import Folder, Job
from manta.multirun.running import differences
from manta.plan import Needs, Node
from manta.runs import short
from manta.targets import ALLOWED_TARGETS
from manta.view import View, number
from manta.workers import sign_of_life

END_S = 30.0
"""How long jobs may take to end after they were told to at once."""


@dataclass
class Start:
    """A job that is to run."""

    job: Job
    config: Config
    environment: dict[str, str] = field(default_factory=dict)
    """More than this process has."""
    folder: str | None = None
    """Where it runs; None = here."""


@dataclass
class Running:
    """A job that runs."""

    start: Start
    needs: Needs | None
    """None = all there is."""
    process: "subprocess.Popen[bytes]"
    began: float = field(default_factory=time.monotonic)
    placed: bool = False
    """Its workers are there: Ray counts them."""

    def look(self) -> bool:
        """Whether its workers are, or were, there."""
        run = self.start.job.run
        self.placed = self.placed or (run is not None and sign_of_life(run).exists())
        return self.placed


@dataclass
class SideBySide:
    """A batch of jobs."""

    folder: Folder
    starts: list[Start]
    at_most: int | None = None
    begun: Callable[[Job], None] = lambda job: None
    ended: Callable[[Job], None] = lambda job: None
    view: View = field(default_factory=View)

    def go(self) -> None:
        """Run them to their end; what became of each is in its job.json.

        Raises:
            MantaError: no job can run.
            KeyboardInterrupt: it was interrupted; the jobs that ran have stopped.
        """
        if not self.starts:
            return
        self.waiting, self.running, self.stopping = deque(self.starts), list[Running](), False
        self.labels = differences([each.job for each in self.starts])
        cluster = self.starts[0].config.cluster
        if any(each.config.cluster != cluster for each in self.starts):
            raise MantaError("cluster: jobs side by side share one Ray, so all have the same settings of cluster.")
        with ExitStack() as around:
            around.callback(self.view.close)
            self.view.open_log(self.folder.path / "multirun.log")
            interrupts = around.enter_context(Interrupts(self.view.say).installed())
            self.address, self.own = None, True
            self.nodes = [plan.local_node(cluster)]
            around.enter_context(self.view.capture_descriptors())
            if any(each.config.scaling.num_workers != 0 for each in self.starts):
                self.nodes = around.enter_context(connect(cluster, self.view.say))
                import ray

                self.address, self.own = ray.get_runtime_context().gcs_address, cluster.kind == "local"
            interrupts.listen()
            interrupts.ask = self.stop
            try:
                self._follow()
            except BaseException:
                self._end_now()
                raise
        if self.stopping:
            raise KeyboardInterrupt

    def stop(self) -> None:
        """Ask the jobs that run to stop after a checkpoint; the others are not started."""
        self.stopping = True
        for each in self.running:
            each.process.send_signal(signal.SIGINT)

    def _end_now(self) -> None:
        for each in self.running:
            each.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + END_S
        for each in self.running:
            try:
                each.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                os.killpg(each.process.pid, signal.SIGKILL)
            each.start.job.note(code=INTERRUPTED)

    def _follow(self) -> None:
        while self.running or (self.waiting and not self.stopping):
            for each in [each for each in self.running if each.process.poll() is not None]:
                self.running.remove(each)
                self._end(each)
            while self.waiting and not self.stopping and self._start_next():
                pass
            time.sleep(0.1)

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start_next(self) -> bool:
        """Start the next job if there is room for it; in their order, so that none waits for ever."""
        if self.at_most is not None and len(self.running) >= self.at_most:
            return False
        start = self.waiting[0]
        try:
            needs = _needs(start.config, self.nodes, self.own)
        except MantaError as error:
            self.waiting.popleft()
            self.begun(start.job)
            start.job.note(code=error.code, error=str(error))
            self._say_end(start.job, 0)
            return True
        if self.running and (needs is None or plan.place(needs, self._free()) is None):
            return False
        # When nothing of ours runs, others have what is missing: the job itself waits for it, and says so.
        self.waiting.popleft()
        self.begun(start.job)
        self.running.append(Running(start, needs, self._process(start, needs)))
        self.view.say(f"Job {start.job.number} started: {self.labels[start.job.number]}  (log: {short(start.job.log)})")
        return True

    def _free(self) -> list[Node]:
        """What the nodes have left for a job. Ray counts workers only once they are there."""
        held = [each for each in self.running if self.own or not each.look()]
        if any(each.needs is None for each in self.running):
            return []
        free = self.nodes if self.own else _available()
        for each in held:
            assert each.needs is not None
            free = plan.place(each.needs, free) or free
        return free

    def _process(self, start: Start, needs: Needs | None) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, ALLOWED_TARGETS: ",".join(start.config.allowed_targets), **start.environment}
        if start.config.scaling.num_workers == 0 and needs is not None:
            environment.setdefault("OMP_NUM_THREADS", str(max(int(needs.per_worker["CPU"]), 1)))
        elif self.address is not None:
            environment[JOIN] = self.address
        command = [sys.executable, "-m", "manta.multirun.job", str(start.job.folder), os.path.abspath(sys.argv[0])]
        with open(start.job.log, "ab") as log:
            return subprocess.Popen(
                [*command, *(["traceback"] if start.config.traceback else [])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=start.folder,
                start_new_session=True,  # Ctrl-C is ours to pass on
            )

    # --- ending ------------------------------------------------------------------------------------------------------

    def _end(self, ended: Running) -> None:
        job, code = ended.start.job, ended.process.returncode
        if code < 0:
            job.note(error=f"its process was ended by {signal.Signals(-code).name}")
            code = INTERRUPTED if self.stopping else FAILED
        job.note(code=code)
        self._say_end(job, time.monotonic() - ended.began)

    def _say_end(self, job: Job, seconds: float) -> None:
        code = job.record["code"]
        if code == FINISHED:
            self.view.say(f"Job {job.number} finished: {number(job.objective)}  {seconds:.1f} s  {job.run}")
        elif code == INTERRUPTED:
            self.view.say(f"Job {job.number} interrupted: {job.run or 'nothing to save yet'}")
        else:
            self.view.say(f"Job {job.number} failed ({code}): {job.error}  (log: {short(job.log)})")
        if code != INTERRUPTED:
            self.ended(job)


def _available() -> list[Node]:
    from ray._private.state import available_resources_per_node

    found: dict[str, Any] = available_resources_per_node()
    return list(found.values())


def _needs(config: Config, nodes: list[Node], own: bool) -> Needs | None:
    """What a job takes; None = all there is, as a search does unless `search.max_concurrent_trials` says less.

    Raises:
        MantaError: it can never run here.
    """
    if config.search.algorithm:
        trials = config.search.max_concurrent_trials
        trial = plan.resolve_trial(config, nodes, own=False)
        needs = dataclasses.replace(trial, num_workers=trial.num_workers * (trials or 1))
        return needs if trials and plan.place(needs, nodes) is not None else None
    needs = plan.resolve(config, nodes, own=False)
    if needs.num_workers > 0:
        return needs
    if needs.use_gpu:
        raise MantaError(
            "scaling.num_workers=0: side by side, jobs without Ray would all take the first GPU. scaling=single_gpu gives each its own."
        )
    if not own:
        raise MantaError("scaling.num_workers=0 runs on this machine, not on the cluster. Set scaling.num_workers=1.")
    return Needs(1, False, {"CPU": config.scaling.resources_per_worker.get("CPU") or 1.0})
