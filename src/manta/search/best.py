"""best/ of a search: the best trial so far, cut back to its best checkpoint, as a run directory of its own.

Imports nothing heavy.
"""

import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from manta import runs
from manta.checkpoints import Damaged, read_meta, verify
from manta.errors import FINISHED, INTERRUPTED, MantaError
from manta.runs import META, RunDir, exchange, is_locked, link_or_copy, now, point
from manta.search.record import Record, trial_dir
from manta.search.results import trial_command
from manta.search.space import FILE, Space

BEST = "best"
NEW, OLD = ".best-new", ".best-old"


def is_search(run: RunDir) -> bool:
    """Whether this directory is a search's."""
    return (run.path / FILE).is_file()


def best_of(search: RunDir, key: str = "run") -> RunDir:
    """The best trial of a search so far.

    Raises:
        MantaError: none has been validated yet.
    """
    for name in (BEST, OLD):  # OLD: after a kill in `_replace`
        if (search.path / name / "config.yaml").is_file():
            return RunDir(search.path / name)
    raise MantaError(
        f"{key}={search} is a search, and none of its trials has a validated checkpoint yet. Wait for the first, or name a "
        f"trial: {key}={search}/trials/00000"
    )


def publish_best(search: RunDir, space: Space, record: Record) -> bool:
    """Make best/ the best checkpoint of this trial, in one step; once it is, calling again costs a read.

    Returns:
        False if it was left as it is: the checkpoint is not written yet, or was retired by a better one of the same
        trial (both are over by the trial's next report), or best/ itself is being trained right now.
    """
    record = replace(record)  # a report of the trial may come meanwhile, in another thread
    assert record.best is not None
    _mend(search)
    here, new = RunDir(search.path / BEST), RunDir(search.path / NEW)
    shown = here.read("summary.json")
    there = (shown.get("trial"), shown.get("step"), shown.get("objective", {}).get("value"))
    if there == (record.number, record.best["step"], record.best["value"]):
        return True
    if is_locked(here):
        return False
    target = new.checkpoints / f"step-{record.best['step']:08d}"
    for attempt in range(3):  # its writer may be about to rename it into place
        _discard(new.path)
        try:
            meta = _copy_checkpoint(trial_dir(search, record.number), record.best, target)
            break
        except Damaged:
            _discard(new.path)
            raise
        except FileNotFoundError:
            time.sleep(0.05 * (attempt < 2))
    else:
        _discard(new.path)
        return False
    for name in ("best", "last"):
        point(new.checkpoints / name, target.name)
    point(new.path / "checkpoint", f"checkpoints/{target.name}")
    _copy_files(search, space, record, meta, new)
    _replace(new.path, here.path)
    return True


def _copy_checkpoint(trial: RunDir, best: dict[str, Any], target: Path) -> dict[str, Any]:
    """All files of a trial's best checkpoint under further names; its meta.json.

    Raises:
        FileNotFoundError: it is not there, or was retired meanwhile.
        Damaged: it is not whole.
    """
    source = trial.checkpoints / f"step-{best['step']:08d}"
    if not _is(source, best):  # an exploit gives it another name, and its own to a checkpoint of the donor's line
        source = (trial.checkpoints / "best").resolve()
    if not _is(source, best):
        raise FileNotFoundError(source)
    target.mkdir(parents=True)
    for name in (META, *read_meta(source)["files"]):
        if (source / name).is_symlink():
            raise Damaged(source, f"{name} is a link")
        link_or_copy(source / name, target / name)
    try:
        return verify(target)
    except Damaged as error:
        raise Damaged(source, error.why) from error


def _is(checkpoint: Path, best: dict[str, Any]) -> bool:
    """Whether a checkpoint is the one of this validation."""
    try:
        meta = read_meta(checkpoint)
    except Damaged as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise
    return meta["step"] == best["step"] and best["value"] in meta["metrics"].values()


def _copy_files(search: RunDir, space: Space, record: Record, meta: dict[str, Any], new: RunDir) -> None:
    """What else makes a run directory, as it was when the checkpoint was written."""
    best, trial = record.best or {}, trial_dir(search, record.number)
    if record.exploits or not (trial.path / "config.yaml").is_file():  # the trial's own has the latest values
        new.save_config(space.config(best["values"]))
    else:
        shutil.copyfile(trial.path / "config.yaml", new.path / "config.yaml")
    (new.path / "overrides.txt").write_text(trial_command(search, space, best["values"]) + "\n")
    for name in ("provenance.json", "uncommitted.diff", "workers.json"):
        source = next((run.path / name for run in (trial, search) if (run.path / name).is_file()), None)
        if source is not None:
            shutil.copyfile(source, new.path / name)
    if trial.metrics.is_file():
        with open(trial.metrics, "rb") as file:
            new.metrics.write_bytes(file.read(meta.get("metrics_bytes", -1)))
    config = yaml.safe_load((new.path / "config.yaml").read_text())
    ended = _ended(config["training"], best)
    state = runs.FINISHED if ended else runs.INTERRUPTED
    code = FINISHED if ended else INTERRUPTED
    status = {"started": now(), "attempts": 1, **trial.read("status.json")}
    new.write("status.json", {**status, "state": state, "finished": now(), "error": None, "exit_code": code})
    new.write("summary.json", {"state": state, **_summary(search, record, config["objective"], trial)})


def _ended(training: dict[str, Any], best: dict[str, Any]) -> bool:
    """Whether the best checkpoint is also the end of the training; else a resume has something left to do."""
    return any(
        training[most] is not None and best[done] >= training[most]
        for done, most in (("epoch", "epochs"), ("step", "max_steps"))
    )


def _summary(search: RunDir, record: Record, objective: dict[str, Any], trial: RunDir) -> dict[str, Any]:
    """summary.json of a run whose last checkpoint is its best, and which trial it was."""
    best, last = record.best or {}, trial.read("summary.json")
    return {
        "objective": {**objective, "value": best["value"]},
        "step": best["step"],
        "epoch": best["epoch"],
        "metrics": best["metrics"],
        "best": {
            "epoch": best["epoch"],
            "step": best["step"],
            "checkpoint": f"checkpoints/step-{best['step']:08d}",
            "metrics": best["metrics"],
        },
        "test": {},
        "throughput": last.get("throughput", {"samples_per_s": 0.0}),
        "world_size": last.get("world_size", 1),
        "resume_command": f"python train.py resume={shlex.quote(f'{search}/{BEST}')}",
        "trial": record.number,
        "values": best["values"],
    }


# --- in one step -------------------------------------------------------------------------------------------------


def _replace(new: Path, here: Path) -> None:
    """Put a directory in place of another."""
    old = here.with_name(OLD)
    if not here.exists():
        new.rename(here)
        return
    if exchange(new, here):
        new.rename(old)
    else:  # killed between these two, `_mend` puts the old one back
        here.rename(old)
        new.rename(here)
    _discard(old)


def _discard(old: Path) -> None:
    """Remove a former best/; one that somebody has trained further is kept under another name."""
    if (old / ".lock").exists():
        old.rename(old.with_name(f"{BEST}-resumed-{time.strftime('%Y-%m-%d-%H-%M-%S')}"))
    shutil.rmtree(old, ignore_errors=True)


def _mend(search: RunDir) -> None:
    """After a kill in `_replace`."""
    here, old = search.path / BEST, search.path / OLD
    if here.exists():
        _discard(old)
    elif old.exists():
        old.rename(here)
