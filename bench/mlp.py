"""The two-layer MLP beside two linear layers with an activation between them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from bench.harness import Case, deterministic


def case(
    dtype: torch.dtype,
    device: torch.device,
    *,
    B: int,
    K: int,
    d: int,
    target: float | None = None,
    tf32: bool = False,
) -> Case:
    """B rows of width d through K hidden units with tanh-GELU."""
    products = 4 * B * K * d  # FLOPs of both layers

    def inputs() -> tuple[Tensor, ...]:
        x, w1, w2 = (torch.randn(shape, device=device) for shape in ((B, d), (K, d), (d, K)))
        return x.to(dtype), (w1 * d**-0.5).to(dtype), (w2 * K**-0.5).to(dtype)

    def eager(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w1), approximate="tanh"), w2)

    contenders: dict[str, Callable[..., Tensor]] = {"monoidreduce": mr.mlp, "torch": eager}
    if device.type == "cuda":
        if dtype != torch.float32 and d <= 128:
            contenders["monoidreduce, deterministic"] = deterministic(mr.mlp)
        contenders["torch.compile"] = torch.compile(eager, dynamic=False)
    return Case(
        op="mlp",
        dtype=dtype,
        device=device,
        parameters={"B": B, "K": K, "d": d},
        inputs=inputs,
        leaves=3,
        output=(B, d),
        contenders=contenders,
        flops={"forward": products, "backward": 2 * products, "total": 3 * products},
        targets={} if target is None else {"total": target},
        tf32=tf32,
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """In float32 and bfloat16, on a GPU in bfloat16 and tf32; it has more units and rows, or few of these."""
    if quick:
        return [case(dtype, device, B=256, K=512, d=64) for dtype in (torch.float32, torch.bfloat16)]
    if device.type == "cuda":
        sizes = [(16384, 64), (16384, 128), (16384, 256), (2048, 512), (4096, 1024), (16384, 4096)]
        return (
            [case(torch.bfloat16, device, B=16384, K=hidden, d=width) for hidden, width in sizes]
            + [case(torch.bfloat16, device, B=128, K=16384, d=width) for width in (128, 256)]
            + [case(torch.float32, device, B=16384, K=16384, d=width, tf32=True) for width in (64, 128)]
        )
    return [
        case(dtype, device, B=8192, K=8192, d=128, target=1.0) for dtype in (torch.float32, torch.bfloat16)
    ]
