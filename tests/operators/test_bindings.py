"""The module `_C` itself: reads tensors, refuses those no kernel could use, lets threads run, counts paths.

What it computes is judged in the tests of the operators.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import run_after_torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import monoidreduce as mr
from monoidreduce._ops import engine

_C = mr._C

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAUNCH: dict[str, Any] = {"threads": 1, "stream": 0}
# What logsumexp_forward is given on a GPU alone.
_ON_GPU = ("mean", "scratch", "kept", "row_planes", "column_planes")
ON_CPU: dict[str, Any] = dict.fromkeys(_ON_GPU) | {"kept_upstream": 0.0, "saved_columns": 0}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def logsumexp(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    lse = torch.full((a.shape[0],), math.nan, dtype=accumulator(a.dtype))
    _C.logsumexp_forward(
        a,
        b,
        lse,
        lse.clone(),
        scale=scale,
        **ON_CPU,
        **LAUNCH,
    )
    return lse


def attention_arguments(**changed: Any) -> dict[str, Any]:
    """Arguments of `attention_backward`, where every kind of tensor occurs."""
    arguments = {
        "grad_out": torch.randn(2, 4, 5, 7),
        "grad_lse": torch.randn(2, 4, 5),
        "q": torch.randn(2, 4, 5, 6),
        "k": torch.randn(2, 2, 3, 6),
        "v": torch.randn(2, 2, 3, 7),
        "bias": torch.randn(4, 1, 3).expand(2, 4, 5, 3),
        "sinks": torch.randn(4),
        "row_spans": None,
        "column_spans": None,
        "out": torch.randn(2, 4, 5, 7),
        "lse": torch.randn(2, 4, 5),
        "lse_low": torch.zeros(2, 4, 5),
        "out_low": None,
        "dq": torch.zeros(2, 4, 5, 6),
        "dk": torch.zeros(2, 2, 3, 6),
        "dv": torch.zeros(2, 2, 3, 7),
        "dbias": torch.zeros(4, 1, 3).expand(2, 4, 5, 3),
        "dsinks": torch.zeros(4),
        "scratch": None,
        "scale": 1.0,
        "softcap": 0.0,
        "left": -1,
        "right": -1,
        "whole": True,
        **LAUNCH,
    }
    assert changed.keys() <= arguments.keys()
    return arguments | changed


def cross_entropy_arguments(**changed: Any) -> dict[str, Any]:
    arguments = {
        "x": torch.randn(4, 3),
        "weight": torch.randn(5, 3),
        "bias": None,
        "target": torch.tensor([0, 4, -100, 2]),
        "class_weight": None,
        "loss": torch.full((4,), math.nan),
        "loss_weight": None,
        "reduced": None,
        "mean": False,
        "lse": torch.full((4,), math.nan),
        "lse_low": torch.full((4,), math.nan),
        "scratch": None,
        "kept": None,
        "kept_upstream": 0.0,
        "order": None,
        "row_planes": None,
        "column_planes": None,
        "gathered": None,
        "logit_scale": 1.0,
        "softcap": 0.0,
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "z_loss": 0.0,
        "first_class": 0,
        "classes": -1,
        "saved_columns": 0,
        **LAUNCH,
    }
    assert changed.keys() <= arguments.keys()
    return arguments | changed


def distillation_arguments(**changed: Any) -> dict[str, Any]:
    arguments = {
        "x": torch.randn(4, 3),
        "weight": torch.randn(5, 3),
        "teacher_x": torch.randn(4, 2),
        "teacher_weight": torch.randn(5, 2),
        "mask": None,
        "loss": torch.full((4,), math.nan),
        "reduced": None,
        "mean": False,
        "scratch": None,
        "kept": None,
        "teacher_kept": None,
        "kept_upstream": 0.0,
        "order": None,
        "gathered": None,
        "teacher_gathered": None,
        "row_planes": None,
        "column_planes": None,
        "other_row_planes": None,
        "other_column_planes": None,
        "stats": torch.full((6, 4), math.nan),
        "kind": 0,
        "temperature": 1.0,
        "saved_columns": 0,
        **LAUNCH,
    }
    assert changed.keys() <= arguments.keys()
    return arguments | changed


def mlp_arguments(**changed: Any) -> dict[str, Any]:
    arguments = {
        "x": torch.randn(4, 3),
        "w1": torch.randn(5, 3),
        "w2": torch.randn(2, 5),
        "bias1": None,
        "bias2": None,
        "out": torch.full((4, 2), math.nan),
        "scratch": None,
        "activation": 0,
        "workspace": 0,
        **LAUNCH,
    }
    assert changed.keys() <= arguments.keys()
    return arguments | changed


# Layouts of a matrix. Whatever surrounds its elements in memory is NaN, so that reading anything else shows.


def in_nan(values: Tensor, view: Callable[[Tensor], Tensor], *shape: int) -> Tensor:
    return view(torch.full(shape, math.nan, dtype=values.dtype)).copy_(values)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda m: m,
    "transposed": lambda m: m.t().contiguous().t(),
    "padded rows": lambda m: in_nan(m, lambda t: t[:, :-3], m.shape[0], m.shape[1] + 3),
    "every second column": lambda m: in_nan(m, lambda t: t[:, ::2], m.shape[0], 2 * m.shape[1]),
    "every third row, offset": lambda m: in_nan(m, lambda t: t[2::3, 1:], 3 * m.shape[0], m.shape[1] + 1),
    "plane of a volume": lambda m: in_nan(m, lambda t: t[:, 1, :], m.shape[0], 3, m.shape[1]),
}


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matrix_is_read_through_its_strides(layout: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(9, 13).to(dtype), torch.randn(17, 13).to(dtype)
    expected = torch.logsumexp(a.double() @ b.double().T, 1)
    eps = torch.finfo(accumulator(dtype)).eps
    for got in (logsumexp(LAYOUTS[layout](a), b), logsumexp(a, LAYOUTS[layout](b))):
        torch.testing.assert_close(got.double(), expected, rtol=16 * eps, atol=16 * eps)


@pytest.mark.parametrize("expanded", ["rows", "columns", "both"])
def test_a_matrix_may_have_zero_strides(expanded: str) -> None:
    shape = {"rows": (1, 13), "columns": (9, 1), "both": (1, 1)}[expanded]
    a, b = torch.randn(shape).expand(9, 13), torch.randn(17, 13)
    torch.testing.assert_close(logsumexp(a, b), torch.logsumexp(a @ b.T, 1))


@pytest.mark.parametrize("rows,columns,width", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_a_tensor_may_be_empty(rows: int, columns: int, width: int) -> None:
    a, b = torch.randn(rows, width), torch.randn(columns, width)
    assert torch.equal(logsumexp(a, b), torch.logsumexp(a @ b.T, 1))


def test_four_dimensions_are_read_through_their_strides() -> None:
    q, k, v = (torch.randn(2, n, heads, 6).transpose(1, 2) for n, heads in ((5, 4), (3, 2), (3, 2)))
    bias = torch.randn(4, 1, 3).expand(2, 4, 5, 3)
    out, lse, low = torch.empty(2, 4, 5, 6), torch.empty(2, 4, 5), torch.empty(2, 4, 5)
    options = {"out_low": None, "scratch": None, "scale": 0.5, "softcap": 0.0, "left": -1, "right": -1}
    _C.attention_forward(q, k, v, bias, None, None, None, out, lse, low, **options, **LAUNCH)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = 0.5 * q @ k.mT + bias
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_integers_and_bools_are_read_through_their_strides() -> None:
    target = torch.tensor([[0, 9], [4, 9], [-100, 9], [2, 9]])[:, 0]
    arguments = cross_entropy_arguments(target=target)
    _C.cross_entropy_forward(**arguments)
    logits = arguments["x"] @ arguments["weight"].T
    expected = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(arguments["loss"], expected)

    mask = torch.tensor([[True, False], [False, True], [True, False], [False, True]])[:, 0]
    arguments = distillation_arguments(mask=mask)
    _C.distillation_forward(**arguments)
    assert (arguments["loss"] > 0).tolist() == mask.tolist()


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("ignore_index, counted", [(9, 4), (4, 3), (0, 2)])
def test_losses_are_reduced_over_the_targets_that_count(mean: bool, ignore_index: int, counted: int) -> None:
    target, reduced = torch.tensor([[0, 9], [4, 9], [2, 9], [0, 9]])[:, 0], torch.tensor(math.nan)
    arguments = cross_entropy_arguments(target=target, ignore_index=ignore_index, reduced=reduced, mean=mean)
    _C.cross_entropy_forward(**arguments)
    total = float(arguments["loss"].double().sum())
    assert total > 0 and float(reduced) == pytest.approx(total / counted if mean else total, rel=1e-7)


@pytest.mark.parametrize("mean", [False, True])
def test_losses_are_reduced_over_the_mask(mean: bool) -> None:
    mask, reduced = torch.tensor([[True], [False], [True], [False]])[:, 0], torch.tensor(math.nan)
    arguments = distillation_arguments(mask=mask, reduced=reduced, mean=mean)
    _C.distillation_forward(**arguments)
    total = float(arguments["loss"].double().sum())
    assert total > 0 and float(reduced) == pytest.approx(total / 2 if mean else total, rel=1e-7)


@pytest.mark.parametrize("mean", [False, True])
def test_nothing_is_left_of_no_losses(mean: bool) -> None:
    ignored, reduced = torch.full((4,), -100), torch.tensor(math.nan)
    _C.cross_entropy_forward(**cross_entropy_arguments(target=ignored, reduced=reduced, mean=mean))
    assert reduced == 0
    none = {name: torch.empty(0) for name in ("loss", "lse", "lse_low")}
    none |= {"x": torch.empty(0, 3), "target": ignored[:0], "reduced": reduced.fill_(math.nan)}
    _C.cross_entropy_forward(**cross_entropy_arguments(**none, mean=mean))
    assert reduced == 0


def test_a_long_mean_keeps_its_digits() -> None:
    rows, reduced = 1 << 22, torch.tensor(math.nan)
    arguments = cross_entropy_arguments(
        x=torch.full((1, 1), 0.1).expand(rows, 1),
        weight=torch.tensor([[0.0], [1.0]]),
        target=torch.zeros(rows, dtype=torch.long),
        reduced=reduced,
        mean=True,
        **{name: torch.empty(rows) for name in ("loss", "lse", "lse_low")},
    )
    _C.cross_entropy_forward(**arguments)
    loss = arguments["loss"]
    assert reduced == loss[0] and (loss == loss[0]).all()


def test_parameters_and_subclasses_are_tensors() -> None:
    class Named(torch.Tensor):
        pass

    a, b = torch.randn(3, 4), torch.randn(5, 4)
    expected = logsumexp(a, b)
    assert torch.equal(logsumexp(torch.nn.Parameter(a), b.as_subclass(Named)), expected)


def test_absent_tensors_are_none() -> None:
    absent = dict.fromkeys(("grad_out", "bias", "dq", "dv", "dbias"))
    arguments = attention_arguments(**absent)
    _C.attention_backward(**arguments)
    assert arguments["dk"].abs().sum() > 0


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse", "lse_low"])
def test_none_for_a_tensor_that_is_needed(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected a tensor, got none$"):
        _C.attention_backward(**attention_arguments(**{name: None}))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_only_16_bits_have_a_low_word(dtype: torch.dtype) -> None:
    low = torch.zeros(2, 4, 5, 7, dtype=dtype)
    arguments = {
        name: value.to(dtype) if isinstance(value, Tensor) else value
        for name, value in attention_arguments(out_low=low).items()
    }
    with pytest.raises(ValueError, match=r"^out_low: expected none unless q has 16 bits, got a tensor$"):
        _C.attention_backward(**arguments)


class OnCuda(torch.Tensor):
    """Says that it is on a GPU."""

    is_cpu, is_cuda = False, True

    def get_device(self) -> int:
        return 3


def on_cuda(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.as_subclass(OnCuda)


def lazily_negated() -> Tensor:
    t = torch.randn(2, 2, 3, 6, dtype=torch.complex64).conj().imag
    assert t.is_neg()
    return t


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.zeros(2, 2, 3, 6)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (lambda: [[1.0]], r"a torch\.Tensor, got <class 'list'>"),
    "array": (lambda: torch.zeros(2, 2, 3, 6).numpy(), r"a torch\.Tensor, got <class 'numpy\.ndarray'>"),
    "number": (lambda: 1.0, r"a torch\.Tensor, got <class 'float'>"),
    "sparse": (lambda: torch.zeros(2, 2).to_sparse(), r"a dense \(strided\) tensor, got torch\.sparse_coo"),
    "lazily negated": (lazily_negated, r"memory as it is, got a lazy negation"),
    "complex": (
        lambda: torch.zeros(2, 2, dtype=torch.complex64),
        r"a real floating, .* got torch\.complex64",
    ),
    "int32": (lambda: torch.zeros(2, 2, dtype=torch.int32), r"a real floating, .* got torch\.int32"),
    "float8": (
        lambda: torch.zeros(2, 2).to(torch.float8_e5m2),
        r"a real floating, .* got torch\.float8_e5m2",
    ),
    "meta": (lambda: torch.zeros(2, 2, device="meta"), r"a tensor on the CPU or a CUDA device, got meta"),
    "five axes": (lambda: torch.zeros(1, 1, 1, 1, 1), r"at most 4 dimensions, got 5"),
    "no memory": (fake, r"a tensor with memory of its own, got <class '.*FakeTensor'>"),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_tensor_is_a_type_error(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(TypeError, match=rf"^k: expected {message}"):
        _C.attention_backward(**attention_arguments(k=make()))


BROADCAST = torch.zeros(2, 1, 3, 6).expand(2, 2, 3, 6)
WRONG_ATTENTION: dict[str, tuple[dict[str, Any], str]] = {
    "axes": ({"q": torch.zeros(2, 6)}, r"q: expected shape \[B, H, M, F\], got \[2, 6\]"),
    "batch": ({"k": torch.zeros(1, 2, 3, 6)}, r"k: expected shape \[B=2, Hkv, N, F=6\], got \[1, 2, 3, 6\]"),
    "keys": ({"v": torch.zeros(2, 2, 4, 7)}, r"v: expected shape \[B=2, Hkv=2, N=3, D\], got \[2, 2, 4, 7\]"),
    "heads": (
        {"k": torch.zeros(2, 3, 3, 6), "v": torch.zeros(2, 3, 3, 7)},
        "k: expected a number of heads that divides H=4, got 3",
    ),
    "no heads": (
        {"k": torch.zeros(2, 0, 3, 6), "v": torch.zeros(2, 0, 3, 7)},
        "k: expected a number of heads that divides H=4, got 0",
    ),
    "integer": (
        {"q": torch.zeros(2, 4, 5, 6, dtype=torch.int64)},
        "q: expected a floating tensor, got int64",
    ),
    "dtypes": ({"v": torch.zeros(2, 2, 3, 7).half()}, "v: expected float32, got float16"),
    "bias not expanded": (
        {"bias": torch.zeros(4, 1, 3)},
        r"bias: expected shape \[B=2, H=4, M=5, N=3\], got \[4, 1, 3\]",
    ),
    "bias dtype": (
        {"bias": torch.zeros(2, 4, 5, 3, dtype=torch.int64)},
        "bias: expected bool, float32 or float32, got int64",
    ),
    "statistics dtype": ({"lse": torch.zeros(2, 4, 5).double()}, "lse: expected float32, got float64"),
    "statistics strides": (
        {"lse": torch.zeros(2, 5, 4).mT},
        "lse: expected a contiguous tensor, got stride 4 in axis 2",
    ),
    "upstream shape": (
        {"grad_lse": torch.zeros(2, 4)},
        r"grad_lse: expected shape \[B=2, H=4, M=5\], got \[2, 4\]",
    ),
    "gradient shape": (
        {"dq": torch.zeros(2, 4, 5, 5)},
        r"dq: expected shape \[B=2, H=4, M=5, F=6\], got \[2, 4, 5, 5\]",
    ),
    "gradient dtype": ({"dv": torch.zeros(2, 2, 3, 7).bfloat16()}, "dv: expected float32, got bfloat16"),
    "gradient overlaps": ({"dk": BROADCAST}, "dk: expected a contiguous tensor, got stride 0 in axis 1"),
    "one list of spans": (
        {"row_spans": torch.zeros(5, 2, dtype=torch.int64)},
        "row_spans, column_spans: expected both or neither, got one",
    ),
    "bias beside spans": (
        {name: torch.zeros(n, 2, dtype=torch.int64) for name, n in (("row_spans", 5), ("column_spans", 3))},
        "bias: expected none beside row_spans, which kernels for biases do not read, got a tensor",
    ),
    "gradient of no bias": ({"bias": None}, "dbias: expected none where bias is bool or none, got a tensor"),
    "gradient of a mask": (
        {"bias": torch.ones(2, 4, 5, 3, dtype=torch.bool)},
        "dbias: expected none where bias is bool or none, got a tensor",
    ),
    "softcap": ({"softcap": -1.0}, "softcap: expected a number >= 0, 0 for none, got -1"),
    "softcap nan": ({"softcap": math.nan}, "softcap: expected a number >= 0, 0 for none, got nan"),
    "left": ({"left": -2}, "left: expected an integer >= 0, or -1 for no bound, got -2"),
    "right": ({"right": -2}, "right: expected an integer >= 0, or -1 for no bound, got -2"),
    "threads": ({"threads": 0}, "threads: expected at least 1, got 0"),
    "devices": (
        {"v": on_cuda(torch.zeros(2, 2, 3, 7))},
        "v: expected a tensor on the CPU as q, got one on cuda:3",
    ),
}


@pytest.mark.parametrize("case", WRONG_ATTENTION)
def test_attention_refuses(case: str) -> None:
    changed, message = WRONG_ATTENTION[case]
    with pytest.raises(ValueError, match=f"^{message}$"):
        _C.attention_backward(**attention_arguments(**changed))


WRONG_ELSEWHERE: dict[str, tuple[Callable[..., None], dict[str, Any], str]] = {
    "classes": (
        _C.cross_entropy_forward,
        cross_entropy_arguments(weight=torch.zeros(5, 4)),
        r"weight: expected shape \[V, D=3\], got \[5, 4\]",
    ),
    "target dtype": (
        _C.cross_entropy_forward,
        cross_entropy_arguments(target=torch.zeros(4)),
        "target: expected int64, got float32",
    ),
    "class bias": (
        _C.cross_entropy_forward,
        cross_entropy_arguments(bias=torch.zeros(4)),
        r"bias: expected shape \[V=5\], got \[4\]",
    ),
    "label smoothing": (
        _C.cross_entropy_forward,
        cross_entropy_arguments(label_smoothing=1.5),
        r"label_smoothing: expected a number in \[0, 1\], got 1\.5",
    ),
    "vocabularies": (
        _C.distillation_forward,
        distillation_arguments(teacher_weight=torch.zeros(6, 2)),
        r"teacher_weight: expected shape \[V=5, E=2\], got \[6, 2\]",
    ),
    "statistics": (
        _C.distillation_forward,
        distillation_arguments(stats=torch.zeros(2, 4)),
        r"stats: expected shape \[statistics=6, N=4\], got \[2, 4\]",
    ),
    "mask dtype": (
        _C.distillation_forward,
        distillation_arguments(mask=torch.zeros(4)),
        "mask: expected bool, got float32",
    ),
    "kind": (_C.distillation_forward, distillation_arguments(kind=3), "kind: expected 0, 1 or 2, got 3"),
    "temperature": (
        _C.distillation_forward,
        distillation_arguments(temperature=0.0),
        "temperature: expected a finite number > 0, got 0",
    ),
    "reduced": (
        _C.cross_entropy_forward,
        cross_entropy_arguments(reduced=torch.zeros(2)),
        r"reduced: expected shape \[values=1\], got \[2\]",
    ),
    "hidden": (
        _C.mlp_forward,
        mlp_arguments(w2=torch.zeros(2, 4)),
        r"w2: expected shape \[N, K=5\], got \[2, 4\]",
    ),
    "output bias": (
        _C.mlp_forward,
        mlp_arguments(bias2=torch.zeros(5)),
        r"bias2: expected shape \[N=2\], got \[5\]",
    ),
    "output": (
        _C.mlp_forward,
        mlp_arguments(out=torch.zeros(2, 4).T),
        "out: expected a contiguous tensor, got stride 4 in axis 1",
    ),
    "room for no order": (
        _C.cross_entropy_forward,
        cross_entropy_arguments(gathered=torch.zeros(4, 3)),
        "gathered: expected a tensor if and only if there is an order, got one",
    ),
    "room for no order of a teacher": (
        _C.distillation_forward,
        distillation_arguments(teacher_gathered=torch.zeros(4, 2)),
        "teacher_gathered: expected a tensor if and only if there is an order, got one",
    ),
    "activation": (
        _C.mlp_forward,
        mlp_arguments(activation=8),
        r"activation: expected an index in \[0, 7\], got 8",
    ),
}


@pytest.mark.parametrize("case", WRONG_ELSEWHERE)
def test_the_other_operators_refuse(case: str) -> None:
    op, arguments, message = WRONG_ELSEWHERE[case]
    with pytest.raises(ValueError, match=f"^{message}$"):
        op(**arguments)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("wrong", [-1, 5, -(2**63), 2**63 - 1])
def test_a_target_that_is_no_class_is_an_index_error_before_any_work(at: int, wrong: int) -> None:
    target = torch.tensor([0, 4, -100, 2])
    target[at] = wrong
    arguments = cross_entropy_arguments(target=target)
    with pytest.raises(
        IndexError, match=rf"^target\[{at}\]: expected a class in \[0, 5\) or ignore_index=-100, got {wrong}$"
    ):
        _C.cross_entropy_forward(**arguments)
    assert arguments["loss"].isnan().all() and arguments["lse"].isnan().all()


def test_on_the_cpu_gradients_have_the_dtype_of_their_inputs_or_of_sums() -> None:
    """The latter are the same numbers, which are not rounded yet."""
    arguments = {
        name: value.bfloat16()
        if isinstance(value, Tensor)
        and name not in ("lse", "lse_low", "grad_lse", "dbias", "sinks", "dsinks")
        else value
        for name, value in attention_arguments().items()
    }
    _C.attention_backward(**arguments)
    assert all(arguments[name].any() for name in ("dq", "dk", "dv", "dbias"))
    for name in ("dq", "dk", "dv"):
        sums = torch.full_like(arguments[name], math.nan, dtype=torch.float32)
        _C.attention_backward(**arguments | {name: sums, "dbias": torch.zeros_like(arguments["dbias"])})
        assert torch.equal(sums.bfloat16(), arguments[name]) and not torch.equal(
            sums, arguments[name].float()
        )
        with pytest.raises(ValueError, match=rf"^{name}: expected (bfloat16|float32), got float64$"):
            _C.attention_backward(**arguments | {name: arguments[name].double()})


def test_on_a_gpu_column_gradients_have_the_accumulation_dtype_or_that_of_the_inputs() -> None:
    accumulated = ("lse", "lse_low", "grad_lse", "dq", "dbias", "sinks", "dsinks")
    arguments = {
        name: on_cuda(value if name in accumulated else value.bfloat16())
        if isinstance(value, Tensor)
        else value
        for name, value in attention_arguments().items()
    }
    arguments["dk"] = on_cuda(torch.zeros(2, 2, 3, 6, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"^dk: expected float32, got float16$"):
        _C.attention_backward(**arguments)


@pytest.mark.skipif(_C.build_info()["cuda"], reason="this build runs what is on a GPU")
def test_a_cpu_only_build_says_how_to_get_the_other() -> None:
    a, b, lse, low = (on_cuda(torch.zeros(*shape)) for shape in ((3, 4), (5, 4), (3,), (3,)))
    with pytest.raises(
        RuntimeError, match=r"got one on cuda:3\. This build .* is CPU-only; .* MONOIDREDUCE_CUDA=ON"
    ):
        _C.logsumexp_forward(a, b, lse, low, scale=1.0, **ON_CPU, **LAUNCH)


def test_arguments_are_neither_kept_nor_dropped() -> None:
    arguments = attention_arguments()
    wrong = arguments | {"lse": None}

    def references() -> list[int]:
        return [sys.getrefcount(value) for value in arguments.values() if isinstance(value, Tensor)]

    before = references()
    for _ in range(10):
        _C.attention_backward(**arguments)
        with pytest.raises(ValueError, match=r"^lse: "):
            _C.attention_backward(**wrong)
    assert references() == before


def test_other_python_threads_run_meanwhile() -> None:
    a, b = torch.randn(2048, 256), torch.randn(4096, 256)
    lse, low, steps, done = torch.empty(2048), torch.empty(2048), 0, threading.Event()

    def count() -> None:
        nonlocal steps
        while not done.is_set():
            steps += 1
            time.sleep(0.0001)

    counter = threading.Thread(target=count)
    counter.start()
    while steps == 0:
        time.sleep(0.001)
    before = steps
    _C.logsumexp_forward(a, b, lse, low, scale=1.0, **ON_CPU, **LAUNCH)
    meanwhile = steps - before
    done.set()
    counter.join()
    assert meanwhile >= 3


def test_each_call_is_counted_with_its_path() -> None:
    before = _C.path_counts()
    for dtype in FLOATING:
        logsumexp(torch.zeros(2, 3, dtype=dtype), torch.zeros(4, 3, dtype=dtype))
    logsumexp(torch.zeros(2, 3), torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"^lse: "):
        _C.logsumexp_forward(
            torch.zeros(2, 3),
            torch.zeros(4, 3),
            None,
            None,
            scale=1.0,
            **ON_CPU,
            **LAUNCH,
        )
    after = _C.path_counts()
    counted = {
        path: after[path] - before.get(path, 0) for path in after if after[path] != before.get(path, 0)
    }
    assert counted == {
        f"logsumexp_forward/cpu/{_C.cpu_isa_of(torch.zeros(1, dtype=dtype))}/{dtype}".replace(
            "torch.", ""
        ): calls
        for dtype, calls in zip(FLOATING, (1, 1, 2, 1), strict=True)
    }


def test_counting_is_thread_safe() -> None:
    a, b = torch.zeros(1, 3), torch.zeros(2, 3)
    key = f"logsumexp_forward/cpu/{_C.cpu_isa_of(a)}/float32"
    before = _C.path_counts().get(key, 0)
    threads = [threading.Thread(target=lambda: [logsumexp(a, b) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _C.path_counts()[key] - before == 800


CHOOSE_ISA = """
import os, sys
from monoidreduce import _C
for wanted in sys.argv[1:]:
    os.environ["MONOIDREDUCE_CPU_ISA"] = wanted
    try:
        print(_C.cpu_isa())
    except ValueError as error:
        print(error)
"""


def choose_isa(*wanted: str) -> list[str]:
    """What `cpu_isa()` says to each wish, in a new process. The first that can be fulfilled stays."""
    process = run_after_torch(CHOOSE_ISA, *wanted)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def test_the_instruction_set_is_the_one_asked_for() -> None:
    isas = _C.cpu_isas()
    unknown = ["avx1024", "AVX2", " avx2", "baseline,avx2"]
    expected = f"MONOIDREDUCE_CPU_ISA: expected one of {', '.join(isas)} (this build, this processor), got "
    for isa in isas:
        assert choose_isa(*unknown, isa) == [*(expected + name for name in unknown), isa]


def test_the_instruction_set_is_otherwise_the_best() -> None:
    isas = _C.cpu_isas()
    assert isas[0] == "baseline" and set(isas) <= set(_C.build_info()["cpu_isas"])
    assert choose_isa("") == [isas[-1]]


def test_build_info_says_what_was_built() -> None:
    info = _C.build_info()
    assert info["version"] == mr.__version__
    assert info["compiler"].split()[0] in ("GNU", "Clang")
    assert info["cpu_isas"][0] == "baseline"
    if info["cuda"]:
        assert info["cuda_version"] and info["cuda_architectures"] and info["cpu_only_reason"] is None
    else:
        assert info["cpu_only_reason"] and info["cuda_version"] is None and info["cuda_architectures"] == []


# Plans

HOPPER = _C.DeviceFacts(9, 0, multiprocessors=132, cache_bytes=50 << 20, shared_bytes=232448)
AMPERE = _C.DeviceFacts(8, 0, multiprocessors=108, cache_bytes=40 << 20, shared_bytes=166912)


@pytest.mark.parametrize(
    "plan_forward",
    [_C.plan_cross_entropy_forward, _C.plan_log_probs_forward, _C.plan_logsumexp_forward],
)
def test_what_forward_saves_is_an_argument_of_planning(plan_forward: Any) -> None:
    x, weight = (torch.empty(n, 136, dtype=torch.bfloat16, device="meta") for n in (100, 600))
    nothing, some, whole = (
        plan_forward(x, weight, saved_columns=columns, gpu=HOPPER) for columns in (0, 256, 600)
    )
    assert [plan.saved_columns for plan in (nothing, some, whole)] == [0, 256, 600]
    # A row maximum for each row and tile, and one more number for each row.
    assert some.frames == whole.frames
    for plan in (some, whole):
        assert plan.scratch - plan.frames == 100 * (-(-plan.saved_columns // plan.tile[1]) + 1)
    assert str(nothing) == str(some) == str(whole)


@pytest.mark.parametrize(("rows", "columns"), ((1, 300), (256, 2048), (1024, 2048), (130, 8000)))
def test_few_tiles_are_small(rows: int, columns: int) -> None:
    """Wide tiles of 256 columns, 192 for two scores, would leave many clusters without one."""
    assert tiles_of(rows, columns) == {(256, 128)}


@pytest.mark.parametrize(("rows", "columns"), ((2000, 1500), (8192, 1536), (8192, 128256)))
def test_many_tiles_are_wide(rows: int, columns: int) -> None:
    assert tiles_of(rows, columns) == {(256, 256), (256, 192)}


def tiles_of(rows: int, columns: int) -> set[tuple[int, int] | None]:
    """The tiles of all kernels that are built for a small one, on Hopper."""
    x, weight = (torch.empty(n, 512, dtype=torch.bfloat16, device="meta") for n in (rows, columns))
    mlp = (x, weight, torch.empty(512, columns, dtype=torch.bfloat16, device="meta"))
    room, options = 1 << 40, {"gpu": HOPPER}
    plans = [
        _C.plan_cross_entropy_forward(x, weight, saved_columns=columns, **options),
        _C.plan_logsumexp_forward(x, weight, **options),
        _C.plan_logsumexp_forward(x, weight, saved_columns=columns, **options),
        _C.plan_logsumexp_backward(x, weight, workspace=room, **options),
        _C.plan_mlp_forward(*mlp, workspace=room, **options),
        _C.plan_mlp_backward(*mlp, workspace=room, **options),
    ]
    without = _C.plan_cross_entropy_forward(x, weight, **options)  # built for wide tiles alone
    assert without.tile == (256, 256)
    return {plan.tile for plan in plans}


@pytest.mark.parametrize("a_differentiated", (True, False))
def test_a_narrow_log_sum_exp_saves_no_dlogits(a_differentiated: bool) -> None:
    """Its gradients are folds."""
    a, b = (torch.empty(n, 128, dtype=torch.bfloat16, device="meta") for n in (100, 600))
    mean = a if a_differentiated else None
    plan = _C.plan_logsumexp_forward(a, b, mean=mean, saved_columns=600, gpu=HOPPER)
    assert plan.saved_columns == 0 and plan.narrow == a_differentiated


def test_planes_save_dlogits_where_products_take_them() -> None:
    def saved(width: int) -> int:
        a, b = (torch.empty(n, width, device="meta") for n in (100, 600))
        plan = _C.plan_logsumexp_forward(a, b, saved_columns=600, planes=True, gpu=HOPPER)
        assert plan.planes
        return int(plan.saved_columns)

    assert [saved(width) for width in (120, 128, 1024)] == [0, 600, 600]


def test_distillation_saves_row_maxima_of_both_scores() -> None:
    x, weight = (torch.empty(n, 64, dtype=torch.bfloat16, device="meta") for n in (100, 600))
    nothing, whole = (
        _C.plan_distillation_forward(x, weight, x, weight, saved_columns=columns, gpu=HOPPER)
        for columns in (0, 600)
    )
    assert whole.saved_columns == 600 and whole.frames == nothing.scratch
    assert whole.scratch - nothing.scratch == 100 * 2 * 4  # tiles of 192 columns


@pytest.mark.parametrize("gpu", (HOPPER, AMPERE), ids=("hopper", "ampere"))
@pytest.mark.parametrize("way", ("forward", "backward"))
def test_rows_of_one_tile_are_not_ordered(way: str, gpu: Any) -> None:
    """Without those that are not active they would still be a tile."""
    for rows in (0, 1, 256, 257, 5000):
        x, weight = (torch.empty(n, 64, dtype=torch.bfloat16, device="meta") for n in (rows, 600))
        options = {"gpu": gpu, **({} if way == "forward" else {"workspace": 1 << 30})}
        plans = [
            getattr(_C, f"plan_{loss}_{way}")(*operands, **options)
            for loss, operands in (
                ("cross_entropy", (x, weight)),
                ("log_probs", (x, weight)),
                ("distillation", (x, weight, x, weight)),
            )
        ]
        assert [plan.skips_rows for plan in plans] == [gpu is HOPPER and rows > 256] * 3


def test_kernels_without_room_for_dlogits_save_none() -> None:
    x, weight = (torch.empty(n, 64, dtype=torch.bfloat16, device="meta") for n in (100, 600))
    plans = [_C.plan_cross_entropy_forward(x, weight, saved_columns=n, gpu=AMPERE) for n in (0, 600)]
    assert [plan.saved_columns for plan in plans] == [0, 0] and plans[0].scratch == plans[1].scratch


def test_nothing_changes_a_plan() -> None:
    x = torch.empty(100, 64, dtype=torch.bfloat16, device="meta")
    plan = _C.plan_cross_entropy_forward(x, x, gpu=HOPPER)
    for name in (name for name in dir(plan) if not name.startswith("_")):
        with pytest.raises(AttributeError):
            setattr(plan, name, getattr(plan, name))


# Programs


def test_the_program_of_a_call_on_the_cpu_is_text() -> None:
    arguments = {field.name: field.default for field in _C.CALLS["modified_attention_forward"]}
    arguments |= {name: torch.zeros(1, 1, 2, 3) for name in ("q", "k", "v", "out")}
    assert arguments["program"] == "" and arguments["sizes"] == []
    with pytest.raises(ValueError, match=r"^program: expected its text on the CPU, got a kernel$"):
        _C.modified_attention_forward(**{**arguments, "program": 1}, **LAUNCH)


@pytest.mark.parametrize("name", [name for name in vars(_C) if name.startswith("plan_")])
def test_ops_pass_arguments_of_planning_in_their_order(name: str) -> None:
    signature = getattr(_C, name).__doc__.splitlines()[0]
    by_position = inspect.signature(getattr(engine._C, name))
    assert list(by_position.parameters) == re.findall(r"(\w+): ", signature)
    defaults = [parameter.default for parameter in by_position.parameters.values()]
    assert [repr(default) for default in defaults] == re.findall(r" = ([^,)]+)", signature)


def test_a_plan_by_keywords_is_that_of_the_binding() -> None:
    x, weight = torch.randn(512, 64, dtype=torch.bfloat16), torch.randn(1000, 64, dtype=torch.bfloat16)
    options: dict[str, Any] = {"logit_scale": 0.5, "workspace": 1 << 20, "deterministic": True, "gpu": HOPPER}
    plans = [module.plan_cross_entropy_backward(x, weight, **options) for module in (_C, engine._C)]
    assert str(plans[0]) == str(plans[1]) and plans[0].scratch == plans[1].scratch
