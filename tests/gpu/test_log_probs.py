"""Log-probabilities on tensor cores: sizes, options, dtypes, edges, and that their kernels ran."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from calls import HALVES, Kept, assert_same_bits, check_captured, peak, requested, reset_peak
from specimens import WITH_ALL, Inputs, cross_entropy_inputs, integers, name_of
from tolerance import check_operator

import monoidreduce as mr
from monoidreduce import _C
from monoidreduce._ops import engine, linear_loss

pytestmark = pytest.mark.tiers("sm80", "sm90")

SIZES: dict[str, tuple[int, int, int]] = {  # rows, classes, width
    "one_tile": (128, 256, 64),
    "one_row": (1, 3000, 256),
    "narrow": (257, 67, 8),
    "ragged": (513, 1111, 200),
    "odd_width": (300, 1111, 101),
    "many_rows": (5000, 515, 72),
    "many_classes": (130, 70001, 64),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 2.5},
    "softcap": {"softcap": 5.0},
    "all": {"temperature": 0.7, "softcap": 8.0, "logit_scale": 0.7},
}


def inputs_of(size: str, dtype: torch.dtype, device: torch.device, **options: Any) -> Inputs:
    return cross_entropy_inputs(*SIZES[size], dtype=dtype, device=device, **options)


def ran(before: dict[str, int]) -> set[str]:
    return {path for path, n in mr._C.path_counts().items() if n != before.get(path, 0)}


def paths(forward: str, backward: str, dtype: torch.dtype) -> set[str]:
    ways = {"forward": forward, "backward": backward}
    return {f"log_probs_{way}/cuda/{tier}/{name_of(dtype)}" for way, tier in ways.items()}


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_options(
    size: str, options: dict[str, Any], bias: bool, dtype: torch.dtype, tier: str, gpu: torch.device
) -> None:
    """Four tiles of classes at a time in the backward pass."""
    before = mr._C.path_counts()
    workspace = SIZES[size][0] * 256 * 2 * max(1, min(4, SIZES[size][1] // 256))
    options = {"entropy": True, "workspace": workspace, **options}
    check_operator("linear_log_probs", inputs_of(size, dtype, gpu, bias=bias), options)
    assert ran(before) == paths(tier, tier, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", ({}, {"softcap": 6.0}), ids=("plain", "softcap"))
@pytest.mark.parametrize("size", ("one_tile", "ragged", "many_rows"))
def test_temperature_of_each_token(
    size: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device
) -> None:
    inputs = inputs_of(size, dtype, gpu)
    each = 0.4 + 2 * torch.rand(len(inputs["x"]), device=gpu)
    check_operator("linear_log_probs", inputs, {"entropy": True, "temperature": each, **options})


EVERYTHING = 128 << 20  # bytes that hold the weights of every call here


@pytest.fixture
def from_weights(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many classes local gradients are made of kept weights, each time that they are."""
    kernel, found = _C.log_probs_local_gradient, list[int]()
    names = [field.name for field in _C.CALLS["log_probs_local_gradient"]]

    def call(*arguments: Any) -> None:
        given = dict(zip(names, arguments, strict=False))
        if given["frames"] is not None:
            found.append(given["out"].shape[1])
        kernel(*arguments)

    # Of the class, for the backward pass has a thread of its own.
    monkeypatch.setattr(type(engine._C), "log_probs_local_gradient", staticmethod(call))
    return found


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("ignored", (0.0, 0.4))
@pytest.mark.parametrize("size", SIZES)
def test_kept_weights(
    size: str, ignored: float, dtype: torch.dtype, gpu: torch.device, from_weights: list[int]
) -> None:
    """With temperatures, a scale, and upstream gradients of all three results."""
    inputs = inputs_of(size, dtype, gpu, ignored=ignored)
    each = 0.4 + 2 * torch.rand(len(inputs["x"]), device=gpu)
    options = {"entropy": True, "workspace": EVERYTHING, "logit_scale": 0.8, "temperature": each}
    check_operator("linear_log_probs", inputs, options)
    assert from_weights == [SIZES[size][1]]


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("ignored", (0.0, 0.4, 1.0))
@pytest.mark.parametrize("tiles", (2, 4))
def test_some_kept_weights(
    tiles: int, ignored: float, dtype: torch.dtype, gpu: torch.device, from_weights: list[int]
) -> None:
    """The whole workspace holds kept weights: the gradient of x has room for other local gradients."""
    inputs = cross_entropy_inputs(513, 6111, 2056, dtype=dtype, device=gpu, ignored=ignored)
    options = {"entropy": True, "workspace": 513 * 256 * 2 * tiles, "temperature": 0.7}
    biased = inputs | {"bias": torch.randn(6111, dtype=dtype, device=gpu)}
    check_operator("linear_log_probs", inputs, options)
    check_operator("linear_log_probs", inputs, options, differentiate=["x"])
    assert from_weights == [256 * tiles] * 2
    check_operator("linear_log_probs", inputs, options, differentiate=["weight"])
    check_operator("linear_log_probs", inputs, options, differentiate=[])
    check_operator("linear_log_probs", inputs, options | {"softcap": 5.0})
    check_operator("linear_log_probs", biased, options)
    check_operator("linear_log_probs", inputs, options | {"top1": True})
    assert len(from_weights) == 2


@pytest.mark.tiers("sm90")
def test_weights_are_not_read_again_after_a_failure(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are local gradients then. torch says so, as of any tensor that was saved and changed."""
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    leaves = [inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()]
    found = mr.linear_log_probs(**inputs).log_probs.sum()

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(linear_loss, "multiply_dlogits", fail)
        torch.autograd.grad(found, leaves)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(found, leaves)


@pytest.mark.tiers("sm90")
def test_a_captured_backward_pass_can_be_replayed_alone(gpu: torch.device, from_weights: list[int]) -> None:
    """Nothing tells a graph how often that will be, so it keeps no weights."""
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    leaves = [inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()]
    upstream = torch.randn(len(inputs["x"]), device=gpu)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.autograd.grad(mr.linear_log_probs(**inputs).log_probs, leaves, upstream)
    torch.cuda.current_stream().wait_stream(side)
    from_weights.clear()
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        found = mr.linear_log_probs(**inputs).log_probs
    with torch.cuda.graph(backward, pool=forward.pool()):
        gradients = torch.autograd.grad(found, leaves, upstream)
    forward.replay()
    backward.replay()
    first = [g.clone() for g in gradients]
    backward.replay()
    assert_same_bits(dict(enumerate(gradients)), dict(enumerate(first)))
    assert from_weights == []


@pytest.mark.tiers("sm90")
def test_a_mode_that_looks_on(gpu: torch.device, from_weights: list[int]) -> None:
    """It sees the backward op, whose arguments are left alone, so that all logits are computed again."""
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    with Kept() as kept:
        check_operator("linear_log_probs", inputs, {"entropy": True, "workspace": EVERYTHING})
    assert kept.classes == [-(-SIZES["ragged"][1] // 8) * 8] and from_weights == []


@pytest.mark.tiers("sm80")
def test_nothing_is_kept(gpu: torch.device) -> None:
    with Kept() as kept:
        check_operator(
            "linear_log_probs", inputs_of("ragged", torch.bfloat16, gpu), {"workspace": EVERYTHING}
        )
    assert kept.classes == [0]


@pytest.mark.tiers("sm90")
def test_kept_weights_serve_once(gpu: torch.device, from_weights: list[int]) -> None:
    """Where the graph is retained, all logits are computed again. The last backward pass has the weights."""
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    leaves = [inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()]
    found = mr.linear_log_probs(**inputs, entropy=True)
    upstream = [torch.randn(513, device=gpu) for _ in range(2)]
    first, again, doubled = (
        torch.autograd.grad(found[:2], leaves, [factor * g for g in upstream], retain_graph=True)
        for factor in (1, 1, 2)
    )
    assert_same_bits(dict(enumerate(again)), dict(enumerate(first)))
    for got, expected in zip(doubled, first, strict=True):
        torch.testing.assert_close(got, 2 * expected, rtol=0, atol=0)
    assert from_weights == []
    last = torch.autograd.grad(found[:2], leaves, upstream)
    assert from_weights == [SIZES["ragged"][1]]
    for got, expected in zip(last, first, strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-7 * float(expected.abs().max()))


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("workspace", (EVERYTHING, 600 * 256 * 2), ids=("kept", "computed"))
def test_a_target_with_nearly_all_the_mass(workspace: int, gpu: torch.device) -> None:
    """Its gradient is p - 1: a weight of 16 bits tells p to 2^-12 alone, log p tells more. Logits are x."""
    x = torch.zeros(600, 520, device=gpu, dtype=torch.bfloat16)
    x[:, 0] = torch.arange(600, device=gpu) % 11 + 4
    x, eye = x.requires_grad_(), torch.eye(520, dtype=torch.bfloat16, device=gpu)
    target = torch.zeros(600, dtype=torch.int64, device=gpu)
    with Kept() as kept:
        found = mr.linear_log_probs(x, eye, target, workspace=workspace).log_probs
    assert kept.classes == [520 if workspace == EVERYTHING else 0]
    (gradient,) = torch.autograd.grad(found.sum(), x)
    missing = -x.double().log_softmax(-1)[:, 0].expm1()  # 4e-4 at least
    torch.testing.assert_close(gradient[:, 0].double(), missing, rtol=2**-8, atol=1e-6)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("workspace", (EVERYTHING, 300 * 256 * 2), ids=("kept", "computed"))
@pytest.mark.parametrize("value", (-math.inf, -300.0), ids=str)
def test_a_target_without_mass(value: float, workspace: int, gpu: torch.device) -> None:
    """Its logits are -inf, or far below the others. Their gradients are the upstream ones, as torch's."""
    x = (torch.rand(300, 64, device=gpu) + 0.5).to(torch.bfloat16)
    weight = (torch.randn(520, 64, device=gpu) / 8).to(torch.bfloat16)
    weight[7] = value
    target, upstream = torch.full((300,), 7, device=gpu), torch.randn(300, device=gpu)
    ours, exact = weight.clone().requires_grad_(), weight.double().requires_grad_()
    with Kept() as kept:
        found = mr.linear_log_probs(x, ours, target, workspace=workspace).log_probs
    assert kept.classes == [520 if workspace == EVERYTHING else 0]
    (gradient,) = torch.autograd.grad(found, ours, upstream)
    log_shares = (x.double() @ exact.T).log_softmax(-1)[:, 7]
    (expected,) = torch.autograd.grad(log_shares, exact, upstream.double())
    torch.testing.assert_close(
        gradient.double(), expected, rtol=2**-6, atol=2**-7 * float(expected.abs().max())
    )


@pytest.mark.tiers("sm90")
def test_memory_beside_kept_weights(gpu: torch.device) -> None:
    """Between the passes the workspace; at the peak also the gradients, sums of the rows' and their copy."""
    inputs = cross_entropy_inputs(4096, 32000, 2048, dtype=torch.bfloat16, device=gpu)
    x, weight = inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()
    call = {**inputs, "workspace": 64 << 20}
    mr.linear_log_probs(**call).log_probs.sum().backward()
    x.grad = weight.grad = None
    before = reset_peak()
    log_probs = mr.linear_log_probs(**call).log_probs
    assert 64 << 20 <= requested() - before < 66 << 20
    log_probs.sum().backward()
    gradients = 2 * (x.numel() + weight.numel())
    assert peak() - before < gradients + 6 * x.numel() + (68 << 20)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("alone", range(3))
def test_gradient_of_each_result_alone(alone: int, dtype: torch.dtype, gpu: torch.device) -> None:
    upstream = [torch.randn(513, device=gpu) if i == alone else None for i in range(3)]
    options = {"entropy": True, "temperature": 0.8}
    for bias in (True, False):
        inputs = inputs_of("ragged", dtype, gpu, bias=bias)
        check_operator("linear_log_probs", inputs, options, upstream=upstream)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("classes", (257, 1111, 70001))
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
def test_top1_is_the_least_among_equals(
    bias: bool, classes: int, dtype: torch.dtype, tier: str, gpu: torch.device
) -> None:
    """Logits are integers: exact in every dtype, and many are equal, in one tile and in several."""
    place: Any = {"dtype": dtype, "device": gpu}
    x, weight = integers(300, 64, **place), integers(classes, 64, **place)
    logits = x.float() @ weight.float().T
    first = (logits == logits.max(-1, keepdim=True).values).int().argmax(-1)
    target, before = torch.zeros(300, dtype=torch.int64, device=gpu), mr._C.path_counts()
    zeros = torch.zeros(classes, **place) if bias else None
    found = mr.linear_log_probs(x, weight, target, bias=zeros, top1=True)
    assert found.top1 is not None and torch.equal(found.top1, first)
    forward = "simt" if bias and tier == "sm80" else tier
    assert ran(before) == {f"log_probs_forward/cuda/{forward}/{name_of(dtype)}"}


def test_top1_changes_nothing_else(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    found, plain = (mr.linear_log_probs(**inputs, entropy=True, top1=top) for top in (True, False))
    for ours, theirs in zip((found.log_probs, found.entropy, found.lse), plain[:2] + plain[3:], strict=True):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("ignored", (0.3, 0.97, 1.0))
@pytest.mark.parametrize("size", ("one_row", "one_tile", "ragged"))
def test_ignored_targets(size: str, ignored: float, dtype: torch.dtype, gpu: torch.device) -> None:
    """Results 0, top1 -1 and no gradient, whatever the row and its temperature hold."""
    inputs = inputs_of(size, dtype, gpu, ignored=ignored)
    skipped = inputs["target"] == -100
    inputs["x"][skipped] = torch.nan
    each = torch.where(skipped, -1.0, 0.8)
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]
    found = mr.linear_log_probs(**inputs, temperature=each, **WITH_ALL)
    for result, expected in zip(found, (0, 0, -1, 0), strict=True):
        assert result is not None and (result[skipped] == expected).all() and not result.isnan().any()
    assert found.entropy is not None
    dx, dweight = torch.autograd.grad((found.log_probs + found.entropy + found.lse).sum(), leaves)
    assert not dx[skipped].any() and dx.isfinite().all() and dweight.isfinite().all()


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("size", ("one_tile", "ragged"))
def test_garbage_beside_kept_weights(size: str, gpu: torch.device, from_weights: list[int]) -> None:
    inputs = inputs_of(size, torch.bfloat16, gpu, ignored=0.4)
    skipped, found = inputs["target"] == -100, []
    for held in (0.0, torch.nan):
        x = inputs["x"].masked_fill(skipped[:, None], held).requires_grad_()
        weight = inputs["weight"].clone().requires_grad_()
        mr.linear_log_probs(x, weight, inputs["target"], workspace=EVERYTHING).log_probs.sum().backward()
        assert x.grad is not None and not x.grad[skipped].any()
        found.append({"x": x.grad, "weight": weight.grad})
    assert_same_bits(*found)
    assert from_weights == [SIZES[size][1]] * 2


def test_rows_that_have_no_result(gpu: torch.device) -> None:
    """A target out of range, a temperature of 0, NaN in x: NaN in that row alone."""
    inputs = inputs_of("ragged", torch.bfloat16, gpu, ignored=0)
    each = torch.ones(513, device=gpu)
    inputs["target"][7], each[70], inputs["x"][300, 5] = 1111, 0.0, math.nan
    found = mr.linear_log_probs(**inputs, temperature=each, **WITH_ALL)
    assert found.log_probs.isnan().nonzero().flatten().tolist() == [7, 70, 300]
    assert found.lse.isnan().nonzero().flatten().tolist() == [70, 300]
    assert found.top1 is not None and (found.top1 == -1).nonzero().flatten().tolist() == [70, 300]


def test_logits_far_from_zero(gpu: torch.device) -> None:
    """They are x: weights are 0 and 1. A level costs the entropy no digits but those that it costs x."""
    x = (torch.randn(300, 520, device=gpu) + 300).to(torch.bfloat16).requires_grad_()
    eye, target = torch.eye(520, dtype=torch.bfloat16, device=gpu), torch.arange(300, device=gpu)
    found = mr.linear_log_probs(x, eye, target, entropy=True)
    exact = x.double().log_softmax(-1)
    entropy = -(exact.exp() * exact).sum(-1)
    assert found.entropy is not None
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=0, atol=2e-5)
    gradients = [torch.autograd.grad(y.sum(), x)[0].float() for y in (found.entropy, entropy)]
    torch.testing.assert_close(*gradients, rtol=2**-6, atol=1e-3 * float(gradients[1].abs().max()))


@pytest.mark.parametrize("each", (False, True), ids=("number", "tensor"))
def test_captured_in_a_graph(each: bool, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    temperature = torch.rand(513, device=gpu) + 0.5 if each else 0.7
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]

    def step() -> tuple[torch.Tensor, ...]:
        found = mr.linear_log_probs(**inputs, temperature=temperature, **WITH_ALL)
        assert found.entropy is not None and found.top1 is not None
        gradients = torch.autograd.grad(found.log_probs.sum() + found.entropy.square().sum(), leaves)
        return found.log_probs.detach(), found.entropy.detach(), found.top1, *gradients

    check_captured(step)


def test_gradients_have_the_same_bits_again(gpu: torch.device) -> None:
    """With one workspace; another one makes other slices."""
    inputs = inputs_of("ragged", torch.float16, gpu)
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]
    for workspace in (513 * 256 * 2, 1 << 26):
        runs = [
            torch.autograd.grad(mr.linear_log_probs(**inputs, workspace=workspace).log_probs.sum(), leaves)
            for _ in range(3)
        ]
        for run in runs[1:]:
            assert all(map(torch.equal, run, runs[0]))
