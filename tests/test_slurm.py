"""cluster=slurm: the job's file and what is refused; with a real SLURM: jobs that requeue themselves and end bit-identical."""

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from manta.cluster import slurm
from manta.cluster.elsewhere import Request
from manta.errors import MantaError
from manta.runs import RunDir, read_lines
from tests.conftest import ROOT, Lab, make_config, wait_for
from tests.slurm import Slurm, possible
from tests.test_resume import assert_identical


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that takes everything and keeps its arguments."""
    return fake_sbatch(tmp_path, monkeypatch, 'echo "$@" >>"$0.arguments"; echo "42;cluster"')


def fake_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    program = folder / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return program


def request_of(folder: Path, *overrides: str, jobs: list[list[str]] | None = None) -> Request:
    given = ["cluster=slurm", f"storage.path={folder}", *overrides]
    return Request(make_config(*given), given, jobs or [])


def written(folder: Path) -> str:
    (script,) = (folder / "clusters").glob("*.sbatch")
    return script.read_text()


def refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(MantaError) as error:
        slurm.submit(request_of(folder, "cluster.slurm.submit=false", *overrides))
    assert not (folder / "clusters").exists()
    return str(error.value)


def test_the_file(tmp_path: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "cluster.slurm.partition=gpu", "cluster.slurm.account=lab", "cluster.slurm.qos=high", "cluster.slurm.time=1-2:30",
        "cluster.slurm.nodes=2", "cluster.slurm.gpus_per_node=a100:4", "cluster.slurm.mem=64G", "cluster.slurm.signal_s=300",
        "cluster.slurm.constraint='a|b'", 'cluster.slurm.directives=["--exclusive"]', "cluster.slurm.modules=[cuda/12]",
        'cluster.slurm.setup=["source env/bin/activate"]', "cluster.slurm.python=python", "cluster.slurm.cpus_per_task=16",
    )  # fmt: skip
    ours = ("scaling=multi_node", "name=big", "model.hidden=[8,8]", "cluster.wait_s=30", *options)
    assert slurm.submit(request_of(tmp_path, *ours)) == 0
    (script,) = (tmp_path / "clusters").glob("*-big.sbatch")
    head, _, body = script.read_text().partition("\n\n")
    stem = script.with_suffix("")
    assert head.splitlines() == [
        "#!/bin/bash", "#SBATCH --job-name=big", f"#SBATCH --output={stem}-%j.log", "#SBATCH --open-mode=append",
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --partition=gpu", "#SBATCH --account=lab",
        "#SBATCH --qos=high", "#SBATCH --constraint='a|b'", "#SBATCH --time=1-2:30", "#SBATCH --cpus-per-task=16",
        "#SBATCH --gpus-per-node=a100:4", "#SBATCH --mem=64G", "#SBATCH --signal=B:USR1@300", "#SBATCH --requeue",
        "#SBATCH --exclusive",
    ]  # fmt: skip
    for line in (
        f"cd {shlex.quote(os.getcwd())} || exit", "module load cuda/12", "source env/bin/activate", "python=python", "wait_s=30",
        f"overrides=(storage.path={tmp_path} scaling=multi_node name=big 'model.hidden=[8,8]')", "max_requeues=100",
        f"run_file={stem}", f". {ROOT}/scripts/slurm/job.sh",
    ):  # fmt: skip
        assert line in body.splitlines(), line
    assert (sbatch.parent / "sbatch.arguments").read_text() == f"--parsable {script}\n"
    said = capsys.readouterr().out
    for wanted in ("42", f"tail -F {stem}-42.log", "scancel 42 "):
        assert wanted in said


def test_only_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither needs a SLURM. Without `requeue` a checkpoint is still written before the end."""
    monkeypatch.setenv("PATH", "/nowhere")
    for ask in ("cluster.slurm.submit=false", "plan=true"):
        folder = tmp_path / ask.partition("=")[0]
        assert slurm.submit(request_of(folder, ask, "cluster.slurm.requeue=false", "scaling=cpu")) == 0
        assert "#SBATCH --no-requeue\n" in written(folder)
        assert "#SBATCH --signal=B:USR1@120\n" in written(folder)
        assert "\nmax_requeues=0\n" in written(folder)
        assert "#SBATCH --cpus-per-task=2\n" in written(folder), "for two workers on CPU"
        assert "plan=true" not in written(folder)
        assert re.search(r"sbatch \S+\.sbatch", capsys.readouterr().out)


def test_an_array(tmp_path: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [["seed=1", "cluster=slurm"], ["seed=2", "model.hidden=[4,4]"]]
    limit = "cluster.slurm.max_array_tasks=1"
    assert slurm.submit(request_of(tmp_path, "group=both", limit, jobs=jobs)) == 0
    text = written(tmp_path)
    assert "#SBATCH --array=0-1%1\n" in text
    assert re.search(r"#SBATCH --output=\S+-%A_%a\.log\n", text)
    assert "\n0) overrides=(seed=1 group=both) ;;\n1) overrides=(seed=2 'model.hidden=[4,4]' group=both) ;;\n" in text
    assert "an array of 2" in capsys.readouterr().out
    assert sbatch.exists()


def test_resume_means_the_run_of_now(tmp_path: Path) -> None:
    """Not what is `latest` when the job starts."""
    lab = Lab(tmp_path)
    run = lab.run("scaling=in_process", "training.max_steps=2", "training.test=false")
    done = lab.command("cluster=slurm", "cluster.slurm.submit=false", "resume=latest", "training.max_steps=4")
    assert done.returncode == 0, done.stderr
    assert f"overrides=('resume='\"'\"'{run.path}'\"'\"'' storage.path={tmp_path} training.max_steps=4)" in written(
        tmp_path
    )


def test_sbatch_that_is_missing_or_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setenv("PATH", "/nowhere")
        with pytest.raises(MantaError, match=r"there is no sbatch here.*cluster.slurm.submit=false"):
            slurm.submit(request_of(tmp_path))
    fake_sbatch(tmp_path, monkeypatch, "echo 'sbatch: error: invalid partition specified: no' >&2; exit 1")
    with pytest.raises(MantaError, match=r"sbatch refused .*\.sbatch: sbatch: error: invalid partition"):
        slurm.submit(request_of(tmp_path, "cluster.slurm.partition=no"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.slurm.time=90"], "cluster.slurm.time=90 must be hours:minutes:seconds"),
        (["cluster.slurm.time=tomorrow"], "cluster.slurm.time=tomorrow must be"),
        (["cluster.slurm.time=2:00"], "signal_s=120, .* it would never train"),
        (['cluster.slurm.directives=["--partition=x"]'], "set cluster.slurm.partition instead"),
        (['cluster.slurm.directives=["--output=x"]'], "the job needs its own --output"),
        (["cluster.slurm.directives=[exclusive]"], "an option of sbatch is written"),
        (["cluster.slurm.gpus_per_node=many"], "must be a number or type:number"),
        (["scaling=multi_gpu"], "asks for GPUs, and the job for none. Set cluster.slurm.gpus_per_node=4"),
        (["scaling=multi_gpu", "scaling.num_workers=9", "cluster.slurm.gpus_per_node=4", "cluster.slurm.nodes=2"],
         "num_workers=9 with 1 GPU each do not fit into cluster.slurm.nodes=2 x 4 GPUs"),
        (["scaling=cpu", "cluster.slurm.cpus_per_task=1"], "num_workers=2 with 1 CPU each do not fit"),
        (["scaling=in_process", "cluster.slurm.nodes=2"], "scaling.num_workers=0 trains in one process"),
        (["cluster.slurm.nodes=2", "storage.path=s3://bucket/x"], "with a bucket everything runs on one node"),
        (["cluster.stop_on_interrupt=true"], "the command ends at once"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    if any(override.startswith("storage.path") for override in overrides):
        overrides = [*overrides, f"storage.cache={tmp_path}"]
        with pytest.raises(MantaError, match=message):
            slurm.submit(Request(make_config("cluster=slurm", "cluster.slurm.submit=false", *overrides), overrides))
        return
    assert re.search(message, refused(tmp_path, *overrides))


@pytest.mark.parametrize(
    ("time", "limit"),
    [
        ("1:30", 90),
        ("1:30:00", 5400),
        ("2-0", 172800),
        ("1-2:30", 95400),
        ("1-0:0:5", 86405),
        ("90", None),
        ("1-", None),
    ],
)
def test_time_limits(time: str, limit: int | None) -> None:
    assert slurm.seconds(time) == limit


@pytest.mark.parametrize("name", ["job.sh", "ray_node.sh", "single_node.sbatch", "multi_node.sbatch"])
def test_shell_files_parse(name: str) -> None:
    assert subprocess.run(["bash", "-n", ROOT / "scripts" / "slurm" / name], check=False).returncode == 0


def test_sigterm_to_every_process_is_one_request(lab: Lab) -> None:
    """As scancel sends it, and the job's shell passes it on: the second time does not stop at once."""
    slow = "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.5}]"
    process = lab.start(
        "scaling=in_process", "allowed_targets=[manta,torch,tests]", slow, "training.log_every_n_steps=1"
    )
    wait_for(lambda: (lab.folder / "latest").exists() and bool(read_lines(lab.latest.metrics)), process)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: "stopping after" in lab.latest.log.read_text(), process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert (lab.latest.checkpoints / "last").exists()


# --- a real SLURM ------------------------------------------------------------------------------------------------

real = [
    pytest.mark.drill,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not possible(), reason="a SLURM of its own needs root, Debian's slurm-wlm and munge, and iproute2"
    ),
]
SETTINGS = (
    "model.dropout=0.2", "data.batch_size=50", "training.epochs=4", "training.log_every_n_steps=1",
    "training.ema.enabled=true", "allowed_targets=[manta,torch,tests]",
)  # fmt: skip
SLOW = "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.1}]"
MINUTES = "cluster.slurm.time=20:00"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    # munged wants a folder that everybody may enter, which pytest's own are not.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        made = Slurm(Path(folder))
        try:
            yield made
        finally:
            made.close()


def submitted(cluster: Slurm, lab: Lab, *overrides: str) -> str:
    """Number of the job of `python train.py cluster=slurm ...`."""
    done = cluster.train("cluster=slurm", f"storage.path={lab.folder}", *SETTINGS, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^job +(\d+)", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return found[1]


def steps(lab: Lab) -> int:
    return len(read_lines(lab.latest.metrics)) if (lab.folder / "latest").exists() else 0


def log(lab: Lab) -> str:
    return "".join(path.read_text() for path in (lab.folder / "clusters").glob("*.log"))


def signalled(cluster: Slurm, lab: Lab, number: str, *signals: str) -> None:
    """scancel, once it trains."""
    cluster.wait_for(lambda: steps(lab) > 8, what=cluster.logs)
    assert cluster.login("scancel", *signals, number).returncode == 0


def reference(lab: Lab, *overrides: str) -> RunDir:
    other = Lab(lab.folder / "undisturbed")
    other.folder.mkdir()
    return other.run(*SETTINGS, *overrides)


def assert_requeued(cluster: Slurm, lab: Lab, number: str, *times: str) -> None:
    found = cluster.wait(number, "COMPLETED")
    assert found["Restarts"] in times and found["ExitCode"] == "0:0", cluster.logs()
    assert log(lab).count("slurm: requeued\n") == int(found["Restarts"])
    assert lab.latest.read("status.json")["attempts"] == 1 + int(found["Restarts"]), "one run, resumed"
    assert len(list(lab.folder.glob("????-??-??/*"))) == 1
    assert lab.latest.read("status.json")["state"] == "finished"


class TestReal:
    """In one SLURM of two nodes."""

    pytestmark = real

    def test_the_time_limit(self, cluster: Slurm, lab: Lab) -> None:
        """Hit on purpose: SLURM itself sends the signal. Training would take 58 s more than the minute allows."""
        slow = SLOW.replace("0.1", "0.5")
        limit = (
            "cluster.slurm.time=1:00",
            "cluster.slurm.signal_s=20",
            "cluster.slurm.gpus_per_node=1",
            "scaling.use_gpu=false",
        )
        number = submitted(cluster, lab, "scaling=in_process", slow, *limit)
        assert_requeued(cluster, lab, number, *"12345")  # SLURM's signal may be a minute early
        assert "cluster.num_cpus=1 cluster.num_gpus=1" in (lab.latest.path / "overrides.txt").read_text(), (
            "not the machine's"
        )
        assert "SIGUSR1: stopping after a checkpoint" in log(lab)
        assert_identical(lab.latest, reference(lab, "scaling=in_process", slow.replace("0.5", "0")))

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_two_workers(self, cluster: Slurm, lab: Lab, nodes: int) -> None:
        """Of one node, and one of each of two."""
        spread = ("scaling.placement_strategy=STRICT_SPREAD",) if nodes == 2 else ()
        number = submitted(cluster, lab, "scaling=cpu", SLOW, MINUTES, f"cluster.slurm.nodes={nodes}", *spread)
        signalled(cluster, lab, number, "--batch", "--signal=USR1")
        assert_requeued(cluster, lab, number, "1")
        hosts = {rank["host"] for rank in lab.latest.read("workers.json")["ranks"]}
        assert hosts == ({"n1", "n2"} if nodes == 2 else {"n1"})
        assert_identical(lab.latest, reference(lab, "scaling=cpu", SLOW.replace("0.1", "0")))

    @pytest.mark.parametrize("how", [(), ("--batch", "--signal=TERM")], ids=["scancel", "batch"])
    def test_cancelled(self, cluster: Slurm, lab: Lab, how: tuple[str, ...]) -> None:
        """Also where every process of the job, Ray's too, gets SIGTERM: a checkpoint, and no second life."""
        number = submitted(cluster, lab, "scaling=cpu", SLOW, MINUTES)
        signalled(cluster, lab, number, *how)
        cluster.wait(number, "CANCELLED" if not how else "FAILED")
        assert cluster.job(number)["Restarts"] == "0"
        run = lab.latest
        assert run.read("status.json")["state"] == "interrupted", log(lab)
        assert run.read("checkpoints/last/meta.json").get("step", 0) >= 8, log(lab)
        assert f"To go on: python train.py resume='{run.path}' cluster=slurm cluster.slurm.time=20:00" in log(lab)

    def test_a_multirun(self, cluster: Slurm, lab: Lab) -> None:
        """An array: each task its own run of one group; the one that gets the signal requeues itself alone."""
        given = ["cluster=slurm", MINUTES, f"storage.path={lab.folder}", *SETTINGS, SLOW, "scaling=in_process"]
        jobs = [[*given, f"seed={seed}"] for seed in (1, 2)]
        code = (
            "import sys; sys.path.insert(0, sys.argv[1])\nfrom manta.cluster import slurm\n"
            "from manta.cluster.elsewhere import Request\nfrom tests.conftest import make_config\n"
            f"given, jobs = {given!r}, {jobs!r}\nslurm.submit(Request(make_config(*given), given, jobs, ['-m']))"
        )
        done = cluster.login(sys.executable, "-c", code, str(ROOT))
        assert done.returncode == 0, done.stdout + done.stderr
        number = re.search(r"^job +(\d+), an array of 2", done.stdout, re.MULTILINE)[1]  # type: ignore[index]

        def run_of(task: int) -> RunDir | None:
            found = list((lab.folder / "clusters").glob(f"*-{number}_{task}.run"))
            return RunDir(Path(found[0].read_text().strip())) if found else None

        cluster.wait_for(lambda: (run := run_of(1)) is not None and len(read_lines(run.metrics)) > 8, what=cluster.logs)
        cluster.login("scancel", "--batch", "--signal=USR1", f"{number}_1")
        cluster.wait_for(lambda: cluster.login("squeue", "-h", "-j", number).stdout.strip() == "", what=cluster.logs)
        runs = [run_of(0), run_of(1)]
        assert [run.read("status.json")["attempts"] for run in runs if run] == [1, 2], log(lab)
        assert [run.read("status.json")["state"] for run in runs if run] == ["finished"] * 2
        configs = [(run.path / "config.yaml").read_text() for run in runs if run]
        assert ["\nseed: 1\n" in configs[0], "\nseed: 2\n" in configs[1]] == [True, True]
        groups = {re.search(r"^group: (\S+)$", config, re.MULTILINE)[1] for config in configs}  # type: ignore[index]
        assert len(groups) == 1 and groups != {"null"}
        assert_identical(
            runs[1] or lab.latest, reference(lab, "scaling=in_process", "seed=2", SLOW.replace("0.1", "0"))
        )

    def test_a_file_of_ones_own(self, cluster: Slurm, lab: Lab) -> None:
        """The example, with other overrides: what it requeues is its own run too."""
        text = (ROOT / "scripts" / "slurm" / "single_node.sbatch").read_text()
        overrides = shlex.join(["scaling=in_process", f"storage.path={lab.folder}", *SETTINGS, SLOW])
        text = text.replace("--cpus-per-task=8", "--cpus-per-task=2").replace(".venv/bin/python", sys.executable)
        text = text.replace("(model=cnn training.epochs=20)", f"({overrides})").replace(
            ". scripts", f". {ROOT}/scripts"
        )
        (lab.folder / "mine.sbatch").write_text(text)
        number = cluster.login("sbatch", "--parsable", str(lab.folder / "mine.sbatch")).stdout.strip()
        signalled(cluster, lab, number, "--batch", "--signal=USR1")
        found = cluster.wait(number, "COMPLETED")
        assert found["Restarts"] == "1"
        assert lab.latest.read("status.json")["attempts"] == 2
        assert (cluster.folder / "work" / f"slurm-{number}.run").read_text() == f"{lab.latest.path}\n"

    def test_a_failure_stays_one(self, cluster: Slurm, lab: Lab) -> None:
        """Its exit code is the job's, and it is not put back."""
        number = submitted(cluster, lab, "scaling=in_process", MINUTES, "optimizer.lr=1e30")
        found = cluster.wait(number, "FAILED")
        assert (found["ExitCode"], found["Restarts"]) == ("1:0", "0"), log(lab)
        assert lab.latest.read("status.json")["state"] == "failed"
