"""scripts/runs.py: lists, shows, compares, repeats and deletes run directories."""

import csv
import dataclasses
import fcntl
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from manta.catalog import commands, remove, render
from manta.catalog.entries import DAMAGED, DIED, Entry, pick, scan
from manta.catalog.render import Column, Table
from manta.catalog.settings import Defaults, flatten, read_config, read_overrides
from manta.config import Storage
from manta.errors import MantaError
from manta.runs import RunDir, find
from tests.conftest import ROOT, Lab, make_config

SCRIPT = "scripts/runs.py"
DEFAULTS = Defaults(ROOT / "conf")
CONFIGS: dict[tuple[str, ...], Any] = {}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One composition of the defaults for all, and paths as seen from the folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "Defaults", lambda conf: DEFAULTS)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


def make(
    storage: Path, name: str, *overrides: str, state: str = "finished", value: float | None = 0.9, test: float | None = 0.8,
    commit: str = "a" * 40, torch: str = "2.14.1", minutes: float = 1, **status: Any,
) -> Path:  # fmt: skip
    """A run directory `<date>/<time>` as train.py leaves it, with one checkpoint of 1,000 bytes."""
    run = RunDir(storage / name)
    (run.checkpoints / "step-00000023").mkdir(parents=True)
    if overrides not in CONFIGS:
        CONFIGS[overrides] = make_config(*overrides)
    run.save_config(
        dataclasses.replace(
            CONFIGS[overrides], storage=dataclasses.replace(CONFIGS[overrides].storage, path=str(storage))
        )
    )
    (run.path / "overrides.txt").write_text(shlex.join(overrides) + "\n")
    (run.checkpoints / "step-00000023" / "state.pt").write_bytes(bytes(1000))
    (run.checkpoints / "step-00000023" / "meta.json").write_text("{}")
    for link in ("best", "last"):
        (run.checkpoints / link).symlink_to("step-00000023")
    began = datetime.strptime(name[:19], "%Y-%m-%d/%H-%M-%S").astimezone()
    times = {"started": began.isoformat(), "attempt_started": began.isoformat()}
    ended = None if state == "running" else (began + timedelta(minutes=minutes)).isoformat()
    known = {
        "state": state,
        **times,
        "finished": ended,
        "attempts": 1,
        "host": "elsewhere",
        "pid": 1,
        "error": None,
        "exit_code": 0,
    }
    run.write("status.json", {**known, **status})
    metrics = {"val/loss": 1 - (value or 0), "val/accuracy": value}
    best = {"epoch": 1, "step": 23, "checkpoint": "checkpoints/step-00000023", "metrics": metrics}
    objective = {"metric": "val/accuracy", "mode": "max", "value": value}
    tested = {} if test is None else {"test/accuracy": test}
    summary = {
        "objective": objective,
        "step": 23,
        "epoch": 1,
        "metrics": {**metrics, "train/loss": 0.5},
        "best": best,
        "test": tested,
    }
    if value is not None:
        run.write("summary.json", {"state": state, **summary})
    run.write(
        "provenance.json",
        {
            "command": "python train.py",
            "git": {"commit": commit, "branch": "main", "diff": None},
            "packages": {"torch": torch},
        },
    )
    reports = [
        {"step": 10, "epoch": 1, "train/loss": 0.5, "time": 1.5},
        {"step": 23, "epoch": 1, "val/accuracy": value, "time": 2.5},
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in reports))
    return run.path


def runs_py(capsys: pytest.CaptureFixture[str], storage: Path, *arguments: str, code: int = 0) -> str:
    """What a command prints, in this process; stderr comes behind."""
    capsys.readouterr()
    got = commands.main([SCRIPT, "--storage", str(storage), *arguments], ROOT)
    said = capsys.readouterr()
    assert got == code, said.out + said.err
    return said.out + said.err


def listed(capsys: pytest.CaptureFixture[str], storage: Path, *arguments: str) -> list[str]:
    """Names of the runs that `list` shows, in its order."""
    return [
        Path(row["run"]).name for row in json.loads(runs_py(capsys, storage, "list", "--format", "json", *arguments))
    ]


# --- settings ----------------------------------------------------------------------------------------------------


def test_a_config_is_read_as_yaml_reads_it(storage: Path) -> None:
    text = (
        make(storage, "2026-01-01/10-00-00", "model=cnn", "tags=[a,b]", "optimizer.lr=1e-3") / "config.yaml"
    ).read_text()
    assert read_config(text) == flatten(yaml.safe_load(text))
    by_hand = (
        "# mine\noptimizer: {lr: 1e-3,\n  betas: [0.9, 0.99]}\ntags: &t [a]\nseed: 2 # two\nother: *t\nempty: {}\n"
    )
    expected = {"optimizer.lr": 1e-3, "optimizer.betas": [0.9, 0.99], "tags": ["a"], "seed": 2, "other": ["a"]}
    assert read_config(by_hand) == expected
    for broken in ("model: {a: 1\nseed: 1\n", "just words", "a: 'x\nb: 1\n"):
        with pytest.raises(ValueError, match=r"YAML|configuration"):
            read_config(broken)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {}),
        (("model=mlp", "seed=0"), {}),  # as by default
        (("model=cnn", "optimizer.lr=0.02", "seed=3"), {"model": "cnn", "optimizer.lr": 0.02, "seed": 3}),
        (("model=cnn", "model.hidden=64"), {"model": "cnn", "model.hidden": 64}),
        (("optimizer=sgd",), {"optimizer": "sgd"}),  # 5e-4 is a number
        (("data=mnist", "data.batch_size=32"), {"data": "mnist", "data.batch_size": 32}),  # shapes of the model follow
        (("experiment=mnist_cnn",), {"experiment": "mnist_cnn"}),
        (("experiment=mnist_cnn", "training.epochs=3"), {"experiment": "mnist_cnn", "training.epochs": 3}),
        (("scaling=in_process", "name=x", "tags=[a]", "group=g"), {"scaling": "in_process"}),
        (("tracking=[csv,tensorboard]",), {"tracking": "[csv,tensorboard]"}),
        (("search=asha", "search.num_samples=6"), {"search": "asha", "search.num_samples": 6}),
    ],
)  # fmt: skip
def test_settings_that_differ_from_the_defaults(overrides: tuple[str, ...], expected: dict[str, Any]) -> None:
    config = flatten(dataclasses.asdict(make_config(*overrides)))
    assert DEFAULTS.differences(config, list(overrides)).all() == expected


def test_what_a_chosen_option_leaves_to_the_schema_is_part_of_the_choice(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    with open(tmp_path / "conf/data/digits.yaml", "a") as file:
        file.write("prefetch_factor: 9\n")
    config = flatten(dataclasses.asdict(make_config("data=mnist", "data.num_workers=2")))
    found = Defaults(tmp_path / "conf").differences(config, ["data=mnist", "data.num_workers=2"])
    assert found.all() == {"data": "mnist", "data.num_workers": 2}


def test_without_its_command_line_and_edited_by_hand_the_file_counts(storage: Path) -> None:
    run = make(storage, "2026-01-01/10-00-00", "model=cnn")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("hidden: 128", "hidden: 99").replace("epochs: 15", "epochs: 16"))
    entry = Entry(run, DEFAULTS)
    assert entry.differences.all() == {"model": "cnn", "model.hidden": 99, "training.epochs": 16}
    (run / "overrides.txt").unlink()
    found = Entry(run, DEFAULTS).differences.all()
    assert found["model._target_"] == "manta.models.cnn.CNN" and found["model.hidden"] == 99


def test_overrides_of_several_attempts() -> None:
    text = (
        "model=cnn training.epochs=2 'search.space.optimizer.lr=\"a b\"'\nresume=latest training.epochs=5\n'half a li"
    )
    assert read_overrides(text) == ["model=cnn", 'search.space.optimizer.lr="a b"', "training.epochs=5"]


# --- list --------------------------------------------------------------------------------------------------------


def test_list_shows_a_run_in_a_row(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(storage, "2026-01-01/10-00-00-first", "model=cnn", "seed=1", value=0.91)
    make(storage, "2026-01-02/09-00-00", "tags=[a,b]", "group=g", value=None, minutes=65)
    shown = runs_py(capsys, storage, "list").splitlines()
    assert shown[0].split() == ["run", "state", "objective", "settings", "time", "age", "tags", "group"]
    assert re.fullmatch(r"outputs/2026-01-02/09-00-00 +finished  - +1 h 5 min +\d+ d  a,b +g", shown[1])
    assert re.fullmatch(
        r"outputs/2026-01-01/10-00-00-first  finished  val/accuracy 0.9100  model=cnn seed=1 +1 min +\d+ d *", shown[2]
    )
    (one, two) = csv.DictReader(io.StringIO(runs_py(capsys, storage, "list", "--format", "csv")))
    assert (one["value"], two["value"], two["duration_s"]) == ("", "0.91", "60.0")
    assert json.loads(two["settings"]) == {"model": "cnn", "seed": 1}
    assert runs_py(capsys, storage, "list", "--format", "markdown").splitlines()[1].startswith("| --- |")


def test_the_newest_comes_first_and_order_can_be_asked_for(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(storage, "2026-01-01/10-00-00", value=0.5, minutes=9)
    make(storage, "2026-01-01/10-00-00-2", value=0.7, minutes=3)
    make(storage, "2026-01-01/10-00-00-10", value=None, minutes=5)
    make(storage, "2025-12-31/23-00-00", value=0.6, minutes=1)
    assert listed(capsys, storage) == ["10-00-00-10", "10-00-00-2", "10-00-00", "23-00-00"]
    assert listed(capsys, storage, "--sort", "objective") == ["10-00-00-2", "23-00-00", "10-00-00", "10-00-00-10"]
    assert listed(capsys, storage, "--sort", "duration") == ["10-00-00", "10-00-00-10", "10-00-00-2", "23-00-00"]
    assert listed(capsys, storage, "--limit", "2") == ["10-00-00-10", "10-00-00-2"]


def test_smaller_is_better_where_the_objective_says_so(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, loss in (("2026-01-01/10-00-00", 0.3), ("2026-01-01/11-00-00", 0.1)):
        run = RunDir(make(storage, name))
        run.write("summary.json", {"objective": {"metric": "val/loss", "mode": "min", "value": loss}})
    assert listed(capsys, storage, "--sort", "objective") == ["11-00-00", "10-00-00"]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ("--state failed", ["b"]),
        ("--state failed --state died", ["c", "b"]),
        ("--state failed,died", ["c", "b"]),
        ("--tag x", ["b", "a"]),
        ("--tag x --tag y", ["b"]),
        ("--group g*", ["a"]),
        ("--name bee", ["b"]),
        ("--name b*", ["b"]),
        ("--since 2026-01-02", ["c"]),
        ("--since 2026-01-01T10:30", ["c", "b"]),
        ("--since 1h", []),
        ("--where model=cnn", ["b"]),
        ("--where model!=cnn", ["c", "a"]),
        ("--where data=digits", ["c", "b", "a"]),
        ("--where optimizer.lr=2e-2", ["b", "a"]),
        ("--where optimizer.lr=0.02 --where seed=1", ["a"]),
        ("--where model.dropout=0.0", ["c", "b", "a"]),
        ("--where model.channels=[32,64]", ["b"]),
        ("--where training.test=true", ["c", "b", "a"]),
    ],
)  # fmt: skip
def test_filters(storage: Path, capsys: pytest.CaptureFixture[str], filters: str, expected: list[str]) -> None:
    make(storage, "2026-01-01/10-00-00-a", "optimizer.lr=0.02", "seed=1", "tags=[x]", "group=g1")
    make(storage, "2026-01-01/11-00-00-b", "model=cnn", "optimizer.lr=0.02", "tags=[x,y]", "name=bee", state="failed")
    make(storage, "2026-01-02/10-00-00-c", state="running", host=socket.gethostname(), pid=2**22 + 1)
    assert [name[9:] for name in listed(capsys, storage, *filters.split())] == expected


def test_who_runs_and_who_died(storage: Path) -> None:
    here, now = socket.gethostname(), datetime.now(timezone.utc).isoformat()
    make(storage, "2026-01-01/10-00-00", state="running", host=here, pid=os.getpid(), attempt_started=now)
    # Another process has got the number since:
    make(storage, "2026-01-01/11-00-00", state="running", host=here, pid=os.getpid())
    make(storage, "2026-01-01/12-00-00", state="running", host=here, pid=2**22 + 1)
    make(storage, "2026-01-01/13-00-00", state="running", host="elsewhere")  # wrote a moment ago
    old = make(storage, "2026-01-01/14-00-00", state="running", host="elsewhere")
    for path in old.iterdir():
        os.utime(path, (0, 0))
    locked = make(storage, "2026-01-01/15-00-00", state="running", host=here, pid=2**22 + 1)
    with open(locked / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = [entry.state for entry in scan(storage, DEFAULTS)]
    assert found == ["running", DIED, "running", DIED, DIED, "running"]


def test_the_lock_of_a_trial_keeps_its_search_alive(storage: Path) -> None:
    search = make(storage, "2026-01-01/10-00-00", "search=random", state="running", host="elsewhere")
    (search / "space.yaml").write_text("{}")
    trial = make(storage, "2026-01-01/10-00-00/trials/00000")
    for path in search.iterdir():
        os.utime(path, (0, 0))
    assert Entry(search, DEFAULTS).state == DIED
    with open(trial / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Entry(search, DEFAULTS).state == "running"


def test_trials_are_listed_when_asked_for(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = make(storage, "2026-01-01/10-00-00", "search=random")
    (search / "space.yaml").write_text("{}")
    make(storage, "2026-01-01/10-00-00/trials/00000", "optimizer.lr=0.02", "scaling.num_workers=1", state="stopped")
    make(storage, "2026-01-01/10-00-00/refit/00000/seed-1", "seed=1")
    make(storage, "2026-01-01/09-00-00", "group=2026-01-01_08-59-59-multirun")
    shown = json.loads(runs_py(capsys, storage, "list", "--trials", "--format", "json"))
    assert [(row["run"][19:], row["kind"], row["settings"]) for row in shown] == [
        ("10-00-00", "search", {"search": "random"}),
        ("10-00-00/trials/00000", "trial", {"optimizer.lr": 0.02}),  # its search shared the resources out
        ("10-00-00/refit/00000/seed-1", "refit", {"seed": 1}),
        ("09-00-00", "multirun", {}),
    ]
    assert listed(capsys, storage) == ["10-00-00", "09-00-00"]
    assert listed(capsys, storage, "--trials", "--state", "stopped") == ["00000"]


def test_damage_is_said_in_the_row(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for at in range(8):
        make(storage, f"2026-01-01/1{at}-00-00")
    day = storage / "2026-01-01"
    (day / "10-00-00/status.json").write_text("")
    (day / "11-00-00/summary.json").write_text("{")
    (day / "12-00-00/summary.json").unlink()
    (day / "13-00-00/config.yaml").write_text("schema_version: 1\nmodel: {")
    (day / "14-00-00/config.yaml").unlink()
    text = (day / "15-00-00/config.yaml").read_text()
    (day / "15-00-00/config.yaml").write_text(text.replace("schema_version: 1", "schema_version: 99"))
    (day / "16-00-00/overrides.txt").write_bytes(b"\xff'")
    (day / "17-00-00/status.json").write_text("[1]")
    (day / "18-00-00").mkdir()
    (day / "19-00-00-multirun").mkdir()  # Hydra's, no run
    (storage / "notes").mkdir()
    found = {row["run"][-8:]: row for row in json.loads(runs_py(capsys, storage, "list", "--format", "json"))}
    assert {name: (row["state"], row["problems"]) for name, row in found.items()} == {
        "18-00-00": (DAMAGED, ["no config.yaml", "no status.json"]),
        "17-00-00": (DAMAGED, ["status.json is damaged", "no status.json"]),
        "16-00-00": ("finished", []),
        "15-00-00": ("finished", ["configuration schema 99, this code reads 1"]),
        "14-00-00": ("finished", ["no config.yaml"]),
        "13-00-00": ("finished", ["config.yaml is damaged"]),
        "12-00-00": ("finished", []),
        "11-00-00": ("finished", ["summary.json is damaged"]),
        "10-00-00": (DAMAGED, ["status.json is damaged", "no status.json"]),
    }
    assert "(summary.json is damaged)" in runs_py(capsys, storage, "list")
    for name in found:
        assert runs_py(capsys, storage, "show", name).startswith("Run\n")


def test_only_on_a_terminal_cells_are_cut() -> None:
    columns = [Column("run"), Column("settings", bends=True), Column("age", rank=1), Column("tags", rank=2)]
    table = Table(columns, [["outputs/1", "model=cnn optimizer.lr=0.02", "3 d", "a"]])
    assert render.plain(table).plain.splitlines()[1] == "outputs/1  model=cnn optimizer.lr=0.02  3 d  a"
    assert render.plain(table, 40).plain.splitlines()[1] == "outputs/1  model=cnn optimiz…  3 d  a"
    assert render.plain(table, 30).plain.splitlines()[1] == "outputs/1  model=cnn optimize…"
    assert render.plain(table, 12).plain.splitlines()[1] == "outputs/1"


# --- which run ---------------------------------------------------------------------------------------------------


def test_a_run_is_named_by_a_path_or_a_part(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make(storage, "2026-01-01/10-00-00-base")
    b = make(storage, "2026-01-02/10-30-00-base-2")
    (storage / "latest").symlink_to("2026-01-01/10-00-00-base")
    for spec, path in {
        "latest": a, str(a): a, "outputs/2026-01-01/10-00-00-base": a, "2026-01-02/10-30-00-base-2": b, "10-30": b,
        "base": a, "base-2": b, "2026-01-02": b,
    }.items():  # fmt: skip
        assert pick(spec, storage, DEFAULTS).path == path, spec
    said = runs_py(capsys, storage, "show", "10-", code=2)
    assert said.splitlines()[1:] == ["  outputs/2026-01-02/10-30-00-base-2", "  outputs/2026-01-01/10-00-00-base"]
    assert "Did you mean base?" in runs_py(capsys, storage, "show", "bsae", code=2)
    assert runs_py(capsys, storage, "latest") == "outputs/2026-01-01/10-00-00-base\n"
    assert runs_py(capsys, storage, "latest", "--since", "2026-01-02") == "outputs/2026-01-02/10-30-00-base-2\n"
    (storage / "latest").unlink()
    assert runs_py(capsys, storage, "latest") == "outputs/2026-01-02/10-30-00-base-2\n"


# --- show, compare -----------------------------------------------------------------------------------------------


def test_show(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(storage, "2026-01-01/10-00-00", "model=cnn", "seed=1", state="failed", error="CUDA out of memory", exit_code=1)
    rows = dict(re.findall(r"^(\w+) +(.*)$", runs_py(capsys, storage, "show", "10-00"), re.MULTILINE))
    assert rows["state"] == "failed, started 2026-01-01 10:00:00, took 1 min, attempt 1, exit code 1"
    assert rows["error"] == "CUDA out of memory"
    assert rows["settings"] == "model=cnn" and "seed=1" in runs_py(capsys, storage, "show", "10-00")
    assert rows["best"] == "epoch 1, step 23: val/loss 0.1000  val/accuracy 0.9000"
    assert rows["last"].endswith("train/loss 0.5000") and rows["test"] == "test/accuracy 0.8000"
    assert rows["checkpoints"] == "step-00000023  1.0 kB, best, last"
    assert rows["code"] == "commit aaaaaaaaaa (main), nothing changed"
    assert rows["resume"] == "python train.py resume=outputs/2026-01-01/10-00-00"
    assert rows["evaluate"] == "python scripts/evaluate.py run=outputs/2026-01-01/10-00-00"


def test_show_offers_only_what_works(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def offered(name: str) -> set[str]:
        rows = dict(re.findall(r"^(\w+) +(.*)$", runs_py(capsys, storage, "show", name), re.MULTILINE))
        return {"resume", "evaluate", "predict"} & set(rows)

    for number, missing in enumerate(("status.json", "config.yaml"), start=1):
        run = make(storage, f"2026-01-01/10-00-0{number}")
        assert offered(f"10-00-0{number}") == {"resume", "evaluate", "predict"}
        (run / missing).unlink()
        assert offered(f"10-00-0{number}") == set()
        with pytest.raises(MantaError, match=rf"not a run directory \(it has no {missing}\)"):
            find(str(run), Storage(str(storage)))
    run = make(storage, "2026-01-01/10-00-03")
    (run / "status.json").write_text('{"state"')
    assert offered("10-00-03") == set()
    search = make(storage, "2026-01-01/10-00-04")
    (search / "space.yaml").write_text("{}")
    assert offered("10-00-04") == {"resume"}
    (search / "best" / "checkpoint").mkdir(parents=True)
    assert offered("10-00-04") == {"resume", "evaluate", "predict"}


def test_every_command_knows_a_run_by_its_name(storage: Path) -> None:
    """resume=, run= and runs= of the scripts, too."""
    first, second = (make(storage, f"2026-01-01/10-00-0{number}-k{number}") for number in (1, 2))
    assert find("k1", Storage(str(storage))).path == first.resolve()
    assert find("10-00-02", Storage(str(storage))).path == second.resolve()
    with pytest.raises(MantaError, match="resume=10-00 means 2 runs"):
        find("10-00", Storage(str(storage)))
    with pytest.raises(MantaError, match="run=k3: no such directory"):
        find("k3", Storage(str(storage)), "run")


def test_compare(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(storage, "2026-01-01/10-00-00", "seed=1", value=0.9, test=0.7)
    make(storage, "2026-01-01/11-00-00", "model=cnn", value=0.8, test=0.75, commit="b" * 40, torch="2.13.0")
    said = json.loads(runs_py(capsys, storage, "compare", "10-00", "11-00", "--format", "json"))
    one, two = said
    both = {key: (one[key], two[key]) for key in one}
    assert both["model"] == ("mlp", "cnn") and both["seed"] == ("1", "0")
    assert both["model.hidden"] == ("[256,128]", "128") and both["model.channels"] == ("-", "[32,64]")
    assert both["best val/accuracy"] == ("0.9000 *", "0.8000") and both["best val/loss"] == ("0.1000 *", "0.2000")
    assert both["test test/accuracy"] == ("0.7000", "0.7500 *") and both["last train/loss"] == ("0.5000", "0.5000")
    assert both["commit"] == ("aaaaaaaaaa", "bbbbbbbbbb") and both["package torch"] == ("2.14.1", "2.13.0")
    assert not {"training.epochs", "model._target_", "storage.path", "python"} & set(both)
    assert "two runs or more" in runs_py(capsys, storage, "compare", "10-00", code=2)


# --- table -------------------------------------------------------------------------------------------------------


def make_seeds(storage: Path) -> None:
    for seed, test in enumerate((0.70, 0.72, 0.74)):
        make(storage, f"2026-01-01/10-00-0{seed}", f"seed={seed}", "training.epochs=3", test=test)
    for seed, test in enumerate((0.80, 0.90)):
        make(storage, f"2026-01-01/11-00-0{seed}", "model=cnn", f"seed={seed}", "training.epochs=3", test=test)
    make(storage, "2026-01-01/12-00-00", "model=cnn", "seed=0", "training.epochs=3", test=0.82)
    make(storage, "2026-01-01/13-00-00", "model=cnn", "seed=7", "training.epochs=3", state="failed", test=0.1)


def test_table_is_mean_and_deviation_over_seeds(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_seeds(storage)
    said = runs_py(
        capsys, storage, "table", "--metrics", "test/accuracy", "--format", "markdown", "--where", "training.epochs=3"
    )
    assert said.splitlines()[:4] == [
        "| setting | test/accuracy | n |",
        "| --- | ---: | ---: |",
        "| default | 0.7200 ± 0.0200 | 3 |",  # sample deviation; the mean of .70, .72, .74
        "| model=cnn | **0.8600 ± 0.0566** | 2 |",  # of .82, the newer of seed 0, and .90
    ]
    assert "1 left out: newer runs of the same settings and seed" in said and "not finished" in said
    rows = json.loads(
        runs_py(capsys, storage, "table", "--since", "2026-01-01", "--format", "json").partition("\n]")[0] + "]"
    )
    assert [(row["setting"], row["n"], row["seeds"]) for row in rows] == [
        ("default", 3, [2, 1, 0]),
        ("model=cnn", 2, [0, 1]),
    ]


def test_table_in_latex_is_escaped(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(storage, "2026-01-01/10-00-00", test=0.7)
    make(storage, "2026-01-01/11-00-00", "optimizer.weight_decay=0.5", test=0.8)
    said = runs_py(capsys, storage, "table", "10-00", "11-00", "--format", "latex", "--metrics", "test/accuracy")
    assert said.splitlines() == [
        r"\begin{tabular}{lrr}", r"\toprule", r"setting & test/accuracy & n \\", r"\midrule",
        r"default & 0.7000 & 1 \\", r"optimizer.weight\_decay=0.5 & \textbf{0.8000} & 1 \\", r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip
    assert (
        render.tex(r"50% & a_b \ ± ~^{}")
        == r"50\% \& a\_b \textbackslash{} $\pm$ \textasciitilde{}\textasciicircum{}\{\}"
    )
    assert "Did you mean test/accuracy?" in runs_py(
        capsys, storage, "table", "10-00", "--metrics", "test/acuracy", code=2
    )


# --- rerun -------------------------------------------------------------------------------------------------------


def test_rerun_refuses_what_no_run_can_have(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(storage, "2026-01-01/10-00-00")
    found = runs_py(capsys, storage, "rerun", "latest", "--print", "nosuch=3", code=2)
    assert "nosuch=3: there is no setting nosuch." in found
    found = runs_py(capsys, storage, "rerun", "latest", "--print", "modle=cnn", code=2)
    assert "Did you mean model?" in found
    for good in ("model=cnn", "optimizer.lr=1", "search/space=none", "+new.key=1", "hydra.verbose=true"):
        assert good in runs_py(capsys, storage, "rerun", "latest", "--print", good)


def test_rerun_knows_when_it_does_not_know(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a run was started with was lost, and it was resumed since."""
    run = make(storage, "2026-01-01/10-00-01")
    (run / "overrides.txt").write_text("resume=latest training.epochs=5\n")
    found = runs_py(capsys, storage, "rerun", "10-00-01", "--print", code=2)
    assert "begins with a resume: it is not known what it was started with" in found


def test_rerun_prints_the_command(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(storage, "2026-01-01/10-00-00", "model=cnn", "training.epochs=2")
    with open(run / "overrides.txt", "a") as file:
        file.write("resume=latest training.epochs=5\n")
    said = runs_py(capsys, storage, "rerun", "10-00", "--print", "seed=3", "tags=[a b]")
    command, _, warned = said.partition("\n")
    assert shlex.split(command)[2:] == ["model=cnn", "training.epochs=5", "seed=3", "tags=[a b]"]
    assert "was made with commit aaaaaaaaaa, this is" in warned and warned.count("\n") == 1
    assert "training.epochs=7" in runs_py(capsys, storage, "rerun", "10-00", "training.epochs=7", "--print")
    assert "rerun starts afresh" in runs_py(capsys, storage, "rerun", "10-00", "resume=latest", "--print", code=2)
    (run / "overrides.txt").unlink()
    assert "not known what it was started with" in runs_py(capsys, storage, "rerun", "10-00", "--print", code=2)


def test_rerun_starts_train_py(
    storage: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(storage, "2026-01-01/10-00-00", "model=cnn")
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command))
    runs_py(capsys, storage, "rerun", "latest", "seed=3")
    assert started == [[sys.executable, str(ROOT / "train.py"), "model=cnn", "seed=3"]]


def test_a_search_is_repeated_as_it_was_typed(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = "++search.space.optimizer.lr='loguniform(1e-4, 1e-1)'"
    run = make(storage, "2026-01-01/10-00-00")
    (run / "overrides.txt").write_text(shlex.join(["search=random", space]) + "\nresume=latest search.num_samples=9\n")
    command = runs_py(capsys, storage, "rerun", "10-00", "--print").splitlines()[0]
    assert shlex.split(command)[2:] == ["search=random", space, "search.num_samples=9"]


# --- rm ----------------------------------------------------------------------------------------------------------


def test_rm_needs_a_yes(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(storage, "2026-01-01/10-00-00")
    said = runs_py(capsys, storage, "rm", "10-00", code=2)
    assert "outputs/2026-01-01/10-00-00  run, finished, " in said
    assert f"python scripts/runs.py --storage {storage} rm 10-00 --yes" in said and run.is_dir()
    for nothing in ((), ("10-00", "--state", "failed")):
        assert "name " in runs_py(capsys, storage, "rm", *nothing, "--yes", code=2)
    assert run.is_dir()
    assert "Deleted 1 run, " in runs_py(capsys, storage, "rm", "--yes", "10-00")
    assert list(storage.iterdir()) == []  # the empty day too


@pytest.mark.parametrize("typed", ["yes", "y", ""])
def test_rm_asks_on_a_terminal(
    storage: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    run = make(storage, "2026-01-01/10-00-00")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: typed)
    said = runs_py(capsys, storage, "rm", "10-00")
    assert run.exists() == (typed != "yes") and ("Nothing deleted" in said) == (typed != "yes")


def test_rm_by_filter_moves_latest(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make(storage, "2026-01-01/10-00-00")
    b = make(storage, "2026-01-01/11-00-00")
    c = make(storage, "2026-01-02/10-00-00", state="failed")
    (storage / "latest").symlink_to("2026-01-02/10-00-00")
    runs_py(capsys, storage, "rm", "--state", "failed", "--yes")
    assert not c.parent.exists() and a.is_dir() and b.is_dir()
    assert os.readlink(storage / "latest") == "2026-01-01/11-00-00"
    runs_py(capsys, storage, "rm", "--state", "finished", "--yes")
    assert list(storage.iterdir()) == []


def test_rm_follows_no_links(storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = make(tmp_path / "other", "2026-01-01/10-00-00")
    run = make(storage, "2026-01-01/11-00-00")
    (run / "data").symlink_to(outside)
    (storage / "2026-01-01/12-00-00-link").symlink_to(outside)
    (storage / "2026-01-03").symlink_to(outside.parent)
    for spec in (str(outside), "12-00-00-link", "2026-01-03/10-00-00", str(storage / "2026-01-01"), str(tmp_path), "."):
        runs_py(capsys, storage, "rm", spec, "--yes", code=2)
    runs_py(capsys, storage, "rm", "--since", "2026-01-01", "--yes", code=2)  # one of them is a link: none is deleted
    assert run.is_dir() and (storage / "2026-01-01/12-00-00-link").is_symlink()
    runs_py(capsys, storage, "rm", "11-00", "--yes")
    assert (
        not run.exists() and (outside / "config.yaml").is_file() and (outside / "checkpoints/best/state.pt").is_file()
    )


def test_rm_leaves_what_is_training_and_parts_of_searches(
    storage: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(storage, "2026-01-01/10-00-00", state="running", pid=2**22 + 1)
    me = {"host": socket.gethostname(), "pid": os.getpid()}
    now = datetime.now(timezone.utc).isoformat()
    make(storage, "2026-01-01/13-00-00", state="running", attempt_started=now, **me)  # has no lock yet
    assert "being trained right now" in runs_py(capsys, storage, "rm", "13-00", "--yes", code=2)
    search = make(storage, "2026-01-01/11-00-00", "search=random")
    (search / "space.yaml").write_text("{}")
    trial = make(storage, "2026-01-01/11-00-00/trials/00000")
    for path in (run, trial):
        with open(path / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            wanted = "10-00" if path == run else "11-00"
            assert "being trained right now" in runs_py(capsys, storage, "rm", wanted, "--yes", code=2)
    assert "a part of a search" in runs_py(capsys, storage, "rm", str(trial), "--yes", code=2)
    started = storage / "2026-01-01/12-00-00"
    started.mkdir()
    assert "a moment ago" in runs_py(capsys, storage, "rm", "12-00", "--yes", code=2)
    monkeypatch.setattr(remove, "check", lambda *_: None)  # a resume took the lock just after
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "being trained by another process" in runs_py(capsys, storage, "rm", "10-00", "--yes", code=2)
    assert run.is_dir() and trial.is_dir() and started.is_dir()


# --- csv, mistakes, the command ------------------------------------------------------------------------------------


def test_csv_is_the_union_of_keys(storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(storage, "2026-01-01/10-00-00")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 24, "epo')  # killed in mid-line
    expected = "step,epoch,time,train/loss,val/accuracy\n10,1,1.5,0.5,\n23,1,2.5,,0.9\n"
    warning = "1 line(s) of outputs/2026-01-01/10-00-00/metrics.jsonl are damaged or cut off, and left out.\n"
    assert sorted(runs_py(capsys, storage, "csv", "10-00").splitlines()) == sorted((expected + warning).splitlines())
    assert runs_py(capsys, storage, "csv", "10-00", "--output", "m.csv") == warning
    assert (tmp_path / "m.csv").read_text() == expected
    assert "cannot be written" in runs_py(capsys, storage, "csv", "10-00", "--output", "no/m.csv", code=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("lst", "Did you mean list?"),
        ("list --stat failed", "Did you mean --state?"),
        ("list --state finshed", "Did you mean finished?"),
        ("list --sort objectiv", "Did you mean objective?"),
        ("list --format markdwn", "Did you mean markdown?"),
        ("list --where optimizer.learning_rate=1", "Did you mean optimizer.lr=1?"),
        ("list --where modle=cnn", "Did you mean model=cnn?"),
        ("list --where lr", "write SETTING=VALUE"),
        ("list --since soon", "write a date"),
        ("list --limit 0", "at least 1"),
        ("list --limit many", "invalid int value"),
        ("list extra", "`list` does not know this"),
        ("show", "required: RUN"),
        ("show latest", "There is no run under"),
    ],
)  # fmt: skip
def test_mistakes_are_one_message(storage: Path, capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    found = runs_py(capsys, storage, *arguments.split(), code=2)
    assert found.startswith("Error: ") and said in found and found.count("\n") == 1


def test_the_command_loads_nothing_heavy_and_ends_quietly_in_a_pipe(storage: Path) -> None:
    for number in range(300):
        (storage / f"2026-01-01/10-{number // 60:02}-{number % 60:02}").mkdir(parents=True)
    code = f"import sys; from pathlib import Path; from manta.catalog.commands import main; print(main(['x', 'list'], Path({str(ROOT)!r})), {{'torch', 'ray', 'pandas', 'numpy'}} & set(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "0 set()\n" and done.stdout.count("\n") == 301  # outputs/ below here, by conf/
    piped = f"set -o pipefail; {shlex.quote(sys.executable)} {ROOT / SCRIPT} list | head -n 1"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("run ")


@pytest.mark.parametrize(
    "arguments", [("list",), ("csv", "latest"), ("latest",), ("show", "latest"), ("rerun", "latest", "--print")]
)
def test_a_reader_that_went_away_is_no_error(
    storage: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    make(storage, "2026-01-02/10-00-00", commit="")

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(text)

        def fileno(self) -> int:
            return spare

    spare = os.open(os.devnull, os.O_WRONLY)
    monkeypatch.setattr(sys, "stdout", Closed())
    assert commands.main([SCRIPT, "--storage", str(storage), *arguments], ROOT) == 0
    os.close(spare)
    assert capsys.readouterr().err == ""


def test_real_runs(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    run = lab.run("scaling=in_process", "training.epochs=1", "name=real", "seed=3")
    (row,) = json.loads(runs_py(capsys, lab.folder, "list", "--format", "json"))
    summary = run.read("summary.json")
    assert (row["state"], row["value"], row["test"]) == ("finished", summary["objective"]["value"], summary["test"])
    assert row["settings"] == {"training.epochs": 1, "seed": 3, "scaling": "in_process"}
    command = shlex.split(runs_py(capsys, lab.folder, "rerun", "real", "--print", "training.epochs=2").splitlines()[0])
    assert lab.launch(*command[2:]) == 0 and lab.latest.path != run.path
    assert lab.latest.read("summary.json")["epoch"] == 2
    runs_py(capsys, lab.folder, "rm", "latest", "--yes")
    assert lab.latest.path == run.path and run.checkpoints.is_dir()
