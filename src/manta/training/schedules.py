"""Learning-rate schedules. Each multiplies every parameter group's own initial lr by a ratio in [0, 1].

`total` is the schedule's length in the config's `scheduler.unit`; the trainer fills it with the training's length
where the config leaves it null. `warmup` and `decay` are fractions of `total` below 1, and units from 1 on.
A schedule's state_dict holds only plain numbers: its shape comes from the config, so a resumed run that is made
longer follows the longer schedule.
"""

import math
from functools import partial
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Shape = Literal["linear", "sqrt"]


def _units(name: str, value: float, total: int | None) -> int:
    """A length given as a fraction of `total` (below 1) or in units."""
    if value < 0:
        raise ValueError(f"{name}={value} must be at least 0")
    if value >= 1 or value == 0:
        return round(value)
    return round(value * _required(total))


def _required(total: int | None) -> int:
    if total is None or total < 1:
        raise ValueError(f"total={total} must be at least 1: set it, or leave it null where the training has an end")
    return total


def _warm(time: int, warmup: int) -> float:
    """Linear warm-up: 1/warmup at time 0, 1 from time warmup - 1 on."""
    return min(1.0, (time + 1) / warmup) if warmup else 1.0


def _cosine(time: int, total: int, warmup: int, min_ratio: float) -> float:
    if time < warmup:
        return _warm(time, warmup)
    progress = min(1.0, (time - warmup) / (total - warmup))
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def _wsd(time: int, total: int, warmup: int, decay: int, min_ratio: float, shape: Shape) -> float:
    if decay == 0 or time < total - decay:
        return _warm(time, warmup)
    progress = min(1.0, (time - (total - decay)) / decay)
    return min_ratio + (1 - min_ratio) * (1 - (progress if shape == "linear" else math.sqrt(progress)))


def _check_ratio(min_ratio: float) -> None:
    if not 0 <= min_ratio <= 1:
        raise ValueError(f"min_ratio={min_ratio} must be in [0, 1]")


def constant(optimizer: Optimizer, total: int | None = None, warmup: float = 0.0) -> LambdaLR:
    """Linear warm-up, then the initial lr for ever. `total` only matters where `warmup` is a fraction.

    Raises:
        ValueError: a negative warm-up, or a fraction without `total`.
    """
    return LambdaLR(optimizer, partial(_warm, warmup=_units("warmup", warmup, total)))


def cosine(optimizer: Optimizer, total: int | None = None, warmup: float = 0.05, min_ratio: float = 0.0) -> LambdaLR:
    """Linear warm-up, then half a cosine from the initial lr down to `min_ratio` of it, which holds after `total`.

    Loshchilov and Hutter 2016 (SGDR, arXiv:1608.03983) without restarts; warm-up as in Goyal et al. 2017
    (arXiv:1706.02677).

    Raises:
        ValueError: no `total`, a warm-up that leaves nothing of it, or min_ratio outside [0, 1].
    """
    _check_ratio(min_ratio)
    total, rise = _required(total), _units("warmup", warmup, total)
    if rise >= total:
        raise ValueError(f"warmup={warmup} leaves nothing of total={total}")
    return LambdaLR(optimizer, partial(_cosine, total=total, warmup=rise, min_ratio=min_ratio))


def wsd(
    optimizer: Optimizer,
    total: int | None = None,
    warmup: float = 0.05,
    decay: float = 0.2,
    min_ratio: float = 0.0,
    shape: Shape = "linear",
) -> LambdaLR:
    """Warm-up, stable, decay: linear warm-up, the initial lr, then down to `min_ratio` over the last `decay`.

    Hu et al. 2024 (MiniCPM, arXiv:2404.06395). `shape` of the decay: linear, or 1 - sqrt(progress), which
    Haegele et al. 2024 (arXiv:2405.18392) found better; both papers decay over the last 10 to 20 %.

    Raises:
        ValueError: no `total`, warm-up and decay that do not fit in it, or min_ratio outside [0, 1].
    """
    _check_ratio(min_ratio)
    if shape not in ("linear", "sqrt"):
        raise ValueError(f"shape={shape} must be linear or sqrt")
    total, rise, fall = _required(total), _units("warmup", warmup, total), _units("decay", decay, total)
    if rise + fall > total:
        raise ValueError(f"warmup={warmup} and decay={decay} do not fit in total={total}")
    ratio = partial(_wsd, total=total, warmup=rise, decay=fall, min_ratio=min_ratio, shape=shape)
    return LambdaLR(optimizer, ratio)
