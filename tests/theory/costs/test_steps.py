"""What steps read past a cache: by hand, and beside an enumeration of the schedule of tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from random import Random

import pytest

from monoidreduce.hardware import find
from monoidreduce.theory.costs.steps import Block, Job, Step, job_steps, read_by, tile_steps
from monoidreduce.theory.costs.work import _groups

H100 = find("h100")


def steps(*names: str, size: int = 10) -> list[Step]:
    return [{("a", 0, ord(block)): size for block in step} for step in names]


def total(found: Iterable[Step], cache: float) -> int:
    return sum(read_by(found, cache).values())


def test_what_several_read_in_a_step_is_read_once() -> None:
    assert total([{("a", 0, 0): 10} | {("a", 0, 0): 10}], 0) == 10


@pytest.mark.parametrize(("cache", "reads"), [(40, "abcd"), (30, "abcdb"), (20, "abcadb")])
def test_a_cache_drops_what_was_not_used_longest(cache: int, reads: str) -> None:
    """With room for three, d takes the place of b, for a was used again."""
    assert total(steps(*"abcadb"), cache) == 10 * len(reads)


def test_a_step_that_does_not_fit_leaves_nothing() -> None:
    assert total(steps("abc", "abc"), 30) == 30
    assert total(steps("abc", "abc"), 29) == 60


def test_a_contraction_without_room_reads_its_tiles_each_step() -> None:
    """Two groups, of 2 row blocks and 1, four tiles of columns, two clusters: 4 steps, then 2."""
    found = list(tile_steps([2, 1], [3, 3, 3], [5, 5, 5, 5], 2))
    assert [sorted(step) for step in found[:1]] == [[("columns", 0, 0), ("rows", 0, 0), ("rows", 0, 1)]]
    assert total(found, 0) == 4 * (2 * 3 + 5) + 2 * (3 + 2 * 5)


def test_a_contraction_that_fits_reads_its_operands() -> None:
    assert total(tile_steps([2, 1], [3, 3, 1], [5, 5, 5, 2], 2), 24) == 7 + 17


def test_jobs_that_start_together_share_what_streams() -> None:
    jobs = [(tile, 0, 0, range(4)) for tile in range(4)]
    read = read_by(job_steps(jobs, [7] * 4, [10] * 4, 2), 0)
    assert sum(size for (operand, *_), size in read.items() if operand == "streams") == 2 * 40
    assert sum(size for (operand, *_), size in read.items() if operand == "stays") == 4 * 7


def test_a_job_follows_one_that_ends() -> None:
    """Of 3, 1 and 1 tiles on two workers: a step to load what stays, one a tile, and one to end."""
    jobs = [(0, 0, 0, range(3)), (1, 0, 0, range(1)), (2, 0, 0, range(1))]
    found = [sorted(block[::2] for block in step) for step in job_steps(jobs, [1] * 3, [1] * 3, 2)]
    assert found == [
        [("stays", 0), ("stays", 1)],
        [("streams", 0)],
        [("streams", 1)],
        [("stays", 2), ("streams", 2)],
        [("streams", 0)],
        [],
    ]


def one_by_one(
    jobs: list[Job], staying: list[int], streamed: list[int], workers: int
) -> Iterator[list[tuple[Block, int]]]:
    """The blocks of each step in order, of every job by itself."""

    def blocks(tile: int, head: int, of: int, passed: range) -> Iterator[tuple[Block, int]]:
        yield ("stays", head, tile), staying[tile]
        for other in passed:
            yield ("streams", of, other), streamed[other]

    order, running = iter(jobs), []
    while running := running + [blocks(*job) for job in islice(order, workers - len(running))]:
        read = [(job, next(job, None)) for job in running]
        running = [job for job, block in read if block is not None]
        yield [*dict(block for _, block in read if block is not None).items()]


@pytest.mark.parametrize("workers", [1, 3, 8])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("group", [1, 2])
def test_jobs_that_stream_the_same_step_as_each_does(group: int, heads: int, workers: int) -> None:
    for seed in range(20):
        draw = Random(seed)
        passed = [range(draw.randint(0, 2), draw.choice((2, 5, 6))) for _ in range(7)]
        jobs = [(tile, head, head // group, passed[tile]) for tile in range(7) for head in range(heads)]
        if seed % 2:
            draw.shuffle(jobs)
        sizes = [draw.randint(1, 9) for _ in range(7)]
        found = [[*step.items()] for step in job_steps(jobs, sizes, sizes, workers)]
        assert found == [*one_by_one(jobs, sizes, sizes, workers)]


@pytest.mark.parametrize("width", [64, 1024, 4096, 8192, 42240])
@pytest.mark.parametrize("row_blocks", [1, 13, 19, 32, 165])
def test_groups_are_those_of_the_schedule(width: int, row_blocks: int) -> None:
    sizes = _groups(row_blocks, 256, width, H100)
    assert sum(sizes) == row_blocks and all(66 % size == 0 for size in sizes)
