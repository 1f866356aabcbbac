"""Measures, in a fresh process, the memory of a differentiable call beyond inputs, outputs and gradients.

On the CPU this is the growth of the peak resident size (VmHWM of /proc, Linux only), which is reset after the
inputs are made. On a GPU it is the growth of the peak of torch's allocator.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNMEASURED = "memory is not measured: on the CPU this needs /proc/self/clear_refs, which Linux has"


class Problem(NamedTuple):
    """A differentiable call, the leaves whose gradients are asked for, and the upstream gradient.

    sums: bytes of those gradients that the call adds to memory that was there before it.
    """

    forward: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    grad_output: Tensor
    sums: int = 0


def can_measure(device: torch.device) -> bool:
    """Whether this system can measure memory on `device`."""
    return device.type == "cuda" or os.access("/proc/self/clear_refs", os.W_OK)


def start_peak(device: torch.device) -> int:
    """Resets the peak; returns the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # 5: set the high-water mark to the present size
    return _status("VmRSS")


def peak(device: torch.device) -> int:
    """The most bytes in use at a time since start_peak."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_growth(problem: Problem) -> int:
    """Bytes that a forward and backward need beyond inputs, outputs and gradients: the larger of `peaks`."""
    return max(peaks(problem))


def peaks(problem: Problem) -> tuple[int, int]:
    """Two peaks in bytes: of the forward pass, without the output; of both passes, without output and
    gradients.

    The first is the larger one if forward already holds memory that later becomes gradients.
    """
    device = problem.grad_output.device
    before = start_peak(device)
    output = problem.forward()
    held = output.nbytes
    forward = peak(device) - before - held
    gradients = torch.autograd.grad(output, problem.inputs, problem.grad_output)
    held += sum(gradient.nbytes for gradient in gradients) - problem.sums
    return max(0, forward), max(0, peak(device) - before - held)


def measure(build: str, warm_up: dict[str, Any], sizes: list[dict[str, Any]]) -> list[int]:
    """peak_growth of the problems that `build`, a "module:function", makes in a fresh process, in bytes.

    warm_up: arguments of `build` for a first problem, not measured, that loads code and starts threads.
    sizes: arguments of `build` for the measured problems, smallest first.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        # With these, glibc's malloc makes resident mean allocated.
        "MALLOC_MMAP_THRESHOLD_": "65536",  # a freed block leaves the process
        "MALLOC_PERTURB_": "85",  # a new block is written to
    }
    command = [
        sys.executable,
        "-c",
        # Without the working directory, which comes first: in a clone it hides an installed package.
        f"import sys; sys.path.pop(0); from {__name__} import main; main()",
        build,
        json.dumps([warm_up, *sizes]),
    ]
    # In a session of its own, so that Ctrl-C does not make it print a traceback; subprocess.run kills it
    # then.
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, start_new_session=True
    )
    growth: list[int] = json.loads(result.stdout)
    return growth[1:]


def main() -> None:
    """The measured process: prints a JSON list of peak growths."""
    module, function = sys.argv[1].split(":")
    build = getattr(importlib.import_module(module), function)
    print(json.dumps([peak_growth(build(**arguments)) for arguments in json.loads(sys.argv[2])]), flush=True)
    # Without finalizing Python: if a thread of torch's autograd waits for Python's lock then, the process
    # aborts. (Seen once on a GPU: "terminate called without an active exception".)
    os._exit(0)
