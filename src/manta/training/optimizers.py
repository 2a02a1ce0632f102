"""Optimizers that torch does not have in one piece."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer


class MuonWithAdamW(Optimizer):
    """torch.optim.Muon for the 2-D weights and torch.optim.AdamW for the rest, as one optimizer.

    Its param_groups are Muon's and AdamW's, each with `muon: bool`; its state_dict is any optimizer's.
    The two inner optimizers work on these groups and this state, and hold nothing of their own.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: AdamW | None) -> None:
        self._inner: dict[bool, Optimizer] = {True: muon} if adamw is None else {True: muon, False: adamw}
        groups = [{**group, "muon": kind} for kind, inner in self._inner.items() for group in inner.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for kind, inner in self._inner.items():
            # Set at every step: load_state_dict replaces groups and state by new objects.
            inner.param_groups = [group for group in self.param_groups if group["muon"] == kind]
            inner.state = self.state
            inner.step()
        return loss


def muon(
    params: Iterable[Tensor],
    lr: float = 0.02,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.01,
    ns_steps: int = 5,
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None = None,
    adamw_lr: float = 3e-3,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-8,
    adamw_weight_decay: float = 0.01,
) -> Optimizer:
    """Muon for 2-D weights (lr, momentum, nesterov, weight_decay, ns_steps, adjust_lr_fn: torch.optim.Muon's own
    names), AdamW for biases, norms, convolutions and all other shapes (adamw_*).

    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon. Learning-rate schedules scale `lr` and `adamw_lr`
    alike. The output layer's weight is 2-D too and goes to Muon: parameters do not say what they are for.

    Raises:
        ValueError: there is no 2-D weight, or torch refuses a value.
    """
    everything: list[Any] = list(params)
    matrices = [param for param in everything if param.dim() == 2]
    rest = [param for param in everything if param.dim() != 2]
    if not matrices:
        raise ValueError("params has no 2-D weight for Muon: use another optimizer, e.g. adamw")
    return MuonWithAdamW(
        torch.optim.Muon(
            matrices,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        ),
        AdamW(rest, lr=adamw_lr, betas=adamw_betas, eps=adamw_eps, weight_decay=adamw_weight_decay) if rest else None,
    )
