"""`softmax(...).variance(f)`: without cancellation, differentiable twice, and a monoid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monoidreduce as mr
from monoidreduce.folds.program.tracing import trace
from monoidreduce.folds.torch.monoid import StatisticsMonoid


@mr.statistics
def moments(score: Any, column: Any, label: Any, w: Any, v: Any) -> dict[str, Any]:
    p = mr.stat.softmax(score)
    others = mr.stat.softmax(torch.where(column == label, -torch.inf, 0.5 * score))
    return {
        "variance": p.variance(w * score),
        "of_others": others.variance(score.tanh()),
        "mean": p.mean(w),
        "out": p.mean(v),
        "best": mr.stat.largest(score),
        "above": mr.stat.count(score > 0),
    }


def test_derivatives_of_float64() -> None:
    torch.manual_seed(0)
    a, b, w, v = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 3), (7, 3), (7,), (7, 2))
    )
    label = torch.tensor([0, -100, 3, 6, 2])

    def results(a: Any, b: Any, w: Any, v: Any) -> tuple[Any, ...]:
        found = moments(a, b, label=label, column={"w": w, "v": v})
        return found.variance, found.of_others, found.out

    found = moments(a, b, label=label, column={"w": w, "v": v})
    expected = moments.reference(a, b, label=label, column={"w": w, "v": v})
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    assert found.variance[1] == found.of_others[1] == 0  # an ignored row
    assert torch.autograd.gradcheck(results, (a, b, w, v))
    assert torch.autograd.gradgradcheck(results, (a, b, w, v))


@pytest.mark.parametrize("offset", (0.0, 1e3, -1e6))
def test_no_cancellation(offset: float) -> None:
    """E f^2 - (E f)^2 in float32 would be off by thousands for the last one."""

    @mr.statistics
    def spread(score: Any, f: Any) -> dict[str, Any]:
        p = mr.stat.softmax(score)
        return {"mean": p.mean(f), "variance": p.variance(f)}

    torch.manual_seed(0)
    f, a, b = offset + torch.randn(3000), torch.randn(4, 6), torch.randn(3000, 6)
    p = (a.double() @ b.double().T).softmax(1)
    mean = p @ f.double()
    expected = (p * (f.double() - mean[:, None]) ** 2).sum(1)
    found = spread(a, b, column={"f": f})
    torch.testing.assert_close(found.variance.double(), expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(found.mean.double(), mean, rtol=2e-7, atol=2e-6)


def test_without_columns_and_with_infinite_numbers() -> None:
    @mr.statistics
    def spread(score: Any) -> dict[str, Any]:
        p = mr.stat.softmax(0.0 * score)
        return {"mean": p.mean(1 / score), "variance": p.variance(1 / score)}

    a, b = torch.ones(2, 1), torch.tensor([[1.0], [0.0]])
    found = spread(a, b)
    assert found.mean.tolist() == [torch.inf] * 2 and found.variance.isnan().all()
    assert [x.tolist() for x in spread(a, b[:0])] == [[0.0, 0.0], [0.0, 0.0]]
    assert [x.tolist() for x in spread(a, b[:1])] == [[1.0, 1.0], [0.0, 0.0]]


def test_laws() -> None:
    program = trace(
        lambda score: {
            "m": mr.stat.softmax(score).mean(score.tanh()),
            "s": mr.stat.softmax(score).variance(score.tanh()),
            "t": mr.stat.total(score),
        },
        {},
        {},
    )
    monoid = StatisticsMonoid(program.text)

    def sample(generator: torch.Generator, shape: tuple[int, ...]) -> Any:
        score = torch.randn(*shape, 5, dtype=torch.float64, generator=generator)
        return monoid.of_scores(score.reshape(-1, 5), lambda _: torch.empty(0))

    mr.check_monoid(monoid, sample)


def test_of_a_payload_is_refused() -> None:
    @mr.statistics
    def of_vectors(score: Any, v: Any) -> dict[str, Any]:
        return {"s": mr.stat.softmax(score).variance(v)}

    with pytest.raises(mr.TraceError, match="v has a vector for each column"):
        of_vectors(torch.ones(2, 3), torch.ones(4, 3), column={"v": torch.ones(4, 5)})
