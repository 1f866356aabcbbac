"""Linear cross entropy and logsumexp_matmul from sm_80 on, tested as Hopper's kernels are."""

from __future__ import annotations

import torch
from test_cross_entropy_sm90 import (  # noqa: F401  the same tests, collected here for this tier
    EVERYTHING,
    Kept,
    inputs_of,
    test_a_workspace_that_holds_no_tile,
    test_captured_in_a_graph,
    test_garbage_in_ignored_rows,
    test_large_scores,
    test_layouts,
    test_levels_of_logits,
    test_logsumexp_matmul,
    test_no_logits_are_stored,
    test_no_rows,
    test_non_finite_inputs,
    test_sizes_and_options,
    test_some_gradients,
    test_targets_out_of_range,
    test_the_same_bits_every_time,
    test_upstream_gradients,
    test_workspaces,
)
from tolerance import check_operator

import monoidreduce as mr


def test_nothing_is_kept(gpu: torch.device) -> None:
    """The forward pass has no kernel for that: the backward pass computes scores again."""
    with Kept() as kept:
        check_operator(
            "linear_cross_entropy", inputs_of("ragged", torch.bfloat16, gpu), {"workspace": EVERYTHING}
        )
    assert kept.classes == [0]


def test_explained(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    tensors = (inputs["x"], inputs["weight"], inputs["target"])
    explanation = mr.explain("linear_cross_entropy", *tensors)
    assert "/sm80/" in explanation.forward and "/sm80/" in explanation.backward
    assert explanation.deterministic and "through mma.sync" in str(explanation)
