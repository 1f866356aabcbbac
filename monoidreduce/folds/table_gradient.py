"""The gradient of the real tensors that score_mod captures.

The gradient of an entry is a sum of a program derived from the score function. If the index has the query or
the key alone, beside batch and head, that is a sum over keys, or over queries: a fold of `statistics_op`, one
for each head. If it has both, the elements' gradients are computed by torch, in chunks of keys, and added to
the entries that they belong to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monoidreduce.folds.operands import Operands
from monoidreduce.folds.program.derivative import Modified, modified_elements, modified_sums
from monoidreduce.folds.program.graph import Node
from monoidreduce.folds.program.program import parse, reachable
from monoidreduce.folds.program_scores import ProgramScores
from monoidreduce.folds.statistics_op import totals
from monoidreduce.folds.torch.chunked import LEAST_COLUMNS, product
from monoidreduce.folds.torch.reader import evaluate, with_scores
from monoidreduce.workspace import get_workspace

__all__ = ["table_gradient"]


def table_gradient(
    scores: ProgramScores,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    lse: Tensor,
    lse_low: Tensor,
) -> Tensor:
    """The gradient of the table of reals of `scores`, [T], in the accumulation dtype.

    grad_out, grad_lse: None if they are 0.
    """
    assert scores.table is not None
    program, sizes, tables = scores.program, tuple(scores.sizes), (scores.table, scores.table_index)
    bounds = scores.mask.bounds(q.shape[2], k.shape[2], q.device)
    nodes = parse(program).nodes
    constant = {node[1] for node in nodes if node[0] == "detach"}
    gathers = [n for n, node in enumerate(nodes) if node[0] == "gather" and n not in constant]
    leaves = {number: {nodes[i][0] for i in reachable(nodes, [number])} for number in gathers}
    by_key = tuple(n for n in gathers if "position" in leaves[n] and "query" not in leaves[n])
    by_query = tuple(n for n in gathers if "position" not in leaves[n])
    by_both = tuple(n for n in gathers if {"position", "query"} <= leaves[n])
    softmax, has_grad_out = not scores.weights, grad_out is not None
    arguments = softmax, has_grad_out, scores.scale, bounds is not None
    sums_of_queries = modified_sums(program, sizes, by_query, *arguments, False)
    sums_of_keys = modified_sums(program, sizes, by_key, *arguments, True)
    of_elements = modified_elements(program, sizes, by_both, *arguments)
    d_table = torch.zeros_like(scores.table)
    group = q.shape[1] // max(k.shape[1], 1)
    queries, keys = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)

    def add(gathers: tuple[int, ...], gradients: Tensor, lines: Tensor, head: tuple[int, int]) -> None:
        """Add the gradients of gather nodes, [gathers, lines], to the entries that they read."""
        index = _indices(nodes, gathers, sizes, head, lines, tables)
        for number, of_gather in zip(gathers, gradients, strict=False):
            d_table.index_add_(0, index[nodes[number][1]].expand(len(lines)), of_gather)

    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            at, at_key = (batch, head), (batch, head // group)
            rows, columns = q[at], k[at_key]
            other_rows, other_columns = (None, None) if grad_out is None else (grad_out[at], v[at_key])
            numbers = [torch.full_like(queries, batch), torch.full_like(queries, head), queries]
            index = torch.stack((*numbers, *(() if bounds is None else bounds)))
            known = torch.stack((lse[at], lse_low[at])) if softmax else None

            operands = rows, columns, other_rows, other_columns
            room = d_table.new_empty(2 * len(by_query) + 1, len(queries))
            found = totals(sums_of_queries, room, operands, (known, None, index, None), 1.0, tables)
            if known is not None:
                # The totals are linear in c = grad_lse - delta, and the last one is delta (modified_sums).
                c = -found[-1] if grad_lse is None else grad_lse[at] - found[-1]
                known = torch.cat((known, c[None]))
                constants, slopes = found[:-1].chunk(2)
                found = constants + c * slopes
            add(by_query, found, queries, at)
            if by_both:
                _add_elements(of_elements, operands, known, index, tables, d_table)

            operands = columns, rows, other_columns, other_rows
            room = d_table.new_empty(len(by_key), len(keys))
            found = totals(sums_of_keys, room, operands, (None, known, keys[None], index), 1.0, tables)
            add(by_key, found, keys, at)
    return d_table


def _add_elements(
    of: Modified,
    operands: Operands,
    known: Tensor | None,
    index: Tensor,
    tables: tuple[Tensor, Tensor | None],
    d_table: Tensor,
) -> None:
    """Add the gradients of gather nodes that differ by element.

    known, index: the reals and the integers of rows.
    """
    rows, columns, other_rows, other_columns = operands
    at_once = max(get_workspace() // (8 * max(len(rows), 1)), LEAST_COLUMNS)
    pairs = [(n, of.nodes[g][1]) for n, g in zip(of.gradients, of.gathers, strict=True) if n is not None]
    for first in range(0, len(columns), at_once):
        part = slice(first, first + at_once)

        def leaf(node: Node, part: slice = part) -> Any:
            name, *at = node
            if name in ("gather", "index_gather"):
                return tables[name == "index_gather"]
            if name == "other":
                assert other_rows is not None and other_columns is not None
                return product(other_rows, other_columns[part].T, d_table.dtype)
            data = known if name == "row" else index
            assert data is not None
            return data[at[0]][:, None]

        score = product(rows, columns[part].T, d_table.dtype)
        values = evaluate(
            of.nodes, [n for pair in pairs for n in pair], with_scores(score, leaf, first), score
        )
        for gradient, entry in pairs:
            entries, gradients = (values[n].expand(score.shape).reshape(-1) for n in (entry, gradient))
            d_table.index_add_(0, entries, gradients)


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
