"""resume=: a run continues with its own saved configuration; what else the command line sets is applied on top."""

import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from manta import runs
from manta.checkpoints import choose, finish_replacing, sizes
from manta.config import SCHEMA_VERSION, Config, Storage, absolute
from manta.errors import MantaError
from manta.runs import RunDir, is_locked
from manta.schema import expected
from manta.search.domains import read
from manta.search.settings import POPULATION
from manta.targets import ALLOWED_TARGETS, is_own

# What a run is. With another one of these it would be another run.
_IDENTITY = (
    "seed", "name", "schema_version", "model", "optimizer._target_", "scheduler._target_", "objective", "recipe", "data.name", "data.dataset", "data.input_shape",
    "data.num_classes", "data.split_seed", "data.val_fraction", "search",
)  # fmt: skip
# What may change in a search; with anything else it would be another search.
_FREE_IN_A_SEARCH = (
    "search.num_samples", "search.time_budget_s", "search.max_concurrent_trials", "search.max_failures", "search.refit",
    "search.refit_seeds", "search.report", "cluster", "scaling", "tags", "group", "tracking", "traceback", "plan",
)  # fmt: skip
_GROUPS_OF_A_NEW_RUN = ("experiment", "debug", "model", "data", "optimizer", "scheduler")


def load(run: RunDir, allowed: Iterable[str] = ()) -> DictConfig:
    """A run's saved configuration, typed.

    A directory may be a stranger's, so it does not say which installed packages are trusted: conf/config.yaml does, or the
    command that uses it, by `allowed` or in the environment. The project's own code needs no word.

    Raises:
        MantaError: it was written by another version of the schema, or changed by hand into something invalid.
    """
    path = run.path / "config.yaml"
    try:
        saved = OmegaConf.load(path)
    except (OSError, ValueError, YAMLError) as error:
        raise MantaError(f"{path} cannot be read: {error}") from error
    if not saved:
        raise MantaError(f"{path} is empty: what {run} was cannot be told any more.")
    version = saved.get("schema_version") if isinstance(saved, DictConfig) else None
    if version != SCHEMA_VERSION:
        raise MantaError(
            f"{run} was made with configuration schema {version}; this version of Manta reads schema {SCHEMA_VERSION}. "
            f"Resume it with the code that made it (commit in {run}/provenance.json)."
        )
    try:
        typed = OmegaConf.merge(OmegaConf.structured(Config), saved)
    except OmegaConfBaseException as error:
        raise MantaError(f"{path} is not a valid configuration: {error}") from error
    assert isinstance(typed, DictConfig)
    trusted = {*allowed, *os.environ.get(ALLOWED_TARGETS, "").split(","), *_of_project()}
    typed.allowed_targets = [each for each in typed.allowed_targets if is_own(each) or each in trusted]
    return typed


def _of_project() -> list[str]:
    """What the project's own conf/ trusts."""
    path = Path(__file__).resolve().parents[2] / "conf" / "config.yaml"
    found = OmegaConf.select(OmegaConf.load(path), "allowed_targets") if path.is_file() else None
    return [str(each) for each in found or ()]


def restore(cfg: DictConfig, overrides: list[str]) -> tuple[DictConfig, RunDir]:
    """The configuration to continue `cfg.resume` with, and its run directory.

    Args:
        cfg: composed from this command line; gives the values of what is overridden.

    Raises:
        MantaError: no such run, it is still running, or an override would make it another run.
    """
    run = runs.find(str(cfg.resume), Storage(**cfg.storage))
    if not os.access(run.path, os.W_OK | os.X_OK):
        raise MantaError(
            f"resume: {run} cannot be written: it may be another user's. Copy it to a place of your own and resume the copy, "
            "or mend its permissions."
        )
    _refuse_parts(run)
    _wait_for_survivors(run)
    saved = load(run, cfg.allowed_targets)
    storage = _storage(saved, cfg)
    if storage.is_remote:
        from manta.storage.remote import newest

        saved = load(newest(run, storage), cfg.allowed_targets)
    saved.storage = storage
    is_search = bool(saved.search.algorithm)
    if not is_search:
        finish_replacing(run.checkpoints)
        choose(
            run, sizes
        )  # refuses before anything starts; what to do about damage is decided where the run is written
    change(saved, cfg, overrides, run)
    return saved, run


def change(saved: DictConfig, cfg: DictConfig, overrides: list[str], run: RunDir) -> None:
    """Apply to a saved configuration what a command line sets on top of it; `cfg` is composed from that.

    Raises:
        MantaError: one would make it another run.
    """
    is_search = bool(saved.search.algorithm)
    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.key_or_group
        if key == "resume" or _is_one_of(key, ("storage",)):
            continue
        if is_search:
            _check_change(override, cfg, saved, run)
            if key.startswith(("search.space", "search/space")):
                continue
        elif override.is_delete() or key in _GROUPS_OF_A_NEW_RUN or _is_one_of(key, _IDENTITY):
            raise MantaError(
                f"{override.input_line} cannot be changed on resume: it would be another run than {run}. "
                "Leave it out, or start a new run without resume=."
            )
        with open_dict(saved):
            try:
                value: Any = OmegaConf.select(cfg, key)
                OmegaConf.update(saved, key, value, merge=False, force_add=True)
            except OmegaConfBaseException as error:  # of an interpolation; plain values were looked at before
                wanted = expected(Config, key) or "something else"
                raise MantaError(
                    f"{override.input_line} has the wrong type, or leads nowhere: {key} must be {wanted}."
                ) from error


def _storage(saved: DictConfig, cfg: DictConfig) -> Storage:
    """Of the run, on this machine: where it is kept is part of it, how that is reached is not."""
    given = {
        name: cfg.storage[name] for name in ("endpoint_url", "finish_s") if cfg.storage[name] != Storage.__dict__[name]
    }
    return Storage(**{**saved.storage, **given, "cache": absolute(cfg.storage.cache)})


def _check_change(override: Override, cfg: DictConfig, saved: DictConfig, run: RunDir) -> None:
    """Refuse what would make a search another one.

    Raises:
        MantaError: with what it is in `run`.
    """
    key, start = override.key_or_group, f"{override.input_line} cannot be changed on resume"
    way_out = "Leave it out, or start a new search without resume=."
    name, which = saved.search.algorithm.get("name"), saved.search.scheduler.get("name")
    if key == "search.num_samples" and name == "grid":
        raise MantaError(f"{start}: {run} is a grid, which runs each of its combinations once. {way_out}")
    if key == "search.num_samples" and which in POPULATION:
        raise MantaError(f"{start}: it is the population of {run}, {saved.search.num_samples} trials. {way_out}")
    if not override.is_delete() and _is_one_of(key, _FREE_IN_A_SEARCH):
        return
    if not override.is_delete() and key.startswith(("search.space", "search/space")):
        before, now = (dict(read(OmegaConf.to_container(each.search.space))[0]) for each in (saved, cfg))  # type: ignore[arg-type]
        changed = [
            f"{k} is {before.get(k, 'not searched')} there, not {now[k]}" for k in now if before.get(k) != now[k]
        ]
        if not changed:
            return
        raise MantaError(f"{start}: it would be another search than {run}: {'; '.join(changed)}. {way_out}")
    raise MantaError(f"{start}: it would be another search than {run}. {way_out}")


def _refuse_parts(run: RunDir) -> None:
    """A trial, or a refit, belongs to its search, which knows what it has trained.

    Raises:
        MantaError: this is one.
    """
    for search in run.path.parents[1:3]:
        part = run.path.relative_to(search).parts[0]
        if part in ("trials", "refit") and (search / "search.jsonl").is_file():
            line = (run.path / "overrides.txt").read_text().strip()
            raise MantaError(
                f"resume={run} is a part of a search, which would not know of it. Continue the search: python train.py "
                f"resume={RunDir(search)}, or train these values as a run of their own: python train.py {line}"
            )


def _wait_for_survivors(run: RunDir, wait_s: float = 60.0) -> None:
    """When a driver was killed its workers notice within seconds; one that lives is a run in progress.

    Raises:
        MantaError: the run is being trained.
    """
    deadline, said = time.monotonic() + wait_s, False
    while (process := runs.launcher(run)) is not None or is_locked(run):
        process = process or run.read("status.json")
        alive = process.get("host") == socket.gethostname() and Path(f"/proc/{process.get('pid')}").exists()
        if alive or time.monotonic() > deadline:
            raise runs.is_running(run, process)
        if not said:
            print(f"Waiting for the last processes of {run} to end ...", flush=True)
            said = True
        time.sleep(0.2)


def _is_one_of(key: str, names: Iterable[str]) -> bool:
    return any(key == name or key.startswith((f"{name}.", f"{name}/")) for name in names)
