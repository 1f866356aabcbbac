"""`block_mask`: which blocks of scores a mask keeps, so that attention can skip the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monoidreduce._validate import check_int, mismatch
from monoidreduce.folds.program.mods import kept_elements
from monoidreduce.folds.program.tracing import NOTHING, PARTLY, WHOLLY

__all__ = ["BlockMask", "as_block_mask", "block_mask", "check_block_mask"]

_MOST_ELEMENTS = 1 << 24  # number of elements that are evaluated at a time


@dataclass(frozen=True, eq=False)
class BlockMask:
    """The result of `block_mask`.

    Attributes:
        kinds: [B or 1, H or 1, blocks of queries, blocks of keys] int64. 0: nothing in the block is kept; 1:
            mask_mod decides for each element; 2: everything is kept.
        links: kinds together with the indices of the next kept blocks, as GPU kernels read them (`linked`).
        mask_mod: the function of one element.
        lengths: (number of queries, number of keys).
        block: (queries, keys) of a block.
        listed: whether kinds may disagree with mask_mod (as in a BlockMask of torch), so that both are
            needed.
    """

    kinds: Tensor
    links: Tensor
    mask_mod: Callable[..., Any]
    lengths: tuple[int, int]
    block: tuple[int, int]
    listed: bool = False

    def __repr__(self) -> str:
        known = self.kinds.numel() and not self.kinds.is_meta
        kept = (self.kinds != NOTHING).double().mean().item() if known else 0.0
        return f"<block_mask of {list(self.lengths)}, {kept:.1%} of its blocks of {list(self.block)} kept>"


def block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    M: int,
    N: int,
    *,
    device: torch.device | str | None = None,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """Evaluate a mask once, for `attention(..., block_mask=)`, which skips blocks that keep nothing.

    Args:
        mask_mod: `mask_mod(batch, head, q_idx, kv_idx)`, as in attention.
        B, H: numbers of batches and heads; None if the mask does not depend on them.
        M, N: numbers of queries and keys.
        device: device of the result; by default that of the tensors that mask_mod captures, else torch's
            default.
        block_size: queries and keys of a block, from 1 to 2^31: one number for both, or two.

    Raises:
        TraceError: mask_mod does something that kernels cannot do.
        TypeError, ValueError: an argument is not as above.
    """
    sizes = [
        1 if n is None else check_int(name, n, "None or an int >= 0") for name, n in (("B", B), ("H", H))
    ]
    sizes += [check_int(name, n, "an int >= 0") for name, n in (("M", M), ("N", N))]
    for name, n in zip("BHMN", sizes, strict=True):
        if n < 0:
            raise ValueError(mismatch(name, "an int >= 0", n))
    if not callable(mask_mod):
        expected = "a function mask_mod(batch, head, q_idx, kv_idx)"
        raise TypeError(mismatch("mask_mod", expected, f"{mask_mod!r} of type {type(mask_mod).__name__}"))
    block, device = _block_of(block_size), _device_of(device)
    batch, heads, rows, columns = sizes
    kept = kept_elements(mask_mod, device)
    at_once = max(_MOST_ELEMENTS // max(batch * heads * columns * block[0], 1), 1) * block[0]
    parts = [
        _kinds(kept(batch, heads, range(first, min(first + at_once, rows)), columns), block)
        for first in range(0, max(rows, 1), at_once)
    ]
    kinds = torch.cat(parts, 2)
    return BlockMask(kinds, linked(kinds), mask_mod, (rows, columns), block)


def _block_of(given: Any) -> tuple[int, int]:
    """(queries, keys) of a block, from the argument block_size."""
    expected = "an int from 1 to 2^31, or two"
    # An array or tensor with one axis is a pair; one without axes is a single number.
    both = given.tolist() if getattr(given, "ndim", 0) == 1 else given
    both = tuple(both) if isinstance(both, (tuple, list)) else (both, both)
    if len(both) != 2:
        raise ValueError(mismatch("block_size", expected, repr(given)))
    rows, columns = (check_int("block_size", n, expected) for n in both)
    if not (1 <= rows <= 1 << 31 and 1 <= columns <= 1 << 31):
        raise ValueError(mismatch("block_size", expected, repr(given)))
    return rows, columns


def _device_of(given: Any) -> torch.device | None:
    try:
        return None if given is None else torch.device(given)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(mismatch("device", "None or a device of torch", repr(given))) from error


def _kinds(kept: Tensor, block: tuple[int, int]) -> Tensor:
    """The kinds of the blocks of a mask, bool [B, H, rows, columns]."""
    batch, heads, rows, columns = kept.shape
    block = min(block[0], max(rows, 1)), min(block[1], max(columns, 1))  # no larger than the mask
    missing = (-rows % block[0], -columns % block[1])
    down, across = (rows + missing[0]) // block[0], (columns + missing[1]) // block[1]

    def blocks(value: bool) -> Tensor:
        padded = torch.nn.functional.pad(kept, (0, missing[1], 0, missing[0]), value=value)
        return padded.view(batch, heads, down, block[0], across, block[1])

    any_kept = blocks(False).amax((3, 5)).long()
    return any_kept + any_kept * blocks(True).amin((3, 5)).long()


def linked(kinds: Tensor) -> Tensor:
    """The words of blocks that kernels read: BlockWord of device/program/score_element.h."""

    def following(axis: int) -> Tensor:
        """The index of the first block along an axis, from this one on, with a kind other than 0."""
        count = kinds.shape[axis]
        numbers = torch.arange(count, device=kinds.device).view(-1, *[1] * (-1 - axis))
        held = torch.where(kinds != NOTHING, numbers, count).flip(axis)
        return held.cummin(axis).values.flip(axis) if held.numel() else held

    return kinds | following(-1) << 2 | following(-2) << 33


def as_block_mask(mask: Any) -> BlockMask:
    """Our BlockMask; a BlockMask of torch is converted. Its lists say in which blocks mask_mod applies.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(mask, BlockMask):
        return mask
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None or not isinstance(mask, flex.BlockMask):
        expected = "the result of monoidreduce.block_mask or torch's BlockMask"
        raise TypeError(mismatch("block_mask", expected, type(mask).__name__))
    kinds = _listed(mask.kv_num_blocks, mask.kv_indices, PARTLY)
    if mask.full_kv_num_blocks is not None:
        kinds = kinds.maximum(_listed(mask.full_kv_num_blocks, mask.full_kv_indices, WHOLLY))
    rows, columns = mask.BLOCK_SIZE
    lengths = tuple(mask.seq_lengths)
    return BlockMask(kinds, linked(kinds), mask.mask_mod, lengths, (rows, columns), listed=True)


def check_block_mask(
    mask: BlockMask, leading: Sequence[int], lengths: tuple[int, int], of: str, like: Tensor
) -> None:
    """Raise ValueError unless a block mask fits a call.

    leading: its batches and heads. lengths: its queries and keys. of: the names of the two operands that have
    them. like: a tensor on the call's device.
    """
    queries, keys = lengths
    if mask.lengths != lengths:
        expected = f"one of {queries} queries and {keys} keys, as {of} have"
        raise ValueError(mismatch("block_mask", expected, list(mask.lengths)))
    batch, heads = leading
    given = tuple(mask.kinds.shape[:2])
    if given[0] not in (1, batch) or given[1] not in (1, heads):
        expected = f"one of B={batch} or 1 and H={heads} or 1"
        raise ValueError(mismatch("block_mask", expected, list(given)))
    if mask.kinds.device != like.device:
        name = of.partition(" ")[0]
        raise ValueError(mismatch("block_mask", f"one on {like.device} as {name}", mask.kinds.device))


def _listed(counts: Tensor, indices: Tensor, kind: int) -> Tensor:
    """[B, H, Mb, Nb]: `kind` for the blocks that torch's lists contain, else 0.

    counts: [B, H, Mb], the number of valid entries of each row of indices. indices: [B, H, Mb, Nb].
    """
    width = indices.shape[-1]
    places = torch.arange(width, device=indices.device)
    listed = torch.where(places < counts[..., None], indices.long(), width)
    kinds = torch.zeros(*indices.shape[:-1], width + 1, dtype=torch.int64, device=indices.device)
    return kinds.scatter_(-1, listed, kind)[..., :-1]
