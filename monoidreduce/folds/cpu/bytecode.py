"""Bytecode of a program for the CPU engine's interpreter (csrc/include/monoidreduce/cpu/program.h)."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache

from monoidreduce import _C
from monoidreduce.folds.program.derivative import gradient, slopes
from monoidreduce.folds.program.errors import TraceError
from monoidreduce.folds.program.graph import Node
from monoidreduce.folds.program.integers import MOST, lowered
from monoidreduce.folds.program.operations import LEAVES, OPERATIONS
from monoidreduce.folds.program.program import operands, parse, reachable

__all__ = ["backward_code", "forward_code", "scores_code"]

INSTRUCTIONS = {name: number for number, name in enumerate(_C.PROGRAM["instructions"])}
BLOCK_REGISTERS: int = _C.PROGRAM["block_registers"]
ROW_REGISTERS: int = _C.PROGRAM["row_registers"]
STEPS: int = _C.PROGRAM["steps"]
FIELDS: int = _C.PROGRAM["fields"]
OF_COLUMNS = {"column", "column_index", "wide_column_index"}
OF_ELEMENTS = {"score", "other", "position", *OF_COLUMNS}
ROW_NUMBERS = ("batch", "head", "query")  # integers that identify a row of attention
ROW_DATA = ("row", "row_index", "wide_row_index")
CONSTANTS = ("real", "integer", "boolean", "wide_integer")
GATHERS = ("gather", "index_gather", "wide_gather")
# The names of the instructions that are not called as their nodes are.
NAMES = {"within_from_0": "within", "column_index": "column", "wide_column_index": "wide_column"}


class _Writer:
    """Writes the code of some nodes.

    Nodes that depend only on constants and row data are computed once per row; the others for each element. A
    value is identified by its node's number, or by a name. Block registers are allocated once all
    instructions are known.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        roots: Iterable[int],
        data: tuple[int, int, int, int],
        most: int = MOST,
    ) -> None:
        """data: numbers of row reals, row integers, column reals and column integers. most: see `lowered`."""
        nodes, self.roots = lowered(nodes, roots, most)
        self.nodes, self.data = nodes, data
        self.of_element: set[int] = set()
        self.needed = reachable(nodes, self.roots)
        for number in self.needed:
            node = nodes[number]
            if node[0] in OF_ELEMENTS or self.of_element.intersection(operands(node)):
                self.of_element.add(number)
        self.constants = [i for i in self.needed if nodes[i][0] in CONSTANTS]
        self.row_code: list[list[int]] = []
        self.rows: dict[int, int] = {}
        rows, row_indices, *_ = data
        first_constant = rows + row_indices
        for number in self.needed:
            name, *rest = nodes[number]
            if name in CONSTANTS:
                self.rows[number] = first_constant + self.constants.index(number)
            elif name in ROW_DATA:
                self.rows[number] = rest[0] + (0 if name == "row" else rows)
            elif name in ROW_NUMBERS:
                self.rows[number] = ROW_NUMBERS.index(name)
            elif number not in self.of_element:
                self.rows[number] = first_constant + len(self.constants) + len(self.row_code)
                arguments = [BLOCK_REGISTERS + self.rows[i] for i in rest]  # a gather here is not uniform
                self.row_code.append(_instruction(name, BLOCK_REGISTERS + self.rows[number], arguments))
        # (instruction, result value, argument values, numbers)
        self.code: list[tuple[str, object, list[object], list[int]]] = []
        self.written: set[object] = set()

    def value(self, number: int) -> int:
        """Write the code of a node, unless it is already written; returns the number."""
        if number in self.rows or number in self.written:
            return number
        # Not recursive, because a graph may be deeper than Python's stack allows.
        for i in reachable(self.nodes, [number]):
            if i in self.rows or i in self.written:
                continue
            name, *rest = self.nodes[i]
            if name in GATHERS:
                self.code.append((name, i, list(rest), [int(self._is_uniform(i))]))
            elif name in LEAVES:
                at = [rest[0] + (0 if name == "column" else self.data[2])] if rest else []
                self.code.append((name, i, [], at))
            else:
                self.code.append((name, i, list(rest), []))
            self.written.add(i)
        return number

    def _is_uniform(self, number: int) -> bool:
        """Whether a value is the same in all rows."""
        return not any(
            self.nodes[i][0] in {"score", "other", *ROW_DATA, *ROW_NUMBERS}
            for i in reachable(self.nodes, [number])
        )

    def _are_wide(self, kind: str, count: int) -> list[int]:
        """For each integer of row or column data, 1 if it is read as 64 bits, else 0."""
        wide = {self.nodes[i][1] for i in self.needed if self.nodes[i][0] == f"wide_{kind}"}
        return [int(k in wide) for k in range(count)]

    def state(self, name: str, field: int, values: list[object], numbers: Sequence[int] = ()) -> None:
        self.code.append((name, None, values, [field, *numbers]))

    def weight(self, log_weight: int, field: int) -> object:
        name = ("weight", field)
        self.code.append(("weight", name, [log_weight], [field]))
        return name

    def text(self, layout: Iterable[int]) -> str:
        rows, row_indices, columns, column_indices = self.data
        constants = [x for i in self.constants for x in _constant(self.nodes[i])]
        code = self._with_registers()
        of_rows = rows + row_indices + len(self.constants) + len(self.row_code)
        if of_rows > ROW_REGISTERS:
            raise _too_large(f"{of_rows} constants, data and values of a row, more", ROW_REGISTERS)
        if len(code) > STEPS:
            raise _too_large(f"{len(code)} operations of an element, more", STEPS)
        numbers = [*layout, rows, row_indices, *self._are_wide("row_index", row_indices)]
        numbers += [columns, column_indices, *self._are_wide("column_index", column_indices)]
        numbers += [len(self.constants), *constants]
        for instructions in (self.row_code, code):
            numbers += [len(instructions), *(x for instruction in instructions for x in instruction)]
        return " ".join(map(str, numbers))

    def _with_registers(self) -> list[list[int]]:
        last_use = {value: at for at, (_, _, values, _) in enumerate(self.code) for value in values}
        free = list(range(BLOCK_REGISTERS - 1, -1, -1))
        register: dict[object, int] = {}

        def of(value: object) -> int:
            if isinstance(value, int) and value in self.rows:
                return BLOCK_REGISTERS + self.rows[value]
            return register[value]

        code = []
        for at, (name, to, values, numbers) in enumerate(self.code):
            arguments = [of(value) for value in values]
            done = [value for value in dict.fromkeys(values) if value in register and last_use[value] == at]
            kinds = OPERATIONS[name].kinds if name in OPERATIONS else ()
            # An operation that mixes 64-bit and other values must not write over an argument: elements differ
            # in size.
            in_place = "wide" not in kinds or {*kinds} == {"wide"}
            if in_place:
                free += map(register.pop, done)
            if to is None:
                field, *rest = numbers
                code.append(_instruction(name, field, [*arguments, *rest]))
            else:
                if not free:
                    raise _too_large("more values at a time", BLOCK_REGISTERS)
                register[to] = free.pop()
                code.append(_instruction(name, register[to], [*arguments, *numbers]))
                if to not in last_use:
                    free.append(register.pop(to))
            if not in_place:
                free += map(register.pop, done)
        return code


def _too_large(what: str, most: int) -> TraceError:
    return TraceError(
        f"{what} than the {most} that the CPU engine has: write two functions, or a shorter one"
    )


def _instruction(name: str, to: int, arguments: Sequence[int]) -> list[int]:
    return [INSTRUCTIONS[NAMES.get(name, name)], to, *arguments, *[0] * (3 - len(arguments))]


def _constant(node: Node) -> tuple[int, int]:
    """(1, bits of a real), (0, integer, or all bits set for True), or (2, 64-bit integer)."""
    name, value = node
    if name == "real":
        bits: int = struct.unpack("<q", struct.pack("<d", float.fromhex(value)))[0]
        return 1, bits
    if name == "wide_integer":
        return 2, value
    return 0, -value if name == "boolean" else value


@lru_cache(256)
def forward_code(text: str, rows: int, row_indices: int, columns: int, column_indices: int) -> str:
    """The code that folds a row. rows, ..., column_indices: numbers of data of each kind in a call."""
    program = parse(text)
    writer = _Writer(program.nodes, program.roots, (rows, row_indices, columns, column_indices))
    root = iter(writer.roots)
    means_of = [len(softmax) - 1 for softmax in program.softmaxes]
    first_carried = 2 * (len(means_of) + len(program.largest)) + sum(means_of) + len(program.totals)
    first_entropy = first_carried + len(program.carried) + len(program.counts)
    field = 0
    for i, (_, *means) in enumerate(program.softmaxes):
        log_weight = next(root)
        entropy = first_entropy + program.entropies.index(i) if i in program.entropies else 0
        writer.state("frame", field, [writer.value(log_weight)], [1 + len(means), entropy])
        weight = writer.weight(log_weight, field)
        if entropy:
            writer.state("entropy", entropy, [weight, log_weight], [field])
        for k in range(field + 2, field + 2 + len(means)):
            writer.state("mean", k, [weight, writer.value(next(root)), log_weight])
        field += 2 + len(means)
    for _ in program.totals:
        writer.state("total", field, [writer.value(next(root))])
        field += 1
    largest = [writer.value(next(root)) for _ in program.largest]
    carried = [writer.value(next(root)) for _ in program.carried]
    for n, value in enumerate(largest):
        of = carried[n : n + 1]
        writer.state("largest", field, [value, *of], [first_carried + n for _ in of])
        field += 2
    field += len(carried)
    for _ in program.counts:
        writer.state("count", field, [writer.value(next(root))])
        field += 1
    field += len(program.entropies)
    if field > FIELDS:
        raise TraceError(
            f"the statistics have {field} numbers of a row, more than {FIELDS}: write two functions"
        )
    layout = [len(means_of), *means_of, len(program.totals), len(largest), len(carried), len(program.counts)]
    return writer.text([*layout, len(program.entropies), *program.entropies])


@lru_cache(256)
def backward_code(text: str, rows: int, row_indices: int, columns: int, column_indices: int) -> str:
    """The code of the gradients of the scores. Rows have the additional data of `derivative.gradient`."""
    program = parse(text)
    of = gradient(text, rows, row_indices)
    roots = [number for number in (of.score, of.other) if number is not None]
    known = rows + 2 * program.values + len(program.softmaxes)
    known_indices = row_indices + len(program.largest)
    writer = _Writer(of.nodes.nodes, roots, (known, known_indices, columns, column_indices))
    # Gradients overwrite the scores, so they are written last.
    for k, number in enumerate([writer.value(root) for root in writer.roots]):
        writer.state("result", k, [number])
    return writer.text([0, 0, 0, 0, 0, 0])


@lru_cache(256)
def scores_code(text: str, sizes: tuple[int, ...], most: int, backward: bool) -> str:
    """The code of score_mod and mask_mod. most: see `lowered`.

    It writes panels: the scores; 0 for kept elements and -inf for others; in backward the derivatives of the
    scores with respect to the dot products; and with dropout the factors of the weights.
    """
    graph, score, keep, slope, factor, _ = slopes(text, sizes)
    zero, nothing = graph.constant(0.0), graph.constant(-math.inf)
    kept = zero.where(keep, zero, nothing) if keep is not None else zero
    panels = {0: score.number, 1: kept.number} | ({2: slope.number} if backward else {})
    if factor is not None:
        panels[3] = factor.number
    writer = _Writer(graph.nodes, panels.values(), (0, len(ROW_NUMBERS), 0, 0), most)
    # Panels are written last, because the first one holds the dot products.
    values = [writer.value(root) for root in writer.roots]
    for panel, number in zip(panels, values, strict=True):
        writer.state("result" if panel == 2 else "store", panel, [number])
    return writer.text([0, 0, 0, 0, 0, 0])
