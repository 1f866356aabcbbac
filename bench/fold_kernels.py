"""Single kernels of users' folds, compared with the kernels of built-in operators.

Each is a contraction: that of the forward pass, or that of the local gradients in the backward pass. Its time
is from torch's profiler, without matrix products, copies and the kernels that combine partial results. The
built-in operators save no local gradients here, so their backward passes recompute all of them too.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.folds import FOLDS, case
from bench.harness import in_turn

ROUNDS = 27  # with 9, ratios of kernels that take 12 ms moved by up to 6 % between runs
BUILT_IN, OWN = "built-in", "own"
TARGETS = {"lse_target": 0.95, "divergences": 0.90}  # share of the built-in's rate; 0.92 for all others
OTHERS_TARGET = 0.92
SIZES = ({"N": 8192, "V": 32000, "D": 4096}, {"N": 8192, "V": 128256, "D": 4096})
PHASES = ("forward", "backward")


def cross_entropy(x: Tensor, weight: Tensor, label: Tensor) -> Tensor:
    """linear_cross_entropy that saves no local gradients."""
    numbers = ("none", 1.0, 0.0, -100, 0.0, 0.0)
    slices = (0, -1, False, False, True, None)
    loss: Tensor = torch.ops.monoidreduce.linear_cross_entropy(
        x, weight, None, label, None, *numbers, *slices
    )[0]
    return loss


def distillation(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    """linear_distillation with the forward KL divergence that saves no local gradients."""
    options = ("none", "forward_kl", 1.0, False, True, None)
    loss: Tensor = torch.ops.monoidreduce.linear_distillation(
        x, weight, teacher_x, teacher_weight, None, *options
    )[0]
    return loss


def contractions(run: Callable[[], object], of_gradients: bool) -> float:
    """Milliseconds of the contractions that a pass launches, without matrix products of local gradients."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    kernels = [e for e in found.events() if "contraction_kernel" in e.name]
    chosen = [e for e in kernels if not of_gradients or "Gradient" in e.name]
    if not chosen:
        raise RuntimeError(f"no contraction among {[e.name[:80] for e in found.events()]}")
    return sum(e.time_range.elapsed_us() for e in chosen) / 1e3


def measure_fold_kernels(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """The milliseconds of each kernel; nothing on a CPU."""
    if device.type != "cuda":
        return []
    rows = []
    for size in ({"N": 256, "V": 1000, "D": 128},) if quick else SIZES:
        for name in FOLDS:
            print(f"measuring kernels of {name} {size}", file=sys.stderr)
            of_case = case(torch.bfloat16, device, **size, name=name)
            inputs, grad = of_case.drawn()
            leaves = [t.requires_grad_() for t in inputs[: of_case.leaves]]
            calls = {
                OWN: of_case.contenders["monoidreduce"],
                BUILT_IN: distillation if name == "divergences" else cross_entropy,
            }
            times: dict[str, dict[str, list[float]]] = {p: {c: [] for c in calls} for p in PHASES}
            for round_, contender in enumerate(in_turn(list(calls), ROUNDS)):
                output: list[Tensor] = []
                forward = contractions(lambda: output.append(calls[contender](*inputs)), False)  # noqa: B023
                gradients = functools.partial(torch.autograd.grad, output[0], leaves, grad)
                backward = contractions(gradients, True)
                if round_ >= 2 * len(calls):  # the first rounds load and compile kernels
                    times["forward"][contender].append(forward)
                    times["backward"][contender].append(backward)
            rows.append(
                {
                    "op": name,
                    "parameters": size,
                    "milliseconds": {
                        phase: {c: statistics.median(of) for c, of in times[phase].items()}
                        for phase in PHASES
                    },
                    "target": TARGETS.get(name, OTHERS_TARGET),
                }
            )
    return rows
