"""The same on the tensor cores from sm_80 on."""

from __future__ import annotations

from test_mlp_split_sm90 import (  # noqa: F401  collected here for this tier
    test_activations,
    test_an_infinite_unit,
    test_bits_are_reproducible,
    test_graph_capture,
    test_non_finite_inputs,
    test_partial_sums_are_small,
    test_scratch_that_is_too_small_is_refused,
    test_sizes,
    test_units,
)
