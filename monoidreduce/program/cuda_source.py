"""The C++ text of a program, for NVRTC: its fold, or its gradients by the scores.

The text has one struct, as csrc/include/monoidreduce/device/program/statistics.h describes it: straight-line
code for one element. All else is in the library's headers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from monoidreduce.program.derivative import exchanged, gradient, is_of_distance, key_step, slopes
from monoidreduce.program.graph import Node
from monoidreduce.program.operations import LEAVES, OPERATIONS, SAME
from monoidreduce.program.program import Program, operands, parse

__all__ = ["Source", "fold_source", "gradient_source", "pulled_source", "scores_source", "state_words"]

_TYPES = {"real": "R", "index": "I", "bool": "bool"}
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
    "index_lt": "<",
    "index_le": "<=",
    "index_eq": "==",
}
_FUSED = {"mul": "*", "div": "/"}  # which a compiler may fuse with sums
_CALLS = {"where": "select", "index_where": "select", "index_div": "floor_of_quotient"}
_CALLS |= {"mul": "product", "div": "quotient"}
_CALLS |= {"index_mod": "floor_remainder", "not": "!", "neg": "-", "to_real": "to_real"}
_DATA = {
    "row": "e.row.data",
    "row_index": "e.row.index",
    "column": "e.column",
    "column_index": "e.column_index",
}


@dataclass(frozen=True)
class Source:
    """The struct `Program<R>`, and how many scores an element has."""

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
    if name == "integer":
        return f"saturated<I>({arguments[0]}ll)"
    if name == "boolean":
        return "true" if arguments[0] else "false"
    if name in ("score", "other", "position", "batch", "head", "query"):
        return f"e.{name}"
    if name == "size":
        return f"I(e.size[{arguments[0]}])"
    if name in ("gather", "index_gather"):
        return f"e.tables.template {name}<{'R' if name == 'gather' else 'I'}>(x{arguments[0]})"
    if name in _DATA:
        return f"{_DATA[name]}[{arguments[0]}]"
    operands = [f"x{number}" for number in arguments]
    if name in SAME:
        return operands[-1]
    infix = _INFIX | _FUSED if fused else _INFIX
    if name in infix:
        return f" {infix[name]} ".join(operands)
    return f"{_CALLS.get(name, name)}({', '.join(operands)})"


_REALS = {("query",): "e.real_query", ("position",): "e.real_position"}
_DISTANCES = {("position", "query"): "e.real_distance", ("query", "position"): "(-e.real_distance)"}


def _real(nodes: Sequence[Node], number: int) -> str | None:
    """A sum of query, position and constants as a real number, which is exact up to 2^24; else None."""
    name, *arguments = nodes[number]
    if nodes[number] in _REALS:
        return _REALS[nodes[number]]
    if name == "integer" and abs(arguments[0]) < 1 << 23:
        return f"R({arguments[0]})"
    if name not in ("index_add", "index_sub"):
        return None
    of = (nodes[arguments[0]][0], nodes[arguments[1]][0])
    if name == "index_sub" and of in _DISTANCES:
        return _DISTANCES[of]
    left, right = (_real(nodes, argument) for argument in arguments)
    return f"({left} {_INFIX[name]} {right})" if left and right else None


def _lines(
    nodes: Sequence[Node], roots: Iterable[int], modify_scores: bool = False, fused: bool = False
) -> list[str]:
    """modify_scores: of attention. Its elements have their numbers as reals too, so that sums of them are not
    converted. fused: products may be fused with sums."""
    texts: dict[int, str] = {}
    needed = set(roots)
    for number in range(len(nodes) - 1, -1, -1):
        if number not in needed:
            continue
        converted = modify_scores and nodes[number][0] == "to_real"
        real = _real(nodes, nodes[number][1]) if converted else None
        texts[number] = real or _value(nodes[number], fused)
        used = operands(nodes[number])
        needed.update(() if real else used[-1:] if nodes[number][0] in SAME else used)
    lines = []
    for number, text in sorted(texts.items()):
        name = nodes[number][0]
        kind = LEAVES[name] if name in LEAVES else OPERATIONS[name].kinds[-1]
        lines.append(f"const {_TYPES[kind]} x{number} = {text};")
    return lines


def _struct(constants: dict[str, int], means: Sequence[int], function: str, body: Iterable[str]) -> str:
    listed = ", ".join(f"{name} = {value}" for name, value in constants.items())
    indented = "\n".join(f"    {line}" for line in body)
    return f"""\
template <class R>
struct Program {{
  using Real = R;
  using I = Index<R>;
  static constexpr int {listed};
  static constexpr int kMeans[] = {{{", ".join(map(str, means or (0,)))}}};
  MR_HD static R to_real(I x) {{ return R(static_cast<Scalar<R>>(x)); }}
  MR_HD static {function}([[maybe_unused]] const ProgramElement<Program>& e) {{
{indented}
  }}
}};
"""


def _constants(scores: int, counts: Sequence[int], statistics: Sequence[int]) -> dict[str, int]:
    data = ("kRowData", "kRowIndices", "kColumnData", "kColumnIndices")
    of_rows = ("kSoftmaxes", "kTotals", "kLargest", "kCounts")
    return {"kScores": scores, **dict(zip((*data, *of_rows), (*counts, *statistics), strict=True))}


def _means(program: Program) -> list[int]:
    return [len(softmax) - 1 for softmax in program.softmaxes]


@lru_cache(256)
def fold_source(text: str, rows: int, row_indices: int, columns: int, column_indices: int) -> Source:
    """The fold of a program's text. Numbers: how many data a call has of each kind."""
    program = parse(text)
    body = [*_lines(program.nodes, program.roots), "ElementStatistics<Program> to{};"]
    mean = 0
    for s, (log_weight, *values) in enumerate(program.softmaxes):
        body.append(f"to.log_weight[{s}] = x{log_weight};")
        for value in values:
            body.append(f"to.mean[{mean}] = x{value};")
            mean += 1
    for field, numbers in (
        ("total", program.totals),
        ("largest", program.largest),
        ("counted", program.counts),
    ):
        body += [f"to.{field}[{k}] = x{number};" for k, number in enumerate(numbers)]
    constants = _constants(
        program.scores,
        (rows, row_indices, columns, column_indices),
        (len(program.softmaxes), len(program.totals), len(program.largest), len(program.counts)),
    )
    function = "ElementStatistics<Program> statistics"
    return Source(_struct(constants, _means(program), function, [*body, "return to;"]), program.scores)


@lru_cache(256)
def gradient_source(text: str, rows: int, row_indices: int, columns: int, column_indices: int) -> Source:
    """Its gradients by the scores. Rows have the data that `derivative.gradient` adds."""
    program = parse(text)
    of = gradient(text, rows, row_indices)
    roots = [number for number in (of.score, of.other) if number is not None]
    known = rows + 2 * program.values + len(program.softmaxes)
    counts = (known, row_indices + len(program.largest), columns, column_indices)
    results = ", ".join(f"x{number}" for number in roots) + (", R(0)" if len(roots) == 1 else "")
    body = [*_lines(of.nodes.nodes, roots), f"return {{{results}}};"]
    constants = _constants(program.scores, counts, (0, 0, 0, 0))
    return Source(_struct(constants, (), "Gradient<R> gradient", body), program.scores)


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
    """Its gradients by the scores and by data of rows, where threads own rows.

    of_columns: what belongs to columns is pulled, and columns are rows; their number is their last integer.
    operands: are those by the scores wanted. data: the numbers of the data.
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
    body = [*_lines(nodes, wanted.values()), "ElementGradients<Program> to{};"]
    body += [f"to.{name} = x{number};" for name, number in wanted.items()]
    constants = {"kOperands": int(operands), "kSums": len(data)}
    constants |= _constants(program.scores, counts, (0, 0, 0, 0))
    function = "ElementGradients<Program> pulled"
    return Source(_struct(constants, (), function, [*body, "return to;"]), program.scores)


@lru_cache(256)
def state_words(text: str) -> int:
    """The size of StatisticsState<Program<R>> in numbers of the accumulation type."""
    program = parse(text)
    softmaxes, largest = len(program.softmaxes), len(program.largest)
    numbers = (softmaxes, softmaxes, sum(_means(program)), len(program.totals), largest, largest)
    return sum(max(count, 1) for count in (*numbers, len(program.counts)))


@lru_cache(256)
def scores_source(
    text: str, packed: bool = False, steps: bool = False, weights: bool = False, fused: bool = True
) -> Source:
    """The functions that modify scores of attention (device/program/score_element.h).

    packed: of packed sequences, whose kernels read listed spans. steps: may kernels add to dot products in
    place of scores. weights: are the scores the weights of `attend`; then without steps. fused: may products
    be fused with sums, as weights are rounded to 16 bits.
    """
    graph, score, keep, slope = slopes(text, None)
    kept = graph.constant(True) if keep is None else keep
    found = key_step(graph, score) if steps else None
    step = graph.constant(0.0) if found is None else found
    functions = "".join(
        f"  MR_HD static {kind} {name}([[maybe_unused]] const ScoreElement<R>& e) {{\n"
        + "".join(f"    {line}\n" for line in _lines(graph.nodes, [value.number], True, fused))
        + f"    return x{value.number};\n  }}\n"
        for kind, name, value in (
            ("R", "score", score),
            ("bool", "keeps", kept),
            ("R", "slope", slope),
            ("R", "step", step),
        )
    )
    constants = {
        "kMasked": keep is not None,
        "kOfSequences": packed,
        "kWeights": weights,
        "kPlain": steps and graph.nodes[score.number] == ("score",),
        "kSteps": found is not None,
        "kOfDistance": steps and is_of_distance(graph, score),
    }
    listed = ", ".join(f"{name} = {str(holds).lower()}" for name, holds in constants.items())
    return Source(
        f"""\
template <class R>
struct Program {{
  using Real = R;
  using I = Index<R>;
  static constexpr bool {listed};
  MR_HD static R to_real(I x) {{ return R(static_cast<Scalar<R>>(x)); }}
{functions}}};
""",
        1,
    )
