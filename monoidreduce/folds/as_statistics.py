"""Operators as folds of `statistics`, whose gradients have gradients.

An operator's own kernels compute it and its gradient. Second derivatives need no kernels of their own: an
operator is a few statistics of scores, and torch code on the results of rows. The gradients of both have
gradients; those of statistics are in second_derivatives.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from monoidreduce._ops.registry import OPERATORS
from monoidreduce._torch_private import transforms_are_active
from monoidreduce.folds import stat
from monoidreduce.folds.statistics import Statistics
from monoidreduce.functional import _with_sinks

__all__ = ["second_derivative"]

_NO_LABEL = -1


def second_derivative(name: str) -> Callable[..., list[Tensor | None]] | None:
    """The gradients of an operator's backward op (`second` in _ops/registry.py); None if there are none."""
    fold = _FOLDS.get(name)
    return None if fold is None else lambda *arguments: _gradients_of_gradients(name, fold, *arguments)


def _gradients_of_gradients(
    name: str, fold: Callable[..., tuple[Tensor, ...]], cotangents: tuple[Tensor | None, ...], *arguments: Any
) -> list[Tensor | None]:
    if transforms_are_active():  # torch.func.vjp in a backward pass of torch.func loses count of its levels
        raise RuntimeError(
            f"monoidreduce::{name} can be differentiated once by transforms of torch.func. Write "
            "torch.autograd.grad(..., create_graph=True) for the first derivative, or "
            f"`import monoidreduce.reference` and call its {name}"
        )
    operator = OPERATORS[name]
    first, last = operator.differentiable, operator.differentiable + operator.inputs
    upstream, inputs = arguments[:first], arguments[first:last]
    rest = arguments[operator.differentiable + operator.saved :]
    floating = operator.inputs - operator.constants
    at = next(i for i, each in enumerate(rest) if isinstance(each, (list, tuple)))
    options, needed = rest[:at], rest[at]
    wanted = [i for i in range(floating) if needed[i]]
    before = enumerate(arguments[: first + floating])
    moving = [i for i, t in before if t is not None and t.is_floating_point()]

    def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
        """Those that backward returned, from the upstream gradients and inputs that are given."""
        own: list[Any] = [*upstream, *inputs]
        for i, t in zip(moving, tensors, strict=True):
            own[i] = t

        def forward(*of_wanted: Tensor) -> list[Tensor]:
            given = own[first:last]
            for i, t in zip(wanted, of_wanted, strict=True):
                given[i] = t
            results = fold(*given, *options)
            return [t for t, g in zip(results, upstream, strict=True) if g is not None]

        differentiated: Any = torch.func.vjp(forward, *(own[first + i] for i in wanted))
        results, pull = differentiated
        found: tuple[Tensor, ...] = pull(
            [g.to(t.dtype) for g, t in zip((g for g in own[:first] if g is not None), results, strict=True)]
        )
        return found

    with torch.enable_grad():
        differentiated: Any = torch.func.vjp(gradients, *(arguments[i] for i in moving))
        found, pull = differentiated
        given = (cotangents[i] for i in wanted)
        twice = pull(
            tuple(torch.zeros_like(t) if u is None else u for u, t in zip(given, found, strict=True))
        )
    results: list[Tensor | None] = [None] * len(arguments)
    for i, gradient in zip(moving, twice, strict=True):
        results[i] = gradient
    return results


def _of_logits(softcap: float) -> Callable[[Any], Any]:
    return (lambda score: softcap * torch.tanh(score / softcap)) if softcap else lambda score: score


@lru_cache(64)
def _log_sum_exp() -> Statistics:
    return Statistics(lambda score: {"lse": stat.softmax(score).logsumexp})


def _logsumexp_matmul(
    a: Tensor, b: Tensor, scale: float, _: bool, workspace: int | None
) -> tuple[Tensor, ...]:
    return (_log_sum_exp()(a, b, scale=scale, workspace=workspace).lse,)


@lru_cache(64)
def _token_statistics(softcap: float) -> Statistics:
    """Log-sum-exp, mean, target and weighted total of the logits. by: a row's reciprocal temperature."""
    capped = _of_logits(softcap)

    def statistics(score: Any, column: Any, label: Any, bias: Any, class_weight: Any, by: Any) -> Any:
        logit = capped(score + bias) * by
        p = stat.softmax(logit)
        return {
            "lse": p.logsumexp,
            "mean": p.mean(logit),
            "target": stat.total(torch.where(column == label, logit, 0.0)),
            "total": stat.total(class_weight * logit),
        }

    return Statistics(statistics)


def _tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    label: Tensor,
    ignored: int,
    logit_scale: float,
    softcap: float,
    workspace: int | None,
    class_weight: Tensor | None = None,
    by: Tensor | None = None,
) -> Any:
    """`_token_statistics` of a call. ignored: the label of rows that have no part."""
    column = {
        "bias": weight.new_zeros(len(weight)) if bias is None else bias,
        "class_weight": weight.new_ones(len(weight)) if class_weight is None else class_weight,
    }
    row = {"by": torch.ones_like(label, dtype=x.dtype) if by is None else by}
    options: dict[str, Any] = {"ignore_index": ignored, "scale": logit_scale, "workspace": workspace}
    return _token_statistics(softcap)(x, weight, label=label, row=row, column=column, **options)


def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    first_class: int,
    classes: int,
    lse_of_ignored: bool,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
) -> tuple[Tensor, Tensor]:
    used = target != ignore_index
    label = torch.where(used, target, _NO_LABEL)
    ignored = _NO_LABEL - 1 if lse_of_ignored else _NO_LABEL
    s = _tokens(x, weight, bias, label, ignored, logit_scale, softcap, workspace, class_weight)
    lse, number = torch.where(used, s.lse, 0.0), max(len(weight), 1)
    of_target: Any = 1.0
    if class_weight is not None:
        of_target = torch.where(used, class_weight[label.clamp(min=0)], 0.0).to(lse.dtype)
    loss = (1.0 - label_smoothing) * of_target * (lse - s.target)
    if label_smoothing:
        whole = float(len(weight)) if class_weight is None else class_weight.to(lse.dtype).sum()
        loss = loss + label_smoothing / number * (whole * lse - s.total)
    loss = torch.where(used, loss + z_loss * lse * lse, 0.0)
    if reduction != "none":
        divisor: Any = 1
        if reduction == "mean":
            divisor = used.sum().clamp(min=1) if class_weight is None else of_target.sum()
        loss = loss.sum() / divisor
    return loss, s.lse


def _linear_log_probs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperatures: Tensor | None,
    logit_scale: float,
    softcap: float,
    temperature: float,
    ignore_index: int,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    used = target != ignore_index
    label = torch.where(used, target, _NO_LABEL)
    real = torch.promote_types(x.dtype, torch.float32)
    by = 1 / temperatures.to(real) if temperatures is not None else None
    if by is None and temperature != 1:
        by = torch.full_like(target, 1 / temperature, dtype=real)
    s = _tokens(x, weight, bias, label, _NO_LABEL, logit_scale, softcap, others[-1], by=by)
    lse = torch.where(used, s.lse, 0.0)
    return s.target - lse, lse - s.mean, lse


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


@lru_cache(64)
def _hidden(activation: str, biased: bool) -> Statistics:
    act = _ACTIVATIONS[activation]
    if biased:
        return Statistics(lambda score, bias, w2: {"out": stat.total(act(score + bias) * w2)})
    return Statistics(lambda score, w2: {"out": stat.total(act(score) * w2)})


def _mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    activation: str,
    unrounded: bool,
    workspace: int | None,
) -> tuple[Tensor]:
    column = {"w2": w2.mT} if bias1 is None else {"bias": bias1, "w2": w2.mT}
    out = _hidden(activation, bias1 is not None)(x, w1, column=column, workspace=workspace).out
    return (out if bias2 is None else out + bias2,)


@lru_cache(64)
def _attention_of_head(softcap: float, left: int, right: int, aligned: int) -> Statistics:
    capped = _of_logits(softcap)

    def statistics(score: Any, column: Any, query: Any, v: Any) -> Any:
        kept = capped(score)
        if left >= 0:
            kept = torch.where(column - query >= aligned - left, kept, -math.inf)
        if right >= 0:
            kept = torch.where(column - query <= aligned + right, kept, -math.inf)
        p = stat.softmax(kept)
        return {"out": p.mean(v), "lse": p.logsumexp}

    return Statistics(statistics)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    compensated: bool,
) -> tuple[Tensor, Tensor]:
    if bias is not None:
        raise RuntimeError(
            "attention with a bias can be differentiated once. Do without create_graph=True, or "
            "`import monoidreduce.reference` and call its attention"
        )
    (batch, heads, queries, width), shared = q.shape, k.shape[1]
    fold = _attention_of_head(softcap, left, right, k.shape[2] - queries)
    query = torch.arange(queries, device=q.device).repeat(heads // max(shared, 1))
    by = 1 / math.sqrt(max(width, 1)) if scale is None else scale
    outs, lses = [], []
    for b in range(batch):
        for h in range(shared):
            rows = q[b].reshape(shared, -1, width)[h]  # of the heads that share this one
            out, lse = fold._by_folds(rows, k[b, h], row={"query": query}, column={"v": v[b, h]}, scale=by)
            outs.append(out)
            lses.append(lse)
    if not outs:
        return q.new_zeros(batch, heads, queries, v.shape[3]), q.new_zeros(batch, heads, queries)
    out, lse = torch.cat(outs).view(*q.shape[:3], -1), torch.cat(lses).view(q.shape[:3])
    if sinks is None:
        return out, lse
    empty = lse == -math.inf
    joined, total = _with_sinks(out.to(lse.dtype), lse.masked_fill(empty, 0), sinks)
    return joined.to(out.dtype), torch.where(empty, sinks.to(lse.dtype)[:, None], total)


_FOLDS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "attention": _attention,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_log_probs": _linear_log_probs,
    "logsumexp_matmul": _logsumexp_matmul,
    "mlp": _mlp,
}
