"""What a recipe sees of the world: its rank, its device, and where to report. The only way to ray for a recipe.

Three makers: `plain` (this process), `ray_worker` (a Ray Train worker), `tune_trial` (a Tune trial's own process).
"""

import math
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manta.config import Config
from manta.errors import FAILED as FAILED_CODE
from manta.errors import MantaError
from manta.runs import FAILED, INTERRUPTED, MetricsFile, RunDir, explaining, finite, with_way_out, writing
from manta.tracking.live import Live
from manta.watchdog import Pulse, Stuck, Watchdog, begin

AGREE_EVERY_S = 1.0
ALONE_EVERY_S = 0.1
CLOCKS_S = 5.0
"""From which difference on it is said that the clocks of nodes are apart."""
NOTICE_EVERY_S = 5.0
"""Seconds between checkpoints while a node of the run is about to be taken away."""


@dataclass
class Session:
    """One rank of one run."""

    run: RunDir
    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    stop: Callable[[], bool] = lambda: False
    """Whether this rank has been asked to checkpoint and stop."""
    noticed: Callable[[], bool] = lambda: False
    """Whether this rank has heard that a node of the run will be taken away."""
    on_report: Callable[[dict[str, Any]], None] | None = None
    """Called on rank 0 with every line reported."""
    watched: bool = False
    """A trial of a search, the same on every rank: `decide` is asked after every validation; no look at the test split."""
    decide: Callable[[dict[str, Any]], bool] = lambda _: False
    """On rank 0 of a watched run: given {"epoch", "step", "metrics"} of a validation, whether to end here."""
    on_open: Callable[[], None] = lambda: None
    """Called on rank 0 once the history is open."""
    stuck: Stuck | None = None
    """What to do when nothing moves any more; None = end this process."""
    pulse: Pulse = field(default_factory=Pulse)
    """What this rank does; a recipe marks it, the same marks on every rank."""
    _metrics: MetricsFile | None = None
    _control: Any = field(default=None, repr=False)
    _served: list[Any] = field(default_factory=list, repr=False)

    @property
    def main(self) -> bool:
        """Whether this is rank 0, the one that writes."""
        return self.rank == 0

    # --- reporting -----------------------------------------------------------------------------------------------

    def open_metrics(self, keep_bytes: int) -> None:
        """Continue metrics.jsonl from `keep_bytes` on (0 = afresh). Rank 0 only writes; others do nothing."""
        if self.main:
            self._metrics = MetricsFile(self.run.metrics, keep_bytes)
            self.on_open()

    def metrics_size(self) -> int:
        """Bytes reported so far, all on disk now; goes into a checkpoint."""
        return self._metrics.sync() if self._metrics else 0

    def report(self, values: dict[str, Any]) -> None:
        """Append one line of plain numbers to the run's history; numbers that JSON lacks (NaN, inf) become null."""
        if self._metrics is None:
            return
        line = {**finite(values), "time": round(time.time(), 3)}
        self._metrics.append(line)
        if self.on_report is not None:
            self.on_report(line)

    def milestone(self, values: dict[str, Any]) -> bool:
        """After a validation of a watched run: whether to end here, the same on every rank."""
        self.pulse.paused = True  # the others of the search may take their time
        stop = self.decide(values) if self.main else False
        agreed = self.sum(torch.tensor(float(stop))).item() > 0
        self.pulse.paused = False
        return agreed

    # --- the other ranks -----------------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """Elementwise sum over ranks of a small tensor; the result is on every rank, on the CPU."""
        tensor = tensor.detach().cpu()
        if self.world_size > 1:
            tensor = tensor.clone()
            with self._together():
                dist.all_reduce(tensor, group=self._control)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """One small object from every rank, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        with self._together():
            dist.all_gather_object(found, value, group=self._control)
        return found

    def serve(self, make: type, *arguments: Any) -> Any:
        """An object in a process of its own, as long as this one lives: an actor of Ray that every rank can ask (see `fetch`).

        Raises:
            MantaError: this run has no Ray.
        """
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            raise MantaError("data.engine=ray needs Ray, and this runs without: data.engine=torch")
        name = self.gather(f"manta-{make.__name__}-{uuid.uuid4().hex}")[0]
        if self.main:
            self._served.append(ray.remote(num_cpus=0)(make).options(name=name).remote(*arguments))
        self.barrier()
        return ray.get_actor(name)

    @staticmethod
    def fetch(answer: Any) -> Any:
        """What an actor answers; raises what it raised."""
        import ray

        try:
            return ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise MantaError(
                f"The data could not be read: {str(cause).strip().splitlines()[-1]}", code=FAILED_CODE
            ) from error

    def barrier(self) -> None:
        if self.world_size > 1:
            with self._together():
                dist.barrier(group=self._control)

    @contextmanager
    def _together(self) -> Iterator[None]:
        before = self.pulse.phase
        self.pulse(f"exchanging values with the other ranks, after {before}")
        yield
        self.pulse(before)


class Agreement:
    """Ranks decide together, about once a second, whether to stop or to write a checkpoint by time.

    They must act at the same step, so the step of the next decision is itself agreed on: rank 0 derives it from the
    speed so far.
    """

    def __init__(self, session: Session, checkpoint_every_s: float | None) -> None:
        self.session, self.every_s = session, checkpoint_every_s
        self.checked_at = self.saved_at = time.monotonic()
        self.checked_step, self.next_step = 0, 0
        self.noticed = False

    def begin(self, step: int) -> None:
        self.checked_step, self.next_step = step, step + 1

    def saved(self) -> None:
        self.saved_at = time.monotonic()

    def __call__(self, step: int) -> tuple[bool, bool]:
        """(stop, checkpoint now) after optimizer step `step`."""
        now = time.monotonic()
        if step < self.next_step or (self.session.world_size == 1 and now - self.checked_at < ALONE_EVERY_S):
            return False, False
        stop, due = self.session.stop(), self._due(now)
        if self.session.world_size == 1:
            self.checked_at = now
            return stop, due
        per_step = max(now - self.checked_at, 1e-6) / max(step - self.checked_step, 1)
        interval = min(max(int(AGREE_EVERY_S / per_step), 1), 1000)
        mine = torch.tensor([float(stop), *((float(due), float(interval)) if self.session.main else (0.0, 0.0))])
        agreed = self.session.sum(mine).tolist()
        self.checked_at, self.checked_step, self.next_step = now, step, step + int(agreed[2])
        return agreed[0] > 0, agreed[1] > 0

    def _due(self, now: float) -> bool:
        """Whether it is time for a checkpoint. While a notice stands what is done since the last one may get lost any moment."""
        first = not self.noticed and self.session.noticed()
        self.noticed |= first
        every_s = min(self.every_s or math.inf, NOTICE_EVERY_S) if self.noticed else self.every_s
        return first or (every_s is not None and now - self.saved_at >= every_s)


def plain(
    run: RunDir,
    use_gpu: bool | None,
    stop: Callable[[], bool],
    on_report: Callable[[dict[str, Any]], None] | None = None,
) -> Session:
    """A session in this very process."""
    cuda = torch.cuda.is_available() and use_gpu is not False
    return Session(run, torch.device("cuda", 0) if cuda else torch.device("cpu"), stop=stop, on_report=on_report)


def tune_trial(run: RunDir, use_gpu: bool, cpus: float, stop: Callable[[], bool]) -> Session:
    """The session of a trial of one worker, in the trial's own process."""
    torch.set_num_threads(max(1, int(cpus)))
    return plain(run, use_gpu, stop)


def ray_worker(run: RunDir, use_gpu: bool, patience: timedelta) -> Session:
    """The session of a Ray Train worker.

    Args:
        patience: how long a collective may take before it gives up.
    """
    import ray.train
    import ray.train.torch

    context = ray.train.get_context()
    # A GPU that Ray was only told about is not there: compute on the CPU (ray's get_device() would say cuda:0).
    cuda = use_gpu and torch.cuda.is_available()
    device = ray.train.torch.get_device() if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    torch.set_num_threads(max(1, int(cpus)))
    session = Session(
        run,
        device,
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        node_rank=context.get_node_rank(),
    )
    if session.main:
        session.stop = run.stop_file.exists
    session.noticed = _is_preempted
    if session.world_size > 1:
        session._control = dist.new_group(backend="gloo", timeout=patience)
    return session


def _is_preempted() -> bool:
    """Whether Ray has told this worker that a node of its group is being drained.

    What `ray.train.get_preemption_info` asks all ranks for, through an actor; the watcher tells each of them.
    """
    from ray.train.v2._internal.execution.context import get_train_context

    try:
        return get_train_context().preemption_context.preemption_info is not None
    except AttributeError:  # in another version of Ray
        return False


def _introduced(session: Session) -> list[dict[str, Any]]:
    """What every rank says of itself, each by its clock at the same moment."""
    session.barrier()
    ranks = session.gather(describe(session))
    first = ranks[0]["clock_s"]
    return [{**rank, "clock_s": round(rank["clock_s"] - first, 1)} for rank in ranks]


def clocks_apart(ranks: list[dict[str, Any]]) -> str | None:
    """Words for nodes whose clocks differ: files of one run then bear times that do not fit together."""
    late, early = (by(ranks, key=lambda rank: rank["clock_s"]) for by in (min, max))
    if early["clock_s"] - late["clock_s"] < CLOCKS_S:
        return None
    return (
        f"The clock of {early['host']} is {early['clock_s'] - late['clock_s']:.0f} s ahead of that of {late['host']}. Results are "
        "not touched; times in files and charts are. Keep the nodes' clocks together with NTP (timedatectl)."
    )


def describe(session: Session) -> dict[str, Any]:
    """Where this rank runs, for the run's provenance."""
    return {
        "rank": session.rank,
        "host": socket.gethostname(),
        "address": address(),
        "pid": os.getpid(),
        "clock_s": time.time(),
        "node_rank": session.node_rank,
        "local_rank": session.local_rank,
        "device": str(session.device),
        "threads": torch.get_num_threads(),
        "placement_group": _placement_group(),
    }


def address() -> str | None:
    """Of this node, as Ray has it; None without Ray."""
    ray = sys.modules.get("ray")
    return ray.util.get_node_ip_address() if ray is not None and ray.is_initialized() else None


def _placement_group() -> str | None:
    """The resources that Ray holds for this worker and its fellows."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    group = ray.util.get_current_placement_group()
    return None if group is None else str(group.id.hex())


def train(session: Session, config: Config) -> str:
    """Run the configured recipe on this rank; "finished", "interrupted" or "stopped" (by a search)."""
    with explaining(session.run):
        return _told(session, config)


def _told(session: Session, config: Config) -> str:
    """Train, and tell trackers of it."""
    if not session.main:
        _introduced(session)
        return _train(session, config)
    with writing(session.run):
        begin(session.run)
        ranks = _introduced(session)
        session.run.write("workers.json", {"world_size": session.world_size, "ranks": ranks})
        if text := clocks_apart(ranks):
            print(text)
        live = Live(session.run, config, print)
        session.on_open = live.start
        try:
            state = _train(session, config)
        except BaseException as error:
            live.end(INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED)
            raise
        live.end(state, wait=not session.watched)  # a search does not wait, but for all trials of a process at its end
        return state


def _train(session: Session, config: Config) -> str:
    from manta.recipes import make_recipe  # recipes know sessions

    recipe = make_recipe(config)
    with watched(session, config), loaders_in_words(session, config):
        return str(recipe.train(session, config)["state"])


@contextmanager
def loaders_in_words(session: Session, config: Config) -> Iterator[None]:
    """Say what it means when a DataLoader's process was killed, which torch only says of in passing.

    Raises:
        MantaError: it was.
    """
    try:
        yield
    except RuntimeError as error:
        died = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", str(error))
        if died is None:
            raise
        data, name = config.data, f"rank {session.rank} (pid {os.getpid()} on {socket.gethostname()})"
        fewer = f"data.num_workers={data.num_workers // 2}"
        message = (
            f"A process that loads data for {name} is gone (pid {died[1]}): killed, or a crash in native code. Most often the "
            f"machine ran out of memory. Have it use less: {fewer} (now {data.num_workers}), data.prefetch_factor=1 (now "
            f"{data.prefetch_factor}), or give it more memory (/dev/shm too)."
        )
        raise MantaError(
            message if session.watched else with_way_out(message, session.run, fewer), code=FAILED_CODE
        ) from error


def watched(session: Session, config: Config) -> Watchdog:
    """Inside, nothing hangs silently."""
    return Watchdog(
        session.run, session.pulse, config.scaling.timeout_s, session.rank, session.world_size, session.stuck
    )
