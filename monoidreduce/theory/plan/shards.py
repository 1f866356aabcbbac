"""What a rank does under each way to split a call: its kernels, its collectives, and what it copies.

Collectives and their bytes are as in `monoidreduce.distributed`; tests compare them.
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

# By operator: its rows, which ranks gather if each has its own, and numbers of a row's state.
_ROWS = {"linear_cross_entropy": "D", "linear_distillation": "DE", "linear_log_probs": "D"}
_STATES = {"linear_cross_entropy": 3, "linear_distillation": 5, "linear_log_probs": 4}
_TARGET = 8  # bytes of an int64


@dataclass(frozen=True)
class RankPass:
    """A forward or a backward pass of the rank that takes longest.

    Attributes:
        fold: seconds of its kernels, by `monoidreduce.cost`.
        sends: its collectives, in order.
        copying: seconds in which it packs, unpacks, combines and sums what is sent.
        hidden: seconds of `sends` while its kernels run; 0 but for a ring.
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
        """Bytes."""
        return sum(send.bytes for send in self.sends)


Passes = tuple[RankPass, RankPass]


@dataclass(frozen=True)
class Call:
    """A call of `SPLITS`, and the ranks that share it. sizes: of the whole call."""

    operator: str
    sizes: dict[str, Any]
    group: Group
    dtype: torch.dtype

    def kernels(self, *, shard: bool = False, **sizes: int) -> tuple[float, float]:
        """Seconds forward and backward with these sizes in place of the whole ones.

        shard: of columns (`cost_of_shard`).
        """
        of = cost_of_shard if shard else cost
        tensors, options = call_of(self.operator, self.sizes | sizes, self.dtype)
        found: Cost = of(self.operator, *tensors, hardware=self.group.hardware, **options)
        backward = sum(p.seconds for p in found.passes if p.backward)
        return found.seconds - backward, backward

    def loss_columns(self, own_rows: bool) -> Passes:
        """Classes over ranks: states are gathered, gradients of rows are summed."""
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
        """Hidden units over ranks: results and gradients of rows are summed."""
        group, rows = self.group, self.sizes["B"]
        if own_rows:
            rows = group.ranks * group.chunk(rows)
        fold, elements = (
            self.kernels(shard=True, B=rows, K=group.chunk(self.sizes["K"])),
            rows * self.sizes["d"],
        )
        found = []
        rounds = not self.sizes.get("gated")  # tensor-core kernels, a result that is no sum of products
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
        """Rows, or sequences, over ranks, which have all weights."""
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
        """Elements of so many heads and positions."""
        return int(self.sizes["B"] * heads * positions * self.sizes["d"])

    def ulysses(self) -> Passes:
        """Heads over ranks while it runs: every tensor is exchanged, and its gradient."""
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
            # Read and written before it is sent, and after.
            found.append(RankPass(seconds, sends, group.copying(4 * sum(buffers.values()))))
        return found[0], found[1]

    def all_gather(self, layout: str) -> Passes:
        """Queries over ranks: keys and values are gathered in both passes, and their gradients summed."""
        group, length, causal = self.group, self.sizes["L"], bool(self.sizes.get("causal"))
        own = group.chunk(length)
        folds = [(own, length)]  # queries, and keys that they see
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
        # Of both gradients: that of the fold with most keys is copied, 0 elsewhere, and the others are added.
        *others, most = (n / length for _, n in folds)
        summing += 2 * group.sum * keys * (1 + most + 3 * sum(others))
        return (
            RankPass(sum(f for f, _ in each), gathers, group.copying(joined)),
            RankPass(sum(b for _, b in each), (*gathers, *sums), group.copying(joined + summing)),
        )

    def ring(self) -> Passes:
        """Queries over ranks; keys and values go round, and their gradients after them.

        A rank folds a part of the keys while the next one comes. Its results, and its gradients, are merged
        in the accumulation dtype. Causal parts are zigzag: all but the first have half of the scores.
        """
        group, own, ranks = self.group, self.group.chunk(self.sizes["L"]), self.group.ranks
        first = self.kernels(L=own, N=own)
        others = self.kernels(L=own, N=-(-own // 2), causal=False) if self.sizes.get("causal") else first
        keys, rows = (self._positions(heads, own) for heads in (self._key_heads, self.sizes["H"]))
        of_keys, of_gradients = 2 * group.size * keys, 2 * group.sum * keys
        forward = group.step("k and v", of_keys)
        backward = group.step("k, v and their gradients", of_keys + of_gradients)
        home = group.step("gradients of k and v", of_gradients)
        merges = (ranks - 1) * 3 * group.sum  # of an element, read twice and written
        return (
            _ring(first[0], others[0], forward, (), ranks, group.copying(merges * rows)),
            _ring(first[1], others[1], backward, (home,), ranks, group.copying(merges * (rows + 2 * keys))),
        )


def _ring(
    first: float, other: float, step: Send, last: Sequence[Send], ranks: int, copying: float
) -> RankPass:
    """first, other: seconds of a fold of the rank's own keys, and of another's, once these are there."""
    hidden = min(first, step.seconds) + (ranks - 2) * min(other, step.seconds)
    return RankPass(first + (ranks - 1) * other, (*(step,) * (ranks - 1), *last), copying, hidden)
