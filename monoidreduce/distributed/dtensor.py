"""Operators on DTensors, and ParallelStyles that shard a head's classes or an MLP's hidden units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from monoidreduce import functional
from monoidreduce._validate import check_choice, mismatch
from monoidreduce.distributed.operators import COLUMN_AXES
from monoidreduce.distributed.split import unshard
from monoidreduce.nn import MLP, LinearCrossEntropyHead
from monoidreduce.ranks import Ranks

__all__ = [
    "MLPParallel",
    "VocabParallel",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_log_probs",
    "logits",
    "logsumexp_matmul",
    "loss_of_head",
    "mlp",
    "mlp_of_module",
    "of_plain_rows",
    "replicated_rows",
]


class VocabParallel(ParallelStyle):
    """Shards the classes of a `LinearCrossEntropyHead` over a one-dimensional mesh.

    For `torch.distributed.tensor.parallel.parallelize_module`. Parameters become Shard(0). All ranks must
    call the head with the same rows; loss and logits are the same on all of them.

    Raises:
        TypeError: the module is not a `LinearCrossEntropyHead`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _split_module(module, device_mesh, LinearCrossEntropyHead)


class MLPParallel(ParallelStyle):
    """Shards the hidden units of a `monoidreduce.nn.MLP` over a one-dimensional mesh.

    For `torch.distributed.tensor.parallel.parallelize_module`. w1, bias1, gate and gate_bias become Shard(0),
    w2 Shard(1) and bias2 Replicate. All ranks must call the module with the same rows; the result is the same
    on all of them.

    Raises:
        TypeError: the module is not a `monoidreduce.nn.MLP`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _split_module(module, device_mesh, MLP)


def _split_module(module: nn.Module, mesh: DeviceMesh, kind: type[nn.Module]) -> nn.Module:
    if not isinstance(module, kind):
        article = "an" if kind is MLP else "a"
        raise TypeError(mismatch("module", f"{article} {kind.__name__}", type(module).__name__))
    if mesh.ndim != 1:
        raise ValueError(mismatch("device_mesh", "a mesh of one dimension, such as mesh['tp']", mesh))

    def split(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            placement = Shard(COLUMN_AXES[name]) if name in COLUMN_AXES else Replicate()
            placed = distribute_tensor(parameter, mesh, [placement])
            module.register_parameter(name, nn.Parameter(placed, parameter.requires_grad))

    return distribute_module(module, mesh, split)


class Head(NamedTuple):
    """This rank's shard of a weight and bias. ranks: of an operator that takes them; None: they are whole."""

    weight: Tensor
    bias: Tensor | None
    ranks: Ranks | None


def of_plain_rows(weight: Any, bias: Any) -> Head:
    """Local shards of a head's DTensors, for a call with plain rows that are the same on all ranks of the
    mesh.

    Raises:
        TypeError: the tensors are not Shard(0) on one mesh dimension and Replicate on the others.
    """
    split = _split_dimension("weight", weight)
    if split is None:
        return Head(weight.to_local(), None if bias is None else bias.to_local(), None)
    if bias is not None and (not isinstance(bias, DTensor) or bias.placements != weight.placements):
        given = bias.placements if isinstance(bias, DTensor) else type(bias).__name__
        raise TypeError(mismatch("bias", f"placements {weight.placements} as weight", given))
    ranks = Ranks(weight.device_mesh.get_group(split), classes=weight.shape[0])
    return Head(weight.to_local(), None if bias is None else bias.to_local(), ranks)


def replicated_rows(x: Tensor, weight: Any, positions: int) -> Tensor:
    """x as plain rows [..., positions, D], the same on all ranks that the classes of weight are sharded over.

    x: a DTensor; or a plain tensor with all positions; or a plain tensor with this rank's positions, as
    torch.chunk would split them.
    """
    split = _split_dimension("weight", weight)
    if isinstance(x, DTensor):
        rows = [Replicate() if i == split else placement for i, placement in enumerate(x.placements)]
        return x.redistribute(placements=rows).to_local(grad_placements=rows)
    if split is None or x.shape[-2] == positions:
        return x
    return unshard(x, -2, weight.device_mesh.get_group(split), length=positions)


def loss_of_head(head: LinearCrossEntropyHead, x: Tensor, target: Tensor) -> Any:
    """The loss of a head with DTensor parameters."""
    if isinstance(x, DTensor):
        return functional.linear_cross_entropy(x, head.weight, target, bias=head.bias, **head.options)
    weight, bias, ranks = of_plain_rows(head.weight, head.bias)
    return functional.linear_cross_entropy(x, weight, target, bias=bias, ranks=ranks, **head.options)


def mlp_of_module(module: MLP, x: Tensor) -> Tensor:
    """The result of an MLP with DTensor parameters."""
    names = ("bias1", "bias2", "gate", "gate_bias")
    others: dict[str, Any] = {name: getattr(module, name) for name in names}
    if isinstance(x, DTensor):
        return functional.mlp(x, module.w1, module.w2, activation=module.activation, **others)
    w1: Any = module.w1
    columns = {"w1": w1, "w2": module.w2, **others}
    _check_dtensors("mlp", columns)
    found = _Columns.of("mlp", columns)
    local: dict[str, Any] = {n: None if t is None else t.to_local() for n, t in found.tensors.items()}
    return functional.mlp(x, **local, activation=module.activation, ranks=found.group)


def logits(head: LinearCrossEntropyHead, x: Tensor) -> Tensor:
    """x @ weight^T + bias for all classes, of a head with DTensor parameters."""
    weight: Any = head.weight
    if isinstance(x, DTensor):
        return nn.functional.linear(x, weight, head.bias)
    mesh = weight.device_mesh
    rows = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)
    result: Tensor = nn.functional.linear(rows, weight, head.bias).full_tensor()  # type: ignore[attr-defined]
    return result


def _split_dimension(name: str, weight: DTensor, axis: int = 0) -> int | None:
    """The mesh dimension over which `weight` is sharded along `axis`; None if it is replicated.

    Raises:
        TypeError: any other placements.
    """
    placements = weight.placements
    split = [i for i, placement in enumerate(placements) if placement == Shard(axis)]
    if len(split) > 1 or any(p != Replicate() for i, p in enumerate(placements) if i not in split):
        expected = (
            f"a DTensor with Shard({axis}) on one dimension of its mesh and Replicate on the others "
            f"({name}.redistribute(placements=...) makes one)"
        )
        raise TypeError(mismatch(name, expected, placements))
    return split[0] if split else None


class _Columns(NamedTuple):
    """The DTensor arguments of an operator that belong to its columns (classes or hidden units)."""

    tensors: dict[str, Any]
    mesh: DeviceMesh
    split: int | None  # the mesh dimension that the columns are sharded over; None: replicated

    @classmethod
    def of(cls, operator: str, tensors: dict[str, Any]) -> _Columns:
        """Raises TypeError unless the placements of all tensors match those of the first."""
        first_name, first = next(iter(tensors.items()))
        split = _split_dimension(first_name, first, COLUMN_AXES[first_name])
        for name, t in tensors.items():
            if t is None:
                continue
            of_columns = Shard(COLUMN_AXES[name]) if name in COLUMN_AXES else Replicate()
            expected = tuple(of_columns if i == split else Replicate() for i in range(first.device_mesh.ndim))
            if t.placements != expected:
                text = f"placements {expected} in {operator}, as {first_name} has {first.placements}"
                raise TypeError(mismatch(name, text, t.placements))
        return cls(tensors, first.device_mesh, split)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self.split is None else self.mesh.get_group(self.split)


def _check_dtensors(operator: str, tensors: dict[str, Any]) -> None:
    """Raise TypeError unless every tensor is None or a DTensor, all on the same mesh."""
    first, of_first = next((name, t) for name, t in tensors.items() if isinstance(t, DTensor))
    expected = (
        f"a DTensor on the mesh of {first}, as in the forward of the module that has it, in {operator}; or "
        "plain tensors alone: to_local() of a weight, with ranks=mesh.get_group() if it is split"
    )
    for name, t in tensors.items():
        if t is not None and not isinstance(t, DTensor):
            given = f"{type(t).__name__} beside {first} with placements {of_first.placements}"
            raise TypeError(mismatch(name, expected, given))
        if t is not None and t.device_mesh != of_first.device_mesh:
            raise TypeError(mismatch(name, expected, t.device_mesh))


class _Results(NamedTuple):
    """The results of a call with local tensors.

    of_rows: per-row results, with the leading axes of x. sums: scalars summed over this rank's rows.
    """

    of_rows: list[Tensor]
    sums: list[Tensor]


def _placed(
    operator: str,
    rows: dict[str, Any],
    columns: dict[str, Any],
    call: Callable[[dict[str, Any], Ranks | None], _Results],
) -> _Results:
    """Call an operator with DTensors and return DTensors.

    rows, columns: its tensors by name; the first of each is not None. call: runs the operator on local
    tensors, with the ranks that columns are sharded over.
    """
    _check_dtensors(operator, columns | rows)
    of = _Columns.of(operator, columns)
    first_name, x = next(iter(rows.items()))
    _, weight = next(iter(columns.items()))
    leading = [Shard(axis) for axis in range(max(x.dim() - 1, 0))]
    if any(p != Replicate() and p not in leading for p in x.placements):
        expected = f"Shard of a leading axis or Replicate on each mesh dimension, in {operator}"
        raise TypeError(mismatch(first_name, expected, x.placements))
    for name, t in rows.items():
        if t is not None and t.placements != x.placements:
            raise TypeError(mismatch(name, f"placements {x.placements} as {first_name}", t.placements))

    whole: list[Placement] = [Replicate() if i == of.split else p for i, p in enumerate(x.placements)]
    sums: list[Placement] = [Partial() if isinstance(p, Shard) else p for p in whole]

    def local_rows(t: Any) -> Tensor | None:
        return None if t is None else t.redistribute(placements=whole).to_local(grad_placements=whole)

    def local_columns(t: Any) -> Tensor | None:
        if t is None:
            return None
        grads = [p if i == of.split else s for i, (p, s) in enumerate(zip(t.placements, sums, strict=True))]
        local: Tensor = t.to_local(grad_placements=grads)
        return local

    local = {name: local_rows(t) for name, t in rows.items()}
    local |= {name: local_columns(t) for name, t in columns.items()}
    ranks = None
    if of.group is not None:
        ranks = Ranks(of.group, classes=None if operator == "mlp" else weight.shape[0])
    found = call(local, ranks)

    def placed(t: Tensor, placements: list[Placement], shape: torch.Size) -> Any:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(t, of.mesh, placements, shape=shape, stride=stride)

    lead = x.shape[:-1]
    return _Results(
        [placed(t, whole, torch.Size((*lead, *t.shape[len(lead) :]))) for t in found.of_rows],
        [placed(t, sums, torch.Size()) for t in found.sums],
    )


def _mean(total: Tensor, counted: Tensor, x: DTensor, columns: Any) -> Tensor:
    """This rank's part of the mean over the rows of all ranks.

    total: the sum over this rank's rows. counted: how many of them count; all-reduced in place.
    """
    split = _split_dimension("weight", columns)
    for i, placement in enumerate(x.placements):
        if i != split and isinstance(placement, Shard):
            dist.all_reduce(counted, group=x.device_mesh.get_group(i))
    return total / counted.clamp(min=1)


def _refuse_tensors(operator: str, options: dict[str, Any]) -> None:
    for name, option in options.items():
        if isinstance(option, Tensor):
            expected = f"None, where weight is a DTensor in {operator}"
            raise TypeError(mismatch(name, expected, type(option).__name__))


def linear_cross_entropy(
    x: Any, weight: Any, target: Any, *, bias: Any, reduction: str, **options: Any
) -> Any:
    """`functional.linear_cross_entropy` with DTensors on one mesh.

    Args:
        x: [..., D]; on each mesh dimension Shard of a leading axis, or Replicate. target: placed like x.
        weight: [V, D]; Shard(0) on at most one mesh dimension, Replicate on the others. bias: [V], placed
            likewise.
        reduction: "mean" divides by the number of tokens of all ranks.
        options: the other options of the function; none may be a tensor.

    Returns:
        One DTensor, or two with return_lse. They are replicated on the mesh dimension that shards the
        classes. On a mesh dimension that shards x, a reduced loss is Partial, and per-token results are
        sharded like x.

    Raises:
        TypeError: an argument is not as above.
    """
    _refuse_tensors("linear_cross_entropy", options)
    check_choice("reduction", reduction, functional.REDUCTIONS)

    def call(local: dict[str, Any], ranks: Ranks | None) -> _Results:
        of_rank = "sum" if reduction == "mean" else reduction
        result: Any = functional.linear_cross_entropy(**local, **options, ranks=ranks, reduction=of_rank)
        loss, *lse = result if isinstance(result, tuple) else (result,)
        if reduction == "none":
            return _Results([loss, *lse], [])
        if reduction == "mean":
            loss = _mean(loss, (local["target"] != options["ignore_index"]).sum(), x, weight)
        return _Results([*lse], [loss])

    rows, columns = {"x": x, "target": target}, {"weight": weight, "bias": bias}
    return _returned(_placed("linear_cross_entropy", rows, columns, call))


def _returned(found: _Results) -> Any:
    """The loss followed by the per-row results; a single result without a tuple."""
    results = (*found.sums, *found.of_rows)
    return results if len(results) > 1 else results[0]


def linear_distillation(
    x: Any, weight: Any, teacher_x: Any, teacher_weight: Any, *, mask: Any, reduction: str, **options: Any
) -> Any:
    """`functional.linear_distillation` with DTensors, placed as in `linear_cross_entropy`.

    The teacher's tensors have the placements of the student's.
    """
    _refuse_tensors("linear_distillation", options)
    check_choice("reduction", reduction, functional.REDUCTIONS)

    def call(local: dict[str, Any], ranks: Ranks | None) -> _Results:
        of_rank = "sum" if reduction == "mean" else reduction
        loss = functional.linear_distillation(**local, **options, ranks=ranks, reduction=of_rank)
        if reduction == "none":
            return _Results([loss], [])
        if reduction == "mean":
            kept = local["x"][..., 0].new_ones((), dtype=torch.int64) * local["x"][..., 0].numel()
            loss = _mean(loss, kept if local["mask"] is None else local["mask"].sum(), x, weight)
        return _Results([], [loss])

    rows = {"x": x, "teacher_x": teacher_x, "mask": mask}
    columns = {"weight": weight, "teacher_weight": teacher_weight}
    return _returned(_placed("linear_distillation", rows, columns, call))


def linear_log_probs(
    x: Any, weight: Any, target: Any, *, bias: Any, temperature: Any, kept: Any, **options: Any
) -> functional.LogProbs:
    """`functional.linear_log_probs` with DTensors, placed as in `linear_cross_entropy`.

    temperature: a number, or a DTensor placed like x. kept: a DTensor placed like x.
    """
    _refuse_tensors("linear_log_probs", options)
    of_rows = {"temperature": temperature} if isinstance(temperature, Tensor) else {}
    number = {} if of_rows else {"temperature": temperature}
    names: list[str] = []

    def call(local: dict[str, Any], ranks: Ranks | None) -> _Results:
        found = functional.linear_log_probs(**local, **number, **options, ranks=ranks)
        given = {name: t for name, t in found._asdict().items() if t is not None}
        names.extend(given)
        return _Results([*given.values()], [])

    rows = {"x": x, "target": target, "kept": kept, **of_rows}
    columns = {"weight": weight, "bias": bias}
    found = _placed("linear_log_probs", rows, columns, call).of_rows
    results: dict[str, Any] = dict.fromkeys(functional.LogProbs._fields)
    return functional.LogProbs(**results | dict(zip(names, found, strict=True)))


def logsumexp_matmul(a: Any, b: Any, scale: float) -> Any:
    """`functional.logsumexp_matmul` with DTensors: a placed as x in `linear_cross_entropy`, b as weight."""

    def call(local: dict[str, Any], ranks: Ranks | None) -> _Results:
        return _Results([functional.logsumexp_matmul(**local, scale=scale, ranks=ranks)], [])

    return _returned(_placed("logsumexp_matmul", {"a": a}, {"b": b}, call))


def mlp(x: Any, w1: Any, w2: Any, *, activation: str, **others: Any) -> Any:
    """`functional.mlp` with DTensors: x and w1 are placed as x and weight in `linear_cross_entropy`.

    w2 is Shard(1) where w1 is Shard(0), and bias2 is replicated.
    """

    def call(local: dict[str, Any], ranks: Ranks | None) -> _Results:
        return _Results([functional.mlp(**local, activation=activation, ranks=ranks)], [])

    return _returned(_placed("mlp", {"x": x}, {"w1": w1, "w2": w2, **others}, call))
