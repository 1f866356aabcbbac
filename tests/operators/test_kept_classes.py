"""Kept classes of linear_log_probs, and the words that hold them (monoidreduce/classes.py)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kept_classes import with_kept, words_of
from specimens import DTYPES, WITH_ALL, Inputs, cross_entropy_inputs, name_of
from tolerance import check_operator
from torch import Tensor

import monoidreduce as mr
from monoidreduce.classes import has_class

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 2.5},
    "softcap": {"softcap": 3.0},
    "all": {"temperature": 0.7, "softcap": 6.0, "logit_scale": -1.3},
}


def check(inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    return check_operator("linear_log_probs", inputs, {**WITH_ALL, **options})


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    check(with_kept(cross_entropy_inputs(dtype=dtype, device=device, bias=bias))[0], **options)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
def test_accuracy(dtype: torch.dtype, device: torch.device) -> None:
    check(with_kept(cross_entropy_inputs(400, 513, 64, dtype=dtype, device=device))[0])


@pytest.mark.isa
@pytest.mark.parametrize("classes", (1, 2, 31, 32, 33, 64, 257, 1031))
@pytest.mark.parametrize("rows", (1, 9, 129))
def test_sizes(rows: int, classes: int, device: torch.device) -> None:
    check(with_kept(cross_entropy_inputs(rows, classes, 19, dtype=torch.float32, device=device))[0])


def test_leading_axes_and_temperatures(device: torch.device) -> None:
    inputs, _ = with_kept(cross_entropy_inputs((3, 20), dtype=torch.float32, device=device))
    check(inputs, temperature=0.4 + 2 * torch.rand(3, 20, device=device))


def test_all_classes_kept_is_as_without(device: torch.device) -> None:
    inputs = cross_entropy_inputs(40, 67, dtype=torch.float32, device=device)
    keeps = torch.ones(40, 67, dtype=torch.bool, device=device)
    plain = mr.linear_log_probs(**inputs, **WITH_ALL)
    found = mr.linear_log_probs(**inputs, kept=words_of(keeps), **WITH_ALL)
    torch.testing.assert_close(tuple(found), tuple(plain))


def test_bits_behind_the_last_class_do_not_matter(device: torch.device) -> None:
    inputs, _ = with_kept(cross_entropy_inputs(9, 67, dtype=torch.float32, device=device))
    found = mr.linear_log_probs(**inputs, **WITH_ALL)
    inputs["kept"][:, -1] |= -8  # the last word has three classes
    again = mr.linear_log_probs(**inputs, **WITH_ALL)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_what_is_not_kept_may_hold_anything(bad: float, device: torch.device) -> None:
    inputs, keeps = with_kept(cross_entropy_inputs(40, 67, dtype=torch.float32, device=device, ignored=0))
    keeps[:, 11] = False
    inputs |= {"kept": words_of(keeps), "target": torch.where(inputs["target"] == 11, 12, inputs["target"])}
    expected = mr.linear_log_probs(**inputs, **WITH_ALL)
    inputs["bias"] = torch.zeros(67, device=device)
    inputs["bias"][11] = bad
    for result, of_finite in zip(mr.linear_log_probs(**inputs, **WITH_ALL), expected, strict=True):
        torch.testing.assert_close(result, of_finite)
    if device.type == "cpu":  # tensor cores multiply by 0, and 0 times NaN is NaN
        inputs["weight"][11] = bad
        inputs["x"].requires_grad_()
        found = mr.linear_log_probs(**inputs, entropy=True)
        assert found.entropy is not None
        kept = found.log_probs.isfinite()
        (gradient,) = torch.autograd.grad(found.log_probs[kept].sum() + found.entropy.sum(), inputs["x"])
        assert gradient.isfinite().all() and gradient.any()


def test_target_that_is_not_kept(device: torch.device) -> None:
    """log_probs is -inf and has no gradient; the other results are as ever."""
    inputs, keeps = with_kept(cross_entropy_inputs(12, 67, dtype=torch.float64, device=device, ignored=0))
    keeps[torch.arange(12, device=device), inputs["target"]] = torch.arange(12, device=device) % 2 == 0
    inputs["kept"] = words_of(keeps)
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]
    found = mr.linear_log_probs(**inputs, entropy=True)
    odd = torch.arange(12, device=device) % 2 == 1
    assert found.entropy is not None and torch.equal(found.log_probs == -math.inf, odd)
    dx, _ = torch.autograd.grad(found.log_probs.sum(), leaves, retain_graph=True)
    assert not dx[1::2].any() and dx[::2].any(1).all()
    scores = (leaves[0] @ leaves[1].T).masked_fill(~keeps, -math.inf)
    ours = torch.autograd.grad((found.entropy + found.lse).sum(), leaves)
    shares = scores.softmax(1)
    entropy = -torch.where(shares > 0, shares * (scores - scores.logsumexp(1, True)), 0).sum(1)
    theirs = torch.autograd.grad((scores.logsumexp(1) + entropy.nan_to_num()).sum(), leaves)
    torch.testing.assert_close(found.lse, scores.logsumexp(1))
    torch.testing.assert_close(found.entropy, entropy)
    torch.testing.assert_close(ours[0].isfinite(), torch.ones_like(theirs[0], dtype=torch.bool))


def test_no_kept_class(device: torch.device) -> None:
    """An empty fold: lse -inf, entropy 0, no top1, no gradient. Ignored tokens keep their zeros."""
    inputs, keeps = with_kept(cross_entropy_inputs(12, 67, dtype=torch.float32, device=device, ignored=0))
    inputs["target"][3] = -100
    inputs["kept"] = words_of(torch.where(torch.arange(12, device=device)[:, None] < 6, False, keeps))
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]
    found = mr.linear_log_probs(**inputs, **WITH_ALL)
    assert found.entropy is not None and found.top1 is not None
    empty = torch.tensor([0, 1, 2, 4, 5], device=device)
    assert (found.lse[empty] == -math.inf).all() and (found.log_probs[empty] == -math.inf).all()
    assert not found.entropy[empty].any() and (found.top1[:6] == -1).all()
    assert found.lse[3] == found.log_probs[3] == 0
    gradients = torch.autograd.grad(
        found.log_probs[:6].sum() + found.entropy.sum() + found.lse[:6].sum(), leaves
    )
    assert not gradients[0][:6].any() and gradients[0][6:].any() and gradients[1].isfinite().all()


def test_gradcheck(device: torch.device) -> None:
    place: Any = {"dtype": torch.float64, "device": device}
    x, weight, bias = torch.randn(4, 3, **place), torch.randn(40, 3, **place), torch.randn(40, **place)
    target = torch.tensor([0, 39, -100, 2], device=device)
    keeps = torch.rand(4, 40, device=device) < 0.4
    keeps[[0, 1, 3], [0, 39, 2]] = True
    kept = words_of(keeps)

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        found = mr.linear_log_probs(x, weight, target, bias=bias, entropy=True, softcap=3.0, kept=kept)
        assert found.entropy is not None
        return found.log_probs, found.entropy, found.lse

    assert torch.autograd.gradcheck(call, tuple(t.requires_grad_() for t in (x, weight, bias)))


def test_compiled(device: torch.device) -> None:
    inputs, _ = with_kept(cross_entropy_inputs(33, 70, dtype=torch.float32, device=device))
    compiled = torch.compile(mr.linear_log_probs, fullgraph=True, backend="aot_eager")
    check_operator("linear_log_probs", inputs, {"entropy": True}, function=compiled)


SOME_KEPT = "some classes are kept"
KERNELS: list[tuple[str, dict[str, Any], tuple[str, str], str]] = [
    ("h100", {}, ("sm90", "sm90"), ""),
    ("h100", {"top1": True}, ("sm90", "sm90"), ""),
    ("h100", {"softcap": 30.0}, ("sm90", "simt"), f"{SOME_KEPT}, whose logits have a bias or a softcap"),
    ("h100", {"softcap": 30.0, "top1": True}, ("simt", "simt"), "top1 is of kept classes"),
    ("a100", {}, ("simt", "sm80"), SOME_KEPT),
    ("a100", {"softcap": 30.0}, ("simt", "simt"), SOME_KEPT),
]


@pytest.mark.parametrize("hardware, options, tiers, why", KERNELS)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
def test_kernels(
    bias: bool, hardware: str, options: dict[str, Any], tiers: tuple[str, str], why: str
) -> None:
    """On tensor cores unless tiles lack registers. A bias and a softcap are alike."""
    place: Any = {"device": "meta", "dtype": torch.bfloat16}
    x, weight = torch.empty(512, 64, **place), torch.empty(1000, 64, **place)
    of_tokens: Any = {"device": "meta", "dtype": torch.int64}
    target, kept = torch.empty(512, **of_tokens), torch.empty(512, 32, dtype=torch.int32, device="meta")
    if bias:
        if "softcap" not in options:
            return
        options = {"bias": torch.empty(1000, **place)} | {n: v for n, v in options.items() if n != "softcap"}
    found = mr.explain("linear_log_probs", x, weight, target, kept=kept, **options, hardware=hardware)
    assert (found.forward.split("/")[2], found.backward.split("/")[2]) == tiers
    assert why in " ".join(found.reasons)


WRONG: list[tuple[Any, type[Exception], str]] = [
    (
        torch.zeros(9, 3),
        TypeError,
        "kept: expected a tensor of torch.int32, a bit for each class, got torch.float32",
    ),
    (
        torch.zeros(9, 2).int(),
        ValueError,
        r"kept: expected shape \[..., 3\], a bit for each of 67 classes, got \[..., 2\]",
    ),
    (torch.zeros(8, 3).int(), ValueError, r"kept: expected shape \[9, ceil\(V / 32\)\]"),
    ([1], TypeError, r"kept: expected a tensor, got \[1\] of type list"),
]


@pytest.mark.parametrize("kept, kind, text", WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_arguments(kept: Any, kind: type[Exception], text: str) -> None:
    inputs = cross_entropy_inputs(9, dtype=torch.float32, device=torch.device("cpu"), ignored=0)
    with pytest.raises(kind, match=text):
        mr.linear_log_probs(**inputs, kept=kept)


# Words


@pytest.mark.parametrize("classes", (1, 31, 32, 33, 64, 130))
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, torch.int16), ids=name_of)
def test_packed_classes(classes: int, dtype: torch.dtype, device: torch.device) -> None:
    """With classes that occur more than once, in no order, and padding."""
    indices = torch.randint(-1, classes, (5, 4, 70), device=device)
    indices[0, 0], indices[1, 1] = -1, torch.randint(classes, (70,), device=device)
    keeps = (indices[..., None] == torch.arange(classes, device=device)).any(-2)
    packed = mr.pack_classes(indices.to(dtype), classes)
    assert packed.dtype == torch.int32 and torch.equal(packed, words_of(keeps))
    every = torch.arange(classes, device=device).expand(5, 4, classes)
    rows = packed[..., None, :].expand(5, 4, classes, -1)
    assert torch.equal(has_class(rows, every), keeps)
    assert not has_class(packed, torch.full((5, 4), -1, device=device)).any()


def test_packed_classes_of_no_rows_or_no_indices(device: torch.device) -> None:
    none = torch.zeros(3, 0, dtype=torch.int64, device=device)
    assert torch.equal(mr.pack_classes(none, 40), torch.zeros(3, 2, dtype=torch.int32, device=device))
    assert mr.pack_classes(none.T, 40).shape == (0, 2) and mr.pack_classes(none, 0).shape == (3, 0)


def test_packing_is_deterministic_compiles_and_has_vmap(device: torch.device) -> None:
    indices = torch.randint(-1, 100, (6, 30), device=device)
    torch.use_deterministic_algorithms(True)
    try:
        expected = mr.pack_classes(indices, 100)
    finally:
        torch.use_deterministic_algorithms(False)
    compiled = torch.compile(mr.pack_classes, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(indices, 100), expected)
    assert torch.equal(torch.vmap(lambda of_row: mr.pack_classes(of_row, 100))(indices), expected)


def test_wrong_indices() -> None:
    with pytest.raises(TypeError, match="indices: expected class indices of an integer dtype"):
        mr.pack_classes(torch.zeros(3, 2), 9)
    with pytest.raises(ValueError, match=r"indices: expected shape \[..., K\]"):
        mr.pack_classes(torch.tensor(3), 9)
    with pytest.raises(ValueError, match="classes: expected an int >= 0, got -1"):
        mr.pack_classes(torch.zeros(3, 2).int(), -1)
    for wrong in (9, -2):
        with pytest.raises(IndexError, match=rf"indices: expected classes in \[0, 9\) or -1, got {wrong}"):
            mr.pack_classes(torch.tensor([[0, wrong]]), 9)
