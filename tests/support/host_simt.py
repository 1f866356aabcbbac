"""The SIMT kernels of attention with modified scores, compiled for the host and run in float64.

The generated source and the kernels are the same that NVRTC compiles for a GPU. `host_cuda/` implements the
parts of CUDA's language that they use.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce.folds.cuda.cuda_source import scores_source

UNIT = """
#include "block.h"
#include "monoidreduce/device/simt/modified_simt.cuh"
#include "monoidreduce/device/simt/row_prologue.cuh"
namespace monoidreduce {
namespace {  // each unit has a program of its own
%s
}
}
using P = monoidreduce::Program<double>;
using Fold = monoidreduce::%s<double>;
using Rows = monoidreduce::%s<double>;
#include "attention.h"
"""
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas")
FLAGS += ("-Wno-unused-variable",)  # generated lines that a shorter form of a later one replaces
HERE = Path(__file__).parent / "host_cuda"


class ScoresData(ctypes.Structure):
    """The struct `ModifiedScoresData` of device/program/score_element.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("real", "integer")),
        *((name, ctypes.c_int64) for name in ("reals", "integers")),
        ("blocks", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_int) for name in ("block_rows", "block_columns", "rows", "columns")),
        ("scale", ctypes.c_float),
        ("size", ctypes.c_int * 24),
        ("d_table", ctypes.c_void_p),
        ("table_integers", ctypes.c_void_p),
    )


def scores_data(
    tables: tuple[Tensor | None, Tensor | None],
    sizes: list[int],
    shape: tuple[int, int],
    words: Tensor | None = None,
    block: tuple[int, int] = (1, 1),
    d_table: Tensor | None = None,
) -> ScoresData:
    """The `ModifiedScoresData` of a call.

    words: words of the block mask, [batch, heads, ...]. block: rows and columns of a block. d_table: what
    the gradient of the table of reals is added to.
    """
    data = ScoresData(
        *(None if t is None else t.data_ptr() for t in tables),
        *(0 if t is None else len(t) for t in tables),
        None if words is None else words.data_ptr(),
        (ctypes.c_int64 * 4)(*(() if words is None else words.stride())),
        *block,
        *shape,
        size=(ctypes.c_int * 24)(*sizes),
        d_table=None if d_table is None else d_table.data_ptr(),
    )
    data.kept = (*tables, words, d_table)  # keeps the tensors alive as long as the pointers
    return data


class Call(ctypes.Structure):
    """The struct `Call` of host_cuda/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "grad_out", "grad_lse")),
        *((name, ctypes.c_void_p) for name in ("d_q", "d_k", "d_v", "lse", "lse_low", "of_lse", "centre")),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("row_spans", "column_spans")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "key_heads", "queries", "keys", "width")),
        *((name, ctypes.c_int64) for name in ("value_width", "left", "right", "deterministic")),
        ("scale", ctypes.c_double),
        ("scores", ScoresData),
    )


def built(unit: str, folder: Path) -> ctypes.CDLL:
    """The library of a C++ unit. folder: an own folder for its files."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    folder.mkdir(exist_ok=True)
    source, library = folder / "unit.cpp", folder / "unit.so"
    source.write_text(unit)
    compiler, include = os.environ.get("CXX", "c++"), ("-I", HERE, "-I", mr.get_include())
    subprocess.run([compiler, *FLAGS, *include, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def compiled(text: str, folder: Path, weights: bool = False, tables: bool = False) -> ctypes.CDLL:
    """The compiled kernels of a program's text. folder: an own folder for their files. tables: backward adds
    the gradient of the table of reals."""
    source = scores_source(text, weights=weights, fused=False, tables="floats" if tables else None).text
    kinds = ("Sum", "WeightRows") if weights else ("LogSumExp", "SoftmaxRows")
    return built(UNIT % (source, *kinds), folder)


def attention(
    library: ctypes.CDLL,
    tensors: tuple[Tensor, Tensor, Tensor],
    upstream: tuple[Tensor, Tensor],
    scores: ScoresData,
    *,
    window: tuple[int, int] = (-1, -1),
    spans: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    sinks: Tensor | None = None,
    scale: float,
    deterministic: bool,
) -> list[Tensor]:
    """out, lse and the gradients of q, k and v.

    tensors: q, k and v, contiguous, in float64. upstream: the gradients of out and lse.
    """
    q, k, v = tensors
    out, lse = q.new_full((*q.shape[:3], v.shape[3]), torch.nan), q.new_full(q.shape[:3], torch.nan)
    lse_low, of_lse, centre = torch.zeros_like(lse), torch.empty_like(lse), torch.empty_like(lse)
    gradients = [torch.zeros_like(t) for t in tensors]
    given = (*tensors, out, *upstream, *gradients, lse, lse_low, of_lse, centre, sinks, *spans)
    assert all(t is None or t.is_contiguous() for t in given)
    sizes: tuple[Any, ...] = (*q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:], v.shape[3])
    pointers = (None if t is None else t.data_ptr() for t in given)
    call = Call(*pointers, *sizes, *window, deterministic, scale, scores)
    library.fold(ctypes.byref(call))
    library.pull(ctypes.byref(call))
    return [out, lse, *gradients]
