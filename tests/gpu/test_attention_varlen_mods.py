"""attention_varlen with score_mod and mask_mod on a GPU: against dense torch of each sequence."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import mods
import pytest
import torch
from calls import HALVES, check_replayed
from modified_calls import Results, assert_rule, dense_per_sequence, drawn, results
from mods import CASES, Case
from paths import counts
from specimens import Inputs, name_of, starts, varlen_inputs

import monoidreduce as mr

pytestmark = pytest.mark.tiers("sm80", "sm90")
# Of queries and of keys; None: the same.
LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "mixed": ((300, 3, 64, 1, 200, 128, 17), None),
    "short": ((32,) * 20, None),
    "unequal": ((128, 0, 200, 77, 5), (233, 40, 190, 0, 300)),
    "empty": ((0, 150, 0), (70, 0, 200)),
}
# Heads, key heads, width, value width.
HEADS = ((4, 2, 64, 64), (2, 2, 128, 96), (2, 1, 256, 160), (3, 1, 59, 8))


def paths(dtype: torch.dtype, width: int = 64) -> set[str]:
    named = os.environ.get("MONOIDREDUCE_CUDA_TIER")
    tier = named or ("sm90" if width <= 128 else "sm80")
    order = "/deterministic" * torch.are_deterministic_algorithms_enabled()
    return {
        f"modified_attention_forward/cuda/{tier}/{name_of(dtype)}",
        f"modified_attention_backward/cuda/{tier}{order}/{name_of(dtype)}",
    }


def check(
    make: Any,
    lengths: str,
    dtype: torch.dtype,
    gpu: torch.device,
    heads: tuple[int, int, int, int] = HEADS[0],
    **options: Any,
) -> None:
    of_queries, of_keys = LENGTHS[lengths]
    pair = (of_queries, of_queries if of_keys is None else of_keys)
    size = (len(of_queries), heads[0], *(max(each) for each in pair))

    def draw(seed: int) -> Results:
        torch.manual_seed(seed)
        inputs = varlen_inputs(of_queries, of_keys, *heads, behind=9, dtype=dtype, device=gpu)
        q, k, v, *of_sequences = inputs.values()

        def case_in(of: torch.dtype) -> Case:
            torch.manual_seed(100 + seed)
            return make(*size, dtype=of, device=gpu)

        def ours(case: Case) -> Any:
            given = {"score_mod": case.score_mod, "mask_mod": case.mask_mod, "return_lse": True, **options}
            return lambda *tensors: mr.attention_varlen(*tensors, *of_sequences, **given)

        def of_torch(case: Case, **how: Any) -> Any:
            return lambda *tensors: dense_per_sequence(*tensors, pair, case, **options, **how)

        return drawn([t.requires_grad_() for t in (q, k, v)], case_in, ours, of_torch)

    before = counts()
    assert_rule(draw, dtype, max(size[2:]))
    assert paths(dtype, heads[2]) <= set(counts() - before)  # gradients of captured tensors take others too


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_functions(make: Any, dtype: torch.dtype, gpu: torch.device) -> None:
    check(make, "mixed", dtype, gpu)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("make", (mods.alibi, mods.document), ids=lambda make: make.__name__)
def test_lengths_and_widths(make: Any, heads: Any, lengths: str, gpu: torch.device) -> None:
    check(make, lengths, torch.bfloat16, gpu, heads)


@pytest.mark.parametrize("options", ({"causal": True}, {"window": (40, 3), "scale": -0.2}), ids=str)
@pytest.mark.parametrize("lengths", ("mixed", "unequal"))
def test_bands(lengths: str, options: dict[str, Any], gpu: torch.device) -> None:
    check(mods.learned, lengths, torch.float16, gpu, **options)


@pytest.mark.tiers("simt")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_any_width(lengths: str, dtype: torch.dtype, gpu: torch.device) -> None:
    check(mods.learned, lengths, dtype, gpu, (2, 1, 59, 3))
    check(mods.document, lengths, dtype, gpu, (2, 1, 300, 130), causal=True)


def inputs_of(lengths: str, gpu: torch.device) -> Inputs:
    of_queries, of_keys = LENGTHS[lengths]
    inputs = varlen_inputs(of_queries, of_keys, *HEADS[0], behind=90, dtype=torch.bfloat16, device=gpu)
    return {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}


@pytest.mark.parametrize("lengths", LENGTHS)
def test_deterministic_mode(lengths: str, deterministic: None, gpu: torch.device) -> None:
    """Two runs give the same bits, and right ones: tiles of keys add in turn."""
    q, k, v, *of_sequences = inputs_of(lengths, gpu).values()
    slopes = torch.rand(4, device=gpu)
    score_mod = lambda s, b, h, i, j: s + slopes[h] * (j - i)  # noqa: E731
    options: dict[str, Any] = {"score_mod": score_mod, "causal": True, "return_lse": True}
    first, second = (
        results(lambda *t: mr.attention_varlen(*t, *of_sequences, **options), [q, k, v]) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    check(mods.alibi, lengths, torch.bfloat16, gpu, causal=True)


@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
def test_deterministic_tables(heads: Any, deterministic: None, gpu: torch.device) -> None:
    check(mods.relative_position, "mixed", torch.bfloat16, gpu, heads)


def test_sinks(gpu: torch.device) -> None:
    """A query without keys has its sink alone."""
    q, k, v, *of_sequences = inputs_of("unequal", gpu).values()
    sinks = torch.randn(4, device=gpu)
    mask = lambda b, h, i, j: i >= j  # noqa: E731
    options: dict[str, Any] = {"mask_mod": mask, "return_lse": True}
    out, lse = mr.attention_varlen(q, k, v, *of_sequences, sinks=sinks, **options)
    bare, bare_lse = mr.attention_varlen(q, k, v, *of_sequences, **options)
    torch.testing.assert_close(lse, torch.logaddexp(bare_lse, sinks[:, None]))
    expected = bare.float() * (bare_lse - lse).exp().T[..., None]
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(lse[:, -90:], sinks[:, None].expand(4, 90)) and not out[-90:].any()


@pytest.mark.parametrize("name", ("cu_seqlens_q", "cu_seqlens_k"))
@pytest.mark.parametrize("values", ([1, 5, 9], [0, 7, 5], [0, 5, 12], [0, 2**40, 9]), ids=str)
def test_starts_that_are_not_ascending(values: list[int], name: str, gpu: torch.device) -> None:
    """Nobody reads them in time: results and gradients are NaN, that of a captured tensor too."""
    inputs = varlen_inputs((4, 6), (5, 6), *HEADS[0], behind=0, dtype=torch.bfloat16, device=gpu)
    right = dict(inputs)
    inputs[name] = torch.tensor(values, device=gpu)
    table = torch.randn(2, 6, device=gpu, requires_grad=True)
    score_mod = lambda s, b, h, i, j: s + table[b, j]  # noqa: E731
    leaves = [inputs[n].requires_grad_() for n in "qkv"]
    out, lse = mr.attention_varlen(**inputs, score_mod=score_mod, return_lse=True)
    for t in (out, lse, *torch.autograd.grad(out.sum() + lse.sum(), [*leaves, table])):
        assert bool(t.isnan().all())
    assert bool(mr.attention_varlen(**right, score_mod=score_mod).isfinite().all())


def test_a_graph_is_replayed_with_other_lengths(gpu: torch.device) -> None:
    """The host sees no length: one graph serves all."""
    of_queries = (100, 200, 300, 10)
    inputs = varlen_inputs(of_queries, None, *HEADS[0], behind=90, dtype=torch.bfloat16, device=gpu)
    q, k, v, cu = inputs.values()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grad, bias = torch.randn_like(q), torch.randn(4, 700, device=gpu)
    score_mod = lambda s, b, h, i, j: s + bias[b, j] - 0.1 * i  # noqa: E731

    def step() -> tuple[torch.Tensor, ...]:
        out = mr.attention_varlen(*leaves, cu, score_mod=score_mod, causal=True)
        return (out.detach(), *torch.autograd.grad(out, leaves[1:], grad))

    others = ((7, 0, 600, 40), (300, 300, 50, 50), (0, 0, 0, 1))
    check_replayed(step, [partial(cu.copy_, starts(lengths, gpu)) for lengths in others])


def test_explanation(gpu: torch.device) -> None:
    found = mr.explain("attention_varlen", **inputs_of("mixed", gpu), mask_mod=lambda b, h, i, j: i >= j)
    assert {found.forward, found.backward} == paths(torch.bfloat16)
