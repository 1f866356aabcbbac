"""The work of the kernels of a launch: jobs, and bytes moved (docs/cost.md has the formulas).

The launch's plan has the tile sizes, and `_C` the jobs of such tiles (csrc/plan/jobs.h), except for the
families sm80 and simt. There all scores that the mask keeps count as one job shared by the whole GPU, and the
cost of partial tiles is part of the kernel's constants.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import torch

from monoidreduce import _C, _torch_private
from monoidreduce._ops.dry_run import Launch, Operand
from monoidreduce._ops.slices import TILE_ROWS, product_waves
from monoidreduce.theory.costs.steps import Job, job_steps, read_by, tile_steps
from monoidreduce.theory.hardware import Hardware

__all__ = ["Band", "Work", "contraction", "moves", "work_of"]

# Clusters drift apart and read data again that has left the cache. Passes of the losses read 1.00 to 1.28
# times the bytes of clusters in lockstep on one H100, and 1.00 to 1.48 times on another.
_DRIFT = 1.2
_BLOCK_ROWS = 128  # rows of each block of a contraction's cluster
_SECTOR = 32  # bytes of DRAM that are read or written at least
_TORCH_TILE = 256, 256  # tile of two multiprocessors in cuBLAS's products of large matrices on Hopper
_PLANE_TILE = (256, 128)  # of kernels that multiply planes (csrc/plan/tiles.h)
_RESULTS = "loss lse lse_low stats log_probs entropy top1"  # results of folds over contractions
# To be fast, the model simulates at most _STEPS steps of a job, and about _JOBS jobs of some of the heads. If
# a head has more than _STEPS_OF_HEAD steps, it simulates some of the jobs, or several as one. Of a
# contraction it simulates about _TILES tiles. docs/cost.md, "What it does not know", has the resulting error
# in bytes.
_STEPS, _JOBS, _STEPS_OF_HEAD, _TILES = 128, 2048, 1 << 21, 1 << 20


@dataclass(frozen=True)
class Work:
    """The work of one kernel launch.

    Attributes:
        name: name for display.
        kernel: key of its constants in the model; "" for a kernel that only moves bytes.
        width: width of the operands; also selects the constants.
        flops: FLOPs of a tile per unit of width.
        jobs: number of jobs by their number of tiles.
        read, written: bytes of DRAM.
        workers: multiprocessors that share a job.
        shared: number of the last jobs that are split evenly over all blocks.
        sections: (heads, heads whose jobs are taken before those of the next heads).
        overlapped: a job loads while the previous one ends; for a kernel that only moves bytes: they move
            from its start, so the fixed duration of a kernel overlaps with them.
        exposed: reading is not overlapped with jobs, because they are as short as their first loads.
        steps: partial results that a warp adds one after another.
        l2: bytes that multiprocessors request from the L2 cache, and bytes that they add to sums there. None
            if unknown, for example if the plan has no tile size.
    """

    name: str
    kernel: str
    width: int
    flops: float
    jobs: Counter[int]
    read: int
    written: int
    workers: int = 1
    shared: int = 0
    sections: tuple[int, int] = (1, 1)
    overlapped: bool = False
    exposed: bool = False
    steps: int = 0
    l2: tuple[int, int] | None = None

    @property
    def tiles(self) -> int:
        return sum(tiles * count for tiles, count in self.jobs.items())

    @property
    def executed(self) -> float:
        """Executed FLOPs, counting whole tiles."""
        return self.flops * self.width * self.tiles


@dataclass(frozen=True)
class Band:
    """The columns that each row keeps, as a window (fold.h: ColumnRange). left, right: -1 if unbounded."""

    rows: int
    columns: int
    left: int = -1
    right: int = -1

    @property
    def all(self) -> bool:
        return self.left < 0 and self.right < 0

    def pairs(self) -> int:
        """Number of pairs of a row and a column that it keeps."""
        shift = self.columns - self.rows

        def before(first: int) -> int:
            """Number of pairs with column < first + row."""
            return sum(
                sign * (_triangle(self.rows - 1 + first - cut) - _triangle(first - cut - 1))
                for sign, cut in ((1, 0), (-1, self.columns))
            )

        kept = self.rows * self.columns if self.right < 0 else before(shift + self.right + 1)
        return kept - (0 if self.left < 0 else before(shift - self.left))

    def longest(self, by_rows: bool, staying: int) -> int:
        """The largest number of streamed lines that a tile of `staying` rows or columns keeps."""
        others = self.columns if by_rows else self.rows
        return others if min(self.left, self.right) < 0 else min(staying + self.left + self.right, others)

    def passed(self, by_rows: bool, staying: int, streamed: int) -> list[range]:
        """For each tile of `staying` rows or columns, the range of tiles that stream past it."""
        band = self.rows, self.columns, self.left, self.right
        return [range(*tiles) for tiles in _C.streamed_tiles(*band, by_rows, staying, streamed)]

    def jobs(self, by_rows: bool, staying: int, streamed: int) -> Counter[int]:
        """The number of jobs (of `staying` rows or columns each) by their number of streamed tiles."""
        return Counter(map(len, self.passed(by_rows, staying, streamed)))


def _triangle(n: int) -> int:
    """1 + ... + n."""
    return n * (n + 1) // 2 if n > 0 else 0


def _parts_of(group: int, tiles: range, parts: tuple[int, int]) -> list[tuple[range, range]]:
    """The heads of the group and the tiles of each part of a job. parts: of the heads and of the tiles."""

    def split(all_of_them: range, count: int) -> list[range]:
        ends = [len(all_of_them) * n // count for n in range(count + 1)]
        return [all_of_them[begin:end] for begin, end in pairwise(ends)]

    return [(heads, part) for part in split(tiles, parts[1]) for heads in split(range(group), parts[0])]


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def _parts(size: int, tile: int, line: int) -> list[int]:
    """Bytes of each tile of `size` lines; the last tile may be short. line: bytes of a line."""
    return [line * min(tile, size - first) for first in range(0, size, tile)]


def _bytes(launch: Launch, names: str) -> int:
    """Bytes of the named operands of a launch; absent ones count as 0."""
    return sum(launch.arguments[name].bytes for name in names.split() if name in launch.arguments)


def _family(launch: Launch) -> str:
    """The plan's family of kernels with the operands' dtype, such as "sm80/float32"."""
    assert launch.plan is not None
    first = next(a for a in launch.arguments.values() if isinstance(a, Operand))
    return f"{launch.plan.tier}/{str(first.dtype).removeprefix('torch.')}"


def moves(name: str, read: int, written: int, overlapped: bool = False) -> Work:
    """The work of a kernel that only moves bytes."""
    return Work(name, "", 0, 0.0, Counter(), read, written, overlapped=overlapped, l2=(read, 0))


def _asked(jobs: Counter[int], tile: tuple[int, int], line: int) -> int:
    """Bytes requested from L2: the stationary tile once per job, and the streamed tiles. line: bytes of a row
    or column."""
    return line * (tile[0] * jobs.total() + tile[1] * sum(tiles * count for tiles, count in jobs.items()))


@dataclass(frozen=True)
class _Problem:
    """The fold problem of an attention or MLP launch.

    heads: key heads, each shared by `group` query heads.
    """

    launch: Launch
    plan: _C.Plan
    band: Band
    heads: int
    group: int
    width: int

    @classmethod
    def of(cls, launch: Launch) -> _Problem:
        a, plan = launch.arguments, launch.plan
        assert plan is not None
        if "q" in a:
            q, k, v = (a[name].shape for name in "qkv")
            band = Band(q[2], k[2], a["left"], a["right"])
            return cls(launch, plan, band, k[0] * k[1], q[1] // k[1], max(q[3], v[3]))
        (rows, width), units, outputs = a["x"].shape, a["w1"].shape[0], a["w2"].shape[0]
        return cls(launch, plan, Band(rows, units), 1, 1, max(width, outputs))

    @property
    def partial(self) -> bool:
        """Whether a window or a mask may exclude elements (job_split.h)."""
        bias = self.launch.arguments.get("bias")
        return not self.band.all or (bias is not None and bias.dtype == torch.bool)

    @property
    def repairs(self) -> bool:
        """Whether results that are not finite are computed again (repair.cuh)."""
        return self.plan.planes or (self.partial and self.plan.tensor_cores)

    @property
    def multiplied(self) -> int:
        """How many products of matrices the kernels compute for one: three of float32 operands in planes."""
        return 3 if self.plan.planes else 1

    @property
    def scores(self) -> str:
        """Suffix of the kernel name for operands and score options that make attention slower."""
        a, planes = self.launch.arguments, "/planes" * self.plan.planes
        return planes + ("/bias" if "bias" in a else "/softcap" if a.get("softcap") else "")

    def packed(self, packing: tuple[int, int, int], columns: int) -> Counter[int]:
        """Jobs of split-KV plans for few rows: a tile packs rows of several query heads, and its columns are
        split. packing: of the plan. columns: of a tile."""
        heads, rows, splits = packing
        found = Counter[int]()
        for tiles, count in self.band.jobs(True, rows, columns).items():
            for of_split in _C.split_tiles(tiles, splits):
                found[of_split] += count * self.heads * _tiles(self.group, heads)
        return found

    def read(
        self, by_rows: bool, tile: tuple[int, int] | None, staying: str, streamed: str, gpu: Hardware
    ) -> tuple[int, int]:
        """DRAM bytes read of the stationary and of the streamed operands.

        by_rows: rows are stationary. tile: (stationary lines, streamed lines), if the plan has one. staying,
            streamed: operand names.
        """
        stay, stream = _bytes(self.launch, staying), _bytes(self.launch, streamed)
        if tile is None or self.plan.packing is not None or not (stay and stream):
            return stay, stream
        shared, turns = (self.group, 1) if by_rows else (1, self.group)
        section = 1 if self.band.all else self.section(by_rows, streamed)
        fold = _Fold(self.band, by_rows, tile, self.heads, shared, turns, section, self.plan.job_parts)
        return stay, _streamed(fold, stay, stream, gpu)

    def section(self, by_rows: bool, streamed: str) -> int:
        """The number of heads whose jobs are taken before those of the next ones (sections.h)."""
        of_head = max(_bytes(self.launch, streamed) // self.heads, 1)
        return max(_C.SECTION_BYTES // of_head, 1) * (self.group if by_rows else 1)

    def work(
        self,
        name: str,
        tile: tuple[int, int] | None,
        products: int,
        by_rows: bool,
        streamed: str,
        read: int,
        written: int,
    ) -> Work:
        """The work of a kernel with `products` matrix products per tile of the band.

        tile: (stationary lines, streamed lines), if the plan has one. streamed: operand names. read, written:
        DRAM bytes.
        """
        group, all_heads = (1, self.heads * self.group) if by_rows else (self.group, self.heads)
        packing = self.plan.packing
        few = "" if packing is None else "/few rows"
        if packing is not None and tile is not None:
            jobs, flops = self.packed(packing, tile[1]), 2.0 * products * _C.PACKED_LINES * tile[1]
            return Work(name, f"{name}{few}/sm90", self.width, flops, jobs, read, written, exposed=True)
        if tile is None:
            jobs, kernel = Counter({self.band.pairs() * self.heads * self.group: 1}), _family(self.launch)
            return Work(
                name, f"{name}{few}/{kernel}", self.width, 2.0 * products, jobs, read, written, shared=1
            )
        jobs = Counter[int]()
        for tiles, count in self.band.jobs(by_rows, *tile).items():
            for heads, part in _parts_of(group, range(tiles), self.plan.job_parts):
                jobs[len(heads) * len(part)] += count * all_heads
        added = 4 * self.width * tile[1] * sum(tiles * count for tiles, count in jobs.items())
        return Work(
            name=name,
            kernel=f"{name}/{tile[0]}x{tile[1]}",
            width=self.width,
            flops=2.0 * products * tile[0] * tile[1],
            jobs=jobs,
            read=read,
            written=written,
            shared=self.plan.split_jobs,
            sections=(all_heads, min(self.section(by_rows, streamed), all_heads)),
            l2=(_asked(jobs, tile, 2 * self.width * 2), added * (products == 5)),  # two operands of 16 bits
        )


@dataclass(frozen=True)
class _Fold:
    """The jobs of a kernel, as a key for caching.

    tile: (stationary lines, streamed lines). heads: key heads. group: stationary heads that use one of them.
    turns: query heads that stream past a stationary tile of a key head, one after another. section: heads
    whose jobs are taken before those of the next ones. parts: of the turns and of the tiles of a job, which
    different blocks take.
    """

    band: Band
    by_rows: bool
    tile: tuple[int, int]
    heads: int
    group: int
    turns: int
    section: int
    parts: tuple[int, int]

    def jobs(self, passed: Sequence[range], of_head: int, heads: int) -> Iterator[Job]:
        """The jobs of the first `heads` heads, in the order in which blocks take them.

        passed: the tiles that stream past each tile, in each turn. of_head: the number of tiles that stream,
            of a head.
        """

        def in_turn(turns: range, passes: range) -> Sequence[int]:
            if self.turns == 1:
                return passes
            return tuple(turn * of_head + n for turn in turns for n in passes)

        parts = [[in_turn(*part) for part in _parts_of(self.turns, passes, self.parts)] for passes in passed]
        band = self.band.rows, self.band.columns, self.band.left, self.band.right
        for tile, head in _C.job_order(*band, self.by_rows, len(passed), heads, self.section):
            for part in parts[tile]:
                yield tile, head, head // self.group, part


@lru_cache(1024)
def _streamed(fold: _Fold, stay: int, stream: int, gpu: Hardware) -> int:
    """DRAM bytes read of the streamed operand. stay, stream: total bytes of both operands."""
    band, (staying, streaming) = fold.band, fold.tile
    lines, others = (band.rows, band.columns) if fold.by_rows else (band.columns, band.rows)
    heads, of_head = fold.heads * fold.group, stream // (fold.heads * fold.turns)
    longest = band.longest(fold.by_rows, staying)
    turns_of_job = _tiles(fold.turns, fold.parts[0])
    step = streaming * _tiles(_tiles(longest * turns_of_job, _STEPS), streaming)
    many = _tiles(_tiles(lines, staying) * _tiles(longest, step), _STEPS_OF_HEAD)
    weight = Fraction(many)
    if longest * of_head > gpu.kept * others:  # nothing stays cached between jobs: merge `many` jobs into one
        staying *= many
        passed = band.passed(fold.by_rows, staying, step)
    else:  # streamed tiles stay cached: simulate only the jobs in the middle
        passed = band.passed(fold.by_rows, staying, step)
        alike = [tile for tile, streams in enumerate(passed) if streams]
        skipped = (len(alike) - _tiles(len(alike), many)) // 2
        for tile in (*alike[:skipped], *alike[len(alike) - skipped :]):
            passed[tile] = range(0)
        weight = Fraction(max(len(alike), 1), max(len(alike) - 2 * skipped, 1))
    together = max(fold.section, fold.group)
    some = min(together * _tiles(_JOBS, together * len(passed)), heads)  # the other heads read as much
    parts = _parts(others, step, of_head // others)
    steps = job_steps(
        fold.jobs(passed, len(parts), some),
        _parts(lines, staying, stay // (heads * lines)),
        parts * fold.turns,
        gpu.facts().multiprocessors,
    )
    read = sum(size for (operand, *_), size in read_by(steps, gpu.kept).items() if operand == "streams")
    return int(read * weight) * heads // some


def _split_heads(launch: Launch, operands: str) -> Work:
    """The kernels that split float32 operands into planes."""
    return moves("split_heads", _bytes(launch, operands), _bytes(launch, operands))


def _forward(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """Kernels of the forward pass of attention or the MLP."""
    problem, scratch = _Problem.of(launch), _bytes(launch, "scratch")  # partial results of split-KV
    tile = problem.plan.tile
    read = sum(problem.read(True, tile, "q x", "k v w1 w2", gpu)) + _bytes(launch, "bias bias1 bias2")
    written, name = _bytes(launch, "out lse lse_low out_low"), launch.name + problem.scores
    splits = 1 if problem.plan.packing is None else problem.plan.packing[2]
    if problem.plan.planes:
        yield _split_heads(launch, "q k v x w1 w2")
    yield problem.work(
        name, tile, 2 * problem.multiplied, True, "k v w1 w2", read, scratch if splits > 1 else written
    )
    if splits > 1:
        yield Work("combine_splits", "", 0, 0.0, Counter(), scratch, written, steps=splits)
    if problem.repairs:
        yield moves("repair_forward", _bytes(launch, "lse"), 0)


def _backward(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """Kernels of the backward pass of attention or the MLP.

    They prepare delta and lse of each row of attention, compute the gradients, and repair those that masked
    elements made NaN.
    """
    problem, a = _Problem.of(launch), launch.arguments
    if "q" in a:
        statistics = _bytes(launch, "lse lse_low")
        cleared = _bytes(launch, "dq") if problem.plan.tensor_cores and problem.plan.adds_rows else 0
        yield moves("prepare_rows", _bytes(launch, "grad_out out out_low") + statistics, statistics + cleared)
    if problem.repairs and problem.plan.planes:
        yield moves("clear_marks", 0, 0)
    if problem.plan.planes:
        yield _split_heads(launch, "q k v x w1 w2 grad_out")
    yield from _gradients(launch, problem, gpu)
    if problem.repairs:
        yield moves("repair_backward", 0, 0)


def _gradients(launch: Launch, problem: _Problem, gpu: Hardware) -> Iterator[Work]:
    """The gradient kernels: one for all gradients, one for all but dq/dx, or one pass for each gradient.

    On Hopper one kernel has the jobs of all passes, whose tiles are counted in products of two matrices.
    """
    a, name, plan = launch.arguments, launch.name + problem.scores, problem.plan
    of_rows, of_columns, biases = "q x grad_out", "k v w1 w2", _bytes(launch, "bias bias1")
    rows, *columns = ("dq", "dk", "dv") if "q" in a else ("dx", "dw1", "dw2")
    if plan.adds_rows or (rows not in a and problem.width <= 128 and not plan.planes):
        # dq/dx is summed in memory and streams too: parts of it are evicted, written, and read again.
        tile = None if plan.tile is None else (plan.tile[1], plan.tile[0])
        sums, streamed = _bytes(launch, rows), f"{of_rows} {rows}"
        stay, stream = problem.read(False, tile, of_columns, streamed, gpu)
        evicted = stream * sums // max(_bytes(launch, streamed), 1)
        written, products = evicted + _bytes(launch, " ".join(columns)), 5 if rows in a else 4
        yield problem.work(name, tile, products, False, streamed, stay + stream + biases, written)
        return
    narrow = " alone" * (problem.width <= 128)  # has its own constants: it is not as slow as a width of 256
    tile, passes, adds_bias = plan.streamed_tile or plan.tile, [], None
    if plan.planes and "dbias" in a:  # this pass adds the bias's gradient, and runs for it alone too
        adds_bias = columns[0] if 2 in a["dbias"].repeated else rows
    for gradient, products in zip((rows, *columns), (3, 3, 2), strict=True):
        if gradient not in a and gradient != adds_bias:
            continue
        by_rows = gradient == rows
        operands = (of_rows, of_columns) if by_rows else (of_columns, of_rows)
        read = sum(problem.read(by_rows, tile, *operands, gpu)) + biases
        count = products * problem.multiplied
        kernel = f"{name}/{gradient}{narrow}"
        written = _bytes(launch, gradient) + (a["dbias"].bytes_in_memory if gradient == adds_bias else 0)
        work = problem.work(kernel, tile, count, by_rows, operands[1], read, written)
        passes.append((work, count))
    if plan.planes or tile is None:
        yield from (work for work, _ in passes)
    elif passes:
        yield _together(f"{name}/passes{narrow}", passes)


def _together(name: str, passes: Sequence[tuple[Work, int]]) -> Work:
    """The work of one kernel that has the jobs of all passes, each with the number of its products."""
    jobs, asked, added = Counter[int](), 0, 0
    for work, products in passes:
        for tiles, count in work.jobs.items():
            jobs[products * tiles] += count
        if work.l2 is not None:
            asked, added = asked + work.l2[0], added + work.l2[1]
    first, products = passes[0]
    return replace(
        first,
        name=name,
        kernel=name + first.kernel.removeprefix(first.name),
        flops=first.flops / products,
        jobs=jobs,
        read=sum(work.read for work, _ in passes),
        written=sum(work.written for work, _ in passes),
        l2=(asked, added),
    )


def _clusters(gpu: Hardware) -> int:
    return gpu.facts().multiprocessors // _C.CLUSTER_BLOCKS


def _groups(row_blocks: int, tile: int, width: int, gpu: Hardware) -> list[int]:
    """The number of row blocks of each group of a contraction."""
    columns = _clusters(gpu) * tile  # as many column tiles as clusters, so that no cluster is idle
    return _C.row_groups(row_blocks * tile, columns, width, gpu.facts())


@lru_cache(1024)  # the slices of a call have the same sizes
def _contraction_read(rows: int, columns: int, width: int, tile: tuple[int, int], gpu: Hardware) -> int:
    """DRAM bytes read of both operands by clusters in lockstep."""
    row_bytes, column_bytes = (_parts(n, t, 2 * width) for n, t in zip((rows, columns), tile, strict=True))
    groups = _groups(len(row_bytes), tile[0], width, gpu)
    some = groups[: max(_TILES // (max(groups, default=1) * len(column_bytes) or 1), 2)]  # about _TILES tiles
    steps = tile_steps(some, row_bytes, column_bytes, _clusters(gpu))
    return sum(read_by(steps, gpu.kept).values()) * len(groups) // max(len(some), 1)


def contraction(
    name: str,
    rows: int,
    columns: int,
    width: int,
    tile: tuple[int, int],
    gpu: Hardware,
    written: int,
    planes: bool = False,
) -> Work:
    """A product [rows, width] @ [columns, width]^T in 16 bits, or of float32 in planes."""
    tiles = _tiles(rows, tile[0]) * _tiles(columns, tile[1])
    kernel, count, products = (f"{name}/planes", 2, 3) if planes else (name, 1, 1)
    read = int(_DRIFT * _contraction_read(rows, columns, count * width, tile, gpu))
    jobs, flops = Counter({1: tiles}), 2.0 * products * tile[0] * tile[1]
    workers = tile[0] // _BLOCK_ROWS
    l2 = (2 * count * width * sum(tile) * tiles, 0)
    return Work(name, kernel, width, flops, jobs, read, written, workers=workers, overlapped=True, l2=l2)


def tile_of(launch: Launch) -> tuple[int, int]:
    """The tile of a kernel that computes scores by contraction."""
    assert launch.plan is not None and launch.plan.tile is not None
    return launch.plan.tile


def _local_scores(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """Kernels that compute scores by contraction: folds, dlogits, hidden values.

    On simt also all gradients.
    """
    a, plan = launch.arguments, launch.plan
    assert plan is not None
    x, weight = (next(a[n] for n in names if n in a) for names in (("x", "a"), ("weight", "b", "w1")))
    rows, columns, width = x.shape[0], weight.shape[0], x.shape[1]
    if "teacher_x" in a:
        width += a["teacher_x"].shape[1]
    if "grad_out" in a:
        width += a["grad_out"].shape[1]
    written = _bytes(launch, "out teacher_out hidden kept teacher_kept")
    if not plan.can.clusters:
        gradients = [a[n] for n in ("dx", "dweight", "dteacher_x", "dteacher_weight", "da", "db") if n in a]
        products = 1 + sum(t.shape[1] for t in gradients) / width
        read = _bytes(launch, "x a weight b teacher_x teacher_weight w1 w2 grad_out")
        jobs, kernel = Counter({rows * columns: 1}), f"{launch.name}/{_family(launch)}"
        written += sum(t.bytes for t in gradients)
        states, results = (_bytes(launch, "scratch"), _bytes(launch, _RESULTS)) if plan.packing else (0, 0)
        yield Work(launch.name, kernel, width, 2.0 * products, jobs, read, written + states, shared=1)
        if plan.packing:
            yield Work("combine_splits", "", 0, 0.0, Counter(), states, results)
        return
    if "frames" in a:  # forward saved softmax weights; turn them into dlogits
        yield moves("weights_to_gradients", _bytes(launch, "out frames"), written)
        return
    at_a_time = a["gathered"].shape[0] if "gathered" in a else rows
    name = launch.name + ("/keeping" if "kept" in a else "")
    for first in range(0, rows, at_a_time):
        part = min(at_a_time, rows - first)
        if "gathered" in a:
            moved = x.dtype.itemsize * part * width
            yield moves("scale_rows", moved, moved)
        of_part = written * part // rows
        yield contraction(name, part, columns, width, tile_of(launch), gpu, of_part, plan.planes)
        if launch.name.endswith("_forward"):
            states, results = _bytes(launch, "scratch"), _bytes(launch, _RESULTS)
            yield moves("combine_partial", states * part // rows, results * part // rows)
    if "kept" in a and launch.name != "log_probs_forward":
        kept = _bytes(launch, "kept teacher_kept")
        yield moves("weights_to_gradients", kept, _bytes(launch, "kept"))
    if "reduced" in a:
        yield moves("reduce_losses", _bytes(launch, "loss"), _bytes(launch, "reduced"))


def _narrow(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """Kernels of logsumexp_matmul at small widths.

    Forward computes the softmax-weighted mean of b for each row of a; backward computes the gradients.
    """
    a, plan = launch.arguments, launch.plan
    assert plan is not None
    (rows, width), columns, tile = a["a"].shape, a["b"].shape[0], plan.tile
    name, statistics, scratch = (
        f"{launch.name}/narrow",
        _bytes(launch, "lse lse_low"),
        _bytes(launch, "scratch"),
    )
    read, written = _bytes(launch, "a b") + scratch, statistics + _bytes(launch, "mean")
    if launch.backward:
        moved = statistics + _bytes(launch, "grad_lse mean")
        yield moves("logsumexp_rows", moved, scratch + _bytes(launch, "da"))
        if "db" not in a:
            return
        rows, columns, written = columns, rows, _bytes(launch, "db")
    if tile is None:
        jobs, kernel = Counter({rows * columns: 1}), f"{name}/{_family(launch)}"
        yield Work(name, kernel, width, 4.0, jobs, read, written, shared=1)
        return
    jobs, kernel = Band(rows, columns).jobs(True, *tile), f"{name}/{tile[0]}x{tile[1]}"
    l2 = (_asked(jobs, tile, 2 * width), 0)
    yield Work(name, kernel, width, 4.0 * tile[0] * tile[1], jobs, read, written, l2=l2)


def _product(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """A product with dlogits: [rows, depth] @ [depth, columns], or with the first operand transposed."""
    a = launch.arguments
    (rows, depth), columns = a["a"].shape, a["b"].shape[1]
    if launch.name == "columns_product":
        rows, depth = depth, rows
    tile = product_waves(_tiles(rows, TILE_ROWS), columns, _clusters(gpu))[1]
    summed = a["out"].bytes if a["out"].dtype.itemsize == 4 else 0  # float32: it is added to what out holds
    work = contraction(launch.name, rows, columns, depth, (TILE_ROWS, tile), gpu, a["out"].bytes)
    yield Work(**{**vars(work), "read": work.read + summed})
    if "order" in a and launch.name == "rows_product" and not summed:
        yield moves("clear_inactive_rows", 0, 0)  # clears ignored rows; the model assumes none


def _plane_product(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """A product of float32 matrices in planes."""
    a = launch.arguments
    (rows, columns), out = a["out"].shape, a["out"].bytes
    depth = (a["b"].shape[1] - 8) // 2 if launch.name == "plane_dots" else a["b"].shape[0]
    work = contraction(launch.name, rows, columns, depth, _PLANE_TILE, gpu, out, True)
    yield Work(**{**vars(work), "read": work.read + (out if a.get("adds") else 0)})


def _split(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """The kernels that split a float32 matrix into planes. Those of columns read it twice."""
    reads = 2 if launch.name == "split_columns" else 1
    yield moves(launch.name, reads * _bytes(launch, "x by"), _bytes(launch, "out scales"))


def _copied(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    written = _bytes(launch, "out order factors reduced")
    yield moves(launch.name, _bytes(launch, "x factor losses target mask"), written)


def _targets(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """The kernels of soft targets: a dot product with a row of the weight for each, or their dlogits."""
    a = launch.arguments
    of_targets = a["target"].bytes + a["values" if launch.name == "target_dlogits" else "scores"].bytes
    count = math.prod(a["target"].shape)
    if launch.name == "target_dlogits":  # each is in a sector of its own
        yield moves(launch.name, of_targets, _SECTOR * count)
        return
    x = a["x"]
    yield moves(launch.name, x.bytes + count * x.shape[1] * x.dtype.itemsize, of_targets)


def _gated(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """The elementwise kernels of gated MLPs. They work in place; forward does not change the gates."""
    moved = _bytes(launch, "gate up hidden")
    yield moves(launch.name, moved, moved if launch.backward else _bytes(launch, "up"))


KERNELS: dict[str, Callable[[Launch, Hardware], Iterator[Work]]] = {
    "attention_forward": _forward,
    "attention_backward": _backward,
    "mlp_forward": _forward,
    "mlp_backward": _backward,
    "rows_product": _product,
    "columns_product": _product,
    "plane_product": _plane_product,
    "plane_dots": _plane_product,
    "split_rows": _split,
    "split_columns": _split,
    "scale_rows": _copied,
    "copy_fitted": _copied,
    "order_rows": _copied,
    "clear_rows": _copied,
    "reduce_losses": _copied,
    "target_scores": _targets,
    "target_dlogits": _targets,
    "gated_hidden": _gated,
    "gated_gradient": _gated,
}


def _of_torch(launch: Launch, gpu: Hardware) -> Work:
    """A torch op: a matrix product, or an op that reads its inputs once and writes its results once."""
    read, written = launch.arguments["read"], launch.arguments["written"]
    moved = sum(t.bytes for t in read), sum(t.bytes for t in written)
    name = launch.name.removeprefix("aten::")
    if name in ("mm", "addmm", "addmm_"):
        (rows, columns), depth = written[0].shape, read[-2].shape[1]
        jobs, operands = Counter({rows * columns: 1}), sum(t.bytes for t in read[-2:])
        if gpu.kept and read[-1].dtype.itemsize == 2:
            operands = max(operands, _contraction_read(rows, columns, depth, _TORCH_TILE, gpu))
        moved, kernel = (operands + sum(t.bytes for t in read[:-2]), moved[1]), "torch"
        if read[-1].dtype == torch.float32:
            kernel = "torch/tf32" if _torch_private.allows_tf32() else "torch/float32"
        return Work(f"torch {name}", kernel, depth, 2.0, jobs, *moved, shared=1, overlapped=True)
    if name in ("zeros_like", "new_zeros", "new_full", "fill_"):
        moved = 0, moved[1]
    return moves(f"torch {name}", *moved, overlapped=True)


def work_of(launch: Launch, gpu: Hardware) -> list[Work]:
    """The kernels that a launch runs on a GPU, in order."""
    if launch.name.startswith("aten::"):
        return [_of_torch(launch, gpu)]
    narrow = launch.plan is not None and launch.plan.narrow
    return list((_narrow if narrow else KERNELS.get(launch.name, _local_scores))(launch, gpu))
