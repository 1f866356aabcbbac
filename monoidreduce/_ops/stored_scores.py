"""The op `linear_jsd`: distillation with the loss "jsd" on Hopper, from scores that are stored.

The loss of a class needs both log-sum-exps of its row, and its dlogit needs the row's loss. So whole rows of
scores are stored in float32, as many at a time as fit in the workspace, and a kernel reads them three times.
The forward pass also computes the gradients, for an upstream gradient of 1. So scores are computed once, and
the backward pass multiplies the gradients by a number.

dW, the gradient of the weights, is a sum over all rows and is rounded once. So the dlogits of all rows are
kept until the last row is done, for as many of the last classes as there is memory. They lie in the memory of
dW, which is not written yet, and in what the scores leave of the workspace. The dlogits of the first classes
are recomputed.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C, streams
from monoidreduce._ops.forward_gradients import has_kernels, scaled, scaled_in_place
from monoidreduce._ops.linear_loss import mean_divisor
from monoidreduce._ops.memory import (
    aligned,
    empty_statistics,
    is_aligned,
    launch_on,
    padded,
)
from monoidreduce._ops.mlp_parts import parts_of
from monoidreduce._ops.products import multipliable, without_autocast, write_product
from monoidreduce._ops.registry import Fold, any_requires_grad, register
from monoidreduce._ops.slices import TILE_COLUMNS, TILE_ROWS
from monoidreduce.workspace import get_workspace

__all__ = ["ONLY_HOPPER", "Layout", "obstacle", "obstacle_of_call"]

_FEWEST_ROWS = 128  # least number of rows of a slice: those of one block of a cluster
_PAIR = 8  # bytes of a score of the student and one of the teacher
_STATISTICS = 5  # numbers of each row (csrc/include/monoidreduce/device/simt/jsd_rows.cuh)


def _whole(count: int, tile: int) -> int:
    """count, rounded up to a multiple of the tile."""
    return -(-count // tile) * tile


def _even(count: int, most: int, tile: int) -> int:
    """The size of equal parts of `count` in whole tiles. most: largest size of a part, in whole tiles."""
    return min(_whole(-(-count // -(-count // most)), tile), count)


class Layout(NamedTuple):
    """Where scores and dlogits are stored. Sizes only; nothing is allocated.

    Attributes:
        at_once: number of rows whose scores are stored at a time.
        pitch: elements from one row of scores to the next.
        panels: slices of classes whose dlogits [rows, classes] lie one after another in the memory of dW.
        own: slice of classes whose dlogits lie after the scores, in the workspace.
        again: the dlogits of classes before `own` are recomputed, for so many classes at a time; 0 if none
            are.
    """

    at_once: int
    pitch: int
    panels: tuple[slice, ...] = ()
    own: slice = slice(0, 0)
    again: int = 0

    @classmethod
    def of(cls, rows: int, classes: int, width: int, workspace: int, keeps: bool) -> Layout:
        """workspace: bytes. keeps: whether dW [classes, width] is wanted."""
        pitch = _whole(classes, 8)
        fitting = workspace // (_PAIR * pitch)
        most = fitting // TILE_ROWS * TILE_ROWS or _FEWEST_ROWS
        at_once = _even(rows, most, min(most, TILE_ROWS))
        if not keeps or at_once == rows:
            return cls(at_once, pitch)
        # Before the part of dW is written that a panel lies in, the panel moves to where the scores were.
        movable = _PAIR // 2 * at_once * pitch // rows // TILE_COLUMNS * TILE_COLUMNS
        in_gradient = classes * width // rows - 8 if movable else 0  # the last panel's pitch may be longer
        first = min(_whole(max(classes - in_gradient, 0), TILE_COLUMNS), classes)
        panels: tuple[slice, ...] = ()
        if first < classes:
            size = _even(classes - first, movable, TILE_COLUMNS)
            panels = tuple(slice(first + p.start, first + p.stop) for p in parts_of(classes - first, size))
        left = max(workspace - _PAIR * at_once * pitch, 0) // (2 * rows) // TILE_COLUMNS * TILE_COLUMNS
        own = slice(max(_whole(first, TILE_COLUMNS) - left, 0) if left else first, first)
        again = 0
        if own.start > 0:
            most = max(workspace // (_PAIR * rows) // TILE_COLUMNS, 1) * TILE_COLUMNS
            again = _even(own.start, most, TILE_COLUMNS)
        return cls(at_once, pitch, panels, own, again)

    def floats(self, rows: int) -> int:
        """Number of float32 elements of memory for scores and dlogits, apart from the memory of dW."""
        own = rows * _whole(self.own.stop - self.own.start, 8) // 2
        return max(2 * self.at_once * self.pitch + own, 2 * rows * _whole(self.again, 8))


class Scores:
    """The scores of student and teacher for some rows and classes, always in the same memory; losses and
    dlogits computed from them.

    operands: x [N, D], weight [V, D], teacher_x [N, E], teacher_weight [V, E]. used: [N] bool, or None if all
        rows count.
    numbers: 1 / temperature, and beta.
    factor: [1], multiplies dlogits; None if no gradient is wanted.
    memory: float32, `Layout.floats` elements.
    """

    def __init__(
        self,
        operands: tuple[Tensor, Tensor, Tensor, Tensor],
        used: Tensor | None,
        numbers: tuple[float, float],
        factor: Tensor | None,
        memory: Tensor,
    ) -> None:
        self.operands, self.used, self.numbers, self.factor = operands, used, numbers, factor
        self.memory = memory
        self.losses = empty_statistics(operands[0], len(operands[0]))
        self.stats = empty_statistics(operands[0], len(operands[0]), _STATISTICS)
        self.on_device = (1, streams.current(memory.device.index))

    def _multiplied(self, rows: slice, classes: slice) -> tuple[Tensor, Tensor]:
        x, weight, teacher_x, teacher_weight = self.operands
        shape = rows.stop - rows.start, _whole(classes.stop - classes.start, 8)
        count = shape[0] * shape[1]
        student, teacher = (
            self.memory[first : first + count].view(shape)[:, : classes.stop - classes.start]
            for first in (0, count)
        )
        _C.score_product(x[rows], weight[classes], student, *self.on_device)
        _C.score_product(teacher_x[rows], teacher_weight[classes], teacher, *self.on_device)
        return student, teacher

    def _used(self, rows: slice) -> Tensor | None:
        return None if self.used is None else self.used[rows]

    def of_rows(self, rows: slice) -> Tensor:
        """Write the losses and statistics of these rows. Returns their dlogits for all classes, in bfloat16,
        if there is a factor."""
        student, teacher = self._multiplied(rows, slice(0, len(self.operands[1])))
        of_rows = self._used(rows), self.losses[rows], self.stats[rows], self.factor
        _C.jsd_rows(student, teacher, *of_rows, *self.numbers, *self.on_device)
        return _in_16_bits(student)

    def of_classes(self, classes: slice) -> Tensor:
        """The dlogits of all rows for these classes, in bfloat16. `of_rows` has written the statistics."""
        rows = slice(0, len(self.operands[0]))
        student, teacher = self._multiplied(rows, classes)
        assert self.factor is not None
        of_rows = self.used, self.stats, self.factor
        _C.jsd_gradient(student, teacher, *of_rows, *self.numbers, *self.on_device)
        return _in_16_bits(student)


def _weights(t: Tensor) -> Tensor:
    """The weights [V, D], or a copy if kernels read them neither row by row nor as the transpose [D, V]."""
    return t if t.shape[1] % 8 == 0 and is_aligned(t.mT) else padded(t)


def _in_16_bits(scores: Tensor) -> Tensor:
    """The dlogits [rows, classes rounded up to 8], in the first halves of rows of scores."""
    rows, pitch = len(scores), _whole(scores.shape[1], 8)
    return scores.as_strided((rows, pitch), (pitch, 1)).view(torch.bfloat16)[:, :pitch]


def _panel(memory: Tensor, first: int, rows: int, classes: slice) -> tuple[Tensor, int]:
    """Memory for dlogits [rows, classes rounded up to 8], from element `first` of 16-bit memory on, and the
    number of the element after it."""
    pitch = _whole(classes.stop - classes.start, 8)
    end = first + rows * pitch
    return memory[first:end].view(rows, pitch), end


def _copy(to: Tensor, of: Tensor) -> Tensor:
    """Copy rows of whole 16-byte vectors. torch copies strided tensors element by element, so elements of 16
    bytes are copied."""
    to.view(torch.complex128).copy_(of.view(torch.complex128))
    return to


def _weight_gradient(local: Tensor, x: Tensor, out: Tensor) -> None:
    """Write out [classes, D] = dlogits.T @ x. local: [rows, classes or more], of which the first are read."""
    _C.columns_product(local[:, : len(out)], x, None, out, None, 1, streams.current(out.device.index))


def linear_jsd_results(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    mean: bool,
    temperature: float,
    beta: float,
    wanted: list[bool],
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the loss and the gradients of x and weight; a gradient that is not wanted is empty."""
    dx, dweight = (
        t.new_empty(t.shape if is_wanted else 0) for t, is_wanted in zip((x, weight), wanted, strict=True)
    )
    return x.new_empty((), dtype=torch.float32), dx, dweight


def linear_jsd_forward(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    mean: bool,
    temperature: float,
    beta: float,
    wanted: list[bool],
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the gradients of x and weight for an upstream gradient of 1.

    x and teacher_x are 0 in rows that the mask excludes.
    """
    workspace = get_workspace() if workspace is None else workspace
    rows, (classes, width) = len(x), weight.shape
    results = linear_jsd_results(
        x, weight, teacher_x, teacher_weight, mask, mean, temperature, beta, wanted, workspace
    )
    loss, dx, dweight = results
    operands = aligned(x), _weights(weight), padded(teacher_x), _weights(teacher_weight)
    factor = None
    if any(wanted):
        factor = loss.new_full((1,), (1 - beta) / temperature)
        if mean:
            count = mean_divisor(mask, "mean", loss)
            factor /= rows if count is None else count
    layout = Layout.of(rows, classes, width, workspace, wanted[1])
    memory = loss.new_empty(layout.floats(rows))
    scores = Scores(operands, mask, (1 / temperature, beta), factor, memory)
    of_scores, in_16_bits = 2 * layout.at_once * layout.pitch, memory.view(torch.bfloat16)
    kept = []  # the last classes last
    if layout.own.start < layout.own.stop:
        kept.append((layout.own, _panel(in_16_bits, 2 * of_scores, rows, layout.own)[0]))
    first = 0
    for part in layout.panels:
        panel, first = _panel(dweight.view(-1), first, rows, part)
        kept.append((part, panel))
    with without_autocast(x):
        for part in parts_of(rows, layout.at_once):
            local = scores.of_rows(part)
            if wanted[0]:
                write_product(dx[part], local[:, :classes], multipliable(operands[1]))
            for of_classes, panel in kept:
                _copy(panel[part], local[:, of_classes.start : of_classes.start + panel.shape[1]])
            if wanted[1] and layout.at_once == rows:
                _weight_gradient(local, operands[0], dweight)
        for of_classes, panel in reversed(kept):
            if of_classes != layout.own:
                panel = _copy(_panel(in_16_bits, 0, rows, of_classes)[0], panel)
            _weight_gradient(panel, operands[0], dweight[of_classes])
        if layout.again:
            for part in parts_of(layout.own.start, layout.again):
                _weight_gradient(scores.of_classes(part), operands[0], dweight[part])
    _C.reduce_losses(scores.losses, None, mask, loss, 0, mean, *launch_on(x))
    return results


def linear_jsd_backward(
    grad_loss: Tensor,
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    dx: Tensor,
    dweight: Tensor,
    mean: bool,
    temperature: float,
    beta: float,
    wanted: list[bool],
    workspace: int | None,
    needed: list[bool],
) -> list[Tensor]:
    return scaled((dx, dweight), grad_loss, needed)


def linear_jsd_backward_in_place(grad_loss: Tensor, *rest: Any) -> list[Tensor]:
    """`linear_jsd_backward` if nobody reads dx and dweight afterwards. It multiplies them in place, because
    dweight is as large as the weights."""
    *_, dx, dweight, _, _, _, _, _, needed = rest
    return scaled_in_place((dx, dweight), grad_loss, needed)


def linear_jsd_flops(given: dict[str, Any]) -> int:
    """FLOPs of both scores, and of the gradients of x and weight, which the forward pass computes."""
    x, weight, teacher_x = (given[name] for name in ("x", "weight", "teacher_x"))
    flops: int = 2 * x[0] * weight[0] * (x[1] * (1 + sum(given["wanted"])) + teacher_x[1])
    return flops


register(
    "linear_jsd",
    inputs="Tensor x, Tensor weight, Tensor teacher_x, Tensor teacher_weight, Tensor? mask",
    options="bool mean, float temperature, float beta, bool[] wanted, int? workspace",
    outputs="loss, dx, dweight",
    differentiable="loss",
    residuals="dx, dweight",
    constants="teacher_x, teacher_weight, mask",
    forward=linear_jsd_forward,
    fake=linear_jsd_results,
    backward=linear_jsd_backward,
    fold=Fold(a="x", b="weight", other_a="teacher_x", other_b="teacher_weight"),
    flops=(linear_jsd_flops, lambda given: 0),
    in_place=linear_jsd_backward_in_place,
)


Operands: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
ONLY_HOPPER = "only kernels for Hopper store scores"


def obstacle_of_call(operands: Operands, loss: str, reduction: str, others: bool) -> str | None:
    """Why no GPU stores the scores of a call; None if one may.

    operands: x, weight, teacher_x, teacher_weight. others: whether there are biases or hard labels.
    """
    x, weight, teacher_x, teacher_weight = operands
    if loss != "jsd":
        return f"the loss is {loss}"
    if others:
        return "there are biases or hard labels"
    if x.dtype != torch.bfloat16:
        return f"gradients are kept for an upstream gradient of 1, in bfloat16, and the inputs are {x.dtype}"
    if reduction == "none":
        return "upstream gradients of tokens are not known in the forward pass"
    if torch.is_grad_enabled() and any_requires_grad((teacher_x, teacher_weight)):
        return "gradients of the teacher are wanted"
    if x.shape[1] % 8:
        return f"the width {x.shape[1]} is not a multiple of 8"
    sizes = (*x.shape, *weight.shape, teacher_x.shape[1])
    if 0 in sizes or max(sizes) >= 1 << 30:
        return "a size is 0, or 2^30 or more"
    return None


def obstacle(operands: Operands, loss: str, reduction: str, others: bool) -> str | None:
    """Why the scores of a call are not stored; None if they are. Arguments as in `obstacle_of_call`."""
    if why := obstacle_of_call(operands, loss, reduction, others):
        return why
    x = operands[0]
    return None if x.is_cuda and has_kernels(x.device.index) else ONLY_HOPPER
