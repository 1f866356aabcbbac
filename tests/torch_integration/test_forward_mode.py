"""Forward mode of operators, and its nests with reverse mode, against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forward import NESTS, Function, scalar
from largest import LargestTensor
from specimens import SPECIMENS, Specimen, name_of
from test_second_derivatives import TWICE, is_differentiable_twice
from tolerance import as_outputs
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vmap

import monoidreduce as mr
from monoidreduce import reference

F64 = torch.float64
MOVED = [specimen for specimen in SPECIMENS if is_differentiable_twice(specimen)]
ONE_EACH = [next(s for s in MOVED if s.operator == operator) for operator in TWICE]
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def of_leaves(specimen: Specimen, inputs: dict[str, Tensor], of: Any) -> Function:
    """The floating-point results of an operator, as a function of its floating-point inputs."""
    names = specimen.differentiable(inputs)

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        moved = dict(zip(names, leaves, strict=True))
        found = as_outputs(getattr(of, specimen.operator)(**{**inputs, **moved}, **specimen.options))
        return tuple(t for t in found if t.is_floating_point())

    return function


@pytest.mark.parametrize("how", NESTS)
@pytest.mark.parametrize("specimen", MOVED, ids=name_of)
def test_float64(specimen: Specimen, how: str, device: torch.device) -> None:
    inputs = specimen.inputs(F64, device)
    x = tuple(inputs[name] for name in specimen.differentiable(inputs))
    u = tuple(map(torch.randn_like, x))
    found, expected = (NESTS[how](of_leaves(specimen, inputs, of), x, u) for of in (mr, reference))
    for ours, theirs in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10 * scale)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("specimen", MOVED, ids=name_of)
def test_other_dtypes_are_as_accurate_as_torch(
    specimen: Specimen, dtype: torch.dtype, device: torch.device
) -> None:
    """By the norm of all errors. Values and tangents are in the dtype of the operator's results."""
    inputs = specimen.inputs(dtype, device)
    exact = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    x = tuple(inputs[name] for name in specimen.differentiable(inputs))
    u = tuple(map(torch.randn_like, x))
    plain = of_leaves(specimen, inputs, mr)(*x)
    found, base = (jvp(of_leaves(specimen, inputs, of), x, u) for of in (mr, reference))
    wide = [tuple(t.double() for t in each) for each in (x, u)]
    for kind, expected in enumerate(jvp(of_leaves(specimen, exact, reference), *wide)):
        for value, ours, torchs, theirs in zip(plain, found[kind], base[kind], expected, strict=True):
            assert ours.dtype == value.dtype
            error, of_torch = (float((t.double() - theirs).norm()) for t in (ours, torchs))
            assert error <= 2 * of_torch + 1e-6 * float(theirs.norm())


@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_jacobians_and_hessians(specimen: Specimen, device: torch.device) -> None:
    """Of five numbers of the first input."""
    inputs = specimen.inputs(F64, device)
    x = tuple(inputs[name] for name in specimen.differentiable(inputs))

    def of_some(of: Any) -> Callable[[Tensor], Tensor]:
        def function(t: Tensor) -> Tensor:
            first = torch.cat((t, x[0].flatten()[len(t) :])).view(x[0].shape)
            return scalar(of_leaves(specimen, inputs, of))(first, *x[1:])

        return function

    t = x[0].flatten()[:5]
    for how in (jacfwd, hessian, lambda f: jacrev(jacfwd(f)), lambda f: jacrev(jacrev(f))):
        torch.testing.assert_close(how(of_some(mr))(t), how(of_some(reference))(t))


@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_vmap_and_linearize(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(F64, device)
    x = tuple(inputs[name] for name in specimen.differentiable(inputs))
    u = tuple(map(torch.randn_like, x))
    function = of_leaves(specimen, inputs, mr)
    along = u, tuple(2 * t for t in u)
    expected = [jvp(function, x, each)[1] for each in along]
    mapped = vmap(lambda *t: jvp(function, x, t)[1])(*map(torch.stack, zip(*along, strict=True)))
    of_vmap = jvp(vmap(function), *(tuple(map(torch.stack, zip(*of, strict=True))) for of in ((x, x), along)))
    expected_of_both = tuple(map(torch.stack, zip(*expected, strict=True)))
    torch.testing.assert_close(mapped, expected_of_both)
    torch.testing.assert_close(of_vmap[1], expected_of_both)
    torch.testing.assert_close(linearize(function, *x)[1](*u), expected[0])


TOKEN = torch.tensor([1, 0, 6, 2])
CLASSES = torch.stack((TOKEN, TOKEN.flip(0)), 1)


@mr.statistics
def of_label(score: Any, column: Any, label: Any, v: Any) -> dict[str, Any]:
    p = mr.stat.softmax(score)
    return dict(lse=p.logsumexp, v=p.mean(v), own=mr.stat.total(torch.where(column == label, score, 0.0)))


# Functions of x [4, 3] and weight [7, 3] that have targets, options or folds which no specimen has.
MORE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "soft targets": lambda x, w: mr.linear_cross_entropy(x, w, CLASSES, target_probs=x[:, :2].exp()),
    "kept": lambda x, w: mr.linear_log_probs(x, w, TOKEN, kept=mr.pack_classes(CLASSES, 7)).log_probs,
    "topk": lambda x, w: mr.linear_topk(x, w, 3).log_probs,
    "sample": lambda x, w: mr.linear_sample(x, w, seed=1, kept=mr.pack_classes(CLASSES, 7)).log_prob,
    "hard targets": lambda x, w: mr.linear_distillation(x, w, x, w, target=TOKEN, hard_weight=0.5),
    "attend": lambda x, w: mr.attend(x[None, None], w[None, None], w[None, None], weight=torch.sigmoid),
    "statistics": lambda x, w: torch.cat(
        [t.reshape(-1) for t in of_label(x, w, label=TOKEN, column={"v": w})]
    ),
    "functions of scores": lambda x, w: mr.attention(
        x[None, None], w[None, None], w[None, None], score_mod=lambda s, b, h, i, j: s * 0.5 + (i - j).abs()
    ),
    "dropout": lambda x, w: mr.attention(x[None, None], w[None, None], w[None, None], dropout_p=0.5, seed=2),
}


@pytest.mark.parametrize("name", MORE)
def test_linearize_reads_no_target(name: str) -> None:
    """Nor another integer: `make_fx`, which traces the function, cannot know it."""
    x, weight = (torch.randn(n, 3, dtype=F64) for n in (4, 7))
    u = torch.randn_like(x), torch.randn_like(weight)
    value, along = linearize(MORE[name], x, weight)
    torch.testing.assert_close((value, along(*u)), jvp(MORE[name], (x, weight), u))


@pytest.mark.parametrize("wrong", (-1, 7, 77))
@pytest.mark.parametrize("options", ({}, {"class_weight": torch.ones(7)}))
def test_a_target_that_is_no_class_is_nan(options: Any, wrong: int, device: torch.device) -> None:
    """Its row alone. The log-sum-exp does not depend on targets."""
    x, weight = torch.randn(4, 3, device=device), torch.randn(7, 3, device=device)
    given = {name: t.to(device) for name, t in options.items()}
    target = torch.tensor([1, wrong, -100, 6], device=device)

    def losses(x: Tensor) -> tuple[Tensor, Tensor]:
        return mr.linear_cross_entropy(x, weight, target, reduction="none", return_lse=True, **given)

    def log_probs(x: Tensor) -> tuple[Tensor, Tensor]:
        found = mr.linear_log_probs(x, weight, target)
        return found.log_probs, found.lse

    for function in (losses, log_probs):
        (found, lse), (along, _) = jvp(function, (x,), (x,))
        assert found.isnan().tolist() == [False, True, False, False] and along[[0, 2, 3]].isfinite().all()
        torch.testing.assert_close(lse[[0, 1, 3]], (x @ weight.T).logsumexp(1)[[0, 1, 3]])


def test_results_beside_the_differentiable_ones(device: torch.device) -> None:
    """top1 of log_probs, of a token that is ignored too."""
    x, weight = torch.randn(4, 3, device=device), torch.randn(7, 3, device=device)
    target = torch.tensor([1, -100, 4, 0], device=device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        found = mr.linear_log_probs(dual, weight, target, top1=True)
    assert torch.equal(found.top1, mr.linear_log_probs(x, weight, target, top1=True).top1)


def test_grouped_queries_windows_and_sinks(device: torch.device) -> None:
    sizes = ((2, 4, 9, 8), (2, 2, 7, 8), (2, 2, 7, 5), (4,))
    x = tuple(
        torch.randn(s, dtype=F64, device=device).transpose(0, -1).contiguous().transpose(0, -1) for s in sizes
    )
    u = tuple(map(torch.randn_like, x))
    results = []
    for of in (mr, reference):
        call = lambda q, k, v, s, of=of: of.attention(  # noqa: E731
            q, k, v, sinks=s, causal=True, window=(3, 0), softcap=2.0, return_lse=True
        )
        results.append((jvp(call, x, u), jvp(grad(scalar(call), (0, 1, 2, 3)), x, u)))
    torch.testing.assert_close(*results)


def test_autocast(device: torch.device) -> None:
    """Tangents of a call under autocast are those of inputs that were cast."""
    x, weight = torch.randn(4, 8, device=device), torch.randn(7, 8, device=device)
    target = torch.tensor([1, 2, 4, 0], device=device)
    with torch.autocast(device.type, torch.bfloat16):
        found = jvp(lambda x: mr.linear_cross_entropy(x, weight, target), (x,), (x,))
    inputs = x.bfloat16(), weight.bfloat16()
    expected = jvp(lambda x: mr.linear_cross_entropy(x, inputs[1], target), inputs[:1], inputs[:1])
    torch.testing.assert_close(found, expected)


def test_an_upstream_gradient_that_moves(device: torch.device) -> None:
    """The backward op is linear in it, so each operator has this forward mode."""
    x, w1, w2, gate = (torch.randn(s, dtype=F64, device=device) for s in ((3, 4), (6, 4), (4, 6), (6, 4)))
    x.requires_grad_()
    out = mr.mlp(x, w1, w2, gate=gate)
    upstream, moved = torch.randn_like(out), torch.randn_like(out)
    with forward_ad.dual_level():
        (gradient,) = torch.autograd.grad(out, x, forward_ad.make_dual(upstream, moved), retain_graph=True)
        tangent = forward_ad.unpack_dual(gradient).tangent
    torch.testing.assert_close(tangent, torch.autograd.grad(out, x, moved)[0])


def test_the_bound_on_memory(device: torch.device) -> None:
    """A tangent of cross entropy needs no tensor of the size of the logits."""
    x, weight = (torch.randn(n, 8, device=device) for n in (300, 2000))
    target = torch.randint(2000, (300,), device=device)
    with LargestTensor() as largest:
        jvp(lambda *t: mr.linear_cross_entropy(*t, target), (x, weight), (x, weight))
    assert largest.elements <= 2 * weight.numel()


@pytest.mark.parametrize("shape", ((1, 2, 0, 3), (0, 2, 3, 3)))
def test_second_derivatives_of_attention_without_queries(
    shape: tuple[int, ...], device: torch.device
) -> None:
    q, k = torch.empty(shape, device=device), torch.randn(shape[0], 2, 4, 3, device=device)
    of = grad(lambda *t: mr.attention(*t).sum(), (0, 1, 2))
    for found, t in zip(jvp(of, (q, k, k), (q, k, k))[1], (q, k, k), strict=True):
        assert torch.equal(found, torch.zeros_like(t))
