"""Attention with its sequence split over ranks, held to tolerance.py and to the bits of one device."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from ranks import AttentionOverRanks, Each, on_ranks, over
from specimens import attention_inputs, name_of
from tolerance import check_operator, run, upstream_gradient

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


def inputs_of(
    m: int, n: int, *, heads: int = 4, key_heads: int = 2, **options: Any
) -> dict[str, torch.Tensor]:
    options = {"dtype": torch.float32} | options
    return attention_inputs(1, heads, key_heads, m, n, 8, 12, **CPU, **options)


def check(inputs: Any, options: Any, ranks: int, layout: str, check: Any = None, **split: Any) -> Any:
    over_ranks = AttentionOverRanks(ranks, layout, **split)
    return check_operator("attention", inputs, LSE | options, function=over_ranks, **check or {})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_causal(method: str, layout: str, ranks: int, dtype: torch.dtype) -> None:
    """Four ranks share two key heads."""
    check(inputs_of(192, 192, dtype=dtype), {"causal": True}, ranks, layout, method=method)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", ((96, 96), (24, 192), (192, 24)), ids=str)
def test_options(sizes: tuple[int, int], layout: str, options: dict[str, Any]) -> None:
    """Of all_gather, which cuts keys to those that a rank's queries see. Of many queries some see none."""
    check(inputs_of(*sizes), options, 3, layout, method="all_gather")


BIASES: dict[str, dict[str, Any]] = {
    "full": {"bias": (1, 4, 48, 96)},
    "float32": {"bias": (4, 48, 96), "bias_dtype": torch.float32, "dtype": torch.bfloat16},
    "of_heads": {"bias": (4, 1, 96)},
    "of_queries_and_keys": {"bias": (48, 96)},
    "of_keys": {"bias": (96,)},
    "of_queries": {"bias": (1, 4, 48, 1)},
    "of_all": {"bias": ()},
    "keep": {"keep": (1, 1, 1, 96)},
    "keep_of_heads": {"keep": (4, 48, 96)},
}


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_a_bias_of_the_whole_sequence(method: str, layout: str, kind: str) -> None:
    """Its gradient is the same on all ranks."""
    inputs = inputs_of(48, 96, **{"dtype": torch.float32} | BIASES[kind])
    check(inputs, {"window": (30, 20)}, 2, layout, method=method)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_sinks(method: str, layout: str, dtype: torch.dtype) -> None:
    """Of all heads on every rank. Their gradient is the same on all ranks."""
    inputs = inputs_of(48, 96, dtype=dtype, bias=(1, 4, 48, 1)) | {"sinks": 2 * torch.randn(4).to(dtype)}
    check(inputs, {"causal": True}, 2, layout, method=method)


@pytest.mark.parametrize("length", (41, 7, 3, 1, 0))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_uneven_and_empty_parts(method: str, layout: str, length: int) -> None:
    check(inputs_of(length, length), {"causal": True}, 4, layout, uneven=True, method=method)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("grad_dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_partial_gradients_in_16_bits(method: str, grad_dtype: Any, dtype: torch.dtype) -> None:
    """All ranks share a key head. float32 is not held to its rule where gradients are sent in 16 bits."""
    inputs = inputs_of(192, 192, key_heads=1, dtype=dtype)
    if dtype == torch.bfloat16 or grad_dtype is None:
        check(inputs, {"causal": True}, 4, "zigzag", method=method, grad_dtype=grad_dtype)
        return
    upstream = [upstream_gradient(inputs["q"].new_empty(1, 4, 192, 12))]
    found = []
    for sent in (None, grad_dtype):
        over_ranks = AttentionOverRanks(4, "zigzag", method=method, grad_dtype=sent)
        found.append(run(over_ranks, inputs, {}, tuple(inputs), upstream)[1])
    exact, rounded = found
    assert torch.equal(exact["q"], rounded["q"])
    for name in ("k", "v"):
        error = (exact[name] - rounded[name]).norm() / exact[name].norm()
        assert 1e-4 < error < 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_the_bits_of_one_device(method: str, layout: str, dtype: torch.dtype) -> None:
    """ulysses: of results and gradients. all_gather: of results, where a window cuts no keys on the left."""
    inputs = inputs_of(100, 100, dtype=dtype)
    options = LSE | {"causal": True, "window": (40, 0) if method == "ulysses" else None}
    outputs = mr.attention(**inputs, **options)
    upstream = [upstream_gradient(y) for y in outputs]
    expected, gradients = run(mr.attention, inputs, options, tuple(inputs), upstream)
    over_ranks = AttentionOverRanks(2, layout, method=method)
    found, found_gradients = run(over_ranks, inputs, options, tuple(inputs), upstream)
    assert all(map(torch.equal, found, expected))
    if method == "ulysses":
        assert all(torch.equal(found_gradients[name], gradients[name]) for name in inputs)


@pytest.mark.parametrize("upstream", ("out", "lse"))
@pytest.mark.parametrize("differentiate", (("q",), ("k",), ("v", "bias")), ids="+".join)
@pytest.mark.parametrize("method", METHODS)
def test_some_gradients(method: str, differentiate: tuple[str, ...], upstream: str) -> None:
    inputs = inputs_of(96, 96, bias=(4, 96, 96))
    grads = [torch.randn(1, 4, 96, 12), None] if upstream == "out" else [None, torch.randn(1, 4, 96)]
    wanted = {"upstream": grads, "differentiate": differentiate}
    check(inputs, {}, 2, "contiguous", wanted, method=method)


def test_without_lse() -> None:
    for method in METHODS:
        over_ranks = AttentionOverRanks(2, "zigzag", method=method)
        check_operator("attention", inputs_of(96, 96), {"causal": True}, function=over_ranks)


def _autocast(group: Any, method: str, tensors: dict[str, Any]) -> list[Any]:
    bias = torch.randn(1, 1, 12, 1)
    with torch.autocast("cpu", torch.bfloat16):
        return list(mr.attention(**tensors, bias=bias, return_lse=True, ranks=mr.Ranks(group, method=method)))


@pytest.mark.parametrize("method", METHODS)
def test_under_autocast(method: str) -> None:
    for out, lse in on_ranks(2, _autocast, method, _good()):
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32


def _collectives(group: Any, heads: int, key_heads: int) -> list[int]:
    """How many a second step takes, forward and backward."""
    from torch.distributed.tensor.debug import CommDebugMode

    q, k, v = (torch.randn(1, n, 4, 8, requires_grad=True) for n in (heads, key_heads, key_heads))
    mr.attention(q, k, v, ranks=group).sum().backward()
    with CommDebugMode() as forward:
        out = mr.attention(q, k, v, ranks=group)
    with CommDebugMode() as backward:
        out.sum().backward()
    return [forward.get_total_counts(), backward.get_total_counts()]


@pytest.mark.parametrize(
    "heads, key_heads, ranks, expected",
    ((4, 2, 2, [4, 4]), (4, 1, 4, [4, 4]), (4, 2, 3, [2, 4]), (6, 3, 2, [2, 4])),
)
def test_auto_is_ulysses_where_ranks_share_heads_evenly(
    heads: int, key_heads: int, ranks: int, expected: list[int]
) -> None:
    """Which exchanges q, k, v and out, and their gradients. all_gather gathers k and v, and sums theirs."""
    assert on_ranks(ranks, _collectives, heads, key_heads) == [expected] * ranks


def _call(group: Any, tensors: dict[str, Any], options: dict[str, Any]) -> tuple[str, str, float]:
    """The error of a call whose arguments are compared, and how long it took."""
    start = time.monotonic()
    os.environ["MONOIDREDUCE_DEBUG"] = "1"
    try:
        mr.attention(**tensors, **over(group, options))
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        del os.environ["MONOIDREDUCE_DEBUG"]
    return "", "", 0.0


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another width": ({"k": torch.randn(1, 2, 6, 9)}, {}, "k: expected shape [B=1, Hkv, N, F=8]"),
    "fewer keys": ({k: torch.randn(1, 2, 4, 8) for k in "kv"}, {}, "keys: expected 12 as on rank 0, got 8"),
    "fewer queries": ({"q": torch.randn(1, 4, 4, 8)}, {}, "queries: expected 12 as on rank 0, got 8"),
    "another dtype": ({k: torch.randn(1, 4, 6, 8).double() for k in "qkv"}, {}, "q: expected torch.float32"),
    "another scale": ({}, {"scale": 0.5}, "scale: expected None as on rank 0, got 0.5"),
    "another mask": ({}, {"causal": True}, "window (causal is one that ends at 0): expected (-1, -1)"),
    "another layout": ({}, {"layout": "zigzag"}, "ranks.layout: expected contiguous as on rank 0"),
    "another method": ({}, {"method": "ulysses"}, "ranks.method: expected auto as on rank 0, got ulysses"),
    "another result": ({}, {"return_lse": True}, "return_lse: expected False as on rank 0, got True"),
    "another sum": ({}, {"grad_dtype": torch.float32}, "ranks.grad_dtype: expected None as on rank 0"),
    "a bias": ({"bias": torch.randn(12, 12)}, {}, "bias: expected None as on rank 0, got torch.float32"),
    "a bias of a part": ({"bias": torch.randn(6, 12)}, {}, "bias: expected a shape broadcastable to"),
    "sinks": ({"sinks": torch.randn(4)}, {}, "sinks: expected None as on rank 0, got torch.float32"),
    "sinks of other heads": ({"sinks": torch.randn(3)}, {}, "sinks: expected shape [H"),
    "a gradient": ({"q": torch.randn(1, 4, 6, 8, requires_grad=True)}, {}, "q.requires_grad: expected False"),
    "a wrong option": ({}, {"softcap": -1.0}, "softcap: expected a finite number > 0"),
}  # fmt: skip


def _good() -> dict[str, Any]:
    return {"q": torch.randn(1, 4, 6, 8), "k": torch.randn(1, 2, 6, 8), "v": torch.randn(1, 2, 6, 8)}


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
        ({"length": 1.5}, "ranks.length: expected None or an int >= 0, got 1.5"),
    ),
)
def test_wrong_options(given: dict[str, Any], expected: str) -> None:
    found = on_ranks(2, _call, _good(), given)
    assert found[0][1].startswith(expected)


def test_what_the_layout_and_the_method_ask_for() -> None:
    odd = {name: t[:, :, :5] for name, t in _good().items()}
    for _, text, _ in on_ranks(2, _call, odd, {"layout": "zigzag"}):
        assert "q: expected an even number of positions, or length, for layout='zigzag', got 5" in text
    for _, text, _ in on_ranks(3, _call, _good(), {"method": "ulysses"}):
        assert "expected auto or all_gather where 3 ranks cannot share 4 heads evenly, of 2 key heads" in text


@pytest.mark.parametrize(
    "given",
    ({"method": "ulysses"}, {"layout": "zigzag"}, {"length": 6}, {"grad_dtype": torch.float32}),
)
def test_options_of_ranks_are_no_keywords(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(TypeError, match=rf"argument '{name}'; write ranks=mr\.Ranks\(group, {name}=\.\.\.\)"):
        mr.attention(**_good(), **given)


def test_functions_of_scores_with_a_group() -> None:
    with pytest.raises(ValueError, match="mask_mod: expected None beside ranks"):
        mr.attention(**_good(), mask_mod=lambda b, h, q, k: k <= q, ranks=3)


def _twice(group: Any, method: str, tensors: dict[str, Any]) -> bool:
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
            out = mr.attention(**leaves, causal=True, ranks=mr.Ranks(group, method=method))
            runs.append((out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))))
        return all(map(torch.equal, *runs))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("method", METHODS)
def test_every_run_has_the_same_bits(method: str) -> None:
    assert all(on_ranks(2, _twice, method, _good()))


def _differentiated_twice(group: Any, method: str, tensors: dict[str, Any]) -> str:
    q = tensors["q"].requires_grad_()
    out = mr.attention(**tensors | {"q": q}, ranks=mr.Ranks(group, method=method))
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("method", METHODS)
def test_a_second_derivative_is_refused(method: str) -> None:
    assert all("differentiated once" in text for text in on_ranks(2, _differentiated_twice, method, _good()))


def _compiled(group: Any, tensors: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    def attend(**tensors: Any) -> Any:
        return mr.attention(**tensors, causal=True, ranks=group) * 2

    return attend(**tensors), torch.compile(attend, backend="eager")(**tensors)


@pytest.mark.release
def test_under_torch_compile() -> None:
    """Which breaks the graph at the call."""
    for eager, compiled in on_ranks(2, _compiled, _good()):
        assert torch.equal(eager, compiled)
