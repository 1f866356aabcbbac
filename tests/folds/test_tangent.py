"""Gradients of gradients of statistics: folds of one more score, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from folds import FOLDS, Inputs, fold_inputs, leaves_of, outputs_of
from largest import LargestTensor
from torch import Tensor

import monoidreduce as mr
from monoidreduce import stat
from monoidreduce.folds.torch import reader

F64 = torch.float64
TWICE = [name for name in FOLDS if name not in ("of_two_scores", "ranked")]


def second(fold: Any, call: Inputs) -> list[Tensor]:
    """The gradients of a random sum of the gradients, with respect to all inputs and upstream gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=F64).to(like)

    outputs = [t for t in outputs_of(fold(**call)) if t.is_floating_point() and t.requires_grad]
    leaves, upstream = leaves_of(call), [random(t).requires_grad_() for t in outputs]
    gradients = torch.autograd.grad(outputs, leaves, upstream, create_graph=True)
    return list(torch.autograd.grad(gradients, (*leaves, *upstream), [random(t) for t in gradients]))


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("shape, columns, width", (((37,), 211, 9), ((2, 3), 7, 5)))
def test_float64(name: str, shape: tuple[int, ...], columns: int, width: int) -> None:
    fold, call = fold_inputs(name, shape, columns, width)
    for found, expected in zip(second(fold, call), second(fold.reference, call), strict=True):
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11 * scale)


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_other_dtypes_are_as_accurate_as_torch(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the norm of all errors. torch multiplies in the same dtype, and does all else in float32."""

    def products(rows: Tensor, columns: Tensor, within: torch.dtype, scale: float) -> Tensor:
        if within == F64:
            return rows.double() @ columns.double().T * scale
        return (rows @ columns.T).to(within) * scale

    monkeypatch.setattr(reader, "scores", products)
    fold, call = fold_inputs(name, (200,), 300, 8, dtype)

    def double(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: double(t) for key, t in value.items()}
        return value.detach().double().requires_grad_() if value.is_floating_point() else value

    results = second(fold, call), second(fold.reference, double(call)), second(fold.reference, call)
    for found, exact, base in zip(*results, strict=True):
        error, of_torch = (float((t.double() - exact).norm()) for t in (found, base))
        assert error <= 2 * of_torch + 1e-6 * float(exact.norm())


def test_gradient_penalty() -> None:
    @mr.statistics
    def loss(score: Any, column: Any, label: Any) -> Any:
        target = stat.total(torch.where(column == label, score, 0.0))
        return dict(lse=stat.softmax(score).logsumexp, target=target)

    x, weight = (torch.randn(n, 6, dtype=F64, requires_grad=True) for n in (20, 50))
    label = torch.randint(50, (20,))
    label[3] = -100
    with torch.no_grad():
        x[3] = torch.nan  # an ignored row has no part

    def penalty(fold: Any) -> Tensor:
        s = fold(x, weight, label=label)
        (gradient,) = torch.autograd.grad((s.lse - s.target)[label >= 0].sum(), x, create_graph=True)
        return gradient[label >= 0].square().sum()

    found, expected = (torch.autograd.grad(penalty(of), (x, weight)) for of in (loss, loss.reference))
    torch.testing.assert_close(found, expected)


def test_of_torch_func() -> None:
    @mr.statistics
    def fold(score: Any) -> Any:
        return dict(lse=stat.softmax(score).logsumexp, sum=stat.total(torch.tanh(score)))

    a, b = torch.randn(3, 2, dtype=F64), torch.randn(5, 2, dtype=F64)

    def hessian(of: Any) -> Any:
        return torch.func.jacrev(torch.func.jacrev(lambda a: sum(of(a, b)).sum()))(a)

    torch.testing.assert_close(hessian(fold), hessian(fold.reference))
    check: Any = torch.autograd.gradgradcheck
    assert check(lambda a, b: tuple(fold(a, b)), (a.requires_grad_(), b.requires_grad_()))


def test_only_what_is_asked_for() -> None:
    fold, call = fold_inputs("tempered", (4,), 6, 3)
    for wanted in ("a", "b"):
        for of in ("a", "b"):
            results = []
            for each in (fold, fold.reference):
                (gradient,) = torch.autograd.grad(each(**call).gap.sum(), call[of], create_graph=True)
                results += torch.autograd.grad(gradient.square().sum(), call[wanted])
            torch.testing.assert_close(*results)


def test_scores_are_not_stored() -> None:
    """No tensor on the way to a second derivative is larger than operands and data."""
    fold, call = fold_inputs("tempered", (500,), 2000, 4, torch.float32)
    with LargestTensor() as largest:
        (gradient,) = torch.autograd.grad(fold(**call).gap.sum(), call["a"], create_graph=True)
        torch.autograd.grad(gradient.square().sum(), (call["a"], call["b"]))
    assert largest.elements <= 2 * call["b"].numel()


@pytest.mark.parametrize("name", ("tempered", "siglip"))
def test_third_derivatives(name: str) -> None:
    """The derivative of a fold of two scores has payloads in place of two more scores."""
    fold, call = fold_inputs(name, (2,), 3, 2)
    a = call["a"].detach()

    def third(of: Any) -> Any:
        def first(a: Tensor) -> Tensor:
            found = outputs_of(of(**{**call, "a": a}))
            return torch.stack([t.sum() for t in found if t.is_floating_point()]).sum()

        return torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(first)))(a)

    torch.testing.assert_close(third(fold), third(fold.reference))


@pytest.mark.parametrize("name", ("of_two_scores", "ranked"))
def test_others_say_so(name: str) -> None:
    fold, call = fold_inputs(name, (3,), 4)
    (gradient,) = torch.autograd.grad(outputs_of(fold(**call))[0].sum(), call["a"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once: (those of a fold of two scores|largest)"):
        gradient.sum().backward()
