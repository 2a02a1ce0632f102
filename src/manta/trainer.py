"""Ray Train with less around it: processes that a start waits for and nothing needs.

The controller unpickles what is here, so torch is imported only inside functions: it is 2 s of every start.
"""

import os
from datetime import timedelta
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig


class ProcessGroup(BackendConfig):
    """torch.distributed over the workers: what ray.train.torch.TorchConfig sets up, without torch in the controller."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        self.backend, self.timeout_s = backend, timeout_s

    @property
    def backend_cls(self) -> type[Backend]:
        return _Torch


class _Torch(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        from ray.train._internal.utils import get_address_and_port

        address, port = worker_group.execute_single(0, get_address_and_port)
        worker_group.execute(_join, backend_config.backend, backend_config.timeout_s, address, port)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:  # noqa: ARG002
        ray.wait(worker_group.execute_async(_leave), num_returns=len(worker_group), timeout=30)


def _join(backend: str, timeout_s: float, address: str, port: int) -> None:
    import torch.distributed as dist

    context = ray.train.get_context()
    places = {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "NODE_RANK": context.get_node_rank(),
    }
    os.environ.update({name: str(value) for name, value in places.items()})
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
