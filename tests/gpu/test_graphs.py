"""Graphs of calls on tensor cores: captured once, forward and backward, and replayed on other inputs."""

from __future__ import annotations

import pytest
import torch
from calls import check_replays
from specimens import TENSOR_CORE_SPECIMENS, Specimen, name_of

pytestmark = pytest.mark.tiers("sm80", "sm90")


@pytest.mark.parametrize("specimen", TENSOR_CORE_SPECIMENS, ids=name_of)
def test_replays(specimen: Specimen, tier: str, gpu: torch.device) -> None:
    check_replays(specimen, torch.bfloat16, gpu, tier)


@pytest.mark.parametrize("specimen", TENSOR_CORE_SPECIMENS, ids=name_of)
def test_replays_in_the_deterministic_mode(
    specimen: Specimen, tier: str, gpu: torch.device, deterministic: None
) -> None:
    check_replays(specimen, torch.bfloat16, gpu, tier)
