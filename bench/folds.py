"""Users' folds (monoidreduce.statistics), compared with torch on stored scores and with built-in operators.

The built-in operator for the same numbers is linear_cross_entropy, with the loss lse - target. For two heads
it is linear_distillation, with one of the divergences as its loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from bench.harness import Case, Contender, on_tier

stat = mr.stat
Size = dict[str, int]


@mr.statistics
def lse_target(score: Any, column: Any, label: Any) -> Any:
    target = stat.total(torch.where(column == label, score, 0.0))
    return dict(lse=stat.softmax(score).logsumexp, target=target)


@mr.statistics
def token_stats(score: Any, column: Any, label: Any) -> Any:
    p = stat.softmax(score)
    target = stat.total(torch.where(column == label, score, 0.0))
    return dict(lse=p.logsumexp, mean=p.mean(score), target=target, best=stat.largest(score))


@mr.statistics
def siglip(score: Any, column: Any, label: Any) -> Any:
    return dict(loss=stat.total(F.softplus(torch.where(column == label, -score, score))))


@mr.statistics
def noisy_or(score: Any) -> Any:
    return dict(log_none=stat.total(-F.softplus(score)))


@mr.statistics
def divergences(score: Any, other: Any) -> Any:
    p, q = stat.softmax(score), stat.softmax(other)
    return dict(
        lse=p.logsumexp,
        other_lse=q.logsumexp,
        forward=q.mean(other - score),
        reverse=p.mean(score - other),
        chi=q.mean(torch.exp(other - score)),
    )


# The timed result is one number for each row, computed from all statistics. fold: the user's function, or its
# reference in torch.


def loss_of(fold: Any, x: Tensor, w: Tensor, label: Tensor) -> Tensor:
    s = fold(x, w, label=label)
    return s.lse - s.target


def stats_of(fold: Any, x: Tensor, w: Tensor, label: Tensor) -> Tensor:
    s = fold(x, w, label=label)
    return s.lse - s.target - 0.01 * (s.lse - s.mean) + 0.1 * s.best.value


def siglip_of(fold: Any, x: Tensor, w: Tensor, label: Tensor) -> Tensor:
    return fold(x, w, label=label).loss


def noisy_or_of(fold: Any, x: Tensor, w: Tensor, label: Tensor) -> Tensor:
    return fold(x, w).log_none


def divergences_of(fold: Any, x: Tensor, w: Tensor, other_x: Tensor, other_w: Tensor) -> Tensor:
    s = fold(x, w, other_x, other_w)
    return s.forward + s.reverse + 0.1 * (s.lse - s.other_lse) + 0.01 * s.chi


def forward_kl_of(x: Tensor, w: Tensor, other_x: Tensor, other_w: Tensor) -> Tensor:
    """The forward KL divergence, by torch."""
    s = divergences.reference(x, w, other_x, other_w)
    divergence: Tensor = s.forward - s.other_lse + s.lse
    return divergence


DISTILLATION, FORWARD_KL = "monoidreduce, linear_distillation", "torch, forward KL"
FOLDS: dict[str, tuple[Any, Callable[..., Tensor]]] = {
    "lse_target": (lse_target, loss_of),
    "token_stats": (token_stats, stats_of),
    "siglip": (siglip, siglip_of),
    "noisy_or": (noisy_or, noisy_or_of),
    "divergences": (divergences, divergences_of),
}


def case(
    dtype: torch.dtype, device: torch.device, *, N: int, V: int, D: int, name: str = "lse_target"
) -> Case:
    """N rows and V columns of width D; scores of unit variance. Of two heads, the first gets gradients."""
    fold, number = FOLDS[name]
    heads = 2 if name == "divergences" else 1
    products = 2 * N * V * D * heads

    def inputs() -> tuple[Tensor, ...]:
        def head() -> tuple[Tensor, Tensor]:
            return torch.randn(N, D, device=device), torch.randn(V, D, device=device) * D**-0.5

        tensors = [t.to(dtype) for _ in range(heads) for t in head()]
        return (*tensors, torch.randint(V, (N,), device=device)) if heads == 1 else (*tensors,)

    contenders: dict[str, Contender] = {
        "monoidreduce": functools.partial(number, fold),
        "torch": functools.partial(number, fold.reference),
    }
    if name == "lse_target":
        contenders["monoidreduce, linear_cross_entropy"] = functools.partial(
            mr.linear_cross_entropy, reduction="none"
        )
    if name == "divergences":
        contenders[DISTILLATION] = functools.partial(
            mr.linear_distillation, loss="forward_kl", reduction="none"
        )
        contenders[FORWARD_KL] = forward_kl_of
    if device.type == "cuda":
        contenders["monoidreduce, sm80"] = on_tier(contenders["monoidreduce"], "sm80")
    learned = 2 * N * V * D
    return Case(
        op=f"fold {name}",
        dtype=dtype,
        device=device,
        parameters={"N": N, "V": V, "D": D},
        inputs=inputs,
        leaves=2,
        output=(N,),
        contenders=contenders,
        flops={"forward": products, "backward": 2 * learned, "total": products + 2 * learned},
        targets={},
        checked_by={name: FORWARD_KL for name in (DISTILLATION, FORWARD_KL) if name in contenders},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """The head of a language model on a GPU, a smaller one on a CPU."""
    if quick:
        return [case(torch.bfloat16, device, N=64, V=500, D=64, name=name) for name in FOLDS]
    if device.type == "cpu":
        return [case(torch.float32, device, N=1024, V=8192, D=256, name=name) for name in FOLDS]
    sizes: list[Size] = [{"N": 8192, "V": 32000, "D": 4096}, {"N": 8192, "V": 128256, "D": 4096}]
    return [case(torch.bfloat16, device, **size, name=name) for name in FOLDS for size in sizes]
