"""Times one operator's contenders in turn."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from monoidreduce.demo.memory import Problem, peaks

PHASES = ("forward", "backward", "total")
ROUNDS = (5, 50)  # fewest and most
AGREEMENT = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# Larger than any GPU's L2 cache. Two flushes take 1.4 ms on an H100, longer than the host needs to launch a
# call. With one flush the host was late for backward passes with 15 small kernels, which then took 0.35 to
# 0.5 ms in place of 0.1.
FLUSH_BYTES, FLUSHES = 2 << 30, 2

Contender = Callable[..., Tensor]
Result = TypeVar("Result")
Checked = TypeVar("Checked")


def under(contender: Contender, begin: Callable[[], object], end: Callable[[], object]) -> Contender:
    """The contender, with its forward pass and each node of its backward pass between begin() and end()."""

    def hook(step: Callable[[], object]) -> Callable[..., None]:
        def run(*_: Any) -> None:  # returns None, as a hook's result would replace gradients
            step()

        return run

    def call(*inputs: Tensor) -> Tensor:
        begin()
        try:
            output = contender(*inputs)
        finally:
            end()
        for node in nodes_between(output, inputs):
            node.register_prehook(hook(begin))
            node.register_hook(hook(end))
        return output

    return call


def nodes_between(output: Tensor, inputs: Sequence[Tensor]) -> set[Node]:
    """The nodes of the autograd graph between the inputs and the output."""
    before = {get_gradient_edge(t).node for t in inputs if t.requires_grad}
    found: set[Node] = set()
    ahead = [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in before and node not in found:
            found.add(node)
            ahead += [following for following, _ in node.next_functions]
    return found


def on_tier(contender: Contender, tier: str) -> Contender:
    """The contender with its kernel tier forced by MONOIDREDUCE_CUDA_TIER."""
    variable = "MONOIDREDUCE_CUDA_TIER"
    return under(contender, lambda: os.environ.update({variable: tier}), lambda: os.environ.pop(variable))


def deterministic(contender: Contender) -> Contender:
    """The contender in torch's deterministic mode."""

    def switch(on: bool) -> Callable[[], object]:
        return lambda: torch.use_deterministic_algorithms(on)

    return under(contender, switch(True), switch(False))


AUTOTUNED = "torch.compile, max-autotune"


def compiled(function: Contender, tuned: bool = True) -> dict[str, Contender]:
    """torch.compile of a function, in its default mode and, if `tuned`, with matrix products chosen by trial.

    The mode "max-autotune" also uses CUDA graphs, which keep the memory of a call.
    """
    if not tuned:
        return {"torch.compile": torch.compile(function, dynamic=False)}
    by_trial = torch.compile(function, dynamic=False, mode="max-autotune-no-cudagraphs")
    return {"torch.compile": torch.compile(function, dynamic=False), AUTOTUNED: by_trial}


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    parameters: the sizes and options that tell the cases of an operator apart.
    inputs: makes the input tensors; the first `leaves` of them get gradients.
    output: shape of a contender's result.
    contenders: name -> function of the inputs. "monoidreduce" and "torch" are always present. Names of ours
        begin with "monoidreduce". Other libraries are imported in the call, so that a missing one
        fails only its contender.
    flops: phase -> FLOPs of the matrix products in the definition, without recomputation.
    targets: phase -> least ratio of torch's median time to monoidreduce's.
    tf32: whether factors of float32 products may be rounded to TF32, which has as many mantissa bits as
        float16.
    checked_by: name -> the contender that results are compared with, for contenders that compute a different
        function from "torch" but are timed with it.
    sums: name -> bytes of gradients that a contender adds to memory that was there before the call.
    """

    op: str
    dtype: torch.dtype
    device: torch.device
    parameters: dict[str, Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    leaves: int
    output: tuple[int, ...]
    contenders: dict[str, Contender]
    flops: dict[str, float]
    targets: dict[str, float]
    tf32: bool = False
    checked_by: dict[str, str] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        """The dtype's name, or "tf32"."""
        return "tf32" if self.tf32 else dtype_name(self.dtype)

    @property
    def agreement(self) -> float:
        """The largest allowed relative difference between contenders' results."""
        return AGREEMENT[torch.float16 if self.tf32 else self.dtype]

    def drawn(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """The inputs and a random upstream gradient, the same in every call."""
        torch.manual_seed(0)
        return self.inputs(), torch.randn(self.output, dtype=self.dtype, device=self.device)

    def problems(self) -> dict[str, Problem]:
        """Every contender's problem, with the same inputs and the same upstream gradient."""
        inputs, grad = self.drawn()
        leaves = tuple(tensor.requires_grad_() for tensor in inputs[: self.leaves])

        def problem(name: str, contender: Contender) -> Problem:
            return Problem(lambda: contender(*inputs), leaves, grad, self.sums.get(name, 0))

        return {name: problem(name, contender) for name, contender in self.contenders.items()}

    def __str__(self) -> str:
        return f"{self.op} {self.parameters} {self.precision}"


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name, for example "float32"."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Allow or forbid torch, in the block, to round factors of float32 products on a GPU to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Stopwatch:
    """Times phases by the host's clock or, on a GPU, by CUDA events.

    On a GPU, the queue must not run empty between a phase's events.
    """

    def __init__(self, device: torch.device) -> None:
        self.flush = (
            torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None
        )
        self.marks: list[tuple[Any, Any]] = []

    def time(self, phase: Callable[[], Result]) -> Result:
        """Run and time a phase. Flushing a GPU's cache also keeps it busy while the host fills its queue."""
        if self.flush is not None:
            for _ in range(FLUSHES):
                self.flush.zero_()
        begin = self._now()
        result = phase()
        self.marks.append((begin, self._now()))
        return result

    def _now(self) -> Any:
        if self.flush is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def milliseconds(self) -> list[float]:
        """The times of all phases since the last call."""
        marks, self.marks = self.marks, []
        if self.flush is None:
            return [(end - begin) * 1e3 for begin, end in marks]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in marks]


def run_once(problem: Problem, watch: Stopwatch) -> tuple[list[float], list[Tensor]]:
    """Milliseconds of each phase, and the output with the gradients."""
    watch.marks.clear()  # a run before may have failed between its phases
    output = watch.time(problem.forward)
    gradients = watch.time(lambda: torch.autograd.grad(output, problem.inputs, problem.grad_output))
    forward, backward = watch.milliseconds()
    return [forward, backward, forward + backward], [output.detach(), *gradients]


def sm_clock(device: torch.device) -> int | None:
    """The present clock of a GPU's SMs in MHz; None on a CPU, and without NVIDIA's package nvidia-ml-py."""
    try:
        return torch.cuda.clock_rate(device) if device.type == "cuda" else None
    except ModuleNotFoundError:
        return None


def differences(results: list[Tensor], expected: list[Tensor]) -> list[float]:
    """The relative difference of each result from the expected one, by norm."""
    pairs = zip(results, expected, strict=True)
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]


def balanced_rounds(names: Sized) -> int:
    """The least number of rounds in which `in_turn` is balanced. Multiples of it are balanced too."""
    return len(names) * (1 + len(names) % 2)


def in_turn(names: list[str], rounds: int) -> Iterator[str]:
    """Every name once a round, in a balanced order.

    In `balanced_rounds` rounds, each name follows each other name equally often within a round. This matters
    because a GPU near its power limit is slower after some contenders.

    The rounds are the rows of Williams' square (of two squares for an odd number of names), in random order
    (Williams 1949, "Experimental designs balanced for the estimation of residual effects of treatments").
    """
    count, draws = len(names), random.Random(0)
    row = [(-i // 2 if i % 2 else i // 2) % count for i in range(count)]  # 0, n - 1, 1, n - 2, ...
    squares = [row] if count % 2 == 0 else [row, row[::-1]]
    orders = [[names[(place + step) % count] for place in r] for r in squares for step in range(count)]
    for number in range(rounds if names else 0):
        if number % len(orders) == 0:
            draws.shuffle(orders)
        yield from orders[number % len(orders)]


def summary(milliseconds: list[float]) -> dict[str, float]:
    """The median and the 20th and 80th percentiles."""
    fifths = statistics.quantiles(milliseconds, n=5, method="inclusive")
    return {"median": statistics.median(milliseconds), "p20": fifths[0], "p80": fifths[3]}


def attempt(
    case: Case, problems: dict[str, Checked], check: Callable[[Checked], Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The results of `check` for all contenders, and the reasons for those for which it raises.

    Raises RuntimeError if it raises for one of ours.
    """
    if case.device.type == "cuda":
        torch.compiler.reset()  # torch.compile stops compiling a function after a few sizes
    passed, absent = {}, {}
    for name, problem in problems.items():
        try:
            passed[name] = check(problem)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if name.startswith("monoidreduce"):
                raise RuntimeError(f"{case}: {name}: {reason}") from error
            absent[name] = reason
    return passed, absent


def time_case(case: Case, seconds: float) -> dict[str, Any]:
    """Time all contenders of a case in turn for about `seconds`; on a GPU, measure their peak memory too.

    A contender that is not installed, cannot run the case or differs from torch's results is not timed; the
    row says why. Raises RuntimeError if it is one of ours.
    """
    with tf32_allowed(case.tf32):
        return _time_case(case, seconds)


def _time_case(case: Case, seconds: float) -> dict[str, Any]:
    watch = Stopwatch(case.device)
    problems = case.problems()
    references = {name: case.checked_by.get(name, "torch") for name in problems}
    expected = {name: run_once(problems[name], watch)[1] for name in set(references.values())}

    def agree(name: str) -> float:
        reference = references[name]
        found = differences(run_once(problems[name], watch)[1], expected[reference])
        if not all(value <= case.agreement for value in found):  # a NaN is wrong too
            raise ValueError(
                f"its results differ from {reference}'s by {', '.join(f'{value:.1e}' for value in found)}"
            )
        return max(found)

    agreement, absent = attempt(case, {name: name for name in problems}, agree)
    problems = {name: problem for name, problem in problems.items() if name in agreement}
    round_seconds = sum(run_once(problem, watch)[0][-1] for problem in problems.values()) / 1e3
    rounds = max(ROUNDS[0], min(ROUNDS[1], round(seconds / round_seconds)))
    if whole := rounds // balanced_rounds(problems) * balanced_rounds(problems):
        rounds = max(ROUNDS[0], whole)
    times: dict[str, list[list[float]]] = {name: [] for name in problems}
    clocks: dict[str, list[int]] = {name: [] for name in problems}
    for name in in_turn(list(problems), rounds):
        times[name].append(run_once(problems[name], watch)[0])
        if (clock := sm_clock(case.device)) is not None:
            clocks[name].append(clock)
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
    row = {
        "op": case.op,
        "dtype": case.precision,
        "parameters": case.parameters,
        "rounds": rounds,
        "difference": agreement,
        "absent": absent,
        "phases": phases,
        "sm_clock": {name: statistics.median(seen) for name, seen in clocks.items() if seen},
    }
    if case.device.type == "cuda":
        of_passes = {name: peaks(problem) for name, problem in problems.items()}
        row["peak_bytes"] = {name: max(found) for name, found in of_passes.items()}
        row["step_peak_bytes"] = {name: step for name, (_, step) in of_passes.items()}
    return row
