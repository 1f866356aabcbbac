"""Forward mode and Hessian-vector products on a GPU: right by the kernels, and without a matrix of scores."""

from __future__ import annotations

import pytest
import torch
from calls import peak, reset_peak
from folds import FOLDS, fold_inputs, leaves_of, moved
from forward import every, of_leaves, scalar
from specimens import name_of
from torch.func import grad, jvp

import monoidreduce as mr

MOVED = [name for name in FOLDS if name not in ("of_two_scores", "ranked")]


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("name", MOVED)
def test_accuracy(name: str, dtype: torch.dtype, gpu: torch.device) -> None:
    """By the norm of the errors: near what rounded operands allow."""
    fold, call = fold_inputs(name, (130,), 300, 16, dtype)
    results = []
    for each, given in (
        (fold, moved(call, gpu)),
        (fold.reference, moved(moved(call, gpu), gpu, torch.float64)),
    ):
        x = tuple(t.detach() for t in leaves_of(given))
        draw = torch.Generator().manual_seed(0)
        u = tuple(torch.randn(t.shape, generator=draw).to(dtype).to(t) for t in x)
        function = of_leaves(each, given)
        results.append((*jvp(function, x, u)[1], *jvp(grad(scalar(function), every(x)), x, u)[1]))
    bound = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 6e-2}[dtype]
    for found, exact in zip(*results, strict=True):
        assert float((found.double() - exact).norm()) <= bound * max(float(exact.norm()), 1e-3)


def test_attention_stores_no_scores(gpu: torch.device) -> None:
    length = 16384  # whose scores in float32 are 1 GiB
    x = tuple(torch.randn(1, 1, length, 64, device=gpu, dtype=torch.bfloat16) for _ in "qkv")
    with mr.workspace(32 << 20):
        before = reset_peak()
        jvp(lambda *t: mr.attention(*t, causal=True), x, x)
        assert peak() - before < 1 << 30


def test_cross_entropy_stores_no_logits(gpu: torch.device) -> None:
    tokens, classes = 4096, 128256  # whose logits in float32 are 2 GiB
    x = tuple(torch.randn(n, 256, device=gpu, dtype=torch.bfloat16) for n in (tokens, classes))
    target = torch.randint(classes, (tokens,), device=gpu)
    loss = grad(lambda *t: mr.linear_cross_entropy(*t, target), (0, 1))
    before = reset_peak()
    jvp(loss, x, x)
    assert peak() - before < 3 << 29


def test_directions_of_any_strides(gpu: torch.device) -> None:
    """A direction that moves alone is read where it is: one number for all, as in the gradient of a sum."""
    x, weight = (torch.randn(n, 64, device=gpu, dtype=torch.bfloat16) for n in (256, 1000))
    target = torch.randint(1000, (256,), device=gpu)
    slope = grad(lambda w: mr.linear_cross_entropy(x, w, target))
    for direction in (torch.ones_like(weight[0, 0]).expand_as(weight), torch.randn_like(weight.mT).mT):
        of_both = [jvp(slope, (weight,), (each,))[1] for each in (direction, direction.contiguous())]
        torch.testing.assert_close(*of_both)
