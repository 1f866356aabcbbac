"""Attention of heads wider than 256 on tensor cores, in 16 bits: programs fold its rows.

Such a head has no room in the registers of a resident kernel. Scores stream over the width in a contraction
instead, and the weights of some keys at a time are stored, in 16 bits, within WORKSPACE:

    lse = fold of exp(s)                          out = P v            P = exp(s - lse)
    dS  = P (dP - delta), with P, in one pass     d_q = dS k           d_k = dS^T q       d_v = P^T grad_out

where dP = grad_out v^T. dS and P are the local gradients of the mean of dP under the weights of the scores, a
program of two scores. Queries that share keys are rows of one matrix. NVRTC compiles the programs once.
Where queries see a band of the keys, `attention_wide_band` does the same by blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops import attention_wide_band
from monoidreduce._ops.attention_wide_band import Band
from monoidreduce._ops.engine import _C
from monoidreduce._ops.local_gradients import UNIT_UPSTREAM

__all__ = ["Band", "backward", "forward", "plans", "takes"]

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
    gpu: _C.DeviceFacts | None = None,
) -> bool:
    """Is this the way of a call on a GPU: widths are multiples of 8, scores have no bias and no softcap.

    options: scale, softcap, left, right. gpu: the one that is planned for, wherever the tensors are.
    """
    widths = q.shape[3], v.shape[3]
    fits = all(width % 8 == 0 and 0 < width <= WIDEST for width in widths) and max(widths) > WIDEST_RESIDENT
    rows = q.shape[0] and q.shape[2] * q.shape[1] // max(k.shape[1], 1)
    if not (fits and q.element_size() == 2 and rows >= LEAST_ROWS and k.shape[2] > 0):
        return False
    scale, softcap, left, right = options
    if bias is not None or packed or scale == 0 or softcap != 0.0:
        return False
    if not Band(q.shape[2], k.shape[2], left, right).is_whole and not _torch_may_multiply():
        return False
    if gpu is None and not q.is_cuda:
        return False
    from monoidreduce.program import kernels

    return (gpu is not None or kernels.is_available()) and plans(q, k, v, gpu)[1].tensor_cores


def _torch_may_multiply() -> bool:
    """In the deterministic mode torch refuses products unless cuBLAS is told so."""
    told = os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
    return told or not torch.are_deterministic_algorithms_enabled()


def plans(q: Tensor, k: Tensor, v: Tensor, gpu: _C.DeviceFacts | None = None) -> tuple[_C.Plan, _C.Plan]:
    """Of the fold and of the backward pass of a head."""
    keys, values, rows = k[0, 0], v[0, 0], q.shape[2] * q.shape[1] // k.shape[1]
    of_queries, upstream = (q.new_empty((1, t.shape[3])).expand(rows, -1) for t in (q, v))
    mode: Any = {"deterministic": torch.are_deterministic_algorithms_enabled(), "gpu": gpu}
    fold = _C.plan_statistics_fold(of_queries, keys, None, None, state_words=2, gpu=gpu)
    operands = (of_queries, keys, upstream, values)
    return fold, _C.plan_statistics_local_gradient(*operands, workspace=WORKSPACE // 2, **mode)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: tuple[float, float, int, int],
    results: tuple[Tensor, ...],
) -> None:
    """Write out, lse, lse_low and, unless it is empty, out_low. options: as of `takes`."""
    from monoidreduce.program.cuda import rows_product
    from monoidreduce.program.passes import fold

    scale, _, left, right = options
    if not Band(q.shape[2], k.shape[2], left, right).is_whole:
        with torch.autocast("cuda", enabled=False):
            attention_wide_band.forward(q, k, v, scale, left, right, WORKSPACE, results)
        return
    out, lse, lse_low, out_low = (list(_heads(t, k.shape[1])) if t.numel() else None for t in results)
    assert out is not None and lse is not None and lse_low is not None
    program, factor = _programs()[0], UNIT_UPSTREAM / scale
    for n, (rows, keys, values) in enumerate(_operands(q, k, v)):
        found, low, _ = fold(program, (rows, keys, None, None), (None,) * 4, scale)
        lse[n].copy_(found[0].view_as(lse[n])), lse_low[n].copy_(low[0].view_as(lse[n]))
        known = torch.cat((found, low, torch.full_like(found, factor)))
        weighted = rows_product(program, rows, keys, known, scale, WORKSPACE, values).view_as(out[n])
        torch.mul(weighted, 1 / UNIT_UPSTREAM, out=out[n])
        if out_low is not None:
            torch.sub(weighted * (1 / UNIT_UPSTREAM), out[n], out=out_low[n])


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    residuals: tuple[Tensor, Tensor, Tensor],
    options: tuple[float, float, int, int],
    needed: list[bool],
) -> list[Tensor | None]:
    """The gradients by q, k and v that are needed.

    residuals: out in full, lse, lse_low. options: as of `takes`.
    """
    from monoidreduce.program import cuda

    out, lse, lse_low = residuals
    scale, _, left, right = options
    centre = (grad_out * out.to(lse.dtype)).sum(-1)
    if not Band(q.shape[2], k.shape[2], left, right).is_whole:
        of_queries = (lse, lse_low, centre, grad_lse)
        with torch.autocast("cuda", enabled=False):
            return attention_wide_band.backward(
                grad_out, q, k, v, of_queries, scale, left, right, WORKSPACE, needed
            )
    program, shared = _programs()[1], k.shape[1]
    of_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    found = [t.new_empty(t.shape) if wanted else None for t, wanted in zip((q, k, v), needed, strict=False)]
    lines = zip(*(_heads(t, shared) for t in (grad_out, lse, lse_low, centre, of_lse)), strict=True)
    to = [None if t is None else list(_heads(t, shared)) for t in found]
    for n, ((rows, keys, values), (upstream, *of_rows)) in enumerate(
        zip(_operands(q, k, v), lines, strict=True)
    ):
        high, low, mean, of_score = (t.reshape(-1) for t in of_rows)
        # The second score and the mean are scaled too.
        known = torch.stack((high, scale * mean, low, of_score, torch.full_like(high, 1 / scale)))
        operands = (rows, keys, upstream.reshape(len(rows), -1), values)
        counts = (0,) * 4
        wanted = [needed[0], needed[1], False, needed[2]]
        d_rows, d_keys, _, d_values = cuda.backward(
            program, operands, (known, None, None, None), counts, scale, WORKSPACE, wanted
        )
        for gradients, gradient in zip(to, (d_rows, d_keys, d_values), strict=True):
            if gradients is not None and gradient is not None:
                gradients[n].copy_(gradient.view_as(gradients[n]))
    return found


def _heads(t: Tensor, shared: int | None = None) -> Iterator[Tensor]:
    """t [B, H, rows, ...] by heads: [rows, ...]; or [H / shared, rows, ...] of those that share keys."""
    of_head = t if shared is None else t.view(t.shape[0], shared, -1, *t.shape[2:])
    return (of_head[b, h] for b in range(of_head.shape[0]) for h in range(of_head.shape[1]))


def _operands(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each head of keys the rows [queries of all heads that share it, F], its keys and its values."""
    rows = (t.reshape(-1, t.shape[-1]) for t in _heads(q, k.shape[1]))
    return zip(rows, _heads(k), _heads(v), strict=True)


@cache
def _programs() -> tuple[str, str]:
    """Of the forward and of the backward pass."""
    from monoidreduce import stat
    from monoidreduce.program.tracing import trace

    def weights(score: Any) -> dict[str, Any]:
        return {"lse": stat.softmax(score).logsumexp}

    def mean(score: Any, other: Any) -> dict[str, Any]:
        weights = stat.softmax(score)
        return {"lse": weights.logsumexp, "mean": weights.mean(other)}

    return trace(weights, {}, {}).text, trace(mean, {}, {}).text
