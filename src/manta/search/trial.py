"""A trial inside its own process: an ordinary run that waits after every validation for what the search decides.

One worker trains in this very process; several are a TorchTrainer that this process drives.
"""

import dataclasses
import math
import os
import shutil
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.tune import Trainable

from manta import runs
from manta.checkpoints import continue_from, verify
from manta.cluster.environment import Environment
from manta.config import Config
from manta.errors import FAILED, MantaError
from manta.plan import Needs
from manta.resume import load
from manta.runs import RunDir, read_lines
from manta.search.exploit import adopt
from manta.search.mailbox import Mailbox
from manta.search.record import STOPPED
from manta.session import Session
from manta.tracking import live
from manta.view import View
from manta.watchdog import Verdict
from manta.workers import Restarts, kind_of, on_workers

Decide = Callable[[dict[str, Any]], bool]
STOP_S = 120
"""How long a training may take to end after it was told to."""


@dataclass(frozen=True)
class Job:
    """What all trials of a search have in common."""

    needs: Needs
    use_gpu: bool
    """Whether there really is a GPU for each worker."""
    stop_file: Path
    """Its existence asks every trial to checkpoint and stop."""
    folder: str
    """Where the command was typed."""
    allowed_targets: list[str] = field(default_factory=list)
    """What the command trusts."""
    watched: bool = True
    """Whether the search decides after every validation (not when the best is trained again)."""
    environment: Environment = field(default_factory=Environment)
    """Of the command, for processes of other nodes."""


class Training:
    """A training in a thread of its own. After every validation it waits until it is told to go on, or to end."""

    def __init__(self, train: Callable[[Decide], str]) -> None:
        self._said: SimpleQueue[dict[str, Any] | BaseException] = SimpleQueue()
        self._told: SimpleQueue[bool] = SimpleQueue()
        self._waiting = False
        self._lost = False
        self._thread = threading.Thread(target=self._run, args=(train,), daemon=True)
        self._thread.start()

    def next(self) -> dict[str, Any]:
        """The next validation, or {"state": ...} at the end; raises what the training raised."""
        self._go_on()
        said = self._said.get()
        if isinstance(said, BaseException):
            raise said
        self._waiting = "state" not in said
        return said

    def end(self) -> bool:
        """Have it end where it waits; whether it did."""
        if self._waiting:
            self._told.put(True)
            self._waiting = False
        if self._lost:
            return False
        self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def lose(self, error: MantaError) -> None:
        """Give it up: it is stuck, and may never come back."""
        self._lost = True
        self._said.put(error)

    def _go_on(self) -> None:
        if self._waiting:
            self._told.put(False)

    def _decide(self, values: dict[str, Any]) -> bool:
        self._said.put(values)
        return self._told.get()

    def _run(self, train: Callable[[Decide], str]) -> None:
        try:
            self._said.put({"state": train(self._decide)})
        except BaseException as error:  # also sys.exit() in the researcher's code
            self._said.put(error)


class Trial(Trainable):
    """A trial as Tune sees it; its `config` holds `run`, the run directory made for it, and the values sampled."""

    def setup(self, config: dict[str, Any], job: Job) -> None:  # type: ignore[override]
        self.job = job
        self.training: Training | None = None
        self.workers: Workers | None = None
        self.restarts: Restarts | None = None
        job.environment.receive()
        if os.path.isdir(job.folder):
            os.chdir(job.folder)
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        if not self._end():
            return False
        self.run = RunDir(Path(new_config["run"]))
        self.last: dict[str, Any] = {}
        return True

    def step(self) -> dict[str, Any]:
        """Train to the next validation, or to the end."""
        began = time.perf_counter()
        if self.training is None:
            self.training = self._start()
        said = self.training.next()
        if "state" in said:
            said = self._outcome(said["state"])
        self.last = {**self.last, **said, "seconds": time.perf_counter() - began}
        return self.last

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:  # noqa: ARG002
        """The run directory has it all; Tune wants something to hold on to."""
        return {"epoch": self.last.get("epoch", 0)}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """The run directory tells where to go on."""

    def cleanup(self) -> None:
        self._end()
        if self.workers is not None:
            self.workers.end()
        live.drain()

    def _end(self) -> bool:
        training, self.training = self.training, None
        return training is None or training.end()

    def _outcome(self, state: str) -> dict[str, Any]:
        """The end of a training as Tune is told; the last validation is part of it."""
        if state == runs.INTERRUPTED:
            return {"state": state, "done": True}
        last = self.run.read("checkpoints/last/meta.json")["validation"]
        return {"state": state, "done": True, **last, **last["metrics"]}

    def _start(self) -> Training:
        run, job = self.run, self.job
        if job.stop_file.exists():
            return Training(lambda _: runs.INTERRUPTED)
        config = OmegaConf.to_object(load(run, job.allowed_targets))
        assert isinstance(config, Config)
        status = run.read("status.json")
        run.write(
            "status.json",
            {**status, "state": runs.RUNNING, "pid": os.getpid(), "attempts": status.get("attempts", 0) + 1},
        )
        self.restarts = None
        heard, train = self.config["heard"], self._in_this_process if job.needs.num_workers <= 1 else self._on_workers
        return Training(lambda decide: _logged(run, lambda: _train(run, config, job, heard, decide, train)))

    def _in_this_process(self, run: RunDir, config: Config, job: Job, decide: Decide) -> str:
        from manta import session

        mine = session.tune_trial(run, job.use_gpu, job.needs.per_worker.get("CPU", 1), job.stop_file.exists)
        mine.watched, mine.decide, mine.stuck = job.watched, decide, self._stuck
        return session.train(mine, config)

    def _stuck(self, found: Verdict, _over: Callable[[float], bool]) -> None:
        with open(self.run.log, "a") as log:
            log.write(f"{found.message}\n{found.stack}")
        assert self.training is not None
        self.training.lose(MantaError(found.message, code=FAILED))

    def _on_workers(self, run: RunDir, config: Config, job: Job, decide: Decide) -> str | None:
        """None: the workers are lost, and the trial may have others."""
        self.restarts = self.restarts or Restarts(run, config.scaling, print)
        if self.workers is None:
            self.workers = Workers(config, job)
        try:
            return self.workers.train(run, config, job, decide)
        except BaseException as error:
            if self.workers.alive():
                raise
            workers, self.workers = self.workers, None
            workers.end()
            kind = kind_of(error.__cause__)
            if not isinstance(error, MantaError) or not self.restarts.allowed(kind):
                raise
            self.restarts.record(kind, str(error).splitlines()[0].removeprefix("The trial failed: "))
            self.restarts.started(job.needs.num_workers)
            return None


def _train(run: RunDir, config: Config, job: Job, heard: int, decide: Decide, train: Callable[..., str | None]) -> str:
    """Adopt what an exploit left here, tell the search what it has not heard, and train; again with other workers if these
    are lost."""
    metric = config.objective.metric

    def watched(validation: dict[str, Any]) -> bool:
        nonlocal heard
        heard = validation["epoch"]
        metrics = validation["metrics"]
        if not math.isfinite(metrics[metric]):
            raise MantaError(f"{metric} is {metrics[metric]} after epoch {validation['epoch']}.", code=FAILED)
        return decide({**validation, metric: metrics[metric]})

    while True:
        with runs.explaining(run), runs.writing(run):
            continue_from(run, verify, print)  # before anything is read of its last checkpoint
            adopt(run)
        if job.watched and any(watched(validation) for validation in _unheard(run, metric, heard)):
            return STOPPED
        state = train(run, config, job, watched)
        if state is not None:
            return state


def _unheard(run: RunDir, metric: str, heard: int) -> Iterator[dict[str, Any]]:
    """Validations after epoch `heard` that are part of the last checkpoint: the search died before it wrote them down."""
    meta = run.read("checkpoints/last/meta.json")
    lines: list[dict[str, Any]] = []
    for line in read_lines(run.metrics, meta.get("metrics_bytes", 0)):
        lines = [] if "exploit" in line else [*lines, line]
    for line in lines:
        if line["epoch"] > heard and line.get(metric) is not None:
            metrics = {key: value for key, value in line.items() if "/" in key}
            yield {"epoch": line["epoch"], "step": line["step"], "metrics": metrics}


def _logged(run: RunDir, train: Callable[[], str]) -> str:
    """What the training prints, and the traceback of what it raises, go to the trial's train.log."""
    with open(run.log, "a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        try:
            return train()
        except BaseException:
            traceback.print_exc()
            raise


# --- several workers -------------------------------------------------------------------------------------------------


class Workers:
    """The Ray Train workers of a trial's process: started once, they train one trial after another.

    A trial then costs what it trains, not the seconds that a worker group takes to start. One that fails takes its
    workers with it, and the next trial gets new ones.
    """

    def __init__(self, config: Config, job: Job) -> None:
        self.mailbox: Any = ray.remote(num_cpus=0)(Mailbox).remote()
        self.scratch = RunDir(job.stop_file.parent / ".tune" / f"workers-{uuid.uuid4().hex}")
        self.scratch.path.mkdir(parents=True)
        self.under_way = self.scratch
        """The run that is trained, or was last."""
        self._error: BaseException | None = None
        self._answer: Any = None
        self._thread = threading.Thread(target=self._run, args=(config, job), daemon=True)
        self._thread.start()

    def train(self, run: RunDir, config: Config, job: Job, decide: Decide) -> str:
        """Like `Trial._in_this_process`."""
        self.under_way = run
        self._tell({"run": run, "config": config, "watched": job.watched})
        while True:
            said = self._hear()
            if "state" in said:
                return str(said["state"])
            try:
                stop = decide(said)
            except BaseException:
                self._tell(True)
                while "state" not in self._hear():
                    pass
                raise
            self._tell(stop)

    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Let them go."""
        if self.alive():
            self._tell(None)
            self._thread.join(STOP_S)
        ray.kill(self.mailbox)
        shutil.rmtree(self.scratch.path, ignore_errors=True)

    def _tell(self, what: Any) -> None:
        ray.get(self.mailbox.put.remote("down", what))

    def _hear(self) -> dict[str, Any]:
        """What rank 0 says next; raises why it cannot."""
        self._answer = self._answer or self.mailbox.get.remote("up")
        while not ray.wait([self._answer], timeout=0.5)[0]:
            if not self.alive():
                raise self._error or RuntimeError("the workers are gone")
        answer, self._answer = self._answer, None
        said: dict[str, Any] = ray.get(answer)
        return said

    def _run(self, config: Config, job: Job) -> None:
        arguments = {"mailbox": self.mailbox, "stop_file": job.stop_file}
        try:
            view = View(silent=True)
            on_workers(
                *(config, self.scratch, job.needs, view, _serve, arguments),
                what="The trial",
                under_way=lambda: self.under_way,
            )
        except BaseException as error:
            self._error = error


def _serve(mine: Session, _config: Config, mailbox: Any, stop_file: Path) -> None:
    """On every rank: train what rank 0 is told to, until it is told to end."""
    from manta import session

    stop = stop_file.exists
    while True:
        told = mine.gather(_next(mailbox) if mine.main else None)[0]
        if told is None:
            live.drain()
            return
        if told == {}:
            continue
        now = dataclasses.replace(mine, run=told["run"], watched=told["watched"])
        if mine.main:
            now.stop = stop
            now.decide = lambda values: bool(_ask(mailbox, values))
        state = session.train(now, told["config"])
        mine.barrier()
        if mine.main:
            ray.get(mailbox.put.remote("up", {"state": state}))


def _ask(mailbox: Any, values: dict[str, Any]) -> Any:
    ray.get(mailbox.put.remote("up", values))
    return ray.get(mailbox.get.remote("down"))


def _next(mailbox: Any) -> Any:
    """What to train; {} if nobody has said for a while, so that the other ranks do not wait in vain for longer."""
    global _waiting
    _waiting = _waiting or mailbox.get.remote("down")
    if not ray.wait([_waiting], timeout=20)[0]:
        return {}
    told, _waiting = ray.get(_waiting), None
    return told


_waiting: Any = None
