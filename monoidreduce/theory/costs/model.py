"""How long the kernels of a call take: jobs on multiprocessors beside bytes through memory.

A kernel has two constants. One is the share of the device's rate of matrix products that its tiles reach. The
other is the seconds that a job takes beyond its tiles. bench/cost.py fits them to bench/results and writes
constants.json.
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

# The share of kernels that were not measured: about that of others of their family.
_UNMEASURED = {"simt": 0.025, "sm80": 0.45, "sm90": 0.85}
*_, _WITH_TILES = _UNMEASURED  # whose kernels are named by their tiles
# From a profile on an H100 (docs/design/calls.md says of which cases): the gap before a kernel, how long a
# kernel lasts that does next to nothing, and what events around a pass see beside that.
GAP_SECONDS, START_SECONDS, PASS_SECONDS = 0.8e-6, 1.95e-6, 3.15e-6
STEP_SECONDS = 0.05e-6  # of combine_splits: 5.2 us with 64 splits, 3.3 with 32
_MOST_JOBS = 1 << 16  # that are dealt out one by one


@dataclass(frozen=True)
class Constants:
    """Of a kernel at one width.

    Attributes:
        width: of operands; narrower ones cost as much. 0: cost follows the width.
        share: of the device's rate of matrix products, that tiles reach.
        job_seconds: of a job beyond its tiles; of all jobs together where they overlap.
        fitted: on which cases; empty where the kernel was not measured.
    """

    width: int
    share: float
    job_seconds: float
    fitted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Time:
    """Seconds of a kernel.

    Attributes:
        compute: of its jobs.
        read, written: of its bytes.
        launch: of its launch; of the first kernel of a pass, what the pass takes too.
        known: has it constants of its own, or does it need none.
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
        """If what is read hides arithmetic, or arithmetic hides it; results are written after both."""
        return max(self.compute, self.read) + self.written + self.launch

    @property
    def bound(self) -> str:
        """What takes longest: "tensor", "dram" or "launch"."""
        return max((self.compute, "tensor"), (self.memory, "dram"), (self.launch, "launch"))[1]


@cache
def fitted_constants() -> dict[str, tuple[Constants, ...]]:
    """Of every measured kernel, the narrowest first."""
    found = json.loads(Path(__file__).with_name("constants.json").read_text("utf-8"))
    return {
        kernel: tuple(Constants(**{**row, "fitted": tuple(row["fitted"])}) for row in rows)
        for kernel, rows in found.items()
    }


def constants_of(kernel: str, width: int, among: dict[str, tuple[Constants, ...]] | None = None) -> Constants:
    """The constants of the narrowest measured width that holds `width`, else of the widest."""
    rows = (fitted_constants() if among is None else among).get(kernel, ())
    if not rows:
        family = next((name for name in _UNMEASURED if f"/{name}/" in f"{kernel}/"), _WITH_TILES)
        return Constants(0, _UNMEASURED[family], 0.0)
    return next((row for row in rows if row.width >= width), rows[-1])


def makespan(
    jobs: Counter[int], workers: int, tile_seconds: float, job_seconds: float, shared: int = 0
) -> float:
    """Until the last of `workers` has done its jobs, which take them one after another, the longest first.

    jobs: how many have so many tiles. shared: how many equal ones all workers share at last, a part each.
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
    for tiles in sorted(jobs.elements(), reverse=True):
        heapq.heapreplace(ends, ends[0] + tiles * tile_seconds + job_seconds)
    return max(ends)


def time_of(work: Work, hardware: Hardware, constants: Constants | None = None, first: bool = False) -> Time:
    """How long a kernel takes on a GPU. constants: instead of fitted ones. first: is it that of its pass."""
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
        compute = makespan(work.jobs, workers, tile_seconds, of_job, work.shared) + of_all
    at_once = read + written if work.overlapped and not work.kernel else 0.0
    launch = GAP_SECONDS + max(START_SECONDS - at_once, 0.0) + PASS_SECONDS * first
    return Time(compute, read, written, launch, known is None or bool(known.fitted))
