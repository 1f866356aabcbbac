"""FlopCounterMode counts the operators as torch counts their compositions, and scores computed again."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from specimens import ONE_EACH, SPECIMENS, Inputs, Specimen, name_of
from tolerance import as_outputs
from torch import Tensor
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import monoidreduce as mr
import monoidreduce.reference
from monoidreduce._ops.registry import OPERATORS

WITH_OPS = [specimen for specimen in SPECIMENS if specimen.operator != "merge_attention"]
GATED = [specimen for specimen in SPECIMENS if specimen.arguments.get("gate")]
ONE_EACH_WITH_OPS = [specimen for specimen in ONE_EACH if specimen.operator != "merge_attention"]


def count(module: object, specimen: Specimen, inputs: Inputs, wanted: list[str]) -> tuple[int, int]:
    """What the call of the operator counts, and the backward pass to these inputs."""
    leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in inputs.items()}
    with FlopCounterMode(display=False) as forward:
        result = getattr(module, specimen.operator)(**leaves, **specimen.options)
    outputs = [y for y in as_outputs(result) if y.requires_grad]
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad([y.sum() for y in outputs], [leaves[name] for name in wanted])
    flops = forward.get_total_flops(), backward.get_total_flops()
    if module is monoidreduce.reference and specimen.operator == "attention_varlen":
        # Ours counts all tokens as if they were of one sequence.
        queries, keys = (inputs[name].diff() for name in ("cu_seqlens_q", "cu_seqlens_k"))
        pairs, of_sequences = len(inputs["q"]) * len(inputs["k"]), int((queries * keys).sum())
        assert all(count % of_sequences == 0 for count in flops)
        flops = flops[0] // of_sequences * pairs, flops[1] // of_sequences * pairs
    return flops


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_counts_are_those_of_the_composition(specimen: Specimen, device: torch.device) -> None:
    """Of the forward pass the same. Of the backward pass the scores of the forward pass again."""
    inputs = specimen.inputs(torch.float32, device)
    wanted = specimen.differentiable(inputs)
    forward, backward = count(mr, specimen, inputs, wanted)
    eager_forward, eager_backward = count(monoidreduce.reference, specimen, inputs, wanted)
    assert forward == eager_forward > 0
    assert backward - eager_backward == scores(specimen.operator, inputs)


def scores(operator: str, inputs: Inputs) -> int:
    """The floating-point operations of the scores of a forward pass."""
    if operator == "attention":
        q, k = inputs["q"], inputs["k"]
        return 2 * q.numel() * k.shape[2]
    if operator == "attention_varlen":
        return 2 * inputs["q"].numel() * len(inputs["k"])
    if "a" in inputs:
        return 2 * inputs["a"].numel() * len(inputs["b"])
    of_teacher = inputs["teacher_x"].numel() if "teacher_x" in inputs else 0
    columns = inputs["w1" if operator == "mlp" else "weight"]
    of_gate = inputs["x"].numel() if "gate" in inputs else 0
    return 2 * (inputs["x"].numel() + of_teacher + of_gate) * len(columns)


@pytest.mark.parametrize("specimen", [*ONE_EACH_WITH_OPS, *GATED], ids=name_of)
def test_gradients_that_are_not_needed_do_not_count(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    for name in specimen.differentiable(inputs):
        _, backward = count(mr, specimen, inputs, [name])
        _, eager = count(monoidreduce.reference, specimen, inputs, [name])
        again = 0 if name == "bias2" else scores(specimen.operator, inputs)
        assert backward - eager == again, name


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
def test_attention_counts_as_that_of_torch(causal: bool, device: torch.device) -> None:
    """Which counts all keys of a causal call."""
    shapes = [(2, 6, 40, 16), (2, 6, 50, 16), (2, 6, 50, 24)]
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for shape in shapes)
    with FlopCounterMode(display=False) as forward:
        out = mr.attention(q, k, v, causal=causal)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == sdpa_flop_count(*shapes)
    assert backward.get_total_flops() == sdpa_backward_flop_count(tuple(out.shape), *shapes)


def test_the_gradient_of_the_log_sum_exp_alone_has_no_products_with_values(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 2, n, 16, device=device, requires_grad=True) for n in (5, 7, 7))
    _, lse = mr.attention(q, k, v, return_lse=True)
    with FlopCounterMode(display=False) as counter:
        lse.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 2 * 5 * 7 * 16


def test_a_folded_mlp_has_fourteen_units_of_twelve() -> None:
    """MonoidReduce, section 4: 12 B K D FLOPs become 14, for hidden values are computed again."""
    B, K, D = 64, 96, 16
    shapes = ((B, D), (K, D), (K, D))
    x, w1, w2 = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    upstream = torch.randn_like(x)
    fold = mr.monoids.Sum()

    def gradients(x: Tensor, w: tuple[Tensor, Tensor], total: Any, upstream: Any) -> Any:
        hidden, grad_out = x @ w[0].T, upstream.value
        local = (grad_out @ w[1].T) * (hidden > 0)
        return local @ w[0], (local.T @ x, hidden.relu().T @ grad_out)

    with FlopCounterMode(display=False) as stored:
        ((x @ w1.T).relu() @ w2).backward(upstream)
    expected = [t.grad for t in (x, w1, w2)]
    with FlopCounterMode(display=False) as folded:
        out = mr.map_reduce(
            fold,
            lambda x, w: fold.State((x @ w[0].T).relu() @ w[1]),
            x,
            (w1, w2),
            fused_backward=gradients,
            b_chunk=32,
        ).value
        found = torch.autograd.grad(out, (x, w1, w2), upstream)
    unit = B * K * D
    assert (stored.get_total_flops(), folded.get_total_flops()) == (12 * unit, 14 * unit)
    torch.testing.assert_close(found, tuple(expected))


def test_batches_count_as_their_folds() -> None:
    @mr.statistics
    def f(score: Any, v: Any) -> dict[str, Any]:
        return {"mean": mr.stat.softmax(2 * score).mean(v)}

    a, b, v = torch.randn(3, 5, 4), torch.randn(3, 7, 4), torch.randn(3, 7, 2)
    counts = []
    for rows, columns, vectors in ((a, b, v), (a[0], b[0], v[0])):
        with FlopCounterMode(display=False) as flops:
            f(rows, columns, column={"v": vectors})
        counts.append(flops.get_total_flops())
    assert counts == [3 * 2 * 5 * 7 * (4 + 2), 2 * 5 * 7 * (4 + 2)]


def test_every_op_has_a_formula() -> None:
    ops = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("monoidreduce::")]
    assert ops
    packets = [getattr(torch.ops.monoidreduce, name.split("::")[1].split(".")[0]) for name in ops]
    assert [op for op in packets if op not in flop_registry] == []


@pytest.mark.parametrize("name", OPERATORS)
def test_folds_name_inputs_of_their_ops(name: str) -> None:
    fold, schema = OPERATORS[name].fold, getattr(torch.ops.monoidreduce, name).default._schema
    inputs = [argument.name for argument in schema.arguments][: OPERATORS[name].inputs]
    assert {*fold.operands.values(), *fold.data, *fold.joined} <= {*inputs}


def test_gradients_of_what_is_joined_to_results_have_no_products() -> None:
    """Nor do useful FLOPs fall below those of the forward pass then."""
    q = torch.randn(2, 3, 8, 16)
    sinks = torch.randn(3, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = mr.attention(q, q, q, sinks=sinks)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert (forward, counter.get_total_flops()) == (2 * 2 * 2 * 3 * 8 * 8 * 16, 0)
    found = mr.cost("attention", q, q, q, sinks=sinks, hardware="h100", needed="sinks")
    assert found.useful_flops == forward
    x, w1, w2, bias2 = (torch.empty(shape) for shape in ((64, 16), (32, 16), (8, 32), (8,)))
    found = mr.cost("mlp", x, w1, w2, bias2=bias2, hardware="h100", needed="bias2")
    assert found.useful_flops == 2 * 64 * 32 * (16 + 8)


@pytest.mark.parametrize("first", ("torch.utils.flop_counter", "monoidreduce"))
def test_whatever_is_imported_first(first: str) -> None:
    """And the library does not import the counter, which imports Triton."""
    second = {"monoidreduce": "torch.utils.flop_counter"}.get(first, "monoidreduce")
    program = f"""
import sys, torch
before = len(sys.meta_path)
import {first}
assert ("torch.utils.flop_counter" in sys.modules) == ({first!r} != "monoidreduce")
import {second}
assert len(sys.meta_path) == before
import monoidreduce as mr
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    mr.logsumexp_matmul(torch.randn(3, 8), torch.randn(5, 8))
assert counter.get_total_flops() == 2 * 3 * 5 * 8
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_an_op_whose_numbers_are_a_tensor_counts_the_same() -> None:
    """As graphs of torch.compile call it, whose numbers change."""
    x, weight = (torch.randn(n, 16, requires_grad=True) for n in (8, 30))
    ops, numbers = torch.ops.monoidreduce, torch.tensor([0.5], dtype=torch.float64)
    counted = []
    for call in (
        lambda: ops.logsumexp_matmul(x, weight, 0.5, False, False, None),
        lambda: ops.logsumexp_matmul_symbolic(x, weight, numbers, 1.0, False, False, None),
    ):
        with FlopCounterMode(display=False) as counter:
            lse, *_ = call()
            gradients = torch.autograd.grad(lse.sin().sum(), (x, weight))
        counted.append((counter.get_total_flops(), lse, *gradients))
    (plain, *expected), (symbolic, *found) = counted
    assert symbolic == plain > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
