"""The cost of a call: FLOPs, bytes, memory and time, from its own plan and schedule. Nothing is computed."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.dry_run import DryRun, dry_run, dry_run_of_torch, tensors_in
from monoidreduce._ops.slices import pays_to_save
from monoidreduce._validate import mismatch
from monoidreduce.explain_map_reduce import differentiated_slices, map_reduce_call
from monoidreduce.folds.explain import differentiated_tensors, prepared
from monoidreduce.folds.statistics import Statistics
from monoidreduce.inspection import DECODING, differentiated, fold_of, resolved
from monoidreduce.map_reduce import map_reduce
from monoidreduce.theory.costs import cpu, user_folds
from monoidreduce.theory.costs.model import Time, time_of
from monoidreduce.theory.costs.modelled import modelled_run
from monoidreduce.theory.costs.work import Band, Work, work_of
from monoidreduce.theory.hardware import CPU, Hardware, Processor, find, find_gpu, load
from monoidreduce.theory.io import bounds

__all__ = ["Cost", "Pass", "cost", "cost_of_shard", "kernels"]

CPU_ADVICE: tuple[str, ...] = (
    "bytes are of operands read once and results written once: caches are not modelled",
    "peak memory is without the scratch memory of the engine, which it allocates for each thread",
)


_UNMEASURED = "not measured, and taken to reach a usual share of the peak: {}"


@dataclass(frozen=True)
class Pass:
    """All launches of one kernel in one direction.

    Attributes:
        name: kernel name; torch's kernels begin with "torch".
        backward: whether it belongs to the backward pass.
        launches: number of launches.
        flops: FLOPs executed, counting whole tiles.
        dram_read, dram_written: bytes, by the model.
        l2_read: bytes that multiprocessors request from the L2 cache; None if unknown. Simultaneous requests
            for the same data may reach the cache once, so a hardware counter shows less.
        l2_added: bytes that they add to sums in the L2 cache (reductions); None if unknown.
        jobs, tiles: numbers of jobs and tiles in the schedule.
        seconds: time by the model.
        slowest: seconds if nothing overlaps.
        bound: the bottleneck: "tensor", "dram" or "launch". The L2 cache and exponentials are never named:
            their time is part of the fitted share of the tensor cores' rate.
    """

    name: str
    backward: bool
    launches: int
    flops: float
    dram_read: int
    dram_written: int
    l2_read: int | None
    l2_added: int | None
    jobs: int
    tiles: int
    seconds: float
    slowest: float
    bound: str

    @property
    def l2(self) -> int | None:
        """Bytes read from the L2 cache plus bytes added to sums there; None if unknown."""
        return None if self.l2_read is None or self.l2_added is None else self.l2_read + self.l2_added


@dataclass(frozen=True)
class Cost:
    """The cost of a call on a GPU or a CPU; `str()` of it is a table with one line per pass.

    Attributes:
        operator: its name.
        hardware: the GPU or the CPU.
        passes: kernels of the forward and of the backward pass, in order.
        useful_flops: FLOPs of the matrix products in the operator's definition, for pairs that the mask
            keeps, without recomputation.
        executed_flops: FLOPs of whole tiles, including recomputation.
        compulsory: bytes of inputs read once, and of outputs and gradients written once, in each direction.
        lower_bounds: lower bounds in bytes, by name of the function in `monoidreduce.io.bounds`, for a cache
            of the size of the L2 cache: "compulsory"; "segment" and "theta_forward" for attention; "matmul"
            for other operators. "theta_forward" is only asymptotic: its constant is set to 1, and its n^2 to
            the number of kept pairs.
        dram: DRAM bytes that the passes move.
        peak_memory: peak bytes beyond inputs, outputs and gradients.
        intensity: executed FLOPs per byte of DRAM.
        balance: FLOPs per byte above which arithmetic is the bottleneck on this device.
        seconds: sum over all kernels, with arithmetic and memory overlapping within each.
        range: seconds, and seconds if nothing overlapped.
        mfu: useful FLOPs per second over the data sheet's peak; None on a CPU.
        of_matmul_rate: the same over the measured rate of matrix products; None if that was not measured.
        bound: the bottleneck for the largest part of the time.
        advice: sentences for the user.
    """

    operator: str
    hardware: Hardware | Processor
    passes: tuple[Pass, ...]
    useful_flops: float
    executed_flops: float
    compulsory: int
    lower_bounds: dict[str, float]
    dram: int
    peak_memory: int
    intensity: float
    balance: float
    seconds: float
    range: tuple[float, float]
    mfu: float | None
    of_matmul_rate: float | None
    bound: str
    advice: tuple[str, ...]

    def to_json(self) -> str:
        """All attributes as JSON, with the hardware's name in place of the hardware."""
        return json.dumps({**asdict(self), "hardware": self.hardware.name}, indent=2)

    def __str__(self) -> str:
        head = f"{self.operator} on {self.hardware.name}: {1e3 * self.seconds:.3g} ms, bound by {self.bound}"
        lines = [
            head,
            "",
            f"{'pass':<36}{'launches':>9}{'TFLOP':>10}{'DRAM MB':>10}{'L2 MB':>10}{'ms':>9}  bound",
        ]
        for direction in (False, True):
            for p in (p for p in self.passes if p.backward is direction):
                dram = (p.dram_read + p.dram_written) / 1e6
                l2 = "-" if p.l2 is None else f"{p.l2 / 1e6:.4g}"
                name = ("backward: " if direction else "forward: ") + p.name
                lines.append(
                    f"{name:<36}{p.launches:>9}{p.flops / 1e12:>10.4g}{dram:>10.4g}{l2:>10}"
                    f"{1e3 * p.seconds:>9.3g}  {p.bound}"
                )
        rates = {"of the data sheet's peak": self.mfu, "of the measured matmul rate": self.of_matmul_rate}
        facts = {
            "time": f"{1e3 * self.range[0]:.4g} to {1e3 * self.range[1]:.4g} ms",
            "FLOPs": f"{self.useful_flops:.4g} useful, {self.executed_flops:.4g} executed",
            "MFU": ", ".join(f"{share:.0%} {of}" for of, share in rates.items() if share is not None),
            "DRAM": f"{self.dram / 1e6:.4g} MB, compulsory {self.compulsory / 1e6:.4g} MB",
            "intensity": f"{self.intensity:.4g} FLOP a byte, balance {self.balance:.4g}",
            "peak memory": f"{self.peak_memory / 2**20:.4g} MiB beyond inputs, outputs and gradients",
            **{
                f"{'asymptotic' if name == 'theta_forward' else 'at least'}, {name}": f"{b / 1e6:.4g} MB"
                for name, b in self.lower_bounds.items()
                if b
            },
        }
        lines += ["", *(f"{name:<26}{fact}" for name, fact in facts.items())]
        return "\n".join([*lines, *(f"- {sentence}" for sentence in self.advice)])


def cost(
    op: str | Callable[..., Any],
    /,
    *arguments: Any,
    hardware: str | Hardware | Processor | None = None,
    needed: Iterable[str] | None = None,
    **options: Any,
) -> Cost:
    """Predict the cost of `op(*arguments, **options)` and its backward pass. Nothing is computed or
    allocated.

    The operator makes its plan and goes through its slices as on the real device, on tensors without memory.
    So kernels and bytes are those of the real call. docs/cost.md has the formulas for time, and their errors.

    Args:
        op: an operator, as `monoidreduce.explain` takes it; what `monoidreduce.statistics` returns; or
            `monoidreduce.map_reduce`.
        arguments, options: those of the call; tensors may be meta, fake or real. Their values are not read,
            and no target or token is assumed to be ignored.
        hardware: a GPU of `monoidreduce.hardware` or its name, such as "h100"; it need not be present. A CPU
            as a `Processor`, or "cpu" for the CPU of bench/results. Or the name of a .json file written by
            `python -m monoidreduce calibrate --out`. None: the GPU that the tensors are on.
        needed: names of the tensors that need gradients; an empty sequence means forward only. None: the
            tensors that require gradients or, if there are none, the operator's matrices. Data of statistics
            have names as "row['x']", and tensors in a tuple as "a[0]".

    Raises:
        TypeError, ValueError: the call itself would raise; or there is no model for it, for example with
            score_mod (docs/cost.md, "What it does not know"); or hardware is not a GPU of NVIDIA; or hardware
            is None and the tensors are on no GPU that `monoidreduce.hardware` has; or needed names something
            that is no floating-point tensor of the call.
        OSError: the file given as hardware cannot be read.
    """
    if isinstance(op, functools.partial):
        return cost(
            op.func, *op.args, *arguments, hardware=hardware, needed=needed, **{**op.keywords, **options}
        )
    if isinstance(op, Statistics):
        return _cost_of_statistics(op, arguments, options, hardware, needed)
    if op is map_reduce or op == "map_reduce":
        return _cost_of_map_reduce(arguments, options, hardware, needed)
    return _cost(*resolved(op, arguments, options), hardware, needed, keeps=True)


def cost_of_shard(op: str, *arguments: Any, hardware: Hardware, **options: Any) -> Cost:
    """`cost` of one rank's shard of columns: it saves dlogits only if `rank_may_save`.

    Without communication.
    """
    return _cost(*resolved(op, arguments, options), hardware, None, keeps=False)


def _cost(
    operator: str,
    call: dict[str, Any],
    hardware: str | Hardware | Processor | None,
    needed: Iterable[str] | None,
    keeps: bool,
) -> Cost:
    device = _device(hardware, call)
    names = _needed(operator, call, needed)
    if operator in DECODING:
        return _cost_of_fold(operator, DECODING[operator], call, device, names)
    dtype = next(iter(call.values())).dtype
    if isinstance(device, Processor):
        run = modelled_run(operator, call, names, None, keeps)
        timed = cpu.timed(operator, call, run, device)
        passes, bounds, advice = _grouped(timed), {}, CPU_ADVICE
    else:
        run = modelled_run(operator, call, names, device.facts(), keeps)
        timed = _timed(_works(run, device), device)
        passes, bounds = _grouped(timed), _bounds(operator, call, run, device)
        advice = tuple(_advice(operator, names, run, passes, timed))
    return _of_passes(operator, device, dtype, run, passes, _share_of_pairs(operator, run), bounds, advice)


def _cost_of_statistics(
    op: Statistics,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    hardware: str | Hardware | Processor | None,
    needed: Iterable[str] | None,
) -> Cost:
    """The cost of a call of a `statistics` function, at usual shares of the peak rates."""
    bound = inspect.signature(op.explain).bind(*arguments, **options)
    bound.apply_defaults()
    call = prepared(op, bound.arguments)
    device, tensors = _device(hardware, call), dict(tensors_in(call))
    names = differentiated_tensors(call) if needed is None else _among(tensors, needed)
    return _cost_of_fold(op.__name__, op, call, device, names)  # type: ignore[attr-defined]


def _cost_of_fold(
    operator: str,
    function: Callable[..., Any],
    call: dict[str, Any],
    device: Hardware | Processor,
    names: tuple[str, ...],
) -> Cost:
    """The cost of a function that runs one fold of `statistics`, which may be followed by the op of soft
    targets. names: the tensors that need gradients."""
    run = dry_run(function, call, names, None if isinstance(device, Processor) else device.facts())
    name, given = run.ops[0].name, run.ops[0].arguments
    first = next(iter(call.values()))
    if name == "modified_attention":
        raise ValueError(mismatch("block_mask", "None: kernels of modified scores have no model", "a mask"))
    dtype, bounds = first.dtype, {}
    if isinstance(device, Processor):
        attends = name == "attention"
        timed = cpu.timed(name, given, run, device) if attends else user_folds.cpu_works(run, device, dtype)
        advice = CPU_ADVICE
    else:
        timed = _timed(user_folds.gpu_works(run, device), device)
        unknown = sorted({work.kernel for _, work, time in timed if not time.known})
        advice = tuple([_UNMEASURED.format(", ".join(unknown))] if unknown else [])
        b = {"b": given["k"].flatten(0, -2)} if name == "attention" else given
        bounds = _bounds("statistics", {"a": first, "b": b["b"]}, run, device)
    if name != "attention":
        advice += (user_folds.ADVICE,)
    return _of_passes(operator, device, dtype, run, _grouped(timed), 1.0, bounds, advice)


def _cost_of_map_reduce(
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    hardware: str | Hardware | Processor | None,
    needed: Iterable[str] | None,
) -> Cost:
    """`cost` of `map_reduce`: that of the ops of torch that it and the functions given to it run."""
    call, tensors, _ = map_reduce_call(arguments, options)
    first = next(iter(tensors.values()))
    device = _device(hardware, {"a": first})
    names = differentiated_slices(tensors) if needed is None else _among(tensors, needed)
    gpu = None if isinstance(device, Processor) else device.facts()
    run = dry_run_of_torch(map_reduce, call, names, gpu)
    run.flops = user_folds.products_of_torch(run)
    if isinstance(device, Processor):
        timed = user_folds.cpu_works(run, device, first.dtype)
    else:
        timed = _timed(user_folds.gpu_works(run, device), device)
    passes = _grouped(timed)
    return _of_passes("map_reduce", device, first.dtype, run, passes, 1.0, {}, (user_folds.OF_TORCH,))


def _of_passes(
    operator: str,
    device: Hardware | Processor,
    dtype: torch.dtype,
    run: DryRun,
    passes: tuple[Pass, ...],
    share: float,
    bounds: dict[str, float],
    advice: tuple[str, ...],
) -> Cost:
    """The sums of all passes. share: the part of the FLOPs of the dry run that are useful."""
    measured = isinstance(device, Processor) or device.measured is not None
    sheet = None if isinstance(device, Processor) else device.peak
    peak, bandwidth = device.reached(dtype)
    useful = run.flops * share
    executed, dram = sum(p.flops for p in passes), sum(p.dram_read + p.dram_written for p in passes)
    seconds = sum(p.seconds for p in passes)
    by_bound = {
        bound: sum(p.seconds for p in passes if p.bound == bound) for bound in ("tensor", "dram", "launch")
    }
    return Cost(
        operator=operator,
        hardware=device,
        passes=passes,
        useful_flops=useful,
        executed_flops=executed,
        compulsory=run.compulsory,
        lower_bounds={"compulsory": run.compulsory, **bounds},
        dram=dram,
        peak_memory=run.peak,
        intensity=executed / dram if dram else math.inf,
        balance=peak / bandwidth,
        seconds=seconds,
        range=(seconds, sum(p.slowest for p in passes)),
        mfu=None if sheet is None else useful / (seconds * sheet) if seconds else 0.0,
        of_matmul_rate=useful / (seconds * peak) if measured and seconds else None,
        bound=max(by_bound, key=lambda bound: by_bound[bound]),
        advice=advice,
    )


def kernels(
    op: str, *arguments: Any, hardware: str, needed: Iterable[str] | None = None, **options: Any
) -> list[tuple[bool, Work]]:
    """The kernels that `cost` adds up: (whether it belongs to the backward pass, its work)."""
    operator, call = resolved(op, arguments, options)
    gpu = find(hardware)
    run = modelled_run(operator, call, _needed(operator, call, needed), gpu.facts())
    return _works(run, gpu)


def _works(run: DryRun, gpu: Hardware) -> list[tuple[bool, Work]]:
    return [(launch.backward, work) for launch in run.launches for work in work_of(launch, gpu)]


def _timed(works: list[tuple[bool, Work]], gpu: Hardware) -> list[tuple[bool, Work, Time]]:
    """Add the time of each kernel. The first kernel of a pass also takes the time to start the pass."""
    before = [None, *(backward for backward, _ in works)]
    return [
        (backward, work, time_of(work, gpu, first=backward != last))
        for last, (backward, work) in zip(before, works, strict=False)
    ]


def cpu_folds(op: str, *arguments: Any, **options: Any) -> list[cpu.Fold]:
    """`kernels` for a CPU: the passes of the engine, of both directions."""
    operator, call = resolved(op, arguments, options)
    return [*cpu.folds(operator, call, modelled_run(operator, call, _needed(operator, call, None), None))]


def _device(hardware: str | Hardware | Processor | None, call: dict[str, Any]) -> Hardware | Processor:
    if isinstance(hardware, (Hardware, Processor)):
        return hardware
    if hardware is not None:
        if hardware.endswith(".json"):
            return load(hardware)
        return CPU if hardware == CPU.name else find(hardware)
    device = next(iter(call.values())).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    if known := find_gpu(name):
        return known
    raise ValueError(mismatch("hardware", "the name of a GPU, or tensors on one that hardware.py has", name))


def _needed(operator: str, call: dict[str, Any], needed: Iterable[str] | None) -> tuple[str, ...]:
    if needed is None:
        return differentiated(operator, call)
    return _among({name: t for name, t in call.items() if isinstance(t, Tensor)}, needed)


def _among(tensors: dict[str, Tensor], needed: Iterable[str]) -> tuple[str, ...]:
    """The names in `needed`; raises ValueError for one that is not of a floating-point tensor."""
    floating = [name for name, t in tensors.items() if t.is_floating_point()]
    names = (needed,) if isinstance(needed, str) else tuple(needed)
    for name in names:
        if name not in floating:
            raise ValueError(mismatch("needed", f"names among {', '.join(floating)}", name))
    return names


def _total(sizes: Iterable[int | None]) -> int | None:
    """The sum of the sizes; None if any is None."""
    known = [*sizes]
    return None if None in known else sum(size or 0 for size in known)


def _grouped(timed: list[tuple[bool, Work, Time]]) -> tuple[Pass, ...]:
    """Group kernels by name and direction, in the order in which they first run."""
    groups: dict[tuple[bool, str], list[tuple[Work, Time]]] = {}
    for backward, work, time in timed:
        groups.setdefault((backward, work.name), []).append((work, time))
    return tuple(
        Pass(
            name=name,
            backward=backward,
            launches=len(group),
            flops=sum(w.executed for w, _ in group),
            dram_read=sum(w.read for w, _ in group),
            dram_written=sum(w.written for w, _ in group),
            l2_read=_total(w.l2 and w.l2[0] for w, _ in group),
            l2_added=_total(w.l2 and w.l2[1] for w, _ in group),
            jobs=sum(w.jobs.total() for w, _ in group),
            tiles=sum(w.tiles for w, _ in group),
            seconds=sum(t.seconds for _, t in group),
            slowest=sum(t.compute + t.memory + t.launch for _, t in group),
            bound=max(group, key=lambda pair: pair[1].seconds)[1].bound,
        )
        for (backward, name), group in groups.items()
    )


def _band(run: DryRun) -> Band:
    """The band of the attention call in a dry run."""
    a = next(launch.arguments for launch in run.launches if launch.name == "attention_forward")
    return Band(a["q"].shape[2], a["k"].shape[2], a["left"], a["right"])


def _share_of_pairs(operator: str, run: DryRun) -> float:
    """The fraction of (row, column) pairs that the mask keeps."""
    if operator != "attention":
        return 1.0
    band = _band(run)
    return band.pairs() / max(band.rows * band.columns, 1)


def _bounds(operator: str, call: dict[str, Any], run: DryRun, hardware: Hardware) -> dict[str, float]:
    """Lower bounds in bytes for computing the forward pass's scores with a cache of the L2 cache's size."""
    first = next(iter(call.values()))
    size = first.element_size()
    measured = hardware.measured.l2 if hardware.measured is not None else None
    words = int((measured or hardware.l2 or 0) / size)
    if operator == "attention":
        band, width, heads = _band(run), first.shape[3], first.shape[0] * first.shape[1]
        n = math.isqrt(band.pairs())
        found = (bounds.theta_forward(n, width, words), bounds.segment(n, width, words, band.pairs()))
        return {b.name: heads * size * b.words for b in found}
    columns = call[fold_of(operator).b]
    b = bounds.matmul(
        first.shape.numel() // max(first.shape[-1], 1), columns.shape[0], columns.shape[1], words
    )
    return {b.name: size * max(b.words, 0.0)}


def _advice(
    operator: str,
    needed: tuple[str, ...],
    run: DryRun,
    passes: tuple[Pass, ...],
    timed: list[tuple[bool, Work, Time]],
) -> list[str]:
    names = {p.name for p in passes}
    advice = []
    if torch.are_deterministic_algorithms_enabled():
        advice.append(
            "times are of the default kernels: nobody fitted the deterministic ones, which take longer"
        )
    if any(name.endswith("/passes") for name in names):
        advice.append("a width is more than 128: gradients have a pass each, and 8 products in place of 5")
    written = {name for launch in run.launches for name in launch.arguments if launch.backward}
    fold = fold_of(operator)
    at_once = () if fold.payload is None else fold.operands.values()
    unused = [name for name in at_once if name not in needed and f"d{name}" in written]
    if unused:
        advice.append(f"gradients of {', '.join(unused)} are computed by the same kernel, and not needed")
    sums = [p for p in passes if p.backward and p.name == "torch _to_copy"]
    plans = [x.plan for x in run.launches if x.backward and x.plan is not None]
    if operator == "attention" and sums and any(p.tensor_cores and p.adds_rows for p in plans):
        moved, spent = sum(p.dram_read + p.dram_written for p in sums), sum(p.seconds for p in sums)
        advice.append(f"d_q is summed in float32: {moved / 1e6:.4g} MB and {1e3 * spent:.3g} ms to round it")
    again = sum(p.seconds for p in passes if p.backward and p.name.endswith("local_gradient"))
    keeps = any(x.plan is not None and x.plan.keeps for x in run.launches if not x.backward)
    saves = operator in ("linear_cross_entropy", "linear_distillation")
    if operator == "logsumexp_matmul":
        given = run.ops[-1].arguments
        (rows, width), columns = given["a"].shape, len(given["b"])
        saves = pays_to_save(rows, columns, width)
    if again and keeps and saves:
        advice.append(
            f"{1e3 * again:.3g} ms are for local gradients that a larger workspace may keep from forward"
        )
    unknown = sorted({work.kernel for _, work, time in timed if not time.known})
    if unknown:
        advice.append(_UNMEASURED.format(", ".join(unknown)))
    return advice
