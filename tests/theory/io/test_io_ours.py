"""The library's own schedules: results, and the counts of `theory/costs`, from the same plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce.io import (
    CacheOverflow,
    Memory,
    causal,
    kept_blocks,
    our_tiles,
    ours_backward,
    ours_forward,
    reference,
    segment,
    simulate,
    sparse_theta_informal,
    window,
)
from monoidreduce.theory.costs.cost import kernels
from monoidreduce.theory.costs.sizes import call_of

PASSES = {"forward": ours_forward, "backward": ours_backward}
ENOUGH = 1 << 18  # words


def assert_results(memory: Memory, names: tuple[str, ...], kept: Tensor | None = None) -> None:
    expected = reference(memory.matrices, kept)
    for name in names:
        assert (memory[name] - expected[name]).abs().max() < 1e-10 * expected[name].abs().max(), name
    assert memory.held == 0


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("n", [128, 300])
def test_results_are_those_of_autograd(n: int, d: int) -> None:
    """Also where tiles do not divide the sequence, and under every kind of mask."""
    tiles = our_tiles(n, d)
    places = [(i, j) for i in range(-(-n // 64)) for j in range(-(-n // 64)) if (i * j) % 3 == 0 or i == j]
    for kept in (None, causal(n), window(n, 70), kept_blocks(n, 64, places)):
        forward = simulate(ours_forward, n=n, d=d, words=ENOUGH, tiles=tiles, kept=kept)
        assert_results(forward, ("O", "l"), kept)
        backward = simulate(ours_backward, n=n, d=d, words=ENOUGH, tiles=tiles, kept=kept)
        assert_results(backward, ("dQ", "dK", "dV"), kept)
        assert sum(backward.phases.values()) == backward.io


def test_a_block_mask_of_the_library() -> None:
    """Blocks that `block_mask` finds empty are left out."""
    n, d = 512, 64
    mask = mr.block_mask(lambda b, h, q, k: (q // 128 + k // 128) % 2 == 0, None, None, n, n)
    kept = kept_blocks(n, 128, mask.kinds[0, 0].nonzero().tolist())
    assert int(kept.sum()) == n * n // 2
    tiles = our_tiles(n, d)
    memory = simulate(ours_backward, n=n, d=d, words=ENOUGH, tiles=tiles, kept=kept)
    assert_results(memory, ("dQ", "dK", "dV"), kept)
    dense = simulate(ours_backward, n=n, d=d, words=ENOUGH, tiles=tiles)
    assert memory.flops == dense.flops // 2


MASKS: dict[str, tuple[dict[str, Any], Callable[[int], Tensor] | None]] = {
    "all": ({}, None),
    "causal": ({"causal": True}, causal),
    "window": ({"causal": True, "window": 200}, lambda n: window(n, 201)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", [64, 128, pytest.param(256, marks=pytest.mark.release)])
def test_the_simulator_and_the_model_are_one(d: int, mask: str) -> None:
    """FLOPs and tiles of `mr.cost`, and the words of those tiles. 1920 is a multiple of all tiles."""
    n, heads = 1920, 256
    options, make = MASKS[mask]
    kept, tiles = None if make is None else make(n), our_tiles(n, d, heads=heads)
    tensors, keywords = call_of("attention", {"B": 1, "H": heads, "L": n, "d": d, **options}, torch.bfloat16)
    works = kernels("attention", *tensors, hardware="h100", **keywords)
    forward, backward = (
        [work for of, work in works if of == backward and work.tiles] for backward in (False, True)
    )
    played = {
        name: simulate(run, n=n, d=d, words=ENOUGH, tiles=tiles, kept=kept) for name, run in PASSES.items()
    }
    assert heads * played["forward"].flops == sum(work.executed for work in forward)
    assert heads * played["backward"].flops == sum(work.executed for work in backward)

    (one,) = {work.tiles // heads for work in forward}
    assert played["forward"].io == 2 * n * d + n + one * tiles.forward[1] * 2 * d
    (one,) = {work.tiles // heads for work in backward}
    staying, v = n * d, 2 * n * d + n
    stays, streams = tiles.backward
    if tiles.adds_rows:
        assert played["backward"].io == v + 7 * staying + one * stays * (4 * d + 2)
    else:
        # dQ beside Q, dO, l and v; dK beside K and V; dV beside K.
        stay = (3 * staying + 2 * n) + 3 * staying + 2 * staying
        # K and V; Q, dO, l and v; Q, dO and l. The work counts products, 3 + 3 + 2 of a tile.
        tile_pairs = one // 8
        assert played["backward"].io == v + stay + tile_pairs * streams * (2 * d + (2 * d + 2) + (2 * d + 1))


@pytest.mark.parametrize(
    ("d", "name"),
    [
        (128, "forward"),
        (64, "backward"),
        (128, "backward"),
        pytest.param(256, "backward", marks=pytest.mark.release),
    ],
)
def test_words_grow_with_the_pairs_that_blocks_keep(d: int, name: str) -> None:
    """Beside what every density moves, a pair costs the same at 1, 1/4 and 1/16.

    The bound for sparse inputs is another function of the pairs: the ratio to it is not the same within 1.3.
    """
    n, blocks = 2048, 16
    tiles, ratios = our_tiles(n, d), []
    points = []
    for of_a_row in (16, 4, 1):
        places = [(i, (i + step) % blocks) for i in range(blocks) for step in range(of_a_row)]
        kept = kept_blocks(n, n // blocks, places)
        memory = simulate(PASSES[name], n=n, d=d, words=ENOUGH, tiles=tiles, kept=kept)
        pairs = int(kept.sum())
        points.append((pairs, memory.io))
        ratios.append(memory.io / sparse_theta_informal(n * d, pairs, memory.peak).words)
        assert memory.io >= segment(n, d, memory.peak, pairs).words
    (p1, w1), (p2, w2), (p3, w3) = points
    assert (w1 - w2) * (p2 - p3) == (w2 - w3) * (p1 - p2)
    assert max(ratios) > 1.3 * min(ratios)


def test_tiles_hold_more_than_a_small_cache() -> None:
    tiles = our_tiles(256, 64)
    least = simulate(ours_forward, n=256, d=64, words=ENOUGH, tiles=tiles).peak
    assert simulate(ours_forward, n=256, d=64, words=least, tiles=tiles).peak == least
    with pytest.raises(CacheOverflow, match=f"the cache has {least - 1}"):
        simulate(ours_forward, n=256, d=64, words=least - 1, tiles=tiles)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"n": 0, "d": 64}, "n: expected at least 1, got 0"),
        ({"n": 64, "d": 64, "heads": 0}, "heads: expected at least 1, got 0"),
        ({"n": 64, "d": 512}, "n, d, heads: expected a call of many heads on tensor cores, got 256 heads"),
        (
            {"n": 64, "d": 64, "dtype": torch.float32},
            "got 256 heads of width 64 in torch.float32 on h100: simt",
        ),
        ({"n": 1024, "d": 64, "heads": 1}, "got 1 heads of width 64 in torch.bfloat16 on h100: sm90"),
        ({"n": 64, "d": 64, "hardware": "v5p"}, "hardware: expected a GPU of NVIDIA's, got v5p"),
    ],
)
def test_calls_without_such_tiles(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        our_tiles(**given)
