"""torchvision's sets: real file formats through the real classes, fetched from a loopback mirror; every failure."""

import gzip
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from mirror import CLASSES, TEST, TRAIN, Mirror, digest, idx, labels, pixels, point, write_cifar, write_mnist

from manta.config import Data
from manta.data import vision
from manta.data.load import load_splits
from manta.errors import MantaError


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Name -> a mirror of that data set, which the torchvision class now uses."""
    mirrors = []
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)

    def make(name: str) -> tuple[Mirror, Path]:
        folder = tmp_path / f"mirror-{name}"
        folder.mkdir()
        (write_cifar if name.startswith("cifar") else write_mnist)(folder, name)
        mirrors.append(Mirror(folder))
        point(monkeypatch.setattr, name, folder, mirrors[-1].url)
        return mirrors[-1], folder

    yield make
    for mirror in mirrors:
        mirror.close()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def fetch(name: str, root: Path, **arguments):
    return getattr(vision, name)(str(root), **arguments)


def names_under(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", CLASSES)
def test_values_arrive_and_validation_is_carved(name, serve, root):
    serve(name)
    splits = fetch(name, root, split_seed=1, val_fraction=0.3)
    shape = (3, 32, 32) if name.startswith("cifar") else (1, 28, 28)
    assert [len(p) for p in (splits.train, splits.val, splits.test)] == [70, 30, TEST]
    assert splits.test.targets.tolist() == labels(name, TEST) and splits.test.targets.dtype == torch.int64
    assert torch.equal(splits.test.inputs, torch.from_numpy(pixels(name, TEST, 2)).view(TEST, *shape))

    order = {image.tobytes(): number for number, image in enumerate(pixels(name, TRAIN, 1))}
    seen = {part: [order[x.numpy().tobytes()] for x in getattr(splits, part).inputs] for part in ("train", "val")}
    assert sorted(seen["train"] + seen["val"]) == list(range(TRAIN))
    assert splits.val.targets.tolist() == [labels(name, TRAIN)[number] for number in seen["val"]]
    if name != "cifar100":  # which has one sample a class here
        assert splits.val.targets.bincount().tolist() == [3] * 10

    inputs, _ = splits.train.batch(torch.arange(70))
    assert splits.train.inputs.dtype == torch.uint8 and inputs.dtype == torch.float32 and inputs.shape == (70, *shape)
    mean, std = torch.tensor(splits.train.prepare.mean), torch.tensor(splits.train.prepare.std)
    expected = (splits.train.inputs.double() / 255 - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    torch.testing.assert_close(inputs.double(), expected, rtol=1e-5, atol=1e-5)


def test_split_seed_moves_validation_only(serve, root):
    serve("mnist")
    one, two, same = (fetch("mnist", root, split_seed=seed) for seed in (1, 2, 1))
    assert torch.equal(one.test.inputs, two.test.inputs)
    assert digest(one) == digest(same) != digest(two)


@pytest.mark.parametrize("name", ["kmnist", "cifar10"])
def test_fetched_once_then_used_without_network_or_download(name, serve, root):
    mirror, _ = serve(name)
    first = digest(fetch(name, root))
    archives = [str(path.name) for path in vision._archives(CLASSES[name])]
    assert sorted(mirror.gets) == sorted(archives)
    mirror.close()
    assert digest(fetch(name, root)) == digest(fetch(name, root, download=False)) == first
    kept = {str(path) for path in vision._files(CLASSES[name]) + vision._archives(CLASSES[name])}
    assert names_under(root) - kept <= {f".{CLASSES[name].__name__}.lock"}  # no staging folder is left


@pytest.mark.parametrize("name", ["mnist", "cifar100"])
def test_two_processes_start_at_once_on_one_empty_root(name, serve, root):
    mirror, folder = serve(name)
    command = [sys.executable, str(Path(__file__).with_name("mirror.py")), name, str(root), mirror.url, str(folder)]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    outcomes = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outcomes
    assert {out.strip() for out, _ in outcomes} == {digest(fetch(name, root))}
    assert len(mirror.gets) == len(vision._archives(CLASSES[name]))  # one fetched, the other waited


@pytest.mark.parametrize("name", CLASSES)
def test_absent_and_not_allowed_to_fetch(name, serve, root):
    mirror, _ = serve(name)
    with pytest.raises(MantaError) as raised:
        fetch(name, root, download=False)
    message, files = str(raised.value), vision._files(CLASSES[name])
    assert f"{root / files[0].parent} lacks {', '.join(path.name for path in files)}" in message
    assert "data.download=false" in message and "'data.download=true'" in message and "data.root=" in message
    assert f"from torchvision.datasets import {CLASSES[name].__name__}" in message
    assert mirror.gets == [] and not root.exists()


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10"])
def test_absent_and_offline(name, serve, root):
    mirror, _ = serve(name)
    mirror.close()
    with pytest.raises(MantaError, match=r"lacks .* and fetching it failed: (.|\n)*[Cc]onnection refused"):
        fetch(name, root)
    assert names_under(root) <= {f".{CLASSES[name].__name__}.lock"}


def test_archives_brought_by_hand_need_no_network(serve, root):
    mirror, folder = serve("mnist")
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for archive in folder.iterdir():
        shutil.copy(archive, raw)
    mirror.close()
    assert len(fetch("mnist", root).test) == TEST


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
@pytest.mark.parametrize("damage", ["half a file", "empty file", "gone"])
def test_damaged_files_are_said_offline_and_mended_online(name, damage, serve, root):
    serve(name)
    first = digest(fetch(name, root))
    victim = root / vision._files(CLASSES[name])[0]
    content = victim.read_bytes()
    victim.unlink() if damage == "gone" else victim.write_bytes(content[: len(content) // 2 if damage[0] == "h" else 0])
    said = f"lacks {victim.name}," if damage == "gone" else f"has damaged files \\({victim.name},"
    with pytest.raises(MantaError, match=f"{re.escape(str(victim.parent))} {said}"):
        fetch(name, root, download=False)
    assert digest(fetch(name, root)) == first
    assert victim.read_bytes() == content


def test_images_and_labels_that_do_not_belong_together(serve, root):
    serve("mnist")
    fetch("mnist", root)
    (root / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(idx(pixels("mnist", 1, 0)[0, 0, :7]))
    with pytest.raises(MantaError, match="100 images but 7 labels"):
        fetch("mnist", root, download=False)


def test_a_mirror_that_serves_rubbish(serve, root):
    _, folder = serve("mnist")
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"rubbish"))
    with pytest.raises(MantaError, match=r"fetching it failed(.|\n)*t10k-labels(.|\n)*corrupted"):
        fetch("mnist", root)
    assert not (root / "MNIST").exists()  # nothing half-done is left where others would read it


def test_what_a_killed_download_left_is_cleared(serve, root):
    serve("mnist")
    stale = root / ".MNIST-abandoned"
    (stale / "MNIST" / "raw").mkdir(parents=True)
    (stale / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"half")
    assert len(fetch("mnist", root).test) == TEST
    assert not stale.exists()


def test_a_root_that_cannot_be_made(serve, tmp_path):
    serve("mnist")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MantaError, match=r"fetching it failed: .*Not a directory"):
        fetch("mnist", tmp_path / "file" / "root")


def test_one_who_waits_says_so_and_then_reads_what_the_other_fetched(serve, root, monkeypatch):
    mirror, _ = serve("mnist")
    elsewhere = root.with_name("elsewhere")
    expected = digest(fetch("mnist", elsewhere))
    mirror.gets.clear()
    root.mkdir()
    other = FileLock(root / ".MNIST.lock")
    other.acquire()

    def say(message, *arguments):  # the other process finishes while we wait
        said.append(message % arguments)
        shutil.copytree(elsewhere / "MNIST", root / "MNIST")
        other.release()

    said: list[str] = []
    monkeypatch.setattr(vision, "REMIND_S", 0.01)
    monkeypatch.setattr(vision.log, "warning", say)
    assert digest(fetch("mnist", root)) == expected
    assert said == [f"Waiting for another process to fetch data (it holds {root / '.MNIST.lock'})"]
    assert mirror.gets == []


def test_a_refused_fraction_passes_through_the_plug_in(serve, root):
    serve("mnist")
    spec = {"_target_": "manta.data.vision.mnist", "root": str(root), "val_fraction": 1.0}
    data = Data(name="mnist", dataset=spec, input_shape=[1, 28, 28], num_classes=10)
    with pytest.raises(MantaError, match=r"data.val_fraction=1.0"):
        load_splits(data, ["manta"])
    spec["val_fraction"] = 0.1
    assert len(load_splits(data, ["manta"]).classes) == 10
