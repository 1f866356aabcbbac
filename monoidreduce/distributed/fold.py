"""Folds with columns sharded over ranks: each rank folds its own columns, and every rank combines the states.

Let P be the fold of all columns and X one of its elements. The gradient of X is a function of P and X alone
(corollary 2.1.3 of MonoidReduce). So once a rank has P, it can compute the gradients of its own columns, and
backward communicates no states. A row meets the columns of all ranks, so its gradient is a sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from monoidreduce._keywords import refuse
from monoidreduce._ops.registry import unrecorded
from monoidreduce._ops.summed_weights import WEIGHT, gradients_adding, stand_in
from monoidreduce._torch_private import mark_untraced
from monoidreduce._validate import mismatch
from monoidreduce.distributed.collectives import gather_states, sum_over_ranks
from monoidreduce.distributed.group import UNTRACED, Group, Sharding, facts_of, key_of, together
from monoidreduce.distributed.messages import Facts
from monoidreduce.distributed.once import differentiable_once
from monoidreduce.map_reduce import _check_monoid, _fill, _Folded, map_reduce
from monoidreduce.monoids import Monoid, check_state, layout, maker
from monoidreduce.ranks import RanksOrGroup

__all__ = [
    "ShardedFold",
    "Sums",
    "all_fold",
    "combined",
    "fold_over_ranks",
    "map_reduce_over_ranks",
    "replicated",
    "summed_gradient",
]

State = TypeVar("State", bound=Sequence[Tensor])


def all_fold(monoid: Monoid[State], state: State, ranks: RanksOrGroup, **others: NoReturn) -> State:
    """Combine one state from each rank, on every rank: an all-reduce for any commutative monoid.

    States are combined in rank order, so all ranks get the same bits. For the gradients to be right, every
    rank must compute the same from the result; the gradient of a rank's state is then the monoid's local
    gradient.

    Args:
        monoid: an instance of any `Monoid`.
        state: a state of this monoid (a NamedTuple of tensors), with the same shapes and dtypes on all ranks.
        ranks: a ProcessGroup, a one-dimensional DeviceMesh, or a `monoidreduce.Ranks` of one without options.

    Returns:
        A state like the one given. It is differentiable once, in every floating field.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    if others:
        refuse("all_fold", others)
    sharding = Sharding.of(ranks)

    def prepare() -> tuple[bool, Facts]:
        sharding.check("all_fold")
        _check_monoid(monoid)
        check_state("state", state, monoid)
        facts = {"monoid": repr(monoid), "state": layout(state)}
        return True, Facts(tuple(facts.values()), lambda: facts)

    together(sharding.group, "all_fold", prepare)
    return combined(monoid, state, sharding.group)


def combined(monoid: Monoid[State], state: State, group: Group) -> State:
    """`all_fold` of arguments that are already checked."""
    make = maker(state)
    return make(_AllFold.apply(_Folded(monoid), make, group, *state))  # type: ignore[no-any-return, no-untyped-call]


def map_reduce_over_ranks(
    ranks: RanksOrGroup, monoid: Monoid[State], project_fold: Any, a: Any, b: Any, options: dict[str, Any]
) -> State:
    """`map_reduce` with the rows of b sharded over ranks: each rank folds its own; states are combined."""
    sharding = Sharding.of(ranks)
    group = sharding.group

    def prepare() -> tuple[State, Facts]:
        sharding.check("map_reduce")
        if options["pairs"] is not None:
            expected = "None beside ranks: slices of b would be slices of a rank's own rows"
            raise ValueError(mismatch("pairs", expected, options["pairs"]))
        of_ranks = replicated(a, group) if isinstance(a, Tensor) else a
        if isinstance(a, tuple):
            of_ranks = tuple(replicated(t, group) if isinstance(t, Tensor) else t for t in a)
        state = map_reduce(monoid, project_fold, of_ranks, b, **options)

        tensors = a if isinstance(a, tuple) else (a,)
        of_fold = {"monoid": repr(monoid), "state": layout(state)}

        def facts() -> dict[str, Any]:
            return facts_of(((f"a[{i}]", t) for i, t in enumerate(tensors)), {}) | of_fold

        return state, Facts((key_of(tensors), *of_fold.values()), facts)

    return combined(monoid, together(group, "map_reduce", prepare), group)


mark_untraced(map_reduce_over_ranks, UNTRACED)


def replicated(t: Tensor, group: Group) -> Tensor:
    """t itself, with its gradient summed over ranks. All ranks hold t and use it with their own columns."""
    result: Tensor = _Replicated.apply(t, group)  # type: ignore[no-untyped-call]
    return result


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return t.view_as(t)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Any:
        return sum_over_ranks(grad, ctx.group, grad.dtype), None


class _AllFold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, monoid: Any, make: Any, group: Group, *fields: Tensor) -> tuple[Tensor, ...]:
        ctx.monoid, ctx.make = monoid, make
        states = [make(each) for each in zip(*gather_states(fields, group), strict=True)]
        total = tuple(reduce(monoid.combine, states))
        ctx.save_for_backward(*fields, *total)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(field for field in total if not field.is_floating_point()))
        return total

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        fields, total = ctx.saved_tensors[: len(upstream)], ctx.saved_tensors[len(upstream) :]
        local = ctx.monoid.local_gradient(*map(ctx.make, (total, fields, _fill(upstream, total))))
        pairs = zip(fields, local, strict=True)
        return None, None, None, *(g if field.is_floating_point() else None for field, g in pairs)


class Sums(NamedTuple):
    """Where the gradient of a rank's own weight is added (`_ops.summed_weights`).

    to: like the weight, without padding. parameter: the weight as the user gave it.
    """

    to: Tensor
    parameter: Tensor


class ShardedFold(NamedTuple):
    """How to run an op of `_ops` with columns sharded over ranks.

    forward, backward: options of the forward and backward ops.
    rows: indices of the inputs that are rows; their gradients are summed over ranks.
    gathered: the first this many outputs of the op are states of rows, which are gathered from all ranks. The
    other outputs stay on their rank.
    pack: packs these states into one tensor. None: they have several dtypes and are gathered as bytes.
    combine: takes the gathered states ([ranks, ...] each, or packed) and the other outputs; returns the
    results and the residuals that backward needs.
    run: called in place of the op if given; it returns the op's outputs, then more arguments for `combine`.
    differentiable: the first this many results have gradients.
    sums: given if the gradient of the weight, input 1, is added to a tensor.
    """

    name: str
    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    rows: tuple[int, ...]
    gathered: int
    combine: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
    sharding: Sharding
    differentiable: int = 1
    pack: Callable[[Any], Tensor] | None = None
    run: Callable[..., Any] | None = None
    sums: Sums | None = None


def fold_over_ranks(fold: ShardedFold, *inputs: Tensor | None) -> Any:
    """Run the fold on these inputs of the op; returns its results."""
    return _FoldOverRanks.apply(fold, *inputs)  # type: ignore[no-untyped-call]


def summed_gradient(part: Tensor, of: Tensor, sharding: Sharding) -> Tensor:
    """The gradient of the rows `of`: this rank's part of it, summed over ranks."""
    ranks = sharding.ranks
    return sum_over_ranks(part, sharding.group, of.dtype, sent=ranks.grad_dtype, own=ranks.sequence_parallel)


class _FoldOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fold: ShardedFold, *given: Any) -> tuple[Tensor, ...]:
        group, inputs = fold.sharding.group, list(given)
        if fold.sharding.ranks.sequence_parallel:
            for i in fold.rows:
                if inputs[i] is not None:
                    inputs[i] = group.gather(inputs[i]).flatten(0, 1)
        with group.failing_together():
            run = fold.run or unrecorded(fold.name)[0]
            found = run(*inputs, *fold.forward)
            found = found if isinstance(found, tuple) else (found,)
            states, own = found[: fold.gathered], found[fold.gathered :]
        of_ranks: Any = group.gather(fold.pack(states)) if fold.pack else gather_states(states, group)
        results, residuals = fold.combine(of_ranks, *own)
        ctx.fold, ctx.count = fold, len(inputs)
        ctx.mark_non_differentiable(*(t for t in results if not t.is_floating_point()))
        ctx.save_for_backward(*inputs, *residuals)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        fold, saved, needed = ctx.fold, ctx.saved_tensors, [*ctx.needs_input_grad[1:]]
        grads = grads[: fold.differentiable]
        if all(grad is None for grad in grads):
            return (None,) * (1 + ctx.count)
        sums = fold.sums if needed[WEIGHT] else None
        with fold.sharding.group.failing_together(any(needed[i] for i in fold.rows)):
            run, given = unrecorded(fold.name)[1], (*grads, *saved, *fold.backward)
            if sums is None:
                found = [*run(*given, needed, True)]
            else:
                found = gradients_adding(fold.name, run, given, needed, True, sums.to)
        found += [None] * (ctx.count - len(found))  # inputs without gradients
        for i in fold.rows:
            if needed[i]:
                found[i] = summed_gradient(found[i], saved[i], fold.sharding)
        gradients = [g if wanted else None for g, wanted in zip(found, needed, strict=True)]
        if sums is not None:
            gradients[WEIGHT] = stand_in(sums.parameter, saved[WEIGHT])
        return None, *gradients
