"""Attention beside torch's scaled_dot_product_attention and, on a GPU, each of its fused backends."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import monoidreduce as mr
from bench.harness import Case


def backend(which: SDPBackend, causal: bool) -> Callable[..., Tensor]:
    """torch's attention through one of its backends."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(which):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


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

    contenders: dict[str, Callable[..., Tensor]] = {
        "monoidreduce": lambda q, k, v: mr.attention(q, k, v, causal=causal),
        "torch": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    }
    if device.type == "cuda" and dtype != torch.float32:
        contenders["cuDNN"] = backend(SDPBackend.CUDNN_ATTENTION, causal)
        contenders["FlashAttention-2"] = backend(SDPBackend.FLASH_ATTENTION, causal)
    return Case(
        op="attention",
        dtype=dtype,
        device=device,
        parameters={"B": B, "H": H, "L": L, "d": d, "causal": causal},
        inputs=inputs,
        leaves=3,
        output=(B, H, L, d),
        contenders=contenders,
        flops={"forward": 2 * products, "backward": 4 * products, "total": 6 * products},
        targets={} if target is None else {"forward": target, "backward": target},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Full and causal, in float32 and bfloat16; on a GPU 16k tokens of model width 2048."""
    target = 1.0 if device.type == "cpu" and not quick else None
    both = (torch.float32, torch.bfloat16)
    if quick:
        sizes = [(dtype, {"B": 1, "H": 2, "L": 256, "d": 64}) for dtype in both]
    elif device.type == "cuda":
        lengths = [(128, 2048), (128, 4096), (128, 8192), (128, 16384), (64, 8192), (256, 8192)]
        sizes = [(torch.float32, {"B": 8, "H": 16, "L": 2048, "d": 128})]
        sizes += [
            (torch.bfloat16, {"B": 16384 // length, "H": 2048 // d, "L": length, "d": d})
            for d, length in lengths
        ]
    else:
        sizes = [(dtype, {"B": 1, "H": 8, "L": 2048, "d": 64}) for dtype in both]
    return [
        case(dtype, device, **size, causal=causal, target=target)
        for dtype, size in sizes
        for causal in (False, True)
    ]
