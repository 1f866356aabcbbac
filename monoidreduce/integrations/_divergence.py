"""The divergence of a student from a teacher, for TRL's distillation trainers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._validate import check_bool, check_positive, mismatch
from monoidreduce.functional import linear_distillation, linear_log_probs

__all__ = ["divergence"]


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
