"""MLPs with a gate on a GPU: torch multiplies, and one kernel is between the products."""

from __future__ import annotations

import pytest
import torch
from calls import HALVES, assert_same_bits, check_captured, peak, reset_peak, results, upstreams
from paths import takes
from specimens import DTYPES, LAYOUTS, Inputs, Specimen, mlp_inputs, name_of
from tolerance import check_operator

import monoidreduce as mr
from monoidreduce._ops.mlp import ACTIVATIONS

SIZES = {  # rows, width, hidden, outputs
    "one_of_each": (1, 1, 1, 1),
    "one_row": (1, 64, 520, 64),
    "odd": (77, 59, 1003, 7),  # whose last vector of eight elements is not whole
    "narrow": (301, 8, 1000, 24),
    "wide": (200, 2056, 456, 1032),
    "many_rows": (3000, 264, 72, 264),
    "large": (2304, 2048, 328, 264),  # a product of the gradient of x fills a GPU, and is rounded by itself
}
BIASES = {"bias1": True, "gate_bias": True, "bias2": True}


def gated_inputs(size: str, dtype: torch.dtype, gpu: torch.device, biases: bool = True) -> Inputs:
    inputs = mlp_inputs(*SIZES[size], gate=True, dtype=dtype, device=gpu, **(BIASES if biases else {}))
    inputs["w2"] = inputs["w2"] / SIZES[size][2] ** 0.5
    return inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, biases: bool, dtype: torch.dtype, gpu: torch.device) -> None:
    inputs = gated_inputs(size, dtype, gpu, biases)
    paths = {f"mlp_{way}/cuda/simt/{name_of(dtype)}" for way in ("forward", "backward")}
    with takes(paths):
        check_operator("mlp", inputs, {"activation": "silu"})
    explanation = mr.explain("mlp", **inputs)
    assert {explanation.forward, explanation.backward} == paths


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype, gpu: torch.device) -> None:
    check_operator("mlp", gated_inputs("odd", dtype, gpu), {"activation": activation})


@pytest.mark.parametrize("dtype", (torch.float32, *HALVES), ids=name_of)
@pytest.mark.parametrize("size", ("wide", "many_rows"))
def test_parts(size: str, dtype: torch.dtype, gpu: torch.device) -> None:
    """Without a workspace parts have 128 rows or hidden units, and sums of them are not rounded."""
    with mr.workspace(0):
        check_operator("mlp", gated_inputs(size, dtype, gpu), {"activation": "gelu"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, gpu: torch.device) -> None:
    inputs = gated_inputs("wide", torch.bfloat16, gpu)
    check_operator("mlp", {name: LAYOUTS[layout](t) for name, t in inputs.items()}, {"activation": "silu"})


def test_tf32_only_where_torch_allows_it(tf32: None, gpu: torch.device) -> None:
    inputs = gated_inputs("wide", torch.float32, gpu)
    rounded = mr.mlp(**inputs, activation="silu")
    torch.backends.cuda.matmul.allow_tf32 = False
    assert not torch.equal(mr.mlp(**inputs, activation="silu"), rounded)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
def test_same_bits_again(dtype: torch.dtype, gpu: torch.device, deterministic: None) -> None:
    specimen = Specimen("gated", "mlp", gated_inputs, options={"activation": "silu"})
    inputs = gated_inputs("wide", dtype, gpu)
    grads = upstreams(specimen, inputs)
    assert_same_bits(results(specimen, inputs, grads), results(specimen, inputs, grads))


@pytest.mark.parametrize("workspace", (0, 352 << 20))
def test_captured_in_a_graph(workspace: int, gpu: torch.device) -> None:
    inputs = {name: t.requires_grad_() for name, t in gated_inputs("wide", torch.bfloat16, gpu).items()}

    def step() -> tuple[torch.Tensor, ...]:
        with mr.workspace(workspace):
            out = mr.mlp(**inputs, activation="silu")
            return (out.detach(), *torch.autograd.grad(out.float().square().sum(), list(inputs.values())))

    check_captured(step)


def test_memory_is_bounded_by_the_workspace(gpu: torch.device) -> None:
    """Beyond inputs, results and gradients: hidden values, and in float32 the gradient of x."""
    rows, width, hidden, workspace = 4096, 512, 8192, 16 << 20
    given = mlp_inputs(rows, width, hidden, width, gate=True, dtype=torch.bfloat16, device=gpu)
    inputs = {name: t.requires_grad_() for name, t in given.items()}
    upstream = torch.randn(rows, width, dtype=torch.bfloat16, device=gpu)

    def step() -> tuple[torch.Tensor, ...]:
        with mr.workspace(workspace):
            out = mr.mlp(**inputs, activation="silu")
            return (out, *torch.autograd.grad(out, list(inputs.values()), upstream))

    step()
    before = reset_peak()
    found = step()
    kept = sum(t.numel() * t.element_size() for t in found)
    largest_product_apart = 4 << 22  # a product of few elements is summed in float32 first
    assert peak() - before <= kept + workspace + 4 * rows * width + largest_product_apart + (8 << 20)
