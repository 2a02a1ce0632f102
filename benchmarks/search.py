"""What a trial costs beyond its own training, and whether the driver's memory grows.

    python benchmarks/search.py            # some minutes; the pattern of a TorchTrainer in every trial is most of it
    python benchmarks/search.py memory     # 1,000 trials

With Hydra's Optuna sweeper on PYTHONPATH (docs/log.md says how to install it beside this Hydra) it is measured too.

Budgets: a trial of one worker costs at most 0.3 s on 2 cores, and a hundredth of a TorchTrainer built in every trial.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
TRIVIAL = ("training.max_steps=1", "training.limit_eval_batches=1", "training.test=false", "search.refit=false")

NESTED = """
import sys, time, ray, ray.train, ray.tune
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
def trial(config):
    TorchTrainer(lambda: ray.train.report(dict(x=1.0)), scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(name=ray.tune.get_context().get_trial_id(), storage_path="{folder}/train",
                                       callbacks=[TuneReportCallback()])).fit()
ray.init(address="local", num_cpus=4)
for count in (2, 6):
    started = time.perf_counter()
    ray.tune.Tuner(ray.tune.with_resources(trial, dict(cpu=0.01)), param_space=dict(lr=ray.tune.uniform(0, 1)),
        tune_config=ray.tune.TuneConfig(num_samples=count, max_concurrent_trials=2),
        run_config=ray.tune.RunConfig(storage_path="{folder}/tune", verbose=0)).fit()
    print("took", count, time.perf_counter() - started)
"""


def seconds(*arguments: str) -> float:
    """Of one train.py."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, str(ROOT / "train.py"), f"storage.path={folder}", *arguments],
            check=True,
            capture_output=True,
        )
        return time.perf_counter() - started


def marginal(few: int, many: int, *arguments: str) -> float:
    """Seconds a trial, between searches of few and of many."""
    times = [seconds(f"search.num_samples={count}", *arguments) for count in (few, many)]
    return (times[1] - times[0]) / (many - few)


def nested() -> float:
    """Seconds a trial where each builds a TorchTrainer, as Ray's guide does."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", NESTED.format(folder=folder)], check=True, capture_output=True, text=True
        )
    few, many = (float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("took"))
    return (many - few) / 4


def sweeper() -> float | None:
    """Seconds a trial of Hydra's Optuna sweeper, whose jobs train one after the other in one process; None = not there."""
    if importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
        return None
    space = ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "data.batch_size=choice(32,64,128)", "scaling=in_process")
    sweeper = ("hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", *space, *TRIVIAL[:3])
    times = [seconds(*sweeper, f"hydra.sweeper.n_trials={count}", "-m") for count in (4, 24)]
    return (times[1] - times[0]) / 20


def memory(count: int = 1000) -> None:
    """The driver's memory as trials go by."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), f"storage.path={folder}", "search=random"]
        process = subprocess.Popen([*command, f"search.num_samples={count}", *TRIVIAL], stdout=subprocess.DEVNULL)
        driver, log, shown, began = (
            psutil.Process(process.pid),
            Path(folder) / "latest" / "search.jsonl",
            0,
            time.time(),
        )
        while process.poll() is None:
            time.sleep(0.5)
            ended = sum('"ended"' in line for line in log.read_text().splitlines()) if log.exists() else 0
            if ended >= shown + 100:
                shown = ended - ended % 100
                rss = driver.memory_info().rss / 2**20
                print(f"{ended:5} trials  {rss:7.1f} MiB  {time.time() - began:6.1f} s", flush=True)
        found = json.loads((Path(folder) / "latest" / "summary.json").read_text())["trials"]
        print(found, f"{time.time() - began:.1f} s in all")


def main() -> None:
    if "memory" in sys.argv:
        memory()
        return
    seconds("search=random", "search.num_samples=2", *TRIVIAL)
    ours = marginal(4, 40, "search=random", *TRIVIAL)
    print(f"one worker, in the trial's own process     {ours:6.2f} s a trial", flush=True)
    several = marginal(2, 10, "search=random", "scaling=cpu", "search.max_concurrent_trials=1", *TRIVIAL)
    print(f"two workers, started once                  {several:6.2f} s a trial", flush=True)
    hydra = sweeper()
    if hydra is not None:
        print(f"Hydra's Optuna sweeper, in one process     {hydra:6.2f} s a trial  ({hydra / ours:.1f}x)", flush=True)
    theirs = nested()
    print(f"a TorchTrainer built in every trial        {theirs:6.2f} s a trial  ({theirs / ours:.0f}x)", flush=True)
    sys.exit(ours > 0.3 or theirs / ours < 100)


if __name__ == "__main__":
    main()
