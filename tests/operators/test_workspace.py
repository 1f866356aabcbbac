"""The workspace limit: who sets it for whom; the backward gets what held when the operator was called."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from specimens import SPECIMENS, Specimen, name_of
from torch.utils._python_dispatch import TorchDispatchMode

import monoidreduce as mr

DEFAULT = 352 << 20
WITH_WORKSPACE = [
    s for s in SPECIMENS if s.operator in ("linear_cross_entropy", "linear_distillation", "linear_log_probs")
]
WITHOUT_KEYWORD = [s for s in SPECIMENS if s.operator in ("mlp", "logsumexp_matmul")]


class Workspaces(TorchDispatchMode):
    """The workspace that each backward op is given: its last argument but one."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "monoidreduce" and "backward" in str(func):
            self.given.append(args[-2])
        return func(*args, **(kwargs or {}))


def test_scopes() -> None:
    assert mr.get_workspace() == DEFAULT
    with mr.workspace(10):
        assert mr.get_workspace() == 10
        with mr.workspace(0):
            assert mr.get_workspace() == 0
        assert mr.get_workspace() == 10
        with pytest.raises(RuntimeError, match="inside"), mr.workspace(5):
            raise RuntimeError("inside")
        assert mr.get_workspace() == 10
    assert mr.get_workspace() == DEFAULT


def test_a_scope_decorates_a_function() -> None:
    @mr.workspace(10)
    def limits(depth: int) -> list[int]:
        return [mr.get_workspace(), *(limits(depth - 1) if depth else [])]

    assert limits(2) == [10] * 3
    assert mr.get_workspace() == DEFAULT


def test_process_wide_limit() -> None:
    mr.set_workspace(77)
    try:
        with ThreadPoolExecutor(1) as pool:
            assert mr.get_workspace() == pool.submit(mr.get_workspace).result() == 77
        with mr.workspace(10):
            mr.set_workspace(78)
            assert mr.get_workspace() == 10
        assert mr.get_workspace() == 78
    finally:
        mr.set_workspace(DEFAULT)


def test_a_scope_is_that_of_its_thread_and_task() -> None:
    async def task(limit: int) -> list[int]:
        seen = []
        with mr.workspace(limit):
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(mr.get_workspace())
        return seen

    async def tasks() -> list[list[int]]:
        return await asyncio.gather(task(1), task(2))

    assert asyncio.run(tasks()) == [[1] * 3, [2] * 3]
    with mr.workspace(10), ThreadPoolExecutor(1) as pool:
        assert pool.submit(mr.get_workspace).result() == DEFAULT


@pytest.mark.parametrize("specimen", WITH_WORKSPACE, ids=name_of)
def test_the_backward_gets_the_limit_of_the_call(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    inputs["x"].requires_grad_()
    operator = getattr(mr, specimen.operator)

    def loss(**options: Any) -> torch.Tensor:
        result = operator(**inputs, **specimen.options, **options)
        return (result[0] if isinstance(result, tuple) else result).sum()

    with mr.workspace(4096):
        scoped, given = loss(), loss(workspace=0)
    default = loss()
    with Workspaces() as workspaces, mr.workspace(1):
        for value in (scoped, given, default):
            value.backward()
    assert workspaces.given == [4096, 0, DEFAULT]


@pytest.mark.parametrize("specimen", WITHOUT_KEYWORD, ids=name_of)
def test_without_the_keyword_the_limit_is_that_of_the_call(specimen: Specimen, device: torch.device) -> None:
    inputs = {name: t.requires_grad_() for name, t in specimen.inputs(torch.float32, device).items()}
    with mr.workspace(4096):
        result = getattr(mr, specimen.operator)(**inputs, **specimen.options)
    with Workspaces() as workspaces:
        result.sum().backward()
    assert workspaces.given == [4096]


@pytest.mark.parametrize("limit", [0, 1, 4 << 10, 1 << 30])
@pytest.mark.parametrize("specimen", WITH_WORKSPACE, ids=name_of)
def test_less_is_never_wrong(specimen: Specimen, limit: int, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float64, device)
    leaves = {n: t.requires_grad_() for n, t in inputs.items() if t.is_floating_point()}
    operator = getattr(mr, specimen.operator)

    def gradients(**options: Any) -> tuple[torch.Tensor, ...]:
        result = operator(**inputs, **specimen.options, **options)
        outputs = result if isinstance(result, tuple) else (result,)
        return torch.autograd.grad(sum(output.sin().sum() for output in outputs), list(leaves.values()))

    for ours, expected in zip(gradients(workspace=limit), gradients(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
