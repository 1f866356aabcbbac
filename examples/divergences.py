"""Divergences of a policy from a reference, in one pass over two heads.

They are KL both ways, chi-squared and Renyi's. What is decorated is a function of one
pair of logits. Its gradient is derived, and no matrix of tokens by classes is stored.
"""

from typing import Any

import torch
from compare import compare, compare_memory
from torch import Tensor

import monoidreduce as mr


@mr.statistics
def pieces(score: Tensor, other: Tensor) -> dict[str, Any]:
    p, q = mr.stat.softmax(score), mr.stat.softmax(other)
    # p^2 / q, up to what is the same for all classes.
    squared = mr.stat.softmax(2 * score - other)
    return dict(
        p_lse=p.logsumexp,
        q_lse=q.logsumexp,
        p_gap=p.mean(score - other),
        q_gap=q.mean(other - score),
        squared_lse=squared.logsumexp,
    )


def divergences(
    hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor
) -> Tensor:
    s = pieces(hidden, weight, ref_hidden, ref_weight)
    between = s.q_lse - s.p_lse
    renyi = s.squared_lse - s.p_lse + between  # log sum p^2 / q
    return torch.stack([s.p_gap + between, s.q_gap - between, renyi.expm1(), renyi])


def plain(
    hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor
) -> Tensor:
    log_p = (hidden @ weight.T).log_softmax(1)
    log_q = (ref_hidden @ ref_weight.T).log_softmax(1)
    p, q = log_p.exp(), log_q.exp()
    ratio = (p * p / q).sum(1)
    return torch.stack(
        [
            (p * (log_p - log_q)).sum(1),
            (q * (log_q - log_p)).sum(1),
            ratio - 1,
            ratio.log(),
        ]
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {
        "hidden": torch.randn(256, 16) / 8,
        "weight": torch.randn(3000, 16),
        "ref_hidden": torch.randn(256, 24) / 10,
        "ref_weight": torch.randn(3000, 24),
    }
    compare(divergences, plain, inputs)
    compare_memory(divergences, plain, inputs)
