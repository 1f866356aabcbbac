"""Gradients of a loss's weight in float32: `weight_grad`, `main_grad`, and float32 masters under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specimens import Inputs, cross_entropy_inputs, distillation_inputs, name_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from weight_sums import OPERATORS, ROUTES, called, check_equal, check_sums, summed

import monoidreduce as mr
from monoidreduce.integrations import megatron


def inputs_of(operator: str, dtype: torch.dtype, device: torch.device, width: int = 40) -> Inputs:
    if operator == "linear_distillation":
        return distillation_inputs(400, 67, width, 24, dtype=dtype, device=device)
    return cross_entropy_inputs(400, 67, width, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("width", (40, 41))
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_accuracy(operator: str, route: str, width: int, dtype: torch.dtype, device: torch.device) -> None:
    check_sums(operator, route, lambda: inputs_of(operator, dtype, device, width))


@pytest.mark.parametrize("operator", OPERATORS)
def test_adds_to_what_is_there(operator: str, device: torch.device) -> None:
    """Two forward passes, then their backward passes, as of micro-batches in a pipeline."""
    inputs = inputs_of(operator, torch.bfloat16, device)
    each = summed(operator, "weight_grad", inputs)
    before = torch.randn_like(each)
    sums = before.clone()
    x, weight = (inputs[name].clone().requires_grad_() for name in ("x", "weight"))
    given = inputs | {"x": x, "weight": weight}
    losses = [called(operator, given, weight_grad=sums) for _ in range(2)]
    assert torch.equal(sums, before)  # a forward pass adds nothing
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(sums, before + 2 * each, rtol=1e-5, atol=1e-5)
    plain = inputs | {"x": inputs["x"].clone().requires_grad_(), "weight": inputs["weight"].clone()}
    (2 * called(operator, plain)).backward()
    assert x.grad is not None and plain["x"].grad is not None
    torch.testing.assert_close(x.grad, plain["x"].grad, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("factor", (0.25, 3.0, 65536.0))
@pytest.mark.parametrize("route", ROUTES)
def test_upstream_gradients(route: str, factor: float, device: torch.device) -> None:
    """As of gradient accumulation, and of a loss that is scaled."""
    inputs = inputs_of("linear_cross_entropy", torch.bfloat16, device)
    once = summed("linear_cross_entropy", route, inputs)
    weight = inputs["weight"].clone().requires_grad_()
    sums = torch.zeros_like(once)
    loss = called("linear_cross_entropy", inputs | {"weight": weight}, weight_grad=sums)
    (factor * loss).backward()
    torch.testing.assert_close(sums / factor, once, rtol=1e-2, atol=4e-2)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=name_of)
@pytest.mark.parametrize("operator", OPERATORS)
def test_wide_inputs(operator: str, dtype: torch.dtype, device: torch.device) -> None:
    inputs = inputs_of(operator, dtype, device)
    weight = inputs["weight"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(called(operator, inputs | {"weight": weight}), weight)
    sums = torch.ones_like(expected)
    called(operator, inputs | {"weight": weight}, weight_grad=sums).backward()
    assert weight.grad is None
    torch.testing.assert_close(sums, expected + 1)


@pytest.mark.parametrize("reduction", ("none", "mean"))
def test_options(reduction: str, device: torch.device) -> None:
    """What takes other kernels: biases, a softcap, class weights, log-sum-exps with a gradient."""
    inputs = cross_entropy_inputs(400, 67, 40, dtype=torch.bfloat16, device=device, bias=True)
    class_weight = torch.rand(67, device=device).bfloat16()
    options = {"softcap": 5.0, "class_weight": class_weight, "label_smoothing": 0.1, "return_lse": True}

    def step(**more: Any) -> dict[str, Tensor | None]:
        leaves = {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
        loss, lse = mr.linear_cross_entropy(**leaves, reduction=reduction, **options, **more)
        (loss.sum() + lse.sum()).backward()
        return {name: leaves[name].grad for name in ("x", "weight", "bias")}

    expected, sums = step(), torch.zeros(67, 40, device=device)
    found = step(weight_grad=sums)
    assert found["weight"] is None
    for name in ("x", "bias"):
        torch.testing.assert_close(found[name], expected[name])
    torch.testing.assert_close(sums.bfloat16(), expected["weight"])


def test_frozen_rows(device: torch.device) -> None:
    inputs = inputs_of("linear_cross_entropy", torch.bfloat16, device)
    weight, sums = inputs["weight"].clone().requires_grad_(), torch.zeros(67, 40, device=device)
    called("linear_cross_entropy", inputs | {"weight": weight}, weight_grad=sums).backward()
    check_equal(sums, summed("linear_cross_entropy", "master", inputs))


def test_nothing_is_added_without_gradients(device: torch.device) -> None:
    inputs = inputs_of("linear_cross_entropy", torch.bfloat16, device)
    weight, sums = inputs["weight"].clone().requires_grad_(), torch.zeros(67, 40, device=device)
    with torch.no_grad():
        loss = called("linear_cross_entropy", inputs | {"weight": weight}, weight_grad=sums)
    assert not loss.requires_grad and not sums.any()


def test_checkpointed(device: torch.device) -> None:
    """The forward pass runs twice, and the gradient is added once."""
    inputs = inputs_of("linear_cross_entropy", torch.bfloat16, device)
    x, weight = (inputs[name].clone().requires_grad_() for name in ("x", "weight"))
    sums = torch.zeros(67, 40, device=device)
    given = inputs | {"weight": weight}

    def step(x: Tensor) -> Tensor:
        return called("linear_cross_entropy", given | {"x": x}, weight_grad=sums)

    for reentrant in (False, True):
        sums.zero_()
        checkpoint(step, x, use_reentrant=reentrant).backward()
        once = summed("linear_cross_entropy", "master", inputs)
        check_equal(sums, once)


def test_same_bits_in_deterministic_mode(device: torch.device) -> None:
    inputs = inputs_of("linear_cross_entropy", torch.bfloat16, device)
    torch.use_deterministic_algorithms(True)
    try:
        for route in ROUTES:
            first, second = (summed("linear_cross_entropy", route, inputs) for _ in range(2))
            assert torch.equal(first, second)
    finally:
        torch.use_deterministic_algorithms(False)


def test_of_a_module(device: torch.device) -> None:
    inputs = inputs_of("linear_cross_entropy", torch.bfloat16, device)
    weight, sums = inputs["weight"].clone().requires_grad_(), torch.zeros(67, 40, device=device)
    mr.nn.LinearCrossEntropyLoss(reduction="sum")(
        inputs["x"], weight, inputs["target"], weight_grad=sums
    ).backward()
    check_equal(sums, summed("linear_cross_entropy", "master", inputs))


@pytest.mark.parametrize("operator", OPERATORS)
def test_beside_a_mode_that_sees_ops(operator: str, device: torch.device) -> None:
    """Then ops are called in place of their implementations, and return what is added."""
    inputs = inputs_of(operator, torch.bfloat16, device, width=41)
    weight, sums = inputs["weight"].clone().requires_grad_(), torch.zeros(67, 41, device=device)
    with FlopCounterMode(display=False) as counter:
        called(operator, inputs | {"weight": weight}, weight_grad=sums).backward()
    assert counter.get_total_flops() > 0 and weight.grad is None
    check_equal(sums, summed(operator, "master", inputs))


# main_grad


def parameter_of(inputs: Inputs) -> Any:
    """As Megatron's DistributedDataParallel leaves its parameters."""
    parameter: Any = torch.nn.Parameter(inputs["weight"].clone())
    parameter.main_grad = torch.zeros(parameter.shape, device=parameter.device)
    parameter.grad_added_to_main_grad = False
    return parameter


@pytest.mark.parametrize("zeroed", (False, True))
def test_megatron(zeroed: bool, device: torch.device) -> None:
    """Its hook runs for each backward pass, adds nothing itself, and drops the gradient that autograd got."""
    inputs = inputs_of("linear_cross_entropy", torch.bfloat16, device)
    parameter, ran = parameter_of(inputs), []
    parameter.zero_out_wgrad = zeroed

    def hook(p: Any) -> None:
        assert p.grad is not None and p.grad.shape == p.shape and p.grad_added_to_main_grad
        assert not zeroed or not p.grad.any()
        p.grad = None
        ran.append(p)

    parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        megatron.linear_cross_entropy(inputs["x"], parameter, inputs["target"], reduction="sum").backward()
    once = summed("linear_cross_entropy", "master", inputs)
    assert len(ran) == 2 and parameter.grad is None
    check_equal(parameter.main_grad, 2 * once)


def test_main_grad_that_does_not_fit_is_left_alone(device: torch.device) -> None:
    inputs = inputs_of("linear_cross_entropy", torch.bfloat16, device)
    for other in (
        torch.zeros(67, 40, device=device).bfloat16(),
        torch.zeros(67 * 40, device=device),
        torch.zeros(40, 67, device=device).T,
        None,
    ):
        parameter = parameter_of(inputs)
        parameter.main_grad = other
        called("linear_cross_entropy", inputs | {"weight": parameter}).backward()
        assert parameter.grad is not None and (other is None or not other.any())
        assert not parameter.grad_added_to_main_grad


def test_weight_grad_comes_before_main_grad(device: torch.device) -> None:
    inputs = inputs_of("linear_cross_entropy", torch.bfloat16, device)
    parameter, sums = parameter_of(inputs), torch.zeros(67, 40, device=device)
    called("linear_cross_entropy", inputs | {"weight": parameter}, weight_grad=sums).backward()
    assert sums.any() and not parameter.main_grad.any()


# Errors


def test_wrong_arguments(device: torch.device) -> None:
    inputs = inputs_of("linear_cross_entropy", torch.bfloat16, device)
    weight = inputs["weight"].requires_grad_()
    right = torch.zeros(67, 40, device=device)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (right.bfloat16(), TypeError, r"weight_grad: expected torch\.float32 as weight is torch\.bfloat16"),
        (right.double(), TypeError, r"weight_grad: expected torch\.float32"),
        ([0.0], TypeError, "weight_grad: expected a tensor"),
        (right[:-1], ValueError, r"weight_grad: expected shape \[67, 40\] as weight, got \[66, 40\]"),
        (right.to("meta"), ValueError, "weight_grad: expected a tensor on"),
        (torch.zeros(40, 67, device=device).T, ValueError, "weight_grad: expected a contiguous tensor"),
        (right.clone().requires_grad_(), ValueError, "weight_grad: expected a tensor that requires no"),
    ]
    for given, error, message in wrong:
        for operator in OPERATORS[:2]:
            with pytest.raises(error, match=message):
                called(operator, inputs, weight_grad=given)
    frozen = inputs | {"weight": weight.detach()}
    with pytest.raises(ValueError, match="weight_grad: expected None where weight requires no gradient"):
        called("linear_cross_entropy", frozen, weight_grad=right)


def test_folds_of_users_functions_take_none(device: torch.device) -> None:
    inputs = inputs_of("linear_distillation", torch.bfloat16, device)
    inputs["weight"].requires_grad_()
    with pytest.raises(ValueError, match="weight_grad: expected None beside bias"):
        called("linear_distillation", inputs, loss="jsd", weight_grad=torch.zeros(67, 40, device=device))


@pytest.mark.parametrize("route", ("weight_grad", "main_grad"))
def test_a_sum_has_no_derivative(route: str, device: torch.device) -> None:
    inputs = inputs_of("linear_cross_entropy", torch.float32, device)
    x, parameter = inputs["x"].requires_grad_(), parameter_of(inputs)
    options = {"weight_grad": parameter.main_grad} if route == "weight_grad" else {}
    loss = called("linear_cross_entropy", inputs | {"weight": parameter}, **options)
    with pytest.raises(RuntimeError, match=r"weight_grad \(or main_grad\) has no derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_transforms_are_refused(device: torch.device) -> None:
    inputs = inputs_of("linear_cross_entropy", torch.float32, device)
    weight, sums = inputs["weight"].requires_grad_(), torch.zeros(67, 40, device=device)

    def loss(x: Tensor) -> Tensor:
        return called("linear_cross_entropy", inputs | {"x": x, "weight": weight}, weight_grad=sums)

    with pytest.raises(ValueError, match="weight_grad: expected None inside of transforms"):
        torch.func.grad(loss)(inputs["x"])
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(loss, (inputs["x"],), (inputs["x"],))


# Compilers


def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    found: Callable[..., Any] = torch.compile(function, backend="aot_eager", **how)
    return found


@pytest.mark.parametrize("operator", OPERATORS)
def test_masters_are_traced(operator: str, device: torch.device) -> None:
    inputs = inputs_of(operator, torch.bfloat16, device)
    expected = summed(operator, "master", inputs)
    master = inputs["weight"].float().requires_grad_()

    def step(x: Tensor, master: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return called(operator, inputs | {"x": x, "weight": master})

    compiled(step, fullgraph=True)(inputs["x"].clone().requires_grad_(), master).backward()
    check_equal(master.grad, expected)


def test_compiled_around_weight_grad(device: torch.device) -> None:
    """The call runs outside of the graph; with fullgraph the compiler says why it cannot."""
    inputs = inputs_of("linear_cross_entropy", torch.bfloat16, device)
    weight, sums = inputs["weight"].clone().requires_grad_(), torch.zeros(67, 40, device=device)

    def step(x: Tensor, weight: Tensor, sums: Tensor) -> Tensor:
        return 2 * called("linear_cross_entropy", inputs | {"x": x, "weight": weight}, weight_grad=sums)

    compiled(step)(inputs["x"].clone(), weight, sums).backward()
    once = summed("linear_cross_entropy", "master", inputs)
    check_equal(sums, 2 * once)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(step, fullgraph=True)(inputs["x"].clone(), weight, sums)
