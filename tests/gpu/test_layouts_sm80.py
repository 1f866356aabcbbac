"""Memory layouts on the tensor cores from sm_80 on, tested as on Hopper."""

from __future__ import annotations

from test_layouts_sm90 import test_layouts  # noqa: F401  collected here for this tier
