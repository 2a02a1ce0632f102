"""What trackers cost a training: the time of a step with W&B (offline) and MLflow, and with an MLflow server that has stopped.

    python benchmarks/tracking.py        # some minutes

Trackers start while the training does, so the second half of it is measured. Budgets: at most 1.02 times a step without
trackers, and 1.05 with a server that is stopped in the middle.
"""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ("scaling=in_process", "training.epochs=160", "model.hidden=[512,512]", "training.log_every_n_steps=20")
PAIRS = 3


def step_s(*arguments: str, stop: "subprocess.Popen[bytes] | None" = None) -> float:
    """Seconds of a step, the median of the second half of a training; `stop` is stopped once it has been told something."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), f"storage.path={folder}", *TRAIN, *arguments]
        # One thread: on two cores a second one would wait for whatever else runs, and that is what is measured.
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        run = Path(folder) / "latest"
        while stop is not None and process.poll() is None:
            state = run / "tracking" / "mlflow.json"
            if state.is_file() and json.loads(state.read_text()).get("told"):
                os.killpg(stop.pid, signal.SIGSTOP)
                break
            time.sleep(0.1)
        assert process.wait() == 0
        if stop is not None:
            os.killpg(stop.pid, signal.SIGCONT)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        speeds = [line["samples_per_s"] for line in lines if "train/loss" in line]
        return 64 / statistics.median(speeds[len(speeds) // 2 :])


@contextmanager
def server() -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A real MLflow server."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/m.db"]
        command += ["--artifacts-destination", folder, "--port", str(port), "--workers", "1"]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        uri = f"http://127.0.0.1:{port}"
        while True:
            try:
                if requests.get(f"{uri}/health", timeout=1).ok:
                    break
            except requests.RequestException:
                time.sleep(0.5)
        try:
            yield uri, process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    track = ("tracking=[wandb,mlflow]", "tracking.wandb.mode=offline", "tracking.mlflow.log_model=false")
    ratios: dict[str, list[float]] = {"W&B offline, MLflow in SQLite": [], "MLflow server that stops": []}
    with server() as (uri, process):
        for _ in range(PAIRS):
            plain = step_s()
            ratios["W&B offline, MLflow in SQLite"].append(step_s(*track) / plain)
            away = ("tracking=mlflow", f"tracking.mlflow.tracking_uri={uri}", "tracking.finish_s=5", track[2])
            ratios["MLflow server that stops"].append(step_s(*away, stop=process) / plain)
            print(
                f"without {1000 * plain:.3f} ms a step   "
                + "   ".join(f"{what} {each[-1]:.3f}x" for what, each in ratios.items()),
                flush=True,
            )
    found = {what: statistics.median(each) for what, each in ratios.items()}
    for what, each in found.items():
        print(f"{what:32} {each:.3f}x of a step without")
    first, second = found.values()
    sys.exit(first > 1.02 or second > 1.05)


if __name__ == "__main__":
    main()
