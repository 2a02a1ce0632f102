"""Files for Ray's cluster launcher: machines of AWS or GCP. Nothing is rented here. Imports nothing heavy."""

import json
import shlex
import shutil
import sys
import zipfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from manta.cluster import rules
from manta.cluster.elsewhere import PROJECT, Request
from manta.cluster.package import pack
from manta.cluster.render import (
    CLUSTERS,
    Machines,
    arguments,
    as_yaml,
    given,
    machines,
    refuse_secrets,
    write,
)
from manta.config import Cloud, Config
from manta.errors import FINISHED, MantaError

CODE = "code"
_LIBRARIES = {"aws": "boto3", "gcp": "google-api-python-client google-auth cryptography cachetools"}
"""With which the autoscaler, on the head, rents workers."""
_START = "ulimit -n 65536; ray start --object-manager-port=8076"
_HEAD = "--head --port=6379 --autoscaling-config=~/ray_bootstrap_config.yaml --dashboard-host=127.0.0.1"
_TARGETS = {
    "up": "rent the head, which rents the workers; again after a change of cluster.yaml",
    "submit": "copy the code and start the command there; the connection may break",
    "logs": "follow it; Ctrl-C ends the following only",
    "status": "machines, and jobs",
    "stop": "end the command there",
    "down": "give all machines back",
}


def submit(request: Request) -> int:
    """Write the files, and say what to do with them.

    Raises:
        MantaError: a setting does not fit, or the machines would not hold the workers.
    """
    config, settings = request.config, request.config.cluster.cloud
    wanted, folder = _machines(config), CLUSTERS / settings.cluster_name
    job = datetime.now(timezone.utc).strftime("manta-%Y%m%d-%H%M%S")
    files = {
        folder / "cluster.yaml": as_yaml(cluster_file(config, wanted, folder / CODE)),
        folder / "submit.sh": _script(job, arguments(request, wanted.least + 1)),
        folder / "Makefile": _makefile(job),
    }
    refuse_secrets(request, *files.values())
    if config.plan:
        print(files[folder / "cluster.yaml"], end="")
        return FINISHED
    write(files)
    _copy_code(folder / CODE)
    count = {0: "the head alone", 1: "1 machine beside the head"}.get(
        wanted.least, f"{wanted.least} machines beside the head"
    )
    print(f"Cluster {settings.cluster_name} on {settings.provider}: {wanted.needs}, on {count}: {folder}")
    print("Nothing was rented or submitted. Machines cost money from `up` to `down`:")
    for target, what in _TARGETS.items():
        print(f"  make -C {shlex.quote(str(folder))} {target:<8}# {what}")
    return FINISHED


def cluster_file(config: Config, wanted: Machines, code: Path) -> dict[str, Any]:
    """What `ray up` reads. Beside workers the head has no CPUs to train with."""
    settings = config.cluster.cloud
    node = _aws_node if settings.provider == "aws" else _gcp_node
    cpus, gpus = (0, 0) if wanted.least else (settings.head_cpus, settings.head_gpus)
    types = {
        "head": {**_resources(cpus, gpus), "node_config": node(settings, True), "min_workers": 0, "max_workers": 0}
    }
    if wanted.least:
        numbers = {"min_workers": wanted.least, "max_workers": wanted.most}
        has = _resources(settings.worker_cpus, settings.worker_gpus)
        types["worker"] = {**has, "node_config": node(settings, False), **numbers}
    return {
        "cluster_name": settings.cluster_name,
        "max_workers": wanted.most,
        "idle_timeout_minutes": settings.idle_timeout_minutes,
        "provider": _provider(settings),
        "auth": given({"ssh_user": settings.ssh_user, "ssh_private_key": settings.ssh_private_key}),
        **_docker(settings),
        "available_node_types": types,
        "head_node_type": "head",
        "file_mounts": {**settings.file_mounts, "~/manta": str(code)},
        "initialization_commands": [settings.mount_command] if settings.mount_command else [],
        "setup_commands": list(settings.setup_commands),
        "head_setup_commands": [f"python -m pip install {_LIBRARIES[settings.provider]}"],
        "head_start_ray_commands": ["ray stop", f"{_START} {_HEAD}"],
        "worker_start_ray_commands": ["ray stop", f"{_START} --address=$RAY_HEAD_IP:6379"],
    }


def _copy_code(target: Path) -> None:
    """The code as it is now, so that what is submitted is what was typed: as `cluster=job` would send it.

    Raises:
        MantaError: it cannot be written.
    """
    archive = target.with_suffix(".zip")
    pack(PROJECT, archive, sys.maxsize)
    try:
        shutil.rmtree(target, ignore_errors=True)
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(target)
        archive.unlink()
    except OSError as error:
        raise MantaError(f"The code cannot be copied to {target}: {error}") from error


def _resources(cpus: int, gpus: int) -> dict[str, Any]:
    return {"resources": {"CPU": cpus} | ({"GPU": gpus} if gpus else {})}


def _provider(settings: Cloud) -> dict[str, Any]:
    """Where. Stopped machines would cost their disks, so they are given back (cache_stopped_nodes)."""
    provider = {
        "type": settings.provider,
        "region": settings.region,
        "availability_zone": settings.availability_zone,
        "project_id": settings.project_id,
    }
    return given(provider) | ({"cache_stopped_nodes": False} if settings.provider == "aws" else {})


def _docker(settings: Cloud) -> dict[str, Any]:
    """The container that everything runs in, if there is one; it sees what was mounted outside."""
    if not settings.docker_image:
        return {}
    mount = [f"-v {settings.mount_path}:{settings.mount_path}"] if settings.mount_command else []
    image = {"image": settings.docker_image, "container_name": "manta", "pull_before_run": True}
    return {"docker": {**image, "run_options": mount}}


def _aws_node(settings: Cloud, head: bool) -> dict[str, Any]:
    """Arguments of EC2's create_instances."""
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": settings.disk_gb, "VolumeType": "gp3"}}
    profile, spot = settings.iam_instance_profile, settings.use_spot and not head
    return given(
        {
            "InstanceType": settings.head_instance_type if head else settings.worker_instance_type,
            "ImageId": settings.image,
            "BlockDeviceMappings": [disk],
            "KeyName": settings.key_name,
            "IamInstanceProfile": {"Name": profile} if profile else None,
            "SecurityGroupIds": list(settings.security_group_ids),
            "SubnetIds": list(settings.subnet_ids),
            "InstanceMarketOptions": {"MarketType": "spot"} if spot else None,
        }
    )


def _gcp_node(settings: Cloud, head: bool) -> dict[str, Any]:
    """An instance of the Compute Engine API."""
    gpus = settings.head_gpus if head else settings.worker_gpus
    parameters = {"diskSizeGb": settings.disk_gb, "sourceImage": settings.image}
    node: dict[str, Any] = {
        "machineType": settings.head_instance_type if head else settings.worker_instance_type,
        "disks": [{"boot": True, "autoDelete": True, "type": "PERSISTENT", "initializeParams": parameters}],
        "scheduling": {"onHostMaintenance": "TERMINATE"} if gpus else {},  # a machine with GPUs cannot be moved
    }
    if head:
        return given(node)
    if settings.use_spot:
        node["scheduling"]["preemptible"] = True
    if settings.accelerator_type:
        node["guestAccelerators"] = [{"acceleratorType": settings.accelerator_type, "acceleratorCount": gpus}]
    if settings.service_account:
        scopes = ["https://www.googleapis.com/auth/cloud-platform"]
        node["serviceAccounts"] = [{"email": settings.service_account, "scopes": scopes}]
    return given(node)


def _machines(config: Config) -> Machines:
    """How many workers."""
    settings, at, alone = config.cluster.cloud, "cluster.cloud", rules.alone(config)
    head = {"CPU": float(settings.head_cpus), "GPU": float(settings.head_gpus)}
    worker = {"CPU": float(settings.worker_cpus), "GPU": float(settings.worker_gpus)}
    more = f"{at}.head_cpus, {at}.head_gpus" if alone else f"{at}.worker_cpus, {at}.worker_gpus, {at}.min_workers"
    return machines(config, head, worker, settings.min_workers, settings.max_workers, more)


def _script(job: str, arguments: list[str]) -> str:
    """Runs on the head. A job of Ray outlives the connection, and every node gets its code, but not .env."""
    environment = json.dumps({"excludes": ["/.env"], "env_vars": {"PYTHONPATH": "src"}})
    return f"""#!/bin/bash
set -e
ray job submit --address http://127.0.0.1:8265 --no-wait --submission-id {job} \\
  --working-dir ~/manta --runtime-env-json {shlex.quote(environment)} -- \\
  python ~/manta/train.py {shlex.join(arguments)}
"""


def _makefile(job: str) -> str:
    """`ray` is that of the environment which wrote it."""
    ray, jobs = (
        str(Path(sys.executable).with_name("ray")).replace("$", "$$"),
        "RAY_ADDRESS=http://127.0.0.1:8265 ray job",
    )
    commands = {
        "up": ["$(RAY) up --yes --no-restart cluster.yaml"],
        "submit": [
            "$(RAY) rsync-up cluster.yaml",
            "$(RAY) rsync-up cluster.yaml submit.sh '~/submit.sh'",
            "$(RAY) exec cluster.yaml 'bash ~/submit.sh'",
        ],
        "logs": [f"$(RAY) exec cluster.yaml '{jobs} logs --follow {job}'"],
        "status": [f"$(RAY) exec cluster.yaml 'ray status; {jobs} list'"],
        "stop": [f"$(RAY) exec cluster.yaml '{jobs} stop {job}'"],
        "down": ["$(RAY) down --yes cluster.yaml"],
    }
    lines = [f"RAY ?= {ray}", f".PHONY: {' '.join(commands)}"]
    for target, recipe in commands.items():
        lines += ["", f"{target}: # {_TARGETS[target]}", *(f"\t{line}" for line in recipe)]
    return "\n".join(lines) + "\n"
