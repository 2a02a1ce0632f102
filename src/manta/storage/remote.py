"""Runs of a bucket as others see them: finding and downloading them, and the mirror of one that trains."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from manta.config import Storage, absolute
from manta.errors import MantaError
from manta.runs import RunDir, is_locked, point_latest, short
from manta.storage.bucket import Away, Bucket, endpoint_of
from manta.storage.mirror import LINK, Mirror

Say = Callable[[str], None]
PARTIAL = ".partial"
"""In a directory that has only the small files of a run."""
SMALL_FILES = (
    "config.yaml",
    "status.json",
    "summary.json",
    "overrides.txt",
    "provenance.json",
    "space.yaml",
    "metrics.jsonl",
)
_RUN = re.compile(r"(s3://.+?)/(\d{4}-\d\d-\d\d/[^/]+)(/.+)?")
ADDED_S = 30.0
"""How long a script waits at most for a bucket that is away."""
TELL_S = 3.0
"""After which the end of a run says what it waits for."""


def key_of(run: RunDir, storage: Storage) -> str | None:
    """Where a run directory belongs in the bucket; None: not there."""
    root = storage.folder.resolve()
    path = run.path.resolve()
    return path.relative_to(root).as_posix() if storage.is_remote and path.is_relative_to(root) else None


def url_of(run: RunDir, storage: Storage) -> str | None:
    key = key_of(run, storage)
    return None if key is None else f"{storage.path.rstrip('/')}/{key}"


def upload_command(run: RunDir) -> str:
    return f"python scripts/runs.py upload {run}"


def check(storage: Storage, has_copy: bool, say: Say) -> None:
    """Before a launch: return if its runs can be kept in the bucket.

    Args:
        has_copy: the run is here and goes on also while the bucket is away.

    Raises:
        MantaError: the bucket is not there, the keys are wrong, or the server does not answer.
    """
    try:
        Bucket(storage).check()
    except Away as error:
        where = (
            f"storage.endpoint_url={endpoint_of(storage)}" if endpoint_of(storage) else f"storage.path={storage.path}"
        )
        if not has_copy:
            raise MantaError(
                f"{where}: no S3 server answers there ({error}). Check the address and the network, or train with results "
                "here and no bucket: storage.path=outputs"
            ) from error
        say(f"Storage {storage.path} does not answer ({error}). Training goes on with what is here, retrying.")


# --- finding -----------------------------------------------------------------------------------------------------


def find(spec: str, storage: Storage, key: str) -> Path | None:
    """The directory of the run that is meant, downloaded if it is not here, or not as new; None if there is none.

    Args:
        spec: `latest`, an s3:// address, or a path below the storage's.

    Raises:
        MantaError: the bucket cannot be read, and it is not here.
    """
    part = ""
    if match := _RUN.fullmatch(spec.rstrip("/")):
        storage, name, part = replace(storage, path=match[1]), match[2], match[3] or ""
    elif spec.startswith("s3://"):
        raise MantaError(f"{key}={spec} is not the address of a run: s3://bucket/folder/<date>/<time>.")
    elif spec == "latest":
        name = _latest(storage)
    else:
        name = spec.strip("/")
    if not name:
        return None
    path = newest(RunDir(storage.folder / name), storage).path
    return Path(f"{path}{part}") if path.is_dir() else None


def _latest(storage: Storage) -> str:
    """Names begin with the time, so the greater one is the newer."""
    latest = storage.folder / "latest"
    here = latest.resolve().relative_to(storage.folder.resolve()).as_posix() if latest.exists() else ""
    try:
        there = (Bucket(storage).get(f"latest{LINK}") or b"").decode()
    except Away as error:
        if not here:
            raise _unreadable(storage, error) from error
        there = ""
    return max(here, there)


def newest(run: RunDir, storage: Storage) -> RunDir:
    """A run as it was last trained: as it is here, or as it is in the bucket, which is then downloaded.

    What is here and was never brought to the bucket is kept beside, under another name.

    Raises:
        MantaError: it is only in the bucket, and that cannot be read.
    """
    key = key_of(run, storage)
    if key is None or (run.path.is_dir() and is_locked(run)):
        return run
    complete = run.path.is_dir() and not (run.path / PARTIAL).exists()
    bucket = Bucket(storage)
    try:
        there = bucket.get_json(f"{key}/status.json")
        if there and not (complete and _age(run.read("status.json")) >= _age(there)):
            download(bucket, key, run)
            _mend_latest(storage, key)
    except Away as error:
        if not complete:
            raise _unreadable(storage, error) from error
        print(f"Storage {storage.path} does not answer ({error}): taking {run} as it is here.", flush=True)
    return run


def _age(status: dict[str, Any]) -> tuple[int, str]:
    return int(status.get("attempts", 0)), str(status.get("attempt_started", ""))


def _unreadable(storage: Storage, error: Away) -> MantaError:
    at = f" at {endpoint_of(storage)}" if endpoint_of(storage) else ""
    return MantaError(
        f"{storage.path}{at} cannot be read ({error}). Check storage.path, storage.endpoint_url and the keys in "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
    )


def download(bucket: Bucket, key: str, run: RunDir, only: Iterable[str] | None = None) -> None:
    """A run directory from the bucket, in one step.

    Args:
        only: names of its files; None: all.
    """
    new = run.path.with_name(f".downloading-{run.path.name}-{os.getpid()}")
    try:
        for _ in range(3):  # somebody may be training it, and retire a checkpoint meanwhile
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            _fill(bucket, key, new, only)
            if only is not None or all(path.exists() for path in new.rglob("checkpoints/*")):
                break
        if run.path.exists():
            _put_aside(run)
        new.rename(run.path)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    if only is None:
        Mirror(run.path, bucket, key).take_as_there()


def _fill(bucket: Bucket, key: str, folder: Path, only: Iterable[str] | None) -> None:
    """Names before contents: whatever `last` names was brought to the bucket before it."""

    def get(name: str) -> None:
        target = folder / name
        if name.endswith(LINK):
            content = bucket.get(f"{key}/{name}")
            if content is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.with_name(target.name.removesuffix(LINK)).symlink_to(content.decode())
        elif bucket.get_file(f"{key}/{name}", target):
            os.utime(target, (listed[name][1],) * 2)

    listed = bucket.list(key)
    names = sorted(listed, key=lambda name: (not name.endswith(LINK), name))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(get, [name for name in names if only is None or name in only]))
    if only is not None:
        (folder / PARTIAL).touch()


def _put_aside(run: RunDir) -> None:
    """An older copy goes, unless it has something that never came to the bucket."""
    mirror = Mirror(run.path, None, "")  # type: ignore[arg-type]
    if (run.path / PARTIAL).exists() or not mirror.missing():
        shutil.rmtree(run.path)
        return
    kept, count = run.path.with_name(f"older-{run.path.name}"), 1
    while kept.exists():
        count += 1
        kept = run.path.with_name(f"older-{run.path.name}-{count}")
    run.path.rename(kept)
    print(f"{run} is newer in the bucket. What was here is kept as {short(kept)}.", flush=True)


def refresh(storage: Storage) -> Path:
    """What lists of runs show, of all runs in the bucket; the folder where it is.

    Raises:
        MantaError: the bucket cannot be read, and there is nothing of it here.
    """
    bucket = Bucket(storage)
    try:
        listed = bucket.list()
        for name in [name for name in listed if re.fullmatch(r"\d{4}-\d\d-\d\d/[^/]+/status\.json", name)]:
            key = name.removesuffix("/status.json")
            run = RunDir(storage.folder / key)
            partial = (run.path / PARTIAL).exists()
            if not run.path.exists() or (partial and (run.path / "status.json").stat().st_mtime < listed[name][1]):
                download(bucket, key, run, SMALL_FILES)
        _mend_latest(storage, (bucket.get(f"latest{LINK}") or b"").decode())
    except Away as error:
        if not storage.folder.is_dir():
            raise _unreadable(storage, error) from error
        print(f"{storage.path} cannot be read ({error}): this is what is here.", file=sys.stderr, flush=True)
    return storage.folder


def _mend_latest(storage: Storage, name: str) -> None:
    link, run = storage.folder / "latest", storage.folder / name
    of_its_own = re.fullmatch(r"\d{4}-\d\d-\d\d/[^/]+", name)
    if of_its_own and run.is_dir() and (not link.exists() or link.resolve() < run.resolve()):
        point_latest(storage.folder, run)


# --- the mirror of a run that trains -------------------------------------------------------------------------------


class Following:
    """The process that brings a run to the bucket, seen by the one that trains."""

    def __init__(self, run: RunDir, storage: Storage, say: Say) -> None:
        key = key_of(run, storage)
        assert key is not None
        self.run, self.storage, self.say = run, storage, say
        self.whole = False
        arguments = {"run": str(run.path), "key": key, "storage": asdict(storage)}
        with open(run.path / ".mirror.log", "a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "manta.storage.mirror", json.dumps(arguments)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if isinstance(said, str):
                self.say(said)
            else:
                self.whole = said

    def end(self, say: Say) -> bool:
        """Wait for what is not there yet; whether all of it is now. Says so if not.

        Args:
            say: must not write into the run directory, which has to hold still now.
        """
        assert self._process.stdin is not None
        self.say = say
        with suppress(OSError):
            self._process.stdin.close()
        url, began, told = url_of(self.run, self.storage), time.monotonic(), False
        with suppress(KeyboardInterrupt):  # enough of waiting; how the run ended stays as it was
            while self._listener.is_alive():
                self._listener.join(0.1)
                if not told and time.monotonic() - began > TELL_S:
                    self.say(f"Waiting for the rest to reach {url} (storage.finish_s={self.storage.finish_s:g}).")
                    told = True
            self._process.wait()
        if not self.whole:
            self.say(
                f"{url} does not have all of this run. Nothing is lost, it is in {self.run}. "
                f"Later: {upload_command(self.run)}"
            )
        return self.whole


def bring_back(run: RunDir, storage: Storage, say: Say) -> None:
    """What was added to a run, or to a part of it, after it was trained."""
    storage = replace(storage, path=absolute(storage.path), cache=absolute(storage.cache))
    key = key_of(run, storage)
    if key is not None:
        whole = RunDir(storage.folder.joinpath(*Path(key).parts[:2]))
        if not is_locked(whole):  # else its own process does
            upload(whole, replace(storage, finish_s=min(storage.finish_s, ADDED_S)), say)


def upload(run: RunDir, storage: Storage, say: Say) -> bool:
    """Bring what is not in the bucket yet; whether all of it is there now."""
    mirror = Mirror(run.path, None, "")  # type: ignore[arg-type]
    return not mirror.missing() or Following(run, storage, say).end(say)
