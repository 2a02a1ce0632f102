"""A Ray of our own: it listens on loopback only, and its folder goes when it does, or later if its driver was killed.

Imports nothing heavy.
"""

import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

MARK = "manta.lock"
"""In Ray's session folder: ours, and locked for as long as the process lives that started this Ray."""

# Ray's switch for macOS and Windows, where it has always kept to 127.0.0.1; `_node_ip_address` is resolved away from it.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@contextmanager
def on_loopback() -> Iterator[None]:
    """What Ray and torch.distributed start in here listens on 127.0.0.1, in all processes that inherit our environment."""
    if not sys.platform.startswith("linux"):
        yield
        return
    from ray._private import ray_constants

    before = {name: os.environ.get(name) for name in LOOPBACK}, ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(LOOPBACK)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        for name, value in before[0].items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        ray_constants.ENABLE_RAY_CLUSTER = before[1]


@contextmanager
def session_folder() -> Iterator[None]:
    """Of the Ray that has just been started: ours while in here, then gone. Those of killed launches go too."""
    import ray

    node: Any = ray._private.worker._global_node
    folder = Path(node.get_session_dir_path())
    remove_sessions(folder.parent)
    with open(folder / MARK, "w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        try:
            yield
        finally:
            ray.shutdown()
            _remove(folder)


def remove_sessions(temporary: Path | None = None) -> list[Path]:
    """Remove the folders of our own Rays whose launch was killed; never one that a living process uses or others made."""
    temporary = (
        temporary or Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"
    )  # as Ray has it
    removed = []
    for mark in temporary.glob(f"session_*/{MARK}"):
        folder = mark.parent
        with suppress(OSError), open(mark, "r+") as file:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not _lock(file):
                continue
            for process in _processes(folder):  # agents wait for minutes for a Ray that is gone
                os.kill(process, signal.SIGKILL)
            _remove(folder)
            removed.append(folder)
    return removed


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _processes(session: Path) -> Iterator[int]:
    """Ray's own that have a file of this session open; who only looks at its logs is left alone."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name = Path(os.readlink(process / "exe")).name
            ours = name in ("raylet", "gcs_server") or name.startswith("python")
            files = (os.readlink(file) for file in (process / "fd").iterdir()) if ours else ()
            if int(process.name) != os.getpid() and any(
                file.startswith(f"{session}/") for file in files if not file.endswith(MARK)
            ):
                yield int(process.name)


def _remove(folder: Path) -> None:
    latest = folder.parent / "session_latest"
    with suppress(OSError):
        if os.readlink(latest) in (str(folder), folder.name):
            latest.unlink()
    shutil.rmtree(folder, ignore_errors=True)
