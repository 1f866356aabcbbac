"""`largest(f, k)` and `smallest(f, k)`: values and columns in order, and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce.folds.program.tracing import trace
from monoidreduce.folds.torch.monoid import StatisticsMonoid
from monoidreduce.folds.torch.reader import largest_in_order


@mr.statistics
def ranked(score: Any, column: Any, label: Any, t: Any, w: Any, v: Any) -> dict[str, Any]:
    p = mr.stat.softmax(score)
    rival = torch.where(column == label, -math.inf, score * t + w)
    return {
        "lse": p.logsumexp,
        "best": mr.stat.largest(score),
        "rivals": mr.stat.largest(rival, k=5),
        "nearest": mr.stat.smallest((score - t) ** 2, k=3),
        "spread": p.variance(w),
        "above": mr.stat.count(score > t),
        "out": p.mean(v),
    }


@mr.statistics
def best(score: Any) -> dict[str, Any]:
    return {"best": mr.stat.largest(score, k=4)}


def flat(results: Any) -> list[Tensor]:
    return [t for each in results for t in (each if isinstance(each, tuple) else (each,))]


def inputs(rows: int, columns: int) -> dict[str, Any]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, 2, dtype=torch.float64)[..., 0].requires_grad_()

    label = torch.randint(-1, max(columns, 1), (rows,))
    label[::4] = -100
    return {
        "a": normal(rows, 6),
        "b": normal(columns, 6),
        "label": label,
        "row": {"t": normal(rows)},
        "column": {"w": normal(columns), "v": normal(columns, 2)},
    }


@pytest.mark.parametrize("rows, columns", ((9, 700), (3, 4), (5, 1), (0, 7)))
@pytest.mark.parametrize("workspace", (None, 0))
def test_beside_torch(rows: int, columns: int, workspace: int | None) -> None:
    torch.manual_seed(0)
    call = inputs(rows, columns)
    found, reference = ranked(**call, workspace=workspace), ranked.reference(**call)
    leaves = [t for each in call.values() for t in (each.values() if isinstance(each, dict) else (each,))]
    leaves = [t for t in leaves if t.requires_grad]
    results = []
    for of in (found, reference):
        real = [t for t in flat(of) if t.requires_grad]
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in real]
        results.append((*flat(of), *torch.autograd.grad(real, leaves, upstream)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)
    with torch.no_grad():
        score = call["a"] @ call["b"].T
        of_row = (score - call["row"]["t"][:, None]) ** 2
        k = min(3, columns)
        expected = of_row.topk(k, 1, largest=False)
    used = call["label"] != -100
    assert torch.equal(found.nearest.index[used, :k], expected.indices[used])
    torch.testing.assert_close(found.nearest.value[used, :k], expected.values[used])
    assert (found.nearest.value[:, k:] == math.inf).all() and (found.nearest.index[:, k:] == -1).all()
    assert (found.nearest.value[~used] == math.inf).all() and (found.rivals.index[~used] == -1).all()


def test_ties_and_special_numbers() -> None:
    """NaN is the largest; of equal numbers, zeros of both signs too, the lower column comes first."""
    rows = torch.tensor(
        [
            [1.0, 3.0, 3.0, -2.0, 3.0, 1.0],
            [0.0, -0.0, math.nan, -math.inf, 0.0, math.inf],
            [-math.inf, -math.inf, -1.0, -math.inf, -1.0, -5.0],
        ]
    )
    expected = [[1, 2, 4, 0], [2, 5, 0, 1], [2, 4, 5, 0]]
    for dtype in (torch.float32, torch.float64):
        _, at = largest_in_order(rows.to(dtype), None, 4)
        assert at.tolist() == expected
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        _, at = largest_in_order(rows.to(dtype)[:, order], order.expand(3, 6), 4)
        assert at.tolist() == expected


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_order_of_many_equal_values(dtype: torch.dtype) -> None:
    """Chunks of columns are joined in order."""
    a, b = torch.ones(2, 1, dtype=dtype), torch.ones(5000, 1, dtype=dtype)
    found = best(a, b, workspace=0).best
    assert found.index.tolist() == [[0, 1, 2, 3]] * 2 and (found.value == 1).all()


def test_vmap_and_compile() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 5, 4), torch.randn(90, 4)
    found = torch.func.vmap(lambda a: best(a, b).best)(a)
    each = [best(x, b).best for x in a]
    assert torch.equal(found.value, torch.stack([x.value for x in each]))
    assert torch.equal(found.index, torch.stack([x.index for x in each]))


def test_explain_says_who_finds_them() -> None:
    @mr.statistics
    def beside(score: Any) -> dict[str, Any]:
        return {"best": mr.stat.smallest(score, k=2), "lse": mr.stat.softmax(score).logsumexp}

    for fold, kernels in ((best, False), (beside, True)):
        for hardware in (None, "h100"):
            tensors = torch.ones(9, 8), torch.ones(70, 8)
            found = (
                fold.explain(*tensors) if hardware is None else mr.explain(fold, *tensors, hardware=hardware)
            )
            assert "torch finds the k largest, and their gradient, in chunks of columns" in str(found)
            assert (", which" in found.reasons[0]) == kernels


def test_laws() -> None:
    text = trace(lambda score: {"most": mr.stat.largest(score, k=3)}, {}, {}).text
    monoid, columns = StatisticsMonoid(text), iter(range(10**9))

    def sample(generator: torch.Generator, shape: tuple[int, ...]) -> Any:
        score = torch.randn(*shape, 3, dtype=torch.float64, generator=generator).reshape(-1, 3)
        return monoid.of_scores(score, lambda _: torch.empty(0), 3 * next(columns))

    mr.check_monoid(monoid, sample, skip=("infinities",))  # its states are not in order


@pytest.mark.parametrize("k", (0, 65, 2.0, True, "4"))
def test_k_is_checked(k: Any) -> None:
    @mr.statistics
    def of_k(score: Any) -> dict[str, Any]:
        return {"best": mr.stat.largest(score, k=k)}

    with pytest.raises(mr.TraceError, match="largest: k: expected an int from 1 to 64, got"):
        of_k(torch.ones(2, 3), torch.ones(4, 3))


def test_second_derivatives_are_refused_by_name() -> None:
    a = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(best(a, torch.randn(9, 4)).best.value.sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated once: largest\(f, k\) and smallest"):
        gradient.sum().backward()


@pytest.mark.parametrize("kind", ("row", "column"))
def test_data_that_only_a_count_reads_have_gradients_of_zero(kind: str) -> None:
    a, b = torch.randn(3, 8, requires_grad=True), torch.randn(7, 8, requires_grad=True)
    data = torch.randn(3 if kind == "row" else 7, requires_grad=True)

    @mr.statistics
    def counted(score: Any, data: Any) -> Any:
        return {"above": mr.stat.count(data > 0), "best": mr.stat.largest(score, k=3)}

    found = counted(a, b, **{kind: {"data": data}})
    d_a, d_data = torch.autograd.grad(found.best.value.sum(), (a, data))
    assert d_a.any() and d_data.shape == data.shape and not d_data.any()
