"""Log-probabilities of targets under a linear head, with the logits of linear cross entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C
from monoidreduce._ops.local_gradients import (
    Head,
    multiply_local_gradients,
    order_rows,
    room_to_gather,
)
from monoidreduce._ops.losses import _debug_targets
from monoidreduce._ops.memory import (
    bias_gradient,
    gradient,
    launch,
    padded,
    padded_weight,
    rounded,
    statistics,
)
from monoidreduce._ops.registry import UNROUNDED, register
from monoidreduce._ops.slices import columns_in
from monoidreduce.workspace import get_workspace


def log_probs_results(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperatures: Tensor | None,
    logit_scale: float,
    softcap: float,
    temperature: float,
    ignore_index: int,
    top1: bool,
    first_class: int,
    classes: int,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """log_probs, entropy, the log-sum-exps of tokens in two words; top1, empty where nobody asks for it."""
    log_probs, entropy, lse, lse_low = (statistics(x, x.shape[0]) for _ in range(4))
    return log_probs, entropy, lse, lse_low, target.new_empty(x.shape[0] if top1 else 0)


def log_probs_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperatures: Tensor | None,
    logit_scale: float,
    softcap: float,
    temperature: float,
    ignore_index: int,
    top1: bool,
    first_class: int,
    classes: int,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _debug_targets(target, weight.shape[0] if classes < 0 else classes, ignore_index)
    log_probs, entropy, lse, lse_low = (statistics(x, x.shape[0]) for _ in range(4))
    best = target.new_empty(x.shape[:1]) if top1 else None
    plan = scratch = order = gathered = None
    if x.is_cuda:
        score: Any = {"logit_scale": logit_scale, "softcap": softcap}
        plan = _C.plan_log_probs_forward(x, weight, bias, top1=best, **score)
        if plan.tensor_cores:
            x, weight, scratch = padded(x), padded_weight(weight, plan), statistics(x, plan.scratch)
        if plan.skips_rows:
            order = order_rows(x, target=target, mask=None, ignore_index=ignore_index)
            (gathered,) = room_to_gather(x)
    operands = (x, weight, bias, target, temperatures)
    filled = (log_probs, entropy, best, lse, lse_low, scratch, order, gathered)
    options = (logit_scale, softcap, temperature, ignore_index, first_class, classes)
    arguments: Any = (*operands, *filled, *options, *launch(x), plan)
    _C.log_probs_forward(*arguments)
    return log_probs, entropy, lse, lse_low, target.new_empty(0) if best is None else best


def log_probs_backward(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperatures: Tensor | None,
    entropy: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    logit_scale: float,
    softcap: float,
    temperature: float,
    ignore_index: int,
    top1: bool,
    first_class: int,
    classes: int,
    workspace: int | None,
    needed: list[bool],
    unrounded: bool = False,
) -> list[Tensor]:
    workspace = get_workspace() if workspace is None else workspace
    classes = weight.shape[0] if classes < 0 else classes
    options: Any = (logit_scale, softcap, temperature, ignore_index)
    upstream = (grad_log_probs, grad_entropy, grad_lse)
    rows: Any = (target, temperatures, *upstream, *(t.contiguous() for t in (entropy, lse, lse_low)))
    plan = None
    if x.is_cuda:
        mode: Any = {"workspace": workspace, "deterministic": torch.are_deterministic_algorithms_enabled()}
        plan = _C.plan_log_probs_backward(x, weight, bias, logit_scale=logit_scale, **mode)
        if plan.tensor_cores:
            inputs = (x, weight, bias)
            x, weight = padded(x), padded_weight(weight, plan)
            order = None
            if plan.skips_rows:
                order = order_rows(x, target=target, mask=None, ignore_index=ignore_index)
            else:  # a row that does not count may hold anything, and 0 times NaN is NaN
                x = torch.where((target != ignore_index)[:, None], x, 0)
            head = Head(x, weight, columns_in(workspace, len(x)), needed, plan.clusters, order=order)

            def store(part: slice) -> None:
                operands = (head.rows, weight[part], None if bias is None else bias[part])
                local = (head.local(part), head.local_sums(part), order)
                slice_of_classes = (first_class + part.start, classes)
                arguments: Any = (*operands, *rows, *local, *options, *slice_of_classes, *launch(x), plan)
                _C.log_probs_local_gradient(*arguments)

            multiply_local_gradients(store, [head])
            dbias = head.sums_gradient()
            dbias = None if dbias is None else dbias / logit_scale
            computed = (head.rows_gradient(unrounded), head.d_columns, dbias)
            return rounded(computed, inputs, needed[:3], unrounded)
    found = gradient(x, needed[0], unrounded), gradient(weight, needed[1]), bias_gradient(bias, needed[2])
    of_classes = (first_class, classes, workspace)
    arguments: Any = (x, weight, bias, *rows, *found, *options, *of_classes, *launch(x), plan)
    _C.log_probs_backward(*arguments)
    return rounded(found, (x, weight, bias), needed[:3], unrounded)


register(
    "linear_log_probs",
    inputs="Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? temperatures",
    options="float logit_scale, float softcap, float temperature, int ignore_index, bool top1, "
    "int first_class, int classes, int? workspace",
    outputs="log_probs, entropy, lse, lse_low, top1",
    differentiable="log_probs, entropy, lse",
    residuals="entropy, lse, lse_low",
    constants="target, temperatures",
    forward=log_probs_forward,
    fake=log_probs_results,
    backward=log_probs_backward,
    backward_options=UNROUNDED,
)
