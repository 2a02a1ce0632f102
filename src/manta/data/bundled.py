"""Files that ship with scikit-learn, found without importing it (which takes 1.1 to 1.4 s here)."""

from importlib.util import find_spec
from pathlib import Path

from manta.errors import MantaError


def bundled(data: str, name: str) -> Path:
    """A file of sklearn.datasets.

    Raises:
        MantaError: scikit-learn is not installed; says so of `data`, the option.
    """
    spec = find_spec("sklearn")
    path = Path(spec.origin).parent / "datasets" / "data" / name if spec and spec.origin else None
    if path is None or not path.is_file():
        raise MantaError(
            f"data={data} reads what ships with scikit-learn, which is not installed: pip install scikit-learn"
        )
    return path
