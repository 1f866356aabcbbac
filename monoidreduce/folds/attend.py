"""Attention with user functions: `attention` with score_mod and mask_mod, and `attend`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from monoidreduce._dynamo import as_input, outside_of_graphs
from monoidreduce._ops.attention_passes import in_full
from monoidreduce._ops.registry import call_op
from monoidreduce._validate import check_bool, check_factor, mismatch
from monoidreduce.folds.attend_two_scores import attend_two_scores
from monoidreduce.folds.block_mask import BlockMask, as_block_mask, check_block_mask
from monoidreduce.folds.cpu.bytecode import scores_code
from monoidreduce.folds.program.arguments import definition
from monoidreduce.folds.program.errors import TraceError
from monoidreduce.folds.program.integers import most_numbers
from monoidreduce.folds.program.mods import ALONE, STAND_INS, Beside, learned, mods_in_graph, mods_of, tables
from monoidreduce.folds.program.sequences import line_numbers
from monoidreduce.folds.program_scores import MOST_SIZES
from monoidreduce.functional import (
    MaskMod,
    ScoreMod,
    Window,
    attention_operands,
    bounds,
    softcap_value,
)

__all__ = ["attend", "dtype_of_weights", "modified_attention"]

Mods = tuple[ScoreMod | None, MaskMod | None, BlockMask | None]
Starts = tuple[Tensor, Tensor]


def modified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mods: Mods,
    causal: bool,
    scale: float | None,
    window: Window | None,
    softcap: float | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    compensated: bool,
    starts: Starts | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of `attention` with at least one of score_mod, mask_mod, block_mask and dropout.

    q, k, v, bias, sinks: checked; q, k and v have four axes. starts: cu_seqlens of queries and keys, for
    packed sequences. seed: of dropout, 0-d.
    """
    kind = "" if bias is None else "bool" if bias.dtype == torch.bool else "real"
    # Without dropout a constant, also where the compiler has a symbol for dropout_p.
    beside = softcap_value(softcap), kind, 0.0 if seed is None else dropout_p
    given = (q, k, v, mods, causal, scale, window)
    out, lse, _ = _call(
        *given,
        sinks=sinks,
        weights=False,
        compensated=compensated,
        starts=starts,
        beside=beside,
        of_beside=(bias, seed),
    )
    return out, lse


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    weight: Callable[..., Any],
    normalized: bool = False,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    other_q: Tensor | None = None,
    other_k: Tensor | None = None,
) -> Tensor:
    """sum_j weight(score_ij) v_j, where score = scale * q @ k^T: attention without a softmax.

        mr.attend(q, k, v, weight=lambda score: torch.sigmoid(score - math.log(n)))
        mr.attend(q, k, v, weight=lambda score: score**4, normalized=True)
        mr.attend(q, k, v, weight=lambda score, head, q_idx, kv_idx: score * decay[head] ** (q_idx - kv_idx))

    Args:
        q, k, v: [B, H, M, F], [B, Hkv, N, F] and [B, Hkv, N, D], as in `attention`.
        weight: a function of one score, or of several arguments that it names: score, batch, head, q_idx and
            kv_idx. It is traced like score_mod of `attention`, and may capture tensors in the same way.
        normalized: divide by the sum of a query's weights; if that is 0, out is 0. float16 inputs are
            computed in float32, because weights and their sums may exceed float16's range.
        causal, window, scale, mask_mod, block_mask: as in `attention`.
        other_q, other_k: [B, H, M, E] and [B, heads that divide H, N, E]. The weight then has an argument
            `other`, the second score scale * other_q @ other_k^T. Such a call is a fold of
            `monoidreduce.statistics`, a batch for each head: torch computes its gradients, and where there is
            no kernel for it its result too, in chunks of keys within the workspace.

    Returns:
        out [B, H, M, D] in the dtype of q. A query that sees no key has out 0.

    Raises:
        TraceError: weight or mask_mod does something that kernels cannot do.
        TypeError, ValueError: an argument is not as above.
        RuntimeError: on a GPU, if NVRTC is not available to compile the kernels.
    """
    if not callable(weight):
        raise TypeError(mismatch("weight", "a function of a score", repr(weight)))
    if (other_q is None) != (other_k is None):
        given = " and ".join("none" if t is None else "a tensor" for t in (other_q, other_k))
        raise ValueError(mismatch("other_q, other_k", "both or none", given))
    if other_q is not None and other_k is not None:
        if block_mask is not None and mask_mod is not None:
            raise ValueError(mismatch("mask_mod", "None beside block_mask, which has one", repr(mask_mod)))
        operands, normalized = (q, k, v, other_q, other_k), check_bool("normalized", normalized)
        return attend_two_scores(operands, weight, normalized, causal, window, scale, mask_mod, block_mask)
    mods = (weight, mask_mod, block_mask)
    q, k, v, _ = attention_operands(q, k, v)
    if not check_bool("normalized", normalized):
        return _call(q, k, v, mods, causal, scale, window, weights=True)[0]
    dtype, within = v.dtype, dtype_of_weights(v.dtype)
    q, k, v = (t if t.dtype == within else t.to(within) for t in (q, k, v))
    ones = v.new_ones((*v.shape[:-1], 1))
    with_ones = torch.cat((v, ones), -1)
    sums, _, low = _call(q, k, with_ones, mods, causal, scale, window, weights=True, compensated=True)
    sums = in_full(sums, low)
    total = sums[..., -1:]
    return torch.where(total == 0, 0, sums[..., :-1] / torch.where(total == 0, 1, total)).to(dtype)


def dtype_of_weights(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a normalized call computes: float32 for float16, whose range is 6e-8 to 65504."""
    return torch.float32 if dtype == torch.float16 else dtype


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mods: Mods,
    causal: bool,
    scale: float | None,
    window: Window | None,
    weights: bool,
    sinks: Tensor | None = None,
    compensated: bool = False,
    starts: Starts | None = None,
    beside: Beside = ALONE,
    of_beside: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the low word of out. of_beside: the bias, and the seed of dropout."""
    if scale is not None:
        scale = check_factor("scale", scale)
    score_mod, mask_mod, block_mask = mods
    in_graph = torch.compiler.is_dynamo_compiling()  # torch 2.6 does not trace callable() of a partial
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if not (in_graph or function is None or callable(function)):
            raise TypeError(mismatch(name, "a function of one element", repr(function)))
    kinds, words, block, listed = None, None, (1, 1), None
    if block_mask is not None:
        if mask_mod is not None:
            raise ValueError(mismatch("mask_mod", "None beside block_mask, which has one", repr(mask_mod)))
        blocks = as_block_mask(block_mask)
        check_block_mask(blocks, q.shape[:2], (q.shape[2], k.shape[2]), "q and k", q)
        kinds, mask_mod, block = blocks.kinds, blocks.mask_mod, blocks.block
        words, listed = blocks.links if q.is_cuda else kinds, block if blocks.listed else None
    packed = starts is not None
    given = (score_mod, mask_mod, listed, weights, packed, beside)
    lines = None if starts is None else line_numbers(*starts, max(q.shape[2], k.shape[2], 1))
    bias, seed = of_beside
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    of_call = (kinds, lines, bias, bias, seed)
    if in_graph:
        traced, which, read = mods_in_graph(*given)
        if traced is None:
            again: Any = (q, k, v, mods, causal, scale, window, weights, sinks, compensated, starts)
            again += (beside, of_beside)
            return outside_of_graphs(_call, *again)  # type: ignore[no-any-return]
        captured: list[Any] = [
            as_input(own, q) if number < 0 else of_call[number]
            for number, own in zip(which, read, strict=True)
        ]
    else:
        traced = mods_of(*given)
        captured = [_given(tensor, STAND_INS, of_call) for tensor in traced.tensors]
    counts = q.shape[1:2] if traced.counts_heads else ()
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    table, table_index, numbers = tables(captured, q, given[:2], counts, scores)
    if q.is_cuda and len(numbers) > MOST_SIZES:
        expected = f"at most {MOST_SIZES} on a GPU, one for each tensor and one for each of its axes"
        raise ValueError(mismatch("captured tensors", f"{expected} (torch.stack joins some)", len(numbers)))
    program = learned(traced.text, traced.by_both, captured)
    if q.is_cpu and not torch.compiler.is_compiling():
        _check_fits(program, numbers, (q, k, v, table), score_mod or mask_mod)
    # With few keys, dq in bfloat16 would miss the accuracy rule without the low word of out.
    compensated = compensated or (table is not None and table.requires_grad and torch.is_grad_enabled())
    options = program, numbers, scale, *bounds(causal, window), *block, weights, compensated
    out, lse, _, low = call_op(
        "modified_attention", q, k, v, table, sinks, table_index, words, *(starts or (None, None)), *options
    )
    return out, lse, low


def _check_fits(text: str, numbers: Sequence[int], inputs: tuple[Any, ...], function: Any) -> None:
    """Raise TraceError before forward if the CPU engine cannot run the program, or its backward if one may
    follow.

    inputs: q, k, and other tensors, which may be None.
    """
    q, k, *_ = inputs
    gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    try:
        scores_code(text, tuple(numbers), most_numbers("q, k", *q.shape[:3], k.shape[2]), gradient)
    except TraceError as error:
        raise TraceError(error.reason, definition(function)) from None


def _given(tensor: Tensor, stand_ins: Sequence[Tensor], of_call: Sequence[Tensor | None]) -> Tensor | None:
    """A captured tensor; or the call's own tensor if the captured one is its stand-in."""
    found = (own for known, own in zip(stand_ins, of_call, strict=True) if known is tensor)
    return next(found, tensor)
