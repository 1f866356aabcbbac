"""torch.compile and torch.export: one graph, any size, the values and gradients of the eager call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from paths import counts, takes, tensor_core_paths
from sampled import sampled
from specimens import (
    ONE_EACH,
    SPECIMENS,
    TENSOR_CORE_SPECIMENS,
    Inputs,
    Specimen,
    attention_inputs,
    cross_entropy_inputs,
    distillation_inputs,
    logsumexp_inputs,
    merge_inputs,
    mlp_inputs,
    name_of,
    varlen_inputs,
)
from tolerance import as_outputs, check_operator
from torch import Tensor

import monoidreduce as mr

WITH_OPS = [specimen for specimen in ONE_EACH if specimen.operator != "merge_attention"]


@pytest.fixture(autouse=True)
def no_graphs_of_earlier_tests() -> Iterator[None]:
    torch.compiler.reset()
    yield


def call(specimen: Specimen) -> Callable[[Inputs], tuple[Tensor, ...]]:
    def operator(inputs: Inputs) -> tuple[Tensor, ...]:
        result = getattr(mr, specimen.operator)(**inputs, **specimen.options)
        return as_outputs(result)

    return operator


def with_leaves(inputs: Inputs) -> Inputs:
    return {name: t.requires_grad_() if t.is_floating_point() else t for name, t in inputs.items()}


def outputs_and_gradients(function: Callable[[Inputs], tuple[Tensor, ...]], inputs: Inputs) -> list[Tensor]:
    outputs = function(inputs)
    torch.manual_seed(0)
    upstream = [torch.randn_like(output) for output in outputs]
    leaves = [t for t in inputs.values() if t.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream, materialize_grads=True)]


def assert_same(function: Callable[[Inputs], tuple[Tensor, ...]], specimen: Specimen, inputs: Inputs) -> None:
    expected = outputs_and_gradients(call(specimen), inputs)
    for ours, eager in zip(outputs_and_gradients(function, inputs), expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-6)


def resized(specimen: Specimen, sizes: dict[str, Any]) -> Specimen:
    return Specimen(
        specimen.name, specimen.operator, specimen.make, {**specimen.arguments, **sizes}, specimen.options
    )


# Two sizes of what varies from call to call. No two axes are equal: the tracer would take them for one.
SIZES = {
    attention_inputs: ({"batch": 3, "m": 37, "n": 53}, {"batch": 5, "m": 29, "n": 31}),
    varlen_inputs: (
        {"queries": (5, 7, 21, 1, 6), "keys": (9, 8, 36, 1, 7)},
        {"queries": (11, 3, 4, 0, 2, 1), "keys": (13, 6, 5, 1, 2, 4)},
    ),
    merge_inputs: ({"batch": 2, "m": 17}, {"batch": 5, "m": 29}),
    cross_entropy_inputs: ({"rows": 41, "classes": 67}, {"rows": 23, "classes": 31}),
    distillation_inputs: ({"rows": 41, "classes": 67}, {"rows": 29, "classes": 31}),
    mlp_inputs: ({"rows": 41, "hidden": 67}, {"rows": 29, "hidden": 31}),
    logsumexp_inputs: ({"rows": 41, "columns": 67}, {"rows": 23, "columns": 31}),
}


@pytest.mark.oldest
@pytest.mark.parametrize("specimen", SPECIMENS, ids=name_of)
def test_full_graph(specimen: Specimen, device: torch.device) -> None:
    compiled = torch.compile(call(specimen), fullgraph=True, backend="aot_eager")
    assert_same(compiled, specimen, with_leaves(specimen.inputs(torch.float32, device)))


@pytest.mark.parametrize("specimen", TENSOR_CORE_SPECIMENS, ids=name_of)
def test_16_bit_calls_have_the_bits_of_eager_ones(specimen: Specimen, device: torch.device) -> None:
    """On a GPU's tensor cores."""
    inputs = with_leaves(specimen.inputs(torch.bfloat16, device))
    compiled = torch.compile(call(specimen), fullgraph=True, backend="aot_eager")
    paths = tensor_core_paths(specimen, inputs)
    with takes(paths):
        expected = outputs_and_gradients(call(specimen), inputs)
    with takes(paths):
        found = outputs_and_gradients(compiled, inputs)
    for ours, eager in zip(found, expected, strict=True):
        assert torch.equal(ours, eager)


ROWS = 513
UNLIMITED = (  # that is, by an argument
    Specimen(
        "cross_entropy",
        "linear_cross_entropy",
        cross_entropy_inputs,
        {"rows": ROWS, "classes": 1111, "width": 200},
        {"reduction": "none"},
    ),
    Specimen(
        "distillation",
        "linear_distillation",
        distillation_inputs,
        {"rows": ROWS, "classes": 1111, "width": 200, "teacher_width": 328, "mask": True},
        {"reduction": "none"},
    ),
)


@pytest.mark.parametrize("specimen", UNLIMITED, ids=name_of)
def test_16_bit_losses_without_a_workspace(specimen: Specimen, device: torch.device) -> None:
    """They keep no local gradients, as eager ones do on Hopper: other bits, as near to float64."""
    inputs = specimen.inputs(torch.bfloat16, device)
    compiled = torch.compile(getattr(mr, specimen.operator), fullgraph=True, backend="aot_eager")
    with takes(tensor_core_paths(specimen, inputs)):
        check_operator(specimen.operator, inputs, specimen.options, function=compiled)


@pytest.mark.parametrize("specimen", UNLIMITED, ids=name_of)
def test_16_bit_losses_without_a_workspace_obey_the_limit(specimen: Specimen, device: torch.device) -> None:
    """The limit is one tile of classes. An eager call keeps nothing then either: the same parts and bits."""
    inputs = with_leaves(specimen.inputs(torch.bfloat16, device))
    compiled = torch.compile(call(specimen), fullgraph=True, backend="aot_eager")
    before = mr.get_workspace()
    mr.set_workspace(2 * 256 * ROWS)
    try:
        forward, backward = sorted(tensor_core_paths(specimen, inputs), reverse=True)
        expected = outputs_and_gradients(call(specimen), inputs)
        compiled(inputs)  # traced, forward and backward
        with takes({forward}):
            (loss,) = compiled(inputs)
        with takes({backward}):
            torch.autograd.grad(loss.sum(), inputs["x"])
        found = outputs_and_gradients(compiled, inputs)
    finally:
        mr.set_workspace(before)
    for ours, eager in zip(found, expected, strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize(
    "specimen",
    sampled(ONE_EACH, (s for s in ONE_EACH if s.name in ("attention", "cross_entropy"))),
    ids=name_of,
)
def test_one_graph_serves_every_size(specimen: Specimen, device: torch.device) -> None:
    first, second = (resized(specimen, sizes) for sizes in SIZES[specimen.make])
    compiled = torch.compile(call(specimen), fullgraph=True, dynamic=True, backend="aot_eager")
    assert_same(compiled, first, with_leaves(first.inputs(torch.float32, device)))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(compiled, second, with_leaves(second.inputs(torch.float32, device)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "specimen", sampled(WITH_OPS, (s for s in WITH_OPS if s.name == "cross_entropy")), ids=name_of
)
def test_inductor(specimen: Specimen, device: torch.device) -> None:
    compiled = torch.compile(call(specimen), fullgraph=True)
    assert_same(compiled, specimen, with_leaves(specimen.inputs(torch.float32, device)))


@pytest.mark.release
@pytest.mark.slow
def test_inductor_of_16_bit_layers(device: torch.device) -> None:
    """Layers with nothing but views in between: on a GPU's tensor cores, with the bits of the eager calls."""

    def loss(q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, head: Tensor) -> Tensor:
        heads = mr.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)
        x = mr.mlp(heads.transpose(1, 2).flatten(2), w1, w2)
        return mr.linear_cross_entropy(x, head, target, workspace=32 << 20)

    shapes = ((12, 150, 4, 64), (12, 150, 2, 64), (12, 150, 2, 64), (520, 256), (256, 520), (1000, 256))
    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    inputs = [torch.randn(shape, **place).mul_(0.1).requires_grad_() for shape in shapes]
    target = torch.randint(0, 1000, (12, 150), device=device)
    compiled = torch.compile(loss, fullgraph=True)
    before = counts()
    eager = loss(*inputs)
    expected = torch.autograd.grad(eager, inputs)
    of_eager = set(counts() - before)
    assert device.type == "cpu" or not any("/simt/" in path for path in of_eager)
    with takes(of_eager):
        value = compiled(*inputs)
        found = torch.autograd.grad(value, inputs)
    assert torch.equal(value, eager)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.release
@pytest.mark.slow
def test_inductor_may_choose_the_strides_of_what_it_hands_over(device: torch.device) -> None:
    """Operands and upstream gradients that the graph makes, as transposes, slices and expansions."""

    def layer(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        hidden = mr.mlp((x.t() * 2.0).contiguous().t()[:, ::2], w1.relu(), w2.t().t())
        return torch.cat((hidden, hidden * 2.0), 1)[:, 1:].sum()

    inputs = [torch.randn(s, device=device, requires_grad=True) for s in ((41, 38), (67, 19), (23, 67))]
    eager = torch.autograd.grad(layer(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(layer, fullgraph=True)(*inputs), inputs)
    for ours, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions_and_leading_axes(reduction: str, device: torch.device) -> None:
    x = torch.randn(3, 5, 8, device=device, requires_grad=True)
    weight = torch.randn(11, 8, device=device, requires_grad=True)
    target = torch.randint(0, 11, (3, 5), device=device)
    target[0, :2] = -100

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return mr.linear_cross_entropy(x, weight, target, reduction=reduction)

    eager = loss(x, weight)
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")(x, weight)
    torch.testing.assert_close(compiled, eager)
    for ours, expected in zip(
        torch.autograd.grad(compiled, (x, weight)), torch.autograd.grad(eager, (x, weight)), strict=True
    ):
        torch.testing.assert_close(ours, expected)


def test_autocast_inside_and_outside_the_graph(device: torch.device) -> None:
    x = torch.randn(7, 8, device=device, requires_grad=True)
    weights = [torch.randn(16, 8, device=device), torch.randn(8, 16, device=device)]

    def layer(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return mr.mlp(x, *weights)

    eager = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert compiled.dtype == eager.dtype == torch.bfloat16
    torch.testing.assert_close(compiled, eager)
    with torch.autocast(device.type, torch.bfloat16):
        around = torch.compile(lambda x: mr.mlp(x, *weights), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(around, eager)
    assert torch.autograd.grad(compiled.sum(), x)[0].dtype == torch.float32


def test_differentiating_a_compiled_gradient_raises(device: torch.device) -> None:
    x, w1, w2 = (torch.randn(s, device=device, requires_grad=True) for s in ((7, 8), (16, 8), (8, 16)))
    compiled = torch.compile(mr.mlp, fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(x, w1, w2).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


def test_wrong_arguments_raise_while_tracing(device: torch.device) -> None:
    compiled = torch.compile(mr.mlp, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="w2"):
        compiled(*(torch.randn(s, device=device) for s in ((7, 8), (16, 8), (8, 15))))


def test_wrong_target_raises_from_a_compiled_call() -> None:
    loss = torch.compile(mr.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert torch.isfinite(loss(x, weight, torch.tensor([0, 4, 2])))
    with pytest.raises(IndexError, match="target"):
        loss(x, weight, torch.tensor([0, 5, 2]))


@pytest.mark.oldest
def test_modules_compile_in_one_graph(device: torch.device) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = mr.nn.Attention(causal=True)
            self.mlp = mr.nn.MLP(8, 24)
            self.loss = mr.nn.LinearCrossEntropyLoss(label_smoothing=0.1)
            self.head = torch.nn.Parameter(torch.randn(11, 8))

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
            x = self.attention(heads, heads, heads).transpose(1, 2).flatten(2)
            return self.loss(self.mlp(x), self.head, target)

    block = Block().to(device)
    x, target = torch.randn(2, 5, 8, device=device), torch.randint(0, 11, (2, 5), device=device)
    eager = block(x, target)
    eager_gradients = torch.autograd.grad(eager, list(block.parameters()))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(x, target)
    torch.testing.assert_close(compiled, eager)
    for ours, expected in zip(
        torch.autograd.grad(compiled, list(block.parameters())), eager_gradients, strict=True
    ):
        torch.testing.assert_close(ours, expected)


class Operator(torch.nn.Module):
    def __init__(self, specimen: Specimen) -> None:
        super().__init__()
        self.call = call(specimen)

    def forward(self, inputs: Inputs) -> tuple[Tensor, ...]:
        return self.call(inputs)


@pytest.mark.oldest
@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_export(specimen: Specimen, strict: bool, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    program = torch.export.export(Operator(specimen), (inputs,), strict=strict)
    for ours, eager in zip(program.module()(inputs), call(specimen)(inputs), strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.oldest
def test_export_keeps_sizes_open(device: torch.device) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return mr.attention(q, k, k, causal=True)

    q, k = torch.randn(2, 4, 9, 8, device=device), torch.randn(2, 2, 13, 8, device=device)
    m, n = torch.export.Dim("m"), torch.export.Dim("n")
    program = torch.export.export(Layer(), (q, k), dynamic_shapes=({2: m}, {2: n}))
    q, k = torch.randn(2, 4, 5, 8, device=device), torch.randn(2, 2, 21, 8, device=device)
    torch.testing.assert_close(program.module()(q, k), mr.attention(q, k, k, causal=True))


def test_a_compiled_call_reads_the_workspace_when_its_backward_runs(device: torch.device) -> None:
    """The limit is no part of the graph: changing it neither recompiles nor changes the values."""
    x = torch.randn(7, 8, device=device, requires_grad=True)
    weight, target = torch.randn(11, 8, device=device), torch.arange(7, device=device)
    loss = torch.compile(mr.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    (expected,) = torch.autograd.grad(loss(x, weight, target), x)
    with torch._dynamo.config.patch(error_on_recompile=True), mr.workspace(0):
        (gradient,) = torch.autograd.grad(loss(x, weight, target), x)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.oldest
@pytest.mark.parametrize("shape", [(), (53,), (37, 1), (37, 53), (4, 1, 53), (2, 1, 37, 53)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=name_of)
def test_biases_of_any_number_of_axes(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    q, k = torch.randn(2, 4, 37, 8, device=device), torch.randn(2, 2, 53, 8, device=device)
    bias = (
        torch.randn(shape, device=device)
        if dtype.is_floating_point
        else torch.rand(shape, device=device) < 0.5
    )

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
            return mr.attention(q, k, k, bias=bias)

    eager = mr.attention(q, k, k, bias=bias)
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")(q, k, bias)
    torch.testing.assert_close(compiled, eager)
    program = torch.export.export(Layer(), (q, k, bias), strict=True)
    torch.testing.assert_close(program.module()(q, k, bias), eager)


def half_the_keys(q: Tensor) -> Tensor:
    return mr.attention(q, q, q, window=(q.shape[2] // 2, q.shape[2] // 4))


def test_a_window_of_sizes_is_part_of_one_graph(device: torch.device) -> None:
    compiled = torch.compile(half_the_keys, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (9, 40, 12, 77):
        q = torch.randn(2, 4, length, 8, device=device, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=length != 9):
            found = compiled(q)
        expected = half_the_keys(q)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), q) for out in (found, expected)))


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
def test_export_keeps_a_window_of_sizes_open(strict: bool, device: torch.device) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return half_the_keys(q)

    shapes = ({2: torch.export.Dim("n", min=4, max=1000)},)
    example = torch.randn(2, 4, 9, 8, device=device)
    program = torch.export.export(Layer(), (example,), dynamic_shapes=shapes, strict=strict)
    for length in (9, 40, 77):
        q = torch.randn(2, 4, length, 8, device=device)
        torch.testing.assert_close(program.module()(q), half_the_keys(q))


def test_a_window_may_hang_on_data(device: torch.device) -> None:
    def layer(q: Tensor, left: Tensor) -> Tensor:
        side = left.item()
        torch._check(side >= 0)
        return mr.attention(q, q, q, window=(side, 0))

    q = torch.randn(2, 4, 37, 8, device=device)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for left in (3, 11):
            torch.testing.assert_close(
                compiled(q, torch.tensor(left)), mr.attention(q, q, q, window=(left, 0))
            )


@pytest.mark.parametrize("exported", [False, True])
def test_a_workspace_block_is_part_of_the_graph(exported: bool, device: torch.device) -> None:
    """As the argument is: it holds for the backward too, wherever that runs. Blocks nest."""

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            calls = (x, weight, target)
            before = mr.linear_cross_entropy(*calls)
            with mr.workspace(4096):
                with mr.workspace(0):
                    inner = mr.linear_cross_entropy(*calls)
                outer, given = mr.linear_cross_entropy(*calls), mr.linear_cross_entropy(*calls, workspace=7)
            return before, inner, outer, given, mr.logsumexp_matmul(x, weight)

    x, weight = torch.randn(7, 8, device=device, requires_grad=True), torch.randn(11, 8, device=device)
    inputs = (x, weight, torch.arange(7, device=device))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    if exported:
        program = torch.export.export(Layer(), inputs, strict=False)
        graphs.append(program.graph_module)
        results = program.module()(*inputs)
    else:
        compiled = torch.compile(Layer(), fullgraph=True, backend=keep)
        results = compiled(*inputs)
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(*inputs)
    (graph,) = graphs
    workspaces = [node.args[-1] for node in graph.graph.nodes if "monoidreduce" in str(node.target)]
    assert workspaces == [None, 0, 4096, 7, None]
    expected = Layer()(*inputs)
    for ours, eager in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, eager)
    assert mr.get_workspace() == 352 << 20
