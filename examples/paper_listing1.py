"""Listing 1 of the paper: attention one element at a time, forward and backward.

The loops say what every kernel of this library does in tiles. Each pair (i, j) could
run on its own. The forward pass keeps the final states a_i alone. The backward pass
computes each element h again from q_i and k_j. Nothing here is fast.
"""

from typing import Any

import torch
from compare import compare
from torch import Tensor

import monoidreduce as mr
from monoidreduce.monoids import LogWSum

MONOID = LogWSum()
T = LogWSum.State  # (z, v): a log weight, and a value


def element(q: Tensor, k: Tensor, v: Tensor) -> LogWSum.State:
    """h = (<q, k>, v)."""
    return T(q @ k, v)


def D(c: LogWSum.State, a: LogWSum.State, g: LogWSum.State) -> LogWSum.State:
    """The local gradient: that of a, one of the elements of c, from g, that of c."""
    share = (a.log_weight - c.log_weight).exp()
    return T(share * (g.log_weight + g.value @ (a.value - c.value)), share * g.value)


class Listing1(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
        A = T(Q.new_empty(len(Q)), V.new_empty(len(Q), V.shape[1]))
        for i in range(len(Q)):  # in parallel
            a = MONOID.identity(T(Q.new_empty(()), V.new_empty(V.shape[1])))
            for j in range(len(K)):
                a = MONOID.combine(a, element(Q[i], K[j], V[j]))
            A.log_weight[i], A.value[i] = a
        ctx.save_for_backward(*A, Q, K, V)
        return A.log_weight, A.value

    @staticmethod
    def backward(ctx: Any, *gA: Any) -> tuple[Tensor, ...]:
        z, v, Q, K, V = ctx.saved_tensors
        gQ, gK, gV = (torch.zeros_like(p) for p in (Q, K, V))
        for i in range(len(Q)):  # in parallel
            for j in range(len(K)):  # in parallel
                h = element(Q[i], K[j], V[j])
                gh = D(T(z[i], v[i]), h, T(gA[0][i], gA[1][i]))
                gQ[i] += gh.log_weight * K[j]  # atomically
                gK[j] += gh.log_weight * Q[i]
                gV[j] += gh.value
        return gQ, gK, gV


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The values, and the log weights as one more column."""
    log_weight, value = Listing1.apply(q, k, v)
    return torch.cat((value, log_weight[:, None]), 1)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = mr.attention(
        q[None, None], k[None, None], v[None, None], scale=1.0, return_lse=True
    )
    return torch.cat((out[0, 0], lse[0, 0, :, None]), 1)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    compare(
        attention,
        fused,
        {"q": torch.randn(20, 4), "k": torch.randn(30, 4), "v": torch.randn(30, 3)},
    )
