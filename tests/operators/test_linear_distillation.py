"""linear_distillation: sizes, losses, temperatures and gradients, against the rule of tolerance.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from specimens import DTYPES, distillation_inputs, integers, name_of, normal
from tolerance import check_operator

import monoidreduce as mr

KINDS = ("cross_entropy", "forward_kl", "reverse_kl")
ROWS = (0, 1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 129, 257)
CLASSES = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 257, 513, 1031)
WIDTHS = (0, 1, 3, 8, 16, 17, 64, 65, 131)
PER_TOKEN: dict[str, Any] = {"reduction": "none", "teacher_grad": True}


def _draw(classes: int) -> Any:
    """One class has probability 1 on both sides, so gradients of exactly 0."""
    return integers if classes == 1 else normal


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_number_of_rows(rows: int, kind: str, device: torch.device) -> None:
    inputs = distillation_inputs(rows, 130, dtype=torch.float32, device=device)
    check_operator("linear_distillation", inputs, PER_TOKEN | {"loss": kind})


@pytest.mark.isa
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("kind", KINDS)
def test_number_of_classes(classes: int, kind: str, device: torch.device) -> None:
    inputs = distillation_inputs(9, classes, dtype=torch.float32, device=device, draw=_draw(classes))
    check_operator("linear_distillation", inputs, PER_TOKEN | {"loss": kind}, exact=classes == 1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("side", ("width", "teacher_width"))
def test_widths(side: str, width: int, device: torch.device) -> None:
    inputs = distillation_inputs(34, 45, **{side: width}, dtype=torch.float32, device=device)
    check_operator("linear_distillation", inputs, PER_TOKEN | {"loss": "forward_kl", "temperature": 3.0})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", (0.5, 1.0, 4.0))
@pytest.mark.parametrize("mask", (False, True), ids=("all", "masked"))
def test_losses(mask: bool, temperature: float, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    inputs = distillation_inputs(dtype=dtype, device=device, mask=mask)
    results = check_operator(
        "linear_distillation", inputs, PER_TOKEN | {"loss": kind, "temperature": temperature}
    )
    if mask:
        excluded = ~inputs["mask"]
        assert all((results[name][excluded] == 0).all() for name in ("out0", "d_x", "d_teacher_x"))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "rows, classes, width, teacher_width", ((1, 513, 64, 96), (130, 257, 65, 33), (256, 1031, 32, 128))
)
def test_sizes_in_every_dtype(
    rows: int, classes: int, width: int, teacher_width: int, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = distillation_inputs(rows, classes, width, teacher_width, dtype=dtype, device=device)
    check_operator("linear_distillation", inputs, PER_TOKEN | {"loss": "reverse_kl", "temperature": 2.0})


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
def test_accuracy(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Sizes at which the whole rule applies to every gradient, in float32 too."""
    inputs = distillation_inputs(400, 513, 64, 48, dtype=dtype, device=device, mask=True)
    check_operator("linear_distillation", inputs, PER_TOKEN | {"loss": kind, "temperature": 1.5})


@pytest.mark.isa
@pytest.mark.parametrize("teacher_level", (0, 10, 100, 1000))
@pytest.mark.parametrize("level", (0, 10, 100, 1000))
@pytest.mark.parametrize("kind", KINDS)
def test_levels_of_logits(kind: str, level: int, teacher_level: int, device: torch.device) -> None:
    """A constant added to all logits of a side changes no probability, and must cost no digits.

    Weights are the identity, so that the logits are x: their dot products are exact.
    """
    x, teacher_x = (normal(200, 120, dtype=torch.float32, device=device) for _ in range(2))
    inputs = {
        "x": x + level,
        "weight": torch.eye(120, device=device),
        "teacher_x": teacher_x + teacher_level,
        "teacher_weight": torch.eye(120, device=device),
    }
    check_operator("linear_distillation", inputs, PER_TOKEN | {"loss": kind})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
@pytest.mark.parametrize("kind", KINDS)
def test_reductions(kind: str, reduction: str, dtype: torch.dtype, device: torch.device) -> None:
    inputs = distillation_inputs(dtype=dtype, device=device, mask=True)
    place: Any = {"dtype": torch.float64 if dtype == torch.float64 else torch.float32, "device": device}
    upstream = torch.randn((257,) if reduction == "none" else (), **place) * (
        750.0 if reduction == "mean" else 3.0
    )
    options = {"loss": kind, "reduction": reduction, "teacher_grad": True}
    check_operator("linear_distillation", inputs, options, upstream=[upstream])


@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
def test_nothing_selected(reduction: str, device: torch.device) -> None:
    inputs = distillation_inputs(dtype=torch.float32, device=device)
    inputs["mask"] = torch.zeros(257, dtype=torch.bool, device=device)
    results = check_operator("linear_distillation", inputs, {"reduction": reduction, "teacher_grad": True})
    assert all((result == 0).all() for result in results.values())


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_has_no_gradient_unless_asked(kind: str, device: torch.device) -> None:
    inputs = distillation_inputs(dtype=torch.float32, device=device)
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    mr.linear_distillation(**leaves, loss=kind).backward()
    assert all(leaves[name].grad is not None and leaves[name].grad.any() for name in ("x", "weight"))
    assert all(leaves[name].grad is None for name in ("teacher_x", "teacher_weight"))
    teachers = {name: t.detach().requires_grad_(name.startswith("teacher")) for name, t in inputs.items()}
    assert not mr.linear_distillation(**teachers, loss=kind).requires_grad


NAMES = ("x", "weight", "teacher_x", "teacher_weight")


@pytest.mark.parametrize("names", [c for r in range(5) for c in itertools.combinations(NAMES, r)], ids=str)
def test_every_subset_of_gradients(names: tuple[str, ...], device: torch.device) -> None:
    inputs = distillation_inputs(dtype=torch.float32, device=device)
    check_operator("linear_distillation", inputs, PER_TOKEN | {"loss": "reverse_kl"}, differentiate=names)
    leaves = {name: t.detach().requires_grad_(name in names) for name, t in inputs.items()}
    loss = mr.linear_distillation(**leaves, teacher_grad=True)
    assert loss.requires_grad == bool(names)
    if names:
        loss.backward()
        assert {name for name, leaf in leaves.items() if leaf.grad is not None} == set(names)


@pytest.mark.parametrize("layout", ("strided", "sliced", "expanded", "contiguous"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_upstream_layouts(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    inputs = distillation_inputs((3, 14), dtype=dtype, device=device)
    check_operator("linear_distillation", inputs, PER_TOKEN | {"loss": "forward_kl"}, upstream=layout)


@pytest.mark.parametrize("shape", ((), (6,), (2, 3), (2, 1, 5), (0, 3)), ids=str)
def test_leading_axes(shape: tuple[int, ...], device: torch.device) -> None:
    inputs = distillation_inputs(shape, dtype=torch.float64, device=device, mask=True)
    assert check_operator("linear_distillation", inputs, PER_TOKEN)["out0"].shape == shape


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("workspace", (0, 1, 4096, 1 << 20))
def test_any_workspace_gives_the_same(workspace: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = distillation_inputs(97, 513, 24, 16, dtype=dtype, device=device)
    check_operator("linear_distillation", inputs, PER_TOKEN | {"loss": "reverse_kl", "workspace": workspace})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ("sum", "mean"))
def test_matches_torch(kind: str, reduction: str, device: torch.device) -> None:
    """Against torch's cross entropy with probabilities and kl_div, which share no code with the reference."""
    inputs = distillation_inputs(dtype=torch.float64, device=device)
    student = F.linear(inputs["x"], inputs["weight"]) / 2.0
    teacher = F.linear(inputs["teacher_x"], inputs["teacher_weight"]) / 2.0
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    torch_reduction = "batchmean" if reduction == "mean" else "sum"
    expected = {
        "cross_entropy": lambda: F.cross_entropy(student, teacher.softmax(-1), reduction=reduction),
        "forward_kl": lambda: F.kl_div(log_s, log_t, log_target=True, reduction=torch_reduction),
        "reverse_kl": lambda: F.kl_div(log_t, log_s, log_target=True, reduction=torch_reduction),
    }[kind]()
    ours = mr.linear_distillation(**inputs, loss=kind, temperature=2.0, reduction=reduction)
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_student_equal_to_teacher(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """The divergences and the student's gradients are 0 up to rounding; the cross entropy is the entropy."""
    inputs = distillation_inputs(33, 130, 20, dtype=dtype, device=device)
    x, weight = inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()
    loss = mr.linear_distillation(x, weight, x.detach(), weight.detach(), loss=kind, reduction="none")
    epsilon = torch.finfo(loss.dtype).eps
    log_p = F.linear(x.double(), weight.double()).log_softmax(-1).detach()
    expected = (
        -(log_p.exp() * log_p).sum(-1)
        if kind == "cross_entropy"
        else torch.zeros(33, dtype=torch.float64, device=device)
    )
    torch.testing.assert_close(loss.double(), expected, rtol=64 * epsilon, atol=64 * epsilon)
    for gradient in torch.autograd.grad(loss.sum(), (x, weight)):
        assert gradient.abs().max() <= 512 * epsilon


@pytest.mark.parametrize("kind", KINDS)
def test_far_apart_logits(kind: str, device: torch.device) -> None:
    """Logits of +-1e4, where exp(log p) underflows on one side or both."""
    inputs = distillation_inputs(24, 70, 6, 6, dtype=torch.float32, device=device)
    inputs["x"] *= 3000
    inputs["teacher_x"] *= 5000
    assert (inputs["x"] @ inputs["weight"].mT).abs().max() > 8000
    results = check_operator("linear_distillation", inputs, PER_TOKEN | {"loss": kind})
    assert results["out0"].max() > 4000
