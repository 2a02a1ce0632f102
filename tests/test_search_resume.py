"""A search that died continues as if it had not: its trials, its algorithm, its scheduler, its exploits."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from manta.runs import RunDir, read_lines
from manta.search.algorithms import make_algorithm
from manta.search.exploit import adopt, place, placed
from manta.search.record import Record
from manta.search.schedulers import make_scheduler
from manta.search.study import Study, records_of
from manta.search.trials import History
from manta.training.checkpoint import load_checkpoint
from tests.conftest import ROOT, Lab, compose_run, history, make_config, summary, wait_for

SHORT = (
    "training.epochs=3",
    "training.limit_train_batches=8",
    "search.refit=false",
    "training.test=false",
    "search.report=false",
)
METRIC = "val/accuracy"
pytestmark = pytest.mark.timeout(900)


def event_lines(lab: Lab) -> int:
    path = lab.folder / "latest" / "search.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def trials(run: RunDir) -> pd.DataFrame:
    return pd.read_csv(run.path / "trials.csv").drop(columns="time_s")


# --- killed --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "search",
    [
        ("search=random", "search.num_samples=12"),
        (
            "search=grid",
            "search/space=none",
            "search.space.optimizer.lr=choice(0.001,0.003,0.01,0.03)",
            "search.space.data.batch_size=choice(32,64,128)",
        ),
        ("search=optuna", "search.num_samples=12", "search.algorithm.n_startup_trials=4"),
    ],
    ids=["random", "grid", "optuna"],
)
@pytest.mark.drill
@pytest.mark.usefixtures("ray_cluster")
def test_killed_at_random_moments(lab: Lab, search: tuple[str, ...]) -> None:
    """SIGKILL of the driver, five times; the result is that of a search which was never disturbed (for Optuna, of as many
    trials)."""
    count, kills = 12, 5
    moments = sorted(random.Random(7).sample(range(2, 4 * count), kills))
    process = lab.start(*search, *SHORT, start_new_session=True)
    for moment in moments:
        wait_for(lambda moment=moment: event_lines(lab) >= moment, process)  # type: ignore[misc]
        process.kill()
        process.communicate()
        process = lab.start("resume=latest", start_new_session=True)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "another version" not in output
    run = lab.latest
    found = trials(run)
    assert list(found.trial) == list(range(count))
    assert set(found.status) == {"finished"}
    events = read_lines(run.path / "search.jsonl")
    ended = [event["trial"] for event in events if event["event"] == "ended"]
    assert sorted(ended) == list(range(count))
    for number in range(count):
        reports = [e["epoch"] for e in events if e["event"] == "reported" and e["trial"] == number]
        assert reports == [1, 2, 3]
        lines = [line["epoch"] for line in history(RunDir(run.path / "trials" / f"{number:05d}")) if METRIC in line]
        assert lines == [1, 2, 3]
    assert run.read("status.json")["attempts"] == kills + 1
    if "search=optuna" not in search:
        undisturbed = Lab(lab.folder / "undisturbed").run(*search, *SHORT, "scaling.use_gpu=false")
        pd.testing.assert_frame_equal(found, trials(undisturbed))
        assert summary(run)["best"] == summary(undisturbed)["best"]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.drill
def test_interrupted_and_extended(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C: running trials write a checkpoint; 130; no process is left. Then more trials than were asked for first."""
    slow = (
        "allowed_targets=[manta,torch,tests]",
        "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.03}]",
    )
    settings = ("search=random", "search.num_samples=4", *SHORT[:1], *SHORT[2:], *slow)
    process = lab.start(*settings)
    wait_for(lambda: event_lines(lab) >= 4, process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert f"python train.py resume={lab.latest.path.relative_to(lab.folder)}\n" in output
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    run = lab.latest
    assert run.read("status.json")["state"] == summary(run)["state"] == "interrupted"
    under_way = [r for r in records_of(run, make_config().objective) if r.state == "running"]
    lasts = [run.path / "trials" / f"{record.number:05d}" / "checkpoints" / "last" for record in under_way]
    steps = [load_checkpoint(last)[1]["step"] for last in lasts if last.exists()]  # another may not have begun
    assert steps
    assert min(steps) > 0
    assert lab.launch("resume=latest", "search.num_samples=6", "scaling.use_gpu=false") == 0
    found = trials(run)
    assert list(found.trial) == list(range(6))
    assert set(found.status) == {"finished"}
    capfd.readouterr()
    assert lab.launch("resume=latest") == 0
    again = capfd.readouterr().out
    assert "is finished. To go on: python train.py resume=" in again
    assert "search.num_samples=12" in again
    undisturbed = Lab(lab.folder / "undisturbed").run(
        *settings[:1], "search.num_samples=6", *settings[2:], "scaling.use_gpu=false"
    )
    pd.testing.assert_frame_equal(found, trials(undisturbed))


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.drill
def test_failed_trials_are_tried_again(lab: Lab) -> None:
    settings = (
        "search=grid", "search/space=none", "search.space.seed=choice(1,2,3,4)", *SHORT,
        "allowed_targets=[manta,torch,tests]", "recipe._target_=tests.probes.Troubled",
    )  # fmt: skip
    run = lab.run(*settings)
    assert summary(run)["trials"]["failed"] == 2
    assert lab.launch(f"resume={run.path}") == 0  # the one that was killed gets through, the one that raises does not
    found = trials(run).set_index("seed")
    assert dict(found.status) == {1: "finished", 2: "failed", 3: "finished", 4: "finished"}
    ended = [event["trial"] for event in read_lines(run.path / "search.jsonl") if event["event"] == "ended"]
    assert sorted(ended) == [0, 2, 3]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.drill
def test_time_budget(lab: Lab) -> None:
    slow = (
        "allowed_targets=[manta,torch,tests]",
        "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.02}]",
    )
    run = lab.run("search=random", "search.num_samples=null", "search.time_budget_s=30", *SHORT, *slow)
    first = records_of(run, make_config().objective)
    assert any(record.state == "finished" for record in first)
    assert run.read("status.json")["state"] == "finished"
    assert lab.launch(f"resume={run.path}", "search.time_budget_s=20") == 0
    second = records_of(run, make_config().objective)
    finished = [[record.number for record in records if record.state == "finished"] for records in (first, second)]
    assert set(finished[0]) < set(finished[1])
    under_way = [record.number for record in first if record.state == "running"]
    assert under_way[0] in finished[1]


# --- what is told again -----------------------------------------------------------------------------------------------------


def stub(record: Record) -> Trial:
    return Trial("stub", config=dict(record.values), trial_id=f"{record.number:05d}", stub=True)


def rank(number: int) -> int:
    return number * 7 % 9


def simulate(folder: Path, *overrides: str, count: int = 9) -> tuple[Study, Any, Any]:
    """Nine trials, one epoch after the other, through a real scheduler and algorithm; the values are those of `rank`."""
    config, _, space = compose_run(*overrides)
    assert space is not None
    study = Study(folder / "search.jsonl", config.objective)
    algorithm = make_algorithm(config, space, print)
    scheduler = make_scheduler(config, space, RunDir(folder), lambda trial: None)
    scheduler.set_search_properties(METRIC, "max")
    scheduler.watch(study, algorithm, lambda: False)
    controller = History(scheduler, algorithm, study, stub)
    if study.past:
        study.silent = True
        for event in study.past:
            controller.tell(event)
        study.silent = False
        controller.settle()
        return study, scheduler, controller
    for number in range(count):
        values = algorithm.suggest(number)
        assert values is not None
        controller.trials.append(stub(study.sampled(values)))
        scheduler.on_trial_add(controller, controller.trials[-1])
    for epoch in range(1, 4):
        for number, trial in enumerate(controller.trials):
            if trial.is_finished() or trial.status == Trial.PAUSED:
                continue
            trial.status = Trial.RUNNING
            value = rank(number) / 10 + epoch / 100
            result = {"epoch": epoch, "step": epoch, f"metrics/{METRIC}": value, METRIC: value, "seconds": 1.0}
            result["training_iteration"] = epoch
            decision = scheduler.on_trial_result(controller, trial, result)
            trial.update_last_result(result)
            if decision == TrialScheduler.STOP:
                scheduler.on_trial_complete(controller, trial, result)
                trial.status = Trial.TERMINATED
            elif decision == TrialScheduler.PAUSE:
                trial.status = Trial.PAUSED
    return study, scheduler, controller


def test_asha_knows_its_rungs_again(tmp_path: Path) -> None:
    study, scheduler, controller = simulate(tmp_path, "search=asha", "training.epochs=9")
    study.close()
    kept = {bool(trial.metric_analysis) for trial in controller.trials if trial.status == Trial.TERMINATED}
    assert kept == {False}  # memory stays flat over many trials
    again, restored, _ = simulate(tmp_path, "search=asha", "training.epochs=9")
    rungs = [(milestone, dict(recorded)) for milestone, recorded in scheduler._brackets[0]._rungs]
    assert rungs == [(milestone, dict(recorded)) for milestone, recorded in restored._brackets[0]._rungs]
    assert any(recorded for _, recorded in rungs)
    assert [r.state for r in again.records] == [r.state for r in study.records]
    assert again.records == study.records


def test_hyperband_knows_its_brackets_again(tmp_path: Path) -> None:
    study, scheduler, controller = simulate(tmp_path, "search=hyperband", "training.epochs=9", count=6)
    study.close()
    _, restored, again = simulate(tmp_path, "search=hyperband", "training.epochs=9")

    def shown(scheduler: Any) -> list[Any]:
        return [
            (bracket._n, bracket._r, bracket._halves, sorted(trial.trial_id for trial in bracket._live_trials))
            for band in scheduler._hyperbands
            for bracket in band
        ]

    assert shown(restored) == shown(scheduler)
    paused = [trial.trial_id for trial in controller.trials if trial.status == Trial.PAUSED]
    assert paused
    assert [trial.trial_id for trial in again.trials if trial.status == Trial.PAUSED] == paused


def test_optuna_has_seen_the_earlier_trials(tmp_path: Path) -> None:
    settings = ("search=optuna", "search.algorithm.n_startup_trials=3")
    study, _, controller = simulate(tmp_path, *settings)
    for number, trial in enumerate(controller.trials):
        result = {"epoch": 4, "step": 4, f"metrics/{METRIC}": number / 9, METRIC: number / 9, "seconds": 1.0}
        trial.status = Trial.RUNNING
        controller.scheduler.on_trial_complete(controller, trial, {**result, "state": "finished"})
    live = controller.algorithm.suggest(9)
    study.close()
    _, _, again = simulate(tmp_path, *settings)
    seen = [trial for trial in again.algorithm.searcher._ot_study.trials if trial.value is not None]  # type: ignore[attr-defined]
    assert [trial.value for trial in seen] == pytest.approx([max(n / 9, rank(n) / 10 + 0.03) for n in range(9)])
    assert again.algorithm.suggest(9) == live


def test_half_a_line_is_dropped(tmp_path: Path) -> None:
    path, objective = tmp_path / "search.jsonl", make_config().objective
    study = Study(path, objective)
    study.sampled({"optimizer.lr": 0.1})
    study.reported(0, 1, 10, {METRIC: 0.5}, 1.0)
    study.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event": "reported", "tri')
    study = Study(path, objective)
    study.reported(0, 1, 10, {METRIC: 0.7}, 1.0)  # known already
    study.reported(0, 2, 20, {METRIC: 0.6}, 1.0)
    study.close()
    assert path.read_bytes().startswith(whole)
    (record,) = records_of(RunDir(tmp_path), objective)
    assert (record.epochs, record.value) == (2, 0.6)


# --- exploits ----------------------------------------------------------------------------------------------------------------


def test_an_adoption_may_be_cut_anywhere(lab: Lab) -> None:
    """Killed between any two of its steps and done again, it has happened once."""
    short = ("scaling=in_process", "training.limit_train_batches=4", "training.test=false")
    donor = lab.run(*short, "training.epochs=3", "optimizer.lr=0.02")
    receiver = lab.run(*short, "training.epochs=4", "optimizer.lr=0.00001")
    before, own = history(receiver), load_checkpoint(receiver.checkpoints / "best")[1]
    assert place(donor, receiver, {"donor": 0, "values": {}, "index": 1}) == 3
    untouched = lab.folder / "untouched"
    shutil.copytree(receiver.path, untouched, symlinks=True)
    for cut in ("CheckpointWriter.save", "point", "rmtree"):
        shutil.rmtree(receiver.path)
        shutil.copytree(untouched, receiver.path, symlinks=True)
        code = (
            "import sys, os\nfrom pathlib import Path\nimport manta.training.checkpoint as c, manta.search.exploit as e\n"
            "def die(*a, **k): os._exit(9)\n"
            + {
                "CheckpointWriter.save": "c.CheckpointWriter.save = die\n",
                "point": "c.point = die\n",
                "rmtree": "e.shutil.rmtree = lambda p, **k: die() if str(p).endswith('adopt') else None\n",
            }[cut]
            + "from manta.runs import RunDir\ne.adopt(RunDir(Path(sys.argv[1])))\n"
        )
        done = subprocess.run([sys.executable, "-c", code, str(receiver.path)], cwd=ROOT, env=dict(os.environ))
        assert done.returncode == 9, cut
        assert placed(receiver) is not None
        adopt(receiver)
        assert placed(receiver) is None
        mine = load_checkpoint(receiver.checkpoints / "last")
        theirs = load_checkpoint(donor.checkpoints / "last")
        for name, tensor in theirs[0]["learner"]["model"].items():
            assert tensor.equal(mine[0]["learner"]["model"][name])
        lines = history(receiver)
        assert lines[: len(before)] == before
        assert [line["exploit"]["index"] for line in lines[len(before) :]] == [1], cut
        assert receiver.metrics.stat().st_size == mine[0]["metrics_bytes"]
        assert load_checkpoint(receiver.checkpoints / "best")[1]["metrics"] == own["metrics"]
        assert mine[0]["progress"]["best"]["step"] == own["step"]
    assert json.loads((receiver.path / "summary.json").read_text())
