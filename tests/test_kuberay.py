"""The RayJob: what Kubernetes would say to it, that every setting is in it, and how it is handed over."""

import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from manta.checks import check_cluster
from manta.cluster import kuberay
from manta.cluster.elsewhere import Request, submit
from manta.config import Kuberay
from manta.errors import MantaError
from tests.conftest import ROOT, Lab, make_config
from tests.rendered import ODD, VALUE, at, clusters, names, read_calls, recorder, request

__all__ = ["clusters"]

SCHEMAS = Path(__file__).parent / "data" / "kuberay"  # of KubeRay 1.7.0, without fields that are never written
NEEDED = ("cluster=kuberay", "cluster.kuberay.image=registry/manta:1", "cluster.kuberay.claim_name=results")
GPUS = ("scaling=multi_gpu", "scaling.num_workers=4")
BUCKET = ("cluster=kuberay", "cluster.kuberay.image=registry/manta:1", "storage.path=s3://bucket/runs")
ELASTIC = ("scaling.num_workers=2", "scaling.max_workers=9", "data.batch_size=64")

SPEC = "spec/rayClusterSpec"
WORKERS = f"{SPEC}/workerGroupSpecs/0"
HEAD, WORKER = f"{SPEC}/headGroupSpec/template", f"{WORKERS}/template"


def closed(schema: Any) -> Any:
    """The schema, taking no field that it does not name; Kubernetes would drop such a one."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **inner} if isinstance(schema.get("properties"), dict) else inner


RAYJOB, RAYCLUSTER = (
    jsonschema.Draft202012Validator(closed(json.loads((SCHEMAS / f"{kind}.v1.schema.json").read_text())))
    for kind in ("rayjob", "raycluster")
)


def rendered(given: Request) -> dict[str, Any]:
    """The manifest as it is in the file, refused as Kubernetes and KubeRay would refuse it."""
    text = kuberay.as_yaml(kuberay.rayjob(given, kuberay._name(given.config), kuberay._pods(given.config)))
    manifest = yaml.safe_load(text)
    assert "*id" not in text, "an alias of YAML"
    RAYJOB.validate(manifest)
    cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": manifest["metadata"]}
    RAYCLUSTER.validate({**cluster, "spec": manifest["spec"]["rayClusterSpec"]})
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    assert set(manifest["metadata"]) <= {"name", "namespace", "labels", "annotations"}
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", manifest["metadata"]["name"])  # KubeRay's own rule
    return manifest


@pytest.mark.parametrize(
    "overrides",
    [NEEDED, (*NEEDED, *GPUS), (*NEEDED, *ELASTIC), (*NEEDED, *ODD), BUCKET, (*NEEDED, "scaling=in_process")],
    ids=["least", "gpus", "elastic", "odd", "bucket", "in process"],
)
def test_kubernetes_takes_it(overrides: tuple[str, ...]) -> None:
    rendered(request(*overrides))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/entryPoint", "x"),
        (f"{HEAD}/spec/containers/0/comand", ["x"]),
        (f"{WORKERS}/replicas", "two"),
        (f"{WORKER}/spec/volumes/0/emptyDir", {"size": "1Gi"}),
        (f"{WORKER}/spec/containers/0/resources/limits", {"memory": "many"}),
    ],
)
def test_the_schemas_say_no(path: str, value: Any) -> None:
    """Else the other tests say nothing."""
    manifest = rendered(request(*NEEDED))
    parent, _, key = path.rpartition("/")
    at(manifest, parent)[key] = value
    with pytest.raises(jsonschema.ValidationError):
        RAYJOB.validate(manifest)


def pods(path: str) -> list[str]:
    """The same in both kinds of Pod."""
    return [f"{HEAD}/{path}", f"{WORKER}/{path}"]


def everywhere(path: str) -> list[str]:
    return [f"metadata/{path}", *pods(f"metadata/{path}")]


def amounts(pod: str, resource: str) -> list[str]:
    return [f"{pod}/spec/containers/0/resources/{kind}/{resource}" for kind in ("requests", "limits")]


# Setting: what is typed, where it shows, and as what.
SETTINGS: dict[str, tuple[str, list[str], Any]] = {
    "namespace": ("lab", ["metadata/namespace"], "lab"),
    "image": ("other:2", pods("spec/containers/0/image"), "other:2"),
    "image_pull_policy": ("Always", pods("spec/containers/0/imagePullPolicy"), "Always"),
    "image_pull_secrets": ("[registry]", pods("spec/imagePullSecrets"), [{"name": "registry"}]),
    "ray_version": ("2.99.0", [f"{SPEC}/rayVersion"], "2.99.0"),
    "working_dir": (
        "https://host/code.zip",
        ["spec/runtimeEnvYAML"],
        "working_dir: https://host/code.zip\nenv_vars:\n  PYTHONPATH: src\n",
    ),
    "claim_name": ("other", pods("spec/volumes/1/persistentVolumeClaim/claimName"), "other"),
    "mount_path": ("/lasting", pods("spec/containers/0/volumeMounts/1/mountPath"), "/lasting"),
    "service_account": ("trainer", pods("spec/serviceAccountName"), "trainer"),
    "head_cpu": ("7", amounts(HEAD, "cpu"), "7"),
    "head_memory": ("9Gi", amounts(HEAD, "memory"), "9Gi"),
    "head_gpu": ("3", amounts(HEAD, "nvidia.com~gpu"), "3"),
    "worker_cpu": ("11", amounts(WORKER, "cpu"), "11"),
    "worker_memory": ("33Gi", amounts(WORKER, "memory"), "33Gi"),
    "worker_gpu": ("2", amounts(WORKER, "nvidia.com~gpu"), "2"),
    "gpu_resource": ("amd.com/gpu", amounts(WORKER, "amd.com~gpu"), "1"),
    "shared_memory": ("5Gi", pods("spec/volumes/0/emptyDir/sizeLimit"), "5Gi"),
    "replicas": ("5", [f"{WORKERS}/{key}" for key in ("replicas", "minReplicas")], 5),
    "max_replicas": ("8", [f"{WORKERS}/maxReplicas"], 8),
    "idle_timeout_seconds": ("77", [f"{SPEC}/autoscalerOptions/idleTimeoutSeconds"], 77),
    "node_selector": (
        "{cloud.google.com/gke-accelerator: nvidia-l4}",
        [f"{WORKER}/spec/nodeSelector"],
        {"cloud.google.com/gke-accelerator": "nvidia-l4"},
    ),
    "head_node_selector": ("{pool: cpu}", [f"{HEAD}/spec/nodeSelector"], {"pool": "cpu"}),
    "tolerations": (
        "[{key: nvidia.com/gpu, operator: Exists, tolerationSeconds: 5}]",
        pods("spec/tolerations"),
        [{"key": "nvidia.com/gpu", "operator": "Exists", "tolerationSeconds": 5}],
    ),
    "labels": ("{team: vision}", everywhere("labels/team"), "vision"),
    "annotations": ("{why: because}", everywhere("annotations"), {"why": "because"}),
    "env": ("{NCCL_DEBUG: INFO}", pods("spec/containers/0/env"), [{"name": "NCCL_DEBUG", "value": "INFO"}]),
    "env_from_secrets": (
        "[keys,more]",
        pods("spec/containers/0/envFrom"),
        [{"secretRef": {"name": "keys"}}, {"secretRef": {"name": "more"}}],
    ),
    "shutdown_after_job_finishes": ("false", ["spec/shutdownAfterJobFinishes"], False),
    "ttl_seconds_after_finished": ("99", ["spec/ttlSecondsAfterFinished"], 99),
    "active_deadline_seconds": ("3600", ["spec/activeDeadlineSeconds"], 3600),
    "backoff_limit": ("2", ["spec/backoffLimit"], 2),
}
ALSO = {
    "mount_path": ("storage.path=/lasting/outputs", "data.root=/lasting/data"),
    "idle_timeout_seconds": ("cluster.kuberay.max_replicas=9",),
    "shutdown_after_job_finishes": ("cluster.kuberay.ttl_seconds_after_finished=0",),
    "worker_gpu": GPUS,
    "gpu_resource": GPUS,
}
"""What else must be so."""


def test_every_setting_is_known() -> None:
    """A new one needs a row above; `submit` is tested below."""
    assert {*SETTINGS, "submit"} == names(Kuberay)


def typed(*some: str) -> list[str]:
    return [f"cluster.kuberay.{name}={SETTINGS[name][0]}" for name in some]


@cache
def before(*others: str) -> dict[str, Any]:
    return rendered(request(*NEEDED, *others))


@cache
def all_together() -> dict[str, Any]:
    return rendered(request(*NEEDED, *typed(*(name for name in SETTINGS if name not in ALSO))))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_shows(name: str) -> None:
    _, paths, expected = SETTINGS[name]
    others = ALSO.get(name, ())
    after = rendered(request(*NEEDED, *others, *typed(name))) if others else all_together()
    assert [at(after, path) for path in paths] == [expected] * len(paths)
    assert expected not in [at(before(*(() if name == "mount_path" else others)), path) for path in paths]


@pytest.mark.parametrize(
    ("overrides", "least", "most", "gpus"),
    [
        ((), 1, 1, None),
        (("scaling.num_workers=6",), 2, 2, None),  # a CPU each, 4 CPUs a Pod
        (("scaling.num_workers=2", "scaling.placement_strategy=STRICT_SPREAD"), 2, 2, None),
        (("scaling.num_workers=4", "scaling.placement_strategy=STRICT_PACK"), 1, 1, None),
        (("scaling.num_workers=6", "scaling.resources_per_worker.CPU=3"), 6, 6, None),
        (GPUS, 4, 4, "1"),
        ((*GPUS, "cluster.kuberay.worker_gpu=2"), 2, 2, "2"),
        (("scaling.num_workers=2", "scaling.resources_per_worker.GPU=2"), 2, 2, "2"),
        (("scaling.num_workers=3", "scaling.resources_per_worker.GPU=0.5"), 2, 2, "1"),
        (("scaling=multi_gpu", "cluster.kuberay.replicas=3", "cluster.kuberay.worker_gpu=4"), 3, 3, "4"),
        (ELASTIC, 1, 3, None),
        (("search=random", "scaling=multi_gpu", "scaling.num_workers=2"), 2, 2, "1"),
        (("search=random", "cluster.kuberay.replicas=7"), 7, 7, None),
    ],
)
def test_as_many_pods_as_the_workers_need(overrides: tuple[str, ...], least: int, most: int, gpus: str | None) -> None:
    manifest = rendered(request(*NEEDED, *overrides))
    found = at(manifest, WORKERS)
    assert (found["replicas"], found["minReplicas"], found["maxReplicas"]) == (least, least, most)
    assert at(manifest, amounts(WORKER, "nvidia.com~gpu")[0]) == gpus
    assert at(manifest, f"{SPEC}/enableInTreeAutoscaling") == (True if most > least else None)
    assert at(manifest, f"{SPEC}/headGroupSpec/rayStartParams") == {"num-cpus": "0", "num-gpus": "0"}
    assert f"cluster.min_nodes={least + 1}" in shlex.split(manifest["spec"]["entrypoint"])


@pytest.mark.parametrize("overrides", [BUCKET, (*NEEDED, "scaling=in_process")])
def test_the_head_alone(overrides: tuple[str, ...]) -> None:
    """A bucket, or no Ray: everything runs where the command does."""
    manifest = rendered(request(*overrides, "cluster.kuberay.head_gpu=1", "scaling.use_gpu=true"))
    assert at(manifest, f"{SPEC}/workerGroupSpecs") is None
    assert at(manifest, f"{SPEC}/headGroupSpec/rayStartParams") == {}
    assert "cluster.min_nodes=1" in shlex.split(manifest["spec"]["entrypoint"])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("cluster=kuberay", NEEDED[2]), "cluster.kuberay.image=null: the Pods need an image"),
        (NEEDED[:2], "cluster.kuberay.claim_name=null: what the Pods write goes with them. Set cluster.kuberay.claim_name="),
        ((*NEEDED, "storage.path=/home/me"), "storage.path=/home/me is not below cluster.kuberay.mount_path=/shared"),
        ((*NEEDED, "storage.path=/shared2/x"), "Set storage.path=/shared/outputs"),
        ((*NEEDED, "data.root=here"), "Set data.root=/shared/data"),
        ((*BUCKET, "cluster.kuberay.replicas=2"), "cluster.kuberay.replicas=2: with a bucket everything runs on the head"),
        ((*NEEDED, "cluster.kuberay.replicas=1", "scaling.num_workers=9"), "scaling.num_workers=9: 9 workers with 1 CPU each"),
        ((*BUCKET, "scaling.num_workers=5"), "Or have more: cluster.kuberay.head_cpu, cluster.kuberay.head_gpu."),
        ((*NEEDED, "cluster.kuberay.worker_gpu=0", *GPUS), "Or have more: cluster.kuberay.worker_cpu, cluster.kuberay.worker_gpu"),
        ((*NEEDED, "cluster.kuberay.replicas=3", "cluster.kuberay.max_replicas=2"), "max_replicas=2 is less than"),
        ((*NEEDED, "cluster.kuberay.worker_memory=16 GB"), "worker_memory=16 GB is no amount of memory"),
        ((*NEEDED, "cluster.kuberay.namespace=My_Lab"), "cluster.kuberay.namespace=My_Lab is no name in Kubernetes"),
        ((*NEEDED, "cluster.kuberay.env_from_secrets=[a,B]"), "cluster.kuberay.env_from_secrets[1]=B is no name"),
        ((*NEEDED, "cluster.kuberay.working_dir=code"), "cluster.kuberay.working_dir=code must be the folder of the image"),
        ((*NEEDED, "cluster.kuberay.working_dir='https://me:pw@host/a.zip'"), "working_dir has a key in it"),
        ((*NEEDED, "cluster.kuberay.shutdown_after_job_finishes=false"), "ttl_seconds_after_finished=600 has no meaning"),
        ((*NEEDED, "cluster.kuberay.image_pull_policy=always"), "Did you mean cluster.kuberay.image_pull_policy=Always?"),
        ((*NEEDED, "cluster.kuberay.backoff_limit=-1"), "cluster.kuberay.backoff_limit=-1 is out of range"),
        ((*NEEDED, "cluster.min_nodes=2"), "cluster.min_nodes=2 is only for cluster=existing"),
    ],
)  # fmt: skip
def test_refusals(overrides: tuple[str, ...], says: str, clusters: Path) -> None:
    with pytest.raises(MantaError) as error:
        submit(request(*overrides))
    assert says in str(error.value)
    assert not clusters.exists()


def test_the_command_arrives_as_it_was_typed(tmp_path: Path) -> None:
    """KubeRay hands the entrypoint to Ray as it is, and Ray to a shell."""
    recorder(tmp_path / "python", tmp_path / "calls")
    line = rendered(request(*NEEDED, *ODD, "plan=true"))["spec"]["entrypoint"]
    subprocess.run(line, shell=True, env={"PATH": f"{tmp_path}:/bin"}, check=True)
    ((_, program, *arguments),) = read_calls(tmp_path / "calls")
    assert program == "/manta/train.py"
    assert not [each for each in arguments if each.startswith(("cluster.kuberay", "plan", "cluster=kuberay"))]
    typed, arrived = make_config(*NEEDED, *ODD), make_config(*arguments)
    for part in ("search", "tracking", "storage", "data", "name"):
        assert getattr(arrived, part) == getattr(typed, part)
    assert (arrived.cluster.kind, arrived.cluster.address) == ("existing", "auto")


def test_a_long_name_is_cut() -> None:
    """KubeRay takes 47 characters."""
    name = rendered(request(*NEEDED, f"name={'long-' * 12}end"))["metadata"]["name"]
    assert name.startswith("manta-long-long-") and len(name) <= 47


def test_a_resume() -> None:
    """What it continues is there: its data stay where they were. What concerns the cluster is checked here all the same."""
    given = request(*NEEDED, "resume=latest", "scaling.num_workers=6")
    manifest = rendered(given)
    words = shlex.split(manifest["spec"]["entrypoint"])
    assert "resume=latest" in words and "storage.path=/shared/outputs" in words
    assert not [word for word in words if word.startswith("data.root")]
    assert at(manifest, f"{WORKERS}/replicas") == 2
    given.config.cluster.kuberay.image = None
    with pytest.raises(MantaError, match=r"cluster\.kuberay\.image=null"):
        check_cluster(given.config)


KUBECTL = """
path = sys.argv[-1]
assert sys.argv[1:3] == ["create", "-f"] and open(path).read().startswith("apiVersion: ray.io/v1"), sys.argv
"""


def kubectl(clusters: Path, code: str = KUBECTL) -> Path:
    """A kubectl that is first, and alone, on PATH; it writes down how it was called."""
    calls = clusters.parent / "calls"
    recorder(clusters.parent / "bin" / "kubectl", calls).open("a").write(code)
    return calls


def test_handed_over(clusters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = kubectl(clusters)
    assert submit(request(*NEEDED, "name=My.Run", "cluster.kuberay.namespace=lab", "scaling.num_workers=6")) == 0
    (path,) = clusters.glob("*/rayjob.yaml")
    name = path.parent.name
    assert re.fullmatch(r"manta-my-run-\d{8}-\d{6}", name)
    assert read_calls(calls) == [["kubectl", "create", "-f", str(path)]]
    manifest = yaml.safe_load(path.read_text())
    RAYJOB.validate(manifest)
    assert manifest["metadata"]["name"] == manifest["spec"]["jobId"] == name
    assert [at(manifest, where) for where in everywhere("labels/manta-job")] == [name] * 3
    said = capsys.readouterr().out
    assert f"RayJob {name}: 6 workers with 1 CPU each, in 2 worker Pods: {path}" in said
    for command in (
        f"kubectl -n lab get rayjob {name}",
        f"kubectl -n lab exec $(kubectl -n lab get pod -l manta-job={name},ray.io/node-type=head -o name) -c ray-head",
        f"/logs/job-driver-{name}.log",
        f"kubectl -n lab delete rayjob {name}",
        "results /shared/outputs",
    ):
        assert command in said


@pytest.mark.parametrize(
    ("overrides", "present", "says"),
    [
        (("cluster.kuberay.submit=false",), True, "cluster.kuberay.submit=false: nothing was submitted. To do so: kubectl create -f"),
        ((), False, "There is no kubectl here, so nothing was submitted. Where there is one: kubectl create -f"),
        (("plan=true",), True, "kind: RayJob\n"),
    ],
)  # fmt: skip
def test_only_written(
    clusters: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], present: bool, says: str
) -> None:
    """With plan=true not even that: it is printed."""
    calls = kubectl(clusters) if present else clusters
    assert submit(request(*NEEDED, *overrides)) == 0
    said = capsys.readouterr().out
    assert says in said
    assert not read_calls(calls) if present else True
    assert len(list(clusters.glob("*/rayjob.yaml"))) == (0 if "plan=true" in overrides else 1)
    if "plan=true" in overrides:
        RAYJOB.validate(yaml.safe_load(said))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("\nprint('error: no matches for kind \"RayJob\"', file=sys.stderr)\nsys.exit(1)\n", 'error: no matches for kind "RayJob"'),
        ("\nimport time\ntime.sleep(60)\n", "no answer within 0.5 s"),
    ],
)  # fmt: skip
def test_kubectl_fails(clusters: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str) -> None:
    """One message, with kubectl's own words."""
    kubectl(clusters, code)
    monkeypatch.setattr(kuberay, "KUBECTL_S", 0.5 if "sleep" in code else 60)
    with pytest.raises(MantaError) as error:
        submit(request(*NEEDED))
    (path,) = clusters.glob("*/rayjob.yaml")
    assert str(error.value).startswith(f"kubectl create -f {path}: {says}\nNothing was submitted.")


@pytest.mark.parametrize(
    "override",
    [f"cluster.kuberay.env={{WANDB_API_KEY: {VALUE}}}", f"tracking.wandb.notes='my key {VALUE}'"],
)
def test_no_secret_is_written(clusters: Path, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    monkeypatch.setenv("WANDB_API_KEY", VALUE)
    calls = kubectl(clusters)
    with pytest.raises(MantaError) as error:
        submit(request(*NEEDED, override))
    assert "the value of WANDB_API_KEY" in str(error.value) and VALUE not in str(error.value)
    with pytest.raises(MantaError):
        submit(request(*NEEDED, override, "plan=true"))
    assert not clusters.exists() and not read_calls(calls)
    assert submit(request(*NEEDED, "cluster.kuberay.env_from_secrets=[wandb]")) == 0
    (path,) = clusters.glob("*/rayjob.yaml")
    assert VALUE not in path.read_text()


def test_the_command(lab: Lab) -> None:
    """As it is typed; nothing heavy is loaded, and nothing is written."""
    command = [sys.executable, "-X", "importtime", str(ROOT / "train.py"), *NEEDED, "plan=true", "search=random"]
    done = subprocess.run(command, cwd=lab.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    RAYJOB.validate(yaml.safe_load(done.stdout))
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "omegaconf" in loaded and not loaded & {"torch", "ray", "numpy"}
    assert list(lab.folder.iterdir()) == []
    refused = lab.command("cluster=kuberay")
    assert refused.returncode == 2
    assert "cluster.kuberay.image=null" in refused.stderr and "cluster.kuberay.claim_name=null" in refused.stderr
