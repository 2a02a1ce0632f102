"""What trackers cost a training: its time with W&B (offline) and MLflow, and with an MLflow server that has stopped.

    python benchmarks/tracking.py        # some minutes

Budgets: at most 1.02 times the training without trackers, and 1.05 with a server that is stopped in the middle.
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
TRAIN = ("scaling=in_process", "training.epochs=100", "model.hidden=[512,512]", "training.log_every_n_steps=20")
PAIRS = 5


def training_s(*arguments: str, stop: "subprocess.Popen[bytes] | None" = None) -> float:
    """Seconds of training, evaluations and start-up not counted; `stop` is stopped once it has been told something."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), f"storage.path={folder}", *TRAIN, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
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
        summary = json.loads((run / "summary.json").read_text())
        return float(summary["step"] * 64 / summary["throughput"]["samples_per_s"])


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
            plain = training_s()
            ratios["W&B offline, MLflow in SQLite"].append(training_s(*track) / plain)
            away = ("tracking=mlflow", f"tracking.mlflow.tracking_uri={uri}", "tracking.finish_s=5", track[2])
            ratios["MLflow server that stops"].append(training_s(*away, stop=process) / plain)
            print(
                f"without {plain:6.2f} s   " + "   ".join(f"{what} {each[-1]:.3f}x" for what, each in ratios.items()),
                flush=True,
            )
    found = {what: statistics.median(each) for what, each in ratios.items()}
    for what, each in found.items():
        print(f"{what:32} {each:.3f}x of the training without")
    first, second = found.values()
    sys.exit(first > 1.02 or second > 1.05)


if __name__ == "__main__":
    main()
