"""From a valid configuration to an outcome: the one place that knows how a run is started, watched and ended."""

import os
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from manta import plan, runs, tracking
from manta.cluster import connect, has_cuda, is_shared, worker_lines
from manta.cluster.shared import check_nodes, other_nodes
from manta.config import Config
from manta.errors import FAILED, FINISHED, INTERRUPTED, INVALID, MantaError
from manta.plan import REHEARSAL, Needs
from manta.runs import RunDir, with_way_out
from manta.targets import ALLOWED_TARGETS
from manta.tracking import enabled
from manta.tracking.live import settle
from manta.view import Rows, View, number, speed, table
from manta.watchdog import Verdict
from manta.workers import Tail, on_workers

if TYPE_CHECKING:
    from manta.recipes import Recipe
    from manta.search.space import Space


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SAME_S = 3.0
"""Within so many seconds SIGTERM or SIGUSR1 again is the same request: batch systems signal every process of a job, and shells
and launchers in it pass the signal on."""
END_S = 10.0
"""How long training may take to end after it was told that it is stuck."""


class Interrupts:
    """Signals of this process that ask it to end: while training the first asks to stop after a checkpoint.

    Ctrl-C is SIGINT; batch systems and clouds send SIGTERM or SIGUSR1 some time before they kill.

    A second one, and any before training has begun, stops at once.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.count = say, 0
        self.ask: Callable[[], None] | None = None
        """Asks the training that is under way to stop; raises KeyboardInterrupt if there is nothing to save yet."""
        self.failure: MantaError | None = None
        """Raised in the main thread at the next signal."""
        self._last: tuple[int, float] = 0, 0.0

    def asked(self) -> bool:
        return self.count > 0

    @contextmanager
    def installed(self) -> Iterator["Interrupts"]:
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.listen()
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def listen(self) -> None:
        """Take the signals; again after ray.init, which puts in a SIGTERM handler of its own that exits."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self._handle)

    def fail(self, error: MantaError) -> None:
        """From another thread: raise this in the main one, also if it sleeps or waits for something."""
        self.failure = error
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.failure is not None:
            error, self.failure = self.failure, None
            raise error
        before, self._last = self._last, (number, time.monotonic())
        if number != signal.SIGINT and before[0] == number and time.monotonic() - before[1] < SAME_S:
            return
        self.count += 1
        name = signal.Signals(number).name
        if self.count > 1 or self.ask is None:
            self.say(f"{name}{' once more' if self.count > 1 else ''}: stopping at once.")
            for each in _SIGNALS:  # what ends now ends undisturbed
                signal.signal(each, signal.SIG_IGN)
            raise KeyboardInterrupt
        self.say(f"{name}: stopping after a checkpoint (once more stops at once)")
        self.ask()


class Outcome(NamedTuple):
    """How a launch ended."""

    code: int
    run: RunDir | None
    """None: only a plan was asked for."""

    @property
    def objective(self) -> float | None:
        """The best value of the objective: what a sweeper of Hydra's optimises."""
        found = self.run.read("summary.json").get("objective", {}) if self.run is not None else {}
        return found.get("value")


def launch(
    config: Config,
    overrides: list[str],
    previous: RunDir | None = None,
    space: "Space | None" = None,
    made: Callable[[RunDir], None] = lambda run: None,
) -> Outcome:
    """Run a configuration, or continue `previous` with it; with a search space, search.

    Args:
        made: is told the run directory as soon as there is one.

    Raises:
        MantaError: the request is invalid or can never be satisfied (then nothing was written), or training failed.
    """
    view = View()
    os.environ[ALLOWED_TARGETS] = ",".join(config.allowed_targets)  # for its own processes, which read config.yaml
    if previous is not None and _nothing_left(config, previous):
        more = f"training.epochs={2 * (config.training.epochs or 1)}"
        if space is not None:
            more = f"search.num_samples={2 * sum(previous.read('summary.json')['trials'].values())}"
        if config.storage.is_remote:
            from manta.storage import remote

            remote.upload(previous, config.storage, view.say)
        view.say(f"{previous} is finished. To go on: python train.py resume={shlex.quote(str(previous))} {more}")
        return Outcome(FINISHED, previous)
    with ExitStack() as stack:
        stack.callback(view.close)
        interrupts = stack.enter_context(Interrupts(view.say).installed())
        try:
            return Launch(config, overrides, previous, space, view, interrupts, made).go()
        except KeyboardInterrupt:
            return Outcome(INTERRUPTED, None)
        except SystemExit as error:
            raise MantaError(
                f"Code of the model, the data or another plug-in ended this process with sys.exit({error.code}).",
                code=FAILED,
            ) from error


@dataclass
class Launch:
    """One request on its way to an outcome."""

    config: Config
    overrides: list[str]
    previous: RunDir | None
    space: "Space | None"
    view: View
    interrupts: Interrupts
    made: Callable[[RunDir], None]

    def go(self) -> Outcome:
        config = self.config
        # Of a Ray that others use too (a job of hydra/launcher=ray) the nodes count, not this machine.
        local = config.scaling.num_workers == 0 or (config.cluster.kind == "local" and not is_shared())
        if config.storage.is_remote and not config.plan:
            from manta.storage import remote

            remote.check(config.storage, self.previous is not None, self.view.say)
        from manta.recipes import make_recipe

        recipe = make_recipe(config)
        if not all(callable(getattr(recipe, name, None)) for name in ("check", "train", "evaluate", "predict")):
            raise MantaError(
                f"recipe._target_={config.recipe._target_} is no recipe: it needs check, train, evaluate and predict "
                "(manta.recipes.Recipe)."
            )
        return self.search(recipe, local) if self.space is not None else self.train(recipe, local)

    def train(self, recipe: "Recipe", local: bool) -> Outcome:
        """One run."""
        config, view = self.config, self.view
        needs = plan.resolve(config, [plan.local_node(config.cluster)]) if local else None
        outline = recipe.check(config, look_at_data=local)
        progress = partial(view.progress, config, outline.total_steps)
        if needs is not None and (needs.num_workers == 0 or config.plan):
            rows = [*outline.rows, *_scaling_rows(config, needs)]
            return self.run(rows, partial(self._in_process, needs), _result, progress)
        with view.capture_descriptors(), connect(config.cluster, view.say, config.scaling.label_selector) as nodes:
            needs = plan.resolve(config, nodes, own=local)
            self._look_at_storage(needs)
            rows = [*outline.rows, *_scaling_rows(config, needs)]
            return self.run(rows, partial(self._on_ray, needs), _result, progress)

    def search(self, recipe: "Recipe", local: bool) -> Outcome:
        """Many runs."""
        from manta.search.report import plan_rows, result_rows

        config, space = self.config, self.space
        assert space is not None
        needs = plan.resolve_trial(config, [plan.local_node(config.cluster)]) if local else None
        outline = recipe.check(config, look_at_data=local)
        for option in space.configs().values():
            recipe.check(option, look_at_data=local)

        def rows(needs: Needs, nodes: list[plan.Node]) -> Rows:
            at_once = min(plan.trials_at_once(needs, nodes), config.search.max_concurrent_trials or 10_000)
            return [*outline.rows, *plan_rows(config, space, str(needs), at_once)]

        def result(run: RunDir, state: str, seconds: float) -> Any:
            found = run.read("summary.json")
            return table(_TITLES[state], result_rows(run, config, space, found, state, seconds))

        if needs is not None and config.plan:
            return self.run(rows(needs, [plan.local_node(config.cluster)]), lambda run: "", result, nullcontext)
        with (
            self.view.capture_descriptors(),
            connect(config.cluster, self.view.say, config.scaling.label_selector) as nodes,
        ):
            needs = plan.resolve_trial(config, nodes, own=local)
            self._look_at_storage(needs)
            return self.run(rows(needs, nodes), partial(self._search, needs, nodes), result, nullcontext)

    def _look_at_storage(self, needs: Needs) -> None:
        """Before anything is written of the run: all nodes that could get a worker see the place.

        Raises:
            MantaError: they do not.
        """
        storage = self.config.storage
        if not storage.is_remote:
            check_nodes(self.previous.path if self.previous is not None else storage.folder, needs)
        elif nodes := other_nodes(needs):
            raise MantaError(
                f"storage.path={storage.path}: the cluster has {len(nodes) + 1} nodes, and with a bucket everything runs on the "
                "one where the command was typed. Use a folder that all nodes share: storage.path=/shared/outputs"
            )

    def run(
        self,
        rows: Rows,
        execute: Callable[[RunDir], str],
        result: Callable[[RunDir, str, float], Any],
        progress: Callable[[], AbstractContextManager[Any]],
    ) -> Outcome:
        """Show the plan, make the run directory, execute, and record how it ended."""
        view = self.view
        if enabled(self.config.tracking):
            rows = [*rows, ("tracking", tracking.shown(self.config))]
        if self.config.plan:
            view.say(table("Plan", rows))
            return Outcome(FINISHED, None)
        run = self.previous or runs.create(self.config)
        self.made(run)
        with runs.launching(run), self._followed(run) as url:
            rows = [*rows, ("results", f"{run}, and in {url}" if url else str(run))]
            return self._attempt(run, rows, execute, result, progress)

    @contextmanager
    def _followed(self, run: RunDir) -> Iterator[str | None]:
        """While a process brings the run to its bucket, if it has one; its address there. At the end that may take a while."""
        if not self.config.storage.is_remote:
            yield None
            return
        from manta.storage import remote

        url = remote.url_of(run, self.config.storage)
        if url is None:
            self.view.say(f"{run} is not below {self.config.storage.folder}: it is not brought to the bucket.")
            yield None
            return
        following = remote.Following(run, self.config.storage, self.view.say)
        try:
            yield url
        finally:
            self.interrupts.ask = None
            self.interrupts.listen()  # Ctrl-C: enough of waiting
            following.end(partial(self.view.say, log=False))

    def _attempt(
        self,
        run: RunDir,
        rows: Rows,
        execute: Callable[[RunDir], str],
        result: Callable[[RunDir, str, float], Any],
        progress: Callable[[], AbstractContextManager[Any]],
    ) -> Outcome:
        view = self.view
        before = (run.path / "config.yaml").read_bytes() if self.previous is not None else None
        began = time.monotonic()
        try:
            run.begin(self.config, self.overrides)
            run.tell_name()
            if self.space is not None and self.previous is None:
                self.space.save(run)
            if self.previous is None:
                runs.point_latest(self.config.storage.folder, run.path)
            view.open_log(run.log)
            title = "Plan" if self.previous is None else f"Plan (continuing {run})"
            view.say(table(title, rows))
            with progress():
                state = execute(run)
        except (KeyboardInterrupt, BdbQuit):
            state = runs.INTERRUPTED
        except (Exception, SystemExit) as error:
            view.note("".join(traceback.format_exception(error)))
            failure = error if isinstance(error, MantaError) else runs.storage_failure(error, run) or error
            code = failure.code if isinstance(failure, MantaError) else FAILED
            if self.interrupts.asked() and code == FAILED:  # it lost its workers, say, which were told to end too
                view.say(f"While it was stopping: {failure}")
                return self._ended(run, runs.INTERRUPTED, result, began)
            if before is not None and code == INVALID:  # what cannot be is not what the run continues with next time
                (run.path / "config.yaml").write_bytes(before)
            self._record_failure(run, str(failure), code)
            if failure is error:
                raise
            raise failure from error
        return self._ended(run, state, result, began)

    def _ended(self, run: RunDir, state: str, result: Callable[[RunDir, str, float], Any], began: float) -> Outcome:
        code = FINISHED if state == runs.FINISHED else INTERRUPTED
        run.update_status(state=state, finished=runs.now(), exit_code=code)
        _set_summary_state(run, state)
        self._settle(run, state)
        self.view.say(result(run, state, time.monotonic() - began))
        return Outcome(code, run)

    def _record_failure(self, run: RunDir, message: str, code: int) -> None:
        with suppress(OSError):  # of a full disk, say
            run.update_status(state=runs.FAILED, finished=runs.now(), error=message, exit_code=code)
            _set_summary_state(run, runs.FAILED)
            self._settle(run, runs.FAILED)

    def _stuck(self, run: RunDir, found: Verdict, over: Callable[[float], bool]) -> None:
        """Training in this process hangs: raise that there, or, where native code never comes back, end the process."""
        self.interrupts.fail(MantaError(with_way_out(found.message, run), code=FAILED))
        if over(END_S):
            self.interrupts.failure = None
            return
        last = threading.Timer(30, os._exit, [FAILED])  # should the disk or the terminal be what hangs
        last.daemon = True
        last.start()
        message = with_way_out(found.message, run)
        self._record_failure(run, message, FAILED)
        print(f"Error: {message}", file=sys.__stderr__, flush=True)
        self.view.note(f"{message}\n{found.stack}")
        os._exit(FAILED)

    def _settle(self, run: RunDir, state: str) -> None:
        """Trackers hear how it ended, if nobody told them."""
        try:
            settle(run, state, self.config, self.view.say)
        except Exception as error:  # a tracker can never hurt a run
            self.view.note("".join(traceback.format_exception(error)))
            self.view.say(f"Trackers could not be told how it ended ({error}). See {run}/{tracking.FOLDER}/log.txt.")

    def _in_process(self, needs: Needs, run: RunDir) -> str:
        from manta import session

        with self.view.capture_prints():
            self.interrupts.ask = lambda: None  # the session looks at `asked`
            mine = session.plain(run, self.config.scaling.use_gpu, self.interrupts.asked, self.view.update)
            mine.stuck = partial(self._stuck, run)
            if needs.use_gpu and mine.device.type == "cpu":
                self.view.say(REHEARSAL)
            return session.train(mine, self.config)

    def _on_ray(self, needs: Needs, run: RunDir) -> str:
        self.interrupts.listen()
        self.interrupts.ask = partial(_ask_to_stop, run, self.view.say)
        tail = Tail(run)

        def draw() -> None:
            for line in tail.lines():
                self.view.update(line)

        try:
            return str(on_workers(self.config, run, needs, self.view, _train, {}, draw))
        finally:
            shutil.rmtree(run.path / ".ray", ignore_errors=True)

    def _search(self, needs: Needs, nodes: list[plan.Node], run: RunDir) -> str:
        from manta.search.tuner import Search

        assert self.space is not None
        self.interrupts.listen()
        with worker_lines(self.view.note, self.view.note):
            use_gpu = needs.use_gpu and has_cuda(self.config.cluster)
            if needs.use_gpu and not use_gpu:
                self.view.say(REHEARSAL)
            search = Search(self.config, self.space, run, needs, use_gpu, nodes, self.view)
            self.interrupts.ask = search.ask_to_stop
            return search.go()


def _train(mine: Any, config: Config) -> str:
    from manta import session

    return session.train(mine, config)


def _ask_to_stop(run: RunDir, say: Callable[[str], None]) -> None:
    trains = runs.is_locked(run)  # looked at first: told to stop, it may have stopped before we look
    run.stop_file.touch()
    if not trains:
        say("No worker trains right now, so there is nothing to save.")
        raise KeyboardInterrupt


def _nothing_left(config: Config, run: RunDir) -> bool:
    """Whether a finished run is asked for nothing more than it has done."""
    from manta.resume import load

    if run.read("status.json").get("state") != runs.FINISHED:
        return False
    saved, now = load(run), config.training
    if config.search.algorithm:
        trials, (then, asked) = run.read("summary.json").get("trials", {}), (saved.search, config.search)
        same = all(getattr(then, name) == getattr(asked, name) for name in ("refit", "refit_seeds"))
        enough = asked.num_samples is None or asked.num_samples <= sum(trials.values())
        return same and enough and not trials.get("failed") and not trials.get("running")
    before = saved.training
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
    split = f", in micro-batches of {micro}" if isinstance(micro, int) and micro < share else ""
    split = ", as many at a time as fit" if micro == "auto" else split
    return [
        (
            "workers",
            f"{needs.num_workers}{most} on {device}, {plan.shown(needs.per_worker)} each, {config.scaling.strategy}",
        ),
        ("batch", f"{batch} global, {share} per worker{split}"),
    ]


# --- the end -----------------------------------------------------------------------------------------------------


_TITLES = {runs.FINISHED: "Finished", runs.INTERRUPTED: "Interrupted"}


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
        shown = "  ".join(f"{key} {number(value)}" for key, value in best["metrics"].items())
        rows.append(("best", f"epoch {best['epoch']}, step {best['step']}: {shown}"))
        rows.append(("checkpoint", f"{run}/checkpoints/best"))
    if summary.get("test"):
        rows.append(("test", "  ".join(f"{key} {number(value)}" for key, value in summary["test"].items())))
    rows.append(("time", f"{seconds:.1f} s, training {speed(summary.get('throughput', {}))}"))
    if state == "finished":
        rows.append(("evaluate", f"python scripts/evaluate.py run={where}"))
        rows.append(("extend", f"python train.py resume={where} training.epochs=<more>"))
    else:
        rows.append(("resume", f"python train.py resume={where}"))
    attempts = (run.path / "overrides.txt").read_text().splitlines()
    if len(attempts) == 1:  # several together are no one command
        rows.append(("repeat", f"python train.py {attempts[0]}".rstrip()))
    return table(_TITLES[state], rows)
