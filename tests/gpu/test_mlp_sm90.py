"""The MLP on Hopper's tensor cores: every size, activation, bias and dtype that they cover."""

from __future__ import annotations

import pytest
import torch
from calls import HALVES, assert_same_bits, results, scaled_mlp_inputs, upstreams
from specimens import Inputs, Specimen, mlp_inputs, name_of
from tolerance import check_operator

import monoidreduce as mr
from monoidreduce.ops import ACTIVATIONS

SIZES = {  # rows, hidden, width in, width out
    "one_tile": (128, 128, 64, 64),
    "one_row": (1, 520, 64, 64),
    "ragged": (301, 1000, 128, 128),
    "narrow": (77, 264, 8, 24),
    "unequal": (140, 328, 104, 40),
    "long": (700, 3000, 128, 120),
    "three_slabs": (200, 456, 192, 136),
    "wide": (200, 456, 256, 200),
}


def inputs_of(size: str, dtype: torch.dtype, gpu: torch.device, biases: bool = False) -> Inputs:
    return scaled_mlp_inputs(SIZES[size], dtype, gpu, biases)


def many_rows(width: int, dtype: torch.dtype, gpu: torch.device) -> Inputs:
    """More than half of what three blocks of 128 rows a multiprocessor take."""
    rows = 192 * torch.cuda.get_device_properties(gpu).multi_processor_count + 1
    return scaled_mlp_inputs((rows, 264, width, width - 8), dtype, gpu, biases=True)


def check(inputs: Inputs, activation: str, forward: str = "sm90", backward: str = "sm90") -> None:
    before = mr._C.path_counts()
    check_operator("mlp", inputs, {"activation": activation})
    after = mr._C.path_counts()
    ran = {path for path, n in after.items() if n != before.get(path, 0)}
    dtype = name_of(inputs["x"].dtype)
    assert ran == {f"mlp_forward/cuda/{forward}/{dtype}", f"mlp_backward/cuda/{backward}/{dtype}"}


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, biases: bool, dtype: torch.dtype, gpu: torch.device) -> None:
    check(inputs_of(size, dtype, gpu, biases), "gelu_tanh")


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype, gpu: torch.device) -> None:
    check(inputs_of("ragged", dtype, gpu, biases=True), activation)


PADDED_SIZES = {  # sizes that are no multiple of 8, all of them or one
    "smallest": (301, 1, 1, 1),
    "odd": (301, 1003, 59, 100),
    "rows": (301, 1000, 59, 64),
    "units": (301, 67, 64, 64),
    "outputs": (301, 1000, 64, 7),
    "wide": (200, 457, 250, 193),
    "one_row": (1, 521, 7, 59),
    "few_rows": (77, 9001, 100, 59),
}


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
    """Enough of them for every multiprocessor: hidden units are not split (test_mlp_split_sm90.py)."""
    inputs = many_rows(width, dtype, gpu)
    assert "few rows" not in str(mr.explain("mlp", inputs["x"], inputs["w1"], inputs["w2"]))
    check(inputs, activation, tier, tier)


def test_views(gpu: torch.device) -> None:
    """Leading axes, transposed weights: copied where the copy engine cannot read them."""
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    inputs["x"] = inputs["x"][:300].reshape(3, 100, 128)
    inputs["w1"] = inputs["w1"].t().contiguous().t()
    inputs["w2"] = inputs["w2"].t().contiguous().t()
    check(inputs, "silu")


@pytest.mark.parametrize("name", ("x", "w1", "w2", "bias1"))
def test_some_gradients(name: str, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu, biases=True)
    check_operator("mlp", inputs, {"activation": "gelu"}, differentiate=[name])


def test_non_finite_inputs(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    inputs["x"][17, 3] = torch.nan
    out = mr.mlp(**inputs)
    assert out[17].isnan().all() and out[torch.arange(301, device=gpu) != 17].isfinite().all()


@pytest.mark.parametrize("size", SIZES)
def test_deterministic_mode(size: str, gpu: torch.device, deterministic: None) -> None:
    """As accurate, on its own kernels, with the same bits in every run."""
    inputs = inputs_of(size, torch.bfloat16, gpu, biases=True)
    check(inputs, "gelu_tanh", backward="sm90/deterministic")
    call = Specimen("mlp", "mlp", mlp_inputs, options={"activation": "gelu_tanh"})
    grads = upstreams(call, inputs)
    assert_same_bits(results(call, inputs, grads), results(call, inputs, grads))
    explained = mr.explain("mlp", inputs["x"], inputs["w1"], inputs["w2"])
    assert explained.backward == "mlp_backward/cuda/sm90/deterministic/bfloat16"
