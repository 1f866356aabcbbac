"""An MLP too wide for one kernel on the tensor cores from sm_80 on, tested as on Hopper."""

from __future__ import annotations

from test_mlp_parts_sm90 import (  # noqa: F401  the same tests, collected here for this tier
    test_a_workspace_that_holds_no_tile,
    test_activations,
    test_captured_in_a_graph,
    test_deterministic_mode,
    test_no_rows,
    test_non_finite_inputs,
    test_several_parts,
    test_sizes,
    test_sizes_that_are_no_multiple_of_eight,
    test_some_gradients,
    test_the_same_bits_every_time,
    test_views,
)
