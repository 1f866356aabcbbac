"""The calls that scripts/measure_traffic.py has counted, pass by pass: the program that ncu watches.

    python scripts/traffic_calls.py FILE [--small]

It writes the passes in order to FILE, with the bytes that `mr.cost` says. Before each pass it launches a
kernel of torch's that only waits. So the passes can be told apart in the list of kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

import monoidreduce as mr
from bench.harness import dtype_name
from bench.report import Row
from bench.traffic import row
from monoidreduce.hardware import Hardware
from monoidreduce.theory.costs.sizes import OPERATORS, call_of

DTYPE = torch.bfloat16
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attention", {"B": 2, "H": 16, "L": 8192, "d": 128}),
    ("attention", {"B": 2, "H": 16, "L": 8192, "d": 128, "causal": True}),
    ("cross_entropy", {"N": 8192, "V": 128256, "D": 4096}),
    ("distillation", {"N": 4096, "V": 128256, "D": 2048, "E": 4096}),
    ("log_probs", {"N": 8192, "V": 128256, "D": 4096}),
    ("mlp", {"B": 16384, "K": 16384, "d": 128}),
    ("mlp", {"B": 8192, "K": 14336, "d": 4096, "gated": True}),
    ("logsumexp", {"M": 32768, "N": 32768, "F": 64}),
)
SMALL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attention", {"B": 1, "H": 16, "L": 4096, "d": 128}),
    ("cross_entropy", {"N": 2048, "V": 32000, "D": 1024}),
    ("distillation", {"N": 1024, "V": 32000, "D": 1024, "E": 1024}),
    ("log_probs", {"N": 2048, "V": 32000, "D": 1024}),
    ("mlp", {"B": 8192, "K": 8192, "d": 128}),
    ("mlp", {"B": 2048, "K": 4096, "d": 1024, "gated": True}),
    ("logsumexp", {"M": 16384, "N": 16384, "F": 64}),
)
CALIBRATION = {"bytes": 1 << 28}  # of a negation's input and of its output
# How far counters may be from the model, as a share of it.
TOLERANCES = {
    ("negate", "forward"): 0.01,
    ("attention", "forward"): 0.1,
    ("attention", "backward"): 0.3,
    ("mlp", "forward"): 0.1,
    ("mlp", "backward"): 0.1,
}
OF_CONTRACTIONS = 0.35
WIDEST = 256  # of the kernels that hold operands whole; kernels of wider ones are contractions
# Bytes of rows' statistics, which the model of contractions leaves out. No case has more.
STATISTICS = 1 << 20
# Bytes that a kernel may leave in the L2 cache of an H100, where they are not counted.
LEFT = 25_000_000


def tolerance(op: str, phase: str, parameters: dict[str, Any]) -> float:
    narrow = parameters.get("d", 0) <= WIDEST
    return TOLERANCES.get((op, phase), OF_CONTRACTIONS) if narrow else OF_CONTRACTIONS


def modelled(op: str, parameters: dict[str, Any], cost: mr.Cost, compulsory: dict[str, int]) -> list[Row]:
    """Both passes of a call as `cost` has them. compulsory: bytes of each."""
    rows = []
    for phase in ("forward", "backward"):
        passes = [p for p in cost.passes if p.backward == (phase == "backward")]
        l2 = [p.l2 for p in passes]
        rows.append(
            row(
                op,
                dtype_name(DTYPE),
                parameters,
                phase,
                compulsory[phase],
                {
                    "read": sum(p.dram_read for p in passes),
                    "written": sum(p.dram_written for p in passes),
                    "l2": None if None in l2 else sum(size or 0 for size in l2),
                },
                tolerance=tolerance(op, phase, parameters),
                slack=STATISTICS,
                unwritten=sum(min(p.dram_written, p.launches * LEFT) for p in passes),
            )
        )
    return rows


def rows_of(
    op: str, parameters: dict[str, Any], hardware: str | Hardware | None, tensors: list[Tensor]
) -> list[Row]:
    """What `mr.cost` says of a case on a GPU, None for that of the tensors."""
    operator, options = OPERATORS[op], call_of(OPERATORS[op], parameters, DTYPE)[1]
    whole = mr.cost(operator, *tensors, hardware=hardware, **options)
    forward = mr.cost(operator, *tensors, hardware=hardware, needed=(), **options).compulsory
    return modelled(op, parameters, whole, {"forward": forward, "backward": whole.compulsory - forward})


def drawn(like: Tensor) -> Tensor:
    """Values for a tensor of a call: targets, or an operand whose gradient is wanted."""
    if not like.is_floating_point():
        return torch.randint(0, 1000, like.shape, device="cuda")
    scale = like.shape[-1] ** -0.5  # scores stay near 1
    return torch.randn(like.shape, dtype=like.dtype, device="cuda").mul_(scale).requires_grad_()


def counted(run: Callable[[], Any]) -> Any:
    """Runs a pass that ncu counts, after a kernel that marks where it begins."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    result = run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return result


def calibration() -> Row:
    """Has torch negate a large tensor, whose bytes are known."""
    size = CALIBRATION["bytes"]
    source = torch.ones(size // 4, device="cuda")
    target = torch.neg(source)
    counted(lambda: torch.neg(source, out=target))
    return row(
        "negate",
        dtype_name(source.dtype),
        CALIBRATION,
        "forward",
        2 * size,
        {"read": size, "written": size, "l2": size},
        tolerance=TOLERANCES["negate", "forward"],
        unwritten=LEFT,
    )


def passes(op: str, parameters: dict[str, Any]) -> list[Row]:
    """Makes a call and its backward pass, both counted, after a first time that is not."""
    described, more = call_of(OPERATORS[op], parameters, DTYPE)
    tensors = [drawn(t) for t in described]
    options = {name: drawn(value) if isinstance(value, Tensor) else value for name, value in more.items()}
    if op == "distillation":
        for teacher in tensors[2:]:
            teacher.requires_grad_(False)
    wanted = [t for t in (*tensors, *options.values()) if isinstance(t, Tensor) and t.requires_grad]

    def forward() -> Tensor:
        result = getattr(mr, OPERATORS[op])(*tensors, **options)
        output: Tensor = result.log_probs if op == "log_probs" else result
        return output

    output = forward()
    upstream = torch.ones_like(output)
    torch.autograd.grad(output, wanted, upstream)
    del output
    output = counted(forward)
    counted(lambda: torch.autograd.grad(output, wanted, upstream))
    return rows_of(op, parameters, None, [t.detach() for t in tensors])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the passes, as JSON")
    parser.add_argument("--small", action="store_true", help="small sizes")
    options = parser.parse_args()
    rows = [calibration()]
    for op, parameters in SMALL if options.small else CASES:
        rows += passes(op, parameters)
        torch.cuda.empty_cache()
    options.file.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
