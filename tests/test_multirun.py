"""Multiruns: frozen when submitted, one by one or side by side, resumed; and handed over to a cluster elsewhere."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from manta.errors import FAILED, FINISHED, INTERRUPTED, INVALID
from manta.multirun.jobs import Folder, Job
from manta.runs import read_lines
from tests.conftest import ROOT, Lab, wait_for

FAULTS = "allowed_targets=[manta,torch,tests]"
SHORT = ("training.epochs=1", "training.limit_train_batches=3", "training.test=false", "data.batch_size=32")


def folder(lab: Lab) -> Folder:
    (found,) = lab.folder.glob("????-??-??/*-multirun")
    return Folder(found)


def states(lab: Lab) -> list[str]:
    return [job.state for job in folder(lab).jobs]


def killed_once(lab: Lab, call: int = 2) -> str:
    return f"[{{_target_: tests.faults.KillAt, call: {call}, marker: {lab.folder}/killed}}]"


def at_once(log: str) -> int:
    """The most jobs that ran at one time."""
    running = [0]
    for word in re.findall(r"^Job \d+ (started|finished|failed)", log, re.MULTILINE):
        running.append(running[-1] + (1 if word == "started" else -1))
    assert running[-1] == 0
    return max(running)


def groups(lab: Lab) -> set[str]:
    return {yaml.safe_load(path.read_text())["group"] for path in lab.folder.glob("????-??-??/*/config.yaml")}


def test_side_by_side_one_fails_and_is_resumed(lab: Lab) -> None:
    """Three jobs without Ray on two CPUs; the process of one is killed. A resume continues that one alone."""
    slow = "[{_target_: tests.faults.Slow, seconds: 0.01}]"
    done = lab.command(
        "hydra/launcher=ray", "scaling=in_process", "cluster.num_cpus=2", FAULTS, "training.epochs=1",
        "training.checkpoint.every_n_steps=2", f"data.transforms.train={killed_once(lab, 5)},[],{slow}", "-m",
    )  # fmt: skip
    assert done.returncode == FAILED, done.stdout + done.stderr
    jobs = folder(lab).jobs
    assert [job.state for job in jobs] == ["failed", "finished", "finished"]
    assert at_once((folder(lab).path / "multirun.log").read_text()) == 2
    assert "Job 0 failed (1): its process was ended by SIGKILL" in done.stdout
    where = folder(lab).path.relative_to(lab.folder)
    assert f"python train.py resume={where}\n" in done.stdout
    assert "epoch" not in done.stdout and "epoch   1" in jobs[1].log.read_text()  # a job's own words are in its log
    assert groups(lab) == {"_".join(where.parts)}

    before = [job.run and (job.run.path / "status.json").read_bytes() for job in jobs]
    done = lab.command(f"resume={where}", FAULTS)
    assert done.returncode == FINISHED, done.stdout + done.stderr
    assert states(lab) == ["finished"] * 3
    assert [job.run and (job.run.path / "status.json").read_bytes() for job in jobs[1:]] == before[1:]
    run = jobs[0].run
    assert run is not None and run.read("status.json")["attempts"] == 2
    steps = [line["step"] for line in read_lines(run.metrics) if "val/loss" in line]
    assert steps == [23]
    assert len(list(lab.folder.glob("????-??-??/*/status.json"))) == 3
    assert lab.command(f"resume={where}", FAULTS).returncode == FINISHED  # nothing is left


@pytest.mark.drill
def test_killed_interrupted_and_completed(tmp_path: Path) -> None:
    """One job at a time. Nothing survives the command; what was not started yet runs as it was submitted."""
    lab = Lab(tmp_path / "results")
    lab.folder.mkdir()
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    shutil.copy(ROOT / "train.py", tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}

    def start(*arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "train.py", f"storage.path={lab.folder}", FAULTS, *arguments], cwd=tmp_path, env=env,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def steps(job: Job) -> int:
        return len(read_lines(job.run.metrics)) if job.run is not None else 0

    process = start(
        "hydra/launcher=ray", "scaling=in_process", "cluster.num_cpus=1", "training.log_every_n_steps=1",
        "training.epochs=4", "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.1}]", "seed=1,2", "-m",
    )  # fmt: skip
    wait_for(lambda: bool(list(lab.folder.glob("*/*-multirun/jobs/0/job.json"))), process)
    first, second = folder(lab).job(0), folder(lab).job(1)
    wait_for(lambda: steps(first) >= 3, process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=30)
    _, alive = psutil.wait_procs(family, timeout=25)
    assert alive == []
    assert (states(lab), second.run) == (["interrupted", "waiting"], None)
    assert first.run is not None and first.run.read("status.json")["exit_code"] == INTERRUPTED  # with a checkpoint

    (tmp_path / "conf/model/mlp.yaml").write_text("_target_: nothing\n")  # frozen: of no interest
    reached = steps(first)
    process = start(f"resume={folder(lab).path}")
    wait_for(lambda: steps(first) >= reached + 3, process)
    other = subprocess.run(
        [sys.executable, "train.py", f"storage.path={lab.folder}", f"resume={folder(lab).path}"], cwd=tmp_path, env=env,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert other.returncode == INVALID and "is running right now" in other.stderr, other.stderr
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, output
    assert "SIGINT: stopping after a checkpoint" in output and "Traceback" not in output
    assert f"python train.py resume={folder(lab).path.relative_to(tmp_path)}\n" in output
    assert states(lab) == ["interrupted", "waiting"]

    process = start(f"resume={folder(lab).path}", "training.epochs=1", "hydra/launcher=basic")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == FINISHED, output
    assert states(lab) == ["finished", "finished"]
    assert [job.run and job.run.read("status.json")["attempts"] for job in (first, second)] == [3, 1]


def test_one_by_one_a_killed_command_is_resumed(lab: Lab) -> None:
    """The second job takes the whole command with it; what has finished is left alone."""
    arguments = ("scaling=in_process", FAULTS, *SHORT)
    done = lab.command(*arguments, f"data.transforms.train=[],{killed_once(lab)},[]", "seed=7", "-m")
    assert done.returncode == -signal.SIGKILL
    assert states(lab) == ["finished", "interrupted", "waiting"]
    done = lab.command(f"resume={folder(lab).path}", FAULTS, "training.limit_train_batches=4")
    assert done.returncode == FINISHED, done.stdout + done.stderr
    assert states(lab) == ["finished"] * 3
    runs = [job.run for job in folder(lab).jobs]
    assert [run and read_lines(run.metrics)[-1]["step"] for run in runs] == [3, 4, 4]
    assert done.stdout.count("Job ") == 2
    wrong = lab.command(f"resume={folder(lab).path}", "seed=8", FAULTS)
    assert wrong.returncode == FINISHED  # nothing is left that could become another run


SUBMITTED = """
import json, runpy, sys, types
stand_in = types.ModuleType("manta.cluster.slurm")
def submit(request):
    print(json.dumps([request.config.cluster.kind, request.overrides, request.jobs, request.options]))
    return 3
stand_in.submit = submit
sys.modules["manta.cluster.slurm"] = stand_in
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("more", [(), ("hydra.sweeper.max_batch_size=1",)])
def test_a_multirun_for_a_cluster_elsewhere_is_handed_over_once(tmp_path: Path, more: tuple[str, ...]) -> None:
    done = handed_over(tmp_path, "cluster=slurm", "seed=1,2", "model=mlp,cnn", "hydra/launcher=ray", *more)
    assert done.returncode == 3, done.stdout + done.stderr
    kind, overrides, jobs, options = json.loads(done.stdout)
    assert (kind, overrides) == ("slurm", ["cluster=slurm", "seed=1,2", "model=mlp,cnn"])
    assert jobs == [["cluster=slurm", f"seed={seed}", f"model={model}"] for seed in (1, 2) for model in ("mlp", "cnn")]
    assert options == ["-m", "hydra/launcher=ray", *more]


def test_a_multirun_with_a_mistake_is_not_handed_over(tmp_path: Path) -> None:
    done = handed_over(tmp_path, "cluster=slurm", "seed=1,-2")
    assert done.returncode == INVALID and done.stdout == ""
    assert "Job 1: seed=-2" in done.stderr and "No job was submitted" in done.stderr
    done = handed_over(tmp_path, "cluster=slurm,local")
    assert done.returncode == INVALID and "one kind of cluster, and these to local, slurm" in done.stderr


def handed_over(place: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", SUBMITTED, str(ROOT / "train.py"), "-m", *arguments],
        capture_output=True, text=True, timeout=60, check=False, cwd=place,
    )  # fmt: skip


def test_side_by_side_refusals(lab: Lab) -> None:
    """What can never run side by side fails before it starts, and is counted."""
    done = lab.command(
        "hydra/launcher=ray", "cluster.num_cpus=1", "+scaling.resources_per_worker.X=1,2", "scaling=in_process",
        "cluster.num_gpus=1", "-m",
    )  # fmt: skip
    assert done.returncode == INVALID, done.stdout
    assert done.stdout.count("would all take the first GPU. scaling=single_gpu gives each its own.") >= 2
    assert states(lab) == ["failed", "failed"]


def test_a_wrong_job_is_in_the_table(lab: Lab) -> None:
    """With its reason, and kept; the exit code is its own."""
    done = lab.command("scaling=in_process", "seed=-1,-2", "-m")
    assert done.returncode == INVALID, done.stdout
    for number, (job, seed) in enumerate(zip(folder(lab).jobs, (-1, -2), strict=True)):
        assert job.error.startswith(f"seed={seed}") and job.state == "failed"
        (row,) = (line for line in done.stdout.splitlines() if line.startswith(f"job {number} "))
        assert f"seed={seed} is out of range" in row


# --- with Ray ----------------------------------------------------------------------------------------------------------


def rays(process: "subprocess.Popen[str]") -> set[int]:
    """Follow a command to its end: every Ray it started."""
    found: set[int] = set()
    me = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            found |= {each.pid for each in me.children(recursive=True) if each.name() == "gcs_server"}
            process.wait(timeout=0.5)
        except (subprocess.TimeoutExpired, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.drill
def test_eight_jobs_on_four_cpus(lab: Lab) -> None:
    """As many at once as fit; one whose worker is killed fails alone, and a resume completes it. One Ray each time."""
    process = lab.start(
        "hydra/launcher=ray", "scaling=cpu", "scaling.num_workers=1", "cluster.num_cpus=4", FAULTS, *SHORT,
        f"data.transforms.train={killed_once(lab)},[]", "seed=1,2,3,4", "-m",
    )  # fmt: skip
    started = rays(process)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == FAILED, output
    assert len(started) == 1
    assert at_once(output) == 4
    assert sorted(states(lab)) == ["failed", *["finished"] * 7]
    done = lab.command(f"resume={folder(lab).path}", FAULTS)
    assert done.returncode == FINISHED, done.stdout + done.stderr
    assert states(lab) == ["finished"] * 8
    assert len(list(lab.folder.glob("????-??-??/*/status.json"))) == 8


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_eight_jobs_one_after_the_other(lab: Lab) -> None:
    """The same eight, one with a worker that is killed: one Ray."""
    process = lab.start(
        "scaling=cpu", "scaling.num_workers=1", "cluster.num_cpus=4", FAULTS, *SHORT,
        f"data.transforms.train={killed_once(lab)},[]", "seed=1,2,3,4", "-m",
    )  # fmt: skip
    started = rays(process)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == FAILED, output
    assert len(started) == 1
    assert sorted(states(lab)) == ["failed", *["finished"] * 7]


@pytest.mark.drill
@pytest.mark.parametrize("launcher", ["basic", "ray"])
def test_jobs_of_two_workers(lab: Lab, launcher: str) -> None:
    """One of the jobs fails on its workers; all have the same Ray."""
    broken = "[{_target_: tests.faults.RaiseAt, call: 2, rank: 1}]"
    process = lab.start(
        f"hydra/launcher={launcher}", "scaling=cpu", "cluster.num_cpus=4", FAULTS, *SHORT,
        f"data.transforms.train={broken},[]", "seed=1", "-m",
    )  # fmt: skip
    started = rays(process)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == FAILED, output
    assert len(started) == 1
    assert states(lab) == ["failed", "finished"]
    jobs: list[Any] = folder(lab).jobs
    assert jobs[1].run.read("workers.json")["world_size"] == 2
    if launcher == "ray":
        assert at_once(output) == 2
        assert "rank 1: ValueError: the user's own mistake" in output
