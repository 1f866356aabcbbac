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

import monoidreduce as mr
from monoidreduce import stat
from monoidreduce._ops.distillation import DISTILLATION_LOSSES
from monoidreduce.folds.cuda.cuda_source import fold_source
from monoidreduce.folds.program.tracing import trace

UNIT = """
#include "block.h"
#include "monoidreduce/device/simt/fold_forward_simt.cuh"
#include "monoidreduce/device/simt/program_simt.cuh"
#include "monoidreduce/ops/cross_entropy.h"
#include "monoidreduce/ops/distillation.h"
#include "monoidreduce/ops/log_probs.h"
#include "monoidreduce/ops/logsumexp.h"
namespace monoidreduce {
namespace {
%s
}
}
using namespace monoidreduce;
using P = Program<double>;

constexpr unsigned kBlocks = 3;  // fewer than jobs

struct Sizes {
  std::int64_t rows, columns, width, other_width;
};
TensorView vector(void* data, std::int64_t size, DType dtype = DType::kFloat64) {
  return {.data = data, .rank = data ? 1 : 0, .size = {size}, .stride = {1}, .dtype = dtype};
}
TensorView matrix(void* data, std::int64_t lines, std::int64_t width) {
  return {.data = data, .rank = 2, .size = {lines, width}, .stride = {width, 1}, .dtype = DType::kFloat64};
}
Tensor tensor(const TensorView& t) {
  if (!t.present()) return {};
  Tensor found{static_cast<char*>(t.data)};
  for (int d = 0; d < 4; ++d) found.size[d] = t.size[d], found.stride[d] = t.stride[d] * item_size(t.dtype);
  found.dtype = t.dtype;
  return found;
}
template <class M, class Rows>
void fold(const M& m, const FoldProblem& p, const Rows& rows, const simt::Splits& splits) {
  const simt::ForwardArguments arguments{.rows = {tensor(p.a), tensor(p.other_a)},
                                         .columns = {tensor(p.b), tensor(p.other_b)},
                                         .bias = tensor(p.bias),
                                         .range = p.range,
                                         .splits = splits};
  const Score<double> score(p.score);
  host::launch(kBlocks, [&] { simt::fold_forward<false>(m, arguments, score, rows); });
  if (splits.count > 1) host::launch(1, [&] { simt::combine_splits(m, rows, splits, p.rows()); });
}

// band: columns that a row keeps, to the left and to the right of its own; all if it is negative.
extern "C" void logsumexp(void* a, void* b, Sizes n, std::int64_t band, simt::Splits splits, double* lse,
                          double* low) {
  FoldProblem p{.a = as_rows(matrix(a, n.rows, n.width)), .b = as_rows(matrix(b, n.columns, n.width))};
  p.score.scale = 0.5;
  if (band >= 0) p.range = ColumnRange{band, band, 0}.bounding(n.rows, n.columns);
  fold(LogSumExp<double>{}, p, LogSumExpRows<double>{lse, low, {}}, splits);
}
// class_weight: [columns + 1], the mean of the weights and the weights.
extern "C" void cross_entropy(void* a, void* b, void* target, void* bias, void* class_weight, Sizes n,
                              simt::Splits splits, void* loss, void* lse, void* low) {
  const CrossEntropyForward x{.x = matrix(a, n.rows, n.width),
                              .weight = matrix(b, n.columns, n.width),
                              .bias = vector(bias, n.columns),
                              .target = vector(target, n.rows, DType::kInt64),
                              .class_weight = vector(class_weight, n.columns + 1),
                              .loss = vector(loss, n.rows),
                              .lse = vector(lse, n.rows),
                              .lse_low = vector(low, n.rows),
                              .options = {.label_smoothing = 0.1, .z_loss = 0.01}};
  with_cross_entropy<double>(x, [&](const auto& m) {
    fold(m, cross_entropy_problem(x), cross_entropy_rows<double>(x), splits);
  });
}
extern "C" void distillation(void* a, void* b, void* teacher_a, void* teacher_b, Sizes n, std::int64_t kind,
                             simt::Splits splits, double* loss, double* stats) {
  const DistillationForward x{.x = matrix(a, n.rows, n.width),
                              .weight = matrix(b, n.columns, n.width),
                              .teacher_x = matrix(teacher_a, n.rows, n.other_width),
                              .teacher_weight = matrix(teacher_b, n.columns, n.other_width),
                              .options = {.loss = static_cast<DistillationLoss>(kind)}};
  const DistillationRows<double> rows{nullptr, 0, n.rows, loss, stats, {}};
  fold(NamedDistillation<double>{{}, x.options.loss}, distillation_problem(x), rows, splits);
}
extern "C" void log_probs(void* a, void* b, void* target, Sizes n, simt::Splits splits, void* log_probs,
                          void* entropy, void* top1, void* lse, void* low) {
  const LogProbsForward x{.x = matrix(a, n.rows, n.width),
                          .weight = matrix(b, n.columns, n.width),
                          .target = vector(target, n.rows, DType::kInt64),
                          .log_probs = vector(log_probs, n.rows),
                          .entropy = vector(entropy, n.rows),
                          .lse = vector(lse, n.rows),
                          .lse_low = vector(low, n.rows),
                          .top1 = vector(top1, n.rows, DType::kInt64)};
  fold(TopLogProbs<double>{}, cross_entropy_problem(x), log_probs_rows<double>(x), splits);
}
extern "C" void statistics(void* a, void* b, std::int64_t width, ProgramData data, simt::Splits splits,
                           StatisticsResults results) {
  const simt::ProgramOperands operands{{tensor(as_rows(matrix(a, data.rows, width)))},
                                       {tensor(as_rows(matrix(b, data.columns, width)))}};
  host::launch(kBlocks, [&] { simt::fold_program<P>(operands, data, results, splits); });
  if (splits.count > 1) host::launch(1, [&] { simt::combine_states<P>(results, splits); });
}
"""
SPLITS = (1, 2, 3, 5)  # of three tiles of 64 columns: alone, two and one, one each, and two without any
WORDS = 16  # room for a state of each monoid, in numbers


class Sizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("rows", "columns", "width", "other_width"))


class Splits(ctypes.Structure):
    """The struct `Splits` of device/simt/splits.cuh."""

    _fields_ = (("count", ctypes.c_int64), ("partial", ctypes.c_void_p))


def splits_of(count: int, rows: int) -> Splits:
    """With room for the states, which are NaN at first."""
    partial = nan(count, rows, WORDS)
    splits = Splits(count, partial.data_ptr())
    splits.kept = partial  # keeps the tensor alive as long as the pointer
    return splits


def nan(*shape: int) -> Tensor:
    return torch.full(shape, math.nan, dtype=torch.float64)


def summary(score):  # type: ignore[no-untyped-def]
    p = stat.softmax(score)
    return dict(lse=p.logsumexp, mean=p.mean(score * score), sum=stat.total(score), best=stat.largest(score))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = fold_source(trace(summary, {}, {}).text, 0, 0, 0, 0).text
    return built(UNIT % source, tmp_path_factory.mktemp("splits"))


def operands(width: int = 37) -> tuple[Tensor, Tensor]:
    """Rows of two tiles, columns of three; neither are whole.

    Each tile of columns begins with the same ones, so the largest score may be in all splits.
    """
    a, b = (torch.randn(lines, width, dtype=torch.float64) for lines in (70, 150))
    b[64:74] = b[128:138] = b[:10]
    return a, b


def pointers(*tensors: Tensor) -> list[Any]:
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


def sizes_of(a: Tensor, b: Tensor, other_width: int = 0) -> Sizes:
    return Sizes(len(a), len(b), a.shape[1], other_width)


def targets(a: Tensor, b: Tensor) -> Tensor:
    """Classes of all splits, the first and the last one too; some are ignored."""
    target = torch.randint(0, len(b), (len(a),))
    target[:3] = torch.tensor((0, len(b) - 1, -100))
    return target


@pytest.mark.parametrize("band", (-1, 20), ids=("all", "band"))
@pytest.mark.parametrize("count", SPLITS)
def test_log_sum_exp(count: int, band: int, kernels: ctypes.CDLL) -> None:
    a, b = operands()
    lse, low = nan(2, len(a))
    kernels.logsumexp(
        *pointers(a, b),
        sizes_of(a, b),
        ctypes.c_int64(band),
        splits_of(count, len(a)),
        *pointers(lse, low),
    )
    scores = 0.5 * a @ b.T
    if band >= 0:
        apart = torch.arange(len(b)) - torch.arange(len(a))[:, None]
        scores = scores.masked_fill(apart.abs() > band, -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("weighted", (False, True), ids=("plain", "weighted"))
@pytest.mark.parametrize("count", SPLITS)
def test_cross_entropy(count: int, weighted: bool, kernels: ctypes.CDLL) -> None:
    a, b = operands()
    target, bias = targets(a, b), torch.randn(len(b), dtype=torch.float64)
    weights = torch.rand(len(b), dtype=torch.float64) if weighted else None
    with_mean = None if weights is None else torch.cat((weights.mean()[None], weights))
    loss, lse, low = nan(3, len(a))
    kernels.cross_entropy(
        *pointers(a, b, target, bias),
        *([None] if with_mean is None else pointers(with_mean)),
        sizes_of(a, b),
        splits_of(count, len(a)),
        *pointers(loss, lse, low),
    )
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "none"}
    expected = mr.linear_cross_entropy(a, b, target, bias=bias, class_weight=weights, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", DISTILLATION_LOSSES)
@pytest.mark.parametrize("count", SPLITS)
def test_distillation(count: int, kind: str, kernels: ctypes.CDLL) -> None:
    (a, b), (teacher_a, teacher_b) = operands(), operands(51)
    loss, stats = nan(len(a)), nan(6, len(a))
    kernels.distillation(
        *pointers(a, b, teacher_a, teacher_b),
        sizes_of(a, b, teacher_a.shape[1]),
        ctypes.c_int64(DISTILLATION_LOSSES.index(kind)),
        splits_of(count, len(a)),
        *pointers(loss, stats),
    )
    expected = mr.linear_distillation(a, b, teacher_a, teacher_b, loss=kind, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", SPLITS)
def test_log_probabilities(count: int, kernels: ctypes.CDLL) -> None:
    a, b = operands()
    target = targets(a, b)
    found, top1 = nan(4, len(a)), torch.full((len(a),), -7)
    log_probs, entropy, lse, low = found
    kernels.log_probs(
        *pointers(a, b, target),
        sizes_of(a, b),
        splits_of(count, len(a)),
        *pointers(log_probs, entropy, top1, lse, low),
    )
    expected = mr.linear_log_probs(a, b, target, entropy=True, top1=True)
    assert (expected.top1 < 10).any()
    torch.testing.assert_close(log_probs, expected.log_probs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected.entropy, rtol=1e-12, atol=1e-12)
    assert torch.equal(top1, expected.top1)


@pytest.mark.parametrize("count", SPLITS)
def test_statistics(count: int, kernels: ctypes.CDLL) -> None:
    a, b = operands()
    values, low = nan(4, len(a)), nan(1, len(a))
    indices = torch.empty(1, len(a), dtype=torch.int64)
    kernels.statistics(
        *pointers(a, b),
        ctypes.c_int64(a.shape[1]),
        Data(rows=len(a), columns=len(b), scale=0.5),
        splits_of(count, len(a)),
        Results(*pointers(values, low, indices), len(a), 0),
    )
    scores = 0.5 * a @ b.T
    best = scores.max(1)  # on the CPU the lowest of equal columns
    assert (best.indices < 10).any()
    expected = (scores.logsumexp(1), (scores.softmax(1) * scores**2).sum(1), scores.sum(1), best.values)
    torch.testing.assert_close(values, torch.stack(expected), rtol=1e-13, atol=1e-13)
    assert torch.equal(indices[0], best.indices)
