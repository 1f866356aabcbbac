"""A simulated two-level memory. It counts the words that move, and computes with the blocks in its cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce

import torch
from torch import Tensor

from monoidreduce._validate import check_int, mismatch

__all__ = ["ALL", "COLUMN", "CacheOverflow", "Memory", "blocks", "check_least", "check_sizes"]

ALL = slice(None)
COLUMN = slice(0, 1)  # the columns of a vector: every matrix has two axes


class CacheOverflow(RuntimeError):
    """A schedule holds more words than the cache has room for."""


def check_least(name: str, value: int, least: int) -> None:
    """Raise TypeError unless `value` is an int, ValueError if it is below `least`."""
    if check_int(name, value) < least:
        raise ValueError(mismatch(name, f"at least {least}", value))


def check_sizes(**sizes: int) -> None:
    """Raise TypeError or ValueError, naming the argument, unless each is an int of 1 or more."""
    for name, size in sizes.items():
        check_least(name, size, 1)


def blocks(length: int, size: int) -> list[slice]:
    """The slices of `size` into which an axis of `length` is cut; the last may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


class Memory:
    """The two levels of the paper's section B.2: an unlimited memory, and a cache of `words` numbers.

    Matrices are in memory, by name; "A.T" reads the transpose of "A". A schedule reads blocks into the cache,
    computes with them and writes blocks back. Values are really computed, in float64, so a schedule that
    forgets to read or write a block gives a wrong result. Entries that were never written, and deleted
    blocks, are NaN.

    A sum of products needs no room for its terms: products go from the arithmetic unit straight into the sum.

    Args:
        words: the cache size M.
        matrices: the inputs, float64 [rows, columns].
        strict: raise CacheOverflow if more than `words` are held. If False, only `peak` shows it.

    Attributes:
        reads: words read from memory.
        writes: words written to memory.
        phases: words moved in each phase, by name.
        held: words in the cache now.
        peak: the most words that were in the cache at any time.
        flops: additions and multiplications of matrix products.

    Raises:
        ValueError: `words` is below 1.
    """

    dtype = torch.float64
    zero: float = 0.0
    blank: float = math.nan

    def __init__(self, words: int, matrices: Mapping[str, Tensor], *, strict: bool = True) -> None:
        check_least("words", words, 1)
        self.words = words
        self.matrices = dict(matrices)
        self.strict = strict
        self.reads = self.writes = self.held = self.peak = self.flops = 0
        self.phases: dict[str, int] = {}

    @property
    def io(self) -> int:
        """Words moved in both directions: the I/O complexity of the schedule (Definition 3.5)."""
        return self.reads + self.writes

    def __getitem__(self, name: str) -> Tensor:
        return self.matrices[name[:-2]].T if name.endswith(".T") else self.matrices[name]

    def shape(self, name: str) -> tuple[int, int]:
        """(rows, columns) of a matrix."""
        rows, columns = self[name].shape
        return rows, columns

    def create(self, name: str, rows: int, columns: int) -> None:
        """Make room in memory for a matrix that will be written."""
        self.matrices[name] = torch.full((rows, columns), self.blank, dtype=self.dtype)

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Read a block into the cache."""
        block = self._hold(self[name][rows, columns].clone())
        self.reads += block.numel()
        return block

    def write(self, block: Tensor, name: str, rows: slice = ALL, columns: slice = ALL) -> None:
        """Write a block to memory. It also stays in the cache."""
        self[name][rows, columns] = block
        self.writes += block.numel()

    def zeros(self, rows: slice, columns: slice) -> Tensor:
        """A block of zeros in the cache, of the size of these rows and columns."""
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        return self._hold(torch.full(shape, self.zero, dtype=self.dtype))

    def delete(self, *old: Tensor) -> None:
        """Remove blocks from the cache."""
        for block in old:
            self.held -= block.numel()
            block.fill_(self.blank)

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """total += a @ b, for blocks in the cache."""
        self.flops += 2 * a.numel() * b.shape[1]
        total.addmm_(a, b)

    def add_row_sums(self, total: Tensor, *factors: Tensor) -> None:
        """total [rows, 1] += the row sums of the elementwise product of blocks in the cache."""
        total += reduce(torch.mul, factors).sum(1, keepdim=True)

    def compute(self, function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        """A new block in the cache: an elementwise function of others. Columns [rows, 1] broadcast."""
        return self._hold(function(*operands))

    def update(self, block: Tensor, function: Callable[..., Tensor], *operands: Tensor) -> None:
        """block = function(block, *operands), elementwise and in place."""
        block.copy_(function(block, *operands))

    def end_phase(self, name: str) -> None:
        """Record in `phases` the words moved since the last phase."""
        self.phases[name] = self.io - sum(self.phases.values())

    def _hold(self, block: Tensor) -> Tensor:
        self.held += block.numel()
        self.peak = max(self.peak, self.held)
        if self.strict and self.held > self.words:
            raise CacheOverflow(f"the schedule holds {self.held} words, the cache has {self.words}")
        return block
