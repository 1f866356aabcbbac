"""Attention over packed sequences, compared with torch's, FlexAttention's and FlashAttention-4's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from bench.harness import Case, Contender, deterministic, on_tier


def lengths_of(tokens: int, count: int, equal: bool) -> tuple[int, ...]:
    """`count` lengths: equal, or random but the same in every run."""
    if equal:
        return (tokens // count,) * count
    generator = torch.Generator().manual_seed(count)
    shares = torch.empty(count).exponential_(generator=generator)
    lengths = [max(1, int(n)) for n in shares / shares.sum() * tokens]
    lengths[lengths.index(max(lengths))] += tokens - sum(lengths)
    return tuple(lengths)


def one_by_one(lengths: Sequence[int], causal: bool) -> Contender:
    """torch's attention, called for each sequence."""

    def run(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        each = zip(*(t.transpose(0, 1).split(lengths, 1) for t in (q, k, v)), strict=True)
        outs = [F.scaled_dot_product_attention(*(t[None] for t in qkv), is_causal=causal) for qkv in each]
        return torch.cat(outs, 2)[0].transpose(0, 1)

    return run


def dense(causal: bool) -> Contender:
    """Our dense attention, for a single sequence."""

    def run(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        out = mr.attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), causal=causal)
        return out[0].transpose(0, 1)

    return run


def flash_attention_2(longest: int, causal: bool) -> Contender:
    """FlashAttention-2, as torch has it."""

    def run(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        attend: Callable[..., Any] = varlen_attn
        takes_window = "window_size" in inspect.signature(attend).parameters  # since torch 2.11
        mask = {"window_size": (-1, 0 if causal else -1)} if takes_window else {"is_causal": causal}
        out: Tensor = attend(q, k, v, cu, cu, longest, longest, **mask)
        return out

    return run


def flash_attention_4(longest: int, causal: bool) -> Contender:
    def run(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_varlen_func

        lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        out = flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=causal, **lengths)
        return out[0] if isinstance(out, tuple) else out

    return run


def flex_attention(lengths: Sequence[int], causal: bool) -> Contender:
    """Compiled FlexAttention with a document mask. Its block mask is computed before the timed calls."""

    @functools.cache
    def block_mask(device: torch.device) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)

        def seen(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            same = document[row] == document[column]
            return same & (row >= column) if causal else same

        return create_block_mask(seen, None, None, sum(lengths), sum(lengths), device=device)

    def run(mask: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        out: Any = flex_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), block_mask=mask)
        return out[0].transpose(0, 1)

    compiled = torch.compile(run, dynamic=False)
    return lambda q, k, v, cu: compiled(block_mask(q.device), q, k, v)


def case(
    dtype: torch.dtype,
    device: torch.device,
    *,
    T: int,
    sequences: int,
    equal: bool,
    H: int,
    d: int,
    causal: bool = True,
) -> Case:
    """Self-attention of H heads of width d within `sequences` packed sequences, T tokens in total."""
    lengths = lengths_of(T, sequences, equal)
    longest = max(lengths)
    pairs = sum(n * (n + 1) // 2 if causal else n * n for n in lengths)

    def inputs() -> tuple[Tensor, ...]:
        qkv = [torch.randn(T, H, d, device=device).to(dtype) for _ in range(3)]
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
        return (*qkv, cu)

    def own(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return mr.attention_varlen(q, k, v, cu, causal=causal)

    contenders = {"monoidreduce": own, "torch": one_by_one(lengths, causal)}
    if len(lengths) == 1:
        contenders["monoidreduce, dense"] = dense(causal)
    if device.type == "cuda":
        contenders |= {
            "monoidreduce, deterministic": deterministic(own),
            "monoidreduce, sm80": on_tier(own, "sm80"),
            "FlashAttention-2": flash_attention_2(longest, causal),
            "FlashAttention-4": flash_attention_4(longest, causal),
            "FlexAttention": flex_attention(lengths, causal),
        }
    products = 2 * H * pairs * d  # FLOPs of q k^T
    return Case(
        op="attention_varlen",
        dtype=dtype,
        device=device,
        parameters={"T": T, "sequences": sequences, "equal": equal, "H": H, "d": d, "causal": causal},
        inputs=inputs,
        leaves=3,
        output=(T, H, d),
        contenders=contenders,
        flops={"forward": 2 * products, "backward": 4 * products, "total": 6 * products},
        targets={},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """One sequence, sequences of random lengths, and many of 32 tokens, with the same total of tokens."""
    T, H, d = (256, 2, 64) if quick else (16384, 16, 128) if device.type == "cuda" else (2048, 8, 64)
    kinds = ((1, True), (max(T // 512, 4), False), (T // 32, True))
    return [
        case(torch.bfloat16, device, T=T, sequences=sequences, equal=equal, H=H, d=d)
        for sequences, equal in kinds
    ]
