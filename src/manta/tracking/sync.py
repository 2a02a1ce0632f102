"""Telling a tracker afterwards: what it missed, or everything. Done twice, it changes nothing."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from manta import runs
from manta.catalog.entries import is_search
from manta.checks import mlflow_address
from manta.config import Config
from manta.errors import FAILED, MantaError
from manta.resume import load
from manta.runs import RunDir
from manta.search.record import STOPPED
from manta.tracking import (
    KILLED,
    NAMES,
    Draws,
    Histograms,
    Points,
    end_is_told,
    make,
    remember_end,
    reported,
    sole,
    update_state,
    wandb_mode,
)
from manta.tracking.live import Say
from manta.tracking.trouble import explain


def sync(run: RunDir, name: str, say: Say, uri: str | None = None) -> int:
    """Tell tracker `name` of a run, and of its trials and refits if it is a search; how many runs were told.

    Args:
        uri: of MLflow, if it is not to be the one of the run.

    Raises:
        MantaError: there is no such tracker, a run is training or damaged, or the tracker could not be told.
    """
    if name not in NAMES:
        raise MantaError(f"--to {name}: there are {', '.join(NAMES)}.")
    if uri is not None and name != "mlflow":
        raise MantaError(f"--tracking-uri is of mlflow; {name} has none.")
    if uri is not None and (wrong := mlflow_address("--tracking-uri", uri)):
        raise MantaError(wrong)
    count, refused = 0, []
    for each in family(run):
        try:
            _tell(each, name, uri, say)
            count += 1
        except MantaError as error:
            if each == run or error.code == FAILED:
                raise
            refused.append(str(error))  # one damaged trial does not keep the others back
    if refused:
        raise MantaError(f"{name} has been told all but {len(refused)} of {run}:\n" + "\n".join(refused))
    return count


def _tell(run: RunDir, name: str, uri: str | None, say: Say) -> None:
    """Tell of one run.

    Raises:
        MantaError: it cannot be told.
    """
    if runs.is_locked(run):
        raise MantaError(f"{run} is training right now, and its trackers are told as it goes.")
    config = OmegaConf.to_object(load(run))
    assert isinstance(config, Config)
    if uri is not None:
        mlflow = replace(config.tracking.mlflow, tracking_uri=uri)
        config = replace(config, tracking=replace(config.tracking, mlflow=mlflow))
    state = run.read("status.json").get("state", KILLED)
    state = KILLED if state == runs.RUNNING else state
    cut = check_history(run, state, name)
    try:
        with sole(run, name):
            size = reported(run)
            tracker = make(name, run, config)
            tracker.begin()
            tracker.log(Points(run.metrics).new())
            if isinstance(tracker, Draws):
                tracker.histograms(Histograms(run.histograms).new())
            tracker.end(state)
            update_state(run, name, ended=state, bytes=size)
            if not end_is_told(run):
                remember_end(run, state)
    except MantaError:
        raise
    except Exception as error:
        other = " To tell another server: --tracking-uri URI." if name == "mlflow" else ""
        said = explain(error, name, config).rstrip(".")
        raise MantaError(f"{name} could not be told of {run}: {said}.{other}", code=FAILED) from error
    offline = name == "wandb" and wandb_mode(config.tracking.wandb) == "offline"
    upload = f", offline. To upload: wandb sync {run}/wandb/offline-run-*" if offline else ""
    say(f"{run}: {name} has it all{upload}" + (" but the last line of metrics.jsonl, which is cut off" if cut else ""))


def check_history(run: RunDir, state: str, name: str) -> bool:
    """Look at what is to be told; whether the last line is cut off, as a killed writer leaves it.

    Raises:
        MantaError: there should be metrics, and there are none; or lines are damaged.
    """
    if is_search(run.path):
        return False
    text = run.metrics.read_bytes() if run.metrics.is_file() else b""
    if not text and (state in (runs.FINISHED, STOPPED) or (run.path / "summary.json").is_file()):
        raise MantaError(f"{run} has no metrics.jsonl any more: there is nothing to tell {name}.")
    if not text and name == "csv":
        raise MantaError(f"{run} has reported no metrics yet.")
    *whole, rest = text.split(b"\n")
    for number, line in enumerate(whole, start=1):
        try:
            good = isinstance(json.loads(line), dict)
        except ValueError:
            good = False
        if not good:
            raise MantaError(f"{run.metrics} is damaged: line {number} is no report. Take it out, and sync again.")
    return bool(rest)


def family(run: RunDir) -> Iterator[RunDir]:
    """A run; of a search also its parts, after it, so that they find their parent."""
    yield run
    if is_search(run.path):
        for pattern in ("trials/*/config.yaml", "refit/*/*/config.yaml"):
            for path in sorted(Path(run.path).glob(pattern)):
                if (path.parent / "status.json").is_file():
                    yield RunDir(path.parent)
