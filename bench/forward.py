"""The forward pass of cross entropy, compared with the matrix product of its logits, which any form needs.

Cases have all rows, or half of the targets ignored at random. Without gradients nothing is saved, so that the
memory is that of statistics.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from bench.harness import Stopwatch, dtype_name, in_turn, on_tier, summary
from monoidreduce.demo.memory import peak, start_peak

ROUNDS = 12
DTYPE = torch.bfloat16
PRODUCT = "product of the logits"
HALF_IGNORED = "monoidreduce, half of the rows ignored"


def sizes(device: torch.device, quick: bool) -> list[dict[str, int]]:
    """The heads of three models."""
    if quick or device.type == "cpu":
        return [{"N": 64, "V": 1000, "D": 64}]
    return [
        {"N": 8192, "V": 128256, "D": 4096},
        {"N": 8192, "V": 256000, "D": 2304},
        {"N": 16384, "V": 32000, "D": 4096},
    ]


def _peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Peak memory of a call, including its result."""
    before = start_peak(device)
    call()
    return peak(device) - before


@torch.no_grad()
def measure_forward(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """For each size, the milliseconds of the product (into allocated memory) and of the losses."""
    watch, rows = Stopwatch(device), []
    for size in sizes(device, quick):
        print(f"measuring forward passes {size}", file=sys.stderr)
        N, V, D = (size[name] for name in ("N", "V", "D"))
        torch.manual_seed(0)
        x = torch.randn(N, D, device=device).to(DTYPE)
        weight = (torch.randn(V, D, device=device) * D**-0.5).to(DTYPE)
        target, logits = torch.randint(V, (N,), device=device), x.new_empty(N, V)
        half = target.masked_fill(torch.rand(N, device=device) < 0.5, -100)
        calls: dict[str, Callable[[], Tensor]] = {
            PRODUCT: functools.partial(torch.mm, x, weight.T, out=logits),
            "monoidreduce": functools.partial(mr.linear_cross_entropy, x, weight, target),
            HALF_IGNORED: functools.partial(mr.linear_cross_entropy, x, weight, half),
        }
        if device.type == "cuda":
            sm80 = on_tier(mr.linear_cross_entropy, "sm80")
            calls["monoidreduce, sm80"] = functools.partial(sm80, x, weight, target)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
        for name in in_turn(list(calls), ROUNDS):
            watch.time(calls[name])
            times[name] += watch.milliseconds()
        rows.append(
            {
                "op": "cross_entropy",
                "dtype": dtype_name(DTYPE),
                "parameters": size,
                "milliseconds": {name: summary(measured) for name, measured in times.items()},
                "peak_bytes": {
                    name: _peak_bytes(call, device)
                    for name, call in calls.items()
                    if device.type == "cuda" and name != PRODUCT
                },
            }
        )
    return rows
