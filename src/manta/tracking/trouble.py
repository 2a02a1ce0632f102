"""What a tracker's error means, in one line."""

import os
import re

from manta.config import Config, absolute
from manta.tracking import without_secrets

LONGEST = 300
_CAUSES = (
    r"\[Errno -?\d+\] ([^'\")\]]+)",  # of the system: connection refused, name or service not known
    r"(timed out)",
    r"(certificate verify failed)",
)


def explain(error: Exception, name: str, config: Config) -> str:
    """Who does not answer and why, without the pages around it."""
    text = str(error).strip() or type(error).__name__
    text = re.sub(r"\s*\(Background on this error at: .*?\)", "", text)
    if name == "mlflow":
        return _of_mlflow(text, config)
    return _first_line(text)


def _of_mlflow(text: str, config: Config) -> str:
    from manta.tracking.mlflow import tracking_uri

    uri = without_secrets(tracking_uri(config))
    if uri.startswith("http") and (cause := _cause(text)):
        return f"no answer from {uri} ({cause}); {origin(config)}"
    database = re.match(r"sqlite:///(.*)", uri)
    if database is None:
        return _first_line(text)
    file = absolute(database[1])
    if re.search(r"table \w+ already exists|No such table|no such table|Can't locate revision", text):
        return f"the database {file} is half made ({_first_line(text)}). If it has no other runs, delete it: rm {file}"
    if not os.path.isdir(os.path.dirname(file)):
        return f"the folder of {file} does not exist; {origin(config)}"
    return f"{_first_line(text)}; {file}"


def origin(config: Config) -> str:
    """Where the address of MLflow comes from."""
    if config.tracking.mlflow.tracking_uri:
        return "it is tracking.mlflow.tracking_uri of the run"
    return "it is MLFLOW_TRACKING_URI" if os.environ.get("MLFLOW_TRACKING_URI") else "it lies under storage.path"


def _cause(text: str) -> str | None:
    found = next((found for cause in _CAUSES if (found := re.search(cause, text))), None)
    return found[1].strip().lower() if found else None


def _first_line(text: str) -> str:
    return text.splitlines()[0].strip()[:LONGEST]
