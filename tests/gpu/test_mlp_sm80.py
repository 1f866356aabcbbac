"""The MLP on the tensor cores from sm_80 on, tested as Hopper's kernels are, and that these ran."""

from __future__ import annotations

import pytest
import torch
from calls import HALVES
from specimens import name_of
from test_mlp_sm90 import (  # noqa: F401  the same tests, collected here for this tier
    SIZES,
    check,
    inputs_of,
    test_activations_in_the_deterministic_mode,
    test_activations_of_other_widths,
    test_many_rows,
    test_non_finite_inputs,
    test_padded_sizes,
    test_padded_sizes_in_the_deterministic_mode,
    test_some_gradients,
)

from monoidreduce.ops import ACTIVATIONS


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, biases: bool, dtype: torch.dtype, gpu: torch.device) -> None:
    check(inputs_of(size, dtype, gpu, biases), "gelu_tanh", forward="sm80", backward="sm80")


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype, gpu: torch.device) -> None:
    check(inputs_of("ragged", dtype, gpu, biases=True), activation, forward="sm80", backward="sm80")


def test_views(gpu: torch.device) -> None:
    """Leading axes, transposed weights: copied where their rows are not dense."""
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    inputs["x"] = inputs["x"][:300].reshape(3, 100, 128)
    inputs["w1"] = inputs["w1"].t().contiguous().t()
    inputs["w2"] = inputs["w2"].t().contiguous().t()
    check(inputs, "silu", forward="sm80", backward="sm80")
