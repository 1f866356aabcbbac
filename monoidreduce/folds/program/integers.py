"""Lowering of a program's integers to 32 bits where possible.

Integers of a program are 64-bit and wrap, like torch's int64. Engines that compute in float32 hold an integer
in 32 bits if its range is known to fit: indices of rows and columns, data of 32 bits or less, and results
that cannot leave 32 bits. `lowered` rewrites a program so that both kinds are distinct. This is range
analysis; no values are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch

from monoidreduce._validate import mismatch
from monoidreduce.folds.program.graph import Node
from monoidreduce.folds.program.operations import LEAVES, OPERATIONS
from monoidreduce.folds.program.program import operands, reachable

__all__ = ["FEW", "MOST", "lowered", "most_numbers"]

Range = tuple[int, int]  # lowest and highest value

MOST = 2**31 - 1  # largest number of rows, columns or table entries
FEW = 2**24  # float32 represents all integers up to it
_INT32, _INT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)
_INSIDE = (_INT32[0] + 1, _INT32[1] - 1)
_COMPARISONS = ("index_lt", "index_le", "index_eq")
_DATA = ("row_index", "column_index")
_OF_TABLES = ("within", "table_line", "table_place")  # table indices, which are at most MOST


def most_numbers(names: str, *counts: int) -> int:
    """A bound on indices of axes with these lengths, for `lowered`. It is FEW or MOST, so only two programs
    arise.

    Raises:
        ValueError: an axis is longer than MOST; the message names the arguments `names`.
    """
    longest = max(counts)
    if longest > MOST:
        raise ValueError(mismatch(names, f"axes of at most {MOST} for functions of elements", longest))
    return FEW if longest <= FEW else MOST


def _range_of(dtype: str, most: int) -> Range:
    known = {
        "bool": (0, 1),
        "number": (0, most - 1),
        "number or none": (-1, most - 1),
        "sequence": (0, MOST - 1),
    }
    if dtype in known:
        return known[dtype]
    of = torch.iinfo(getattr(torch, dtype))
    return of.min, of.max


def _spread(values: Iterable[int]) -> Range:
    """The range of these values; if some exceed 64 bits, the result may wrap to anything."""
    all = list(values)
    least, most = min(all), max(all)
    return (least, most) if _fits((least, most), _INT64) else _INT64


def _fits(inner: Range, outer: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _quotient(x: Range, y: Range) -> Range:
    # The quotient is monotone in x, and in y on either side of 0. Division by 0 gives 0.
    divisors = [n for n in (*y, -1, 1) if y[0] <= n <= y[1] and n != 0]
    return _spread([*(a // b for a, b in product(x, divisors)), *([0] if y[0] <= 0 <= y[1] else [])])


def _remainder(x: Range, y: Range) -> Range:
    low, high = min(y[0] + 1, 0), max(y[1] - 1, 0)
    if x[0] >= 0 and y[0] > 0:
        high = min(high, x[1])
    return _spread((low, high, *(x if y[0] <= 0 <= y[1] else ())))  # the remainder modulo 0 is x


def _of_bits(x: Range, y: Range) -> Range:
    """The numbers that have as many bits as these, with a sign if one of these has."""
    most = 2 ** max(max(n, ~n).bit_length() for n in (*x, *y))
    return (-most if min(*x, *y) < 0 else 0), most - 1


def _common_bits(x: Range, y: Range) -> Range:
    unsigned = [high for low, high in (x, y) if low >= 0]
    return (0, min(unsigned)) if unsigned else _of_bits(x, y)


_RESULTS: dict[str, Callable[..., Range]] = {
    "index_add": lambda x, y: _spread((x[0] + y[0], x[1] + y[1])),
    "index_sub": lambda x, y: _spread((x[0] - y[1], x[1] - y[0])),
    "index_mul": lambda x, y: _spread(a * b for a, b in product(x, y)),
    "index_div": _quotient,
    "index_mod": _remainder,
    "index_and": _common_bits,
    "index_or": _of_bits,
    "index_where": lambda _, x, y: _spread((*x, *y)),
    **dict.fromkeys(_OF_TABLES, lambda *_: (0, MOST)),
}


def _ranges(nodes: Sequence[Node], most: int) -> list[Range]:
    """The range of each node; meaningless for nodes that are not integers."""
    found: list[Range] = []
    for name, *rest in nodes:
        if name == "integer":
            found.append((rest[0], rest[0]))
        elif name == "size":
            found.append((0, MOST))
        elif name in _DATA:
            found.append(_range_of(rest[1], most))
        elif LEAVES.get(name) == "index":
            found.append((0, most - 1))
        elif name.startswith("as_"):
            found.append(_range_of(name[3:], most))
        elif name in _RESULTS:
            found.append(_RESULTS[name](*(found[i] for i in rest)))
        else:
            found.append(_INT64)
    return found


def _is_integer(node: Node) -> bool:
    name = node[0]
    return (LEAVES[name] if name in LEAVES else OPERATIONS[name].kinds[-1]) == "index"


def _wide(nodes: Sequence[Node], live: Sequence[int], ranges: Sequence[Range]) -> set[int]:
    """The nodes that need 64 bits: those that may not fit into 32, and those computed from such nodes."""
    wide: set[int] = set()
    for number in live:
        node = nodes[number]
        if not _is_integer(node) or node[0] in _OF_TABLES:
            continue
        # The dtype of a table's entry bounds its range.
        of_table = node[0].startswith("as_") and nodes[node[1]][0] == "index_gather"
        if not _fits(ranges[number], _INT32) or (not of_table and not wide.isdisjoint(operands(node))):
            wide.add(number)
    return wide


def _compared_alone(
    nodes: Sequence[Node], live: Sequence[int], ranges: Sequence[Range], wide: set[int]
) -> set[int]:
    """Wide data that are only compared with narrow values strictly inside the 32-bit range.

    The result of such a comparison does not change if the engine saturates the datum to 32 bits, so it can
    stay narrow.
    """
    found = {number for number in live if nodes[number][0] in _DATA} & wide
    for number in live:
        for of in operands(nodes[number]):
            if of in found:
                others = [n for n in nodes[number][1:] if n != of]
                alike = nodes[number][0] in _COMPARISONS and len(others) == 1 and others[0] not in wide
                if not alike or not _fits(ranges[others[0]], _INSIDE):
                    found.discard(of)
    return found


def lowered(nodes: Sequence[Node], roots: Iterable[int], most: int) -> tuple[list[Node], list[int]]:
    """The nodes that the roots depend on, with 64-bit integers as "wide" nodes; and the numbers of the roots.

    Args:
        most: result of `most_numbers`.
    """
    roots = list(roots)
    live, ranges = reachable(nodes, roots), _ranges(nodes, most)
    wide = _wide(nodes, live, ranges)
    wide -= _compared_alone(nodes, live, ranges, wide)
    written: list[Node] = []
    known: dict[Node, int] = {}
    of: dict[int, int] = {}  # number of a node -> number of the written node that replaces it

    def write(*node: Any) -> int:
        number = known.setdefault(node, len(written))
        if number == len(written):
            written.append(node)
        return number

    def widened(number: int) -> int:
        if number in wide:
            return of[number]
        name, *rest = nodes[number]
        return write("wide_integer", *rest) if name == "integer" else write("widen", of[number])

    def write_as_wide(number: int) -> int:
        name, *rest = nodes[number]
        if name == "integer":
            return write("wide_integer", *rest)
        if name in _DATA:
            return write(f"wide_{name}", rest[0])
        if name == "index_gather":
            return write("wide_gather", of[rest[0]])
        if name.startswith("as_"):
            return of[rest[0]]
        integers = [widened(i) if _is_integer(nodes[i]) else of[i] for i in rest]
        return write(name.replace("index_", "wide_"), *integers)

    def write_node(number: int) -> int:
        name, *rest = nodes[number]
        if number in wide:
            return write_as_wide(number)
        if name in _DATA:
            return write(name, rest[0])
        if name in LEAVES:
            return write(name, *rest)
        if name == "detach":  # matters to derivatives alone
            return of[rest[0]]
        if name.startswith("as_"):
            name, *rest = nodes[rest[0]]
            return write(name, *(of[i] for i in rest)) if name == "index_gather" else of[nodes[number][1]]
        if name in _COMPARISONS and not wide.isdisjoint(rest):
            return write(name.replace("index_", "wide_"), *map(widened, rest))
        if name in ("uniform", "uniform_16"):
            return write(f"wide_{name}", widened(rest[0]), of[rest[1]], of[rest[2]])
        at = [of[i] for i in rest]
        if name == "to_real" and rest[0] in wide:
            return write("wide_to_real", *at)
        if name == "within":
            counts = ranges[rest[0]][0] >= 0
            return write("wide_within" if rest[0] in wide else "within_from_0" if counts else name, *at)
        if name == "table_line":
            return write("index_add", write("index_mul", *at[:2]), at[2])
        return write("index_add" if name == "table_place" else name, *at)

    for number in live:
        of[number] = write_node(number)
    return written, [of[number] for number in roots]
