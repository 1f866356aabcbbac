"""stat.uniform: the same random numbers in every pass and on every engine, and numbers that look random."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from host_kernels import HostKernels
from specimens import name_of
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import monoidreduce as mr
from monoidreduce.folds import number_passes
from monoidreduce.folds.program import streams
from monoidreduce.folds.program.tracing import trace

stat = mr.stat
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SEEDS = (0, 1, 2**40 + 3, -5, -(2**63), 2**63 - 1)
WORD, WIDE = 2**32, 2**64


def word(seed: int, leading: int, paired: int, other: int) -> int:
    """32 bits of a counter, by integers of Python."""
    x = (seed + 0x9E3779B97F4A7C15 + leading * 0xD1342543DE82EF95) % WIDE
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WIDE
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WIDE
    stream = x ^ x >> 31
    left, right = paired - (paired & 8), stream // WORD ^ other
    for n in range(7):
        product = 0xD256D193 * left
        left, right = product // WORD ^ (stream + n * 0x9E3779B9) % WORD ^ right, product % WORD
    return right if paired & 8 else left


def number(seed: int, leading: int, row: int, column: int) -> float:
    return (word(seed, leading, column, row) // 2**9 + 0.5) / 2**23


def number_16(seed: int, leading: int, row: int, column: int) -> float:
    of_two = word(seed, leading, row, column - (column & 8))
    return float(of_two // 2**16 if column & 8 else of_two % 2**16)


def numbers(seed: int | Tensor, rows: int, columns: int, leading: int | Tensor = 0) -> Tensor:
    """[..., rows, columns], in torch. seed, leading: numbers, or tensors [...]."""
    stream = streams.stream(torch.as_tensor(seed), torch.as_tensor(leading))
    return streams.uniform(stream[..., None, None], torch.arange(rows)[:, None], torch.arange(columns))


def numbers_16(seed: int | Tensor, rows: int, columns: int, leading: int | Tensor = 0) -> Tensor:
    """[..., rows, columns] of int64, in torch, as `numbers`."""
    stream = streams.stream(torch.as_tensor(seed), torch.as_tensor(leading))
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    return streams.uniform_16(stream[..., None, None], row, column).long()


def folded(seed: Any, a: Tensor, columns: int, of: str = "__call__") -> Tensor:
    """[..., columns]: the numbers that a fold sees. The vector of a column is one of the unit matrix."""
    fold = mr.statistics(lambda score, v: dict(u=stat.total(stat.uniform(seed) * v)))
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    b, v = torch.ones(columns, a.shape[-1], dtype=a.dtype), torch.eye(columns, dtype=dtype)
    found: Tensor = getattr(fold, of)(a, b, column={"v": v}).u
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_generator(seed: int) -> None:
    rows, columns = (0, 1, 2, 37, 2**31 - 2), (0, 1, 7, 8, 9, 15, 16, 24, 1000, 2**31 - 2)
    for leading in rows:
        stream = streams.stream(torch.tensor(seed), torch.tensor(leading))
        found = streams.uniform(stream, torch.tensor(rows)[:, None], torch.tensor(columns))
        assert found.dtype == torch.float32
        expected = [[number(seed, leading, i, j) for j in columns] for i in rows]
        assert torch.equal(found.double(), torch.tensor(expected, dtype=torch.float64))
        for first, second in ((rows, columns), (columns, rows)):
            found = streams.uniform_16(stream, torch.tensor(first)[:, None], torch.tensor(second))
            expected = [[number_16(seed, leading, i, j) for j in second] for i in first]
            assert torch.equal(found, torch.tensor(expected))


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("rows, columns", ((37, 43), (5, 700), (130, 1)))
def test_engine(rows: int, columns: int, dtype: torch.dtype) -> None:
    a = torch.zeros(rows, 3, dtype=dtype)
    for seed in SEEDS:
        expected = numbers(seed, rows, columns)
        assert torch.equal(folded(seed, a, columns).float(), expected), seed
        assert torch.equal(folded(torch.tensor(seed), a, columns).float(), expected), seed


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_reference_and_chunks_of_columns(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    a, expected = torch.zeros(37, 3, dtype=dtype), numbers(7, 37, 600)
    assert torch.equal(folded(7, a, 600, "reference").float(), expected)
    monkeypatch.setattr(number_passes, "has_kernels", lambda a: False)
    assert torch.equal(folded(7, a, 600).float(), expected)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=name_of)
def test_generated_source(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HostKernels(tmp_path).install(monkeypatch)
    fold = mr.statistics(
        lambda score: dict(best=stat.largest(stat.uniform(3)), sum=stat.total(stat.uniform(4)))
    )
    found = fold(torch.zeros(37, 3, dtype=dtype), torch.zeros(43, 3, dtype=dtype))
    best = numbers(3, 37, 43).max(1)
    assert torch.equal(found.best.value.float(), best.values) and torch.equal(found.best.index, best.indices)
    torch.testing.assert_close(found.sum, numbers(4, 37, 43).to(dtype).sum(1))


def test_each_leading_index_counts() -> None:
    expected = numbers(1, 5, 9, torch.arange(6))
    assert torch.equal(folded(1, torch.zeros(2, 3, 5, 4), 9).flatten(0, 1), expected)
    assert torch.equal(folded(1, torch.zeros(6, 5, 4), 9), expected)
    assert expected.unique().numel() == expected.numel()


def test_gradients() -> None:
    """Forward and backward see the same numbers, also in the passes that exchange rows and columns."""
    seed = torch.tensor(11)

    @mr.statistics
    def dropped(score: Any, x: Any, y: Any, v: Any) -> dict[str, Any]:
        p = stat.softmax(score + x * y)
        keep = torch.where(stat.uniform(seed) >= 0.3, 1 / 0.7, 0.0)
        return dict(out=p.mean(keep * v), f=p.mean(keep * score), t=stat.total(keep * torch.sin(x + y)))

    torch.manual_seed(0)
    shapes = ((2, 9, 4), (21, 4), (2, 9), (21,), (21, 3))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    a, b, x, y, v = leaves
    found = dropped(a, b, row={"x": x}, column={"y": y, "v": v})
    keep = (numbers(11, 9, 21, torch.arange(2)) >= 0.3) / 0.7
    score = a @ b.T
    p = keep * (score + x[..., None] * y).softmax(-1)
    expected = p @ v, (p * score).sum(-1), (keep * torch.sin(x[..., None] + y)).sum(-1)
    upstream = [torch.randn_like(t) for t in expected]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_new_seed_is_the_same_program() -> None:
    texts = {
        trace(lambda score, seed=seed: dict(t=stat.total(stat.uniform(seed) * score)), {}, {}).text
        for seed in (1, 2, torch.tensor(3), torch.tensor(4, dtype=torch.int64))
    }
    assert len(texts) == 1


def test_seeds_of_narrow_dtypes() -> None:
    a = torch.zeros(4, 2)
    for dtype in (torch.uint8, torch.int32):
        assert torch.equal(folded(torch.tensor(9, dtype=dtype), a, 5), numbers(9, 4, 5))


def test_several_seeds_in_a_function() -> None:
    one, two = torch.tensor(1), 2
    fold = mr.statistics(lambda score: dict(n=stat.count(stat.uniform(one) < stat.uniform(two))))
    expected = (numbers(1, 6, 50) < numbers(2, 6, 50)).sum(1)
    assert torch.equal(fold(torch.zeros(6, 2), torch.zeros(50, 2)).n, expected)


def test_compiled() -> None:
    torch.compiler.reset()
    counts = CompileCounter()
    a, b = torch.randn(5, 3), torch.randn(9, 3)
    seed = torch.tensor(0)

    @mr.statistics
    def noisy(score: Any) -> dict[str, Any]:
        return dict(t=stat.total(stat.uniform(seed) * score))

    compiled = torch.compile(lambda a, b: noisy(a, b).t, backend=counts, fullgraph=True)
    for value in (1, 2, 3):
        seed.fill_(value)
        torch.testing.assert_close(compiled(a, b), (numbers(value, 5, 9) * (a @ b.T)).sum(1))
    assert counts.frame_count == 1


def test_members_of_a_batch_have_the_same_numbers() -> None:
    fold = mr.statistics(lambda score: dict(t=stat.total(stat.uniform(5) * score)))
    a, b = torch.ones(4, 6, 1), torch.ones(11, 1)
    found = torch.vmap(lambda a: fold(a, b).t)(a)
    torch.testing.assert_close(found, numbers(5, 6, 11).sum(1).expand(4, 6))


@pytest.mark.parametrize("seed", (5, torch.tensor(5)), ids=("int", "tensor"))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=name_of)
def test_functions_of_attention(dtype: torch.dtype, seed: Any) -> None:
    """The numbers of a fold of rows [batch, heads, queries], or of rows within a packed sequence."""
    B, H, M, N = 2, 3, 11, 19
    u = numbers(5, M, N, torch.arange(B * H)).view(B, H, M, N)
    q, k = torch.zeros(B, H, M, 4, dtype=dtype), torch.zeros(B, H, N, 4, dtype=dtype)
    v = torch.eye(N, dtype=dtype).expand(B, H, N, N)
    noisy = mr.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 3.0 * stat.uniform(seed))
    torch.testing.assert_close(noisy, (3.0 * u).softmax(-1).to(dtype))
    masked = mr.attention(q, k, v, mask_mod=lambda b, h, i, j: stat.uniform(seed) < 0.4)
    assert torch.equal(masked != 0, u < 0.4)
    found = mr.attend(q, k, v, weight=lambda s: s + stat.uniform(seed))
    assert torch.equal(found.float(), u)
    starts = torch.tensor([0, 4, 11])
    one = [t[0].transpose(0, 1) for t in (q, k[:, :, :M], v[:, :, :M, :M])]
    packed = mr.attention_varlen(*one, starts, mask_mod=lambda b, h, i, j: stat.uniform(seed) < 0.4)
    for sequence, (first, last) in enumerate(((0, 4), (4, 11))):
        within = packed[first:last, :, first:last].transpose(0, 1) != 0
        of_sequence = numbers(5, last - first, last - first, sequence * H + torch.arange(H))
        assert torch.equal(within, of_sequence < 0.4)


def test_block_masks_have_no_random_numbers() -> None:
    with pytest.raises(mr.TraceError, match="uniform in a block mask"):
        mr.block_mask(lambda b, h, i, j: stat.uniform(1) < 0.5, None, None, 8, 8)


REFUSED: dict[str, Any] = {"a float": 1.0, "a bool": True, "too large": 2**63, "of reals": torch.tensor(1.0)}
REFUSED |= {"with axes": torch.tensor([1]), "a condition": torch.tensor(True), "None": None}


@pytest.mark.parametrize("seed", REFUSED.values(), ids=REFUSED)
def test_seeds_that_are_refused(seed: Any) -> None:
    with pytest.raises(mr.TraceError, match="seed: expected an int of 64 bits, or a 0-d tensor"):
        folded(seed, torch.zeros(2, 2), 3)


def test_uniform_outside_of_a_function() -> None:
    with pytest.raises(TypeError, match=r"mr\.stat\.uniform is for functions decorated with mr\.statistics"):
        stat.uniform(0)


# How likely numbers are if they are random. All seeds are fixed, so these tests do not vary.


def deviation(counts: Tensor, expected: float) -> float:
    """How many standard deviations the chi-square statistic of these counts is off."""
    free = counts.numel() - 1
    return ((counts.double() - expected).square().sum().item() / expected - free) / math.sqrt(2 * free)


def test_moments() -> None:
    u = numbers(0, 1000, 1000).double()
    assert u.min() > 0 and u.max() < 1
    for power in range(1, 7):
        mean, of_square = 1 / (power + 1), 1 / (2 * power + 1)
        error = math.sqrt((of_square - mean**2) / u.numel())
        assert abs(u.pow(power).mean().item() - mean) < 4 * error, power


@pytest.mark.parametrize("along", ("leading", "rows", "columns", "seeds"))
def test_bins(along: str) -> None:
    """Numbers along each axis fill 256 bins alike; so do the lowest 8 bits."""
    n = torch.arange(2**16)
    u = {
        "leading": lambda: numbers(3, 1, 1, n),
        "rows": lambda: numbers(3, len(n), 1),
        "columns": lambda: numbers(3, 1, len(n)),
        "seeds": lambda: numbers(n, 1, 1),
    }[along]().flatten()
    whole = (u.double() * 2**23).floor().long()
    for bins in (whole >> 15, whole & 255):
        assert abs(deviation(torch.bincount(bins, minlength=256), len(n) / 256)) < 4


@pytest.mark.parametrize("step", (1, 2, 8, 16, 64))
@pytest.mark.parametrize("along", ("leading", "rows", "columns", "seeds"))
def test_neighbours_are_independent(along: str, step: int) -> None:
    """Pairs of numbers that are `step` apart fill a table of 32 x 32 alike. 8 apart they share a product."""
    if along == "seeds":
        u = numbers(torch.arange(400), 20, 128).flatten(1)
    elif along == "leading":
        u = numbers(1, 20, 128, torch.arange(400)).flatten(1)
    else:
        u = numbers(1, 1024, 1024)
        u = u.T if along == "columns" else u
    low, high = (u[:-step] * 32).long(), (u[step:] * 32).long()
    counts = torch.bincount((32 * low + high).flatten(), minlength=1024)
    assert abs(deviation(counts, low.numel() / 1024)) < 4


def test_bits_are_independent() -> None:
    """Each bit is set half of the time, given each bit of a neighbour in the row, the column and the seed."""
    u = (numbers(2, 512, 513).double() * 2**23).floor().long()
    other = (numbers(3, 512, 512).double() * 2**23).floor().long()
    bits = torch.arange(23)
    here = (u[:, :-1, None] >> bits & 1).double().flatten(0, 1) * 2 - 1
    for name, numbers_of in (("column", u[:, 1:]), ("row", u[:, :-1].roll(1, 0)), ("seed", other)):
        there = (numbers_of[..., None] >> bits & 1).double().flatten(0, 1) * 2 - 1
        correlation = here.T @ there / math.sqrt(len(here))
        assert correlation.abs().max() < 4.5, name
    assert here.sum(0).abs().max() / math.sqrt(len(here)) < 4


@pytest.mark.parametrize("along", ("leading", "rows", "columns", "seeds"))
def test_bins_of_16_bits(along: str) -> None:
    n = torch.arange(2**16)
    u = {
        "leading": lambda: numbers_16(3, 1, 1, n),
        "rows": lambda: numbers_16(3, len(n), 1),
        "columns": lambda: numbers_16(3, 1, len(n)),
        "seeds": lambda: numbers_16(n, 1, 1),
    }[along]().flatten()
    for bins in (u >> 8, u & 255):
        assert abs(deviation(torch.bincount(bins, minlength=256), len(n) / 256)) < 4


@pytest.mark.parametrize("down, across", ((0, 1), (1, 0), (0, 8), (8, 0), (8, 8), (16, 0), (0, 16), (1, 8)))
def test_neighbours_of_16_bits_are_independent(down: int, across: int) -> None:
    """Four elements, 8 rows and columns apart, share the 64 bits of a counter: they are independent too."""
    u = numbers_16(1, 1024, 1024)
    low = u[: 1024 - down, : 1024 - across]
    high = u[down:, across:]
    counts = torch.bincount((32 * (low >> 11) + (high >> 11)).flatten(), minlength=1024)
    assert abs(deviation(counts, low.numel() / 1024)) < 4


def test_the_four_numbers_of_a_counter_are_independent() -> None:
    """They fill a table of 8 x 8 x 8 x 8 alike, and no two of their 64 bits go together."""
    blocks = numbers_16(2, 2048, 2048).view(128, 2, 8, 128, 2, 8).permute(0, 2, 3, 5, 1, 4).reshape(-1, 4)
    at = ((blocks >> 13) * 8 ** torch.arange(4)).sum(1)
    assert abs(deviation(torch.bincount(at, minlength=4096), len(blocks) / 4096)) < 4
    bits = (blocks[..., None] >> torch.arange(16) & 1).flatten(1).double() * 2 - 1
    correlation = bits.T @ bits / math.sqrt(len(bits))
    assert correlation.fill_diagonal_(0).abs().max() < 4.5
    assert bits.sum(0).abs().max() / math.sqrt(len(bits)) < 4


@pytest.mark.parametrize("limit", (1, 6554, 2**15, 2**16 - 1))
def test_shares_of_16_bits(limit: int) -> None:
    """As many elements are below a limit as should be; counts of rows and of columns vary as they should."""
    n, p = 2048, limit / 2**16
    below, variance = numbers_16(5, n, n) < limit, n * p * (1 - p)
    for axis in (0, 1):
        off = below.sum(axis).double() - n * p
        assert abs(off.sum().item()) < 4 * math.sqrt(n * variance)
        # Each of these squares has mean 1 and variance 2 + 1 / variance - 6 / n.
        squares = (off.square() / variance).sum().item()
        assert abs(squares - n) < 4 * math.sqrt(n * (2 + 1 / variance - 6 / n))


def test_streams_differ() -> None:
    of_rows = streams.stream(torch.arange(4)[:, None], torch.arange(2**18))
    assert of_rows.unique().numel() == of_rows.numel()


def test_a_seed_for_each_row() -> None:
    """Data of rows: the numbers of a row are those of its own seed. That of an element is none."""
    fold = mr.statistics(lambda score, seed, v: dict(u=stat.total(stat.uniform(seed) * v)))
    a, seeds = torch.ones(4, 2), torch.tensor([3, 2**40, -1, 3])
    found = fold(a, torch.ones(9, 2), row={"seed": seeds}, column={"v": torch.eye(9)}).u
    for row, seed in enumerate(seeds.tolist()):
        assert torch.equal(found[row], numbers(seed, 4, 9)[row])
    wrong = mr.statistics(lambda score, column: dict(u=stat.total(stat.uniform(column))))
    with pytest.raises(mr.TraceError, match="seed: expected an int of 64 bits"):
        wrong(a, torch.ones(9, 2))
