"""Follows a user-defined fold from a Python function to kernels: generated C++, checks, compilation,
speed."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor

from monoidreduce import _C
from monoidreduce.folds.cpu.bytecode import backward_code, forward_code
from monoidreduce.folds.cuda import compiler, kernels
from monoidreduce.folds.cuda.cuda_source import fold_source, gradient_source, state_words
from monoidreduce.folds.operands import Counts
from monoidreduce.folds.program.tracing import Traced, trace
from monoidreduce.folds.torch.monoid import StatisticsMonoid
from monoidreduce.laws import check_monoid
from monoidreduce.theory.commands.calibrate import seconds_of
from monoidreduce.workspace import get_workspace

from .memory import UNMEASURED, Problem, can_measure
from .policy import BACKENDS, policy_problem, tensors, token_stats
from .report import draw_memory, name_of, panels, tell_plot
from .sweep import Sweep, dtype_name, growth

T = TypeVar("T")

_STYLES: dict[str, dict[str, Any]] = {
    "torch": {"color": "tab:gray"},
    "token_stats": {"color": "tab:blue", "linewidth": 2.5},
    "linear_log_probs": {"color": "tab:orange", "linestyle": "--"},
    "linear_cross_entropy": {"color": "tab:green", "linestyle": ":"},
}


@dataclass(frozen=True)
class FoldScale:
    """The size of the demo on a device: `tokens` tokens of width `dim`, at each of the `vocabularies`.

    checked: the number of tokens whose results are compared with float64. seconds: the least time of a
        timing.
    """

    tokens: int
    dim: int
    vocabularies: list[int]
    dtype: torch.dtype
    checked: int
    seconds: float


@dataclass(frozen=True)
class Function:
    """The traced function, and the number of data arguments of each kind (row, row index, column, ...)."""

    traced: Traced
    counts: Counts

    @property
    def text(self) -> str:
        return self.traced.text


def run(scale: FoldScale, device: torch.device, plot: Path, seed: int) -> None:
    """Prints the generated code, its checks and its timings, and saves the plot."""
    torch.manual_seed(seed)
    vocabulary = scale.vocabularies[-1]
    print("Statistics of one row of logits, hidden @ head.T, which policy gradients need, on one logit:\n")
    print(inspect.getsource(token_stats))
    function = show_sources()
    hidden, head, token = tensors(scale.tokens, vocabulary, scale.dim, device, scale.dtype)
    size = f"{scale.tokens} tokens, {vocabulary} classes, width {scale.dim}, {dtype_name(scale.dtype)}"
    print(f"\n{check_laws(function)}\n")
    with own_cache():
        print(show_kernels(function, hidden, head, token))
        print(f"\n{size}, on {name_of(device)}")
        print(show_errors(hidden, head, token, scale.checked))
        del hidden, head, token
        forward, steps = times(scale, device)
        memory = peaks(scale, device) if can_measure(device) else None
    print("\n" + table(forward, steps, memory))
    tell_plot(plot, lambda: save_plot(plot, scale, steps, memory))


# What the library makes of the function


def timed(work: Callable[[], T]) -> tuple[T, str]:
    """The result of one call of work(), and its time as text."""
    start = time.perf_counter()
    result = work()
    return result, f"{(time.perf_counter() - start) * 1e3:.1f} ms"


def traced_function() -> Function:
    """The function, traced anew."""
    found = trace(inspect.unwrap(token_stats), {}, {})
    return Function(found, found.counts)


def show_sources() -> Function:
    """Prints the C++ of an element and of its gradient, as the library writes it for GPUs."""
    function, traced = timed(traced_function)
    fold, _ = timed(lambda: fold_source(function.text, *function.counts))
    gradient, derived = timed(lambda: gradient_source(function.text, *function.counts))
    print(f"Traced in {traced} to {len(function.traced.program.nodes)} operations. Their C++:\n")
    print(element_code(fold.text))
    print(
        f"\nThe gradient by the logit, derived and written in {derived}. A row's data are lse, mean, target,"
    )
    print("the low word of lse, and the gradients by the three:\n")
    print(element_code(gradient.text))
    return function


def element_code(struct: str) -> str:
    """The text of the last function of a generated struct, two statements to a line."""
    _, _, function = struct.rpartition("\n  MR_HD static ")
    head, *body = (line.strip() for line in function.splitlines())
    statements = body[: body.index("}")]
    pairs = (statements[i : i + 2] for i in range(0, len(statements), 2))
    lines = ["  " + "".join(f"{statement:<44}" for statement in pair).rstrip() for pair in pairs]
    return "\n".join([head, *lines, "}"])


def check_laws(function: Function) -> str:
    """Checks the laws of a commutative monoid on states of random logits; returns the result as text.

    Raises MonoidLawError if a law is broken.
    """
    monoid = StatisticsMonoid(function.text)
    first = count(0, 3)  # elements of a row have columns of their own

    def sample(generator: torch.Generator, shape: tuple[int, ...]) -> Any:
        rows, at = torch.Size(shape).numel(), next(first)
        score = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
        label = torch.randint(at, at + 3, (rows, 1), generator=generator)
        state = monoid.of_scores(score, lambda _: label, at)
        return monoid.State(*(field.reshape(shape) for field in state))

    results = check_monoid(monoid, sample).results
    cases, difference = sum(r.cases for r in results), max(r.largest_difference for r in results)
    held = f"The statistics are a monoid: all {len(results)} laws of mr.check_monoid hold in float64"
    return f"{held}\non {cases} cases; the largest difference is {difference:.1e}."


@contextmanager
def own_cache() -> Iterator[None]:
    """A context with an empty kernel cache, so that the demo compiles its kernels."""
    name = "MONOIDREDUCE_CACHE_DIR"
    before = os.environ.get(name)
    with TemporaryDirectory() as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


def show_kernels(function: Function, hidden: Tensor, head: Tensor, token: Tensor) -> str:
    """Says which engine runs the program on the device, and how long its compilation takes."""
    explained = token_stats.explain(hidden, head, label=token)
    lines = [f"Forward pass: {explained.forward}. Backward pass: {explained.backward}."]
    if explained.tiles is not None:
        forward, backward = (f"{rows} x {columns}" for rows, columns in explained.tiles)
        _, seconds = timed(lambda: interpreted(function))
        lines.append(f"No compiler runs: the CPU engine interprets the program, whose code took {seconds}.")
        lines.append(f"Its tiles have {forward} logits forward, {backward} backward.")
    elif (found := compiler.find()) is None:
        lines.append(explained.reasons[0])
    else:
        version = ".".join(map(str, found.version))
        _, first = timed(lambda: compiled(function, hidden, head))
        _, second = timed(lambda: compiled(function, hidden, head))
        lines.append(f"NVRTC {version} compiled the kernels of both passes in {first}.")
        lines.append(f"A later process reads them from the cache on disk, here in {second}.")
    return "\n".join(lines)


def interpreted(function: Function) -> None:
    """Generates the bytecode of both passes for the CPU engine's interpreter."""
    forward_code(function.text, *function.counts)
    backward_code(function.text, *function.counts)


def compiled(function: Function, hidden: Tensor, head: Tensor) -> None:
    """Compiles the kernels of both passes, or reads them from the cache."""
    text, operands = function.text, (hidden, head, None, None)
    fold = _C.plan_statistics_fold(*operands, state_words=state_words(text))
    gradient = _C.plan_statistics_local_gradient(
        *operands,
        workspace=get_workspace(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    capability = torch.cuda.get_device_capability(hidden.device)
    given = text, function.counts, hidden.dtype
    kernels.compiled("fold", *given, fold.tier, capability, row_block=kernels.row_block_of(fold))
    kernels.compiled("gradient", *given, gradient.tier, capability)


# Beside torch and the built-in operators


def show_errors(hidden: Tensor, head: Tensor, token: Tensor, checked: int) -> str:
    """The largest errors of losses and gradients of the first tokens, beside torch's in float64."""
    hidden, head = hidden.detach()[:checked], head.detach()
    exact = loss_and_gradients("torch", hidden.double(), head.double(), token[:checked])
    names = ("torch", "token_stats")
    found = [loss_and_gradients(name, hidden, head, token[:checked]) for name in names]
    rows = [_row(f"largest error beside float64, {checked} tokens", *names)]
    for what, truth, *values in zip(
        ("loss", "gradient of hidden", "gradient of head"), exact, *found, strict=True
    ):
        errors = (float((value.double() - truth).abs().max() / truth.abs().max()) for value in values)
        rows.append(_row(f"  {what}", *(f"{error:.1e}" for error in errors)))
    return "\n".join(rows)


def loss_and_gradients(backend: str, hidden: Tensor, head: Tensor, token: Tensor) -> tuple[Tensor, ...]:
    """The tokens' losses, and the gradients of their sum with respect to hidden and head."""
    inputs = hidden.requires_grad_(), head.requires_grad_()
    loss = BACKENDS[backend](*inputs, token)
    return loss.detach(), *torch.autograd.grad(loss.sum(), inputs)


def times(scale: FoldScale, device: torch.device) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Seconds of a forward pass at the largest vocabulary, and of a step at each vocabulary."""
    forward: dict[str, float] = {}
    steps: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for vocabulary in scale.vocabularies:
        for name in BACKENDS:
            problem = policy_problem(backend=name, vocabulary=vocabulary, **_common(scale, device))
            steps[name].append(seconds_of(device, lambda p=problem: _step(p), scale.seconds))  # type: ignore[misc]
            with torch.no_grad():
                forward[name] = seconds_of(device, problem.forward, scale.seconds)
    return forward, steps


def _step(problem: Problem) -> None:
    torch.autograd.grad(problem.forward(), problem.inputs, problem.grad_output)


def _common(scale: FoldScale, device: torch.device) -> dict[str, Any]:
    return {
        "tokens": scale.tokens,
        "dim": scale.dim,
        "device": str(device),
        "dtype": dtype_name(scale.dtype),
    }


def peaks(scale: FoldScale, device: torch.device) -> Sweep:
    """The memory of a step at each vocabulary."""
    common = _common(scale, device)
    sizes = [common | {"vocabulary": vocabulary} for vocabulary in scale.vocabularies]
    build = f"{policy_problem.__module__}:{policy_problem.__name__}"
    measured = growth(build, BACKENDS, common | {"vocabulary": 16, "tokens": 16}, sizes)
    return Sweep("loss", "vocabulary", scale.vocabularies, measured)


def table(forward: dict[str, float], steps: dict[str, list[float]], memory: Sweep | None) -> str:
    """The table of times and memory at the largest vocabulary, a row for each implementation."""
    rows = [_row("", "forward", "step", *(["memory"] if memory else []))]
    for name in BACKENDS:
        cells = [f"{seconds * 1e3:.2f} ms" for seconds in (forward[name], steps[name][-1])]
        if memory:
            cells.append(f"{memory.growth[name][-1] / 2**20:.1f} MiB")
        rows.append(_row(name, *cells))
    rows.append("torch stores the logits; linear_log_probs is built in and computes the same as token_stats;")
    rows.append("linear_cross_entropy is built in too, and has no entropy. A step is forward and backward.")
    rows.append("memory: peak of a step, beyond inputs, outputs and gradients" if memory else UNMEASURED)
    return "\n".join(rows)


def _row(label: str, *values: str) -> str:
    return f"{label:40}" + "".join(f"{value:>16}" for value in values)


def save_plot(path: Path, scale: FoldScale, steps: dict[str, list[float]], memory: Sweep | None) -> None:
    """Times and memory of a step by vocabulary. Raises ImportError where matplotlib is not installed."""
    with panels(path, 2 if memory else 1) as (time_axes, *memory_axes):
        for name, seconds in steps.items():
            milliseconds = [each * 1e3 for each in seconds]
            time_axes.plot(scale.vocabularies, milliseconds, marker="o", label=name, **_STYLES[name])
        time_axes.set_xscale("log", base=2)
        time_axes.set(title="time of a step", xlabel="vocabulary", ylabel="ms")
        if memory:
            draw_memory(memory_axes[0], memory, _STYLES)


SCALES = {
    # Two cores need about half a minute.
    "cpu": FoldScale(
        tokens=512,
        dim=128,
        vocabularies=[2048, 8192, 32768],
        dtype=torch.float32,
        checked=64,
        seconds=0.3,
    ),
    # The width and the vocabulary of a Llama's head.
    "cuda": FoldScale(
        tokens=4096,
        dim=4096,
        vocabularies=[8192, 32768, 128256],
        dtype=torch.bfloat16,
        checked=128,
        seconds=0.5,
    ),
}
