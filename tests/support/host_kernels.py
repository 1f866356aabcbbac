"""The generated CUDA source of programs (folds/cuda/cuda_source.py), compiled by the host's compiler.

In an operator's passes it takes the place of the CPU engine's interpreter. Reals are double in float64 calls,
else float.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce.folds import number_passes
from monoidreduce.folds.cuda import cuda_source
from monoidreduce.folds.program.program import Program
from monoidreduce.folds.torch.reader import scores

UNIT = """
#include "monoidreduce/device/program/statistics.h"
#include "monoidreduce/monoid.h"
namespace monoidreduce {
namespace {  // each unit has a program of its own
%s
}
using T = %s;
using P = Program<T>;
static_assert(sizeof(StatisticsState<P>) == %d * sizeof(T));
}
using namespace monoidreduce;
%s
"""
STATE = """
// Rows in two parts, each in steps of 16 elements, as the lanes of a GPU have them.
extern "C" void run(const T* score, const T* other, ProgramData data, StatisticsResults results) {
  const auto pick = [](int) { return 0; };
  for (std::int64_t row = 0; row < data.rows; ++row) {
    const auto of_row = data.of_row<P>(row);
    StatisticsState<P> whole = StatisticsSum<P>{}.identity();
    for (std::int64_t part = 1; part >= 0; --part) {
      StatisticsState<P> state[1] = {StatisticsSum<P>{}.identity()};
      for (std::int64_t first = part * 16; first < data.columns; first += 32) {
        const auto there = [&](int i) { return first + i < data.columns; };
        const auto element = [&](int i) {
          const std::int64_t at = row * data.columns + (there(i) ? first + i : 0);
          return data.element<P>(score[at], other[at], of_row, first + i);
        };
        fold_elements<P, 16, false>(state, pick, element, there);
      }
      whole = StatisticsSum<P>{}.combine(whole, state[0]);
    }
    results.store<P>(row, whole);
  }
}
"""
GRADIENT = """
extern "C" void run(const T* score, const T* other, ProgramData data, T* out, T* other_out) {
  for (std::int64_t at = 0; at < data.rows * data.columns; ++at) {
    const std::int64_t row = at / data.columns, j = at % data.columns;
    const auto g = P::gradient(data.element<P>(score[at], other[at], data.of_row<P>(row), j));
    out[at] = g.score, other_out[at] = g.other;
  }
}
"""


class Data(ctypes.Structure):
    """The struct `ProgramData` of device/program/statistics.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("row", "column", "row_index", "column_index")),
        *((f"{name}_pitch", ctypes.c_int64) for name in ("row", "column", "row_index", "column_index")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "first_column")),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("real", "integer")),
        *((name, ctypes.c_int64) for name in ("reals", "integers")),
    )


class Results(ctypes.Structure):
    """The struct `StatisticsResults` of device/program/statistics.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "low", "indices")),
        *((name, ctypes.c_int64) for name in ("rows", "lowest")),
    )


def _data(row: Any, column: Any, row_index: Any, column_index: Any, rows: int, columns: int) -> Data:
    tensors = (row, column, row_index, column_index)
    pitches = [0 if t is None else t.stride(0) for t in tensors]
    return Data(
        *(None if t is None else t.data_ptr() for t in tensors),
        *pitches,
        rows,
        columns,
        0,
        1.0,
        None,
        None,
        0,
        0,
    )


class HostKernels:
    """Programs compiled for the host, cached by their text. tmp: folder for their files."""

    def __init__(self, tmp: Path) -> None:
        self.tmp, self.known = tmp, {}  # type: Path, dict[tuple[Any, ...], Callable[..., None]]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the passes of statistics run these kernels."""
        monkeypatch.setattr(number_passes, "forward_code", lambda *program: program)
        monkeypatch.setattr(number_passes, "backward_code", lambda *program: program)
        monkeypatch.setattr(number_passes, "_C", self)

    def statistics_forward(self, *arguments: Any) -> None:
        *operands, row, column, row_index, column_index = arguments[:8]
        assert arguments[8:10] == (None, None)
        values, low, indices, program, scale, *_ = arguments[10:]
        score, other = self._scores(operands, scale)
        run = self._compiled(cuda_source.fold_source, program, score.dtype)
        data = _data(row, column, row_index, column_index, *score.shape)
        lowest = -1 if len(score[0]) == 0 else 0
        results = Results(values.data_ptr(), low.data_ptr(), indices.data_ptr(), len(score), lowest)
        run(ctypes.c_void_p(score.data_ptr()), ctypes.c_void_p(other.data_ptr()), data, results)

    def statistics_backward(self, *arguments: Any) -> None:
        a, b, other_a, other_b, row, column, row_index, column_index = arguments[:8]
        *gradients, program, scale, _threads, _stream = arguments[10:]
        score, other = self._scores((a, b, other_a, other_b), scale)
        run = self._compiled(cuda_source.gradient_source, program, score.dtype)
        found = torch.empty_like(score), torch.empty_like(score)
        data = _data(row, column, row_index, column_index, *score.shape)
        before, after = ([ctypes.c_void_p(t.data_ptr()) for t in pair] for pair in ((score, other), found))
        run(*before, data, *after)
        for local, rows, columns, d_rows, d_columns in zip(
            found, (a, other_a), (b, other_b), gradients[::2], gradients[1::2], strict=True
        ):
            if d_rows is not None:
                d_rows.copy_(scale * local @ columns)
            if d_columns is not None:
                d_columns.copy_(scale * local.T @ rows)

    def _scores(self, operands: Any, scale: float) -> tuple[Tensor, Tensor]:
        a, b, other_a, other_b = operands
        dtype = accumulation_dtype(a.dtype)
        score = scores(a, b, dtype, scale).contiguous()
        return score, score if other_a is None else scores(other_a, other_b, dtype, scale).contiguous()

    def _compiled(
        self, source: Callable[..., Any], program: tuple[Any, ...], dtype: torch.dtype
    ) -> Callable[..., None]:
        key = (source.__name__, *program, dtype)
        if key not in self.known:
            folds = source is cuda_source.fold_source
            words = cuda_source.state_words(program[0] if folds else Program(()).text)
            real = "double" if dtype == torch.float64 else "float"
            unit, library = self.tmp / f"unit{len(self.known)}.cpp", self.tmp / f"unit{len(self.known)}.so"
            unit.write_text(UNIT % (source(*program).text, real, words, STATE if folds else GRADIENT))
            flags = (
                "-std=c++20",
                "-O1",
                "-shared",
                "-fPIC",
                "-Wall",
                "-Wextra",
                "-Werror",
            )
            compiler = os.environ.get("CXX", "c++")
            subprocess.run([compiler, *flags, "-I", mr.get_include(), unit, "-o", library], check=True)
            self.known[key] = ctypes.CDLL(str(library)).run
            self.known[key].restype = None
        return self.known[key]
