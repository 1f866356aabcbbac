"""The ops that finish some tokens before they begin the next. Here their loop, on the CPU's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specimens import class_weights, cross_entropy_inputs, distillation_inputs
from torch import Tensor

import monoidreduce as mr
from monoidreduce import functional, hardware
from monoidreduce._ops.dry_run import dry_run
from monoidreduce._ops.engine import _C, streams
from monoidreduce._ops.slices import (
    TILE_COLUMNS,
    TILE_ROWS,
    columns_at_once,
    enough_planes_fit,
    fewest_tokens_fit,
    tokens_at_once,
)

CPU = torch.device("cpu")
CLASSES = 67
WORKSPACE = 2 * CLASSES * 2 * TILE_ROWS  # of two tiles of tokens
HEAD = (8192, 128256, 4096)
PRODUCTS = ("columns_product", "rows_product")


@pytest.fixture(autouse=True)
def products_of_numbers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In place of the GPU's kernel that multiplies gradients. Lists whether it did so in place."""
    in_place: list[int] = []

    def scale_rows(rows: Tensor, factor: Tensor, out: Tensor, *_: Any) -> None:
        in_place.append(rows.data_ptr() == out.data_ptr())
        out.copy_(rows * factor[:, None])

    monkeypatch.setattr(_C, "scale_rows", scale_rows, raising=False)
    monkeypatch.setattr(streams, "current", lambda _: 0, raising=False)
    return in_place


def inputs_of(rows: int = 1300) -> tuple[Tensor, Tensor, Tensor]:
    inputs = cross_entropy_inputs(rows, CLASSES, 24, dtype=torch.bfloat16, device=CPU)
    return inputs["x"].requires_grad_(), inputs["weight"].float().requires_grad_(), inputs["target"]


def in_parts(
    x: Tensor, weight: Tensor, target: Tensor, class_weight: Tensor | None = None, **options: Any
) -> Tensor:
    given = {
        "reduction": "mean",
        "logit_scale": 0.7,
        "softcap": 0.0,
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "z_loss": 1e-3,
        "of_x": True,
        "of_weight": True,
        "workspace": WORKSPACE,
    } | options
    loss: Tensor = torch.ops.monoidreduce.linear_cross_entropy_parts(
        x, weight, target, class_weight, *given.values()
    )[0]
    return loss


def whole(
    x: Tensor, weight: Tensor, target: Tensor, class_weight: Tensor | None = None, **options: Any
) -> Tensor:
    given = (options.get("reduction", "mean"), 0.7, 0.0, -100, options.get("label_smoothing", 0.0), 1e-3)
    op = torch.ops.monoidreduce.linear_cross_entropy
    loss: Tensor = op(x, weight, None, target, class_weight, *given, 0, -1, False, False, True, 0)[0]
    return loss


@pytest.mark.parametrize("rows", (1, 512, 513, 1300))
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("options", ({}, {"reduction": "sum"}, {"label_smoothing": 0.1}), ids=str)
def test_loss_and_gradients(options: dict[str, Any], weighted: bool, rows: int) -> None:
    """As of the op that has all tokens at once."""
    x, weight, target = inputs_of(rows)
    classes = class_weights(CLASSES, dtype=torch.bfloat16, device=CPU) if weighted else None
    found, expected = (f(x, weight, target, classes, **options) for f in (in_parts, whole))
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(3 * loss, (x, weight)) for loss in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).float().norm() <= 8e-3 * theirs.float().norm()


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
@pytest.mark.parametrize("kind", ("cross_entropy", "forward_kl"))
def test_distillation(kind: str, reduction: str, masked: bool) -> None:
    inputs = distillation_inputs(1300, CLASSES, 24, 16, dtype=torch.bfloat16, device=CPU, mask=masked)
    x, weight = inputs["x"].requires_grad_(), inputs["weight"].float().requires_grad_()
    given = (x, weight, inputs["teacher_x"], inputs["teacher_weight"], inputs.get("mask"))
    ops = torch.ops.monoidreduce
    found = ops.linear_distillation_parts(*given, reduction, kind, 1.7, True, True, 2 * WORKSPACE)[0]
    expected = ops.linear_distillation(*given, reduction, kind, 1.7, False, True, 0)[0]
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(3 * loss, (x, weight)) for loss in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).float().norm() <= 8e-3 * theirs.float().norm()
    twice = torch.autograd.grad(
        ops.linear_distillation_parts(*given, reduction, kind, 1.7, True, True, 2 * WORKSPACE)[0],
        weight,
        create_graph=True,
    )[0]
    assert torch.autograd.grad(twice.square().sum(), x)[0].any()


def test_all_tokens_ignored() -> None:
    x, weight, target = inputs_of()
    loss = in_parts(x, weight, torch.full_like(target, -100))
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    assert loss == 0 and not dx.any() and not dweight.any()


@pytest.mark.parametrize("wanted", ((True, False), (False, True)))
def test_one_gradient(wanted: tuple[bool, bool], products_of_numbers: list[int]) -> None:
    x, weight, target = inputs_of()
    expected = torch.autograd.grad(in_parts(x, weight, target), (x, weight))
    leaf = (x, weight)[wanted.index(True)]
    given = [t if t is leaf else t.detach() for t in (x, weight)]
    loss = in_parts(*given, target, of_x=wanted[0], of_weight=wanted[1])
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], expected[wanted.index(True)])


def test_gradients_are_multiplied_in_place_if_nobody_reads_them_again(products_of_numbers: list[int]) -> None:
    x, weight, target = inputs_of()
    loss = in_parts(x, weight, target)
    first = torch.autograd.grad(2 * loss, (x, weight), retain_graph=True)
    assert products_of_numbers == [False, False]
    second = torch.autograd.grad(2 * loss, (x, weight))
    assert products_of_numbers[2:] == [True, True]
    assert all(map(torch.equal, first, second))


def test_second_derivatives() -> None:
    x, weight, target = inputs_of(40)
    found = []
    for loss in (in_parts(x, weight, target), whole(x, weight, target)):
        gradients = torch.autograd.grad(loss, (x, weight), create_graph=True)
        total = sum(g.float().square().sum() for g in gradients)
        found.append(torch.autograd.grad(total, (x, weight)))
    torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=1e-3)


def test_as_an_op_of_torch() -> None:
    x, weight, target = inputs_of(40)
    given = ("mean", 0.7, 0.0, -100, 0.0, 1e-3, True, True, WORKSPACE)
    op = torch.ops.monoidreduce.linear_cross_entropy_parts.default
    torch.library.opcheck(
        op, (x, weight, target, None, *given), test_utils=("test_schema", "test_faketensor")
    )


# How many tokens at a time


@pytest.mark.parametrize("planes", (False, True))
@pytest.mark.parametrize("clusters", (1, 57, 66))
@pytest.mark.parametrize("workspace", (0, 100 << 20, 352 << 20, 1 << 30, 4 << 30))
@pytest.mark.parametrize("sizes", (HEAD, (16384, 32000, 4096), (300, 70000, 64), (8192, 256000, 2304)))
def test_parts_are_whole_tiles_that_fit(
    sizes: tuple[int, int, int], workspace: int, clusters: int, planes: bool
) -> None:
    rows, columns, _ = sizes
    at_once = tokens_at_once(*sizes, workspace, clusters, planes=planes)
    assert at_once % TILE_ROWS == 0 and 0 < at_once < rows + TILE_ROWS
    assert at_once == TILE_ROWS or (5 if planes else 2) * at_once * columns <= workspace


def test_a_product_for_rows_fills_the_last_wave() -> None:
    """Of 66 clusters, 4 tiles of rows by 16 of columns leave 2 idle; 5 by 16 would leave 52."""
    assert tokens_at_once(*HEAD, 352 << 20, 66) == 4 * TILE_ROWS


def test_parts_of_planes_fill_the_clusters() -> None:
    """512 tokens by 4096 elements are 64 tiles of dX."""
    rows, columns, width = HEAD
    assert tokens_at_once(*HEAD, 352 << 20, 66, planes=True) == 2 * TILE_ROWS
    assert enough_planes_fit(*HEAD, 352 << 20)
    assert not enough_planes_fit(rows, columns, 2048, 352 << 20)  # 32 tiles of dX
    assert not enough_planes_fit(rows, columns, width, 5 * columns * 511)
    assert enough_planes_fit(300, columns, 128, 5 * columns * 300)  # all tokens


@pytest.mark.parametrize("columns", (1, 1024, 1290, 32000, 128256))
def test_planes_of_a_quarter_of_the_classes(columns: int) -> None:
    own = columns_at_once(columns)
    assert own % TILE_COLUMNS == 0 and (own == TILE_COLUMNS or 4 * own <= columns)


def test_few_tokens_at_once_are_not_worth_it() -> None:
    rows, columns, _ = HEAD
    assert fewest_tokens_fit(rows, columns, 352 << 20)
    assert not fewest_tokens_fit(rows, columns, 128 << 20)
    assert not fewest_tokens_fit(rows, columns, 2 * rows * columns)  # all fit: nothing is computed twice


# What a call of a model's head runs


@pytest.fixture
def autocast_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "autocast_dtype", lambda _: torch.bfloat16)


def head_of(classes: int = HEAD[1]) -> dict[str, Tensor]:
    rows, _, width = HEAD
    x = torch.empty(rows, width, device="meta", dtype=torch.bfloat16).requires_grad_()
    weight = torch.empty(classes, width, device="meta").requires_grad_()
    return {"x": x, "weight": weight, "target": torch.empty(rows, device="meta", dtype=torch.int64)}


def test_three_products_in_the_memory_of_the_gradient(autocast_of_a_gpu: None) -> None:
    gpu = hardware.find("h100").facts()
    run = dry_run(mr.linear_cross_entropy, head_of(), ("x", "weight"), gpu)
    products = [x.name for x in run.launches if x.name in ("cross_entropy_forward", *PRODUCTS)]
    assert products == ["cross_entropy_forward", "columns_product", "rows_product"] * 8
    rows, classes, width = HEAD
    gradients, copy = 4 * classes * width + 2 * rows * width, 2 * classes * width
    assert run.peak - gradients - copy < 384 << 20
    assert run.flops == 3 * 2 * rows * classes * width


def float32_head(rows: int = HEAD[0]) -> dict[str, Tensor]:
    given = head_of()
    x, target = torch.empty(rows, HEAD[2], device="meta").requires_grad_(), given["target"][:rows]
    return given | {"x": x, "target": target}


@pytest.mark.parametrize("wanted", (("x", "weight"), ("x",), ("weight",)))
def test_three_products_of_planes(wanted: tuple[str, ...]) -> None:
    """In 16 parts of 512 tokens. The weight is split once."""
    gpu, (rows, classes, width) = hardware.find("h100").facts(), HEAD
    with mr.float32("emulated"):
        run = dry_run(mr.linear_cross_entropy, float32_head(), wanted, gpu)
    folds = [x for x in run.launches if x.name == "cross_entropy_forward"]
    assert len(folds) == 16 and all(x.plan is not None and x.plan.tier == "planes" for x in folds)
    assert {x.arguments["kept"].shape for x in folds} == {(512, classes)}
    names = [x.name for x in run.launches]
    slices = -(-classes // columns_at_once(classes))
    assert names.count("plane_product") == 16 * slices * len(wanted)
    assert "cross_entropy_local_gradient" not in names
    splits = [x.arguments["x"].shape for x in run.launches if x.name == "split_rows"]
    assert splits.count((classes, width)) == 1 and splits.count((512, width)) == 32
    gradients = 4 * width * (rows * ("x" in wanted) + classes * ("weight" in wanted))
    planes = (4 * width + 16) * classes
    assert run.peak - gradients - planes < 352 << 20
    assert run.flops == (1 + len(wanted)) * 2 * rows * classes * width


@pytest.mark.parametrize("rows", (4097, 513))
def test_parts_of_planes_have_about_as_many_tokens(rows: int) -> None:
    """A part of few tokens would take ordinary cores."""
    with mr.float32("emulated"):
        run = dry_run(
            mr.linear_cross_entropy, float32_head(rows), ("x", "weight"), hardware.find("h100").facts()
        )
    folds = [x for x in run.launches if x.name == "cross_entropy_forward"]
    assert all(x.plan is not None and x.plan.tier == "planes" for x in folds)
    sizes = [x.arguments["x"].shape[0] for x in folds]
    assert sum(sizes) == rows and max(sizes) - min(sizes) < len(sizes)


def test_planes_explained() -> None:
    with mr.float32("emulated"):
        found = mr.explain(mr.linear_cross_entropy, **float32_head(), hardware="h100")
        cost = mr.cost(mr.linear_cross_entropy, **float32_head(), hardware="h100")
    assert found.forward == "cross_entropy_forward/cuda/planes/float32"
    assert found.backward == "cross_entropy_backward/cuda/planes/float32"
    assert "the forward pass computes the gradients, of 512 tokens at a time" in found.reasons
    with mr.float32("emulated"):
        sliced = mr.cost(mr.linear_cross_entropy, **float32_head(), hardware="h100", workspace=128 << 20)
    assert 0.7 < cost.seconds / sliced.seconds < 0.85


@pytest.mark.parametrize(
    "options",
    (
        {"reduction": "none"},
        {"return_lse": True},
        {"softcap": 5.0},
        {"logit_scale": -1.0},
        {"bias": torch.empty(HEAD[1], device="meta")},
        {"workspace": 128 << 20},
        {"weight_grad": torch.empty(HEAD[1:], device="meta")},
        {"hardware": "a100"},
        {"mode": "simt"},
    ),
    ids=lambda options: next(iter(options)),
)
def test_other_calls_in_float32_take_slices_of_classes(options: dict[str, Any]) -> None:
    with mr.float32(options.get("mode", "emulated")):
        rest = {name: value for name, value in options.items() if name != "mode"}
        found = mr.explain(mr.linear_cross_entropy, **float32_head(), **{"hardware": "h100"} | rest)
    assert not any("tokens at a time" in reason for reason in found.reasons)


def test_a_call_without_gradients_saves_none() -> None:
    given = {name: t.detach() for name, t in float32_head().items()}
    with mr.float32("emulated"):
        run = dry_run(mr.linear_cross_entropy, given, (), hardware.find("h100").facts())
    (fold,) = (x for x in run.launches if x.name == "cross_entropy_forward")
    assert "kept" not in fold.arguments


@pytest.mark.parametrize("kind", ("planes", "masters", "distillation"))
def test_many_tokens_beside_a_small_workspace(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds a part, but not a tile of classes for all tokens."""
    tokens, classes, width = 40_000, 2048, 4096
    x, weight = (torch.empty(n, width, device="meta").requires_grad_() for n in (tokens, classes))
    given = {"x": x, "weight": weight, "target": torch.empty(tokens, device="meta", dtype=torch.int64)}
    operator, workspace = mr.linear_cross_entropy, 16 << 20
    if kind != "planes":
        monkeypatch.setattr(functional, "autocast_dtype", lambda _: torch.bfloat16)
        given["x"] = x.detach().bfloat16().requires_grad_()
    if kind == "distillation":
        del given["target"]
        given |= {"teacher_x": given["x"].detach(), "teacher_weight": weight.detach().bfloat16()}
        operator = mr.linear_distillation
    with mr.float32("emulated" if kind == "planes" else "auto"):
        found = mr.explain(operator, **given, hardware="h100", workspace=workspace)
    assert any("the forward pass computes the gradients" in reason for reason in found.reasons)
    assert "simt" not in found.forward


def test_four_products_of_distillation(autocast_of_a_gpu: None) -> None:
    given, rows = head_of(65536), HEAD[0]
    del given["target"]
    given["teacher_x"] = torch.empty(rows, 2048, device="meta", dtype=torch.bfloat16)
    given["teacher_weight"] = torch.empty(65536, 2048, device="meta", dtype=torch.bfloat16)
    gpu = hardware.find("h100").facts()
    run = dry_run(mr.linear_distillation, given, ("x", "weight"), gpu)
    products = [x.name for x in run.launches if x.name in ("distillation_forward", *PRODUCTS)]
    assert products == ["distillation_forward", "columns_product", "rows_product"] * (len(products) // 3)
    gradients, copy = 4 * 65536 * 4096 + 2 * rows * 4096, 2 * 65536 * 4096
    assert run.peak - gradients - copy < 420 << 20
    found = mr.explain(mr.linear_distillation, **given, hardware="h100")
    assert any("the forward pass computes the gradients" in reason for reason in found.reasons)
    for options in ({"teacher_grad": True}, {"loss": "reverse_kl"}, {"reduction": "none"}):
        teacher = given | {"teacher_x": given["teacher_x"].requires_grad_("teacher_grad" in options)}
        found = mr.explain(mr.linear_distillation, **teacher, **options, hardware="h100")
        assert not any("computes the gradients" in reason for reason in found.reasons)


def test_explained(autocast_of_a_gpu: None) -> None:
    found = mr.explain(mr.linear_cross_entropy, **head_of(), hardware="h100")
    assert found.forward == "cross_entropy_forward/cuda/sm90/bfloat16"
    assert found.backward == "cross_entropy_backward/cuda/sm90/bfloat16"
    assert "the forward pass computes the gradients, of 1024 tokens at a time" in found.reasons


@pytest.mark.parametrize(
    "options",
    (
        {"reduction": "none"},
        {"return_lse": True},
        {"softcap": 5.0},
        {"logit_scale": -1.0},
        {"bias": torch.empty(HEAD[1], device="meta", dtype=torch.bfloat16)},
        {"workspace": 128 << 20},
        {"workspace": 4 << 30},
        {"weight_grad": torch.empty(HEAD[1:], device="meta")},
        {"hardware": "a100"},
    ),
    ids=lambda options: next(iter(options)),
)
def test_other_calls_take_slices_of_classes(options: dict[str, Any], autocast_of_a_gpu: None) -> None:
    found = mr.explain(mr.linear_cross_entropy, **head_of(), **{"hardware": "h100"} | options)
    assert not any("tokens at a time" in reason for reason in found.reasons)


def test_sums_of_gradients_need_no_memory_of_their_own() -> None:
    gpu = hardware.find("h100").facts()
    given = head_of() | {"weight_grad": torch.empty(HEAD[1:], device="meta")}
    given["weight"] = given["weight"].detach().bfloat16().requires_grad_()
    run = dry_run(mr.linear_cross_entropy, given, ("x", "weight"), gpu)
    assert all(x.arguments["out"].dtype == torch.float32 for x in run.launches if x.name == PRODUCTS[0])
    of_rows = HEAD[0] * HEAD[2] * (4 + 2)  # the sum of dX, and the gathered rows
    assert run.peak < (352 << 20) + of_rows + (16 << 20)
