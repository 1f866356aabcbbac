"""Linear distillation, compared with linear layers and torch's loss (eager and compiled) and with Liger."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from bench.harness import Case, Contender, compiled, on_tier

WORKSPACES = {
    "monoidreduce, 1 GiB": 1 << 30,
    "monoidreduce, unbounded": 1 << 40,
}  # in addition to the default, 352 MiB


def torch_cross_entropy(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    """The loss in torch, which stores the logits of both heads."""
    with torch.no_grad():
        teacher = F.linear(teacher_x, teacher_weight).softmax(-1)
    return F.cross_entropy(F.linear(x, weight), teacher)


def torch_forward_kl(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    """The forward KL divergence in torch.

    It stores the logits of both heads and their log-probabilities in float32, as it is a difference of these.
    """
    with torch.no_grad():
        teacher = F.linear(teacher_x, teacher_weight).float().log_softmax(-1)
    student = F.linear(x, weight).float().log_softmax(-1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def torch_jsd(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    """The generalized Jensen-Shannon divergence with beta 0.5: both KL divergences to the mean of both."""
    with torch.no_grad():
        teacher = F.linear(teacher_x, teacher_weight).float().log_softmax(-1)
    student = F.linear(x, weight).float().log_softmax(-1)
    mean = torch.logaddexp(student, teacher) - math.log(2)
    divergences = (F.kl_div(mean, p, reduction="batchmean", log_target=True) for p in (student, teacher))
    return 0.5 * sum(divergences, torch.zeros((), device=x.device))


def liger(beta: float) -> Contender:
    """Liger's generalized Jensen-Shannon divergence, which at beta 0 is the forward KL divergence."""

    def run(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearJSD

        return LigerFusedLinearJSD(jsd_beta=beta)(x, weight, teacher_x, teacher_weight, None)

    return run


THEIRS = {"cross_entropy": torch_cross_entropy, "forward_kl": torch_forward_kl, "jsd": torch_jsd}
LIGER = {"forward_kl": liger(0.0), "jsd": liger(0.5)}


def case(
    dtype: torch.dtype,
    device: torch.device,
    *,
    N: int,
    V: int,
    D: int,
    E: int,
    loss: str = "cross_entropy",
    std: float = 1.0,
    target: float | None = None,
) -> Case:
    """N tokens, V classes, a student of width D and a teacher of width E. Only the student gets gradients.

    std: standard deviation of the logits.
    """
    student, teacher = 2 * N * V * D, 2 * N * V * E  # FLOPs of the logits

    def inputs() -> tuple[Tensor, ...]:
        shapes = (N, D), (V, D), (N, E), (V, E)
        x, weight, teacher_x, teacher_weight = (torch.randn(shape, device=device) for shape in shapes)
        weights = weight * std * D**-0.5, teacher_weight * std * E**-0.5
        return x.to(dtype), weights[0].to(dtype), teacher_x.to(dtype), weights[1].to(dtype)

    own = functools.partial(mr.linear_distillation, loss=loss)
    theirs = THEIRS[loss]
    contenders: dict[str, Contender] = {"monoidreduce": own, "torch": theirs}
    if device.type == "cuda" and dtype == torch.float32:
        # Trials of float32 products of this size would take minutes.
        contenders |= compiled(theirs, tuned=False)
        contenders["monoidreduce, emulated"] = mr.float32("emulated")(own)
    elif device.type == "cuda":
        contenders |= {name: functools.partial(own, workspace=size) for name, size in WORKSPACES.items()}
        contenders["monoidreduce, sm80"] = on_tier(own, "sm80")
        contenders |= compiled(theirs)
        if loss in LIGER:
            contenders["Liger"] = LIGER[loss]
    options = {"loss": (loss, "cross_entropy"), "std": (std, 1.0)}
    return Case(
        op="distillation",
        dtype=dtype,
        device=device,
        parameters={"N": N, "V": V, "D": D, "E": E}
        | {name: value for name, (value, default) in options.items() if value != default},
        inputs=inputs,
        leaves=2,
        output=(),
        contenders=contenders,
        flops={"forward": student + teacher, "backward": 2 * student, "total": 3 * student + teacher},
        targets={} if target is None else {"total": target},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases in float32 and bfloat16; on a GPU with the KL and the Jensen-Shannon divergence."""
    if quick:
        size = {"N": 64, "V": 1000, "D": 64, "E": 96}
        kinds = [
            (torch.float32, "cross_entropy"),
            (torch.bfloat16, "cross_entropy"),
            (torch.bfloat16, "forward_kl"),
            (torch.bfloat16, "jsd"),
        ]
        return [case(dtype, device, **size, loss=loss) for dtype, loss in kinds]
    if device.type == "cuda":
        size = {"N": 4096, "V": 128256, "D": 2048, "E": 4096}
        of_float32 = [
            case(torch.float32, device, N=4096, V=32000, D=2048, E=2048, loss=loss)
            for loss in ("forward_kl", "jsd")
        ]
        return [*(case(torch.bfloat16, device, **size, loss=loss) for loss in THEIRS), *of_float32]
    return [
        case(dtype, device, N=1024, V=32000, D=512, E=512, target=1.0)
        for dtype in (torch.float32, torch.bfloat16)
    ]
