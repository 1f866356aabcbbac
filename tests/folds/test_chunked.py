"""Passes by torch in chunks: they add up to the whole, and a chunk fits into the workspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce.folds.program.graph import Graph
from monoidreduce.folds.torch import chunked
from monoidreduce.folds.torch.footprint import bytes_of_element
from monoidreduce.folds.torch.reader import evaluate


@mr.statistics
def of_two_scores(score: Any, other: Any, w: Any, v: Any) -> Any:
    p = mr.stat.softmax(score)
    return dict(force=mr.stat.total(score.tanh() * other * v), mean=p.mean(other * w * v))


@mr.statistics
def ranked(score: Any, w: Any) -> Any:
    return dict(best=mr.stat.largest(score + w, k=3))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def gradients(fold: Any, call: dict[str, Any]) -> list[Tensor]:
    results = [t for each in fold(**call) for t in (each if isinstance(each, tuple) else (each,))]
    given = [t for each in call.values() for t in (each.values() if isinstance(each, dict) else (each,))]
    leaves = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
    return [*results, *torch.autograd.grad([t.square().sum() for t in results if t.requires_grad], leaves)]


# Bytes for all batches; some batches; columns of one; and rows and columns.
@pytest.mark.parametrize("workspace, chunks", ((1 << 30, 1), (50 << 20, 2), (10 << 20, 9), (0, 27)))
@pytest.mark.parametrize("data", (False, True))
def test_chunks_add_up(workspace: int, chunks: int, data: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    evaluated = chunked.Chunked._evaluated

    def noted(self: Any, *args: Any) -> Any:
        values = evaluated(self, *args)
        if self.batches > 1:
            sizes.append(next(iter(values.values())).numel())
        return values

    monkeypatch.setattr(chunked.Chunked, "_evaluated", noted)
    a, other_a = normal(3, 600, 4), normal(3, 600, 5)
    b, other_b, v = normal(3, 700, 4), normal(3, 700, 5), normal(3, 700, 2)
    w = torch.randn(3, 700, dtype=torch.float64, requires_grad=data)  # with its gradient, a batch at a time
    call = dict(a=a, b=b, other_a=other_a, other_b=other_b, column={"w": w, "v": v})
    found = gradients(of_two_scores, {**call, "workspace": workspace})
    torch.testing.assert_close(found, gradients(of_two_scores.reference, call))
    assert len(sizes) == (0 if data else 2 * chunks)  # for each payload sum
    assert sum(sizes) == (0 if data else 2 * 3 * 600 * 700)


@pytest.mark.parametrize("workspace", (1 << 30, 10 << 20, 0))
def test_the_largest_of_chunks_of_rows(workspace: int) -> None:
    call = dict(a=normal(600, 4), b=normal(700, 4), column={"w": normal(700)})
    found = gradients(ranked, {**call, "workspace": workspace})
    torch.testing.assert_close(found, gradients(ranked.reference, call))


def test_bytes_of_an_element() -> None:
    graph = Graph()
    score, row, column = graph.leaf("score"), graph.leaf("row", 0), graph.leaf("column", 0)
    sum_of_both, product, vector = score + row, score * column, row * row
    total = sum_of_both + product * vector
    # Score, sum and product; then sum, product and the product with `vector`; and one in between.
    assert bytes_of_element(graph.nodes, [total.number], torch.float32) == 4 * 4
    assert bytes_of_element(graph.nodes, [score.number, total.number], torch.float64) == 5 * 8
    below = score < row
    assert bytes_of_element(graph.nodes, [below.number], torch.float32) == 4 + 1 + 4
    assert bytes_of_element(graph.nodes, [vector.number], torch.float32) == 0


def test_only_the_values_that_are_asked_for_are_kept() -> None:
    graph = Graph()
    score = graph.leaf("score")
    square = score * score
    root = (square + 1.0).sqrt()
    x = torch.randn(3, 4)
    values = evaluate(graph.nodes, [square.number, root.number], lambda _: x, x)
    torch.testing.assert_close(values, {square.number: x * x, root.number: (x * x + 1).sqrt()})
