"""The kinds of functions that FlexAttention's users write: each runs with right values, or is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mods import dense
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

import monoidreduce as mr
from monoidreduce.folds import table_gradient

B, H, M, N, D = 2, 4, 48, 48, 8
F64 = torch.float64


def table(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=F64)


DOCUMENT = torch.tensor([0] * 10 + [1] * 20 + [2] * 18)
OFFSETS = torch.tensor([0, 10, 30, 48])
PREFIX = torch.tensor([7, 20])
KEEP = table(M, N) > -1.0
BIAS, PER_HEAD, OF_DISTANCE = table(H, M, N, seed=1), table(H, seed=2), table(H, 2 * N, seed=3)
BUCKET = (torch.arange(2 * N) // 5).clamp(max=12)
OF_BUCKET = table(13, H, seed=4)
ROTARY = table(N, seed=5)


def natten(b: Any, h: Any, i: Any, j: Any) -> Any:
    width, kernel = 8, 3
    x, y = (
        (i % width).clamp(kernel // 2, width - 1 - kernel // 2),
        (i // width).clamp(kernel // 2, 5 - kernel // 2),
    )
    return ((x - j % width).abs() <= kernel // 2) & ((y - j // width).abs() <= kernel // 2)


def even_bits(code: Any) -> Any:
    """The number that every second bit of a code of 8 bits makes."""
    code = code & 0b01010101
    code = (code | (code >> 1)) & 0b00110011
    return (code | (code >> 2)) & 0b00001111


def natten_in_morton_order(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A neighbourhood of 3 x 3 in an image of 8 x 8, in whose indices the bits of x and y alternate."""
    x, y = even_bits(i), even_bits(i >> 1)
    near_x = (x.clamp(1, 6) - even_bits(j)).abs() <= 1
    return near_x & ((y.clamp(1, 6) - even_bits(j >> 1)).abs() <= 1)


def tiles(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Tiles of 4 tokens in a grid of 3 by 4, each of which sees its neighbours: sliding tile attention."""
    row, column = i // 4 // 4, i // 4 % 4
    near = (row.clamp(1, 1) - j // 4 // 4).abs() <= 1
    return near & ((column.clamp(1, 2) - j // 4 % 4).abs() <= 1)


def temporal(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Text tokens see all; of a video in the order of its frames' places, near places see each other."""
    text, place_i, place_j = 6, (i - 6) % 14, (j - 6) % 14
    return (i < text) | (j < text) | ((place_i - place_j).abs() < 3)


def transfusion(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Causal, and images see all of themselves. IMAGES: start and length of each."""
    kept = i >= j
    for n in range(IMAGES.shape[1]):
        start, end = IMAGES[b, n, 0], IMAGES[b, n, 0] + IMAGES[b, n, 1]
        kept = kept | ((i >= start) & (i < end) & (j >= start) & (j < end))
    return kept


def in_documents(inner: Callable[..., Any]) -> Callable[..., Any]:
    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        same = DOCUMENT[i] == DOCUMENT[j]
        return same & inner(b, h, i - OFFSETS[DOCUMENT[i]], j - OFFSETS[DOCUMENT[j]])

    return mask


IMAGES = torch.tensor([[[3, 9], [30, 5]], [[0, 4], [20, 28]]])
SPAN_OF_IMAGE = torch.tensor([[0, 20], [12, 30], [28, 48]])  # the text that refers to each image
IMAGE_OF_KEY = torch.arange(N) // 16
WINDOW_OR_PREFIX = or_masks(lambda b, h, i, j: i - j <= 5, lambda b, h, i, j: j < PREFIX[b])
MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, i, j: i >= j,
    "sliding window": lambda b, h, i, j: (i >= j) & (i - j <= 7),
    "dilated sliding window": lambda b, h, i, j: ((i - j).abs() <= 8) & ((i - j) % 2 == 0),
    "prefix LM": lambda b, h, i, j: (j < PREFIX[b]) | (i >= j),
    "document": lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j],
    "causal within documents": in_documents(lambda b, h, i, j: i >= j),
    "neighbourhood": natten,
    "neighbourhood in Morton order": natten_in_morton_order,
    "sliding tiles": tiles,
    "temporal": temporal,
    "transfusion": transfusion,
    "flamingo": lambda b, h, i, j: (
        (i >= SPAN_OF_IMAGE[IMAGE_OF_KEY[j], 0]) & (i < SPAN_OF_IMAGE[IMAGE_OF_KEY[j], 1])
    ),
    "and_masks, or_masks": and_masks(WINDOW_OR_PREFIX, lambda b, h, i, j: i >= j),
    "blocks of chunks": lambda b, h, i, j: torch.div(i, 16, rounding_mode="floor") == j // 16,
    "global tokens": lambda b, h, i, j: (j < 4) | (i < 4) | ((i - j).abs() < 5),
    "by head": lambda b, h, i, j: torch.where(h % 2 == 0, i >= j, (i - j).abs() < 9),
    "stored": lambda b, h, i, j: KEEP[i, j],
    "stored, chained": lambda b, h, i, j: KEEP[i][j],
    "logical": lambda b, h, i, j: torch.logical_or(torch.logical_and(i >= j, j > 3), i == j),
    "tiles by floor": lambda b, h, i, j: torch.floor(i / 7) >= torch.floor(j / 7),
}
SCORES: dict[str, Callable[..., Any]] = {
    "noop": lambda s, b, h, i, j: s,
    "alibi": lambda s, b, h, i, j: s + torch.exp2(-((h + 1) * 8.0 / H)) * (j - i),
    "softcap": lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0),
    "relative": lambda s, b, h, i, j: s + (i - j) * 0.1,
    "relative, causal": lambda s, b, h, i, j: torch.where(i >= j, s + 0.1 * (i - j), -math.inf),
    "head bias": lambda s, b, h, i, j: s + PER_HEAD[h],
    "full table": lambda s, b, h, i, j: s + BIAS[h, i, j],
    "full table, chained": lambda s, b, h, i, j: s + BIAS[h][i][j],
    "table of distances": lambda s, b, h, i, j: s + OF_DISTANCE[h, i - j + N],
    "T5 buckets": lambda s, b, h, i, j: s + OF_BUCKET[BUCKET[(i - j).abs()], h],
    "rotary of positions": lambda s, b, h, i, j: (
        s * torch.cos(ROTARY[i] - ROTARY[j]) + torch.sin(0.1 * (i - j))
    ),
    "distances": lambda s, b, h, i, j: s - torch.log1p((i - j).abs() * 1.0) ** 1.5,
    "gaussian": lambda s, b, h, i, j: s - ((i - j) / 8.0) ** 2 - 0.01 * (1.0 * (i - j).abs()) ** 1.3,
    "power of the score": lambda s, b, h, i, j: torch.sign(s) * (s.abs() + 0.1) ** 0.7,
    "stick": lambda s, b, h, i, j: torch.logaddexp(s, 0.5 * s) + torch.minimum(s, s * 0 + 1.0),
    "masked_fill": lambda s, b, h, i, j: s.masked_fill(i < j, -math.inf),
    "rounded": lambda s, b, h, i, j: s + torch.round(i / 3.0) * 0.2 - torch.remainder(j / 5.0, 1.0),
    "temperature": lambda s, b, h, i, j: s * torch.log2(i + 2.0) * torch.rsqrt(h + 1.0),
}


def operands() -> list[Tensor]:
    return [table(B, H, n, D, seed=10 + k).requires_grad_() for k, n in enumerate((M, N, N))]


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Integers times floats are of the default dtype in plain torch."""
    torch.set_default_dtype(F64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", [*MASKS, *SCORES])
def test_runs(name: str, in_float64: None) -> None:
    """Values and gradients, against dense torch with the same function."""
    leaves = operands()
    found = mr.attention(*leaves, score_mod=SCORES.get(name), mask_mod=MASKS.get(name))
    unchained = name.removesuffix(", chained")  # torch would index by whole tensors
    expected = dense(*leaves, SCORES.get(unchained), MASKS.get(unchained))[0]
    upstream = table(*found.shape, seed=20)
    for ours, theirs in zip(
        (found, *torch.autograd.grad(found, leaves, upstream)),
        (expected, *torch.autograd.grad(expected, leaves, upstream)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


WHICH, OFFSET = torch.tensor(2), torch.arange(M).flip(0) % 7
LEARNED, GATES, VECTORS = table(H, 2 * N).requires_grad_(), table(M).requires_grad_(), table(N, D)
LEARNS: dict[str, Callable[..., Any]] = {
    "by distance": lambda s, b, h, i, j: s + LEARNED[h, i - j + N],
    "by clamped distance": lambda s, b, h, i, j: s + LEARNED[h, (i - j).clamp(-9, 9) + N],
    "T5": lambda s, b, h, i, j: s + LEARNED[h, BUCKET[(i - j).abs()]],
    "table": lambda s, b, h, i, j: s * torch.sigmoid(LEARNED[i % H, j]),
    "table beside gates": lambda s, b, h, i, j: s + LEARNED[h, j] * LEARNED[b, i] + GATES[i] * torch.tanh(s),
    "beside a table that does not learn": lambda s, b, h, i, j: s + GATES[j] * BIAS[h, i, j] + LEARNED[h, i],
    "causal": lambda s, b, h, i, j: torch.where(i >= j, s + LEARNED[h, i - j], -math.inf),
    "by a number, and by the query": lambda s, b, h, i, j: s + LEARNED[WHICH, i],
    "by an offset of the query": lambda s, b, h, i, j: s + GATES[OFFSET[i]] * LEARNED[h, j],
    "from the end": lambda s, b, h, i, j: s + LEARNED[h, -1 - (i - j).abs()],
}


@pytest.mark.parametrize("name", LEARNS)
@pytest.mark.parametrize("least_columns", (256, 7), ids=("whole", "chunks"))
def test_learns(name: str, least_columns: int, in_float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of captured tensors with any index."""
    monkeypatch.setattr(table_gradient, "LEAST_COLUMNS", least_columns)
    q, k, v = operands()
    leaves = [q, k, v, LEARNED, GATES]
    mask = MASKS["causal"] if name == "table" else None
    monkeypatch.setattr(table_gradient, "get_workspace", lambda: 0)
    found = mr.attention(q, k, v, score_mod=LEARNS[name], mask_mod=mask)
    upstream = table(*found.shape, seed=20)
    gradients = torch.autograd.grad(found, leaves, upstream, materialize_grads=True)
    expected = dense(q, k, v, LEARNS[name], mask)[0]
    reference = torch.autograd.grad(expected, leaves, upstream, materialize_grads=True)
    for ours, theirs in zip((found, *gradients), (expected, *reference), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "rope of MLA": (
        lambda s, b, h, i, j: s + torch.dot(VECTORS[i], VECTORS[j]),
        r"torch.dot: a function sees single numbers, no vectors.*pass torch.cat\(\(q, q_pe\), -1\)",
    ),
    "a slice": (
        lambda s, b, h, i, j: s + VECTORS[i, :].sum(),
        "sum: a function sees single numbers, no vectors",
    ),
    "python's and": (
        lambda s, b, h, i, j: s if i > j and j > 2 else -s,
        "a & b, a . b and ~a for and, or and not",
    ),
    "dropout": (
        lambda s, b, h, i, j: torch.where(torch.rand_like(s) > 0.5, s, 0.0),
        "one number for all elements",
    ),
    "a row's sum": (lambda s, b, h, i, j: torch.cumsum(s, 0), "torch.cumsum has no kernel code"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str) -> None:
    score_mod, reason = REFUSED[name]
    with pytest.raises(mr.TraceError, match=reason) as caught:
        mr.attention(*operands(), score_mod=score_mod)
    assert caught.value.file == __file__


def test_the_ways_out_of_refusals() -> None:
    """A bias of its own, and vectors beside those of q and k."""
    q, k, v = operands()
    i, j = torch.arange(M)[:, None], torch.arange(N)
    expected = dense(q, k, v, lambda s, b, h, i, j: s + LEARNED.detach()[h, i - j + N], None)[0]
    found = mr.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + LEARNED.detach()[h, i - j + N])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mr.attention(q, k, v, bias=LEARNED[:, i - j + N][None]), expected)
    q_pe, k_pe = VECTORS.expand(B, H, M, D), VECTORS.expand(B, H, N, D)
    of_both = mr.attention(torch.cat((q, q_pe), -1), torch.cat((k, k_pe), -1), v, scale=D**-0.5)
    scores = (q @ k.mT + q_pe @ k_pe.mT) * D**-0.5
    torch.testing.assert_close(of_both, scores.softmax(-1) @ v)
