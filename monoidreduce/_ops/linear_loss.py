"""What the linear losses share: dlogits that a forward pass saves, and the backward pass on tensor cores.

Cross entropy, log-probabilities, distillation and log-sum-exp are one pass over the classes each way. On
tensor cores their gradients are products with dlogits (dlogits.py). Only the kernel that writes dlogits
differs, and what it reads of a token.
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
    UNIT_UPSTREAM,
    FrozenHead,
    Head,
    HeadGradients,
    HeadSlice,
    Upstream,
    multiply_dlogits,
)
from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import empty_statistics, padded, padded_weight
from monoidreduce._ops.slices import Needed, columns_in, columns_to_save
from monoidreduce._validate import mismatch

__all__ = [
    "LinearBackward",
    "LinearForward",
    "LinearHead",
    "check_targets",
    "mean_divisor",
    "no_dlogits",
    "prepare_forward",
    "reduced_loss",
    "saved_classes",
    "traced_dlogits",
    "unreduced",
]


# The reduction of losses of tokens


def reduced_loss(losses: Tensor, reduction: str) -> Tensor | None:
    """Where a kernel writes the reduced loss; None if the losses of tokens are wanted."""
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


def unreduced(grad: Tensor, tokens: Tensor, count: Tensor | None, reduction: str) -> Tensor:
    """The gradients by the losses of tokens, from that by the reduced loss. count: None if all count."""
    if reduction == "none":
        return grad
    if reduction == "mean":
        grad = grad / (max(tokens.numel(), 1) if count is None else count)
    return grad.expand(tokens.shape)


def check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """With MONOIDREDUCE_DEBUG=1 raises IndexError for a target out of range, as the CPU engine does.

    On a GPU such a target makes its row NaN: looking for one waits for the device.
    """
    if target.is_cuda and os.environ.get("MONOIDREDUCE_DEBUG") == "1":
        wrong = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
        if wrong.numel():
            expected = f"class indices in [0, {classes}) or ignore_index={ignore_index}"
            raise IndexError(mismatch("target", expected, wrong[0].item()))


# Forward: dlogits that are saved for the backward pass


def saved_classes(
    x: Tensor, weight: Tensor, workspace: int | None, x_differentiated: bool, heads: int = 1
) -> int:
    """The number of classes whose dlogits a forward pass saves, if it saves any: what fits in the workspace.

    A traced call saves none unless it is given a workspace: the shape is part of the graph, the limit is not.
    """
    if workspace is None:
        return 0
    room = x.shape[1] if x_differentiated else 0
    return columns_to_save(x.shape[0], weight.shape[0], workspace, room, heads)


def no_dlogits(x: Tensor) -> Tensor:
    """What a forward pass returns that saves none."""
    return x.new_empty(x.shape[0], 0)


def _new_dlogits(x: Tensor, classes: int) -> Tensor:
    """[tokens, classes rounded up to 8]."""
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
    """As large as what a forward pass that may `keep` dlogits will save, where it is traced."""
    if not keep or workspace is None or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return no_dlogits(x)
    if not _C.can_keep(x.device.index, x.shape[1], teacher_width, scale):
        return no_dlogits(x)
    return _new_dlogits(x, saved_classes(x, weight, workspace, x_differentiated, 2 if teacher_width else 1))


class LinearForward(NamedTuple):
    """What a forward pass by kernels takes beside the tokens.

    xs, weights: of the student and, for distillation, the teacher, as the kernels read them.
    scratch: as large as the plan says; None: it has none.
    saved: [N, V' rounded up to 8], to be filled with dlogits of the first V' classes; what the op returns.
    saved_by_head: [N, V'] of each head: `saved`, and memory of the same size for the pass alone. None:
        nothing is saved.
    gathered: for each head memory for some of its rows in the order of tokens. None: they are folded as they
        lie.
    """

    xs: Sequence[Tensor]
    weights: Sequence[Tensor]
    scratch: Tensor | None
    saved: Tensor
    saved_by_head: Sequence[Tensor] | None
    gathered: Sequence[Tensor] | None


def prepare_forward(
    plan: _C.Plan,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    order: Tensor | None,
    saves: bool,
    x_differentiated: bool,
    workspace: int | None,
) -> LinearForward:
    """Pads operands where kernels need it, and allocates by the plan.

    order: of tokens, those that count first (order_rows); None: all are folded. saves: dlogits, if the
    kernels can.
    """
    x, weight, scratch, saved_by_head = xs[0], weights[0], None, None
    classes = 0
    if saves and plan.keeps:
        classes = saved_classes(x, weight, workspace, x_differentiated, len(xs))
    saved = _new_dlogits(x, classes)
    if saved.numel():
        whole = [saved, *(torch.empty_like(saved) for _ in xs[1:])]
        saved_by_head = [t[:, : len(weight)] for t in whole]
        plan.keep(saved_by_head[0].shape[1])
    if plan.tensor_cores:
        xs, weights = [padded(t) for t in xs], [padded_weight(t, plan) for t in weights]
        scratch = empty_statistics(x, plan.scratch)
    gathered = None if order is None else new_gather_buffers(*xs)
    return LinearForward(xs, weights, scratch, saved, saved_by_head, gathered)


# Backward on tensor cores


class LinearHead(NamedTuple):
    """x [N, D] and weight [V, D] of a head, and which of its gradients are needed."""

    x: Tensor
    weight: Tensor
    needed: Needed


Store: TypeAlias = Callable[[slice, Sequence[HeadSlice], "Tensor | None"], None]


@dataclass
class LinearBackward:
    """The backward pass of a linear loss on tensor cores: what a loss has to say of itself.

    Attributes:
        plan: of the pass.
        heads: the student's and, for distillation, the teacher's, which has no gradients if none is needed.
        store: store(part, heads, grad) writes the dlogits of a slice of the classes for each head. They have
            the order of tokens, and are for the upstream gradients `grad` of the tokens' losses.
        workspace: bytes for the dlogits of one head, saved ones among them.
        saved: [N, V' rounded up to 8], dlogits of the first V' classes from the forward pass; None: it saved
            none.
        finish_saved: makes dlogits of what was saved; without it they are for UNIT_UPSTREAM.
        counted: [N], the tokens that count. None if all do, or if the kernels need no help with the others.
        order: those first (order_rows), where kernels leave the others out.
        grad: [N], the upstream gradient of each token's loss; None if `store` knows it.
        uniform: grad is one number for all tokens that count, as a reduction makes it. Kernels for Hopper
            alone.
        slope: d logit / d dot product.
        unrounded: the gradient of x stays in float32.
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
    uniform: bool = False
    slope: float = 1.0
    unrounded: bool = False

    def gradients(self) -> list[HeadGradients]:
        """By the operands as kernels read them: perhaps padded, or in float32 (memory.rounded_gradients)."""
        xs = [padded(head.x) for head in self.heads]
        weights = [padded_weight(head.weight, self.plan) for head in self.heads]
        saved = no_dlogits(xs[0]) if self.saved is None else self.saved
        computes = saved.shape[1] < len(weights[0])  # dlogits that were not saved
        if self.counted is not None and self.order is None and computes:
            # A token that does not count may hold anything, and 0 times NaN is NaN.
            xs = [torch.where(self.counted[:, None], x, 0) for x in xs]
        upstream, grad = self._upstream(saved), self.grad
        if self.uniform and grad is not None:
            grad = grad.new_full((1,), UNIT_UPSTREAM / self.slope).expand(grad.shape)

        def head(which: int) -> Head | FrozenHead:
            x, weight, needed = xs[which], weights[which], self.heads[which].needed
            if which > 0 and not any(needed):
                return FrozenHead(x, weight, self.order if computes else None)
            return Head(
                x,
                weight,
                needed,
                clusters=self.plan.clusters,
                own_columns=columns_in(self.workspace - 2 * saved.numel(), len(x)),
                saved=saved[:, : len(weight)] if which == 0 else None,
                upstream=upstream,
                order=self.order,
                unrounded=self.unrounded,
            )

        heads = [head(which) for which in range(len(xs))]
        xs.clear()  # copies of which heads have gathered rows are not read again
        if self.finish_saved is not None and saved.numel():
            student, first = heads[0], slice(0, min(saved.shape[1], len(weights[0])))
            first_classes = HeadSlice(student.rows, student.columns[first], saved[:, first], None)
            self.finish_saved(first_classes)
        found = multiply_dlogits(heads, lambda part, of_heads: self.store(part, of_heads, grad))
        return [self._by_terms(gradients) for gradients in found]

    def _upstream(self, saved: Tensor) -> Upstream | None:
        """None if no dlogits are for UNIT_UPSTREAM."""
        if self.grad is None or not (self.uniform or saved.shape[1]):
            return None
        grad = self.grad if self.counted is None else torch.where(self.counted, self.grad, 0)
        return Upstream(grad, self.slope, self.uniform)

    def _by_terms(self, gradients: HeadGradients) -> HeadGradients:
        """A bias is a term of the logits, not of the dot products."""
        if gradients.bias is None:
            return gradients
        return gradients._replace(bias=gradients.bias / self.slope)
