"""Attention with heads wider than 256, in 16 bits: which calls run on tensor cores.

The registers of a resident kernel have no room for such a head. `folds/wide_attention.py` computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoidreduce import _yards
from monoidreduce._ops.attention_scores import BuiltInScores
from monoidreduce._ops.engine import _C

__all__ = ["WORKSPACE", "takes"]

WIDEST_RESIDENT, WIDEST = 256, 1024
LEAST_ROWS = 256  # queries that share a key head; a tile of a contraction kernel has as many rows
# Bytes of probabilities that are stored at a time, as many as the default of the losses. Both passes need the
# same number, and the op has no argument that would carry it to the backward pass.
WORKSPACE = 352 << 20


def takes(q: Tensor, k: Tensor, v: Tensor, scores: BuiltInScores) -> bool:
    """Whether a call on a GPU is computed by `folds/wide_attention.py`.

    Widths must be multiples of 8, and scores have no bias and no softcap.
    """
    widths = q.shape[3], v.shape[3]
    if not WIDEST_RESIDENT < max(widths) <= WIDEST:
        return False
    rows = q.shape[0] and q.shape[2] * q.shape[1] // max(k.shape[1], 1)
    fits = min(widths) > 0 and all(width % 8 == 0 for width in widths)
    if not (fits and q.element_size() == 2 and rows >= LEAST_ROWS and k.shape[2] > 0):
        return False
    if scores.bias is not None or scores.mask.is_packed or scores.scale == 0 or scores.softcap != 0.0:
        return False
    return q.is_cuda and _yards.folds().is_available() and _plan_of_gradient(q, k, v).tensor_cores


def _plan_of_gradient(q: Tensor, k: Tensor, v: Tensor) -> _C.Plan:
    """The plan for one key head of the kernel that writes P and dS."""
    rows = q.shape[2] * q.shape[1] // k.shape[1]
    queries, upstream = (q.new_empty(1, t.shape[3]).expand(rows, -1) for t in (q, v))
    return _C.plan_statistics_local_gradient(
        queries,
        k[0, 0],
        upstream,
        v[0, 0],
        workspace=WORKSPACE // 2,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
