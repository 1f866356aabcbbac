"""Masks of sparse attention (section 4.3): bool [n, n], True for kept pairs; None keeps all.

A mask counts as a rule, not as data: reading it costs no I/O. Schedules skip tiles without kept pairs. Each
function raises ValueError if a size is below 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from monoidreduce._validate import check_int, mismatch

from .two_level import check_sizes

__all__ = ["causal", "keeps", "kept_blocks", "masked_exp", "window"]


def causal(n: int) -> Tensor:
    """Row i keeps the columns up to i."""
    check_sizes(n=n)
    return torch.ones(n, n, dtype=torch.bool).tril()


def window(n: int, size: int) -> Tensor:
    """Row i keeps its own column and the `size` - 1 before it."""
    check_sizes(n=n, size=size)
    return causal(n).triu(1 - size)


def kept_blocks(n: int, size: int, places: Iterable[tuple[int, int]]) -> Tensor:
    """Keep whole blocks of `size` rows and columns, given by their places in the grid of blocks.

    Raises:
        ValueError: a place is outside the grid.
    """
    check_sizes(n=n, size=size)
    grid = -(-n // size)
    places = list(places)
    for place in places:
        if len(place) != 2 or not all(0 <= check_int("places", at) < grid for at in place):
            raise ValueError(mismatch("places", f"pairs of ints from 0 to {grid - 1}", place))
    kept = torch.zeros(n, n, dtype=torch.bool)
    for i, j in places:
        kept[i * size : (i + 1) * size, j * size : (j + 1) * size] = True
    return kept


def keeps(kept: Tensor | None, rows: slice, columns: slice) -> bool:
    """Whether a tile keeps any pair."""
    return kept is None or bool(kept[rows, columns].any())


def masked_exp(kept: Tensor | None, rows: slice, columns: slice) -> Callable[[Tensor], Tensor]:
    """A function of the scores of a tile: exp for kept pairs, 0 for others."""
    if kept is None:
        return torch.exp
    tile = kept[rows, columns]
    return lambda scores: torch.exp(scores) * tile
