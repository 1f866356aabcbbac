"""The MLP's deterministic backward pass on Hopper, where blocks take turns to add to the rows' gradient."""

from __future__ import annotations

import re

import pytest
import torch
from calls import HALVES, assert_same_bits, check_captured, results, scaled_mlp_inputs, upstreams
from specimens import Inputs, Specimen, mlp_inputs, name_of
from test_mlp_sm90 import check

import monoidreduce as mr
from monoidreduce.ops import ACTIVATIONS

SIZES = {  # rows, hidden, width in, width out
    "one_row": (1, 3000, 128, 128),
    "sums_of_each_block": (100, 20000, 128, 128),  # two rounds of blocks
    "groups_of_two": (200, 9000, 64, 64),
    "groups": (1000, 16384, 128, 120),
    "narrow": (777, 8008, 24, 8),
    "one_group": (3001, 1000, 64, 64),
    "unequal": (4000, 3000, 104, 40),
    "rounds": (3000, 20000, 64, 64),
}
CALL = Specimen("mlp", "mlp", mlp_inputs, options={"activation": "gelu_tanh"})

pytestmark = pytest.mark.usefixtures("deterministic")


def sums(inputs: Inputs) -> int:
    """In how many sums explain says that blocks add to the rows' gradient."""
    explanation = mr.explain("mlp", *(inputs[name] for name in ("x", "w1", "w2")))
    assert explanation.backward.startswith("mlp_backward/cuda/sm90/deterministic/")
    (reason,) = (reason for reason in explanation.reasons if reason.startswith("backward: "))
    found = re.search(r"blocks take turns to add to the rows' gradient, in (\d+) sums$", reason)
    assert found
    return int(found[1])


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, biases: bool, dtype: torch.dtype, gpu: torch.device) -> None:
    inputs = scaled_mlp_inputs(SIZES[size], dtype, gpu, biases)
    check(inputs, "gelu_tanh", backward="sm90/deterministic")
    grads = upstreams(CALL, inputs)
    first = results(CALL, inputs, grads)
    for _ in range(5):
        assert_same_bits(results(CALL, inputs, grads), first)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype, gpu: torch.device) -> None:
    check(scaled_mlp_inputs(SIZES["groups"], dtype, gpu, True), activation, backward="sm90/deterministic")


@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize("rows", (1, 63, 64, 65, 127, 128, 129, 255, 257, 511, 640))
def test_rows(rows: int, width: int, gpu: torch.device) -> None:
    """Tiles of which the last one has rows beyond the end, and few of them to each block."""
    check(
        scaled_mlp_inputs((rows, 1000, width, width), torch.bfloat16, gpu),
        "silu",
        backward="sm90/deterministic",
    )


@pytest.mark.parametrize("hidden", (8, 120, 128, 136, 256, 264, 16896, 17024))
def test_units(hidden: int, gpu: torch.device) -> None:
    """One block, a last one with units beyond the end, as many as there are multiprocessors, and one more."""
    check(
        scaled_mlp_inputs((700, hidden, 128, 128), torch.bfloat16, gpu, True),
        "gelu",
        backward="sm90/deterministic",
    )


@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize("rows", (9000, 16384, 33000, 70000))
def test_many_rows(rows: int, width: int, gpu: torch.device) -> None:
    """Two sums of them, or one where two would take more than 32 MiB."""
    inputs = scaled_mlp_inputs((rows, 6000, width, width), torch.bfloat16, gpu)
    assert sums(inputs) == (2 if 2 * rows * width <= 8 << 20 else 1)
    grads = upstreams(CALL, inputs)
    first = results(CALL, inputs, grads)
    for _ in range(3):
        assert_same_bits(results(CALL, inputs, grads), first)
    torch.use_deterministic_algorithms(False)
    for name, expected in results(CALL, inputs, grads).items():
        largest = float(expected.abs().max())
        torch.testing.assert_close(first[name], expected, rtol=2e-2, atol=1e-2 * largest)


def test_sums_are_small(gpu: torch.device) -> None:
    place = {"dtype": torch.bfloat16, "device": gpu}
    for rows in (1, 64, 100, 500, 1000, 3000, 6000, 12000, 16384, 30000, 40000, 100000):
        for width in (8, 64, 128):
            for hidden in (128, 5000, 16384, 17408, 32768):
                shapes = ((rows, width), (hidden, width), (width, hidden))
                x, w1, w2 = (torch.empty(shape, **place) for shape in shapes)
                _, _, elements, *_ = _backward_tier(x, w1, w2)
                assert 4 * elements <= 32 << 20, (rows, width, hidden)


def test_scratch_that_is_too_small_is_refused(gpu: torch.device) -> None:
    x, w1, w2 = scaled_mlp_inputs(SIZES["groups"], torch.bfloat16, gpu).values()
    grad = x.new_zeros(x.shape[0], w2.shape[0])
    _, _, needed, adds_rows, _ = _backward_tier(x, w1, w2)
    assert not adds_rows
    gradients = [torch.empty_like(t) for t in (x, w1, w2)]
    for elements in (0, needed - 1):
        scratch = torch.empty(elements, device=gpu)
        with pytest.raises(ValueError, match=f"scratch: expected {needed} elements, got {elements}"):
            mr._C.mlp_backward(
                grad,
                x,
                w1,
                w2,
                None,
                *gradients,
                None,
                scratch,
                activation=0,
                deterministic=True,
                threads=1,
                stream=0,
            )


def _backward_tier(*tensors: torch.Tensor) -> tuple[str, str, int, bool, tuple[int, int]]:
    found: tuple[str, str, int, bool, tuple[int, int]] = mr._C.mlp_backward_tier(
        *tensors, None, workspace=0, tf32=False, deterministic=True
    )
    return found


def test_streams_at_once(gpu: torch.device) -> None:
    """Blocks wait for blocks while another stream's kernels, whose blocks wait too, hold multiprocessors."""
    batches = [
        scaled_mlp_inputs(SIZES[size], torch.bfloat16, gpu, True) for size in ("groups", "rounds", "unequal")
    ]
    grads = [upstreams(CALL, inputs) for inputs in batches]
    expected = [results(CALL, *pair) for pair in zip(batches, grads, strict=True)]
    torch.cuda.synchronize()
    got: list[list[Inputs]] = []
    for pair in zip(batches, grads, strict=True):
        with torch.cuda.stream(torch.cuda.Stream()):
            got.append([results(CALL, *pair) for _ in range(20)])
    torch.cuda.synchronize()
    for runs, once in zip(got, expected, strict=True):
        for run in runs:
            assert_same_bits(run, once)


def test_graph_capture(gpu: torch.device) -> None:
    inputs = scaled_mlp_inputs(SIZES["groups"], torch.bfloat16, gpu, True)
    grads = upstreams(CALL, inputs)
    check_captured(lambda: tuple(results(CALL, inputs, grads).values()))


def test_some_gradients(gpu: torch.device) -> None:
    """Those that are not wanted are computed with the others."""
    inputs = scaled_mlp_inputs(SIZES["groups"], torch.bfloat16, gpu, True)
    grads = upstreams(CALL, inputs)
    together = results(CALL, inputs, grads)
    for name in inputs:
        leaf = inputs[name].detach().requires_grad_()
        out = mr.mlp(**{**inputs, name: leaf}, **CALL.options)
        assert torch.equal(torch.autograd.grad(out, leaf, grads[0])[0], together[f"d_{name}"])


def test_non_finite_inputs(gpu: torch.device) -> None:
    """They reach the gradient of their row, and of no other."""
    inputs = scaled_mlp_inputs(SIZES["groups"], torch.bfloat16, gpu)
    inputs["x"][517, 3] = torch.nan
    dx = results(CALL, inputs, upstreams(CALL, inputs))["d_x"]
    assert dx[517].isnan().all() and dx[torch.arange(1000, device=gpu) != 517].isfinite().all()
