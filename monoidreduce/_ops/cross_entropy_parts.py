"""The op `linear_cross_entropy_parts`: a reduced cross entropy and its gradients, some tokens at a time.

forward_gradients.py says when and why.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from monoidreduce._ops.cross_entropy import (
    CrossEntropyNumbers,
    CrossEntropyOpOptions,
    cross_entropy_backward,
    dlogits_can_be_saved,
    fold_cross_entropy,
    target_weights,
    with_mean,
)
from monoidreduce._ops.engine import _C
from monoidreduce._ops.forward_gradients import (
    FEWEST_ROWS,
    add_parts,
    can_take_parts,
    new_results,
    planned_workspace,
    scaled,
    scaled_in_place,
)
from monoidreduce._ops.linear_loss import in_dtype_of, mean_divisor
from monoidreduce._ops.memory import aligned, allows_planes, empty_statistics, launch_on
from monoidreduce._ops.planes import split_rows
from monoidreduce._ops.registry import Fold, register
from monoidreduce._ops.slices import tokens_at_once

__all__ = ["takes"]


def takes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    numbers: CrossEntropyNumbers,
    return_lse: bool,
    workspace: int | None,
) -> bool:
    """Whether this op computes a call for which has_float32_gradient says yes."""
    saves = dlogits_can_be_saved(bias, class_weight, numbers.softcap, numbers.label_smoothing)
    saves = saves and not return_lse and numbers.logit_scale > 0
    return saves and can_take_parts(x, weight, numbers.reduction, workspace)


class PartsOptions(NamedTuple):
    """The options of the op. of_x, of_weight: whether the gradient is wanted. workspace: bytes."""

    reduction: str
    logit_scale: float
    softcap: float
    ignore_index: int
    label_smoothing: float
    z_loss: float
    of_x: bool
    of_weight: bool
    workspace: int


def parts_results(
    x: Tensor, weight: Tensor, target: Tensor, class_weight: Tensor | None, options: PartsOptions
) -> tuple[Tensor, Tensor, Tensor]:
    return new_results(x, weight, options.of_x, options.of_weight)


def parts_forward(
    x: Tensor, weight: Tensor, target: Tensor, class_weight: Tensor | None, options: PartsOptions
) -> tuple[Tensor, Tensor, Tensor]:
    results = parts_results(x, weight, target, class_weight, options)
    numbers = CrossEntropyNumbers(*options[:6])
    x, weight = aligned(x), aligned(in_dtype_of(x, weight))
    losses, counted = empty_statistics(x, len(x)), target != numbers.ignore_index
    weights = target_weights(with_mean(class_weight, numbers.label_smoothing), target, counted)
    count = mean_divisor(counted, numbers.reduction, losses, weights)
    factor = losses.new_ones(()) if count is None else 1 / count
    needed = [options.of_x, False, False]
    at_once, planes = _parts(x, weight, options)
    column_planes = split_rows(weight) if planes else None

    def step(part: slice, sum_to: Tensor | None) -> tuple[Tensor, Tensor]:
        room = 8 * (part.stop - part.start) * len(weight)  # bytes: all dlogits of the part are saved
        of_part = CrossEntropyOpOptions(
            *numbers._replace(reduction="none"), 0, -1, False, True, options.of_x, room
        )
        tensors = x[part], weight, None, target[part], class_weight
        of_tokens, *saved, _ = fold_cross_entropy(*tensors, of_part, column_planes=column_planes)
        # The factor is the same for all tokens, so that float32 sums are multiplied by it.
        given = (*saved, of_part._replace(reduction="sum"), needed, False, False, sum_to, column_planes)
        return of_tokens, cross_entropy_backward(factor, None, *tensors, *given)[0]  # type: ignore[arg-type]

    add_parts(results, at_once, losses, step)
    loss = results[0]
    mean = numbers.reduction == "mean"
    of_tokens = mean and class_weight is None
    _C.reduce_losses(losses, target, None, loss, numbers.ignore_index, of_tokens, *launch_on(x))
    if mean and not of_tokens:
        loss *= factor
    return results


def _parts(x: Tensor, weight: Tensor, options: PartsOptions) -> tuple[int, bool]:
    """The number of tokens of a part, and whether operands are multiplied in planes."""
    clusters, planes = 1, False
    if x.is_cuda:
        plan = _C.plan_cross_entropy_backward(
            x,
            weight,
            None,
            logit_scale=options.logit_scale,
            workspace=planned_workspace(len(x), options.workspace),
            deterministic=False,
            planes=allows_planes(),
        )
        clusters, planes = plan.clusters, plan.planes
    rows, (classes, width) = len(x), weight.shape
    at_once = tokens_at_once(rows, classes, width, options.workspace, clusters, planes=planes)
    if planes and 0 < rows % at_once < FEWEST_ROWS:  # the last part would take ordinary cores
        at_once = -(-rows // -(-rows // at_once))
    return at_once, planes


def parts_backward(
    grad_loss: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    dx: Tensor,
    dweight: Tensor,
    options: PartsOptions,
    needed: list[bool],
) -> list[Tensor]:
    return scaled((dx, dweight), grad_loss, needed)


def parts_backward_in_place(grad_loss: Tensor, *rest: Any) -> list[Tensor]:
    *_, dx, dweight, _, needed = rest
    return scaled_in_place((dx, dweight), grad_loss, needed)


def parts_flops(given: dict[str, Any]) -> int:
    """FLOPs of the scores, and of the gradients, which the forward pass computes."""
    rows, width = given["x"]
    flops: int = 2 * rows * given["weight"][0] * width * (1 + given["of_x"] + given["of_weight"])
    return flops


register(
    "linear_cross_entropy_parts",
    inputs="Tensor x, Tensor weight, Tensor target, Tensor? class_weight",
    options=PartsOptions,
    outputs="loss, dx, dweight",
    differentiable="loss",
    residuals="dx, dweight",
    constants="target, class_weight",
    forward=parts_forward,
    fake=parts_results,
    backward=parts_backward,
    fold=Fold(a="x", b="weight"),
    flops=(parts_flops, lambda given: 0),
    in_place=parts_backward_in_place,
)
