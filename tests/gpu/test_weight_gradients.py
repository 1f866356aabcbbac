"""Gradients of weights summed in float32, on every tier: kept and recomputed dlogits, padding, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import HALVES, check_captured, peak, reset_peak
from specimens import Inputs, cross_entropy_inputs, distillation_inputs, name_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from weight_sums import OPERATORS, ROUTES, called, check_sums, summed

import monoidreduce as mr

pytestmark = pytest.mark.tiers("simt", "sm80", "sm90")

SIZES: dict[str, tuple[int, int, int]] = {  # rows, classes, width
    "narrow": (257, 67, 8),
    "ragged": (513, 1111, 200),
    "odd_width": (300, 1111, 101),
    "many_rows": (3000, 515, 72),
}
# Bytes for dlogits of the last tile of classes alone, of some of them, and of all.
WORKSPACES = {"least": 0, "some": 600 << 10, "all": 128 << 20}


def inputs_of(operator: str, size: str, dtype: torch.dtype, gpu: torch.device) -> Inputs:
    rows, classes, width = SIZES[size]
    if operator == "linear_distillation":
        return distillation_inputs(rows, classes, width, 64, dtype=dtype, device=gpu)
    return cross_entropy_inputs(rows, classes, width, dtype=dtype, device=gpu)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("workspace", WORKSPACES.values(), ids=WORKSPACES)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_accuracy(
    operator: str, size: str, route: str, workspace: int, dtype: torch.dtype, tier: str, gpu: torch.device
) -> None:
    check_sums(operator, route, lambda: inputs_of(operator, size, dtype, gpu), draws=2, workspace=workspace)


@pytest.mark.parametrize("ignored", (0.0, 0.9, 1.0))
@pytest.mark.parametrize("route", ROUTES)
def test_ignored_tokens(route: str, ignored: float, gpu: torch.device) -> None:
    """They may hold NaN. If all tokens are ignored, nothing is added."""
    inputs = cross_entropy_inputs(1000, 1111, 200, dtype=torch.bfloat16, device=gpu, ignored=ignored)
    inputs["x"][inputs["target"] == -100] = torch.nan
    found = summed("linear_cross_entropy", route, inputs)
    kept = inputs["target"] != -100
    rest = inputs | {"x": inputs["x"][kept], "target": inputs["target"][kept]}
    expected = summed("linear_cross_entropy", route, rest) if kept.any() else torch.zeros_like(found)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("offset", (0, 1, 4))
@pytest.mark.parametrize("width", (200, 101, 104))
def test_adds_in_any_memory(width: int, offset: int, gpu: torch.device) -> None:
    """Contiguous memory that TMA cannot write, as a part of a larger buffer may be."""
    inputs = cross_entropy_inputs(300, 1111, width, dtype=torch.bfloat16, device=gpu)
    once = summed("linear_cross_entropy", "weight_grad", inputs)
    memory = torch.randn(offset + once.numel() + 8, device=gpu)
    before = memory.clone()
    sums = memory[offset : offset + once.numel()].view(once.shape)
    weight = inputs["weight"].clone().requires_grad_()
    for _ in range(2):
        called("linear_cross_entropy", inputs | {"weight": weight}, weight_grad=sums).backward()
    expected = before.clone()
    expected[offset : offset + once.numel()] += 2 * once.view(-1)
    torch.testing.assert_close(memory, expected, rtol=1e-4, atol=1e-4)
    outside = torch.ones_like(memory, dtype=torch.bool)
    outside[offset : offset + once.numel()] = False
    assert torch.equal(memory[outside], before[outside])


def test_upstream_gradients_of_tokens(gpu: torch.device) -> None:
    """They differ between tokens, and a loss may be scaled by 2^10, in float16 too."""
    for dtype in HALVES:
        inputs = cross_entropy_inputs(513, 1111, 200, dtype=dtype, device=gpu)
        upstream = 1024 * torch.rand(513, device=gpu)
        master = inputs["weight"].float().requires_grad_()
        weight, sums = inputs["weight"].clone().requires_grad_(), torch.zeros(1111, 200, device=gpu)
        losses = mr.linear_cross_entropy(
            inputs["x"], weight, inputs["target"], reduction="none", weight_grad=sums
        )
        losses.backward(upstream)
        wide = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
        exact = wide["weight"].requires_grad_()
        mr.linear_cross_entropy(**wide | {"weight": exact}, reduction="none").backward(upstream.double())
        with torch.autocast("cuda", dtype):
            mr.linear_cross_entropy(inputs["x"], master, inputs["target"], reduction="none").backward(
                upstream
            )
        assert exact.grad is not None and master.grad is not None
        for found in (sums, master.grad):
            error = (found.double() - exact.grad).norm() / exact.grad.norm()
            assert error < (4e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("workspace", (0, 8 << 20))
def test_memory(workspace: int, tier: str, gpu: torch.device) -> None:
    """No other tensor of the size of the weight is allocated, on tensor cores."""
    if tier == "simt":
        pytest.skip("SIMT kernels add to it in any case")
    rows, classes, width = 1024, 40000, 512
    inputs = cross_entropy_inputs(rows, classes, width, dtype=torch.bfloat16, device=gpu)
    x, weight = (inputs[name].requires_grad_() for name in ("x", "weight"))
    sums = torch.zeros(classes, width, device=gpu)

    def step() -> None:
        mr.linear_cross_entropy(x, weight, inputs["target"], weight_grad=sums, workspace=workspace).backward()

    step()
    x.grad = None
    before = reset_peak()
    step()
    assert peak() - before < max(workspace, rows * width * 2) + 12 * rows * width + (4 << 20)


def test_captured(tier: str, gpu: torch.device) -> None:
    """Each replay of a CUDA graph adds once more."""
    if tier == "simt":
        pytest.skip("SIMT kernels add in any order")
    inputs = cross_entropy_inputs(513, 1111, 200, dtype=torch.bfloat16, device=gpu)
    weight = inputs["weight"].clone().requires_grad_()
    sums = torch.zeros(1111, 200, device=gpu)

    def step() -> tuple[Tensor, ...]:
        sums.zero_()
        called("linear_cross_entropy", inputs | {"weight": weight}, weight_grad=sums).backward()
        return (sums.clone(),)

    check_captured(step)


def test_deterministic(gpu: torch.device) -> None:
    inputs = cross_entropy_inputs(3000, 1111, 200, dtype=torch.bfloat16, device=gpu)
    torch.use_deterministic_algorithms(True)
    try:
        for route in ROUTES:
            first, *others = (summed("linear_cross_entropy", route, inputs) for _ in range(4))
            assert all(torch.equal(first, other) for other in others)
    finally:
        torch.use_deterministic_algorithms(False)


def test_bits_of_gradients_of_rows(gpu: torch.device) -> None:
    """They are those of a call whose weight gets its own gradient, if slices are the same."""
    inputs: dict[str, Any] = cross_entropy_inputs(300, 200, 64, dtype=torch.bfloat16, device=gpu)
    found = []
    for options in ({}, {"weight_grad": torch.zeros(200, 64, device=gpu)}):
        x, weight = (inputs[name].detach().clone().requires_grad_() for name in ("x", "weight"))
        mr.linear_cross_entropy(x, weight, inputs["target"], **options).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-4)


# A reduced loss of masters on Hopper: some tokens at a time


def masters(gpu: torch.device, rows: int, classes: int, width: int, **options: Any) -> Inputs:
    inputs = cross_entropy_inputs(rows, classes, width, dtype=torch.bfloat16, device=gpu, **options)
    return inputs | {"weight": inputs["weight"].float().requires_grad_(), "x": inputs["x"].requires_grad_()}


def step_of(inputs: Inputs, **options: Any) -> list[Tensor]:
    with torch.autocast("cuda", torch.bfloat16):
        loss = mr.linear_cross_entropy(**inputs, **options)
    return [loss.detach(), *torch.autograd.grad(loss, (inputs["x"], inputs["weight"]))]


class Names(TorchDispatchMode):
    """Names of the ops of this library that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "monoidreduce":
            self.names.append(func._schema.name.removeprefix("monoidreduce::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ignored", (0.0, 0.5, 1.0))
@pytest.mark.parametrize(
    "options", ({}, {"reduction": "sum"}, {"z_loss": 1e-3, "label_smoothing": 0.1}), ids=str
)
@pytest.mark.parametrize("sizes", ((2000, 1111, 200), (2049, 3000, 72)))
def test_tokens_in_parts(
    sizes: tuple[int, int, int], options: dict[str, Any], ignored: float, tier: str, gpu: torch.device
) -> None:
    """The same gradients as of all tokens at once, by this op on Hopper alone."""
    inputs = masters(gpu, *sizes, ignored=ignored)
    with torch.no_grad():
        inputs["x"][inputs["target"] == -100] = torch.nan if tier == "sm90" else 1.0
    with Names() as called_ops:
        found = step_of(inputs, workspace=2 * 800 * sizes[1], **options)
    parts = "linear_cross_entropy_parts" in called_ops.names
    assert parts == (tier == "sm90")
    expected = step_of(inputs, workspace=128 << 20, **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.isfinite().all()
        assert (ours - theirs).float().norm() <= 8e-3 * theirs.float().norm()


@pytest.mark.parametrize("operator", ("linear_cross_entropy", "linear_distillation"))
def test_parts_against_float64(operator: str, tier: str, gpu: torch.device) -> None:
    if tier != "sm90":
        pytest.skip("only kernels for Hopper take parts of tokens")

    def draw() -> Inputs:
        if operator == "linear_distillation":
            return distillation_inputs(2048, 1111, 200, 64, dtype=torch.bfloat16, device=gpu)
        return cross_entropy_inputs(2048, 1111, 200, dtype=torch.bfloat16, device=gpu)

    with Names() as called_ops:
        check_sums(operator, "master", draw, draws=3, workspace=2 * 1700 * 1111)
    assert f"{operator}_parts" in called_ops.names


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("loss", ("cross_entropy", "forward_kl"))
def test_distillation_in_parts(loss: str, masked: bool, tier: str, gpu: torch.device) -> None:
    """The same gradients as of all tokens at once."""
    inputs = distillation_inputs(2000, 1111, 200, 64, dtype=torch.bfloat16, device=gpu, mask=masked)
    leaves = inputs["x"].requires_grad_(), inputs["weight"].float().requires_grad_()
    given = inputs | {"weight": leaves[1]}
    found = []
    for workspace in (2 * 1700 * 1111, 128 << 20):
        with torch.autocast("cuda", torch.bfloat16), Names() as called_ops:
            result = mr.linear_distillation(**given, loss=loss, temperature=1.7, workspace=workspace)
        in_parts = "linear_distillation_parts" in called_ops.names
        assert in_parts == (tier == "sm90" and workspace < 128 << 20)
        found.append([result.detach(), *torch.autograd.grad(result, leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and ours.isfinite().all()
        assert (ours - theirs).float().norm() <= 8e-3 * theirs.float().norm()


@pytest.mark.parametrize("factor", (1.0, 0.25, 3.0))
def test_upstream_gradients_of_parts(factor: float, tier: str, gpu: torch.device) -> None:
    """The backward pass multiplies gradients of the forward pass; twice if the graph is retained.

    Kernels of other tiers multiply dlogits, which they then round.
    """
    inputs = masters(gpu, 2000, 1111, 200)
    once = step_of(inputs, workspace=2 * 800 * 1111)[1:]
    with torch.autocast("cuda", torch.bfloat16):
        loss = mr.linear_cross_entropy(**inputs, workspace=2 * 800 * 1111)
    leaves = (inputs["x"], inputs["weight"])
    first = torch.autograd.grad(factor * loss, leaves, retain_graph=True)
    second = torch.autograd.grad(factor * loss, leaves)
    for a, b, c in zip(first, second, once, strict=True):
        torch.testing.assert_close(a, b)
        if tier == "sm90":
            torch.testing.assert_close(a.float(), factor * c.float(), rtol=1e-2, atol=1e-5)


def test_memory_of_parts(tier: str, gpu: torch.device) -> None:
    """The gradient, the workspace, and a 16-bit copy of the weight while the forward pass runs."""
    if tier != "sm90":
        pytest.skip("only kernels for Hopper take parts of tokens")
    rows, classes, width = 4096, 40000, 512
    inputs, workspace = masters(gpu, rows, classes, width), 128 << 20
    weight = inputs["weight"]

    def step() -> tuple[int, int]:
        """Peak bytes of the forward pass, and of the backward pass beyond what it begins with."""
        inputs["x"].grad = weight.grad = None
        before = reset_peak()
        with torch.autocast("cuda", torch.bfloat16):
            loss = mr.linear_cross_entropy(**inputs, workspace=workspace)
        of_forward, before = peak() - before, reset_peak()
        loss.backward()
        return of_forward, peak() - before

    step()
    of_forward, of_backward = step()
    gradients, of_rows = 4 * classes * width + 2 * rows * width, 4 * rows * width
    assert of_forward < gradients + workspace + 2 * classes * width + of_rows + (8 << 20)
    assert of_backward < gradients // 4  # they are multiplied, and given to autograd, where they are


def test_parts_captured(tier: str, gpu: torch.device) -> None:
    if tier != "sm90":
        pytest.skip("only kernels for Hopper take parts of tokens")
    inputs = masters(gpu, 2000, 1111, 200)
    check_captured(lambda: tuple(step_of(inputs, workspace=2 * 800 * 1111)))
