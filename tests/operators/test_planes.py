"""Gradients of float32 heads in planes of float16: PlaneHead, with kernels of torch in place of a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from plane_kernels import numbers, replace_plane_kernels
from torch import Tensor

from monoidreduce._ops.dlogits import (
    UNIT_UPSTREAM,
    HeadGradients,
    HeadSlice,
    Upstream,
    multiply_dlogits,
    unit_of,
)
from monoidreduce._ops.engine import _C
from monoidreduce._ops.planes import FrozenPlaneHead, PlaneHead, split_rows
from monoidreduce._ops.slices import TILE_COLUMNS, Needed

ROWS, CLASSES, WIDTH = 130, 1290, 136
SLOPE = 0.7


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lists the classes of each product for dW."""
    return replace_plane_kernels(monkeypatch)


class Given:
    """Operands whose rows differ in size, dlogits, and what is to be found."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x, self.weight = (
            torch.randn(n, WIDTH) * torch.exp2(torch.randint(-20, 1, (n, 1)).float()) for n in (ROWS, CLASSES)
        )
        self.dlogits = torch.randn(ROWS, CLASSES) / CLASSES
        self.grad = torch.rand(ROWS) + 0.5
        self.grad[3] = 0
        exact = self.grad[:, None].double() * self.dlogits.double()
        self.exact = (exact @ self.weight.double(), exact.T @ self.x.double())

    def gradients(self, needed: Needed, saved: bool, **options: Any) -> HeadGradients:
        head = PlaneHead(
            self.x,
            self.weight,
            needed,
            clusters=66,
            workspace=8 * ROWS * 2 * TILE_COLUMNS,
            saved=self.dlogits * (UNIT_UPSTREAM / SLOPE) if saved else None,
            upstream=Upstream(self.grad, unit_of(SLOPE)) if saved else None,
            **options,
        )

        def store(part: slice, heads: Sequence[HeadSlice]) -> None:
            assert not saved and heads[0].dlogits is not None
            heads[0].dlogits.copy_(self.grad[:, None] * self.dlogits[:, part])

        return multiply_dlogits([head], store)[0]


@pytest.mark.parametrize("saved", (False, True), ids=("computed", "saved"))
@pytest.mark.parametrize("wanted", ((True, True), (True, False), (False, True)))
def test_gradients(wanted: tuple[bool, bool], saved: bool, kernels: list[int]) -> None:
    """Of dlogits in slices, of at most a quarter of the classes where they are saved."""
    given = Given()
    found = given.gradients(Needed(*wanted), saved)
    for of, exact, is_wanted in zip((found.rows, found.columns), given.exact, wanted, strict=True):
        assert (of is not None) == is_wanted
        if of is not None:
            assert of.dtype == torch.float32
            assert (of - exact).norm() <= 1e-6 * exact.norm()
    if wanted[1]:
        assert kernels == ([256, 256, 256, 256, 256, 10] if saved else [266, 512, 512])


@pytest.mark.parametrize("saved", (False, True), ids=("computed", "saved"))
def test_adds_to_the_sum_that_it_is_given(saved: bool) -> None:
    given = Given()
    sums = torch.ones(CLASSES, WIDTH)
    found = given.gradients(Needed(True, True), saved, column_sums=sums)
    assert found.columns is sums
    torch.testing.assert_close(sums.double(), 1 + given.exact[1], rtol=1e-6, atol=1e-6)


def test_planes_of_the_weight_are_split_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the caller has them."""
    given = Given()
    planes, once, count = split_rows(given.weight), _C.split_rows, []

    def split(x: Tensor, *rest: Any) -> None:
        count.append(tuple(x.shape))
        once(x, *rest)

    monkeypatch.setattr(_C, "split_rows", split, raising=False)
    found = given.gradients(Needed(True, True), True, column_planes=planes)
    assert found.rows is not None
    assert (found.rows - given.exact[0]).norm() <= 1e-6 * given.exact[0].norm()
    assert (ROWS, WIDTH) in count and not any(width == WIDTH and n != ROWS for n, width in count)


def test_dlogits_that_depend_on_a_frozen_head() -> None:
    """Kernels get its planes too, those of its rows once."""
    given = Given()
    other_rows, other_columns = torch.randn(ROWS, 200), torch.randn(CLASSES, 200)
    frozen = FrozenPlaneHead(other_rows, other_columns)
    head = PlaneHead(
        given.x, given.weight, Needed(True, True), clusters=66, workspace=8 * ROWS * 2 * TILE_COLUMNS
    )

    def store(part: slice, heads: Sequence[HeadSlice]) -> None:
        student, teacher = heads
        assert student.dlogits is not None and teacher.dlogits is None
        assert teacher.row_planes is frozen.row_planes and teacher.column_planes is not None
        found = numbers(teacher.column_planes, 200)
        torch.testing.assert_close(found, other_columns[part].double(), rtol=0, atol=1e-6)
        student.dlogits.copy_(given.grad[:, None] * given.dlogits[:, part])

    (found,) = multiply_dlogits([head, frozen], store)
    for of, exact in zip((found.rows, found.columns), given.exact, strict=True):
        assert of is not None
        assert (of - exact).norm() <= 1e-6 * exact.norm()
