"""Gradients of tables as sums of integers: what device code adds, compiled for the host, and factors."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from host_simt import built, scores_data
from torch import Tensor

from monoidreduce.folds.integer_sums import factors_of, sums_of

UNIT = """
#include <bit>
#include <cmath>
#include "block.h"
unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
long long __float2ll_rn(float x) { return std::llrint(x); }
#include "monoidreduce/device/program/table_gradient.cuh"
using namespace monoidreduce;
template <TableSum kSum>
void add(const ModifiedScoresData& data, int count, const int* entries, const float* addends) {
  for (int n = 0; n < count; ++n) TableEntries<kSum, float>(data).add(entries[n], addends[n]);
}
extern "C" void largest(ModifiedScoresData data, int count, const int* entries, const float* addends) {
  add<TableSum::kLargest>(data, count, entries, addends);
}
extern "C" void integers(ModifiedScoresData data, int count, const int* entries, const float* addends) {
  add<TableSum::kIntegers>(data, count, entries, addends);
}
"""
ENTRIES = 5


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(UNIT, tmp_path_factory.mktemp("sums"))


def summed(library: ctypes.CDLL, entries: Tensor, addends: Tensor, most: int | None = None) -> Tensor:
    """The sums of the addends of each entry, as the two runs of a kernel make them. most: of addends."""
    given = (len(entries), *(ctypes.c_void_p(t.data_ptr()) for t in (entries, addends)))
    largest, integers = torch.zeros(ENTRIES), torch.zeros(ENTRIES, dtype=torch.int64)
    library.largest(scores_data((None, None), [], (1, 1), d_table=largest), *given)
    factors = factors_of(largest, len(entries) if most is None else most)
    data = scores_data((None, None), [], (1, 1), d_table=factors)
    data.table_integers = integers.data_ptr()
    library.integers(data, *given)
    return sums_of(integers, factors)


def drawn(count: int = 20000) -> tuple[Tensor, Tensor]:
    """Random addends and the entry of each. They have both signs, and a size that depends on the entry."""
    torch.manual_seed(0)
    entries = torch.randint(ENTRIES, (count,), dtype=torch.int32)
    sizes = torch.tensor([1e-30, 1e-6, 1.0, 1e9, 1e30])
    return entries, torch.randn(count) * torch.randn(count).exp() * sizes[entries]


def test_same_bits_in_any_order_and_right_ones(library: ctypes.CDLL) -> None:
    entries, addends = drawn()
    exact = torch.zeros(ENTRIES, dtype=torch.float64).index_add_(0, entries, addends.double())
    size = torch.stack([addends[entries == n].abs().max().double() for n in range(ENTRIES)])
    for most in (len(entries), 2**35):
        found = summed(library, entries, addends, most)
        for _ in range(3):
            order = torch.randperm(len(entries))
            assert torch.equal(summed(library, entries[order], addends[order], most), found)
        # Rounding addends to multiples of the unit, and the sum to float32.
        rounding = len(entries) * most * 2.0**-60 * size + exact.abs() * 2.0**-24
        assert (found - exact).abs().le(rounding).all()
    # In float32 the order shows.
    first, second = (
        torch.zeros(ENTRIES).index_add_(0, entries[o], addends[o])
        for o in (torch.arange(len(entries)), torch.arange(len(entries)).flip(0))
    )
    assert not torch.equal(first, second)


def test_no_integer_leaves_64_bits(library: ctypes.CDLL) -> None:
    """Not even if every addend is the largest one, and the second run rounds them up."""
    for count in (1, 2, 3, 1024, 1025):
        for addend in (1.0, 2 - 2.0**-23, -(2.0**-100), 2.0**-126, 3e35):
            entries, addends = torch.zeros(count, dtype=torch.int32), torch.full((count,), addend)
            expected = (addends[0].double() * count).float()
            assert torch.equal(summed(library, entries, addends)[0], expected)
            factors = factors_of(addends[:1].abs(), count)
            assert count * round(float(factors) * abs(float(addends[0]))) < 2**62


def test_what_is_not_finite_stays_in_its_entries(library: ctypes.CDLL) -> None:
    entries, addends = drawn()
    finite = summed(library, entries, addends)
    of = [int((entries == e).nonzero()[7]) for e in range(ENTRIES)]
    addends[of[0]] = math.nan
    addends[of[1]] = math.inf
    addends[of[2]] = -math.inf
    addends[of[3]], addends[int((entries == 3).nonzero()[99])] = math.inf, -math.inf
    found = summed(library, entries, addends)
    expected = torch.tensor([math.nan, math.inf, -math.inf, math.nan, finite[4]])
    assert torch.equal(found.nan_to_num(7.5, 1, -1), expected.nan_to_num(7.5, 1, -1))


def test_sums_beyond_float32_are_infinite(library: ctypes.CDLL) -> None:
    entries = torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32)
    found = summed(library, entries, torch.tensor([3e38, 3e38, 3e38, 3e38, -3e38]))
    assert found.tolist() == [math.inf, torch.tensor(3e38).item(), 0, 0, 0]
