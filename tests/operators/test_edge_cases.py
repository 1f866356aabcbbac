"""The edge matrix over all operators: values, masks, layouts, autograd, dtypes, sizes and index ranges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from paths import runs_on_tensor_cores
from specimens import (
    DTYPES,
    LAYOUTS,
    ONE_EACH,
    SPECIMENS,
    Specimen,
    attention_inputs,
    cross_entropy_inputs,
    distillation_inputs,
    integers,
    logsumexp_inputs,
    mlp_inputs,
    name_of,
    normal,
)
from tolerance import as_outputs, check_operator, content, run, upstream_gradient
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from monoidreduce import reference
from monoidreduce._ops.mlp import ACTIVATIONS

each = pytest.mark.parametrize("specimen", SPECIMENS, ids=name_of)
one_each = pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


def floating_names(inputs: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, t in inputs.items() if t.is_floating_point()]


def results_of(
    specimen: Specimen, inputs: dict[str, torch.Tensor], upstream: Any = None
) -> dict[str, torch.Tensor]:
    """Outputs and gradients. Without upstream gradients, ones of a fixed seed."""
    function, names = getattr(mr, specimen.operator), floating_names(inputs)
    if upstream is None:
        with torch.no_grad():
            outputs = as_outputs(function(**inputs, **specimen.options))
        with torch.random.fork_rng():
            torch.manual_seed(5)
            upstream = [upstream_gradient(y) for y in outputs]
    outputs, gradients = run(function, inputs, specimen.options, names, upstream)
    return {f"out{i}": y.detach() for i, y in enumerate(outputs)} | {
        f"d_{n}": g for n, g in gradients.items()
    }


def assert_same_bits(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert results.keys() == expected.keys()
    for name, y in results.items():
        assert y.dtype == expected[name].dtype and torch.equal(content(y), content(expected[name])), name


@pytest.mark.oldest
@each
@every_dtype
@pytest.mark.isa
def test_every_specimen(specimen: Specimen, dtype: torch.dtype, device: torch.device) -> None:
    check_operator(specimen.operator, specimen.inputs(dtype, device), specimen.options)


# Layout of the inputs


@each
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
def test_layout_does_not_change_a_bit(
    specimen: Specimen, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Margins and gaps hold NaN, so a read outside the elements would show, and so would a write."""
    inputs = specimen.inputs(dtype, device)
    placed = {name: LAYOUTS[layout](t) for name, t in inputs.items()}
    storages = {
        name: torch.tensor([], dtype=t.dtype, device=device).set_(t.untyped_storage())
        for name, t in placed.items()
    }
    before = {name: content(storage).clone() for name, storage in storages.items()}
    assert_same_bits(results_of(specimen, placed), results_of(specimen, inputs))
    assert all(torch.equal(content(storage), before[name]) for name, storage in storages.items())


@pytest.mark.parametrize("layout", ("junk_strides", "gaps", "transposed"))
def test_axes_of_size_one(layout: str, device: torch.device) -> None:
    """torch gives such axes any stride at all."""
    place: Any = {"dtype": torch.float32, "device": device}
    calls = (
        Specimen(
            "attention",
            "attention",
            attention_inputs,
            {"batch": 1, "heads": 1, "kv_heads": 1, "m": 1, "value_width": 1},
        ),
        Specimen(
            "attention", "attention", attention_inputs, {"batch": 1, "heads": 2, "kv_heads": 1, "width": 1}
        ),
        Specimen("cross_entropy", "linear_cross_entropy", cross_entropy_inputs, {"rows": 1, "width": 1}),
        Specimen(
            "distillation",
            "linear_distillation",
            distillation_inputs,
            {"rows": 1, "width": 1, "teacher_width": 1},
        ),
        Specimen(
            "mlp", "mlp", mlp_inputs, {"rows": 1, "width": 1, "outputs": 1, "bias1": True, "bias2": True}
        ),
        Specimen("logsumexp", "logsumexp_matmul", logsumexp_inputs, {"rows": 1, "width": 1}),
    )
    for call in calls:
        inputs = call.inputs(**place)
        placed = {name: LAYOUTS[layout](t) for name, t in inputs.items()}
        assert_same_bits(results_of(call, placed), results_of(call, inputs))


def test_expanded_keys_and_values(device: torch.device) -> None:
    """Stride 0 over batch, heads and keys; the gradient of each element of the view is its own."""
    for n in (31, 32, 33, 65):
        q = normal(2, 4, 33, 16, dtype=torch.float32, device=device)
        for axis in range(3):
            shape = [2, 4, n, 16]
            shape[axis] = 1
            k = normal(*shape, dtype=torch.float32, device=device).expand(2, 4, n, 16)
            v = normal(*shape, dtype=torch.float32, device=device).expand(2, 4, n, 16)
            if axis < 2:
                check_operator("attention", {"q": q, "k": k, "v": v}, {"return_lse": True})
            else:  # equal keys, equal values: every score gradient is 0, and rounding all there is to compare
                out, lse = mr.attention(q, k, v, return_lse=True)
                torch.testing.assert_close(out, v[:, :, :1].expand(2, 4, 33, 16))
                torch.testing.assert_close(
                    lse, (q @ k[:, :, :1].mT)[..., 0] / 4 + torch.tensor(float(n)).log()
                )


def test_overlapping_windows_of_one_buffer(device: torch.device) -> None:
    """Rows that share memory, as sliding windows made by unfold do."""
    buffer = torch.randn(200, device=device)
    x = buffer.unfold(0, 16, 3)[:60]
    inputs = cross_entropy_inputs(60, 67, 16, dtype=torch.float32, device=device) | {"x": x}
    check_operator("linear_cross_entropy", inputs, {"reduction": "none"})
    q = buffer.unfold(0, 16, 1)[None, None, :64]
    check_operator("attention", {"q": q, "k": q, "v": q}, {"causal": True, "return_lse": True})


# Layout and value of the upstream gradients


@each
@pytest.mark.parametrize("layout", ("strided", "sliced", "contiguous"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
def test_upstream_layout_does_not_change_a_bit(
    specimen: Specimen, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = specimen.inputs(dtype, device)
    with torch.no_grad():
        outputs = as_outputs(getattr(mr, specimen.operator)(**inputs, **specimen.options))
    upstream = [upstream_gradient(y, layout) for y in outputs]
    dense = [g.contiguous() for g in upstream]
    assert_same_bits(results_of(specimen, inputs, upstream), results_of(specimen, inputs, dense))


@each
def test_zero_upstream(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    outputs = as_outputs(getattr(mr, specimen.operator)(**inputs, **specimen.options))
    results = results_of(specimen, inputs, [torch.zeros_like(y) for y in outputs])
    assert all((results[f"d_{name}"] == 0).all() for name in floating_names(inputs))


@each
def test_gradient_from_sum(specimen: Specimen, device: torch.device) -> None:
    """The backward of sum expands one number with stride 0."""
    inputs = specimen.inputs(torch.float32, device)
    function, names = getattr(mr, specimen.operator), floating_names(inputs)
    leaves = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
    total = sum(2.5 * y.sum() for y in as_outputs(function(**leaves, **specimen.options)))
    gradients = torch.autograd.grad(total, [leaves[name] for name in names])
    outputs = as_outputs(function(**leaves, **specimen.options))
    dense = torch.autograd.grad(
        outputs, [leaves[name] for name in names], [torch.full_like(y, 2.5) for y in outputs]
    )
    assert any(g.any() for g in gradients)
    for ours, theirs in zip(gradients, dense, strict=True):
        assert torch.equal(ours, theirs)


@one_each
def test_upstream_nan_stays_in_its_row(specimen: Specimen, device: torch.device) -> None:
    """Row-side gradients of other rows are as if that row's upstream gradient were 0."""
    inputs = specimen.inputs(torch.float64, device)
    with torch.no_grad():
        outputs = as_outputs(getattr(mr, specimen.operator)(**inputs, **specimen.options))
    upstream = [upstream_gradient(y, "contiguous") for y in outputs]
    row = (1, 2, 5) if specimen.operator in ("attention", "merge_attention") else (5,)
    poisoned, without = ([g.clone() for g in upstream] for _ in range(2))
    poisoned[0][row], without[0][row] = torch.nan, 0.0
    if specimen.operator == "linear_cross_entropy":
        inputs["target"][5] = 3
    rows = {"q", "x", "a", "teacher_x", "out_a", "out_b", "lse_a", "lse_b"} & inputs.keys()
    ours, expected = results_of(specimen, inputs, poisoned), results_of(specimen, inputs, without)
    for name in rows:
        gradient = ours[f"d_{name}"].clone()
        assert gradient[row].isnan().all(), name
        gradient[row] = expected[f"d_{name}"][row]
        torch.testing.assert_close(gradient, expected[f"d_{name}"], rtol=1e-12, atol=1e-13)


def test_upstream_nan_reaches_only_seen_keys(device: torch.device) -> None:
    """Query 10 of 40 sees keys 0..23 of 53; the other keys' gradients are as if it were not there."""
    inputs = attention_inputs(1, 2, 2, 40, 53, dtype=torch.float64, device=device)
    upstream = torch.randn(1, 2, 40, 19, dtype=torch.float64, device=device)
    poisoned, without = upstream.clone(), upstream.clone()
    poisoned[0, 1, 10], without[0, 1, 10] = torch.nan, 0.0
    causal = Specimen("causal", "attention", attention_inputs, options={"causal": True})
    ours, expected = results_of(causal, inputs, [poisoned]), results_of(causal, inputs, [without])
    for name in ("d_k", "d_v"):
        assert ours[name][0, 1, :24].isnan().all()
        torch.testing.assert_close(ours[name][0, 1, 24:], expected[name][0, 1, 24:], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(ours[name][0, 0], expected[name][0, 0], rtol=1e-12, atol=1e-13)


# Values


@every_dtype
@pytest.mark.parametrize("place", ("q", "k", "v", "k_inf", "q_inf", "v_inf"))
@pytest.mark.parametrize("mask", ("full", "causal", "window", "bool"))
def test_attention_non_finite_inputs(mask: str, place: str, dtype: torch.dtype, device: torch.device) -> None:
    """NaN and inf reach the rows that see them, in value and gradient, and no others."""
    inputs = attention_inputs(1, 2, 2, 40, 70, 16, 16, dtype=dtype, device=device)
    options: dict[str, Any] = {"scale": 0.25, "return_lse": True}
    if mask == "causal":
        options["causal"] = True
    elif mask == "window":
        options["window"] = (12, 3)
    elif mask == "bool":
        inputs["bias"] = torch.rand(1, 2, 40, 70, device=device) < 0.5
    row = (0, 1, 11, 3) if place.startswith("q") else (0, 1, 55, 3)
    inputs[place[0]][row] = torch.inf if place.endswith("inf") else torch.nan
    results = check_operator("attention", inputs, options)
    if mask != "full":
        assert results["out0"].isfinite().any(-1).any() and results["out0"][0, 0].isfinite().all()


@pytest.mark.parametrize("m", (1, 32))
def test_infinite_value_of_few_keys(m: int, device: torch.device) -> None:
    """A tile's rows beyond the last make nothing of it, where all columns are in the tile."""
    inputs = attention_inputs(1, 1, 1, m, 7, 4, 1, dtype=torch.float32, device=device)
    inputs["v"][0, 0, 5] = torch.inf
    results = check_operator("attention", inputs, {"return_lse": True})
    assert results["d_v"].isfinite().all() and results["d_k"].isnan().any()


@pytest.mark.parametrize("rows", (1, 3, 16, 17))
def test_infinite_column_of_few_rows(rows: int, device: torch.device) -> None:
    """Where rows do not fill a panel, no lane beyond them multiplies the column by 0."""
    a = torch.rand(rows, 2, dtype=torch.float64, device=device) + 1
    b = torch.randn(5, 2, dtype=torch.float64, device=device)
    b[3] = -torch.inf
    found = check_operator("logsumexp_matmul", {"a": a, "b": b}, differentiate=["b"])
    assert (found["d_b"][3] == 0).all() and found["d_b"].isfinite().all()


@every_dtype
def test_attention_excluded_garbage_is_bitwise_zero_filled(dtype: torch.dtype, device: torch.device) -> None:
    """What no row keeps may hold anything: the results are the same as with zeros there, bit for bit.

    Tensor cores multiply it by 0. Where that is NaN the row is computed again, in another order.
    """
    inputs = attention_inputs(2, 4, 2, 33, 129, dtype=dtype, device=device)
    keep = torch.rand(129, device=device) < 0.7
    keep[64:80] = False
    call = Specimen("attention", "attention", attention_inputs, options={"return_lse": True})
    filled = []
    for garbage in (0.0, torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max):
        k, v = (inputs[name].clone() for name in "kv")
        k[:, :, ~keep], v[:, :, ~keep] = garbage, garbage
        given = {"q": inputs["q"], "k": k, "v": v, "bias": keep}
        filled.append(results_of(call, given))
        if not runs_on_tensor_cores(device, dtype):
            assert_same_bits(filled[-1], filled[0])
        else:
            for name, found in filled[-1].items():
                expected, step = filled[0][name], 2 * torch.finfo(dtype).eps
                assert found.dtype == expected.dtype and found.isfinite().all(), name
                largest = float(expected.abs().max())
                torch.testing.assert_close(found, expected, rtol=step, atol=step * largest)
    assert (filled[0]["d_k"][:, :, ~keep] == 0).all() and (filled[0]["d_v"][:, :, ~keep] == 0).all()


def test_attention_infinite_score_follows_softmax(device: torch.device) -> None:
    """A +inf score makes its row NaN and its lse +inf, as torch does; a -inf one excludes its key."""
    inputs = attention_inputs(1, 1, 1, 12, 40, dtype=torch.float64, device=device)
    bias = torch.zeros(12, 40, dtype=torch.float64, device=device)
    bias[3, 7], bias[5, 7], bias[6], bias[8, :39] = torch.inf, -torch.inf, -torch.inf, -torch.inf
    inputs["bias"] = bias
    results = check_operator("attention", inputs, {"return_lse": True})
    assert results["out0"][0, 0, 3].isnan().all() and results["out1"][0, 0, 3] == torch.inf
    lse_alone = [None, torch.randn(1, 1, 12, dtype=torch.float64, device=device)]
    results = check_operator(
        "attention", inputs, {"return_lse": True}, differentiate=["q", "k", "bias"], upstream=lse_alone
    )
    assert results["d_bias"][3].isnan().sum() == 1
    rest = [i for i in range(12) if i != 3]
    inputs["q"], inputs["bias"] = inputs["q"][:, :, rest], bias[rest]
    results = check_operator("attention", inputs, {"return_lse": True})
    assert (results["out0"][0, 0, 5] == 0).all() and results["out1"][0, 0, 5] == -torch.inf
    assert torch.equal(results["out0"][0, 0, 7], inputs["v"][0, 0, 39])


@every_dtype
def test_fully_masked_rows_and_tiles(dtype: torch.dtype, device: torch.device) -> None:
    """The first tiles, a last partial tile, whole rows, or all of a head, masked."""
    keep = torch.ones(2, 2, 70, 300, dtype=torch.bool, device=device)
    keep[0, 0, :, :256] = False
    keep[0, 1, :, 290:] = False
    keep[1, 0, 10:50] = False
    keep[1, 1] = False
    inputs = attention_inputs(2, 2, 1, 70, 300, dtype=dtype, device=device) | {"bias": keep}
    results = check_operator("attention", inputs, {"return_lse": True})
    empty = ~keep.any(-1)
    assert (results["out0"][empty] == 0).all() and (results["out1"][empty] == -torch.inf).all()
    assert (results["d_q"][empty] == 0).all()


def test_fully_masked_by_minus_infinity(device: torch.device) -> None:
    """A floating bias of -inf masks as a bool one does, gradients included."""
    bias = torch.randn(2, 2, 70, 130, device=device)
    bias[0, 0, 3:40] = -torch.inf
    bias[1, 1] = -torch.inf
    bias[:, :, :, 64:128] = -torch.inf
    inputs = attention_inputs(2, 2, 1, 70, 130, dtype=torch.float32, device=device) | {"bias": bias}
    results = check_operator("attention", inputs, {"return_lse": True, "softcap": 5.0})
    empty = (bias == -torch.inf).all(-1)
    assert (results["out0"][empty] == 0).all() and (results["out1"][empty] == -torch.inf).all()
    assert (results["d_q"][empty] == 0).all() and (results["d_bias"][bias == -torch.inf] == 0).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("shape", ((12, 1), (2, 1, 12, 1), (2, 12, 40)), ids=str)
@pytest.mark.parametrize("upstream", ("both", "out", "lse"))
def test_non_finite_biases_of_rows(
    upstream: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """What raises all scores of a row alike, by an axis of size 1 or element by element."""
    inputs = attention_inputs(2, 2, 1, 12, 40, dtype=dtype, device=device)
    bias = torch.randn(shape, device=device).to(dtype)
    for row, value in ((3, torch.nan), (5, torch.inf), (7, -torch.inf)):
        bias[..., row, :] = value
    given = [
        torch.randn(2, 2, 12, inputs["v"].shape[-1], device=device).to(dtype),
        torch.randn(2, 2, 12, dtype=reference._statistics_dtype(bias), device=device),
    ]
    if upstream != "both":
        given[upstream == "out"] = None
    differentiate = ["q", "k", "bias"] if upstream == "lse" else ["q", "k", "v", "bias"]
    results = check_operator(
        "attention",
        inputs | {"bias": bias},
        {"return_lse": True},
        differentiate=differentiate,
        upstream=given,
    )
    for name in ("d_q", "d_bias"):
        assert results[name][..., 3, :].isnan().all() and (results[name][..., 7, :] == 0).all()


# The largest and the smallest that are not refused
LEAST, MOST = 2.0**-100, 2.0**100


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("softcap", (LEAST, MOST))
@pytest.mark.parametrize("scale", (None, 1.0, -0.5))
def test_extreme_softcaps(
    scale: float | None, softcap: float, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = attention_inputs(1, 2, 1, 33, 70, dtype=dtype, device=device)
    softcapped = check_operator("attention", inputs, {"scale": scale, "softcap": softcap})
    same = {"scale": 0.0} if softcap == LEAST else {"scale": scale}
    torch.testing.assert_close(softcapped["out0"], mr.attention(**inputs, **same))
    check_operator(
        "linear_cross_entropy", cross_entropy_inputs(dtype=dtype, device=device), {"softcap": softcap}
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("factor", (LEAST, -LEAST, MOST, 0.0))
def test_extreme_factors(factor: float, dtype: torch.dtype, device: torch.device) -> None:
    logits = cross_entropy_inputs(dtype=dtype, device=device)
    check_operator("linear_cross_entropy", logits, {"logit_scale": factor})
    if factor != MOST:
        check_operator("linear_cross_entropy", logits, {"z_loss": factor})
        check_operator(
            "attention", attention_inputs(1, 2, 1, 33, 70, dtype=dtype, device=device), {"scale": factor}
        )
        check_operator("logsumexp_matmul", logsumexp_inputs(dtype=dtype, device=device), {"scale": factor})
    if factor > 0:
        heads = distillation_inputs(dtype=dtype, device=device)
        check_operator("linear_distillation", heads, {"temperature": factor})


ROW_SIDE = {
    "linear_cross_entropy": ("x",),
    "linear_distillation": ("x", "teacher_x"),
    "mlp": ("x",),
    "logsumexp_matmul": ("a",),
}


@every_dtype
@pytest.mark.parametrize("operator, name", [(op, name) for op, names in ROW_SIDE.items() for name in names])
def test_nan_row(operator: str, name: str, dtype: torch.dtype, device: torch.device) -> None:
    """A NaN in one row makes its output and gradient NaN; other rows' keep every bit."""
    specimen = next(s for s in ONE_EACH if s.operator == operator)
    inputs = specimen.inputs(dtype, device)
    if "target" in inputs:
        inputs["target"][7] = 2
    poisoned = inputs | {name: inputs[name].clone()}
    poisoned[name][7, 2] = torch.nan
    clean, results = results_of(specimen, inputs), results_of(specimen, poisoned)
    others = torch.arange(len(inputs[name]), device=device) != 7
    for result in ("out0", f"d_{name}"):
        assert results[result][7].isnan().all()
        assert torch.equal(results[result][others], clean[result][others])
    for column_side in {"weight", "w1", "w2", "b"} & inputs.keys():
        assert results[f"d_{column_side}"].isnan().any(0).all()


@every_dtype
@pytest.mark.parametrize("operator", ("linear_cross_entropy", "linear_distillation"))
def test_garbage_in_excluded_tokens(operator: str, dtype: torch.dtype, device: torch.device) -> None:
    """Padding may hold anything: an ignored token has loss and gradient 0 and does not reach the weights."""
    if operator == "linear_cross_entropy":
        inputs = cross_entropy_inputs(dtype=dtype, device=device, bias=True)
        excluded = inputs["target"] == -100
        options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1}
    else:
        inputs = distillation_inputs(dtype=dtype, device=device, mask=True)
        excluded = ~inputs["mask"]
        options = {"loss": "reverse_kl", "teacher_grad": True}
    assert excluded.any() and not excluded.all()
    for reduction in ("none", "sum", "mean"):
        call = Specimen("padding", operator, dict, options=options | {"reduction": reduction})
        filled = []
        for garbage in (0.0, torch.nan, torch.inf):
            padded = {name: t.clone() for name, t in inputs.items()}
            for name in {"x", "teacher_x"} & inputs.keys():
                padded[name][excluded] = garbage
            filled.append(results_of(call, padded))
        for results in filled:
            assert_same_bits(results, filled[0])
            assert (results["d_x"][excluded] == 0).all()


@every_dtype
@pytest.mark.parametrize("width", (19, 64))
def test_infinite_logits_of_cross_entropy(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """A bias of -inf removes a class from every row; on a row's own target the loss is +inf."""
    inputs = cross_entropy_inputs(width=width, dtype=dtype, device=device, bias=True, ignored=0.0)
    inputs["target"][:] = torch.arange(257, device=device) % 60
    inputs["bias"][61:66] = -torch.inf
    results = check_operator("linear_cross_entropy", inputs, {"reduction": "none", "return_lse": True})
    assert results["out0"].isfinite().all() and (results["d_bias"][61:66] == 0).all()
    loss = mr.linear_cross_entropy(
        inputs["x"], inputs["weight"], inputs["target"].fill_(63), bias=inputs["bias"], reduction="none"
    )
    assert (loss == torch.inf).all()


@every_dtype
@pytest.mark.parametrize("width", (19, 64))
@pytest.mark.parametrize("options", ({}, {"z_loss": 0.1}, {"label_smoothing": 0.1}), ids=str)
def test_plus_infinite_logits_of_cross_entropy(
    options: dict[str, Any], width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """A row's lse is +inf, as is its loss but for the target itself; NaN beside it is NaN."""
    inputs = cross_entropy_inputs(width=width, dtype=dtype, device=device, bias=True, ignored=0.0)
    inputs["weight"][61, 3] = torch.inf
    inputs["target"][5], inputs["x"][9, 2] = 61, torch.nan
    options = {"reduction": "none", "return_lse": True, **options}
    results = check_operator("linear_cross_entropy", inputs, options)
    assert (results["out1"] == torch.inf).any() and results["out1"].isfinite().any()
    assert results["out1"].isnan().sum() == 1
    inputs = cross_entropy_inputs(width=width, dtype=dtype, device=device, bias=True, ignored=0.0)
    inputs["bias"][61] = torch.inf
    results = check_operator("linear_cross_entropy", inputs, options)
    assert (results["out1"] == torch.inf).all()


@every_dtype
@pytest.mark.parametrize("width", (19, 64))
def test_plus_infinite_scores_of_logsumexp_matmul(
    width: int, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = logsumexp_inputs(width=width, dtype=dtype, device=device)
    inputs["a"][4, 2], inputs["b"][7, 3] = torch.inf, torch.inf
    inputs["a"][6, 1] = torch.nan
    results = check_operator("logsumexp_matmul", inputs)
    assert (results["out0"] == torch.inf).any() and results["out0"].isfinite().any()


@every_dtype
@pytest.mark.parametrize("width, other_width", ((17, 19), (64, 24)))
@pytest.mark.parametrize("loss", ("cross_entropy", "forward_kl", "reverse_kl"))
@pytest.mark.parametrize("place", ("x", "weight", "teacher_x", "teacher_weight"))
def test_plus_infinite_scores_of_distillation(
    place: str, loss: str, width: int, other_width: int, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = distillation_inputs(width=width, teacher_width=other_width, dtype=dtype, device=device)
    inputs[place][5, 3] = torch.inf
    options = {"loss": loss, "reduction": "none", "teacher_grad": True}
    results = check_operator("linear_distillation", inputs, options)
    assert results["out0"].isnan().any()


def test_no_classes(device: torch.device) -> None:
    """V = 0: every target is ignored, the log-sum-exp of nothing is -inf, and gradients are 0."""
    inputs = cross_entropy_inputs(9, 0, dtype=torch.float32, device=device, bias=True)
    for reduction in ("none", "mean", "sum"):
        options = {"reduction": reduction, "return_lse": True, "z_loss": 0.1, "label_smoothing": 0.1}
        results = check_operator("linear_cross_entropy", inputs, options)
        assert (results["out0"] == 0).all() and (results["out1"] == -torch.inf).all()
        assert results["d_x"].shape == (9, 19) and (results["d_x"] == 0).all()
    for kind in ("cross_entropy", "forward_kl", "reverse_kl"):
        inputs = distillation_inputs(9, 0, dtype=torch.float32, device=device)
        options = {"loss": kind, "reduction": "none", "teacher_grad": True}
        results = check_operator("linear_distillation", inputs, options)
        assert (
            (results["out0"] == 0).all()
            and (results["d_x"] == 0).all()
            and (results["d_teacher_x"] == 0).all()
        )


# The tensor cores of a GPU take the second pair as it is, and the first padded.
WIDTHS = pytest.mark.parametrize("width, other_width", ((17, 19), (64, 24)))


@WIDTHS
def test_no_keys(width: int, other_width: int, device: torch.device) -> None:
    for dtype in DTYPES:
        inputs = attention_inputs(2, 4, 2, 5, 0, width, other_width, dtype=dtype, device=device)
        results = check_operator("attention", inputs, {"return_lse": True})
        assert (results["out0"] == 0).all() and (results["out1"] == -torch.inf).all()
        assert results["d_q"].shape == inputs["q"].shape and (results["d_q"] == 0).all()


@WIDTHS
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_no_rows_give_zero_weight_gradients(
    width: int, other_width: int, dtype: torch.dtype, device: torch.device
) -> None:
    place: Any = {"dtype": dtype, "device": device}
    widths, mlp_names = (width, other_width), ("w1", "w2", "bias1", "bias2")
    biases: Any = {"bias1": True, "bias2": True}
    calls = (
        ("attention", attention_inputs(2, 2, 1, 0, 5, *widths, **place), ("k", "v")),
        ("attention", attention_inputs(0, 2, 1, 5, 5, *widths, **place), ("k", "v")),
        ("linear_cross_entropy", cross_entropy_inputs(0, 67, width, bias=True, **place), ("weight", "bias")),
        ("linear_distillation", distillation_inputs(0, 67, *widths, **place), ("weight",)),
        ("mlp", mlp_inputs(0, width, 67, other_width, **biases, **place), mlp_names),
        ("mlp", mlp_inputs(0, 512, 64, other_width, **biases, **place), mlp_names),
        ("logsumexp_matmul", logsumexp_inputs(0, 67, width, **place), ("b",)),
    )
    for operator, inputs, names in calls:
        results = check_operator(operator, inputs)
        for name in names:
            assert results[f"d_{name}"].shape == inputs[name].shape and (results[f"d_{name}"] == 0).all(), (
                operator
            )


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=name_of)
def test_largest_half_values(dtype: torch.dtype, device: torch.device) -> None:
    """Scores beyond the range of the inputs' dtype: they are float32, so nothing overflows on the way.

    Hidden values of an MLP are operands of the second product, which tensor cores take in the inputs' dtype.
    """
    largest = 65504.0 if dtype == torch.float16 else 133120.0
    q = torch.full((1, 1, 33, 8), largest, dtype=dtype, device=device)
    v = integers(1, 1, 70, 8, dtype=dtype, device=device, density=1.0, bound=8)
    out, lse = mr.attention(q, q[:, :, :1].expand(1, 1, 70, 8), v, return_lse=True)
    exact = 8**0.5 * float(q[0, 0, 0, 0].double()) ** 2
    assert lse.isfinite().all() and (lse.double() / exact - 1).abs().max() < 1e-6
    torch.testing.assert_close(
        out.double(), v.double().mean(2, keepdim=True).expand(1, 1, 33, 8), rtol=1e-2, atol=1e-2
    )
    logsumexp = mr.logsumexp_matmul(q[0, 0], q[0, 0, :5])
    assert (logsumexp.double() / (8**0.5 * exact) - 1).abs().max() < 1e-6
    hidden = mr.mlp(
        q[0, 0],
        torch.ones(3, 8, dtype=dtype, device=device),
        torch.full((1, 3), 2.0**-8, dtype=dtype, device=device),
        activation="relu",
    )
    overflows = dtype == torch.float16 and runs_on_tensor_cores(device, dtype)
    exact = torch.inf if overflows else 24 * largest / 256
    torch.testing.assert_close(hidden.double(), torch.full_like(hidden, exact).double(), rtol=1e-2, atol=0)


@every_dtype
def test_all_scores_equal(dtype: torch.dtype, device: torch.device) -> None:
    """A uniform softmax: the mean of the values, log N, and gradients that count."""
    q = torch.zeros(1, 2, 40, 8, dtype=dtype, device=device)
    v = integers(1, 2, 256, 16, dtype=dtype, device=device, density=1.0, bound=4)
    out, lse = mr.attention(q, torch.randn(1, 2, 256, 8, device=device).to(dtype), v, return_lse=True)
    torch.testing.assert_close(
        out.double(),
        v.double().mean(2, keepdim=True).expand(1, 2, 40, 16).to(dtype).double(),
        rtol=1e-6,
        atol=1e-7,
    )
    torch.testing.assert_close(lse.double(), torch.full_like(lse, 256.0).double().log(), rtol=1e-6, atol=0)
    x = torch.zeros(5, 8, dtype=dtype, device=device)
    loss = mr.linear_cross_entropy(
        x, torch.randn(256, 8, device=device).to(dtype), torch.arange(5, device=device), reduction="none"
    )
    torch.testing.assert_close(loss.double(), torch.full_like(loss, 256.0).double().log(), rtol=1e-6, atol=0)


@each
@pytest.mark.parametrize("value", (0.0, -0.0), ids=("plus", "minus"))
def test_zero_inputs(specimen: Specimen, value: float, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float64, device)
    filled = {name: torch.full_like(t, value) if t.is_floating_point() else t for name, t in inputs.items()}
    check_operator(specimen.operator, filled, specimen.options)


@one_each
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=name_of)
def test_denormal_inputs(specimen: Specimen, dtype: torch.dtype, device: torch.device) -> None:
    """Row-side inputs below the smallest normal number of their dtype are finite inputs like any other."""
    inputs = specimen.inputs(dtype, device)
    tiny = torch.finfo(dtype).tiny
    for name in {"q", "x", "a", "teacher_x"} & inputs.keys():
        inputs[name] = (inputs[name].double() * tiny / 8).to(dtype)
        assert ((inputs[name] != 0) & (inputs[name].abs() < tiny)).any()
    results = check_operator(specimen.operator, inputs, specimen.options)
    assert all(result.isfinite().all() for result in results.values())


@pytest.fixture
def flushed() -> Iterator[None]:
    """Subnormal floats read and written as 0, as some users set their processors to."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.isa
@pytest.mark.usefixtures("flushed")
def test_subnormal_halves_beside_flushed_floats() -> None:
    """A subnormal half is no subnormal float: its value is kept."""
    x = torch.tensor([[2.0**-24, -3 * 2.0**-24, 1023 * 2.0**-24, 2.0**-14]], dtype=torch.float16)
    identity = torch.eye(4, dtype=torch.float16)
    with torch.no_grad():
        out = mr.mlp(x, identity, 1024 * identity, activation="identity")
    assert torch.equal(out.double(), x.double() * 1024)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_row_of_every_activation(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    """Its gradients equal torch's: relu of NaN passes the upstream gradient on."""
    inputs = mlp_inputs(12, 9, 40, 5, dtype=dtype, device=device)
    inputs["x"][7, 2] = torch.nan
    results = check_operator("mlp", inputs, {"activation": activation})
    assert (results["d_x"][7] != 0).all()


def eighths(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (torch.randint(-16, 17, shape, device=device) / 8).to(dtype)


@pytest.mark.parametrize("magnitude, scale", ((200.0, 32.0), (2000.0, 256.0)))
def test_spread_of_scores(magnitude: float, scale: float, device: torch.device) -> None:
    """Scores spread over several hundred: weights underflow to 0 and nothing becomes NaN.

    Rounded, scores of that size are luck in 80 rows, so attention's are exact. What is left is the rounding
    of log-sum-exp, which alone would break the rule.
    """
    inputs = attention_inputs(1, 2, 1, 40, 70, dtype=torch.float32, device=device, draw=eighths)
    check_operator("attention", inputs, {"scale": scale, "return_lse": True})
    check_operator(
        "logsumexp_matmul", logsumexp_inputs(dtype=torch.float32, device=device), {"scale": magnitude}
    )
    inputs = cross_entropy_inputs(dtype=torch.float32, device=device, bias=True)
    check_operator(
        "linear_cross_entropy", inputs, {"logit_scale": magnitude, "reduction": "none", "return_lse": True}
    )


@pytest.mark.parametrize("magnitude", (1.0, 200.0, 2000.0))
def test_recomputed_weights_sum_to_one(magnitude: float, device: torch.device) -> None:
    """However large the scores, backward sees them as forward did, rounded alike: d_v adds up to grad_out."""
    inputs = attention_inputs(1, 2, 1, 40, 70, dtype=torch.float32, device=device)
    v = inputs["v"].requires_grad_()
    out = mr.attention(**inputs, scale=magnitude / 17**0.5)
    upstream = upstream_gradient(out)
    (d_v,) = torch.autograd.grad(out, v, upstream)
    difference = d_v.double().sum((0, 1, 2)) - upstream.double().sum((0, 1, 2))
    allowed = 4 * torch.finfo(torch.float32).eps * upstream.double().abs().sum((0, 1, 2))
    assert bool((difference.abs() <= allowed).all()), difference / allowed


@pytest.mark.parametrize("operator", ("attention", "linear_cross_entropy", "logsumexp_matmul"))
def test_running_maximum_in_every_tile(operator: str, device: torch.device) -> None:
    """Scores that rise along the fold move the frame in each tile; falling ones never do."""
    ramp = torch.linspace(0, 60, 700, dtype=torch.float64, device=device)
    for columns in (ramp, ramp.flip(0)):
        x = torch.rand(9, 1, dtype=torch.float64, device=device) + 0.5
        if operator == "attention":
            inputs = {
                "q": x[None, None],
                "k": columns[None, None, :, None],
                "v": torch.randn_like(columns)[None, None, :, None],
            }
            check_operator(operator, inputs, {"scale": 1.0, "return_lse": True})
        elif operator == "linear_cross_entropy":
            inputs = {"x": x, "weight": columns[:, None], "target": torch.arange(9, device=device) * 77}
            check_operator(operator, inputs, {"reduction": "none", "return_lse": True})
        else:
            check_operator(operator, {"a": x, "b": columns[:, None]})


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize(
    "specimen", [s for s in SPECIMENS if s.operator not in ("mlp", "merge_attention")], ids=name_of
)
def test_statistics_of_half_inputs_are_float32(
    specimen: Specimen, dtype: torch.dtype, device: torch.device
) -> None:
    """Losses and log-sum-exps come from the rounded inputs, not from rounded scores."""
    inputs = specimen.inputs(dtype, device)
    statistics = as_outputs(getattr(mr, specimen.operator)(**inputs, **specimen.options))
    wide = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    expected = as_outputs(getattr(reference, specimen.operator)(**wide, **specimen.options))
    for i, (y, ref) in enumerate(zip(statistics, expected, strict=True)):
        if specimen.operator in ("attention", "attention_varlen") and i == 0:
            continue
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), ref, rtol=1e-5, atol=1e-5)


# Targets


@pytest.mark.parametrize("wrong", (-1, 67, 67 + 10**6, 2**31, 2**40, -(2**31)))
@pytest.mark.parametrize("label_smoothing", (0.0, 0.1))
def test_target_out_of_range(wrong: int, label_smoothing: float, device: torch.device) -> None:
    inputs = cross_entropy_inputs(dtype=torch.float32, device=device, ignored=0.0)
    inputs["target"][11] = wrong
    if device.type == "cpu":
        with pytest.raises(IndexError, match=str(wrong)):
            mr.linear_cross_entropy(**inputs, label_smoothing=label_smoothing)
        return
    loss = mr.linear_cross_entropy(**inputs, label_smoothing=label_smoothing, reduction="none")
    assert torch.equal(loss.isnan().nonzero().flatten(), torch.tensor([11], device=device))


def test_probability_targets_are_refused(device: torch.device) -> None:
    inputs = cross_entropy_inputs(dtype=torch.float32, device=device)
    inputs["target"] = torch.rand(257, 67, device=device)
    with pytest.raises(TypeError, match="target"):
        mr.linear_cross_entropy(**inputs)


# Autograd


@each
def test_values_with_and_without_autograd(specimen: Specimen, device: torch.device) -> None:
    """Liger #507: a forward without requires_grad must not skip its work."""
    inputs = specimen.inputs(torch.float32, device)
    function = getattr(mr, specimen.operator)
    plain = as_outputs(function(**inputs, **specimen.options))
    leaves = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
    tracked = as_outputs(function(**leaves, **specimen.options))
    with torch.no_grad():
        untracked = as_outputs(function(**leaves, **specimen.options))
    with torch.inference_mode():
        inference = as_outputs(function(**inputs, **specimen.options))
    assert all(y.requires_grad for y in tracked)
    assert not any(y.requires_grad for y in (*plain, *untracked, *inference))
    assert any(y.any() for y in plain)
    for y, others in zip(plain, zip(tracked, untracked, inference, strict=True), strict=True):
        assert all(torch.equal(y, other.detach()) for other in others)


@each
def test_backward_twice(specimen: Specimen, device: torch.device) -> None:
    """With retain_graph the second gradients are the first's; without it the graph is gone."""
    inputs = specimen.inputs(torch.float32, device)
    leaves = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
    wanted = [leaves[name] for name in floating_names(inputs)]
    outputs = as_outputs(getattr(mr, specimen.operator)(**leaves, **specimen.options))
    upstream = [upstream_gradient(y) for y in outputs]
    first = torch.autograd.grad(outputs, wanted, upstream, retain_graph=True)
    second = torch.autograd.grad(outputs, wanted, upstream)
    assert any(g.any() for g in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(outputs, wanted, upstream)


@one_each
def test_gradients_accumulate(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    leaves = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
    function = getattr(mr, specimen.operator)
    for _ in range(2):
        as_outputs(function(**leaves, **specimen.options))[0].square().sum().backward()
    once = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
    as_outputs(function(**once, **specimen.options))[0].square().sum().backward()
    for name in floating_names(inputs):
        assert torch.equal(leaves[name].grad, 2 * once[name].grad), name
    assert any(once[name].grad.any() for name in floating_names(inputs))


@one_each
@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpointing(specimen: Specimen, use_reentrant: bool, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    names = floating_names(inputs)
    rest = {name: t for name, t in inputs.items() if name not in names}

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, tensors, strict=True))
        return as_outputs(getattr(mr, specimen.operator)(**given, **rest, **specimen.options))[0]

    gradients = []
    for apply in (call, lambda *t: checkpoint(call, *t, use_reentrant=use_reentrant)):
        leaves = [inputs[name].clone().requires_grad_() for name in names]
        apply(*leaves).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert any(g.any() for g in gradients[0])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@each
@pytest.mark.parametrize("compiled", (False, True))
def test_hooks_on_saved_tensors_may_change_strides(
    specimen: Specimen, compiled: bool, device: torch.device
) -> None:
    def with_gaps(t: torch.Tensor) -> torch.Tensor:
        return t.new_empty((*t.shape, 2))[..., 0].copy_(t)

    torch.compiler.reset()
    inputs = specimen.inputs(torch.float32, device)
    names = floating_names(inputs)
    function = getattr(mr, specimen.operator)
    if compiled:
        function = torch.compile(function, backend="aot_eager")
    gradients = []
    for unpack in (lambda t: t, with_gaps):
        leaves = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            outputs = as_outputs(function(**leaves, **specimen.options))
            sum(out.sin().sum() for out in outputs).backward()
        gradients.append([leaves[name].grad for name in names])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@one_each
def test_hooks_that_change_gradients(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    names = floating_names(inputs)
    gradients = []
    for factor in (1.0, -2.0):
        leaves = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
        leaves[names[0]].register_hook(lambda g, factor=factor: g * factor)
        out = as_outputs(getattr(mr, specimen.operator)(**leaves, **specimen.options))[0]
        out.register_hook(lambda g, factor=factor: g * factor)
        out.sum().backward()
        gradients.append([leaves[name].grad for name in names])
    (first, *rest), (first_changed, *rest_changed) = gradients
    assert first.any() and torch.equal(first_changed, 4 * first)
    assert all(torch.equal(changed, -2 * g) for g, changed in zip(rest, rest_changed, strict=True))


@one_each
def test_gradients_are_in_the_dtype_of_their_inputs(specimen: Specimen, device: torch.device) -> None:
    for dtype in DTYPES:
        inputs = specimen.inputs(dtype, device)
        results = results_of(specimen, inputs)
        for name in floating_names(inputs):
            assert results[f"d_{name}"].dtype == inputs[name].dtype
            assert results[f"d_{name}"].shape == inputs[name].shape


# Dtypes


SECOND_ARGUMENTS = {
    "attention": ("k", "v"),
    "merge_attention": ("lse_a", "out_b", "lse_b"),
    "linear_cross_entropy": ("weight", "bias"),
    "linear_distillation": ("weight", "teacher_x", "teacher_weight"),
    "mlp": ("w1", "w2", "bias1", "bias2"),
    "logsumexp_matmul": ("b",),
}


@pytest.mark.parametrize(
    "operator, name", [(op, name) for op, names in SECOND_ARGUMENTS.items() for name in names]
)
def test_mixed_dtypes_are_refused(operator: str, name: str, device: torch.device) -> None:
    specimen = next(
        s for s in SPECIMENS if s.operator == operator and name in s.inputs(torch.float32, device)
    )
    inputs = specimen.inputs(torch.float32, device)
    with pytest.raises(TypeError, match=name):
        getattr(mr, operator)(**(inputs | {name: inputs[name].to(torch.bfloat16)}), **specimen.options)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("specimen", [s for s in ONE_EACH if s.operator != "merge_attention"], ids=name_of)
def test_autocast(specimen: Specimen, dtype: torch.dtype, device: torch.device) -> None:
    """float32 masters under autocast: the value of the cast tensors, and gradients in float32."""
    inputs = specimen.inputs(torch.float32, device)
    names = floating_names(inputs)
    leaves = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
    function = getattr(mr, specimen.operator)
    with torch.autocast(device.type, dtype=dtype):
        outputs = as_outputs(function(**leaves, **specimen.options))
    lower = {name: t.to(dtype) if name in names else t for name, t in inputs.items()}
    expected = results_of(specimen, lower, [torch.ones_like(y) for y in outputs])
    for i, y in enumerate(outputs):
        assert y.dtype == expected[f"out{i}"].dtype and torch.equal(y.detach(), expected[f"out{i}"])
    gradients = torch.autograd.grad(
        outputs, [leaves[name] for name in names], [torch.ones_like(y) for y in outputs]
    )
    for name, gradient in zip(names, gradients, strict=True):
        assert gradient.dtype == torch.float32
        if name == "weight" and specimen.operator.startswith("linear_"):  # a sum that is not rounded
            gradient = gradient.to(dtype).float()
        assert torch.equal(gradient, expected[f"d_{name}"].float())


# Index ranges


def test_strides_beyond_int32(device: torch.device) -> None:
    """Offsets of 2^31 elements and more through strides alone, in memory that is never touched between."""
    far = 2**31 + 8
    buffer = torch.empty(far + 64 * 16, dtype=torch.float16, device=device)
    inputs = attention_inputs(2, 1, 1, 8, 16, 4, 4, dtype=torch.float16, device=device)
    for name in "qkv":
        view = buffer.as_strided(inputs[name].shape, (far, 64, 4, 1))
        inputs[name] = view.copy_(inputs[name])
        check_operator(
            "attention", {n: t if n == name else t.clone() for n, t in inputs.items()}, {"return_lse": True}
        )
    x = buffer.as_strided((2, 16), (far, 1)).copy_(torch.randn(2, 16))
    target = torch.tensor([3, 0], device=device)
    weight = normal(9, 16, dtype=torch.float16, device=device, scale=0.25)
    check_operator(
        "linear_cross_entropy", {"x": x, "weight": weight, "target": target}, {"reduction": "none"}
    )
    check_operator(
        "linear_cross_entropy", {"x": weight[:2].clone(), "weight": x * 0.25, "target": target * 0}
    )
    check_operator("mlp", {"x": x, "w1": weight, "w2": weight.mT.contiguous()})
    check_operator("logsumexp_matmul", {"a": weight, "b": x})


def test_more_heads_than_a_grid_axis(device: torch.device) -> None:
    """B x H beyond 65535, the largest y and z extents of a CUDA grid."""
    inputs = attention_inputs(300, 234, 234, 1, 2, 3, 2, dtype=torch.float32, device=device)
    check_operator("attention", inputs, {"return_lse": True})
    inputs = attention_inputs(70000, 1, 1, 2, 3, 2, 1, dtype=torch.float32, device=device)
    check_operator("attention", inputs, {"causal": True, "return_lse": True})


@pytest.mark.slow
def test_more_than_2_31_scores(device: torch.device) -> None:
    """N x V virtual scores beyond 2^31, never materialised, with a value in closed form."""
    rows, classes = 40, 2**31 // 40 + 4096
    x = torch.ones(rows, 1, dtype=torch.float16, device=device)
    weight = torch.zeros(classes, 1, dtype=torch.float16, device=device)
    target = torch.arange(rows, device=device) * (classes // rows)
    loss, lse = mr.linear_cross_entropy(x, weight, target, reduction="none", return_lse=True)
    expected = torch.full_like(lse, float(classes)).log()
    torch.testing.assert_close(lse, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_matches_torch_over_the_last_row_and_column(device: torch.device) -> None:
    """The last row, column and width hold what only they hold, so a tile that stops short shows."""
    for rows, columns, width in ((33, 65, 17), (65, 513, 33), (257, 121, 9)):
        x = torch.zeros(rows, width, dtype=torch.float64, device=device)
        weight = torch.zeros(columns, width, dtype=torch.float64, device=device)
        x[-1, -1], weight[-1, -1] = 3.0, 2.0
        lse = mr.logsumexp_matmul(x, weight)
        expected = F.linear(x, weight).logsumexp(-1)
        torch.testing.assert_close(lse, expected, rtol=1e-13, atol=0)
        assert lse[-1] > lse[0] + 0.1


@pytest.mark.parametrize("shape", [(1, 2, 5, 0), (1, 2, 0, 3), (0, 2, 5, 3)])
def test_only_the_lse_of_empty_values(shape: tuple[int, ...], device: torch.device) -> None:
    """Gradients of v are empty, or zeros that nothing is added to; q and k have those of the lse."""
    batch, heads, keys, _ = shape
    q, k = (torch.randn(batch, heads, n, 8, device=device, requires_grad=True) for n in (4, keys))
    v = torch.randn(*shape, device=device, requires_grad=True)
    _, lse = mr.attention(q, k, v, scale=0.5, return_lse=True)
    upstream = torch.randn_like(lse)
    found = torch.autograd.grad(lse, (q, k, v), upstream)
    if keys:
        expected = torch.autograd.grad((0.5 * q @ k.mT).logsumexp(-1), (q, k), upstream)
    else:
        expected = torch.zeros_like(q), torch.zeros_like(k)
    torch.testing.assert_close(found[:2], expected)
    assert found[2].shape == v.shape and not found[2].any()
