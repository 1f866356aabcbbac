"""The log-sum-exp of a linear head's logits, and the logits of a few classes of each row, its targets.

A loss against several targets for each row is a function of these: sum_k p_k (lse - logit_k). The log-sum-exp
is that of `linear_log_probs`, by its kernels. The logits of the targets are dot products of their own, N K of
them. In backward each target has a part in one dlogit. On tensor cores, where dlogits are stored before they
are multiplied, that dlogit is written again with both parts. Elsewhere the targets' products are added to the
gradients.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C
from monoidreduce._ops.linear_loss import in_dtype_of
from monoidreduce._ops.log_probs import (
    LogProbsOpOptions,
    TargetTerms,
    log_probs_backward,
    log_probs_forward,
    log_probs_results,
    row_parts,
)
from monoidreduce._ops.memory import empty_statistics, launch_on
from monoidreduce._ops.registry import UNROUNDED, UNROUNDED_WEIGHT, Fold, register

__all__ = ["NO_TARGET", "TargetLogitsOpOptions"]

NO_TARGET = -1

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class TargetLogitsOpOptions(NamedTuple):
    """The options of the op.

    lse_of_ignored: rows without targets get a log-sum-exp too. The others are those of `LogProbsOpOptions`.
    """

    logit_scale: float
    softcap: float
    temperature: float
    first_class: int
    classes: int
    lse_of_ignored: bool
    keep: bool
    x_differentiated: bool
    workspace: int | None

    @property
    def of_log_probs(self) -> LogProbsOpOptions:
        return LogProbsOpOptions(
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            temperature=self.temperature,
            ignore_index=NO_TARGET,
            top1=False,
            first_class=self.first_class,
            classes=self.classes,
            keep=self.keep,
            x_differentiated=self.x_differentiated,
            workspace=self.workspace,
        )


def _some_target(weight: Tensor, target: Tensor, options: TargetLogitsOpOptions) -> Tensor:
    """One target of each row [N], for the kernels of log-probabilities; NO_TARGET leaves the row out."""
    classes = len(weight) if options.classes < 0 else options.classes
    some = target.amax(1) if target.shape[1] else target.new_full(target.shape[:1], NO_TARGET)
    return some.clamp(min=0) if options.lse_of_ignored and classes else some


def target_logits_results(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperatures: Tensor | None,
    options: TargetLogitsOpOptions,
) -> Results:
    """Empty tensors like the results of the forward op, for tracing.

    They are lse [N], logits [N, K], lse_low [N], the log-probability of one target [N]; and what forward
    saves (see log_probs_results).
    """
    of_head = log_probs_results(x, weight, bias, target, temperatures, None, options.of_log_probs)
    log_probs, _, lse, lse_low, _, row_max, saved = of_head
    return lse, lse.new_empty(target.shape), lse_low, log_probs, row_max, saved


def target_logits_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperatures: Tensor | None,
    options: TargetLogitsOpOptions,
) -> Results:
    """target: [N, K], distinct in a row, or NO_TARGET. The logit of a target that is not among these classes,
    or is NO_TARGET, is 0. Logits are divided by the temperature, [N] if each row has its own."""
    some = _some_target(weight, target, options)
    of_head = log_probs_forward(x, weight, bias, some, temperatures, None, options.of_log_probs)
    log_probs, _, lse, lse_low, _, row_max, saved = of_head
    logits = _logits(x, in_dtype_of(x, weight), bias, target, options) / _divisor(temperatures, options)
    return lse, logits, lse_low, log_probs, row_max, saved


def _divisor(temperatures: Tensor | None, options: TargetLogitsOpOptions) -> Tensor | float:
    return options.temperature if temperatures is None else temperatures[:, None]


def _logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: TargetLogitsOpOptions
) -> Tensor:
    """[N, K], at temperature 1."""
    here, index = _own(weight, target, options)
    logits = options.logit_scale * _scores(x, weight, target, here, index, options.first_class)
    if bias is not None and len(bias):
        logits = logits + bias.to(logits.dtype)[index]
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return torch.where(here, logits, 0)


def _own(weight: Tensor, target: Tensor, options: TargetLogitsOpOptions) -> tuple[Tensor, Tensor]:
    """Whether each target is among these classes, and its index there; 0 if not."""
    index = target - options.first_class
    here = (target >= 0) & (index >= 0) & (index < len(weight))
    return here, torch.where(here, index, 0)


def _scores(
    x: Tensor, weight: Tensor, target: Tensor, here: Tensor, index: Tensor, first_class: int
) -> Tensor:
    """The dot products [N, K], summed in the accumulation dtype."""
    scores = empty_statistics(x, *target.shape)
    if x.is_cuda:
        _C.target_scores(x, weight, target.contiguous(), scores, first_class, *launch_on(x))
        return scores
    if not scores.numel() or not len(weight):
        return scores.zero_()
    for part in row_parts(x, target.shape[1]):
        rows = weight[index[part]].to(scores.dtype)  # [rows, K, D]
        torch.bmm(rows, x[part, :, None].to(scores.dtype), out=scores[part, :, None])
    return scores.masked_fill_(~here, 0)


def target_logits_backward(
    grad_lse: Tensor | None,
    grad_logits: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperatures: Tensor | None,
    lse: Tensor,
    logits: Tensor,
    lse_low: Tensor,
    log_probs: Tensor,
    row_max: Tensor,
    saved: Tensor,
    options: TargetLogitsOpOptions,
    needed: list[bool],
    unrounded: bool = False,
    unrounded_weight: bool = False,
    sum_to: Tensor | None = None,
    consumes: bool = False,
) -> list[Tensor]:
    if grad_lse is None:
        grad_lse = torch.zeros_like(lse)
    grad_logits = torch.zeros_like(logits) if grad_logits is None else grad_logits
    here, index = _own(weight, target, options)
    divisor = _divisor(temperatures, options)
    # Of a logit at its temperature by the one before the softcap.
    slope = 1 - (logits * divisor / options.softcap) ** 2 if options.softcap else torch.ones_like(logits)
    slope = slope / divisor
    by_logit = torch.where(here, slope * grad_logits, 0)
    # A softmax probability near 1, less the target's part, needs the digits of expm1.
    log_share = logits - lse[:, None] - lse_low[:, None]
    of_lse = torch.where(grad_lse[:, None] == 0, 0, grad_lse[:, None] * torch.expm1(log_share))
    whole = options.logit_scale * slope * (of_lse + (grad_lse[:, None] + grad_logits))
    dlogits = torch.where(here, whole, 0)
    own = torch.where(here, index, NO_TARGET)
    terms = TargetTerms(own, by_logit, dlogits.contiguous(), options.logit_scale)
    some = _some_target(weight, target, options)
    return log_probs_backward(
        None,
        None,
        grad_lse,
        x,
        weight,
        bias,
        some,
        temperatures,
        None,
        log_probs,
        torch.zeros_like(lse),
        lse,
        lse_low,
        row_max,
        saved,
        options.of_log_probs,
        needed,
        unrounded,
        unrounded_weight,
        sum_to,
        consumes,
        terms,
    )


register(
    "linear_target_logits",
    inputs="Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? temperatures",
    options=TargetLogitsOpOptions,
    outputs="lse, logits, lse_low, log_probs, frames, kept",
    differentiable="lse, logits",
    residuals="lse, logits, lse_low, log_probs, frames, kept",
    constants="target, temperatures",
    forward=target_logits_forward,
    fake=target_logits_results,
    backward=target_logits_backward,
    fold=Fold(a="x", b="weight"),
    of_shard=lambda given: {"keep": False},
    in_place=functools.partial(target_logits_backward, consumes=True),
    backward_options=f"{UNROUNDED}, {UNROUNDED_WEIGHT}",
    calls="linear_cross_entropy with target_probs, linear_topk",
)
