"""A search on Ray Tune: starting it, following it, ending it; then the best configuration once more, with fresh seeds."""

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import PlacementGroupID, tune
from ray.tune.execution.placement_groups import PlacementGroupFactory
from ray.tune.experiment import Trial as TuneTrial
from ray.util.placement_group import PlacementGroup

from manta import runs
from manta.checkpoints import Damaged
from manta.cluster import TELL_S, environment
from manta.config import Config, from_hydra
from manta.errors import FAILED, FINISHED, INTERRUPTED, MantaError
from manta.plan import Needs, Node, trials_at_once
from manta.report.after import report_after
from manta.resume import load
from manta.runs import RunDir
from manta.search import report, results
from manta.search.algorithms import make_algorithm
from manta.search.best import publish_best
from manta.search.exploit import placed
from manta.search.record import STOPPED, Record, ranked, trial_dir
from manta.search.schedulers import PAUSING, make_scheduler
from manta.search.space import Space
from manta.search.study import EVENTS, Study
from manta.search.trial import Job, Trial
from manta.search.trials import Trials, number_of, why
from manta.tracking.live import Live
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
        self.study = Study(self.run.path / EVENTS, self.config.objective)
        search = self.config.search
        random.seed(search.seed)  # Tune's schedulers use the global generators
        np.random.seed(search.seed)
        most = search.max_concurrent_trials
        self.at_once = min(trials_at_once(self.needs, self.nodes), most or 10_000)
        algorithm = make_algorithm(self.config, self.space, self.view.say)
        self.scheduler = make_scheduler(self.config, self.space, self.run, self._renew)
        self.scheduler.watch(
            self.study, algorithm, lambda: self.trials.stopping, lambda number: self._release([number])
        )
        # Slots let Tune keep the process of a trial for the next; but of a cluster's head all searches have a share.
        shared = (
            self.config.cluster.kind != "local" and most is not None and search.scheduler.get("name") not in PAUSING
        )
        self.slotted = (self.needs.num_workers > 1 or most is not None) and not shared
        limit = self.at_once if shared else None
        self.trials = Trials(self.study, algorithm, self.scheduler, self._prepare, search.num_samples, limit)
        self._settled: set[tuple[int, str]] = set()
        self._refused: set[tuple[int, int]] = set()
        self._began = self._written = self._active = time.monotonic()

    # --- running ---------------------------------------------------------------------------------------------------

    def go(self) -> str:
        """All trials, then the best once more; "finished" or "interrupted".

        Raises:
            MantaError: every trial failed.
        """
        self.stop_file.unlink(missing_ok=True)
        Live(self.run, self.config, self.view.say).start()
        self._finish_exploits()
        self._ended_before = self._ended()
        environment = dict(_ENVIRONMENT)
        if self.config.search.scheduler.get("name") in PAUSING:  # they compare trials side by side: Tune is to have all
            environment["TUNE_MAX_PENDING_TRIALS_PG"] = str(self._total() or 1)
        try:
            with _environment(environment):
                return self._go()
        finally:
            self.study.close()
            shutil.rmtree(self.run.path / ".tune", ignore_errors=True)

    def _go(self) -> str:
        known = list(self.study.records)
        with self.view.search_progress(self.config, self.space, self._total(), known):
            try:
                self.until_done(self._tuner().fit, self._follow)
            finally:
                if self.study.storage_failure is not None:  # Tune meets it too, and raises whatever comes of it
                    raise MantaError(self.study.storage_failure, code=FAILED)
        self._release(range(len(self.study.records)))
        records, best = self.study.records, self.study.best()
        cut = [replace(r, state=runs.INTERRUPTED) if r.state == runs.RUNNING else r for r in records]
        results.write_csv(self.run, self.config, self.space, cut)
        self._settle(cut)
        # The very best may have died before its checkpoint was written.
        any(self._publish(record) for record in ranked(records, self.config.objective.mode))
        refit = Refit(self)
        if best is not None and not self.interrupted:
            self.stop_file.unlink(missing_ok=True)  # of a spent time budget
            refit.go(best)
        failed = best is None and not self.interrupted
        state = runs.INTERRUPTED if self.interrupted else runs.FAILED if failed else runs.FINISHED
        self._conclude(refit, state)
        if failed:
            raise MantaError(results.all_failed(records), code=FAILED)
        return state

    def _release(self, numbers: Iterable[int]) -> None:
        """Give back the workers' resources of trials whose process is gone: Ray keeps them to the end of the job."""
        if self.needs.num_workers <= 1:
            return
        for number in numbers:
            for rank in trial_dir(self.run, number).read("workers.json").get("ranks", [])[:1]:
                if rank["placement_group"] is not None:
                    group = PlacementGroup(PlacementGroupID(bytes.fromhex(rank["placement_group"])))
                    ray.util.remove_placement_group(group)

    def _conclude(self, refit: "Refit", state: str) -> None:
        """What was found, in summary.json, search.md and report.html."""
        records = self.study.records
        importances = results.importance(self.space, records, self.config.objective)
        found = results.refit_summary(self.run, refit.finished) if refit.finished else {}
        summary = results.summary(self.run, self.config, self.space, records, found, importances, state)
        if refit.test:
            summary["test"] = refit.test
        self.run.write("summary.json", summary)
        report.write_report(self.run, self.config, self.space, records, summary)
        if records and self.config.search.report:
            report_after(self.run, self.view)

    def ask_to_stop(self) -> None:
        self.interrupted = True
        self._stop()

    def _stop(self) -> None:
        self.trials.stopping = True
        with suppress(OSError):  # of a disk that has failed: trials meet it themselves
            self.stop_file.touch()

    @property
    def stop_file(self) -> Path:
        return self.run.stop_file

    def until_done(self, fit: Callable[[], Any], follow: Callable[[], None]) -> Any:
        """Run Tune in a thread, so that this one can hear signals and draw."""
        outcome: dict[str, Any] = {}

        def target() -> None:
            try:
                outcome["value"] = fit()
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=target, name="tune", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            follow()
        if "error" in outcome:
            raise outcome["error"]
        return outcome["value"]

    def _follow(self) -> None:
        """Several times a second while trials run."""
        now, (running, waiting) = time.monotonic(), self._alive()
        self._settle(list(self.study.records))
        self.view.trials(self.study.records, running, waiting, self._eta(now - self._began))
        if self.study.storage_failure is not None and not self.trials.stopping:
            self._stop()
        budget = self.config.search.time_budget_s
        if budget is not None and now - self._began > budget and not self.trials.stopping:
            self.view.say(f"search.time_budget_s={budget:g} is spent: stopping.")
            self._stop()
        if now - self._written > CSV_S:
            results.write_csv(self.run, self.config, self.space, list(self.study.records))
            self._written = now
        best = self.study.best()
        if best is not None:
            self._publish(best)  # a read, if it is there
        self._active = now if running or not waiting else self._active
        if now - self._active > TELL_S:
            self.view.say(f"Waiting for {self.needs}: {waiting} trial{'s' * (waiting > 1)} cannot start yet.")
            self._active = now

    def _publish(self, record: Record) -> bool:
        """Make best/ this trial's; said once if its checkpoint is damaged, and the next best is taken at the end."""
        assert record.best is not None
        which = (record.number, record.best["step"])
        if which in self._refused:
            return False
        try:
            return publish_best(self.run, self.space, record)
        except Damaged as error:
            self._refused.add(which)
            self.view.say(f"Trial {record.number} is the best so far, but it cannot be kept in best/: {error}")
            return False

    def _ended(self) -> int:
        return sum(record.state != runs.RUNNING for record in self.study.records)

    def _alive(self) -> tuple[list[Record], int]:
        """Running trials, and how many wait."""
        trials = list(self.trials.given)
        alive = [(t, self.study.records[number_of(t)]) for t in trials]
        alive = [(t, record) for t, record in alive if record.state == runs.RUNNING]
        running = [record for t, record in alive if t.status == TuneTrial.RUNNING]
        return running, len(alive) - len(running)

    def _eta(self, elapsed: float) -> float | None:
        """Seconds to the end at the pace of this launch."""
        total, ended = self._total(), self._ended()
        pace = elapsed / max(ended - self._ended_before, 1)
        return pace * (total - ended) if total is not None and ended > self._ended_before else None

    def _total(self) -> int | None:
        search = self.config.search
        return len(self.space.grid()) if search.algorithm["name"] == "grid" else search.num_samples

    # --- what Tune is given ------------------------------------------------------------------------------------------

    def _tuner(self) -> tune.Tuner:
        search, objective = self.config.search, self.config.objective
        job = self.job()
        return tune.Tuner(
            self.trainable(job, slots=self.at_once if self.slotted else None),
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

    def job(self) -> Job:
        return Job(
            *(self.needs, self.use_gpu, self.stop_file, os.getcwd(), self.config.allowed_targets),
            environment=environment(self.config.cluster),
        )

    def trainable(self, job: Job, slots: int | None = None) -> Any:
        """Trials with their resources; `slots` limits how many run at once where Tune looks at resources alone."""
        needs = self.needs
        bundles: list[dict[str, float]] = []
        if needs.num_workers == 1:  # else the workers' resources are a placement group of their own
            bundles.append(needs.per_worker)
        if slots is not None:  # beside the worker, which may be on any node
            bundles.append({HEAD: max(int(9_000 / slots), 1) / 10_000})  # a tenth is for actors of Ray Train's own
        elif not bundles:
            bundles.append({HEAD: 0.001})
        labels: list[dict[str, str]] = [needs.label_selector, {}] if needs.num_workers == 1 else [{}]
        place = PlacementGroupFactory(bundles, bundle_label_selector=labels[: len(bundles)])
        return tune.with_resources(tune.with_parameters(Trial, job=job), place)

    def _prepare(self, record: Record) -> dict[str, Any]:
        """Make the trial's run directory fit its values."""
        trial = trial_dir(self.run, record.number)
        new = not (trial.path / "status.json").is_file()
        trial.path.mkdir(parents=True, exist_ok=True)
        if new:
            trial.write("status.json", {**self.run.read("status.json"), "attempts": 0})
            shutil.copy2(self.run.path / "provenance.json", trial.path)
        write_overrides(self.run, trial, self.space, record.values)
        trial.save_config(self.trial_config(record.values))
        return {"run": str(trial.path)}

    def trial_config(self, values: dict[str, Any], **changes: Any) -> Config:
        config = self.space.config(values)
        scaling = replace(self.config.scaling, num_workers=self.needs.num_workers)
        return replace(config, scaling=scaling, cluster=self.config.cluster, **changes)

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

    def _settle(self, records: list[Record]) -> None:
        """Trials that have ended say so in their own directories."""
        for record in records:
            if record.state == runs.RUNNING or (record.number, record.state) in self._settled:
                continue
            self._settled.add((record.number, record.state))
            trial = trial_dir(self.run, record.number)
            if not trial.path.is_dir() or trial.read("status.json").get("state") == record.state:
                continue
            code = {runs.FAILED: FAILED, runs.INTERRUPTED: INTERRUPTED}.get(record.state, FINISHED)
            trial.update_status(state=record.state, finished=runs.now(), error=record.error, exit_code=code)
            summary = trial.read("summary.json")
            if summary and record.state == STOPPED:
                trial.write("summary.json", {**summary, "state": STOPPED})


class Refit:
    """The best values trained again with fresh seeds, each evaluated once on the test split.

    What population based training finds is a schedule of values, which no single configuration repeats: there, and without
    `search.refit`, the best checkpoint itself is evaluated.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.finished: list[RunDir] = []
        self.test: dict[str, float] = {}

    def go(self, best: Record) -> None:
        config = self.search.config
        if config.search.refit and not best.exploits:
            self._train(best)
        elif config.training.test:
            self.test = self._evaluate()

    def _train(self, best: Record) -> None:
        search = self.search
        folder = search.run.path / "refit" / f"{best.number:05d}"
        seeds = [search.config.seed + 1 + index for index in range(search.config.search.refit_seeds)]
        wanted = {seed: RunDir(folder / f"seed-{seed}") for seed in seeds}
        left = {seed: run for seed, run in wanted.items() if run.read("status.json").get("state") != runs.FINISHED}
        if left:
            shown = ", ".join(map(str, left))
            search.view.say(f"Training the best of them (trial {best.number}) again with seed {shown} ...")
        for seed, run in left.items():
            self._prepare(run, seed, best)
        if left:
            grid = search.until_done(self._tuner(list(left.values())).fit, lambda: None)
            for run, result in zip(left.values(), grid, strict=True):
                self._settle(run, result.error)
        self.finished = [run for run in wanted.values() if run.read("status.json").get("state") == runs.FINISHED]

    def _prepare(self, run: RunDir, seed: int, best: Record) -> None:
        search = self.search
        run.path.mkdir(parents=True, exist_ok=True)
        run.save_config(search.trial_config(results.values_of(best), seed=seed))
        if not (run.path / "status.json").is_file():
            run.write("status.json", {**search.run.read("status.json"), "attempts": 0})
            shutil.copy2(search.run.path / "provenance.json", run.path)
        write_overrides(search.run, run, search.space, results.values_of(best), f"seed={seed}")

    def _tuner(self, wanted: list[RunDir]) -> tune.Tuner:
        search = self.search
        job = replace(search.job(), watched=False)
        return tune.Tuner(
            search.trainable(job),
            param_space={"run": tune.grid_search([str(run.path) for run in wanted]), "heard": 0},
            tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=search.at_once),
            run_config=tune.RunConfig(name="refit", storage_path=str(search.run.path / ".tune"), verbose=0),
        )

    def _settle(self, run: RunDir, error: Exception | None) -> None:
        state = runs.FAILED if error is not None else run.read("summary.json").get("state", runs.INTERRUPTED)
        text = None if error is None else why(error)
        run.update_status(state=state, finished=runs.now(), error=text, exit_code=FAILED if error else 0)
        if error is not None:
            self.search.view.say(f"{run} failed: {text}")

    def _evaluate(self) -> dict[str, float]:
        """The best checkpoint on the test split."""
        from manta.evaluate import measure

        search = self.search
        best = RunDir(search.run.path / "best")
        config = from_hydra(load(best, search.config.allowed_targets))
        checkpoint = best.path / "checkpoint"
        if search.needs.num_workers > 1:
            from manta.workers import on_workers

            arguments = {"checkpoint": checkpoint.resolve(), "splits": []}
            found = on_workers(config, best, search.needs, search.view, measure, arguments, what="Evaluation")
        else:
            bundle = {key: value for key, value in search.needs.per_worker.items() if key not in ("CPU", "GPU")}
            task = ray.remote(
                num_cpus=search.needs.per_worker.get("CPU", 1),
                num_gpus=search.needs.per_worker.get("GPU", 0),
                resources=bundle,
                max_calls=1,
                label_selector=search.needs.label_selector,
            )(_measure)
            found = ray.get(task.remote(best, config, checkpoint.resolve(), search.use_gpu))
        return {key: value for key, value in found.items() if key.startswith("test/")}


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """With these variables set, unless the user has set them."""
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _measure(run: RunDir, config: Config, checkpoint: Path, use_gpu: bool) -> dict[str, float]:
    from manta.evaluate import measure
    from manta.session import plain

    return measure(plain(run, use_gpu, stop=lambda: False), config, checkpoint, [])


def write_overrides(search: RunDir, trial: RunDir, space: Space, values: dict[str, Any], *more: str) -> None:
    """overrides.txt of a trial: what repeats it as a run of its own."""
    (trial.path / "overrides.txt").write_text(results.trial_command(search, space, values, *more) + "\n")
