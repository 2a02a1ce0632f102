"""A run and a search over three nodes with their own addresses, of different size and with labels."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manta.errors import INVALID
from manta.runs import RunDir
from manta.session import clocks_apart
from tests import nodes
from tests.conftest import ROOT, Lab, history, summary
from tests.test_stream import of, write

several = [
    pytest.mark.drill,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not nodes.possible(), reason="several nodes on one machine need root, iproute2 and util-linux"),
]
RUN = (
    "training.epochs=2", "scheduler=cosine", "model.dropout=0", "scaling.use_gpu=false",
    "allowed_targets=[manta,torch,tests]", "recipe._target_=tests.probes.Surroundings",
)  # fmt: skip
OTHER_CODE = "mkdir {0}; cp -r {1} {0}; echo >> {0}/manta/errors.py; mount --bind {0}/manta {1}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nodes.Nodes]:
    """A head without CPUs; a node with two in zone a, one with one there, one with one in zone b."""
    folder = tmp_path_factory.mktemp("nodes")
    made = nodes.Nodes(folder, f"mt{os.getpid() % 10_000}m")
    (folder / "private").mkdir()
    try:
        made.start(1)
        made.start(2, "--num-cpus=2", "--labels=zone=a")
        made.start(3, "--labels=zone=a", before=f"export NCCL_SOCKET_IFNAME=mine; mount -t tmpfs none {folder}/private")
        made.start(4, "--labels=zone=b")
        made.wait(1, 2, 3, 4)
        yield made
    finally:
        made.close()


def train(cluster: nodes.Nodes, folder: Path, *settings: str, **env: str) -> Any:
    """On the head, to its end."""
    return cluster.run(
        sys.executable, str(ROOT / "train.py"), f"storage.path={folder}", "cluster=existing",
        f"cluster.address={cluster.address}", *RUN, *settings, timeout=400, env={**cluster.env, **env},
    )  # fmt: skip


def ranks(run: RunDir) -> list[dict[str, Any]]:
    return run.read("workers.json")["ranks"]


class TestSeveralNodes:
    pytestmark = several

    def test_a_run_spread_over_three(self, cluster: nodes.Nodes, lab: Lab) -> None:
        """The same as three workers on one machine; who was where is written down; what workers must know reaches them."""
        done = train(
            cluster, lab.folder, "scaling=multi_node", "scaling.num_workers=3", "cluster.env_vars=[NEW_WORLD]",
            NEW_WORLD="found", NCCL_DEBUG="WARN", NCCL_SOCKET_IFNAME="ours", OLD_WORLD="stays",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        run = lab.latest
        assert {rank["host"] for rank in ranks(run)} == {cluster.host(node) for node in (2, 3, 4)}
        assert {rank["address"] for rank in ranks(run)} == {f"{nodes.NET}.{node}" for node in (2, 3, 4)}
        assert sorted((rank["node_rank"], rank["local_rank"]) for rank in ranks(run)) == [(0, 0), (1, 0), (2, 0)]
        for rank in ranks(run):
            found = json.loads((run.path / f"environment-{rank['rank']}.json").read_text())
            assert found["NEW_WORLD"] == "found"
            assert found["NCCL_DEBUG"] == "WARN"
            assert "OLD_WORLD" not in found
            assert found["NCCL_SOCKET_IFNAME"] == ("mine" if rank["host"] == cluster.host(3) else "ours")
        alone = Lab(lab.folder / "alone")
        alone.folder.mkdir()
        whole = alone.run("scaling=cpu", "scaling.num_workers=3", "cluster.num_cpus=3", *RUN)
        assert history(run) == history(whole), "three ranks add in the same order anywhere"
        assert summary(run)["test"] == summary(whole)["test"]

    def test_data_that_is_streamed(self, cluster: nodes.Nodes, lab: Lab) -> None:
        """Read on the CPU that the workers leave free, handed to three nodes: the same as on one machine."""
        settings = (
            *of(
                write(lab.folder / "digits", "parquet"),
                "data.dataset.buffer=100",
                "data.engine=ray",
                "data.dataset.cpus=1",
            ),
            "scaling.num_workers=3",
        )
        done = train(cluster, lab.folder, "scaling=multi_node", *settings)
        assert done.returncode == 0, done.stdout + done.stderr
        run = lab.latest
        assert {rank["host"] for rank in ranks(run)} == {cluster.host(node) for node in (2, 3, 4)}
        alone = Lab(lab.folder / "alone")
        alone.folder.mkdir()
        whole = alone.run("scaling=cpu", "cluster.num_cpus=4", *RUN, *settings)
        assert history(run) == history(whole)
        assert summary(run)["test"] == summary(whole)["test"]

    def test_labels(self, cluster: nodes.Nodes, lab: Lab) -> None:
        """Workers go where the selector says, also two to the larger node; one that nobody fulfils is refused."""
        short = ("training.max_steps=3", "training.test=false")
        done = train(cluster, lab.folder, "scaling.num_workers=3", "scaling.label_selector={zone: a}", *short)
        assert done.returncode == 0, done.stdout + done.stderr
        hosts = [rank["host"] for rank in ranks(lab.latest)]
        assert sorted(hosts) == [cluster.host(2), cluster.host(2), cluster.host(3)]
        done = train(cluster, lab.folder, "scaling.num_workers=2", "scaling.label_selector={zone: '!a'}", *short)
        assert done.returncode == INVALID
        assert "zone=!a can never be placed" in done.stderr
        done = train(cluster, lab.folder, "scaling.label_selector={zone: 'in(c, d)'}", *short)
        assert done.returncode == INVALID
        assert "no node of the cluster has such labels" in done.stderr
        assert "zone=a" in done.stderr
        assert len(list(lab.folder.glob("*/*/status.json"))) == 1

    def test_a_folder_that_one_node_does_not_see(self, cluster: nodes.Nodes) -> None:
        """Refused before training, with the node named; nothing is left there."""
        private = cluster.folder / "private"
        done = train(cluster, private, "scaling.num_workers=2")
        assert done.returncode == INVALID
        assert f"storage.path={private} is not shared" in done.stderr
        assert f"not seen on {cluster.host(3)} at {nodes.NET}.3." in done.stderr
        assert not list(private.iterdir())

    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_search(self, cluster: nodes.Nodes, lab: Lab, workers: int) -> None:
        """Trials land on all nodes, those of one worker and those of several; a limit of trials ties none to the head."""
        done = train(
            cluster, lab.folder, "search=random", "search.space.data.batch_size=null", f"search.num_samples={4 // workers}", "search.max_concurrent_trials=4", "search.refit=false",
            f"scaling.num_workers={workers}", "scaling.placement_strategy=SPREAD", "scaling.max_failures=0",
            "search.report=false", f"data.transforms.train=[{{_target_: tests.faults.Together, folder: {lab.folder / 'met'}, count: 4}}]",
            "cluster.env_vars=[NEW_WORLD]", NEW_WORLD="found",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        trials = [RunDir(path.parent) for path in sorted(lab.latest.path.glob("trials/*/workers.json"))]
        assert len(trials) == 4 // workers
        assert {rank["host"] for trial in trials for rank in ranks(trial)} == {cluster.host(n) for n in (2, 3, 4)}
        assert all(len(ranks(trial)) == workers for trial in trials)
        for trial in trials:
            assert json.loads((trial.path / "environment-0.json").read_text())["NEW_WORLD"] == "found"

    def test_other_code_on_a_node(self, cluster: nodes.Nodes, lab: Lab) -> None:
        """A copy of the project that was forgotten there is refused."""
        cluster.start(5, "--labels=zone=c", before=OTHER_CODE.format(cluster.folder / "copy", ROOT / "src/manta"))
        cluster.wait(1, 2, 3, 4, 5)
        done = train(cluster, lab.folder, "scaling.num_workers=2")
        cluster.kill(5)
        assert done.returncode == INVALID
        assert f"{cluster.host(5)} at {nodes.NET}.5 would run another manta than this command" in done.stderr


def test_clocks_that_differ_are_said() -> None:
    ranks = [{"host": "a", "clock_s": 0.0}, {"host": "b", "clock_s": -4.0}]
    assert clocks_apart(ranks) is None
    text = clocks_apart([*ranks, {"host": "c", "clock_s": 90.0}])
    assert text is not None
    assert text.startswith("The clock of c is 94 s ahead of that of b.")
