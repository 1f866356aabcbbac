"""Attention with a bilinear form: scores a1_i^T X a2_j, where X is the parameter.

The gradient g = A1^T p A2 of the I/O paper is that of X. It needs no operator of its
own: with the queries A1 X, autograd multiplies their gradient dQ by A1. The words that
are printed compare this, "flash rows", with adding up g in the cache. In a transformer
X = W_Q W_K^T is as wide as the model and fits no cache.
"""

import torch
from compare import compare
from torch import Tensor

import monoidreduce as mr
from monoidreduce.io import ALGORITHMS


def bilinear_attention(a1: Tensor, x: Tensor, a2: Tensor, h: Tensor) -> Tensor:
    """a1 [M, d], x [d, d], a2 [N, d], h [N, D] -> softmax(a1 x a2^T) h [M, D]."""
    q, k, v = a1 @ x, a2, h
    return mr.attention(q[None, None], k[None, None], v[None, None], scale=1.0)[0, 0]


def plain(a1: Tensor, x: Tensor, a2: Tensor, h: Tensor) -> Tensor:
    return (a1 @ x @ a2.T).softmax(1) @ h


def print_cost(n: int, d: int, words: int) -> None:
    """The words that each backward algorithm moves through a cache of `words`."""
    print(f"\nbackward pass for n = {n}, d = {d} in a cache of {words} words")
    for name in ("Algorithm 9, fit", "flash rows", "FlashAttention-2 backward"):
        algorithm = ALGORITHMS[name]
        moved = algorithm.words(n, d, words) / 1e6
        print(f"{name:<27} {algorithm.computes:<10} {moved:8.1f} million words")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {"a1": torch.randn(1000, 64), "x": torch.randn(64, 64) / 64}
    inputs |= {"a2": torch.randn(1500, 64), "h": torch.randn(1500, 32)}
    compare(bilinear_attention, plain, inputs)
    print_cost(n=8192, d=128, words=58112)  # the shared memory of an H100, of float32
