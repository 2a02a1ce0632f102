"""Schedules against closed forms, in every group, through a checkpoint, and as the trainer builds them."""

import io
import math
import pickle

import pytest
import torch

from manta.errors import MantaError
from manta.targets import build
from manta.training.schedules import constant, cosine, wsd


def sgd(*lrs: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs])


def ratios(make, steps: int, lr: float = 0.5) -> list[float]:
    """lr / initial lr used by each of `steps` optimizer steps, and what comes after them."""
    optimizer = sgd(lr)
    scheduler, seen = make(optimizer), []
    for _ in range(steps + 1):
        seen.append(optimizer.param_groups[0]["lr"] / lr)
        optimizer.step()
        scheduler.step()
    return seen


def test_cosine_values():
    got = ratios(lambda o: cosine(o, total=10, warmup=0.2, min_ratio=0.1), 12)
    rest = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(9)]
    assert got == pytest.approx([0.5, 1.0, *rest, 0.1, 0.1])
    assert got[2] == 1.0 and got[6] == pytest.approx(0.55)


def test_cosine_without_warmup_starts_at_the_peak_and_ends_at_zero():
    got = ratios(lambda o: cosine(o, total=4, warmup=0.0), 4)
    assert got == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0])


def test_warmup_from_one_on_is_units():
    assert ratios(lambda o: cosine(o, total=100, warmup=4), 3) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert ratios(lambda o: cosine(o, total=100, warmup=0.04), 3) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert ratios(lambda o: constant(o, warmup=2), 3) == [0.5, 1.0, 1.0, 1.0]
    assert ratios(constant, 3) == [1.0] * 4


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
def test_wsd_values(shape, half):
    got = ratios(lambda o: wsd(o, total=10, warmup=2, decay=0.2, shape=shape), 11)
    assert got == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 1, 1, half, 0, 0])


def test_wsd_minimum_and_no_decay():
    assert ratios(lambda o: wsd(o, total=4, warmup=0, decay=4, min_ratio=0.2), 4) == pytest.approx(
        [1, 0.8, 0.6, 0.4, 0.2]
    )
    assert ratios(lambda o: wsd(o, total=3, warmup=0, decay=0), 4) == [1.0] * 5


def test_every_group_scales_from_its_own_lr():
    optimizer = sgd(0.02, 3e-4)
    scheduler = cosine(optimizer, total=2, warmup=0.0)
    optimizer.step()
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.01, 1.5e-4])
    assert [g["initial_lr"] for g in optimizer.param_groups] == [0.02, 3e-4]


@pytest.mark.parametrize("make", [lambda o: constant(o, warmup=6), lambda o: cosine(o, 12), lambda o: wsd(o, 12)])
def test_resume_is_exact_and_the_state_is_plain(make):
    expected = ratios(make, 11)
    optimizer = sgd(0.5)
    scheduler = make(optimizer)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    file = io.BytesIO()
    torch.save({"o": optimizer.state_dict(), "s": scheduler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = sgd(0.5)
    resumed = make(fresh)
    fresh.load_state_dict(saved["o"])
    resumed.load_state_dict(saved["s"])
    seen = []
    for _ in range(7):
        seen.append(fresh.param_groups[0]["lr"] / 0.5)
        fresh.step()
        resumed.step()
    assert seen == expected[5:]
    pickle.dumps(resumed.lr_lambdas)


def test_a_longer_resumed_run_follows_its_own_schedule():
    short, long = sgd(1.0), sgd(1.0)
    state = cosine(short, total=4, warmup=0.0).state_dict()
    scheduler = cosine(long, total=8, warmup=0.0)
    scheduler.load_state_dict(state)
    for _ in range(4):
        long.step()
        scheduler.step()
    assert long.param_groups[0]["lr"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: cosine(o), "total=None"),
        (lambda o: cosine(o, total=0), "total=0"),
        (lambda o: cosine(o, total=10, warmup=10), "warmup=10 leaves nothing of total=10"),
        (lambda o: cosine(o, total=10, warmup=-1), "warmup=-1"),
        (lambda o: cosine(o, total=10, min_ratio=1.5), "min_ratio=1.5"),
        (lambda o: constant(o, warmup=0.1), "total=None"),
        (lambda o: wsd(o, total=10, warmup=0.5, decay=0.6), "warmup=0.5 and decay=0.6 do not fit in total=10"),
        (lambda o: wsd(o, total=10, decay=-1), "decay=-1"),
        (lambda o: wsd(o, total=10, shape="steep"), "shape=steep"),  # type: ignore[arg-type]
    ],
)
def test_bad_values_name_their_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call(sgd(0.1))


def test_the_trainer_fills_total_where_the_config_leaves_it_null():
    spec = {"_target_": "manta.training.schedules.cosine", "total": None, "warmup": 0.0, "min_ratio": 0.0}
    scheduler = build("scheduler", spec, ["manta"], sgd(1.0), total=7, mode="max")
    assert scheduler.lr_lambdas[0].keywords["total"] == 7
    set_by_hand = build("scheduler", {**spec, "total": 9}, ["manta"], sgd(1.0), total=7, mode="max")
    assert set_by_hand.lr_lambdas[0].keywords["total"] == 9
    with pytest.raises(MantaError, match=r"scheduler: .*cosine refuses.*min_ratio=2"):
        build("scheduler", {**spec, "min_ratio": 2}, ["manta"], sgd(1.0), total=7)
