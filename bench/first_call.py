"""Time to the first result of a user's function in a fresh process.

A process with an empty kernel cache is timed, then one with the cache that the first filled. The time starts
when torch is loaded and the inputs exist. Python finds bytecode of all modules, as after installation by pip.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Operator -> its sizes and the names of its cases.
FUNCTIONS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "folds": ({"N": 1024, "V": 4096, "D": 256}, ("lse_target", "token_stats")),
    "mods": ({"B": 1, "H": 4, "L": 1024, "d": 64}, ("score_mod alibi",)),
}
PROCESSES = 2
LIMIT_MS = {
    "forward": 2500.0,
    "forward + backward": 4000.0,
    "forward, cached": 60.0,
    "forward + backward, cached": 60.0,
}


def first_call(op: str, name: str, device_type: str, with_backward: bool) -> tuple[str, float]:
    """The operator's title, and the milliseconds of this process's first call."""
    import torch

    device, (sizes, _) = torch.device(device_type), FUNCTIONS[op]
    case = importlib.import_module(f"bench.{op}").case(torch.bfloat16, device, **sizes, name=name)
    inputs = [t.requires_grad_(i < case.leaves) for i, t in enumerate(case.inputs())]
    upstream = torch.ones(case.output, device=device)
    # Warm up what torch starts at its first product and imports for its first gradient.
    product = inputs[0] @ inputs[1].mT
    torch.autograd.grad(product, inputs[:2], torch.ones_like(product))

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    result = case.contenders["monoidreduce"](*inputs)
    if with_backward:
        torch.autograd.grad(result, inputs[: case.leaves], upstream)
    wait()
    return case.op, (time.perf_counter() - start) * 1e3


def measure_first_call(device: Any, quick: bool, ops: Collection[str]) -> list[dict[str, Any]]:
    """The least milliseconds of several processes, for functions of `ops`, or of all if `ops` have none."""

    def fresh(op: str, name: str, phase: str, folder: str, bytecode: str) -> tuple[str, float]:
        command = [sys.executable, str(Path(__file__)), op, name, device.type, phase]
        environment = os.environ | {
            "MONOIDREDUCE_CACHE_DIR": folder,
            "PYTHONPYCACHEPREFIX": bytecode,
            "PYTHONDONTWRITEBYTECODE": "",
        }
        ended = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        title, milliseconds = json.loads(ended.stdout)
        return title, milliseconds

    rows = []
    chosen = [op for op in FUNCTIONS if op in ops] or [*FUNCTIONS]
    functions = [(op, name) for op in chosen for name in FUNCTIONS[op][1]]
    with tempfile.TemporaryDirectory() as bytecode:
        for op, name in functions[:1] if quick else functions:
            times: dict[str, list[float]] = {}
            for _ in range(1 if quick else PROCESSES):
                for phase in ("forward", "forward + backward"):
                    with tempfile.TemporaryDirectory() as folder:
                        for suffix in ("", ", cached"):
                            title, milliseconds = fresh(op, name, phase, folder, bytecode)
                            times.setdefault(phase + suffix, []).append(milliseconds)
            least = {phase: min(measured) for phase, measured in times.items()}
            rows.append({"op": title, "milliseconds": least, "limits": LIMIT_MS})
    return rows


if __name__ == "__main__":
    # The repository comes last in sys.path, so that its folder monoidreduce/ does not hide an installed
    # package.
    sys.path = [*(path for path in sys.path if path != str(ROOT / "bench")), str(ROOT)]
    print(json.dumps(first_call(sys.argv[1], sys.argv[2], sys.argv[3], "backward" in sys.argv[4])))
