"""The machine, the versions and the command of a result."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import monoidreduce as mr
from bench.harness import Stopwatch, dtype_name, tf32_allowed

# Packages of contenders other than torch, and packages that their speed depends on.
PEERS = (
    "triton",
    "flash-attn",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "cut-cross-entropy",
    "liger-kernel",
    "quack-kernels",
    "pykeops",
    "transformers",
)


def _least_milliseconds(device: torch.device, work: Callable[[], object]) -> float:
    watch = Stopwatch(device)
    for _ in range(7):
        watch.time(work)
    return min(watch.milliseconds())


def product_gflops(device: torch.device, dtype: torch.dtype) -> float:
    """Best GFLOP/s of torch's matrix product on this machine, the ceiling for other rates."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _least_milliseconds(device, lambda: a @ b) / 1e6


def copy_gbytes(device: torch.device) -> float:
    """GB/s (bytes read plus bytes written) of a copy far larger than the caches."""
    source = torch.ones(1 << 30 if device.type == "cuda" else 1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _least_milliseconds(device, lambda: target.copy_(source)) / 1e6


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _driver(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit, marked if tracked files differ from it; "unknown" outside a repository.

    For a copy of the sources without history, the environment variable MONOIDREDUCE_COMMIT gives the commit.
    """
    if named := os.environ.get("MONOIDREDUCE_COMMIT"):
        return named
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment(device: torch.device, command: str) -> dict[str, Any]:
    """The facts about machine, versions and command that a result needs."""
    products = {
        dtype_name(dtype): round(product_gflops(device, dtype)) for dtype in (torch.float32, torch.bfloat16)
    }
    if device.type == "cuda":
        with tf32_allowed(True):
            products["tf32"] = round(product_gflops(device, torch.float32))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "driver": _driver(device),
        "threads": torch.get_num_threads(),
        "cpu_isa": mr.backend_info()["cpu"]["isa"],
        "load_average": round(os.getloadavg()[0], 2),
        "product_gflops": products,
        "copy_gbytes": round(copy_gbytes(device), 1),
        "monoidreduce": mr.__version__,
        "torch": torch.__version__,
        "peers": {name: _version(name) for name in PEERS},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": _commit(),
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
