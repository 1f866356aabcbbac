"""Tracing of a Python function of one element to a program.

The function runs once, with an expression for each argument. A Python number that it reads becomes a constant
of the program. A tensor becomes data: row data or column data, depending on what indexes it; row data if it
has no axes.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from monoidreduce._dynamo import at_compile_time, found, names_in, read
from monoidreduce._results import result_name
from monoidreduce._validate import mismatch
from monoidreduce.folds import stat
from monoidreduce.folds.program.arguments import (
    ARGUMENTS,
    ROW_INDICES,
    VECTOR,
    arguments,
    definition,
    kind_of,
)
from monoidreduce.folds.program.captures import Captures, read_by
from monoidreduce.folds.program.chance import OUTSIDE as OUTSIDE_OF_IT
from monoidreduce.folds.program.chance import Watched, draws, refuse_draws_of_numpy
from monoidreduce.folds.program.errors import TraceError, line_of
from monoidreduce.folds.program.graph import Expression, Graph, Node, Payload, Vector
from monoidreduce.folds.program.payloads import is_attention, is_mean_alone
from monoidreduce.folds.program.program import Program, reachable

__all__ = [
    "KINDS",
    "NOTHING",
    "OF_MODS",
    "PARTLY",
    "STAND_INS",
    "WHOLLY",
    "WORDS",
    "Masking",
    "Source",
    "Trace",
    "Traced",
    "called",
    "is_value",
    "kept_by",
    "named_value",
    "run",
    "trace",
    "traced_in_graph",
    "traced_now",
]

OF_MODS = ("score", "batch", "head", "q_idx", "kv_idx")  # arguments of score_mod; mask_mod has no score
NOTHING, PARTLY, WHOLLY = 0, 1, 2  # of a block of scores, what a mask keeps: BlockMask.kinds
# Stand-ins for tensors of a call: BlockMask.kinds, and the bits of kept columns (decoding.py).
KINDS = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
WORDS = torch.zeros(1, 1, dtype=torch.int64)
STAND_INS = (KINDS, WORDS)
Masking = tuple[Callable[..., Any], tuple[int, int] | None, bool]
OF_ROWS, OF_COLUMNS = {"row", "row_index"}, {"column", "column_index", "position"}
OF_ELEMENTS = {"score", "other"}
# The source of a datum: ("argument", name); ("coordinate", name, k, D), coordinate k of a vector [D]; (name,)
# for one of ROW_INDICES; ("leading",), the number of the row's leading indices but the last; ("number", n),
# the same n for all rows; or ("tensor", number of the captured tensor, nodes of its indices).
Source = tuple[Any, ...]


@dataclass(frozen=True)
class Traced:
    """A traced function.

    sources: sources of the program's data, by kind of leaf, in order.
    outputs: for each statistic ("logsumexp" or "value", row of values), ("index", row of indices),
        ("largest" or "smallest", row of values, row of indices, k or None), or ("payload", place in
        `payloads`). result: name of the results' NamedTuple in RESULTS.
    payloads: for each payload sum (number of its weights among the program's `payloads`, name of the datum),
        ordered by that number.
    nodes, gathered: the unpruned graph, which has the indices of captured tensors, and the sources of its
    data.
    is_attention: whether it would be attention (payloads.is_attention) if no mask left elements out.
    tensors: the captured tensors. in_tables: numbers of those that are indexed by row and column together, in
        the order of their sizes. by_both: (number of the tensor, nodes of its indices) for each such use.
    reads: whether torch computed something from tensors only while tracing, so
        that the trace cannot be reused.
    at: file and line of the function.
    """

    program: Program
    text: str
    scores: int
    sources: Mapping[str, tuple[Source, ...]]
    outputs: tuple[tuple[Any, ...], ...]
    result: str
    payloads: tuple[tuple[int, str], ...]
    nodes: tuple[Node, ...]
    gathered: Mapping[str, tuple[Source, ...]]
    is_attention: bool
    tensors: tuple[Tensor, ...]
    in_tables: tuple[int, ...]
    by_both: tuple[tuple[int, tuple[int, ...]], ...]
    reads: bool
    at: tuple[str, int]

    @functools.cached_property
    def counts(self) -> tuple[int, int, int, int]:
        """Numbers of row data, integer row data, column data, and integer column data."""
        row, row_index, column, column_index = (
            len(self.sources[kind]) for kind in ("row", "row_index", "column", "column_index")
        )
        return row, row_index, column, column_index


living: WeakValueDictionary[str, Traced] = WeakValueDictionary()  # traced functions by program text


class Trace(Graph):
    """A graph, together with the sources of the data that its leaves stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, list[Source]] = {kind: [] for kind in sorted(OF_ROWS | OF_COLUMNS)}
        self.tensors: list[Tensor] = []
        # Captured tensors that are parts of tables, and for each and the next the number of its first size.
        self.in_tables: list[Tensor] = []
        self._first_sizes: list[int] = [0]
        self._by_both: list[tuple[int, tuple[int, ...]]] = []
        self.error: TraceError | None = None
        self.reads = False

    def data(self, of: str, kind: str, source: Source) -> Expression:
        """The expression of a datum. of: "row" or "column". kind: "real", or one of `operations.DTYPES`."""
        leaf, dtype = (of, ()) if kind == "real" else (f"{of}_index", (kind,))
        sources = self.sources[leaf]
        if source not in sources:
            sources.append(source)
        datum = self.leaf(leaf, sources.index(source), *dtype)
        return datum != 0 if kind == "bool" else datum

    def expression(self, value: Any) -> Expression:
        if isinstance(value, (stat.Statistic, stat.Softmax)):
            bool(value)  # raises the error that statistics cannot be used here
        if not isinstance(value, Tensor):
            return super().expression(value)
        if value.dim() != 0:
            raise TraceError(
                f"a tensor of shape {list(value.shape)} inside an element's function: "
                "index it with row, column, label, head or batch"
            )
        return self.data("row", self.kind_of_captured(value), ("tensor", self._captured(value), ()))

    def gather(self, tensor: Tensor, indices: tuple[Any, ...]) -> Expression:
        """The expression of a captured tensor, indexed by indices of the row or of the column."""
        if len(indices) != tensor.dim():
            raise TraceError(
                f"a tensor of shape {list(tensor.shape)} indexed by {len(indices)} of {tensor.dim()} axes"
            )
        numbers = []
        for index in map(self.expression, indices):
            if index.kind != "index":
                raise TraceError(f"an index: expected an integer, got a value that is {index.kind}")
            numbers.append(index.number)
        names = {self.nodes[number][0] for number in reachable(self.nodes, numbers)}
        if names & OF_ELEMENTS:
            raise TraceError("an index that depends on the score: index by row, column, label, head or batch")
        if names & OF_ROWS and names & OF_COLUMNS:
            number = self._captured(tensor)
            if tensor is not KINDS:  # whose axes of length 1 take any index
                self._by_both.append((number, tuple(numbers)))
            return self.entry(tensor, [Expression(self, number) for number in numbers])
        of = "column" if names & OF_COLUMNS else "row"
        kind = self.kind_of_captured(tensor)
        return self.data(of, kind, ("tensor", self._captured(tensor), tuple(numbers)))

    def entry(self, tensor: Tensor, indices: Sequence[Expression]) -> Expression:
        """The expression of a captured tensor in a table, from which the engines gather by these integers."""
        _, first = self.place(tensor)
        at = self.leaf("integer", 0)
        for axis, index in enumerate(indices):
            size = self.leaf("size", first + 1 + axis)
            index = self.raw("within", index, size)
            at = self.raw("table_line", at, size, index) if axis else index
        at = self.raw("table_place", self.leaf("size", first), at)
        kind = self.kind_of_captured(tensor)
        if kind == "real":
            return self.raw("gather", at)
        found = self.raw(f"as_{kind}", self.raw("index_gather", at))
        return found != 0 if kind == "bool" else found

    def place(self, tensor: Tensor) -> tuple[int, int]:
        """The number of a tensor in the tables, and of its first size, which is its offset in its table."""
        number = _number_in(self.in_tables, tensor)
        if number + 1 == len(self._first_sizes):
            self._first_sizes.append(self._first_sizes[-1] + 1 + tensor.dim())
        return number, self._first_sizes[number]

    @property
    def sizes(self) -> int:
        """How many sizes the tensors in tables have."""
        return self._first_sizes[-1]

    def uniform(self, seed: Any) -> Expression:
        """The random number of each element; see `stat.uniform`."""
        leading, row = (self.data("row", "number", (name,)) for name in ("leading", "row"))
        return self._drawn("uniform", seed, leading, row)

    def _drawn(self, name: str, seed: Any, leading: Expression, row: Expression) -> Expression:
        """The random number of each element by an operation."""
        if (
            isinstance(seed, Tensor)
            and seed.dim() == 0
            and self.kind_of_captured(seed) not in ("real", "bool")
        ) or self._is_of_rows(seed):
            of = self.expression(seed)
        elif isinstance(seed, Integral) and not isinstance(seed, bool) and -(2**63) <= int(seed) < 2**63:
            of = self._number(int(seed))
        else:
            expected = "an int of 64 bits, or a 0-d tensor or datum of rows of an integer dtype"
            raise TraceError(mismatch("seed", expected, repr(seed)))
        return self.apply(name, self.apply("index_stream", of, leading), row, self.leaf("position"))

    def _is_of_rows(self, value: Any) -> bool:
        """Whether a value is an integer that depends on the row alone."""
        if not isinstance(value, Expression) or value.kind != "index":
            return False
        names = {self.nodes[number][0] for number in reachable(self.nodes, [value.number])}
        return not names & (OF_COLUMNS | OF_ELEMENTS)

    def _number(self, value: int) -> Expression:
        """A number that may differ from call to call: data, so that the program does not depend on it."""
        return self.data("row", "int64", ("number", value))

    def kind_of_captured(self, tensor: Tensor) -> str:
        try:
            return kind_of(tensor)
        except TypeError as error:
            raise TraceError(f"a captured tensor: {error}") from None

    def _captured(self, tensor: Tensor) -> int:
        return _number_in(self.tensors, tensor)


def _number_in(tensors: list[Tensor], tensor: Tensor) -> int:
    """The number of a tensor in a list, to which it is added if need be."""
    for number, known in enumerate(tensors):
        if known is tensor:
            return number
    tensors.append(tensor)
    return len(tensors) - 1


class _Watch(TorchFunctionMode):
    """Sets graph.reads if torch computes something from tensors only, which may differ in the next call."""

    def __init__(self, graph: Trace) -> None:
        super().__init__()
        self.graph = graph

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(function):
            self.graph.error = TraceError(f"{resolve_name(function) or function.__name__}: {OUTSIDE_OF_IT}")
            raise self.graph.error
        if Expression in types or any(isinstance(x, Expression) for x in _flat((*args, *kwargs.values()))):
            try:
                return Expression.__torch_function__(function, types, args, kwargs)
            except TraceError as error:
                # Some operators of torch turn a TypeError into NotImplemented, and Python raises another one.
                self.graph.error = self.graph.error or error
                raise
        self.graph.reads = self.graph.reads or function not in _HARMLESS
        return function(*args, **kwargs)


def _flat(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(tuple(value))
        else:
            yield value


# Attributes and methods of a tensor that do not depend on its values.
_HARMLESS = (
    *(
        getattr(getattr(Tensor, name), "__get__", None)
        for name in ("dtype", "shape", "device", "is_cuda", "ndim")
    ),
    *(Tensor.dim, Tensor.size, Tensor.__len__, Tensor.numel, Tensor.is_complex),
)


def trace(
    function: Callable[..., Any],
    rows: Mapping[str, str],
    columns: Mapping[str, str],
    mask: Masking | None = None,
    ignore_index: int = -100,
) -> Traced:
    """Trace a function.

    rows, columns: names and kinds of the data of rows and of columns. mask: what leaves elements out:
    mask_mod; the sizes of its blocks, if their kinds (KINDS) decide; and whether rows have batches and heads.
    ignore_index: the label of rows that are left out.
    """
    names, at = arguments(function), definition(function)
    graph = Trace()
    given: dict[str, Expression | Payload | Vector] = {}
    for name in names:
        if name in rows or name in columns:
            of, kinds = ("row", rows) if name in rows else ("column", columns)
            if kinds[name] == "payload":
                given[name] = Payload(name, graph.constant(1.0))
            elif kinds[name].startswith(VECTOR):
                given[name] = Vector(name, int(kinds[name].removeprefix(VECTOR)))
            else:
                given[name] = graph.data(of, kinds[name], ("argument", name))
        elif name in ("score", "other"):
            given[name] = graph.leaf(name)
        elif name == "column":
            given[name] = graph.leaf("position")
        elif name in ROW_INDICES:
            given[name] = graph.data("row", "int64" if name == "label" else "number", (name,))
        else:
            listed = ", ".join(ARGUMENTS)
            raise TraceError(
                f"{function.__name__}({', '.join(names)}): arguments are among {listed} and the names of the "
                f"data in row= and column=; {name} is not",
                at,
            )
    result = run(graph, function, **given)
    labels = graph.sources["row_index"]
    ignored = (labels.index(("label",)), ignore_index) if "label" in names else None
    results = _checked(function, result, at)
    traced = _traced(graph, function.__name__, results, at, ignored)
    if mask is not None:
        mask_mod, block, has_heads = mask
        leading = [graph.data("row", "number", (of,)) if has_heads else graph.constant(0) for of in _LEADING]
        indices = (*leading, graph.data("row", "number", ("row",)), graph.leaf("position"))
        keep = kept_by(graph, mask_mod, indices, block)
        kept = {name: _of_kept(graph, keep, of) for name, of in results.items()}
        masked = _traced(graph, function.__name__, kept, at, ignored)
        traced = replace(masked, is_attention=traced.is_attention)
    living[traced.text] = traced
    return traced


_LEADING = ("batch", "head")


def _of_kept(graph: Trace, keep: Expression, statistic: stat.Statistic) -> stat.Statistic:
    """The statistic of the elements that are kept."""

    def where(number: int, otherwise: float | bool) -> int:
        return Expression(graph, number).where(keep, Expression(graph, number), otherwise).number

    kind, of, log_weight = statistic.kind, statistic.of, statistic.log_weight
    if log_weight is not None:
        log_weight = where(log_weight, -math.inf)  # which excludes the element
        of = log_weight if kind == "logsumexp" else of
    elif kind in ("total", "count"):
        of = where(of, False if kind == "count" else 0.0)
    else:
        of = where(of, -math.inf)  # of the negative values, if the smallest are wanted
    carried = None if statistic.carried is None else where(statistic.carried, -math.inf)
    return stat.Statistic(kind, of, log_weight, statistic.payload, statistic.k, carried)


def run(graph: Trace, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Run a user function on expressions of the graph; returns its result.

    Raises:
        TraceError: also in place of a TypeError or IndexError that Python raises.
    """
    within = _code_of(function)
    readers = [within, *Captures(within).others] if isinstance(within, types.FunctionType) else []
    for reader in readers:
        refuse_draws_of_numpy(reader, read_by(reader), names_in(reader.__code__))
    try:
        with stat.building(graph), _Watch(graph), Watched(reader.__code__ for reader in readers):
            return function(*args, **named)
    except TraceError:
        raise
    except (TypeError, IndexError) as error:
        of_numpy = "numpy's functions are of numbers and arrays: write torch's"
        reason = of_numpy if "__array_ufunc__" in str(error) else str(error)
        raise (graph.error or TraceError(reason, line_of(error) or definition(function))) from None


def called(name: str, function: Callable[..., Any], graph: Trace, arguments: Sequence[Expression]) -> Any:
    """What score_mod or mask_mod returns for an element. name: of the function, for errors."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function, such as one of torch
        return run(graph, function, *arguments)
    try:
        signature.bind(*arguments)
    except TypeError:
        names: Sequence[str] = OF_MODS
        names = names[1:] if name == "mask_mod" else names[: len(arguments)]
        wanted = f"a function ({', '.join(names)})"
        raise TraceError(mismatch(name, wanted, f"one {signature}"), definition(function)) from None
    return run(graph, function, *arguments)


def kept_by(
    graph: Trace,
    mask_mod: Callable[..., Any],
    indices: Sequence[Expression],
    block: tuple[int, int] | None,
) -> Expression:
    """Whether a mask keeps an element.

    indices: batch, head, query and key. block: queries and keys of a block, if kinds of blocks (KINDS) decide
    in which of them mask_mod applies.
    """
    keep = _condition(mask_mod, graph, called("mask_mod", mask_mod, graph, indices))
    if block is None:
        return keep
    batch, head, query, key = indices
    kind = graph.gather(KINDS, (batch, head, query // block[0], key // block[1]))
    return (kind == WHOLLY) | ((kind == PARTLY) & keep)


def _condition(function: Callable[..., Any], graph: Trace, value: Any) -> Expression:
    expected = "a condition, whether the element is kept"
    if not is_value(value) or graph.expression(value).kind != "bool":
        raise TraceError(f"it returned {named_value(value)}: expected {expected}", definition(function))
    return graph.expression(value)


def is_value(value: Any) -> bool:
    return isinstance(value, (Expression, int, float, Tensor)) or type(value).__module__ == "numpy"


def named_value(value: Any) -> str:
    return f"a value that is {value.kind}" if isinstance(value, Expression) else repr(value)


def _code_of(function: Any) -> Any:
    """The function behind a partial, a method or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        function = getattr(type(function), "__call__", function)  # noqa: B004
    return getattr(function, "__func__", function)


def _checked(function: Callable[..., Any], result: Any, at: tuple[str, int]) -> dict[str, stat.Statistic]:
    example = "a dict of statistics, as dict(lse=mr.stat.softmax(score).logsumexp)"
    if not isinstance(result, dict) or not result:
        raise TraceError(f"{function.__name__} returned {type(result).__name__}: expected {example}", at)
    for name, value in result.items():
        if not isinstance(value, stat.Statistic):
            given = f"{type(value).__name__}: expected {example}"
            if isinstance(value, stat.Softmax):
                given = "a softmax: expected its logsumexp or a mean"
            elif isinstance(value, Expression):
                given = "a value of one element, of which a row has many: expected mr.stat.total of it"
            raise TraceError(f"{function.__name__} returned {name} = {given}", at)
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name[0] == "_":
            raise TraceError(f"{function.__name__} returned {name!r}: expected names without a first _", at)
    return result


def _traced(
    graph: Trace,
    function: str,
    results: dict[str, stat.Statistic],
    defined: tuple[str, int],
    ignored: tuple[int, int] | None,
) -> Traced:
    """Build the program of the returned statistics. ignored: as in `Program`."""
    softmaxes: dict[int, list[int]] = {}
    totals: list[int] = []
    carrying = [*dict.fromkeys((s.of, s.carried) for s in results.values() if s.carried is not None)]
    largest = [of for of, _ in carrying]
    counts: list[int] = []
    weights: list[
        tuple[int | None, int]
    ] = []  # of payload sums: the log weight, or None for a total; the factor
    vectors: set[tuple[int, str]] = set()
    variances: list[tuple[int, int]] = []  # of each: log weight and number of the mean
    most: list[tuple[int, int]] = []
    entropies: list[int] = []  # their log weights

    def place(into: list[Any], number: Any) -> int:
        if number not in into:
            into.append(number)
        return into.index(number)

    places: dict[str, Any] = {}
    for name, statistic in results.items():
        number, weight = statistic.of, statistic.log_weight
        if statistic.payload is not None:
            if weight is not None:
                softmaxes.setdefault(weight, [])
            by = weight, number
            if by not in weights:
                weights.append(by)
            places[name] = weights.index(by), statistic.payload
            vectors.add(places[name])
        elif weight is not None:
            means = softmaxes.setdefault(weight, [])
            if statistic.kind == "entropy":
                places[name] = place(entropies, weight)
                continue
            places[name] = 0 if statistic.kind == "logsumexp" else 1 + place(means, number)
            if statistic.kind == "variance":
                places[name] = place(variances, (weight, places[name] - 1))
        elif statistic.k is not None:
            places[name] = place(most, (number, statistic.k))
        elif statistic.carried is not None:
            places[name] = carrying.index((number, statistic.carried))
        else:
            into = {"total": totals, "count": counts}.get(statistic.kind, largest)
            places[name] = place(into, number)
    first_of, rows = {}, 0
    for weight, means in softmaxes.items():
        first_of[weight] = rows
        rows += 1 + len(means)
    of_largest = rows + len(totals)
    of_carried = of_largest + len(largest)
    of_entropies = of_carried + len(carrying)
    outputs: dict[str, tuple[Any, ...]] = {}
    ordered = sorted(vectors)
    for name, statistic in results.items():
        at = places[name]
        if statistic.payload is not None:
            outputs[name] = ("payload", ordered.index(at))
        elif statistic.kind == "entropy":
            outputs[name] = ("value", of_entropies + at)
        elif statistic.kind == "variance":
            outputs[name] = ("value", of_entropies + len(entropies) + at)
        elif statistic.log_weight is not None:
            kind = "value" if statistic.kind == "mean" else "logsumexp"
            outputs[name] = (kind, first_of[statistic.log_weight] + at)
        elif statistic.kind == "total":
            outputs[name] = ("value", rows + at)
        elif statistic.kind == "count":
            outputs[name] = ("index", len(largest) + at)
        elif statistic.k is not None:
            before = sum(k for _, k in most[:at])
            of_values = of_entropies + len(entropies) + len(variances) + before
            outputs[name] = (statistic.kind, of_values, len(largest) + len(counts) + before, statistic.k)
        else:
            first = of_largest if statistic.carried is None else of_carried
            outputs[name] = (statistic.kind, first + at, at, None)
    nodes, numbered = tuple(graph.nodes), list(softmaxes)
    integers, own = graph.sources["row_index"], ("row",)
    program, kept = Program(
        nodes,
        tuple((weight, *means) for weight, means in softmaxes.items()),
        tuple(totals),
        tuple(largest),
        tuple(counts),
        tuple((-1 if weight is None else numbered.index(weight), factor) for weight, factor in weights),
        most=tuple(most),
        variances=tuple((numbered.index(weight), k) for weight, k in variances),
        ignored=ignored,
        own_row=integers.index(own) if own in integers else None,
        entropies=tuple(map(numbered.index, entropies)),
        carried=tuple(carried for _, carried in carrying),
    ).pruned()
    if not is_mean_alone(program):  # only attention's kernels read it
        program = replace(program, own_row=None)
    return Traced(
        program,
        program.text,
        program.scores,
        {kind: tuple(graph.sources[kind][k] for k in numbers) for kind, numbers in kept.items()},
        tuple(outputs.values()),
        result_name(function, tuple(outputs)),
        tuple(ordered),
        nodes,
        {kind: tuple(sources) for kind, sources in graph.sources.items()},
        is_attention(program),
        tuple(graph.tensors),
        tuple(_number_in(graph.tensors, t) for t in graph.in_tables),
        tuple(graph._by_both),
        graph.reads,
        defined,
    )


# Cache by function: (kinds of its data, ignore_index and mask of the last call, what the functions read, the
# trace).
_known: WeakKeyDictionary[Any, tuple[Any, list[Captures | None], Traced]] = WeakKeyDictionary()
Kinds = tuple[tuple[str, str], ...]  # (name, kind) of each datum


def traced_now(
    function: Any, rows: Kinds, columns: Kinds, ignore_index: int, mask: Masking | None = None
) -> Traced:
    """`trace`, cached as long as the functions read the same values as the last time.

    This library's own functions (as_statistics.py) always do.
    """
    functions, of = [function] if mask is None else [function, mask[0]], (rows, columns, ignore_index, mask)
    last = _known.get(function)
    if last is not None:
        before, read, traced = last
        pairs = zip(read, functions, strict=False)
        if not traced.reads and before == of and all(c is None or c.hold(each) for c, each in pairs):
            return traced
    ours = str(getattr(function, "__module__", None)).startswith("monoidreduce.")
    captures = [
        None if ours and each is function else Captures(each)
        for each in functions
        if hasattr(each, "__code__")
    ]
    traced = trace(function, dict(rows), dict(columns), mask, ignore_index)
    # If they are not complete, captures may hold an object that holds the function, and leak.
    if len(captures) == len(functions) and all(each is None or each.complete for each in captures):
        _known[function] = of, captures, traced
    return traced


def traced_in_graph(
    function: Any,
    rows: Kinds,
    columns: Kinds,
    ignore_index: int,
    mask_mod: Any = None,
    block: tuple[int, int] | None = None,
    has_heads: bool = False,
) -> tuple[Traced | None, tuple[int, ...], tuple[Any, ...]]:
    """`traced_now` while torch.compile traces, with a guard on the graph, and the function's captures.

    The first result is None if the function cannot be part of a graph. The second has, for each captured
    tensor, its place among STAND_INS, or -1. Captures are tensors, and numbers that changed from call to
    call.
    """
    captured: tuple[Any, ...] = ()
    at_compile_time(_read_in_graph)  # assigns `captured`
    traced, which = found()
    return traced, which, captured


def _read_in_graph(context: Any) -> None:
    names = ("function", "rows", "columns", "ignore_index", "mask_mod", "block", "has_heads")
    read(context, names, _with_key, STAND_INS)


def _with_key(
    function: Any,
    rows: Kinds,
    columns: Kinds,
    ignore_index: int,
    mask_mod: Any,
    block: tuple[int, int] | None,
    has_heads: bool,
) -> tuple[Traced, Any, tuple[Tensor, ...]]:
    mask = None if mask_mod is None else (mask_mod, block, has_heads)
    traced = traced_now(function, rows, columns, ignore_index, mask)
    # Traces with equal keys give the same graph: same program, results and sources of data.
    key = (
        traced.text,
        traced.outputs,
        traced.result,
        traced.payloads,
        dict(traced.sources),
        dict(traced.gathered),
        traced.nodes,
        traced.is_attention,
        traced.in_tables,
        traced.by_both,
    )
    return replace(traced, tensors=()), key, traced.tensors  # the graph must not keep tensors alive
