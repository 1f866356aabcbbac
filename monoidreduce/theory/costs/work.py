"""What the kernels of a launch do: their jobs, and the bytes that they move (docs/cost.md has the formulas).

The launch's plan has the tiles. For the families sm80 and simt it tells none. There all kept scores are one
job that the GPU shares, and the kernel's constants hold what its tiles cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch

from monoidreduce import _C
from monoidreduce._ops.slices import TILE_ROWS, product_waves
from monoidreduce.theory.costs.dry_run import Launch, Operand
from monoidreduce.theory.costs.steps import Job, job_steps, read_by, tile_steps
from monoidreduce.theory.hardware import Hardware

__all__ = ["Band", "Work", "work_of"]

_CLUSTER = 2  # multiprocessors that share a tile of a contraction
# Clusters drift apart, and read again what has left the cache. Passes of the losses read 1.00 to 1.28 times
# as much on one H100 as clusters in step would. On another they read 1.00 to 1.48 times as much.
_DRIFT = 1.2
_TORCH_TILE = 256, 256  # of two multiprocessors, in cuBLAS's products of large matrices on Hopper
_PACKED_LINES = 64  # rows of a tile where rows are few (device/schedule/packing.h)
_RESULTS = "loss lse lse_low stats log_probs entropy top1"  # of folds over contractions
# Where jobs differ in length: streamed bytes of the heads that take turns job by job (fold_shape.cuh).
_SECTION = 32 << 20
# To be fast the model takes at most so many steps of a job, and about so many jobs, of some of the heads. Of
# heads with more steps than this it takes some of the jobs, or several as one; of a contraction about so many
# tiles. docs/cost.md, "What it does not know", says by how much bytes differ.
_STEPS, _JOBS, _STEPS_OF_HEAD, _TILES = 128, 2048, 1 << 21, 1 << 20


@dataclass(frozen=True)
class Work:
    """One kernel.

    Attributes:
        name: for people.
        kernel: its name among the constants of the model; "" for one that only moves bytes.
        width: of the operands, which chooses the constants too.
        flops: of a tile, for each unit of width.
        jobs: how many jobs have so many tiles.
        read, written: bytes of DRAM.
        workers: multiprocessors that share a job.
        shared: how many of the jobs, the last ones, all blocks share evenly.
        overlapped: does a job load while the one before it ends; of one that only moves bytes: do they
            move from its start.
        exposed: is the time of what it reads not hidden by jobs, which are as short as their first loads.
        steps: what a warp adds up one after another.
        l2: bytes that multiprocessors ask of the L2 cache, and bytes that they add to sums there. None
            where nobody knows, as of tiles that no plan tells.
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
    overlapped: bool = False
    exposed: bool = False
    steps: int = 0
    l2: tuple[int, int] | None = None

    @property
    def tiles(self) -> int:
        return sum(tiles * count for tiles, count in self.jobs.items())

    @property
    def executed(self) -> float:
        """FLOPs, of whole tiles."""
        return self.flops * self.width * self.tiles


@dataclass(frozen=True)
class Band:
    """The columns that rows keep (fold.h: ColumnRange). left, right: -1 for no bound."""

    rows: int
    columns: int
    left: int = -1
    right: int = -1

    @property
    def all(self) -> bool:
        return self.left < 0 and self.right < 0

    def of_rows(self, first: int, last: int) -> tuple[int, int]:
        """The columns [begin, end) that any of these rows keeps."""
        shift = self.columns - self.rows
        begin = 0 if self.left < 0 else max(0, first + shift - self.left)
        end = self.columns if self.right < 0 else min(self.columns, last + shift + self.right + 1)
        return begin, max(begin, end)

    def of_columns(self, first: int, last: int) -> tuple[int, int]:
        """The rows [begin, end) that keep any of these columns."""
        shift = self.columns - self.rows
        begin = 0 if self.right < 0 else max(0, first - shift - self.right)
        end = self.rows if self.left < 0 else min(self.rows, last - shift + self.left + 1)
        return begin, max(begin, end)

    def pairs(self) -> int:
        """Of a row and a column that it keeps."""
        shift = self.columns - self.rows

        def before(first: int) -> int:
            """Pairs whose column is less than first + row."""
            return sum(
                sign * (_triangle(self.rows - 1 + first - cut) - _triangle(first - cut - 1))
                for sign, cut in ((1, 0), (-1, self.columns))
            )

        kept = self.rows * self.columns if self.right < 0 else before(shift + self.right + 1)
        return kept - (0 if self.left < 0 else before(shift - self.left))

    def longest(self, by_rows: bool, staying: int) -> int:
        """The most lines that any tile of `staying` rows or columns keeps."""
        others = self.columns if by_rows else self.rows
        return others if min(self.left, self.right) < 0 else min(staying + self.left + self.right, others)

    def passed(self, by_rows: bool, staying: int, streamed: int) -> list[range]:
        """For each tile of `staying` rows or columns, the tiles that stream past it."""
        lines, range_of = (self.rows, self.of_rows) if by_rows else (self.columns, self.of_columns)
        found = []
        for first in range(0, lines, staying):
            begin, end = range_of(first, min(first + staying, lines) - 1)
            found.append(range(begin // streamed, _tiles(end, streamed)) if end > begin else range(0))
        return found

    def jobs(self, by_rows: bool, staying: int, streamed: int) -> Counter[int]:
        """How many jobs, each of `staying` rows or columns, have so many tiles that stream past them."""
        return Counter(map(len, self.passed(by_rows, staying, streamed)))


def _triangle(n: int) -> int:
    """1 + ... + n."""
    return n * (n + 1) // 2 if n > 0 else 0


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def _parts(size: int, tile: int, line: int) -> list[int]:
    """Bytes of the tiles of so many lines; the last one may be short."""
    return [line * min(tile, size - first) for first in range(0, size, tile)]


def _bytes(launch: Launch, names: str) -> int:
    """Of the operands that are there."""
    return sum(launch.arguments[name].bytes for name in names.split() if name in launch.arguments)


def _family(launch: Launch) -> str:
    """The plan's family of kernels, and the dtype of the operands."""
    assert launch.plan is not None
    first = next(a for a in launch.arguments.values() if isinstance(a, Operand))
    return f"{launch.plan.tier}/{str(first.dtype).removeprefix('torch.')}"


def _moves(name: str, read: int, written: int, overlapped: bool = False) -> Work:
    return Work(name, "", 0, 0.0, Counter(), read, written, overlapped=overlapped, l2=(read, 0))


def _asked(jobs: Counter[int], tile: tuple[int, int], line: int) -> int:
    """Bytes of a tile that stays, once a job, and of those that stream. line: bytes of a row or column."""
    return line * (tile[0] * jobs.total() + tile[1] * sum(tiles * count for tiles, count in jobs.items()))


@dataclass(frozen=True)
class _Problem:
    """The fold of a launch of attention or the MLP. heads: of columns, each for `group` heads of rows."""

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
        """Does a window or a mask exclude any element (last_round.h)."""
        bias = self.launch.arguments.get("bias")
        return not self.band.all or (bias is not None and bias.dtype == torch.bool)

    @property
    def scores(self) -> str:
        """What makes scores of attention take longer."""
        a = self.launch.arguments
        return "/bias" if "bias" in a else "/softcap" if a.get("softcap") else ""

    @property
    def tiled(self) -> bool:
        """Has the plan tiles, of a head each?"""
        return not self.plan.few_rows and all(self.plan.tile)

    def packed(self) -> Counter[int]:
        """The jobs of few rows (packed_schedule.cuh): tiles of rows of several heads, their columns split."""
        heads, rows, splits = self.plan.packing
        found = Counter[int]()
        for tiles, count in self.band.jobs(True, rows, self.plan.tile[1]).items():
            share, of_heads = _tiles(tiles, splits), count * self.heads * _tiles(self.group, heads)
            for split in range(splits):
                found[max(min(share, tiles - split * share), 0)] += of_heads
        return found

    def read(
        self, by_rows: bool, tile: tuple[int, int], staying: str, streamed: str, gpu: Hardware
    ) -> tuple[int, int]:
        """Bytes of the operands that stay and of those that stream. tile: lines that stay and that stream."""
        stay, stream = _bytes(self.launch, staying), _bytes(self.launch, streamed)
        if not (self.tiled and stay and stream):
            return stay, stream
        fold = _Fold(self.band, by_rows, tile, self.heads, self.group if by_rows else 1)
        return stay, _streamed(fold, stay, stream, gpu)

    def work(
        self, name: str, tile: tuple[int, int], products: int, by_rows: bool, read: int, written: int
    ) -> Work:
        """A kernel of products over the tiles of the band. tile: lines that stay and lines that stream."""
        group, all_heads = (1, self.heads * self.group) if by_rows else (self.group, self.heads)
        few = "/few rows" * self.plan.few_rows
        if few and all(self.plan.tile):
            jobs, flops = self.packed(), 2.0 * products * _PACKED_LINES * self.plan.tile[1]
            return Work(name, f"{name}{few}/sm90", self.width, flops, jobs, read, written, exposed=True)
        if not self.tiled:
            jobs, kernel = Counter({self.band.pairs() * self.heads * self.group: 1}), _family(self.launch)
            return Work(
                name, f"{name}{few}/{kernel}", self.width, 2.0 * products, jobs, read, written, shared=1
            )
        found = self.band.jobs(by_rows, *tile)
        jobs = Counter({tiles * group: count * all_heads for tiles, count in found.items()})
        added = 4 * self.width * tile[1] * sum(tiles * count for tiles, count in jobs.items())
        return Work(
            name=name,
            kernel=f"{name}/{tile[0]}x{tile[1]}",
            width=self.width,
            flops=2.0 * products * tile[0] * tile[1],
            jobs=jobs,
            read=read,
            written=written,
            shared=self.plan.in_parts,
            l2=(_asked(jobs, tile, 2 * self.width * 2), added * (products == 5)),  # two operands of 16 bits
        )


@dataclass(frozen=True)
class _Fold:
    """Jobs of a kernel. tile: lines that stay and stream. heads: of what streams, `group` jobs for each."""

    band: Band
    by_rows: bool
    tile: tuple[int, int]
    heads: int
    group: int

    def jobs(self, passed: list[range], heads: range, section: int) -> Iterator[Job]:
        """In the order of schedule.cuh. section: how many heads take turns, tile by tile."""
        order = range(len(passed))[:: -1 if self.by_rows and self.band.right >= 0 else 1]
        for first in heads[::section]:
            for tile in order:
                for head in heads[first : first + section]:
                    yield tile, head, head // self.group, passed[tile]


@lru_cache(1024)
def _streamed(fold: _Fold, stay: int, stream: int, gpu: Hardware) -> int:
    """Bytes that are read of what streams. stay, stream: bytes of the operands."""
    band, (staying, streaming) = fold.band, fold.tile
    lines, others = (band.rows, band.columns) if fold.by_rows else (band.columns, band.rows)
    heads, of_head = fold.heads * fold.group, stream // fold.heads
    longest = band.longest(fold.by_rows, staying)
    step = streaming * _tiles(_tiles(longest, _STEPS), streaming)
    many = _tiles(_tiles(lines, staying) * _tiles(longest, step), _STEPS_OF_HEAD)
    weight = Fraction(many)
    if longest * of_head > gpu.kept * others:  # so many jobs are taken as one: each streams all anew
        staying *= many
        passed = band.passed(fold.by_rows, staying, step)
    else:  # of jobs whose tiles stay in the cache, those in the middle are taken
        passed = band.passed(fold.by_rows, staying, step)
        alike = [tile for tile, streams in enumerate(passed) if streams]
        skipped = (len(alike) - _tiles(len(alike), many)) // 2
        for tile in (*alike[:skipped], *alike[len(alike) - skipped :]):
            passed[tile] = range(0)
        weight = Fraction(max(len(alike), 1), max(len(alike) - 2 * skipped, 1))
    section = 1 if band.all else max(_SECTION // of_head, 1) * fold.group
    together = max(section, fold.group)
    some = min(together * _tiles(_JOBS, together * len(passed)), heads)  # others fare as they do
    steps = job_steps(
        fold.jobs(passed, range(some), section),
        _parts(lines, staying, stay // (heads * lines)),
        _parts(others, step, of_head // others),
        gpu.facts().multiprocessors,
    )
    read = sum(size for (operand, *_), size in read_by(steps, gpu.kept).items() if operand == "streams")
    return int(read * weight) * heads // some


def _forward(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """Of attention or the MLP."""
    problem, scratch = _Problem.of(launch), _bytes(launch, "scratch")  # partial sums of few rows
    tile = problem.plan.tile
    read = sum(problem.read(True, tile, "q x", "k v w1 w2", gpu)) + _bytes(launch, "bias bias1 bias2")
    written, name = _bytes(launch, "out lse lse_low out_low"), launch.name + problem.scores
    splits = problem.plan.packing[2]
    yield problem.work(name, tile, 2, True, read, scratch if splits > 1 else written)
    if splits > 1:
        yield Work("combine_splits", "", 0, 0.0, Counter(), scratch, written, steps=splits)
    if "q" in launch.arguments and problem.partial and problem.plan.tensor_cores:
        yield _moves("repair_forward", _bytes(launch, "lse"), 0)


def _backward(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """The same: what rows need, the gradients, and a look for those that masking made NaN."""
    problem, a = _Problem.of(launch), launch.arguments
    repairs = "q" in a and problem.partial and problem.plan.tensor_cores
    if "q" in a:
        statistics = _bytes(launch, "lse lse_low")
        yield _moves("prepare_rows", _bytes(launch, "grad_out out out_low") + statistics, statistics)
    if repairs:
        yield _moves("clear_marks", 0, 0)
    yield from _gradients(launch, problem, gpu)
    if repairs:
        yield _moves("repair_backward", 0, 0)


def _gradients(launch: Launch, problem: _Problem, gpu: Hardware) -> Iterator[Work]:
    """One kernel for all, or for all but the rows', or a pass for each."""
    a, name, plan = launch.arguments, launch.name + problem.scores, problem.plan
    of_rows, of_columns, biases = "q x grad_out", "k v w1 w2", _bytes(launch, "bias bias1")
    rows, *columns = ("dq", "dk", "dv") if "q" in a else ("dx", "dw1", "dw2")
    if plan.adds_rows or (rows not in a and problem.width <= 128):
        # Sums of rows stream too: they are evicted and read again.
        tile, sums, streamed = (plan.tile[1], plan.tile[0]), _bytes(launch, rows), f"{of_rows} {rows}"
        stay, stream = problem.read(False, tile, of_columns, streamed, gpu)
        evicted = stream * sums // max(_bytes(launch, streamed), 1)
        written, products = evicted + _bytes(launch, " ".join(columns)), 5 if rows in a else 4
        yield problem.work(name, tile, products, False, stay + stream + biases, written)
        return
    narrow = " alone" * (problem.width <= 128)  # and whose time is not that of a width of 256
    for gradient, products in zip((rows, *columns), (3, 3, 2), strict=True):
        if gradient not in a:
            continue
        by_rows = gradient == rows
        operands = (of_rows, of_columns) if by_rows else (of_columns, of_rows)
        read = sum(problem.read(by_rows, plan.tile, *operands, gpu)) + biases
        written = _bytes(launch, gradient)
        yield problem.work(f"{name}/{gradient}{narrow}", plan.tile, products, by_rows, read, written)


def _clusters(gpu: Hardware) -> int:
    return gpu.facts().multiprocessors // _CLUSTER


def _groups(row_blocks: int, tile: int, width: int, gpu: Hardware) -> list[int]:
    """How many row blocks each group of a contraction has: in turn the most that can be one group."""
    clusters, facts = _clusters(gpu), gpu.facts()
    # With one tile of columns for each cluster no cluster is idle.
    groups = [_C.contraction_groups(n * tile, clusters * tile, width, facts) for n in range(1, clusters + 1)]
    whole = [n for n, count in enumerate(groups, 1) if count == 1]
    sizes = []
    while row_blocks > 0:
        sizes.append(max(n for n in whole if n <= row_blocks))
        row_blocks -= sizes[-1]
    return sizes


@lru_cache(1024)  # slices of a call are alike
def _contraction_read(rows: int, columns: int, width: int, tile: tuple[int, int], gpu: Hardware) -> int:
    """Bytes of both operands."""
    row_bytes, column_bytes = (_parts(n, t, 2 * width) for n, t in zip((rows, columns), tile, strict=True))
    groups = _groups(len(row_bytes), tile[0], width, gpu)
    some = groups[: max(_TILES // (max(groups, default=1) * len(column_bytes) or 1), 2)]  # as above
    steps = tile_steps(some, row_bytes, column_bytes, _clusters(gpu))
    return sum(read_by(steps, gpu.kept).values()) * len(groups) // max(len(some), 1)


def _contraction(
    name: str, rows: int, columns: int, width: int, tile: tuple[int, int], gpu: Hardware, written: int
) -> Work:
    """A product of matrices [rows, width] and [columns, width] of 16 bits."""
    tiles = _tiles(rows, tile[0]) * _tiles(columns, tile[1])
    read = int(_DRIFT * _contraction_read(rows, columns, width, tile, gpu))
    jobs, flops, l2 = Counter({1: tiles}), 2.0 * tile[0] * tile[1], (2 * width * sum(tile) * tiles, 0)
    return Work(name, name, width, flops, jobs, read, written, workers=_CLUSTER, overlapped=True, l2=l2)


def _local_scores(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """What computes scores by contraction: folds, local gradients, hidden values; on simt all gradients."""
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
        yield Work(launch.name, kernel, width, 2.0 * products, jobs, read, written, shared=1)
        return
    if "frames" in a:  # of weights that a forward pass kept
        yield _moves("weights_to_gradients", _bytes(launch, "out frames"), written)
        return
    at_a_time = a["gathered"].shape[0] if "gathered" in a else rows
    name = launch.name + ("/keeping" if "kept" in a else "")
    for first in range(0, rows, at_a_time):
        part = min(at_a_time, rows - first)
        if "gathered" in a:
            moved = x.dtype.itemsize * part * width
            yield _moves("scale_rows", moved, moved)
        yield _contraction(name, part, columns, width, plan.tile, gpu, written * part // rows)
        if launch.name.endswith("_forward"):
            states, results = _bytes(launch, "scratch"), _bytes(launch, _RESULTS)
            yield _moves("combine_partial", states * part // rows, results * part // rows)
    if "kept" in a and launch.name != "log_probs_forward":
        kept = _bytes(launch, "kept teacher_kept")
        yield _moves("weights_to_gradients", kept, _bytes(launch, "kept"))
    if "reduced" in a:
        yield _moves("reduce_losses", _bytes(launch, "loss"), _bytes(launch, "reduced"))


def _narrow(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """A narrow logsumexp_matmul: the mean of b by rows of a, or the gradients."""
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
        yield _moves("logsumexp_rows", moved, scratch + _bytes(launch, "da"))
        if "db" not in a:
            return
        rows, columns, written = columns, rows, _bytes(launch, "db")
    if not all(tile):
        jobs, kernel = Counter({rows * columns: 1}), f"{name}/{_family(launch)}"
        yield Work(name, kernel, width, 4.0, jobs, read, written, shared=1)
        return
    jobs, kernel = Band(rows, columns).jobs(True, *tile), f"{name}/{tile[0]}x{tile[1]}"
    l2 = (_asked(jobs, tile, 2 * width), 0)
    yield Work(name, kernel, width, 4.0 * tile[0] * tile[1], jobs, read, written, l2=l2)


def _product(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """A product of local gradients: [rows, depth] @ [depth, columns], or the same of a transpose."""
    a = launch.arguments
    (rows, depth), columns = a["a"].shape, a["b"].shape[1]
    if launch.name == "columns_product":
        rows, depth = depth, rows
    tile = product_waves(_tiles(rows, TILE_ROWS), columns, _clusters(gpu))[1]
    summed = a["out"].bytes if a["out"].dtype.itemsize == 4 else 0  # by addition
    work = _contraction(launch.name, rows, columns, depth, (TILE_ROWS, tile), gpu, a["out"].bytes)
    yield Work(**{**vars(work), "read": work.read + summed})
    if "order" in a and launch.name == "rows_product" and not summed:
        yield _moves("clear_others", 0, 0)  # rows that do not count: none


def _copied(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    written = _bytes(launch, "out order")
    yield _moves(launch.name, _bytes(launch, "x factor target mask"), written)


def _gated(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    """In place; the forward pass leaves the gates as they are."""
    moved = _bytes(launch, "gate up hidden")
    yield _moves(launch.name, moved, moved if launch.backward else _bytes(launch, "up"))


KERNELS: dict[str, Callable[[Launch, Hardware], Iterator[Work]]] = {
    "attention_forward": _forward,
    "attention_backward": _backward,
    "mlp_forward": _forward,
    "mlp_backward": _backward,
    "rows_product": _product,
    "columns_product": _product,
    "scale_rows": _copied,
    "copy_fitted": _copied,
    "order_rows": _copied,
    "gated_hidden": _gated,
    "gated_gradient": _gated,
}


def _of_torch(launch: Launch, gpu: Hardware) -> Work:
    """A product of matrices, or an op that reads its inputs and writes its results once."""
    read, written = launch.arguments["read"], launch.arguments["written"]
    moved = sum(t.bytes for t in read), sum(t.bytes for t in written)
    name = launch.name.removeprefix("aten::")
    if name in ("mm", "addmm"):
        (rows, columns), depth = written[0].shape, read[-2].shape[1]
        jobs, operands = Counter({rows * columns: 1}), sum(t.bytes for t in read[-2:])
        if gpu.kept and read[-1].dtype.itemsize == 2:
            operands = max(operands, _contraction_read(rows, columns, depth, _TORCH_TILE, gpu))
        moved = operands + sum(t.bytes for t in read[:-2]), moved[1]
        return Work(f"torch {name}", "torch", depth, 2.0, jobs, *moved, shared=1, overlapped=True)
    if name in ("zeros_like", "new_zeros", "new_full", "fill_"):
        moved = 0, moved[1]
    return _moves(f"torch {name}", *moved, overlapped=True)


def work_of(launch: Launch, gpu: Hardware) -> list[Work]:
    """The kernels that a launch runs on a GPU, in order."""
    if launch.name.startswith("aten::"):
        return [_of_torch(launch, gpu)]
    narrow = launch.plan is not None and launch.plan.narrow
    return list((_narrow if narrow else KERNELS.get(launch.name, _local_scores))(launch, gpu))
