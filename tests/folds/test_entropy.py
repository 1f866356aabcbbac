"""`softmax(...).entropy`: without cancellation, differentiable twice, and a monoid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import monoidreduce as mr
from monoidreduce.folds.program.program import parse
from monoidreduce.folds.program.tracing import trace
from monoidreduce.folds.torch.monoid import StatisticsMonoid


@mr.statistics
def entropies(score: Any, column: Any, label: Any, w: Any, v: Any) -> dict[str, Any]:
    p = mr.stat.softmax(score)
    others = mr.stat.softmax(torch.where(column == label, -torch.inf, w * score))
    return {
        "lse": p.logsumexp,
        "of_others": others.entropy,
        "variance": others.variance(score),
        "entropy": p.entropy,
        "out": others.mean(v),
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
        found = entropies(a, b, label=label, column={"w": w, "v": v})
        return found.entropy, found.of_others, found.variance, found.out

    found = entropies(a, b, label=label, column={"w": w, "v": v})
    expected = entropies.reference(a, b, label=label, column={"w": w, "v": v})
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    p = (a @ b.T).softmax(1)
    torch.testing.assert_close(found.entropy[2:], -(p * p.log()).sum(1)[2:])
    assert found.entropy[1] == found.of_others[1] == 0  # an ignored row
    assert torch.autograd.gradcheck(results, (a, b, w, v), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(results, (a, b, w, v))


@mr.statistics
def entropy_alone(score: Any, by: Any) -> dict[str, Any]:
    return {"entropy": mr.stat.softmax(20.0 * score + by).entropy}


@pytest.mark.isa
@pytest.mark.parametrize("columns", (1, 5, 131, 5000))
@pytest.mark.parametrize("offset", (0.0, 1000.0, -1e5))
def test_no_cancellation(offset: float, columns: int) -> None:
    """Scores are multiples of 1/8, so log weights and their differences are exact in float32. What is left
    are rounding errors of the entropy itself."""
    torch.manual_seed(0)
    a, b = torch.randint(-8, 9, (50, 1)) / 8, torch.randint(-8, 9, (columns, 1)) / 8
    a[0] = 0  # all columns alike
    by = torch.full((50,), offset, requires_grad=True)
    found = entropy_alone(a, b, row={"by": by}).entropy
    log_p = (20 * a.double() @ b.double().T).log_softmax(1)
    torch.testing.assert_close(found.double(), -(log_p.exp() * log_p).sum(1), rtol=3e-6, atol=1e-7)
    (gradient,) = torch.autograd.grad(found.sum(), by)  # a constant does not move it
    assert gradient.abs().max() < 1e-4


def test_without_columns_and_with_infinite_weights() -> None:
    @mr.statistics
    def fold(score: Any) -> dict[str, Any]:
        p = mr.stat.softmax(-1 / score.abs())
        return {"lse": p.logsumexp, "entropy": p.entropy}

    a, b = torch.ones(2, 1), torch.tensor([[0.0], [0.0], [1.0], [1.0], [1e-30]])
    assert [x.tolist() for x in fold(a, b[:0])] == [[-torch.inf] * 2, [0.0] * 2]
    assert [x.tolist() for x in fold(a, b[:2])] == [[-torch.inf] * 2, [0.0] * 2]
    assert [x.tolist() for x in fold(a, b[:3])] == [[-1.0] * 2, [0.0] * 2]
    torch.testing.assert_close(fold(a, b).entropy, torch.full((2,), 2.0).log())
    assert fold(torch.tensor([[torch.nan]]), b).entropy.isnan().all()


def test_laws() -> None:
    program = trace(
        lambda score: {
            "e": mr.stat.softmax(score).entropy,
            "m": mr.stat.softmax(score).mean(score.tanh()),
            "s": mr.stat.softmax(score).variance(score.tanh()),
            "t": mr.stat.softmax(2.0 * score).entropy,
        },
        {},
        {},
    )
    monoid = StatisticsMonoid(program.text)

    def sample(generator: torch.Generator, shape: tuple[int, ...]) -> Any:
        score = torch.randn(*shape, 5, dtype=torch.float64, generator=generator)
        return monoid.of_scores(score.reshape(-1, 5), lambda _: torch.empty(0))

    mr.check_monoid(monoid, sample)


def test_chunks_of_columns_have_the_same() -> None:
    """What torch folds in chunks of columns, where there are no kernels."""
    torch.manual_seed(0)
    a, b = torch.randn(20, 4), torch.randn(3000, 4)
    program = trace(lambda score: {"e": mr.stat.softmax(20.0 * score + 1000.0).entropy}, {}, {}).text
    monoid = StatisticsMonoid(program)
    scores = a.double() @ b.double().T
    parts = [monoid.of_scores(part.float(), lambda _: torch.empty(0)) for part in scores.split(500, 1)]
    state = parts[0]
    for part in parts[1:]:
        state = monoid.combine(state, part)
    log_p = (20 * scores).log_softmax(1)
    values, _ = monoid.project(state)
    torch.testing.assert_close(values[1].double(), -(log_p.exp() * log_p).sum(1), rtol=1e-3, atol=1e-4)


def test_of_a_class_that_is_infinitely_unlikely() -> None:
    """The difference of the scores is beyond float32's range."""
    x = torch.ones(1, 1, requires_grad=True)
    w = torch.tensor([[3e38], [-3e38]], requires_grad=True)
    found = mr.statistics(lambda score: {"e": mr.stat.softmax(score).entropy})(x, w).e
    gradients = torch.autograd.grad(found.sum(), (x, w))
    assert found == 0 and all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


def test_an_entropy_is_in_a_program_once() -> None:
    program = trace(lambda score: {"e": mr.stat.softmax(score).entropy}, {}, {}).program
    with pytest.raises(ValueError, match="expected a text that monoidreduce wrote"):
        parse(replace(program, entropies=(0, 0)).text)
