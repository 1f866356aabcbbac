"""Which columns are whose, and what every rank raises where one of them was asked for something else."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from ranks import Each, on_ranks, over
from torch import Tensor

import monoidreduce as mr
from monoidreduce.distributed.group import Columns, Group

HANDLE: Any = None


@pytest.mark.parametrize(
    "classes, rows, expected",
    (
        (None, (3, 3), [(0, 3), (3, 3)]),
        (7, (4, 3), [(0, 4), (4, 3)]),
        (7, (4, 4), [(0, 4), (4, 3)]),  # one row of padding
        (7, (6, 6), [(0, 6), (6, 1)]),
        (3, (8, 8), [(0, 3), (3, 0)]),
        (5, (2, 2, 1, 0), [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (0, (0, 0), [(0, 0), (0, 0)]),
    ),
)
def test_columns(classes: int | None, rows: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    found = [Columns.of(Group(HANDLE, i, len(rows)), "weight", n, classes) for i, n in enumerate(rows)]
    assert [(c.first, c.count) for c in found] == expected
    assert len({(c.all, c.stride) for c in found}) == 1


@pytest.mark.parametrize("rank, rows", ((0, 3), (1, 2)))
def test_a_shard_that_is_too_short(rank: int, rows: int) -> None:
    with pytest.raises(
        ValueError, match=rf"weight: expected . rows on rank {rank} of 2, .* ranks.classes=7, got {rows}"
    ):
        Columns.of(Group(HANDLE, rank, 2), "weight", rows, 7)


def _call(
    group: Any, operator: str, tensors: dict[str, Tensor], options: dict[str, Any]
) -> tuple[str, str, float]:
    """The error of a call, and how long it took. It compares arguments across ranks, as a first call does."""
    start = time.monotonic()
    os.environ["MONOIDREDUCE_DEBUG"] = "1"
    try:
        getattr(mr, operator)(**tensors, **over(group, options))
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        del os.environ["MONOIDREDUCE_DEBUG"]
    return "", "", 0.0


def _good() -> dict[str, Any]:
    return {"x": torch.randn(6, 4), "weight": torch.randn(5, 4), "target": torch.randint(0, 10, (6,))}


WRONG = {
    "another width": ({"x": torch.randn(6, 3)}, {}, "weight: expected shape"),
    "fewer tokens": (
        {"x": torch.randn(5, 4), "target": torch.zeros(5, dtype=torch.int64)},
        {},
        "x: expected",
    ),
    "another dtype": (
        {"x": torch.randn(6, 4).double(), "weight": torch.randn(5, 4).double()},
        {},
        "x: expected",
    ),
    "another option": ({}, {"z_loss": 0.5}, "z_loss: expected 0.0 as on rank 0, got 0.5"),
    "a wrong option": ({}, {"label_smoothing": 2.0}, "label_smoothing: expected a number in"),
    "another reduction": ({}, {"reduction": "sum"}, "reduction: expected 'mean' as on rank 0, got 'sum'"),
    "another shard": ({"weight": torch.randn(4, 4)}, {}, "ranks.classes: expected 10 as on rank 0, got 8"),
    "a gradient": ({"x": torch.randn(6, 4, requires_grad=True)}, {}, "x: expected torch.float32"),
    "no tensor": ({"weight": None}, {}, "weight: expected a tensor"),
    "other rows": (
        {},
        {"sequence_parallel": True},
        "ranks.sequence_parallel: expected False as on rank 0, got True",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_all_ranks_raise_where_one_is_wrong(name: str) -> None:
    changed, options, expected = WRONG[name]
    good = _good()
    found = on_ranks(
        2, _call, "linear_cross_entropy", Each([good, good | changed]), Each([{}, options])
    )  # fmt: skip
    assert len({kind for kind, _, _ in found}) == 1 and found[0][0] in ("TypeError", "ValueError")
    assert found[0][1].startswith(f"rank 1: {expected}")
    assert all(expected in text and seconds < 5 for _, text, seconds in found)


@pytest.mark.parametrize(
    "given, expected",
    (
        (
            {"ranks": 3},
            "ranks: expected a monoidreduce.Ranks, a ProcessGroup or a one-dimensional DeviceMesh",
        ),
        ({"classes": -1}, "ranks.classes: expected None or an int >= 0, got -1"),
        ({"grad_dtype": torch.int64}, "ranks.grad_dtype: expected None, float64"),
        ({"sequence_parallel": 1}, "ranks.sequence_parallel: expected True or False, got 1"),
        ({"classes": 30}, "weight: expected 15 rows on rank 0 of 2"),
    ),
)
def test_wrong_options(given: dict[str, Any], expected: str) -> None:
    found = on_ranks(2, _call, "linear_cross_entropy", _good(), given)
    assert found[0][1].startswith(expected)


@pytest.mark.parametrize(
    "given",
    ({"classes": 5}, {"sequence_parallel": True}, {"grad_dtype": torch.float32}),
)
def test_options_of_ranks_are_no_keywords(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(TypeError, match=rf"argument '{name}'; write ranks=mr\.Ranks\(group, {name}=\.\.\.\)"):
        mr.linear_cross_entropy(**_good(), **given)


def test_a_target_that_is_no_class() -> None:
    """Of any rank's classes."""
    wrong = _good() | {"target": torch.tensor([0, 9, 10, 1, 2, 3])}
    found = on_ranks(2, _call, "linear_cross_entropy", wrong, {})
    assert all(kind == "IndexError" and "[0, 10)" in text for kind, text, _ in found)
