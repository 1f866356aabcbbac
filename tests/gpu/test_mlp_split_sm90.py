"""The MLP's forward pass of few rows, whose hidden units come in splits, on Hopper."""

from __future__ import annotations

import re

import pytest
import torch
from calls import HALVES, check_captured, scaled_mlp_inputs
from specimens import Inputs, name_of
from test_mlp_sm90 import check

import monoidreduce as mr
from monoidreduce.ops import ACTIVATIONS

SIZES = {  # rows, hidden, width in, width out
    "one_row": (1, 16384, 128, 128),
    "one_tile": (64, 5000, 64, 64),
    "ragged": (129, 9000, 128, 120),
    "narrow": (77, 4104, 8, 24),
    "unequal": (300, 5064, 40, 104),
    "three_slabs": (100, 6000, 192, 136),
    "wide": (200, 5008, 256, 200),
    "long": (1000, 16384, 64, 64),
}


def splits(inputs: Inputs) -> int | None:
    """In how many splits explain says that hidden units are; None where rows are not few."""
    explanation = mr.explain("mlp", *(inputs[name] for name in ("x", "w1", "w2")))
    (reason,) = (reason for reason in explanation.reasons if reason.startswith("forward: "))
    found = re.search(r"few rows: tiles of \d+ rows, hidden units (?:in (\d+) splits|not split)$", reason)
    return int(found[1] or 1) if found else None


def split_inputs(
    size: str, gpu: torch.device, dtype: torch.dtype = torch.bfloat16, biases: bool = True
) -> Inputs:
    inputs = scaled_mlp_inputs(SIZES[size], dtype, gpu, biases)
    assert (splits(inputs) or 1) > 1
    return inputs


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, biases: bool, dtype: torch.dtype, gpu: torch.device, tier: str) -> None:
    check(split_inputs(size, gpu, dtype, biases), "gelu_tanh", tier, tier)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype, gpu: torch.device, tier: str) -> None:
    check(split_inputs("ragged", gpu, dtype), activation, tier, tier)


@pytest.mark.parametrize("hidden", (8, 72, 136, 520, 1032, 2056, 4104, 20008))
def test_units(hidden: int, gpu: torch.device, tier: str) -> None:
    """Any number of splits, from none on; the last of them may have fewer units."""
    check(scaled_mlp_inputs((70, hidden, 128, 128), torch.bfloat16, gpu, True), "silu", tier, tier)


@pytest.mark.parametrize("size", SIZES)
def test_bits_are_reproducible(size: str, gpu: torch.device) -> None:
    inputs = split_inputs(size, gpu)
    first = mr.mlp(**inputs, activation="gelu_tanh")
    for _ in range(5):
        assert torch.equal(mr.mlp(**inputs, activation="gelu_tanh"), first)


@pytest.mark.parametrize("row", (0, 63, 64, 128))
def test_non_finite_inputs(row: int, gpu: torch.device) -> None:
    inputs = split_inputs("ragged", gpu)
    inputs["x"][row, 3] = torch.nan
    out = mr.mlp(**inputs)
    assert out[row].isnan().all() and out[torch.arange(129, device=gpu) != row].isfinite().all()


@pytest.mark.parametrize("unit", (0, 4500, 8999))
def test_an_infinite_unit(unit: int, gpu: torch.device) -> None:
    """It reaches every row, through one split."""
    inputs = split_inputs("ragged", gpu)
    inputs["bias1"][unit] = torch.inf
    inputs["w2"][:, unit] = 1.0
    assert (mr.mlp(**inputs, activation="relu") == torch.inf).all()


def test_graph_capture(gpu: torch.device) -> None:
    inputs = split_inputs("ragged", gpu)
    check_captured(lambda: (mr.mlp(**inputs),))


def test_scratch_that_is_too_small_is_refused(gpu: torch.device) -> None:
    x, w1, w2 = split_inputs("ragged", gpu, biases=False).values()
    out = x.new_empty(x.shape[0], w2.shape[0])
    _, _, needed, *_ = _forward_tier(x, w1, w2)
    for elements in (0, needed - 1):
        scratch = torch.empty(elements, device=gpu)
        with pytest.raises(ValueError, match=f"scratch: expected {needed} elements, got {elements}"):
            mr._C.mlp_forward(x, w1, w2, None, None, out, scratch, activation=0, threads=1, stream=0)


@pytest.mark.parametrize("width", (8, 64, 128, 256))
@pytest.mark.parametrize("rows", (1, 64, 100, 1000, 4000, 8000, 20000))
def test_partial_sums_are_small(rows: int, width: int, gpu: torch.device) -> None:
    place = {"dtype": torch.bfloat16, "device": gpu}
    x, w1, w2 = (torch.empty(shape, **place) for shape in ((rows, width), (65536, width), (width, 65536)))
    _, _, elements, *_ = _forward_tier(x, w1, w2)
    assert 4 * elements <= 32 << 20


def _forward_tier(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> tuple[object, ...]:
    found: tuple[object, ...] = mr._C.mlp_forward_tier(
        x, w1, w2, None, workspace=0, tf32=False, deterministic=False
    )
    return found
