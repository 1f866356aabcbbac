"""Derivatives of derivatives of kept classes, soft targets, the k largest and samples, against torch in
float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding import sample_oracle
from kept_classes import with_kept
from largest import LargestTensor
from soft_targets import soft_inputs
from specimens import cross_entropy_inputs
from torch import Tensor
from torch.func import jvp, vmap

import monoidreduce as mr
from monoidreduce import reference

F64 = torch.float64
Tensors = tuple[Tensor, ...]
Case = tuple[Callable[..., Tensor], Callable[..., Tensor], Tensors]  # a call, the same in torch, their inputs


def number_of(*results: Tensor) -> Tensor:
    """A function of results; those that are infinite have no part in it."""
    finite = [t.masked_fill(t.detach().isinf(), 0.0) for t in results]
    return sum((t.sin().sum() + (t * t).sum() for t in finite), finite[0].new_zeros(()))


def kept(dtype: torch.dtype, device: torch.device) -> Case:
    """Targets that are ignored or not kept, a row that keeps nothing, and one that keeps its target alone."""
    inputs = cross_entropy_inputs(9, 70, 6, dtype=dtype, device=device, bias=True)
    inputs, keeps = with_kept(inputs, lost=0.3)
    label, words = inputs["target"], inputs["kept"]
    label[3:5] = torch.tensor([7, 40], device=device)
    words[3:5] = 0
    words[4, 1] = 1 << 8
    options: dict[str, Any] = {"softcap": 3.0, "logit_scale": 1.5, "entropy": True}
    options["temperature"] = 0.5 + torch.rand(9, device=device)
    keeps[3:5] = False
    keeps[4, 40] = True
    some = keeps.any(1)

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        found = mr.linear_log_probs(x, weight, label, bias=bias, kept=words, **options)
        assert found.entropy is not None
        return number_of(found.log_probs, found.entropy, found.lse)

    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        used = label != -100
        logits = 3 * torch.tanh((1.5 * x @ weight.T + bias) / 3) / options["temperature"][:, None]
        rows = (used & some).nonzero()[:, 0]
        logits = logits[rows].masked_fill(~keeps[rows], -math.inf)
        log_p = logits.log_softmax(1)
        entropy = -(log_p.exp() * log_p.masked_fill(~keeps[rows], 0.0)).sum(1)
        return number_of(
            log_p.gather(1, label[rows, None]).masked_fill(~keeps[rows].gather(1, label[rows, None]), 0.0),
            entropy,
            logits.logsumexp(1),
        )

    return ours, torchs, (inputs["x"], inputs["weight"], inputs["bias"])


def soft(dtype: torch.dtype, device: torch.device) -> Case:
    """Ignored and equal targets, more of them than one fold takes."""
    inputs = soft_inputs(9, 23, 6, 11, dtype=dtype, device=device, bias=True)
    target = inputs.pop("target")
    inputs["target_probs"][2] = 0
    options: dict[str, Any] = {"softcap": 3.0, "logit_scale": 1.5, "z_loss": 0.1}
    names = ("x", "weight", "bias", "target_probs")

    def of(function: Callable[..., Any]) -> Callable[..., Tensor]:
        def call(*tensors: Tensor) -> Tensor:
            given = dict(zip(names, tensors, strict=True))
            return number_of(*function(**given, target=target, return_lse=True, **options))

        return call

    functions = of(mr.linear_cross_entropy), of(reference.linear_cross_entropy)
    return *functions, tuple(inputs[name] for name in names)


def topk(dtype: torch.dtype, device: torch.device) -> Case:
    inputs = cross_entropy_inputs(9, 23, 6, dtype=dtype, device=device, bias=True)
    options: dict[str, Any] = {"softcap": 3.0, "logit_scale": 1.5}
    options["temperature"] = 0.5 + torch.rand(9, device=device)

    def of(function: Callable[..., Any]) -> Callable[..., Tensor]:
        def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            found = function(x, weight, 9, bias=bias, **options)
            return number_of(found[0], found[2])

        return call

    return of(mr.linear_topk), of(reference.linear_topk), (inputs["x"], inputs["weight"], inputs["bias"])


def sample(dtype: torch.dtype, device: torch.device) -> Case:
    inputs = cross_entropy_inputs(9, 23, 6, dtype=dtype, device=device, bias=True)
    tensors = inputs["x"], inputs["weight"], inputs["bias"]
    options: dict[str, Any] = {"softcap": 3.0, "logit_scale": 1.5, "temperature": 0.7}

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return number_of(*mr.linear_sample(x, weight, bias=bias, seed=3, entropy=True, **options)[1:])

    index = mr.linear_sample(*tensors[:2], bias=tensors[2], seed=3, **options).index
    oracle = sample_oracle(index, **options)
    return ours, lambda *tensors: number_of(*oracle(*tensors)), tensors


CASES = (kept, soft, topk, sample)
All = Callable[..., Any]


def forward(function: All, tensors: Tensors, along: Tensors) -> Any:
    return torch.func.jvp(function, tensors, along)[1]


def reverse_twice(function: All, tensors: Tensors, along: Tensors) -> Any:
    leaves = [t.clone().requires_grad_() for t in tensors]
    gradients = torch.autograd.grad(function(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(gradients, leaves, along, allow_unused=True, materialize_grads=True)


def grad_twice(function: All, tensors: Tensors, along: Tensors) -> Any:
    numbers = tuple(range(len(tensors)))

    def moved(*tensors: Tensor) -> Any:
        pairs = zip(torch.func.grad(function, numbers)(*tensors), along, strict=True)
        return sum((g * d).sum() for g, d in pairs)

    return torch.func.grad(moved, numbers)(*tensors)


def forward_of_reverse(function: All, tensors: Tensors, along: Tensors) -> Any:
    gradient = torch.func.grad(function, tuple(range(len(tensors))))
    return torch.func.jvp(gradient, tensors, along)[1]


def reverse_of_forward(function: All, tensors: Tensors, along: Tensors) -> Any:
    def moved(*tensors: Tensor) -> Any:
        return torch.func.jvp(function, tensors, along)[1]

    return torch.func.grad(moved, tuple(range(len(tensors))))(*tensors)


def forward_twice(function: All, tensors: Tensors, along: Tensors) -> Any:
    return forward(lambda *tensors: torch.func.jvp(function, tensors, along)[1], tensors, along)


def hessian(function: All, tensors: Tensors, along: Tensors) -> Any:
    return torch.func.hessian(lambda first: function(first, *tensors[1:]))(tensors[0])


WAYS = (
    forward,
    reverse_twice,
    grad_twice,
    forward_of_reverse,
    reverse_of_forward,
    forward_twice,
    hessian,
)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_float64(case: Any, way: Any, device: torch.device) -> None:
    ours, torchs, tensors = case(F64, device)
    along = tuple(torch.randn_like(t) for t in tensors)
    found, expected = way(ours, tensors, along), way(torchs, tensors, along)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_other_dtypes_are_as_accurate_as_torch(case: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Hessian-vector products by the norm of all errors; torch computes in the same dtype."""
    ours, torchs, tensors = case(dtype, device)
    exact = tuple(t.double() for t in tensors)
    along = tuple(torch.randn_like(t) for t in tensors)
    expected = reverse_twice(torchs, exact, tuple(t.double() for t in along))
    found, base = (reverse_twice(of, tensors, along) for of in (ours, torchs))
    for x, y, right in zip(found, base, expected, strict=True):
        error, of_torch = (float((t.double() - right).norm()) for t in (x, y))
        assert error <= 2 * of_torch + 1e-6 * float(right.norm())


@pytest.mark.parametrize("operator", ("linear_cross_entropy", "linear_topk"))
def test_the_bound_on_memory(operator: str, device: torch.device) -> None:
    """A Hessian-vector product has no tensor of the size of the logits, nor of [tokens, targets, width]."""
    inputs = soft_inputs(300, 2000, 16, 40, dtype=torch.float32, device=device)
    leaves = inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()
    with LargestTensor() as largest:
        if operator == "linear_topk":
            result = mr.linear_topk(*leaves, 40, workspace=1 << 20).log_probs.square().sum()
        else:
            result = mr.linear_cross_entropy(**inputs, workspace=1 << 20)
        (gradient,) = torch.autograd.grad(result, leaves[1], create_graph=True)
        torch.autograd.grad((gradient * torch.ones_like(gradient)).sum(), leaves)
    assert largest.elements <= 4 * leaves[1].numel() < 300 * 16 * 40


def test_forward_mode_of_vmap(device: torch.device) -> None:
    def best(x: Tensor, weight: Tensor) -> Tensor:
        return mr.linear_topk(x, weight, 2).log_probs

    x, u = (tuple(torch.randn(3, n, 4, dtype=F64, device=device) for n in (5, 9)) for _ in "xu")
    found = jvp(vmap(best), x, u)[1]
    for i in range(3):
        expected = jvp(best, tuple(t[i] for t in x), tuple(t[i] for t in u))[1]
        torch.testing.assert_close(found[i], expected)
