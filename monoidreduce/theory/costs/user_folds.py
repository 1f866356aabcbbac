"""The work of folds that users write: of `statistics` on kernels of this library, and of torch's products.

Kernels of statistics are compiled for each function, so none was measured. They are contractions, or passes
over all scores, with the function between; the model takes the matrix products in them to reach a usual share
of the device's rate, and the function to cost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from monoidreduce import _C
from monoidreduce._ops.dry_run import DryRun, Launch, Operand
from monoidreduce.theory.costs.model import Time
from monoidreduce.theory.costs.work import Work, contraction, moves, work_of
from monoidreduce.theory.hardware import Hardware, Processor

__all__ = ["ADVICE", "OF_TORCH", "cpu_works", "gpu_works", "products_of_torch"]

ADVICE = "the function's own operations are not counted: FLOPs are those of the matrix products"
OF_TORCH = "ops of torch read and write memory, each by itself; all FLOPs of their products count as useful"
_PAYLOAD_TILE = (
    256,
    128,
)  # stands for four 128 x 64 tiles of payload sums, as work.py models tiles of clusters
_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")


_PRODUCTS_OF_HEAD = {"log_probs_forward": 1, "log_probs_backward": 3}


def gpu_works(run: DryRun, gpu: Hardware) -> list[tuple[bool, Work]]:
    """(whether it belongs to the backward pass, its work) of each kernel of a dry run."""
    return [(launch.backward, work) for launch in run.launches for work in _works(launch, gpu)]


def _works(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    if _is_own(launch):
        yield from _of_statistics(launch, gpu)
    elif launch.name in ("aten::bmm", "aten::baddbmm"):
        read, (written, *_) = launch.arguments["read"], launch.arguments["written"]
        name, moved = launch.name.removeprefix("aten::"), sum(t.bytes for t in read)
        depth, jobs = read[-2].shape[-1], Counter({torch.Size(written.shape).numel(): 1})
        yield Work(
            f"torch {name}", "torch", depth, 2.0, jobs, moved, written.bytes, shared=1, overlapped=True
        )
    elif launch.name.startswith("modified_attention_"):  # whose function costs nothing
        yield from work_of(replace(launch, name=launch.name.removeprefix("modified_")), gpu)
    else:
        yield from work_of(launch, gpu)


def _is_own(launch: Launch) -> bool:
    return launch.name.startswith("statistics_")


def _moved(launch: Launch) -> tuple[int, int]:
    """Bytes of what a launch reads, and of what it writes."""
    read = written = 0
    for argument in _C.CALLS[launch.name]:
        operand = launch.arguments.get(argument.name)
        if isinstance(operand, Operand):
            if argument.kind == "tensor":
                read += operand.bytes
            else:
                written += operand.bytes
    return read, written


def _products(launch: Launch) -> tuple[int, int, int]:
    """Rows and columns, and the widths of all matrix products of a launch, one after another."""
    a = launch.arguments
    (rows, width), columns = a["a"].shape, a["b"].shape[0] // max(a.get("batches", 1), 1)
    scores = width + sum(a[name].shape[-1] for name in ("other_a", "payload") if name in a)
    gradients = ("da", "db", "dother_a", "dother_b")
    return rows, columns, scores + sum(a[name].shape[-1] for name in gradients if name in a)


def _of_statistics(launch: Launch, gpu: Hardware) -> Iterator[Work]:
    (rows, columns, width), (read, written), plan = _products(launch), _moved(launch), launch.plan
    assert plan is not None
    if not plan.can.clusters or launch.name == "statistics_row_gradient":  # whose blocks own rows
        dtype = str(launch.arguments["a"].dtype).removeprefix("torch.")
        kernel = f"{launch.name}/{plan.tier}/{dtype}"
        jobs, products = Counter({rows * columns: 1}), 3 if plan.planes else 1
        yield Work(launch.name, kernel, width, 2.0 * products, jobs, read, written, shared=1)
        return
    assert plan.tile is not None  # of the fold, also where a kernel of payload sums shares its plan
    tile = _PAYLOAD_TILE if launch.name == "statistics_payload" else plan.tile
    yield contraction(launch.name, rows, columns, width, tile, gpu, written, plan.planes)
    scratch = launch.arguments.get("scratch")
    if isinstance(scratch, Operand):  # partial states of rows
        yield moves("combine_partial", scratch.bytes, written - scratch.bytes)


def products_of_torch(run: DryRun) -> int:
    """FLOPs of the matrix products that torch takes in a dry run."""
    return sum(_flops(launch) for launch in run.launches)


def _flops(launch: Launch) -> int:
    """FLOPs of a launch of torch, if it is a matrix product; else 0."""
    if launch.name.removeprefix("aten::") not in _PRODUCTS:
        return 0
    read, (written, *_) = launch.arguments["read"], launch.arguments["written"]
    flops: int = 2 * torch.Size(written.shape).numel() * read[-2].shape[-1]
    return flops


def cpu_works(run: DryRun, processor: Processor, dtype: torch.dtype) -> list[tuple[bool, Work, Time]]:
    """(backward, work, time) of each pass of the CPU engine and of each op of torch.

    Time is that of the matrix products at the rate of large ones, or that of the bytes if it is longer.
    """
    rate, bandwidth = processor.reached(dtype)
    found = []
    for launch in run.launches:
        if _is_own(launch):
            rows, columns, width = _products(launch)
            flops, (read, written) = 2 * rows * columns * width, _moved(launch)
            name = launch.name
        elif launch.name in _PRODUCTS_OF_HEAD:  # of soft targets
            (rows, width), columns = (launch.arguments[of].shape for of in ("x", "weight"))
            flops = 2 * rows * width * columns[0] * _PRODUCTS_OF_HEAD[launch.name]
            (read, written), name = _moved(launch), launch.name
        elif launch.name in _C.CALLS:
            continue
        else:
            flops = _flops(launch)
            read, written = (sum(t.bytes for t in launch.arguments[of]) for of in ("read", "written"))
            name = f"torch {launch.name.removeprefix('aten::')}"
        work = Work(name, "", 1, float(flops), Counter({1: 1}), read, written)
        time = Time(flops / rate, read / bandwidth, written / bandwidth, 0.0, True)
        found.append((launch.backward, work, time))
    return found
