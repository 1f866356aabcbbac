"""The MLP's forward pass of few rows on tensor cores: hidden units come in splits."""

from __future__ import annotations

import pytest
import torch
from calls import HALVES, check_captured, scaled_mlp_inputs
from mlp_calls import SPLIT_SIZES, check, split_inputs
from specimens import name_of

import monoidreduce as mr
from monoidreduce._ops.mlp import ACTIVATIONS

pytestmark = pytest.mark.tiers("sm80", "sm90")


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", SPLIT_SIZES)
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


@pytest.mark.parametrize("size", SPLIT_SIZES)
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
    plan = mr._C.plan_mlp_forward(x, w1, w2)
    needed = plan.scratch
    for elements in (0, needed - 1):
        scratch = torch.empty(elements, device=gpu)
        with pytest.raises(ValueError, match=f"scratch: expected {needed} elements, got {elements}"):
            mr._C.mlp_forward(
                x, w1, w2, None, None, out, scratch, activation=0, workspace=0, threads=1, stream=0, plan=plan
            )


@pytest.mark.parametrize("width", (8, 64, 128, 256))
@pytest.mark.parametrize("rows", (1, 64, 100, 1000, 4000, 8000, 20000))
def test_partial_sums_are_small(rows: int, width: int, gpu: torch.device) -> None:
    place = {"dtype": torch.bfloat16, "device": gpu}
    x, w1, w2 = (torch.empty(shape, **place) for shape in ((rows, width), (65536, width), (width, 65536)))
    assert 4 * mr._C.plan_mlp_forward(x, w1, w2).scratch <= 32 << 20
