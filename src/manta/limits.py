"""Argument checks that models and data sets share; each raises a ValueError naming the argument."""

import math
from collections.abc import Sequence


def image_shape(input_shape: Sequence[int]) -> tuple[int, int, int]:
    """`input_shape` as (channels, height, width)."""
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ValueError(f"input_shape={list(input_shape)} must be [channels, height, width]")
    channels, height, width = input_shape
    return channels, height, width


def flat_size(input_shape: Sequence[int]) -> int:
    """Number of values in one sample."""
    if not input_shape or min(input_shape) < 1:
        raise ValueError(f"input_shape={list(input_shape)} must have sizes of at least 1")
    return math.prod(input_shape)


def positive(**sizes: int) -> None:
    """Every size is at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")


def probability(**values: float) -> None:
    """Every value is in [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be in [0, 1)")
