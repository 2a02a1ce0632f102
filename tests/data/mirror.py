"""Small data sets in their real file formats, served from a loopback mirror to the real torchvision classes.

Also a program, for the tests that need several processes: python mirror.py NAME ROOT URL FOLDER loads data set NAME
from the mirror and prints a digest of what it got.
"""

import gzip
import hashlib
import io
import pickle
import struct
import sys
import tarfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
from torchvision import datasets

CLASSES = {
    "mnist": datasets.MNIST,
    "fashion_mnist": datasets.FashionMNIST,
    "kmnist": datasets.KMNIST,
    "cifar10": datasets.CIFAR10,
    "cifar100": datasets.CIFAR100,
}
TRAIN, TEST = 100, 20


def pixels(name: str, count: int, seed: int) -> np.ndarray:
    shape = (count, 3072) if name.startswith("cifar") else (count, 28, 28)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def labels(name: str, count: int) -> list[int]:
    return [number % (100 if name == "cifar100" else 10) for number in range(count)]


def idx(array: np.ndarray) -> bytes:
    """Yann LeCun's IDX format: 0, 0, type (8 = uint8), dimensions, big-endian sizes, values."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path, name: str) -> None:
    for part, count, seed in (("train", TRAIN, 1), ("t10k", TEST, 2)):
        for kind, array in (
            ("images-idx3", pixels(name, count, seed)),
            ("labels-idx1", np.array(labels(name, count), np.uint8)),
        ):
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(array), mtime=0))


def write_cifar(folder: Path, name: str) -> None:
    cls = CLASSES[name]
    key, kinds = ("fine_labels", 100) if name == "cifar100" else ("labels", 10)
    images, targets = pixels(name, TRAIN, 1), labels(name, TRAIN)
    files, share = {}, TRAIN // len(cls.train_list)
    for number, (part, _) in enumerate(cls.train_list):
        rows = slice(number * share, (number + 1) * share)
        files[part] = {"data": images[rows], key: targets[rows]}
    files[cls.test_list[0][0]] = {"data": pixels(name, TEST, 2), key: labels(name, TEST)}
    files[cls.meta["filename"]] = {cls.meta["key"]: [f"kind {number}" for number in range(kinds)]}
    with tarfile.open(folder / cls.filename, "w:gz") as archive:
        for part, content in files.items():
            data = pickle.dumps(content)
            (folder / part).write_bytes(data)
            entry = tarfile.TarInfo(f"{cls.base_folder}/{part}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def point(setattr_, name: str, folder: Path, url: str) -> None:
    """Make the torchvision class fetch from `url`, and expect the checksums of the files in `folder`."""
    cls = CLASSES[name]
    if name.startswith("cifar"):
        for attribute in ("train_list", "test_list"):
            setattr_(cls, attribute, [[part, md5(folder / part)] for part, _ in getattr(cls, attribute)])
        setattr_(cls, "meta", {**cls.meta, "md5": md5(folder / cls.meta["filename"])})
        setattr_(cls, "url", f"{url}/{cls.filename}")
        setattr_(cls, "tgz_md5", md5(folder / cls.filename))
    else:
        setattr_(cls, "mirrors", [f"{url}/"])
        setattr_(cls, "resources", [(part, md5(folder / part)) for part, _ in cls.resources])


class Mirror:
    """An HTTP server of `folder` on a free loopback port; `gets` are the paths asked for."""

    def __init__(self, folder: Path) -> None:
        self.gets: list[str] = []
        gets = self.gets

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self):
                # torchvision asks twice: to follow redirects (a GET with a header "Method: HEAD"), then for the file.
                if self.headers.get("Method") != "HEAD":
                    gets.append(self.path.lstrip("/"))
                super().do_GET()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def digest(splits) -> str:
    parts = (splits.train, splits.val, splits.test)
    return hashlib.md5(b"".join(p.inputs.numpy().tobytes() + p.targets.numpy().tobytes() for p in parts)).hexdigest()


if __name__ == "__main__":
    name, root, url, folder = sys.argv[1:]
    from manta.data import vision

    point(setattr, name, Path(folder), url)
    print("ready", flush=True)
    sys.stdin.readline()  # the test lets all go at once
    print(digest(getattr(vision, name)(root)))
