"""Losses that users write as folds, beside torch and torch.compile, which store all scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from bench.harness import Case, Contender, compiled

stat = mr.stat
TEMPERATURE = 0.1
MEMBERS = 8  # of each class


@mr.statistics
def same_class(score: Any, row: Any, column: Any, kind: Any, other_kind: Any) -> Any:
    others = row != column
    same = others & (kind == other_kind)
    return dict(
        lse=stat.softmax(torch.where(others, score, -math.inf)).logsumexp,
        sum=stat.total(torch.where(same, score, 0.0)),
        number=stat.count(same),
    )


def supcon(x: Tensor, kind: Tensor) -> Tensor:
    """The supervised contrastive loss of each row of x [N, D], of class kind [N] (Khosla et al., 2020)."""
    data = {"row": {"kind": kind}, "column": {"other_kind": kind}}
    s = same_class(x, x, scale=1 / TEMPERATURE, **data)
    return s.lse - s.sum / s.number  # type: ignore[no-any-return]


def supcon_by_torch(x: Tensor, kind: Tensor) -> Tensor:
    score = (x @ x.mT).float() / TEMPERATURE
    others = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    same = others & (kind[:, None] == kind)
    lse = score.masked_fill(~others, -math.inf).logsumexp(1)
    return lse - (score * same).sum(1) / same.sum(1)


@mr.statistics
def pairs(score: Any, row: Any, column: Any) -> Any:
    return dict(loss=stat.total(F.softplus(torch.where(row == column, -score, score))))


def siglip(x: Tensor, y: Tensor) -> Tensor:
    """SigLIP's loss of each row of x [N, D], whose match is that row of y (Zhai et al., 2023)."""
    return pairs(x, y).loss  # type: ignore[no-any-return]


def siglip_by_torch(x: Tensor, y: Tensor) -> Tensor:
    score = (x @ y.mT).float()
    match = torch.eye(len(x), dtype=torch.bool, device=x.device)
    return F.softplus(torch.where(match, -score, score)).sum(1)


@mr.statistics
def both_lse(score: Any, other: Any) -> Any:
    return dict(lse=stat.softmax(score).logsumexp, other_lse=stat.softmax(other).logsumexp)


@mr.statistics
def divergence(score: Any, other: Any, lse: Any, other_lse: Any) -> Any:
    p, q = score - lse, other - other_lse
    mixture = torch.logaddexp(p, q) - math.log(2.0)
    return dict(sum=stat.total(torch.exp(p) * (p - mixture) + torch.exp(q) * (q - mixture)))


def jsd(x: Tensor, w: Tensor, other_x: Tensor, other_w: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of two heads, as two folds: log-sum-exps, then the sum."""
    s = both_lse(x, w, other_x, other_w)
    row = {"lse": s.lse, "other_lse": s.other_lse}
    return divergence(x, w, other_x, other_w, row=row).sum / 2  # type: ignore[no-any-return]


def jsd_by_torch(x: Tensor, w: Tensor, other_x: Tensor, other_w: Tensor) -> Tensor:
    p, q = ((a @ b.mT).float().log_softmax(1) for a, b in ((x, w), (other_x, other_w)))
    mixture = torch.logaddexp(p, q) - math.log(2.0)
    return (p.exp() * (p - mixture) + q.exp() * (q - mixture)).sum(1) / 2


class Loss(NamedTuple):
    """A loss of each row, by a fold and by torch.

    products: of matrices of scores in the forward pass; twice as many in the backward pass for each that
        gets gradients, `learned`.
    """

    own: Contender
    torch: Contender
    draw: Callable[[int, int, int, torch.device], tuple[Tensor, ...]]
    leaves: int
    products: int
    learned: int


def rows_of(N: int, D: int, device: torch.device) -> Tensor:
    return F.normalize(torch.randn(N, D, device=device), dim=1)


def head(N: int, M: int, D: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(N, D, device=device), torch.randn(M, D, device=device) * D**-0.5


LOSSES = {
    "supcon": Loss(
        supcon,
        supcon_by_torch,
        lambda N, M, D, device: (rows_of(N, D, device), torch.arange(N, device=device) // MEMBERS),
        1,
        1,
        1,
    ),
    "siglip": Loss(
        siglip,
        siglip_by_torch,
        lambda N, M, D, device: (10 * rows_of(N, D, device), rows_of(M, D, device)),
        2,
        1,
        1,
    ),
    "jsd": Loss(
        jsd,
        jsd_by_torch,
        lambda N, M, D, device: (*head(N, M, D, device), *head(N, M, D, device)),
        2,
        2,
        1,
    ),
}


def case(dtype: torch.dtype, device: torch.device, *, N: int, M: int, D: int, name: str = "supcon") -> Case:
    """N rows and M columns of width D."""
    loss, product = LOSSES[name], 2 * N * M * D

    def inputs() -> tuple[Tensor, ...]:
        drawn = loss.draw(N, M, D, device)
        return tuple(t.to(dtype) if t.is_floating_point() else t for t in drawn)

    contenders: dict[str, Contender] = {"monoidreduce": loss.own, "torch": loss.torch}
    if device.type == "cuda":
        contenders |= compiled(loss.torch, tuned=False)
    forward, backward = loss.products * product, 2 * loss.learned * product
    return Case(
        op=f"loss {name}",
        dtype=dtype,
        device=device,
        parameters={"N": N, "M": M, "D": D},
        inputs=inputs,
        leaves=loss.leaves,
        output=(N,),
        contenders=contenders,
        flops={"forward": forward, "backward": backward, "total": forward + backward},
        targets={},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """A batch of embeddings against itself, and two heads of language models."""
    if quick or device.type == "cpu":
        dtype, rows = (torch.bfloat16, 64) if quick else (torch.float32, 2048)
        return [case(dtype, device, N=rows, M=rows, D=64, name=name) for name in LOSSES]
    batch, heads = {"N": 16384, "M": 16384, "D": 1024}, {"N": 4096, "M": 32000, "D": 2048}
    sizes = {"supcon": batch, "siglip": batch, "jsd": heads}
    return [case(torch.bfloat16, device, **sizes[name], name=name) for name in LOSSES]
