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
    """Also the gradients of q, k, v through both parts and the merge equal those of the whole."""
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
