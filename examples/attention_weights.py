"""Attention with sigmoid, squared relu or normalized powers in place of a softmax.

Each is compared with the dense matrix of scores.
"""

import math
from collections.abc import Callable

import torch
from compare import compare, compare_memory
from torch import Tensor

import monoidreduce as mr

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 256, 16


def sigmoid(score: Tensor) -> Tensor:
    """Ramapuram et al., Theory [...] for Sigmoid Self-Attention (2024)."""
    return torch.sigmoid(score - math.log(LENGTH))


def squared_relu(score: Tensor) -> Tensor:
    return torch.relu(score) ** 2


def power(score: Tensor) -> Tensor:
    return score**4


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Callable[[Tensor], Tensor],
    normalized: bool,
) -> Tensor:
    weights = weight(q @ k.mT * WIDTH**-0.5)
    return (weights / weights.sum(-1, keepdim=True) if normalized else weights) @ v


def show(
    weight: Callable[[Tensor], Tensor], normalized: bool, inputs: dict[str, Tensor]
) -> None:
    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mr.attend(q, k, v, weight=weight, normalized=normalized)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(q, k, v, weight, normalized)

    print(weight.__name__ + (", normalized" if normalized else ""))
    compare(fused, plain, inputs)
    compare_memory(fused, plain, inputs)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {name: torch.randn(BATCH, HEADS, LENGTH, WIDTH) for name in "qkv"}
    show(sigmoid, False, inputs)
    show(squared_relu, False, inputs)
    show(power, True, inputs)
