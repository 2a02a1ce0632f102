"""The folder of a multirun: what was frozen of each job when it was submitted, and how far it is. Imports nothing heavy.

multirun.json          how its jobs are run
multirun.log           side by side: what was shown, and Ray's own messages
jobs/<number>/         config.yaml as composed (and space.yaml of a search), job.json, and output.log of its process
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manta import runs
from manta.config import Storage, absolute, from_hydra
from manta.errors import FINISHED, INTERRUPTED, MantaError
from manta.request import Prepared
from manta.runs import RunDir

FILE = "multirun.json"
WAITING = "waiting"
"""The state of a job that was not started; the others are those of runs."""


@dataclass(frozen=True)
class Job:
    """One job of a multirun."""

    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def log(self) -> Path:
        """What its own process printed, if it had one."""
        return self.folder / "output.log"

    @property
    def record(self) -> dict[str, Any]:
        """job.json: `overrides`; `command`, what the last attempt was told; its `run`, `code` and `error`, null = not yet."""
        return RunDir(self.folder).read("job.json")

    def note(self, **fields: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        RunDir(self.folder).write("job.json", {**self.record, **fields})

    @property
    def run(self) -> RunDir | None:
        path = self.record.get("run")
        return RunDir(Path(path)) if path and (Path(path) / "status.json").is_file() else None

    @property
    def state(self) -> str:
        """waiting, running, finished, failed or interrupted; what its run says counts, if there is one."""
        record, run = self.record, self.run
        code = record.get("code")
        if run is None:
            return WAITING if code in (None, INTERRUPTED) else runs.FINISHED if code == FINISHED else runs.FAILED
        state = str(run.read("status.json").get("state"))
        if state != runs.FINISHED and code not in (None, FINISHED, INTERRUPTED):
            return runs.FAILED  # its process was killed, or a resume was refused before it touched the run
        died = state == runs.RUNNING and not (runs.is_locked(run) or runs.launcher(run))
        return runs.INTERRUPTED if died else state  # with the whole command

    @property
    def objective(self) -> float | None:
        """The best value, as far as it has come."""
        found = self.run.read("summary.json").get("objective", {}) if self.run is not None else {}
        return found.get("value")

    @property
    def overrides(self) -> list[str]:
        return list(self.record["overrides"])

    @property
    def error(self) -> str:
        """Why it failed, in one line."""
        run = self.run
        text = self.record.get("error") or (run.read("status.json").get("error") if run is not None else None) or ""
        return next(iter(str(text).strip().splitlines()), f"see {runs.short(self.log)}")

    def freeze(self, prepared: Prepared) -> None:
        """Keep what is to run: nothing of conf/ is read again."""
        kept = RunDir(self.folder)
        kept.save_config(prepared.config)
        if prepared.space is not None:
            prepared.space.save(kept)
        run = str(prepared.previous.path) if prepared.previous is not None else None
        self.note(command=prepared.overrides, run=run, code=None, error=None)

    def thaw(self) -> Prepared:
        """What was frozen.

        Raises:
            MantaError: it was damaged meanwhile.
        """
        from manta.resume import load
        from manta.search.space import Space

        kept = RunDir(self.folder)
        config = from_hydra(load(kept))
        space = Space.load(self.run or kept, config) if config.search.algorithm else None
        return Prepared(config, list(self.record["command"]), self.run, space)

    def launch(self, prepared: Prepared) -> int:
        """Carry it out in this process; the exit code.

        Raises:
            MantaError: it failed, which is recorded.
        """
        try:
            return prepared.launch(lambda run: self.note(run=str(run.path))).code
        except MantaError as error:
            self.note(error=str(error))
            raise


@dataclass(frozen=True)
class Folder:
    """The folder of a multirun."""

    path: Path

    @property
    def settings(self) -> dict[str, Any]:
        return RunDir(self.path).read(FILE)

    @property
    def group(self) -> str:
        """What its runs share."""
        return "_".join(self.path.parts[-2:])

    def job(self, number: int) -> Job:
        return Job(self.path / "jobs" / str(number))

    @property
    def jobs(self) -> list[Job]:
        found = [path for path in (self.path / "jobs").glob("*") if (path / "job.json").is_file()]
        return [Job(path) for path in sorted(found, key=lambda path: int(path.name))]


def claim(wanted: Path, settings: Mapping[str, Any]) -> Folder:
    """The folder of a new multirun; one that is taken (by the same second, say) gives a number to the next."""
    attempt = 1
    while True:
        path = wanted if attempt == 1 else wanted.with_name(f"{wanted.name}-{attempt}")
        path.mkdir(parents=True, exist_ok=True)
        try:
            with open(path / FILE, "x") as file:
                file.write(json.dumps(dict(settings)) + "\n")
            return Folder(path)
        except FileExistsError:
            attempt += 1


def find(spec: str | None, storage: Storage) -> Folder | None:
    """The multirun that `resume=` names, by a path from here or below the storage; None = it is none."""
    if not spec or spec == "latest" or "://" in spec:
        return None
    folder = Storage(absolute(storage.path), cache=absolute(storage.cache)).folder
    for path in (Path(spec).expanduser(), folder / spec):
        if (path / FILE).is_file():
            return Folder(path.resolve())
    return None
