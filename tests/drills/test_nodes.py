"""Nodes that go and come: killed, taken away with notice, added. Real Ray nodes with their own addresses."""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from manta.runs import RunDir, read_lines
from tests import nodes
from tests.conftest import ROOT, Lab, history, wait_for
from tests.test_resume import assert_identical

pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not nodes.possible(), reason="several nodes on one machine need root, iproute2 and util-linux"),
]
# 29 steps an epoch of 0.1 s and more.
SETTINGS = (
    "model=mlp", "data.batch_size=50", "scheduler=cosine", "training.log_every_n_steps=1", "training.ema.enabled=true",
    "allowed_targets=[manta,torch,tests]", "recipe._target_=tests.probes.Recorded",
    "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.1}]", "scaling.resources_per_worker={CPU: 1}",
    "scaling.use_gpu=false",
)  # fmt: skip


LONGER = ("training.epochs=12", "training.checkpoint.every_n_steps=5", "model.dropout=0")
OFTEN = ("training.epochs=4", "training.checkpoint.every_n_steps=5", "model.dropout=0.2")


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nodes.Nodes]:
    made = nodes.Nodes(tmp_path_factory.mktemp("nodes"), f"mt{os.getpid() % 10_000}n")
    try:
        for node in (1, 2, 3):
            made.start(node)
        made.wait(1, 2, 3)
        yield made
    finally:
        made.close()


def start(cluster: nodes.Nodes, lab: Lab, *settings: str) -> Any:
    return cluster.popen(
        sys.executable, str(ROOT / "train.py"), f"storage.path={lab.folder}", "cluster=existing",
        f"cluster.address={cluster.address}", *SETTINGS, *settings,
    )  # fmt: skip


def ranks(lab: Lab) -> dict[int, str]:
    return {rank["rank"]: rank["host"] for rank in lab.latest.read("workers.json").get("ranks", [])}


def steps(lab: Lab) -> int:
    lines = read_lines(lab.latest.metrics) if (lab.folder / "latest").exists() else []
    return lines[-1]["step"] if lines else 0


def number(cluster: nodes.Nodes, host: str) -> int:
    return int(host.removeprefix(cluster.tag))


def undisturbed(lab: Lab, *settings: str) -> RunDir:
    """Two workers on this machine."""
    other = Lab(lab.folder / "undisturbed")
    other.folder.mkdir()
    return other.run("scaling=cpu", "cluster.num_cpus=2", *SETTINGS, *settings)


def assert_every_sample_once(run: RunDir, epochs: int) -> None:
    """By what each rank recorded of the steps that count: those done last."""
    last: dict[int, tuple[float, list[int]]] = {}
    for path in run.path.glob("samples-*.jsonl"):
        for line in read_lines(path):
            began, found = last.get(line["step"], (0.0, []))
            if line["attempt"] > began:
                last[line["step"]] = line["attempt"], list(line["samples"])
            elif line["attempt"] == began:
                found += line["samples"]
    per_epoch = 29
    assert sorted(last) == list(range(1, epochs * per_epoch + 1))
    for epoch in range(epochs):
        seen = [s for step in range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1) for s in last[step][1]]
        assert sorted(seen) == list(range(len(seen)))
        assert len(seen) > 28 * 50


def test_nodes_that_die(cluster: nodes.Nodes, lab: Lab) -> None:
    """First the one of rank 1, then, when another has taken its place, the one of rank 0."""
    cluster.start(4)
    cluster.wait(1, 2, 3, 4)
    process = start(cluster, lab, "scaling.num_workers=2", "scaling.max_failures=3", *OFTEN)
    for rank, at in ((1, 8), (0, 60)):
        wait_for(lambda at=at: steps(lab) >= at, process, 240)  # type: ignore[misc]
        cluster.kill(number(cluster, ranks(lab)[rank]))
        if rank == 1:  # a place for the second
            cluster.start(5)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    run = lab.latest
    restarts = run.read("status.json")["restarts"]
    assert len(restarts) == 2, restarts
    assert_identical(run, undisturbed(lab, *OFTEN))
    assert_every_sample_once(run, 4)


def test_a_node_that_is_taken_away_with_notice(cluster: nodes.Nodes, lab: Lab) -> None:
    """A checkpoint at the notice, though none is due, and a restart that no failure is charged for."""
    cluster.start(4)
    cluster.wait(1, 2, 3, 4)
    rare = (
        "training.epochs=10",
        "training.val_every_n_epochs=10",
        "training.checkpoint.every_n_epochs=0",
        "model.dropout=0.2",
    )
    process = start(cluster, lab, "scaling.num_workers=2", "scaling.max_failures=0", *rare)
    wait_for(lambda: steps(lab) >= 8, process, 240)
    assert not list(lab.latest.checkpoints.glob("step-*"))
    taken = ranks(lab)[1]
    cluster.drain(number(cluster, taken), 10)
    wait_for(lambda: bool(list(lab.latest.checkpoints.glob("step-*"))), process, 25)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert_identical(lab.latest, undisturbed(lab, *rare))
    assert taken not in ranks(lab).values()
    assert_every_sample_once(lab.latest, 10)


def test_a_run_that_shrinks_and_grows(cluster: nodes.Nodes, lab: Lab) -> None:
    """2 workers, 1 when a node dies, 2 when one comes: the same curve, and every sample once an epoch."""
    process = start(
        cluster, lab, "scaling=elastic", "scaling.elastic_resize_monitor_interval_s=5", *LONGER,
    )  # fmt: skip
    sizes = [2]
    wait_for(lambda: steps(lab) >= 8 and len(ranks(lab)) == 2, process, 300)
    cluster.kill(number(cluster, ranks(lab)[1]))
    wait_for(lambda: len(ranks(lab)) == 1, process, 300)
    sizes.append(1)
    cluster.start(4)
    wait_for(lambda: len(ranks(lab)) == 2, process, 300)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    run, whole = lab.latest, undisturbed(lab, *LONGER)
    mine, theirs = history(run), history(whole)
    assert [line["step"] for line in mine] == [line["step"] for line in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert_every_sample_once(run, 12)
    worlds = {json.loads(line)["world_size"] for path in run.path.glob("samples-*.jsonl") for line in open(path)}
    assert worlds == {1, 2}
