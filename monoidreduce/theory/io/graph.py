"""Computational graphs of scalars, for the paper's red-blue pebble games (figures 2 and 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from .two_level import check_sizes

__all__ = ["Graph", "attention_backward_graph", "attention_forward_graph", "product_graph"]


class Graph:
    """A directed acyclic graph. Nodes are numbered; the parents of a node have smaller numbers.

    A matrix of nodes is an int64 tensor of node numbers.
    """

    def __init__(self) -> None:
        self.parents: list[tuple[int, ...]] = []
        self.children: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.parents)

    def add(self, *parents: int) -> int:
        """Add a node that is computed from its parents (an input if there are none); returns its number."""
        node = len(self)
        self.parents.append(parents)
        self.children.append([])
        for parent in parents:
            self.children[parent].append(node)
        return node

    @property
    def inputs(self) -> set[int]:
        """The nodes without parents (Definition 3.4)."""
        return {node for node, parents in enumerate(self.parents) if not parents}

    @property
    def outputs(self) -> set[int]:
        """The nodes without children (Definition 3.4)."""
        return {node for node, children in enumerate(self.children) if not children}

    def matrix(self, rows: int, columns: int) -> Tensor:
        """A matrix of new inputs."""
        return torch.tensor([[self.add() for _ in range(columns)] for _ in range(rows)])

    def sum(self, terms: list[int]) -> int:
        """The root of a summation tree: 1 + log2(d) layers for d terms, counting the terms (figure 3)."""
        while len(terms) > 1:
            pairs = [self.add(*terms[place : place + 2]) for place in range(0, len(terms) - 1, 2)]
            terms = pairs + terms[2 * len(pairs) :]
        return terms[0]

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """A matrix product: product nodes, and a summation tree for every entry (section 3.2)."""

        def entry(row: list[int], column: list[int]) -> int:
            return self.sum([self.add(x, y) for x, y in zip(row, column, strict=True)])

        return torch.tensor([[entry(row, column) for column in b.T.tolist()] for row in a.tolist()])

    def map(self, *operands: Tensor) -> Tensor:
        """An elementwise function: one node per entry. Operands broadcast to the shape of the first."""
        shape = operands[0].shape
        entries = torch.stack([operand.expand(shape) for operand in operands], -1)
        nodes = [self.add(*parents) for parents in entries.flatten(0, -2).tolist()]
        return torch.tensor(nodes).reshape(shape)

    def row_sums(self, a: Tensor) -> Tensor:
        """The row sums as a column [rows, 1]."""
        return torch.tensor([[self.sum(row)] for row in a.tolist()])


def product_graph(rows: int, columns: int, depth: int) -> Graph:
    """The product of two input matrices. Raises ValueError if a size is below 1."""
    check_sizes(rows=rows, columns=columns, depth=depth)
    graph = Graph()
    graph.product(graph.matrix(rows, depth), graph.matrix(depth, columns))
    return graph


def _softmax(graph: Graph, n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """A1, A2 and f (Definitions B.3 to B.5)."""
    check_sizes(n=n, d=d)
    a1, a2, x = graph.matrix(n, d), graph.matrix(n, d), graph.matrix(d, d)
    a = graph.map(graph.product(graph.product(a1, x), a2.T))
    return a1, a2, graph.map(a, graph.row_sums(a))


def attention_forward_graph(n: int, d: int) -> Graph:
    """O = f h (Definition 3.1, B.7). Raises ValueError if a size is below 1."""
    graph = Graph()
    _, _, f = _softmax(graph, n, d)
    graph.product(f, graph.product(graph.matrix(n, d), graph.matrix(d, d)))
    return graph


def attention_backward_graph(n: int, d: int) -> Graph:
    """g = A1^T p A2 (Definition 3.2, figure 2), computing A1 X and A1^T p first.

    Raises ValueError if a size is below 1.
    """
    graph = Graph()
    a1, a2, f = _softmax(graph, n, d)
    h = graph.product(graph.matrix(n, d), graph.matrix(d, d))
    q = graph.product(graph.matrix(n, d), h.T)
    p = graph.map(f, q, graph.row_sums(graph.map(f, q)))
    graph.product(graph.product(a1.T, p), a2)
    return graph
