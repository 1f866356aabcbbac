"""Time to the first result of a user's function in a fresh process, and to its gradients.

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
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
POINTS = {"N": 4096, "M": 4096}
HEADS = {"B": 1, "H": 4, "L": 1024, "d": 64}
# Operator -> its functions, with the sizes of their cases.
FUNCTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "folds": {
        name: {"N": 1024, "V": 4096, "D": 256, "name": name}
        for name in ("lse_target", "token_stats", "siglip", "noisy_or", "divergences")
    },
    "mods": {
        name: HEADS | {"name": name}
        for name in (
            "score_mod alibi",
            "mask_mod document",
            "mask_mod window",
            "mask_mod natten",
            "attend sigmoid",
            "attend relu2",
        )
    },
    "captured": {
        f"learned {name}": HEADS | {"name": name}
        for name in ("forgetting", "alibi and documents", "relative", "clamped", "sigmoid")
    },
    "user_losses": {
        f"loss {name}": {"N": 1024, "M": 1024, "D": 256, "name": name} for name in ("supcon", "siglip", "jsd")
    },
    "payloads": {
        **{f"payload {name}": {"H": 4, "L": 1024, "d": 64, "name": name} for name in ("alibi", "relative")},
        "payload gaussian": POINTS | {"D": 3, "E": 3},
    },
    "kernel_sums": {f"kernel_sums {D}": POINTS | {"D": D} for D in (3, 64)},
    "examples": {
        name: {"N": 1024, "V": 4096, "D": 256, "name": name}
        for name in (
            "policy_gradient.token_stats",
            "token_losses.pieces",
            "divergences.pieces",
            "contrastive.pairs",
            "contrastive.choices",
            "noisy_or.causes",
            "kernel_sums.gaussian",
            "kernel_sums.soft_minimum",
            "kernel_density.mixture",
            "nearest_neighbours.nearest",
        )
    },
}
OF_ROWS = ("half of kernel_sums.gaussian", "bias of contrastive.pairs")  # other data are of columns
CORES = 4  # of a process: a call compiles up to four units at a time
PHASES = ("forward", "forward + backward")
LIMIT_MS = {
    "forward": 1500.0,
    "forward, cached": 60.0,
    "forward + backward": 2500.0,
    "forward + backward, cached": 60.0,
}


class FirstCall(NamedTuple):
    """A call of a function. leaves: the tensors that get gradients of run()."""

    run: Callable[[], Any]
    leaves: tuple[Any, ...]


def _of_case(op: str, device: Any, sizes: dict[str, Any]) -> FirstCall:
    import torch

    of_points, module = "M" in sizes and op != "user_losses", importlib.import_module(f"bench.{op}")
    kind = "" if op != "payloads" else "gaussian_" if of_points else "attention_"
    dtype = torch.float32 if of_points else torch.bfloat16
    case = getattr(module, f"{kind}case")(dtype, device, **sizes)
    inputs = [t.requires_grad_(i < case.leaves) for i, t in enumerate(case.inputs())]
    return FirstCall(lambda: case.contenders["monoidreduce"](*inputs), tuple(inputs[: case.leaves]))


def _of_example(device: Any, N: int, V: int, D: int, name: str) -> FirstCall:
    """A fold of examples/, of bfloat16 rows and columns; the sum of all its results."""
    import torch

    import monoidreduce as mr

    sys.path.append(str(ROOT / "examples"))  # examples import their neighbour
    module, _, function = name.partition(".")
    fold = getattr(importlib.import_module(module), function)
    arguments = fold.__wrapped__.__code__.co_varnames[: fold.__wrapped__.__code__.co_argcount]

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=device).mul(0.1).to(dtype).requires_grad_()

    heads = 2 if "other" in arguments else 1
    operands = [leaf(n, D, dtype=torch.bfloat16) for _ in range(heads) for n in (N, V)]
    known = ("score", "other", "row", "column", "label", "head", "batch")
    data = [argument for argument in arguments if argument not in known]
    row, column = (
        {argument: leaf(size) for argument in data if (f"{argument} of {name}" in OF_ROWS) == of_rows}
        for of_rows, size in ((True, N), (False, V))
    )
    label = torch.randint(V, (N,), device=device) if "label" in arguments else None

    def run() -> torch.Tensor:
        results = fold(*operands, label=label, row=row, column=column)
        values = [result.value if isinstance(result, mr.stat.Extremum) else result for result in results]
        return torch.stack([value.sum() for value in values if value.is_floating_point()]).sum()

    return FirstCall(run, (*operands, *row.values(), *column.values()))


def first_call(op: str, name: str, device_type: str) -> list[float]:
    """The milliseconds until this process's first call has a result, and until it has gradients."""
    import torch

    device, sizes = torch.device(device_type), FUNCTIONS[op][name]
    call = _of_example(device, **sizes) if op == "examples" else _of_case(op, device, sizes)
    # Warm up what torch starts at its first product and imports for its first upstream gradient: sympy, 0.4 s
    first = call.leaves[0]
    product = first @ first.mT
    torch.autograd.grad(product, first, torch.ones_like(product))

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    result = call.run()
    wait()
    forward = time.perf_counter()
    torch.autograd.grad(result, call.leaves, torch.ones_like(result), allow_unused=True)
    wait()
    return [(end - start) * 1e3 for end in (forward, time.perf_counter())]


def measure_first_call(device: Any, quick: bool, ops: Collection[str]) -> list[dict[str, Any]]:
    """The milliseconds of processes of their own, for functions of `ops`, or of all if `ops` have none."""

    def fresh(function: tuple[str, str], kernels: str) -> list[float]:
        command = [sys.executable, str(Path(__file__)), *function, device.type]
        environment = {**of_bytecode, "MONOIDREDUCE_CACHE_DIR": kernels}
        ended = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        milliseconds: list[float] = json.loads(ended.stdout)
        return milliseconds

    chosen = [op for op in FUNCTIONS if op in ops] or [*FUNCTIONS]
    functions = [(op, name) for op in chosen for name in FUNCTIONS[op]]
    functions = functions[:1] if quick else functions
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes()) as pool:
        of_bytecode = os.environ | {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        package = Path(importlib.import_module("monoidreduce").__file__ or "").parent
        folders = (package, ROOT / "bench", ROOT / "examples")
        compile_all = [sys.executable, "-m", "compileall", "-q", *map(str, folders)]
        subprocess.run(compile_all, env=of_bytecode, check=True)
        kernels = [f"{folder}/kernels{n}" for n in range(len(functions))]
        times: list[dict[str, float]] = [{} for _ in functions]
        for suffix in ("", ", cached"):  # no process compiles while others find their kernels in the cache
            for row, found in zip(times, pool.map(fresh, functions, kernels), strict=True):
                row |= {
                    phase + suffix: milliseconds for phase, milliseconds in zip(PHASES, found, strict=True)
                }
    titles = [f"fold {name}" if op == "folds" else name for op, name in functions]
    return [
        {"op": title, "milliseconds": row, "limits": LIMIT_MS}
        for title, row in zip(titles, times, strict=True)
    ]


def processes() -> int:
    """How many processes are timed at the same time."""
    return max((os.cpu_count() or 1) // CORES, 1)


if __name__ == "__main__":
    # The repository comes last in sys.path, so that its folder monoidreduce/ does not hide an installed
    # package.
    sys.path = [*(path for path in sys.path if path != str(ROOT / "bench")), str(ROOT)]
    print(json.dumps(first_call(*sys.argv[1:4])))
