"""Captured tensors of statistics that are indexed by row and column together: against float64 torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from tables import CASES, COLUMNS, ROWS, check, full, inputs, normal, of_softmax, relative, results
from torch import Tensor

import monoidreduce as mr
from monoidreduce.folds.cuda import compiler, kernels
from monoidreduce.folds.program.program import parse, with_sizes
from monoidreduce.folds.program.tangent import tangent
from monoidreduce.folds.program.tracing import trace

stat = mr.stat
F64 = torch.float64


@pytest.mark.isa
@pytest.mark.oldest
@pytest.mark.parametrize("name", CASES)
def test_float64(name: str) -> None:
    of_ways = (results(name, F64, by) for by in ("fold", "reference", "stored"))
    for ours, reference, expected in zip(*of_ways, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(reference, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_accuracy(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)


def test_small_workspace() -> None:
    """Gradients of tables are added up over several chunks of columns."""
    with mr.workspace(1):
        table = normal(ROWS, 1000).requires_grad_()
        a, b = normal(ROWS, 3, seed=1), normal(1000, 3, seed=2)
        f = full(table, torch.tensor(1.0, dtype=F64))
        (ours,) = torch.autograd.grad(f(a, b).mean.sum(), table)
    (theirs,) = torch.autograd.grad(of_softmax(a @ b.T + table, table * (a @ b.T))[1].sum(), table)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_three_scores_and_payloads() -> None:
    """With a payload, and with a payload beside two scores, which torch computes."""
    table, v = normal(ROWS, COLUMNS).requires_grad_(), normal(COLUMNS, 6, seed=3).requires_grad_()
    a, b = inputs(F64)
    other_a, other_b = (normal(n, 2, seed=4).requires_grad_() for n in (ROWS, COLUMNS))

    @mr.statistics
    def one(score: Any, row: Any, column: Any, v: Any) -> dict[str, Any]:
        p = stat.softmax(score + table[row, column])
        return dict(out=p.mean(v), sum=stat.total(torch.tanh(table[row, column]) * score * v))

    @mr.statistics
    def two(score: Any, other: Any, row: Any, column: Any, v: Any) -> dict[str, Any]:
        p = stat.softmax(score * other + table[row, column])
        return dict(out=p.mean(v), sum=stat.total(table[row, column] * score * v))

    score, other = a @ b.T, other_a @ other_b.T
    for found, expected, more in (
        (
            one(a, b, column={"v": v}),
            ((score + table).softmax(1) @ v, (table.tanh() * score) @ v),
            (),
        ),
        (
            two(a, b, other_a, other_b, column={"v": v}),
            ((score * other + table).softmax(1) @ v, (table * score) @ v),
            (other_a, other_b),
        ),
    ):
        upstream = [3 * normal(ROWS, 6, seed=i + 11) for i in range(2)]
        leaves = (a, b, v, table, *more)
        pairs = [torch.autograd.grad(out, leaves, upstream, retain_graph=True) for out in (found, expected)]
        for ours, theirs in zip((*found, *pairs[0]), (*expected, *pairs[1]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_second_derivatives_and_forward_mode() -> None:
    table, a, b = (t.detach().requires_grad_() for t in (normal(9), *inputs(F64)))
    i, j = torch.arange(ROWS)[:, None], torch.arange(COLUMNS)

    def ours(a: Tensor, b: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        @mr.statistics
        def f(score: Any, row: Any, column: Any) -> dict[str, Any]:
            bias = table[torch.clamp(column - row, -4, 4) + 4]
            p = stat.softmax(score * bias)
            return dict(lse=p.logsumexp, total=stat.total(torch.tanh(bias * score)))

        return tuple(f(a, b))  # type: ignore[return-value]

    def stored(a: Tensor, b: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        score, bias = a @ b.T, table[(j - i).clamp(-4, 4) + 4]
        return (score * bias).logsumexp(1), torch.tanh(bias * score).sum(1)

    inner, outer = (
        [3 * normal(ROWS, seed=k) for k in (20, 21)],
        [normal(*t.shape, seed=22) for t in (a, b, table)],
    )
    found = []
    for function in (ours, stored):
        first = torch.autograd.grad(function(a, b, table), (a, b, table), inner, create_graph=True)
        of_all = [*torch.autograd.grad(first, (a, b, table), outer)]
        first = torch.autograd.grad(function(a, b, table), (a,), inner, create_graph=True)
        of_one = [*torch.autograd.grad(first, (a, table), outer[:1])]
        found.append(of_all + of_one)
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_batched_columns() -> None:
    table = normal(2, 4, 3).requires_grad_()
    a, b = normal(2, 3, 7, 5, seed=1).requires_grad_(), normal(2, 3, 11, 5, seed=2).requires_grad_()

    @mr.statistics
    def f(score: Any, batch: Any, head: Any, column: Any) -> dict[str, Any]:
        return dict(lse=stat.softmax(score * table[batch, column % 4, head]).logsumexp)

    weight = table[:, torch.arange(11) % 4].permute(0, 2, 1)[:, :, None]
    expected, found = ((a @ b.mT) * weight).logsumexp(-1), f(a, b).lse
    torch.testing.assert_close(found, expected)
    g = normal(2, 3, 7, seed=4)
    for ours, theirs in zip(
        *(torch.autograd.grad(out, (a, b, table), g) for out in (found, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_explained() -> None:
    table = torch.zeros(3, 4)
    a, b = torch.zeros(3, 2, requires_grad=True), torch.zeros(4, 2)
    of_both = "torch computes the gradient of captured tensors that are indexed by row and column together"
    for wanted in (False, True):
        fold = relative(table.requires_grad_(wanted).view(-1))
        assert (of_both in str(fold.explain(a, b))) == wanted
        assert mr.explain(fold, a, b, hardware="h100").deterministic == (not wanted)


def test_a_tensor_without_a_gradient_costs_none() -> None:
    """Beside one that has a gradient, whose table it shares."""
    learned, fixed = normal(ROWS, COLUMNS).requires_grad_(), normal(ROWS, COLUMNS, seed=1)

    @mr.statistics
    def f(score: Any, row: Any, column: Any) -> dict[str, Any]:
        return dict(x=stat.total(score * learned[row, column] * fixed[row, column]))

    a, b = inputs(F64)
    (found,) = torch.autograd.grad(f(a, b).x.sum(), learned)
    torch.testing.assert_close(found, (a @ b.T * fixed).detach())


def test_an_index_out_of_range_reads_the_end() -> None:
    table = torch.arange(3.0)

    @mr.statistics
    def f(score: Any, row: Any, column: Any) -> dict[str, Any]:
        return dict(x=stat.total(table[row + column] + 0 * score))

    a, b = torch.randn(2, 4), torch.randn(4, 4)
    assert f(a, b).x.tolist() == [5, 7]


def test_a_tensor_that_is_too_small() -> None:
    table = torch.zeros(ROWS, COLUMNS - 1)

    @mr.statistics
    def f(score: Any, row: Any, column: Any) -> dict[str, Any]:
        return dict(x=stat.total(score * table[row, column]))

    a, b = inputs(torch.float32)
    with pytest.raises(ValueError, match=rf"captured tensor table, of shape \[{ROWS}, {COLUMNS - 1}\]: "):
        f(a, b)


def test_compiled() -> None:
    """One graph, in which the tensor is an input, so that its values and its gradient are those of a call."""
    table = normal(ROWS, COLUMNS).requires_grad_()
    f = full(table, torch.tensor(1.0, dtype=F64))
    compiled = torch.compile(lambda a, b: f(a, b).lse, backend="aot_eager", fullgraph=True)
    a, b = inputs(F64)
    for _ in range(2):
        found, expected = compiled(a, b), (a @ b.T + table).logsumexp(1)
        torch.testing.assert_close(found, expected)
        g = normal(ROWS, seed=3)
        for ours, theirs in zip(
            *(torch.autograd.grad(out, (a, b, table), g) for out in (found, expected)), strict=True
        ):
            torch.testing.assert_close(ours, theirs)
        with torch.no_grad():
            table.mul_(2)


@pytest.mark.parametrize("which", ("fold", "gradient"))
@pytest.mark.parametrize("tier", ("sm90", "sm80", "simt"))
def test_kernels_compile(tier: str, which: str) -> None:
    if compiler.find() is None:
        pytest.skip("no NVRTC: pip install --group nvrtc")
    table = torch.zeros(3, 4)
    traced = trace(full(table, torch.tensor(1.0))._function, {}, {})
    text = with_sizes(traced.text, (0, 3, 4))
    counts = [len(traced.sources[kind]) for kind in ("row", "row_index", "column", "column_index")]
    image = kernels.compiled(which, text, tuple(counts), torch.bfloat16, tier, (9, 0))
    assert image.code.startswith(b"\x7fELF")


def test_the_kernel_of_payload_sums_compiles() -> None:
    if compiler.find() is None:
        pytest.skip("no NVRTC: pip install --group nvrtc")
    table = torch.zeros(3, 4)

    def f(score, row, column, v):  # type: ignore[no-untyped-def]
        return dict(out=stat.softmax(score + table[row, column]).mean(v))

    traced = trace(f, {}, {"v": "payload"})
    counts = tuple(len(traced.sources[kind]) for kind in ("row", "row_index", "column", "column_index"))
    text = with_sizes(traced.text, (0, 3, 4))
    image = kernels.compiled_payload(text, counts, (), ((0,),), torch.bfloat16, "sm90", (9, 0))
    assert image.code.startswith(b"\x7fELF")


def test_the_kernel_of_payload_sums_of_several_vectors_compiles() -> None:
    if compiler.find() is None:
        pytest.skip("no NVRTC: pip install --group nvrtc")

    def attention(score, v):  # type: ignore[no-untyped-def]
        p = stat.softmax(score)
        return dict(out=p.mean(v), lse=p.logsumexp)

    moved = tangent(
        trace(attention, {}, {"v": "payload"}).text, 0, 0, 0, 0, (True, False, False, False, True, False)
    )
    assert parse(moved.text).vectors == 2
    counts = tuple(len(moved.kept[kind]) for kind in ("row", "row_index", "column", "column_index"))
    image = kernels.compiled_payload(moved.text, counts, (), ((0, 0),), torch.float16, "sm90", (9, 0))
    assert image.code.startswith(b"\x7fELF")


def test_the_bound_on_memory_of_a_gradient() -> None:
    """The gradient of a table of distances takes the workspace and tensors of the size of operands."""
    length, width, workspace = 3072, 8, 26 << 20
    q, k, v = (torch.randn(1, 1, length, width) for _ in range(3))
    table = torch.randn(2 * length - 1, requires_grad=True)

    def distant(score: Any, _batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return score + table[query - key + length - 1]

    with mr.workspace(workspace), LiveBytes() as live:
        out = mr.attention(q, k, v, score_mod=distant)
        torch.autograd.grad(out.square().sum(), table)
    operand, scores = 4 * length * width, 4 * length * length
    assert live.most < workspace + 40 * operand < scores
