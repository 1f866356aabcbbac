"""Gradients that nobody needs, on the tensor cores from sm_80 on, tested as on Hopper."""

from __future__ import annotations

from test_frozen_sm90 import (  # noqa: F401  the same tests, collected here for this tier
    products,
    test_a_bias_needs_no_product,
    test_a_frozen_student_and_a_frozen_teacher,
    test_memory_of_a_frozen_head,
    test_memory_of_frozen_rows,
    test_products_of_a_head,
    test_products_of_an_mlp_in_parts,
)
