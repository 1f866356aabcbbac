"""Wide heads, as in `attention_wide`, whose queries see a band of the keys: causal masks and windows.

Forward, a block of queries is multiplied with the keys that some of them see; backward, a block of keys with
the queries that see some of them. In a block the programs compare a key's number with the query's bounds, so
that weights and local gradients of excluded pairs are exactly 0.

The products of a block read what excluded lines hold, and 0 times NaN is NaN. So their factors have zeros in
place of numbers that are not finite (`Factor`). What those make of a result is added where a line sees some:
infinities and NaN as they are, in the elements where the factor has them, if not in that line. Torch
multiplies, many heads at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from monoidreduce._ops.local_gradients import UNIT_UPSTREAM, add_product
from monoidreduce._ops.memory import statistics

__all__ = ["Band", "backward", "forward"]

# Of rows or keys. Smaller blocks multiply fewer excluded pairs. 2048 are eight tiles: with as many of the
# other side they are 64, for the 66 clusters of a Hopper GPU.
BLOCK, LEAST_BLOCK = 2048, 256
_COUNTS = (0, 2, 0, 0)  # of data: a query's bounds


@dataclass(frozen=True)
class Band:
    """The columns that rows see: `left` and `right` of the one that a row is aligned with; -1 is all.

    The last row is aligned with the last column.
    """

    rows: int
    columns: int
    left: int
    right: int

    @property
    def transposed(self) -> Band:
        """The rows that see each column."""
        return Band(self.columns, self.rows, self.right, self.left)

    @property
    def is_whole(self) -> bool:
        """Does each row see all columns."""
        return self._first(self.rows - 1) == 0 and self._stop(0) == self.columns

    def _first(self, row: int) -> int:
        first = row + self.columns - self.rows - self.left
        return 0 if self.left < 0 else min(max(first, 0), self.columns)

    def _stop(self, row: int) -> int:
        stop = row + self.columns - self.rows + self.right + 1
        return self.columns if self.right < 0 else min(max(stop, 0), self.columns)

    def seen(self, rows: slice) -> slice:
        """The columns that some of these rows see, and up to 7 more on either side.

        So the sums of products have whole eights of terms, where the columns have.
        """
        first, stop = self._first(rows.start), self._stop(rows.stop - 1)
        if first >= stop:
            return slice(0, 0)
        return slice(first // 8 * 8, min(-(-stop // 8) * 8, self.columns))

    def bounds(self, device: torch.device) -> Tensor:
        """[2, rows]: the first column that each row sees, and one past the last."""
        aligned = torch.arange(self.rows, device=device) + (self.columns - self.rows)
        first = aligned - self.left if self.left >= 0 else torch.zeros_like(aligned)
        stop = aligned + self.right + 1 if self.right >= 0 else torch.full_like(aligned, self.columns)
        return torch.stack((first, stop)).clamp_(0, self.columns)

    def sees(self, marked: Tensor) -> Tensor:
        """[heads, rows]: does a row see a column that is marked, of [heads, columns]."""
        before = F.pad(marked.cumsum(-1), (1, 0))
        first, stop = self.bounds(marked.device)
        return before.index_select(1, stop) > before.index_select(1, first)


class Factor(NamedTuple):
    """Of a product of local gradients with lines [heads, lines, width].

    Attributes:
        finite: the lines, with 0 in place of what is not finite.
        marked: [heads, lines]: was there something in the line.
        others: [heads, width]: the sum of what was not finite.
    """

    finite: Tensor
    marked: Tensor
    others: Tensor

    @classmethod
    def of(cls, lines: Tensor) -> Factor:
        least, most = torch.aminmax(lines, dim=-1)
        marked = ~(least.isfinite() & most.isfinite())
        others = sum(t.masked_fill(t.isfinite(), 0.0) for t in torch.aminmax(lines, dim=-2))
        assert isinstance(others, Tensor)
        finite = torch.empty_like(lines, memory_format=torch.contiguous_format)
        return cls(torch.nan_to_num(lines, 0.0, 0.0, 0.0, out=finite), marked, others)

    def beside(self, sees: Tensor, lost: Tensor | None = None, signed: bool = True) -> Tensor:
        """[heads, results, width]: what is to be added to a product, for what is not in `finite`.

        sees: [heads, results]: has the result a line that is marked. lost: or is it NaN throughout.
        signed: are local gradients not negative, so that they keep the sign of an infinity.
        """
        others = (self.others if signed else self.others * 0.0)[:, None]
        if lost is None:
            return torch.where(sees[..., None], others, 0.0)
        nothing = torch.where(lost, torch.nan, 0.0).to(others.dtype)
        return torch.where((sees & ~lost)[..., None], others, nothing[..., None])


class _Shape(NamedTuple):
    """Of a call: the band of a query head, and how many query heads share keys."""

    band: Band
    shared: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, left: int, right: int) -> _Shape:
        return cls(Band(q.shape[2], k.shape[2], left, right), q.shape[1] // k.shape[1])

    def rows(self, t: Tensor) -> Tensor:
        """t [heads of queries, M, ...] as rows of heads of keys [heads, M shared, ...], query by query."""
        return self.by_keys(t).transpose(1, 2).flatten(1, 2)

    def by_keys(self, t: Tensor) -> Tensor:
        """t [heads of queries, M, ...] by heads of keys: [heads, shared, M, ...], the same memory."""
        return t.view(-1, self.shared, *t.shape[1:])

    def heads(self, t: Tensor) -> Tensor:
        """Rows [heads, queries shared, ...] by heads of queries: [heads, shared, queries, ...]."""
        return t.view(len(t), -1, self.shared, *t.shape[2:]).transpose(1, 2)

    def of_rows(self, queries: slice) -> slice:
        return slice(queries.start * self.shared, queries.stop * self.shared)

    def bounds(self, device: torch.device) -> Tensor:
        """[2, M shared]: of each row."""
        return self.band.bounds(device).repeat_interleave(self.shared, dim=1)

    def sees(self, marked: Tensor) -> Tensor:
        """[heads, M shared]: does a row see a key that is marked, of [heads, N]."""
        return self.band.sees(marked).repeat_interleave(self.shared, dim=1)

    def seen_by(self, marked: Tensor) -> Tensor:
        """[heads, N]: does a row that is marked, of [heads, M shared], see the key."""
        return self.band.transposed.sees(marked.view(len(marked), -1, self.shared).any(-1))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    left: int,
    right: int,
    workspace: int,
    results: tuple[Tensor, ...],
) -> None:
    """Write out, lse, lse_low and, unless it is empty, out_low. workspace: bytes."""
    from monoidreduce.program import cuda

    out, lse, lse_low, out_low = results
    shape, program = _Shape.of(q, k, left, right), _programs()[0]
    band, bounds = shape.band, shape.bounds(q.device)

    def bytes_of(queries: int) -> int:
        rows, keys = queries * shape.shared, max(_length(band.seen(b)) for b in _blocks(band.rows, queries))
        copies = v[0, 0].numel() + band.rows * shape.shared * q.shape[3]
        return 2 * rows * keys + 6 * rows * v.shape[3] + 2 * copies

    step, at_once = _fitting(shape.shared, workspace, bytes_of)
    for batch, heads in _parts(k, at_once):
        rows, keys, values = shape.rows(_queries(q, batch, heads, shape)), k[batch, heads], v[batch, heads]
        factor, count = Factor.of(values), len(keys)
        sees = shape.sees(factor.marked)
        known = lse.new_empty((count, 3, rows.shape[1]))  # lse, its low word and the upstream gradient
        known[:, 0], known[:, 1], known[:, 2] = -torch.inf, 0.0, UNIT_UPSTREAM / scale
        to, to_low = (
            shape.by_keys(_queries(t, batch, heads, shape)) if t.numel() else None for t in (out, out_low)
        )
        assert to is not None
        for block in _blocks(band.rows, step):
            seen, lines = band.seen(block), shape.of_rows(block)
            if seen.stop == 0:
                to[:, :, block] = 0.0
                if to_low is not None:
                    to_low[:, :, block] = 0.0
                continue
            data = (None, None, bounds[:, lines] - seen.start, None)
            weights = _local(q, count, _length(lines), _length(seen))
            for n in range(count):
                operands = (rows[n, lines], keys[n, seen], None, None)
                of_rows = known[n, :, lines]
                folded = (of_rows[0:1], of_rows[1:2], bounds[:0, lines])
                cuda.fold(program, operands, data, _COUNTS, folded, scale, (None, None))
                cuda.local_gradients(
                    program, operands, (of_rows, *data[1:]), _COUNTS, scale, workspace, weights[n]
                )
            total = statistics(q, count, _length(lines), v.shape[3])
            add_product(total, weights, factor.finite[:, seen], beta=0)
            total, others = shape.heads(total), shape.heads(factor.beside(sees[:, lines]))
            torch.add(others, total, alpha=1 / UNIT_UPSTREAM, out=to[:, :, block])
            if to_low is not None:
                lost_in_rounding = total * (1 / UNIT_UPSTREAM) - to[:, :, block]
                torch.nan_to_num(lost_in_rounding, 0.0, 0.0, 0.0, out=to_low[:, :, block])
        for t, found in ((lse, known[:, 0]), (lse_low, known[:, 1])):
            shape.by_keys(_queries(t, batch, heads, shape)).copy_(shape.heads(found))


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_rows: tuple[Tensor, Tensor, Tensor, Tensor | None],
    scale: float,
    left: int,
    right: int,
    workspace: int,
    needed: list[bool],
) -> list[Tensor | None]:
    """The gradients by q, k and v that are needed.

    of_rows: lse, lse_low, the sum of grad_out times out, and the gradient by lse, each [B, H, M].
    workspace: bytes.
    """
    from monoidreduce.program import cuda

    lse, lse_low, centre, grad_lse = of_rows
    shape, program = _Shape.of(q, k, left, right), _programs()[1]
    band, bounds = shape.band, shape.bounds(q.device)
    found = [t.new_empty(t.shape) if wanted else None for t, wanted in zip((q, k, v), needed, strict=False)]
    of_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    # The second score and the mean are scaled too.
    of_queries = (lse, scale * centre, lse_low, of_lse, torch.full_like(lse, 1 / scale))

    def bytes_of(keys: int) -> int:
        by_column = band.transposed
        seeing = max(_length(by_column.seen(b)) for b in _blocks(band.columns, keys)) * shape.shared
        copies = k[0, 0].numel() + band.rows * shape.shared * (4 * q.shape[3] + 2 * v.shape[3])
        return 4 * seeing * keys + 6 * keys * max(q.shape[3], v.shape[3]) + 2 * copies

    step, at_once = _fitting(1, workspace, bytes_of)
    for batch, heads in _parts(k, at_once):
        rows, upstream = (shape.rows(_queries(t, batch, heads, shape)) for t in (q, grad_out))
        keys, values, count = k[batch, heads], v[batch, heads], heads.stop - heads.start
        known = torch.stack([shape.rows(_queries(t, batch, heads, shape)) for t in of_queries], 1)
        lost = shape.seen_by((known[:, 0] == torch.inf) | known[:, 0].isnan())
        of_keys = Factor.of(keys) if needed[0] else None
        d_rows = statistics(q, *rows.shape).zero_() if needed[0] else None
        of_columns = []
        for which, (lines, t) in enumerate(((rows, found[1]), (upstream, found[2]))):
            if t is not None:
                factor = Factor.of(lines)
                of_columns.append((which, factor, shape.seen_by(factor.marked), t[batch, heads]))
        for block in _blocks(band.columns, step):
            seeing = shape.of_rows(band.transposed.seen(block))
            if seeing.stop == 0:
                for *_, to in of_columns:
                    to[:, block] = 0.0
                continue
            data = (None, bounds[:, seeing] - block.start, None)
            local = [_local(q, count, _length(seeing), _length(block)) for _ in range(2)]
            for n in range(count):
                operands = (rows[n, seeing], keys[n, block], upstream[n, seeing], values[n, block])
                of_pairs = (known[n, :, seeing], *data)
                outs = (local[0][n], local[1][n])
                cuda.local_gradients(program, operands, of_pairs, _COUNTS, scale, workspace, *outs)
            if d_rows is not None and of_keys is not None:
                add_product(d_rows[:, seeing], local[0], of_keys.finite[:, block])
            for which, factor, sees, to in of_columns:
                total = statistics(q, count, _length(block), to.shape[-1])
                add_product(total, local[which].mT, factor.finite[:, seeing], beta=0)
                beside = factor.beside(sees[:, block], lost[:, block], signed=which == 1)
                torch.add(beside, total, out=to[:, block])
        if d_rows is not None and of_keys is not None and found[0] is not None:
            beside = of_keys.beside(shape.sees(of_keys.marked), signed=False)
            to = shape.by_keys(_queries(found[0], batch, heads, shape))
            torch.add(shape.heads(beside), shape.heads(d_rows), out=to)
    return found


def _local(like: Tensor, heads: int, rows: int, columns: int) -> Tensor:
    """Room for local gradients [heads, rows, columns]: rows start on 16 bytes."""
    return like.new_empty((heads, rows, -(-columns // 8) * 8))[:, :, :columns]


def _length(lines: slice) -> int:
    return int(lines.stop - lines.start)


def _blocks(count: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


def _fitting(shared: int, workspace: int, bytes_of: Callable[[int], int]) -> tuple[int, int]:
    """The positions of a block, each of so many lines, and the heads that the workspace has room for."""
    step = max(BLOCK // shared, 1)
    while bytes_of(step) > workspace and step * shared > LEAST_BLOCK:
        step = -(-step // 2)
    return step, max(workspace // bytes_of(step), 1)


def _parts(k: Tensor, at_once: int) -> Iterator[tuple[int, slice]]:
    """The heads of keys that come together: of which element of the batch, and which."""
    return ((batch, heads) for batch in range(k.shape[0]) for heads in _blocks(k.shape[1], at_once))


def _queries(t: Tensor, batch: int, heads: slice, shape: _Shape) -> Tensor:
    """Of t [B, H, M, ...] the heads of queries that read some heads of keys."""
    return t[batch, shape.of_rows(heads)]


@cache
def _programs() -> tuple[str, str]:
    """Of the forward and of the backward pass. first, stop: a query's bounds."""
    from monoidreduce import stat
    from monoidreduce.program.tracing import trace

    def weights(score: Any, column: Any, first: Any, stop: Any) -> dict[str, Any]:
        kept = (column >= first) & (column < stop)
        return {"lse": stat.softmax(torch.where(kept, score, -torch.inf)).logsumexp}

    def mean(score: Any, other: Any, column: Any, first: Any, stop: Any) -> dict[str, Any]:
        kept = (column >= first) & (column < stop)
        weights = stat.softmax(torch.where(kept, score, -torch.inf))
        return {"lse": weights.logsumexp, "mean": weights.mean(torch.where(kept, other, 0.0))}

    rows = {"first": "index", "stop": "index"}
    return trace(weights, rows, {}).text, trace(mean, rows, {}).text
