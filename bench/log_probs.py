"""Log-probabilities of targets with the entropy, compared with torch's: eager, compiled and in chunks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from bench.harness import Case, Contender, compiled, on_tier

BONUS = 0.01  # factor of the entropy
CHUNK = 1024  # tokens
WORKSPACE = 128 << 20  # bytes
WITHOUT_ENTROPY = "torch, cross entropy"


def own(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    found = mr.linear_log_probs(x, weight, target, entropy=True, **options)
    assert found.entropy is not None
    return found.log_probs + BONUS * found.entropy


def torch_log_probs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The result in torch, which stores the logits, and the log-probabilities in float32."""
    log_shares = F.linear(x, weight).float().log_softmax(-1)
    entropy = -(log_shares.exp() * log_shares).sum(-1)
    return log_shares.gather(-1, target[:, None])[:, 0] + BONUS * entropy


def own_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Log-probabilities without the entropy, to compare the cost of the entropy."""
    return -mr.linear_cross_entropy(x, weight, target, reduction="none", **options)


def torch_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -F.cross_entropy(F.linear(x, weight).float(), target, reduction="none")


def torch_chunked(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """`torch_log_probs` in chunks of tokens, recomputed in the backward pass."""
    parts = [
        checkpoint(torch_log_probs, rows, weight, labels, use_reentrant=False)
        for rows, labels in zip(x.split(CHUNK), target.split(CHUNK), strict=True)
    ]
    return torch.cat(parts)


def trl(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """TRL's function, as its trainers use it: in chunks of classes (TRL 1.16)."""
    from trl.trainer.utils import _ChunkedLogProbFunction as Chunked

    log_probs, entropy, *_ = Chunked.apply(x, weight, None, target, 1.0, 8192, None, 1.0, ("entropy",))
    return log_probs + BONUS * entropy


def liger_scaled(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Liger's kernels for Hopper that recompute, in CuTe DSL."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Scaled

    loss, entropy = Scaled.apply(x, weight, target, 1.0, -100, 1, True)
    return BONUS * entropy - loss


def case(dtype: torch.dtype, device: torch.device, *, N: int, V: int, D: int) -> Case:
    """N tokens of width D over V classes; logits have unit variance."""
    products = 2 * N * V * D  # FLOPs of the logits

    def inputs() -> tuple[Tensor, ...]:
        x = torch.randn(N, D, device=device).to(dtype)
        weight = (torch.randn(V, D, device=device) * D**-0.5).to(dtype)
        return x, weight, torch.randint(V, (N,), device=device)

    without_entropy: dict[str, Contender] = {
        "monoidreduce, linear_cross_entropy": own_cross_entropy,
        "monoidreduce, linear_cross_entropy, 128 MiB": functools.partial(
            own_cross_entropy, workspace=WORKSPACE
        ),
        WITHOUT_ENTROPY: torch_cross_entropy,
    }
    contenders: dict[str, Contender] = {
        "monoidreduce": own,
        "monoidreduce, top1": functools.partial(own, top1=True),
        "monoidreduce, 128 MiB": functools.partial(own, workspace=WORKSPACE),
        **without_entropy,
        "torch": torch_log_probs,
        "torch chunked": torch_chunked,
    }
    if device.type == "cuda":
        contenders |= compiled(torch_log_probs)
        contenders |= {
            "monoidreduce, sm80": on_tier(own, "sm80"),
            "TRL": trl,
            "Liger scaled": liger_scaled,
        }
    return Case(
        op="log_probs",
        dtype=dtype,
        device=device,
        parameters={"N": N, "V": V, "D": D},
        inputs=inputs,
        leaves=2,
        output=(N,),
        contenders=contenders,
        flops={"forward": products, "backward": 2 * products, "total": 3 * products},
        targets={},
        checked_by=dict.fromkeys(without_entropy, WITHOUT_ENTROPY),
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases in float32 and bfloat16; on a GPU, the heads of two models."""
    if quick:
        return [case(dtype, device, N=64, V=1000, D=64) for dtype in (torch.float32, torch.bfloat16)]
    if device.type == "cpu":
        return [case(dtype, device, N=1024, V=32000, D=512) for dtype in (torch.float32, torch.bfloat16)]
    sizes = [{"N": 8192, "V": 128256, "D": 4096}, {"N": 16384, "V": 32000, "D": 4096}]
    return [case(torch.bfloat16, device, **size) for size in sizes]
