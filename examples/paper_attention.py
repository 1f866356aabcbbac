"""Attention as the paper writes it: the fold of (<q_i, k_j> / sqrt(F), v_j) over j.

The monoid is LogWSum.
"""

import torch
from compare import compare
from torch import Tensor

import monoidreduce as mr
from monoidreduce.monoids import LogWSum


def project_fold(q: Tensor, kv: tuple[Tensor, Tensor]) -> LogWSum.State:
    """q [m, F], k [n, F], v [n, D] -> the m partial folds over these n keys."""
    k, v = kv
    scores = q @ k.T / q.shape[1] ** 0.5
    return LogWSum.State(log_weight=scores.logsumexp(1), value=scores.softmax(1) @ v)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mr.map_reduce(
        LogWSum(), project_fold, q, (k, v), a_chunk=256, b_chunk=512
    ).value


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mr.attention(q[None, None], k[None, None], v[None, None])[0, 0]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {
        "q": torch.randn(1000, 64),
        "k": torch.randn(1500, 64),
        "v": torch.randn(1500, 64),
    }
    compare(attention, fused, inputs)
