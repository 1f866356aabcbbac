"""What kernels read from DRAM, step by step, past an L2 cache that drops what was not used longest.

Multiprocessors keep in step: what several of them read in one step comes from DRAM once. A step is

- of attention and the MLP, a tile that streams past each multiprocessor's job; one that ends has a next one;
- of a contraction, a whole tile of each cluster. All stream along the width, and so does the next step. It
  finds what this one read only if all of that fits the cache.

No constant is fitted; `Hardware.kept` says what fits. Two passes that were counted on an H100 gave the rules:
local gradients of cross entropy, and attention's forward pass with a causal mask. All others are held out.
docs/cost.md, "How the bounds are checked", says where the model errs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

__all__ = ["Job", "Step", "job_steps", "read_by", "tile_steps"]

# A tile that stays, its head, and the tiles of the streamed operand that pass it: their head and their range.
Job = tuple[int, int, int, range]
Block = tuple[str, int, int]  # of an operand
Step = dict[Block, int]  # the bytes of each block that any job reads in a step


def read_by(steps: Iterable[Step], cache: float) -> dict[Block, int]:
    """Bytes of each block that come from DRAM. cache: bytes; what was used least recently leaves it first."""
    kept: dict[Block, int] = {}  # the least recently used first
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
    """The steps of a contraction: all row blocks of a group with one tile of columns, then with the next one.

    groups: how many row blocks each has (tile_schedule.cuh). row_bytes, column_bytes: of each block and tile.
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
    """The steps of attention and the MLP. staying, streamed: bytes of each tile of a head.

    A job has a step for what stays, one for each tile that passes, and one to end. Jobs that start together
    and stream the same are one from then on, so a step takes time for what is different in it.
    """
    order = iter(jobs)
    running: list[tuple[int, Iterator[int], int]] = []  # whose tiles are to pass yet, and of how many jobs
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
