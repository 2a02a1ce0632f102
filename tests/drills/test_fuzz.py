"""Whatever is typed: exit code 0 or 2, no traceback, not longer than 20 s. What was found is a row of test_bad_inputs.py."""

import os
from pathlib import Path

import pytest

from tests.drills import fuzz


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 60), *(pytest.param(seed, 500, marks=[pytest.mark.drill, pytest.mark.timeout(3600)]) for seed in (1, 2, 3))],
)
def test_random_command_lines(tmp_path: Path, seed: int, count: int) -> None:
    """MANTA_FUZZ_SEED=<number> tries others."""
    seed += int(os.environ.get("MANTA_FUZZ_SEED", 0))
    results = fuzz.ask(tmp_path / "fuzz", seed=seed, count=count)
    assert len(results) == count
    assert {result["code"] for result in results} >= {0, 2}
    wrong = [f"{each['trouble']}: {each['arguments']}\n{each['output'][-3000:]}" for each in results if each["trouble"]]
    assert wrong == [], f"seed {seed}"
