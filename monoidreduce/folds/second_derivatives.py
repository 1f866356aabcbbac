"""Derivatives of the op `statistics` in a direction, and the gradients of its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.registry import call_op
from monoidreduce.folds.program.program import parse
from monoidreduce.folds.program.tangent import tangent

__all__ = ["directional", "gradients_of_gradients"]

Inputs = Sequence[Tensor | None]  # those of the op
_FLOATING = 7  # the inputs with gradients: a, b, other_a, other_b, row, column, payload


def directional(
    inputs: Inputs, directions: Inputs, program: str, widths: list[int], scale: float, workspace: int | None
) -> tuple[Tensor, Tensor]:
    """How the values and the payload sums of the op `statistics` move if its inputs move in a direction.

    The result is differentiable in the inputs and the directions.

    Args:
        inputs: those of the op.
        directions: one for each floating-point input; None where it does not move.

    Raises:
        RuntimeError: the program has two scores, so its derivative has four.
    """
    a, b, other_a, _, row, column, payload, row_index, column_index = inputs
    assert a is not None and b is not None
    if other_a is not None:
        raise RuntimeError(
            "a fold of two scores can be differentiated once: its second derivative is a fold of four. Do "
            "without create_graph=True, or call the function's `reference`"
        )
    d_a, d_b, _, _, d_row, d_column, d_payload = directions
    of = parse(program)
    values, sums, _, indices = call_op("statistics", *inputs, program, widths, scale, workspace)
    counts = [0 if t is None else t.shape[0] for t in (row, row_index, column)]
    rows = ([] if d_a is None else [d_a]) + ([] if d_b is None else [a])
    columns = ([] if d_a is None else [b]) + ([] if d_b is None else [d_b])
    derived = tangent(program, *counts, (bool(rows), d_row is not None, d_column is not None))

    def joined(*parts: Tensor | None) -> Tensor | None:
        given = [t for t in parts if t is not None]
        return torch.cat(given) if given else None

    def kept(kind: str, data: Tensor | None) -> Tensor | None:
        numbers = derived.kept[kind]
        return torch.stack([data[k] for k in numbers]) if data is not None and numbers else None

    def moving(t: Tensor | None, direction: Tensor | None) -> Tensor | None:
        return torch.zeros_like(t) if direction is None and t is not None else direction

    real = values.dtype
    of_rows = kept("row", joined(row, moving(row, d_row), values))
    of_columns = kept("column", joined(column, moving(column, d_column)))
    row_integers = kept("row_index", joined(row_index, indices[: len(of.largest)]))
    vectors, of_vectors = None, []
    if payload is not None:
        d_payload = torch.zeros_like(payload) if d_payload is None else d_payload
        parts = zip(torch.split(d_payload, widths, 1), torch.split(payload, widths, 1), strict=True)
        vectors, of_vectors = (
            torch.cat([t for pair in parts for t in pair], 1),
            [w for w in widths for _ in "dv"],
        )
    two = parse(derived.text).scores == 2
    found, found_sums, *_ = call_op(
        "statistics",
        a,
        b,
        *((torch.cat(rows, 1), torch.cat(columns, 1)) if two else (None, None)),
        of_rows,
        of_columns,
        vectors,
        row_integers,
        kept("column_index", column_index),
        derived.text,
        of_vectors,
        scale,
        workspace,
    )
    moved_values = torch.stack([found[k] for k in derived.values]) if derived.values else found.to(real)[:0]
    if payload is None:
        return moved_values, sums
    moved_sums = []
    pairs = torch.split(found_sums, of_vectors, 1)
    for (softmax, _), by_vectors, by_weights, whole in zip(
        of.payloads, pairs[::2], pairs[1::2], torch.split(sums, widths, 1), strict=True
    ):
        moved = by_vectors + by_weights
        if softmax >= 0:
            moved = moved - whole * found[derived.slopes[softmax]][:, None]
        moved_sums.append(moved)
    return moved_values, torch.cat(moved_sums, 1)


def gradients_of_gradients(cotangents: Inputs, *arguments: Any) -> list[Tensor | None]:
    """The gradients of the op `statistics_backward`: of its results times cotangents, by each argument.

    Let F be the fold, g the upstream gradients and u the cotangents. Then <u, gradient of <g, F>> is
    <g, F'u>, where F'u is the derivative in the direction u, a fold. Its gradients by g and by the inputs are
    the result.
    """
    grads, inputs = arguments[:2], arguments[2:11]
    program, widths, scale, workspace, needed, *_ = arguments[15:]
    of_needed = zip(cotangents, needed, strict=False)
    directions = [u if wanted else None for u, wanted in of_needed][:_FLOATING]
    given = [*grads, *inputs[:_FLOATING]]
    at = [i for i, t in enumerate(given) if t is not None]

    def weighted(*tensors: Tensor) -> Tensor:
        """<g, F'u>"""
        own: list[Tensor | None] = [None] * len(given)
        for i, t in zip(at, tensors, strict=True):
            own[i] = t
        moved = directional(
            [*own[2:], *inputs[_FLOATING:]], directions, program, list(widths or ()), scale, workspace
        )
        terms = [(g * m).sum() for g, m in zip(own[:2], moved, strict=True) if g is not None]
        return torch.stack(terms).sum()

    with torch.enable_grad():
        differentiated: Any = torch.func.vjp(weighted, *(given[i] for i in at))
        total, pull = differentiated
        found = pull(torch.ones_like(total))
    results: list[Tensor | None] = [None] * len(arguments)
    for i, gradient in zip(at, found, strict=True):
        results[i] = gradient
    return results
