"""Score and mask functions, as users of FlexAttention write them, and dense attention by torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Mod = Callable[..., Any]


class Case(NamedTuple):
    """Functions for B batches, H heads, M queries and N keys. captured: tensors that get gradients."""

    score_mod: Mod | None
    mask_mod: Mod | None
    captured: tuple[Tensor, ...] = ()


def alibi(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    slopes = torch.exp2(-8.0 * torch.arange(1, H + 1, **like) / H).requires_grad_()
    return Case(lambda score, b, h, i, j: score + slopes[h] * (j - i), None, (slopes,))


def softcap(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    return Case(lambda score, b, h, i, j: 3.0 * torch.tanh(score / 3.0), None)


def sliding_window(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    return Case(None, lambda b, h, i, j: (i >= j) & (i - j <= 9))


def document(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    document = torch.arange(max(M, N), device=like["device"]).div(17, rounding_mode="floor").expand(B, -1)
    return Case(None, lambda b, h, i, j: document[b, i] == document[b, j])


def natten(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    width, kernel = 8, 5

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        x, y = (i % width).clamp(kernel // 2, width - 1 - kernel // 2), i // width
        return ((x - j % width).abs() <= kernel // 2) & ((y - j // width).abs() <= kernel // 2)

    return Case(None, mask)


def relative_position(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    """A learned bias of each distance."""
    bias = torch.randn(H, M + N, dtype=torch.float64).to(**like).requires_grad_()
    return Case(lambda score, b, h, i, j: score + bias[h, i - j + N], lambda b, h, i, j: i + 30 >= j, (bias,))


def learned(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    """A score function with gradients of captured tensors.

    These are indexed by head, by key, by query through another tensor, and not at all (a 0-d tensor).
    """
    group = torch.arange(M, device=like["device"]) % 3
    gate, key_bias, of_group, temperature = (
        torch.randn(shape, dtype=torch.float64).to(**like).requires_grad_()
        for shape in ((H,), (B, N), (3, H), ())
    )

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return (
            torch.tanh(score * temperature)
            + gate[h] * key_bias[b, j]
            + of_group[group[i], h] * torch.sigmoid(score)
        )

    return Case(score_mod, lambda b, h, i, j: (i + j) % 5 != 1, (gate, key_bias, of_group, temperature))


def nothing_kept(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    """A mask where every third query sees no key, and no query of batch 0's head 0 does."""
    return Case(None, lambda b, h, i, j: (i % 3 != 0) & ((b != 0) | (h != 0)) & (j != 2))


def absent(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    return Case(lambda score, b, h, i, j: torch.where(i >= j, score, -math.inf), None)


CASES = (
    alibi,
    softcap,
    sliding_window,
    document,
    natten,
    relative_position,
    learned,
    nothing_kept,
    absent,
)


class Recomputed(torch.autograd.Function):
    """softmax(score) @ v as attention kernels compute it.

    Softmax probabilities are rounded only for products. The backward pass computes a row's delta,
    sum_j p_j dp_j, from out.
    """

    @staticmethod
    def forward(ctx: Any, score: Tensor, v: Tensor) -> Tensor:
        p = score.softmax(-1).nan_to_num(0.0)
        out = p.to(v.dtype).float() @ v.float()
        ctx.save_for_backward(p, v, out)
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        p, v, out = ctx.saved_tensors
        grad = grad.float()
        centre = (grad * out).sum(-1, keepdim=True)
        return p * (grad @ v.float().mT - centre), (p.to(v.dtype).float().mT @ grad).to(v.dtype)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    weight: Mod | None = None,
    normalized: bool = False,
    recomputed: bool = False,
) -> tuple[Tensor, Tensor]:
    """out and lse, with all scores stored. With `weight`, the out of `attend`.

    recomputed: compute out with `Recomputed`.
    """
    heads, rows, columns = q.shape[1], q.shape[2], k.shape[2]
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    b, h = (torch.arange(n, device=q.device).view(-1, *[1] * (3 - a)) for a, n in enumerate(q.shape[:2]))
    i, j = torch.arange(rows, device=q.device)[:, None], torch.arange(columns, device=q.device)
    score = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    score = score if score_mod is None else score_mod(score, b, h, i, j)
    kept = torch.ones_like(score, dtype=torch.bool)
    kept = kept if mask_mod is None else kept & mask_mod(b, h, i, j)
    behind, (left, right) = j - (i + columns - rows), window
    kept = kept & (behind <= 0) if causal else kept
    kept = kept & (behind >= -left) if left is not None else kept
    kept = kept & (behind <= right) if right is not None else kept
    if weight is not None:
        weights = torch.where(kept, weight(score), 0.0)
        total = weights.sum(-1, keepdim=True) if normalized else torch.ones_like(weights[..., :1])
        return torch.where(total == 0, 0.0, weights @ v / torch.where(total == 0, 1.0, total)), total
    score = score.masked_fill(~kept, -math.inf)
    empty = (score == -math.inf).all(-1, keepdim=True)
    weights = score.masked_fill(empty, 0.0).softmax(-1).masked_fill(~kept | empty, 0.0)
    lse = score.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty[..., 0], -math.inf)
    if recomputed:
        return Recomputed.apply(score.float(), v), lse
    return weights.to(v.dtype) @ v, lse
