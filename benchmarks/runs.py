"""scripts/runs.py over 1,000 runs, against parsing each config.yaml as a whole; medians of alternating runs.

    python benchmarks/runs.py [number of runs]

Budget: `list` of 1,000 runs in two seconds from the shell, imports included.
"""

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir

from manta.config import from_hydra, register

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 5
BUDGET_S = 2.0

WHOLE = """
import sys, yaml
from pathlib import Path
for path in Path(sys.argv[1]).glob("*/*/config.yaml"):
    yaml.load(path.read_text(), yaml.CSafeLoader)
"""


def make_runs(storage: Path, count: int) -> None:
    """Runs as train.py leaves them, without checkpoints: three models, learning rates that never repeat, five seeds."""
    register()
    texts = {}
    for model in ("mlp", "cnn", "vit"):
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = from_hydra(compose("config", [f"model={model}", "optimizer.lr=0.123", f"storage.path={storage}"]))
        texts[model] = yaml.safe_dump(asdict(config), sort_keys=False)
    draw, moment = random.Random(0), datetime(2026, 1, 1, tzinfo=timezone.utc)
    for number in range(count):
        moment += timedelta(minutes=draw.uniform(2, 60))
        run = storage / f"{moment:%Y-%m-%d}" / f"{moment:%H-%M-%S}"
        run.mkdir(parents=True)
        model, lr, seed = draw.choice(list(texts)), f"{10 ** draw.uniform(-4, -1):.6g}", number % 5
        text = texts[model].replace("lr: 0.123", f"lr: {lr}").replace("\nseed: 0", f"\nseed: {seed}")
        (run / "config.yaml").write_text(text.replace("group: null", f"group: sweep-{number // 50}"))
        (run / "overrides.txt").write_text(f"model={model} optimizer.lr={lr} seed={seed} group=sweep-{number // 50}\n")
        times = {"started": moment.isoformat(), "attempt_started": moment.isoformat()}
        ended = {"finished": (moment + timedelta(minutes=2)).isoformat(), "attempts": 1, "host": "here", "pid": 1}
        state = draw.choice(["finished"] * 8 + ["failed", "interrupted"])
        (run / "status.json").write_text(json.dumps({"state": state, **times, **ended, "error": None, "exit_code": 0}))
        metrics = {"val/loss": draw.random(), "val/accuracy": draw.random(), "train/loss": draw.random()}
        objective = {"metric": "val/accuracy", "mode": "max", "value": metrics["val/accuracy"]}
        best = {"epoch": 9, "step": 207, "checkpoint": "checkpoints/step-00000207", "metrics": metrics}
        summary = {"state": state, "objective": objective, "metrics": metrics, "best": best, "test": {}}
        (run / "summary.json").write_text(json.dumps(summary))


def forget(folder: Path) -> None:
    """Have the files on disk only, as after a reboot."""
    os.sync()
    for path in folder.glob("*/*/*"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds on the clock, and of the processor."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as folder:
        make_runs(Path(folder), count)
        runs = [str(ROOT / "scripts" / "runs.py"), "--storage", folder]
        commands = {
            "list": [*runs, "list"],
            "list --where model=cnn --sort objective": [*runs, "list", "--where", "model=cnn", "--sort", "objective"],
            "list --limit 20": [*runs, "list", "--limit", "20"],
            "table": [*runs, "table"],
            "latest": [*runs, "latest"],
            "every config.yaml parsed as a whole": ["-c", WHOLE, folder],
        }
        measure(commands["list"])
        forget(Path(folder))
        first = measure(commands["list"])
        print(f"list, files on disk only: {first[0]:.2f} s, {first[1]:.2f} s of the processor")
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(REPEATS):
            for name, command in commands.items():
                found[name].append(measure(command))
        for name, pairs in found.items():
            wall, processor = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(f"{name}: {wall:.2f} s, {processor:.2f} s of the processor")
        return int(statistics.median(wall for wall, _ in found["list"]) > BUDGET_S * count / 1000)


if __name__ == "__main__":
    sys.exit(main())
