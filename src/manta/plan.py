"""What a launch will need, and whether the machines can ever give it. Imports nothing heavy."""

import dataclasses
import math
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from manta.config import Cluster, Config, Scaling
from manta.errors import MantaError

REHEARSAL = "GPUs are declared but torch finds no CUDA device: computing on CPU (a rehearsal)."

Node = dict[str, float]
"""What one node has, by Ray's resource names."""


@dataclass(frozen=True)
class Needs:
    """A resolved request. num_workers 0 = in this process."""

    num_workers: int
    use_gpu: bool
    per_worker: dict[str, float]
    max_workers: int | None = None
    placement_strategy: str = "PACK"
    label_selector: dict[str, str] = field(default_factory=dict)

    @property
    def most_workers(self) -> int:
        return self.max_workers or self.num_workers

    def __str__(self) -> str:
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        strategy = "" if self.placement_strategy == "PACK" else f" ({self.placement_strategy})"
        labels = "".join(f", {name}={value}" for name, value in self.label_selector.items())
        return f"{workers} with {shown(self.per_worker)} each{strategy}{labels}"


def cpu_count() -> int:
    """CPUs this process may use: its affinity, and its container's limit."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(affinity, _cpu_limit(Path("/sys/fs/cgroup")))))


def _cpu_limit(cgroup: Path) -> float:
    """CPUs of a control group, of version 2 or 1; inf without a limit."""
    try:
        if (cgroup / "cpu.max").is_file():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(quota) / float(period) if quota != "max" and float(quota) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf


def gpu_count() -> int:
    """NVIDIA GPUs this process may use, from their device files and CUDA_VISIBLE_DEVICES."""
    present = len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([item for item in visible.split(",") if item.strip() and item.strip() != "-1"]))


def local_node(cluster: Cluster) -> Node:
    """What `cluster=local` will offer.

    Raises:
        MantaError: more GPUs are declared than the machine has, and it has some.
    """
    cpus = cluster.num_cpus if cluster.num_cpus is not None else cpu_count()
    present = gpu_count()
    gpus = cluster.num_gpus if cluster.num_gpus is not None else present
    if gpus > present > 0:
        raise MantaError(
            f"cluster.num_gpus={gpus}: this machine has {present}. More can only be declared where there are none (a "
            f"rehearsal on CPU); hide them for that: CUDA_VISIBLE_DEVICES= python train.py ..."
        )
    return {"CPU": float(cpus), "GPU": float(gpus)}


def resolve(config: Config, nodes: list[Node], own: bool = True) -> Needs:
    """Turn `scaling` into numbers for these nodes.

    Args:
        own: the nodes are this run's alone; else others use them too, and what was not asked for is left to them.

    Raises:
        MantaError: they can never give it, or the batch is smaller than the workers.
    """
    scaling = config.scaling
    gpus, asked = sum(node.get("GPU", 0) for node in nodes), scaling.resources_per_worker.get("GPU")
    use_gpu = scaling.use_gpu
    if use_gpu is None:
        use_gpu = asked > 0 if asked is not None else gpus > 0 or scaling.accelerator_type is not None
    if use_gpu and gpus == 0:
        raise MantaError(_no_gpu(scaling, asked, own))
    if scaling.num_workers == 0:
        return Needs(0, use_gpu, {})
    num_workers = scaling.num_workers
    if not isinstance(num_workers, int):
        num_workers = max(room({"GPU": asked or 1.0}, nodes, scaling.placement_strategy), 1) if use_gpu else 1
    needs = Needs(num_workers, use_gpu, {}, scaling.max_workers, scaling.placement_strategy, scaling.label_selector)
    needs = dataclasses.replace(needs, per_worker=_per_worker(scaling, needs, nodes, own))
    check_placeable(needs, nodes, own)
    if config.data.batch_size < needs.most_workers:
        raise MantaError(
            f"data.batch_size={config.data.batch_size} is the global batch and smaller than the {needs.most_workers} "
            f"workers: each needs at least one sample. Set data.batch_size={needs.most_workers} or more, or fewer "
            f"workers: scaling.num_workers={config.data.batch_size}"
        )
    return needs


def resolve_trial(config: Config, nodes: list[Node], own: bool = True) -> Needs:
    """What one trial of a search needs: as `resolve`, but `auto` is one worker, and CPUs nobody asked for stay shared.

    `scaling=multi_gpu` still gives a trial all GPUs; with a GPU a worker gets the CPUs that belong to it, also less than one.

    Raises:
        MantaError: no trial can ever be placed.
    """
    scaling = config.scaling
    if scaling.num_workers == "auto" and not scaling.use_gpu:
        scaling = dataclasses.replace(scaling, num_workers=1)
    given = dict(scaling.resources_per_worker)
    needs = resolve(dataclasses.replace(config, scaling=scaling), nodes, own)
    if given.get("CPU") is None:
        cpus = 1.0
        if needs.use_gpu:
            cpus = min(node.get("CPU", 0) * needs.per_worker["GPU"] / node["GPU"] for node in nodes if node.get("GPU"))
        cpus = float(int(cpus)) if cpus >= 1 else max(math.floor(cpus * 100) / 100, 0.01)
        needs = dataclasses.replace(needs, per_worker={**needs.per_worker, "CPU": cpus})
    return needs


def place(needs: Needs, nodes: list[Node]) -> list[Node] | None:
    """What these nodes have left with the workers placed on them; None = there is no room."""
    if room(needs.per_worker, nodes, needs.placement_strategy) < needs.num_workers:
        return None
    left = [dict(node) for node in nodes]
    by_room = sorted(left, key=lambda node: _fit(needs.per_worker, node), reverse=True)
    for worker in range(needs.num_workers):
        spread = needs.placement_strategy == "STRICT_SPREAD"
        node = by_room[worker] if spread else next(n for n in by_room if _fit(needs.per_worker, n))
        for key, amount in needs.per_worker.items():
            node[key] = node.get(key, 0) - amount
    return left


def trials_at_once(needs: Needs, nodes: list[Node]) -> int:
    """How many trials these nodes hold, when idle."""
    free, count = place(needs, nodes), 0
    while free is not None and count < 10_000:
        free, count = place(needs, free), count + 1
    return count


def _no_gpu(scaling: Scaling, asked: float | None, own: bool) -> str:
    """GPUs are asked for and there are none: by which setting, and what to do."""
    if scaling.use_gpu:
        setting = "scaling.use_gpu=true"
    elif asked is not None:
        setting = f"scaling.resources_per_worker.GPU={asked:g}"
    else:
        setting = f"scaling.accelerator_type={scaling.accelerator_type}"
    message = f"{setting}: each worker is to have a GPU, and {'this machine' if own else 'the cluster'} has none."
    if scaling.num_workers == 0:
        return f"{message} Set scaling.use_gpu=null to use one if there is one."
    message += " Train on CPU: python train.py scaling=cpu."
    workers = scaling.num_workers if isinstance(scaling.num_workers, int) else 2
    rehearse = f" To rehearse on CPU, declare GPUs: cluster.num_gpus={math.ceil(workers * (asked or 1))}"
    return message + rehearse if own else message


def _per_worker(scaling: Scaling, needs: Needs, nodes: list[Node], own: bool) -> dict[str, float]:
    """A worker's resources: as configured, else a GPU if used and a share of the CPUs.

    The share is an even one where the nodes are ours alone. Elsewhere it is 1, or as many as belong to the GPU.
    """
    given = {key: float(value) for key, value in scaling.resources_per_worker.items() if value is not None}
    if needs.use_gpu:
        given.setdefault("GPU", 1.0)
        kind = f"accelerator_type:{scaling.accelerator_type}"
        # Nodes tell their GPUs' type once Ray runs; declared GPUs have none.
        if scaling.accelerator_type is not None and any(
            key.startswith("accelerator_type:") for n in nodes for key in n
        ):
            given[kind] = 0.001  # Ray's own way to ask for a type
    if "CPU" not in given:
        if own:
            share = sum(node.get("CPU", 0) for node in nodes) / needs.most_workers
        elif needs.use_gpu:
            share = min(node.get("CPU", 0) * given["GPU"] / node["GPU"] for node in nodes if node.get("GPU"))
        else:
            share = 1.0
        for cpus in range(max(int(share), 1), 0, -1):
            given["CPU"] = float(cpus)
            if room(given, nodes, needs.placement_strategy) >= needs.most_workers:
                break
    return given


def room(bundle: dict[str, float], nodes: list[Node], placement_strategy: str = "PACK") -> int:
    """How many such bundles these nodes hold."""
    fits = [_fit(bundle, node) for node in nodes]
    if placement_strategy == "STRICT_PACK":
        return max(fits, default=0)
    if placement_strategy == "STRICT_SPREAD":
        return sum(1 for fit in fits if fit)
    return sum(fits)


def _fit(bundle: dict[str, float], node: Node) -> int:
    return min((int(node.get(key, 0) / amount + 1e-9) for key, amount in bundle.items() if amount > 0), default=10**6)


def shown(bundle: dict[str, float]) -> str:
    """E.g. "1 GPU and 4 CPU"."""
    parts = [
        key.partition(":")[2] if key.startswith("accelerator_type:") else f"{amount:g} {key}"
        for key, amount in sorted(bundle.items(), reverse=True)
        if amount
    ]
    return " and ".join(parts) or "nothing"


def check_placeable(needs: Needs, nodes: list[Node], own: bool = True) -> None:
    """Refuse what these nodes could not hold even when idle.

    Raises:
        MantaError: with what is asked, what there is, and the largest request that fits.
    """
    possible = room(needs.per_worker, nodes, needs.placement_strategy)
    if possible >= needs.num_workers:
        return
    each = [shown({k: v for k, v in node.items() if k in ("CPU", "GPU", *needs.per_worker)}) for node in nodes]
    have = "; ".join(what if count == 1 else f"{count} x ({what})" for what, count in Counter(each).items())
    where = f"this machine has {have}" if own else f"the cluster's nodes have: {have}"
    raise MantaError(
        f"scaling.num_workers={needs.num_workers}: {needs} can never be placed. "
        f"{where[0].upper()}{where[1:]}, which holds {possible}. {'; or '.join(_ways_out(needs, nodes, possible, own))}."
    )


def _ways_out(needs: Needs, nodes: list[Node], possible: int, own: bool) -> list[str]:
    """What to change so that a request can be placed."""
    ways = [f"Set scaling.num_workers={possible}"] if possible else []
    for key, amount in needs.per_worker.items():
        most = max((node.get(key, 0) for node in nodes), default=0)
        if amount > most and key.startswith("accelerator_type:"):
            types = sorted({shown({k: 1}) for node in nodes for k in node if k.startswith("accelerator_type:")})
            ways.append(f"Set scaling.accelerator_type={' or '.join([*types, 'null'])}")
        elif amount > most:
            ways.append(f"Set scaling.resources_per_worker.{key}={most:g}, the most that one node has")
    if room(needs.per_worker, nodes) >= needs.num_workers:
        ways.append(f"set scaling.placement_strategy={needs.placement_strategy.removeprefix('STRICT_')}")
    elif own:
        short = [
            f"cluster.num_{key.lower()}s={math.ceil(amount * needs.num_workers)}"
            for key, amount in sorted(needs.per_worker.items())
            if amount * needs.num_workers > nodes[0].get(key, 0)
            and (key == "CPU" or (key == "GPU" and not gpu_count()))
        ]
        ways += [f"declare more with {' '.join(short)}"] if short else []
    return ways
