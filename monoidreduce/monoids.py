"""Commutative monoids over torch tensors, each with its local gradient D.

Let P_i = x_i1 * x_i2 * ... be a fold over a commutative monoid. The monoid satisfies the local gradient
condition if d(x * y)/dx is a function D(x * y, x) of the result and x alone. Then dP_i/dx_ij = D(P_i, x_ij):
backward needs only the final fold and the elements, which can be recomputed, and no intermediate results
(MonoidReduce, Gyllensten 2025).

A state is a NamedTuple of tensors. The leading axes, shared by all fields, are batch axes; a field may have
payload axes after them. All logarithms are natural. The identity stands for "no elements": combining any
number of identities gives the identity, and neither values nor gradients become NaN.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ._results import exported
from ._validate import FLOATING, check_tensor, mismatch

__all__ = [
    "ArgMax",
    "ArgMin",
    "CrossEntropy",
    "Distillation",
    "LogSumExp",
    "LogWSum",
    "Max",
    "Min",
    "Monoid",
    "Product",
    "Sum",
    "WSum",
    "local_matrix",
    "local_tangent",
]


def __dir__() -> list[str]:
    """The public names, and the module's dunder names."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


State = TypeVar("State", bound=Sequence[Tensor])

# The neutral element of IEEE addition: x + -0.0 is x bit for bit, also for x = -0.0.
_NEUTRAL = -0.0


class Monoid(ABC, Generic[State]):
    """A commutative monoid with a local gradient. Subclass it to fold anything with `fold` and `map_reduce`.

    `combine` must be associative and commutative up to rounding, work on any number of batch axes, and not
    change its operands in place. It must be written in differentiable torch operations, so that
    `check_monoid` can verify D. `identity` must be exactly neutral on both sides, except for the sign of a
    zero.
    """

    @abstractmethod
    def identity(self, like: State) -> State:
        """The fold of no elements, with the shapes, dtypes and device of `like`; its values are not read."""

    @abstractmethod
    def combine(self, a: State, b: State) -> State:
        """a * b, batch entry by batch entry."""

    @abstractmethod
    def local_gradient(self, c: State, a: State, g: State) -> State:
        """The gradient of the loss with respect to `a`, one of the operands folded into `c`: g D(c, a).

        `g` is the gradient with respect to `c`, with zeros in fields that no gradient reaches. A field that
        is not floating-point has no gradient: it is zero in `g`, and the value returned for it is ignored.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def maker(state: Any) -> Callable[[Iterable[Tensor]], Any]:
    """A function that builds a state of the same NamedTuple type from its fields."""
    named = type(state)
    return lambda fields: named(*fields)  # torch.compile of torch 2.6 cannot trace `_make`


def check_state(name: str, state: Any, monoid: Monoid[Any]) -> None:
    """Raise TypeError unless `state` is a NamedTuple of dense real tensors with the monoid's fields."""
    if not _is_named(state) or not all(isinstance(field, Tensor) for field in state):
        raise TypeError(mismatch(name, "a state, that is a NamedTuple of tensors", _describe(state)))
    published: Any = getattr(monoid, "State", None)
    if hasattr(published, "_fields") and not _has_fields_of(published, state):
        expected = f"a state of {monoid!r}, with the fields {_listed(published._fields)}"
        raise TypeError(mismatch(name, expected, _listed(state._fields)))
    for index, field in enumerate(state):
        if field.layout is not torch.strided or field.is_nested:
            check_tensor(f"{name}.{state._fields[index]}", field)
        if field.dtype not in FLOATING and (field.dtype.is_floating_point or field.is_complex()):
            expected = "float64, float32, bfloat16, float16, an integer dtype or bool"
            raise TypeError(mismatch(f"{name}.{state._fields[index]}", expected, field.dtype))


def _is_named(state: Any) -> bool:
    # torch.compile of torch 2.6 cannot trace the truth value of `_fields`, so `len` is used.
    return isinstance(state, tuple) and hasattr(state, "_fields") and len(state) > 0


def _has_fields_of(named: Any, state: Any) -> bool:
    """Whether `state` has the fields of the NamedTuple `named`.

    The class is compared first, because torch.compile of torch 2.6 cannot compare `_fields`.
    """
    return isinstance(state, named) or state._fields == named._fields


def layout(state: Sequence[Tensor]) -> str:
    return ", ".join(f"{field.dtype} {list(field.shape)}" for field in state)


def versions(tensors: Iterable[Any]) -> list[int]:
    """The version counter of each tensor, which shows whether a function changed its arguments in place.

    It is 0 for inference tensors. While torch.compile traces, the list is empty.
    """
    if torch.compiler.is_compiling():
        return []
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class Checked(Monoid[Any]):
    """Wraps a monoid of a user: checks what its methods return, with errors that name monoid and method.

    No method may change its operands. `identity` and `combine` must return the fields of their operands.
    Shapes and dtypes are checked only for gradients; elsewhere the callers know what to expect.
    """

    def __init__(self, monoid: Monoid[Any]) -> None:
        self.monoid = monoid

    def identity(self, like: Any) -> Any:
        return self._state("identity", like)

    def combine(self, a: Any, b: Any) -> Any:
        return self._state("combine", a, b)

    def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
        gradient = self._result("local_gradient", c, a, g)
        if not isinstance(gradient, tuple) or len(gradient) != len(a):
            expected = f"gradients of {_listed(a._fields)}"
            raise TypeError(self.mismatch("local_gradient", expected, _describe(gradient)))
        for index, (found, field) in enumerate(zip(gradient, a, strict=True)):
            if not field.dtype.is_floating_point:
                continue
            if not isinstance(found, Tensor) or not found.dtype.is_floating_point:
                expected = f"a floating tensor for {a._fields[index]}"
                raise TypeError(self.mismatch("local_gradient", expected, _describe(found)))
            if found.shape != field.shape:
                expected = f"{a._fields[index]} of shape {list(field.shape)}, as the operand has it"
                raise ValueError(self.mismatch("local_gradient", expected, list(found.shape)))
        return gradient

    def __repr__(self) -> str:
        return repr(self.monoid)

    def mismatch(self, method: str, expected: str, got: object) -> str:
        return mismatch(f"{self!r}.{method}", expected, got)

    def _state(self, method: str, *operands: Any) -> Any:
        state, like = self._result(method, *operands), operands[0]
        is_one = _is_named(state) and _has_fields_of(type(like), state)
        if not is_one or not all(isinstance(field, Tensor) for field in state):
            expected = f"a state, that is a NamedTuple of the tensors {_listed(like._fields)}"
            raise TypeError(self.mismatch(method, expected, _describe(state)))
        return state

    def _result(self, method: str, *operands: Any) -> Any:
        fields = [field for state in operands for field in state]
        before = versions(fields)
        result = getattr(self.monoid, method)(*operands)
        now = versions(fields)
        if now != before:
            names = [name for state in operands for name in state._fields]
            changed = [name for name, n, b in zip(names, now, before, strict=True) if n != b]
            expected = "operands that are left as they are"
            got = f"{_listed(dict.fromkeys(changed))} changed in place"
            raise ValueError(self.mismatch(method, expected, got))
        return result


def _describe(value: Any) -> str:
    """A value as error messages show it: types instead of numbers."""
    if isinstance(value, Tensor):
        return f"a tensor, {layout([value])}"
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(map(_describe, value))})"
    return repr(value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _check_mean(name: str, field: Tensor) -> None:
    if not field.dtype.is_floating_point:
        raise TypeError(mismatch(name, "a floating dtype, since the field is divided", field.dtype))


def _over_payload(weight: Tensor, payload: Tensor) -> Tensor:
    """View a weight [*batch] as [*batch, 1, ...], so that it multiplies a payload [*batch, ...]."""
    return weight.reshape(weight.shape + (1,) * (payload.dim() - weight.dim()))


def _sum_payload(product: Tensor, weight: Tensor) -> Tensor:
    """Sum [*batch, ...] over its payload axes down to the shape of a weight [*batch]."""
    payload_axes = tuple(range(weight.dim(), product.dim()))
    return product.sum(payload_axes) if payload_axes else product


def _no_mass(name: str, log_weight: Tensor) -> Tensor:
    """-inf, the logarithm of zero mass. Raises TypeError for an integer dtype, which has no -inf."""
    if not log_weight.dtype.is_floating_point:
        raise TypeError(mismatch(name, "a floating dtype, since the field is a logarithm", log_weight.dtype))
    return torch.full_like(log_weight, -math.inf)


def _end_of(value: Tensor, sign: int) -> Tensor:
    """The largest (sign 1) or smallest (sign -1) value of a dtype: an infinity if it is floating-point."""
    if value.dtype.is_floating_point:
        return torch.full_like(value, sign * math.inf)
    if value.dtype == torch.bool:
        return torch.full_like(value, sign > 0)
    limits = torch.iinfo(value.dtype)
    return torch.full_like(value, limits.max if sign > 0 else limits.min)


def _is_empty(log_weight: Tensor) -> Tensor:
    return log_weight == -math.inf


def _log_add_exp(a: Tensor, b: Tensor) -> Tensor:
    """log(e^a + e^b).

    If one operand is -inf, the result is the other one bit for bit; gradients are 0, not NaN.
    """
    a_empty, b_empty = _is_empty(a), _is_empty(b)
    total = torch.logaddexp(a.masked_fill(a_empty, 0.0), b.masked_fill(b_empty, 0.0))
    total = torch.where(a_empty, b, torch.where(b_empty, a, total))
    return total.masked_fill(a_empty & b_empty, -math.inf)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """e^(part - whole), a softmax probability; 0 if both are -inf."""
    return torch.exp(part - whole.masked_fill(_is_empty(whole), 0.0))


class Sum(Monoid["Sum.State"]):
    """Addition. The fold of activation(<a_i, p_j>) q_j over j is the two-layer MLP."""

    @exported
    class State(NamedTuple):
        value: Tensor  # [*batch, ...]

    def identity(self, like: State) -> State:
        return self.State(torch.full_like(like.value, _NEUTRAL))

    def combine(self, a: State, b: State) -> State:
        return self.State(a.value + b.value)

    def local_gradient(self, c: State, a: State, g: State) -> State:
        return g


class WSum(Monoid["WSum.State"]):
    """A weighted mean together with its total weight.

    Weights are non-negative; weight 0 means no elements.
    """

    @exported
    class State(NamedTuple):
        weight: Tensor  # [*batch]
        value: Tensor  # [*batch, ...], the mean of the elements under their weights; 0 if there are none

    def identity(self, like: State) -> State:
        _check_mean("WSum.weight", like.weight)
        _check_mean("WSum.value", like.value)
        return self.State(torch.zeros_like(like.weight), torch.full_like(like.value, _NEUTRAL))

    def combine(self, a: State, b: State) -> State:
        weight = a.weight + b.weight
        divisor = weight.masked_fill(weight == 0, 1.0)
        share_a = _over_payload(a.weight / divisor, a.value)
        share_b = _over_payload(b.weight / divisor, b.value)
        return self.State(weight, share_a * a.value + share_b * b.value)

    def local_gradient(self, c: State, a: State, g: State) -> State:
        inverse = (1.0 / c.weight).masked_fill(c.weight == 0, 0.0)
        mean_gradient = _sum_payload(g.value * (a.value - c.value), a.weight)
        return self.State(
            g.weight + inverse * mean_gradient, _over_payload(a.weight * inverse, a.value) * g.value
        )


class LogWSum(Monoid["LogWSum.State"]):
    """WSum with logarithmic weights: the state of attention (log-sum-exp, normalised output).

    An element with log weight -inf is masked: its value is not used, even if it is NaN, and its gradients are
    0. A log weight of +inf gives NaN values, as in torch.softmax.
    """

    @exported
    class State(NamedTuple):
        log_weight: Tensor  # [*batch]
        value: Tensor  # [*batch, ...], the mean of the elements under their weights; 0 if there are none

    def identity(self, like: State) -> State:
        _check_mean("LogWSum.value", like.value)
        return self.State(
            _no_mass("LogWSum.log_weight", like.log_weight), torch.full_like(like.value, _NEUTRAL)
        )

    def combine(self, a: State, b: State) -> State:
        log_weight = _log_add_exp(a.log_weight, b.log_weight)
        mean = _WSUM.combine(self._as_shares(a, log_weight), self._as_shares(b, log_weight))
        return self.State(log_weight, mean.value)

    def local_gradient(self, c: State, a: State, g: State) -> State:
        masked = _is_empty(a.log_weight)
        share = _share(a.log_weight, c.log_weight)
        value_gradient = _sum_payload(g.value * (a.value - c.value), a.log_weight)
        log_weight = (share * (g.log_weight + value_gradient)).masked_fill(masked, 0.0)
        return self.State(log_weight, _over_payload(share, a.value) * g.value)

    @staticmethod
    def _as_shares(part: State, log_weight: Tensor) -> WSum.State:
        masked = _over_payload(_is_empty(part.log_weight), part.value)
        return WSum.State(_share(part.log_weight, log_weight), part.value.masked_fill(masked, _NEUTRAL))


_WSUM = WSum()


class LogSumExp(Monoid["LogSumExp.State"]):
    """The log of a sum of exponentials. D is the softmax probability of the element."""

    @exported
    class State(NamedTuple):
        lse: Tensor  # [*batch]

    def identity(self, like: State) -> State:
        return self.State(_no_mass("LogSumExp.lse", like.lse))

    def combine(self, a: State, b: State) -> State:
        return self.State(_log_add_exp(a.lse, b.lse))

    def local_gradient(self, c: State, a: State, g: State) -> State:
        return self.State(_share(a.lse, c.lse) * g.lse)


class CrossEntropy(Monoid["CrossEntropy.State"]):
    """Cross entropy against class indices; the loss is lse - target of the final fold.

    The state of a single class is (its logit, its logit if it is the target or else 0).
    """

    @exported
    class State(NamedTuple):
        lse: Tensor  # [*batch], log-sum-exp of the folded logits
        target: Tensor  # [*batch], the target's logit if it is among the folded ones, else 0

    def identity(self, like: State) -> State:
        return self.State(_no_mass("CrossEntropy.lse", like.lse), torch.full_like(like.target, _NEUTRAL))

    def combine(self, a: State, b: State) -> State:
        return self.State(_log_add_exp(a.lse, b.lse), a.target + b.target)

    def local_gradient(self, c: State, a: State, g: State) -> State:
        return self.State(_share(a.lse, c.lse) * g.lse, g.target)


class Distillation(Monoid["Distillation.State"]):
    """Cross entropy of a student under a teacher's distribution.

    It is LogSumExp of the student's logits, together with LogWSum of the student's logits weighted by the
    teacher's softmax. The state of a single class is (student logit, teacher logit, student logit), and the
    loss is student_lse - expectation of the final fold. With (teacher logit - student logit) as third field,
    expectation + student_lse - teacher_lse is the divergence KL(teacher || student).
    """

    @exported
    class State(NamedTuple):
        student_lse: Tensor  # [*batch]
        teacher_lse: Tensor  # [*batch]
        expectation: Tensor  # [*batch], mean under the teacher's softmax over the folded classes

    def identity(self, like: State) -> State:
        empty = _no_mass("Distillation.student_lse", like.student_lse)
        return self.State(empty, *_LOG_WSUM.identity(self._teacher(like)))

    def combine(self, a: State, b: State) -> State:
        student_lse = _log_add_exp(a.student_lse, b.student_lse)
        return self.State(student_lse, *_LOG_WSUM.combine(self._teacher(a), self._teacher(b)))

    def local_gradient(self, c: State, a: State, g: State) -> State:
        student = _share(a.student_lse, c.student_lse) * g.student_lse
        teacher = _LOG_WSUM.local_gradient(self._teacher(c), self._teacher(a), self._teacher(g))
        return self.State(student, *teacher)

    @staticmethod
    def _teacher(state: State) -> LogWSum.State:
        return LogWSum.State(state.teacher_lse, state.expectation)


_LOG_WSUM = LogWSum()


class Max(Monoid["Max.State"]):
    """The maximum, and the number of elements that attain it; NaN wins.

    The number is needed for the local gradient of ties: each of n elements tied for the maximum receives 1/n
    of the gradient, as in torch.amax.
    """

    @exported
    class State(NamedTuple):
        value: Tensor  # [*batch], of any dtype; an integer has no gradient
        times: Tensor  # [*batch], integer; 1 for a single element, 0 for no elements

    _worst: ClassVar[int] = -1  # sign of the infinity that loses against every value
    _better = staticmethod(torch.maximum)

    def identity(self, like: State) -> State:
        return self.State(_end_of(like.value, self._worst), torch.zeros_like(like.times))

    def combine(self, a: State, b: State) -> State:
        value = self._better(a.value, b.value)
        return self.State(value, a.times * _attains(a.value, value) + b.times * _attains(b.value, value))

    def local_gradient(self, c: State, a: State, g: State) -> State:
        times = a.times * _attains(a.value, c.value)
        return a._replace(value=g.value * times / c.times.clamp(min=1))


def _attains(value: Tensor, best: Tensor) -> Tensor:
    return (value == best) | (value.isnan() & best.isnan())


class Min(Max):
    """The minimum, and the number of elements that attain it; otherwise like Max."""

    _worst = 1
    _better = staticmethod(torch.minimum)


class ArgMax(Monoid["ArgMax.State"]):
    """The maximum and its position. Among ties the lowest position wins, and gets the whole gradient.

    Elements have distinct positions >= 0. Position -1 means no elements, so the argmax over values of -inf is
    a valid position, and that of an empty fold is -1. NaN wins, as in torch.argmax.
    """

    @exported
    class State(NamedTuple):
        value: Tensor  # [*batch], of any dtype; an integer has no gradient
        position: Tensor  # [*batch], signed integer

    _worst: ClassVar[int] = -1
    _beats = staticmethod(torch.gt)

    def identity(self, like: State) -> State:
        return self.State(_end_of(like.value, self._worst), torch.full_like(like.position, -1))

    def combine(self, a: State, b: State) -> State:
        a_is_nan, b_is_nan = a.value.isnan(), b.value.isnan()
        b_beats_a = self._beats(b.value, a.value) | (b_is_nan & ~a_is_nan)
        tied = (a.value == b.value) | (a_is_nan & b_is_nan)
        b_is_first = (b.position >= 0) & ((a.position < 0) | (b.position < a.position))
        take_b = b_beats_a | (tied & b_is_first)
        return self.State(torch.where(take_b, b.value, a.value), torch.where(take_b, b.position, a.position))

    def local_gradient(self, c: State, a: State, g: State) -> State:
        won = (a.position == c.position) & (a.position >= 0)
        return a._replace(value=g.value.masked_fill(~won, 0.0))


class ArgMin(ArgMax):
    """The minimum and its position; otherwise like ArgMax."""

    _worst = 1
    _beats = staticmethod(torch.lt)


class Product(Monoid[Any]):
    """Several monoids folded side by side in one pass, for example Product(lse=LogSumExp(), best=ArgMax()).

    The state is flat. The field of a monoid with one field is named by its keyword; otherwise the keyword is
    a prefix. The example has the fields lse, best_value, best_position. Every monoid must have its NamedTuple
    as attribute `State`.
    """

    def __init__(self, /, **monoids: Monoid[Any]) -> None:
        if not monoids:
            raise ValueError("monoids: expected at least one, as in Product(lse=LogSumExp(), total=Sum())")
        self._monoids = monoids
        self._states = {name: _published_state(name, monoid) for name, monoid in monoids.items()}
        names = [
            name if len(state._fields) == 1 else f"{name}_{field}"
            for name, state in self._states.items()
            for field in state._fields
        ]
        if len(set(names)) < len(names):
            raise ValueError(mismatch("monoids", "keywords that give distinct fields", _listed(names)))
        self.State: Any = _flat_state(tuple(names))

    def identity(self, like: Any) -> Any:
        return self._each("identity", like)

    def combine(self, a: Any, b: Any) -> Any:
        return self._each("combine", a, b)

    def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
        return self._each("local_gradient", c, a, g)

    def _each(self, method: str, *states: Any) -> Any:
        fields: list[Any] = []
        for name, monoid in self._monoids.items():
            make, start = self._states[name]._make, len(fields)
            parts = (make(state[start : start + len(self._states[name]._fields)]) for state in states)
            fields.extend(getattr(Checked(monoid), method)(*parts))
        return self.State._make(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return _product, (self._monoids,)

    def __repr__(self) -> str:
        return f"Product({', '.join(f'{name}={monoid!r}' for name, monoid in self._monoids.items())})"


def _product(monoids: dict[str, Monoid[Any]]) -> Product:
    return Product(**monoids)


@cache
def _flat_state(names: tuple[str, ...]) -> Any:
    """The NamedTuple of a product with these fields.

    It is not an attribute of a module, so pickle rebuilds it from the names of its fields.
    """
    state = cast(Any, namedtuple("State", names))
    state.__reduce__ = lambda self: (_make_flat_state, (names, tuple(self)))
    return state


def _make_flat_state(names: tuple[str, ...], fields: tuple[Tensor, ...]) -> Any:
    return _flat_state(names)(*fields)


def _published_state(name: str, monoid: Monoid[Any]) -> Any:
    if not isinstance(monoid, Monoid):
        raise TypeError(mismatch(name, "a Monoid", repr(monoid)))
    state = getattr(monoid, "State", None)
    if not hasattr(state, "_fields"):
        raise TypeError(mismatch(name, "a monoid that publishes its NamedTuple as State", repr(monoid)))
    return state


def local_matrix(monoid: Monoid[Any], c: Any, a: Any) -> Tensor:
    """D(c, a) as a matrix: `local_gradient(c, a, g)` is this matrix times g.

    With fields concatenated it is the matrix of equation 3 of the paper's draft. For `LogWSum` it is
    exp(a_z - c_z) [[1, a_v - c_v], [0, I]]. Its transpose maps a tangent of `a` to a tangent of `c`, which
    `local_tangent` does without building the matrix.

    Args:
        monoid: an instance of any `Monoid`.
        c, a: states with the same shapes and dtypes; a is an element, or partial fold, that is folded into c.

    Returns:
        [*batch, numbers of a, numbers of c]. The field with the fewest axes has only batch axes. Fields that
        are not floating-point have no numbers.

    Raises:
        TypeError, ValueError: `c` or `a` is not a state of the monoid or has no floating-point field, or they
            differ in shapes or dtypes.
    """
    batch = _check_local(monoid, c, a)
    c, a = (maker(state)(field.clone() for field in state) for state in (c, a))  # methods may change them
    columns = []
    for index, field in enumerate(c):
        if not field.dtype.is_floating_point:
            continue
        for number in range(math.prod(field.shape[batch:])):
            unit = torch.zeros_like(field, memory_format=torch.contiguous_format)
            unit.view(*field.shape[:batch], math.prod(field.shape[batch:]))[..., number] = 1
            g = maker(c)(unit if i == index else torch.zeros_like(f) for i, f in enumerate(c))
            columns.append(_end_to_end(monoid.local_gradient(c, a, g), a, batch))
    return torch.stack(columns, -1)


def local_tangent(monoid: Monoid[Any], c: Any, a: Any, tangent: Any) -> Any:
    """Forward mode: the tangent of c for a tangent of its element `a`, by the transpose of D(c, a).

    The tangent of a fold is the sum of the tangents that its elements give (local gradient theorem). The
    monoid's `local_gradient` must be written in differentiable torch operations.

    Args:
        monoid, c, a: as for `local_matrix`.
        tangent: a state with the shapes and dtypes of `a`; fields that are not floating-point are ignored.

    Returns:
        A state like `c`, with 0 in fields that are not floating-point. It is not differentiable.

    Raises:
        TypeError, ValueError: as `local_matrix`, or `tangent` is not as above.
    """
    _check_local(monoid, c, a)
    check_state("tangent", tangent, monoid)
    if layout(tangent) != layout(a):
        raise ValueError(mismatch("tangent", layout(a), layout(tangent)))
    with torch.inference_mode(False), torch.enable_grad():
        c, a, tangent = (maker(state)(field.detach().clone() for field in state) for state in (c, a, tangent))
        leaf = maker(c)(torch.zeros_like(f, requires_grad=f.dtype.is_floating_point) for f in c)
        gradient = monoid.local_gradient(c, a, leaf)
        pairs = zip(gradient, tangent, strict=True)
        moved = sum((g * t).sum() for g, t in pairs if t.dtype.is_floating_point)
        leaves = [f for f in leaf if f.dtype.is_floating_point]
        found = iter(torch.autograd.grad(moved, leaves, allow_unused=True, materialize_grads=True))
    return maker(c)(next(found) if f.dtype.is_floating_point else torch.zeros_like(f) for f in c)


def _check_local(monoid: Any, c: Any, a: Any) -> int:
    """Check the arguments of `local_matrix`; return the number of batch axes."""
    if not isinstance(monoid, Monoid):
        raise TypeError(mismatch("monoid", "an instance of a subclass of Monoid", repr(monoid)))
    for name, state in (("c", c), ("a", a)):
        check_state(name, state, monoid)
    if layout(c) != layout(a):
        raise ValueError(mismatch("a", f"the layout of c, {layout(c)}", layout(a)))
    if not any(field.dtype.is_floating_point for field in c):
        raise ValueError(mismatch("c", "a state with a floating field", layout(c)))
    batch: int = min(field.dim() for field in c)
    return batch


def _end_to_end(state: Any, like: Any, batch: int) -> Tensor:
    """The floating-point fields, flattened and concatenated: [*batch, numbers]."""
    floating = [g for g, f in zip(state, like, strict=True) if f.dtype.is_floating_point]
    return torch.cat([g.reshape(*g.shape[:batch], math.prod(g.shape[batch:])) for g in floating], -1)
