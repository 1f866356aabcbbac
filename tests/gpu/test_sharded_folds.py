"""Attention over ranks without what they send: each rank's folds of its queries, on this one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specimens import attention_inputs, name_of
from tolerance import check_operator
from torch import Tensor

from monoidreduce import functional
from monoidreduce.distributed.attention_folds import POSITIONS, Fold, fold_gradients, fold_rows
from monoidreduce.distributed.group import Group
from monoidreduce.distributed.split import Split

pytestmark = pytest.mark.tiers("sm80", "sm90")

HANDLE: Any = None
RANKS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (300, 40)},
    "softcap": {"causal": True, "softcap": 5.0},
}


class Virtual(torch.autograd.Function):
    """attention of q, k and v, one rank after another; gradients of keys are added, as over ranks."""

    @staticmethod
    def forward(ctx: Any, layout: str, options: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> Any:
        ctx.splits = [
            [Split.of(Group(HANDLE, rank, RANKS), t.shape[2], layout) for t in (q, k)]
            for rank in range(RANKS)
        ]
        ctx.folds = [Fold.of_rank(*splits, options) for splits in ctx.splits]
        own = zip(ctx.folds, ctx.splits, strict=True)
        found = [fold_rows(folds, queries.part(q, POSITIONS), k, v, None) for folds, (queries, _) in own]
        ctx.save_for_backward(q, k, v, *(t for results in found for t in results))
        return ctx.splits[0][0].joined(
            torch.stack([ctx.splits[0][0].padded(out, POSITIONS) for out, *_ in found]), POSITIONS
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, *saved = ctx.saved_tensors
        parts, dk, dv = [], 0, 0
        for rank, (folds, (queries, _)) in enumerate(zip(ctx.folds, ctx.splits, strict=True)):
            inputs = (queries.part(q, POSITIONS), k, v, None)
            results = tuple(saved[4 * rank : 4 * rank + 4])
            upstream = (queries.part(grad, POSITIONS), None)
            dq, of_keys, of_values, _ = fold_gradients(folds, upstream, inputs, results, [True] * 3 + [False])
            parts.append(queries.padded(dq, POSITIONS))
            dk, dv = dk + of_keys, dv + of_values
        dq = ctx.splits[0][0].joined(torch.stack(parts), POSITIONS)
        return None, None, dq, dk.to(k.dtype), dv.to(v.dtype)


def over_virtual_ranks(layout: str) -> Any:
    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        of_call = {"causal": False, "scale": None, "window": None, "softcap": None}
        of_call |= {"compensated": False} | options
        _, of_op, _ = functional.check_attention(q, k, v, None, None, **of_call)
        result: Tensor = Virtual.apply(layout, of_op, q, k, v)  # type: ignore[no-untyped-call]
        return result

    return attention


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
@pytest.mark.parametrize("length", (1200, 1003))
def test_folds_of_all_ranks_are_the_whole(
    length: int, layout: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device
) -> None:
    """Of 1003 positions parts are uneven, and slices of keys begin anywhere."""
    inputs = attention_inputs(1, 8, 2, length, length, 128, 128, dtype=dtype, device=gpu)
    check_operator("attention", inputs, options, function=over_virtual_ranks(layout))
