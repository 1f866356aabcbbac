"""Log-probabilities of targets under a linear head, with the logits of linear cross entropy.

On Hopper, forward saves unnormalised softmax weights of the first classes, and backward turns them into
dlogits in place. (Forward cannot save dlogits: they depend on two upstream gradients, of the log-probability
and of the entropy.) So saved weights can be used only once. With retain_graph=True backward recomputes all
logits instead.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from monoidreduce._ops.active_rows import clear_rows, order_rows
from monoidreduce._ops.dlogits import HeadSlice
from monoidreduce._ops.engine import _C
from monoidreduce._ops.linear_loss import (
    LinearBackward,
    LinearHead,
    check_targets,
    in_dtype_of,
    no_dlogits,
    prepare_forward,
    saved_classes,
    traced_dlogits,
)
from monoidreduce._ops.memory import (
    accumulation_dtype,
    add_to,
    allows_planes,
    empty_statistics,
    launch_on,
    new_bias_gradient,
    new_gradient,
    padded,
    rounded_gradients,
    weight_sums,
)
from monoidreduce._ops.registry import UNROUNDED, UNROUNDED_WEIGHT, Fold, register
from monoidreduce._ops.slices import TILE_COLUMNS, Needed
from monoidreduce.workspace import get_workspace

__all__ = ["LogProbsOpOptions"]

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class LogProbsOpOptions(NamedTuple):
    """The options of the op.

    temperature: of all tokens; not used if the call has `temperatures`, one for each token.
    top1: return the index of the largest logit.
    first_class: the index of this rank's first class among the classes of all ranks; 0 without ranks.
    classes: the number of classes of all ranks; -1 without ranks.
    keep: forward may save softmax weights for backward.
    x_differentiated: the gradient of x will be needed.
    workspace: bytes; None while torch.compile traces, when the limit at run time is not known.
    """

    logit_scale: float
    softcap: float
    temperature: float
    ignore_index: int
    top1: bool
    first_class: int
    classes: int
    keep: bool
    x_differentiated: bool
    workspace: int | None

    @property
    def loss_options(self) -> tuple[float, float, float, int]:
        """The options that every kernel of the operator takes: logit_scale to ignore_index."""
        return self[:4]


class TargetTerms(NamedTuple):
    """The gradients of the logits of some targets of each row, beside that of the log-sum-exp.

    target: [N, K] the targets among these classes, distinct in a row; -1 for none.
    by_logit: [N, K] the derivatives by the targets' logits before the softcap, without the part that comes by
        the log-sum-exp; 0 for none.
    dlogits: [N, K] the whole derivatives by the targets' dot products.
    scale: d logit / d dot product, without the softcap.
    """

    target: Tensor
    by_logit: Tensor
    dlogits: Tensor
    scale: float

    def write(self, head: HeadSlice, part: slice, order: Tensor | None) -> None:
        """Overwrite, in the stored dlogits of a slice of classes, those of the rows' targets."""
        assert head.dlogits is not None
        _C.target_dlogits(
            self.dlogits, self.target, head.dlogits, order, part.start, *launch_on(head.dlogits)
        )

    def add_to_bias(self, dbias: Tensor | None) -> None:
        if dbias is not None and len(dbias):
            self._add(dbias, self.by_logit.flatten(), slice(None))

    def add_products(self, x: Tensor, weight: Tensor, dx: Tensor | None, dweight: Tensor | None) -> None:
        """Add the targets' products to gradients in the accumulation dtype, some rows at a time."""
        if not self.target.numel() or not len(weight):
            return
        by_dot = self.scale * self.by_logit
        none = (self.target < 0)[..., None]  # whose rows and columns may hold NaN
        for part in row_parts(x, self.target.shape[1]):
            if dx is not None:
                rows = weight[self.target[part].clamp(min=0)].to(dx.dtype)  # [rows, K, D]
                rows = rows.masked_fill_(none[part], 0)
                dx[part] += torch.bmm(by_dot[part, None], rows)[:, 0]
            if dweight is not None:
                products = by_dot[part, :, None] * x[part, None].to(dweight.dtype)
                products = products.masked_fill_(none[part], 0)
                self._add(dweight, products.flatten(0, 1), part)

    def _add(self, to: Tensor, values: Tensor, part: slice) -> None:
        """to[index] += values, in a fixed order."""
        to.index_put_((self.target[part].clamp(min=0).flatten(),), values, accumulate=True)


_GATHERED_BYTES = 32 << 20  # of rows of a weight, at a time


def row_parts(x: Tensor, targets: int) -> list[slice]:
    """Slices of the rows x. `targets` rows of the weight for each row of a slice take little memory."""
    size = max(_GATHERED_BYTES // max(accumulation_dtype(x.dtype).itemsize * targets * x.shape[1], 1), 1)
    return [slice(first, min(first + size, len(x))) for first in range(0, len(x), size)]


def weights_can_be_saved(bias: Tensor | None, softcap: float, top1: bool) -> bool:
    """Whether forward may save softmax weights: not with a bias, a softcap, or top1."""
    return bias is None and softcap == 0 and not top1


def mask_words(mask: Tensor | None) -> Tensor | None:
    """mask [N, words] int32 as `_C` takes it: float32 of the same bits, because it reads no int32."""
    return None if mask is None else mask.contiguous().view(torch.float32)


def _tiles(classes: int) -> int:
    return -(-classes // TILE_COLUMNS)


def log_probs_results(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperatures: Tensor | None,
    mask: Tensor | None,
    options: LogProbsOpOptions,
) -> Results:
    """Empty tensors like the results of the forward op, for tracing.

    mask: [N, words of 32 bits], the classes that each row keeps; None for all. The results are log_probs,
    entropy, lse and lse_low [N]; top1 [N], or [0] if it is not wanted; and what forward saves: row maxima
    [N, tiles of classes], and exp(score - row maximum of the tile) [N, classes] in 16 bits.
    """
    log_probs, entropy, lse, lse_low = (empty_statistics(x, x.shape[0]) for _ in range(4))
    keep = options.keep and weights_can_be_saved(bias, options.softcap, options.top1)
    saved = traced_dlogits(x, weight, options.workspace, options.x_differentiated, keep, options.logit_scale)
    row_max = lse.new_empty(x.shape[0], _tiles(saved.shape[1]))
    best = target.new_empty(x.shape[0] if options.top1 else 0)
    return log_probs, entropy, lse, lse_low, best, row_max, saved


def log_probs_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperatures: Tensor | None,
    mask: Tensor | None,
    options: LogProbsOpOptions,
) -> Results:
    weight = in_dtype_of(x, weight)
    check_targets(target, weight.shape[0] if options.classes < 0 else options.classes, options.ignore_index)
    lse = empty_statistics(x, x.shape[0])
    log_probs, entropy, lse_low = torch.empty_like(lse), torch.empty_like(lse), torch.empty_like(lse)
    best = target.new_empty(x.shape[:1]) if options.top1 else None
    words = mask_words(mask)
    plan = scratch = weights_saved = order = gathered = row_planes = column_planes = None
    saved, saved_columns = no_dlogits(x), 0
    if x.is_cuda:
        if options.keep and weights_can_be_saved(bias, options.softcap, options.top1):
            saved_columns = saved_classes(x, weight, options.workspace, options.x_differentiated)
        plan = _C.plan_log_probs_forward(
            x,
            weight,
            bias,
            mask=words,
            top1=best,
            logit_scale=options.logit_scale,
            softcap=options.softcap,
            saved_columns=saved_columns,
            planes=allows_planes(),
        )
        if plan.skips_rows:
            order = order_rows(x, target=target, ignore_index=options.ignore_index)
        prepared = prepare_forward(plan, (x,), (weight,), order)
        (x,), (weight,), scratch, saved, saved_by_head, gathered_rows, *planes = prepared
        (row_planes,), (column_planes,) = planes
        if saved_by_head is not None:
            (weights_saved,) = saved_by_head
        if gathered_rows is not None:
            (gathered,) = gathered_rows
    _C.log_probs_forward(
        x,
        weight,
        bias,
        target,
        temperatures,
        words,
        log_probs,
        entropy,
        best,
        lse,
        lse_low,
        scratch,
        weights_saved,
        order,
        gathered,
        row_planes,
        column_planes,
        *options.loss_options,
        options.first_class,
        options.classes,
        saved_columns,
        *launch_on(x),
        plan,
    )
    row_max = lse.new_empty(x.shape[0], 0)
    if plan is not None and scratch is not None and weights_saved is not None:
        row_max = scratch[plan.frames :][: x.shape[0] * _tiles(saved.shape[1])].view(x.shape[0], -1)
    best = target.new_empty(0) if best is None else best
    return log_probs, entropy, lse, lse_low, best, row_max, saved


def log_probs_backward(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperatures: Tensor | None,
    mask: Tensor | None,
    log_probs: Tensor,
    entropy: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    row_max: Tensor,
    saved: Tensor,
    options: LogProbsOpOptions,
    needed: list[bool],
    unrounded: bool = False,
    unrounded_weight: bool = False,
    sum_to: Tensor | None = None,
    consumes: bool = False,
    terms: TargetTerms | None = None,
) -> list[Tensor]:
    """consumes: overwrite the saved weights with dlogits. Otherwise they are not used. terms: gradients of
    the logits of other targets."""
    inputs, weight = (x, weight, bias), in_dtype_of(x, weight)
    unrounded_weight = unrounded_weight or inputs[1] is not weight  # a master is float32
    workspace = get_workspace() if options.workspace is None else options.workspace
    classes, plan = weight.shape[0] if options.classes < 0 else options.classes, None
    entropy, lse, lse_low = (t.contiguous() for t in (entropy, lse, lse_low))
    words = mask_words(mask)
    if x.is_cuda:
        plan = _C.plan_log_probs_backward(
            x,
            weight,
            bias,
            mask=words,
            logit_scale=options.logit_scale,
            softcap=options.softcap,
            workspace=workspace,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            planes=allows_planes(),
        )
    if plan is not None and plan.tensor_cores:
        saved = (saved if consumes else saved[:, :0]).contiguous()
        order = None
        if plan.skips_rows:
            order = order_rows(x, target=target, ignore_index=options.ignore_index)
        else:
            x = clear_rows(padded(x), target=target, ignore_index=options.ignore_index)

        def write(
            head: HeadSlice,
            part: slice,
            row_max: Tensor | None = None,
            log_probs: Tensor | None = None,
        ) -> None:
            """Writes the dlogits of a slice. With row_max and log_probs it overwrites the saved weights in
            head.dlogits instead of computing the logits."""
            assert head.dlogits is not None
            _C.log_probs_local_gradient(
                head.rows,
                head.columns,
                None if bias is None else bias[part],
                target,
                temperatures,
                words,
                grad_log_probs,
                grad_entropy,
                grad_lse,
                entropy,
                lse,
                lse_low,
                head.dlogits,
                head.bias_sums,
                order,
                row_max,
                log_probs,
                head.row_planes,
                head.column_planes,
                *options.loss_options,
                options.first_class + part.start,
                classes,
                *launch_on(x),
                plan,
            )

        def store(part: slice, heads: Sequence[HeadSlice], _grad: Tensor | None) -> None:
            write(heads[0], part)
            if terms is not None:
                terms.write(heads[0], part, order)

        def finish_saved(head: HeadSlice) -> None:
            increment_version(saved)  # makes torch raise if a second backward pass reads the weights
            part = slice(0, head.columns.shape[0])
            write(head, part, row_max, log_probs.contiguous())
            if terms is not None:
                terms.write(head, part, order)

        (head_gradients,) = LinearBackward(
            plan,
            [LinearHead(x, weight, Needed(*needed[:3]))],
            store,
            workspace,
            saved=saved,
            finish_saved=finish_saved,
            order=order,
            slope=options.logit_scale,
            unrounded=unrounded,
            unrounded_weight=unrounded_weight,
            sum_to=sum_to,
        ).gradients()
        if terms is not None:
            terms.add_to_bias(head_gradients.bias)
        return rounded_gradients(head_gradients, inputs, needed[:3], unrounded, unrounded_weight)
    dx = new_gradient(x, needed[0], unrounded or terms is not None)
    dweight = weight_sums(weight, needed[1], sum_to, unrounded_weight or terms is not None)
    dbias = new_bias_gradient(bias, needed[2])
    _C.log_probs_backward(
        x,
        weight,
        bias,
        target,
        temperatures,
        words,
        grad_log_probs,
        grad_entropy,
        grad_lse,
        entropy,
        lse,
        lse_low,
        dx,
        dweight,
        dbias,
        *options.loss_options,
        options.first_class,
        classes,
        workspace,
        *launch_on(x),
        plan,
    )
    if terms is not None:
        terms.add_products(x, weight, dx, dweight)
        terms.add_to_bias(dbias)
    add_to(sum_to, dweight)
    return rounded_gradients((dx, dweight, dbias), inputs, needed[:3], unrounded, unrounded_weight)


register(
    "linear_log_probs",
    inputs="Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? temperatures, Tensor? mask",
    options=LogProbsOpOptions,
    outputs="log_probs, entropy, lse, lse_low, top1, frames, kept",
    differentiable="log_probs, entropy, lse",
    residuals="log_probs, entropy, lse, lse_low, frames, kept",
    constants="target, temperatures, mask",
    forward=log_probs_forward,
    fake=log_probs_results,
    backward=log_probs_backward,
    fold=Fold(a="x", b="weight"),
    of_shard=lambda given: {"keep": False},
    in_place=functools.partial(log_probs_backward, consumes=True),
    backward_options=f"{UNROUNDED}, {UNROUNDED_WEIGHT}",
)
