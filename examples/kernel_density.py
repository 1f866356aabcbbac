"""Kernel density estimation: log-densities of points under a mixture of Gaussians."""

import math
from typing import Any

import torch
from compare import compare, compare_memory
from torch import Tensor

import monoidreduce as mr

WIDTH = 0.7


@mr.statistics
def mixture(score: Tensor, half: Tensor) -> dict[str, Any]:
    return dict(lse=mr.stat.softmax(score - half).logsumexp)


def fused(x: Tensor, sample: Tensor) -> Tensor:
    """[N] log-densities at x [N, D], of samples [M, D]."""
    # Distances from it are shorter, so that their squares lose fewer digits.
    origin = sample.mean(0)
    x, sample = x - origin, sample - origin
    half = 0.5 * sample.square().sum(1) / WIDTH**2
    lse = mixture(x, sample, column={"half": half}, scale=WIDTH**-2).lse
    constant = x.shape[1] * math.log(WIDTH * math.sqrt(2 * math.pi))
    return lse - 0.5 * x.square().sum(1) / WIDTH**2 - math.log(len(sample)) - constant


def plain(x: Tensor, sample: Tensor) -> Tensor:
    kernels = torch.distributions.Normal(sample, WIDTH).log_prob(x[:, None]).sum(2)
    return kernels.logsumexp(1) - math.log(len(sample))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {"x": torch.randn(400, 5), "sample": torch.randn(700, 5)}
    compare(fused, plain, inputs)
    compare_memory(fused, plain, inputs)
