"""Calls of linear_cross_entropy with soft targets."""

from __future__ import annotations

import torch
from specimens import Inputs, cross_entropy_inputs


def soft_inputs(
    rows: int | tuple[int, ...] = 257,
    classes: int = 67,
    width: int = 19,
    targets: int = 5,
    *,
    dtype: torch.dtype,
    device: torch.device,
    bias: bool = False,
    ignored: float = 0.2,
    ignore_index: int = -100,
    level: float = 0,
) -> Inputs:
    """x, weight, target, target_probs and bias. A fifth of all targets is ignored, and all targets of some
    tokens are; some targets are equal. The first target of half of the tokens is their likeliest class."""
    inputs = cross_entropy_inputs(
        rows, classes, width, dtype=dtype, device=device, bias=bias, ignored=0, level=level
    )
    shape = (*inputs["target"].shape, targets)
    target = torch.randint(0, max(classes, 1), shape, device=device)
    if targets:
        target[..., 0] = inputs["target"]
    target[torch.rand(shape, device=device) < ignored] = ignore_index
    target[torch.rand(shape[:-1], device=device) < ignored / 2] = ignore_index
    real = torch.float64 if dtype == torch.float64 else torch.float32
    probs = torch.rand(shape, device=device).to(real)
    return {**inputs, "target": target, "target_probs": probs / max(targets, 1)}
