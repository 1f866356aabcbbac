"""Functions of an element's indices, for packed sequences: indices become those within a sequence.

`batch` is the number of the sequence, and query and position count from its first ones. Programs gather them
from the table of integers, for which they are made on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoidreduce.folds.program.graph import Expression, Graph
from monoidreduce.folds.program.operations import LEAVES
from monoidreduce.folds.program.program import Program, reachable

__all__ = ["in_sequences", "line_numbers"]


def line_numbers(of_queries: Tensor, of_keys: Tensor, lines: int) -> Tensor:
    """[lines, 4] int64: of a query its sequence and its number in it, and of a key the same.

    One table, whose rows have a fixed size. So the place of a number does not depend on how many there are,
    and programs are compiled once. Nothing waits for the device.

    Args:
        of_queries, of_keys: [sequences + 1], `cu_seqlens`. What is behind the last sequence is of one more.
            Whatever they hold, numbers are at least 0, as programs that gather by them take for granted.
        lines: as many as the queries and as the keys.
    """
    line = torch.arange(lines, device=of_queries.device)
    numbers = []
    for given in (of_queries, of_keys):
        starts = given.to(torch.int64).contiguous()
        sequence = torch.searchsorted(starts[1:], line, right=True)
        numbers += [sequence, (line - starts[sequence]).clamp(min=0)]
    return torch.stack(numbers, 1)


def in_sequences(program: Program, first: int) -> Program:
    """The program for packed sequences, from that for one batch.

    The sequence is that of the query; in an index that depends on the key and not on the query, that of the
    key. They are the same in all elements that are kept, and gradients of what is gathered by the key stay
    sums over queries.

    Args:
        first: the number of the size that says where `line_numbers` begin in the table of integers.
    """
    graph = Graph()

    def entry(leaf: str, column: int) -> Expression:
        line = graph.raw("table_line", graph.leaf(leaf), graph.constant(4), graph.constant(column))
        at = graph.raw("table_place", graph.leaf("size", first), line)
        return graph.raw("as_number" if column % 2 else "as_sequence", graph.raw("index_gather", at))

    sequence = {"query": entry("query", 0), "position": entry("position", 2)}
    within = {"query": entry("query", 1), "position": entry("position", 3)}
    placed: dict[str, list[Expression]] = {leaf: [] for leaf in sequence}  # by whose sequence `batch` is
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
    totals, counts = (
        tuple(placed["query"][number].number for number in roots)
        for roots in (program.totals, program.counts)
    )
    return Program(tuple(graph.nodes), totals=totals, counts=counts)
