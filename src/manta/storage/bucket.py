"""Objects below an s3:// path, of Amazon or of any server with the same API. pyarrow does the talking."""

import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

from pyarrow import fs

from manta.config import Storage
from manta.errors import MantaError

CONNECT_S, ANSWER_S = 5, 20
CHUNK_BYTES = 2**23
_KEYS = (
    "Its keys are those of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (environment or .env), else of ~/.aws or of the "
    "machine's role."
)


class Away(Exception):
    """The bucket could not be read or written; the message is short."""


class Bucket:
    """The objects of one `storage.path`."""

    def __init__(self, storage: Storage) -> None:
        self.url, self.endpoint = storage.path.rstrip("/"), endpoint_of(storage)
        self._base = self.url.removeprefix("s3://")
        self._files = fs.S3FileSystem(
            endpoint_override=self.endpoint,
            region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
            connect_timeout=CONNECT_S,
            request_timeout=ANSWER_S,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),  # who calls knows how long to try
            background_writes=False,
        )

    def put(self, key: str, content: bytes) -> None:
        try:
            with self._files.open_output_stream(self._path(key)) as stream:
                stream.write(content)
        except OSError as error:
            raise self._away(error) from error

    def put_file(self, key: str, source: Path, size: int | None = None) -> None:
        """Upload a file, or its first `size` bytes.

        Raises:
            Away: the bucket is.
            OSError: the file cannot be read.
        """
        with open(source, "rb") as file:
            chunk = file.read(CHUNK_BYTES if size is None else min(CHUNK_BYTES, size))
            try:
                stream = self._files.open_output_stream(self._path(key))
            except OSError as error:
                raise self._away(error) from error
            while chunk:
                try:
                    stream.write(chunk)
                except OSError as error:
                    raise self._away(error) from error
                size = None if size is None else size - len(chunk)
                chunk = file.read(CHUNK_BYTES if size is None else min(CHUNK_BYTES, size))
            try:
                stream.close()
            except OSError as error:
                raise self._away(error) from error

    def get(self, key: str) -> bytes | None:
        """None: there is no such object."""
        try:
            with self._files.open_input_stream(self._path(key)) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._away(error) from error

    def get_json(self, key: str) -> dict[str, Any]:
        found = json.loads(self.get(key) or b"{}")
        assert isinstance(found, dict)
        return found

    def get_file(self, key: str, target: Path) -> bool:
        """Download into a file; False if there is no such object."""
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            stream = self._files.open_input_stream(self._path(key))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._away(error) from error
        with stream, open(target, "wb") as file:
            while True:
                try:
                    chunk = stream.read(CHUNK_BYTES)
                except OSError as error:
                    raise self._away(error) from error
                if not chunk:
                    return True
                file.write(chunk)

    def list(self, key: str = "") -> dict[str, tuple[int, float]]:
        """Size and time of every object below a key, by its name from there."""
        start = self._path(key).rstrip("/")
        try:
            found = self._files.get_file_info(fs.FileSelector(start, recursive=True, allow_not_found=True))
        except OSError as error:
            raise self._away(error) from error
        return {
            each.path[len(start) + 1 :]: (each.size, each.mtime.timestamp())
            for each in found
            if each.type == fs.FileType.File
        }

    def remove(self, key: str) -> None:
        """An object, if it is there."""
        try:
            self._files.delete_file(self._path(key))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._away(error) from error

    def remove_folder(self, key: str) -> None:
        """All objects below a key."""
        try:
            self._files.delete_dir(self._path(key))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._away(error) from error

    def check(self) -> None:
        """Return if runs can be read and written there.

        Raises:
            MantaError: they cannot; it names the setting.
            Away: the server does not answer, or not as one of S3.
        """
        probe = f".probe-{uuid.uuid4().hex}"
        try:
            self.list(probe)
            self.put(probe, b"")
            self.remove(probe)
        except Away as error:
            if (message := self._refused(str(error))) is not None:
                raise MantaError(message) from error
            raise

    def _refused(self, why: str) -> str | None:
        start, name = f"storage.path={self.url}", self._base.partition("/")[0]
        if re.search(r"NO_SUCH_BUCKET|Bucket '.*' not found", why):
            at = f" at {self.endpoint}" if self.endpoint else ""
            return f"{start}: there is no bucket {name}{at}. Make it (aws s3 mb s3://{name}), or name another."
        if re.search(
            r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|INVALID_CLIENT_TOKEN|EXPIRED|HTTP status code: 403|status 403",
            why,
            re.I,
        ):
            return f"{start}: the server does not let these keys read and write there ({why}). {_KEYS}"
        if re.search(r"credentials", why, re.I):
            return f"{start}: there are no keys for it ({why}). {_KEYS}"
        return None

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}" if key else self._base

    def _away(self, error: OSError) -> Away:
        """What AWS's library said, without our paths and its request numbers."""
        text = " ".join(str(error).split())
        found = re.search(r"AWS Error (.+?) during \w+ operation: (.*?)(?: \(Request ID.*| Details: (.*))?$", text)
        return Away(f"{found[1]}: {found[3] or found[2]}".rstrip(":; ") if found else text[:200])


def endpoint_of(storage: Storage) -> str | None:
    """The address of the server; None: Amazon's."""
    return storage.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
