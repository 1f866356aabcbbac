"""The sinks of attention, one more element of each row's fold, against the rule of tolerance.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from specimens import DTYPES, Inputs, attention_inputs, name_of
from tolerance import check_operator
from torch import Tensor

import monoidreduce as mr

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (9, 3)},
    "softcap": {"softcap": 2.0, "scale": 0.5},
}


def with_sinks(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    q = inputs["q"]
    return inputs | {"sinks": (2 * torch.randn(q.shape[1], device=q.device)).to(dtype or q.dtype)}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("return_lse", (False, True), ids=("out", "lse"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], return_lse: bool, dtype: torch.dtype, device: torch.device) -> None:
    inputs = with_sinks(attention_inputs(dtype=dtype, device=device))
    check_operator("attention", inputs, {"return_lse": return_lse, **options})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("bias", ((1, 4, 1, 53), (2, 1, 37, 1), "keep"), ids=str)
def test_beside_a_bias(bias: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Which does not reach it. Rows of a bool bias that keep no key have the sink alone."""
    shape: dict[str, Any] = {"keep": (2, 1, 37, 53)} if bias == "keep" else {"bias": bias}
    inputs = with_sinks(attention_inputs(dtype=dtype, device=device, **shape))
    if bias == "keep":
        inputs["bias"][:, :, 5] = False
    found = check_operator("attention", inputs, {"return_lse": True})
    if bias == "keep":
        expected = inputs["sinks"].to(found["out1"].dtype).expand(2, 4)
        assert not found["out0"][:, :, 5].any() and torch.equal(found["out1"][:, :, 5], expected)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=name_of)
def test_float32_sinks_beside_16_bits(dtype: torch.dtype, device: torch.device) -> None:
    """Of 96 heads: the largest error of the gradients of four is luck."""
    inputs = attention_inputs(heads=96, kv_heads=48, dtype=dtype, device=device)
    check_operator("attention", with_sinks(inputs, torch.float32), {"return_lse": True})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_few_rows(options: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Threads share the keys of a row, whose sink is joined once, and heads share a panel of rows."""
    inputs = attention_inputs(1, 8, 2, 3, 4099, dtype=dtype, device=device)
    check_operator("attention", with_sinks(inputs), {"return_lse": True, **options})


@pytest.mark.parametrize("wanted", (["sinks"], ["q", "sinks"], ["q", "k", "v"], ["v"]), ids=str)
def test_some_gradients(wanted: list[str], device: torch.device) -> None:
    inputs = with_sinks(attention_inputs(dtype=torch.float64, device=device))
    check_operator("attention", inputs, {"return_lse": True, "causal": True}, differentiate=wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_only_lse_has_a_gradient(dtype: torch.dtype, device: torch.device) -> None:
    inputs = with_sinks(attention_inputs(dtype=dtype, device=device))
    of_lse = torch.randn(inputs["q"].shape[:3], device=device).to(inputs["q"].dtype)
    of_lse = of_lse if dtype == torch.float64 else of_lse.float()
    check_operator("attention", inputs, {"return_lse": True}, upstream=[None, of_lse])


@pytest.mark.parametrize("sink", (-1e4, -80.0, 80.0, 1e4))
def test_far_from_all_scores(sink: float, device: torch.device) -> None:
    inputs = attention_inputs(dtype=torch.float64, device=device)
    inputs["sinks"] = torch.full((4,), sink, dtype=torch.float64, device=device)
    check_operator("attention", inputs, {"return_lse": True, "window": (3, 0)})


def test_any_strides(device: torch.device) -> None:
    inputs = attention_inputs(dtype=torch.float64, device=device)
    sinks = torch.randn(8, dtype=torch.float64, device=device)[::2]
    check_operator("attention", inputs | {"sinks": sinks}, {"return_lse": True})
    check_operator("attention", inputs | {"sinks": sinks[:1].expand(4)}, {"return_lse": True})


def test_gradcheck(device: torch.device) -> None:
    shapes = ((1, 2, 3, 4), (1, 1, 5, 4), (1, 1, 5, 2), (2,))
    tensors = tuple(torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in shapes)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return mr.attention(q, k, v, sinks=sinks, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(call, tensors)


def test_it_is_a_key_whose_value_is_0(device: torch.device) -> None:
    """A score of s is that of a key (s, 0, ...) for queries (1, ...)."""
    place: Any = {"dtype": torch.float64, "device": device}
    q, k, v, sink = torch.randn(1, 1, 6, 4, **place), *torch.randn(2, 1, 1, 9, 4, **place), 0.7
    one = torch.cat((q, torch.ones(1, 1, 6, 1, **place)), -1)
    key = torch.tensor([0.0, 0, 0, 0, sink], **place).expand(1, 1, 1, 5)
    keys = torch.cat((torch.cat((k, torch.zeros(1, 1, 9, 1, **place)), -1), key), 2)
    values = torch.cat((v, torch.zeros(1, 1, 1, 4, **place)), 2)
    expected = mr.attention(one, keys, values, scale=1.0, return_lse=True)
    sinks = torch.tensor([sink], **place)
    torch.testing.assert_close(mr.attention(q, k, v, sinks=sinks, scale=1.0, return_lse=True), expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
def test_a_sink_of_minus_infinity_is_none(dtype: torch.dtype, device: torch.device) -> None:
    inputs = attention_inputs(dtype=dtype, device=device, keep=(2, 1, 37, 53))
    inputs["bias"][:, :, 5] = False  # rows without any element
    leaves = {n: t.requires_grad_(t.is_floating_point()) for n, t in inputs.items()}
    sinks = torch.full((4,), -math.inf, dtype=dtype, device=device, requires_grad=True)
    found, plain = (mr.attention(**leaves, **more, return_lse=True) for more in ({"sinks": sinks}, {}))
    assert all(map(torch.equal, found, plain))
    of = [leaves["q"], leaves["v"], sinks]
    gradients = torch.autograd.grad(found[0].sum() + found[1][:, :, :5].sum(), of)
    assert all(g.isfinite().all() for g in gradients) and not gradients[-1].any()


def test_beside_a_function_of_scores() -> None:
    """The same as beside the bias that the function adds."""
    inputs = with_sinks(attention_inputs(dtype=torch.float64, device=torch.device("cpu")))
    slope = torch.randn(4, dtype=torch.float64)
    distance = torch.arange(53) - torch.arange(37)[:, None]
    leaves = [t.requires_grad_() for t in inputs.values()]
    grads = [torch.randn(2, 4, 37, inputs["v"].shape[3]).double(), torch.randn(2, 4, 37).double()]
    found, expected = (
        mr.attention(**inputs, **options, causal=True, return_lse=True)
        for options in (
            {"score_mod": lambda score, batch, head, i, j: score + slope[head] * (j - i)},
            {"bias": slope[:, None, None] * distance},
        )
    )
    torch.testing.assert_close(found, expected)
    of_bias, of_function = (torch.autograd.grad(each, leaves, grads) for each in (expected, found))
    torch.testing.assert_close(of_function, of_bias)


@pytest.mark.parametrize("options", ({}, {"causal": True}), ids=("all", "causal"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("bad", (math.inf, math.nan))
def test_a_sink_that_is_no_number(
    bad: float, dtype: torch.dtype, options: dict[str, Any], device: torch.device
) -> None:
    """Its head is NaN, as torch's softmax; other heads are not."""
    inputs = with_sinks(attention_inputs(kv_heads=4, dtype=dtype, device=device))
    inputs["sinks"][1] = bad
    leaves = [t.requires_grad_() for t in inputs.values()]
    out, lse = mr.attention(**inputs, return_lse=True, **options)
    others = torch.arange(4, device=device) != 1
    assert out[:, 1].isnan().all() and out[:, others].isfinite().all()
    assert lse[:, others].isfinite().all() and not lse[:, 1].isfinite().any()
    *by_heads, of_sinks = torch.autograd.grad(out.sum(), leaves)
    assert all(t[:, 1].isnan().all() and t[:, others].isfinite().all() for t in by_heads)
    assert of_sinks[1].isnan() and of_sinks[others].isfinite().all()


def test_no_keys(device: torch.device) -> None:
    q, k = torch.randn(1, 2, 3, 4, device=device), torch.randn(1, 2, 0, 4, device=device)
    sinks = torch.tensor([1.0, -2.0], device=device, requires_grad=True)
    out, lse = mr.attention(q, k, k, sinks=sinks, return_lse=True)
    assert not out.any() and torch.equal(lse, sinks[None, :, None].expand(1, 2, 3))
    (found,) = torch.autograd.grad(out.sum() + 2 * lse.sum(), sinks)
    assert found.tolist() == [6.0, 6.0]


def test_the_op_by_itself(device: torch.device) -> None:
    """Joins the sinks: torch does nothing behind it."""
    inputs = with_sinks(attention_inputs(dtype=torch.float32, device=device))
    q, k, v, sinks = inputs.values()
    out, lse, *_ = torch.ops.monoidreduce.attention(q, k, v, None, sinks, None, 0.0, -1, -1, False)
    expected = mr.attention(**inputs, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_under_torch(device: torch.device) -> None:
    """Compiled in one graph, mapped over heads' sinks, and explained."""
    inputs = with_sinks(attention_inputs(dtype=torch.float32, device=device))
    check_operator("attention", inputs, function=torch.compile(mr.attention, fullgraph=True))
    q, k, v, sinks = inputs.values()
    mapped = torch.vmap(lambda s: mr.attention(q, k, v, sinks=s))(torch.stack((sinks, sinks + 1)))
    torch.testing.assert_close(mapped[1], mr.attention(q, k, v, sinks=sinks + 1))
    by_rows = torch.randn(37, 1, device=device)
    assert "the kernels join the sinks" in str(mr.explain(mr.attention, q, k, v, sinks=sinks))
    assert "torch joins the sinks" in str(mr.explain(mr.attention, q, k, v, sinks=sinks, bias=by_rows))
    assert "sinks" not in str(mr.explain(mr.attention, q, k, v))


def test_wrong_sinks() -> None:
    inputs = attention_inputs(dtype=torch.float32, device=torch.device("cpu"))
    for wrong, kind, text in (
        (torch.ones(3), ValueError, r"sinks: expected shape \[H=4\] as q is \[2, 4,"),
        (torch.ones(4).double(), TypeError, "sinks: expected torch.float32 as q"),
        (torch.ones(4).int(), TypeError, "sinks: expected float64, float32"),
        (1.0, TypeError, "sinks: expected a tensor"),
    ):
        with pytest.raises(kind, match=text):
            mr.attention(**inputs, sinks=wrong)  # type: ignore[call-overload]
