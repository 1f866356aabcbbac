"""Derivatives of the op `statistics` in a direction, and the gradients of its gradients.

Let F be the fold, u a direction of its inputs, and F'u how its results move: the results of another fold
(tangent.py). Forward mode is F'u. For upstream gradients g, the gradient of <g, F'u> is the
derivative of the gradient of <g, F> in the direction u. So it serves second derivatives and forward mode of
gradients.

All of it is made of calls of ops. So it is right at every level of torch.func, and can be differentiated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._ops.registry import any_requires_grad, call_op
from monoidreduce.folds.program.program import parse
from monoidreduce.folds.program.tangent import tangent
from monoidreduce.folds.statistics_op import Inputs, Options

__all__ = ["gradients_of_gradients", "obstacle", "tangents"]

Tensors = Sequence[Tensor | None]
_FLOATING = 8  # the first inputs of the op have gradients


def obstacle(inputs: Sequence[Any], program: str) -> str | None:
    """Why a call of the op has no derivative in a direction that is a fold; None if it has one."""
    of = Inputs(*inputs)
    if parse(program).most:
        return "largest(f, k) and smallest(f, k) have none"
    if of.other_a is None:
        return None
    if of.payload is not None:
        return "those of a fold of two scores and payloads, as attend with other_q is, have four scores"
    # The Jensen-Shannon divergence detaches what has no part in its gradient, but in the gradient of that.
    if any(name == "detach" for name, *_ in parse(program).nodes):
        return "a part of this fold of two scores is detached, as in linear_distillation with the loss jsd"
    return None


def tangents(directions: Tensors, results: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    """How the values and the payload sums of the op `statistics` move if its inputs move in a direction.

    They are differentiable in the inputs and the directions.

    Args:
        directions: one for each input; None where it does not move.
        results: those of the op for `arguments`; without gradients.
    """
    if torch.is_grad_enabled() and any_requires_grad(arguments):
        results = call_op("statistics", *arguments)
    return _Direction(directions, results, Inputs(*arguments[:11]), Options(*arguments[11:])).moved()


def gradients_of_gradients(
    cotangents: Tensors, wanted: Sequence[bool], *arguments: Any, moved: Tensors = (None,) * 6
) -> list[Tensor | None]:
    """The gradients of the op `statistics_backward`: of its results times cotangents, by each argument.

    wanted: for the upstream gradients and the inputs. The others' gradients may be None.
    moved: in forward mode, how the upstream gradients and the results of F move, with u the direction of the
        inputs; None for what does not move, or is not known to. The gradient of <g, F> moves by the gradient
        of <dg, F> too, which is then added.

    Let F be the fold, g the upstream gradients and u the cotangents. Then <u, gradient of <g, F>> is
    <g, F'u>, where F'u is the derivative in the direction u, a fold. Its gradients by g and by the inputs are
    the result.

    Raises:
        RuntimeError: the program has two scores and payloads, so its derivative has four scores.
    """
    grads, inputs, results = arguments[:2], Inputs(*arguments[2:13]), arguments[13:17]
    options, needed = Options(*arguments[17:23]), arguments[23]
    of_needed = zip(cotangents, needed, strict=False)
    directions = [u if wanted else None for u, wanted in of_needed][:_FLOATING]
    found: list[Tensor | None] = [None] * len(arguments)
    if any(u is not None for u in directions):
        direction = _Direction(directions, results, inputs, options, moved[2])
        if any(wanted[:2]):
            found[:2] = [None if g is None else t for g, t in zip(grads, direction.moved(), strict=True)]
        found[2 : 2 + _FLOATING] = direction.gradients(grads, wanted[2 : 2 + _FLOATING], moved[:2])
    return found


class _Direction:
    """The derivative of a call of the op `statistics` in a direction, as a call of a derived program.

    A score <a_i, b_j> moves by <da_i, b_j> + <a_i, db_j>: by a product of rows [da, a] and columns [b, db].
    In a fold of one score this is a second score. In a fold of two scores, the columns of both such products
    are payloads, and the products with the rows follow:

        sum_j w_ij <r_i, c_j> = <r_i, sum_j w_ij c_j>
    """

    def __init__(
        self,
        directions: Tensors,
        results: Sequence[Tensor],
        inputs: Inputs,
        options: Options,
        moved_values: Tensor | None = None,
    ) -> None:
        """moved_values: how the values move, if that is known. It may save the call."""
        self.inputs, self.results, self.options, self.scale = inputs, results, options, options.scale
        a, b, other_a, other_b, row, column, payload, table, row_index, column_index, _ = inputs
        *_, d_row, d_column, d_payload, d_table = directions[:_FLOATING]
        if why := obstacle(inputs, options.program):
            raise RuntimeError(
                f"monoidreduce::statistics can be differentiated once: {why}. Do without create_graph=True, "
                "or call the function's `reference`"
            )
        self.program, self.widths = parse(options.program), list(options.widths or ())
        sizes = options.sizes or []
        self.products = [_Product(a, b, *directions[:2])]
        if other_a is not None and other_b is not None:
            self.products.append(_Product(other_a, other_b, *directions[2:4]))
        counts = [0 if t is None else t.shape[0] for t in (row, row_index, column)]
        moves = [product.moves and self.scale != 0 for product in (self.products[0], self.products[-1])]
        moves += [d is not None for d in (d_row, d_column, d_payload, d_table)]
        self.derived = tangent(options.program, *counts, len(sizes), tuple(moves))
        if d_table is not None:
            assert table is not None
            table, sizes = torch.cat((table, d_table)), [*sizes, len(table)]
        if other_a is None:
            other_a, other_b = self.products[0].rows, self.products[0].columns
        if parse(self.derived.text).scores == 1:
            other_a = other_b = None
        of_payload = (d_payload, self.derived.directions), (payload, self.derived.vectors)
        of_sums = [t for t, has in of_payload if has and t is not None]
        vectors, self.derived_widths = _beside(of_sums), self.widths if of_sums else []
        if self.derived.by_scores:
            real = accumulation_dtype(a.dtype)  # not rounded beside operands of 16 bits
            of_products = [self.products[score].columns.to(real) for _, score in self.derived.by_scores]
            vectors, self.derived_widths = torch.cat(of_products, 1), [t.shape[1] for t in of_products]
        values, _, low, indices = results
        self.derived_inputs = Inputs(
            a,
            b,
            other_a,
            other_b,
            self._kept("row", row, _or_zeros(d_row, row), values, low),
            self._kept("column", column, _or_zeros(d_column, column)),
            vectors,
            table,
            self._kept("row_index", row_index, indices[: len(self.program.largest)]),
            self._kept("column_index", column_index),
            inputs.table_index,
        )
        self.derived_options = options._replace(
            program=self.derived.text, widths=self.derived_widths, sizes=sizes
        )
        if moved_values is None or self.derived_widths:
            self.found = call_op("statistics", *self.derived_inputs, *self.derived_options)
        else:
            self.found = self._known(moved_values)

    def _kept(self, kind: str, *parts: Tensor | None) -> Tensor | None:
        """The data that the derived program uses."""
        numbers = self.derived.kept[kind]
        data = [t for part in parts if part is not None and numbers for t in part.unbind(0)]
        return torch.stack([data[k] for k in numbers]) if numbers else None

    def _known(self, moved_values: Tensor) -> Sequence[Tensor]:
        """What the derived program finds: the program's log-sum-exps, and how its values move.

        The means of deviations are 0.
        """
        values, sums, low, indices = self.results
        of_softmaxes = zip(self.derived.slopes, self.program.log_sum_exps, strict=True)
        known = {slope - 1: values[lse] for slope, lse in of_softmaxes}
        places = zip(self.derived.values, moved_values, strict=True)
        known |= {place: moved for place, moved in places if place is not None}
        like = values.new_empty(parse(self.derived.text).values, values.shape[1])
        return _stacked(known, like), sums, low, indices.narrow(0, 0, 0)

    def moved(self) -> tuple[Tensor, Tensor]:
        """How the values and the payload sums move."""
        values, sums, *_ = self.results
        found, found_sums, *_ = self.found
        moved = {k: found[place] for k, place in enumerate(self.derived.values) if place is not None}
        for (k, score), whole in self._by_scores(found_sums):
            moved[k] = _sum(moved.get(k), self.scale * (self.products[score].rows * whole).sum(1))
        for k, (lse, deviation) in self.derived.deviations.items():
            if lse in moved and k in moved:
                moved[k] = moved[k] - found[deviation] * moved[lse]
        moved_values = _stacked(moved, values)
        if not self.widths:
            return moved_values, torch.zeros_like(sums)
        moved_sums = found_sums if self.derived_widths else torch.zeros_like(sums)
        of_sums = (torch.split(t, self.widths, 1) for t in (moved_sums, sums))
        parts = []
        for (softmax, *_), moved_sum, whole in zip(self.program.payloads, *of_sums, strict=True):
            if softmax >= 0:
                by = found[self.derived.slopes[softmax]][:, None]
                moved_sum = torch.addcmul(moved_sum, whole, by, value=-1)
            parts.append(moved_sum)
        return moved_values, _beside(parts)

    def _by_scores(self, sums: Tensor) -> Iterable[tuple[tuple[int, int], Tensor]]:
        """For each pair of `Tangent.by_scores`, its part of the derived program's payload sums."""
        if not self.derived.by_scores:  # torch.export cannot load a split into no parts
            return ()
        return zip(self.derived.by_scores, torch.split(sums, self.derived_widths, 1), strict=True)

    def gradients(self, grads: Tensors, wanted: Sequence[bool], moved_grads: Tensors) -> list[Tensor | None]:
        """The gradients of <g, F'u> + <dg, F> by the floating inputs.

        grads, moved_grads: g and dg, each of the values and of the payload sums, or None.
        wanted: which gradients; the others may be None.
        """
        grad_values, grad_sums = grads
        if not any(wanted):
            return [None] * _FLOATING
        row, column, table = self.inputs.row, self.inputs.column, self.inputs.table
        values, sums, *_ = self.results
        of_found: dict[int, Tensor] = {}  # upstream gradients of the derived program's values, by place
        of_sums: list[Tensor] = []  # of its payload sums
        of_rows: list[Tensor | None] = [None] * len(self.products)
        if grad_values is not None:
            places = enumerate(self.derived.values)
            of_found = {place: grad_values[k] for k, place in places if place is not None}
            for (k, score), whole in self._by_scores(self.found[1]):
                g = self.scale * grad_values[k][:, None]
                of_sums.append(g * self.products[score].rows)
                of_rows[score] = _sum(of_rows[score], g * whole)
        by_sums: Tensor | None = None  # of the program's payload sums, by which the moved ones are computed
        if grad_sums is not None and self.widths:
            of_wholes = []
            of_sums = [grad_sums] if self.derived_widths else []
            for (softmax, *_), g, whole in zip(
                self.program.payloads,
                torch.split(grad_sums, self.widths, 1),
                torch.split(sums, self.widths, 1),
                strict=True,
            ):
                of_whole = torch.zeros_like(g)
                if softmax >= 0:
                    place = self.derived.slopes[softmax]
                    of_found[place] = _sum(of_found.get(place), -(g * whole).sum(1))
                    of_whole = -g * self.found[0][place][:, None]
                of_wholes.append(of_whole)
            by_sums = torch.cat(of_wholes, 1)
        upstream = _stacked(of_found, self.found[0]), torch.cat(of_sums, 1) if of_sums else None
        # The derived program's row data are, in this order: the program's row data, their directions, the
        # program's values, and the low words of log-sum-exps, which are constants.
        before = 0 if row is None else 2 * row.shape[0]
        values_at = range(before, before + len(values))
        of_row = wanted[4] or any(k in values_at for k in self.derived.kept["row"])
        parts = [part for k, p in enumerate(self.products) for part in p.parts(wanted[2 * k : 2 * k + 2])]
        needed = [*wanted[:2], *parts, of_row, *wanted[5:]]
        if len(self.products) == 2:
            needed = [*wanted[:4], of_row, wanted[5], parts[1] or parts[3], wanted[7]]
        found = _backward(upstream, self.derived_inputs, self.found, self.derived_options, needed)
        gradients = [*found[:4], None, None, None, None]
        if table is not None and found[7] is not None:  # behind it is that of the direction
            gradients[7] = found[7].narrow(0, 0, table.shape[0])
        if len(self.products) == 1:
            gradients[2:4] = None, None
            self.products[0].add_to(gradients, 0, *found[2:4])
        else:
            of_columns: list[Tensor | None] = [None, None]
            for (_, score), part in self._by_scores(found[6]) if found[6] is not None else ():
                of_columns[score] = _sum(of_columns[score], part)
            for score, product in enumerate(self.products):
                product.add_to(gradients, 2 * score, of_rows[score], of_columns[score])
        from_rows, from_columns = (
            {} if t is None else dict(zip(self.derived.kept[kind], t.unbind(0), strict=True))
            for kind, t in (("row", found[4]), ("column", found[5]))
        )
        if wanted[4] and row is not None:
            gradients[4] = _stacked(from_rows, row)
        if column is not None:
            gradients[5] = _stacked(from_columns, column)
        if (payload := self.inputs.payload) is not None and found[6] is not None and self.derived.vectors:
            width = payload.shape[1]  # those of directions come first
            gradients[6] = found[6].narrow(1, found[6].shape[1] - width, width)
        by_values = {k - before: g for k, g in from_rows.items() if k in values_at}
        of_moved = _stacked(by_values, values) if by_values else None, by_sums
        of_program = [_added(x, y) for x, y in zip(of_moved, moved_grads, strict=True)]
        if any(g is not None for g in of_program):
            more = _backward(of_program, self.inputs, self.results, self.options, wanted)
            gradients = [_added(x, y) for x, y in zip(gradients, more, strict=True)]
        return gradients


class _Product:
    """How a score moves: rows [da, a] times columns [b, db], or one half of them if only one operand moves.

    Attributes:
        moves: whether an operand moves. rows and columns are None if not.
    """

    def __init__(self, a: Tensor, b: Tensor, d_a: Tensor | None, d_b: Tensor | None) -> None:
        self.width, self.of_a, self.of_b = a.shape[1], d_a is not None, d_b is not None
        self.moves = self.of_a or self.of_b
        rows = [t for t in (d_a, a if self.of_b else None) if t is not None]
        columns = [t for t in (b if self.of_a else None, d_b) if t is not None]
        self.rows, self.columns = _beside(rows), _beside(columns)

    def parts(self, wanted: Sequence[bool]) -> tuple[bool, bool]:
        """Whether gradients of the rows and of the columns are needed for those of a and b."""
        return wanted[0] and self.of_b, wanted[1] and self.of_a

    def add_to(
        self, gradients: list[Tensor | None], at: int, d_rows: Tensor | None, d_columns: Tensor | None
    ) -> None:
        """Add the parts of a and b in d_rows and d_columns to `gradients[at]` and the next."""
        if self.of_b and d_rows is not None:  # narrow, as vmap has no rule for a slice of all
            part = d_rows.narrow(1, d_rows.shape[1] - self.width, self.width)
            gradients[at] = _added(gradients[at], part)
        if self.of_a and d_columns is not None:
            gradients[at + 1] = _added(gradients[at + 1], d_columns.narrow(1, 0, self.width))


def _beside(parts: list[Tensor]) -> Any:
    """Matrices side by side. One is not copied; without any there is None."""
    return torch.cat(parts, 1) if len(parts) > 1 else next(iter(parts), None)


def _or_zeros(direction: Tensor | None, of: Tensor | None) -> Tensor | None:
    return torch.zeros_like(of) if direction is None and of is not None else direction


def _added(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """x + y; None is 0."""
    return x if y is None else _sum(x, y)


def _sum(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y


def _stacked(rows: dict[int, Tensor], like: Tensor) -> Tensor:
    """A tensor like another one, whose rows with these indices are given and whose others are 0."""
    zero = like.new_zeros(like.shape[1:])
    given = [rows.get(k, zero) for k in range(len(like))]
    return torch.stack(given).to(like.dtype) if given else torch.zeros_like(like)


def _backward(
    upstream: Tensors, inputs: Inputs, results: Any, options: Options, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of a call of the op by its floating inputs; None where they are not wanted."""
    needed = [want and t is not None for want, t in zip(wanted, inputs, strict=False)] + [False] * 3
    op = torch.ops.monoidreduce.statistics_backward.default
    found = op(*upstream, *inputs, *results, *options, needed)
    return [g if want else None for g, want in zip(found, needed, strict=False)]
