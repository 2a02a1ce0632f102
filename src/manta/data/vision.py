"""torchvision's small image sets, held in memory as uint8 and normalised on whole batches.

They lie under `root` as torchvision lays them out, so a folder filled by other programs is used as it is.
"""

import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100, KMNIST, MNIST, FashionMNIST

from manta.data import Splits, TensorSet
from manta.data.split import carve_fraction
from manta.data.transforms import Normalize
from manta.errors import MantaError

Kind = type[MNIST] | type[CIFAR10]
log = logging.getLogger(__name__)
STALL_S = 60.0  # a download that sends nothing for so long has failed
REMIND_S = 30.0  # how often a process that waits for another one's download says so


def mnist(root: str, download: bool = True, split_seed: int = 0, val_fraction: float = 0.1) -> Splits:
    """70,000 handwritten digits, (1, 28, 28). LeCun et al. 1998, http://yann.lecun.com/exdb/mnist."""
    return _splits(MNIST, Normalize((0.1307,), (0.3081,)), root, download, split_seed, val_fraction)


def fashion_mnist(root: str, download: bool = True, split_seed: int = 0, val_fraction: float = 0.1) -> Splits:
    """70,000 pieces of clothing, (1, 28, 28). Xiao et al. 2017, arXiv:1708.07747."""
    return _splits(FashionMNIST, Normalize((0.2860,), (0.3530,)), root, download, split_seed, val_fraction)


def kmnist(root: str, download: bool = True, split_seed: int = 0, val_fraction: float = 0.1) -> Splits:
    """70,000 cursive Japanese characters, (1, 28, 28). Clanuwat et al. 2018, arXiv:1812.01718."""
    return _splits(KMNIST, Normalize((0.1918,), (0.3483,)), root, download, split_seed, val_fraction)


def cifar10(root: str, download: bool = True, split_seed: int = 0, val_fraction: float = 0.1) -> Splits:
    """60,000 photographs of 10 kinds, (3, 32, 32). Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html."""
    norm = Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    return _splits(CIFAR10, norm, root, download, split_seed, val_fraction)


def cifar100(root: str, download: bool = True, split_seed: int = 0, val_fraction: float = 0.1) -> Splits:
    """60,000 photographs of 100 kinds, (3, 32, 32). Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html."""
    norm = Normalize((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    return _splits(CIFAR100, norm, root, download, split_seed, val_fraction)


def _splits(kind: Kind, prepare: Normalize, root: str, download: bool, split_seed: int, val_fraction: float) -> Splits:
    """The published test split, and the published training split with validation carved off.

    Raises:
        MantaError: the files are absent or damaged and may not or cannot be fetched; or as `carve_fraction`.
    """
    folder = Path(root).expanduser().absolute()
    (inputs, targets, classes), (test_inputs, test_targets, _) = _ensure(kind, folder, download)
    rest, held = carve_fraction(targets, val_fraction, split_seed)
    return Splits(
        train=TensorSet(inputs[rest], targets[rest], prepare),
        val=TensorSet(inputs[held], targets[held], prepare),
        test=TensorSet(test_inputs, test_targets, prepare),
        classes=classes,
    )


Half = tuple[Tensor, Tensor, tuple[str, ...]]


def _read(kind: Kind, root: Path) -> tuple[Half, Half]:
    """Both halves (train, test) from disk: images (N, C, H, W) uint8, targets (N,) int64, class names."""
    halves: list[Half] = []
    for train in (True, False):
        half = kind(root, train=train)
        images, targets = torch.as_tensor(half.data), torch.as_tensor(half.targets)
        if len(images) != len(targets):
            raise ValueError(f"{len(images)} images but {len(targets)} labels")
        images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
        halves.append((images, targets, tuple(half.classes)))
    return halves[0], halves[1]


def _ensure(kind: Kind, root: Path, download: bool) -> tuple[Half, Half]:
    """Read what is there; where that fails, fetch it once whatever the number of processes, and read again.

    Damaged files may fail in any way, hence the broad excepts; every failure ends in one message.
    """
    try:
        return _read(kind, root)
    except Exception as error:
        if not download:
            raise _unavailable(kind, root, f"and data.download=false: {error}") from error
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{kind.__name__}.lock"):
            try:
                return _read(kind, root)  # another process was faster
            except Exception:
                _fetch(kind, root)
        return _read(kind, root)
    except Exception as error:
        raise _unavailable(kind, root, f"and fetching it failed: {error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock; one who waits says what for."""
    lock = FileLock(path)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=REMIND_S)
        except Timeout:
            log.warning("Waiting for another process to fetch data (it holds %s)", path)
    try:
        yield
    finally:
        lock.release()


def _fetch(kind: Kind, root: Path) -> None:
    """Download into a staging folder, then move file by file: nobody ever sees half a file. The lock must be held.

    Archives that lie under `root` already are used in place of a download if their checksums are right.
    """
    for abandoned in root.glob(f".{kind.__name__}-*"):  # by a process that was killed
        shutil.rmtree(abandoned)
    patience = socket.getdefaulttimeout()
    with TemporaryDirectory(dir=root, prefix=f".{kind.__name__}-") as folder:
        staging = Path(folder)
        for archive in _archives(kind):
            if (root / archive).is_file():
                (staging / archive).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / archive, staging / archive)
        socket.setdefaulttimeout(STALL_S)
        try:
            kind(staging, train=True, download=True)
        finally:
            socket.setdefaulttimeout(patience)
        for path in [path for path in staging.rglob("*") if path.is_file()]:
            final = root / path.relative_to(staging)
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, final)


def _archives(kind: Kind) -> list[Path]:
    """The downloads, relative to root."""
    if issubclass(kind, MNIST):
        return [Path(kind.__name__, "raw", name) for name, _ in kind.resources]
    return [Path(kind.filename)]


def _files(kind: Kind) -> list[Path]:
    """What must lie under root, relative to it."""
    if issubclass(kind, MNIST):
        return [path.with_suffix("") for path in _archives(kind)]
    names = [str(name) for name, _ in kind.train_list + kind.test_list] + [kind.meta["filename"]]
    return [Path(kind.base_folder, name) for name in names]


def _unavailable(kind: Kind, root: Path, why: str) -> MantaError:
    name, files = kind.__name__, _files(kind)
    missing = [path.name for path in files if not (root / path).is_file()]
    state = f"lacks {', '.join(missing)}" if missing else f"has damaged files ({', '.join(p.name for p in files)})"
    way_out = f"""python -c "from torchvision.datasets import {name}; {name}('data', download=True)\""""
    return MantaError(
        f"{name} cannot be read: {root / files[0].parent} {state}, {why}\n"
        f"Fetch it with 'data.download=true', or where there is a network with\n  {way_out}\n"
        "and copy that folder here: 'data.root=<folder>'."
    )
