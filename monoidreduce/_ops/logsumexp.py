"""The forward and the backward op of the log-sum-exp of a matrix product.

Narrow operands (plan.narrow) take attention's kernels, with b as the values. Forward then also returns
mean = softmax(scale * a @ b.T) @ b, [M, F rounded up to 8] in a's dtype, because the gradient of a is
grad_lse * scale * mean. Otherwise mean is empty, and the gradients are matrix products with dlogits, of which
forward saves some (linear_loss.py).

A log-sum-exp is the sum of two floats: `lse`, the rounded value, and `lse_low`, the rounding error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monoidreduce._ops.dlogits import UNIT_UPSTREAM, HeadSlice
from monoidreduce._ops.engine import _C
from monoidreduce._ops.linear_loss import (
    LinearBackward,
    LinearHead,
    no_dlogits,
    prepare_forward,
    saved_classes,
    traced_dlogits,
)
from monoidreduce._ops.memory import (
    allows_planes,
    empty_dense,
    empty_statistics,
    launch_on,
    new_gradient,
    padded,
    rounded_gradients,
)
from monoidreduce._ops.registry import UNROUNDED, Fold, register
from monoidreduce._ops.slices import Needed, pays_to_save
from monoidreduce.workspace import get_workspace

__all__ = ["plan_logsumexp_backward"]


def logsumexp_results(
    a: Tensor, b: Tensor, scale: float, keep: bool, a_differentiated: bool, workspace: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors like the results of the forward op, for tracing: lse, lse_low, mean, saved dlogits."""
    lse, narrow = empty_statistics(a, a.shape[0]), _traced_narrow(a, b, scale)
    folds_mean = a_differentiated and narrow
    mean = a.new_empty(a.shape[0], -(-a.shape[1] // 8) * 8) if folds_mean else a.new_empty(0, 0)
    keep = keep and not narrow and _columns_to_save(a, b, workspace, a_differentiated) > 0
    saved = traced_dlogits(a, b, workspace, a_differentiated, keep, scale)
    return lse, torch.empty_like(lse), mean, saved


def _traced_narrow(a: Tensor, b: Tensor, scale: float) -> bool:
    """Whether the plan of these operands will be narrow, for tracing."""
    if not a.is_cuda or a.dtype not in (torch.bfloat16, torch.float16):
        return False
    few, many = _C.NARROW_LINES
    fewer, more = min(a.shape[0], b.shape[0]), max(a.shape[0], b.shape[0])
    fits = fewer > 0 and (more <= few or fewer >= many)
    return fits and _C.can_be_narrow(a.device.index, a.shape[1], scale)


def _columns_to_save(a: Tensor, b: Tensor, workspace: int | None, a_differentiated: bool) -> int:
    """The number of columns whose dlogits forward saves: none if they are computed again in less time."""
    count = saved_classes(a, b, workspace, a_differentiated)
    return count if count and pays_to_save(len(a), count, a.shape[1]) else 0


def logsumexp_forward(
    a: Tensor, b: Tensor, scale: float, keep: bool, a_differentiated: bool, workspace: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """keep: forward may save dlogits for backward."""
    lse, saved, saved_columns = empty_statistics(a, a.shape[0]), no_dlogits(a), 0
    lse_low = torch.empty_like(lse)
    plan = scratch = mean = columns_saved = row_planes = column_planes = None
    if a.is_cuda:
        if keep:
            saved_columns = _columns_to_save(a, b, workspace, a_differentiated)
        plan = _C.plan_logsumexp_forward(
            a,
            b,
            mean=a if a_differentiated else None,
            scale=scale,
            saved_columns=saved_columns,
            planes=allows_planes(),
        )
        if plan.narrow:
            a, b = padded(a), padded(b)
            mean = empty_dense(a)
        else:
            prepared = prepare_forward(plan, (a,), (b,), None)
            (a,), (b,), scratch, saved, saved_by_head, _, (row_planes,), (column_planes,) = prepared
            if saved_by_head is not None:
                (columns_saved,) = saved_by_head
    _C.logsumexp_forward(
        a,
        b,
        lse,
        lse_low,
        mean,
        scratch,
        columns_saved,
        row_planes,
        column_planes,
        scale,
        UNIT_UPSTREAM,
        saved_columns,
        *launch_on(a),
        plan,
    )
    return lse, lse_low, a.new_empty(0, 0) if mean is None else mean, saved


def logsumexp_backward(
    grad_lse: Tensor,
    a: Tensor,
    b: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    mean: Tensor,
    saved: Tensor,
    scale: float,
    keep: bool,
    a_differentiated: bool,
    workspace: int | None,
    needed: list[bool],
    unrounded: bool = False,
) -> list[Tensor]:
    lse, lse_low = lse.contiguous(), lse_low.contiguous()
    inputs, plan, scratch, saved_mean = (a, b), None, None, mean if mean.numel() else None
    if a.is_cuda:
        workspace = get_workspace() if workspace is None else workspace
        plan = plan_logsumexp_backward(a, b, saved_mean, needed, scale, workspace)
        if plan.tensor_cores and not plan.narrow:

            def store(part: slice, heads: Sequence[HeadSlice], _grad: Tensor | None) -> None:
                (head,) = heads
                assert head.dlogits is not None
                _C.logsumexp_local_gradient(
                    head.rows,
                    head.columns,
                    grad_lse,
                    lse,
                    lse_low,
                    head.dlogits,
                    head.row_planes,
                    head.column_planes,
                    scale,
                    *launch_on(a),
                    plan,
                )

            head = LinearHead(a, b, Needed(*needed))
            (head_gradients,) = LinearBackward(
                plan, [head], store, workspace, saved=saved.contiguous(), grad=grad_lse, slope=scale
            ).gradients()
            return rounded_gradients(head_gradients[:2], inputs, needed)
    if plan is not None and plan.narrow:
        a, b = padded(a), padded(b)
        saved_mean = saved_mean.contiguous() if needed[0] and saved_mean is not None else None
        da, db = (empty_dense(t) if wanted else None for t, wanted in zip((a, b), needed, strict=True))
        scratch = empty_statistics(a, plan.scratch)
    else:
        saved_mean, da, db = None, new_gradient(a, needed[0], unrounded), new_gradient(b, needed[1])
    _C.logsumexp_backward(
        a, b, grad_lse, lse, lse_low, saved_mean, da, db, scratch, scale, workspace or 0, *launch_on(a), plan
    )
    return rounded_gradients((da, db), inputs, needed, unrounded)


def plan_logsumexp_backward(
    a: Tensor,
    b: Tensor,
    mean: Tensor | None,
    needed: list[bool],
    scale: float,
    workspace: int,
) -> _C.Plan:
    """The plan of the backward pass. mean: what forward saved, or None. needed: for a and b."""
    da, db = (t if wanted else None for t, wanted in zip((a, b), needed, strict=True))
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _C.plan_logsumexp_backward(
        a,
        b,
        mean=mean,
        da=da,
        db=db,
        scale=scale,
        workspace=workspace,
        deterministic=deterministic,
        planes=allows_planes(),
    )


register(
    "logsumexp_matmul",
    inputs="Tensor a, Tensor b",
    options="float scale, bool keep, bool a_differentiated, int? workspace",
    outputs="lse, lse_low, mean, kept",
    differentiable="lse",
    residuals="lse, lse_low, mean, kept",
    forward=logsumexp_forward,
    fake=logsumexp_results,
    backward=logsumexp_backward,
    fold=Fold(a="a", b="b"),
    of_shard=lambda given: {"keep": False, "a_differentiated": False},
    backward_options=UNROUNDED,
)
