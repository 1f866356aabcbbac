"""Second derivatives of operators, against torch in float64; operators without them say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from largest import LargestTensor
from live_bytes import LiveBytes
from specimens import SPECIMENS, Specimen, name_of
from tolerance import as_outputs
from torch import Tensor

import monoidreduce as mr
from monoidreduce import reference

F64 = torch.float64
TWICE = (
    "attention",
    "attention_varlen",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_log_probs",
    "logsumexp_matmul",
    "mlp",
)


def is_differentiable_twice(specimen: Specimen) -> bool:
    given = {name for name, value in (*specimen.arguments.items(), *specimen.options.items()) if value}
    if specimen.operator == "attention":
        return not {"bias", "softcap"} <= given
    return specimen.operator in TWICE and not ("gated" in specimen.name or "gate" in given)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def second(specimen: Specimen, function: Callable[..., Any], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of a random sum of all gradients, by inputs and upstream gradients."""
    draw = generator()
    leaves = {name: inputs[name].detach().requires_grad_() for name in specimen.differentiable(inputs)}
    outputs = as_outputs(function(**{**inputs, **leaves}, **specimen.options))
    outputs = tuple(t for t in outputs if t.is_floating_point() and t.requires_grad)
    upstream = {
        f"upstream {i}": torch.randn(t.shape, generator=draw, dtype=F64).to(t).requires_grad_()
        for i, t in enumerate(outputs)
    }
    gradients = torch.autograd.grad(
        outputs, list(leaves.values()), list(upstream.values()), create_graph=True
    )
    along = [torch.randn(t.shape, generator=draw, dtype=F64).to(t) for t in gradients]
    by = {**leaves, **upstream}
    found = torch.autograd.grad(
        gradients, list(by.values()), along, allow_unused=True, materialize_grads=True
    )
    return dict(zip(by, found, strict=True))


@pytest.mark.parametrize("specimen", [s for s in SPECIMENS if is_differentiable_twice(s)], ids=name_of)
def test_float64(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(F64, device)
    found = second(specimen, getattr(mr, specimen.operator), inputs)
    expected = second(specimen, getattr(reference, specimen.operator), inputs)
    for name, gradient in expected.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-10 * scale, msg=name)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("operator", TWICE)
def test_other_dtypes_are_as_accurate_as_torch(
    operator: str, dtype: torch.dtype, device: torch.device
) -> None:
    """By the norm of all errors; torch computes in the same dtype."""
    specimen = next(s for s in SPECIMENS if s.operator == operator and is_differentiable_twice(s))
    inputs = specimen.inputs(dtype, device)
    exact = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    found = second(specimen, getattr(mr, operator), inputs)
    base = second(specimen, getattr(reference, operator), inputs)
    for name, gradient in second(specimen, getattr(reference, operator), exact).items():
        error, of_torch = (float((t[name].double() - gradient).norm()) for t in (found, base))
        assert error <= 2 * of_torch + 1e-6 * float(gradient.norm()), name


def penalty_of(specimen: Specimen, inputs: dict[str, Tensor], how: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the first input: the square of the operator's gradient, as `how` takes it."""
    first = next(iter(inputs))

    def penalty(function: Callable[..., Any], t: Tensor) -> Tensor:
        def loss(t: Tensor) -> Tensor:
            outputs = as_outputs(function(**{**inputs, first: t}, **specimen.options))
            return torch.stack([o.square().sum() for o in outputs if o.is_floating_point()]).sum()

        gradient: Tensor = how(loss, t)
        return gradient.square().sum()

    return penalty


def by_autograd(loss: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    return torch.autograd.grad(loss(t), t, create_graph=True)[0]


def by_func(loss: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    gradient: Tensor = torch.func.grad(loss)(t)
    return gradient


@pytest.mark.parametrize("outer", (by_autograd, by_func))
@pytest.mark.parametrize("inner", (by_autograd, by_func))
@pytest.mark.parametrize("operator", TWICE)
def test_both_ways_to_differentiate(operator: str, inner: Any, outer: Any, device: torch.device) -> None:
    specimen = next(s for s in SPECIMENS if s.operator == operator and is_differentiable_twice(s))
    inputs = specimen.inputs(F64, device)
    penalty = penalty_of(specimen, inputs, inner)
    t = next(iter(inputs.values())).requires_grad_(outer is by_autograd)
    found, expected = (outer(lambda t, of=of: penalty(getattr(of, operator), t), t) for of in (mr, reference))
    torch.testing.assert_close(found, expected)


def test_batches_of_cotangents(device: torch.device) -> None:
    a, b = (torch.randn(n, 2, dtype=F64, device=device, requires_grad=True) for n in (3, 5))
    found, expected = (
        torch.autograd.functional.hessian(lambda a, of=of: of.logsumexp_matmul(a, b).sum(), a, vectorize=True)
        for of in (mr, reference)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "specimen",
    [s for s in SPECIMENS if not is_differentiable_twice(s) and s.operator != "merge_attention"],
    ids=name_of,
)
def test_others_say_so(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    leaves = {name: inputs[name].detach().requires_grad_() for name in specimen.differentiable(inputs)}
    outputs = as_outputs(getattr(mr, specimen.operator)(**{**inputs, **leaves}, **specimen.options))
    outputs = tuple(t for t in outputs if t.is_floating_point() and t.requires_grad)
    upstream = [torch.ones_like(t) for t in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(gradients[0].square().sum(), list(leaves.values()), allow_unused=True)


def test_a_gradient_penalty_of_attention(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 2, n, 8, dtype=F64, device=device, requires_grad=True) for n in (5, 7, 7))

    def penalty(attention: Any) -> Any:
        (gradient,) = torch.autograd.grad(attention(q, k, v, causal=True).sum(), q, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (q, k, v))

    torch.testing.assert_close(penalty(mr.attention), penalty(reference.attention))


@pytest.mark.parametrize("dtype", (F64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("bias", ((2, 4, 70, 9), (4, 1, 9), (70, 9)), ids=str)
def test_attention_with_a_bias(bias: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Also of pairs that it excludes, of rows without a key, and of the most negative number."""
    sizes = ((2, 4, 70, 8), (2, 2, 9, 8), (2, 2, 9, 5), bias)
    inputs = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in sizes]
    draw = generator()
    with torch.no_grad():
        inputs[3][..., 2] = -torch.inf
        inputs[3][..., 0, 4] = torch.finfo(dtype).min
        if len(bias) == 4:
            inputs[3][1, 2, 5] = -torch.inf

    def twice(attention: Any, inputs: list[Tensor]) -> Any:
        out, lse = attention(*inputs[:3], bias=inputs[3], window=(None, 61), return_lse=True)
        lse = torch.where(lse > -torch.inf, lse, 0.0)
        along = (torch.randn(t.shape, generator=draw.manual_seed(0)).to(t) for t in (out, lse))
        gradients = torch.autograd.grad((out, lse), inputs, list(along), create_graph=True)
        return torch.autograd.grad([t.double().square().sum() for t in gradients], inputs)

    exact = [t.detach().double().requires_grad_() for t in inputs]
    results = zip(twice(mr.attention, inputs), twice(reference.attention, exact), strict=True)
    for found, expected in results:
        error = float((found.double() - expected).norm() / expected.norm())
        assert error < (1e-10 if dtype == F64 else 5e-2)


@pytest.mark.parametrize("queries", (5, 9))
def test_attention_with_sinks(queries: int, device: torch.device) -> None:
    """Also of queries that see no key."""
    sizes = ((1, 4, queries, 8), (1, 2, 7, 8), (1, 2, 7, 8), (4,))
    inputs = [torch.randn(s, dtype=F64, device=device, requires_grad=True) for s in sizes]

    def twice(attention: Any) -> Any:
        results = attention(*inputs[:3], sinks=inputs[3], causal=True, return_lse=True)
        gradients = torch.autograd.grad(
            results, inputs, [torch.ones_like(t) for t in results], create_graph=True
        )
        return torch.autograd.grad([t.square().sum() for t in gradients], inputs)

    torch.testing.assert_close(twice(mr.attention), twice(reference.attention))


def test_the_bound_on_memory(device: torch.device) -> None:
    """A Hessian-vector product of cross entropy has no tensor of the size of the logits."""
    x, weight = (torch.randn(n, 8, device=device, requires_grad=True) for n in (300, 2000))
    target = torch.randint(2000, (300,), device=device)
    with LargestTensor() as largest:
        loss = mr.linear_cross_entropy(x, weight, target)
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        torch.autograd.grad((gradient * torch.ones_like(weight)).sum(), (x, weight))
    assert largest.elements <= 2 * weight.numel()


@pytest.mark.parametrize("options", ({}, {"causal": True}, {"softcap": 5.0}, {"dropout_p": 0.5}), ids=str)
def test_the_bound_on_memory_of_attention(options: dict[str, Any]) -> None:
    """A Hessian-vector product takes the workspace and a few tensors of the size of operands, not scores."""
    length, width, workspace = 2048, 8, 2 << 20
    q, k, v, upstream, *along = (torch.randn(1, 1, length, width) for _ in range(7))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (mr.attention(q, k, v, **options) * upstream).sum()

    with mr.workspace(workspace), LiveBytes() as live:
        torch.func.jvp(torch.func.grad(loss, (0, 1, 2)), (q, k, v), tuple(along))
    operand, scores = 4 * length * width, 4 * length * length
    assert live.most < workspace + 72 * operand < scores / 2
