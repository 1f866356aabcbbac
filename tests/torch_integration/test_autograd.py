"""The operators under autograd: which gradients are computed, how often, and what has no derivative."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from specimens import ONE_EACH, SPECIMENS, Inputs, Specimen, name_of
from tolerance import as_outputs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr

WITH_OPS = [specimen for specimen in ONE_EACH if specimen.operator != "merge_attention"]


def call(specimen: Specimen, inputs: Inputs) -> tuple[Tensor, ...]:
    result = getattr(mr, specimen.operator)(**inputs, **specimen.options)
    return as_outputs(result)


def floating(inputs: Inputs) -> Inputs:
    return {name: t for name, t in inputs.items() if t.is_floating_point()}


def upstream(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn_like(output) for output in outputs]


def all_gradients(specimen: Specimen, inputs: Inputs) -> dict[str, Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in floating(inputs).items()}
    outputs = call(specimen, {**inputs, **leaves})
    return dict(
        zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), upstream(outputs)), strict=True)
    )


# By operator: sizes at which every element is perturbed in turn.
TINY: dict[str, dict[str, Any]] = {
    "attention": {"batch": 1, "heads": 2, "kv_heads": 1, "m": 5, "n": 6, "width": 3, "value_width": 2},
    "linear_cross_entropy": {"rows": 5, "classes": 7, "width": 3},
    "linear_distillation": {"rows": 4, "classes": 6, "width": 3, "teacher_width": 2},
    "linear_log_probs": {"rows": 5, "classes": 7, "width": 3},
    "mlp": {"rows": 4, "width": 3, "hidden": 5, "outputs": 2},
    "logsumexp_matmul": {"rows": 4, "columns": 6, "width": 3},
}
BIASES = {"bias": (1, 2, 1, 6)}, {"keep": (1, 1, 5, 6)}


@pytest.mark.parametrize("specimen", [s for s in SPECIMENS if s.operator in TINY], ids=name_of)
def test_gradcheck(specimen: Specimen, device: torch.device) -> None:
    """Against finite differences, and with outputs whose upstream gradient is not defined."""
    arguments = specimen.arguments | TINY[specimen.operator]
    for bias in BIASES:
        if bias.keys() <= specimen.arguments.keys():
            arguments |= bias
    inputs = specimen.make(dtype=torch.float64, device=device, **arguments)
    names = list(floating(inputs))

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        outputs = call(specimen, {**inputs, **dict(zip(names, leaves, strict=True))})
        return tuple(output for output in outputs if output.requires_grad)

    leaves = [inputs[name].detach().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(run, leaves, atol=1e-6, rtol=1e-5)


class Stopped(torch.autograd.Function):
    """The identity, which passes no gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_an_upstream_gradient_may_be_undefined(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    leaves = {name: t.detach().requires_grad_() for name, t in floating(inputs).items()}
    stopped = [Stopped.apply(output) for output in call(specimen, {**inputs, **leaves})]
    torch.stack([output.sum() for output in stopped]).sum().backward()
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves.values())


@pytest.mark.parametrize("specimen", SPECIMENS, ids=name_of)
def test_every_subset_of_inputs_may_require_gradients(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    names = list(floating(inputs))
    expected = all_gradients(specimen, inputs)
    for count in range(len(names) + 1):
        for subset in itertools.combinations(names, count):
            leaves = {name: inputs[name].detach().requires_grad_() for name in subset}
            outputs = call(specimen, {**inputs, **leaves})
            assert any(output.requires_grad for output in outputs) == bool(subset)
            if subset:
                pairs = zip(outputs, upstream(outputs), strict=True)
                used, grads = zip(*((output, g) for output, g in pairs if output.requires_grad), strict=True)
                gradients = torch.autograd.grad(used, list(leaves.values()), grads)
                for name, gradient in zip(subset, gradients, strict=True):
                    torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_only_inputs_and_row_statistics_are_saved(specimen: Specimen, device: torch.device) -> None:
    inputs = {
        n: t.requires_grad_() if t.is_floating_point() else t
        for n, t in specimen.inputs(torch.float32, device).items()
    }
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = call(specimen, inputs)
    given = {t.data_ptr() for t in (*inputs.values(), *outputs)}
    extra = [t for t in saved if t.data_ptr() not in given]
    rows = max(output.numel() for output in outputs)
    assert saved and sum(t.numel() for t in extra) <= 6 * rows


class BackwardCalls(TorchDispatchMode):
    """What the backward op was asked for, and how many gradients it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.needed: list[list[bool]] = []
        self.given: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "monoidreduce":
            self.needed.append(list(args[-1]))
            self.given.append(sum(gradient.numel() > 0 for gradient in result))
        return result


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_a_gradient_that_is_not_needed_is_not_computed(specimen: Specimen, device: torch.device) -> None:
    """Frozen weights cost neither time nor memory."""
    inputs = specimen.inputs(torch.float32, device)
    for name in floating(inputs):
        leaf = inputs[name].detach().requires_grad_()
        outputs = call(specimen, {**inputs, name: leaf})
        with BackwardCalls() as calls:
            torch.autograd.grad(outputs, leaf, upstream(outputs))
        assert [sum(needed) for needed in calls.needed] == calls.given == [1]


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_values_do_not_depend_on_the_gradient_mode(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    leaves = {n: t.detach().requires_grad_() for n, t in floating(inputs).items()}
    expected = call(specimen, {**inputs, **leaves})
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = call(specimen, {**inputs, **leaves})
        for output, reference in zip(outputs, expected, strict=True):
            assert not output.requires_grad and torch.equal(output, reference)
    with torch.inference_mode():
        outputs = call(specimen, {n: t.clone() for n, t in inputs.items()})
    assert all(output.is_inference() for output in outputs)
    for output, reference in zip(outputs, expected, strict=True):
        assert torch.equal(output, reference)


@pytest.mark.parametrize("specimen", SPECIMENS, ids=name_of)
def test_outputs_may_be_left_out_of_the_loss(specimen: Specimen, device: torch.device) -> None:
    """An output without an upstream gradient counts as one with a gradient of zeros."""
    inputs = specimen.inputs(torch.float32, device)
    leaves = {n: t.detach().requires_grad_() for n, t in floating(inputs).items()}
    outputs = call(specimen, {**inputs, **leaves})
    grads = upstream(outputs)
    for used in range(len(outputs)):
        alone = torch.autograd.grad(
            outputs[used], list(leaves.values()), grads[used], retain_graph=True, materialize_grads=True
        )
        masked = [g if i == used else torch.zeros_like(g) for i, g in enumerate(grads)]
        together = torch.autograd.grad(outputs, list(leaves.values()), masked, retain_graph=True)
        for ours, expected in zip(alone, together, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def _transposed(g: Tensor) -> Tensor:
    return g.mT.contiguous().mT if g.dim() > 1 else torch.stack((g, g), -1)[:, 0]


def _cat_slice(g: Tensor) -> Tensor:
    margin = torch.full_like(g, torch.nan)
    return torch.cat((margin, g, margin), -1).narrow(-1, g.shape[-1], g.shape[-1])


@pytest.mark.parametrize("layout", [_transposed, _cat_slice], ids=["transposed", "slice"])
@pytest.mark.parametrize("specimen", SPECIMENS, ids=name_of)
def test_upstream_gradients_may_have_any_strides(
    specimen: Specimen, layout: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    inputs = specimen.inputs(torch.float32, device)
    expected = all_gradients(specimen, inputs)
    leaves = {n: t.detach().requires_grad_() for n, t in floating(inputs).items()}
    outputs = call(specimen, {**inputs, **leaves})
    grads = [layout(g) for g in upstream(outputs)]
    for name, gradient in zip(
        leaves, torch.autograd.grad(outputs, list(leaves.values()), grads), strict=True
    ):
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("specimen", SPECIMENS, ids=name_of)
def test_an_expanded_upstream_gradient_is_that_of_a_sum(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    leaves = {n: t.detach().requires_grad_() for n, t in floating(inputs).items()}
    outputs = call(specimen, {**inputs, **leaves})
    dense = torch.autograd.grad(
        outputs, list(leaves.values()), [torch.full_like(o, -1.5) for o in outputs], retain_graph=True
    )
    expanded = torch.autograd.grad(sum(-1.5 * output.sum() for output in outputs), list(leaves.values()))
    for ours, expected in zip(expanded, dense, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_a_graph_can_be_used_again_and_accumulates(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    leaves = {n: t.detach().requires_grad_() for n, t in floating(inputs).items()}
    outputs = call(specimen, {**inputs, **leaves})
    grads = upstream(outputs)
    torch.autograd.backward(outputs, grads, retain_graph=True)
    once = {n: t.grad.clone() for n, t in leaves.items()}
    torch.autograd.backward(outputs, grads)
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, 2 * once[name])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.backward(outputs, grads)


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_inputs_and_upstream_gradients_are_left_alone(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    leaves = {n: t.detach().requires_grad_() for n, t in floating(inputs).items()}
    everything = {**inputs, **leaves}
    before = {n: (t._version, t.detach().clone()) for n, t in everything.items()}
    outputs = call(specimen, everything)
    grads = upstream(outputs)
    copies = [g.clone() for g in grads]
    torch.autograd.backward(outputs, grads)
    for name, (version, values) in before.items():
        assert everything[name]._version == version and torch.equal(everything[name], values)
    for grad, copy in zip(grads, copies, strict=True):
        assert torch.equal(grad, copy)


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_changing_an_input_before_the_backward_is_noticed(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    leaves = {n: t.detach().requires_grad_() for n, t in floating(inputs).items()}
    for changed in leaves:
        copies = {n: t.clone() for n, t in leaves.items()}
        outputs = call(specimen, {**inputs, **copies})
        with torch.no_grad():
            copies[changed].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(outputs, upstream(outputs))


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_hooks_see_and_change_gradients(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    expected = all_gradients(specimen, inputs)
    leaves = {n: t.detach().requires_grad_() for n, t in floating(inputs).items()}
    for leaf in leaves.values():
        leaf.register_hook(lambda g: -3.0 * g)
    outputs = call(specimen, {**inputs, **leaves})
    outputs[0].register_hook(lambda g: 2.0 * g)
    first, *rest = upstream(outputs)
    for name, gradient in zip(
        leaves, torch.autograd.grad(outputs, list(leaves.values()), [first / 2.0, *rest]), strict=True
    ):
        torch.testing.assert_close(gradient, -3.0 * expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_checkpoint(specimen: Specimen, reentrant: bool, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    expected = all_gradients(specimen, inputs)
    leaves = {n: t.detach().requires_grad_() for n, t in floating(inputs).items()}
    names = list(inputs)

    def layer(*tensors: Tensor) -> tuple[Tensor, ...]:
        return call(specimen, dict(zip(names, tensors, strict=True)))

    everything: dict[str, Any] = {**inputs, **leaves}
    outputs = checkpoint(layer, *(everything[n] for n in names), use_reentrant=reentrant)
    torch.autograd.backward(outputs, upstream(outputs))
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, expected[name], rtol=1e-6, atol=1e-6)


def nodes(of: Any) -> set[str]:
    """The names of all nodes of a graph."""
    return {of.name()}.union(*(nodes(node) for node, _ in of.next_functions if node is not None))


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_nodes_are_named_after_their_operator(specimen: Specimen, device: torch.device) -> None:
    """In the graph, for profilers and in anomaly mode."""
    inputs = specimen.inputs(torch.float32, device)
    leaves = {n: t.detach().requires_grad_() for n, t in floating(inputs).items()}
    name = f"{specimen.operator.title().replace('_', '')}Backward"  # as LinearCrossEntropyBackward
    with torch.profiler.profile() as profile:
        outputs = call(specimen, {**inputs, **leaves})
        torch.autograd.backward(outputs, upstream(outputs))
    assert all(name in nodes(output.grad_fn) for output in outputs)
    ops = {f"monoidreduce::{specimen.operator}{suffix}" for suffix in ("", "_backward")}
    assert {name, *ops} <= {event.key for event in profile.key_averages()}
    first = next(iter(leaves))
    leaves[first] = torch.full_like(leaves[first], torch.nan).requires_grad_()
    with torch.autograd.detect_anomaly():
        outputs = call(specimen, {**inputs, **leaves})
        with pytest.raises(RuntimeError, match=f"Function '{name}' returned nan values"):
            torch.autograd.backward(outputs, upstream(outputs))


def test_merge_attention_is_differentiable_twice(device: torch.device) -> None:
    outs = [torch.randn(2, 3, 4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(2, 3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradgradcheck(mr.merge_attention, (outs[0], lses[0], outs[1], lses[1]))


def test_the_op_by_itself_has_the_gradients_of_the_function(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 2, n, 8, device=device, requires_grad=True) for n in (5, 7, 7))
    out, lse, *_ = torch.ops.monoidreduce.attention(q, k, v, None, None, None, 0.0, -1, 0, False)
    expected = mr.attention(q, k, v, causal=True, return_lse=True)
    for ours, theirs in zip((out, lse), expected, strict=True):
        assert torch.equal(ours, theirs)
    grads = upstream((out, lse))
    for ours, theirs in zip(
        torch.autograd.grad((out, lse), (q, k, v), grads),
        torch.autograd.grad(expected, (q, k, v), grads),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
