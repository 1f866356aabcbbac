"""A model of what kernels read from DRAM, step by step, through an LRU L2 cache.

Multiprocessors are assumed to run in lockstep: data that several read in one step comes from DRAM once. A
step is

- for attention and the MLP: each multiprocessor's job reads one tile of the streamed operand; a
  multiprocessor whose job ends starts the next one;
- for a contraction: each cluster computes one whole output tile, streaming along the width. The next step
  does the same, so it finds data of this step in the cache only if everything that this step read fits.

No constant is fitted; `Hardware.kept` is the usable cache size. The rules come from two passes whose traffic
was counted on an H100: dlogits of cross entropy, and attention's forward with a causal mask. All others are
held out. docs/cost.md, "How the bounds are checked", says where the model is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

__all__ = ["Job", "Step", "job_steps", "read_by", "tile_steps"]

# (stationary tile, its head, head of the streamed operand, its tiles; a range or a tuple).
Job = tuple[int, int, int, Sequence[int]]
Block = tuple[str, int, int]  # (operand, head, tile)
Step = dict[Block, int]  # bytes of each block that some job reads in a step


def read_by(steps: Iterable[Step], cache: float) -> dict[Block, int]:
    """Bytes of each block that come from DRAM. cache: size in bytes; the least recently used is evicted."""
    kept: dict[Block, int] = {}  # least recently used first
    read: dict[Block, int] = {}
    held = 0
    for step in steps:
        for block, size in step.items():
            if kept.pop(block, None) is None:
                read[block] = read.get(block, 0) + size
                held += size
            kept[block] = size
        if sum(step.values()) > cache:
            kept.clear()
            held = 0
        while held > cache:
            held -= kept.pop(next(iter(kept)))
    return read


def tile_steps(
    groups: Sequence[int], row_bytes: Sequence[int], column_bytes: Sequence[int], clusters: int
) -> Iterator[Step]:
    """The steps of a contraction: all row blocks of a group with one tile of columns, then with the next
    tile.

    groups: number of row blocks of each group (tile_schedule.cuh). row_bytes, column_bytes: bytes of each row
    block and each column tile. clusters: number of tiles computed at a time.
    """

    def tiles() -> Iterator[tuple[int, int]]:
        first = 0
        for count in groups:
            for column in range(len(column_bytes)):
                for row in range(first, first + count):
                    yield row, column
            first += count

    order = tiles()
    while together := list(islice(order, clusters)):
        rows, columns = zip(*together, strict=True)
        yield {("rows", 0, r): row_bytes[r] for r in rows} | {
            ("columns", 0, c): column_bytes[c] for c in columns
        }


def job_steps(
    jobs: Iterable[Job], staying: Sequence[int], streamed: Sequence[int], workers: int
) -> Iterator[Step]:
    """The steps of attention and the MLP.

    staying, streamed: bytes of each tile of the stationary and of the streamed operand, for one head. A job
    has one step to load its stationary tile, one for each streamed tile, and one to end. Jobs that start
    together and stream the same tiles are merged, so that a step costs time only for what differs.
    """
    order = iter(jobs)
    running: list[tuple[int, Iterator[int], int]] = []  # (streamed head, tiles left, number of merged jobs)
    while True:
        started = list(islice(order, workers - sum(count for *_, count in running)))
        if not (running or started):
            return
        step: Step = {}
        going = []
        for of, left, count in running:
            tile = next(left, None)
            if tile is not None:
                step["streams", of, tile] = streamed[tile]
                going.append((of, left, count))
        for tile, head, _, _ in started:
            step["stays", head, tile] = staying[tile]
        alike = Counter((of, passed) for _, _, of, passed in started)
        running = going + [(of, iter(passed), count) for (of, passed), count in alike.items()]
        yield step
