"""Tests of the monoid laws: `check_monoid` tries them on samples, and shrinks the counterexample it finds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ._validate import FLOATING, mismatch
from .map_reduce import fold
from .monoids import Checked, Monoid, check_state, layout, maker

__all__ = ["LawReport", "LawResult", "MonoidLawError", "check_monoid"]

Operands: TypeAlias = dict[str, Any]

_SAMPLES = 64
_ELEMENTS = "xyzuvwst"  # names of sample states; most laws use only the first three


class MonoidLawError(AssertionError):
    """A monoid breaks a law.

    Attributes:
        law: name of the law, as in the documentation of `check_monoid`.
        counterexample: the operands that break it, by name; states with one batch axis.
    """

    def __init__(self, message: str, law: str, counterexample: Operands) -> None:
        super().__init__(message)
        self.law = law
        self.counterexample = counterexample

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by default would pass only the message.

        An error that cannot be unpickled hangs a process pool.
        """
        return type(self), (str(self), self.law, self.counterexample)


@dataclass(frozen=True)
class LawResult:
    """A law that held."""

    law: str
    cases: int  # number of states compared
    largest_difference: float  # relative to the largest entry of the field


@dataclass(frozen=True)
class LawReport:
    """The result of `check_monoid`. Its str() is a table."""

    monoid: str
    dtype: torch.dtype
    results: tuple[LawResult, ...]
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.monoid} obeys the laws of a commutative monoid with a local gradient ({self.dtype})"]
        if self.skipped:
            lines[0] += f", but for those that were not tried: {', '.join(self.skipped)}"
        width = max((len(result.law) for result in self.results), default=0)
        for law, cases, difference in ((r.law, r.cases, r.largest_difference) for r in self.results):
            agreement = f"largest difference {difference:.1e}" if difference else "exact"
            lines.append(f"  {law:<{width}}  {cases:>5} cases  {agreement}")
        return "\n".join(lines)


def check_monoid(
    monoid: Monoid[Any],
    sample: Callable[[torch.Generator, tuple[int, ...]], Any] | Any,
    *,
    dtype: torch.dtype = torch.float64,
    domain: Callable[[Any], Any] | None = None,
    skip: Iterable[str] = (),
) -> LawReport:
    """Test the laws of a commutative monoid with a local gradient on samples, in this order.

    identity: combining with the identity, on either side, leaves the other operand unchanged, without any
        rounding. Only the sign of a zero may change: torch.logaddexp(-0.0, -inf), and 0.0 added to -0.0, are
        0.0.
    empty fold: the identity combined with itself, and the fold of no elements, is exactly the identity,
        except for the sign of a zero. The local gradient there is not NaN.
    commutativity and associativity: up to rounding, also with the identity in between.
    batch axes: combine over two batch axes gives the same as over one.
    infinities: combining with the identity leaves an infinite entry unchanged, or gives NaN or the identity's
        entry. Results that are not NaN do not depend on the order of operands. Other batch entries are not
        affected.
    local gradient: local_gradient(combine(x, y), x, g) equals autograd of combine, and is not NaN, also if x
        or y is the identity.
    local gradient of a fold: the same for an element, and for a partial fold, of more than two elements.
    local gradient of a partition: the same for folds of the parts of random partitions of up to 8 elements
        (corollary 2.1.1 of the paper), and for an argument that all elements share (corollary 2.1.2).

    Args:
        monoid: an instance of any `Monoid`; autograd must be able to differentiate its combine.
        sample: sample(generator, batch_shape) -> a random state with these batch axes; generator is a CPU
            torch.Generator. Or a state that holds at least 3 samples along axis 0. Samples should be states
            as they occur in folds, finite and without ties.
        dtype: floating-point fields are converted to it; results may differ relatively by its eps**(2/3).
        domain: domain(state) -> a state that can occur in folds, close to the given one. Needed if not every
            state of the right shapes is valid, for example if weights must be non-negative. It is called with
            each sample, and with states that the laws derive from samples: with an infinite entry, or rounded
            to shorten a counterexample. It must return valid states unchanged; the identity and results of
            combine are assumed to be valid.
        skip: names of laws not to test, as above. The report lists them.

    Returns:
        A report; print it.

    Raises:
        MonoidLawError: a law is broken; shows the smallest counterexample found.
        TypeError, ValueError: `monoid`, `sample`, `dtype`, `domain` or `skip` is not as above; or a method of
            the monoid does not return a state, returns a gradient with another shape than its operand, or
            changes an operand in place.
    """
    if not isinstance(monoid, Monoid):
        raise TypeError(mismatch("monoid", "an instance of a subclass of Monoid", repr(monoid)))
    if dtype not in FLOATING:
        raise TypeError(mismatch("dtype", "a floating dtype of 16 bits or more", repr(dtype)))
    if domain is not None and not callable(domain):
        raise TypeError(mismatch("domain", "None or a function of a state", repr(domain)))
    skipped = _names_of_laws(skip)
    with torch.inference_mode(False):  # inference mode would hide combine from autograd
        checked = _Tried(monoid, domain)
        operands = _draw(checked, sample, dtype)
        results = [
            _try_law(checked, law, {name: operands[name] for name in law.operands if name in operands})
            for law in _LAWS
            if law.name not in skipped
        ]
    return LawReport(repr(monoid), dtype, tuple(results), skipped)


def _names_of_laws(skip: Any) -> tuple[str, ...]:
    names = [law.name for law in _LAWS]
    expected = f"names of laws, of {', '.join(names)}"
    if isinstance(skip, str) or not isinstance(skip, Iterable):
        raise TypeError(mismatch("skip", f"a sequence of {expected}", repr(skip)))
    skipped: tuple[str, ...] = (*skip,)
    for name in skipped:
        if name not in names:
            raise ValueError(mismatch("skip", expected, repr(name)))
    return skipped


class _Tried(Checked):
    """The monoid under test, with the domain of its states."""

    def __init__(self, monoid: Monoid[Any], domain: Callable[[Any], Any] | None) -> None:
        super().__init__(monoid)
        self._domain = domain

    def inside(self, state: Any) -> Any:
        """The state, moved into the domain if there is one."""
        if self._domain is None:
            return state
        found = self._domain(state)
        check_state("domain", found, self.monoid)
        if layout(found) != layout(state):
            raise ValueError(
                mismatch("domain", f"a state like the one given, {layout(state)}", layout(found))
            )
        return found


class _Claim(NamedTuple):
    """Two states that must agree."""

    text: str
    found: Any
    expected: Any
    exact: bool = False  # equal except for the sign of a zero; otherwise equal up to rounding
    nan_agrees: bool = False  # NaN agrees with everything


@dataclass(frozen=True)
class _Law:
    name: str
    operands: str  # letters of _ELEMENTS, for states, and g, a gradient with respect to a state
    claims: Callable[..., Iterator[_Claim]]  # (monoid, *operands)


def _identity(monoid: Monoid[Any], x: Any) -> Iterator[_Claim]:
    e = monoid.identity(x)
    if layout(e) != layout(x):
        yield _Claim("identity(x) has the shapes and dtypes of x", e, x)
    yield _Claim("combine(identity, x) = x", monoid.combine(e, x), x, exact=True)
    yield _Claim("combine(x, identity) = x", monoid.combine(x, e), x, exact=True)


def _empty_fold(monoid: Monoid[Any], x: Any, g: Any) -> Iterator[_Claim]:
    e = monoid.identity(x)
    yield _Claim("combine(identity, identity) = identity", monoid.combine(e, e), e, exact=True)
    nothing = fold(monoid, maker(x)(field.unsqueeze(1)[:, :0] for field in x), dim=1)
    wide = maker(x)(field.to(found.dtype) for field, found in zip(e, nothing, strict=True))
    yield _Claim("fold of nothing = identity", nothing, wide, exact=True)
    gradient = _gradient_state(monoid.local_gradient(e, e, g), e)
    text = "local_gradient(identity, identity, g) is not NaN"
    yield _Claim(text, gradient, maker(x)(map(_without_nan, gradient)))


def _commutativity(monoid: Monoid[Any], x: Any, y: Any) -> Iterator[_Claim]:
    yield _Claim("combine(x, y) = combine(y, x)", monoid.combine(x, y), monoid.combine(y, x))


def _associativity(monoid: Monoid[Any], x: Any, y: Any, z: Any) -> Iterator[_Claim]:
    for name, middle in (("y", y), ("identity", monoid.identity(y))):
        text = f"combine(combine(x, {name}), z) = combine(x, combine({name}, z))"
        found = monoid.combine(monoid.combine(x, middle), z)
        yield _Claim(text, found, monoid.combine(x, monoid.combine(middle, z)))


def _batch_axes(monoid: Monoid[Any], x: Any, y: Any) -> Iterator[_Claim]:
    over_two = monoid.combine(*(maker(s)(field.unsqueeze(0) for field in s) for s in (x, y)))
    found = maker(x)(field.squeeze(0) for field in over_two)
    yield _Claim("combine(x, y) over two batch axes = over one", found, monoid.combine(x, y))


def _infinities(monoid: _Tried, x: Any, y: Any, z: Any) -> Iterator[_Claim]:
    e = monoid.identity(x)
    touched = torch.arange(x[0].shape[0], device=x[0].device) % 2 == 0
    floating = [name for name, field in zip(x._fields, x, strict=True) if field.is_floating_point()]
    for name, infinity in ((name, infinity) for name in floating for infinity in (math.inf, -math.inf)):
        field = getattr(x, name)
        u = monoid.inside(x._replace(**{name: field.masked_fill(_over_batch(touched, field), infinity)}))
        where = f"with x.{name} = {infinity}"
        alone = monoid.combine(u, e)
        triples = zip(alone, e, u, strict=True)
        expected = maker(x)(torch.where((f == empty) | f.isnan(), f, own) for f, empty, own in triples)
        yield _Claim(f"combine(x, identity) = x {where}", alone, expected, exact=True)
        xy, yx = monoid.combine(alone, y), monoid.combine(y, alone)
        yield _Claim(f"combine(x, y) = combine(y, x) {where}", xy, yx, nan_agrees=True)
        found, expected = monoid.combine(xy, z), monoid.combine(alone, monoid.combine(y, z))
        text = f"combine(combine(x, y), z) = combine(x, combine(y, z)) {where}"
        yield _Claim(text, found, expected, nan_agrees=True)
        pairs = zip(xy, monoid.combine(x, y), strict=True)
        apart = maker(x)(torch.where(_over_batch(touched, f), f, plain) for f, plain in pairs)
        yield _Claim(f"combine(x, y) of a batch entry = the same {where} in another", xy, apart)


def _local_gradient(monoid: Monoid[Any], x: Any, y: Any, g: Any) -> Iterator[_Claim]:
    e = monoid.identity(x)
    for left, right, a, b in (("x", "y", x, y), ("x", "identity", x, e), ("identity", "y", e, y)):
        text = f"local_gradient(combine({left}, {right}), {left}, g) = autograd of combine"
        yield _gradient_claim(monoid, text, a, [b], g)


def _local_gradient_of_a_fold(monoid: Monoid[Any], x: Any, y: Any, z: Any, g: Any) -> Iterator[_Claim]:
    text = "local_gradient(fold of x, y, identity, z; x; g) = autograd of the combines"
    yield _gradient_claim(monoid, text, x, [y, monoid.identity(x), z], g)
    text = "local_gradient(combine(p, z), p, g) = autograd of combine, where p = combine(x, y)"
    yield _gradient_claim(monoid, text, monoid.combine(x, y), [z], g)


def _local_gradient_of_a_partition(monoid: Monoid[Any], g: Any, **elements: Any) -> Iterator[_Claim]:
    choose = random.Random(0)

    def partition(count: int) -> list[list[Any]]:
        shuffled = choose.sample([*elements.values()], len(elements))
        cuts = [0, *sorted(choose.sample(range(1, len(shuffled)), count - 1)), len(shuffled)]
        return [shuffled[begin:end] for begin, end in pairwise(cuts)]

    for count in range(1, len(elements) + 1):
        folds = [reduce(monoid.combine, part) for part in partition(count)]
        one = folds.pop(choose.randrange(count))
        text = f"local_gradient(P, P_i, g) = autograd of the combines, with {count} parts (corollary 2.1.1)"
        yield _gradient_claim(monoid, text, one, folds, g)
    yield _shared_argument_claim(monoid, partition(min(3, len(elements))), g)


_LAWS = (
    _Law("identity", "x", _identity),
    _Law("empty fold", "xg", _empty_fold),
    _Law("commutativity", "xy", _commutativity),
    _Law("associativity", "xyz", _associativity),
    _Law("batch axes", "xy", _batch_axes),
    _Law("infinities", "xyz", _infinities),
    _Law("local gradient", "xyg", _local_gradient),
    _Law("local gradient of a fold", "xyzg", _local_gradient_of_a_fold),
    _Law("local gradient of a partition", _ELEMENTS + "g", _local_gradient_of_a_partition),
)


def _gradient_claim(monoid: Monoid[Any], text: str, x: Any, others: Sequence[Any], g: Any) -> _Claim:
    """D of x in the fold of x and others, compared with autograd in float64.

    Where autograd gives NaN, the local gradient must only not be NaN.
    """
    leaf = _double(x)
    leaves = [field.requires_grad_() for field in leaf if field.is_floating_point()]
    with torch.enable_grad():
        exact_total = leaf
        for other in others:
            exact_total = monoid.combine(exact_total, _double(other))
    roots = [(field, u) for field, u in zip(exact_total, _double(g), strict=True) if field.requires_grad]
    gradients: Sequence[Tensor] = [torch.zeros_like(field) for field in leaves]
    if roots:
        fields, upstreams = zip(*roots, strict=True)
        gradients = torch.autograd.grad(fields, leaves, upstreams, allow_unused=True, materialize_grads=True)
    expected = _in_fields(leaf, gradients)
    total = x
    for other in others:
        total = monoid.combine(total, other)
    found = _gradient_state(monoid.local_gradient(total, x, g), x)
    pairs = zip(found, expected, strict=True)
    return _Claim(
        text, found, maker(x)(torch.where(e.isnan(), _without_nan(f), e.to(f.dtype)) for f, e in pairs)
    )


def _shared_argument_claim(monoid: Monoid[Any], parts: Sequence[Sequence[Any]], g: Any) -> _Claim:
    """The gradient of an argument `a` that all elements share: f(a, b) = a b, field by field, at a = 1.

    It must equal the sum over the parts of the gradients of their folds, with local gradients as upstream.
    """
    ones = _double(parts[0][0])
    ones = maker(ones)(torch.ones_like(f) if f.is_floating_point() else f for f in ones)
    leaves = [field.requires_grad_() for field in ones if field.is_floating_point()]

    def fold_of(part: Sequence[Any]) -> Any:
        elements = (
            maker(ones)(a * f if f.is_floating_point() else f for a, f in zip(ones, _double(x), strict=True))
            for x in part
        )
        return reduce(monoid.combine, elements)

    def gradient(fold: Any, upstream: Any) -> list[Tensor]:
        roots = [(f, u.to(f.dtype)) for f, u in zip(fold, upstream, strict=True) if f.requires_grad]
        if not roots:
            return [torch.zeros_like(leaf) for leaf in leaves]
        fields, grads = zip(*roots, strict=True)
        return [
            *torch.autograd.grad(
                fields, leaves, grads, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        ]

    with torch.enable_grad():
        folds = [fold_of(part) for part in parts]
        whole = reduce(monoid.combine, folds)
    expected = gradient(whole, g)
    own = [reduce(monoid.combine, part) for part in parts]
    total = reduce(monoid.combine, own)
    local = (_gradient_state(monoid.local_gradient(total, each, g), each) for each in own)
    found = [sum(terms) for terms in zip(*map(gradient, folds, local), strict=True)]
    like = maker(ones)(f.to(x.dtype) for f, x in zip(ones, parts[0][0], strict=True))
    return _Claim(
        "the sum over parts of local_gradient(P, P_i, g) dP_i/da = autograd of P by a (corollary 2.1.2)",
        _in_fields(like, (_without_nan(f) for f in found)),
        _in_fields(
            like, (torch.where(e.isnan(), _without_nan(f), e) for f, e in zip(found, expected, strict=True))
        ),
    )


def _in_fields(like: Any, gradients: Iterable[Any]) -> Any:
    """A state of the gradients of floating-point fields, with zeros in other fields."""
    remaining = iter(gradients)
    return _gradient_state([next(remaining) if f.is_floating_point() else f for f in like], like)


def _double(state: Any) -> Any:
    """A copy with floating-point fields in float64."""
    return maker(state)(f.detach().clone().double() if f.is_floating_point() else f for f in state)


def _gradient_state(gradient: Sequence[Tensor], like: Any) -> Any:
    """The gradient in the dtypes of `like`, with zeros in fields that are not floating-point."""
    pairs = zip(gradient, like, strict=True)
    return maker(like)(g.to(f.dtype) if f.is_floating_point() else torch.zeros_like(f) for g, f in pairs)


def _without_nan(field: Tensor) -> Tensor:
    return field.masked_fill(field.isnan(), 0)


def _over_batch(mask: Tensor, field: Tensor) -> Tensor:
    """View a mask [n] so that it broadcasts over a field [n, ...]."""
    return mask.reshape(mask.shape + (1,) * (field.dim() - 1))


def _draw(monoid: _Tried, sample: Any, dtype: torch.dtype) -> Operands:
    """The operands of the laws: states x, y, z (no batch entry is the identity), further states, and g."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> list[Any]:
        states = [sample(generator, (_SAMPLES,)) if callable(sample) else sample for _ in range(count)]
        for state in states:
            check_state("sample", state, monoid.monoid)
        return states

    def converted(state: Any) -> Any:
        """A copy in dtype, inside the domain. Methods may change it before the checks notice."""
        return monoid.inside(
            maker(state)(f.detach().to(dtype if f.is_floating_point() else f.dtype, copy=True) for f in state)
        )

    def at_kept(state: Any) -> Any:
        return maker(state)(field[kept] for field in state)

    states = drawn(3)
    shapes = [list(field.shape) for state in states for field in state]
    size = shapes[0][0] if shapes[0] else 0
    if size < 3 or any(shape[:1] != [size] for shape in shapes):
        raise ValueError(
            mismatch("sample", "fields with one batch axis in front, of 3 samples or more", shapes)
        )
    if not callable(sample):
        count = min(size, len(_ELEMENTS))
        states = [maker(sample)(field.roll(shift, 0) for field in sample) for shift in range(count)]
    states = [*map(converted, states)]
    is_empty = [_agreement(_Claim("", monoid.identity(s), s, exact=True))[0] for s in states[:3]]
    kept = ~torch.stack(is_empty).any(0)
    if not kept.any():
        raise ValueError(mismatch("sample", "states other than the identity", states[0]))
    g = maker(states[0])(_random_like(field[kept], generator) for field in states[0])
    if callable(sample):
        states += map(converted, drawn(len(_ELEMENTS) - 3))
    return {**dict(zip(_ELEMENTS, map(at_kept, states), strict=False)), "g": g}


def _random_like(field: Tensor, generator: torch.Generator) -> Tensor:
    if not field.is_floating_point():
        return torch.zeros_like(field)
    # device="cpu" is the generator's device; the default device may be another.
    return torch.randn(field.shape, generator=generator, dtype=torch.float64, device="cpu").to(field)


def _try_law(monoid: _Tried, law: _Law, operands: Operands) -> LawResult:
    cases, largest_difference = 0, 0.0
    for number, claim in enumerate(law.claims(monoid, **operands)):
        agrees, difference = _agreement(claim)
        if not agrees.all():
            raise _law_error(monoid, law, number, operands)
        cases += len(agrees)
        largest_difference = max(largest_difference, difference)
    return LawResult(law.name, cases, largest_difference)


def _agreement(claim: _Claim) -> tuple[Tensor, float]:
    """For every batch entry, whether the claim holds; and the largest relative difference where it does."""
    rows = torch.ones(claim.expected[0].shape[0], dtype=torch.bool, device=claim.expected[0].device)
    largest_difference = 0.0
    for found, expected in zip(claim.found, claim.expected, strict=True):
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return torch.zeros_like(rows), 0.0
        agrees = (found == expected) | (found.isnan() & expected.isnan())
        if found.is_floating_point() and not claim.exact:
            tolerance = torch.finfo(found.dtype).eps ** (2 / 3)
            difference = (found.double() - expected.double()).abs() / _scale(found, expected)
            agrees |= difference <= tolerance
            largest_difference = max([largest_difference, *difference[difference <= tolerance].tolist()])
        if claim.nan_agrees:
            agrees |= found.isnan() | expected.isnan()
        rows &= agrees.reshape(len(rows), math.prod(agrees.shape[1:])).all(1)
    return rows, largest_difference


def _scale(found: Tensor, expected: Tensor) -> Tensor:
    """1 + the largest finite magnitude, to which differences are relative."""
    magnitudes = torch.stack([found, expected]).double().abs()
    return 1 + magnitudes.masked_fill(~magnitudes.isfinite(), 0).flatten().max()


def _law_error(monoid: _Tried, law: _Law, number: int, operands: Operands) -> MonoidLawError:
    """The error for claim `number` of a law, with the counterexample shrunk as far as possible."""

    def claim_on(candidate: Operands) -> _Claim:
        return next(islice(law.claims(monoid, **candidate), number, None))

    def breaks(candidate: Operands) -> bool:
        return not bool(_agreement(claim_on(candidate))[0].all())

    first = int(_agreement(claim_on(operands))[0].logical_not().nonzero()[0])
    for start in (first, max(first - 1, 0)):
        few = {name: maker(s)(field[start : first + 1] for field in s) for name, s in operands.items()}
        if breaks(few):
            operands = few
            break
    for name, digits in ((name, digits) for name in operands for digits in (3, 2, 1)):
        state = operands[name]
        rounded = maker(state)(_round(field, digits) for field in state)
        # g is a gradient, not a state, so it has no domain.
        rounder = operands | {name: rounded if name == "g" else monoid.inside(rounded)}
        if breaks(rounder):
            operands = rounder
    claim = claim_on(operands)
    states = {**operands, "found": claim.found, "expected": claim.expected}
    # Nine digits distinguish all float32 numbers. Float64 numbers that differ only in the last bits need 17.
    digits = 9 if _format(claim.found, 9) != _format(claim.expected, 9) else 17
    lines = [f"{monoid!r} breaks the law of {law.name}: {claim.text}"]
    lines += [f"  {name:<8} = {_format(state, digits)}" for name, state in states.items()]
    if layout(claim.found) != layout(claim.expected):
        lines.append(f"  found has {layout(claim.found)}, expected {layout(claim.expected)}")
    return MonoidLawError("\n".join(lines), law.name, operands)


def _round(field: Tensor, digits: int) -> Tensor:
    """Round to significant digits. Signs stay, and nonzero numbers stay nonzero."""
    if not field.is_floating_point():
        return field
    rounded = [float(f"{x:.{digits}g}") for x in field.flatten().tolist()]
    return torch.tensor(rounded, dtype=field.dtype, device=field.device).reshape(field.shape)


def _format(state: Any, digits: int) -> str:
    """The fields as text, without the batch axis if it has one entry."""
    entries = (field[0] if field.shape[:1] == (1,) else field for field in state)
    pairs = zip(state._fields, entries, strict=True)
    return ", ".join(f"{name} {_numbers(entry.tolist(), digits)}" for name, entry in pairs)


def _numbers(values: Any, digits: int) -> str:
    if isinstance(values, list):
        return f"[{', '.join(_numbers(value, digits) for value in values)}]"
    return f"{values:.{digits}g}" if isinstance(values, float) else str(values)
