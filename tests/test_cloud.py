"""Files for `ray up`: what Ray and the clouds would say to them, that every setting is in them, and the commands."""

import json
import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from manta.cluster import cloud
from manta.cluster.elsewhere import Request, submit
from manta.config import Cloud
from manta.errors import MantaError
from tests.conftest import make_config
from tests.rendered import ODD, VALUE, at, clusters, names, read_calls, recorder, request

__all__ = ["clusters"]

AWS = (
    "cluster=cloud", "cluster.cloud.region=us-west-2", "cluster.cloud.image=ami-0123", "cluster.cloud.mount_command=true",
    "cluster.cloud.head_instance_type=m5.xlarge", "cluster.cloud.worker_instance_type=g5.xlarge",
)  # fmt: skip
GCP = (
    "cluster=cloud", "cluster.cloud.provider=gcp", "cluster.cloud.region=us-west1", "cluster.cloud.availability_zone=us-west1-b",
    "cluster.cloud.project_id=lab", "cluster.cloud.image=projects/debian/images/12", "cluster.cloud.mount_command=true",
    "cluster.cloud.head_instance_type=n2-standard-4", "cluster.cloud.worker_instance_type=n1-standard-8",
)  # fmt: skip
GPUS = ("scaling=multi_gpu", "scaling.num_workers=4", "cluster.cloud.worker_gpus=1")
ELASTIC = ("scaling.num_workers=2", "scaling.max_workers=9", "data.batch_size=64")
HEAD, WORKER = (f"available_node_types/{kind}" for kind in ("head", "worker"))


def rendered(given: Request) -> dict[str, Any]:
    """What `ray up` reads, refused as Ray itself would refuse it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    text = cloud.as_yaml(cloud.cluster_file(given.config, cloud._machines(given.config), Path("/here/code")))
    content = yaml.safe_load(text)
    assert "*id" not in text, "an alias of YAML"
    prepared = prepare_config(content)
    validate_config(prepared)
    assert "ray-wheels" not in yaml.safe_dump(prepared), "Ray's own commands install a nightly build"
    assert prepared["available_node_types"].keys() == content["available_node_types"].keys()
    return content


@pytest.mark.parametrize("provider", [AWS, GCP], ids=["aws", "gcp"])
@pytest.mark.parametrize(
    "overrides", [(), GPUS, ELASTIC, ODD, ("scaling=in_process",)], ids=["least", "gpus", "elastic", "odd", "head"]
)
def test_ray_takes_it(provider: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    rendered(request(*provider, *overrides))


def test_ray_says_no() -> None:
    """Else the other tests say nothing."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    content = rendered(request(*AWS))
    for path, value in (
        ("max_worker", 3),
        (f"{WORKER}/spot", True),
        ("auth/ssh_key", "x"),
        ("docker", {"images": "x"}),
    ):
        wrong = json.loads(json.dumps(content))
        parent, _, key = path.rpartition("/")
        (at(wrong, parent) if parent else wrong)[key] = value
        with pytest.raises(jsonschema.ValidationError):
            validate_config(prepare_config(wrong))


def test_amazon_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own way from the file to running machines, with moto for Amazon."""
    import boto3
    from moto import mock_aws
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes its key there
    content = rendered(request(*AWS, *GPUS, "cluster.cloud.iam_instance_profile=trainer", "cluster.cloud.disk_gb=99"))
    with mock_aws():
        boto3.client("iam", "us-west-2").create_instance_profile(InstanceProfileName="trainer")
        prepared = AWSNodeProvider.fillout_available_node_types_resources(prepare_config(content))
        assert at(prepared, f"{HEAD}/resources/CPU") == 0
        worker = at(prepared, f"{WORKER}/resources")
        assert (worker["CPU"], worker["GPU"]) == (4, 1)  # as Amazon says of a g5.xlarge
        final = bootstrap_aws(prepared)
        for kind, lifecycle in ((HEAD, None), (WORKER, "spot")):
            provider = AWSNodeProvider(final["provider"], "manta")
            (machine,) = provider.create_node(
                dict(at(final, f"{kind}/node_config")), {"ray-node-name": kind}, 1
            ).values()
            assert machine.instance_lifecycle == lifecycle
            disks = boto3.client("ec2", "us-west-2").describe_volumes(
                Filters=[{"Name": "attachment.instance-id", "Values": [machine.id]}]
            )
            assert [disk["Size"] for disk in disks["Volumes"]] == [99]
            assert machine.image_id == "ami-0123" and machine.iam_instance_profile["Arn"].endswith("/trainer")


def nodes(path: str) -> list[str]:
    return [f"{HEAD}/node_config/{path}", f"{WORKER}/node_config/{path}"]


DISK = "disks/0/initializeParams"
# Setting: what is typed, where it shows and as what; a second row is for gcp.
SETTINGS: dict[str, list[tuple[str, list[str], Any]]] = {
    "cluster_name": [("mine", ["cluster_name"], "mine")],
    "provider": [],  # both
    "region": [("eu-west-1", ["provider/region"], "eu-west-1"), ("europe-west4", ["provider/region"], "europe-west4")],
    "availability_zone": [
        ("'eu-west-1a,eu-west-1b'", ["provider/availability_zone"], "eu-west-1a,eu-west-1b"),
        ("europe-west4-a", ["provider/availability_zone"], "europe-west4-a"),
    ],
    "project_id": [(), ("other", ["provider/project_id"], "other")],
    "image": [
        ("ami-9", nodes("ImageId"), "ami-9"),
        ("projects/x/images/y", nodes(f"{DISK}/sourceImage"), "projects/x/images/y"),
    ],
    "docker_image": [("lab/manta:1", ["docker/image"], "lab/manta:1")],
    "ssh_user": [("admin", ["auth/ssh_user"], "admin")],
    "ssh_private_key": [("/home/me/.ssh/lab.pem", ["auth/ssh_private_key"], "/home/me/.ssh/lab.pem")],
    "key_name": [("lab", nodes("KeyName"), "lab")],
    "iam_instance_profile": [("trainer", nodes("IamInstanceProfile/Name"), "trainer")],
    "service_account": [(), ("a@lab.iam", [f"{WORKER}/node_config/serviceAccounts/0/email"], "a@lab.iam")],
    "security_group_ids": [("[sg-1,sg-2]", nodes("SecurityGroupIds"), ["sg-1", "sg-2"])],
    "subnet_ids": [("[subnet-1]", nodes("SubnetIds"), ["subnet-1"])],
    "head_instance_type": [
        ("c5.large", [f"{HEAD}/node_config/InstanceType"], "c5.large"),
        ("e2-small", [f"{HEAD}/node_config/machineType"], "e2-small"),
    ],
    "head_cpus": [("16", [f"{HEAD}/resources/CPU"], 16)],
    "head_gpus": [("3", [f"{HEAD}/resources/GPU"], 3)],
    "worker_instance_type": [
        ("p4d.24xlarge", [f"{WORKER}/node_config/InstanceType"], "p4d.24xlarge"),
        ("a2-highgpu-1g", [f"{WORKER}/node_config/machineType"], "a2-highgpu-1g"),
    ],
    "worker_cpus": [("48", [f"{WORKER}/resources/CPU"], 48)],
    "worker_gpus": [
        ("3", [f"{WORKER}/resources/GPU"], 3),
        ("3", [f"{WORKER}/node_config/scheduling/onHostMaintenance"], "TERMINATE"),
    ],
    "accelerator_type": [
        (),
        (
            "nvidia-tesla-t4",
            [f"{WORKER}/node_config/guestAccelerators"],
            [{"acceleratorType": "nvidia-tesla-t4", "acceleratorCount": 2}],
        ),
    ],
    "use_spot": [
        ("false", [f"{WORKER}/node_config/InstanceMarketOptions"], None),
        ("false", [f"{WORKER}/node_config/scheduling"], {"onHostMaintenance": "TERMINATE"}),
    ],
    "min_workers": [("5", [f"{WORKER}/min_workers"], 5)],
    "max_workers": [("8", [f"{WORKER}/max_workers", "max_workers"], 8)],
    "idle_timeout_minutes": [("33", ["idle_timeout_minutes"], 33.0)],
    "disk_gb": [("321", nodes("BlockDeviceMappings/0/Ebs/VolumeSize"), 321), ("321", nodes(f"{DISK}/diskSizeGb"), 321)],
    "mount_command": [("'sudo mount -t nfs4 fs:/ /shared'", ["initialization_commands"], ["sudo mount -t nfs4 fs:/ /shared"])],
    "mount_path": [("/lasting", ["docker/run_options"], ["-v /lasting:/lasting"])],
    "file_mounts": [("{/home/admin/more: /here/more}", ["file_mounts/~home~admin~more"], "/here/more")],
    "setup_commands": [("['echo one','echo two']", ["setup_commands"], ["echo one", "echo two"])],
}  # fmt: skip
ALSO = {
    "ssh_private_key": ("cluster.cloud.key_name=lab",),
    "key_name": ("cluster.cloud.ssh_private_key=/k",),
    "head_cpus": ("scaling=in_process",),
    "head_gpus": ("scaling=in_process",),
    "accelerator_type": ("cluster.cloud.worker_gpus=2",),
    "mount_path": ("cluster.cloud.docker_image=x", "storage.path=/lasting/outputs", "data.root=/lasting/data"),
}
"""What else must be so."""
ROWS = [(name, index) for name, rows in SETTINGS.items() for index, row in enumerate(rows) if row]


def test_every_setting_is_known() -> None:
    """A new one needs a row above."""
    assert SETTINGS.keys() == names(Cloud)


@cache
def together(index: int) -> dict[str, Any]:
    """All settings at once that need nothing else."""
    given = [f"cluster.cloud.{name}={SETTINGS[name][i][0]}" for name, i in ROWS if i == index and name not in ALSO]
    return rendered(request(*(AWS, GCP)[index], *given))


@cache
def before(index: int, *others: str) -> dict[str, Any]:
    return rendered(request(*(AWS, GCP)[index], *others))


@pytest.mark.parametrize(("name", "index"), ROWS)
def test_every_setting_shows(name: str, index: int) -> None:
    typed, paths, expected = SETTINGS[name][index]
    others, after = ALSO.get(name, ()), together(index)
    if name in ALSO:
        after = rendered(request(*(AWS, GCP)[index], *others, f"cluster.cloud.{name}={typed}"))
    alone = () if name in ("mount_path", "key_name", "ssh_private_key") else others
    assert [at(after, path) for path in paths] == [expected] * len(paths)
    assert expected not in [at(before(index, *alone), path) for path in paths]


@pytest.mark.parametrize(
    ("overrides", "least", "most"),
    [
        ((), 1, 1),
        (("scaling.num_workers=6",), 2, 2),
        (GPUS, 4, 4),
        ((*GPUS, "cluster.cloud.worker_gpus=2"), 2, 2),
        (ELASTIC, 1, 3),
        (("search=random", "cluster.cloud.min_workers=7"), 7, 7),
    ],
)
def test_as_many_machines_as_the_workers_need(overrides: tuple[str, ...], least: int, most: int) -> None:
    content = rendered(request(*AWS, *overrides))
    assert (at(content, f"{WORKER}/min_workers"), at(content, f"{WORKER}/max_workers")) == (least, most)
    assert at(content, f"{HEAD}/resources") == {"CPU": 0}
    assert (at(content, f"{HEAD}/max_workers"), content["max_workers"]) == (0, most)


def test_only_workers_are_spot() -> None:
    for provider in (AWS, GCP):
        content = rendered(request(*provider))
        for kind, spot in (("head", False), ("worker", True)):
            assert (
                re.search("spot|preemptible", json.dumps(content["available_node_types"][kind])) is not None
            ) == spot


def test_a_bucket_needs_no_workers() -> None:
    given = [each for each in AWS if "worker" not in each and "mount" not in each]
    content = rendered(request(*given, "storage.path=s3://bucket/runs", "cluster.cloud.head_cpus=8"))
    assert content["available_node_types"].keys() == {"head"}
    assert at(content, f"{HEAD}/resources") == {"CPU": 8}
    assert content["initialization_commands"] == []


def test_the_code_is_copied(clusters: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As it is now, and neither secrets, data, results nor settings of this machine."""
    project = tmp_path / "project"
    for path in (".env", ".git/config", "outputs/x", "data/x", "conf/local/default.yaml", "conf/model/mlp.yaml", "train.py",
                 "src/manta/local/x.py", "src/manta/__pycache__/x.pyc"):  # fmt: skip
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(path)
    (project / ".gitignore").write_text("/conf/local/\n")
    monkeypatch.setattr(cloud, "PROJECT", project)
    given = request(*AWS)
    assert submit(given) == 0
    (project / "src/manta/local/x.py").rename(project / "src/manta/y.py")
    assert submit(given) == 0
    code = clusters / "manta" / "code"
    assert at(yaml.safe_load((code.parent / "cluster.yaml").read_text()), "file_mounts") == {"~/manta": str(code)}
    copied = {str(path.relative_to(code)) for path in code.rglob("*") if path.is_file() and path.stat().st_size}
    assert copied == {"conf/model/mlp.yaml", "train.py", "src/manta/y.py", ".gitignore"}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("cluster=cloud",), "cluster.cloud.region=null: it is needed, e.g. cluster.cloud.region=us-west-2"),
        (("cluster=cloud",), "cluster.cloud.mount_command=null: what the machines write goes with them."),
        (("cluster=cloud", "cluster.cloud.provider=gcp"), "cluster.cloud.project_id=null: it is needed"),
        (("cluster=cloud", "cluster.cloud.provider=azure"), "cluster.cloud.provider=azure must be one of aws, gcp."),
        ((*GCP, "cluster.cloud.key_name=x"), "cluster.cloud.key_name=x is only for cluster.cloud.provider=aws."),
        ((*AWS, "cluster.cloud.accelerator_type=t4", "cluster.cloud.worker_gpus=1"), "is only for cluster.cloud.provider=gcp"),
        ((*AWS, "cluster.cloud.key_name=x"), "cluster.cloud.ssh_private_key and cluster.cloud.key_name belong together"),
        ((*GCP, "cluster.cloud.accelerator_type=t4"), "how many of them? Set cluster.cloud.worker_gpus=1"),
        ((*AWS, "cluster.cloud.cluster_name=My_Own"), "cluster.cloud.cluster_name=My_Own must be small letters"),
        ((*AWS, "storage.path=/home/me"), "storage.path=/home/me is not below cluster.cloud.mount_path=/shared"),
        ((*AWS, "storage.path=s3://bucket/runs", "cluster.cloud.min_workers=2"), "min_workers=2: with a bucket everything"),
        ((*AWS, "storage.path=s3://bucket/runs"), "Or have more: cluster.cloud.head_cpus, cluster.cloud.head_gpus"),
        ((*AWS, "scaling=multi_gpu"), "Or have more: cluster.cloud.worker_cpus, cluster.cloud.worker_gpus"),
    ],
)  # fmt: skip
def test_refusals(overrides: tuple[str, ...], says: str, clusters: Path) -> None:
    with pytest.raises(MantaError) as error:
        submit(request(*overrides))
    assert says in str(error.value)
    assert not clusters.exists()


def test_no_secret_is_written(clusters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", VALUE)
    for override in (f"cluster.cloud.setup_commands=['export X={VALUE}']", f"tracking.wandb.notes={VALUE}"):
        with pytest.raises(MantaError) as error:
            submit(request(*AWS, override))
        assert "the value of AWS_SECRET_ACCESS_KEY" in str(error.value) and VALUE not in str(error.value)
    assert not clusters.exists()
    assert submit(request(*AWS)) == 0
    assert all(VALUE not in path.read_text() for path in clusters.rglob("*") if path.is_file())


def test_nothing_is_rented(clusters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files, and what to type; with plan=true not even the files."""
    calls = clusters.parent / "calls"
    for name in ("ray", "make", "aws", "gcloud"):
        recorder(clusters.parent / "bin" / name, calls)
    assert submit(request(*AWS, "plan=true")) == 0
    assert yaml.safe_load(capsys.readouterr().out)["cluster_name"] == "manta"
    assert not clusters.exists()
    assert submit(request(*AWS, "scaling.num_workers=6", "cluster.cloud.cluster_name=lab")) == 0
    assert {path.name for path in (clusters / "lab").iterdir()} == {"cluster.yaml", "submit.sh", "Makefile", "code"}
    said = capsys.readouterr().out
    assert f"Cluster lab on aws: 6 workers with 1 CPU each, on 2 machines beside the head: {clusters / 'lab'}" in said
    for target in ("up", "submit", "logs", "status", "stop", "down"):
        assert re.search(rf"make -C {clusters / 'lab'} {target} +#", said)
    assert not read_calls(calls)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_command_arrives_as_it_was_typed(clusters: Path, tmp_path: Path) -> None:
    """make, `ray exec`, the head's shell and Ray's own: the targets as they are, with a `ray` that writes them down."""
    assert submit(request(*AWS, *ODD, "plan=false")) == 0
    folder, calls = clusters / "manta", tmp_path / "calls"
    ray, make = recorder(tmp_path / "bin" / "ray", calls), shutil.which("make", path=os.defpath)
    assert make is not None
    for target in ("up", "submit", "logs", "status", "stop", "down"):
        subprocess.run([make, "-C", folder, target, f"RAY={ray}"], check=True, capture_output=True)
    up, code, script_, start, logs, status, stop, down = read_calls(calls)
    assert up == ["ray", "up", "--yes", "--no-restart", "cluster.yaml"]
    assert code == ["ray", "rsync-up", "cluster.yaml"]
    assert script_ == ["ray", "rsync-up", "cluster.yaml", "submit.sh", "~/submit.sh"]
    assert down == ["ray", "down", "--yes", "cluster.yaml"]
    assert [each[:3] for each in (start, logs, status, stop)] == [["ray", "exec", "cluster.yaml"]] * 4

    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(folder / "submit.sh", home)
    environment = {"HOME": str(home), "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    calls.unlink()
    for each in (start, logs, stop):
        subprocess.run(each[3], shell=True, env=environment, check=True)
    job, *others = read_calls(calls)
    at_dashes = job.index("--")
    options, entrypoint = job[:at_dashes], job[at_dashes + 1 :]
    name = options[options.index("--submission-id") + 1]
    assert options[:5] == ["ray", "job", "submit", "--address", "http://127.0.0.1:8265"]
    assert "--no-wait" in options and options[options.index("--working-dir") + 1] == f"{home}/manta"
    environment_there = json.loads(options[options.index("--runtime-env-json") + 1])
    assert environment_there == {"excludes": ["/.env"], "env_vars": {"PYTHONPATH": "src"}}
    assert others == [["ray", "job", "logs", "--follow", name], ["ray", "job", "stop", name]]

    recorder(tmp_path / "bin" / "python", calls)  # as `ray job submit` and the job's shell treat it
    subprocess.run(shlex.join(entrypoint), shell=True, env=environment, check=True)
    program, *arguments = read_calls(calls)[-1][1:]
    assert program == f"{home}/manta/train.py"
    typed, arrived = make_config(*AWS, *ODD), make_config(*arguments)
    for part in ("search", "tracking", "storage", "data", "name"):
        assert getattr(arrived, part) == getattr(typed, part)
    assert (arrived.cluster.kind, arrived.cluster.min_nodes, arrived.cluster.wait_s) == ("existing", 2, 3600)
