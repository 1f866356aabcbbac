"""torch.library.opcheck on every op, forward and backward: schema, autograd, shapes and strides, AOT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specimens import DTYPES, LAYOUTS, ONE_EACH, SPECIMENS, Specimen, name_of
from tolerance import as_outputs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import monoidreduce as mr

WITH_OPS = [specimen for specimen in SPECIMENS if specimen.operator != "merge_attention"]
ONE_EACH_WITH_OPS = [specimen for specimen in ONE_EACH if specimen.operator != "merge_attention"]

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Recorder(TorchDispatchMode):
    """The calls of the library's own ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "monoidreduce":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def recorded(specimen: Specimen, dtype: torch.dtype, device: torch.device, layout: str | None) -> list[Call]:
    """What a call of the operator and its backward pass ask of the forward op and of the backward op."""
    place = LAYOUTS[layout] if layout else lambda t: t
    inputs = {name: place(t) for name, t in specimen.inputs(dtype, device).items()}
    inputs = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
    with Recorder() as recorder:
        outputs = getattr(mr, specimen.operator)(**inputs, **specimen.options)
        outputs = as_outputs(outputs)
        upstream = [torch.randn_like(output.mT if output.dim() > 1 else output) for output in outputs]
        upstream = [g.mT if g.dim() > 1 else g for g in upstream]
        torch.autograd.backward(outputs, upstream)
    assert len(recorder.calls) == 2
    return recorder.calls


def detached(args: tuple[Any, ...], requires_grad: bool) -> Any:
    def leaf(t: Tensor) -> Tensor:
        return t.detach().requires_grad_(requires_grad and t.is_floating_point())

    return tree_map_only(Tensor, leaf, args)


def check(calls: list[Call]) -> None:
    """AOT traces the forward op with its backward op, so the latter is not traced once more by itself."""
    (forward, forward_args), (backward, backward_args) = calls
    torch.library.opcheck(forward, detached(forward_args, requires_grad=True))
    alone = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(backward, detached(backward_args, requires_grad=False), test_utils=alone)


@pytest.mark.oldest
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_every_specimen_and_dtype(specimen: Specimen, dtype: torch.dtype, device: torch.device) -> None:
    check(recorded(specimen, dtype, device, None))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("specimen", ONE_EACH_WITH_OPS, ids=name_of)
def test_every_layout(specimen: Specimen, layout: str, device: torch.device) -> None:
    check(recorded(specimen, torch.float32, device, layout))


@pytest.mark.parametrize("specimen", ONE_EACH_WITH_OPS, ids=name_of)
def test_results_are_contiguous_whatever_the_inputs_strides(specimen: Specimen, device: torch.device) -> None:
    for layout in LAYOUTS:
        for op, args in recorded(specimen, torch.float32, device, layout):
            results = op(*detached(args, requires_grad=False))
            for result in results if isinstance(results, tuple | list) else [results]:
                assert result.is_contiguous()
