"""mr.fold and mr.map_reduce: values, gradients by the local gradient alone, memory, edges, refusals."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from monoid_subjects import SUBJECTS, Subject, elements, floating
from tolerance import content, upstream_gradient
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from monoidreduce import reference
from monoidreduce.monoids import ArgMax, CrossEntropy, Distillation, LogSumExp, LogWSum, Max, Sum, WSum

every_monoid = pytest.mark.parametrize("subject", SUBJECTS, ids=repr)


@pytest.fixture(autouse=True)
def one_thread(threads: None) -> None:
    """The tensors here are small: threads would mostly wait for each other."""
    torch.set_num_threads(1)


def rand(*shape: int, dtype: torch.dtype = torch.float64, device: Any = "cpu") -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)


def saved_bytes(run: Callable[[], Any]) -> int:
    """What autograd keeps between forward and backward, every storage once."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        keep_alive = run()
    del keep_alive
    return sum(sizes.values())


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most memory that tensors allocated by `run` took at any one time (CPU)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        keep_alive = run()
    del keep_alive
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert peak > 0
    return peak


# --- fold ---


def one_by_one(monoid: Any, state: Any, dim: int) -> Any:
    make = type(state)._make
    total = monoid.identity(make(f.sum(dim).to(f.dtype) for f in state))
    for j in range(state[0].shape[dim]):
        total = monoid.combine(total, make(f.select(dim, j) for f in state))
    return total


@every_monoid
@pytest.mark.parametrize("size", [*range(10), 31, 32, 33, 100])
def test_fold_of_every_size_is_the_combination_of_its_elements(
    subject: Subject, size: int, device: Any
) -> None:
    state = type(elements(subject, 1))._make(f.detach() for f in elements(subject, 3, size, device=device))
    found, expected = mr.fold(subject.monoid, state, 1), one_by_one(subject.monoid, state, 1)
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == e.dtype
        torch.testing.assert_close(f, e, rtol=1e-12, atol=1e-12)


@every_monoid
def test_fold_of_nothing_is_the_identity(subject: Subject, device: Any) -> None:
    state = elements(subject, 3, 0, 2, device=device)
    found = mr.fold(subject.monoid, state, 1)
    expected = subject.monoid.identity(type(state)._make(f.new_empty(3, *f.shape[2:]) for f in state))
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(content(f), content(e))
    gradients = torch.autograd.grad(
        floating(found), floating(state), [torch.ones_like(f) for f in floating(found)]
    )
    assert all(g.shape == f.shape for g, f in zip(gradients, floating(state), strict=True))


@every_monoid
def test_fold_of_no_batch_entries(subject: Subject) -> None:
    state = elements(subject, 0, 4)
    found = mr.fold(subject.monoid, state, 1)
    assert all(f.shape == (0, *x.shape[2:]) for f, x in zip(found, state, strict=True))
    torch.autograd.grad(floating(found), floating(state), [torch.ones_like(f) for f in floating(found)])


@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_fold_counts_batch_axes_only(dim: int) -> None:
    log_weight, value = rand(4, 5, 6), rand(4, 5, 6, 2, 3)
    found = mr.fold(LogWSum(), LogWSum.State(log_weight, value), dim)
    torch.testing.assert_close(found.log_weight, log_weight.logsumexp(dim))
    assert found.value.shape == (*found.log_weight.shape, 2, 3)


def test_fold_folds_the_last_batch_axis_unless_told() -> None:
    x = LogSumExp.State(rand(4, 5))
    torch.testing.assert_close(mr.fold(LogSumExp(), x).lse, x.lse.logsumexp(-1))


@every_monoid
def test_fold_gradcheck(subject: Subject) -> None:
    state = elements(subject, 2, 5)
    leaves = floating(state)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(tensors)
        values = type(state)._make(next(remaining) if f.is_floating_point() else f for f in state)
        return tuple(floating(mr.fold(subject.monoid, values, 1)))

    assert torch.autograd.gradcheck(run, leaves)


@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 4),
    masked=st.floats(0, 1),
    payload=st.sampled_from([(), (1,), (3,)]),
    seed=st.integers(0, 2**20),
)
def test_fold_is_softmax_for_any_mask(
    size: int, batch: int, masked: float, payload: tuple[int, ...], seed: int
) -> None:
    """LogWSum with masked elements, some rows fully masked, against the reference that honours both."""
    torch.manual_seed(seed)
    keep = torch.rand(batch, size) >= masked
    scores, value = rand(batch, size), rand(batch, size, *payload)
    x = LogWSum.State(scores.masked_fill(~keep, -math.inf), value)
    found = mr.fold(LogWSum(), x, 1)
    shares = reference._softmax(x.log_weight)
    expected = torch.einsum("ij,ij...->i...", shares, value), reference._logsumexp(x.log_weight)
    torch.testing.assert_close((found.value, found.log_weight), expected, rtol=1e-12, atol=1e-12)
    upstream = [upstream_gradient(e) for e in expected]
    outputs = found.value, found.log_weight
    found_gradients = torch.autograd.grad(outputs, (scores, value), upstream, retain_graph=True)
    expected_gradients = torch.autograd.grad(expected, (scores, value), upstream)
    torch.testing.assert_close(found_gradients, expected_gradients, rtol=1e-11, atol=1e-11)
    assert (found_gradients[0][~keep] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fold_of_half_precision_is_in_float32(dtype: torch.dtype) -> None:
    """5000 ones add up to 256 or 2048 in half precision; gradients do come back in half precision."""
    value = torch.ones(5000, dtype=dtype, requires_grad=True)
    total = mr.fold(Sum(), Sum.State(value)).value
    assert total.dtype == torch.float32 and total == 5000
    (gradient,) = torch.autograd.grad(total, value)
    assert gradient.dtype == dtype and (gradient == 1).all()
    scores = torch.randn(50, dtype=dtype, requires_grad=True)
    lse = mr.fold(LogSumExp(), LogSumExp.State(scores)).lse
    torch.testing.assert_close(lse, scores.float().logsumexp(0), rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(lse, scores)
    assert torch.equal(gradient, scores.detach().float().sub(lse.detach()).exp().to(dtype))


def test_fold_keeps_inputs_and_result_alone() -> None:
    """Not what the tree combined on the way."""
    x = LogWSum.State(rand(8, 512), rand(8, 512, 16))
    inputs = sum(f.nbytes for f in x)
    result = sum(f.nbytes for f in mr.fold(LogWSum(), x))
    assert saved_bytes(lambda: mr.fold(LogWSum(), x)) == inputs + result


def test_fold_calls_the_local_gradient_once_for_all_elements() -> None:
    calls = []

    class Spy(LogSumExp):
        def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
            calls.append((c.lse.shape, a.lse.shape, g.lse.shape))
            return super().local_gradient(c, a, g)

    mr.fold(Spy(), LogSumExp.State(rand(3, 9))).lse.sum().backward()
    assert calls == [((1, 9),) * 3, ((3, 9),) * 3]  # first a trial, on copies


@every_monoid
def test_fold_without_gradient_for_some_fields(subject: Subject) -> None:
    """Upstream None: as if it were zero."""
    state = elements(subject, 4, 6)
    total = mr.fold(subject.monoid, state, 1)
    for index, field in enumerate(floating(total)):
        g = upstream_gradient(field)
        found = torch.autograd.grad(field, floating(state), g, retain_graph=True)
        zeros = [torch.zeros_like(f) for f in floating(total)]
        zeros[index] = g
        expected = torch.autograd.grad(floating(total), floating(state), zeros, retain_graph=True)
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_fold_of_strided_values_is_that_of_contiguous_ones() -> None:
    log_weight = torch.randn(6, 5, dtype=torch.float64).T[::2]
    x = LogWSum.State(log_weight, torch.randn(1, 1, 4, dtype=torch.float64).expand(3, 6, 4))
    assert not x.log_weight.is_contiguous() and x.value.stride(0) == 0
    found = mr.fold(LogWSum(), x)
    expected = mr.fold(LogWSum(), LogWSum.State(*(f.contiguous() for f in x)))
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.oldest
@pytest.mark.parametrize("requires_grad", [True, False])
def test_fold_compiles_whole(requires_grad: bool, device: Any) -> None:
    def fold(log_weight: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        total = mr.fold(LogWSum(), LogWSum.State(log_weight, value), 1)
        return total.value.sin(), total.log_weight.cos()

    leaves = [
        t.requires_grad_(requires_grad) for t in (rand(4, 5, device=device), rand(4, 5, 3, device=device))
    ]
    found, expected = torch.compile(fold, fullgraph=True, backend="aot_eager")(*leaves), fold(*leaves)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    if requires_grad:
        upstream = [upstream_gradient(e) for e in expected]
        found_gradients = torch.autograd.grad(found, leaves, upstream)
        expected_gradients = torch.autograd.grad(expected, leaves, upstream)
        torch.testing.assert_close(found_gradients, expected_gradients, rtol=1e-13, atol=1e-13)


@pytest.mark.oldest
def test_fold_exports() -> None:
    class Attend(torch.nn.Module):
        def forward(self, log_weight: Tensor, value: Tensor) -> Tensor:
            return mr.fold(LogWSum(), LogWSum.State(log_weight, value)).value

    inputs = torch.randn(4, 7), torch.randn(4, 7, 3)
    assert torch.equal(torch.export.export(Attend(), inputs).module()(*inputs), Attend()(*inputs))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((Sum, Sum.State(torch.ones(3))), TypeError, "monoid: expected an instance of a subclass of Monoid"),
        ((Sum(), torch.ones(3)), TypeError, "values: expected a state, that is a NamedTuple of tensors"),
        ((Sum(), (torch.ones(3),)), TypeError, "values: expected a state"),
        ((Sum(), Sum.State([1.0, 2.0])), TypeError, "values: expected a state"),
        ((Sum(), Sum.State(torch.ones(3)), 0.0), TypeError, "dim: expected an int, got 0.0"),
        (
            (Sum(), Sum.State(torch.ones(3)), 1),
            ValueError,
            "dim: expected one of the 1 batch axes of values, got 1",
        ),
        ((Sum(), Sum.State(torch.ones(3)), -2), ValueError, "dim: expected one of the 1 batch axes"),
        ((Sum(), Sum.State(torch.tensor(1.0))), ValueError, "dim: expected one of the 0 batch axes"),
        ((LogWSum(), LogWSum.State(torch.ones(3), torch.ones(3, 2)), 1), ValueError, "dim: .* 1 batch axes"),
        (
            (LogWSum(), LogWSum.State(torch.ones(3), torch.ones(4, 2))),
            ValueError,
            r"values: expected fields that agree on the sizes of axes up to 0, got \[\[3\], \[4, 2\]\]",
        ),
        (
            (LogWSum(), LogWSum.State(torch.ones(1, 6), torch.ones(4, 6, 2))),
            ValueError,
            r"values: expected fields that agree on .* up to 1, got \[\[1, 6\], \[4, 6, 2\]\]",
        ),
        (
            (LogWSum(), Sum.State(torch.ones(3))),
            TypeError,
            r"values: expected a state of LogWSum\(\), with the fields log_weight, value, got value",
        ),
        (
            (Sum(), Sum.State(torch.ones(3, dtype=torch.complex64, requires_grad=True))),
            TypeError,
            "values.value: expected float64, .*, got torch.complex64",
        ),
        (
            (Sum(), Sum.State(torch.ones(3).to(torch.float8_e4m3fn))),
            TypeError,
            "values.value: expected float64, .*, got torch.float8_e4m3fn",
        ),
        (
            (Sum(), Sum.State(torch.ones(3).to_sparse())),
            TypeError,
            r"values.value: expected a dense \(strided\) tensor, got layout",
        ),
        (
            (WSum(), WSum.State(torch.ones(3), torch.ones(3, device="meta"))),
            ValueError,
            "values: expected tensors on one device, got cpu and meta",
        ),
    ],
)
def test_fold_refuses(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        mr.fold(*arguments)


class Faulty(Sum):
    """Gives, in place of one method, another function of the same operands."""

    def __init__(self, method: str, function: Any) -> None:
        self.method, self.function = method, function

    def identity(self, like: Any) -> Any:
        return self.function(like) if self.method == "identity" else super().identity(like)

    def combine(self, a: Any, b: Any) -> Any:
        return self.function(a, b) if self.method == "combine" else super().combine(a, b)

    def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
        return self.function(c, a, g) if self.method == "local_gradient" else g


SCALE = torch.ones((), requires_grad=True)
IN_PLACE = "expected operands that are left as they are, got value changed in place"
FAULTS = {
    "not a state": (
        "combine",
        lambda a, b: a.value + b.value,
        TypeError,
        "expected a state, .* got a tensor",
    ),
    "another shape": (
        "combine",
        lambda a, b: Sum.State((a.value + b.value).sum(0)),
        ValueError,
        r"expected fields as in its operand, torch.float32 \[3\], got torch.float32 \[\]",
    ),
    "another dtype": (
        "identity",
        lambda like: Sum.State(like.value.double().fill_(0)),
        ValueError,
        r"expected fields as in its operand, torch.float32 \[3\], got torch.float64 \[3\]",
    ),
    "first in place": ("combine", lambda a, b: Sum.State(a.value.add_(b.value)), ValueError, IN_PLACE),
    "second in place": ("combine", lambda a, b: Sum.State(b.value.add_(a.value)), ValueError, IN_PLACE),
    "gradient in place": ("local_gradient", lambda c, a, g: Sum.State(a.value.zero_()), ValueError, IN_PLACE),
    "no gradient": (
        "local_gradient",
        lambda c, a, g: None,
        TypeError,
        "expected gradients of value, got None",
    ),
    "a narrow gradient": (
        "local_gradient",
        lambda c, a, g: Sum.State(g.value.sum()),
        ValueError,
        r"expected value of shape \[.*\], as the operand has it, got \[\]",
    ),
    "a weight of its own": (
        "combine",
        lambda a, b: Sum.State(a.value + b.value * SCALE),
        ValueError,
        "expected a function of its operands alone, got one that uses another tensor, which requires grad",
    ),
}


@pytest.mark.parametrize("operation", ["fold", "map_reduce"])
@pytest.mark.parametrize(("method", "function", "error", "text"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_monoid_is_named(
    operation: str, method: str, function: Any, error: type[Exception], text: str
) -> None:
    monoid, x = Faulty(method, function), torch.randn(3, 5, requires_grad=True)

    def run() -> Tensor:
        if operation == "fold":
            return mr.fold(monoid, Sum.State(x)).value
        return mr.map_reduce(monoid, lambda a, b: Sum.State((a @ b.T).sum(1)), x, x, b_chunk=2).value

    with pytest.raises(error, match=rf"Faulty\(\)\.{method}: {text}"):
        run().sum().backward()


def test_a_monoid_s_own_weight_may_be_used_without_gradients() -> None:
    monoid = Faulty("combine", lambda a, b: Sum.State(a.value + b.value * SCALE))
    with torch.no_grad():
        assert mr.fold(monoid, Sum.State(torch.ones(3, 5))).value.tolist() == [5.0] * 3


# --- map_reduce ---


@dataclass(frozen=True)
class Layer:
    """A layer of the paper, as a map_reduce and in plain torch, both (*inputs) -> outputs."""

    name: str
    shapes: Callable[
        [int, int], tuple[tuple[int, ...], ...]
    ]  # rows of a, of b -> shapes of the floating inputs
    reduce: Callable[..., tuple[Tensor, ...]]  # also takes the options of map_reduce
    plain: Callable[..., tuple[Tensor, ...]]

    def inputs(self, m: int, n: int, **options: Any) -> list[Tensor]:
        return [rand(*shape, **options) for shape in self.shapes(m, n)]

    def __repr__(self) -> str:
        return self.name


def project_attention(q: Tensor, kv: tuple[Tensor, Tensor]) -> LogWSum.State:
    scores = q @ kv[0].T / math.sqrt(q.shape[1])
    return LogWSum.State(scores.logsumexp(1), scores.softmax(1) @ kv[1])


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    state = mr.map_reduce(LogWSum(), project_attention, q, (k, v), **options)
    return state.value, state.log_weight


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    out, lse = reference.attention(q[None, None], k[None, None], v[None, None], return_lse=True)
    return out[0, 0], lse[0, 0]


def project_causal(q: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor, Tensor]) -> LogWSum.State:
    (q, i), (k, v, j) = q, kv
    scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(j > i[:, None], -math.inf)
    return LogWSum.State(reference._logsumexp(scores), reference._softmax(scores) @ v)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The first queries see no key at all where there are more of them than keys."""
    i, j = torch.arange(len(q), device=q.device) + len(k) - len(q), torch.arange(len(k), device=q.device)
    state = mr.map_reduce(LogWSum(), project_causal, (q, i), (k, v, j), **options)
    return state.value, state.log_weight


def plain_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    out, lse = reference.attention(q[None, None], k[None, None], v[None, None], causal=True, return_lse=True)
    return out[0, 0], lse[0, 0]


def targets(x: Tensor, weight: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device) * 7 % max(len(weight), 1)


def project_cross_entropy(
    tokens: tuple[Tensor, Tensor], classes: tuple[Tensor, Tensor]
) -> CrossEntropy.State:
    (x, target), (weight, index) = tokens, classes
    logits = x @ weight.T
    return CrossEntropy.State(logits.logsumexp(1), torch.where(target[:, None] == index, logits, 0.0).sum(1))


def cross_entropy(x: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, ...]:
    index = torch.arange(len(weight), device=x.device)
    tokens = x, targets(x, weight)
    state = mr.map_reduce(CrossEntropy(), project_cross_entropy, tokens, (weight, index), **options)
    return state.lse - state.target, state.lse


def plain_cross_entropy(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    logits = x @ weight.T
    return F.cross_entropy(logits, targets(x, weight), reduction="none"), logits.logsumexp(1)


def project_distillation(tokens: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor]) -> Distillation.State:
    student, teacher = (x @ weight.T for x, weight in zip(tokens, weights, strict=True))
    expectation = (teacher.softmax(1) * student).sum(1)
    return Distillation.State(student.logsumexp(1), teacher.logsumexp(1), expectation)


def distillation(x: Tensor, teacher_x: Tensor, weight: Tensor, teacher_weight: Tensor, **options: Any) -> Any:
    a, b = (x, teacher_x), (weight, teacher_weight)
    state = mr.map_reduce(Distillation(), project_distillation, a, b, **options)
    return (state.student_lse - state.expectation,)


def plain_distillation(x: Tensor, teacher_x: Tensor, weight: Tensor, teacher_weight: Tensor) -> Any:
    return (F.cross_entropy(x @ weight.T, (teacher_x @ teacher_weight.T).softmax(1), reduction="none"),)


def project_mlp(x: Tensor, units: tuple[Tensor, Tensor]) -> Sum.State:
    return Sum.State(F.silu(x @ units[0].T) @ units[1])


def mlp(x: Tensor, p: Tensor, q: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return (mr.map_reduce(Sum(), project_mlp, x, (p, q), **options).value,)


def project_nearest(a: Tensor, b: tuple[Tensor, Tensor]) -> ArgMax.State:
    value, at = (a @ b[0].T).max(1)
    return ArgMax.State(value, b[1][at])


def nearest(a: Tensor, b: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The largest inner product, by a project_fold that torch refuses for empty slices."""
    rows = torch.arange(len(b), device=b.device)
    return (mr.map_reduce(ArgMax(), project_nearest, a, (b, rows), **options).value,)


LAYERS = (
    Layer("attention", lambda m, n: ((m, 4), (n, 4), (n, 3)), attention, plain_attention),
    Layer("causal", lambda m, n: ((m, 4), (n, 4), (n, 3)), causal_attention, plain_causal_attention),
    Layer("cross_entropy", lambda m, n: ((m, 4), (n, 4)), cross_entropy, plain_cross_entropy),
    Layer("distillation", lambda m, n: ((m, 4), (m, 5), (n, 4), (n, 5)), distillation, plain_distillation),
    Layer(
        "mlp",
        lambda m, n: ((m, 4), (n, 4), (n, 3)),
        mlp,
        lambda x, p, q: (F.silu(x @ p.T) @ q,),
    ),
    Layer("nearest", lambda m, n: ((m, 4), (n, 4)), nearest, lambda a, b: ((a @ b.T).amax(1),)),
)
ATTENTION = LAYERS[0]
every_layer = pytest.mark.parametrize("layer", LAYERS, ids=repr)


def assert_layer(layer: Layer, inputs: list[Tensor], rtol: float = 1e-11, **options: Any) -> None:
    """Outputs and gradients equal plain torch's, for upstream gradients of any stride and value."""
    found, expected = layer.reduce(*inputs, **options), layer.plain(*inputs)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)
    upstream = [upstream_gradient(e) for e in expected]
    leaves = [x for x in inputs if x.requires_grad]
    found_gradients = torch.autograd.grad(found, leaves, upstream)
    roots = [(e, g) for e, g in zip(expected, upstream, strict=True) if e.requires_grad]
    outputs, gradients = zip(*roots, strict=True)
    expected_gradients = torch.autograd.grad(outputs, leaves, gradients, materialize_grads=True)
    torch.testing.assert_close(found_gradients, expected_gradients, rtol=rtol, atol=rtol)


@every_layer
@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 13), (13, 7), (1, 8), (8, 1), (16, 16)])
@pytest.mark.parametrize(
    ("a_chunk", "b_chunk"), [(1, 1), (3, 5), (16, 4), (None, None), (2, None), (10**6, 1)]
)
def test_layers(layer: Layer, m: int, n: int, a_chunk: int | None, b_chunk: int | None, device: Any) -> None:
    assert_layer(layer, layer.inputs(m, n, device=device), a_chunk=a_chunk, b_chunk=b_chunk)


@pytest.mark.oldest
@every_layer
def test_layers_in_float32(layer: Layer, device: Any) -> None:
    assert_layer(
        layer, layer.inputs(40, 70, dtype=torch.float32, device=device), 1e-4, a_chunk=16, b_chunk=16
    )


@every_layer
def test_gradcheck(layer: Layer) -> None:
    run = functools.partial(layer.reduce, a_chunk=2, b_chunk=3)
    assert torch.autograd.gradcheck(run, layer.inputs(3, 7))


@given(
    m=st.integers(1, 9),
    n=st.integers(1, 9),
    a_chunk=st.integers(1, 10),
    b_chunk=st.integers(1, 10),
    layer=st.sampled_from(LAYERS),
    frozen=st.sets(st.integers(0, 3)),
    seed=st.integers(0, 2**20),
)
def test_layers_of_any_size_with_any_input_frozen(
    m: int, n: int, a_chunk: int, b_chunk: int, layer: Layer, frozen: set[int], seed: int
) -> None:
    torch.manual_seed(seed)
    inputs = layer.inputs(m, n)
    for index in frozen & set(range(len(inputs) - 1)):
        inputs[index].requires_grad_(False)
    assert_layer(layer, inputs, a_chunk=a_chunk, b_chunk=b_chunk)


@every_layer
@pytest.mark.parametrize(("m", "n"), [(5, 0), (0, 5), (0, 0)])
def test_empty_sides(layer: Layer, m: int, n: int, device: Any) -> None:
    """No rows in b: the identity. No rows in a: no rows. Either way the gradients are exactly 0."""
    inputs = layer.inputs(m, n, device=device)
    outputs = layer.reduce(*inputs)
    assert all(len(out) == m for out in outputs)
    if layer.name in ("attention", "causal"):
        assert (outputs[0] == 0).all() and (outputs[1] == -math.inf).all()
    gradients = torch.autograd.grad(outputs, inputs, [torch.ones_like(out) for out in outputs])
    assert all(g.shape == x.shape and (g == 0).all() for g, x in zip(gradients, inputs, strict=True))


def test_empty_b_has_the_identity_s_index() -> None:
    rows = torch.arange(0)
    state = mr.map_reduce(ArgMax(), project_nearest, torch.randn(3, 4), (torch.randn(0, 4), rows))
    assert state.position.tolist() == [-1] * 3 and state.position.dtype == torch.int64


def test_one_tensor_on_both_sides() -> None:
    """Self-attention of a single tensor: its gradient is the sum of three parts."""
    x = rand(9, 4)
    assert_layer(
        Layer(
            "self",
            lambda m, n: (),
            lambda x, **options: attention(x, x, x, **options),
            lambda x: plain_attention(x, x, x),
        ),
        [x],
        a_chunk=4,
        b_chunk=2,
    )


def test_batches_of_heads_ride_along() -> None:
    """Axis 0 is what is sliced; what follows is the function's own business."""
    q, k, v = rand(6, 2, 3, 4), rand(9, 2, 3, 4), rand(9, 2, 3, 5)

    def project(q: Tensor, kv: tuple[Tensor, Tensor]) -> LogWSum.State:
        scores = torch.einsum("mbhf,nbhf->mbhn", q, kv[0]) / 2
        return LogWSum.State(scores.logsumexp(-1), torch.einsum("mbhn,nbhd->mbhd", scores.softmax(-1), kv[1]))

    out = mr.map_reduce(LogWSum(), project, q, (k, v), a_chunk=4, b_chunk=2).value
    expected = F.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in (q, k, v))).permute(2, 0, 1, 3)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    g = upstream_gradient(out)
    found = torch.autograd.grad(out, (q, k, v), g)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (q, k, v), g), rtol=1e-12, atol=1e-12)


@every_layer
def test_strided_inputs_give_the_same_bits(layer: Layer) -> None:
    inputs = layer.inputs(7, 9)
    strided = [
        torch.empty(*x.shape[1:], 2 * x.shape[0], dtype=x.dtype)[..., ::2]
        .movedim(-1, 0)
        .copy_(x.detach())
        .requires_grad_()
        for x in inputs
    ]
    results = []
    for leaves in (inputs, strided):
        outputs = layer.reduce(*leaves, a_chunk=3, b_chunk=4)
        upstream = [torch.full_like(out, 1.5) for out in outputs]
        results.append((*outputs, *torch.autograd.grad(outputs, leaves, upstream)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-14, atol=1e-14)


@every_layer
def test_inputs_are_left_alone_and_backward_repeats(layer: Layer) -> None:
    inputs = layer.inputs(7, 9)
    before = [x.detach().clone() for x in inputs]
    outputs = layer.reduce(*inputs, a_chunk=3, b_chunk=4)
    upstream = [upstream_gradient(out) for out in outputs]
    first = torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)
    second = torch.autograd.grad(outputs, inputs, upstream)
    assert all(torch.equal(f, s) for f, s in zip(first, second, strict=True))
    assert all(torch.equal(x, saved) for x, saved in zip(inputs, before, strict=True))


def test_gradients_of_some_outputs_only() -> None:
    q, k, v = ATTENTION.inputs(7, 9)
    for index in (0, 1):
        found, expected = attention(q, k, v, b_chunk=4)[index], plain_attention(q, k, v)[index]
        g = upstream_gradient(found)
        torch.testing.assert_close(
            torch.autograd.grad(found, (q, k, v), g, materialize_grads=True),
            torch.autograd.grad(expected, (q, k, v), g, materialize_grads=True),
            rtol=1e-12,
            atol=1e-12,
        )


def test_fields_without_gradient_stay_without() -> None:
    a, b = rand(5, 4), rand(6, 4)
    state = mr.map_reduce(ArgMax(), project_nearest, a, (b, torch.arange(6)), b_chunk=2)
    assert state.value.requires_grad and not state.position.requires_grad
    assert torch.equal(state.position, (a @ b.T).argmax(1))


def test_part_of_the_state_may_not_depend_on_the_inputs() -> None:
    """A constant field has no gradient to pull back; a wholly constant state gives zero gradients."""
    a, b = rand(5, 4), rand(6, 4)

    def weighted(a: Tensor, b: Tensor) -> WSum.State:
        weight = torch.full((len(a),), float(len(b)), dtype=a.dtype)
        return WSum.State(weight, (a @ b.T).mean(1))

    value = mr.map_reduce(WSum(), weighted, a, b, a_chunk=2, b_chunk=4).value
    torch.testing.assert_close(value, (a @ b.T).mean(1))
    found = torch.autograd.grad(value.sum(), (a, b))
    torch.testing.assert_close(found, torch.autograd.grad((a @ b.T).mean(1).sum(), (a, b)))

    def count(a: Tensor, b: Tensor) -> Sum.State:
        return Sum.State(torch.full((len(a),), float(len(b))))

    total = mr.map_reduce(Sum(), count, a, b, a_chunk=2, b_chunk=4).value
    assert (total == 6).all()
    assert all((g == 0).all() for g in torch.autograd.grad(total.sum(), (a, b)))


# --- memory ---


@pytest.mark.parametrize("rows", [512, 1024])
def test_forward_keeps_inputs_and_result_alone(rows: int) -> None:
    inputs = ATTENTION.inputs(rows, rows)
    kept = sum(x.nbytes for x in (*inputs, *attention(*inputs)))
    assert saved_bytes(lambda: attention(*inputs, a_chunk=64, b_chunk=64)) == kept


@every_layer
def test_peak_memory_is_that_of_a_slice_pair(layer: Layer) -> None:
    """Slices of 64 rows of 1024, in float32: a pair's scores take 16 KiB, the scores of all pairs 4 MiB.

    Of the former, project_fold and autograd hold at most seven at a time, distillation's with two heads.
    """
    inputs = layer.inputs(1024, 1024, dtype=torch.float32)
    outputs = layer.reduce(*inputs, a_chunk=64, b_chunk=64)
    upstream = [torch.ones_like(out) for out in outputs]
    results = sum(out.nbytes for out in outputs)
    gradients = sum(x.nbytes for x in inputs)
    pair = 64 * 64 * 4
    forward = peak_bytes(lambda: layer.reduce(*inputs, a_chunk=64, b_chunk=64))
    backward = peak_bytes(lambda: torch.autograd.grad(outputs, inputs, upstream, retain_graph=True))
    assert forward <= results + 8 * pair
    assert backward <= gradients + 8 * pair


def test_peak_memory_does_not_grow_with_b() -> None:
    """Twice the columns: the forward pass takes not a byte more, backward only their gradients."""
    peaks = []
    for n in (1024, 2048):
        q, k, v = ATTENTION.inputs(256, n, dtype=torch.float32)
        forward = peak_bytes(lambda q=q, k=k, v=v: attention(q, k, v, a_chunk=128, b_chunk=128))
        out = attention(q, k, v, a_chunk=128, b_chunk=128)[0].sum()
        backward = peak_bytes(lambda q=q, k=k, v=v, out=out: torch.autograd.grad(out, (q, k, v)))
        peaks.append((forward, backward - k.nbytes - v.nbytes))
    assert peaks[1][0] <= peaks[0][0] + 4096
    assert peaks[1][1] <= peaks[0][1] + 4096


def test_nothing_is_computed_for_frozen_inputs() -> None:
    """The peak is below what buffers for the gradients of v as well would take."""
    q, k, v = ATTENTION.inputs(64, 16384, dtype=torch.float32)
    q, v = q.detach(), v.detach()
    out = attention(q, k, v, a_chunk=64, b_chunk=64)[0].sum()
    peak = peak_bytes(lambda: torch.autograd.grad(out, k))
    assert peak < k.nbytes + v.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    """Over 4096 slices of one row: half-precision sums would stop growing at 256 or 2048."""
    a, b = (
        torch.ones(2, 1, dtype=dtype, requires_grad=True),
        torch.ones(4096, 1, dtype=dtype, requires_grad=True),
    )

    def project(a: Tensor, b: Tensor) -> Sum.State:
        return Sum.State((a @ b.T).sum(1))

    total = mr.map_reduce(Sum(), project, a, b, a_chunk=1, b_chunk=1).value
    assert total.dtype == torch.float32 and (total == 4096).all()
    a_gradient, b_gradient = torch.autograd.grad(total.sum(), (a, b))
    assert a_gradient.dtype == b_gradient.dtype == dtype
    assert (a_gradient == 4096).all() and (b_gradient == 2).all()


# --- project_fold_backward ---


def pull_back_mlp(
    x: Tensor, units: tuple[Tensor, Tensor], g: Sum.State
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    p, q = units
    z = x @ p.T
    sigmoid = z.sigmoid()
    dz = (g.value @ q.T) * sigmoid * (1 + z * (1 - sigmoid))
    return dz @ p, (dz.T @ x, (z * sigmoid).T @ g.value)


def test_project_fold_backward_takes_the_place_of_autograd() -> None:
    calls = []

    def pull_back(*arguments: Any) -> Any:
        assert not torch.is_grad_enabled()
        calls.append(arguments)
        return pull_back_mlp(*arguments)

    layer = Layer(
        "mlp", LAYERS[4].shapes, functools.partial(mlp, project_fold_backward=pull_back), LAYERS[4].plain
    )
    assert_layer(layer, layer.inputs(7, 9), a_chunk=4, b_chunk=3)
    assert len(calls) == 2 * 3


@pytest.mark.parametrize("frozen", range(3))
def test_project_fold_backward_may_skip_gradients(frozen: int) -> None:
    """None for what needs no gradient; None for a whole side, or in a tuple."""

    def pull_back(x: Tensor, units: tuple[Tensor, Tensor], g: Sum.State) -> Any:
        dx, (dp, dq) = pull_back_mlp(x, units, g)
        return None if frozen == 0 else dx, (None if frozen == 1 else dp, None if frozen == 2 else dq)

    inputs = LAYERS[4].inputs(7, 9)
    inputs[frozen].requires_grad_(False)
    layer = Layer(
        "mlp", LAYERS[4].shapes, functools.partial(mlp, project_fold_backward=pull_back), LAYERS[4].plain
    )
    assert_layer(layer, inputs, a_chunk=4, b_chunk=3)


@pytest.mark.parametrize(
    ("returned", "error", "text"),
    [
        (None, TypeError, r"expected a pair \(gradient of a_slice, gradient of b_slice\), got None"),
        ((torch.ones(1),), TypeError, "expected a pair"),
        ((None, (None,)), ValueError, "expected gradients of 2 tensors, got 1"),
        ((None, None), ValueError, "expected gradients of 2 tensors, got 1"),
        (
            (torch.ones(1, 4), (None, None)),
            ValueError,
            r"expected a gradient of shape \[7, 4\], got \[1, 4\]",
        ),
        ((3.0, (None, None)), TypeError, "expected a tensor or None, got 3.0"),
    ],
)
def test_project_fold_backward_is_checked(returned: Any, error: type[Exception], text: str) -> None:
    inputs = LAYERS[4].inputs(7, 9)
    (out,) = mlp(*inputs, project_fold_backward=lambda a, b, g: returned)
    with pytest.raises(error, match=f"project_fold_backward: {text}"):
        out.sum().backward()


# --- what autograd asks ---


def test_closing_over_a_tensor_that_requires_gradients_is_refused() -> None:
    x, p, q = LAYERS[4].inputs(3, 4)
    scale = torch.ones(4, dtype=torch.float64, requires_grad=True)

    def project(x: Tensor, units: tuple[Tensor, Tensor]) -> Sum.State:
        return project_mlp(x * scale, units)

    for n in (4, 0):
        with pytest.raises(
            ValueError, match="project_fold: expected a function of a_slice and b_slice alone"
        ):
            mr.map_reduce(Sum(), project, x, (p[:n], q[:n]))
    with torch.no_grad():
        expected = mr.map_reduce(Sum(), project, x, (p, q)).value
    scale.requires_grad_(False)
    assert torch.equal(mr.map_reduce(Sum(), project, x, (p, q)).value, expected)


def test_closing_over_it_in_a_later_slice_only_is_refused_too() -> None:
    scale = torch.ones((), requires_grad=True)

    def project(a: Tensor, b: Tensor) -> Sum.State:
        total = (a @ b.T).sum(1)
        return Sum.State(total * scale if len(b) == 1 else total)

    with pytest.raises(ValueError, match="requires gradients and would get none"):
        mr.map_reduce(Sum(), project, torch.ones(2, 1), torch.ones(5, 1), b_chunk=2)


@pytest.mark.parametrize("operation", ["fold", "map_reduce"])
class TestDoubleBackward:
    def outputs(self, operation: str, x: Tensor) -> Tensor:
        if operation == "fold":
            return mr.fold(LogSumExp(), LogSumExp.State(x)).lse
        return mr.map_reduce(
            Max(), lambda a, b: Max.State((a @ b.T).amax(1), torch.ones(len(a)).long()), x, x
        ).value

    def test_of_the_gradient(self, operation: str) -> None:
        x = rand(4, 4)
        (gradient,) = torch.autograd.grad(self.outputs(operation, x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            gradient.sum().backward()

    def test_of_a_penalty_beside_the_loss(self, operation: str) -> None:
        """The penalty term must not be dropped in silence."""
        x = rand(4, 4)
        out = self.outputs(operation, x).sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            (out + gradient.square().sum()).backward()

    def test_unless_it_is_not_used(self, operation: str) -> None:
        x = rand(4, 4)
        out = self.outputs(operation, x).sum()
        (with_graph,) = torch.autograd.grad(out, x, create_graph=True)
        (without,) = torch.autograd.grad(self.outputs(operation, x).sum(), x)
        assert torch.equal(with_graph, without)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    inputs = ATTENTION.inputs(7, 9)
    expected = attention(*inputs)
    with mode():
        found = attention(*inputs)
    assert all(torch.equal(f, e) and not f.requires_grad for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant: bool) -> None:
    inputs = ATTENTION.inputs(7, 9)
    expected = torch.autograd.grad(attention(*inputs)[0].sum(), inputs)
    out = checkpoint(lambda *x: attention(*x)[0].sum(), *inputs, use_reentrant=use_reentrant)
    out.backward()
    assert all(torch.equal(x.grad, e) for x, e in zip(inputs, expected, strict=True))


def test_changing_an_input_before_backward_is_noticed() -> None:
    q, k, v = ATTENTION.inputs(7, 9)
    k = k.clone()
    out = attention(q, k, v)[0].sum()
    k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_autocast_is_the_same_in_backward(device: Any) -> None:
    """project_fold is recomputed outside the caller's autocast block, and must see it nonetheless."""
    seen = []

    def project(q: Tensor, kv: tuple[Tensor, Tensor]) -> LogWSum.State:
        scores = q @ kv[0].T
        seen.append(scores.dtype)
        return LogWSum.State(scores.float().logsumexp(1), scores.float().softmax(1) @ kv[1])

    q, k, v = ATTENTION.inputs(7, 9, dtype=torch.float32, device=device)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        out = mr.map_reduce(LogWSum(), project, q, (k, v), b_chunk=5).value
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert seen == [torch.bfloat16] * 4
    assert all(g.dtype == torch.float32 for g in gradients)
    out = mr.map_reduce(LogWSum(), project, q, (k, v)).value
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        torch.autograd.grad(out.sum(), (q, k, v))
    assert seen[4:] == [torch.float32] * 2


@pytest.mark.release
@pytest.mark.oldest
@pytest.mark.parametrize("layer", [ATTENTION, LAYERS[-1]], ids=repr)
def test_inside_torch_compile(layer: Layer) -> None:
    """It runs as it is, between compiled parts."""
    inputs = layer.inputs(7, 9)

    def loss(*inputs: Tensor) -> Tensor:
        return (2 * layer.reduce(*inputs, b_chunk=4)[0]).sin().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(loss, backend="aot_eager")
        found = torch.autograd.grad(compiled(*inputs), inputs)
        with torch.no_grad():
            without_gradients = compiled(*inputs)
    expected = torch.autograd.grad(loss(*inputs), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(without_gradients, loss(*inputs).detach(), rtol=1e-12, atol=1e-12)


def test_torch_compile_does_not_trace_it() -> None:
    """Traced whole, forward and backward would share the scores, and so store them for all pairs of rows."""
    inputs = ATTENTION.inputs(7, 9)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="map_reduce"):
        torch.compile(attention, fullgraph=True, backend="aot_eager")(*inputs)


def test_project_fold_sees_slices_in_the_form_they_were_given() -> None:
    seen = []

    def project(a: Any, b: Any) -> Sum.State:
        seen.append((type(a), type(b), len(b[0])))
        return Sum.State(a.sum(1) + b[0].sum())

    total = mr.map_reduce(Sum(), project, torch.ones(4, 2), (torch.ones(5),), a_chunk=2, b_chunk=3).value
    assert seen == [(Tensor, tuple, 3), (Tensor, tuple, 2)] * 2
    assert total.tolist() == [9.0] * 4


def test_default_chunks() -> None:
    seen = []

    def project(a: Tensor, b: Tensor) -> Sum.State:
        seen.append((len(a), len(b)))
        return Sum.State((a @ b.T).sum(1))

    mr.map_reduce(Sum(), project, torch.ones(1500, 1), torch.ones(1025, 1))
    assert seen == [(1024, 1024), (1024, 1), (476, 1024), (476, 1)]


def good(a: Tensor, b: Tensor) -> Sum.State:
    return Sum.State((a @ b.T).sum(1))


X = torch.ones(3, 2)


def widen_single_columns(a: Tensor, b: Tensor) -> Tensor:
    return good(a, b).value.to(torch.float64 if len(b) == 1 else torch.float32)


@pytest.mark.parametrize(
    ("n", "project", "expected", "got"),
    [
        (5, lambda a, b: a @ b.T, "torch.float32 [rows, 4]", "torch.float32 [rows, 1]"),
        (6, lambda a, b: a @ b.T, "torch.float32 [rows, 4]", "torch.float32 [rows, 2]"),
        (5, widen_single_columns, "torch.float32 [rows]", "torch.float64 [rows]"),
    ],
)
def test_slices_must_agree(n: int, project: Any, expected: str, got: str) -> None:
    """A state with one entry for each row of b_slice, not folded, broadcasts where a slice has one row."""
    with pytest.raises(ValueError) as caught:
        mr.map_reduce(Sum(), lambda a, b: Sum.State(project(a, b)), X, torch.ones(n, 2), b_chunk=4)
    assert str(caught.value) == (
        f"project_fold: expected a fold over the rows of b_slice, {expected} as for other slices, got {got}"
    )


def test_slices_of_a_must_agree_too() -> None:
    with pytest.raises(ValueError, match="project_fold: expected a fold over the rows of b_slice"):
        mr.map_reduce(Sum(), lambda a, b: Sum.State(a @ a.T), X, X, a_chunk=2)


def test_slices_must_agree_in_backward_too() -> None:
    """Where project_fold is not deterministic."""
    calls = []

    def project(a: Tensor, b: Tensor) -> Sum.State:
        calls.append(a)
        return Sum.State((a @ b.T).sum(1, keepdim=len(calls) > 1))

    out = mr.map_reduce(Sum(), project, X.clone().requires_grad_(), X).value
    with pytest.raises(ValueError, match="project_fold: expected a fold over the rows of b_slice"):
        out.sum().backward()


def test_functions_must_leave_their_arguments_alone() -> None:
    with pytest.raises(ValueError, match=r"^project_fold: expected its arguments left as they are"):
        mr.map_reduce(Sum(), lambda a, b: good(a.mul_(2), b), X.clone(), X)

    def pull_back(a: Tensor, b: Tensor, g: Sum.State) -> Any:
        return g.value.mul_(2)[:, None] * b.sum(0), None

    out = mr.map_reduce(Sum(), good, X.clone().requires_grad_(), X, project_fold_backward=pull_back).value
    with pytest.raises(ValueError, match=r"^project_fold_backward: expected its arguments left as they are"):
        out.square().sum().backward()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((Sum, good, X, X), {}, TypeError, "monoid: expected an instance of a subclass of Monoid"),
        ((Sum(), "good", X, X), {}, TypeError, "project_fold: expected a function, got 'good'"),
        (
            (Sum(), good, X, X),
            {"project_fold_backward": 3},
            TypeError,
            "project_fold_backward: expected a function",
        ),
        ((Sum(), good, 3.0, X), {}, TypeError, "a: expected a tensor or a tuple of tensors, got 3.0"),
        ((Sum(), good, X, [X]), {}, TypeError, "b: expected a tensor or a tuple of tensors"),
        ((Sum(), good, X, ()), {}, TypeError, "b: expected a tensor or a tuple of tensors"),
        ((Sum(), good, X, (X, None)), {}, TypeError, "b: expected a tensor"),
        ((Sum(), good, torch.tensor(1.0), X), {}, ValueError, "a: expected tensors that agree on .* axis 0"),
        ((Sum(), good, (X, X[:2]), X), {}, ValueError, r"a: .* got shapes \[\[3, 2\], \[2, 2\]\]"),
        (
            (Sum(), good, X, X.to("meta")),
            {},
            ValueError,
            "a and b: expected tensors on one device, got cpu and meta",
        ),
        ((Sum(), good, X, X), {"a_chunk": 0}, ValueError, "a_chunk: expected an int > 0, or None, got 0"),
        ((Sum(), good, X, X), {"b_chunk": -1}, ValueError, "b_chunk: expected an int > 0, or None, got -1"),
        ((Sum(), good, X, X), {"b_chunk": 2.0}, TypeError, "b_chunk: expected an int > 0, or None, got 2.0"),
        (
            (Sum(), good, X, X),
            {"a_chunk": True},
            TypeError,
            "a_chunk: expected an int > 0, or None, got True",
        ),
        ((Sum(), lambda a, b: a, X, X), {}, TypeError, "project_fold: expected a state"),
        ((LogWSum(), good, X, X), {}, TypeError, "project_fold: expected a state of LogWSum"),
        (
            (Sum(), lambda a, b: Sum.State(torch.complex(a, a)), X, X),
            {},
            TypeError,
            "project_fold.value: expected float64, .*, got torch.complex64",
        ),
        (
            (Sum(), lambda a, b: Sum.State(a[:2]), X, X),
            {},
            ValueError,
            "project_fold: expected fields of 3 rows",
        ),
        (
            (Sum(), lambda a, b: Sum.State(a.sum()), X, X),
            {},
            ValueError,
            "project_fold: expected fields of 3 rows",
        ),
    ],
)
def test_refuses(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        mr.map_reduce(*arguments, **options)


def test_meta_tensors_give_shapes() -> None:
    state = mr.map_reduce(Sum(), good, X.to("meta"), torch.ones(5, 2, device="meta"), a_chunk=2)
    assert state.value.shape == (3,) and state.value.is_meta


# --- the fused operators ---


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    out, lse = mr.attention(q[None, None], k[None, None], v[None, None], return_lse=True)
    return out[0, 0], lse[0, 0]


def fused_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    out, lse = mr.attention(q[None, None], k[None, None], v[None, None], causal=True, return_lse=True)
    return out[0, 0], lse[0, 0]


def fused_cross_entropy(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return mr.linear_cross_entropy(x, weight, targets(x, weight), reduction="none", return_lse=True)


def fused_distillation(
    x: Tensor, teacher_x: Tensor, weight: Tensor, teacher_weight: Tensor
) -> tuple[Tensor, ...]:
    return (
        mr.linear_distillation(x, weight, teacher_x, teacher_weight, reduction="none", teacher_grad=True),
    )


FUSED = {
    "attention": fused_attention,
    "causal": fused_causal_attention,
    "cross_entropy": fused_cross_entropy,
    "distillation": fused_distillation,
    "mlp": lambda x, p, q: (mr.mlp(x, p, q.T, activation="silu"),),
}


@pytest.mark.parametrize(
    ("layer", "m", "n"),
    [(layer, m, n) for layer in LAYERS if layer.name in FUSED for m, n in ((33, 70), (70, 33), (0, 5))]
    + [(layer, 5, 0) for layer in LAYERS if layer.name in ("attention", "causal", "mlp")],
    ids=str,
)
def test_fused_operators_agree(layer: Layer, m: int, n: int, device: Any) -> None:
    """They are the same folds, also of nothing, which is the identity. (A target needs a vocabulary.)"""
    fused = Layer(layer.name, layer.shapes, layer.reduce, FUSED[layer.name])
    assert_layer(fused, layer.inputs(m, n, device=device), a_chunk=16, b_chunk=32)


def test_fused_scalar_fold_agrees() -> None:
    a, b = rand(33, 8), rand(70, 8)
    layer = Layer(
        "logsumexp",
        lambda m, n: (),
        lambda a, b, **options: (
            mr.map_reduce(
                LogSumExp(), lambda a, b: LogSumExp.State((a @ b.T / 3).logsumexp(1)), a, b, **options
            ).lse,
        ),
        lambda a, b: (mr.logsumexp_matmul(a, b, scale=1 / 3),),
    )
    assert_layer(layer, [a, b], a_chunk=16, b_chunk=32)


def test_merged_attention_is_the_combination_of_its_states() -> None:
    """mr.merge_attention is LogWSum's combine, also on rows that are empty on one side or both."""
    lse = torch.tensor(
        [[0.5, -math.inf, 2.0, -math.inf], [1.5, 1.0, -math.inf, -math.inf]], dtype=torch.float64
    )
    out = torch.randn(2, 4, 3, dtype=torch.float64).masked_fill(lse.isneginf()[..., None], 0.0)
    merged, merged_lse = mr.merge_attention(out[0], lse[0], out[1], lse[1])
    expected = LogWSum().combine(LogWSum.State(lse[0], out[0]), LogWSum.State(lse[1], out[1]))
    torch.testing.assert_close(merged, expected.value, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(merged_lse, expected.log_weight, rtol=1e-14, atol=1e-14)


# --- Inputs are never changed ---


class InPlace(Sum):
    """Addition that changes one operand of one method."""

    def __init__(self, method: str, operand: int) -> None:
        self.method, self.operand = method, operand

    def called(self, method: str, *operands: Any) -> None:
        if method == self.method:
            operands[self.operand].value.mul_(2)

    def combine(self, a: Any, b: Any) -> Any:
        self.called("combine", a, b)
        return super().combine(a, b)

    def local_gradient(self, c: Any, a: Any, g: Any) -> Any:
        self.called("local_gradient", c, a, g)
        return Sum.State(g.value * 1)


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("operand", (0, 1))
@pytest.mark.parametrize("size", (1, 2, 8))
def test_fold_leaves_its_input_alone(size: int, operand: int, mode: Any) -> None:
    """It would be [6, 8, 10, 12, 5, 6, 7, 8] if operands were added in place."""
    for shape in ((size,), (3, size)):
        values = torch.arange(1.0, 1.0 + math.prod(shape)).view(shape)
        before = values.clone()
        with mode(), pytest.raises(ValueError, match=r"combine: expected operands that are left as they are"):
            mr.fold(InPlace("combine", operand), Sum.State(values))
        assert torch.equal(values, before)


@pytest.mark.parametrize("operand", (0, 1, 2))
def test_a_backward_pass_leaves_everything_alone(operand: int) -> None:
    values = torch.arange(1.0, 9.0).view(2, 4).requires_grad_()
    upstream = torch.ones(2)
    for run in (
        lambda monoid: mr.fold(monoid, Sum.State(values)).value,
        lambda monoid: mr.map_reduce(monoid, lambda a, b: Sum.State((a @ b.T).sum(1)), values, values).value,
    ):
        found = run(InPlace("local_gradient", operand))
        before = [t.detach().clone() for t in (values, found, upstream)]
        with pytest.raises(ValueError, match="local_gradient: expected operands that are left as they are"):
            found.backward(upstream)
        assert all(map(torch.equal, (values, found, upstream), before)) and values.grad is None


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("side", (0, 1))
def test_map_reduce_leaves_its_inputs_alone(side: int, mode: Any) -> None:
    def project(*slices: Tensor) -> Sum.State:
        slices[side].mul_(2)
        return Sum.State((slices[0] @ slices[1].T).sum(1))

    a, b = torch.randn(5, 3), torch.randn(4, 3)
    before = a.clone(), b.clone()
    with mode(), pytest.raises(ValueError, match="project_fold: expected its arguments left as they are"):
        mr.map_reduce(Sum(), project, a, b, a_chunk=2, b_chunk=2)
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


@pytest.mark.parametrize("name", ("project_fold_backward", "fused_backward"))
@pytest.mark.parametrize("of", (0, 1, 2))
def test_given_gradients_leave_their_arguments_alone(name: str, of: int) -> None:
    a, b = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)

    def backward(*arguments: Any) -> tuple[Tensor, Tensor]:
        (arguments[of].value if of == 2 else arguments[of].detach()).mul_(2)
        return torch.zeros_like(arguments[0]), torch.zeros_like(arguments[1])

    options: Any = {name: backward}
    found = mr.map_reduce(Sum(), lambda a, b: Sum.State((a @ b.T).sum(1)), a, b, **options).value
    before = [t.detach().clone() for t in (a, b, found)]
    with pytest.raises(ValueError, match=f"{name}: expected its arguments left as they are"):
        found.sum().backward()
    assert all(map(torch.equal, (a, b, found), before))


def test_compiled_folds_leave_their_inputs_alone() -> None:
    values = torch.arange(1.0, 9.0)
    run = torch.compile(lambda t: mr.fold(InPlace("combine", 0), Sum.State(t)).value, backend="aot_eager")
    run(values)
    assert torch.equal(values, torch.arange(1.0, 9.0))


# --- Integers ---


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
def test_folds_of_integers_are_torchs(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    for values in ([3, 1, 3, 2], [info.min, info.min], [info.max, info.min, info.max]):
        x = torch.tensor(values, dtype=dtype)
        ones, places = torch.ones_like(x, dtype=torch.int64), torch.arange(len(x))
        assert mr.fold(Sum(), Sum.State(x)).value == x.sum(dtype=dtype)
        largest = mr.fold(mr.monoids.Max(), mr.monoids.Max.State(x, ones))
        assert largest.value == x.amax() and largest.times == (x == x.amax()).sum()
        smallest = mr.fold(mr.monoids.Min(), mr.monoids.Min.State(x, ones))
        assert smallest.value == x.amin() and smallest.times == (x == x.amin()).sum()
        for monoid, extreme in ((mr.monoids.ArgMax(), x.amax()), (mr.monoids.ArgMin(), x.amin())):
            found = mr.fold(monoid, mr.monoids.ArgMax.State(x, places))
            assert found.value == extreme and found.position == values.index(extreme.item())
            assert found.value.dtype == dtype
    nothing = mr.fold(mr.monoids.Max(), mr.monoids.Max.State(x[:0], ones[:0]))
    assert nothing.value == info.min and nothing.times == 0


def test_bools_have_a_maximum() -> None:
    x, ones = torch.tensor([[False, True], [False, False]]), torch.ones(2, 2, dtype=torch.int64)
    found = mr.fold(mr.monoids.Max(), mr.monoids.Max.State(x, ones))
    assert found.value.tolist() == [True, False] and found.times.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("monoid", "field"),
    (
        (mr.monoids.LogSumExp(), "LogSumExp.lse"),
        (mr.monoids.LogWSum(), "LogWSum.value"),
        (mr.monoids.WSum(), "WSum.weight"),
        (mr.monoids.CrossEntropy(), "CrossEntropy.lse"),
        (mr.monoids.Distillation(), "Distillation.student_lse"),
    ),
)
def test_integers_that_have_no_meaning_are_refused_by_name(monoid: Any, field: str) -> None:
    state = monoid.State(*(torch.arange(6) for _ in monoid.State._fields))
    with pytest.raises(TypeError, match=f"^{field}: expected a floating dtype, .*, got torch.int64$"):
        mr.fold(monoid, state)


def test_batches_by_vmap() -> None:
    """As docs/writing_a_monoid.md says: axis 0 has rows, and a batch is another axis before it."""
    a, b = torch.randn(3, 5, 2, requires_grad=True), torch.randn(3, 7, 2, requires_grad=True)

    def density(a: Tensor, b: Tensor) -> Tensor:
        fold = LogSumExp()
        of = lambda x, y: fold.State((-torch.cdist(x, y)).logsumexp(1))  # noqa: E731
        return mr.map_reduce(fold, of, a, b, b_chunk=3).lse

    found, expected = torch.vmap(density)(a, b), (-torch.cdist(a, b)).logsumexp(-1)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(3, 5)
    torch.testing.assert_close(*(torch.autograd.grad(y, (a, b), upstream) for y in (found, expected)))
