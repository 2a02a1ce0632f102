"""scripts/report.py, and the page of a search: what it shows is what the files say, whatever became of a run."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import yaml
from PIL import Image

from manta import arguments, runs
from manta.report.after import report_after
from manta.report.command import Arguments, report
from manta.report.history import MOST_POINTS, curve, thin
from manta.report.style import CONFIGS
from manta.report.trials import best_so_far
from manta.runs import RunDir, read_lines
from manta.search import results
from manta.search.record import STOPPED
from manta.search.study import EVENTS, Study
from manta.view import View, number
from tests.conftest import ROOT, Lab, compose_run, summary

SETTINGS = ("scaling=in_process", "model=mlp", "training.epochs=3", "training.test=true", "seed=1")
SEARCH = ("search=asha", "training.epochs=9", "search.space.model=choice(mlp, cnn)",
          "search.space.model.choice.mlp.dropout=uniform(0, 0.5)")  # fmt: skip


def command(*given: str) -> int:
    """What `python scripts/report.py <given>` exits with."""
    return arguments.main(Arguments, report, ["scripts/report.py", *given], ROOT)


class Page:
    """A page as a browser gets it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.html = (folder / "report.html").read_text()
        match = re.search(r'<script type="application/json" id="charts">(.*?)</script>', self.html, re.DOTALL)
        self.charts: dict[str, Any] = json.loads(match.group(1))["specs"] if match else {}
        self.body = re.sub(r"<(script|style)\b.*?</\1>", "", self.html, flags=re.DOTALL)

    @property
    def text(self) -> str:
        """What is read, without tags."""
        return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", self.body)))

    def values(self, chart: str, **wanted: Any) -> list[dict[str, Any]]:
        """The data of a chart that have these fields."""
        found = [row for rows in self.charts[chart]["datasets"].values() for row in rows]
        return [row for row in found if all(key in row and row[key] == value for key, value in wanted.items())]


def page_of(run: RunDir) -> Page:
    assert command(f"run={run.path}") == 0
    return Page(run.path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return Lab(tmp_path_factory.mktemp("reported")).run(*SETTINGS)


@pytest.fixture(scope="module")
def page(run: RunDir) -> Page:
    return page_of(run)


def copy(run: RunDir, folder: Path, **config: Any) -> RunDir:
    """The same run elsewhere, with other settings in its config.yaml."""
    shutil.copytree(run.path, folder, symlinks=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **config}))
    return RunDir(folder)


def make_search(folder: Path, *more: str, state: str = runs.FINISHED) -> tuple[RunDir, Study, Any]:
    """The directory of a search that has begun; `conclude` writes what its end would."""
    config, _, space = compose_run(f"storage.path={folder}", *SEARCH, *more)
    assert space is not None
    search = RunDir(folder / "search")
    search.path.mkdir(parents=True)
    search.begin(config, list(more))
    space.save(search)
    study = Study(search.path / EVENTS, config.objective)

    def conclude(refit: dict[str, Any] | None = None) -> None:
        study.close()
        importances = results.importance(space, study.records, config.objective)
        search.write(
            "summary.json", results.summary(search, config, space, study.records, refit or {}, importances, state)
        )

    return search, study, conclude


def values(number: int) -> dict[str, Any]:
    """What was sampled for a trial: every third is a cnn, which has no dropout."""
    chosen = {"optimizer.lr": 10 ** (-4 + 3 * ((number * 7) % 10) / 10), "data.batch_size": (32, 64, 128)[number % 3]}
    return {**chosen, "model": "mlp" if number % 3 else "cnn", "model.choice.mlp.dropout": 0.05 * (number % 10)}


def some_trials(study: Study, count: int, epochs: int = 3) -> None:
    """Trials of which every fourth is stopped after an epoch, and trial 2 fails."""
    for trial in range(count):
        study.sampled(values(trial))
    for epoch in range(1, epochs + 1):
        for trial in range(count):
            if study.records[trial].state == runs.RUNNING:
                accuracy = 0.5 + 0.04 * epoch + 0.05 * (trial % 7)
                study.reported(trial, epoch, 10 * epoch, {"val/accuracy": accuracy, "val/loss": 1 - accuracy}, 0.01)
            if epoch == 1 and trial % 4 == 3:
                study.ended(trial, STOPPED)
    for trial in range(count):
        if study.records[trial].state == runs.RUNNING:
            study.failed(trial, 'ValueError: <b>bad</b> & "worse"') if trial == 2 else study.ended(trial, runs.FINISHED)


# --- a run -----------------------------------------------------------------------------------------------------------


def test_curves_are_the_lines_of_metrics_jsonl(run: RunDir, page: Page) -> None:
    lines = read_lines(run.metrics)
    for chart, curve_name, key in (("loss", "train loss", "train/loss"), ("loss", "val loss", "val/loss"),
                                   ("accuracy", "val accuracy", "val/accuracy"), ("learning_rate", "learning rate", "train/lr"),
                                   ("throughput", "training", "samples_per_s")):  # fmt: skip
        wanted = [(line["step"], line[key]) for line in lines if key in line]
        if chart == "throughput":
            wanted = [(line["step"], line[key]) for line in lines if "train/loss" in line]
        assert [(row["x"], row["y"]) for row in page.values(chart, s=curve_name)] == wanted
        assert wanted


def test_headline_numbers(run: RunDir, page: Page) -> None:
    told = summary(run)
    assert f"val/accuracy, highest {number(told['objective']['value'])}" in page.text
    assert f"epoch {told['best']['epoch']} step {told['best']['step']}" in page.text
    assert f"test/accuracy {number(told['test']['test/accuracy'])}" in page.text
    assert f"commit {run.read('provenance.json')['git']['commit'][:8]}" in page.text
    assert f"python train.py {(run.path / 'overrides.txt').read_text().strip()}" in page.text
    assert "finished" in page.text


def test_predictions_are_those_of_the_best_checkpoint_on_validation(run: RunDir, page: Page) -> None:
    cells = page.values("confusion")
    right = sum(cell["count"] for cell in cells if cell["target"] == cell["prediction"])
    assert sum(cell["count"] for cell in cells) == 180
    assert right / 180 == pytest.approx(summary(run)["best"]["metrics"]["val/accuracy"])
    pictures = re.findall(r"<img src='data:image/png;base64,[^']+' alt='validation sample (\d+)'", page.html)
    assert len(pictures) == len(set(pictures)) == min(180 - right, 18)
    (target, prediction, probability) = re.findall(
        r"<b>(\d)</b>, taken for <b class='no'>(\d)</b><small>p (\S+), of", page.html
    )[0]
    assert target != prediction
    assert 0 < float(probability) <= 1


def test_most_wrong_samples_by_hand(run: RunDir) -> None:
    """The first is the validation sample whose own class got the lowest probability of all that are wrong."""
    import pandas as pd

    import manta.predict
    from manta.report.examples import find_examples

    output = run.path / "val.csv"
    given = ["", f"run={run.path}", "split=val", f"output={output}"]
    assert arguments.main(manta.predict.Arguments, lambda a: manta.predict.predict(a, ROOT / "conf"), given, ROOT) == 0
    table = pd.read_csv(output)
    wrong = table[table.target != table.prediction]
    of_target = pd.Series([row[f"p_{int(row.target)}"] for _, row in wrong.iterrows()], index=wrong.id).sort_values()
    found = find_examples(run).wrong
    assert [example.id for example in found] == list(of_target.index)[:18]
    assert [example.of_target for example in found] == pytest.approx(list(of_target)[:18], rel=1e-4)


def test_pictures_are_written(run: RunDir, page: Page) -> None:
    found = sorted(path.stem for path in (run.path / "report").glob("*.png"))
    assert found == sorted(page.charts) == ["accuracy", "confusion", "learning_rate", "loss", "throughput"]
    for name in found:
        with Image.open(run.path / "report" / f"{name}.png") as image:
            assert min(image.size) > 300
            assert len(image.convert("RGB").getcolors(1_000_000) or range(99)) > 20  # more than a blank sheet
    assert all(f'href="report/{name}.png"' in page.html for name in found)


def test_the_page_needs_no_network(page: Page) -> None:
    loads = re.findall(
        r"(?:src|href|url|import|srcset|action)\s*[=(]\s*[\"']?\s*(?:https?:)?//", page.body + _styles(page.html)
    )
    assert loads == []
    assert '<link rel="stylesheet"' not in page.html
    assert not re.search(r"<script[^>]+src", page.html)


def _styles(html: str) -> str:
    return " ".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))


def test_names_are_escaped(run: RunDir, tmp_path: Path) -> None:
    evil = "<script>alert(1)<_script>&'\""
    other = copy(run, tmp_path / evil, name=evil, tags=["</script><b>", "a&b"], group="'\"><i>")
    other.update_status(state=runs.FAILED, error="<img src=x onerror=alert(1)> & </script>")
    (other.path / "overrides.txt").write_text("'name=<u>&'\n")
    html = page_of(other)
    assert all(bad not in html.body for bad in ("<script>alert", '<b>"', "<img src=x", "<i>", "<u>"))
    assert all(good in html.text for good in (evil, "</script><b>", "a&b", "<img src=x onerror=alert(1)>", "name=<u>&"))
    assert html.html.count("<script") == 3


def test_classes_are_escaped_in_charts(tmp_path: Path) -> None:
    from manta.report import charts
    from manta.report.page import Figure
    from manta.report.page import Page as Written

    names = ["</script><script>alert(1)</script>", "b"]
    written = Written("t", "")
    written.add("h", Figure("confusion", "c", charts.confusion([[1, 2], [0, 4]], names)))
    written.write(tmp_path)
    found = Page(tmp_path)
    assert found.html.count("<script") == 3
    assert found.values("confusion", target=names[0], prediction="b")[0]["count"] == 2


def test_a_run_that_has_only_begun(run: RunDir, tmp_path: Path) -> None:
    begun = RunDir(tmp_path / "begun")
    begun.path.mkdir()
    for name in ("config.yaml", "overrides.txt", "provenance.json"):
        shutil.copy2(run.path / name, begun.path)
    begun.write("status.json", {**run.read("status.json"), "state": "running", "finished": None})
    found = page_of(begun)
    assert "Nothing has been reported yet." in found.text
    assert "begun has no checkpoint yet" in found.text
    assert found.charts == {}
    begun.metrics.write_text("".join(run.metrics.read_text().splitlines(keepends=True)[:1]) + '{"step": 2')
    found = page_of(begun)
    assert len(found.values("loss")) == 1


def test_gaps_and_takeovers(run: RunDir, tmp_path: Path) -> None:
    other = copy(run, tmp_path / "trial")
    lines = read_lines(run.metrics)
    lines[1]["train/loss"] = None
    middle = next(index for index, line in enumerate(lines) if "val/loss" in line) + 1
    exploit = {"donor": 7, "values": {}, "index": 1, "epoch": 1}
    lines.insert(middle, {"step": lines[middle - 1]["step"], "epoch": 1, "exploit": exploit, "time": 0.0})
    other.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    other.update_status(state=runs.INTERRUPTED)
    found = page_of(other)
    losses = found.values("loss", s="train loss")
    assert losses[1]["y"] is None
    assert {row["g"] for row in losses} == {0, 1}
    assert "1 value was NaN or infinite" in found.text
    assert found.values("loss", what="weights of trial 7")
    assert "interrupted" in found.text
    assert summary(run)["resume_command"] in found.text


def test_without_the_data_the_rest_is_there(run: RunDir, tmp_path: Path) -> None:
    config = yaml.safe_load((run.path / "config.yaml").read_text())["data"]
    other = copy(run, tmp_path / "moved", data={**config, "dataset": {"_target_": "manta.data.vision.mnist", "root": str(tmp_path),
                 "download": True}})  # fmt: skip
    found = page_of(other)
    assert "There are no predictions here: MNIST cannot be read" in found.text
    assert "data.download=false" in found.text
    assert "loss" in found.charts
    assert "confusion" not in found.charts
    assert not list(tmp_path.glob("MNIST*"))


def test_curves_are_thinned_but_keep_their_spikes() -> None:
    lines = [{"step": step, "epoch": 1, "train/loss": math.sin(step / 500)} for step in range(100_000)]
    lines[41_234]["train/loss"] = 9.0
    lines[77_777]["train/loss"] = None
    points = curve(lines, "train/loss")
    assert len(points) <= MOST_POINTS + 10
    assert {"x": 41_234, "y": 9.0} in [{"x": point["x"], "y": point["y"]} for point in points]
    assert [point["x"] for point in points if point["y"] is None] == [77_777]
    assert (points[0]["x"], points[-1]["x"]) == (0, 99_999)
    assert thin(points[:10]) == points[:10]


def test_mistakes(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = copy(run, tmp_path / "damaged")
    (damaged.path / "config.yaml").write_text("objective: [")
    for given, words in (
        ([f"run={tmp_path}/none"], "no such directory"),
        ([f"run={damaged.path}"], "cannot be read"),
        ([f"runs={run.path}"], "two different runs or more"),
        ([f"runs={run.path},{run.path}"], "two different runs or more"),
        ([f"runs={run.path}", "run=latest"], "given together"),
        ([f"run={run.path}", "output=x"], "output="),
        (["group=nobody", f"storage.path={tmp_path}"], "no run under"),
        (["rum=latest"], "There are: run, runs"),
    ):
        assert command(*given) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


# --- several runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(run: RunDir, tmp_path_factory: pytest.TempPathFactory) -> list[RunDir]:
    """Three seeds of one configuration, and one run of another."""
    folder = tmp_path_factory.mktemp("several") / "2026-01-01"
    optimizer = yaml.safe_load((run.path / "config.yaml").read_text())["optimizer"]
    made = [copy(run, folder / f"seed-{seed}", seed=seed, group="few") for seed in (1, 2, 3)]
    made.append(copy(run, folder / "slow", seed=1, group="few", optimizer={**optimizer, "lr": 0.25}))
    for index, each in enumerate(made):
        lines = read_lines(each.metrics)
        for line in lines:
            line |= {key: line[key] + 0.01 * index for key in line if key.startswith("val/")}
        each.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        told = summary(each)
        for part in (told["best"]["metrics"], told["test"]):
            part |= {key: value + 0.01 * index for key, value in part.items()}
        each.write("summary.json", told)
    return made


def test_runs_that_differ_in_seed_are_one_line(several: list[RunDir], tmp_path: Path) -> None:
    assert command(f"runs={','.join(str(run.path) for run in several)}", f"output={tmp_path / 'out'}") == 0
    found = Page(tmp_path / "out")
    label = "A: optimizer.lr=0.001"
    rows = [row for row in found.values("val_accuracy", s=label) if "n" in row]
    by_epoch = [
        [line["val/accuracy"] for line in read_lines(run.metrics) if "val/accuracy" in line] for run in several[:3]
    ]
    assert [row["y"] for row in rows] == pytest.approx([fmean(each) for each in zip(*by_epoch, strict=True)])
    bands = [(row["y"], row["high"]) for row in found.values("val_accuracy", s=label) if "high" in row]
    assert bands == [(min(each), max(each)) for each in zip(*by_epoch, strict=True)]
    best = [summary(run)["best"]["metrics"]["val/accuracy"] for run in several[:3]]
    assert f"{number(fmean(best))} ± {number(stdev(best))}" in found.text
    test = [summary(run)["test"]["test/loss"] for run in several[:3]]
    assert f"{number(fmean(test))} ± {number(stdev(test))}" in found.text
    assert "optimizer.lr 0.001 0.25" in found.text
    assert {path.stem for path in (tmp_path / "out" / "report").glob("*.png")} == set(found.charts)


def test_runs_of_a_group(several: list[RunDir]) -> None:
    root = several[0].path.parents[1]
    assert command("group=few", f"storage.path={root}") == 0
    (folder,) = root.glob("comparison-*")
    assert "Comparison of 4 runs" in Page(folder).text


# --- a search --------------------------------------------------------------------------------------------------------


def test_a_search(tmp_path: Path) -> None:
    search, study, conclude = make_search(tmp_path)
    some_trials(study, 12)
    refit = {
        "seeds": [1, 2],
        "runs": ["a", "b"],
        "val": {},
        "test": {"test/accuracy": {"mean": 0.81, "std": 0.02, "values": [0.79, 0.83]}},
    }
    conclude(refit)
    found = page_of(search)
    told = summary(search)
    assert set(found.charts) == {"trials", "best_by_time", "best_by_epochs", "importance", "parallel", "timeline"} - (
        set() if told["importance"] else {"importance"}
    )
    best = told["best"]
    assert (
        f"val/accuracy, highest {number(best['metrics']['val/accuracy'])} trial {best['trial']}, epoch {best['epoch']}"
        in found.text
    )
    assert "0.8100 ± 0.0200" in found.text
    assert told["repeat_command"] in found.text
    reports = [event for event in read_lines(search.path / EVENTS) if event["event"] == "reported"]
    drawn = [(row["trial"], row["x"], row["y"]) for row in found.values("trials") if "i" in row]
    assert sorted(drawn) == sorted((e["trial"], e["epoch"], e["metrics"]["val/accuracy"]) for e in reports)
    ends = {row["trial"]: row["state"] for row in found.values("trials")}
    assert ends == {record.number: record.state for record in study.records}
    # A cnn has no dropout: its line passes below the axis.
    dropout = {row["trial"]: row["y"] for row in found.values("parallel", name="model.dropout") if "trial" in row}
    assert all((y < 0) == (trial % 3 == 0) for trial, y in dropout.items())
    assert "does not apply" in found.text
    assert 'ValueError: <b>bad</b> & "worse"' in found.text
    assert "<b>bad" not in found.body
    assert {row["trial"] for row in found.values("timeline")} == set(range(12))
    assert found.values("best_by_epochs")[-1]["x"] == told["epochs"]


def test_best_so_far_by_hand() -> None:
    def event(trial: int, epoch: int, value: float | None, time: float) -> dict[str, Any]:
        return {"event": "reported", "trial": trial, "epoch": epoch, "metrics": {"val/loss": value}, "time": time}

    events = [event(0, 1, 0.9, 60.0), event(1, 2, None, 120.0), event(1, 3, 0.5, 180.0), event(0, 2, 0.7, 300.0),
              {"event": "exploited", "trial": 0, "epoch": 1, "time": 310.0, "donor": 1, "values": {}},
              event(0, 2, 0.4, 360.0), event(1, 4, 0.6, 420.0)]  # fmt: skip
    by_time, by_epochs = best_so_far(events, "val/loss", "min")
    assert [(point["x"], point["y"]) for point in by_time] == [(0.0, 0.9), (2.0, 0.5), (5.0, 0.4), (6.0, 0.4)]
    assert [(point["x"], point["y"]) for point in by_epochs] == [(1, 0.9), (4, 0.5), (6, 0.4), (7, 0.4)]


def test_searches_with_little_to_show(tmp_path: Path) -> None:
    search, study, conclude = make_search(tmp_path / "none")
    study.close()
    assert "No trial has begun yet." in page_of(search).text

    search, study, conclude = make_search(tmp_path / "one")
    some_trials(study, 1)
    conclude()
    assert "parallel" not in page_of(search).charts

    search, study, conclude = make_search(tmp_path / "failed", state=runs.FAILED)
    for trial in range(3):
        study.sampled(values(trial))
        study.failed(trial, f"OSError: disk {trial} is full")
    conclude()
    found = page_of(search)
    assert "No trial has a value of val/accuracy." in found.text
    assert "3 OSError: disk 0 is full" in found.text

    search, study, conclude = make_search(tmp_path / "nan", "objective={metric: val/loss, mode: min}")
    for trial in range(3):
        study.sampled(values(trial))
        study.reported(trial, 1, 10, {"val/loss": 0.5 + trial}, 0.1)
        study.reported(trial, 2, 20, {"val/loss": math.nan}, 0.1)
        study.exploited(trial, (trial + 1) % 3, 1, values(trial + 1))
    conclude()
    found = page_of(search)
    assert "val/loss, lowest 0.5000" in found.text
    assert "3 values were NaN or infinite" in found.text


def test_an_interrupted_search(tmp_path: Path) -> None:
    search, study, conclude = make_search(tmp_path, state=runs.INTERRUPTED)
    for trial in range(2):
        study.sampled(values(trial))
    study.reported(0, 1, 10, {"val/accuracy": 0.5}, 0.1)
    conclude()
    found = page_of(search)
    assert "trials 2 2 interrupted" in found.text
    assert {row["state"] for row in found.values("trials")} == {"interrupted"}
    assert "The best 1 of" not in found.text
    assert summary(search)["resume_command"] in found.text


def test_a_search_recorded_without_times(tmp_path: Path) -> None:
    search, study, conclude = make_search(tmp_path)
    some_trials(study, 4)
    conclude()
    path = search.path / EVENTS
    events = [{key: value for key, value in event.items() if key != "time"} for event in read_lines(path)]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    found = page_of(search)
    assert "was not recorded" in found.text
    assert "timeline" not in found.charts


def test_reading_a_search_leaves_its_file_alone(tmp_path: Path) -> None:
    search, study, conclude = make_search(tmp_path)
    some_trials(study, 2)
    conclude()
    path = search.path / EVENTS
    path.write_bytes(path.read_bytes() + b'{"event": "repor')  # it is being written
    before = path.read_bytes()
    page_of(search)
    assert path.read_bytes() == before


def test_a_thousand_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search, study, _conclude = make_search(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    some_trials(study, 1000, epochs=9)
    study.close()
    found = page_of(search)
    assert len(found.html) < 4_000_000
    assert "The best 120 of 1,000 trials" in found.text
    assert len({row["trial"] for row in found.values("trials")}) in (120, 121)  # the failed one may be among them
    assert "25 of 1,000 trials" in found.text
    assert "the best 300 of 1,000" in found.text


# --- at the end of a search ------------------------------------------------------------------------------------------


class Told(View):
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(silent=True)
        self.said: list[str] = []
        self.noted: list[str] = []

    def say(self, what: Any, style: str | None = None) -> None:  # noqa: ARG002
        self.said.append(str(what))

    def note(self, text: str) -> None:
        self.noted.append(text)


def test_a_report_that_fails_is_one_line(run: RunDir, tmp_path: Path) -> None:
    broken, view = copy(run, tmp_path / "broken one"), Told()
    (broken.path / "config.yaml").write_text("objective: 3\n")
    (broken.path / "report.html").write_text("old")
    report_after(broken, view)
    (line,) = view.said
    assert line.startswith("The report could not be made: ")
    assert "cannot be read: config.yaml has no objective" in line
    assert line.endswith(f"; python scripts/report.py run='{broken.path}'")
    assert not (broken.path / "report.html").exists()
    view = Told()
    report_after(broken, view, most_s=0.01)
    assert "it took longer than 0.01 s" in view.said[0]


def test_a_traceback_goes_to_the_log(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "path" / "altair"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('no charts today')\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder.parent}:{ROOT / 'src'}")
    other, view = copy(run, tmp_path / "run"), Told()
    report_after(other, view)
    assert "RuntimeError: no charts today" in view.said[0]
    assert len(view.said) == 1
    assert "Traceback" in view.noted[0]


@pytest.mark.usefixtures("ray_cluster")
def test_a_search_ends_with_its_page(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    search = lab.run(
        "search=random", "search.num_samples=3", "training.epochs=2", "training.limit_train_batches=8", "search.refit=false",
        "search.max_concurrent_trials=1",
    )  # fmt: skip
    found = Page(search.path)
    assert re.search(rf"report +{re.escape(str(search))}/report\.html", capfd.readouterr().out)
    assert f"val/accuracy, highest {number(summary(search)['objective']['value'])}" in found.text
    assert {path.stem for path in (search.path / "report").glob("*.png")} == set(found.charts)
    assert "finished" in found.text
    spans = found.values("timeline")
    assert {row["trial"] for row in spans} == {0, 1, 2}
    assert all(row["from"] < row["to"] for row in spans)


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = "import sys, manta.report.command, manta.report.after; print({'torch', 'ray', 'altair', 'pandas', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- in a browser ----------------------------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PICTURES = ROOT / "tests" / ".artifacts"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real one, without a window."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install -e '.[dev]')"
    )
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(
    page: Page, several: list[RunDir], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:  # fmt: skip
    """One of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    search, study, conclude = make_search(folder)
    some_trials(study, 12)
    conclude()
    assert command(f"run={search.path}") == 0
    assert command(f"runs={','.join(str(run.path) for run in several)}", f"output={folder / 'comparison'}") == 0
    found = {"run": page.folder, "search": search.path, "comparison": folder / "comparison"}
    return {name: path / "report.html" for name, path in found.items()}


def test_charts_are_valid(pages: dict[str, Path]) -> None:
    """By the schema of Vega-Lite."""
    import altair

    for path in pages.values():
        for name, spec in Page(path.parent).charts.items():
            assert altair.LayerChart.from_dict(spec), name


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("name", ["run", "search", "comparison"])
def test_in_a_browser(browser: Any, pages: dict[str, Path], name: str, mode: str) -> None:
    """Every chart is drawn, in the colours of the mode, without a word on the console and without the network."""
    said: list[str] = []
    asked: list[str] = []
    context = browser.new_context(color_scheme=mode, offline=True, viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(pages[name].as_uri())
    opened.wait_for_function(f"document.documentElement.dataset.drawn === '{mode}'", timeout=60_000)
    charts = set(Page(pages[name].parent).charts)
    drawn = opened.evaluate(
        "[...document.querySelectorAll('.plot svg')].map(e => [e.closest('.plot').id, e.clientWidth, e.clientHeight,"
        " e.querySelectorAll('path, rect, text').length])"
    )
    assert {chart for chart, *_ in drawn} == charts
    assert all(width > 300 and height > 100 and marks > 10 for _, width, height, marks in drawn)
    red, green, blue = opened.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    )
    assert (red + green + blue < 150) == (mode == "dark")
    inks = opened.evaluate(
        "[...document.querySelectorAll('.plot .role-axis-label text')].map(e => e.getAttribute('fill'))"
    )
    assert set(inks) == {CONFIGS[mode]["axis"]["labelColor"]}
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    PICTURES.mkdir(exist_ok=True)
    opened.screenshot(path=PICTURES / f"{name}-{mode}.png", full_page=True)
    opened.set_viewport_size({"width": 420, "height": 900})
    opened.wait_for_timeout(300)
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    opened.screenshot(path=PICTURES / f"{name}-{mode}-narrow.png", full_page=True)
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    context.close()


def test_the_charts_follow_the_reader_s_mode(browser: Any, pages: dict[str, Path]) -> None:
    context = browser.new_context(color_scheme="light")
    opened = context.new_page()
    opened.goto(pages["run"].as_uri())
    opened.wait_for_function("document.documentElement.dataset.drawn === 'light'", timeout=60_000)
    opened.emulate_media(color_scheme="dark")
    opened.wait_for_function("document.documentElement.dataset.drawn === 'dark'", timeout=60_000)
    assert opened.evaluate("document.querySelectorAll('.plot svg').length") == len(Page(pages["run"].parent).charts)
    context.close()
