"""Attention of heads wider than 256 on tensor cores, by the folds of programs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from calls import HALVES, assert_same_bits, check_replayed
from paths import counts
from specimens import Inputs, attention_inputs, name_of
from tolerance import check_operator

import monoidreduce as mr
from monoidreduce._ops import attention_wide

pytestmark = pytest.mark.tiers("sm80", "sm90")
# batch, heads, key heads, queries, keys, width, width of values
SIZES = {
    "wide": (1, 2, 2, 300, 400, 512, 512),
    "shared": (2, 6, 2, 190, 333, 576, 512),
    "wide_values": (1, 1, 1, 260, 77, 64, 1024),
    "wide_keys": (1, 3, 3, 257, 1000, 1024, 8),
    "one_key": (1, 2, 1, 256, 1, 264, 264),
    "more_queries": (1, 4, 2, 500, 130, 512, 264),
    "small": (2, 4, 2, 130, 150, 264, 272),
}
BANDS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (70, 20)},
    "causal_window": {"causal": True, "window": (100, None)},
    "left": {"window": (50, None)},
    "diagonal": {"window": (0, 0)},
}
WAYS = ("fold", "local_gradient")


def inputs_of(size: str, dtype: torch.dtype, gpu: torch.device) -> Inputs:
    return attention_inputs(*SIZES[size], dtype=dtype, device=gpu)


def check(inputs: Inputs, tier: str, options: dict[str, Any], **how: Any) -> Inputs:
    before = counts()
    found = check_operator("attention", inputs, options, function=mr.attention, **how)
    # Programs are tried on the CPU before their first use.
    ran = {path for path in counts() - before if path.startswith(("statistics", "attention"))}
    ran = {path for path in ran if "/cuda/" in path}
    dtype = name_of(inputs["q"].dtype)
    assert ran == {f"statistics_{way}/cuda/{tier}/{dtype}" for way in WAYS}
    return found


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("size", SIZES)
def test_accuracy(size: str, dtype: torch.dtype, tier: str, gpu: torch.device) -> None:
    check(inputs_of(size, dtype, gpu), tier, {"return_lse": True})


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    "options", ({"scale": -0.03}, {"compensated": True}, {"window": (None, None)}), ids=str
)
def test_options(options: dict[str, Any], causal: bool, tier: str, gpu: torch.device) -> None:
    check(inputs_of("wide", torch.bfloat16, gpu), tier, {"causal": causal, **options})


@pytest.mark.parametrize("causal", (False, True))
def test_some_gradients(causal: bool, tier: str, gpu: torch.device) -> None:
    for names in (["q"], ["k", "v"], ["v"], ["k"]):
        check(inputs_of("shared", torch.bfloat16, gpu), tier, {"causal": causal}, differentiate=names)


@pytest.mark.parametrize("window", (None, (70, 20)))
def test_only_lse_has_a_gradient(window: tuple[int, int] | None, tier: str, gpu: torch.device) -> None:
    inputs = inputs_of("wide", torch.bfloat16, gpu)
    of_lse = torch.randn(1, 2, 300, device=gpu)
    options = {"return_lse": True, "window": window}
    check(inputs, tier, options, differentiate=["q", "k"], upstream=[None, of_lse])


@pytest.mark.parametrize("causal", (False, True))
def test_layouts(causal: bool, tier: str, gpu: torch.device) -> None:
    """[batch, tokens, heads, width] in memory."""
    inputs = inputs_of("shared", torch.bfloat16, gpu)
    moved = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in inputs.items()}
    check(moved, tier, {"causal": causal})


def test_far_scores(tier: str, gpu: torch.device) -> None:
    """One weight is almost 1 in most rows."""
    inputs = inputs_of("wide", torch.bfloat16, gpu)
    inputs["q"] *= 30
    check(inputs, tier, {})


@pytest.mark.parametrize("causal", (False, True))
def test_little_workspace(
    causal: bool, tier: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys come in slices, in each direction."""
    monkeypatch.setattr(attention_wide, "WORKSPACE", 2 * 514 * 256)
    inputs = attention_inputs(1, 1, 1, 257, 1000, 512, 512, dtype=torch.bfloat16, device=gpu)
    before = counts()
    check(inputs, tier, {"causal": causal})
    launches = Counter({path.split("/")[0]: n for path, n in (counts() - before).items() if "/cuda/" in path})
    assert launches["statistics_fold"] == 1 and launches["statistics_local_gradient"] >= 4


@pytest.mark.parametrize("causal", (False, True))
def test_deterministic(causal: bool, deterministic: None, gpu: torch.device) -> None:
    inputs = {name: t.requires_grad_() for name, t in inputs_of("shared", torch.bfloat16, gpu).items()}

    def step() -> dict[str, torch.Tensor]:
        out = mr.attention(**inputs, causal=causal)
        grads = torch.autograd.grad(out, list(inputs.values()), torch.ones_like(out))
        return {"out": out.detach(), **dict(zip(inputs, grads, strict=True))}

    assert_same_bits(step(), step())


def test_graph(gpu: torch.device) -> None:
    q, k, v = inputs_of("wide", torch.bfloat16, gpu).values()
    mr.attention(q, k, v)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mr.attention(q, k, v)
    q.normal_()
    graph.replay()
    assert torch.equal(out, mr.attention(q, k, v))


def test_explained(tier: str, gpu: torch.device) -> None:
    inputs = inputs_of("wide", torch.bfloat16, gpu)
    explained = mr.explain("attention", *inputs.values())
    assert explained.forward == f"statistics_fold/cuda/{tier}/bfloat16"
    assert explained.backward == f"statistics_local_gradient/cuda/{tier}/bfloat16"


def test_other_calls_run_without_tensor_cores(gpu: torch.device) -> None:
    inputs, options = inputs_of("wide", torch.bfloat16, gpu), {"softcap": 20.0}
    check_operator("attention", inputs, options)
    assert "/cuda/simt/" in mr.explain("attention", *inputs.values(), **options).forward


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("size", ("wide", "shared", "wide_values", "wide_keys", "more_queries"))
def test_bands(
    size: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    tier: str,
    gpu: torch.device,
) -> None:
    check(inputs_of(size, dtype, gpu), tier, {"return_lse": True, **options})


def test_queries_that_see_no_key(tier: str, gpu: torch.device) -> None:
    """The first ones of more queries than keys."""
    inputs = inputs_of("more_queries", torch.bfloat16, gpu)
    before = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    out, lse = mr.attention(**before, causal=True, return_lse=True)
    (d_q,) = torch.autograd.grad(out, before["q"], torch.ones_like(out))
    nothing = 500 - 130
    assert not out[:, :, :nothing].any() and not d_q[:, :, :nothing].any()
    assert bool((lse[:, :, :nothing] == -torch.inf).all()) and bool(lse[:, :, nothing:].isfinite().all())


@pytest.mark.parametrize("place", ("q", "k", "v"))
@pytest.mark.parametrize("value", (torch.nan, torch.inf))
@pytest.mark.parametrize("options", (BANDS["causal"], BANDS["window"]), ids=("causal", "window"))
def test_non_finite_inputs_of_a_band(
    options: dict[str, Any], value: float, place: str, tier: str, gpu: torch.device
) -> None:
    """They reach the rows that see them, in value and gradient, and no others."""
    inputs = inputs_of("small", torch.bfloat16, gpu)
    inputs[place][-1, -1, 100, 7] = value
    found = check(inputs, tier, {"return_lse": True, **options})
    assert not found["out0"][-1, -1].isfinite().all() and found["out0"][-1, -1].isfinite().any()


def test_non_finite_upstream_gradient_of_a_band(gpu: torch.device) -> None:
    """A NaN in the gradient of query 77 reaches the keys that it sees and no others."""
    leaves = [t.requires_grad_() for t in inputs_of("small", torch.bfloat16, gpu).values()]
    out = mr.attention(*leaves, causal=True)
    grad, with_nan = torch.randn_like(out).expand(2, *out.shape).clone()
    with_nan[0, 1, 77, 5] = torch.nan
    finite = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    d_q, d_k, d_v = torch.autograd.grad(out, leaves, with_nan)
    seen = slice(77 + (150 - 130) + 1)
    for got, expected, places in (
        (d_q, finite[0], (0, 1, 77)),
        (d_k, finite[1], (0, 0, seen)),
        (d_v, finite[2], (0, 0, seen, 5)),
    ):
        lost = torch.zeros_like(got, dtype=torch.bool)
        lost[places] = True
        assert torch.equal(got.isnan(), lost)
        torch.testing.assert_close(got[~lost], expected[~lost], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("garbage", (torch.nan, torch.inf))
def test_keys_that_no_query_sees(garbage: float, gpu: torch.device) -> None:
    inputs = inputs_of("wide", torch.bfloat16, gpu)
    unseen = 400 - 300 - 10
    results = []
    for value in (0.0, garbage):
        for name in ("k", "v"):
            inputs[name][:, :, :unseen] = value
        leaves = [t.detach().requires_grad_() for t in inputs.values()]
        out = mr.attention(*leaves, causal=True, window=(10, None))
        results.append([out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    for with_garbage, without in zip(results[1], results[0], strict=True):
        assert torch.equal(with_garbage, without)
    assert not results[1][2][:, :, :unseen].any() and not results[1][3][:, :, :unseen].any()


def test_band_under_autocast(gpu: torch.device) -> None:
    q, k, v = inputs_of("shared", torch.float16, gpu).values()
    expected = mr.attention(q, k, v, causal=True)
    with torch.autocast("cuda", dtype=torch.float16):
        assert torch.equal(mr.attention(q, k, v, causal=True), expected)


def test_graph_of_a_band(gpu: torch.device) -> None:
    """The host waits for nothing, forward and backward, whatever the inputs are."""
    leaves = [t.requires_grad_() for t in inputs_of("shared", torch.bfloat16, gpu).values()]

    def step() -> tuple[torch.Tensor, ...]:
        out = mr.attention(*leaves, causal=True)
        return (out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out)))

    q, _, v = (t.detach() for t in leaves)
    check_replayed(step, (q.normal_, lambda: v[..., -1, 3].fill_(torch.inf)))
