"""merge_attention: partial attention results combine to the attention over all keys."""

from __future__ import annotations

import pytest
import torch
from specimens import DTYPES, attention_inputs, merge_inputs, name_of
from tolerance import check_operator

import monoidreduce as mr


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("m, value_width", ((0, 3), (1, 1), (7, 0), (33, 17), (130, 64)))
def test_values_and_gradients(m: int, value_width: int, dtype: torch.dtype, device: torch.device) -> None:
    check_operator("merge_attention", merge_inputs(2, 3, m, value_width, dtype=dtype, device=device))


@pytest.mark.parametrize("layout", ("strided", "sliced", "expanded", "contiguous"))
def test_upstream_layouts(layout: str, device: torch.device) -> None:
    check_operator("merge_attention", merge_inputs(dtype=torch.float32, device=device), upstream=layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_far_apart_and_empty_rows(dtype: torch.dtype, device: torch.device) -> None:
    """Rows where one side outweighs the other by e^200, where one side is empty and where both are."""
    inputs = merge_inputs(dtype=dtype, device=device)
    inputs["lse_a"][:, :, 0] = inputs["lse_b"][:, :, 0] + 200
    inputs["lse_a"][:, :, 1] = inputs["lse_b"][:, :, 1] - 200
    for side, rows in (("a", (2, 4)), ("b", (3, 4))):
        for row in rows:
            inputs[f"out_{side}"][:, :, row] = 0
            inputs[f"lse_{side}"][:, :, row] = -torch.inf
    results = check_operator("merge_attention", inputs)
    assert (results["out0"][:, :, 4] == 0).all() and (results["out1"][:, :, 4] == -torch.inf).all()
    assert all((results[name][:, :, 4] == 0).all() for name in results if name.startswith("d_"))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=name_of)
def test_infinite_rows(dtype: torch.dtype, device: torch.device) -> None:
    """A side that saw a score of +inf, beside one that did not, an empty one, and another; and NaN."""
    inputs = merge_inputs(dtype=dtype, device=device)
    for side, rows, value in (
        ("a", (0, 1, 2, 4), torch.inf),
        ("b", (2, 3), torch.inf),
        ("b", (4,), torch.nan),
    ):
        for row in rows:
            inputs[f"out_{side}"][:, :, row] = torch.nan
            inputs[f"lse_{side}"][:, :, row] = value
    inputs["out_b"][:, :, 1], inputs["lse_b"][:, :, 1] = 0, -torch.inf
    results = check_operator("merge_attention", inputs)
    assert (results["out1"][:, :, :4] == torch.inf).all() and results["out1"][:, :, 4].isnan().all()
    assert results["out0"][:, :, :5].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_empty_state_is_the_identity(dtype: torch.dtype, device: torch.device) -> None:
    """combine(e, x) == x == combine(x, e), bit for bit, and combine(e, e) == e."""
    inputs = merge_inputs(dtype=dtype, device=device)
    x = inputs["out_a"], inputs["lse_a"]
    e = torch.zeros_like(x[0]), torch.full_like(x[1], -torch.inf)
    for merged, expected in (
        (mr.merge_attention(*e, *x), x),
        (mr.merge_attention(*x, *e), x),
        (mr.merge_attention(*e, *e), e),
    ):
        assert torch.equal(merged[0], expected[0]) and torch.equal(merged[1], expected[1])


def test_associative_and_commutative(device: torch.device) -> None:
    states = [merge_inputs(dtype=torch.float64, device=device) for _ in range(3)]
    a, b, c = ((s["out_a"], s["lse_a"]) for s in states)
    torch.testing.assert_close(
        mr.merge_attention(*mr.merge_attention(*a, *b), *c),
        mr.merge_attention(*a, *mr.merge_attention(*b, *c)),
        rtol=1e-12,
        atol=1e-13,
    )
    ours, theirs = mr.merge_attention(*a, *b), mr.merge_attention(*b, *a)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("split", (0, 1, 64, 77, 130))
def test_split_keys_anywhere_and_merge(split: int, device: torch.device) -> None:
    """The gradients of q, k, v through both parts and the merge also equal the gradients of the whole."""
    inputs = attention_inputs(1, 2, 1, 65, 130, dtype=torch.float64, device=device)
    gradients = []
    upstream = (
        torch.randn(1, 2, 65, 19, dtype=torch.float64, device=device),
        torch.randn(1, 2, 65, dtype=torch.float64, device=device),
    )
    for parts in ((slice(None),), (slice(split), slice(split, None))):
        q, k, v = (inputs[name].detach().requires_grad_() for name in "qkv")
        states = [mr.attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in parts]
        state = states[0] if len(states) == 1 else mr.merge_attention(*states[0], *states[1])
        gradients.append((*state, *torch.autograd.grad(state, (q, k, v), upstream)))
    for whole, merged in zip(*gradients, strict=True):
        torch.testing.assert_close(merged, whole, rtol=1e-10, atol=1e-12)


def parts_of_attention(
    stops: tuple[int, ...], device: torch.device
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[torch.Tensor]]:
    """q, k, v, the states of these parts of the keys, and that of all."""
    inputs = attention_inputs(1, 2, 1, 33, 70, dtype=torch.float64, device=device)
    leaves = [inputs[name].detach().requires_grad_() for name in "qkv"]
    q, k, v = leaves
    parts = [slice(start, stop) for start, stop in zip((0, *stops), (*stops, 70), strict=True)]
    states = [mr.attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in parts]
    return (
        leaves,
        [list(part) for part in zip(*states, strict=True)],
        list(mr.attention(q, k, v, return_lse=True)),
    )


@pytest.mark.parametrize("stops", ((), (64,), (0, 64, 64), (1, 2, 30, 31, 70)), ids=str)
@pytest.mark.parametrize("stacked", (False, True))
def test_any_number_of_states(stops: tuple[int, ...], stacked: bool, device: torch.device) -> None:
    """Of parts of the keys, some of them empty: values and gradients of attention over all of them."""
    leaves, (outs, lses), whole = parts_of_attention(stops, device)
    merged = (
        mr.merge_attention(torch.stack(outs), torch.stack(lses))
        if stacked
        else mr.merge_attention(outs, lses)
    )
    torch.manual_seed(0)
    upstream = [torch.randn_like(t) for t in whole]
    for ours, expected in zip(
        (*merged, *torch.autograd.grad(merged, leaves, upstream)),
        (*whole, *torch.autograd.grad(whole, leaves, upstream)),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_two_states_in_both_forms(dtype: torch.dtype, device: torch.device) -> None:
    a, b, c, d = merge_inputs(dtype=dtype, device=device).values()
    for ours, expected in zip(
        mr.merge_attention((a, c), [b, d]), mr.merge_attention(a, b, c, d), strict=True
    ):
        assert torch.equal(ours, expected)
    for ours, expected in zip(
        mr.merge_attention(outs=(a, c), lses=(b, d)), mr.merge_attention(a, b, c, d), strict=True
    ):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("states", (1, 2, 3))
def test_the_only_state_is_the_result_bit_for_bit(
    states: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Also its zeros' signs, whatever the empty states hold."""
    inputs = merge_inputs(dtype=dtype, device=device)
    out, lse = inputs["out_a"], inputs["lse_a"]
    out[:, :, 0], lse[:, :, 0] = -0.0, -0.0
    garbage, nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    for place in range(states):
        outs, lses = [garbage] * states, [nothing] * states
        outs[place], lses[place] = out, lse
        for ours, expected in zip(mr.merge_attention(outs, lses), (out, lse), strict=True):
            assert torch.equal(ours, expected) and torch.equal(ours.signbit(), expected.signbit())


@pytest.mark.parametrize("states", (1, 2, 4))
def test_empty_states_are_the_identity_whatever_they_hold(states: int, device: torch.device) -> None:
    outs = torch.full((states, 3, 5), torch.nan, device=device, requires_grad=True)
    lses = torch.full((states, 3), -torch.inf, device=device, requires_grad=True)
    out, lse = mr.merge_attention(outs, lses)
    assert torch.equal(out, torch.zeros_like(out)) and (lse == -torch.inf).all()
    for gradient in torch.autograd.grad(
        (out, lse), (outs, lses), (torch.ones_like(out), torch.ones_like(lse))
    ):
        assert (gradient == 0).all()


def test_empty_states_pass_no_gradient_beside_others(device: torch.device) -> None:
    outs, lses = torch.randn(3, 4, 5, device=device), torch.randn(3, 4, device=device)
    outs[1], lses[1] = torch.nan, -torch.inf
    gradients = []
    for kept in ([0, 1, 2], [0, 2]):
        leaves = [t[kept].requires_grad_() for t in (outs, lses)]
        out, lse = mr.merge_attention(*leaves)
        gradients.append(torch.autograd.grad(out.sin().sum() + lse.sin().sum(), leaves))
    for with_empty, without in zip(*gradients, strict=True):
        assert (with_empty[1] == 0).all() and torch.equal(with_empty[[0, 2]], without)


def test_second_derivatives_of_many_states(device: torch.device) -> None:
    outs = torch.randn(3, 2, 4, dtype=torch.float64, device=device, requires_grad=True)
    lses = torch.randn(3, 2, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradgradcheck(mr.merge_attention, (outs, lses))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=name_of)
def test_many_states_are_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    outs = torch.randn(7, 16, 33, device=device).to(dtype)
    lses = torch.randn(7, 16, device=device)
    out, _ = mr.merge_attention(outs, lses)
    expected, _ = mr.merge_attention(outs.double(), lses.double())
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
