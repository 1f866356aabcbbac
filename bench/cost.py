"""The model of `monoidreduce.cost`, compared with bench/results.

`python bench/cost.py` writes the tables of docs/cost.md; the CPU's table uses the tiles of this machine. With
--fit it first fits the model's constants, on one or two cases for each kernel, and writes
monoidreduce/theory/costs/constants.json. Every other case is held out. It also prints the constants for
monoidreduce/theory/costs/cpu.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path = [*(path for path in sys.path if path != str(here)), str(here.parent)]

import monoidreduce as mr
from bench.harness import tf32_allowed
from bench.publish import RESULTS, ROOT
from bench.report import in_words, table
from monoidreduce._ops import cross_entropy, distillation, dlogits, linear_loss, logsumexp
from monoidreduce._ops.dry_run import Launch
from monoidreduce.hardware import CPU, find
from monoidreduce.theory.costs import cpu
from monoidreduce.theory.costs.cost import cpu_folds, kernels
from monoidreduce.theory.costs.model import (
    GAP_SECONDS,
    START_SECONDS,
    Constants,
    constants_of,
    fitted_constants,
    time_of,
)
from monoidreduce.theory.costs.sizes import OPERATORS, call_of
from monoidreduce.theory.costs.work import Work

CONSTANTS = ROOT / "monoidreduce" / "theory" / "costs" / "constants.json"
PAGE = ROOT / "docs" / "cost.md"
MARK, CPU_MARK, END = (
    "<!-- bench: python bench/cost.py -->",
    "<!-- bench: python bench/cost.py, CPU -->",
    "<!-- /bench -->",
)
DEVICES = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}
# The model is compared with every result of an H100, and with an H200's results of float32 in planes, because
# there are none of an H100.
IN_PLANES = ("h200", "emulated")
# Commits with a default workspace of 128 MiB.
WORKSPACES = dict.fromkeys(("0d07cf7", "a7f1d91"), 128 << 20)
# An H100 measured the backward passes of these cases with kernels that they no longer run. The MLP now runs
# in one part, and at width 256 one launch computes all gradients.
CHANGED = {
    "attention, B 1, H 8, L 512, d 256",
    "attention, B 1, H 8, L 512, d 256, causal",
    "mlp, B 2048, K 2048, d 256",
}
# This was measured before it ran in parts in the backward pass.
WHOLE = {"mlp, B 1024, K 1024, d 64"}
BOUND = 0.15  # no relative error of a phase should be larger
# Kernels of Hopper's backward passes that were measured and are gone: they made the factors of tokens.
GONE = {"cross_entropy": 9, "distillation": 2}
# (forward, backward): when these cases were measured, as many small products were written in float32, and
# rounded by a kernel of their own.
ROUNDED_APART = {
    "mlp, B 1024, K 1024, d 512": (1, 3),
    "mlp, B 1024, K 2048, d 1024": (1, 3),
    "mlp, B 128, K 8192, d 256": (0, 3),
    "mlp, B 128, K 16384, d 256": (0, 3),
    "mlp, B 16384, K 2048, d 512": (0, 2),
}
UNMODELLED = {("attention", "compensated")}


@dataclass(frozen=True)
class Measured:
    """One of our contenders in a row of bench/results.

    Attributes:
        name: the case's name, for people.
        hardware: the device's name in `monoidreduce.hardware`.
        op, parameters, dtype: as in the row.
        mode: the part of the contender's name after "monoidreduce, ".
        workspace: workspace, in bytes.
        milliseconds: times of "forward" and "backward", without kernels of the bench and gone ones.
        peak: peak bytes, the most of either pass and of both.
        timed: whether the model covers its times; otherwise only its memory.
    """

    name: str
    hardware: str
    op: str
    parameters: dict[str, Any]
    dtype: str
    mode: str
    workspace: int
    milliseconds: dict[str, float]
    peak: int
    timed: bool


@cache
def measured() -> tuple[Measured, ...]:
    """The results in bench/results that the model covers (by operator and device).

    Of a case, the last run.
    """
    found = {}
    for file in sorted(
        RESULTS.glob("*.json"), key=lambda f: json.loads(f.read_text())["environment"]["date"]
    ):
        document = json.loads(file.read_text("utf-8"))
        environment = document["environment"]
        if environment["device"] in DEVICES:
            for row in document["speed"]:
                for case in _cases(row, environment) if row["op"] in OPERATORS else ():
                    found[case.name] = case
    return tuple(found.values())


def _cases(row: dict[str, Any], environment: dict[str, Any]) -> Iterator[Measured]:
    phases, device = row["phases"], DEVICES[environment["device"]]
    if row["parameters"].get("loss") == "jsd":  # not an operator, but a function for mr.statistics
        return
    if "weight" in row["parameters"]:  # under autocast, or with sums of several steps
        return
    for contender in phases["forward"]["milliseconds"]:
        ours, _, mode = contender.partition(", ")
        of_another = mode.startswith("linear_cross_entropy")  # a contender of log_probs
        if ours != "monoidreduce" or of_another or (row["op"], mode) in UNMODELLED:
            continue
        if device == IN_PLANES[0] and mode != IN_PLANES[1]:
            continue
        default = WORKSPACES.get(environment["commit"][:7], 352 << 20)
        name = f"{row['op']}, {in_words(row['parameters'])}"
        # In so small a workspace an MLP runs whole, as it did.
        whole = row["op"] == "mlp" and name in CHANGED | WHOLE
        workspace = 1 << 20 if whole else _workspace(mode, row["parameters"], default)
        known = ("forward",) if name in CHANGED else ("forward", "backward")
        times = {phase: phases[phase]["milliseconds"][contender] for phase in known}
        yield Measured(
            name=f"{name}, {row['dtype']}{', ' * bool(mode)}{mode}",
            hardware=device,
            op=row["op"],
            parameters=row["parameters"],
            dtype=row["dtype"],
            mode=mode,
            workspace=workspace,
            milliseconds={
                phase: of["median"] - 1e3 * (GAP_SECONDS + START_SECONDS) * _other_kernels(row, mode, phase)
                for phase, of in times.items()
            },
            peak=row["peak_bytes"][contender],
            timed=mode != "deterministic" and "ignored" not in row["parameters"],
        )


def _other_kernels(row: dict[str, Any], mode: str, phase: str) -> int:
    """The number of kernels of a phase that the benchmark itself launches, and of those that are gone since.

    For log-probs it adds a multiple of the entropy. And its upstream gradient is in the operands' dtype,
    which autograd converts if the result is in float32.
    """
    of_entropy = {"forward": 2, "backward": 1}[phase] * (row["op"] == "log_probs")
    converts = row["op"] not in ("attention", "mlp") and row["dtype"] in ("bfloat16", "float16")
    on_hopper = row["dtype"] in ("bfloat16", "float16") and mode != "sm80"
    gone = GONE.get(row["op"], 0) * on_hopper
    rounded = ROUNDED_APART.get(f"{row['op']}, {in_words(row['parameters'])}", (0, 0))[phase == "backward"]
    cleared = _cleared_apart(row, mode) if row["op"] == "attention" else 0
    return of_entropy + rounded + (converts + gone + cleared) * (phase == "backward")


def _cleared_apart(row: dict[str, Any], mode: str) -> int:
    """How many kernels of attention's backward pass are gone: they cleared sums of dQ, and marks of masked
    rows."""
    of, on_hopper = row["parameters"], row["dtype"] in ("bfloat16", "float16") and mode != "sm80"
    if row["dtype"] == "float32":
        return 0
    return (not on_hopper or of["d"] <= 128) + (bool(of.get("causal")) or "window" in of)


def _workspace(mode: str, parameters: dict[str, Any], default: int) -> int:
    size, _, unit = mode.partition(" ")
    if unit in ("MiB", "GiB"):
        return int(size) << (20 if unit == "MiB" else 30)
    if mode == "2NV":
        return int(2 * parameters["N"] * parameters["V"])
    return 1 << 40 if mode == "unbounded" else default


def call(case: Measured) -> tuple[str, list[Tensor], dict[str, Any]]:
    """The operator's name, its tensors (without memory) and its options."""
    dtype = torch.float32 if case.dtype == "tf32" else getattr(torch, case.dtype)
    tensors, options = call_of(OPERATORS[case.op], case.parameters, dtype)
    return OPERATORS[case.op], tensors, options | ({"top1": True} if case.mode == "top1" else {})


def _wide_tile(launch: Launch) -> tuple[int, int]:
    """The tile that a launch had before calls with few tiles took a smaller one."""
    assert launch.plan is not None and launch.plan.tile is not None
    rows, columns = launch.plan.tile
    if (rows, columns) != (256, 128) or launch.plan.planes:
        return rows, columns
    return rows, 192 if launch.name == "mlp_local_gradient" else 256


def _with_a_scale(*arguments: Any) -> linear_loss.LinearForward:
    prepared = linear_loss.prepare_forward(*arguments)
    if prepared.saved_by_head is not None:
        prepared.saved.new_full((1,), 1.0, dtype=torch.float32)
    return prepared


def under(case: Measured) -> ExitStack:
    """A context with the settings that the case was measured with."""
    stack = ExitStack()
    stack.enter_context(mr.workspace(case.workspace))
    # They were measured before cuBLAS multiplied dlogits of few tokens.
    stack.enter_context(patch.object(dlogits, "leaves_clusters_idle", lambda *_: False))
    stack.enter_context(patch("monoidreduce.theory.costs.work.tile_of", _wide_tile))
    # And before few tokens were left where they are.
    stack.enter_context(patch.object(mr._C.Plan, "skips_rows", property(lambda plan: plan.keeps)))
    # Forward passes that save local gradients wrote what these are scaled by to a tensor.
    for op in (cross_entropy, distillation):
        stack.enter_context(patch.object(op, "prepare_forward", _with_a_scale))
    # And before the forward pass of a log-sum-exp saved local gradients.
    stack.enter_context(patch.object(logsumexp, "saved_classes", lambda *_: 0))
    stack.enter_context(tf32_allowed(case.dtype == "tf32"))
    if case.dtype == "float32":
        stack.enter_context(mr.float32("emulated" if case.mode == "emulated" else "simt"))
    if case.mode == "sm80":
        stack.enter_context(patch.dict(os.environ, {"MONOIDREDUCE_CUDA_TIER": "sm80"}))
    if case.mode == "deterministic":
        stack.enter_context(patch.dict(os.environ))
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        torch.use_deterministic_algorithms(True)
        stack.callback(torch.use_deterministic_algorithms, False)
    return stack


def cost_of(case: Measured) -> mr.Cost:
    """The model's cost of a case."""
    operator, tensors, options = call(case)
    with under(case):
        return mr.cost(operator, *tensors, hardware=case.hardware, **options)


def milliseconds(cost: mr.Cost, phase: str) -> float:
    return 1e3 * sum(p.seconds for p in cost.passes if p.backward == (phase == "backward"))


# ---- Constants


@dataclass(frozen=True)
class Fit:
    """Constants to fit on one or two cases. Fits run in order; later ones use the constants of earlier ones.

    Of two cases one is long and the other short, or has short jobs, if both were measured.

    Attributes:
        kernels: the kernels that share the constants.
        width: width of their operands; 0: cost is proportional to the width.
        phase: phase to fit the time of, "forward" or "backward".
        cases: names of `Measured`. With two cases, the cost of a job is fitted too.
    """

    kernels: tuple[str, ...]
    width: int
    phase: str
    cases: tuple[str, ...]


def _attention(B: int, H: int, L: int, d: int, more: str = "", dtype: str = "bfloat16") -> str:
    return f"attention, B {B}, H {H}, L {L}, d {d}{more}, {dtype}"


OPTIONS = {"": "", "softcap/": ", softcap 30.0", "bias/": ", bias"}  # of kernels for planes, and of cases


def _planes(d: int, more: str = "") -> str:
    return _attention(8, 16, 2048, d, more, "float32, emulated")


def _mlp(B: int, K: int, d: int, dtype: str = "bfloat16") -> str:
    return f"mlp, B {B}, K {K}, d {d}, {dtype}"


def _head(V: int, mode: str) -> str:
    return f"cross_entropy, N 8192, V {V}, D 4096, bfloat16, {mode}"


def _teacher(mode: str) -> str:
    return f"distillation, N 4096, V 128256, D 2048, E 4096, bfloat16{', ' * bool(mode)}{mode}"


FITS = (
    Fit(
        ("attention_forward/192x128",),
        64,
        "forward",
        (_attention(2, 32, 8192, 64), _attention(1, 16, 1024, 64)),
    ),
    Fit(
        ("attention_forward/128x128",),
        128,
        "forward",
        (_attention(4, 16, 4096, 128), _attention(2, 16, 1024, 128)),
    ),
    Fit(
        ("attention_forward/128x192",),
        128,
        "forward",
        (_attention(1, 16, 16384, 128), _attention(2, 16, 8192, 128, ", window 1024, causal")),
    ),
    Fit(("attention_forward/128x80",), 256, "forward", (_attention(2, 8, 8192, 256),)),
    Fit(
        ("attention_forward/few rows/sm90",),
        0,
        "forward",
        (_attention(1, 8, 512, 64), _attention(1, 8, 512, 256)),
    ),
    Fit(
        ("attention_forward/softcap/128x128",),
        128,
        "forward",
        (_attention(2, 16, 8192, 128, ", softcap 30.0, causal"),),
    ),
    Fit(("attention_forward/bias/128x128",), 128, "forward", (_attention(2, 16, 8192, 128, ", bias"),)),
    Fit(
        ("attention_backward/128x128",),
        64,
        "backward",
        (_attention(2, 32, 8192, 64), _attention(1, 16, 1024, 64)),
    ),
    Fit(
        ("attention_backward/128x64",),
        128,
        "backward",
        (_attention(1, 16, 16384, 128), _attention(2, 16, 1024, 128)),
    ),
    Fit(
        ("attention_backward/passes/128x64",),
        256,
        "backward",
        (_attention(2, 8, 8192, 256),),
    ),
    Fit(
        ("attention_backward/softcap/128x64",),
        128,
        "backward",
        (_attention(2, 16, 8192, 128, ", softcap 30.0, causal"),),
    ),
    Fit(("attention_backward/bias/128x64",), 128, "backward", (_attention(2, 16, 8192, 128, ", bias"),)),
    Fit(("mlp_forward/128x128",), 64, "forward", (_mlp(16384, 16384, 64),)),
    Fit(("mlp_forward/128x128",), 128, "forward", (_mlp(16384, 16384, 128),)),
    Fit(("mlp_forward/128x64",), 256, "forward", (_mlp(16384, 16384, 256),)),
    Fit(("mlp_forward/few rows/sm90",), 128, "forward", (_mlp(64, 4096, 128), _mlp(1024, 4096, 128))),
    Fit(("mlp_forward/few rows/sm90",), 256, "forward", (_mlp(128, 8192, 256), _mlp(2048, 2048, 256))),
    Fit(
        ("mlp_backward/128x128",),
        64,
        "backward",
        (_mlp(16384, 16384, 64), _mlp(1024, 1024, 64)),
    ),
    Fit(
        ("mlp_backward/128x64",),
        128,
        "backward",
        (_mlp(16384, 16384, 128), _mlp(1024, 4096, 128)),
    ),
    Fit(
        ("mlp_backward/passes/128x64",),
        256,
        "backward",
        (_mlp(16384, 16384, 256),),
    ),
    Fit(("torch", "mlp_hidden"), 0, "forward", (_mlp(16384, 16384, 4096), _mlp(1024, 2048, 1024))),
    Fit(("mlp_local_gradient",), 0, "backward", (_mlp(16384, 16384, 4096),)),
    Fit(
        ("logsumexp_forward", "cross_entropy_forward"),
        0,
        "forward",
        ("logsumexp, M 8192, N 128256, F 4096, bfloat16", "logsumexp, M 512, N 4096, F 1024, bfloat16"),
    ),
    Fit(
        ("cross_entropy_forward/keeping", "logsumexp_forward/keeping"),
        0,
        "forward",
        (_head(262144, "2NV"), "cross_entropy, N 512, V 4096, D 512, bfloat16"),
    ),
    Fit(
        ("rows_product", "columns_product"),
        0,
        "backward",
        (_head(262144, "2NV"), "distillation, N 512, V 4096, D 512, E 512, bfloat16"),
    ),
    Fit(
        ("logsumexp_local_gradient", "cross_entropy_local_gradient"),
        0,
        "backward",
        ("logsumexp, M 8192, N 128256, F 4096, bfloat16", "logsumexp, M 512, N 4096, F 1024, bfloat16"),
    ),
    Fit(
        ("distillation_forward", "distillation_forward/keeping"),
        0,
        "forward",
        (_teacher(""), "distillation, N 512, V 4096, D 512, E 512, bfloat16"),
    ),
    Fit(("distillation_local_gradient",), 0, "backward", (_teacher(""),)),
    Fit(
        ("log_probs_forward", "log_probs_forward/keeping"),
        0,
        "forward",
        ("log_probs, N 8192, V 128256, D 4096, bfloat16", "log_probs, N 512, V 4096, D 512, bfloat16"),
    ),
    Fit(
        ("log_probs_local_gradient",),
        0,
        "backward",
        ("log_probs, N 8192, V 128256, D 4096, bfloat16",),
    ),
    *(
        Fit(
            (f"logsumexp_{phase}/narrow/128x128",),
            64,
            phase,
            ("logsumexp, M 32768, N 32768, F 64, bfloat16", "logsumexp, M 1024, N 1024, F 64, bfloat16"),
        )
        for phase in ("forward", "backward")
    ),
    *(
        Fit((f"attention_{phase}/sm80/bfloat16",), d, phase, (_attention(2, 2048 // d, 8192, d) + ", sm80",))
        for phase in ("forward", "backward")
        for d in (64, 128, 256)
    ),
    *(
        Fit((f"attention_{phase}/sm80/float32",), d, phase, (_attention(2, 2048 // d, 4096, d, "", "tf32"),))
        for phase in ("forward", "backward")
        for d in (64, 128)
    ),
    *(
        Fit((f"attention_{phase}/simt/float32",), 0, phase, (_attention(8, 16, 2048, 128, "", "float32"),))
        for phase in ("forward", "backward")
    ),
    *(
        Fit((f"mlp_{kernel}/sm80/float32",), d, kernel.partition("/")[0], (_mlp(16384, 16384, d, "tf32"),))
        for kernel in ("forward/few rows", "backward")
        for d in (64, 128)
    ),
    *(
        Fit((f"logsumexp_{phase}/simt/float32",), 0, phase, ("logsumexp, M 32768, N 32768, F 64, float32",))
        for phase in ("forward", "backward")
    ),
    *(
        Fit((f"attention_forward/planes/{option}{tile}",), d, "forward", (_planes(d, more),))
        for tile, d in (("192x64", 64), ("128x64", 128), ("128x64", 256))
        for option, more in OPTIONS.items()
    ),
    *(
        Fit(
            tuple(f"attention_backward/planes/{option}{of} alone/128x64" for of in ("dq", "dk", "dv")),
            d,
            "backward",
            (_planes(d, more),),
        )
        for d in (64, 128)
        for option, more in OPTIONS.items()
    ),
    *(
        Fit(
            tuple(f"attention_backward/planes/{option}{of}/128x64" for of in ("dq", "dk", "dv")),
            256,
            "backward",
            (_planes(256, more),),
        )
        for option, more in OPTIONS.items()
    ),
    *(
        Fit((f"mlp_forward/planes/{tile}",), d, "forward", (_mlp(16384, 16384, d, "float32, emulated"),))
        for tile, d in (("192x64", 64), ("128x64", 128))
    ),
    *(
        Fit(
            tuple(f"mlp_backward/planes/{of} alone/128x64" for of in ("dx", "dw1", "dw2")),
            d,
            "backward",
            (_mlp(16384, 16384, d, "float32, emulated"),),
        )
        for d in (64, 128)
    ),
    Fit(
        (
            "cross_entropy_forward/planes",
            "cross_entropy_local_gradient/planes",
            "cross_entropy_forward/keeping/planes",
            "logsumexp_forward/keeping/planes",
            "plane_product/planes",
        ),
        0,
        "forward",
        ("cross_entropy, N 8192, V 128256, D 4096, float32, emulated",),
    ),
    Fit(
        ("logsumexp_forward/planes",),
        64,
        "forward",
        ("logsumexp, M 32768, N 32768, F 64, float32, emulated",),
    ),
    Fit(
        ("logsumexp_forward/planes",),
        4096,
        "forward",
        ("logsumexp, M 8192, N 128256, F 4096, float32, emulated",),
    ),
    Fit(("cross_entropy_forward/sm80/bfloat16",), 0, "forward", (_head(65536, "sm80"),)),
    Fit(("cross_entropy_local_gradient/sm80/bfloat16",), 0, "backward", (_head(65536, "sm80"),)),
    Fit(("distillation_forward/sm80/bfloat16",), 0, "forward", (_teacher("sm80"),)),
    Fit(("distillation_local_gradient/sm80/bfloat16",), 0, "backward", (_teacher("sm80"),)),
)
# A job waits for its first tile, and its epilogue may take as long as products of a short width.
JOB_MICROSECONDS = [x / 10 for x in range(0, 201, 2)]
FASTEST = 1.25  # largest share tried: the data sheet's rate of products over the measured rate


@cache
def works(name: str, phase: str) -> tuple[Work, ...]:
    """The kernels of a case."""
    case = next(case for case in measured() if case.name == name)
    operator, tensors, options = call(case)
    with under(case):
        found = kernels(operator, *tensors, hardware=case.hardware, **options)
    return tuple(work for backward, work in found if backward == (phase == "backward"))


def _seconds(fit: Fit, name: str, tried: Constants, found: dict[str, tuple[Constants, ...]]) -> float:
    """The model's seconds for a case's phase, with constants `tried` for the kernels of a fit."""
    hardware = find(next(case.hardware for case in measured() if case.name == name))
    return sum(
        time_of(
            work,
            hardware,
            tried if work.kernel in fit.kernels else constants_of(work.kernel, work.width, found),
            first=not place,
        ).seconds
        for place, work in enumerate(works(name, fit.phase))
    )


def _fit(fit: Fit, job_seconds: float, found: dict[str, tuple[Constants, ...]]) -> tuple[float, Constants]:
    """The sum of squared errors, and the constants with the share for which the cases' errors sum to 0."""
    milliseconds = {
        case.name: case.milliseconds[fit.phase] for case in measured() if fit.phase in case.milliseconds
    }
    low, high = 0.001, FASTEST
    for _ in range(24):  # time falls as the share grows
        share = math.sqrt(low * high)
        tried = Constants(fit.width, share, job_seconds, fit.cases)
        errors = [
            math.log(1e3 * _seconds(fit, name, tried, found) / milliseconds[name]) for name in fit.cases
        ]
        low, high = (share, high) if sum(errors) > 0 else (low, share)
    return sum(error**2 for error in errors), replace(tried, share=round(share, 4))


def fitted() -> dict[str, tuple[Constants, ...]]:
    """The constants of every kernel in `FITS`."""
    found: dict[str, tuple[Constants, ...]] = {}
    for fit in FITS:
        jobs = JOB_MICROSECONDS if len(fit.cases) > 1 else [0.0]
        _, best = min((_fit(fit, 1e-6 * job, found) for job in jobs), key=lambda pair: pair[0])
        for kernel in fit.kernels:
            found[kernel] = tuple(sorted((*found.get(kernel, ()), best), key=lambda row: row.width))
    return found


# ---- CPU

CPU_RESULTS = RESULTS / "amd_epyc_cpu.json"
WITHOUT_PAYLOAD, WITH_PAYLOAD = ("logsumexp", "cross_entropy"), "mlp"  # fitted on these


@dataclass(frozen=True)
class CpuRow:
    """A phase of a case of `CPU_RESULTS`. fold: its fold in the model."""

    op: str
    parameters: dict[str, Any]
    dtype: str
    phase: str
    milliseconds: float
    fold: cpu.Fold

    @property
    def fitted(self) -> bool:
        return self.op in (*WITHOUT_PAYLOAD, WITH_PAYLOAD)

    @property
    def predicted(self) -> float:
        """Milliseconds by the model."""
        constants = cpu.CONSTANTS[self.dtype, self.phase == "backward"]
        return 1e3 * self.fold.seconds(constants, CPU.products[self.dtype])

    @property
    def error(self) -> float:
        """Relative error of the model."""
        return self.predicted / self.milliseconds - 1


@cache
def cpu_rows() -> tuple[CpuRow, ...]:
    """Every phase of our contenders."""
    found = []
    for row in json.loads(CPU_RESULTS.read_text("utf-8"))["speed"]:
        operator = OPERATORS[row["op"]]
        tensors, options = call_of(operator, row["parameters"], getattr(torch, row["dtype"]))
        for fold in cpu_folds(operator, *tensors, **options):
            phase = "backward" if fold.launch.backward else "forward"
            measured = row["phases"][phase]["milliseconds"]["monoidreduce"]["median"]
            found.append(CpuRow(row["op"], row["parameters"], row["dtype"], phase, measured, fold))
    return tuple(found)


def cpu_fitted() -> dict[tuple[str, bool], cpu.Constants]:
    """The constants of monoidreduce/theory/costs/cpu.py, to four digits; none is below 0."""
    found = {}
    for dtype, rate in CPU.products.items():
        for phase in ("forward", "backward"):
            of = {row.op: row for row in cpu_rows() if (row.dtype, row.phase) == (dtype, phase)}
            spent = {op: 1e-3 * row.milliseconds * rate for op, row in of.items()}
            one, other = (of[op].fold for op in WITHOUT_PAYLOAD)
            a, b = (spent[op] for op in WITHOUT_PAYLOAD)
            determinant = one.flops * other.scores - other.flops * one.scores
            product = (a * other.scores - b * one.scores) / determinant
            score = (one.flops * b - other.flops * a) / determinant
            fold = of[WITH_PAYLOAD].fold
            weighing = (spent[WITH_PAYLOAD] - product * fold.flops) / fold.scores
            rounded = (float(f"{max(x, 0.0):.4g}") for x in (product, score, weighing))
            found[dtype, phase == "backward"] = cpu.Constants(*rounded)
    return found


def every_cpu_row() -> str:
    """Table of milliseconds, by the model and measured."""
    rows = [
        [
            f"{row.op}, {in_words(row.parameters)}, {row.dtype}",
            row.phase,
            f"{row.predicted:.3g}, {row.milliseconds:.3g}: {'fitted' if row.fitted else f'{row.error:+.1%}'}",
        ]
        for row in cpu_rows()
    ]
    return table(["case", "pass", "ms"], rows)


# ---- Tables


@dataclass(frozen=True)
class Prediction:
    """The model's prediction for a phase of a case.

    Attributes:
        case: the case.
        phase: the phase.
        milliseconds: time by the model.
        fitted: whether a constant was fitted on it.
    """

    case: Measured
    phase: str
    milliseconds: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative error of the model."""
        return self.milliseconds / self.case.milliseconds[self.phase] - 1

    def in_words(self) -> str:
        measured = self.case.milliseconds[self.phase]
        if not self.case.timed:
            return f"-, {measured:.3g}"
        error = "fitted" if self.fitted else f"{self.error:+.1%}"
        return f"{self.milliseconds:.3g}, {measured:.3g}: {error}"

    @property
    def counts(self) -> bool:
        """Whether the phase is held out."""
        return self.case.timed and not self.fitted


@cache
def predictions() -> tuple[Prediction, ...]:
    """Predictions for every case and phase."""
    used = {(name, fit.phase) for fit in FITS for name in fit.cases}
    return tuple(
        Prediction(case, phase, milliseconds(cost_of(case), phase), (case.name, phase) in used)
        for case in measured()
        for phase in case.milliseconds
    )


def summary() -> str:
    """Table: for each operator and all together, held-out phases and their median and largest errors."""
    counted = [(p.case.op, abs(p.error)) for p in predictions() if p.counts]
    of = {OPERATORS[op]: [error for name, error in counted if name == op] for op in OPERATORS}
    of["all"] = [error for _, error in counted]
    rows = [
        [
            name,
            str(len(errors)),
            f"{statistics.median(errors):.1%}",
            f"{max(errors):.1%}",
            str(sum(error > BOUND for error in errors)),
        ]
        for name, errors in of.items()
        if errors
    ]
    return table(["operator", "held out", "median error", "largest", f"above {BOUND:.0%}"], rows)


def every_case() -> str:
    """Table of milliseconds and MiB, by the model and measured."""
    by_case: dict[str, list[Prediction]] = {}
    for prediction in predictions():
        by_case.setdefault(prediction.case.name, []).append(prediction)
    rows = []
    for name, phases in by_case.items():
        case = phases[0].case
        of_phase = {p.phase: p.in_words() for p in phases}
        times = [of_phase.get(phase, "other kernels now") for phase in ("forward", "backward")]
        memory = f"{cost_of(case).peak_memory / 2**20:.1f}, {case.peak / 2**20:.1f}"
        rows.append([name, *times, memory])
    return table(["case", "forward, ms", "backward, ms", "peak, MiB"], rows)


def _with(text: str, mark: str, tables: str) -> str:
    """The page with the tables after a mark replaced."""
    before, rest = text.split(f"{mark}\n")
    return f"{before}{mark}\n\n{tables}\n\n{END}{rest.split(END, 1)[1]}"


def page(text: str) -> str:
    """docs/cost.md with new tables for GPUs."""
    return _with(text, MARK, f"{summary()}\n\n{every_case()}")


def cpu_page(text: str) -> str:
    """docs/cost.md with a new table for the CPU, with the tiles of this machine."""
    return _with(text, CPU_MARK, every_cpu_row())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="the constants too")
    if parser.parse_args().fit:
        rows = {kernel: [asdict(row) for row in of] for kernel, of in sorted(fitted().items())}
        CONSTANTS.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
        fitted_constants.cache_clear()
        print(cpu_fitted())
    PAGE.write_text(cpu_page(page(PAGE.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
