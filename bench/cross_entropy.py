"""Linear cross entropy beside torch's linear layer and cross entropy, eager and compiled, and fused forms."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from bench.harness import Case


def _eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def _gpu_peers() -> dict[str, Callable[..., Tensor]]:
    """torch.compile, and what is installed of cut-cross-entropy and Liger."""
    peers: dict[str, Callable[..., Tensor]] = {"torch.compile": torch.compile(_eager, dynamic=False)}
    if importlib.util.find_spec("cut_cross_entropy"):
        cut = importlib.import_module("cut_cross_entropy")
        # Its filter drops small gradients: up to 3 % of the result at logits like these.
        peers["cut-cross-entropy"] = lambda x, weight, target: cut.linear_cross_entropy(
            x, weight, target, filter_eps=None
        )
    if importlib.util.find_spec("liger_kernel"):
        liger = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        peers["liger-kernel"] = lambda x, weight, target: liger(weight, x, target)
    return peers


def case(
    dtype: torch.dtype, device: torch.device, *, N: int, V: int, D: int, target: float | None = None
) -> Case:
    """N tokens of width D over V classes; the logits have unit variance."""
    products = 2 * N * V * D  # FLOPs of the logits

    def inputs() -> tuple[Tensor, ...]:
        x = torch.randn(N, D, device=device).to(dtype)
        weight = (torch.randn(V, D, device=device) * D**-0.5).to(dtype)
        return x, weight, torch.randint(V, (N,), device=device)

    contenders: dict[str, Callable[..., Tensor]] = {
        "monoidreduce": mr.linear_cross_entropy,
        "torch": _eager,
    }
    if device.type == "cuda":
        contenders |= _gpu_peers()
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # torch 2.13
        options = torch.nn.LinearCrossEntropyOptions()
        contenders["torch chunked"] = lambda x, weight, target: F.linear_cross_entropy(
            x, weight, target, options=options
        )
    return Case(
        op="cross_entropy",
        dtype=dtype,
        device=device,
        parameters={"N": N, "V": V, "D": D},
        inputs=inputs,
        leaves=2,
        output=(),
        contenders=contenders,
        flops={"forward": products, "backward": 2 * products, "total": 3 * products},
        targets={} if target is None else {"total": target},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """In float32, and in bfloat16."""
    if quick:
        return [case(dtype, device, N=64, V=1000, D=64) for dtype in (torch.float32, torch.bfloat16)]
    if device.type == "cuda":
        sizes = [
            {"N": 8192, "V": 128256, "D": 4096},
            {"N": 8192, "V": 256000, "D": 2304},
            {"N": 16384, "V": 32000, "D": 4096},
        ]
        return [case(torch.bfloat16, device, **size) for size in sizes]
    return [
        case(torch.float32, device, N=1024, V=32000, D=512, target=1.2),
        case(torch.bfloat16, device, N=1024, V=32000, D=512, target=1.0),
    ]
