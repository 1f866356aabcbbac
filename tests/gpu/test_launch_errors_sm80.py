"""Launches that fail, of the kernels from sm_80 on, tested as Hopper's are."""

from __future__ import annotations

from test_launch_errors_sm90 import test_a_launch_that_fails  # noqa: F401  collected here for this tier
