"""cluster=slurm: write the file of a job, hand it to sbatch, say how to follow it. scripts/slurm/job.sh is what runs in it.

Imports nothing heavy.
"""

import dataclasses
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from manta import runs
from manta.checks import refuse
from manta.cluster.elsewhere import PROJECT, Request, is_of_cluster, name_of
from manta.config import Config, Slurm
from manta.errors import FINISHED, MantaError
from manta.targets import ALLOWED_TARGETS
from manta.view import View, table

ANSWER_S = 120
"""How long sbatch may take."""

# Of sbatch's options, those that have a setting, and those that the job's file needs as it writes them.
_SETTINGS = {
    "--job-name": "job_name", "-J": "job_name", "--partition": "partition", "-p": "partition", "--account": "account",
    "-A": "account", "--qos": "qos", "-q": "qos", "--constraint": "constraint", "-C": "constraint", "--time": "time",
    "-t": "time", "--nodes": "nodes", "-N": "nodes", "--cpus-per-task": "cpus_per_task", "-c": "cpus_per_task",
    "--gpus-per-node": "gpus_per_node", "--mem": "mem", "--signal": "signal_s", "--requeue": "requeue",
    "--no-requeue": "requeue",
}  # fmt: skip
_OURS = (
    "--output",
    "-o",
    "--error",
    "-e",
    "--open-mode",
    "--array",
    "-a",
    "--ntasks",
    "-n",
    "--ntasks-per-node",
    "--wrap",
)


def submit(request: Request) -> int:
    """One job, or for a multirun one array of them.

    Raises:
        MantaError: the settings do not fit, there is no sbatch, or it refuses.
    """
    config = request.config
    settings = config.cluster.slurm
    send = settings.submit and not config.plan
    refuse(list(problems(config, send)))
    if config.resume is not None:  # what `latest` is may change while the job waits
        found = runs.find(config.resume, config.storage)
        config = dataclasses.replace(config, resume=str(found.path))
        rest = [override for override in request.overrides if name_of(override) != "resume"]
        request = dataclasses.replace(request, config=config, overrides=[f"resume='{found.path}'", *rest])
    script = _write(config, request)
    view = View()
    if not send:
        view.say(table("Not submitted", [("script", runs.short(script)), ("submit", f"sbatch {_quoted(script)}")]))
        return FINISHED
    number = _sbatch(script)
    log = script.with_suffix("")
    logs = (
        [f"{log}-{number}.log"] if not request.jobs else [f"{log}-{number}_{i}.log" for i in range(len(request.jobs))]
    )
    rows = [
        ("job", f"{number}, an array of {len(request.jobs)}" if request.jobs else number),
        ("script", runs.short(script)),
        ("log", runs.short(Path(logs[0])) + (f" ... _{len(logs) - 1}.log" if len(logs) > 1 else "")),
        ("follow", f"tail -F {_quoted(Path(logs[0]))}"),
        ("state", f"squeue --jobs={number}"),
        ("stop", f"scancel {number}     (a checkpoint first, if it takes less than the site's KillWait, mostly 30 s)"),
        ("requeue", f"scancel --batch --signal=USR1 {number}     (after a checkpoint)"),
    ]
    view.say(table("Submitted", rows))
    return FINISHED


def problems(config: Config, send: bool) -> Iterator[str]:
    """What SLURM would refuse, or only say when the job runs."""
    settings, scaling = config.cluster.slurm, config.scaling
    if send and shutil.which("sbatch") is None:
        yield (
            "cluster=slurm: there is no sbatch here. Type the command on a login node of the cluster, or only write the job's "
            "file: cluster.slurm.submit=false"
        )
    yield from _time(settings)
    wrong = list(_options(settings))
    yield from wrong or _fit(config)
    if config.cluster.stop_on_interrupt:
        yield "cluster.stop_on_interrupt=true: with cluster=slurm the command ends at once, and the job goes on. Leave it out."
    if settings.nodes > 1 and scaling.num_workers == 0:
        yield (
            f"cluster.slurm.nodes={settings.nodes}: scaling.num_workers=0 trains in one process, on one node. Set "
            "cluster.slurm.nodes=1 or scaling=multi_node."
        )
    if settings.nodes > 1 and config.storage.is_remote:
        yield (
            f"cluster.slurm.nodes={settings.nodes}: with a bucket everything runs on one node. Use a folder that all nodes "
            "share: storage.path=/shared/outputs"
        )


def seconds(time: str) -> int | None:
    """Of a time limit as sbatch reads it; None: it is none, or only a number."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not found or found[1] is found[3] is None:
        return None
    days, *parts = (int(part) if part else 0 for part in found.groups())
    if found[1] is None and found[4] is None:  # minutes:seconds
        parts = [0, *parts[:2]]
    return days * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]


def _time(settings: Slurm) -> Iterator[str]:
    if settings.time is None:
        return
    key = f"cluster.slurm.time={settings.time}"
    limit = seconds(settings.time)
    if limit is None:
        yield (
            f"{key} must be hours:minutes:seconds, minutes:seconds or days-hours:minutes:seconds, e.g. 12:00:00. (In a file "
            'in quotes, time: "12:00:00": YAML takes it for a number.)'
        )
    elif limit <= settings.signal_s:
        yield (
            f"{key} is no longer than cluster.slurm.signal_s={settings.signal_s}, the seconds before it at which the "
            "job writes a checkpoint and ends: it would never train. Set a longer cluster.slurm.time."
        )


def _options(settings: Slurm) -> Iterator[str]:
    """Options that the job's file has already, and what would break its lines."""
    for option in settings.directives:
        name = re.split(r"[= ]", option, maxsplit=1)[0]
        if not re.match(r"--?[A-Za-z]", option):
            yield f'cluster.slurm.directives has {option}: an option of sbatch is written "--option=value".'
        elif name in _SETTINGS:
            yield f"cluster.slurm.directives has {option}: set cluster.slurm.{_SETTINGS[name]} instead."
        elif name in _OURS:
            yield f"cluster.slurm.directives has {option}: the job needs its own {name}. Leave it out."
    for key, value in dataclasses.asdict(settings).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and "\n" in text:
                yield f"cluster.slurm.{key} has a line break in it. Write one item a line."
    if not re.fullmatch(r"([\w.-]+:)?\d+", str(settings.gpus_per_node or 0)):
        yield f"cluster.slurm.gpus_per_node={settings.gpus_per_node} must be a number or type:number, e.g. a100:4."


def _gpus(config: Config) -> int:
    """Of a node, as far as settings say."""
    return int(str(config.cluster.slurm.gpus_per_node or 0).rpartition(":")[2]) or config.cluster.num_gpus or 0


def _on_gpu(config: Config) -> bool:
    scaling = config.scaling
    if scaling.use_gpu is not None:
        return scaling.use_gpu
    by_hand = any("gpu" in option for option in config.cluster.slurm.directives)
    return scaling.resources_per_worker.get("GPU") != 0 and (_gpus(config) > 0 or by_hand)


def _cpus(config: Config) -> int | None:
    """Of a node: what was asked for, or what its workers need; None is left to SLURM."""
    settings, workers = config.cluster.slurm, config.scaling.num_workers
    each = config.scaling.resources_per_worker.get("CPU")
    if settings.cpus_per_task is not None or not isinstance(workers, int) or (_on_gpu(config) and each is None):
        return settings.cpus_per_task
    return math.ceil(max(workers, 1) / settings.nodes) * math.ceil(each or 1)


def _fit(config: Config) -> Iterator[str]:
    """More workers than the allocation will hold."""
    settings, scaling = config.cluster.slurm, config.scaling
    given, workers, gpus = scaling.resources_per_worker, scaling.num_workers, _gpus(config)
    by_hand = any("gpu" in option for option in settings.directives)
    if (scaling.use_gpu or given.get("GPU")) and not gpus and not by_hand:
        yield (
            "scaling asks for GPUs, and the job for none. Set cluster.slurm.gpus_per_node=4, say (where a site gives whole "
            "nodes without counting GPUs, cluster.num_gpus=4)."
        )
    if not isinstance(workers, int):
        return
    gpu, cpu, cpus = given.get("GPU") or 1, given.get("CPU"), settings.cpus_per_task
    if _on_gpu(config) and gpus and workers > settings.nodes * int(gpus / gpu):
        yield (
            f"scaling.num_workers={workers} with {gpu:g} GPU each do not fit into cluster.slurm.nodes={settings.nodes} x "
            f"{gpus} GPUs. Set fewer workers, or more nodes or cluster.slurm.gpus_per_node."
        )
    cpu = cpu or (None if _on_gpu(config) else 1)
    if cpus and cpu and workers > settings.nodes * int(cpus / cpu):
        yield (
            f"scaling.num_workers={workers} with {cpu:g} CPU each do not fit into cluster.slurm.nodes={settings.nodes} x "
            f"cluster.slurm.cpus_per_task={cpus}. Set fewer workers, or leave cluster.slurm.cpus_per_task null."
        )


def _write(config: Config, request: Request) -> Path:
    """The job's file, below where results go.

    Raises:
        MantaError: it cannot be written.
    """
    folder = config.storage.folder / "clusters"
    stem = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{_job_name(config)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            path = folder / (f"{stem}.sbatch" if attempt == 1 else f"{stem}-{attempt}.sbatch")
            try:
                with open(path, "x") as file:
                    file.write(render(config, request, path))
                return path
            except FileExistsError:
                continue
        raise MantaError(f"{folder} has a thousand files of this second.")
    except OSError as error:
        raise MantaError(f"storage.path={config.storage.folder} cannot be written: {error.strerror}.") from error


def render(config: Config, request: Request, path: Path) -> str:
    """The job's file, to be written to `path`."""
    cluster, settings = config.cluster, config.cluster.slurm
    stem = path.with_suffix("")
    again = [o for o in request.overrides if name_of(o).startswith("cluster.") and name_of(o) != "cluster.slurm.submit"]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _directives(config, request, stem)), ""]
    lines += [f"cd {shlex.quote(os.getcwd())} || exit"]
    lines += [f"module load {shlex.quote(module)}" for module in settings.modules]
    lines += settings.setup
    lines += ["", *_overrides(request, stem)]
    values = {
        "python": settings.python or sys.executable,
        "num_cpus": cluster.num_cpus,
        "num_gpus": cluster.num_gpus,
        "object_store_memory": cluster.object_store_memory,
        "wait_s": f"{cluster.wait_s:g}",
        "max_requeues": settings.max_requeues if settings.requeue else 0,
        "run_file": stem,
        "go_on": shlex.join(["cluster=slurm", *again]),
    }
    lines += [f"{name}={'' if value is None else shlex.quote(str(value))}" for name, value in values.items()]
    storage = [override for override in request.overrides if name_of(override).startswith("storage.")]
    lines += [f"again=({shlex.join(storage)})", f"export {ALLOWED_TARGETS}={','.join(config.allowed_targets)}"]
    return "\n".join([*lines, f". {shlex.quote(str(PROJECT / 'scripts' / 'slurm' / 'job.sh'))}", ""])


def _directives(config: Config, request: Request, stem: Path) -> Iterator[str]:
    settings = config.cluster.slurm
    yield f"--job-name={_job_name(config)}"
    yield f"--output={shlex.quote(f'{stem}-%A_%a.log' if request.jobs else f'{stem}-%j.log')}"
    yield "--open-mode=append"
    yield f"--nodes={settings.nodes}"
    yield "--ntasks-per-node=1"
    for name in ("partition", "account", "qos", "constraint", "time", "cpus_per_task", "gpus_per_node", "mem"):
        value = _cpus(config) if name == "cpus_per_task" else getattr(settings, name)
        if value is not None:
            yield f"--{name.replace('_', '-')}={shlex.quote(str(value))}"
    yield f"--signal=B:USR1@{settings.signal_s}"
    yield "--requeue" if settings.requeue else "--no-requeue"
    if request.jobs:
        limit = f"%{settings.max_array_tasks}" if settings.max_array_tasks else ""
        yield f"--array=0-{len(request.jobs) - 1}{limit}"
    yield from settings.directives


def _overrides(request: Request, stem: Path) -> Iterator[str]:
    """What train.py is told; of an array, each task its own."""
    if not request.jobs:
        yield f"overrides=({shlex.join(_kept(request.overrides))})"
        return
    group = request.config.group or stem.name
    yield "case $SLURM_ARRAY_TASK_ID in"
    for index, overrides in enumerate(request.jobs):
        kept = [override for override in _kept(overrides) if name_of(override) != "group"]
        yield f"{index}) overrides=({shlex.join([*kept, f'group={group}'])}) ;;"
    yield "esac"


def _kept(overrides: list[str]) -> list[str]:
    """But for the cluster, and for what only concerns this command."""
    return [o for o in overrides if not is_of_cluster(name_of(o)) and name_of(o) != "plan"]


def _job_name(config: Config) -> str:
    return re.sub(r"[^\w.+=-]+", "-", config.cluster.slurm.job_name or config.name or "manta")


def _sbatch(script: Path) -> str:
    """The number of the job.

    Raises:
        MantaError: SLURM refuses it, or does not answer.
    """
    environment = dict(os.environ)
    if "SLURM_JOB_ID" in environment:  # typed in a job, whose own limits would be taken for options
        environment = {k: v for k, v in environment.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MantaError(
            f"sbatch has not answered for {ANSWER_S} s. Look with squeue --me, then try: sbatch {script}"
        ) from error
    if done.returncode != 0:
        raise MantaError(f"sbatch refused {runs.short(script)}: {done.stderr.strip() or done.stdout.strip()}")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
    return done.stdout.strip().splitlines()[-1].partition(";")[0]


def _quoted(path: Path) -> str:
    return shlex.quote(runs.short(path))
