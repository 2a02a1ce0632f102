"""The `.env` file: secrets and machine settings beside train.py. What the environment already has wins."""

import io
import os
import shlex
import sys
from pathlib import Path

from manta.errors import MantaError


def load_env_file(path: Path) -> None:
    """Put the file's variables into the environment; no file is fine.

    Raises:
        MantaError: naming the file and line, never its content, which may be a secret.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise MantaError(f"{path} cannot be read: {error.strerror}. Make it a readable file, or remove it.") from error
    if raw.strip() and path.stat().st_mode & 0o044:
        print(
            f"Warning: {path} holds secrets and others can read it. Close it: chmod 600 {shlex.quote(str(path))}",
            file=sys.stderr,
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise MantaError(f"{path}, line {line} is not UTF-8 text. Save the file as UTF-8.") from None
    from dotenv import dotenv_values
    from dotenv.parser import parse_stream

    for binding in parse_stream(io.StringIO(text)):
        lines = binding.original.string
        line = binding.original.line + len(lines[: len(lines) - len(lines.lstrip())].splitlines())
        if binding.error or "\0" in lines or (binding.key is not None and binding.value is None):
            raise MantaError(f"{path}, line {line} cannot be read. Write NAME=value, one a line; # starts a comment.")
    for name, value in dotenv_values(stream=io.StringIO(text)).items():
        os.environ.setdefault(name, value or "")
