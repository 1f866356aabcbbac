"""The forward and the backward op of linear cross entropy.

A log-sum-exp is the sum of two floats: `lse`, the rounded value, and `lse_low`, the rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.active_rows import clear_rows_and_factors, order_rows, order_rows_and_factors
from monoidreduce._ops.dlogits import UNIT_UPSTREAM, HeadSlice, UniformUpstream, unit_of
from monoidreduce._ops.engine import _C
from monoidreduce._ops.linear_loss import (
    LinearBackward,
    LinearHead,
    check_targets,
    in_dtype_of,
    mean_divisor,
    no_dlogits,
    prepare_forward,
    reduced_loss,
    saved_classes,
    takes_uniform,
    traced_dlogits,
    unreduced,
)
from monoidreduce._ops.memory import (
    add_to,
    allows_planes,
    empty_statistics,
    launch_on,
    new_bias_gradient,
    new_gradient,
    padded,
    rounded_gradients,
    weight_sums,
)
from monoidreduce._ops.registry import UNROUNDED, UNROUNDED_WEIGHT, Fold, register
from monoidreduce._ops.slices import Needed
from monoidreduce.workspace import get_workspace

__all__ = [
    "CrossEntropyNumbers",
    "CrossEntropyOpOptions",
    "SavedWeights",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "dlogits_can_be_saved",
    "fold_cross_entropy",
    "rank_may_save",
    "target_weights",
    "with_mean",
]


class CrossEntropyNumbers(NamedTuple):
    """The options that a user chooses. They are the first ones of the op (CrossEntropyOpOptions)."""

    reduction: str
    logit_scale: float
    softcap: float
    ignore_index: int
    label_smoothing: float
    z_loss: float


class CrossEntropyOpOptions(NamedTuple):
    """The options of the op.

    first_class: the index of this rank's first class among the classes of all ranks; 0 without ranks.
    classes: the number of classes of all ranks; -1 without ranks. A rank's result `loss` is [2, tokens]: the
        loss over its own classes, and the sum of the weights with which these count in it.
    lse_of_ignored: ignored tokens get a log-sum-exp too.
    keep: forward may save dlogits for backward.
    x_differentiated: the gradient of x will be needed.
    workspace: bytes; None while torch.compile traces, when the limit at run time is not known.
    """

    reduction: str
    logit_scale: float
    softcap: float
    ignore_index: int
    label_smoothing: float
    z_loss: float
    first_class: int
    classes: int
    lse_of_ignored: bool
    keep: bool
    x_differentiated: bool
    workspace: int | None

    @property
    def loss_options(self) -> tuple[float, float, int, float, float]:
        """The options that every kernel of the loss takes: logit_scale to z_loss."""
        return self[1:6]


def dlogits_can_be_saved(
    bias: Tensor | None, class_weight: Tensor | None, softcap: float, label_smoothing: float
) -> bool:
    """Whether forward may save dlogits: not with a bias, a softcap, or weighted label smoothing."""
    return bias is None and softcap == 0 and (class_weight is None or label_smoothing == 0)


def rank_may_save(class_weight: Tensor | None, label_smoothing: float) -> bool:
    """Whether the forward pass of a rank may save softmax weights of its classes: not with class weights or
    label smoothing, because `states.cross_entropy` prepares only the target's term (SavedWeights.miss).
    """
    return class_weight is None and label_smoothing == 0


class SavedWeights(NamedTuple):
    """Unnormalised softmax weights that a rank's forward pass saved in place of dlogits.

    Dlogits need the log-sum-exp over the classes of all ranks, which is known only after the exchange.

    miss: [tokens], written by the caller: the softmax probability of the target among all classes, less 1.
    to_gradients: to_gradients(lse, lse_low, z_loss) turns the weights into dlogits in place, given the
        log-sum-exps of all classes.
    """

    miss: Tensor
    to_gradients: Callable[[Tensor, Tensor, float], None]


def with_mean(class_weight: Tensor | None, label_smoothing: float) -> Tensor | None:
    """The class weights as kernels read them: [1 + V rounded up to 256], the mean weight first, zeros last.

    float32, or float64 if the weights are. Without label smoothing the mean is written as 0, because
    gradients contain label_smoothing * mean, and 0 times the mean is NaN if the weight of any class is not
    finite.
    """
    if class_weight is None:
        return None
    weights = class_weight.to(torch.promote_types(class_weight.dtype, torch.float32))
    mean = weights.mean(0, keepdim=True) if label_smoothing else weights.new_zeros(1)
    return torch.cat((mean, weights, weights.new_zeros(-len(weights) % 256)))


def target_weights(class_weights: Tensor | None, target: Tensor, counted: Tensor) -> Tensor | None:
    """[N]: the weight of each token's target; 0 for ignored tokens. class_weights: from with_mean.

    An invalid target gets some class's weight. That occurs only on a GPU, where its loss is NaN anyway.
    """
    if class_weights is None:
        return None
    return torch.where(counted, class_weights[target.clamp(-1, len(class_weights) - 2) + 1], 0)


def cross_entropy_results(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    options: CrossEntropyOpOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors like the results of the forward op, for tracing: loss, lse, lse_low, saved dlogits."""
    lse = empty_statistics(x, x.shape[0])
    loss = torch.empty_like(lse) if options.reduction == "none" else lse.new_empty(())
    if options.classes >= 0:
        loss = lse.new_empty(2, x.shape[0])
    keep = options.keep and dlogits_can_be_saved(bias, class_weight, options.softcap, options.label_smoothing)
    saved = traced_dlogits(x, weight, options.workspace, options.x_differentiated, keep, options.logit_scale)
    return loss, lse, torch.empty_like(lse), saved


# The arguments loss to column_planes of plan_cross_entropy_forward: results and scratch, which do not change
# a plan.
_NO_RESULTS = (None,) * 11


def fold_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    options: CrossEntropyOpOptions,
    of_rank: bool = False,
    column_planes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, SavedWeights | None]:
    """The four results of the forward op; and with of_rank the saved weights, if any were saved.

    of_rank: the classes are those of one rank, so forward saves softmax weights instead of dlogits.
    column_planes: the weight in planes, if the caller has them (planes.split_rows).
    """
    weight = in_dtype_of(x, weight)
    check_targets(target, weight.shape[0] if options.classes < 0 else options.classes, options.ignore_index)
    loss_weights = None
    if options.classes < 0:
        losses = found = empty_statistics(x, x.shape[0])
    else:
        found = empty_statistics(x, 2, x.shape[0])
        losses, loss_weights = found.unbind()
    lse, lse_low = torch.empty_like(losses), torch.empty_like(losses)
    plan = scratch = classes_saved = order = gathered = weights = None
    row_planes = None
    saved, class_weights = no_dlogits(x), with_mean(class_weight, options.label_smoothing)
    mean = options.reduction == "mean" and class_weight is None
    unit = 0.0 if of_rank else UNIT_UPSTREAM
    numbers, saved_columns = options[1:8], 0  # logit_scale to classes
    if x.is_cuda:
        if options.keep and dlogits_can_be_saved(
            bias, class_weight, options.softcap, options.label_smoothing
        ):
            saved_columns = saved_classes(x, weight, options.workspace, options.x_differentiated)
        plan = _C.plan_cross_entropy_forward(
            x,
            weight,
            bias,
            target,
            class_weights,
            *_NO_RESULTS,
            mean,
            unit,
            *numbers,
            saved_columns,
            planes=allows_planes(),
        )
        if plan.skips_rows and not options.lse_of_ignored:
            order = order_rows(x, target=target, ignore_index=options.ignore_index)
        prepared = prepare_forward(plan, (x,), (weight,), order, column_planes)
        (x,), (weight,), scratch, saved, saved_by_head, gathered_rows, *planes = prepared
        (row_planes,), (column_planes,) = planes
        if saved_by_head is not None:
            (classes_saved,) = saved_by_head
        if gathered_rows is not None:
            (gathered,) = gathered_rows
    reduced = reduced_loss(losses, options.reduction)
    _C.cross_entropy_forward(
        x,
        weight,
        bias,
        target,
        class_weights,
        losses,
        loss_weights,
        reduced,
        lse,
        lse_low,
        scratch,
        classes_saved,
        order,
        gathered,
        row_planes,
        column_planes,
        mean,
        unit,
        *numbers,
        saved_columns,
        *launch_on(x),
        plan,
    )
    if of_rank and plan is not None and scratch is not None and classes_saved is not None:
        row_max, saved_weights = scratch[plan.frames :], classes_saved

        def to_gradients(lse: Tensor, lse_low: Tensor, z_loss: float) -> None:
            _C.cross_entropy_kept_gradients(
                x,
                weight,
                bias,
                target,
                class_weights,
                lse,
                lse_low,
                row_max,
                saved_weights,
                order,
                UNIT_UPSTREAM,
                *options._replace(z_loss=z_loss).loss_options,
                options.first_class,
                options.classes,
                *launch_on(x),
                plan,
            )

        weights = SavedWeights(row_max[-len(x) :], to_gradients)
    if class_weights is not None and reduced is not None:
        counted = target != options.ignore_index
        count = mean_divisor(counted, options.reduction, lse, target_weights(class_weights, target, counted))
        reduced = reduced if count is None else reduced / count
    return found if reduced is None else reduced, lse, lse_low, saved, weights


def cross_entropy_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    options: CrossEntropyOpOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fold_cross_entropy(x, weight, bias, target, class_weight, options)[:4]


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
    saved: Tensor,
    options: CrossEntropyOpOptions,
    needed: list[bool],
    unrounded: bool = False,
    unrounded_weight: bool = False,
    sum_to: Tensor | None = None,
    column_planes: Tensor | None = None,
) -> list[Tensor]:
    inputs, weight = (x, weight, bias), in_dtype_of(x, weight)
    unrounded_weight = unrounded_weight or inputs[1] is not weight  # a master is float32
    lse, lse_low, saved = lse.contiguous(), lse_low.contiguous(), saved.contiguous()
    class_weights = with_mean(class_weight, options.label_smoothing)
    workspace = get_workspace() if options.workspace is None else options.workspace
    classes, plan = weight.shape[0] if options.classes < 0 else options.classes, None
    if x.is_cuda:
        plan = _C.plan_cross_entropy_backward(
            x,
            weight,
            bias,
            logit_scale=options.logit_scale,
            workspace=workspace,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            planes=allows_planes(),
        )
    skips = plan is not None and plan.skips_rows and not options.lse_of_ignored
    loss_alone = grad_lse is None
    order = uniform = counted = None
    is_uniform = plan is not None and takes_uniform(plan) and not options.lse_of_ignored
    is_uniform = is_uniform and loss_alone and grad_loss is not None and options.reduction != "none"
    unit, ignore_index = unit_of(options.logit_scale), options.ignore_index
    if is_uniform and grad_loss is not None and class_weights is None:
        of_loss = grad_loss, unit, options.reduction == "mean"
        if skips:
            order, factors = order_rows_and_factors(x, *of_loss, target=target, ignore_index=ignore_index)
            uniform = UniformUpstream(factors, factors[:1])
        else:
            x, factors = clear_rows_and_factors(padded(x), *of_loss, target=target, ignore_index=ignore_index)
            uniform = UniformUpstream(factors[:-1], factors[-1:])
        grad_loss = None
    else:
        order = order_rows(x, target=target, ignore_index=ignore_index) if skips else None
        counted = target != ignore_index
        if grad_loss is not None:
            weights = target_weights(class_weights, target, counted)
            count = mean_divisor(counted, options.reduction, lse, weights)
            grad_loss = unreduced(grad_loss, lse, count, options.reduction)
            if is_uniform:
                factors = unit * grad_loss
                uniform, grad_loss = UniformUpstream(factors, factors[:1]), None
                if not skips:
                    x, factors = torch.where(counted[:, None], x, 0), torch.where(counted, factors, 0)
                    uniform = UniformUpstream(factors, torch.where(counted.any(), uniform.of_sums, 0))
    if plan is not None and plan.tensor_cores:
        if grad_lse is not None and not options.lse_of_ignored:
            assert counted is not None
            grad_lse, lse, lse_low = (torch.where(counted, t, 0) for t in (grad_lse, lse, lse_low))

        def store(part: slice, heads: Sequence[HeadSlice], grad_loss: Tensor | None) -> None:
            (head,) = heads
            assert head.dlogits is not None
            _C.cross_entropy_local_gradient(
                head.rows,
                head.columns,
                None if bias is None else bias[part],
                target,
                class_weights,
                grad_loss,
                grad_lse,
                lse,
                lse_low,
                head.dlogits,
                head.bias_sums,
                order,
                head.row_planes,
                head.column_planes,
                *options.loss_options,
                options.first_class + part.start,
                classes,
                *launch_on(x),
                plan,
            )

        (head_gradients,) = LinearBackward(
            plan,
            [LinearHead(x, weight, Needed(*needed[:3]))],
            store,
            workspace,
            saved=saved if loss_alone else None,  # they have no part of grad_lse
            # With lse_of_ignored, an ignored token has no loss, but a log-sum-exp.
            counted=counted if loss_alone or not options.lse_of_ignored else None,
            order=order,
            grad=grad_loss,
            uniform=uniform,
            slope=options.logit_scale,
            unrounded=unrounded,
            unrounded_weight=unrounded_weight,
            sum_to=sum_to,
            column_planes=column_planes,
        ).gradients()
        return rounded_gradients(head_gradients, inputs, needed[:3], unrounded, unrounded_weight)
    dx = new_gradient(x, needed[0], unrounded)
    dweight = weight_sums(weight, needed[1], sum_to, unrounded_weight)
    dbias = new_bias_gradient(bias, needed[2])
    _C.cross_entropy_backward(
        x,
        weight,
        bias,
        target,
        class_weights,
        grad_loss,
        grad_lse,
        lse,
        lse_low,
        dx,
        dweight,
        dbias,
        *options.loss_options,
        options.first_class,
        classes,
        workspace,
        *launch_on(x),
        plan,
    )
    add_to(sum_to, dweight)
    return rounded_gradients((dx, dweight, dbias), inputs, needed[:3], unrounded, unrounded_weight)


register(
    "linear_cross_entropy",
    inputs="Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight",
    options=CrossEntropyOpOptions,
    outputs="loss, lse, lse_low, kept",
    differentiable="loss, lse",
    residuals="lse, lse_low, kept",
    constants="target, class_weight",
    forward=cross_entropy_forward,
    fake=cross_entropy_results,
    backward=cross_entropy_backward,
    fold=Fold(a="x", b="weight"),
    of_shard=lambda given: {
        "keep": given["keep"] and rank_may_save(given["class_weight"], given["label_smoothing"])
    },
    backward_options=f"{UNROUNDED}, {UNROUNDED_WEIGHT}",
)
