"""`@mr.statistics` functions with columns sharded over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from monoidreduce._torch_private import mark_untraced
from monoidreduce._validate import check_tensor, mismatch
from monoidreduce.distributed.fold import ShardedFold, fold_over_ranks
from monoidreduce.distributed.group import (
    COLUMN_OPTIONS,
    UNTRACED,
    Columns,
    Sharding,
    facts_of,
    key_of,
    together,
)
from monoidreduce.distributed.messages import Facts
from monoidreduce.distributed.split import shard, unshard
from monoidreduce.distributed.states import two_words
from monoidreduce.folds.program.integers import most_numbers
from monoidreduce.folds.program.program import parse
from monoidreduce.folds.program.tracing import living
from monoidreduce.folds.statistics import Statistics
from monoidreduce.folds.statistics_call import Call
from monoidreduce.folds.torch.monoid import StatisticsMonoid
from monoidreduce.ranks import RanksOrGroup

__all__ = ["statistics_over_ranks"]


def statistics_over_ranks(
    of: Statistics,
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    label: Tensor | None,
    ignore_index: int,
    row: Mapping[str, Tensor],
    column: Mapping[str, Tensor],
    scale: float,
    workspace: int | None,
    ranks: RanksOrGroup,
    words: Tensor | None = None,
) -> Any:
    """`Statistics.__call__` over ranks. words: as in `Statistics._with_words`, of the rows of all ranks."""
    sharding = Sharding.of(ranks)
    group, shards_rows = sharding.group, sharding.ranks.sequence_parallel

    def prepare() -> tuple[Columns, Facts]:
        sharding.check(of.__name__, *COLUMN_OPTIONS)  # type: ignore[attr-defined]
        if check_tensor("b", operands[1]).dim() != 2:
            raise ValueError(mismatch("b", "shape [V, D] over ranks", list(operands[1].shape)))
        call = Call(of, *operands, label, ignore_index, row, column, scale, words=words)
        columns = sharding.columns("b", call.b)
        most_numbers("b", columns.all)
        traced, tensors = of._traced(call)
        call.check_captured(traced, tensors, columns.all)
        moving = (*operands, *row.values(), *column.values(), *tensors)
        sharding.refuse_forward_mode(of.__name__, moving)  # type: ignore[attr-defined]

        names = ("a", "b", "other_a", "other_b", "label", "ignore_index", "scale")
        given = (*zip(names, (*operands, label, ignore_index, scale), strict=True), *row.items())

        def facts() -> dict[str, Any]:
            found = facts_of(given, {"b": 0, "other_b": 0}) | sharding.facts
            program = hashlib.sha256(traced.text.encode()).hexdigest()
            return found | {
                "ranks.classes": columns.all,
                "rows of b": columns.stride,
                "the function's program": program,
            }

        key = (tuple(row), key_of(value for _, value in given), sharding.key, columns.all, columns.stride)
        return columns, Facts((*key, traced.text), facts)

    columns = together(group, of.__name__, prepare)  # type: ignore[attr-defined]

    def own_rows(t: Tensor) -> Tensor:
        return shard(t, 0, group.handle)

    def rows_of(t: Any) -> Any:
        return unshard(t, 0, group.handle) if shards_rows and t is not None else t

    a, b, other_a, other_b = operands
    own: tuple[Any, Any, Any, Any] = (rows_of(a), columns.own(b), rows_of(other_a), columns.own(other_b))
    label = rows_of(label)
    row = {name: rows_of(t) for name, t in row.items()}
    column = {name: columns.own(t) for name, t in column.items()}  # type: ignore[misc]
    if group.size == 1:
        call = Call(of, *own, label, ignore_index, row, column, scale, words=words)
        traced, values, _, indices, sums = of._folded(call, workspace)
        return call.named(traced, values, indices, sums)
    call = Call(of, *own, label, ignore_index, row, column, scale, columns.first, words=words)
    traced, tensors = of._traced(call)
    of_rows, of_columns, row_index, column_index = call.data_of(traced, tensors)
    learned_text, table, table_index, sizes = call.tables_of(traced, tensors)
    text, has_positions = _with_numbered_columns(
        learned_text, 0 if column_index is None else len(column_index)
    )
    living[text] = traced
    if has_positions:
        positions = call.positions[None]
        column_index = positions if column_index is None else torch.cat((column_index, positions))

    payload, widths = call.payload_of(traced)
    program, monoid = parse(text), StatisticsMonoid(text)
    options = text, widths, 1, sizes, call.scale, workspace

    def combine(gathered: list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values, sums, low, indices = gathered
        of_ranks = zip(values, low, indices, strict=True)
        per_rank = [monoid.of_results(*each, columns.stride * i) for i, each in enumerate(of_ranks)]
        state = reduce(monoid.combine, per_rank)
        total, at = monoid.project(state)
        whole = monoid.combine_sums(per_rank, state, sums, widths).to(sums.dtype)
        lows = [two_words(total[field], values.dtype)[1] for field in monoid.log_sum_exps]
        rounded = total.to(values.dtype)
        here = at.clone()
        counts = slice(len(program.largest), len(program.largest) + len(program.counts))
        here -= columns.first
        here[counts] = at[counts]
        return (rounded, whole, at), (rounded, whole, torch.stack(lows) if lows else low[0], here)

    # `rows_of` has gathered them.
    whole_rows = replace(sharding.ranks, sequence_parallel=False)
    fold = ShardedFold(
        "statistics",
        options,
        options,
        (0, 2, 4, 7),
        4,
        combine,
        Sharding(group, whole_rows),
        differentiable=2,
    )
    of_call = (of_rows, of_columns, payload, table, row_index, column_index, table_index)
    inputs = (*call.operands_of(traced), *of_call)
    values, sums, indices = fold_over_ranks(fold, *inputs)
    result = call.named(traced, values, indices, sums)
    if not shards_rows:
        return result
    return type(result)(
        *(type(s)(*map(own_rows, s)) if isinstance(s, tuple) else own_rows(s) for s in result)
    )


mark_untraced(statistics_over_ranks, UNTRACED)


@lru_cache(256)
def _with_numbered_columns(text: str, number: int) -> tuple[str, bool]:
    """The program with its column index replaced by integer datum `number`, and whether it used the index.

    A kernel counts this rank's columns from 0, so the index in the whole fold is passed as a datum of
    columns.
    """
    program = parse(text)
    nodes = tuple(
        ("column_index", number, "number") if node == ("position",) else node for node in program.nodes
    )
    return replace(program, nodes=nodes).text, nodes != program.nodes
