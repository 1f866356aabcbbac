"""Losses without logits for TRL's trainers (tested with 1.9, 1.12, 1.15 and 1.16).

    from monoidreduce.integrations.trl import apply

    apply()
    trainer = GRPOTrainer(...)

TRL patches the models of some trainers with a fused head, which computes log-probabilities from chunks of
logits. `apply` replaces that function by `log_probs`, which stores no logits. `DistillationTrainer` and
`AsyncDistillationTrainer` call functions of their own on chunks of logits; `apply` replaces them by functions
that call `divergence` and `divergence_of_candidates`.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import trl
from torch import Tensor
from torch.distributed.tensor import DTensor

from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce.folds import stat
from monoidreduce.folds.statistics import statistics
from monoidreduce.functional import linear_log_probs
from monoidreduce.integrations._divergence import divergence, divergence_of_candidates

__all__ = ["apply", "divergence", "log_probs", "undo"]

VERSION = tuple(int(number) for number in re.findall(r"\d+", trl.__version__)[:2])
if VERSION < (1, 9):
    raise ImportError(
        f"trl: expected version 1.9 or later, got {trl.__version__}, whose trainers take the model's logits."
        " With it monoidreduce.integrations.transformers.apply(model, loss=False) replaces the attention"
    )

OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

# Trainers whose losses call a function that `apply` replaces, and the first TRL version in which they do.
REACHED = {
    "SFTTrainer": (1, 9),
    "AsyncGRPOTrainer": (1, 9),
    "DistillationTrainer": (1, 10),
    "AsyncDistillationTrainer": (1, 11),
    "DPOTrainer": (1, 15),
    "GMPOTrainer": (1, 15),
    "GRPOTrainer": (1, 15),
    "KTOTrainer": (1, 15),
    "RLOOTrainer": (1, 15),
}

_logger = logging.getLogger(__name__)


def apply() -> None:
    """Let TRL's trainers in this process compute log-probabilities and divergences by MonoidReduce.

    The first call logs a warning that names the trainers that use the replacements, and those of the
    installed TRL that do not and keep their logits. Do not use it with DeepSpeed's ZeRO-3, which frees the
    head's weight before the backward pass.

    Raises:
        ImportError: this version of TRL lacks one of the functions, or its arguments differ. Nothing is
            replaced.
    """
    if replace():
        reached, others = trainers()
        tested = "" if VERSION <= (1, 16) else ", which is not tested"
        _logger.warning(
            f"trl {trl.__version__}{tested}: monoidreduce computes the losses of {', '.join(reached)}."
            f" It replaces nothing in {', '.join(others)}."
            " monoidreduce.integrations.gkd has a GKDTrainer without logits."
        )


def undo() -> None:
    """Restore TRL's own functions."""
    for module_name, name, _ in _places():
        module = _imported(module_name)
        instead = getattr(module, name, None)
        if isinstance(instead, _InPlace):
            setattr(module, name, instead.theirs)


def trainers() -> tuple[list[str], list[str]]:
    """Names of the installed TRL's trainers: those that `apply` affects, and the others."""
    package = Path(trl.__file__).parent
    files = [*package.glob("trainer/*.py"), *package.glob("experimental/**/*.py")]
    declared = re.compile(r"^class ([A-Z]\w*Trainer)\(", re.MULTILINE)
    names = {name for file in files for name in declared.findall(file.read_text("utf-8"))}
    reached = {name for name in names if REACHED.get(name, (math.inf,)) <= VERSION}
    return sorted(reached), sorted(names - reached)


def replace() -> bool:
    """Replace TRL's functions; returns False if they already were. Raises as `apply` does."""
    found = []
    for module_name, name, ours in _places():
        module = _imported(module_name)
        if module is None:
            continue
        if not hasattr(module, name):
            raise ImportError(_unknown(f"{module_name}.{name}", "no such function"))
        theirs = getattr(module, name)
        if not isinstance(theirs, _InPlace):
            found.append((module, name, _InPlace(f"{module_name}.{name}", theirs, ours)))
    for module, name, instead in found:
        setattr(module, name, instead)
    return bool(found)


def _places() -> list[tuple[str, str, Callable[..., Any]]]:
    """The functions to replace in this version of TRL: (module, name in it, our function)."""
    newer = VERSION >= (1, 15)
    places: list[tuple[str, str, Callable[..., Any]]] = [
        ("trl.trainer.utils", "_ChunkedLogProbFunction", _log_probs if newer else _older_log_probs)
    ]
    if not newer:
        places.append(("trl.trainer.sft_trainer", "_chunked_cross_entropy_loss", _cross_entropy))
    if VERSION >= (1, 10):
        places.append(("trl.trainer.distillation_trainer", "_chunked_divergence_loss", _divergence))
    if VERSION >= (1, 11):
        of_candidates = "trl.experimental.async_distillation.async_distillation_trainer"
        places.append((of_candidates, "_chunked_jsd_loss", _divergence_of_candidates))
    return places


def _imported(name: str) -> ModuleType | None:
    """A module of TRL; None if it needs a package that is not installed, so that its trainer cannot run."""
    with warnings.catch_warnings():
        # That experimental trainers may change. It is for those who use one.
        warnings.simplefilter("ignore")
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] == "trl":
                raise ImportError(_unknown(name, "no such module")) from error
            return None


class _InPlace:
    """Takes the place of a TRL function or autograd.Function, and calls ours.

    Positional arguments are passed on by the names that they have in the installed TRL.
    """

    def __init__(self, name: str, theirs: Any, ours: Callable[..., Any]) -> None:
        self.theirs, self.ours = theirs, ours
        known = inspect.signature(ours).parameters
        # In TRL 1.15 `theirs.forward` is None if Triton is not installed.
        of = inspect.signature(getattr(theirs, "forward", theirs) or ours)
        self.names = [argument for argument in of.parameters if argument != "ctx"]
        needed = {argument for argument, p in known.items() if p.default is p.empty}
        if not needed <= set(self.names) <= set(known):
            raise ImportError(_unknown(name, f"it with the arguments {', '.join(self.names)}"))

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.ours(**dict(zip(self.names, args, strict=False)), **named)

    apply = __call__


def _unknown(name: str, found: str) -> str:
    return (
        f"trl: expected {name} as versions 1.9 to 1.16 have it, and {trl.__version__} has {found}."
        " With it monoidreduce.integrations.transformers.apply(model, loss=False) replaces the attention"
    )


# Replacements for TRL's functions. Their parameters are named as in TRL.


def _log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = OPTIONAL,
) -> Any:
    head = temperature, chunk_size, final_logit_softcapping, logit_scale
    return log_probs(hidden, weight, bias, targets, *head, outputs)


def _older_log_probs(
    last_hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    bias: Tensor | None = None,
) -> Any:
    """The signature of TRL 1.9 to 1.14; 1.13 added the bias."""
    head = temperature, chunk_size, final_logit_softcapping, logit_scale
    return log_probs(last_hidden, weight, bias, targets, *head, ("entropy",))[:2]


def _cross_entropy(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    chunk_size: int,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    lm_head_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, the number of tokens whose target has the largest logit, the sum of entropies, the number of
    tokens. All are over the tokens that are not ignored."""
    if shift_labels is None:
        assert labels is not None
        hidden_states, shift_labels = hidden_states[..., :-1, :], labels[..., 1:]
    hidden, targets = hidden_states.flatten(0, -2), shift_labels.flatten()
    head = lm_head_weight, lm_head_bias, targets, 1.0, chunk_size, final_logit_softcapping, logit_scale
    found, entropy, _, _, is_top1 = log_probs(hidden, *head, ("entropy", "is_top1"))
    assert entropy is not None and is_top1 is not None
    counted = targets != -100
    right = (is_top1 & counted).sum().float()
    return _mean(-found, counted, num_items_in_batch), right, entropy.detach().sum(), counted.sum()


def _divergence(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    chunk_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the sum of the student's entropies, the number of tokens.

    All over the completion's tokens.
    """
    counted = completion_mask != 0
    student, teacher = (
        (hidden[counted], _whole(weight), _whole(bias))
        for hidden, weight, bias in (
            (student_hidden_states, student_lm_head_weight, student_lm_head_bias),
            (teacher_hidden_states, teacher_lm_head_weight, teacher_lm_head_bias),
        )
    )
    found, entropy = divergence(
        *student,
        *teacher,
        beta,
        temperature,
        student_logit_scale,
        student_final_logit_softcapping,
        teacher_logit_scale,
        teacher_final_logit_softcapping,
        entropy=_needs_entropy.get(),
    )
    # NaN, so that nobody mistakes it for an entropy.
    summed = found.new_tensor(torch.nan) if entropy is None else entropy.sum()
    return _mean(found, counted, num_items_in_batch), summed, counted.sum()


def _divergence_of_candidates(
    hidden_valid: Tensor,
    lm_head_weight: Tensor,
    lm_head_bias: Tensor | None,
    logit_scale: float,
    final_logit_softcapping: float | None,
    target_ids: Tensor,
    teacher_target_logps: Tensor,
    valid_candidate_mask: Tensor,
    beta: float,
    temperature: float,
    add_tail_bucket: bool,
    teacher_id_idx: Tensor | None,
    num_teachers: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sums over tokens: of the divergence, of the same without gradients, and of the entropies of student and
    teacher. And for each of several teachers its number of tokens and their divergence and entropy,
    [3 * teachers]."""
    head = hidden_valid, lm_head_weight, lm_head_bias, logit_scale, final_logit_softcapping, temperature
    of_teacher = target_ids, teacher_target_logps, valid_candidate_mask
    found, *entropies = divergence_of_candidates(*head, *of_teacher, beta, add_tail_bucket)
    divergences, (of_student, entropy_of_teacher) = found.detach(), entropies
    of_each = divergences.new_zeros(num_teachers, 3)
    if teacher_id_idx is not None:
        numbers = torch.stack((torch.ones_like(divergences), divergences, entropy_of_teacher), 1)
        of_each = torch.nn.functional.one_hot(teacher_id_idx, num_teachers).to(numbers.dtype).T @ numbers
    sums = divergences.sum(), of_student.sum(), entropy_of_teacher.sum()
    return found.sum(), *sums, of_each.flatten()


def _mean(losses: Tensor, counted: Tensor, number: Tensor | int | None) -> Tensor:
    """The sum of the losses divided by `number`, or by the number of counted tokens; 0 if there are none."""
    if isinstance(number, Tensor):
        number = number.to(losses.device)
    return losses.sum() / (counted.sum().clamp(min=1) if number is None else number)


def _whole(parameter: Any) -> Any:
    """The full parameter; FSDP2 shards it as a DTensor."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


_needs_entropy = ContextVar("_needs_entropy", default=True)


@contextmanager
def without_entropy() -> Iterator[None]:
    """Context in which `_divergence` returns NaN for the student's entropy, which saves a pass over the head.

    It holds for the current thread.
    """
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
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """A replacement for TRL's `ChunkedLogProbFunction.apply`, without logits in memory.

    Logits are softcap(logit_scale * (hidden @ weight^T + bias)) / T.

    Args:
        hidden: [N, D].
        weight: [V, D]. It and the bias are cast to the dtype of hidden, or to autocast's dtype.
        bias: [V].
        targets: [N] class indices. -100 marks a token without a target; its results are 0.
        temperature: T.
        chunk_size: number of classes that TRL's function processes at a time; ignored here.
        softcap: c replaces each logit by c * tanh(logit / c).
        logit_scale: factor of the logits, before the softcap.
        outputs: names of the results to compute beside log_probs; the others are None. Unknown names are
            ignored.
        kept: the classes that the sampler kept, int32 [N, ceil(V / 32)], as of
            `monoidreduce.linear_log_probs`. TRL has no such argument, and its trainers do not pass it.

    Returns:
        Five tensors [N]: log_probs; entropy; log_sum_sq_probs = log sum_v p_v^2; mean_logits, the mean over
        all classes at temperature T, kept or not; is_top1, whether the target is the first of the largest
        logits. The first two are differentiable.

    Raises:
        TypeError, ValueError: as `monoidreduce.linear_log_probs`.
    """
    if not torch.is_autocast_enabled(hidden.device.type):
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    bias = None if bias is None else logit_scale * bias
    head: dict[str, Any] = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale}
    found = linear_log_probs(
        hidden, weight, targets, **head, temperature=temperature, kept=kept,
        entropy="entropy" in outputs, top1="is_top1" in outputs,
    )  # fmt: skip
    log_sum_sq_probs = mean_logits = None
    with torch.no_grad():
        if "log_sum_sq_probs" in outputs:  # sum p^2 = sum exp(2 z) / (sum exp z)^2
            doubled = linear_log_probs(
                hidden, weight, targets, **head, temperature=temperature / 2, kept=kept
            )
            log_sum_sq_probs = doubled.lse - 2 * found.lse
        if "mean_logits" in outputs:
            mean_logits = _mean_logits(hidden, weight, **head) / temperature
            mean_logits = mean_logits.masked_fill(targets == -100, 0)
    is_top1 = None if found.top1 is None else found.top1 == targets
    return found.log_probs, found.entropy, log_sum_sq_probs, mean_logits, is_top1


def _mean_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, logit_scale: float
) -> Tensor:
    """Mean logit of each row [N]. Without a softcap it is the product with the mean class vector."""
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
