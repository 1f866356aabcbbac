"""Attention by functions of a score: ALiBi, T5's bias, windows, documents, a softcap.

They are written as for FlexAttention. Each is compared with the dense matrix of scores.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from compare import compare, compare_memory
from torch import Tensor

import monoidreduce as mr

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 128, 16
SIDE, REACH = 16, 2  # an image of 8 rows of 16 pixels; how far a pixel sees

document = torch.arange(LENGTH) // 48


def sliding_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 20)


def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)


def neighbourhood(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    near_x = (q_idx % SIDE - kv_idx % SIDE).abs() <= REACH
    return near_x & ((q_idx // SIDE - kv_idx // SIDE).abs() <= REACH)


def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 20.0 * torch.tanh(score / 20.0)


def alibi(slopes: Tensor) -> Callable[..., Any]:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return score_mod


def t5_bias(of_bucket: Tensor) -> Callable[..., Any]:
    """of_bucket: [HEADS, 32], not learned. A learned one is `bias=` of attention.

    Raffel et al., Exploring the Limits of Transfer Learning (2020), section 2.1. Near
    keys have a bucket each. Far keys share buckets by the logarithm of their distance.
    Kernels round no numbers, so a table has the buckets.
    """
    behind = torch.arange(LENGTH)
    octaves = torch.log(behind.clamp(min=1) / 16) / math.log(128 / 16)
    far = 16 + (octaves * 16).clamp(max=15).long()
    bucket = torch.where(behind < 16, behind, far)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + of_bucket[h, bucket[(q_idx - kv_idx).abs()]]

    return score_mod


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Any = None,
    mask_mod: Any = None,
    scale: float = WIDTH**-0.5,
) -> Tensor:
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    score = q @ k.mT * scale
    score = score if score_mod is None else score_mod(score, b, h, i, j)
    if mask_mod is not None:
        score = score.masked_fill(~mask_mod(b, h, i, j), -torch.inf)
    return score.softmax(-1) @ v


def show(
    name: str,
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    inputs: dict[str, Tensor],
) -> None:
    print(name)
    compare(ours, theirs, inputs)
    compare_memory(ours, theirs, inputs)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {name: torch.randn(BATCH, HEADS, LENGTH, WIDTH) for name in "qkv"}
    for mask in (sliding_window, same_document, neighbourhood):
        blocks = mr.block_mask(mask, None, None, LENGTH, LENGTH, block_size=32)
        show(
            f"{mask.__name__}: {blocks}",
            lambda q, k, v, blocks=blocks: mr.attention(q, k, v, block_mask=blocks),
            lambda q, k, v, mask=mask: dense(q, k, v, mask_mod=mask),
            inputs,
        )
    biased = t5_bias(torch.randn(HEADS, 32))
    for name, score_mod in (("softcap", softcap), ("T5's bias", biased)):
        show(
            name,
            lambda q, k, v, mod=score_mod: mr.attention(q, k, v, score_mod=mod),
            lambda q, k, v, mod=score_mod: dense(q, k, v, mod),
            inputs,
        )
    show(
        "ALiBi, of slopes that are learned",
        lambda q, k, v, slopes: mr.attention(q, k, v, score_mod=alibi(slopes)),
        lambda q, k, v, slopes: dense(q, k, v, alibi(slopes)),
        {**inputs, "slopes": torch.rand(HEADS)},
    )
