"""linear_log_probs: sizes, options, temperatures and gradients, against the rule of tolerance.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from specimens import DTYPES, WITH_ALL, Inputs, cross_entropy_inputs, integers, name_of, normal
from tolerance import check_operator, upstream_gradient
from torch import Tensor

import monoidreduce as mr

ROWS = (0, 1, 7, 8, 9, 31, 33, 65, 129, 257)
CLASSES = (2, 3, 15, 16, 17, 33, 64, 65, 119, 121, 129, 257, 481, 1031)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 2.5},
    "cold": {"temperature": 0.3},
    "softcap": {"softcap": 3.0},
    "logit_scale_negative": {"logit_scale": -1.5},
    "all": {"temperature": 0.7, "softcap": 6.0, "logit_scale": 1.3},
}


def check(inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    return check_operator("linear_log_probs", inputs, {**WITH_ALL, **options})


def temperatures(inputs: Inputs) -> Tensor:
    shape, device = inputs["target"].shape, inputs["x"].device
    return 0.4 + 2 * torch.rand(shape, device=device)


def definition(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, divisor: float | Tensor = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """log_probs, entropy and lse of torch, in the dtype of x, where no target is ignored."""
    logits = torch.nn.functional.linear(x, weight, bias)
    scores = logits / (divisor[..., None] if isinstance(divisor, Tensor) else divisor)
    shares = scores.log_softmax(-1)
    log_probs = shares.gather(-1, target[..., None])[..., 0]
    return log_probs, -(shares.exp() * shares).sum(-1), scores.logsumexp(-1)


@pytest.mark.isa
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("classes", (33, 300))
def test_number_of_rows(rows: int, classes: int, device: torch.device) -> None:
    check(cross_entropy_inputs(rows, classes, dtype=torch.float32, device=device))


@pytest.mark.isa
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("rows", (5, 65))
def test_number_of_classes(rows: int, classes: int, device: torch.device) -> None:
    check(cross_entropy_inputs(rows, classes, dtype=torch.float32, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_one_class(dtype: torch.dtype, device: torch.device) -> None:
    """It has probability 1: results and gradients are 0, except lse and its gradients."""
    inputs = cross_entropy_inputs(9, 1, dtype=dtype, device=device, draw=integers, ignored=0)
    found = check_operator("linear_log_probs", inputs, WITH_ALL, exact=True)
    assert not found["out0"].any() and not found["out1"].any()
    assert (mr.linear_log_probs(**inputs, top1=True).top1 == 0).all()


@pytest.mark.parametrize("width", (0, 1, 3, 8, 17, 65, 131))
def test_width(width: int, device: torch.device) -> None:
    inputs = cross_entropy_inputs(34, 45, width, dtype=torch.float32, device=device, bias=True)
    check(inputs, logit_scale=0.3)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options: dict[str, Any], bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    check(cross_entropy_inputs(dtype=dtype, device=device, bias=bias), **options)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_accuracy(options: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Sizes at which the whole rule applies to x and weight, in float32 too."""
    check(cross_entropy_inputs(400, 513, 64, dtype=dtype, device=device, bias=True), **options)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("softcap", (None, 4.0))
def test_temperature_of_each_token(softcap: float | None, dtype: torch.dtype, device: torch.device) -> None:
    inputs = cross_entropy_inputs((3, 50), dtype=dtype, device=device, bias=softcap is None)
    check(inputs, temperature=temperatures(inputs), softcap=softcap)


def test_a_number_is_the_temperature_of_all_tokens(device: torch.device) -> None:
    inputs = cross_entropy_inputs(40, dtype=torch.float32, device=device)
    one, each = (
        mr.linear_log_probs(**inputs, **WITH_ALL, temperature=t)
        for t in (0.5, torch.full((40,), 0.5, device=device))
    )
    for ours, theirs in zip(one, each, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("alone", range(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gradient_of_each_result_alone(alone: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = cross_entropy_inputs(60, dtype=dtype, device=device, bias=True)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    like = torch.empty(60, dtype=statistics, device=device)
    upstream = [upstream_gradient(like) if i == alone else None for i in range(3)]
    check_operator("linear_log_probs", inputs, {**WITH_ALL, "temperature": 0.8}, upstream=upstream)


@pytest.mark.parametrize("layout", ("sliced", "expanded", "contiguous"))
@pytest.mark.parametrize("needed", (("x",), ("weight",), ("bias",), ("weight", "bias")), ids=str)
def test_upstream_layouts_and_needed(layout: str, needed: tuple[str, ...], device: torch.device) -> None:
    inputs = cross_entropy_inputs(60, dtype=torch.float32, device=device, bias=True)
    check_operator("linear_log_probs", inputs, WITH_ALL, differentiate=needed, upstream=layout)


def test_gradcheck(device: torch.device) -> None:
    x, weight, bias = (normal(*s, dtype=torch.float64, device=device) for s in ((4, 3), (6, 3), (6,)))
    target = torch.tensor([0, 5, -100, 2], device=device)

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        found = mr.linear_log_probs(x, weight, target, bias=bias, entropy=True, softcap=3.0, temperature=0.6)
        assert found.entropy is not None
        return found.log_probs, found.entropy, found.lse

    tensors = tuple(t.requires_grad_() for t in (x, weight, bias))
    assert torch.autograd.gradcheck(call, tensors)


def test_values_are_those_of_torch(device: torch.device) -> None:
    """The values come from torch, not from our own reference."""
    place: Any = {"dtype": torch.float64, "device": device}
    inputs = cross_entropy_inputs((4, 9), 67, **place, bias=True, ignored=0)
    each = temperatures(inputs).double()
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight", "bias")]
    found = mr.linear_log_probs(**inputs, temperature=each, **WITH_ALL)
    expected = definition(**inputs, divisor=each)
    ours = (found.log_probs, found.entropy, found.lse)
    upstream = [torch.randn_like(y) for y in expected]
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, leaves, upstream) for y in (ours, expected)))
    logits = torch.nn.functional.linear(*leaves)
    assert found.top1 is not None and torch.equal(found.top1, logits.argmax(-1))


def test_only_what_is_asked_for_is_returned(device: torch.device) -> None:
    inputs = cross_entropy_inputs(9, dtype=torch.float32, device=device)
    plain, full = mr.linear_log_probs(**inputs), mr.linear_log_probs(**inputs, **WITH_ALL)
    assert plain.entropy is None and plain.top1 is None and type(plain) is mr.LogProbs
    assert torch.equal(plain.log_probs, full.log_probs) and torch.equal(plain.lse, full.lse)
    assert full.top1 is not None and full.top1.dtype == torch.int64


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_top1_is_the_least_among_equals(dtype: torch.dtype, device: torch.device) -> None:
    """Integers, so that logits are exact in every dtype and many are equal, in one tile and across tiles."""
    x, weight = integers(70, 8, dtype=dtype, device=device), integers(700, 8, dtype=dtype, device=device)
    target = torch.zeros(70, dtype=torch.int64, device=device)
    logits = x.double() @ weight.double().T
    first = (logits == logits.max(-1, keepdim=True).values).int().argmax(-1)
    for options in ({}, {"temperature": 0.37}, {"softcap": 50.0}):
        found = mr.linear_log_probs(x, weight, target, top1=True, **options).top1  # type: ignore[arg-type]
        assert found is not None and torch.equal(found, first)


def test_top1_follows_logits_that_16_bits_would_round(device: torch.device) -> None:
    place: Any = {"dtype": torch.bfloat16, "device": device}
    x = torch.tensor([[16.0, 0.0625]], **place)  # logits 256, 256.0625, 256: alike in bfloat16
    weight = torch.tensor([[16.0, 0.0], [16.0, 1.0], [16.0, 0.0]], **place)
    found = mr.linear_log_probs(x, weight, torch.tensor([0], device=device), top1=True)
    assert found.top1 is not None and found.top1.tolist() == [1]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_ignored_targets(dtype: torch.dtype, device: torch.device) -> None:
    """log_probs, entropy and lse 0, top1 -1 and no gradient, whatever the row and its temperature hold."""
    inputs = cross_entropy_inputs(30, dtype=dtype, device=device, ignored=0.5, ignore_index=3)
    ignored = inputs["target"] == 3
    inputs["x"][ignored] = torch.nan
    each = torch.where(ignored, -1.0, 0.8)
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]
    found = mr.linear_log_probs(**inputs, ignore_index=3, temperature=each, **WITH_ALL)
    for result, expected in zip(found, (0, 0, -1, 0), strict=True):
        assert result is not None and (result[ignored] == expected).all() and not result.isnan().any()
    assert found.entropy is not None
    dx, dweight = torch.autograd.grad((found.log_probs + found.entropy + found.lse).sum(), leaves)
    assert not dx[ignored].any() and dx[~ignored].any() and dweight.isfinite().all()
    none = mr.linear_log_probs(leaves[0], leaves[1], torch.full_like(inputs["target"], -100), **WITH_ALL)
    assert not torch.autograd.grad(none.log_probs.sum(), leaves)[1].any()


def test_target_out_of_range(device: torch.device) -> None:
    inputs = cross_entropy_inputs(5, 7, dtype=torch.float32, device=device, ignored=0)
    for wrong in (7, -1):
        inputs["target"][2] = wrong
        if device.type == "cpu":
            with pytest.raises(IndexError, match=rf"target\[2\]: expected a class in \[0, 7\).*got {wrong}"):
                mr.linear_log_probs(**inputs)
        else:
            found = mr.linear_log_probs(**inputs, entropy=True)
            assert found.log_probs.isnan().nonzero().tolist() == [[2]]
            assert found.entropy is not None and found.entropy.isfinite().all() and found.lse.isfinite().all()


@pytest.mark.isa
@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_not_finite(bad: float, device: torch.device) -> None:
    """NaN reaches its own row alone; a logit of +inf is the log-sum-exp."""
    inputs = cross_entropy_inputs(40, 130, 8, dtype=torch.float32, device=device, ignored=0)
    bias = torch.zeros(130, device=device)
    inputs["x"][4] = 0
    inputs["target"][4] = 0
    if math.isnan(bad):
        inputs["x"][4, 3] = bad
    else:
        bias[70] = bad
    found = mr.linear_log_probs(**inputs, bias=bias, **WITH_ALL)
    assert found.entropy is not None and found.top1 is not None
    if math.isnan(bad):
        others = torch.arange(40, device=device) != 4
        for result in (found.log_probs, found.entropy, found.lse):
            assert torch.equal(result.isfinite(), others)
        assert torch.equal(found.top1 == -1, ~others)
    else:
        assert (found.lse == bad).all() and found.entropy.isnan().all() and (found.top1 == 70).all()
        assert found.log_probs[4] == -math.inf
        bias.requires_grad_()
        lse = mr.linear_log_probs(**inputs, bias=bias).lse
        (gradient,) = torch.autograd.grad(lse.sum(), bias)  # as torch's: NaN there, 0 elsewhere
        assert gradient.isnan().nonzero().tolist() == [[70]] and gradient.nansum() == 0


def test_logits_of_minus_infinity(device: torch.device) -> None:
    """They have no probability, no part in the entropy and no gradient; a row of them is an empty fold."""
    x = torch.randn(6, 4, device=device, requires_grad=True)
    weight = torch.randn(50, 4, device=device, requires_grad=True)
    target, bias = torch.full((6,), 7, device=device), torch.zeros(50, device=device)
    bias[20:] = -math.inf
    found = mr.linear_log_probs(x, weight, target, bias=bias, **WITH_ALL)
    expected = definition(x, weight[:20], target)
    ours = (found.log_probs, found.entropy, found.lse)
    torch.testing.assert_close(ours, expected)
    total, other = (sum(y.sum() for y in results) for results in (ours, expected))
    torch.testing.assert_close(
        *(torch.autograd.grad(y, (x, weight), retain_graph=True) for y in (total, other))
    )
    empty = mr.linear_log_probs(x, weight, target, bias=bias - math.inf, **WITH_ALL)
    assert empty.entropy is not None and not empty.entropy.any() and (empty.lse == -math.inf).all()
    gradients = torch.autograd.grad(empty.entropy.sum() + empty.lse.sum(), (x, weight))
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("level", (0.0, 300.0, -300.0))
def test_a_level_of_all_logits_costs_the_entropy_no_digits(level: float, device: torch.device) -> None:
    inputs = cross_entropy_inputs(64, 257, dtype=torch.float32, device=device, ignored=0, level=level)
    found = mr.linear_log_probs(**inputs, entropy=True)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    _, entropy, _ = definition(**wide)
    assert found.entropy is not None
    # Scores of 300 are rounded by 2^-16, as are their differences.
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-5 + abs(level) * 2**-22)


def test_certain_tokens(device: torch.device) -> None:
    """One probability is 1: entropy, log_probs and gradients are 0, not less or more by rounding."""
    x = 200 * torch.eye(8, device=device)  # the others' are 0 in float32, also among its smallest numbers
    found = mr.linear_log_probs(
        x.requires_grad_(), torch.eye(8, device=device), torch.arange(8, device=device), **WITH_ALL
    )
    assert found.entropy is not None and not found.log_probs.any() and not found.entropy.any()
    (gradient,) = torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), x)
    assert not gradient.any()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"temperature": 0.0}, ValueError, "temperature: expected a finite number > 0, got 0.0"),
    ({"temperature": "1"}, TypeError, "temperature: expected a finite number > 0, got '1'"),
    ({"temperature": torch.ones(4)}, ValueError, r"temperature: expected shape \[9\] as x is \[9, 19\]"),
    ({"temperature": torch.ones(9).int()}, TypeError, "temperature: expected float64, float32"),
    ({"temperature": torch.ones(9, requires_grad=True)}, ValueError, "temperature: .* requires no gradient"),
    ({"temperature": torch.zeros(9)}, ValueError, r"temperature\[0\]: expected a number from 2\^-100"),
    ({"temperature": torch.full((9,), torch.nan)}, ValueError, r"temperature\[0\]: .* got nan"),
    ({"top1": 1}, TypeError, "top1: expected True or False, got 1"),
    ({"entropy": None}, TypeError, "entropy: expected True or False, got None"),
    ({"softcap": -1.0}, ValueError, "softcap: expected a finite number > 0"),
    ({"bias": torch.ones(3)}, ValueError, r"bias: expected shape \[V=67\]"),
    ({"ignore_index": 0.5}, TypeError, "ignore_index: expected an int"),
    ({"workspace": -1}, ValueError, "workspace: expected None or an int >= 0"),
    ({"ranks": 5}, TypeError, "ranks: expected a monoidreduce.Ranks, a ProcessGroup or"),
    ({"reduction": "mean"}, TypeError, "unexpected keyword argument 'reduction'"),
]


@pytest.mark.parametrize("wrong, kind, text", WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_arguments(wrong: dict[str, Any], kind: type[Exception], text: str) -> None:
    inputs = cross_entropy_inputs(9, dtype=torch.float32, device=torch.device("cpu"), ignored=0)
    with pytest.raises(kind, match=text):
        mr.linear_log_probs(**inputs, **wrong)


def test_workspace_changes_no_bits_on_the_cpu() -> None:
    inputs = cross_entropy_inputs(33, 300, dtype=torch.float32, device=torch.device("cpu"))
    inputs["x"].requires_grad_()
    gradients = [
        torch.autograd.grad(mr.linear_log_probs(**inputs, workspace=size).log_probs.sum(), inputs["x"])[0]
        for size in (0, 1 << 20)
    ]
    assert torch.equal(*gradients)


def test_policy_gradients_of_torch(device: torch.device) -> None:
    """The clipped objective of PPO and GRPO with an entropy bonus, next to torch's."""
    place: Any = {"dtype": torch.float64, "device": device}
    inputs = cross_entropy_inputs((2, 20), 67, **place, ignored=0)
    old, advantage = -4 + torch.rand(2, 20, **place), torch.randn(2, 20, **place)
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]

    def objective(log_probs: Tensor, entropy: Tensor) -> Tensor:
        ratio = (log_probs - old).exp()
        return (
            -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            - 0.01 * entropy.mean()
        )

    found = mr.linear_log_probs(**inputs, entropy=True, temperature=0.9)
    assert found.entropy is not None
    ours = objective(found.log_probs, found.entropy)
    theirs = objective(*definition(**inputs, divisor=0.9)[:2])
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(y, leaves) for y in (ours, theirs)))
