"""Derived gradients where elements are not kept: of these nothing counts, also what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr

stat = mr.stat
F64 = torch.float64
M, N = 6, 9
KEEPS: dict[str, dict[str, Any]] = {
    "mask_mod": {"mask_mod": lambda b, h, i, j: j < 5},
    "where": {},
    "block_mask": {"block_mask": mr.block_mask(lambda b, h, i, j: j < 5, None, None, M, N, block_size=2)},
    "causal and window": {"causal": True, "window": (1, 0)},
}


def normal(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.isa
@pytest.mark.parametrize("bad", (math.nan, math.inf))
@pytest.mark.parametrize(
    ("keeps", "attend"), [(k, a) for k in KEEPS for a in (False, True) if k != "where" or not a]
)
def test_keys_that_nobody_keeps(keeps: str, bad: float, attend: bool) -> None:
    """Gradients by what multiplies the scores, and by the operands, are those without these keys."""
    q, k, v = (normal(1, 2, n, 4, seed=s) for s, n in enumerate((M, N, N)))
    # The first query is aligned with key 3.
    gone = torch.arange(N) < 2 if keeps == "causal and window" else torch.arange(N) >= 5
    of_head, of_query, of_key = normal(2), normal(M), normal(N)

    def results(keys: Tensor, values: Tensor, of_keys: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (keys, values, of_head, of_query, of_keys)]
        k, v, a, b, c = leaves

        def score_mod(score: Any, _: Any, h: Any, i: Any, j: Any) -> Any:
            changed = torch.tanh(score * a[h] * b[i] * c[j]) + score * b[i]
            return torch.where(j < 5, changed, -math.inf) if keeps == "where" else changed

        if attend:  # by the score alone
            weight = lambda s: s * a[0] + b[1] * s**2 + c[6]  # noqa: E731
            out = mr.attend(q, k, v, weight=weight, **KEEPS[keeps])
        else:
            out = mr.attention(q, k, v, score_mod=score_mod, **KEEPS[keeps])
        return [out, *torch.autograd.grad(out, leaves, normal(*out.shape, seed=5))]

    of_keys = of_key if attend else of_key.masked_fill(gone, bad)
    # A score_mod that returns -inf is no mask: values meet a weight of 0.
    bad_v = v if keeps == "where" else v.masked_fill(gone[:, None], bad)
    found = results(k.masked_fill(gone[:, None], bad), bad_v, of_keys)
    for ours, theirs in zip(found, results(k, v, of_key), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_keys_of_no_sequence() -> None:
    q, k, v = (normal(8, 2, 4, seed=s) for s in range(3))
    k[4:], v[4:] = math.nan, math.inf
    c, r = (torch.ones(n, dtype=F64, requires_grad=True) for n in (2, 8))
    starts = torch.tensor([0, 4])
    mod = lambda s, b, h, i, j: s * c[h] * r[i] * r[j]  # noqa: E731
    out = mr.attention_varlen(q, k, v, starts, score_mod=mod)[:4]
    expected = mr.attention_varlen(q[:4], k[:4], v[:4], starts, score_mod=mod)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), (c, r)), torch.autograd.grad(expected.sum(), (c, r)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


# w is a number of each column, and bad where the column is not kept.
STATISTICS: dict[str, Callable[..., Any]] = {
    "where": lambda score, t, w, keep: dict(
        x=stat.total(torch.where(keep, torch.tanh(score * t * w) + score**2 * w, 0.0))
    ),
    "nested": lambda score, t, w, keep: dict(
        x=stat.total(torch.where(keep, torch.where(score > 0, score * t * w, w * score), -1.0))
    ),
    "a product of branches": lambda score, t, w, keep: dict(
        x=stat.total(score * t * torch.where(keep, torch.exp(score * w), t) * t)
    ),
    "relu": lambda score, t, w, keep: dict(
        x=stat.total(torch.relu(torch.where(keep, score * w * t, -math.inf)) * t)
    ),
    "maximum": lambda score, t, w, keep: dict(
        x=stat.total(torch.maximum(torch.where(keep, score * t * w, -math.inf) * t.abs(), score))
    ),
    "log weight": lambda score, t, w, keep: dict(
        x=stat.softmax(torch.where(keep, score * t * w, -math.inf)).mean(score * w + t)
    ),
    "log of 0": lambda score, t, w, keep: dict(
        x=stat.softmax(score * t + torch.log(torch.where(keep, w**2, 0.0))).logsumexp
    ),
    "smallest": lambda score, t, w, keep: dict(x=stat.smallest(torch.where(keep, score * w, 9.0) * t.abs())),
}


@pytest.mark.isa
@pytest.mark.parametrize("name", [*STATISTICS])
@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_columns_that_are_not_kept(name: str, bad: float) -> None:
    keep = torch.arange(N) % 3 != 1
    fold = mr.statistics(STATISTICS[name])

    def results(w: Tensor) -> list[Tensor]:
        leaves = [normal(M, 4), normal(N, 4, seed=1), normal(M, seed=2), w.detach()]
        a, b, t, of_column = (x.requires_grad_() for x in leaves)
        (x,) = fold(a, b, row={"t": t}, column={"w": of_column, "keep": keep})
        x = x.value if isinstance(x, tuple) else x
        return [x, *torch.autograd.grad(x, leaves, normal(M, seed=3))]

    w = normal(N, seed=4)
    for ours, theirs in zip(results(w.masked_fill(~keep, bad)), results(w), strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_a_largest_has_gradients_of_its_column_alone() -> None:
    """Another score of -inf, times what multiplies all of them, is not 0 times infinity."""
    t = torch.tensor([2.0], dtype=F64, requires_grad=True)
    a, b = torch.ones(1, 1, dtype=F64), torch.tensor([[1.0], [-math.inf], [3.0]], dtype=F64)
    fold = mr.statistics(lambda score, t: dict(best=stat.largest(score * t)))
    (gradient,) = torch.autograd.grad(fold(a, b, row={"t": t}).best.value, t)
    assert gradient == 3.0


def test_a_sum_of_uses_under_several_conditions() -> None:
    """A value that is used under conditions which overlap, none of which holds for a bad element."""
    fold = mr.statistics(
        lambda score, t, w: dict(
            x=stat.total(
                torch.where(w > 0, torch.exp(score * t), 0.0)
                + torch.where(w > 1, (score * t) ** 2, 0.0)
                + torch.where((w > 2) | (w < -5), score * t * w, 0.0)
            )
        )
    )
    w = torch.tensor([-1.0, 0.5, 1.5, 2.5, -6.0, -2.0], dtype=F64)
    a, b, t = normal(M, 3), normal(6, 3, seed=1), normal(M, seed=2)
    unused = (w <= 0) & (w >= -5)

    def results(columns: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (a, columns, t)]
        x = fold(leaves[0], leaves[1], row={"t": leaves[2]}, column={"w": w}).x
        return [x, *torch.autograd.grad(x, leaves, normal(M, seed=3))]

    found, expected = results(b.masked_fill(unused[:, None], math.nan)), results(b)
    for ours, theirs in zip((found[0], *found[2:]), (expected[0], *expected[2:]), strict=True):  # a meets b
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    wide = [x.detach().requires_grad_() for x in (a, b, t)]
    reference = fold.reference(wide[0], wide[1], row={"t": wide[2]}, column={"w": w}).x
    expected = torch.autograd.grad(reference, wide, normal(M, seed=3))
    for ours, theirs in zip(results(b)[1:], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
