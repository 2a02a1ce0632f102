"""Time to the first useful moment, against the smallest programs that do the same; medians of alternating runs.

    python benchmarks/startup.py

Budgets: `train.py --cfg job` within 0.3 s of the smallest Hydra program; an in-process run reaches its first step within
1.5 s of a bare PyTorch script; fit() on two workers takes at most 0.6 times what it takes with Ray's own defaults (its
dashboard, which competes for the cores, among them).
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAIN = str(ROOT / "train.py")

HYDRA = """
import hydra
@hydra.main(version_base="1.3", config_path=None)
def main(cfg): ...
main()
"""

BARE = """
import torch
from sklearn.datasets import load_digits
digits = load_digits()
inputs, targets = torch.tensor(digits.images, dtype=torch.float32).flatten(1), torch.tensor(digits.target)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.nn.functional.cross_entropy(model(inputs[:64]), targets[:64]).backward()
optimizer.step()
"""

RAY = """
import time, ray, ray.train
from ray.train.torch import TorchTrainer
ray.init(address="local", num_cpus=2)
started = time.perf_counter()
TorchTrainer(lambda: None, scaling_config=ray.train.ScalingConfig(num_workers=2),
             run_config=ray.train.RunConfig(name="x", storage_path="{folder}")).fit()
print("fit", time.perf_counter() - started)
"""

OURS = """
import time
from pathlib import Path
from manta.cluster import connect
from manta.config import Cluster, Config
from manta.workers import on_workers
from manta.plan import Needs
from manta.runs import RunDir
from manta.view import View
def nothing(session, config): pass
import ray.train.torch
with connect(Cluster(num_cpus=2)):
    started = time.perf_counter()
    on_workers(Config(), RunDir(Path("{folder}")), Needs(2, False, dict(CPU=1)), View(), nothing, dict())
    print("fit", time.perf_counter() - started)
"""


def seconds(*command: str) -> float:
    """Of the whole program, or what it says of its fit()."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *(part.format(folder=folder) for part in command)], check=False, capture_output=True, text=True
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        said = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("fit ")]
        return float(said[0]) if said else time.perf_counter() - started


def compare(name: str, rounds: int, ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[float, float]:
    """(median difference, median ratio) of two commands run in turn."""
    pairs = [(seconds(*ours), seconds(*theirs)) for _ in range(rounds)]
    difference = statistics.median(a - b for a, b in pairs)
    ratio = statistics.median(a / b for a, b in pairs)
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"{name:34} manta {a:6.2f} s  other {b:6.2f} s  difference {difference:+.2f} s  ratio {ratio:.2f}", flush=True
    )
    return difference, ratio


def main() -> None:
    where = "storage.path={folder}"
    one_step = (TRAIN, where, "training.max_steps=1", "training.limit_eval_batches=1", "training.test=false")
    seconds(TRAIN, "--cfg", "job"), seconds("-c", BARE)
    cfg, _ = compare("--cfg job / smallest Hydra program", 5, (TRAIN, "--cfg", "job"), ("-c", HYDRA))
    first, _ = compare("one step in process / bare script", 5, (*one_step, "scaling=in_process"), ("-c", BARE))
    _, launch = compare("fit() of nothing / Ray's defaults", 3, ("-c", OURS), ("-c", RAY))
    sys.exit(cfg > 0.3 or first > 1.5 or launch > 0.6)


if __name__ == "__main__":
    main()
