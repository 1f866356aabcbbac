"""What the operators' states of several ranks combine to, in float64 and in the order of ranks.

A log-sum-exp has two words. A loss is measured from the log-sum-exps that it was computed with: a constant
added to all scores of a row may be large, and cancels there.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cross_entropy", "distillation", "entropy", "log_sum_exp", "raised", "two_words"]


def two_words(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Float64 as a rounded number, and what rounding lost: 0 where that is no number."""
    high = x.to(dtype)
    return high, (x - high).nan_to_num(0.0, 0.0, 0.0).to(dtype)


def log_sum_exp(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exps in two words, [ranks, rows] each -> in float64, of each rank and of all [rows]."""
    of_ranks = torch.where(high.isfinite(), high.double() + low.double(), high.double())
    return of_ranks, of_ranks.logsumexp(0)


def raised(of_ranks: Tensor, lse: Tensor) -> Tensor:
    """By how much the log-sum-exp is above that of each rank; 0 where both are the same infinity."""
    return torch.where(lse == of_ranks, 0.0, lse - of_ranks)


def cross_entropy(losses: Tensor, weights: Tensor, above: Tensor) -> Tensor:
    """The loss, [rows] in float64.

    Args:
        losses: [ranks, rows], the sum of weight_c (lse - score_c) over a rank's classes, for its own lse.
        weights: [ranks, rows], the sum of its weights, so that another lse is soon accounted for.
        above: `raised`.
    """
    # Scores of -inf below any other, or any below +inf: these classes are infinitely unlikely.
    far = torch.where(weights > 0, torch.inf, 0.0).double()
    return torch.where(above == torch.inf, far, losses + weights * above).sum(0)


def entropy(entropies: Tensor, of_ranks: Tensor, above: Tensor) -> Tensor:
    """The entropy [rows] in float64, of those [ranks, rows] of the softmax over each rank's classes.

    of_ranks: their log-sum-exps. above: `raised`.
    """
    share = (-above).exp().masked_fill(of_ranks == -torch.inf, 0.0)
    return torch.where(share == 0, 0.0, share * (entropies + above)).sum(0)


def distillation(losses: Tensor, stats: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The loss [rows] in float64, and the statistics [6, rows] as the op has them.

    losses: [ranks, rows]; stats: [ranks, 6, rows]. Each is an expectation under Q, relative to P.
    """
    p_of_ranks, p = log_sum_exp(stats[:, 0], stats[:, 1])
    q_of_ranks, q = log_sum_exp(stats[:, 2], stats[:, 3])
    share = (q_of_ranks - q).exp().masked_fill(q_of_ranks == -torch.inf, 0.0)
    below_p = raised(p_of_ranks, p)
    of_ranks = torch.where(below_p == torch.inf, torch.inf, losses + below_p)
    if kind != "cross_entropy":
        of_ranks = of_ranks - raised(q_of_ranks, q)
    loss = torch.where(share == 0, 0.0, share * of_ranks).sum(0)
    words = [word for x in (p, q, p - loss) for word in two_words(x, stats.dtype)]
    return loss, torch.stack(words)
