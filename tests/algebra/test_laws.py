"""check_monoid finds what is wrong with a monoid, names the right law, and shows a small counterexample."""

from __future__ import annotations

import math
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from monoid_subjects import SUBJECTS, Subject
from torch import Tensor

import monoidreduce as mr
from monoidreduce import laws
from monoidreduce.laws import LawReport
from monoidreduce.monoids import ArgMax, LogSumExp, LogWSum, Max, Product, Sum, WSum

LAWS = [
    "identity",
    "empty fold",
    "commutativity",
    "associativity",
    "batch axes",
    "infinities",
    "local gradient",
    "local gradient of a fold",
    "local gradient of a partition",
]


def subject_of(monoid: type[Any]) -> Subject:
    return next(subject for subject in SUBJECTS if type(subject.monoid) is monoid)


class WrongIdentity(Sum):
    def identity(self, like: Any) -> Any:
        return self.State(torch.ones_like(like.value))


class RoundingIdentity(Sum):
    """Right but for the last bit."""

    def combine(self, a: Any, b: Any) -> Any:
        return self.State((a.value + b.value) * (1 + 2**-52))


class WideningIdentity(LogSumExp):
    """Combines to another dtype."""

    def combine(self, a: Any, b: Any) -> Any:
        return self.State(super().combine(a, b).lse.float())


class NarrowIdentity(LogWSum):
    """Forgets the payload axes."""

    def identity(self, like: Any) -> Any:
        return self.State(torch.full_like(like.log_weight, -math.inf), torch.zeros_like(like.log_weight))


class FiniteSentinel(LogSumExp):
    """A large finite number in place of -inf."""

    def identity(self, like: Any) -> Any:
        return self.State(torch.full_like(like.lse, -1e30))

    def combine(self, a: Any, b: Any) -> Any:
        return self.State(torch.logaddexp(a.lse, b.lse).clamp(min=-1e30))


class NanOfTwoEmpties(LogSumExp):
    """Shifts by the maximum without asking whether it is -inf."""

    def combine(self, a: Any, b: Any) -> Any:
        frame = torch.maximum(a.lse, b.lse)
        return self.State(frame + torch.log(torch.exp(a.lse - frame) + torch.exp(b.lse - frame)))


class GradientNanOfTwoEmpties(LogSumExp):
    def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
        return self.State(torch.exp(a.lse - c.lse) * g.lse)


class OneSided(Sum):
    """Neutral on both sides and associative, but keeps the first operand that is not the identity."""

    def combine(self, a: Any, b: Any) -> Any:
        return self.State(torch.where(a.value == 0, b.value, a.value))


class NotAssociative(Sum):
    def identity(self, like: Any) -> Any:
        return self.State(torch.zeros_like(like.value))

    def combine(self, a: Any, b: Any) -> Any:
        return self.State(a.value + b.value + 0.1 * (a.value * b.value) ** 2)


class FixedAxis(Sum):
    """Adds up, and in between a batch axis is taken for granted."""

    def combine(self, a: Any, b: Any) -> Any:
        total = a.value + b.value
        return self.State(total if total.dim() == 2 else total.flip(-1))


class SaturatingSum(Sum):
    def combine(self, a: Any, b: Any) -> Any:
        return self.State(torch.nan_to_num(a.value + b.value))


class InfinityLeaks(LogSumExp):
    """One shift for the whole batch: right as long as every entry is finite."""

    def combine(self, a: Any, b: Any) -> Any:
        frame = torch.maximum(a.lse, b.lse).amax().clamp(min=-1e300)
        apart = super().combine(self.State(a.lse - frame), self.State(b.lse - frame))
        together = self.State(apart.lse + frame)
        alone = torch.where(
            torch.isneginf(b.lse), a.lse, torch.where(torch.isneginf(a.lse), b.lse, together.lse)
        )
        return self.State(alone)


class OnePercentOff(LogWSum):
    def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
        exact = super().local_gradient(c, a, g)
        return exact._replace(value=1.01 * exact.value)


class ForgottenTerm(LogWSum):
    """The derivative of the value with respect to the log weight is left out."""

    def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
        exact = super().local_gradient(c, a, g)
        without_value = super().local_gradient(c, a, g._replace(value=torch.zeros_like(g.value)))
        return exact._replace(log_weight=without_value.log_weight)


class NanGradientOfTheIdentity(WSum):
    def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
        exact = super().local_gradient(c, a, g)
        return exact._replace(weight=torch.where((a.weight == 0) & (c.weight > 0), math.nan, exact.weight))


class Mean(mr.Monoid[Any]):
    """Right, unless local_gradient takes the fold for one of `most` elements where it has more."""

    def __init__(self, most: int) -> None:
        self.most = most

    class State(NamedTuple):
        number: Tensor
        mean: Tensor

    def identity(self, like: Any) -> Any:
        return self.State(*map(torch.zeros_like, like))

    def combine(self, a: Any, b: Any) -> Any:
        number = a.number + b.number
        shares = (part.number.to(part.mean) / number.clamp(min=1) for part in (a, b))
        return self.State(number, sum(share * part.mean for share, part in zip(shares, (a, b), strict=True)))

    def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
        return g._replace(mean=g.mean * a.number.to(a.mean) / c.number.clamp(min=1, max=self.most))


def one_each(generator: torch.Generator, shape: tuple[int, ...]) -> Any:
    return Mean.State(torch.ones(shape, dtype=torch.int64), torch.randn(shape, generator=generator))


MUTATIONS = [
    (WrongIdentity(), Sum, "identity"),
    (RoundingIdentity(), Sum, "identity"),
    (WideningIdentity(), LogSumExp, "identity"),
    (NarrowIdentity(), LogWSum, "identity"),
    (NanOfTwoEmpties(), LogSumExp, "empty fold"),
    (GradientNanOfTwoEmpties(), LogSumExp, "empty fold"),
    (OneSided(), Sum, "commutativity"),
    (NotAssociative(), Sum, "associativity"),
    (FixedAxis(), Sum, "batch axes"),
    (SaturatingSum(), Sum, "infinities"),
    (InfinityLeaks(), LogSumExp, "infinities"),
    (OnePercentOff(), LogWSum, "local gradient"),
    (ForgottenTerm(), LogWSum, "local gradient"),
    (NanGradientOfTheIdentity(), WSum, "local gradient"),
    (Mean(2), None, "local gradient of a fold"),
    (Mean(4), None, "local gradient of a partition"),
]


@pytest.mark.parametrize(("monoid", "original", "law"), MUTATIONS, ids=[repr(m[0])[:-2] for m in MUTATIONS])
def test_every_mutation_is_caught_by_its_law(monoid: Any, original: Any, law: str) -> None:
    sample = one_each if original is None else subject_of(original).sample
    with pytest.raises(mr.MonoidLawError) as caught:
        mr.check_monoid(monoid, sample)
    assert caught.value.law == law
    assert str(caught.value).startswith(f"{monoid!r} breaks the law of {law}: ")
    assert "\n  found    = " in str(caught.value) and "\n  expected = " in str(caught.value)


@pytest.mark.parametrize(("most", "holds"), [(6, True), (5, False)])
def test_corollary_2_1_2_needs_the_local_gradient_of_each_part(most: int, holds: bool) -> None:
    """Of a fold of 6: a local gradient that is right up to 5 elements gives a wrong sum over the parts."""
    generator = torch.Generator().manual_seed(0)
    elements = [one_each(generator, (9,)) for _ in range(6)]
    elements = [x._replace(mean=x.mean.double()) for x in elements]
    g = Mean.State(torch.zeros(9, dtype=torch.int64), torch.randn(9, dtype=torch.float64))
    claim = laws._shared_argument_claim(Mean(most), [elements[:1], elements[1:3], elements[3:]], g)
    assert "corollary 2.1.2" in claim.text
    agrees, _ = laws._agreement(claim)
    assert agrees.all() if holds else not agrees.any()


@pytest.mark.parametrize("monoid", [LogWSum(), WSum(), LogSumExp(), Sum()], ids=repr)
def test_corollary_2_1_1_holds_for_every_partition(monoid: Any) -> None:
    """Elements in 1 to 8 random parts: D(P, P_i) is the gradient of one part's fold."""
    generator = torch.Generator().manual_seed(0)
    sample = subject_of(type(monoid)).sample
    *elements, g = (laws._double(sample(generator, (9,))) for _ in range(9))
    claims = laws._local_gradient_of_a_partition(monoid, g, **{f"x{i}": x for i, x in enumerate(elements)})
    *by_count, shared = claims
    for count, claim in enumerate(by_count, 1):
        assert f"with {count} parts (corollary 2.1.1)" in claim.text
        agrees, _ = laws._agreement(claim)
        assert agrees.all(), claim.text
    assert len(by_count) == 8 and "corollary 2.1.2" in shared.text


def test_every_law_has_a_mutation() -> None:
    assert {law for _, _, law in MUTATIONS} == set(LAWS)


def test_a_sentinel_for_minus_infinity_is_no_identity_of_it() -> None:
    """Combine absorbs it, and may turn -inf into it; what tells is a state beneath it."""
    mr.check_monoid(FiniteSentinel(), subject_of(LogSumExp).sample)
    beneath = LogSumExp.State(torch.tensor([-2e30, 1.0, 2.0, 3.0]))
    with pytest.raises(mr.MonoidLawError) as caught:
        mr.check_monoid(FiniteSentinel(), beneath)
    assert caught.value.law == "identity"


@pytest.mark.parametrize(("monoid", "original", "law"), MUTATIONS, ids=[repr(m[0])[:-2] for m in MUTATIONS])
def test_counterexample_is_small_and_round(monoid: Any, original: Any, law: str) -> None:
    sample = one_each if original is None else subject_of(original).sample
    with pytest.raises(mr.MonoidLawError) as caught:
        mr.check_monoid(monoid, sample)
    batch = 2 if monoid.__class__ is InfinityLeaks else 1  # one entry disturbs the other
    for state in caught.value.counterexample.values():
        for field in state:
            assert len(field) == batch
            if field.is_floating_point() and not isinstance(monoid, RoundingIdentity):
                assert all(float(f"{x:.3g}") == x for x in field.flatten().tolist())


def test_counterexample_reproduces_the_failure() -> None:
    with pytest.raises(mr.MonoidLawError) as caught:
        mr.check_monoid(NotAssociative(), subject_of(Sum).sample)
    x, y, z = (caught.value.counterexample[name] for name in "xyz")
    m = NotAssociative()
    left, right = m.combine(m.combine(x, y), z).value, m.combine(x, m.combine(y, z)).value
    assert (left - right).abs().max() > 1e-3


def test_error_text() -> None:
    """The whole of it, since it is all that a user has to go by."""

    class Halved(LogSumExp):
        def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
            return self.State(0.5 * super().local_gradient(c, a, g).lse)

    sample = LogSumExp.State(torch.tensor([0.0, 0.0, 0.0]))
    with pytest.raises(mr.MonoidLawError) as caught:
        mr.check_monoid(Halved(), sample)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "Halved() breaks the law of local gradient: local_gradient(combine(x, y), x, g) = autograd of combine"
    )
    g = float(caught.value.counterexample["g"].lse)
    assert lines[1:] == [
        "  x        = lse 0",
        "  y        = lse 0",
        f"  g        = lse {g:g}",
        f"  found    = lse {g / 4:.9g}",
        f"  expected = lse {g / 2:.9g}",
    ]


def test_error_shows_what_differs_in_the_last_bits() -> None:
    """The identity must be exact, so found and expected may have the same nine digits."""
    with pytest.raises(mr.MonoidLawError) as caught:
        mr.check_monoid(RoundingIdentity(), Sum.State(torch.tensor([0.3, 0.7, 1.1])))
    x = caught.value.counterexample["x"].value.item()
    shown = {line.split()[0]: float(line.split()[-1]) for line in str(caught.value).splitlines()[1:]}
    assert shown == {"x": x, "found": x * (1 + 2**-52), "expected": x}
    assert shown["found"] != x


@pytest.mark.parametrize("monoid", [RoundingIdentity(), Product(a=WrongIdentity())], ids=repr)
def test_error_survives_pickle(monoid: Any) -> None:
    """Process pools pickle what is raised; an error that cannot be unpickled hangs them."""
    with pytest.raises(mr.MonoidLawError) as caught:
        mr.check_monoid(monoid, monoid.State(torch.randn(5)))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is mr.MonoidLawError and str(copy) == str(caught.value)
    assert copy.law == caught.value.law == "identity"
    assert copy.counterexample == caught.value.counterexample
    assert type(copy.counterexample["x"]) is monoid.State


def test_the_sign_of_a_zero_does_not_count() -> None:
    """0.0 + -0.0 and torch.logaddexp(-0.0, -inf) are 0.0, in monoids as everybody writes them."""

    class Zero(Sum):
        def identity(self, like: Any) -> Any:
            return self.State(torch.zeros_like(like.value))

    class Plain(LogSumExp):
        def combine(self, a: Any, b: Any) -> Any:
            return self.State(torch.logaddexp(a.lse, b.lse))

    values = torch.tensor([-0.0, -1.0, 2.0, 3.0])
    mr.check_monoid(Zero(), Sum.State(values))
    mr.check_monoid(Plain(), LogSumExp.State(values))


def test_error_shows_shapes_and_dtypes_where_they_differ() -> None:
    with pytest.raises(
        mr.MonoidLawError, match=r"found has torch\.float32 \[1\], expected torch\.float64 \[1\]"
    ):
        mr.check_monoid(WideningIdentity(), subject_of(LogSumExp).sample)


def test_report() -> None:
    report = mr.check_monoid(LogWSum(), subject_of(LogWSum).sample)
    assert isinstance(report, LawReport)
    assert [result.law for result in report.results] == LAWS
    text = str(report).splitlines()
    assert text[0] == "LogWSum() obeys the laws of a commutative monoid with a local gradient (torch.float64)"
    assert len(text) == 1 + len(LAWS)
    assert all(line.strip().startswith(law) for line, law in zip(text[1:], LAWS, strict=True))
    assert "128 cases  exact" in text[1]
    associativity = report.results[LAWS.index("associativity")]
    assert associativity.cases == 128 and 0 < associativity.largest_difference < 1e-14
    assert f"largest difference {associativity.largest_difference:.1e}" in text[4]


def test_report_is_the_same_every_time() -> None:
    reports = [mr.check_monoid(WSum(), subject_of(WSum).sample) for _ in range(2)]
    assert reports[0] == reports[1]


def test_sample_may_be_a_state() -> None:
    report = mr.check_monoid(LogSumExp(), LogSumExp.State(torch.randn(5)))
    assert report.dtype == torch.float64 and report.results[0].cases == 10


def test_sample_may_contain_identities() -> None:
    """They are set aside, to be tried on purpose; what fails on them alone is not called `identity`."""
    lse = torch.tensor([-math.inf, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert mr.check_monoid(LogSumExp(), LogSumExp.State(lse)).results[0].cases == 2 * 3
    with pytest.raises(mr.MonoidLawError, match="the law of empty fold"):
        mr.check_monoid(NanOfTwoEmpties(), LogSumExp.State(lse))


def test_sample_gets_a_seeded_generator_and_the_batch_shape() -> None:
    seen = []

    def sample(generator: torch.Generator, shape: tuple[int, ...]) -> Any:
        seen.append((generator.initial_seed(), shape))
        return Sum.State(torch.randn(shape, generator=generator))

    mr.check_monoid(Sum(), sample)
    assert len(seen) == 8 and len(set(seen)) == 1


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    mr.check_monoid(Sum(), subject_of(Sum).sample)
    assert torch.equal(torch.get_rng_state(), before)


def test_works_under_no_grad_and_on_states_that_require_gradients() -> None:
    with torch.no_grad():
        mr.check_monoid(LogWSum(), subject_of(LogWSum).sample)
    state = LogSumExp.State(torch.randn(4, requires_grad=True))
    mr.check_monoid(LogSumExp(), state)
    assert state.lse.grad is None


def test_integer_gradients_may_be_anything() -> None:
    class NoneForPosition(ArgMax):
        def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
            return super().local_gradient(c, a, g)._replace(position=None)

    mr.check_monoid(NoneForPosition(), subject_of(ArgMax).sample)


def test_combine_that_autograd_cannot_see_is_reported() -> None:
    class Detached(Sum):
        def combine(self, a: Any, b: Any) -> Any:
            return self.State((a.value + b.value).detach())

    with pytest.raises(mr.MonoidLawError, match="the law of local gradient"):
        mr.check_monoid(Detached(), subject_of(Sum).sample)


def test_max_without_a_tie_count_is_caught_where_ties_occur() -> None:
    """Why Max keeps `times`: the gradient of a tie is not local without it."""

    class Plain(Max):
        def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
            return a._replace(value=g.value * (a.value == c.value))

    distinct = Max.State(torch.arange(6.0), torch.ones(6, dtype=torch.int64))
    mr.check_monoid(Plain(), distinct)
    tied = Max.State(torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.ones(4, dtype=torch.int64))
    with pytest.raises(mr.MonoidLawError, match="the law of local gradient"):
        mr.check_monoid(Plain(), tied)


class Malformed(LogWSum):
    """Returns from one method what the function makes of the right result."""

    def __init__(self, method: str, change: Any) -> None:
        self.method, self.change = method, change

    def identity(self, like: Any) -> Any:
        return self._changed("identity", super().identity(like))

    def combine(self, a: Any, b: Any) -> Any:
        return self._changed("combine", super().combine(a, b))

    def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
        return self._changed("local_gradient", super().local_gradient(c, a, g))

    def _changed(self, method: str, result: Any) -> Any:
        return self.change(result) if method == self.method else result


NO_STATE = "expected a state, that is a NamedTuple of the tensors log_weight, value, got "


@pytest.mark.parametrize(
    ("method", "change", "error", "text"),
    [
        ("identity", lambda s: None, TypeError, NO_STATE + "None"),
        ("combine", lambda s: s.value, TypeError, NO_STATE + r"a tensor, torch.float64 \[\d+, 3\]"),
        ("combine", tuple, TypeError, NO_STATE + r"tuple\(a tensor"),
        ("combine", lambda s: s._replace(value=0.0), TypeError, NO_STATE + r"State\(a tensor.*, 0.0\)"),
        ("combine", lambda s: Sum.State(s.value), TypeError, NO_STATE + "State"),
        ("local_gradient", lambda s: None, TypeError, "expected gradients of log_weight, value, got None"),
        ("local_gradient", lambda s: s[:1], TypeError, "expected gradients of log_weight, value, got tuple"),
        (
            "local_gradient",
            lambda s: s._replace(value=None),
            TypeError,
            "tensor for value, got None",
        ),
        (
            "local_gradient",
            lambda s: s._replace(value=s.value.long()),
            TypeError,
            "a floating tensor for value, got a tensor, torch.int64",
        ),
        (
            "local_gradient",
            lambda s: s._replace(log_weight=s.log_weight.sum()),
            ValueError,
            r"expected log_weight of shape \[\d+\], as the operand has it, got \[\]",
        ),
    ],
)
def test_malformed_results_name_the_method(
    method: str, change: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=rf"^Malformed\(\)\.{method}: .*{text}"):
        mr.check_monoid(Malformed(method, change), subject_of(LogWSum).sample)


@pytest.mark.parametrize("method", ["combine", "local_gradient"])
def test_changing_an_operand_in_place_is_told_apart_from_a_broken_law(method: str) -> None:
    class InPlace(Sum):
        def combine(self, a: Any, b: Any) -> Any:
            return self.State(a.value.add_(b.value)) if method == "combine" else super().combine(a, b)

        def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
            return self.State(g.value.mul_(1.0))

    sample = Sum.State(torch.randn(5, dtype=torch.float64))
    before = sample.value.clone()
    text = rf"^InPlace\(\)\.{method}: expected operands that are left as they are, got value changed in place"
    with pytest.raises(ValueError, match=text):
        mr.check_monoid(InPlace(), sample)
    assert torch.equal(sample.value, before)


def test_product_names_the_malformed_part() -> None:
    monoid = Product(good=Sum(), bad=Malformed("combine", lambda s: s.value))
    sample = monoid.State(*torch.randn(3, 5))
    with pytest.raises(TypeError, match=r"^Malformed\(\)\.combine: expected a state"):
        mr.check_monoid(monoid, sample)


def test_gradients_are_compared_in_the_dtype_of_the_field() -> None:
    """A coarser dtype must not make a coarser comparison."""

    class Coarse(Sum):
        def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
            return self.State(g.value.bfloat16())

    with pytest.raises(mr.MonoidLawError, match="the law of local gradient"):
        mr.check_monoid(Coarse(), subject_of(Sum).sample)


def test_works_in_inference_mode() -> None:
    with torch.inference_mode():
        mr.check_monoid(LogSumExp(), LogSumExp.State(torch.randn(5)))


def test_works_whatever_the_default_device_is() -> None:
    sample = Sum.State(torch.randn(5))
    with torch.device("meta"):
        mr.check_monoid(Sum(), sample)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            (LogWSum(), Sum.State(torch.ones(3))),
            TypeError,
            r"sample: expected a state of LogWSum\(\), with the fields log_weight, value, got value",
        ),
        (
            (Sum(), Sum.State(torch.ones(3, dtype=torch.complex64))),
            TypeError,
            "sample.value: expected float64, .*, got torch.complex64",
        ),
        ((Sum, None), TypeError, "monoid: expected an instance of a subclass of Monoid, got <class"),
        ((Sum(), None), TypeError, "sample: expected a state, that is a NamedTuple of tensors, got None"),
        ((Sum(), torch.ones(3)), TypeError, "sample: expected a state"),
        ((Sum(), (torch.ones(3),)), TypeError, "sample: expected a state"),
        ((Sum(), Sum.State(3.0)), TypeError, "sample: expected a state"),
        ((Sum(), lambda g, s: 3), TypeError, "sample: expected a state"),
        ((Sum(), Sum.State(torch.ones(2))), ValueError, "sample: expected .* 3 samples or more"),
        ((Sum(), Sum.State(torch.tensor(1.0))), ValueError, "sample: expected .* 3 samples or more"),
        (
            (WSum(), WSum.State(torch.ones(4), torch.ones(5))),
            ValueError,
            "sample: expected .* one batch axis",
        ),
        (
            (Sum(), Sum.State(torch.full((4,), -0.0))),
            ValueError,
            "sample: expected states other than the identity",
        ),
    ],
)
def test_bad_arguments(arguments: tuple[Any, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        mr.check_monoid(*arguments)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.complex64, "float32", None])
def test_bad_dtype(dtype: Any) -> None:
    with pytest.raises(TypeError, match="dtype: expected a floating dtype"):
        mr.check_monoid(Sum(), subject_of(Sum).sample, dtype=dtype)


# What the states of a monoid may be, and laws that are left out


class Weighted(Sum):
    """Addition of weights, none of which may be negative: the square root of the square is what it was."""

    def combine(self, a: Any, b: Any) -> Any:
        return Sum.State((a.value + b.value).square().sqrt())


def not_negative(state: Any) -> Any:
    return state._replace(value=state.value.abs())


def test_domain() -> None:
    monoid = Weighted()

    def sample(generator: torch.Generator, shape: tuple[int, ...]) -> Any:
        return Sum.State(torch.randn(shape, generator=generator))

    with pytest.raises(mr.MonoidLawError) as raised:
        mr.check_monoid(monoid, sample)
    assert raised.value.law == "identity"
    # An entry of -inf is outside as well, which the law of infinities would try.
    with pytest.raises(mr.MonoidLawError) as raised:
        mr.check_monoid(monoid, lambda *given: not_negative(sample(*given)))
    assert raised.value.law == "infinities"
    report = mr.check_monoid(monoid, sample, domain=not_negative)
    assert len(report.results) == 9 and "not tried" not in str(report)


def test_a_counterexample_is_inside_the_domain() -> None:
    class Wrong(Sum):
        def combine(self, a: Any, b: Any) -> Any:
            return Sum.State(a.value + 2 * b.value)

    def above_3(state: Any) -> Any:
        return state._replace(value=state.value.clamp(min=3.25))

    with pytest.raises(mr.MonoidLawError) as raised:
        mr.check_monoid(Wrong(), Sum.State(torch.linspace(-9, 9, 30)), domain=above_3)
    assert raised.value.counterexample["x"].value >= 3.25


def test_skip() -> None:
    sample = Sum.State(torch.linspace(0.5, 9, 30))
    report = mr.check_monoid(Weighted(), sample, skip=("infinities", "batch axes"))
    assert report.skipped == ("infinities", "batch axes")
    assert {result.law for result in report.results}.isdisjoint(report.skipped) and len(report.results) == 7
    assert "not tried: infinities, batch axes" in str(report)
    every = [result.law for result in mr.check_monoid(Sum(), sample).results]
    assert "not tried: identity" in str(mr.check_monoid(Weighted(), sample, skip=every))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        (
            {"skip": ("associative",)},
            ValueError,
            "skip: expected names of laws, of identity, .*'associative'",
        ),
        ({"skip": "identity"}, TypeError, "skip: expected a sequence of names of laws, .*, got 'identity'"),
        ({"skip": None}, TypeError, "skip: expected a sequence of names"),
        ({"domain": 3}, TypeError, "domain: expected None or a function of a state, got 3"),
        ({"domain": lambda s: s.value}, TypeError, "domain: expected a state"),
        (
            {"domain": lambda s: Sum.State(s.value[:1])},
            ValueError,
            "domain: expected a state like the one given",
        ),
    ),
)
def test_wrong_domains_and_laws(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mr.check_monoid(Sum(), Sum.State(torch.linspace(0.5, 9, 30)), **options)


class PaperAttention(mr.Monoid[Any]):
    """Table 1 of the paper, to the letter: no guard where nothing is combined with nothing."""

    State = mr.monoids.LogWSum.State

    def identity(self, like: Any) -> Any:
        return mr.monoids.LogWSum().identity(like)

    def combine(self, a: Any, b: Any) -> Any:
        z = torch.logaddexp(a.log_weight, b.log_weight)
        share_a, share_b = (a.log_weight - z).exp(), (b.log_weight - z).exp()
        return self.State(z, share_a * a.value + share_b * b.value)

    def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
        share = (a.log_weight - c.log_weight).exp()
        return self.State(share * (g.log_weight + g.value * (a.value - c.value)), share * g.value)


def test_the_papers_monoids_have_no_value_at_two_identities() -> None:
    """As docs/theorem.md says: exp(-inf + inf). All else holds, for finite log weights."""

    def sample(generator: torch.Generator, shape: tuple[int, ...]) -> Any:
        return PaperAttention.State(*torch.randn(2, *shape, generator=generator))

    with pytest.raises(mr.MonoidLawError) as raised:
        mr.check_monoid(PaperAttention(), sample)
    assert raised.value.law == "empty fold" and "combine(identity, identity)" in str(raised.value)
    report = mr.check_monoid(PaperAttention(), sample, skip=("empty fold", "infinities"))
    assert len(report.results) == 7
    mr.check_monoid(mr.monoids.LogWSum(), sample)
