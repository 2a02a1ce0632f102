"""Frameworks that are extras: said when one is missing, and left alone unless it is chosen."""

import subprocess
import sys

import pytest

from manta.errors import FINISHED, INVALID
from tests.conftest import ROOT, Lab

EXTRAS = ("accelerate", "deepspeed", "lightgbm", "lightning", "transformers", "xgboost")


def run(before: str, after: str, *settings: str) -> "subprocess.CompletedProcess[str]":
    """`train.py` between lines of Python, in a process of its own."""
    program = (
        f"import importlib.util, runpy, sys\n{before}\nsys.argv = ['train.py', *{settings!r}]\n"
        f"try:\n    runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\nfinally:\n    {after}\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("recipe", EXTRAS)
def test_the_package_is_missing(lab: Lab, recipe: str) -> None:
    """One line with the command that installs it."""
    hidden = (
        f"find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name == {recipe!r} else find(name, *rest)"
    )
    done = run(hidden, "pass", f"recipe={recipe}", "scaling=in_process", f"storage.path={lab.folder}")
    message = f"Error: recipe={recipe} needs {recipe}, which is not installed: pip install -e '.[{recipe}]'\n"
    assert (done.returncode, done.stderr) == (INVALID, message)
    assert not list(lab.folder.iterdir())


@pytest.mark.recipes
def test_none_is_imported_unless_chosen(lab: Lab) -> None:
    said = f"print('IMPORTED', sorted({set(EXTRAS)!r} & set(sys.modules)))"
    quick = ("scaling=in_process", f"storage.path={lab.folder}", "training.epochs=1")
    done = run("", said, *quick, "tracking=all", "tracking.wandb.mode=offline", "tracking.finish_s=200")
    assert done.returncode == FINISHED, done.stderr
    assert "IMPORTED []" in done.stdout
    done = run("", said, *quick, "recipe=xgboost")
    assert "IMPORTED ['xgboost']" in done.stdout
