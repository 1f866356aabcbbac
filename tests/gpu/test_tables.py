"""Statistics of captured tensors that are indexed by row and column together: against float64 torch."""

from __future__ import annotations

import pytest
import torch
from calls import HALVES
from specimens import name_of
from tables import CASES, check
from tensor_core_scores import tensor_core_scores

from monoidreduce.folds.torch import reader


@pytest.mark.tiers("sm80", "sm90")
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("name", CASES)
def test_accuracy(
    name: str, dtype: torch.dtype, tier: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "scores", tensor_core_scores)
    check(name, dtype, gpu)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=name_of)
@pytest.mark.parametrize("name", CASES)
def test_accuracy_without_tensor_cores(name: str, dtype: torch.dtype, gpu: torch.device) -> None:
    check(name, dtype, gpu)
