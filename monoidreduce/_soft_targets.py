"""Soft targets of linear cross entropy: a few classes of each token, each with a probability.

The loss is a function of the log-sum-exp and of the targets' logits, which come from the op
`linear_target_logits`. So probabilities get their gradients from autograd.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.target_logits import NO_TARGET
from monoidreduce._torch_private import can_read
from monoidreduce._validate import mismatch

__all__ = ["SoftTargets"]


class SoftTargets(NamedTuple):
    """The targets of each token.

    label: [N, K] the targets, distinct in a row; NO_TARGET for none.
    probs: [N, K] their probabilities, in the accumulation dtype; 0 for none.
    outside: [N] whether the token has a target that is no class.
    """

    label: Tensor
    probs: Tensor
    outside: Tensor

    @classmethod
    def of(
        cls, target: Tensor, probs: Tensor, ignore_index: int, classes: int, class_weight: Tensor | None
    ) -> SoftTargets:
        """target [N, K] int64, with repeated targets; probs [N, K]; class_weight [classes].

        Raises IndexError on a CPU, if values can be read, for a target that is neither a class nor
        ignore_index.
        """
        used = target != ignore_index
        wrong = used & ((target < 0) | (target >= classes))
        if can_read(target) and wrong.any():
            row, at = wrong.nonzero()[0].tolist()
            expected = f"a class in [0, {classes}) or ignore_index={ignore_index}"
            raise IndexError(mismatch(f"target[{row}, {at}]", expected, int(target[row, at])))
        label = torch.where(used & ~wrong, target, NO_TARGET)
        probs = torch.where(label >= 0, probs, 0)
        if class_weight is not None and classes:
            probs = probs * class_weight.to(probs.dtype)[label.clamp(min=0)]
        return cls(*_added_up(label, probs), wrong.any(1))

    def loss(self, lse: Tensor, logits: Tensor, z_loss: float) -> Tensor:
        """The losses [N] of lse [N] and logits [N, K]; 0 without a target."""
        some = self.label >= 0
        # The difference first, so that a large constant in all logits cancels.
        loss = torch.where(some, self.probs * (lse[:, None] - logits), 0).sum(1)
        if z_loss:
            loss = loss + z_loss * lse.square()
        return torch.where(self.counted, loss, 0).masked_fill(self.outside, math.nan)

    def reduced(self, lse: Tensor, logits: Tensor, z_loss: float, reduction: str) -> Tensor:
        """The loss: [N], or its sum, or the mean of tokens that have a target."""
        losses = self.loss(lse, logits, z_loss)
        if reduction == "none":
            return losses
        total = losses.sum()
        return total if reduction == "sum" else total / self.counted.sum().clamp(min=1)

    @property
    def counted(self) -> Tensor:
        """[N], the tokens that have a target. One that is no class counts too."""
        return (self.label >= 0).any(1) | self.outside


def _added_up(label: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct targets of each row: the probabilities of equal ones have been added, in a fixed order."""
    if label.shape[1] < 2:
        return label, probs
    label, order = label.sort(1)
    probs = probs.gather(1, order)
    first = torch.cat((label.new_ones(len(label), 1, dtype=torch.bool), label[:, 1:] != label[:, :-1]), 1)
    group = first.cumsum(1) - 1  # of equal targets, in each row
    rows = torch.arange(len(label), device=label.device)[:, None].expand_as(group)
    sums = torch.zeros_like(probs).index_put((rows, group), probs, accumulate=True)
    return torch.where(first, label, NO_TARGET), torch.where(first, sums.gather(1, group), 0)
