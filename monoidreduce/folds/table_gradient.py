"""The gradient of the real tensors that score_mod captures.

The gradient of an entry is a sum over the elements that read it. If the index has no key, or no query, it is
a total of a program derived from the score function, over keys or over queries: a fold of `statistics_op`.

On a GPU the backward kernels sum the gradients of entries whose index has the key
(device/program/table_gradient.cuh); those for float32 in planes sum all. In the deterministic mode only
those of tensor cores do, as integers, and if an index has query and key. Elsewhere torch computes the
gradients of elements whose index has both, in chunks of keys, and adds them to the entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoidreduce.folds.operands import Data, Operands, Tables, place
from monoidreduce.folds.program.derivative import Modified, Sums, modified_elements, modified_sums
from monoidreduce.folds.program.graph import Node
from monoidreduce.folds.program.program import parse, reachable
from monoidreduce.folds.program_scores import ProgramScores
from monoidreduce.folds.statistics_op import forward
from monoidreduce.folds.torch.chunked import LEAST_COLUMNS, product
from monoidreduce.folds.torch.footprint import bytes_of_element
from monoidreduce.folds.torch.reader import evaluate, with_scores
from monoidreduce.workspace import get_workspace

__all__ = ["kernels_sum", "table_gradient"]


class _Gathers(NamedTuple):
    """The nodes that gather reals and may have gradients, by what their index has beside batch and head."""

    by_query: tuple[int, ...]  # the query, or nothing
    by_key: tuple[int, ...]
    by_both: tuple[int, ...]


@lru_cache(256)
def _gathers(text: str) -> _Gathers:
    nodes = parse(text).nodes
    constant = {node[1] for node in nodes if node[0] == "detach"}
    found: dict[str, list[int]] = {"by_query": [], "by_key": [], "by_both": []}
    for number, node in enumerate(nodes):
        if node[0] == "gather" and number not in constant:
            leaves = {nodes[i][0] for i in reachable(nodes, [number])}
            if "position" not in leaves:
                found["by_query"].append(number)
            else:
                found["by_both" if "query" in leaves else "by_key"].append(number)
    return _Gathers(*(tuple(numbers) for numbers in found.values()))


def kernels_sum(scores: ProgramScores, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether backward kernels sum the gradients of entries whose index has the key, or in planes of all.

    They divide by the scale. In the deterministic mode they run twice: a fold takes less if no index has the
    query too.
    """
    if not q.is_cuda or scores.scale == 0 or q.numel() == 0 or k.numel() == 0:
        return False
    gathers = _gathers(scores.program)
    if _in_planes(scores, q, k, v):
        return any(gathers)
    if not torch.are_deterministic_algorithms_enabled():
        return bool(gathers.by_key or gathers.by_both)
    return bool(gathers.by_both) and scores.plan_backward(q, k, v, None, [True] * 3).tensor_cores


def _in_planes(scores: ProgramScores, q: Tensor, k: Tensor, v: Tensor) -> bool:
    return scores.plan_backward(q, k, v, None, [True] * 3).planes


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

    If `scores.d_table` is there, kernels have summed in it what `kernels_sum` says.

    grad_out, grad_lse: None if they are 0.
    """
    assert scores.table is not None
    if scores.d_table is not None and _in_planes(scores, q, k, v):
        return scores.d_table
    program, sizes, tables = scores.program, tuple(scores.sizes), (scores.table, scores.table_index)
    bounds = scores.mask.bounds(q.shape[2], k.shape[2], q.device)
    gathers, (B, H, M, _), N = _gathers(program), q.shape, k.shape[2]
    softmax = not scores.weights
    arguments = softmax, grad_out is not None, scores.scale, bounds is not None
    d_table, by_kernels = scores.d_table, scores.d_table is not None
    if d_table is None:
        d_table = torch.zeros_like(scores.table)
    of_group = H // max(k.shape[1], 1)
    k, v = (t.repeat_interleave(of_group, 1) if of_group > 1 else t for t in (k, v))
    operands: Operands = (q.flatten(0, 2), k.flatten(0, 2), None, None)
    if grad_out is not None:
        operands = (*operands[:2], grad_out.flatten(0, 2), v.flatten(0, 2))
    head = torch.arange(B * H, device=q.device)
    batch_head = torch.stack((head // H, head % H))
    of_heads = {"query": M, "position": N}  # lines of a head
    of_batch, of_head = ({name: of.repeat_interleave(n) for name, n in of_heads.items()} for of in batch_head)
    number = {name: torch.arange(n, device=q.device).repeat(B * H) for name, n in of_heads.items()}
    index = torch.stack((of_batch["query"], of_head["query"], number["query"]))
    if bounds is not None:
        index = torch.cat((index, bounds.repeat(1, B * H)))
    known = torch.stack((lse.flatten(), lse_low.flatten())) if softmax else None

    def add(of: Sequence[int], gradients: Tensor, name: str) -> None:
        """Add the gradients of gather nodes, [gathers, lines], to the entries that they read."""
        line = {"batch": of_batch[name], "head": of_head[name], name: number[name]}
        entries = _entries(parse(program).nodes, of, sizes, line, tables)
        for node, of_gather in zip(of, gradients, strict=False):
            d_table.index_add_(0, entries[node].expand(len(of_gather)), of_gather)

    by_key, by_both = ((), ()) if by_kernels else gathers[1:]
    if gathers.by_query or (known is not None and (by_key or by_both)):
        sums = modified_sums(program, sizes, gathers.by_query, *arguments, False)
        room = d_table.new_zeros(2 * len(gathers.by_query) + 1, B * H * M)
        found = _totals(sums, room, operands, (known, None, index, None), B * H, tables)
        if known is not None:
            # The totals are linear in c = grad_lse - delta, and the last one is delta (modified_sums).
            c = -found[-1] if grad_lse is None else grad_lse.flatten() - found[-1]
            known = torch.cat((known, c[None]))
            constants, slopes = found[:-1].chunk(2)
            found = constants + c * slopes
        add(gathers.by_query, found, "query")
    if by_key:
        a, b, other_a, other_b = operands
        sums = modified_sums(program, sizes, by_key, *arguments, True)
        data = (None, known, number["position"][None], index)
        room = d_table.new_zeros(len(by_key), B * H * N)
        add(by_key, _totals(sums, room, (b, a, other_b, other_a), data, B * H, tables), "position")
    if by_both:
        of_elements = modified_elements(program, sizes, by_both, *arguments)
        for n in range(B * H):
            rows, columns = slice(n * M, (n + 1) * M), slice(n * N, (n + 1) * N)
            pairs = zip(operands, (rows, columns) * 2, strict=True)
            of_head_n = tuple(t if t is None else t[at] for t, at in pairs)
            of_rows = None if known is None else known[:, rows]
            _add_elements(of_elements, of_head_n, of_rows, index[:, rows], tables, d_table)
    return d_table


def _totals(
    programs: Sequence[Sums], room: Tensor, operands: Operands, data: Data, batches: int, tables: Tables
) -> Tensor:
    """The totals of derived programs for all heads, in `room`; 0 where no program has one."""
    a, b, other_a, other_b = operands
    kinds = ("row", "column", "row_index", "column_index")
    for sums in programs:
        row, column, row_index, column_index = (
            None if t is None or not sums.kept[kind] else torch.stack([t[n] for n in sums.kept[kind]])
            for kind, t in zip(kinds, data, strict=True)
        )
        others = (other_a, other_b) if parse(sums.text).scores == 2 else (None, None)
        integers = (row_index, column_index, tables[1])
        inputs = (a, b, *others, row, column, None, tables[0], *integers)
        found, *_ = forward(*inputs, sums.text, [], batches, [], 1.0, None)
        place(found, sums.of, room)
    return room


def _add_elements(
    of: Modified,
    operands: tuple[Tensor | None, ...],
    known: Tensor | None,
    index: Tensor,
    tables: tuple[Tensor, Tensor | None],
    d_table: Tensor,
) -> None:
    """Add the gradients of gather nodes that differ by element.

    known, index: the reals and the integers of rows.
    """
    rows, columns, other_rows, other_columns = operands
    assert rows is not None and columns is not None
    pairs = [(n, of.nodes[g][1]) for n, g in zip(of.gradients, of.gathers, strict=True) if n is not None]
    roots = [n for pair in pairs for n in pair]
    of_copies = 8 + d_table.itemsize  # of an entry and its gradient
    of_column = (bytes_of_element(of.nodes, roots, d_table.dtype) + of_copies) * max(len(rows), 1)
    at_once = max(get_workspace() // of_column, LEAST_COLUMNS)

    def add(part: slice) -> None:  # what it makes is released before the next chunk
        def leaf(node: Node) -> Any:
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
        values = evaluate(of.nodes, roots, with_scores(score, leaf, part.start), score)
        for gradient, entry in pairs:
            entries, gradients = (values[n].expand(score.shape).reshape(-1) for n in (entry, gradient))
            d_table.index_add_(0, entries, gradients)

    for first in range(0, len(columns), at_once):
        add(slice(first, first + at_once))


def _entries(
    nodes: tuple[Node, ...],
    gathers: Sequence[int],
    sizes: tuple[int, ...],
    lines: dict[str, Tensor],
    tables: tuple[Tensor, Tensor | None],
) -> dict[int, Tensor]:
    """The table entries that gather nodes read. lines: batch, head, and query or key of each line."""

    def leaf(node: Node) -> Any:
        name, *at = node
        if name in ("gather", "index_gather"):
            return tables[name == "index_gather"]
        return torch.full_like(lines["batch"], sizes[at[0]]) if name == "size" else lines[name]

    found = evaluate(nodes, [nodes[number][1] for number in gathers], leaf, tables[0])
    return {number: found[nodes[number][1]] for number in gathers}
