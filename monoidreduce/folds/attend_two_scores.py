"""`attend` with a weight of two scores: a total of a payload by `statistics`.

The kernels of attention compute one score of each pair.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._validate import check_axes, mismatch
from monoidreduce.folds import stat
from monoidreduce.folds.program.arguments import definition
from monoidreduce.folds.program.errors import TraceError
from monoidreduce.folds.statistics import Statistics
from monoidreduce.functional import MaskMod, Window, attention_operands, bounds

if TYPE_CHECKING:
    from monoidreduce.folds.block_mask import BlockMask

__all__ = ["attend_two_scores"]

ARGUMENTS = ("score", "other", "batch", "head", "q_idx", "kv_idx")


def attend_two_scores(
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    weight: Callable[..., Any],
    normalized: bool,
    causal: bool,
    window: Window | None,
    scale: float | None,
    mask_mod: MaskMod | None,
    block_mask: BlockMask | None,
) -> Tensor:
    """The result of `attend`; the arguments are checked here. operands: q, k, v, other_q and other_k."""
    q, k, v, other_q, other_k = operands
    q, k, v, sizes = attention_operands(q, k, v)
    check_axes("other_q", other_q, ("B", "H", "M", "E"), sizes)
    check_axes("other_k", other_k, ("B", "other Hkv", "N", "E"), sizes)
    dtype, heads, others = v.dtype, q.shape[1], other_k.shape[1]
    if heads % others if others else heads:
        expected = f"a number of heads that divides the {heads} of q, on axis 1"
        raise ValueError(mismatch("other_k", expected, list(other_k.shape)))
    if normalized:  # its weights and their sum are not rounded to 16 bits
        v = v.to(accumulation_dtype(dtype))
    k, v, other_k = (t.repeat_interleave(heads // max(t.shape[1], 1), 1) for t in (k, v, other_k))
    left, right = bounds(causal, window)
    shift = k.shape[2] - q.shape[2]

    def element(score, other, batch, head, row, column, v):  # type: ignore[no-untyped-def]
        given = dict(zip(ARGUMENTS, (score, other, batch, head, row, column), strict=True))
        w = weight(**{name: given[name] for name in _names(weight)})
        if left >= 0:
            w = torch.where(column >= row + (shift - left), w, 0.0)
        if right >= 0:
            w = torch.where(column <= row + (shift + right), w, 0.0)
        if mask_mod is not None:
            w = torch.where(mask_mod(batch, head, row, column), w, 0.0)
        totals = dict(out=stat.total(w * v))
        if normalized:
            totals["sum"] = stat.total(w)
        return totals

    found = _Fold(element)(
        q,
        k,
        other_q,
        other_k,
        column={"v": v},
        block_mask=block_mask,
        scale=1 / math.sqrt(max(q.shape[3], 1)) if scale is None else scale,
    )
    if not normalized:
        return found.out.to(dtype)  # type: ignore[no-any-return]
    total = found.sum[..., None]
    return torch.where(total == 0, 0, found.out / torch.where(total == 0, 1, total)).to(dtype)


class _Fold(Statistics):
    """`statistics` of a function that is made in the call, for which torch.compile can trace the class."""

    def __init__(self, function: Callable[..., dict[str, Any]]) -> None:
        self._function, self._names = function, ("score", "other", "batch", "head", "row", "column", "v")


def _names(weight: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments of a weight of two scores."""
    try:
        signature = inspect.signature(weight)
    except ValueError:
        signature = inspect.Signature()
    wanted = tuple(p.name for p in signature.parameters.values() if p.default is p.empty)
    if "other" not in wanted or not set(wanted) <= set(ARGUMENTS):
        expected = f"a function of other and of arguments among {', '.join(ARGUMENTS)}, beside other_q"
        raise TraceError(mismatch("weight", expected, f"one {signature}"), definition(weight))
    return wanted
