"""What this build can do here, and which kernel a call would run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from monoidreduce import _C, functional, nn, varlen
from monoidreduce._keywords import refuse
from monoidreduce._ops import attention_wide, memory, mlp_by_torch, stored_scores
from monoidreduce._ops.dry_run import DryRun, dry_run
from monoidreduce._ops.registry import OPERATORS, Fold
from monoidreduce._validate import FLOATING, check_tensor, mismatch, number_of
from monoidreduce._version import __version__
from monoidreduce.explain_map_reduce import explain_map_reduce
from monoidreduce.explanation import (
    WAYS,
    Explanation,
    Pass,
    Tiles,
    architecture_of,
    cpu_tiles,
    facts_of,
    first_product,
    name_of,
    of_dtypes,
    order_of,
    passes_of,
    where_of,
)
from monoidreduce.folds.attend import attend, dtype_of_weights
from monoidreduce.folds.block_mask import as_block_mask
from monoidreduce.folds.cpp_monoid import CppMonoid
from monoidreduce.folds.decoding import linear_sample, linear_topk
from monoidreduce.folds.explain import explain_fold, explanation_of, with_targets
from monoidreduce.folds.program.program import parse
from monoidreduce.folds.statistics import Statistics
from monoidreduce.map_reduce import map_reduce
from monoidreduce.theory.hardware import find

__all__ = ["DECODING", "backend_info", "explain"]

_PUBLIC = {name: getattr(module, name) for module in (functional, varlen) for name in module.__all__}
# Operators that are folds of `statistics`.
DECODING: dict[str, Callable[..., Any]] = {"linear_topk": linear_topk, "linear_sample": linear_sample}
# The functions that run kernels of this library: those with the name of an op, attend, and those of decoding.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _PUBLIC[name] for name in sorted(_PUBLIC.keys() & OPERATORS.keys())},
    "attend": attend,
    **DECODING,
}
# Arguments of attention with which its kernels run a program, as attend's do.
MODS = ("score_mod", "mask_mod", "block_mask")
# What tensor-core kernels read without a copy.
LINES = "rows of adjacent elements, on 16-byte boundaries"


def backend_info() -> dict[str, Any]:
    """What was built, what is here, and the kernel path of each operator on each kind of device.

    Works without a GPU. Keys:

    - "version", "torch".
    - "build": compiler, CUDA or not, and why.
    - "cpu": the instruction set in use, the sets that this build and processor have, threads.
    - "cuda_devices": the devices that torch sees, with their architecture.
    - "paths": operator -> "cpu", "cuda" -> dtype -> path of a forward call of 128 rows, columns and widths,
      on the current GPU. "cuda" -> None without a GPU or a build for one.
    """
    build = _C.build_info()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "version": __version__,
        "torch": torch.__version__,
        "build": build,
        "cpu": {"isa": _C.cpu_isa(), "isas": _C.cpu_isas(), "threads": torch.get_num_threads()},
        "cuda_devices": [
            f"{torch.cuda.get_device_name(index)}, sm_{10 * major + minor}"
            for index in range(count)
            for major, minor in [torch.cuda.get_device_capability(index)]
        ],
        "paths": {
            operator: {
                "cpu": _paths(operator, "cpu"),
                "cuda": _paths(operator, "cuda") if build["cuda"] and count else None,
            }
            for operator in FUNCTIONS
            if operator != "attend" and operator not in DECODING  # attention's; of statistics
        },
    }


def _paths(operator: str, device: str) -> dict[str, str]:
    """The path of an ordinary call, by dtype. It has the arguments without a default: the operands, and
    integers such as a target."""
    shapes = {"attention": (1, 1, 128, 128), "attention_varlen": (128, 1, 128)}
    shape, operands = shapes.get(operator, (128, 128)), fold_of(operator).operands.values()
    parameters = inspect.signature(FUNCTIONS[operator]).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    paths = {}
    for dtype in FLOATING:
        call = [
            torch.empty(shape, dtype=dtype, device=device)
            if name in operands
            else torch.zeros(2 if name == "cu_seqlens_q" else 128, dtype=torch.int64, device=device)
            for name in needed
        ]
        _, kind, tier, _ = explain(operator, *call).forward.split("/")
        paths[name_of(dtype)] = f"{kind}/{tier}"
    return paths


def explain(
    op: str | Callable[..., Any], /, *arguments: Any, hardware: str | None = None, **options: Any
) -> Explanation:
    """Which kernels `op(*arguments, **options)` would run, and why. Nothing is computed.

    The call runs forward and backward on tensors without memory, and its plans are noted (_ops/dry_run.py).

    Args:
        op: an operator that has kernels of its own, as `monoidreduce.mlp`, or its name, as "mlp". Or a module
            of `monoidreduce.nn`, or a `functools.partial` of one of them. Or what `monoidreduce.statistics`
            or `monoidreduce.cpp_monoid` returns, whose kernels are not compiled for it. Or
            `monoidreduce.map_reduce`, of which it tells the slices.
        arguments, options: as the call has them, tensors by position or by name.
        hardware: a GPU of `monoidreduce.hardware.HARDWARE`, as "h100", that the call is explained for. It
            need not be there, and the tensors may be on any device, "meta" too. A build without
            CUDA explains what one for all GPUs would run. None: the device of the tensors.

    Raises:
        TypeError, ValueError: the call would, op is none of these, or the tensors are on another device than
            a CPU or a GPU.
        RuntimeError: the tensors are on a GPU and this build is CPU-only, or the call needs NVRTC there and
            finds none.
    """
    gpu = None if hardware is None else find(hardware).facts()
    if isinstance(op, functools.partial):
        return explain(op.func, *op.args, *arguments, hardware=hardware, **{**op.keywords, **options})
    if op is map_reduce or op == "map_reduce":
        return explain_map_reduce(arguments, options, hardware, gpu)
    if isinstance(op, (Statistics, CppMonoid)):
        bound = inspect.signature(op.explain).bind(*arguments, **options)
        bound.apply_defaults()
        return explain_fold(op, bound.arguments, hardware, gpu)
    operator, call = resolved(op, arguments, options)
    device = check_tensor(next(iter(call)), _leading(call)).device
    if hardware is None:
        gpu = facts_of(device)
    where = where_of(device, hardware, gpu)
    if call.get("block_mask") is not None:
        call["block_mask"] = as_block_mask(call["block_mask"])
    function, assumed = FUNCTIONS[operator], hardware is not None
    run = dry_run(function, call, differentiated(operator, call), gpu, assumes_compiler=assumed)
    if operator == "linear_topk" and run.ops[-1].name == "linear_target_logits":
        fold = dry_run(function, call, (), gpu, assumes_compiler=assumed)
        return with_targets(explanation_of(operator, fold, gpu, where), run, gpu)
    if run.ops[-1].name == "linear_jsd":
        return _of_stored_scores(run, gpu, where)
    if run.ops[-1].name == "statistics":
        before: tuple[str, ...] = ()
        if operator == "attend":
            before = ("a weight of two scores is a fold of monoidreduce.statistics, one a head",)
        elif operator not in DECODING:
            before = _of_folds(call, run)
        return explanation_of(operator, run, gpu, where, before)
    given = run.ops[-1].arguments
    forward, backward = passes_of(run)
    dtype = _leading(given).dtype
    if gpu is None:
        reasons = [*where, *_of_isa(forward)]
        deterministic, tiles = True, _cpu_tiles(operator, call, run)
    else:
        deterministic, order = order_of(backward)
        plans = zip(WAYS, (forward.plan, backward.plan), strict=True)
        reasons = [*where, order, *(f"{way}: {plan}" for way, plan in plans if plan is not None)]
        reasons += [*_copies(run), *_saved(forward, backward, given, fold_of(operator))]
        if run.ops[-1].name.endswith("_parts"):
            folds = [x for x in run.launches if x.name.endswith("_forward")]
            at_once = max(x.arguments["x"].shape[0] for x in folds)
            reasons.append(f"the forward pass computes the gradients, of {at_once} tokens at a time")
        tiles = None
    of_torch = (
        _of_large_mlp(run, (forward, backward)) if run.ops[-1].name == "mlp" and gpu is not None else []
    )
    reasons += of_torch
    if forward.launch is None and not of_torch:
        reasons.append("there is nothing to fold: torch fills the results")
    workspace = given.get("workspace") if forward.of_products or backward.of_products else None
    if "workspace" in call:
        workspace = functional.workspace_bytes(call["workspace"])
    if is_wide(run):
        workspace = attention_wide.WORKSPACE
        reasons += OF_WIDE_HEADS
    if "gate" in given:
        reasons += _of_gate(run, forward)
    if "program" in given:
        tier = None if forward.plan is None else forward.plan.tier
        reasons += _of_mods(operator, call, given["program"], gpu is not None, tier)
        table = given.get("table")
        if table is not None and table.requires_grad:
            reasons.append(_of_tables(run))
    reasons.append(of_dtypes(dtype))
    if call.get("sinks") is not None and forward.launch is not None:
        reasons.append(_of_sinks(call, run))
    return Explanation(
        operator=operator,
        forward=forward.path,
        backward=backward.path,
        architecture=architecture_of(gpu),
        tiles=tiles,
        workspace=workspace,
        deterministic=deterministic,
        reasons=tuple(reasons),
    )


def fold_of(operator: str) -> Fold:
    """What an operator folds; its arguments have the names of its op's."""
    if operator in DECODING:
        return Fold(a="x", b="weight")
    return OPERATORS["modified_attention" if operator == "attend" else operator].fold


def differentiated(operator: str, call: dict[str, Any]) -> tuple[str, ...]:
    """The tensors that require gradients or, if there are none, the operator's matrices."""
    teacher = call.get("teacher_grad")
    frozen: tuple[str, ...] = (
        () if not isinstance(teacher, Tensor) and teacher else ("teacher_x", "teacher_weight")
    )
    if not torch.is_grad_enabled():  # a call refuses gradients of these only where it is recorded
        frozen += ("class_weight", "temperature")
    floating = [
        name
        for name, t in call.items()
        if isinstance(t, Tensor) and t.is_floating_point() and name not in frozen
    ]
    matrices = (*fold_of(operator).operands.values(), "gate")
    wanted = tuple(name for name in floating if call[name].requires_grad)
    return wanted or tuple(name for name in matrices if name in floating)


def _of_isa(forward: Pass) -> list[str]:
    _, _, isa, dtype = forward.path.split("/")
    return [] if isa == _C.cpu_isa() else [f"{_C.cpu_isa()} has nothing of its own for {dtype}"]


def _copies(run: DryRun) -> list[str]:
    """Which operands are copied for tensor cores, beside those whose width is padded: plans say so."""
    given, reasons = run.ops[-1].arguments, []
    on_tensor_cores = [x for x in run.launches if x.plan is not None and x.plan.tensor_cores]
    fold = OPERATORS[run.ops[-1].name].fold
    for name in (*dict.fromkeys(fold.operands.values()), "bias"):
        copying = [x.plan for x in on_tensor_cores if name in x.copied]
        if not copying:
            continue
        t, plan = given[name], copying[0]
        assert plan is not None
        is_bias = name == "bias"
        if (is_bias and t.dim() > 1) or (not is_bias and t.shape[-1] % 8 == 0 and not memory.is_aligned(t)):
            is_weight = fold.payload is None and name in (fold.b, fold.other_b)
            transposed = is_weight and plan.transposed and not plan.narrow
            wanted = f"{LINES}, or its transpose's" if transposed else LINES
            reasons.append(f"{name} is copied: its strides are {t.stride()}, not {wanted}")
    return reasons


def _saved(forward: Pass, backward: Pass, given: dict[str, Any], fold: Fold) -> list[str]:
    """For how many columns a forward pass saves local gradients, or softmax weights.

    Empty if its kernels save none for any call, and for a narrow log-sum-exp, whose gradients are folds.
    """
    plan, launch = forward.plan, forward.launch
    folds = backward.plan is not None and backward.plan.narrow
    if plan is None or launch is None or folds or "keep" not in given:
        return []
    kept = launch.arguments.get("kept")
    if kept is None and not plan.keeps:
        return []
    columns, count = len(given[fold.b]), 0 if kept is None else kept.shape[1]
    once = launch.name == "log_probs_forward"
    what = "softmax weights" if once else "local gradients"
    of = "classes" if fold.b == "weight" else "columns"
    reasons = [
        f"a forward pass that will be differentiated keeps {what} of {count} of {columns} {of}; "
        f"the backward pass computes the other {columns - count} again"
    ]
    if once and count:
        reasons.append("a backward pass of a graph that is retained computes those again too")
    return reasons


OF_WIDE_HEADS = (
    "heads wider than 256 are folded by contractions, for which NVRTC compiles programs once",
    "weights of all pairs are stored in 16 bits, of some keys at a time, and multiplied",
    "a weight is 0 where a mask excludes a pair",
)


def is_wide(run: DryRun) -> bool:
    """Whether a call of attention folds by programs, because its heads are wide."""
    return run.ops[-1].name == "attention" and any(x.name == "statistics_fold" for x in run.launches)


def _parts(run: DryRun) -> Tiles:
    """The rows and hidden units that an MLP with a gate has at a time, forward and backward."""

    def part(name: str) -> tuple[int, int]:
        first = next((x for x in run.launches if x.name == name), None)
        rows, units = (0, 0) if first is None else _leading(first.arguments).shape
        return rows, units

    return part("gated_hidden"), part("gated_gradient")


def _of_gate(run: DryRun, forward: Pass) -> list[str]:
    given = run.ops[-1].arguments
    rows, units = len(given["x"]), len(given["w1"])
    parts = zip(("forward", "backward"), _parts(run), strict=True)
    in_planes = any(x.name == "plane_product" for x in run.launches)
    whose = "torch's" if not in_planes else "float32 as planes of float16, on tensor cores, through sm_90a"
    return [
        f"with a gate all matrix products are {whose}; the kernel takes what is between them",
        *(
            f"{way}: parts of {part[0]} of {rows} rows and {part[1]} of {units} hidden units"
            for way, part in parts
        ),
        f"hidden values are {forward.path.split('/')[-1]}",
    ]


def _of_large_mlp(run: DryRun, passes: tuple[Pass, Pass]) -> list[str]:
    """For a large float32 MLP, which passes torch computes, or why it does not. Empty for other MLPs."""
    given, reasons = run.ops[-1].arguments, []
    x, w1, w2, workspace = (given[name] for name in ("x", "w1", "w2", "workspace"))
    for way, of in zip(WAYS, passes, strict=True):
        backward = way == "backward"
        if of.plan is None or of.plan.tensor_cores or not mlp_by_torch.is_large(x, w1, w2):
            continue
        part = mlp_by_torch.held_part(x, w1, w2, workspace, backward)
        if why := mlp_by_torch.obstacle(part):
            reasons.append(f"{way}: torch does not multiply: {why}")
        elif (first := first_product(run, backward)) is not None:
            rows, units = first
            reasons.append(
                f"{way}: all matrix products and activations are torch's, in parts of {rows} of {len(x)} "
                f"rows and {units} of {len(w1)} hidden units"
            )
    return reasons


def _of_folds(call: dict[str, Any], run: DryRun) -> tuple[str, ...]:
    """Why a call of `linear_distillation` runs two folds of programs."""
    how = "biases, jsd and a target are two folds of monoidreduce.statistics, of log-sum-exps and of the loss"
    if call["loss"] != "jsd":
        return (how,)
    given = run.ops[-1].arguments
    operands = (given["a"], given["b"], given["other_a"], given["other_b"])
    biased = call["bias"] is not None or call["teacher_bias"] is not None
    hard = call["target"] is not None and call["hard_weight"] > 0
    with torch.enable_grad():
        why = stored_scores.obstacle_of_call(operands, "jsd", call["reduction"], biased or hard)
    return how, f"scores are not stored: {why or stored_scores.ONLY_HOPPER}"


def _of_stored_scores(run: DryRun, gpu: _C.DeviceFacts | None, where: list[str]) -> Explanation:
    """What the loss "jsd" runs where scores are stored."""
    given, (forward, backward) = run.ops[-1].arguments, passes_of(run)
    rows, classes = len(given["x"]), len(given["weight"])
    slices = {name: [x for x in run.launches if x.name == name] for name in ("jsd_rows", "jsd_gradient")}
    at_once = slices["jsd_rows"][0].arguments["student"].shape[0]
    again = [x.arguments["student"].shape[1] for x in slices["jsd_gradient"]]
    reasons = [f"scores of {at_once} of {rows} rows at a time are stored in float32"]
    if at_once < rows and any(x.name == "columns_product" for x in run.launches):
        kept = f"local gradients of the last {classes - sum(again)} of {classes} classes are kept"
        reasons.append(f"{kept}, in the memory of the weights' gradient and in the workspace")
    if again:
        reasons.append(f"scores of the others are computed again, {again[0]} classes at a time")
    return Explanation(
        operator="linear_distillation",
        forward=forward.path,
        backward=backward.path,
        architecture=architecture_of(gpu),
        tiles=None,
        workspace=given["workspace"],
        deterministic=True,
        reasons=(
            *reasons,
            *where,
            "gradients are computed in the forward pass; the backward pass multiplies them by a number",
            "gradients are matrix products of local gradients, added in a fixed order",
            of_dtypes(given["x"].dtype),
        ),
    )


def _of_sinks(call: dict[str, Any], run: DryRun) -> str:
    if is_wide(run):
        return "torch joins the sinks to the log-sum-exps of rows, before weights are computed"
    if any("sinks" in x.arguments for x in run.launches):
        return "the kernels join the sinks, where the fold of a row ends"
    return "torch joins the sinks, behind a bias by rows: it reads and writes the output once more"


def _of_mods(operator: str, call: dict[str, Any], program: str, on_gpu: bool, tier: str | None) -> list[str]:
    """What there is to say of functions that modify scores. tier: of a GPU's kernels, if any run."""
    blocks = call.get("block_mask")  # attention_varlen has none
    how = "kernels are compiled for, at the first call" if on_gpu else "the CPU engine interprets"
    functions = "score_mod and mask_mod" if operator != "attend" else "weight and mask_mod"
    if call.get("dropout_p"):
        functions += ", softcap, bias and dropout beside them,"
    reasons = [f"{functions} are a program of {len(parse(program).nodes)} operations, which {how}"]
    if call.get("normalized"):
        wide = call["v"].shape[-1]
        reasons.append(
            f"normalized: the sum of the weights is one more column of v, {wide + 1} in place of {wide}"
        )
        if dtype_of_weights(call["v"].dtype) != call["v"].dtype:
            reasons.append(
                "normalized: in float16 the call computes in float32, as weights may be of any size"
            )
    if blocks is not None:
        skipped = f"of {blocks.kinds.numel()} blocks {int((blocks.kinds == 0).sum())} are skipped"
        simt = tier is not None and not _C.FAMILIES[tier].tensor_cores
        tile = ", in tiles of 64 queries and 64 keys that meet no other block" if simt else ""
        reasons.append(skipped + tile)
    return reasons


def _of_tables(run: DryRun) -> str:
    of_tables = [launch for launch in run.launches if "d_table" in launch.arguments]
    if of_tables:
        found = "the backward kernels add up the gradients of captured tensors"
        if not all(launch.plan is not None and launch.plan.planes for launch in of_tables):
            found += " whose index has the key"
        if torch.are_deterministic_algorithms_enabled():
            found += ", as integers; they run twice, first to find the largest addends"
        return found
    return (
        "gradients of captured tensors are folds; torch computes those of an index with query and key, in "
        "chunks of keys"
    )


def _way_out(op: Any, name: str) -> str:
    """What tells more of a function that has no kernels of its own among the operators."""
    if isinstance(op, CppMonoid):
        return "; its own explain(a, b) tells its kernels, and there is no model of their time"
    if name in ("fold", "merge_attention"):
        return f"; {name} runs kernels of torch, on any device"
    return ""


def resolved(op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of the operator that a call runs, and all its arguments by name, in the operator's order."""
    if isinstance(op, str):
        if op not in FUNCTIONS:
            raise ValueError(mismatch("op", f"one of {', '.join(FUNCTIONS)}", repr(op)) + _way_out(op, op))
        op = FUNCTIONS[op]
    elif isinstance(op, torch.nn.Module):
        inspect.signature(op.forward).bind(*arguments, **options)  # it takes fewer than the operator
        forward = type(op).forward
        if forward is nn.MLP.forward:
            names = ("w1", "w2", "activation", "bias1", "bias2", "gate", "gate_bias")
            op, options = functional.mlp, options | {name: getattr(op, name) for name in names}
        elif function := getattr(forward, "function", None):
            own: Any = op.options
            for name in options.keys() & own.keys():
                raise TypeError(mismatch(name, "no value, since the module has one", repr(options[name])))
            op, options = function, options | own
    name = getattr(op, "__name__", "")
    if name not in FUNCTIONS or inspect.unwrap(op) is not FUNCTIONS[name]:
        expected = (
            f"one of {', '.join(FUNCTIONS)}, its name, a module of monoidreduce.nn or a functools.partial"
        )
        raise TypeError(mismatch("op", expected, f"{type(op).__name__} {name}".rstrip()) + _way_out(op, name))
    signature = inspect.signature(op)
    try:
        bound = signature.bind(*arguments, **options)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    bound.apply_defaults()
    device = getattr(next(iter(bound.arguments.values())), "device", None)
    annotations = {name: str(parameter.annotation) for name, parameter in signature.parameters.items()}
    call = {name: _as_number(name, a, annotations[name], device) for name, a in bound.arguments.items()}
    if unknown := call.pop("others", None):
        refuse(name, unknown)
    return name, call


def _as_number(name: str, value: Any, annotation: str, device: torch.device | None) -> Any:
    """Convert an option to a Python number, if it is one (a 0-d tensor, a number of numpy).

    This comes before the dry run, in which tensors have no values to read.

    device: of the call. A number that may also be a tensor is not read where kernels read it there.
    """
    if annotation.startswith("Window") and isinstance(value, (tuple, list)):
        return tuple(number_of(name, side, "an int") for side in value)
    if not annotation.startswith(("float", "int")):
        return value
    if isinstance(value, Tensor) and "Tensor" in annotation:
        if value.dim() or (value.is_floating_point() and value.device == device):
            return value
    elif isinstance(value, Tensor) and value.dim():
        return value  # which the call refuses
    return number_of(name, value, "a number")


def _leading(call: dict[str, Any]) -> Any:
    """The first argument, which has the device and the dtype of the call."""
    return next(iter(call.values()))


def tiles_of(operator: str, call: dict[str, Any], dtype: torch.dtype) -> Tiles:
    """The tiles of the forward and the backward pass of an operator's call on the CPU."""
    fold, operands = fold_of(operator), dict[str, Tensor | None]()
    for role, name in fold.operands.items():
        t = call[name].mT if role == "payload" and fold.transposed else call[name]
        t = t.transpose(0, 1)[None] if operator == "attention_varlen" else t
        operands[role] = torch.empty((), dtype=dtype).expand(t.shape)
    bias = call.get("bias")
    return cpu_tiles(operands, bias is not None and bias.requires_grad)


def _cpu_tiles(operator: str, call: dict[str, Any], run: DryRun) -> Tiles:
    if "gate" in run.ops[-1].arguments:
        return _parts(run)
    return tiles_of(operator, call, _leading(run.ops[-1].arguments).dtype)
