"""The documentation is true: what README.md and docs/*.md tell a reader to type works, and links lead somewhere.

The rules for blocks are in docs/contributing.md. Each page runs in its own copy of the checkout, top to bottom.
"""

import ast
import dataclasses
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from manta import config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LONG = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("search", "tracking", "report", "runs", "recipes")),
]
"""Pages that take most of a minute and more: left to `make drills`."""
BLOCK_TIMEOUT_S = 420

FENCE = re.compile(r"^( *)```(\w*)\s*$")
MARK = re.compile(r"^ *<!-- not run: (\S.*\S) -->$")
FILE_NAME = re.compile(r"(?:# @.*\n)?# ((?:conf|src|scripts|tests)/\S+\.(?:py|yaml))\n")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    code: str
    not_run: str | None
    """Why it does not run; None = it does."""

    @property
    def file(self) -> str | None:
        """The file that a reader is told to write it to."""
        match = FILE_NAME.match(self.code)
        return match.group(1) if match and self.language in ("python", "yaml") else None

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "python") and self.file is None and self.not_run is None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    start: int | None = None
    indent = language = ""
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if start is None and fence:
            start, indent, language = number, fence.group(1), fence.group(2)
        elif start is not None and line == f"{indent}```":
            mark = MARK.match(lines[start - 1]) if start else None
            code = textwrap.dedent("\n".join(lines[start + 1 : number])) + "\n"
            yield Block(page, start + 1, language, code, mark.group(1) if mark else None)
            start = None
    assert start is None, f"{page.name}:{(start or 0) + 1}: a block that never ends"


ALL = [block for page in PAGES for block in blocks(page)]
RUNNABLE = [page for page in PAGES if any(block.runs for block in ALL if block.page == page)]


def train_commands(code: str) -> Iterator[list[str]]:
    """The overrides of each `python train.py ...` and `make train ARGS="..."` in a script."""
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.commenters, lexer.whitespace_split = "#", True
        words = list(lexer)
        for at in range(len(words) - 1):
            rest = words[at + 2 :]
            end = next((i for i, word in enumerate(rest) if set(word) <= set("();<>|&")), len(rest))
            if words[at : at + 2] == ["python", "train.py"]:
                yield rest[:end]
            elif words[at : at + 2] == ["make", "train"]:
                yield [word for arg in rest[:end] if arg.startswith("ARGS=") for word in shlex.split(arg[5:])]


COMMANDS = [
    pytest.param(arguments, id=f"{block}: {shlex.join(arguments)}")
    for block in ALL
    if block.language == "bash" and block.not_run is not None
    for arguments in train_commands(block.code)
]


# --- a place to run in -------------------------------------------------------------------------------------------


def copy_checkout(target: Path) -> Path:
    """The working tree without results, data, environments and this machine's own settings."""
    top = {".git", ".venv", ".env", "outputs", "data", "multirun", "build", "dist"}

    def left_out(folder: str, names: list[str]) -> set[str]:
        out = {name for name in names if name == "__pycache__" or name.endswith(("_cache", ".egg-info"))}
        if Path(folder) == ROOT:
            out |= top & set(names)
        if Path(folder) == ROOT / "conf" / "local":
            out |= {name for name in names if name.endswith(".yaml")}
        return out

    shutil.copytree(ROOT, target, ignore=left_out)
    return target


def environment(place: Path, bin_folder: Path) -> dict[str, str]:
    """`python` is the interpreter of this test, `manta` the copy's."""
    bin_folder.mkdir(exist_ok=True)
    for name in ("python", "python3"):
        wrapper = bin_folder / name
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        wrapper.chmod(0o755)
    path = os.pathsep.join([str(bin_folder), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(place / "src"), "COLUMNS": "120"}


def run(command: list[str], place: Path, env: dict[str, str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output; what a block leaves running when its time is up is ended with it."""
    process = subprocess.Popen(
        command,
        cwd=place,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return 124, f"{output}\n(ended after {timeout_s:.0f} s)"
        raise


def write_file(block: Block, place: Path) -> None:
    assert block.file is not None
    path = place / block.file
    assert not path.exists(), f"{block}: {block.file} exists already; the page would overwrite it"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.code)


def evidence(block: Block, code: int, output: str, place: Path) -> str:
    """What somebody needs who sees only the failure."""
    parts = [f"{block} ended with {code}:", textwrap.indent(block.code, "    "), "Output, from its end:"]
    parts += output.splitlines()[-60:]
    log = place / "outputs" / "latest" / "train.log"
    if log.is_file():
        parts += ["", "The newest run's train.log, from its end:", *log.read_text(errors="replace").splitlines()[-40:]]
    return "\n".join(parts)


# --- what is read is run -----------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=pytest.mark.drill if page in LONG else ())
        for page in PAGES
        if any(b.runs for b in ALL if b.page == page)
    ],
)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    place = copy_checkout(tmp_path / "manta")
    env = environment(place, tmp_path / "bin")
    for block in (block for block in ALL if block.page == page):
        if block.file is not None:
            write_file(block, place)
        elif block.runs:
            shell = ["bash", "-euxo", "pipefail"] if block.language == "bash" else ["python"]
            script = tmp_path / f"line-{block.line}"
            script.write_text(block.code)
            code, output = run([*shell, str(script)], place, env, BLOCK_TIMEOUT_S)
            if code != 0:
                pytest.fail(evidence(block, code, output, place), pytrace=False)
            print(f"--- {block}\n{output}")  # shown when a later block fails


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A copy in which every file that the pages tell a reader to write has been written."""
    folder = tmp_path_factory.mktemp("docs")
    place = copy_checkout(folder / "manta")
    for block in ALL:
        if block.file is not None:
            write_file(block, place)
    return place, environment(place, folder / "bin")


@pytest.mark.parametrize("arguments", COMMANDS)
def test_commands_that_cannot_run_here_compose(arguments: list[str], written: tuple[Path, dict[str, str]]) -> None:
    place, env = written
    if "-m" in arguments:  # Hydra shows one job at a time: the first
        arguments = [re.sub(r"^([^=]+=[^,\[{(]+),.*", r"\1", each) for each in arguments if each != "-m"]
    show = [] if "--cfg" in arguments else ["--cfg", "job"]
    code, output = run([sys.executable, "train.py", *arguments, *show], place, env, 60)
    assert code == 0, f"python train.py {shlex.join(arguments)} does not compose:\n{output}"


def test_documented_files_pass_lint(written: tuple[Path, dict[str, str]]) -> None:
    """What a reader copies must not break `make lint`."""
    place, env = written
    files = [block.file for block in ALL if block.file is not None and block.language == "python"]
    for command in (["check"], ["format", "--diff"]):
        code, output = run([sys.executable, "-m", "ruff", *command, *files], place, env, 60)
        assert code == 0, output


# --- the pages themselves ----------------------------------------------------------------------------------------


def test_blocks_are_of_a_kind_that_is_checked() -> None:
    wrong = [str(block) for block in ALL if block.language not in ("bash", "python", "yaml", "text")]
    assert not wrong, f"mark these as bash, python, yaml or text: {wrong}"


def test_marks_give_a_reason_and_stand_above_a_block() -> None:
    for page in PAGES:
        lines = page.read_text().splitlines()
        for number, line in enumerate(lines):
            if line.strip().startswith("<!-- not run"):
                where = f"{page.name}:{number + 1}"
                mark = MARK.match(line)
                assert mark, f"{where}: write <!-- not run: REASON -->"
                assert len(mark.group(1).split()) >= 2, f"{where}: {mark.group(1)!r} is no reason"
                assert FENCE.match("".join(lines[number + 1 : number + 2])), f"{where}: no block right below"


def test_yaml_blocks_parse() -> None:
    for block in ALL:
        if block.language == "yaml":
            assert yaml.safe_load(block.code) is not None, f"{block} is empty"


def test_additions_take_less_than_ten_lines() -> None:
    """What the README promises about a model, a data set and an experiment."""
    files = [block for block in ALL if block.file is not None and block.page.name != "recipes.md"]  # whole scripts
    assert {Path(block.file or "").parts[1] for block in files} >= {"model", "data", "experiment"}
    for block in files:
        lines = [line for line in block.code.splitlines() if line.strip() and not line.startswith("#")]
        assert len(lines) < 10, f"{block}: {block.file} has {len(lines)} lines"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in LINK.findall(re.sub(r"(?s)<!--.*?-->", "", page.read_text())):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


# --- the configuration -------------------------------------------------------------------------------------------


def test_configuration_page_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))["configuration_page"]()
    if (ROOT / "docs" / "configuration.md").read_text() != made:
        pytest.fail("docs/configuration.md is stale: run `make docs`", pytrace=False)


def test_every_setting_is_explained() -> None:
    """By the string below the field, or, if it is a group, by the docstring of its class."""
    source = ast.parse(Path(config.__file__).read_text())
    classes = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)}
    for name, node in classes.items():
        hints = typing.get_type_hints(getattr(config, name))
        assert ast.get_docstring(node), f"{name} has no docstring"
        for field, below in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                explained = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                group = dataclasses.is_dataclass(hints[field.target.id])
                assert explained or group, f"{name}.{field.target.id} has no help text below it"


@pytest.mark.parametrize("file", sorted((ROOT / "conf").rglob("*.yaml")), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_config_file_says_what_it_is(file: Path) -> None:
    if file.parent == ROOT / "conf" / "local":
        pytest.skip("a file of this machine only")
    text = re.sub(r"(?m)\A(# @.*\n)+", "", file.read_text())  # Hydra's own directives
    assert text.startswith("#"), f"{file.relative_to(ROOT)} should open with a comment that says what it is"
