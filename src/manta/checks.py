"""Every check of a configuration's values that needs no heavy import, as a flat list of rules.

A rule yields one message for each problem: the setting, its value, what is allowed and the way out.
What depends on the machine or the cluster is checked in plan.py, arguments of plug-ins in targets.py.
"""

import glob
import json
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from manta.cluster import rules as outside
from manta.config import CLUSTER_KINDS, PRECISIONS, SCHEMA_VERSION, STRATEGIES, Config, Storage
from manta.errors import MantaError, nearest
from manta.schema import help_text
from manta.search import rules as search
from manta.targets import check_allowed

# Bounds of every number; null and settings that a plug-in does not have pass, lists are checked number by number.
NUMBERS = {
    "schema_version": f">= 1, <= {SCHEMA_VERSION}",
    "seed": f">= 0, <= {2**32 - 1}",
    "data.input_shape": f">= 1, <= {2**20}",
    "data.num_classes": f">= 1, <= {10**7}",
    "data.target_mean": f"> {-(10.0**30)}, < {10.0**30}",
    "data.target_std": f"> 0, < {10.0**30}",
    "data.batch_size": f">= 1, <= {10**8}",
    "data.micro_batch_size": ">= 1",
    "data.eval_batch_size": f">= 1, <= {10**8}",
    "data.num_workers": ">= 0, <= 1024",
    "data.prefetch_factor": ">= 1, <= 1024",
    "data.val_fraction": "> 0, < 1",
    "data.split_seed": f">= 0, <= {2**32 - 1}",
    "model.dropout": ">= 0, < 1",
    "optimizer.lr": "> 0",
    "optimizer.weight_decay": ">= 0",
    "optimizer.momentum": ">= 0, < 1",
    "optimizer.betas": ">= 0, < 1",
    "optimizer.eps": "> 0",
    "scheduler.warmup": ">= 0",
    "scheduler.total": "> 0",
    "scheduler.min_ratio": ">= 0, <= 1",
    "training.epochs": ">= 1",
    "training.max_steps": ">= 1",
    "training.grad_clip_norm": "> 0",
    "training.label_smoothing": ">= 0, < 1",
    "training.ema.decay": "> 0, < 1",
    "training.early_stopping.patience": ">= 1",
    "training.early_stopping.min_delta": ">= 0",
    "training.checkpoint.every_n_steps": ">= 1",
    "training.checkpoint.every_s": "> 0",
    "training.checkpoint.every_n_epochs": ">= 0",
    "training.checkpoint.keep": ">= 1",
    "training.log_every_n_steps": ">= 1",
    "training.val_every_n_epochs": ">= 1",
    "training.limit_train_batches": ">= 1",
    "training.limit_eval_batches": ">= 1",
    "training.overfit_batches": ">= 1",
    "training.peak_flops": "> 0",
    "scaling.num_workers": ">= 0, <= 100000",
    "scaling.max_workers": ">= 1, <= 100000",
    "scaling.max_failures": ">= -1",
    "scaling.max_preemption_failures": ">= -1",
    "scaling.controller_failure_limit": ">= -1",
    "scaling.elastic_resize_monitor_interval_s": ">= 1",
    "scaling.timeout_s": f"> 0, <= {30 * 24 * 3600}",
    "cluster.num_cpus": ">= 1, <= 100000",
    "cluster.num_gpus": ">= 0, <= 10000",
    "cluster.object_store_memory": f">= {75 * 2**20}",  # Ray's own minimum
    "cluster.wait_s": ">= 0",
    "cluster.min_nodes": ">= 1",
    "cluster.kuberay.head_cpu": ">= 1",
    "cluster.kuberay.head_gpu": ">= 0",
    "cluster.kuberay.worker_cpu": ">= 1",
    "cluster.kuberay.worker_gpu": ">= 0",
    "cluster.kuberay.replicas": ">= 1, <= 10000",
    "cluster.kuberay.max_replicas": ">= 1, <= 10000",
    "cluster.kuberay.idle_timeout_seconds": ">= 1",
    "cluster.kuberay.ttl_seconds_after_finished": ">= 0",
    "cluster.kuberay.active_deadline_seconds": ">= 1",
    "cluster.kuberay.backoff_limit": ">= 0",
    "cluster.cloud.head_cpus": ">= 0",
    "cluster.cloud.head_gpus": ">= 0",
    "cluster.cloud.worker_cpus": ">= 1",
    "cluster.cloud.worker_gpus": ">= 0",
    "cluster.cloud.min_workers": ">= 1, <= 10000",
    "cluster.cloud.max_workers": ">= 1, <= 10000",
    "cluster.cloud.idle_timeout_minutes": "> 0",
    "cluster.cloud.disk_gb": ">= 1",
    "cluster.slurm.nodes": ">= 1, <= 100000",
    "cluster.slurm.cpus_per_task": ">= 1",
    "cluster.slurm.signal_s": ">= 10, <= 65535",  # sbatch's own limit
    "cluster.slurm.max_requeues": ">= 0",
    "cluster.slurm.max_array_tasks": ">= 1",
    "storage.finish_s": ">= 0",
    "tracking.finish_s": "> 0",
    "search.num_samples": ">= 1, <= 1000000",
    "search.time_budget_s": "> 0",
    "search.max_concurrent_trials": ">= 1",
    "search.seed": f">= 0, <= {2**32 - 1}",
    "search.max_failures": ">= 0",
    "search.refit_seeds": ">= 1, <= 1000",
    "search.algorithm.n_startup_trials": ">= 1",
    "search.algorithm.n_initial_points": ">= 1",
    "search.algorithm.gamma": "> 0, < 1",
    "search.algorithm.random_search_steps": ">= 1",
    "search.scheduler.max_t": ">= 1",
    "search.scheduler.grace_period": ">= 1",
    "search.scheduler.reduction_factor": "> 1",
    "search.scheduler.brackets": ">= 1",
    "search.scheduler.min_samples_required": ">= 1",
    "search.scheduler.perturbation_interval": ">= 1",
    "search.scheduler.burn_in_period": ">= 0",
    "search.scheduler.quantile_fraction": "> 0, <= 0.5",
    "search.scheduler.resample_probability": ">= 0, <= 1",
}
OR_AUTO = ("scaling.num_workers", "data.micro_batch_size")  # which rules of their own look at
CHOICES = {
    "objective.mode": ("max", "min"),
    "data.input_dtype": ("float", "int64"),
    "data.engine": ("torch", "ray"),
    "scheduler.unit": ("step", "epoch", "validation"),
    "training.precision": PRECISIONS,
    "scaling.strategy": STRATEGIES,
    "scaling.placement_strategy": ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
    "cluster.kind": CLUSTER_KINDS,
    "cluster.kuberay.image_pull_policy": ("Always", "IfNotPresent", "Never"),
    "cluster.cloud.provider": ("aws", "gcp"),
    "tracking.watch": ("gradients", "parameters", "all"),
    "tracking.wandb.mode": ("online", "offline", "disabled"),
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,79}")
LABEL = re.compile(r"!?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?|!?in\([\w.-]+(, ?[\w.-]+)*\)")  # Ray's
LONGEST_EXPERIMENT, LONGEST_WANDB_NAME, SHORTEST_WANDB_KEY = 500, 128, 40  # characters, of MLflow and W&B
LOWER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse")
HIGHER_IS_BETTER = ("accuracy", "acc", "f1", "auc", "auroc", "precision", "recall")
COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


def check(config: Config) -> None:
    """Refuse a configuration that cannot work, naming every problem at once.

    Raises:
        MantaError: with all messages of all rules.
    """
    refuse([problem for rule in RULES for problem in rule(config)])


def check_cluster(config: Config) -> None:
    """`check` of what is said of the cluster alone: what is resumed there cannot be looked at from here.

    Raises:
        MantaError: with all messages.
    """
    refuse([problem for rule in CLUSTER_RULES for problem in rule(config)])


def refuse(problems: list[str]) -> None:
    """One error for all problems, if there are any.

    Raises:
        MantaError: with all messages.
    """
    if len(problems) == 1:
        raise MantaError(problems[0])
    if problems:
        raise MantaError(f"{len(problems)} problems:\n" + "\n".join(f"- {problem}" for problem in problems))


def value_of(config: Config, key: str) -> Any:
    """The value at a dotted key; None where a plug-in has no such argument."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return value


def finite(config: Config) -> Iterator[str]:
    """NaN and infinity are in no setting's range."""
    for key, value in _leaves("", asdict(config)):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{key}={value} is not a finite number. {_bounds(key)}"


def numbers(config: Config) -> Iterator[str]:
    """Every number is within its bounds, and a number at all where a plug-in leaves its type open."""
    for key, bounds in NUMBERS.items():
        given = value_of(config, key)
        for value in given if isinstance(given, list) else [given]:
            if not _is_number(value):
                if value is not None and key not in OR_AUTO:
                    yield f"{key}={_typed(given)} is not a number. {_bounds(key)}"
            elif math.isfinite(value) and not _within(value, bounds):
                yield f"{key}={_typed(given)} is out of range. {_bounds(key)}"


def choices(config: Config) -> Iterator[str]:
    """Every word is one of those there are."""
    for key, allowed in CHOICES.items():
        value = value_of(config, key)
        missing = value is None and key == "scheduler.unit" and "unit" in config.scheduler
        if missing or (value is not None and value not in allowed):
            hint = nearest(str(value).lower(), map(str.lower, allowed))
            close = next((word for word in allowed if word.lower() == hint), None)
            yield f"{key}={_typed(value)} must be one of {', '.join(allowed)}.{_meant(key, close)}"


def names(config: Config) -> Iterator[str]:
    """Names become parts of paths and of trackers' addresses."""
    tags = {f"tags[{index}]": tag for index, tag in enumerate(config.tags)}
    for key, name in {"name": config.name, "group": config.group, "data.name": config.data.name, **tags}.items():
        if name is not None and not NAME.fullmatch(name):
            shown = name if len(name) <= 100 else f"{name[:100]}..."
            safe = re.sub(r"[^A-Za-z0-9._+=-]+", "-", name).strip("-.")[:80] or "my-run"
            yield (
                f"{key}={shown!r} may have up to 80 letters, digits and . _ + = - and starts with a letter or digit. "
                f"{safe} would do."
            )


def plug_ins(config: Config) -> Iterator[str]:
    """Every `_target_`, nested ones included, comes from an allowed package and does not run arbitrary code."""
    for package in config.allowed_targets:
        if not package.isidentifier():
            yield f"allowed_targets has {package!r}: it must be the name of a package, without dots, e.g. mylab."
        elif package in sys.stdlib_module_names:
            yield f"allowed_targets has {package!r}, a part of Python that can run anything. Call it in a function of your own."
    specs = {"model": config.model, "optimizer": config.optimizer, "data.dataset": config.data.dataset}
    specs["recipe"] = {"_target_": config.recipe._target_}
    if config.scheduler:
        specs["scheduler"] = config.scheduler
    if config.recipe.task:
        specs["recipe.task"] = config.recipe.task
    for split, transforms in asdict(config.data.transforms).items():
        specs |= {f"data.transforms.{split}[{index}]": spec for index, spec in enumerate(transforms)}
    named = {f"{key}._target_": None for key in specs}
    for key, spec in {**specs, "recipe.settings": config.recipe.settings}.items():
        named |= {where: target for where, target in _leaves(key, spec) if where.endswith("._target_")}
    for where, target in named.items():
        yield from _target(where.removesuffix("._target_"), target, config.allowed_targets)


def objective(config: Config) -> Iterator[str]:
    """The metric exists and is optimized in its sensible direction."""
    metric, mode, known = config.objective.metric, config.objective.mode, config.recipe.metrics
    if metric not in known:
        yield (
            f"objective.metric={metric} is not reported by {config.recipe._target_}, which reports "
            f"{', '.join(known) or 'nothing (recipe.metrics)'}.{_meant('objective.metric', nearest(metric, known))}"
        )
    wrong = {"max": LOWER_IS_BETTER, "min": HIGHER_IS_BETTER}.get(mode, ())
    if metric.rpartition("/")[2] in wrong:
        right = {"max": "min", "min": "max"}[mode]
        yield f"objective.mode={mode} would look for the worst {metric}. Set objective.mode={right}."


def length(config: Config) -> Iterator[str]:
    """Training ends."""
    if config.training.epochs is None and config.training.max_steps is None:
        yield "training.epochs=null and training.max_steps=null: training would never end. Set training.epochs=10, say."


def batches(config: Config) -> Iterator[str]:
    """A global batch can be shared out."""
    data, scaling = config.data, config.scaling
    for key in ("num_workers", "max_workers"):
        most = _count(getattr(scaling, key))
        if 0 < data.batch_size < most:
            yield (
                f"data.batch_size={data.batch_size} is the global batch, too small for scaling.{key}={most}: "
                f"each worker needs a sample. Set data.batch_size={most} or scaling.{key}={data.batch_size}."
            )
    micro = data.micro_batch_size
    if isinstance(micro, str) and micro != "auto":
        yield f"data.micro_batch_size={micro} must be a number of samples, auto (as many as fit) or null (no splitting)."
    elif micro == "auto" and scaling.strategy == "fsdp2":
        yield (
            "data.micro_batch_size=auto tries on each worker alone what fits, and with scaling.strategy=fsdp2 no worker can "
            "compute alone. Set data.micro_batch_size=8, say."
        )
    elif isinstance(micro, int) and micro > data.batch_size > 0:
        yield (
            f"data.micro_batch_size={micro} is a part of data.batch_size={data.batch_size} and cannot "
            "be larger. Set data.micro_batch_size=null for no splitting."
        )
    if data.engine == "ray" and scaling.num_workers == 0:
        yield (
            "data.engine=ray streams data through Ray, and scaling.num_workers=0 runs without it. Set scaling.num_workers=1 (of "
            "scripts/evaluate.py: num_workers=1), or data.engine=torch, which reads everything into memory."
        )
    size = math.prod(data.input_shape)
    if not data.input_shape or len(data.input_shape) > 5 or size > 2**31:
        yield f"data.input_shape={_typed(data.input_shape)} must be the 1 to 5 sizes of one sample, e.g. [3,32,32]."


def workers(config: Config) -> Iterator[str]:
    """The request for workers makes sense in itself."""
    scaling = config.scaling
    number, most = scaling.num_workers, scaling.max_workers
    if not isinstance(number, int) and number != "auto":
        yield f"scaling.num_workers={_typed(number)} must be auto or a whole number, 0 = in this process without Ray."
    elif most is not None and (number == "auto" or number == 0):
        yield f"scaling.max_workers={most} makes the run elastic: set scaling.num_workers={number} to 1 or more."
    elif most is not None and most < _count(number):
        yield f"scaling.max_workers={most} is less than scaling.num_workers={number}. Set scaling.max_workers={number}."
    if scaling.strategy == "fsdp2" and number == 0:
        yield (
            "scaling.strategy=fsdp2 shards over workers, but scaling.num_workers=0 runs in this process. "
            "Set scaling.num_workers=1 or more, or scaling.strategy=ddp."
        )


def resources(config: Config) -> Iterator[str]:
    """What each worker gets is written in Ray's words."""
    use_gpu, key = config.scaling.use_gpu, "scaling.resources_per_worker"
    given = {name: amount for name, amount in config.scaling.resources_per_worker.items() if amount is not None}
    for name, amount in given.items():
        in_ray = name.upper().rstrip("S")
        if amount < 0:
            yield f"{key}.{name}={amount:g} must be null or >= 0."
        if name != in_ray and in_ray in ("CPU", "GPU"):
            yield f"{key}.{name}={amount:g} is {in_ray} in Ray's words: {key}.{in_ray}={amount:g}."
        if name == "GPU" and amount > 1 and amount != int(amount):
            yield f"{key}.GPU={amount:g}: Ray shares one GPU or gives whole ones. Set {key}.GPU={math.ceil(amount)}."
    if given.get("CPU") == 0 and not any(given.values()) and not use_gpu:
        yield f"{key}.CPU=0: a worker must take something. Set {key}.CPU=1, or null for a share of the CPUs."
    if use_gpu is False and config.scaling.accelerator_type is not None:
        yield (
            f"scaling.accelerator_type={config.scaling.accelerator_type} is a type of GPU, and scaling.use_gpu=false "
            "asks for none. Leave one of them null."
        )
    selector = config.scaling.label_selector
    for name, value in selector.items():
        if not LABEL.fullmatch(value):
            yield (
                f"scaling.label_selector.{name}={value} must be a label's value, or !value, in(a, b) or !in(a, b), each of "
                "letters, digits, '-', '_' and '.'."
            )
    if selector and (config.cluster.kind == "local" or config.scaling.num_workers == 0):
        yield (
            f"scaling.label_selector={selector} chooses among the nodes of a cluster, and this is one machine. Add "
            "cluster=existing (and workers: scaling=multi_node), or leave it out."
        )
    if use_gpu is not None and "GPU" in given and use_gpu != (given["GPU"] > 0):
        yield f"scaling.use_gpu={_typed(use_gpu)} contradicts {key}.GPU={given['GPU']:g}. Leave one of them null."


def half_precision(config: Config) -> Iterator[str]:
    """fp16 needs a GPU."""
    here = config.scaling.num_workers == 0 or config.cluster.kind == "local"
    if config.training.precision == "fp16" and (config.scaling.use_gpu is False or (here and not has_gpu())):
        reason = "scaling.use_gpu=false" if config.scaling.use_gpu is False else "this machine has none"
        yield f"training.precision=fp16 needs a GPU, and {reason}. Set training.precision=bf16, which CPUs have too."


def cluster(config: Config) -> Iterator[str]:
    """The address fits the kind of cluster."""
    kind, address = config.cluster.kind, config.cluster.address
    if address is not None and address.startswith("ray://"):
        yield (
            f"cluster.address={address} is Ray Client, which Ray Train does not support. Hand the command to the cluster's "
            "Jobs API: cluster=job cluster.address=http://head:8265"
        )
    elif address is not None and kind not in ("existing", "job"):
        yield f"cluster.address={address} is not used by cluster.kind={kind}. Add cluster=existing, or drop the address."
    elif kind == "job":
        yield from outside.dashboard(address, "cluster.address")
    elif kind == "existing" and address is None:
        yield "cluster.address=null: cluster.kind=existing needs auto (this host's Ray) or host:port."
    elif address not in (None, "auto") and not re.fullmatch(r"[\w.-]+:\d{1,5}|\[[\da-fA-F:]+\]:\d{1,5}", str(address)):
        yield f"cluster.address={address} must be auto (this host's Ray) or host:port, e.g. 10.0.0.1:6379."
    for key in ("num_cpus", "num_gpus"):
        value = getattr(config.cluster, key)
        if kind not in ("local", "slurm") and value is not None:
            yield f"cluster.{key}={value} is only for cluster.kind=local: leave it null, the cluster has what it has."
    if kind != "existing" and config.cluster.min_nodes is not None:
        yield f"cluster.min_nodes={config.cluster.min_nodes} is only for cluster=existing: leave it null."

    for name in config.cluster.env_vars:
        if kind == "existing" and name not in os.environ:
            yield f"cluster.env_vars: {name} is not set here. Set it (export {name}=...; .env counts too), or leave it out."


def folders(config: Config) -> Iterator[str]:
    """Results can be written and data read; creates nothing."""
    for key in ("storage.path", "data.root"):
        if not value_of(config, key).strip():
            yield f"{key}='' must be a folder."
    storage = config.storage
    if storage.is_remote:
        yield from _bucket(storage)
    if config.cluster.kind in ("job", "kuberay", "cloud"):  # they are another machine's
        return
    key, path = ("storage.cache", Path(storage.cache)) if storage.is_remote else ("storage.path", Path(storage.path))
    there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not there.is_dir():
        yield f"{key}={path} cannot be created: {there} is not a folder. Set {key} to another place."
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"{key}={path} cannot be written: no permission in {there}. Set {key} to another place."
    root = Path(config.data.root)
    mode = os.R_OK | os.X_OK if root.is_dir() else os.R_OK  # a data set may be one file
    readable = (root.is_dir() or root.is_file()) and os.access(root, mode)
    if "://" not in config.data.root and root.exists() and not readable:
        yield f"data.root={root} is no folder or file that can be read. Set data.root to another place or mend its permissions."


def _bucket(storage: Storage) -> Iterator[str]:
    """An address of a bucket, and no key in it: settings are written to files."""
    path, url = storage.path, storage.endpoint_url
    kind, _, rest = path.partition("://")
    if kind != "s3":
        yield (
            f"storage.path={path} must be a folder (on several nodes one that all of them share) or s3://bucket/folder; "
            f"there is nothing for {kind}://. Mount it, or use a server with S3's API (storage.endpoint_url)."
        )
    elif "@" in rest or "?" in rest:
        yield (
            "storage.path has more in it than s3://bucket/folder, and settings are written to files. Keys belong into the "
            "environment or .env (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), the server's address into storage.endpoint_url."
        )
    elif not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._+=-]+)*/?", rest) or {".", ".."} & set(
        rest.split("/")
    ):
        yield (
            f"storage.path={path} must be s3://bucket/folder: a bucket's name has 3 to 63 small letters, digits, dots and "
            "dashes, a folder's letters, digits and . _ + = -"
        )
    if url is not None and re.search(r"//[^/]*@", url):
        yield (
            "storage.endpoint_url has a key in it, and settings are written to files. Leave it out: AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY belong into the environment or into .env."
        )
    elif url is not None and not re.fullmatch(r"https?://[\w.\[\]:-]+/?", url):
        yield f"storage.endpoint_url={url} must be http://host:port or https://host of a server with S3's API."


def has_gpu() -> bool:
    """Whether the machine shows a GPU to this process; asks the file system, not torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(glob.glob(device) for device in ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg"))


def _target(key: str, target: Any, allowed: list[str]) -> Iterator[str]:
    """One `_target_`."""
    try:
        check_allowed(key, {"_target_": target}, allowed)
    except MantaError as error:
        yield str(error)


def _is_number(value: Any) -> bool:
    """Whether a value counts as a number in YAML."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _within(value: float, bounds: str) -> bool:
    """Whether a number satisfies bounds such as ">= 0, < 1"."""
    return all(COMPARE[sign](value, float(bound)) for sign, bound in map(str.split, bounds.split(",")))


def _bounds(key: str) -> str:
    """What is allowed for a number, and what it means."""
    bounds = NUMBERS.get(key)
    text = help_text(Config, key)
    allowed = f"It must be {bounds.replace(',', ' and')}" if bounds else "It must be finite"
    return allowed + (f" ({text.rstrip('.')})." if text else ".")


def _typed(value: Any) -> str:
    """A value as it is typed on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _meant(key: str, value: str | None) -> str:
    """The nearest valid value as a question, if one is near."""
    return f" Did you mean {key}={value}?" if value else ""


def _count(number: int | str | None) -> int:
    """A number of workers; 0 for auto and null."""
    return number if isinstance(number, int) else 0


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every plain value in nested dictionaries and lists with its key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(f"{key}[{index}]", inner)
    else:
        yield key, value


def trackers(config: Config) -> Iterator[str]:
    """Trackers can be told, and no secret is a setting: settings are written to files."""
    settings = config.tracking
    for key in ("project", "entity"):
        name = getattr(settings.wandb, key)
        if name is not None and (not name.strip() or re.search(r"[/\\#?%:\r\n]", name)):
            yield f"tracking.wandb.{key}={name} is no name for W&B: it may not be empty or contain / \\ # ? % :"
        if name is not None and len(name) > LONGEST_WANDB_NAME:
            yield f"tracking.wandb.{key} has {len(name)} characters; W&B takes {LONGEST_WANDB_NAME}."
    if settings.wandb.enabled and settings.wandb.mode is None:
        yield from _wandb_environment()
    uri, named = settings.mlflow.tracking_uri, "tracking.mlflow.tracking_uri"
    given = os.environ.get("MLFLOW_TRACKING_URI") if uri is None and settings.mlflow.enabled else None
    if given and (wrong := mlflow_address("MLFLOW_TRACKING_URI", given)):
        yield wrong
    if uri is not None and re.match(r"\w+(\+\w+)?://[^/@]*:[^/@]*@", uri):
        yield (
            "tracking.mlflow.tracking_uri has a password in it, and settings are written to files. Leave it out and set "
            "MLFLOW_TRACKING_URI (or _USERNAME and _PASSWORD) in the environment or in .env."
        )
    elif uri is not None and (wrong := mlflow_address(named, uri)):
        yield wrong
    if not settings.mlflow.experiment_name.strip():
        yield "tracking.mlflow.experiment_name is empty."
    if (length := len(settings.mlflow.experiment_name)) > LONGEST_EXPERIMENT:
        yield f"tracking.mlflow.experiment_name has {length} characters; MLflow takes {LONGEST_EXPERIMENT}."
    if settings.watch is not None and config.scaling.strategy == "fsdp2":
        yield f"tracking.watch={settings.watch}: with scaling.strategy=fsdp2 no rank has whole parameters. Set it to null."
    known = settings.watch in CHOICES["tracking.watch"]
    if known and not (settings.wandb.enabled or settings.tensorboard.enabled):
        yield f"tracking.watch={settings.watch} is shown by W&B and TensorBoard: add tracking=wandb or tracking=tensorboard."


def _wandb_environment() -> Iterator[str]:
    """What W&B reads there, where no setting says otherwise."""
    mode, modes, key = os.environ.get("WANDB_MODE"), CHOICES["tracking.wandb.mode"], os.environ.get("WANDB_API_KEY")
    if mode and mode not in modes:
        yield f"WANDB_MODE={mode} of the environment must be one of {', '.join(modes)}."
    elif key and len(key) < SHORTEST_WANDB_KEY and mode in (None, "", "online"):
        yield (
            f"WANDB_API_KEY of the environment is no key: it has {len(key)} characters, a key has {SHORTEST_WANDB_KEY} or "
            "more. Without one: tracking.wandb.mode=offline"
        )


def mlflow_address(name: str, uri: str) -> str | None:
    """Why this is no address of MLflow, if it is none."""
    from manta.tracking import without_secrets  # only with an address

    shown = without_secrets(uri)
    if not re.match(r"(https?|sqlite|postgresql|mysql|mssql|databricks)(\+\w+)?(:|$)", uri):
        return (
            f"{name}={shown} is no address of MLflow: http://host:port of a server, or "
            "sqlite:////absolute/file.db (it keeps no plain folders any more)."
        )
    try:
        parts = urlsplit(uri)
        if parts.scheme in ("http", "https") and not parts.hostname:
            return f"{name}={shown} names no host: http://host:port of a server."
        _ = parts.port
    except ValueError as error:
        return f"{name}={shown} is no address of MLflow, http://host:port of a server: {error}"
    return None


CLUSTER_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (finite, numbers, choices, cluster, *outside.RULES)
RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    *(*CLUSTER_RULES, names, plug_ins, objective, length),
    *(batches, workers, resources, half_precision, folders, trackers, *search.RULES),
)
