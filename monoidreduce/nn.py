"""The operators as modules: options go to the constructor, tensors to `forward`, as in `functional`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from monoidreduce import functional
from monoidreduce._validate import check_choice, mismatch
from monoidreduce.functional import Window
from monoidreduce.ops import ACTIVATIONS

__all__ = ["MLP", "Attention", "LinearCrossEntropyLoss", "LinearDistillationLoss"]


class _Operator(nn.Module):
    """A module without parameters that holds an operator's options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class Attention(_Operator):
    """`monoidreduce.attention`: q [B, H, M, F], k [B, Hkv, N, F], v [B, Hkv, N, D] -> [B, H, M, D]."""

    def __init__(
        self,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: Window | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> None:
        super().__init__(causal=causal, scale=scale, window=window, softcap=softcap, return_lse=return_lse)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        result: Tensor | tuple[Tensor, Tensor] = functional.attention(q, k, v, bias=bias, **self.options)
        return result


class LinearCrossEntropyLoss(_Operator):
    """`monoidreduce.linear_cross_entropy`: x [..., D], weight [V, D], target [...], bias [V] -> the loss."""

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        return_lse: bool = False,
        workspace: int | None = None,
    ) -> None:
        super().__init__(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            return_lse=return_lse,
            workspace=workspace,
        )

    def forward(
        self, x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        result: Tensor | tuple[Tensor, Tensor] = functional.linear_cross_entropy(
            x, weight, target, bias=bias, **self.options
        )
        return result


class LinearDistillationLoss(_Operator):
    """`monoidreduce.linear_distillation`.

    x [..., D], weight [V, D], teacher_x [..., E], teacher_weight [V, E], mask [...] -> the loss.
    """

    def __init__(
        self,
        *,
        loss: str = "cross_entropy",
        temperature: float = 1.0,
        reduction: str = "mean",
        teacher_grad: bool = False,
        workspace: int | None = None,
    ) -> None:
        super().__init__(
            loss=loss,
            temperature=temperature,
            reduction=reduction,
            teacher_grad=teacher_grad,
            workspace=workspace,
        )

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        return functional.linear_distillation(x, weight, teacher_x, teacher_weight, mask=mask, **self.options)


class MLP(nn.Module):
    """`monoidreduce.mlp` with its parameters, which are initialised as those of two `torch.nn.Linear` are.

    Attributes:
        w1: [hidden_features, in_features], bias1: [hidden_features] or None.
        w2: [out_features, hidden_features], bias2: [out_features] or None.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: str = "gelu_tanh",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """out_features is in_features by default. ValueError: an unknown activation or a negative size."""
        super().__init__()
        check_choice("activation", activation, ACTIVATIONS)
        out_features = in_features if out_features is None else out_features
        for name, size in (
            ("in_features", in_features),
            ("hidden_features", hidden_features),
            ("out_features", out_features),
        ):
            if size < 0:
                raise ValueError(mismatch(name, "an int >= 0", size))
        self.activation = activation
        first = nn.Linear(in_features, hidden_features, bias, device, dtype)
        second = nn.Linear(hidden_features, out_features, bias, device, dtype)
        self.w1, self.bias1 = first.weight, first.bias
        self.w2, self.bias2 = second.weight, second.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return functional.mlp(
            x, self.w1, self.w2, activation=self.activation, bias1=self.bias1, bias2=self.bias2
        )

    def extra_repr(self) -> str:
        (hidden, inputs), outputs = self.w1.shape, self.w2.shape[0]
        return f"{inputs}, {hidden}, {outputs}, activation={self.activation!r}, bias={self.bias1 is not None}"
