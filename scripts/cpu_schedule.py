"""What the CPU engine moves between a cache and memory: its schedule, played to a simulated cache.

The module plays the passes of csrc/include/monoidreduce/cpu/fold_forward.h and fold_backward.h, for one head,
float32, one thread, without masks and biases. Operands, results and scratch memory are played; statistics of
rows, a few words each, are not. scripts/measure_traffic_cpu.py holds this against the engine itself, which
tells its tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ITEM", "LINE", "Buffer", "Cache", "Shape", "Tile", "backward", "compulsory", "forward"]

ITEM = 4  # bytes of a float
LINE = 64  # bytes of a cache's line
MOST_PANELS, BLOCK_BYTES = 16, 1 << 21  # of a block of rows in the forward pass (ForwardTile::block_)
GROUP = 32  # steps of columns that the backward pass sums at a time (for_columns)


@dataclass(frozen=True)
class Shape:
    """A fold. rows, columns, width: of the scores. payload: the width of the payload, 0 for none."""

    rows: int
    columns: int
    width: int
    payload: int = 0

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of what a column has."""
        return (self.width, self.payload) if self.payload else (self.width,)


class Tile(NamedTuple):
    """Of a pass. panel: rows side by side. step: columns of a step of the products."""

    rows: int
    columns: int
    panel: int
    step: int


class Cache:
    """Lines. The line that was used least recently is dropped. Writes take a line in.

    A real cache has sets, and drops lines of a full set while others have room. So a pass whose tiles fill a
    cache almost moves more than is said here.

    Attributes:
        read, written: bytes that passed between the cache and memory.
    """

    def __init__(self, size: int) -> None:
        self._most, self._end = size // LINE, 0
        self._lines: dict[int, bool] = {}  # is it to be written back? The last in a dict was used last
        self.read = self.written = 0

    def buffer(self, items: int) -> Buffer:
        """New memory for so many floats, from a line's boundary on."""
        begin = self._end
        self._end += -(-ITEM * items // LINE)
        return Buffer(self, begin)

    def touch(self, line: int, written: bool) -> None:
        """Reads a line or writes to it."""
        there = line in self._lines
        self._lines[line] = self._lines.pop(line, False) or written
        if not there:
            self.read += LINE
            if len(self._lines) > self._most and self._lines.pop(next(iter(self._lines))):
                self.written += LINE

    def flush(self) -> None:
        """Writes back what is to be written."""
        self.written += LINE * sum(self._lines.values())
        self._lines.clear()


class Buffer(NamedTuple):
    """Memory that a cache lies before. begin: its first line."""

    cache: Cache
    begin: int

    def load(self, first: int, count: int) -> None:
        """Reads floats."""
        self._touch(first, count, False)

    def store(self, first: int, count: int) -> None:
        """Writes floats, or adds to them."""
        self._touch(first, count, True)

    def _touch(self, first: int, count: int, written: bool) -> None:
        begin, end = ITEM * first // LINE, -(-ITEM * (first + count) // LINE)
        for line in range(self.begin + begin, self.begin + end):
            self.cache.touch(line, written)


def forward(cache: Cache, shape: Shape, tile: Tile) -> None:
    """A block of rows is packed, then all columns go past it, a tile of them at a time."""
    rows, widths = tile.rows, shape.widths
    of_row, of_sum = rows * shape.width, rows * shape.payload  # floats of a panel
    count = -(-shape.rows // rows)
    block = min(max(BLOCK_BYTES // (ITEM * of_row), 1), MOST_PANELS, count)
    a, out = cache.buffer(shape.rows * shape.width), cache.buffer(shape.rows * shape.payload)
    operands = [cache.buffer(shape.columns * width) for width in widths]
    packed, sums = cache.buffer(block * of_row), cache.buffer(block * of_sum)
    tiles = [cache.buffer(tile.columns * width) for width in widths]
    scores = cache.buffer(tile.columns * rows)
    for first in range(0, count, block):
        panels = range(min(block, count - first))
        for i in panels:
            a.load((first + i) * of_row, of_row)
            packed.store(i * of_row, of_row)
        for j in range(0, shape.columns, tile.columns):
            columns = min(tile.columns, shape.columns - j)
            for operand, copied, width in zip(operands, tiles, widths, strict=True):
                operand.load(j * width, columns * width)
                copied.store(0, columns * width)
            for i in panels:
                packed.load(i * of_row, of_row)
                tiles[0].load(0, columns * shape.width)
                scores.store(0, columns * rows)
                if shape.payload:
                    tiles[1].load(0, columns * shape.payload)
                    sums.store(i * of_sum, of_sum)
        sums.load(0, len(panels) * of_sum)
        out.store(first * of_sum, len(panels) * of_sum)
    cache.flush()


def backward(cache: Cache, shape: Shape, tile: Tile) -> None:
    """A block of columns is copied, then all rows go past it, a chunk of them at a time.

    `local` has the gradients of scores, and the weights, of a chunk. d_a is summed in its own memory.
    """
    panel, widths = tile.panel, shape.widths
    of_rows = [cache.buffer(shape.rows * width) for width in widths]  # a, the upstream gradient
    if shape.payload:  # the centres of rows: sums of the upstream gradient times the output
        of_rows[1].load(0, shape.rows * shape.payload)
        cache.buffer(shape.rows * shape.payload).load(0, shape.rows * shape.payload)
    d_a = cache.buffer(shape.rows * shape.width)
    d_a.store(0, shape.rows * shape.width)
    operands, gradients = ([cache.buffer(shape.columns * width) for width in widths] for _ in range(2))
    tiles = [cache.buffer(tile.columns * width) for width in widths]
    local = [cache.buffer(tile.rows * tile.columns) for _ in widths]
    packed = [cache.buffer(tile.rows * width) for width in widths]
    sums = [cache.buffer(tile.columns * width) for width in widths]
    for j in range(0, shape.columns, tile.columns):
        columns = min(tile.columns, shape.columns - j)
        for operand, copied, summed, width in zip(operands, tiles, sums, widths, strict=True):
            operand.load(j * width, columns * width)
            copied.store(0, columns * width)
            summed.store(0, columns * width)
        for first in range(0, shape.rows, tile.rows):
            rows = min(tile.rows, shape.rows - first)
            for i in range(0, rows, panel):
                for of, kept, width in zip(of_rows, packed, widths, strict=True):
                    of.load((first + i) * width, panel * width)
                    kept.store(i * width, panel * width)
                for copied, found, width in zip(tiles, local, widths, strict=True):
                    copied.load(0, columns * width)
                    found.store(i * tile.columns, columns * panel)
                tiles[0].load(0, columns * shape.width)
                d_a.store((first + i) * shape.width, panel * shape.width)
            for begin in range(0, columns, GROUP * tile.step):
                some = min(GROUP * tile.step, columns - begin)
                for found, kept, summed, width in zip(local, packed, sums, widths, strict=True):
                    for w in range(0, width, panel):  # widths, too, are side by side
                        for i in range(0, rows, panel):
                            found.load(i * tile.columns + begin * panel, some * panel)
                        kept.load(w * rows, rows * panel)
                        summed.store(w * tile.columns + begin * panel, some * panel)
        for summed, gradient, width in zip(sums, gradients, widths, strict=True):
            summed.load(0, columns * width)
            gradient.store(j * width, columns * width)
    d_a.store(0, shape.rows * shape.width)
    cache.flush()


def compulsory(shape: Shape, phase: str) -> int:
    """Bytes of operands read once and of results written once; of rows' statistics none."""
    operands = shape.rows * shape.width + shape.columns * (shape.width + shape.payload)
    out = shape.rows * shape.payload
    return ITEM * (operands + out) * (1 if phase == "forward" else 2)  # all have gradients
