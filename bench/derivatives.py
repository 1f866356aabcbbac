"""Forward mode and Hessian-vector products, beside the plain passes and torch with stored scores.

Attention: how its result moves with q, k and v, or with q alone, and a Hessian-vector product of these. Cross
entropy: how it moves with the weight, and a Hessian-vector product of the weight, beside a step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
import monoidreduce.reference
from bench.harness import Stopwatch, dtype_name, in_turn, summary
from monoidreduce.demo.memory import peak, start_peak

ROUNDS = 12
DTYPE = torch.bfloat16
Call = Callable[[], object]


def attention_sizes(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    if quick or device.type == "cpu":
        return [{"B": 1, "H": 2, "L": 128, "d": 64, "causal": True}]
    shapes = [(1, 4, 2048, 64), (4, 16, 4096, 64), (2, 16, 4096, 128), (1, 8, 16384, 64)]
    names = ("B", "H", "L", "d")
    return [
        dict(zip(names, shape, strict=True)) | {"causal": causal}
        for shape in shapes
        for causal in (False, True)
    ]


def attention_hvp_sizes(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    lengths = (128,) if quick or device.type == "cpu" else (2048, 8192)
    return [{"B": 1, "H": 4, "L": length, "d": 64} for length in lengths]


def loss_sizes(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    if quick or device.type == "cpu":
        return [{"N": 64, "V": 1000, "D": 64}]
    return [{"N": 4096, "V": 32000, "D": 2048}, {"N": 4096, "V": 128256, "D": 4096}]


def attention_calls(size: dict[str, Any], device: torch.device) -> dict[str, Call]:
    shape = size["B"], size["H"], size["L"], size["d"]
    q, k, v, *directions = (torch.randn(shape, device=device).to(DTYPE) for _ in range(6))

    def moved(module: Any, count: int) -> Call:
        def of(*moving: Tensor) -> Tensor:
            result: Tensor = module.attention(*moving, *(q, k, v)[count:], causal=size["causal"])
            return result

        return functools.partial(torch.func.jvp, of, (q, k, v)[:count], tuple(directions[:count]))

    return {
        "forward": functools.partial(mr.attention, q, k, v, causal=size["causal"]),
        "jvp": moved(mr, 3),
        "jvp of q": moved(mr, 1),
        "torch, jvp": moved(mr.reference, 3),
    }


def attention_hvp_calls(size: dict[str, Any], device: torch.device) -> dict[str, Call]:
    shape = size["B"], size["H"], size["L"], size["d"]
    q, k, v, upstream, *directions = (torch.randn(shape, device=device).to(DTYPE) for _ in range(7))

    def gradient(module: Any) -> Callable[..., Any]:
        return torch.func.grad(lambda *given: (module.attention(*given) * upstream).sum(), (0, 1, 2))

    def hvp(module: Any) -> Call:
        return functools.partial(torch.func.jvp, gradient(module), (q, k, v), tuple(directions))

    return {
        "step": functools.partial(gradient(mr), q, k, v),
        "hvp": hvp(mr),
        "torch, hvp": hvp(mr.reference),
    }


def loss_calls(size: dict[str, Any], device: torch.device) -> dict[str, Call]:
    x = torch.randn(size["N"], size["D"], device=device).to(DTYPE)
    shape = size["V"], size["D"]
    weight, direction = ((torch.randn(shape, device=device) * size["D"] ** -0.5).to(DTYPE) for _ in range(2))
    target = torch.randint(size["V"], (size["N"],), device=device)

    def of(module: Any) -> Callable[[Tensor], Tensor]:
        return functools.partial(module.linear_cross_entropy, x, target=target)

    def hvp(module: Any) -> Call:
        return lambda: torch.func.jvp(torch.func.grad(of(module)), (weight,), (direction,))

    return {
        "forward": lambda: of(mr)(weight),
        "jvp": lambda: torch.func.jvp(of(mr), (weight,), (direction,)),
        "step": lambda: torch.func.grad(of(mr))(weight),
        "hvp": hvp(mr),
        "torch, jvp": lambda: torch.func.jvp(of(mr.reference), (weight,), (direction,)),
        "torch, hvp": hvp(mr.reference),
    }


@torch.no_grad()
def measure_calls(
    op: str, size: dict[str, Any], calls: dict[str, Call], device: torch.device
) -> dict[str, Any]:
    """The milliseconds and the peak memory of each call, without those that run out of memory."""
    print(f"measuring {op} {size}: {', '.join(calls)}", file=sys.stderr)
    watch, peaks = Stopwatch(device), {}
    for name, call in [*calls.items()]:
        before = start_peak(device)
        try:
            call()
        except torch.OutOfMemoryError:
            del calls[name]
        else:
            peaks[name] = peak(device) - before
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in in_turn(list(calls), ROUNDS):
        watch.time(calls[name])
        times[name] += watch.milliseconds()
    return {
        "op": op,
        "dtype": dtype_name(DTYPE),
        "parameters": size,
        "milliseconds": {name: summary(measured) for name, measured in times.items()},
        "peak_bytes": peaks if device.type == "cuda" else {},
    }


def measure_derivatives(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """For each size, the milliseconds and the peak memory of each call."""
    rows = []
    cases = [("attention", attention_calls, size) for size in attention_sizes(device, quick)]
    cases += [("attention, hvp", attention_hvp_calls, size) for size in attention_hvp_sizes(device, quick)]
    cases += [("cross_entropy", loss_calls, size) for size in loss_sizes(device, quick)]
    for op, calls_of, size in cases:
        torch.manual_seed(0)
        rows.append(measure_calls(op, size, calls_of(size, device), device))
    return rows
