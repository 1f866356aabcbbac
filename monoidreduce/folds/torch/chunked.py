"""The passes of a program by torch, in chunks of columns. Used on CUDA if there is no compiler for kernels.

A chunk has as many columns as fit in the workspace; its scores, and the values of each operation, are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce.folds.program.derivative import gradient
from monoidreduce.folds.program.graph import Node
from monoidreduce.folds.program.program import parse
from monoidreduce.folds.torch.monoid import StatisticsMonoid
from monoidreduce.folds.torch.reader import evaluate, scores, with_scores
from monoidreduce.workspace import get_workspace

__all__ = ["Chunked"]

_LEAST_COLUMNS = 256
_SCORES = ("score", "other", "third")


class Chunked:
    """A call.

    operands: a pair for each of up to three scores. data: row reals, column reals, row integers, column
    integers.
    """

    def __init__(
        self,
        program: str,
        operands: tuple[Tensor | None, ...],
        data: tuple[Tensor | None, ...],
        scale: float,
        workspace: int | None,
    ) -> None:
        self.text, self.program = program, parse(program)
        a, b, *_ = operands
        assert a is not None and b is not None
        self.operands, self.scale = operands, scale
        self.rows, self.columns = a.shape[0], b.shape[0]
        self.dtype = accumulation_dtype(a.dtype)
        self.data = dict(zip(("row", "column", "row_index", "column_index"), data, strict=True))
        bytes = get_workspace() if workspace is None else workspace
        self.at_once = max(bytes // (8 * max(self.rows, 1)), _LEAST_COLUMNS)

    def parts(self) -> Iterator[tuple[slice, Tensor, Callable[[Node], Tensor]]]:
        """For each chunk: its columns, its scores, and a function that gives the values of other leaves."""
        for first in range(0, max(self.columns, 1), self.at_once):
            part = slice(first, min(first + self.at_once, self.columns))
            yield part, self._scores(0, part), self._leaf(part)

    def _scores(self, of: int, part: slice) -> Tensor:
        rows, columns = self.operands[of : of + 2]
        assert rows is not None and columns is not None
        return scores(rows, columns[part], self.dtype, self.scale)

    def _leaf(self, part: slice) -> Callable[[Node], Tensor]:
        def leaf(node: Node) -> Tensor:
            name, *number = node
            if name in _SCORES:
                return self._scores(2 * _SCORES.index(name), part)
            vectors = self.data[name]
            assert vectors is not None
            vector = vectors[number[0]]
            return vector[:, None] if name.startswith("row") else vector[part]

        return leaf

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values, low words of log-sum-exps (0 here), and indices."""
        monoid = StatisticsMonoid(self.text)
        state = None
        for part, score, leaf in self.parts():
            of_part = monoid.of_scores(score, leaf, part.start)
            state = of_part if state is None else monoid.combine(state, of_part)
        values, indices = monoid.project(state)
        return values, values.new_zeros(len(self.program.softmaxes), self.rows), indices

    def backward(
        self, known: Tensor, known_index: Tensor | None, counts: tuple[int, int], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients of the operands and of the data.

        known, known_index: row data including what `derivative.gradient` adds. counts: numbers of data
            without that.
        """
        of = gradient(self.text, *counts)
        of_rows, of_columns = self.data["row"], self.data["column"]
        inputs = (*self.operands, of_rows, of_columns)
        found = [
            torch.zeros_like(t, dtype=self.dtype) if t is not None and wanted else None
            for t, wanted in zip(inputs, needed, strict=False)
        ]
        self.data |= {"row": known, "row_index": known_index}
        by_scores = (of.score, of.other, of.third)
        roots = [i for i in (*by_scores, *of.rows, *of.columns) if i is not None]
        for part, score, leaf in self.parts():
            values = evaluate(of.nodes.nodes, roots, with_scores(score, leaf, part.start), score)
            elements = {i: values[i].expand(score.shape) for i in roots}
            for at, number in zip((0, 2, 4), by_scores, strict=True):
                if number is None:
                    continue
                rows, columns = self.operands[at : at + 2]
                assert rows is not None and columns is not None
                local = elements[number] * self.scale
                d_rows, d_columns = found[at : at + 2]
                if d_rows is not None:
                    d_rows += scores(local, columns[part].T, self.dtype, 1)
                if d_columns is not None:
                    d_columns[part] = scores(local.T, rows.T, self.dtype, 1)
            for total, axis, numbers in ((found[-2], 1, of.rows), (found[-1], 0, of.columns)):
                for k, number in enumerate(numbers):
                    if total is not None and number is not None:
                        where = total[k] if axis == 1 else total[k, part]
                        where += elements[number].sum(axis)
        return found
