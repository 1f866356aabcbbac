"""`Ranks`: what a call over several ranks needs beside its tensors."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from monoidreduce._validate import FLOATING, check_bool, check_choice, check_int, mismatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["LAYOUTS", "Ranks", "RanksOrGroup", "as_ranks", "check_fields", "check_group"]

LAYOUTS = ("contiguous", "zigzag")
METHODS = ("auto", "ulysses", "all_gather")
GROUP = "a ProcessGroup or a one-dimensional DeviceMesh that this rank is in"


@dataclass(frozen=True)
class Ranks:
    """The ranks that share one call of an operator, and how they share it: the operators' argument `ranks`.

    Every rank of the group makes the call, with a Ranks of the same values. An operator that does not use an
    option below refuses any value but the default, on all ranks. A ProcessGroup or DeviceMesh alone is taken
    as Ranks(group). Operators without the argument `ranks` compute on one rank. See docs/distributed.md.

    Args:
        group: a ProcessGroup or a one-dimensional DeviceMesh that this rank is in. Shards of tensors follow
            each other in the order of its ranks.
        classes: for the losses, `linear_log_probs`, `logsumexp_matmul` and `statistics`: the number of
            columns (classes) of all ranks together, an int >= 0. Shards may then be of unequal size, as
            torch.chunk makes them; or of equal size, where rows after the last column are padding that takes
            no part in the call. None: every rank has equally many columns, without padding.
        sequence_parallel: for these operators and `mlp`: each rank has rows (tokens) of its own, equally
            many, and gets the results of these. False: all ranks have the same rows and results.
        grad_dtype: float64, float32, bfloat16 or float16. The dtype in which parts of one gradient are sent
            to be summed over ranks, except for `map_reduce`; bfloat16 halves the bytes. None: the
            accumulation dtype.
        method: for `attention` and `attention_varlen`. "ulysses" gives each rank some heads of all positions.
            "all_gather" gives each rank the keys and values of all positions. "auto" is "ulysses" if the
            ranks can share the heads evenly, else "all_gather".
        layout: for `attention` and `attention_varlen`: which positions a rank has, as `distributed.shard`
            makes them. "contiguous": one chunk. "zigzag": two, so that under a causal mask all ranks have
            equal work.
        length: for `attention`, the number of queries, and of keys, of all ranks together; for
            `attention_varlen` that of tokens. An int >= 0. None: every rank has equally many.

    Raises:
        TypeError, ValueError: a value is not as above. Only this rank raises, because nothing is sent before
            the operator is called.
    """

    group: ProcessGroup | DeviceMesh
    _: KW_ONLY
    classes: int | None = None
    sequence_parallel: bool = False
    grad_dtype: torch.dtype | None = None
    method: str = "auto"
    layout: str = "contiguous"
    length: int | None = None

    def __post_init__(self) -> None:
        check_group("ranks.group", self.group)
        if self.grad_dtype is not None and self.grad_dtype not in FLOATING:
            expected = "None, float64, float32, bfloat16 or float16"
            raise TypeError(mismatch("ranks.grad_dtype", expected, repr(self.grad_dtype)))
        check_choice("ranks.method", self.method, METHODS)
        check_choice("ranks.layout", self.layout, LAYOUTS)
        # Numbers of numpy become Python's, because ranks compare the texts of these values.
        own_rows = check_bool("ranks.sequence_parallel", self.sequence_parallel)
        object.__setattr__(self, "sequence_parallel", own_rows)
        object.__setattr__(self, "classes", _count("ranks.classes", self.classes))
        object.__setattr__(self, "length", _count("ranks.length", self.length))


RanksOrGroup: TypeAlias = "Ranks | ProcessGroup | DeviceMesh"
_DEFAULTS = {field.name: field.default for field in fields(Ranks) if field.name != "group"}


def as_ranks(given: Any) -> Ranks:
    """The argument `ranks` of an operator; a group alone becomes Ranks(group). Raises as Ranks does."""
    if isinstance(given, Ranks):
        return given
    check_group("ranks", given, "a monoidreduce.Ranks, a ProcessGroup or a one-dimensional DeviceMesh")
    ranks = object.__new__(Ranks)  # without __init__, which would check the group again and all defaults
    ranks.__dict__.update(_DEFAULTS, group=given)
    return ranks


def check_fields(ranks: Ranks, operator: str, used: tuple[str, ...]) -> None:
    """Raise ValueError if an option that `operator` does not use differs from its default."""
    for name, default in _DEFAULTS.items():
        value = getattr(ranks, name)
        if value != default and name not in used:
            expected = f"{default!r}, because {operator} does not use it"
            raise ValueError(mismatch(f"ranks.{name}", expected, repr(value)))


def check_group(name: str, group: Any, expected: str = GROUP) -> None:
    """Raise TypeError unless it is a ProcessGroup or DeviceMesh, ValueError for a mesh of more dimensions."""
    process_group, mesh = _group_types()
    if isinstance(group, process_group):
        return
    if not isinstance(group, mesh):
        raise TypeError(mismatch(name, expected, repr(group)))
    if group.ndim != 1:
        raise ValueError(mismatch(name, expected, group))


@cache
def _group_types() -> tuple[type[ProcessGroup], type[DeviceMesh]]:
    # Not imported with this module, because not every build of torch has them.
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    return ProcessGroup, DeviceMesh


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    count = check_int(name, value, "None or an int >= 0")
    if count < 0:
        raise ValueError(mismatch(name, "None or an int >= 0", count))
    return count
