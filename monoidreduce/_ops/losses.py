"""The linear losses and logsumexp_matmul: two ops each.

A log-sum-exp is kept in two words: `lse`, and in `lse_low` what was lost in rounding it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C
from monoidreduce._ops.local_gradients import (
    UNIT_UPSTREAM,
    Head,
    gather_rows,
    multiply_local_gradients,
    order_rows,
    room_to_gather,
)
from monoidreduce._ops.memory import (
    bias_gradient,
    gradient,
    launch,
    new,
    padded,
    padded_weight,
    rounded,
    statistics,
)
from monoidreduce._ops.registry import UNROUNDED, choices, register
from monoidreduce._ops.slices import columns_in, columns_to_keep
from monoidreduce._validate import mismatch
from monoidreduce.workspace import get_workspace

DISTILLATION_LOSSES = choices("distillation_forward", "kind")


def _reduced(losses: Tensor, reduction: str) -> Tensor | None:
    """Where a kernel leaves what `reduction` makes of the losses of tokens; None if they are wanted."""
    return None if reduction == "none" else losses.new_empty(())


def mean_divisor(
    counted: Tensor | None, reduction: str, like: Tensor, weights: Tensor | None = None
) -> Tensor | None:
    """What a mean divides by where the host does not know it: the number of tokens, or their weights' sum.

    NaN where tokens count and their targets all have weight 0. Torch divides the part of the targets by their
    sum, 0 / 0, so its mean is NaN whatever smoothing adds to it.
    """
    if counted is None or reduction != "mean":
        return None
    if weights is None:
        return counted.sum(dtype=like.dtype).clamp_(min=1)
    total = torch.where(weights.any(), weights.sum(), math.nan)
    return torch.where(counted.any(), total, 1)


def _unreduced(grad: Tensor, tokens: Tensor, count: Tensor | None, reduction: str) -> Tensor:
    """The gradients of the losses of tokens from that of their reduction (count None: all count)."""
    if reduction == "none":
        return grad
    if reduction == "mean":
        grad = grad / (max(tokens.numel(), 1) if count is None else count)
    return grad.expand(tokens.shape)


# Local gradients that forward passes of the linear losses keep


def kept_classes(
    x: Tensor, weight: Tensor, workspace: int | None, x_differentiated: bool, other_width: int = 0
) -> int:
    """Of how many classes a forward pass that may keep local gradients has room for them in the workspace.

    A traced call keeps none unless it is given a workspace: the shape is part of the graph, the limit is not.
    """
    if workspace is None:
        return 0
    room = x.shape[1] if x_differentiated else 0
    return columns_to_keep(x.shape[0], weight.shape[0], workspace, room, 2 if other_width else 1)


def _traced_kept(
    x: Tensor,
    weight: Tensor,
    workspace: int | None,
    x_differentiated: bool,
    keep: bool,
    scale: float,
    other_width: int = 0,
) -> Tensor:
    """What a forward pass that may `keep` local gradients will keep, where it is traced."""
    if not keep or workspace is None or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return _empty_kept(x, 0)
    if not _C.can_keep(x.device.index, x.shape[1], other_width, scale):
        return _empty_kept(x, 0)
    return _empty_kept(x, kept_classes(x, weight, workspace, x_differentiated, other_width))


def _empty_kept(x: Tensor, classes: int) -> Tensor:
    """[tokens, classes kept, rounded up to 8]."""
    return x.new_empty(x.shape[0], -(-classes // 8) * 8)


def _unit_upstream(tokens: Tensor, slope: float) -> Tensor:
    """Upstream gradients with which a kernel's local gradients, by dot products, are those by scores for
    UNIT_UPSTREAM."""
    return tokens.new_full((1,), UNIT_UPSTREAM / slope).expand(tokens.shape)


def _upstream(grad: Tensor | None, counted: Tensor | None, kept: Tensor, uniform: bool) -> Tensor | None:
    """[tokens], 0 for those that do not count: where products multiply by it (Head)."""
    if grad is None or not (uniform or kept.shape[1]):
        return None
    return grad if counted is None else torch.where(counted, grad, 0)


def _rows_that_count(
    counted: Tensor | None, order: Tensor | None, kept: Tensor, weight: Tensor, masks: bool, *rows: Tensor
) -> tuple[Tensor, ...]:
    """The rows, where kernels leave none out those that do not count as zeros: they may hold anything, and 0
    times NaN is NaN."""
    if not masks or counted is None or order is not None or kept.shape[1] >= len(weight):
        return rows
    return tuple(torch.where(counted[:, None], t, 0) for t in rows)


def _own_columns(workspace: int, kept: Tensor) -> int:
    """Of how many classes local gradients have room in what kept ones [tokens, classes] leave of it."""
    return columns_in(workspace - 2 * kept.numel(), len(kept))


# Linear cross entropy


class CrossEntropyNumbers(NamedTuple):
    """The first options of the op, which are options of a call too."""

    reduction: str
    logit_scale: float
    softcap: float
    ignore_index: int
    label_smoothing: float
    z_loss: float


def scores_can_be_kept(
    bias: Tensor | None, class_weight: Tensor | None, softcap: float, label_smoothing: float
) -> bool:
    """May a forward pass keep local gradients, as far as the terms of its logits and its loss go."""
    return bias is None and softcap == 0 and (class_weight is None or label_smoothing == 0)


def rank_may_keep(class_weight: Tensor | None, label_smoothing: float, **_: object) -> bool:
    """May a forward pass over a rank's own classes keep local gradients (`states.cross_entropy`: miss)."""
    return class_weight is None and label_smoothing == 0


class KeptWeights(NamedTuple):
    """What a forward pass has kept, where the log-sum-exps of the classes of all ranks are not known yet.

    miss: [tokens], to be filled: the target's share of the softmax less 1. to_gradients: makes local
    gradients of what was kept, from the combined log-sum-exp in two words and z_loss.
    """

    miss: Tensor
    to_gradients: Callable[..., None]


def with_mean(class_weight: Tensor | None) -> Tensor | None:
    """[V] -> their mean, then the weights, in whole tiles of classes, in the dtype of statistics."""
    if class_weight is None:
        return None
    weights = class_weight.to(torch.promote_types(class_weight.dtype, torch.float32))
    return torch.cat((weights.mean(0, keepdim=True), weights, weights.new_zeros(-len(weights) % 256)))


def target_weights(class_weights: Tensor | None, target: Tensor, counted: Tensor) -> Tensor | None:
    """The weight of each token's target, 0 where it is ignored. An invalid target, on a GPU, has any."""
    if class_weights is None:
        return None
    return torch.where(counted, class_weights[target.clamp(-1, len(class_weights) - 2) + 1], 0)


def cross_entropy_results(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    first_class: int,
    classes: int,
    lse_of_ignored: bool,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss; the log-sum-exps of tokens in two words; kept local gradients."""
    lse = statistics(x, x.shape[0])
    loss = torch.empty_like(lse) if reduction == "none" else lse.new_empty(())
    keep = keep and scores_can_be_kept(bias, class_weight, softcap, label_smoothing)
    kept = _traced_kept(x, weight, workspace, x_differentiated, keep, logit_scale)
    return loss, lse, torch.empty_like(lse), kept


def plan_cross_entropy(
    tensors: tuple[Any, ...], numbers: CrossEntropyNumbers, workspace: int, gpu: _C.DeviceFacts | None
) -> tuple[_C.Plan, _C.Plan, bool]:
    """Of both passes; and may the forward pass keep local gradients.

    tensors, numbers: the first arguments of the op. gpu: plans for it, wherever the tensors are.
    """
    x, weight, bias, _, class_weight = tensors
    softcap, smoothing = numbers.softcap, numbers.label_smoothing
    call: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "gpu": gpu}
    call["logit_scale"] = numbers.logit_scale
    changed: dict[str, Any] = {"class_weight": with_mean(class_weight), "label_smoothing": smoothing}
    forward = _C.plan_cross_entropy_forward(**call, **changed)
    deterministic = torch.are_deterministic_algorithms_enabled()
    backward = _C.plan_cross_entropy_backward(**call, workspace=workspace, deterministic=deterministic)
    return forward, backward, scores_can_be_kept(bias, class_weight, softcap, smoothing)


def _debug_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """On a GPU a target out of range makes its row NaN; looking for one would wait for the device."""
    if target.is_cuda and os.environ.get("MONOIDREDUCE_DEBUG") == "1":
        wrong = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
        if wrong.numel():
            expected = f"class indices in [0, {classes}) or ignore_index={ignore_index}"
            raise IndexError(mismatch("target", expected, wrong[0].item()))


def fold_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    first_class: int,
    classes: int,
    lse_of_ignored: bool,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
    of_rank: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, KeptWeights | None]:
    """What the op returns, and of a rank's classes what its local gradients are made of."""
    _debug_targets(target, weight.shape[0] if classes < 0 else classes, ignore_index)
    losses = statistics(x, x.shape[0])
    lse, lse_low = torch.empty_like(losses), torch.empty_like(losses)
    plan = scratch = first_kept = kept_for = order = gathered = later = None
    kept, class_weights = _empty_kept(x, 0), with_mean(class_weight)
    mean = reduction == "mean" and class_weight is None
    options = (mean, logit_scale, softcap, ignore_index, label_smoothing, z_loss, first_class, classes)
    if x.is_cuda:  # by position, as a call: names would take a microsecond
        plan = _C.plan_cross_entropy_forward(x, weight, bias, target, class_weights, *(None,) * 9, *options)
        keep = keep and scores_can_be_kept(bias, class_weight, softcap, label_smoothing)
        if keep and plan.keeps:
            kept = _empty_kept(x, kept_classes(x, weight, workspace, x_differentiated))
        if kept.numel():
            first_kept, kept_for = kept[:, : len(weight)], lse.new_full((1,), UNIT_UPSTREAM)
            plan.keep(first_kept.shape[1])
        if plan.tensor_cores:
            x, weight, scratch = padded(x), padded_weight(weight, plan), statistics(x, plan.scratch)
        if plan.skips_rows and not lse_of_ignored:
            order = order_rows(x, target=target, mask=None, ignore_index=ignore_index)
            (gathered,) = room_to_gather(x)
    reduced = _reduced(losses, reduction)
    operands: Any = (x, weight, bias, target, class_weights)
    results: Any = (losses, reduced, lse, lse_low, scratch, first_kept, None if of_rank else kept_for)
    arguments: Any = (*operands, *results, order, gathered, *options, *launch(x), plan)
    _C.cross_entropy_forward(*arguments)
    if of_rank and kept_for is not None:
        assert plan is not None and scratch is not None
        frames = scratch[plan.frames :]

        def to_gradients(lse: Tensor, lse_low: Tensor, z_loss: float) -> None:
            of_kept = (lse, lse_low, frames, first_kept, kept_for, order)
            numbers = (logit_scale, softcap, ignore_index, label_smoothing, z_loss, first_class, classes)
            arguments: Any = (*operands, *of_kept, *numbers, *launch(x), plan)
            _C.cross_entropy_kept_gradients(*arguments)

        later = KeptWeights(frames[-len(x) :], to_gradients)
    if class_weights is not None and reduced is not None:
        counted = target != ignore_index
        count = mean_divisor(counted, reduction, lse, target_weights(class_weights, target, counted))
        reduced = reduced if count is None else reduced / count
    return losses if reduced is None else reduced, lse, lse_low, kept, later


def cross_entropy_forward(*call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fold_cross_entropy(*call)[:4]


def cross_entropy_backward(
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    lse: Tensor,
    lse_low: Tensor,
    kept: Tensor,
    reduction: str,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    first_class: int,
    classes: int,
    lse_of_ignored: bool,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
    needed: list[bool],
    unrounded: bool = False,
) -> list[Tensor]:
    lse, lse_low, kept = lse.contiguous(), lse_low.contiguous(), kept.contiguous()
    counted, class_weights = target != ignore_index, with_mean(class_weight)
    if grad_loss is not None:
        count = mean_divisor(counted, reduction, lse, target_weights(class_weights, target, counted))
        grad_loss = _unreduced(grad_loss, lse, count, reduction)
    workspace = get_workspace() if workspace is None else workspace
    options, plan = (logit_scale, softcap, ignore_index, label_smoothing, z_loss), None
    classes = weight.shape[0] if classes < 0 else classes
    if x.is_cuda:
        if grad_lse is not None:  # kept local gradients are for the loss alone
            kept = kept[:, :0]
        own_columns = _own_columns(workspace, kept)
        mode: Any = {"workspace": workspace, "deterministic": torch.are_deterministic_algorithms_enabled()}
        plan = _C.plan_cross_entropy_backward(x, weight, bias, logit_scale=logit_scale, **mode)
        if plan.tensor_cores:
            inputs = (x, weight)
            x, weight = padded(x), padded_weight(weight, plan)
            order = None
            ordered = plan.skips_rows and not lse_of_ignored
            uniform = ordered and grad_loss is not None and grad_lse is None and reduction != "none"
            if ordered:
                order = order_rows(x, target=target, mask=None, ignore_index=ignore_index)
            (x,) = _rows_that_count(counted, order, kept, weight, grad_lse is None, x)
            upstream = _upstream(grad_loss, counted, kept, uniform)
            if ordered and grad_lse is not None:
                grad_lse = torch.where(counted, grad_lse, 0)
            if uniform:
                grad_loss = _unit_upstream(lse, logit_scale)
            how: Any = (upstream, uniform, logit_scale, order, unrounded)
            head = Head(x, weight, own_columns, needed, plan.clusters, kept[:, : len(weight)], *how)
            rows: Any = (target, class_weights, grad_loss, grad_lse, lse, lse_low)

            def store(part: slice) -> None:
                operands = (head.rows, weight[part], None if bias is None else bias[part])
                local = (head.local(part), head.local_sums(part), order)
                slice_of_classes = (first_class + part.start, classes)
                arguments: Any = (*operands, *rows, *local, *options, *slice_of_classes, *launch(x), plan)
                _C.cross_entropy_local_gradient(*arguments)

            multiply_local_gradients(store, [head])
            dbias = head.sums_gradient()
            dbias = None if dbias is None else dbias / logit_scale
            computed = (head.rows_gradient(unrounded), head.d_columns, dbias)
            return rounded(computed, (*inputs, bias), needed[:3], unrounded)
    dx = gradient(x, needed[0], unrounded)
    dweight = gradient(weight, needed[1])
    dbias = bias_gradient(bias, needed[2])
    rows = (target, class_weights, grad_loss, grad_lse, lse, lse_low)
    given = (x, weight, bias, *rows, dx, dweight, dbias)
    arguments: Any = (*given, *options, first_class, classes, workspace, *launch(x), plan)
    _C.cross_entropy_backward(*arguments)
    return rounded((dx, dweight, dbias), (x, weight, bias), needed[:3], unrounded)


register(
    "linear_cross_entropy",
    inputs="Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight",
    options="str reduction, float logit_scale, float softcap, int ignore_index, "
    "float label_smoothing, float z_loss, int first_class, int classes, bool lse_of_ignored, bool keep, "
    "bool x_differentiated, int? workspace",
    outputs="loss, lse, lse_low, kept",
    differentiable="loss, lse",
    residuals="lse, lse_low, kept",
    constants="target, class_weight",
    forward=cross_entropy_forward,
    fake=cross_entropy_results,
    backward=cross_entropy_backward,
    backward_options=UNROUNDED,
)


# Linear distillation


def distillation_results(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, mask: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss; [6, tokens]: lse of P, lse of Q and their centre in two words each; kept local gradients."""
    reduction, kind, temperature, keep, x_differentiated, workspace = options
    tokens = x.shape[0]
    stats = statistics(x, 6, tokens)
    loss = stats.new_empty(tokens) if reduction == "none" else stats.new_empty(())
    keep, width = keep and kind != "reverse_kl", teacher_x.shape[1]
    kept = _traced_kept(x, weight, workspace, x_differentiated, keep, 1 / temperature, width)
    return loss, stats, kept


def fold_distillation(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    reduction: str,
    kind: str,
    temperature: float,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
    of_rank: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], None] | None]:
    """What the op returns, and of a rank's classes what makes local gradients of `kept`, from stats."""
    losses, stats = statistics(x, x.shape[0]), statistics(x, 6, x.shape[0])
    plan = scratch = first_kept = teacher_kept = kept_for = order = gathered = teacher_gathered = None
    kept, to_gradients = _empty_kept(x, 0), None
    options = (reduction == "mean", DISTILLATION_LOSSES.index(kind), temperature)
    if x.is_cuda:  # by position, as a call: names would take a microsecond
        given: Any = (x, weight, teacher_x, teacher_weight, *(None,) * 11, *options)
        plan = _C.plan_distillation_forward(*given)
        if keep and kind != "reverse_kl" and plan.keeps:
            classes = kept_classes(x, weight, workspace, x_differentiated, teacher_x.shape[1])
            kept = _empty_kept(x, classes)
        if kept.numel():
            first_kept, teacher_kept = (k[:, : len(weight)] for k in (kept, torch.empty_like(kept)))
            kept_for = losses.new_full((1,), UNIT_UPSTREAM)
            plan.keep(first_kept.shape[1])
        if plan.tensor_cores:
            x, teacher_x = padded(x), padded(teacher_x)
            weight, teacher_weight = padded_weight(weight, plan), padded_weight(teacher_weight, plan)
            scratch = statistics(x, plan.scratch)
        if plan.skips_rows and mask is not None:
            order = order_rows(x, target=None, mask=mask)
            gathered, teacher_gathered = room_to_gather(x, teacher_x)
    reduced = _reduced(losses, reduction)
    heads = (x, weight, teacher_x, teacher_weight)
    results = (losses, reduced, stats, scratch, first_kept, teacher_kept, None if of_rank else kept_for)
    active = (order, gathered, teacher_gathered)
    arguments: Any = (*heads, mask, *results, *active, *options, *launch(x), plan)
    _C.distillation_forward(*arguments)
    if of_rank and kept_for is not None:
        assert plan is not None and scratch is not None
        frames = scratch[plan.frames :]

        def to_gradients(stats: Tensor) -> None:
            of_kept = (stats, frames, first_kept, teacher_kept, kept_for, order)
            arguments: Any = (*heads, mask, *of_kept, *options[1:], *launch(x), plan)
            _C.distillation_kept_gradients(*arguments)

    return losses if reduced is None else reduced, stats, kept, to_gradients


def distillation_forward(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fold_distillation(*call)[:3]


def distillation_backward(
    grad_loss: Tensor,
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    stats: Tensor,
    kept: Tensor,
    reduction: str,
    kind: str,
    temperature: float,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
    needed: list[bool],
    unrounded: bool = False,
) -> list[Tensor]:
    stats, kept = stats.contiguous(), kept.contiguous()
    count = mean_divisor(mask, reduction, stats)
    grad_losses = _unreduced(grad_loss, stats[0], count, reduction)
    workspace, plan = get_workspace() if workspace is None else workspace, None
    inputs, options = (x, weight, teacher_x, teacher_weight), (DISTILLATION_LOSSES.index(kind), temperature)
    if x.is_cuda:
        of_teacher = needed[2] or needed[3]
        of_head = workspace // 2 if of_teacher else workspace
        if of_teacher:  # kept local gradients are for the student alone
            kept = kept[:, :0]
        own_columns = _own_columns(of_head, kept)
        mode: Any = {"workspace": of_head, "deterministic": torch.are_deterministic_algorithms_enabled()}
        plan = _C.plan_distillation_backward(*inputs, temperature=temperature, **mode)
        if plan.tensor_cores:
            x, teacher_x = padded(x), padded(teacher_x)
            weight, teacher_weight = padded_weight(weight, plan), padded_weight(teacher_weight, plan)
            whole, order = kept.shape[1] >= len(weight), None
            uniform = plan.skips_rows and reduction != "none"
            if plan.skips_rows and mask is not None:
                order = order_rows(x, target=None, mask=mask)
            x, teacher_x = _rows_that_count(mask, order, kept, weight, True, x, teacher_x)
            upstream = _upstream(grad_losses, mask, kept, uniform)
            if uniform:
                grad_losses = _unit_upstream(grad_losses, 1 / temperature)
            how: Any = (upstream, uniform, 1 / temperature, order, unrounded)
            heads = [
                Head(
                    x, weight, own_columns, [*needed[:2], False], plan.clusters, kept[:, : len(weight)], *how
                )
            ]
            if of_teacher:
                teacher = (teacher_x, teacher_weight, own_columns, [*needed[2:], False])
                heads.append(Head(*teacher, plan.clusters, None, *how))
                teacher_x = heads[1].rows
            elif order is not None and not whole:
                teacher_x = gather_rows(teacher_x, order, torch.empty_like(teacher_x))
            rows = (mask, grad_losses, stats)

            def store(part: slice) -> None:
                operands = (heads[0].rows, weight[part], teacher_x, teacher_weight[part])
                local = (heads[0].local(part), heads[1].local(part) if of_teacher else None, order)
                _C.distillation_local_gradient(*operands, *rows, *local, *options, *launch(x), plan)

            multiply_local_gradients(store, heads)
            computed = [found for h in heads for found in (h.rows_gradient(unrounded), h.d_columns)]
            computed += [None] * (len(inputs) - len(computed))  # a teacher without gradients has no head
            return rounded(computed, inputs, needed[:4], unrounded)
    gradients = [
        gradient(t, wanted, unrounded and t is not weight and t is not teacher_weight)
        for t, wanted in zip(inputs, needed, strict=False)
    ]
    dx, dweight, dteacher_x, dteacher_weight = gradients
    wanted = (dx, dweight, dteacher_x, dteacher_weight)
    _C.distillation_backward(
        *inputs, mask, grad_losses, stats, *wanted, *options, workspace, *launch(x), plan
    )
    return rounded(gradients, inputs, needed[:4], unrounded)


register(
    "linear_distillation",
    inputs="Tensor x, Tensor weight, Tensor teacher_x, Tensor teacher_weight, Tensor? mask",
    options="str reduction, str kind, float temperature, bool keep, bool x_differentiated, int? workspace",
    outputs="loss, stats, kept",
    differentiable="loss",
    residuals="stats, kept",
    constants="mask",
    forward=distillation_forward,
    fake=distillation_results,
    backward=distillation_backward,
    backward_options=UNROUNDED,
)


# logsumexp of a matrix product
#
# A narrow one (_C.Plan.narrow) has gradients that are folds too, in place of products of local gradients. Its
# forward pass keeps the mean of b's rows by each row's shares, [M, F rounded up to 8] of a's dtype. The
# gradient of a is that mean times a number a row. Other forward passes keep an empty mean.


def logsumexp_results(
    a: Tensor, b: Tensor, scale: float, a_differentiated: bool, workspace: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    lse = statistics(a, a.shape[0])
    keeps = a_differentiated and _traced_narrow(a, b, scale)
    mean = a.new_empty(len(a), -(-a.shape[1] // 8) * 8) if keeps else a.new_empty(0, 0)
    return lse, torch.empty_like(lse), mean


def _traced_narrow(a: Tensor, b: Tensor, scale: float) -> bool:
    """Will a forward pass that is asked for the mean keep it, where it is traced."""
    if not a.is_cuda or a.dtype not in (torch.bfloat16, torch.float16):
        return False
    few, many = _C.NARROW_LINES
    fewer, more = min(len(a), len(b)), max(len(a), len(b))
    fits = fewer > 0 and (more <= few or fewer >= many)
    return fits and _C.can_be_narrow(a.device.index, a.shape[1], scale)


def logsumexp_forward(
    a: Tensor, b: Tensor, scale: float, a_differentiated: bool, workspace: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    lse = statistics(a, a.shape[0])
    lse_low, plan, scratch, mean = torch.empty_like(lse), None, None, None
    if a.is_cuda:
        kept = a if a_differentiated else None
        plan = _C.plan_logsumexp_forward(a, b, None, None, kept, None, scale)
        if plan.narrow:
            a, b = padded(a), padded(b)
            mean = new(a)
        elif plan.tensor_cores:
            a, b, scratch = padded(a), padded_weight(b, plan), statistics(a, plan.scratch)
    _C.logsumexp_forward(a, b, lse, lse_low, mean, scratch, scale, *launch(a), plan)
    return lse, lse_low, a.new_empty(0, 0) if mean is None else mean


def logsumexp_backward(
    grad_lse: Tensor,
    a: Tensor,
    b: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    mean: Tensor,
    scale: float,
    a_differentiated: bool,
    workspace: int | None,
    needed: list[bool],
    unrounded: bool = False,
) -> list[Tensor]:
    lse, lse_low = lse.contiguous(), lse_low.contiguous()
    inputs, plan, scratch, kept = (a, b), None, None, mean if mean.numel() else None
    if a.is_cuda:
        workspace = get_workspace() if workspace is None else workspace
        plan = plan_logsumexp_backward(a, b, kept, needed, scale, workspace)
        if plan.tensor_cores and not plan.narrow:
            return _logsumexp_products(grad_lse, a, b, lse, lse_low, scale, workspace, needed, plan)
    if plan is not None and plan.narrow:
        a, b = padded(a), padded(b)
        kept = kept.contiguous() if needed[0] and kept is not None else None
        da, db = (new(t) if wanted else None for t, wanted in zip((a, b), needed, strict=True))
        scratch = statistics(a, plan.scratch)
    else:
        kept, da, db = None, gradient(a, needed[0], unrounded), gradient(b, needed[1])
    options = (scale, workspace or 0, *launch(a), plan)
    _C.logsumexp_backward(a, b, grad_lse, lse, lse_low, kept, da, db, scratch, *options)
    return rounded((da, db), inputs, needed, unrounded)


def plan_logsumexp_backward(
    a: Tensor,
    b: Tensor,
    mean: Tensor | None,
    needed: list[bool],
    scale: float,
    workspace: int,
    gpu: _C.DeviceFacts | None = None,
) -> _C.Plan:
    """needed: the gradients that are wanted. gpu: plans for it, wherever the tensors are."""
    da, db = (t if wanted else None for t, wanted in zip((a, b), needed, strict=True))
    deterministic = torch.are_deterministic_algorithms_enabled()
    mode: dict[str, Any] = {"deterministic": deterministic, "gpu": gpu}
    return _C.plan_logsumexp_backward(a, b, mean=mean, da=da, db=db, scale=scale, workspace=workspace, **mode)


def _logsumexp_products(
    grad_lse: Tensor,
    a: Tensor,
    b: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    scale: float,
    workspace: int,
    needed: list[bool],
    plan: _C.Plan,
) -> list[Tensor]:
    """The gradients as products of local gradients."""
    inputs = (a, b)
    a, b = padded(a), padded_weight(b, plan)
    head = Head(a, b, columns_in(workspace, len(a)), [*needed, False], plan.clusters)

    def store(part: slice) -> None:
        local = head.local(part)
        _C.logsumexp_local_gradient(a, b[part], grad_lse, lse, lse_low, local, scale, *launch(a), plan)

    multiply_local_gradients(store, [head])
    return rounded((head.rows_gradient(), head.d_columns), inputs, needed)


register(
    "logsumexp_matmul",
    inputs="Tensor a, Tensor b",
    options="float scale, bool a_differentiated, int? workspace",
    outputs="lse, lse_low, mean",
    differentiable="lse",
    residuals="lse, lse_low, mean",
    forward=logsumexp_forward,
    fake=logsumexp_results,
    backward=logsumexp_backward,
    backward_options=UNROUNDED,
)
