"""What a checkpoint takes from training: written in the background against written at once.

    python benchmarks/checkpoint.py

Budget: at most 10 % of the synchronous write. ResNet-18 with AdamW: 134 MB a checkpoint.
"""

import statistics
import sys
import time

from step import config, loop_of

ROUNDS = 7


def seconds(asynchronous: bool) -> float:
    """Seconds that one `_save` keeps the loop from training."""
    cfg = config(
        "model=resnet18", "data.batch_size=16", "training.epochs=1", f"training.checkpoint.asynchronous={asynchronous}"
    )  # fmt: skip
    with loop_of(cfg) as loop:
        loop.config.training.limit_train_batches = 1
        loop._epoch(None)
        assert loop.writer is not None
        found = []
        for _ in range(ROUNDS):
            loop.progress.step += 1
            started = time.perf_counter()
            loop._save()
            found.append(time.perf_counter() - started)
            loop.writer.wait()  # training goes on meanwhile
        return statistics.median(found)


def main() -> None:
    background, at_once = seconds(True), seconds(False)
    ratio = background / at_once
    print(
        f"checkpoint of 134 MB: {1e3 * background:.0f} ms of training in the background, {1e3 * at_once:.0f} ms at once, ratio {ratio:.3f} (budget 0.10)"
    )
    sys.exit(ratio > 0.10)


if __name__ == "__main__":
    main()
