"""torch.func: grad and its relatives are right; what has no rule says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specimens import ONE_EACH, SPECIMENS, Inputs, Specimen, name_of
from test_second_derivatives import is_differentiable_twice
from tolerance import as_outputs
from torch import Tensor

import monoidreduce as mr
from monoidreduce.monoids import LogWSum


def moves(specimen: Specimen) -> bool:
    """Whether a call has forward mode: test_forward_mode.py."""
    return specimen.operator == "merge_attention" or is_differentiable_twice(specimen)


def scalar(specimen: Specimen, inputs: Inputs) -> Tensor:
    """A function of all outputs of the operator whose upstream gradients are not constant."""
    result = getattr(mr, specimen.operator)(**inputs, **specimen.options)
    outputs = as_outputs(result)
    return sum((output.sin().sum() for output in outputs), torch.zeros((), device=outputs[0].device))


@pytest.mark.oldest
@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_grad(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    leaves = {n: t for n, t in inputs.items() if t.is_floating_point()}
    gradients = torch.func.grad(lambda leaves: scalar(specimen, {**inputs, **leaves}))(leaves)
    recorded = {n: t.detach().requires_grad_() for n, t in leaves.items()}
    expected = torch.autograd.grad(scalar(specimen, {**inputs, **recorded}), list(recorded.values()))
    for ours, theirs in zip(gradients.values(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_vjp_and_functional_call(device: torch.device) -> None:
    module, x = mr.nn.MLP(8, 24).to(device), torch.randn(5, 8, device=device)
    parameters = dict(module.named_parameters())
    out, vjp = torch.func.vjp(lambda p: torch.func.functional_call(module, p, (x,)), parameters)
    upstream = torch.randn_like(out)
    expected = torch.autograd.grad(module(x), list(parameters.values()), upstream)
    for ours, theirs in zip(vjp(upstream)[0].values(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_grad_sees_a_leaf_of_autograd_through_the_transform(device: torch.device) -> None:
    x, w1, w2 = (torch.randn(s, device=device) for s in ((7, 8), (16, 8), (8, 16)))
    w2.requires_grad_()
    (gradient,) = torch.autograd.grad(torch.func.vjp(lambda x: mr.mlp(x, w1, w2), x)[0].square().sum(), w2)
    (expected,) = torch.autograd.grad(mr.mlp(x, w1, w2).square().sum(), w2)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_vmap_is_a_loop(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    first, tensor = next(iter(inputs.items()))
    batch = torch.stack([tensor, -tensor, 2 * tensor])
    mapped = torch.vmap(lambda t: scalar(specimen, {**inputs, first: t}))(batch)
    expected = torch.stack([scalar(specimen, {**inputs, first: t}) for t in batch])
    torch.testing.assert_close(mapped, expected)


def leaves_of(inputs: Inputs) -> Inputs:
    return {name: t for name, t in inputs.items() if t.is_floating_point()}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_vmap_of_grad_is_a_loop(specimen: Specimen, device: torch.device) -> None:
    """Of all inputs, one of them with a batch, or all of them."""
    inputs = specimen.inputs(torch.float32, device)
    leaves = leaves_of(inputs)
    gradient = torch.func.grad(lambda leaves: scalar(specimen, {**inputs, **leaves}))
    batch = {name: torch.stack([t, -t, 2 * t]) for name, t in leaves.items()}
    first = next(iter(leaves))
    for batched in ({first}, set(leaves)):
        mixed = {name: batch[name] if name in batched else t for name, t in leaves.items()}
        dims = {name: 0 if name in batched else None for name in leaves}
        mapped = torch.vmap(gradient, in_dims=(dims,))(mixed)
        for n in range(3):
            expected = gradient({name: t[n] if name in batched else t for name, t in mixed.items()})
            for name in leaves:
                torch.testing.assert_close(mapped[name][n], expected[name])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_jacrev(specimen: Specimen, device: torch.device) -> None:
    """Row by row it is the gradient of one element of the result."""
    inputs = specimen.inputs(torch.float64, device)
    first = next(iter(inputs))
    options = (
        {**specimen.options, "reduction": "sum"} if "reduction" in specimen.options else specimen.options
    )

    def result(t: Tensor) -> Tensor:
        found = getattr(mr, specimen.operator)(**{**inputs, first: t}, **options)
        return (found[0] if isinstance(found, tuple) else found).flatten()[:3]

    jacobian = torch.func.jacrev(result)(inputs[first])
    leaf = inputs[first].detach().requires_grad_()
    elements = result(leaf)
    for row, element in zip(jacobian.reshape(-1, *leaf.shape), elements, strict=True):
        torch.testing.assert_close(row, torch.autograd.grad(element, leaf, retain_graph=True)[0])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_batched_upstream_gradients(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    leaves = {name: t.requires_grad_() for name, t in leaves_of(inputs).items()}
    found = getattr(mr, specimen.operator)(**inputs, **specimen.options)
    outputs = list(as_outputs(found))
    upstream = [torch.randn(3, *output.shape, dtype=output.dtype, device=device) for output in outputs]
    wanted = list(leaves.values())
    batched = torch.autograd.grad(
        outputs, wanted, upstream, is_grads_batched=True, retain_graph=True, materialize_grads=True
    )
    for n in range(3):
        expected = torch.autograd.grad(
            outputs, wanted, [u[n] for u in upstream], retain_graph=True, materialize_grads=True
        )
        for ours, theirs in zip(batched, expected, strict=True):
            torch.testing.assert_close(ours[n], theirs)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_nested_vmap_of_grad(device: torch.device) -> None:
    x, w1, w2 = (torch.randn(s, device=device) for s in ((2, 3, 7, 8), (16, 8), (8, 16)))
    gradient = torch.func.grad(lambda x: mr.mlp(x, w1, w2).square().sum())
    mapped = torch.vmap(torch.vmap(gradient))(x)
    expected = torch.stack([torch.stack([gradient(inner) for inner in outer]) for outer in x])
    torch.testing.assert_close(mapped, expected)


# --- fold and map_reduce ---


def folded(scores: Tensor, values: Tensor) -> Tensor:
    """softmax(scores) @ values as a fold of pairs: [N], [N, D] -> [D]."""
    return mr.fold(LogWSum(), LogWSum.State(scores, values)).value


def plain_folded(scores: Tensor, values: Tensor) -> Tensor:
    return scores.softmax(0) @ values


def map_reduced(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q @ k.T) @ k: [M, F], [N, F] -> [M, F]."""

    def project(q: Tensor, k: Tensor) -> LogWSum.State:
        scores = q @ k.T
        return LogWSum.State(scores.logsumexp(1), scores.softmax(1) @ k)

    return mr.map_reduce(LogWSum(), project, q, k, a_chunk=2, b_chunk=3).value


def plain_map_reduced(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.T).softmax(1) @ k


Function = Callable[[Tensor, Tensor], Tensor]
every_fold = pytest.mark.parametrize(
    ("function", "plain", "shapes"),
    [(folded, plain_folded, ((5,), (5, 3))), (map_reduced, plain_map_reduced, ((5, 3), (7, 3)))],
    ids=["fold", "map_reduce"],
)


def gradient(function: Function) -> Callable[..., Any]:
    return torch.func.grad(lambda *leaves: function(*leaves).sin().sum(), (0, 1))


TRANSFORMS: dict[str, Callable[[Function, Any], Callable[..., Any]]] = {
    "vmap": lambda f, dims: torch.vmap(f, dims),
    "vmap of grad": lambda f, dims: torch.vmap(gradient(f), dims),
    "grad of vmap": lambda f, dims: gradient(torch.vmap(f, dims)),
}


@every_fold
@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 1)], ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_folds(
    function: Function, plain: Function, shapes: Any, dims: Any, transform: str, device: torch.device
) -> None:
    inputs = []
    for shape, dim in zip(shapes, dims, strict=True):
        batched = shape if dim is None else (*shape[:dim], 4, *shape[dim:])
        inputs.append(torch.randn(batched, dtype=torch.float64, device=device))
    found, expected = (TRANSFORMS[transform](f, dims)(*inputs) for f in (function, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@every_fold
def test_jacobians_of_folds(function: Function, plain: Function, shapes: Any, device: torch.device) -> None:
    inputs = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    found, expected = (torch.func.jacrev(f, (0, 1))(*inputs) for f in (function, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    leaf = inputs[0].requires_grad_()
    out = function(*inputs)
    basis = torch.eye(out.numel(), dtype=out.dtype, device=device).reshape(-1, *out.shape)
    (batched,) = torch.autograd.grad(out, leaf, basis, is_grads_batched=True)
    torch.testing.assert_close(batched.reshape(expected[0].shape), expected[0], rtol=1e-12, atol=1e-12)


def test_vmap_of_no_samples() -> None:
    assert torch.vmap(folded, (0, None))(torch.randn(0, 5), torch.randn(5, 3)).shape == (0, 3)
    with pytest.raises(ValueError, match="map_reduce: expected one sample or more"):
        torch.vmap(map_reduced, (0, None))(torch.randn(0, 5, 3), torch.randn(7, 3))


@every_fold
def test_what_folds_have_no_rule_for_raises(function: Function, plain: Function, shapes: Any) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.func.jacrev(torch.func.jacrev(function))(*inputs)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(function, tuple(inputs), tuple(map(torch.ones_like, inputs)))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
def test_project_fold_may_not_close_over_what_is_transformed(transform: Any) -> None:
    """Its gradient would be zero: project_fold runs outside of the transforms."""
    q, k = torch.randn(5, 3), torch.randn(7, 3)

    def scaled(scale: Tensor) -> Tensor:
        def project(q: Tensor, k: Tensor) -> LogWSum.State:
            scores = scale * q @ k.T
            return LogWSum.State(scores.logsumexp(1), scores.softmax(1) @ k)

        return mr.map_reduce(LogWSum(), project, q, k).value.sum()

    with pytest.raises(ValueError, match=r"project_fold: expected .* which torch\.func transforms"):
        transform(scaled)(torch.ones(() if transform is torch.func.grad else 2))


@every_fold
def test_compiled_grad_of_folds(function: Function, plain: Function, shapes: Any) -> None:
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    compiled = torch.compile(lambda *leaves: gradient(function)(*leaves), backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), gradient(plain)(*inputs), rtol=1e-12, atol=1e-12)


def tangent_of(how: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    if how == "jvp":
        return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]
    if how == "jacfwd":
        return torch.func.jacfwd(lambda x: function(x).sum())(x)
    if how == "hessian":
        return torch.func.hessian(lambda x: function(x).sum())(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(function(dual)).tangent


FORWARD = ("jvp", "jacfwd", "dual")


@pytest.mark.oldest
@pytest.mark.parametrize("how", FORWARD)
@pytest.mark.parametrize("specimen", [s for s in SPECIMENS if not moves(s)], ids=name_of)
def test_forward_mode_is_refused_by_name(specimen: Specimen, how: str, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    first = next(name for name, t in inputs.items() if t.is_floating_point())
    function = lambda x: scalar(specimen, {**inputs, first: x})  # noqa: E731
    with pytest.raises(NotImplementedError, match=rf"{specimen.operator}\w* cannot be .* in forward mode"):
        tangent_of(how, function, inputs[first])
    with torch.autograd.forward_ad.dual_level():  # nothing has a tangent
        torch.testing.assert_close(function(inputs[first]), function(inputs[first]))


# Calls of operators that are folds of two scores, and how an error names them
OF_TWO_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear_distillation with the loss jsd": lambda x: mr.linear_distillation(x, x, x, x, loss="jsd"),
    "attend with other_q": lambda x: mr.attend(
        *[x[None, None]] * 3,
        weight=lambda score, other: score * other,
        other_q=x[None, None],
        other_k=x[None, None],
    ),
}


@pytest.mark.parametrize("name", OF_TWO_SCORES)
def test_errors_of_folds_of_two_scores_name_the_operator(name: str) -> None:
    x, call = torch.randn(5, 3), OF_TWO_SCORES[name]
    for how in FORWARD:
        with pytest.raises(NotImplementedError, match=f"forward mode .*{name}"):
            tangent_of(how, call, x)
    (gradient,) = torch.autograd.grad(call(x.requires_grad_()).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"differentiated once: .*{name}"):
        gradient.sum().backward()


@pytest.mark.oldest
@pytest.mark.parametrize("how", (*FORWARD, "hessian"))
def test_forward_mode_of_folds_is_refused_by_name(how: str) -> None:
    log_sum_exp = mr.monoids.LogSumExp()

    def pair(x: Tensor, y: Tensor) -> Any:
        return log_sum_exp.State((x @ y.T).logsumexp(1))

    x = torch.randn(5, 3)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "monoidreduce.fold": lambda x: mr.fold(log_sum_exp, log_sum_exp.State(x), 0).lse,
        "monoidreduce.map_reduce": lambda x: mr.map_reduce(log_sum_exp, pair, x, x).lse,
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"{name} cannot be differentiated in forward mode"):
            tangent_of(how, call, x)


@pytest.mark.parametrize("how", FORWARD)
def test_forward_mode_of_merged_attention(how: str) -> None:
    """It is made of torch's functions."""
    out, lse = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)

    def merged(out: Tensor) -> Tensor:
        return mr.merge_attention(out, lse)[0].sin()

    def plain(out: Tensor) -> Tensor:
        return (lse.softmax(0)[..., None] * out).sum(0).sin()

    torch.testing.assert_close(tangent_of(how, merged, out), tangent_of(how, plain, out))
