"""Overhead of a call: its time without the engine's work, while autograd records.

A problem without rows leaves the engine nothing to do. All else runs as in any other call: checks, dispatch,
allocation, recording for autograd, the crossing into C++. Its time is the overhead. It is compared with a
call with one row, and with torch's.

A call over ranks also launches collectives and combines states. Its host time is compared with that of the
same call without a process group.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from bench import folds, log_probs
from monoidreduce.distributed import messages

LIMIT_US = 30.0  # for a call that records
RANKS_LIMIT_US = 60.0  # for the time that a process group adds
CALLS = 50  # few, as a round of a few milliseconds is rarely interrupted
ROUNDS = 101


@dataclass(frozen=True)
class Call:
    """The same call of this library and of torch, and the leaves that get gradients."""

    monoidreduce: Callable[[], Tensor]
    torch: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]


def doubled(score: Any, b: Any, h: Any, row: Any, column: Any) -> Any:
    """A score_mod."""
    return 2 * score


def calls(device: torch.device, rows: int) -> dict[str, Call]:
    """A call of each operator with `rows` rows; every other size is 16."""

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    q, k, v = leaf(1, 1, rows, 16), leaf(1, 1, 16, 16), leaf(1, 1, 16, 16)
    packed_q, packed_k, packed_v = leaf(rows, 1, 16), leaf(16, 1, 16), leaf(16, 1, 16)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (rows, 16))
    # On a GPU in 16 bits, as most functions of a score are used.
    modified = torch.bfloat16 if device.type == "cuda" else torch.float32
    modified_q, modified_k, modified_v = (leaf(1, 1, n, 16, dtype=modified) for n in (rows, 16, 16))
    x, weight, w2, teacher = leaf(rows, 16), leaf(16, 16), leaf(16, 16), torch.randn(16, 16, device=device)
    teacher_x, target = (
        torch.randn(rows, 16, device=device),
        torch.zeros(rows, dtype=torch.long, device=device),
    )
    return {
        "attention": Call(
            lambda: mr.attention(q, k, v),
            lambda: F.scaled_dot_product_attention(q, k, v),
            (q, k, v),
        ),
        "attention_varlen": Call(
            lambda: mr.attention_varlen(packed_q, packed_k, packed_v, cu_q, cu_k),
            lambda: F.scaled_dot_product_attention(
                *(t.transpose(0, 1)[None] for t in (packed_q, packed_k, packed_v))
            )[0].transpose(0, 1),
            (packed_q, packed_k, packed_v),
        ),
        "cross_entropy": Call(
            lambda: mr.linear_cross_entropy(x, weight, target),
            lambda: F.cross_entropy(F.linear(x, weight), target),
            (x, weight),
        ),
        "distillation": Call(
            lambda: mr.linear_distillation(x, weight, teacher_x, teacher),
            lambda: F.cross_entropy(F.linear(x, weight), F.linear(teacher_x, teacher).softmax(-1)),
            (x, weight),
        ),
        "log_probs": Call(
            lambda: log_probs.own(x, weight, target),
            lambda: log_probs.torch_log_probs(x, weight, target),
            (x, weight),
        ),
        "mlp": Call(
            lambda: mr.mlp(x, weight, w2),
            lambda: F.linear(F.gelu(F.linear(x, weight), approximate="tanh"), w2),
            (x, weight, w2),
        ),
        "logsumexp": Call(
            lambda: mr.logsumexp_matmul(x, weight),
            lambda: torch.logsumexp(x @ weight.mT, -1),
            (x, weight),
        ),
        "folds": Call(
            lambda: folds.lse_target(x, weight, label=target).lse,
            lambda: folds.lse_target.reference(x, weight, label=target).lse,
            (x, weight),
        ),
        "mods": Call(
            lambda: mr.attention(modified_q, modified_k, modified_v, score_mod=doubled),
            lambda: F.scaled_dot_product_attention(modified_q, modified_k, modified_v, scale=2 * 16**-0.5),
            (modified_q, modified_k, modified_v),
        ),
    }


def _microseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        work()
    return (time.perf_counter() - start) / CALLS * 1e6


def _with_backward(call: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Callable[[], object]:
    grad = torch.ones_like(call())
    return lambda: torch.autograd.grad(call(), leaves, grad)


def measure_overhead(device: torch.device) -> list[dict[str, Any]]:
    """Microseconds of a recording call, alone and with its backward pass. Calls take turns in each round.

    The least of all rounds counts, because other work of the machine can only add to a host time this short.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads would only be waited for
    rows = []
    without, single = calls(device, 0), calls(device, 1)
    for op, empty in without.items():
        one = single[op]
        works = {
            "overhead": empty.monoidreduce,
            "overhead, with backward": _with_backward(empty.monoidreduce, empty.leaves),
            "one row": one.monoidreduce,
            "torch, one row": one.torch,
            "one row, with backward": _with_backward(one.monoidreduce, one.leaves),
            "torch, one row, with backward": _with_backward(one.torch, one.leaves),
        }
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(ROUNDS):
            for name, work in works.items():
                times[name].append(_microseconds(work))
        least = {name: min(measured) for name, measured in times.items()}
        rows.append({"op": op, "microseconds": least, "limit": LIMIT_US})
    torch.set_num_threads(threads)
    return rows


def calls_over_ranks(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Small recording calls that take `ranks`. Weights are a rank's shards.

    On a GPU they are in 16 bits. On a CPU they have no rows, so that the engine has nothing to do; over ranks
    it would have twice as many keys.
    """
    dtype, rows = (torch.bfloat16, 16) if device.type == "cuda" else (torch.float32, 0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    x, weight, teacher_x, teacher = leaf(rows, 64), leaf(64, 64), leaf(rows, 64), leaf(64, 64)
    teacher_x, teacher = teacher_x.detach(), teacher.detach()
    target, w2 = torch.zeros(rows, dtype=torch.long, device=device), leaf(64, 64)
    q, k, v = leaf(1, 4, rows, 64), leaf(1, 4, 16, 64), leaf(1, 4, 16, 64)

    def attention(method: str) -> Callable[..., Tensor]:
        def call(ranks: Any = None) -> Tensor:
            return mr.attention(q, k, v, ranks=ranks and mr.Ranks(ranks, method=method))

        return call

    return {
        "cross_entropy": lambda **ranks: mr.linear_cross_entropy(x, weight, target, **ranks),
        "log_probs": lambda **ranks: mr.linear_log_probs(x, weight, target, **ranks).log_probs,
        "distillation": lambda **ranks: mr.linear_distillation(x, weight, teacher_x, teacher, **ranks),
        "mlp": lambda **ranks: mr.mlp(x, weight, w2, **ranks),
        "logsumexp": lambda **ranks: mr.logsumexp_matmul(x, weight, **ranks),
        "attention, ulysses": attention("ulysses"),
        "attention, all_gather": attention("all_gather"),
    }


@contextmanager
def silent_group() -> Iterator[dist.ProcessGroup]:
    """A process group of two ranks in one process: torch does everything for a collective except sending.

    So one process can measure the host time of calls over ranks. Their results are meaningless.
    """
    fakes = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fakes.FakeStore(), rank=0, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group()


@contextmanager
def _timed_collectives() -> Iterator[list[float]]:
    """Records the seconds of host time of each collective."""
    taken: list[float] = []

    def timed(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            start = time.perf_counter()
            found = collective(*args, **how)
            taken.append(time.perf_counter() - start)
            return found

        return call

    gather, exchange = timed(messages._all_gather), timed(dist.all_to_all_single)
    with patch.object(messages, "_all_gather", gather), patch.object(dist, "all_to_all_single", exchange):
        yield taken


def measure_over_ranks(device: torch.device, group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Microseconds of host time of a call without and with the process group: the least of all rounds.

    All ranks call this. On a GPU the host launches collectives and does not wait for them. Rows also have the
    time in collectives, from separate rounds.
    """
    rows = []
    for op, call in calls_over_ranks(device).items():
        over_ranks = partial(call, ranks=group)
        times: dict[str, list[float]] = {"alone": [], "over ranks": [], "collectives": []}
        for _ in range(ROUNDS):
            for name, work in (("alone", call), ("over ranks", over_ranks)):
                _settle(device)
                times[name].append(_microseconds(work))
            _settle(device)
            with _timed_collectives() as taken:
                _microseconds(over_ranks)
            times["collectives"].append(sum(taken) / CALLS * 1e6)
        least = {name: min(measured) for name, measured in times.items()}
        count = len(taken) // CALLS
        rows.append({"op": op, "collectives": count, "microseconds": least, "limit": RANKS_LIMIT_US})
    return rows


def _settle(device: torch.device) -> None:
    """Let a GPU finish, so that no call waits for room in its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
