"""Every model learns digits, in this process and on two workers; the default reaches what the README promises."""

import pytest
import torch
import torch._dynamo

from tests.conftest import Lab, history, summary

# model, epochs, test accuracy it must reach (reached with seed 0: 0.983, 0.989, 0.989, 0.978)
MODELS = [("mlp", 15, 0.96), ("cnn", 15, 0.97), ("resnet18", 3, 0.96), ("vit", 15, 0.95)]


@pytest.mark.parametrize(("model", "epochs", "accuracy"), MODELS)
def test_in_process(lab: Lab, model: str, epochs: int, accuracy: float) -> None:
    run = lab.run("scaling=in_process", f"model={model}", f"training.epochs={epochs}")
    assert summary(run)["test"]["test/accuracy"] >= accuracy


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("model", "epochs", "accuracy"), [MODELS[0], *(pytest.param(*each, marks=pytest.mark.drill) for each in MODELS[1:])]
)
def test_on_two_workers(lab: Lab, model: str, epochs: int, accuracy: float) -> None:
    run = lab.run("scaling=cpu", f"model={model}", f"training.epochs={epochs}")
    assert summary(run)["test"]["test/accuracy"] >= accuracy
    assert summary(run)["world_size"] == 2


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "muon"])
@pytest.mark.parametrize("scheduler", ["constant", "cosine", "wsd", "step", "plateau"])
def test_optimizers_and_schedulers(lab: Lab, optimizer: str, scheduler: str) -> None:
    rate = {"sgd": 0.1, "muon": 0.01}.get(optimizer, 0.002)
    run = lab.run("scaling=in_process", f"optimizer={optimizer}", f"optimizer.lr={rate}", f"scheduler={scheduler}")
    assert summary(run)["test"]["test/accuracy"] >= 0.93
    rates = [line["train/lr"] / rate for line in history(run) if "train/lr" in line]
    assert max(rates) == pytest.approx(1, abs=0.02)
    middle, last = rates[len(rates) // 2], rates[-1]
    if scheduler in ("constant", "wsd"):
        assert middle == pytest.approx(1)
    if scheduler == "cosine":
        assert middle == pytest.approx(0.5, abs=0.1)
    if scheduler in ("cosine", "wsd"):
        assert last < 0.1
    if scheduler == "step":  # a tenth after 4, 8 and 12 of 15 epochs
        assert last == pytest.approx(1e-3)
    if scheduler == "plateau":
        *values, _ = [line["val/accuracy"] for line in history(run) if "val/accuracy" in line]
        alone = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        reduce = torch.optim.lr_scheduler.ReduceLROnPlateau(alone, "max", factor=0.5, patience=2, threshold=1e-4)
        for value in values:
            reduce.step(value)
        assert last == pytest.approx(alone.param_groups[0]["lr"])


@pytest.mark.parametrize(
    "setting",
    ["training.precision=bf16", "training.precision=fp64", "training.ema.enabled=true", "training.compile=true",
     "training.grad_clip_norm=1.0", "training.label_smoothing=0.1", "training.deterministic=true",
     "data.transforms.train=[{_target_: torchvision.transforms.v2.GaussianNoise, mean: 0.0, sigma: 0.05}]"],
)  # fmt: skip
def test_settings_of_the_loop(lab: Lab, setting: str) -> None:
    """Each learns, and each does something."""
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] if "compile" in setting else 0
    try:
        run = lab.run("scaling=in_process", setting)
        assert torch.are_deterministic_algorithms_enabled() == ("deterministic" in setting)
    finally:
        torch.use_deterministic_algorithms(False)
    assert summary(run)["test"]["test/accuracy"] >= 0.95
    if "compile" in setting:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > compiled
    elif "deterministic" not in setting:
        default = lab.run("scaling=in_process", "training.epochs=1", "training.test=false", "scheduler.total=345")
        assert history(run)[0]["step"] == history(default)[0]["step"]
        first = next(line for line in history(run) if "val/loss" in line)
        assert first["val/loss"] != history(default)[-1]["val/loss"]


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_processes(lab: Lab, workers: int) -> None:
    """A data set that is not in memory, read in this process or by two others, gives the same run as one that is."""
    settings = ("scaling=in_process", "data=synthetic", "data.dataset.num_samples=300", "training.epochs=3")
    kept = lab.run(*settings, "data.dataset.in_memory=true")
    read = lab.run(*settings, "data.dataset.in_memory=false", f"data.num_workers={workers}")
    assert history(read) == history(kept)
    assert summary(read)["test"]["test/accuracy"] >= 0.95
