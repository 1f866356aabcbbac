"""The operators at sizes, layouts, options, masks and upstream gradients that nobody chose."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings
from specimens import (
    LAYOUTS,
    Inputs,
    attention_inputs,
    cross_entropy_inputs,
    distillation_inputs,
    logsumexp_inputs,
    mlp_inputs,
    varlen_inputs,
)
from tolerance import check_draws, check_operator

from monoidreduce._ops.distillation import DISTILLATION_LOSSES
from monoidreduce._ops.mlp import ACTIVATIONS

Draw = Callable[[st.SearchStrategy[Any]], Any]
Values = Callable[[], Inputs]  # others in every call, of the same shapes, dtypes and layouts

FEW = st.integers(1, 3)
SIZES = st.one_of(st.integers(1, 9), st.integers(10, 140))  # less than a tile of any engine, and around one
WIDTHS = st.one_of(st.integers(1, 9), st.sampled_from((16, 24, 33, 64, 72)))
DTYPES = st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16))
REDUCTIONS = st.sampled_from(("none", "mean", "sum"))
LEVELS = st.sampled_from((0, 10, 100, 1000))  # of the logits: a constant changes no probability
SIDES = st.one_of(st.none(), st.integers(0, 150))
# The device is the same for all examples of a test.
generated = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def placed(draw: Draw, make: Callable[..., Inputs], device: torch.device, **arguments: Any) -> Values:
    """Inputs of some dtype, each in a layout of its own."""
    torch.manual_seed(draw(st.integers(0, 2**20)))
    dtype = draw(DTYPES)
    layouts = {
        name: draw(st.sampled_from((None, *LAYOUTS)))
        for name in make(dtype=dtype, device=device, **arguments)
    }

    def values() -> Inputs:
        inputs = make(dtype=dtype, device=device, **arguments)
        return {
            name: t if (layout := layouts[name]) is None else LAYOUTS[layout](t) for name, t in inputs.items()
        }

    return values


def or_zero(factor: float) -> float:
    """What is less than the least factor that operators take is 0."""
    return factor if abs(factor) >= 2.0**-100 else 0.0


def some_of(draw: Draw, options: dict[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
    return {name: draw(values) for name, values in options.items() if draw(st.booleans())}


def check(draw: Draw, operator: str, values: Values, options: dict[str, Any]) -> None:
    """The gradients of some inputs, for upstream gradients in some layout."""
    first = values()
    floating = [name for name, t in first.items() if t.is_floating_point()]
    wanted = [name for name in floating if draw(st.booleans())] or floating
    layout = draw(st.sampled_from(("strided", "sliced", "expanded", "contiguous")))
    draws = chain((first,), iter(values, None))
    check_draws(
        lambda: check_operator(
            operator, next(draws), options, differentiate=wanted, upstream=layout, generated=True
        )
    )


@generated
@given(data=st.data())
def test_attention(data: st.DataObject, device: torch.device) -> None:
    draw = data.draw
    batch, kv_heads, group, m, n = draw(FEW), draw(FEW), draw(FEW), draw(SIZES), draw(SIZES)
    full = (batch, group * kv_heads, m, n)
    shape = tuple(size if draw(st.booleans()) else 1 for size in full)
    masks: list[dict[str, Any]] = [{}, {"bias": shape}, {"keep": shape}]
    values = placed(
        draw,
        attention_inputs,
        device,
        batch=batch,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        m=m,
        n=n,
        width=draw(WIDTHS),
        value_width=draw(WIDTHS),
        **draw(st.sampled_from(masks)),
    )
    options = some_of(
        draw,
        {
            "causal": st.just(True),
            "window": st.tuples(SIDES, SIDES),
            "softcap": st.floats(0.5, 30),
            "scale": st.floats(-0.5, 1).map(or_zero),
            "return_lse": st.just(True),
        },
    )
    check(draw, "attention", values, options)


@generated
@given(data=st.data())
def test_attention_varlen(data: st.DataObject, device: torch.device) -> None:
    """Some sequences are empty on one side or both."""
    draw = data.draw
    kv_heads, group, count = draw(FEW), draw(FEW), draw(st.integers(1, 5))
    lengths = st.lists(st.integers(0, 70), min_size=count, max_size=count).filter(any)
    values = placed(
        draw,
        varlen_inputs,
        device,
        queries=draw(lengths),
        keys=draw(st.one_of(st.none(), lengths)),
        heads=group * kv_heads,
        kv_heads=kv_heads,
        width=draw(WIDTHS),
        value_width=draw(WIDTHS),
        behind=draw(st.integers(0, 3)),
    )
    options = some_of(
        draw,
        {
            "causal": st.just(True),
            "window": st.tuples(SIDES, SIDES),
            "softcap": st.floats(0.5, 30),
            "scale": st.floats(-0.5, 1).map(or_zero),
            "return_lse": st.just(True),
        },
    )
    check(draw, "attention_varlen", values, options)


@generated
@given(data=st.data())
def test_linear_cross_entropy(data: st.DataObject, device: torch.device) -> None:
    draw = data.draw
    level = draw(LEVELS)
    values = placed(
        draw,
        cross_entropy_inputs,
        device,
        rows=draw(SIZES),
        classes=draw(SIZES),
        width=draw(WIDTHS),
        bias=draw(st.booleans()),
        ignored=draw(st.floats(0, 1)),
        level=level,
    )
    options = some_of(
        draw,
        {
            "reduction": REDUCTIONS,
            "label_smoothing": st.floats(0, 1),
            # Times the square of a level, and x, a gradient would be beyond float16.
            "z_loss": st.just(0.0) if level else st.floats(0, 0.1).map(or_zero),
            "softcap": st.floats(1, 30),
            "logit_scale": st.floats(0.1, 2),
            "return_lse": st.just(True),
            "workspace": st.integers(0, 1 << 20),
        },
    )
    check(draw, "linear_cross_entropy", values, options)


@generated
@given(data=st.data())
def test_linear_log_probs(data: st.DataObject, device: torch.device) -> None:
    draw = data.draw
    level = draw(LEVELS)
    values = placed(
        draw,
        cross_entropy_inputs,
        device,
        rows=draw(SIZES),
        classes=draw(SIZES),
        width=draw(WIDTHS),
        bias=draw(st.booleans()),
        ignored=draw(st.floats(0, 1)),
        level=level,
    )
    options = some_of(
        draw,
        {
            "temperature": st.floats(0.2, 5),
            # Of high levels it makes logits alike, and gradients by rounding alone.
            "softcap": st.none() if level else st.floats(1, 30),
            "logit_scale": st.floats(0.1, 2),
            "entropy": st.just(True),
            "top1": st.just(True),
            "workspace": st.integers(0, 1 << 20),
        },
    )
    check(draw, "linear_log_probs", values, options)


@generated
@given(data=st.data())
def test_linear_distillation(data: st.DataObject, device: torch.device) -> None:
    draw = data.draw
    values = placed(
        draw,
        distillation_inputs,
        device,
        rows=draw(SIZES),
        classes=draw(SIZES),
        width=draw(WIDTHS),
        teacher_width=draw(WIDTHS),
        mask=draw(st.booleans()),
        level=draw(LEVELS),
        teacher_level=draw(LEVELS),
    )
    options = some_of(
        draw,
        {
            "loss": st.sampled_from(DISTILLATION_LOSSES),
            "temperature": st.floats(0.5, 4),
            "reduction": REDUCTIONS,
            "workspace": st.integers(0, 1 << 20),
        },
    )
    check(draw, "linear_distillation", values, options | {"teacher_grad": True})


@generated
@given(data=st.data())
def test_mlp(data: st.DataObject, device: torch.device) -> None:
    draw = data.draw
    values = placed(
        draw,
        mlp_inputs,
        device,
        rows=draw(SIZES),
        width=draw(WIDTHS),
        hidden=draw(SIZES),
        outputs=draw(WIDTHS),
        bias1=draw(st.booleans()),
        bias2=draw(st.booleans()),
    )
    check(draw, "mlp", values, some_of(draw, {"activation": st.sampled_from(ACTIVATIONS)}))


@generated
@given(data=st.data())
def test_logsumexp_matmul(data: st.DataObject, device: torch.device) -> None:
    draw = data.draw
    values = placed(draw, logsumexp_inputs, device, rows=draw(SIZES), columns=draw(SIZES), width=draw(WIDTHS))
    check(draw, "logsumexp_matmul", values, some_of(draw, {"scale": st.floats(0.1, 2)}))
