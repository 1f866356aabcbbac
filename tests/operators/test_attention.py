"""attention: sizes, masks, scores and gradients, against the rule of tolerance.py."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from specimens import DTYPES, attention_inputs, integers, name_of, normal
from tolerance import check_operator

import monoidreduce as mr

# Around the tiles of the engines: lanes of 8, 16 and 32 rows, row blocks from 64, column tiles of 64 to 512.
QUERIES = (0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 97, 129, 255, 256, 257)
KEYS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 119, 120, 121, 127, 129, 240, 241, 257, 511, 512, 513)
WIDTHS = (0, 1, 2, 3, 8, 15, 16, 17, 32, 33, 64, 65, 128, 131)


def _draw(keys: int) -> Any:
    """A row over one key has score gradients of 0: with normal numbers there would be only rounding."""
    return integers if keys == 1 else normal


@pytest.mark.isa
@pytest.mark.parametrize("m", QUERIES)
@pytest.mark.parametrize("n", (33, 129))
def test_number_of_queries(m: int, n: int, device: torch.device) -> None:
    inputs = attention_inputs(1, 2, 1, m, n, dtype=torch.float32, device=device)
    check_operator("attention", inputs, {"return_lse": True})


@pytest.mark.isa
@pytest.mark.parametrize("n", KEYS)
@pytest.mark.parametrize("m", (5, 65))
def test_number_of_keys(m: int, n: int, device: torch.device) -> None:
    inputs = attention_inputs(1, 2, 1, m, n, dtype=torch.float32, device=device, draw=_draw(n))
    check_operator("attention", inputs, {"return_lse": True}, exact=n == 1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("axis", ("width", "value_width", "both"))
def test_widths(width: int, axis: str, device: torch.device) -> None:
    sizes = {"width": width} if axis == "width" else {"value_width": width}
    if axis == "both":
        sizes = {"width": width, "value_width": width}
    inputs = attention_inputs(1, 2, 2, 34, 45, **sizes, dtype=torch.float32, device=device)
    check_operator("attention", inputs, {"scale": 0.3, "return_lse": True})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "m, n, width", ((1, 1, 1), (1, 257, 64), (64, 64, 64), (65, 127, 80), (257, 33, 96), (3, 513, 192))
)
def test_sizes_in_every_dtype(m: int, n: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = attention_inputs(1, 2, 1, m, n, width, width, dtype=dtype, device=device, draw=_draw(n))
    check_operator("attention", inputs, {"causal": n > 1, "return_lse": True}, exact=n == 1)


@pytest.mark.parametrize(
    "batch, heads, kv_heads", ((0, 2, 1), (2, 0, 1), (1, 1, 1), (3, 1, 1), (5, 3, 3), (1, 7, 1), (2, 37, 1))
)
def test_batch_and_heads(batch: int, heads: int, kv_heads: int, device: torch.device) -> None:
    inputs = attention_inputs(batch, heads, kv_heads, 9, 21, dtype=torch.float32, device=device)
    check_operator("attention", inputs, {"return_lse": True})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("heads, kv_heads", ((4, 1), (4, 2), (6, 3), (3, 3)))
def test_grouped_queries(heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = attention_inputs(2, heads, kv_heads, 40, 70, 16, 24, dtype=dtype, device=device)
    check_operator("attention", inputs, {"causal": True, "return_lse": True})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("m, n", ((70, 70), (37, 130), (130, 37), (1, 65), (65, 2), (129, 64), (64, 257)))
def test_causal(m: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """The last query sees every key; with more queries than keys the first ones see none."""
    results = check_operator(
        "attention",
        attention_inputs(1, 2, 1, m, n, dtype=dtype, device=device),
        {"causal": True, "return_lse": True},
    )
    blind = max(m - n, 0)
    assert (results["out0"][:, :, :blind] == 0).all()
    assert (results["out1"][:, :, :blind] == -torch.inf).all()
    assert results["out1"][:, :, blind:].isfinite().all()
    assert (results["d_q"][:, :, :blind] == 0).all()


@pytest.mark.isa
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    "window", ((0, 0), (3, None), (None, 4), (5, 2), (64, 0), (63, 65), (200, 200), (None, None))
)
@pytest.mark.parametrize("m, n", ((67, 131), (131, 67), (96, 96)))
def test_window(
    window: tuple[int | None, int | None], m: int, n: int, causal: bool, device: torch.device
) -> None:
    lone_key = window == (0, 0)
    inputs = attention_inputs(
        1, 2, 1, m, n, dtype=torch.float32, device=device, draw=integers if lone_key else normal
    )
    check_operator(
        "attention", inputs, {"window": window, "causal": causal, "return_lse": True}, exact=lone_key
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("window", ((7, 0), (None, 33), (40, 25)))
def test_window_in_every_dtype(
    window: tuple[int | None, int | None], dtype: torch.dtype, device: torch.device
) -> None:
    inputs = attention_inputs(1, 4, 2, 75, 140, dtype=dtype, device=device)
    check_operator("attention", inputs, {"window": window, "return_lse": True})


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("window", ((None, 0), (40, 9), (None, None)))
@pytest.mark.parametrize("nan", ("", "q", "k", "v"))
def test_masks_over_many_tiles(
    window: tuple[int | None, int | None], nan: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Several blocks of keys and several hundred rows of two heads: whole tiles are left out, and a NaN
    reaches the rows that see it."""
    inputs = attention_inputs(1, 2, 1, 330, 530, 8, 16, dtype=dtype, device=device)
    if window == (None, None):
        inputs["bias"] = torch.ones(330, 530, dtype=torch.bool, device=device).tril(200)
    if nan:
        inputs[nan][0, 0, 300, 3] = torch.nan
    check_operator("attention", inputs, {"window": window, "return_lse": True})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("softcap", (0.5, 3.0, 50.0))
def test_softcap(softcap: float, dtype: torch.dtype, device: torch.device) -> None:
    """With scale 1 the scores reach several times the smaller caps, where the derivative of tanh matters."""
    inputs = attention_inputs(dtype=dtype, device=device)
    check_operator("attention", inputs, {"softcap": softcap, "scale": 1.0, "return_lse": True})


@pytest.mark.parametrize("scale", (0.0, -0.7, 0.05, 2.0))
def test_scale(scale: float, device: torch.device) -> None:
    check_operator(
        "attention",
        attention_inputs(dtype=torch.float32, device=device),
        {"scale": scale, "return_lse": True},
    )


BROADCASTS = tuple(itertools.product((2, 1), (4, 1), (37, 1), (53, 1)))


@pytest.mark.parametrize("shape", (*BROADCASTS, (53,), (37, 53), (37, 1), (4, 1, 53), ()), ids=str)
def test_floating_bias(shape: tuple[int, ...], device: torch.device) -> None:
    for dtype in (torch.float64, torch.float32):
        inputs = attention_inputs(dtype=dtype, device=device, bias=shape)
        results = check_operator("attention", inputs, {"return_lse": True})
        assert results["d_bias"].shape == shape


@pytest.mark.parametrize(
    "dtype, bias_dtype",
    [(t, t) for t in DTYPES] + [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
    ids=name_of,
)
@pytest.mark.parametrize("options", ({"causal": True}, {"window": (5, 3)}), ids=("causal", "window"))
@pytest.mark.parametrize("shape", ((2, 4, 37, 53), (1, 4, 1, 53), (2, 1, 37, 53), (4, 37, 1)), ids=str)
def test_floating_bias_in_every_dtype(
    shape: tuple[int, ...],
    options: dict[str, Any],
    dtype: torch.dtype,
    bias_dtype: torch.dtype,
    device: torch.device,
) -> None:
    inputs = attention_inputs(dtype=dtype, device=device, bias=shape, bias_dtype=bias_dtype)
    check_operator("attention", inputs, {"return_lse": True, **options})


@pytest.mark.parametrize("upstream", ("both", "out", "lse"))
def test_a_bias_of_rows_shifts_lse_alone(upstream: str, device: torch.device) -> None:
    """Its gradient by out is 0 where rows are finite, and nowhere what rounding leaves of a sum."""
    inputs = attention_inputs(dtype=torch.bfloat16, device=device, bias=(4, 37, 1), bias_dtype=torch.float32)
    inputs["v"][1, 0, 3, 2] = torch.nan
    bias = inputs["bias"].requires_grad_()
    out, lse = mr.attention(**inputs, causal=True, return_lse=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    followed = {"both": (True, True), "out": (True, False), "lse": (False, True)}[upstream]
    outputs = [y for y, f in zip((out, lse), followed, strict=True) if f]
    grads = [g for g, f in zip((grad_out, grad_lse), followed, strict=True) if f]
    (found,) = torch.autograd.grad(outputs, bias, grads)
    expected = (grad_lse if followed[1] else torch.zeros_like(grad_lse))[..., None]
    if followed[0]:
        expected = expected.masked_fill(out.isnan().any(-1, keepdim=True), torch.nan)
        assert expected.isnan().any() and expected.isfinite().any()
    torch.testing.assert_close(found, expected.sum(0), equal_nan=True)


def test_expanded_bias_view(device: torch.device) -> None:
    """A bias that the caller expanded: one gradient for each element of the view."""
    inputs = attention_inputs(dtype=torch.float32, device=device)
    inputs["bias"] = torch.randn(4, 1, 53, device=device).expand(2, 4, 37, 53)
    check_operator("attention", inputs, {"return_lse": True})


@pytest.mark.parametrize("shape", (*BROADCASTS, (53,), (37, 53)), ids=str)
def test_bool_bias(shape: tuple[int, ...], device: torch.device) -> None:
    inputs = attention_inputs(dtype=torch.float32, device=device, keep=shape)
    check_operator("attention", inputs, {"return_lse": True})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_bool_bias_in_every_dtype(dtype: torch.dtype, device: torch.device) -> None:
    inputs = attention_inputs(dtype=dtype, device=device, keep=(2, 1, 37, 53))
    inputs["bias"][:, :, 5] = False
    results = check_operator("attention", inputs, {"window": (30, 30), "return_lse": True})
    assert (results["out0"][:, :, 5] == 0).all() and (results["out1"][:, :, 5] == -torch.inf).all()
    assert (results["d_q"][:, :, 5] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("m, n", ((53, 97), (99, 57)))
def test_everything_together(m: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = attention_inputs(2, 6, 2, m, n, 24, 40, dtype=dtype, device=device, bias=(1, 6, 1, n))
    options = {"causal": True, "window": (45, 3), "softcap": 4.0, "scale": 0.4, "return_lse": True}
    check_operator("attention", inputs, options)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("followed", ("out", "lse"))
def test_gradient_through_one_output(followed: str, dtype: torch.dtype, device: torch.device) -> None:
    inputs = attention_inputs(dtype=dtype, device=device, bias=(1, 4, 37, 53))
    out_gradient = torch.randn(2, 37, 4, 19, device=device).to(dtype).transpose(1, 2)
    lse_gradient = torch.randn(37, 4, 2, device=device).permute(2, 1, 0)
    upstream = [out_gradient, None] if followed == "out" else [None, lse_gradient]
    results = check_operator("attention", inputs, {"return_lse": True, "softcap": 3.0}, upstream=upstream)
    if followed == "lse":
        assert (results["d_v"] == 0).all()


@pytest.mark.parametrize("layout", ("strided", "sliced", "expanded", "contiguous"))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_upstream_layouts(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    inputs = attention_inputs(dtype=dtype, device=device)
    check_operator("attention", inputs, {"causal": True, "return_lse": True}, upstream=layout)


@pytest.mark.parametrize(
    "names", [c for r in range(5) for c in itertools.combinations(("q", "k", "v", "bias"), r)], ids=str
)
def test_every_subset_of_gradients(names: tuple[str, ...], device: torch.device) -> None:
    inputs = attention_inputs(dtype=torch.float32, device=device, bias=(1, 4, 1, 53))
    results = check_operator("attention", inputs, {"return_lse": True}, differentiate=names)
    assert {name for name in results if name.startswith("d_")} == {f"d_{name}" for name in names}
    leaves = {name: t.detach().requires_grad_(name in names) for name, t in inputs.items()}
    out = mr.attention(**leaves)
    assert out.requires_grad == bool(names)
    if names:
        out.square().sum().backward()
        assert {name for name, leaf in leaves.items() if leaf.grad is not None} == set(names)


def test_torch_layout_views(device: torch.device) -> None:
    """[B, M, H, F] activations seen as [B, H, M, F], and heads sliced out of one packed projection."""
    packed = torch.randn(2, 45, 3, 4, 16, device=device)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    check_operator("attention", {"q": q, "k": k, "v": v}, {"causal": True, "return_lse": True})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_one_hot_softmax_is_exact(dtype: torch.dtype, device: torch.device) -> None:
    """Query i scores 1e4 above the rest on key pick[i], so the output is that key's value, bit for bit."""
    m, n = 70, 131
    pick = torch.randint(0, n, (m,), device=device)
    q = torch.nn.functional.one_hot(pick, n).to(dtype)[None, None].requires_grad_()
    k = torch.eye(n, dtype=dtype, device=device)[None, None].requires_grad_()
    v = integers(1, 1, n, 33, dtype=dtype, device=device, density=1.0, bound=9).requires_grad_()
    out, lse = mr.attention(q, k, v, scale=1e4, return_lse=True)
    assert torch.equal(out[0, 0], v[0, 0, pick])
    torch.testing.assert_close(lse, torch.full_like(lse, 1e4), rtol=2 * torch.finfo(lse.dtype).eps, atol=0)
    upstream = integers(1, 1, m, 33, dtype=dtype, device=device, density=1.0, bound=5)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), upstream)
    expected = torch.zeros(n, 33, dtype=dtype, device=device).index_add(0, pick, upstream[0, 0])
    assert expected.any() and torch.equal(dv[0, 0], expected)
    assert (dq == 0).all() and (dk == 0).all()


ACCURACY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"causal": True}),
    "window": ({}, {"window": (100, 20)}),
    "softcap": ({}, {"softcap": 5.0}),
    "bias": ({"bias": (1, 4, 257, 300)}, {}),
    "bool": ({"keep": (1, 1, 257, 300)}, {}),
    "bias_of_keys": ({"bias": (8, 4, 1, 300), "batch": 8}, {"causal": True}),
    # Where the rounding of a row's centre is most of the error.
    "two_keys": ({"n": 2}, {}),
    "ten_keys": ({"n": 10, "width": 72, "value_width": 72}, {"scale": 0.5}),
    "window_of_two": ({}, {"window": (1, 0)}),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("arguments, options", ACCURACY.values(), ids=ACCURACY.keys())
def test_accuracy(
    arguments: dict[str, Any], options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """Sizes at which the whole rule applies to every output and gradient, in float32 too."""
    sizes: dict[str, Any] = {
        "batch": 1,
        "heads": 4,
        "kv_heads": 2,
        "m": 257,
        "n": 300,
        "width": 64,
        "value_width": 64,
    }
    inputs = attention_inputs(**(sizes | arguments), dtype=dtype, device=device)
    check_operator("attention", inputs, options | {"return_lse": True})


# Laws, which need no oracle and hold at any size.


def _longer(device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    inputs = attention_inputs(1, 2, 1, 150, 601, 32, 32, dtype=dtype, device=device)
    return inputs["q"], inputs["k"], inputs["v"]


def test_order_of_keys_does_not_matter(device: torch.device) -> None:
    q, k, v = _longer(device)
    order = torch.randperm(k.shape[2], device=device)
    for ours, shuffled in zip(
        mr.attention(q, k, v, return_lse=True),
        mr.attention(q, k[:, :, order], v[:, :, order], return_lse=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, shuffled, rtol=1e-12, atol=1e-13)


def test_keys_twice_add_log_two(device: torch.device) -> None:
    q, k, v = _longer(device)
    out, lse = mr.attention(q, k, v, return_lse=True)
    out_twice, lse_twice = mr.attention(q, torch.cat((k, k), 2), torch.cat((v, v), 2), return_lse=True)
    torch.testing.assert_close(out_twice, out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(
        lse_twice, lse + torch.log(torch.tensor(2.0, dtype=lse.dtype)), rtol=1e-13, atol=1e-13
    )


def test_excluded_keys_equal_absent_keys(device: torch.device) -> None:
    q, k, v = _longer(device)
    keep = torch.rand(k.shape[2], device=device) < 0.6
    masked = mr.attention(q, k, v, bias=keep, return_lse=True)
    absent = mr.attention(q, k[:, :, keep], v[:, :, keep], return_lse=True)
    for ours, fewer in zip(masked, absent, strict=True):
        torch.testing.assert_close(ours, fewer, rtol=1e-12, atol=1e-13)


def test_constant_score_shifts_lse_only(device: torch.device) -> None:
    q, k, v = _longer(device)
    out, lse = mr.attention(q, k, v, return_lse=True)
    shifted, lse_shifted = mr.attention(
        q, k, v, bias=torch.full((1,), 7.0, dtype=q.dtype, device=device), return_lse=True
    )
    torch.testing.assert_close(shifted, out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse_shifted, lse + 7.0, rtol=1e-13, atol=1e-13)


def test_matches_scaled_dot_product_attention(device: torch.device) -> None:
    """The reference could share a misreading with the operator; torch's own attention cannot."""
    q, k, v = _longer(device)
    keep = torch.rand(150, 601, device=device) < 0.5
    keep[:, 0] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k.expand(1, 2, -1, -1), v.expand(1, 2, -1, -1), attn_mask=keep
    )
    torch.testing.assert_close(mr.attention(q, k, v, bias=keep), expected, rtol=1e-10, atol=1e-12)
    square = k[:, :, :150], v[:, :, :150]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, *(t.expand(1, 2, -1, -1) for t in square), is_causal=True
    )
    torch.testing.assert_close(mr.attention(q, *square, causal=True), expected, rtol=1e-10, atol=1e-12)


def test_causal_is_bottom_right(device: torch.device) -> None:
    """Two queries after four keys already seen: the first sees 5 of 6 keys, the second all."""
    q = torch.zeros(1, 1, 2, 1, dtype=torch.float64, device=device)
    k = torch.zeros(1, 1, 6, 1, dtype=torch.float64, device=device)
    v = torch.arange(6.0, dtype=torch.float64, device=device).reshape(1, 1, 6, 1)
    out = mr.attention(q, k, v, causal=True)
    torch.testing.assert_close(out.flatten(), torch.tensor([2.0, 2.5], dtype=torch.float64, device=device))


def test_window_counts_from_the_aligned_query(device: torch.device) -> None:
    """Query i of 2 aligns with key 4 + i of 6; window (2, 0) leaves keys 2..4 and 3..5."""
    q = torch.zeros(1, 1, 2, 1, dtype=torch.float64, device=device)
    k = torch.zeros(1, 1, 6, 1, dtype=torch.float64, device=device)
    v = torch.arange(6.0, dtype=torch.float64, device=device).reshape(1, 1, 6, 1)
    out = mr.attention(q, k, v, window=(2, 0))
    torch.testing.assert_close(out.flatten(), torch.tensor([3.0, 4.0], dtype=torch.float64, device=device))


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=name_of)
@pytest.mark.parametrize("keys", (12, 90, 300))
def test_gradients_by_slices_of_the_keys(keys: int, dtype: torch.dtype, device: torch.device) -> None:
    """A backward pass that is given a slice of the keys, and the results over all of them.

    Of few columns the engines take a row's centre from them, which is wrong of a slice.
    """
    inputs = attention_inputs(1, 2, 1, 33, keys, dtype=dtype, device=device)
    leaves = [inputs[name].requires_grad_() for name in "qkv"]
    options = (None, 0.0, -1, -1, False)  # scale, softcap, window, compensated
    out, lse, *low = torch.ops.monoidreduce.attention(*leaves, None, None, *options)
    grads = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), leaves, grads)

    q, k, v = (t.detach() for t in leaves)
    results, needed = (out.detach(), lse.detach(), *low), [True, True, True, False, False]
    backward = torch.ops.monoidreduce.attention_backward
    found = [
        backward(*grads, q, k_slice, v_slice, None, None, *results, *options, needed, whole=False)
        for k_slice, v_slice in zip(k.split(keys // 3, 2), v.split(keys // 3, 2), strict=True)
    ]
    gradients = (
        sum(f[0] for f in found),
        torch.cat([f[1] for f in found], 2),
        torch.cat([f[2] for f in found], 2),
    )
    for ours, whole in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "options",
    ({}, {"causal": True, "return_lse": True}, {"window": (30, 9), "softcap": 2.0}),
    ids=("full", "causal", "window"),
)
@pytest.mark.parametrize("rows", (3, 150))
def test_compensated(rows: int, options: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Also of widths that are padded for tensor cores, and of few rows, whose keys are split."""
    inputs = attention_inputs(1, 4, 2, rows, 700, 21, 59, dtype=dtype, device=device)
    check_operator("attention", inputs, {"compensated": True, **options})


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=name_of)
def test_compensated_saturated_rows(dtype: torch.dtype, device: torch.device) -> None:
    """Where almost one key alone is seen, most of the error of d_q and d_k is out's rounding."""
    shapes = ((1, 4, 200, 64),) + ((1, 4, 300, 64),) * 2
    leaves = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]
    grad = torch.randn(shapes[0], device=device).to(dtype)

    def gradients(call: Any, of: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(call(*of, scale=36 / 8), of[:2], grad.to(of[0].dtype))

    exact = gradients(mr.reference.attention, [t.detach().double().requires_grad_() for t in leaves])

    def errors(call: Any) -> list[float]:
        found = zip(gradients(call, leaves), exact, strict=True)
        return [float((ours - ref).abs().mean()) for ours, ref in found]

    compensated = errors(partial(mr.attention, compensated=True))
    for kept, lost, torchs in zip(
        compensated, errors(mr.attention), errors(mr.reference.attention), strict=True
    ):
        assert kept <= 2 * torchs and kept <= lost / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_compensation_changes_no_output(dtype: torch.dtype, device: torch.device) -> None:
    inputs = attention_inputs(dtype=dtype, device=device)
    for ours, plain in zip(
        mr.attention(**inputs, compensated=True, return_lse=True),
        mr.attention(**inputs, return_lse=True),
        strict=True,
    ):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize(
    "options", ({}, {"causal": True}, {"window": (30, 9)}), ids=("full", "causal", "window")
)
def test_compensated_infinite_value(
    options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """An infinite output has no second word, with which its row's gradients would all be NaN."""
    inputs = attention_inputs(1, 2, 1, 150, 190, 24, 40, dtype=dtype, device=device)
    inputs["v"][0, 0, 60, 3] = torch.inf
    results = check_operator("attention", inputs, {"compensated": True, **options})
    assert results["out0"].isinf().any()
