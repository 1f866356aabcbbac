"""Losses that are functions of three statistics: focal, poly-1, smoothed, z-loss.

The statistics are one pass over the head. What is a function of the finished row is
ordinary torch.
"""

from typing import Any

import torch
from compare import compare, compare_memory
from torch import Tensor

import monoidreduce as mr

SMOOTHING, GAMMA, EPSILON, Z = 0.1, 2.0, 1.0, 1e-2


@mr.statistics
def pieces(score: Tensor, column: Tensor, label: Tensor) -> dict[str, Any]:
    target = mr.stat.total(torch.where(column == label, score, 0.0))
    return dict(
        lse=mr.stat.softmax(score).logsumexp, target=target, sum=mr.stat.total(score)
    )


def losses(lse: Tensor, target: Tensor, mean: Tensor) -> Tensor:
    """Losses from a token's log-sum-exp, its target's logit, and the mean of all."""
    nll = lse - target
    missed = 1 - (-nll).exp()
    focal = missed**GAMMA * nll
    poly = nll + EPSILON * missed
    smoothed = (1 - SMOOTHING) * nll + SMOOTHING * (lse - mean)
    return torch.stack([focal, poly, smoothed, nll + Z * lse**2])


def fused(hidden: Tensor, weight: Tensor, token: Tensor) -> Tensor:
    s = pieces(hidden, weight, label=token)
    return losses(s.lse, s.target, s.sum / len(weight))


def plain(hidden: Tensor, weight: Tensor, token: Tensor) -> Tensor:
    logits = hidden @ weight.T
    return losses(
        logits.logsumexp(1), logits.gather(1, token[:, None]).squeeze(1), logits.mean(1)
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {
        "hidden": torch.randn(256, 32) / 4,
        "weight": torch.randn(8000, 32),
        "token": torch.randint(8000, (256,)),
    }
    compare(fused, plain, inputs)
    compare_memory(fused, plain, inputs)
