"""Losses and log-sum-exps by SIMT kernels with few rows, whose columns several blocks share."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from specimens import (
    Inputs,
    class_weights,
    cross_entropy_inputs,
    distillation_inputs,
    logsumexp_inputs,
    name_of,
)
from tolerance import check_operator
from torch import Tensor

import monoidreduce as mr

pytestmark = pytest.mark.tiers("simt")

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SIZES = ((1, 3000, 256), (65, 20011, 40), (700, 1111, 200))  # rows, columns, width


def call_of(operator: str, size: tuple[int, int, int], **place: Any) -> tuple[Inputs, dict[str, Any]]:
    """Inputs, and options that need more of a row than its log-sum-exp, such as weights or an entropy."""
    options: dict[str, Any] = {"scale": 0.7}
    if operator == "logsumexp_matmul":
        return logsumexp_inputs(*size, **place), options
    if operator == "linear_distillation":
        options = {"loss": "reverse_kl", "temperature": 1.5}
        return distillation_inputs(*size, size[2] + 24, mask=True, **place), options
    inputs = cross_entropy_inputs(*size, bias=True, **place)
    inputs["target"][0] = size[1] - 1  # of the last split
    if operator == "linear_log_probs":
        return inputs, {"entropy": True, "top1": True, "temperature": 1.5}
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "reduction": "none"}
    return inputs, options | {"class_weight": class_weights(size[1], **place)}


def flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [t for t in results if t is not None]


def splits(operator: str, inputs: Inputs, options: dict[str, Any]) -> int:
    """In how many splits explain says that the columns are."""
    reasons = " ".join(mr.explain(operator, **inputs, **options).reasons)
    found = re.search(r"few tiles of 64 rows: columns in (\d+) splits", reasons)
    return int(found[1]) if found else 1


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "operator", ("linear_cross_entropy", "linear_log_probs", "linear_distillation", "logsumexp_matmul")
)
def test_accuracy(operator: str, size: tuple[int, int, int], dtype: torch.dtype, gpu: torch.device) -> None:
    inputs, options = call_of(operator, size, dtype=dtype, device=gpu)
    assert splits(operator, inputs, options) > 1
    check_operator(operator, inputs, options)
    first, second = (flat(getattr(mr, operator)(**inputs, **options)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
