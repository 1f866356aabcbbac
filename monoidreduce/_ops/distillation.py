"""The forward and the backward op of linear distillation.

The loss is an expectation under a distribution Q, for example E_Q[log Q - log P]. Q is the teacher's and P
the student's; for reverse_kl it is the other way round.
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
    new_gradient,
    padded,
    rounded_gradients,
    weight_sums,
)
from monoidreduce._ops.registry import UNROUNDED, UNROUNDED_WEIGHT, Fold, choices, register
from monoidreduce._ops.slices import Needed
from monoidreduce.workspace import get_workspace

__all__ = [
    "DISTILLATION_LOSSES",
    "DistillationOpOptions",
    "distillation_backward",
    "distillation_forward",
    "fold_distillation",
]

DISTILLATION_LOSSES = choices("distillation_forward", "kind")


class DistillationOpOptions(NamedTuple):
    """The options of the op.

    kind: one of DISTILLATION_LOSSES.
    keep: forward may save dlogits for backward.
    x_differentiated: the gradient of x will be needed.
    workspace: bytes; None while torch.compile traces, when the limit at run time is not known.
    """

    reduction: str
    kind: str
    temperature: float
    keep: bool
    x_differentiated: bool
    workspace: int | None

    @property
    def loss_options(self) -> tuple[int, float]:
        """The options that every kernel of the loss takes: the index of the kind, and the temperature."""
        return DISTILLATION_LOSSES.index(self.kind), self.temperature

    @property
    def may_save(self) -> bool:
        """Whether forward may save dlogits. Not for reverse_kl: each of its dlogits needs both final
        log-sum-exps."""
        return self.keep and self.kind != "reverse_kl"


def distillation_results(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    options: DistillationOpOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors like the results of the forward op, for tracing: loss, stats, saved dlogits.

    stats: [6, tokens], a high and a low word each of the lse of P, the lse of Q, and the lse of P less the
        loss.
    """
    tokens = x.shape[0]
    stats = empty_statistics(x, 6, tokens)
    loss = stats.new_empty(tokens) if options.reduction == "none" else stats.new_empty(())
    saved = traced_dlogits(
        x,
        weight,
        options.workspace,
        options.x_differentiated,
        options.may_save,
        1 / options.temperature,
        teacher_x.shape[1],
    )
    return loss, stats, saved


# The arguments mask to other_column_planes of plan_distillation_forward, which do not change a plan.
_NO_RESULTS = (None,) * 14


def fold_distillation(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    options: DistillationOpOptions,
    of_rank: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], None] | None]:
    """The three results of the forward op; and with of_rank a function that turns saved weights
    into dlogits in place, given the stats over all ranks' classes.

    of_rank: the classes are those of one rank, so forward saves softmax weights instead of dlogits.
    """
    weight = in_dtype_of(x, weight)
    losses, stats = empty_statistics(x, x.shape[0]), empty_statistics(x, 6, x.shape[0])
    plan = scratch = classes_saved = teacher_saved = None
    row_planes = column_planes = other_row_planes = other_column_planes = None
    order = gathered = teacher_gathered = None
    to_gradients: Callable[[Tensor], None] | None = None
    saved, saved_columns = no_dlogits(x), 0
    mean, loss_options = options.reduction == "mean", options.loss_options
    unit = 0.0 if of_rank else UNIT_UPSTREAM
    if x.is_cuda:
        if options.may_save:
            saved_columns = saved_classes(x, weight, options.workspace, options.x_differentiated, heads=2)
        plan = _C.plan_distillation_forward(
            x,
            weight,
            teacher_x,
            teacher_weight,
            *_NO_RESULTS,
            mean,
            unit,
            *loss_options,
            saved_columns,
            planes=allows_planes(),
        )
        if plan.skips_rows and mask is not None:
            order = order_rows(x, mask=mask)
        prepared = prepare_forward(plan, (x, teacher_x), (weight, teacher_weight), order)
        (x, teacher_x), (weight, teacher_weight), scratch, saved, saved_by_head, gathered_rows, *planes = (
            prepared
        )
        (row_planes, other_row_planes), (column_planes, other_column_planes) = planes
        if saved_by_head is not None:
            classes_saved, teacher_saved = saved_by_head
        if gathered_rows is not None:
            gathered, teacher_gathered = gathered_rows
    reduced = reduced_loss(losses, options.reduction)
    _C.distillation_forward(
        x,
        weight,
        teacher_x,
        teacher_weight,
        mask,
        losses,
        reduced,
        stats,
        scratch,
        classes_saved,
        teacher_saved,
        order,
        gathered,
        teacher_gathered,
        row_planes,
        column_planes,
        other_row_planes,
        other_column_planes,
        mean,
        unit,
        *loss_options,
        saved_columns,
        *launch_on(x),
        plan,
    )
    if of_rank and plan is not None and scratch is not None and classes_saved is not None:
        assert teacher_saved is not None
        row_max, student_weights, teacher_weights = scratch[plan.frames :], classes_saved, teacher_saved

        def make_gradients(stats: Tensor) -> None:
            _C.distillation_kept_gradients(
                x,
                weight,
                teacher_x,
                teacher_weight,
                mask,
                stats,
                row_max,
                student_weights,
                teacher_weights,
                order,
                UNIT_UPSTREAM,
                *options.loss_options,
                *launch_on(x),
                plan,
            )

        to_gradients = make_gradients
    return losses if reduced is None else reduced, stats, saved, to_gradients


def distillation_forward(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    options: DistillationOpOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    return fold_distillation(x, weight, teacher_x, teacher_weight, mask, options)[:3]


def distillation_backward(
    grad_loss: Tensor,
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    stats: Tensor,
    saved: Tensor,
    options: DistillationOpOptions,
    needed: list[bool],
    unrounded: bool = False,
    unrounded_weight: bool = False,
    sum_to: Tensor | None = None,
) -> list[Tensor]:
    inputs, weight = (x, weight, teacher_x, teacher_weight), in_dtype_of(x, weight)
    unrounded_weight = unrounded_weight or inputs[1] is not weight  # a master is float32
    stats, saved = stats.contiguous(), saved.contiguous()
    workspace, plan = get_workspace() if options.workspace is None else options.workspace, None

    def grad_of_losses() -> Tensor:
        """The upstream gradient of each token's loss."""
        count = mean_divisor(mask, options.reduction, stats)
        return unreduced(grad_loss, stats[0], count, options.reduction)

    if x.is_cuda:
        teacher_needed = needed[2] or needed[3]
        head_workspace = workspace // 2 if teacher_needed else workspace
        plan = _C.plan_distillation_backward(
            x,
            weight,
            teacher_x,
            teacher_weight,
            temperature=options.temperature,
            workspace=head_workspace,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            planes=allows_planes(),
        )
        if plan.tensor_cores:
            order = uniform = None
            is_uniform = takes_uniform(plan) and options.reduction != "none"
            slope = 1 / options.temperature
            of_loss = grad_loss, unit_of(slope), options.reduction == "mean"
            if is_uniform and mask is not None and plan.skips_rows:
                order, factors = order_rows_and_factors(x, *of_loss, mask=mask)
                uniform = UniformUpstream(factors, factors[:1])
            elif is_uniform and mask is not None:
                x, factors = clear_rows_and_factors(padded(x), *of_loss, mask=mask)
                uniform = UniformUpstream(factors[:-1], factors[-1:])
            elif plan.skips_rows and mask is not None:
                order = order_rows(x, mask=mask)
            elif is_uniform:
                factors = unit_of(slope) * grad_of_losses()
                uniform = UniformUpstream(factors, factors[:1])

            def store(part: slice, heads: Sequence[HeadSlice], grad: Tensor | None) -> None:
                student, teacher = heads
                assert student.dlogits is not None and grad is not None
                _C.distillation_local_gradient(
                    student.rows,
                    student.columns,
                    teacher.rows,
                    teacher.columns,
                    mask,
                    grad,
                    stats,
                    student.dlogits,
                    teacher.dlogits,
                    order,
                    student.row_planes,
                    student.column_planes,
                    teacher.row_planes,
                    teacher.column_planes,
                    *options.loss_options,
                    *launch_on(x),
                    plan,
                )

            heads = [
                LinearHead(x, weight, Needed(*needed[:2])),
                LinearHead(teacher_x, teacher_weight, Needed(*needed[2:4])),
            ]
            head_gradients = LinearBackward(
                plan,
                heads,
                store,
                head_workspace,
                saved=None if teacher_needed else saved,  # there are saved dlogits of the student alone
                counted=mask,
                order=order,
                grad=grad_of_losses() if uniform is None else None,
                uniform=uniform,
                slope=slope,
                unrounded=unrounded,
                unrounded_weight=unrounded_weight,
                sum_to=sum_to,
            ).gradients()
            gradients = [t for head in head_gradients for t in (head.rows, head.columns)]
            gradients += [None] * (len(inputs) - len(gradients))  # for a frozen teacher
            return rounded_gradients(gradients, inputs, needed[:4], unrounded, unrounded_weight)
    dx, dteacher_x = (
        new_gradient(t, wanted, unrounded) for t, wanted in ((x, needed[0]), (teacher_x, needed[2]))
    )
    dweight = weight_sums(weight, needed[1], sum_to, unrounded_weight)
    dteacher_weight = new_gradient(teacher_weight, needed[3])
    _C.distillation_backward(
        x,
        weight,
        teacher_x,
        teacher_weight,
        mask,
        grad_of_losses(),
        stats,
        dx,
        dweight,
        dteacher_x,
        dteacher_weight,
        *options.loss_options,
        workspace,
        *launch_on(x),
        plan,
    )
    add_to(sum_to, dweight)
    return rounded_gradients(
        (dx, dweight, dteacher_x, dteacher_weight), inputs, needed[:4], unrounded, unrounded_weight
    )


register(
    "linear_distillation",
    inputs="Tensor x, Tensor weight, Tensor teacher_x, Tensor teacher_weight, Tensor? mask",
    options=DistillationOpOptions,
    outputs="loss, stats, kept",
    differentiable="loss",
    residuals="stats, kept",
    constants="mask",
    forward=distillation_forward,
    fake=distillation_results,
    backward=distillation_backward,
    fold=Fold(a="x", b="weight", other_a="teacher_x", other_b="teacher_weight"),
    backward_options=f"{UNROUNDED}, {UNROUNDED_WEIGHT}",
)
