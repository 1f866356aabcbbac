"""Attention with functions of one score (score_mod, mask_mod, attend), compared with FlexAttention and
FlashAttention-4.

If one of our operators computes the same without a function, it is a contender too. For ALiBi and `attend`,
plain attention is a contender, though it computes something else: its results are checked against torch's
plain attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from bench.attention import FLASH
from bench.attention_varlen import lengths_of
from bench.harness import Case, Contender

DOCUMENT = 1024  # mean length of a document, in tokens
KERNEL = 13  # width and height of a neighbourhood, in pixels
PLAIN, TORCH_PLAIN = "monoidreduce, plain", "torch, plain"


class Functions(NamedTuple):
    """The functions that FlexAttention takes. score_mod adds a number to a score."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any]


class Kind(NamedTuple):
    """Functions for one size.

    parameters: their options, by name.
    pairs: number of pairs of a query and a key that a head keeps.
    on: makes the functions, with captured tensors on a device.
    cute: makes FlashAttention-4's, from the module bench.flash_mods: arguments of flash_attn_func.
    built_in: contenders: our operators for the same, or for plain attention.
    """

    parameters: dict[str, int]
    pairs: int
    on: Callable[[torch.device], Functions]
    cute: Callable[[Any, torch.device], dict[str, Any]]
    built_in: dict[str, Contender]


def plain(causal: bool) -> dict[str, Contender]:
    """Contenders for attention without functions."""
    return {
        PLAIN: functools.partial(mr.attention, causal=causal),
        TORCH_PLAIN: functools.partial(F.scaled_dot_product_attention, is_causal=causal),
    }


def alibi(H: int, L: int) -> Kind:
    """ALiBi: a penalty for each position between query and key, from 2^(-8/H) in head 0 down to 2^-8.

    Press et al., Train Short, Test Long (ICLR 2022), section 3.
    """

    def on(device: torch.device) -> Functions:
        slopes = torch.exp2(-8.0 / H * torch.arange(1, H + 1, device=device))

        def penalized(score: Any, b: Any, h: Any, row: Any, column: Any) -> Any:
            return score + slopes[h] * (column - row)

        return Functions(penalized, lambda b, h, row, column: row >= column)

    def cute(functions: Any, device: torch.device) -> dict[str, Any]:
        return functions.alibi(H) | {"causal": True}

    return Kind({}, L * (L + 1) // 2, on, cute, plain(causal=True))


def document(H: int, L: int) -> Kind:
    """Causal attention within documents of random lengths."""
    lengths = lengths_of(L, max(4, L // DOCUMENT), equal=False)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def on(device: torch.device) -> Functions:
        number = numbers.to(device)
        return Functions(None, lambda b, h, row, column: (number[row] == number[column]) & (row >= column))

    def cute(functions: Any, device: torch.device) -> dict[str, Any]:
        return functions.document() | {"aux_tensors": [numbers.to(device, torch.int32)]}

    @functools.cache
    def starts(B: int, device: torch.device) -> Tensor:
        ends = torch.tensor(lengths * B).cumsum(0)
        return F.pad(ends, (1, 0)).to(device, torch.int32)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat_q, flat_k, flat_v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        out = mr.attention_varlen(flat_q, flat_k, flat_v, starts(len(q), q.device), causal=True)
        return out.unflatten(0, (len(q), L)).transpose(1, 2)

    pairs = sum(n * (n + 1) // 2 for n in lengths)
    return Kind({"documents": len(lengths)}, pairs, on, cute, {"monoidreduce, attention_varlen": packed})


def window(H: int, L: int) -> Kind:
    """A causal window: a query sees its own key and those before it, an eighth of all keys."""
    reach = L // 8

    def on(device: torch.device) -> Functions:
        return Functions(None, lambda b, h, row, column: (row >= column) & (row - column <= reach))

    own = functools.partial(mr.attention, causal=True, window=(reach, 0))
    pairs = sum(min(row, reach) + 1 for row in range(L))
    return Kind(
        {"window": reach},
        pairs,
        on,
        lambda functions, device: functions.window(reach),
        {"monoidreduce, window": own},
    )


def natten(H: int, L: int) -> Kind:
    """Neighborhood attention: a pixel sees the square around it, moved inwards at edges. L is a power of two.

    Hassani et al., Neighborhood Attention Transformer (CVPR 2023), equation 2.
    """
    side = 1 << (L.bit_length() // 2)  # of the image, in pixels; it is as high, or half as high
    half = KERNEL // 2

    def on(device: torch.device) -> Functions:
        def near(of_query: Any, of_key: Any, size: int) -> Any:
            return (of_query.clamp(half, size - 1 - half) - of_key).abs() <= half

        def seen(b: Any, h: Any, row: Any, column: Any) -> Any:
            return near(row % side, column % side, side) & near(row // side, column // side, L // side)

        return Functions(None, seen)

    return Kind(
        {"side": side, "kernel": KERNEL},
        L * KERNEL**2,
        on,
        lambda functions, device: functions.natten(side, L // side, half),
        {},
    )


KINDS: dict[str, Callable[[int, int], Kind]] = {
    "score_mod alibi": alibi,
    "mask_mod document": document,
    "mask_mod window": window,
    "mask_mod natten": natten,
}
WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "attend sigmoid": torch.sigmoid,
    "attend relu2": lambda score: torch.relu(score) ** 2,
}


def own_attention(on: Callable[[torch.device], Functions], L: int) -> Contender:
    """`mr.attention` with score_mod, or with a block mask that is computed before the timed calls."""

    @functools.cache
    def blocks(device: torch.device) -> mr.BlockMask:
        return mr.block_mask(on(device).mask_mod, None, None, L, L, device=device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score_mod = on(q.device).score_mod
        if score_mod is None:
            return mr.attention(q, k, v, block_mask=blocks(q.device))
        return mr.attention(q, k, v, score_mod=score_mod, causal=True)

    return run


def torch_attention(on: Callable[[torch.device], Functions], H: int, L: int) -> Contender:
    """scaled_dot_product_attention with the stored mask or added numbers, computed before the timed calls."""

    @functools.cache
    def matrix(device: torch.device, dtype: torch.dtype) -> Tensor:
        of_score, kept = on(device)
        head, token = torch.arange(H, device=device), torch.arange(L, device=device)
        places = (0, head[:, None, None], token[:, None], token)
        mask: Tensor = kept(*places)
        if of_score is None:
            return mask
        added: Tensor = of_score(torch.zeros((), device=device), *places)
        return added.masked_fill(~mask, float("-inf")).to(dtype)[None]

    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=matrix(q.device, q.dtype))


def flex_block_mask(on: Callable[[torch.device], Functions], L: int, device: torch.device) -> Any:
    """FlexAttention's BlockMask."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(on(device).mask_mod, None, None, L, L, device=device)


def flex_attention(
    on: Callable[[torch.device], Functions], L: int, options: dict[str, str] | None = None
) -> Contender:
    """Compiled FlexAttention with these kernel options. Its block mask is computed before the timed calls."""
    block_mask = functools.cache(functools.partial(flex_block_mask, on, L))

    def run(score_mod: Callable[..., Any] | None, mask: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        out: Tensor = flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, kernel_options=options)
        return out

    compiled = torch.compile(run, dynamic=False)
    return lambda q, k, v: compiled(on(q.device).score_mod, block_mask(q.device), q, k, v)


def flash_attention_4(kind: Kind, on: Callable[[torch.device], Functions], L: int) -> Contender:
    """FlashAttention-4 with functions of its own; beside a mask_mod, with the blocks of FlexAttention."""

    @functools.cache
    def arguments(device: torch.device) -> dict[str, Any]:
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch as Blocks

        from bench import flash_mods

        functions = kind.cute(flash_mods, device)
        if "mask_mod" not in functions:
            return functions
        mask = flex_block_mask(on, L, device)
        of_rows = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
        of_columns = mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices
        return functions | {
            "block_sparse_tensors": Blocks(*of_rows, block_size=mask.BLOCK_SIZE),
            "block_sparse_tensors_bwd": Blocks(*of_columns, block_size=mask.BLOCK_SIZE),
        }

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_func

        out = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), **arguments(q.device))
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
    name: str = "score_mod alibi",
) -> Case:
    """Self-attention of L tokens with the functions of this name."""
    in_planes = device.type == "cuda" and dtype == torch.float32
    if name in WEIGHTS:
        options: dict[str, int] = {}
        weight, pairs = WEIGHTS[name], L * L
        contenders: dict[str, Contender] = {
            "monoidreduce": functools.partial(mr.attend, weight=weight),
            "torch": lambda q, k, v: weight(q @ k.mT * d**-0.5) @ v,
            **plain(causal=False),
        }
    else:
        kind = KINDS[name](H, L)
        options, pairs, on = kind.parameters, kind.pairs, functools.cache(kind.on)
        contenders = {"monoidreduce": own_attention(on, L), "torch": torch_attention(on, H, L)}
        if not in_planes:
            contenders |= kind.built_in
        if device.type == "cuda":
            contenders["FlexAttention"] = flex_attention(on, L)
        if device.type == "cuda" and not in_planes:
            contenders["FlexAttention, FLASH"] = flex_attention(on, L, FLASH)
            contenders["FlashAttention-4"] = flash_attention_4(kind, on, L)
    if in_planes:
        contenders["monoidreduce, emulated"] = mr.float32("emulated")(contenders["monoidreduce"])
    products = 2 * B * H * pairs * d  # FLOPs of q k^T

    def inputs() -> tuple[Tensor, ...]:
        return tuple(torch.randn(B, H, L, d, device=device).to(dtype) for _ in range(3))

    return Case(
        op=name,
        dtype=dtype,
        device=device,
        parameters={"B": B, "H": H, "L": L, "d": d} | options,
        inputs=inputs,
        leaves=3,
        output=(B, H, L, d),
        contenders=contenders,
        flops={"forward": 2 * products, "backward": 4 * products, "total": 6 * products},
        targets={},
        checked_by={name: TORCH_PLAIN for name in (PLAIN, TORCH_PLAIN) if name in contenders},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases in bfloat16; on a GPU two functions and sigmoid weights in float32, too."""
    if device.type == "cuda" and not quick:
        long = {"B": 2, "H": 16, "L": 8192}
        of_16_bits = [
            case(torch.bfloat16, device, **long, d=d, name=name)
            for name in (*KINDS, *WEIGHTS)
            for d in ((64, 128) if name in ("score_mod alibi", *WEIGHTS) else (128,))
        ]
        return of_16_bits + [
            case(torch.float32, device, B=8, H=16, L=2048, d=d, name=name)
            for name in ("score_mod alibi", "mask_mod document", "attend sigmoid")
            for d in (64, 128)
        ]
    size = {"B": 1, "H": 2, "L": 256, "d": 64} if quick else {"B": 1, "H": 8, "L": 2048, "d": 64}
    return [case(torch.bfloat16, device, **size, name=name) for name in (*KINDS, *WEIGHTS)]
