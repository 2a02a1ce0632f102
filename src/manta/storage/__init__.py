"""Runs in a bucket (storage.path=s3://...): they live in a folder of this machine, and a mirror of it follows in the bucket.

`bucket` is the only part that loads pyarrow, `mirror` the process that uploads, `remote` what others call.
"""

from collections.abc import Callable

from manta.config import Storage
from manta.runs import RunDir


def bring_back(run: RunDir, storage: Storage, say: Callable[[str], None]) -> None:
    """After something was added to a run directory that is not being trained: to its bucket, if it has one."""
    if storage.is_remote:
        from manta.storage.remote import bring_back

        bring_back(run, storage, say)
