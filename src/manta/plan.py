"""What a launch will need, and whether the machines can ever give it. Imports nothing heavy."""

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path

from manta.config import Cluster, Config, Scaling
from manta.errors import MantaError

Node = dict[str, float]
"""What one node has, by Ray's resource names."""


@dataclass(frozen=True)
class Needs:
    """A resolved request. num_workers 0 = in this process."""

    num_workers: int
    use_gpu: bool
    per_worker: dict[str, float]
    max_workers: int | None = None

    @property
    def most_workers(self) -> int:
        return self.max_workers or self.num_workers


def cpu_count() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_count() -> int:
    """NVIDIA GPUs this process may use, from their device files and CUDA_VISIBLE_DEVICES."""
    present = len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([item for item in visible.split(",") if item.strip() and item.strip() != "-1"]))


def local_node(cluster: Cluster) -> Node:
    """What `cluster=local` will offer."""
    return {
        "CPU": float(cluster.num_cpus if cluster.num_cpus is not None else cpu_count()),
        "GPU": float(cluster.num_gpus if cluster.num_gpus is not None else gpu_count()),
    }


def resolve(config: Config, nodes: list[Node]) -> Needs:
    """Turn `scaling` into numbers for these nodes.

    Raises:
        MantaError: they can never give it, or the batch is smaller than the workers.
    """
    scaling = config.scaling
    gpus = sum(node.get("GPU", 0) for node in nodes)
    use_gpu = gpus > 0 if scaling.use_gpu is None else scaling.use_gpu
    if scaling.num_workers == 0:
        return Needs(0, use_gpu, {})
    if use_gpu and gpus == 0:
        raise MantaError(
            f"scaling.use_gpu=true: a GPU for each worker is asked for and there is none here. On this machine: "
            f"python train.py scaling=cpu. To rehearse on CPU, declare GPUs: cluster.num_gpus="
            f"{scaling.num_workers if isinstance(scaling.num_workers, int) else 2}"
        )
    num_workers = scaling.num_workers
    if not isinstance(num_workers, int):
        num_workers = int(gpus // (scaling.resources_per_worker.get("GPU") or 1)) if use_gpu else 1
    needs = Needs(num_workers, use_gpu, {}, scaling.max_workers)
    needs = dataclasses.replace(needs, per_worker=_per_worker(scaling, needs, nodes))
    check_placeable(needs, scaling.placement_strategy, nodes)
    if config.data.batch_size < needs.most_workers:
        raise MantaError(
            f"data.batch_size={config.data.batch_size} is the global batch and smaller than the {needs.most_workers} "
            f"workers: each needs at least one sample. Set data.batch_size={needs.most_workers} or more, or fewer "
            f"workers: scaling.num_workers={config.data.batch_size}"
        )
    return needs


def _per_worker(scaling: Scaling, needs: Needs, nodes: list[Node]) -> dict[str, float]:
    """A worker's resources: as configured, else a GPU if used and an even share of the CPUs."""
    given = {key: float(value) for key, value in scaling.resources_per_worker.items() if value is not None}
    if needs.use_gpu:
        given.setdefault("GPU", 1.0)
    if "CPU" not in given:
        share = int(sum(node.get("CPU", 0) for node in nodes) // needs.most_workers)
        for cpus in range(max(share, 1), 0, -1):
            given["CPU"] = float(cpus)
            if room(given, nodes) >= needs.most_workers:
                break
    return given


def room(bundle: dict[str, float], nodes: list[Node]) -> int:
    """How many such bundles fit on empty nodes."""
    return sum(_fit(bundle, node) for node in nodes)


def _fit(bundle: dict[str, float], node: Node) -> int:
    return min((int(node.get(key, 0) / amount + 1e-9) for key, amount in bundle.items() if amount > 0), default=10**6)


def shown(bundle: dict[str, float]) -> str:
    """E.g. "1 GPU and 4 CPU"."""
    parts = [f"{amount:g} {key}" for key, amount in sorted(bundle.items(), reverse=True) if amount]
    return " and ".join(parts) or "nothing"


def check_placeable(needs: Needs, placement_strategy: str, nodes: list[Node]) -> None:
    """Refuse what these nodes could not hold even when idle.

    Raises:
        MantaError: with what is asked, what there is, and the largest request that fits.
    """
    fits = [_fit(needs.per_worker, node) for node in nodes]
    wanted = needs.num_workers
    if placement_strategy == "STRICT_PACK":
        possible = max(fits, default=0)
    elif placement_strategy == "STRICT_SPREAD":
        possible = sum(1 for fit in fits if fit)
    else:
        possible = sum(fits)
    if possible >= wanted:
        return
    have = "; ".join(shown({k: v for k, v in node.items() if k in ("CPU", "GPU", *needs.per_worker)}) for node in nodes)
    where = "this machine has" if len(nodes) == 1 else f"the {len(nodes)} nodes have"
    fix = f"Use scaling.num_workers={possible}" if possible else "Lower scaling.resources_per_worker"
    raise MantaError(
        f"scaling.num_workers={wanted} with {shown(needs.per_worker)} each ({placement_strategy}) can never be placed: "
        f"{where} {have}, which holds {possible}. {fix}, or declare more with cluster.num_cpus / cluster.num_gpus."
    )
