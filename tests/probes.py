"""A recipe and a model that write down what they find on a worker, for tests of what reaches it."""

import dataclasses
import hashlib
import json
import os
import signal
import time
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from torch import Tensor, nn

from manta.config import Config
from manta.data.load import load_splits
from manta.recipes.pytorch import PyTorchRecipe
from manta.session import Session
from manta.training.loop import Loop
from manta.training.sampler import Step


class Net(nn.Module):
    """One layer; keeps its arguments."""

    def __init__(self, input_shape: list[int], num_classes: int, nested: dict[str, list[Any]]) -> None:
        super().__init__()
        self.arguments = {"input_shape": input_shape, "nested": nested, "inner": nested["inner"]}
        self.layer = nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.flatten(1))


class Recipe(PyTorchRecipe):
    """The default recipe; every rank writes probe-<rank>.json into the run directory and prints a line."""

    def train(self, session: Session, config: Config) -> dict[str, Any]:
        from manta.targets import build

        model = build("model", config.model, config.allowed_targets)
        found = {
            "cwd": os.getcwd(),
            "data_root": config.data.root,
            "tags": config.tags,
            "device": str(session.device),
            "arguments": {name: type(value).__name__ for name, value in model.arguments.items()},
            "foreign": sorted(_foreign(dataclasses.asdict(config))),
        }
        (session.run.path / f"probe-{session.rank}.json").write_text(json.dumps(found))
        print(f"hello from rank {session.rank}")
        return super().train(session, config)


def _foreign(value: Any) -> set[str]:
    """Types in a configuration that are not plain Python."""
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    else:
        inner = list(value) if isinstance(value, list) else []
    plain = type(value) in (dict, list, str, int, float, bool, type(None))
    return (set() if plain else {type(value).__name__}).union(*map(_foreign, inner))


class Surroundings(PyTorchRecipe):
    """The default recipe; every rank writes down environment variables with WORLD or NCCL in their names."""

    def train(self, session: Session, config: Config) -> dict[str, Any]:
        found = {name: value for name, value in os.environ.items() if "WORLD" in name or name.startswith("NCCL")}
        (session.run.path / f"environment-{session.rank}.json").write_text(json.dumps(found))
        return super().train(session, config)


class Troubled(PyTorchRecipe):
    """A trial's seed says what becomes of it: 2 raises, 4 is killed, 6 meets a NaN, 8 loses the process that drives its
    workers, 10 hangs; the others are well."""

    def train(self, session: Session, config: Config) -> dict[str, Any]:
        if config.seed == 8 and session.main:
            os.kill(session.run.read("status.json")["pid"], signal.SIGKILL)
        marker = str(session.run.path / "killed")
        trouble = {
            2: {"_target_": "tests.faults.RaiseAt", "call": 8},
            4: {"_target_": "tests.faults.KillAt", "call": 8, "marker": marker},
            6: {"_target_": "tests.faults.PoisonAt", "call": 8},
            10: {"_target_": "tests.faults.HangAt", "call": 8, "rank": session.world_size - 1},
        }.get(config.seed)
        if trouble is not None:
            config.data.transforms.train.append(trouble)
        return super().train(session, config)


class Hopeless(PyTorchRecipe):
    """Every training fails, most of them alike."""

    def train(self, session: Session, config: Config) -> dict[str, Any]:  # noqa: ARG002
        raise ValueError("disk on fire" if config.seed == 1 else "no luck today")


class Exploited(PyTorchRecipe):
    """Every checkpoint leaves a digest of weights and optimizer; a trial that starts from another's must have its digest."""

    def train(self, session: Session, config: Config) -> dict[str, Any]:
        from manta.runs import read_lines

        loop = Loop(session, config, load_splits(config.data, config.allowed_targets))
        trials = session.run.path.parent
        exploits = [line for line in read_lines(session.run.metrics) if "exploit" in line]
        if session.main and exploits and read_lines(session.run.metrics)[-1] == exploits[-1]:
            donor, step = exploits[-1]["exploit"]["donor"], exploits[-1]["step"]
            assert loop.progress.step == step
            wanted = (trials / f"{donor:05d}" / f"digest-{step}").read_text()
            assert _digest(loop) == wanted, "the weights are not the donor's"
            (session.run.path / f"compared-{len(exploits)}").write_text(wanted)
        save = loop._save

        def save_and_digest(best: bool = False) -> None:
            save(best)
            if session.main:
                (session.run.path / f"digest-{loop.progress.step}").write_text(_digest(loop))

        loop._save = save_and_digest  # type: ignore[method-assign]
        return loop.run()


def _digest(loop: Loop) -> str:
    """Of every weight and every moment of the optimizer."""
    found = hashlib.sha256()
    state = loop.learner.state()
    moments = [value for each in state["optimizer"]["state"].values() for _, value in sorted(each.items())]
    for tensor in [*state["model"].values(), *moments]:
        found.update(tensor.cpu().numpy().tobytes())
    return found.hexdigest()


class Returned(Callback):
    """A callback of Hydra that prints what each job returns to a sweeper."""

    def on_job_end(self, job_return: JobReturn, **_: Any) -> None:
        print(f"returned {job_return._return_value}")


class Recorded(PyTorchRecipe):
    """The default recipe; every rank writes which samples it used in which step into samples-<pid>.jsonl."""

    def train(self, session: Session, config: Config) -> dict[str, Any]:
        loop = Loop(session, config, load_splits(config.data, config.allowed_targets))
        attempt, account = session.gather(time.time())[0], loop._account
        path = session.run.path / f"samples-{session.rank}-{attempt}.jsonl"

        def account_and_record(step: Step, loss: Tensor) -> None:
            account(step, loss)
            samples = [int(each) for micro in step.micros if micro.real for each in micro.indices]
            line = {
                "step": loop.progress.step,
                "attempt": attempt,
                "world_size": session.world_size,
                "samples": samples,
            }
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")

        loop._account = account_and_record  # type: ignore[method-assign]
        return loop.run()
