"""Attention of heads wider than 256 on tensor cores, in 16 bits: which calls are, and their plans.

Such a head has no room in the registers of a resident kernel. `folds/wide_attention.py` computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoidreduce import _yards
from monoidreduce._ops.engine import _C

__all__ = ["WORKSPACE", "plans", "takes"]

WIDEST_RESIDENT, WIDEST = 256, 1024
LEAST_ROWS = 256  # of a head: a tile of the contraction, which fewer queries would not fill
# Bytes of weights that are stored at a time: the losses' default. Both passes of a call need the same number,
# and attention's op has no argument that would carry it to the backward pass.
WORKSPACE = 352 << 20


def takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    options: tuple[float, float, int, int],
    packed: bool,
) -> bool:
    """True if a call on a GPU takes this way: widths are multiples of 8, scores have no bias and no softcap.

    options: scale, softcap, left, right.
    """
    widths = q.shape[3], v.shape[3]
    if not WIDEST_RESIDENT < max(widths) <= WIDEST:
        return False
    rows = q.shape[0] and q.shape[2] * q.shape[1] // max(k.shape[1], 1)
    fits = min(widths) > 0 and all(width % 8 == 0 for width in widths)
    if not (fits and q.element_size() == 2 and rows >= LEAST_ROWS and k.shape[2] > 0):
        return False
    scale, softcap, *_ = options
    if bias is not None or packed or scale == 0 or softcap != 0.0:
        return False
    return q.is_cuda and _yards.folds().is_available() and plans(q, k, v)[1].tensor_cores


def plans(q: Tensor, k: Tensor, v: Tensor) -> tuple[_C.Plan, _C.Plan]:
    """The plans of a head's fold and of its backward pass."""
    keys, values, rows = k[0, 0], v[0, 0], q.shape[2] * q.shape[1] // k.shape[1]
    of_queries, upstream = (q.new_empty(1, t.shape[3]).expand(rows, -1) for t in (q, v))
    fold = _C.plan_statistics_fold(of_queries, keys, None, None, state_words=2)
    gradient = _C.plan_statistics_local_gradient(
        of_queries,
        keys,
        upstream,
        values,
        workspace=WORKSPACE // 2,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return fold, gradient
