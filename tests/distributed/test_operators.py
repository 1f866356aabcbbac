"""The operators with their columns split over ranks, against the rule of tolerance.py.

Replicated results have the same bits on all ranks (`ranks.OverRanks`).
"""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import AttentionOverRanks, Each, OverRanks, VarlenOverRanks, on_ranks, same_bits
from specimens import (
    ONE_EACH,
    attention_inputs,
    class_weights,
    cross_entropy_inputs,
    distillation_inputs,
    logsumexp_inputs,
    mlp_inputs,
    name_of,
    varlen_inputs,
)
from tolerance import as_outputs, check_operator
from torch.utils.flop_counter import FlopCounterMode
from virtual_ranks import CrossEntropyOverVirtualRanks, DistillationOverVirtualRanks

import monoidreduce as mr
from monoidreduce.distributed import operators

CPU: Any = {"device": torch.device("cpu")}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
PER_TOKEN: dict[str, Any] = {"reduction": "none", "return_lse": True}
EVERYTHING: dict[str, Any] = {"label_smoothing": 0.2, "z_loss": 0.05, "softcap": 3.0, "logit_scale": 0.7}
ROWS = 384  # with fewer the rule says nothing of float32's mean error


def check(operator: str, inputs: Any, options: Any, ranks: int, **split: Any) -> dict[str, torch.Tensor]:
    return check_operator(operator, inputs, options, function=OverRanks(operator, ranks, **split))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("ranks", (2, 3, 4))
@pytest.mark.parametrize("options", ({}, EVERYTHING), ids=("plain", "everything"))
def test_cross_entropy(options: dict[str, Any], ranks: int, dtype: torch.dtype) -> None:
    inputs = cross_entropy_inputs(ROWS, 67, 24, dtype=dtype, bias=bool(options), **CPU)
    check("linear_cross_entropy", inputs, PER_TOKEN | options, ranks)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("ranks", (1, 5))
def test_losses_over_virtual_ranks(ranks: int, dtype: torch.dtype) -> None:
    """The folds of all ranks in one process, as tests on a GPU run them."""
    inputs = cross_entropy_inputs(ROWS, 67, 24, dtype=dtype, **CPU)
    over_ranks = CrossEntropyOverVirtualRanks(ranks)
    check_operator("linear_cross_entropy", inputs, PER_TOKEN | {"z_loss": 0.05}, function=over_ranks)
    inputs = distillation_inputs(ROWS, 67, 24, 20, dtype=dtype, **CPU)
    check_operator(
        "linear_distillation", inputs, {"reduction": "none"}, function=DistillationOverVirtualRanks(ranks)
    )


@pytest.mark.parametrize("name", ("label_smoothing", "z_loss", "softcap", "logit_scale"))
def test_each_option_of_cross_entropy(name: str) -> None:
    inputs = cross_entropy_inputs(ROWS, 67, 24, dtype=torch.float32, **CPU)
    check("linear_cross_entropy", inputs, PER_TOKEN | {name: EVERYTHING[name]}, 3)


@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
@pytest.mark.parametrize("smoothing", (0.0, 0.3))
@pytest.mark.parametrize("own_rows", (False, True), ids=("replicated", "sequence_parallel"))
def test_class_weights_and_reductions(reduction: str, smoothing: float, own_rows: bool) -> None:
    inputs = cross_entropy_inputs(ROWS, 67, 24, dtype=torch.float32, **CPU)
    weights = class_weights(67, dtype=torch.float32, **CPU)
    options = {"reduction": reduction, "label_smoothing": smoothing, "class_weight": weights}
    check("linear_cross_entropy", inputs, options, 2, own_rows=own_rows)


@pytest.mark.parametrize("classes, ranks", ((3, 4), (1, 2), (5, 4)))
@pytest.mark.parametrize("padding", (None, 0, 9))
def test_empty_uneven_and_padded_shards(classes: int, ranks: int, padding: int | None) -> None:
    """Padding is NaN, so that it would be seen."""
    inputs = cross_entropy_inputs(40, classes, 8, dtype=torch.float32, bias=True, **CPU)
    options = PER_TOKEN | EVERYTHING | {"class_weight": class_weights(classes, dtype=torch.float32, **CPU)}
    check("linear_cross_entropy", inputs, options, ranks, padding=padding)


@pytest.mark.parametrize("level", (300.0, -3000.0))
@pytest.mark.parametrize("operator", ("linear_cross_entropy", "linear_distillation"))
def test_a_constant_in_all_logits_of_a_row(operator: str, level: float) -> None:
    options: dict[str, Any] = {"reduction": "none"}
    if operator == "linear_cross_entropy":
        inputs = cross_entropy_inputs(ROWS, 67, 24, dtype=torch.float32, level=level, **CPU)
        options["label_smoothing"] = 0.2
    else:
        inputs = distillation_inputs(ROWS, 67, dtype=torch.float32, level=level, teacher_level=-level, **CPU)
        options["teacher_grad"] = True
    check(operator, inputs, options, 3)


@pytest.mark.parametrize("ignore_index", (-100, 5, 66))
def test_ignored_tokens(ignore_index: int) -> None:
    """An index of a class, which lies in one rank's shard, is ignored by all."""
    inputs = cross_entropy_inputs(ROWS, 67, 24, dtype=torch.float32, ignore_index=ignore_index, **CPU)
    found = check("linear_cross_entropy", inputs, {"reduction": "none", "ignore_index": ignore_index}, 4)
    ignored = inputs["target"] == ignore_index
    assert ignored.any() and not found["out0"][ignored].any() and not found["d_x"][ignored].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("loss", ("cross_entropy", "forward_kl", "reverse_kl"))
@pytest.mark.parametrize("ranks", (2, 4))
def test_distillation(ranks: int, loss: str, dtype: torch.dtype) -> None:
    inputs = distillation_inputs(ROWS, 67, 24, 25, dtype=dtype, mask=True, **CPU)
    options = {"loss": loss, "temperature": 2.0, "reduction": "none", "teacher_grad": True}
    check("linear_distillation", inputs, options, ranks)


@pytest.mark.parametrize("reduction", ("none", "mean"))
@pytest.mark.parametrize("mask", (False, True), ids=("all", "masked"))
def test_distillation_of_own_rows(reduction: str, mask: bool) -> None:
    inputs = distillation_inputs(ROWS, 67, 24, 25, dtype=torch.float32, mask=mask, **CPU)
    options = {"reduction": reduction, "teacher_grad": True}
    check("linear_distillation", inputs, options, 3, own_rows=True)


@pytest.mark.parametrize("padding", (None, 30))
@pytest.mark.parametrize("classes", (2, 7))
def test_distillation_with_empty_and_padded_shards(classes: int, padding: int | None) -> None:
    inputs = distillation_inputs(40, classes, dtype=torch.float32, **CPU)
    check("linear_distillation", inputs, {"reduction": "none", "teacher_grad": True}, 4, padding=padding)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("options", ({}, {"softcap": 3.0, "temperature": 0.7}), ids=("plain", "everything"))
@pytest.mark.parametrize("own_rows", (False, True), ids=("replicated", "sequence_parallel"))
def test_log_probs(own_rows: bool, options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = cross_entropy_inputs(ROWS, 67, 24, dtype=dtype, bias=bool(options), **CPU)
    check("linear_log_probs", inputs, {"entropy": True, **options}, 3, own_rows=own_rows)
    each = {"entropy": True, "temperature": 0.5 + torch.rand(ROWS)}
    check("linear_log_probs", inputs, each, 2, own_rows=own_rows)


@pytest.mark.parametrize("classes, padding", ((3, None), (5, 9), (67, 30)))
def test_log_probs_of_empty_and_padded_shards(classes: int, padding: int | None) -> None:
    """With a temperature of each token, and ignored ones."""
    inputs = cross_entropy_inputs(40, classes, 8, dtype=torch.float32, ignored=0.4, **CPU)
    options = {"entropy": True, "temperature": 0.5 + torch.rand(40)}
    found = check("linear_log_probs", inputs, options, 4, padding=padding)
    ignored = inputs["target"] == -100
    assert ignored.any() and not any(found[name][ignored].any() for name in ("out0", "out1", "out2", "d_x"))


def _log_probs_with_top1(group: Any, inputs: Any) -> None:
    with pytest.raises(ValueError, match="top1: expected False where classes are split"):
        mr.linear_log_probs(**inputs, top1=True, ranks=group)


def test_top1_over_ranks_is_refused() -> None:
    on_ranks(2, _log_probs_with_top1, cross_entropy_inputs(9, 30, 8, dtype=torch.float32, **CPU))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("own_rows", (False, True), ids=("replicated", "sequence_parallel"))
def test_logsumexp(own_rows: bool, dtype: torch.dtype) -> None:
    inputs = logsumexp_inputs(ROWS, 67, 24, dtype=dtype, **CPU)
    check("logsumexp_matmul", inputs, {"scale": 0.5}, 4, own_rows=own_rows, padding=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("own_rows", (False, True), ids=("replicated", "sequence_parallel"))
def test_mlp(own_rows: bool, ranks: int, dtype: torch.dtype) -> None:
    inputs = mlp_inputs(ROWS, 24, 67, 25, dtype=dtype, bias1=True, bias2=True, **CPU)
    check("mlp", inputs, {"activation": "gelu"}, ranks, own_rows=own_rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("ranks, own_rows", ((2, False), (3, True)), ids=("replicated", "sequence_parallel"))
def test_gated_mlp(ranks: int, own_rows: bool, dtype: torch.dtype) -> None:
    given = {"bias1": True, "bias2": True, "gate": True, "gate_bias": True}
    inputs = mlp_inputs(ROWS, 24, 67, 25, dtype=dtype, **given, **CPU)
    check("mlp", inputs, {"activation": "silu"}, ranks, own_rows=own_rows)


def _mlp(group: Any, inputs: Any) -> torch.Tensor:
    return mr.mlp(**inputs, activation="relu", ranks=group)


def test_partial_results_of_an_mlp_are_rounded_once() -> None:
    whole = mlp_inputs(ROWS, 24, 68, 25, dtype=torch.bfloat16, bias2=True, **CPU)
    split = OverRanks("mlp", 4)
    parts = {name: split.parts(name, t) for name, t in whole.items()}
    inputs = [{name: t[rank] for name, t in parts.items()} for rank in range(4)]
    total = torch.zeros(())
    for rank, of_rank in enumerate(inputs):
        bias2 = of_rank["bias2"] if rank == 0 else None
        tensors = (of_rank["x"], of_rank["w1"], of_rank["w2"], None, bias2)
        total = total + torch.ops.monoidreduce.mlp(*tensors, "relu", True, None)
    assert total.dtype == torch.float32
    assert torch.equal(same_bits(on_ranks(4, _mlp, Each(inputs))), total.bfloat16())


@pytest.mark.parametrize("operator", ("linear_cross_entropy", "mlp"))
def test_partial_gradients_in_16_bits(operator: str) -> None:
    make: Any = {"linear_cross_entropy": cross_entropy_inputs, "mlp": mlp_inputs}[operator]
    inputs = make(ROWS, dtype=torch.bfloat16, **CPU)
    check(operator, inputs, {}, 4, grad_dtype=torch.bfloat16)


def test_more_than_one_axis_of_rows() -> None:
    inputs = cross_entropy_inputs((4, 96), 67, 24, dtype=torch.float32, **CPU)
    found = check("linear_cross_entropy", inputs, PER_TOKEN, 2)
    assert found["out0"].shape == (4, 96)


def _without_and_with_group(group: Any, operator: str, inputs: Any, options: Any) -> list[list[torch.Tensor]]:
    found = []
    for given in ({}, {"ranks": group}):
        leaves = {k: t.clone().requires_grad_(t.is_floating_point()) for k, t in inputs.items()}
        results = as_outputs(getattr(mr, operator)(**leaves, **options, **given))
        sum(result.sum() for result in results).backward()
        found.append([*results, *(t.grad for t in leaves.values() if t.grad is not None)])
    return [[t.detach() for t in tensors] for tensors in found]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "specimen",
    [s for s in ONE_EACH if "ranks" in inspect.signature(getattr(mr, s.operator)).parameters],
    ids=lambda specimen: specimen.operator,
)
def test_one_rank_has_the_bits_of_no_group(specimen: Any, dtype: torch.dtype) -> None:
    call = (specimen.operator, specimen.inputs(dtype, **CPU), specimen.options)
    ((alone, found),) = on_ranks(1, _without_and_with_group, *call)
    assert len(alone) > 1 and all(map(torch.equal, alone, found))


def _flops(group: Any, operator: str, inputs: Any) -> list[int]:
    """Those that torch counts of a call and of its backward pass."""
    leaves = {k: t.clone().requires_grad_(t.is_floating_point()) for k, t in inputs.items()}
    options = {} if group is None else {"ranks": group}
    with FlopCounterMode(display=False) as forward:
        result = getattr(mr, operator)(**leaves, **options)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    return [forward.get_total_flops(), backward.get_total_flops()]


@pytest.mark.parametrize("operator", ("attention", "attention_varlen", "linear_cross_entropy", "mlp"))
def test_each_of_two_ranks_has_half_of_the_flops(operator: str) -> None:
    attention: dict[str, Any] = {"attention": AttentionOverRanks, "attention_varlen": VarlenOverRanks}
    split = attention[operator](2, "contiguous") if operator in attention else OverRanks(operator, 2)
    inputs = {
        "attention": lambda of: attention_inputs(m=16, n=16, **of),
        "attention_varlen": lambda of: varlen_inputs((9, 5), None, **of),
        "linear_cross_entropy": lambda of: cross_entropy_inputs(16, 30, **of),
        "mlp": lambda of: mlp_inputs(16, 8, 30, **of),
    }[operator](CPU | {"dtype": torch.float32})
    parts = {name: split.parts(name, t) for name, t in inputs.items()}
    found = on_ranks(2, _flops, operator, Each([{k: t[rank] for k, t in parts.items()} for rank in (0, 1)]))
    assert all([2 * n for n in of_rank] == _flops(None, operator, inputs) for of_rank in found)


def test_nothing_is_kept_while_a_mode_looks_on() -> None:
    """What keeps local gradients over ranks is no op, so a counter of flops would not see it."""
    on_gpu: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert operators._may_keep(on_gpu)
    with FlopCounterMode(display=False):
        assert not operators._may_keep(on_gpu)


def _compiled(group: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    def loss(**tensors: Any) -> Any:
        return mr.linear_cross_entropy(**tensors, ranks=group) * 2

    return loss(**inputs), torch.compile(loss, backend="eager")(**inputs)


@mr.statistics
def _total(score: Any) -> dict[str, Any]:
    return {"total": mr.stat.total(score)}


def _slices(a: torch.Tensor, b: torch.Tensor) -> Any:
    return mr.monoids.LogSumExp.State((a @ b.mT).logsumexp(1))


def _why_not_whole(group: Any, operator: str) -> list[str]:
    a, b, q = torch.randn(4, 8), torch.randn(6, 8), torch.randn(1, 2, 4, 8)
    call = {
        "logsumexp_matmul": partial(mr.logsumexp_matmul, a, b),
        "attention": partial(mr.attention, q, q, q),
        "statistics": partial(_total, a, b),
        "map_reduce": partial(mr.map_reduce, mr.monoids.LogSumExp(), _slices, a, b),
    }[operator]
    found = []
    for ranks in (group, mr.Ranks(group)):
        with pytest.raises(torch._dynamo.exc.Unsupported) as error:
            torch.compile(partial(call, ranks=ranks), backend="eager", fullgraph=True)()
        found.append(str(error.value))
    return found


@pytest.mark.parametrize("operator", ("logsumexp_matmul", "attention", "statistics", "map_reduce"))
def test_fullgraph_says_why_not(operator: str) -> None:
    for found in on_ranks(2, _why_not_whole, operator):
        assert all("a call over ranks breaks the graph" in why for why in found)


@pytest.mark.release
def test_under_torch_compile() -> None:
    """Which breaks the graph at the call."""
    inputs = cross_entropy_inputs(40, 30, 8, dtype=torch.float32, **CPU)
    for eager, compiled in on_ranks(2, _compiled, inputs):
        assert torch.equal(eager, compiled)
