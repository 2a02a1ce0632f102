"""The space of a search: domains are read, checked against the configuration, and applied to it."""

import itertools
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from manta.checks import check
from manta.commandline import with_domains
from manta.config import Config, Search
from manta.errors import MantaError
from manta.runs import RunDir
from manta.search import settings
from manta.search.domains import NAMES, Domain, combinations, is_mutable, parse, read
from manta.search.space import Space
from tests.conftest import ROOT, compose_run, make_config

EMPTY = ("search=random", "search/space=none")
CONDITIONAL = "search.space.model={choice: {mlp: {dropout: uniform(0, 0.5), hidden: choice([64], [128])}, cnn: {}}}"


def space_of(*overrides: str) -> Space:
    space = compose_run(*EMPTY, *overrides)[2]
    assert space is not None
    return space


def refusal(*overrides: str) -> str:
    with pytest.raises(MantaError) as error:
        compose_run(*overrides)
    return str(error.value)


# --- domains


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("uniform(0, 0.5)", "uniform", (0, 0.5)),
        ("uniform(-1, 1)", "uniform", (-1, 1)),
        ("uniform(upper=1, lower=0)", "uniform", (0, 1)),
        ("quniform(0.1, 0.5, 0.1)", "quniform", (0.1, 0.5, 0.1)),
        (" loguniform(1e-4, 1e-1) ", "loguniform", (1e-4, 1e-1)),
        ("qloguniform(0.01, 1, q=0.01)", "qloguniform", (0.01, 1, 0.01)),
        ("randint(1, 5)", "randint", (1, 5)),
        ("qrandint(8, 64, 8)", "qrandint", (8, 64, 8)),
        ("lograndint(1, 100)", "lograndint", (1, 100)),
        ("qlograndint(8, 64, 8)", "qlograndint", (8, 64, 8)),
        ("randn()", "randn", (0.0, 1.0)),
        ("randn(sd=0.1)", "randn", (0.0, 0.1)),
        ("qrandn(0, 1, 0.5)", "qrandn", (0, 1, 0.5)),
        ("choice(mlp, cnn)", "choice", ("mlp", "cnn")),
        ("choice([32, 64])", "choice", (32, 64)),
        ("choice(categories=[32, 64])", "choice", (32, 64)),
        ("choice([[64], [64, 32]])", "choice", ([64], [64, 32])),
        ("choice([64], (64, 32))", "choice", ([64], [64, 32])),
        ("choice(null, 0.5, true, False, 'a b', a.b.C, -1)", "choice", (None, 0.5, True, False, "a b", "a.b.C", -1)),
        ("choice(1, true)", "choice", (1, True)),
        ("grid_search(1e-3, 1e-2)", "grid_search", (1e-3, 1e-2)),
        ("grid_search(values=[1, 2])", "grid_search", (1, 2)),
    ],
)
def test_a_domain_is_read(text: str, name: str, arguments: tuple[Any, ...]) -> None:
    domain = parse(text)
    assert (domain.name, domain.arguments) == (name, arguments)
    assert [type(value) for value in domain.arguments] == [type(value) for value in arguments]
    assert str(domain) == text.strip()
    assert parse(str(Domain(name, arguments))) == domain  # a domain that nobody wrote reads back, too


def test_every_domain_is_one_of_tunes() -> None:
    from ray import tune
    from ray.tune.search.sample import Domain as TunesDomain

    written = {
        "choice": "choice(1, 2)",
        "grid_search": "grid_search(1, 2)",
        "randn": "randn(0.5, 0.1)",
        "qrandn": "qrandn(0, 1, 0.5)",
    }
    for name in NAMES:
        domain = parse(written.get(name, f"{name}({'2, 8, 2' if name[0] == 'q' else '2, 8'})"))
        made = domain.tune()
        assert hasattr(tune, name)
        if name == "grid_search":
            assert made == {"grid_search": [1, 2]}
            continue
        assert isinstance(made, TunesDomain)
        sampled = [
            getattr(value, "item", lambda value=value: value)() for value in made.sample(size=200, random_state=0)
        ]
        assert all(map(domain.contains, sampled)), name
        if domain.bounds and domain.is_whole:
            assert (min(sampled), max(sampled)) == domain.bounds  # both are reached


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (3, "no domain"),
        ([1, 2], "no domain"),
        ("0.1", "no domain"),
        ("loguniform", "has no arguments"),
        ("loguniform(1e-4, 1e-1", "cannot be read"),
        ("choice(3x, 4)", "cannot be read"),
        ("__import__('os').system('true')", "no domain"),
        ("loguni(1, 2)", "Did you mean loguniform?"),
        ("zzz(1, 2)", "There are choice"),
        ("choice()", "lists nothing"),
        ("choice(1, 1)", "1 is listed twice"),
        ("choice(a-b, c)", "Quote it if it is text: 'a - b'"),
        ("choice(2**3, 4)", "nothing is computed"),
        ("choice(open('x'), 4)", "inside a domain"),
        ("choice(uniform(0, 1), 4)", "inside a domain"),
        ("choice(1e999, 4)", "not a finite number"),
        ("choice(values=[1, 2])", "no argument values"),
        ("uniform(0)", "lacks upper"),
        ("uniform(0, 1, 2)", "takes 2 arguments, not 3"),
        ("uniform(0, uper=1)", "Did you mean upper=?"),
        ("uniform(0, 1, upper=2)", "upper is given twice"),
        ("uniform(0, one)", "upper=one is not a finite number"),
        ("uniform(0, true)", "upper=true is not a finite number"),
        ("uniform(0, 1e999)", "upper=inf is not a finite number"),
        ("uniform(1, 0)", "uniform(0, 1)"),
        ("uniform(1, 1)", "no more than one value"),
        ("randint(1, 2)", "the upper bound is exclusive"),
        ("randint(0.5, 3)", "Did you mean uniform?"),
        ("loguniform(0, 1)", "lower=0: a logarithmic scale starts above 0. Set lower=0.001"),
        ("lograndint(0, 10)", "Set lower=1"),
        ("loguniform(1, 10, base=2)", "no effect"),
        ("quniform(0, 1, 0)", "q=0"),
        ("quniform(0, 1, 0.3)", "does not divide upper=1"),
        ("qrandint(1, 8, 2)", "does not divide lower=1"),
        ("randn(0, 0)", "sd=0"),
    ],
)
def test_a_broken_domain_says_why(text: Any, says: str) -> None:
    with pytest.raises(MantaError) as error:
        parse(text)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("uniform(0, 1)", [0, 0.5, 1], [-0.1, 1.1, True, "a", None]),
        ("randint(1, 5)", [1, 4], [0, 5, 1.5]),
        ("qrandint(8, 64, 8)", [8, 64], [12, 72]),
        ("quniform(0.1, 0.5, 0.1)", [0.1, 0.3, 0.5], [0.15]),
        ("choice(1, true, [2], null)", [1, True, [2], None], [2, False, [3]]),
        ("randn(0, 1)", [-100, 3.5], ["a"]),
    ],
)
def test_what_a_domain_contains(text: str, inside: list[Any], outside: list[Any]) -> None:
    domain = parse(text)
    assert [domain.contains(value) for value in inside] == [True] * len(inside)
    assert [domain.contains(value) for value in outside] == [False] * len(outside)


# --- how it is written


def test_a_space_mirrors_the_configuration_with_or_without_dots() -> None:
    nested = {
        "optimizer": {"lr": "uniform(0.1, 1)"},
        "model": {"choice": {"mlp": {"dropout": "choice(0, 0.1)"}, "cnn": None}},
    }
    dotted = {"optimizer.lr": "uniform(0.1, 1)", "model.choice": {"mlp.dropout": "choice(0, 0.1)", "cnn": {}}}
    domains, problems = read(nested)
    assert (domains, problems) == read(dotted)
    assert problems == []
    assert list(domains) == ["optimizer.lr", "model", "model.choice.mlp.dropout"]
    assert domains["model"] == Domain("choice", ("mlp", "cnn"))


def test_null_takes_a_setting_out() -> None:
    assert read({"optimizer": {"lr": None}, "optimizer.lr": "uniform(0, 1)", "data": {"batch_size": None}}) == ({}, [])


def test_a_key_twice_is_refused() -> None:
    _, (problem,) = read({"optimizer": {"lr": "uniform(0, 1)"}, "optimizer.lr": "uniform(0, 2)"})
    assert "search.space.optimizer.lr is given twice" in problem


@pytest.mark.parametrize(
    ("typed", "hydras"),
    [
        ("search.space.a.b=loguniform(1e-4,1e-1)", "++search.space.a.b='loguniform(1e-4,1e-1)'"),
        ("+search.space.a=choice(1, 2)", "++search.space.a='choice(1, 2)'"),
        ("++search.space.a='choice(1, 2)'", "++search.space.a='choice(1, 2)'"),
        ("search.space.a=choice('x y', \"z\")", "++search.space.a='choice(\\'x y\\', \"z\")'"),
        ("search.space.a={choice: {b: {c: uniform(0, 1)}}}", "++search.space.a={choice: {b: {c: 'uniform(0, 1)'}}}"),
        ("search.space.a=null", "++search.space.a=null"),
        ("~search.space.a", "~search.space.a"),
        ("cluster.kuberay.labels={a.b/c: d}", "++cluster.kuberay.labels={a.b/c: d}"),
        ("cluster.kuberay.replicas=2", "cluster.kuberay.replicas=2"),
        ("seed=choice(1,2)", "seed=choice(1,2)"),
        ("-m", "-m"),
    ],
)
def test_a_domain_on_the_command_line(typed: str, hydras: str) -> None:
    assert with_domains([typed]) == [hydras]
    assert with_domains([hydras]) == [hydras]
    if typed[0] != "-":
        OverridesParser.create().parse_overrides([hydras])


def test_a_group_and_its_settings_on_the_command_line() -> None:
    whole, one = "search.space.model=choice(mlp, cnn)", "search.space.model.choice.mlp.hidden=choice([64], [128])"
    for overrides in ((whole, one), (one, whole), (whole, one, "search.space.model.dropout=uniform(0, 0.5)")):
        space = space_of(*overrides)
        assert set(space.domains["model"].values or ()) == {"mlp", "cnn"}
        assert list(space.domains)[:2] == ["model", "model.choice.mlp.hidden"]
    values = {"model": "cnn", "model.choice.mlp.hidden": [64], "model.dropout": 0.5}
    assert space.config(values) == make_config("model=cnn", "model.dropout=0.5")


def test_a_quoted_word_survives_hydra() -> None:
    space = space_of("search.space.data.name=choice('a-b', \"c+d\")")
    assert space.domains["data.name"].values == ["a-b", "c+d"]


def test_a_domain_stays_one_in_a_multirun() -> None:
    (override,) = OverridesParser.create().parse_overrides(with_domains(["search.space.seed=choice(1,2)"]))
    assert not override.is_sweep_override()
    assert override.value() == "choice(1,2)"


def test_spaces_of_files() -> None:
    """An experiment's space, and one key taken out on the command line."""
    space = compose_run("search=asha", "~search.space.data.batch_size")[2]
    assert space is not None
    assert list(space.domains) == ["optimizer.lr"]
    space = compose_run("search=asha", "search.space.data.batch_size=null")[2]
    assert space is not None
    assert list(space.domains) == ["optimizer.lr"]


# --- applied


def test_values_become_a_configuration() -> None:
    space = space_of("search.space.optimizer.lr=loguniform(1e-4,1e-1)", "search.space.data.batch_size=choice(32,64)")
    config = space.config({"optimizer.lr": 0.01, "data.batch_size": 32})
    expected = make_config("optimizer.lr=0.01", "data.batch_size=32")
    assert config == expected
    assert config.search == Search()
    assert space.overrides({"optimizer.lr": 0.01, "data.batch_size": 32}) == ["optimizer.lr=0.01", "data.batch_size=32"]


def test_an_argument_without_a_type_takes_any_value() -> None:
    space = space_of("optimizer=muon", "search.space.optimizer.adjust_lr_fn=choice(original, match_rms_adamw)")
    assert space.config({"optimizer.adjust_lr_fn": "original"}).optimizer["adjust_lr_fn"] == "original"


def test_references_follow_a_searched_value() -> None:
    space = space_of("search.space.data.num_classes=choice(10, 20)")
    assert space.config({"data.num_classes": 20}).model["num_classes"] == 20


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_whole_group_is_composed(model: str) -> None:
    space = space_of("search.space.model=choice(mlp, cnn)", "training.epochs=3", "model.dropout=0.1")
    assert space.config({"model": model}) == make_config(f"model={model}", "training.epochs=3", "model.dropout=0.1")


def test_two_groups() -> None:
    space = space_of("search.space.model=choice(mlp, cnn)", "search.space.optimizer=choice(sgd, adamw)")
    assert list(space.bases) == [
        f"model={m},optimizer={o}" for m, o in itertools.product(("mlp", "cnn"), ("sgd", "adamw"))
    ]
    assert space.config({"optimizer": "sgd", "model": "cnn"}) == make_config("model=cnn", "optimizer=sgd")
    assert space.configs()["model=mlp,optimizer=sgd"] == make_config("optimizer=sgd")


def test_settings_of_one_option() -> None:
    space = space_of(CONDITIONAL)
    values = {"model": "mlp", "model.choice.mlp.dropout": 0.25, "model.choice.mlp.hidden": [64]}
    assert space.config(values) == make_config("model=mlp", "model.dropout=0.25", "model.hidden=[64]")
    assert space.overrides(values) == ["model=mlp", "model.dropout=0.25", "model.hidden=[64]"]
    assert space.config({**values, "model": "cnn"}) == make_config("model=cnn")
    assert space.active({**values, "model": "cnn"}) == {"model": "cnn"}


def test_what_searchers_return_becomes_plain() -> None:
    import numpy as np

    space = space_of(
        CONDITIONAL, "search.space.data.batch_size=randint(8, 64)", "search.space.training.compile=choice(true, false)"
    )
    config = space.config(
        {
            "model": np.str_("mlp"), "model.choice.mlp.dropout": np.float64(0.25), "model.choice.mlp.hidden": (np.int64(64),),
            "data.batch_size": np.int64(8), "training.compile": np.True_,
        }
    )  # fmt: skip
    values = [config.model["dropout"], config.model["hidden"], config.data.batch_size, config.training.compile]
    assert values == [0.25, [64], 8, True]
    assert [type(value) for value in values] == [float, list, int, bool]


@pytest.mark.parametrize("value", ["a b", "it's", "true", "1", "a\\", "\\'", "null", "", "x${y}"])
def test_overrides_are_quoted(value: str) -> None:
    (override,) = Space({}, {"": None}).overrides({"name": value})  # type: ignore[dict-item]
    (parsed,) = OverridesParser.create().parse_overrides([override])
    assert str(parsed.value()) == value


def test_values_that_do_not_go_together() -> None:
    space = space_of("search.space.data.batch_size=choice(16, 64)", "search.space.data.micro_batch_size=choice(8, 32)")
    with pytest.raises(MantaError, match=r"data.micro_batch_size=32"):
        space.config({"data.batch_size": 16, "data.micro_batch_size": 32})


def test_a_configuration_is_quick() -> None:
    """A fraction of what composing it takes (about 10 ms)."""
    space = space_of("search.space.optimizer.lr=uniform(0.1, 1)")

    def quickest(work: Callable[[], Any]) -> float:
        return min(timeit.repeat(work, number=1, repeat=7))

    assert quickest(lambda: space.config({"optimizer.lr": 0.5})) < 0.5 * quickest(
        lambda: make_config("optimizer.lr=0.5")
    )


# --- grids


def test_a_grid_has_every_combination_once() -> None:
    space = compose_run("search=grid", "search/space=none", CONDITIONAL.replace("uniform(0, 0.5)", "choice(0.1, 0.2)"),
                        "search.space.seed=grid_search(1, 2)")[2]  # fmt: skip
    assert space is not None
    grid = space.grid()
    assert grid == [
        *({"model": "mlp", "model.choice.mlp.dropout": d, "model.choice.mlp.hidden": h, "seed": s}
          for d, h, s in itertools.product((0.1, 0.2), ([64], [128]), (1, 2))),
        {"model": "cnn", "seed": 1},
        {"model": "cnn", "seed": 2},
    ]  # fmt: skip
    assert grid == space.grid()
    assert len(grid) == combinations(space.domains) == 10
    assert [space.config(point).seed for point in grid[-2:]] == [1, 2]


# --- saved


def test_a_space_is_loaded_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another directory, and without conf/."""
    points = "search.points_to_evaluate=[{model: {choice: {mlp: {dropout: 0.1}}}}]"
    monkeypatch.chdir(tmp_path)
    space = space_of(CONDITIONAL, "search.space.optimizer.lr=loguniform(1e-5,1e-1)", points, "data.root=here")
    space.save(RunDir(tmp_path))
    config = make_config("search=random", f"storage.path={tmp_path}/moved", "scaling=cpu", "tags=[again]")
    monkeypatch.chdir("/")
    again = Space.load(RunDir(tmp_path), config)
    assert again.domains == space.domains
    assert list(map(str, again.domains.values())) == list(map(str, space.domains.values()))
    assert again.points == space.points == [{"model": "mlp", "model.choice.mlp.dropout": 0.1}]
    values = {"model": "cnn", "optimizer.lr": 1e-5}
    before, after = space.config(values), again.config(values)
    assert after.data.root == before.data.root == str(tmp_path / "here")
    assert (after.scaling, after.tags, after.storage.path) == (config.scaling, ["again"], f"{tmp_path}/moved")
    before.scaling, before.tags, before.storage = after.scaling, after.tags, after.storage
    assert after == before


@pytest.mark.parametrize(
    "content", [None, "a: [", "[]", "domains: {}\n", "domains: {lr: what}\npoints: []\nbases: {}\n"]
)
def test_a_damaged_space_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "space.yaml").write_text(content)
    with pytest.raises(MantaError, match=r"space\.yaml"):
        Space.load(RunDir(tmp_path), make_config())


# --- what is refused


@pytest.mark.parametrize(
    ("key", "domain", "says"),
    [
        ("optimizer.lrr", "uniform(0.1, 1)", "Did you mean search.space.optimizer.lr? An argument"),
        ("optimizer.momentum", "uniform(0, 0.9)", "+optimizer.momentum="),
        ("modle", "choice(mlp, cnn)", "Did you mean search.space.model?"),
        ("training", "choice(1, 2)", "training is a group of settings. Search one of them: training.epochs"),
        ("scaling.num_workers", "choice(1, 2)", "changes the speed"),
        ("cluster.num_cpus", "choice(1, 2)", "cluster is not searched"),
        ("storage.path", "choice(a, b)", "storage is not searched"),
        ("objective.mode", "choice(min, max)", "trials are compared by it"),
        ("recipe._target_", "choice(a, b)", "recipe is not searched"),
        ("search.seed", "choice(1, 2)", "does not search itself"),
        ("name", "choice(a, b)", "it is a label"),
        ("training.test", "choice(true, false)", "never look at the test split"),
        ("training.checkpoint.keep", "choice(1, 2)", "changes no result"),
        ("seed", "choice(1)", "has one value"),
        ("seed", "uniform(0, 3)", "seed must be a whole number, not 0.0. Did you mean randint(0, 4)?"),
        ("data.batch_size", "quniform(32, 128, 32)", "Did you mean qrandint(32, 128, 32)?"),
        ("data.batch_size", "loguniform(32, 128.5)", "Did you mean lograndint?"),
        ("data.batch_size", "choice(32, many)", "must be a whole number, not text"),
        ("data.batch_size", "choice(32, 0)", "data.batch_size=0 is out of range"),
        ("training.compile", "choice(1, 2)", "true or false"),
        ("training.precision", "choice(fp32, fp8)", "training.precision=fp8 must be one of"),
        ("training.precision", "choice(1, 2)", "must be text"),
        ("optimizer.lr", "uniform(-1, 1)", "search.space.optimizer.lr=uniform(-1, 1): optimizer.lr=-1.0 is out of range"),
        ("optimizer.lr", "choice(0.1, fast)", "must be a number, not text"),
        ("optimizer.lr", "randn(0.1, 0.1)", "out of range"),
        ("model.dropout", "uniform(0, 1)", "model.dropout=1.0 is out of range"),
        ("model.hidden", "choice(1, 2)", "not 1"),
        ("model", "choice(mlp, cn)", "cn is not an option of model, which has cnn, gpt, mlp, resnet18, vit. Did you mean cnn?"),
        ("model", "choice(1, 2)", "1 is not an option of model"),
        ("model", "uniform(0, 1)", "searched by its options: choice(cnn, gpt, mlp"),
        ("model.choice.mlp.dropout", "uniform(0, 0.5)", "has one value"),
        ("data.choice", "{digits: {choice: 3}}", "search.space.data.choice.digits.choice=3: this is a value"),
        ("optimizer.lr", "{choice: {a: 3}}", "must hold settings of a"),
        ("optimizer.lr", "{choice: {a: {}, b: {}}}", "must be a number, not text"),
        ("optimizer.lr", "{choice: {a: {b: 'uniform(0, 1)'}, b: {}}}", "optimizer.lr is no group"),
        ("model", "{choice: {mlp: {channels: 'choice([1], [2])'}, cnn: {}}}", "model=mlp has no setting model.channels"),
    ],
)  # fmt: skip
def test_a_bad_space_is_refused(key: str, domain: str, says: str) -> None:
    message = refusal(*EMPTY, f"search.space.{key}={domain}")
    assert says in message
    assert f"search.space.{key.partition('.choice')[0]}" in message


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((), "search.space is empty"),
        (("search.space.optimizer.lr=choice(0.1, 0.2)", "optimizer.lr=0.1"), "search.space.optimizer.lr=null"),
        (("search.space.model=choice(mlp, cnn)", "model=cnn"), "model=cnn sets what search.space.model"),
        (
            ("search.space.model=choice(mlp, vit)", "model.hidden=[3]"),
            "model.hidden=[3]: model=vit, one of the options",
        ),
        (
            ("search.space.model=choice(mlp, vit)", "search.space.model.hidden=choice([1], [2])"),
            "search.space.model.choice.mlp.hidden",
        ),
        (("search.space={model: choice(mlp, vit), optimizer: uniform(0)}",), "lacks upper"),
        ((CONDITIONAL, "search.space.model.choice.cnn.hidden=choice(a, b)"), "model.hidden must be a whole number"),
        (("search.space.seed=uniform(0)", "search.space.name=choice(a, b)"), "2 problems"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: tuple[str, ...], says: str) -> None:
    assert says in refusal(*EMPTY, *overrides)


@pytest.mark.parametrize(
    ("point", "says"),
    [
        ("{}", "[0] is empty"),
        ("{optimizer: {lrr: 0.1}}", "Did you mean optimizer.lr?"),
        ("{optimizer: {lr: 5}}", "optimizer.lr=5 is not in search.space.optimizer.lr=uniform(0.1, 1)"),
        ("{model: vit}", "model=vit is not in"),
        ("{model: cnn, model.choice.mlp.dropout: 0.1}", "is for model=mlp, and the point has model=cnn"),
    ],
)
def test_a_point_outside_the_space_is_refused(point: str, says: str) -> None:
    overrides = (CONDITIONAL, "search.space.optimizer.lr=uniform(0.1, 1)", f"search.points_to_evaluate=[{point}]")
    assert says in refusal(*EMPTY, *overrides)


# --- algorithms and schedulers


def test_arguments_have_the_defaults_of_their_files() -> None:
    """conf/search says what src/manta/search/settings.py says."""
    for part, known in (("algorithm", settings.ALGORITHMS), ("scheduler", settings.SCHEDULERS)):
        files = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "conf/search" / part).glob("*.yaml")}
        files.pop("none", None)
        assert files == {name: {"name": name, **vars(made())} for name, made in known.items()}


@pytest.mark.parametrize("option", sorted(path.stem for path in (ROOT / "conf/search").glob("*.yaml")))
def test_every_search_is_complete(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manta.search.rules.missing_library", lambda _: None)
    config, _, space = compose_run(f"search={option}")
    assert (space is None) == (option == "none")
    if option != "none":
        assert settings.algorithm(config.search) is not None
        scheduler = settings.scheduler(config)
        assert getattr(scheduler, "max_t", 15) == 15


@pytest.mark.parametrize(("algorithm", "scheduler"), itertools.product(("random", "optuna", "hyperopt"), ("none", "asha", "hyperband", "median_stopping")))  # fmt: skip
def test_algorithms_and_schedulers_combine(algorithm: str, scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manta.search.rules.missing_library", lambda _: None)
    for overrides in ((f"search={algorithm}", f"search/scheduler={scheduler}"), ("search=random", f"search/algorithm={algorithm}", f"search/scheduler={scheduler}")):  # fmt: skip
        config = make_config(*overrides)
        assert config.search.algorithm["name"] == algorithm
        assert config.search.scheduler.get("name", "none") == scheduler


def test_what_is_missing_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for name in settings.LIBRARIES:
        message = settings.missing_library(name) or ""
        assert f"search.algorithm.name={name}" in message
        assert f"pip install -e '.[{settings.LIBRARIES[name][1]}]'" in message
    assert settings.missing_library("random") is None
    extras = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in extras for _, extra in settings.LIBRARIES.values())


def test_an_old_bayesian_optimization_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr("importlib.metadata.version", lambda _: "3.4.0")
    assert "3.4.0 is installed" in (settings.missing_library("bayesopt") or "")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.5.1")
    assert settings.missing_library("bayesopt") is None


def test_what_may_change_in_mid_training() -> None:
    for key, text, mutable in (
        ("optimizer.lr", "loguniform(1e-4, 1)", True),
        ("optimizer.choice.sgd.momentum", "choice(0.8, 0.9)", True),
        ("optimizer.nesterov", "choice(true, false)", False),
        ("optimizer", "choice(sgd, adamw)", False),
        ("training.label_smoothing", "uniform(0, 0.1)", True),
        ("data.batch_size", "choice(32, 64)", False),
    ):
        assert is_mutable(key, parse(text)) == mutable, key


# --- resume


@pytest.fixture
def search_dir(tmp_path: Path) -> RunDir:
    return saved_search(tmp_path, "search=asha")


def saved_search(folder: Path, *overrides: str) -> RunDir:
    config, _, space = compose_run(f"storage.path={folder}", *overrides)
    assert space is not None
    run = RunDir(folder / "2026-01-01" / "00-00-00")
    run.path.mkdir(parents=True)
    run.begin(config, list(overrides))
    run.write("summary.json", {"step": 7})  # of no checkpoint of its own
    space.save(run)
    return run


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("search.num_samples=40", "search.time_budget_s=60", "search.max_concurrent_trials=1", "search.max_failures=2"),
        ("search.refit=false", "search.refit_seeds=1", "cluster.num_cpus=2", "scaling=cpu", "tags=[more]", "plan=true"),
        ("search.space.optimizer.lr=loguniform(0.0001, 0.1)",),
    ],
)
def test_a_search_is_continued(search_dir: RunDir, changes: tuple[str, ...]) -> None:
    config, previous, space = compose_run(f"resume={search_dir.path}", *changes)
    assert previous == search_dir
    assert space is not None
    assert list(space.domains) == ["optimizer.lr", "data.batch_size"]
    assert config.search.num_samples == (40 if "search.num_samples=40" in changes else 20)
    trial = space.config({"optimizer.lr": 0.01, "data.batch_size": 32})
    assert (trial.scaling, trial.cluster, trial.tags) == (config.scaling, config.cluster, config.tags)
    assert config.search.space["optimizer"]["lr"] == "loguniform(1e-4, 1e-1)"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("search.space.optimizer.lr=uniform(0.1, 1)", "optimizer.lr is loguniform(1e-4, 1e-1) there, not uniform(0.1, 1)"),
        ("search.space.seed=choice(1, 2)", "seed is not searched there, not choice(1, 2)"),
        ("search/space=grid", "data.batch_size is choice(32, 64, 128) there, not grid_search(32, 128)"),
        *((change, "it would be another search than") for change in (
            "search=pbt", "search/algorithm=optuna", "search.seed=1", "optimizer.lr=0.1", "model=cnn", "training.epochs=20",
            "objective.mode=min", "search.points_to_evaluate=[{optimizer: {lr: 0.1}}]", "~optimizer.lr", "seed=3",
        )),
    ],
)  # fmt: skip
def test_another_search_is_refused(search_dir: RunDir, change: str, says: str) -> None:
    message = refusal(f"resume={search_dir.path}", change)
    assert says in message
    assert "cannot be changed on resume" in message
    assert "without resume=" in message


@pytest.mark.parametrize(
    ("option", "says"), [("grid", "is a grid"), ("pbt", "population of"), ("pb2", "population of")]
)
def test_the_number_of_some_trials_is_fixed(tmp_path: Path, option: str, says: str) -> None:
    run = saved_search(tmp_path, f"search={option}")
    assert says in refusal(f"resume={run.path}", "search.num_samples=9")


def test_a_run_does_not_become_a_search(tmp_path: Path) -> None:
    config = make_config(f"storage.path={tmp_path}")
    run = RunDir(tmp_path / "2026-01-01" / "00-00-00")
    run.path.mkdir(parents=True)
    run.begin(config, [])
    for change in ("search=asha", "search.num_samples=3", "search/algorithm=optuna"):
        assert "another run" in refusal(f"resume={run.path}", change)


def test_a_trial_is_an_ordinary_configuration() -> None:
    space = space_of("search.space.seed=choice(1, 2)")
    config = space.config({"seed": 2})
    assert isinstance(config, Config)
    check(config)
    assert (config.resume, config.plan, config.traceback) == (None, False, False)
