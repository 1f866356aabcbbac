"""Exhaustive parametrizations: a sample in `make test`, all of them in `make test-more`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], sample: Iterable[Any]) -> list[Any]:
    """The cases, of which those outside the sample are marked `release`."""
    kept = list(sample)
    return [
        case
        if case in kept
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.release)
        for case in cases
    ]
