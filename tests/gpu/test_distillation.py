"""Linear distillation on tensor cores: sizes, losses, dtypes, and that their kernels ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import HALVES, Kept, assert_same_bits, peak, reset_peak
from specimens import Inputs, distillation_inputs, name_of
from tolerance import check_operator

import monoidreduce as mr
from monoidreduce._ops import active_rows, slices
from monoidreduce._ops.distillation import DISTILLATION_LOSSES

pytestmark = pytest.mark.tiers("sm80", "sm90")

LOSSES = ("cross_entropy", "forward_kl", "reverse_kl")
SIZES: dict[str, tuple[int, int, int, int]] = {  # rows, classes, widths
    "one_tile": (128, 192, 64, 64),
    "one_row": (1, 1000, 128, 256),
    "one_class": (200, 1, 64, 64),
    "narrow": (257, 67, 8, 16),
    "ragged": (513, 1111, 200, 328),
    "deep": (300, 700, 1032, 520),
    "odd_widths": (300, 701, 101, 44),
    "many_rows": (3000, 515, 72, 64),
}


def inputs_of(size: str, dtype: torch.dtype, device: torch.device, **options: Any) -> Inputs:
    return distillation_inputs(*SIZES[size], dtype=dtype, device=device, **options)


def ran(before: dict[str, int]) -> set[str]:
    return {path for path, n in mr._C.path_counts().items() if n != before.get(path, 0)}


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("teacher_grad", (False, True), ids=("student", "both"))
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_losses(
    size: str, loss: str, teacher_grad: bool, dtype: torch.dtype, tier: str, gpu: torch.device
) -> None:
    before = mr._C.path_counts()
    options = {"loss": loss, "teacher_grad": teacher_grad, "reduction": "none", "temperature": 1.7}
    options["workspace"] = SIZES[size][0] * 256 * 2 * (2 if teacher_grad else 1)
    check_operator("linear_distillation", inputs_of(size, dtype, gpu, mask=True), options)
    assert ran(before) == {
        f"distillation_{way}/cuda/{tier}/{name_of(dtype)}" for way in ("forward", "backward")
    }


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("mask", (False, True), ids=("all", "masked"))
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("size", SIZES)
def test_kept_local_gradients(
    size: str, loss: str, mask: bool, dtype: torch.dtype, gpu: torch.device
) -> None:
    options = {"loss": loss, "reduction": "none", "temperature": 0.6, "workspace": 128 << 20}
    check_operator("linear_distillation", inputs_of(size, dtype, gpu, mask=mask), options)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("mask", (False, True), ids=("all", "masked"))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_kept_local_gradients_of_reduced_losses(reduction: str, mask: bool, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu, mask=mask)
    check_operator("linear_distillation", inputs, {"reduction": reduction, "temperature": 0.6})


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("tiles", (2, 3, 5, 8, 10))
def test_some_kept_local_gradients(tiles: int, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five tiles; in the forward pass each takes the place of two."""
    monkeypatch.setattr(slices, "_BYTES_TO_RECOMPUTE_IN", 0)
    inputs, options = inputs_of("ragged", torch.bfloat16, gpu), {"workspace": 513 * 256 * 2 * tiles}
    assert slices.columns_to_save(513, 1111, options["workspace"], scores=2) == min(tiles // 2 * 256, 1111)
    check_operator("linear_distillation", inputs, options)
    check_operator("linear_distillation", inputs, options | {"teacher_grad": True})


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("mask", (False, True), ids=("all", "mask"))
def test_some_kept_beside_wide_rows(mask: bool, reduction: str, gpu: torch.device) -> None:
    """The gradients have room for what is computed again, also where what was kept is of no use."""
    sizes = (257, 5111, 2056, 136)
    inputs = distillation_inputs(*sizes, dtype=torch.bfloat16, device=gpu, mask=mask)
    options = {"workspace": 257 * 256 * 2 * 6, "reduction": reduction, "temperature": 0.6}
    with Kept() as kept:
        check_operator("linear_distillation", inputs, options)
        check_operator("linear_distillation", inputs, options | {"teacher_grad": True})
        check_operator("linear_distillation", inputs, options | {"loss": "reverse_kl"})
    assert kept.classes == [3 * 256, 0, 0]


@pytest.mark.parametrize("teacher_grad", (False, True), ids=("student", "both"))
@pytest.mark.parametrize("tiles", (1, 2, 3))
def test_workspaces(tiles: int, teacher_grad: bool, tier: str, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    workspace = 513 * 256 * 2 * tiles * (2 if teacher_grad else 1)
    before = mr._C.path_counts()
    check_operator("linear_distillation", inputs, {"teacher_grad": teacher_grad, "workspace": workspace})
    assert f"distillation_backward/cuda/{tier}/bfloat16" in ran(before)
    check_operator("linear_distillation", inputs, {"teacher_grad": teacher_grad, "workspace": 0})


@pytest.mark.parametrize("name", ("x", "weight", "teacher_x", "teacher_weight"))
def test_some_gradients(name: str, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    options = {"loss": "reverse_kl", "teacher_grad": True}
    check_operator("linear_distillation", inputs, options, differentiate=[name])


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize(
    "transposed", (("weight",), ("teacher_weight",), ("weight", "teacher_weight")), ids=str
)
@pytest.mark.parametrize("workspace", (513 * 256 * 2 * 2, 128 << 20), ids=("recomputed", "kept"))
def test_transposed_weights(transposed: tuple[str, ...], workspace: int, gpu: torch.device) -> None:
    inputs = distillation_inputs(513, 1112, 200, 328, dtype=torch.bfloat16, device=gpu, mask=True)
    inputs |= {name: inputs[name].T.contiguous().T for name in transposed}
    tensors = [inputs[name] for name in ("x", "weight", "teacher_x", "teacher_weight")]
    assert "copied" not in str(mr.explain("linear_distillation", *tensors))
    before = mr._C.path_counts()
    for loss in LOSSES:
        options = {"loss": loss, "workspace": workspace, "reduction": "none"}
        check_operator("linear_distillation", inputs, options)
        check_operator("linear_distillation", inputs, options | {"teacher_grad": True})
    assert ran(before) == {f"distillation_{way}/cuda/sm90/bfloat16" for way in ("forward", "backward")}


@pytest.mark.tiers("sm90")
def test_explained(gpu: torch.device) -> None:
    """It says what is padded, and of how many classes local gradients are kept."""
    x, weight, teacher_x, teacher_weight = inputs_of("odd_widths", torch.bfloat16, gpu).values()
    call = (x, weight, teacher_x, teacher_weight)
    explanation = str(mr.explain("linear_distillation", *call))
    assert "of width 104, padded from 101; of width 48, padded from 44" in explanation
    assert "of 701 of 701 classes" in explanation
    assert "of 0 of 701 classes" in str(mr.explain("linear_distillation", *call, loss="reverse_kl"))
    assert "of 0 of 701 classes" in str(mr.explain("linear_distillation", *call, teacher_grad=True))


def test_a_student_that_is_its_teacher(gpu: torch.device) -> None:
    inputs = inputs_of("one_tile", torch.bfloat16, gpu)
    inputs |= {"teacher_x": inputs["x"], "teacher_weight": inputs["weight"]}
    for loss in ("forward_kl", "reverse_kl"):
        value = mr.linear_distillation(**inputs, loss=loss, reduction="none")
        assert value.abs().max() < 1e-6


@pytest.mark.parametrize("level", (0, 100, -100))
@pytest.mark.parametrize("teacher_level", (0, 100))
@pytest.mark.parametrize("loss", LOSSES)
def test_levels_of_logits(loss: str, teacher_level: int, level: int, gpu: torch.device) -> None:
    """A constant added to all logits of a side costs no digits. They are x: weights are 0 and 1."""
    eye = torch.eye(520, dtype=torch.bfloat16, device=gpu)
    x, teacher_x = (
        (torch.randn(300, 520, device=gpu) + by).to(torch.bfloat16).requires_grad_()
        for by in (level, teacher_level)
    )
    student, teacher = x.double().log_softmax(1), teacher_x.double().log_softmax(1)
    p, q = (teacher, student) if loss == "reverse_kl" else (student, teacher)
    exact = (q.exp() * (-p if loss == "cross_entropy" else q - p)).sum(1)
    slopes = torch.autograd.grad(exact.sum(), (x, teacher_x))
    for of_teacher in (False, True):
        leaves = (x, teacher_x) if of_teacher else (x,)
        found = mr.linear_distillation(
            x, eye, teacher_x, eye, loss=loss, reduction="none", teacher_grad=of_teacher
        )
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
        for gradient, slope in zip(torch.autograd.grad(found.sum(), leaves), slopes, strict=False):
            torch.testing.assert_close(gradient, slope, rtol=2**-6, atol=1e-3 * float(slope.abs().max()))


@pytest.mark.parametrize("temperature", (2.0**-10, 2.0**-20, 2.0**-50))
@pytest.mark.parametrize("loss", LOSSES)
def test_large_scores(loss: str, temperature: float, gpu: torch.device) -> None:
    """Nearly all of a row's weight is that of one class, whose score both passes must see alike."""
    options = {"loss": loss, "temperature": temperature, "reduction": "none", "workspace": 513 * 512}
    check_operator("linear_distillation", inputs_of("ragged", torch.bfloat16, gpu), options)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("teacher_grad", (False, True), ids=("student", "both"))
@pytest.mark.parametrize("workspace", (1, 128), ids=("recomputed", "kept"))
@pytest.mark.parametrize("share", (0.0, 0.02, 0.5, 1.0))
@pytest.mark.parametrize("size", ("one_tile", "ragged", "many_rows"))
def test_masked_rows(size: str, share: float, workspace: int, teacher_grad: bool, gpu: torch.device) -> None:
    """Losses and gradients of what is not a token are exactly 0."""
    inputs = inputs_of(size, torch.bfloat16, gpu)
    mask = torch.rand(SIZES[size][0], device=gpu) < share
    inputs["mask"] = mask
    options = {"reduction": "none", "workspace": workspace * SIZES[size][0] * 1024, "loss": "forward_kl"}
    options["teacher_grad"] = teacher_grad
    check_operator("linear_distillation", inputs, options)
    leaves = [t.requires_grad_() for name, t in inputs.items() if name != "mask"]
    loss = mr.linear_distillation(**inputs, **options)
    dx, _, dteacher_x, _ = torch.autograd.grad(loss, leaves, torch.randn_like(loss), materialize_grads=True)
    assert not any(t[~mask].any() for t in (loss, dx, dteacher_x))


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("workspace", (1, 128), ids=("recomputed", "kept"))
def test_rows_gathered_in_parts(workspace: int, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of("many_rows", torch.bfloat16, gpu)
    rows = len(inputs["x"])
    inputs["mask"] = torch.rand(rows, device=gpu) < 0.6
    monkeypatch.setattr(active_rows, "_GATHER_BUFFER_BYTES", 1)
    room, _ = active_rows.new_gather_buffers(inputs["x"], inputs["teacher_x"])
    assert len(room) < rows / 10 and rows % len(room) != 0
    options = {"reduction": "none", "workspace": workspace * rows * 1024, "loss": "forward_kl"}
    check_operator("linear_distillation", inputs, options)
    assert not mr.linear_distillation(**inputs, **options)[~inputs["mask"]].any()


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("loss", DISTILLATION_LOSSES)
@pytest.mark.parametrize("share", (0.0, 0.02, 0.5, 0.99, 1.0))
@pytest.mark.parametrize("size", ("ragged", "many_rows"))
def test_a_forward_pass_alone_leaves_out_masked_rows(
    size: str, share: float, loss: str, gpu: torch.device
) -> None:
    """Their statistics are left at 0; what they hold has no effect."""
    inputs = inputs_of(size, torch.bfloat16, gpu)
    mask = torch.rand(SIZES[size][0], device=gpu) < share
    options = {"reduction": "none", "loss": loss}
    reference = check_operator("linear_distillation", inputs | {"mask": mask}, options, differentiate=())
    for name in ("x", "teacher_x"):
        inputs[name][~mask] = torch.nan
    call = (*inputs.values(), mask, "none", loss, 1.0, False, False, 0)
    losses, stats, _ = torch.ops.monoidreduce.linear_distillation(*call)
    assert torch.equal(losses, reference["out0"])
    assert not stats[:, ~mask].any() and stats[0, mask].all()


@pytest.mark.parametrize(
    ("size", "garbage"), (("ragged", torch.nan), ("ragged", torch.inf), ("one_tile", torch.nan))
)
@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("teacher_grad", (False, True), ids=("student", "both"))
def test_garbage_in_masked_rows(
    size: str, garbage: float, reduction: str, teacher_grad: bool, gpu: torch.device
) -> None:
    """An infinity among few rows may change how the scores of rows in the same warp are rounded."""
    inputs = inputs_of(size, torch.bfloat16, gpu, mask=True)
    excluded = ~inputs["mask"]
    found, upstream = [], torch.randn(len(excluded), device=gpu)
    for held in (0.0, garbage):
        rows = {name: inputs[name].masked_fill(excluded[:, None], held) for name in ("x", "teacher_x")}
        leaves = {
            name: t.clone().requires_grad_() for name, t in {**inputs, **rows}.items() if name != "mask"
        }
        options = {"reduction": reduction, "teacher_grad": teacher_grad}
        loss = mr.linear_distillation(**{**inputs, **leaves}, **options)
        loss.backward(upstream if reduction == "none" else upstream[0])
        assert leaves["x"].grad is not None and not leaves["x"].grad[excluded].any()
        found.append({name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})
    for gradients in found:
        assert_same_bits(gradients, found[0])


def test_the_same_bits_every_time(gpu: torch.device) -> None:
    inputs = inputs_of("many_rows", torch.bfloat16, gpu)
    first = check_operator("linear_distillation", inputs, upstream=[torch.tensor(2.0, device=gpu)])
    for _ in range(3):
        again = check_operator("linear_distillation", inputs, upstream=[torch.tensor(2.0, device=gpu)])
        assert_same_bits(again, first)


@pytest.mark.parametrize("masked", (False, True), ids=("all", "masked"))
def test_no_logits_are_stored(masked: bool, tier: str, gpu: torch.device) -> None:
    """Nor is anything else of their size. Beyond kept and returned tensors there are the workspace, the sum
    of the rows' gradient, and copies of rows where some are masked."""
    inputs = distillation_inputs(4096, 32000, 256, 512, dtype=torch.bfloat16, device=gpu, mask=masked)
    x, weight = inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()
    teacher_x, workspace = inputs["teacher_x"], 32 << 20
    statistics = 4 * 7 * len(x)  # a loss, and two words of it and of each log-sum-exp
    tensors = (x, weight, teacher_x, inputs["teacher_weight"])
    scratch = 4 * mr._C.plan_distillation_forward(*tensors).scratch
    mr.linear_distillation(**inputs, workspace=workspace).backward()  # cuBLAS's own workspace stays
    copies = 2 * (x.numel() + teacher_x.numel()) if masked else 0
    slack = 1 << 20
    if tier == "sm80":  # torch's product of a part, in float32 as it has few elements
        slack += 4 * workspace // (2 * len(x)) * x.shape[1]
    paths = mr._C.path_counts()
    before = reset_peak()
    loss = mr.linear_distillation(**inputs, workspace=workspace)
    assert peak() - before <= statistics + scratch + copies + slack
    before = reset_peak()
    torch.autograd.grad(loss, (x, weight))
    summed, gradients = 4 * x.numel(), 2 * (x.numel() + weight.numel())
    assert peak() - before <= workspace + summed + gradients + copies + statistics + slack
    assert ran(paths) == {f"distillation_{way}/cuda/{tier}/bfloat16" for way in ("forward", "backward")}
