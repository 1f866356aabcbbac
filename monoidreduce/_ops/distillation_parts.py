"""The op `linear_distillation_parts`: a reduced distillation loss and its gradients, some tokens at a time.

forward_gradients.py says when and why. The teacher is frozen. A step has four products, two of them scores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from monoidreduce._ops.distillation import DistillationOpOptions, distillation_backward, distillation_forward
from monoidreduce._ops.engine import _C
from monoidreduce._ops.forward_gradients import (
    add_parts,
    can_take_parts,
    new_results,
    planned_workspace,
    scaled,
    scaled_in_place,
)
from monoidreduce._ops.linear_loss import in_dtype_of, mean_divisor
from monoidreduce._ops.memory import aligned, empty_statistics, launch_on
from monoidreduce._ops.registry import Fold, register
from monoidreduce._ops.slices import tokens_at_once

__all__ = ["takes"]


def takes(
    x: Tensor, weight: Tensor, teacher_x: Tensor, kind: str, reduction: str, workspace: int | None
) -> bool:
    """Whether this op computes a call whose weight gets a gradient, and whose teacher gets none."""
    if kind == "reverse_kl" or teacher_x.shape[1] % 8 or 0 in teacher_x.shape:
        return False
    return can_take_parts(x, weight, reduction, workspace, heads=2)


class PartsOptions(NamedTuple):
    """The options of the op. of_x, of_weight: whether the gradient is wanted. workspace: bytes."""

    reduction: str
    kind: str
    temperature: float
    of_x: bool
    of_weight: bool
    workspace: int


def parts_results(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    options: PartsOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    return new_results(x, weight, options.of_x, options.of_weight)


def parts_forward(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    options: PartsOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    results = parts_results(x, weight, teacher_x, teacher_weight, mask, options)
    weight = aligned(in_dtype_of(x, weight))
    x, teacher_x, teacher_weight = aligned(x), aligned(teacher_x), aligned(teacher_weight)
    losses, mean = empty_statistics(x, len(x)), options.reduction == "mean"
    count = mean_divisor(mask, options.reduction, losses)
    factor = losses.new_full((), 1 / len(x) if mean else 1.0) if count is None else 1 / count
    needed = [options.of_x, False, False, False]

    def step(part: slice, sum_to: Tensor | None) -> tuple[Tensor, Tensor]:
        room = 4 * (part.stop - part.start) * len(weight)  # bytes: all weights of both heads are stored
        of_part = DistillationOpOptions("none", options.kind, options.temperature, True, options.of_x, room)
        of_mask = None if mask is None else mask[part]
        tensors = x[part], weight, teacher_x[part], teacher_weight, of_mask
        of_tokens, *saved = distillation_forward(*tensors, of_part)
        # The factor is the same for all tokens, so that float32 sums are multiplied by it.
        given = (*saved, of_part._replace(reduction="sum"), needed, False, False, sum_to)
        return of_tokens, distillation_backward(factor, *tensors, *given)[0]  # type: ignore[arg-type]

    add_parts(results, _tokens_at_once(x, weight, teacher_x, teacher_weight, options), losses, step)
    _C.reduce_losses(losses, None, mask, results[0], 0, mean, *launch_on(x))
    return results


def _tokens_at_once(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, options: PartsOptions
) -> int:
    clusters, (classes, width) = 1, weight.shape
    if x.is_cuda:
        plan = _C.plan_distillation_backward(
            x,
            weight,
            teacher_x,
            teacher_weight,
            temperature=options.temperature,
            workspace=planned_workspace(len(x), options.workspace),
            deterministic=False,
        )
        clusters = plan.clusters
    return tokens_at_once(len(x), classes, width, options.workspace, clusters, teacher_x.shape[1])


def parts_backward(grad_loss: Tensor, *rest: Any) -> list[Tensor]:
    *_, dx, dweight, _, needed = rest
    return scaled((dx, dweight), grad_loss, needed)


def parts_backward_in_place(grad_loss: Tensor, *rest: Any) -> list[Tensor]:
    *_, dx, dweight, _, needed = rest
    return scaled_in_place((dx, dweight), grad_loss, needed)


def parts_flops(given: dict[str, Any]) -> int:
    """FLOPs of both scores, and of the gradients, which the forward pass computes."""
    rows, width = given["x"]
    widths = width * (1 + given["of_x"] + given["of_weight"]) + given["teacher_x"][1]
    flops: int = 2 * rows * given["weight"][0] * widths
    return flops


register(
    "linear_distillation_parts",
    inputs="Tensor x, Tensor weight, Tensor teacher_x, Tensor teacher_weight, Tensor? mask",
    options=PartsOptions,
    outputs="loss, dx, dweight",
    differentiable="loss",
    residuals="dx, dweight",
    constants="teacher_x, teacher_weight, mask",
    forward=parts_forward,
    fake=parts_results,
    backward=parts_backward,
    fold=Fold(a="x", b="weight", other_a="teacher_x", other_b="teacher_weight"),
    flops=(parts_flops, lambda given: 0),
    in_place=parts_backward_in_place,
)
