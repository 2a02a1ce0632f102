"""Ray Train with less around it: processes that a start waits for and nothing needs.

The controller unpickles what is here, so torch is imported only inside functions: it is 2 s of every start.
"""

import json
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig

from manta import watchdog
from manta.cluster.environment import Environment
from manta.runs import RunDir, now


class ProcessGroup(BackendConfig):
    """torch.distributed over the workers: what ray.train.torch.TorchConfig sets up, without torch in the controller."""

    def __init__(self, backend: str, patience: timedelta, environment: Any) -> None:
        """environment: a reference to what workers are sent, an Environment; its values are nobody else's business."""
        self.backend, self.patience, self.environment = backend, patience, environment

    @property
    def backend_cls(self) -> type[Backend]:
        return _Torch


class _Torch(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        from ray.train._internal.utils import get_address_and_port

        worker_group.execute(Environment.receive, backend_config.environment)
        address, port = worker_group.execute_single(0, get_address_and_port)
        worker_group.execute(_join, backend_config.backend, backend_config.patience, address, port)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:  # noqa: ARG002
        ray.wait(worker_group.execute_async(_leave), num_returns=len(worker_group), timeout=30)


def _join(backend: str, patience: timedelta, address: str, port: int) -> None:
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
    store = _loopback_store(address, port, patience) if address == "127.0.0.1" else None
    where: dict[str, Any] = (
        {}
        if store is None
        else {"store": store, "rank": context.get_world_rank(), "world_size": context.get_world_size()}
    )
    dist.init_process_group(backend, timeout=patience, **where)


def _loopback_store(address: str, port: int, timeout: timedelta) -> Any:
    """Where the ranks meet, on loopback as the rest of a Ray of our own: torch alone would listen on every interface."""
    import socket

    import torch.distributed as dist

    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    listener = socket.create_server((address, port)).detach() if rank == 0 else None
    library: Any = dist  # which does not export it to type checkers
    return library.TCPStore(
        address, port, world_size, rank == 0, timeout, multi_tenant=False, master_listen_fd=listener
    )


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def recorders(run: RunDir, path: Path) -> list[Any]:
    """Callbacks of the controller which write a line to `path` for each time that it starts the workers of a run again."""
    try:
        from ray.train.v2._internal.execution.callback import ControllerCallback
    except ImportError:
        return []

    class Recorder(ControllerCallback):
        def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:  # noqa: ARG002
            with suppress(Exception):  # it would end the run
                line = _restart(run, current_state)
                if line is not None:
                    path.parent.mkdir(exist_ok=True)
                    with open(path, "a") as file:
                        file.write(json.dumps(line) + "\n")

    return [Recorder()]


def _restart(run: RunDir, state: Any) -> dict[str, Any] | None:
    """What a state of the controller says of a restart."""
    from manta import workers

    name = type(state).__name__
    if name == "RestartingState":
        error = state.training_failed_error
        line = {"kind": workers.kind_of(error), "cause": workers.in_words(error, run)}
        watchdog.begin(run)  # what was found is told now
    elif name == "ResizingState":
        line = {
            "kind": workers.RESIZE,
            "cause": f"nodes came or went, there will be {state.scaling_decision.num_workers} workers",
        }
    else:
        return None
    return {**line, "time": now()}


def lean(trainer: type) -> type:
    """A trainer for a Ray that this process started and that ends with it; the trainer itself in a Ray that is made otherwise.

    Ray Train gives its processes a runtime_env to hand environment variables on. There they are inherited anyway, and
    with a runtime_env no waiting process can be used and Python starts twice in each. The rest is for Ray Data, which is
    not used, and for a cluster that outlives the run.
    """
    try:
        from ray.train.v2._internal.execution.worker_group import WorkerGroup
    except ImportError:
        return trainer
    if not (hasattr(trainer, "_initialize_and_run_controller") and hasattr(WorkerGroup, "_get_worker_runtime_env")):
        return trainer

    class Lean(trainer):  # type: ignore[misc]
        def _create_default_callbacks(self) -> list[Any]:
            needless = ("DatasetsCallback", "PlacementGroupCleanerCallback")
            return [each for each in super()._create_default_callbacks() if type(each).__name__ not in needless]

        def _initialize_and_run_controller(self, **arguments: Any) -> Any:
            from ray.train.v2._internal.execution.controller import TrainController

            class Controller(TrainController):
                def __init__(self, **arguments: Any) -> None:
                    from ray.train.v2._internal.execution.worker_group import WorkerGroup

                    group: Any = WorkerGroup
                    group._get_worker_runtime_env = staticmethod(lambda custom_runtime_env: custom_runtime_env)
                    super().__init__(**arguments)

            controller: Any = ray.remote(num_cpus=0)(Controller).remote(**arguments)  # type: ignore[arg-type]
            ray.get(controller.run.remote())
            return ray.get(controller.get_result.remote())

    return Lean
