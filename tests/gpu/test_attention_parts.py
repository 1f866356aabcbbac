"""Attention's backward pass on Hopper where several blocks have parts of a tile of keys."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from calls import HALVES, assert_same_bits, check_captured, results, upstreams
from paths import takes
from specimens import Inputs, Specimen, attention_inputs, name_of
from tolerance import check_operator

import monoidreduce as mr

pytestmark = pytest.mark.tiers("sm90")

# Batch, heads, column heads, rows, columns, width, value width; and how many tiles are in parts.
SIZES: dict[str, tuple[tuple[int, ...], int]] = {
    "several_rounds": ((1, 12, 12, 1500, 4500, 128, 128), 36),
    "one_tile_left": ((1, 19, 19, 900, 890, 128, 128), 1),
    "short_rows": ((1, 46, 46, 300, 3000, 128, 128), 0),
    "long_rows": ((3, 23, 23, 3000, 200, 128, 128), 6),
    "grouped": ((1, 12, 4, 2300, 2700, 128, 128), 88),
    "narrow": ((1, 10, 10, 2500, 3900, 64, 64), 46),
    "ragged_narrow": ((2, 5, 5, 2501, 3907, 40, 24), 46),
    "unequal": ((1, 9, 9, 2000, 4000, 128, 72), 24),
    "wide": ((1, 9, 9, 2000, 2000, 256, 192), 0),
    "nearly_full_round": ((1, 10, 10, 1000, 1600, 128, 128), 0),
}
# The same under a causal mask; and in how many parts the heads and the rows of a tile are.
CAUSAL_SIZES: dict[str, tuple[tuple[int, ...], tuple[int, int]]] = {
    "few_key_heads": ((1, 16, 2, 2030, 2030, 128, 128), (4, 2)),
    "slots_in_turn": ((2, 28, 4, 1900, 1900, 128, 128), (4, 1)),  # groups of 7, in parts of 1 and of 2
    "one_key_head": ((1, 32, 1, 520, 520, 128, 128), (16, 1)),
    "narrow_groups": ((2, 8, 1, 1501, 1507, 40, 24), (4, 1)),
    "small_parts_of_heads": ((1, 8, 1, 520, 520, 40, 24), (2, 1)),
    "small_parts_of_rows": ((1, 2, 1, 2100, 2100, 24, 16), (1, 2)),
    "not_grouped": ((1, 6, 6, 2100, 2100, 128, 72), (1, 2)),
    "rows_without_keys": ((1, 8, 2, 2500, 700, 128, 128), (2, 1)),
    "fewer_rows": ((1, 8, 4, 700, 2500, 128, 128), (1, 1)),
    "many_jobs": ((1, 17, 17, 1500, 1500, 128, 128), (1, 1)),
    "short": ((1, 4, 4, 300, 300, 128, 128), (1, 1)),
}


def inputs_of(size: str, dtype: torch.dtype, device: torch.device, **bias: Any) -> Inputs:
    return attention_inputs(*(SIZES | CAUSAL_SIZES)[size][0], dtype=dtype, device=device, **bias)


def tiles_in_parts(inputs: Inputs, **options: Any) -> int:
    """As explain says."""
    q, k, v, *bias = inputs.values()
    reasons = mr.explain("attention", q, k, v, bias=bias[0] if bias else None, **options).reasons
    found = (re.match(r"backward: .*; (\d+) tiles of columns in parts$", text) for text in reasons)
    return sum(int(match[1]) for match in found if match)


def parts_of_a_tile(inputs: Inputs, **options: Any) -> tuple[int, int]:
    """As explain says."""
    q, k, v, *bias = inputs.values()
    reasons = mr.explain("attention", q, k, v, bias=bias[0] if bias else None, **options).reasons
    parts = r"backward: .*; each tile of columns in (\d+) x (\d+) parts of heads and rows$"
    found = (re.match(parts, text) for text in reasons)
    return next(((int(match[1]), int(match[2])) for match in found if match), (1, 1))


@pytest.fixture(autouse=True)
def as_many_blocks(gpu: torch.device) -> None:
    if torch.cuda.get_device_properties(gpu).multi_processor_count != 132:
        pytest.skip("the sizes are for 132 multiprocessors")


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", ({}, {"softcap": 5.0}), ids=("full", "softcap"))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device) -> None:
    inputs = inputs_of(size, dtype, gpu)
    assert tiles_in_parts(inputs, **options) == SIZES[size][1]
    check_operator("attention", inputs, {"return_lse": True, **options})


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", ({}, {"softcap": 5.0}), ids=("plain", "softcap"))
@pytest.mark.parametrize("size", CAUSAL_SIZES)
def test_causal_sizes(size: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device) -> None:
    inputs = inputs_of(size, dtype, gpu)
    assert parts_of_a_tile(inputs, causal=True, **options) == CAUSAL_SIZES[size][1]
    check_operator("attention", inputs, {"causal": True, "return_lse": True, **options})


def test_keys_up_to_a_distance(gpu: torch.device) -> None:
    """Later keys have more queries."""
    inputs = inputs_of("few_key_heads", torch.bfloat16, gpu)
    options = {"window": (200, None)}
    assert parts_of_a_tile(inputs, **options) == (4, 2)
    check_operator("attention", inputs, options)


@pytest.mark.parametrize("names", ("k", "v", "kv"))
def test_gradients_of_keys_alone(names: str, gpu: torch.device) -> None:
    inputs = inputs_of("few_key_heads", torch.bfloat16, gpu)
    check_operator("attention", inputs, {"causal": True}, differentiate=[*names])


@pytest.mark.parametrize("place", ("q", "k", "v"))
@pytest.mark.parametrize("size", ("small_parts_of_heads", "small_parts_of_rows"))
def test_non_finite_inputs_of_parts(size: str, place: str, gpu: torch.device) -> None:
    """Parts that a masked element makes NaN are joined, marked and computed again.

    The sizes are small because the reference stores products of a query with a key by coordinate.
    """
    inputs = inputs_of(size, torch.bfloat16, gpu)
    inputs[place][..., -3, 5] = torch.nan
    check_operator("attention", inputs, {"causal": True})


@pytest.mark.parametrize("layout", ("contiguous", "expanded", "sliced"))
def test_upstream_gradients(layout: str, gpu: torch.device) -> None:
    check_operator("attention", inputs_of("grouped", torch.bfloat16, gpu), upstream=layout)


def test_views(gpu: torch.device) -> None:
    """[B, N, H, D] in memory."""
    inputs = inputs_of("ragged_narrow", torch.bfloat16, gpu)
    views = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in inputs.items()}
    assert tiles_in_parts(views) == SIZES["ragged_narrow"][1]
    with takes({f"attention_{way}/cuda/sm90/bfloat16" for way in ("forward", "backward")}):
        check_operator("attention", views, {"return_lse": True})


@pytest.mark.parametrize("kind", ("full", "of_heads", "of_columns", "float", "keep", "keep_columns"))
@pytest.mark.parametrize("size", ("several_rounds", "narrow"))
def test_biases(size: str, kind: str, gpu: torch.device) -> None:
    batch, heads, _, rows, columns, *_ = SIZES[size][0]
    bias: dict[str, Any] = {
        "full": {"bias": (batch, heads, rows, columns)},
        "of_heads": {"bias": (heads, rows, columns)},
        "of_columns": {"bias": (batch, 1, 1, columns)},
        "float": {"bias": (heads, rows, columns), "bias_dtype": torch.float32},
        "keep": {"keep": (batch, heads, rows, columns)},
        "keep_columns": {"keep": (batch, 1, 1, columns)},
    }[kind]
    inputs = inputs_of(size, torch.bfloat16, gpu, **bias)
    # Where a bias excludes elements, gradients that are not finite are marked, and marks are of whole ones.
    assert tiles_in_parts(inputs) == (0 if kind.startswith("keep") else SIZES[size][1])
    check_operator("attention", inputs, {"return_lse": True})


@pytest.mark.parametrize("size", ("several_rounds", "grouped", "narrow", "few_key_heads", "slots_in_turn"))
def test_bits_are_reproducible(size: str, gpu: torch.device) -> None:
    """Parts are joined in one order: all but the queries' gradient, which is added to."""
    options = {"return_lse": True, "causal": size in CAUSAL_SIZES}
    call = Specimen("attention", "attention", attention_inputs, options=options)
    inputs = inputs_of(size, torch.bfloat16, gpu)
    grads = upstreams(call, inputs)
    first = results(call, inputs, grads)
    for _ in range(3):
        again = results(call, inputs, grads)
        for name in ("out0", "out1", "d_k", "d_v"):
            assert_same_bits({name: first[name]}, {name: again[name]})


@pytest.mark.parametrize("size", ("several_rounds", "few_key_heads"))
def test_jobs_that_wait_for_each_other_are_whole(size: str, gpu: torch.device, deterministic: None) -> None:
    inputs, options = inputs_of(size, torch.bfloat16, gpu), {"causal": size in CAUSAL_SIZES}
    assert tiles_in_parts(inputs, **options) == 0 and parts_of_a_tile(inputs, **options) == (1, 1)
    call = Specimen("attention", "attention", attention_inputs, options={"return_lse": True, **options})
    check_operator("attention", inputs, {"return_lse": True, **options})
    grads = upstreams(call, inputs)
    assert_same_bits(results(call, inputs, grads), results(call, inputs, grads))


@pytest.mark.parametrize("options", ({}, {"causal": True}), ids=("full", "causal"))
@pytest.mark.parametrize("in_order", (False, True), ids=("any_order", "deterministic"))
def test_streams_at_once(in_order: bool, options: dict[str, Any], gpu: torch.device) -> None:
    """Blocks wait for blocks while another stream's kernels, whose blocks wait too, hold multiprocessors."""
    call = Specimen("attention", "attention", attention_inputs, options=options)
    sizes = ("several_rounds", "one_tile_left", "narrow", "few_key_heads", "slots_in_turn")
    batches = [inputs_of(size, torch.bfloat16, gpu) for size in sizes]
    torch.use_deterministic_algorithms(in_order)
    try:
        grads = [upstreams(call, inputs) for inputs in batches]
        expected = [results(call, *pair) for pair in zip(batches, grads, strict=True)]
        torch.cuda.synchronize()
        got: list[list[Inputs]] = []
        for pair in zip(batches, grads, strict=True):
            with torch.cuda.stream(torch.cuda.Stream()):
                got.append([results(call, *pair) for _ in range(20)])
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    names = ("out0", "d_q", "d_k", "d_v") if in_order else ("out0", "d_k", "d_v")
    for runs, once in zip(got, expected, strict=True):
        for run in runs:
            assert_same_bits({name: run[name] for name in names}, {name: once[name] for name in names})


def test_graph_capture(gpu: torch.device) -> None:
    call = Specimen("attention", "attention", attention_inputs, options={"return_lse": True})
    inputs = inputs_of("narrow", torch.bfloat16, gpu)
    assert tiles_in_parts(inputs) > 0
    grads = upstreams(call, inputs)

    def step() -> tuple[torch.Tensor, ...]:
        found = results(call, inputs, grads)
        return found["out0"], found["out1"], found["d_k"], found["d_v"]  # d_q is added to in any order

    check_captured(step)


@pytest.mark.parametrize("options", ({"causal": True}, {"window": (50, 10)}), ids=("causal", "window"))
def test_many_jobs_of_different_lengths_are_whole(options: dict[str, Any], gpu: torch.device) -> None:
    inputs = inputs_of("several_rounds", torch.bfloat16, gpu)
    assert tiles_in_parts(inputs, **options) == 0 and parts_of_a_tile(inputs, **options) == (1, 1)


def test_jobs_of_a_window_are_whole(gpu: torch.device) -> None:
    inputs = inputs_of("few_key_heads", torch.bfloat16, gpu)
    assert parts_of_a_tile(inputs, window=(50, 10)) == (1, 1)
