"""Of which columns a forward pass saves the dlogits, and in which slices backward computes the others.

Arithmetic alone. The dlogits of a slice lie in memory that has no other use yet, or in the workspace. Such
memory is where the gradients of columns to come will be. It is also where the rows' gradient will be, which
is rounded at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "TILE_COLUMNS",
    "TILE_ROWS",
    "Needed",
    "Space",
    "columns_in",
    "columns_to_save",
    "product_waves",
    "slices",
]

TILE_COLUMNS = 256
TILE_ROWS = 256  # of a cluster of two multiprocessors
# Where not all dlogits are saved, the others need room to be computed in. With little room, the sums of the
# rows' gradient are read and written so often that matrix products no longer hide it. So many bytes of the
# workspace are left, unless the rows' gradient has room for so many columns.
_BYTES_TO_RECOMPUTE_IN = 128 << 20
_COLUMNS_TO_RECOMPUTE_IN = 2048


def columns_in(bytes: int, rows: int) -> int:
    """How many columns of dlogits fit in so many bytes, rounded down to whole tiles."""
    return bytes // (2 * TILE_COLUMNS * max(rows, 1)) * TILE_COLUMNS


def columns_to_save(rows: int, columns: int, workspace: int, room: int = 0, scores: int = 1) -> int:
    """The dlogits of how many columns a forward pass saves, within `workspace` bytes in either pass.

    All, or whole tiles. While it runs the forward pass needs as much for each of the `scores` of an element.
    room: for the dlogits of so many columns the backward pass has memory elsewhere, in the rows' gradient.
    """
    if rows == 0 or columns == 0:
        return 0
    if 2 * rows * columns * scores <= workspace:
        return columns
    fitting = columns_in(workspace, rows)
    left = 0
    if room < _COLUMNS_TO_RECOMPUTE_IN:
        left = min(fitting, max(columns_in(_BYTES_TO_RECOMPUTE_IN, rows), TILE_COLUMNS))
    return min(fitting - left, fitting // scores // TILE_COLUMNS * TILE_COLUMNS)


class Needed(NamedTuple):
    """Which gradients of a linear head are: those of the rows, of the columns, and of a bias."""

    rows: bool
    columns: bool
    bias: bool = False


@dataclass(frozen=True)
class Space:
    """The memory for dlogits [rows, columns] of two matrices, [rows, width] and [columns, width].

    Attributes:
        own: so many columns fit in the workspace.
        first: the dlogits of columns from this one on are computed; those before were saved.
        writes_columns: there is memory of the columns' gradient.
        has_rows: there is memory of the rows' gradient that dlogits may lie in.
        gathers_in_rows: there is, but gathered rows lie in it.
        sums: sums of dlogits by columns are wanted; they have memory for `own` columns.
    """

    rows: int
    columns: int
    width: int
    own: int
    first: int
    writes_columns: bool
    has_rows: bool
    gathers_in_rows: bool
    sums: bool

    @classmethod
    def of(
        cls, rows: int, columns: int, width: int, own: int, first: int, needed: Needed, gathers: bool
    ) -> Space:
        """gathers: the rows are to be gathered.

        A forward pass that saved some dlogits counted on the memory of the rows' gradient. Gathered rows take
        it where the gradient of the saved columns has room enough.
        """
        rows_memory = needed.rows or 0 < first < columns
        in_saved = first * width // max(rows, 1) if needed.columns else 0
        gathers_in_rows = rows_memory and gathers and in_saved >= _COLUMNS_TO_RECOMPUTE_IN
        own = min(own, -(-columns // TILE_COLUMNS) * TILE_COLUMNS)
        has_rows = rows_memory and not gathers_in_rows
        return cls(rows, columns, width, own, first, needed.columns, has_rows, gathers_in_rows, needed.bias)

    def fitting(self, stop: int) -> int:
        """For the dlogits of how many columns before `stop` there is room."""
        if self.sums:
            return self.own
        to_come = stop * self.width // (self.rows + self.width) // 8 * 8 if self.writes_columns else 0
        return max(self.own, to_come, self.width if self.has_rows else 0)

    def place(self, part: slice) -> str:
        """Where a slice that fits lies: in gradients of "columns" to come, that of the "rows", or "own"."""
        pitch = -(-(part.stop - part.start) // 8) * 8
        if self.writes_columns and part.start * self.width >= self.rows * pitch:
            return "columns"
        return "rows" if self.has_rows and self.width >= pitch else "own"


def slices(spaces: Sequence[Space], clusters: int) -> Iterator[slice]:
    """The slices that have room in each space, last columns first: whole tiles, at least 3/4 of what fits.

    clusters: of two multiprocessors, that this library's kernels multiply with; 0: torch multiplies.
    """
    space = spaces[0]
    stop = space.columns
    while stop > space.first:
        fitting = min(s.fitting(stop) for s in spaces)
        start = space.first if fitting >= stop - space.first else _start(stop, fitting, space, clusters)
        yield slice(start, stop)
        stop = start


def _start(stop: int, fitting: int, space: Space, clusters: int) -> int:
    end = -(-stop // TILE_COLUMNS)
    tiles, left = end - -(-(stop - fitting) // TILE_COLUMNS), end - space.first // TILE_COLUMNS
    if clusters:
        tiles = min(range(tiles, tiles * 3 // 4, -1), key=lambda n: _busy_time(n, space, clusters) / n)
    else:
        tiles = -(-left // -(-left // tiles))  # all slices about equal
    return (end - tiles) * TILE_COLUMNS


def product_waves(row_tiles: int, columns: int, clusters: int) -> tuple[float, int]:
    """How long a product of dlogits takes, in columns of a cluster, and the columns of its tile.

    Tiles come in waves, one for each cluster, and in the last wave some clusters are idle. Of tiles of 256
    columns and of 192 the kernel takes those that are done first (csrc/cuda/sm90/loss_gradients.cu).
    """

    def waves(tile: int) -> int:
        return -(-row_tiles * -(-columns // tile) // clusters) * tile

    return min((waves(256), 256), (1.04 * waves(192), 192))


def _busy_time(tiles: int, space: Space, clusters: int) -> float:
    """How long clusters take for the dlogits of some tiles of columns and for their products.

    In columns by steps of the width. The product by rows is left out: it takes as long for each column,
    however many there are.
    """
    row_tiles, width = -(-space.rows // TILE_ROWS), space.width
    local = -(-row_tiles * tiles // clusters) * TILE_COLUMNS
    return local * width + product_waves(tiles, width, clusters)[0] * space.rows
