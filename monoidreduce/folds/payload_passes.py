"""The payload sums of a program, forward and backward, by the statistics of numbers (program/payloads.py).

A sum is computed as the gradient of the rows of a score that the program never reads, and differentiated as
a statistic of one more score.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype, empty_statistics
from monoidreduce.folds.number_passes import Gradients, Wanted, added, empty_results, gradients, numbers
from monoidreduce.folds.operands import Folded, ProgramCall, Results, kept_data
from monoidreduce.folds.program.payloads import is_mean, may_exclude, weights, with_score
from monoidreduce.folds.torch.chunked import Chunked

__all__ = ["payload_gradients", "payload_sums"]


def payload_sums(call: ProgramCall, payload: Tensor, widths: Sequence[int], folded: Folded) -> Tensor:
    """All payload sums side by side, [rows, sum of widths].

    payload: the vectors of all of them, [V, sum of widths]. folded: the statistics of numbers.
    """
    found = empty_statistics(call.a, len(call.a), payload.shape[1])
    call = _in_dtype_of_sums(call, payload)
    parts = (torch.split(t, [*widths], 1) for t in (payload.to(call.a.dtype), found))
    for number, (vectors, to) in enumerate(zip(*parts, strict=True)):
        if to.shape[1]:
            _write_sum(call, number, vectors, folded, to)
    return found


def _write_sum(call: ProgramCall, number: int, vectors: Tensor, folded: Folded, to: Tensor) -> None:
    """Write payload sum `number`, [rows, E]: the product of the elements' weights with the vectors [V, E]."""
    a, of, (row, column, row_index, column_index) = call.a, call.parsed, call.data
    softmax, _ = of.payloads[number]
    by = a.new_full((len(a),), 1 / call.scale, dtype=to.dtype)
    lse = low = by  # not read if the sum is a total
    if softmax >= 0:
        lse, low = folded[0][sum(map(len, of.softmaxes[:softmax]))], folded[1][softmax]
    further = []  # columns beside the vectors
    # The log-sum-exp and the weights may come from scores that are rounded differently: on a GPU by several
    # kernels, on a CPU by the engine and, if there are two scores, torch. The sum of float32 weights is then
    # off by more than their rounding errors, so the mean is divided by it.
    rounds_twice = a.is_cuda or len(call.scores) > 1
    by_weights = rounds_twice and vectors.dtype.itemsize > 2 and is_mean(of, number)
    if by_weights:
        further.append(torch.ones_like(vectors[:, :1]))
    if may_exclude(call.program, number):  # 0 times a vector that is not finite would be NaN
        further.append((~vectors.isfinite()).any(1, keepdim=True).to(vectors.dtype))
        vectors = vectors.nan_to_num(0, 0, 0)
    vectors = torch.cat((vectors, *further), 1) if further else vectors
    text, kept = weights(call.program, number, call.counts[0])
    known = torch.cat([t for t in (row, torch.stack((lse, low, by))) if t is not None])
    unread = vectors.new_zeros(1, vectors.shape[1]).expand(len(a), -1)  # the rows of a score that has no use
    of_weights = call._replace(
        program=text,
        scores=(*call.scores, (unread, vectors)),
        data=kept_data(kept, (known, column, row_index, column_index)),
    )
    nothing = empty_results(of_weights.parsed, a)
    wanted = Wanted((*[False] * (2 * len(call.scores)), True, False))
    result = gradients(of_weights, nothing, nothing[0], wanted, unrounded=True).scores[-2]
    assert result is not None
    width = to.shape[1]
    to.copy_(result[:, :width])
    if by_weights:
        whole = result[:, width, None]
        to.div_(whole.masked_fill(whole == 0, 1))
    if may_exclude(call.program, number):
        to.masked_fill_(result[:, -1:] != 0, torch.nan)


def payload_gradients(
    call: ProgramCall,
    payload: Tensor,
    widths: Sequence[int],
    upstream: tuple[Tensor, Tensor],
    results: Results,
    wanted: Wanted,
    of_payload: bool,
    unrounded: bool,
    batches: int,
) -> tuple[Gradients, Tensor]:
    """The gradients by the numbers and the payload sums of a call; and those of the payload, if needed.

    Each vector of a payload sum is one more score: the sum's statistic is the mean or the total of <upstream,
    vector>, summed over its vectors. The gradients by the numbers come with the first.

    upstream: the gradients of values and of payload sums. wanted, unrounded, batches: as in `gradients`.
    """
    (grad_values, grad_sums), (values, sums, low, indices), data = upstream, results, call.data
    call = _in_dtype_of_sums(call, payload)
    of_data = (wanted.row and data[0] is not None) or (wanted.column and data[1] is not None)
    found = Gradients([None] * len(wanted.scores))
    d_payload = torch.zeros_like(payload, memory_format=torch.contiguous_format)
    count = call.parsed.vectors
    of_vectors = (torch.split(t, [*widths] * count, 1) for t in (payload.to(call.a.dtype), d_payload))
    all_vectors, all_gradients = ([t[n :: len(widths)] for n in range(len(widths))] for t in of_vectors)
    of_sums = (torch.split(t, [*widths], 1) for t in (grad_sums, sums))
    parts = zip(all_vectors, all_gradients, *of_sums, strict=True)
    for number, (vectors, d_vectors, grad_sum, total) in enumerate(parts):
        if grad_sum.shape[1] == 0:
            continue
        text, at = with_score(call.program, number)
        upstream_rows = grad_sum.to(call.a.dtype)
        of_sum = call._replace(program=text, scores=(*call.scores, *((upstream_rows, t) for t in vectors)))
        # The fold scales all scores, so this one's mean and its gradient make up for that.
        mean = (grad_sum * total).sum(1)[None] * call.scale
        by = torch.full_like(grad_sum[:, :1].mT, 1 / call.scale)
        if of_data and call.a.dtype.itemsize == 2:
            # Gradients of data are as accurate as float32 sums; a mean by weights in 16 bits is too coarse.
            mean = numbers(of_sum)[0][at : at + 1]
        known = torch.cat((values[:at], mean, values[at:])), low, indices
        if len(of_sum.scores) > 2 and call.a.dtype.itemsize > 2:
            # torch computes this call. It rounds scores otherwise than the kernels that gave the values, and
            # weights by these would not sum to 1.
            known = (*Chunked(of_sum, batches).forward()[:2], indices)
        of_number = gradients(
            of_sum,
            known,
            torch.cat((grad_values[:at], by, grad_values[at:])),
            wanted._replace(scores=(*wanted.scores, *(False, of_payload) * count)),
            unrounded or len(widths) > 1,
            batches,
        )
        further = len(wanted.scores)
        found = Gradients(
            [added(x, y) for x, y in zip(found.scores, of_number.scores, strict=False)],
            added(found.row, of_number.row),
            added(found.column, of_number.column),
            added(found.table, of_number.table),
        )
        for to, gradient in zip(d_vectors, of_number.scores[further + 1 :: 2], strict=True):
            if gradient is not None:
                to.copy_(gradient[:, : to.shape[1]])
        grad_values = torch.zeros_like(grad_values)
    return found, d_payload


def _in_dtype_of_sums(call: ProgramCall, payload: Tensor) -> ProgramCall:
    """The call with operands in the dtype in which payload sums are computed.

    That is float32 beside a payload in float32, which is not rounded, and for totals of float16, whose
    weights may exceed its range.
    """
    own = call.a.dtype
    exceeds = own == torch.float16 and any(softmax < 0 for softmax, _ in call.parsed.payloads)
    dtype = accumulation_dtype(own) if exceeds else payload.dtype
    if dtype == own:
        return call
    return call._replace(scores=tuple((rows.to(dtype), columns.to(dtype)) for rows, columns in call.scores))
