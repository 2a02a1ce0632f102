"""A search on Ray Tune: starting it, following it, ending it; then the best configuration once more, with fresh seeds."""

import dataclasses
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ray import tune
from ray.tune.execution.placement_groups import PlacementGroupFactory
from ray.tune.experiment import Trial as TuneTrial

from manta import runs
from manta.cluster import TELL_S
from manta.config import Config
from manta.errors import FAILED, MantaError
from manta.plan import Needs, Node, trials_at_once
from manta.runs import RunDir
from manta.search import results
from manta.search.algorithms import make_algorithm
from manta.search.exploit import placed
from manta.search.record import STOPPED, Record, trial_dir
from manta.search.schedulers import PAUSING, make_scheduler
from manta.search.space import Space
from manta.search.study import EVENTS, Study
from manta.search.trial import Job, Trial
from manta.search.trials import Trials, number_of
from manta.view import View

HEAD = "node:__internal_head__"  # every Ray's head node has 1 of it
CSV_S = 10
# Ours, of Tune's: no files of its own loggers, no signal handler, no snapshot while it runs (the study has it all).
_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}


@dataclass
class Search:
    """One launch of a search."""

    config: Config
    space: Space
    run: RunDir
    needs: Needs
    use_gpu: bool
    nodes: list[Node]
    view: View
    interrupted: bool = False
    study: Study = field(init=False)
    trials: Trials = field(init=False)

    def __post_init__(self) -> None:
        os.environ.update({name: value for name, value in _ENVIRONMENT.items() if name not in os.environ})
        self.study = Study(self.run.path / EVENTS, self.config.objective)
        search = self.config.search
        random.seed(search.seed)  # Tune's schedulers use the global generators
        np.random.seed(search.seed)
        most = search.max_concurrent_trials
        self.at_once = min(trials_at_once(self.needs, self.nodes), most or 10_000)
        algorithm = make_algorithm(self.config, self.space, self.view.say)
        self.scheduler = make_scheduler(self.config, self.space, self.run, self._renew)
        self.scheduler.watch(self.study, algorithm, lambda: self.trials.stopping)
        limited = self.needs.num_workers > 1 or most is not None
        pausing = search.scheduler.get("name") in PAUSING
        self.slotted = limited and pausing and (search.num_samples or self.at_once + 1) > self.at_once
        limit = self.at_once if limited and not self.slotted else None
        self.trials = Trials(self.study, algorithm, self.scheduler, self._prepare, search.num_samples, limit)
        self._settled: set[tuple[int, str]] = set()

    # --- running ---------------------------------------------------------------------------------------------------

    def go(self) -> str:
        """All trials; "finished" or "interrupted".

        Raises:
            MantaError: every trial failed.
        """
        self.stop_file.unlink(missing_ok=True)
        self._finish_exploits()
        known = list(self.study.records)
        with self.view.search_progress(self.config, self.space, self._total(), known):
            self._until_done(self._tuner().fit)
        self.study.close()
        self._write()
        if self.interrupted:
            return runs.INTERRUPTED
        if self.study.records and all(record.value is None for record in self.study.records):
            raise MantaError(results.all_failed(self.study.records), code=FAILED)
        return runs.FINISHED

    def ask_to_stop(self) -> None:
        self.interrupted = True
        self._stop()

    def _stop(self) -> None:
        self.trials.stopping = True
        self.stop_file.touch()

    @property
    def stop_file(self) -> Path:
        return self.run.stop_file

    def _until_done(self, fit: Callable[[], Any]) -> None:
        outcome: list[BaseException] = []

        def target() -> None:
            try:
                fit()
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=target, name="tune", daemon=True)
        began = written = active = time.monotonic()
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            now = time.monotonic()
            running, waiting = self._alive()
            self._settle()
            self.view.trials(self.study.records, running, waiting, self._eta(now - began))
            budget = self.config.search.time_budget_s
            if budget is not None and now - began > budget and not self.trials.stopping:
                self.view.say(f"search.time_budget_s={budget:g} is spent: stopping.")
                self._stop()
            if now - written > CSV_S:
                results.write_csv(self.run, self.config, self.space, list(self.study.records))
                written = now
            active = now if running or not waiting else active
            if now - active > TELL_S:
                self.view.say(f"Waiting for {self.needs}: {waiting} trial{'s' * (waiting > 1)} cannot start yet.")
                active = now
        self._settle()
        if outcome:
            raise outcome[0]

    def _alive(self) -> tuple[list[Record], int]:
        """Running trials, and how many wait."""
        trials = list(self.trials.given)
        running = [t for t in trials if t.status == TuneTrial.RUNNING]
        waiting = sum(t.status in (TuneTrial.PENDING, TuneTrial.PAUSED) for t in trials)
        return [self.study.records[number_of(t)] for t in running], waiting

    def _eta(self, elapsed: float) -> float | None:
        """Seconds to the end at the pace of this launch."""
        total, records = self._total(), self.study.records
        now_ended = sum(record.state != runs.RUNNING for record in records)
        ended = now_ended - self._ended_before
        return elapsed / ended * (total - now_ended) if total is not None and ended > 0 else None

    def _total(self) -> int | None:
        search = self.config.search
        return len(self.space.grid()) if search.algorithm["name"] == "grid" else search.num_samples

    # --- what Tune is given ------------------------------------------------------------------------------------------

    def _tuner(self) -> tune.Tuner:
        self._ended_before = sum(record.state != runs.RUNNING for record in self.study.records)
        search, objective = self.config.search, self.config.objective
        job = Job(self.needs, self.use_gpu, self.stop_file, os.getcwd())
        return tune.Tuner(
            self._trainable(job, slots=self.at_once if self.slotted else None),
            tune_config=tune.TuneConfig(
                metric=objective.metric,
                mode=objective.mode,
                search_alg=self.trials,
                scheduler=self.scheduler,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(self.run.path / ".tune"),
                failure_config=tune.FailureConfig(max_failures=search.max_failures),
                verbose=0,
            ),
        )

    def _trainable(self, job: Job, slots: int | None = None) -> Any:
        """Trials with their resources; `slots` limits how many run at once where Tune looks at resources alone."""
        if self.needs.num_workers > 1:
            bundle = {"CPU": 0.0, HEAD: 0.001}  # the workers' resources are a placement group of their own
        else:
            bundle = dict(self.needs.per_worker)
        if slots is not None:
            bundle[HEAD] = int(10_000 / slots) / 10_000
        return tune.with_resources(tune.with_parameters(Trial, job=job), PlacementGroupFactory([bundle]))

    def _prepare(self, record: Record) -> dict[str, Any]:
        """Make the trial's run directory fit its values."""
        trial = trial_dir(self.run, record.number)
        new = not (trial.path / "status.json").is_file()
        trial.path.mkdir(parents=True, exist_ok=True)
        if new:
            trial.write("status.json", {**self.run.read("status.json"), "attempts": 0})
            shutil.copy2(self.run.path / "provenance.json", trial.path)
        (trial.path / "overrides.txt").write_text(results.trial_command(self.run, self.space, record.values) + "\n")
        trial.save_config(self._trial_config(record.values))
        return {"run": str(trial.path)}

    def _trial_config(self, values: dict[str, Any], **changes: Any) -> Config:
        config = self.space.config(values)
        scaling = dataclasses.replace(
            self.config.scaling, num_workers=self.needs.num_workers, use_gpu=self.needs.use_gpu
        )
        return dataclasses.replace(config, scaling=scaling, cluster=self.config.cluster, **changes)

    def _renew(self, trial: TuneTrial) -> None:
        record = self.study.records[number_of(trial)]
        self._prepare(record)
        trial.config["heard"] = record.epoch

    def _finish_exploits(self) -> None:
        """Exploits that were on disk, but not in the study yet, as the search died."""
        for record in self.study.records:
            exploit = placed(trial_dir(self.run, record.number))
            if exploit is not None and exploit["index"] > len(record.exploits) and record.state == runs.RUNNING:
                self.study.exploited(record.number, exploit["donor"], exploit["epoch"], exploit["values"])

    # --- what becomes of them ----------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Trials that have ended say so in their own directories."""
        for record in list(self.study.records):
            if record.state == runs.RUNNING or (record.number, record.state) in self._settled:
                continue
            self._settled.add((record.number, record.state))
            trial = trial_dir(self.run, record.number)
            if not trial.path.is_dir() or trial.read("status.json").get("state") == record.state:
                continue
            code = FAILED if record.state == runs.FAILED else 0
            trial.update_status(state=record.state, finished=runs.now(), error=record.error, exit_code=code)
            summary = trial.read("summary.json")
            if summary and record.state == STOPPED:
                trial.write("summary.json", {**summary, "state": STOPPED})

    def _write(self) -> None:
        results.write_csv(self.run, self.config, self.space, self.study.records)
        best = self.study.best()
        if best is not None:
            results.publish_best(self.run, self.space, best)
        shutil.rmtree(self.run.path / ".tune", ignore_errors=True)
