"""Second derivatives and forward mode of attention by functions of scores, and of attend, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mods
import pytest
import torch
from modified_calls import dense_per_sequence
from mods import CASES, Case, dense
from specimens import starts
from torch import Tensor

import monoidreduce as mr

F64 = torch.float64
B, H, SHARED, M, N, WIDTH, VALUES = 2, 4, 2, 12, 15, 6, 5
Function = Callable[..., tuple[Tensor, ...]]


def along(tensors: Sequence[Tensor]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(t.shape, dtype=F64, generator=draw).to(t) for t in tensors]


def second(function: Function, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a random sum of the gradients of a random sum of the outputs."""
    by = [t.detach().clone().requires_grad_() for t in leaves]
    how: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    outputs = function(*by)
    first = torch.autograd.grad(outputs, by, along(outputs), create_graph=True, **how)
    moved = [(t, u) for t, u in zip(first, along(first), strict=True) if t.requires_grad]
    return [*first, *torch.autograd.grad([t for t, _ in moved], by, [u for _, u in moved], **how)]


def check(ours: Function, theirs: Function, leaves: Sequence[Tensor]) -> None:
    for x, y in zip(second(ours, leaves), second(theirs, leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)
    directions = along(leaves)
    found, expected = (torch.func.jvp(f, tuple(leaves), tuple(directions)) for f in (ours, theirs))
    for x, y in zip(found, expected, strict=True):
        for of_ours, of_theirs in zip(x, y, strict=True):
            torch.testing.assert_close(of_ours, of_theirs, rtol=1e-9, atol=1e-10)


def operands(device: torch.device) -> list[Tensor]:
    sizes = (B, H, M, WIDTH), (B, SHARED, N, WIDTH), (B, SHARED, N, VALUES)
    return [torch.randn(size, dtype=F64, device=device) for size in sizes]


def finite(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out, lse.masked_fill(lse == -math.inf, 0)


@pytest.mark.parametrize("options", ({}, {"causal": True}, {"window": (4, 2), "scale": 0.3}), ids=str)
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_score_mod(make: Any, options: dict[str, Any], device: torch.device) -> None:
    torch.manual_seed(0)
    case: Case = make(B, H, M, N, dtype=F64, device=device)
    functions = {"score_mod": case.score_mod, "mask_mod": case.mask_mod}
    leaves = operands(device)
    check(
        lambda *t: finite(*mr.attention(*t, **functions, **options, return_lse=True)),
        lambda *t: finite(*dense(*t, *case[:2], **options)),
        leaves,
    )


@pytest.mark.parametrize("name", ("relative", "gates"))
def test_captured_tensors(name: str, device: torch.device) -> None:
    """They move, and have gradients of gradients."""
    torch.manual_seed(0)
    shape = (H, M + N) if name == "relative" else (B, N)
    table = torch.randn(shape, dtype=F64, device=device)

    def score_mod(table: Tensor) -> Any:
        if name == "relative":
            return lambda s, b, h, i, j: torch.tanh(s) + 0.3 * table[h, i - j + N] * s
        return lambda s, b, h, i, j: s - torch.nn.functional.softplus(table[b, j])

    check(
        lambda q, k, v, t: finite(*mr.attention(q, k, v, score_mod=score_mod(t), return_lse=True)),
        lambda q, k, v, t: finite(*dense(q, k, v, score_mod(t))),
        [*operands(device), table],
    )


@pytest.mark.parametrize("masked", (False, True))
def test_attend(masked: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    mask = (lambda b, h, i, j: (i + j) % 5 != 1) if masked else None
    weight = lambda s: torch.sigmoid(s) * s  # noqa: E731
    check(
        lambda *t: (mr.attend(*t, weight=weight, mask_mod=mask),),
        lambda *t: (dense(*t, None, mask, weight=weight)[0],),
        operands(device),
    )


def test_sinks(device: torch.device) -> None:
    torch.manual_seed(0)
    mask = lambda b, h, i, j: (i + j) % 5 != 1  # noqa: E731
    sinks = torch.randn(H, dtype=F64, device=device)

    def by_torch(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        out, lse = dense(q, k, v, None, mask)
        joined = torch.logaddexp(lse, sinks[:, None])
        return out * (lse - joined).exp()[..., None], joined

    check(
        lambda q, k, v, s: mr.attention(q, k, v, mask_mod=mask, sinks=s, return_lse=True),
        by_torch,
        [*operands(device), sinks],
    )


def test_packed_sequences(device: torch.device) -> None:
    torch.manual_seed(0)
    of_queries, of_keys = (5, 1, 7), (6, 2, 9)
    case = mods.learned(3, H, max(of_queries), max(of_keys), dtype=F64, device=device)
    sizes = (sum(of_queries), H, WIDTH), (sum(of_keys), SHARED, WIDTH), (sum(of_keys), SHARED, VALUES)
    numbers = [starts(lengths, device) for lengths in (of_queries, of_keys)]
    functions = {"score_mod": case.score_mod, "mask_mod": case.mask_mod}
    check(
        lambda *t: finite(*mr.attention_varlen(*t, *numbers, **functions, return_lse=True)),
        lambda *t: finite(*dense_per_sequence(*t, (of_queries, of_keys), case)),
        [torch.randn(size, dtype=F64, device=device) for size in sizes],
    )


def test_dropout(device: torch.device) -> None:
    """The gradient of the gradient of a call that drops the same weights: by finite differences."""
    torch.manual_seed(0)
    leaves = [t.requires_grad_() for t in operands(device)]
    dropped = lambda *t: mr.attention(*t, dropout_p=0.4, seed=3)  # noqa: E731
    assert torch.autograd.gradgradcheck(dropped, leaves, fast_mode=True, check_undefined_grad=False)
