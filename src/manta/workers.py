"""Functions on the workers of a Ray Train run: starting them, following them, and saying why they failed."""

import json
import os
import re
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from manta.checkpoints import choose, sizes
from manta.cluster import TELL_S, environment, has_cuda, is_own, wait_for_resources, worker_lines
from manta.config import Config, Scaling
from manta.errors import FAILED, MantaError
from manta.plan import REHEARSAL, Needs
from manta.runs import RunDir, now, read_lines, storage_failure, with_way_out
from manta.view import View
from manta.watchdog import is_installed, verdict

START_AGAIN = 3
"""How often a worker group that cannot start is tried again, unless told otherwise; Ray's own default is for ever."""


def on_workers(
    config: Config,
    run: RunDir,
    needs: Needs,
    view: View,
    function: Callable[..., Any],
    arguments: dict[str, Any],
    draw: Callable[[], None] = lambda: None,
    what: str = "Training",
    under_way: Callable[[], RunDir] | None = None,
) -> Any:
    """Call `function(session, config, **arguments)` on every worker of a Ray Train run; rank 0's result.

    Args:
        draw: called several times a second, while this thread waits and can hear signals.
        what: it is, for messages.
        under_way: the run that the workers train when they fail, if it is not always `run`.

    Raises:
        MantaError: the workers cannot be had, or one of them failed.
    """
    with worker_lines(view.user_line, view.note):
        wait_for_resources(config.cluster, needs, view.say)
        cuda = needs.use_gpu and has_cuda(config.cluster)
        if needs.use_gpu and not cuda:
            view.say(REHEARSAL)
        payload = {
            "function": function,
            "arguments": arguments,
            "config": config,
            "run": run,
            "use_gpu": cuda,
            "folder": os.getcwd(),
            "what": what,
        }
        # NCCL refuses two ranks on one GPU.
        backend = "nccl" if cuda and needs.per_worker["GPU"] >= 1 else "gloo"
        trainer = _trainer(config, run, needs, backend, payload, what)
        outcome: dict[str, Any] = {}

        def fit() -> None:
            try:
                outcome["value"] = trainer.fit().return_value
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=fit, name="fit", daemon=True)
        sign_of_life(run).unlink(missing_ok=True)
        _restarts_file(run).unlink(missing_ok=True)
        restarts = Restarts(run, config.scaling, view.say)
        told = time.monotonic()
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            draw()
            restarts.follow()
            if time.monotonic() - told > 2 * TELL_S and not sign_of_life(run).exists():
                view.say(f"Waiting for {needs} to start.")
                told = time.monotonic()
        draw()
    if "error" in outcome:
        raise explain_failure(outcome["error"], under_way() if under_way else run, what)
    return outcome["value"]


class WorkerFailed(MantaError):
    """What another exception of a worker is on the driver: words only, so that it can always be sent."""

    def __init__(self, message: str, remote: str) -> None:
        super().__init__(message, code=FAILED)
        self.remote = remote

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.remote)


class RemoteTraceback(Exception):
    """A worker's traceback, as the cause of what is raised on the driver."""


def _worker(payload: dict[str, Any]) -> Any:
    """The training function of a Ray Train worker."""
    import ray.train

    from manta import session

    try:
        if os.path.isdir(payload["folder"]):  # where the command was typed, also on a cluster started elsewhere
            os.chdir(payload["folder"])
        sign_of_life(payload["run"]).parent.mkdir(exist_ok=True)
        sign_of_life(payload["run"]).touch()
        mine = session.ray_worker(payload["run"], payload["use_gpu"], _patience(payload["config"]))
        return payload["function"](mine, payload["config"], **payload["arguments"])
    except MantaError:
        raise
    except (Exception, SystemExit) as error:
        failure = storage_failure(error, payload["run"]) if isinstance(error, OSError) else None
        if failure is not None and payload["what"] == "Training":
            raise failure from None
        rank = ray.train.get_context().get_world_rank()
        remote = "".join(traceback.format_exception(error))
        raise WorkerFailed(f"{payload['what']} failed on rank {rank}: {_in_short(error)}", remote) from None


def _in_short(error: BaseException) -> str:
    """An exception with the innermost line outside installed packages: the researcher's own."""
    text = str(error).strip()
    if "Original Traceback" in text:  # of a DataLoader process
        text = text.splitlines()[-1]
        places = re.findall(r'File "(.+?)", line (\d+)', str(error))
    else:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [place for place in places if not is_installed(place[0])]
    file, line = (own or places)[-1]
    return f"{text} ({file}:{line})"


def _restarts_file(run: RunDir) -> Path:
    """Where the controller says that it starts the workers again."""
    return run.path / ".ray" / "restarts.jsonl"


def sign_of_life(run: RunDir) -> Path:
    """Exists once a worker has started."""
    return run.path / ".ray" / "started"


def _patience(config: Config) -> timedelta:
    """How long a collective may take: the watchdogs know better who is to blame, so they come first."""
    timeout_s = config.scaling.timeout_s
    return timedelta(days=30) if timeout_s is None else timedelta(seconds=2 * timeout_s + 120)


def _trainer(config: Config, run: RunDir, needs: Needs, backend: str, payload: dict[str, Any], what: str) -> Any:
    import ray
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from manta.trainer import ProcessGroup, lean, recorders

    limits: Any = {name: getattr(config.scaling, name) for name in ("max_failures", "max_preemption_failures")}
    limits["controller_failure_limit"] = config.scaling.controller_failure_limit
    if limits["controller_failure_limit"] is None:
        limits["controller_failure_limit"] = START_AGAIN if needs.max_workers is None else -1
    if what == "The trial":  # whose own process starts its workers again, when it knows what the search has heard
        limits["max_failures"] = limits["max_preemption_failures"] = 0
    workers: Any = needs.num_workers if needs.max_workers is None else (needs.num_workers, needs.max_workers)
    return (lean(TorchTrainer) if is_own() else TorchTrainer)(
        _worker,
        train_loop_config=payload,
        scaling_config=ScalingConfig(  # type: ignore[call-arg]
            num_workers=workers,
            elastic_resize_monitor_interval_s=config.scaling.elastic_resize_monitor_interval_s,
            use_gpu=needs.use_gpu,
            resources_per_worker=needs.per_worker,
            placement_strategy=needs.placement_strategy,
            label_selector=needs.label_selector or None,
        ),
        run_config=RunConfig(  # type: ignore[call-arg]
            # Ray continues a run of the same name; ours resume from their own checkpoints.
            name=uuid.uuid4().hex,
            storage_path=str(run.path / ".ray"),
            failure_config=FailureConfig(**limits),  # type: ignore[call-arg]
            callbacks=recorders(run, _restarts_file(run)),
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
        torch_config=ProcessGroup(backend, _patience(config), ray.put(environment(config.cluster))),  # type: ignore[arg-type]
    )


class Restarts:
    """Worker groups that are started again: counted, recorded in status.json, and said once.

    Args:
        run: the one that they train.
    """

    def __init__(self, run: RunDir, scaling: Scaling, say: Callable[[str], None]) -> None:
        self.run, self.say = run, say
        self.limits = {FAILURE: scaling.max_failures, PREEMPTION: scaling.max_preemption_failures}
        self.counts: Counter[str] = Counter()
        self._read = 0
        self._before: dict[str, Any] | None = None
        """workers.json of the group that is gone, until the next one has written its own."""

    def allowed(self, kind: str) -> bool:
        return self.limits[kind] < 0 or self.counts[kind] < self.limits[kind]

    def record(self, kind: str, cause: str, time: str = "") -> None:
        """Args: cause: in words, for a restart that will be."""
        cause = cause.rstrip(".")
        self.counts[kind] += 1
        step = self.run.read("checkpoints/last/meta.json").get("step", 0)
        entry = {"time": time or now(), "kind": kind, "cause": cause, "step": step, "world_size": None}
        status = self.run.read("status.json")
        self.run.write("status.json", {**status, "restarts": [*status.get("restarts", []), entry]})
        self._before = self.run.read("workers.json")
        limit = self.limits.get(kind, -1)
        which = f"restart {self.counts[kind]}" + (f" of {limit}" if limit >= 0 else "")
        where = f"continuing from step {step}" if step else "starting over, for there is no checkpoint yet"
        self.say(f"{cause[:1].upper()}{cause[1:]}; {where}, {which}{_KINDS[kind]}.")

    def follow(self) -> None:
        """Record what the controller has written since the last call."""
        lines = read_lines(_restarts_file(self.run))
        for line in lines[self._read :]:
            sign_of_life(self.run).unlink(missing_ok=True)  # until the next group is there, it is said that we wait
            self.record(**line)
        self._read = len(lines)
        found = self.run.read("workers.json") if self._before is not None else None
        if found != self._before and found is not None:
            self.started(found["world_size"])

    def started(self, world_size: int) -> None:
        """The next group is there."""
        self._before = None
        status = self.run.read("status.json")
        status["restarts"][-1]["world_size"] = world_size
        self.run.write("status.json", status)


FAILURE, PREEMPTION, RESIZE = "failure", "preemption", "resize"
_KINDS = {FAILURE: "", PREEMPTION: " after a preemption", RESIZE: " with other workers"}


def kind_of(error: BaseException | None) -> str:
    """Which budget a failure of a worker group is charged to: as Ray decides it."""
    if hasattr(error, "preemption_info"):
        return PREEMPTION
    failures = getattr(error, "worker_failures", {}).values()
    died = (getattr(each, "health_check_failure", each) for each in failures)
    return PREEMPTION if any(getattr(each, "preempted", False) for each in died) else FAILURE


def in_words(error: BaseException, run: RunDir) -> str:
    """Why a worker group is started again, in one line."""
    preemption = getattr(error, "preemption_info", None)
    if preemption is not None:
        ranks = ", ".join(f"{rank}{_where(run, rank)}" for rank in preemption.preempted_ranks)
        return f"the node of rank {ranks} was taken away"
    return str(explain_failure(error, run, what="")).splitlines()[0]


def _where(run: RunDir, rank: int) -> str:
    """The process and the host of a rank, as far as known."""
    ranks = {entry["rank"]: entry for entry in run.read("workers.json").get("ranks", [])}
    return f" (pid {ranks[rank]['pid']} on {ranks[rank]['host']})" if rank in ranks else ""


class Tail:
    """New lines of a run's metrics.jsonl, from where its last checkpoint left it."""

    def __init__(self, run: RunDir) -> None:
        self.path = run.metrics
        choice = choose(run, sizes)
        self.position = 0 if choice is None else choice.found.get("metrics_bytes", 0)

    def lines(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        self.position = min(self.position, self.path.stat().st_size)  # a restarted worker took lines back
        with open(self.path, "rb") as file:
            file.seek(self.position)
            *whole, _ = file.read().split(b"\n")
        self.position += sum(len(line) + 1 for line in whole)
        found = []
        for line in whole:
            try:
                found.append(json.loads(line))
            except ValueError:  # the middle of a line, after a restart
                continue
        return found


# What a rank raises because another one is gone.
_FOLLOWERS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Gloo", "NCCL")


def explain_failure(error: BaseException, run: RunDir, what: str = "Training") -> MantaError:
    """One message for what Ray raised: the first cause among the workers, not what followed from it."""
    failures: dict[int, BaseException] = getattr(error, "worker_failures", {})
    again = details = ""
    if what == "Training":
        again = with_way_out("", run)
        details = f" Details: {run}/train.log"
    if not failures:
        return _failed(f"Ray could not run the {what.lower()}: {error} (see {run}/train.log){again}", error)
    stuck = verdict(run)
    if stuck is not None:
        return _failed(f"{stuck.message}{again}", RemoteTraceback(f"\n\n{stuck.stack}"))
    rank, cause = min(failures.items(), key=lambda item: _remoteness(item[1]))
    if isinstance(cause, WorkerFailed):
        return _failed(f"{cause}{again}", RemoteTraceback(f"\n\n{cause.remote}"))
    if isinstance(cause, MantaError):
        return cause
    died = getattr(cause, "health_check_failure", None)
    if died is None:
        return _failed(f"{what or 'Training'} failed on rank {rank}: {cause}{again}", error)
    why = "killed, out of memory, or a crash in native code"
    if type(died).__name__ == "OutOfMemoryError":
        why = "killed by Ray, the machine was running out of memory"
    return _failed(
        f"{what and f'{what} failed: '}the process of rank {rank}{_where(run, rank)} is gone: {why}.{details}{again}",
        error,
    )


def _failed(message: str, cause: BaseException) -> MantaError:
    found = MantaError(message, code=FAILED)
    found.__cause__ = cause
    return found


def _remoteness(failure: BaseException) -> int:
    """How far a failure is from the first cause."""
    if isinstance(failure, WorkerFailed):
        return 3 if any(mark in str(failure) for mark in _FOLLOWERS) else 1
    if isinstance(failure, MantaError):  # a NaN loss of one rank is a NaN gradient on all
        return 0 if "the loss is" in str(failure) else 1
    return 2
