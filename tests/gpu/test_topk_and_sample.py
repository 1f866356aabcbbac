"""linear_topk and linear_sample on the kernels of each family, and the same samples on all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from calls import HALVES, check_captured
from decoding import head_inputs, kept_classes, packed, sample_oracle, sampled, scores_of
from specimens import Inputs, name_of
from tolerance import check_operator
from torch import Tensor

import monoidreduce as mr
from monoidreduce import reference

pytestmark = pytest.mark.tiers("simt", "sm80", "sm90")

SIZES: dict[str, tuple[int, int, int]] = {  # rows, classes, width
    "one_tile": (128, 256, 64),
    "one_row": (1, 3000, 256),
    "ragged": (513, 1111, 200),
    "many_rows": (3000, 515, 72),
    "many_classes": (130, 70001, 64),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"temperature": 0.7, "softcap": 8.0, "logit_scale": 0.7},
}


def inputs_of(size: str, dtype: torch.dtype, device: torch.device) -> Inputs:
    return head_inputs(*SIZES[size], dtype=dtype, device=device, bias=True)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("k", (1, 5, 64))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_topk(
    size: str, options: dict[str, Any], k: int, dtype: torch.dtype, tier: str, gpu: torch.device
) -> None:
    check_operator("linear_topk", inputs_of(size, dtype, gpu), {"k": k, **options})


@pytest.mark.parametrize("k", (1, 3, 16, 17, 64))
@pytest.mark.parametrize("rows, classes", ((1, 5), (300, 64), (257, 5003), (64, 100003)))
def test_topk_of_integers(rows: int, classes: int, k: int, tier: str, gpu: torch.device) -> None:
    """Scores are small integers, exact in all dtypes: of thousands of equal ones the lowest classes are
    taken, in the order of a stable sort."""
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (rows, 8), device=gpu).bfloat16()
    weight = torch.randint(-2, 3, (classes, 8), device=gpu).bfloat16()
    found = mr.linear_topk(x, weight, k)
    scores = x.float() @ weight.float().T
    best, index = scores.sort(dim=1, descending=True, stable=True)
    few = min(k, classes)
    assert torch.equal(found.index[:, :few], index[:, :few])
    assert (found.index[:, few:] == -1).all() and (found.log_probs[:, few:] == -math.inf).all()
    expected = best[:, :few] - scores.logsumexp(1, keepdim=True)
    torch.testing.assert_close(found.log_probs[:, :few], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("falling", (False, True), ids=("rising", "falling"))
def test_topk_of_sorted_classes(falling: bool, tier: str, gpu: torch.device) -> None:
    """Every class exceeds all before it, or none does."""
    classes, k = 20000, 64
    x = torch.ones(200, 8, device=gpu, dtype=torch.bfloat16)
    order = torch.arange(classes, device=gpu)
    order = order.flip(0) if falling else order
    weight = torch.zeros(classes, 8, device=gpu)
    weight[:, 0], weight[:, 1] = (order // 128).float(), (order % 128).float() / 128
    found = mr.linear_topk(x, weight.bfloat16(), k)
    expected = torch.arange(k, device=gpu) if falling else classes - 1 - torch.arange(k, device=gpu)
    assert torch.equal(found.index, expected.expand(200, k))


def test_topk_with_nan_and_infinities(tier: str, gpu: torch.device) -> None:
    x = torch.randn(130, 64, device=gpu, dtype=torch.bfloat16)
    weight = torch.randn(3000, 64, device=gpu, dtype=torch.bfloat16)
    x[3, 5], x[77] = math.nan, 0
    bias = torch.zeros(3000, device=gpu, dtype=torch.bfloat16)
    bias[:2990] = -math.inf
    plain, few = mr.linear_topk(x, weight, 8), mr.linear_topk(x, weight, 16, bias=bias)
    rows = torch.arange(130, device=gpu) != 3
    expected = (x[rows].float() @ weight.float().T).topk(8)
    torch.testing.assert_close(
        plain.log_probs[rows].diff(dim=1), expected.values.diff(dim=1), rtol=1e-3, atol=1e-3
    )
    assert plain.log_probs[3].isnan().all()
    assert plain.index[77].tolist() == list(range(8))
    assert (few.index[rows, :10] >= 2990).all() and (few.log_probs[rows, 10:] == -math.inf).all()


@pytest.mark.parametrize("dtype", (*HALVES, torch.float32), ids=name_of)
@pytest.mark.parametrize("kept", (False, True), ids=("all_classes", "kept"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", ("one_row", "ragged", "many_classes"))
def test_sample(
    size: str,
    options: dict[str, Any],
    kept: bool,
    dtype: torch.dtype,
    tier: str,
    gpu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, classes, _ = SIZES[size]
    inputs, seed = inputs_of(size, dtype, gpu), 7
    keep = kept_classes((rows + 1,), classes, gpu)[1:] if kept else None
    words = None if keep is None else packed(keep)
    found = mr.linear_sample(**inputs, **options, kept=words, seed=seed)
    wide = {name: t.double() for name, t in inputs.items()}
    expected, margin = sampled(seed, scores_of(**wide, **options, kept=keep))
    clear = margin > 1e-3
    assert clear.sum() >= 0.9 * rows and torch.equal(found.index[clear], expected[clear])

    def call(**tensors: Tensor) -> Any:
        return mr.linear_sample(**tensors, **options, kept=words, seed=seed, entropy=True)[1:]

    oracle = sample_oracle(found.index, kept=keep, **options)
    monkeypatch.setattr(reference, "linear_sample", oracle, raising=False)
    check_operator("linear_sample", inputs, function=call)


def test_samples_are_those_of_the_cpu(tier: str, gpu: torch.device) -> None:
    """The operands are small integers, so that every engine computes the same scores."""
    x = torch.randint(-2, 3, (300, 16)).bfloat16()
    weight = torch.randint(-2, 3, (5003, 16)).bfloat16()
    temperature = torch.rand(300).clamp(min=0.3)
    temperature[::7] = 0
    words = packed(kept_classes((300,), 5003, torch.device("cpu")))
    options: dict[str, Any] = {"seed": 11, "temperature": temperature, "kept": words, "entropy": True}
    expected = mr.linear_sample(x, weight, **options)
    moved = {name: t.to(gpu) if isinstance(t, Tensor) else t for name, t in options.items()}
    found = mr.linear_sample(x.to(gpu), weight.to(gpu), **moved)
    assert (found.index.cpu() == expected.index).double().mean() > 0.99
    assert torch.equal(found.index.cpu()[::7], expected.index[::7])
    same = found.index.cpu() == expected.index
    torch.testing.assert_close(found.log_prob.cpu()[same], expected.log_prob[same], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ("linear_topk", "linear_sample"))
def test_captured_and_the_same_bits_again(name: str, tier: str, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    options: dict[str, Any] = {"k": 64} if name == "linear_topk" else {"seed": torch.tensor(3, device=gpu)}

    def call(**tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t for t in getattr(mr, name)(**tensors, **options) if t is not None)

    first = call(**inputs)
    for _ in range(5):
        for again, expected in zip(call(**inputs), first, strict=True):
            assert torch.equal(again, expected)
    check_captured(lambda: call(**inputs))
