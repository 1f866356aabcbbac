"""The divergence of a student from a teacher, for TRL's distillation trainers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._validate import check_bool, check_positive, mismatch
from monoidreduce.functional import head_operands, linear_distillation, linear_log_probs, target_logits

__all__ = ["divergence", "divergence_of_candidates"]


def divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    beta: float,
    temperature: float = 1.0,
    student_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_final_logit_softcapping: float | None = None,
    *,
    entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """A replacement for TRL's `ChunkedDivergenceFunction.apply`, without logits in memory.

    Logits are logit_scale * (hidden @ weight^T + bias) / T.

    Args:
        student_hidden: [N, D].
        student_weight: [V, D].
        student_bias: [V].
        teacher_hidden, teacher_weight, teacher_bias: [N, E], [V, E] and [V], without gradients.
        beta: 0 selects "forward_kl" of `monoidreduce.linear_distillation`, 1 selects "reverse_kl". Values
            between are beta of "jsd": the mixture is beta times the teacher and 1 - beta times the student.
        temperature: T.
        student_logit_scale, teacher_logit_scale: positive. If they differ, the teacher's hidden states are
            multiplied by their ratio, which rounds them once.
        student_final_logit_softcapping, teacher_final_logit_softcapping: must be None.
        entropy: whether to return the student's entropy too. TRL's function has no such argument.

    Weights are cast to the dtype of the hidden states, or to autocast's dtype. If student and teacher differ
    in dtype, both use the promoted one. Biases stay in the accumulation dtype, except in the entropy.

    Returns:
        The divergence [N], and the student's entropy [N] or None. The entropy has no gradient and takes one
        more pass over the student's head. Both are at temperature T, in nats.

    Raises:
        ValueError: a softcap, or a logit scale that is not more than 0.
        TypeError: entropy is neither True nor False.
        TypeError, ValueError: as `monoidreduce.linear_distillation`.
    """
    check_bool("entropy", entropy)
    caps = {"student": student_final_logit_softcapping, "teacher": teacher_final_logit_softcapping}
    for name, cap in caps.items():
        if cap is not None:
            expected = "None: use TRL's trainer without monoidreduce's apply() for such a model"
            raise ValueError(mismatch(f"{name}_final_logit_softcapping", expected, cap))
    scales = {"student": student_logit_scale, "teacher": teacher_logit_scale}
    for name, scale in scales.items():
        check_positive(f"{name}_logit_scale", scale)
    if not torch.is_autocast_enabled(student_hidden.device.type):
        dtype = torch.promote_types(student_hidden.dtype, teacher_hidden.dtype)
        student_hidden, student_weight = student_hidden.to(dtype), student_weight.to(dtype)
        teacher_hidden, teacher_weight = teacher_hidden.to(dtype), teacher_weight.to(dtype)
    exact = accumulation_dtype(student_hidden.dtype)
    student_bias = None if student_bias is None else student_bias.to(exact)
    teacher_bias = None if teacher_bias is None else teacher_bias.to(exact)
    ratio = teacher_logit_scale / student_logit_scale
    if ratio != 1:
        teacher_hidden = ratio * teacher_hidden
        teacher_bias = None if teacher_bias is None else ratio * teacher_bias
    temperature = temperature / student_logit_scale
    loss: dict[str, Any] = {"loss": {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")}
    if loss["loss"] == "jsd":
        loss["beta"] = beta
    found = linear_distillation(
        student_hidden,
        student_weight,
        teacher_hidden,
        teacher_weight,
        bias=student_bias,
        teacher_bias=teacher_bias,
        temperature=temperature,
        reduction="none",
        **loss,
    )
    if not entropy:
        return found, None
    with torch.no_grad():
        targets = torch.zeros(len(student_hidden), dtype=torch.int64, device=student_hidden.device)
        bias = None if student_bias is None else student_bias.to(student_hidden.dtype)
        of_student = linear_log_probs(
            student_hidden, student_weight, targets, bias=bias, temperature=temperature, entropy=True
        )
    return found, of_student.entropy


def divergence_of_candidates(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
    candidates: Tensor,
    teacher_log_probs: Tensor,
    known: Tensor,
    beta: float,
    rest: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The divergence from a teacher of which a few log-probabilities of each token are known.

    Logits are softcap(logit_scale * (hidden @ weight^T + bias)) / T. None are stored: the candidates' are dot
    products of their own.

    Args:
        hidden: [N, D].
        weight: [V, D]. It and the bias are cast to the dtype of hidden, or to autocast's dtype.
        bias: [V].
        logit_scale: positive.
        softcap: c replaces each logit by c * tanh(logit / c).
        temperature: T, of the student's logits.
        candidates: [N, K] classes; those that are known are distinct in a row.
        teacher_log_probs: [N, K], without gradients.
        known: [N, K] bool; what is False is no candidate.
        beta: 0 is the KL divergence of the teacher from the student, 1 of the student from the teacher.
            Between them it is beta of the Jensen-Shannon divergence: the mixture is beta times the teacher
            and 1 - beta times the student.
        rest: all other classes together are one more candidate. Otherwise both distributions are those among
            the candidates.

    Returns:
        Three tensors [N]: the divergence; and, without gradients, the entropy of the student over all classes
        and that of the teacher over the candidates. The student's takes one more pass over the head.

    Raises:
        ValueError: a logit scale that is not more than 0.
    """
    if not torch.is_autocast_enabled(hidden.device.type):
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    hidden, weight, bias, _ = head_operands(hidden, weight, bias)
    # c tanh(s z / c) / T = c' tanh(z / c') / T' with c' = c / s and T' = T / s, which rounds no bias.
    scale = check_positive("logit_scale", logit_scale)
    softcap, temperature = None if softcap is None else softcap / scale, temperature / scale
    label = torch.where(known, candidates, -1)
    numbers = (1.0, softcap or 0.0, temperature)
    lse, logits = target_logits(hidden, weight, bias, label, None, numbers, True, None)
    log_q, log_p = (_distribution(t, known, rest) for t in (logits - lse[:, None], teacher_log_probs))
    if beta == 0:
        found = _kl(log_p, log_q)
    elif beta == 1:
        found = _kl(log_q, log_p)
    else:
        log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
        found = beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)
    with torch.no_grad():
        targets = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        student = linear_log_probs(
            hidden, weight, targets, bias=bias, softcap=softcap, temperature=temperature, entropy=True
        ).entropy
    assert student is not None
    return found, student, -(log_p.exp() * log_p).sum(1)


_NEVER = -1e4  # the log-probability of what cannot be: e^_NEVER is 0, and _NEVER * 0 is 0
_LEAST_REST = 1e-7


def _distribution(log_probs: Tensor, known: Tensor, rest: bool) -> Tensor:
    """The log-probabilities [N, K] among the known candidates, or [N, K + 1] with those of the rest."""
    log_probs = log_probs.masked_fill(~known, _NEVER).clamp(min=_NEVER)
    whole = log_probs.logsumexp(1, keepdim=True)
    if not rest:
        return log_probs - whole
    return torch.cat((log_probs, torch.log(-torch.expm1(whole.clamp(max=-_LEAST_REST)))), 1)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """[N]: the KL divergence of p from q."""
    return (log_p.exp() * (log_p - log_q)).sum(1)
