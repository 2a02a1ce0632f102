"""What a stranger's configuration, name or directory could do: nothing of it is executed, nothing leaves its place.

Checkpoints: test_checkpoints.py. Secrets in files: test_run_directory.py, test_tracking.py. HTML: test_report.py.
"""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from manta.cluster import own
from manta.env import load_env_file
from manta.errors import INVALID, MantaError
from manta.evaluate import Arguments, evaluate
from manta.resume import load
from manta.runs import RunDir
from manta.search.space import Space
from manta.targets import build, check_allowed, is_own
from tests.conftest import ROOT, Lab, compose_run, make_config, wait_for
from tests.drills import fuzz

DEFAULT = ["manta", "torch", "torchvision", "lightning"]
PLACES = {
    "model": "model._target_={}",
    "optimizer": "optimizer._target_={}",
    "scheduler": "scheduler._target_={}",
    "recipe": "recipe._target_={}",
    "data.dataset": "data.dataset._target_={}",
    "data.transforms.train[0]": "data.transforms.train=[{{_target_: {}}}]",
    "data.transforms.eval[0]": "data.transforms.eval=[{{_target_: {}}}]",
    "recipe.task": "recipe.task._target_={}",
    "recipe.settings.module": "recipe.settings.module._target_={}",
    "model.inner": "+model.inner={{_target_: {}}}",
    "model.list[0].deep": "+model.list=[{{deep: {{_target_: {}}}}}]",
}
OUTSIDE = [
    "os.system", "posix.system", "subprocess.run", "builtins.eval", "shutil.rmtree", "pandas.read_pickle", "ray.init", "torch.load",
    "torch.save", "torch.os.system", "torch.hub.load", "torch.hub.download_url_to_file", "torch.storage._load_from_bytes",
    "torch.utils.collect_env.run", "torch.testing._internal.common_utils.shell", "torch.distributed.run.main",
    "torch.multiprocessing.spawn", "torch.fx.graph_module._exec_with_source", "torch.nn.modules.module.os.system",
    "torch.nn.Linear.__init__.__globals__", "torchvision.datasets.utils.download_url", "torchvision.io.write_file",
    "manta.targets.build", "manta.catalog.remove.delete", "manta.commandline.parse", "manta.runs.shutil.rmtree", "torch.nn", "torch", "",
    "lightning.pytorch.Trainer", "lightning.fabric.utilities.cloud_io._load", "lightning.pytorch.callbacks.os.system",
]  # fmt: skip
# Their names are inside what is allowed, what they are is not.
ALIASES = [
    ("torch.nn.modules.module.torch.load", {"f": "{bomb}", "weights_only": False}),
    ("torch.optim.optimizer.torch.hub.load", {"repo_or_dir": "{here}", "model": "x", "source": "local"}),
    ("manta.data.load.build", {"key": "x", "spec": {"_target_": "os.system", "command": "touch {marker}"}, "allowed": ["os"]}),
    ("manta.data.inputs.np.load", {"file": "{bomb}", "allow_pickle": True}),
    ("manta.training.checkpoint.shutil.rmtree", {"path": "{here}"}),
    ("torchvision.models._utils.nn.modules.module.torch.load", {"f": "{bomb}", "weights_only": False}),
]  # fmt: skip


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that exists once something was executed; `bomb` beside it, unpickled, makes it."""
    (tmp_path / "bomb").write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    return tmp_path / "marker"


# --- _target_ ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", OUTSIDE)
def test_targets_outside_are_refused_by_name(target: str) -> None:
    with pytest.raises(MantaError, match="_target_"):
        check_allowed("model", {"_target_": target}, DEFAULT)


@pytest.mark.parametrize("place", PLACES)
def test_every_place_is_checked(place: str) -> None:
    for target in ("os.system", "torch.load"):
        with pytest.raises(MantaError) as refused:
            make_config(PLACES[place].format(target))
        assert str(refused.value).startswith(f"{place}._target_={target} can run anything")


@pytest.mark.parametrize(("target", "arguments"), ALIASES, ids=lambda value: value if isinstance(value, str) else "")
def test_another_name_of_what_is_outside(marker: Path, target: str, arguments: dict[str, object]) -> None:
    """Found by looking at what a name leads to."""
    filled = yaml.safe_load(
        yaml.safe_dump(arguments).replace("{bomb}", str(marker.with_name("bomb"))).replace("{marker}", str(marker))
        .replace("{here}", str(marker.parent))
    )  # fmt: skip
    (marker.parent / "hubconf.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(MantaError, match="_target_="):
        build("model", {"_target_": target, **filled}, DEFAULT)
    assert not marker.exists()
    assert marker.with_name("bomb").exists()


def test_everything_in_conf_is_inside() -> None:
    for path in (ROOT / "conf").rglob("*.yaml"):
        for line in path.read_text().splitlines():
            if "_target_:" in line:
                check_allowed("it", {"_target_": line.split("_target_:")[1].split("#")[0].strip()}, DEFAULT)


def test_through_a_search() -> None:
    for space in ("search.space.model._target_=choice(os.system, torch.nn.ReLU)",
                  "search.space.optimizer._target_=choice(torch.optim.SGD, torch.hub.load)"):  # fmt: skip
        with pytest.raises(MantaError, match="can run anything"):
            compose_run("search=random", space)
    with pytest.raises(MantaError, match="what is trusted"):
        compose_run("search=random", "search.space.allowed_targets=choice([os],[sys])")


def test_python_itself_cannot_be_allowed() -> None:
    with pytest.raises(MantaError, match="allowed_targets has 'os'"):
        make_config("allowed_targets=[manta,torch,os]", "model._target_=torch.nn.ReLU")
    assert [is_own(name) for name in ("manta", "tests", "pandas", "os", "nowhere")] == [True, True, False, False, False]


# --- a stranger's directory -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    lab = Lab(tmp_path_factory.mktemp("made"))
    return lab.run("scaling=in_process", "training.epochs=1", "training.limit_train_batches=2", "training.test=false")


@pytest.fixture
def strange(made: RunDir, tmp_path: Path, marker: Path) -> RunDir:
    """A run whose config.yaml allows an installed package that unpickles, and names it."""
    shutil.copytree(made.path, tmp_path / "strange", symlinks=True)
    run = RunDir(tmp_path / "strange")
    saved = yaml.safe_load((run.path / "config.yaml").read_text())
    saved["allowed_targets"] += ["pandas"]
    saved["model"] = {"_target_": "pandas.read_pickle", "filepath_or_buffer": str(marker.with_name("bomb"))}
    saved["training"]["epochs"] = 2
    (run.path / "config.yaml").write_text(yaml.safe_dump(saved))
    return run


def test_a_saved_configuration_is_not_believed(
    strange: RunDir, marker: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MANTA_ALLOWED_TARGETS", raising=False)
    with pytest.raises(MantaError, match=r"pandas\.read_pickle is outside the allowed packages"):
        lab.launch(f"resume={strange.path}", "training.epochs=3", "scaling=in_process")
    with pytest.raises(MantaError, match=r"pandas\.read_pickle is outside the allowed packages"):
        evaluate(Arguments(run=str(strange.path)))
    assert not marker.exists()
    with pytest.raises(MantaError, match=r"not a torch\.nn\.Module"):  # who names it is believed: it is unpickled
        lab.launch(
            f"resume={strange.path}",
            "training.epochs=3",
            "scaling=in_process",
            f"allowed_targets=[{','.join(DEFAULT)},pandas]",
        )
    assert marker.exists()


def test_a_saved_space_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANTA_ALLOWED_TARGETS", raising=False)
    config, _, space = compose_run("search=random")
    assert space is not None
    space.save(RunDir(tmp_path))
    path = tmp_path / "space.yaml"
    path.write_text(path.read_text().replace("- lightning\n", "- lightning\n    - pandas\n"))
    assert "pandas" in path.read_text()
    again = Space.load(RunDir(tmp_path), config)
    assert {tuple(base.allowed_targets) for base in again.bases.values()} == {tuple(DEFAULT)}
    RunDir(tmp_path).save_config(config)
    saved = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(saved.replace("- lightning\n", "- lightning\n- pandas\n- tests\n"))
    assert load(RunDir(tmp_path)).allowed_targets == [*DEFAULT, "tests"]
    assert load(RunDir(tmp_path), ["pandas"]).allowed_targets == [*DEFAULT, "pandas", "tests"]


def test_the_project_is_believed(strange: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its own conf/config.yaml allows needs no word."""
    monkeypatch.delenv("MANTA_ALLOWED_TARGETS", raising=False)
    assert load(strange).allowed_targets == DEFAULT
    project = strange.path / "project"
    (project / "conf").mkdir(parents=True)
    (project / "conf" / "config.yaml").write_text("allowed_targets: [manta, torch, pandas]\n")
    monkeypatch.setattr("manta.resume.__file__", str(project / "src" / "manta" / "resume.py"))
    assert load(strange).allowed_targets == [*DEFAULT, "pandas"]


def test_a_directory_of_another_user(made: RunDir) -> None:
    """It is not continued where it cannot be written."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody else")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        run = Path(folder) / "run"
        shutil.copytree(made.path, run, symlinks=True)
        before = sorted(path.name for path in run.rglob("*"))
        line = [f"resume={run}", "training.epochs=3", "scaling=in_process"]
        (refused,) = fuzz.ask(Path(folder) / "fuzz", lines=[line], user=65534)
        assert (refused["code"], refused["trouble"]) == (INVALID, ""), refused["output"]
        assert f"{run} cannot be written" in refused["output"]
        assert sorted(path.name for path in run.rglob("*")) == before


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["name", "group", "data.name", "tags"])
@pytest.mark.parametrize("value", ["../up", "/abs", "a/../../b", "..", ".", "$(touch x)", "`touch x`", "a;touch x", "a|b", "a&b", "a>b", "-rf", "~", "a\\nb", "é", "a*"])  # fmt: skip
def test_names_stay_names(key: str, value: str) -> None:
    given = f'{key}="{value}"' if key != "tags" else f'tags=["{value}"]'
    with pytest.raises(MantaError, match="may have up to 80 letters, digits"):
        make_config(given)


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True), (0o400, False)])
def test_an_open_env_file_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mode: int, warned: bool
) -> None:
    monkeypatch.delenv("MANTA_TEST_KEY", raising=False)
    path = tmp_path / ".env"
    path.write_text("MANTA_TEST_KEY=hunter2\n")
    path.chmod(mode)
    load_env_file(path)
    assert os.environ.pop("MANTA_TEST_KEY") == "hunter2"
    said = capsys.readouterr()
    assert said.out == ""
    assert "hunter2" not in said.err
    assert (said.err == f"Warning: {path} holds secrets and others can read it. Close it: chmod 600 {path}\n") == warned
    assert (said.err == "") != warned


# --- ports and what is left -------------------------------------------------------------------------------------------

SLOW = (
    "scaling=cpu", "scaling.resources_per_worker.CPU=1", "training.epochs=500", "training.log_every_n_steps=1",
    "allowed_targets=[manta,torch,tests]", "data.transforms.train=[{_target_: tests.faults.Slow, seconds: 0.05}]",
)  # fmt: skip


def family(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    mine = psutil.Process(process.pid)
    return [mine, *mine.children(recursive=True)]


def listening(processes: list[psutil.Process]) -> Iterator[tuple[str, str, int]]:
    for process in processes:
        try:
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    yield process.name(), connection.laddr.ip, connection.laddr.port
        except psutil.Error:
            continue


def is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def session_of(processes: list[psutil.Process]) -> Path:
    """The folder of a Ray's session, from its raylet's command line."""
    words = [word for process in processes for word in process.cmdline() if "session_" in word]
    return next(
        path
        for word in words
        for path in Path(word.partition("=")[2] or word).parents
        if path.name.startswith("session_")
    )


def test_a_ray_of_our_own_keeps_to_itself(lab: Lab) -> None:
    """All its ports, and those of torch.distributed, are on loopback; killed with its driver, it leaves nothing for long."""
    process = lab.start(*SLOW, start_new_session=True)
    wait_for(lambda: (lab.folder / "latest").exists() and lab.latest.metrics.exists(), process)
    processes = family(process)
    found = set(listening(processes))
    assert {name for name, _, _ in found} >= {"gcs_server", "raylet"}
    assert len(found) >= 8
    assert [each for each in found if not is_loopback(each[1])] == []
    session = session_of(processes)
    assert (session / own.MARK).exists()
    assert own.remove_sessions(session.parent) == []  # in use
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while session.exists() and time.monotonic() < deadline:  # another test's launch may be the one that removes it
        own.remove_sessions(session.parent)
    assert not session.exists()
    _, alive = psutil.wait_procs(processes, timeout=30)  # Ray's agents alone would stay for minutes
    assert alive == []


def test_a_session_of_others_is_left_alone(tmp_path: Path) -> None:
    """Without our mark, or locked, or of another user."""
    for name in ("session_theirs", "session_locked", "session_root", "session_ours"):
        (tmp_path / name).mkdir()
        if name != "session_theirs":
            (tmp_path / name / own.MARK).touch()
    expected = ["session_locked", "session_theirs"]
    if os.getuid() == 0:
        os.chown(tmp_path / "session_root", 65534, 65534)
        expected.insert(1, "session_root")
    (tmp_path / "session_latest").symlink_to("session_ours")
    locker = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl; f = open({str(tmp_path / 'session_locked' / own.MARK)!r}); fcntl.flock(f, 2); print('x', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert locker.stdout is not None
    locker.stdout.readline()
    own.remove_sessions(tmp_path)
    assert sorted(os.listdir(tmp_path)) == expected
    locker.communicate(b"\n")
    assert own.remove_sessions(tmp_path) == [tmp_path / "session_locked"]
