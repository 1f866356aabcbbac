"""The C++ text of a program for NVRTC: its fold, or the gradients of its scores.

The text is one struct with straight-line code for one element, as
csrc/include/monoidreduce/device/program/statistics.h describes it. Everything else is in the library's
headers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Literal

from monoidreduce.folds.program.derivative import (
    exchanged,
    gradient,
    hides_nan,
    is_of_distance,
    key_step,
    slopes,
)
from monoidreduce.folds.program.graph import Expression, Graph, Node
from monoidreduce.folds.program.integers import FEW, MOST, lowered
from monoidreduce.folds.program.operations import LEAVES, OPERATIONS
from monoidreduce.folds.program.program import Program, parse, reachable
from monoidreduce.folds.program.ranges import column_bounds

__all__ = [
    "Source",
    "TableSum",
    "fold_source",
    "gradient_source",
    "pulled_source",
    "scores_source",
    "state_words",
]

TableSum = Literal["floats", "largest", "integers"]  # of device/program/score_element.h

_TYPES = {"real": "R", "index": "I", "wide": "W", "bool": "bool"}
_INFIX = {
    "add": "+",
    "sub": "-",
    "lt": "<",
    "le": "<=",
    "eq": "==",
    "and": "&&",
    "or": "||",
    "index_add": "+",
    "index_sub": "-",
    "index_mul": "*",
    "index_and": "&",
    "index_or": "|",
    "index_lt": "<",
    "index_le": "<=",
    "index_eq": "==",
    "wide_and": "&",
    "wide_or": "|",
    "wide_lt": "<",
    "wide_le": "<=",
    "wide_eq": "==",
}
_FUSED = {"mul": "*", "div": "/"}  # operators that the compiler may fuse with sums (FMA)
_CALLS = {"where": "select", "index_where": "select", "index_div": "floor_of_quotient"}
_CALLS |= {"mul": "product", "div": "quotient"}
_CALLS |= {"index_mod": "floor_remainder", "not": "!", "neg": "-"}
_CALLS |= {"wide_div": "floor_of_quotient", "wide_mod": "floor_remainder", "wide_where": "select"}
_CALLS |= {"widen": "W", "wide_to_real": "to_real", "wide_within": "within"}
_CALLS |= {"wide_uniform": "uniform<R>", "wide_uniform_16": "uniform_16<R>"}
_DATA = {
    "row": "e.row.data",
    "row_index": "e.row.index",
    "wide_row_index": "e.row.index",
    "column": "e.column",
    "column_index": "e.column_index",
    "wide_column_index": "e.column_index",
}
_GATHERS = {"gather": "gather<R>", "index_gather": "index_gather<I>", "wide_gather": "index_gather<W>"}


@dataclass(frozen=True)
class Source:
    """The text of the struct `Program<R>`. scores: number of scores of an element."""

    text: str
    scores: int


def _value(node: Node, fused: bool) -> str:
    name, *arguments = node
    if name == "real":
        value = float.fromhex(arguments[0])
        if math.isnan(value):
            return "R(NAN)"
        if math.isinf(value):
            return "infinity<R>()" if value > 0 else "-infinity<R>()"
        return f"R({value.hex()})"
    if name in ("integer", "wide_integer"):
        value = arguments[0]
        least = value == -(2**63)  # has no literal in C++
        return f"{_TYPES[LEAVES[name]]}({value + least}ll{' - 1' if least else ''})"
    if name == "real_sum":
        return str(arguments[0])
    if name == "boolean":
        return "true" if arguments[0] else "false"
    if name in ("score", "other", "position", "batch", "head", "query"):
        return f"e.{name}"
    if name == "size":
        return f"I(e.size[{arguments[0]}])"
    if name in _GATHERS:
        return f"e.tables.template {_GATHERS[name]}(x{arguments[0]})"
    if name in _DATA:
        return f"{_DATA[name]}[{arguments[0]}]"
    operands = [f"x{number}" for number in arguments]
    infix = _INFIX | _FUSED if fused else _INFIX
    if name in infix:
        return f" {infix[name]} ".join(operands)
    return f"{_CALLS.get(name, name)}({', '.join(operands)})"


# Reals that the kernels provide, by coefficients of (query, position).
_REALS = {
    (1, 0): "e.real_query",
    (-1, 0): "(-e.real_query)",
    (0, 1): "e.real_position",
    (0, -1): "(-e.real_position)",
    (-1, 1): "e.real_distance",
    (1, -1): "(-e.real_distance)",
}


def _real_sum(nodes: Sequence[Node], number: int) -> str | None:
    """A sum of query, position and constants as a real expression, if that is exact; else None.

    With at most FEW queries and positions, float32 represents all these numbers and their differences.
    """
    found = _linear(nodes, number)
    if found is None or found[:2] not in _REALS or abs(found[2]) > FEW:
        return None
    base = _REALS[found[:2]]
    return f"({base} + R({found[2]}))" if found[2] else base


def _linear(nodes: Sequence[Node], number: int) -> tuple[int, int, int] | None:
    """(coefficient of query, coefficient of position, constant) of a linear node; None for any other node."""
    name, *arguments = nodes[number]
    if name in ("query", "position"):
        return int(name == "query"), int(name == "position"), 0
    if name == "integer":
        return 0, 0, arguments[0]
    if name not in ("index_add", "index_sub"):
        return None
    left, right = (_linear(nodes, argument) for argument in arguments)
    if left is None or right is None:
        return None
    sign = 1 if name == "index_add" else -1
    query, position, constant = (x + sign * y for x, y in zip(left, right, strict=True))
    return query, position, constant


def _lines(
    nodes: Sequence[Node],
    roots: Iterable[int],
    most: int = MOST,
    modify_scores: bool = False,
    fused: bool = False,
    maximized: Collection[int] = (),
) -> tuple[list[str], list[str], set[str]]:
    """C++ statements, variable names of the roots, and names of all operations used.

    most: see `lowered`. modify_scores: the program is for attention, whose elements also have their indices
    as reals, so that sums of them need no conversion. fused: allow the compiler to fuse products with sums.
    maximized: which of the roots have their largest values found. Gumbel numbers of these alone may be
    approximate, as their errors do not add up in a sum over columns.
    """
    if modify_scores and most == FEW:
        sums = (_real_sum(nodes, node[1]) if node[0] == "to_real" else None for node in nodes)
        nodes = [("real_sum", of) if of else node for node, of in zip(nodes, sums, strict=True)]
    nodes, numbers = lowered(nodes, roots, most)
    nodes = [_is_below(nodes, number) or node for number, node in enumerate(nodes)]
    lines, live = [], reachable(nodes, numbers)
    names = {nodes[number][0] for number in live}
    summed = {*reachable(nodes, (number for i, number in enumerate(numbers) if i not in maximized))}
    for number in live:
        name, value = nodes[number][0], _value(nodes[number], fused)
        if modify_scores and name == "wide_uniform":
            stream, row, column = nodes[number][1:]
            value = f"uniform<R>(x{stream}, x{row}, {_paired(nodes, column)})"
        if modify_scores and name == "is_below":
            stream, row, column, limit = nodes[number][1:]
            value = f"is_below(x{stream}, {_paired(nodes, row)}, {_paired(nodes, column)}, x{limit})"
        if number not in summed and (uniform := _of_gumbel(nodes, number)) is not None:
            value = f"log_of_exponential(x{uniform})"
        if f"wide_{name}" in names and name in _DATA:  # then all integers of rows (columns) are 64-bit
            value = f"saturated<I>({value})"
        kind = LEAVES[name] if name in LEAVES else OPERATIONS[name].kinds[-1]
        lines.append(f"const {_TYPES[kind]} x{number} = {value};")
    return lines, [f"x{number}" for number in numbers], names


def _is_below(nodes: Sequence[Node], number: int) -> Node | None:
    """A comparison uniform_16 < limit as one operation; None for any other node."""
    name, *of = nodes[number]
    if name != "lt" or nodes[of[0]][0] != "wide_uniform_16":
        return None
    return "is_below", *nodes[of[0]][1:], of[1]


def _paired(nodes: Sequence[Node], index: int) -> str:
    """An index of an element of attention as an argument of random numbers (`Paired`)."""
    name = nodes[index][0]
    return f"e.paired_{name}" if name in ("query", "position") else f"x{index}"


def _of_gumbel(nodes: Sequence[Node], number: int) -> int | None:
    """u of a node log(-log(u)), where u is a uniform random number; None for any other node."""
    for name in ("log", "neg", "log"):
        if nodes[number][0] != name:
            return None
        number = nodes[number][1]
    return number if nodes[number][0] == "wide_uniform" else None


def _of_payloads(program: Program, counted: tuple[int, ...]) -> str:
    """Members for the kernel of payload sums: the number of their vectors, the softmax and the count of each,
    and the bounds of a row's columns. counted: as in `fold_source`."""
    own_counts = len(program.counts) - len(counted)
    counts = {n: own_counts + k for k, n in enumerate(counted)}
    softmax_of = ", ".join([*(str(softmax) for softmax, *_ in program.payloads), "-1"])
    count_of = ", ".join([*(str(counts.get(n, -1)) for n in range(len(program.payloads))), "-1"])
    bounds = column_bounds(replace(program, counts=program.counts[:own_counts]).text)
    lines, roots, _ = _lines(program.nodes, [n for bound in bounds for _, n in bound.terms])
    at = iter(roots)
    for bound in bounds:
        terms = [f"{factor} * W({next(at)})" for factor, _ in bound.terms]
        name, better = ("end", "<") if bound.upper else ("first", ">")
        lines.append(
            f"if (const W at = {' + '.join([*terms, str(bound.offset)])}; at {better} {name}) {name} = at;"
        )
    body = "".join(f"    {line}\n" for line in lines)
    return f"""\
  static constexpr int kVectors = {program.vectors};
  static constexpr int kSoftmaxOf[] = {{{softmax_of}}}, kCountOf[] = {{{count_of}}};
  static constexpr bool kBounded = {str(bool(bounds)).lower()};
  MR_HD static void bound([[maybe_unused]] const ProgramElement<Program>& e, W& first, W& end) {{
{body}  }}
"""


def _of_most(lines: Iterable[str], root: str) -> str:
    """The member for the k largest values (device/contraction/most.cuh). The compiler drops unused lines."""
    body = "".join(f"    {line}\n" for line in [*lines, f"return {root};"])
    return f"  MR_HD static R most([[maybe_unused]] const ProgramElement<Program>& e) {{\n{body}  }}\n"


def _struct(
    constants: dict[str, int],
    of_softmaxes: tuple[Sequence[int], Sequence[int]],
    function: str,
    body: Iterable[str],
    names: set[str],
    more: str = "",
) -> str:
    """The text of the struct.

    of_softmaxes: the number of means of each, and the softmaxes whose entropies are wanted. names: operations
    used. more: further members.
    """
    means, entropies = (", ".join(map(str, numbers or (0,))) for numbers in of_softmaxes)
    body = list(body)
    listed = ", ".join(f"{name} = {value}" for name, value in (constants | {"kLines": len(body)}).items())
    indented = "\n".join(f"    {line}" for line in body)
    of_rows, of_columns = ("W" if f"wide_{of}_index" in names else "I" for of in ("row", "column"))
    return f"""\
template <class R>
struct Program {{
  using Real = R;
  using I = Index<R>;
  using W = std::int64_t;
  using RowIndex = {of_rows};
  using ColumnIndex = {of_columns};
  static constexpr int {listed};
  static constexpr int kMeans[] = {{{means}}}, kEntropyOf[] = {{{entropies}}};
{_TO_REAL}
{more}  MR_HD static {function}([[maybe_unused]] const ProgramElement<Program>& e) {{
{indented}
  }}
}};
"""


_TO_REAL = """\
  template <class X>
  MR_HD static R to_real(X x) {
    return R(static_cast<Scalar<R>>(x));
  }"""


def _constants(scores: int, counts: Sequence[int], statistics: Sequence[int]) -> dict[str, int]:
    data = ("kRowData", "kRowIndices", "kColumnData", "kColumnIndices")
    of_rows = ("kSoftmaxes", "kTotals", "kLargest", "kCounts", "kWeights", "kMost", "kEntropies", "kCarried")
    return {"kScores": scores, **dict(zip((*data, *of_rows), (*counts, *statistics), strict=True))}


def _means(program: Program) -> list[int]:
    return [len(softmax) - 1 for softmax in program.softmaxes]


@lru_cache(256)
def fold_source(
    text: str,
    rows: int,
    row_indices: int,
    columns: int,
    column_indices: int,
    counted: tuple[int, ...] | None = None,
) -> Source:
    """The source of a program's fold. rows, ..., column_indices: numbers of data of each kind in a call.

    counted: for the kernel that computes the payload sums too: those that the last counts of the program are
    for (`payloads.counting_excluded`).
    """
    program = parse(text)
    weights = [] if counted is None else [*program.weights]
    wanted = [*program.roots, *weights, *(f for f, _ in program.most)]
    first = program.first_largest
    maximized = {*range(first, first + len(program.largest))}
    maximized |= {len(wanted) - 1 - n for n in range(len(program.most))}
    lines, roots, names = _lines(program.nodes, wanted, maximized=maximized)
    to: list[str] = []
    means = count()
    for s, (_, *values) in enumerate(program.softmaxes):
        to += [f"log_weight[{s}]", *(f"mean[{next(means)}]" for _ in values)]
    for field, numbers in (
        ("total", program.totals),
        ("largest", program.largest),
        ("carried", program.carried),
        ("counted", program.counts),
        ("factor", weights),
    ):
        to += [f"{field}[{k}]" for k in range(len(numbers))]
    assigned = [f"to.{place} = {root};" for place, root in zip(to, roots, strict=False)]
    body = [*lines, "ElementStatistics<Program> to{};", *assigned, "return to;"]
    statistics = (program.softmaxes, program.totals, program.largest, program.counts, weights)
    constants = _constants(
        program.scores,
        (rows, row_indices, columns, column_indices),
        (
            *map(len, statistics),
            sum(k for _, k in program.most),
            len(program.entropies),
            len(program.carried),
        ),
    )
    function, more = "ElementStatistics<Program> statistics", ""
    if counted is not None:
        more = _of_payloads(program, counted)
    elif program.most:
        more = _of_most(lines, roots[-1])  # there is one
    of_softmaxes = _means(program), program.entropies
    return Source(_struct(constants, of_softmaxes, function, body, names, more), program.scores)


@lru_cache(256)
def gradient_source(text: str, rows: int, row_indices: int, columns: int, column_indices: int) -> Source:
    """The source of the gradients of the scores. Rows have the additional data of `derivative.gradient`."""
    program = parse(text)
    of = gradient(text, rows, row_indices)
    lines, roots, names = _lines(
        of.nodes.nodes, [number for number in (of.score, of.other) if number is not None]
    )
    known = rows + 2 * program.values + len(program.softmaxes)
    counts = (known, row_indices + len(program.largest), columns, column_indices)
    results = ", ".join(roots) + (", R(0)" if len(roots) == 1 else "")
    body = [*lines, f"return {{{results}}};"]
    constants = _constants(program.scores, counts, (0,) * 8)
    return Source(_struct(constants, ((), ()), "Gradient<R> gradient", body, names), program.scores)


@lru_cache(256)
def pulled_source(
    text: str,
    rows: int,
    row_indices: int,
    columns: int,
    column_indices: int,
    of_columns: bool,
    operands: bool,
    data: tuple[int, ...],
) -> Source:
    """The source of the gradients of the scores and of row data, for kernels whose threads, or in planes
    blocks, own rows.

    of_columns: compute the gradients of columns: rows and columns are exchanged, and a column's index is its
    last integer. operands: whether gradients of the scores are needed. data: numbers of the data that need
    gradients.
    """
    program = parse(text)
    of = gradient(text, rows, row_indices)
    nodes = tuple(exchanged(of.nodes.nodes, column_indices)) if of_columns else of.nodes.nodes
    known = (rows + 2 * program.values + len(program.softmaxes), row_indices + len(program.largest))
    counts = (columns, column_indices + 1, *known) if of_columns else (*known, columns, column_indices)
    by_data = of.columns if of_columns else of.rows
    results: dict[str, int | None] = {"score": of.score, "other": of.other} if operands else {}
    results |= {f"sums[{k}]": by_data[number] for k, number in enumerate(data)}
    wanted = {name: number for name, number in results.items() if number is not None}
    lines, roots, names = _lines(nodes, wanted.values())
    body = [*lines, "ElementGradients<Program> to{};"]
    body += [f"to.{name} = {root};" for name, root in zip(wanted, roots, strict=True)]
    constants = {"kOperands": int(operands), "kSums": len(data)}
    constants |= _constants(program.scores, counts, (0,) * 8)
    function = "ElementGradients<Program> pulled"
    return Source(_struct(constants, ((), ()), function, [*body, "return to;"], names), program.scores)


@lru_cache(256)
def state_words(text: str) -> int:
    """The size of StatisticsState<Program<R>>, in elements of the accumulation type."""
    program = parse(text)
    softmaxes, largest = len(program.softmaxes), len(program.largest)
    sums = sum(_means(program)) + len(program.entropies)
    numbers = (softmaxes, softmaxes, sums, len(program.totals), largest, largest, len(program.carried))
    return sum(max(count, 1) for count in (*numbers, len(program.counts)))


@lru_cache(256)
def scores_source(
    text: str,
    packed: bool = False,
    steps: bool = False,
    weights: bool = False,
    fused: bool = True,
    most: int = FEW,
    tables: TableSum | None = None,
    by_row: bool = False,
) -> Source:
    """The source of score_mod and mask_mod (device/program/score_element.h).

    packed: for packed sequences, whose kernels read spans. steps: whether kernels may add a multiple of the
    key index to dot products instead of evaluating scores. weights: the scores are weights of `attend`;
    excludes steps. fused: whether products may be fused with sums, which is harmless if weights are rounded
    to 16 bits. most: see `lowered`. tables: what kernels do with the gradient of the table of reals. by_row:
    whether they also sum that of gathers whose index lacks the key.
    """
    graph, score, keep, slope, factor, by_gathered = slopes(text, None)
    kept = graph.constant(True) if keep is None else keep
    found = key_step(graph, score) if steps else None
    step = graph.constant(0.0) if found is None else found
    of_element = [("R", "score", score), ("bool", "keeps", kept), ("R", "slope", slope), ("R", "step", step)]
    if factor is not None:  # 0 where the weight is dropped, else the same for all
        _, *parts = graph.nodes[factor.number]
        drops, _, kept_factor = (Expression(graph, number) for number in parts)
        of_element += [("bool", "drops", drops), ("R", "kept_factor", kept_factor)]
    functions = ""
    for kind, name, value in of_element:
        lines, (root,), _ = _lines(graph.nodes, [value.number], most, True, fused)
        body = "".join(f"    {line}\n" for line in [*lines, f"return {root};"])
        functions += (
            f"  MR_HD static {kind} {name}([[maybe_unused]] const ScoreElement<R>& e) {{\n{body}  }}\n"
        )
    if tables is not None:
        functions += _of_tables(graph, by_gathered, most, fused, tables, by_row)
    constants = {
        "kMasked": keep is not None,
        "kOfSequences": packed,
        "kWeights": weights,
        "kPlain": steps and graph.nodes[score.number] == ("score",),
        "kSteps": found is not None,
        "kOfDistance": steps and is_of_distance(graph, score),
        "kHidesNan": hides_nan(graph, (score, slope) if weights else (score,)),
    }
    listed = ", ".join(f"{name} = {str(holds).lower()}" for name, holds in constants.items())
    return Source(
        f"""\
template <class R>
struct Program {{
  using Real = R;
  using I = Index<R>;
  using W = std::int64_t;
  static constexpr bool {listed};
{_TO_REAL}
{functions}}};
""",
        1,
    )


def _of_tables(
    graph: Graph,
    by_gathered: Sequence[tuple[int, Expression]],
    most: int,
    fused: bool,
    tables: TableSum,
    by_row: bool,
) -> str:
    """Members for the gradient of the table of reals (device/program/table_gradient.cuh).

    by_gathered: as in `derivative.Slopes`. Others as in `scores_source`.
    """
    of_entries: list[str] = []
    entries = derivatives = ""
    for entry, by in by_gathered:
        leaves = {graph.nodes[i][0] for i in reachable(graph.nodes, [entry])}
        if "position" not in leaves and not by_row:
            continue
        case = f"    if constexpr (n == {len(of_entries)}) {{\n"
        if "position" not in leaves:
            of_entries.append("EntryOf::kRow")
        else:
            of_entries.append("EntryOf::kElement" if "query" in leaves else "EntryOf::kColumn")
        lines, (root,), _ = _lines(graph.nodes, [entry], most, True, fused)
        entries += case + _indented([*lines, f"return e.tables.entry({root});"])
        lines, (root,), _ = _lines(graph.nodes, [by.number], most, True, fused)
        derivatives += case + _indented([*lines, f"return {root};"])
    if not of_entries:
        return ""
    return f"""\
  static constexpr int kGathers = {len(of_entries)};
  static constexpr EntryOf kEntryOf[] = {{{", ".join(of_entries)}}};
  static constexpr TableSum kTableSum = TableSum::k{tables.capitalize()};
  template <int n>
  MR_HD static I entry([[maybe_unused]] const ScoreElement<R>& e) {{
{entries}  }}
  template <int n>
  MR_HD static R by_gathered([[maybe_unused]] const ScoreElement<R>& e) {{
{derivatives}  }}
"""


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"      {line}\n" for line in lines) + "    }\n"
