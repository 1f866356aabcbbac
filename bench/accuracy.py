"""Errors of linear losses, attention and their gradients against float64, as logits or scores grow.

Cases have fewer tokens than those for speed, as the definition in float64 stores the logits.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench.attention import through
from bench.harness import (
    AUTOTUNED,
    Case,
    Contender,
    Stopwatch,
    attempt,
    differences,
    dtype_name,
    run_once,
)
from monoidreduce import reference
from monoidreduce.demo.memory import Problem


class Float32Logits(torch.autograd.Function):
    """x @ weight.T in float32, of 16-bit factors, as are those of its gradients. Only on GPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rounded = grad.to(x.dtype)
        return rounded @ weight, rounded.T @ x


def cross_entropy_of_products(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(Float32Logits.apply(x, weight), target)


def forward_kl_of_products(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    student, teacher = (
        Float32Logits.apply(*of).log_softmax(-1) for of in ((x, weight), (teacher_x, teacher_weight))
    )
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def loss_contenders(definition: Any, of_16_bit_products: Contender, case: Case) -> dict[str, Contender]:
    """The case's contenders, and the careful ways to write the loss in torch."""
    careful: dict[str, Contender] = {  # logits are products, and statistics, in float32
        "torch, float32 logits": lambda *inputs: definition(*_in(torch.float32, inputs))
    }
    if case.device.type == "cuda":
        # The same with 16-bit factors: the error of rounding the dlogits once.
        careful["torch, float32 logits of 16-bit products"] = of_16_bit_products
    return {name: of for name, of in case.contenders.items() if name != AUTOTUNED} | careful


def on_a_gpu(contender: Contender) -> Contender:
    """The contender; it raises RuntimeError on a CPU, where torch's backend of the same name is different."""

    def run(q: Tensor, *others: Tensor) -> Tensor:
        if not q.is_cuda:
            raise RuntimeError("its kernels are for GPUs")
        return contender(q, *others)

    return run


def attention_contenders(case: Case) -> dict[str, Contender]:
    """Ours, torch's default, each of its backends, and scores stored in 16 bits."""
    kept = ("monoidreduce", "monoidreduce, sm80", "monoidreduce, compensated", "torch")
    theirs = F.scaled_dot_product_attention
    return {name: contender for name, contender in case.contenders.items() if name in kept} | {
        "math": through(SDPBackend.MATH, theirs),  # computes in float32, rounds results once
        "cuDNN": on_a_gpu(through(SDPBackend.CUDNN_ATTENTION, theirs)),
        "FlashAttention-2": on_a_gpu(through(SDPBackend.FLASH_ATTENTION, theirs)),
        "efficient": on_a_gpu(through(SDPBackend.EFFICIENT_ATTENTION, theirs)),
        "torch, 16-bit scores": reference.attention,
    }


def float32_contenders(case: Case) -> dict[str, Contender]:
    """Ours, in planes too, and torch's default and backends that take float32."""
    kept = ("monoidreduce", "monoidreduce, emulated", "torch")
    theirs = F.scaled_dot_product_attention
    return {name: contender for name, contender in case.contenders.items() if name in kept} | {
        "math": through(SDPBackend.MATH, theirs),
        "efficient": on_a_gpu(through(SDPBackend.EFFICIENT_ATTENTION, theirs)),
    }


class Operator(NamedTuple):
    """The measurements of an operator in one dtype.

    definition: takes a case's inputs in any dtype.
    contenders: chooses the contenders of a case.
    parts: names of the output, of the gradients and of what `beside` finds.
    beside: takes the inputs and the results, and finds parts of the results whose error is told by itself.
    stds: standard deviations of the logits or scores.
    on_cpu, on_cuda, quick: parameters of the cases on a CPU, on a GPU, and of a quick run.
    dtype: of the inputs.
    """

    definition: Any
    contenders: Callable[[Case], dict[str, Contender]]
    parts: tuple[str, ...]
    beside: Callable[[tuple[Tensor, ...], list[Tensor]], list[Tensor]]
    stds: tuple[float, ...]
    on_cpu: list[dict[str, Any]]
    on_cuda: list[dict[str, Any]]
    quick: list[dict[str, Any]]
    dtype: torch.dtype = torch.bfloat16


def nothing(inputs: tuple[Tensor, ...], results: list[Tensor]) -> list[Tensor]:
    return []


def of_other_classes(inputs: tuple[Tensor, ...], results: list[Tensor]) -> list[Tensor]:
    """The rows of dW of classes that are no token's target. Rows of targets are larger, and hide them."""
    weight, target = inputs[1:]
    others = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
    others[target] = False
    return [results[2][others]]


def _linear_loss(
    definition: Any,
    of_16_bit_products: Contender,
    parts: tuple[str, ...] = (),
    beside: Callable[[tuple[Tensor, ...], list[Tensor]], list[Tensor]] = nothing,
    **sizes: Any,
) -> Operator:
    contenders = functools.partial(loss_contenders, definition, of_16_bit_products)
    return Operator(definition, contenders, ("loss", "dX", "dW", *parts), beside, (1.0, 4.0, 8.0), **sizes)


def _attention(**sizes: dict[str, Any]) -> Operator:
    """Attention over L keys and over 6 keys.

    Over few keys, kernels may compute delta as a sum of its own. With scores of standard deviation 36, most
    rows have one softmax probability close to 1. (Scores of inputs drawn uniformly from [-9, 9] have standard
    deviation 27.)
    """
    of_few_too = {place: [size, size | {"N": 6}] for place, size in sizes.items()}
    parts = ("out", "d_q", "d_k", "d_v")
    return Operator(reference.attention, attention_contenders, parts, nothing, (1.0, 6.0, 36.0), **of_few_too)


# By the name of the operator, or by "NAME in DTYPE".
OPERATORS = {
    "cross_entropy": _linear_loss(
        reference.linear_cross_entropy,
        cross_entropy_of_products,
        ("dW of other classes",),
        of_other_classes,
        on_cpu=[{"N": 256, "V": 32000, "D": 512}],
        on_cuda=[{"N": 1024, "V": 128256, "D": 4096}],
        quick=[{"N": 16, "V": 500, "D": 64}],
    ),
    "distillation": _linear_loss(
        functools.partial(reference.linear_distillation, loss="forward_kl"),
        forward_kl_of_products,
        on_cpu=[{"N": 256, "V": 32000, "D": 512, "E": 512, "loss": "forward_kl"}],
        on_cuda=[{"N": 1024, "V": 128256, "D": 2048, "E": 4096, "loss": "forward_kl"}],
        quick=[{"N": 16, "V": 500, "D": 64, "E": 96, "loss": "forward_kl"}],
    ),
    "attention": _attention(
        on_cpu={"B": 1, "H": 4, "L": 1024, "d": 128},
        on_cuda={"B": 1, "H": 8, "L": 2048, "d": 128},
        quick={"B": 1, "H": 2, "L": 256, "d": 64},
    ),
    "attention in float32": Operator(
        reference.attention,
        float32_contenders,
        ("out", "d_q", "d_k", "d_v"),
        nothing,
        (1.0, 6.0, 36.0),
        on_cpu=[{"B": 1, "H": 4, "L": 1024, "d": 128}],
        on_cuda=[{"B": 1, "H": 8, "L": 2048, "d": d} for d in (64, 128)],
        quick=[{"B": 1, "H": 2, "L": 256, "d": 64}],
        dtype=torch.float32,
    ),
}


def _in(dtype: torch.dtype, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs with floating-point tensors converted to a dtype."""
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs)


def measure_errors(op: str, device: torch.device, std: float, parameters: dict[str, Any]) -> dict[str, Any]:
    """One row: for each contender and part, the relative error by norm, the largest and the mean error."""
    definition, contenders, parts, beside = OPERATORS[op][:4]
    dtype, module = OPERATORS[op].dtype, op.partition(" in ")[0]
    case = importlib.import_module(f"bench.{module}").case(dtype, device, std=std, **parameters)
    case = replace(case, contenders=contenders(case))
    watch = Stopwatch(device)
    inputs, grad = case.drawn()
    exact = _in(torch.float64, inputs)
    leaves = tuple(tensor.requires_grad_() for tensor in exact[: case.leaves])

    def results_of(problem: Problem) -> list[Tensor]:
        results = run_once(problem, watch)[1]
        return results + beside(inputs, results)

    expected = results_of(Problem(lambda: definition(*exact), leaves, grad.double()))

    def errors(problem: Problem) -> dict[str, dict[str, float]]:
        results = results_of(problem)
        absolute = [(a.double() - b).abs() for a, b in zip(results, expected, strict=True)]
        measures = {
            "errors": differences(results, expected),
            "largest": [float(error.max()) for error in absolute],
            "mean": [float(error.mean()) for error in absolute],
        }
        return {measure: dict(zip(parts, values, strict=True)) for measure, values in measures.items()}

    found, absent = attempt(case, case.problems(), errors)
    return {
        "op": op,
        "dtype": dtype_name(dtype),
        "parameters": parameters,
        "std": std,
        **{
            measure: {name: of_one[measure] for name, of_one in found.items()}
            for measure in ("errors", "largest", "mean")
        },
        "absent": absent,
    }


def measure_accuracy(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """One row for each operator, size and standard deviation of the logits or scores."""
    rows = []
    for op, operator in OPERATORS.items():
        for parameters in operator.quick if quick else getattr(operator, f"on_{device.type}"):
            for std in operator.stds:
                print(f"errors of {op} {parameters} at standard deviation {std:g}", file=sys.stderr)
                rows.append(measure_errors(op, device, std, parameters))
    return rows
