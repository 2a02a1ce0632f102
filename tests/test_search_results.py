"""What a search leaves behind and shows: trials.csv, best/, search.md, summary.json, the live table."""

import io
import json
import math
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from rich.console import Console

import manta.evaluate
import manta.predict
from manta import arguments
from manta.checkpoints import Damaged
from manta.config import Config, Objective
from manta.runs import RunDir, read_lines, writing
from manta.search import best as best_module
from manta.search import results
from manta.search.best import best_of, publish_best
from manta.search.record import STOPPED, Record, trial_dir
from manta.search.report import plan_rows, result_rows, write_report
from manta.search.results import (
    all_failed,
    failures,
    importance,
    refit_summary,
    repeat_overrides,
    summary,
    write_csv,
)  # fmt: skip
from manta.search.space import Space
from manta.search.tuner import Search
from manta.training.checkpoint import load_checkpoint
from manta.view import View
from tests.conftest import ROOT, Lab, compose_run, make_config

BASE = ("training.epochs=4", "scheduler=constant", "seed=3", "training.precision=fp64",
        "objective={metric: val/loss, mode: min}")  # fmt: skip
LR, DROPOUT = "optimizer.lr", "model.choice.mlp.dropout"
SEARCH = ("search=asha", "search.num_samples=5", "search.scheduler.reduction_factor=2", "search.space.data.batch_size=null",
          "search.space.model={choice: {mlp: {dropout: 'uniform(0, 0.5)'}, cnn: {}}}")  # fmt: skip


def searched(*more: str) -> tuple[Config, Space]:
    """The configuration of the search, and its space."""
    config, _, space = compose_run(*BASE, "name=lrs", *SEARCH, *more)
    assert space is not None
    return config, space


CONFIG, SPACE = searched()
TRIALS: list[dict[str, Any]] = [
    {"model": "mlp", DROPOUT: 0.1, LR: 0.001},
    {"model": "mlp", DROPOUT: 0.0, LR: 0.02},  # its best epoch is not its last
    {"model": "cnn", DROPOUT: 0.3, LR: 0.0001},
]


def recorded(number: int, run: RunDir, values: dict[str, Any], **more: Any) -> Record:
    """A trial's record, from what it left."""
    found = run.read("summary.json")
    best = {"value": found["objective"]["value"], "values": values,
            **{key: found["best"][key] for key in ("epoch", "step", "metrics")}}  # fmt: skip
    epochs = found["epoch"]
    return Record(
        number, values, **{"state": "finished", "epoch": epochs, "epochs": epochs, "best": best, "seconds": 1.5, **more}
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, list[Record]]:
    """A search with three real trials, one that was stopped (of these) and two that failed."""
    folder = tmp_path_factory.mktemp("searched")
    search, lab, records = RunDir(folder / "search"), Lab(folder), []
    (search.path / "trials").mkdir(parents=True)
    SPACE.save(search)
    given = [
        *BASE,
        "name=lrs",
        "seed=4",
        *SEARCH,
        "search.space.optimizer.lr=loguniform(1e-4,1e-1)",
        "optimizer.lr=0.5",
    ]
    (search.path / "overrides.txt").write_text(f"{shlex.join(given)}\n{shlex.join(['resume=x', 'seed=3'])}\n")
    search.save_config(CONFIG)
    search.write("status.json", {"state": "finished"})
    for number, values in enumerate(TRIALS):
        run = lab.run("scaling=in_process", *BASE, *SPACE.overrides(values))
        shutil.move(run.path, trial_dir(search, number).path)
        records.append(recorded(number, trial_dir(search, number), values))
    records[2].state = STOPPED
    errors = [
        "loss is NaN at step 12",
        "Traceback (most recent call last):\n  File x\nValueError: loss is NaN at step 7",
        "disk | full",
    ]
    for number, error in enumerate(errors, start=3):
        records.append(Record(number, TRIALS[0], state="failed", epochs=number - 3, seconds=0.2, error=error))
    records[4].error = "loss is NaN at step 7"
    return search, records


@pytest.fixture
def search(made: tuple[RunDir, list[Record]], tmp_path: Path) -> RunDir:
    """A copy to change."""
    return RunDir(Path(shutil.copytree(made[0].path, tmp_path / "search", symlinks=True)))


@pytest.fixture
def records(made: tuple[RunDir, list[Record]]) -> list[Record]:
    return [replace(record) for record in made[1]]


# --- trials.csv --------------------------------------------------------------------------------------------------


def test_trials_csv(search: RunDir, records: list[Record]) -> None:
    records[5].error = 'Traceback (most recent call last):\n  File x\nValueError: a, "b"'
    write_csv(search, CONFIG, SPACE, records)
    rows = pd.read_csv(search.path / "trials.csv")
    assert list(rows) == ["trial", "status", "val/loss", "val/accuracy", "train/epoch_loss", "best_epoch", "epochs",
                          "time_s", "error", "directory", "optimizer.lr", "model", "model.dropout"]  # fmt: skip
    assert list(rows["trial"]) == [0, 1, 2, 3, 4, 5]
    assert list(rows["status"]) == ["finished", "finished", "stopped", "failed", "failed", "failed"]
    for record, (_, row) in zip(records[:3], rows.iterrows(), strict=False):
        assert record.best is not None
        assert row["val/loss"] == record.value
        assert row["val/accuracy"] == record.best["metrics"]["val/accuracy"]
        assert row["optimizer.lr"] == record.values[LR]
        assert (search.path / row["directory"] / "config.yaml").is_file()
    assert list(rows["model.dropout"][:2]) == [0.1, 0.0]
    assert math.isnan(rows["model.dropout"][2]), "cnn has no such setting"
    assert rows["val/loss"][3:].isna().all()
    assert rows["error"][5] == 'ValueError: a, "b"'
    assert [path.name for path in search.path.glob(".*")] == []


def test_values_of_the_best_not_the_latest(search: RunDir, records: list[Record]) -> None:
    """Under population based training a trial's values change."""
    records[0].values = {**TRIALS[0], LR: 0.09}
    write_csv(search, CONFIG, SPACE, records)
    assert pd.read_csv(search.path / "trials.csv")["optimizer.lr"][0] == TRIALS[0][LR]


# --- best/ -------------------------------------------------------------------------------------------------------


def evaluated(*given: str) -> int:
    """What `python scripts/evaluate.py <given>` exits with."""
    return arguments.main(manta.evaluate.Arguments, manta.evaluate.evaluate, ["scripts/evaluate.py", *given], ROOT)


def predicted(*given: str) -> int:
    call = ["scripts/predict.py", *given]
    return arguments.main(
        manta.predict.Arguments, lambda typed: manta.predict.predict(typed, ROOT / "conf"), call, ROOT
    )


def test_best_is_a_run(search: RunDir, records: list[Record], capsys: pytest.CaptureFixture[str]) -> None:
    best = records[1].best
    assert best is not None
    assert 1 <= best["epoch"] < 4, "the case this is about"
    assert publish_best(search, SPACE, records[1])
    run = best_of(search)
    assert os.readlink(run.path / "checkpoint") == os.path.join("checkpoints", os.readlink(run.checkpoints / "best"))
    assert os.readlink(run.checkpoints / "last") == f"step-{best['step']:08d}"
    state, source = run.path / "checkpoint" / "state.pt", trial_dir(search, 1).checkpoints / "best" / "state.pt"
    assert os.stat(state).st_ino == os.stat(source).st_ino, "a second name, no copy"
    assert evaluated(f"run={search.path}", "splits=[val]") == 0
    found = json.loads((run.path / "evaluation-best.json").read_text())
    assert found["metrics"]["val/loss"] == pytest.approx(best["value"], rel=0, abs=1e-12)
    shown = capsys.readouterr().out
    assert "is a search: taking its best, trial 1, from" in shown
    assert predicted(f"run={search.path}") == 0
    assert len(pd.read_csv(run.path / "predictions.csv")) == 180
    assert {path.name for path in run.path.iterdir()} - {"uncommitted.diff"} == {
        "config.yaml", "overrides.txt", "status.json", "summary.json", "provenance.json", "metrics.jsonl", "workers.json",
        "checkpoints", "checkpoint", "evaluation-best.json", "predictions.csv",
    }  # fmt: skip
    written = run.read("summary.json")
    assert (written["state"], written["trial"], written["step"]) == ("interrupted", 1, best["step"])
    assert written["objective"] == {"metric": "val/loss", "mode": "min", "value": best["value"]}
    assert read_lines(run.metrics)[-1]["step"] == best["step"]
    assert [path.name for path in search.path.glob(".*")] == []


def test_best_resumes_to_what_the_trial_became(search: RunDir, records: list[Record], lab: Lab) -> None:
    assert publish_best(search, SPACE, records[1])
    run = best_of(search)
    assert lab.launch(f"resume={run.path}") == 0
    mine, trial = (load_checkpoint(each.checkpoints / "last")[0] for each in (run, trial_dir(search, 1)))
    for key, value in trial["learner"]["model"].items():
        assert torch.equal(mine["learner"]["model"][key], value)
    assert len(read_lines(run.metrics)) == len(read_lines(trial_dir(search, 1).metrics))
    assert publish_best(search, SPACE, records[0]), "a better one comes"
    assert best_of(search).read("summary.json")["trial"] == 0
    (kept,) = search.path.glob("best-resumed-*")
    assert RunDir(kept).read("summary.json")["state"] == "finished"


def test_what_ended_with_its_best_is_finished(search: RunDir, records: list[Record], lab: Lab) -> None:
    assert records[2].best is not None
    assert records[2].best["epoch"] == 4
    assert publish_best(search, SPACE, records[2])
    run = best_of(search)
    assert run.read("status.json")["state"] == run.read("summary.json")["state"] == "finished"
    assert lab.launch(f"resume={run.path}", "training.epochs=5") == 0
    assert run.read("summary.json")["epoch"] == 5


def test_a_better_one_replaces_it(search: RunDir, records: list[Record]) -> None:
    for number in (0, 1, 1, 2):
        assert publish_best(search, SPACE, records[number])
        best = best_of(search)
        assert best.read("summary.json")["trial"] == number
        assert yaml.safe_load((best.path / "config.yaml").read_text())["optimizer"]["lr"] == TRIALS[number][LR]
    assert [path.name for path in search.path.glob(".*")] == []


def test_a_report_that_comes_while_it_is_published(
    search: RunDir, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What best/ says is what its checkpoint is."""
    before, copy = records[1].best, best_module._copy_checkpoint

    def slow(*given: Any) -> dict[str, Any]:
        found = copy(*given)
        records[1].best = {**(before or {}), "step": 999, "value": 0.0}
        return found

    monkeypatch.setattr(best_module, "_copy_checkpoint", slow)
    assert publish_best(search, SPACE, records[1])
    shown = best_of(search).read("summary.json")
    assert before is not None
    assert (shown["step"], shown["objective"]["value"]) == (before["step"], before["value"])
    assert load_checkpoint(best_of(search).path / "checkpoint")[1]["step"] == before["step"]


def test_published_once(search: RunDir, records: list[Record]) -> None:
    assert publish_best(search, SPACE, records[1])
    inode = best_of(search).path.stat().st_ino
    assert publish_best(search, SPACE, records[1])
    assert best_of(search).path.stat().st_ino == inode


def test_the_values_its_checkpoint_was_trained_with(search: RunDir, records: list[Record]) -> None:
    """Under population based training the trial goes on with other values than those of its best."""
    records[1].exploits = [{"donor": 0, "epoch": 2, "values": TRIALS[1]}]
    assert records[1].best is not None
    records[1].best = {**records[1].best, "values": {**TRIALS[1], LR: 0.03}}
    assert publish_best(search, SPACE, records[1])
    run = best_of(search)
    assert yaml.safe_load((run.path / "config.yaml").read_text())["optimizer"]["lr"] == 0.03
    assert run.read("summary.json")["values"][LR] == 0.03
    assert "optimizer.lr=0.03" in shlex.split((run.path / "overrides.txt").read_text())


def test_a_best_that_an_exploit_renamed(search: RunDir, records: list[Record]) -> None:
    """The trial's own best is kept under another name, and the step's is the donor's line now."""
    best, checkpoints = records[1].best, trial_dir(search, 1).checkpoints
    assert best is not None
    step = checkpoints / f"step-{best['step']:08d}"
    kept = step.rename(checkpoints / f"kept-1-{step.name}")
    shutil.copytree(trial_dir(search, 0).checkpoints / "best", step)
    meta = json.loads((step / "meta.json").read_text())
    (step / "meta.json").write_text(json.dumps({**meta, "step": best["step"]}))
    (checkpoints / "best").unlink()
    (checkpoints / "best").symlink_to(kept.name)
    assert publish_best(search, SPACE, records[1])
    state = best_of(search).checkpoints / step.name / "state.pt"
    assert state.stat().st_ino == (kept / "state.pt").stat().st_ino
    (checkpoints / "best").unlink()
    shutil.rmtree(search.path / "best")
    assert not publish_best(search, SPACE, records[1])


def test_a_checkpoint_that_is_gone_leaves_the_old_one(
    search: RunDir, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert publish_best(search, SPACE, records[0])
    checkpoints = trial_dir(search, 1).checkpoints
    assert records[1].best is not None
    name = f"step-{records[1].best['step']:08d}"
    link = best_module.link_or_copy

    def retired(source: Path, target: Path) -> None:
        """The trial's own retention comes while it is copied."""
        if source.name == "state.pt":
            shutil.rmtree(checkpoints / name)
        link(source, target)

    monkeypatch.setattr(best_module, "link_or_copy", retired)
    assert not publish_best(search, SPACE, records[1])
    assert best_of(search).read("summary.json")["trial"] == 0
    assert load_checkpoint(best_of(search).path / "checkpoint")[1]["epoch"] == 4
    assert [path.name for path in search.path.glob(".*")] == []


def test_a_checkpoint_that_comes_a_little_later(
    search: RunDir, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert records[1].best is not None
    checkpoint = trial_dir(search, 1).checkpoints / f"step-{records[1].best['step']:08d}"
    hidden = checkpoint.rename(checkpoint.with_name(".writing"))
    monkeypatch.setattr(best_module.time, "sleep", lambda _: hidden.exists() and hidden.rename(checkpoint))
    assert publish_best(search, SPACE, records[1])


def test_half_a_checkpoint_is_none(search: RunDir, records: list[Record]) -> None:
    assert records[1].best is not None
    state = trial_dir(search, 1).checkpoints / f"step-{records[1].best['step']:08d}" / "state.pt"
    content = state.read_bytes()
    state.unlink()
    for damaged in (content[:-10], content[:-10] + bytes(10)):
        state.write_bytes(damaged)
        with pytest.raises(Damaged, match=r"step-\d+ cannot be used: (the content of )?state\.pt"):
            publish_best(search, SPACE, records[1])
        assert not (search.path / "best").exists()
        assert [path.name for path in search.path.glob(".*")] == []
    state.unlink()
    state.symlink_to("/dev/zero")
    with pytest.raises(Damaged, match=r"state\.pt is a link"):
        publish_best(search, SPACE, records[1])
    (state.parent / "meta.json").write_text("{")
    with pytest.raises(Damaged, match=r"meta\.json is not JSON"):
        publish_best(search, SPACE, records[1])
    assert publish_best(search, SPACE, records[0])


def test_a_damaged_best_is_said_once(search: RunDir, records: list[Record]) -> None:
    """The search asks several times a second, and at its end takes the next best."""
    assert records[1].best is not None
    os.truncate(trial_dir(search, 1).checkpoints / f"step-{records[1].best['step']:08d}" / "state.pt", 9)
    driver, said = object.__new__(Search), []
    driver.run, driver.space, driver._refused = search, SPACE, set()
    driver.view = SimpleNamespace(say=said.append)  # type: ignore[assignment]
    found = [driver._publish(record) for record in (records[1], records[1], records[0])]
    assert found == [False, False, True]
    assert len(said) == 1
    assert said[0].startswith("Trial 1 is the best so far, but it cannot be kept in best/: Checkpoint ")
    assert said[0].endswith(".")
    assert best_of(search).read("summary.json")["trial"] == 0


def test_without_hard_links(search: RunDir, records: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert publish_best(search, SPACE, records[1])
    state = best_of(search).path / "checkpoint" / "state.pt"
    assert state.stat().st_nlink == 1
    assert load_checkpoint(state.parent)[1]["epoch"] == best_of(search).read("summary.json")["epoch"]


def test_a_best_that_is_being_trained_stays(search: RunDir, records: list[Record]) -> None:
    assert publish_best(search, SPACE, records[1])
    with writing(best_of(search)):
        assert not publish_best(search, SPACE, records[0])
    assert publish_best(search, SPACE, records[0])


def _publish_for_ever(search: RunDir, records: list[Record], exchange: bool) -> None:
    if not exchange:
        best_module.exchange = lambda *_: False  # type: ignore[assignment]
    for turn in range(10_000):
        publish_best(search, SPACE, records[turn % 3])


@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_leaves_the_old_or_the_new_one(search: RunDir, records: list[Record], exchange: bool) -> None:
    """At any moment, with and without the system call that exchanges two names."""
    publish_best(search, SPACE, records[0])
    seen, moments = set(), random.Random(0)
    for _ in range(12):
        child = multiprocessing.get_context("fork").Process(target=_publish_for_ever, args=(search, records, exchange))
        child.start()
        time.sleep(moments.uniform(0.02, 0.25))
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        if exchange:
            assert (search.path / "best").is_dir()
        best = best_of(search)
        trial = best.read("summary.json")["trial"]
        seen.add(trial)
        assert yaml.safe_load((best.path / "config.yaml").read_text())["optimizer"]["lr"] == TRIALS[trial][LR]
        meta = load_checkpoint(best.path / "checkpoint")[1]
        assert meta["step"] == best.read("summary.json")["step"]
    assert len(seen) > 1
    assert publish_best(search, SPACE, records[1])
    assert publish_best(search, SPACE, records[2])
    assert sorted(path.name for path in search.path.iterdir() if "best" in path.name and path.name != ".best-new") == [
        "best"
    ]


def test_a_kill_between_two_renames(search: RunDir, records: list[Record]) -> None:
    """Where names cannot be exchanged: readers find the old one, and the next publication goes on."""
    publish_best(search, SPACE, records[0])
    (search.path / "best").rename(search.path / ".best-old")
    assert best_of(search).read("summary.json")["trial"] == 0
    assert publish_best(search, SPACE, records[0])
    assert (search.path / "best" / "config.yaml").is_file()
    assert not (search.path / ".best-old").exists()


def test_reading_a_best_that_is_replaced(search: RunDir, records: list[Record]) -> None:
    publish_best(search, SPACE, records[1])
    with manta.evaluate.published(best_of(search), "best") as checkpoint:
        publish_best(search, SPACE, records[0])
        assert records[1].best is not None
        assert load_checkpoint(checkpoint)[1]["step"] == records[1].best["step"]
    assert not list(search.path.glob(".reading-*"))


def test_a_search_without_a_best(search: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (search.path.parent / "latest").symlink_to("search")
    for command in (evaluated, predicted):
        assert command("run=latest", f"storage.path={search.path.parent}") == 2
        error = capsys.readouterr().err
        assert "is a search, and none of its trials has a validated checkpoint yet" in error
        assert "Traceback" not in error


# --- what mattered -----------------------------------------------------------------------------------------------


def synthetic(trials: int, noise: float = 0.0) -> list[Record]:
    """The loss depends on the logarithm of the learning rate, of which most samples are small, and on nothing else."""
    draw = random.Random(1)
    found = []
    for number in range(trials):
        values = {"model": draw.choice(["mlp", "cnn"]), DROPOUT: draw.uniform(0, 0.5), LR: 10 ** draw.uniform(-4, -1)}
        value = (math.log10(values[LR]) + 2.5) ** 2 + noise * draw.gauss(0, 1)
        found.append(
            Record(number, values, best={"value": value, "epoch": 1, "step": 1, "metrics": {}, "values": values})
        )
    return found


def test_the_setting_that_matters() -> None:
    found = importance(SPACE, synthetic(40, noise=0.05), Objective("val/loss", "min"))
    assert next(iter(found)) == LR
    assert found[LR] > 0.9
    assert sum(found.values()) == pytest.approx(1)
    assert set(found) == {"model", "model.dropout", LR}
    assert found == importance(SPACE, synthetic(40, noise=0.05), Objective("val/loss", "min")), "the same again"


def test_a_choice_that_matters() -> None:
    records = synthetic(30)
    for record in records:
        assert record.best is not None
        record.best["value"] = 0.1 + (record.values["model"] == "cnn")
    found = importance(SPACE, records, Objective("val/loss", "min"))
    assert next(iter(found)) == "model"
    assert found["model"] > 0.9, "not shared with the dropout that only one of them has"


def test_logarithmic_domains_are_seen_on_their_scale() -> None:
    from manta.search.results import _feature

    assert _feature(SPACE, LR, [0.001, 0.1]) == pytest.approx([math.log(0.001), math.log(0.1)])
    assert _feature(SPACE, "model", ["cnn", "mlp"]) == [1.0, 0.0]
    assert _feature(SPACE, "model.dropout", [0.1, None, 0.4, 0.3]) == [0.1, 0.3, 0.4, 0.3]
    assert _feature(SPACE, "model.dropout", [None]) == [0.0]


def test_when_nothing_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = Objective("val/loss", "min")
    with monkeypatch.context() as patch:
        patch.setattr(results, "_importance", lambda *_: {LR: 2.0, "model": 0.0})
        assert importance(SPACE, synthetic(5), objective) == {}
        assert importance(SPACE, synthetic(6), objective) == {LR: 1.0, "model": 0.0}
    same = synthetic(10)
    for record in same:
        assert record.best is not None
        record.best["value"] = 1.0
    assert importance(SPACE, same, objective) == {}
    chance, draw = synthetic(20), random.Random(7)
    for record in chance:
        assert record.best is not None
        record.best["value"] = draw.random()
    assert importance(SPACE, chance, objective) == {}
    broken = synthetic(10)
    assert broken[0].best is not None
    broken[0].best["values"] = {LR: "not a number"}
    assert isinstance(importance(SPACE, broken, objective), dict)
    broken[0].best["values"] = {"model": "gone"}
    monkeypatch.setattr(results, "_importance", lambda *_: 1 / 0)
    assert importance(SPACE, broken, objective) == {}, "it raises nothing"


# --- refit, summary, report --------------------------------------------------------------------------------------


def refits(search: RunDir, count: int) -> dict[str, Any]:
    """Of trials that play refits: their test metrics are known."""
    return refit_summary(search, [trial_dir(search, number) for number in range(count)])


def test_refit(search: RunDir) -> None:
    tests = [trial_dir(search, number).read("summary.json")["test"]["test/accuracy"] for number in range(3)]
    found = refits(search, 3)
    assert found["seeds"] == [3, 3, 3]
    assert found["runs"] == ["trials/00000", "trials/00001", "trials/00002"]
    accuracy = found["test"]["test/accuracy"]
    assert accuracy["values"] == tests
    assert accuracy["mean"] == pytest.approx(sum(tests) / 3)
    assert accuracy["std"] == pytest.approx(pd.Series(tests).std())
    assert set(found["val"]) == {"val/loss", "val/accuracy"}
    assert refits(search, 1)["test"]["test/accuracy"] == {"mean": tests[0], "std": None, "values": tests[:1]}
    assert refits(search, 0) == {"seeds": [], "runs": [], "val": {}, "test": {}}


def test_summary(search: RunDir, records: list[Record]) -> None:
    first = min(records[:3], key=lambda record: record.value or 0)
    found = summary(search, CONFIG, SPACE, records, refits(search, 2), {LR: 1.0}, "finished")
    search.write("summary.json", found)
    assert search.read("summary.json") == found
    assert first.best is not None
    assert found["objective"] == {"metric": "val/loss", "mode": "min", "value": first.value}
    assert found["best"]["trial"] == first.number
    assert found["best"]["metrics"] == first.best["metrics"]
    assert found["best"]["values"] == SPACE.active(first.values)
    assert found["trials"] == {"running": 0, "finished": 2, "stopped": 1, "failed": 3}
    assert found["epochs"] == 4 + 4 + 4 + 0 + 1 + 2
    assert found["test"]["test/accuracy"] == found["refit"]["test"]["test/accuracy"]["mean"]
    assert found["resume_command"].endswith(f"resume={search}")


def test_summary_of_nothing(search: RunDir) -> None:
    found = summary(search, CONFIG, SPACE, [], {}, {}, "interrupted")
    assert (found["best"], found["objective"]["value"], found["test"], found["epochs"]) == (None, None, {}, 0)
    write_report(search, CONFIG, SPACE, [], found)
    assert "None was validated." in (search.path / "search.md").read_text()
    assert not {"best", "repeat best"} & dict(result_rows(search, CONFIG, SPACE, found, "interrupted", 1.0)).keys()
    write_csv(search, CONFIG, SPACE, [])
    assert len(pd.read_csv(search.path / "trials.csv")) == 0


def test_failures_are_grouped(records: list[Record]) -> None:
    assert failures(records) == [("loss is NaN at step 12", 2), ("disk | full", 1)]


def test_report(search: RunDir, records: list[Record]) -> None:
    found = summary(search, CONFIG, SPACE, records, refits(search, 3), {LR: 0.8, "model": 0.2}, "finished")
    write_report(search, CONFIG, SPACE, records, found)
    text = (search.path / "search.md").read_text()
    first = min(records[:3], key=lambda record: record.value or 0)
    assert "2 finished, 1 stopped early, 3 failed: loss is NaN at step 12 (2 of them); 15 epochs trained" in text
    assert "| `optimizer.lr` | `loguniform(1e-4, 1e-1)` |" in text
    assert "asha (grace_period 1, reduction_factor 2, brackets 1)" in text
    assert f"| 1 | {first.number} | {first.value:.4f} | 4 |" in text
    assert text.index("| 1 | ") < text.index("| 2 | ") < text.index("| 3 | ")
    assert "| `optimizer.lr` | 80% |" in text
    assert "| 2 | loss is NaN at step 12 |" in text
    assert "| 1 | disk \\| full |" in text
    mean = refits(search, 3)["test"]["test/accuracy"]
    assert f"| test/accuracy | {mean['mean']:.4f} ± {mean['std']:.4f} | " in text
    assert text.count("```bash\npython train.py ") == 1
    assert [path.name for path in search.path.glob(".*")] == []


def test_the_command_repeats_the_best(search: RunDir, records: list[Record], lab: Lab) -> None:
    first = min(records[:3], key=lambda record: record.value or 0)
    write_report(search, CONFIG, SPACE, records, summary(search, CONFIG, SPACE, records, {}, {}, "finished"))
    text = (search.path / "search.md").read_text()
    (command,) = [line for line in text.splitlines() if line.startswith("python train.py")]
    given = shlex.split(command)[2:]
    assert not [text for text in given if text.startswith(("search", "resume", "+search"))]
    assert "name=lrs" in given
    keys = [text.partition("=")[0] for text in given]
    assert len(keys) == len(set(keys)), "no setting twice"
    assert make_config(*given).optimizer["lr"] == first.values[LR]
    run = lab.run("scaling=in_process", *given)
    assert run.read("summary.json")["objective"]["value"] == first.value


def test_a_search_from_an_experiment_is_switched_off(search: RunDir) -> None:
    (search.path / "overrides.txt").write_text("experiment=digits_vit plan=false\n")
    assert repeat_overrides(search, SPACE, TRIALS[0]) == [
        "experiment=digits_vit", "search=none", "model=mlp", "model.dropout=0.1", "optimizer.lr=0.001"
    ]  # fmt: skip
    (search.path / "overrides.txt").write_text("model=vit search/algorithm=optuna\n")
    assert repeat_overrides(search, SPACE, TRIALS[2]) == ["model=cnn", "optimizer.lr=0.0001"]


def test_result_rows(search: RunDir, records: list[Record]) -> None:
    found = summary(search, CONFIG, SPACE, records, refits(search, 3), {}, "finished")
    rows = dict(result_rows(search, CONFIG, SPACE, found, "finished", 61.25))
    first = min(records[:3], key=lambda record: record.value or 0)
    assert first.best is not None
    assert rows["best"].startswith(f"trial {first.number}, epoch {first.best['epoch']}: val/loss {first.value:.4f}")
    assert "optimizer.lr=0." in rows["values"]
    assert "±" in rows["refit test"]
    assert rows["epochs"] == "15 trained of at most 24"
    assert rows["extend"] == f"python train.py resume={search} search.num_samples=10"
    assert rows["evaluate"] == f"python scripts/evaluate.py run={search}"
    assert rows["repeat best"].startswith("python train.py training.epochs=4")
    assert "resume" not in rows
    interrupted = dict(result_rows(search, CONFIG, SPACE, {**found, "refit": {}, "test": {}}, "interrupted", 1.0))
    assert interrupted["resume"] == f"python train.py resume={search}"
    assert "extend" not in interrupted and "refit test" not in interrupted
    assert rows["time"] == "61.2 s"
    assert "values" not in dict(result_rows(search, CONFIG, SPACE, {}, "interrupted", 1.0)), "killed before the end"


def test_plan_rows() -> None:
    config, space = searched("training.epochs=8", "search.num_samples=16")
    rows = dict(plan_rows(config, space, "1 CPU", 3))
    assert rows[LR] == "loguniform(1e-4, 1e-1)"
    assert rows["model"] == "choice(mlp, cnn)"
    assert rows["trials"] == "16"
    assert rows["at once"] == "3 (6 waves)"
    # Rungs at 1, 2, 4, 8 epochs: 16 trials train 1 each, 8 one more, 4 two more, 2 four more.
    assert rows["epochs"] == "16 x 8 = 128 at most; about 40 with successive halving"
    config, space = compose_run(
        "search=random", "search.num_samples=null", "search.time_budget_s=60", "search.refit=false"
    )[::2]
    assert space is not None
    rows = dict(plan_rows(config, space, "1 CPU", 3))
    assert rows["trials"] == "as many as the time allows, 60 s at most"
    assert rows["scheduler"].startswith("none")
    assert "epochs" not in rows and "refit" not in rows
    config, _, grid = compose_run("search=grid", "training.epochs=2")
    assert grid is not None
    rows = dict(plan_rows(config, grid, "1 CPU", 3))
    assert rows["trials"] == str(len(grid.grid()))


def test_all_failed(records: list[Record]) -> None:
    assert all_failed(records[3:5]) == "No trial was validated. All 2 failed with: loss is NaN at step 12"
    assert "2 of 3 failed with" in all_failed(records[3:])


def test_what_population_based_training_did(search: RunDir, records: list[Record]) -> None:
    """It is shown, and no command claims to repeat it."""
    records[1].exploits = [{"donor": 0, "epoch": 2, "values": {**TRIALS[1], LR: 0.03}}]
    found = summary(search, CONFIG, SPACE, records, {}, {}, "finished")
    found["test"] = {"test/accuracy": 0.5}
    assert found["repeat_command"] is None
    write_report(search, CONFIG, SPACE, records, found)
    text = (search.path / "search.md").read_text()
    assert "| 2 | 0 | model=mlp  model.dropout=0  optimizer.lr=0.03 |" in text
    assert "| test/accuracy | 0.5000 |" in text
    assert "Repeat" not in text
    rows = dict(result_rows(search, CONFIG, SPACE, found, "finished", 1.0))
    assert rows["test"] == "test/accuracy 0.5000" and "repeat best" not in rows


# --- the view ----------------------------------------------------------------------------------------------------


@contextmanager
def shown(folder: Path, width: int = 0) -> Iterator[View]:
    """A view whose terminal writes into a string; with a width it is a real one."""
    view = View()
    real = {"force_terminal": True, "width": width, "height": 40, "_environ": {"TERM": "xterm"}} if width else {}
    view.terminal = Console(file=io.StringIO(), highlight=False, soft_wrap=True, **real)  # type: ignore[arg-type,assignment]
    view.open_log(folder / "train.log")
    yield view
    view.close()


def screen(view: View) -> str:
    return view.terminal.file.getvalue()  # type: ignore[attr-defined]


def test_lines_without_a_terminal(records: list[Record], tmp_path: Path) -> None:
    with shown(tmp_path) as view, view.search_progress(CONFIG, SPACE, 6, known=records[:1]):
        running = [replace(records[1], state="running"), replace(records[2], state="running")]
        view.trials([records[0], *running], running, 0, 60)
        assert screen(view) == "", "nothing has ended since"
        view.trials([*records[:2], running[1]], running[1:], 0, 60)
        view.trials([*records[:2], running[1]], running[1:], 0, 50)
        view.trials(records, [], 0, None)
        lines = screen(view).splitlines()
        assert len(lines) == 5
        assert lines[0].startswith(f"trial   1  finished  val/loss {records[1].value:.4f}  4 epochs  1.5 s  model=mlp")
        assert lines[1].startswith("trial   2  stopped ")
        assert lines[2].endswith("loss is NaN at step 12")
        best = min(records[:3], key=lambda record: record.value or 0)
        assert [line for line in lines if "best so far" in line] == [
            line for line in lines if line.startswith(f"trial   {best.number} ")
        ]
        again = [replace(record, state="running") if record.number == 3 else record for record in records]
        view.trials(again, again[3:4], 0, None)
        view.trials(records, [], 0, None)
        assert len(screen(view).splitlines()) == 6, "tried again, ended again"
    assert (tmp_path / "train.log").read_text().splitlines() == screen(view).splitlines()


def test_the_table_on_a_terminal(records: list[Record], tmp_path: Path) -> None:
    running = [Record(6 + number, TRIALS[number % 3], epoch=number) for number in range(10)]
    with shown(tmp_path, width=150) as view, view.search_progress(CONFIG, SPACE, 40):
        view.trials([*records, *running], running, 2, 200.4)
        time.sleep(0.5)
        best = min(records[:3], key=lambda record: record.value or 0)
        text = screen(view)
        assert (
            "trials 16/40 · running 10 · waiting 2 · finished 2 · stopped 1 · failed 3 · "
            f"best val/loss {best.value:.4f} (trial {best.number}) · ETA 03:20"
        ) in text
        assert "trial  13  epoch   7/4" in text
        assert "trial  14 " not in text and "and 2 more" in text
        assert "model=mlp  model.dropout=0.1  optimizer.lr=0.001" in text
        assert "trial   3  failed" in text and "trial   0  finished" not in text
        view.say("in between")
        time.sleep(0.3)
    log = (tmp_path / "train.log").read_text()
    assert "trial   0  finished" in log and "trial   3  failed" in log and "in between" in log
    assert "\x1b" not in log


def test_one_table_whatever_the_width(records: list[Record], tmp_path: Path) -> None:
    """A line that the terminal itself would break moves everything that is drawn after it."""
    running = [Record(6, TRIALS[0], epoch=2), Record(7, TRIALS[2], epoch=3)]
    with shown(tmp_path, width=40) as view:
        with view.search_progress(CONFIG, SPACE, None):
            for turn in range(3):
                view.trials([*records[:3], *running[: turn + 1]], running[: turn + 1], 0, 10.0 * turn)
                view.say(f"line {turn} in between")
                time.sleep(0.35)
            seen = terminal(screen(view), width=40)
            assert seen[:3] == [f"line {turn} in between" for turn in range(3)]
            assert seen[3].startswith("trials 5 · running 2 · finished 2")
            assert seen[4].startswith("trial   6  epoch   2/4           -  mod…")
            assert len(seen) == 6
        view.say("the end")
    assert terminal(screen(view), width=40) == [*seen[:3], "the end"], "the table goes when the search ends"


def terminal(written: str, width: int) -> list[str]:
    """What a terminal shows after all that was written to it."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|[^\x1b]", written):
        if re.fullmatch(r"\x1b\[\d*A", part):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\r":
            column = 0
        elif part == "\n" or (len(part) == 1 and column == width):
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        if len(part) == 1 and part not in "\r\n":
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]
