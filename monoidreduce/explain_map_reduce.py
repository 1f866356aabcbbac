"""`explain` for `map_reduce`, which runs ops of torch: its slices, and how its backward pass goes."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from monoidreduce import _C
from monoidreduce._keywords import refuse
from monoidreduce._ops.dry_run import dry_run_of_torch, tensors_in
from monoidreduce._validate import mismatch
from monoidreduce.explanation import Explanation, architecture_of, facts_of, name_of, of_dtypes, where_of
from monoidreduce.map_reduce import Visits, map_reduce, visits_of

__all__ = ["differentiated_slices", "explain_map_reduce", "map_reduce_call"]


def map_reduce_call(
    arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor], Visits]:
    """The arguments of a call by name, for a dry run, which reads no values of tensors; the tensors of a and
    b, by their names in it; and the slices.

    Raises TypeError or ValueError if the call would, and ValueError beside `ranks`.
    """
    try:
        bound = inspect.signature(map_reduce).bind(*arguments, **options)
    except TypeError as error:
        raise TypeError(f"map_reduce: {error}") from None
    bound.apply_defaults()
    call = dict(bound.arguments)
    if others := call.pop("others", None):
        refuse("map_reduce", others)
    if call["ranks"] is not None:
        raise ValueError(mismatch("ranks", "None: a call over ranks has no model", repr(call["ranks"])))
    visits = visits_of(*(call[name] for name in ("a", "b", "pairs", "a_chunk", "b_chunk")))
    folded = {(i.start, j.start) for i, of_b in visits for j in of_b}
    call["pairs"] = lambda i, j: (i.start, j.start) in folded
    return call, dict(tensors_in({name: call[name] for name in ("a", "b")})), visits


def differentiated_slices(tensors: dict[str, Tensor]) -> tuple[str, ...]:
    """The names of those that require gradients or, if none does, of all."""
    return tuple(name for name, t in tensors.items() if t.requires_grad) or tuple(tensors)


def explain_map_reduce(
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    hardware: str | None,
    gpu: _C.DeviceFacts | None,
) -> Explanation:
    """The kernels and operations that a call runs. hardware, gpu: as in `folds.explain.explain_fold`."""
    call, tensors, visits = map_reduce_call(arguments, options)
    first = next(iter(tensors.values()))
    if hardware is None:
        gpu = facts_of(first.device)
    differentiated = differentiated_slices(tensors)
    run = dry_run_of_torch(map_reduce, call, differentiated, gpu)
    pairs = sum(len(of_b) for _, of_b in visits)
    ways = (("forward", False), ("backward", True))
    counts = [f"{way} {sum(x.backward == is_backward for x in run.launches)}" for way, is_backward in ways]
    reasons = [
        f"torch runs all of it: ops that write tensors are {' and '.join(counts)}",
        f"project_fold sees one pair of slices after another: {pairs} in all; slices of a: {len(visits)}",
        _of_backward(call, {name[0] for name in differentiated if tensors[name].is_floating_point()}),
        "pairs are added in a fixed order: two runs give the same bits if the functions of the call do",
    ]
    engine = "cpu" if gpu is None else "cuda"
    path = f"{engine}/torch/{name_of(first.dtype)}"
    return Explanation(
        operator="map_reduce",
        forward=f"map_reduce_forward/{path}",
        backward=f"map_reduce_backward/{path}",
        architecture=architecture_of(gpu),
        tiles=None,
        workspace=None,
        deterministic=True,
        reasons=(*reasons, *where_of(first.device, hardware, gpu), of_dtypes(first.dtype)),
    )


def _of_backward(call: dict[str, Any], moved: set[str]) -> str:
    """The backward pass in words. moved: which of "a" and "b" get gradients."""
    if not moved:
        return "there is no backward pass, as neither a nor b holds floating-point numbers"
    kept = ""
    if call["forward_gradient"] and "a" in moved:
        kept = "the forward pass computes the gradient of a for an upstream gradient of 1; "
        if "b" not in moved:
            return f"{kept}the backward pass multiplies it by the upstream gradient, and calls no function"
    if call["fused_backward"] is not None:
        return f"{kept}fused_backward gives the gradients of each pair, from the final states"
    given = "autograd" if call["project_fold_backward"] is None else "project_fold_backward"
    return f"{kept}the backward pass calls project_fold again for each pair, and {given} gives its gradients"
