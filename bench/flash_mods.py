"""The functions of scores of bench/mods.py for FlashAttention-4, in CuTe DSL.

Importing this file needs flash-attn-4, which calls them with vectors of scores, heads and places.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from flash_attn.cute.utils import scalar_to_ssa


def alibi(H: int) -> dict[str, Callable[..., Any]]:
    """ALiBi, and the gradient of its result in the score."""
    step = -8.0 / H

    @cute.jit
    def penalized(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        slope = cute.math.exp2((h.to(cutlass.Float32) + 1.0) * step)
        return score + slope * (kv_idx - q_idx).to(cutlass.Float32)

    @cute.jit
    def unchanged(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return grad

    return {"score_mod": penalized, "score_mod_bwd": unchanged}


def document() -> dict[str, Callable[..., Any]]:
    """Causal attention within documents. The auxiliary tensor holds each token's document."""

    @cute.jit
    def seen(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        number = aux_tensors[0]
        of_query = scalar_to_ssa(number[q_idx[0]], cutlass.Int32)
        of_key = scalar_to_ssa(number[kv_idx[0]], cutlass.Int32)
        return (of_query == of_key) & (q_idx >= kv_idx)

    return {"mask_mod": seen}


def window(reach: int) -> dict[str, Callable[..., Any]]:
    """A causal window of the last `reach` keys and a query's own."""

    @cute.jit
    def seen(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= reach)

    return {"mask_mod": seen}


def natten(side: int, height: int, half: int) -> dict[str, Callable[..., Any]]:
    """Pixels at most `half` away from a pixel of an image, which is moved inwards at edges."""

    @cute.jit
    def near(of_query, of_key, size: cutlass.Constexpr):
        low, high = cute.full_like(of_query, half), cute.full_like(of_query, size - 1 - half)
        middle = cute.where(of_query < low, low, cute.where(of_query > high, high, of_query))
        return (middle - of_key <= half) & (of_key - middle <= half)

    @cute.jit
    def seen(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        columns = near(q_idx % side, kv_idx % side, side)
        return columns & near(q_idx // side, kv_idx // side, height)

    return {"mask_mod": seen}
