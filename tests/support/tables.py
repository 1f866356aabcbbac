"""Statistics of captured tensors that are indexed by row and column together, and the same by torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
from tolerance import accuracy_failures, check_draws, raise_failures
from torch import Tensor

import monoidreduce as mr

__all__ = [
    "CASES",
    "COLUMNS",
    "ROWS",
    "check",
    "full",
    "inputs",
    "normal",
    "of_softmax",
    "relative",
    "results",
]

stat = mr.stat
F64 = torch.float64
ROWS, COLUMNS, KINDS = 211, 307, 5


class Case(NamedTuple):
    """The statistics of a function, and the same by torch, with all scores stored.

    statistics: of the captured tensors. stored: (score, tensors, label, kind of columns) -> results in order.
    """

    tensors: Callable[[], list[Tensor]]
    statistics: Callable[..., Any]
    stored: Callable[..., list[Tensor]]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def of_softmax(log_weight: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.softmax(log_weight, 1)
    return log_weight.logsumexp(1), (p * f.masked_fill(log_weight == -math.inf, 0)).sum(1)


def full(table: Tensor, scale: Tensor) -> Any:
    @mr.statistics
    def f(score: Any, row: Any, column: Any) -> dict[str, Any]:
        p = stat.softmax(score + table[row, column] * scale)
        return dict(lse=p.logsumexp, mean=p.mean(table[row][column] * score), total=stat.total(score * scale))

    return f


def full_stored(score: Tensor, table: Tensor, scale: Tensor, *_: Tensor) -> list[Tensor]:
    return [*of_softmax(score + table * scale, table * score), (score * scale).sum(1)]


def relative(bias: Tensor) -> Any:
    @mr.statistics
    def f(score: Any, row: Any, column: Any) -> dict[str, Any]:
        shifted = score + bias[row - column + COLUMNS - 1]
        return dict(lse=stat.softmax(shifted).logsumexp, best=stat.largest(torch.tanh(shifted)))

    return f


def relative_stored(score: Tensor, bias: Tensor, *_: Tensor) -> list[Tensor]:
    i, j = torch.arange(ROWS, device=score.device)[:, None], torch.arange(COLUMNS, device=score.device)
    shifted = score + bias[i - j + COLUMNS - 1]
    return [shifted.logsumexp(1), torch.tanh(shifted).amax(1)]


def clamped(bias: Tensor) -> Any:
    @mr.statistics
    def f(score: Any, row: Any, column: Any) -> dict[str, Any]:
        near = torch.clamp(column - row, -4, 4) + 4
        p = stat.softmax(score + bias[near])
        return dict(lse=p.logsumexp, variance=p.variance(score * bias[near]))

    return f


def clamped_stored(score: Tensor, bias: Tensor, *_: Tensor) -> list[Tensor]:
    i, j = torch.arange(ROWS, device=score.device)[:, None], torch.arange(COLUMNS, device=score.device)
    log_weight = score + bias[(j - i).clamp(-4, 4) + 4]
    f, p = score * bias[(j - i).clamp(-4, 4) + 4], log_weight.softmax(1)
    return [log_weight.logsumexp(1), (p * f * f).sum(1) - (p * f).sum(1) ** 2]


def of_labels(table: Tensor) -> Any:
    @mr.statistics
    def f(score: Any, label: Any, kind: Any) -> dict[str, Any]:
        return dict(
            total=stat.total(score * table[label, kind]), most=stat.largest(score * table[label][kind], k=3)
        )

    return f


def of_labels_stored(score: Tensor, table: Tensor, label: Tensor, kind: Tensor) -> list[Tensor]:
    weighted = score * table[label][:, kind]
    return [weighted.sum(1), weighted.topk(3, 1).values]


def masked(mask: Tensor, kinds: Tensor, weight: Tensor) -> Any:
    @mr.statistics
    def f(score: Any, row: Any, column: Any) -> dict[str, Any]:
        seen = torch.where(mask[row, column], score, -math.inf)
        p = stat.softmax(seen)
        return dict(
            lse=p.logsumexp,
            mean=p.mean(score * weight[kinds[row, column]]),
            count=stat.count(mask[row, column] & (kinds[row, column] > 1)),
        )

    return f


def masked_stored(score: Tensor, mask: Tensor, kinds: Tensor, weight: Tensor, *_: Tensor) -> list[Tensor]:
    seen = score.masked_fill(~mask, -math.inf)
    return [*of_softmax(seen, score * weight[kinds]), (mask & (kinds > 1)).sum(1)]


def some_mask() -> Tensor:
    mask = normal(ROWS, COLUMNS, seed=5) > -0.3
    mask[:, 0] = True
    return mask


CASES = {
    "full": Case(lambda: [normal(ROWS, COLUMNS).mT.contiguous().mT, normal(1)[0] + 2], full, full_stored),
    "relative": Case(lambda: [normal(2 * ROWS + 2 * COLUMNS)[::2]], relative, relative_stored),
    "clamped": Case(lambda: [normal(9)], clamped, clamped_stored),
    "labels": Case(lambda: [normal(COLUMNS, KINDS)], of_labels, of_labels_stored),
    "masked": Case(
        lambda: [
            some_mask(),
            torch.randint(4, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(1)),
            normal(4),
        ],
        masked,
        masked_stored,
    ),
}


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    a, b = 0.3 * normal(9, ROWS, seed=2 * seed + 1).mT, normal(COLUMNS, 18, seed=2 * seed + 2)[:, ::2]
    return a.to(dtype).detach().requires_grad_(), b.to(dtype).detach().requires_grad_()


def results(
    name: str, dtype: torch.dtype, by: str, at: torch.dtype | None = None, seed: int = 0, device: Any = None
) -> list[Tensor]:
    """Outputs, then gradients of operands and captured tensors.

    by: "fold", "reference", or "stored" for plain torch. at: the dtype of the inputs, before it is `dtype`.
    """
    case, of_inputs = CASES[name], at or dtype
    a, b = (t.detach().to(device, dtype).requires_grad_() for t in inputs(of_inputs, seed))
    tensors = [t.to(of_inputs).to(dtype) if t.is_floating_point() else t for t in case.tensors()]
    tensors = [t.to(device) for t in tensors]
    tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    label = torch.arange(ROWS, device=device) % COLUMNS
    kind = torch.arange(COLUMNS, device=device) % KINDS
    if by == "stored":
        outputs = case.stored(a @ b.mT, *tensors, label, kind)
    else:
        of_call: dict[str, Any] = {}
        if name == "labels":
            of_call = {"label": label, "column": {"kind": kind}}
        fold = case.statistics(*tensors)
        found = (fold if by == "fold" else fold.reference)(a, b, **of_call)
        outputs = [s.value if isinstance(s, tuple) else s for s in found]
    leaves = [a, b, *(t for t in tensors if t.requires_grad)]
    real = [out for out in outputs if out.requires_grad]
    upstream = [3 * normal(*out.shape, seed=7 + i).to(out) for i, out in enumerate(real)]
    gradients = torch.autograd.grad(real, leaves, upstream)
    return [*(t.detach() for t in outputs), *gradients]


def check(name: str, dtype: torch.dtype, device: Any = None) -> None:
    """Check outputs and gradients by the rule of tolerance.py, several draws together."""
    seeds = count(1)

    def draw() -> None:
        drawn, failures = [next(seeds) for _ in range(8)], []
        ours, exact, theirs = (
            [
                torch.stack(of)
                for of in zip(*(results(name, *how, seed=seed, device=device) for seed in drawn), strict=True)
            ]
            for how in ((dtype, "fold"), (F64, "stored", dtype), (dtype, "reference"))
        )
        for i, (y, ref, base) in enumerate(zip(ours, exact, theirs, strict=True)):
            if y.is_floating_point():
                failures += accuracy_failures(str(i), y, ref, base, dtype, 8 * ROWS, drawn_again=True)
        raise_failures(name, failures)

    check_draws(draw)
