"""score_mod, mask_mod and block_mask on a GPU: against dense torch in float64, and in the same dtype."""

from __future__ import annotations

import math
import operator
from functools import reduce
from typing import Any

import mods
import pytest
import torch
from calls import HALVES
from integers import CASES as INTEGERS
from integers import captured, kept
from modified_calls import RAGGED, SHAPES, check, operands, results
from mods import CASES, Case
from paths import counts
from specimens import name_of
from torch import Tensor

import monoidreduce as mr

pytestmark = pytest.mark.tiers("sm80", "sm90")
SIMT = pytest.mark.tiers("simt")
WIDE = (torch.float32, torch.float64)


def check_integers(dtype: torch.dtype, gpu: torch.device, packed: bool = False) -> None:
    """A third of the cases at a time in one mask, whose parity is wrong where one of them is."""
    names = list(INTEGERS)
    for first in range(3):
        check_integers_of(names[first::3], dtype, gpu, packed)


def check_integers_of(names: list[str], dtype: torch.dtype, gpu: torch.device, packed: bool) -> None:
    rows = columns = 200
    t = captured(rows, columns, gpu)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return reduce(operator.xor, (INTEGERS[name](i, j, t) for name in names))

    expected = reduce(operator.xor, (kept(name, rows, columns, gpu) for name in names))
    q, k = torch.zeros(2, 1, 1, rows, 64, dtype=dtype, device=gpu).unbind()
    v = torch.eye(columns, dtype=dtype, device=gpu)[None, None]
    if packed:
        of_tokens = (x[0].transpose(0, 1) for x in (q, k, v))
        starts = torch.tensor([0, rows], device=gpu)
        out = mr.attention_varlen(*of_tokens, starts, mask_mod=mask).transpose(0, 1)[None]
    else:
        out = mr.attention(q, k, v, mask_mod=mask)
    assert torch.equal(out[0, 0] != 0, expected)
    blocks = mr.block_mask(mask, None, None, rows, columns, block_size=1, device=gpu)
    assert torch.equal(blocks.kinds[0, 0] != 0, expected)


@pytest.mark.parametrize("packed", (False, True), ids=("batch", "packed"))
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_integers(dtype: torch.dtype, packed: bool, gpu: torch.device) -> None:
    check_integers(dtype, gpu, packed)


@SIMT
@pytest.mark.parametrize("dtype", (*WIDE, torch.bfloat16), ids=name_of)
def test_integers_without_tensor_cores(dtype: torch.dtype, gpu: torch.device) -> None:
    check_integers(dtype, gpu)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_functions(make: Any, dtype: torch.dtype, gpu: torch.device) -> None:
    check(make, SHAPES[0], dtype, gpu)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", (mods.alibi, mods.document), ids=lambda make: make.__name__)
def test_widths(make: Any, shape: tuple[int, ...], gpu: torch.device) -> None:
    check(make, shape, torch.bfloat16, gpu)


@pytest.mark.parametrize("options", ({"causal": True}, {"window": (40, 3), "scale": -0.2}), ids=str)
def test_bands(options: dict[str, Any], gpu: torch.device) -> None:
    check(mods.learned, SHAPES[0], torch.float16, gpu, **options)


@pytest.mark.parametrize("shape", ((2, 4, 2, 200, 333, 64, 64), (1, 4, 1, 700, 900, 128, 128)), ids=str)
@pytest.mark.parametrize(
    "make", (mods.document, mods.sliding_window, mods.nothing_kept), ids=lambda m: m.__name__
)
def test_block_mask(make: Any, shape: tuple[int, ...], gpu: torch.device) -> None:
    """Tiles of queries and of keys are skipped, also of heads that share keys."""
    check(make, shape, torch.bfloat16, gpu, blocked=True)
    check(make, shape, torch.bfloat16, gpu, blocked=True, causal=True)


def far_apart(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    """Whole blocks, tiles that keep nothing, and a head that keeps nothing."""
    return Case(None, lambda b, h, i, j: ((i // 128 - j // 128) % 3 == 1) & (h != 1))


def test_whole_blocks(gpu: torch.device) -> None:
    check(far_apart, (2, 4, 2, 900, 1000, 128, 64), torch.float16, gpu, blocked=True)


def test_many_jobs(gpu: torch.device) -> None:
    """More tiles than multiprocessors: a block takes one after another, of different lengths."""
    check(mods.document, (4, 16, 8, 600, 600, 64, 64), torch.bfloat16, gpu, blocked=True)
    check(mods.alibi, (4, 16, 8, 600, 600, 64, 64), torch.bfloat16, gpu)


def test_deterministic(deterministic: None, gpu: torch.device) -> None:
    """Two runs give the same bits, also where tiles are skipped."""
    leaves = operands(SHAPES[0], torch.bfloat16, gpu)
    blocks = mr.block_mask(
        lambda b, h, i, j: (i - j).abs() < 40, None, None, 200, 333, device=gpu, block_size=32
    )
    found = [
        results(lambda *t: mr.attention(*t, block_mask=blocks, return_lse=True), leaves) for _ in range(2)
    ]
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_deterministic_without_blocks(deterministic: None, gpu: torch.device) -> None:
    """Blocks of the kernel add in turn: the same bits, and right ones."""
    slopes = torch.rand(4, device=gpu)
    leaves = operands((2, 4, 2, 500, 700, 128, 128), torch.bfloat16, gpu)
    score_mod = lambda s, b, h, i, j: s + slopes[h] * (j - i)  # noqa: E731
    found = [
        results(lambda *t: mr.attention(*t, score_mod=score_mod, return_lse=True), leaves) for _ in range(2)
    ]
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
    check(mods.alibi, SHAPES[0], torch.bfloat16, gpu, causal=True)


def by_distance(B: int, H: int, M: int, N: int, **like: Any) -> Case:
    """A learned entry for each distance up to 20, and one for all beyond, which most elements read."""
    table = torch.randn(H, 41, dtype=torch.float64).to(**like).requires_grad_()
    return Case(lambda s, b, h, i, j: s + table[h, (j - i).clamp(-20, 20) + 20], None, (table,))


@pytest.mark.parametrize("width", (64, 128))
def test_entries_that_most_elements_read(width: int, gpu: torch.device) -> None:
    check(by_distance, (2, 4, 2, 500, 700, width, width), torch.bfloat16, gpu)


def in_mode(deterministic: bool, case: Case, leaves: list[Tensor], **options: Any) -> list[Tensor]:
    """Results and gradients, those of captured tensors last."""
    given = {"score_mod": case.score_mod, "mask_mod": case.mask_mod, "return_lse": True, **options}
    torch.use_deterministic_algorithms(deterministic)
    return results(lambda *t: mr.attention(*t, **given), [*leaves, *case.captured])


@pytest.mark.parametrize("width", (64, 128, 256))
@pytest.mark.parametrize("make", (by_distance, mods.relative_position), ids=lambda m: m.__name__)
def test_deterministic_tables(
    make: Any, width: int, tier: str, deterministic: None, gpu: torch.device
) -> None:
    """The kernels run twice, and add integers: the same bits, and right ones."""
    shape = (2, 4, 2, 500, 700, width, width)
    case, leaves = make(2, 4, 500, 700, dtype=torch.float32, device=gpu), operands(shape, torch.bfloat16, gpu)
    before = counts()
    first = in_mode(True, case, leaves)
    taken = {path: n for path, n in (counts() - before).items() if "backward" in path}
    of = "sm80" if width == 256 else tier
    assert taken == {f"modified_attention_backward/cuda/{of}/deterministic/bfloat16": 2}
    for one, other in zip(first, in_mode(True, case, leaves), strict=True):
        assert torch.equal(one, other)
    check(make, shape, torch.bfloat16, gpu)


def test_deterministic_tables_of_masks(deterministic: None, gpu: torch.device) -> None:
    """Where tiles are skipped, rows see no key, and weights are dropped."""
    check(mods.relative_position, (2, 4, 2, 900, 1000, 64, 64), torch.bfloat16, gpu, blocked=True)
    check(by_distance, SHAPES[1], torch.float16, gpu, window=(40, 3), scale=-0.2)
    case, leaves = (
        by_distance(2, 4, 200, 333, dtype=torch.float32, device=gpu),
        operands(SHAPES[0], torch.bfloat16, gpu),
    )
    options = {"dropout_p": 0.3, "seed": 5}
    first, second, atomic = (in_mode(mode, case, leaves, **options) for mode in (True, True, False))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(first[-1], atomic[-1], rtol=1e-4, atol=1e-5)


def test_deterministic_tables_of_weights(deterministic: None, gpu: torch.device) -> None:
    leaves, table = (
        operands(SHAPES[0], torch.bfloat16, gpu),
        torch.randn(4, 533, device=gpu, requires_grad=True),
    )
    weight = lambda score, head, q_idx, kv_idx: torch.sigmoid(score + table[head, q_idx - kv_idx + 333])  # noqa: E731
    upstream = torch.randn(2, 4, 200, 64, device=gpu, dtype=torch.bfloat16)
    found = []
    for mode in (True, True, False):
        torch.use_deterministic_algorithms(mode)
        found.append(torch.autograd.grad(mr.attend(*leaves, weight=weight), table, upstream)[0])
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=1e-4)


def test_deterministic_tables_that_are_not_finite(deterministic: None, gpu: torch.device) -> None:
    """NaN and infinities are in the same entries as with atomic additions; other entries are near theirs."""
    M, N = 200, 333
    table = torch.rand(4, M + N, device=gpu)
    table[:, [1, N, M - 1 + N]] = 0  # which one element of a head reads, many, and one
    table.requires_grad_()
    case = Case(lambda s, b, h, i, j: s + table[h, i - j + N].sqrt(), None, (table,))
    leaves = operands((1, 4, 2, M, N, 64, 64), torch.bfloat16, gpu)
    first, second, atomic = (in_mode(mode, case, leaves)[-1] for mode in (True, True, False))
    assert torch.equal(first.nan_to_num(7.5, 1, -1), second.nan_to_num(7.5, 1, -1))
    assert bool(first[:, [1, M - 1 + N]].isinf().all()) and bool(first[:, N].isnan().all())
    torch.testing.assert_close(first, atomic, rtol=1e-4, atol=1e-4, equal_nan=True)
    with torch.no_grad():
        leaves[0][0, 2, 3] = math.nan
    case = mods.relative_position(1, 4, M, N, dtype=torch.float32, device=gpu)
    touched = torch.zeros(4, M + N, dtype=torch.bool, device=gpu)
    touched[2, 3 + N - torch.arange(3 + 31)] = True  # the keys that query 3 keeps
    assert torch.equal(in_mode(True, case, leaves)[-1].isnan(), touched)


def test_path_and_explanation(tier: str, gpu: torch.device) -> None:
    leaves = operands(SHAPES[0], torch.bfloat16, gpu)
    mask = lambda b, h, i, j: i >= j  # noqa: E731
    before = mr._C.path_counts()
    mr.attention(*leaves, mask_mod=mask).sum().backward()
    after = mr._C.path_counts()
    taken = {path for path in after if after[path] > before.get(path, 0)}
    explained = mr.explain("attention", *leaves, mask_mod=mask)
    assert (
        {explained.forward, explained.backward}
        == taken
        == {
            f"modified_attention_forward/cuda/{tier}/bfloat16",
            f"modified_attention_backward/cuda/{tier}/bfloat16",
        }
    )


def simt_paths(dtype: torch.dtype) -> set[str]:
    return {f"modified_attention_{each}/cuda/simt/{name_of(dtype)}" for each in ("forward", "backward")}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    ((SHAPES[0], torch.float32), (SHAPES[0], torch.float64), (RAGGED[-1], torch.bfloat16)),
    ids=str,
)
def test_what_tensor_cores_do_not_take(shape: Any, dtype: torch.dtype, gpu: torch.device) -> None:
    """SIMT kernels take it, whatever other calls take, and explain says so."""
    leaves = operands(shape, dtype, gpu)
    mask = lambda b, h, i, j: i >= j  # noqa: E731
    before = counts()
    mr.attention(*leaves, mask_mod=mask).sum().backward()
    explained = mr.explain("attention", *leaves, mask_mod=mask)
    assert {explained.forward, explained.backward} == set(counts() - before) == simt_paths(dtype)
    check(mods.learned, shape, dtype, gpu)


@SIMT
@pytest.mark.parametrize("dtype", WIDE, ids=name_of)
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_functions_on_simt(make: Any, dtype: torch.dtype, gpu: torch.device) -> None:
    check(make, SHAPES[0], dtype, gpu)


@SIMT
@pytest.mark.parametrize("dtype", (*WIDE, *HALVES), ids=name_of)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
@pytest.mark.parametrize("make", (mods.alibi, mods.document), ids=lambda make: make.__name__)
def test_any_width(make: Any, shape: tuple[int, ...], dtype: torch.dtype, gpu: torch.device) -> None:
    check(make, shape, dtype, gpu)


@SIMT
@pytest.mark.parametrize("dtype", WIDE, ids=name_of)
@pytest.mark.parametrize("options", ({"causal": True}, {"window": (40, 3), "scale": -0.2}), ids=str)
def test_bands_on_simt(options: dict[str, Any], dtype: torch.dtype, gpu: torch.device) -> None:
    check(mods.learned, RAGGED[0], dtype, gpu, **options)


@SIMT
@pytest.mark.parametrize("dtype", WIDE, ids=name_of)
@pytest.mark.parametrize("make", (far_apart, mods.document), ids=lambda m: m.__name__)
def test_block_mask_on_simt(make: Any, dtype: torch.dtype, gpu: torch.device) -> None:
    check(make, (2, 4, 2, 300, 400, 20, 12), dtype, gpu, blocked=True)
    check(make, (2, 4, 2, 300, 400, 20, 12), dtype, gpu, blocked=True, causal=True)


@SIMT
@pytest.mark.parametrize("dtype", WIDE, ids=name_of)
def test_deterministic_on_simt(dtype: torch.dtype, deterministic: None, gpu: torch.device) -> None:
    """One block adds to a gradient: the same bits, and right ones."""
    leaves, slopes = operands(SHAPES[0], dtype, gpu), torch.rand(4, device=gpu)
    score_mod = lambda s, b, h, i, j: s + slopes[h] * (j - i)  # noqa: E731
    found = [
        results(lambda *t: mr.attention(*t, score_mod=score_mod, return_lse=True), leaves) for _ in range(2)
    ]
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
    check(mods.learned, SHAPES[0], dtype, gpu)


@SIMT
def test_scale_of_float64(gpu: torch.device) -> None:
    """It is not rounded to float32."""
    check(mods.softcap, RAGGED[0], torch.float64, gpu, scale=1 / 3)


@SIMT
def test_gradients_that_are_not_wanted(gpu: torch.device) -> None:
    q, k, v = (t.detach() for t in operands(RAGGED[0], torch.float32, gpu))
    slopes = torch.rand(2, device=gpu, requires_grad=True)
    score_mod = lambda s, b, h, i, j: s + slopes[h] * (j - i)  # noqa: E731
    upstream = torch.randn(2, 2, 70, 3, device=gpu)
    (alone,) = torch.autograd.grad(mr.attention(q, k, v, score_mod=score_mod), slopes, upstream)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = mr.attention(*leaves, score_mod=score_mod)
    *_, d_v, beside = torch.autograd.grad(out, [*leaves, slopes], upstream, retain_graph=True)
    (of_v,) = torch.autograd.grad(out, v, upstream)
    torch.testing.assert_close(alone, beside)
    torch.testing.assert_close(of_v, d_v)


@pytest.mark.tiers("simt", "sm80", "sm90")
def test_empty(gpu: torch.device) -> None:
    score_mod = lambda s, b, h, i, j: s + i - j  # noqa: E731
    for shape in ((0, 2, 1, 3, 4, 8, 8), (1, 2, 1, 0, 4, 8, 8), (1, 2, 1, 3, 0, 8, 8)):
        leaves = operands(shape, torch.bfloat16, gpu)
        out, lse = mr.attention(*leaves, score_mod=score_mod, return_lse=True)
        assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, torch.full_like(lse, -math.inf))
        for gradient in torch.autograd.grad(out.sum(), leaves):
            assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.tiers("simt", "sm80", "sm90")
def test_graph(gpu: torch.device) -> None:
    """A CUDA graph of a call replays it on new inputs."""
    slopes = torch.rand(4, device=gpu)
    q, k, v = (t.detach() for t in operands(SHAPES[0], torch.bfloat16, gpu))
    score_mod = lambda s, b, h, i, j: s + slopes[h] * (j - i)  # noqa: E731
    mr.attention(q, k, v, score_mod=score_mod)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mr.attention(q, k, v, score_mod=score_mod)
    q.normal_(), slopes.uniform_()
    graph.replay()
    assert torch.equal(out, mr.attention(q, k, v, score_mod=score_mod))
