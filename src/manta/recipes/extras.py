"""Frameworks that a recipe may need; none is installed with Manta, none is imported unless its recipe is chosen."""

import os
from importlib.util import find_spec

from manta.errors import MantaError


def needs(recipe: str, *packages: str) -> None:
    """Call it before the first import.

    Raises:
        MantaError: a package is not installed.
    """
    for package in packages:
        if find_spec(package) is None:
            raise MantaError(f"recipe={recipe} needs {package}, which is not installed: pip install -e '.[{recipe}]'")


def use_device(kind: str) -> None:
    """Before DeepSpeed is imported, which Accelerate does wherever it is installed: the device of this process, "cpu" or "cuda".

    Else it looks for one, and warns on standard output if there is none but the CPU.
    """
    os.environ["DS_ACCELERATOR"] = kind
