"""Integers of traced functions are torch's int64 on every engine, in calls of every dtype."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host_kernels import HostKernels
from host_simt import scores_data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from integers import CASES, captured, kept
from torch import Tensor

import monoidreduce as mr
from monoidreduce.folds import number_passes
from monoidreduce.folds.cuda.cuda_source import fold_source, scores_source
from monoidreduce.folds.program.graph import Node
from monoidreduce.folds.program.integers import FEW, MOST, lowered
from monoidreduce.folds.program.mods import mods_of, tables
from monoidreduce.folds.program.operations import LEAVES, OPERATIONS
from monoidreduce.folds.program.tracing import trace
from monoidreduce.folds.torch.reader import evaluate

stat = mr.stat
F32, F64 = torch.float32, torch.float64
DTYPES = (F64, F32, torch.bfloat16, torch.float16)
ROWS, COLUMNS = 37, 43


def counts(name: str, of: Any, dtype: torch.dtype) -> Tensor:
    """How many columns each row keeps. Captured tensors are indexed by rows and columns."""
    t, keeps = captured(ROWS, COLUMNS), CASES[name]
    table = t.pop("table")
    fold = mr.statistics(
        lambda score, row, column: dict(n=stat.count(keeps(row, column, t | {"table": table})))
    )
    a, b = torch.ones(ROWS, 1, dtype=dtype), torch.ones(COLUMNS, 1, dtype=dtype)
    found: Tensor = getattr(fold, of)(a, b).n
    return found


# A statistic's captured tensors are indexed by rows alone or by columns alone.
OF_STATISTICS = tuple(name for name in CASES if name != "table")


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OF_STATISTICS)
def test_statistics(name: str, dtype: torch.dtype) -> None:
    assert torch.equal(counts(name, "__call__", dtype), kept(name, ROWS, COLUMNS).sum(1))


@pytest.mark.parametrize("name", OF_STATISTICS)
def test_reference(name: str) -> None:
    assert torch.equal(counts(name, "reference", F32), kept(name, ROWS, COLUMNS).sum(1))


@pytest.mark.parametrize("name", OF_STATISTICS)
def test_some_columns_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does where there is no compiler."""
    monkeypatch.setattr(number_passes, "has_kernels", lambda a: False)
    assert torch.equal(counts(name, "__call__", F32), kept(name, ROWS, COLUMNS).sum(1))


@pytest.mark.parametrize("dtype", (F64, F32), ids=str)
def test_generated_source_of_statistics(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in one program, which the host's compiler takes."""
    HostKernels(tmp_path).install(monkeypatch)
    t = captured(ROWS, COLUMNS)
    fold = mr.statistics(
        lambda score, row, column: {
            f"n{k}": stat.count(CASES[name](row, column, t)) for k, name in enumerate(OF_STATISTICS)
        }
    )
    found = fold(torch.ones(ROWS, 1, dtype=dtype), torch.ones(COLUMNS, 1, dtype=dtype))
    for name, ours in zip(OF_STATISTICS, found, strict=True):
        assert torch.equal(ours, kept(name, ROWS, COLUMNS).sum(1)), name


def attended(q: Tensor, mask: Any, **options: Any) -> Tensor:
    """[M, N]: the keys that each query keeps. They have equal weights, and values are a unit matrix."""
    columns = COLUMNS
    k = torch.zeros(1, 1, columns, q.shape[3], dtype=q.dtype)
    v = torch.eye(columns, dtype=q.dtype)[None, None]
    return mr.attention(q, k, v, mask_mod=mask, **options)[0, 0] != 0


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, dtype: torch.dtype) -> None:
    t, keeps = captured(ROWS, COLUMNS), CASES[name]
    mask = lambda b, h, i, j: keeps(i, j, t)  # noqa: E731
    expected = kept(name, ROWS, COLUMNS)
    assert torch.equal(attended(torch.zeros(1, 1, ROWS, 4, dtype=dtype), mask), expected)


@pytest.mark.parametrize("name", CASES)
def test_block_mask(name: str) -> None:
    t, keeps = captured(ROWS, COLUMNS), CASES[name]
    blocks = mr.block_mask(lambda b, h, i, j: keeps(i, j, t), None, None, ROWS, COLUMNS, block_size=1)
    assert torch.equal(blocks.kinds[0, 0] != 0, kept(name, ROWS, COLUMNS))


def test_packed_sequences() -> None:
    """Indices within sequences, and data by the number of the sequence."""
    lengths = (20, 17)
    times = captured(ROWS, COLUMNS)["time"]
    mask = lambda b, h, i, j: (times[i] * (b + 2**35) - times[j] * (b + 2**35) >= 2**46) | (i == j)  # noqa: E731
    q = torch.zeros(37, 1, 4)
    v = torch.eye(37)[:, None]
    cu_seqlens = torch.tensor([0, 20, 37])
    found = mr.attention_varlen(q, q, v, cu_seqlens, mask_mod=mask)[:, 0] != 0
    expected = torch.zeros(37, 37, dtype=torch.bool)
    for b, (first, length) in enumerate(zip((0, 20), lengths, strict=True)):
        i = torch.arange(length)
        of = mask(b, 0, i[:, None], i)
        expected[first : first + length, first : first + length] = of
    assert torch.equal(found, expected)


UNIT = """
#include "monoidreduce/device/program/score_element.h"
#include "monoidreduce/monoid.h"
namespace monoidreduce {
%s
}
using namespace monoidreduce;
using P = Program<%s>;
extern "C" void run(ModifiedScoresData data, int first, bool* kept, double* score) {
  using R = P::Real;
  for (int i = 0; i < data.rows; ++i) {
    for (int j = 0; j < data.columns; ++j) {
      const int query = first + i, position = first + j, at = i * data.columns + j;
      const ScoreElement<R> e{R(0), 0, 0, query, position, R(query), R(position), R(position - query),
                              data.tables, data.size};
      kept[at] = P::keeps(e), score[at] = P::score(e);
    }
  }
}
"""


def generated(
    score: Any, mask: Any, real: str, folder: Path, first: int = 0, most: int = FEW
) -> tuple[Tensor, Tensor]:
    """Kept, and scores of 0 modified, by the source of kernels. first: number of the first row and column."""
    traced = mods_of(score, mask)
    with torch.no_grad():
        real_table, integer_table, sizes = tables(traced.tensors, torch.empty(0, dtype=F32), ())
    unit, library = folder / "unit.cpp", folder / "unit.so"
    unit.write_text(UNIT % (scores_source(traced.text, most=most).text, real))
    flags = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined")
    flags += ("-fno-sanitize-recover=undefined", "-static-libubsan")
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, "-I", mr.get_include(), unit, "-o", library], check=True)
    found, scores = torch.empty(ROWS, COLUMNS, dtype=torch.bool), torch.empty(ROWS, COLUMNS, dtype=F64)
    data = scores_data((real_table, integer_table), sizes, (ROWS, COLUMNS))
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (found, scores)]
    ctypes.CDLL(str(library)).run(data, first, *pointers)
    return found, scores


@pytest.mark.parametrize("real", ("float", "double"))
def test_generated_source_of_scores(real: str, tmp_path: Path) -> None:
    """Each case as a bit of the score, so that a program has several. Undefined behaviour ends the test."""
    t = captured(ROWS, COLUMNS)
    names = list(CASES)
    for part in range(0, len(names), 6):
        cases = names[part : part + 6]

        def score(s: Any, b: Any, h: Any, i: Any, j: Any, cases: list[str] = cases) -> Any:
            return sum(torch.where(CASES[name](i, j, t), float(2**k), 0.0) for k, name in enumerate(cases))

        folder = tmp_path / str(part)
        folder.mkdir()
        _, found = generated(score, None, real, folder)
        for k, name in enumerate(cases):
            assert torch.equal(found.long() >> k & 1, kept(name, ROWS, COLUMNS).long()), name


@pytest.mark.parametrize("first", (0, 2**24 - 50, 2**24 + 1, 2**31 - 100))
def test_real_numbers_of_indices(first: int, tmp_path: Path) -> None:
    """An index is converted once, to the nearest float: also beyond 2^24, which not all floats are."""
    most = FEW if first + 50 <= FEW else MOST
    score = lambda s, b, h, i, j: (j - i + 3) * 1.0 + 0.25 * (i + 1)  # noqa: E731
    _, found = generated(score, None, "float", tmp_path, first, most)
    i, j = torch.arange(first, first + ROWS)[:, None], torch.arange(first, first + COLUMNS)
    assert torch.equal(found, ((j - i + 3).float() + 0.25 * (i + 1).float()).double())


def test_ordinary_masks_need_no_64_bits() -> None:
    """What most masks are made of is computed as it was: in 32 bits, and without conversions."""
    doc, prefix = torch.arange(60).int() // 7, torch.tensor([3, 5], dtype=torch.int32)
    mask = lambda b, h, i, j: ((i - j <= 40) & (i >= j) & (doc[i] == doc[j])) | (j < prefix[b])  # noqa: E731
    score = lambda s, b, h, i, j: s + (j - i + 3) * 0.5 + (i // 128 + h % 4)  # noqa: E731
    source = scores_source(mods_of(score, mask).text).text
    assert "W(" not in source and "W x" not in source and "<W>" not in source
    text = trace(lambda score, column, label: dict(n=stat.count(column == label)), {}, {}).text
    assert "W x" not in fold_source(text, 0, 2, 0, 0).text


INTEGERS = st.sampled_from(
    [0, 1, -1, 2, 3, -7, 1000003, 2**31 - 1, -(2**31), 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)]
)
ARITHMETIC = ("index_add", "index_sub", "index_mul", "index_div", "index_mod", "index_and", "index_or")


@st.composite
def programs(draw: Any) -> tuple[list[Node], list[int]]:
    """Random ones of integers, with comparisons as roots."""
    nodes: list[Node] = [("query",), ("position",), ("row_index", 0, "int64"), ("column_index", 0, "int8")]
    nodes += [("row_index", 1, "uint32"), ("column_index", 1, "int64")]
    nodes += [("integer", draw(INTEGERS)) for _ in range(3)]
    integers = list(range(len(nodes)))
    pick = lambda: draw(st.sampled_from(integers))  # noqa: E731
    roots = []
    for _ in range(draw(st.integers(1, 8))):
        nodes.append((draw(st.sampled_from(ARITHMETIC)), pick(), pick()))
        integers.append(len(nodes) - 1)
        nodes.append((draw(st.sampled_from(("index_lt", "index_le", "index_eq"))), pick(), pick()))
        roots.append(len(nodes) - 1)
        nodes.append(("index_where", roots[-1], pick(), pick()))
        integers.append(len(nodes) - 1)
    return nodes, roots


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(program=programs(), most=st.sampled_from((FEW, MOST)))
def test_lowering(program: Any, most: int) -> None:
    """The same values; what is not wide fits in 32 bits, and data that are saturated are only compared."""
    nodes, roots = program
    numbers = torch.tensor([0, 1, 5, most - 1])
    wide = torch.tensor([0, -1, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)])
    grids = {("query",): numbers, ("position",): numbers, ("row_index", 0): wide, ("column_index", 1): wide}
    grids |= {
        ("column_index", 0): torch.tensor([-128, 0, 127]),
        ("row_index", 1): torch.tensor([0, 2**32 - 1]),
    }
    of = dict(zip(grids, torch.meshgrid(*grids.values(), indexing="ij"), strict=True))
    of = {leaf: t.reshape(-1)[:: 7 if len(t.reshape(-1)) > 9000 else 1] for leaf, t in of.items()}

    def exact(node: Node) -> Tensor:
        return of[node[:2]]

    def engine(node: Node) -> Tensor:
        if node[0] == "wide_integer":
            return torch.tensor(node[1])
        if node[0].startswith("wide_"):
            return of[node[0].removeprefix("wide_"), node[1]]
        return of[node].clamp(-(2**31), 2**31 - 1)

    like = torch.empty(0)
    written, found = lowered(nodes, roots, most)
    expected, values = evaluate(nodes, roots, exact, like), evaluate(written, found, engine, like)
    for root, ours in zip(roots, found, strict=True):
        assert torch.equal(*torch.broadcast_tensors(values[ours], expected[root]))
    for number, value in values.items():
        name = written[number][0]
        kind = LEAVES[name] if name in LEAVES else OPERATIONS[name].kinds[-1]
        if kind == "index":
            assert value.min() >= -(2**31) and value.max() < 2**31, written[number]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", (False, True))
def test_divided_by_zero(wide: bool, dtype: torch.dtype) -> None:
    """The quotient is 0 and the rest is the number; the least number divided by -1 wraps."""
    numbers = torch.tensor([-(2**63), 2**62, 5] if wide else [-5, 0, 5])
    fold = mr.statistics(
        lambda score, row, column: dict(
            zero=stat.count((numbers[column] // row == 0) & (numbers[column] % row == numbers[column])),
            one=stat.count(
                (numbers[column] // (row - 1) == -numbers[column]) & (numbers[column] % (row - 1) == 0)
            ),
        )
    )
    a, b = torch.zeros(1, 1, dtype=dtype), torch.zeros(3, 1, dtype=dtype)
    for call in (fold, fold.reference):
        assert call(a, b).zero == 3 and call(a, b).one == 3


def test_indices_of_tensors_by_64_bits() -> None:
    """The nearest element, wherever the index is: negative ones count from the end."""
    table = torch.arange(11.0)
    far = torch.tensor(
        [0, 3, -1, -11, -12, 10, 11, 2**31 - 1, 2**31, 2**32 + 3, -(2**32), 2**63 - 1, -(2**63)]
    )
    far32 = far.clamp(-(2**31), 2**31 - 1).int()
    q = torch.zeros(1, 1, len(far), 1)
    k, v = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    expected = torch.where(far < 0, far + 11, far).clamp(0, 10).float()
    for index in (far, far32):
        _, lse = mr.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[index[i]], return_lse=True)  # noqa: B023
        assert torch.equal(lse[0, 0], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conversions_to_real_numbers(dtype: torch.dtype) -> None:
    """To the dtype of the statistics, rounded once."""
    x = torch.tensor([2**24 + 1, 2**31 + 129, 2**40 + 1, -(2**53) - 1, 2**63 - 1, 7])
    real = F64 if dtype == F64 else F32
    fold = mr.statistics(
        lambda score, row: dict(
            x=stat.total(x[row]), less=stat.count(x[row] < 2.0**24 + 1.5), sign=stat.total(torch.sign(x[row]))
        )
    )
    found = fold(torch.zeros(len(x), 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype))
    assert torch.equal(found.x, x.to(real))
    assert torch.equal(found.less.bool(), x.to(real) < torch.tensor(2.0**24 + 1.5, dtype=real))
    assert torch.equal(found.sign, x.sign().to(real))


def test_labels_of_64_bits() -> None:
    """Those that no column has, however near their low halves are; in sums too, and of a compared datum."""
    label = torch.tensor([1, 2**32 + 1, -(2**32) + 1, 2**31 - 1, -(2**63), 2**63 - 1])
    fold = mr.statistics(
        lambda score, column, label, t: dict(
            same=stat.count(column == label),
            moved=stat.count(column + 2**32 == label),
            above=stat.count(label > column),
            of_columns=stat.count(t == label),
        )
    )
    a, b = torch.zeros(6, 1), torch.zeros(3, 1)
    found = fold(a, b, label=label, column={"t": label[1:4]})
    j = torch.arange(3)
    assert torch.equal(found.same, (j == label[:, None]).sum(1))
    assert torch.equal(found.moved, (j + 2**32 == label[:, None]).sum(1))
    assert torch.equal(found.above, (label[:, None] > j).sum(1))
    assert torch.equal(found.of_columns, (label[1:4] == label[:, None]).sum(1))


def test_a_supervised_contrastive_count() -> None:
    classes = torch.tensor([0, 1, 2, 0, 1, 2]) + 2**40
    fold = mr.statistics(lambda score, row, column: dict(n=stat.count(classes[row] == classes[column])))
    assert fold(torch.zeros(6, 2), torch.zeros(6, 2)).n.tolist() == [2] * 6


def test_gradients_of_columns_by_64_bits() -> None:
    """Derived programs have the same integers, rows and columns exchanged."""
    classes = torch.tensor([0, 1, 0, 1]) + 2**33
    of_column, of_row = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    fold = mr.statistics(
        lambda score, row, column: dict(
            x=stat.total(
                torch.where(classes[row] == classes[column], of_column[column] * of_row[row] * score, 0.0)
            )
        )
    )
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    for leaf in (of_column, of_row):
        found, expected = (torch.autograd.grad(f(a, b).x.sum(), leaf)[0] for f in (fold, fold.reference))
        torch.testing.assert_close(found, expected)


def test_more_columns_than_float32_counts() -> None:
    columns = 2**24 + 3
    fold = mr.statistics(
        lambda score, column: dict(n=stat.count(column >= 0), last=stat.count(column + 2**31 > 2**24 + 2**31))
    )
    found = fold(torch.zeros(1, 1), torch.zeros(columns, 1))
    assert found.n == columns and found.last == 2


def test_tables_have_numbers_of_32_bits() -> None:
    q = torch.zeros(1, 1, 2, 4, device="meta")
    large = torch.empty(2**31, dtype=torch.int8, device="meta")
    with pytest.raises(
        ValueError, match="captured tensors: expected at most 2147483647 numbers, got 2147483648"
    ):
        mr.attention(q, q, q, mask_mod=lambda b, h, i, j: large[i] > j)


@pytest.fixture
def of_uint64() -> Iterator[Tensor]:
    yield torch.tensor([1, 2**63 + 5], dtype=torch.uint64)


def test_uint64_is_refused_by_name(of_uint64: Tensor) -> None:
    a, q = torch.zeros(2, 1), torch.zeros(1, 1, 2, 4)
    count = mr.statistics(lambda score, t: dict(n=stat.count(t > 3)))
    for kind in ("row", "column"):
        with pytest.raises(
            TypeError,
            match=rf"{kind}\['t'\]: expected .*write t.to\(torch.int64\), got torch.uint64",
        ):
            count(a, a, **{kind: {"t": of_uint64}})
    with pytest.raises(TypeError, match=r"label: expected .*got torch\.uint64"):
        mr.statistics(lambda score, label: dict(n=stat.count(label > 3)))(a, a, label=of_uint64)
    with pytest.raises(mr.TraceError, match=r"got torch\.uint64: write t\.to"):
        mr.statistics(lambda score, row: dict(n=stat.count(of_uint64[row] > 3)))(a, a)
    with pytest.raises(mr.TraceError, match=r"got torch\.uint64: write t\.to"):
        mr.attention(q, q, q, mask_mod=lambda b, h, i, j: of_uint64[i] > j)


@pytest.mark.parametrize("which", ("dtype", "rank"))
def test_data_that_change_kind_are_traced_again(which: str) -> None:
    """`t.data = other` leaves the object as it is."""
    t = torch.arange(4, dtype=torch.int8)
    q = torch.zeros(1, 1, 4, 2)
    v = torch.eye(4)[None, None]
    mask = lambda b, h, i, j: (t[i] == t[j]) | (i == j)  # noqa: E731
    fold = mr.statistics(lambda score, row, column: dict(n=stat.count(t[row] == t[column])))
    a = torch.zeros(4, 1)
    mr.attention(q, q, v, mask_mod=mask), fold(a, a)
    if which == "rank":
        t.data = torch.zeros(4, 4, dtype=torch.int8)
        for call in (lambda: mr.attention(q, q, v, mask_mod=mask), lambda: fold(a, a)):
            with pytest.raises(mr.TraceError, match="indexed by 1 of 2 axes"):
                call()
        return
    t.data = torch.tensor([2**40, 1, 2**40, 1 + 2**32])
    expected = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]).bool()
    assert torch.equal(mr.attention(q, q, v, mask_mod=mask)[0, 0] != 0, expected)
    assert torch.equal(fold(a, a).n, expected.sum(1))
