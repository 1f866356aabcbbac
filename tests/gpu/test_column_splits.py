"""Losses, log-sum-exps and folds of few rows on ordinary cores, whose columns are split between blocks."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from folds import fold_inputs, moved, with_gradients
from specimens import (
    Inputs,
    class_weights,
    cross_entropy_inputs,
    distillation_inputs,
    logsumexp_inputs,
    name_of,
)
from test_statistics import assert_accurate
from tolerance import check_draws, check_operator
from torch import Tensor

import monoidreduce as mr
from monoidreduce import _C

pytestmark = pytest.mark.tiers("simt")

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SIZES = ((1, 3000, 256), (65, 20011, 40), (700, 1111, 200))  # rows, columns, width


def call_of(operator: str, size: tuple[int, int, int], **place: Any) -> tuple[Inputs, dict[str, Any]]:
    """Inputs and options, of which many reach the states of rows."""
    if operator == "logsumexp_matmul":
        return logsumexp_inputs(*size, **place), {"scale": 0.7}
    if operator == "linear_distillation":
        return distillation_inputs(*size, size[2] + 24, mask=True, **place), {
            "loss": "reverse_kl",
            "temperature": 1.5,
        }
    inputs = cross_entropy_inputs(*size, bias=True, **place)
    if operator == "linear_log_probs":
        return inputs, {"entropy": True, "top1": True, "temperature": 1.5}
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "reduction": "none"}
    return inputs | {"class_weight": class_weights(size[1], **place)}, options


def flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [t for t in results if t is not None]


def splits(operator: str, inputs: Inputs, options: dict[str, Any]) -> int:
    """In how many splits explain says that the columns are."""
    reasons = " ".join(mr.explain(operator, **inputs, **options).reasons)
    found = re.search(r"few rows: tiles of 64 rows, columns in (\d+) splits", reasons)
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


def test_there_are_splits_only_for_few_rows(gpu: torch.device) -> None:
    blocks = 2 * torch.cuda.get_device_properties(gpu).multi_processor_count  # at a time

    def of(rows: int, columns: int) -> int:
        inputs = logsumexp_inputs(rows, columns, 128, dtype=torch.float32, device=gpu)
        return splits("logsumexp_matmul", inputs, {})

    assert of(64, 10_000) > 100
    assert of(64, 64) == of(64 * blocks, 10_000) == 1
    assert of(64 * blocks // 2, 10_000) == 2


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=name_of)
@pytest.mark.parametrize("rows", (1, 130))
@pytest.mark.parametrize("name", ("token_stats", "ranked", "renyi", "entropies"))
def test_folds_of_wide_operands(name: str, rows: int, dtype: torch.dtype, gpu: torch.device) -> None:
    """Threads own the rows of narrow ones (test_statistics.py)."""
    draw = functools.partial(fold_inputs, name, (rows,), 9001, 264, dtype)
    check_draws(lambda: assert_accurate(draw, dtype, gpu, rows, pooled=8))
    fold, call = draw()
    call = moved(call, gpu)
    operands = (call["a"], call["b"], call.get("other_a"), call.get("other_b"))
    plan = _C.plan_statistics_fold(*operands, state_words=8)
    assert plan.owned_rows is None and plan.packing is not None and plan.packing[2] > 1
    first, second = (with_gradients(fold, call) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first[:1], second[:1], strict=True))
