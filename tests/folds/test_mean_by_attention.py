"""softmax(f(score)).mean(v) as attention with a score_mod: against the fold, and which calls take it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce._ops.registry import call_op
from monoidreduce.folds.cuda.cuda_attention import as_attention
from monoidreduce.folds.operands import ProgramCall
from monoidreduce.folds.program.payloads import is_mean_alone
from monoidreduce.folds.program.program import parse
from monoidreduce.folds.statistics_call import Call
from monoidreduce.folds.statistics_op import Inputs

stat, F64 = mr.stat, torch.float64
ROWS, COLUMNS, SCALE = 40, 50, 0.7


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def of_everything() -> Any:
    """Integers of rows and of columns, and a table by distance."""
    table, group = normal(9), torch.randint(3, (COLUMNS,))

    @mr.statistics
    def fold(score: Any, row: Any, column: Any, n: Any, m: Any, v: Any) -> Any:
        distance = column - row
        x = score + table[torch.clamp(distance, -4, 4) + 4] - 0.1 * distance.abs()
        p = stat.softmax(x + torch.where(n != group[column], 0.5, 0.0) * m)
        return dict(mean=p.mean(v), lse=p.logsumexp)

    return fold


# Leading sizes of rows and of columns: one batch, several, and rows of several heads that share columns.
@pytest.mark.parametrize(("of_rows", "of_columns"), (((), ()), ((3,), (3,)), ((3,), ())), ids=str)
def test_as_attention(of_rows: tuple[int, ...], of_columns: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    fold = of_everything()
    a, b = normal(*of_rows, ROWS, 5), normal(*of_columns, COLUMNS, 5)
    row = {"n": torch.randint(3, (*of_rows, ROWS))}
    column = {"m": torch.randint(5, (*of_columns, COLUMNS)), "v": normal(*of_columns, COLUMNS, 6)}
    call = Call(fold, a, b, None, None, None, -100, row, column, SCALE)
    traced, tensors = fold._traced(call)
    inputs, (text, widths, batches, sizes) = call.inputs(traced, tensors)
    assert is_mean_alone(parse(text)) and (parse(text).own_row is None) == (of_rows != of_columns)
    of, payload = Inputs(*inputs), inputs[6]
    data = (of.row, of.column, of.row_index, of.column_index)
    program = ProgramCall(text, ((of.a, of.b),), data, SCALE, (of.table, of.table_index))
    found = as_attention(program, payload, batches, sizes)
    leaves = [t.requires_grad_() if t is not None and t.is_floating_point() else t for t in inputs]
    results = call_op("statistics", *leaves, text, widths, batches, sizes, SCALE, 1 << 20)
    with torch.no_grad():
        ours = found.forward()
        for x, y in zip(ours, results, strict=True):
            assert x.shape == y.shape
        for x, y in zip(ours[:2], results[:2], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        upstream = [3 * torch.randn_like(t) for t in results[:2]]
        needed = [True, True, True, False]  # of the tables the CPU engine knows none
        gradients = found.backward(*upstream, *ours[:3], needed, False)
    wanted = [leaves[i] for i in (0, 1, 6)]
    expected = torch.autograd.grad(results[:2], wanted, upstream)
    for x, y in zip(gradients[:3], expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def test_what_takes_it() -> None:
    """On a GPU's tensor cores, a mean alone, of all columns, but not in the deterministic mode."""

    @mr.statistics
    def mean(score: Any, row: Any, column: Any, v: Any) -> Any:
        return dict(mean=stat.softmax(score - 0.1 * (row - column).abs()).mean(v))

    @mr.statistics
    def beside(score: Any, row: Any, column: Any, v: Any) -> Any:
        p = stat.softmax(score - 0.1 * (row - column).abs())
        return dict(mean=p.mean(v), position=p.mean(column))

    a, b, v = (torch.randn(256, 64, dtype=torch.bfloat16) for _ in range(3))

    def path(fold: Any, *tensors: Tensor) -> str:
        a, b, v = tensors
        return mr.explain(fold, a, b, column={"v": v}, hardware="h100").forward.split("/")[0]

    assert path(mean, a, b, v) == "modified_attention_forward"
    assert path(beside, a, b, v) == "statistics_fold"

    @mr.statistics
    def masked(score: Any, row: Any, column: Any, v: Any) -> Any:
        return dict(mean=stat.softmax(torch.where((row + column) % 3 > 0, score, -torch.inf)).mean(v))

    assert path(masked, a, b, v) == "statistics_fold"  # a vector that is left out may be NaN
    torch.use_deterministic_algorithms(True)
    try:
        assert path(mean, a, b, v) == "statistics_fold"
    finally:
        torch.use_deterministic_algorithms(False)
    assert path(mean, a.float(), b.float(), v.float()) != "modified_attention_forward"
