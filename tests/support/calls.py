"""Calls of every operator on a GPU, forward and backward, for tests that compare two runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from paths import takes, tensor_core_paths
from specimens import Inputs, Specimen, normal
from tolerance import as_outputs, check_operator, content
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import monoidreduce as mr

HALVES = (torch.bfloat16, torch.float16)


def scaled_mlp_inputs(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, gpu: torch.device, biases: bool = False
) -> Inputs:
    """x, w1, w2 and biases, scaled so that hidden values and outputs are of unit size.

    sizes: (rows, hidden, width, outputs).
    """
    rows, hidden, wide_in, wide_out = sizes
    place = {"dtype": dtype, "device": gpu}
    inputs = {
        "x": normal(rows, wide_in, **place),
        "w1": normal(hidden, wide_in, **place) / wide_in**0.5,
        "w2": normal(wide_out, hidden, **place) / hidden**0.5,
    }
    if biases:
        inputs |= {"bias1": normal(hidden, **place), "bias2": normal(wide_out, **place)}
    return inputs


def upstreams(specimen: Specimen, inputs: Inputs) -> list[Tensor]:
    """Random upstream gradients for the outputs of the call."""
    outputs = as_outputs(getattr(mr, specimen.operator)(**inputs, **specimen.options))
    return [torch.randn_like(y) for y in outputs]


def results(specimen: Specimen, inputs: Inputs, grads: list[Tensor]) -> dict[str, Tensor]:
    """The outputs and the gradients of all floating-point inputs; zeros where the call gives no gradient."""
    leaves = {name: t.detach().requires_grad_() if t.is_floating_point() else t for name, t in inputs.items()}
    outputs = as_outputs(getattr(mr, specimen.operator)(**leaves, **specimen.options))
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    gradients = torch.autograd.grad(outputs, list(wanted.values()), grads, materialize_grads=True)
    named = {f"out{i}": y.detach() for i, y in enumerate(outputs)}
    return named | {f"d_{name}": g for name, g in zip(wanted, gradients, strict=True)}


def check_captured(step: Callable[[], tuple[Tensor, ...]]) -> None:
    """Assert that a step captured in a CUDA graph and replayed has the same bits as an eager step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        for result in captured:
            result.zero_()
        graph.replay()
        for result, wanted in zip(captured, expected, strict=True):
            assert torch.equal(result, wanted)


def check_replayed(step: Callable[[], tuple[Tensor, ...]], changes: Iterable[Callable[[], object]]) -> None:
    """Assert that one CUDA graph of a step has an eager step's bits after each change of its inputs."""
    check_captured(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for change in changes:
        change()
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert torch.equal(content(got), content(expected))


def graphed(specimen: Specimen, inputs: Inputs) -> Callable[..., Any]:
    """The call captured in two CUDA graphs, forward and backward. It takes tensors like the inputs."""
    differentiable = specimen.differentiable(inputs)
    static = [t.detach().clone().requires_grad_(name in differentiable) for name, t in inputs.items()]

    def call(*tensors: Tensor) -> Any:
        return getattr(mr, specimen.operator)(**dict(zip(inputs, tensors, strict=True)), **specimen.options)

    gc.collect()
    gc.disable()  # collecting a graph while another is captured invalidates the capture
    try:
        replay = torch.cuda.make_graphed_callables(call, tuple(static))
    finally:
        gc.enable()
    return lambda **arguments: replay(*(arguments[name] for name in inputs))


def check_replays(specimen: Specimen, dtype: torch.dtype, gpu: torch.device, tier: str) -> None:
    """Assert that a call captured in CUDA graphs keeps the rule of `tolerance.py` on other inputs too."""
    inputs = specimen.inputs(dtype, gpu)
    with takes(tensor_core_paths(specimen, inputs, tier)):
        function = graphed(specimen, inputs)
    for _ in range(2):
        others = specimen.inputs(dtype, gpu)
        differentiate = specimen.differentiable(others)
        with takes(set()):  # a replayed graph calls no operator, so nothing is counted
            check_operator(
                specimen.operator, others, specimen.options, differentiate=differentiate, function=function
            )


class Kept(TorchDispatchMode):
    """Records for how many classes each forward pass saved local gradients or weights, rounded up to 8."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.namespace == "monoidreduce" and "backward" not in str(func):
            self.classes.append(results[-1].shape[1])
        return results


def requested() -> int:
    """Requested bytes that tensors hold. (The allocator's blocks may be larger, by chance.)"""
    bytes: int = torch.cuda.memory_stats()["requested_bytes.all.current"]
    return bytes


def peak() -> int:
    """The peak of `requested` since `reset_peak`."""
    bytes: int = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return bytes


def reset_peak() -> int:
    """The bytes that tensors hold now; `peak` begins again."""
    # Autograd's thread may hold the last pass's gradients for a moment after the caller has them, but no
    # longer when it has run another pass.
    x = torch.zeros((), device="cuda", requires_grad=True)
    torch.autograd.grad(x.exp(), x)
    torch.cuda.reset_peak_memory_stats()
    return peak()


def assert_same_bits(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [name for name in got if not torch.equal(content(got[name]), content(expected[name]))]
    assert not different, f"other bits in {different}"
