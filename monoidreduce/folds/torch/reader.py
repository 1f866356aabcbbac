"""Evaluation of a program by torch for all elements at once: the reference, differentiable by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.products import without_autocast
from monoidreduce.folds.program.graph import Node
from monoidreduce.folds.program.operations import LEAVES, OPERATIONS
from monoidreduce.folds.program.program import Program, operands, reachable

__all__ = ["evaluate", "largest_in_order", "releases", "scores", "statistics", "with_scores"]


def evaluate(
    nodes: Sequence[Node], numbers: Iterable[int], leaf: Callable[[Node], Tensor], like: Tensor
) -> dict[int, Tensor]:
    """The values of these nodes. Others are released after their last use (`releases`).

    leaf: gives the value of a leaf that is not a constant, and the tables for ("gather",) and
    ("index_gather",).
    like: a tensor with the dtype and device for real constants.
    """
    values: dict[int, Tensor] = {}
    for number, done in releases(nodes, numbers):
        node = nodes[number]
        name = node[0]
        if name == "real":
            # torch.full runs on the device; a copy from the host would wait.
            values[number] = torch.full((), float.fromhex(node[1]), dtype=like.dtype, device=like.device)
        elif name in ("integer", "boolean"):
            dtype = torch.int64 if name == "integer" else torch.bool
            values[number] = torch.full((), node[1], dtype=dtype, device=like.device)
        elif name in LEAVES:
            values[number] = leaf(node)
        elif name in ("to_real", "uniform", "uniform_16"):
            values[number] = OPERATIONS[name].evaluate(*(values[i] for i in operands(node))).to(like.dtype)
        elif name in ("gather", "index_gather"):
            values[number] = torch.take(leaf((name,)), values[node[1]])
        else:
            values[number] = OPERATIONS[name].evaluate(*(values[i] for i in operands(node)))
        for i in done:
            del values[i]
    return values


def releases(nodes: Sequence[Node], numbers: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
    """The nodes that these depend on, arguments first; with each those that nothing reads after it."""
    wanted = set(numbers)
    order = reachable(nodes, wanted)
    last = {i: number for number in order for i in operands(nodes[number])}
    done: dict[int, list[int]] = {}
    for i, number in last.items():
        if i not in wanted:
            done.setdefault(number, []).append(i)
    return ((number, done.get(number, [])) for number in order)


def scores(rows: Tensor, columns: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """scale * rows @ columns^T in this dtype, even under autocast."""
    with without_autocast(rows):
        return rows.to(dtype) @ columns.to(dtype).T * scale


def with_scores(score: Tensor, leaf: Callable[[Node], Tensor], first: int = 0) -> Callable[[Node], Tensor]:
    """Extend `leaf` to "score" and "position". first: index of the first column of the scores."""

    def of(node: Node) -> Tensor:
        if node[0] == "position":
            return torch.arange(first, first + score.shape[1], device=score.device)
        return score if node[0] == "score" else leaf(node)

    return of


def statistics(
    program: Program,
    score: Tensor,
    leaf: Callable[[Node], Tensor],
    vectors: Sequence[Tensor] = (),
    first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics of scores [rows, columns]: values [values, rows], indices [indices, rows], and payload
    sums [rows, sum of widths].

    leaf: gives the values of leaves other than "score" and "position", broadcastable to the scores. vectors:
        those of each payload sum, [columns, width]; none to leave them out. first: index of the first column.
    """
    rows, columns = score.shape

    used = set(program.used)
    found = evaluate(program.nodes, used, with_scores(score, leaf, first), score)
    element = {number: found[number].expand(rows, columns) for number in used}
    values: list[Tensor] = []
    entropies: list[Tensor] = []  # of each softmax, if any is wanted
    shares: list[tuple[Tensor, Tensor]] = []  # of each softmax: probabilities, and which elements it excludes
    for log_weight, *means in program.softmaxes:
        of_weight = element[log_weight]
        absent = of_weight == -math.inf
        nothing = absent.all(1, keepdim=True)
        of_weight = of_weight.masked_fill(nothing, 0.0)
        values.append(of_weight.logsumexp(1).masked_fill(nothing[:, 0], -math.inf))
        share = of_weight.softmax(1)
        shares.append((share, absent))
        if program.entropies:
            log_share = of_weight.log_softmax(1).masked_fill(absent, 0.0)
            entropies.append(-(share * log_share).sum(1).masked_fill(nothing[:, 0], 0.0))
        values.extend((share * element[of_mean].masked_fill(absent, 0.0)).sum(1) for of_mean in means)
    values.extend(element[number].sum(1) for number in program.totals)
    squares = []
    for n, (softmax, k) in enumerate(program.variances):
        share, absent = shares[softmax]
        deviation = element[program.softmaxes[softmax][1 + k]] - values[program.mean_of(n)][:, None]
        squares.append((share * deviation.masked_fill(absent, 0.0) ** 2).sum(1))
    found_at = [_largest(element[number]) for number in program.largest]
    values.extend(value for value, _ in found_at)
    for number, (value, index) in zip(program.carried, found_at, strict=False):
        values.append(element[number].gather(1, index[:, None]).squeeze(1) if columns else value)
    indices = [torch.where(index < 0, index, index + first) for _, index in found_at]
    indices.extend(element[number].sum(1) for number in program.counts)
    values.extend(entropies[softmax] for softmax in program.entropies)
    values.extend(squares)
    for f, k in program.most:
        of_f, at = largest_in_order(element[f], None, k)
        values.extend(of_f.unbind(1))
        indices.extend(torch.where(at < 0, at, at + first).unbind(1))
    sums = [
        _payload_sum(element[factor], shares[softmax] if softmax >= 0 else None, of)
        for (softmax, factor), of in zip(program.payloads, vectors, strict=False)
    ]
    return (
        torch.stack(values) if values else score.new_empty(0, rows),
        torch.stack(indices) if indices else torch.empty(0, rows, dtype=torch.int64, device=score.device),
        torch.cat(sums, 1) if sums else score.new_empty(rows, 0),
    )


def _payload_sum(factor: Tensor, of_softmax: tuple[Tensor, Tensor] | None, vectors: Tensor) -> Tensor:
    """sum_j w_ij v_j, with w the factor times the softmax's probability, if there is one.

    An element that the softmax excludes adds nothing, even if its vector or its factor is not finite.
    """
    if of_softmax is None:
        return factor @ vectors
    share, absent = of_softmax
    weight = share * factor.masked_fill(absent, 0.0)
    if vectors.isfinite().all():
        return weight @ vectors
    reached = torch.where(absent[..., None], 0.0, vectors)  # [rows, columns, width]
    return (weight[..., None] * reached).sum(1)


def largest_in_order(values: Tensor, columns: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row in order and their columns, [rows, k]; the lower column comes first.

    NaN counts as the largest. Where there are fewer values, -inf and -1.

    columns: [rows, n], the columns of the values; None if the values are in the columns' order.
    """
    rows, n = values.shape
    if n < k:
        values = torch.cat((values, values.new_full((rows, k - n), -math.inf)), 1)
        given = torch.arange(n, device=values.device).expand(rows, n) if columns is None else columns
        columns = torch.cat((given, torch.full((rows, k - n), -1, device=values.device)), 1)
    if columns is not None:
        last: Any = torch.where(columns < 0, torch.iinfo(torch.int64).max, columns)
        order = last.argsort(stable=True)
        order = order.gather(1, values.detach().gather(1, order).argsort(descending=True, stable=True))[:, :k]
        return values.gather(1, order), columns.gather(1, order)
    known: Any = values.detach()
    at = _columns_of_largest(known, k)
    at = at.gather(1, known.gather(1, at).argsort(descending=True, stable=True))
    return values.gather(1, at), at


def _columns_of_largest(values: Tensor, k: int) -> Any:
    """[rows, k] the columns of the k largest values of each row, in ascending order; of equal ones the lower.

    torch.topk leaves open which of equal values it takes. So it runs twice: first for the least value that is
    among the largest, then for columns. Once is enough if no others equal the least value; on a GPU to look
    would be to wait.
    """
    if values.is_cpu and not values.is_meta:  # both in a dry run
        found = values.topk(k, 1)
        if ((values >= found.values[:, -1:]).sum(1) == k).all():
            return found.indices.sort(1).values
    n, integers = values.shape[1], torch.int64 if values.dtype == torch.float64 else torch.int32
    bits = (values + 0.0).masked_fill(values.isnan(), math.nan).view(integers)
    keys = torch.where(bits < 0, -(bits & torch.iinfo(integers).max), bits)  # in the order of the numbers
    least = keys.topk(k, 1).values[:, -1:]
    backwards = torch.arange(n, 0, -1, dtype=torch.int32, device=values.device)
    by_column = (backwards + (keys > least).int() * n) * (
        keys >= least
    )  # 32 bits take half of the time of 64
    return by_column.topk(k, 1).indices.int().sort(1).values.long()


def _largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row and the first column that has it; -inf and -1 if there are no columns."""
    rows, columns = values.shape
    if columns == 0:
        return values.new_full((rows,), -math.inf), torch.full_like(values[:, :0].sum(1), -1).long()
    best = values.detach().amax(1, keepdim=True)
    has = (values == best) | (best.isnan() & values.isnan())
    index: Any = has.to(torch.uint8).argmax(1)
    return values.gather(1, index[:, None]).squeeze(1), index
