"""Graphs of calls from sm_80 on, tested as on Hopper."""

from __future__ import annotations

from test_graphs_sm90 import (  # noqa: F401  the same tests, collected here for this tier
    test_replays,
    test_replays_in_the_deterministic_mode,
)
