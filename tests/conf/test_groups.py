"""Every option of data, model, optimizer, scheduler, experiment and debug composes, is typed, and builds."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from manta.config import Config, register
from manta.data.load import load_splits
from manta.data.transforms import build_transforms
from manta.targets import bind, build, locate, split
from manta.training.tasks import make_task

CONF = Path(__file__).parents[2] / "conf"
ALLOWED = ["manta", "torch", "torchvision"]
SIZES = {
    "diabetes": ([10], 1),
    "digits": ([1, 8, 8], 10),
    "mnist": ([1, 28, 28], 10),
    "fashion_mnist": ([1, 28, 28], 10),
    "kmnist": ([1, 28, 28], 10),
    "cifar10": ([3, 32, 32], 10),
    "cifar100": ([3, 32, 32], 100),
    "snippets": ([128], 4),
    "table": ([10], 2),
    "text": ([128], 256),
}


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.fixture
def composed():
    """Overrides -> the typed configuration, as train.py makes it."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):

        def make(*overrides: str) -> Config:
            config = OmegaConf.to_object(compose("config", list(overrides)))
            assert isinstance(config, Config)
            return config

        yield make


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def test_the_groups_are_complete():
    assert set(options("data")) >= {
        "digits", "mnist", "fashion_mnist", "kmnist", "cifar10", "cifar100", "image_folder", "synthetic", "diabetes", "text"
    }  # fmt: skip
    assert set(options("model")) >= {"mlp", "cnn", "resnet18", "vit", "gpt"}
    assert set(options("optimizer")) >= {"adamw", "adam", "sgd", "muon"}
    assert set(options("scheduler")) >= {"constant", "cosine", "wsd", "step", "plateau"}
    assert set(options("debug")) >= {"default", "limit", "overfit", "profiler"}


@pytest.mark.parametrize("name", options("data"))
def test_data(composed, name):
    data = composed(f"data={name}", "data.root=/some/where", "data.split_seed=3").data
    target, arguments = split(data.dataset)
    bind("data.dataset", locate("data.dataset", target, ALLOWED), (), arguments)
    assert data.name == name and (data.input_shape, data.num_classes) == SIZES.get(name, (data.input_shape, 10))
    assert arguments.get("root", "/some/where") == "/some/where"
    assert name == "table" or 3 in (arguments.get("split_seed"), arguments.get("seed"))  # a table comes in splits
    build_transforms("data.transforms.train", data.transforms.train, ALLOWED)
    assert [step["_target_"] for step in data.transforms.train] == (
        ["manta.data.transforms.RandomCropFlip"] if name.startswith("cifar") else []
    )


@pytest.mark.parametrize(
    "overrides",
    [["data=digits"], ["data=synthetic"], ["data=synthetic", "data.input_shape=[7]"], ["data=diabetes"], ["data=text"]],
)
def test_what_needs_no_files_loads(composed, overrides):
    config = composed(*overrides)
    data = config.data
    inputs, _ = load_splits(data, ALLOWED, make_task(config).check_targets).train.batch(torch.arange(3))
    assert list(inputs.shape) == [3, *data.input_shape]


@pytest.mark.parametrize("name", sorted(set(options("model")) - {"gpt"}))
@pytest.mark.parametrize("data", ["digits", "cifar100"])
def test_model_takes_its_sizes_from_the_data(composed, name, data):
    config = composed(f"model={name}", f"data={data}")
    model = build("model", config.model, ALLOWED)
    assert model(torch.zeros(2, *config.data.input_shape)).shape == (2, config.data.num_classes)


def test_gpt_takes_its_sizes_from_the_data(composed):
    config = composed("model=gpt", "data=text", "data.input_shape=[12]")
    model = build("model", config.model, ALLOWED)
    assert model(torch.zeros(2, 12, dtype=torch.int64)).shape == (2, 12, 256)


@pytest.mark.parametrize("name", options("recipe/task"))
def test_tasks_report_what_their_file_says(composed, name):
    config = composed(f"recipe/task={name}")
    assert config.recipe.metrics == [f"val/{metric}" for metric in make_task(config).names]
    assert config.objective.metric in config.recipe.metrics


@pytest.mark.parametrize("name", options("optimizer"))
def test_optimizer(composed, name):
    parameters = list(torch.nn.Linear(2, 2).parameters())
    optimizer = build("optimizer", composed(f"optimizer={name}", "optimizer.lr=0.25").optimizer, ALLOWED, parameters)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("name", options("scheduler"))
def test_scheduler(composed, name):
    spec = composed(f"scheduler={name}").scheduler
    assert spec.pop("unit") in ("step", "epoch", "validation")
    scheduler = build("scheduler", spec, ALLOWED, sgd(), total=20, mode="max")
    if name == "plateau":
        assert scheduler.mode == "max"
    else:
        assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)


@pytest.mark.parametrize("name", options("experiment"))
def test_experiment(composed, name):
    config = composed(f"experiment={name}")
    assert config.name == name
    model = build("model", config.model, ALLOWED)
    build("optimizer", config.optimizer, ALLOWED, model.parameters())
    assert model(torch.zeros(2, *config.data.input_shape)).shape == (2, config.data.num_classes)


def test_an_experiment_replaces_groups_and_the_command_line_wins(composed):
    config = composed("experiment=digits_vit")
    assert config.model["_target_"] == "manta.models.vit.ViT" and config.model["patch_size"] == 2
    assert "hidden" not in config.model and config.training.epochs == 20
    assert config.optimizer["_target_"] == "manta.training.optimizers.muon" and "betas" not in config.optimizer
    config = composed("experiment=digits_vit", "model=mlp", "~model.patch_size", "training.epochs=1")
    assert config.model["_target_"] == "manta.models.mlp.MLP" and config.training.epochs == 1


@pytest.mark.parametrize("name", options("debug"))
@pytest.mark.parametrize("experiment", [None, *options("experiment")])
def test_debug_is_in_process_and_short(composed, name, experiment):
    config = composed(f"debug={name}", *([f"experiment={experiment}"] if experiment else []))
    assert config.scaling.num_workers == 0 and config.traceback and config.tags == ["debug"]
    assert (config.training.limit_train_batches or config.training.overfit_batches) <= 20


def test_what_the_debug_modes_are_for(composed):
    assert composed("debug=default").training.epochs == 1
    assert composed("debug=limit").training.epochs == 3
    overfit = composed("debug=overfit", "data=cifar10")
    assert overfit.training.overfit_batches == 3 and overfit.data.transforms.train == []
    assert composed("debug=profiler").training.profile
    assert composed("debug=limit", "scaling=cpu", "training.epochs=2").scaling.num_workers == 2
