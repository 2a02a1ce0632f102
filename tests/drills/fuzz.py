"""Random command lines, made of valid pieces and mutations, and a cheap way to run them.

A process that has imported everything is forked for each line, so a line costs what it does and not the imports.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from manta.config import Config
from manta.schema import hint_of, paths_of

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 20
SAFE = ("scaling=in_process", "training.max_steps=1", "training.limit_eval_batches=1")
NUMBERS = (
    "0",
    "1",
    "-1",
    "2",
    "3",
    "0.5",
    "1e-3",
    "1e400",
    "-0.0",
    "99999999999999999999",
    "-9223372036854775809",
    "1e-320",
)
WORDS = (
    "null",
    "true",
    "False",
    "nan",
    "-inf",
    "???",
    "auto",
    "abc",
    "cpu",
    "None",
    "~",
    "0x10",
    "1_000",
    "08",
    "1:30",
)
SHAPES = (
    "[]", "{}", "[1,2]", "[a,[b,[c,{d: 1}]]]", "{a: {b: {c: [1,{}]}}}", "{1: 2}", "{true: 1, null: 2}", "[null]", "[{}]",
    "{_target_: torch.nn.ReLU}", "{_target_: {_target_: 1}}", "{_target_: null}", "[[[[[[[[1]]]]]]]]", "{a: 1, a: 2}",
)  # fmt: skip
TEXTS = (
    "", " ", "''", '""', "'", '"', "ünïcödé", "模型", "🔥", "\u202eltr", "a\u0301", "\x01\x02", "\t", "a\nb", "\x1b[31m", "\x7f",
    "a,b", "a=b", "a b", "[1", "1]", "{", "}", "{{}}", "(", ")", "$", "${", "${}", "${seed}", "${data.name}", "${name}", "${nope}",
    "${oc.env:HOME}", "${oc.env:NOPE}", "${oc.decode:'['}", "${now:%Y}", "${hydra:run.dir}", "$HOME", "`id`", ";ls", "|", "&", "\\", "\\\\",
    "../..", "/etc/passwd", "~root", "file:///x", "s3://b/k", "--", "-1-", "x" * 5000, "%s%n", "<b>", "choice(1,2)", "range(3)",
    "int(a)", "glob(*)", "shuffle(1,2)", "extend_list(1)", "0" * 400, "[" * 60 + "]" * 60, "{a: " * 40 + "1" + "}" * 40, "\udcff",
)  # fmt: skip
DOMAINS = (
    "loguniform(1e-4, 1e-1)", "uniform(0,1)", "choice(1,2)", "choice(mlp,cnn)", "randint(1, 5)", "grid_search(1,2)", "choice()",
    "uniform(1)", "uniform(2, 1)", "loguniform(0,1)", "choice([1,2],[3])", "choice({a: 1})", "quniform(0,1,0)", "randn(0,1)",
    "uniform(nan, inf)", "uniform(a, b)", "choice(__import__('os'))", "uniform(0,1", "choice(" + ",".join(["1"] * 3000) + ")",
    "uniform(0, 1)(2)", "lambda x: x", "choice(*a)", "choice(a=1)", "uniform(lower=0, upper=1)", "sample_from(x)", "choice(1e999)",
)  # fmt: skip
FLAGS = (
    "-m", "--help", "--hydra-help", "--cfg", "--cfg=job", "--info", "--info=all", "--resolve", "-p", "--package=model", "-h", "-v", "--version",
    "--multirun", "--config-name=nope", "--config-dir=nope", "-cd", "-x", "--", "-", "---", "--seed=1", "--shell-completion", "--run", "-r",
    "--experimental-rerun=x", "--cfg job", "-c job", "-c hydra", "-i defaults", "-sc query=bash",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """How a command line ended."""

    arguments: list[str]
    code: int
    output: str
    seconds: float
    """Of a core."""

    @property
    def trouble(self) -> str:
        """What is wrong with it, if anything."""
        if self.seconds > LIMIT_S or self.code == -signal.SIGKILL:
            return f"took more than {LIMIT_S} s"
        asked = self.code == 2 and re.search("traceback|debug", " ".join(self.arguments).lower())
        if "Traceback (most" in self.output and not asked:
            return "a traceback"
        return "" if self.code in (0, 2) else f"exit code {self.code}"


class Lines:
    """An endless supply of command lines, the same for the same seed.

    Args:
        folders: directories of runs, to resume.
    """

    def __init__(self, seed: int, folders: Sequence[Path]) -> None:
        self.random, self.folders = random.Random(seed), [*map(str, folders), "latest", "nowhere", "."]
        conf = ROOT / "conf"
        files = [path for path in conf.rglob("*.yaml") if path.parent != conf and "hydra" not in path.parts]
        self.options = [str(path.relative_to(conf).with_suffix("")).rsplit("/", 1) for path in files]
        cfg = OmegaConf.structured(Config)
        known = paths_of(cfg)
        self.keys = [key for key in known if key not in ("plan", "storage.path")]
        for path in files:
            found = OmegaConf.load(path)
            if isinstance(found, DictConfig) and path.parent.name not in ("experiment", "debug", "search"):
                group = ".".join(path.parent.relative_to(conf).parts)
                self.keys += [f"{group}.{key}" for key in paths_of(found) if not key.startswith("defaults")]
        self.keys, self.usual = sorted(set(self.keys)), {}
        for key in self.keys:
            value = OmegaConf.select(cfg, key, throw_on_missing=False) if key in known else None
            if isinstance(value, str | int | float | None) and key != "resume":
                self.usual[key] = (
                    "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
                )
        self.wrong = 0.0
        """How often a piece of the present line is wrong: lines with one mistake, or none, get further."""

    def next(self) -> list[str]:
        """One command line; nothing that it may ask for is written outside its working directory or takes long."""
        pick = self.random
        self.wrong = pick.choice((0.0, 0.1, 0.3, 1.0))
        words = [self._word() for _ in range(pick.choice((0, 1, 1, 2, 2, 3, 5, 8)))]
        if pick.random() < 0.3:
            words = [f"search={pick.choice([b for a, b in self.options if a == 'search'])}", *words]
        if pick.random() < 0.15:
            words = [f"resume={pick.choice(self.folders)}", *words]
        if pick.random() < 0.12 * self.wrong + 0.02:
            words = [*pick.choice(FLAGS).split(), *words]
        one_step = pick.random() < 0.1 and not any(re.search("search|multirun|tracking|^-m$", word) for word in words)
        words += SAFE if one_step else ["plan=true"]
        if pick.random() < 0.05:
            pick.shuffle(words)
        return [word.replace("\0", "") for word in words]

    def _word(self) -> str:
        pick, roll = self.random, self.random.random()
        if roll < 0.25:
            group, option = pick.choice(self.options)
            word = f"{group}={option}"
        elif roll < 0.35:
            word = f"search.space.{pick.choice(self.keys)}={pick.choice(DOMAINS)}"
        elif roll < 0.40 and self.wrong > 0.2:
            key, value = pick.choice(self.keys), pick.choice((*TEXTS, *NUMBERS))
            word = f"hydra.{pick.choice(('job.name', 'run.dir', 'verbose', key))}={value}"
        else:
            key = pick.choice(self.keys)
            word = f"{key}={self._value(key)}"
        if pick.random() < 0.12 * self.wrong:
            word = pick.choice(("+", "++", "~", "@", "=", ".", " ", "é", "\t", "-", "/")) + word
        if pick.random() < 0.12 * self.wrong:
            word = self._mutated(word)
        return word

    def _value(self, key: str) -> str:
        """Often of the right type."""
        pick, hint = self.random, str(hint_of(Config, key))
        if pick.random() >= self.wrong and key in self.usual:
            return self.usual[key]
        roll = pick.random()
        if roll < 0.35 and ("int" in hint or "float" in hint):
            return pick.choice(("1", "2", "3", "8", "64")) if "int" in hint else pick.choice(("0.1", "0.5", "1e-3"))
        if roll < 0.35 and "bool" in hint:
            return pick.choice(("true", "false"))
        value = pick.choice(pick.choice((NUMBERS, WORDS, SHAPES, TEXTS)))
        if "[" in hint and roll < 0.7:
            return pick.choice((f"[{value}]", f"{{a: {value}}}", f"[{{_target_: {value}}}]"))
        return f"'{value}'" if roll > 0.9 else value

    def _mutated(self, word: str) -> str:
        """One small accident of typing."""
        pick, at = self.random, self.random.randrange(len(word) + 1)
        return pick.choice(
            (
                word[:at] + word[at + 1 :],
                word[:at] + pick.choice("=.,:[]{}()'\"\\$ ~+@/é\x01") + word[at:],
                word[:at],
                word[at:],
                word[:at] + word[at - 1 : at] + word[at:],
                word.upper(),
                word + word,
                word.replace("=", "", 1),
                word.replace(".", "/"),
            )
        )


def run(arguments: list[str], folder: Path, user: int | None = None) -> Result:
    """`python train.py <arguments>` in a fork of this process, in the working directory `folder`, as another user if told."""
    import train

    output, began = folder / "output", time.monotonic()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(file, 1)
            os.dup2(file, 2)
            # What a new interpreter has, and a test runner has replaced.
            sys.stdout = open(1, "w", encoding="utf-8", errors="strict", closefd=False)
            sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
            os.chdir(folder)
            for name in ("http_proxy", "https_proxy"):  # whatever would be downloaded is refused at once
                os.environ[name] = "http://127.0.0.1:9"
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            sys.argv = [str(ROOT / "train.py"), *arguments]
            code = train.exit_code(train.main)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)
    deadline = began + 3 * LIMIT_S  # by the clock, for machines that do other things too
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            _, status, used = os.wait4(child, 0)
            break
        time.sleep(0.005)
    seconds = used.ru_utime + used.ru_stime
    return Result(arguments, os.waitstatus_to_exitcode(status), output.read_text(errors="replace"), seconds)


def warm_up(folder: Path) -> None:
    """Import what a launch imports, before any fork: the first one tells what that is."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(ROOT)]
    import torch

    import manta.resume  # noqa: F401
    import train

    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = [str(ROOT / "train.py"), "search=optuna", "scheduler=plateau", "plan=true"]
        code = train.exit_code(train.main)
        (folder / "modules").write_text("\n".join(sys.modules))
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    for name in (folder / "modules").read_text().splitlines():
        if not name.startswith("__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    torch.zeros(1)
    gc.freeze()


def main(request: Path) -> None:
    """The command lines of a request, a JSON file: `lines`, or `count` random ones by `seed`; results.jsonl beside it."""
    asked = json.loads(request.read_text())
    folder = request.parent / "here"
    folder.mkdir()
    folder.chmod(0o777)
    warm_up(folder)
    lines = asked.get("lines")
    if lines is None:
        made = run([*SAFE, "training.limit_train_batches=2"], folder)
        assert made.code == 0, made.output
        source = Lines(asked["seed"], list(folder.glob("outputs/*-*-*/*")))
        lines = (source.next() for _ in range(asked["count"]))
    with open(request.with_name("results.jsonl"), "w") as file:
        for line in lines:
            result = run(line, folder, asked.get("user"))
            file.write(json.dumps({**asdict(result), "trouble": result.trouble}) + "\n")
            file.flush()


def ask(folder: Path, **request: Any) -> list[dict[str, Any]]:
    """Results of command lines, run by a process beside."""
    folder.mkdir(exist_ok=True)
    (folder / "request.json").write_text(json.dumps(request))
    subprocess.run([sys.executable, "-m", "tests.drills.fuzz", str(folder / "request.json")], cwd=ROOT, check=True)
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
