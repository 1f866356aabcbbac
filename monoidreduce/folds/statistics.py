"""`statistics`: folds that a user writes as a Python function of one element."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from monoidreduce import _yards
from monoidreduce._dynamo import as_input, outside_of_graphs
from monoidreduce._keywords import refuse
from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._ops.registry import call_op
from monoidreduce._results import RESULTS
from monoidreduce._validate import check_axes, check_factor, check_like, check_tensor, mismatch
from monoidreduce.explanation import Explanation
from monoidreduce.folds.explain import explain_fold
from monoidreduce.folds.program.arguments import ARGUMENTS, arguments, kind_of
from monoidreduce.folds.program.errors import TraceError
from monoidreduce.folds.program.payloads import is_attention
from monoidreduce.folds.program.tracing import Source, Traced, described, traced_in_graph, traced_now
from monoidreduce.folds.stat import Extremum
from monoidreduce.folds.statistics_op import leave_out, obstacle
from monoidreduce.folds.torch import reader
from monoidreduce.folds.torch.reader import evaluate
from monoidreduce.functional import (
    INTEGERS,
    _like_rows,
    _operands,
    _per_row,
    _rows,
    attention,
    check_index,
    workspace_bytes,
)

if TYPE_CHECKING:
    from monoidreduce.ranks import RanksOrGroup

__all__ = ["Statistics", "statistics"]


def statistics(function: Callable[..., dict[str, Any]]) -> Statistics:
    """Decorator for a function of one element; the result folds it over all columns of each row in one pass.

        @mr.statistics
        def token_stats(score, column, label):
            p = mr.stat.softmax(score)
            target = mr.stat.total(torch.where(column == label, score, 0.0))
            return dict(lse=p.logsumexp, mean=p.mean(score), target=target, best=mr.stat.largest(score))

        s = token_stats(hidden, head_weight, label=tokens)  # a NamedTuple of [...] tensors

    The function is traced once, not called for each element: it sees one score, and returns a dict of
    statistics of `monoidreduce.stat`. Its gradient is derived automatically. A number that it reads becomes a
    constant. A tensor that it reads is data; it must be indexed by `row`, `label`, `head` and `batch`, or by
    `column`. See docs/statistics.md.

    Args:
        function: its arguments may be score, other, row, column, label, head, batch, and names of data that a
            call passes.

    Raises:
        TypeError: it is not a Python function.
    """
    return Statistics(function)


class Statistics:
    """The result of the decorator `statistics`; see there."""

    def __init__(self, function: Callable[..., dict[str, Any]]) -> None:
        if not hasattr(function, "__code__"):
            raise TypeError(mismatch("function", "a Python function", repr(function)))
        functools.update_wrapper(self, function)
        self._function = function
        self._names = arguments(function)
        self.__doc__ = "\n\n".join(filter(None, (function.__doc__, type(self).__call__.__doc__)))
        self.__signature__ = _signature_of_calls()

    def __get__(self, instance: Any, owner: Any = None) -> Statistics:
        """As a class attribute it does not bind. help() shows objects with this method as functions."""
        return self

    def __repr__(self) -> str:
        return f"<statistics {self._function.__qualname__}>"

    def __reduce__(self) -> str:
        """Copy and pickle by name, like a function."""
        return self._function.__qualname__

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        other_a: Tensor | None = None,
        other_b: Tensor | None = None,
        *heads: Tensor,
        label: Tensor | None = None,
        ignore_index: int = -100,
        row: Mapping[str, Tensor] | None = None,
        column: Mapping[str, Tensor] | None = None,
        scale: float = 1.0,
        workspace: int | None = None,
        ranks: RanksOrGroup | None = None,
        **others: Any,
    ) -> Any:
        """The statistics of the scores scale * a @ b^T, without storing the scores.

        Args:
            a: [..., D], one row per result.
            b: [V, D], the columns, which are folded.
            other_a, other_b: [..., E] and [V, E]; the argument `other` is scale * other_a @ other_b^T.
            label: [...] integers, for the argument `label`. A row with label ignore_index is an empty fold:
                its statistics are those without columns, and it gets no gradients, even if it holds NaN. Any
                other label outside [0, V) equals no column. A label that indexes a captured tensor follows
                torch: negative values count from the end, others out of range are errors.
            ignore_index: the label of ignored rows.
            row: data of rows by name, each [...].
            column: data of columns by name, each [V]; or a payload [V, E], a vector for each column, of which
                the function returns means and totals (`p.mean(v)`, `total(w * v)`).
            scale: factor of the scores.
            workspace: bytes for local gradients on a GPU; `get_workspace()` by default.
            ranks: b, other_b and data of columns are this rank's shard of the columns. Uses the options
                classes, sequence_parallel and grad_dtype of `Ranks`. Labels, the argument column and returned
                indices count the columns of all ranks. Rows of several ranks are joined along the first axis.

        Returns:
            A NamedTuple with the names that the function returned. Log-sum-exps, means and totals are [...]
            in the accumulation dtype, and differentiable in all floating-point tensors. Those of a payload
            are [..., E], and in the dtype of a if the payload is. `largest` and `smallest` are
            `stat.Extremum` with value and index; counts are int64.

        Raises:
            TraceError: the function does something that kernels cannot do.
            TypeError, ValueError: an argument is not as above.
        """
        if heads:
            expected = (
                "a, b and at most other_a, other_b, as a function sees two scores (write two functions)"
            )
            raise TypeError(mismatch("operands", expected, f"{4 + len(heads)} tensors"))
        if others:
            refuse(self.__name__, others, "statistics")  # type: ignore[attr-defined]
        if ranks is not None:
            data = (label, ignore_index, row or {}, column or {}, scale, workspace)
            return _yards.ranks().statistics_over_ranks(self, (a, b, other_a, other_b), *data, ranks)
        call = _Call(self, a, b, other_a, other_b, label, ignore_index, row or {}, column or {}, scale)
        traced, values, _, indices, sums = self._folded(call, workspace)
        return call.named(traced, values, indices, sums)

    def _in_two_words(
        self,
        a: Tensor,
        b: Tensor,
        other_a: Tensor | None = None,
        other_b: Tensor | None = None,
        *,
        row: Mapping[str, Tensor],
        column: Mapping[str, Tensor],
    ) -> tuple[Any, Any]:
        """The two words of the log-sum-exps, for a function that returns nothing else."""
        call = _Call(self, a, b, other_a, other_b, None, -100, row, column, 1.0)
        traced, values, low, indices, sums = self._folded(call, None)
        return call.named(traced, values, indices, sums), call.named(traced, low, indices, sums)

    def _by_folds(
        self, a: Tensor, b: Tensor, *, row: Mapping[str, Tensor], column: Mapping[str, Tensor], scale: float
    ) -> Any:
        """A call that runs folds also where the kernels of attention would do."""
        call = _Call(self, a, b, None, None, None, -100, row, column, scale)
        traced, values, _, indices, sums = self._folded(call, None, by_attention=False)
        return call.named(traced, values, indices, sums)

    def _folded(
        self, call: _Call, workspace: int | None, by_attention: bool = True
    ) -> tuple[Traced, Tensor, Tensor, Tensor, Tensor]:
        """Run the op: values [values, rows], low words of the log-sum-exps, indices, and payload sums."""
        traced, tensors = self._traced(call)
        if traced is None:
            folded: Any = outside_of_graphs(self._folded, call, workspace)
            return folded  # type: ignore[no-any-return]
        if call.a.is_cpu and not torch.compiler.is_compiling():
            self._check_fits(call, traced, tensors)
        payload, widths = call.payload_of(traced)
        if by_attention and payload is not None and call.is_attention(traced, payload):
            q, k, v = (t[None, None] for t in (call.a, call.b, payload))
            out, lse = attention(q, k, v, scale=call.scale, return_lse=True)
            return (
                traced,
                lse[0],
                lse.new_zeros(()),
                call.a.new_empty(0, len(call.a), dtype=torch.int64),
                out[0, 0],
            )
        row, column, *integers = call.data_of(traced, tensors)
        values, sums, low, indices = call_op(
            "statistics",
            *call.operands_of(traced),
            row,
            column,
            payload,
            *integers,
            traced.text,
            widths,
            call.scale,
            workspace_bytes(workspace),
        )
        return traced, values, low, indices, sums

    def _check_fits(self, call: _Call, traced: Traced, tensors: tuple[Tensor, ...]) -> None:
        """Raise TraceError if the CPU engine cannot run forward, or backward if one may follow."""
        sources = traced.sources
        counts = [len(sources[kind]) for kind in ("row", "row_index", "column", "column_index")]
        given = (*call.operands, *call.row.values(), *call.column.values(), *tensors)
        gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
        if why := obstacle(traced.text, tuple(counts), gradient):
            of = ", ".join(getattr(RESULTS, traced.result)._fields)
            raise TraceError(f"{self._function.__name__}, which returns {of}: {why}", traced.at)

    def reference(
        self,
        a: Tensor,
        b: Tensor,
        other_a: Tensor | None = None,
        other_b: Tensor | None = None,
        *,
        label: Tensor | None = None,
        ignore_index: int = -100,
        row: Mapping[str, Tensor] | None = None,
        column: Mapping[str, Tensor] | None = None,
        scale: float = 1.0,
    ) -> Any:
        """The same statistics by plain torch, with all scores stored, in the accumulation dtype."""
        call = _Call(self, a, b, other_a, other_b, label, ignore_index, row or {}, column or {}, scale)
        traced, tensors = self._traced(call)
        of_rows, of_columns, row_index, column_index = call.data_of(traced, tensors)
        dtype = accumulation_dtype(call.a.dtype)
        # Ignored rows are left out, because their gradients in torch could be 0 * NaN.
        rows = len(call.a)
        counted = torch.arange(rows) if call.ignored is None else (~call.ignored).nonzero()[:, 0]
        counted = counted.to(call.a.device)
        first, second = (None if t is None else t[counted] for t in (call.a, call.operands[2]))

        def scores(rows: Tensor, columns: Tensor) -> Tensor:
            return reader.scores(rows, columns, dtype, call.scale)

        def leaf(node: tuple[Any, ...]) -> Any:
            name, *number = node
            if name == "other":
                assert second is not None
                return scores(second, call.operands[3])
            data = {
                "row": of_rows,
                "column": of_columns,
                "row_index": row_index,
                "column_index": column_index,
            }
            vector = data[name][number[0]]
            return vector[counted][:, None] if name in ("row", "row_index") else vector

        assert first is not None
        payload, widths = call.payload_of(traced)
        vectors = [] if payload is None else torch.split(payload.to(dtype), widths, 1)
        *found, sums = reader.statistics(traced.program, scores(first, call.b), leaf, vectors)
        values, indices = (t.new_zeros(len(t), rows).index_copy(1, counted, t) for t in found)
        sums = sums.new_zeros(rows, sum(widths)).index_copy(0, counted, sums)
        if call.ignored is not None:
            leave_out(traced.program, call.ignored, values, sums, indices)
        return call.named(traced, values, indices, sums)

    def explain(
        self,
        a: Tensor,
        b: Tensor,
        other_a: Tensor | None = None,
        other_b: Tensor | None = None,
        *,
        label: Tensor | None = None,
        ignore_index: int = -100,
        row: Mapping[str, Tensor] | None = None,
        column: Mapping[str, Tensor] | None = None,
        scale: float = 1.0,
        workspace: int | None = None,
    ) -> Explanation:
        """The kernels that a call would run, and why. Nothing is computed, and no label is needed.

        Raises TraceError, TypeError and ValueError as the call would.
        """
        call: dict[str, Any] = {
            "a": a,
            "b": b,
            "other_a": other_a,
            "other_b": other_b,
            "label": label,
            "row": row,
        }
        call |= {
            "row": row,
            "column": column,
            "ignore_index": ignore_index,
            "scale": scale,
            "workspace": workspace,
        }
        return explain_fold(self, call)

    def _traced(self, call: _Call) -> tuple[Any, tuple[Tensor, ...]]:
        """The traced function for a call, and the tensors that it captured.

        The first is None if torch.compile traces and the function cannot be part of a graph.
        """
        if torch.compiler.is_dynamo_compiling():
            traced, captured = traced_in_graph(self._function, *call.kinds)
            return traced, tuple([as_input(value, call.a) for value in captured])
        traced = traced_now(self._function, *call.kinds)
        return traced, traced.tensors


@functools.lru_cache(1)
def _signature_of_calls() -> inspect.Signature:
    """The signature of a call, without self and the catch-all parameters that only raise errors."""
    signature = inspect.signature(Statistics.__call__)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    _, *given = signature.parameters.values()
    listed = [parameter for parameter in given if parameter.kind not in variable]
    return signature.replace(parameters=listed)


def checked_operands(a: Tensor, b: Tensor, other_a: Tensor | None, other_b: Tensor | None) -> tuple[Any, ...]:
    """Check the operands of a fold: a [..., D] -> [rows, D], b [V, D], and those of a second score."""
    shape = check_tensor("a", a).shape
    a, b, other_a, other_b = _operands(("other_a", "other_b"), a=a, b=b, other_a=other_a, other_b=other_b)
    sizes: dict[Any, Any] = {}
    rows = _rows("a", a, "D")
    check_axes("a", rows, ("rows", "D"), sizes, a)
    check_axes("b", b, ("V", "D"), sizes)
    if other_a is None or other_b is None:
        return rows, b, None, None
    if other_a.shape[:-1] != shape[:-1]:
        expected = f"the leading axes of a, as a is {list(shape)}"
        raise ValueError(mismatch("other_a", expected, list(other_a.shape)))
    other = _rows("other_a", other_a, "E")
    check_axes("other_a", other, ("rows", "E"), sizes, other_a)
    check_axes("other_b", other_b, ("V", "E"), sizes)
    return rows, b, other, other_b


def checked_label(label: Tensor, a: Tensor) -> Tensor:
    """Check a label with the leading axes of a: [...] integers -> [rows] int64."""
    check_tensor("label", label)
    _check_integers("label", label)
    return torch.Tensor.long(_per_row("label", label, a, "a"))


def _is_payload(datum: Tensor) -> bool:
    """Whether a datum of columns has a vector for each column."""
    return datum.dim() == 2 and datum.dtype.is_floating_point


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in INTEGERS or tensor.dtype == torch.uint64:
        instead = "an integer dtype that int64 holds"
        instead += "; write t.to(torch.int64)" if tensor.dtype == torch.uint64 else ""
        raise TypeError(mismatch(name, instead, tensor.dtype))


class _Call:
    """The checked arguments of a call."""

    def __init__(
        self,
        of: Statistics,
        a: Tensor,
        b: Tensor,
        other_a: Tensor | None,
        other_b: Tensor | None,
        label: Tensor | None,
        ignore_index: int,
        row: Mapping[str, Tensor],
        column: Mapping[str, Tensor],
        scale: float,
        first_column: int = 0,
    ) -> None:
        self.of, names = of, of._names
        self.given, self.first_column = a, first_column
        if ("other" in names) != (other_a is not None) or (other_a is None) != (other_b is None):
            expected = (
                "two tensors, for the argument other" if "other" in names else "none: no argument is other"
            )
            given = " and ".join("none" if t is None else "a tensor" for t in (other_a, other_b))
            raise ValueError(mismatch("other_a, other_b", expected, given))
        self.operands: tuple[Any, ...] = checked_operands(a, b, other_a, other_b)
        self.scale = check_factor("scale", scale)
        self.label, self.ignored = self._label(label, ignore_index, "label" in names)
        self.a, self.b = self.operands[:2]
        self.row = {name: self._datum("row", name, t, a.shape[:-1]) for name, t in row.items()}
        self.column = {name: self._datum("column", name, t, b.shape[:1]) for name, t in column.items()}
        for which, data in (("row", self.row), ("column", self.column)):
            for name in data:
                if name in ARGUMENTS or name not in names or (which == "column" and name in self.row):
                    listed = ", ".join(name for name in names if name not in ARGUMENTS) or "there are none"
                    raise ValueError(mismatch(which, f"names of arguments ({listed}), once", repr(name)))
        if a.dim() != 4 and ("head" in names or "batch" in names):
            expected = "shape [batch, heads, rows, D], for the arguments head and batch"
            raise ValueError(mismatch("a", expected, list(a.shape)))

    def _label(
        self, label: Tensor | None, ignore_index: int, wanted: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """(labels [rows] int64, mask of ignored rows); None without a label."""
        if (label is not None) != wanted:
            expected = "a tensor, for the argument label" if wanted else "none: no argument is label"
            raise ValueError(mismatch("label", expected, "none" if label is None else "a tensor"))
        ignore_index = check_index("ignore_index", ignore_index)
        if label is None:
            return None, None
        labels = checked_label(label, self.given)
        return labels, labels == ignore_index

    def _datum(self, which: str, name: str, tensor: Tensor, shape: Any) -> Tensor:
        named = f"{which}[{name!r}]"
        check_tensor(named, tensor)
        if tensor.dtype.is_floating_point:
            check_like(named, tensor, "a", self.a, (tensor.dtype,))
        elif tensor.dtype != torch.bool:
            _check_integers(named, tensor)
        if which == "column" and _is_payload(tensor) and tensor.shape[:1] == shape:
            if self.scale == 0:
                raise ValueError(
                    mismatch("scale", f"a factor other than 0 beside the payload {named}", self.scale)
                )
            return tensor
        if tensor.shape != shape:
            expected = f"shape {list(shape)}"
            expected += f", or [{shape[0]}, E] of floating-point numbers" if which == "column" else ""
            raise ValueError(mismatch(named, expected, list(tensor.shape)))
        return tensor.reshape(-1)

    @property
    def kinds(self) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
        """The names and kinds of the data of rows and of columns."""
        rows = tuple([(name, kind_of(t)) for name, t in self.row.items()])
        columns = [(name, "payload" if _is_payload(t) else kind_of(t)) for name, t in self.column.items()]
        return rows, tuple(columns)

    @property
    def positions(self) -> Tensor:
        """[V] the indices of the columns."""
        return torch.arange(len(self.b), device=self.a.device) + self.first_column

    def operands_of(self, traced: Traced) -> tuple[Any, ...]:
        """The operands that the program uses; those of a second score only if it reads `other`."""
        return self.operands if traced.scores == 2 else (self.a, self.b, None, None)

    def payload_of(self, traced: Traced) -> tuple[Tensor | None, list[int]]:
        """The vectors of all payload sums side by side, [V, sum of widths]; and the width of the vectors of
        each entry of the program's `payloads`.

        They are in the dtype of a if all are; otherwise in the accumulation dtype.
        """
        if not traced.payloads:
            return None, []
        vectors = [self.column[name] for _, name in traced.payloads]
        widths = [0] * len(traced.program.payloads)
        for (number, _), t in zip(traced.payloads, vectors, strict=True):
            widths[number] += t.shape[1]
        own = self.a.dtype
        dtype = own if all(t.dtype == own for t in vectors) else accumulation_dtype(own)
        return torch.cat([t.to(dtype) for t in vectors], 1), widths

    def is_attention(self, traced: Traced, payload: Tensor) -> bool:
        """Whether the kernels of attention compute the call: they fold scores and vectors in one pass.

        On a GPU without tensor cores those of folds are faster for narrow operands (H100, float32: 3.4 beside
        11.9 ms for D and E of 3, 32768 rows and columns; 7.3 beside 4.1 ms for D and E of 64, 16384).
        """
        if payload.dtype != self.a.dtype or not is_attention(traced.program):
            return False
        narrow = max(self.a.shape[1], payload.shape[1]) <= 32
        return self.a.is_cpu or self.a.dtype.itemsize == 2 or not narrow

    def check_captured(self, traced: Traced, tensors: tuple[Tensor, ...], columns: int) -> None:
        """Raise ValueError unless captured tensors are on a's device and large enough for all rows and
        columns.

        Checked here because a GPU's own error would not name the tensor. columns: number of columns.
        """
        for kind in ("row", "column", "row_index", "column_index"):
            for name, *rest in traced.sources[kind]:
                if name == "tensor":
                    self._check_captured(traced, tensors[rest[0]], rest[1], columns)

    def data_of(self, traced: Traced, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Real data of rows [data, rows] and of columns [data, V], then integer data of both.

        None if empty.
        """
        rows, columns = self.a.shape[0], self.b.shape[0]
        if tensors and not torch.compiler.is_compiling():  # the compiler has its own errors
            self.check_captured(traced, tensors, self.first_column + columns)
        real = accumulation_dtype(self.a.dtype)
        of_kinds = (
            ("row", rows, real),
            ("column", columns, real),
            ("row_index", rows, torch.int64),
            ("column_index", columns, torch.int64),
        )
        stacked: list[Tensor | None] = [None] * 4
        for i, (kind, size, dtype) in enumerate(of_kinds):
            if sources := traced.sources[kind]:
                vectors = [self._vector(traced, tensors, kind, source) for source in sources]
                vectors = [t if t.dtype == dtype else t.to(dtype) for t in vectors]
                vectors = [t if t.dim() else t.expand(size) for t in vectors]
                stacked[i] = torch.stack(vectors) if len(vectors) > 1 else vectors[0].unsqueeze(0)
        return tuple(stacked)

    def _vector(self, traced: Traced, tensors: tuple[Tensor, ...], kind: str, source: Source) -> Tensor:
        name, *rest = source
        if name == "argument":
            data: dict[str, Tensor] = self.row if kind.startswith("row") else self.column
            return data[rest[0]]
        if name in ("label", "ignored"):
            datum = self.label if name == "label" else self.ignored
            assert datum is not None
            return datum
        if name in ("row", "head", "batch"):
            number = torch.arange(len(self.a), device=self.a.device)
            *leading, _ = self.given.shape
            if name == "row":
                return number % leading[-1] if len(leading) > 1 and leading[-1] else number
            _, heads, rows = leading
            number = number // max(rows, 1)
            return number % max(heads, 1) if name == "head" else number // max(heads, 1)
        number_of_tensor, indices = rest
        tensor = tensors[number_of_tensor]
        if self.a.is_meta:  # only shapes are wanted
            tensor = tensor.to(self.a.device)

        def leaf(node: tuple[Any, ...]) -> Tensor:
            if node[0] == "position":
                return self.positions
            source = traced.gathered[node[0]][node[1]]
            if source == ("label",):
                assert self.label is not None and self.ignored is not None
                return self.label.masked_fill(self.ignored, 0)  # -100 may be outside of the tensor
            return self._vector(traced, tensors, node[0], source)

        found = evaluate(traced.nodes, indices, leaf, self.a)
        if indices and tensor.dtype in (torch.uint16, torch.uint32):
            tensor = tensor.long()  # torch cannot index these dtypes on a GPU
        try:
            gathered: Tensor = tensor[tuple(found[i] for i in indices)] if indices else tensor
        except IndexError as error:  # an index from data, such as a label; a GPU has its own assertion
            raise IndexError(f"{described(tensor, self.of._function)}: {error}") from None
        return gathered

    def _check_captured(self, traced: Traced, tensor: Tensor, indices: tuple[int, ...], columns: int) -> None:
        lengths: dict[Any, int] = {("position",): columns}
        of_rows = traced.gathered["row_index"]
        for name, length in zip(("row", "head", "batch"), (*self.given.shape[-2::-1], 1, 1, 1), strict=False):
            if (name,) in of_rows:
                lengths["row_index", of_rows.index((name,)), "number"] = length
        expected: str | None = None
        given: Any = tensor.device
        if tensor.device != self.a.device and not self.a.is_meta:
            expected = f"one on {self.a.device} as a"
        for number, size in zip(indices, tensor.shape, strict=True):
            if size < lengths.get(traced.nodes[number], 0):
                expected, given = f"{lengths[traced.nodes[number]]} along an axis", f"{size}"
        if expected is not None:
            raise ValueError(mismatch(described(tensor, self.of._function), expected, given))

    def named(self, traced: Traced, values: Tensor, indices: Tensor, sums: Tensor) -> Any:
        """The NamedTuple of results."""

        def of_rows(result: Tensor) -> Tensor:
            return _like_rows(result, self.given)

        vectors: list[Tensor] = []
        if traced.payloads:  # torch.export cannot load a split into no parts
            payloads = [self.column[name] for _, name in traced.payloads]
            parts = torch.split(sums, [t.shape[1] for t in payloads], 1)
            own = self.a.dtype
            vectors = [
                part.to(own) if t.dtype == own else part for part, t in zip(parts, payloads, strict=True)
            ]
        results: list[Any] = []
        value_of = values.unbind(0)
        for kind, *at in traced.outputs:
            if kind == "payload":
                of_sum = vectors[at[0]]
                results.append(
                    of_sum.unflatten(0, self.given.shape[:-1]) if self.given.dim() != 2 else of_sum
                )
            elif kind in ("logsumexp", "value"):
                results.append(of_rows(value_of[at[0]]))
            elif kind == "index":
                results.append(of_rows(indices.select(0, at[0])))
            else:
                value, index = of_rows(value_of[at[0]]), of_rows(indices.select(0, at[1]))
                results.append(Extremum(-value if kind == "smallest" else value, index))
        return getattr(RESULTS, traced.result)(*results)
