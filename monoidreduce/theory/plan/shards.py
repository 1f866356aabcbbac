"""The work of a rank for each way to split a call: kernels, collectives, and copies.

Collectives and their bytes are those of `monoidreduce.distributed`; tests compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monoidreduce.theory.costs.cost import Cost, cost, cost_of_shard
from monoidreduce.theory.costs.sizes import call_of
from monoidreduce.theory.plan.links import Group, Send

__all__ = ["Call", "RankPass"]

# Widths of the row inputs of each loss, which are gathered if rows are sharded.
_ROWS = {"linear_cross_entropy": "D", "linear_distillation": "DE", "linear_log_probs": "D"}
# Numbers in the state of a row.
_STATES = {"linear_cross_entropy": 4, "linear_distillation": 5, "linear_log_probs": 4}
_TARGET = 8  # bytes of an int64


@dataclass(frozen=True)
class RankPass:
    """The forward or backward pass of the slowest rank.

    Attributes:
        fold: seconds of its kernels, by `monoidreduce.cost`.
        sends: its collectives, in order.
        copying: seconds to pack, unpack, combine and sum what is sent.
        hidden: seconds of `sends` that overlap with kernels; 0 except for a ring.
    """

    fold: float
    sends: tuple[Send, ...]
    copying: float
    hidden: float = 0.0

    @property
    def seconds(self) -> float:
        return self.fold + sum(send.seconds for send in self.sends) + self.copying - self.hidden

    @property
    def sent(self) -> float:
        """Bytes that the rank sends."""
        return sum(send.bytes for send in self.sends)


Passes = tuple[RankPass, RankPass]


@dataclass(frozen=True)
class Call:
    """A call of an operator in `SPLITS`, and the ranks that share it. sizes: of the whole call."""

    operator: str
    sizes: dict[str, Any]
    group: Group
    dtype: torch.dtype

    def kernels(self, *, shard: bool = False, **sizes: int) -> tuple[float, float]:
        """Seconds of forward and backward kernels, with these sizes in place of those of the whole call.

        shard: the columns are a shard (`cost_of_shard`).
        """
        of = cost_of_shard if shard else cost
        tensors, options = call_of(self.operator, self.sizes | sizes, self.dtype)
        found: Cost = of(self.operator, *tensors, hardware=self.group.hardware, **options)
        backward = sum(p.seconds for p in found.passes if p.backward)
        return found.seconds - backward, backward

    def loss_columns(self, own_rows: bool) -> Passes:
        """A vocabulary-parallel loss: states are gathered, gradients of rows are summed."""
        group, (rows, columns) = self.group, (self.sizes["N"], self.sizes["V"])
        if own_rows:
            rows = group.ranks * group.chunk(rows)
        fold = self.kernels(shard=True, N=rows, V=group.chunk(columns))
        forward, backward = [], []
        widths = [self.sizes[name] for name in _ROWS[self.operator]]
        if own_rows:
            if self.operator != "linear_distillation":
                forward.append(group.gather("target", _TARGET * rows))
            forward += [group.gather(f"rows of width {width}", group.size * rows * width) for width in widths]
        states = group.sum * _STATES[self.operator] * rows
        forward.append(group.gather("states", group.ranks * states))
        if own_rows and self.operator == "linear_log_probs":
            for what in ("log_probs", "entropy")[: 1 + bool(self.sizes.get("entropy"))]:
                backward.append(group.gather(f"gradient of {what}", group.sum * rows))
        sums, summing = group.total("gradient of x", rows * widths[0], own_rows)
        combining = states * (2 + group.ranks)  # packed, then read
        return (
            RankPass(fold[0], tuple(forward), group.copying(combining)),
            RankPass(fold[1], (*backward, *sums), group.copying(summing)),
        )

    def mlp_columns(self, own_rows: bool) -> Passes:
        """An MLP with sharded hidden units: results and gradients of rows are summed."""
        group, rows = self.group, self.sizes["B"]
        if own_rows:
            rows = group.ranks * group.chunk(rows)
        fold, elements = (
            self.kernels(shard=True, B=rows, K=group.chunk(self.sizes["K"])),
            rows * self.sizes["d"],
        )
        found = []
        rounds = not self.sizes.get("gated")  # the fused tensor-core kernels return a rounded result
        for seconds, rows_of, sum_of, rounded in zip(
            fold,
            ("x", "gradient of the result"),
            ("the result", "gradient of x"),
            (rounds, False),
            strict=True,
        ):
            gathered = [group.gather(rows_of, group.size * elements)] if own_rows else []
            sums, summing = group.total(sum_of, elements, own_rows, rounded)
            found.append(RankPass(seconds, (*gathered, *sums), group.copying(summing)))
        return found[0], found[1]

    def data(self) -> Passes:
        """Data parallelism: rows or sequences are sharded, weights replicated."""
        sizes = self.sizes
        rows = "N" if "N" in sizes else "B"
        part = {rows: self.group.chunk(sizes[rows])}
        forward, backward = self.kernels(shard=False, **part)
        if self.operator == "attention":
            return RankPass(forward, (), 0.0), RankPass(backward, (), 0.0)
        weights = (
            (2 + bool(sizes.get("gated"))) * sizes["K"] * sizes["d"]
            if "K" in sizes
            else sizes["V"] * sizes["D"]
        )
        reduced = self.group.all_reduce("gradients of weights", self.group.size * weights)
        return RankPass(forward, (), 0.0), RankPass(backward, (reduced,), 0.0)

    # Attention

    @property
    def _key_heads(self) -> int:
        return int(self.sizes.get("Hkv", self.sizes["H"]))

    def _positions(self, heads: int, positions: int) -> int:
        """Number of elements of a tensor with these heads and positions."""
        return int(self.sizes["B"] * heads * positions * self.sizes["d"])

    def ulysses(self) -> Passes:
        """Attention by "ulysses": an all-to-all of every tensor and gradient shards heads meanwhile."""
        group, heads, own = self.group, self.sizes["H"], self.group.chunk(self.sizes["L"])
        key_heads = max(self._key_heads, group.ranks)
        fold = self.kernels(H=heads // group.ranks, Hkv=key_heads // group.ranks)
        of_rows, of_keys = (group.size * self._positions(n, own) for n in (heads, key_heads))
        # Ranks that share a key head sum its gradients, unrounded.
        gradients = of_keys if key_heads == self._key_heads else of_keys * group.sum / group.size
        found = []
        for seconds, buffers in (
            (fold[0], {"k": of_keys, "v": of_keys, "q": of_rows, "the result": of_rows}),
            (
                fold[1],
                {
                    "gradient of the result": of_rows,
                    "gradient of q": of_rows,
                    "gradient of k": gradients,
                    "gradient of v": gradients,
                },
            ),
        ):
            sends = tuple(group.exchange(what, buffer) for what, buffer in buffers.items())
            # Each buffer is read and written once before it is sent, and once after.
            found.append(RankPass(seconds, sends, group.copying(4 * sum(buffers.values()))))
        return found[0], found[1]

    def all_gather(self, layout: str) -> Passes:
        """Attention by "all_gather": keys and values are gathered in both passes, their gradients summed."""
        group, length, causal = self.group, self.sizes["L"], bool(self.sizes.get("causal"))
        own = group.chunk(length)
        folds = [(own, length)]  # (queries, keys that they see)
        if causal and layout == "zigzag":
            chunk = -(-length // (2 * group.ranks))
            own, folds = 2 * chunk, [(chunk, chunk), (chunk, length)]
        each = [self.kernels(L=queries, N=keys) for queries, keys in folds]
        keys = self._positions(self._key_heads, group.ranks * own)
        gathers = tuple(group.gather(what, group.size * keys) for what in "kv")
        joined = 2 * 2 * group.size * keys
        sums: list[Send] = []
        summing = 0.0
        for what in "kv":
            of_what, moved = group.total(f"gradient of {what}", keys, own=True)
            sums, summing = sums + of_what, summing + moved
        # For both gradients: the fold with most keys is copied, the rest filled with 0, other folds added.
        *others, most = (n / length for _, n in folds)
        summing += 2 * group.sum * keys * (1 + most + 3 * sum(others))
        return (
            RankPass(sum(f for f, _ in each), gathers, group.copying(joined)),
            RankPass(sum(b for _, b in each), (*gathers, *sums), group.copying(joined + summing)),
        )

    def ring(self) -> Passes:
        """Ring attention: queries are sharded, keys and values go round, followed by their gradients.

        A rank computes with one shard of keys while the next one arrives. Results and gradients are merged in
        the accumulation dtype. Causal shards are zigzag: all steps but the first have half of the scores.
        """
        group, own, ranks = self.group, self.group.chunk(self.sizes["L"]), self.group.ranks
        first = self.kernels(L=own, N=own)
        others = self.kernels(L=own, N=-(-own // 2), causal=False) if self.sizes.get("causal") else first
        keys, rows = (self._positions(heads, own) for heads in (self._key_heads, self.sizes["H"]))
        of_keys, of_gradients = 2 * group.size * keys, 2 * group.sum * keys
        forward = group.step("k and v", of_keys)
        backward = group.step("k, v and their gradients", of_keys + of_gradients)
        home = group.step("gradients of k and v", of_gradients)
        merges = (ranks - 1) * 3 * group.sum  # bytes moved per element: a merge reads two and writes one
        return (
            _ring(first[0], others[0], forward, (), ranks, group.copying(merges * rows)),
            _ring(first[1], others[1], backward, (home,), ranks, group.copying(merges * (rows + 2 * keys))),
        )


def _ring(
    first: float, other: float, step: Send, last: Sequence[Send], ranks: int, copying: float
) -> RankPass:
    """A pass of ring attention.

    first, other: kernel seconds with the rank's own keys, and with another rank's. step: one send around the
    ring.
    last: sends that follow it.
    """
    hidden = min(first, step.seconds) + (ranks - 2) * min(other, step.seconds)
    return RankPass(first + (ranks - 1) * other, (*(step,) * (ranks - 1), *last), copying, hidden)
