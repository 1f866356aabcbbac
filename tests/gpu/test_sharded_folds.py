"""Folds over ranks without what they send, on this one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specimens import (
    attention_inputs,
    cross_entropy_inputs,
    distillation_inputs,
    mlp_inputs,
    name_of,
    varlen_inputs,
)
from tolerance import check_operator, check_pooled
from virtual_ranks import (
    CrossEntropyOverVirtualRanks,
    DistillationOverVirtualRanks,
    attention_over_virtual_ranks,
    varlen_over_virtual_ranks,
)

from monoidreduce.distributed import states

pytestmark = pytest.mark.tiers("sm80", "sm90")

RANKS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (300, 40)},
    "softcap": {"causal": True, "softcap": 5.0},
}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
@pytest.mark.parametrize("length", (1200, 1003))
def test_folds_of_all_ranks_are_the_whole(
    length: int, layout: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device
) -> None:
    """Of 1003 positions parts are uneven, and slices of keys begin anywhere."""
    inputs = attention_inputs(1, 8, 2, length, length, 128, 128, dtype=dtype, device=gpu)
    check_operator("attention", inputs, options, function=attention_over_virtual_ranks(RANKS, layout))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_folds_of_packed_sequences(
    layout: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device
) -> None:
    """Ranks begin and end within sequences. Spans of their queries are slices."""
    lengths = (500, 1, 130, 0, 702, 64)
    inputs = varlen_inputs(lengths, None, 8, 2, 128, 128, behind=3, dtype=dtype, device=gpu)
    function = varlen_over_virtual_ranks(RANKS, layout)
    check_operator("attention_varlen", inputs, {"return_lse": True} | options, function=function)


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_starts_that_are_not_ascending(layout: str, gpu: torch.device) -> None:
    """Results and gradients of each rank are NaN, also where a rank has no queries."""
    inputs = varlen_inputs((2,), None, behind=0, dtype=torch.float32, device=gpu)
    inputs["cu_seqlens_q"] = torch.tensor([0, 3], device=gpu)
    leaves = [inputs[name].requires_grad_() for name in "qkv"]
    over_ranks = varlen_over_virtual_ranks(RANKS, layout)
    out, lse = over_ranks(**inputs, return_lse=True)
    for t in (out, lse, *torch.autograd.grad(out.sum() + lse.sum(), leaves)):
        assert bool(t.isnan().all())


def _check_losses(operator: str, draw: Any, options: dict[str, Any], over_ranks: Any, upstream: Any) -> None:
    """A mean is one number, whose error may be small in eager torch by luck."""
    if options["reduction"] == "none":
        check_operator(operator, draw(), options, function=over_ranks, upstream=upstream)
    else:
        check_pooled(operator, draw, options, function=over_ranks, upstream=upstream)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("reduction", ("none", "mean"))
@pytest.mark.parametrize("ignored", (False, True), ids=("all", "ignored"))
@pytest.mark.parametrize("columns", (0, 512, 1000), ids=lambda n: f"{n}_kept")
@pytest.mark.parametrize("level", (1.0, 8.0))
@pytest.mark.parametrize("options", ({}, {"return_lse": True}, {"z_loss": 1e-3}), ids=("loss", "lse", "z"))
def test_local_gradients_that_a_rank_keeps(
    options: dict[str, Any],
    level: float,
    columns: int,
    ignored: bool,
    reduction: str,
    dtype: torch.dtype,
    tier: str,
    gpu: torch.device,
) -> None:
    """They are made when the log-sum-exps of all ranks are known. At level 8 ranks have e^-50 of the softmax.

    With a log-sum-exp no row is left out, and those that are ignored may hold NaN.
    """
    rows, ranks = 400, 3

    def draw() -> dict[str, torch.Tensor]:
        inputs = cross_entropy_inputs(rows, 1000 * ranks, 2048, dtype=dtype, device=gpu)
        inputs["weight"][:1500] *= level
        if ignored:
            inputs["target"][::3] = -100
        return inputs

    over_ranks = CrossEntropyOverVirtualRanks(ranks)
    options = options | {"reduction": reduction, "logit_scale": 0.9, "workspace": 2 * rows * columns}
    upstream: Any = "strided"
    if "return_lse" in options:  # its gradient would leave the kept local gradients unused
        upstream = [torch.randn(rows if reduction == "none" else (), device=gpu), None]
    _check_losses("linear_cross_entropy", draw, options, over_ranks, upstream)
    assert over_ranks.kept == [columns if tier == "sm90" else 0] * ranks


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("reduction", ("none", "mean"))
@pytest.mark.parametrize("masked", (False, True), ids=("all", "masked"))
@pytest.mark.parametrize("columns", (0, 256, 1000), ids=lambda n: f"{n}_kept")
@pytest.mark.parametrize("level", (0.0, 100.0))
@pytest.mark.parametrize("loss", ("cross_entropy", "forward_kl", "reverse_kl"))
def test_local_gradients_of_distillation_that_a_rank_keeps(
    loss: str,
    level: float,
    columns: int,
    masked: bool,
    reduction: str,
    dtype: torch.dtype,
    tier: str,
    gpu: torch.device,
) -> None:
    """level: of the teacher's scores, which cancels. The reverse KL keeps none."""
    rows, ranks = 400, 3
    sizes = (rows, 1000 * ranks, 2048, 1024)
    of_teacher: Any = {"mask": masked, "teacher_level": level}

    def draw() -> dict[str, torch.Tensor]:
        return distillation_inputs(*sizes, dtype=dtype, device=gpu, **of_teacher)

    over_ranks = DistillationOverVirtualRanks(ranks)
    options = {"loss": loss, "temperature": 1.5, "reduction": reduction, "workspace": 4 * rows * columns}
    _check_losses("linear_distillation", draw, options, over_ranks, "strided")
    keeps = tier == "sm90" and loss != "reverse_kl"
    assert over_ranks.kept == [columns if keeps else 0] * ranks


def test_garbage_in_ignored_rows_that_a_rank_keeps(gpu: torch.device) -> None:
    """The log-sum-exp of such a row is NaN."""
    inputs = cross_entropy_inputs(400, 3000, 2048, dtype=torch.bfloat16, device=gpu)
    inputs["target"][::3] = -100
    garbage = inputs | {"x": inputs["x"].clone()}
    garbage["x"][::3] = torch.nan
    found = []
    for given in (inputs, garbage):
        leaves = [given[name].detach().requires_grad_() for name in ("x", "weight")]
        over_ranks = CrossEntropyOverVirtualRanks(3)
        options = {"workspace": 2 * 400 * 1000, "return_lse": True}
        loss, _ = over_ranks(leaves[0], leaves[1], given["target"], **options)
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for clean, other in zip(*found, strict=True):
        torch.testing.assert_close(other, clean, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("ignored", (False, True))
def test_parts_of_the_rows_gradient_are_not_rounded(ignored: bool, tier: str, gpu: torch.device) -> None:
    """They travel in float32, and their sum over ranks is rounded once."""
    x = torch.randn(300, 64, device=gpu, dtype=torch.bfloat16)
    weight = torch.randn(1100, 64, device=gpu, dtype=torch.bfloat16)
    target = torch.randint(1100, (300,), device=gpu)
    if ignored:
        target[::3] = -100
    inputs = (x, weight, None, target, None)
    options = ("none", 1.0, 0.0, -100, 0.0, 0.0, 0, 1100, False, False, False, None)
    loss, *residuals = torch.ops.monoidreduce.linear_cross_entropy(*inputs, *options)
    grad = torch.randn_like(loss[0])  # beside the loss a rank has the sum of its weights

    def d_x(unrounded: bool) -> torch.Tensor:
        needed = [True, True, False, False, False]
        backward = torch.ops.monoidreduce.linear_cross_entropy_backward
        return backward(grad, None, *inputs, *residuals, *options, needed, unrounded)[0]  # type: ignore[no-any-return]

    part = d_x(True)
    assert part.dtype == torch.float32 and not torch.equal(part, part.bfloat16().float())
    torch.testing.assert_close(part.bfloat16(), d_x(False), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("units", (1000, 0))
@pytest.mark.parametrize("width", (64, 512))
def test_a_result_has_the_dtype_that_is_asked_for(width: int, units: int, gpu: torch.device) -> None:
    """Whichever kernels a rank's share of an MLP takes: parts of all ranks are exchanged in one dtype."""
    inputs = mlp_inputs(300, width, units, width, dtype=torch.bfloat16, device=gpu)
    call = (*(inputs[name] for name in ("x", "w1", "w2")), None, None, "relu")
    for unrounded, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        assert torch.ops.monoidreduce.mlp(*call, unrounded, None).dtype == dtype


def _states(fields: int, rows: int, high: list[int]) -> torch.Tensor:
    """The states of 3 ranks, with some rows that are empty, infinite or NaN."""
    found = torch.rand(3, fields, rows)
    for field in high:
        found[:, field] *= 30
        found[1, field, :4] = torch.tensor([-torch.inf, torch.inf, torch.nan, -torch.inf])
        found[:, field, 3] = -torch.inf
        found[0, field, 5] = -200.0
    return found


def _miss(given: torch.Tensor, *others: Any) -> list[torch.Tensor]:
    miss = given.new_empty(given.shape[2])
    states.cross_entropy(given, *others, miss)
    return [miss]


@pytest.mark.parametrize("rows", (1, 400))
def test_combined_states_are_as_on_the_cpu(rows: int, gpu: torch.device) -> None:
    target = torch.randint(300, (rows,))
    target[::3] = -100
    weights, mask = torch.rand(300), torch.rand(rows) > 0.5
    for_cross_entropy = ("mean", -100, 1e-4)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (states.log_sum_exp, (_states(2, max(rows, 6), [0]),)),
        (states.cross_entropy, (_states(4, max(rows, 6), [2]), target, None, *for_cross_entropy)),
        (states.cross_entropy, (_states(4, max(rows, 6), [2]), target, weights, *for_cross_entropy)),
        (_miss, (_states(4, max(rows, 6), [2]), target, None, *for_cross_entropy)),
        (states.log_probs, (_states(4, max(rows, 6), [2]), target, -100)),
        (states.distillation, (_states(5, max(rows, 6), [1, 3]), "forward_kl", mask, "mean")),
        (states.distillation, (_states(5, max(rows, 6), [1, 3]), "cross_entropy")),
    ]
    for function, (given, *others) in calls:
        found = [
            function(
                given[..., :rows].to(on), *(t.to(on) if isinstance(t, torch.Tensor) else t for t in others)
            )
            for on in ("cpu", gpu)
        ]
        for expected, here in zip(*found, strict=True):
            if expected is not None:
                torch.testing.assert_close(here.cpu(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
