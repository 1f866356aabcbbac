"""Attention over packed sequences of different lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from monoidreduce import _yards
from monoidreduce._keywords import refuse
from monoidreduce._ops.registry import call_op
from monoidreduce._torch_private import in_forward_mode
from monoidreduce._validate import check_axes, check_bool, check_tensor, mismatch, remembering
from monoidreduce.functional import (
    AttentionOptions,
    MaskMod,
    ScoreMod,
    Window,
    _operands,
    _shows_rounding,
    bounds,
    check_dropout,
    check_heads,
    check_sinks,
    refuse_over_ranks,
    score_factors,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from monoidreduce.ranks import RanksOrGroup

__all__ = ["attention_varlen"]


class VarlenKeywords(AttentionOptions, total=False):
    """Keywords of `attention_varlen` in its overloads, beside return_lse."""

    sinks: Tensor | None
    dropout_p: float
    seed: int | Tensor | None
    ranks: RanksOrGroup | None


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VarlenKeywords],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: bool,
    **options: Unpack[VarlenKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    compensated: bool = False,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    ranks: RanksOrGroup | None = None,
    **others: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` within each of several sequences that are packed in one tensor.

    The host never waits for the lengths, so a call can be captured in a CUDA graph and replayed with other
    lengths. Tensors may be longer than the sequences; their last rows then belong to no sequence.

    Args:
        q: [T, H, F] queries of all sequences.
        k: [S, Hkv, F] keys; H is a multiple of Hkv, and query head h uses key head h // (H // Hkv).
        v: [S, Hkv, D] values.
        cu_seqlens_q: [sequences + 1] int32 or int64, on the device of q. Sequence n has the queries from
            cu_seqlens_q[n] to cu_seqlens_q[n + 1]; the first entry is 0, and the entries do not decrease.
        cu_seqlens_k: the same for keys and values; None: equal to cu_seqlens_q. A sequence may have no
            queries or no keys.
        causal, window: apply within each sequence; its last query is aligned with its last key.
        scale, softcap, sinks, compensated: as in `attention`.
        score_mod, mask_mod: as in `attention`. `batch` is the index of the sequence, and q_idx and kv_idx
            count within the sequence. See docs/score_mod.md.
        dropout_p, seed: as in `attention` of one batch with all tokens: random numbers belong to tokens.
        return_lse: also return the log-sum-exp of each query's scores, including its sink.
        ranks: q, k and v are this rank's shard of the tokens, as `distributed.shard` makes it along
            axis 0, and so are the results. cu_seqlens_q and cu_seqlens_k cover all tokens, and are the same
            on every rank. sinks are for all heads. score_mod, mask_mod and dropout are not supported. Uses
            the options of `Ranks` that `attention` uses; length counts the tokens of all ranks, including
            tokens of no sequence.

    Returns:
        out [T, H, D] in the dtype of q. With return_lse also lse [H, T] in the accumulation dtype, with
        natural logarithm and differentiable. A query that sees no key, or belongs to no sequence, has out 0
        and lse -inf (or its sink). On a GPU all results and gradients are NaN if cu_seqlens_q or cu_seqlens_k
        is not as above.

    Raises:
        TraceError: score_mod or mask_mod does something that kernels cannot do.
        TypeError, ValueError: an argument is not as above. On the CPU this includes the values of
            cu_seqlens_q and cu_seqlens_k.
    """
    if others:
        refuse("attention_varlen", others)
    mods = {name: mod for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)) if mod is not None}
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    if ranks is not None:
        for name, mod in mods.items():
            error = ValueError(mismatch(name, "None beside ranks", type(mod)))
            refuse_over_ranks(ranks, "attention_varlen", error)
        if dropout_p != 0:
            error = ValueError(mismatch("dropout_p", "0 beside ranks", dropout_p))
            refuse_over_ranks(ranks, "attention_varlen", error)
        found: Tensor | tuple[Tensor, Tensor] = _yards.ranks().varlen_over_ranks(
            ranks,
            *tensors,
            sinks,
            return_lse,
            causal=causal,
            scale=scale,
            window=window,
            softcap=softcap,
            compensated=compensated,
        )
        return found
    return_lse = check_bool("return_lse", return_lse)
    if not (isinstance(dropout_p, float) and dropout_p == 0.0 and seed is None):
        dropout_p, seed = check_dropout(dropout_p, seed, q)
    if mods or dropout_p:
        q, k, v, of_queries, of_keys = _check_tensors(*tensors, sinks)
        exact = check_bool("compensated", compensated) or _shows_rounding(q, sinks)
        of_call = (causal, scale, window, softcap, None, sinks, exact, (of_queries, of_keys))
        out, lse = _yards.folds().modified_attention(
            q, k, v, (score_mod, mask_mod, None), *of_call, dropout_p, seed
        )
    else:
        tensors, options = check_varlen(*tensors, sinks, causal, scale, window, softcap, compensated)
        q, k, v, *starts = tensors
        all_tokens = (0, q.shape[2])
        found = call_op("attention_varlen", q, k, v, sinks, *starts, *options, *all_tokens)
        out, lse, *_ = found
    out = out.squeeze(0).transpose(0, 1)  # not out[0], whose gradient is a copy
    return (out, lse.squeeze(0)) if return_lse else out


def check_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    scale: float | None,
    window: Window | None,
    softcap: float | None,
    compensated: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Any, ...]]:
    """Check the arguments; return the op's tensors (q, k, v as [1, heads, tokens, width]) and options.

    The op's last two options, which tell the range of queries, are left out.
    """
    compensated = check_bool("compensated", compensated)
    tensors = _check_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks)
    options = (*score_factors(scale, softcap), *bounds(causal, window))
    compensated = compensated or in_forward_mode() or _shows_rounding(tensors[0], sinks)
    return tensors, (*options, compensated)


@remembering
def _operands_and_starts(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None
) -> tuple[list[Any], dict[Any, Any]]:
    q, k, v = _operands(q=q, k=k, v=v)
    sizes: dict[Any, Any] = {}
    check_axes("q", q, ("T", "H", "F"), sizes)
    check_axes("k", k, ("S", "Hkv", "F"), sizes)
    check_heads(k, sizes, "[S, Hkv, F]")
    check_axes("v", v, ("S", "Hkv", "D"), sizes)
    lengths: dict[Any, Any] = {}
    _check_starts("cu_seqlens_q", cu_seqlens_q, q, lengths)
    if cu_seqlens_k is not None:
        _check_starts("cu_seqlens_k", cu_seqlens_k, q, lengths)
    return [q, k, v, cu_seqlens_q, cu_seqlens_k], sizes


def _check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (*qkv, of_queries, of_keys), _ = _operands_and_starts(q, k, v, cu_seqlens_q, cu_seqlens_k)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in qkv)
    check_sinks(sinks, q)
    return q, k, v, of_queries, of_queries if of_keys is None else of_keys


def _check_starts(name: str, starts: Tensor, q: Tensor, sizes: dict[str, int]) -> None:
    check_axes(name, check_tensor(name, starts), ("sequences + 1",), sizes)
    if starts.dtype not in (torch.int32, torch.int64):
        raise TypeError(mismatch(name, "int32 or int64", starts.dtype))
    if starts.device != q.device:
        raise ValueError(mismatch(name, f"a tensor on {q.device} as q", starts.device))
    if starts.shape[0] == 0:  # len() would make the number of sequences a constant of a traced graph
        raise ValueError(mismatch(name, "at least one number, the end of the last sequence", "none"))
