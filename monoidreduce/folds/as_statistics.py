"""Operators as folds of `statistics`, whose gradients have gradients.

An operator's own kernels compute it and its gradient. Second derivatives need no kernels of their own: an
operator is a few statistics of scores, and torch code on the results of rows. The gradients of both have
gradients; those of statistics are in second_derivatives.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from monoidreduce._ops.attention_mask import band
from monoidreduce._ops.attention_passes import in_full
from monoidreduce._ops.memory import no_gradient
from monoidreduce._ops.registry import OPERATORS
from monoidreduce._torch_private import DispatchMode
from monoidreduce.folds import stat
from monoidreduce.folds.distillation import Distillation
from monoidreduce.folds.kept_classes import in_64_bits, is_kept, shifts
from monoidreduce.folds.modified_as_statistics import modified_attention, seen_in_sequences
from monoidreduce.folds.second_derivatives import tangents
from monoidreduce.folds.statistics import Statistics
from monoidreduce.functional import _with_sinks

__all__ = ["attention_tangents", "by_statistics", "obstacle", "second_derivative", "varlen_tangents"]

_NO_LABEL = -1


def second_derivative(name: str) -> Callable[..., list[Tensor | None]] | None:
    """The gradients of an operator's backward op (`second` in _ops/registry.py); None if there are none."""
    fold = _FOLDS.get(name)
    return None if fold is None else lambda *arguments: _gradients_of_gradients(name, fold, *arguments)


def obstacle(name: str, *arguments: Any) -> str | None:
    """Why a call of an operator cannot be written with statistics; None if it can."""
    if name not in _FOLDS:
        return ""
    if name == "attention" and arguments[3] is not None and arguments[6]:
        return "it has a bias beside a softcap"
    return None


def by_statistics(name: str, *arguments: Any) -> Any:
    """A call of an operator, written with statistics: forward mode, and gradients of any nest of transforms.

    Outputs that only the operator's own backward op reads are empty.
    """
    with torch.autocast(arguments[0].device.type, enabled=False):  # the operator has cast its inputs
        found = _FOLDS[name](*arguments)
    number = len(getattr(torch.ops.monoidreduce, name).default._schema.returns)
    results = [*found, *[None] * (number - len(found))]
    results = [arguments[0].new_empty(0) if t is None else t for t in results]
    return tuple(results) if number > 1 else results[0]


def _gradients_of_gradients(
    name: str,
    fold: Callable[..., tuple[Tensor | None, ...]],
    cotangents: tuple[Tensor | None, ...],
    wanted: Sequence[bool],
    *arguments: Any,
) -> list[Tensor | None]:
    """Those of the operator as statistics, for the arguments that autograd tracks."""
    operator = OPERATORS[name]
    first, last = operator.differentiable, operator.differentiable + operator.inputs
    rest = arguments[operator.differentiable + operator.saved :]
    at = max(i for i, each in enumerate(rest) if isinstance(each, (list, tuple)))  # options may be lists too
    options, needed, recorded = rest[:at], rest[at], torch.is_grad_enabled()
    if why := obstacle(name, *arguments[first:last], *options):
        raise RuntimeError(
            f"monoidreduce::{name} can be differentiated once: {why}. Do without create_graph=True, or "
            f"`import monoidreduce.reference` and call its {name}"
        )
    how: Any = {"allow_unused": True, "materialize_grads": True}
    gradients: list[Tensor | None] = [None] * len(arguments)
    with torch.enable_grad():
        # Gradients are taken by views. So they end there, and not where the tensors come from.
        own = [t.view_as(t) if isinstance(t, Tensor) and t.requires_grad else t for t in arguments[:last]]
        tracked = [i for i, t in enumerate(own) if isinstance(t, Tensor) and t.requires_grad]
        moves = [i for i, u in enumerate(cotangents) if needed[i] and u is not None and first + i in tracked]
        results = zip(fold(*own[first:], *options), own[:first], strict=False)
        given = [(t, g) for t, g in results if t is not None and g is not None]
        pairs = [(t, g.to(t.dtype)) for t, g in given if t.requires_grad]
        if not moves or not pairs:
            raise RuntimeError(
                f"monoidreduce::{name} can be differentiated once by torch.autograd inside of a transform of "
                "torch.func that has ended. Take both derivatives by torch.func, or both by torch.autograd"
            )
        outputs, upstream = zip(*pairs, strict=True)
        with _GraphOnly():
            found = torch.autograd.grad(
                outputs, [own[first + i] for i in moves], upstream, create_graph=True, **how
            )
        pairs = [(t, cotangents[i]) for t, i in zip(found, moves, strict=True) if t.requires_grad]
        if pairs:
            outputs, along = zip(*pairs, strict=True)
            tracked = [i for i in tracked if wanted[i]]
            by = [own[i] for i in tracked]
            twice = torch.autograd.grad(outputs, by, along, create_graph=recorded, **how)
            for i, gradient in zip(tracked, twice, strict=True):
                gradients[i] = gradient
    return gradients


class _GraphOnly(DispatchMode):  # type: ignore[misc]
    """Context in which the gradients of folds are 0, for a first derivative that was computed before.

    Autograd records the calls for the second derivative. It reads their arguments, and not what they return:
    no fold's gradient is an argument of another one, as an operator's folds do not feed each other.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.monoidreduce.statistics_backward.default:
            return function(*args, **(kwargs or {}))
        inputs, needed = args[2:10], args[23]
        of_inputs = zip(inputs, needed, strict=False)
        return [t.new_zeros(()).expand(t.shape) if want else no_gradient(inputs) for t, want in of_inputs]


def _of_logits(softcap: float) -> Callable[[Any], Any]:
    return (lambda score: softcap * torch.tanh(score / softcap)) if softcap else lambda score: score


@lru_cache(64)
def _log_sum_exp() -> Statistics:
    return Statistics(lambda score: {"lse": stat.softmax(score).logsumexp})


def _logsumexp_matmul(
    a: Tensor, b: Tensor, scale: float, keep: bool, a_differentiated: bool, workspace: int | None
) -> tuple[Tensor, ...]:
    return (_log_sum_exp()(a, b, scale=scale, workspace=workspace).lse,)


@lru_cache(64)
def _token_statistics(softcap: float, wanted: tuple[str, ...], kept: bool) -> Statistics:
    """Statistics of the logits, by name.

    by: a row's reciprocal temperature. kept: a row folds only the classes that it keeps.
    """
    capped = _of_logits(softcap)

    def statistics(
        score: Any, row: Any, column: Any, label: Any, bias: Any, class_weight: Any, by: Any, shift: Any
    ) -> Any:
        untempered = capped(score + bias)
        if kept:
            untempered = torch.where(is_kept(row, column, shift), untempered, -math.inf)
        logit = untempered * by
        p = stat.softmax(logit)
        found = {
            "lse": p.logsumexp,
            "entropy": p.entropy,
            "target": stat.total(torch.where(column == label, logit, 0.0)),
            "total": stat.total(class_weight * logit),
            "best": stat.largest(untempered),
        }
        return {name: found[name] for name in wanted}

    return Statistics(statistics)


def _tokens(
    wanted: tuple[str, ...],
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
    words: Tensor | None = None,
) -> Any:
    """`_token_statistics` of a call. ignored: the label of rows that have no part. words: of kept classes."""
    weight = weight.to(x.dtype)  # it may be a float32 master, under autocast
    column = {
        "bias": weight.new_zeros(len(weight)) if bias is None else bias,
        "class_weight": weight.new_ones(len(weight)) if class_weight is None else class_weight,
        "shift": shifts(torch.arange(len(weight), device=weight.device)),
    }
    row = {"by": torch.ones_like(label, dtype=x.dtype) if by is None else by}
    options: dict[str, Any] = {"ignore_index": ignored, "scale": logit_scale, "workspace": workspace}
    words = None if words is None else in_64_bits(words)
    fold = _token_statistics(softcap, wanted, words is not None)
    return fold._with_words(x, weight, words=words, label=label, row=row, column=column, **options)


def _reciprocal(temperatures: Tensor | None, temperature: float, label: Tensor, x: Tensor) -> Tensor:
    """The reciprocal temperature of each row. label: [N]."""
    real = torch.promote_types(x.dtype, torch.float32)
    if temperatures is None:
        return torch.full_like(label, 1 / temperature, dtype=real)
    return 1 / temperatures.to(real)


def _labels(target: Tensor, ignore_index: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which targets are not ignored; which of these are no class; and labels: _NO_LABEL of what is ignored,
    and `classes` of what is no class."""
    used = target != ignore_index
    outside = used & ((target < 0) | (target >= classes))
    return used, outside, torch.where(used, target.masked_fill(outside, classes), _NO_LABEL)


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
    used, outside, label = _labels(target, ignore_index, len(weight))
    ignored = _NO_LABEL - 1 if lse_of_ignored else _NO_LABEL
    wanted = ("lse", "target", "total") if label_smoothing else ("lse", "target")
    s = _tokens(wanted, x, weight, bias, label, ignored, logit_scale, softcap, workspace, class_weight)
    lse, number = torch.where(used, s.lse, 0.0), max(len(weight), 1)
    of_target: Any = 1.0
    if class_weight is not None:
        of_target = torch.where(used, class_weight[label.clamp(0, number - 1)], 0.0).to(lse.dtype)
    loss = (1.0 - label_smoothing) * of_target * (lse - s.target)
    if label_smoothing:
        whole = float(len(weight)) if class_weight is None else class_weight.to(lse.dtype).sum()
        loss = loss + label_smoothing / number * (whole * lse - s.total)
    if z_loss:
        loss = loss + z_loss * lse * lse
    loss = torch.where(used, loss, 0.0).masked_fill(outside, math.nan)
    if reduction != "none":
        divisor: Any = 1
        if reduction == "mean":
            counted = used if class_weight is None else of_target
            divisor = torch.where(used.any(), counted.sum(), 1)
        loss = loss.sum() / divisor
    return loss, s.lse


def _linear_cross_entropy_parts(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    *options: Any,
) -> tuple[Tensor]:
    *numbers, _of_x, _of_weight, workspace = options
    of_op = (*numbers, 0, -1, False, False, True, workspace)
    return _linear_cross_entropy(x, weight, None, target, class_weight, *of_op)[:1]


def _linear_log_probs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperatures: Tensor | None,
    words: Tensor | None,
    logit_scale: float,
    softcap: float,
    temperature: float,
    ignore_index: int,
    top1: bool,
    *others: Any,
) -> tuple[Tensor | None, ...]:
    used, outside, label = _labels(target, ignore_index, len(weight))
    options: dict[str, Any] = {
        "logit_scale": logit_scale,
        "softcap": softcap,
        "workspace": others[-1],
        "by": _reciprocal(temperatures, temperature, label, x),
        "words": words,
    }
    wanted = ("lse", "entropy", "target", "best") if top1 else ("lse", "entropy", "target")
    s = _tokens(wanted, x, weight, bias, label, _NO_LABEL, **options)
    log_probs, best = s.target - s.lse, s.best.index if top1 else None
    if words is not None:  # a target that is not kept has no gradient
        log_probs = torch.where(s.target == -math.inf, -math.inf, log_probs)
        best = None if best is None else torch.where(s.lse == -math.inf, -1, best)
    log_probs, entropy, lse = (torch.where(used, t, 0.0) for t in (log_probs, s.entropy, s.lse))
    log_probs = log_probs.masked_fill(outside, math.nan)
    return log_probs, entropy, lse, None, best


@lru_cache(64)
def _target_statistics(softcap: float) -> Statistics:
    """A row's log-sum-exp, and its logits of _AT_ONCE classes. by: as in `_token_statistics`."""
    capped = _of_logits(softcap)

    def statistics(
        score: Any, column: Any, label: Any, bias: Any, by: Any, t0: Any, t1: Any, t2: Any, t3: Any
    ) -> Any:
        logit = capped(score + bias) * by
        logits = [stat.total(torch.where(column == t, logit, 0.0)) for t in (t0, t1, t2, t3)]
        return {"lse": stat.softmax(logit).logsumexp, **{f"z{k}": z for k, z in enumerate(logits)}}

    return Statistics(statistics)


_AT_ONCE = 4  # targets of a fold; with 8 the kernels for sm_80 spilled 1240 bytes


def _linear_target_logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperatures: Tensor | None,
    logit_scale: float,
    softcap: float,
    temperature: float,
    first_class: int,
    classes: int,
    lse_of_ignored: bool,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
) -> tuple[Tensor, Tensor]:
    counted = (target >= 0).any(1) | lse_of_ignored
    label = torch.where(counted, 0, _NO_LABEL)
    weight = weight.to(x.dtype)  # as in `_tokens`
    column = {"bias": weight.new_zeros(len(weight)) if bias is None else bias}
    by = _reciprocal(temperatures, temperature, label, x)
    padded = F.pad(target, (0, -target.shape[1] % _AT_ONCE), value=_NO_LABEL)
    logits, fold = [], _target_statistics(softcap)
    nothing = target.new_full((len(target), _AT_ONCE), _NO_LABEL)
    for part in torch.split(padded, _AT_ONCE, 1) if padded.shape[1] else (nothing,):
        lse, *found = fold(
            x,
            weight,
            label=label,
            ignore_index=_NO_LABEL,
            row={"by": by, **{f"t{k}": t for k, t in enumerate(part.unbind(1))}},
            column=column,
            scale=logit_scale,
            workspace=workspace,
        )
        logits.append(torch.stack(found, 1))
    return torch.where(counted, lse, 0.0), torch.cat(logits, 1)[:, : target.shape[1]]


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


# A bias of -inf excludes a pair. In a product with 0 it would be NaN, so it is this number there.
_EXCLUDED = -1e30
_ROWS_OF_BIAS = 64  # at once


@lru_cache(64)
def _attention_of_head(softcap: float, masked: bool, biased: bool) -> Statistics:
    """first, stop: the first key that a query sees, and the last one + 1."""
    capped = _of_logits(softcap)

    def results(kept: Any, v: Any) -> Any:
        p = stat.softmax(torch.where(kept >= _EXCLUDED / 2, kept, -math.inf) if biased else kept)
        return {"out": p.mean(v), "lse": p.logsumexp}

    def statistics(score: Any, column: Any, first: Any, stop: Any, v: Any) -> Any:
        seen = (column >= first) & (column < stop)
        return results(torch.where(seen, capped(score), -math.inf), v)

    return Statistics(statistics if masked else lambda score, v: results(capped(score), v))


def _of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float,
    seen: Tensor | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp. seen: `Mask.bounds`. bias: [B, H, M, N], beside no softcap."""
    (batch, heads, queries, _), shared = q.shape, k.shape[1]
    fold = _attention_of_head(softcap, seen is not None, bias is not None)
    rows, row, by = _rows_of_heads(q, shared, scale, seen)
    if bias is None:
        row = {name: t.expand(rows.shape[:-1]) for name, t in row.items()}
        out, lse = fold._by_folds(rows, k, row=row, column={"v": v}, scale=by)
    else:
        of_rows = bias.reshape(*rows.shape[:-1], bias.shape[3])
        of_heads = [
            _with_bias(fold, rows[at], k[at], v[at], of_rows[at], row, by)
            for at in itertools.product(range(batch), range(shared))
        ]
        if not of_heads:
            return q.new_zeros(batch, heads, queries, v.shape[3]), q.new_zeros(batch, heads, queries)
        out, lse = (torch.cat(t) for t in zip(*of_heads, strict=True))
    out, lse = out.reshape(*q.shape[:3], v.shape[3]), lse.reshape(q.shape[:3])
    if sinks is None:
        return out, lse
    joined, total = _with_sinks(out.to(lse.dtype), lse, sinks)
    return joined.to(out.dtype), total


def _rows_of_heads(
    q: Tensor, shared: int, scale: float | None, seen: Tensor | None
) -> tuple[Tensor, dict[str, Tensor], float]:
    """The queries of the heads that share keys, [B, shared, rows, D]; what such rows see; and the scale."""
    batch, heads, queries, width = q.shape
    groups = heads // max(shared, 1)
    of_rows = () if seen is None else seen.repeat(1, groups)
    row = dict(zip(("first", "stop"), of_rows, strict=False))
    by = 1 / math.sqrt(max(width, 1)) if scale is None else scale
    return q.reshape(batch, shared, groups * queries, width), row, by


def _tangents_of_heads(
    directions: Sequence[Tensor | None],
    results: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    softcap: float,
    seen: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """How attention and its log-sum-exp move. They are a fold's results, which attention's kernels computed.

    directions: of q, k and v. results: those of the op. seen: as in `_of_heads`.
    """
    out, lse, lse_low, out_low = results
    rows, row, by = _rows_of_heads(q, k.shape[1], scale, seen)
    row = {name: t.expand(rows.shape[:-1]) for name, t in row.items()}
    fold = _attention_of_head(softcap, seen is not None, False)
    arguments = fold._op_arguments(rows, k, row=row, column={"v": v}, scale=by)
    d_q, d_k, d_v = (None if t is None else t.flatten(0, 2) for t in directions)
    sums = in_full(out, out_low).to(lse.dtype).flatten(0, 2)
    found = lse.reshape(1, -1), sums, lse_low.reshape(1, -1)
    indices = lse.new_empty(0, lse.numel(), dtype=torch.int64)
    of_inputs = d_q, d_k, None, None, None, None, d_v, None
    d_lse, d_out = tangents(of_inputs, (*found, indices), *arguments)
    return d_out.reshape(out.shape), d_lse.reshape(lse.shape)


def attention_tangents(
    directions: Sequence[Tensor | None], results: Sequence[Tensor], *arguments: Any
) -> Any:
    """Forward mode of the op `attention` without bias and sinks (`tangents` in _ops/registry.py)."""
    q, k, v, _bias, _sinks, scale, softcap, left, right, _ = arguments
    seen = band(left, right).bounds(q.shape[2], k.shape[2], q.device)
    return _tangents_of_heads(directions[:3], results, q, k, v, scale, softcap, seen)


def varlen_tangents(directions: Sequence[Tensor | None], results: Sequence[Tensor], *arguments: Any) -> Any:
    """Forward mode of the op `attention_varlen` without sinks."""
    q, k, v, _sinks, of_q, of_k, scale, softcap, left, right, _, first, _ = arguments
    seen = seen_in_sequences(q, of_q, of_k, left, right, first)
    return _tangents_of_heads(directions[:3], results, q, k, v, scale, softcap, seen)


def _with_bias(
    fold: Statistics, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, row: dict[str, Tensor], by: float
) -> tuple[Tensor, Tensor]:
    """A head's results. The bias of some rows is a part of their scores: by * q k^T + I bias.

    So a score is a product of rows [by * q, I] and columns [k, bias^T], in the accumulation dtype.
    """
    real = torch.promote_types(q.dtype, torch.float32)
    found = []
    for first in range(0, max(len(q), 1), _ROWS_OF_BIAS):
        rows, of_rows = (t[first : first + _ROWS_OF_BIAS].to(real) for t in (q, bias))
        one = torch.eye(len(rows), dtype=real, device=q.device)
        found.append(
            fold._by_folds(
                torch.cat((by * rows, one), 1),
                torch.cat((k.to(real), of_rows.T), 1),
                row={name: t[first : first + _ROWS_OF_BIAS] for name, t in row.items()},
                column={"v": v.to(real)},
                scale=1.0,
            )
        )
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs).to(q.dtype), torch.cat(lses)


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
    seen = band(left, right).bounds(q.shape[2], k.shape[2], q.device)
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=q.dtype).masked_fill(~bias, -math.inf)
        excluded = bias == -math.inf
        least = _EXCLUDED / 4  # a number below is as good, and keeps a row of such numbers
        bias = torch.where(
            excluded, _EXCLUDED, bias.to(torch.promote_types(bias.dtype, torch.float32)).clamp(least)
        )
        bias = bias.expand(*q.shape[:3], k.shape[2])
    return _of_heads(q, k, v, sinks, scale, softcap, seen, bias)


def _attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    compensated: bool,
    first: int,
    tokens: int,
) -> tuple[Tensor, Tensor]:
    seen = seen_in_sequences(q, cu_seqlens_q, cu_seqlens_k, left, right, first)
    return _of_heads(q, k, v, sinks, scale, softcap, seen)


def _linear_distillation(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    reduction: str,
    kind: str,
    temperature: float,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
) -> tuple[Tensor]:
    operands, beta = (
        (x, weight.to(x.dtype), teacher_x, teacher_weight),
        0.5,
    )  # beta is of the loss jsd, which has no op
    fold = Distillation(operands, (None, None), kind, temperature, beta, None, mask, 0.0, workspace)
    return (fold.reduced(reduction),)


def _linear_distillation_parts(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    reduction: str,
    kind: str,
    temperature: float,
    of_x: bool,
    of_weight: bool,
    workspace: int,
) -> tuple[Tensor]:
    operands = x, weight, teacher_x, teacher_weight, mask
    return _linear_distillation(*operands, reduction, kind, temperature, False, of_x, workspace)


_FOLDS: dict[str, Callable[..., tuple[Tensor | None, ...]]] = {
    "attention": _attention,
    "attention_varlen": _attention_varlen,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_parts": _linear_cross_entropy_parts,
    "linear_distillation": _linear_distillation,
    "linear_distillation_parts": _linear_distillation_parts,
    "linear_log_probs": _linear_log_probs,
    "linear_target_logits": _linear_target_logits,
    "logsumexp_matmul": _logsumexp_matmul,
    "mlp": _mlp,
    "modified_attention": modified_attention,
}
