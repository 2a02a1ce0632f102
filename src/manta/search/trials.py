"""What Tune asks during a search: the next trial, and what becomes of one that has reported.

Everything that Tune decides on is written to the study first. After a crash the study's events are told again to a new
algorithm and a new scheduler, which so come to the state they were in, whatever they are.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.tune.experiment import Experiment, Trial
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import SearchAlgorithm

from manta.errors import MantaError
from manta.runs import FAILED, FINISHED, RUNNING
from manta.search.algorithms import Algorithm
from manta.search.record import STOPPED, Record
from manta.search.study import Study

GONE = "the process of the trial is gone: killed, out of memory, or a crash in native code"
METRICS = "metrics/"  # where Tune puts what a trial reports as "metrics"
CONTINUE, PAUSE, STOP = TrialScheduler.CONTINUE, TrialScheduler.PAUSE, TrialScheduler.STOP


def number_of(trial: Trial) -> int:
    return int(trial.trial_id)


class NotPickled:
    """Tune writes what it is given to disk, for a restore of its own that is not needed: there the study is."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Watched(NotPickled):
    """Mixed into a scheduler of Tune's: writes to the study what it is told, and tells the algorithm.

    Tune calls the scheduler at every turn of a trial's life, and it alone hears of each exactly once.
    """

    study: Study
    algorithm: Algorithm
    known: set[str]
    stopping: Callable[[], bool]
    lost: Callable[[int], None]

    def watch(
        self,
        study: Study,
        algorithm: Algorithm,
        stopping: Callable[[], bool] = lambda: False,
        lost: Callable[[int], None] = lambda _: None,
    ) -> None:
        """
        Args:
            stopping: whether the search is to end once nothing runs; paused trials stay as they are.
            lost: called with a trial whose process died.
        """
        self.study, self.algorithm, self.stopping, self.lost, self.known = study, algorithm, stopping, lost, set()

    def on_trial_add(self, controller: Any, trial: Trial) -> None:
        if trial.trial_id in self.known:  # told again after a crash
            return
        self.known.add(trial.trial_id)
        if self.study.records[number_of(trial)].state == FAILED:
            self.study.retried(number_of(trial))
        super().on_trial_add(controller, trial)  # type: ignore[misc]

    def on_trial_result(self, controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        number = number_of(trial)
        if not self.study.silent and result["epoch"] <= self.study.records[number].epoch:
            return str(CONTINUE)  # repeated after a crash
        self._reported(number, result)
        return self._decide(controller, trial, result)

    def told_again(self, controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """A validation of an earlier launch."""
        return self._decide(controller, trial, result)

    def _decide(self, controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        decision = str(super().on_trial_result(controller, trial, result))  # type: ignore[misc]
        if decision != STOP:
            self.algorithm.reported(number_of(trial), result)
        return decision

    def on_trial_complete(self, controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        number, state = number_of(trial), result.get("state", STOPPED)
        if state not in (FINISHED, STOPPED):  # interrupted: it goes on another time
            return
        if "epoch" in result:
            self._reported(number, result, last=True)
        self.study.ended(number, state)
        super().on_trial_complete(controller, trial, result)  # type: ignore[misc]
        self.algorithm.ended(number, result, self.study.records[number].value)
        # Statistics of every metric of every trial, and JSON of them: most of the 64 KiB that Tune keeps of a trial.
        trial.run_metadata.metric_n_steps, trial.run_metadata.metric_analysis = {}, {}

    def on_trial_remove(self, controller: Any, trial: Trial) -> None:
        """Stopped while it was paused; some schedulers also call it themselves when a trial ends."""
        number = number_of(trial)
        stopped = self.study.silent or self.study.records[number].state == RUNNING
        if stopped:
            self.study.ended(number, STOPPED)
        super().on_trial_remove(controller, trial)  # type: ignore[misc]
        if stopped:
            self.algorithm.ended(number, trial.last_result, self.study.records[number].value)

    def on_trial_error(self, controller: Any, trial: Trial) -> None:
        self.known.discard(trial.trial_id)
        if not self.study.silent:
            error = error_of(trial)
            self.study.failed(number_of(trial), error)
            if error == GONE:
                self.lost(number_of(trial))
        super().on_trial_error(controller, trial)  # type: ignore[misc]
        self.algorithm.failed(number_of(trial))

    def choose_trial_to_run(self, controller: Any, **options: Any) -> Trial | None:
        """
        Args:
            options: HyperBandForBOHB calls itself with one.
        """
        if self.stopping():
            if not any(trial.status == Trial.RUNNING for trial in controller.get_trials()):
                controller.request_stop_experiment()
            return None
        chosen: Trial | None = super().choose_trial_to_run(controller, **options)  # type: ignore[misc]
        return chosen

    def _reported(self, number: int, result: dict[str, Any], last: bool = False) -> None:
        metrics = {key.removeprefix(METRICS): value for key, value in result.items() if key.startswith(METRICS)}
        self.study.reported(number, result["epoch"], result["step"], metrics, result["seconds"], last)


def error_of(trial: Trial) -> str:
    """Why a trial failed."""
    name: Any = trial.run_metadata.pickled_error_filename
    path = Path(str(trial.local_path)) / str(name)  # Tune's own reader looks where it is copied to later
    return why(cloudpickle.loads(path.read_bytes())) if name and path.is_file() else "unknown"


def why(error: Exception) -> str:
    """What a trial's process raised, in the words of the one who knows."""
    cause: Any = getattr(error, "cause", None) or error
    if isinstance(cause, ray.exceptions.RayActorError):
        return GONE
    text = str(cause).strip() or type(cause).__name__
    return text if isinstance(cause, MantaError) else f"{type(cause).__name__}: {text}"


class Trials(NotPickled, SearchAlgorithm):
    """Hands trials to Tune: those that an earlier launch left unfinished, then new ones.

    Args:
        prepare: makes a trial's run directory fit its record; gives what Tune shall pass to the trial.
        total: trials in all; None = without end.
        at_once: trials under way at most; None = Tune looks at the resources.
    """

    def __init__(
        self,
        study: Study,
        algorithm: Algorithm,
        scheduler: Any,
        prepare: Callable[[Record], dict[str, Any]],
        total: int | None,
        at_once: int | None,
    ) -> None:
        self.study, self.algorithm, self.scheduler, self.prepare = study, algorithm, scheduler, prepare
        self.total, self.at_once = total, at_once
        self.stopping = False
        """Hand out no more."""
        self._experiment: Experiment | None = None
        self._left: deque[Trial] | None = None
        self.given: list[Trial] = []
        """Those under way."""

    @property
    def searcher(self) -> Any:
        """For Tune's BOHB scheduler, which tells it of pauses."""
        return getattr(self.algorithm, "searcher", None)

    def add_configurations(self, experiments: Any) -> None:
        (self._experiment,) = experiments if isinstance(experiments, list) else [experiments]

    def next_trial(self) -> Trial | None:
        if self._left is None:
            self._left = self._continued()
        if self.is_finished() or (self.at_once is not None and self._alive() >= self.at_once):
            return None
        if self._left:
            trial = self._left.popleft()
        else:
            values = self.algorithm.suggest(len(self.study.records))
            if values is None:
                return None
            trial = self._make(self.study.sampled(values))
        record = self.study.records[number_of(trial)]
        try:
            trial.config = {**record.values, **self.prepare(record), "heard": record.epoch}
        except MantaError as error:  # these values do not go together
            self.study.failed(record.number, str(error))
            self.algorithm.failed(record.number)
            return None
        self.given = [each for each in self.given if not each.is_finished()] + [trial]
        return trial

    def is_finished(self) -> bool:
        if self.stopping:
            return True
        none_new = self.algorithm.exhausted or (self.total is not None and len(self.study.records) >= self.total)
        return none_new and self._left is not None and not self._left

    def _alive(self) -> int:
        return sum(not trial.is_finished() for trial in self.given)

    def _make(self, record: Record) -> Trial:
        assert self._experiment is not None
        spec = self._experiment.spec
        return Trial(
            self._experiment.run_identifier,
            config=dict(record.values),
            trial_id=f"{record.number:05d}",
            storage=self._experiment.storage,
            experiment_tag=str(record.number),
            placement_group_factory=spec.get("resources_per_trial"),
            checkpoint_config=spec.get("checkpoint_config"),
            max_failures=spec.get("max_failures", 0),
        )

    def _continued(self) -> deque[Trial]:
        """Tell the past again, and give the trials that it left unfinished."""
        if not self.study.past:
            return deque()
        history = History(self.scheduler, self.algorithm, self.study, self._make)
        self.study.silent = True
        for event in self.study.past:
            history.tell(event)
        self.study.silent = False
        history.settle()
        return deque(trial for trial in history.trials if self._is_left(trial))

    def _is_left(self, trial: Trial) -> bool:
        return self.study.records[number_of(trial)].state in (RUNNING, FAILED)


class History:
    """Stands in for Tune's controller while the past is told again."""

    def __init__(self, scheduler: Any, algorithm: Algorithm, study: Study, make: Callable[[Record], Trial]) -> None:
        self.scheduler, self.algorithm, self.study, self.make = scheduler, algorithm, study, make
        self.trials: list[Trial] = []
        self.search_alg = self

    @property
    def searcher(self) -> Any:
        return getattr(self.algorithm, "searcher", None)

    def tell(self, event: dict[str, Any]) -> None:
        """One event, as it went then."""
        scheduler: Any = self.scheduler
        if event["event"] == "sampled":
            self.algorithm.repeat(event["trial"], event["values"])
            self.trials.append(self.make(self.study.records[event["trial"]]))
            self.trials[-1].config = dict(event["values"])
            scheduler.on_trial_add(self, self.trials[-1])
            return
        trial = self.trials[event["trial"]]
        if trial.is_finished() and event["event"] != "retried":
            return
        match event["event"]:
            case "reported":
                trial.status = Trial.RUNNING
                result = {**event, **event["metrics"], "training_iteration": event["epoch"]}
                decision = CONTINUE if event["last"] else scheduler.told_again(self, trial, result)
                trial.run_metadata.last_result = result
                trial.status = Trial.PAUSED if decision == PAUSE and trial.status == Trial.RUNNING else trial.status
            case "ended":
                scheduler.on_trial_complete(self, trial, {**trial.last_result, "state": event["state"]})
                trial.status = Trial.TERMINATED
            case "failed":
                scheduler.on_trial_error(self, trial)
                trial.status = Trial.ERROR
            case "retried":
                trial.status = Trial.PENDING
                scheduler.on_trial_add(self, trial)
            case "exploited":
                trial.config = {**trial.config, **event["values"]}

    def settle(self) -> None:
        """What was under way waits again; what a scheduler stopped as the search died is stopped."""
        for trial in self.trials:
            record = self.study.records[number_of(trial)]
            if record.state == RUNNING and trial.status == Trial.TERMINATED:
                self.study.ended(record.number, STOPPED)
            elif record.state in (RUNNING, FAILED) and trial.status != Trial.PAUSED:
                trial.status = Trial.PENDING

    # --- what a scheduler asks of a controller -------------------------------------------------------------------------

    def get_trials(self) -> list[Trial]:
        return self.trials

    def get_live_trials(self) -> set[Trial]:
        return {trial for trial in self.trials if not trial.is_finished()}

    def stop_trial(self, trial: Trial) -> None:
        if not trial.is_finished():
            self.scheduler.on_trial_remove(self, trial)
            trial.status = Trial.TERMINATED
