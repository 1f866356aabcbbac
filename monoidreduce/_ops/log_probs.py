"""Log-probabilities of targets under a linear head, with the logits of linear cross entropy.

On Hopper a forward pass keeps softmax weights of the first classes, and the backward pass turns them into
local gradients. A token has two upstream gradients, of its log-probability and of its entropy, which the
forward pass does not know. So weights serve once: where a graph is retained, backward passes compute all
logits again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from monoidreduce._ops.engine import _C
from monoidreduce._ops.local_gradients import (
    Head,
    multiply_local_gradients,
    order_rows,
    room_to_gather,
)
from monoidreduce._ops.losses import _debug_targets, _empty_kept, _own_columns, _traced_kept, kept_classes
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
from monoidreduce._ops.slices import TILE_COLUMNS
from monoidreduce.workspace import get_workspace

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def weights_can_be_kept(bias: Tensor | None, softcap: float, top1: bool) -> bool:
    """May a forward pass keep weights, as far as the terms of its logits and its results go."""
    return bias is None and softcap == 0 and not top1


def _tiles(classes: int) -> int:
    return -(-classes // TILE_COLUMNS)


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
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
) -> Results:
    """log_probs, entropy, the log-sum-exps of tokens in two words; top1, empty where nobody asks for it.

    Then what a forward pass keeps: frames [tokens, tiles] of weights, and these [tokens, classes] in 16 bits.
    """
    log_probs, entropy, lse, lse_low = (statistics(x, x.shape[0]) for _ in range(4))
    keep = keep and weights_can_be_kept(bias, softcap, top1)
    kept = _traced_kept(x, weight, workspace, x_differentiated, keep, logit_scale)
    frames = lse.new_empty(x.shape[0], _tiles(kept.shape[1]))
    return log_probs, entropy, lse, lse_low, target.new_empty(x.shape[0] if top1 else 0), frames, kept


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
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
) -> Results:
    _debug_targets(target, weight.shape[0] if classes < 0 else classes, ignore_index)
    log_probs, entropy, lse, lse_low = (statistics(x, x.shape[0]) for _ in range(4))
    best = target.new_empty(x.shape[:1]) if top1 else None
    plan = scratch = first_kept = order = gathered = None
    kept = _empty_kept(x, 0)
    if x.is_cuda:
        score: Any = {"logit_scale": logit_scale, "softcap": softcap}
        plan = _C.plan_log_probs_forward(x, weight, bias, top1=best, **score)
        if keep and plan.keeps and weights_can_be_kept(bias, softcap, top1):
            kept = _empty_kept(x, kept_classes(x, weight, workspace, x_differentiated))
        if kept.numel():
            first_kept = kept[:, : len(weight)]
            plan.keep(first_kept.shape[1])
        if plan.tensor_cores:
            x, weight, scratch = padded(x), padded_weight(weight, plan), statistics(x, plan.scratch)
        if plan.skips_rows:
            order = order_rows(x, target=target, mask=None, ignore_index=ignore_index)
            (gathered,) = room_to_gather(x)
    operands = (x, weight, bias, target, temperatures)
    filled = (log_probs, entropy, best, lse, lse_low, scratch, first_kept, order, gathered)
    options = (logit_scale, softcap, temperature, ignore_index, first_class, classes)
    arguments: Any = (*operands, *filled, *options, *launch(x), plan)
    _C.log_probs_forward(*arguments)
    frames = lse.new_empty(len(x), 0)
    if plan is not None and scratch is not None and first_kept is not None:
        frames = scratch[plan.frames :][: len(x) * _tiles(kept.shape[1])].view(len(x), -1)
    return log_probs, entropy, lse, lse_low, target.new_empty(0) if best is None else best, frames, kept


def log_probs_backward(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperatures: Tensor | None,
    log_probs: Tensor,
    entropy: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    frames: Tensor,
    kept: Tensor,
    logit_scale: float,
    softcap: float,
    temperature: float,
    ignore_index: int,
    top1: bool,
    first_class: int,
    classes: int,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
    needed: list[bool],
    unrounded: bool = False,
    consumes: bool = False,
) -> list[Tensor]:
    """consumes: may the weights that were kept become local gradients; else they are left alone."""
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
            kept = (kept if consumes else kept[:, :0]).contiguous()
            first = kept[:, : len(weight)]
            own = _own_columns(workspace, kept)
            head = Head(x, weight, own, needed, plan.clusters, first, order=order, unrounded=unrounded)

            def compute(part: slice, out: Tensor, sums: Tensor | None, *of_kept: Tensor | None) -> None:
                operands = (head.rows, weight[part], None if bias is None else bias[part])
                numbers = (*options, first_class + part.start, classes, *launch(x))
                arguments: Any = (*operands, *rows, out, sums, order, *of_kept, *numbers, plan)
                _C.log_probs_local_gradient(*arguments)

            def store(part: slice) -> None:
                compute(part, head.local(part), head.local_sums(part), None, None)

            if first.numel():  # which are weights as yet, for this once: torch refuses to read them again
                increment_version(kept)
                compute(slice(0, first.shape[1]), first, None, frames, log_probs.contiguous())
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
    "int first_class, int classes, bool keep, bool x_differentiated, int? workspace",
    outputs="log_probs, entropy, lse, lse_low, top1, frames, kept",
    differentiable="log_probs, entropy, lse",
    residuals="log_probs, entropy, lse, lse_low, frames, kept",
    constants="target, temperatures",
    forward=log_probs_forward,
    fake=log_probs_results,
    backward=log_probs_backward,
    in_place=functools.partial(log_probs_backward, consumes=True),
    backward_options=UNROUNDED,
)
