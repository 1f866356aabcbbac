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
from monoidreduce._ops.registry import any_requires_grad, call_op
from monoidreduce._results import RESULTS
from monoidreduce._validate import mismatch
from monoidreduce.explanation import Explanation
from monoidreduce.folds.block_mask import BlockMask
from monoidreduce.folds.explain import explain_fold
from monoidreduce.folds.number_passes import obstacle
from monoidreduce.folds.program.arguments import arguments
from monoidreduce.folds.program.errors import TraceError
from monoidreduce.folds.program.program import parse, with_sizes
from monoidreduce.folds.program.tracing import STAND_INS, Traced, traced_in_graph, traced_now
from monoidreduce.folds.statistics_call import Call, Options
from monoidreduce.folds.statistics_op import AXES, ignored_rows, joined, leave_out, parts_of
from monoidreduce.folds.torch import reader
from monoidreduce.functional import attention, workspace_bytes

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
    constant. A tensor that it reads is data; it must be indexed by integers of `row`, `label`, `head`,
    `batch` and `column`. An index of row and column together that the tensor does not have reads the nearest
    entry; other indices follow torch. See docs/statistics.md.

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
        block_mask: BlockMask | None = None,
        scale: float = 1.0,
        workspace: int | None = None,
        ranks: RanksOrGroup | None = None,
        **others: Any,
    ) -> Any:
        """The statistics of the scores scale * a @ b^T, without storing the scores.

        Args:
            a: [..., D], one row per result.
            b: [V, D], the columns, which are folded. Or [..., V, D], with the leading axes of a [..., N, D]:
                then each batch has columns of its own, and data of columns are [..., V] or [..., V, E].
                Not over ranks.
            other_a, other_b: [..., E] and [V, E] (or [..., V, E]); the argument `other` is
                scale * other_a @ other_b^T.
            label: [...] integers, for the argument `label`. A row with label ignore_index is an empty fold:
                its statistics are those without columns, and it gets no gradients, even if it holds NaN. Any
                other label outside [0, V) equals no column. A label that indexes a captured tensor follows
                torch: negative values count from the end, others out of range are errors.
            ignore_index: the label of ignored rows.
            row: data of rows by name, each [...]; or a vector [..., D] for `stat.distance`.
            column: data of columns by name, each [V]; or a payload [V, E], a vector for each column, of which
                the function returns means and totals (`p.mean(v)`, `total(w * v)`).
            block_mask: the result of `monoidreduce.block_mask` for rows and columns, or torch's BlockMask.
                A row folds only the columns that it keeps. If a is [B, H, N, D], it may differ by batch and
                head. Not over ranks.
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
            if block_mask is not None:
                expected = "None over ranks: write torch.where(keep, score, -math.inf) in the function"
                raise ValueError(mismatch("block_mask", expected, repr(block_mask)))
            data = (label, ignore_index, row or {}, column or {}, scale, workspace)
            return _yards.ranks().statistics_over_ranks(self, (a, b, other_a, other_b), *data, ranks)
        given = (label, ignore_index, row or {}, column or {}, scale)
        call = Call(self, a, b, other_a, other_b, *given, block_mask=block_mask)
        traced, values, _, indices, sums = self._folded(call, workspace)
        return call.named(traced, values, indices, sums)

    def _with_words(
        self,
        a: Tensor,
        b: Tensor,
        *,
        words: Tensor | None,
        label: Tensor | None = None,
        ignore_index: int = -100,
        row: Mapping[str, Tensor],
        column: Mapping[str, Tensor],
        scale: float,
        workspace: int | None = None,
        ranks: RanksOrGroup | None = None,
    ) -> Any:
        """A call of a function that reads `tracing.WORDS`, for which `words` stands in."""
        given = (label, ignore_index, row, column, scale)
        if ranks is not None:
            operands = (a, b, None, None)
            return _yards.ranks().statistics_over_ranks(self, operands, *given, workspace, ranks, words)
        call = Call(self, a, b, None, None, *given, words=words)
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
        call = Call(self, a, b, other_a, other_b, None, -100, row, column, 1.0)
        traced, values, low, indices, sums = self._folded(call, None)
        return call.named(traced, values, indices, sums), call.named(traced, low, indices, sums)

    def _by_folds(
        self, a: Tensor, b: Tensor, *, row: Mapping[str, Tensor], column: Mapping[str, Tensor], scale: float
    ) -> Any:
        """A call that runs folds also where the kernels of attention would do."""
        call = Call(self, a, b, None, None, None, -100, row, column, scale)
        traced, values, _, indices, sums = self._folded(call, None, by_attention=False)
        return call.named(traced, values, indices, sums)

    def _op_arguments(
        self, a: Tensor, b: Tensor, *, row: Mapping[str, Tensor], column: Mapping[str, Tensor], scale: float
    ) -> tuple[Any, ...]:
        """The arguments of the op `statistics` in such a call."""
        call = Call(self, a, b, None, None, None, -100, row, column, scale)
        inputs, options = call.inputs(*self._traced(call))
        return *inputs, *options, scale, workspace_bytes(None)

    def _folded(
        self, call: Call, workspace: int | None, by_attention: bool = True
    ) -> tuple[Traced, Tensor, Tensor, Tensor, Tensor]:
        """Run the op: values [values, rows], low words of the log-sum-exps, indices, and payload sums."""
        traced, tensors = self._traced(call)
        if traced is None:
            folded: Any = outside_of_graphs(self._folded, call, workspace)
            return folded  # type: ignore[no-any-return]
        if by_attention and call.is_attention(traced):
            q, k, v = call.attention_inputs(traced)
            out, lse = attention(q, k, v, scale=call.scale, return_lse=True, block_mask=call.blocks)
            none = call.a.new_empty(0, len(call.a), dtype=torch.int64)
            return traced, lse.reshape(1, -1), lse.new_zeros(()), none, out.flatten(0, 2)
        inputs, options = call.inputs(traced, tensors)
        if call.a.is_cpu and not torch.compiler.is_compiling():
            self._check_fits(call, traced, tensors, options)
        values, sums, low, indices = call_op(
            "statistics", *inputs, *options, call.scale, workspace_bytes(workspace)
        )
        return traced, values, low, indices, sums

    def _check_fits(self, call: Call, traced: Traced, tensors: tuple[Tensor, ...], options: Options) -> None:
        """Raise TraceError if the CPU engine cannot run forward, or backward if one may follow."""
        text, *_, sizes = options
        given = (*call.operands, *call.row.values(), *call.column.values(), *tensors)
        gradient = torch.is_grad_enabled() and any_requires_grad(given)
        if why := obstacle(with_sizes(text, tuple(sizes)) if sizes else text, traced.counts, gradient):
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
        block_mask: BlockMask | None = None,
        scale: float = 1.0,
    ) -> Any:
        """The same statistics by plain torch, with all scores stored, in the accumulation dtype."""
        given = (label, ignore_index, row or {}, column or {}, scale)
        call = Call(self, a, b, other_a, other_b, *given, block_mask=block_mask)
        traced, tensors = self._traced(call)
        inputs, options = call.inputs(traced, tensors)
        parts = [
            self._reference(traced, part, options, call.scale)
            for part in parts_of(inputs, AXES, call.batches)
        ]
        values, sums, indices = joined(parts, (1, 0, 1))
        return call.named(traced, values, indices, sums)

    def _reference(
        self, traced: Traced, inputs: tuple[Tensor | None, ...], options: Options, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values, payload sums and indices from the inputs of the op."""
        a, b, other_a, other_b, of_rows, of_columns, payload, table, *integers = inputs
        row_index, column_index, table_index = integers
        text, widths, _, sizes = options
        assert a is not None and b is not None
        dtype, rows = accumulation_dtype(a.dtype), len(a)
        program = parse(with_sizes(text, tuple(sizes))) if sizes else traced.program
        counted = torch.arange(rows, device=a.device)
        if program.ignored is not None:  # left out, because their gradients in torch could be 0 * NaN
            counted = (~ignored_rows(program, row_index)).nonzero()[:, 0]

        def scores(rows: Tensor, columns: Tensor) -> Tensor:
            return reader.scores(rows[counted], columns, dtype, scale)

        data = {"row": of_rows, "column": of_columns, "row_index": row_index, "column_index": column_index}
        data |= {"gather": table, "index_gather": table_index}

        def leaf(node: tuple[Any, ...]) -> Any:
            name, *number = node
            if name == "other":
                assert other_a is not None and other_b is not None
                return scores(other_a, other_b)
            of_kind = data[name]
            assert of_kind is not None
            if not number:
                return of_kind
            vector = of_kind[number[0]]
            return vector[counted][:, None] if name in ("row", "row_index") else vector

        vectors = [] if payload is None else torch.split(payload.to(dtype), widths, 1)
        *found, sums = reader.statistics(program, scores(a, b), leaf, vectors)
        values, indices = (t.new_zeros(len(t), rows).index_copy(1, counted, t) for t in found)
        sums = sums.new_zeros(rows, sum(widths)).index_copy(0, counted, sums)
        if program.ignored is not None:
            leave_out(program, ignored_rows(program, row_index), values, sums, indices)
        return values, sums, indices

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
        block_mask: BlockMask | None = None,
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
            "block_mask": block_mask,
            "ignore_index": ignore_index,
            "scale": scale,
            "workspace": workspace,
        }
        return explain_fold(self, call)

    def _traced(self, call: Call) -> tuple[Any, tuple[Tensor, ...]]:
        """The traced function for a call, and the tensors that it captured.

        The first is None if torch.compile traces and the function cannot be part of a graph.
        """
        if torch.compiler.is_dynamo_compiling():
            mask_mod, block, has_heads = call.masking or (None, None, False)
            traced, which, captured = traced_in_graph(self._function, *call.kinds, mask_mod, block, has_heads)
            tensors = [
                call.tensors[number] if number >= 0 else as_input(own, call.a)
                for number, own in zip(which, captured, strict=True)
            ]
            return traced, tuple(tensors)
        traced = traced_now(self._function, *call.kinds, call.masking)
        if call.blocks is None and call.words is None:
            return traced, traced.tensors
        of_call = dict(zip(map(id, STAND_INS), call.tensors, strict=True))
        return traced, tuple([of_call.get(id(t), t) for t in traced.tensors])


@functools.lru_cache(1)
def _signature_of_calls() -> inspect.Signature:
    """The signature of a call, without self and the catch-all parameters that only raise errors."""
    signature = inspect.signature(Statistics.__call__)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    _, *given = signature.parameters.values()
    listed = [parameter for parameter in given if parameter.kind not in variable]
    return signature.replace(parameters=listed)
