"""SIMT kernels with columns split between blocks (device/simt/splits.cuh), run by the host in float64."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from host_kernels import Data, Results
from host_simt import built
from torch import Tensor

from monoidreduce import stat
from monoidreduce.folds.cuda.cuda_source import fold_source, state_words
from monoidreduce.folds.program.tracing import trace

UNIT = """
#include "block.h"
#include "monoidreduce/device/simt/fold_forward_simt.cuh"
#include "monoidreduce/device/simt/program_simt.cuh"
#include "monoidreduce/monoids/logsumexp.h"
#include "monoidreduce/rows.h"
namespace monoidreduce {
namespace {
%s
}
}
using namespace monoidreduce;
using P = Program<double>;

constexpr unsigned kBlocks = 3;  // fewer than jobs

Tensor matrix(char* data, std::int64_t lines, std::int64_t width) {
  return {data, {1, 1, lines, width}, {0, 0, 8 * width, 8}, DType::kFloat64};
}
// band: columns that a row keeps, to the left and to the right of its own; all if it is negative.
extern "C" void logsumexp(char* a, char* b, std::int64_t rows, std::int64_t columns, std::int64_t width,
                          std::int64_t band, std::int64_t count, void* partial, double* lse, double* low) {
  const simt::Splits splits{count, partial};
  const simt::ForwardArguments arguments{
      .rows = {matrix(a, rows, width)},
      .columns = {matrix(b, columns, width)},
      .range = band < 0 ? ColumnRange{} : ColumnRange{band, band, 0}.bounding(rows, columns),
      .splits = splits};
  const LogSumExp<double> m;
  const LogSumExpRows<double> of_rows{lse, low, {}};
  host::launch(kBlocks, [&] {
    simt::fold_forward<false>(m, arguments, Score<double>(ScoreOptions{.scale = 0.5}), of_rows);
  });
  if (count > 1) host::launch(1, [&] { simt::combine_splits(m, of_rows, splits, rows); });
}
extern "C" void statistics(char* a, char* b, std::int64_t width, ProgramData data, std::int64_t count,
                           void* partial, StatisticsResults results) {
  const simt::Splits splits{count, partial};
  const simt::ProgramOperands operands{{matrix(a, data.rows, width)}, {matrix(b, data.columns, width)}};
  host::launch(kBlocks, [&] { simt::fold_program<P>(operands, data, results, splits); });
  if (count > 1) host::launch(1, [&] { simt::combine_states<P>(results, splits); });
}
"""
SPLITS = (1, 2, 3, 5)  # of three tiles of 64 columns: alone, two and one, one each, and two without any


def summary(score):  # type: ignore[no-untyped-def]
    p = stat.softmax(score)
    return dict(lse=p.logsumexp, mean=p.mean(score * score), sum=stat.total(score), best=stat.largest(score))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[ctypes.CDLL, str]:
    """The compiled kernels, and the text of the program of `summary`."""
    text = trace(summary, {}, {}).text
    return built(UNIT % fold_source(text, 0, 0, 0, 0).text, tmp_path_factory.mktemp("splits")), text


def operands() -> tuple[Tensor, Tensor]:
    """Rows of two tiles, columns of three; neither are whole.

    Each tile of columns begins with the same ones, so the largest score may be in all splits.
    """
    torch.manual_seed(0)
    a, b = torch.randn(70, 37, dtype=torch.float64), torch.randn(150, 37, dtype=torch.float64)
    b[64:74] = b[128:138] = b[:10]
    return a, b


def pointers(*tensors: Tensor) -> list[Any]:
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


@pytest.mark.parametrize("band", (-1, 20), ids=("all", "band"))
@pytest.mark.parametrize("count", SPLITS)
def test_log_sum_exp(count: int, band: int, kernels: tuple[ctypes.CDLL, str]) -> None:
    a, b = operands()
    partial = torch.full((count, len(a), 2), math.nan, dtype=torch.float64)
    lse, low = torch.full((2, len(a)), math.nan, dtype=torch.float64)
    sizes = map(ctypes.c_int64, (*a.shape[:1], *b.shape, band, count))
    kernels[0].logsumexp(*pointers(a, b), *sizes, *pointers(partial, lse, low))
    scores = 0.5 * a @ b.T
    if band >= 0:
        apart = torch.arange(len(b)) - torch.arange(len(a))[:, None]
        scores = scores.masked_fill(apart.abs() > band, -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("count", SPLITS)
def test_statistics(count: int, kernels: tuple[ctypes.CDLL, str]) -> None:
    library, text = kernels
    a, b = operands()
    partial = torch.full((count, len(a), state_words(text)), math.nan, dtype=torch.float64)
    values, low = (torch.full((n, len(a)), math.nan, dtype=torch.float64) for n in (4, 1))
    indices = torch.empty(1, len(a), dtype=torch.int64)
    data = Data(rows=len(a), columns=len(b), scale=0.5)
    results = Results(*pointers(values, low, indices), len(a), 0)
    before, after = pointers(a, b), (data, ctypes.c_int64(count), *pointers(partial), results)
    library.statistics(*before, ctypes.c_int64(a.shape[1]), *after)
    scores = 0.5 * a @ b.T
    best = scores.max(1)  # on the CPU the lowest of equal columns
    assert (best.indices < 10).any()
    expected = (scores.logsumexp(1), (scores.softmax(1) * scores**2).sum(1), scores.sum(1), best.values)
    torch.testing.assert_close(values, torch.stack(expected), rtol=1e-13, atol=1e-13)
    assert torch.equal(indices[0], best.indices)
