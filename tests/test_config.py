"""Composition, plain typed objects, paths, `.env`, suggestions and the schema's own house rules."""

import dataclasses
import os
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from manta import errors
from manta.checks import CHOICES, NUMBERS, check, value_of
from manta.config import Config, from_hydra, register
from manta.env import load_env_file
from manta.errors import MantaError, suggest
from manta.schema import expected, help_texts, paths_of, unknown_keys
from manta.search.settings import ALGORITHMS, SCHEDULERS

CONF = Path(__file__).resolve().parents[1] / "conf"


@pytest.fixture(scope="module", autouse=True)
def _schema() -> None:
    register()


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides))


def options() -> Iterator[str]:
    """Every option of every group, as an override."""
    for folder in sorted(path for path in CONF.rglob("*") if path.is_dir()):
        group = folder.relative_to(CONF).as_posix()
        if group.split("/")[0] not in ("hydra", "local"):
            yield from (f"{group}={file.stem}" for file in sorted(folder.glob("*.yaml")))


def schemas(schema: type = Config, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Every dataclass of the schema and the dotted prefix of its fields."""
    yield prefix, schema
    for name, hint in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(hint):
            yield from schemas(typing.cast(type, hint), f"{prefix}{name}.")


def plain(value: Any) -> bool:
    if dataclasses.is_dataclass(value):
        return all(plain(getattr(value, member.name)) for member in dataclasses.fields(value))
    if type(value) is dict:
        return all(type(key) is str and plain(inner) for key, inner in value.items())
    if type(value) is list:
        return all(map(plain, value))
    return type(value) in (int, float, bool, str, type(None))


def test_the_defaults_compose_and_pass_every_check() -> None:
    config = from_hydra(composed())
    check(config)
    assert (config.data.name, config.model["num_classes"], config.training.epochs) == ("digits", 10, 15)


@pytest.mark.parametrize("option", list(options()))
def test_every_key_in_conf_is_in_the_schema(option: str) -> None:
    assert list(unknown_keys(composed(option), Config)) == []


def test_inside_there_are_only_plain_types() -> None:
    overrides = ["data.transforms.train=[{_target_: manta.x.Y, size: [1, {a: 2}]}]", "+model.extra={a: [1, {b: null}]}"]
    config = from_hydra(composed(*overrides, "scaling.resources_per_worker={CPU: 2, GPU: 0.5}"))
    assert type(config) is Config
    assert plain(config)
    assert config.scaling.resources_per_worker == {"CPU": 2, "GPU": 0.5}
    assert not plain(OmegaConf.create({"a": 1}))


def test_an_override_is_resolved() -> None:
    assert from_hydra(composed("data.num_classes=7")).model["num_classes"] == 7


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    config = from_hydra(composed("storage.path=../runs"))
    assert config.data.root == str(tmp_path / "data")
    assert config.storage.path == str(tmp_path.parent / "runs")
    assert from_hydra(composed("data.root='~/pictures'")).data.root == "/home/me/pictures"
    assert from_hydra(composed("storage.path=/shared/runs")).storage.path == "/shared/runs"
    assert from_hydra(composed("storage.path=s3://bucket/runs")).storage.path == "s3://bucket/runs"


def test_a_folder_for_results_is_checked_without_making_it(tmp_path: Path) -> None:
    check(from_hydra(composed(f"storage.path={tmp_path}/not/yet/there", f"data.root={tmp_path}/nor/this")))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path or mode == os.R_OK)  # root may anything
    with pytest.raises(MantaError, match="no permission"):
        check(from_hydra(composed(f"storage.path={tmp_path}/runs")))


@pytest.mark.parametrize("key", ["modle", "data.foo", "training.ema.decai"])
def test_a_key_added_with_plus_is_refused(key: str) -> None:
    with pytest.raises(MantaError, match=f"{key}=1 is not a setting"):
        from_hydra(composed(f"+{key}=1"))


def test_a_plug_in_may_have_more_arguments() -> None:
    config = from_hydra(composed("+optimizer.fused=true", "+model.depth=3", "+data.dataset.path=x"))
    assert (config.optimizer["fused"], config.model["depth"], config.data.dataset["path"]) == (True, 3, "x")


# ---- the schema's house rules


@pytest.mark.parametrize(("prefix", "schema"), list(schemas()))
def test_every_field_has_a_help_text(prefix: str, schema: type) -> None:
    assert schema.__doc__
    assert not schema.__doc__.startswith(f"{schema.__name__}("), "the dataclass's own, not ours"
    assert {f"{prefix}{member.name}" for member in dataclasses.fields(schema)} == {
        f"{prefix}{name}" for name in help_texts(schema)
    }


def test_every_number_has_bounds() -> None:
    def is_number(hint: Any) -> bool:
        members = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else [hint]
        return typing.get_origin(hint) is not dict and bool({int, float} & set(members))

    fields = [(f"{prefix}{name}", hint) for prefix, s in schemas() for name, hint in typing.get_type_hints(s).items()]
    assert {key for key, hint in fields if is_number(hint)} - set(NUMBERS) == set()


def test_bounds_and_choices_name_settings_that_exist() -> None:
    keys = set(paths_of(composed()))
    for part, known in (("algorithm", ALGORITHMS), ("scheduler", SCHEDULERS)):  # open dictionaries
        keys |= {f"search.{part}.{member.name}" for made in known.values() for member in dataclasses.fields(made)}
    assert {key for key in [*NUMBERS, *CHOICES] if key not in keys} <= {"optimizer.momentum"}


def test_a_value_is_found_by_its_dotted_key() -> None:
    config = from_hydra(composed())
    assert value_of(config, "training.ema.decay") == config.training.ema.decay
    assert value_of(config, "optimizer.lr") == 1e-3
    assert value_of(config, "optimizer.momentum") is None


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("training.epochs", "a whole number or null (Passes over the training set; null = until `max_steps`)"),
        ("training.ema.decay", "a number (Per optimizer step)"),
        ("plan", "true or false (Print the plan and stop)"),
        ("optimizer.lr", None),
        ("nope", None),
    ],
)
def test_what_is_expected_is_said_in_words(key: str, words: str | None) -> None:
    assert expected(Config, key) == words


# ---- suggestions


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("modle", "model"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("learning_rate", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("training.lr", "optimizer.lr"),
        ("training.epoch", "training.epochs"),
        ("trainin.epochs", "training.epochs"),
        ("trainer.max_epochs", "training.epochs"),
        ("trainer.gradient_clip_val", "training.grad_clip_norm"),
        ("trainer.devices", "scaling.num_workers"),
        ("batch_size", "data.batch_size"),
        ("data.batchsize", "data.batch_size"),
        ("data.nworkers", "data.num_workers"),
        ("scaling.nworkers", "scaling.num_workers"),
        ("ema.decay", "training.ema.decay"),
        ("patience", "training.early_stopping.patience"),
        ("ckpt_path", "resume"),
        ("optimizer.xyzzy", None),
        ("scaling.nope.deep", None),
        ("qqqqqq", None),
    ],
)
def test_the_nearest_setting_is_suggested(typed: str, meant: str | None) -> None:
    assert suggest(typed, paths_of(composed())) == meant


def test_synonyms_name_settings_that_exist() -> None:
    assert set(errors.SYNONYMS.values()) <= set(paths_of(composed()))


# ---- .env


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"KEPT": "from the environment"})


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}


@pytest.mark.usefixtures("clean")
def test_an_env_file_fills_what_the_environment_lacks(tmp_path: Path) -> None:
    content = '# a comment\n\nexport A=1\nB="two words"\nC=${A}\nKEPT=from the file\nEMPTY=\nD=x=y # not this\n'
    (tmp_path / ".env").write_text("\ufeff" + content)
    load_env_file(tmp_path / ".env")
    assert environment() == {
        "KEPT": "from the environment", "A": "1", "B": "two words", "C": "1", "EMPTY": "", "D": "x=y"
    }  # fmt: skip


@pytest.mark.usefixtures("clean")
def test_no_env_file_is_fine(tmp_path: Path) -> None:
    load_env_file(tmp_path / ".env")
    assert environment() == {"KEPT": "from the environment"}


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"A=1\nhunter2\n", 2),
        (b"A=1\n\n\n=hunter2\n", 4),
        (b"A=1\nB='hunter2\nC=3\n", 2),
        (b"A=1\nKEY hunter2\n", 2),
        (b"A=1\nB=2\nC=hunter2\xff\n", 3),
        (b"A=hunter2\x00\n", 1),
    ],
)
def test_a_broken_env_file_is_refused_whole(tmp_path: Path, content: bytes, line: int) -> None:
    (tmp_path / ".env").write_bytes(content)
    with pytest.raises(MantaError, match=rf"\.env, line {line} ") as error:
        load_env_file(tmp_path / ".env")
    assert "hunter2" not in str(error.value)
    assert environment() == {"KEPT": "from the environment"}


# ---- exit codes


def _raise(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (MantaError("a=1: use a=2"), 2, "Error: a=1: use a=2\n"),
        (KeyboardInterrupt(), 130, ""),
        (RuntimeError("a bug"), 1, "RuntimeError: a bug\n"),
    ],
)
def test_exit_codes(error: BaseException, code: int, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.exit_code(lambda: _raise(error)) == code
    assert capsys.readouterr().err.endswith(shown)


def test_a_command_keeps_its_own_exit_code() -> None:
    assert errors.exit_code(lambda: 0) == 0
    assert errors.exit_code(lambda: 1) == 1


def test_composing_leaves_hydra_as_it_was() -> None:
    composed()
    assert not GlobalHydra.instance().is_initialized()
