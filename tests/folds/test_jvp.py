"""Forward mode of statistics, and its nests with reverse mode, against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from folds import FOLDS, Inputs, fold_inputs, leaves_of
from forward import NESTS, Function, every, of_leaves, scalar
from largest import LargestTensor
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import monoidreduce as mr
from monoidreduce import reference, stat
from monoidreduce.folds import number_passes
from monoidreduce.folds.torch.chunked import Chunked

F64 = torch.float64
MOVED = [name for name in FOLDS if name not in ("of_two_scores", "ranked")]
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


HOW: dict[str, Callable[[Function, Any, Any], Any]] = NESTS | {
    "vmap of jvp": lambda f, x, u: vmap(lambda *t: jvp(f, x, t)[1])(*[torch.stack((d, 2 * d)) for d in u]),
    "jacfwd": lambda f, x, u: jacfwd(f, every(x))(*x),
    "hessian": lambda f, x, u: hessian(scalar(f), every(x))(*x),
    "jacrev of jacfwd": lambda f, x, u: jacrev(jacfwd(scalar(f), every(x)), every(x))(*x),
    "jacrev of jacrev": lambda f, x, u: jacrev(jacrev(scalar(f), every(x)), every(x))(*x),
}


def check(fold: Any, call: Inputs, how: str) -> None:
    x = tuple(t.detach() for t in leaves_of(call))
    u = tuple(torch.randn_like(t) for t in x)
    found, expected = (HOW[how](of_leaves(each, call), x, u) for each in (fold, fold.reference))
    for ours, theirs in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
        scale = max(1.0, float(theirs.abs().max()) if theirs.numel() else 1.0)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10 * scale)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MOVED)
def test_float64(name: str, how: str) -> None:
    if name == "vectors" and how == "jacrev of jacfwd":
        pytest.skip("takes 14 s")
    check(*fold_inputs(name, (2,), 3, 2), how)


@pytest.mark.parametrize("name", MOVED)
def test_many_rows_and_columns(name: str) -> None:
    check(*fold_inputs(name, (2, 40), 300, 9), "jvp")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", MOVED)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """As accurate as the rounding of the operands allows; in the dtype of the result."""
    fold, call = fold_inputs(name, (200,), 300, 8, dtype)
    x = tuple(t.detach() for t in leaves_of(call))
    u = tuple(torch.randn_like(t) for t in x)
    found, moved = jvp(of_leaves(fold, call), x, u)
    exact = {name: _double(value) for name, value in call.items()}
    _, expected = jvp(
        of_leaves(fold.reference, exact), tuple(t.double() for t in x), tuple(t.double() for t in u)
    )
    for value, ours, theirs in zip(found, moved, expected, strict=True):
        assert ours.dtype == value.dtype
        error = float((ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-6))
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)


def _double(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _double(t) for name, t in value.items()}
    return value.detach().double().requires_grad_() if value.is_floating_point() else value


def test_tensors_that_are_not_contiguous() -> None:
    fold, call = fold_inputs("vectors", (6,), 10, 4)
    x = [t.detach() for t in leaves_of(call)]
    strided = tuple(torch.stack((t, t), -1)[..., 0] for t in x)
    u = tuple(torch.randn_like(t) for t in x)
    along = tuple(torch.stack((t, t), -1)[..., 0] for t in u)
    found = jvp(of_leaves(fold, call), strided, along)
    torch.testing.assert_close(found, jvp(of_leaves(fold, call), tuple(x), u))


def test_a_linearized_function() -> None:
    fold, call = fold_inputs("tempered", (4,), 5, 3)
    x = tuple(t.detach() for t in leaves_of(call))
    u = tuple(torch.randn_like(t) for t in x)
    values, along = linearize(of_leaves(fold, call), *x)
    torch.testing.assert_close((values, along(*u)), jvp(of_leaves(fold.reference, call), x, u))


@pytest.mark.parametrize("name", ("tempered", "renyi"))
def test_a_scale_of_zero(name: str) -> None:
    fold, call = fold_inputs(name, (4,), 5, 3)
    call["scale"] = 0.0
    x = tuple(t.detach() for t in leaves_of(call))
    torch.testing.assert_close(*[jvp(of_leaves(of, call), x, x) for of in (fold, fold.reference)])


def test_what_does_not_move_has_no_tangent() -> None:
    fold, call = fold_inputs("tempered", (4,), 5, 3)
    with forward_ad.dual_level():
        assert all(forward_ad.unpack_dual(t).tangent is None for t in fold(**call))


def test_scores_are_not_stored() -> None:
    """No tensor on the way to a tangent is larger than operands and data."""
    fold, call = fold_inputs("tempered", (500,), 2000, 4, torch.float32)
    x = tuple(t.detach() for t in leaves_of(call))
    with LargestTensor() as largest:
        jvp(of_leaves(fold, call), x, tuple(map(torch.ones_like, x)))
    assert largest.elements == 2 * x[1].numel()


def _twice(f: Any, w: Tensor, u: Tensor) -> Any:
    w = w.clone().requires_grad_()
    (slope,) = torch.autograd.grad(f(w), w, create_graph=True)
    return torch.autograd.grad(slope, w, u)[0]


PRODUCTS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {  # of a Hessian and a direction
    "jvp of grad": lambda f, w, u: jvp(grad(f), (w,), (u,))[1],
    "grad of jvp": lambda f, w, u: grad(lambda w: jvp(f, (w,), (u,))[1])(w),
    "grad of grad": lambda f, w, u: grad(lambda w: (grad(f)(w) * u).sum())(w),
    "autograd": _twice,
}


@pytest.mark.parametrize("how", PRODUCTS)
def test_passes_of_a_hessian_vector_product(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fold and one gradient of the statistics, and one each of how they move, which have two scores."""
    passes = []

    def counted(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counting(call: Any, *args: Any) -> Any:
            passes.append((kind, len(call.scores)))
            return run(call, *args)

        return counting

    for name, kind in (("fold", "fold"), ("_by_cpu", "gradient")):
        monkeypatch.setattr(number_passes, name, counted(kind, getattr(number_passes, name)))
    x, weight, direction = (torch.randn(n, 5, dtype=F64) for n in (7, 11, 11))
    target = torch.randint(11, (7,))
    product = PRODUCTS[how](lambda w: mr.linear_cross_entropy(x, w, target), weight, direction)
    of_score = [] if how == "autograd" else [("gradient", 1)]  # there the operator's own kernels compute it
    assert sorted(passes) == [("fold", 1), ("fold", 2), *of_score, ("gradient", 2)]
    whole = hessian(lambda w: reference.linear_cross_entropy(x, w, target))(weight)
    torch.testing.assert_close(product, torch.tensordot(whole, direction))


def test_heads_and_vectors_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """v and its direction are two scores of one gradient, which is computed for all heads together."""
    passes, backward = [], Chunked.backward

    def counting(self: Chunked, *args: Any) -> Any:
        if args[1][0]:  # not a payload sum, which takes no gradient of the first score
            passes.append((len(self.scores), self.batches))
        return backward(self, *args)

    monkeypatch.setattr(Chunked, "backward", counting)
    x, u = (tuple(torch.randn(1, 3, 5, 4, dtype=F64) for _ in "qkv") for _ in "xu")
    results = [
        jvp(grad(lambda *t, of=attention: of(*t).square().sum(), (0, 1, 2)), x, u)
        for attention in (mr.attention, reference.attention)
    ]
    assert passes == [(4, 3)]
    torch.testing.assert_close(*results)


class Calls(TorchDispatchMode):
    """The names of this project's ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "monoidreduce":
            self.names.append(function.__name__.removesuffix(".default"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_sinks", (False, True))
def test_forward_mode_of_attention_reads_its_own_results(with_sinks: bool) -> None:
    """A fold computes them again where there are sinks."""
    x = tuple(torch.randn(2, 2, 5, 4, dtype=F64) for _ in "qkv")
    sinks = torch.randn(2, dtype=F64) if with_sinks else None
    results = []
    for attention in (mr.attention, reference.attention):
        with Calls() as calls:
            results.append(jvp(lambda *t, of=attention: of(*t, sinks=sinks, causal=True), x, x))
        if attention is mr.attention:
            assert calls.names == ["statistics" if with_sinks else "attention", "statistics"]
    torch.testing.assert_close(*results)


def test_an_ignored_row_does_not_move() -> None:
    @mr.statistics
    def loss(score: Any, column: Any, label: Any) -> Any:
        return dict(
            lse=stat.softmax(score).logsumexp,
            target=stat.total(torch.where(column == label, score, 0.0)),
        )

    x, weight = torch.randn(4, 3, dtype=F64), torch.randn(5, 3, dtype=F64)
    label = torch.tensor([1, -100, 4, 0])
    x[1] = torch.nan
    _, moved = jvp(lambda x: tuple(loss(x, weight, label=label)), (x,), (torch.ones_like(x),))
    assert all(torch.equal(t[1], torch.zeros((), dtype=F64)) and t.isfinite().all() for t in moved)


@pytest.mark.parametrize("name", ("tempered", "distances"))
def test_forward_mode_of_forward_mode(name: str) -> None:
    fold, call = fold_inputs(name, (3,), 4, 3)
    x = tuple(t.detach() for t in leaves_of(call))
    u, v = (tuple(torch.randn_like(t) for t in x) for _ in "uv")

    def along(of: Any) -> Any:
        return jvp(lambda *t: jvp(of_leaves(of, call), t, u)[1], x, v)

    torch.testing.assert_close(along(fold), along(fold.reference))


@pytest.mark.parametrize("name", ("of_two_scores", "ranked"))
def test_others_say_so(name: str) -> None:
    fold, call = fold_inputs(name, (3,), 4)
    x = tuple(t.detach() for t in leaves_of(call))
    with pytest.raises(
        NotImplementedError, match=r"statistics cannot be .* forward mode .*: (those of a fold|largest)"
    ):
        jvp(of_leaves(fold, call), x, x)


def test_a_mean_of_no_tokens_does_not_move() -> None:
    x, weight, class_weight = torch.randn(2, 3), torch.randn(7, 3), torch.rand(7)
    ignored = torch.full((2,), -100)

    def loss(weight: Tensor) -> Tensor:
        return mr.linear_cross_entropy(x, weight, ignored, class_weight=class_weight)

    assert jvp(loss, (weight,), (weight,)) == (0, 0)


@pytest.mark.parametrize("shape", ((), (4, 1)), ids=str)
def test_second_derivatives_of_sinks_of_queries_without_keys(shape: tuple[int, ...]) -> None:
    """A bias that is the same for all keys is added to the log-sum-exp, which is -inf there."""
    q, k, sinks = (
        torch.randn(1, 1, 4, 2, dtype=F64),
        torch.randn(1, 1, 3, 2, dtype=F64),
        torch.zeros(1, dtype=F64),
    )

    def penalty(sinks: Tensor, bias: Tensor | None) -> Tensor:
        def total(q: Tensor) -> Tensor:
            options: dict[str, Any] = {"bias": bias, "sinks": sinks, "causal": True, "return_lse": True}
            out, lse = mr.attention(q, k, k, **options)
            return out.square().sum() + lse.square().sum()

        return grad(total)(q).square().sum()

    found = grad(penalty)(sinks, torch.zeros(shape, dtype=F64))
    assert found.isfinite().all() and found.any()
    torch.testing.assert_close(found, grad(penalty)(sinks, None))


@pytest.mark.parametrize("starts", ([0, 3], [0, 1, 3]), ids=str)
@pytest.mark.parametrize("causal", (False, True))
def test_forward_mode_of_tokens_behind_the_last_sequence(starts: list[int], causal: bool) -> None:
    q = torch.randn(5, 2, 3, dtype=F64)

    def packed(q: Tensor) -> Tensor:
        return mr.attention_varlen(q, q, q, torch.tensor(starts), causal=causal)

    found, moved = jvp(packed, (q,), (q,))
    inside, expected = jvp(packed, (q[:3],), (q[:3],))
    torch.testing.assert_close(found[:3], inside)
    torch.testing.assert_close(moved[:3], expected)
    assert not found[3:].any() and not moved[3:].any()
