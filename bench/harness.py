"""Times one operator for several contenders in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monoidreduce.demo.memory import Problem

PHASES = ("forward", "backward", "total")
ROUNDS = (5, 50)  # fewest and most
AGREEMENT = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
FLUSH_BYTES = 256 << 20  # more than any GPU's second-level cache


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    parameters: the sizes and options that tell the cases of an operator apart.
    inputs: makes the input tensors; the first `leaves` of them get gradients.
    output: shape of what a contender returns.
    contenders: by name, each takes the inputs. "monoidreduce" and "torch" are always there.
    flops: by phase, of the matrix products in the definition, recomputation not counted.
    targets: by phase, what torch's median time over monoidreduce's must reach.
    """

    op: str
    dtype: torch.dtype
    device: torch.device
    parameters: dict[str, Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    leaves: int
    output: tuple[int, ...]
    contenders: dict[str, Callable[..., Tensor]]
    flops: dict[str, float]
    targets: dict[str, float]

    def problems(self) -> dict[str, Problem]:
        """Every contender's problem, over the same inputs and the same random upstream gradient."""
        torch.manual_seed(0)
        inputs = self.inputs()
        leaves = tuple(tensor.requires_grad_() for tensor in inputs[: self.leaves])
        grad = torch.randn(self.output, dtype=self.dtype, device=self.device)

        def problem(contender: Callable[..., Tensor]) -> Problem:
            return Problem(lambda: contender(*inputs), leaves, grad)

        return {name: problem(contender) for name, contender in self.contenders.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """As in "float32"."""
    return str(dtype).removeprefix("torch.")


class Stopwatch:
    """Marks moments: of the host on a CPU; on a GPU of its queue, where the host must not be waited for."""

    def __init__(self, device: torch.device) -> None:
        self.flush = (
            torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None
        )
        self.marks: list[Any] = []

    def start(self) -> None:
        """Begins anew. Flushing a GPU's cache also keeps its queue busy while the host fills it."""
        self.marks = []
        if self.flush is not None:
            self.flush.zero_()
        self.mark()

    def mark(self) -> None:
        """One more moment."""
        if self.flush is None:
            self.marks.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.marks.append(event)

    def laps(self) -> list[float]:
        """Milliseconds between one mark and the next."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.flush is None:
            return [(end - begin) * 1e3 for begin, end in pairs]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]


def run_once(problem: Problem, watch: Stopwatch) -> tuple[list[float], list[Tensor]]:
    """Milliseconds of each phase, and the output with the gradients."""
    watch.start()
    output = problem.forward()
    watch.mark()
    gradients = torch.autograd.grad(output, problem.inputs, problem.grad_output)
    watch.mark()
    forward, backward = watch.laps()
    return [forward, backward, forward + backward], [output.detach(), *gradients]


def difference(results: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative difference of a result from the expected one, by norm."""
    pairs = zip(results, expected, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def summary(milliseconds: list[float]) -> dict[str, float]:
    """Median and the 20th and 80th percentile."""
    fifths = statistics.quantiles(milliseconds, n=5, method="inclusive")
    return {"median": statistics.median(milliseconds), "p20": fifths[0], "p80": fifths[3]}


def time_case(case: Case, seconds: float) -> dict[str, Any]:
    """Times all contenders of a case in turn for about `seconds`.

    Raises RuntimeError where a contender's results are not torch's: the time of a wrong result means nothing.
    """
    watch = Stopwatch(case.device)
    problems = case.problems()
    expected = run_once(problems["torch"], watch)[1]
    differences = {
        name: difference(run_once(problem, watch)[1], expected) for name, problem in problems.items()
    }
    for name, value in differences.items():
        if not value <= AGREEMENT[case.dtype]:  # a NaN is wrong too
            what = f"{case.op} {case.parameters} {dtype_name(case.dtype)}"
            raise RuntimeError(f"{what}: the results of {name} differ from torch's by {value:.1e}")
    round_seconds = sum(run_once(problem, watch)[0][-1] for problem in problems.values()) / 1e3
    rounds = max(ROUNDS[0], min(ROUNDS[1], round(seconds / round_seconds)))
    times: dict[str, list[list[float]]] = {name: [] for name in problems}
    order = list(problems)
    for _ in range(rounds):
        for name in order:
            times[name].append(run_once(problems[name], watch)[0])
        order.append(order.pop(0))  # so that none always follows the same other
    phases = {}
    for index, phase in enumerate(PHASES):
        milliseconds = {name: summary([laps[index] for laps in measured]) for name, measured in times.items()}
        own = milliseconds["monoidreduce"]["median"]
        phases[phase] = {
            "milliseconds": milliseconds,
            "speedup": {name: spread["median"] / own for name, spread in milliseconds.items()},
            "gflops": case.flops[phase] / own / 1e6,
            "target": case.targets.get(phase),
        }
    return {
        "op": case.op,
        "dtype": dtype_name(case.dtype),
        "parameters": case.parameters,
        "rounds": rounds,
        "difference": differences["monoidreduce"],
        "phases": phases,
    }
