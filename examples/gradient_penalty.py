"""A gradient penalty: how fast attention's output moves with its queries.

Training by it differentiates a gradient. The scores are not stored. On a CPU, torch's
scaled_dot_product_attention has no such derivative.
"""

import torch
from compare import compare
from torch import Tensor

import monoidreduce as mr


def penalty(out: Tensor, q: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    return slope.square().sum().sqrt()


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return penalty(mr.attention(q, k, v, causal=True), q)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT / q.shape[3] ** 0.5).masked_fill(hidden, -torch.inf)
    return penalty(scores.softmax(3) @ v, q)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    compare(fused, plain, {name: torch.randn(1, 2, 64, 16) for name in "qkv"})
