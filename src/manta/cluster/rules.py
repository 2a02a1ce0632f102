"""Rules for clusters that are reached from outside, in the manner of manta.checks, which runs them. Imports nothing heavy."""

import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from manta.config import Cloud, Config, Kuberay

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_QUANTITY = re.compile(r"\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?")


def dashboard(address: str | None, setting: str) -> Iterator[str]:
    """The address of a Ray dashboard."""
    way_out = "the cluster's dashboard, http://<head>:8265 (https:// behind a proxy): cluster.address=http://head:8265"
    if address is not None and "@" in address:
        yield f"{setting}: no password in an address, it is shown. Ray's own way is a token: RAY_AUTH_TOKEN."
    elif not re.fullmatch(r"https?://[^\s/]+/?", address or ""):
        yield f"{setting}={address} must be {way_out}"


def alone(config: Config) -> bool:
    """Whether everything runs on the head, where the command does."""
    return config.storage.is_remote or config.scaling.num_workers == 0


def kuberay(config: Config) -> Iterator[str]:
    """Kubernetes would take the RayJob, and what it leaves behind outlives its Pods."""
    if config.cluster.kind != "kuberay":
        return
    settings, at = config.cluster.kuberay, "cluster.kuberay"
    if not settings.image:
        yield (
            f"{at}.image=null: the Pods need an image with Manta's packages (scripts/kuberay/Dockerfile makes one): "
            f"{at}.image=registry/manta:tag"
        )
    if "://" not in settings.working_dir and not settings.working_dir.startswith("/"):
        yield (
            f"{at}.working_dir={settings.working_dir} must be the folder of the image that has train.py, e.g. /manta, or the "
            "address of a zip of the code, https://, s3:// or gs://"
        )
    elif "://" in settings.working_dir and _has_key(settings.working_dir):
        yield f"{at}.working_dir has a key in it, and settings are written to files. Use an address without one."
    names = {key: getattr(settings, key) for key in ("namespace", "claim_name", "service_account")}
    for list_key in ("image_pull_secrets", "env_from_secrets"):
        names |= {f"{list_key}[{index}]": name for index, name in enumerate(getattr(settings, list_key))}
    for key, name in names.items():
        if name is not None and not _NAME.fullmatch(name):
            yield f"{at}.{key}={name} is no name in Kubernetes: small letters, digits and dashes, e.g. my-{key.split('[')[0].split('_')[0]}."
    for key in ("head_memory", "worker_memory", "shared_memory"):
        if not _QUANTITY.fullmatch(getattr(settings, key)):
            yield f"{at}.{key}={getattr(settings, key)} is no amount of memory as Kubernetes writes it, e.g. 16Gi."
    if settings.ttl_seconds_after_finished and not settings.shutdown_after_job_finishes:
        yield (
            f"{at}.shutdown_after_job_finishes=false: the Pods stay, so {at}.ttl_seconds_after_finished="
            f"{settings.ttl_seconds_after_finished} has no meaning. Set it to 0."
        )
    yield from _number(config, at, "replicas", "max_replicas", "worker Pods", ("head_cpu", "head_gpu"))
    yield from _place(config, at, "claim_name", settings.claim_name, settings.mount_path, "the Pods")


def cloud(config: Config) -> Iterator[str]:
    """Ray's cluster launcher would take the file, and what is there outlives the machines."""
    if config.cluster.kind != "cloud":
        return
    settings, at = config.cluster.cloud, "cluster.cloud"
    examples = {"region": "us-west-2", "image": "ami-...", "head_instance_type": "m5.xlarge"}
    only: dict[str, tuple[str, ...]] = {"gcp": ("project_id", "service_account", "accelerator_type")}
    only["aws"] = ("key_name", "iam_instance_profile", "security_group_ids", "subnet_ids")
    if settings.provider == "gcp":
        examples = {"region": "us-west1", "availability_zone": "us-west1-b", "project_id": "my-project"}
        examples |= {"image": "projects/.../images/...", "head_instance_type": "n2-standard-4"}
    if not alone(config):
        examples["worker_instance_type"] = "g2-standard-4" if settings.provider == "gcp" else "g5.xlarge"
    for key, example in examples.items():
        if not getattr(settings, key):
            yield f"{at}.{key}=null: it is needed, e.g. {at}.{key}={example}"
    for provider, keys in only.items():
        for key in keys:
            if settings.provider != provider and getattr(settings, key):
                yield f"{at}.{key}={getattr(settings, key)} is only for {at}.provider={provider}. Leave it out."
    if not _LABEL.fullmatch(settings.cluster_name):
        yield f"{at}.cluster_name={settings.cluster_name} must be small letters, digits and dashes, e.g. my-cluster."
    if settings.provider == "aws" and bool(settings.ssh_private_key) != bool(settings.key_name):
        yield f"{at}.ssh_private_key and {at}.key_name belong together: the file here, and its key pair's name at AWS."
    if settings.accelerator_type and not settings.worker_gpus:
        yield f"{at}.accelerator_type={settings.accelerator_type}: how many of them? Set {at}.worker_gpus=1, say."
    yield from _number(config, at, "min_workers", "max_workers", "workers", ("head_cpus", "head_gpus"))
    yield from _place(config, at, "mount_command", settings.mount_command, settings.mount_path, "the machines")


def _number(config: Config, at: str, least: str, most: str, what: str, head: tuple[str, str]) -> Iterator[str]:
    """Machines beside the head are asked for only where some can be used, and at most as many as at least."""
    group: Kuberay | Cloud = getattr(config.cluster, config.cluster.kind)
    given = {key: getattr(group, key) for key in (least, most)}
    for key, value in given.items():
        if value is not None and alone(config):
            reason = "with a bucket" if config.storage.is_remote else "with scaling.num_workers=0"
            yield (
                f"{at}.{key}={value}: {reason} everything runs on the head, and {what} would be idle. Leave it out and say what "
                f"the head has: {at}.{head[0]}=8 {at}.{head[1]}=1; or use a folder that all share."
            )
    if given[least] is not None and given[most] is not None and given[most] < given[least]:
        yield f"{at}.{most}={given[most]} is less than {at}.{least}={given[least]}. Leave it out, or set it to {given[least]} or more."


def _place(config: Config, at: str, key: str, given: str | None, mount_path: str, where: str) -> Iterator[str]:
    """Results and data are where they outlive the machines, and where all of these see them."""
    storage, mount = config.storage, PurePosixPath(mount_path)
    if not mount.is_absolute() or len(mount.parts) < 2:
        yield f"{at}.mount_path={mount_path} must be an absolute path, e.g. /shared."
        return
    if storage.is_remote:
        return
    if not given:
        bucket = "a bucket, where everything runs on the head: storage.path=s3://bucket/runs"
        example = "my-claim" if key == "claim_name" else "'sudo mount -t nfs4 server:/ /shared'"
        yield f"{at}.{key}=null: what {where} write goes with them. Set {at}.{key}={example}, or use {bucket}"
    for name, path, folder in (
        ("storage.path", storage.path, "outputs"),
        ("data.root", config.data.root, "data"),
    ):
        if "://" not in path and not PurePosixPath(path).is_relative_to(mount):
            yield (
                f"{name}={path} is not below {at}.mount_path={mount_path}, the one place that all of {where} share and that "
                f"outlives them. Set {name}={mount / folder}"
            )


def _has_key(address: str) -> bool:
    """Whether an address has a user, a password or a query in it."""
    parts = urlsplit(address)
    return "@" in parts.netloc or bool(parts.query)


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (kuberay, cloud)
