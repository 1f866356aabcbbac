"""Kept classes and soft targets with the classes split over ranks, against the rule of tolerance.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kept_classes import with_kept, words_of
from ranks import OverRanks, on_ranks
from soft_targets import soft_inputs
from specimens import class_weights, cross_entropy_inputs, name_of
from tolerance import check_operator

import monoidreduce as mr

CPU: Any = {"device": torch.device("cpu")}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ROWS = 384  # with fewer the rule says nothing of float32's mean error


def check(operator: str, inputs: Any, options: Any, ranks: int, **split: Any) -> None:
    check_operator(operator, inputs, options, function=OverRanks(operator, ranks, **split))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("options", ({}, {"softcap": 3.0, "temperature": 0.7}), ids=("plain", "everything"))
@pytest.mark.parametrize("own_rows", (False, True), ids=("replicated", "sequence_parallel"))
def test_kept_classes(own_rows: bool, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Words of 67 classes, of which the ranks have 23, 23 and 21."""
    inputs, _ = with_kept(cross_entropy_inputs(ROWS, 67, 24, dtype=dtype, bias=bool(options), **CPU))
    check("linear_log_probs", inputs, {"entropy": True, **options}, 3, own_rows=own_rows)


@pytest.mark.parametrize("classes, padding", ((3, None), (5, 9), (67, 30)))
def test_kept_classes_of_empty_and_padded_shards(classes: int, padding: int | None) -> None:
    inputs, _ = with_kept(cross_entropy_inputs(40, classes, 8, dtype=torch.float32, ignored=0.4, **CPU))
    check("linear_log_probs", inputs, {"entropy": True}, 4, padding=padding)


def test_rows_that_keep_nothing() -> None:
    inputs, keeps = with_kept(cross_entropy_inputs(40, 67, 8, dtype=torch.float32, ignored=0.2, **CPU))
    keeps[:10] = False
    inputs["kept"] = words_of(keeps)
    lse = OverRanks("linear_log_probs", 3)(**inputs)[-1]
    assert torch.equal(lse[:10] == -math.inf, inputs["target"][:10] != -100)
    check("linear_log_probs", inputs, {"entropy": True}, 3)


def _with_words_of_a_shard(group: Any, inputs: Any) -> None:
    with pytest.raises(ValueError, match=r"kept: expected shape \[..., 4\], a bit for each of 120 classes"):
        mr.linear_log_probs(**inputs, ranks=group)


def test_words_of_a_ranks_own_classes_are_refused() -> None:
    inputs, _ = with_kept(cross_entropy_inputs(9, 60, 8, dtype=torch.float32, **CPU))
    on_ranks(2, _with_words_of_a_shard, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("options", ({}, {"softcap": 3.0, "z_loss": 0.05}), ids=("plain", "everything"))
@pytest.mark.parametrize("own_rows", (False, True), ids=("replicated", "sequence_parallel"))
def test_soft_targets(own_rows: bool, options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = soft_inputs(ROWS, 67, 24, dtype=dtype, bias=bool(options), **CPU)
    options = {"reduction": "none", "return_lse": True, **options}
    check("linear_cross_entropy", inputs, options, 3, own_rows=own_rows)


@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
@pytest.mark.parametrize("own_rows", (False, True), ids=("replicated", "sequence_parallel"))
def test_soft_targets_with_class_weights(reduction: str, own_rows: bool) -> None:
    inputs = soft_inputs(ROWS, 67, 24, dtype=torch.float32, **CPU)
    weights = class_weights(67, dtype=torch.float32, **CPU)
    options = {"reduction": reduction, "class_weight": weights}
    check("linear_cross_entropy", inputs, options, 2, own_rows=own_rows)


@pytest.mark.parametrize("classes, padding", ((3, None), (5, 9), (67, 30)))
def test_soft_targets_of_empty_and_padded_shards(classes: int, padding: int | None) -> None:
    inputs = soft_inputs(40, classes, 8, dtype=torch.float32, bias=True, **CPU)
    check("linear_cross_entropy", inputs, {"reduction": "none"}, 4, padding=padding)
