"""What tests of files for other machines share."""

import copy
import dataclasses
import hashlib
import json
import os
import stat
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from manta.checks import check
from manta.cluster import cloud, kuberay
from manta.cluster.elsewhere import Request, name_of
from manta.commandline import parse, with_domains
from manta.config import from_hydra, register
from manta.search.prepare import space_of
from tests.conftest import ROOT

VALUE = hashlib.sha256(b"planted").hexdigest()
"""Of a secret; not in this file, which is code and is copied."""
ODD = (
    "search=random",
    "search.space.optimizer.lr=loguniform(1e-4, 1e-1)",
    "search.space.data.batch_size=choice(32,64)",
    "name=odd",
    """tracking.wandb.notes='two  words, $HOME $$ `id` "quoted" !x \\' ; # *'""",
)
"""Overrides that a shell would take apart."""


def request(*overrides: str) -> Request:
    """What train.py hands over. Composing takes most of a test's time, so groups are composed once."""
    given = with_domains(overrides)
    groups = tuple(
        each for each in given if "." not in name_of(each) and name_of(each) in ("cluster", "scaling", "search")
    )
    cfg = copy.deepcopy(_composed(groups))
    ConfigLoaderImpl._apply_overrides_to_config(parse([each for each in given if each not in groups]), cfg)
    config = from_hydra(cfg)
    check(config)
    if config.search.algorithm:
        register()
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            space_of(config, cfg, given, None)
    return Request(config, given)


@cache
def _composed(groups: tuple[str, ...]) -> DictConfig:
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", list(groups))
        OmegaConf.set_struct(cfg, True)
        return cfg


def at(content: Any, path: str) -> Any:
    """The value at a path, `a/b/0` (~ is a slash within a key); None if it is not there."""
    for key in (part.replace("~", "/") for part in path.split("/")):
        if isinstance(content, list):
            content = content[int(key)] if int(key) < len(content) else None
        else:
            content = content.get(key) if isinstance(content, dict) else None
    return content


def names(settings: type) -> set[str]:
    return {field.name for field in dataclasses.fields(settings)}


def script(path: Path, code: str) -> Path:
    """A command of Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable} -S\nimport json, os, sys\n{code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def recorder(path: Path, calls: Path) -> Path:
    """A command that writes down its arguments, one call a line."""
    return script(
        path, f"open({str(calls)!r}, 'a').write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + '\\n')"
    )


def read_calls(calls: Path) -> list[list[str]]:
    return [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files are written. No command is found but those that a test puts into `bin`."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in [name for name in os.environ if name.startswith("KUBE")]:
        monkeypatch.delenv(name)
    for module in (kuberay, cloud):
        monkeypatch.setattr(module, "CLUSTERS", tmp_path / "clusters")
    return tmp_path / "clusters"
