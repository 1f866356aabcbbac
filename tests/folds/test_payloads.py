"""Statistics of vectors: a datum of columns [V, E] in means and totals.

The functions of `folds.FOLDS` that have payloads are tested with all others, in each dtype and on each
engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import stat
from monoidreduce._ops.registry import call_op
from monoidreduce.folds.program.graph import Graph
from monoidreduce.folds.program.payloads import separated
from monoidreduce.folds.program.program import Program

F64 = torch.float64


@mr.statistics
def masked_mean(score: Any, column: Any, row: Any, v: Any) -> Any:
    p = stat.softmax(torch.where(column <= row, score, -math.inf))
    return dict(mean=p.mean(v), scaled=p.mean(torch.sigmoid(score) * v))


@mr.statistics
def kernel_sum(score: Any, v: Any) -> Any:
    return dict(force=stat.total(torch.exp(score) * v))


@mr.statistics
def attention(score: Any, v: Any) -> Any:
    p = stat.softmax(score)
    return dict(mean=p.mean(v), lse=p.logsumexp)


def leaf(*sizes: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(sizes, dtype=F64).to(dtype).requires_grad_()


def test_a_payload_sum_of_several_vectors_of_a_column() -> None:
    """It is the sum of as many payload sums of one vector each, and so are its gradients."""
    graph = Graph()
    score, column, row = graph.leaf("score"), graph.leaf("position"), graph.leaf("row", 0)
    log_weight = score.where(column < 7, score, -math.inf).number
    weights = [each.number for each in (graph.constant(1.0), score * row, graph.apply("exp", score))]
    payloads = ((0, weights[0], weights[1]), (-1, weights[2], weights[1]))
    program = Program(tuple(graph.nodes), softmaxes=((log_weight,),), payloads=payloads)
    a, b, data, payload = leaf(10, 3), leaf(16, 3), leaf(1, 10), leaf(16, 2 * (4 + 2))
    inputs = [a, b, None, None, data, None, payload, *[None] * 4]
    found = call_op("statistics", *inputs, program.text, [4, 2], 2, [], 0.5, None)[:2]
    apart = call_op("statistics", *inputs, separated(program.text), [4, 2, 4, 2], 2, [], 0.5, None)[:2]
    expected = apart[0], apart[1].unflatten(1, (2, 6)).sum(1)
    torch.testing.assert_close(found, expected)
    upstream, leaves = [torch.randn_like(t) for t in found], (a, b, data, payload)
    gradients = (torch.autograd.grad(each, leaves, upstream) for each in (found, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
def test_a_vector_that_no_row_reaches_does_not_matter(value: float) -> None:
    a, b, v = leaf(5, 3), leaf(8, 3), leaf(8, 4)
    with torch.no_grad():
        v[6:] = value
    found = masked_mean(a, b, column={"v": v})
    expected = masked_mean.reference(a, b, column={"v": v})
    upstream = [torch.randn_like(t) for t in found]
    assert all(t.isfinite().all() for t in found)
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(found, (a, b, v), upstream)
    seen = (a, b[:6], v[:6])
    of_seen = torch.autograd.grad(
        masked_mean.reference(seen[0], seen[1], column={"v": seen[2]}), seen, upstream
    )
    torch.testing.assert_close(gradients[0], of_seen[0])
    for gradient, of_rest in zip(gradients[1:], of_seen[1:], strict=True):
        torch.testing.assert_close(gradient[:6], of_rest)
        assert not gradient[6:].any()


def test_a_vector_that_is_not_finite_reaches_its_rows_alone() -> None:
    a, b, v = leaf(5, 3), leaf(5, 3), leaf(5, 4).detach()
    v[3, 1] = math.nan
    found = masked_mean(a, b, column={"v": v})
    for result in found:
        assert result[:3].isfinite().all()
        assert result[3:, 1].isnan().all()


def test_no_columns_no_rows_and_no_width() -> None:
    for rows, columns, width in ((3, 0, 4), (0, 5, 4), (3, 5, 0)):
        a, b, v = leaf(rows, 2), leaf(columns, 2), leaf(columns, width)
        for fold in (attention, kernel_sum, masked_mean):
            found = fold(a, b, column={"v": v})
            assert found[0].shape == (rows, width)
            if not columns:
                assert not found[0].any()
            gradients = torch.autograd.grad(sum(t.sum() for t in found), (a, b, v), materialize_grads=True)
            assert [t.shape for t in gradients] == [a.shape, b.shape, v.shape]
            if not columns:
                assert not any(t.any() for t in gradients)


def test_a_row_of_ignore_index_has_no_part() -> None:
    @mr.statistics
    def of_label(score: Any, column: Any, label: Any, v: Any) -> Any:
        p = stat.softmax(torch.where(column == label, 2 * score, score))
        return dict(mean=p.mean(v), total=stat.total(torch.tanh(score) * v))

    a, b, v = leaf(6, 3), leaf(7, 3), leaf(7, 2)
    label = torch.tensor([0, -100, 3, -100, 6, 2])
    with torch.no_grad():
        a[1] = math.nan
    found = of_label(a, b, label=label, column={"v": v})
    kept = label != -100
    own = of_label.reference(a[kept], b, label=label[kept], column={"v": v})
    upstream = [torch.randn_like(t) for t in found]
    gradients = torch.autograd.grad(found, (a, b, v), upstream)
    expected = torch.autograd.grad(own, (a, b, v), [t[kept] for t in upstream])
    for ours, theirs in zip(found, own, strict=True):
        assert not ours[~kept].any()
        torch.testing.assert_close(ours[kept], theirs)
    torch.testing.assert_close(gradients, expected)


def test_it_is_attention() -> None:
    a, b, v = leaf(2, 3, 5, 8), leaf(11, 8), leaf(11, 6)
    found = attention(a, b, column={"v": v}, scale=0.3)
    heads = [t.expand(2, 3, *t.shape) for t in (b, v)]
    expected = mr.attention(a, *heads, scale=0.3, return_lse=True)
    torch.testing.assert_close(tuple(found), expected)


@mr.statistics
def mean_of_two_scores(score: Any, other: Any, v: Any) -> Any:
    return dict(mean=stat.softmax(score + torch.tanh(other)).mean(v))


@pytest.mark.parametrize(("rows", "columns"), ((300, 2), (16, 300), (100, 100)))
def test_means_of_two_scores_are_as_accurate_as_torchs(rows: int, columns: int) -> None:
    """Norms of errors of the mean, and of its gradients by the operands and the vectors, over eight draws.

    The engine computes the log-sum-exp and torch the weights, from scores that they round differently. So the
    mean is divided by the sum of the weights, and gradients have a log-sum-exp of torch's scores.
    """

    def run(fold: Any, operands: list[Tensor], v: Tensor, g: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (*operands, v)]
        mean = fold(*leaves[:4], column={"v": leaves[4]}).mean
        return [mean.detach(), *torch.autograd.grad(mean, leaves, g)]

    torch.manual_seed(0)
    ours, torchs = (torch.zeros(6, dtype=F64) for _ in range(2))
    for _ in range(8):
        given = [torch.randn(count, width) for width in (72, 70) for count in (rows, columns)]
        v, g = torch.randn(columns, 7), torch.randn(rows, 7)
        exact = run(mean_of_two_scores.reference, [t.double() for t in given], v.double(), g.double())
        for errors, fold in ((ours, mean_of_two_scores), (torchs, mean_of_two_scores.reference)):
            found = run(fold, given, v, g)
            errors += torch.stack([(x - y).square().sum() for x, y in zip(found, exact, strict=True)])
    ratios = (ours / torchs).sqrt()
    assert (ratios <= 1.25).all(), ratios


def test_the_mean_of_one_column_is_its_vector() -> None:
    given = [torch.randn(count, width) for width in (72, 70) for count in (300, 1)]
    v = torch.randn(1, 7)
    assert torch.equal(mean_of_two_scores(*given, column={"v": v}).mean, v.expand(300, 7))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_a_float32_payload_is_not_rounded(dtype: torch.dtype) -> None:
    a, b, v = leaf(20, 8, dtype=dtype), leaf(300, 8, dtype=dtype), leaf(300, 4, dtype=torch.float32)
    for fold in (attention, kernel_sum):
        found = fold(a, b, column={"v": v})[0]
        expected = fold.reference(a.double(), b.double(), column={"v": v.double()})[0]
        assert found.dtype == torch.float32
        assert (found - expected).norm() < 1e-6 * expected.norm()
        upstream = torch.randn_like(found)
        gradients = torch.autograd.grad(found, (a, b, v), upstream)
        exact = torch.autograd.grad(expected, (a, b, v), upstream.double())
        assert [t.dtype for t in gradients] == [dtype, dtype, torch.float32]
        assert (gradients[2] - exact[2]).norm() < 1e-6 * exact[2].norm()


def test_totals_of_float16_may_have_weights_beyond_its_range() -> None:
    a, b, v = (torch.full((n, 1), x, dtype=torch.float16) for n, x in ((2, 4.0), (3, 3.5), (3, 1e-3)))
    found = kernel_sum(a, b, column={"v": v}).force
    torch.testing.assert_close(found, torch.full((2, 1), 3 * math.exp(14) * float(v[0])).half())


def test_strides() -> None:
    a, b, v = leaf(3, 9).mT[:, :2], leaf(2, 14).mT[::2], leaf(5, 7).mT
    found, expected = (of(a, b, column={"v": v}) for of in (masked_mean, masked_mean.reference))
    torch.testing.assert_close(found, expected)


def test_one_payload_twice_and_beside_numbers() -> None:
    @mr.statistics
    def fold(score: Any, w: Any, u: Any, v: Any) -> Any:
        p, q = stat.softmax(score), stat.softmax(-score + w)
        return dict(
            a=p.mean(v),
            b=p.mean(w * v),
            c=q.mean(v),
            d=q.mean(u),
            e=q.mean(w),
            f=stat.largest(score),
            g=p.mean(v),
        )

    a, b, w, u, v = leaf(4, 3), leaf(9, 3), leaf(9), leaf(9, 2), leaf(9, 5)
    data = {"w": w, "u": u, "v": v}
    found, expected = (of(a, b, column=data) for of in (fold, fold.reference))
    torch.testing.assert_close(found, expected)
    real = [(*r[:5], r.f.value, r.g) for r in (found, expected)]
    upstream = [torch.randn_like(t) for t in real[0]]
    gradients = [torch.autograd.grad(r, (a, b, w, u, v), upstream) for r in real]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("wanted", ("a", "b", "v", "ab"))
def test_only_the_gradients_that_are_asked_for(wanted: str) -> None:
    tensors = {"a": leaf(4, 3), "b": leaf(9, 3), "v": leaf(9, 5)}
    for name, t in tensors.items():
        t.requires_grad_(name in wanted)
    a, b, v = tensors.values()
    leaves = [tensors[name] for name in wanted]
    results = [of(a, b, column={"v": v}) for of in (masked_mean, masked_mean.reference)]
    upstream = [torch.randn_like(t) for t in results[0]]
    torch.testing.assert_close(*(torch.autograd.grad(r, leaves, upstream) for r in results))


def test_memory_does_not_hold_the_scores() -> None:
    """What autograd saves is of the size of operands and results."""
    a, b, v = (leaf(*sizes, dtype=torch.float32) for sizes in ((512, 4), (2048, 4), (2048, 3)))
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        for fold in (attention, kernel_sum):
            fold(a, b, column={"v": v})
    assert max(saved) <= 4 * 2048


@mr.statistics
def of_two_scores(score: Any, other: Any, v: Any) -> Any:
    return dict(force=stat.total(score * other * v))


@pytest.mark.parametrize("fold", (attention, masked_mean, kernel_sum, of_two_scores))
def test_explain_names_the_paths(fold: Any) -> None:
    """Those that run, also where a fold has payload sums alone; and torch, where none of ours runs."""
    operands = [leaf(5, 3), leaf(7, 3)] * (2 if fold is of_two_scores else 1)
    column = {"v": leaf(7, 4)}
    before = mr._C.path_counts()
    fold(*operands, column=column)[0].sum().backward()
    ran = {path for path, count in mr._C.path_counts().items() if count > before.get(path, 0)}
    explained = fold.explain(*operands, column=column)
    assert {path for path in (explained.forward, explained.backward) if "/torch/" not in path} == ran
    by_torch = "in chunks of columns" in str(explained)
    assert by_torch == (fold is of_two_scores)
    planned = mr.explain(fold, *operands, column=column, hardware="h100")
    assert "there is no compiler" not in str(planned)
    assert ("in chunks of columns" in str(planned)) == by_torch


@pytest.mark.parametrize("width, in_one_pass", ((128, True), (384, True), (448, False)))
def test_rows_that_fit_into_shared_memory_take_one_pass(width: int, in_one_pass: bool) -> None:
    a, b, v = (torch.empty(300, size, dtype=torch.bfloat16, device="meta") for size in (width, width, 64))

    def biased(score: Any, column: Any, v: Any) -> Any:
        p = stat.softmax(score - column)
        return dict(mean=p.mean(v), at=p.mean(column))

    planned = mr.explain(mr.statistics(biased), a, b, column={"v": v}, hardware="h100")
    assert planned.forward == "statistics_fold/cuda/sm90/bfloat16"
    assert ("one pass folds numbers and payload sums" in str(planned)) == in_one_pass


A, B, V = torch.randn(4, 3), torch.randn(5, 3), torch.randn(5, 2)


@pytest.mark.parametrize(
    "function, text",
    (
        (lambda score, v: dict(x=stat.total(v + 1)), "v has a vector for each column"),
        (lambda score, v: dict(x=stat.total(score + v)), "v has a vector for each column"),
        (lambda score, v: dict(x=stat.total(v * v)), "v has a vector for each column"),
        (lambda score, v: dict(x=stat.total(score / v)), "v has a vector for each column"),
        (lambda score, v: dict(x=stat.total(torch.exp(v))), "v has a vector for each column"),
        (lambda score, v: dict(x=stat.total(torch.where(score > 0, v, 0.0))), "write torch.where(condition"),
        (lambda score, v: dict(x=stat.largest(v)), "v has a vector for each column"),
        (lambda score, v: dict(x=stat.softmax(v).logsumexp), "v has a vector for each column"),
        (lambda score, v: dict(x=stat.total(score) if v else None), "v has a vector for each column"),
        (lambda score, v: dict(x=v[0]), "v has a vector for each column"),
        (lambda score, v: dict(x=v.sum()), "v has a vector for each column"),
    ),
)
def test_a_payload_is_used_linearly(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(mr.TraceError) as caught:
        mr.statistics(function)(A, B, column={"v": V})
    assert text in str(caught.value)


def test_arguments() -> None:
    line = r"column\['v'\]: expected shape \[5\], or \[5, E\] of floating-point numbers"
    for data, error, text in (
        (torch.randn(4, 2), ValueError, line),
        (torch.randn(5, 2, 1), ValueError, line),
        (torch.ones(5, 2, dtype=torch.int64), ValueError, line),
    ):
        with pytest.raises(error, match=text):
            attention(A, B, column={"v": data})
    with pytest.raises(ValueError, match=r"scale: expected a factor other than 0 beside the payload"):
        kernel_sum(A, B, column={"v": V}, scale=0.0)
    with pytest.raises(mr.TraceError, match="v has a vector for each row, which is only for"):
        attention(A, B, row={"v": torch.randn(4, 2)})


@pytest.mark.parametrize("fold", (attention, masked_mean))
def test_compile_and_vmap(fold: Any) -> None:
    a, b, v = leaf(5, 3), leaf(7, 3), leaf(7, 4)
    step = torch.compile(lambda a, b, v: fold(a, b, column={"v": v}), fullgraph=True, backend="aot_eager")
    results = [of(a, b, v) for of in (step, lambda a, b, v: fold(a, b, column={"v": v}))]
    upstream = [torch.randn_like(t) for t in results[0]]
    torch.testing.assert_close(*map(tuple, results))
    torch.testing.assert_close(*(torch.autograd.grad(r, (a, b, v), upstream) for r in results))
    rows = torch.randn(3, 5, 3, dtype=F64)
    batched = torch.func.vmap(lambda a: fold(a, b, column={"v": v}))(rows)
    torch.testing.assert_close(batched[0][1], fold(rows[1], b, column={"v": v})[0])


def test_flops() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    rows, columns, width, of_vector = 4, 10, 6, 3
    a, b, v = leaf(rows, width), leaf(columns, width), leaf(columns, of_vector)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(kernel_sum(a, b, column={"v": v}).force.sum(), (a, b, v))
    # Scores twice, gradients of a and b; weights times v, upstream gradients times v, the gradient of v.
    assert counter.get_total_flops() == 2 * rows * columns * (4 * width + 3 * of_vector)


def test_vectors_beside_operands_of_width_0() -> None:
    a, b = torch.zeros(3, 0, dtype=F64), torch.zeros(4, 0, dtype=F64)
    v = torch.randn(4, 5, dtype=F64, requires_grad=True)
    mean = attention(a, b, column={"v": v})[0]
    torch.testing.assert_close(mean, v.mean(0).expand(3, 5))
    torch.testing.assert_close(torch.autograd.grad(mean.sum(), v)[0], torch.full_like(v, 3 / 4))
