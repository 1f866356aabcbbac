"""How long a user waits for the first result of a fold of their own, in a process that has just begun.

Each time is of a fresh process: with an empty cache of kernels, then with the one that this filled. It begins
when torch and the inputs are there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDS = ("lse_target", "token_stats")
PROCESSES = 3
LIMIT_MS = {"forward": 2500.0, "forward + backward": 4000.0, "forward, cached": 60.0}


def first_call(name: str, device_type: str, with_backward: bool) -> float:
    """Milliseconds of this process's first call."""
    import torch

    from bench import folds

    device = torch.device(device_type)
    case = folds.case(torch.bfloat16, device, N=1024, V=4096, D=256, name=name)
    inputs = [t.requires_grad_(i < case.leaves) for i, t in enumerate(case.inputs())]
    upstream = torch.ones(case.output, device=device)
    (inputs[0] @ inputs[1].mT).sum().backward()  # what torch starts at its first product

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    result = case.contenders["monoidreduce"](*inputs)
    if with_backward:
        torch.autograd.grad(result, inputs[: case.leaves], upstream)
    wait()
    return (time.perf_counter() - start) * 1e3


def measure_first_call(device: Any, quick: bool) -> list[dict[str, Any]]:
    """The least milliseconds of several processes, for each fold."""

    def fresh(name: str, phase: str, folder: str) -> float:
        command = [sys.executable, str(Path(__file__)), name, device.type, phase]
        environment = os.environ | {"MONOIDREDUCE_CACHE_DIR": folder}
        ended = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        return float(json.loads(ended.stdout))

    rows = []
    for name in FOLDS[:1] if quick else FOLDS:
        times: dict[str, list[float]] = {}
        for _ in range(1 if quick else PROCESSES):
            for phase in ("forward", "forward + backward"):
                with tempfile.TemporaryDirectory() as folder:
                    for suffix in ("", ", cached"):
                        times.setdefault(phase + suffix, []).append(fresh(name, phase, folder))
        least = {phase: min(measured) for phase, measured in times.items()}
        rows.append({"op": f"fold {name}", "milliseconds": least, "limits": LIMIT_MS})
    return rows


if __name__ == "__main__":
    # The repository comes last, where its folder monoidreduce/ does not hide an installed package.
    sys.path = [*(path for path in sys.path if path != str(ROOT / "bench")), str(ROOT)]
    print(json.dumps(first_call(sys.argv[1], sys.argv[2], "backward" in sys.argv[3])))
