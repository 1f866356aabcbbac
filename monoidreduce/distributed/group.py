"""Who takes part in a call over several devices, whose the columns are, and whether all ask for the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from monoidreduce._ops.memory import one_piece
from monoidreduce._validate import FLOATING, check_bool, check_int, mismatch
from monoidreduce._version import __version__

__all__ = ["UNTRACED", "Arrival", "Columns", "Facts", "Group", "Sharding", "after", "facts_of", "together"]

Result = TypeVar("Result")
# To be called once: the current stream waits for a tensor that is on its way, the host does not on a GPU.
Arrival = Callable[[], Tensor]
# By name what must be the same on all ranks. Only calls whose ranks compare it take the time to ask.
Facts = Callable[[], dict[str, Any]]

# Its name in later versions of torch; earlier ones have the other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_RECORD_BYTES = 4096
# Why a compiler does not trace an operator over ranks.
UNTRACED = "a call over ranks breaks the graph"
_ERRORS = {error.__name__: error for error in (TypeError, ValueError, IndexError, RuntimeError)}
# The operators whose arguments the ranks of a group have compared.
_compared: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Group:
    """The ranks that a call is split over, in their order."""

    handle: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, process_group: Any) -> Group:
        """Raises TypeError or ValueError unless it is a ProcessGroup or a one-dimensional DeviceMesh."""
        expected = "a ProcessGroup or a one-dimensional DeviceMesh that this rank is in"
        handle = process_group
        if isinstance(process_group, DeviceMesh):
            if process_group.ndim != 1:
                raise ValueError(mismatch("process_group", expected, process_group))
            handle = process_group.get_group()
        if not isinstance(handle, dist.ProcessGroup):
            raise TypeError(mismatch("process_group", expected, repr(process_group)))
        return cls(handle, handle.rank(), handle.size())

    def gather(self, t: Tensor) -> Tensor:
        """[...], of one shape on all ranks -> [ranks, ...]."""
        found = t.new_empty((self.size, *t.shape))
        _all_gather(found.view(-1), one_piece(t).view(-1), group=self.handle)
        return found

    def start_gather(self, t: Tensor) -> Arrival:
        """gather, while the stream goes on."""
        found = t.new_empty((self.size, *t.shape))
        work = _all_gather(found.view(-1), one_piece(t).view(-1), group=self.handle, async_op=True)
        return partial(after, work, found)

    @property
    def device(self) -> torch.device:
        """Where the group's collectives take tensors."""
        on_gpus = "nccl" in dist.get_backend(self.handle)
        return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


def after(work: dist.Work, found: Tensor) -> Tensor:
    """found, which a collective fills, for the current stream."""
    work.wait()
    return found


def together(group: Group, operator: str, prepare: Callable[[], tuple[Result, Facts]]) -> Result:
    """prepare()'s first result; with a group's first call of an operator, once all ranks agree.

    prepare: checks this rank's arguments. Its second result tells what must be the same on all ranks.

    The record that ranks exchange has one size, so that no rank waits for another, whatever they were given.
    Later calls skip it, unless the environment variable MONOIDREDUCE_DEBUG is 1.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: on all ranks alike, what prepare raised on one of
            them, or that two of them differ. The message names the rank.
    """
    compared = _compared.setdefault(group.handle, set())
    if operator in compared and os.environ.get("MONOIDREDUCE_DEBUG") != "1":
        return prepare()[0]
    result = failure = None
    try:
        result, facts = prepare()
        record = {"operator": operator, "version": __version__, **facts()}
    except tuple(_ERRORS.values()) as error:
        failure, record = error, {"error": type(error).__name__, "text": str(error)[: _RECORD_BYTES // 8]}
    records = _exchanged(record, group)
    if failure is not None:
        raise failure
    for rank, of_rank in enumerate(records):
        if "error" in of_rank:
            raise _ERRORS[of_rank["error"]](f"rank {rank}: {of_rank['text']}")
    for rank, of_rank in enumerate(records):
        for name in {**records[0], **of_rank}:
            first, here = records[0].get(name), of_rank.get(name)
            if first != here:
                raise ValueError(f"rank {rank}: {mismatch(name, f'{first} as on rank 0', here)}")
    compared.add(operator)
    assert result is not None
    return result


def facts_of(arguments: Iterable[tuple[str, Any]], column_axes: dict[str, int]) -> dict[str, str]:
    """What must be the same on all ranks: of a tensor not the size of an axis that is split."""
    found = {}
    for name, value in arguments:
        if isinstance(value, Tensor):
            sizes: list[Any] = list(value.shape)
            if name in column_axes:
                sizes[column_axes[name]] = "..."
            shape = ", ".join(map(str, sizes))
            graph = ", requires_grad" if value.requires_grad and name not in column_axes else ""
            found[name] = f"{value.dtype} [{shape}]{graph}"
        else:
            found[name] = repr(value)
    return found


def _exchanged(record: dict[str, Any], group: Group) -> list[dict[str, Any]]:
    """The records of all ranks."""
    text = json.dumps(record, default=str).encode()
    own = torch.frombuffer(bytearray(text.ljust(_RECORD_BYTES)), dtype=torch.uint8).to(group.device)
    return [json.loads(bytes(row.tolist())) for row in group.gather(own)]


@dataclass(frozen=True)
class Columns:
    """This rank's columns of a fold: `count` of them from `first` on, of `all`.

    stride: how many columns lie between the first ones of two ranks.
    """

    group: Group
    first: int
    count: int
    all: int
    stride: int

    @classmethod
    def of(cls, group: Group, name: str, rows: int, given: int | None) -> Columns:
        """Of a tensor whose shard has so many rows.

        given: the number of all columns. Shards are as torch.chunk makes them, or as long as each other, and
        then what lies behind the last column is padding. None: every rank has as many.
        """
        if given is None:
            return cls(group, group.rank * rows, rows, group.size * rows, rows)
        chunk = -(-given // group.size)
        stride = chunk if rows == cls._own(given, chunk, group.rank) else rows
        if stride < chunk:
            own = cls._own(given, chunk, group.rank)
            expected = f"{own} rows on rank {group.rank} of {group.size}, or from {chunk} on as many on each"
            raise ValueError(mismatch(name, f"{expected}, for classes={given}", rows))
        first = min(group.rank * stride, given)
        return cls(group, first, cls._own(given, stride, group.rank), given, stride)

    @staticmethod
    def _own(columns: int, stride: int, rank: int) -> int:
        return min(max(columns - rank * stride, 0), stride)

    def own(self, shard: Tensor | None) -> Tensor | None:
        """Without padding."""
        return shard if shard is None or len(shard) == self.count else shard[: self.count]

    @property
    def numbers(self) -> tuple[int, int]:
        """Of columns, as kernels take them: how many lie between two ranks, and all."""
        return max(self.stride, 1), self.all

    def sums(self, of: Tensor) -> Tensor:
        """[all] -> [ranks], in float64: the sums over each rank's columns."""
        padded = of.new_zeros(self.group.size * self.stride, dtype=torch.float64)
        padded[: self.all] = of
        return padded.view(self.group.size, self.stride).sum(1)

    def gathered(self, shard: Tensor | None) -> Tensor | None:
        """[count] or, with padding, longer -> [all]; no gradient."""
        if shard is None:
            return None
        padded = shard.new_zeros(self.stride)
        padded[: self.count] = shard.detach()[: self.count]
        return self.group.gather(padded).view(-1)[: self.all]


@dataclass(frozen=True)
class Sharding:
    """What a call was given besides tensors and options, checked.

    classes: of all ranks. own_rows: has each rank other rows (sequence parallel). sent: the dtype of the
    rows' partial gradients on their way; None is the accumulation dtype.
    """

    group: Group
    classes: int | None
    own_rows: bool
    sent: torch.dtype | None

    @classmethod
    def of(
        cls,
        group: Group,
        classes: int | None = None,
        sequence_parallel: bool = False,
        grad_dtype: torch.dtype | None = None,
    ) -> Sharding:
        """Raises TypeError or ValueError where one is not as the operators say."""
        if classes is not None and check_int("classes", classes, "None or an int >= 0") < 0:
            raise ValueError(mismatch("classes", "None or an int >= 0", classes))
        if grad_dtype is not None and grad_dtype not in FLOATING:
            expected = "None, float64, float32, bfloat16 or float16"
            raise TypeError(mismatch("grad_dtype", expected, grad_dtype))
        own_rows = check_bool("sequence_parallel", sequence_parallel)
        return cls(group, classes, own_rows, grad_dtype)

    @property
    def facts(self) -> dict[str, Any]:
        """For `together`."""
        return {"sequence_parallel": self.own_rows, "grad_dtype": str(self.sent)}

    def columns(self, name: str, shard: Tensor) -> Columns:
        return Columns.of(self.group, name, len(shard), self.classes)
