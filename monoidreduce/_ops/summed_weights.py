"""Calls of linear losses that add the gradient of the weight to a tensor, instead of giving it to autograd.

The tensor is `weight_grad` of the call, or the weight's `main_grad`. It is in the accumulation dtype, so the
sum is never rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.registry import OPERATORS, no_forward_mode, unrecorded
from monoidreduce._torch_private import (
    frees_saved,
    has_tangent,
    is_observed,
    mark_untraced,
    transforms_are_active,
)
from monoidreduce._validate import mismatch

__all__ = ["WEIGHT", "call_adding", "gradients_adding", "stand_in"]

_UNTRACED = "a backward pass that adds to weight_grad (or main_grad) is not traced"
WEIGHT = 1  # its place among the inputs of the ops


def call_adding(name: str, sum_to: Tensor, parameter: Tensor, *args: Any) -> Any:
    """Call the op `name`; its backward pass adds the gradient of the weight to `sum_to`.

    parameter: the weight as the user gave it. args: of the op.
    """
    inputs = OPERATORS[name].inputs
    if has_tangent(args[:inputs]):
        raise no_forward_mode(f"monoidreduce::{name}", "the gradient of weight is added to weight_grad")
    if transforms_are_active():
        expected = "None inside of transforms of torch.func"
        raise ValueError(mismatch("weight_grad", expected, "a tensor, or a weight with main_grad"))
    call = name, sum_to, parameter, args[inputs:]
    result: Any = _Adding.apply(call, *args[:inputs])  # type: ignore[no-untyped-call]
    return result


mark_untraced(call_adding, _UNTRACED)


def _refuse_derivatives() -> None:
    """Raise RuntimeError if the running backward pass is recorded: a sum into memory has no derivative."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a gradient that is added to weight_grad (or main_grad) has no derivative. Do without "
            "create_graph=True, or without weight_grad."
        )
    if transforms_are_active():
        raise RuntimeError("weight_grad (or main_grad) takes no batch of upstream gradients")


def gradients_adding(
    name: str,
    run: Callable[..., Any],
    given: Sequence[Any],
    needed: Sequence[bool],
    unrounded: bool,
    sum_to: Tensor,
) -> list[Any]:
    """The gradients from a backward pass of the op `name`, with that of the weight added to `sum_to`.

    run: the backward op, or its implementation. given, needed, unrounded: its arguments.
    """
    if not needed[WEIGHT]:
        return [*run(*given, needed, unrounded)]
    if run in OPERATORS[name][1:3]:  # only implementations add
        others = [each and i != WEIGHT for i, each in enumerate(needed)]
        return [*run(*given, others, unrounded, False, sum_to)]
    found = [*run(*given, needed, unrounded, True)]
    sum_to += found[WEIGHT]
    return found


def stand_in(parameter: Tensor, weight: Tensor) -> Tensor | None:
    """What autograd gets as the gradient of a weight whose gradient was added elsewhere.

    None; or what Megatron's own layers return for a parameter that has the attribute
    `grad_added_to_main_grad`, which they set to True: a tensor whose values nobody reads, so that hooks of
    the parameter run. If its attribute `zero_out_wgrad` is true, the values are 0.
    """
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    zeros = getattr(parameter, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if zeros else torch.empty_like(weight)


def _operators(name: str) -> tuple[Any, Any]:
    """The forward and the backward op. torch.compile may trace this file, but not the implementations."""
    if torch.compiler.is_compiling():
        ops = torch.ops.monoidreduce
        return getattr(ops, name).default, getattr(ops, f"{name}_backward").default
    return unrecorded(name)


class _Adding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: tuple[str, Tensor, Tensor, Sequence[Any]], *given: Any) -> Any:
        name, _, _, options = call
        operator = OPERATORS[name]
        run, _ = _operators(name)
        results = run(*given, *options)
        ctx.save_for_backward(*given, *operator.residuals(results))
        ctx.mark_non_differentiable(*results[operator.differentiable :])
        ctx.set_materialize_grads(False)
        # Not saved by autograd, which would refuse a tensor that another backward pass has added to.
        ctx.call = call
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _refuse_derivatives()
        name, sum_to, parameter, options = ctx.call
        operator, needed = OPERATORS[name], [*ctx.needs_input_grad[1:]]
        if all(grad is None for grad in grads):
            return (None,) * (1 + operator.inputs)
        frees = frees_saved() and not is_observed()
        saved = ctx.saved_tensors
        given = (*grads[: operator.differentiable], *saved, *options)
        run = operator.freeing if frees else _operators(name)[1]
        found = gradients_adding(name, run, given, needed, False, sum_to)
        found += [None] * (operator.inputs - len(found))  # inputs without gradients
        gradients = [g if wanted else None for g, wanted in zip(found, needed, strict=True)]
        if needed[WEIGHT]:
            gradients[WEIGHT] = stand_in(parameter, saved[WEIGHT])
        return None, *gradients
