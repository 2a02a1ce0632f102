"""Ctrl-C, SIGTERM and SIGUSR1: a checkpoint, exit code 130, how to resume, and no process left; breakpoints work."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import psutil
import pytest

from manta.runs import RunDir, read_lines
from manta.training.checkpoint import find_checkpoint, load_checkpoint
from tests.conftest import ROOT, Lab, history, wait_for

SLOW = (
    "allowed_targets=[manta,torch,tests]",
    "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.05}]",
    "training.log_every_n_steps=1",
    "training.epochs=500",
)


def trained(run: RunDir, steps: int) -> bool:
    return len(read_lines(run.metrics)) >= steps


def interrupt(
    lab: Lab, number: signal.Signals, *settings: str
) -> tuple["subprocess.Popen[str]", str, list[psutil.Process]]:
    """Start, signal after 8 steps, wait for the end: the process, its output, and every process it had."""
    process = lab.start(*SLOW, *settings)
    wait_for(lambda: (lab.folder / "latest").exists() and trained(lab.latest, 8), process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, _ = process.communicate(timeout=90)
    return process, output, family


def assert_interrupted(lab: Lab, process: "subprocess.Popen[str]", output: str) -> None:
    run = lab.latest
    assert process.returncode == 130, output
    status = run.read("status.json")
    assert (status["state"], status["exit_code"]) == ("interrupted", 130)
    assert run.read("summary.json")["state"] == "interrupted"
    path = find_checkpoint(run.checkpoints, "last")
    assert path is not None
    state, meta = load_checkpoint(path)
    assert meta["step"] == state["progress"]["step"] == history(run)[-1]["step"] >= 8
    assert f"python train.py resume={run.path.relative_to(lab.folder)}\n" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_in_process(lab: Lab, number: signal.Signals) -> None:
    process, output, _ = interrupt(lab, number, "scaling=in_process")
    assert_interrupted(lab, process, output)
    assert number.name in output
    steps = history(lab.latest)[-1]["step"]
    assert lab.launch("resume=latest", f"training.max_steps={steps + 3}") == 0
    assert [line["step"] for line in history(lab.latest) if "train/loss" in line] == list(range(1, steps + 4))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.drill
def test_workers(lab: Lab, number: signal.Signals) -> None:
    process, output, family = interrupt(lab, number, "scaling=cpu")
    assert_interrupted(lab, process, output)
    workers = {rank["pid"] for rank in lab.latest.read("workers.json")["ranks"]}
    assert workers <= {member.pid for member in family}
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert not (lab.latest.path / ".ray").exists()


def test_before_training_has_begun(lab: Lab) -> None:
    """While Ray starts there is nothing to save: it stops at once."""
    process = lab.start(*SLOW, "scaling=cpu")
    wait_for(lambda: (lab.folder / "latest").exists(), process)
    time.sleep(1)  # the workers are starting, which takes several seconds
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert not (lab.latest.path / "workers.json").exists(), "it went on until training began"
    assert "No worker trains right now, so there is nothing to save." in output
    assert lab.latest.read("status.json")["state"] == "interrupted"
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []


def test_a_second_signal_stops_at_once(lab: Lab) -> None:
    """Even when a step never ends."""
    stuck = "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 3600}]"
    process = lab.start("scaling=in_process", "allowed_targets=[manta,torch,tests]", stuck)
    wait_for(lambda: (lab.latest.path / "workers.json").exists(), process)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    wait_for(lambda: "stopping after a checkpoint" in (lab.latest.path / "train.log").read_text(), process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "SIGINT once more: stopping at once." in output
    assert lab.latest.read("status.json")["state"] == "interrupted"


def test_breakpoints(tmp_path: Path) -> None:
    """pdb gets the terminal, in the researcher's own frame, with the live line out of its way."""
    arguments = [str(ROOT / "train.py"), "scaling=in_process", "training.epochs=1", "training.test=false",
                 f"storage.path={tmp_path}", "allowed_targets=[manta,torch,tests]",
                 "data.transforms.train=[{_target_: tests.faults.Break}]"]  # fmt: skip
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("PYTHONBREAKPOINT", None)  # ray.init of an earlier test leaves its own here
    child = pexpect.spawn(sys.executable, arguments, encoding="utf-8", timeout=60, cwd=str(tmp_path), env=environment)  # type: ignore[arg-type]
    child.expect(r"\(Pdb\) ")
    child.sendline("p answer + 100")
    child.expect("142")
    child.expect(r"\(Pdb\) ")
    child.sendline("import pdb; pdb.Pdb.set_trace = lambda *a, **k: None")
    child.expect(r"\(Pdb\) ")
    child.sendline("import sys; sys.breakpointhook = lambda *a, **k: None")
    child.expect(r"\(Pdb\) ")
    child.sendline("c")
    child.expect("Finished")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
