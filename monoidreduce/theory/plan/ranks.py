"""Prediction of the time of operators over ranks, without running them.

Kernel times of a rank's shard come from `monoidreduce.cost`. Collectives are those of
`monoidreduce.distributed`, one after the other. None overlaps with arithmetic, except in "ring", a method
that the library does not have. docs/planner.md has examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from monoidreduce._validate import FLOATING, check_bool, check_choice, mismatch
from monoidreduce.theory.costs.sizes import SIZES
from monoidreduce.theory.hardware import Hardware, find
from monoidreduce.theory.plan._positive import check_counts
from monoidreduce.theory.plan.links import Group
from monoidreduce.theory.plan.shards import Call, RankPass

__all__ = ["SPLITS", "OverRanks", "over_ranks", "splits"]

# Ways to split each operator. "columns": classes or hidden units. "data": rows or sequences. "ring": ring
# attention, which the library does not have.
_ROWS_OR_COLUMNS = ("columns", "data")
SPLITS = {
    "linear_cross_entropy": _ROWS_OR_COLUMNS,
    "linear_distillation": _ROWS_OR_COLUMNS,
    "linear_log_probs": _ROWS_OR_COLUMNS,
    "mlp": _ROWS_OR_COLUMNS,
    "attention": ("ulysses", "all_gather", "data", "ring"),
}
_ON_PAPER = ("ring",)
_LAYOUTS = ("contiguous", "zigzag")
# Optional entries of `sizes` beside the required ones.
_OPTIONS = {
    "linear_cross_entropy": (),
    "linear_distillation": ("loss",),
    "linear_log_probs": ("entropy",),
    "mlp": ("gated",),
    "attention": ("Hkv", "causal", "softcap"),
}
_SWITCHES = ("entropy", "gated", "causal")  # each is True or False


@dataclass(frozen=True)
class OverRanks:
    """Predicted cost of a call and its backward pass over ranks; `str()` of it is a table.

    Attributes:
        operator, split, ranks: the arguments of `over_ranks`.
        hardware: the device of each rank.
        forward, backward: the passes of the slowest rank.
        alone: T1, seconds of the whole call on one device.
    """

    operator: str
    split: str
    ranks: int
    hardware: Hardware
    forward: RankPass
    backward: RankPass
    alone: float

    @property
    def seconds(self) -> float:
        """TW, seconds of both passes over W ranks."""
        return self.forward.seconds + self.backward.seconds

    @property
    def efficiency(self) -> float:
        """T1 / (W TW)."""
        return self.alone / (self.ranks * self.seconds)

    def __str__(self) -> str:
        lines = [
            f"{self.operator} by {self.split} over {self.ranks} x {self.hardware.name}: "
            f"{1e3 * self.seconds:.4g} ms, {1e3 * self.alone:.4g} ms alone, efficiency {self.efficiency:.2f}"
        ]
        for name, of in (("forward", self.forward), ("backward", self.backward)):
            lines.append(f"{name:<10}{'kernels':<34}{'':>12}{1e3 * of.fold:>12.4g} ms")
            for s in of.sends:
                what = f"{s.collective} of {s.what}"
                lines.append(f"{'':<10}{what:<34}{s.bytes / 1e6:>9.4g} MB{1e3 * s.seconds:>12.4g} ms")
            lines.append(f"{'':<10}{'copies and sums':<34}{'':>12}{1e3 * of.copying:>12.4g} ms")
            if of.hidden:
                lines.append(f"{'':<10}{'behind kernels':<34}{'':>12}{-1e3 * of.hidden:>12.4g} ms")
        return "\n".join(lines)


def over_ranks(
    operator: str,
    sizes: Mapping[str, Any],
    ranks: int,
    hardware: str | Hardware,
    *,
    split: str,
    sequence_parallel: bool = False,
    layout: str = "zigzag",
    dtype: torch.dtype = torch.bfloat16,
) -> OverRanks:
    """Predict the time of a call over ranks with its backward pass, and what it sends. Nothing runs.

    Shards that do not come out even are rounded up, because the largest one determines the time.

    Args:
        operator: a key of `SPLITS`.
        sizes: sizes of the whole call, named as in `python -m monoidreduce cost`. For losses N tokens, V
            classes, width D, and E, a teacher's width. For mlp B rows, K hidden units, width d, and "gated".
            For attention B, H, Hkv, L, d, "causal" and "softcap".
        ranks: number of devices: at most those of one node, or whole nodes.
        hardware: a GPU whose links `monoidreduce.hardware` knows, or its name.
        split: one of `SPLITS[operator]`. "columns", "ulysses" and "all_gather" are what operators do with
            `ranks`. "data": each rank has its own rows or sequences and all weights; gradients of weights are
            all-reduced in their dtype. "ring": keys and values go round, overlapped with the kernels; not in
            the library.
        sequence_parallel: for "columns": the rows are sharded too.
        layout: for "all_gather": as in `mr.attention`. Without a causal mask both layouts cost the same.
        dtype: dtype of all tensors.

    Raises:
        TypeError, ValueError: an argument is not as above, ranks do not share the heads evenly, or the links
            are not known.
    """
    check_choice("operator", operator, tuple(SPLITS))
    check_choice("split", split, SPLITS[operator])
    check_choice("layout", layout, _LAYOUTS)
    check_bool("sequence_parallel", sequence_parallel)
    if dtype not in FLOATING:
        raise TypeError(mismatch("dtype", "float64, float32, bfloat16 or float16", dtype))
    known = _checked_sizes(operator, sizes)
    if not isinstance(hardware, (str, Hardware)):
        raise TypeError(mismatch("hardware", "a Hardware or the name of one", repr(hardware)))
    group = Group.of(ranks, find(hardware) if isinstance(hardware, str) else hardware, dtype)
    if split == "ulysses" and not _share_heads(known, ranks):
        expected = f"one of all_gather, data where {ranks} ranks cannot share the heads evenly"
        raise ValueError(mismatch("split", expected, repr(split)))
    call = Call(operator, known, group, dtype)
    if split == "columns":
        of_columns = call.mlp_columns if operator == "mlp" else call.loss_columns
        forward, backward = of_columns(sequence_parallel)
    elif split == "all_gather":
        forward, backward = call.all_gather(layout)
    else:
        forward, backward = {"data": call.data, "ulysses": call.ulysses, "ring": call.ring}[split]()
    return OverRanks(operator, split, ranks, group.hardware, forward, backward, sum(call.kernels()))


def splits(
    operator: str,
    sizes: Mapping[str, Any],
    ranks: int,
    hardware: str | Hardware,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> list[OverRanks]:
    """All splits that the library has, fastest first.

    Rows are assumed to be sharded, so "columns" is with `sequence_parallel`. Arguments and errors are those
    of `over_ranks`.
    """
    check_choice("operator", operator, tuple(SPLITS))
    known = _checked_sizes(operator, sizes)
    check_counts(ranks=ranks)
    names = [name for name in SPLITS[operator] if name not in _ON_PAPER]
    found = [
        over_ranks(operator, known, ranks, hardware, split=name, sequence_parallel=True, dtype=dtype)
        for name in names
        if name != "ulysses" or _share_heads(known, ranks)
    ]
    return sorted(found, key=lambda each: each.seconds)


def _checked_sizes(operator: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    needed, options = SIZES[operator][0].split(), _OPTIONS[operator]
    if not set(needed) <= sizes.keys() <= {*needed, *options}:
        expected = f"{', '.join(needed)}" + (f", and perhaps {', '.join(options)}" if options else "")
        raise ValueError(mismatch("sizes", expected, ", ".join(sizes)))
    check_counts(**{name: sizes[name] for name in (*needed, "Hkv") if name in sizes})
    for name in _SWITCHES:
        check_bool(name, sizes.get(name, False))
    if operator == "attention" and sizes["H"] % sizes.get("Hkv", 1):
        raise ValueError(mismatch("Hkv", f"a divisor of H={sizes['H']}", sizes["Hkv"]))
    return dict(sizes)


def _share_heads(sizes: Mapping[str, Any], ranks: int) -> bool:
    """Whether the ranks can share the heads evenly, as ulysses needs."""
    heads: int = sizes["H"]
    key_heads: int = sizes.get("Hkv", heads)
    return heads % ranks == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0)
