"""Soft targets of linear_cross_entropy, against the rule of tolerance.py and torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from soft_targets import soft_inputs
from specimens import DTYPES, Inputs, class_weights, name_of
from tolerance import check_operator
from torch import Tensor

import monoidreduce as mr

PER_TOKEN: dict[str, Any] = {"reduction": "none", "return_lse": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "z_loss": {"z_loss": 0.05},
    "softcap": {"softcap": 3.0},
    "all": {"z_loss": 0.01, "softcap": 6.0, "logit_scale": -1.3},
}


def check(inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """Without the count of launches: the kernels are those of log-probabilities."""
    options = {**PER_TOKEN, **options}
    return check_operator("linear_cross_entropy", inputs, options, function=mr.linear_cross_entropy)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    check(soft_inputs(dtype=dtype, device=device, bias=bias), **options)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
def test_accuracy(dtype: torch.dtype, device: torch.device) -> None:
    check(soft_inputs(400, 513, 64, 16, dtype=dtype, device=device))


@pytest.mark.parametrize("classes, targets", ((2, 3), (33, 1), (257, 64), (1031, 2), (30, 100)))
@pytest.mark.parametrize("rows", (1, 33))
def test_sizes(rows: int, classes: int, targets: int, device: torch.device) -> None:
    check(soft_inputs(rows, classes, 19, targets, dtype=torch.float32, device=device))


def test_one_class(device: torch.device) -> None:
    """Its log-probability is 0 but for the order in which a dot product is summed."""
    loss = mr.linear_cross_entropy(**soft_inputs(33, 1, targets=2, dtype=torch.float32, device=device))
    assert loss.abs() < 1e-5


@pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
def test_reductions_and_class_weights(reduction: str, device: torch.device) -> None:
    inputs = soft_inputs((4, 30), dtype=torch.float64, device=device)
    weights = class_weights(67, dtype=torch.float64, device=device)
    for options in ({}, {"class_weight": weights}):
        check(inputs, reduction=reduction, return_lse=False, **options)


def test_values_are_those_of_torch(device: torch.device) -> None:
    """torch's loss against probabilities of all classes, which are made of the few."""
    inputs = soft_inputs(40, dtype=torch.float64, device=device, bias=True, ignored=0.2)
    target, probs = inputs["target"], inputs["target_probs"]
    weights = class_weights(67, dtype=torch.float64, device=device)
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight", "bias", "target_probs")]
    used = target != -100
    whole = probs.new_zeros(40, 67).scatter_add(1, target.clamp(min=0), torch.where(used, probs, 0))
    logits = torch.nn.functional.linear(*leaves[:3])
    for weight in (None, weights):
        expected = torch.nn.functional.cross_entropy(logits, whole, weight, reduction="none")
        ours = mr.linear_cross_entropy(**inputs, class_weight=weight, reduction="none")
        torch.testing.assert_close(ours, expected)
        upstream = torch.randn_like(ours)
        of_torch = torch.autograd.grad(expected, leaves, upstream, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(ours, leaves, upstream), of_torch)
    some = used.any(1)
    mean = mr.linear_cross_entropy(**inputs)
    expected = torch.nn.functional.cross_entropy(logits, whole, reduction="none")
    torch.testing.assert_close(mean, expected[some].mean())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_one_target_of_probability_1_is_a_class_index(dtype: torch.dtype, device: torch.device) -> None:
    inputs = soft_inputs(60, targets=1, dtype=dtype, device=device)
    inputs["target_probs"].fill_(1.0)
    soft = mr.linear_cross_entropy(**inputs, z_loss=0.1)
    hard = mr.linear_cross_entropy(inputs["x"], inputs["weight"], inputs["target"][:, 0], z_loss=0.1)
    torch.testing.assert_close(soft, hard, rtol=1e-6, atol=1e-6)


def test_equal_targets_add_up(device: torch.device) -> None:
    inputs = soft_inputs(50, targets=4, dtype=torch.float64, device=device, ignored=0)
    inputs["target"][:, 1:] = inputs["target"][:, :1]
    inputs["target"][25:, 3] = 5
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight", "target_probs")]
    found = check(inputs)
    ours = mr.linear_cross_entropy(**inputs, reduction="sum")
    gradients = torch.autograd.grad(ours, leaves)
    torch.testing.assert_close(gradients[2][:, 0], gradients[2][:, 1])
    assert found["out0"].isfinite().all()


def test_ignored_tokens(device: torch.device) -> None:
    """No loss and no gradient, whatever the row and its probabilities hold; return_lse gives their lse."""
    inputs = soft_inputs(30, dtype=torch.float32, device=device, ignored=0, ignore_index=3)
    inputs["target"][inputs["target"] == 3] = 4
    inputs["target"][:10] = 3
    inputs["target_probs"][:10] = math.nan
    lse = mr.linear_cross_entropy(**inputs, ignore_index=3, return_lse=True)[1]
    torch.testing.assert_close(lse, (inputs["x"] @ inputs["weight"].T).logsumexp(1))
    inputs["x"][:5] = math.nan
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight", "target_probs")]
    loss = mr.linear_cross_entropy(**inputs, ignore_index=3, reduction="none", z_loss=0.1)
    assert not loss[:10].any() and loss[10:].all()
    gradients = torch.autograd.grad(loss.sum(), leaves)
    assert not gradients[0][:10].any() and not gradients[2][:10].any()
    assert all(g.isfinite().all() for g in gradients)
    none = {**inputs, "target": torch.full_like(inputs["target"], 3)}
    assert mr.linear_cross_entropy(**none, ignore_index=3) == 0


@pytest.mark.parametrize("rows, classes, targets", ((0, 7, 2), (4, 7, 0), (4, 0, 2), (0, 0, 0)))
def test_nothing(rows: int, classes: int, targets: int, device: torch.device) -> None:
    inputs = soft_inputs(
        rows, classes, 5, targets, dtype=torch.float32, device=device, ignored=float(not classes)
    )
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight", "target_probs")]
    loss = mr.linear_cross_entropy(**inputs)
    assert loss == 0 or (rows and classes and targets)
    for gradient, of in zip(torch.autograd.grad(loss, leaves), leaves, strict=True):
        assert gradient.shape == of.shape and not gradient.any()


def test_target_out_of_range(device: torch.device) -> None:
    inputs = soft_inputs(5, 7, dtype=torch.float32, device=device, ignored=0)
    for wrong in (7, -1):
        inputs["target"][2, 1] = wrong
        if device.type == "cpu":
            with pytest.raises(IndexError, match=rf"target\[2, 1\]: expected a class in \[0, 7\).*{wrong}"):
                mr.linear_cross_entropy(**inputs)
        else:
            loss = mr.linear_cross_entropy(**inputs, reduction="none")
            assert loss.isnan().nonzero().tolist() == [[2]]


@pytest.mark.parametrize("level", (300.0, -3000.0))
def test_a_constant_in_all_logits_of_a_row(level: float, device: torch.device) -> None:
    check(soft_inputs(64, 257, 32, dtype=torch.float32, device=device, level=level), return_lse=False)


def test_gradcheck(device: torch.device) -> None:
    place: Any = {"dtype": torch.float64, "device": device}
    x, weight, bias = torch.randn(4, 3, **place), torch.randn(6, 3, **place), torch.randn(6, **place)
    target = torch.tensor([[0, 5, 0], [5, -100, 1], [-100] * 3, [2, 2, 2]], device=device)
    probs = torch.rand(4, 3, **place)

    def call(x: Tensor, weight: Tensor, bias: Tensor, probs: Tensor) -> Tensor:
        options: Any = {"bias": bias, "target_probs": probs, "softcap": 3.0, "z_loss": 0.1}
        return mr.linear_cross_entropy(x, weight, target, **options)

    assert torch.autograd.gradcheck(call, tuple(t.requires_grad_() for t in (x, weight, bias, probs)))


def test_compiled(device: torch.device) -> None:
    inputs = soft_inputs(33, 70, dtype=torch.float32, device=device)
    compiled = torch.compile(mr.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    check_operator("linear_cross_entropy", inputs, PER_TOKEN, function=compiled)


def test_autocast(device: torch.device) -> None:
    inputs = soft_inputs(33, 70, 16, dtype=torch.float32, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        ours = mr.linear_cross_entropy(**inputs)
    halves = {**inputs, "x": inputs["x"].bfloat16(), "weight": inputs["weight"].bfloat16()}
    torch.testing.assert_close(ours, mr.linear_cross_entropy(**halves))


def test_the_module_takes_them(device: torch.device) -> None:
    inputs = soft_inputs(33, 70, 16, dtype=torch.float32, device=device)
    found = mr.nn.LinearCrossEntropyLoss(z_loss=0.1)(**inputs)
    assert torch.equal(found, mr.linear_cross_entropy(**inputs, z_loss=0.1))


def test_teacher_by_its_likeliest_classes(device: torch.device) -> None:
    """With all classes as targets it is the cross entropy of linear_distillation."""
    place: Any = {"dtype": torch.float64, "device": device}
    x, weight, teacher = torch.randn(20, 8, **place), torch.randn(30, 8, **place), torch.randn(30, 8, **place)
    shares, classes = (x @ teacher.T).softmax(1).topk(30)
    ours = mr.linear_cross_entropy(x, weight, classes, target_probs=shares)
    torch.testing.assert_close(ours, mr.linear_distillation(x, weight, x, teacher))


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"label_smoothing": 0.1}, ValueError, "label_smoothing: expected 0 beside target_probs"),
    ({"target_probs": torch.zeros(9, 4)}, ValueError, r"target_probs: expected shape \[9, 5\] as target"),
    ({"target_probs": torch.zeros(9, 5).int()}, TypeError, "target_probs: expected float64, float32"),
    ({"target": torch.zeros(9).long()}, ValueError, r"target: expected shape \[9, 'K'\] beside target_probs"),
    ({"target": torch.zeros(9, 5)}, TypeError, "target: expected class indices of an integer dtype"),
    ({"class_weight": torch.ones(3)}, ValueError, r"class_weight: expected shape \[V=67\]"),
    ({"reduction": "max"}, ValueError, "reduction: expected"),
]


@pytest.mark.parametrize("wrong, kind, text", WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_arguments(wrong: dict[str, Any], kind: type[Exception], text: str) -> None:
    inputs = soft_inputs(9, dtype=torch.float32, device=torch.device("cpu"), ignored=0)
    with pytest.raises(kind, match=text):
        mr.linear_cross_entropy(**{**inputs, **wrong})


def test_the_op_is_well_registered(device: torch.device) -> None:
    inputs = soft_inputs(9, 70, 8, dtype=torch.float32, device=device, bias=True)
    x, weight, bias = (inputs[name].requires_grad_() for name in ("x", "weight", "bias"))
    op = torch.ops.monoidreduce.linear_target_logits.default
    options = (1.0, 3.0, 0.7, 0, -1, False, False, True, 1 << 20)
    target = inputs["target"].clamp(min=-1)
    for temperatures in (None, 0.5 + torch.rand(9, device=device)):
        torch.library.opcheck(op, (x, weight, bias, target, temperatures, *options))
