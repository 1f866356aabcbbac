"""The bounds of a row's columns that kernels read from a function's masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monoidreduce import stat
from monoidreduce.folds.program.ranges import column_bounds
from monoidreduce.folds.program.tracing import trace

where = torch.where
Range = tuple[int | None, int | None]  # first column and end; None if there is no bound
# Masks of (score, row, column), and the range of columns of row i.
MASKS: dict[str, tuple[Callable[..., Any], Callable[[int], Range]]] = {
    "causal": (lambda s, i, j: where(j <= i, s, -math.inf), lambda i: (None, i + 1)),
    "strictly causal": (lambda s, i, j: where(j < i, s, -math.inf), lambda i: (None, i)),
    "excluded": (lambda s, i, j: where(j > i, -math.inf, s), lambda i: (None, i + 1)),
    "window": (lambda s, i, j: where((i - j < 3) & (j - i < 2), s, -math.inf), lambda i: (i - 2, i + 2)),
    "not or": (lambda s, i, j: where(~((j < i - 1) | (j >= 2 + i)), s, -math.inf), lambda i: (i - 1, i + 2)),
    "also by score": (lambda s, i, j: where((j >= i) & (s > 0), s, -math.inf), lambda i: (i, None)),
    "either": (lambda s, i, j: where((j >= i) | (s > 0), s, -math.inf), lambda i: (None, None)),
    "by parity": (lambda s, i, j: where((j - i) % 2 == 0, s, -math.inf), lambda i: (None, None)),
    "twice the column": (lambda s, i, j: where(j + j < i, s, -math.inf), lambda i: (None, None)),
    "finite": (lambda s, i, j: where(j < i, s, -1e9), lambda i: (None, None)),
}


def bounds_of(function: Callable[..., Any], row: int) -> Range:
    program = trace(function, {}, {}).program
    first, end = None, None
    for bound in column_bounds(program.text):
        assert all(program.nodes[node][0] == "row_index" for _, node in bound.terms)
        at = bound.offset + sum(factor * row for factor, _ in bound.terms)
        if bound.upper:
            end = at if end is None else min(end, at)
        else:
            first = at if first is None else max(first, at)
    return first, end


@pytest.mark.parametrize("name", MASKS)
def test_bounds_of_masks(name: str) -> None:
    mask, expected = MASKS[name]

    def function(score: Any, row: Any, column: Any) -> Any:
        p = stat.softmax(mask(score, row, column))
        return dict(lse=p.logsumexp, mean=p.mean(score))

    for row in (0, 5):
        assert bounds_of(function, row) == expected(row)


def test_only_bounds_that_all_softmaxes_have() -> None:
    def function(score: Any, row: Any, column: Any) -> Any:
        p = stat.softmax(where((column <= row) & (column > row - 3), score, -math.inf))
        q = stat.softmax(where(column <= row, 2 * score, -math.inf))
        return dict(p=p.logsumexp, q=q.logsumexp)

    assert bounds_of(function, 4) == (None, 5)


@pytest.mark.parametrize("further", (stat.total, stat.largest, lambda score: stat.count(score > 0)))
def test_no_bounds_beside_statistics_of_all_elements(further: Callable[..., Any]) -> None:
    def function(score: Any, row: Any, column: Any) -> Any:
        p = stat.softmax(where(column <= row, score, -math.inf))
        return dict(lse=p.logsumexp, further=further(score))

    assert bounds_of(function, 4) == (None, None)
