"""The k largest of rows as warps of a GPU find them (device/contraction/most.cuh), compiled for the host."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from host_simt import built
from torch import Tensor

from monoidreduce.folds.torch.reader import largest_in_order

# The kernel's code for 16 rows, run on the CPU by one warp for each block. Block n takes tiles n, n + blocks,
# and so on, of 128 columns. Threads hold the elements of a tile as after a product on tensor cores.
UNIT = """
#define HOST_THREADS 32
#include "warp.h"

#include "monoidreduce/device/contraction/most.cuh"
#include "monoidreduce/launch/most_sizes.h"
using namespace monoidreduce;

constexpr int kRows = 16, kColumns = 128, kPart = 16;
// As in fragment.cuh.
int row_of_thread(int r) { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r; }
int column_of_thread(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

extern "C" long long floats(long long rows, int blocks) {
  return most_sizes({1, kRows, kColumns, 1, 0}, rows, {blocks, 1, 1, 1}).floats;
}
extern "C" void run(const float* scores, int rows, int columns, int blocks, float* scratch, float* values,
                    long long* indices) {
  const ContractionSizes tile{1, kRows, kColumns, 1, 0};
  const TileSchedule schedule{blocks, 1, 1, 1};
  const MostMemory memory = most_memory(tile, rows, schedule, scratch);
  host::launch(static_cast<unsigned>(blocks), [&] {
    for (int row0 = 0; row0 < rows; row0 += kRows) {
      MostOfRows<K> most;
      most.begin(memory, row0);
      const int first = static_cast<int>(blockIdx.x) * kColumns;
      for (int column0 = first; column0 < columns; column0 += blocks * kColumns) {
        for (int part = 0; part < kColumns / 2; part += kPart) {
          float x[kPart];
          const auto row_of = [](int i) { return i / 2 % 2; };
          const auto column_of = [&](int i) { return column0 + column_of_thread(part + i); };
          const auto present = [&](int i) { return column_of(i) < columns; };
          for (int i = 0; i < kPart; ++i) {
            const int row = row0 + row_of_thread(row_of(i));
            x[i] = row < rows && present(i) ? scores[row * columns + column_of(i)] : 0.f;
          }
          most.offer(memory, x, row_of, column_of, present);
        }
        most.settle(memory);
      }
      most.end(memory);
    }
  });
  for (int row = 0; row < rows; ++row) {
    for (int n = 0; n < K; ++n) {
      const RankedElement x = memory.best[row * kMostKept + n];
      values[row * K + n] = x == 0 ? -INFINITY : value_of(x);
      indices[row * K + n] = x == 0 ? -1 : column_of(x);
    }
  }
}
"""


@pytest.fixture(scope="module", params=(1, 8, 64))
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found: Any = built(f"#define K {request.param}\n{UNIT}", tmp_path_factory.mktemp("most"))
    found.floats.restype = ctypes.c_longlong
    found.floats.argtypes = [ctypes.c_longlong, ctypes.c_int]
    found.k = request.param
    return found


def largest(library: Any, scores: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    rows, columns = scores.shape
    scratch = torch.zeros(library.floats(rows, blocks))
    values, indices = torch.empty(rows, library.k), torch.empty(rows, library.k, dtype=torch.int64)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (scores, scratch, values, indices))
    of_scores, of_scratch, *results = pointers
    library.run(of_scores, rows, columns, blocks, of_scratch, *results)
    return values, indices


def scores_of(kind: str, rows: int, columns: int) -> Tensor:
    if kind == "normal":
        return torch.randn(rows, columns)
    if kind == "equal":
        return (
            torch.randint(0, 3, (rows, columns)).float() * torch.tensor([-0.0, 1.0]).repeat(columns)[:columns]
        )
    rising = torch.arange(columns).float().expand(rows, columns)
    if kind == "rising":
        return rising.contiguous()
    if kind == "falling":
        return -rising
    scores = torch.randn(rows, columns)
    scores[torch.rand(rows, columns) < 0.9] = -math.inf
    scores[::3, ::7] = math.nan
    scores[1::3, ::50] = math.inf
    scores[2] = -math.inf
    return scores


@pytest.mark.parametrize("kind", ("normal", "equal", "rising", "falling", "special"))
@pytest.mark.parametrize("rows, columns, blocks", ((18, 900, 3), (5, 40, 1), (3, 129, 2)))
def test_largest(library: Any, kind: str, rows: int, columns: int, blocks: int) -> None:
    scores = scores_of(kind, rows, columns)
    values, indices = largest(library, scores, blocks)
    expected, at = largest_in_order(scores, None, library.k)
    assert torch.equal(indices, at)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
