"""Telling a tracker afterwards: what it missed, or everything. Done twice, it changes nothing."""

from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from manta import runs
from manta.catalog.entries import is_search
from manta.config import Config
from manta.errors import FAILED, MantaError
from manta.resume import load
from manta.runs import RunDir
from manta.tracking import KILLED, NAMES, Draws, Histograms, Points, make, reported, sole, update_state, wandb_mode
from manta.tracking.live import Say


def sync(run: RunDir, name: str, say: Say) -> int:
    """Tell tracker `name` of a run, and of its trials and refits if it is a search; how many runs were told.

    Raises:
        MantaError: there is no such tracker, the run is training, or the tracker could not be told.
    """
    if name not in NAMES:
        raise MantaError(f"--to {name}: there are {', '.join(NAMES)}.")
    count = 0
    for each in family(run):
        if runs.is_locked(each):
            raise MantaError(f"{each} is training right now, and its trackers are told as it goes.")
        config = OmegaConf.to_object(load(each))
        assert isinstance(config, Config)
        try:
            with sole(each, name):
                tracker = make(name, each, config)
                size = reported(each)
                tracker.begin()
                tracker.log(Points(each.metrics).new())
                if isinstance(tracker, Draws):
                    tracker.histograms(Histograms(each.histograms).new())
                state = each.read("status.json").get("state", KILLED)
                tracker.end(KILLED if state == runs.RUNNING else state)
                update_state(each, name, ended=state, bytes=size)
        except MantaError:
            raise
        except Exception as error:
            raise MantaError(f"{name} could not be told of {each}: {error}", code=FAILED) from error
        count += 1
        offline = name == "wandb" and wandb_mode(config.tracking.wandb) == "offline"
        say(f"{each}: {name} has it all" + (f", offline. To upload: wandb sync {each}/wandb/offline-run-*" * offline))
    return count


def family(run: RunDir) -> Iterator[RunDir]:
    """A run; of a search also its parts, after it, so that they find their parent."""
    yield run
    if is_search(run.path):
        for pattern in ("trials/*/config.yaml", "refit/*/*/config.yaml"):
            for path in sorted(Path(run.path).glob(pattern)):
                if (path.parent / "status.json").is_file():
                    yield RunDir(path.parent)
