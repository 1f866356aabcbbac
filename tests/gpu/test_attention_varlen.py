"""Attention over packed sequences on tensor cores: lengths, widths, options, and that the kernels ran."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from calls import HALVES, assert_same_bits, check_replayed, results, upstreams
from paths import takes
from specimens import Inputs, Specimen, name_of, starts, varlen_inputs
from tolerance import check_operator

import monoidreduce as mr

pytestmark = pytest.mark.tiers("sm80", "sm90")

# Heads, key heads, width, value width.
HEADS: dict[str, tuple[int, int, int, int]] = {
    "width_64": (16, 16, 64, 64),
    "width_128": (12, 4, 128, 128),
    "width_256": (8, 4, 256, 256),
    "unequal": (12, 12, 104, 56),
    "padded_59": (12, 6, 59, 59),
}
# Of queries and of keys; None: the same.
LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "mixed": ((700, 3, 64, 1, 200, 128, 17), None),
    "short": ((32,) * 40, None),
    "unequal": ((128, 0, 300, 77, 5), (333, 40, 190, 0, 700)),
    "empty": ((0, 200, 0), (70, 0, 300)),
    "one_token_each": ((1,) * 40, (37,) * 40),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (50, 10)},
    "causal_softcap": {"causal": True, "softcap": 3.0, "scale": 0.3},
}


def inputs_of(lengths: str, heads: str, dtype: torch.dtype, device: torch.device) -> Inputs:
    return varlen_inputs(*LENGTHS[lengths], *HEADS[heads], behind=70, dtype=dtype, device=device)


def paths(tier: str, dtype: torch.dtype, mode: str = "") -> set[str]:
    return {
        f"attention_forward/cuda/{tier}/{name_of(dtype)}",
        f"attention_backward/cuda/{tier}{mode}/{name_of(dtype)}",
    }


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
def test_lengths_and_options(
    heads: str, lengths: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device, tier: str
) -> None:
    with takes(paths(tier, dtype)):
        inputs = inputs_of(lengths, heads, dtype, gpu)
        check_operator("attention_varlen", inputs, {"return_lse": True, **options})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("heads", ("width_64", "width_128", "width_256"))
def test_deterministic_mode(
    heads: str, lengths: str, options: dict[str, Any], gpu: torch.device, tier: str, deterministic: None
) -> None:
    """Tiles of keys add in turn: each waits for those before it that its queries see."""
    options, inputs = {"return_lse": True, **options}, inputs_of(lengths, heads, torch.bfloat16, gpu)
    call = Specimen("attention_varlen", "attention_varlen", varlen_inputs, options=options)
    grads = upstreams(call, inputs)
    check_operator("attention_varlen", inputs, options)
    assert_same_bits(results(call, inputs, grads), results(call, inputs, grads))


@pytest.mark.parametrize("heads", ("width_128", "width_256"))
@pytest.mark.parametrize("place", ("q", "k", "v"))
def test_non_finite_inputs(place: str, heads: str, gpu: torch.device) -> None:
    """Of one sequence, and behind the last, are not seen in the others."""
    inputs = varlen_inputs((40, 90, 60), None, *HEADS[heads], behind=9, dtype=torch.bfloat16, device=gpu)
    inputs[place][100, -1, 7] = torch.inf
    check_operator("attention_varlen", inputs, {"return_lse": True, "causal": True})
    inputs[place][-1] = torch.nan
    found = check_operator("attention_varlen", inputs, {"return_lse": True})
    others = [*range(40), *range(130, 199)]
    assert bool(torch.cat([t[others].flatten() for n, t in found.items() if n != "out1"]).isfinite().all())


@pytest.mark.parametrize("compensated", (False, True), ids=("plain", "compensated"))
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_sinks(dtype: torch.dtype, compensated: bool, gpu: torch.device) -> None:
    inputs = varlen_inputs((5, 300, 60), (9, 0, 70), 96, 48, 64, 64, dtype=dtype, device=gpu)
    inputs["sinks"] = torch.randn(96, device=gpu).to(dtype)
    check_operator("attention_varlen", inputs, {"return_lse": True, "compensated": compensated})


def test_a_graph_is_replayed_with_other_lengths(gpu: torch.device, tier: str) -> None:
    """The host sees no length: one graph serves all."""
    place: Any = {"dtype": torch.bfloat16, "device": gpu}
    inputs = varlen_inputs((100, 200, 300, 10), None, *HEADS["width_128"], behind=90, **place)
    q, k, v, cu = inputs.values()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grad = torch.randn_like(q)

    def step() -> tuple[torch.Tensor, ...]:
        out = mr.attention_varlen(*leaves, cu, causal=True)
        return (out.detach(), *torch.autograd.grad(out, leaves[1:], grad))

    others = ((7, 0, 600, 40), (300, 300, 50, 50), (0, 0, 0, 1))
    check_replayed(step, [partial(cu.copy_, starts(lengths, gpu)) for lengths in others])


def test_starts_out_of_bounds_leave_the_context_alive(gpu: torch.device) -> None:
    inputs = varlen_inputs((100, 200), None, *HEADS["width_64"], behind=0, dtype=torch.bfloat16, device=gpu)
    wrong = inputs | {"cu_seqlens_q": torch.tensor([0, 1 << 40, 300], device=gpu)}
    assert bool(mr.attention_varlen(**wrong).isnan().all())
    assert bool(mr.attention_varlen(**inputs).isfinite().all())


def test_explanation(gpu: torch.device, tier: str) -> None:
    inputs = inputs_of("mixed", "width_128", torch.bfloat16, gpu)
    found = mr.explain("attention_varlen", **inputs, causal=True)
    assert {found.forward, found.backward} == paths(tier, torch.bfloat16)
