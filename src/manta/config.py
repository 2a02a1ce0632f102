"""The typed schema of everything under conf/: one dataclass a group; a field's docstring is its help text.

Hydra composes YAML and the command line into this schema, so an unknown key or a wrong type fails before
anything heavy is imported. Inside the code there are only these plain objects, never a DictConfig.
"""

import copy
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from manta.errors import MantaError, suggest
from manta.schema import expected, missing_keys, paths_of, unknown_keys

SCHEMA_VERSION = 1
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
STRATEGIES = ("ddp", "fsdp2")
CLUSTER_KINDS = ("local", "existing", "job", "slurm", "kuberay", "cloud")


@dataclass
class Objective:
    """What "better" means: used by best-checkpoint choice, early stopping, plateau schedules, searches and reports."""

    metric: str = "val/accuracy"
    """A metric the recipe reports after each validation (see `recipe.metrics`)."""
    mode: str = "max"
    """`max` or `min`."""


@dataclass
class Transforms:
    """Batch transforms, applied in order; each is a `_target_` with its arguments (e.g. torchvision.transforms.v2)."""

    train: list[dict[str, Any]] = field(default_factory=list)
    """Applied to training batches only (augmentation)."""
    eval: list[dict[str, Any]] = field(default_factory=list)
    """Applied to validation and test batches."""


@dataclass
class Data:
    """Which samples, how they are split, and how large a batch is."""

    name: str = MISSING
    """Short name, shown in the plan and used as the folder under `data.root`."""
    dataset: dict[str, Any] = field(default_factory=dict)
    """The plug-in: `_target_` of a function that returns `manta.data.Splits`, and its arguments."""
    input_shape: list[int] = MISSING
    """Shape of one sample, channels first, e.g. [1, 8, 8]. Models take their input size from it."""
    input_dtype: str = "float"
    """What a model gets: float (in `training.precision`), or int64 (token ids)."""
    num_classes: int = MISSING
    """Number of classes; of tokens in the vocabulary; for regression of numbers to predict. Models take their output size
    from it."""
    target_mean: float = 0.0
    """For regression: mean of the training targets. The model learns targets scaled to mean 0 and deviation 1."""
    target_std: float = 1.0
    """For regression: standard deviation of the training targets."""
    root: str = "data"
    """Folder of downloaded data; a relative path is relative to where the command was typed."""
    download: bool = True
    """Fetch what is missing under `root` (once a node, under a file lock)."""
    batch_size: int = 64
    """The GLOBAL batch: samples per optimizer step over all workers. Changing `scaling` does not change it."""
    micro_batch_size: int | str | None = None
    """Samples per worker per forward pass; null = the worker's whole share. Smaller values accumulate gradients; auto = the
    largest that fits into memory, found by halving before training starts."""
    eval_batch_size: int | None = None
    """Samples per worker per forward pass in evaluation; null = the largest training share."""
    engine: str = "torch"
    """torch, or ray: data sets that can be streamed (data=table, or a `manta.data.stream.Stream` of your own) are read by Ray Data
    while they are used, in tasks anywhere on the cluster."""
    num_workers: int = 0
    """DataLoader processes per training worker, for data sets that are not held in memory."""
    prefetch_factor: int = 4
    """Batches each DataLoader process prepares ahead."""
    val_fraction: float = 0.1
    """Share of the training set carved off for validation where a data set has no validation split."""
    split_seed: int = 0
    """Seed of that split; kept apart from `seed` so that runs with different seeds share their splits."""
    transforms: Transforms = field(default_factory=Transforms)
    """Batch transforms of each split."""


@dataclass
class Recipe:
    """The training function, what it is trained for and what it reports."""

    _target_: str = MISSING
    """A class with the `manta.recipes.Recipe` interface."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of that class: what this recipe alone knows."""
    task: dict[str, Any] = field(default_factory=dict)
    """`_target_` of a `manta.training.tasks.Task` and its arguments: loss, metrics and predictions."""
    metrics: list[str] = field(default_factory=list)
    """What the recipe reports after each validation; `objective.metric` must be one of them."""


@dataclass
class Ema:
    """Exponential moving average of the weights; validation, test and `best` use it when it is on."""

    enabled: bool = False
    """Keep the average."""
    decay: float = 0.999
    """Per optimizer step."""


@dataclass
class EarlyStopping:
    """Stop when the objective has not improved."""

    patience: int | None = None
    """Validations without improvement before stopping; null = never."""
    min_delta: float = 0.0
    """An improvement smaller than this does not count."""


@dataclass
class Checkpointing:
    """When checkpoints are written and which are kept. `last` and `best` always exist."""

    every_n_steps: int | None = None
    """Also write one every so many optimizer steps."""
    every_s: float | None = None
    """Also write one when so many seconds have passed since the last."""
    every_n_epochs: int = 1
    """Write one after every so many epochs; 0 = only at the end."""
    keep: int = 1
    """How many of the newest are kept beside `best`."""
    asynchronous: bool = True
    """Write in a background thread; training only waits for the copy to host memory."""


@dataclass
class Training:
    """The loop."""

    epochs: int | None = 15
    """Passes over the training set; null = until `max_steps`."""
    max_steps: int | None = None
    """Optimizer steps at most; null = no limit."""
    precision: str = "fp32"
    """fp32, bf16 or fp16 (autocast), fp64 (whole model in double)."""
    grad_clip_norm: float | None = None
    """Clip the gradient's global L2 norm to this; null = off."""
    label_smoothing: float = 0.0
    """Label smoothing of the training loss."""
    ema: Ema = field(default_factory=Ema)
    """Average of the weights over time."""
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    """When to stop before the end."""
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    """When checkpoints are written and which are kept."""
    compile: bool = False
    """torch.compile the model."""
    deterministic: bool = False
    """Only deterministic kernels (slower on GPUs; on CPUs results repeat bit for bit anyway)."""
    nonfinite_guard: bool = True
    """Stop with a clear error before an optimizer step would use a loss or gradient that is NaN or infinite."""
    log_every_n_steps: int = 10
    """Steps between `train/*` lines in metrics.jsonl."""
    val_every_n_epochs: int = 1
    """Epochs between validations (the last epoch is always validated)."""
    limit_train_batches: int | None = None
    """Steps per epoch at most (debugging); null = all."""
    limit_eval_batches: int | None = None
    """Evaluation batches at most (debugging); null = all."""
    overfit_batches: int | None = None
    """Train on only the first so many global batches, again and again, unshuffled (debugging); null = off."""
    test: bool = True
    """After training, evaluate the best checkpoint once on the test split."""
    peak_flops: float | None = None
    """FLOP/s that one device can do at best, for the MFU that is reported; null = known for common GPUs, else no MFU."""
    profile: bool = False
    """Write a torch profiler trace of a few steps of rank 0 to the run directory."""


@dataclass
class Scaling:
    """How many workers and what each gets. The names are Ray's `ScalingConfig`'s."""

    num_workers: int | str | None = "auto"
    """Training workers; 0 = in this process, without Ray; auto = one per GPU, else one on CPU."""
    max_workers: int | None = None
    """With a number here the run is elastic between `num_workers` and this (Ray's `num_workers=(min, max)`)."""
    elastic_resize_monitor_interval_s: float = 60.0
    """For an elastic run: seconds between looks at whether nodes have come that it could grow to."""
    use_gpu: bool | None = None
    """One GPU per worker; null = if there are any."""
    resources_per_worker: dict[str, float | None] = field(default_factory=lambda: {"CPU": None, "GPU": None})
    """Null: one GPU if GPUs are used; an even share of the CPUs, on a cluster of others one (or those that belong to the
    GPU). Others are added: +scaling.resources_per_worker.X=1"""
    placement_strategy: str = "PACK"
    """Ray's: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD."""
    accelerator_type: str | None = None
    """E.g. H100; see ray.util.accelerators."""
    label_selector: dict[str, str] = field(default_factory=dict)
    """Ray's: labels of nodes that may get a worker, e.g. {region: us-west, ray.io/market-type: "!spot"}; also in(a, b) and
    !in(a, b). Labels are given to `ray start --labels`."""
    strategy: str = "ddp"
    """ddp, or fsdp2 for models that do not fit on one device."""
    max_failures: int = 0
    """How often the workers are started again, from the last checkpoint, when one of them failed, died or got stuck; -1 =
    without end. 0 on one machine, where what failed once mostly fails again; 3 with multi_node and elastic."""
    max_preemption_failures: int = -1
    """The same for nodes that were taken away with notice, which do not count as failures; -1 = without end."""
    controller_failure_limit: int | None = None
    """How often a group of workers that cannot start is tried again; -1 = without end; null = 3, without end if the run is
    elastic, which waits for nodes."""
    timeout_s: float | None = 1800.0
    """Seconds without progress (a batch, a step, an evaluated batch) before training counts as stuck: the rank to blame is
    named and the workers are started again (`max_failures`) or the run fails; null = wait for ever. The first step, which
    may compile, has 300 s in any case."""


@dataclass
class Slurm:
    """A job of SLURM. The names are sbatch's; what is null is left to the site."""

    job_name: str | None = None
    """Null = the run's `name`, else manta."""
    partition: str | None = None
    """Where to queue."""
    account: str | None = None
    """Who pays."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have."""
    time: str | None = None
    """Time limit: hours:minutes:seconds or days-hours:minutes:seconds; in a file in quotes. Null = the partition's."""
    nodes: int = 1
    """Machines. With more than one, a Ray of this job alone runs over all of them."""
    cpus_per_task: int | None = None
    """CPUs of each node; null = as many as its workers on CPU ask for; with GPUs what the site gives."""
    gpus_per_node: str | None = None
    """GPUs of each node: a number, or type:number."""
    mem: str | None = None
    """Memory of each node, e.g. 64G."""
    directives: list[str] = field(default_factory=list)
    """Any other options of sbatch: ["--exclusive", "--mail-type=END"]."""
    modules: list[str] = field(default_factory=list)
    """Loaded in the job, `module load`."""
    setup: list[str] = field(default_factory=list)
    """Lines of bash before training, e.g. "source env/bin/activate". They are written to the job's file: no secrets."""
    python: str | None = None
    """Interpreter in the job; null = the one of this command, by its path; python = what `modules` and `setup` give."""
    signal_s: int = 120
    """Seconds before the time limit to write a checkpoint and requeue. SLURM may be up to 60 s early, not late."""
    requeue: bool = True
    """Put the job back into the queue at its time limit and when SLURM loses a node: it then resumes its run."""
    max_requeues: int = 100
    """How often a job requeues itself at most."""
    max_array_tasks: int | None = None
    """Of a multirun, which is one array: jobs at once at most; null = as many as SLURM allows."""
    submit: bool = True
    """False = only write the job's file."""


@dataclass
class Kuberay:
    """A RayJob of KubeRay, on Kubernetes. The names are theirs."""

    submit: bool = True
    """Hand it to Kubernetes, if there is a kubectl; false = only write the file."""
    namespace: str | None = None
    """Null = the one that kubectl is set to."""
    image: str | None = None
    """Needed: an image with Manta's packages, and with its code unless `working_dir` is an address; see
    scripts/kuberay/Dockerfile."""
    image_pull_policy: str | None = None
    """Always, IfNotPresent or Never; null = Kubernetes' default."""
    image_pull_secrets: list[str] = field(default_factory=list)
    """Names of the secrets that the registry asks for."""
    ray_version: str | None = None
    """Ray of the image; null = the one installed here."""
    working_dir: str = "/manta"
    """Folder of the image that has train.py, or https://, s3:// or gs:// address of a zip of the code, which each Pod gets."""
    claim_name: str | None = None
    """PersistentVolumeClaim that all Pods mount (ReadWriteMany), for results and data; not needed with a bucket."""
    mount_path: str = "/shared"
    """Where it is mounted: `storage.path` and `data.root` are below."""
    service_account: str | None = None
    """Of the Pods; null = the namespace's default."""
    head_cpu: int = 2
    """CPUs of the head Pod, where the command runs, and training too if there are no worker Pods."""
    head_memory: str = "8Gi"
    """Memory of the head Pod."""
    head_gpu: int = 0
    """GPUs of the head Pod: for a bucket or `scaling.num_workers=0`, where everything runs there."""
    worker_cpu: int = 4
    """CPUs of a worker Pod."""
    worker_memory: str = "16Gi"
    """Memory of a worker Pod."""
    worker_gpu: int | None = None
    """GPUs of a worker Pod; null = what one training worker takes."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the device plugin calls them."""
    shared_memory: str = "4Gi"
    """Size of /dev/shm, for Ray's object store and loader workers; counts as memory of the Pod."""
    replicas: int | None = None
    """Worker Pods; null = as many as `scaling.num_workers` needs (auto: one). A search may want more."""
    max_replicas: int | None = None
    """Worker Pods when Ray's autoscaler adds some; null = what `scaling.max_workers` needs, else none are added."""
    idle_timeout_seconds: int = 60
    """With an autoscaler: an added Pod goes after so long without work."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels of the nodes for worker Pods."""
    head_node_selector: dict[str, str] = field(default_factory=dict)
    """Labels of the nodes for the head Pod."""
    tolerations: list[dict[str, Any]] = field(default_factory=list)
    """Taints that all Pods accept, e.g. [{key: nvidia.com/gpu, operator: Exists}]."""
    labels: dict[str, str] = field(default_factory=dict)
    """Of the RayJob and its Pods."""
    annotations: dict[str, str] = field(default_factory=dict)
    """Of the RayJob and its Pods."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of all Pods; no secrets, for it is written to a file."""
    env_from_secrets: list[str] = field(default_factory=list)
    """Names of Kubernetes secrets; what they hold is in the environment of all Pods (WANDB_API_KEY and so on)."""
    shutdown_after_job_finishes: bool = True
    """Delete the Pods at the end; false = they stay until `kubectl delete`."""
    ttl_seconds_after_finished: int = 600
    """How long after the end."""
    active_deadline_seconds: int | None = None
    """Give up after so long; null = never."""
    backoff_limit: int = 0
    """How often a failed job is started again, with new Pods and from the beginning (what went on before: `resume=`)."""


@dataclass
class Cloud:
    """Machines that Ray's cluster launcher (`ray up`) rents. Files are written, nothing is rented before `make up`."""

    cluster_name: str = "manta"
    """Names the cluster, and the folder of its files."""
    provider: str = "aws"
    """aws or gcp."""
    region: str | None = None
    """Needed, e.g. us-west-2 or us-west1."""
    availability_zone: str | None = None
    """E.g. us-west-2a or us-west1-b. For aws several with commas, null = any; needed by gcp."""
    project_id: str | None = None
    """Needed by gcp."""
    image: str | None = None
    """Needed: for aws an ami-..., for gcp projects/.../images/...; Ubuntu or Debian, with drivers if there are GPUs."""
    docker_image: str | None = None
    """Run everything in a container of this image; null = on the machine itself."""
    ssh_user: str = "ubuntu"
    """Who logs in."""
    ssh_private_key: str | None = None
    """File of this machine; null = Ray makes a key."""
    key_name: str | None = None
    """For aws: the key pair that belongs to `ssh_private_key`."""
    iam_instance_profile: str | None = None
    """For aws: name of the instance profile of all machines; null = Ray makes one for the head, workers have none."""
    service_account: str | None = None
    """For gcp: e-mail of the service account of the workers; null = none. The head has one that Ray makes."""
    security_group_ids: list[str] = field(default_factory=list)
    """For aws; none = Ray makes one that lets in ssh only."""
    subnet_ids: list[str] = field(default_factory=list)
    """For aws; none = the default ones."""
    head_instance_type: str | None = None
    """Needed: m5.xlarge, n2-standard-4, ... The command runs there."""
    head_cpus: int = 0
    """CPUs of the head that training may use: for a bucket or `scaling.num_workers=0`, where everything runs there."""
    head_gpus: int = 0
    """GPUs of the head that training may use."""
    worker_instance_type: str | None = None
    """Needed, unless everything runs on the head: g5.xlarge, g2-standard-4, ..."""
    worker_cpus: int = 4
    """CPUs that such a machine has."""
    worker_gpus: int = 0
    """GPUs that such a machine has."""
    accelerator_type: str | None = None
    """For gcp, types that come without GPUs (n1-...): which to add, e.g. nvidia-tesla-t4."""
    use_spot: bool = True
    """Workers are spot (preemptible) machines: cheap, and may be taken away. The head never is."""
    min_workers: int | None = None
    """Workers that there always are; null = as many as `scaling.num_workers` needs (auto: one). A search may want more."""
    max_workers: int | None = None
    """Workers when the autoscaler adds some; null = what `scaling.max_workers` needs, else none are added."""
    idle_timeout_minutes: float = 10.0
    """An added machine goes after so long without work."""
    disk_gb: int = 200
    """Disk of each machine."""
    mount_command: str | None = None
    """Mounts the shared file system on each machine, e.g. `sudo mount -t nfs4 fs-1.efs.us-west-2.amazonaws.com:/ /shared`;
    not needed with a bucket."""
    mount_path: str = "/shared"
    """Where it is then: `storage.path` and `data.root` are below."""
    file_mounts: dict[str, str] = field(default_factory=dict)
    """More that is copied to each machine, e.g. {/home/ubuntu/lists: /here/lists}; the code always is, to ~/manta."""
    setup_commands: list[str] = field(
        default_factory=lambda: [
            "test -e ~/venv || python3 -m venv ~/venv || (sudo apt-get update && sudo apt-get install -y python3-venv && "
            "python3 -m venv ~/venv)",
            "grep -qs /venv/bin: ~/.bashrc || echo 'export PATH=$HOME/venv/bin:$PATH' >> ~/.bashrc",
            "~/venv/bin/pip install -r ~/manta/requirements.lock && ~/venv/bin/pip install --no-deps -e ~/manta",
        ]
    )
    """Run on each machine, in a shell with its ~/.bashrc, before Ray starts: afterwards `ray` and `python` are Manta's."""


@dataclass
class Cluster:
    """Where Ray comes from."""

    kind: str = "local"
    """local = our own Ray on this machine; existing = join the one at `address`; job, slurm, kuberay and cloud = the command
    goes there, and runs there."""
    address: str | None = None
    """For existing: `auto` or host:port. For job: http://host:8265, the cluster's dashboard."""
    num_cpus: int | None = None
    """For local and slurm: CPUs Ray may hand out on a node; null = the machine's, or what SLURM gives."""
    num_gpus: int | None = None
    """For local and slurm: GPUs likewise; where there are none, some may be declared (a rehearsal)."""
    object_store_memory: int | None = 200_000_000
    """For local: bytes of shared memory for Ray's object store; null = Ray's default (30 % of memory)."""
    wait_s: float = 600.0
    """How long a launch waits for busy resources, or for `min_nodes`, before it gives up."""
    min_nodes: int | None = None
    """For existing: wait until the cluster has so many nodes, as one that is still growing; null = those that there are."""
    env_vars: list[str] = field(default_factory=list)
    """For existing: names of environment variables of this command that every worker gets, whatever its node has. Those of
    NCCL, Gloo, torch, W&B, MLflow, Hugging Face and AWS reach workers anyway where the node has none."""
    stop_on_interrupt: bool = False
    """For what runs elsewhere: Ctrl-C stops it there; false = the command here ends, and says how to follow and stop it."""
    slurm: Slurm = field(default_factory=Slurm)
    """For cluster=slurm."""
    kuberay: Kuberay = field(default_factory=Kuberay)
    """For cluster=kuberay."""
    cloud: Cloud = field(default_factory=Cloud)
    """For cluster=cloud."""


@dataclass
class Search:
    """Many runs, called trials, instead of one; algorithm and scheduler combine freely."""

    algorithm: dict[str, Any] = field(default_factory=dict)
    """Who chooses the values of a trial: `name` and its arguments (`search/algorithm=optuna`); empty = no search."""
    scheduler: dict[str, Any] = field(default_factory=dict)
    """Who stops bad trials early: `name` and its arguments (`search/scheduler=asha`); empty = nobody."""
    space: dict[str, Any] = field(default_factory=dict)
    """What is searched, laid out as the configuration; a leaf is a domain of ray.tune written as a call, e.g.
    `loguniform(1e-4, 1e-1)`; null = not searched."""
    num_samples: int | None = 20
    """Trials; null = until `time_budget_s` (a grid has as many as it has points)."""
    time_budget_s: float | None = None
    """Seconds after which this launch stops its trials; what they found is then refitted as ever; null = no limit."""
    max_concurrent_trials: int | None = None
    """Trials at once at most; null = as many as the resources hold."""
    points_to_evaluate: list[dict[str, Any]] = field(default_factory=list)
    """Values to try first, each laid out as `space`; what one leaves out is sampled."""
    seed: int = 0
    """Seeds the search itself: two searches with one seed sample the same values."""
    max_failures: int = 0
    """How often a failed trial is tried again, from its last checkpoint."""
    refit: bool = True
    """At the end, train the best configuration with `refit_seeds` fresh seeds and evaluate each once on test."""
    refit_seeds: int = 3
    """How many; they follow `seed`."""
    report: bool = True
    """At the end, make report.html (2 to 3 seconds); `scripts/report.py` makes it at any time."""


@dataclass
class Wandb:
    """Weights & Biases. The key comes from WANDB_API_KEY (environment or .env) or `wandb login`."""

    enabled: bool = False
    """Track with it (`tracking=wandb`)."""
    project: str = "manta"
    """Project that runs go to."""
    entity: str | None = None
    """User or team; null = the key's own."""
    mode: str | None = None
    """online, offline or disabled; null = WANDB_MODE, else online with a key and offline without."""
    job_type: str | None = None
    """Null = train, trial or search."""
    notes: str | None = None
    """Longer words about the run."""
    save_checkpoint: bool = False
    """Upload the best checkpoint as an artifact at the end."""


@dataclass
class Mlflow:
    """MLflow. Tokens and passwords come from MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD (environment or .env)."""

    enabled: bool = False
    """Track with it (`tracking=mlflow`)."""
    tracking_uri: str | None = None
    """http://host:port of a server, or sqlite:///file; null = MLFLOW_TRACKING_URI, else mlflow.db under `storage.path`."""
    experiment_name: str = "manta"
    """Experiment that runs go to; made if it is not there."""
    log_model: bool = True
    """At the end, log the best model with its signature (not of a search's trials, but of its best)."""
    save_checkpoint: bool = False
    """Upload the best checkpoint as an artifact at the end."""


@dataclass
class Tensorboard:
    """TensorBoard files in the run directory: `tensorboard --logdir outputs`."""

    enabled: bool = False
    """Track with it (`tracking=tensorboard`)."""


@dataclass
class Csv:
    """metrics.csv in the run directory, one row a report."""

    enabled: bool = False
    """Write it (`tracking=csv`)."""


@dataclass
class Tracking:
    """Trackers beside the run directory, which always has everything; they combine: `tracking=[wandb,mlflow]`."""

    wandb: Wandb = field(default_factory=Wandb)
    """Weights & Biases."""
    mlflow: Mlflow = field(default_factory=Mlflow)
    """MLflow."""
    tensorboard: Tensorboard = field(default_factory=Tensorboard)
    """TensorBoard."""
    csv: Csv = field(default_factory=Csv)
    """A table."""
    watch: str | None = None
    """Histograms for W&B and TensorBoard, with every train line: gradients, parameters or all; null = none."""
    finish_s: float = 20.0
    """Seconds that the end of a run waits at most for a tracker that is slow or away; `scripts/runs.py sync` tells it the
    rest later."""


@dataclass
class Storage:
    """Where results go."""

    path: str = "outputs"
    """Run directories are created under it. A folder (on several nodes one that all of them share), or s3://bucket/folder."""
    endpoint_url: str | None = None
    """For s3://: http://host:port of the server; null = AWS_ENDPOINT_URL, else Amazon's. Keys come from the environment,
    .env or the usual places of AWS, never from a setting."""
    cache: str = "outputs/s3"
    """For s3://: folder of this machine where the runs of the bucket live while they train; the bucket follows."""
    finish_s: float = 600.0
    """For s3://: seconds that the end of a run waits at most, without getting ahead, for what is not in the bucket yet;
    `scripts/runs.py upload` takes it there later."""

    @property
    def is_remote(self) -> bool:
        return "://" in self.path

    @property
    def folder(self) -> Path:
        """Where run directories are on this machine."""
        return Path(self.cache, self.path.removeprefix("s3://")) if self.is_remote else Path(self.path)


@dataclass
class Config:
    """One run."""

    schema_version: int = SCHEMA_VERSION
    """Version of this schema, stored with every run; not a setting."""
    name: str | None = None
    """Appended to the run directory's name."""
    tags: list[str] = field(default_factory=list)
    """Free labels to find runs by."""
    group: str | None = None
    """Name that runs share which belong together; null = that of the multirun, if they are its jobs."""
    seed: int = 0
    """Seeds weights, sample order and every random generator of every rank."""
    resume: str | None = None
    """`latest` or a run directory: continue that run from its last checkpoint with its own saved configuration. The folder of
    a multirun: run those of its jobs that are missing or failed, continue those that were interrupted."""
    plan: bool = False
    """Print the plan and stop."""
    traceback: bool = False
    """Show Python tracebacks with errors."""
    allowed_targets: list[str] = field(default_factory=lambda: ["manta", "torch", "torchvision", "lightning"])
    """Packages that a `_target_` may come from. Of `manta`: data, models, recipes, training; of `torch`: nn, optim; of
    `torchvision`: models, ops, transforms; of `lightning`: pytorch.callbacks. What a run's directory says of other installed packages is not believed: name
    them in conf/config.yaml for good, else on resume again, and for scripts in the environment (MANTA_ALLOWED_TARGETS=a,b)."""
    objective: Objective = field(default_factory=Objective)
    """What better means."""
    model: dict[str, Any] = field(default_factory=dict)
    """The plug-in: `_target_` of a torch.nn.Module (or function returning one) and its arguments."""
    data: Data = field(default_factory=Data)
    """Samples, splits and batches."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """The plug-in: `_target_` called with the parameters first, and its arguments."""
    scheduler: dict[str, Any] = field(default_factory=dict)
    """The plug-in: `_target_` called with the optimizer first; `unit` (step, epoch, validation) says when it steps."""
    recipe: Recipe = field(default_factory=Recipe)
    """The training function."""
    training: Training = field(default_factory=Training)
    """The loop."""
    scaling: Scaling = field(default_factory=Scaling)
    """Workers and their resources."""
    cluster: Cluster = field(default_factory=Cluster)
    """Where Ray comes from."""
    search: Search = field(default_factory=Search)
    """Many runs instead of one."""
    tracking: Tracking = field(default_factory=Tracking)
    """Trackers beside the run directory."""
    storage: Storage = field(default_factory=Storage)
    """Where results go."""


def register() -> None:
    """Make the schema known to Hydra; conf/config.yaml names it first in its defaults list.

    The resolver `folder` is where results of a `storage.path` are on this machine.
    """
    OmegaConf.register_new_resolver("folder", lambda path, cache: str(Storage(path, cache=cache).folder), replace=True)
    ConfigStore.instance().store(name="schema", node=Config)


def from_hydra(cfg: DictConfig) -> Config:
    """The composed configuration as plain typed objects: interpolations resolved, paths absolute.

    Relative paths are relative to the directory where the command was typed; `~` is expanded; URLs stay.

    Raises:
        MantaError: an unknown setting (`+key=` adds one without complaint), a missing value or a broken interpolation.
    """
    for key, value in unknown_keys(cfg, Config):
        if key.split(".")[0] in ("local", "experiment", "debug"):
            raise MantaError(
                f"conf/{key.split('.')[0]}/: a file there must begin with the line `# @package _global_`, so that its settings "
                "are those of the run."
            )
        found = suggest(key, [name for name in paths_of(cfg) if name != key])
        raise MantaError(f"{key}={value} is not a setting." + (f" Did you mean {found} (without +)?" if found else ""))
    missing = missing_keys(cfg)
    if missing:
        wanted = [f"{key}=??? is to be set, {expected(Config, key) or 'it has no default'}" for key in missing]
        raise MantaError(f"{'; '.join(wanted)}.")
    cfg = copy.deepcopy(cfg)
    try:
        # Before anything is resolved: a plug-in's `root: ${data.root}` must become absolute too.
        cfg.data.root = absolute(cfg.data.root)
        cfg.storage.path, cfg.storage.cache = absolute(cfg.storage.path), absolute(cfg.storage.cache)
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise MantaError(_broken(error, cfg)) from error
    assert isinstance(config, Config)
    for key, value in _mistyped(config):
        raise MantaError(f"{key}={value} has the wrong type: {key} must be {expected(Config, key)}.")
    return config


def _mistyped(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Groups of settings that are something else, and lists and dictionaries with others in them: OmegaConf lets them through."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if is_dataclass(hint) and not isinstance(value, cast(type, hint)):
            yield f"{prefix}{name}", value
        elif is_dataclass(hint):
            yield from _mistyped(value, f"{prefix}{name}.")
        elif get_origin(hint) is list and any(type(item) is dict for item in value) and get_args(hint)[0] in (str, int):
            yield f"{prefix}{name}", value
        elif get_origin(hint) is dict and get_args(hint)[1] is not Any:
            yield from ((f"{prefix}{name}", value) for item in value.values() if isinstance(item, list | dict))


def absolute(path: str) -> str:
    """An absolute path, `~` expanded; a URL, and nothing, stay as they are."""
    stays = not path or re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path)
    return path if stays else os.path.abspath(Path(path).expanduser())


def _broken(error: OmegaConfBaseException, cfg: DictConfig) -> str:
    """A value that cannot be resolved, in our words."""
    key = str(error.full_key)
    reason = str(error).splitlines()[0]
    start = f"{key} cannot be resolved"
    if isinstance(error, InterpolationKeyError):
        wanted = reason.split("'")[1]
        found = suggest(wanted, paths_of(cfg))
        return f"{start}: ${{{wanted}}} does not exist." + (f" Did you mean ${{{found}}}?" if found else "")
    if "Environment variable" in reason:
        variable = reason.split("'")[1]
        return f"{start}: the environment variable {variable} is not set. Export it, or write {variable}=... into .env."
    return f"{start}: {reason}."
