"""Ways to take derivatives of a function of tensors: forward mode, and its nests with reverse mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from folds import Inputs, outputs_of
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp

Function = Callable[..., tuple[Tensor, ...]]


def of_leaves(fold: Any, call: Inputs) -> Function:
    """The floating-point results as a function of the call's leaves."""

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        given = iter(leaves)

        def replaced(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: replaced(t) for name, t in value.items()}
            return next(given) if isinstance(value, Tensor) and value.requires_grad else value

        results = outputs_of(fold(**{name: replaced(value) for name, value in call.items()}))
        return tuple(t for t in results if t.is_floating_point())

    return function


def scalar(function: Function) -> Callable[..., Tensor]:
    return lambda *leaves: torch.stack([t.sin().sum() for t in function(*leaves)]).sum()


def of_duals(function: Function, x: Any, u: Any) -> Any:
    with forward_ad.dual_level():
        found = function(*map(forward_ad.make_dual, x, u))
        return [forward_ad.unpack_dual(t) for t in found]


def gradients_of_duals(function: Function, x: Any, u: Any) -> Any:
    """Reverse mode inside of forward mode, at one level of autograd."""
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t.clone().requires_grad_(), d) for t, d in zip(x, u, strict=True)]
        found = torch.autograd.grad(scalar(function)(*duals), duals)
        return [forward_ad.unpack_dual(t) for t in found]


def every(x: Any) -> tuple[int, ...]:
    return tuple(range(len(x)))


# name -> function of (a function, its arguments, a direction of them)
NESTS: dict[str, Callable[[Function, Any, Any], Any]] = {
    "jvp": jvp,
    "jvp of each": lambda f, x, u: [
        jvp(lambda t, i=i: f(*x[:i], t, *x[i + 1 :]), (x[i],), (u[i],)) for i in every(x)
    ],
    "duals": of_duals,
    "gradients of duals": gradients_of_duals,
    "jvp of grad": lambda f, x, u: jvp(grad(scalar(f), every(x)), x, u),
    "grad of jvp": lambda f, x, u: grad(
        lambda *t: torch.stack([d.square().sum() for d in jvp(f, t, u)[1]]).sum(), every(x)
    )(*x),
    "grad of grad": lambda f, x, u: grad(
        lambda *t: torch.stack([d.square().sum() for d in grad(scalar(f), every(x))(*t)]).sum(), every(x)
    )(*x),
}
