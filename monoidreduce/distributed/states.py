"""Combining the results of several ranks, in float64 and in rank order.

A log-sum-exp travels as two words, high and low. A rank's loss is relative to its own log-sum-exp: a large
constant added to all scores of a row cancels there. csrc/include/monoidreduce/ops/ranks.h reads these results
as states of the operator's monoid.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.cross_entropy import target_weights, with_mean
from monoidreduce._ops.distillation import DISTILLATION_LOSSES
from monoidreduce._ops.engine import _C
from monoidreduce._ops.linear_loss import mean_divisor
from monoidreduce._ops.memory import launch_on

__all__ = ["Loss", "cross_entropy", "distillation", "log_probs", "log_sum_exp", "two_words"]


def two_words(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split float64 into a high word in dtype and the rounding error as low word; the low word is 0 if the
    error is not finite."""
    high = x.to(dtype)
    return high, (x - high).nan_to_num(0.0, 0.0, 0.0).to(dtype)


def _rows(states: Tensor, count: int) -> list[Tensor]:
    """`count` uninitialised tensors [rows], for states [ranks, fields, rows]."""
    rows = states.shape[2]
    return [states.new_empty(rows) for _ in range(count)]


def log_sum_exp(states: Tensor) -> tuple[Tensor, Tensor]:
    """Combine log-sum-exps in two words: [ranks, 2, rows] -> two words [rows]."""
    lse, lse_low = _rows(states, 2)
    _C.combine_logsumexp(states, lse, lse_low, *launch_on(states))
    return lse, lse_low


class Loss(NamedTuple):
    """A combined loss.

    loss: [rows], or a scalar if reduced. lse, lse_low: log-sum-exps [rows] in two words.
    """

    loss: Tensor
    lse: Tensor
    lse_low: Tensor


def cross_entropy(
    states: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    z_loss: float,
    miss: Tensor | None = None,
) -> Loss:
    """The cross entropy from the states [ranks, 4, rows] of all ranks.

    The fields of a rank's state are sum_c weight_c (lse - score_c) over its classes, with its own lse; the
    sum of these weights; and that lse in two words.

    class_weight: [V], of all ranks; the divisor of a mean. miss: [rows], written for `SavedWeights` if given.
    """
    loss, lse, lse_low = _rows(states, 3)
    reduced = None if reduction == "none" else states.new_empty(())
    mean = reduction == "mean" and class_weight is None
    _C.combine_cross_entropy(
        states, target, loss, reduced, lse, lse_low, miss, z_loss, ignore_index, mean, *launch_on(states)
    )
    if class_weight is not None and reduction == "mean":
        counted = target != ignore_index
        weights = target_weights(with_mean(class_weight, 0.0), target, counted)
        count = mean_divisor(counted, reduction, lse, weights)
        assert reduced is not None and count is not None
        reduced /= count
    return Loss(loss if reduced is None else reduced, lse, lse_low)


def log_probs(states: Tensor, target: Tensor, ignore_index: int) -> list[Tensor]:
    """log_probs, entropy, lse and lse_low, [rows] each, from the states [ranks, 4, rows] of all ranks.

    A rank's log-probability is +inf where the target is not among its classes.
    """
    log_probs, entropy, lse, lse_low = _rows(states, 4)
    _C.combine_log_probs(states, target, log_probs, entropy, lse, lse_low, ignore_index, *launch_on(states))
    return [log_probs, entropy, lse, lse_low]


def distillation(
    states: Tensor, kind: str, mask: Tensor | None = None, reduction: str = "none"
) -> tuple[Tensor, Tensor]:
    """The loss, [rows] or reduced, and the statistics [6, rows] that the op's backward takes.

    states: [ranks, 5, rows], each rank's loss, and its log-sum-exps of P and of Q in two words each. The loss
    is an expectation under Q, relative to P.
    """
    (loss,) = _rows(states, 1)
    stats = states.new_empty(6, states.shape[2])
    reduced = None if reduction == "none" else states.new_empty(())
    kind_number, mean = DISTILLATION_LOSSES.index(kind), reduction == "mean"
    _C.combine_distillation(states, mask, loss, reduced, stats, kind_number, mean, *launch_on(states))
    return loss if reduced is None else reduced, stats
