"""Functions on the workers of a Ray Train run: starting them, following them, and saying why they failed."""

import json
import os
import re
import shlex
import sysconfig
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manta.checkpoints import choose, sizes
from manta.cluster import TELL_S, has_cuda, is_own, wait_for_resources, worker_lines
from manta.config import Config
from manta.errors import FAILED, MantaError
from manta.plan import REHEARSAL, Needs
from manta.runs import RunDir, storage_failure
from manta.view import View


def on_workers(
    config: Config,
    run: RunDir,
    needs: Needs,
    view: View,
    function: Callable[..., Any],
    arguments: dict[str, Any],
    draw: Callable[[], None] = lambda: None,
    what: str = "Training",
) -> Any:
    """Call `function(session, config, **arguments)` on every worker of a Ray Train run; rank 0's result.

    Args:
        draw: called several times a second, while this thread waits and can hear signals.
        what: it is, for messages.

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
        trainer = _trainer(config, run, needs, backend, payload)
        outcome: dict[str, Any] = {}

        def fit() -> None:
            try:
                outcome["value"] = trainer.fit().return_value
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=fit, name="fit", daemon=True)
        _sign_of_life(run).unlink(missing_ok=True)
        told = time.monotonic()
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            draw()
            if time.monotonic() - told > 2 * TELL_S and not _sign_of_life(run).exists():
                view.say(f"Waiting for {needs} to start.")
                told = time.monotonic()
        draw()
    if "error" in outcome:
        raise explain_failure(outcome["error"], run, what)
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
        _sign_of_life(payload["run"]).parent.mkdir(exist_ok=True)
        _sign_of_life(payload["run"]).touch()
        mine = session.ray_worker(payload["run"], payload["use_gpu"])
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
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    own = [place for place in places if not place[0].startswith((*installed, "<"))]
    file, line = (own or places)[-1]
    return f"{text} ({file}:{line})"


def _sign_of_life(run: RunDir) -> Path:
    """Exists once a worker has started."""
    return run.path / ".ray" / "started"


def _trainer(config: Config, run: RunDir, needs: Needs, backend: str, payload: dict[str, Any]) -> Any:
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from manta.trainer import ProcessGroup, lean

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
        ),
        run_config=RunConfig(  # type: ignore[call-arg]
            # Ray continues a run of the same name; ours resume from their own checkpoints.
            name=uuid.uuid4().hex,
            storage_path=str(run.path / ".ray"),
            # A worker group that cannot start is tried again for ever by default.
            failure_config=FailureConfig(  # type: ignore[call-arg]
                max_failures=config.scaling.max_failures,
                controller_failure_limit=3 if needs.max_workers is None else -1,  # type: ignore[call-arg]
            ),
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
        torch_config=ProcessGroup(backend, config.scaling.timeout_s),  # type: ignore[arg-type]
    )


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
        again = f"\nResume from the last checkpoint: python train.py resume={shlex.quote(str(run))}"
        details = f" Details: {run}/train.log"
    if not failures:
        return _failed(f"Ray could not run the {what.lower()}: {error} (see {run}/train.log){again}", error)
    rank, cause = min(failures.items(), key=lambda item: _remoteness(item[1]))
    if isinstance(cause, WorkerFailed):
        return _failed(f"{cause}{again}", RemoteTraceback(f"\n\n{cause.remote}"))
    if isinstance(cause, MantaError):
        return cause
    died = getattr(cause, "health_check_failure", None)
    if died is None:
        return _failed(f"{what} failed on rank {rank}: {cause}{again}", error)
    ranks = run.read("workers.json").get("ranks", [])
    where = {entry["rank"]: f" (pid {entry['pid']} on {entry['host']})" for entry in ranks}
    why = "killed, out of memory, or a crash in native code"
    if type(died).__name__ == "OutOfMemoryError":
        why = "killed by Ray, the machine was running out of memory"
    return _failed(
        f"{what} failed: the process of rank {rank}{where.get(rank, '')} is gone: {why}.{details}{again}",
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
