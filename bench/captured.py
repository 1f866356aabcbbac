"""Attention by functions of scores whose captured tensors are learned, beside FlexAttention and torch.

Torch stores the added numbers as a matrix, and autograd adds its gradient to the tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from bench.harness import Case, Contender, deterministic

FARTHEST = 128  # distance from which the clamped table has one entry for all
DOCUMENT = 1024  # tokens of a document
Mod = Callable[..., Any]


class Learned(NamedTuple):
    """A function of scores.

    draw: makes its learned tensors, for B batches, H heads and L tokens.
    make: the function, from these. It adds a number to a score.
    mask: mask_mod; None if all keys are seen.
    softmax: whether weights are a softmax of the function, and not the function itself (`attend`).
    """

    draw: Callable[[int, int, int], tuple[Tensor, ...]]
    make: Callable[..., Mod]
    mask: Mod | None
    softmax: bool = True


def causal(b: Any, h: Any, row: Any, column: Any) -> Any:
    return row >= column


def forgetting(sums: Tensor) -> Mod:
    """Forgetting attention: the sum of the log gates between a key and a query, from sums of all before each.

    Lin et al., Forgetting Transformer (ICLR 2025), equation 3.
    """
    return lambda score, b, h, row, column: score + sums[b, h, row] - sums[b, h, column]


def alibi(slopes: Tensor) -> Mod:
    return lambda score, b, h, row, column: score + slopes[h] * (column - row)


def relative(table: Tensor) -> Mod:
    """An entry for each distance."""
    last = table.shape[1] // 2
    return lambda score, b, h, row, column: score + table[h, column - row + last]


def clamped(table: Tensor) -> Mod:
    """An entry for each distance up to FARTHEST, and one for all beyond."""
    return lambda score, b, h, row, column: (
        score + table[h, (column - row).clamp(-FARTHEST, FARTHEST) + FARTHEST]
    )


def sigmoid(shift: Tensor) -> Mod:
    """Sigmoid attention, whose shift is learned (Ramapuram et al., 2024)."""
    return lambda score: torch.sigmoid(score + shift)


def same_document(b: Any, h: Any, row: Any, column: Any) -> Any:
    return (row >= column) & (row // DOCUMENT == column // DOCUMENT)


def slopes(B: int, H: int, L: int) -> tuple[Tensor]:
    """ALiBi's for H heads. Others would be large where tokens are far, and torch rounds sums to 16 bits."""
    return (torch.exp2(-8 * torch.arange(1, H + 1) / H),)


LEARNED = {
    "forgetting": Learned(lambda B, H, L: (torch.randn(B, H, L) / 8,), forgetting, causal),
    "alibi and documents": Learned(slopes, alibi, same_document),
    "relative": Learned(lambda B, H, L: (torch.randn(H, 2 * L + 1) / 8,), relative, None),
    "clamped": Learned(lambda B, H, L: (torch.randn(H, 2 * FARTHEST + 1) / 8,), clamped, None),
    "sigmoid": Learned(lambda B, H, L: (torch.tensor(-math.log(L)),), sigmoid, None, softmax=False),
}


def own(learned: Learned, L: int) -> Contender:
    make = functools.cache(learned.make)

    @functools.cache
    def blocks(device: torch.device) -> mr.BlockMask | None:
        return None if learned.mask is None else mr.block_mask(learned.mask, None, None, L, L, device=device)

    def run(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        if not learned.softmax:
            return mr.attend(q, k, v, weight=make(*tensors))
        return mr.attention(q, k, v, score_mod=make(*tensors), block_mask=blocks(q.device))

    return run


def flex_attention(learned: Learned, L: int) -> Contender:
    """Compiled FlexAttention. Its block mask is computed before the timed calls."""

    @functools.cache
    def block_mask(device: torch.device) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        return learned.mask and create_block_mask(learned.mask, None, None, L, L, device=device)

    def run(mask: Any, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        out: Tensor = flex_attention(q, k, v, score_mod=learned.make(*tensors), block_mask=mask)
        return out

    compiled = torch.compile(run, dynamic=False)
    return lambda q, *others: compiled(block_mask(q.device), q, *others)


def of_torch(learned: Learned) -> Contender:
    def run(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        B, H, L, d = q.shape
        if not learned.softmax:
            scores = (q @ k.mT).float() * d**-0.5  # a shift added in 16 bits loses five of its bits
            return learned.make(*tensors)(scores).to(v.dtype) @ v
        b, h = torch.arange(B, device=q.device), torch.arange(H, device=q.device)
        token = torch.arange(L, device=q.device)
        at = b[:, None, None, None], h[:, None, None], token[:, None], token
        added = learned.make(*tensors)(torch.zeros((), device=q.device), *at)
        if learned.mask is not None:
            added = added.masked_fill(~learned.mask(*at), float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added.expand(B, H, L, L).to(q.dtype))

    return run


def case(
    dtype: torch.dtype, device: torch.device, *, B: int, H: int, L: int, d: int, name: str = "relative"
) -> Case:
    """Self-attention of L tokens with the learned function of this name."""
    learned = LEARNED[name]
    documents = learned.mask is same_document
    pairs = L * min(L, DOCUMENT) // 2 if documents else L * L if learned.mask is None else L * L // 2
    products = 4 * B * H * pairs * d

    def inputs() -> tuple[Tensor, ...]:
        drawn = [torch.randn(B, H, L, d, device=device).to(dtype) for _ in range(3)]
        return *drawn, *(tensor.to(device) for tensor in learned.draw(B, H, L))

    contenders: dict[str, Contender] = {"monoidreduce": own(learned, L), "torch": of_torch(learned)}
    if device.type == "cuda":
        contenders["monoidreduce, deterministic"] = deterministic(contenders["monoidreduce"])
    if device.type == "cuda" and learned.softmax:
        contenders["FlexAttention"] = flex_attention(learned, L)
    return Case(
        op=f"learned {name}",
        dtype=dtype,
        device=device,
        parameters={"B": B, "H": H, "L": L, "d": d},
        inputs=inputs,
        leaves=4,
        output=(B, H, L, d),
        contenders=contenders,
        flops={"forward": products, "backward": 2 * products, "total": 3 * products},
        targets={},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases in bfloat16."""
    size = {"B": 2, "H": 16, "L": 4096, "d": 64}
    if quick or device.type == "cpu":
        size = {"B": 1, "H": 2, "L": 128 if quick else 512, "d": 64}
    return [case(torch.bfloat16, device, **size, name=name) for name in LEARNED]
