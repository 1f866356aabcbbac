"""The mean of vectors by a softmax, by attention's kernels for functions of scores.

softmax(f(score)).mean(v) is attention whose score_mod is f. Its kernels sum the vectors in registers, and the
gradients of scores, vectors and captured tensors in one pass. Integers of rows and of columns lie in the
table of integers, behind what f gathers by row and column together, and are gathered by query or by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.attention_mask import Mask
from monoidreduce._ops.attention_passes import backward_pass, empty_low, forward_pass, in_full
from monoidreduce.folds.cuda import kernels
from monoidreduce.folds.operands import ProgramCall
from monoidreduce.folds.program.graph import Expression, Graph
from monoidreduce.folds.program.operations import LEAVES
from monoidreduce.folds.program.payloads import is_mean_alone, may_exclude
from monoidreduce.folds.program.program import Program, parse
from monoidreduce.folds.program_scores import MOST_SIZES, ProgramScores

__all__ = ["Attention", "as_attention", "attention_of"]


class Attention(NamedTuple):
    """A call of the op `statistics` as one of attention.

    Attributes:
        scores: how scores are made.
        q, k, v: [batches, 1, rows or columns of a batch, width].
    """

    scores: ProgramScores
    q: Tensor
    k: Tensor
    v: Tensor

    def forward(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values, payload sums, low words of log-sum-exps, and indices."""
        out, lse, lse_low, out_low = forward_pass(self.scores, self.q, self.k, self.v, None, compensated=True)
        none = lse.new_empty(0, lse.numel(), dtype=torch.int64)
        return lse.view(1, -1), in_full(out, out_low).flatten(0, 2), lse_low.view(1, -1), none

    def backward(
        self,
        grad_values: Tensor | None,
        grad_sums: Tensor | None,
        values: Tensor,
        sums: Tensor,
        low: Tensor,
        needed: Sequence[bool],
        unrounded: bool,
    ) -> list[Tensor | None]:
        """The gradients of a, b, payload and table; None where one is not needed."""
        by_rows = self.q.shape[:3]

        def of_rows(t: Tensor) -> Tensor:
            return t.view(*by_rows, -1)

        out = of_rows(sums.to(self.v.dtype))
        out_low = (of_rows(sums) - out).to(out.dtype) if out.itemsize == 2 else empty_low(out, False)
        saved = out, values.view(by_rows), low.view(by_rows), out_low
        grad_out = torch.zeros_like(out) if grad_sums is None else of_rows(grad_sums.to(out.dtype))
        grad_lse = None if grad_values is None else grad_values.view(by_rows)
        operands, wanted = (self.q, self.k, self.v), [*needed[:3], False, False]
        scores, d_table = self.scores, None
        if needed[3] and scores.table is not None:
            d_table = torch.zeros_like(scores.table)
            scores = scores._replace(d_table=d_table)
        found = backward_pass(scores, grad_out, grad_lse, *operands, None, saved, wanted, unrounded)
        of_operands = zip(found[:3], wanted[:3], strict=True)
        return [*(t.flatten(0, 2) if want else None for t, want in of_operands), d_table]


def attention_of(
    call: ProgramCall, payload: Tensor | None, batches: int, sizes: Sequence[int]
) -> Attention | None:
    """The call as one of attention; None if it is none, or if the tensor cores of a GPU do not take it.

    payload, batches, sizes (of the captured tensors): as in the op `statistics`.
    """
    a, b = call.a, call.b
    if payload is None or not a.is_cuda or payload.dtype != a.dtype or a.dtype.itemsize != 2:
        return None
    if not is_mean_alone(call.parsed) or min(len(a), len(b), batches) == 0 or call.scale == 0:
        return None
    if torch.are_deterministic_algorithms_enabled() or not kernels.is_available():
        return None
    if may_exclude(call.program, 0):  # kernels of folds do not let a vector of log weight -inf reach the mean
        return None
    found = as_attention(call, payload, batches, sizes)
    if len(found.scores.sizes) > MOST_SIZES or not found.scores.plan_forward(*found[1:]).tensor_cores:
        return None
    return found


def as_attention(call: ProgramCall, payload: Tensor, batches: int, sizes: Sequence[int]) -> Attention:
    """The call of a program that `is_mean_alone`, on any device."""
    a, b, table, table_index = call.a, call.b, *call.tables
    _, _, row_index, column_index = call.data
    q, k, v = (t.reshape(batches, 1, len(t) // batches, t.shape[1]) for t in (a, b, payload))
    integers = [t.reshape(-1) for t in (table_index, row_index, column_index) if t is not None]
    gathered, of_rows = (0 if t is None else t.numel() for t in (table_index, row_index))
    own = [q.shape[2], k.shape[2], len(a), len(b), gathered, gathered + of_rows]
    scores = ProgramScores(
        call.scale,
        Mask(),
        _scores_program(call.program, len(sizes)),
        table,
        torch.cat(integers) if integers else None,
        [*sizes, *own],
    )
    return Attention(scores, q, k, v)


@lru_cache(256)
def _scores_program(text: str, first: int) -> str:
    """The program of attention's scores. first: the number of the first size that `as_attention` adds."""
    of, graph = parse(text), Graph()
    batch, query, position = (graph.leaf(name) for name in ("batch", "query", "position"))
    rows, columns, all_rows, all_columns, of_rows, of_columns = (
        graph.leaf("size", first + k) for k in range(6)
    )
    placed: list[Expression] = []
    for name, *rest in of.nodes:
        if name == "row_index" and rest[0] == of.own_row:
            placed.append(query)
        elif name == "row_index":
            placed.append(graph.raw("index_gather", of_rows + rest[0] * all_rows + batch * rows + query))
        elif name == "column_index":
            entry = of_columns + rest[0] * all_columns + batch * columns + position
            placed.append(graph.raw("index_gather", entry))
        elif name in LEAVES:
            placed.append(graph.leaf(name, *rest))
        else:
            placed.append(graph.raw(name, *(placed[i] for i in rest)))
    ((log_weight,),) = of.softmaxes
    program, _ = Program(tuple(graph.nodes), totals=(placed[log_weight].number,)).pruned()
    return program.text
