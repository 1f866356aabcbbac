"""Backward passes that cannot be differentiated, and raise an error when they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = ["differentiable_once"]


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backward of an autograd function so that differentiating its gradients raises RuntimeError.

    torch's once_differentiable raises only if the upstream gradients themselves require a gradient.
    """

    @wraps(backward)
    def refusing(ctx: Any, *grads: Tensor | None) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        found = found if isinstance(found, tuple) else (found,)
        graph = torch.ones((), requires_grad=True)
        return tuple(_Refusing.apply(g, graph) if isinstance(g, Tensor) else g for g in found)  # type: ignore[no-untyped-call]

    return refusing


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, graph: Tensor) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:
        raise RuntimeError(
            "a fold over several ranks can be differentiated once: its backward has no derivative. "
            "Do without create_graph=True."
        )
