"""Attention with heads wider than 256 on tensor cores, in 16 bits, by the contraction kernels of
`statistics`.

Such a head does not fit in the registers of the resident attention kernels. Instead a contraction streams
over the width to compute scores, and the probabilities of some keys at a time are stored in 16 bits, within
`attention_wide.WORKSPACE`:

    lse = fold of exp(s)                          out = P v            P = exp(s - lse)
    dS  = P (dP - delta), with P, in one pass     d_q = dS k           d_k = dS^T q       d_v = P^T grad_out

where dP = grad_out v^T. dS and P are the local gradients of a program of two scores: the mean of dP under the
softmax of the scores. Queries that share keys (GQA) are rows of one matrix. NVRTC compiles the programs once.

With a causal mask or a window all pairs are still multiplied; P and dS are exactly 0 for excluded pairs. But
0 * NaN is NaN, so the products then read copies of v, k, q and grad_out with 0 in place of non-finite
numbers, and `Band.add_others` adds these numbers to the rows that see them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from monoidreduce._ops import attention_wide
from monoidreduce._ops.attention_mask import Mask
from monoidreduce._ops.attention_passes import Results
from monoidreduce._ops.dlogits import UNIT_UPSTREAM
from monoidreduce._ops.sinks import join_sinks, sink_gradient
from monoidreduce.folds import stat
from monoidreduce.folds.cuda import cuda_passes
from monoidreduce.folds.number_passes import fold
from monoidreduce.folds.operands import Counts, ProgramCall
from monoidreduce.folds.program.tracing import trace

__all__ = ["Band", "backward", "forward"]


@dataclass(frozen=True)
class Band:
    """The window of columns that each row sees: `left` and `right` of its aligned column; -1 is unbounded.

    The last row is aligned with the last column.
    """

    rows: int
    columns: int
    left: int
    right: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, mask: Mask) -> Band | None:
        """The band of keys that queries see; None if every query sees all keys."""
        rows, columns, left, right = q.shape[2], k.shape[2], mask.left, mask.right
        is_whole = not 0 <= left < columns - 1 and not 0 <= right < rows - 1
        return None if is_whole else cls(rows, columns, left, right)

    @property
    def transposed(self) -> Band:
        """The same band with rows and columns exchanged: the rows that see each column."""
        return Band(self.columns, self.rows, self.right, self.left)

    def bounds(self, device: torch.device) -> Tensor:
        """[2, rows]: first column and last column + 1 that each row sees."""
        bounds = Mask(self.left, self.right).bounds(self.rows, self.columns, device)
        assert bounds is not None
        return bounds.clamp_(0, self.columns)

    def sees(self, marked: Tensor, heads: int) -> Tensor:
        """[B, heads, rows]: whether a row sees a column that is marked in [B, H, columns].

        Query heads that share keys count as one head.
        """
        together = marked.view(len(marked), heads, -1, self.columns).any(2)
        before = F.pad(together.cumsum(-1), (1, 0))
        first, stop = self.bounds(marked.device)
        return before.index_select(-1, stop) > before.index_select(-1, first)

    def add_others(self, to: Tensor, lines: Tensor, heads: int, signed: bool = True) -> None:
        """Add the non-finite numbers of `lines`, which the product took as 0, to the rows that see them.

        The sum over all lines of a head is added, which is exact if only one of them has non-finite numbers.

        to: the product, [B, H, rows, width]. lines: [B, H, columns, width]. heads: number of key heads.
        signed: the local gradients are non-negative and keep the sign of an infinity; otherwise an infinity
            becomes NaN.
        """
        least, most = torch.aminmax(lines, dim=-1)
        sees = self.sees(~(least.isfinite() & most.isfinite()), heads)
        least, most = (t.masked_fill(t.isfinite(), 0.0) for t in torch.aminmax(lines, dim=-2))
        others = (least + most).view(len(lines), heads, -1, lines.shape[3]).sum(2)
        others = others if signed else others * 0.0
        for of_head, seen, other in zip(_heads(to, heads), _heads(sees), _heads(others), strict=True):
            of_head += torch.where(seen[:, None], other, 0.0)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    mask: Mask,
    results: Results,
) -> None:
    """Write out, lse, lse_low and, unless it is empty, out_low.

    sinks: [H] in the accumulation dtype. mask: not of packed sequences.
    """
    band = Band.of(q, k, mask)
    index, counts = _integers(band, q, k)
    out, lse, lse_low, out_low = (list(_heads(t, k.shape[1])) if t.numel() else None for t in results)
    assert out is not None and lse is not None and lse_low is not None
    program, factor = _programs(band is not None)[0], UNIT_UPSTREAM / scale
    for n, (rows, keys, values) in enumerate(_operands(q, k, v)):
        call = ProgramCall(program, ((rows, keys),), (None, None, index, None), scale)
        found, low, _ = fold(call)
        lse[n].copy_(found[0].view_as(lse[n])), lse_low[n].copy_(low[0].view_as(lse[n]))
        if sinks is not None:
            join_sinks(lse[n], lse_low[n], sinks.view(k.shape[1], -1)[n % k.shape[1]])
            found, low = lse[n].view_as(found), lse_low[n].view_as(low)
            found = found.masked_fill(found == torch.inf, torch.nan)  # with a sink of +inf the output is NaN
        known = (torch.cat((found, low, torch.full_like(found, factor))), None, index, None)
        payload = values if band is None else _finite(values)
        call = call._replace(data=known, workspace=attention_wide.WORKSPACE)
        weighted = cuda_passes.rows_product(call, counts, payload)
        weighted = weighted.view_as(out[n])
        torch.mul(weighted, 1 / UNIT_UPSTREAM, out=out[n])
        if out_low is not None:
            torch.sub(weighted * (1 / UNIT_UPSTREAM), out[n], out=out_low[n])
    if band is not None:
        band.add_others(results[0], v, k.shape[1])


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    saved: tuple[Tensor, Tensor, Tensor],
    scale: float,
    mask: Mask,
    needed: list[bool],
) -> list[Tensor | None]:
    """The needed gradients of q, k, v, bias (always None here) and sinks.

    saved: out (both words summed), lse, lse_low. sinks, mask: as in `forward`.
    """
    out, lse, lse_low = saved
    band = Band.of(q, k, mask)
    index, counts = _integers(band, q, k)
    program, shared = _programs(band is not None)[1], k.shape[1]
    centre = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    of_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    d_sinks = None
    if sinks is not None and needed[4]:
        d_sinks = sink_gradient(sinks, lse, lse_low, of_lse - centre)
    found = [t.new_empty(t.shape) if wanted else None for t, wanted in zip((q, k, v), needed, strict=False)]
    lines = zip(*(_heads(t, shared) for t in (grad_out, lse, lse_low, centre, of_lse)), strict=True)
    to = [None if t is None else list(_heads(t, shared)) for t in found]
    for n, ((rows, keys, values), (upstream, *of_rows)) in enumerate(
        zip(_operands(q, k, v), lines, strict=True)
    ):
        high, low, mean, of_score = (t.reshape(-1) for t in of_rows)
        # The fold scales the second score too, so its mean (delta) must be scaled as well.
        known = torch.stack((high, scale * mean, low, of_score, torch.full_like(high, 1 / scale)))
        upstream = upstream.reshape(len(rows), -1)
        wanted = [needed[0], needed[1], False, needed[2]]
        factors = None if band is None else (_finite(rows), _finite(keys), _finite(upstream), values)
        call = ProgramCall(
            program,
            ((rows, keys), (upstream, values)),
            (known, None, index, None),
            scale,
            workspace=attention_wide.WORKSPACE,
        )
        d_rows, d_keys, _, d_values = cuda_passes.backward(call, counts, wanted, factors=factors)
        for gradients, gradient in zip(to, (d_rows, d_keys, d_values), strict=True):
            if gradients is not None and gradient is not None:
                gradients[n].copy_(gradient.view_as(gradients[n]))
    if band is None:
        return [*found, None, d_sinks]
    of_keys = band.transposed
    products = ((band, k, False), (of_keys, q, False), (of_keys, grad_out, True))
    for of_input, (seen, factor, signed) in zip(found, products, strict=True):
        if of_input is not None:
            seen.add_others(of_input, factor, shared, signed)
    lost = of_keys.sees((lse == torch.inf) | lse.isnan(), shared)  # keys seen by rows with NaN probabilities
    for of_input in found[1:]:
        if of_input is not None:
            of_input.masked_fill_(lost[..., None], torch.nan)
    return [*found, None, d_sinks]


def _heads(t: Tensor, shared: int | None = None) -> Iterator[Tensor]:
    """The heads of t [B, H, rows, ...], each [rows, ...]; with shared, groups [H / shared, rows, ...].

    shared: number of key heads; a group has the query heads that share one.
    """
    of_head = t if shared is None else t.view(t.shape[0], shared, -1, *t.shape[2:])
    return (of_head[b, h] for b in range(of_head.shape[0]) for h in range(of_head.shape[1]))


def _operands(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each key head: the queries of all heads that share it, as rows [., F], its keys and its values."""
    rows = (t.reshape(-1, t.shape[-1]) for t in _heads(q, k.shape[1]))
    return zip(rows, _heads(k), _heads(v), strict=True)


def _integers(band: Band | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Counts]:
    """The integer row data (bounds of the window, [2, rows]) for a key head, and the counts of data."""
    if band is None:
        return None, (0, 0, 0, 0)
    return band.bounds(q.device).repeat(1, q.shape[1] // k.shape[1]), (0, 2, 0, 0)


def _finite(lines: Tensor) -> Tensor:
    """A contiguous copy with 0 in place of non-finite numbers."""
    copy = torch.empty_like(lines, memory_format=torch.contiguous_format)
    return torch.nan_to_num(lines, 0.0, 0.0, 0.0, out=copy)


@cache
def _programs(of_band: bool) -> tuple[str, str]:
    """The programs of forward and backward.

    of_band: row data `first` and `stop` bound the columns of a row.
    """

    def weights(score: Any) -> dict[str, Any]:
        return {"lse": stat.softmax(score).logsumexp}

    def mean(score: Any, other: Any) -> dict[str, Any]:
        weights = stat.softmax(score)
        return {"lse": weights.logsumexp, "mean": weights.mean(other)}

    if not of_band:
        return trace(weights, {}, {}).text, trace(mean, {}, {}).text

    def seen_weights(score: Any, column: Any, first: Any, stop: Any) -> dict[str, Any]:
        return weights(torch.where((column >= first) & (column < stop), score, -torch.inf))

    def seen_mean(score: Any, other: Any, column: Any, first: Any, stop: Any) -> dict[str, Any]:
        seen = (column >= first) & (column < stop)
        return mean(torch.where(seen, score, -torch.inf), torch.where(seen, other, 0.0))

    bounds = {"first": "int64", "stop": "int64"}
    return trace(seen_weights, bounds, {}).text, trace(seen_mean, bounds, {}).text
