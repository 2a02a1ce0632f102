"""From a valid configuration to an outcome: the one place that knows how a run is started, watched and ended."""

import json
import os
import re
import shlex
import shutil
import signal
import sysconfig
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from manta import plan, runs
from manta.cluster import TELL_S, connect, has_cuda, is_running, wait_for_resources, worker_lines
from manta.config import Config
from manta.errors import FAILED, FINISHED, INTERRUPTED, INVALID, MantaError
from manta.plan import Needs
from manta.runs import RunDir
from manta.targets import build
from manta.view import Rows, View, table

if TYPE_CHECKING:
    from manta.recipes import Outline

REHEARSAL = "GPUs are declared but torch finds no CUDA device: computing on CPU (a rehearsal)."


class Interrupts:
    """SIGINT and SIGTERM of this process: the first asks to stop after a checkpoint, a second one stops at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.count = say, 0
        self.on_first: Callable[[], None] = lambda: None

    def asked(self) -> bool:
        return self.count > 0

    @contextmanager
    def installed(self) -> Iterator["Interrupts"]:
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.listen()
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def listen(self) -> None:
        """Take the signals; again after ray.init, which puts in a SIGTERM handler of its own that exits."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        self.say(f"{signal.Signals(number).name}: stopping after a checkpoint (once more stops at once)")
        self.on_first()


def launch(config: Config, overrides: list[str], previous: RunDir | None = None) -> int:
    """Run a configuration, or continue `previous` with it; an exit code.

    Raises:
        MantaError: the request is invalid or can never be satisfied (then nothing was written), or training failed.
    """
    view = View()
    if previous is not None and _nothing_left(config, previous):
        view.say(
            f"{previous} is finished. To train it longer: python train.py resume={shlex.quote(str(previous))} "
            f"training.epochs={2 * (config.training.epochs or 1)}"
        )
        return FINISHED
    with ExitStack() as stack:
        stack.callback(view.close)
        interrupts = stack.enter_context(Interrupts(view.say).installed())
        try:
            return Launch(config, overrides, previous, view, interrupts).go()
        except KeyboardInterrupt:
            return INTERRUPTED


@dataclass
class Launch:
    """One request on its way to an outcome."""

    config: Config
    overrides: list[str]
    previous: RunDir | None
    view: View
    interrupts: Interrupts

    def go(self) -> int:
        config = self.config
        # Inside a Ray that is up already (a job of Hydra's ray launcher) its nodes count, not this machine.
        local = config.scaling.num_workers == 0 or (config.cluster.kind == "local" and not is_running())
        needs = plan.resolve(config, [plan.local_node(config.cluster)]) if local else None
        recipe = build("recipe", {"_target_": config.recipe._target_}, config.allowed_targets)
        if not all(callable(getattr(recipe, name, None)) for name in ("check", "train", "evaluate", "predict")):
            raise MantaError(
                f"recipe._target_={config.recipe._target_} is no recipe: it needs check, train, evaluate and predict "
                "(manta.recipes.Recipe)."
            )
        outline = recipe.check(config, look_at_data=local)
        if needs is not None and (needs.num_workers == 0 or config.plan):
            return self.run(needs, outline, self._in_process)
        with self.view.capture_descriptors(), connect(config.cluster) as nodes:
            return self.run(plan.resolve(config, nodes, own=local), outline, self._on_ray)

    def run(self, needs: Needs, outline: "Outline", execute: Callable[[RunDir, Needs], str]) -> int:
        """Show the plan, make the run directory, execute, and record how it ended."""
        view, rows = self.view, [*outline.rows, *_scaling_rows(self.config, needs)]
        if self.config.plan:
            view.say(table("Plan", rows))
            return FINISHED
        run = self.previous or runs.create(self.config)
        before = (run.path / "config.yaml").read_bytes() if self.previous is not None else None
        run.begin(self.config, self.overrides)
        view.open_log(run.log)
        view.say(table("Plan" if self.previous is None else f"Plan (continuing {run})", [*rows, ("results", str(run))]))
        began = time.monotonic()
        try:
            with view.progress(self.config, outline.total_steps):
                state = execute(run, needs)
        except KeyboardInterrupt:
            state = runs.INTERRUPTED
        except Exception as error:
            code = error.code if isinstance(error, MantaError) else FAILED
            view.note("".join(traceback.format_exception(error)))
            if before is not None and code == INVALID:  # what cannot be is not what the run continues with next time
                (run.path / "config.yaml").write_bytes(before)
            run.update_status(state=runs.FAILED, finished=runs.now(), error=str(error), exit_code=code)
            _set_summary_state(run, runs.FAILED)
            raise
        code = FINISHED if state == runs.FINISHED else INTERRUPTED
        run.update_status(state=state, finished=runs.now(), exit_code=code)
        _set_summary_state(run, state)
        view.say(_result(run, state, time.monotonic() - began))
        return code

    def _in_process(self, run: RunDir, needs: Needs) -> str:
        from manta import session

        with self.view.capture_prints():
            mine = session.plain(run, self.config.scaling.use_gpu, self.interrupts.asked, self.view.update)
            if needs.use_gpu and mine.device.type == "cpu":
                self.view.say(REHEARSAL)
            return session.train(mine, self.config)

    def _on_ray(self, run: RunDir, needs: Needs) -> str:
        self.interrupts.listen()
        self.interrupts.on_first = lambda: _ask_to_stop(run)
        if self.interrupts.asked():
            raise KeyboardInterrupt
        tail = Tail(run)

        def draw() -> None:
            for line in tail.lines():
                self.view.update(line)

        try:
            return str(on_workers(self.config, run, needs, self.view, _train, {}, draw))
        finally:
            shutil.rmtree(run.path / ".ray", ignore_errors=True)


def _nothing_left(config: Config, run: RunDir) -> bool:
    """Whether a finished run is asked for nothing more than it has done."""
    from manta.resume import load

    if run.read("status.json").get("state") != runs.FINISHED:
        return False
    before = load(run).training
    now = config.training
    return (before.epochs, before.max_steps, before.early_stopping.patience) == (
        now.epochs,
        now.max_steps,
        now.early_stopping.patience,
    )


def _scaling_rows(config: Config, needs: Needs) -> Rows:
    batch = config.data.batch_size
    if needs.num_workers == 0:
        return [("workers", "none: in this process"), ("batch", str(batch))]
    device = "GPU" if needs.use_gpu else "CPU"
    most = "" if needs.max_workers is None else f" to {needs.max_workers}"
    share = -(-batch // needs.num_workers)
    micro = config.data.micro_batch_size
    split = f", in micro-batches of {micro}" if micro is not None and micro < share else ""
    return [
        (
            "workers",
            f"{needs.num_workers}{most} on {device}, {plan.shown(needs.per_worker)} each, {config.scaling.strategy}",
        ),
        ("batch", f"{batch} global, {share} per worker{split}"),
    ]


# --- on Ray ------------------------------------------------------------------------------------------------------


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


def _train(mine: Any, config: Config) -> str:
    from manta import session

    return session.train(mine, config)


def _trainer(config: Config, run: RunDir, needs: Needs, backend: str, payload: dict[str, Any]) -> Any:
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    workers: Any = needs.num_workers if needs.max_workers is None else (needs.num_workers, needs.max_workers)
    return TorchTrainer(
        _worker,
        train_loop_config=payload,
        scaling_config=ScalingConfig(
            num_workers=workers,
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
        torch_config=TorchConfig(backend=backend, timeout_s=config.scaling.timeout_s),
    )


def _ask_to_stop(run: RunDir) -> None:
    run.stop_file.touch()
    if not runs.is_locked(run):  # no rank trains yet: nothing to save
        raise KeyboardInterrupt


class Tail:
    """New lines of a run's metrics.jsonl, from where its last checkpoint left it."""

    def __init__(self, run: RunDir) -> None:
        meta = run.checkpoints / "last" / "meta.json"
        self.path = run.metrics
        self.position = json.loads(meta.read_text())["metrics_bytes"] if meta.is_file() else 0

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
    again = ""
    if what == "Training":
        again = f"\nResume from the last checkpoint: python train.py resume={shlex.quote(str(run))}"
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
        f"{what} failed: the process of rank {rank}{where.get(rank, '')} is gone: {why}. Details: {run}/train.log{again}",
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


# --- the end -----------------------------------------------------------------------------------------------------


def _set_summary_state(run: RunDir, state: str) -> None:
    summary = run.read("summary.json")
    if summary:
        run.write("summary.json", {**summary, "state": state})


def _result(run: RunDir, state: str, seconds: float) -> Any:
    summary = run.read("summary.json")
    where = shlex.quote(str(run))
    best = summary.get("best")
    rows: Rows = []
    if best:
        shown = "  ".join(f"{key} {value:.4f}" for key, value in best["metrics"].items() if value is not None)
        rows.append(("best", f"epoch {best['epoch']}, step {best['step']}: {shown}"))
        rows.append(("checkpoint", f"{run}/checkpoints/best"))
    if summary.get("test"):
        rows.append(("test", "  ".join(f"{key} {value:.4f}" for key, value in summary["test"].items())))
    speed = summary.get("throughput", {}).get("samples_per_s", 0)
    rows.append(("time", f"{seconds:.1f} s, training {speed:,.0f} samples/s"))
    if state == "finished":
        rows.append(("evaluate", f"python scripts/evaluate.py run={where}"))
        rows.append(("extend", f"python train.py resume={where} training.epochs=<more>"))
    else:
        rows.append(("resume", f"python train.py resume={where}"))
    overrides = (run.path / "overrides.txt").read_text().splitlines()[0]
    rows.append(("repeat", f"python train.py {overrides}".rstrip()))
    return table({"finished": "Finished", "interrupted": "Interrupted"}[state], rows)
