"""The MLP's deterministic backward pass on Hopper: one kernel for the rows' gradient, one for the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from calls import HALVES, assert_same_bits, check_captured, results, scaled_mlp_inputs, upstreams
from mlp_calls import check
from specimens import Specimen, mlp_inputs, name_of

import monoidreduce as mr
from monoidreduce._ops.mlp import ACTIVATIONS

SIZES = {  # rows, hidden, width in, width out
    "one_row": (1, 3000, 128, 128),
    "few_rows": (100, 20000, 128, 128),  # two rounds of blocks
    "few_narrow_rows": (200, 9000, 64, 64),
    "long": (1000, 16384, 128, 120),
    "narrow": (777, 8008, 24, 8),
    "few_units": (3001, 1000, 64, 64),
    "unequal": (4000, 3000, 104, 40),
    "rounds": (3000, 20000, 64, 64),
}
CALL = Specimen("mlp", "mlp", mlp_inputs, options={"activation": "gelu_tanh"})

pytestmark = [pytest.mark.tiers("sm90"), pytest.mark.usefixtures("deterministic")]


@pytest.fixture(autouse=True)
def no_parts() -> Iterator[None]:
    """Without a workspace these kernels take few rows of many units too (test_mlp_parts.py)."""
    with mr.workspace(0):
        yield


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, biases: bool, dtype: torch.dtype, gpu: torch.device) -> None:
    inputs = scaled_mlp_inputs(SIZES[size], dtype, gpu, biases)
    check(inputs, "gelu_tanh", "sm90", "sm90/deterministic")
    grads = upstreams(CALL, inputs)
    first = results(CALL, inputs, grads)
    for _ in range(5):
        assert_same_bits(results(CALL, inputs, grads), first)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype, gpu: torch.device) -> None:
    check(scaled_mlp_inputs(SIZES["long"], dtype, gpu, True), activation, "sm90", "sm90/deterministic")


@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize("rows", (1, 63, 64, 65, 127, 128, 129, 255, 257, 511, 640))
def test_rows(rows: int, width: int, gpu: torch.device) -> None:
    """The last tile may have rows beyond the end, and each block has few tiles."""
    check(
        scaled_mlp_inputs((rows, 1000, width, width), torch.bfloat16, gpu),
        "silu",
        "sm90",
        "sm90/deterministic",
    )


@pytest.mark.parametrize("hidden", (8, 120, 128, 136, 256, 264, 16896, 17024))
def test_units(hidden: int, gpu: torch.device) -> None:
    """One block, a last one with units beyond the end, as many as there are multiprocessors, and one more."""
    check(
        scaled_mlp_inputs((700, hidden, 128, 128), torch.bfloat16, gpu, True),
        "gelu",
        "sm90",
        "sm90/deterministic",
    )


@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize("rows", (9000, 16384, 33000, 70000))
def test_many_rows(rows: int, width: int, gpu: torch.device) -> None:
    """More blocks of rows than run at a time."""
    inputs = scaled_mlp_inputs((rows, 6000, width, width), torch.bfloat16, gpu)
    grads = upstreams(CALL, inputs)
    first = results(CALL, inputs, grads)
    for _ in range(3):
        assert_same_bits(results(CALL, inputs, grads), first)
    torch.use_deterministic_algorithms(False)
    for name, expected in results(CALL, inputs, grads).items():
        largest = float(expected.abs().max())
        torch.testing.assert_close(first[name], expected, rtol=2e-2, atol=1e-2 * largest)


def test_graph_capture(gpu: torch.device) -> None:
    inputs = scaled_mlp_inputs(SIZES["long"], torch.bfloat16, gpu, True)
    grads = upstreams(CALL, inputs)
    check_captured(lambda: tuple(results(CALL, inputs, grads).values()))


def test_some_gradients(gpu: torch.device) -> None:
    """Those that are not wanted are computed with the others."""
    inputs = scaled_mlp_inputs(SIZES["long"], torch.bfloat16, gpu, True)
    grads = upstreams(CALL, inputs)
    together = results(CALL, inputs, grads)
    for name in inputs:
        leaf = inputs[name].detach().requires_grad_()
        out = mr.mlp(**{**inputs, name: leaf}, **CALL.options)
        assert torch.equal(torch.autograd.grad(out, leaf, grads[0])[0], together[f"d_{name}"])


def test_non_finite_inputs(gpu: torch.device) -> None:
    """They reach the gradient of their row, and of no other."""
    inputs = scaled_mlp_inputs(SIZES["long"], torch.bfloat16, gpu)
    inputs["x"][517, 3] = torch.nan
    dx = results(CALL, inputs, upstreams(CALL, inputs))["d_x"]
    assert dx[517].isnan().all() and dx[torch.arange(1000, device=gpu) != 517].isfinite().all()
