"""cluster=job: what is sent, what is refused, and a command that runs on a real cluster behind its Jobs API."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from manta import runs
from manta.cluster import elsewhere, job
from manta.cluster.package import pack
from manta.commandline import with_domains
from manta.errors import FAILED, INTERRUPTED, INVALID, MantaError
from manta.runs import RunDir, read_lines
from tests import nodes
from tests.conftest import ROOT, Lab, make_config, wait_for
from tests.test_interrupts import SLOW, trained

MIB = 1 << 20
SECRET = "terces"[::-1] * 3  # this file, which travels, does not have it


# --- what is sent ------------------------------------------------------------------------------------------------


def litter(project: Path) -> None:
    """What lies about in a project and is no code; `assets/` and `*.ckpt` are ignored by git."""
    with open(project / ".gitignore", "a") as file:
        file.write("assets/\n*.ckpt\n!kept.ckpt\n")
    for name in (
        ".env", "tools/.env.production", "data/x.csv", "outputs/2026-11-30/10-00-00/config.yaml", "environment/pyvenv.cfg",
        "environment/lib/torch.py", ".venv/pyvenv.cfg", ".venv/lib/site.py", "lost.ckpt", ".ssh/id_rsa",
    ):  # fmt: skip
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(SECRET)
    (project / "assets").mkdir()
    with open(project / "assets" / "images.bin", "wb") as file:
        file.truncate(300 * MIB)


@pytest.fixture(params=["a checkout", "no checkout"])
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A small one with code, links and litter."""
    found = tmp_path / "project"
    for name in ("train.py", "gone.py", "src/manta/data/digits.py", "new.py", "kept.ckpt"):
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text(f"# {name}\n")
    (found / "alias.py").symlink_to("new.py")
    (found / "secret.py").symlink_to(".env")
    (found / "elsewhere").symlink_to("/etc")
    (found / "host.txt").symlink_to("/etc/hostname")
    litter(found)
    if request.param == "a checkout":
        subprocess.run("git init -q . && git add train.py gone.py .gitignore", shell=True, cwd=found, check=True)
        subprocess.run("git init -q inner && echo 1 > inner/code.py", shell=True, cwd=found, check=True)
    else:
        (found / "inner").mkdir()
        (found / "inner" / "code.py").write_text("1\n")
    (found / "gone.py").unlink()
    return found


def test_only_code_is_sent(project: Path, tmp_path: Path) -> None:
    """What git ignores, and what must never travel even if git would take it, stays here; what is left out is said."""
    (project / "results").mkdir()
    (project / "results" / "summary.json").write_text(SECRET)
    package = pack(project, tmp_path / "code.zip", MIB, without=(project / "results",))
    with zipfile.ZipFile(package.path) as archive:
        assert sorted(archive.namelist()) == sorted(package.files)
        assert archive.read("train.py") == b"# train.py\n"
        assert archive.read("alias.py") == b"# new.py\n"
    expected = {
        ".gitignore",
        "alias.py",
        "inner/code.py",
        "kept.ckpt",
        "new.py",
        "src/manta/data/digits.py",
        "train.py",
    }
    assert set(package.files) == expected
    assert set(package.left_out) == {"elsewhere", "host.txt", "secret.py"}
    assert str(package).startswith(
        "7 files, 0.0 MB (not in it, for they are links out of the project or to folders: elsewhere"
    )
    assert SECRET.encode() not in package.path.read_bytes()


def test_the_same_code_is_the_same_package(project: Path, tmp_path: Path) -> None:
    """Ray names it by its bytes, and does not take twice what it has."""
    first = pack(project, tmp_path / "one.zip", MIB).path.read_bytes()
    os.utime(project / "train.py", (0, 1))
    assert pack(project, tmp_path / "two.zip", MIB).path.read_bytes() == first
    (project / "new.py").write_text("2")
    assert pack(project, tmp_path / "three.zip", MIB).path.read_bytes() != first


def test_what_git_knows_goes_along(project: Path, tmp_path: Path) -> None:
    """A run there has a commit and its changes; what never travels is not in the changes either."""
    if not (project / ".git").exists():
        assert runs.SENT not in pack(project, tmp_path / "code.zip", MIB).files
        return
    who = "-c user.name=me -c user.email=me@localhost"
    subprocess.run(f"git add -f .env train.py && git {who} commit -qm one", shell=True, cwd=project, check=True)
    for name in (".env", "train.py"):
        (project / name).write_text(f"changed {SECRET if name == '.env' else ''}\n")
    there = tmp_path / "there"
    with zipfile.ZipFile(pack(project, tmp_path / "code.zip", MIB).path) as archive:
        archive.extractall(there)
    here, found = runs.version(project), runs.version(there)
    assert found["commit"] == here["commit"] is not None
    assert found["branch"] == here["branch"]
    assert "+changed" in str(found["diff"])
    assert SECRET not in str(found["diff"])


def test_too_large_a_package_names_what_is_large(project: Path, tmp_path: Path) -> None:
    (project / "weights").mkdir()
    for name in ("a.pt", "b.pt"):
        (project / "weights" / name).write_bytes(os.urandom(MIB))
    (project / "film.mp4").write_bytes(os.urandom(MIB // 2))
    with pytest.raises(MantaError, match=r"Largest: weights/ 2\.1 MB, film\.mp4 0\.5 MB, ") as refused:
        pack(project, tmp_path / "code.zip", MIB)
    assert "Ray takes archives of 1.0 MB at most, and its 10 files have 2.6 MB" in str(refused.value)
    assert ".gitignore" in str(refused.value)


def test_this_project_is_small(tmp_path: Path) -> None:
    files = pack(ROOT, tmp_path / "code.zip", 5 * MIB).files
    assert {"train.py", "conf/config.yaml", "src/manta/launch.py", "src/manta/data/digits.py"} <= set(files)
    assert not any(name.startswith((".git/", "outputs/", ".venv/", ".env")) for name in files)


# --- the command that runs there ---------------------------------------------------------------------------------


def arguments(*overrides: str, **more: Any) -> list[str]:
    """Nothing is restored here: a run that is resumed is there."""
    resume = next((each.partition("=")[2] for each in overrides if each.startswith("resume=")), None)
    config = make_config(*(each for each in overrides if not each.startswith("resume=")))
    return job.arguments(elsewhere.Request(dataclasses.replace(config, resume=resume), list(overrides), **more))


JOB = ("cluster=job", "cluster.address=http://head:8265")


def test_arguments_arrive_as_they_were_typed(tmp_path: Path) -> None:
    """Through a shell: quotes, spaces, sweeps, dollars; the cluster is the one where the command then is."""
    typed = (
        "++search.space.optimizer.lr='loguniform(1e-4, 1e-1)'", "search=random", "name=\"it's\"", 'tags=["a b","$HOME;`x`"]',
        "storage.path='/shared/my outputs'", "cluster.wait_s=7",
    )  # fmt: skip
    request = elsewhere.Request(
        make_config(*JOB, *typed[4:]), [*JOB, *typed], options=["-m", "hydra.sweeper.max_batch_size=2"]
    )
    sent = job.arguments(request)
    assert sent == [
        "-m", "hydra.sweeper.max_batch_size=2", *typed[:4], "cluster=existing", "cluster.address=auto",
        "storage.path='/shared/my outputs'", "cluster.wait_s=7.0",
    ]  # fmt: skip
    assert with_domains(sent) == sent
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    script.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        job.entrypoint(sent), shell=True, env={"PATH": path}, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == ["train.py", *sent]


def test_paths_that_would_be_lost_are_refused() -> None:
    """The job runs in a folder that Ray removes."""
    for given in ((), ("storage.path=results",), ("storage.path=results", "resume=latest"), ("resume=10-00",)):
        with pytest.raises(MantaError, match=r"storage.path=\w+: results would be lost .*storage.path=/shared/outputs"):
            arguments(*JOB, *given)
    shared = (*JOB, "storage.path=/shared/outputs")
    with pytest.raises(MantaError, match=r"data.root=data: data=fashion_mnist has files.*data.root=/shared/data"):
        arguments(*shared, "data=fashion_mnist")
    here = ["cluster=existing", "cluster.address=auto", "storage.path=/shared/outputs"]
    assert arguments(*shared) == here
    assert arguments(*shared, "data=fashion_mnist", "data.root=/shared/data") == ["data=fashion_mnist", *here, "data.root=/shared/data"]  # fmt: skip
    assert arguments(*shared, "resume=latest") == ["resume=latest", *here]
    # A run that is resumed has its own data.root; that of conf/local is for new ones.
    config = dataclasses.replace(make_config(*shared, "data.root=/local/data"), resume="latest")
    assert job.arguments(elsewhere.Request(config, [*shared, "resume=latest"])) == ["resume=latest", *here]
    absolute = "resume=/shared/outputs/2026-11-30/10-00-00"
    assert arguments(*JOB, absolute) == [absolute, *here[:2]]
    bucket = arguments(*JOB, "storage.path=s3://bucket/runs")
    assert bucket[2:] == ["storage.path=s3://bucket/runs", f"storage.cache='{job.CACHE}'"]


# --- who answers -------------------------------------------------------------------------------------------------


@contextmanager
def answering(answer: Callable[[str], tuple[int, str]]) -> Iterator[str]:
    """The address of a server that answers like this."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, text = answer(self.path)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message, at once: nothing there, something that is silent, that hangs up, or that is no dashboard."""
    monkeypatch.setattr(job, "ANSWER_S", 0.5)
    with (
        socket.socket() as silent,
        answering(lambda _: (404, "")) as other,
        answering(lambda _: (200, "hello")) as page,
    ):
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        addresses = [f"http://127.0.0.1:{port}", "http://no-such-host.invalid:8265", other, page]
        for address in addresses:
            with pytest.raises(
                MantaError, match=f"cluster.address={address}: no Ray dashboard answers there.*--dashboard-host"
            ):
                job._connect(address)
        silent.listen()
        with pytest.raises(MantaError, match="no Ray dashboard answers there"):
            job._connect(addresses[0])


def test_names_of_jobs() -> None:
    assert job.Job.parse("manta-1@http://head:8265/") == ("manta-1", "http://head:8265")
    for name in ("manta-1", "@http://head:8265", "manta-1@head:8265", "manta-1@http://user:word@head:8265"):
        with pytest.raises(
            MantaError, match=r"job:<id>@http://|must be the cluster's dashboard|no password"
        ) as refused:
            job.Job.parse(name)
        assert "word@" not in str(refused.value)


def test_other_versions_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(lambda _: (200, '{"version": "4", "ray_version": "2.1.0"}')) as address:
        job._connect(address)
    assert "The cluster has Ray 2.1.0, this machine 2." in capsys.readouterr().out


@pytest.mark.parametrize("refusal", [(401, "Unauthorized"), (403, "Forbidden")])
def test_a_token_is_asked_for(monkeypatch: pytest.MonkeyPatch, refusal: tuple[int, str]) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):  # of a Ray that this process has
        monkeypatch.delenv(name, raising=False)
    with (
        answering(lambda _: refusal) as address,
        pytest.raises(MantaError, match=r"the cluster wants its token and none was sent\. Set RAY_AUTH_TOKEN"),
    ):
        job._connect(address)


class Gone:
    """A client whose cluster is there no more."""

    def get_job_info(self, _id: str) -> Any:
        raise requests.ConnectionError("refused")


def test_a_cluster_that_is_gone_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "RETRY_S", 1.5)
    lost = job.Job("manta-1", "http://head:8265")
    with pytest.raises(
        MantaError, match=r"does not answer any more.*\nfollow  python scripts/runs.py logs job:manta-1@"
    ) as error:
        job._follow(Gone(), lost)
    assert error.value.code == FAILED
    assert capsys.readouterr().err.count("Connection to http://head:8265 lost; trying again") == 1


def test_a_log_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """However often it is read from its beginning; commands in it are to be typed here."""
    log, text = job._Log(job.Job("a", "http://h:1")), "one\ntwo\npython train.py resume=x\nlast"
    position = log.show(text[:6], 0)
    log.show(text[6:9], position)
    log.show(text[:5], 0)
    log.show(text, 0)
    log.end()
    assert (
        capsys.readouterr().out == "one\ntwo\npython train.py cluster=job cluster.address=http://h:1 resume=x\nlast\n"
    )


# --- runs of this machine ----------------------------------------------------------------------------------------


def test_a_run_here_is_followed_and_stopped(lab: Lab) -> None:
    process = lab.start(*SLOW, "scaling=in_process")
    wait_for(lambda: (lab.folder / "latest").exists() and trained(lab.latest, 3), process)
    script = [sys.executable, str(ROOT / "scripts" / "runs.py"), "--storage", str(lab.folder)]
    with subprocess.Popen([*script, "logs", "latest"], stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "Plan\n"
        stopped = subprocess.run([*script, "stop", "latest"], capture_output=True, text=True, check=True)
        assert "is asked to stop after a checkpoint" in stopped.stdout
        output, _ = process.communicate(timeout=60)
        said = rest(follower)
    assert process.returncode == INTERRUPTED, output
    assert lab.latest.read("status.json")["state"] == "interrupted"
    assert "Plan\n" + said == lab.latest.log.read_text()
    again = subprocess.run([*script, "stop", "latest"], capture_output=True, text=True, check=False)
    assert again.returncode == INVALID
    assert "is not running: there is nothing to stop" in again.stderr


# --- a real cluster ----------------------------------------------------------------------------------------------

needs_nodes = pytest.mark.skipif(
    not nodes.possible(), reason="several nodes on one machine need root, iproute2 and util-linux"
)
DASHBOARD = f"http://{nodes.NET}.1:8265"
ONE_WORKER = ("scaling.num_workers=1", "scaling.use_gpu=false")


def started(folder: Path, *numbers: int, **environment: str) -> nodes.Nodes:
    """A head with a dashboard, and workers; their environment is not ours."""
    made = nodes.Nodes(folder, f"mt{os.getpid() % 10_000}j{len(environment)}", dashboard=True)
    made.env.pop("PYTHONPATH", None)
    made.env.update(environment, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for node in numbers:
        made.start(node)
    return made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nodes.Nodes]:
    """A head without CPUs and a node with one."""
    made = started(tmp_path_factory.mktemp("n"), 1, 2)
    try:
        made.wait(1, 2)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This project with litter, as a user has it; its code tells where it is."""
    found = tmp_path_factory.mktemp("copy") / "project"
    ignored = ("*.egg-info", ".*cache", "__pycache__", ".git", ".venv", "outputs", "data", ".env")
    shutil.copytree(ROOT, found, ignore=lambda folder, names: {n for n in shutil.ignore_patterns(*ignored)(folder, names) if n != "data" or Path(folder) == ROOT})  # fmt: skip
    who = "-c user.name=me -c user.email=me@localhost"
    commit = f"git init -qb mine . && git add . && git {who} commit -qm code"
    subprocess.run(commit, shell=True, cwd=found, check=True)
    litter(found)
    (found / ".env").write_text(f"WANDB_API_KEY={SECRET}\n")
    (found / ".env").chmod(0o600)
    with open(found / "src" / "manta" / "data" / "digits.py", "a") as file:
        file.write(
            "\nimport os, socket\nprint('code on', socket.gethostname(), __file__, 'WANDB_API_KEY' in os.environ)\n"
        )
    return found


@contextmanager
def running(cluster: nodes.Nodes, copy: Path, script: str, *given: str) -> Iterator["subprocess.Popen[str]"]:
    """A script of the copy, on the head; stopped at the end."""
    command = cluster.command(1, "env", f"PYTHONPATH={copy / 'src'}", sys.executable, str(copy / script), *given)
    process = subprocess.Popen(
        command, env=cluster.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=copy
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            inner(process).kill()
            process.communicate()


def inner(process: "subprocess.Popen[str]") -> psutil.Process:
    """Behind `nsenter`."""
    return psutil.Process(process.pid).children()[0]


def finish(cluster: nodes.Nodes, copy: Path, script: str, *given: str) -> tuple[int, str]:
    with running(cluster, copy, script, *given) as process:
        output = rest(process)
    return process.returncode, output


def job_of(output: str) -> str:
    """Its name, from the command that follows it."""
    (name,) = set(re.findall(r"runs.py logs (\S+)", output))
    return str(name)


def rest(process: "subprocess.Popen[str]") -> str:
    """What it prints to its end."""
    assert process.stdout is not None
    text = process.stdout.read()
    process.wait(10)
    return text


def read_until(process: "subprocess.Popen[str]", mark: str) -> str:
    """What it prints, up to and with a line that has this."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if mark in line:
            return text
    raise AssertionError(text)


@needs_nodes
@pytest.mark.drill
def test_a_job(cluster: nodes.Nodes, copy: Path, tmp_path: Path) -> None:
    """Nothing but code travels, to every node; what the driver says is shown, and its exit code is ours."""
    lab = Lab(tmp_path / "my results")
    to = ("cluster=job", f"cluster.address={DASHBOARD}", f"storage.path='{lab.folder}'")
    code, output = finish(cluster, copy, "train.py", *to, *ONE_WORKER, "training.epochs=2")
    assert code == 0, output
    assert re.search(r"^Package: \d{3} files, [01]\.\d MB$", output, re.MULTILINE)
    assert [len(re.findall(rf"^epoch +{epoch} .*val/accuracy", output, re.MULTILINE)) for epoch in (1, 2, 3)] == [
        1,
        1,
        0,
    ]
    assert f"extend      python train.py {' '.join(to[:2])} resume=" in output
    assert lab.latest.read("status.json")["state"] == "finished"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=copy, capture_output=True, text=True, check=True)
    assert lab.latest.read("provenance.json")["git"] == {
        "commit": commit.stdout.strip(),
        "branch": "mine",
        "diff": "uncommitted.diff",
    }
    assert "+print('code on'" in (lab.latest.path / "uncommitted.diff").read_text()
    assert lab.latest.read("workers.json")["ranks"][0]["host"] == cluster.host(2)
    assert f"code on {cluster.host(2)} {cluster.ray}/n2/" in lab.latest.log.read_text()
    assert "True" not in re.findall(r"^code on .*", lab.latest.log.read_text(), re.MULTILINE)[0]

    for node in (1, 2):
        (there,) = (cluster.ray / f"n{node}").glob("session_2*/runtime_resources/working_dir_files/_ray_pkg_*/")
        arrived = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
        assert {"train.py", "conf/config.yaml", "src/manta/data/digits.py", ".gitignore"} <= arrived
        left = [
            n
            for n in arrived
            if re.search(r"(^|/)(\.env|\.venv|\.git|\.ssh|environment(?=/)|assets|data/x|outputs)(/|$|\.p)|ckpt$", n)
        ]
        assert left == ["kept.ckpt"] if "kept.ckpt" in arrived else left == []
        assert not any(SECRET in (there / name).read_text(errors="replace") for name in arrived)
    ask = f"import requests; print(requests.get('{DASHBOARD}/api/jobs/').text)"
    known = cluster.run(sys.executable, "-c", ask).stdout
    assert job_of(output).removeprefix("job:").partition("@")[0] in known
    assert '"RAY_JOB_STOP_WAIT_TIME_S": "60"' in known
    assert SECRET not in known

    # What only the cluster can know is said there, and has its exit code.
    code, output = finish(cluster, copy, "train.py", *to, "scaling=cpu", "scaling.num_workers=3")
    assert code == INVALID, output
    assert "3 workers with 1 CPU each can never be placed" in output


@needs_nodes
@pytest.mark.drill
def test_leave_follow_stop_and_resume(cluster: nodes.Nodes, copy: Path, lab: Lab) -> None:
    to = ("cluster=job", f"cluster.address={DASHBOARD}", f"storage.path={lab.folder}")
    with running(cluster, copy, "train.py", *to, *ONE_WORKER, *SLOW, "data.batch_size=400") as process:
        output = read_until(process, "epoch   2")
        inner(process).send_signal(signal.SIGINT)
        output += rest(process)
    assert process.returncode == INTERRUPTED, output
    assert "Left alone; manta-" in output
    assert "Traceback" not in output
    name = job_of(output)
    address = f"http://127.0.0.1:{FORWARDED}"
    through = name.replace(DASHBOARD, address)

    # It goes on, can be followed, also over a connection that breaks; each line comes once.
    with forwarder(cluster) as first, running(cluster, copy, "scripts/runs.py", "logs", through) as follower:
        seen = read_until(follower, "epoch   3")
        first.kill()
        first.wait()
        seen += read_until(follower, f"Connection to {address} lost")
        with forwarder(cluster):
            seen += read_until(follower, "Connected again.")
            code, said = finish(cluster, copy, "scripts/runs.py", "stop", name)
            assert code == 0, said
            assert "is asked to stop after a checkpoint" in said
            seen += rest(follower)
    assert follower.returncode == INTERRUPTED, seen
    epochs = [int(found) for found in re.findall(r"^epoch +(\d+)", seen, re.MULTILINE)]
    assert epochs == list(range(1, epochs[-1] + 1))
    run = lab.latest
    assert run.read("status.json")["state"] == "interrupted"
    before = read_lines(run.metrics)[-1]["step"]
    again = re.search(r"^resume +python (train.py .*)$", seen, re.MULTILINE)
    assert again is not None

    # Resumed by the command that was shown; now Ctrl-C stops it there.
    command = [part.replace(address, DASHBOARD) for part in shlex.split(again[1])]
    stopping = ("cluster.stop_on_interrupt=true", "allowed_targets=[manta,torch,tests]")
    with running(cluster, copy, *command, *stopping) as process:
        output = read_until(process, "epoch ")
        inner(process).send_signal(signal.SIGINT)
        output += rest(process)
    assert process.returncode == INTERRUPTED, output
    assert "Interrupted\n" in output
    assert "was stopped.\n" in output
    assert run.read("status.json")["state"] == "interrupted"
    assert run.read("status.json")["attempts"] == 2
    steps = [line["step"] for line in read_lines(run.metrics) if "val/accuracy" in line]
    assert steps == sorted(set(steps))
    assert steps[-1] > before
    assert RunDir(run.checkpoints / "last").read("meta.json")["step"] >= steps[-1]
    code, said = finish(cluster, copy, "scripts/runs.py", "stop", job_of(output))
    assert (code, "has ended already: stopped." in said) == (0, True), said


FORWARDED = 18265
_FORWARD = """
import asyncio, sys
async def pipe(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError: pass
    finally: writer.close()
async def serve(reader, writer):
    there = await asyncio.open_connection(sys.argv[1], 8265)
    await asyncio.gather(pipe(reader, there[1]), pipe(there[0], writer))
async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[2])) as server:
        print("ready", flush=True)
        await server.serve_forever()
asyncio.run(main())
"""


@contextmanager
def forwarder(cluster: nodes.Nodes) -> Iterator[psutil.Process]:
    """A connection to the dashboard that can break."""
    command = cluster.command(1, sys.executable, "-c", _FORWARD, f"{nodes.NET}.1", str(FORWARDED))
    process = subprocess.Popen(command, env=cluster.env, stdout=subprocess.PIPE, text=True)
    try:
        read_until(process, "ready")
        yield inner(process)
    finally:
        for child in psutil.Process(process.pid).children() if process.poll() is None else ():
            child.kill()
        process.wait(10)


@needs_nodes
@pytest.mark.drill
def test_a_cluster_with_a_token(copy: Path, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    token = "0123456789abcdef" * 3
    guarded = started(tmp_path_factory.mktemp("g"), 1, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    to = ("cluster=job", f"cluster.address={DASHBOARD}", f"storage.path={lab.folder}", "plan=true", *ONE_WORKER)
    try:
        guarded.wait(1)
        code, output = finish(guarded, copy, "train.py", *to)
        assert code == INVALID, output
        assert "1 worker with 1 CPU each can never be placed" in output  # so it came in: this head has no CPUs
        assert token not in output
        for env, says in (({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 48}, "did not accept the one of RAY_AUTH_TOKEN"), ({}, "none was sent")):  # fmt: skip
            guarded.env = {name: value for name, value in guarded.env.items() if not name.startswith("RAY_AUTH")} | env
            code, output = finish(guarded, copy, "train.py", *to)
            assert code == INVALID, output
            assert f"the cluster wants its token and {says}." in output
    finally:
        guarded.close()
