"""I/O of attention's backward pass: what the simulator counts and computes, closed forms and bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from monoidreduce.io import (
    ALGORITHMS,
    CacheOverflow,
    Memory,
    attention_backward_graph,
    attention_forward_graph,
    attention_problem,
    best_algorithm,
    causal,
    compare,
    compulsory,
    dividing_point,
    flash1_backward,
    flash2_backward,
    flash_forward,
    flash_rows,
    gemm_naive,
    gemm_perfect,
    gemm_tiled,
    kept_blocks,
    large_cache,
    large_cache_theta,
    lower_bounds,
    matmul,
    no_cache,
    nonzeros,
    partition_of,
    product_graph,
    reference,
    regime,
    segment,
    simulate,
    small_cache,
    small_cache_theta,
    sparse_theta,
    sparse_theta_informal,
    theta,
    theta_forward,
    window,
)
from monoidreduce.theory.io.counts import large_cache_words, product_words, small_cache_words
from monoidreduce.theory.io.masks import keeps
from monoidreduce.theory.io.products import Tile, largest_tile


def assert_results(memory: Memory, kept: Tensor | None = None) -> None:
    """What a schedule wrote is what autograd computes, and it left the cache empty."""
    expected = reference(memory.matrices, kept)
    written = {"g", "dQ", "dK", "dV", "O", "l"} & memory.matrices.keys()
    for name in written:
        error = (memory[name] - expected[name]).abs().max() / expected[name].abs().max()
        assert error < 1e-10, name
    assert memory.held == 0


def slope(count: Callable[[int], float], sizes: list[int]) -> float:
    """The exponent of M in a power law through the counts, by least squares."""
    x = torch.tensor([math.log(words) for words in sizes], dtype=torch.float64)
    y = torch.tensor([math.log(count(words)) for words in sizes], dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


# Words moved for n = 256, d = 32


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(64, 4154368, marks=pytest.mark.release),
        (256, 2384896),
        (1024, 1500160),
        (4096, 1057792),
    ],
)
def test_algorithm_6(words: int, expected: int) -> None:
    memory = simulate(small_cache, n=256, d=32, words=words)
    assert memory.io == expected
    assert memory.peak <= words
    assert_results(memory)


def test_phases_of_algorithm_6() -> None:
    memory = simulate(small_cache, n=256, d=32, words=1024)
    assert memory.phases == {"f": 499712, "q": 368640, "p": 327680, "g": 304128}
    assert sum(memory.phases.values()) == memory.io == memory.reads + memory.writes


@pytest.mark.parametrize("words", [16, 64, 256, 1000, 4096])
def test_phase_3_of_algorithm_6_does_not_depend_on_the_cache(words: int) -> None:
    assert simulate(small_cache, n=64, d=16, words=words).phases["p"] == 5 * 64**2


@pytest.mark.parametrize(
    ("policy", "words", "expected"),
    [
        ("paper", 1024, 656640),
        ("paper", 4096, 214272),
        ("paper", 8192, 214272),
        ("paper", 16384, 214272),
        ("swapped", 4096, 214272),
        ("swapped", 8192, 140544),
        ("swapped", 16384, 103680),
    ],
)
def test_algorithm_9(policy: str, words: int, expected: int) -> None:
    memory = simulate(large_cache, n=256, d=32, words=words, policy=policy, strict=False)
    assert memory.io == expected
    assert_results(memory)


@pytest.mark.parametrize(("words", "expected"), [(1024, 1272576), (4096, 340736)])
def test_flash_attention_2(words: int, expected: int) -> None:
    memory = simulate(flash2_backward, n=256, d=32, words=words)
    assert memory.io == expected
    assert_results(memory)


def test_blocks_of_algorithm_9_as_printed_do_not_fit() -> None:
    with pytest.raises(CacheOverflow, match="the cache has 1024"):
        simulate(large_cache, n=256, d=32, words=1024)
    assert simulate(large_cache, n=256, d=32, words=1024, strict=False).peak == 2384


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_the_order_of_products_in_algorithm_8(order: str) -> None:
    """Units of 2 n^2 d: 7.25 as printed; for rows 3.375 if dQ is summed first, and the same I/O."""
    options = {"n": 256, "d": 32, "words": 1024, "order": order, "strict": False}
    as_printed, sum_first = (simulate(large_cache, **options, sum_first=first) for first in (False, True))
    assert as_printed.io == sum_first.io
    assert (as_printed.flops, sum_first.flops) == (7.25 * 2 * 256**2 * 32, 3.375 * 2 * 256**2 * 32)
    assert_results(as_printed)
    assert_results(sum_first)


# All algorithms


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("n", "d"), [(64, 8), (50, 12), pytest.param(80, 16, marks=pytest.mark.release)])
def test_closed_forms_results_and_bounds(name: str, n: int, d: int) -> None:
    """Simulator and closed form agree, also where blocks divide nothing. No count is below a bound."""
    algorithm = ALGORITHMS[name]
    ran = 0
    for words in (50, 333, d * d, 2 * d * d, 3 * d * d + 7, 9 * d * d, 64 * d * d, 3 * n * n + 2 * n * d + n):
        try:
            expected = algorithm.words(n, d, words)
        except ValueError as error:
            with pytest.raises((ValueError, CacheOverflow), match="words"):
                simulate(algorithm.schedule, n=n, d=d, words=words)
            assert str(error).startswith("words: expected at least")
            continue
        memory = simulate(algorithm.schedule, n=n, d=d, words=words, strict=algorithm.fits)
        assert memory.io == expected
        assert_results(memory)
        assert memory.io >= compulsory(n, d, algorithm.computes).words
        assert memory.io >= segment(n, d, max(words, memory.peak)).words
        ran += 1
    assert ran >= (1 if name == "Algorithm 1" else 3)


def test_the_least_cache_is_enough() -> None:
    """What an algorithm asks for when it refuses a cache is enough; a word less is refused."""
    n, d = 24, 4
    for name, algorithm in ALGORITHMS.items():
        if not algorithm.fits or name == "Algorithm 6":
            continue
        with pytest.raises(ValueError, match="expected at least") as refused:
            algorithm.words(n, d, 4)
        least = int(str(refused.value).split("at least ")[1].split(",")[0])
        assert simulate(algorithm.schedule, n=n, d=d, words=least).peak <= least
        with pytest.raises(ValueError, match=f"words: expected at least {least}, got {least - 1}"):
            algorithm.words(n, d, least - 1)


@pytest.mark.parametrize("n", [64, 128, 256, 512])
@pytest.mark.parametrize("d", [8, 16, 32, 64])
def test_no_count_is_below_a_bound(n: int, d: int) -> None:
    for algorithm in ALGORITHMS.values():
        if not algorithm.fits:
            continue  # holds more than M, so bounds for M do not apply
        for words in range(d, 64 * d * d, 7 * d):
            try:
                count = algorithm.words(n, d, words)
            except ValueError:
                continue
            assert count >= compulsory(n, d, algorithm.computes).words
            assert count >= segment(n, d, words).words


def test_algorithm_6_where_blocks_divide_the_matrices() -> None:
    n, d = 256, 32
    for size in (2, 4, 8, 16, 32):
        expected = 6 * (n * n * d + n * d * d) // size + 9 * n * n + 3 * n * d + d * d
        assert small_cache_words(n, d, 4 * size * size) == expected


def test_words_at_the_size_of_a_model() -> None:
    """n = 8192, d = 128, in units of n^2: the table of docs/io.md."""
    names = ("Algorithm 6", "Algorithm 9", "flash rows")
    expected = {
        1024: ("57.80", "130.13", "256.54"),
        4096: ("33.42", "32.63", "28.81"),
        16384: ("21.23", "8.25", "6.50"),
        65536: ("15.14", "2.16", "1.74"),
        262144: ("12.63", "2.16", "0.57"),
    }
    for words, row in expected.items():
        counts = (ALGORITHMS[name].words(8192, 128, words) / 8192**2 for name in names)
        assert tuple(f"{count:.2f}" for count in counts) == row
    assert f"{ALGORITHMS['FlashAttention-2 backward'].words(8192, 128, 16384) / 8192**2:.2f}" == "16.71"
    assert f"{large_cache_words(8192, 128, 262144, policy='swapped') / 8192**2:.2f}" == "0.63"
    assert f"{theta(8192, 128, 16384).words / 8192**2:.2f}" == "1.02"
    assert f"{segment(8192, 128, 16384).words / 8192**2:.2f}" == "0.50"


def test_slopes() -> None:
    """Exponents of M: -1 with the block sizes exchanged, and -1/2 of Algorithm 6 less 9 n^2."""
    n, d = 8192, 64
    large = [d * d * 2**step for step in range(5)]
    assert large[-1] == n * d // 8
    assert slope(lambda words: large_cache_words(n, d, words, policy="swapped"), large) == pytest.approx(
        -1, abs=0.1
    )
    assert len({large_cache_words(n, d, words) for words in large if words >= 4 * d * d}) == 1
    small = [64 * 4**step for step in range(4)]
    assert small[-1] == d * d
    assert slope(lambda words: small_cache_words(n, d, words) - 9 * n * n, small) == pytest.approx(
        -0.5, abs=0.05
    )


def test_best_algorithm() -> None:
    """The GTX 1060 of section 4.2, 48 KB of float32: not the algorithm for a small cache."""
    assert regime(128, 12288) == "small"
    assert best_algorithm(8192, 128, 12288) == "flash rows"
    assert f"{small_cache_words(8192, 128, 12288) / 8192**2:.2f}" == "23.95"
    assert f"{ALGORITHMS['flash rows'].words(8192, 128, 12288) / 8192**2:.2f}" == "8.82"
    assert f"{ALGORITHMS['FlashAttention-2 backward'].words(8192, 128, 12288) / 8192**2:.2f}" == "22.48"
    assert best_algorithm(8192, 128, 1024) == "Algorithm 6"
    with pytest.raises(ValueError, match="words: expected at least 4, got 3"):
        best_algorithm(8192, 128, 3)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: simulate(small_cache, n=8, d=2, words=3), "words: expected at least 4, got 3"),
        (lambda: simulate(small_cache, n=0, d=2, words=9), "n: expected at least 1, got 0"),
        (lambda: simulate(small_cache, n=8, d=-1, words=9), "d: expected at least 1, got -1"),
        (
            lambda: simulate(large_cache, n=8, d=2, words=99, policy="best"),
            "policy: expected one of paper, swapped, fit, got 'best'",
        ),
        (
            lambda: simulate(large_cache, n=8, d=2, words=99, order="diagonal"),
            "order: expected one of rows, columns, got 'diagonal'",
        ),
        (
            lambda: sparse_theta(1, 1, 1, 1, 1, form="printed"),
            "form: expected one of as_stated, safe, got 'printed'",
        ),
        (lambda: compulsory(8, 2, "dX"), "problem: expected one of g, O, dQ, dK, dV, got 'dX'"),
        (lambda: compare(8, 2, [64, 0]), r"cache\[1\]: expected at least 1, got 0"),
        (lambda: compare(8, 0, [64]), "d: expected at least 1, got 0"),
        (lambda: theta(8, 2, 0), "words: expected at least 1, got 0"),
        (lambda: theta(-64, 2, 9), "n: expected at least 0, got -64"),
        (lambda: theta_forward(8, 0, 9), "d: expected at least 1, got 0"),
        (lambda: large_cache_theta(8, 2, 0), "words: expected at least 1, got 0"),
        (lambda: small_cache_theta(8, 2, -4), "words: expected at least 1, got -4"),
        (lambda: segment(-64, 2, 9), "n: expected at least 0, got -64"),
        (lambda: segment(8, 2, 0), "words: expected at least 1, got 0"),
        (lambda: segment(8, 2, 9, pairs=-1), "pairs: expected at least 0, got -1"),
        (lambda: lower_bounds(8, 2, 0), "words: expected at least 1, got 0"),
        (lambda: compulsory(-5, 2), "n: expected at least 0, got -5"),
        (lambda: regime(-5, 2), "d: expected at least 1, got -5"),
        (lambda: matmul(8, 8, 8, -4), "words: expected at least 1, got -4"),
        (lambda: matmul(8, -8, 8, 4), "columns: expected at least 0, got -8"),
        (lambda: sparse_theta(-1, 1, 1, 1, 1), "z_a: expected at least 0, got -1"),
        (lambda: sparse_theta_informal(1, -1, 1), "z_qk: expected at least 0, got -1"),
        (lambda: dividing_point(0, 1, 1, 1), "z_a: expected at least 1, got 0"),
        (lambda: best_algorithm(0, 0, 10), "n: expected at least 1, got 0"),
        (lambda: product_graph(-1, 1, 1), "rows: expected at least 1, got -1"),
        (lambda: attention_forward_graph(2, 0), "d: expected at least 1, got 0"),
        (lambda: attention_backward_graph(0, 2), "n: expected at least 1, got 0"),
        (lambda: partition_of(product_graph(1, 1, 1), [], 0), "pebbles: expected at least 1, got 0"),
        (lambda: causal(0), "n: expected at least 1, got 0"),
        (lambda: window(-5, 2), "n: expected at least 1, got -5"),
        (lambda: window(8, 0), "size: expected at least 1, got 0"),
        (lambda: kept_blocks(8, 0, []), "size: expected at least 1, got 0"),
        (
            lambda: kept_blocks(8, 3, [(0, 0), (3, 1)]),
            r"places: expected pairs of ints from 0 to 2, got \(3, 1\)",
        ),
        (
            lambda: attention_problem(8, 2, kept=causal(4)),
            r"kept: expected shape \[n=8, n=8\], got \[4, 4\]",
        ),
        (
            lambda: attention_problem(8, 2, kept=kept_blocks(8, 4, [(0, 0)])),
            "kept: expected a pair of every row, got none of row 4",
        ),
    ],
)
def test_refusals(call: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^{complaint}$"):
        call()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_closed_forms_refuse_sizes(name: str) -> None:
    words = ALGORITHMS[name].words
    for given, argument, value in (((-8, 2, 9999), "n", -8), ((8, 0, 9999), "d", 0), ((8, 2, 0), "words", 0)):
        with pytest.raises(ValueError, match=rf"^{argument}: expected at least \d+, got {value}$"):
            words(*given)


def test_types_that_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^words: expected an int, got 9\.5$"):
        theta(8, 2, 9.5)
    with pytest.raises(TypeError, match=r"^kept: expected torch\.bool, got torch\.float32$"):
        attention_problem(8, 2, kept=torch.ones(8, 8))


# Masks


def masks() -> dict[str, Tensor]:
    places = [(i, j) for i in range(6) for j in range(6) if (i + j) % 3 == 0 or i == j]
    return {"causal": causal(48), "window": window(48, 5), "kept_blocks": kept_blocks(48, 8, places)}


@pytest.mark.parametrize("kept", masks().values(), ids=masks())
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (flash_forward, {}),
        (flash1_backward, {}),
        (flash2_backward, {}),
        (flash_rows, {}),
        (large_cache, {"policy": "fit"}),
        (large_cache, {"policy": "fit", "sum_first": True}),
        (large_cache, {"policy": "fit", "order": "columns"}),
        (large_cache, {"policy": "fit", "order": "columns", "sum_first": True}),
    ],
)
def test_masks(schedule: Callable[..., None], options: dict[str, Any], kept: Tensor) -> None:
    dense = simulate(schedule, n=48, d=4, words=200, **options)
    memory = simulate(schedule, n=48, d=4, words=200, kept=kept, **options)
    assert_results(memory, kept)
    assert segment(48, 4, 200, pairs=int(kept.sum())).words <= memory.io < dense.io


def test_masks_keep_what_they_say() -> None:
    assert causal(4).sum() == 10 and not causal(4)[0, 1]
    assert window(5, 2).sum() == 9 and window(5, 2)[4].tolist() == [False] * 3 + [True] * 2
    blocks = kept_blocks(5, 2, [(0, 1), (2, 2)])
    assert blocks.nonzero().tolist() == [[0, 2], [0, 3], [1, 2], [1, 3], [4, 4]]
    assert keeps(None, slice(0, 1), slice(0, 1)) and keeps(blocks, slice(0, 1), slice(2, 3))
    assert not keeps(blocks, slice(0, 2), slice(0, 2))


def test_io_of_a_block_sparse_mask_is_that_of_its_tiles() -> None:
    """`flash_rows` reads a row of K and of V for every tile that is kept, and nothing for others."""
    n, d, words = 96, 8, 8 * 2 + 8 * (3 * 8 + 5)  # 8 rows stay
    dense = simulate(flash_rows, n=n, d=d, words=words).phases
    diagonal = kept_blocks(n, 8, [(i, i) for i in range(12)])
    sparse = simulate(flash_rows, n=n, d=d, words=words, kept=diagonal).phases
    assert dense["dQ"] - sparse["dQ"] == (12 - 1) * 2 * n * d
    assert sparse["S, h"] == dense["S, h"] and sparse["g"] == dense["g"]


# Products


@pytest.mark.parametrize("shape", [(6, 5, 7), (16, 16, 16), (3, 20, 1)])
def test_products(shape: tuple[int, int, int]) -> None:
    rows, columns, depth = shape
    a, b = torch.randn(rows, depth, dtype=torch.float64), torch.randn(columns, depth, dtype=torch.float64)
    perfect = rows * depth + depth * columns + rows * columns
    counts = {
        gemm_naive: (3, 2 * rows * columns * depth + rows * columns),
        gemm_tiled: (35, product_words(rows, columns, depth, Tile(5, 5, 1))),
        gemm_perfect: (perfect, perfect),
    }
    for schedule, (words, expected) in counts.items():
        memory = Memory(words, {"a": a, "b": b})
        schedule(memory, "c", "a", "b.T")
        torch.testing.assert_close(memory["c"], a @ b.T)
        assert memory.io == expected >= matmul(rows, columns, depth, words).words
        assert memory.flops == 2 * rows * columns * depth


def test_largest_tile() -> None:
    for words in range(3, 200):
        size = largest_tile(words).rows
        assert size**2 + 2 * size <= words < (size + 1) ** 2 + 2 * (size + 1)
    with pytest.raises(ValueError, match="words: expected at least 3, got 2"):
        largest_tile(2)


# The memory


def test_a_schedule_that_forgets_to_read_or_write_fails_in_value() -> None:
    memory = Memory(4, {"a": torch.ones(1, 2, dtype=torch.float64)})
    memory.create("b", 1, 2)
    block = memory.read("b")
    assert block.isnan().all()  # nobody wrote it
    memory.delete(block)
    block = memory.read("a")
    memory.delete(block)
    assert block.isnan().all() and not memory["a"].isnan().any()
    assert (memory.reads, memory.writes, memory.held, memory.peak) == (4, 0, 0, 2)


def test_a_cache_that_is_full() -> None:
    inputs = {"a": torch.ones(1, 2, dtype=torch.float64)}
    memory = Memory(3, inputs)
    memory.read("a")
    with pytest.raises(CacheOverflow, match="the schedule holds 4 words, the cache has 3"):
        memory.read("a")
    memory = Memory(3, inputs, strict=False)
    memory.read("a"), memory.read("a")
    assert memory.peak == 4
    with pytest.raises(ValueError, match="words: expected at least 1, got 0"):
        Memory(0, inputs)


def test_inputs_stay_as_they_are() -> None:
    problem = attention_problem(16, 4)
    before = {name: matrix.clone() for name, matrix in problem.items()}
    for schedule in (small_cache, flash1_backward, flash_forward):
        schedule(Memory(300, problem))
    assert all(torch.equal(matrix, before[name]) for name, matrix in problem.items())


def test_algorithm_1_moves_what_is_compulsory() -> None:
    n, d = 24, 6
    memory = simulate(no_cache, n=n, d=d, words=3 * n * n + 2 * n * d + n)
    assert memory.io == compulsory(n, d).words == 4 * n * d + 3 * d * d
    assert memory.peak == memory.words
    assert_results(memory)


# Bounds


def test_both_sides_of_theta_meet_at_the_dividing_point() -> None:
    for n, d in ((64, 8), (8192, 128)):
        for side in (small_cache_theta, large_cache_theta, theta):
            assert side(n, d, d * d).words == pytest.approx(n * n + n * d, rel=1e-12)
        assert theta(n, d, d * d // 4).words == small_cache_theta(n, d, d * d // 4).words
        assert theta(n, d, 4 * d * d).words == large_cache_theta(n, d, 4 * d * d).words
        assert theta_forward(n, d, d * d).words == n * n


def test_regimes_of_the_paper() -> None:
    """Section 4.2: d = 128 in float32 divides at 65.5 KB; an A100 is large, a GTX 1060 is small."""
    assert f"{128**2 * 4 / 1000:.1f}" == "65.5"
    assert regime(128, 192 * 1024 // 4) == "large" and regime(128, 48 * 1024 // 4) == "small"
    assert regime(128, 128**2) == "large" and regime(128, 128**2 - 1) == "small"


def test_sparse_bounds_of_dense_inputs() -> None:
    n, d = 64, 8
    problem = attention_problem(n, d)
    z = nonzeros(problem["A1"], problem["X"], problem["A2"])
    assert z == (n * d, d * d, n * d, n * n)
    for words in (16, 64, 256, 1024):
        dense = theta(n, d, words).words
        assert sparse_theta(*z, words).words == pytest.approx(dense, rel=1e-12)
        assert dense <= sparse_theta(*z, words, form="safe").words <= 5 * dense
        assert sparse_theta_informal(n * d, n * n, words).words == theta_forward(n, d, words).words
    assert dividing_point(*z) == pytest.approx(d * d, rel=1e-12)


def test_nonzeros_are_the_least_of_both_orders() -> None:
    a1, x, a2 = torch.eye(4)[:, :3], torch.diag(torch.tensor([1.0, 0, 0])), torch.ones(4, 3)
    assert nonzeros(a1, x, a2) == (3, 1, 1, 4)


def test_the_minimum_of_sums_may_exceed_the_sum_of_minima() -> None:
    """Lemma F.1 gives the latter, Lemma F.2 states the former."""
    z = (1000, 1000, 100, 10**6)
    assert sparse_theta(*z, 100).words == 20000
    assert sparse_theta(*z, 100, form="safe").words == 14100


def test_segment_follows_both_regimes() -> None:
    n, d = 4096, 64
    assert segment(n, d, d * d).words == pytest.approx(n * n / 2, rel=1e-2)
    assert segment(n, d, 16).words == pytest.approx(n * n * d / 4, rel=0.1)
    assert segment(n, d, 16 * d * d).words == pytest.approx(n * n / 16, rel=0.3)
    assert segment(n, d, 16, pairs=n).words == pytest.approx(n * d / 4, rel=0.1)
    assert not segment(n, d, 16).asymptotic and theta(n, d, 16).asymptotic
