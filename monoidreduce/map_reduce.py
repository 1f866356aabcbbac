"""Folds over any monoid: `fold` of a sequence of states, `map_reduce` of a function of all pairs of rows.

Both save only inputs and result for backward, which uses the local gradient theorem: if X is an element, or a
partial fold, of the final fold P, then local_gradient(P, X, g) is its gradient, independent of all other
elements.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from . import _yards, monoids
from ._keywords import refuse
from ._ops.registry import no_forward_mode, refuse_forward_mode
from ._torch_private import is_transformed, mark_untraced, transforms_are_active
from ._validate import check_axes, check_bool, check_int, check_tensor, mismatch
from .monoids import Checked, Monoid, check_state, layout, maker, versions

if TYPE_CHECKING:
    from monoidreduce.ranks import RanksOrGroup

__all__ = ["fold", "map_reduce", "visits_of"]

Tensors: TypeAlias = Tensor | tuple[Tensor, ...]
Visits: TypeAlias = list[tuple[slice, list[slice]]]  # each slice of a, with the slices of b to fold it with
Rowless: TypeAlias = list[tuple[torch.dtype, torch.Size]]  # of each field: dtype, and shape without axis 0
State = TypeVar("State", bound=Sequence[Tensor])

# Scores of 1024 x 1024 rows take 4 MiB in float32.
_DEFAULT_CHUNK = 1024


def fold(monoid: Monoid[State], values: State, dim: int = -1) -> State:
    """Fold a sequence of states, stacked along `dim`, into one.

    Args:
        monoid: an instance of any `Monoid`.
        values: a state (a NamedTuple of tensors) with one more batch axis than the result.
        dim: the batch axis to fold. Payload axes are not counted: a state has as many batch axes as its field
            with the fewest axes. For example, LogWSum with log_weight [M, N] and value [M, N, D] folds N by
            default.

    Returns:
        The state without that axis; the identity if the axis is empty. float16 and bfloat16 fields are folded
        and returned in float32. It is differentiable once, by the monoid's local gradient, in every
        floating-point field. torch.func.vmap and torch.func.grad work; forward mode does not.

    Raises:
        TypeError: `monoid` is not a Monoid, `values` is not a state of it, or `dim` is not an int; a field's
            dtype is neither float64, float32, bfloat16 or float16, nor an integer dtype or bool; or a method
            of the monoid does not return a state.
        ValueError: `dim` is out of range, or the fields differ in device or in the sizes of the axes up to
            `dim`; or a method of the monoid returns other shapes or dtypes than its operands have, or changes
            an operand in place (not detected under torch.compile). `values` are never changed: each method is
            first tried on copies of a few entries.
        RuntimeError: when differentiated twice.
    """
    _check_monoid(monoid)
    check_state("values", values, monoid)
    check_int("dim", dim)
    batch_axes = min(field.dim() for field in values)
    if not -batch_axes <= dim < batch_axes:
        raise ValueError(mismatch("dim", f"one of the {batch_axes} batch axes of values", dim))
    axis = dim % batch_axes
    if len({field.shape[: axis + 1] for field in values}) > 1:
        shapes = [list(field.shape) for field in values]
        raise ValueError(mismatch("values", f"fields that agree on the sizes of axes up to {axis}", shapes))
    _check_one_device("values", values)
    refuse_forward_mode("monoidreduce.fold", values)
    make = maker(values)
    return make(_apply(_Fold, (_Folded(monoid), make, axis), values))  # type: ignore[no-any-return]


def map_reduce(
    monoid: Monoid[State],
    project_fold: Callable[[Any, Any], State],
    a: Tensors,
    b: Tensors,
    *,
    project_fold_backward: Callable[[Any, Any, State], tuple[Any, Any]] | None = None,
    fused_backward: Callable[[Any, Any, State, State], tuple[Any, Any]] | None = None,
    forward_gradient: bool = False,
    pairs: Callable[[slice, slice], bool] | Tensor | None = None,
    a_chunk: int | None = None,
    b_chunk: int | None = None,
    ranks: RanksOrGroup | None = None,
    **others: NoReturn,
) -> State:
    """P_i = fold over j of f(a_i, b_j) for every row i of `a`, without storing results for all pairs of rows.

    This is the paper's batched MonoidReduce (Gyllensten 2025, Appendix C), on any device. Forward folds each
    slice of `a` with one slice of `b` after the other. Backward visits the slice pairs again and recomputes
    project_fold under autograd; the gradient of its result, a partial fold, is the monoid's local gradient
    (corollary 2.1.3). Peak memory is that of one slice pair plus the results (the state, or the gradients).
    Gradients are summed over slices in at least float32.

    Args:
        monoid: an instance of any `Monoid`.
        project_fold: project_fold(a_slice, b_slice) -> the state of this slice pair: f of each pair of rows,
            folded over the rows of b_slice. Axis 0 of every field is that of a_slice; the other axes and the
            dtypes must be the same for all slices. It is recomputed, so it must be deterministic. Only its
            arguments get gradients: tensors that it closes over must not require any.
        a, b: a tensor, or a tuple of tensors with the same size of axis 0, which is sliced. project_fold
            receives slices in the same form. Axis 0 is never a batch axis: every row of `a` is folded with
            every row of `b`. For batches [B, M, ...] and [B, N, ...] use torch.vmap of this function.
        project_fold_backward: project_fold_backward(a_slice, b_slice, g) -> (gradient of a_slice, gradient of
            b_slice), where g is the gradient of project_fold's state. Gradients have the form of the slices,
            with None for no gradient. By default autograd computes it.
        fused_backward: fused_backward(a_slice, b_slice, total, g) -> gradients as from project_fold_backward.
            total is the final state of the rows of a_slice, and g is its gradient. Over ranks, total is the
            fold of this rank's rows of `b` only. It replaces calls of project_fold and local_gradient in
            backward.
        forward_gradient: compute the gradient of `a` in the forward pass, for states of one floating-point
            number per row. A row of project_fold's state must depend only on the same row of a_slice; this is
            not checked.
        pairs: pairs(a_slice, b_slice) -> bool: whether to fold this pair of slices; the arguments are Python
            slices of the rows of `a` and `b`. Use it to skip blocks that a mask excludes. Or a bool tensor
            [slices of a, slices of b] with the answers; it is read on the host, and breaks the graph of
            torch.compile. Not allowed with ranks, because a rank knows only its own rows of `b`.
        a_chunk, b_chunk: number of rows in a slice of `a` and of `b`; 1024 by default.
        ranks: a ProcessGroup, a one-dimensional DeviceMesh or a `monoidreduce.Ranks` without options, over
            whose ranks the rows of `b` are sharded, in any sizes. All ranks must call with the same `a` and
            the same upstream gradients. The states and the gradient of `a` have the same bits on all ranks;
            the gradient of `b` is for the rank's own rows.

    Returns:
        The states of all rows of `a`, concatenated along axis 0. float16 and bfloat16 fields are folded and
        returned in float32. If `b` has no rows, every state is the identity and every gradient zero.
        Differentiable once.

        torch.func.vmap (as a loop) and torch.func.grad work; forward mode does not.

        torch.compile breaks the graph here (so fullgraph=True is an error), except under torch.no_grad. If it
        traced both passes together, backward would reuse what project_fold computed in forward, and so store
        it for all pairs of rows.

    Raises:
        TypeError: an argument has the wrong type, or project_fold or a method of the monoid does not return a
            state.
        ValueError: sizes or devices disagree; a chunk is not positive; project_fold closes over a tensor that
            requires gradients; project_fold_backward and fused_backward are both given, or pairs and
            ranks; states are not as forward_gradient needs them; project_fold returns different
            shapes or dtypes for different slices, or a method of the monoid other ones than its operands'; or
            one of these functions changes an argument in place (not detected under torch.compile). `a` and
            `b` are never changed: each function gets copies first.
        RuntimeError: when differentiated twice; when torch.export traces it and an input requires a gradient.
    """
    if others:
        refuse("map_reduce", others)
    if ranks is not None:
        options = {
            "project_fold_backward": project_fold_backward,
            "fused_backward": fused_backward,
            "forward_gradient": forward_gradient,
            "pairs": pairs,
            "a_chunk": a_chunk,
            "b_chunk": b_chunk,
        }
        found: State = _yards.ranks().map_reduce_over_ranks(ranks, monoid, project_fold, a, b, options)
        return found
    _check_monoid(monoid)
    _check_function("project_fold", project_fold)
    optional = {"project_fold_backward": project_fold_backward, "fused_backward": fused_backward}
    for name, function in optional.items():
        if function is not None:
            _check_function(name, function)
    if project_fold_backward is not None and fused_backward is not None:
        raise ValueError(mismatch("fused_backward", "None beside project_fold_backward", fused_backward))
    check_bool("forward_gradient", forward_gradient)
    a_tensors, b_tensors = _check_sliced("a", a), _check_sliced("b", b)
    _check_one_device("a and b", (*a_tensors, *b_tensors))
    refuse_forward_mode("monoidreduce.map_reduce", (*a_tensors, *b_tensors))
    problem = _Problem(
        _Folded(monoid),
        project_fold,
        project_fold_backward,
        fused_backward,
        visits=visits_of(a, b, pairs, a_chunk, b_chunk),
        a_is_tensor=isinstance(a, Tensor),
        b_is_tensor=isinstance(b, Tensor),
        jacobians=_jacobians(a_tensors) if forward_gradient else (),
        autocast=_current_autocast(a_tensors[0].device.type),
        own_hooks=nullcontext if transforms_are_active() else _plain_hooks,
    )
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return problem.fold(a_tensors, b_tensors)[0]  # type: ignore[no-any-return]
    return _untraced_map_reduce(problem, a_tensors, b_tensors)  # type: ignore[no-any-return]


class _Folded(Checked):
    """A monoid in a fold. Checks that states keep their shapes and dtypes, and that combine uses only its
    operands.

    Each method is first tried on copies of a few entries: operands may belong to the caller, and must be
    intact if the method turns out to change them in place.
    """

    def __init__(self, monoid: Monoid[Any]) -> None:
        super().__init__(monoid)
        self.refuse_closures = torch.is_grad_enabled()  # without grad mode nothing would get gradients anyway
        own = type(monoid).__module__ == monoids.__name__ and type(monoid) is not monoids.Product
        self._tried = {"combine", "local_gradient"} if own else set()

    def check_closures(self, total: Any) -> None:
        """Raise ValueError if combine uses a tensor that requires gradients and is not an operand.

        The folded states are detached, so a graph of the total can only come from such a tensor.
        """
        if any(field.requires_grad for field in total):
            raise ValueError(_uses_another_tensor(f"{self!r}.combine", "its operands"))

    def _result(self, method: str, *operands: Any) -> Any:
        if method not in self._tried and method != "identity" and not torch.compiler.is_compiling():
            self._tried.add(method)
            super()._result(method, *map(_first_entries, operands))
        return super()._result(method, *operands)

    def _state(self, method: str, *operands: Any) -> Any:
        state, like = super()._state(method, *operands), operands[0]
        if any(f.shape != o.shape or f.dtype != o.dtype for f, o in zip(state, like, strict=True)):
            expected = f"fields as in its operand, {layout(like)}"
            raise ValueError(self.mismatch(method, expected, layout(state)))
        return state


class _DifferentiableOnce(torch.autograd.Function):
    """Computes gradients as one autograd node; its own backward raises instead of being silently wrong."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("monoidreduce.fold and monoidreduce.map_reduce cannot be differentiated twice")


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(monoid: Any, make: Any, axis: int, *fields: Tensor) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return tuple(_tree_fold(monoid, make(_wide(field) for field in fields), axis))
        with torch.set_grad_enabled(monoid.refuse_closures):
            total = _tree_fold(monoid, make(_widen(field.detach()) for field in fields), axis)
        monoid.check_closures(total)
        return tuple(total)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.monoid, ctx.make, ctx.axis, *fields = inputs
        _remember(ctx, fields, output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        fields = ctx.saved_tensors[: len(upstream)]
        gradients = _apply(_FoldGradient, (ctx.monoid, ctx.make, ctx.axis), (*ctx.saved_tensors, *upstream))
        return None, None, None, *_in_place_of(gradients, [f.dtype.is_floating_point for f in fields])

    @staticmethod
    def vmap(info: Any, in_dims: Any, monoid: Any, make: Any, axis: int, *fields: Tensor) -> Any:
        return _over_one_axis_more(_Fold, info, in_dims, monoid, make, axis, *fields)


class _FoldGradient(_DifferentiableOnce):
    @staticmethod
    def forward(monoid: Any, make: Any, axis: int, *tensors: Any) -> tuple[Tensor, ...]:
        """Gradients of the floating-point fields.

        tensors: the fields, the total's fields, upstream gradients.
        """
        count = len(tensors) // 3
        fields, total, upstream = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        elements = make(_wide(field) for field in fields)

        def at_every_element(state: Sequence[Tensor]) -> Any:
            return make(f.unsqueeze(axis).expand_as(e) for f, e in zip(state, elements, strict=True))

        filled = _fill(upstream, total)
        local = monoid.local_gradient(at_every_element(total), elements, at_every_element(filled))
        pairs = zip(local, fields, strict=True)
        return tuple(gradient.to(field.dtype) for gradient, field in pairs if field.dtype.is_floating_point)

    @staticmethod
    def vmap(info: Any, in_dims: Any, monoid: Any, make: Any, axis: int, *tensors: Any) -> Any:
        return _over_one_axis_more(_FoldGradient, info, in_dims, monoid, make, axis, *tensors)


def _over_one_axis_more(
    function: Any, info: Any, in_dims: Any, monoid: Any, make: Any, axis: int, *tensors: Tensor | None
) -> Any:
    """The vmap rule: monoids work on any number of batch axes, so vmap's axis becomes the first one."""

    def batch_first(tensor: Tensor | None, dim: int | None) -> Tensor | None:
        if tensor is None or dim is None:
            return None if tensor is None else tensor.expand(info.batch_size, *tensor.shape)
        return tensor.movedim(dim, 0)

    batched = list(map(batch_first, tensors, in_dims[3:]))
    outputs = _apply(function, (monoid, make, axis + 1), batched)
    return outputs, (0,) * len(outputs)


def _tree_fold(monoid: Monoid[Any], values: Any, axis: int) -> Any:
    """Fold the axis by halving it until it is empty; `rest` collects the last element of each odd size."""
    make, size = maker(values), values[0].shape[axis]
    rest = monoid.identity(make(f.new_empty(f.shape[:axis] + f.shape[axis + 1 :]) for f in values))
    while size > 0:
        if size % 2:
            rest = monoid.combine(rest, make(f.select(axis, size - 1) for f in values))
        size //= 2
        if size:
            left = make(f.narrow(axis, 0, size) for f in values)
            values = monoid.combine(left, make(f.narrow(axis, size, size) for f in values))
    return rest


@dataclass
class _Problem:
    """A call of map_reduce without its tensors. In its methods `a` and `b` are sequences of tensors."""

    monoid: _Folded
    project_fold: Callable[[Any, Any], Any]
    project_fold_backward: Callable[[Any, Any, Any], tuple[Any, Any]] | None
    fused_backward: Callable[[Any, Any, Any, Any], tuple[Any, Any]] | None
    visits: Visits
    a_is_tensor: bool
    b_is_tensor: bool
    jacobians: tuple[bool, ...]  # tensors of a for which forward computes the gradient; () for none
    autocast: Callable[[], AbstractContextManager[Any]]
    own_hooks: Callable[[], AbstractContextManager[Any]]  # saved-tensor hooks of the forward pass
    # Type and layout of project_fold's states, set from the first state. All others must have the same.
    make: Callable[[Iterable[Tensor]], Any] | None = None
    rowless: Rowless | None = None
    # Names of the caller's functions that were already called with copies of their arguments.
    tried: set[str] = dataclasses.field(default_factory=set)

    def fold(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """The state, and the Jacobians of its only field with respect to the tensors of a in `jacobians`."""
        rows = a[0].shape[0]
        of_a = [t for t, asked in zip(a, self.jacobians, strict=False) if asked]
        jacobians = [t.new_zeros(t.shape, dtype=_sum_dtype(t)) for t in of_a]
        result: Any = None
        for a_rows, of_b in self.visits:
            total: Any = None
            for b_rows in of_b:
                b_slice = [t[b_rows] for t in b]
                if not jacobians:
                    part = self._constant_slice_pair([t[a_rows] for t in a], b_slice)
                    total = self._combined(total, part)
                    continue
                part, terms = self._slice_pair_jacobians(_leaves(a, a_rows, self.jacobians), b_slice)
                before, total = total, self._combined(total, part)
                for whole, term in zip(jacobians, terms, strict=True):
                    here = self._scaled(total, part, term.to(whole.dtype))
                    whole[a_rows] = (
                        here if before is None else self._scaled(total, before, whole[a_rows]) + here
                    )
            if total is None:
                total = self._identity(a_rows.stop - a_rows.start, a, b)
            self.monoid.check_closures(total)
            if result is None:
                result = maker(total)(field.new_empty(rows, *field.shape[1:]) for field in total)
            for whole, field in zip(result, total, strict=True):
                whole[a_rows] = field
        return self._identity(0, a, b) if result is None else result, jacobians

    def _combined(self, total: Any, part: Any) -> Any:
        with torch.set_grad_enabled(self.monoid.refuse_closures):
            return self.monoid.combine(self.monoid.identity(part) if total is None else total, part)

    def _slice_pair_jacobians(self, a_slice: list[Tensor], b_slice: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """The state of a slice pair, and its Jacobians. A row of the state depends only on the same row of a.

        It runs under own_hooks, because saved-tensor hooks of the caller are meant for tensors that outlive
        the call: activation checkpointing, for example, would rerun the whole call to restore what is saved
        here. torch.func does not allow such hooks.
        """
        with torch.enable_grad(), self.own_hooks():
            part = self._slice_pair(a_slice, b_slice)
        if len(part) != 1 or part[0].dim() != 1 or not part[0].dtype.is_floating_point:
            expected = "True only for states of one floating number a row"
            raise ValueError(mismatch("forward_gradient", expected, layout(part)))
        leaves = [t for t in a_slice if t.requires_grad]
        if _other_leaves(part[0], leaves):
            raise ValueError(_uses_another_tensor("project_fold", "a_slice and b_slice"))
        if not part[0].requires_grad:
            return self._element(part), [torch.zeros_like(t) for t in leaves]
        ones = torch.ones_like(part[0])
        terms = torch.autograd.grad(part[0], leaves, ones, allow_unused=True, materialize_grads=True)
        return self._element(part), [*terms]

    def _scaled(self, total: Any, part: Any, jacobian: Tensor) -> Tensor:
        """D(total, part) times the Jacobian; the local gradient is one number per row."""
        (factor,) = self.monoid.local_gradient(total, part, maker(total)(torch.ones_like(f) for f in total))
        scaled: Tensor = _per_row(factor.to(jacobian.dtype), jacobian) * jacobian
        return scaled

    def gradients(
        self, a: Sequence[Tensor], b: Sequence[Tensor], needed: Sequence[bool], total: Any, upstream: Any
    ) -> tuple[Tensor, ...]:
        """The gradients of the tensors of a, then b, that are `needed`."""
        a_needed, b_needed = needed[: len(a)], needed[len(a) :]
        new_zeros = upstream[0].new_zeros  # batched if upstream is batched (is_grads_batched)
        a_gradients = [new_zeros(t.shape, dtype=t.dtype) for t, need in zip(a, a_needed, strict=True) if need]
        b_gradients = [
            new_zeros(t.shape, dtype=_sum_dtype(t)) for t, need in zip(b, b_needed, strict=True) if need
        ]
        make = self.make
        assert make is not None  # set by the forward pass
        for a_rows, of_b in self.visits if any(needed) else ():
            a_slice = _leaves(a, a_rows, a_needed)
            total_rows, upstream_rows = (make(field[a_rows] for field in s) for s in (total, upstream))
            a_sums = [new_zeros(t.shape, dtype=_sum_dtype(t)) for t in a_slice if t.requires_grad]
            for b_rows in of_b:
                b_slice = _leaves(b, b_rows, b_needed)
                terms = self._slice_pair_gradients(a_slice, b_slice, total_rows, upstream_rows)
                sums = [*a_sums, *(gradient[b_rows] for gradient in b_gradients)]
                for accumulator, term in zip(sums, terms, strict=True):
                    if term is not None:
                        accumulator.add_(term)
            for gradient, a_sum in zip(a_gradients, a_sums, strict=True):
                gradient[a_rows] = a_sum
        dtypes = [t.dtype for t, need in zip((*a, *b), needed, strict=True) if need]
        pairs = zip((*a_gradients, *b_gradients), dtypes, strict=True)
        return tuple(gradient.to(dtype) for gradient, dtype in pairs)

    def _slice_pair(self, a_slice: Sequence[Tensor], b_slice: Sequence[Tensor]) -> Any:
        """Call project_fold for a pair of slices; returns its state, checked, with its own dtypes."""
        with self.autocast():
            part = self._called("project_fold", self.project_fold, a_slice, b_slice)
        check_state("project_fold", part, self.monoid.monoid)
        rows = a_slice[0].shape[0]
        if any(field.shape[:1] != (rows,) for field in part):
            shapes = [list(field.shape) for field in part]
            raise ValueError(mismatch("project_fold", f"fields of {rows} rows, as a_slice has", shapes))
        return part

    def _element(self, part: Any) -> Any:
        """The state of a slice pair in the form that is folded: detached, and in at least float32."""
        make = maker(part)
        element = make(_widen(field.detach()) for field in part)
        rowless = [(field.dtype, field.shape[1:]) for field in element]
        if self.rowless is None:
            self.make, self.rowless = make, rowless
        elif rowless != self.rowless:
            expected = f"a fold over the rows of b_slice, {_described(self.rowless)} as for other slices"
            raise ValueError(mismatch("project_fold", expected, _described(rowless)))
        return element

    def _constant_slice_pair(self, a_slice: Sequence[Tensor], b_slice: Sequence[Tensor]) -> Any:
        """The element of a pair of slices that do not require gradients.

        Raises ValueError if the state requires one: it then comes from a tensor that project_fold closes
        over.
        """
        with torch.set_grad_enabled(self.monoid.refuse_closures):
            part = self._slice_pair(a_slice, b_slice)
        if any(field.requires_grad for field in part):
            message = _uses_another_tensor("project_fold", "a_slice and b_slice")
            raise ValueError(f"{message}; move it into a or b, or detach it")
        return self._element(part)

    def refuse_transformed_closures(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        """Raise ValueError if project_fold closes over a tensor that torch.func transforms.

        Such a tensor would silently get zero gradients. It shows only here, inside the transforms, where the
        state of plain tensors must be plain too; the passes themselves run outside of them.
        """
        if any(map(is_transformed, self._slice_pair(*_rows_of_zeros(a, b)))):
            raise ValueError(
                "project_fold: expected a function of a_slice and b_slice alone, got one that uses another "
                "tensor, which torch.func transforms; move it into a or b"
            )

    def _slice_pair_gradients(
        self, a_slice: list[Tensor], b_slice: list[Tensor], total: Any, upstream: Any
    ) -> Sequence[Tensor | None]:
        """The contributions of a slice pair to the gradients of those of its tensors that require one."""
        leaves = [t for t in (*a_slice, *b_slice) if t.requires_grad]
        if self.fused_backward is not None:
            return self._given_gradients(
                "fused_backward", self.fused_backward, a_slice, b_slice, total, upstream
            )
        with torch.set_grad_enabled(self.project_fold_backward is None):
            part = self._slice_pair(a_slice, b_slice)
        element = self._element(part)
        local = self.monoid.local_gradient(total, element, upstream)
        if self.project_fold_backward is None:
            pairs = zip(part, local, strict=True)
            roots = [(field, g.to(field.dtype)) for field, g in pairs if field.requires_grad]
            if not roots:
                return [None] * len(leaves)
            fields, local_gradients = zip(*roots, strict=True)
            return torch.autograd.grad(fields, leaves, local_gradients, allow_unused=True)
        function = self.project_fold_backward
        return self._given_gradients("project_fold_backward", function, a_slice, b_slice, local)

    def _given_gradients(
        self,
        name: str,
        function: Callable[..., Any],
        a_slice: list[Tensor],
        b_slice: list[Tensor],
        *states: Any,
    ) -> list[Tensor | None]:
        """Gradients from the caller's function `name`, checked."""
        given = self._called(name, function, a_slice, b_slice, *states)
        return _check_gradients(name, given, a_slice, b_slice)

    def _called(
        self,
        name: str,
        function: Callable[..., Any],
        a_slice: Sequence[Tensor],
        b_slice: Sequence[Tensor],
        *states: Any,
    ) -> Any:
        """Call a function of the caller; raises ValueError if it changes an argument in place.

        Its first call gets copies, so that the caller's tensors stay intact if it does.
        """
        if name not in self.tried or torch.compiler.is_compiling():
            a_slice, b_slice = _copied(a_slice), _copied(b_slice)
            states = tuple(maker(state)(_copied(state)) for state in states)
            self.tried.add(name)
        arguments = (*a_slice, *b_slice, *(g for state in states for g in state))
        before = versions(arguments)
        result = function(*self._arguments(a_slice, b_slice), *states)
        if versions(arguments) != before:
            raise ValueError(f"{name}: expected its arguments left as they are, got one changed in place")
        return result

    def _arguments(self, a_slice: Sequence[Tensor], b_slice: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        return (
            a_slice[0] if self.a_is_tensor else tuple(a_slice),
            b_slice[0] if self.b_is_tensor else tuple(b_slice),
        )

    def _identity(self, rows: int, a: Sequence[Tensor], b: Sequence[Tensor]) -> Any:
        """The identity for `rows` rows. Shapes and dtypes come from calling project_fold on rows of zeros."""
        part = self._constant_slice_pair(*_rows_of_zeros(a, b))
        return self.monoid.identity(maker(part)(field.new_empty(rows, *field.shape[1:]) for field in part))


class _MapReduce(torch.autograd.Function):
    @staticmethod
    def forward(problem: _Problem, a_count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        constants = [t.detach() for t in inputs]
        total, jacobians = problem.fold(constants[:a_count], constants[a_count:])
        return (*total, *jacobians)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.problem, ctx.a_count, *tensors = inputs
        _remember(ctx, tensors, output, fields=len(output) - sum(ctx.problem.jacobians))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[2:]
        tensors = *ctx.saved_tensors, *upstream[: len(upstream) - sum(ctx.problem.jacobians)]
        call = ctx.problem, ctx.a_count, needed, *tensors
        gradients = _applied("monoidreduce.map_reduce", _MapReduceGradient, *call)
        return None, None, *_in_place_of(gradients, needed)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _one_by_one(_MapReduce, info, in_dims, arguments)


class _MapReduceGradient(_DifferentiableOnce):
    @staticmethod
    def forward(
        problem: _Problem, a_count: int, needed: tuple[bool, ...], *tensors: Any
    ) -> tuple[Tensor, ...]:
        """The gradients of the `needed` inputs.

        tensors: the inputs, the total's fields, the Jacobians of the forward pass, the upstream gradients.
        """
        count, folded = len(needed), sum(problem.jacobians)
        fields = (len(tensors) - count - folded) // 2
        inputs, total = tensors[:count], tensors[count : count + fields]
        filled = _fill(tensors[len(tensors) - fields :], total)
        if not folded:
            return problem.gradients(inputs[:a_count], inputs[a_count:], needed, total, filled)
        jacobians = iter(tensors[count + fields : count + fields + folded])
        of_a = [
            (_per_row(filled[0], t) * next(jacobians)).to(t.dtype) if asked else None
            for t, asked in zip(inputs, problem.jacobians, strict=False)
        ]
        left = [need and at >= a_count for at, need in enumerate(needed)]
        of_b = problem.gradients(inputs[:a_count], inputs[a_count:], left, total, filled)
        return (*(g for g, need in zip(of_a, needed, strict=False) if need and g is not None), *of_b)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _one_by_one(_MapReduceGradient, info, in_dims, arguments)


def _one_by_one(function: Any, info: Any, in_dims: Any, arguments: Any) -> Any:
    """The vmap rule, as a loop: project_fold may be any function, and peak memory stays that of one call."""

    def at(entry: int) -> list[Any]:
        pairs = zip(arguments, in_dims, strict=True)
        return [a.select(dim, entry) if isinstance(dim, int) else a for a, dim in pairs]

    if info.batch_size == 0:
        raise ValueError("map_reduce: expected one sample or more from torch.func.vmap, got none")
    outputs = [function.apply(*at(entry)) for entry in range(info.batch_size)]
    stacked = tuple(map(torch.stack, zip(*outputs, strict=True)))
    return stacked, (0,) * len(stacked)


def _map_reduce(problem: _Problem, a: Sequence[Tensor], b: Sequence[Tensor]) -> Any:
    if torch.compiler.is_compiling() and _records((*a, *b)):  # by torch.export: torch.compile is outside
        raise RuntimeError(
            "map_reduce: expected no gradient in torch.export, whose program would lose it: export under "
            "torch.no_grad(), got a tensor that requires one"
        )
    if transforms_are_active():
        problem.refuse_transformed_closures(a, b)
    results = _applied("monoidreduce.map_reduce", _MapReduce, problem, len(a), *a, *b)
    assert problem.make is not None
    return problem.make(results[: len(results) - sum(problem.jacobians)])


@cache
def _disabled_map_reduce() -> Any:
    return torch.compiler.disable(_map_reduce)  # type: ignore[no-untyped-call]


def _untraced_map_reduce(*call: Any) -> Any:
    """`_map_reduce`, which torch.compile does not trace, nor anything that it calls.

    torch.compiler.disable imports torch._dynamo, which takes seconds. Until something else has imported it,
    the mark below is enough.
    """
    return (_disabled_map_reduce() if "torch._dynamo" in sys.modules else _map_reduce)(*call)


mark_untraced(
    _untraced_map_reduce,
    "map_reduce runs as it is: traced with its backward pass, it would store what all pairs give",
)


def _records(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _exports() -> bool:
    """Whether torch.export traces. It drops backward passes of autograd.Function without an error, so that
    gradients of its programs come from what forward is made of. Always False before torch 2.7."""
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()


def _apply(function: Any, options: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> Any:
    # Without gradients torch.compile would pass ctx to forward, which is wrong for functions with
    # setup_context.
    if torch.compiler.is_compiling() and (not _records(tensors) or _exports()):
        return function.forward(*options, *tensors)
    if torch.compiler.is_compiling():
        return function.apply(*options, *tensors)
    return _applied("monoidreduce.fold", function, *options, *tensors)


def _applied(name: str, function: Any, *arguments: Any) -> Any:
    """function.apply, with the named error where torch alone sees tangents: below a level of gradients.

    A method `jvp` could raise it too, but torch.compile traces no function that has one.
    """
    try:
        return function.apply(*arguments)
    except NotImplementedError as error:
        if "implement the jvp function" not in str(error):
            raise
        raise no_forward_mode(name) from None


def _remember(
    ctx: Any, inputs: Sequence[Tensor], results: Sequence[Tensor], fields: int | None = None
) -> None:
    """Save inputs and results for backward. fields: number of results that are fields of the state."""
    ctx.save_for_backward(*inputs, *results)
    ctx.set_materialize_grads(False)
    state, others = results[:fields], results[len(results[:fields]) :]
    ctx.mark_non_differentiable(*(field for field in state if not field.dtype.is_floating_point), *others)


def _in_place_of(gradients: Sequence[Tensor], needed: Sequence[bool]) -> Iterator[Tensor | None]:
    """The gradients at the positions that are needed, None elsewhere."""
    remaining = iter(gradients)
    return (next(remaining) if need else None for need in needed)


def _widen(field: Tensor) -> Tensor:
    return field.float() if field.dtype in (torch.float16, torch.bfloat16) else field


def _wide(field: Tensor) -> Tensor:
    """The field, widened, to pass to a method of a monoid.

    While torch.compile traces, version counters are not available, and an in-place change would reach the
    caller's tensor, so the method gets a copy.
    """
    return _widen(field).clone() if torch.compiler.is_compiling() else _widen(field)


def _copied(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies with version counters, even under torch.inference_mode."""
    if torch.compiler.is_compiling():
        return [t.clone() for t in tensors]
    with torch.inference_mode(False):
        return [t.clone() for t in tensors]


def _first_entries(state: Any) -> Any:
    """A copy of the first entry along the first batch axis, if there is one."""
    batched = min(field.dim() for field in state) > 0
    return maker(state)(_copied(field[:1] if batched else field for field in state))


def _fill(upstream: Sequence[Tensor | None], total: Sequence[Tensor]) -> list[Tensor]:
    """The upstream gradients, with expanded zeros where none arrives; batched if the others are batched."""
    given = [g for g in upstream if g is not None]
    zero = (*given, total[0])[0].new_zeros(())
    pairs = zip(upstream, total, strict=True)
    return [zero.to(field.dtype).expand_as(field) if g is None else g for g, field in pairs]


def _rows_of_zeros(*sides: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    return ([torch.zeros(1, *t.shape[1:], dtype=t.dtype, device=t.device) for t in side] for side in sides)


def _uses_another_tensor(name: str, arguments: str) -> str:
    expected, got = f"a function of {arguments} alone", "one that uses another tensor"
    return mismatch(name, expected, f"{got}, which requires gradients and would get none")


def _slices(tensors: Sequence[Tensor], chunk: int) -> Iterator[slice]:
    rows = tensors[0].shape[0]
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))


def _plain_hooks() -> AbstractContextManager[Any]:
    """Saved-tensor hooks that do nothing, to override the caller's."""
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def visits_of(a: Any, b: Any, pairs: Any, a_chunk: Any, b_chunk: Any) -> Visits:
    """Each slice of a with the slices of b that it is folded with, from arguments of `map_reduce`."""
    of_a = [*_slices(_check_sliced("a", a), _check_chunk("a_chunk", a_chunk))]
    of_b = [*_slices(_check_sliced("b", b), _check_chunk("b_chunk", b_chunk))]
    if isinstance(pairs, Tensor):
        if check_tensor("pairs", pairs).dtype is not torch.bool:
            raise TypeError(mismatch("pairs", "a tensor of torch.bool, or a function", pairs.dtype))
        sizes = {"slices of a": len(of_a), "slices of b": len(of_b)}
        check_axes("pairs", pairs, tuple(sizes), sizes)
        of_each = zip(of_a, pairs.tolist(), strict=True)
        return [(i, [*compress(of_b, folded)]) for i, folded in of_each]
    if pairs is not None and not callable(pairs):
        expected = "a function, or a bool tensor [slices of a, slices of b]"
        raise TypeError(mismatch("pairs", expected, repr(pairs)))

    def is_folded(a_rows: slice, b_rows: slice) -> bool:
        found = pairs(a_rows, b_rows)
        if not isinstance(found, bool):
            raise TypeError(mismatch("pairs", "a function that returns True or False", repr(found)))
        return found

    return [(i, of_b if pairs is None else [j for j in of_b if is_folded(i, j)]) for i in of_a]


def _jacobians(a: Sequence[Tensor]) -> tuple[bool, ...]:
    """Whether each tensor may need a gradient. Inside torch.func, requires_grad does not tell, so all may."""
    if not torch.is_grad_enabled():
        return ()
    hidden = transforms_are_active()
    return tuple(t.dtype.is_floating_point and (t.requires_grad or hidden) for t in a)


def _other_leaves(of: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether the autograd graph of a tensor reaches a leaf that is not in `leaves`."""
    nodes, seen, known = [of.grad_fn], set(), {id(t) for t in leaves}
    if of.requires_grad and of.grad_fn is None:
        return id(of) not in known  # a leaf itself
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return True
        nodes += [next_node for next_node, _ in node.next_functions]
    return False


def _per_row(numbers: Tensor, like: Tensor) -> Tensor:
    """View [rows] so that it broadcasts over a tensor [rows, ...]."""
    return numbers.reshape(-1, *(1,) * (like.dim() - 1))


def _leaves(tensors: Sequence[Tensor], rows: slice, needed: Sequence[bool]) -> list[Tensor]:
    return [t.detach()[rows].requires_grad_(need) for t, need in zip(tensors, needed, strict=True)]


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which the gradient of `tensor` is summed: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _described(rowless: Rowless) -> str:
    return ", ".join(f"{dtype} {['rows', *shape]}".replace("'", "") for dtype, shape in rowless)


def _current_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """A context with the caller's autocast state, for project_fold in both passes.

    Backward runs on another thread, which would not have that state.
    """
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext
    return partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


def _check_monoid(monoid: Any) -> None:
    if not isinstance(monoid, Monoid):
        raise TypeError(mismatch("monoid", "an instance of a subclass of Monoid", repr(monoid)))


def _check_function(name: str, function: Any) -> None:
    if not callable(function):
        raise TypeError(mismatch(name, "a function", repr(function)))


def _check_sliced(name: str, tensors: Any) -> tuple[Tensor, ...]:
    parts = (tensors,) if isinstance(tensors, Tensor) else tensors
    if not isinstance(parts, tuple) or not parts:
        raise TypeError(mismatch(name, "a tensor or a tuple of tensors", repr(tensors)))
    for part in parts:
        check_tensor(name, part)
    if any(part.dim() == 0 for part in parts) or len({part.shape[0] for part in parts}) > 1:
        shapes = [list(part.shape) for part in parts]
        raise ValueError(mismatch(name, "tensors that agree on the size of axis 0", f"shapes {shapes}"))
    return parts


def _check_one_device(name: str, tensors: Sequence[Tensor]) -> None:
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise ValueError(mismatch(name, "tensors on one device", " and ".join(devices)))


def _check_chunk(name: str, chunk: int | None) -> int:
    if chunk is None:
        return _DEFAULT_CHUNK
    check_int(name, chunk, "an int > 0, or None")
    if chunk <= 0:
        raise ValueError(mismatch(name, "an int > 0, or None", chunk))
    return chunk


def _check_gradients(
    name: str, given: Any, a_slice: list[Tensor], b_slice: list[Tensor]
) -> list[Tensor | None]:
    """Check what the function `name` returned; return the gradients of the tensors that require one."""
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(mismatch(name, "a pair (gradient of a_slice, gradient of b_slice)", repr(given)))
    wanted = []
    for gradients, tensors in zip(given, (a_slice, b_slice), strict=True):
        flat = gradients if isinstance(gradients, tuple) else (gradients,)
        if len(flat) != len(tensors):
            raise ValueError(mismatch(name, f"gradients of {len(tensors)} tensors", len(flat)))
        for gradient, tensor in zip(flat, tensors, strict=True):
            if gradient is not None and not isinstance(gradient, Tensor):
                raise TypeError(mismatch(name, "a tensor or None", repr(gradient)))
            if gradient is not None and gradient.shape != tensor.shape:
                expected = f"a gradient of shape {list(tensor.shape)}"
                raise ValueError(mismatch(name, expected, list(gradient.shape)))
            if tensor.requires_grad:
                wanted.append(gradient)
    return wanted
