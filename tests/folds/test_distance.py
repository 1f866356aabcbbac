"""`mr.stat.distance(x, y, p)`: distances of vectors, from differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr


def kernel_of(p: float) -> Any:
    @mr.statistics
    def kernel(score: Any, x: Any, y: Any, w: Any, v: Any, label: Any, column: Any) -> dict[str, Any]:
        apart = mr.stat.distance(x, y, p)
        near = mr.stat.softmax(-apart)
        return {
            "sum": mr.stat.total(torch.exp(-apart) * w),
            "vectors": mr.stat.total(torch.exp(-apart) * v),
            "mean": near.mean(v),
            "spread": near.variance(apart),
            "nearest": mr.stat.smallest(torch.where(column == label, torch.inf, apart + score), k=3),
        }

    return kernel


def inputs(
    leading: tuple[int, ...], columns: int, width: int, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, 2, dtype=torch.float64)[..., 0].to(dtype).requires_grad_()

    return {
        "a": normal(*leading, 2),
        "b": normal(columns, 2),
        "label": torch.randint(0, columns, leading),
        "row": {"x": normal(*leading, width)},
        "column": {"y": normal(columns, width), "w": normal(columns), "v": normal(columns, 4)},
    }


@pytest.mark.parametrize("p", (1, 2, 3.5))
@pytest.mark.parametrize("leading, width", (((9,), 3), ((2, 3), 1), ((), 7), ((4,), 40), ((3,), 0)), ids=str)
def test_beside_torch(leading: tuple[int, ...], width: int, p: float) -> None:
    torch.manual_seed(0)
    call = inputs(leading, 11, width)
    found, reference = kernel_of(p)(**call), kernel_of(p).reference(**call)
    rows = torch.Size(leading).numel()
    x, y = call["row"]["x"].reshape(rows, width), call["column"]["y"]
    apart = (x[:, None] - y).abs().pow(p).sum(-1)
    expected = (torch.exp(-apart) @ call["column"]["w"]).view(leading)
    torch.testing.assert_close(found.sum, expected)
    leaves = [call["a"], call["b"], call["row"]["x"], *call["column"].values()]
    results = []
    for of in (found, reference):
        real = [t for each in of for t in (each if isinstance(each, tuple) else (each,)) if t.requires_grad]
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in real]
        results.append((*real, *torch.autograd.grad(real, leaves, upstream, materialize_grads=True)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_second_derivatives() -> None:
    @mr.statistics
    def energy(score: Any, x: Any, y: Any) -> dict[str, Any]:
        return {"energy": mr.stat.softmax(-0.5 * mr.stat.distance(x, y)).logsumexp}

    torch.manual_seed(0)
    x, y = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 6))

    def of_points(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = energy(x.detach(), y.detach(), row={"x": x}, column={"y": y}).energy
        return found

    assert torch.autograd.gradcheck(of_points, (x, y))
    assert torch.autograd.gradgradcheck(of_points, (x, y))


def test_nothing_cancels() -> None:
    """From products, distances of 1e-3 at 1e3 would be of rounding alone."""

    @mr.statistics
    def nearest(score: Any, x: Any, y: Any) -> dict[str, Any]:
        return {"nearest": mr.stat.smallest(mr.stat.distance(x, y))}

    torch.manual_seed(0)
    y = 1000 + torch.randn(50, 3)
    x = y[7:9] + 2.0**-10
    found = nearest(x, y, row={"x": x}, column={"y": y}).nearest
    assert found.index.tolist() == [7, 8]
    torch.testing.assert_close(found.value, torch.full((2,), 3 * 2.0**-20), rtol=1e-6, atol=0)


def test_refused() -> None:
    x, y, a, b = torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 3), torch.ones(4, 3)

    def call(function: Any, x: Tensor = x, y: Tensor = y) -> None:
        mr.statistics(function)(a, b, row={"x": x}, column={"y": y})

    def total(make: Any) -> Any:
        return lambda score, x, y: {"t": mr.stat.total(make(score, x, y))}

    distance = mr.stat.distance
    for make, message in (
        (lambda s, x, y: distance(y, x), "expected a datum of rows .* and a datum of columns"),
        (lambda s, x, y: distance(s, y), "expected a datum of rows"),
        (lambda s, x, y: distance(x, 2 * y), "as they are"),
        (lambda s, x, y: distance(x, y, 0), "p: expected a number more than 0, got 0"),
        (lambda s, x, y: distance(x, y, s), "p: expected a number"),
        (lambda s, x, y: x - s, "x has a vector for each row, which is only for mr.stat.distance"),
        (lambda s, x, y: torch.dot(x, s), "x has a vector for each row"),
        (lambda s, x, y: x.sum(), "x has a vector for each row"),
    ):
        with pytest.raises(mr.TraceError, match=message):
            call(total(make))
    with pytest.raises(
        mr.TraceError, match="x has 65 coordinates, more than 64: write the squared distance as"
    ):
        call(total(lambda s, x, y: distance(x, y)), torch.ones(2, 65), torch.ones(4, 65))
    with pytest.raises(ValueError, match=r"column\['y'\]: expected 3 coordinates, .*, got 5"):
        call(total(lambda s, x, y: distance(x, y)), x, torch.ones(4, 5))
    with pytest.raises(ValueError, match=r"row\['x'\]: expected shape \[2\], or \[2, D\]"):
        call(total(lambda s, x, y: distance(x, y)), torch.ones(3, 3))
    with pytest.raises(TypeError, match=r"mr\.stat\.distance is for functions decorated with mr\.statistics"):
        distance(x, y)
