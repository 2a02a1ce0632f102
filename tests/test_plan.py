"""plan.resolve: what a launch needs on which nodes, and what is refused, with the numbers and the way out."""

import math
from pathlib import Path

import pytest

from manta import plan
from manta.config import Cluster, Config, Data, Scaling
from manta.errors import INVALID, MantaError
from manta.plan import Needs, resolve

LAPTOP = [{"CPU": 8.0, "GPU": 0.0}]
STATION = [{"CPU": 16.0, "GPU": 4.0}]
RACK = [{"CPU": 32.0, "GPU": 4.0, "accelerator_type:A100": 1.0}] * 2
MIXED = [{"CPU": 8.0}, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 16.0, "GPU": 2.0}]


def request(batch_size: int = 64, gpu: float | None = None, cpu: float | None = None, **scaling: object) -> Config:
    resources = {"CPU": cpu, "GPU": gpu}
    return Config(
        data=Data(name="d", input_shape=[1], num_classes=2, batch_size=batch_size),
        scaling=Scaling(resources_per_worker=resources, **scaling),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("config", "nodes", "own", "expected"),
    [
        # auto: one worker per GPU, else one on CPU
        (request(), LAPTOP, True, Needs(1, False, {"CPU": 8})),
        (request(), STATION, True, Needs(4, True, {"GPU": 1, "CPU": 4})),
        (request(), RACK, True, Needs(8, True, {"GPU": 1, "CPU": 8})),
        (request(use_gpu=False), STATION, True, Needs(1, False, {"CPU": 16})),
        (request(num_workers=None), STATION, True, Needs(4, True, {"GPU": 1, "CPU": 4})),
        (request(gpu=0.5), STATION, True, Needs(8, True, {"GPU": 0.5, "CPU": 2})),
        (request(gpu=2), STATION, True, Needs(2, True, {"GPU": 2, "CPU": 8})),
        (request(gpu=2), [{"CPU": 8.0, "GPU": 3.0}] * 2, True, Needs(2, True, {"GPU": 2, "CPU": 8})),
        (request(gpu=0), STATION, True, Needs(1, False, {"GPU": 0, "CPU": 16})),
        # no Ray
        (request(num_workers=0), LAPTOP, True, Needs(0, False, {})),
        (request(num_workers=0), STATION, True, Needs(0, True, {})),
        (request(num_workers=0, use_gpu=False), STATION, True, Needs(0, False, {})),
        # an even share of our own CPUs, whole CPUs, never more than one node can give
        (request(num_workers=2, use_gpu=False), LAPTOP, True, Needs(2, False, {"CPU": 4})),
        (request(num_workers=3, use_gpu=False), LAPTOP, True, Needs(3, False, {"CPU": 2})),
        (request(num_workers=3), STATION, True, Needs(3, True, {"GPU": 1, "CPU": 5})),
        (request(), [{"CPU": 4.0}] * 3, True, Needs(1, False, {"CPU": 4})),
        (request(num_workers=2), [{"CPU": 6.0}, {"CPU": 2.0}], True, Needs(2, False, {"CPU": 3})),
        (request(), MIXED, True, Needs(3, True, {"GPU": 1, "CPU": 4})),
        (request(cpu=0.5, num_workers=16), LAPTOP, True, Needs(16, False, {"CPU": 0.5})),
        # a Ray that others use too: one CPU, or those that belong to the GPU
        (request(num_workers=2, use_gpu=False), LAPTOP, False, Needs(2, False, {"CPU": 1})),
        (request(num_workers=1, use_gpu=True), STATION, False, Needs(1, True, {"GPU": 1, "CPU": 4})),
        (request(num_workers=1, gpu=0.5), STATION, False, Needs(1, True, {"GPU": 0.5, "CPU": 2})),
        (request(num_workers=1, cpu=3), STATION, False, Needs(1, True, {"GPU": 1, "CPU": 3})),
        (request(num_workers=3), MIXED, False, Needs(3, True, {"GPU": 1, "CPU": 4})),
        (request(num_workers=2), [{"CPU": 1.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}], False, Needs(2, True, {"GPU": 1, "CPU": 1})),
        # elastic: the least must fit, the share is for the most
        (request(num_workers=1, max_workers=2), LAPTOP, True, Needs(1, False, {"CPU": 4}, 2)),
        (request(num_workers=1, max_workers=4), [{"CPU": 2.0}], True, Needs(1, False, {"CPU": 1}, 4)),
        # placement
        (request(use_gpu=True, placement_strategy="STRICT_PACK"), MIXED, True, Needs(2, True, {"GPU": 1, "CPU": 8}, None, "STRICT_PACK")),
        (request(use_gpu=True, placement_strategy="STRICT_SPREAD"), RACK, True, Needs(2, True, {"GPU": 1, "CPU": 32}, None, "STRICT_SPREAD")),
        # types of GPU: asked of nodes that tell them
        (request(accelerator_type="A100"), RACK, True, Needs(8, True, {"GPU": 1, "CPU": 8, "accelerator_type:A100": 0.001})),
        (request(accelerator_type="H100"), STATION, True, Needs(4, True, {"GPU": 1, "CPU": 4})),
        # a batch of one sample each
        (request(batch_size=4), STATION, True, Needs(4, True, {"GPU": 1, "CPU": 4})),
    ],
)  # fmt: skip
def test_a_request_becomes_numbers(config: Config, nodes: list[plan.Node], own: bool, expected: Needs) -> None:
    assert resolve(config, nodes, own) == expected


@pytest.mark.parametrize(
    ("config", "nodes", "own", "says"),
    [
        (request(use_gpu=True), LAPTOP, True, ["scaling.use_gpu=true", "this machine has none", "scaling=cpu", "cluster.num_gpus=2"]),
        (request(use_gpu=True, num_workers=3), LAPTOP, True, ["cluster.num_gpus=3"]),
        (request(use_gpu=True, num_workers=3, gpu=0.5), LAPTOP, True, ["cluster.num_gpus=2"]),
        (request(use_gpu=True), LAPTOP, False, ["scaling.use_gpu=true", "the cluster has none", "scaling=cpu"]),
        (request(gpu=0.5), LAPTOP, True, ["scaling.resources_per_worker.GPU=0.5", "has none"]),
        (request(accelerator_type="H100"), LAPTOP, True, ["scaling.accelerator_type=H100", "has none"]),
        (request(use_gpu=True, num_workers=0), LAPTOP, True, ["scaling.use_gpu=true", "has none", "scaling.use_gpu=null"]),
        (request(num_workers=9), LAPTOP, True,
         ["scaling.num_workers=9: 9 workers with 1 CPU each", "This machine has 8 CPU, which holds 8", "Set scaling.num_workers=8", "cluster.num_cpus=9"]),
        (request(num_workers=9), [{"CPU": 4.0}] * 2, False, ["The cluster's nodes have: 2 x (4 CPU), which holds 8", "Set scaling.num_workers=8"]),
        (request(num_workers=2, cpu=5), LAPTOP, True, ["2 workers with 5 CPU each", "holds 1", "cluster.num_cpus=10"]),
        (request(cpu=5), [{"CPU": 4.0}] * 4, False, ["1 worker with 5 CPU each", "holds 0", "scaling.resources_per_worker.CPU=4, the most that one node has"]),
        (request(gpu=2), [{"CPU": 4.0, "GPU": 1.0}] * 4, False, ["1 worker with 2 GPU and 1 CPU each", "scaling.resources_per_worker.GPU=1, the most"]),
        (request(use_gpu=True), [{"CPU": 2.0, "GPU": 4.0}], True, ["4 workers", "holds 2", "Set scaling.num_workers=2", "cluster.num_cpus=4"]),
        (request(num_workers=2, placement_strategy="STRICT_SPREAD"), LAPTOP, True, ["(STRICT_SPREAD)", "holds 1", "scaling.placement_strategy=SPREAD"]),
        (request(num_workers=5, placement_strategy="STRICT_PACK", use_gpu=True), RACK, False, ["holds 4", "scaling.placement_strategy=PACK"]),
        (request(accelerator_type="H100"), RACK, False, ["H100", "1 GPU", "Set scaling.accelerator_type=A100 or null"]),
        (request(num_workers=4, max_workers=8, cpu=4), LAPTOP, True, ["scaling.num_workers=4", "holds 2"]),
        (request(batch_size=3), STATION, True, ["data.batch_size=3", "the 4 workers", "data.batch_size=4", "scaling.num_workers=3"]),
        (request(batch_size=3, num_workers=1, max_workers=4), LAPTOP, True, ["data.batch_size=3", "the 4 workers"]),
    ],
)  # fmt: skip
def test_the_impossible_is_refused(config: Config, nodes: list[plan.Node], own: bool, says: list[str]) -> None:
    with pytest.raises(MantaError) as refused:
        resolve(config, nodes, own)
    assert refused.value.code == INVALID
    for fragment in says:
        assert fragment in str(refused.value)
    if not own:
        assert "cluster.num_" not in str(refused.value)


def test_custom_resources_must_be_there() -> None:
    config = request()
    config.scaling.resources_per_worker["tpu_pod"] = 2
    with pytest.raises(MantaError, match=r"2 tpu_pod and 1 CPU each.*resources_per_worker.tpu_pod=0"):
        resolve(config, LAPTOP)
    assert resolve(config, [{"CPU": 8.0, "tpu_pod": 4.0}]).per_worker == {"tpu_pod": 2, "CPU": 8}


def test_real_gpus_cannot_be_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second worker would be sent to a device that does not exist."""
    assert plan.local_node(Cluster(num_cpus=3, num_gpus=2)) == {"CPU": 3.0, "GPU": 2.0}
    monkeypatch.setattr(plan, "gpu_count", lambda: 1)
    assert plan.local_node(Cluster(num_cpus=3)) == {"CPU": 3.0, "GPU": 1.0}
    with pytest.raises(MantaError, match=r"cluster.num_gpus=2: this machine has 1\..*CUDA_VISIBLE_DEVICES="):
        plan.local_node(Cluster(num_gpus=2))
    with pytest.raises(MantaError) as refused:
        resolve(request(num_workers=3, use_gpu=True), [{"CPU": 8.0, "GPU": 1.0}])
    assert "cluster.num_gpus" not in str(refused.value)


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({}, math.inf),
    ],
)
def test_a_containers_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cpus: float) -> None:
    """A container on a large machine sees all of its CPUs but may not use them."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert plan._cpu_limit(tmp_path) == cpus
    monkeypatch.setattr(plan, "_cpu_limit", lambda _: cpus)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert plan.cpu_count() == min(64, math.ceil(min(cpus, 64)))
