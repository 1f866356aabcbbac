"""The forward and the backward op of the MLP."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops import mlp_by_torch
from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import (
    accumulation_dtype,
    accumulator,
    aligned,
    allows_planes,
    allows_tf32,
    cut_to_width,
    empty_dense,
    empty_statistics,
    launch_on,
    new_bias_gradient,
    new_gradient,
    padded,
    rounded_gradients,
)
from monoidreduce._ops.mlp_parts import (
    GradientProducts,
    HiddenPart,
    OutputProduct,
    multiply_hidden,
    multiply_hidden_gradients,
)
from monoidreduce._ops.mlp_planes import PlaneGradients, PlaneOutput
from monoidreduce._ops.registry import UNROUNDED, Fold, choices, register
from monoidreduce.workspace import get_workspace

ACTIVATIONS = choices("mlp_forward", "activation")


class MlpOpOptions(NamedTuple):
    """The options of the ops `mlp` and `gated_mlp`.

    unrounded_result: the result has the accumulation dtype.
    workspace: bytes; None: `get_workspace()`.
    """

    activation: str
    unrounded_result: bool
    workspace: int | None


def new_result(x: Tensor, w2: Tensor, unrounded: bool) -> Tensor:
    """[N, outputs], empty. unrounded: in the accumulation dtype."""
    shape = (x.shape[0], w2.shape[0])
    return empty_statistics(x, *shape) if unrounded else x.new_empty(*shape)


def mlp_result(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    options: MlpOpOptions,
) -> Tensor:
    return new_result(x, w2, options.unrounded_result)


def _readable_mlp(
    x: Tensor, w1: Tensor, w2: Tensor, bias1: Tensor | None, bias2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The operands, padded and aligned as tensor-core kernels need them."""
    if (x.shape[1] | w1.shape[0] | w2.shape[0]) % 8 == 0:
        return aligned(x), aligned(w1), aligned(w2), bias1, bias2
    bias1, bias2 = (None if bias is None else padded(bias) for bias in (bias1, bias2))
    return padded(x), padded(w1, 2), padded(w2, 2), bias1, bias2


def plan_mlp_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    workspace: int | None,
) -> _C.Plan:
    return _C.plan_mlp_forward(
        x,
        w1,
        w2,
        bias1,
        workspace=get_workspace() if workspace is None else workspace,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        tf32=allows_tf32(x),
        planes=allows_planes(),
    )


def plan_mlp_backward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    workspace: int | None,
) -> _C.Plan:
    """Arguments as in `plan_mlp_forward`."""
    return _C.plan_mlp_backward(
        x,
        w1,
        w2,
        bias1,
        workspace=get_workspace() if workspace is None else workspace,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        tf32=allows_tf32(x),
        planes=allows_planes(),
    )


def mlp_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    options: MlpOpOptions,
) -> Tensor:
    kind, launch, outputs = ACTIVATIONS.index(options.activation), launch_on(x), w2.shape[0]
    plan = part = scratch = None
    unrounded = options.unrounded_result
    if x.is_cuda:
        plan = plan_mlp_forward(x, w1, w2, bias1, options.workspace)
        of_torch = mlp_by_torch.part_of(plan, x, w1, w2, options.workspace, backward=False)
        if of_torch is not None:
            return mlp_by_torch.forward(of_torch, x, w1, w2, bias1, bias2, options.activation)
        part, unrounded = plan.part, unrounded and not plan.tensor_cores  # tensor-core kernels always round
        if plan.tensor_cores:
            x, w1, w2, bias1, bias2 = _readable_mlp(x, w1, w2, bias1, bias2)
        if elements := plan.scratch:
            scratch = empty_statistics(x, elements)
    out = new_result(x, w2, unrounded)
    if plan is not None and part is not None:

        def store(
            x: Tensor,
            w1: Tensor,
            bias1: Tensor | None,
            hidden: Tensor,
            row_planes: Tensor | None,
            column_planes: Tensor | None,
        ) -> None:
            _C.mlp_hidden(x, w1, bias1, hidden, row_planes, column_planes, kind, *launch, plan)

        product = PlaneOutput(x, w1, w2, bias2) if plan.planes else OutputProduct(w2, bias2)
        multiply_hidden(store, part, x, w1, bias1, product, out)
    else:
        _C.mlp_forward(x, w1, w2, bias1, bias2, out, scratch, kind, 0, *launch, plan)
    if out.shape[1] != outputs:
        out = cut_to_width(outputs, out)
    return out.to(accumulation_dtype(x.dtype)) if options.unrounded_result != unrounded else out


def mlp_backward(
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    options: MlpOpOptions,
    needed: list[bool],
    unrounded: bool = False,
) -> list[Tensor]:
    kind, launch, inputs = ACTIVATIONS.index(options.activation), launch_on(x), (x, w1, w2, bias1, bias2)
    dx = dw1 = dw2 = dbias1 = scratch = None
    plan, part, of_torch, tensor_cores = None, None, None, False
    if x.is_cuda:
        plan = plan_mlp_backward(x, w1, w2, bias1, options.workspace)
        part, tensor_cores = plan.part, plan.tensor_cores
        of_torch = mlp_by_torch.part_of(plan, x, w1, w2, options.workspace, backward=True)
    if tensor_cores:
        x, w1, w2, bias1, _ = _readable_mlp(x, w1, w2, bias1, None)
        grad_out = padded(grad_out)
    dbias2 = grad_out.sum(0) if needed[4] else None  # torch sums 16-bit numbers in float32
    if of_torch is not None and any(needed[:4]):
        dx, dw1, dw2, dbias1 = mlp_by_torch.gradients(
            of_torch, grad_out, x, w1, w2, bias1, options.activation, needed
        )
    elif plan is not None and part is not None and any(needed[:4]):

        def store(part: HiddenPart) -> None:
            _C.mlp_local_gradient(*part, kind, *launch, plan)

        operands = (grad_out, x, w1, w2)
        products = (
            PlaneGradients(*operands, needed[:3])
            if plan.planes
            else GradientProducts(*operands, needed[:3], part)
        )
        gradients = multiply_hidden_gradients(store, part, *operands, bias1, products, needed[3])
        dx, dw1, dw2, dbias1 = gradients
    elif any(needed[:4]):
        if plan is not None and tensor_cores:
            # These kernels compute all gradients, needed or not. In planes each has a kernel of its own: that
            # of dw1 sums dbias1 too.
            wanted = (needed[0], needed[1] or needed[3], needed[2]) if plan.planes else (True, True, True)
            makers = (accumulator if plan.adds_rows else empty_dense, empty_dense, empty_dense)
            of_inputs = zip(makers, (x, w1, w2), wanted, strict=True)
            dx, dw1, dw2 = (make(t) if is_wanted else None for make, t, is_wanted in of_inputs)
        else:
            dx = new_gradient(x, needed[0], unrounded)
            dw1, dw2 = new_gradient(w1, needed[1]), new_gradient(w2, needed[2])
        dbias1 = new_bias_gradient(bias1, needed[3])
        if plan is not None and plan.scratch:
            scratch = empty_statistics(x, plan.scratch)
        _C.mlp_backward(x, w1, w2, bias1, grad_out, dx, dw1, dw2, dbias1, scratch, kind, 0, *launch, plan)
    return rounded_gradients((dx, dw1, dw2, dbias1, dbias2), inputs, needed, unrounded)


register(
    "mlp",
    inputs="Tensor x, Tensor w1, Tensor w2, Tensor? bias1, Tensor? bias2",
    options=MlpOpOptions,
    outputs="out",
    differentiable="out",
    residuals="",
    forward=mlp_forward,
    fake=mlp_result,
    backward=mlp_backward,
    fold=Fold(a="x", b="w1", payload="w2", transposed=True, joined=("bias2",)),
    backward_options=UNROUNDED,
)
