"""Distillation with options that the fused fold does not support: biases, Jensen-Shannon divergence, hard
labels.

It is two folds of `statistics` for each loss. The first computes the log-sum-exps, without a gradient. The
second gets them as data of rows, so that it can form differences of log-probabilities before it sums. On a
Hopper GPU the loss "jsd" has an op of its own, for the calls that `_ops/stored_scores.py` names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from monoidreduce._dynamo import are_symbols, as_tensor
from monoidreduce._ops import stored_scores
from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._ops.registry import any_requires_grad, call_op
from monoidreduce._torch_private import can_read
from monoidreduce._validate import mismatch
from monoidreduce.folds import stat
from monoidreduce.folds.statistics import Statistics, statistics

__all__ = ["Distillation"]


# The parts of each loss. s, t: log-probabilities of a class by student and teacher. p, q: their softmaxes.


def _cross_entropy(s: Any, t: Any, p: Any, q: Any, *_: Any) -> dict[str, Any]:
    return dict(of_teacher=q.mean(-s), student=p.logsumexp)


def _forward_kl(s: Any, t: Any, p: Any, q: Any, *_: Any) -> dict[str, Any]:
    return dict(of_teacher=q.mean(t - s), student=p.logsumexp, teacher=q.logsumexp)


def _reverse_kl(s: Any, t: Any, p: Any, q: Any, *_: Any) -> dict[str, Any]:
    return dict(of_student=p.mean(s - t), student=p.logsumexp, teacher=q.logsumexp)


def _jsd(s: Any, t: Any, _p: Any, _q: Any, log_beta: Any, log_rest: Any) -> dict[str, Any]:
    """m = beta q + (1 - beta) p. Let r = log((1 - beta) p / (beta q)). Then log(q / m) = -log(beta) -
    softplus(r) and log(p / m) = -log(1 - beta) - softplus(-r). Their gradients with respect to r cancel, so r
    is detached.

    Since s and t are log-probabilities, the softmaxes are just exp(s) and exp(t). Totals of these need no row
    max, so a kernel has enough registers; means of softmaxes spilled 984 bytes on sm_90. A class that is
    excluded in one distribution has an infinite ratio. A row with NaN has masses that are NaN.
    """
    ratio = (s - t + log_rest - log_beta).detach()
    # softplus(r) = relu(r) + both; softplus(-r) = relu(-r) + both.
    both = torch.log1p(torch.exp(-ratio.abs()))
    p, q = torch.exp(s), torch.exp(t)
    return dict(
        of_teacher=stat.total(q * torch.where(q > 0, -log_beta - F.relu(ratio) - both, 0.0)),
        of_student=stat.total(p * torch.where(p > 0, -log_rest - F.relu(-ratio) - both, 0.0)),
        teacher_mass=stat.total(q),
        student_mass=stat.total(p),
    )


LOSSES: dict[str, Callable[..., dict[str, Any]]] = {
    "cross_entropy": _cross_entropy,
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
}


def _lse_fold(biased: bool, hard: bool) -> Statistics:
    """The first fold: log-sum-exps of student, teacher and, with hard labels, of student at temperature 1."""

    def lse(score: Any, other: Any, inverse: Any) -> dict[str, Any]:
        scores = {"student": score * inverse, "teacher": other * inverse} | ({"hard": score} if hard else {})
        return {name: stat.softmax(of).logsumexp for name, of in scores.items()}

    def biased_lse(score: Any, other: Any, inverse: Any, bias: Any, teacher_bias: Any) -> dict[str, Any]:
        return lse(score + bias, other + teacher_bias, inverse)

    return statistics(biased_lse if biased else lse)


def _loss_fold(loss: str, biased: bool, hard: bool) -> Statistics:
    """The second fold: the parts of a loss.

    Of the function's arguments, `inverse` is 1 / temperature, and the six data of rows after it are
    log-sum-exps in two words each. There are two functions, because tracing uses the names in a function's
    own signature.
    """
    parts = LOSSES[loss]

    def distillation(
        score: Any,
        other: Any,
        column: Any,
        target: Any,
        inverse: Any,
        student: Any,
        student_low: Any,
        teacher: Any,
        teacher_low: Any,
        at_one: Any,
        at_one_low: Any,
        log_beta: Any,
        log_rest: Any,
    ) -> dict[str, Any]:
        s, t = score * inverse - student - student_low, other * inverse - teacher - teacher_low
        found = parts(s, t, stat.softmax(s), stat.softmax(t), log_beta, log_rest)
        if hard:
            log_prob = score - at_one - at_one_low
            found["target"] = stat.total(torch.where(column == target, log_prob, 0.0))
            found["hard"] = stat.softmax(log_prob).logsumexp
        return found

    def biased_distillation(
        score: Any,
        other: Any,
        column: Any,
        target: Any,
        inverse: Any,
        student: Any,
        student_low: Any,
        teacher: Any,
        teacher_low: Any,
        at_one: Any,
        at_one_low: Any,
        log_beta: Any,
        log_rest: Any,
        bias: Any,
        teacher_bias: Any,
    ) -> dict[str, Any]:
        known = student, student_low, teacher, teacher_low, at_one, at_one_low
        biased = score + bias, other + teacher_bias
        return distillation(*biased, column, target, inverse, *known, log_beta, log_rest)

    return statistics(biased_distillation if biased else distillation)


KINDS = [(biased, hard) for biased in (False, True) for hard in (False, True)]
_LSE = {kind: _lse_fold(*kind) for kind in KINDS}
_FOLDS = {(loss, kind): _loss_fold(loss, *kind) for loss in LOSSES for kind in KINDS}


def _of_mass(total: Tensor, mass: Tensor) -> Tensor:
    """total / mass for a mass that is 1 up to rounding: the value of total, with the quotient's gradient."""
    return total + total.detach() * (1 - mass)


def _of_rows(temperature: float, beta: float, place: dict[str, Any]) -> list[Tensor]:
    """1 / temperature, log(beta) and log(1 - beta), as tensors [1]."""
    if torch.compiler.is_dynamo_compiling() and any(are_symbols((temperature, beta))):
        of_call = as_tensor(temperature), as_tensor(beta)
        tensors = of_call[0].reciprocal(), of_call[1].log(), of_call[1].neg().log1p()
        return [torch.ones(1, **place) * t for t in tensors]
    numbers = 1 / temperature, math.log(beta), math.log1p(-beta)
    return [torch.full((1,), number, **place) for number in numbers]


class Distillation:
    """The per-row losses of a call whose arguments `functional.linear_distillation` has checked.

    rows [N, D], weight [V, D], teacher_rows [N, E], teacher_weight [V, E], bias and teacher_bias [V],
    target [N] int64, used [N] bool.
    """

    def __init__(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        biases: tuple[Tensor | None, Tensor | None],
        loss: str,
        temperature: float,
        beta: float,
        target: Tensor | None,
        used: Tensor | None,
        hard_weight: float,
        workspace: int | None,
    ) -> None:
        rows, weight, teacher_rows, teacher_weight = tensors
        if used is not None:  # unused tokens must not matter, even if they hold NaN
            rows, teacher_rows = (torch.where(used[:, None], t, 0) for t in (rows, teacher_rows))
        self.operands = rows, weight, teacher_rows, teacher_weight
        self.loss, self.beta, self.hard_weight, self.used = loss, beta, hard_weight, used
        self.target, self.classes, self.workspace = target, len(weight), workspace
        self.temperature = temperature
        place: Any = {"dtype": accumulation_dtype(rows.dtype), "device": rows.device}
        names = "inverse", "log_beta", "log_rest"
        self.row = {
            name: number.expand(len(rows))
            for name, number in zip(names, _of_rows(temperature, beta, place), strict=True)
        }
        self.column: dict[str, Tensor] = {}
        if any(bias is not None for bias in biases):
            of_classes = torch.zeros(1, **place).expand(self.classes)
            for name, bias in zip(("bias", "teacher_bias"), biases, strict=True):
                self.column[name] = of_classes if bias is None else bias.to(place["dtype"])
        kind = len(self.column) > 0, target is not None and hard_weight > 0
        self.outside = self.checked(target) if target is not None and hard_weight > 0 else None
        self.lse, self.fold = _LSE[kind], _FOLDS[loss, kind]

    def data(self, lse: Any, low: Any) -> dict[str, Any]:
        """Keyword arguments of the second fold. lse, low: the two words of the log-sum-exps."""
        known = {"student": lse.student, "student_low": low.student}
        known |= {"teacher": lse.teacher, "teacher_low": low.teacher}
        hard = hasattr(lse, "hard")
        known |= {
            "at_one": lse.hard if hard else lse.student,
            "at_one_low": low.hard if hard else low.student,
        }
        if (target := self.target) is None:
            target = self.row["inverse"].new_zeros(len(self.operands[0]), dtype=torch.int64)
        return {
            # target is passed as plain data, not as label: `used` already excludes ignored tokens.
            "row": self.row | known | {"target": target},
            "column": self.column,
            "workspace": self.workspace,
        }

    def losses(self) -> Tensor:
        """The losses [N]; 0 for tokens that do not count."""
        with torch.no_grad():
            constants = {name: t.detach() for name, t in self.column.items()}
            inverse = {"inverse": self.row["inverse"]}
            operands = [t.detach() for t in self.operands]  # of tangents too
            lse, low = self.lse._in_two_words(*operands, row=inverse, column=constants)
        found = self.fold(*self.operands, **self.data(lse, low))
        soft: Tensor = self.soft(found)
        if self.outside is not None:
            hard = (found.hard - found.target).masked_fill(self.outside, math.nan)
            soft = (1 - self.hard_weight) * soft + self.hard_weight * hard
        return soft if self.used is None else torch.where(self.used, soft, 0)

    def reduced(self, reduction: str) -> Tensor:
        if self.obstacle(reduction) is None:
            return self.stored(reduction == "mean")
        losses = self.losses()
        if reduction == "none":
            return losses
        total = losses.sum()
        if reduction == "sum":
            return total
        return total / (max(len(losses), 1) if self.used is None else self.used.sum().clamp(min=1))

    def obstacle(self, reduction: str) -> str | None:
        """Why the op that stores scores cannot be used; None if it can."""
        folds = len(self.column) > 0 or self.outside is not None
        return stored_scores.obstacle(self.operands, self.loss, reduction, folds)

    def stored(self, mean: bool) -> Tensor:
        """The sum or the mean of the losses, by the op that stores scores."""
        wanted = [torch.is_grad_enabled() and any_requires_grad((t,)) for t in self.operands[:2]]
        numbers = (mean, self.temperature, self.beta, wanted, self.workspace)
        loss: Tensor = call_op("linear_jsd", *self.operands, self.used, *numbers)[0]
        return loss

    def soft(self, found: Any) -> Any:
        """The soft loss of each row, from the results of the second fold.

        found.student and found.teacher are log-sum-exps of log-probabilities: 0 up to rounding, but their
        gradients are needed.
        """
        if self.loss == "jsd":
            of_teacher = _of_mass(found.of_teacher, found.teacher_mass)
            return self.beta * of_teacher + (1 - self.beta) * _of_mass(found.of_student, found.student_mass)
        if self.loss == "cross_entropy":
            return found.of_teacher + found.student
        if self.loss == "forward_kl":
            return found.of_teacher + (found.student - found.teacher)
        return found.of_student + (found.teacher - found.student)

    def checked(self, target: Tensor) -> Tensor:
        """A mask of targets that are not classes. On a CPU these raise IndexError if values can be read."""
        outside = (target < 0) | (target >= self.classes)
        outside = outside if self.used is None else outside & self.used
        if can_read(target) and outside.any():
            at = int(outside.nonzero()[0])
            expected = f"a class in [0, {self.classes}) or ignore_index"
            raise IndexError(mismatch(f"target[{at}]", expected, int(target[at])))
        return outside
