"""The MLP: its two ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monoidreduce import _C
from monoidreduce._ops.memory import (
    SIMT,
    accumulator,
    allows_tf32,
    bias_gradient,
    first,
    gradient,
    launch,
    mapped,
    new,
    padded,
    rounded,
    statistics,
)
from monoidreduce._ops.mlp_parts import multiply_hidden, multiply_hidden_gradients
from monoidreduce._ops.registry import choices, register
from monoidreduce.workspace import get_workspace

ACTIVATIONS = choices("mlp_forward", "activation")


def mlp_result(x: Tensor, w1: Tensor, w2: Tensor, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], w2.shape[0]))


def _readable_mlp(
    x: Tensor, w1: Tensor, w2: Tensor, bias1: Tensor | None, bias2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The operands as tensor-core kernels read them."""
    if (x.shape[1] | w1.shape[0] | w2.shape[0]) % 8 == 0:
        return mapped(x), mapped(w1), mapped(w2), bias1, bias2
    bias1, bias2 = (None if bias is None else padded(bias) for bias in (bias1, bias2))
    return padded(x), padded(w1, 2), padded(w2, 2), bias1, bias2


def mlp_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    activation: str,
    workspace: int | None,
) -> Tensor:
    kind, on_device, tf32 = ACTIVATIONS.index(activation), launch(x), allows_tf32(x)
    outputs, tier, elements, part, scratch = w2.shape[0], SIMT, 0, (0, 0), None
    if x.is_cuda:
        workspace = get_workspace() if workspace is None else workspace
        deterministic = torch.are_deterministic_algorithms_enabled()
        tier, _, elements, _, part = _C.mlp_forward_tier(
            x, w1, w2, bias1, workspace=workspace, deterministic=deterministic, tf32=tf32
        )
    if tier != SIMT:
        x, w1, w2, bias1, bias2 = _readable_mlp(x, w1, w2, bias1, bias2)
    out = mlp_result(x, w1, w2)
    if all(part):

        def store(rows: Tensor, hidden: Tensor) -> None:
            _C.mlp_hidden(rows, w1, bias1, hidden, kind, *on_device)

        multiply_hidden(store, part[0], x, w2, bias2, out)
    else:
        if elements:
            scratch = statistics(x, elements)
        _C.mlp_forward(x, w1, w2, bias1, bias2, out, scratch, kind, workspace or 0, *on_device, False, tf32)
    return out if out.shape[1] == outputs else first(outputs, out)


def mlp_backward(
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    activation: str,
    workspace: int | None,
    needed: list[bool],
) -> list[Tensor]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    kind, on_device = ACTIVATIONS.index(activation), launch(x)
    gradients: list[Tensor | None]
    tier, adds_rows, part, tf32 = SIMT, True, (0, 0), allows_tf32(x)
    if x.is_cuda:
        workspace = get_workspace() if workspace is None else workspace
        tier, _, _, adds_rows, part = _C.mlp_backward_tier(
            x, w1, w2, bias1, workspace=workspace, deterministic=deterministic, tf32=tf32
        )
    inputs = (x, w1, w2, bias1, bias2)
    if tier != SIMT:
        x, w1, w2, bias1, _ = _readable_mlp(x, w1, w2, bias1, None)
        grad_out = padded(grad_out)
    dbias2 = grad_out.sum(0) if needed[4] else None  # in float32 where its result is of 16 bits
    if not any(needed[:4]):
        gradients = [None] * 4
    elif all(part):
        options: tuple[int, ...] = (kind, *on_device)

        def store(*tensors: Any) -> None:
            _C.mlp_local_gradient(*tensors, *options)

        gradients = multiply_hidden_gradients(store, part, grad_out, x, w1, w2, bias1, needed)
    else:
        if tier != SIMT:  # the gradients all together, whatever is needed
            d_rows = accumulator(x) if adds_rows else new(x)
            gradients = [d_rows, new(w1), new(w2)]
        else:
            gradients = [gradient(t, wanted) for t, wanted in zip((x, w1, w2), needed[:3], strict=True)]
        gradients.append(bias_gradient(bias1, needed[3]))
        dx, dw1, dw2, dbias1 = gradients
        mode = (kind, workspace or 0, *on_device, deterministic, tf32)
        _C.mlp_backward(x, w1, w2, bias1, grad_out, dx, dw1, dw2, dbias1, *mode)
    return rounded((*gradients, dbias2), inputs, needed)


register(
    "mlp",
    inputs="Tensor x, Tensor w1, Tensor w2, Tensor? bias1, Tensor? bias2",
    options="str activation, int? workspace",
    outputs="out",
    differentiable="out",
    residuals="",
    forward=mlp_forward,
    fake=mlp_result,
    backward=mlp_backward,
)
