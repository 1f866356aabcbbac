"""Attention over packed sequences against attention of each, by the rule of tolerance.py; and its spans."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from specimens import DTYPES, LAYOUTS, Inputs, name_of, starts, varlen_inputs
from tolerance import check_operator
from torch import Tensor

import monoidreduce as mr
from monoidreduce._ops.attention_mask import packed_mask

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (9, 3)},
    "left_window": {"window": (4, None), "causal": True},
    "softcap": {"softcap": 2.0, "scale": 0.5, "causal": True},
}
# Of queries and of keys; None: the same.
LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "one": ((40,), None),
    "many": ((3, 70, 1, 1, 64, 2, 131), None),
    "unequal": ((5, 0, 21, 3, 90), (9, 4, 17, 0, 200)),
    "fewer_keys": ((33, 80), (12, 5)),
    "none": ((), ()),
    "empty": ((0, 0, 6, 0), (0, 3, 6, 0)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths_and_options(
    lengths: tuple[tuple[int, ...], tuple[int, ...] | None],
    options: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    inputs = varlen_inputs(*lengths, dtype=dtype, device=device)
    check_operator("attention_varlen", inputs, {"return_lse": True, **options})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_accuracy(dtype: torch.dtype, device: torch.device) -> None:
    """With so many rows that the whole rule holds."""
    inputs = varlen_inputs(
        (100, 260, 31, 200), width=64, value_width=64, keys=None, dtype=dtype, device=device
    )
    check_operator("attention_varlen", inputs, {"return_lse": True, "causal": True})


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("compensated", (False, True), ids=("plain", "compensated"))
def test_sinks(compensated: bool, dtype: torch.dtype, device: torch.device) -> None:
    """A query without keys has its sink alone, also one of no sequence."""
    inputs = varlen_inputs((5, 3, 60), (9, 0, 70), heads=96, kv_heads=48, dtype=dtype, device=device)
    inputs["sinks"] = torch.randn(96, device=device).to(dtype)
    found = check_operator("attention_varlen", inputs, {"return_lse": True, "compensated": compensated})
    of_none = [5, 6, 7, 68, 69]
    assert not found["out0"][of_none].any()
    assert torch.equal(found["out1"][:, of_none], inputs["sinks"].float()[:, None].expand(96, 5))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout: Any, device: torch.device) -> None:
    inputs = {n: layout(t) for n, t in varlen_inputs(dtype=torch.float32, device=device).items()}
    check_operator("attention_varlen", inputs, {"causal": True, "return_lse": True})


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=name_of)
def test_one_sequence_is_attention(dtype: torch.dtype, device: torch.device) -> None:
    inputs = varlen_inputs((77,), behind=0, keys=None, dtype=torch.float32, device=device)
    q, k, v, _ = inputs.values()
    got = mr.attention_varlen(q, k, v, starts([77], device, dtype), causal=True, return_lse=True)
    dense = mr.attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), causal=True, return_lse=True)
    torch.testing.assert_close(got, (dense[0][0].transpose(0, 1), dense[1][0]))


def test_gradcheck(device: torch.device) -> None:
    inputs = varlen_inputs((3, 0, 2), (4, 1, 3), 2, 1, 3, 2, 0, dtype=torch.float64, device=device)
    *tensors, cu_q, cu_k = inputs.values()
    tensors = [t.requires_grad_() for t in tensors]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return mr.attention_varlen(q, k, v, cu_q, cu_k, window=(2, 1), return_lse=True)

    assert torch.autograd.gradcheck(call, tensors)


def _dense(lengths: tuple[list[int], list[int]], behind: int, left: int, right: int) -> Tensor:
    """Which keys each query sees, [T, S]."""
    of = [torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n, dtype=torch.int64)) for n in lengths]
    seen = of[0][:, None] == of[1]
    for s, (queries, keys) in enumerate(zip(*lengths, strict=True)):
        distance = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
        band = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            band &= distance >= -left
        if right >= 0:
            band &= distance <= right
        rows, columns = ((o == s).nonzero()[:, 0] for o in of)
        seen[rows[:, None], columns] &= band
    return torch.nn.functional.pad(seen, (0, behind, 0, behind))


@pytest.mark.parametrize("trial", range(30))
def test_spans(trial: int, device: torch.device) -> None:
    """Spans say what a mask of all pairs says. Neither begins nor ends decrease."""
    count, behind = int(torch.randint(0, 9, ())), int(torch.randint(0, 4, ()))
    lengths: Any = [torch.randint(0, 12, (count,)).tolist() for _ in range(2)]
    left, right = (int(torch.randint(-1, 6, ())) for _ in range(2))
    q, k = (torch.empty(1, 1, sum(n) + behind, 1, device=device) for n in lengths)
    mask = packed_mask(q, k, *(starts(n, device) for n in lengths), (left, right))
    spans = (mask.row_spans, mask.column_spans)
    dense = _dense(lengths, behind, left, right)
    for span, seen in zip(spans, (dense, dense.T), strict=True):
        begin, end = span.cpu().T
        at = torch.arange(seen.shape[1])
        assert torch.equal((begin[:, None] <= at) & (at < end[:, None]), seen)
        assert bool((begin <= end).all()) and bool((span.cpu().diff(dim=0) >= 0).all())
        assert not len(end) or int(end.max()) <= seen.shape[1]


@pytest.mark.parametrize("values", ([1, 5, 9], [0, 7, 5], [0, 5, 12], [-1, 0, 3], [0, 2**40, 9]), ids=str)
@pytest.mark.parametrize("name", ("cu_seqlens_q", "cu_seqlens_k"))
def test_starts_that_are_not_ascending(name: str, values: list[int], device: torch.device) -> None:
    """An error on the CPU; on a GPU, where nobody reads them in time, NaN."""
    inputs = varlen_inputs((4, 6), (5, 6), behind=0, dtype=torch.float32, device=device)
    inputs[name] = torch.tensor(values, device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=rf"{name}: expected ascending numbers from 0 to at most"):
            mr.attention_varlen(**inputs)
        return
    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
    out, lse = mr.attention_varlen(**leaves, return_lse=True)
    gradients = torch.autograd.grad(out.sum() + lse.sum(), [leaves[n] for n in "qkv"])
    for t in (out, lse, *gradients):
        assert bool(t.isnan().all())


def _wrong(inputs: Inputs) -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    q, k, starts = inputs["q"], inputs["k"], inputs["cu_seqlens_q"]
    return {
        "q": ({"q": q[None]}, ValueError, r"q: expected shape \[T, H, F\]"),
        "k": ({"k": k[..., :3]}, ValueError, r"k: expected shape \[S, Hkv, F=17\]"),
        "heads": (
            {"k": k[:, :1].expand(-1, 3, -1)},
            ValueError,
            "k: expected a number of heads that divides",
        ),
        "floating": ({"cu_seqlens_q": starts.float()}, TypeError, "cu_seqlens_q: expected int32 or int64"),
        "list": ({"cu_seqlens_k": [0, 3]}, TypeError, "cu_seqlens_k: expected a tensor"),
        "axes": ({"cu_seqlens_q": starts[None]}, ValueError, r"cu_seqlens_q: expected shape"),
        "count": ({"cu_seqlens_k": starts[1:]}, ValueError, r"cu_seqlens_k: expected shape"),
        "no_start": ({"cu_seqlens_q": starts[:0], "cu_seqlens_k": None}, ValueError, "at least one"),
        "keyword": ({"max_seqlen_q": 5}, TypeError, "max_seqlen_q"),
        "bias": ({"bias": q}, TypeError, "bias"),
    }


@pytest.mark.parametrize("case", _wrong(varlen_inputs(dtype=torch.float32, device=torch.device("cpu"))))
def test_errors(case: str, device: torch.device) -> None:
    inputs = varlen_inputs(dtype=torch.float32, device=device)
    changes, error, message = _wrong(inputs)[case]
    with pytest.raises(error, match=message):
        mr.attention_varlen(**(inputs | changes))


def test_nothing_leaks_between_sequences(device: torch.device) -> None:
    """NaN and infinity in one of them, and behind the last, are not seen in the others."""
    inputs = varlen_inputs((30, 40, 50), keys=None, behind=8, dtype=torch.float32, device=device)
    clean = mr.attention_varlen(**inputs, causal=True)
    for name, value in (("q", math.nan), ("k", math.inf), ("v", math.nan)):
        inputs[name] = inputs[name].clone()
        inputs[name][30:70] = value
        inputs[name][120:] = value
    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
    out = mr.attention_varlen(**leaves, causal=True)
    gradients = torch.autograd.grad(out.nan_to_num().sum(), [leaves[n] for n in "qkv"])
    others = [*range(30), *range(70, 120)]
    assert torch.equal(out[others], clean[others])
    assert not out[120:].any()
    for gradient in gradients:
        assert bool(gradient[others].isfinite().all()) and not gradient[120:].any()


def test_export_for_any_number_of_sequences(device: torch.device) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, starts: Tensor) -> Tensor:
            return mr.attention_varlen(q, q, q, starts, causal=True)

    q = torch.randn(24, 2, 8, device=device)
    dynamic = {"q": None, "starts": {0: torch.export.Dim("n", min=2)}}
    exported = torch.export.export(
        Layer(), (q, starts((5, 19), device)), dynamic_shapes=dynamic, strict=False
    ).module()
    for lengths in ((24,), (3, 0, 11, 10)):
        given = starts(lengths, device)
        torch.testing.assert_close(exported(q, given), Layer()(q, given))
