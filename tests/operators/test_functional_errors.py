"""Every wrong argument raises before any work, with its name, what was expected and what was given."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import monoidreduce as mr

Arguments = dict[str, Any]


def attention() -> Arguments:
    return {"q": torch.randn(2, 4, 5, 8), "k": torch.randn(2, 2, 7, 8), "v": torch.randn(2, 2, 7, 6)}


def merge_attention() -> Arguments:
    return {
        "out_a": torch.randn(2, 5, 6),
        "lse_a": torch.randn(2, 5),
        "out_b": torch.randn(2, 5, 6),
        "lse_b": torch.randn(2, 5),
    }


def linear_cross_entropy() -> Arguments:
    return {
        "x": torch.randn(2, 5, 8),
        "weight": torch.randn(11, 8),
        "target": torch.randint(0, 11, (2, 5)),
        "bias": torch.randn(11),
    }


def linear_distillation() -> Arguments:
    return {
        "x": torch.randn(2, 5, 8),
        "weight": torch.randn(11, 8),
        "teacher_x": torch.randn(2, 5, 6),
        "teacher_weight": torch.randn(11, 6),
        "mask": torch.rand(2, 5) < 0.5,
    }


def mlp() -> Arguments:
    return {
        "x": torch.randn(2, 5, 8),
        "w1": torch.randn(16, 8),
        "w2": torch.randn(6, 16),
        "bias1": torch.randn(16),
        "bias2": torch.randn(6),
    }


def logsumexp_matmul() -> Arguments:
    return {"a": torch.randn(2, 5, 8), "b": torch.randn(11, 8)}


CALLS: dict[str, Callable[[], Arguments]] = {
    make.__name__: make
    for make in (attention, merge_attention, linear_cross_entropy, linear_distillation, mlp, logsumexp_matmul)
}
# Floating tensors that share one dtype and device with the first of their call.
OPERANDS = {
    "attention": ("q", "k", "v"),
    "merge_attention": ("out_a", "lse_a", "out_b", "lse_b"),
    "linear_cross_entropy": ("x", "weight", "bias"),
    "linear_distillation": ("x", "weight", "teacher_x", "teacher_weight"),
    "mlp": ("x", "w1", "w2", "bias1", "bias2"),
    "logsumexp_matmul": ("a", "b"),
}
EVERY_OPERAND = [(operator, name) for operator, names in OPERANDS.items() for name in names]
EVERY_OTHER_OPERAND = [(operator, name) for operator, names in OPERANDS.items() for name in names[1:]]
EVERY_TENSOR = [(operator, name) for operator, make in CALLS.items() for name in make()]


def call(operator: str, **changes: Any) -> Any:
    return getattr(mr, operator)(**{**CALLS[operator](), **changes})


def assert_raises(
    error: type[Exception], argument: str, expected: str, got: str, operator: str, **changes: Any
) -> None:
    """The message is "argument: expected ..., got ...", and nothing ran."""
    before = mr._C.path_counts()
    with pytest.raises(error) as raised:
        call(operator, **changes)
    pattern = rf"{argument}: expected .*{re.escape(expected)}.*, got .*{re.escape(got)}.*"
    assert re.fullmatch(pattern, str(raised.value), re.DOTALL), str(raised.value)
    assert mr._C.path_counts() == before


@pytest.mark.parametrize("operator", CALLS)
def test_the_calls_that_are_made_wrong_below_are_right(operator: str) -> None:
    call(operator)


# Kinds, dtypes, devices


@pytest.mark.parametrize(("operator", "name"), EVERY_TENSOR)
@pytest.mark.parametrize("value", [3.5, [[1.0]], "x"], ids=["number", "list", "text"])
def test_not_a_tensor(operator: str, name: str, value: Any) -> None:
    assert_raises(TypeError, name, "a tensor", repr(value), operator, **{name: value})


@pytest.mark.parametrize(
    ("operator", "name"), [case for case in EVERY_TENSOR if case[1] not in ("bias", "bias1", "bias2", "mask")]
)
def test_a_missing_tensor(operator: str, name: str) -> None:
    assert_raises(TypeError, name, "a tensor", "None", operator, **{name: None})


@pytest.mark.parametrize(("operator", "name"), EVERY_OPERAND)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_without_kernels(operator: str, name: str, dtype: torch.dtype) -> None:
    wrong = CALLS[operator]()[name].to(dtype)
    assert_raises(
        TypeError, name, "float64, float32, bfloat16 or float16", str(dtype), operator, **{name: wrong}
    )


@pytest.mark.parametrize(("operator", "name"), EVERY_OTHER_OPERAND)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_mixed_dtypes(operator: str, name: str, dtype: torch.dtype) -> None:
    wrong = CALLS[operator]()[name].to(dtype)
    assert_raises(TypeError, name, "torch.float32", str(dtype), operator, **{name: wrong})


@pytest.mark.parametrize(
    ("operator", "name"),
    [case for case in EVERY_TENSOR if case not in [(o, n[0]) for o, n in OPERANDS.items()]],
)
def test_mixed_devices(operator: str, name: str) -> None:
    assert_raises(
        ValueError, name, "a tensor on cpu", "meta", operator, **{name: CALLS[operator]()[name].to("meta")}
    )


@pytest.mark.parametrize(("operator", "name"), EVERY_TENSOR)
def test_sparse_layouts(operator: str, name: str) -> None:
    sparse = CALLS[operator]()[name].to_sparse()
    assert_raises(TypeError, name, "a dense (strided) tensor", "torch.sparse_coo", operator, **{name: sparse})


def test_half_statistics_have_float32_log_sum_exps() -> None:
    half = {name: t.bfloat16() for name, t in merge_attention().items()}
    assert_raises(
        TypeError,
        "lse_a",
        "torch.float32 as out_a is torch.bfloat16",
        "torch.bfloat16",
        "merge_attention",
        **half,
    )


# Shapes: (operator, argument, its wrong shape, what the message expects)

SHAPES: list[tuple[str, str, tuple[int, ...], str]] = [
    ("attention", "q", (4, 5, 8), "shape [B, H, M, F]"),
    ("attention", "q", (1, 2, 4, 5, 8), "shape [B, H, M, F]"),
    ("attention", "k", (2, 7, 8), "shape [B=2, Hkv, N, F=8]"),
    ("attention", "k", (3, 2, 7, 8), "shape [B=2, Hkv, N, F=8]"),
    ("attention", "k", (2, 2, 7, 9), "F=8]"),
    ("attention", "k", (2, 3, 7, 8), "a number of heads that divides the 4 of q"),
    ("attention", "k", (2, 0, 7, 8), "a number of heads that divides the 4 of q"),
    ("attention", "v", (2, 2, 7), "shape [B=2, Hkv=2, N=7, D]"),
    ("attention", "v", (2, 2, 6, 6), "shape [B=2, Hkv=2, N=7, D"),
    ("attention", "v", (2, 4, 7, 6), "shape [B=2, Hkv=2, N=7, D"),
    ("attention", "v", (1, 2, 7, 6), "shape [B=2, Hkv=2, N=7, D"),
    ("attention", "bias", (5, 6), "a shape broadcastable to [2, 4, 5, 7]"),
    ("attention", "bias", (3, 1, 5, 7), "a shape broadcastable to [2, 4, 5, 7]"),
    ("attention", "bias", (2, 2, 5, 7), "a shape broadcastable to [2, 4, 5, 7]"),
    ("attention", "bias", (1, 2, 4, 5, 7), "a shape broadcastable to [2, 4, 5, 7]"),
    ("attention", "bias", (0,), "a shape broadcastable to [2, 4, 5, 7]"),
    ("attention", "bias", (2, 7), "of a padding mask [B, N] this is bias[:, None, None, :]"),
    ("attention", "bias", (2, 5, 7), "of [B, M, N] this is bias[:, None]"),
    ("attention", "k", (2, 7, 2, 8), "of q, on axis 1 of [B, Hkv, N, F]"),
    ("merge_attention", "out_b", (2, 5, 7), "shape [2, 5, 6]"),
    ("merge_attention", "out_b", (5, 6), "shape [2, 5, 6]"),
    ("merge_attention", "lse_a", (2, 5, 1), "shape [2, 5]"),
    ("merge_attention", "lse_b", (5,), "shape [2, 5]"),
    ("linear_cross_entropy", "x", (), "shape [..., D]"),
    ("linear_cross_entropy", "weight", (11, 9), "shape [V, D=8]"),
    ("linear_cross_entropy", "weight", (8,), "shape [V"),
    ("linear_cross_entropy", "weight", (1, 11, 8), "shape [V"),
    ("linear_cross_entropy", "bias", (12,), "shape [V=11]"),
    ("linear_cross_entropy", "bias", (11, 1), "shape [V=11]"),
    ("linear_cross_entropy", "target", (10,), "shape [2, 5]"),
    ("linear_cross_entropy", "target", (2, 6), "shape [2, 5]"),
    ("linear_cross_entropy", "target", (2, 5, 11), "shape [2, 5]"),
    ("linear_distillation", "x", (), "shape [..., D]"),
    ("linear_distillation", "weight", (11, 9), "shape [V, D=8]"),
    ("linear_distillation", "teacher_x", (), "shape [..., E]"),
    ("linear_distillation", "teacher_x", (10, 6), "shape [2, 5, E]"),
    ("linear_distillation", "teacher_x", (2, 4, 6), "shape [2, 5, E]"),
    ("linear_distillation", "teacher_weight", (11, 7), "shape [V=11, E=6]"),
    ("linear_distillation", "teacher_weight", (12, 6), "shape [V=11, E=6]"),
    ("linear_distillation", "mask", (10,), "shape [2, 5]"),
    ("mlp", "x", (), "shape [..., M]"),
    ("mlp", "w1", (16, 9), "shape [K, M=8]"),
    ("mlp", "w1", (16,), "shape [K"),
    ("mlp", "w2", (6, 17), "K=16]"),
    ("mlp", "w2", (16,), "shape [N"),
    ("mlp", "bias1", (17,), "shape [K=16]"),
    ("mlp", "bias1", (1, 16), "shape [K=16]"),
    ("mlp", "bias2", (7,), "shape [N=6]"),
    ("logsumexp_matmul", "a", (), "shape [..., F]"),
    ("logsumexp_matmul", "b", (11, 9), "F=8]"),
    ("logsumexp_matmul", "b", (8,), "shape [N"),
]


@pytest.mark.parametrize(("operator", "name", "shape", "expected"), SHAPES)
def test_shapes(operator: str, name: str, shape: tuple[int, ...], expected: str) -> None:
    right = CALLS[operator]().get(name)
    wrong = torch.zeros(shape, dtype=torch.float32 if right is None else right.dtype)
    got = str(shape[1]) if "heads" in expected else str(list(shape))
    assert_raises(ValueError, name, expected, got, operator, **{name: wrong})


# Options: (operator, option, wrong values, error, what the message expects)

NOT_NUMBERS = ("1", None, True, 1j, torch.tensor(True), torch.tensor(1j))
NOT_FINITE = (math.nan, math.inf, -math.inf)
FAR = (1e39, 1e31, -1e39, 1e300)  # beyond float32, or where a kernel's products and quotients are
NEAR = (1e-46, -1e-31, 1e-320)
OPTIONS: list[tuple[str, str, tuple[Any, ...], type[Exception], str]] = [
    ("attention", "causal", (1, None, "yes"), TypeError, "True or False"),
    ("attention", "return_lse", (1, None, "yes"), TypeError, "True or False"),
    ("attention", "scale", ("1", True), TypeError, "a finite number"),
    ("attention", "scale", NOT_FINITE, ValueError, "a finite number"),
    ("attention", "scale", FAR + NEAR, ValueError, "0 or a magnitude from 2^-100 to 2^100"),
    ("attention", "softcap", ("1", True), TypeError, "a finite number > 0"),
    ("attention", "softcap", (0, -1.0, *NOT_FINITE), ValueError, "a finite number > 0"),
    ("attention", "softcap", (1e39, 1e31, 1e-46, 1e-320), ValueError, "a number from 2^-100 to 2^100"),
    ("attention", "window", (3, "ab", (1, 2, 3), (1,), (1.5, 2), (None, True)), TypeError, "(left, right)"),
    ("attention", "window", ((-1, 2), (1, -1)), ValueError, "(left, right)"),
    ("linear_cross_entropy", "ignore_index", (None, 1.0, True, "0"), TypeError, "an int"),
    ("linear_cross_entropy", "reduction", ("avg", None, "Mean"), ValueError, "one of none, mean, sum"),
    ("linear_cross_entropy", "label_smoothing", NOT_NUMBERS, TypeError, "a number in [0, 1]"),
    ("linear_cross_entropy", "label_smoothing", (-0.1, 1.1, math.nan), ValueError, "a number in [0, 1]"),
    ("linear_cross_entropy", "z_loss", NOT_NUMBERS, TypeError, "a finite number"),
    ("linear_cross_entropy", "z_loss", NOT_FINITE, ValueError, "a finite number"),
    ("linear_cross_entropy", "z_loss", FAR + NEAR, ValueError, "0 or a magnitude from 2^-100 to 2^100"),
    ("linear_cross_entropy", "softcap", (0.0, -2, math.inf), ValueError, "a finite number > 0"),
    (
        "linear_cross_entropy",
        "softcap",
        (1e39, 1e31, 1e-46, 1e-320),
        ValueError,
        "a number from 2^-100 to 2^100",
    ),
    ("linear_cross_entropy", "logit_scale", NOT_NUMBERS, TypeError, "a finite number"),
    ("linear_cross_entropy", "logit_scale", NOT_FINITE, ValueError, "a finite number"),
    ("linear_cross_entropy", "logit_scale", FAR + NEAR, ValueError, "0 or a magnitude from 2^-100 to 2^100"),
    ("linear_cross_entropy", "return_lse", (1, None), TypeError, "True or False"),
    ("linear_cross_entropy", "workspace", (1.0, True, "1"), TypeError, "None or an int >= 0"),
    ("linear_cross_entropy", "workspace", (-1,), ValueError, "None or an int >= 0"),
    ("linear_distillation", "loss", ("kl", None), ValueError, "one of cross_entropy, forward_kl, reverse_kl"),
    ("linear_distillation", "temperature", NOT_NUMBERS, TypeError, "a finite number > 0"),
    ("linear_distillation", "temperature", (0, 0.0, -1.0, *NOT_FINITE), ValueError, "a finite number > 0"),
    (
        "linear_distillation",
        "temperature",
        (1e39, 1e31, 1e-46, 1e-320),
        ValueError,
        "a number from 2^-100 to 2^100",
    ),
    ("linear_distillation", "reduction", ("batchmean",), ValueError, "one of none, mean, sum"),
    ("linear_distillation", "teacher_grad", (1, None), TypeError, "True or False"),
    ("linear_distillation", "workspace", (1.0,), TypeError, "None or an int >= 0"),
    ("linear_distillation", "workspace", (-1,), ValueError, "None or an int >= 0"),
    ("mlp", "activation", ("swish", None, "RELU"), ValueError, "one of relu, relu2, gelu, gelu_tanh, silu"),
    ("logsumexp_matmul", "scale", NOT_NUMBERS, TypeError, "a finite number"),
    ("logsumexp_matmul", "scale", NOT_FINITE, ValueError, "a finite number"),
    ("logsumexp_matmul", "scale", FAR + NEAR, ValueError, "0 or a magnitude from 2^-100 to 2^100"),
]


@pytest.mark.parametrize(
    ("operator", "option", "value", "error", "expected"),
    [(o, n, value, error, expected) for o, n, values, error, expected in OPTIONS for value in values],
)
def test_options(operator: str, option: str, value: Any, error: type[Exception], expected: str) -> None:
    assert_raises(error, option, expected, repr(value), operator, **{option: value})


@pytest.mark.parametrize("scale, softcap", [(1e20, 1e-20), (-1e-20, 1e20)])
def test_a_kernel_may_multiply_by_scale_over_softcap(scale: float, softcap: float) -> None:
    expected = "a magnitude from 2^-120 to 2^120"
    changes = {"scale": scale, "softcap": softcap}
    assert_raises(ValueError, "scale / softcap", expected, str(scale / softcap), "attention", **changes)


@pytest.mark.parametrize("operator", CALLS)
def test_unknown_options(operator: str) -> None:
    with pytest.raises(
        TypeError, match=rf"{operator}\(\) got an unexpected keyword argument 'dropout_rate'$"
    ):
        call(operator, dropout_rate=0.1)


@pytest.mark.parametrize(
    ("operator", "keyword", "ours"),
    [
        ("attention", "is_causal", "write causal, which aligns the last query with the last key"),
        ("attention", "attn_mask", "write bias"),
        ("attention", "dropout", "write dropout_p"),
        ("mlp", "dropout", "there is no dropout here"),
        ("attention", "enable_gqa", "leave it out"),
        ("attention", "cu_seqlens", "call attention_varlen"),
        ("attention", "key_padding_mask", "bias=mask[:, None, None, :]"),
        ("linear_cross_entropy", "ce_weight", "write class_weight"),
        ("linear_cross_entropy", "temperature", "write logit_scale"),
        ("mlp", "bias", "write bias1 and bias2"),
        ("mlp", "up_proj", "write w1"),
    ],
)
def test_what_others_call_it(operator: str, keyword: str, ours: str) -> None:
    before = mr._C.path_counts()
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'; .*{re.escape(ours)}"):
        call(operator, **{keyword: None})
    assert mr._C.path_counts() == before


@pytest.mark.parametrize(("operator", "option"), dict.fromkeys((o, n) for o, n, *_ in OPTIONS))
def test_long_arguments_are_shown_in_part(operator: str, option: str) -> None:
    for wrong in (list(range(100_000)), "x" * 100_000):
        with pytest.raises((TypeError, ValueError)) as raised:
            call(operator, **{option: wrong})
        message = str(raised.value)
        assert len(message) < 500 and repr(wrong)[:100] in message


@pytest.mark.parametrize(("operator", "name"), EVERY_TENSOR)
def test_long_lists_are_no_tensors(operator: str, name: str) -> None:
    with pytest.raises(TypeError, match=r"0, 1, 2, .* of type list") as raised:
        call(operator, **{name: list(range(100_000))})
    assert len(str(raised.value)) < 500


# Every option that is a number, and one that it may be.
NUMBERS: list[tuple[str, str, Any]] = [
    ("attention", "scale", 0.5),
    ("attention", "softcap", 3),
    ("attention", "window", 2),
    ("attention_varlen", "scale", 0.5),
    ("attention_varlen", "softcap", 3.0),
    ("attention_varlen", "window", 2),
    ("attend", "scale", 0.5),
    ("attend", "window", 2),
    ("linear_cross_entropy", "ignore_index", 3),
    ("linear_cross_entropy", "label_smoothing", 0.5),
    ("linear_cross_entropy", "z_loss", 2),
    ("linear_cross_entropy", "logit_scale", 0.25),
    ("linear_cross_entropy", "softcap", 4.0),
    ("linear_cross_entropy", "workspace", 4096),
    ("linear_log_probs", "temperature", 2),
    ("linear_log_probs", "temperature", 0.5),
    ("linear_log_probs", "logit_scale", 0.25),
    ("linear_log_probs", "softcap", 4.0),
    ("linear_log_probs", "ignore_index", 3),
    ("linear_distillation", "temperature", 0.5),
    ("linear_distillation", "workspace", 0),
    ("jsd", "beta", 0.25),
    ("hard", "hard_weight", 0.25),
    ("hard", "ignore_index", 3),
    ("logsumexp_matmul", "scale", 2),
    ("statistics", "scale", 0.5),
]


def jsd() -> Arguments:
    return {**linear_distillation(), "loss": "jsd"}


def hard() -> Arguments:
    return {**linear_distillation(), "target": torch.arange(10).view(2, 5), "hard_weight": 0.5}


def attention_varlen() -> Arguments:
    q, k, v = torch.randn(5, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 6)
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": torch.tensor([0, 2, 5]),
        "cu_seqlens_k": torch.tensor([0, 3, 7]),
        "sinks": torch.randn(4),
    }


def attend() -> Arguments:
    return {**attention(), "weight": torch.sigmoid}


def linear_log_probs() -> Arguments:
    return {**linear_cross_entropy(), "temperature": torch.rand(2, 5) + 0.5}


def gated_mlp() -> Arguments:
    return {**mlp(), "gate": torch.randn(16, 8), "gate_bias": torch.randn(16)}


@mr.statistics
def statistics(score, other, column, label):  # type: ignore[no-untyped-def]
    p = mr.stat.softmax(score)
    return dict(lse=p.logsumexp, mean=p.mean(other), label=mr.stat.count(column == label))


def of_statistics() -> Arguments:
    a, b = torch.randn(2, 5, 8), torch.randn(11, 8)
    others = {"other_a": torch.randn(2, 5, 6), "other_b": torch.randn(11, 6)}
    return {"a": a, "b": b, **others, "label": torch.zeros(2, 5, dtype=torch.int64)}


MORE: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    "attention_varlen": (mr.attention_varlen, attention_varlen),
    "attend": (mr.attend, attend),
    "linear_log_probs": (mr.linear_log_probs, linear_log_probs),
    "gated_mlp": (mr.mlp, gated_mlp),
    "statistics": (statistics, of_statistics),
    "jsd": (mr.linear_distillation, jsd),
    "hard": (mr.linear_distillation, hard),
}
EVERY_CALL = {**{name: (getattr(mr, name), make) for name, make in CALLS.items()}, **MORE}


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, tuple):
        return [t for part in result for t in flat(part)]
    return [] if result is None else [result]


def with_option(operator: str, option: str, value: Any) -> list[Tensor]:
    function, make = EVERY_CALL[operator]
    torch.manual_seed(0)
    return flat(function(**{**make(), option: (value, value) if option == "window" else value}))


@pytest.mark.parametrize(("operator", "option", "number"), NUMBERS)
def test_a_number_in_a_tensor_on_the_cpu_is_read(operator: str, option: str, number: Any) -> None:
    """And one of numpy. No gradient reaches it, so it may not require one. Reading a GPU's would wait."""
    expected = with_option(operator, option, number)
    for of_number in (torch.tensor(number), np.array(number)[()], np.array(number)):
        found = with_option(operator, option, of_number)
        assert all(map(torch.equal, found, expected)) and len(found) == len(expected) > 0
    if operator in CALLS:
        planned = [
            mr.explain(operator, **CALLS[operator](), **{option: (n, n) if option == "window" else n})
            for n in (torch.tensor(number), number)
        ]
        assert planned[0] == planned[1]
    before = mr._C.path_counts()
    for wrong in (torch.tensor(number, device="meta"), torch.tensor([number, number])):
        if (option, wrong.dim()) != ("temperature", 1) or operator != "linear_log_probs":
            with pytest.raises((TypeError, ValueError), match=rf"^{option}: expected .* got .*"):
                with_option(operator, option, wrong)
    if isinstance(number, float):
        leaf = torch.tensor(number, requires_grad=True)
        with pytest.raises(ValueError, match=rf"^{option}: .* gradient"):
            with_option(operator, option, leaf)
        assert mr._C.path_counts() == before
        with torch.no_grad():
            assert all(map(torch.equal, with_option(operator, option, leaf), expected))


def test_one_temperature_on_the_device_of_the_tokens() -> None:
    """It is that of every token, wherever it is: nothing is read."""
    arguments = linear_log_probs()
    arguments["temperature"] = torch.tensor(0.5)
    found = torch.func.vmap(lambda t: mr.linear_log_probs(**{**arguments, "temperature": t}).log_probs)(
        torch.tensor([0.5, 2.0])
    )
    for result, number in zip(found, (0.5, 2.0), strict=True):
        expected = mr.linear_log_probs(**{**arguments, "temperature": number}).log_probs
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        ("attention", {"causal": True, "scale": 0.5, "window": (2, 1), "softcap": 3, "return_lse": True}),
        ("attention", {"window": [4, None], "return_lse": False}),
        (
            "linear_cross_entropy",
            {"ignore_index": 3, "label_smoothing": 0.5, "z_loss": 2, "logit_scale": 0.25, "workspace": 4096},
        ),
        ("linear_distillation", {"temperature": 2, "teacher_grad": True, "workspace": 0}),
        ("logsumexp_matmul", {"scale": 2}),
    ],
)
@pytest.mark.parametrize("float_type", [np.float16, np.float64])
@pytest.mark.parametrize("int_type", [np.int8, np.int64, np.uint16])
def test_options_of_numpy(operator: str, options: Arguments, int_type: Any, float_type: Any) -> None:
    types = {bool: np.bool_, int: int_type, float: float_type}

    def of_numpy(option: Any) -> Any:
        if isinstance(option, (tuple, list)):
            return type(option)(map(of_numpy, option))
        if option == 4096 and int_type is np.int8:
            return np.int16(option)
        return types.get(type(option), lambda same: same)(option)

    torch.manual_seed(0)
    expected = call(operator, **options)
    torch.manual_seed(0)
    found = call(operator, **{name: of_numpy(option) for name, option in options.items()})
    assert isinstance(found, tuple) == isinstance(expected, tuple)
    for ours, theirs in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, expected)), strict=True):
        assert torch.equal(ours, theirs)


def test_any_sequence_is_a_window() -> None:
    q = torch.randn(1, 1, 6, 8)
    expected = mr.attention(q, q, q, window=(1, 2))
    assert torch.equal(mr.attention(q, q, q, window=range(1, 3)), expected)


# Targets and masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_target_dtypes(dtype: torch.dtype) -> None:
    wrong = torch.zeros(2, 5, dtype=dtype)
    assert_raises(TypeError, "target", "an integer dtype", str(dtype), "linear_cross_entropy", target=wrong)


def test_class_probabilities_are_no_targets() -> None:
    wrong = torch.full((2, 5, 11), 1 / 11)
    assert_raises(TypeError, "target", "class indices", "torch.float32", "linear_cross_entropy", target=wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64])
def test_mask_dtypes(dtype: torch.dtype) -> None:
    assert_raises(
        TypeError, "mask", "torch.bool", str(dtype), "linear_distillation", mask=torch.ones(2, 5, dtype=dtype)
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float16, torch.float64, torch.complex64])
def test_attention_bias_dtypes(dtype: torch.dtype) -> None:
    assert_raises(TypeError, "bias", "float", str(dtype), "attention", bias=torch.zeros(5, 7, dtype=dtype))


@pytest.mark.parametrize("wrong", [-1, 11, 12, -99, 2**31, -(2**40)])
def test_targets_out_of_range_on_the_cpu(wrong: int) -> None:
    target = torch.zeros(2, 5, dtype=torch.int64)
    target[1, 2] = wrong
    with pytest.raises(IndexError, match=rf"target.*{wrong}"):
        call("linear_cross_entropy", target=target)
    loss = call("linear_cross_entropy", target=target, ignore_index=wrong)
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64],
)
def test_targets_of_every_integer_dtype(dtype: torch.dtype) -> None:
    arguments = linear_cross_entropy()
    expected = mr.linear_cross_entropy(**arguments)
    assert torch.equal(
        mr.linear_cross_entropy(**{**arguments, "target": arguments["target"].to(dtype)}), expected
    )
    with pytest.raises(IndexError, match="target"):
        call("linear_cross_entropy", target=torch.full((2, 5), 100, dtype=dtype))


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_log_probs", "linear_distillation"])
def test_targets_beyond_int64_are_never_ignored(name: str) -> None:
    """2**64 - 100 has the bits of -100."""
    target = torch.zeros(2, 5, dtype=torch.int64)
    target[1, 2] = -100
    target = target.view(torch.uint64)
    hard: Arguments = {**linear_distillation(), "mask": None, "hard_weight": 0.5}
    arguments = hard if name == "linear_distillation" else linear_cross_entropy()
    for ignore_index in (-100, 2**63 - 1):
        with pytest.raises(IndexError, match=r"target\[7\]: expected a class in"):
            getattr(mr, name)(**{**arguments, "target": target, "ignore_index": ignore_index})


@pytest.mark.parametrize("index", [2**63, -(2**63) - 1, 10**30])
def test_ignore_index_has_64_bits(index: int) -> None:
    assert_raises(
        ValueError, "ignore_index", "64 bits", str(index), "linear_cross_entropy", ignore_index=index
    )


@pytest.mark.parametrize("index", [2**63 - 1, -(2**63)])
def test_any_index_of_64_bits_may_be_ignored(index: int) -> None:
    assert torch.isfinite(call("linear_cross_entropy", ignore_index=index))


def test_an_int_may_be_too_large_for_a_float() -> None:
    wrong = 10**400
    assert_raises(ValueError, "scale", "finite", str(wrong)[:100], "attention", scale=wrong)


@pytest.mark.parametrize("far", [2**31, 2**62, sys.maxsize, 2**63, 10**30])
@pytest.mark.parametrize("sides", ["left", "right", "both"])
def test_a_window_beyond_all_keys_is_none(sides: str, far: int) -> None:
    """Each position plus a side must fit 64 bits."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    window = (far if sides != "right" else 1, far if sides != "left" else 1)
    same = (None if sides != "right" else 1, None if sides != "left" else 1)
    assert torch.equal(mr.attention(q, k, v, window=window), mr.attention(q, k, v, window=same))


def test_a_workspace_beyond_all_memory_is_all_of_it() -> None:
    assert torch.isfinite(call("linear_cross_entropy", workspace=10**30))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestTargetsOnAGpu:
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        target = torch.tensor([1, 11, -1, 2**40, -100, 3], device="cuda")
        x, weight = torch.randn(6, 8, device="cuda"), torch.randn(11, 8, device="cuda")
        return x.requires_grad_(), weight.requires_grad_(), target

    def test_rows_out_of_range_are_nan(self) -> None:
        x, weight, target = self.inputs()
        losses = mr.linear_cross_entropy(x, weight, target, reduction="none")
        assert losses.isnan().tolist() == [False, True, True, True, False, False]
        losses[0].backward()
        assert x.grad[0].isfinite().all()

    def test_debug_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MONOIDREDUCE_DEBUG", "1")
        x, weight, target = self.inputs()
        with pytest.raises(IndexError, match=r"target: expected class indices in .*, got 11"):
            mr.linear_cross_entropy(x, weight, target)
        assert torch.isfinite(mr.linear_cross_entropy(x, weight, target.clamp(0, 10)))


# States to merge


def states(*widths: int) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.randn(2, 5, width) for width in widths], [torch.randn(2, 5) for _ in widths]


def test_states_to_merge_that_do_not_fit() -> None:
    outs, lses = states(6, 6, 6)
    for wrong, error, message in (
        ((outs, lses[:2]), ValueError, r"lses: expected 3 states as outs, got 2"),
        (([], []), ValueError, r"outs: expected a sequence of at least one tensor, .*, got none"),
        ((torch.empty(0, 5, 6), torch.empty(0, 5)), ValueError, r"outs: .* at least one .*, got none"),
        ((torch.empty(()), lses), ValueError, r"outs: .* at least one .*, got none"),
        ((3.0, lses), TypeError, r"outs: expected a sequence .*, got 3.0"),
        ((None, None), TypeError, r"outs: expected a sequence .*, got None"),
        (([outs[0], None], lses[:2]), TypeError, r"outs\[1\]: expected a tensor, got None"),
        (
            (outs, [*lses[:2], lses[2].double()]),
            TypeError,
            r"lses\[2\]: expected torch.float32 as outs\[0\] is",
        ),
        ((states(6, 7)[0], lses[:2]), ValueError, r"outs\[1\]: expected shape \[2, 5, 6\] as outs\[0\] is"),
        (
            (outs, [lses[0], lses[1].T, lses[2]]),
            ValueError,
            r"lses\[1\]: expected shape \[2, 5\] as outs\[0\]",
        ),
        ((torch.empty(2), torch.empty(2)), ValueError, r"outs\[0\]: expected shape \[..., M, D\], got \[\]"),
    ):
        with pytest.raises(error, match=message):
            mr.merge_attention(*wrong)  # type: ignore[call-overload]


# What is not an operator


@pytest.mark.parametrize("wrong", [1.0, True, None, "1"])
def test_workspace_limits_that_are_no_ints(wrong: Any) -> None:
    for function in (mr.set_workspace, lambda bytes: mr.workspace(bytes).__enter__()):
        with pytest.raises(TypeError, match=f"bytes: expected an int >= 0, got {wrong!r}"):
            function(wrong)


def test_workspace_limits_of_numpy() -> None:
    with mr.workspace(np.int64(77)):
        assert mr.get_workspace() == 77 and type(mr.get_workspace()) is int


def test_negative_workspace_limits() -> None:
    for function in (mr.set_workspace, lambda bytes: mr.workspace(bytes).__enter__()):
        with pytest.raises(ValueError, match="bytes: expected an int >= 0, got -1"):
            function(-1)
    assert mr.get_workspace() == 352 << 20


def test_explain_checks_the_call_it_explains() -> None:
    with pytest.raises(ValueError, match=r"op: expected one of attention, .*, got 'softmax'"):
        mr.explain("softmax", torch.randn(3))
    with pytest.raises(ValueError, match="w1: expected shape"):
        mr.explain(mr.mlp, torch.randn(3, 8), torch.randn(4, 9), torch.randn(2, 4))
    with pytest.raises(ValueError, match="activation: expected one of relu"):
        mr.explain(mr.mlp, torch.randn(3, 8), torch.randn(4, 8), torch.randn(2, 4), activation="swish")


# Each argument in turn


@pytest.mark.parametrize(
    ("operator", "name"),
    [(o, n) for o, (_, make) in EVERY_CALL.items() for n, t in make().items() if isinstance(t, Tensor)],
)
def test_the_argument_that_is_wrong_is_named(operator: str, name: str) -> None:
    """Its size on each axis, one axis more and less, its dtype and its device, while all others are right.

    The message names it, first or as what another does not agree with, and shows the shape that was given.
    """
    function, make = EVERY_CALL[operator]
    right = make()[name]
    shapes = [[*right.shape[:axis], n + 1, *right.shape[axis + 1 :]] for axis, n in enumerate(right.shape)]
    shapes += [[3, *right.shape], [*right.shape[1:]]]
    refused = 0
    for shape in shapes:
        wrong = torch.ones(shape).to(right.dtype)
        before = mr._C.path_counts()
        try:
            function(**{**make(), name: wrong})
        except ValueError as error:
            refused += 1
            shown = f"{name} is {shape}" in str(error) or str(error).startswith(f"{name}: expected")
            assert shown and str(shape) in str(error), str(error)
            assert mr._C.path_counts() == before
    assert refused >= 1
    for wrong in (right.to("meta"), right.to(torch.complex64)):
        with pytest.raises((TypeError, ValueError)) as raised:
            function(**{**make(), name: wrong})
        message = str(raised.value)
        assert message.startswith(f"{name}: expected") or f" as {name}" in message, message
    if right.is_floating_point() and name != "temperature":  # which is converted
        with pytest.raises(TypeError) as raised:
            function(**{**make(), name: right.double()})
        message = str(raised.value)
        assert message.startswith(f"{name}: expected") or f" as {name} is torch.float64" in message, message


def test_sizes_that_disagree_are_shown_with_both_arguments() -> None:
    x, w1, w2 = torch.randn(2, 5, 6), torch.randn(16, 8), torch.randn(6, 16)
    message = re.escape("w1: expected shape [K, M=6] as x is [2, 5, 6], got [16, 8]")
    with pytest.raises(ValueError, match=f"^{message}$"):
        mr.mlp(x, w1, w2)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    message = re.escape("v: expected shape [B=2, Hkv=2, N=7, D] as q is [2, 4, 5, 8] and k is [2, 2, 7, 8]")
    with pytest.raises(ValueError, match=f"^{message}, got"):
        mr.attention(q, k, k[:, :, :6])


@pytest.mark.parametrize("operator", EVERY_CALL)
def test_batches_of_calls(operator: str) -> None:
    """Weights with a batch axis are refused with the way out, which works."""
    function, make = EVERY_CALL[operator]
    arguments = {name: value for name, value in make().items() if isinstance(value, Tensor)}
    others = {name: value for name, value in make().items() if name not in arguments}
    batches = {name: torch.stack((value, value)) for name, value in arguments.items()}
    if operator not in ("merge_attention", "statistics"):  # these take batches, of other shapes
        with pytest.raises(ValueError, match=r"torch.vmap makes a call for each of a batch of \w+\)"):
            function(**batches, **others)
    torch.manual_seed(0)
    found = torch.vmap(lambda given: tuple(flat(function(**given, **others))))(batches)
    for result, expected in zip(found, flat(function(**arguments, **others)), strict=True):
        torch.testing.assert_close(result, torch.stack((expected, expected)))
