"""Frameworks that a recipe may need; none is installed with Manta, none is imported unless its recipe is chosen."""

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
