"""Gradients of weights in float32 with classes split over ranks, and under FSDP2 with float32 masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Each, on_ranks, same_bits, split
from specimens import cross_entropy_inputs, distillation_inputs
from torch import Tensor

import monoidreduce as mr

CPU: Any = {"device": torch.device("cpu")}
CLASSES, WIDTH = 67, 24


def _loss(operator: str, group: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    options["ranks"] = mr.Ranks(group, classes=CLASSES)
    if operator == "linear_log_probs":
        return -mr.linear_log_probs(**inputs, **options).log_probs.sum()
    loss: Tensor = getattr(mr, operator)(**inputs, reduction="sum", **options)
    return loss


def _of_rank(
    group: Any, operator: str, route: str, inputs: dict[str, Tensor], shards: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of this rank's weight, the latter added twice to ones."""
    given = inputs | shards
    x, weight = given["x"].requires_grad_(), given["weight"]
    if route == "master":
        weight = weight.float()
    parameter: Any = torch.nn.Parameter(weight)
    sums = torch.ones(weight.shape)
    given["weight"] = parameter
    options = {"weight_grad": sums} if route == "weight_grad" else {}
    if route == "main_grad":
        parameter.main_grad, parameter.grad_added_to_main_grad = sums, False
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=route == "master"):
            loss = _loss(operator, group, given, **options)
        loss.backward()
    assert x.grad is not None
    if route == "master":
        sums += parameter.grad
    elif route == "main_grad":
        assert parameter.grad_added_to_main_grad and parameter.grad.dtype == torch.bfloat16
    else:
        assert parameter.grad is None
    return x.grad, sums


@pytest.mark.parametrize("padding", (None, 9))
@pytest.mark.parametrize("route", ("weight_grad", "main_grad", "master"))
@pytest.mark.parametrize("operator", ("linear_cross_entropy", "linear_log_probs", "linear_distillation"))
def test_sums_over_ranks(operator: str, route: str, padding: int | None) -> None:
    """Each rank adds the gradient of its own classes, and nothing to rows of padding."""
    if operator == "linear_distillation":
        inputs = distillation_inputs(300, CLASSES, WIDTH, 16, dtype=torch.bfloat16, **CPU)
    else:
        inputs = cross_entropy_inputs(300, CLASSES, WIDTH, dtype=torch.bfloat16, **CPU)
    master = inputs["weight"].float().requires_grad_()
    x = inputs["x"].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = 0.0
        for _ in range(2):
            whole = inputs | {"x": x, "weight": master}
            if operator == "linear_log_probs":
                loss = loss - mr.linear_log_probs(**whole).log_probs.sum()
            else:
                loss = loss + getattr(mr, operator)(**whole, reduction="sum")
    loss.backward()  # type: ignore[attr-defined]
    shards = [{} for _ in range(3)]  # type: ignore[var-annotated]
    for name in ("weight", "teacher_weight"):
        if name in inputs:
            for rank, part in enumerate(split(inputs[name], 0, 3, padding)):
                shards[rank][name] = part.clone()
    found = on_ranks(3, _of_rank, operator, route, inputs, Each(shards))
    of_x, of_weight = (list(parts) for parts in zip(*found, strict=True))
    assert x.grad is not None and master.grad is not None
    torch.testing.assert_close(same_bits(of_x), x.grad, rtol=2e-2, atol=2e-2)
    sums = torch.cat(of_weight)
    torch.testing.assert_close(sums[:CLASSES], 1 + master.grad, rtol=1e-2, atol=1e-2)
    assert (sums[CLASSES:] == 1).all()
    assert not torch.equal(sums, sums.bfloat16().float())


def _refused_by(group: Any, inputs: dict[str, Tensor], dtype: torch.dtype) -> str:
    inputs["weight"].requires_grad_()
    sums = torch.zeros(inputs["weight"].shape, dtype=dtype)
    with pytest.raises((TypeError, RuntimeError)) as raised:
        _loss("linear_cross_entropy", group, inputs, weight_grad=sums)
    return str(raised.value)


def test_an_error_of_one_rank_is_raised_by_all() -> None:
    inputs = cross_entropy_inputs(30, CLASSES, WIDTH, dtype=torch.bfloat16, **CPU)
    shards = Each([inputs | {"weight": part.clone()} for part in split(inputs["weight"], 0, 2)])
    messages = on_ranks(2, _refused_by, shards, Each([torch.float32, torch.bfloat16]))
    assert all("weight_grad" in message for message in messages)


def _with_dtensors(group: Any, inputs: dict[str, Tensor]) -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh, messages = DeviceMesh.from_group(group, "cpu"), []
    placed = {name: distribute_tensor(t, mesh, [Replicate()]) for name, t in inputs.items()}
    for function in (mr.linear_cross_entropy, mr.linear_log_probs):
        with pytest.raises(TypeError) as raised:
            function(**placed, weight_grad=torch.zeros(inputs["weight"].shape))
        messages.append(str(raised.value))
    return messages


def test_dtensors_are_refused() -> None:
    inputs = cross_entropy_inputs(30, CLASSES, WIDTH, dtype=torch.float32, **CPU)
    for messages in on_ranks(2, _with_dtensors, inputs):
        assert all("weight_grad: expected None, where weight is a DTensor" in message for message in messages)


def _under_fsdp(group: Any, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """FSDP takes the mean over ranks, in float32."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    head: Any = mr.nn.LinearCrossEntropyHead(WIDTH, CLASSES, reduction="sum")
    head.weight.data.copy_(weight)
    fully_shard(head, mesh=DeviceMesh.from_group(group, "cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(x, target)
    loss.backward()
    return loss.detach(), head.weight.grad.full_tensor()


def test_float32_masters_under_fsdp2() -> None:
    """The gradient that FSDP reduces is the float32 sum."""
    inputs = cross_entropy_inputs(600, CLASSES, WIDTH, dtype=torch.bfloat16, ignored=0.0, **CPU)
    masters = inputs["weight"].float()
    rows, targets = ([t.clone() for t in inputs[name].chunk(2)] for name in ("x", "target"))
    found = on_ranks(2, _under_fsdp, Each(rows), masters, Each(targets))
    gradient = 2 * same_bits([of_weight for _, of_weight in found])
    wide, exact = inputs["x"].double(), masters.double().requires_grad_()
    torch.nn.functional.cross_entropy(wide @ exact.T, inputs["target"], reduction="sum").backward()
    assert exact.grad is not None
    master = masters.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        mr.linear_cross_entropy(inputs["x"], master, inputs["target"], reduction="sum").backward()
    assert master.grad is not None
    torch.testing.assert_close(gradient, master.grad, rtol=1e-5, atol=1e-4)
    rounded = master.grad.bfloat16().double()
    assert (gradient - exact.grad).norm() < 0.75 * (rounded - exact.grad).norm()
