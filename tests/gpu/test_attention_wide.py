"""Attention of heads wider than 256 on tensor cores, by the folds of programs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from calls import HALVES, assert_same_bits
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
}
WAYS = ("fold", "local_gradient")


def inputs_of(size: str, dtype: torch.dtype, gpu: torch.device) -> Inputs:
    return attention_inputs(*SIZES[size], dtype=dtype, device=gpu)


def check(inputs: Inputs, tier: str, options: dict[str, Any], **how: Any) -> None:
    before = counts()
    check_operator("attention", inputs, options, function=mr.attention, **how)
    # Programs are tried on the CPU before their first use.
    ran = {path for path in counts() - before if path.startswith(("statistics", "attention"))}
    ran = {path for path in ran if "/cuda/" in path}
    dtype = name_of(inputs["q"].dtype)
    assert ran == {f"statistics_{way}/cuda/{tier}/{dtype}" for way in WAYS}


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("size", SIZES)
def test_accuracy(size: str, dtype: torch.dtype, tier: str, gpu: torch.device) -> None:
    check(inputs_of(size, dtype, gpu), tier, {"return_lse": True})


@pytest.mark.parametrize(
    "options", ({"scale": -0.03}, {"compensated": True}, {"window": (None, None)}), ids=str
)
def test_options(options: dict[str, Any], tier: str, gpu: torch.device) -> None:
    check(inputs_of("wide", torch.bfloat16, gpu), tier, options)


def test_some_gradients(tier: str, gpu: torch.device) -> None:
    for names in (["q"], ["k", "v"], ["v"]):
        check(inputs_of("shared", torch.bfloat16, gpu), tier, {}, differentiate=names)


def test_only_lse_has_a_gradient(tier: str, gpu: torch.device) -> None:
    inputs = inputs_of("wide", torch.bfloat16, gpu)
    of_lse = torch.randn(1, 2, 300, device=gpu)
    check(inputs, tier, {"return_lse": True}, differentiate=["q", "k"], upstream=[None, of_lse])


def test_layouts(tier: str, gpu: torch.device) -> None:
    """[batch, tokens, heads, width] in memory."""
    inputs = inputs_of("shared", torch.bfloat16, gpu)
    moved = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in inputs.items()}
    check(moved, tier, {})


def test_far_scores(tier: str, gpu: torch.device) -> None:
    """One weight is almost 1 in most rows."""
    inputs = inputs_of("wide", torch.bfloat16, gpu)
    inputs["q"] *= 30
    check(inputs, tier, {})


def test_little_workspace(tier: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys come in slices, in each direction."""
    monkeypatch.setattr(attention_wide, "WORKSPACE", 2 * 514 * 256)
    inputs = attention_inputs(1, 1, 1, 257, 1000, 512, 512, dtype=torch.bfloat16, device=gpu)
    before = counts()
    check(inputs, tier, {})
    launches = Counter({path.split("/")[0]: n for path, n in (counts() - before).items() if "/cuda/" in path})
    assert launches["statistics_fold"] == 1 and launches["statistics_local_gradient"] >= 4


def test_deterministic(deterministic: None, gpu: torch.device) -> None:
    inputs = {name: t.requires_grad_() for name, t in inputs_of("shared", torch.bfloat16, gpu).items()}

    def step() -> dict[str, torch.Tensor]:
        out = mr.attention(**inputs)
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


@pytest.mark.parametrize("options", ({"causal": True}, {"softcap": 20.0}, {"window": (5, 5)}), ids=str)
def test_other_calls_run_without_tensor_cores(options: dict[str, Any], gpu: torch.device) -> None:
    """A window, a softcap or few queries."""
    inputs = inputs_of("wide", torch.bfloat16, gpu)
    check_operator("attention", inputs, options)
    assert "/cuda/simt/" in mr.explain("attention", *inputs.values(), **options).forward
