"""D as a matrix and its transpose: against local_gradient, autograd and torch's forward mode, in float64."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from monoid_subjects import SUBJECTS, Subject, elements, floating
from torch import Tensor

import monoidreduce as mr
from monoidreduce.monoids import ArgMax, LogWSum, Sum, local_matrix, local_tangent

every_monoid = pytest.mark.parametrize("subject", SUBJECTS, ids=repr)


def detached(state: Any) -> Any:
    return type(state)._make(field.detach() for field in state)


def states_of(subject: Subject, count: int) -> list[Any]:
    """So many elements [5], in float64, and what they fold to as the last one."""
    values = detached(elements(subject, count, 5))
    found = [type(values)._make(field[i] for field in values) for i in range(count)]
    return [*found, reduce(subject.monoid.combine, found)]


def random_like(state: Any) -> Any:
    return type(state)._make(
        torch.randn_like(f) if f.is_floating_point() else torch.zeros_like(f) for f in state
    )


def entries(state: Any) -> int:
    """How many the batch has: a state of one field has no payload."""
    return min((field for field in state), key=Tensor.dim).numel()


def flat(state: Any) -> Tensor:
    """[entries, numbers]."""
    return torch.cat([f.reshape(entries(state), -1) for f in floating(state)], 1)


def matrix_of(subject: Subject, c: Any, a: Any) -> Tensor:
    """[entries, numbers, numbers]."""
    return local_matrix(subject.monoid, c, a).reshape(entries(c), flat(a).shape[1], flat(c).shape[1])


@every_monoid
def test_the_matrix_times_g_is_the_local_gradient(subject: Subject) -> None:
    x, _, _, total = states_of(subject, 3)
    g = random_like(total)
    matrix = matrix_of(subject, total, x)
    expected = subject.monoid.local_gradient(total, x, g)
    expected = type(x)._make(e if f.is_floating_point() else f for e, f in zip(expected, x, strict=True))
    torch.testing.assert_close((matrix @ flat(g)[..., None])[..., 0], flat(expected), rtol=1e-12, atol=1e-12)


@every_monoid
def test_the_matrix_is_the_jacobian_of_the_fold(subject: Subject) -> None:
    """Transposed: torch has outputs first."""
    *found, total = states_of(subject, 4)

    def fold(moved: Tensor) -> Tensor:
        numbers, at = [], 0
        for field in found[1]:
            if field.is_floating_point():
                count = field.numel() // entries(found[1])
                numbers.append(moved[:, at : at + count].reshape(field.shape))
                at += count
            else:
                numbers.append(field)
        moving = type(found[1])._make(numbers)
        return flat(reduce(subject.monoid.combine, [found[0], moving, *found[2:]]))

    jacobian = torch.autograd.functional.jacobian(fold, flat(found[1]))  # [entries, outputs, entries, inputs]
    of_entries = torch.stack([jacobian[i, :, i] for i in range(len(jacobian))])
    matrix = matrix_of(subject, total, found[1])
    torch.testing.assert_close(matrix.mT, of_entries, rtol=1e-10, atol=1e-12)


@every_monoid
def test_the_transpose_takes_tangents(subject: Subject) -> None:
    x, _, total = states_of(subject, 2)
    tangent = random_like(x)
    found = local_tangent(subject.monoid, total, x, tangent)
    matrix = matrix_of(subject, total, x)
    torch.testing.assert_close(
        flat(found), (matrix.mT @ flat(tangent)[..., None])[..., 0], rtol=1e-12, atol=1e-12
    )
    assert [f.dtype for f in found] == [f.dtype for f in total] and not any(f.requires_grad for f in found)


def test_the_tangent_of_a_fold_is_the_sum_of_those_of_its_elements() -> None:
    """Attention of one query, in forward mode."""
    scores, values = torch.randn(7, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    moves = torch.randn_like(scores), torch.randn_like(values)
    expected = torch.func.jvp(lambda s, v: (s.logsumexp(0), s.softmax(0) @ v), (scores, values), moves)[1]
    total = mr.fold(LogWSum(), LogWSum.State(scores, values), 0)
    each = LogWSum.State(*(f.expand(7, *f.shape) for f in total))
    found = local_tangent(LogWSum(), each, LogWSum.State(scores, values), LogWSum.State(*moves))
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f.sum(0), e, rtol=1e-12, atol=1e-12)


def test_equation_3_of_the_draft() -> None:
    a = LogWSum.State(torch.tensor(0.5).double(), torch.tensor([1.0, -2.0]).double())
    c = LogWSum().combine(a, LogWSum.State(torch.tensor(1.5).double(), torch.tensor([0.5, 3.0]).double()))
    share, apart = (a.log_weight - c.log_weight).exp(), a.value - c.value
    expected = share * torch.tensor([[1, apart[0], apart[1]], [0, 1, 0], [0, 0, 1]]).double()
    torch.testing.assert_close(local_matrix(LogWSum(), c, a), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3, Sum.State(torch.ones(2)), Sum.State(torch.ones(2))), TypeError, "monoid: expected an instance"),
        ((Sum(), *[Sum.State(torch.ones(2).long())] * 2), ValueError, "c: expected a state with a floating"),
        ((Sum(), torch.ones(2), Sum.State(torch.ones(2))), TypeError, "c: expected a state"),
        (
            (Sum(), Sum.State(torch.ones(2)), Sum.State(torch.ones(3))),
            ValueError,
            "a: expected the layout of c",
        ),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        local_matrix(*arguments)
    with pytest.raises(error, match=text):
        local_tangent(*arguments, arguments[-1])


def test_a_tangent_has_the_layout_of_its_element() -> None:
    x = ArgMax.State(torch.ones(2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"tangent: expected torch\.float32"):
        local_tangent(ArgMax(), x, x, x._replace(value=torch.ones(3)))


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
@every_monoid
def test_a_tangent_needs_no_recording(subject: Subject, mode: Any) -> None:
    part, _, total = states_of(subject, 2)
    tangent = random_like(part)
    expected = local_tangent(subject.monoid, total, part, tangent)
    with mode():
        found = local_tangent(subject.monoid, total, part, tangent)
    assert all(map(torch.equal, found, expected))


def test_no_rows() -> None:
    empty = LogWSum.State(torch.zeros(0), torch.zeros(0, 3))
    assert local_matrix(LogWSum(), empty, empty).shape == (0, 4, 4)
    assert local_tangent(LogWSum(), empty, empty, empty)[1].shape == (0, 3)
