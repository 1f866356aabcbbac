"""`linear_topk` and `linear_sample`: the most likely classes and a sample of a head whose logits are never
stored. Both are folds of `statistics`."""

from __future__ import annotations

import inspect
import math
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from monoidreduce import _yards
from monoidreduce._dynamo import are_symbols, as_tensor
from monoidreduce._keywords import refuse
from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._results import exported
from monoidreduce._torch_private import has_tangent
from monoidreduce._validate import (
    INTEGERS,
    LEAST_FACTOR,
    MOST_FACTOR,
    check_bool,
    check_factor,
    check_int,
    check_positive,
    is_dtensor,
    mismatch,
)
from monoidreduce.classes import words_of_rows
from monoidreduce.folds import stat
from monoidreduce.folds.kept_classes import in_64_bits, is_kept, shifts
from monoidreduce.folds.program.program import MOST
from monoidreduce.folds.statistics import Statistics
from monoidreduce.functional import (
    _differentiated,
    _like_rows,
    _temperatures,
    check_index,
    head_operands,
    refuse_over_ranks,
    softcap_value,
    target_logits,
    workspace_bytes,
)

if TYPE_CHECKING:
    from monoidreduce.ranks import RanksOrGroup

__all__ = ["Sample", "TopK", "linear_sample", "linear_topk"]

_SEED = "an int of 64 bits, or a 0-d tensor of an integer dtype"


@exported
class TopK(NamedTuple):
    """Results of `linear_topk`. Those that are not indices are in the accumulation dtype.

    Attributes:
        log_probs: [..., k], the k largest log-probabilities, in descending order; -inf beyond the last class.
        index: [..., k] int64, their classes; of equal logits the lower class comes first. -1 beyond the last
            class.
        lse: [...], log-sum-exp of the logits divided by the temperature.
    """

    log_probs: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index
    lse: Tensor


@exported
class Sample(NamedTuple):
    """Results of `linear_sample`, [...] each.

    Attributes:
        index: int64, the sampled class; -1 if there is none.
        log_prob: its log-probability, in the accumulation dtype; -inf if there is no class.
        entropy: entropy of the distribution in nats, in the accumulation dtype; None if it was not asked for.
    """

    index: Tensor  # type: ignore[assignment]  # hides tuple.index
    log_prob: Tensor
    entropy: Tensor | None


Kind = tuple[bool, ...]  # of a call: which of the data it has that not all calls have


def _logit(score: Any, inverse: Any, cap: Any, bias: Any) -> Any:
    """The logit divided by the temperature. inverse: 1 / temperature."""
    logit = score if bias is None else score + bias
    return (logit if cap is None else cap * torch.tanh(logit / cap)) * inverse


def _topk_fold(k: int, kind: Kind) -> Statistics:
    def linear_topk(score: Any, inverse: Any, *, bias: Any, cap: Any) -> dict[str, Any]:
        logit = _logit(score, inverse, cap, bias)
        return {"best": stat.largest(logit, k), "lse": stat.softmax(logit).logsumexp}

    return _fold_of(linear_topk, kind)


def _sample_fold(entropy: bool, kind: Kind) -> Statistics:
    """noise: factor of the random numbers of a row, 0 or 1; 1 without it."""

    def linear_sample(
        score: Any,
        row: Any,
        column: Any,
        inverse: Any,
        seed: Any,
        *,
        bias: Any,
        cap: Any,
        noise: Any,
        shift: Any,
    ) -> dict[str, Any]:
        logit = _logit(score, inverse, cap, bias)
        if shift is not None:
            logit = torch.where(is_kept(row, column, shift), logit, -math.inf)
        gumbel = -torch.log(-torch.log(stat.uniform(seed)))
        noisy = logit + (gumbel if noise is None else noise * gumbel)
        p = stat.softmax(logit)
        found = {"best": stat._largest_by(logit, noisy), "lse": p.logsumexp}
        return {**found, "entropy": p.entropy} if entropy else found

    return _fold_of(linear_sample, kind)


def _fold_of(function: Any, kind: Kind) -> Statistics:
    """The fold of a function for calls that pass only some of its keyword arguments.

    kind: for each keyword argument, whether such calls pass it. The others get the default None, since
    `Statistics` takes an argument with a default for a constant and not for data.
    """
    named = inspect.getfullargspec(function).kwonlyargs
    function.__kwdefaults__ = {name: None for name, given in zip(named, kind, strict=True) if not given}
    return Statistics(function)


_BOOLS = (False, True)
# Numbers of classes that are found; a call uses the next one. So few programs are compiled.
_COUNTS = tuple(2**n for n in range(MOST.bit_length()))
_TOPK = {(k, kind): _topk_fold(k, kind) for k in _COUNTS for kind in product(_BOOLS, repeat=2)}
_SAMPLE = {
    (entropy, kind): _sample_fold(entropy, kind) for entropy in _BOOLS for kind in product(_BOOLS, repeat=4)
}


class _Head:
    """The checked arguments that both operators have.

    rows [N, D], weight [V, D]; row and column: data of the tokens [N] and of the classes [V], by name. real:
    the accumulation dtype.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        logit_scale: float,
    ) -> None:
        self.x = x
        self.rows, self.weight, bias, _ = head_operands(x, weight, bias)
        self.real, self.scale = accumulation_dtype(x.dtype), check_factor("logit_scale", logit_scale)
        self.bias, self.softcap = bias, softcap_value(softcap)
        self.row = {} if softcap is None else {"cap": self.of_rows(self.softcap)}
        self.column = {} if bias is None else {"bias": bias.to(self.real)}

    def has(self, *names: str) -> Kind:
        """Whether the call has these data."""
        return tuple([name in self.row or name in self.column for name in names])

    def of_rows(self, number: float) -> Tensor:
        """The number for each token."""
        place: Any = {"dtype": self.real, "device": self.rows.device}
        if torch.compiler.is_dynamo_compiling() and any(are_symbols((number,))):
            return torch.ones(self.rows.shape[0], **place) * as_tensor(number)
        return torch.full((self.rows.shape[0],), number, **place)

    def like_rows(self, result: Tensor) -> Tensor:
        return _like_rows(result, self.x)


def _in_range(temperature: Tensor) -> Tensor:
    """1 / temperature; NaN if it is out of range."""
    known = (temperature >= LEAST_FACTOR) & (temperature <= MOST_FACTOR)
    return torch.where(known, temperature, math.nan).reciprocal()


def _log_prob(value: Tensor, lse: Tensor) -> Tensor:
    """value - lse, or -inf where the value is."""
    return torch.where(value == -math.inf, value, value - lse)


def _refuse_dtensors(operator: str, *tensors: Any) -> None:
    if any(map(is_dtensor, tensors)):
        expected = f"plain tensors and ranks=, as in {operator}(x, weight.to_local(), ..., ranks=mesh)"
        raise TypeError(mismatch("x, weight", expected, "a DTensor"))


def linear_topk(
    x: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    workspace: int | None = None,
    ranks: RanksOrGroup | None = None,
    **others: NoReturn,
) -> TopK:
    """The k most likely classes under softmax(softcap(logit_scale * x @ weight^T + bias) / temperature).

        best = mr.linear_topk(hidden, head, 64)  # of a teacher, to be stored: best.log_probs, best.index

    No logits are stored. A call that will be differentiated also takes the k logits as soft targets of
    `linear_cross_entropy`, and its backward pass is theirs. Over ranks torch computes it, some classes at a
    time.

    Args:
        x: [..., D] one row per token.
        weight: [V, D] one row per class.
        k: from 1 to 64.
        bias: [V].
        temperature: a number, a floating tensor [...] with one temperature per token, or a tensor without
            axes on the device of x. Each is from 2^-100 to 2^100. A tensor must not require a gradient.
        softcap: c, from 2^-100 to 2^100. Each logit becomes c * tanh(logit / c).
        logit_scale: factor of x @ weight^T, before the bias is added; 1 by default. It is 0, or its magnitude
            is from 2^-100 to 2^100.
        workspace: bytes for scores of some classes at a time, `get_workspace()` by default. A smaller one is
            slower, never wrong.
        ranks: weight and bias are this rank's shard of the classes. Uses the options classes,
            sequence_parallel and grad_dtype of `Ranks`. Indices count the classes of all ranks.

    Returns:
        TopK(log_probs, index, lse). log_probs and lse are differentiable in x, weight and bias. NaN counts as
        the largest logit, and the log-probabilities of its token are NaN.

    Raises:
        TypeError, ValueError: an argument is not as above, or temperature requires a gradient. A temperature
            out of range in a tensor makes its token's results NaN instead.
    """
    if others:
        refuse("linear_topk", others)
    try:
        _refuse_dtensors("linear_topk", x, weight, bias)
        head = _Head(x, weight, bias, softcap, logit_scale)
        k = check_int("k", k, f"an int from 1 to {MOST}")
        if not 1 <= k <= MOST:
            raise ValueError(mismatch("k", f"an int from 1 to {MOST}", k))
        of_tokens = _temperatures(temperature, head.x)
        divisor = 1.0 if of_tokens is not None else check_positive("temperature", temperature)
        inverse = head.of_rows(1 / divisor) if of_tokens is None else _in_range(of_tokens)
    except (TypeError, ValueError) as error:
        if ranks is None:
            raise
        refuse_over_ranks(ranks, "linear_topk", error)
    count = next(n for n in _COUNTS if n >= k)
    given = head.rows, head.weight, *head.column.values()
    by_targets = ranks is None and (_differentiated(*given) or has_tangent(given))
    rows, weight, *of_columns = (t.detach() if by_targets else t for t in given)
    found = _TOPK[count, head.has("bias", "cap")](
        rows,
        weight,
        row={"inverse": inverse, **head.row},
        column=dict(zip(head.column, of_columns, strict=True)),
        scale=head.scale,
        workspace=workspace,
        ranks=ranks,
    )
    (values, index), lse = (t[:, :k] for t in found.best), found.lse
    if by_targets:
        of_tokens = None if of_tokens is None else torch.where(inverse.isnan(), 1.0, of_tokens)
        how = (head.scale, head.softcap, divisor), True, workspace_bytes(workspace)
        of = target_logits(head.rows, head.weight, head.bias, index, of_tokens, *how)
        lse, values = map(_with_gradient_of, of, (lse, values))
    results = _log_prob(values, lse[:, None]), index, lse
    return TopK(*map(head.like_rows, results))


def _with_gradient_of(like: Tensor, values: Tensor) -> Tensor:
    """The values, with the gradient of `like`: the same numbers, that another kernel computed."""
    return torch.where(values.isfinite(), values + (like - like.detach()), values)


def _checked_seed(seed: int | Tensor, rows: Tensor) -> Tensor:
    """The seed of each row, [N] int64."""
    if isinstance(seed, Tensor):
        if seed.dim() or seed.dtype not in INTEGERS or seed.dtype == torch.uint64:
            raise TypeError(mismatch("seed", _SEED, f"a tensor of shape {list(seed.shape)}, {seed.dtype}"))
        return seed.to(rows.device, torch.int64).expand(rows.shape[0])
    seed = check_index("seed", check_int("seed", seed, _SEED))
    return torch.full((rows.shape[0],), seed, dtype=torch.int64, device=rows.device)


def linear_sample(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    kept: Tensor | None = None,
    entropy: bool = False,
    seed: int | Tensor,
    ranks: RanksOrGroup | None = None,
    **others: NoReturn,
) -> Sample:
    """A class of each token, drawn from softmax(softcap(logit_scale * x @ weight^T + bias) / temperature).

        token = mr.linear_sample(hidden, head, temperature=0.7, seed=step).index

    One pass over the head's weight, and no logits are stored: the class with the largest sum of its logit and
    a Gumbel number is a sample. These numbers are functions of the seed, the token and the class
    (`stat.uniform`). So the same seed gives the same sample on every device and over any number of ranks, but
    where two such sums are equal up to rounding. Calls of different steps need different seeds.

    Args:
        x: [..., D] one row per token.
        weight: [V, D] one row per class.
        bias: [V].
        temperature: a number, a floating tensor [...] with one temperature per token, or a tensor without
            axes on the device of x. Each is 0, or from 2^-100 to 2^100. At 0 the class of the largest logit
            is taken, with log-probability and entropy 0. A tensor must not require a gradient.
        softcap: c, from 2^-100 to 2^100. Each logit becomes c * tanh(logit / c).
        logit_scale: factor of x @ weight^T, before the bias is added; 1 by default. It is 0, or its magnitude
            is from 2^-100 to 2^100.
        kept: [..., ceil(V / 32)] int32: bit c % 32 of word c // 32 says whether class c may be drawn, as in
            masks of xgrammar and vLLM. Log-probability and entropy are those among the kept classes.
        entropy: also return the entropy.
        seed: an int of 64 bits, or a 0-d tensor of an integer dtype, whose values need no new kernels.
        ranks: weight and bias are this rank's shard of the classes. Uses the options classes,
            sequence_parallel and grad_dtype of `Ranks`. Each rank is given the words of all classes in kept,
            and the same seed. Indices count the classes of all ranks.

    Returns:
        Sample(index, log_prob, entropy). log_prob and entropy are differentiable in x, weight and bias. A
        token that may take no class has index -1, log_prob -inf and entropy 0. One with a logit that is NaN
        has index -1 and results that are NaN.

    Raises:
        TypeError, ValueError: an argument is not as above, or temperature requires a gradient. A temperature
            out of range in a tensor makes its token's results NaN instead.
    """
    if others:
        refuse("linear_sample", others)
    words = None
    try:
        _refuse_dtensors("linear_sample", x, weight, bias)
        head = _Head(x, weight, bias, softcap, logit_scale)
        of_tokens = _temperatures(temperature, head.x)
        greedy = None
        if of_tokens is not None:
            greedy = of_tokens == 0
            inverse = _in_range(torch.where(greedy, 1.0, of_tokens))
        else:
            at_zero = not isinstance(temperature, Tensor) and temperature == 0
            divisor = 1.0 if at_zero else check_positive("temperature", temperature, instead="0 or ")
            inverse = head.of_rows(1 / divisor)
            greedy = torch.ones_like(inverse, dtype=torch.bool) if at_zero else None
        if greedy is not None:
            head.row["noise"] = (~greedy).to(head.real)
        seeds, entropy = _checked_seed(seed, head.rows), check_bool("entropy", entropy)
        sharding = None if ranks is None else _yards.ranks().Sharding.of(ranks)
        if kept is not None:
            classes, place = len(head.weight), torch.arange(len(head.weight), device=head.rows.device)
            if sharding is not None:
                columns = sharding.columns("weight", head.weight)
                classes, place = columns.all, place + columns.first
            words = words_of_rows(kept, head.x, classes)
            head.column["shift"] = shifts(place)
    except (TypeError, ValueError) as error:
        if ranks is None:
            raise
        refuse_over_ranks(ranks, "linear_sample", error)
    if words is not None and sharding is not None and sharding.ranks.sequence_parallel:
        words = _yards.ranks().unshard(words, 0, sharding.group.handle)
    found = _SAMPLE[entropy, head.has("bias", "cap", "noise", "shift")]._with_words(
        head.rows,
        head.weight,
        words=None if words is None else in_64_bits(words),
        row={"inverse": inverse, "seed": seeds, **head.row},
        column=head.column,
        scale=head.scale,
        ranks=ranks,
    )
    value, index = found.best
    least = torch.finfo(value.dtype).min  # -inf less itself, for a token without a class, would be NaN
    log_prob = value - found.lse.clamp(min=least)
    log_prob = log_prob - log_prob.detach().clamp(min=0)  # rounding errors do not make a probability above 1
    spread = found.entropy if entropy else None
    there = value > -math.inf  # a class, whose logit is not NaN
    if greedy is not None:
        settled = greedy & there
        log_prob = torch.where(settled, 0.0, log_prob)
        spread = None if spread is None else torch.where(settled, 0.0, spread)
    return Sample(
        head.like_rows(torch.where(there, index, -1)),
        head.like_rows(log_prob),
        None if spread is None else head.like_rows(spread),
    )
