"""Noisy-or: the probability that at least one of many causes acts."""

from typing import Any

import torch
from compare import compare, compare_memory
from torch import Tensor
from torch.nn.functional import softplus

import monoidreduce as mr


@mr.statistics
def causes(score: Tensor, bias: Tensor) -> dict[str, Any]:
    # log prod (1 - sigmoid)
    return dict(log_none=mr.stat.total(-softplus(score + bias)))


def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[N] log-probabilities that any of the causes [V, D] acts in x [N, D]."""
    return torch.log(-torch.expm1(causes(x, weight, column={"bias": bias}).log_none))


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.log(1 - (1 - torch.sigmoid(x @ weight.T + bias)).prod(1))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {
        "x": torch.randn(300, 16) / 4,
        "weight": torch.randn(900, 16),
        "bias": torch.randn(900) - 7,
    }
    compare(fused, plain, inputs)
    compare_memory(fused, plain, inputs)
