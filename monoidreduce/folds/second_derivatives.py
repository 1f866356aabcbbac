"""Derivatives of the op `statistics` in a direction, and the gradients of its gradients.

Let F be the fold, u a direction of its inputs, and F'u how its results move: the results of a fold of one
more score (tangent.py). Forward mode is F'u. For upstream gradients g, the gradient of <g, F'u> is the
derivative of the gradient of <g, F> in the direction u. So it serves second derivatives and forward mode of
gradients.

All of it is made of calls of ops. So it is right at every level of torch.func, and can be differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.registry import any_requires_grad, call_op
from monoidreduce.folds.program.program import parse
from monoidreduce.folds.program.tangent import tangent

__all__ = ["gradients_of_gradients", "tangents"]

Inputs = Sequence[Tensor | None]  # those of the op
_FLOATING = 7  # the inputs with gradients: a, b, other_a, other_b, row, column, payload


def tangents(directions: Inputs, results: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    """How the values and the payload sums of the op `statistics` move if its inputs move in a direction.

    They are differentiable in the inputs and the directions.

    Args:
        directions: one for each input; None where it does not move.
        results: those of the op for `arguments`; without gradients.
    """
    if torch.is_grad_enabled() and any_requires_grad(arguments):
        results = call_op("statistics", *arguments)
    return _Direction(directions, results, *arguments).moved


def gradients_of_gradients(cotangents: Inputs, *arguments: Any) -> list[Tensor | None]:
    """The gradients of the op `statistics_backward`: of its results times cotangents, by each argument.

    Let F be the fold, g the upstream gradients and u the cotangents. Then <u, gradient of <g, F>> is
    <g, F'u>, where F'u is the derivative in the direction u, a fold. Its gradients by g and by the inputs are
    the result.

    Raises:
        RuntimeError: the program has two scores, so its derivative has four.
    """
    grads, inputs, results = arguments[:2], arguments[2:11], arguments[11:15]
    options, needed = arguments[15:19], arguments[19]
    of_needed = zip(cotangents, needed, strict=False)
    directions = [u if wanted else None for u, wanted in of_needed][:_FLOATING]
    found: list[Tensor | None] = [None] * len(arguments)
    if any(u is not None for u in directions):
        direction = _Direction(directions, results, *inputs, *options)
        found[:2] = [None if g is None else moved for g, moved in zip(grads, direction.moved, strict=True)]
        found[2 : 2 + _FLOATING] = direction.gradients(*grads)
    return found


class _Direction:
    """The derivative of a call of the op `statistics` in a direction, as a call of a derived program.

    Attributes:
        moved: how the values and the payload sums move.
    """

    def __init__(self, directions: Inputs, results: Sequence[Tensor], *arguments: Any) -> None:
        self.inputs, self.results, self.options = arguments[:-4], results, arguments[-4:]
        program, widths, scale, workspace = self.options
        a, b, other_a, _, row, column, payload, row_index, column_index = self.inputs
        d_a, d_b, _, _, d_row, d_column, d_payload = directions[:_FLOATING]
        if other_a is not None:
            raise RuntimeError(
                "a fold of two scores can be differentiated once: its second derivative is a fold of four. "
                "Do without create_graph=True, or call the function's `reference`"
            )
        self.program, self.widths = parse(program), list(widths or ())
        counts = [0 if t is None else t.shape[0] for t in (row, row_index, column)]
        moves = (d_a is not None or d_b is not None), d_row is not None, d_column is not None
        self.derived = tangent(program, *counts, moves)
        # The score moves by <da_i, b_j> + <a_i, db_j>.
        self.moves_a, self.moves_b = d_a is not None, d_b is not None
        rows = ([d_a] if self.moves_a else []) + ([a] if self.moves_b else [])
        columns = ([b] if self.moves_a else []) + ([d_b] if self.moves_b else [])
        second: Any = None, None
        if parse(self.derived.text).scores == 2:
            second = torch.cat(rows, 1), torch.cat(columns, 1)
        vectors, self.pair_widths = None, [w for w in self.widths for _ in "dv"]
        if payload is not None:
            d_payload = torch.zeros_like(payload) if d_payload is None else d_payload
            parts = zip(*(torch.split(t, self.widths, 1) for t in (d_payload, payload)), strict=True)
            vectors = torch.cat([t for pair in parts for t in pair], 1)
        values, _, _, indices = results
        self.derived_inputs = (
            a,
            b,
            *second,
            self._kept("row", row, _or_zeros(d_row, row), values),
            self._kept("column", column, _or_zeros(d_column, column)),
            vectors,
            self._kept("row_index", row_index, indices[: len(self.program.largest)]),
            self._kept("column_index", column_index),
        )
        self.derived_options = self.derived.text, self.pair_widths, scale, workspace
        self.found = call_op("statistics", *self.derived_inputs, *self.derived_options)
        self.moved = self._moved(*self.found[:2])

    def _kept(self, kind: str, *parts: Tensor | None) -> Tensor | None:
        """The data that the derived program uses."""
        numbers = self.derived.kept[kind]
        data = [t for part in parts if part is not None and numbers for t in part.unbind(0)]
        return torch.stack([data[k] for k in numbers]) if numbers else None

    def _moved(self, found: Tensor, found_sums: Tensor) -> tuple[Tensor, Tensor]:
        values, sums, *_ = self.results
        places = self.derived.values
        moved_values = torch.stack([found[k] for k in places]) if places else torch.zeros_like(values)
        if not self.widths:
            return moved_values, torch.zeros_like(sums)
        parts, moved_sums = torch.split(found_sums, self.pair_widths, 1), []
        for (softmax, _), of_directions, of_weights, whole in zip(
            self.program.payloads, parts[::2], parts[1::2], torch.split(sums, self.widths, 1), strict=True
        ):
            moved = of_directions + of_weights
            if softmax >= 0:
                moved = moved - whole * found[self.derived.slopes[softmax]][:, None]
            moved_sums.append(moved)
        return moved_values, torch.cat(moved_sums, 1)

    def gradients(self, grad_values: Tensor | None, grad_sums: Tensor | None) -> list[Tensor | None]:
        """The gradients of <grad_values, moved values> + <grad_sums, moved sums> by the floating inputs."""
        a, _, _, _, row, column, *_ = self.inputs
        values, sums, *_ = self.results
        of_found: dict[int, Tensor] = {}  # upstream gradients of the derived program's values, by place
        if grad_values is not None:
            of_found = dict(zip(self.derived.values, grad_values.unbind(0), strict=True))
        of_pairs: Tensor | None = None
        of_sums: Tensor | None = None  # of the program's payload sums, by which the moved ones are computed
        if grad_sums is not None and self.widths:
            parts, of_wholes = torch.split(grad_sums, self.widths, 1), []
            of_pairs = torch.cat([g for g in parts for _ in "dv"], 1)
            for (softmax, _), g, whole in zip(
                self.program.payloads, parts, torch.split(sums, self.widths, 1), strict=True
            ):
                of_whole = torch.zeros_like(g)
                if softmax >= 0:
                    place = self.derived.slopes[softmax]
                    of_slope = -(g * whole).sum(1)
                    of_found[place] = of_found[place] + of_slope if place in of_found else of_slope
                    of_whole = -g * self.found[0][place][:, None]
                of_wholes.append(of_whole)
            of_sums = torch.cat(of_wholes, 1)
        upstream = _stacked(of_found, self.found[0]), of_pairs
        found = _backward(upstream, self.derived_inputs, self.found, self.derived_options)
        d_a, d_b, d_rows, d_columns, d_row, d_column, d_vectors = found
        gradients: list[Tensor | None] = [d_a, d_b, None, None, None, None, None]
        if d_rows is not None and d_columns is not None:
            width = a.shape[1]  # narrow, as vmap has no rule for a slice of all
            if self.moves_b:
                gradients[0] = _added(d_a, d_rows.narrow(1, d_rows.shape[1] - width, width))
            if self.moves_a:
                gradients[1] = _added(d_b, d_columns.narrow(1, 0, width))
        from_rows, from_columns = (
            {} if t is None else dict(zip(self.derived.kept[kind], t.unbind(0), strict=True))
            for kind, t in (("row", d_row), ("column", d_column))
        )
        if row is not None:
            gradients[4] = _stacked(from_rows, row)
        if column is not None:
            gradients[5] = _stacked(from_columns, column)
        if d_vectors is not None:
            gradients[6] = torch.cat(torch.split(d_vectors, self.pair_widths, 1)[1::2], 1)
        # The row data of the derived program are those of the program, their directions, and its values.
        before = 0 if row is None else 2 * row.shape[0]
        of_values = {k - before: g for k, g in from_rows.items() if k >= before}
        if of_values or of_sums is not None:
            upstream = _stacked(of_values, values), of_sums
            more = _backward(upstream, self.inputs, self.results, self.options)
            gradients = [_added(x, y) for x, y in zip(gradients, more, strict=True)]
        return gradients


def _or_zeros(direction: Tensor | None, of: Tensor | None) -> Tensor | None:
    return torch.zeros_like(of) if direction is None and of is not None else direction


def _added(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """x + y; None is 0."""
    return y if x is None else x if y is None else x + y


def _stacked(rows: dict[int, Tensor], like: Tensor) -> Tensor:
    """A tensor like another one, whose rows with these indices are given and whose others are 0."""
    zero = like.new_zeros(like.shape[1:])
    given = [rows.get(k, zero) for k in range(len(like))]
    return torch.stack(given).to(like.dtype) if given else torch.zeros_like(like)


def _backward(upstream: Inputs, inputs: Inputs, results: Any, options: Any) -> list[Tensor | None]:
    """The gradients of a call of the op by its floating inputs; None for those that are None."""
    needed = [t is not None for t in inputs]
    op = torch.ops.monoidreduce.statistics_backward.default
    found = op(*upstream, *inputs, *results, *options, needed)
    return [g if wanted else None for g, wanted in zip(found, needed, strict=False)]
