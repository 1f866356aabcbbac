"""all_fold of every monoid, and map_reduce with the rows of b split over ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from ranks import Each, on_ranks, same_bits
from torch import Tensor

import monoidreduce as mr
from monoidreduce import monoids as m


def _state(monoid: Any, rows: int = 5) -> Any:
    """A random state in float64; integer fields are positions or numbers of elements."""
    payload = (*[rows], 3)
    makers: dict[str, Any] = {
        "value": lambda: torch.randn(payload if isinstance(monoid, (m.Sum, m.WSum, m.LogWSum)) else rows),
        "weight": lambda: torch.rand(rows),
        "times": lambda: torch.ones(rows, dtype=torch.int64),
        "position": lambda: torch.randperm(1000)[:rows],
    }
    fields = (makers.get(name, lambda: torch.randn(rows))() for name in monoid.State._fields)
    return monoid.State(*(f.double() if f.is_floating_point() else f for f in fields))


MONOIDS = (m.Sum(), m.WSum(), m.LogWSum(), m.LogSumExp(), m.CrossEntropy(), m.Distillation())
MONOIDS = (*MONOIDS, m.Max(), m.Min(), m.ArgMax(), m.ArgMin())


def _folded(group: Any, monoid: Any, state: Any, upstream: list[Tensor]) -> Any:
    leaves = type(state)(*(f.clone().requires_grad_(f.is_floating_point()) for f in state))
    total = mr.distributed.all_fold(monoid, leaves, group)
    floats = [f for f in total if f.is_floating_point()]
    grads = torch.autograd.grad(floats, [f for f in leaves if f.requires_grad], upstream)
    return [f.detach() for f in total], grads


@pytest.mark.parametrize("ranks", (1, 2, 4))
@pytest.mark.parametrize("monoid", MONOIDS, ids=repr)
def test_all_fold(monoid: Any, ranks: int) -> None:
    """As autograd of fold has it, with the same bits on all ranks."""
    states = [_state(monoid) for _ in range(ranks)]
    fields = map(torch.stack, zip(*states, strict=True))
    stacked = type(states[0])(*(f.requires_grad_(f.is_floating_point()) for f in fields))
    expected = mr.fold(monoid, stacked, dim=0)
    floats = [f for f in expected if f.is_floating_point()]
    upstream = [torch.randn_like(f) for f in floats]
    gradients = torch.autograd.grad(floats, [f for f in stacked if f.requires_grad], upstream)
    found = on_ranks(ranks, _folded, monoid, Each(states), upstream)
    for i, field in enumerate(expected):
        torch.testing.assert_close(
            same_bits([total[i] for total, _ in found]), field.detach(), rtol=1e-12, atol=1e-12
        )
    for rank, (_, of_rank) in enumerate(found):
        for gradient, of_all in zip(of_rank, gradients, strict=True):
            torch.testing.assert_close(gradient, of_all[rank], rtol=1e-12, atol=1e-12)


LSE = m.LogSumExp()


def _slices(a: Tensor, b: Tensor) -> Any:
    return LSE.State((a @ b.T).logsumexp(1))


def _fused(a: Tensor, b: Tensor, p: Any, g: Any) -> tuple[Tensor, Tensor]:
    """The gradients of a rank's slice pair, of its own states p."""
    by_score = (a @ b.T - p.lse[:, None]).exp() * g.lse[:, None]
    return by_score @ b, by_score.T @ a


def _reduced(group: Any, a: Tensor, b: Tensor, upstream: Tensor, split: bool, options: Any = None) -> Any:
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    group = group if split else None
    lse = mr.map_reduce(LSE, _slices, a, b, b_chunk=4, ranks=group, **(options or {})).lse
    return lse.detach(), *torch.autograd.grad(lse, (a, b), upstream)


@pytest.mark.parametrize(
    "options", ({}, {"forward_gradient": True}, {"fused_backward": _fused}), ids=lambda given: "".join(given)
)
@pytest.mark.parametrize("columns", ((5, 6), (11, 0), (1, 1, 9), (11,)))
def test_map_reduce(columns: tuple[int, ...], options: dict[str, Any]) -> None:
    ranks = len(columns)
    a, b, upstream = torch.randn(7, 3).double(), torch.randn(11, 3).double(), torch.randn(7).double()
    lse, d_a, d_b = _reduced(None, a, b, upstream, split=False)
    found = on_ranks(ranks, _reduced, a, Each(list(b.split(columns))), upstream, True, options)
    torch.testing.assert_close(same_bits([f[0] for f in found]), lse, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(same_bits([f[1] for f in found]), d_a, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([f[2] for f in found]), d_b, rtol=1e-12, atol=1e-12)


def _causal(a: slice, b: slice) -> bool:
    return bool(b.start < a.stop)


def _with_pairs(group: Any, pairs: Any) -> str:
    """The error of a call that compares its arguments across ranks, as a first call does."""
    os.environ["MONOIDREDUCE_DEBUG"] = "1"
    try:
        mr.map_reduce(LSE, _slices, torch.randn(7, 3), torch.randn(6, 3), pairs=pairs, ranks=group)
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["MONOIDREDUCE_DEBUG"]
    return ""


@pytest.mark.parametrize("of_ranks", ([_causal, _causal], [None, _causal]), ids=("all", "one"))
def test_pairs_take_no_group(of_ranks: list[Any]) -> None:
    """They would be asked of a rank's own rows. All ranks raise, and name the one that has them."""
    found = on_ranks(2, _with_pairs, Each(of_ranks))
    assert all("pairs: expected None beside ranks" in text for text in found)
    assert of_ranks[0] or found[0].startswith("rank 1: ")


def _twice(group: Any) -> str:
    state = LSE.State(torch.randn(3, requires_grad=True))
    (g,) = torch.autograd.grad(mr.distributed.all_fold(LSE, state, group).lse.sum(), state, create_graph=True)
    try:
        g.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def _in_forward_mode(group: Any) -> list[str]:
    x, weight, q = torch.randn(6, 4), torch.randn(5, 4), torch.randn(1, 2, 6, 4)
    target, told = torch.randint(10, (6,)), []

    @mr.statistics
    def log_sum_exp(score: Any) -> Any:
        return {"lse": mr.stat.softmax(score).logsumexp}

    calls: tuple[tuple[Any, torch.Tensor], ...] = (
        (lambda x: mr.linear_cross_entropy(x, weight, target, ranks=group), x),
        (lambda x: mr.logsumexp_matmul(x, weight, ranks=group), x),
        (lambda x: mr.mlp(x, weight, weight.T.contiguous(), ranks=group), x),
        (lambda q: mr.attention(q, q, q, ranks=group), q),
        (lambda x: log_sum_exp(x, weight, ranks=group).lse, x),
    )
    for call, t in calls:
        with torch.autograd.forward_ad.dual_level():
            try:
                call(torch.autograd.forward_ad.make_dual(t, t))
            except NotImplementedError as error:
                told.append(str(error).partition(" (")[0])
    return told


def test_forward_mode_is_refused_by_name() -> None:
    names = ("linear_cross_entropy", "logsumexp_matmul", "mlp", "attention", "log_sum_exp")
    expected = [f"{name} over ranks cannot be differentiated in forward mode" for name in names]
    assert on_ranks(2, _in_forward_mode) == [expected] * 2


def test_is_differentiable_once() -> None:
    assert all("can be differentiated once" in text for text in on_ranks(2, _twice))
