"""Linear cross entropy of DTensors, and the style that splits a head's classes over a mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from monoidreduce import functional
from monoidreduce._validate import check_choice, mismatch
from monoidreduce.nn import LinearCrossEntropyHead

__all__ = ["VocabParallel", "linear_cross_entropy", "logits", "loss_of_head"]


class VocabParallel(ParallelStyle):
    """Splits the classes of a `LinearCrossEntropyHead` over a one-dimensional mesh.

    For `torch.distributed.tensor.parallel.parallelize_module`. Parameters become Shard(0). All
    ranks call the head with the same rows; loss and logits are the same on all of them.

    Raises:
        TypeError: where it is applied to another module.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LinearCrossEntropyHead):
            raise TypeError(mismatch("module", "a LinearCrossEntropyHead", type(module).__name__))
        return distribute_module(module, device_mesh, self._split)

    @staticmethod
    def _split(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in module.named_parameters():
            split = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]), parameter.requires_grad)
            module.register_parameter(name, split)


def loss_of_head(head: LinearCrossEntropyHead, x: Tensor, target: Tensor) -> Any:
    """The loss of a head whose parameters are DTensors."""
    weight: Any = head.weight
    if isinstance(x, DTensor):
        return functional.linear_cross_entropy(x, weight, target, bias=head.bias, **head.options)
    split = _split_dimension(weight)
    bias: Any = head.bias
    return functional.linear_cross_entropy(
        x,
        weight.to_local(),
        target,
        bias=None if bias is None else bias.to_local(),
        process_group=weight.device_mesh.get_group(split),
        classes=weight.shape[0],
        **head.options,
    )


def logits(head: LinearCrossEntropyHead, x: Tensor) -> Tensor:
    """x @ weight^T + bias of a head whose parameters are DTensors, of all classes."""
    weight: Any = head.weight
    if isinstance(x, DTensor):
        return nn.functional.linear(x, weight, head.bias)
    mesh = weight.device_mesh
    rows = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)
    result: Tensor = nn.functional.linear(rows, weight, head.bias).full_tensor()  # type: ignore[attr-defined]
    return result


def _split_dimension(weight: DTensor) -> int:
    """The mesh dimension that the classes are split over."""
    placements = weight.placements
    split = [i for i, placement in enumerate(placements) if placement == Shard(0)]
    if len(split) != 1 or any(p != Replicate() for i, p in enumerate(placements) if i != split[0]):
        expected = "a DTensor with Shard(0) on one dimension of its mesh and Replicate on the others"
        raise TypeError(mismatch("weight", expected, placements))
    return split[0]


def linear_cross_entropy(
    x: Any, weight: Any, target: Any, *, bias: Any, reduction: str, **options: Any
) -> Any:
    """`functional.linear_cross_entropy` of DTensors on one mesh.

    Args:
        x: [tokens, D], on each mesh dimension Shard(0) or Replicate. target: [tokens], placed as x.
        weight: [V, D], Shard(0) on one mesh dimension and Replicate on the others. bias: [V], placed so.
        reduction: "mean" divides by the number of tokens of all ranks.
        options: as there, without tensors.

    Returns:
        A DTensor, or two. On the dimension that splits the classes it is replicated. On others where x is
        split a loss is a partial sum, and per-token results are split as x.

    Raises:
        TypeError: an argument is not as above.
    """
    expected = "a DTensor on the mesh of weight, as in the forward of the module that has it"
    for name, t in (("weight", weight), ("x", x), ("target", target), ("bias", bias)):
        if (t is not None or name != "bias") and not isinstance(t, DTensor):
            raise TypeError(mismatch(name, expected, type(t).__name__))
        if t is not None and t.device_mesh != weight.device_mesh:
            raise TypeError(mismatch(name, expected, t.device_mesh))
    for name, option in options.items():
        if isinstance(option, Tensor):
            raise TypeError(mismatch(name, "None, where weight is a DTensor", type(option).__name__))
    check_choice("reduction", reduction, functional.REDUCTIONS)
    mesh, split = weight.device_mesh, _split_dimension(weight)
    if x.dim() != 2 or any(p not in (Shard(0), Replicate()) for p in x.placements):
        raise TypeError(
            mismatch("x", "[tokens, D] with Shard(0) or Replicate on each mesh dimension", x.placements)
        )
    if target.placements != x.placements:
        raise TypeError(mismatch("target", f"placements {x.placements} as x", target.placements))
    if bias is not None and bias.placements != weight.placements:
        raise TypeError(mismatch("bias", f"placements {weight.placements} as weight", bias.placements))

    rows: list[Placement] = [Replicate() if i == split else p for i, p in enumerate(x.placements)]
    sums: list[Placement] = [Partial() if p == Shard(0) else p for p in rows]
    of_columns: list[Placement] = [Shard(0) if i == split else p for i, p in enumerate(sums)]
    local_target = target.redistribute(placements=rows).to_local()
    result = functional.linear_cross_entropy(
        x.redistribute(placements=rows).to_local(grad_placements=rows),
        weight.to_local(grad_placements=of_columns),
        local_target,
        bias=None if bias is None else bias.to_local(grad_placements=of_columns),
        reduction="sum" if reduction == "mean" else reduction,
        process_group=mesh.get_group(split),
        classes=weight.shape[0],
        **options,
    )
    loss, *lse = result if isinstance(result, tuple) else (result,)
    if reduction == "mean":
        count = (local_target != options["ignore_index"]).sum()
        for i, placement in enumerate(rows):
            if placement == Shard(0):
                dist.all_reduce(count, group=mesh.get_group(i))
        loss = loss / count.clamp(min=1)

    def whole(t: Tensor, placements: list[Placement]) -> DTensor:
        shape = target.shape if t.dim() else torch.Size()
        return DTensor.from_local(t, mesh, placements, shape=shape, stride=(1,) * t.dim())

    found = whole(loss, rows if reduction == "none" else sums)
    return (found, whole(lse[0], rows)) if lse else found
