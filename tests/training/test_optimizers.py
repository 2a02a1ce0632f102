"""Muon with AdamW: each parameter moves as its own torch optimizer would move it, and a checkpoint is exact."""

import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manta.training.optimizers import muon
from manta.training.schedules import cosine


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(3 * 36, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 1, 8, 8, generator=generator), torch.randint(4, (6,), generator=generator))
        for _ in range(count)
    ]


def train(net, optimizers, data, schedulers=()) -> None:
    for inputs, targets in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        for part in (*optimizers, *schedulers):
            part.step()


def test_it_is_muon_on_matrices_and_adamw_on_the_rest():
    ours, theirs = model(), model()
    train(ours, [muon(ours.parameters(), lr=0.03, momentum=0.9, weight_decay=0.1, adamw_lr=0.004)], batches(4))
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    rest = [p for p in theirs.parameters() if p.dim() != 2]
    assert len(matrices) == 2 and len(rest) == 6
    pair = [
        torch.optim.Muon(matrices, lr=0.03, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=0.004, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    train(theirs, pair, batches(4))
    for mine, reference, start in zip(ours.parameters(), theirs.parameters(), model().parameters(), strict=True):
        assert torch.equal(mine, reference) and not torch.equal(mine, start)


def test_checkpoint_is_exact_and_loads_with_weights_only():
    net = model()
    optimizer = muon(net.parameters())
    scheduler = cosine(optimizer, total=8, warmup=2)
    train(net, [optimizer], batches(3), [scheduler])
    file = io.BytesIO()
    torch.save({"m": net.state_dict(), "o": optimizer.state_dict(), "s": scheduler.state_dict()}, file)
    train(net, [optimizer], batches(5), [scheduler])

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(108, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    resumed = muon(other.parameters())
    again = cosine(resumed, total=8, warmup=2)
    other.load_state_dict(saved["m"])
    resumed.load_state_dict(saved["o"])
    again.load_state_dict(saved["s"])
    train(other, [resumed], batches(5), [again])

    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert_same(optimizer.state_dict(), resumed.state_dict())
    assert scheduler.state_dict() == again.state_dict()


def assert_same(left, right) -> None:
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


def test_state_has_momentum_for_matrices_and_moments_for_the_rest():
    net = model()
    optimizer = muon(net.parameters())
    train(net, [optimizer], batches(1))
    kinds = {p.dim() == 2: set(optimizer.state[p]) for p in net.parameters()}
    assert kinds == {True: {"momentum_buffer"}, False: {"step", "exp_avg", "exp_avg_sq"}}


def test_schedules_scale_each_group_from_its_own_lr():
    net = model()
    optimizer = muon(net.parameters(), lr=0.02, adamw_lr=0.003)
    scheduler = cosine(optimizer, total=2, warmup=0.0)
    assert [(g["muon"], g["initial_lr"]) for g in optimizer.param_groups] == [(True, 0.02), (False, 0.003)]
    train(net, [optimizer], batches(1), [scheduler])
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.01, 0.0015])


def test_a_rate_of_zero_stops_both():
    net = model()
    optimizer = muon(net.parameters())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(net, [optimizer], batches(1))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), model().parameters(), strict=True))


def test_closure_and_only_matrices():
    weight = nn.Parameter(torch.eye(3))
    optimizer = muon([weight])
    assert len(optimizer.param_groups) == 1

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert closure().item() < 3.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: muon([nn.Parameter(torch.zeros(3))]), "no 2-D weight"),
        (lambda: muon([]), "no 2-D weight"),
        (lambda: muon([nn.Parameter(torch.eye(3))], lr=-1.0), "[Ll]earning rate"),
        (lambda: muon(model().parameters(), adamw_lr=-1.0), "Invalid learning rate"),
    ],
)
def test_bad_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()
