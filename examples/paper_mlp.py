"""A two-layer MLP: y_i sums activation(<x_i, p_j>) q_j over hidden units j.

In the paper's letters P = w1 and Q = w2.T, so that unit j is row j of both. The monoid
is Sum.
"""

import torch
import torch.nn.functional as F
from compare import compare
from torch import Tensor

import monoidreduce as mr
from monoidreduce.monoids import Sum


def project_fold(x: Tensor, units: tuple[Tensor, Tensor]) -> Sum.State:
    """x [n, M], p [k, M], q [k, N] -> the n partial sums over these k hidden units."""
    p, q = units
    return Sum.State(F.gelu(x @ p.T, approximate="tanh") @ q)


def mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return mr.map_reduce(
        Sum(), project_fold, x, (w1, w2.T), a_chunk=256, b_chunk=512
    ).value


def fused(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return mr.mlp(x, w1, w2, activation="gelu_tanh")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {
        "x": torch.randn(1000, 64),
        "w1": torch.randn(2000, 64) / 8,
        "w2": torch.randn(64, 2000) / 45,
    }
    compare(mlp, fused, inputs)
