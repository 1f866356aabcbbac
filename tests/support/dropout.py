"""Attention with dropout by plain torch, with the weights and their factors stored."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from monoidreduce.folds.program import streams


def factors(
    p: float, seed: int, batch: int, heads: int, rows: int, columns: int, device: Any = "cpu"
) -> Tensor:
    """[batch, heads, rows, columns]: 0 or 1 / (1 - p), in float64, with p rounded to a multiple of 2^-16."""
    leading, row, column = (torch.arange(n, device=device) for n in (batch * heads, rows, columns))
    stream = streams.stream(torch.tensor(seed, device=device), leading)
    number = streams.uniform_16(stream[:, None, None], row[:, None], column)
    of_2_16 = min(round(p * 2**16), 2**16 - 1)
    factor = (number >= of_2_16).double() / (1 - of_2_16 / 2**16)
    return factor.view(batch, heads, rows, columns)


def dropped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float,
    seed: int,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    return_lse: bool = False,
) -> Any:
    """`mr.attention`, in the dtype of its arguments but for 16 bits, whose scores are in float32."""
    dtype = torch.float32 if q.dtype.itemsize == 2 else q.dtype
    (batch, heads, rows, width), columns = q.shape, k.shape[2]
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    score = (q @ k.mT).to(dtype) * (width**-0.5 if scale is None else scale)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    axes = (torch.arange(n, device=q.device) for n in score.shape)
    b, h, i, j = (t.view([-1 if m == n else 1 for m in range(4)]) for n, t in enumerate(axes))
    if score_mod is not None:
        score = score_mod(score, b, h, i, j)
    kept = torch.ones_like(score, dtype=torch.bool)
    if bias is not None and bias.dtype == torch.bool:
        kept = kept & bias
    elif bias is not None:
        score = score + bias
    mask_mod = mask_mod if block_mask is None else block_mask.mask_mod
    if mask_mod is not None:
        kept = kept & mask_mod(b, h, i, j)
    left, right = window or (None, 0 if causal else None)
    left, right = (columns if side is None else side for side in (left, right))
    aligned = i + columns - rows
    kept = kept & (j >= aligned - left) & (j <= aligned + right)
    score = score.masked_fill(~kept, -math.inf)
    lse = score.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None].to(dtype))
    weight = torch.exp(score - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    factor = factors(dropout_p, seed, batch, heads, rows, columns, q.device)
    out = (weight * factor.to(dtype)).to(v.dtype) @ v
    return (out, lse) if return_lse else out
