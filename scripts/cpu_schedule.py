"""What the CPU engine reads and writes through a cache of any size: its schedule, played to simulated caches.

The passes are those of csrc/include/monoidreduce/cpu/fold_forward.h and fold_backward.h, for one head,
float32, one thread, without masks and biases. Tiles are those that the engine tells.
scripts/measure_traffic_cpu.py holds this against the engine itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Buffer", "Cache", "Shape", "Tile", "attention", "compulsory", "copy", "cross_entropy"]

ITEM = 4  # bytes of a float
LINE = 64  # bytes
FIRST, WAYS = (32 << 10, 8), 16  # the first-level cache: bytes and ways; ways of the last one
MOST_PANELS, BLOCK_BYTES = 16, 1 << 21  # of a block of rows in the forward pass
RUN = 64  # terms of a product that are summed in one run
GROUP = 16 * 2  # steps of columns that the backward pass loads, sums and stores at a time
FACTS = 512  # bytes about a panel's rows


class Tile(NamedTuple):
    rows: int
    columns: int


@dataclass(frozen=True)
class Shape:
    """A fold. rows, columns, width: of the scores. payload: the width of the payload, 0 for none."""

    rows: int
    columns: int
    width: int
    payload: int = 0


class Buffer(NamedTuple):
    """Memory from a line's boundary on, in bytes."""

    begin: int
    size: int


class Level:
    """A cache whose sets drop the line that was used least recently."""

    def __init__(self, size: int, ways: int) -> None:
        self._ways = ways
        self._sets: list[dict[int, bool]] = [{} for _ in range(size // LINE // ways)]

    def touch(self, line: int, written: bool) -> tuple[bool, bool]:
        """Was the line there, and was a line dropped that is to be written back."""
        among = self._sets[line % len(self._sets)]
        if (dirty := among.pop(line, None)) is not None:  # the last in a dict was used last
            among[line] = dirty or written
            return True, False
        among[line] = written
        return False, len(among) > self._ways and among.pop(next(iter(among)))

    def dirty(self) -> int:
        """Lines that are to be written back."""
        return sum(sum(among.values()) for among in self._sets)


class Cache:
    """Two levels, as valgrind simulates them: writes go through the first one, and take a line in.

    Attributes:
        read, written: bytes that passed between the second level and memory.
    """

    def __init__(self, size: int) -> None:
        self._first, self._last, self._end = Level(*FIRST), Level(size, WAYS), 0
        self.read = self.written = 0

    def buffer(self, items: int) -> Buffer:
        """New memory for so many floats."""
        found = Buffer(self._end, ITEM * items)
        self._end += -(-found.size // LINE) * LINE
        return found

    def load(self, of: Buffer, begin: int = 0, end: int | None = None) -> None:
        """Reads the floats [begin, end)."""
        self._touch(of, begin, end, False)

    def store(self, of: Buffer, begin: int = 0, end: int | None = None) -> None:
        """Writes the floats [begin, end)."""
        self._touch(of, begin, end, True)

    def flush(self) -> None:
        """Writes back what is dirty."""
        self.written += LINE * self._last.dirty()

    def _touch(self, of: Buffer, begin: int, end: int | None, written: bool) -> None:
        last = of.begin + (of.size if end is None else min(ITEM * end, of.size))
        for line in range((of.begin + ITEM * begin) // LINE, -(-last // LINE)):
            if self._first.touch(line, False)[0] and not written:
                continue
            there, dropped = self._last.touch(line, written)
            self.read += 0 if there else LINE
            self.written += LINE if dropped else 0


def _pitch(width: int) -> int:
    """The distance in floats of a tile's columns: an odd number of lines (panels.h: ColumnTile)."""
    return (-(-width * ITEM // LINE) | 1) * LINE // ITEM


def _load_tile(
    cache: Cache, of: Buffer, width: int, first: int, tile: Buffer, begin: int, count: int
) -> None:
    """Copies columns of the tile that begins with column `first`."""
    for j in range(begin, begin + count if width else begin):
        cache.load(of, (first + j) * width, (first + j + 1) * width)
        cache.store(tile, j * _pitch(width), j * _pitch(width) + width)


def _over_width(
    cache: Cache,
    tile: Buffer,
    width: int,
    columns: int,
    panel: int,
    rows: tuple[Buffer, int],
    scores: tuple[Buffer, int],
) -> None:
    """The product that gives scores, in runs. rows, scores: memory and the first float of a panel in it."""
    for k in range(0, width, RUN):
        last = min(k + RUN, width)
        cache.load(rows[0], rows[1] + k * panel, rows[1] + last * panel)
        for j in range(columns):
            cache.load(tile, j * _pitch(width) + k, j * _pitch(width) + last)
            cache.store(scores[0], scores[1] + j * panel, scores[1] + (j + 1) * panel)


def _over_columns(
    cache: Cache,
    tile: Buffer,
    width: int,
    columns: int,
    panel: int,
    scores: tuple[Buffer, int],
    sums: tuple[Buffer, int],
) -> None:
    """The product of weights, or of gradients of scores, and columns, in runs: adds to a panel's sums."""
    for first in range(0, columns, RUN):
        last = min(first + RUN, columns)
        cache.load(scores[0], scores[1] + first * panel, scores[1] + last * panel)
        for j in range(first, last):
            cache.load(tile, j * _pitch(width), j * _pitch(width) + width)
        cache.store(sums[0], sums[1], sums[1] + width * panel)


def _forward(cache: Cache, shape: Shape, tile: Tile, results: int) -> None:
    """results: words that a row has besides the payload's fold."""
    panel, count = tile.rows, -(-shape.rows // tile.rows)
    a, b, v = (
        cache.buffer(n)
        for n in (
            shape.rows * shape.width,
            shape.columns * shape.width,
            shape.columns * shape.payload,
        )
    )
    out, rest = cache.buffer(shape.rows * shape.payload), cache.buffer(shape.rows * results)
    at_once = min(max(BLOCK_BYTES // (shape.width * panel * ITEM), 1), MOST_PANELS, count)
    packed, sums = (cache.buffer(at_once * panel * width) for width in (shape.width, shape.payload))
    b_tile, v_tile = (cache.buffer(tile.columns * _pitch(width)) for width in (shape.width, shape.payload))
    scores = cache.buffer(tile.columns * panel)
    a_size, v_size = panel * shape.width, panel * shape.payload
    for first in range(0, count, at_once):
        panels = range(min(at_once, count - first))
        for i in panels:
            cache.load(a, (first + i) * a_size, (first + i + 1) * a_size)
            cache.store(packed, i * a_size, (i + 1) * a_size)
            cache.store(sums, i * v_size, (i + 1) * v_size)
        for j in range(0, shape.columns, tile.columns):
            columns = min(tile.columns, shape.columns - j)
            _load_tile(cache, b, shape.width, j, b_tile, 0, columns)
            _load_tile(cache, v, shape.payload, j, v_tile, 0, columns)
            for i in panels:
                _over_width(cache, b_tile, shape.width, columns, panel, (packed, i * a_size), (scores, 0))
                if shape.payload:
                    _over_columns(
                        cache, v_tile, shape.payload, columns, panel, (scores, 0), (sums, i * v_size)
                    )
        for i in panels:
            cache.store(sums, i * v_size, (i + 1) * v_size)
            cache.store(out, (first + i) * v_size, (first + i + 1) * v_size)
            cache.store(rest, (first + i) * panel * results, (first + i + 1) * panel * results)


class _Sums:
    """Of a gradient by columns: its operand's rows with widths as lanes, and sums of a block of columns."""

    def __init__(self, cache: Cache, shape: Shape, width: int, tile: Tile, panel: int) -> None:
        self.cache, self.panel, self.block, self.width = cache, panel, tile.columns, width
        self.panels = -(-width // panel)
        self.stride = (tile.rows + 1) * panel
        self.operand, self.gradient = cache.buffer(shape.rows * width), cache.buffer(shape.columns * width)
        self.rows = cache.buffer(self.panels * self.stride)
        self.sums = cache.buffer(self.panels * panel * tile.columns)
        cache.store(self.rows)

    def _part(self, panel: int, begin: int, count: int) -> tuple[int, int]:
        at = (panel * self.block + begin) * self.panel
        return at, at + count * self.panel

    def clear(self, begin: int, count: int) -> None:
        for w in range(self.panels):
            self.cache.store(self.sums, *self._part(w, begin, count))

    def keep(self, panel: int, of_chunk: int) -> None:
        size = self.panel * self.width
        self.cache.load(self.operand, panel * size, (panel + 1) * size)
        for w in range(self.panels):
            at = w * self.stride + of_chunk * self.panel**2
            self.cache.store(self.rows, at, at + self.panel**2)

    def load_operand(self, panel: int) -> None:
        size = self.panel * self.width
        self.cache.load(self.operand, panel * size, (panel + 1) * size)

    def add(self, local: Buffer, panels: int, begin: int, count: int) -> None:
        """local: gradients of scores, or weights, of a chunk of rows by a block of columns."""
        run = max(RUN // self.panel, 1)
        for w in range(self.panels):
            for first in range(0, panels, run):
                last = min(first + run, panels)
                for p in range(first, last):
                    self.cache.load(local, *self._part(p, begin, count))
                at = w * self.stride
                self.cache.load(self.rows, at + first * self.panel**2, at + last * self.panel**2)
                self.cache.store(self.sums, *self._part(w, begin, count))

    def finish(self, first: int, begin: int, count: int) -> None:
        for w in range(self.panels):
            self.cache.load(self.sums, *self._part(w, begin, count))
        self.cache.store(self.gradient, (first + begin) * self.width, (first + begin + count) * self.width)


def _backward(cache: Cache, shape: Shape, tile: Tile, panel: int, step: int, words: int) -> None:
    """panel: rows side by side. step: of columns. words: that a row has besides its operands."""
    count = -(-shape.rows // panel)
    rest = cache.buffer(shape.rows * words)
    d_a, d_rows = cache.buffer(shape.rows * shape.width), panel * shape.width
    if shape.payload:  # the centres of rows
        grad_out, out = (cache.buffer(shape.rows * shape.payload) for _ in range(2))
        cache.load(grad_out)
        cache.load(out)
    cache.store(d_a)
    facts = cache.buffer(count * FACTS // ITEM)
    cache.load(rest)
    cache.store(facts)
    widths = (shape.width, shape.payload) if shape.payload else (shape.width,)
    of_columns = [_Sums(cache, shape, width, tile, panel) for width in widths]
    if shape.payload:
        of_columns[1].operand = grad_out
    columns_of = [cache.buffer(shape.columns * width) for width in widths]
    tiles = [cache.buffer(tile.columns * _pitch(width)) for width in widths]
    local = [cache.buffer(tile.rows * tile.columns) for _ in widths]
    lanes, size = cache.buffer((max(widths) + 1) * panel), tile.columns * panel
    for j in range(0, shape.columns, tile.columns):
        columns = min(tile.columns, shape.columns - j)
        groups = [(at, min(GROUP * step, columns - at)) for at in range(0, columns, GROUP * step)]
        for at, some in groups:
            for of, to, width in zip(columns_of, tiles, widths, strict=True):
                _load_tile(cache, of, width, j, to, at, some)
            for sums in of_columns:
                sums.clear(at, some)
        for first in range(0, count, tile.rows // panel):
            panels = min(tile.rows // panel, count - first)
            for p in range(panels):
                for sums in of_columns:
                    sums.keep(first + p, p)
                cache.load(facts, (first + p) * FACTS // ITEM, (first + p + 1) * FACTS // ITEM)
                for sums, to, width, found in zip(of_columns, tiles, widths, local, strict=True):
                    sums.load_operand(first + p)
                    cache.store(lanes)
                    _over_width(cache, to, width, columns, panel, (lanes, 0), (found, p * size))
                for found in local:
                    cache.store(found, p * size, p * size + columns * panel)
                to_a = d_a, (first + p) * d_rows
                _over_columns(cache, tiles[0], shape.width, columns, panel, (local[0], p * size), to_a)
            for at, some in groups:
                for sums, found in zip(of_columns, local, strict=True):
                    sums.add(found, panels, at, some)
        for at, some in groups:
            for sums in of_columns:
                sums.finish(j, at, some)
    cache.store(d_a)


def attention(cache: Cache, shape: Shape, backward: bool, tile: Tile, panel: int, step: int) -> None:
    """A pass of attention. panel: rows that the engine has side by side. step: its columns at a time."""
    if backward:
        _backward(cache, shape, tile, panel, step, words=4)  # lse in two words, its gradient, the centre
    else:
        _forward(cache, shape, tile, results=2)
    cache.flush()


def cross_entropy(cache: Cache, shape: Shape, backward: bool, tile: Tile, panel: int, step: int) -> None:
    """A pass of cross entropy: a target of 8 bytes, and lse in two words."""
    if backward:
        _backward(cache, shape, tile, panel, step, words=5)  # and the loss's gradient
    else:
        _forward(cache, shape, tile, results=5)
    cache.flush()


def copy(cache: Cache, shape: Shape) -> None:
    """out = a + b of rows x width: what the tool is checked with."""
    a, b, out = (cache.buffer(shape.rows * shape.width) for _ in range(3))
    cache.load(a)
    cache.load(b)
    cache.store(out)
    cache.flush()


def compulsory(shape: Shape, backward: bool) -> int:
    """Bytes of operands read once and of results written once; of rows' statistics none."""
    a, b, payload = (
        shape.rows * shape.width,
        shape.columns * shape.width,
        shape.payload * (shape.rows + shape.columns),
    )
    if not backward:
        return ITEM * (a + b + payload)
    of_payload = (
        payload + shape.payload * shape.rows
    )  # v, the upstream gradient and out; then the gradient of v
    return ITEM * (2 * (a + b) + of_payload + shape.payload * shape.columns)
