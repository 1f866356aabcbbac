"""Tracing of score_mod and mask_mod, which have FlexAttention's signatures, to a program.

A softcap, a bias and dropout beside them are parts of the program.

A function sees one element: `score_mod(score, batch, head, q_idx, kv_idx)` returns its new score, and
`mask_mod(batch, head, q_idx, kv_idx)` whether it is kept. Captured tensors are concatenated to two tables, of
reals and of integers, from which the program gathers. The offset of each tensor in its table, and its sizes,
are arguments of the call, so that they are not compiled into the kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from operator import and_
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from monoidreduce._dynamo import at_compile_time, found, read
from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._validate import mismatch
from monoidreduce.folds.program.arguments import definition
from monoidreduce.folds.program.captures import Captures, described
from monoidreduce.folds.program.errors import TraceError
from monoidreduce.folds.program.graph import Expression, Graph, Node
from monoidreduce.folds.program.integers import MOST
from monoidreduce.folds.program.operations import LEAVES
from monoidreduce.folds.program.program import Program, parse, reachable
from monoidreduce.folds.program.sequences import in_sequences
from monoidreduce.folds.program.tracing import (
    KINDS,
    OF_MODS,
    Trace,
    called,
    is_value,
    kept_by,
    named_value,
)
from monoidreduce.folds.torch.reader import evaluate

__all__ = [
    "ALONE",
    "LINES",
    "STAND_INS",
    "Beside",
    "Mods",
    "kept_elements",
    "learned",
    "mods_in_graph",
    "mods_of",
    "tables",
]

INDICES = ("batch", "head", "query", "position")
# Stand-ins for tensors of a call, beside BlockMask.kinds: `line_numbers` of packed sequences.
LINES = torch.zeros(1, 4, dtype=torch.int64)
# The bias, [B, H, M, N] or 1 in place of a size, and the seed of dropout.
BIAS, BOOL_BIAS, SEED = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1, dtype=torch.bool), torch.tensor(0)
STAND_INS = (KINDS, LINES, BIAS, BOOL_BIAS, SEED)
_HEADS = -1  # stands for the number of the size that is the number of heads
Mod = Callable[..., Any]
# Options of a call that are part of its program: the softcap, or 0; the kind of the bias, "real", "bool" or
# ""; and the probability of dropout. If torch.compile made a number an input of the graph, it is a tensor.
# Not a NamedTuple, which `_dynamo.read` does not open.
Beside = tuple[float, str, float]
ALONE: Beside = (0.0, "", 0.0)


@dataclass(frozen=True)
class Mods:
    """The traced functions of a call.

    text: text of the program; its first total is the score, its count whether the element is kept. With
        dropout a second total is the factor of the element's weight.
    tensors: the captured tensors.
    by_both: for each captured tensor that is indexed by query and key together, the number of its first size;
        else None.
    reads: whether torch computed something from tensors only while tracing, so that the trace cannot be
    reused.
    counts_heads: whether the number of heads is one more size of the call.
    """

    text: str
    tensors: tuple[Tensor, ...]
    by_both: tuple[int | None, ...]
    reads: bool
    counts_heads: bool


class _Trace(Trace):
    """A graph in which captured tensors are parts of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.by_both: dict[int, int] = {}

    def expression(self, value: Any) -> Expression:
        if isinstance(value, Tensor):
            if value.dim() == 0:
                return self.gather(value, ())
            raise TraceError(
                f"a tensor of shape {list(value.shape)} inside an element's function: "
                "index it with the function's batch, head, q_idx and kv_idx"
            )
        return super().expression(value)

    def gather(self, tensor: Tensor, indices: tuple[Any, ...]) -> Expression:
        if len(indices) != tensor.dim():
            raise TraceError(
                f"a tensor of shape {list(tensor.shape)} indexed by {len(indices)} of {tensor.dim()} axes"
            )
        number, first = self.place(tensor)
        given = [self.expression(index) for index in indices]
        for index in given:
            if index.kind != "index":
                raise TraceError(f"an index: expected an integer, got a value that is {index.kind}")
        names = {self.nodes[i][0] for i in reachable(self.nodes, [index.number for index in given])}
        if "score" in names:
            raise TraceError("an index that depends on the score: index by batch, head, q_idx and kv_idx")
        if {"query", "position"} <= names:
            self.by_both[number] = first
        return self.entry(tensor, given)

    def uniform(self, seed: Any) -> Expression:
        """The random number of an element (`stat.uniform`); its row has the indices [batch, head, query].

        A seed that is an int becomes a constant of the program.
        """
        return self._of_query("uniform", seed)

    def uniform_16(self, seed: Any) -> Expression:
        """A whole number of 16 bits of an element, by the generator of `uniform`."""
        return self._of_query("uniform_16", seed)

    def _of_query(self, name: str, seed: Any) -> Expression:
        batch, head, query = (self.leaf(index) for index in INDICES[:3])
        return self._drawn(name, seed, batch * self.leaf("size", _HEADS) + head, query)

    def _number(self, value: int) -> Expression:
        return self.constant(value)


def trace_mods(
    score_mod: Mod | None,
    mask_mod: Mod | None,
    block: tuple[int, int] | None = None,
    weights: bool = False,
    packed: bool = False,
    beside: Beside = ALONE,
) -> Mods:
    """Trace the program of a call. A function that is None leaves scores unchanged, or keeps all elements.

    block: (queries, keys) of a block, if block kinds (KINDS) decide in which blocks mask_mod applies.
    weights: score_mod is `weight` of `attend`, a function of the score, or of what it names.
    packed: for packed sequences.
    """
    graph = _Trace()
    indices = [graph.leaf(name) for name in INDICES]
    score, keeps = graph.leaf("score"), []
    softcap, bias, dropout_p = beside
    if isinstance(softcap, Tensor) or softcap:
        score = graph.apply("tanh", score / softcap) * softcap
    if score_mod is not None:
        name, given = "score_mod", (score, *indices)
        if weights:
            name, given = "weight", _named_by_weight(score_mod, given)
        score = _score(score_mod, graph, called(name, score_mod, graph, given))
    if mask_mod is not None:
        keeps.append(kept_by(graph, mask_mod, indices, block))
    if bias == "real":
        score = score + graph.gather(BIAS, tuple(indices))  # an axis of size 1 has any index (`within`)
    elif bias == "bool":
        keeps.append(graph.gather(BOOL_BIAS, tuple(indices)))
    kept = [reduce(and_, keeps).number] if keeps else []
    lines = graph.place(LINES)[1] if packed else None
    totals = [score.number]
    if isinstance(dropout_p, Tensor) or dropout_p != 0:
        totals.append(_kept_of_dropout(graph, dropout_p).number)
    # The number of heads comes behind the sizes of captured tensors, which are all known now.
    heads = "size", _HEADS
    nodes = tuple(("size", graph.sizes) if node == heads else node for node in graph.nodes)
    program = Program(nodes, totals=tuple(totals), counts=tuple(kept))
    if lines is not None:
        program = in_sequences(program, lines)
    program, _ = program.pruned()
    by_both = tuple(graph.by_both.get(number) for number in range(len(graph.in_tables)))
    return Mods(program.text, tuple(graph.in_tables), by_both, graph.reads, nodes != tuple(graph.nodes))


def _kept_of_dropout(graph: _Trace, p: Any) -> Expression:
    """The factor of an element's weight: 0 with probability p, otherwise 1 / (1 - p).

    p is rounded to a multiple of 2^-16, as numbers of 16 bits decide; 1 to the one below, so that no factor
    is infinite.
    """
    number, dropped = graph.uniform_16(SEED), graph.expression(p) * 65536.0
    dropped = graph.apply("minimum", graph.apply("round", dropped), graph.constant(65535.0))
    return number.where(number < dropped, 0.0, 65536.0 / (65536.0 - dropped))


def _named_by_weight(weight: Mod, given: tuple[Expression, ...]) -> tuple[Expression, ...]:
    """What `weight` of `attend` is called with: the score, or each of its arguments by name.

    given: the score, batch, head, query and key.
    """
    try:
        signature = inspect.signature(weight)
    except ValueError:  # a built-in function, such as one of torch
        return given[:1]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind in kinds]
    if len(wanted) <= 1:  # of any name
        return given[:1]
    if not set(wanted) <= set(OF_MODS):
        expected = f"a function of the score, or of arguments among {', '.join(OF_MODS)}"
        raise TraceError(mismatch("weight", expected, f"one {signature}"), definition(weight))
    return tuple(given[OF_MODS.index(name)] for name in wanted)


def _score(function: Mod, graph: Trace, value: Any) -> Expression:
    expected = "a number, the new score"
    if not is_value(value) or graph.expression(value).kind == "bool":
        raise TraceError(f"it returned {named_value(value)}: expected {expected}", definition(function))
    return graph.real(value)


def tables(
    tensors: Sequence[Tensor],
    like: Tensor,
    functions: tuple[Any, ...],
    counts: Sequence[int] = (),
    scores: int = 1,
) -> tuple[Tensor | None, Tensor | None, list[int]]:
    """The table of reals, the table of integers, and for each captured tensor its offset and its sizes.

    Args:
        tensors: the captured tensors of this call.
        like: tensor that determines the device and, by its accumulation dtype, the dtype of the table of
            reals.
        functions: the functions that captured the tensors, for errors.
        counts: more sizes of the call.
        scores: 0 if the call has no scores, so that captured tensors may be empty: nothing reads them.

    Raises:
        ValueError: a tensor is on another device, or empty though there are scores, or together they are too
            large to index.
    """
    reals: list[Tensor] = []
    integers: list[Tensor] = []
    sizes: list[int] = []
    for tensor in tensors:
        tensor = tensor.to(like.device) if like.is_meta else tensor  # values are not used on meta
        into = reals if tensor.is_floating_point() else integers
        if tensor.device != like.device:
            named = described(tensor, *(f for f in functions if f is not None))
            raise ValueError(mismatch(named, f"a tensor on {like.device} as q", tensor.device))
        if not tensor.numel():
            if scores:
                named = described(tensor, *(f for f in functions if f is not None))
                raise ValueError(mismatch(named, "a tensor with elements", "none"))
            # Programs have sizes of at least 1, so a zero stands in for it: the sum of no elements, through
            # which the empty tensor gets its empty gradient.
            tensor = tensor.sum().to(tensor.dtype).expand([max(size, 1) for size in tensor.shape])
        first = sum(t.numel() for t in into)
        if first + tensor.numel() > MOST:
            raise ValueError(mismatch("captured tensors", f"at most {MOST} numbers", first + tensor.numel()))
        sizes += [first, *tensor.shape]
        into.append(tensor)
    sizes += counts
    dtype = accumulation_dtype(like.dtype)
    return _joined(reals, dtype), _joined(integers, torch.int64), sizes


def learned(text: str, by_both: Sequence[int | None], tensors: Sequence[Tensor]) -> str:
    """The program, in which tensors that need no gradient are constants if they are indexed by both.

    A gradient of such a tensor costs more than all others, and the table of reals has one if any tensor has.

    by_both: as in `Mods`, for each of the tensors.
    """
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return text
    pairs = zip(tensors, by_both, strict=True)
    constant = tuple(first for t, first in pairs if first is not None and not t.requires_grad)
    return _with_constants(text, constant) if constant else text


@lru_cache(256)
def _with_constants(text: str, tensors: tuple[int, ...]) -> str:
    """The program with the tensors detached that have these numbers of their first sizes."""
    program = parse(text)
    graph, of = Graph(), list[Expression]()
    for node in program.nodes:
        name, *rest = node
        made = graph.leaf(*node) if name in LEAVES else graph.raw(name, *(of[i] for i in rest))
        if name == "gather":
            _, size, _ = program.nodes[rest[0]]
            if program.nodes[size][1] in tensors:
                made = graph.raw("detach", made)
        of.append(made)
    return program.with_nodes(graph.nodes, lambda number: of[number].number).text


def _joined(tensors: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    flat = [tensor.reshape(-1).to(dtype) for tensor in tensors]
    if len(flat) > 1:
        return torch.cat(flat)
    return flat[0].contiguous() if flat else None


def kept_elements(
    mask_mod: Mod, device: torch.device | str | None
) -> Callable[[int, int, range, int], Tensor]:
    """A function (batches, heads, range of queries, keys) -> bool [B, H, queries, keys], True if kept."""
    mods = mods_of(None, mask_mod)
    if mods.counts_heads:
        raise TraceError(
            "mr.stat.uniform in a block mask, whose blocks may stand for all heads: pass it in mask_mod=",
            definition(mask_mod),
        )
    on = mods.tensors[0].device if device is None and mods.tensors else device
    like = torch.empty(0, dtype=torch.float64, device=on)
    *of_table, sizes = tables(mods.tensors, like, (mask_mod,))
    program = parse(mods.text)

    def kept(batch: int, heads: int, rows: range, columns: int) -> Tensor:
        def numbers(first: int, count: int, axis: int) -> Tensor:
            shape = [1] * 4
            shape[axis] = count
            return torch.arange(first, first + count, device=like.device).view(shape)

        of_leaf = {
            "batch": numbers(0, batch, 0),
            "head": numbers(0, heads, 1),
            "query": numbers(rows.start, len(rows), 2),
            "position": numbers(0, columns, 3),
            "gather": of_table[0],
            "index_gather": of_table[1],
        }

        def leaf(node: Node) -> Any:
            return torch.tensor(sizes[node[1]], device=like.device) if node[0] == "size" else of_leaf[node[0]]

        found = evaluate(program.nodes, program.counts, leaf, like)[program.counts[0]]
        return found.expand(batch, heads, len(rows), columns)

    return kept


# Cache by the first function of a call: (the other arguments, what both functions read, the result).
_known: WeakKeyDictionary[Mod, tuple[Any, list[Captures], Mods]] = WeakKeyDictionary()


def mods_of(
    score_mod: Mod | None,
    mask_mod: Mod | None,
    block: tuple[int, int] | None = None,
    weights: bool = False,
    packed: bool = False,
    beside: Beside = ALONE,
) -> Mods:
    """`trace_mods`, cached as long as the functions read the same values as the last time."""
    functions = [f for f in (score_mod, mask_mod) if f is not None]
    if not functions:
        return _without_functions(beside)
    if not all(isinstance(function, FunctionType) for function in functions):
        return trace_mods(score_mod, mask_mod, block, weights, packed, beside)
    # The first function is a weak key, so the value must not keep it alive.
    by = (score_mod is None, mask_mod if score_mod is not None else None, block, weights, packed, beside)
    last = _known.get(functions[0])
    if last is not None:
        others, read, mods = last
        held = (captures.hold(function) for captures, function in zip(read, functions, strict=True))
        if others == by and not mods.reads and all(held):
            return mods
    captures = [Captures(function) for function in functions]
    mods = trace_mods(score_mod, mask_mod, block, weights, packed, beside)
    if all(each.complete for each in captures):  # otherwise captures may hold an object that holds the key
        _known[functions[0]] = (by, captures, mods)
    return mods


@lru_cache(64)
def _without_functions(beside: Beside) -> Mods:
    """For packed sequences too: the kernels mask them."""
    return trace_mods(None, None, beside=beside)


def mods_in_graph(
    score_mod: Mod | None,
    mask_mod: Mod | None,
    block: tuple[int, int] | None,
    weights: bool,
    packed: bool,
    beside: Beside,
) -> tuple[Mods | None, tuple[int, ...], tuple[Any, ...]]:
    """`mods_of` while torch.compile traces; the graph gets a guard that the result stays the same.

    Returns:
        The traced functions, or None if they cannot be part of a graph; for each captured tensor its index in
        STAND_INS or -1; and the captured tensors and numbers as graph values.
    """
    captured: tuple[Any, ...] = ()
    at_compile_time(_read_in_graph)  # assigns `captured`
    mods, which = found()
    return mods, which, captured


def _read_in_graph(context: Any) -> None:
    names = ("score_mod", "mask_mod", "block", "weights", "packed", "beside")
    read(context, names, _with_key, STAND_INS)


def _with_key(*given: Any) -> tuple[Mods, Mods, tuple[Tensor, ...]]:
    mods = mods_of(*given)
    without = replace(mods, tensors=())  # the graph would keep them alive
    return without, without, mods.tensors
