"""Attention with a user's score function, forward and backward, for the op `modified_attention`.

The backward also computes gradients of the captured tensors that the score function indexes. An entry's
gradient is a sum over columns (if it is indexed by query) or rows (if by position) of a program derived
from the score function. That sum is a fold of `statistics_op`, one for each head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.attention import NO_SPANS, Spans, low_words, present, score_scale
from monoidreduce._ops.attention_varlen import UNBOUNDED, sequence_spans, undefine
from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import empty_statistics, launch_on, new_gradient, rounded_gradients
from monoidreduce._ops.sinks import score_sinks
from monoidreduce.folds.cpu.bytecode import scores_code
from monoidreduce.folds.cuda import attention_cuda
from monoidreduce.folds.program.derivative import modified_sums
from monoidreduce.folds.program.graph import Node
from monoidreduce.folds.program.integers import most_numbers
from monoidreduce.folds.program.program import parse, reachable
from monoidreduce.folds.statistics_op import totals
from monoidreduce.folds.torch.reader import evaluate

__all__ = ["backward", "forward", "results"]


def results(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty results. rest: the other arguments of the op, which end with `weights` and `compensated`."""
    *rows, _ = q.shape
    *_, weights, compensated = rest
    out, lse = q.new_empty(*rows, v.shape[3]), empty_statistics(q, *((0,) if weights else rows))
    return out, lse, torch.empty_like(lse), low_words(out, compensated)


def _expanded(blocks: Tensor | None, q: Tensor) -> Tensor | None:
    return None if blocks is None else blocks.expand(q.shape[0], q.shape[1], -1, -1)


def _kept(
    q: Tensor, k: Tensor, starts: tuple[Tensor | None, Tensor | None], window: tuple[int, int]
) -> tuple[Spans, tuple[int, int]]:
    """The spans of packed sequences, which include the window; or no spans and the window."""
    of_queries, of_keys = starts
    if of_queries is None or of_keys is None:
        return NO_SPANS, window
    return sequence_spans(q, k, (of_queries, of_keys), window), UNBOUNDED


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    sinks: Tensor | None,
    table_index: Tensor | None,
    blocks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    program: str,
    sizes: list[int],
    scale: float | None,
    left: int,
    right: int,
    block_rows: int,
    block_columns: int,
    weights: bool,
    compensated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = sizes or []  # programs of AOTInductor pass None for an empty list
    spans, window = _kept(q, k, (cu_seqlens_q, cu_seqlens_k), (left, right))
    options = attention_cuda.Options(score_scale(q, scale), *window, block_rows, block_columns, weights)
    sinks = score_sinks(q, sinks)
    if q.is_cuda:
        given = (_expanded(blocks, q), sinks, spans, program, sizes, options, compensated)
        out, lse, lse_low, out_low = attention_cuda.forward(q, k, v, (table, table_index), *given)
        undefine(spans, out, lse)
        return (out, lse.new_empty(0), lse.new_empty(0), out_low) if weights else (out, lse, lse_low, out_low)
    out, lse, lse_low, out_low = results(q, k, v, weights, compensated)
    _C.modified_attention_forward(
        q,
        k,
        v,
        table,
        table_index,
        _expanded(blocks, q),
        sinks,
        spans.rows,
        spans.columns,
        out,
        None if weights else lse,
        None if weights else lse_low,
        present(out_low),
        scores_code(program, tuple(sizes), most_numbers("q, k", *q.shape[:3], k.shape[2]), False),
        *options,
        *launch_on(q),
    )
    return out, lse, lse_low, out_low


def backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    sinks: Tensor | None,
    table_index: Tensor | None,
    blocks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    out_low: Tensor,
    program: str,
    sizes: list[int],
    scale: float | None,
    left: int,
    right: int,
    block_rows: int,
    block_columns: int,
    weights: bool,
    compensated: bool,
    needed: list[bool],
) -> list[Tensor]:
    factor = score_scale(q, scale)
    spans, window = _kept(q, k, (cu_seqlens_q, cu_seqlens_k), (left, right))
    options = attention_cuda.Options(factor, *window, block_rows, block_columns, weights)
    if weights and grad_out is None:
        grad_out = torch.zeros_like(out)
    summed_sinks = score_sinks(q, sinks)
    dsinks = None if summed_sinks is None or not needed[4] else torch.empty_like(summed_sinks)
    found: list[Any]
    if q.is_cuda:
        given = (
            (table, table_index),
            _expanded(blocks, q),
            summed_sinks,
            spans,
            (out, lse, lse_low, present(out_low)),
            program,
            sizes,
            options,
            dsinks,
            needed[:3],
        )
        found = [*attention_cuda.backward(grad_out, grad_lse, q, k, v, *given)]
    else:
        found = [new_gradient(t, wanted) for t, wanted in zip((q, k, v), needed[:3], strict=True)]
        dq, dk, dv = found
        _C.modified_attention_backward(
            q,
            k,
            v,
            table,
            table_index,
            _expanded(blocks, q),
            summed_sinks,
            spans.rows,
            spans.columns,
            grad_out,
            grad_lse,
            out,
            None if weights else lse.contiguous(),
            None if weights else lse_low.contiguous(),
            present(out_low),
            dq,
            dk,
            dv,
            dsinks,
            scores_code(program, tuple(sizes), most_numbers("q, k", *q.shape[:3], k.shape[2]), True),
            *options,
            *launch_on(q),
        )
    d_table = None
    if needed[3] and table is not None:
        residuals = (lse, lse_low, grad_lse)
        d_table = _table_gradient(
            (q, k, grad_out, v),
            (table, table_index),
            residuals,
            program,
            tuple(sizes),
            not weights,
            factor,
            _kept_columns(q, k, spans, window),
        )
    found = rounded_gradients((*found, d_table, dsinks), (q, k, v, table, sinks), needed[:5])
    undefine(spans, *found)
    return found


def _kept_columns(q: Tensor, k: Tensor, spans: Spans, window: tuple[int, int]) -> Tensor | None:
    """[2, M] int64: first column and last column + 1 that each row keeps; None if all are kept."""
    of_rows = spans.rows
    if of_rows is not None:
        return of_rows.T
    if window == UNBOUNDED:
        return None
    left, right = window
    rows, columns = q.shape[2], k.shape[2]
    aligned = torch.arange(columns - rows, columns, device=q.device)
    begin = aligned - left if left >= 0 else torch.zeros_like(aligned)
    end = aligned + right + 1 if right >= 0 else torch.full_like(aligned, columns)
    return torch.stack((begin, end))


def _table_gradient(
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor],
    tables: tuple[Tensor, Tensor | None],
    residuals: tuple[Tensor, Tensor, Tensor | None],
    program: str,
    sizes: tuple[int, ...],
    softmax: bool,
    scale: float,
    kept: Tensor | None,
) -> Tensor:
    """The gradient of the table of real captured tensors, [T], in the accumulation dtype.

    operands: q, k, grad_out, v. kept: result of `_kept_columns`.
    """
    q, k, grad_out, v = operands
    lse, lse_low, grad_lse = residuals
    nodes = parse(program).nodes
    gathers = [number for number, node in enumerate(nodes) if node[0] == "gather"]
    leaves = {number: {nodes[i][0] for i in reachable(nodes, [number])} for number in gathers}
    of_columns = tuple(n for n in gathers if "position" in leaves[n] and "query" not in leaves[n])
    of_rows = tuple(n for n in gathers if "position" not in leaves[n])
    arguments = softmax, grad_out is not None, scale, kept is not None
    rows = modified_sums(program, sizes, of_rows, *arguments, False)
    columns = modified_sums(program, sizes, of_columns, *arguments, True)
    table, _ = tables
    d_table = torch.zeros_like(table)
    group = q.shape[1] // max(k.shape[1], 1)
    queries, keys = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            own = (q[batch, head], None if grad_out is None else grad_out[batch, head])
            shared = (k[batch, head // group], None if grad_out is None else v[batch, head // group])
            number = torch.full_like(queries, batch), torch.full_like(queries, head)
            numbers = torch.stack((*number, queries, *(() if kept is None else kept)))
            known = torch.stack((lse[batch, head], lse_low[batch, head])) if softmax else None
            place = (batch, head), tables

            lines = table.new_empty(2 * len(of_rows) + 1, len(queries))
            by_rows = totals(
                rows, lines, _alternating(own, shared), (known, None, numbers, None), 1.0, tables
            )
            if known is not None:
                centre = -by_rows[-1] if grad_lse is None else grad_lse[batch, head] - by_rows[-1]
                known = torch.cat((known, centre[None]))
                of_score, of_centre = by_rows[:-1].chunk(2)
                by_rows = of_score + centre * of_centre
            _scatter(d_table, nodes, of_rows, sizes, by_rows, queries, *place)

            lines = table.new_empty(len(of_columns), len(keys))
            given = (None, known, keys[None], numbers)
            by_columns = totals(columns, lines, _alternating(shared, own), given, 1.0, tables)
            _scatter(d_table, nodes, of_columns, sizes, by_columns, keys, *place)
    return d_table


def _alternating(rows: Any, columns: Any) -> Any:
    """The operands of both scores, (a, b, other_a, other_b), as a fold takes them."""
    return rows[0], columns[0], rows[1], columns[1]


def _scatter(
    d_table: Tensor,
    nodes: tuple[Node, ...],
    gathers: tuple[int, ...],
    sizes: tuple[int, ...],
    gradients: Tensor,
    lines: Tensor,
    head: tuple[int, int],
    tables: tuple[Tensor, Tensor | None],
) -> None:
    """Scatter-add the gradients of gather nodes, for these rows or columns, to the entries they gathered."""
    index = _indices(nodes, gathers, sizes, head, lines, tables)
    for number, of_gather in zip(gathers, gradients, strict=False):
        d_table.index_add_(0, index[nodes[number][1]].expand(len(lines)), of_gather)


def _indices(
    nodes: tuple[Node, ...],
    gathers: tuple[int, ...],
    sizes: tuple[int, ...],
    head: tuple[int, int],
    numbers: Tensor,
    tables: tuple[Tensor, Tensor | None],
) -> dict[int, Tensor]:
    """The table entries that gather nodes read, for the rows or columns with these indices."""

    def leaf(node: Node) -> Any:
        name, *at = node
        if name in ("gather", "index_gather"):
            return tables[name == "index_gather"]
        if name in ("query", "position"):
            return numbers
        return torch.full_like(numbers, sizes[at[0]] if name == "size" else head[name == "head"])

    return evaluate(nodes, [nodes[number][1] for number in gathers], leaf, tables[0])
