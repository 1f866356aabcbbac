"""What the linear losses share: the dlogits that forward saves, and the backward pass on tensor cores.

Cross entropy, log-probabilities, distillation and log-sum-exp each pass over the classes once in forward and
once in backward. On tensor cores their gradients are matrix products with dlogits (dlogits.py). They differ
in the kernel that writes the dlogits (`store` of LinearBackward), and in what it reads for each token.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from monoidreduce._ops.active_rows import new_gather_buffers
from monoidreduce._ops.dlogits import (
    FrozenHead,
    Head,
    HeadGradients,
    HeadSlice,
    UniformUpstream,
    Upstream,
    multiply_dlogits,
    unit_of,
)
from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import add_to, empty_statistics, is_aligned, padded, padded_weight
from monoidreduce._ops.planes import FrozenPlaneHead, PlaneHead, split_rows
from monoidreduce._ops.slices import Needed, all_planes_fit, columns_in, columns_to_save
from monoidreduce._validate import mismatch

__all__ = [
    "LinearBackward",
    "LinearForward",
    "LinearHead",
    "check_targets",
    "in_dtype_of",
    "mean_divisor",
    "no_dlogits",
    "prepare_forward",
    "reduced_loss",
    "saved_classes",
    "takes_uniform",
    "traced_dlogits",
    "unreduced",
]


# Reductions: "none", "sum" and "mean" of the tokens' losses


def reduced_loss(losses: Tensor, reduction: str) -> Tensor | None:
    """An empty scalar, into which a kernel writes the sum or mean; None for reduction "none"."""
    return None if reduction == "none" else losses.new_empty(())


def mean_divisor(
    counted: Tensor | None,
    reduction: str,
    like: Tensor,
    weights: Tensor | None = None,
) -> Tensor | None:
    """The divisor of a mean, if only the device knows it: the number of active tokens, or the sum of their
    weights. None for other reductions, and if all tokens are active.

    As in torch, the mean is NaN if all active tokens have weight 0, even if label smoothing adds to the loss.

    counted: [N] bool, the active tokens. like: gives the dtype. weights: [N], of each token's target.
    """
    if reduction != "mean" or counted is None:
        return None
    if weights is None:
        return counted.sum(dtype=like.dtype).clamp_(min=1)
    total = torch.where(weights.any(), weights.sum(), math.nan)
    return torch.where(counted.any(), total, 1)


def unreduced(grad: Tensor, tokens: Tensor, count: Tensor | None, reduction: str) -> Tensor:
    """The gradient of each token's loss, from the gradient of the reduced loss.

    tokens: any tensor of shape [N]. count: from mean_divisor.
    """
    if reduction == "none":
        return grad
    if reduction == "mean":
        grad = grad / (max(tokens.numel(), 1) if count is None else count)
    return grad.expand(tokens.shape)


def check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """With MONOIDREDUCE_DEBUG=1 raises IndexError for a target out of range, as the CPU engine does.

    Otherwise a GPU gives such a row the loss NaN, because to look for one the host would have to synchronize.
    """
    if target.is_cuda and os.environ.get("MONOIDREDUCE_DEBUG") == "1":
        wrong = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
        if wrong.numel():
            expected = f"class indices in [0, {classes}) or ignore_index={ignore_index}"
            raise IndexError(mismatch("target", expected, wrong[0].item()))


def in_dtype_of(x: Tensor, weight: Tensor) -> Tensor:
    """The weight as kernels multiply it.

    Under autocast an op takes a float32 weight beside a 16-bit x: its gradient is then a float32 sum that is
    never rounded.
    """
    return weight if weight.dtype == x.dtype else weight.to(x.dtype)


# The dlogits that forward saves for backward


def saved_classes(
    x: Tensor, weight: Tensor, workspace: int | None, x_differentiated: bool, heads: int = 1
) -> int:
    """The number of classes whose dlogits forward saves, if it saves any: as many as fit in the workspace.

    0 if workspace is None, as in a call that torch.compile traces: the shape of what is saved would become
    part of the graph, while the limit may change. float32 dlogits are saved of all classes, or of none.
    heads: 2 for distillation.
    """
    if workspace is None:
        return 0
    if x.dtype == torch.float32:
        return len(weight) if all_planes_fit(len(x), len(weight), workspace) else 0
    room = x.shape[1] if x_differentiated else 0
    return columns_to_save(x.shape[0], weight.shape[0], workspace, room, heads)


def no_dlogits(x: Tensor) -> Tensor:
    """[N, 0]: the op's result `saved` if nothing is saved."""
    return x.new_empty(x.shape[0], 0)


def _new_dlogits(x: Tensor, classes: int) -> Tensor:
    """[N, classes rounded up to 8], empty."""
    return x.new_empty(x.shape[0], -(-classes // 8) * 8)


def traced_dlogits(
    x: Tensor,
    weight: Tensor,
    workspace: int | None,
    x_differentiated: bool,
    keep: bool,
    scale: float,
    teacher_width: int = 0,
) -> Tensor:
    """An empty tensor of the shape that forward's saved dlogits will have, for tracing.

    keep: whether the options of the call allow it to save any. scale: d logit / d dot product. teacher_width:
    0 without a teacher.
    """
    if not keep or workspace is None or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return no_dlogits(x)
    if not _C.can_keep(x.device.index, x.shape[1], teacher_width, scale):
        return no_dlogits(x)
    return _new_dlogits(x, saved_classes(x, weight, workspace, x_differentiated, 2 if teacher_width else 1))


class LinearForward(NamedTuple):
    """The operands and the memory of a forward pass on a GPU.

    xs, weights: of the student and, for distillation, the teacher; padded and aligned as the kernels need.
    scratch: of the size that the plan says; None if the plan has none.
    saved: [N, V' rounded up to 8], for the dlogits of the first V' classes. The op returns it.
    saved_by_head: [N, V'] for each head: a view of `saved`; and for the teacher a buffer that only this pass
        uses. None if nothing is saved.
    gathered: a buffer for each head, for some gathered rows at a time. None: the rows are not gathered.
    row_planes, column_planes: xs and weights in planes (planes.split_rows); None each, if the plan's kernels
        do not read planes.
    """

    xs: Sequence[Tensor]
    weights: Sequence[Tensor]
    scratch: Tensor | None
    saved: Tensor
    saved_by_head: Sequence[Tensor] | None
    gathered: Sequence[Tensor] | None
    row_planes: Sequence[Tensor | None]
    column_planes: Sequence[Tensor | None]


def prepare_forward(
    plan: _C.Plan,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    order: Tensor | None,
    column_planes: Tensor | None = None,
) -> LinearForward:
    """Pads the operands, and allocates what the plan asks for.

    order: from order_rows; None: no token is skipped. column_planes: of the student's weight, if the caller
    has them.
    """
    x, weight, scratch, saved_by_head = xs[0], weights[0], None, None
    saved = _new_dlogits(x, plan.saved_columns)
    if saved.numel():
        whole = [saved, *(torch.empty_like(saved) for _ in xs[1:])]
        saved_by_head = [t[:, : weight.shape[0]] for t in whole]
    if plan.tensor_cores:
        xs, weights = [padded(t) for t in xs], [padded_weight(t, plan) for t in weights]
    if plan.scratch:
        scratch = empty_statistics(x, plan.scratch)
    gathered = None if order is None else new_gather_buffers(*xs)
    absent: list[Tensor | None] = [None] * len(xs)
    row_planes = of_columns = absent
    if plan.planes:
        row_planes = [split_rows(t) for t in xs]
        known = zip(weights, [column_planes, *absent[1:]], strict=True)
        of_columns = [split_rows(t) if planes is None else planes for t, planes in known]
    return LinearForward(xs, weights, scratch, saved, saved_by_head, gathered, row_planes, of_columns)


# Backward on tensor cores


def takes_uniform(plan: _C.Plan) -> bool:
    """Whether products of dlogits multiply by one factor for all rows (UniformUpstream)."""
    return plan.clusters > 0 and not plan.planes


class LinearHead(NamedTuple):
    """A head's x [N, D] and weight [V, D], and which of its gradients are needed."""

    x: Tensor
    weight: Tensor
    needed: Needed


Store: TypeAlias = Callable[[slice, Sequence[HeadSlice], "Tensor | None"], None]


@dataclass
class LinearBackward:
    """The backward pass of a linear loss on tensor cores. A loss only fills in these attributes.

    Attributes:
        plan: the plan of the pass.
        heads: the student's head and, for distillation, the teacher's. A teacher whose gradients are not
            needed is frozen.
        store: store(part, heads, grad) launches the kernel that writes the dlogits of the classes `part`, for
            each head. Their rows are in the given order. grad: the upstream gradients of the tokens' losses,
            which the kernel multiplies by.
        workspace: bytes for the dlogits of one head, saved ones included.
        saved: [N, V' rounded up to 8], what forward saved for the first V' classes; None: nothing.
        finish_saved: launches the kernel that turns `saved` into final dlogits. Without it `saved` has
            dlogits for UNIT_UPSTREAM.
        counted: [N] bool, the active tokens. None if all are active, if `store` deals with the others, or if
            `uniform` is given and `order` is enough, or rows of x are cleared.
        order: from order_rows, if the kernels skip inactive tokens.
        grad: [N], the upstream gradient of each token's loss; None if `store` has it already, and beside
            `uniform`.
        uniform: the upstream gradient of each active token in a mean or a sum of losses, times
            unit_of(slope). Only for Hopper's kernels (takes_uniform). Without an order, inactive rows of the
            first head's x are 0 (active_rows.clear_rows).
        slope: d logit / d dot product.
        unrounded: return the gradient of x in float32.
        unrounded_weight: return the gradient of the first head's weight in float32.
        sum_to: float32 [V, D], to which the gradient of the first head's weight is added. None: it is
            returned, if it is needed.
        column_planes: the first head's weight in planes, if the caller has them (planes.split_rows).
    """

    plan: _C.Plan
    heads: Sequence[LinearHead]
    store: Store
    workspace: int
    saved: Tensor | None = None
    finish_saved: Callable[[HeadSlice], None] | None = None
    counted: Tensor | None = None
    order: Tensor | None = None
    grad: Tensor | None = None
    uniform: UniformUpstream | None = None
    slope: float = 1.0
    unrounded: bool = False
    unrounded_weight: bool = False
    sum_to: Tensor | None = None
    column_planes: Tensor | None = None

    def gradients(self) -> list[HeadGradients]:
        """The gradients of each head that is not frozen. They may be padded or in float32; the caller passes
        them to memory.rounded_gradients."""
        xs = [padded(head.x) for head in self.heads]
        weights = [padded_weight(head.weight, self.plan) for head in self.heads]
        saved = no_dlogits(xs[0]) if self.saved is None else self.saved
        computes = saved.shape[1] < weights[0].shape[0]  # whether some dlogits were not saved
        if self.counted is not None and self.order is None and (computes or self.plan.planes):
            # An inactive token may hold NaN, and its dlogits, which are 0, times NaN would be NaN.
            xs = [torch.where(self.counted[:, None], x, 0) for x in xs]
        upstream, grad = self._upstream(saved), self.grad
        if self.uniform is not None and computes:
            by_row = self.uniform.by_row
            grad = by_row.new_full((1,), 1 / unit_of(self.slope)).expand(by_row.shape)

        def head(which: int) -> Head | PlaneHead | FrozenHead:
            x, weight, needed = xs[which], weights[which], self.heads[which].needed
            if which == 0 and self.sum_to is not None:
                needed = needed._replace(columns=True)
            column_sums = self._column_sums(weight) if which == 0 and needed.columns else None
            is_frozen = which > 0 and not any(needed)
            if self.plan.planes and is_frozen:
                return FrozenPlaneHead(x, weight)
            if self.plan.planes:
                assert not isinstance(upstream, UniformUpstream)
                return PlaneHead(
                    x,
                    weight,
                    needed,
                    clusters=self.plan.clusters,
                    workspace=self.workspace,
                    saved=saved[:, : weight.shape[0]] if which == 0 else None,
                    upstream=upstream,
                    column_planes=self.column_planes if which == 0 else None,
                    column_sums=column_sums,
                )
            if is_frozen:
                return FrozenHead(x, weight, self.order if computes else None)
            return Head(
                x,
                weight,
                needed,
                clusters=self.plan.clusters,
                own_columns=columns_in(self.workspace - 2 * saved.numel(), x.shape[0]),
                saved=saved[:, : weight.shape[0]] if which == 0 else None,
                upstream=upstream,
                order=self.order,
                unrounded=self.unrounded,
                column_sums=column_sums,
            )

        heads = [head(which) for which in range(len(xs))]
        xs.clear()  # frees padded copies: heads that gathered their rows do not read them again
        if self.finish_saved is not None and saved.numel():
            student, first = heads[0], slice(0, min(saved.shape[1], weights[0].shape[0]))
            first_classes = HeadSlice(student.rows, student.columns[first], saved[:, first], None)
            self.finish_saved(first_classes)
        head_gradients = multiply_dlogits(heads, lambda part, of_heads: self.store(part, of_heads, grad))
        if self.sum_to is not None:
            add_to(self.sum_to, head_gradients[0].columns)
            head_gradients[0] = head_gradients[0]._replace(columns=None)
        return [self._by_terms(gradients) for gradients in head_gradients]

    def _column_sums(self, weight: Tensor) -> Tensor | None:
        """The float32 tensor that kernels add the gradient of the first head's weight to.

        None if that gradient is rounded to 16 bits.

        weight: padded. Kernels add to `sum_to` itself if it has the same columns and is aligned.
        """
        if self.sum_to is not None and self.sum_to.shape == weight.shape and is_aligned(self.sum_to):
            return self.sum_to
        if self.sum_to is None and (not self.unrounded_weight or self.plan.planes):
            return None
        return weight.new_zeros(weight.shape, dtype=torch.float32)

    def _upstream(self, saved: Tensor) -> Upstream | UniformUpstream | None:
        """None if no dlogits were or will be stored with UNIT_UPSTREAM."""
        if self.uniform is not None:
            return self.uniform
        if self.grad is None or not saved.shape[1]:
            return None
        grad = self.grad if self.counted is None else torch.where(self.counted, self.grad, 0)
        return Upstream(grad, unit_of(self.slope))

    def _by_terms(self, gradients: HeadGradients) -> HeadGradients:
        """Divides the bias gradient by slope: a bias is added to the logits, not to the dot products."""
        if gradients.bias is None:
            return gradients
        return gradients._replace(bias=gradients.bias / self.slope)
