"""Distillation with biases, the Jensen-Shannon divergence and hard labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from specimens import DTYPES, Inputs, distillation_inputs, name_of, normal
from tolerance import check_operator, check_pooled
from torch import Tensor

import monoidreduce as mr

PER_TOKEN: dict[str, Any] = {"reduction": "none", "teacher_grad": True}
LOSSES = ("cross_entropy", "forward_kl", "reverse_kl", "jsd")


def check(inputs: Inputs, options: dict[str, Any], **how: Any) -> dict[str, Tensor]:
    return check_operator("linear_distillation", inputs, options, function=mr.linear_distillation, **how)


def check_draws_of(draw: Callable[[], Inputs], options: dict[str, Any]) -> None:
    """Of float32 results few elements have the largest errors: eight draws together."""
    draws = 8 if draw()["x"].dtype == torch.float32 else 1
    check_pooled("linear_distillation", draw, options, function=mr.linear_distillation, draws=draws)


def inputs_with(dtype: torch.dtype, device: torch.device, *more: str, **sizes: Any) -> Inputs:
    """more: which of bias, teacher_bias, mask and target to add. Every fifth target is ignored."""
    sizes = {"rows": 450, "width": 24, "teacher_width": 32} | sizes
    inputs = distillation_inputs(dtype=dtype, device=device, mask="mask" in more, **sizes)
    classes, leading = len(inputs["weight"]), inputs["x"].shape[:-1]
    for name in {"bias", "teacher_bias"}.intersection(more):
        inputs[name] = normal(classes, dtype=dtype, device=device)
    if "target" in more:
        inputs["target"] = torch.randint(0, classes, leading, device=device)
        inputs["target"].view(-1)[::5] = -100
    return inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "more", (("bias",), ("teacher_bias", "mask"), ("bias", "teacher_bias", "target")), ids="-".join
)
def test_biases(more: tuple[str, ...], loss: str, dtype: torch.dtype, device: torch.device) -> None:
    options = PER_TOKEN | {"loss": loss, "temperature": 1.5}
    check_draws_of(partial(inputs_with, dtype, device, *more), options)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("beta", (0.1, 0.5, 0.9))
def test_jsd(beta: float, dtype: torch.dtype, device: torch.device) -> None:
    options = PER_TOKEN | {"loss": "jsd", "beta": beta, "temperature": 0.7}
    check_draws_of(partial(inputs_with, dtype, device, "mask"), options)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("hard_weight", (0.0, 0.3, 1.0))
def test_hard_labels(hard_weight: float, loss: str, dtype: torch.dtype, device: torch.device) -> None:
    options = PER_TOKEN | {"loss": loss, "hard_weight": hard_weight, "temperature": 2.0}
    check_draws_of(partial(inputs_with, dtype, device, "target"), options)


@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
@pytest.mark.parametrize("ignore_index", (-100, 7))
def test_reductions(ignore_index: int, reduction: str, device: torch.device) -> None:
    """Tokens count that neither the mask nor the target excludes."""
    inputs = inputs_with(torch.float32, device, "target", "mask", rows=(3, 40))
    inputs["target"][inputs["target"] == -100] = ignore_index
    options = {"loss": "jsd", "reduction": reduction, "hard_weight": 0.5, "ignore_index": ignore_index}
    check(inputs, options, differentiate=["x", "weight"])


@pytest.mark.parametrize("loss", LOSSES)
def test_soft_losses_read_no_target(loss: str, device: torch.device) -> None:
    """Where a target is not ignore_index its token counts, whatever else the target is; -100 too."""
    inputs = inputs_with(torch.float32, device, "bias", rows=10)
    target = torch.tensor([-100, 7] * 5, device=device)
    options = {"loss": loss, "reduction": "none"}
    alone = mr.linear_distillation(**inputs, **options)
    found = mr.linear_distillation(**inputs, **options, target=target, ignore_index=7)
    torch.testing.assert_close(found, torch.where(target == 7, 0, alone), rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
def test_no_token_counts(reduction: str, device: torch.device) -> None:
    inputs = inputs_with(torch.float32, device, "target")
    inputs["target"].fill_(-100)
    results = check(inputs, {"loss": "jsd", "reduction": reduction, "hard_weight": 0.5}, differentiate=["x"])
    assert not results["out0"].any() and not results["d_x"].any()


@pytest.mark.parametrize("loss", ("forward_kl", "reverse_kl", "jsd"))
@pytest.mark.parametrize("teacher_level", (0, 100, -1000))
@pytest.mark.parametrize("level", (0, 10, 1000))
def test_levels_of_logits(level: int, teacher_level: int, loss: str, device: torch.device) -> None:
    """A constant of all logits of a row costs no digits."""

    def draw() -> Inputs:
        sizes: dict[str, Any] = {"rows": 400, "classes": 300, "width": 32, "teacher_width": 32}
        place: dict[str, Any] = {"dtype": torch.float32, "device": device}
        inputs = distillation_inputs(**sizes, **place, level=level)
        if teacher_level:
            raised = distillation_inputs(**sizes, **place, teacher_level=teacher_level)
            inputs |= {name: raised[name] for name in ("teacher_x", "teacher_weight")}
        return inputs | {"bias": torch.zeros(300, device=device)}

    check_draws_of(draw, PER_TOKEN | {"loss": loss})


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("spread", (30.0, 300.0))
def test_saturated_rows(spread: float, loss: str, device: torch.device) -> None:
    """Probabilities that underflow: 0 log 0 is 0, and gradients are finite."""
    inputs = inputs_with(torch.float32, device, "bias", "target", rows=100)
    inputs |= {name: spread * inputs[name] for name in ("x", "teacher_x")}
    leaves = [
        inputs[name].requires_grad_() for name in ("x", "weight", "teacher_x", "teacher_weight", "bias")
    ]
    found = mr.linear_distillation(**inputs, loss=loss, hard_weight=0.2, teacher_grad=True)
    assert found.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(found, leaves))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("teacher_grad", (False, True))
def test_far_apart_logits(teacher_grad: bool, loss: str, device: torch.device) -> None:
    """Logits of +-1e4, where exp(log p) underflows on one side or both."""

    def draw() -> Inputs:
        inputs = distillation_inputs(400, 70, 6, 6, dtype=torch.float32, device=device)
        inputs["x"] *= 3000
        inputs["teacher_x"] *= 5000
        return inputs | {"bias": torch.zeros(70, device=device)}

    options = {"loss": loss, "reduction": "none", "teacher_grad": teacher_grad}
    check_pooled(
        "linear_distillation",
        draw,
        options,
        differentiate=None if teacher_grad else ("x", "weight", "bias"),
        function=mr.linear_distillation,
        draws=4,
    )


@pytest.mark.parametrize("loss", ("forward_kl", "reverse_kl", "jsd"))
def test_excluded_classes(loss: str, device: torch.device) -> None:
    """A bias of -inf on both sides takes a class away."""
    inputs = inputs_with(torch.float64, device, "bias", "teacher_bias")
    fewer = {name: t[:-3] if len(t) == 67 else t for name, t in inputs.items()}
    for name in ("bias", "teacher_bias"):
        inputs[name][-3:] = -math.inf

    def run(of: Inputs) -> tuple[Tensor, ...]:
        leaves = [of[name].requires_grad_() for name in ("x", "teacher_x")]
        losses = mr.linear_distillation(**of, loss=loss, teacher_grad=True)
        return losses.detach(), *torch.autograd.grad(losses, leaves)

    torch.testing.assert_close(run(inputs), run(fewer))


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_tokens_that_do_not_count_hold_anything(value: float, device: torch.device) -> None:
    inputs = inputs_with(torch.float32, device, "target")
    expected = mr.linear_distillation(**inputs, loss="jsd", hard_weight=0.5)
    for name in ("x", "teacher_x"):
        inputs[name][::5] = value
    inputs["weight"].requires_grad_()
    found = mr.linear_distillation(**inputs, loss="jsd", hard_weight=0.5)
    torch.testing.assert_close(found, expected)
    found.backward()
    assert inputs["weight"].grad is not None and inputs["weight"].grad.isfinite().all()


def test_target_out_of_range(device: torch.device) -> None:
    inputs = inputs_with(torch.float32, device, "target")
    inputs["target"][6] = 67
    options: dict[str, Any] = {"loss": "jsd", "reduction": "none", "hard_weight": 0.5}
    if device.type == "cpu":
        with pytest.raises(IndexError, match=r"^target\[6\]: expected a class in \[0, 67\) or ignore_index"):
            mr.linear_distillation(**inputs, **options)
    else:
        losses = mr.linear_distillation(**inputs, **options)
        assert losses.isnan().nonzero().flatten().tolist() == [6]


def test_jsd_is_that_of_torch(device: torch.device) -> None:
    """The reference could share a misreading with the operator."""
    inputs = distillation_inputs(dtype=torch.float64, device=device)
    student, teacher = (
        F.log_softmax(inputs[x] @ inputs[w].T, -1)
        for x, w in (("x", "weight"), ("teacher_x", "teacher_weight"))
    )
    middle = (0.3 * teacher.exp() + 0.7 * student.exp()).log()
    expected = 0.3 * F.kl_div(middle, teacher, reduction="batchmean", log_target=True)
    expected = expected + 0.7 * F.kl_div(middle, student, reduction="batchmean", log_target=True)
    torch.testing.assert_close(mr.linear_distillation(**inputs, loss="jsd", beta=0.3), expected)


def test_compiled(device: torch.device) -> None:
    inputs = inputs_with(torch.float32, device, "bias", "target")
    compiled = torch.compile(mr.linear_distillation, fullgraph=True, backend="aot_eager")
    options: dict[str, Any] = {"loss": "jsd", "hard_weight": 0.5}
    mr.linear_distillation(**inputs, **options)
    torch.testing.assert_close(
        compiled(**inputs, **options), mr.linear_distillation(**inputs, **options), rtol=1e-6, atol=1e-6
    )


def test_module(device: torch.device) -> None:
    inputs = inputs_with(torch.float32, device, "bias", "teacher_bias", "target", "mask")
    module = mr.nn.LinearDistillationLoss(loss="jsd", beta=0.3, hard_weight=0.25)
    expected = mr.linear_distillation(**inputs, loss="jsd", beta=0.3, hard_weight=0.25)
    assert torch.equal(module(**inputs), expected)
    with pytest.raises(ValueError, match=r"^hard_weight: expected a number from 0 to 1, got 2"):
        mr.nn.LinearDistillationLoss(hard_weight=2)


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"loss": "jsd", "beta": 0.0}, r"^beta: expected a number between 0 and 1, got 0\.0$"),
        ({"loss": "jsd", "beta": 1}, r"^beta: expected a number between 0 and 1, got 1"),
        ({"hard_weight": 0.5}, r"^hard_weight: expected 0 without target, got 0\.5$"),
        ({"beta": 2.0}, r"^beta: expected a number between 0 and 1, got 2\.0$"),
        ({"loss": "js"}, "^loss: expected one of cross_entropy, forward_kl, reverse_kl, jsd"),
        ({"bias": torch.zeros(3)}, r"^bias: expected shape \[V=67\]"),
        ({"loss": "jsd", "ranks": object()}, "^ranks: expected None beside bias"),
    ),
    ids=("beta_0", "beta_1", "no_target", "beta_2", "loss", "bias", "ranks"),
)
def test_refused(options: dict[str, Any], message: str) -> None:
    inputs = distillation_inputs(dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        mr.linear_distillation(**inputs, **options)


def test_explanation() -> None:
    inputs = inputs_with(torch.float32, torch.device("cpu"), "target")
    found = mr.explain("linear_distillation", **inputs, loss="jsd", hard_weight=0.5)
    assert found.operator == "linear_distillation" and found.forward.startswith("statistics_forward/cpu/")
    assert any("monoidreduce.statistics" in reason for reason in found.reasons)
    assert "scores are not stored: there are biases or hard labels" in found.reasons
    planned = mr.explain("linear_distillation", **inputs, loss="jsd", hardware="h100")
    assert planned.forward == "statistics_fold/cuda/simt/float32"
    assert planned.backward == "statistics_row_gradient/cuda/simt/float32" and planned.deterministic
    assert any("in bfloat16, and the inputs are torch.float32" in reason for reason in planned.reasons)


def test_vmap(device: torch.device) -> None:
    """With hard labels, whose values are not read then."""
    inputs = inputs_with(torch.float64, device, "target", rows=(3, 20))
    options: dict[str, Any] = {"loss": "jsd", "hard_weight": 0.5, "reduction": "sum"}
    shared = {name: inputs.pop(name) for name in ("weight", "teacher_weight")}
    found = torch.vmap(lambda of: mr.linear_distillation(**of, **shared, **options))(inputs)
    expected = [
        mr.linear_distillation(**{name: t[i] for name, t in inputs.items()}, **shared, **options)
        for i in range(3)
    ]
    torch.testing.assert_close(found, torch.stack(expected))
