"""The monoids of mr.monoids: what they mean, their laws, and empty, masked, infinite and tied states."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from monoid_subjects import PRODUCT, SUBJECTS, Subject, elements, floating
from tolerance import content, upstream_gradient
from torch import Tensor

import monoidreduce as mr
from monoidreduce.monoids import (
    ArgMax,
    ArgMin,
    CrossEntropy,
    Distillation,
    LogSumExp,
    LogWSum,
    Max,
    Min,
    Product,
    Sum,
    WSum,
)

every_monoid = pytest.mark.parametrize("subject", SUBJECTS, ids=repr)


def assert_bits_equal(found: Any, expected: Any) -> None:
    for name, f, e in zip(expected._fields, found, expected, strict=True):
        assert f.shape == e.shape and f.dtype == e.dtype, name
        assert torch.equal(content(f), content(e)), f"{name}: {f} is not {e}"


def folded(monoid: Any, state: Any, upstream: tuple[Tensor | None, ...]) -> list[Tensor]:
    """The gradients of the floating fields of `state` through mr.fold over its only axis."""
    leaves = type(state)._make(f.clone().requires_grad_(f.is_floating_point()) for f in state)
    total = mr.fold(monoid, leaves)
    pairs = [(field, g) for field, g in zip(total, upstream, strict=True) if g is not None]
    fields, gradients = zip(*pairs, strict=True)
    return list(torch.autograd.grad(fields, floating(leaves), gradients, materialize_grads=True))


@every_monoid
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_laws(subject: Subject, dtype: torch.dtype, device: torch.device) -> None:
    def sample(generator: torch.Generator, shape: tuple[int, ...]) -> Any:
        state = subject.sample(generator, shape)
        return type(state)._make(field.to(device) for field in state)

    report = mr.check_monoid(subject.monoid, sample, dtype=dtype)
    assert len(report.results) == 9 and all(result.cases >= 64 for result in report.results)


@every_monoid
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_fold_is_what_the_monoid_is_for(subject: Subject, dim: int, device: torch.device) -> None:
    """Value and gradient equal the plain torch definition's, whatever the upstream gradient."""
    state = elements(subject, 5, 4, 7, device=device)
    found, expected = mr.fold(subject.monoid, state, dim), subject.definition(state, dim)
    upstream = [upstream_gradient(field) for field in floating(found)]
    for name, f, e in zip(found._fields, found, expected, strict=True):
        torch.testing.assert_close(
            f, e, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    leaves = floating(state)
    found_gradients = torch.autograd.grad(floating(found), leaves, upstream)
    roots = [(field, g) for field, g in zip(floating(expected), upstream, strict=True) if field.requires_grad]
    fields, gradients = zip(*roots, strict=True)
    expected_gradients = torch.autograd.grad(fields, leaves, gradients)
    for f, e in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-11, atol=1e-11)


@every_monoid
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_merging_empty_states(subject: Subject, dtype: torch.dtype, device: torch.device) -> None:
    """combine(e, e) = e and combine(e, x) = x bit for bit, and no gradient is NaN: not of combine, not D."""
    monoid = subject.monoid
    x = type(elements(subject))._make(
        f.detach().to(dtype) if f.is_floating_point() else f for f in elements(subject, 33, device=device)
    )
    e = monoid.identity(x)
    assert_bits_equal(monoid.combine(e, e), e)
    assert_bits_equal(monoid.combine(e, x), x)
    assert_bits_equal(monoid.combine(x, e), x)
    for a, b in ((e, e), (e, x), (x, e)):
        leaves = [type(s)._make(f.clone().requires_grad_(f.is_floating_point()) for f in s) for s in (a, b)]
        total = floating(monoid.combine(*leaves))
        gradients = torch.autograd.grad(
            total, floating(leaves[0]) + floating(leaves[1]), [t.sign() for t in total]
        )
        assert not any(g.isnan().any() for g in gradients)
        g = type(x)._make(torch.ones_like(f) for f in x)
        local = monoid.local_gradient(monoid.combine(a, b), a, g)
        assert all(f.isfinite().all() for f in floating(local))


@every_monoid
def test_negative_zero_survives(subject: Subject) -> None:
    x = elements(subject, 2)
    x = type(x)._make(torch.full_like(f, -0.0) if f.is_floating_point() else f for f in x)
    if isinstance(subject.monoid, WSum):
        x = x._replace(weight=torch.ones_like(x.weight))
    assert_bits_equal(subject.monoid.combine(x, subject.monoid.identity(x)), x)
    assert_bits_equal(subject.monoid.combine(subject.monoid.identity(x), x), x)


@every_monoid
def test_nan_stays_in_its_batch_entry(subject: Subject) -> None:
    """A NaN in any field of one element makes that field of the fold NaN, and nothing of other entries."""
    state = type(elements(subject))._make(f.detach() for f in elements(subject, 6, 5))
    clean = mr.fold(subject.monoid, state, dim=1)
    for name, field in zip(state._fields, state, strict=True):
        if field.is_floating_point():
            poisoned = field.clone()
            poisoned[2, 3] = math.nan
            found = mr.fold(subject.monoid, state._replace(**{name: poisoned}), dim=1)
            assert getattr(found, name)[2].isnan().all()
            others = [0, 1, 3, 4, 5]
            assert_bits_equal(
                type(found)._make(f[others] for f in found), type(clean)._make(f[others] for f in clean)
            )


@every_monoid
def test_combine_does_not_touch_its_operands(subject: Subject) -> None:
    a, b = (
        type(s)._make(f.detach() for f in s) for s in (elements(subject, 9), elements(subject, 9, seed=1))
    )
    before = [f.clone() for f in (*a, *b)]
    subject.monoid.combine(a, b)
    subject.monoid.local_gradient(a, b, b)
    subject.monoid.identity(a)
    assert all(torch.equal(f, saved) for f, saved in zip((*a, *b), before, strict=True))


@pytest.mark.parametrize("payload", [(), (1,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("monoid", [LogWSum(), WSum()], ids=repr)
def test_payload_axes(monoid: Any, payload: tuple[int, ...]) -> None:
    weight = torch.rand(4, 6, dtype=torch.float64)
    value = torch.randn(4, 6, *payload, dtype=torch.float64, requires_grad=True)
    found = mr.fold(monoid, monoid.State(weight, value)).value
    shares = weight.softmax(1) if isinstance(monoid, LogWSum) else weight / weight.sum(1, keepdim=True)
    expected = torch.einsum("ij,ij...->i...", shares, value)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    g = upstream_gradient(found, "contiguous")
    (gradient,) = torch.autograd.grad(found, value, g)
    torch.testing.assert_close(gradient, torch.einsum("ij,i...->ij...", shares, g), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 7.0])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_masked_elements_have_no_influence(value: float, count: int) -> None:
    """Whatever is masked by log weight -inf, the result is that without it, and all gradients there are 0."""
    log_weight = torch.randn(7, dtype=torch.float64)
    payload = torch.randn(7, 3, dtype=torch.float64)
    masked = LogWSum.State(
        torch.cat([torch.full((count,), -math.inf, dtype=torch.float64), log_weight]),
        torch.cat([torch.full((count, 3), value, dtype=torch.float64), payload]),
    )
    upstream = (torch.tensor(1.5, dtype=torch.float64), torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64))
    found = mr.fold(LogWSum(), masked)
    expected = log_weight.logsumexp(0), log_weight.softmax(0) @ payload
    torch.testing.assert_close(tuple(found), expected, rtol=1e-14, atol=1e-14)
    gradients = folded(LogWSum(), masked, upstream)
    assert all((g[:count] == 0).all() and g.isfinite().all() for g in gradients)

    nothing = type(masked)._make(f[:count] for f in masked)
    assert_bits_equal(mr.fold(LogWSum(), nothing), LogWSum().identity(mr.fold(LogWSum(), nothing)))
    assert all((g == 0).all() for g in folded(LogWSum(), nothing, upstream))


@pytest.mark.parametrize(
    "scores", [[math.inf, 0.0, 1.0], [math.inf, math.inf], [math.inf], [math.inf, -math.inf]]
)
def test_infinite_scores_follow_softmax(scores: list[float]) -> None:
    log_weight = torch.tensor(scores, dtype=torch.float64)
    found = mr.fold(LogWSum(), LogWSum.State(log_weight, torch.ones(len(scores), dtype=torch.float64)))
    assert found.log_weight == log_weight.logsumexp(0) == math.inf
    assert found.value.isnan() and log_weight.softmax(0).isnan().any()


def test_spread_scores_do_not_overflow() -> None:
    scores = torch.tensor([-1e4, 1e4, 9999.0, -1e30], dtype=torch.float32)
    found = mr.fold(LogWSum(), LogWSum.State(scores, torch.tensor([5.0, 1.0, 2.0, 3.0])))
    assert found.log_weight == scores.logsumexp(0)
    torch.testing.assert_close(found.value, scores.softmax(0) @ torch.tensor([5.0, 1.0, 2.0, 3.0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_mean_of_a_constant_does_not_drift(dtype: torch.dtype) -> None:
    """Shares are normalised in every combine: the log weight's rounding errors do not add up in the value."""
    log_weight = 100.0 + torch.randn(1000, dtype=dtype)
    total = LogWSum().identity(LogWSum.State(log_weight[0], log_weight[0]))
    for element in log_weight:
        total = LogWSum().combine(total, LogWSum.State(element, torch.ones_like(element)))
    assert abs(total.value - 1) <= 100 * torch.finfo(dtype).eps


def test_cross_entropy_over_shards_of_the_vocabulary() -> None:
    """Merging the states of two vocabulary shards gives the loss of the whole, and its gradient."""
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 4, 5, 10, 3, 7])

    def shard(columns: slice) -> CrossEntropy.State:
        part, index = logits[:, columns], torch.arange(11)[columns]
        return CrossEntropy.State(part.logsumexp(1), torch.where(target[:, None] == index, part, 0.0).sum(1))

    state = CrossEntropy().combine(shard(slice(0, 5)), shard(slice(5, 11)))
    loss, expected = state.lse - state.target, F.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=1e-14)
    g = upstream_gradient(loss)
    (found_gradient,) = torch.autograd.grad(loss, logits, g)
    (expected_gradient,) = torch.autograd.grad(expected, logits, g)
    torch.testing.assert_close(found_gradient, expected_gradient, rtol=1e-13, atol=1e-13)


def test_distillation_losses() -> None:
    """Cross entropy and, with the other payload, the divergence, as F.cross_entropy and F.kl_div."""
    student, teacher = torch.randn(2, 6, 11, dtype=torch.float64)
    probabilities = teacher.softmax(1)
    state = mr.fold(Distillation(), Distillation.State(student, teacher, student))
    expected = F.cross_entropy(student, probabilities, reduction="none")
    torch.testing.assert_close(state.student_lse - state.expectation, expected, rtol=1e-13, atol=1e-13)
    state = mr.fold(Distillation(), Distillation.State(student, teacher, teacher - student))
    divergence = state.expectation + state.student_lse - state.teacher_lse
    expected = F.kl_div(student.log_softmax(1), probabilities, reduction="none").sum(1)
    torch.testing.assert_close(divergence, expected, rtol=1e-12, atol=1e-12)


def test_tied_maxima_share_the_gradient() -> None:
    value = torch.tensor([[3.0, 1.0, 3.0, 3.0], [2.0, 2.0, 0.0, 1.0]], requires_grad=True)
    for monoid, torch_function, sign in ((Max(), torch.amax, 1.0), (Min(), torch.amin, -1.0)):
        signed = sign * value
        total = mr.fold(monoid, monoid.State(signed, torch.ones(2, 4, dtype=torch.int64)))
        assert total.times.tolist() == [3, 2]
        g = torch.tensor([6.0, -4.0])
        (found,) = torch.autograd.grad(total.value, value, g, retain_graph=True)
        (expected,) = torch.autograd.grad(torch_function(signed, 1), value, g)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("size", range(1, 9))
def test_argmax_of_ties_is_the_first(size: int) -> None:
    """In any order of combining: the elements are folded as given, reversed and shuffled."""
    position = torch.arange(size)
    for order in (position, position.flip(0), torch.randperm(size)):
        value = torch.zeros(size, requires_grad=True)
        total = mr.fold(ArgMax(), ArgMax.State(value[order], position[order]))
        assert total.position == 0
        (gradient,) = torch.autograd.grad(total.value, value)
        assert gradient.tolist() == [1.0] + [0.0] * (size - 1)


@pytest.mark.parametrize(
    ("monoid", "worst"), [(ArgMax(), -math.inf), (ArgMin(), math.inf)], ids=["max", "min"]
)
def test_argmax_of_the_worst_value_is_an_element(monoid: Any, worst: float) -> None:
    """The identity's value does not hide elements that equal it; only nothing at all has position -1."""
    total = mr.fold(monoid, monoid.State(torch.full((5,), worst), torch.arange(5)))
    assert total.value == worst and total.position == 0
    nothing = mr.fold(monoid, monoid.State(torch.empty(0), torch.empty(0, dtype=torch.int64)))
    assert nothing.value == worst and nothing.position == -1


@pytest.mark.parametrize(("monoid", "worst"), [(Max(), -math.inf), (Min(), math.inf)], ids=["max", "min"])
def test_max_tells_nothing_from_the_worst_value(monoid: Any, worst: float) -> None:
    ones = torch.ones(3, dtype=torch.int64)
    assert mr.fold(monoid, monoid.State(torch.full((3,), worst), ones)).times == 3
    assert mr.fold(monoid, monoid.State(torch.empty(0), ones[:0])).times == 0


def test_nan_wins() -> None:
    value = torch.tensor([1.0, math.nan, 5.0, math.nan])
    for monoid in (ArgMax(), ArgMin()):
        assert mr.fold(monoid, monoid.State(value, torch.arange(4))).position == 1 == value.argmax()
    for monoid in (Max(), Min()):
        assert mr.fold(monoid, monoid.State(value, torch.ones(4, dtype=torch.int64))).value.isnan()


def test_product_is_flat_and_equals_its_parts() -> None:
    assert PRODUCT.State._fields == ("total_log_weight", "total_value", "best_value", "best_position", "lse")
    x = elements(SUBJECTS[-1], 4, 9)
    found = mr.fold(PRODUCT, x)
    parts = (
        *mr.fold(LogWSum(), LogWSum.State(*x[:2])),
        *mr.fold(ArgMax(), ArgMax.State(*x[2:4])),
        *mr.fold(LogSumExp(), LogSumExp.State(x.lse)),
    )
    assert_bits_equal(found, type(found)._make(parts))


def test_product_of_products() -> None:
    monoid = Product(inner=Product(a=Sum(), b=LogSumExp()), c=Sum())
    assert monoid.State._fields == ("inner_a", "inner_b", "c")
    x = monoid.State(*torch.randn(3, 5, dtype=torch.float64))
    expected = x.inner_a.sum(0), x.inner_b.logsumexp(0), x.c.sum(0)
    torch.testing.assert_close(tuple(mr.fold(monoid, x)), expected)


def test_product_refuses_what_it_cannot_flatten() -> None:
    class Stateless(mr.Monoid[Any]):
        identity = combine = local_gradient = None  # type: ignore[assignment]

    with pytest.raises(ValueError, match="monoids: expected at least one"):
        Product()
    with pytest.raises(TypeError, match="lse: expected a Monoid, got 3"):
        Product(lse=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x: expected a monoid that publishes its NamedTuple as State"):
        Product(x=Stateless())


def test_product_is_pickled_with_its_states() -> None:
    again = pickle.loads(pickle.dumps(PRODUCT))
    assert repr(again) == repr(PRODUCT) and again.State is PRODUCT.State
    state = elements(SUBJECTS[-1], 4)
    for found in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert type(found) is PRODUCT.State
        assert_bits_equal(found, state)
    nested = Product(inner=PRODUCT, self=Sum())
    assert repr(pickle.loads(pickle.dumps(nested))) == repr(nested)


def test_product_refuses_fields_of_one_name() -> None:
    with pytest.raises(ValueError, match="monoids: expected keywords that give distinct fields, got a_value"):
        Product(a=ArgMax(), a_value=Sum())


def test_repr_names_the_monoid() -> None:
    assert repr(LogWSum()) == "LogWSum()"
    assert repr(Product(lse=LogSumExp(), best=ArgMax())) == "Product(lse=LogSumExp(), best=ArgMax())"


def test_a_monoid_must_define_all_three() -> None:
    class Half(mr.Monoid[Any]):
        def combine(self, a: Any, b: Any) -> Any:
            return a

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
