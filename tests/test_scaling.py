"""scaling=: each choice trains on what it says, and what reaches the workers is what the user meant."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from manta.errors import FAILED, INVALID
from manta.plan import REHEARSAL
from manta.runs import RunDir
from tests.conftest import Lab, history

SHORT = ("training.epochs=1", "training.limit_train_batches=3", "training.test=false")
PROBES = (
    "allowed_targets=[manta,torch,tests]", "recipe._target_=tests.probes.Recipe", "model._target_=tests.probes.Net",
    "~model.hidden", "~model.dropout", "+model.nested={inner: [1, {a: [2]}]}",
)  # fmt: skip


def ranks(run: RunDir) -> list[dict[str, Any]]:
    return run.read("workers.json")["ranks"]


def probes(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run.path.glob("probe-*.json"))]


@pytest.mark.parametrize(
    ("settings", "threads", "rehearsal"),
    [
        (("scaling=multi_gpu",), [2, 2], True),
        (("scaling=single_gpu", "scaling.resources_per_worker.CPU=2"), [2], True),
        (("scaling=multi_gpu", "scaling.num_workers=2", "scaling.resources_per_worker={GPU: 0.5, CPU: 1}"), [1, 1], True),
        (("scaling=elastic", "scaling.use_gpu=false"), [1], False),
    ],
    ids=["a worker a GPU", "one GPU", "half a GPU each", "elastic"],
)  # fmt: skip
@pytest.mark.usefixtures("ray_cluster")
def test_workers(
    lab: Lab, capfd: pytest.CaptureFixture[str], settings: tuple[str, ...], threads: list[int], rehearsal: bool
) -> None:
    """As many as asked for, each with as many threads as it has CPUs; GPUs that are only declared are rehearsed."""
    run = lab.run(*settings, *SHORT)
    found = ranks(run)
    if "elastic" in settings[0]:  # as many as there is room for
        assert 1 <= len(found) <= 2
        threads *= len(found)
    assert [rank["threads"] for rank in found] == threads
    assert {rank["device"] for rank in found} == {"cpu"}
    assert len({rank["pid"] for rank in found} | {os.getpid()}) == len(found) + 1
    assert run.read("summary.json")["world_size"] == len(found)
    assert capfd.readouterr().out.count(REHEARSAL) == rehearsal


def test_in_process(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """No Ray; declared GPUs are rehearsed here too."""
    run = lab.run("scaling=in_process", "scaling.use_gpu=true", "cluster.num_gpus=1", *SHORT)
    assert [rank["pid"] for rank in ranks(run)] == [os.getpid()]
    assert capsys.readouterr().out.count(REHEARSAL) == 1


SITE = """
from omegaconf import OmegaConf
OmegaConf.register_new_resolver("twice", lambda value: 2 * value)
"""


def test_a_command_on_two_workers(lab: Lab) -> None:
    """Everything a worker sees is settled on the driver; its prints are shown once; its Ray is gone afterwards."""
    site, here = lab.folder / "site", lab.folder / "here"
    site.mkdir()
    here.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    (here / "mine").mkdir()
    inside = Lab(here)
    known = os.environ.get("PYTHONPATH", "")
    process = inside.start(
        "scaling=multi_gpu", "scaling.num_workers=2", "cluster.num_gpus=4", "data.root=mine", *SHORT, *PROBES,
        "tags=['${hydra:job.name}', '${twice:21}']", "training.log_every_n_steps=${twice:1}",
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(Path.cwd()), known])},
    )  # fmt: skip
    family: set[psutil.Process] = set()
    while process.poll() is None:
        family.update(psutil.Process(process.pid).children(recursive=True))
        with suppress(subprocess.TimeoutExpired):  # psutil's own wait would take the exit code away
            process.wait(0.5)
    assert process.stdout is not None
    output = process.stdout.read()
    assert process.returncode == 0, output
    run = inside.latest

    for found in probes(run):
        assert found["cwd"] == str(here)
        assert found["data_root"] == str(here / "mine")
        assert found["tags"] == ["train", "42"]
        assert found["arguments"] == {"input_shape": "list", "nested": "dict", "inner": "list"}
        assert found["foreign"] == []
    assert len(probes(run)) == 2
    assert [line["step"] for line in history(run) if "train/loss" in line] == [2]

    log = run.log.read_text()
    for rank in (0, 1):
        assert output.count(f"hello from rank {rank}\n") == 1
        assert log.count(f"hello from rank {rank}\n") == 1
    assert output.count(REHEARSAL) == 1
    shown = set(output.splitlines())
    assert shown <= set(log.splitlines())  # the log has all the terminal showed
    chatter = set(log.splitlines()) - shown
    assert any("ray" in line.lower() for line in chatter)
    for sign in ("pid=", "WARNING", "INFO", "ray::", "(ray", "gloo", "Warning"):
        assert sign not in output, output

    assert {rank["pid"] for rank in ranks(run)} <= {member.pid for member in family}
    _, alive = psutil.wait_procs(list(family), timeout=20)
    assert alive == []


@pytest.mark.drill
def test_several_jobs_in_one_process(lab: Lab) -> None:
    """One fails on its workers; the next starts a Ray anew and trains. The first failure is the exit code."""
    broken = "[{_target_: tests.faults.RaiseAt, call: 2, rank: 1}]"
    done = lab.command(
        "scaling=cpu", "allowed_targets=[manta,torch,tests]", f"data.transforms.train={broken},[]", *SHORT, "-m"
    )
    assert done.returncode == FAILED, done.stdout + done.stderr
    assert "rank 1: ValueError: the user's own mistake" in done.stderr
    assert states(lab) == ["failed", "finished"]


def test_a_multirun_of_seeds(lab: Lab) -> None:
    """Each job has its own directory; an impossible one in the middle stops no other. Sweepers get the objective."""
    tell = "+hydra.callbacks.tell._target_=tests.probes.Returned"
    done = lab.command("scaling=in_process", "seed=1,4294967296,2", tell, *SHORT, "-m")
    assert done.returncode == INVALID, done.stderr
    assert "seed=4294967296" in done.stderr
    assert states(lab) == ["finished", "finished"]
    runs = sorted(lab.folder.glob("????-??-??/*/config.yaml"))
    assert sorted(line for path in runs for line in path.read_text().splitlines() if line.startswith("seed:")) == [
        "seed: 1",
        "seed: 2",
    ]
    values = [json.loads(path.with_name("summary.json").read_text())["objective"]["value"] for path in runs]
    told = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("returned")]
    assert sorted(told) == sorted([*map(str, values), str(INVALID)])  # what raised is its answer


def states(lab: Lab) -> list[str]:
    """States of all runs, oldest first."""
    found = [json.loads(path.read_text()) for path in lab.folder.glob("????-??-??/*/status.json")]
    return [status["state"] for status in sorted(found, key=lambda status: status["started"])]
