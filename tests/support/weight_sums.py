"""Gradients of weights in float32, by each of the ways to ask for them, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from specimens import Inputs
from tolerance import accuracy_failures, check_draws, raise_failures
from torch import Tensor

import monoidreduce as mr

OPERATORS = ("linear_cross_entropy", "linear_log_probs", "linear_distillation")
ROUTES = ("weight_grad", "main_grad", "master")


def called(operator: str, inputs: Inputs, **options: Any) -> Tensor:
    """A number whose gradients are of unit size."""
    if operator == "linear_log_probs":
        return -mr.linear_log_probs(**inputs, **options).log_probs.sum()
    loss: Tensor = getattr(mr, operator)(**inputs, reduction="sum", **options)
    return loss


def exact_and_rounded(operator: str, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient of the weight in float64; and in float32, with dlogits that are rounded to `dtype`."""
    found = []
    for real in (torch.float64, torch.float32):
        x, weight = (inputs[name].detach().to(real) for name in ("x", "weight"))
        p = (x @ weight.T).softmax(1)
        if operator == "linear_distillation":
            dlogits = p - (inputs["teacher_x"].to(real) @ inputs["teacher_weight"].to(real).T).softmax(1)
            counted = inputs.get("mask")
        else:
            counted = inputs["target"] != -100
            dlogits = p.clone()
            dlogits[counted, inputs["target"][counted]] -= 1
        if counted is not None:
            dlogits = dlogits * counted[:, None]
        if real == torch.float32:
            dlogits = dlogits.to(dtype).float()
        found.append(dlogits.T @ x)
    return found[0], found[1]


def summed(operator: str, route: str, inputs: Inputs, **options: Any) -> Tensor:
    """The float32 gradient of the weight from one backward pass, by one of the ROUTES."""
    x, weight = (inputs[name].detach().clone() for name in ("x", "weight"))
    dtype = x.dtype
    if route == "master":
        master = weight.float().requires_grad_()
        with torch.autocast(x.device.type, dtype):
            loss = called(operator, inputs | {"x": x.requires_grad_(), "weight": master}, **options)
        loss.backward()
        assert master.grad is not None
        return master.grad
    parameter = torch.nn.Parameter(weight)
    sums = torch.zeros(weight.shape, device=weight.device)
    if route == "main_grad":
        parameter.main_grad = sums  # type: ignore[attr-defined]
    else:
        options["weight_grad"] = sums
    x.requires_grad_()
    called(operator, inputs | {"x": x, "weight": parameter}, **options).backward()
    assert parameter.grad is None and x.grad is not None
    return sums


def check_equal(sums: Tensor, expected: Tensor) -> None:
    """Hold two sums of the same products to each other.

    On a GPU the dlogits may come from different kernels, each of which rounds them to 16 bits.
    """
    if sums.is_cuda:
        assert (sums - expected).norm() <= 2**-8 * expected.norm()
    else:
        torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4)


def check_sums(operator: str, route: str, draw: Callable[[], Inputs], draws: int = 4, **options: Any) -> None:
    """Hold gradients to the rule of tolerance.py, beside float32 sums of dlogits that are rounded to 16 bits.

    So a gradient that is rounded itself fails. The errors of `draws` draws of the inputs are taken together.
    """

    def check() -> None:
        found, rows = [], 0
        for _ in range(draws):
            inputs = draw()
            x, rows = inputs["x"], rows + len(inputs["x"])
            found.append(
                (summed(operator, route, inputs, **options), *exact_and_rounded(operator, inputs, x.dtype))
            )
        ours, exact, rounded = map(torch.stack, zip(*found, strict=True))
        assert ours.dtype == torch.float32
        raise_failures(
            operator, accuracy_failures("d_weight", ours, exact, rounded, x.dtype, rows, drawn_again=True)
        )
        assert not torch.equal(ours, ours.to(x.dtype).float())

    check_draws(check)
