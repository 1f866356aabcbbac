"""`attend` with a weight of what it names: the score, and the indices of batch, head, query and key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr

B, H, HKV, M, N, D = 2, 4, 2, 21, 33, 8
F64 = torch.float64


def normal(*sizes: int, seed: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=F64).requires_grad_()


SLOPES, OF_DISTANCE, GATES = normal(H, seed=4), normal(H, M + N, seed=5), normal(B, N, seed=6)
LEARNED = [SLOPES, OF_DISTANCE, GATES]
WEIGHTS: dict[str, Callable[..., Any]] = {
    "decay": lambda score, head, q_idx, kv_idx: (
        score * torch.exp(-0.1 * SLOPES[head] ** 2 * (q_idx - kv_idx).abs())
    ),
    "relative": lambda score, head, q_idx, kv_idx: torch.sigmoid(
        score + OF_DISTANCE[head, q_idx - kv_idx + N]
    ),
    "gates": lambda score, kv_idx, batch: torch.relu(score) ** 2 * GATES[batch, kv_idx],
    "indices alone": lambda head, q_idx: (head + 1.0) / (q_idx + 1.0),
    "in another order": lambda kv_idx, score: score - 0.01 * kv_idx,
}


def dense(weight: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, normalized: bool) -> Tensor:
    k, v = (t.repeat_interleave(H // HKV, 1) for t in (k, v))
    score = q @ k.mT * D**-0.5
    axes = (
        torch.arange(n).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate(score.shape)
    )
    given = dict(zip(("batch", "head", "q_idx", "kv_idx"), axes, strict=True)) | {"score": score}
    names = weight.__code__.co_varnames[: weight.__code__.co_argcount]
    weights = weight(**{name: given[name] for name in names}).expand_as(score)
    weights = weights * (given["kv_idx"] <= given["q_idx"] + N - M)
    out = weights @ v
    return out / weights.sum(-1, keepdim=True) if normalized else out


@pytest.mark.parametrize("normalized", (False, True))
@pytest.mark.parametrize("name", WEIGHTS)
def test_beside_torch(name: str, normalized: bool) -> None:
    torch.set_default_dtype(F64)  # of integers times floats in plain torch
    try:
        leaves = [
            normal(B, H, M, D, seed=1),
            normal(B, HKV, N, D, seed=2),
            normal(B, HKV, N, D, seed=3),
            *LEARNED,
        ]
        q, k, v = leaves[:3]
        found = mr.attend(q, k, v, weight=WEIGHTS[name], causal=True, normalized=normalized)
        expected = dense(WEIGHTS[name], q, k, v, normalized)
        upstream = normal(*found.shape, seed=7).detach()
        results = [
            (out, *torch.autograd.grad(out, leaves, upstream, materialize_grads=True))
            for out in (found, expected)
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_name_that_is_none_is_refused() -> None:
    q = torch.ones(1, 1, 2, 4)
    with pytest.raises(
        mr.TraceError, match="weight: expected a function of the score, or of arguments among score"
    ) as e:
        mr.attend(q, q, q, weight=lambda score, other: score * other)
    assert e.value.file == __file__
    mr.attend(q, q, q, weight=lambda x: x)  # one argument may have any name
    mr.attend(q, q, q, weight=lambda score, scale=2.0: score * scale)
