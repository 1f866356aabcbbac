"""Peak memory of forward and backward beyond inputs, outputs and gradients, as the folded axis doubles.

Each number is from a separate process. The peak is reset when inputs are allocated and written; output and
gradients are subtracted from it. See monoidreduce.demo.memory.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from bench.harness import dtype_name
from monoidreduce.demo.memory import Problem, measure

LIMIT = 64 << 20
FLAT = 4 << 20  # largest increase from the first size to the last, due to pages and allocators
# Operator -> the axis that doubles; sizes on a CPU, on a GPU, and of a first problem as a warm-up.
SWEEPS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "attention": (
        "L",
        {"B": 1, "H": 8, "L": 2048, "d": 64, "causal": False},
        {"B": 1, "H": 16, "L": 4096, "d": 128, "causal": False},
        {"B": 1, "H": 2, "L": 64, "d": 64, "causal": False},
    ),
    "attention_varlen": (
        "T",
        {"T": 2048, "sequences": 4, "equal": True, "H": 8, "d": 64},
        {"T": 4096, "sequences": 4, "equal": True, "H": 16, "d": 128},
        {"T": 64, "sequences": 4, "equal": True, "H": 2, "d": 64},
    ),
    "cross_entropy": (
        "V",
        {"N": 1024, "V": 32000, "D": 512},
        {"N": 4096, "V": 32000, "D": 2048},
        {"N": 64, "V": 64, "D": 64},
    ),
    "distillation": (
        "V",
        {"N": 1024, "V": 32000, "D": 512, "E": 512},
        {"N": 4096, "V": 32000, "D": 2048, "E": 2048},
        {"N": 64, "V": 64, "D": 64, "E": 64},
    ),
    "log_probs": (
        "V",
        {"N": 1024, "V": 32000, "D": 512},
        {"N": 4096, "V": 32000, "D": 2048},
        {"N": 64, "V": 64, "D": 64},
    ),
    "mlp": (
        "K",
        {"B": 8192, "K": 8192, "d": 128},
        {"B": 16384, "K": 16384, "d": 128},
        {"B": 64, "K": 64, "d": 64},
    ),
    "logsumexp": (
        "N",
        {"M": 8192, "N": 8192, "F": 64},
        {"M": 32768, "N": 32768, "F": 64},
        {"M": 64, "N": 64, "F": 64},
    ),
    "folds": (
        "V",
        {"N": 1024, "V": 32000, "D": 512},
        {"N": 4096, "V": 32000, "D": 2048},
        {"N": 64, "V": 64, "D": 64},
    ),
    "mods": (
        "L",
        {"B": 1, "H": 2, "L": 2048, "d": 64},
        {"B": 1, "H": 4, "L": 4096, "d": 128},
        {"B": 1, "H": 2, "L": 64, "d": 64},
    ),
    "kernel_sums": (
        "M",
        {"N": 8192, "M": 8192, "D": 64},
        {"N": 32768, "M": 32768, "D": 64},
        {"N": 64, "M": 64, "D": 64},
    ),
}
CONTENDERS = ("monoidreduce", "torch")


def problem(op: str, contender: str, dtype: str, device: str, parameters: dict[str, Any]) -> Problem:
    """The problem of one contender at one size. This runs in the measured process."""
    module = importlib.import_module(f"bench.{op}")
    built = module.case(getattr(torch, dtype), torch.device(device), **parameters)
    problems: dict[str, Problem] = built.problems()
    return problems[contender]


def dtypes(op: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes to measure. Functions of a score are measured on a GPU only in 16 bits."""
    return (torch.bfloat16,) if op == "mods" and device.type == "cuda" else (torch.float32, torch.bfloat16)


def measure_memory(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """One row for each operator and dtype; `quick` measures only the smallest problem."""
    rows = []
    for op, (axis, on_cpu, on_cuda, tiny) in SWEEPS.items():
        base = tiny if quick else on_cuda if device.type == "cuda" else on_cpu
        sizes = [base[axis]] if quick else [base[axis] * factor for factor in (1, 2, 4)]
        for dtype in dtypes(op, device):
            common = {"op": op, "dtype": dtype_name(dtype), "device": str(device)}
            growth: dict[str, list[int]] = {}
            for contender in CONTENDERS:
                own = common | {"contender": contender}
                growth[contender] = [
                    measure(
                        "bench.memory:problem",
                        own | {"parameters": tiny},
                        [own | {"parameters": base | {axis: size}}],
                    )[0]
                    for size in sizes
                ]
            mebibytes = {
                name: [round(size / 2**20, 1) for size in measured] for name, measured in growth.items()
            }
            print(f"memory of {op} {dtype_name(dtype)}: MiB {mebibytes}", file=sys.stderr)
            rows.append(
                {
                    "op": op,
                    "dtype": dtype_name(dtype),
                    "parameters": {name: value for name, value in base.items() if name != axis},
                    "axis": axis,
                    "sizes": sizes,
                    "bytes": growth,
                    "limit": LIMIT,
                    "flat": growth["monoidreduce"][-1] - growth["monoidreduce"][0] <= FLAT,
                }
            )
    return rows
