"""Tracing a schedule as a pebble game: a two-level memory that holds graph nodes instead of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from .graph import Graph
from .pebbles import Move
from .two_level import ALL, Memory

__all__ = ["REGISTERS", "TracedMemory"]

# While a term is added to a sum, the term and the new sum need a red pebble each beside the old sum.
REGISTERS = 2


class TracedMemory(Memory):
    """Runs a schedule on the nodes of a graph that grows with every computation.

    After the run `moves` is a game on `graph` (Definition 3.4), legal with `peak` + `REGISTERS` red pebbles,
    with as many transfers as the schedule moves words. Sums are chains of nodes, in the schedule's order.

    Args:
        words: the cache size M.
        shapes: (rows, columns) of each input.
        strict: see `Memory`.

    Attributes:
        graph: the computation so far.
        moves: the game so far.

    Raises:
        ValueError: the schedule reads or writes entries that were never computed.
    """

    dtype = torch.int64
    zero = -1  # an empty sum, which has no node
    blank = -2

    def __init__(self, words: int, shapes: Mapping[str, tuple[int, int]], *, strict: bool = True) -> None:
        self.graph = Graph()
        self.moves: list[Move] = []
        super().__init__(
            words, {name: self.graph.matrix(*shape) for name, shape in shapes.items()}, strict=strict
        )

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        block = super().read(name, rows, columns)
        self._move("input", block)
        return block

    def write(self, block: Tensor, name: str, rows: slice = ALL, columns: slice = ALL) -> None:
        self._move("output", block)
        super().write(block, name, rows, columns)

    def delete(self, *old: Tensor) -> None:
        for block in old:
            self._move("delete", block[block >= 0])  # empty sums have no node
        super().delete(*old)

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        for row, left in enumerate(a.tolist()):
            for column, right in enumerate(b.T.tolist()):
                for factors in zip(left, right, strict=True):
                    total[row, column] = self._add(int(total[row, column]), factors)

    def add_row_sums(self, total: Tensor, *factors: Tensor) -> None:
        for row, entries in enumerate(torch.stack(factors, -1).tolist()):
            for term in entries:
                total[row, 0] = self._add(int(total[row, 0]), tuple(term))

    def compute(self, function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        nodes = self.graph.map(*operands)
        self._move("compute", nodes)
        return self._hold(nodes)

    def update(self, block: Tensor, function: Callable[..., Tensor], *operands: Tensor) -> None:
        nodes = self.graph.map(block, *operands)
        for node, old in zip(nodes.flatten().tolist(), block.flatten().tolist(), strict=True):
            self.moves += [Move("compute", node), Move("delete", old)]
        block.copy_(nodes)

    def _add(self, total: int, factors: tuple[int, ...]) -> int:
        """The node of total + the product of the factors. The first term of a sum is the sum itself."""
        term = self.graph.add(*factors)
        self.moves.append(Move("compute", term))
        if total == self.zero:
            return term
        node = self.graph.add(total, term)
        self.moves += [Move("compute", node), Move("delete", term), Move("delete", total)]
        return node

    def _move(self, operation: Literal["input", "output", "compute", "delete"], nodes: Tensor) -> None:
        numbers = nodes.flatten().tolist()
        if numbers and min(numbers) < 0:
            raise ValueError(f"{operation}: a block with entries that were never computed")
        self.moves += [Move(operation, node) for node in numbers]
