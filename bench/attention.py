"""Attention beside torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from bench.harness import Case


def case(
    dtype: torch.dtype,
    device: torch.device,
    *,
    B: int,
    H: int,
    L: int,
    d: int,
    causal: bool,
    target: float | None = None,
) -> Case:
    """Self-attention of L tokens."""
    products = 2 * B * H * L * L * d / (2 if causal else 1)  # FLOPs of q k^T

    def inputs() -> tuple[Tensor, ...]:
        return tuple(torch.randn(B, H, L, d, device=device).to(dtype) for _ in range(3))

    return Case(
        op="attention",
        dtype=dtype,
        device=device,
        parameters={"B": B, "H": H, "L": L, "d": d, "causal": causal},
        inputs=inputs,
        leaves=3,
        output=(B, H, L, d),
        contenders={
            "monoidreduce": lambda q, k, v: mr.attention(q, k, v, causal=causal),
            "torch": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        },
        flops={"forward": 2 * products, "backward": 4 * products, "total": 6 * products},
        targets={} if target is None else {"forward": target, "backward": target},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Full and causal, in float32 and bfloat16."""
    if quick:
        sizes = [{"B": 1, "H": 2, "L": 256, "d": 64}]
    elif device.type == "cuda":
        sizes = [{"B": 8, "H": 16, "L": 2048, "d": 128}, {"B": 2, "H": 16, "L": 8192, "d": 128}]
    else:
        sizes = [{"B": 1, "H": 8, "L": 2048, "d": 64}]
    target = 1.0 if device.type == "cpu" and not quick else None
    return [
        case(dtype, device, **size, causal=causal, target=target)
        for dtype in (torch.float32, torch.bfloat16)
        for size in sizes
        for causal in (False, True)
    ]
