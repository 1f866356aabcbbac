"""`explain` for folds of user functions and monoids: which kernels a call runs, and why, from a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from monoidreduce import _C
from monoidreduce._ops.dry_run import DryRun, dry_run, tensors_in
from monoidreduce._validate import check_tensor, number_of
from monoidreduce.explanation import (
    Explanation,
    architecture_of,
    cpu_tiles,
    facts_of,
    of_dtypes,
    order_of,
    passes_of,
    where_of,
)
from monoidreduce.folds.block_mask import as_block_mask
from monoidreduce.folds.cuda import compiler
from monoidreduce.folds.program.program import parse

if TYPE_CHECKING:
    from monoidreduce.folds.cpp_monoid import CppMonoid
    from monoidreduce.folds.statistics import Statistics

__all__ = ["differentiated_tensors", "explain_fold", "explanation_of", "prepared", "with_targets"]

NUMBERS = ("ignore_index", "scale", "workspace")


def explain_fold(
    fold: Statistics | CppMonoid,
    call: dict[str, Any],
    hardware: str | None = None,
    gpu: _C.DeviceFacts | None = None,
) -> Explanation:
    """What a call of a user's fold runs.

    Args:
        call: its arguments by name.
        hardware, gpu: the name and the facts of a GPU that need not be present; None for the tensors' device.
    """
    a = check_tensor("a", call["a"])
    if hardware is None:
        gpu = facts_of(a.device)
    call = prepared(fold, call)
    run = dry_run(fold, call, differentiated_tensors(call), gpu, assumes_compiler=hardware is not None)
    before = () if call.get("block_mask") is None else (_of_mask("q" in run.ops[-1].arguments),)
    return explanation_of(repr(fold), run, gpu, where_of(a.device, hardware, gpu), before)


def _of_mask(by_attention: bool) -> str:
    if by_attention:
        return "blocks that block_mask leaves out are skipped"
    return (
        "block_mask is a condition of each element: blocks that it leaves out are computed, and do not count"
    )


def prepared(fold: Statistics | CppMonoid, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call for a dry run, which reads no values of tensors. A label need not be given."""
    a = check_tensor("a", call["a"])
    call = call | {name: number_of(name, call[name], "a number") for name in NUMBERS if name in call}
    for name in ("row", "column"):
        if isinstance(call.get(name), Mapping):
            call[name] = dict(call[name])
    if call.get("block_mask") is not None:
        call["block_mask"] = as_block_mask(call["block_mask"])
    if call["label"] is None and "label" in getattr(fold, "_names", ()):
        call["label"] = a.new_zeros(a.shape[:-1], dtype=torch.int64)
    return call


def differentiated_tensors(call: dict[str, Any]) -> tuple[str, ...]:
    """The tensors that require gradients or, if there are none, the operands; by their names in a dry run."""
    given = dict(tensors_in(call))
    wanted = tuple(name for name, t in given.items() if t.requires_grad)
    return wanted or tuple(name for name in ("a", "b", "other_a", "other_b") if name in given)


def explanation_of(
    operator: str, run: DryRun, gpu: _C.DeviceFacts | None, where: list[str], before: tuple[str, ...] = ()
) -> Explanation:
    """What a dry run tells whose last op folds a user's function or monoid.

    where: sentences about the device. before: sentences that come first.
    """
    given, (forward, backward) = run.ops[-1].arguments, passes_of(run)
    program = parse(given["program"]) if "program" in given and "q" not in given else None
    # What torch computes: the k largest, and payload sums of functions of two scores.
    most = program is not None and bool(program.most)
    by_kernels = any(launch.arguments.get("finds_most") for launch in run.launches)
    of_torch = (most and not by_kernels) or (
        program is not None and bool(program.payloads) and program.scores == 2
    )
    alone = of_torch and program is not None and program.first_of_most + len(program.counts) == 0
    if gpu is None:
        deterministic, how = True, []
    else:
        deterministic, order = order_of(backward)
        how = [order] if run.differentiated else []
    if "monoid" in given:
        reasons = [
            "a monoid in C++ runs on the kernels for any GPU, which use no tensor cores",
            f"{_compiler()} compiles it",
            "its laws are tried before the first call, once for all processes with the same cache of kernels",
            "torch multiplies the gradients by the scores, of some columns at a time, with the operands",
        ]
    elif gpu is not None and forward.launch is None and not alone:
        deterministic, how = False, []
        reasons = [
            "there is no compiler for kernels, so torch computes some columns at a time, many times slower: "
            "pip install nvidia-cuda-nvrtc"
        ]
    elif program is None:
        reasons = ["the function is attention: the mean of a payload by softmax(score), and its log-sum-exp"]
    else:
        reader = "the CPU engine interprets" if gpu is None else f"{_compiler()} compiles"
        of = f"the function is a program of {len(program.nodes)} operations"
        reasons = [of if alone else f"{of}, which {reader}"]
    if most:
        found = "the kernels find the k largest" if by_kernels else "torch finds the k largest"
        if run.differentiated:
            found += "; torch finds their gradient" if by_kernels else ", and their gradient"
        chunks = ", in chunks of columns of the workspace" if run.differentiated or not by_kernels else ""
        reasons.append(found + chunks)
    by_attention = program is not None and any(
        launch.name.startswith("modified_attention") for launch in run.launches
    )
    if by_attention:
        reasons.append(
            "attention's kernels compute the mean, with the function as score_mod, and one pass all gradients"
        )
    elif program is not None and program.payloads:
        two = program.scores == 2
        if any(launch.name == "statistics_payload" for launch in run.launches):
            reasons.append("one pass folds numbers and payload sums")
            of_one = "the gradient of a payload sum is that of a fold with one more score"
            of_two = "torch computes the gradients of payload sums of two scores, in chunks of columns"
        else:
            of_one = "a payload sum is the gradient of a fold with one more score"
            of_two = "torch computes payload sums of two scores, and their gradients, in chunks of columns"
        reasons.append(of_two if two else of_one)
    elif any(launch.name == "statistics_payload" for launch in run.launches):
        reasons.append("one pass folds all batches; their gradients are computed one after another")
    table = given.get("table")
    if table is not None and table.requires_grad and not by_attention:
        of_both = "captured tensors that are indexed by row and column together"
        reasons.append(f"torch computes the gradient of {of_both}, in chunks of columns")
        if gpu is not None and not torch.are_deterministic_algorithms_enabled():
            deterministic = False
    if program is not None and run.differentiated and not by_attention:
        reasons.append("the gradient by data of rows or of columns is one more forward pass each")
    plans = (("forward", forward.plan), ("backward", backward.plan))
    reasons += [*where, *how, *(f"{way}: {plan}" for way, plan in plans if plan is not None)]
    if "q" in given:
        operands = {"a": given["q"], "b": given["k"], "payload": given["v"]}
    else:
        operands = {name: given[name] for name in ("a", "b", "other_a", "other_b")}
    first = operands["a"]
    return Explanation(
        operator=operator,
        forward=forward.path,
        backward=backward.path,
        architecture=architecture_of(gpu),
        tiles=cpu_tiles(operands) if gpu is None else None,
        workspace=None if gpu is None else given.get("workspace"),
        deterministic=deterministic,
        reasons=(*before, *reasons, of_dtypes(first.dtype)),
    )


def with_targets(explanation: Explanation, run: DryRun, gpu: _C.DeviceFacts | None) -> Explanation:
    """What `linear_topk` runs.

    explanation: of the fold that finds the classes. run: of a differentiated call.
    """
    forward, backward = passes_of(run)
    deterministic, order = order_of(backward)
    twice = (
        "a call that is differentiated takes the log-sum-exp and the k logits once more, as soft targets of "
        f"linear_cross_entropy ({forward.path}), and its backward pass is theirs"
    )
    return replace(
        explanation,
        backward=backward.path,
        deterministic=deterministic or gpu is None,
        reasons=(*explanation.reasons, twice, *([] if gpu is None else [order])),
    )


def _compiler() -> str:
    found = compiler.find()
    return "NVRTC" if found is None else f"NVRTC {'.'.join(map(str, found.version))} ({found.path})"
