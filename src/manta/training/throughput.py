"""How fast training is, in the units that matter: tokens a second, and the part of what the device could do."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

# Dense peak FLOP/s by a part of the device's name: in bf16 or fp16, and in fp32 without TF32. From NVIDIA's data sheets, the SXM
# version where there are several; the longer names come first.
PEAKS = {
    "B200": (2250e12, 75e12),
    "H200": (989e12, 67e12),
    "GH200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "A10": (125e12, 31.2e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """What a device can do at best, in FLOP/s; None = not known."""
    if device.type != "cuda" or precision == "fp64":
        return None
    name = torch.cuda.get_device_name(device)
    found = next((peaks for part, peaks in PEAKS.items() if part in name), None)
    return None if found is None else found[0 if precision in ("bf16", "fp16") else 1]


def training_flops(model: nn.Module, inputs: Tensor) -> float:
    """Floating point operations of a sample's forward and backward pass, which is twice the forward one.

    Args:
        model, inputs: on the meta device.
    """
    with FlopCounterMode(display=False) as counter:
        model(inputs)
    return 3 * counter.get_total_flops() / len(inputs)


Speeds = Callable[[float], dict[str, float]]
"""From samples a second (of all ranks) to the other numbers that are reported beside it."""


def speeds(tokens: int | None, flops: float | None, peak: float | None) -> Speeds:
    """Tokens a second and MFU, where they mean something.

    MFU: model FLOP/s utilisation, what the model needs without recomputation by what the devices could do. Chowdhery et al.
    2022, PaLM, arXiv:2204.02311, appendix B.

    Args:
        tokens: a sample has; None = it has none.
        flops: of training on a sample.
        peak: of all devices together, FLOP/s.
    """

    def of(samples_per_s: float) -> dict[str, float]:
        found = {} if tokens is None else {"tokens_per_s": round(samples_per_s * tokens, 1)}
        if flops and peak:
            found["mfu"] = round(samples_per_s * flops / peak, 4)
        return found

    return of
