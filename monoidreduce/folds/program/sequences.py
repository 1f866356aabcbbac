"""score_mod and mask_mod for packed sequences: indices become indices within a sequence.

`batch` becomes the index of the sequence, and query and position count from the sequence's first ones.
Programs gather these from a table of integers, which is computed on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoidreduce.folds.program.graph import Expression, Graph
from monoidreduce.folds.program.operations import LEAVES
from monoidreduce.folds.program.program import Program, reachable

__all__ = ["in_sequences", "line_numbers"]


def line_numbers(of_queries: Tensor, of_keys: Tensor, lines: int) -> Tensor:
    """[lines, 4] int64: for query i its sequence and its index in it, and for key i the same.

    It is one table with rows of fixed size, so that offsets do not depend on the number of tokens and
    programs are compiled once. Nothing waits for the device.

    Args:
        of_queries, of_keys: cu_seqlens, [sequences + 1]. Tokens behind the last sequence count as one more
            sequence. Even for invalid cu_seqlens all entries are >= 0, which gathering programs rely on.
        lines: number of rows: at least the numbers of queries and of keys.
    """
    line = torch.arange(lines, device=of_queries.device)
    numbers = []
    for given in (of_queries, of_keys):
        starts = given.to(torch.int64).contiguous()
        sequence = torch.searchsorted(starts[1:], line, right=True)
        numbers += [sequence, (line - starts[sequence]).clamp(min=0)]
    return torch.stack(numbers, 1)


def in_sequences(program: Program, first: int) -> Program:
    """The program for packed sequences, from the one for a batch.

    `batch` becomes the query's sequence; but in an index that depends on the key and not on the query, the
    key's. Both are equal for all kept elements, and this way gradients of tensors gathered by key stay sums
    over queries. The factor of dropout, a second total, keeps the indices of tokens.

    Args:
        first: number of the size that holds the offset of `line_numbers` in the table of integers.
    """
    graph = Graph()

    def entry(leaf: str, column: int) -> Expression:
        line = graph.raw("table_line", graph.leaf(leaf), graph.constant(4), graph.constant(column))
        at = graph.raw("table_place", graph.leaf("size", first), line)
        return graph.raw("as_number" if column % 2 else "as_sequence", graph.raw("index_gather", at))

    sequence = {"query": entry("query", 0), "position": entry("position", 2)}
    within = {"query": entry("query", 1), "position": entry("position", 3)}
    placed: dict[str, list[Expression]] = {leaf: [] for leaf in sequence}  # by the side that gives `batch`
    for name, *rest in program.nodes:
        by = None
        if name in ("gather", "index_gather"):
            names = {program.nodes[i][0] for i in reachable(program.nodes, rest)}
            by = "query" if "query" in names else "position" if "position" in names else None
        for side, nodes in placed.items():
            if name == "batch":
                nodes.append(sequence[side])
            elif name in within:
                nodes.append(within[name])
            elif name in LEAVES:
                nodes.append(graph.leaf(name, *rest))
            else:
                of = placed[by or side]
                nodes.append(graph.raw(name, *(of[i] for i in rest)))
    score, *factors = program.totals
    of_tokens: list[Expression] = []
    for name, *rest in program.nodes if factors else ():
        is_leaf = name in LEAVES
        of_tokens.append(
            graph.leaf(name, *rest) if is_leaf else graph.raw(name, *(of_tokens[i] for i in rest))
        )
    totals = (placed["query"][score].number, *(of_tokens[factor].number for factor in factors))
    counts = tuple(placed["query"][number].number for number in program.counts)
    return Program(tuple(graph.nodes), totals=totals, counts=counts)
