"""What a command loads: nothing before it is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


def loaded(folder: Path, *arguments: str) -> set[str]:
    """Top-level packages that `python train.py <arguments>` imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "train.py"), *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--cfg", "job"), ("--info", "defaults"), ("model=vit", "--cfg", "job", "--resolve")]
)
def test_looking_at_the_configuration(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert loaded(tmp_path, *arguments).isdisjoint({"torch", "ray", "numpy", "wandb", "mlflow", "altair"})
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_this_process_never_loads_ray(tmp_path: Path) -> None:
    found = loaded(tmp_path, "scaling=in_process", "training.epochs=1")
    assert "torch" in found
    assert found.isdisjoint({"ray", "wandb", "mlflow", "sklearn", "torchvision", "pandas", "altair", "vl_convert"})
    assert (tmp_path / "outputs" / "latest" / "summary.json").is_file()
