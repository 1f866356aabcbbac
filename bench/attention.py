"""Attention, compared with torch's fused backends, FlexAttention and FlashAttention-4."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import monoidreduce as mr
from bench.harness import Case, Contender, deterministic, on_tier

FLASH = {"BACKEND": "FLASH"}  # FlexAttention's kernels from flash-attn-4, in place of those in Triton


def torch_attention(
    L: int, causal: bool, window: int | None, softcap: float | None, grouped: bool = False
) -> Contender:
    """scaled_dot_product_attention, with a stored mask for a window; with a softcap, stored scores.

    grouped: whether several query heads share a key head.
    """

    @functools.cache
    def band(device: torch.device) -> Tensor:
        seen = torch.ones(L, L, dtype=torch.bool, device=device)
        seen = seen if window is None else seen.triu(-window).tril(window)
        return seen.tril() if causal else seen

    def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        mask = bias if window is None else band(q.device)
        without = causal and mask is None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=without, enable_gqa=grouped)

    def with_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * (q.shape[-1] ** -0.5 / softcap)
        return (softcap * scores.tanh()).masked_fill(~band(q.device), float("-inf")).softmax(-1) @ v

    return fused if softcap is None else with_scores


def through(which: SDPBackend, attention: Contender) -> Contender:
    """Attention with one of torch's backends forced."""

    def run(*inputs: Tensor) -> Tensor:
        with sdpa_kernel(which):
            return attention(*inputs)

    return run


def flex_attention(
    L: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    options: dict[str, str] | None = None,
) -> Contender:
    """Compiled FlexAttention with these kernel options."""

    @functools.cache
    def block_mask(device: torch.device) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        def seen(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            if window is None:
                return row >= column
            return (row - column <= window) & (column - row <= (0 if causal else window))

        return create_block_mask(seen, None, None, L, L, device=device) if causal or window else None

    def run(mask: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        of_heads = None if bias is None else bias.squeeze(0)

        def score(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            capped = score if softcap is None else softcap * torch.tanh(score / softcap)
            return capped if of_heads is None else capped + of_heads[h, row, column]

        return flex_attention(
            q,
            k,
            v,
            score_mod=None if softcap is None and bias is None else score,
            block_mask=mask,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options=options,
        )

    compiled = torch.compile(run, dynamic=False)
    return lambda q, *others: compiled(block_mask(q.device), q, *others)


def flash_attention_4(causal: bool, window: int | None, softcap: float | None) -> Contender:
    """FlashAttention-4, which takes heads after tokens."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_func

        out = flash_attn_func(
            *(tensor.transpose(1, 2) for tensor in (q, k, v)),
            causal=causal,
            window_size=(window, window),
            softcap=softcap or 0.0,
        )
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def case(
    dtype: torch.dtype,
    device: torch.device,
    *,
    B: int,
    H: int,
    L: int,
    d: int,
    Hkv: int | None = None,
    causal: bool = False,
    N: int | None = None,
    std: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
    bias: bool = False,
    target: float | None = None,
    tf32: bool = False,
) -> Case:
    """Self-attention of L tokens, or every one of L queries over all of N keys.

    Hkv: number of key heads, if it is not H. std: standard deviation of the scores. window: number of keys on
    either side of its own that a query sees.
    bias: with a bias [1, H, L, L], without a gradient.
    """
    keys = L if N is None else N
    reach = max(L, keys) if window is None else window
    pairs = sum(min(keys, row + 1 + (0 if causal else reach)) - max(0, row - reach) for row in range(L))
    products = 2 * B * H * pairs * d  # FLOPs of q k^T

    def inputs() -> tuple[Tensor, ...]:
        shapes = [(B, H, L, d)] + [(B, Hkv or H, keys, d)] * 2 + [(1, H, L, keys)] * bias
        q, k, *others = (torch.randn(shape, device=device) for shape in shapes)
        return tuple(tensor.to(dtype) for tensor in (q * std**0.5, k * std**0.5, *others))

    def own(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **more: Any) -> Tensor:
        sides = None if window is None else (window, window)
        return mr.attention(q, k, v, causal=causal, window=sides, softcap=softcap, bias=bias, **more)

    theirs = torch_attention(L, causal, window, softcap, grouped=Hkv is not None)
    contenders = {"monoidreduce": own, "torch": theirs}
    if device.type == "cuda" and dtype == torch.float32:
        if softcap is None:
            contenders["efficient"] = through(SDPBackend.EFFICIENT_ATTENTION, theirs)
            contenders["math"] = through(SDPBackend.MATH, theirs)
        else:
            contenders["torch.compile"] = torch.compile(theirs, dynamic=False)
        if tf32:
            contenders["FlexAttention"] = flex_attention(L, causal, window, softcap)
        else:
            contenders["monoidreduce, emulated"] = mr.float32("emulated")(own)
    elif device.type == "cuda":
        if softcap is not None:  # torch.compile turns the others into the same calls as "torch"
            contenders["torch.compile"] = torch.compile(theirs, dynamic=False)
        if softcap is None:
            contenders["cuDNN"] = through(SDPBackend.CUDNN_ATTENTION, theirs)
        if window is None and softcap is None and not bias:
            contenders["monoidreduce, deterministic"] = deterministic(own)
            contenders["monoidreduce, sm80"] = on_tier(own, "sm80")
            contenders["monoidreduce, compensated"] = functools.partial(own, compensated=True)
            contenders["FlashAttention-2"] = through(SDPBackend.FLASH_ATTENTION, theirs)
        contenders["FlexAttention"] = flex_attention(L, causal, window, softcap)
        if window is not None or softcap is not None or bias:  # else it runs FlashAttention-4
            contenders["FlexAttention, FLASH"] = flex_attention(L, causal, window, softcap, FLASH)
        if not bias:  # it takes a bias only as a score function, with a user-written gradient
            contenders["FlashAttention-4"] = flash_attention_4(causal, window, softcap)
    options = {
        "Hkv": Hkv,
        "N": N,
        "std": None if std == 1.0 else std,
        "window": window,
        "softcap": softcap,
        "bias": bias or None,
    }
    return Case(
        op="attention",
        dtype=dtype,
        device=device,
        parameters={"B": B, "H": H, "L": L, "d": d, "causal": causal}
        | {name: value for name, value in options.items() if value is not None},
        inputs=inputs,
        leaves=3,
        output=(B, H, L, d),
        contenders=contenders,
        flops={"forward": 2 * products, "backward": 4 * products, "total": 6 * products},
        targets={} if target is None else {"forward": target, "backward": target},
        tf32=tf32,
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Full and causal cases in two dtypes. On a GPU: 16k tokens of model width 2048; options; groups."""
    target = 1.0 if device.type == "cpu" and not quick else None
    both = (torch.float32, torch.bfloat16)
    options: list[dict[str, Any]] = [
        {"causal": True, "window": 1024},
        {"causal": True, "softcap": 30.0},
        {"causal": False, "bias": True},
    ]
    if quick:
        small = {"B": 1, "H": 2, "L": 256, "d": 64}
        sizes = [(dtype, small) for dtype in both]
        options[0]["window"] = 64
        with_options = [case(torch.bfloat16, device, **small, **option) for option in options]
    elif device.type == "cuda":
        lengths = [(128, 2048), (128, 4096), (128, 8192), (128, 16384), (64, 8192), (256, 8192)]
        sizes = [(torch.float32, {"B": 8, "H": 16, "L": 2048, "d": d}) for d in (128, 64)]
        sizes += [
            (torch.bfloat16, {"B": 16384 // length, "H": 2048 // d, "L": length, "d": d})
            for d, length in lengths
        ]
        long = {"B": 2, "H": 16, "L": 8192, "d": 128}
        with_options = [case(torch.bfloat16, device, **long, **option) for option in options]
        with_options += [
            case(torch.float32, device, B=8, H=16, L=2048, d=d, **option)
            for d in (64, 128, 256)
            for option in ({"softcap": 30.0}, {"bias": True})
        ]
        with_options += [  # groups of 2, 4, 8 and 16 query heads
            case(torch.bfloat16, device, B=2, H=32, Hkv=32 // group, L=L, d=128, causal=True)
            for L in (4096, 8192)
            for group in (2, 4, 8, 16)
        ]
        with_options += [  # a width that is padded to 64, and 64
            case(torch.bfloat16, device, B=4, H=32, L=4096, d=d, causal=causal)
            for d in (59, 64)
            for causal in (False, True)
        ]
        with_options += [
            case(torch.float32, device, B=2, H=2048 // d, L=4096, d=d, causal=causal, tf32=True)
            for d in (64, 128)
            for causal in (False, True)
        ]
        with_options += [
            case(torch.float32, device, B=8, H=16, L=2048, d=d, causal=causal)
            for d in (192, 256)
            for causal in (False, True)
        ]
    else:
        sizes = [(dtype, {"B": 1, "H": 8, "L": 2048, "d": 64}) for dtype in both]
        with_options = []
    return [
        case(dtype, device, **size, causal=causal, target=target)
        for dtype, size in sizes
        for causal in (False, True)
    ] + with_options
