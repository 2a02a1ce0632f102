"""A RayJob for KubeRay: written to a file and, with kubectl, handed to Kubernetes. Imports nothing heavy."""

import math
import re
import shlex
import shutil
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from manta.cluster import rules
from manta.cluster.elsewhere import Request
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
from manta.config import Config, Kuberay
from manta.errors import FINISHED, MantaError

LONGEST_NAME = 47  # KubeRay's limit for a RayJob
LABEL = "manta-job"
KUBECTL_S = 60


def submit(request: Request) -> int:
    """Write the RayJob, hand it over, and say how to follow and stop it.

    Raises:
        MantaError: a setting does not fit, the Pods would not hold the workers, or kubectl failed.
    """
    config, name = request.config, _name(request.config)
    pods = _pods(config)
    manifest = as_yaml(rayjob(request, name, pods))
    refuse_secrets(request, manifest)
    if config.plan:
        print(manifest, end="")
        return FINISHED
    path = CLUSTERS / name / "rayjob.yaml"
    write({path: manifest})
    count = f"{pods.least} worker Pods" if pods.least != 1 else "1 worker Pod"
    print(f"RayJob {name}: {pods.needs}, in {count if pods.least else 'the head Pod'}: {path}")
    create = ["kubectl", "create", "-f", str(path)]
    if config.cluster.kuberay.submit and shutil.which("kubectl"):
        _kubectl(create)
        print("Submitted. The command here ends, the job goes on.")
    elif config.cluster.kuberay.submit:
        print(f"There is no kubectl here, so nothing was submitted. Where there is one: {shlex.join(create)}")
    else:
        print(f"cluster.kuberay.submit=false: nothing was submitted. To do so: {shlex.join(create)}")
    for what, command in _commands(config.cluster.kuberay, name).items():
        print(f"  {what:<8}{command}")
    print(f"  results {config.storage.path}")
    return FINISHED


def rayjob(request: Request, name: str, pods: Machines) -> dict[str, Any]:
    """The manifest. Its entrypoint is a line for a shell, which KubeRay hands on as it is (HTTPMode)."""
    settings = request.config.cluster.kuberay
    address = "://" in settings.working_dir
    script = "train.py" if address else f"{settings.working_dir.rstrip('/')}/train.py"
    job: dict[str, Any] = {
        "entrypoint": shlex.join(["python", script, *arguments(request, pods.least + 1)]),
        "jobId": name,
        "submissionMode": "HTTPMode",
        "shutdownAfterJobFinishes": settings.shutdown_after_job_finishes,
        "backoffLimit": settings.backoff_limit,
    }
    if settings.shutdown_after_job_finishes:
        job["ttlSecondsAfterFinished"] = settings.ttl_seconds_after_finished
    if settings.active_deadline_seconds is not None:
        job["activeDeadlineSeconds"] = settings.active_deadline_seconds
    if address:  # src is relative to the folder where it is unpacked, and where Python starts
        job["runtimeEnvYAML"] = as_yaml({"working_dir": settings.working_dir, "env_vars": {"PYTHONPATH": "src"}})
    job["rayClusterSpec"] = _cluster(request.config, name, pods)
    metadata = {"name": name, "namespace": settings.namespace, "labels": {**settings.labels, LABEL: name}}
    metadata["annotations"] = dict(settings.annotations)
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": given(metadata), "spec": job}


def _cluster(config: Config, name: str, pods: Machines) -> dict[str, Any]:
    """The spec of a RayCluster. Beside worker Pods the head has no CPUs to train with."""
    settings = config.cluster.kuberay
    cluster: dict[str, Any] = {"rayVersion": settings.ray_version or version("ray")}
    if pods.most > pods.least:
        cluster["enableInTreeAutoscaling"] = True
        cluster["autoscalerOptions"] = {"idleTimeoutSeconds": settings.idle_timeout_seconds}
    head = (settings.head_cpu, settings.head_memory, settings.head_gpu)
    cluster["headGroupSpec"] = {
        "rayStartParams": {"num-cpus": "0", "num-gpus": "0"} if pods.least else {},
        "template": _template(settings, name, "ray-head", head, settings.head_node_selector),
    }
    if pods.least:
        worker = (settings.worker_cpu, settings.worker_memory, _worker_gpus(config))
        cluster["workerGroupSpecs"] = [
            {
                "groupName": "workers",
                "replicas": pods.least,
                "minReplicas": pods.least,
                "maxReplicas": pods.most,
                "rayStartParams": {},
                "template": _template(settings, name, "ray-worker", worker, settings.node_selector),
            }
        ]
    return cluster


def _template(
    settings: Kuberay, name: str, container: str, has: tuple[int, str, int], selector: dict[str, str]
) -> dict[str, Any]:
    """A Pod. It asks for what it may use, so that it is never squeezed."""
    cpu, memory, gpu = has
    amounts = {"cpu": str(cpu), "memory": memory} | ({settings.gpu_resource: str(gpu)} if gpu else {})
    ray: dict[str, Any] = {"name": container, "image": settings.image, "imagePullPolicy": settings.image_pull_policy}
    ray["resources"] = {"requests": amounts, "limits": dict(amounts)}
    ray["env"] = [{"name": key, "value": value} for key, value in settings.env.items()]
    ray["envFrom"] = [{"secretRef": {"name": secret}} for secret in settings.env_from_secrets]
    ray["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}}
    ]
    if settings.claim_name:
        ray["volumeMounts"].append({"name": "shared", "mountPath": settings.mount_path})
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": settings.claim_name}})
    pod: dict[str, Any] = {"containers": [given(ray)], "volumes": volumes, "nodeSelector": dict(selector)}
    pod["tolerations"] = [dict(toleration) for toleration in settings.tolerations]
    pod["imagePullSecrets"] = [{"name": secret} for secret in settings.image_pull_secrets]
    pod["serviceAccountName"] = settings.service_account
    metadata = {"labels": {**settings.labels, LABEL: name}, "annotations": dict(settings.annotations)}
    return {"metadata": given(metadata), "spec": given(pod)}


def _pods(config: Config) -> Machines:
    """How many worker Pods."""
    settings, at, alone = config.cluster.kuberay, "cluster.kuberay", rules.alone(config)
    head = {"CPU": float(settings.head_cpu), "GPU": float(settings.head_gpu)}
    worker = {"CPU": float(settings.worker_cpu), "GPU": float(_worker_gpus(config))}
    more = f"{at}.head_cpu, {at}.head_gpu" if alone else f"{at}.worker_cpu, {at}.worker_gpu, {at}.replicas"
    return machines(config, head, worker, settings.replicas, settings.max_replicas, more)


def _worker_gpus(config: Config) -> int:
    """GPUs of a worker Pod: as set, else whole ones for one training worker."""
    scaling, given = config.scaling, config.cluster.kuberay.worker_gpu
    if given is not None:
        return given
    asked = scaling.resources_per_worker.get("GPU")
    if asked is None:
        asked = 1.0 if scaling.use_gpu or scaling.accelerator_type else 0.0
    return math.ceil(asked)


def _name(config: Config) -> str:
    """Of the RayJob: the run's name, and the time."""
    words = re.sub(r"[^a-z0-9]+", "-", (config.name or "").lower()).strip("-")
    time = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    room = LONGEST_NAME - len("manta--") - len(time)
    return "-".join(part for part in ("manta", words[:room].strip("-"), time) if part)


def _kubectl(command: list[str]) -> None:
    """Run kubectl.

    Raises:
        MantaError: it fails, with its own last words.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=KUBECTL_S, stdin=subprocess.DEVNULL)
        said = done.stderr.strip() or done.stdout.strip() or f"it ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        done, said = None, f"no answer within {KUBECTL_S} s"
    if done is None or done.returncode != 0:
        raise MantaError(
            f"{shlex.join(command)}: {said}\nNothing was submitted. `kubectl config current-context` says which cluster is meant; "
            "the file is written, and cluster.kuberay.submit=false writes it only."
        )


def _commands(settings: Kuberay, name: str) -> dict[str, str]:
    """What to type next."""
    kubectl = f"kubectl -n {settings.namespace}" if settings.namespace else "kubectl"
    head = f"$({kubectl} get pod -l {LABEL}={name},ray.io/node-type=head -o name)"
    log = f"/tmp/ray/session_latest/logs/job-driver-{name}.log"
    return {
        "state": f"{kubectl} get rayjob {name}",
        "pods": f"{kubectl} get pod -l {LABEL}={name}",
        "follow": f"{kubectl} exec {head} -c ray-head -- tail -n +1 -F {log}",
        "stop": f"{kubectl} delete rayjob {name}",
    }
