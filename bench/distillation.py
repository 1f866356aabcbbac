"""Linear distillation beside two linear layers, a softmax and torch's cross entropy with probabilities."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from bench.harness import Case


def _torch(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = F.linear(teacher_x, teacher_weight).softmax(-1)
    return F.cross_entropy(F.linear(x, weight), teacher)


def case(
    dtype: torch.dtype, device: torch.device, *, N: int, V: int, D: int, E: int, target: float | None = None
) -> Case:
    """N tokens, a student of width D and a teacher of width E over V classes; the student alone learns."""
    student, teacher = 2 * N * V * D, 2 * N * V * E  # FLOPs of the logits

    def inputs() -> tuple[Tensor, ...]:
        shapes = (N, D), (V, D), (N, E), (V, E)
        x, weight, teacher_x, teacher_weight = (torch.randn(shape, device=device) for shape in shapes)
        weights = weight * D**-0.5, teacher_weight * E**-0.5
        return x.to(dtype), weights[0].to(dtype), teacher_x.to(dtype), weights[1].to(dtype)

    contenders: dict[str, Callable[..., Tensor]] = {"monoidreduce": mr.linear_distillation, "torch": _torch}
    if device.type == "cuda":
        contenders["torch.compile"] = torch.compile(_torch, dynamic=False)
    return Case(
        op="distillation",
        dtype=dtype,
        device=device,
        parameters={"N": N, "V": V, "D": D, "E": E},
        inputs=inputs,
        leaves=2,
        output=(),
        contenders=contenders,
        flops={"forward": student + teacher, "backward": 2 * student, "total": 3 * student + teacher},
        targets={} if target is None else {"total": target},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """In float32, and in bfloat16."""
    if quick:
        return [case(dtype, device, N=64, V=1000, D=64, E=96) for dtype in (torch.float32, torch.bfloat16)]
    if device.type == "cuda":
        return [case(torch.bfloat16, device, N=4096, V=128256, D=2048, E=4096)]
    return [
        case(dtype, device, N=1024, V=32000, D=512, E=512, target=1.0)
        for dtype in (torch.float32, torch.bfloat16)
    ]
