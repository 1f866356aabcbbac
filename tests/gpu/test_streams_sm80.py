"""Streams: the kernels from sm_80 on, tested as Hopper's are."""

from __future__ import annotations

from test_streams_sm90 import test_runs_behind_what_makes_its_inputs  # noqa: F401  collected here for this tier
