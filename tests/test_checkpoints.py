"""Checkpoints that cannot be half there: damage of every kind, a kill or a failing disk at every step of a write."""

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import manta.training.checkpoint as writing
from manta import arguments
from manta.checkpoints import FORMAT, Choice, Damaged, choose, continue_from, match_best, read_meta, sizes, verify
from manta.errors import MantaError
from manta.evaluate import Arguments, evaluate
from manta.plan import Needs
from manta.runs import RunDir, find_checkpoint
from manta.search.exploit import adopt, place
from manta.search.trial import Job, Trial, _train
from manta.training.checkpoint import CheckpointWriter, load_checkpoint
from manta.training.record import Record
from tests.conftest import ROOT, Lab, compose_run, history, summary
from tests.test_failures import fault

QUICK = ("scaling=in_process", "training.limit_train_batches=4", "training.log_every_n_steps=2", "scheduler=constant")
STEPS = ("step-00000004", "step-00000008", "step-00000012")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Three epochs of four steps, a checkpoint after each; every one is the best so far."""
    lab = Lab(tmp_path_factory.mktemp("made"))
    run = lab.run(*QUICK, "training.epochs=3", "training.checkpoint.keep=3")
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["best", "last", *STEPS]
    assert os.readlink(run.checkpoints / "best") == os.readlink(run.checkpoints / "last") == STEPS[2]
    return run


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The same for four epochs, never disturbed."""
    return Lab(tmp_path_factory.mktemp("longer")).run(*QUICK, "training.epochs=4", "training.checkpoint.keep=3")


@pytest.fixture
def run(made: RunDir, lab: Lab) -> RunDir:
    """A copy to damage, the latest of `lab`."""
    path = lab.folder / "2026-01-01" / "run"
    shutil.copytree(made.path, path, symlinks=True)
    (lab.folder / "latest").symlink_to(path)
    config = path / "config.yaml"
    config.write_text(config.read_text().replace(str(made.path.parents[1]), str(lab.folder)))
    return RunDir(path)


def seal(checkpoint: Path) -> None:
    """Have meta.json say the truth of what is there, as an attacker would."""
    meta = json.loads((checkpoint / "meta.json").read_text())
    content = (checkpoint / "state.pt").read_bytes()
    meta["files"]["state.pt"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "meta.json").write_text(json.dumps(meta))


def change(checkpoint: Path, **values: Any) -> None:
    meta = json.loads((checkpoint / "meta.json").read_text())
    (checkpoint / "meta.json").write_text(json.dumps({**meta, **values}))


# --- what is damaged ---------------------------------------------------------------------------------------------


class Bomb:
    """Runs a command when it is unpickled without care."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def explode(checkpoint: Path) -> None:
    torch.save({"learner": Bomb(checkpoint.parents[1] / "exploded")}, checkpoint / "state.pt")
    seal(checkpoint)


def explode_bare(checkpoint: Path) -> None:
    """As a plain pickle, that torch.load also reads."""
    (checkpoint / "state.pt").write_bytes(pickle.dumps(Bomb(checkpoint.parents[1] / "exploded")))
    seal(checkpoint)


def inflate(checkpoint: Path) -> None:
    """Zeros that unpack to a thousand times their size."""
    with zipfile.ZipFile(checkpoint / "state.pt") as archive:
        parts = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(checkpoint / "state.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, bytes(2**24) if name.endswith("data/0") else content)
    seal(checkpoint)


def flip(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / "state.pt").write_bytes(content)


def cut(checkpoint: Path) -> None:
    os.truncate(checkpoint / "state.pt", 1000)


def link_out(checkpoint: Path) -> None:
    outside = checkpoint.parents[2] / "outside.pt"
    (checkpoint / "state.pt").rename(outside)
    (checkpoint / "state.pt").symlink_to(outside)


def move_out(checkpoint: Path) -> None:
    checkpoint.symlink_to(checkpoint.rename(checkpoint.parents[2] / "outside"))


def huge(checkpoint: Path) -> None:
    os.truncate(checkpoint / "meta.json", 2**24 + 1)


def save(checkpoint: Path, what: Any) -> None:
    torch.save(what, checkpoint / "state.pt")
    seal(checkpoint)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut, r"state\.pt has 1,000 bytes instead of [\d,]+"),
    "empty": (lambda c: (c / "state.pt").write_bytes(b""), r"state\.pt has 0 bytes instead of [\d,]+"),
    "one bit": (flip, r"the content of state\.pt is not what was written \(its SHA-256 differs\)"),
    "no state": (lambda c: (c / "state.pt").unlink(), r"state\.pt is missing"),
    "state is a folder": (lambda c: ((c / "state.pt").unlink(), (c / "state.pt").mkdir()), r"state\.pt is no file"),
    "state is a pipe": (lambda c: ((c / "state.pt").unlink(), os.mkfifo(c / "state.pt")), r"state\.pt is no file"),
    "state is a link": (link_out, r"state\.pt is a link"),
    "is a link": (move_out, r"it is a link that leads out of its folder"),
    "is a file": (lambda c: (shutil.rmtree(c), c.touch()), r"meta\.json cannot be read \(Not a directory\)"),
    "no meta": (lambda c: (c / "meta.json").unlink(), r"meta\.json is missing"),
    "meta is empty": (lambda c: (c / "meta.json").write_text(""), r"meta\.json is not JSON"),
    "meta is binary": (lambda c: (c / "meta.json").write_bytes(b"\xff\xfe\x00"), r"meta\.json is not JSON"),
    "meta is deep": (lambda c: (c / "meta.json").write_text("[" * 10**6), r"meta\.json is not JSON"),
    "meta is huge": (huge, r"meta\.json has 16,777,217 bytes, far more than Manta writes"),
    "meta is a list": (lambda c: (c / "meta.json").write_text("[2]"), r"meta\.json does not say which format it has"),
    "format is a word": (lambda c: change(c, format="2"), r"meta\.json does not say which format it has"),
    "step is a word": (lambda c: change(c, step="x" * 99), r"meta\.json is not what Manta writes: step is 'x{39}\.\.\."),
    "step is true": (lambda c: change(c, step=True), r"meta\.json is not what Manta writes: step is True"),
    "position is negative": (lambda c: change(c, metrics_bytes=-1), r"not what Manta writes: metrics_bytes is -1"),
    "metrics is a list": (lambda c: change(c, metrics=[]), r"not what Manta writes: metrics is \[\]"),
    "files is a number": (lambda c: change(c, files=3), r"not what Manta writes: files is 3"),
    "files is empty": (lambda c: change(c, files={}), r"meta\.json says nothing of state\.pt"),
    "size is a word": (lambda c: change(c, files={"state.pt": "3"}), r"files has 'state\.pt': '3'"),
    "file elsewhere": (lambda c: change(c, files={"../last/state.pt": 3}), r"files has '\.\./last/state\.pt': "),
    "unprintable file": (lambda c: change(c, files={"\ud800\x1b[2J": 3}), r"files has '\\ud800\\x1b\[2J': "),
    "a bomb": (explode, r"state\.pt is refused, for it holds more than tensors and plain values \((os|posix)\.system\), which could run code"),
    "a bare bomb": (explode_bare, r"state\.pt is not what Manta writes \(File is not a zip file\)"),
    "a zip bomb": (inflate, r"state\.pt would unpack to [\d,]+ bytes; Manta writes nothing compressed"),
    "not a dict": (lambda c: save(c, [1]), r"state\.pt is not what Manta writes: it has no learner"),
    "another dict": (lambda c: save(c, {"learner": {}, "progress": 3}), r"state\.pt is not what Manta writes: it has no progress"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_and_the_newest_whole_one_is_used(run: RunDir, kind: str) -> None:
    """Nothing executes, nothing is lost, `last` names a whole one; the second look finds nothing to say."""
    damage, why = DAMAGE[kind]
    damage(run.checkpoints / STEPS[2])
    said: list[str] = []
    choice = continue_from(run, load_checkpoint, said.append)
    assert choice is not None
    assert choice.path == (run.checkpoints / STEPS[1]).resolve()
    assert choice.found[0]["progress"]["step"] == 8
    (line,) = said
    start, end = (
        f"{run}: checkpoint {STEPS[2]} is damaged (",
        f"), kept as damaged-{STEPS[2]}; continuing from {STEPS[1]}.",
    )
    assert line.startswith(start)
    assert line.endswith(end)
    assert re.search(why, line[len(start) : -len(end)])
    assert os.path.lexists(run.checkpoints / f"damaged-{STEPS[2]}")
    assert os.readlink(run.checkpoints / "last") == STEPS[1]
    assert not (run.path / "exploded").exists()
    again = continue_from(run, load_checkpoint, said.append)
    assert again is not None
    assert again.path == choice.path
    assert len(said) == 1


@pytest.mark.parametrize("kind", ["one bit", "a bomb", "no meta"])
def test_a_damaged_one_is_not_loaded(run: RunDir, kind: str) -> None:
    damage, why = DAMAGE[kind]
    damage(run.checkpoints / STEPS[2])
    with pytest.raises(Damaged, match=why) as refused:
        load_checkpoint(run.checkpoints / "last")
    assert str(refused.value).startswith(f"Checkpoint {run.checkpoints / 'last'} cannot be used: ")
    assert "weights_only" not in str(refused.value)
    assert not (run.path / "exploded").exists()


@pytest.mark.parametrize("where", ["/etc", "../../outside", "nowhere", "."])
def test_a_last_that_names_no_checkpoint_here(run: RunDir, where: str) -> None:
    shutil.copytree(run.checkpoints / STEPS[0], run.path.parent / "outside")
    (run.checkpoints / "last").unlink()
    (run.checkpoints / "last").symlink_to(where)
    said: list[str] = []
    assert continue_from(run, verify, said.append) is not None
    assert said == [f"{run}: checkpoints/last names no whole checkpoint; continuing from {STEPS[2]}."]


def test_older_damage_counts_too(run: RunDir) -> None:
    """Else retention would keep damaged ones instead of whole ones."""
    for name in STEPS[1:]:
        flip(run.checkpoints / name)
    said: list[str] = []
    choice = continue_from(run, verify, said.append)
    assert choice is not None
    assert (choice.path.name, choice.found["step"]) == (STEPS[0], 4)
    assert said[0].count("is damaged") == 2
    assert sorted(path.name for path in run.checkpoints.glob("*-*")) == [
        *(f"damaged-{name}" for name in STEPS[1:]),
        STEPS[0],
    ]


def test_damage_below_the_chosen_one(run: RunDir) -> None:
    flip(run.checkpoints / STEPS[2])
    flip(run.checkpoints / STEPS[0])
    said: list[str] = []
    choice = continue_from(run, verify, said.append)
    assert choice is not None
    assert choice.path.name == STEPS[1]
    assert set(choice.damaged) == {STEPS[0], STEPS[2]}
    assert not (run.checkpoints / STEPS[0]).exists()


def test_the_same_step_damaged_twice(run: RunDir) -> None:
    for _ in range(2):
        flip(run.checkpoints / STEPS[2])
        continue_from(run, verify, lambda _: None)
        shutil.copytree(run.checkpoints / STEPS[1], run.checkpoints / STEPS[2])
        (run.checkpoints / "last").unlink()
        (run.checkpoints / "last").symlink_to(STEPS[2])
    assert {path.name for path in run.checkpoints.glob("damaged*")} == {f"damaged-{STEPS[2]}", f"damaged-{STEPS[2]}-2"}


@pytest.mark.parametrize("kind", ["one bit", "cut", "no state"])
def test_a_run_goes_on_exactly(
    lab: Lab, run: RunDir, longer: RunDir, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """From the end of the second epoch instead of the third: the history is cut back, and the end is the same."""
    DAMAGE[kind][0](run.checkpoints / STEPS[2])
    before = run.metrics.read_bytes()
    assert lab.launch("resume=latest", "training.epochs=4") == 0
    output = capfd.readouterr().out
    assert f"kept as damaged-{STEPS[2]}; continuing from {STEPS[1]}." in output.replace("\n", " ")
    assert run.metrics.read_bytes().startswith(before[: read_meta(run.checkpoints / STEPS[1])["metrics_bytes"]])
    assert history(run) == history(longer)
    mine, theirs = (load_checkpoint(each.checkpoints / "last")[0] for each in (run, longer))
    for name, tensor in theirs["learner"]["model"].items():
        assert tensor.equal(mine["learner"]["model"][name])
    assert summary(run)["best"] == summary(longer)["best"]
    assert os.readlink(run.checkpoints / "best") == os.readlink(longer.checkpoints / "best") == STEPS[2]


def test_none_is_whole(lab: Lab, run: RunDir) -> None:
    """Refused before anything starts, and again by the training itself; nothing is renamed."""
    cut(run.checkpoints / STEPS[0])
    (run.checkpoints / STEPS[1] / "state.pt").unlink()
    flip(run.checkpoints / STEPS[2])  # only its content tells
    before = sorted(run.checkpoints.rglob("*")), run.metrics.read_bytes()
    with pytest.raises(MantaError, match=f"No checkpoint of {run} is whole") as refused:
        lab.launch("resume=latest", "training.epochs=4")
    assert f"{STEPS[0]}: state.pt has 1,000 bytes" in str(refused.value)
    assert f"{STEPS[1]}: state.pt is missing" in str(refused.value)
    assert f"{STEPS[2]}: the content of state.pt is not what was written" in str(refused.value)
    assert f"to begin again with step 0, rename {run}/checkpoints and {run}/summary.json, then resume." in str(
        refused.value
    )
    cut(run.checkpoints / STEPS[2])
    with pytest.raises(MantaError, match=f"No checkpoint of {run} is whole"):
        compose_run(f"storage.path={lab.folder}", "resume=latest")
    assert (sorted(run.checkpoints.rglob("*")), run.metrics.read_bytes()) == before
    # The way out that was told.
    run.checkpoints.rename(run.path / "old")
    (run.path / "summary.json").unlink()
    assert lab.launch("resume=latest", "training.epochs=1") == 0
    assert [line["step"] for line in history(run)] == [2, 4, 4]


def test_only_put_aside_ones_are_left(run: RunDir) -> None:
    for name in STEPS:
        (run.checkpoints / name).rename(run.checkpoints / f"damaged-{name}")
    (run.path / "summary.json").unlink()
    with pytest.raises(MantaError, match=rf"No checkpoint of .* is whole \(there is best, damaged-{STEPS[0]}, "):
        choose(run, verify)


def test_a_disk_that_is_away_is_no_damage(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions or a lost network disk: the run stops, instead of going back to an older checkpoint."""
    real = os.lstat

    def stale(path: Any, *more: Any) -> os.stat_result:
        if str(path).endswith(f"{STEPS[2]}/state.pt"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, *more)

    monkeypatch.setattr("manta.checkpoints.os.lstat", stale)
    with pytest.raises(MantaError, match=r"state\.pt cannot be read: Stale file handle") as failed:
        continue_from(run, verify, pytest.fail)
    assert not isinstance(failed.value, Damaged)


# --- formats -----------------------------------------------------------------------------------------------------


def as_format_1(checkpoint: Path) -> None:
    change(checkpoint, format=1, files={"state.pt": (checkpoint / "state.pt").stat().st_size})


def test_the_format_before_is_read(lab: Lab, run: RunDir, longer: RunDir) -> None:
    for name in STEPS:
        as_format_1(run.checkpoints / name)
    assert read_meta(run.checkpoints / "last")["files"]["state.pt"]["sha256"] is None
    assert lab.launch("resume=latest", "training.epochs=4") == 0
    assert history(run) == history(longer)
    assert read_meta(run.checkpoints / "last")["format"] == FORMAT == 2
    # Its sizes are looked at, and torch finds what they do not show.
    as_format_1(run.checkpoints / "step-00000016")
    content = (run.checkpoints / "step-00000016" / "state.pt").read_bytes()
    (run.checkpoints / "step-00000016" / "state.pt").write_bytes(bytes(len(content)))
    with pytest.raises(Damaged, match=r"state\.pt is not what Manta writes"):
        load_checkpoint(run.checkpoints / "last")


@pytest.mark.parametrize("version", [3, 0, -1, 99])
def test_another_format_is_refused_by_name(lab: Lab, run: RunDir, version: int) -> None:
    """It is not damaged: the run does not go back to an older one."""
    change(run.checkpoints / STEPS[2], format=version)
    with pytest.raises(MantaError) as refused:
        lab.launch("resume=latest", "training.epochs=4")
    assert str(refused.value) == (
        f"Checkpoint {run.checkpoints.resolve() / STEPS[2]} has format {version}; this version of Manta reads 1 to 2. Use the "
        "version that wrote it (the commit is in provenance.json of its run)."
    )
    assert (run.checkpoints / STEPS[2]).is_dir()


# --- best --------------------------------------------------------------------------------------------------------


def test_a_damaged_best(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    """`last`, if validated, is the best from here on: said, and tested at the end."""
    settings = (*QUICK, "optimizer.lr=1e-9", "training.epochs=3")  # nothing is learned: the first epoch stays the best
    run = lab.run(*settings)
    assert os.readlink(run.checkpoints / "best") == STEPS[0]
    flip(run.checkpoints / STEPS[0])
    assert lab.launch("resume=latest", "training.epochs=4") == 0
    output = " ".join(capfd.readouterr().out.split())
    assert f"best checkpoint {STEPS[0]} is damaged (the content of state.pt" in output
    assert f"kept as damaged-{STEPS[0]}; from here on it is {STEPS[2]}." in output
    assert os.readlink(run.checkpoints / "best") == STEPS[2]
    assert summary(run)["best"]["step"] == 12
    assert summary(run)["best"]["checkpoint"] == f"checkpoints/{STEPS[2]}"
    assert "test/accuracy" in summary(run)["test"]


def test_a_damaged_best_in_the_middle_of_an_epoch(run: RunDir) -> None:
    """`last` was not validated: there is no best, and no link, until the next validation."""
    progress = load_checkpoint(run.checkpoints / "last")[0]["progress"]
    flip(run.checkpoints / STEPS[0])
    progress = {**progress, "best": {**progress["best"], "step": 4}, "step": 13}
    said: list[str] = []
    assert match_best(run, progress, "val/accuracy", said.append) is None
    assert said[0].endswith(f"kept as damaged-{STEPS[0]}; from here on it is the next to be validated.")
    assert not os.path.lexists(run.checkpoints / "best")


def test_the_best_is_one_to_continue_from(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    """With training.checkpoint.keep=1 it is the only other one."""
    settings = (*QUICK, "optimizer.lr=1e-9")
    run, whole = lab.run(*settings, "training.epochs=3"), lab.run(*settings, "training.epochs=4")
    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == [STEPS[0], STEPS[2]]
    flip(run.checkpoints / STEPS[2])
    assert lab.launch(f"resume={run.path}", "training.epochs=4") == 0
    assert f"continuing from {STEPS[0]}." in " ".join(capfd.readouterr().out.split())
    assert history(run) == history(whole)
    assert summary(run)["best"] == summary(whole)["best"]


def test_all_ranks_hear_of_it(run: RunDir) -> None:
    """If rank 0 finds none whole, the others raise the same instead of waiting for it."""
    for name in STEPS:
        flip(run.checkpoints / name)
    told: list[Any] = []

    def gather(value: Any) -> list[Any]:
        told.append(value)
        return [pickle.loads(pickle.dumps(told[0]))]

    for rank in (0, 1):
        record = object.__new__(Record)
        record.session = SimpleNamespace(main=rank == 0, run=run, gather=gather)  # type: ignore[assignment]
        with pytest.raises(MantaError, match=f"No checkpoint of {run} is whole") as refused:
            record._find()
        assert refused.value.code == 2
    assert told[1] is None


def test_a_best_of_a_line_that_was_left(lab: Lab, run: RunDir) -> None:
    """A kill between the two links: `best` names one that `last` does not know yet. Another learning rate never gets there."""
    (run.checkpoints / "last").unlink()
    (run.checkpoints / "last").symlink_to(STEPS[0])
    assert lab.launch("resume=latest", "training.epochs=2", "optimizer.lr=1e-12") == 0
    best = summary(run)["best"]
    assert best["step"] == 4 or best["step"] == 8
    assert os.readlink(run.checkpoints / "best") == f"step-{best['step']:08d}"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_copy_without_links(lab: Lab, run: RunDir, longer: RunDir, damaged: bool) -> None:
    """Object stores, and `cp -L`, make directories of them."""
    for name in ("last", "best"):
        (run.checkpoints / name).unlink()
        shutil.copytree(run.checkpoints / STEPS[2], run.checkpoints / name)
    shutil.rmtree(run.checkpoints / STEPS[2])
    if damaged:
        (run.checkpoints / "best" / "meta.json").unlink()
    assert lab.launch("resume=latest", "training.epochs=4") == 0
    assert history(run) == history(longer)
    assert os.readlink(run.checkpoints / "last") == "step-00000016"
    assert os.readlink(run.checkpoints / "best") == STEPS[2]
    aside = {"damaged-best"} if damaged else {"copied-best"}
    assert {path.name for path in run.checkpoints.iterdir()} - {"last", "best", *STEPS, "step-00000016"} == aside


def test_a_best_of_a_strangers_choice(run: RunDir) -> None:
    """Nothing outside of the folder is looked at or renamed."""
    state, meta = load_checkpoint(run.checkpoints / "last")
    state["progress"]["best"] = {"value": 9.0, "step": 4, "epoch": 1, "metrics": {}, "checkpoint": "checkpoints/.."}
    CheckpointWriter(run.checkpoints, 3, False).save(state, meta, False, lambda: None)
    said: list[str] = []
    best = match_best(run, state["progress"], "val/accuracy", said.append)
    assert said == [f"{run}: best checkpoint .. is gone; from here on it is {STEPS[2]}."]
    assert best is not None
    assert best["value"] == state["progress"]["validation"]["metrics"]["val/accuracy"]


# --- evaluate, predict -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one bit", "cut", "a bomb"])
def test_an_evaluation_names_the_whole_ones(run: RunDir, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    DAMAGE[kind][0](run.checkpoints / STEPS[2])
    before = sorted(run.path.rglob("*"))
    given = ["scripts/evaluate.py", f"run={run.path}", "checkpoint=last"]
    assert arguments.main(Arguments, evaluate, given, ROOT) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"Error: checkpoint=last: {STEPS[2]} of {run} cannot be used: ")
    assert re.search(DAMAGE[kind][1], error)
    assert error.endswith(". Whole are: 4, 8.\n")
    assert sorted(run.path.rglob("*")) == before
    for name in STEPS[:2]:
        flip(run.checkpoints / name)
    assert arguments.main(Arguments, evaluate, given, ROOT) == 2
    assert "No other one is whole." in capsys.readouterr().err


# --- trials ------------------------------------------------------------------------------------------------------


def trained(run: RunDir, heard: int) -> list[int]:
    """The epochs that a trial tells its search while it goes on to epoch 4."""
    config = compose_run(
        *QUICK, "training.epochs=4", "training.checkpoint.keep=3", f"storage.path={run.path.parents[1]}"
    )[0]
    told: list[int] = []
    job = Job(Needs(1, False, {"CPU": 1}), False, run.path / ".stop", str(run.path))

    def decide(values: dict[str, Any]) -> bool:
        told.append(values["epoch"])
        return False

    assert _train(run, config, job, heard, decide, Trial.__new__(Trial)._in_this_process) == "finished"
    return told


@pytest.mark.parametrize(("heard", "tells"), [(3, [3]), (2, [3]), (1, [2, 3])])
def test_a_trial_with_a_damaged_last(run: RunDir, longer: RunDir, heard: int, tells: list[int]) -> None:
    """It trains its third epoch again. The search, which leaves out what it knows, misses none; the end tells of the last."""
    flip(run.checkpoints / STEPS[2])
    assert trained(run, heard) == tells
    assert history(run) == history(longer)
    assert (run.checkpoints / f"damaged-{STEPS[2]}").is_dir()


def test_a_trial_without_a_whole_one(run: RunDir) -> None:
    for name in STEPS:
        flip(run.checkpoints / name)
    with pytest.raises(MantaError, match=f"No checkpoint of {run} is whole"):
        trained(run, 3)


def test_an_exploit_of_a_damaged_donor(run: RunDir, longer: RunDir) -> None:
    """The newest whole one of the donor is given; one that is damaged on the way is not adopted."""
    receiver = RunDir(run.path.parent / "receiver")
    shutil.copytree(longer.path, receiver.path, symlinks=True)
    exploit = {"donor": 0, "values": {}, "index": 1}
    for kind, step, epoch in (("one bit", 2, 2), ("cut", 1, 1)):
        DAMAGE[kind][0](run.checkpoints / STEPS[step])
        assert place(run, receiver, exploit) == epoch
        assert verify(receiver.path / "adopt")["epoch"] == epoch
    before = history(receiver)
    state = receiver.path / "adopt" / "state.pt"
    content = state.read_bytes()
    state.unlink()
    state.write_bytes(content[:-1] + b"x")
    with pytest.raises(Damaged, match=r"adopt cannot be used: the content of state\.pt"):
        adopt(receiver)
    assert history(receiver) == before
    state.write_bytes(content)
    adopt(receiver)
    assert load_checkpoint(receiver.checkpoints / "last")[1]["epoch"] == 1
    flip(run.checkpoints / STEPS[0])
    with pytest.raises(MantaError, match=r"No checkpoint of .* is whole"):
        place(run, receiver, exploit)


# --- workers -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.drill
def test_a_worker_that_is_replaced_finds_damage(lab: Lab) -> None:
    """No command in between: Ray starts the workers again, rank 0 finds the damage, and all ranks go on from one step."""
    settings = ("scaling=cpu", "scaling.num_workers=2", "scaling.resources_per_worker={CPU: 1}", *QUICK[1:],
                "training.epochs=4", "training.checkpoint.keep=3", "training.checkpoint.asynchronous=false")  # fmt: skip
    whole = lab.run(*settings, *fault("DamageAt", call=10**9, marker=lab.folder / "never"))
    run = lab.run(*settings, "scaling.max_failures=1", *fault("DamageAt", call=15, marker=lab.folder / "fired"))
    assert (lab.folder / "fired").exists()
    assert history(run) == history(whole)
    assert (run.checkpoints / f"damaged-{STEPS[2]}").is_dir()
    assert f"continuing from {STEPS[1]}." in run.log.read_text()


# --- writing -----------------------------------------------------------------------------------------------------


class Steps:
    """Counts what a write does to one folder, call by call, and does something at one of them."""

    def __init__(self) -> None:
        self.folder, self.seen, self.at, self.action = "", [], 0, lambda: None  # type: ignore[var-annotated]
        self.active, self.writes = False, 0

    def __call__(self, what: str) -> None:
        if self.active:
            self.seen.append(what)
            if len(self.seen) == self.at:
                self.action()

    def audit(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.active or event not in ("open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir"):
            return
        name = os.fsdecode(given[0]) if isinstance(given[0], str | bytes | os.PathLike) else ""
        target = str(given[1]) if event in ("os.rename", "os.symlink") else ""
        if self.folder in name or self.folder in target or name.startswith("step-"):
            self(f"{event} {Path(name).name} {Path(target).name}".strip())


STEP = Steps()
sys.addaudithook(STEP.audit)


@contextmanager
def watched(folder: Path, at: int = 0, action: Callable[[], None] = lambda: None) -> Iterator[list[str]]:
    """Names of the calls; `action` happens just before the `at`-th."""
    real_sync, real_write = os.fsync, writing._Hashed.write

    def sync(descriptor: int) -> None:
        STEP(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        real_sync(descriptor)

    def write(self: Any, data: memoryview) -> int:
        real, self.file = self.file, Failing(self.file)
        try:
            return real_write(self, data)
        finally:
            self.file = real

    STEP.folder, STEP.seen, STEP.at, STEP.action, STEP.writes, STEP.active = str(folder), [], at, action, 0, True
    os.fsync, writing._Hashed.write = sync, write  # type: ignore[method-assign, assignment]
    try:
        yield STEP.seen
    finally:
        STEP.active = False
        os.fsync, writing._Hashed.write = real_sync, real_write  # type: ignore[method-assign]


class Failing:
    """A file of which every sixth write is a step, half of which is done before."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: memoryview) -> int:
        self.file.write(data[: len(data) // 2])
        STEP.writes += 1
        if STEP.writes % 6 == 0:
            STEP("write")
        return int(self.file.write(data[len(data) // 2 :]))


def state_of(step: int) -> dict[str, Any]:
    progress = {"step": step, "best": None, "validation": {}}
    return {
        "learner": {"weights": torch.full((50,), float(step))},
        "progress": progress,
        "ranks": [],
        "metrics_bytes": 0,
    }


def meta_of(step: int) -> dict[str, Any]:
    return {"step": step, "epoch": step, "metrics": {}, "metrics_bytes": 0}


def write(folder: Path, step: int, value: int | None = None, published: Callable[[], None] = lambda: None) -> None:
    writer = CheckpointWriter(folder, keep=1, asynchronous=False)
    writer.save(state_of(step if value is None else value), meta_of(step), True, published)


def loaded(folder: Path, name: str) -> float:
    """The weights of a checkpoint, which must be whole."""
    return float(load_checkpoint(folder / name)[0]["learner"]["weights"][0])


@pytest.fixture
def no_exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems that cannot exchange two names."""
    if request.param:
        monkeypatch.setattr(writing, "exchange", lambda *_: False)


# A new step; the step that `last` names, again; the same where names cannot be exchanged.
WAYS = pytest.mark.parametrize(
    ("step", "no_exchange"), [(20, False), (10, False), (10, True)], indirect=["no_exchange"]
)


@WAYS
@pytest.mark.usefixtures("no_exchange")
def test_a_kill_at_every_step_of_a_write(tmp_path: Path, step: int) -> None:
    """What `last` and `best` name is whole, old or new, and the next process goes on as if nothing had been."""
    folder = tmp_path / "checkpoints"
    outcomes = []
    for at in range(1, 100):
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, 10)
        child = os.fork()
        if child == 0:
            with watched(folder, at, lambda: os._exit(9)):
                write(folder, step, 21)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            break
        run, said = RunDir(tmp_path), []
        choice = continue_from(run, load_checkpoint, said.append)
        assert choice is not None
        assert said == []
        found = loaded(folder, "last"), loaded(folder, "best")
        outcomes.append(found)
        assert set(found) <= {10.0, 21.0}, at
        write(folder, step, 22)
        assert (loaded(folder, "last"), loaded(folder, "best")) == (22.0, 22.0), at
        assert sorted(path.name for path in folder.iterdir()) == ["best", "last", f"step-{step:08d}"], at
    assert len(outcomes) > 15
    assert outcomes[0] == (10.0, 10.0)
    assert outcomes[-1] == (21.0, 21.0)


@pytest.mark.parametrize(
    ("step", "no_exchange", "number"),
    [(20, False, errno.ENOSPC), (10, False, errno.EIO), (10, True, errno.EROFS)],
    indirect=["no_exchange"],
)
@pytest.mark.usefixtures("no_exchange")
def test_a_disk_that_fails_at_every_step_of_a_write(tmp_path: Path, step: int, number: int) -> None:
    """The error is the system's own, no half checkpoint takes room, and what `last` and `best` name is whole."""
    folder = tmp_path / "checkpoints"
    failures: list[str] = []

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    for at in range(1, 100):
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, 10)
        error = None
        with watched(folder, at, fail) as seen:
            try:
                write(folder, step, 21)
            except OSError as raised:
                error = raised
        if len(seen) < at:
            break
        if error is not None:  # where things are only cleared away, it may go on
            assert error.errno == number, seen
            failures.append(seen[at - 1])
        assert {loaded(folder, "last"), loaded(folder, "best")} <= {10.0, 21.0}, seen
        if seen[at - 1] in ("write", "fsync state.pt", "fsync meta.json"):
            assert not list(folder.glob(".writing-step*")), seen
        write(folder, step, 22)
        assert (loaded(folder, "last"), loaded(folder, "best")) == (22.0, 22.0), seen
    assert {"write", "fsync state.pt", "fsync meta.json", "fsync checkpoints"} <= set(failures)


def test_the_order_of_a_write(tmp_path: Path) -> None:
    """Contents are on disk before their names are, names before the links, links before the old one goes."""
    folder = tmp_path / "checkpoints"
    write(folder, 10)
    with watched(folder) as seen:
        write(folder, 20, published=lambda: STEP("published"))
    order = [each for each in seen if not each.startswith(("write", "open", "os.mkdir", "os.remove .writing"))]
    start = order.index("fsync state.pt")
    aside = ".writing-step-00000020"
    links = [f".writing-{name}-{os.getpid()}" for name in ("best", "last")]
    assert order[start : start + 11] == [
        "fsync state.pt", "fsync meta.json", f"fsync {aside}", f"os.rename {aside} step-00000020", "fsync checkpoints",
        f"os.symlink step-00000020 {links[0]}", f"os.rename {links[0]} best",
        f"os.symlink step-00000020 {links[1]}", f"os.rename {links[1]} last", "fsync checkpoints", "published",
    ]  # fmt: skip
    assert order[-1] == "os.rmdir step-00000010"


def test_sizes_and_hashes_are_those_of_the_files(made: RunDir) -> None:
    """As `sha256sum` says."""
    files = json.loads((made.checkpoints / "last" / "meta.json").read_text())["files"]
    state = made.checkpoints / "last" / "state.pt"
    said = subprocess.run(["sha256sum", state], capture_output=True, text=True, check=True).stdout.split()[0]
    assert files == {"state.pt": {"bytes": state.stat().st_size, "sha256": said}}


@pytest.mark.parametrize(
    "way", ["asynchronous=true", "asynchronous=false", pytest.param("on a worker", marks=pytest.mark.ray)]
)
def test_a_disk_that_is_really_full(small_disk: Path, longer: RunDir, request: pytest.FixtureRequest, way: str) -> None:
    """It fills up while a checkpoint is written: exit 1, the last whole one intact; with room again the run goes on."""
    small = Lab(small_disk)
    settings = (*QUICK, "training.epochs=4", "training.checkpoint.keep=3")
    if way == "on a worker":
        request.getfixturevalue("ray_cluster")
        settings = ("scaling=cpu", "scaling.num_workers=1", "scaling.resources_per_worker={CPU: 1}", *settings[1:])
    else:
        settings = (*settings, f"training.checkpoint.{way}")
    filler = small_disk / "filler"
    settings = (*settings, *fault("FillAt", call=6, path=filler, leave=100_000))
    with pytest.raises(MantaError, match=r"Storage failed: No space left on device .*resume=") as failed:
        small.launch(*settings)
    assert failed.value.code == 1
    run = small.latest
    assert run.read("status.json")["state"] == "failed"
    assert load_checkpoint(run.checkpoints / "last")[1]["step"] == 4
    assert load_checkpoint(run.checkpoints / "best")[1]["step"] == 4
    assert not list(run.checkpoints.glob(".writing-step*"))
    filler.write_bytes(b"")  # else it would be filled again
    assert small.launch("resume=latest") == 0
    assert history(run) == history(longer)


def test_a_choice_reads_no_more_than_it_must(run: RunDir) -> None:
    """A whole `last` is the only one looked at."""
    seen: list[str] = []

    def look(path: Path) -> dict[str, Any]:
        seen.append(path.name)
        return sizes(path)

    choice = choose(run, look)
    assert isinstance(choice, Choice)
    assert seen == [STEPS[2]]
    assert choice.damaged == {}
    assert find_checkpoint(run.checkpoints, "last") == choice.path
