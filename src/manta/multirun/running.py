"""The multirun of a command: its jobs, how they ended, and how to go on."""

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from manta import cluster, multirun, runs
from manta.errors import FAILED, FINISHED, INTERRUPTED, MantaError, exit_code
from manta.multirun.jobs import Folder, Job
from manta.request import Prepared
from manta.runs import RunDir, short
from manta.view import Rows, View, number, table

WIDEST = 48  # a column of overrides; longer ones stick out


@dataclass
class Multirun:
    """Between its first job and the end of the command nobody else runs its jobs, and Ray stays up."""

    folder: Folder
    around: ExitStack = field(default_factory=ExitStack)

    def begin(self) -> None:
        """Hold the folder.

        Raises:
            MantaError: another command is running these jobs.
        """
        self.around.enter_context(runs.launching(RunDir(self.folder.path)))
        cluster.keep()
        self.around.callback(cluster.let_go)
        multirun.at_end(self.end)

    def end(self) -> int:
        """Show what became of the jobs; the exit code: 130 if it was interrupted, else that of the first that failed."""
        self.around.close()
        jobs = self.folder.jobs
        states = [job.state for job in jobs]
        counted = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
        rows = _rows(jobs, states)
        if set(states) - {runs.FINISHED}:
            rows.append(("resume", f"python train.py resume={shlex.quote(short(self.folder.path))}"))
        View().say(table(f"Multirun {short(self.folder.path)}: {', '.join(counted)}", rows))
        codes = [job.record.get("code") for job in jobs]
        if INTERRUPTED in codes:
            return INTERRUPTED
        failed = [code or FAILED for code, state in zip(codes, states, strict=True) if state != runs.FINISHED]
        return next(iter(failed), FINISHED)


def frozen(job: Job, make: Callable[[], Prepared], tracebacks: bool) -> Prepared | None:
    """Check a job and keep it; None = it is wrong, which is said and recorded."""
    found: list[Prepared] = []

    def go() -> int:
        try:
            found.append(make())
        except MantaError as error:
            job.note(error=str(error))
            raise MantaError(f"Job {job.number}: {error}", error.code) from error
        job.freeze(found[0])
        return FINISHED

    code = exit_code(go, tracebacks)
    if code != FINISHED:
        job.note(code=code)
        return None
    return found[0]


def here(job: Job, prepared: Prepared) -> int:
    """Run a job in this process; its exit code."""
    code = exit_code(lambda: job.launch(prepared), prepared.config.traceback)
    job.note(code=code)
    return code


def differences(jobs: list[Job]) -> dict[int, str]:
    """Of each job the overrides that not all have."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    return {job.number: " ".join(each for each in job.overrides if each not in common) for job in jobs}


def _rows(jobs: list[Job], states: list[str]) -> Rows:
    labels = differences(jobs)
    width, widest = max(map(len, states), default=0), min(max(map(len, labels.values()), default=0), WIDEST)
    rows: Rows = []
    for job, state in zip(jobs, states, strict=True):
        what = job.error if state == runs.FAILED else str(job.run or "")
        value = number(job.objective)
        rows.append(
            (f"job {job.number}", f"{state:<{width}}  {value:>9}  {labels[job.number]:<{widest}}  {what}".rstrip())
        )
    return rows
