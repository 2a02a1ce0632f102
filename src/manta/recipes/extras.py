"""Frameworks that only some recipes need."""

from importlib.util import find_spec

from manta.errors import MantaError


def needs(recipe: str, *packages: str) -> None:
    """Before a recipe imports what it is about.

    Raises:
        MantaError: a package is not installed.
    """
    for package in packages:
        if find_spec(package) is None:
            raise MantaError(f"recipe={recipe} needs {package}, which is not installed: pip install -e '.[{recipe}]'")
