"""The time of kernels on a GPU: jobs on multiprocessors, overlapped with bytes through memory.

A kernel has two constants: the fraction of the device's matrix-product rate that its tiles reach, and the
seconds that a job takes beyond its tiles. bench/cost.py fits them to bench/results and writes constants.json.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from monoidreduce.theory.costs.work import Work
from monoidreduce.theory.hardware import Hardware

__all__ = ["Constants", "Time", "constants_of", "fitted_constants", "makespan", "time_of"]

# `share` of kernels that were not measured, by family: about that of the family's measured kernels.
_UNMEASURED = {"simt": 0.025, "sm80": 0.45, "planes": 0.84, "sm90": 0.85}
*_, _WITH_TILES = _UNMEASURED  # the family whose kernels are named by their tiles instead
# That of torch's matrix products of float32: of a large one (`product_gflops` in bench/results, H200).
_OF_TORCH = {"torch/float32": 0.064, "torch/tf32": 0.52}
# From a profile on an H100 (docs/design/calls.md names the cases): the gap before a kernel, the duration of a
# kernel that does next to nothing, and what CUDA events around a pass measure in addition.
GAP_SECONDS, START_SECONDS, PASS_SECONDS = 0.8e-6, 1.95e-6, 3.15e-6
STEP_SECONDS = 0.05e-6  # per split in combine_splits, which takes 5.2 us with 64 splits and 3.3 us with 32
_MOST_JOBS = 1 << 16  # above it, jobs are averaged instead of scheduled one by one


@dataclass(frozen=True)
class Constants:
    """The constants of a kernel at one operand width.

    Attributes:
        width: width of the operands; narrower ones cost as much as this. 0: cost is proportional to the
            width.
        share: fraction of the device's matrix-product rate that tiles reach.
        job_seconds: seconds of a job beyond its tiles; of all jobs together if jobs overlap.
        fitted: the cases it was fitted to; empty if the kernel was not measured.
    """

    width: int
    share: float
    job_seconds: float
    fitted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Time:
    """The time of a kernel, in seconds.

    Attributes:
        compute: time of its jobs.
        read, written: time to read and to write its bytes.
        launch: time of its launch; for the first kernel of a pass, also the fixed time of the pass.
        known: whether it has measured constants, or needs none.
    """

    compute: float
    read: float
    written: float
    launch: float
    known: bool

    @property
    def memory(self) -> float:
        return self.read + self.written

    @property
    def seconds(self) -> float:
        """Reading and arithmetic overlap; results are written after both."""
        return max(self.compute, self.read) + self.written + self.launch

    @property
    def bound(self) -> str:
        """The bottleneck: "tensor", "dram" or "launch"."""
        return max((self.compute, "tensor"), (self.memory, "dram"), (self.launch, "launch"))[1]


@cache
def fitted_constants() -> dict[str, tuple[Constants, ...]]:
    """The constants of every measured kernel, by kernel name, narrowest first."""
    found = json.loads(Path(__file__).with_name("constants.json").read_text("utf-8"))
    return {
        kernel: tuple(Constants(**{**row, "fitted": tuple(row["fitted"])}) for row in rows)
        for kernel, rows in found.items()
    }


def constants_of(kernel: str, width: int, among: dict[str, tuple[Constants, ...]] | None = None) -> Constants:
    """The constants for the smallest measured width of at least `width`, else for the largest.

    among: constants to choose from, in place of the fitted ones.
    """
    rows = (fitted_constants() if among is None else among).get(kernel, ())
    if not rows:
        family = next((name for name in _UNMEASURED if f"/{name}/" in f"{kernel}/"), _WITH_TILES)
        return Constants(0, _OF_TORCH.get(kernel, _UNMEASURED[family]), 0.0)
    return next((row for row in rows if row.width >= width), rows[-1])


def makespan(
    jobs: Counter[int],
    workers: int,
    tile_seconds: float,
    job_seconds: float,
    shared: int = 0,
    sections: tuple[int, int] = (1, 1),
) -> float:
    """The time until the last worker is done, when free workers take jobs in turn, longest first.

    jobs: number of jobs by their number of tiles. shared: number of the last jobs (all of equal length then)
    that are split evenly over all workers. sections: (heads, heads of a section). Jobs of a section are taken
    before those of the next one.
    """
    if shared:
        ((tiles, count),) = jobs.items()
        whole = makespan(Counter({tiles: count - shared}), workers, tile_seconds, job_seconds)
        return whole + shared * tiles * tile_seconds / workers + job_seconds
    count, every = sum(jobs.values()), sum(tiles * number for tiles, number in jobs.items())
    longest = max(jobs, default=0) * tile_seconds + job_seconds
    if count > _MOST_JOBS:
        return (every * tile_seconds + count * job_seconds) / workers
    if len(jobs) <= 1:
        return -(-count // workers) * longest
    ends = [0.0] * workers
    heads, section = sections
    for first in range(0, heads, section):
        here = min(section, heads - first)
        for tiles in sorted(jobs, reverse=True):
            for _ in range(jobs[tiles] * here // heads):
                heapq.heapreplace(ends, ends[0] + tiles * tile_seconds + job_seconds)
    return max(ends)


def time_of(work: Work, hardware: Hardware, constants: Constants | None = None, first: bool = False) -> Time:
    """The time of a kernel on a GPU.

    constants: used in place of the fitted ones. first: whether it is the first kernel of its pass.
    """
    peak, bandwidth = hardware.reached(torch.bfloat16)
    read, written, known = work.read / bandwidth, work.written / bandwidth, None
    compute = work.steps * STEP_SECONDS
    if work.exposed:
        read, written = 0.0, read + written
    if work.kernel:
        assert hardware.multiprocessors is not None
        known = constants or constants_of(work.kernel, work.width)
        workers = hardware.multiprocessors // work.workers
        tile_seconds = work.flops * max(work.width, known.width) * workers / (peak * known.share)
        of_job, of_all = (0.0, known.job_seconds) if work.overlapped else (known.job_seconds, 0.0)
        compute = makespan(work.jobs, workers, tile_seconds, of_job, work.shared, work.sections) + of_all
    at_once = read + written if work.overlapped and not work.kernel else 0.0
    launch = GAP_SECONDS + max(START_SECONDS - at_once, 0.0) + PASS_SECONDS * first
    return Time(compute, read, written, launch, known is None or bool(known.fitted))
