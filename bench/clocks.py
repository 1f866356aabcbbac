"""The clock of a GPU under load, and the times of passes at this clock: `python bench/clocks.py --out FILE`.

Each pass runs in two ways. With pauses: memory is written before each pass, as in the other benchmarks
(bench/harness.py). Repeated: for half a second one pass follows another, and the last third counts. Before
and after a pass a kernel reads, on every multiprocessor, its cycle counter and the GPU's timer.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # The repository comes last in sys.path, so that its folder monoidreduce/ does not hide an installed
    # package.
    here = Path(__file__).resolve().parent
    sys.path = [*(path for path in sys.path if path != str(here)), str(here.parent)]

import torch
from torch import Tensor

import monoidreduce as mr
from bench.harness import Stopwatch
from bench.machine import environment
from bench.report import in_words
from monoidreduce._command_line import Parser, exit_with, replacing, some_path

ROUNDS = 12
SECONDS = 0.5
MOST = 2000  # repeated passes
MARK = r"""
extern "C" __global__ void mark(long long* found) {
  unsigned multiprocessor;
  long long nanoseconds;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  if (threadIdx.x != 0) return;
  found[2 * multiprocessor] = clock64();
  found[2 * multiprocessor + 1] = nanoseconds;
}
"""


class Pass(NamedTuple):
    """A pass to time, and the pass that runs before it in the benchmarks: forward before backward."""

    op: str
    parameters: dict[str, Any]
    before: Callable[[], object] | None
    call: Callable[[], object]


class Clock:
    """Reads cycles and nanoseconds around calls."""

    def __init__(self, device: torch.device) -> None:
        self.kernel = torch.cuda._compile_kernel(MARK, "mark")  # type: ignore[no-untyped-call]
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.marks = torch.zeros(2 * MOST, self.multiprocessors, 2, dtype=torch.int64, device=device)
        self.count = 0

    def _mark(self) -> None:
        self.kernel((2 * self.multiprocessors, 1, 1), (32, 1, 1), (self.marks[self.count],))
        self.count += 1

    def around(self, call: Callable[[], object]) -> None:
        self._mark()
        call()
        self._mark()

    def read(self) -> tuple[Tensor, Tensor]:
        """Milliseconds and megahertz of all calls since the last time."""
        torch.cuda.synchronize()
        marks = self.marks[: self.count].cpu().view(-1, 2, self.multiprocessors, 2)
        self.marks.zero_()
        self.count = 0
        cycles, nanoseconds = (marks[:, 1] - marks[:, 0]).double().unbind(-1)
        seen = (marks > 0).all(1).all(-1)  # a mark may have missed a multiprocessor
        of_call = [
            (n[s].median(), (c[s] / n[s]).median()) for c, n, s in zip(cycles, nanoseconds, seen, strict=True)
        ]
        time, rate = torch.tensor(of_call).unbind(-1)
        return 1e-6 * time, 1e3 * rate


def passes(device: torch.device) -> Iterator[Pass]:
    """Torch's product that rates of devices come from, and causal attention with grouped queries."""
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    yield Pass("product", {"size": 8192}, None, lambda: a @ b)
    for B, L in (2, 4096), (2, 8192), (1, 32768):
        for Hkv in 32, 8, 4:
            q, k, v, grad = (
                torch.randn(B, heads, L, 128, device=device).bfloat16() for heads in (32, Hkv, Hkv, 32)
            )
            operands = [tensor.requires_grad_() for tensor in (q, k, v)]
            out = mr.attention(*operands, causal=True)

            def forward(operands: list[Tensor] = operands) -> object:
                return mr.attention(*operands, causal=True)

            def backward(operands: list[Tensor] = operands, out: Tensor = out, grad: Tensor = grad) -> object:
                return torch.autograd.grad(out, operands, grad, retain_graph=True)

            parameters = {"B": B, "H": 32, "Hkv": Hkv, "L": L, "d": 128, "causal": True}
            yield Pass("attention, forward", parameters, None, forward)
            yield Pass("attention, backward", parameters, forward, backward)


def medians(found: tuple[Tensor, Tensor], last: int) -> dict[str, float]:
    """The medians of the last calls."""
    names = "milliseconds", "megahertz"
    return {name: statistics.median(of[-last:].tolist()) for name, of in zip(names, found, strict=True)}


def power() -> dict[str, str]:
    """What nvidia-smi says now: of the power, and whether it holds the clock down."""
    fields = "power.draw.instant", "power.limit", "clocks_event_reasons.sw_power_cap"
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return dict(zip(fields, told.split(", "), strict=True))


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    watch, clock = Stopwatch(device), Clock(device)
    for each in passes(device):
        for _ in range(ROUNDS):
            if each.before is not None:
                watch.time(each.before)
            watch.time(lambda: clock.around(each.call))  # noqa: B023
            watch.milliseconds()
        rested = medians(clock.read(), ROUNDS)
        repeats = min(MOST, round(1e3 * SECONDS / rested["milliseconds"]))
        for _ in range(repeats):
            clock.around(each.call)
        told = power()
        repeated = medians(clock.read(), max(1, repeats // 3))
        row = {
            "op": each.op,
            "parameters": each.parameters,
            "with pauses": rested,
            "repeated": repeated | told,
        }
        print(f"{each.op} {in_words(each.parameters)}: {rested}, {repeated | told}", file=sys.stderr)
        yield row


def main(argv: list[str]) -> int:
    parser = Parser(prog="python bench/clocks.py", description=__doc__)
    parser.add_argument("--out", type=some_path, metavar="FILE", required=True, help="a JSON file")
    options = parser.parse_args(argv)
    device = torch.device("cuda")
    document = {"environment": environment(device, "python bench/clocks.py"), "clocks": [*measure(device)]}
    with replacing(options.out) as whole:
        whole.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
