"""Folds over any monoid: `fold` of a sequence of states, `map_reduce` of a function of all pairs of rows.

Both keep nothing but inputs and result. Their backward passes are the local gradient theorem: if X is an
element, or a partial fold, of the final fold P, then local_gradient(P, X, g) is its gradient, whatever lies
in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ._validate import check_int, check_tensor, mismatch
from .monoids import Monoid, check_state, maker

__all__ = ["fold", "map_reduce"]

Tensors: TypeAlias = Tensor | tuple[Tensor, ...]
State = TypeVar("State", bound=Sequence[Tensor])

# Scores of 1024 x 1024 rows take 4 MiB in float32.
_DEFAULT_CHUNK = 1024


def fold(monoid: Monoid[State], values: State, dim: int = -1) -> State:
    """Fold a sequence of states, stacked along `dim`, into one.

    Args:
        monoid: an instance of any `Monoid`.
        values: a state, that is a NamedTuple of tensors, with one batch axis more than the result.
        dim: the batch axis to fold. Payload axes do not count: the batch axes are those of the field with the
            fewest, so that LogWSum with log_weight [M, N] and value [M, N, D] folds N by default.

    Returns:
        The state without that axis; the identity where it is empty. float16 and bfloat16 fields are folded,
        and returned, in float32. Differentiable once, by the monoid's local gradient, in every floating
        field.

    Raises:
        TypeError: `monoid` is not a Monoid, `values` not a NamedTuple of tensors, or `dim` not an int.
        ValueError: `dim` is out of range, or the fields disagree on its size or on their device.
        RuntimeError: when differentiated twice.
    """
    _check_monoid(monoid)
    check_state("values", values)
    check_int("dim", dim)
    batch_axes = min(field.dim() for field in values)
    if not -batch_axes <= dim < batch_axes:
        raise ValueError(mismatch("dim", f"one of the {batch_axes} batch axes of values", dim))
    axis = dim % batch_axes
    if len({field.shape[axis] for field in values}) > 1:
        shapes = [list(field.shape) for field in values]
        raise ValueError(mismatch("values", f"fields that agree on the size of axis {axis}", shapes))
    _check_one_device("values", values)
    make = maker(values)
    return make(_apply(_Fold, monoid, make, axis, *values))  # type: ignore[no-any-return]


def map_reduce(
    monoid: Monoid[State],
    project_fold: Callable[[Any, Any], State],
    a: Tensors,
    b: Tensors,
    *,
    project_fold_backward: Callable[[Any, Any, State], tuple[Any, Any]] | None = None,
    a_chunk: int | None = None,
    b_chunk: int | None = None,
) -> State:
    """P_i = fold over j of f(a_i, b_j) for every row i of `a`, without storing what all pairs of rows give.

    The batched MonoidReduce of the paper (Gyllensten 2025, Appendix C), on any device. Forward, a slice of
    `a` is folded with one slice of `b` after the other. Backward, the slice pairs are visited again:
    project_fold is recomputed under autograd, and the gradient of its result, a partial fold, is the
    monoid's local gradient (corollary 2.1.3). Peak memory is that of one slice pair plus the results: the
    state, or the gradients, which are summed over the slices in at least float32.

    Args:
        monoid: an instance of any `Monoid`.
        project_fold: project_fold(a_slice, b_slice) -> the state of that slice pair: f of each pair of their
            rows, folded over the rows of b_slice. Axis 0 of every field is that of a_slice. It is
            recomputed, so it must be deterministic. Gradients go to its arguments alone: tensors that it
            closes over must not require any.
        a, b: a tensor or a tuple of tensors, sliced on axis 0, on whose size the tensors of a tuple agree.
            project_fold receives slices in the same form.
        project_fold_backward: project_fold_backward(a_slice, b_slice, g) -> (gradient of a_slice, gradient of
            b_slice), g being the gradient of project_fold's state; gradients in the form of the slices, None
            where there is none. Autograd does it unless given.
        a_chunk, b_chunk: rows of a slice of `a` and of `b`; 1024 unless given.

    Returns:
        The states of all rows of `a`, concatenated along axis 0. float16 and bfloat16 fields are folded, and
        returned, in float32. With no rows in `b` every state is the identity and every gradient zero.
        Differentiable once.

    Raises:
        TypeError: an argument or what project_fold returns is of the wrong type.
        ValueError: sizes or devices disagree, a chunk is not positive, or project_fold closes over a tensor
            that requires gradients.
        RuntimeError: when differentiated twice.
    """
    _check_monoid(monoid)
    _check_function("project_fold", project_fold)
    if project_fold_backward is not None:
        _check_function("project_fold_backward", project_fold_backward)
    a_tensors, b_tensors = _check_sliced("a", a), _check_sliced("b", b)
    _check_one_device("a and b", (*a_tensors, *b_tensors))
    problem = _Problem(
        monoid,
        project_fold,
        project_fold_backward,
        a_is_tensor=isinstance(a, Tensor),
        b_is_tensor=isinstance(b, Tensor),
        a_chunk=_check_chunk("a_chunk", a_chunk),
        b_chunk=_check_chunk("b_chunk", b_chunk),
        refuse_closures=torch.is_grad_enabled(),
        autocast=_current_autocast(a_tensors[0].device.type),
    )
    make, *fields = _apply(_MapReduce, problem, len(a_tensors), *a_tensors, *b_tensors)
    return make(fields)  # type: ignore[no-any-return]


# The forward methods do not name their arguments: where nothing requires gradients, torch.compile takes the
# number of names for a sign of whether to pass ctx.
class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        monoid, make, axis, *fields = arguments
        total = _tree_fold(monoid, make(_widen(field) for field in fields), axis)
        ctx.monoid, ctx.make, ctx.axis = monoid, make, axis
        return _remember(ctx, fields, total)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        monoid, make, axis, count = ctx.monoid, ctx.make, ctx.axis, len(upstream)

        def gradients(*tensors: Any) -> tuple[Tensor | None, ...]:
            fields, total = tensors[:count], tensors[count : 2 * count]
            elements = make(_widen(field) for field in fields)

            def at_every_element(state: Sequence[Tensor]) -> Any:
                return make(f.unsqueeze(axis).expand_as(e) for f, e in zip(state, elements, strict=True))

            filled = _fill(tensors[2 * count :], total)
            local = monoid.local_gradient(at_every_element(total), elements, at_every_element(filled))
            return tuple(
                gradient.to(field.dtype) if field.is_floating_point() else None
                for gradient, field in zip(local, fields, strict=True)
            )

        return None, None, None, *_apply(_DifferentiableOnce, gradients, *ctx.saved_tensors, *upstream)


def _tree_fold(monoid: Monoid[Any], values: Any, axis: int) -> Any:
    """Halve the axis until it is used up; `rest`, at first the identity, takes the last of an odd size."""
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


@dataclass(frozen=True)
class _Problem:
    """What map_reduce was asked for, apart from the tensors. Here `a` and `b` are sequences of tensors."""

    monoid: Monoid[Any]
    project_fold: Callable[[Any, Any], Any]
    project_fold_backward: Callable[[Any, Any, Any], tuple[Any, Any]] | None
    a_is_tensor: bool
    b_is_tensor: bool
    a_chunk: int
    b_chunk: int
    refuse_closures: bool
    autocast: Callable[[], AbstractContextManager[Any]]

    def fold(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> Any:
        rows = a[0].shape[0]
        if rows == 0 or b[0].shape[0] == 0:
            return self._identity(rows, a, b)
        result: Any = None
        for a_rows in _slices(a, self.a_chunk):
            total: Any = None
            for b_rows in _slices(b, self.b_chunk):
                part = self._constant_slice_pair([t[a_rows] for t in a], [t[b_rows] for t in b])
                total = self.monoid.combine(self.monoid.identity(part) if total is None else total, part)
            if result is None:
                result = maker(total)(field.new_empty(rows, *field.shape[1:]) for field in total)
            for whole, field in zip(result, total, strict=True):
                whole[a_rows] = field
        return result

    def gradients(
        self, a: Sequence[Tensor], b: Sequence[Tensor], needed: Sequence[bool], total: Any, upstream: Any
    ) -> tuple[Tensor | None, ...]:
        """The gradients of those tensors of a, then b, that are `needed`; None for the others."""
        a_needed, b_needed = needed[: len(a)], needed[len(a) :]
        a_gradients = [torch.zeros_like(t) for t, need in zip(a, a_needed, strict=True) if need]
        b_gradients = [_zero_sum(t) for t, need in zip(b, b_needed, strict=True) if need]
        for a_rows in _slices(a, self.a_chunk):
            a_slice = _leaves(a, a_rows, a_needed)
            total_rows, upstream_rows = (maker(s)(field[a_rows] for field in s) for s in (total, upstream))
            a_sums = [_zero_sum(t) for t in a_slice if t.requires_grad]
            for b_rows in _slices(b, self.b_chunk):
                b_slice = _leaves(b, b_rows, b_needed)
                terms = self._slice_pair_gradients(a_slice, b_slice, total_rows, upstream_rows)
                sums = [*a_sums, *(gradient[b_rows] for gradient in b_gradients)]
                for accumulator, term in zip(sums, terms, strict=True):
                    if term is not None:
                        accumulator.add_(term)
            for gradient, a_sum in zip(a_gradients, a_sums, strict=True):
                gradient[a_rows] = a_sum
        found = iter([*a_gradients, *b_gradients])
        return tuple(next(found).to(t.dtype) if n else None for t, n in zip((*a, *b), needed, strict=True))

    def _slice_pair(self, a_slice: Sequence[Tensor], b_slice: Sequence[Tensor]) -> Any:
        """The state that project_fold gives for a pair of slices, checked, in the dtypes it gives."""
        with self.autocast():
            part = self.project_fold(*self._arguments(a_slice, b_slice))
        check_state("project_fold", part)
        rows = a_slice[0].shape[0]
        if any(field.shape[:1] != (rows,) for field in part):
            shapes = [list(field.shape) for field in part]
            raise ValueError(mismatch("project_fold", f"fields of {rows} rows, as a_slice has", shapes))
        return part

    def _constant_slice_pair(self, a_slice: Sequence[Tensor], b_slice: Sequence[Tensor]) -> Any:
        """The widened state of slices without gradients: if it has one, that is of something closed over."""
        with torch.set_grad_enabled(self.refuse_closures):
            part = self._slice_pair(a_slice, b_slice)
        if any(field.requires_grad for field in part):
            raise ValueError(
                "project_fold: expected a function of a_slice and b_slice alone, got one that uses another "
                "tensor, which requires gradients and would get none; move it into a or b, or detach it"
            )
        return maker(part)(map(_widen, part))

    def _slice_pair_gradients(
        self, a_slice: list[Tensor], b_slice: list[Tensor], total: Any, upstream: Any
    ) -> Sequence[Tensor | None]:
        """What a slice pair adds to the gradients of those of its tensors that require one."""
        leaves = [t for t in (*a_slice, *b_slice) if t.requires_grad]
        with torch.set_grad_enabled(self.project_fold_backward is None):
            part = self._slice_pair(a_slice, b_slice)
        element = maker(part)(_widen(field.detach()) for field in part)
        local = self.monoid.local_gradient(total, element, upstream)
        if self.project_fold_backward is None:
            pairs = zip(part, local, strict=True)
            roots = [(field, g.to(field.dtype)) for field, g in pairs if field.requires_grad]
            if not roots:
                return [None] * len(leaves)
            fields, local_gradients = zip(*roots, strict=True)
            return torch.autograd.grad(fields, leaves, local_gradients, allow_unused=True)
        given = self.project_fold_backward(*self._arguments(a_slice, b_slice), local)
        return _check_gradients(given, a_slice, b_slice)

    def _arguments(self, a_slice: Sequence[Tensor], b_slice: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        return (
            a_slice[0] if self.a_is_tensor else tuple(a_slice),
            b_slice[0] if self.b_is_tensor else tuple(b_slice),
        )

    def _identity(self, rows: int, a: Sequence[Tensor], b: Sequence[Tensor]) -> Any:
        """The identity of every row. A pair of rows of zeros tells what the state looks like."""
        a_row, b_row = ([t.new_zeros(1, *t.shape[1:]) for t in tensors] for tensors in (a, b))
        part = self._constant_slice_pair(a_row, b_row)
        return self.monoid.identity(maker(part)(field.new_empty(rows, *field.shape[1:]) for field in part))


class _MapReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Any, ...]:
        problem, a_count, *inputs = arguments
        constants = [t.detach() for t in inputs]
        total = problem.fold(constants[:a_count], constants[a_count:])
        ctx.problem, ctx.a_count, ctx.make = problem, a_count, maker(total)
        return ctx.make, *_remember(ctx, inputs, total)

    @staticmethod
    def backward(ctx: Any, _: None, *upstream: Tensor | None) -> tuple[Any, ...]:
        problem: _Problem = ctx.problem
        a_count, make = ctx.a_count, ctx.make
        needed: tuple[bool, ...] = ctx.needs_input_grad[2:]

        def gradients(*tensors: Any) -> tuple[Tensor | None, ...]:
            inputs, rest = tensors[: len(needed)], tensors[len(needed) :]
            total = make(rest[: len(upstream)])
            filled = make(_fill(rest[len(upstream) :], total))
            return problem.gradients(inputs[:a_count], inputs[a_count:], needed, total, filled)

        return None, None, *_apply(_DifferentiableOnce, gradients, *ctx.saved_tensors, *upstream)


class _DifferentiableOnce(torch.autograd.Function):
    """Computes gradients as one node of the graph; its own backward refuses rather than be silently wrong."""

    @staticmethod
    def forward(ctx: Any, gradients: Callable[..., tuple[Tensor | None, ...]], *tensors: Any) -> Any:
        return gradients(*tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("monoidreduce.fold and monoidreduce.map_reduce cannot be differentiated twice")


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def _remember(ctx: Any, inputs: Sequence[Tensor], total: Any) -> tuple[Tensor, ...]:
    """Keep inputs and result for the backward pass; returns the result's fields."""
    ctx.save_for_backward(*inputs, *total)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(field for field in total if not field.is_floating_point()))
    return tuple(total)


def _widen(field: Tensor) -> Tensor:
    return field.float() if field.dtype in (torch.float16, torch.bfloat16) else field


def _fill(upstream: Sequence[Tensor | None], total: Sequence[Tensor]) -> list[Tensor]:
    """Zeros, of one stored element, where no gradient arrives."""
    pairs = zip(upstream, total, strict=True)
    return [field.new_zeros(()).expand_as(field) if g is None else g for g, field in pairs]


def _slices(tensors: Sequence[Tensor], chunk: int) -> Iterator[slice]:
    rows = tensors[0].shape[0]
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))


def _leaves(tensors: Sequence[Tensor], rows: slice, needed: Sequence[bool]) -> list[Tensor]:
    return [t.detach()[rows].requires_grad_(need) for t, need in zip(tensors, needed, strict=True)]


def _zero_sum(tensor: Tensor) -> Tensor:
    """Where the gradient of `tensor` is summed up: in at least float32."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)


def _current_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """The caller's autocast state, for project_fold to run in forward and, on another thread, backward."""
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


def _check_gradients(given: Any, a_slice: list[Tensor], b_slice: list[Tensor]) -> list[Tensor | None]:
    """What project_fold_backward returned, for those tensors that require a gradient."""
    name = "project_fold_backward"
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
