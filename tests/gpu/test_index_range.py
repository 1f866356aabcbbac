"""Sizes, strides and counts past 2**31 and past what a grid may have in one direction."""

from __future__ import annotations

import pytest
import torch
from calls import assert_same_bits, results, upstreams
from specimens import ONE_EACH, Specimen, attention_inputs, name_of, normal
from tolerance import check_operator
from torch import Tensor

import monoidreduce as mr

FAR = 2**31 + 64  # elements


@pytest.mark.parametrize("heads", (65_535, 65_536, 70_000))
def test_more_heads_than_a_grid_is_high(heads: int, gpu: torch.device) -> None:
    inputs = attention_inputs(1, heads, heads, 2, 3, 4, 4, dtype=torch.float32, device=gpu)
    check_operator("attention", inputs, {"causal": True})


def far_apart(t: Tensor, axis: int) -> Tensor:
    """The same values, with the last along `axis` more than 2**31 elements away from the first."""
    strides = [0] * t.dim()
    stride = 1
    for other in reversed(range(t.dim())):
        if other != axis:
            strides[other] = stride
            stride *= t.shape[other]
    strides[axis] = -(-FAR // (t.shape[axis] - 1))
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, strides, strict=True))
    return torch.empty(span, dtype=t.dtype, device=t.device).as_strided(t.shape, strides).copy_(t)


@pytest.mark.slow
@pytest.mark.parametrize("memory", (24,), indirect=True)
@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_strides_past_32_bits(
    specimen: Specimen, gpu: torch.device, memory: None, deterministic: None
) -> None:
    inputs = specimen.inputs(torch.bfloat16, gpu)
    grads = upstreams(specimen, inputs)
    expected = results(specimen, inputs, grads)
    for name, t in inputs.items():
        for axis in range(t.dim()):
            if t.is_floating_point() and t.shape[axis] > 1:
                assert_same_bits(results(specimen, inputs | {name: far_apart(t, axis)}, grads), expected)
    for i, g in enumerate(grads):
        for axis in range(g.dim()):
            others = [*grads[:i], far_apart(g, axis), *grads[i + 1 :]]
            assert_same_bits(results(specimen, inputs, others), expected)


@pytest.mark.slow
@pytest.mark.parametrize("memory", (48,), indirect=True)
def test_more_elements_than_32_bits_count(gpu: torch.device, memory: None, deterministic: None) -> None:
    """The last rows of 2**31 + 64 elements are what they are alone."""
    width, last = 64, 100
    rows = FAR // width
    q = torch.randn(1, 1, rows, width, dtype=torch.bfloat16, device=gpu)
    k, v, grad = (normal(1, 1, n, width, dtype=torch.bfloat16, device=gpu) for n in (8, 8, last))
    out = mr.attention(q.requires_grad_(), k, v)
    alone = q.detach()[:, :, -last:].clone().requires_grad_()
    expected = mr.attention(alone, k, v)
    assert_same_bits({"out": out.detach()[:, :, -last:]}, {"out": expected.detach()})
    (dq,) = torch.autograd.grad(out[:, :, -last:], q, grad)
    (dq_alone,) = torch.autograd.grad(expected, alone, grad)
    assert_same_bits({"dq": dq[:, :, -last:]}, {"dq": dq_alone})
    assert not dq[:, :, :last].any()


@pytest.mark.slow
def test_more_scores_than_32_bits_count(gpu: torch.device) -> None:
    """2**32 + 2**20 scores; a sample of their rows is checked."""
    rows, columns, width = 2**16 + 16, 2**16, 8
    a = torch.randn(rows, width, device=gpu, requires_grad=True)
    b = torch.randn(columns, width, device=gpu)
    lse = mr.logsumexp_matmul(a, b, scale=0.3)
    (da,) = torch.autograd.grad(lse.sum(), a)
    sample = torch.tensor([0, 1, 32_767, 65_535, 65_536, rows - 1], device=gpu)
    few = a.detach()[sample].double().requires_grad_()
    expected = torch.logsumexp(0.3 * few @ b.double().T, dim=1)
    (expected_da,) = torch.autograd.grad(expected.sum(), few)
    torch.testing.assert_close(lse[sample].double(), expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(da[sample].double(), expected_da, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("memory", (32,), indirect=True)
def test_more_kept_local_gradients_than_32_bits_count(gpu: torch.device, memory: None) -> None:
    """2**32 + 2**20 local gradients; a sample of their rows is checked."""
    rows, classes, width = 2**16 + 16, 2**16, 64
    x, weight = (normal(n, width, dtype=torch.bfloat16, device=gpu) for n in (rows, classes))
    weight *= width**-0.5
    target = torch.randint(classes, (rows,), device=gpu)
    x.requires_grad_()
    loss = mr.linear_cross_entropy(x, weight, target, reduction="none", workspace=1 << 34)
    (dx,) = torch.autograd.grad(loss.sum(), x)
    sample = torch.tensor([0, 1, 32_767, 65_535, 65_536, rows - 1], device=gpu)
    few = x.detach()[sample].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(few @ weight.double().T, target[sample], reduction="none")
    (expected_dx,) = torch.autograd.grad(expected.sum(), few)
    torch.testing.assert_close(loss[sample].double(), expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(dx[sample].double(), expected_dx, rtol=0.02, atol=1e-3)
