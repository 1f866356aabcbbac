"""Checks that read class indices: they raise under modes that look on, and read nothing that is traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import monoidreduce as mr
from monoidreduce import _torch_private

X, TARGETS = torch.zeros(3, 4), torch.tensor([[0, 1], [7, 1], [2, 3]])
# Calls with a class of 7, where there are 5; and their result where nothing may read it.
WRONG: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "pack_classes": (lambda of_row: mr.pack_classes(of_row, 5), [[3], [2], [12]]),
    "soft targets": (
        lambda target: mr.linear_cross_entropy(
            X, X.new_zeros(5, 4), target, target_probs=X.new_ones(3, 2), reduction="none"
        ).isnan(),
        [False, True, False],
    ),
    "hard targets": (
        lambda target: mr.linear_distillation(
            X, X.new_zeros(5, 4), X, X.new_zeros(5, 4), target=target[:, 0], hard_weight=0.5, reduction="none"
        ).isnan(),
        [False, True, False],
    ),
}


class Names(TorchDispatchMode):
    """Notes the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.mark.oldest
@pytest.mark.parametrize("mode", [partial(FlopCounterMode, display=False), Names])
@pytest.mark.parametrize("name", WRONG)
def test_a_class_that_is_none_is_an_error_under_modes_that_look_on(name: str, mode: Any) -> None:
    call, _ = WRONG[name]
    with mode(), pytest.raises(IndexError, match=r"expected (a class|classes) in \[0, 5\) or .*, got 7"):
        call(TARGETS)


@pytest.mark.oldest
@pytest.mark.parametrize("before_autograd", (False, True))
@pytest.mark.parametrize("name", WRONG)
def test_no_check_reads_what_make_fx_traces(name: str, before_autograd: bool) -> None:
    call, expected = WRONG[name]
    assert make_fx(call, pre_dispatch=before_autograd)(TARGETS)(TARGETS).tolist() == expected


@pytest.mark.oldest
def test_values_of_fake_tensors_are_not_read() -> None:
    mode = FakeTensorMode()
    assert _torch_private.can_read(TARGETS) and not _torch_private.can_read(mode.from_tensor(TARGETS))
    with mode:
        assert not _torch_private.can_read(TARGETS)
