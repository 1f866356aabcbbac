"""MLPs, compared with two linear layers and an activation, or a gate, between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from bench.harness import Case, compiled, deterministic


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
        if dtype == torch.float32 and not tf32:
            contenders["monoidreduce, emulated"] = mr.float32("emulated")(mr.mlp)
        contenders |= compiled(eager, tuned=dtype != torch.float32)
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


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, gate: Tensor) -> Tensor:
    return mr.mlp(x, w1, w2, gate=gate, activation="silu")


def eager_swiglu(x: Tensor, w1: Tensor, w2: Tensor, gate: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, w1), w2)


def checkpointed_swiglu(*inputs: Tensor) -> Tensor:
    """SwiGLU that saves no hidden values, but recomputes all of them at once in the backward pass."""
    result: Tensor = checkpoint(eager_swiglu, *inputs, use_reentrant=False)
    return result


def liger_swiglu(x: Tensor, w1: Tensor, w2: Tensor, gate: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return F.linear(LigerSiLUMulFunction.apply(F.linear(x, gate), F.linear(x, w1)), w2)


class _LigerTiled(torch.autograd.Function):
    """Liger's tiled MLP. It adds weights' gradients to `grad` of leaves, so this function makes its own."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        from liger_kernel.ops import LigerSiLUMulFunction, apply_tiled_mlp

        ctx.leaves = [t.detach().requires_grad_() for t in inputs]
        x, w1, w2, gate = ctx.leaves

        def part(_: None, rows: Tensor) -> Tensor:
            return F.linear(LigerSiLUMulFunction.apply(F.linear(rows, gate), F.linear(rows, w1)), w2)

        with torch.enable_grad():
            ctx.result = apply_tiled_mlp(part, None, x, compute_params=[w1, w2, gate])
        result: Tensor = ctx.result.detach()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.result.backward(grad)
        return tuple(leaf.grad for leaf in ctx.leaves)


def liger_tiled_swiglu(*inputs: Tensor) -> Tensor:
    result: Tensor = _LigerTiled.apply(*inputs)
    return result


def gated_case(dtype: torch.dtype, device: torch.device, *, B: int, K: int, d: int) -> Case:
    """B rows of width d through K hidden units with SwiGLU."""
    product = 2 * B * K * d  # FLOPs

    def inputs() -> tuple[Tensor, ...]:
        x, w1, w2, gate = (
            torch.randn(shape, dtype=dtype, device=device) for shape in ((B, d), (K, d), (d, K), (K, d))
        )
        return x, w1 * d**-0.5, w2 * K**-0.5, gate * d**-0.5

    contenders: dict[str, Callable[..., Tensor]] = {
        "monoidreduce": swiglu,
        "torch": eager_swiglu,
        "torch checkpoint": checkpointed_swiglu,
    }
    if device.type == "cuda" and dtype == torch.float32:
        contenders["monoidreduce, emulated"] = mr.float32("emulated")(swiglu)
        contenders |= compiled(eager_swiglu, tuned=False)
    elif device.type == "cuda":
        contenders |= compiled(eager_swiglu)
        contenders["monoidreduce, 224 MiB"] = mr.workspace(224 << 20)(swiglu)
        contenders["Liger"] = liger_swiglu
        contenders["Liger, tiled"] = liger_tiled_swiglu
    return Case(
        op="mlp",
        dtype=dtype,
        device=device,
        parameters={"B": B, "K": K, "d": d, "gated": True},
        inputs=inputs,
        leaves=4,
        output=(B, d),
        contenders=contenders,
        flops={"forward": 3 * product, "backward": 6 * product, "total": 9 * product},
        targets={},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases in float32 and bfloat16; on a GPU in bfloat16, float32 and TF32, with many rows and with few.

    On a GPU, those with a gate have the sizes of Llama 3 8B.
    """
    if quick:
        small, dtypes = {"B": 256, "K": 512, "d": 64}, (torch.float32, torch.bfloat16)
        return [make(dtype, device, **small) for dtype in dtypes for make in (case, gated_case)]
    if device.type == "cuda":
        sizes = [(16384, 64), (16384, 128), (16384, 256), (2048, 512), (4096, 1024), (16384, 4096)]
        return (
            [case(torch.bfloat16, device, B=16384, K=hidden, d=width) for hidden, width in sizes]
            + [case(torch.bfloat16, device, B=128, K=16384, d=width) for width in (128, 256)]
            + [
                case(torch.float32, device, B=16384, K=16384, d=width, tf32=tf32)
                for tf32 in (True, False)
                for width in (64, 128)
            ]
            + [gated_case(torch.bfloat16, device, B=8192, K=14336, d=4096)]
            + [case(torch.float32, device, B=4096, K=16384, d=4096)]
            + [gated_case(torch.float32, device, B=4096, K=14336, d=4096)]
            + [
                case(torch.float32, device, B=16384, K=hidden, d=width)
                for hidden, width in ((16384, 256), (4096, 1024))
            ]
        )
    dtypes = (torch.float32, torch.bfloat16)
    return [case(dtype, device, B=8192, K=8192, d=128, target=1.0) for dtype in dtypes] + [
        gated_case(dtype, device, B=2048, K=2816, d=1024) for dtype in dtypes
    ]
