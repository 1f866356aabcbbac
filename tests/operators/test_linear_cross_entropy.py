"""linear_cross_entropy: sizes, options and gradients, against the rule of tolerance.py."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from specimens import DTYPES, class_weights, cross_entropy_inputs, integers, name_of, normal
from tolerance import check_operator

import monoidreduce as mr

ROWS = (0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 129, 257, 511, 513)
CLASSES = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 119, 120, 121, 127, 129, 257, 480, 481, 512, 513, 1031)
WIDTHS = (0, 1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 128, 131, 257)
PER_TOKEN = {"reduction": "none", "return_lse": True}


def _draw(classes: int) -> Any:
    """One class has probability 1 and gradients of 0, so with normal numbers there is only rounding."""
    return integers if classes == 1 else normal


@pytest.mark.isa
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("classes", (33, 300))
def test_number_of_rows(rows: int, classes: int, device: torch.device) -> None:
    check_operator(
        "linear_cross_entropy",
        cross_entropy_inputs(rows, classes, dtype=torch.float32, device=device),
        PER_TOKEN,
    )


@pytest.mark.isa
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("rows", (5, 65))
def test_number_of_classes(rows: int, classes: int, device: torch.device) -> None:
    inputs = cross_entropy_inputs(rows, classes, dtype=torch.float32, device=device, draw=_draw(classes))
    check_operator("linear_cross_entropy", inputs, PER_TOKEN, exact=classes == 1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows, classes", ((34, 45), (3, 130)))
def test_width(width: int, rows: int, classes: int, device: torch.device) -> None:
    inputs = cross_entropy_inputs(rows, classes, width, dtype=torch.float32, device=device, bias=True)
    check_operator("linear_cross_entropy", inputs, PER_TOKEN | {"logit_scale": 0.3})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "rows, classes, width", ((1, 129, 64), (65, 257, 48), (256, 64, 64), (257, 1031, 96))
)
def test_sizes_in_every_dtype(
    rows: int, classes: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_operator(
        "linear_cross_entropy",
        cross_entropy_inputs(rows, classes, width, dtype=dtype, device=device),
        PER_TOKEN,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_no_rows(dtype: torch.dtype, device: torch.device) -> None:
    inputs = cross_entropy_inputs(0, 5, 7, dtype=dtype, device=device, bias=True)
    for reduction in ("none", "mean", "sum"):
        results = check_operator("linear_cross_entropy", inputs, {"reduction": reduction, "return_lse": True})
        assert (results["d_weight"] == 0).all() and (results["d_bias"] == 0).all()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label_smoothing": {"label_smoothing": 0.2},
    "label_smoothing_1": {"label_smoothing": 1.0},
    "z_loss": {"z_loss": 0.05},
    "softcap": {"softcap": 3.0},
    "softcap_small": {"softcap": 0.5},
    "logit_scale": {"logit_scale": 0.25},
    "logit_scale_negative": {"logit_scale": -1.5},
    "all": {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 6.0, "logit_scale": 1.3},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options: dict[str, Any], bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    check_operator(
        "linear_cross_entropy",
        cross_entropy_inputs(dtype=dtype, device=device, bias=bias),
        PER_TOKEN | options,
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_accuracy(options: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Sizes at which the whole rule applies to x and weight, in float32 too."""
    inputs = cross_entropy_inputs(400, 513, 64, dtype=dtype, device=device, bias=True)
    check_operator("linear_cross_entropy", inputs, PER_TOKEN | options)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("name", ("plain", "label_smoothing", "label_smoothing_1", "z_loss", "all"))
def test_class_weight(name: str, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    inputs = cross_entropy_inputs(dtype=dtype, device=device, bias=bias)
    weights = {"class_weight": class_weights(67, dtype=dtype, device=device)}
    check_operator("linear_cross_entropy", inputs, PER_TOKEN | OPTIONS[name] | weights)


@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
@pytest.mark.parametrize("label_smoothing", (0.0, 0.3))
def test_class_weight_is_the_weight_of_torch(
    label_smoothing: float, reduction: str, device: torch.device
) -> None:
    place: Any = {"dtype": torch.float64, "device": device}
    inputs = cross_entropy_inputs(40, 67, ignored=0.3, ignore_index=5, **place)
    weights = class_weights(67, **place)
    x, weight = (inputs[name].requires_grad_() for name in ("x", "weight"))
    options: Any = {"ignore_index": 5, "reduction": reduction, "label_smoothing": label_smoothing}
    found = mr.linear_cross_entropy(**inputs, class_weight=weights, **options)
    expected = F.cross_entropy(x @ weight.T, inputs["target"], weights, **options)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(y, (x, weight), upstream) for y in (found, expected)))


def test_class_weight_where_no_target_counts(device: torch.device) -> None:
    """All targets ignored: 0, as without weights. All targets of weight 0: what torch makes of 0 / 0."""
    inputs = cross_entropy_inputs(9, 7, ignored=1.0, dtype=torch.float32, device=device)
    inputs["x"].requires_grad_()
    weights = torch.zeros(7, device=device)
    loss = mr.linear_cross_entropy(**inputs, class_weight=weights + 2)
    (gradient,) = torch.autograd.grad(loss, inputs["x"])
    assert loss == 0 and not gradient.any()
    inputs["target"] = torch.arange(9, device=device) % 7
    assert mr.linear_cross_entropy(**inputs, class_weight=weights).isnan()
    assert mr.linear_cross_entropy(**inputs, class_weight=weights, reduction="sum") == 0


@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
@pytest.mark.parametrize("label_smoothing", (0.0, 0.3, 1.0))
@pytest.mark.parametrize("z_loss", (0.0, 0.1))
def test_targets_of_weight_0(
    z_loss: float, label_smoothing: float, reduction: str, device: torch.device
) -> None:
    """Values and gradients are torch's, NaN for NaN. An ignored token has none."""
    place: Any = {"dtype": torch.float64, "device": device}
    x, weight = (torch.randn(shape, **place, requires_grad=True) for shape in ((4, 3), (5, 3)))
    options: Any = {"reduction": reduction, "label_smoothing": label_smoothing}
    for weights in ((0, 1, 2, 0, 3), (0, 0, 0, 0, 0)):
        class_weight = torch.tensor(weights, **place)
        for targets in ((0, 0, 3, 0), (0, -100, 3, 0), (0, 2, 3, -100), (-100, -100, -100, 0)):
            target = torch.tensor(targets, device=device)
            given: Any = {"class_weight": class_weight, "z_loss": z_loss, **options}
            found = mr.linear_cross_entropy(x, weight, target, **given)
            logits = x @ weight.T
            expected = F.cross_entropy(logits, target, class_weight, **options)
            counted = target != -100
            squares = torch.where(counted, z_loss * logits.logsumexp(-1).square(), 0)
            if reduction == "none":
                expected = expected + squares
            else:
                sum_of_weights = class_weight[target.clamp(0)][counted].sum()
                expected = expected + squares.sum() / (sum_of_weights if reduction == "mean" else 1)
            upstream = torch.randn_like(found)
            results = zip(
                (found, *torch.autograd.grad(found, (x, weight), upstream)),
                (expected, *torch.autograd.grad(expected, (x, weight), upstream)),
                strict=True,
            )
            for result, of_torch in results:
                torch.testing.assert_close(result, of_torch, equal_nan=True)


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("reduction", ("none", "sum"))
def test_a_class_weight_that_is_not_finite(reduction: str, bad: float, device: torch.device) -> None:
    """It reaches the tokens of its class, as in torch; with label smoothing all tokens that count."""
    place: Any = {"dtype": torch.float64, "device": device}
    x, weight = (torch.randn(shape, **place, requires_grad=True) for shape in ((4, 3), (5, 3)))
    target = torch.tensor((0, 2, -100, 3), device=device)
    for of_no_target in (False, True):
        class_weight = torch.tensor((1.0, 0.0, 2.0, 0.5, 3.0), **place)
        class_weight[4 if of_no_target else 2] = bad
        given: Any = {"class_weight": class_weight, "reduction": reduction}
        found = mr.linear_cross_entropy(x, weight, target, **given)
        expected = F.cross_entropy(x @ weight.T, target, class_weight, reduction=reduction)
        torch.testing.assert_close(found, expected, equal_nan=True)
        gradients = [torch.autograd.grad(loss.sum(), (x, weight)) for loss in (found, expected)]
        torch.testing.assert_close(gradients[0][0], gradients[1][0], equal_nan=True)
        if of_no_target:
            torch.testing.assert_close(gradients[0][1], gradients[1][1])
        smoothed = mr.linear_cross_entropy(x, weight, target, label_smoothing=0.1, **given)
        if reduction == "none":
            assert smoothed.isnan().tolist() == [True, True, False, True] and smoothed[2] == 0
        else:
            assert smoothed.isnan()


def test_class_weight_under_torch(device: torch.device) -> None:
    """Compiled in one graph, by opcheck's rules, mapped, and under autocast."""
    inputs = cross_entropy_inputs(33, 67, dtype=torch.float32, device=device)
    weights = class_weights(67, dtype=torch.float32, device=device)
    options = {"class_weight": weights, "label_smoothing": 0.1}

    def loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mr.linear_cross_entropy(x, weight, target, **options)

    compiled = torch.compile(mr.linear_cross_entropy, fullgraph=True)
    check_operator("linear_cross_entropy", inputs, options, function=compiled)
    numbers = ("mean", 1.0, 0.0, -100, 0.1, 0.0, 0, -1, False, False, False, 0)
    x = inputs["x"].requires_grad_()
    torch.library.opcheck(
        torch.ops.monoidreduce.linear_cross_entropy.default,
        (x, inputs["weight"], None, inputs["target"], weights, *numbers),
    )
    gradient = torch.func.grad(loss)(x.detach(), inputs["weight"], inputs["target"])
    torch.testing.assert_close(gradient, *torch.autograd.grad(loss(x, inputs["weight"], inputs["target"]), x))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        halved = loss(x, inputs["weight"], inputs["target"])
    assert halved.dtype == torch.float32 and abs(halved - loss(**inputs)) < 0.1


def test_class_weight_has_no_gradient(device: torch.device) -> None:
    inputs = cross_entropy_inputs(9, 7, dtype=torch.float32, device=device)
    weights = torch.ones(7, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="class_weight: expected a tensor that requires no gradient"):
        mr.linear_cross_entropy(**inputs, class_weight=weights)
    with torch.no_grad():
        mr.linear_cross_entropy(**inputs, class_weight=weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
@pytest.mark.parametrize("return_lse", (False, True), ids=("loss", "loss_and_lse"))
def test_reductions(reduction: str, return_lse: bool, dtype: torch.dtype, device: torch.device) -> None:
    """The gradient of a mean is made large, or each token's share would drown in the floor of half types."""
    inputs = cross_entropy_inputs(dtype=dtype, device=device, bias=True)
    options = {"reduction": reduction, "return_lse": return_lse, "label_smoothing": 0.1}
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    place: Any = {"dtype": accumulation, "device": device}
    shape = inputs["target"].shape if reduction == "none" else ()
    upstream = [torch.randn(shape, **place) * (750.0 if reduction == "mean" else 3.0)]
    if return_lse:
        upstream.append(torch.randn(2 * len(inputs["target"]), **place)[::2])
    check_operator("linear_cross_entropy", inputs, options, upstream=upstream)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("softcap", (None, 3.0))
def test_gradient_through_lse_alone(softcap: float | None, dtype: torch.dtype, device: torch.device) -> None:
    inputs = cross_entropy_inputs(dtype=dtype, device=device, bias=True)
    upstream = [None, 3.0 * torch.randn(514, device=device)[::2]]
    check_operator("linear_cross_entropy", inputs, PER_TOKEN | {"softcap": softcap}, upstream=upstream)


@pytest.mark.parametrize("layout", ("strided", "sliced", "expanded", "contiguous"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_upstream_layouts(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    inputs = cross_entropy_inputs((3, 14), dtype=dtype, device=device, bias=True)
    check_operator("linear_cross_entropy", inputs, PER_TOKEN, upstream=layout)


@pytest.mark.parametrize("shape", ((), (6,), (2, 3), (2, 1, 5), (0, 3)), ids=str)
def test_leading_axes(shape: tuple[int, ...], device: torch.device) -> None:
    inputs = cross_entropy_inputs(shape, dtype=torch.float64, device=device, ignored=0.0)
    results = check_operator("linear_cross_entropy", inputs, PER_TOKEN)
    assert results["out0"].shape == results["out1"].shape == shape


@pytest.mark.parametrize(
    "integer", (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), ids=name_of
)
def test_target_dtypes(integer: torch.dtype, device: torch.device) -> None:
    inputs = cross_entropy_inputs(dtype=torch.float32, device=device, ignored=0.0)
    inputs["target"] = inputs["target"].to(integer)
    check_operator("linear_cross_entropy", inputs, PER_TOKEN)


@pytest.mark.parametrize("ignore_index", (-100, -1, 0, 5, 66, 10**6))
@pytest.mark.parametrize("reduction", ("none", "mean"))
def test_ignore_index(ignore_index: int, reduction: str, device: torch.device) -> None:
    """Also an index that is a class, and one beyond all classes."""
    inputs = cross_entropy_inputs(dtype=torch.float32, device=device, ignore_index=ignore_index, ignored=0.4)
    ignored = inputs["target"] == ignore_index
    results = check_operator(
        "linear_cross_entropy",
        inputs,
        {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.1},
    )
    assert ignored.any() and (results["d_x"][ignored] == 0).all()
    if reduction == "none":
        assert (results["out0"][ignored] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
def test_all_ignored(reduction: str, dtype: torch.dtype, device: torch.device) -> None:
    inputs = cross_entropy_inputs(dtype=dtype, device=device, bias=True, ignored=1.0)
    results = check_operator(
        "linear_cross_entropy", inputs, {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.1}
    )
    assert all((result == 0).all() for result in results.values())


NAMES = ("x", "weight", "bias")


@pytest.mark.parametrize("names", [c for r in range(4) for c in itertools.combinations(NAMES, r)], ids=str)
def test_every_subset_of_gradients(names: tuple[str, ...], device: torch.device) -> None:
    inputs = cross_entropy_inputs(dtype=torch.float32, device=device, bias=True)
    check_operator("linear_cross_entropy", inputs, PER_TOKEN, differentiate=names)
    leaves = {name: t.detach().requires_grad_(name in names) for name, t in inputs.items()}
    loss = mr.linear_cross_entropy(**leaves)
    assert loss.requires_grad == bool(names)
    if names:
        loss.backward()
        assert {name for name, leaf in leaves.items() if leaf.grad is not None} == set(names)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("workspace", (0, 1, 4096, 1 << 20))
def test_any_workspace_gives_the_same(workspace: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = cross_entropy_inputs(97, 513, 24, dtype=dtype, device=device, bias=True)
    options = PER_TOKEN | {"softcap": 5.0, "label_smoothing": 0.1}
    check_operator("linear_cross_entropy", inputs, options | {"workspace": workspace})
    with mr.workspace(workspace):
        check_operator("linear_cross_entropy", inputs, options)


@pytest.mark.isa
@pytest.mark.parametrize("label_smoothing", (0.0, 0.1, 1.0))
@pytest.mark.parametrize("level", (0, 10, 100, 1000, -1000))
def test_levels_of_logits(level: int, label_smoothing: float, device: torch.device) -> None:
    """A constant added to all logits changes no probability, and must cost no digits. They are x, exactly."""
    inputs = {
        "x": normal(200, 120, dtype=torch.float32, device=device) + level,
        "weight": torch.eye(120, device=device),
        "target": torch.randint(0, 120, (200,), device=device),
    }
    check_operator("linear_cross_entropy", inputs, PER_TOKEN | {"label_smoothing": label_smoothing})


def test_more_classes_than_float32_counts(device: torch.device) -> None:
    """2^24 + 1 is not a number of float32: the last class but one is a target all the same."""
    classes = (1 << 24) + 1
    x, weight = torch.ones(2, 1, device=device), torch.zeros(classes, 1, device=device)
    target = torch.tensor([classes - 1, 0], device=device)
    loss = mr.linear_cross_entropy(x, weight, target, reduction="none")
    torch.testing.assert_close(loss, torch.full((2,), math.log(classes), device=device))


@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
@pytest.mark.parametrize("label_smoothing", (0.0, 0.1))
def test_matches_torch(reduction: str, label_smoothing: float, device: torch.device) -> None:
    """The reference could share a misreading with the operator; torch's own cross entropy cannot."""
    inputs = cross_entropy_inputs(dtype=torch.float64, device=device, bias=True)
    logits = F.linear(inputs["x"], inputs["weight"], inputs["bias"])
    options: Any = {"reduction": reduction, "label_smoothing": label_smoothing}
    torch.testing.assert_close(
        mr.linear_cross_entropy(**inputs, **options),
        F.cross_entropy(logits, inputs["target"], **options),
        rtol=1e-11,
        atol=1e-12,
    )


def test_gradients_of_the_classes_sum_to_zero(device: torch.device) -> None:
    """Probabilities sum to 1 however smoothed, so a constant added to every logit changes nothing."""
    inputs = cross_entropy_inputs(65, 300, dtype=torch.float64, device=device, bias=True)
    inputs["bias"].requires_grad_()
    loss = mr.linear_cross_entropy(**inputs, reduction="sum", label_smoothing=0.1)
    (d_bias,) = torch.autograd.grad(loss, inputs["bias"])
    assert d_bias.abs().max() > 0.1 and abs(float(d_bias.sum())) < 1e-11
    inputs["bias"] = inputs["bias"].detach() + 11.0
    torch.testing.assert_close(
        mr.linear_cross_entropy(**inputs, reduction="sum", label_smoothing=0.1), loss, rtol=1e-12, atol=0
    )


def test_order_of_classes_does_not_matter(device: torch.device) -> None:
    inputs = cross_entropy_inputs(65, 300, dtype=torch.float64, device=device, ignored=0.0)
    order = torch.randperm(300, device=device)
    shuffled = mr.linear_cross_entropy(
        inputs["x"], inputs["weight"][order], order.argsort()[inputs["target"]], reduction="none"
    )
    torch.testing.assert_close(
        mr.linear_cross_entropy(**inputs, reduction="none"), shuffled, rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_one_hot_softmax_is_exact(dtype: torch.dtype, device: torch.device) -> None:
    """Row i scores 1e4 on class i and 0 elsewhere, so another target costs exactly 1e4."""
    rows = 70
    x = torch.eye(rows, 130, dtype=dtype, device=device).requires_grad_()
    weight = torch.eye(130, dtype=dtype, device=device).requires_grad_()
    target = torch.arange(rows, device=device)
    target[::2] += 1
    loss, lse = mr.linear_cross_entropy(x, weight, target, logit_scale=1e4, reduction="none", return_lse=True)
    expected = torch.where(target == torch.arange(rows, device=device), 0.0, 1e4).to(loss.dtype)
    torch.testing.assert_close(loss, expected, rtol=2 * torch.finfo(loss.dtype).eps, atol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, 1e4), rtol=2 * torch.finfo(lse.dtype).eps, atol=0)
    upstream = integers(rows, dtype=loss.dtype, device=device, density=1.0, bound=4)  # 5e4 is none of float16
    _, dweight = torch.autograd.grad(loss, (x, weight), upstream)
    signed = (F.one_hot(torch.arange(rows, device=device), 130) - F.one_hot(target, 130)).to(loss.dtype)
    expected = (1e4 * (signed * upstream[:, None]).mT @ x.detach().to(loss.dtype)).to(dtype)
    assert expected.any() and torch.equal(dweight, expected)
