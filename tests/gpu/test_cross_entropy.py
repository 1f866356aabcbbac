"""Linear cross entropy and logsumexp_matmul on tensor cores: sizes, options, dtypes, kernels that ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import HALVES, Kept, assert_same_bits, check_captured, peak, requested, reset_peak
from specimens import Inputs, class_weights, cross_entropy_inputs, name_of, normal
from tolerance import check_operator

import monoidreduce as mr
from monoidreduce._ops import active_rows, slices

pytestmark = pytest.mark.tiers("sm80", "sm90")

SIZES: dict[str, tuple[int, int, int]] = {  # rows, classes, width
    "one_tile": (128, 256, 64),
    "one_row": (1, 3000, 256),
    "one_class": (300, 1, 64),
    "narrow": (257, 67, 8),
    "ragged": (513, 1111, 200),
    "short": (300, 2000, 136),
    "deep": (300, 1500, 2056),
    "odd_width": (300, 1111, 101),
    "many_rows": (5000, 515, 72),
    "many_classes": (130, 70001, 64),
}
EVERYTHING = 128 << 20  # bytes that hold the local gradients of every call here
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-3, "return_lse": True},
    "softcap": {"softcap": 5.0},
    "all": {"softcap": 8.0, "label_smoothing": 0.2, "z_loss": 1e-3, "logit_scale": 0.7},
}


def inputs_of(size: str, dtype: torch.dtype, device: torch.device, **options: Any) -> Inputs:
    return cross_entropy_inputs(*SIZES[size], dtype=dtype, device=device, **options)


def ran(before: dict[str, int]) -> set[str]:
    return {path for path, n in mr._C.path_counts().items() if n != before.get(path, 0)}


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_options(
    size: str, options: dict[str, Any], bias: bool, dtype: torch.dtype, tier: str, gpu: torch.device
) -> None:
    """Computed again, four tiles of classes at a time."""
    before = mr._C.path_counts()
    workspace = SIZES[size][0] * 256 * 2 * min(4, SIZES[size][1] // 256)
    options = {"reduction": "none", "workspace": max(workspace, SIZES[size][0] * 256 * 2), **options}
    check_operator("linear_cross_entropy", inputs_of(size, dtype, gpu, bias=bias), options)
    assert ran(before) == {
        f"cross_entropy_{way}/cuda/{tier}/{name_of(dtype)}" for way in ("forward", "backward")
    }


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("kept", (False, True), ids=("computed again", "kept"))
@pytest.mark.parametrize("options", (OPTIONS["plain"], OPTIONS["smoothing"], OPTIONS["all"]), ids=str)
@pytest.mark.parametrize("size", ("one_tile", "narrow", "ragged", "deep", "many_rows"))
def test_class_weight(
    size: str, options: dict[str, Any], kept: bool, dtype: torch.dtype, tier: str, gpu: torch.device
) -> None:
    before = mr._C.path_counts()
    workspace = EVERYTHING if kept else SIZES[size][0] * 256 * 2  # of a tile of classes
    weights = class_weights(SIZES[size][1], dtype=dtype, device=gpu)
    options = {"reduction": "none", "workspace": workspace, "class_weight": weights, **options}
    check_operator("linear_cross_entropy", inputs_of(size, dtype, gpu), options)
    forward = "simt" if tier == "sm80" and "label_smoothing" in options else tier
    assert ran(before) == {
        f"cross_entropy_{way}/cuda/{on}/{name_of(dtype)}"
        for way, on in (("forward", forward), ("backward", tier))
    }


@pytest.mark.parametrize("label_smoothing", (0.1, 1.0))
@pytest.mark.parametrize("level", (0, 100, -100))
def test_levels_of_logits(level: int, label_smoothing: float, gpu: torch.device) -> None:
    """A constant added to all logits costs no digits. They are x: weights are 0 and 1."""
    x = (torch.randn(300, 520, device=gpu) + level).to(torch.bfloat16).requires_grad_()
    eye, target = torch.eye(520, dtype=torch.bfloat16, device=gpu), torch.arange(300, device=gpu)
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": label_smoothing}
    found = mr.linear_cross_entropy(x, eye, target, **options)
    exact = torch.nn.functional.cross_entropy(x.double(), target, **options)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=5e-6)
    (gradient,), (slope,) = (torch.autograd.grad(loss.sum(), x) for loss in (found, exact))
    torch.testing.assert_close(gradient, slope, rtol=2**-6, atol=1e-3 * float(slope.abs().max()))


@pytest.mark.tiers("sm80")
def test_nothing_is_kept(gpu: torch.device) -> None:
    """The forward pass has no kernel for that: the backward pass computes scores again."""
    with Kept() as kept:
        check_operator(
            "linear_cross_entropy", inputs_of("ragged", torch.bfloat16, gpu), {"workspace": EVERYTHING}
        )
    assert kept.classes == [0]


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", (OPTIONS["plain"], OPTIONS["smoothing"], {"z_loss": 1e-3}), ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_kept_local_gradients(
    size: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device
) -> None:
    options = {"reduction": "none", "workspace": EVERYTHING, "logit_scale": 0.8, **options}
    with Kept() as kept:
        check_operator("linear_cross_entropy", inputs_of(size, dtype, gpu), options)
    assert kept.classes == [-(-SIZES[size][1] // 8) * 8]


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("reduction", ("mean", "sum"))
@pytest.mark.parametrize("size", SIZES)
def test_kept_local_gradients_of_reduced_losses(
    size: str, reduction: str, dtype: torch.dtype, gpu: torch.device
) -> None:
    """The gradients equal the losses' one by one, with the upstream gradient the reduction gives each."""
    inputs = inputs_of(size, dtype, gpu)
    check_reduced(inputs, reduction, EVERYTHING)


def check_reduced(inputs: Inputs, reduction: str, workspace: int) -> None:
    """The gradients of a reduced loss equal the gradients of the losses one by one."""
    gpu, dtype = inputs["x"].device, inputs["x"].dtype
    leaves = [inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()]
    counted = inputs["target"] != -100
    upstream = torch.tensor(1.7, device=gpu)
    each = (upstream / counted.sum().clamp(min=1) if reduction == "mean" else upstream) * counted
    losses = mr.linear_cross_entropy(**inputs, reduction="none", workspace=workspace)
    expected = torch.autograd.grad(losses, leaves, each)
    loss = mr.linear_cross_entropy(**inputs, reduction=reduction, workspace=workspace)
    for got, wanted in zip(torch.autograd.grad(loss, leaves, upstream), expected, strict=True):
        steps = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, wanted, rtol=steps, atol=steps * float(wanted.abs().max()))


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("tiles", (2, 3, 4, 5))
def test_some_kept_local_gradients(tiles: int, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five tiles of classes all are kept, or one less than the workspace holds."""
    monkeypatch.setattr(slices, "_BYTES_TO_RECOMPUTE_IN", 0)
    inputs, options = inputs_of("ragged", torch.bfloat16, gpu), {"workspace": 513 * 256 * 2 * tiles}
    with Kept() as kept:
        check_operator("linear_cross_entropy", inputs, options)
        check_operator("linear_cross_entropy", inputs, options | {"softcap": 5.0})
        check_operator("linear_cross_entropy", inputs, options, differentiate=[])
        check_operator("linear_cross_entropy", inputs, options, differentiate=["weight"])
        check_operator("linear_cross_entropy", inputs, options | {"return_lse": True})
    some = 1112 if tiles == 5 else 256 * (tiles - 1)
    assert kept.classes == [some, 0, 0, some, some]


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("ignored", (0.0, 0.4, 1.0))
@pytest.mark.parametrize("tiles", (1, 3))
def test_some_kept_beside_wide_rows(
    tiles: int, ignored: float, dtype: torch.dtype, gpu: torch.device
) -> None:
    """The whole workspace holds kept local gradients: the gradient of x has room for the others."""
    inputs = cross_entropy_inputs(513, 6111, 2056, dtype=dtype, device=gpu, ignored=ignored)
    options = {"workspace": 513 * 256 * 2 * tiles, "logit_scale": 0.8}
    options["reduction"] = "none"
    with Kept() as kept:
        check_operator("linear_cross_entropy", inputs, options)
        check_operator("linear_cross_entropy", inputs, options, differentiate=["x"])
        check_operator("linear_cross_entropy", inputs, options, differentiate=["weight"])
        check_operator("linear_cross_entropy", inputs, options | {"return_lse": True})
        check_operator("linear_cross_entropy", inputs, options | {"softcap": 5.0})
    some = 256 * tiles
    assert kept.classes == [some, some, 0, some, 0]  # without a gradient of x there is no such room


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_some_kept_of_reduced_losses(reduction: str, gpu: torch.device) -> None:
    inputs = cross_entropy_inputs(513, 6111, 2056, dtype=torch.bfloat16, device=gpu)
    check_reduced(inputs, reduction, 513 * 256 * 2 * 3)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("name", ("x", "weight"))
def test_a_gradient_that_is_not_asked_for_in_the_end(name: str, gpu: torch.device) -> None:
    """A forward pass that counted on its memory for local gradients has it all the same."""
    inputs = cross_entropy_inputs(513, 6111, 2056, dtype=torch.bfloat16, device=gpu)
    leaves = {name: inputs[name].requires_grad_() for name in ("x", "weight")}
    loss = mr.linear_cross_entropy(**inputs, workspace=513 * 256 * 2)
    both = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), retain_graph=True), strict=True))
    (alone,) = torch.autograd.grad(loss, leaves[name])
    largest = float(both[name].abs().max())
    torch.testing.assert_close(alone, both[name], rtol=0.01, atol=0.01 * largest)


@pytest.mark.tiers("sm90")
def test_memory_beside_what_is_kept(gpu: torch.device) -> None:
    """Of a frozen head: between the passes the workspace; in the backward the gradient of x too, a copy and
    its sums."""
    inputs = cross_entropy_inputs(4096, 32000, 2048, dtype=torch.bfloat16, device=gpu)
    x = inputs["x"].requires_grad_()
    call = {**inputs, "workspace": 64 << 20}
    torch.autograd.grad(mr.linear_cross_entropy(**call), x)
    before = reset_peak()
    loss = mr.linear_cross_entropy(**call)
    assert 64 << 20 <= requested() - before < 65 << 20
    torch.autograd.grad(loss, x)
    assert peak() - before < 8 * x.numel() + (68 << 20)


@pytest.mark.tiers("sm90")
def test_memory_of_a_step(gpu: torch.device) -> None:
    """Between the passes the workspace; at the peak also the gradients, sums of the rows' and their copy."""
    inputs = cross_entropy_inputs(4096, 32000, 2048, dtype=torch.bfloat16, device=gpu)
    x, weight = inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()
    call = {**inputs, "workspace": 64 << 20}
    mr.linear_cross_entropy(**call).backward()
    x.grad = weight.grad = None
    before = reset_peak()
    loss = mr.linear_cross_entropy(**call)
    assert 64 << 20 <= requested() - before < 65 << 20
    loss.backward()
    del loss
    gradients = 2 * (x.numel() + weight.numel())
    assert requested() - before - gradients < 1 << 20
    assert peak() - before < gradients + 6 * x.numel() + (68 << 20)


@pytest.mark.tiers("sm90")
def test_frozen_rows_need_no_copy(gpu: torch.device) -> None:
    """Where all have one upstream gradient there is the copy in their order, and no other."""
    inputs = cross_entropy_inputs(4096, 32000, 2048, dtype=torch.bfloat16, device=gpu, ignored=0.0)
    weight = inputs["weight"].requires_grad_()
    call = {**inputs, "workspace": 64 << 20}
    torch.autograd.grad(mr.linear_cross_entropy(**call), weight)
    before = reset_peak()
    torch.autograd.grad(mr.linear_cross_entropy(**call), weight)
    gathered = 2 * inputs["x"].numel()
    assert peak() - before < 2 * weight.numel() + gathered + (68 << 20)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("workspace", (513 * 256 * 2 * 3, EVERYTHING), ids=("some", "all"))
def test_kept_local_gradients_serve_twice(workspace: int, gpu: torch.device) -> None:
    inputs = cross_entropy_inputs(513, 6111, 2056, dtype=torch.bfloat16, device=gpu)
    leaves = [inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()]
    with Kept() as kept:
        loss = mr.linear_cross_entropy(**inputs, reduction="none", workspace=workspace)
    assert kept.classes == [768 if workspace < EVERYTHING else 6112]
    upstream = torch.randn_like(loss)
    first, again, doubled = (
        torch.autograd.grad(loss, leaves, g, retain_graph=True) for g in (upstream, upstream, 2 * upstream)
    )
    assert_same_bits(dict(enumerate(again)), dict(enumerate(first)))
    for got, expected in zip(doubled, first, strict=True):
        torch.testing.assert_close(got, 2 * expected, rtol=0, atol=0)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("spread", (4.0, 8.0))
def test_kept_local_gradients_are_as_accurate(spread: float, gpu: torch.device) -> None:
    """Where logits differ a lot: the norm of the error is at most the norm with logits in float32."""
    rows, classes, width = 2048, 16000, 512
    x = normal(rows, width, dtype=torch.bfloat16, device=gpu)
    weight = normal(classes, width, dtype=torch.bfloat16, device=gpu, scale=spread * width**-0.5)
    target = torch.randint(classes, (rows,), device=gpu)
    target[::2] = (x @ weight.T)[::2].argmax(1)

    def gradients(function: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
        return [g.double() for g in torch.autograd.grad(function(*leaves), leaves)]

    def in_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((x @ weight.T).float(), target)

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x @ weight.T, target)

    ours = gradients(lambda x, w: mr.linear_cross_entropy(x, w, target, workspace=1 << 30), torch.bfloat16)
    eager, wanted = gradients(in_float32, torch.bfloat16), gradients(exact, torch.float64)
    for got, base, reference in zip(ours, eager, wanted, strict=True):
        assert (got - reference).norm() <= (base - reference).norm()


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("workspace", (1 << 30, 32 << 20), ids=("kept", "computed"))
def test_an_upstream_gradient_of_a_mean_is_not_rounded(workspace: int, gpu: torch.device) -> None:
    """The error beside float64 is the same whatever it is: it multiplies sums, not their 16-bit terms."""
    x = normal(2048, 512, dtype=torch.bfloat16, device=gpu).requires_grad_()
    weight = normal(16000, 512, dtype=torch.bfloat16, device=gpu, scale=4 * 512**-0.5).requires_grad_()
    target = torch.randint(16000, (2048,), device=gpu)
    loss = mr.linear_cross_entropy(x, weight, target, workspace=workspace)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, target)
    expected = torch.autograd.grad(exact, wide)

    def errors(upstream: float) -> list[float]:
        grad = torch.tensor(upstream, device=gpu)
        ours = torch.autograd.grad(loss, (x, weight), grad, retain_graph=True)
        return [
            float((a.double() - upstream * b).norm() / (upstream * b).norm())
            for a, b in zip(ours, expected, strict=True)
        ]

    for plain, scaled in zip(errors(1.0), errors(1.7), strict=True):
        assert scaled <= 1.05 * plain


@pytest.mark.parametrize("tiles", (1, 2, 3))
def test_workspaces(tiles: int, tier: str, gpu: torch.device) -> None:
    """Five tiles of classes in parts of 1, 2 and 3, the last part with fewer classes."""
    inputs = inputs_of("ragged", torch.bfloat16, gpu, bias=True)
    before = mr._C.path_counts()
    check_operator("linear_cross_entropy", inputs, {"workspace": 513 * 256 * 2 * tiles})
    assert f"cross_entropy_backward/cuda/{tier}/bfloat16" in ran(before)


def test_a_workspace_that_holds_no_tile(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    explanation = mr.explain(
        "linear_cross_entropy", inputs["x"], inputs["weight"], inputs["target"], workspace=513 * 256 * 2 - 1
    )
    assert "/simt/" in explanation.backward and "workspace" in str(explanation)
    check_operator("linear_cross_entropy", inputs, {"workspace": 0})


def test_no_rows(gpu: torch.device) -> None:
    """As a batch of nothing but padding, once it is packed, has."""
    inputs = cross_entropy_inputs(0, 300, 64, dtype=torch.bfloat16, device=gpu)
    x, weight = inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()
    dx, dweight = torch.autograd.grad(mr.linear_cross_entropy(**inputs), (x, weight))
    assert dx.shape == (0, 64) and not dweight.any()


@pytest.mark.parametrize("name", ("x", "weight", "bias"))
def test_some_gradients(name: str, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu, bias=True)
    check_operator("linear_cross_entropy", inputs, differentiate=[name])


@pytest.mark.parametrize("layout", ("contiguous", "expanded", "sliced"))
def test_upstream_gradients(layout: str, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    options = {"reduction": "none", "return_lse": True}
    check_operator("linear_cross_entropy", inputs, options, upstream=layout)


def order_of(rows: int, **counted: Any) -> tuple[list[int], int]:
    *order, count = active_rows.order_rows(torch.empty(rows, 1, device="cuda"), **counted).tolist()
    return order, count


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("share", (0.0, 0.3, 1.0))
@pytest.mark.parametrize("rows", (1, 31, 1024, 1025, 70001))
def test_the_order_of_rows(rows: int, share: float, gpu: torch.device) -> None:
    mask = torch.rand(rows, 2, device=gpu)[:, 0] < share
    order, count = mask.logical_not().int().argsort(stable=True).tolist(), int(mask.sum())
    assert order_of(rows, target=None, mask=mask) == (order, count)
    target = torch.where(mask, 5, 7)
    assert order_of(rows, target=target, mask=None, ignore_index=7) == (order, count)
    grad, of_rows = torch.tensor(3.0, device=gpu), torch.empty(rows, 1, device=gpu)
    for mean in (False, True):
        found, factors = active_rows.order_rows_and_factors(of_rows, grad, -0.5, mean, mask=mask)
        assert found.tolist() == [*order, count]
        expected = torch.full((rows,), -1.5, device=gpu) / (max(count, 1) if mean else 1)
        torch.testing.assert_close(factors, expected)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("workspace", (0.25, 1), ids=("recomputed", "kept"))
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("ignored", (0.0, 0.5, 0.98, 1.0))
@pytest.mark.parametrize("size", ("one_row", "ragged", "deep", "many_rows", "many_classes"))
def test_ignored_rows(size: str, ignored: float, bias: bool, workspace: float, gpu: torch.device) -> None:
    """In no order; their losses and gradients are exactly 0."""
    inputs = inputs_of(size, torch.bfloat16, gpu, bias=bias, ignored=ignored)
    rows, classes, _ = SIZES[size]
    bytes_of_tile = 2 * 256 * rows
    most = int(workspace * bytes_of_tile * (classes // 256 + 1))
    options = {"reduction": "none", "workspace": max(bytes_of_tile, most)}
    check_operator("linear_cross_entropy", inputs, options)
    leaves = {name: inputs[name].requires_grad_() for name in inputs if name != "target"}
    loss = mr.linear_cross_entropy(**inputs, **options)
    (dx, *_) = torch.autograd.grad(loss, list(leaves.values()), torch.randn_like(loss))
    not_counted = inputs["target"] == -100
    assert not loss[not_counted].any() and not dx[not_counted].any()


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("bias", (False, True), ids=("kept", "recomputed"))
@pytest.mark.parametrize("ignored", (0.0, 0.3, 0.9))
def test_rows_gathered_in_parts(
    ignored: float, bias: bool, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that are full, ragged and empty."""
    inputs = inputs_of("many_rows", torch.bfloat16, gpu, bias=bias, ignored=ignored)
    rows = len(inputs["x"])
    monkeypatch.setattr(active_rows, "_GATHER_BUFFER_BYTES", 1)
    (room,) = active_rows.new_gather_buffers(inputs["x"])
    assert len(room) < rows / 10 and rows % len(room) != 0
    options = {"reduction": "none", "workspace": EVERYTHING}
    check_operator("linear_cross_entropy", inputs, options)
    loss = mr.linear_cross_entropy(**inputs, **options)
    assert not loss[inputs["target"] == -100].any()


def forward_alone(
    inputs: Inputs,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses and log-sum-exps; `mr.linear_cross_entropy` returns these only where it computes all."""
    operands = (inputs["x"], inputs["weight"], inputs.get("bias"), inputs["target"], None)
    numbers = (logit_scale, softcap, -100, label_smoothing, z_loss, 0, -1)
    nothing_kept = (False, False, False, 0)
    loss, lse, *_ = torch.ops.monoidreduce.linear_cross_entropy(*operands, "none", *numbers, *nothing_kept)
    return loss, lse


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", (OPTIONS["plain"], OPTIONS["all"]), ids=("plain", "all"))
@pytest.mark.parametrize("ignored", (0.0, 0.01, 0.5, 0.98, 1.0))
@pytest.mark.parametrize("size", ("one_row", "narrow", "ragged", "odd_width", "deep", "many_rows"))
def test_a_forward_pass_alone_leaves_out_ignored_rows(
    size: str, ignored: float, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device
) -> None:
    """What they hold has no effect, nor has what lies between rows. Where they are not computed, their
    log-sum-exp is left at 0."""
    inputs = inputs_of(size, dtype, gpu, bias=bool(options), ignored=ignored)
    not_counted = inputs["target"] == -100
    wide = torch.full((SIZES[size][0], SIZES[size][2] + 24), torch.nan, dtype=dtype, device=gpu)
    rows = wide[:, 8 : SIZES[size][2] + 8]
    rows.copy_(inputs["x"])
    reference = check_operator(
        "linear_cross_entropy", inputs | {"x": rows}, {"reduction": "none", **options}, differentiate=()
    )
    rows[not_counted] = torch.nan
    loss, lse = forward_alone(inputs | {"x": rows}, **options)
    assert torch.equal(loss, reference["out0"])
    assert lse[~not_counted].all()
    plan = mr._C.plan_cross_entropy_forward(rows, inputs["weight"])
    assert plan.skips_rows == (SIZES[size][0] > 256)
    assert not plan.skips_rows or not lse[not_counted].any()


def check_replays_of_ignored_rows(call: Callable[[], tuple[torch.Tensor, ...]], target: torch.Tensor) -> None:
    """Captured once, a call of these targets serves any share of them that is ignored."""
    targets = target.clone()
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for share in (0.0, 0.4, 0.9, 1.0, 0.1, 0.0):
        target.copy_(targets.masked_fill(torch.rand(targets.shape, device=target.device) < share, -100))
        graph.replay()
        got = [result.clone() for result in captured]
        for result, wanted in zip(got, call(), strict=True):
            assert torch.equal(result, wanted)


@pytest.mark.tiers("sm90")
def test_a_graph_of_a_forward_pass_serves_any_number_of_ignored_rows(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu, ignored=0.0)
    check_replays_of_ignored_rows(
        lambda: (mr.linear_cross_entropy(**inputs, reduction="none"),), inputs["target"]
    )


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("workspace", (513 * 256 * 2, EVERYTHING), ids=("recomputed", "kept"))
def test_a_graph_serves_any_number_of_ignored_rows(workspace: int, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu, ignored=0.0)
    leaves = [inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()]

    def call() -> tuple[torch.Tensor, ...]:
        loss = mr.linear_cross_entropy(**inputs, workspace=workspace)
        return (loss.detach(), *torch.autograd.grad(loss, leaves))

    check_replays_of_ignored_rows(call, inputs["target"])


FEW_ROWS: dict[str, tuple[int, int, int]] = {
    "one_row": (1, 3000, 256),
    "some": (37, 1111, 200),
    "odd_width": (200, 1111, 101),
    "one_tile": (256, 2048, 512),
}


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("weighted", (False, True), ids=("equal", "weighted"))
@pytest.mark.parametrize("workspace", (0.25, 1), ids=("recomputed", "kept"))
@pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", FEW_ROWS)
def test_few_rows_stay_where_they_are(
    size: str,
    options: dict[str, Any],
    reduction: str,
    workspace: float,
    weighted: bool,
    gpu: torch.device,
) -> None:
    """Without an order of rows. Half of the targets are ignored."""
    rows, classes, _ = FEW_ROWS[size]
    inputs = cross_entropy_inputs(*FEW_ROWS[size], dtype=torch.bfloat16, device=gpu, ignored=0.5)
    inputs["target"][0] = classes - 1
    assert not mr._C.plan_cross_entropy_forward(inputs["x"], inputs["weight"]).skips_rows
    bytes_of_tile = 2 * 256 * rows
    limit = max(bytes_of_tile, int(workspace * bytes_of_tile * (classes // 256 + 1)))
    options = {"reduction": reduction, "workspace": limit, **options}
    if weighted:
        options["class_weight"] = class_weights(classes, dtype=torch.bfloat16, device=gpu)
    check_operator("linear_cross_entropy", inputs, options)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("garbage", (torch.nan, torch.inf))
@pytest.mark.parametrize("reduction", ("none", "mean"))
@pytest.mark.parametrize("weighted", (False, True), ids=("equal", "weighted"))
@pytest.mark.parametrize("bias", (False, True), ids=("kept", "recomputed"))
@pytest.mark.parametrize("size", ("some", "odd_width", "one_tile"))
def test_garbage_among_few_rows(
    size: str, bias: bool, weighted: bool, reduction: str, garbage: float, gpu: torch.device
) -> None:
    """An infinity may change how the scores of rows in the same warp are rounded."""
    inputs = cross_entropy_inputs(*FEW_ROWS[size], dtype=torch.bfloat16, device=gpu, bias=bias, ignored=0.5)
    ignored, options = inputs["target"] == -100, {"reduction": reduction}
    if weighted:
        options["class_weight"] = class_weights(FEW_ROWS[size][1], dtype=torch.bfloat16, device=gpu)
    upstream = torch.randn(2, len(ignored) if reduction == "none" else 1, device=gpu)[0].squeeze()

    def results(value: float) -> list[torch.Tensor]:
        call = inputs | {"x": inputs["x"].masked_fill(ignored[:, None], value)}
        leaves = {name: t.detach().requires_grad_() for name, t in call.items() if name != "target"}
        loss = mr.linear_cross_entropy(**leaves, target=call["target"], **options)
        return [loss.detach(), *torch.autograd.grad(loss, list(leaves.values()), upstream)]

    found, expected = results(garbage), results(0.0)
    assert not found[1][ignored].any()
    for ours, clean in zip(found, expected, strict=True):
        steps = 2 * torch.finfo(ours.dtype).eps
        torch.testing.assert_close(ours, clean, rtol=steps, atol=steps * float(clean.abs().max()))


@pytest.mark.tiers("sm90")
def test_a_graph_serves_any_number_of_ignored_ones_among_few_rows(gpu: torch.device) -> None:
    inputs = inputs_of("one_tile", torch.bfloat16, gpu, ignored=0.0)
    leaves = [inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()]

    def call() -> tuple[torch.Tensor, ...]:
        loss = mr.linear_cross_entropy(**inputs)
        return (loss.detach(), *torch.autograd.grad(loss, leaves))

    check_replays_of_ignored_rows(call, inputs["target"])


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("share", (0.0, 0.4, 1.0))
@pytest.mark.parametrize("rows", (1, 200, 256, 1025))
def test_cleared_rows(rows: int, share: float, gpu: torch.device) -> None:
    mask = torch.rand(rows, 2, device=gpu)[:, 0] < share
    target, count = torch.where(mask, 5, 7), int(mask.sum())
    wide = torch.full((rows, 64), torch.nan, dtype=torch.bfloat16, device=gpu)
    x, grad = wide[:, 8:48], torch.tensor(3.0, device=gpu)
    x[mask] = torch.randn(count, 40, device=gpu).to(x.dtype)
    for mean in (False, True):
        of_all = -1.5 / (max(count, 1) if mean else 1)
        expected = torch.cat(
            (torch.where(mask, of_all, 0.0), torch.tensor([of_all * (count > 0)], device=gpu))
        )
        for active in ({"mask": mask}, {"target": target, "ignore_index": 7}):
            cleared, factors = active_rows.clear_rows_and_factors(x, grad, -0.5, mean, **active)
            assert torch.equal(cleared, torch.where(mask[:, None], x, 0))
            assert torch.equal(cleared, active_rows.clear_rows(x, **active))
            torch.testing.assert_close(factors, expected)


@pytest.mark.parametrize("rows", (200, 300))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
@pytest.mark.parametrize("upstream", (torch.nan, torch.inf))
def test_no_gradient_of_ignored_rows_alone(
    upstream: float, reduction: str, weighted: bool, bias: bool, rows: int, gpu: torch.device
) -> None:
    """All gradients are 0, whatever the upstream gradient is."""
    inputs = cross_entropy_inputs(rows, 2000, 256, dtype=torch.bfloat16, device=gpu, bias=bias)
    leaves = [inputs[name].requires_grad_() for name in inputs if name != "target"]
    inputs["target"].fill_(-100)
    weights = class_weights(2000, dtype=torch.bfloat16, device=gpu) if weighted else None
    loss = mr.linear_cross_entropy(**inputs, reduction=reduction, class_weight=weights)
    for gradient in torch.autograd.grad(loss, leaves, torch.full_like(loss, upstream)):
        assert not gradient.any()


@pytest.mark.parametrize("return_lse", (False, True))
def test_garbage_in_ignored_rows(return_lse: bool, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    ignored = inputs["target"] == -100
    found = []
    for garbage in (0.0, torch.nan, torch.inf):
        x = inputs["x"].masked_fill(ignored[:, None], garbage).requires_grad_()
        weight = inputs["weight"].clone().requires_grad_()
        loss = mr.linear_cross_entropy(x, weight, inputs["target"], return_lse=return_lse)
        (loss[0] if isinstance(loss, tuple) else loss).backward()
        found.append({"x": x.grad, "weight": weight.grad})
    for gradients in found:
        assert_same_bits(gradients, found[0])


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("scale", (1.0, 0.3))
@pytest.mark.parametrize("size", SIZES)
def test_logsumexp_matmul(size: str, scale: float, dtype: torch.dtype, tier: str, gpu: torch.device) -> None:
    rows, columns, width = SIZES[size]
    inputs = {
        "a": normal(rows, width, dtype=dtype, device=gpu),
        "b": normal(columns, width, dtype=dtype, device=gpu, scale=width**-0.5),
    }
    before = mr._C.path_counts()
    check_operator("logsumexp_matmul", inputs, {"scale": scale})
    assert ran(before) == {f"logsumexp_{way}/cuda/{tier}/{name_of(dtype)}" for way in ("forward", "backward")}


@pytest.mark.parametrize("spread", (1.0, 30.0, 1000.0))
def test_large_scores(spread: float, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    inputs["weight"] *= spread
    check_operator("linear_cross_entropy", inputs, {"reduction": "none"})


TRANSPOSED_SIZES = {
    "one_tile": (128, 256, 64),
    "narrow": (257, 72, 8),
    "ragged": (513, 1112, 200),
    "deep": (300, 1504, 2056),
    "many_classes": (130, 70008, 64),
}


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("workspace", (0.25, 1), ids=("recomputed", "kept"))
@pytest.mark.parametrize("options", (OPTIONS["plain"], OPTIONS["all"]), ids=("plain", "all"))
@pytest.mark.parametrize("size", TRANSPOSED_SIZES)
def test_transposed_weights(
    size: str, options: dict[str, Any], workspace: float, dtype: torch.dtype, gpu: torch.device
) -> None:
    rows, classes, width = TRANSPOSED_SIZES[size]
    inputs = cross_entropy_inputs(rows, classes, width, dtype=dtype, device=gpu)
    inputs["weight"] = inputs["weight"].T.contiguous().T
    assert "copied" not in str(mr.explain("linear_cross_entropy", *inputs.values(), **options))
    bytes_of_tile = 2 * 256 * rows
    options = {
        "workspace": max(bytes_of_tile, int(workspace * bytes_of_tile * (classes // 256 + 1))),
        **options,
    }
    before = mr._C.path_counts()
    check_operator("linear_cross_entropy", inputs, {"reduction": "none", **options})
    assert ran(before) == {
        f"cross_entropy_{way}/cuda/sm90/{name_of(dtype)}" for way in ("forward", "backward")
    }
    before = mr._C.path_counts()
    check_operator("logsumexp_matmul", {"a": inputs["x"], "b": inputs["weight"]})
    assert ran(before) == {f"logsumexp_{way}/cuda/sm90/{name_of(dtype)}" for way in ("forward", "backward")}


@pytest.mark.tiers("sm90")
def test_transposed_weights_are_not_copied(gpu: torch.device) -> None:
    inputs = cross_entropy_inputs(512, 32000, 1024, dtype=torch.bfloat16, device=gpu)
    x, weight = inputs["x"].requires_grad_(), inputs["weight"].T.contiguous().T.requires_grad_()
    call = {**inputs, "x": x, "weight": weight, "workspace": 16 << 20}
    mr.linear_cross_entropy(**call).backward(inputs=[x])
    before = reset_peak()
    loss = mr.linear_cross_entropy(**call)
    assert peak() - before < 8 << 20
    torch.autograd.grad(loss, (x, weight))
    held = 16 * x.numel() + 2 * weight.numel()
    assert peak() - before < held + (20 << 20)


@pytest.mark.tiers("sm80")
def test_is_explained(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    tensors = (inputs["x"], inputs["weight"], inputs["target"])
    explanation = mr.explain("linear_cross_entropy", *tensors)
    assert "/sm80/" in explanation.forward and "/sm80/" in explanation.backward
    assert explanation.deterministic and "through mma.sync" in str(explanation)


@pytest.mark.tiers("sm90")
def test_explained(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what is padded or copied, and of how many classes local gradients are kept."""
    monkeypatch.setattr(slices, "_BYTES_TO_RECOMPUTE_IN", 0)

    def text(size: str, layout: Any = lambda t: t, **options: Any) -> str:
        x, weight, target = inputs_of(size, torch.bfloat16, gpu).values()
        return str(mr.explain("linear_cross_entropy", x, layout(weight), target, **options))

    assert "of width 104, padded from 101" in text("odd_width")
    assert "padded" not in text("ragged") and "copied" not in text("ragged")
    odd = text("ragged", lambda t: torch.nn.functional.pad(t, (0, 3))[:, :-3])
    assert "weight is copied" in odd and "(203, 1)" in odd and "x is copied" not in odd
    assert "weight is copied" in text("ragged", lambda t: t.T.contiguous().T)  # 1111 classes, an odd pitch
    three_tiles = 513 * 256 * 2 * 3
    assert "of 512 of 1111 classes" in text("ragged", workspace=three_tiles)
    assert "of 1111 of 1111 classes" in text("ragged", workspace=2 * three_tiles)
    assert "of 0 of 1111 classes" in text("ragged", workspace=2 * three_tiles, softcap=5.0)


def test_layouts(tier: str, gpu: torch.device) -> None:
    """Padded rows are read in place, and transposed weights; transposed and odd ones are copied."""
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    padded = {name: torch.nn.functional.pad(inputs[name], (0, 8))[:, :-8] for name in ("x", "weight")}
    odd = {name: torch.nn.functional.pad(inputs[name], (0, 3))[:, :-3] for name in ("x", "weight")}
    transposed = {name: inputs[name].T.contiguous().T for name in ("x", "weight")}
    before = mr._C.path_counts()
    for changed in (padded, odd, transposed):
        check_operator("linear_cross_entropy", {**inputs, **changed})
    assert ran(before) == {f"cross_entropy_{way}/cuda/{tier}/bfloat16" for way in ("forward", "backward")}


@pytest.mark.parametrize("value", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize("place", ("x", "weight"))
def test_non_finite_inputs(place: str, value: float, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu, ignored=0.0)
    inputs[place][150, 7] = value
    for workspace in (513 * 256 * 2, EVERYTHING):
        options = {"reduction": "none", "return_lse": True, "workspace": workspace}
        found = check_operator("linear_cross_entropy", inputs, options)
        assert (found["out1"] == torch.inf).any() == (value == value)
    check_operator("logsumexp_matmul", {"a": inputs["x"], "b": inputs["weight"]})


def test_targets_out_of_range(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    inputs["target"][:3] = torch.tensor([1111, -1, 2**32 + 5])
    loss = mr.linear_cross_entropy(**inputs, reduction="none")
    assert loss[:3].isnan().all() and loss[3:].isfinite().all()


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("workspace", (EVERYTHING, 1 << 20))
def test_deterministic_mode_needs_no_setting_of_torch(
    workspace: int, gpu: torch.device, deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own products would raise without it; these are kernels of the library."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    options = {"workspace": workspace}
    assert "/sm90/" in mr.explain("linear_cross_entropy", *inputs.values(), **options).backward
    with monkeypatch.context() as refused:
        for product in ("mm", "addmm", "matmul"):
            refused.setattr(torch, product, None)
        leaves = [inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()]
        loss = mr.linear_cross_entropy(**inputs, **options)
        gradients = torch.autograd.grad(loss, leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_same_bits_every_time(gpu: torch.device) -> None:
    inputs = inputs_of("many_rows", torch.bfloat16, gpu)
    first = check_operator("linear_cross_entropy", inputs, upstream=[torch.tensor(2.0, device=gpu)])
    for _ in range(3):
        again = check_operator("linear_cross_entropy", inputs, upstream=[torch.tensor(2.0, device=gpu)])
        assert_same_bits(again, first)


@pytest.mark.parametrize("workspace", (513 * 256 * 2, EVERYTHING), ids=("recomputed", "kept"))
def test_captured_in_a_graph(workspace: int, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    leaves = [inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()]

    def call() -> tuple[torch.Tensor, ...]:
        loss = mr.linear_cross_entropy(**inputs, workspace=workspace)
        return (loss.detach(), *torch.autograd.grad(loss, leaves))

    check_captured(call)


def test_no_logits_are_stored(gpu: torch.device) -> None:
    inputs = cross_entropy_inputs(4096, 32000, 256, dtype=torch.bfloat16, device=gpu)
    x, weight = inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()
    mr.linear_cross_entropy(**inputs).backward()
    before = reset_peak()
    loss = mr.linear_cross_entropy(**inputs, workspace=16 << 20)
    assert peak() - before < 8 << 20
    torch.autograd.grad(loss, (x, weight))
    held = 16 * x.numel() + 2 * weight.numel()  # the copy, the sum and the gradient of x, that of the weight
    assert peak() - before < held + (20 << 20)


@pytest.mark.tiers("sm90")
def test_tier_can_be_named(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    tensors = (inputs["x"], inputs["weight"], inputs["target"])
    assert "/sm90/" in mr.explain("linear_cross_entropy", *tensors).forward
    monkeypatch.setenv("MONOIDREDUCE_CUDA_TIER", "simt")
    explanation = mr.explain("linear_cross_entropy", *tensors)
    assert "/simt/" in explanation.forward and "MONOIDREDUCE_CUDA_TIER=simt" in str(explanation)
    check_operator("linear_cross_entropy", inputs)
    assert "/simt/" in mr.explain("logsumexp_matmul", *tensors[:2]).forward
