"""logsumexp_matmul, compared with torch.logsumexp of a matrix product."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import monoidreduce as mr
from bench.harness import Case, Contender, compiled


def case(
    dtype: torch.dtype, device: torch.device, *, M: int, N: int, F: int, target: float | None = None
) -> Case:
    """M rows and N columns of width F. Scores have unit variance."""
    scale = F**-0.5
    products = 2 * M * N * F  # FLOPs of the scores

    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(M, F, device=device).to(dtype), torch.randn(N, F, device=device).to(dtype)

    def theirs(a: Tensor, b: Tensor) -> Tensor:
        return torch.logsumexp(scale * (a @ b.mT), -1)

    own = functools.partial(mr.logsumexp_matmul, scale=scale)
    contenders: dict[str, Contender] = {"monoidreduce": own, "torch": theirs}
    if device.type == "cuda":
        if dtype == torch.float32:
            contenders["monoidreduce, emulated"] = mr.float32("emulated")(own)
        contenders |= compiled(theirs, tuned=dtype != torch.float32)
    return Case(
        op="logsumexp",
        dtype=dtype,
        device=device,
        parameters={"M": M, "N": N, "F": F},
        inputs=inputs,
        leaves=2,
        output=(M,),
        contenders=contenders,
        flops={"forward": products, "backward": 2 * products, "total": 3 * products},
        targets={} if target is None else {"total": target},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases in float32 and bfloat16. On a GPU, more rows, and a case with a vocabulary's size."""
    if quick:
        return [case(dtype, device, M=256, N=512, F=64) for dtype in (torch.float32, torch.bfloat16)]
    rows = 32768 if device.type == "cuda" else 8192
    target = 1.0 if device.type == "cpu" else None
    sizes = [
        case(dtype, device, M=rows, N=rows, F=64, target=target) for dtype in (torch.float32, torch.bfloat16)
    ]
    if device.type == "cuda":
        vocabulary = {"M": 8192, "N": 128256, "F": 4096}
        sizes += [case(dtype, device, **vocabulary) for dtype in (torch.bfloat16, torch.float32)]
    return sizes
