"""Errors of the linear losses and their gradients against float64, as the logits grow.

Of fewer tokens than where speed is measured: the definition in float64 stores the logits.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Stopwatch, attempt, differences, dtype_name, run_once
from monoidreduce import reference
from monoidreduce.demo.memory import Problem

STDS = (1.0, 4.0, 8.0)  # of the logits
PARTS = ("loss", "dX", "dW")
DTYPE = torch.bfloat16
# By operator: its definition; sizes on a CPU, on a GPU, and of a quick run.
OPERATORS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "cross_entropy": (
        reference.linear_cross_entropy,
        {"N": 256, "V": 32000, "D": 512},
        {"N": 1024, "V": 128256, "D": 4096},
        {"N": 16, "V": 500, "D": 64},
    ),
    "distillation": (
        functools.partial(reference.linear_distillation, loss="forward_kl"),
        {"N": 256, "V": 32000, "D": 512, "E": 512, "loss": "forward_kl"},
        {"N": 1024, "V": 128256, "D": 2048, "E": 4096, "loss": "forward_kl"},
        {"N": 16, "V": 500, "D": 64, "E": 96, "loss": "forward_kl"},
    ),
}


class Float32Logits(torch.autograd.Function):
    """x @ weight.T in float32, of factors of 16 bits, as are those of its gradients. On GPUs."""

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


OF_16_BIT_PRODUCTS = {"cross_entropy": cross_entropy_of_products, "distillation": forward_kl_of_products}


def _in(dtype: torch.dtype, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Integers stay as they are."""
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs)


def measure_errors(op: str, device: torch.device, std: float, parameters: dict[str, Any]) -> dict[str, Any]:
    """One row: of each contender the relative errors, by norm, of the loss and of both gradients."""
    definition = OPERATORS[op][0]
    case = importlib.import_module(f"bench.{op}").case(DTYPE, device, std=std, **parameters)
    # The careful way to write it in torch: logits are products, and statistics, in float32.
    case.contenders["torch, float32 logits"] = lambda *inputs: definition(*_in(torch.float32, inputs))
    if device.type == "cuda":
        # The same of 16-bit products: what rounding the gradients by the logits once costs.
        case.contenders["torch, float32 logits of 16-bit products"] = OF_16_BIT_PRODUCTS[op]
    watch = Stopwatch(device)
    inputs, grad = case.drawn()
    exact = _in(torch.float64, inputs)
    leaves = tuple(tensor.requires_grad_() for tensor in exact[: case.leaves])
    expected = run_once(Problem(lambda: definition(*exact), leaves, grad.double()), watch)[1]

    def errors(problem: Problem) -> dict[str, float]:
        return dict(zip(PARTS, differences(run_once(problem, watch)[1], expected), strict=True))

    found, absent = attempt(case, case.problems(), errors)
    return {
        "op": op,
        "dtype": dtype_name(DTYPE),
        "parameters": parameters,
        "std": std,
        "errors": found,
        "absent": absent,
    }


def measure_accuracy(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """One row for each operator and standard deviation of the logits."""
    rows = []
    for op, (_, on_cpu, on_cuda, small) in OPERATORS.items():
        for std in STDS:
            print(f"errors of {op} at logits of standard deviation {std:g}", file=sys.stderr)
            parameters = small if quick else on_cuda if device.type == "cuda" else on_cpu
            rows.append(measure_errors(op, device, std, parameters))
    return rows
