"""Attention over packed sequences whose tokens are split over ranks, held to tolerance.py and one process."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from ranks import Each, VarlenOverRanks, on_ranks, over
from specimens import name_of, starts, varlen_inputs
from tolerance import check_operator, run, upstream_gradient
from virtual_ranks import varlen_over_virtual_ranks

import monoidreduce as mr

CPU: Any = {"device": torch.device("cpu")}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
METHODS = ("ulysses", "all_gather")
LAYOUTS = ("contiguous", "zigzag")
LSE: dict[str, Any] = {"return_lse": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (20, 5)},
    "left": {"window": (9, None)},
    "right": {"window": (None, 3)},
    "narrow": {"causal": True, "window": (2, 0)},
    "softcap": {"causal": True, "softcap": 2.0, "scale": 0.5},
}
# Of queries and of keys; None: the same. Ranks begin and end within sequences, and between two.
LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "one": ((94,), None),
    "many": ((3, 45, 1, 1, 24, 2, 18), None),
    "unequal": ((5, 0, 21, 3, 65), (9, 4, 17, 0, 160)),
    "fewer_keys": ((33, 61), (12, 10)),
}


def inputs_of(lengths: str = "many", **options: Any) -> dict[str, torch.Tensor]:
    """96 tokens of 6 heads; two tokens are in no sequence. Keys are as many, or 24 or 192."""
    heads = {"heads": 6, "kv_heads": 2} | CPU | {"dtype": torch.float32}
    return varlen_inputs(*LENGTHS[lengths], width=8, value_width=12, **heads | options)


def check(inputs: Any, options: Any, ranks: int, layout: str = "contiguous", **split: Any) -> Any:
    over_ranks = VarlenOverRanks(ranks, layout, **split)
    return check_operator("attention_varlen", inputs, LSE | options, function=over_ranks)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("ranks, kv_heads", ((2, 2), (3, 3), (3, 1)))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_causal(method: str, layout: str, ranks: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Three ranks share one key head too."""
    check(inputs_of(kv_heads=kv_heads, dtype=dtype), {"causal": True}, ranks, layout, method=method)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("method, ranks", (("ulysses", 2), ("all_gather", 3)))
def test_options(method: str, ranks: int, lengths: str, options: dict[str, Any]) -> None:
    check(inputs_of(lengths), options, ranks, method=method)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", (1, 5, 16))
def test_virtual_ranks(
    ranks: int, layout: str, options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """The folds of more ranks than there are processes. Parts are uneven."""
    inputs = inputs_of("unequal", dtype=dtype, device=device)
    function = varlen_over_virtual_ranks(ranks, layout)
    check_operator("attention_varlen", inputs, LSE | options, function=function)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_the_values_of_one_process(method: str, options: dict[str, Any]) -> None:
    """In float64. Results have its bits, and so have gradients under ulysses."""
    inputs = inputs_of("unequal", dtype=torch.float64)
    tensors, given = ("q", "k", "v"), LSE | options
    upstream = [upstream_gradient(y) for y in mr.attention_varlen(**inputs, **given)]
    expected, gradients = run(mr.attention_varlen, inputs, given, tensors, upstream)
    over_ranks = VarlenOverRanks(2, "contiguous", method=method)
    found, found_gradients = run(over_ranks, inputs, given, tensors, upstream)
    assert all(map(torch.equal, found, expected))
    for name in tensors:
        assert method == "all_gather" or torch.equal(found_gradients[name], gradients[name])
        torch.testing.assert_close(found_gradients[name], gradients[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", ((30, 11), (4, 1, 2), (3,), (1,), (0,), ()), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method, heads", (("ulysses", 6), ("all_gather", 4)))
def test_uneven_and_empty_parts(method: str, heads: int, layout: str, lengths: tuple[int, ...]) -> None:
    """all_gather of heads that three ranks do not share."""
    inputs = varlen_inputs(lengths, None, heads, heads // 2, 8, 12, 0, dtype=torch.float32, **CPU)
    check(inputs, {"causal": True}, 3, layout, uneven=True, method=method)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("compensated", (False, True), ids=("plain", "compensated"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_sinks(method: str, layout: str, compensated: bool, dtype: torch.dtype) -> None:
    """Of all heads on every rank. Their gradient is the same on all ranks."""
    inputs = inputs_of(dtype=dtype) | {"sinks": 2 * torch.randn(6).to(dtype)}
    options = {"causal": True, "compensated": compensated}
    found = check(inputs, options, 2, layout, method=method)
    assert not found["out0"][-2:].any()
    assert torch.equal(found["out1"][:, -1], inputs["sinks"].float())


@pytest.mark.parametrize("grad_dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_partial_gradients_in_16_bits(method: str, grad_dtype: Any) -> None:
    """All ranks share a key head."""
    inputs = inputs_of(kv_heads=1, dtype=torch.bfloat16)
    check(inputs, {"causal": True}, 3, "zigzag", method=method, grad_dtype=grad_dtype)


@pytest.mark.parametrize("upstream", ("out", "lse"))
@pytest.mark.parametrize("differentiate", (("q",), ("k",), ("v",)), ids="+".join)
@pytest.mark.parametrize("method", METHODS)
def test_some_gradients(method: str, differentiate: tuple[str, ...], upstream: str) -> None:
    grads = [torch.randn(96, 6, 12), None] if upstream == "out" else [None, torch.randn(6, 96)]
    wanted: Any = {"upstream": grads, "differentiate": differentiate}
    over_ranks = VarlenOverRanks(2, "contiguous", method=method)
    check_operator("attention_varlen", inputs_of(), LSE, function=over_ranks, **wanted)


def test_without_lse() -> None:
    for method in METHODS:
        over_ranks = VarlenOverRanks(2, "contiguous", method=method)
        check_operator("attention_varlen", inputs_of(), {"causal": True}, function=over_ranks)


def _good() -> dict[str, Any]:
    """Of rank 0 or 1, which have 6 tokens each."""
    q, k, v = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": starts([5, 4, 3], torch.device("cpu"))}


def _collectives(group: Any, tensors: dict[str, Any]) -> list[int]:
    """How many a second step takes, forward and backward."""
    from torch.distributed.tensor.debug import CommDebugMode

    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}
    mr.attention_varlen(**leaves, ranks=group).sum().backward()
    with CommDebugMode() as forward:
        out = mr.attention_varlen(**leaves, ranks=group)
    with CommDebugMode() as backward:
        out.sum().backward()
    return [forward.get_total_counts(), backward.get_total_counts()]


@pytest.mark.parametrize("ranks, expected", ((2, [4, 4]), (3, [2, 4])))
def test_auto_is_ulysses_where_ranks_share_heads_evenly(ranks: int, expected: list[int]) -> None:
    """Starts of sequences are not sent."""
    assert on_ranks(ranks, _collectives, _good()) == [expected] * ranks


def _call(group: Any, tensors: dict[str, Any], options: dict[str, Any]) -> tuple[str, str, float]:
    """The error of a call whose arguments are compared, and how long it took."""
    start = time.monotonic()
    os.environ["MONOIDREDUCE_DEBUG"] = "1"
    try:
        mr.attention_varlen(**tensors, **over(group, options))
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        del os.environ["MONOIDREDUCE_DEBUG"]
    return "", "", 0.0


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another width": ({"k": torch.randn(6, 2, 9)}, {}, "k: expected shape [S, Hkv, F=8]"),
    "fewer keys": ({k: torch.randn(4, 2, 8) for k in "kv"}, {}, "keys: expected 12 as on rank 0, got 8"),
    "fewer queries": ({"q": torch.randn(4, 4, 8)}, {}, "queries: expected 12 as on rank 0, got 8"),
    "another dtype": (
        {k: torch.randn(6, 4, 8).double() for k in "qkv"},
        {},
        "q: expected torch.float32 [..., 4, 8] as on rank 0, got torch.float64 [..., 4, 8]",
    ),
    "its own lengths": (
        {"cu_seqlens_q": torch.tensor([0, 3, 6], dtype=torch.int32)},
        {},
        "cu_seqlens_q: expected torch.int32 [4] up to 12",
    ),
    "other lengths": (
        {"cu_seqlens_q": torch.tensor([0, 4, 9, 12], dtype=torch.int32)},
        {},
        "cu_seqlens_q: expected torch.int32 [4] up to 12",
    ),
    "other lengths of keys": (
        {"cu_seqlens_k": torch.tensor([0, 4, 9, 12], dtype=torch.int32)},
        {},
        "cu_seqlens_k: expected torch.int32 [4] up to 12",
    ),
    "lengths as a list": ({"cu_seqlens_q": [0, 12]}, {}, "cu_seqlens_q: expected a tensor"),
    "another mask": ({}, {"causal": True}, "window (causal is one that ends at 0): expected (-1, -1)"),
    "another layout": (
        {},
        {"layout": "zigzag"},
        "ranks.layout: expected contiguous as on rank 0, got zigzag",
    ),
    "another method": ({}, {"method": "ulysses"}, "ranks.method: expected auto as on rank 0, got ulysses"),
    "another result": ({}, {"return_lse": True}, "return_lse: expected False as on rank 0, got True"),
    "another sum": ({}, {"grad_dtype": torch.float32}, "ranks.grad_dtype: expected None as on rank 0"),
    "compensated": ({}, {"compensated": 1}, "compensated: expected"),
    "sinks": ({"sinks": torch.randn(4)}, {}, "sinks: expected None as on rank 0, got torch.float32"),
    "sinks of other heads": ({"sinks": torch.randn(3)}, {}, "sinks: expected shape [H"),
    "a gradient": ({"q": torch.randn(6, 4, 8, requires_grad=True)}, {}, "q.requires_grad: expected False"),
    "a wrong option": ({}, {"softcap": -1.0}, "softcap: expected a finite number > 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_all_ranks_raise_where_one_is_wrong(name: str) -> None:
    changed, options, expected = WRONG[name]
    found = on_ranks(2, _call, Each([_good(), _good() | changed]), Each([{}, options]))
    assert len({kind for kind, _, _ in found}) == 1 and found[0][0] in ("TypeError", "ValueError")
    assert found[0][1].startswith(f"rank 1: {expected}")
    assert all(expected in text and seconds < 5 for _, text, seconds in found)


@pytest.mark.parametrize(
    "given, expected",
    (
        (
            {"ranks": 3},
            "ranks: expected a monoidreduce.Ranks, a ProcessGroup or a one-dimensional DeviceMesh",
        ),
        ({"method": "ring"}, "ranks.method: expected one of auto, ulysses, all_gather, got 'ring'"),
        ({"layout": "striped"}, "ranks.layout: expected one of contiguous, zigzag, got 'striped'"),
        ({"grad_dtype": torch.int64}, "ranks.grad_dtype: expected None, float64"),
        (
            {"length": 20},
            "q: expected 10 positions on rank 0 of 2, for length=20, layout='contiguous', got 6",
        ),
    ),
)
def test_wrong_options(given: dict[str, Any], expected: str) -> None:
    found = on_ranks(2, _call, _good(), given)
    assert found[0][1].startswith(expected)


@pytest.mark.parametrize("values", ([0, 9, 5], [0, 5, 13], [1, 5, 9]), ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_starts_that_are_not_ascending(method: str, values: list[int]) -> None:
    """All ranks raise what one device does, with the tokens of all ranks."""
    tensors = _good() | {"cu_seqlens_q": torch.tensor(values)}
    for kind, text, _ in on_ranks(2, _call, tensors, {"method": method}):
        assert kind == "ValueError"
        assert text.startswith("cu_seqlens_q: expected ascending numbers from 0 to at most T=12, got")


def test_heads_that_ranks_cannot_share() -> None:
    for _, text, _ in on_ranks(3, _call, _good(), {"method": "ulysses"}):
        assert "expected auto or all_gather where 3 ranks cannot share 4 heads evenly, of 2 key heads" in text


@pytest.mark.parametrize(
    "given",
    ({"method": "ulysses"}, {"layout": "zigzag"}, {"length": 6}, {"grad_dtype": torch.float32}),
)
def test_options_of_ranks_are_no_keywords(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(TypeError, match=rf"argument '{name}'; write ranks=mr\.Ranks\(group, {name}=\.\.\.\)"):
        mr.attention_varlen(**_good() | {"cu_seqlens_q": torch.tensor([0, 6])}, **given)


def _differentiated_twice(group: Any, method: str, tensors: dict[str, Any]) -> str:
    q = tensors["q"].requires_grad_()
    out = mr.attention_varlen(**tensors | {"q": q}, ranks=mr.Ranks(group, method=method))
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("method", METHODS)
def test_a_second_derivative_is_refused(method: str) -> None:
    assert all("differentiated once" in text for text in on_ranks(2, _differentiated_twice, method, _good()))


def _changed_starts(group: Any, method: str, tensors: dict[str, Any]) -> str:
    q = tensors["q"].requires_grad_()
    out = mr.attention_varlen(**tensors | {"q": q}, ranks=mr.Ranks(group, method=method))
    tensors["cu_seqlens_q"][1] = 4
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("method", METHODS)
def test_starts_that_change_before_the_backward_pass(method: str) -> None:
    for text in on_ranks(2, _changed_starts, method, _good()):
        assert "modified by an inplace operation" in text


def _compiled(group: Any, tensors: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    def attend(**tensors: Any) -> Any:
        return mr.attention_varlen(**tensors, causal=True, ranks=group) * 2

    return attend(**tensors), torch.compile(attend, backend="eager")(**tensors)


@pytest.mark.release
def test_under_torch_compile() -> None:
    """Which breaks the graph at the call."""
    for eager, compiled in on_ranks(2, _compiled, _good()):
        assert torch.equal(eager, compiled)
