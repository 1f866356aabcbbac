"""The MLP on tensor cores: every size, activation, bias and dtype that they cover."""

from __future__ import annotations

import pytest
import torch
from calls import HALVES, assert_same_bits, results, scaled_mlp_inputs, upstreams
from mlp_calls import PADDED_SIZES, SIZES, check, inputs_of, many_rows
from specimens import Specimen, mlp_inputs, name_of
from tolerance import check_operator

import monoidreduce as mr
from monoidreduce._ops.mlp import ACTIVATIONS

pytestmark = pytest.mark.tiers("sm80", "sm90")


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, biases: bool, dtype: torch.dtype, gpu: torch.device, tier: str) -> None:
    check(inputs_of(size, dtype, gpu, biases), "gelu_tanh", tier, tier)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype, gpu: torch.device, tier: str) -> None:
    check(inputs_of("ragged", dtype, gpu, biases=True), activation, tier, tier)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("activation", ("gelu_tanh", "sigmoid"))  # of 0: 0, and not 0
@pytest.mark.parametrize("size", PADDED_SIZES)
def test_padded_sizes(
    size: str, activation: str, biases: bool, dtype: torch.dtype, tier: str, gpu: torch.device
) -> None:
    check(scaled_mlp_inputs(PADDED_SIZES[size], dtype, gpu, biases), activation, forward=tier, backward=tier)


def test_padded_sizes_in_the_deterministic_mode(tier: str, gpu: torch.device, deterministic: None) -> None:
    inputs = scaled_mlp_inputs(PADDED_SIZES["odd"], torch.bfloat16, gpu, biases=True)
    check(inputs, "silu", forward=tier, backward="sm90/deterministic" if tier == "sm90" else tier)


OTHER_WIDTHS = ((64, 64), (192, 192), (256, 256), (64, 192))


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("widths", OTHER_WIDTHS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_other_widths(
    activation: str, widths: tuple[int, int], dtype: torch.dtype, tier: str, gpu: torch.device
) -> None:
    """Which kernels an activation has of its own depends on the width."""
    inputs = scaled_mlp_inputs((301, 1000, *widths), dtype, gpu, biases=True)
    check(inputs, activation, forward=tier, backward=tier)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("widths", (*OTHER_WIDTHS, (128, 128)), ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_in_the_deterministic_mode(
    activation: str,
    widths: tuple[int, int],
    dtype: torch.dtype,
    tier: str,
    gpu: torch.device,
    deterministic: None,
) -> None:
    """A pass for the rows' gradient on Hopper, elsewhere products of local gradients."""
    inputs = scaled_mlp_inputs((301, 1000, *widths), dtype, gpu, biases=True)
    check(inputs, activation, forward=tier, backward="sm90/deterministic" if tier == "sm90" else tier)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", (64, 128, 256))
def test_many_rows(width: int, activation: str, dtype: torch.dtype, gpu: torch.device, tier: str) -> None:
    """Enough of them for every multiprocessor: hidden units are not split (test_mlp_split.py)."""
    inputs = many_rows(width, dtype, gpu)
    assert "few rows" not in str(mr.explain("mlp", inputs["x"], inputs["w1"], inputs["w2"]))
    check(inputs, activation, tier, tier)


def test_views(gpu: torch.device, tier: str) -> None:
    """Leading axes, transposed weights: copied where TMA cannot read them, on sm_80 where they have gaps."""
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    inputs["x"] = inputs["x"][:300].reshape(3, 100, 128)
    inputs["w1"] = inputs["w1"].t().contiguous().t()
    inputs["w2"] = inputs["w2"].t().contiguous().t()
    check(inputs, "silu", tier, tier)


@pytest.mark.parametrize("name", ("x", "w1", "w2", "bias1"))
def test_some_gradients(name: str, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu, biases=True)
    check_operator("mlp", inputs, {"activation": "gelu"}, differentiate=[name])


def test_non_finite_inputs(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    inputs["x"][17, 3] = torch.nan
    out = mr.mlp(**inputs)
    assert out[17].isnan().all() and out[torch.arange(301, device=gpu) != 17].isfinite().all()


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("size", SIZES)
def test_deterministic_mode(size: str, gpu: torch.device, deterministic: None) -> None:
    """As accurate, on its own kernels, with the same bits in every run."""
    inputs = inputs_of(size, torch.bfloat16, gpu, biases=True)
    check(inputs, "gelu_tanh", "sm90", "sm90/deterministic")
    call = Specimen("mlp", "mlp", mlp_inputs, options={"activation": "gelu_tanh"})
    grads = upstreams(call, inputs)
    assert_same_bits(results(call, inputs, grads), results(call, inputs, grads))
    explained = mr.explain("mlp", inputs["x"], inputs["w1"], inputs["w2"])
    assert explained.backward == "mlp_backward/cuda/sm90/deterministic/bfloat16"
