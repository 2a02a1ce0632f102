"""MantaError, the one exception for mistakes a user can mend, how errors are shown, and the nearest valid name.

Exit codes of every Manta command: 0 finished; 1 training failed; 2 the request is invalid or can
never be satisfied; 130 interrupted (resumable).
"""

import difflib
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterable

FINISHED, FAILED, INVALID, INTERRUPTED = 0, 1, 2, 130

# What other tools call our settings; looked up by the last part of an unknown name.
SYNONYMS = {
    "accelerator": "scaling.use_gpu",
    "accumulate_grad_batches": "data.micro_batch_size",
    "alpha": "optimizer.lr",
    "batch": "data.batch_size",
    "bs": "data.batch_size",
    "callbacks": "training",
    "ckpt_path": "resume",
    "clip_norm": "training.grad_clip_norm",
    "cpus": "cluster.num_cpus",
    "data_dir": "data.root",
    "dataset": "data",
    "devices": "scaling.num_workers",
    "experiment_name": "name",
    "fp16": "training.precision",
    "gpus": "scaling.num_workers",
    "gradient_accumulation_steps": "data.micro_batch_size",
    "gradient_clip_val": "training.grad_clip_norm",
    "hparams_search": "search",
    "learning_rate": "optimizer.lr",
    "log_dir": "storage.path",
    "logger": "tracking",
    "max_epochs": "training.epochs",
    "max_grad_norm": "training.grad_clip_norm",
    "max_iters": "training.max_steps",
    "n_epochs": "training.epochs",
    "num_epochs": "training.epochs",
    "num_train_epochs": "training.epochs",
    "optimized_metric": "objective.metric",
    "output_dir": "storage.path",
    "per_device_train_batch_size": "data.micro_batch_size",
    "random_seed": "seed",
    "save_dir": "storage.path",
    "steps": "training.max_steps",
    "storage_path": "storage.path",
    "strategy": "scaling.strategy",
    "trainer": "training",
    "val_split": "data.val_fraction",
    "wd": "optimizer.weight_decay",
    "workers": "scaling.num_workers",
    "world_size": "scaling.num_workers",
}


class MantaError(Exception):
    """A mistake the user can mend: the message names the setting, its value, what is allowed and the way out."""

    def __init__(self, message: str, code: int = INVALID) -> None:
        super().__init__(message)
        self.code = code


class JobError(Exception):
    """A job ended with an exit code and has already said why; carries the code through Hydra's multirun."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def exit_code(command: Callable[[], int], tracebacks: bool = False) -> int:
    """Run a command and show what went wrong: one message for a user's mistake, a traceback for ours."""
    try:
        return command()
    except MantaError as error:
        if tracebacks:
            traceback.print_exc()
        print(f"Error: {error}", file=sys.stderr)
        return error.code
    except (KeyboardInterrupt, BdbQuit):
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return FAILED


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to a mistyped one, or None if nothing is close."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def suggest(key: str, known: Iterable[str]) -> str | None:
    """The known dotted setting that an unknown one most likely means, or None.

    A synonym wins, then the closest last part, in the same group if there is one: so a setting given without
    its group, or in the wrong one, is found too (`lr`, `training.batch_size`).
    """
    known = list(known)
    parent, _, last = key.lower().rpartition(".")
    if SYNONYMS.get(last) in known:
        return SYNONYMS[last]

    def closeness(path: str) -> float:
        its_parent, _, its_last = path.lower().rpartition(".")
        group = difflib.SequenceMatcher(None, parent, its_parent).ratio()
        return difflib.SequenceMatcher(None, last, its_last).ratio() * (0.8 + 0.2 * group)

    best = max(known, key=closeness, default=None)
    return best if best is not None and closeness(best) > 0.7 else None
