"""Attention on the tensor cores from sm_80 on, tested as Hopper's kernels are, and that these ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import HALVES
from specimens import name_of
from test_attention_sm90 import (  # noqa: F401  the same tests, collected here for this tier
    OPTIONS,
    SIZES,
    biased_inputs,
    inputs_of,
    paths,
    test_bias_of_any_strides,
    test_blocks_that_take_turns_have_memory_for_them,
    test_deterministic_mode,
    test_deterministic_mode_is_explained,
    test_deterministic_mode_with_a_bias,
    test_deterministic_mode_with_many_tiles,
    test_forward_is_bitwise_reproducible,
    test_gradient_of_the_log_sum_exp_alone,
    test_gradient_of_the_log_sum_exp_alone_of_padded_widths,
    test_graph_capture,
    test_non_finite_biases,
    test_non_finite_inputs,
    test_non_finite_inputs_beside_excluded_columns,
    test_non_finite_inputs_of_padded_widths,
    test_non_finite_upstream_gradient,
    test_padded_widths,
    test_padded_widths_in_the_deterministic_mode,
    test_padded_widths_with_a_bias,
    test_some_gradients,
    test_transposed_views,
    test_upstream_gradients,
)
from tolerance import check_operator

import monoidreduce as mr


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_options(size: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device) -> None:
    before = paths()
    check_operator("attention", inputs_of(size, dtype, gpu), {"return_lse": True, **options})
    ran = {path for path, n in paths().items() if n != before.get(path, 0)}
    assert ran == {f"attention_{way}/cuda/sm80/{name_of(dtype)}" for way in ("forward", "backward")}


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("option", ("full", "causal", "softcap", "causal_softcap"))
@pytest.mark.parametrize(
    "kind", ("full", "of_rows_and_columns", "of_columns", "of_rows", "keep", "keep_columns")
)
@pytest.mark.parametrize("size", ("one_row", "narrow", "one_column_head", "ragged", "wide"))
def test_biases(size: str, kind: str, option: str, dtype: torch.dtype, gpu: torch.device) -> None:
    before = paths()
    inputs = biased_inputs(size, kind, dtype, gpu)
    check_operator("attention", inputs, {"return_lse": True, **OPTIONS[option]})
    ran = {path for path, n in paths().items() if n != before.get(path, 0)}
    assert ran == {f"attention_{way}/cuda/sm80/{name_of(dtype)}" for way in ("forward", "backward")}


def test_is_explained(gpu: torch.device) -> None:
    explanation = mr.explain("attention", *inputs_of("ragged", torch.bfloat16, gpu).values())
    assert explanation.forward == "attention_forward/cuda/sm80/bfloat16"
    assert explanation.backward == "attention_backward/cuda/sm80/bfloat16"
    assert any("mma.sync" in reason for reason in explanation.reasons)
