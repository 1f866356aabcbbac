"""A program's statistics as a `Monoid` over torch tensors, for the law check, `fold` and `map_reduce`.

The state of some elements is the result of a row with only these elements, so projection is trivial.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from monoidreduce.folds.program.graph import Node
from monoidreduce.folds.program.program import parse
from monoidreduce.folds.torch.reader import largest_in_order, statistics
from monoidreduce.monoids import Monoid

__all__ = ["StatisticsMonoid"]


@lru_cache(64)
def _state(text: str) -> Any:
    """The NamedTuple class of a program's states."""
    program = parse(text)
    fields = []
    for i, softmax in enumerate(program.softmaxes):
        fields += [f"lse{i}", *(f"mean{i}_{k}" for k in range(len(softmax) - 1))]
    fields += [f"total{i}" for i in range(len(program.totals))]
    fields += [f"largest{i}" for i in range(len(program.largest))]
    fields += [f"carried{i}" for i in range(len(program.carried))]
    fields += [f"entropy{i}" for i in range(len(program.entropies))]
    fields += [f"variance{i}" for i in range(len(program.variances))]
    fields += [f"most{i}_{rank}" for i, (_, k) in enumerate(program.most) for rank in range(k)]
    fields += [f"at{i}" for i in range(len(program.largest))]
    fields += [f"count{i}" for i in range(len(program.counts))]
    fields += [f"at_most{i}_{rank}" for i, (_, k) in enumerate(program.most) for rank in range(k)]
    return namedtuple("StatisticsState", fields)


class StatisticsMonoid(Monoid[Any]):
    """The monoid of a program, given as text. In an empty state the column of a largest value is `_LAST`."""

    def __init__(self, text: str) -> None:
        self.program = parse(text)
        self.State = _state(text)

    def of_scores(self, score: Tensor, leaf: Callable[[Node], Tensor], first: int = 0) -> Any:
        """The states of the rows of scores [rows, columns]; see `reader.statistics`."""
        values, indices, _ = statistics(self.program, score, leaf, first=first)
        return self.State(*values, *self._placed(indices, 0))

    def of_results(self, values: Tensor, low: Tensor, indices: Tensor, first: int) -> Any:
        """The state, in float64, of results that the op returned for the columns from `first` on."""
        reals = [value.double() for value in values]
        for field, word in zip(self.log_sum_exps, low, strict=True):
            reals[field] = torch.where(reals[field].isfinite(), reals[field] + word, reals[field])
        return self.State(*reals, *self._placed(indices, first))

    def _placed(self, indices: Tensor, first: int) -> list[Tensor]:
        """The integer fields: columns count from `first`, and that of no column is _LAST."""
        largest, counts = len(self.program.largest), len(self.program.counts)
        return [
            i if largest <= k < largest + counts else torch.where(i < 0, _LAST, i + first)
            for k, i in enumerate(indices)
        ]

    @property
    def log_sum_exps(self) -> list[int]:
        """Indices of the fields that are log-sum-exps."""
        return [first for first, _ in self._softmaxes()]

    def combine_sums(self, states: Sequence[Any], total: Any, sums: Tensor, widths: list[int]) -> Tensor:
        """The payload sums of all states together, in float64: [rows, sum of widths].

        total: the combination of the states. sums: those of each state. widths: of each payload sum.
        """
        found = []
        of_states = [torch.split(of_state.double(), widths, 1) for of_state in sums]
        for number, (softmax, _) in enumerate(self.program.payloads):
            parts = [of_state[number] for of_state in of_states]
            if softmax >= 0:
                lse = self.log_sum_exps[softmax]
                parts = [
                    _part(_share(state[lse], total[lse])[:, None], part)
                    for state, part in zip(states, parts, strict=True)
                ]
            found.append(torch.stack(parts).sum(0))
        return torch.cat(found, 1) if found else sums[0].double()

    def project(self, state: Any) -> tuple[Tensor, Tensor]:
        """Values and indices of the rows, as the op returns them."""
        program = self.program
        values, indices = state[: program.values], state[program.values :]
        dtype, rows = state[0].dtype if values else torch.float32, state[0].shape
        return (
            torch.stack(values) if values else torch.empty((0, *rows), dtype=dtype, device=state[0].device),
            torch.stack([torch.where(i == _LAST, -1, i) for i in indices])
            if indices
            else torch.empty((0, *rows), dtype=torch.int64, device=state[0].device),
        )

    def identity(self, like: Any) -> Any:
        fields = [torch.zeros_like(field) for field in like]
        for first, _ in self._softmaxes():
            fields[first] = torch.full_like(like[first], -math.inf)
        for *values, at in self._largest():
            for value in values:
                fields[value] = torch.full_like(like[value], -math.inf)
            fields[at] = torch.full_like(like[at], _LAST)
        for ranks, places in self._most():
            for value, at in zip(ranks, places, strict=True):
                fields[value] = torch.full_like(like[value], -math.inf)
                fields[at] = torch.full_like(like[at], _LAST)
        return self.State(*fields)

    def combine(self, a: Any, b: Any) -> Any:
        fields = [x + y for x, y in zip(a, b, strict=True)]
        for first, means in self._softmaxes():
            lse = torch.logaddexp(a[first], b[first])
            share_a, share_b = _share(a[first], lse), _share(b[first], lse)
            fields[first] = lse
            for k in means:
                fields[k] = _part(share_a, a[k]) + _part(share_b, b[k])
            for entropy in self._entropy_of(first):
                fields[entropy] = sum(
                    _part(share, x[entropy] - logsigmoid(x[first] - y[first]))
                    for share, x, y in ((share_a, a, b), (share_b, b, a))
                )
            for variance, mean in self._variances(means):
                fields[variance] = sum(
                    _part(share, x[variance] + (x[mean] - fields[mean]) ** 2)
                    for share, x in ((share_a, a), (share_b, b))
                )
        for value, *carried, at in self._largest():
            take = _is_larger(b[value], b[at], a[value], a[at])
            for field in (value, *carried, at):
                fields[field] = torch.where(take, b[field], a[field])
        for ranks, places in self._most():
            values = torch.stack([x[value] for x in (a, b) for value in ranks], -1)
            columns = torch.stack([x[at] for x in (a, b) for at in places], -1)
            shape, k = values.shape[:-1], len(ranks)
            of_values, of_columns = largest_in_order(values.flatten(0, -2), columns.flatten(0, -2), k)
            for rank, (value, at) in enumerate(zip(ranks, places, strict=True)):
                fields[value], fields[at] = of_values[:, rank].view(shape), of_columns[:, rank].view(shape)
        return self.State(*fields)

    def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
        fields = list(g)
        for first, means in self._softmaxes():
            share = _share(a[first], c[first])
            inner = g[first]
            for k in means:
                inner = inner + g[k] * (a[k] - c[k])
                fields[k] = share * g[k]
            for entropy in self._entropy_of(first):
                inner = inner + g[entropy] * (a[entropy] - (a[first] - c[first]) - c[entropy])
                fields[entropy] = share * g[entropy]
            for variance, mean in self._variances(means):
                deviation = a[mean] - c[mean]
                inner = inner + g[variance] * (a[variance] + deviation**2 - c[variance])
                fields[variance] = share * g[variance]
                fields[mean] = fields[mean] + 2 * share * g[variance] * deviation
            fields[first] = torch.where(share == 0, 0.0, share * inner)
        for *values, at in self._largest():
            for value in values:
                fields[value] = torch.where(a[at] == c[at], g[value], 0.0)
        for ranks, places in self._most():
            for value, at in zip(ranks, places, strict=True):
                of_ranks = zip(ranks, places, strict=True)
                hits = [
                    torch.where((a[at] == c[of]) & (a[at] != _LAST), g[rank], 0.0) for rank, of in of_ranks
                ]
                fields[value] = torch.stack(hits).sum(0)
        return self.State(*fields)

    def _softmaxes(self) -> list[tuple[int, range]]:
        """For each softmax: the index of its log-sum-exp field, and those of its means."""
        found, field = [], 0
        for softmax in self.program.softmaxes:
            found.append((field, range(field + 1, field + len(softmax))))
            field += len(softmax)
        return found

    def _largest(self) -> list[tuple[int, ...]]:
        """For each largest value, the indices of its fields: the value, the value that it carries (if any),
        and the column."""
        first, count = self.program.first_largest, len(self.program.largest)
        carried = [*range(first + count, first + count + len(self.program.carried))]
        return [(first + i, *carried[i : i + 1], self.program.values + i) for i in range(count)]

    def _most(self) -> list[tuple[range, range]]:
        """For each pair of `most`: the indices of its value fields and of its column fields, by rank."""
        program, found = self.program, []
        value = program.first_of_most
        at = program.values + len(program.largest) + len(program.counts)
        for _, k in program.most:
            found.append((range(value, value + k), range(at, at + k)))
            value, at = value + k, at + k
        return found

    def _entropy_of(self, lse: int) -> list[int]:
        """The index of the entropy field of a softmax with this log-sum-exp field, if it is wanted."""
        softmax, first = self.log_sum_exps.index(lse), self.program.first_entropy
        return [first + e for e, of in enumerate(self.program.entropies) if of == softmax]

    def _variances(self, means: range) -> list[tuple[int, int]]:
        """The indices of variance and mean for the fields `means` of a softmax that have a variance."""
        program = self.program
        pairs = ((program.first_variance + n, program.mean_of(n)) for n in range(len(program.variances)))
        return [pair for pair in pairs if pair[1] in means]


_LAST = torch.iinfo(torch.int64).max


def _share(lse: Tensor, of: Tensor) -> Tensor:
    """exp(lse - of), a fraction of a sum of weights; 0 if lse is -inf."""
    return torch.where(lse == -math.inf, 0.0, torch.exp(lse - torch.where(of == -math.inf, 0.0, of)))


def _part(share: Tensor, mean: Tensor) -> Tensor:
    return torch.where(share == 0, 0.0, share * mean)


def _is_larger(x: Tensor, j: Tensor, y: Tensor, k: Tensor) -> Tensor:
    tie = (x == y) | (x.isnan() & y.isnan())
    return (x > y) | (x.isnan() & ~y.isnan()) | (tie & (j < k))
