"""Kept classes of log-probabilities on tensor cores: sizes, options, saved weights, edges, speed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from calls import HALVES
from kept_classes import with_kept, words_of
from specimens import WITH_ALL, cross_entropy_inputs, name_of
from tolerance import check_operator

import monoidreduce as mr

pytestmark = pytest.mark.tiers("sm80", "sm90")

SIZES: dict[str, tuple[int, int, int]] = {  # rows, classes, width
    "one_tile": (128, 256, 64),
    "one_row": (1, 3000, 256),
    "narrow": (257, 67, 8),
    "ragged": (513, 1111, 200),
    "odd_width": (300, 1111, 101),
    "many_classes": (130, 70001, 64),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 2.5},
    "softcap": {"softcap": 5.0},
    "all": {"temperature": 0.7, "softcap": 8.0, "logit_scale": 0.7},
}


def ran(before: dict[str, int]) -> set[str]:
    return {path for path, n in mr._C.path_counts().items() if n != before.get(path, 0)}


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_options(
    size: str, options: dict[str, Any], bias: bool, dtype: torch.dtype, tier: str, gpu: torch.device
) -> None:
    """Four tiles of classes at a time in the backward pass. Tiles lack registers for some calls (obstacle in
    ops/log_probs.h), which take the SIMT kernels."""
    before = mr._C.path_counts()
    workspace = SIZES[size][0] * 256 * 2 * max(1, min(4, SIZES[size][1] // 256))
    inputs, _ = with_kept(cross_entropy_inputs(*SIZES[size], dtype=dtype, device=gpu, bias=bias))
    check_operator("linear_log_probs", inputs, {"entropy": True, "workspace": workspace, **options})
    forward = tier if tier == "sm90" else "simt"
    backward = "simt" if bias or "softcap" in options else tier
    ways = {"forward": forward, "backward": backward}
    assert ran(before) == {f"log_probs_{way}/cuda/{of}/{name_of(dtype)}" for way, of in ways.items()}


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("ignored", (0.0, 0.4))
@pytest.mark.parametrize("size", ("one_tile", "ragged", "many_classes"))
def test_saved_weights(size: str, ignored: float, dtype: torch.dtype, gpu: torch.device) -> None:
    """The whole head's weights are saved on Hopper. With ignored rows the others are gathered."""
    inputs, _ = with_kept(cross_entropy_inputs(*SIZES[size], dtype=dtype, device=gpu, ignored=ignored))
    each = 0.4 + 2 * torch.rand(len(inputs["x"]), device=gpu)
    options = {"entropy": True, "workspace": 128 << 20, "logit_scale": 0.8, "temperature": each}
    check_operator("linear_log_probs", inputs, options)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
def test_top1(bias: bool, dtype: torch.dtype, gpu: torch.device) -> None:
    inputs, keeps = with_kept(
        cross_entropy_inputs(513, 1111, 200, dtype=dtype, device=gpu, bias=bias, ignored=0)
    )
    found = mr.linear_log_probs(**inputs, top1=True).top1
    logits = inputs["x"].float() @ inputs["weight"].float().T
    logits = logits + inputs["bias"].float() if bias else logits
    logits = logits.masked_fill(~keeps, -math.inf)
    assert found is not None
    best = logits.gather(1, found[:, None])[:, 0]
    torch.testing.assert_close(best, logits.amax(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("softcap", (None, 5.0))
@pytest.mark.parametrize("workspace", (0, 128 << 20))
def test_rows_that_keep_nothing_and_targets_that_are_not_kept(
    workspace: int, softcap: float | None, dtype: torch.dtype, gpu: torch.device
) -> None:
    inputs, keeps = with_kept(cross_entropy_inputs(300, 1111, 200, dtype=dtype, device=gpu, ignored=0))
    keeps[torch.arange(300, device=gpu), inputs["target"]] = True
    keeps[torch.arange(100, device=gpu), inputs["target"][:100]] = False
    keeps[:50] = False
    inputs["kept"] = words_of(keeps)
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]
    found = mr.linear_log_probs(**inputs, **WITH_ALL, softcap=softcap, workspace=workspace)
    assert found.entropy is not None and found.top1 is not None
    assert (found.log_probs[:100] == -math.inf).all() and found.log_probs[100:].isfinite().all()
    assert (
        (found.lse[:50] == -math.inf).all() and not found.entropy[:50].any() and (found.top1[:50] == -1).all()
    )
    found = mr.linear_log_probs(**inputs, entropy=True, softcap=softcap, workspace=workspace)
    dx, dweight = torch.autograd.grad(found.log_probs.sum(), leaves)
    assert not dx[:100].any() and dx[100:].any(1).all()
    assert dx.isfinite().all() and dweight.isfinite().all()
    unused = ~keeps[100:].any(0)
    assert not dweight[unused].any()


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_one_set_of_bits(dtype: torch.dtype, gpu: torch.device) -> None:
    """The same bits in every run."""
    inputs, _ = with_kept(cross_entropy_inputs(513, 5000, 256, dtype=dtype, device=gpu))
    runs = []
    for _ in range(5):
        leaves = [inputs[name].detach().requires_grad_() for name in ("x", "weight")]
        found = mr.linear_log_probs(*leaves, inputs["target"], kept=inputs["kept"], entropy=True)
        assert found.entropy is not None
        loss = found.entropy.sum() + torch.where(found.log_probs.isfinite(), found.log_probs, 0).sum()
        runs.append((found.log_probs, found.entropy, *torch.autograd.grad(loss, leaves)))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_packed_on_the_gpu_without_waiting(gpu: torch.device) -> None:
    indices = torch.randint(-1, 5000, (64, 50), device=gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = mr.pack_classes(indices, 5000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    keeps = (indices[..., None] == torch.arange(5000, device=gpu)).any(-2)
    assert torch.equal(packed, words_of(keeps))
