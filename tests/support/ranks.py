"""Ranks for tests: gloo processes that start once and call the functions that tests send them.

`on_ranks(n, function, ...)` calls a function of a test module on n ranks. `OverRanks` makes an operator with
sharded columns a function of whole tensors, for `tolerance.check_operator`.
"""

from __future__ import annotations

import atexit
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tolerance import as_outputs, content
from torch import Tensor

import monoidreduce as mr
from monoidreduce.distributed.operators import COLUMN_AXES

MOST_RANKS = 4
SECONDS = 40  # limit of a call; beyond it the processes are killed
REPLICATED = ("bias", "sinks", "cu_seqlens_q", "cu_seqlens_k")  # by attention over ranks
ROWS = ("x", "target", "target_probs", "kept", "temperature", "mask", "teacher_x", "a")
OF_RANKS = {field.name for field in fields(mr.Ranks)} - {"group"}


def over(group: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call over a group: those of mr.Ranks become its argument `ranks`."""
    of_ranks = {name: value for name, value in options.items() if name in OF_RANKS}
    others = {name: value for name, value in options.items() if name not in OF_RANKS}
    return {"ranks": mr.Ranks(group, **of_ranks) if of_ranks else group} | others


class Ranks:
    """MOST_RANKS processes. Each runs `_serve`."""

    def __init__(self) -> None:
        context = get_context("spawn")
        store = str(Path(tempfile.mkdtemp()) / "store")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        pipes = [context.Pipe() for _ in range(MOST_RANKS)]
        self.ends = [end for end, _ in pipes]
        self.processes = [
            context.Process(target=_serve, args=(rank, store, end), daemon=True)
            for rank, (_, end) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for end in self.ends:
            end.recv_bytes()  # it has started

    def call(self, count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call function(group, *args) on the first `count` ranks.

        Args of type `Each` differ between ranks.
        """
        for rank, end in enumerate(self.ends[:count]):
            of_rank = [a.of_ranks[rank] if isinstance(a, Each) else a for a in args]
            end.send_bytes(pickle.dumps((count, function, of_rank)))
        answers = []
        for rank, end in enumerate(self.ends[:count]):
            if not end.poll(SECONDS):
                self.end()
                raise TimeoutError(f"rank {rank} of {count} gave no answer in {SECONDS} s")
            answers.append(pickle.loads(end.recv_bytes()))
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            raise failures[0]
        return answers

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        _ranks.cache_clear()


class Each:
    """An argument that differs between ranks."""

    def __init__(self, of_ranks: list[Any]) -> None:
        self.of_ranks = of_ranks


@cache
def _ranks() -> Ranks:
    ranks = Ranks()
    atexit.register(ranks.end)
    return ranks


def on_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of function(group, *args) on each of `count` ranks. The function must be importable."""
    return _ranks().call(count, function, *args)


def _serve(rank: int, store: str, end: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, MOST_RANKS), rank=rank, world_size=MOST_RANKS,
        timeout=timedelta(seconds=SECONDS / 2),
    )  # fmt: skip
    groups = {count: dist.new_group(list(range(count))) for count in range(1, MOST_RANKS + 1)}
    end.send_bytes(b"")
    while True:
        count, function, args = pickle.loads(end.recv_bytes())
        try:
            answer = function(groups[count], *args)
        except BaseException as error:
            error.add_note(traceback.format_exc()) if hasattr(error, "add_note") else None
            answer = error
        end.send_bytes(pickle.dumps(answer))


# Operators over ranks as functions of whole tensors


def split(t: Tensor, axis: int, count: int, padding: int | None = None) -> list[Tensor]:
    """Like torch.chunk, but always `count` parts, some of which may be empty.

    padding: pad all parts with NaN to the same length, that of `padding` more columns in total.
    """
    size = t.shape[axis]
    length = -(-size // count) if padding is None else -(-(size + padding) // count)
    parts = [
        t.narrow(axis, min(i * length, size), min(length, max(size - i * length, 0))) for i in range(count)
    ]
    if padding is None:
        return parts
    shapes = [[*p.shape[:axis], length - p.shape[axis], *p.shape[axis + 1 :]] for p in parts]
    return [torch.cat((p, p.new_full(s, torch.nan)), axis) for p, s in zip(parts, shapes, strict=True)]


_kept: dict[str, Any] = {}


def _forward(
    group: Any, operator: str, inputs: dict[str, Tensor], options: dict[str, Any], wanted: Any
) -> Any:
    leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in inputs.items()}
    outputs = as_outputs(getattr(mr, operator)(**leaves, **over(group, options)))
    _kept.update(leaves=leaves, outputs=outputs)
    return [y.detach().clone() for y in outputs]


def _backward(group: Any, upstream: list[Tensor | None], wanted: list[str]) -> list[Tensor]:
    followed = [(y, g) for y, g in zip(_kept["outputs"], upstream, strict=True) if g is not None]
    leaves = [_kept["leaves"][name] for name in wanted]
    found = torch.autograd.grad([y for y, _ in followed], leaves, [g for _, g in followed], allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


def same_bits(tensors: list[Tensor]) -> Tensor:
    """The first tensor, asserted to have the same bits on all ranks."""
    first, *others = tensors
    for other in others:
        assert torch.equal(content(first), content(other)), "ranks differ"
    return first


class OverRanks:
    """mr.<operator> with its columns sharded over ranks, called in this process with whole tensors.

    Args:
        ranks: number of ranks.
        padding: as in `split`; calls pass the number of `classes` without padding.
        own_rows: shard rows too (sequence parallel).
    """

    def __init__(
        self, operator: str, ranks: int, padding: int | None = None, own_rows: bool = False, **options: Any
    ) -> None:
        self.operator, self.ranks, self.padding, self.own_rows = operator, ranks, padding, own_rows
        self.options = options | ({"sequence_parallel": True} if own_rows else {})

    def __call__(self, **given: Any) -> Any:
        inputs = {name: t for name, t in given.items() if isinstance(t, Tensor)}
        options = {name: value for name, value in given.items() if name not in inputs} | self.options
        options |= self.sizes(inputs)
        found = _OverRanks.apply(self, options, tuple(inputs), *inputs.values())
        return found if len(found) > 1 else found[0]

    def sizes(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """Options for the number of columns of all ranks together."""
        return (
            {} if self.operator == "mlp" else {"classes": inputs["b" if "b" in inputs else "weight"].shape[0]}
        )

    def parts(self, name: str, t: Tensor) -> list[Tensor]:
        if name in COLUMN_AXES:
            return split(t, COLUMN_AXES[name], self.ranks, self.padding)
        return list(t.chunk(self.ranks)) if self.own_rows and name in ROWS else [t] * self.ranks

    def whole(self, name: str, parts: list[Tensor], like: Tensor) -> Tensor:
        if name in COLUMN_AXES:
            if self.padding is not None:
                length = parts[0].shape[COLUMN_AXES[name]]
                ends = [min(length, max(like.shape[0] - i * length, 0)) for i in range(self.ranks)]
                assert not any(p[end:].any() for p, end in zip(parts, ends, strict=True)), "of padding"
                parts = [p[:end] for p, end in zip(parts, ends, strict=True)]
            return torch.cat(parts, COLUMN_AXES[name])
        return torch.cat(parts) if self.own_rows and name in ROWS else same_bits(parts)

    def output(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if self.own_rows and parts[0].dim() else same_bits(parts)

    def upstream(self, grad: Tensor) -> list[Tensor]:
        return list(grad.chunk(self.ranks)) if self.own_rows and grad.dim() else [grad] * self.ranks


class AttentionOverRanks(OverRanks):
    """mr.attention with its sequence sharded over ranks, called in this process with whole tensors."""

    operator = "attention"

    def __init__(self, ranks: int, layout: str, uneven: bool = False, **options: Any) -> None:
        super().__init__(self.operator, ranks, **options, layout=layout)
        self.layout, self.uneven = layout, uneven

    def axis(self, t: Tensor) -> int:
        """The axis of positions."""
        return 2

    def sizes(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        return {"length": inputs["q"].shape[self.axis(inputs["q"])]} if self.uneven else {}

    def sequence(self, t: Tensor, axis: int) -> list[Tensor]:
        """Each rank's part of an axis, in this layout."""
        if self.layout == "contiguous":
            return split(t, axis, self.ranks)
        chunks = split(t, axis, 2 * self.ranks)
        return [torch.cat((chunks[i], chunks[-1 - i]), axis) for i in range(self.ranks)]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """The whole tensor, of the ranks' parts: the inverse of `sequence`."""
        axis = self.axis(parts[0])
        at = torch.cat(self.sequence(torch.arange(sum(t.shape[axis] for t in parts)), 0))
        return torch.cat(parts, axis).index_select(axis, at.argsort())

    def parts(self, name: str, t: Tensor) -> list[Tensor]:
        return [t] * self.ranks if name in REPLICATED else self.sequence(t, self.axis(t))

    def whole(self, name: str, parts: list[Tensor], like: Tensor) -> Tensor:
        return same_bits(parts) if name in REPLICATED else self.joined(parts)

    def output(self, parts: list[Tensor]) -> Tensor:
        return self.joined(parts)

    def upstream(self, grad: Tensor) -> list[Tensor]:
        return self.sequence(grad, self.axis(grad))


class VarlenOverRanks(AttentionOverRanks):
    """mr.attention_varlen with its tokens sharded over ranks, called in this process with whole tensors."""

    operator = "attention_varlen"

    def axis(self, t: Tensor) -> int:
        return 0 if t.dim() == 3 else 1  # 1 for lse, [H, T]


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: OverRanks, options: Any, names: tuple[str, ...], *tensors: Tensor) -> Any:
        wanted = [name for name, need in zip(names, ctx.needs_input_grad[3:], strict=True) if need]
        shards = {name: of.parts(name, t.detach()) for name, t in zip(names, tensors, strict=True)}
        inputs = Each([{name: parts[rank] for name, parts in shards.items()} for rank in range(of.ranks)])
        found = on_ranks(of.ranks, _forward, of.operator, inputs, options, wanted)
        ctx.of, ctx.names, ctx.wanted = of, names, wanted
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        outputs = [list(parts) for parts in zip(*found, strict=True)]
        return tuple(map(of.output, outputs))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        of = ctx.of
        sent = [[None] * of.ranks if g is None else of.upstream(g) for g in upstream]
        of_ranks = Each([[parts[rank] for parts in sent] for rank in range(of.ranks)])
        found = on_ranks(of.ranks, _backward, of_ranks, ctx.wanted)
        parts = dict(zip(ctx.wanted, map(list, zip(*found, strict=True)), strict=True))
        like = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        gradients = (of.whole(n, parts[n], like[n]) if n in parts else None for n in ctx.names)
        return None, None, None, *gradients
