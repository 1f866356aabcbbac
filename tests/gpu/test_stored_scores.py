"""Distillation with the loss "jsd" on a Hopper GPU, from stored scores."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from calls import assert_same_bits, check_captured, check_replayed, peak, reset_peak
from paths import takes
from specimens import LAYOUTS, Inputs, distillation_inputs
from tolerance import check_operator, check_pooled
from torch import Tensor

import monoidreduce as mr
from monoidreduce._ops.stored_scores import Layout

pytestmark = pytest.mark.tiers("sm90")

BF16 = torch.bfloat16
FORWARD, BACKWARD = (f"jsd_{way}/cuda/sm90/bfloat16" for way in ("forward", "backward"))
SIZES: dict[str, tuple[int, int, int, int]] = {  # rows, classes, widths
    "one_row": (1, 1000, 128, 256),
    "one_class": (200, 1, 64, 64),
    "narrow": (257, 67, 8, 16),
    "ragged": (513, 1111, 200, 328),
    "deep": (300, 700, 1032, 520),
    "odd_teacher": (300, 701, 104, 44),
    "many_classes": (300, 50257, 64, 72),
    "many_rows": (3000, 515, 72, 64),
    "panels": (600, 5111, 1032, 64),
}


def inputs_of(size: str, gpu: torch.device, **options: Any) -> Inputs:
    return distillation_inputs(*SIZES[size], dtype=BF16, device=gpu, **options)


def check(inputs: Inputs, options: dict[str, Any] | None = None, **how: Any) -> dict[str, Tensor]:
    """Of the kernels for stored scores."""
    options, how = {"loss": "jsd"} | (options or {}), {"differentiate": ["x", "weight"]} | how
    with takes({FORWARD, BACKWARD} if how["differentiate"] else {FORWARD}):
        return check_operator("linear_distillation", inputs, options, function=mr.linear_distillation, **how)


def workspaces(size: str) -> tuple[int, int, int]:
    """Bytes: for the fewest rows at a time, for 256 and some kept local gradients, for all."""
    rows, classes, *_ = SIZES[size]
    return 0, 8 * (classes + 8) * 300, 8 * (classes + 8) * (rows + 256)


@pytest.mark.parametrize("mask", (False, True), ids=("all", "masked"))
@pytest.mark.parametrize("which", (0, 1, 2), ids=("least", "some", "all_rows"))
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, which: int, mask: bool, gpu: torch.device) -> None:
    options = {"workspace": workspaces(size)[which], "temperature": 1.7}
    check(inputs_of(size, gpu, mask=mask), options)


def test_sizes_have_all_ways() -> None:
    """Kept in the weights' gradient, in the workspace, and computed again."""
    found = [Layout.of(*SIZES[size][:3], bytes, True) for size in SIZES for bytes in workspaces(size)]
    assert any(of.panels for of in found) and any(of.own.stop > of.own.start for of in found)
    assert any(of.again for of in found) and any(len(of.panels) > 1 for of in found)


@pytest.mark.parametrize("reduction", ("mean", "sum"))
@pytest.mark.parametrize("beta", (0.1, 0.5, 0.9))
@pytest.mark.parametrize("temperature", (0.3, 1.0, 4.0))
def test_numbers(temperature: float, beta: float, reduction: str, gpu: torch.device) -> None:
    """A loss is one number, whose error may be small in eager torch by luck: several draws decide."""
    options: dict[str, Any] = {"loss": "jsd", "beta": beta, "temperature": temperature}
    options |= {"reduction": reduction, "workspace": 0}
    draw, how = partial(inputs_of, "ragged", gpu, mask=True), {"differentiate": ["x", "weight"]}
    check_pooled("linear_distillation", draw, options, function=mr.linear_distillation, **how)


@pytest.mark.parametrize("temperature", (2.0**-10, 2.0**-20, 2.0**-50))
def test_large_scores(temperature: float, gpu: torch.device) -> None:
    """Nearly all of a row's weight is that of one class."""
    check(inputs_of("ragged", gpu), {"temperature": temperature})


@pytest.mark.parametrize("wanted", (["x"], ["weight"], []), ids=("x", "weight", "none"))
@pytest.mark.parametrize("which", (0, 2), ids=("least", "all_rows"))
def test_some_gradients(which: int, wanted: list[str], gpu: torch.device) -> None:
    check(inputs_of("ragged", gpu), {"workspace": workspaces("ragged")[which]}, differentiate=wanted)


@pytest.mark.parametrize("teacher_level", (0, 10, 100, -1000))
@pytest.mark.parametrize("level", (0, 10, 100, 1000))
def test_levels_of_logits(level: int, teacher_level: int, gpu: torch.device) -> None:
    """A constant added to all logits of a side costs no digits. They are x: weights are 0 and 1."""
    eye = torch.eye(520, dtype=BF16, device=gpu)
    x, teacher_x = (
        (torch.randn(600, 520, device=gpu) + by).to(BF16).requires_grad_() for by in (level, teacher_level)
    )
    log_p, log_q = x.double().log_softmax(1), teacher_x.detach().double().log_softmax(1)
    log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0))
    exact = 0.5 * sum((log.exp() * (log - log_m)).sum(1) for log in (log_p, log_q)).mean()
    (slope,) = torch.autograd.grad(exact, x)
    with takes({FORWARD, BACKWARD}):
        found = mr.linear_distillation(x, eye, teacher_x, eye, loss="jsd", workspace=0)
        (gradient,) = torch.autograd.grad(found, x)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, slope, rtol=2**-6, atol=1e-3 * float(slope.abs().max()))


def test_a_student_that_is_its_teacher(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", gpu)
    inputs |= {"teacher_x": inputs["x"], "teacher_weight": inputs["weight"]}
    x = inputs["x"].clone().requires_grad_()
    loss = mr.linear_distillation(**{**inputs, "x": x}, loss="jsd", reduction="sum", beta=0.2)
    (gradient,) = torch.autograd.grad(loss, x)
    assert loss.abs() < 1e-6 * len(x) and gradient.abs().max() < 1e-5


def test_nothing_counts(gpu: torch.device) -> None:
    """Whatever excluded tokens hold."""
    inputs = inputs_of("ragged", gpu)
    inputs["mask"] = torch.zeros(len(inputs["x"]), dtype=torch.bool, device=gpu)
    inputs["x"][3], inputs["teacher_x"][5] = torch.nan, torch.inf
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]
    loss = mr.linear_distillation(**inputs, loss="jsd", workspace=0)
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, leaves))


def test_garbage_in_masked_rows(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", gpu, mask=True)
    excluded, found = ~inputs["mask"], []
    for garbage in (0.0, torch.nan, torch.inf):
        x, teacher_x = (inputs[name].masked_fill(excluded[:, None], garbage) for name in ("x", "teacher_x"))
        leaves = {"x": x.requires_grad_(), "weight": inputs["weight"].clone().requires_grad_()}
        call = {**inputs, "teacher_x": teacher_x, **leaves}
        mr.linear_distillation(**call, loss="jsd", workspace=0).backward()
        found.append({name: leaf.grad for name, leaf in leaves.items()})
    for gradients in found:
        assert_same_bits(gradients, found[0])


def test_an_infinite_row_is_its_own(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", gpu)
    inputs["x"][7] = torch.inf
    x = inputs["x"].requires_grad_()
    loss = mr.linear_distillation(**inputs, loss="jsd", workspace=0)
    (gradient,) = torch.autograd.grad(loss, x)
    nan = gradient.isnan().any(1)
    assert loss.isnan() and nan[7] and nan.sum() == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, gpu: torch.device) -> None:
    place = LAYOUTS[layout]
    inputs = {name: place(t) for name, t in inputs_of("deep", gpu, mask=True).items()}
    check(inputs, {"workspace": 0})


@pytest.mark.parametrize(
    "transposed", (("weight",), ("teacher_weight",), ("weight", "teacher_weight")), ids=str
)
def test_transposed_weights(transposed: tuple[str, ...], gpu: torch.device) -> None:
    inputs = distillation_inputs(513, 1112, 200, 328, dtype=BF16, device=gpu, mask=True)
    inputs |= {name: inputs[name].T.contiguous().T for name in transposed}
    check(inputs, {"workspace": 0})


def steps(inputs: Inputs, **options: Any) -> Any:
    """A step that may be captured: the loss, and the gradients of an upstream gradient of 3."""
    given = {name: t.requires_grad_() if name in ("x", "weight") else t for name, t in inputs.items()}
    upstream = torch.full((), 3.0, device=inputs["x"].device)

    def step() -> tuple[Tensor, ...]:
        loss = mr.linear_distillation(**given, loss="jsd", **options)
        return (loss.detach(), *torch.autograd.grad(loss, (given["x"], given["weight"]), upstream))

    return step


@pytest.mark.parametrize("which", (0, 1, 2), ids=("least", "some", "all_rows"))
def test_the_same_bits_every_time(which: int, gpu: torch.device, deterministic: None) -> None:
    step = steps(inputs_of("many_rows", gpu, mask=True), workspace=workspaces("many_rows")[which])
    first = step()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(step(), first, strict=True))


def test_graphs(gpu: torch.device, deterministic: None) -> None:
    inputs = inputs_of("ragged", gpu, mask=True)
    step = steps(inputs, workspace=0)
    check_captured(step)

    def others() -> None:
        with torch.no_grad():
            for t in inputs.values():
                t.copy_(torch.randn_like(t) * 0.1 if t.is_floating_point() else torch.rand(t.shape) < 0.5)

    check_replayed(step, [others])


def test_compiled(gpu: torch.device, deterministic: None) -> None:
    """In one graph, with the same bits."""
    inputs = inputs_of("ragged", gpu, mask=True)
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]
    call = partial(mr.linear_distillation, loss="jsd", workspace=0)
    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        with takes({FORWARD, BACKWARD}):
            loss = function(**inputs)
            found.append((loss, *torch.autograd.grad(3 * loss, leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_opcheck(gpu: torch.device) -> None:
    tensors = tuple(inputs_of("ragged", gpu, mask=True).values())
    x, weight = (t.requires_grad_() for t in tensors[:2])
    options = (True, 1.7, 0.3, [True, True], 0)
    torch.library.opcheck(torch.ops.monoidreduce.linear_jsd.default, (*tensors, *options))
    _, *gradients = torch.ops.monoidreduce.linear_jsd(*tensors, *options)
    upstream = torch.tensor(3.0, device=gpu)
    backward = (upstream, x.detach(), weight.detach(), *tensors[2:], *gradients, *options)
    torch.library.opcheck(torch.ops.monoidreduce.linear_jsd_backward.default, (*backward, [True, False]))


def test_autocast(gpu: torch.device) -> None:
    inputs = {name: t.float() for name, t in inputs_of("ragged", gpu).items()}
    x = inputs["x"].requires_grad_()
    with takes({FORWARD, BACKWARD}), torch.autocast("cuda", BF16):
        loss = mr.linear_distillation(**inputs, loss="jsd")
        (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.dtype == torch.float32 and gradient.any()


@pytest.mark.parametrize("workspace", (64 << 20, 100 << 20))
def test_memory(workspace: int, gpu: torch.device) -> None:
    """Beyond inputs and gradients a step holds the workspace; and no gradient twice."""
    rows, classes, width = 2048, 32000, 512
    inputs = distillation_inputs(rows, classes, width, 1024, dtype=BF16, device=gpu)
    step = steps(inputs, workspace=workspace)
    step()
    before = reset_peak()
    found = step()
    kept = sum(t.numel() * t.element_size() for t in found)
    assert peak() - before <= kept + workspace + (8 << 20)


def test_explained(gpu: torch.device) -> None:
    found = mr.explain("linear_distillation", **inputs_of("ragged", gpu), loss="jsd", workspace=0)
    assert (found.forward, found.backward) == (FORWARD, BACKWARD) and found.deterministic
    assert found.reasons[0] == "scores of 128 of 513 rows at a time are stored in float32"
    half = {name: t.half() for name, t in inputs_of("ragged", gpu).items()}
    assert "scores are not stored" in str(mr.explain("linear_distillation", **half, loss="jsd"))
