"""What `explain` returns, and what it reads from a dry run: the passes, their order of sums, the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce import _C
from monoidreduce._ops.dry_run import DryRun, Launch
from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._validate import mismatch

__all__ = [
    "Explanation",
    "Pass",
    "architecture_of",
    "cpu_tiles",
    "facts_of",
    "name_of",
    "of_dtypes",
    "order_of",
    "passes_of",
    "where_of",
]


@dataclass(frozen=True)
class Explanation:
    """What a call of an operator would run; `str()` of it is for reading.

    Attributes:
        operator: its name.
        forward, backward: the kernel paths as `_C.path_counts()` names them.
        architecture: the instruction set of the CPU, or that of the GPU as "sm_90".
        tiles: the rows and columns that are computed at a time, forward and backward; None on a GPU.
        workspace: bytes for local gradients, None where the operator needs none.
        deterministic: whether two runs, forward and backward, give the same bits; of `map_reduce`, if the
            caller's functions do.
        reasons: why, a sentence each.
    """

    operator: str
    forward: str
    backward: str
    architecture: str
    tiles: tuple[tuple[int, int], tuple[int, int]] | None
    workspace: int | None
    deterministic: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        tiles = {}
        if self.tiles is not None:
            forward, backward = (f"{rows} x {columns}" for rows, columns in self.tiles)
            tiles["tiles"] = f"{forward} forward, {backward} backward (rows x columns)"
        facts = {
            "forward": self.forward,
            "backward": self.backward,
            "architecture": self.architecture,
            **tiles,
            "workspace": "none needed" if self.workspace is None else f"up to {self.workspace} bytes",
            "deterministic": "yes" if self.deterministic else "no",
        }
        lines = [self.operator]
        lines += [f"  {name:<14}{fact}" for name, fact in facts.items()]
        lines += [f"  - {reason}" for reason in self.reasons]
        return "\n".join(lines)


def facts_of(device: torch.device) -> _C.DeviceFacts | None:
    """The facts of the GPU that tensors are on; None for the CPU. Raises ValueError for another device, and
    RuntimeError for a GPU in a build without CUDA."""
    if device.type not in ("cpu", "cuda"):
        expected = "tensors on the CPU or on a GPU, or the name of hardware"
        raise ValueError(mismatch("tensors", expected, device))
    if device.type == "cpu":
        return None
    if not _C.build_info()["cuda"]:
        raise RuntimeError(f"the tensors are on {device} and this build of monoidreduce is CPU-only")
    return _C.facts_of(device.index)


def architecture_of(gpu: _C.DeviceFacts | None) -> str:
    return _C.cpu_isa() if gpu is None else f"sm_{gpu.major}{gpu.minor}"


def where_of(device: torch.device, hardware: str | None, gpu: _C.DeviceFacts | None) -> list[str]:
    """Sentences about the device. hardware: the name of a GPU that need not be present."""
    if hardware is not None:
        return [f"the GPU is to be of the kind {hardware}"]
    if gpu is not None:
        return [f"the tensors are on {device}, {torch.cuda.get_device_name(device)}"]
    return [
        f"the tensors are on the CPU, which has {', '.join(_C.cpu_isas())}",
        f"{_C.cpu_isa()} is the last of these, or what MONOIDREDUCE_CPU_ISA names",
        f"{torch.get_num_threads()} threads: for a given number of threads sums have a fixed order",
    ]


def of_dtypes(dtype: torch.dtype) -> str:
    """A sentence about the dtypes of a call whose inputs have this one."""
    return f"the inputs are {name_of(dtype)}, sums and statistics {name_of(accumulation_dtype(dtype))}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


WAYS = "forward", "backward"
Tiles = tuple[tuple[int, int], tuple[int, int]]


def cpu_tiles(operands: dict[str, Tensor | None], bias_gradient: bool = False) -> Tiles:
    """The rows and columns that the CPU engine computes at a time, forward and backward.

    operands: "a" [rows, F] or [B, H, rows, F] and "b", and those of a second score ("other_a", "other_b") and
    the "payload", if there are any. Their values are not read. bias_gradient: whether a bias has a gradient.
    """
    given: dict[str, Tensor | None] = dict.fromkeys(("a", "b", "other_a", "other_b", "payload"))
    for name, t in operands.items():
        if t is not None:
            *rows, width = t.shape
            shape = (*rows, width) if len(rows) == 3 else (1, 1, math.prod(rows), width)
            given[name] = torch.empty((), dtype=t.dtype).expand(shape)
    tiles: Tiles = _C.cpu_tiles(
        **given,  # type: ignore[arg-type]
        bias_gradient=bias_gradient,
        threads=torch.get_num_threads(),
    )
    return tiles


# Kernels of a part of a pass of an MLP, and the pass.
_PARTS = {
    "mlp_hidden": "mlp_forward",
    "gated_hidden": "mlp_forward",
    "gated_gradient": "mlp_backward",
    "statistics_payload": "statistics_fold",
}


def _pass_name(kernel: str) -> str:
    """The pass as which `_C` counts a kernel: itself, or the pass that it is a part of.

    Kernels of dlogits, NAME_local_gradient, are a part of NAME_backward, unless they have plans of their own.
    """
    if hasattr(_C, f"plan_{kernel}"):
        return kernel
    return _PARTS.get(kernel, kernel.replace("_local_gradient", "_backward"))


# The kernel that sums the gradient of each row in one thread, or with planes in one block. It stores no
# gradients of scores.
_ROW_SUMS = "statistics_row_gradient"


class Pass(NamedTuple):
    """What a forward or a backward pass runs.

    Attributes:
        path: as `_C.path_counts()` names it. The family of kernels is "torch" where none of ours runs; such a
            path is not counted.
        plan: None on a CPU, and for kernels that any GPU runs alike.
        launch: of the kernel that gives the pass its name; None if there is nothing left for it to do.
        of_products: whether the pass multiplies stored dlogits, weights or hidden values.
    """

    path: str
    plan: _C.Plan | None
    launch: Launch | None
    of_products: bool


def order_of(backward: Pass) -> tuple[bool, str]:
    """Whether two runs of a backward pass on a GPU give the same bits, and why."""
    if torch.are_deterministic_algorithms_enabled():
        asked = "torch.use_deterministic_algorithms(True) is in force: gradients are added in a fixed order"
        return True, asked
    if backward.of_products:
        return True, "gradients are matrix products of local gradients, added in a fixed order"
    if backward.launch is None:
        return True, "no kernel writes gradients"
    name = backward.launch.name
    if name.endswith(("_forward", "_fold")):
        return True, "a gradient is a fold, whose states are combined in a fixed order"
    adds_rows = backward.plan is not None and backward.plan.adds_rows and name != _ROW_SUMS
    arguments = backward.launch.arguments
    d_bias = arguments.get("dbias")
    if adds_rows or "d_table" in arguments or (d_bias is not None and d_bias.repeated):
        instead = "torch.use_deterministic_algorithms(True) fixes their order"
        return False, f"gradients are added atomically; {instead}"
    return True, "a gradient is summed by one block each, in a fixed order"


def passes_of(run: DryRun) -> tuple[Pass, Pass]:
    """The kernels of the forward and the backward pass. Of several ops in a dry run, the last one counts."""
    op = run.ops[-1]
    if op.name == "linear_jsd":  # the kernel of its forward pass makes the gradients too
        launch = next(x for x in run.launches if x.name == "jsd_rows")
        forward, backward = (f"jsd_{way}/cuda/sm90/{name_of(op.arguments['x'].dtype)}" for way in WAYS)
        return Pass(forward, None, launch, False), Pass(backward, None, launch, True)
    of_forward = _pass_of(run, False)
    if op.name.endswith("_parts"):  # the forward pass makes the gradients
        path = of_forward.path.replace("_forward", "_backward")
        return of_forward, Pass(path, of_forward.plan, of_forward.launch, True)
    return of_forward, _pass_of(run, True)


def first_product(run: DryRun, backward: bool) -> tuple[int, int] | None:
    """The size of the first matrix product of torch in a pass of an MLP; None if torch multiplies none.

    Where torch computes the pass, its first product is the pre-activations of a part.
    """
    if run.ops[-1].name != "mlp":
        return None
    products = (x for x in run.launches if x.name in ("aten::mm", "aten::addmm") and x.backward == backward)
    first = next(products, None)
    if first is None:
        return None
    rows, columns = first.arguments["written"][0].shape
    return rows, columns


def _pass_of(run: DryRun, backward: bool) -> Pass:
    op = run.ops[-1]
    folds = ("_forward", "_fold")
    endings = ("_backward", "_gradient") if backward else folds

    def names_pass(name: str, of_backward: bool, endings: tuple[str, ...] = endings) -> bool:
        return of_backward == backward and _pass_name(name).endswith(endings)

    launches = [x for x in run.launches if not x.name.startswith("aten::")]
    if not backward:  # a call may run an op before its last one
        launches.reverse()
    launch = next((x for x in launches if names_pass(x.name, x.backward)), None)
    if launch is None and backward and op.name == "statistics":  # gradients of data are folds
        launch = next((x for x in launches if names_pass(x.name, x.backward, folds)), None)
    if launch is None and not backward and op.name == "statistics":  # payload sums are gradients
        gradients = ("_backward", "_gradient")
        launch = next((x for x in launches if names_pass(x.name, x.backward, gradients)), None)
    planned = next((x for x in run.plans if names_pass(x.name, x.backward)), None)
    leading = next(iter((op if launch is None else launch).arguments.values()))
    if launch is not None:
        name, plan = launch.name, launch.plan
    elif planned is not None:
        name, plan = planned.name, planned.plan
    else:
        name, plan = f"{op.name}_{'backward' if backward else 'forward'}", None
    on_gpu = next(iter(op.arguments.values())).is_cuda
    idle = launch is None and plan is None
    by_torch = launch is None and first_product(run, backward) is not None
    if idle or by_torch:
        engine = f"{'cuda' if on_gpu else 'cpu'}/torch"
    elif not on_gpu:
        engine = f"cpu/{_C.cpu_isa_of(torch.empty(0, dtype=leading.dtype))}"
    else:
        engine = f"cuda/{'simt' if plan is None else plan.tier}"
        in_order = torch.are_deterministic_algorithms_enabled()
        engine += "/deterministic" if in_order and launch is not None and name.endswith("_backward") else ""
    path = f"{_pass_name(name)}/{engine}/{name_of(leading.dtype)}"
    writes_gradients = launch is not None and name.endswith(("_backward", *folds, _ROW_SUMS))
    return Pass(path, plan, launch, by_torch or (backward and not idle and not writes_gradients))
