"""Losses without logits for TRL's trainers (tested with 1.16): SFT, DPO, KTO, GRPO, RLOO and distillation.

    from monoidreduce.integrations.trl import apply

    apply()
    trainer = GRPOTrainer(...)

The trainers give their models a fused head, which calls one function on chunks of logits. `apply` puts
`log_probs` in its place, which stores no logits. `DistillationTrainer` calls another one on chunks of the
student's and the teacher's logits. `apply` puts `divergence` in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import trl.trainer.distillation_trainer as trl_distillation
import trl.trainer.utils as trl_utils
from torch import Tensor

from monoidreduce import stat
from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce.functional import linear_log_probs
from monoidreduce.integrations._divergence import divergence
from monoidreduce.statistics import statistics

__all__ = ["apply", "divergence", "log_probs"]

REPLACED = "_ChunkedLogProbFunction"
REPLACED_DIVERGENCE = "ChunkedDivergenceFunction"
OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def apply() -> None:
    """Let TRL's trainers, in this process, compute log-probabilities and divergences by MonoidReduce.

    Not for DeepSpeed's ZeRO-3, which takes the weight of the head away before the backward pass.

    Raises:
        ImportError: this version of TRL has not the functions to replace.
    """
    places = {(trl_utils, REPLACED): _LogProbs, (trl_distillation, REPLACED_DIVERGENCE): _Divergence}
    for module, name in places:
        if not hasattr(module, name):
            raise ImportError(f"trl: expected a version that has {module.__name__}.{name}, such as 1.16")
    for (module, name), ours in places.items():
        setattr(module, name, ours)


# In place of autograd functions: ours have derivatives of their own.


class _LogProbs:
    @staticmethod
    def apply(*args: Any) -> Any:
        return log_probs(*args)


class _Divergence:
    @staticmethod
    def apply(*args: Any) -> Any:
        found, entropy = divergence(*args, entropy=_needs_entropy.get())
        # TRL sums it up anyway; NaN, so that nobody takes that for an entropy.
        return found, torch.full_like(found, torch.nan) if entropy is None else entropy


_needs_entropy = ContextVar("_needs_entropy", default=True)


@contextmanager
def without_entropy() -> Iterator[None]:
    """Within it, in this thread, TRL's loss of hidden states has NaN in place of the student's entropy."""
    token = _needs_entropy.set(False)
    try:
        yield
    finally:
        _needs_entropy.reset(token)


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = OPTIONAL,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """TRL's `ChunkedLogProbFunction.apply`. Logits are softcap(logit_scale * (hidden @ weight^T + bias)) / T.

    Args:
        hidden: [N, D].
        weight: [V, D]. It and the bias take part in the dtype of hidden, or that of autocast.
        bias: [V].
        targets: [N] class indices; -100 for a token without one, whose results are 0.
        temperature: T.
        chunk_size: of TRL's function, which has that many classes at a time; not used.
        softcap: c replaces each logit by c * tanh(logit / c).
        logit_scale: of the logits, before the softcap.
        outputs: which results beside the first are computed; others are None, other names count for nothing.

    Returns:
        log_probs; entropy; log_sum_sq_probs, log sum_v p_v^2; mean_logits, over classes and with T; is_top1:
        is the target the first of the largest logits. Each is [N]. The first two are differentiable.

    Raises:
        TypeError, ValueError: as `monoidreduce.linear_log_probs`.
    """
    if not torch.is_autocast_enabled(hidden.device.type):
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    bias = None if bias is None else logit_scale * bias
    head: dict[str, Any] = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale}
    found = linear_log_probs(
        hidden, weight, targets, **head, temperature=temperature,
        entropy="entropy" in outputs, top1="is_top1" in outputs,
    )  # fmt: skip
    log_sum_sq_probs = mean_logits = None
    with torch.no_grad():
        if "log_sum_sq_probs" in outputs:  # sum p^2 = sum exp(2 z) / (sum exp z)^2
            doubled = linear_log_probs(hidden, weight, targets, **head, temperature=temperature / 2)
            log_sum_sq_probs = doubled.lse - 2 * found.lse
        if "mean_logits" in outputs:
            mean_logits = _mean_logits(hidden, weight, **head) / temperature
            mean_logits = mean_logits.masked_fill(targets == -100, 0)
    is_top1 = None if found.top1 is None else found.top1 == targets
    return found.log_probs, found.entropy, log_sum_sq_probs, mean_logits, is_top1


def _mean_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, logit_scale: float
) -> Tensor:
    """[N]: without a softcap the product with the mean of the classes, since logits are linear in them."""
    dtype = accumulation_dtype(hidden.dtype)
    bias = hidden.new_zeros(1, dtype=dtype) if bias is None else bias.to(dtype)
    if softcap is None:
        return logit_scale * (hidden.to(dtype) @ weight.mean(0, dtype=dtype)) + bias.mean()
    column = {"bias": (bias / softcap).expand(len(weight))}
    sums = _sum_of_tanh(hidden, weight, scale=logit_scale / softcap, column=column)
    mean: Tensor = softcap / len(weight) * sums.sum
    return mean


@statistics
def _sum_of_tanh(score: Tensor, bias: Tensor) -> dict[str, Tensor]:
    return dict(sum=stat.total(torch.tanh(score + bias)))
