"""Linear distillation on the tensor cores from sm_80 on, tested as Hopper's kernels are."""

from __future__ import annotations

from test_distillation_sm90 import (  # noqa: F401  the same tests, collected here for this tier
    test_a_student_that_is_its_teacher,
    test_garbage_in_masked_rows,
    test_large_scores,
    test_levels_of_logits,
    test_no_logits_are_stored,
    test_sizes_and_losses,
    test_some_gradients,
    test_the_same_bits_every_time,
    test_workspaces,
)
