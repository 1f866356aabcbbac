"""The group of a call over several ranks, how columns are sharded, and the check that all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from monoidreduce._ops.memory import contiguous
from monoidreduce._ops.registry import refuse_forward_mode
from monoidreduce._validate import mismatch
from monoidreduce.distributed.messages import NO_CALL, Arrival, Call, Channel, Facts
from monoidreduce.ranks import Ranks, RanksOrGroup, as_ranks, check_fields, check_group

__all__ = ["COLUMN_OPTIONS", "UNTRACED", "Columns", "Group", "Sharding", "facts_of", "key_of", "together"]

Result = TypeVar("Result")
# The reason given when torch.compile meets an operator over ranks.
UNTRACED = "a call over ranks breaks the graph"
# Options of `Ranks` for operators whose columns are sharded.
COLUMN_OPTIONS = ("classes", "sequence_parallel", "grad_dtype")


@dataclass(eq=False)
class Group:
    """The ranks of one call, in rank order.

    call: the operator and its facts, set by `together`. waiting: see `Facts`. number: the number of this call
    on the group. sent: how many messages this call has sent.
    """

    handle: dist.ProcessGroup
    rank: int
    size: int
    call: Call = NO_CALL
    waiting: Callable[[], dict[str, Any]] = dict
    number: int = 0
    sent: int = 0

    @classmethod
    def of(cls, group: Any) -> Group:
        """Raises TypeError or ValueError unless it is a ProcessGroup or a one-dimensional DeviceMesh."""
        check_group("group", group)
        handle = group if isinstance(group, dist.ProcessGroup) else group.get_group()
        return cls(handle, handle.rank(), handle.size())

    def gather(self, t: Tensor) -> Tensor:
        """All-gather: [...] of the same shape on all ranks -> [ranks, ...]."""
        return self.start_gather(t)()

    def start_gather(self, t: Tensor, headed: bool = True) -> Arrival:
        """Start `gather` without blocking the stream. headed: see Channel.start."""
        arrival = Channel.of(self).start(self, "gather", contiguous(t).view(-1), headed)
        return lambda: arrival().view(self.size, *t.shape)

    def start_exchange(self, parts: Tensor, headed: bool = True) -> Arrival:
        """All-to-all: parts[i] goes to rank i; element i of the result [ranks, ...] came from rank i."""
        sent = contiguous(parts).view(self.size, parts.numel() // self.size)
        arrival = Channel.of(self).start(self, "exchange", sent, headed)
        return lambda: arrival().view(parts.shape)

    @contextmanager
    def failing_together(self, goes_on: bool = True) -> Iterator[None]:
        """Context for local work: if it raises on this rank, the other ranks raise too instead of hanging.

        goes_on: whether the call sends another message after it, which is how the others are told.
        """
        try:
            yield
        except Exception as error:
            if goes_on:
                Channel.of(self).fail(self, self.call.operator, error)
            raise

    @property
    def device(self) -> torch.device:
        """The device on which the group's collectives take tensors."""
        on_gpus = "nccl" in dist.get_backend(self.handle)
        return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


def together(group: Group, operator: str, prepare: Callable[[], tuple[Result, Facts]]) -> Result:
    """Check this rank's arguments with `prepare`, and begin a call on the group; returns prepare's first
    result.

    prepare: its second result, the Facts, must be the same on all ranks. The messages of the call carry them.

    Raises:
        What prepare raises. The other ranks then raise a TypeError, ValueError, IndexError or RuntimeError
        that names this rank, at their next message. On a GPU, after the operator's first call, they raise
        later.
    """
    channel = Channel.of(group)
    channel.look()
    try:
        result, facts = prepare()
    except Exception as error:
        channel.fail(group, operator, error)
        raise
    group.call, group.waiting = Call.of(operator, facts), facts.waiting
    return result


def key_of(arguments: Iterable[Any]) -> tuple[Any, ...]:
    """A hashable key of a call's arguments, for `Facts`.

    It has shape, dtype and requires_grad of tensors, and the values of other arguments.
    """
    recorded = torch.is_grad_enabled()
    return tuple(
        (v.shape, v.dtype, recorded and v.requires_grad)
        if isinstance(v, Tensor)
        else (repr(v) if isinstance(v, float) else v)  # repr tells 0.0 from -0.0, and NaN equals itself
        for v in arguments
    )


def facts_of(arguments: Iterable[tuple[str, Any]], column_axes: dict[str, int]) -> dict[str, str]:
    """What must be the same on all ranks, by argument name, as text.

    column_axes: the sharded axis of some arguments; its size may differ between ranks.
    """
    found, recorded = {}, torch.is_grad_enabled()
    for name, value in arguments:
        if isinstance(value, Tensor):
            sizes: list[Any] = list(value.shape)
            if name in column_axes:
                sizes[column_axes[name]] = "..."
            shape = ", ".join(map(str, sizes))
            graph = ", requires_grad" if recorded and value.requires_grad and name not in column_axes else ""
            found[name] = f"{value.dtype} [{shape}]{graph}"
        else:
            found[name] = repr(value)
    return found


@dataclass(frozen=True)
class Columns:
    """This rank's columns of a fold: columns first to first + count, out of `all`.

    stride: distance between the first columns of neighbouring ranks.
    """

    group: Group
    first: int
    count: int
    all: int
    stride: int

    @classmethod
    def of(cls, group: Group, name: str, rows: int, given: int | None) -> Columns:
        """The columns of a rank whose shard has `rows` rows.

        given: total number of columns. The shards are then as torch.chunk makes them; or they have equal
        size, and rows behind the last column are padding. None: all ranks have equally many columns, without
        padding.

        Raises:
            ValueError: rows fits neither; the message names the argument `name`.
        """
        if given is None:
            return cls(group, group.rank * rows, rows, group.size * rows, rows)
        chunk = -(-given // group.size)
        stride = chunk if rows == cls._own(given, chunk, group.rank) else rows
        if stride < chunk:
            own = cls._own(given, chunk, group.rank)
            expected = f"{own} rows on rank {group.rank} of {group.size}, or from {chunk} on as many on each"
            raise ValueError(mismatch(name, f"{expected}, for ranks.classes={given}", rows))
        first = min(group.rank * stride, given)
        return cls(group, first, cls._own(given, stride, group.rank), given, stride)

    @staticmethod
    def _own(columns: int, stride: int, rank: int) -> int:
        return min(max(columns - rank * stride, 0), stride)

    def own(self, shard: Tensor | None) -> Tensor | None:
        """The shard without its padding."""
        return shard if shard is None or len(shard) == self.count else shard[: self.count]

    def gathered(self, shard: Tensor | None) -> Tensor | None:
        """All-gather per-column values: [count], or more with padding -> [all]. No gradient."""
        if shard is None:
            return None
        padded = shard.new_zeros(self.stride)
        padded[: self.count] = shard.detach()[: self.count]
        return self.group.gather(padded).reshape(-1)[: self.all]


@dataclass(frozen=True)
class Sharding:
    """The group of a call, and the options that its ranks were given."""

    group: Group
    ranks: Ranks

    @classmethod
    def of(cls, ranks: RanksOrGroup) -> Sharding:
        """From an operator's argument `ranks`; raises TypeError or ValueError as `Ranks`."""
        given = as_ranks(ranks)
        return cls(Group.of(given.group), given)

    def check(self, operator: str, *used: str) -> None:
        """Raise ValueError if an option that the operator does not use differs from its default."""
        check_fields(self.ranks, operator, used)

    def refuse_forward_mode(self, operator: str, tensors: Iterable[Any]) -> None:
        """Raise NotImplementedError if one of the tensors has a tangent and there are several ranks."""
        if self.group.size > 1:
            refuse_forward_mode(f"{operator} over ranks", tensors)

    @property
    def facts(self) -> dict[str, Any]:
        """Options that must be the same on all ranks, for `together`."""
        ranks = self.ranks
        return {
            "ranks.sequence_parallel": ranks.sequence_parallel,
            "ranks.grad_dtype": str(ranks.grad_dtype),
        }

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of `facts`."""
        return self.ranks.sequence_parallel, self.ranks.grad_dtype

    def columns(self, name: str, shard: Tensor) -> Columns:
        return Columns.of(self.group, name, len(shard), self.ranks.classes)
