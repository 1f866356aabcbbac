"""Decides how many columns' dlogits forward saves, and in which slices backward computes those of the others.

Only arithmetic, no tensors. The dlogits of a slice lie in the workspace, or in memory that is allocated for a
gradient but not written yet: the gradient of columns in later slices, or the gradient of the rows, which is
written at the end.
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
    "all_planes_fit",
    "columns_at_once",
    "columns_in",
    "columns_to_save",
    "enough_planes_fit",
    "fewest_tokens_fit",
    "leaves_clusters_idle",
    "pays_to_save",
    "product_waves",
    "slices",
    "tokens_at_once",
]

TILE_COLUMNS = 256
TILE_ROWS = 256  # the rows of the tile that a cluster of two multiprocessors computes
# If forward does not save all dlogits, backward needs room to compute the others in. With little room slices
# are narrow, and the float32 sum of the rows' gradient is read and written once for each slice, which matrix
# products then no longer hide. So forward leaves this much of the workspace free, unless the memory of the
# rows' gradient has room for this many columns.
_BYTES_TO_RECOMPUTE_IN = 128 << 20
_COLUMNS_TO_RECOMPUTE_IN = 2048


def columns_in(bytes: int, rows: int) -> int:
    """The number of columns of 16-bit dlogits that fit in so many bytes, rounded down to whole tiles."""
    return bytes // (2 * TILE_COLUMNS * max(rows, 1)) * TILE_COLUMNS


def columns_to_save(rows: int, columns: int, workspace: int, room: int = 0, scores: int = 1) -> int:
    """The number of columns whose dlogits forward saves: all of them, or a multiple of TILE_COLUMNS.

    workspace: the bytes that either pass may use. room: the number of columns for whose dlogits backward has
    room in the memory of the rows' gradient. scores: 2 for distillation, whose forward pass needs a second
    buffer of this size while it runs.
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


# A saved dlogit is written, read and written once more: 6 bytes. To compute it again takes `width`
# multiply-adds and writes 2 bytes. At 3.5 TB/s and 700 TFLOP/s both take as long at a width of 400.
_NARROWEST_TO_SAVE = 512
# Upstream gradients of rows take four small kernels, about 12 us. So many multiply-adds take an H200 50 us.
_FEWEST_TERMS_TO_SAVE = 1 << 34


def pays_to_save(rows: int, columns: int, width: int) -> bool:
    """Whether saving so many dlogits takes less time than computing them again."""
    return width >= _NARROWEST_TO_SAVE and rows * columns * width >= _FEWEST_TERMS_TO_SAVE


# Adding a float32 product for dW to memory takes as long as computing one of so many rows: an H100 moves 8
# bytes an element at 3 TB/s, and multiplies at 750 TFLOP/s.
_ROWS_OF_AN_ADDITION = 1024
# With fewer tokens at once, additions would take longer than computing logits twice; by the number of heads.
_FEWEST_TOKENS = {1: 3 * TILE_ROWS, 2: 2 * TILE_ROWS}


def fewest_tokens_fit(rows: int, columns: int, workspace: int, heads: int = 1) -> bool:
    """Whether dlogits of many enough tokens fit in the workspace, and not those of all tokens."""
    at_once = workspace // (2 * heads * max(columns, 1))
    return _FEWEST_TOKENS[heads] <= at_once < rows


# float32 operands in planes (planes.py). Forward saves dlogits in float32, 4 bytes each. They are split into
# planes, of as many bytes, a quarter of the columns at a time.
_BYTES_OF_PLANES = 5
_PLANES_COLUMNS = 128  # of a tile
_ROWS_OF_AN_ADDITION_OF_PLANES = 280  # an H200 multiplies at 200 TFLOP/s
# Tiles of dX of a part. A Hopper GPU has 66 clusters for them, and with fewer tiles than these too many idle.
_FEWEST_TILES = 44


def columns_at_once(columns: int) -> int:
    """How many columns of saved dlogits are split into planes at once: at most a quarter, in whole tiles."""
    most = max(columns // 4 // TILE_COLUMNS, 1)
    tiles = -(-columns // TILE_COLUMNS)
    return -(-tiles // -(-tiles // most)) * TILE_COLUMNS


def all_planes_fit(rows: int, columns: int, workspace: int) -> bool:
    """Whether the dlogits of all columns fit in the workspace, in planes."""
    return _BYTES_OF_PLANES * rows * columns <= workspace


def enough_planes_fit(rows: int, columns: int, width: int, workspace: int) -> bool:
    """Whether the dlogits of all tokens fit in the workspace, in planes, or those of many enough."""
    at_once = workspace // (_BYTES_OF_PLANES * max(columns, 1))
    return at_once >= rows or at_once // TILE_ROWS * -(-width // _PLANES_COLUMNS) >= _FEWEST_TILES


def tokens_at_once(
    rows: int,
    columns: int,
    width: int,
    workspace: int,
    clusters: int,
    other_width: int = 0,
    planes: bool = False,
) -> int:
    """The number of tokens whose dlogits of all columns are computed at a time, in whole tiles.

    other_width: of a teacher, whose weights are stored too while scores are computed. planes: whether
    operands are float32, in planes.

    It is the one with which the three products take the least time: a product ends with a wave of tiles in
    which some clusters are idle, and each part adds to all of dW.
    """
    tiles, addition = (
        -(-rows // TILE_ROWS),
        _ROWS_OF_AN_ADDITION_OF_PLANES if planes else _ROWS_OF_AN_ADDITION,
    )
    tile_columns = _PLANES_COLUMNS if planes else TILE_COLUMNS
    of_dlogit = _BYTES_OF_PLANES if planes else 4 if other_width else 2
    of_tile = of_dlogit * TILE_ROWS * max(columns, 1)
    most = min(max(workspace // of_tile, 1), tiles)

    def seconds(at_once: int) -> float:
        """The time of all parts, in the unit of `_busy_time`."""
        scores = -(-at_once * -(-columns // tile_columns) // clusters) * tile_columns * (width + other_width)
        of_rows = product_waves(at_once, width, clusters, planes)[0] * columns
        waves = product_waves(-(-columns // TILE_ROWS), width, clusters, planes)[0]
        of_columns = waves * max(at_once * TILE_ROWS, addition)
        return tiles / at_once * (scores + of_rows + of_columns)

    parts = {-(-tiles // -(-tiles // n)) for n in range(-(-most // 2), most + 1)}
    return min(parts, key=seconds) * TILE_ROWS


class Needed(NamedTuple):
    """Which gradients of a linear head are needed."""

    rows: bool
    columns: bool
    bias: bool = False


@dataclass(frozen=True)
class Space:
    """The memory in which backward can compute dlogits [rows, columns] of X [rows, width] and W [columns,
    width].

    Attributes:
        own: the number of columns whose dlogits fit in the workspace.
        first: the first column whose dlogits are computed; those of the columns before it were saved.
        writes_columns: whether dW is allocated, so that its unwritten part can hold dlogits.
        has_rows: whether dX is allocated and can hold dlogits.
        gathers_in_rows: whether dX is allocated, but holds the gathered rows.
        sums: whether a bias gradient is needed. The buffer for its sums has room for `own` columns.
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
        """gathers: the active rows will be gathered, which needs memory like X.

        Gathered rows take the memory of dX if dW of the saved columns has enough room for dlogits. dX is also
        allocated if its gradient is not needed but some dlogits were saved: columns_to_save counted on it.
        """
        rows_memory = needed.rows or 0 < first < columns
        in_saved = first * width // max(rows, 1) if needed.columns else 0
        gathers_in_rows = rows_memory and gathers and in_saved >= _COLUMNS_TO_RECOMPUTE_IN
        own = min(own, -(-columns // TILE_COLUMNS) * TILE_COLUMNS)
        has_rows = rows_memory and not gathers_in_rows
        return cls(rows, columns, width, own, first, needed.columns, has_rows, gathers_in_rows, needed.bias)

    def fitting(self, stop: int) -> int:
        """For how many columns there is memory for dlogits, if the slice ends at column `stop`."""
        if self.sums:
            return self.own
        to_come = stop * self.width // (self.rows + self.width) // 8 * 8 if self.writes_columns else 0
        return max(self.own, to_come, self.width if self.has_rows else 0)

    def place(self, part: slice) -> str:
        """Where the dlogits of a slice lie: "columns" (dW of later slices), "rows" (dX) or "own"
        (workspace)."""
        pitch = -(-(part.stop - part.start) // 8) * 8
        if self.writes_columns and part.start * self.width >= self.rows * pitch:
            return "columns"
        return "rows" if self.has_rows and self.width >= pitch else "own"


def slices(spaces: Sequence[Space], clusters: int) -> Iterator[slice]:
    """The slices in which dlogits are computed, the last columns first. Each has room in every space,
    consists of whole tiles, and is at least 3/4 as wide as what fits.

    clusters: the number of clusters of two multiprocessors, if this library's kernels compute the products;
        0:
    torch does.
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


def product_waves(row_tiles: int, columns: int, clusters: int, planes: bool = False) -> tuple[float, int]:
    """The time of a product with dlogits, in columns that a cluster computes, and the columns of its tile.

    Each wave has a tile for every cluster, and in the last wave some clusters are idle. The kernel chooses
    tiles of 256 or 192 columns, whichever finishes first (csrc/cuda/sm90/loss_gradients.cu). That for planes
    has one size of tiles.
    """

    def waves(tile: int) -> int:
        return -(-row_tiles * -(-columns // tile) // clusters) * tile

    if planes:
        return waves(_PLANES_COLUMNS), _PLANES_COLUMNS
    return min((waves(256), 256), (1.04 * waves(192), 192))


# How many times as long cuBLAS takes for dlogits @ W as this library's kernel would with all clusters busy.
# On an H200 that kernel and cuBLAS take, for tokens x classes x width: 128 x 8192 x 1024 60 and 9 us,
# 512 x 32000 x 2048 220 and 95, 1024 x 32000 x 2048 254 and 182.
_TIME_OF_CUBLAS = 1.4


def leaves_clusters_idle(rows: int, width: int, clusters: int) -> bool:
    """Whether dX [rows, width] has so few tiles that cuBLAS computes the product dlogits @ W faster.

    One cluster sums a tile over all classes, while cuBLAS splits long sums. With many tiles cuBLAS would only
    save padding, and where all dlogits were saved it would need a float32 sum as large as dX. clusters: 0 if
    torch multiplies in any case.
    """
    row_tiles = -(-rows // TILE_ROWS)
    few = row_tiles * -(-width // TILE_COLUMNS) <= 3 * clusters
    all_busy = row_tiles * width * _TIME_OF_CUBLAS
    return few and product_waves(row_tiles, width, max(clusters, 1))[0] * clusters > all_busy


def _busy_time(tiles: int, space: Space, clusters: int) -> float:
    """The time for the dlogits of a slice of `tiles` tiles of columns, and for the products with them.

    The unit is a column times a step of the width. dX is left out: a column adds the same time to it however
    wide the slice is.
    """
    row_tiles, width = -(-space.rows // TILE_ROWS), space.width
    local = -(-row_tiles * tiles // clusters) * TILE_COLUMNS
    return local * width + product_waves(tiles, width, clusters)[0] * space.rows
