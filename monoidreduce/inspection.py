"""What this build can do here, and which kernel a call would run."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from monoidreduce import _C, functional, nn, varlen
from monoidreduce._keywords import refuse
from monoidreduce._ops import (
    attention,
    attention_wide,
    cross_entropy,
    gated_mlp,
    linear_loss,
    log_probs,
    logsumexp,
    memory,
    mlp,
)
from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._ops.stored_scores import Layout
from monoidreduce._torch_private import FakeTensorMode
from monoidreduce._validate import FLOATING, mismatch, number_of
from monoidreduce._version import __version__
from monoidreduce.explanation import Explanation, architecture_of, name_of
from monoidreduce.folds.attend import attend, dtype_of_weights, traced_mods
from monoidreduce.folds.block_mask import as_block_mask
from monoidreduce.folds.cpp_monoid import CppMonoid
from monoidreduce.folds.cuda import attention_cuda
from monoidreduce.folds.distillation import Distillation
from monoidreduce.folds.program.program import parse
from monoidreduce.folds.statistics import Statistics
from monoidreduce.theory.hardware import find
from monoidreduce.workspace import get_workspace

__all__ = ["backend_info", "explain"]

# The names under which `_C` counts the kernels of each operator.
KERNELS = {
    "attention": "attention",
    "attention_varlen": "attention",
    "attend": "attention",
    "linear_cross_entropy": "cross_entropy",
    "linear_distillation": "distillation",
    "linear_log_probs": "log_probs",
    "mlp": "mlp",
    "logsumexp_matmul": "logsumexp",
}
FUNCTIONS: dict[str, Any] = {
    name: attend if name == "attend" else getattr(varlen if name == "attention_varlen" else functional, name)
    for name in KERNELS
}
# Operators whose gradients are products of local gradients on tensor cores; an MLP in parts is another.
OF_PRODUCTS = ("linear_cross_entropy", "linear_distillation", "linear_log_probs", "logsumexp_matmul")
MODULES = {
    nn.Attention.forward: functional.attention,
    nn.LinearCrossEntropyLoss.forward: functional.linear_cross_entropy,
    nn.LinearDistillationLoss.forward: functional.linear_distillation,
}
# Arguments of attention with which its kernels run a program, as attend's do.
MODS = ("score_mod", "mask_mod", "block_mask")
# What tensor-core kernels read without a copy.
LINES = "rows of adjacent elements, on 16-byte boundaries"
# The operators as folds of rows a and columns b (fold.h).
OPERANDS = {
    "attention": {"a": "q", "b": "k", "payload": "v"},
    "attention_varlen": {"a": "q", "b": "k", "payload": "v"},
    "attend": {"a": "q", "b": "k", "payload": "v"},
    "linear_cross_entropy": {"a": "x", "b": "weight"},
    "linear_distillation": {"a": "x", "b": "weight", "other_a": "teacher_x", "other_b": "teacher_weight"},
    "linear_log_probs": {"a": "x", "b": "weight"},
    "mlp": {"a": "x", "b": "w1", "payload": "w2"},
    "logsumexp_matmul": {"a": "a", "b": "b"},
}


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
            f"{torch.cuda.get_device_name(index)}, {architecture_of(torch.device('cuda', index))}"
            for index in range(count)
        ],
        "paths": {
            operator: {
                "cpu": _paths(operator, "cpu"),
                "cuda": _paths(operator, "cuda") if build["cuda"] and count else None,
            }
            for operator in KERNELS
            if operator != "attend"  # attention's
        },
    }


def _paths(operator: str, device: str) -> dict[str, str]:
    """The path of an ordinary call, by dtype."""
    shapes = {"attention": (1, 1, 128, 128), "attention_varlen": (128, 1, 128)}
    tensors, shape = len(OPERANDS[operator]), shapes.get(operator, (128, 128))
    paths = {}
    for dtype in FLOATING:
        call = [torch.empty(shape, dtype=dtype, device=device)] * tensors
        if operator in ("linear_cross_entropy", "linear_log_probs"):
            call.append(torch.zeros(128, dtype=torch.int64, device=device))
        if operator == "attention_varlen":
            call.append(torch.zeros(2, dtype=torch.int64, device=device))
        _, kind, tier, _ = explain(operator, *call).forward.split("/")
        paths[name_of(dtype)] = f"{kind}/{tier}"
    return paths


def explain(
    op: str | Callable[..., Any], /, *arguments: Any, hardware: str | None = None, **options: Any
) -> Explanation:
    """Which kernels `op(*arguments, **options)` would run, and why. Nothing is computed.

    Args:
        op: an operator that has kernels of its own, as `monoidreduce.mlp`, or its name, as "mlp". Or a module
            of `monoidreduce.nn`, or a `functools.partial` of one of them. Without hardware it may also be
            what `monoidreduce.statistics` or `monoidreduce.cpp_monoid` returns.
        arguments, options: as the call has them, tensors by position or by name.
        hardware: a GPU of `monoidreduce.hardware.HARDWARE`, as "h100", that the call is explained for. It
            need not be there, and the tensors may be on any device, "meta" too. A build without
            CUDA explains what one for all GPUs would run. None: the device of the tensors.

    Raises:
        TypeError, ValueError: the call would, op is none of these, or the tensors are on another device than
            a CPU or a GPU.
        RuntimeError: the tensors are on a GPU and this build is CPU-only.
    """
    if isinstance(op, (Statistics, CppMonoid)) and hardware is None:
        return op.explain(*arguments, **options)
    operator, call = resolved(op, arguments, options)
    if operator == "linear_distillation" and functional.distils_by_statistics(
        *(call[name] for name in ("loss", "bias", "teacher_bias", "target", "hard_weight"))
    ):
        return _explain_distillation(call, hardware)
    dtype = _checked_dtype(operator, call)
    if call.get("normalized"):
        dtype = dtype_of_weights(dtype)
    modified = is_modified(operator, call)
    passes = ["forward", "backward"]
    device, tiles, in_parts = _leading(call).device, None, False
    if hardware is None and device.type not in ("cpu", "cuda"):
        raise ValueError(
            mismatch("tensors", "tensors on the CPU or on a GPU, or the name of hardware", device)
        )
    if hardware is not None or device.type == "cuda":
        if hardware is None and not _C.build_info()["cuda"]:
            raise RuntimeError(f"the tensors are on {device} and this build of monoidreduce is CPU-only")
        gpu = None if hardware is None else find(hardware).facts()
        architecture = architecture_of(device) if gpu is None else f"sm_{gpu.major}{gpu.minor}"
        if call.get("gate") is not None:
            return _explain_gated_mlp(call, dtype, architecture, on_gpu=True)
        if operator == "attention" and (wide := wide_plans(call, dtype, gpu)):
            return _explain_wide_attention(wide, dtype, architecture, sinks=call["sinks"] is not None)
        forward, backward, more = _plans(operator, call, dtype, gpu)
        in_parts = all(backward.part)
        asked = torch.are_deterministic_algorithms_enabled()
        multiplied = operator in OF_PRODUCTS and backward.tensor_cores and not backward.narrow
        products = in_parts or multiplied
        deterministic = asked or products or not backward.adds_rows
        ordered = "/deterministic" if asked and not products and not modified else ""
        passes = ["fold", "pull"] if modified else passes
        engines = [f"cuda/{forward.tier}", f"cuda/{backward.tier}{ordered}"]
        reasons = [
            f"the tensors are on {device}, {torch.cuda.get_device_name(device)}"
            if hardware is None
            else f"the GPU is to be of the kind {hardware}",
            "torch.use_deterministic_algorithms(True) is in force: gradients are added in a fixed order"
            if asked
            else "gradients are matrix products of local gradients, added in a fixed order"
            if products
            else "a gradient is summed by one block each, in a fixed order"
            if not backward.adds_rows
            else "gradients are added atomically; torch.use_deterministic_algorithms(True) fixes their order",
            f"forward: {forward}",
            f"backward: {backward}",
            *more,
        ]
    elif call.get("gate") is not None:
        return _explain_gated_mlp(call, dtype, _C.cpu_isa(), on_gpu=False)
    else:
        isa, architecture = _C.cpu_isa_of(torch.empty(0, dtype=dtype)), _C.cpu_isa()
        engines, deterministic = [f"cpu/{isa}"] * 2, True
        tiles = cpu_tiles(operator, call, dtype)
        reasons = [
            f"the tensors are on the CPU, which has {', '.join(_C.cpu_isas())}",
            f"{_C.cpu_isa()} is the last of these, or what MONOIDREDUCE_CPU_ISA names",
            *([] if isa == _C.cpu_isa() else [f"{_C.cpu_isa()} has nothing of its own for {name_of(dtype)}"]),
            f"{torch.get_num_threads()} threads: for a given number of threads sums have a fixed order",
        ]
    if modified:
        tiers = {engine.split("/")[1] for engine in engines if engine.startswith("cuda")}
        reasons += _of_mods(operator, call, tiers)
    reasons.append(
        f"the inputs are {name_of(dtype)}, sums and statistics {name_of(accumulation_dtype(dtype))}"
    )
    if call.get("sinks") is not None:
        reasons.append(_of_sinks(call))
    workspace = get_workspace() if in_parts else None
    if "workspace" in call:
        workspace = functional.workspace_bytes(call["workspace"])
    kernels = f"modified_{KERNELS[operator]}" if modified else KERNELS[operator]
    return Explanation(
        operator=operator,
        forward=f"{kernels}_{passes[0]}/{engines[0]}/{name_of(dtype)}",
        backward=f"{kernels}_{passes[1]}/{engines[1]}/{name_of(dtype)}",
        architecture=architecture,
        tiles=tiles,
        workspace=workspace,
        deterministic=deterministic,
        reasons=tuple(reasons),
    )


def _explain_distillation(call: dict[str, Any], hardware: str | None) -> Explanation:
    """What a call of `linear_distillation` runs that its built-in fold has not."""
    if hardware is not None:
        expected = "None beside bias, teacher_bias, target or the loss jsd"
        raise ValueError(mismatch("hardware", expected, repr(hardware)))
    names = ("x", "weight", "teacher_x", "teacher_weight", "mask", "reduction", "loss", "temperature")
    folds = functional.distillation_folds(
        (*(call[name] for name in names), call["teacher_grad"]),
        (call["bias"], call["teacher_bias"]),
        call["beta"],
        (call["target"], call["hard_weight"], call["ignore_index"]),
        call["workspace"],
    )
    obstacle = folds.obstacle(call["reduction"])
    if obstacle is None:
        return _explain_stored_scores(folds, call)
    found = folds.explain()
    how = "biases, jsd and a target are two folds of monoidreduce.statistics, of log-sum-exps and of the loss"
    why = [f"scores are not stored: {obstacle}"] if folds.loss == "jsd" else []
    return replace(found, operator="linear_distillation", reasons=(how, *why, *found.reasons))


def _explain_stored_scores(folds: Distillation, call: dict[str, Any]) -> Explanation:
    """What the loss "jsd" runs where scores are stored, with a gradient of the weights."""
    x, weight, *_ = folds.operands
    rows, (classes, width) = len(x), weight.shape
    workspace = get_workspace() if folds.workspace is None else folds.workspace
    layout = Layout.of(rows, classes, width, workspace, keeps=True)
    reasons = [f"scores of {layout.at_once} of {rows} rows at a time are stored in float32"]
    if layout.at_once < rows:
        kept = f"local gradients of the last {classes - layout.own.start} of {classes} classes are kept"
        reasons.append(f"{kept}, in the memory of the weights' gradient and in the workspace")
    if layout.again:
        reasons.append(f"scores of the others are computed again, {layout.again} classes at a time")
    return Explanation(
        operator="linear_distillation",
        forward=f"jsd_forward/cuda/sm90/{name_of(x.dtype)}",
        backward=f"jsd_backward/cuda/sm90/{name_of(x.dtype)}",
        architecture=architecture_of(x.device),
        tiles=None,
        workspace=workspace,
        deterministic=True,
        reasons=(
            *reasons,
            "gradients are computed in the forward pass; the backward pass multiplies them by a number",
            "gradients are matrix products of local gradients, added in a fixed order",
        ),
    )


def _explain_gated_mlp(
    call: dict[str, Any], dtype: torch.dtype, architecture: str, on_gpu: bool
) -> Explanation:
    """What an MLP with a gate would run, on any GPU or on the CPU."""
    *rows, width = call["x"].shape
    count, (outputs, units) = math.prod(rows), call["w2"].shape
    hidden, workspace = gated_mlp.hidden_dtype(dtype, on_gpu), get_workspace()
    parts = (
        gated_mlp.forward_part(count, units, hidden, workspace),
        gated_mlp.backward_part(count, width, units, outputs, hidden, workspace),
    )
    engine = "cuda/simt" if on_gpu else f"cpu/{_C.cpu_isa_of(torch.empty(0, dtype=hidden))}"
    return Explanation(
        operator="mlp",
        forward=f"mlp_forward/{engine}/{name_of(hidden)}",
        backward=f"mlp_backward/{engine}/{name_of(hidden)}",
        architecture=architecture,
        tiles=None if on_gpu else parts,
        workspace=workspace,
        deterministic=True,
        reasons=(
            "with a gate torch takes all matrix products, and the kernel what is between them",
            *(
                f"{way}: parts of {part[0]} of {count} rows and {part[1]} of {units} hidden units"
                for way, part in zip(("forward", "backward"), parts, strict=True)
            ),
            "gradients are matrix products of local gradients, added in a fixed order",
            f"the inputs are {name_of(dtype)}, hidden values {name_of(hidden)}, "
            f"sums {name_of(accumulation_dtype(dtype))}",
        ),
    )


def wide_plans(
    call: dict[str, Any], dtype: torch.dtype, gpu: _C.DeviceFacts | None
) -> tuple[_C.Plan, _C.Plan] | None:
    """The plans of a call that folds by programs, because its heads are wide; else None."""
    q, k, v = (call[name].detach().to(dtype) for name in "qkv")
    scale = None if call["scale"] is None else float(call["scale"])
    scores = attention.Scores(
        attention.score_scale(q, scale),
        functional.softcap_value(call["softcap"]),
        *functional.bounds(call["causal"], call["window"]),
    )
    if is_modified("attention", call) or not attention_wide.takes(q, k, v, call["bias"], scores, False, gpu):
        return None
    return attention_wide.plans(q, k, v, gpu)


def _explain_wide_attention(
    plans: tuple[_C.Plan, _C.Plan], dtype: torch.dtype, architecture: str, sinks: bool
) -> Explanation:
    forward, backward = plans
    of_sinks = ("torch joins the sinks to the log-sum-exps of rows, before weights are computed",)
    return Explanation(
        operator="attention",
        forward=f"statistics_fold/cuda/{forward.tier}/{name_of(dtype)}",
        backward=f"statistics_local_gradient/cuda/{backward.tier}/{name_of(dtype)}",
        architecture=architecture,
        tiles=None,
        workspace=attention_wide.WORKSPACE,
        deterministic=True,
        reasons=(
            "heads wider than 256 are folded by contractions, for which NVRTC compiles programs once",
            f"forward: {forward}",
            f"backward: {backward}",
            "weights of all pairs are stored in 16 bits, of some keys at a time, and multiplied",
            "a weight is 0 where a mask excludes a pair",
            *(of_sinks if sinks else ()),
            f"the inputs are {name_of(dtype)}, sums and statistics {name_of(accumulation_dtype(dtype))}",
        ),
    )


def _of_sinks(call: dict[str, Any]) -> str:
    bias = call.get("bias")
    if bias is not None and functional.raises_rows(bias):
        return "torch joins the sinks, behind a bias by rows: it reads and writes the output once more"
    return "the kernels join the sinks, where the fold of a row ends"


def is_modified(operator: str, call: dict[str, Any]) -> bool:
    """Do the kernels of a call run a program."""
    return operator == "attend" or any(call.get(name) is not None for name in MODS)


def _of_mods(operator: str, call: dict[str, Any], tiers: set[str]) -> list[str]:
    """What there is to say of functions that modify scores. tiers: of a GPU's kernels; none: on a CPU."""
    weight, mods = call.get("weight"), (call.get(name) for name in MODS)
    traced, blocks = traced_mods(*mods, weight=weight, packed="cu_seqlens_q" in call)
    how = "kernels are compiled for, at the first call" if tiers else "the CPU engine interprets"
    functions = "score_mod and mask_mod" if operator != "attend" else "weight and mask_mod"
    reasons = [f"{functions} are a program of {len(parse(traced.text).nodes)} operations, which {how}"]
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
        simt = any(not _C.FAMILIES[tier].tensor_cores for tier in tiers)
        tile = ", in tiles of 64 queries and 64 keys that meet no other block" if simt else ""
        reasons.append(skipped + tile)
    return reasons


def _way_out(op: Any, name: str) -> str:
    """What tells more of a function that has no kernels of its own among the operators."""
    if isinstance(op, (Statistics, CppMonoid)):
        name = getattr(op, "__name__", "f")
        return f"; {name}.explain(a, b) tells its kernels where a is, and there is no model of its time"
    if name in ("map_reduce", "fold", "merge_attention"):
        return f"; {name} runs kernels of torch, on any device"
    return ""


def resolved(op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of the operator that a call runs, and all its arguments by name, in the operator's order."""
    if isinstance(op, functools.partial):
        return resolved(op.func, (*op.args, *arguments), {**op.keywords, **options})
    if isinstance(op, str):
        if op not in KERNELS:
            raise ValueError(mismatch("op", f"one of {', '.join(KERNELS)}", repr(op)) + _way_out(op, op))
        op = FUNCTIONS[op]
    elif isinstance(op, torch.nn.Module):
        inspect.signature(op.forward).bind(*arguments, **options)  # it takes fewer than the operator
        forward = type(op).forward
        if forward is nn.MLP.forward:
            names = ("w1", "w2", "activation", "bias1", "bias2", "gate", "gate_bias")
            op, options = functional.mlp, options | {name: getattr(op, name) for name in names}
        elif forward in MODULES:
            own: Any = op.options
            for name in options.keys() & own.keys():
                raise TypeError(mismatch(name, "no value, since the module has one", repr(options[name])))
            op, options = MODULES[forward], options | own
    name = getattr(op, "__name__", "")
    if name not in KERNELS or inspect.unwrap(op) is not FUNCTIONS[name]:
        expected = (
            f"one of {', '.join(KERNELS)}, its name, a module of monoidreduce.nn or a functools.partial"
        )
        raise TypeError(mismatch("op", expected, f"{type(op).__name__} {name}".rstrip()) + _way_out(op, name))
    signature = inspect.signature(op)
    try:
        bound = signature.bind(*arguments, **options)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    bound.apply_defaults()
    call = {n: _as_number(n, a, str(signature.parameters[n].annotation)) for n, a in bound.arguments.items()}
    if unknown := call.pop("others", None):
        refuse(name, unknown)
    return name, call


def _as_number(name: str, value: Any, annotation: str) -> Any:
    """Options that are numbers as such, while tensors have values: what is planned is a call without any."""
    if annotation.startswith("Window") and isinstance(value, (tuple, list)):
        return tuple(number_of(name, side, "an int") for side in value)
    per_token = isinstance(value, Tensor) and value.dim() > 0
    return (
        number_of(name, value, "a number")
        if annotation.startswith(("float", "int")) and not per_token
        else value
    )


def _leading(call: dict[str, Any]) -> Any:
    """The first argument, which has the device and the dtype of the call."""
    return next(iter(call.values()))


def cpu_tiles(
    operator: str, call: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The tiles of the forward and the backward pass of a call on the CPU."""
    operands: dict[str, Any] = dict.fromkeys(("other_a", "other_b", "payload"))
    for role, name in OPERANDS[operator].items():
        tensor = call[name].mT if name == "w2" else call[name]
        *rows, width = tensor.transpose(0, 1)[None].shape if operator == "attention_varlen" else tensor.shape
        shape = (*rows, width) if len(rows) == 3 else (1, 1, math.prod(rows), width)
        operands[role] = torch.empty((), dtype=dtype).expand(shape)  # the values do not count
    bias = call.get("bias")
    gradient = bias is not None and bias.requires_grad
    return _C.cpu_tiles(**operands, bias_gradient=gradient, threads=torch.get_num_threads())


def _modified_plans(
    tensors: tuple[Tensor, Tensor, Tensor],
    options: attention_cuda.Options,
    gpu: _C.DeviceFacts | None,
    spans: attention.Spans = attention.NO_SPANS,
    block_mask: Any = None,
) -> tuple[_C.Plan, _C.Plan]:

    kinds = None
    if block_mask is not None:
        blocks, q = as_block_mask(block_mask), tensors[0]
        kinds = blocks.kinds.expand(q.shape[0], q.shape[1], -1, -1)
        block_rows, block_columns = blocks.block
        options = options._replace(block_rows=block_rows, block_columns=block_columns)
    given = (*tensors, options, gpu, spans, kinds)
    return attention_cuda.plan_forward(*given), attention_cuda.plan_backward(*given)


def _plans(
    operator: str, call: dict[str, Any], dtype: torch.dtype, gpu: _C.DeviceFacts | None
) -> tuple[_C.Plan, _C.Plan, list[str]]:
    """The plans of the forward and the backward pass of a call on a GPU, and what else there is to say."""
    workspace = call.get("workspace")
    workspace = get_workspace() if workspace is None else workspace
    mode: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled(), "gpu": gpu}
    tensors = {name: t.detach().to(dtype) for name, t in call.items() if name in OPERANDS[operator].values()}
    needed = [call[name].requires_grad for name in OPERANDS[operator].values()]
    if operator in ("attention", "attend"):
        q, k, v = tensors.values()
        bias, scale = call.get("bias"), call["scale"]
        bias = None if bias is not None and functional.raises_rows(bias) else bias
        sums = bias is not None and bias.requires_grad and attention.sums_bias_gradient(q, k, bias)
        bias = None if bias is None else bias.detach().expand(*q.shape[:3], k.shape[2])
        scores = attention.Scores(
            attention.score_scale(q, None if scale is None else float(scale)),
            functional.softcap_value(call.get("softcap")),
            *functional.bounds(call["causal"], call["window"]),
        )
        if is_modified(operator, call):
            if call.get("normalized"):  # with a column of ones
                v = v.new_empty((*v.shape[:3], v.shape[3] + 1))
            blocks, of_call = (
                call["block_mask"],
                attention_cuda.Options(scores.scale, scores.left, scores.right),
            )
            forward, backward = _modified_plans((q, k, v), of_call, gpu, block_mask=blocks)
            return forward, backward, _copies(forward, backward, tensors)
        grad_out = v.new_empty(()).expand(*q.shape[:3], v.shape[3])
        forward = attention.plan_forward(q, k, v, bias, scores, gpu)
        backward = attention.plan_backward(q, k, v, bias, grad_out, scores, needed, sums, gpu)
        copied = bias is not None and (forward.bias_in_tiles or backward.bias_in_tiles)
        if bias is not None and copied and not memory.is_mapped_bias(bias):
            copies = [f"bias is copied: its strides are {bias.stride()}, not {LINES}"]
            return forward, backward, _copies(forward, backward, tensors) + copies
        return forward, backward, _copies(forward, backward, tensors)
    if operator == "attention_varlen":
        q, k, v = (t.transpose(0, 1)[None] for t in tensors.values())
        spans = attention.Spans(*(t.new_empty((t.shape[2], 2), dtype=torch.int64) for t in (q, k)))
        scale, softcap = call["scale"], functional.softcap_value(call["softcap"])
        factor = attention.score_scale(q, None if scale is None else float(scale))
        unbounded = attention.Scores(factor, softcap, -1, -1)
        grad_out = v.new_empty(()).expand(*q.shape[:3], v.shape[3])
        if is_modified(operator, call):
            forward, backward = _modified_plans((q, k, v), attention_cuda.Options(factor, -1, -1), gpu, spans)
        else:
            forward = attention.plan_forward(q, k, v, None, unbounded, gpu, spans)
            backward = attention.plan_backward(q, k, v, None, grad_out, unbounded, needed, False, gpu, spans)
        return forward, backward, _copies(forward, backward, dict(zip("qkv", (q, k, v), strict=True)))
    rows = next(iter(tensors))
    tensors[rows] = x = tensors[rows].reshape(-1, tensors[rows].shape[-1])
    if operator == "mlp":
        bias1 = None if call["bias1"] is None else call["bias1"].detach().to(dtype)
        forward = mlp.plan_mlp_forward(x, tensors["w1"], tensors["w2"], bias1, None, gpu)
        backward = mlp.plan_mlp_backward(x, tensors["w1"], tensors["w2"], bias1, None, gpu)
        return forward, backward, _copies(forward, backward, tensors)
    if operator == "logsumexp_matmul":
        scale = float(call["scale"])
        needed = needed if any(needed) else [True, True]
        mean = x if needed[0] else None
        forward = _C.plan_logsumexp_forward(x, tensors["b"], mean=mean, scale=scale, gpu=gpu)
        mean = mean if forward.narrow else None
        backward = logsumexp.plan_logsumexp_backward(x, tensors["b"], mean, needed, scale, workspace, gpu)
        return forward, backward, _copies(forward, backward, tensors)
    weight, differentiated = tensors["weight"], _wanted(call["x"], call["weight"])
    bias = call.get("bias")
    operands = (x, weight, None if bias is None else bias.detach().to(dtype))
    if operator == "linear_log_probs":
        scale = float(call["logit_scale"])
        score: dict[str, Any] = {"logit_scale": scale, "softcap": functional.softcap_value(call["softcap"])}
        best = x.new_empty(len(x), dtype=torch.int64) if call["top1"] else None
        forward = _C.plan_log_probs_forward(*operands, top1=best, **score, gpu=gpu)
        backward = _C.plan_log_probs_backward(*operands, logit_scale=scale, workspace=workspace, **mode)
        reasons = _copies(forward, backward, tensors)
        if forward.keeps:
            kept = linear_loss.saved_classes(x, weight, workspace, differentiated)
            if not log_probs.weights_can_be_saved(operands[2], score["softcap"], call["top1"]):
                kept = 0
            reasons.append(_says_kept("softmax weights", kept, len(weight)))
            if kept:
                reasons.append("a backward pass of a graph that is retained computes those again too")
        return forward, backward, reasons
    if operator == "linear_cross_entropy":
        with torch.no_grad():
            of_op = functional.checked_cross_entropy(call)
        (forward, backward, keeps), heads = cross_entropy.plan_cross_entropy(*of_op, workspace, gpu), 1
    else:
        teacher_x, scale = tensors["teacher_x"], float(call["temperature"])
        tensors["teacher_x"] = teacher_x = teacher_x.reshape(-1, teacher_x.shape[-1])
        of_heads = (x, weight, teacher_x, tensors["teacher_weight"])
        of_head = workspace // 2 if call["teacher_grad"] else workspace
        forward = _C.plan_distillation_forward(*of_heads, temperature=scale, gpu=gpu)
        backward = _C.plan_distillation_backward(*of_heads, temperature=scale, workspace=of_head, **mode)
        keeps, heads = call["loss"] != "reverse_kl" and not call["teacher_grad"], 2
    reasons = _copies(forward, backward, tensors)
    if forward.keeps:
        kept = linear_loss.saved_classes(x, weight, workspace, differentiated, heads) if keeps else 0
        reasons.append(_says_kept("local gradients", kept, len(weight)))
    return forward, backward, reasons


def _says_kept(what: str, kept: int, classes: int) -> str:
    return (
        f"a forward pass that will be differentiated keeps {what} of {kept} of {classes} "
        f"classes; the backward pass computes the other {classes - kept} again"
    )


def _wanted(operand: Tensor, other: Tensor) -> bool:
    """Is there to be a gradient of an operand: unless one is wanted of the other alone."""
    return operand.requires_grad or not other.requires_grad


def _copies(forward: _C.Plan, backward: _C.Plan, operands: dict[str, Tensor]) -> list[str]:
    """Which operands are copied for tensor cores where no width is padded."""
    if not (forward.tensor_cores or backward.tensor_cores):
        return []
    reasons = []
    for name, t in operands.items():
        of_weight = name in ("weight", "teacher_weight", "b")
        transposed = of_weight and forward.transposed and not forward.narrow
        readable = memory.is_mapped_weight(t, forward) if transposed else memory.is_mapped(t)
        if not readable and t.shape[-1] % 8 == 0:
            wanted = f"{LINES}, or its transpose's" if transposed else LINES
            reasons.append(f"{name} is copied in each pass: its strides are {t.stride()}, not {wanted}")
    return reasons


def _checked_dtype(operator: str, call: dict[str, Any]) -> torch.dtype:
    """The dtype that the kernels of a call work on, once its arguments have passed the call's own checks."""
    with FakeTensorMode() as mode:
        given = {n: a for n, a in call.items() if n not in MODS}  # whose tensors are not of this mode
        fake = {n: mode.from_tensor(a) if isinstance(a, Tensor) else a for n, a in given.items()}
        FUNCTIONS[operator](**fake)
        tensor = _leading(fake)
        return functional.autocast(tensor, functional.autocast_dtype(tensor)).dtype
