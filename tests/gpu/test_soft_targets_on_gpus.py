"""Soft targets on tensor cores: sizes, options, saved weights, order of rows, bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import HALVES
from soft_targets import soft_inputs
from specimens import name_of
from tolerance import check_operator

import monoidreduce as mr

pytestmark = pytest.mark.tiers("sm80", "sm90")

SIZES: dict[str, tuple[int, int, int, int]] = {  # rows, classes, width, targets
    "one_tile": (128, 256, 64, 3),
    "one_row": (1, 3000, 256, 64),
    "narrow": (257, 67, 8, 5),
    "ragged": (513, 1111, 200, 17),
    "odd_width": (300, 1111, 101, 8),
    "many_classes": (130, 70001, 64, 64),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "z_loss": {"z_loss": 0.01},
    "all": {"softcap": 8.0, "logit_scale": 0.7, "z_loss": 0.01},
}


def check(inputs: Any, **options: Any) -> None:
    options = {"reduction": "none", **options}
    check_operator("linear_cross_entropy", inputs, options, function=mr.linear_cross_entropy)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_options(
    size: str, options: dict[str, Any], bias: bool, dtype: torch.dtype, tier: str, gpu: torch.device
) -> None:
    """Four tiles of classes at a time in the backward pass."""
    rows, classes, *_ = SIZES[size]
    inputs = soft_inputs(*SIZES[size], dtype=dtype, device=gpu, bias=bias)
    check(inputs, workspace=rows * 256 * 2 * max(1, min(4, classes // 256)), **options)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("ignored", (0.0, 0.4, 1.0))
@pytest.mark.parametrize("return_lse", (False, True))
@pytest.mark.parametrize("size", ("one_tile", "ragged", "many_classes"))
def test_saved_weights(
    size: str, return_lse: bool, ignored: float, dtype: torch.dtype, gpu: torch.device
) -> None:
    """The whole head's weights are saved on Hopper. Tokens without targets are left out, or not."""
    inputs = soft_inputs(*SIZES[size], dtype=dtype, device=gpu, ignored=ignored)
    check(inputs, workspace=128 << 20, return_lse=return_lse)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("workspace", (0, 128 << 20))
def test_one_set_of_bits(workspace: int, dtype: torch.dtype, gpu: torch.device) -> None:
    """The same bits in every run, with equal targets too.

    Without a workspace the SIMT kernels run, whose sums have a fixed order in the deterministic mode.
    """
    inputs = soft_inputs(513, 500, 256, 64, dtype=dtype, device=gpu)
    names, runs = ("x", "weight", "target_probs"), []
    torch.use_deterministic_algorithms(workspace == 0)
    try:
        for _ in range(5):
            leaves = {name: inputs[name].detach().requires_grad_() for name in names}
            loss = mr.linear_cross_entropy(**{**inputs, **leaves}, workspace=workspace)
            runs.append((loss, *torch.autograd.grad(loss, [*leaves.values()])))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_the_host_does_not_wait(dtype: torch.dtype, gpu: torch.device) -> None:
    inputs = soft_inputs(513, 500, 256, 8, dtype=dtype, device=gpu)
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight", "target_probs")]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(mr.linear_cross_entropy(**inputs), leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")
