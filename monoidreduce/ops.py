"""The operators as `torch.library` ops: schemas, kernels, shapes for tracing, autograd.

Every operator is one forward op and one backward op in the namespace `monoidreduce`. The kernels allocate
their results with torch, so that the caching allocator, CUDA graphs and streams behave as for any torch op,
and `_C` fills them. Autograd keeps the inputs and the row statistics of the forward, never a score.

Row statistics, losses and gradient accumulators have the accumulation dtype: float32, or float64 for float64
inputs. A log-sum-exp is kept in two words: `lse`, and in `lse_low` what was lost in rounding it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from monoidreduce import _C, _torch_private
from monoidreduce._torch_private import (
    SingleLevelFunction,
    backend_is_next,
    below_autograd,
    current_stream,
    forward_ad_level,
    forward_ad_on,
    single_level,
    transforms_are_active,
)
from monoidreduce._validate import mismatch
from monoidreduce.flops import register_when_counted
from monoidreduce.local_gradients import (
    UNIT_UPSTREAM,
    Head,
    columns_in,
    columns_to_keep,
    gather_rows,
    multiply_local_gradients,
    order_rows,
    room_to_gather,
)
from monoidreduce.mlp_parts import multiply_hidden, multiply_hidden_gradients
from monoidreduce.workspace import get_workspace

__all__ = [
    "ACTIVATIONS",
    "DISTILLATION_LOSSES",
    "accumulation_dtype",
    "attention",
    "linear_cross_entropy",
    "linear_distillation",
    "logsumexp_matmul",
    "mlp",
]


def _choices(call: str, option: str) -> tuple[str, ...]:
    """The names of the values that an option of a call has, in the order of its enumeration."""
    return next(field.choices for field in _C.CALLS[call] if field.name == option)


ACTIVATIONS = _choices("mlp_forward", "activation")
DISTILLATION_LOSSES = _choices("distillation_forward", "kind")
SIMT = "simt"  # the GPU's kernels for everything; _C.*_tier tell where there are faster ones
HOPPER = "sm90"

# Collecting the Library object would unregister the ops, so it lives as long as the module.
_library: Any = torch.library.Library("monoidreduce", "DEF")  # type: ignore[no-untyped-call]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def allows_tf32(x: Tensor) -> bool:
    """Whether torch would let a GPU round x to tf32, as the factor of a matrix product."""
    return x.dtype == torch.float32 and x.is_cuda and _torch_private.allows_tf32()


def _statistics(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=accumulation_dtype(like.dtype))


def _new(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _gradient(of: Tensor, needed: bool) -> Tensor | None:
    """What a kernel writes a gradient to: on the CPU each element once, on a GPU by addition."""
    if not needed:
        return None
    return _accumulator(of) if of.is_cuda else _new(of)


def _bias_gradient(of: Tensor | None, needed: bool) -> Tensor | None:
    """What a kernel adds a bias gradient to."""
    return _accumulator(of) if of is not None and needed else None


def _accumulator(of: Tensor) -> Tensor:
    return torch.zeros_like(of, dtype=accumulation_dtype(of.dtype), memory_format=torch.contiguous_format)


def is_mapped(t: Tensor) -> bool:
    """Do tensor-core kernels read the tensor as it lies: rows dense, all else on 16 bytes."""
    if t.data_ptr() % 16 != 0:
        return False
    if t.is_contiguous() and t.shape[-1] % 8 == 0:
        return True
    *strides, last = t.stride()
    for stride, size in zip(strides, t.shape, strict=False):
        if size > 1 and (stride <= 0 or stride % 8 != 0):
            return False
    return last == 1


def _mapped(t: Tensor) -> Tensor:
    """The tensor, or a copy, as tensor-core kernels read it."""
    return t if is_mapped(t) else t.clone(memory_format=torch.contiguous_format)


def _padded(t: Tensor, axes: int = 1) -> Tensor:
    """The tensor as tensor-core kernels read it: as it is, or a copy whose last axes have sizes that are
    multiples of 8. Zeros do not change a product."""
    short = [axis for axis in range(-axes, 0) if t.shape[axis] % 8]
    if not short:
        return _mapped(t)
    sizes = [*t.shape]
    for axis in short:
        sizes[axis] += -sizes[axis] % 8
    padded = given = t.new_empty(sizes)
    for axis in short:
        size = t.shape[axis]
        given.narrow(axis, size, -size % 8).zero_()
        given = given.narrow(axis, 0, size)
    given.copy_(t)
    return padded


def is_mapped_weight(t: Tensor, tier: str) -> bool:
    """Do the contraction kernels read weights [V, D] as they lie: row by row or, on Hopper, as [D, V]."""
    return is_mapped(t) or (tier == HOPPER and is_mapped(t.mT))


def _padded_weight(t: Tensor, tier: str) -> Tensor:
    """The weights, or a copy, as the contraction kernels read them."""
    return t if t.shape[1] % 8 == 0 and is_mapped_weight(t, tier) else _padded(t)


def is_mapped_bias(bias: Tensor) -> bool:
    """Do Hopper's kernels read a bias [B, H, M, N] as it lies: rows dense, all else on 16 bytes."""
    step = 16 // bias.element_size()
    strides = [stride for stride, size in zip(bias.stride()[:-1], bias.shape[:-1], strict=True) if size > 1]
    dense = bias.stride(-1) == 1 or bias.shape[-1] == 1
    return bias.data_ptr() % 16 == 0 and dense and all(s % step == 0 for s in strides)


def _mapped_bias(bias: Tensor) -> Tensor:
    """The bias, or a copy, as Hopper's kernels read it."""
    if is_mapped_bias(bias):
        return bias
    step = 16 // bias.element_size()
    given = bias[tuple(slice(None if stride else 1) for stride in bias.stride())]
    copy = bias.new_empty((*given.shape[:-1], -(-given.shape[-1] // step) * step))[..., : given.shape[-1]]
    return copy.copy_(given).expand(bias.shape)


def _rounded(
    gradients: Iterable[Tensor | None], of: Sequence[Tensor | None], needed: Iterable[bool]
) -> list[Tensor]:
    """The gradients, each in the dtype of its input, and in its shape if that was padded; or _no_gradient."""
    return [
        _cut(gradient, t) if wanted and gradient is not None and t is not None else _no_gradient(of)
        for gradient, t, wanted in zip(gradients, of, needed, strict=True)
    ]


def _no_gradient(of: Sequence[Tensor | None]) -> Tensor:
    """What an op returns for a gradient that is not needed: vmap wants a fixed number of results."""
    assert of[0] is not None
    return of[0].new_empty(0)


def _cut(result: Tensor, like: Tensor) -> Tensor:
    """The first elements of each axis, in the shape and dtype of `like`, in one pass."""
    if result.shape == like.shape:
        return result if result.dtype == like.dtype else result.to(like.dtype)
    first = result[tuple(slice(size) for size in like.shape)]
    return like.new_empty(like.shape).copy_(first)


def _first(width: int, out: Tensor) -> Tensor:
    """The first elements of a result's rows, in memory of their own."""
    return out[..., :width].clone(memory_format=torch.contiguous_format)


def _reduced(losses: Tensor, reduction: str) -> Tensor | None:
    """Where a kernel leaves what `reduction` makes of the losses of tokens; None if they are wanted."""
    return None if reduction == "none" else losses.new_empty(())


def _count(counted: Tensor | None, reduction: str, like: Tensor) -> Tensor | None:
    """Of how many tokens a mean is, at least 1, where the host does not know it."""
    if counted is None or reduction != "mean":
        return None
    return counted.sum(dtype=like.dtype).clamp_(min=1)


def _unreduced(grad: Tensor, tokens: Tensor, count: Tensor | None, reduction: str) -> Tensor:
    """The gradients of the losses of tokens from that of their reduction (count None: all count)."""
    if reduction == "none":
        return grad
    if reduction == "mean":
        grad = grad / (max(tokens.numel(), 1) if count is None else count)
    return grad.expand(tokens.shape)


def _launch(on: Tensor) -> tuple[int, int]:
    """The threads of the CPU engine, or a GPU's stream."""
    return torch.get_num_threads(), current_stream(on.device.index) if on.is_cuda else 0


# Registration


def _names(arguments: str) -> list[str]:
    return [argument.split()[-1] for argument in arguments.split(", ")]


def _picker(indices: list[int]) -> Callable[[Any], Any]:
    """The elements at these indices of what it is given, faster than any loop in Python."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return itemgetter(slice(indices[0], indices[0] + 1)) if indices else lambda _: ()


def _any_requires_grad(args: tuple[Any, ...]) -> bool:
    for argument in args:  # noqa: SIM110 - half the time of any()
        if isinstance(argument, Tensor) and argument.requires_grad:
            return True
    return False


def _class_name(op_name: str) -> str:
    return "".join(word.capitalize() for word in op_name.split("_"))


def _autograd(
    name: str,
    op: Callable[..., Any],
    backend: Callable[..., Any],
    save: Callable[..., None],
    differentiate: Callable[..., Any],
) -> Callable[..., Any]:
    """The Autograd kernel of `op`, at half the cost of what `torch.library.register_autograd` makes.

    When this kernel runs, torch.func has chosen the level of its transforms to work at. `Function.apply`
    would ask it again; its base class, when allowed to, records that one level.

    name: of the op. Profilers, anomaly mode and `grad_fn` show it with "Backward" behind it.
    keys: those of the call; None where torch.func works at one of its levels.
    """

    def below(keys: Any, *args: Any) -> Any:
        if keys is not None and backend_is_next(keys):
            result = backend(*args)
        else:
            with below_autograd():
                result = op(*args)
        return tuple(result) if isinstance(result, list) else result  # a Function sees no tensors in a list

    class Recorded(SingleLevelFunction):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, keys: Any, *args: Any) -> Any:
            result = below(keys, *args)
            save(ctx, args, result)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return None, *differentiate(ctx, *grads)

    class Transformed(Recorded):
        @staticmethod
        def forward(ctx: Any, keys: Any, *args: Any) -> Any:
            with torch.enable_grad(), forward_ad_on(True):  # for the levels below
                return Recorded.forward(ctx, keys, *args)

    def applied(function: type) -> Callable[..., Any]:
        # torch names nodes after the class, when it is made.
        named: Any = type(function)(_class_name(name), (function,), {})
        apply: Callable[..., Any] = named.apply
        return apply

    record, transform = applied(Recorded), applied(Transformed)

    def kernel(keys: Any, *args: Any) -> Any:
        if transforms_are_active():
            with single_level():
                return transform(None, *args)
        # Forward-mode AD is not implemented: recording says so, where going on would drop the tangent.
        if (torch.is_grad_enabled() and _any_requires_grad(args)) or forward_ad_level() >= 0:
            return record(keys, *args)
        return below(keys, *args)

    return kernel


def _register(
    name: str,
    *,
    inputs: str,
    options: str,
    outputs: str,
    differentiable: str,
    residuals: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., list[Tensor]],
    constants: str = "",
    backward_options: str = "",
) -> Any:
    """Define the ops `name` and `name_backward` and return the former.

    name(inputs, options) -> outputs
    name_backward(a gradient or None for each differentiable output, inputs, residuals, options, needed,
                  backward_options)
        -> the gradients of the inputs, without those of the last ones that are `constants`; those whose entry
           in `needed` is false are empty
    `residuals` are the outputs that the backward reads. `backward_options` have defaults, with which autograd
    calls.
    """
    results = _names(outputs)
    saved = _picker([results.index(residual) for residual in _names(residuals)] if residuals else [])
    fixed = _picker([i for i, result in enumerate(results) if result not in _names(differentiable)])
    input_count, grad_count = len(_names(inputs)), len(_names(differentiable))
    constant_count = len(_names(constants) if constants else [])
    of_options = (None,) * (constant_count + len(_names(options)))
    residual_count = len(_names(residuals) if residuals else [])

    upstream = ", ".join(f"Tensor? grad_{result}" for result in _names(differentiable))
    kept = "".join(f"Tensor {result}, " for result in saved(results))
    returns = ", ".join("Tensor" for _ in results)
    gradients = ", ".join(["Tensor"] * (input_count - constant_count))
    tags = (torch.Tag.pt2_compliant_tag,)
    _library.define(f"{name}({inputs}, {options}) -> ({returns})", tags=tags)
    given = f"{upstream}, {inputs}, {kept}{options}, bool[] needed"
    given += f", {backward_options}" if backward_options else ""
    needed_at = grad_count + input_count + residual_count + len(_names(options))
    _library.define(f"{name}_backward({given}) -> ({gradients})", tags=tags)
    op = getattr(torch.ops.monoidreduce, name).default
    backward_op = getattr(torch.ops.monoidreduce, f"{name}_backward").default

    def backward_fake(*args: Any) -> tuple[Tensor, ...]:
        of = args[grad_count : grad_count + input_count - constant_count]
        return tuple(
            t.new_empty(t.shape) if wanted else _no_gradient(of)
            for t, wanted in zip(of, args[needed_at], strict=False)
        )

    def save(ctx: Any, args: tuple[Any, ...], result: Any) -> None:
        result = result if isinstance(result, tuple) else (result,)
        ctx.save_for_backward(*args[:input_count], *saved(result))
        ctx.mark_non_differentiable(*fixed(result))
        ctx.set_materialize_grads(False)
        ctx.options = args[input_count:]

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1 : 1 + input_count]  # after the keys
        if all(grad is None for grad in grads):  # what followed the op has no gradient either
            return (None,) * (input_count + len(ctx.options))
        found = backward_op(*grads[:grad_count], *ctx.saved_tensors, *ctx.options, needed)
        return *[g if wanted else None for g, wanted in zip(found, needed, strict=False)], *of_options

    def save_nothing(ctx: Any, args: tuple[Any, ...], result: Any) -> None:
        pass

    def refuse(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(
            f"monoidreduce::{name} can be differentiated once: its backward has no derivative. "
            f"Do without create_graph=True, or `import monoidreduce.reference` and call its {name}."
        )

    for device in ("CPU", "CUDA"):
        _library.impl(name, forward, device)
        _library.impl(f"{name}_backward", backward, device)
    torch.library.register_fake(f"monoidreduce::{name}", fake, lib=_library)
    torch.library.register_fake(f"monoidreduce::{name}_backward", backward_fake, lib=_library)
    for kernel_name, kernel in (
        (name, _autograd(name, op, forward, save, differentiate)),
        (f"{name}_backward", _autograd(f"{name}_backward", backward_op, backward, save_nothing, refuse)),
    ):
        _library.impl(kernel_name, kernel, "Autograd", with_keyset=True)
    return op


# Attention


def score_scale(q: Tensor, scale: float | None) -> float:
    return max(q.shape[-1], 1) ** -0.5 if scale is None else scale


def _score_bias(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def sums_bias_gradient(q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Do kernels sum the derivatives by several scores for one element of the bias."""
    scores = q.shape[:3].numel() * k.shape[2]
    return bias is not None and bias.numel() < scores


def _readable(a: Tensor, payload: Tensor, *tensors: Tensor) -> Iterator[Tensor]:
    """Tensors [B, H, rows, width] as tensor-core kernels read them, in a call with these widths."""
    return map(_padded if (a.shape[3] | payload.shape[3]) % 8 else _mapped, tensors)


def _attention_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    unrounded: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """unrounded: the output has the accumulation dtype, which a bias of that dtype needs for its gradient."""
    *rows, _ = q.shape
    shape = (*rows, v.shape[3])
    lse = _statistics(q, *rows)
    return _statistics(q, *shape) if unrounded else q.new_empty(shape), lse, torch.empty_like(lse)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    unrounded: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    score_bias = _score_bias(q, k, bias)
    options, tf32 = (score_scale(q, scale), softcap, left, right), allows_tf32(q)
    width, scratch = v.shape[3], None
    if q.is_cuda:
        tier, _, elements, *_ = _C.attention_forward_tier(
            q, k, v, score_bias, None, None, None, None, *options, *_launch(q), False, tf32
        )
        if tier != SIMT:
            q, k, v = _readable(q, v, q, k, v)
        if tier == HOPPER and score_bias is not None:
            score_bias = _mapped_bias(score_bias)
        if elements:
            scratch = _statistics(q, elements)
    out, lse, lse_low = _attention_results(q, k, v, bias, scale, softcap, left, right, unrounded)
    _C.attention_forward(q, k, v, score_bias, out, lse, lse_low, scratch, *options, *_launch(q), False, tf32)
    return out if v.shape[3] == width else _first(width, out), lse, lse_low


def _attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    unrounded: bool,
    needed: list[bool],
    whole: bool = True,
) -> list[Tensor]:
    lse, lse_low = lse.contiguous(), lse_low.contiguous()  # hooks on saved tensors return any strides
    if grad_out is None and q.is_cuda:  # tensor cores take it as that of attention to zeros, whatever v holds
        nothing = q.new_zeros((*q.shape[:3], 8))
        found = _attention_backward(
            nothing,
            grad_lse,
            q,
            k,
            v.new_zeros((*v.shape[:3], 8)),
            bias,
            nothing.to(out.dtype),
            lse,
            lse_low,
            scale,
            softcap,
            left,
            right,
            unrounded,
            [*needed[:2], False, needed[3]],
            whole,
        )
        if needed[2]:
            found[2] = v.new_zeros(v.shape)
        return found
    if unrounded and grad_out is not None:
        grad_out = grad_out.to(q.dtype)  # exact: what is not rounded here was rounded for the caller
    score_bias, deterministic = _score_bias(q, k, bias), torch.are_deterministic_algorithms_enabled()
    options, tf32 = (score_scale(q, scale), softcap, left, right), allows_tf32(q)
    tier, scratch, adds_rows = SIMT, None, True
    if q.is_cuda:
        sums = needed[3] and sums_bias_gradient(q, k, bias)
        tier, _, elements, adds_rows, _ = _C.attention_backward_tier(
            q,
            k,
            v,
            score_bias,
            grad_out,
            grad_lse,
            None,  # forward's results, and gradients
            None,
            None,
            None,
            None,
            None,
            score_bias if sums else None,
            None,
            *options,
            whole,
            *_launch(q),
            deterministic,
            tf32,
        )
        scratch = _statistics(q, elements)
    gradients: list[Tensor | None]
    inputs = (q, k, v, bias)
    if tier != SIMT and grad_out is not None:  # the three of them together, whatever is needed
        grad_out, q, k, v, out = _readable(q, v, grad_out, q, k, v, out)
        if tier == HOPPER and score_bias is not None:
            score_bias = _mapped_bias(score_bias)
        d_rows = _accumulator(q) if adds_rows else _new(q)
        gradients = [d_rows, _new(k), _new(v)]
    else:
        gradients = [_gradient(t, wanted) for t, wanted in zip((q, k, v), needed[:3], strict=True)]
    dq, dk, dv = gradients
    dbias = _bias_gradient(bias, needed[3])
    _C.attention_backward(
        q,
        k,
        v,
        score_bias,
        grad_out,
        grad_lse,
        out,
        lse,
        lse_low,
        dq,
        dk,
        dv,
        _score_bias(q, k, dbias),
        scratch,
        *options,
        whole,
        *_launch(q),
        deterministic,
        tf32,
    )
    return _rounded((dq, dk, dv, dbias), inputs, needed)


attention = _register(
    "attention",
    inputs="Tensor q, Tensor k, Tensor v, Tensor? bias",
    options="float? scale, float softcap, SymInt left, SymInt right, bool unrounded",
    outputs="out, lse, lse_low",
    differentiable="out, lse",
    residuals="out, lse, lse_low",
    forward=_attention,
    fake=_attention_results,
    backward=_attention_backward,
    backward_options="bool whole=True",  # are k and v all keys that out and lse are of, or a slice of them
)


# Local gradients that forward passes of the linear losses keep


def can_keep(x: Tensor, workspace: int | None, scale: float, other_width: int = 0) -> bool:
    """May a forward pass that will be differentiated keep local gradients.

    A traced call keeps none unless it is given a workspace: the shape is part of the graph, the limit is not.
    """
    if workspace is None or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _C.can_keep(x.device.index, x.shape[1], other_width, scale, deterministic)


def kept_classes(
    x: Tensor, weight: Tensor, workspace: int | None, x_differentiated: bool, other_width: int = 0
) -> int:
    """Of how many classes a forward pass that may keep local gradients has room for them in the workspace."""
    if workspace is None:
        return 0
    room = x.shape[1] if x_differentiated else 0
    return columns_to_keep(x.shape[0], weight.shape[0], workspace, room, 2 if other_width else 1)


def _empty_kept(x: Tensor, classes: int) -> Tensor:
    """[tokens, classes kept, rounded up to 8]."""
    return x.new_empty((x.shape[0], -(-classes // 8) * 8))


def _unit_upstream(tokens: Tensor, slope: float) -> Tensor:
    """Upstream gradients with which a kernel's local gradients, by dot products, are those by scores for
    UNIT_UPSTREAM."""
    return tokens.new_full((1,), UNIT_UPSTREAM / slope).expand(tokens.shape)


def _own_columns(workspace: int, kept: Tensor) -> int:
    """Of how many classes local gradients have room in what kept ones [tokens, classes] leave of it."""
    return columns_in(workspace - 2 * kept.numel(), len(kept))


# Linear cross entropy


def _kept_of_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
) -> Tensor:
    """What a forward pass keeps of local gradients: none where there is a bias or softcap."""
    classes = 0
    if keep and bias is None and softcap == 0 and can_keep(x, workspace, logit_scale):
        classes = kept_classes(x, weight, workspace, x_differentiated)
    return _empty_kept(x, classes)


def _cross_entropy_results(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: str,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    lse_of_ignored: bool,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss; the log-sum-exps of tokens in two words; what is kept."""
    lse = _statistics(x, x.shape[0])
    loss = torch.empty_like(lse) if reduction == "none" else lse.new_empty(())
    kept = _kept_of_cross_entropy(x, weight, bias, logit_scale, softcap, keep, x_differentiated, workspace)
    return loss, lse, torch.empty_like(lse), kept


def _debug_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """On a GPU a target out of range makes its row NaN; looking for one would wait for the device."""
    if target.is_cuda and os.environ.get("MONOIDREDUCE_DEBUG") == "1":
        wrong = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
        if wrong.numel():
            expected = f"class indices in [0, {classes}) or ignore_index={ignore_index}"
            raise IndexError(mismatch("target", expected, wrong[0].item()))


def _cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: str,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    lse_of_ignored: bool,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _debug_targets(target, weight.shape[0], ignore_index)
    losses = _statistics(x, x.shape[0])
    lse, lse_low = torch.empty_like(losses), torch.empty_like(losses)
    kept = _kept_of_cross_entropy(x, weight, bias, logit_scale, softcap, keep, x_differentiated, workspace)
    scratch = first_kept = kept_for = order = gathered = None
    if kept.numel():
        first_kept, kept_for = kept[:, : len(weight)], lse.new_full((1,), UNIT_UPSTREAM)
    if x.is_cuda:
        tier, _, elements, *_ = _C.cross_entropy_forward_tier(
            x, weight, bias, kept=first_kept, logit_scale=logit_scale
        )
        if tier != SIMT:
            x, weight, scratch = _padded(x), _padded_weight(weight, tier), _statistics(x, elements)
        if tier == HOPPER and not lse_of_ignored:
            order = order_rows(x, target=target, mask=None, ignore_index=ignore_index)
            (gathered,) = room_to_gather(x)
    reduced = _reduced(losses, reduction)
    _C.cross_entropy_forward(
        x,
        weight,
        bias,
        target,
        losses,
        reduced,
        lse,
        lse_low,
        scratch,
        first_kept,
        kept_for,
        order,
        gathered,
        reduction == "mean",
        logit_scale,
        softcap,
        ignore_index,
        label_smoothing,
        z_loss,
        *_launch(x),
    )
    return losses if reduced is None else reduced, lse, lse_low, kept


def _cross_entropy_backward(
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    kept: Tensor,
    reduction: str,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    lse_of_ignored: bool,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
    needed: list[bool],
) -> list[Tensor]:
    lse, lse_low, kept = lse.contiguous(), lse_low.contiguous(), kept.contiguous()
    counted, count = target != ignore_index, None
    if grad_loss is not None:
        count = _count(counted, reduction, lse)
        grad_loss = _unreduced(grad_loss, lse, count, reduction)
    workspace = get_workspace() if workspace is None else workspace
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = (logit_scale, softcap, ignore_index, label_smoothing, z_loss)
    if x.is_cuda:
        if grad_lse is not None:  # kept local gradients are those of the loss alone
            kept = kept[:, :0]
        own_columns = _own_columns(workspace, kept)
        tier, *_ = _C.cross_entropy_backward_tier(
            x, weight, bias, logit_scale=logit_scale, workspace=workspace, deterministic=deterministic
        )
        if tier != SIMT:
            inputs = (x, weight)
            x, weight = _padded(x), _padded_weight(weight, tier)
            whole, upstream, order = kept.shape[1] >= len(weight), None, None
            ordered = tier == HOPPER and not lse_of_ignored
            uniform = ordered and grad_loss is not None and grad_lse is None and reduction != "none"
            if grad_loss is not None and (uniform or kept.shape[1]):
                upstream = torch.where(counted, grad_loss, 0)
            if ordered:
                order = order_rows(x, target=target, mask=None, ignore_index=ignore_index)
                grad_lse = None if grad_lse is None else torch.where(counted, grad_lse, 0)
            elif grad_lse is None and not whole:  # an ignored row may hold anything, and 0 times NaN is NaN
                x = torch.where(counted[:, None], x, 0)
            if uniform:
                grad_loss = _unit_upstream(lse, logit_scale)
            head = Head(
                x,
                weight,
                own_columns,
                needed,
                hopper=tier == HOPPER,
                kept=kept[:, : len(weight)],
                upstream=upstream,
                uniform=uniform,
                slope=logit_scale,
                order=order,
            )

            def store(part: slice) -> None:
                _C.cross_entropy_local_gradient(
                    head.rows,
                    weight[part],
                    None if bias is None else bias[part],
                    target,
                    grad_loss,
                    grad_lse,
                    lse,
                    lse_low,
                    head.local(part),
                    head.local_sums(part),
                    order,
                    part.start,
                    len(weight),
                    *options,
                    *_launch(x),
                )

            multiply_local_gradients(store, len(weight), [head])
            dbias = head.sums_gradient()
            dbias = None if dbias is None else dbias / logit_scale
            computed = (head.rows_gradient(), head.d_columns, dbias)
            return _rounded(computed, (*inputs, bias), needed[:3])
    dx = _gradient(x, needed[0])
    dweight = _gradient(weight, needed[1])
    dbias = _bias_gradient(bias, needed[2])
    _C.cross_entropy_backward(
        x,
        weight,
        bias,
        target,
        grad_loss,
        grad_lse,
        lse,
        lse_low,
        dx,
        dweight,
        dbias,
        *options,
        workspace,
        *_launch(x),
        deterministic,
    )
    return _rounded((dx, dweight, dbias), (x, weight, bias), needed[:3])


linear_cross_entropy = _register(
    "linear_cross_entropy",
    inputs="Tensor x, Tensor weight, Tensor? bias, Tensor target",
    options="str reduction, float logit_scale, float softcap, int ignore_index, "
    "float label_smoothing, float z_loss, bool lse_of_ignored, bool keep, bool x_differentiated, "
    "int? workspace",
    outputs="loss, lse, lse_low, kept",
    differentiable="loss, lse",
    residuals="lse, lse_low, kept",
    constants="target",
    forward=_cross_entropy,
    fake=_cross_entropy_results,
    backward=_cross_entropy_backward,
)


# Linear distillation


def _kept_of_student(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    kind: str,
    temperature: float,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
) -> Tensor:
    """What a forward pass keeps of local gradients: of the student's alone, and not of the reverse KL."""
    classes, width = 0, teacher_x.shape[1]
    if keep and kind != "reverse_kl" and can_keep(x, workspace, 1 / temperature, width):
        classes = kept_classes(x, weight, workspace, x_differentiated, width)
    return _empty_kept(x, classes)


def _distillation_results(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    reduction: str,
    kind: str,
    temperature: float,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss; [6, tokens]: lse of P, lse of Q and their centre in two words each; what is kept."""
    tokens = x.shape[0]
    loss = _statistics(x, *([tokens] if reduction == "none" else []))
    kept = _kept_of_student(x, weight, teacher_x, kind, temperature, keep, x_differentiated, workspace)
    return loss, _statistics(x, 6, tokens), kept


def _distillation(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    reduction: str,
    kind: str,
    temperature: float,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    losses, stats = _statistics(x, x.shape[0]), _statistics(x, 6, x.shape[0])
    kept = _kept_of_student(x, weight, teacher_x, kind, temperature, keep, x_differentiated, workspace)
    scratch = first_kept = teacher_kept = kept_for = order = gathered = teacher_gathered = None
    if kept.numel():
        first_kept, teacher_kept = (k[:, : len(weight)] for k in (kept, torch.empty_like(kept)))
        kept_for = losses.new_full((1,), UNIT_UPSTREAM)
    if x.is_cuda:
        tier, _, elements, *_ = _C.distillation_forward_tier(
            x, weight, teacher_x, teacher_weight, kept=first_kept, temperature=temperature
        )
        if tier != SIMT:
            x, teacher_x = _padded(x), _padded(teacher_x)
            weight, teacher_weight = _padded_weight(weight, tier), _padded_weight(teacher_weight, tier)
            scratch = _statistics(x, elements)
        if tier == HOPPER and mask is not None:
            order = order_rows(x, target=None, mask=mask)
            gathered, teacher_gathered = room_to_gather(x, teacher_x)
    reduced = _reduced(losses, reduction)
    _C.distillation_forward(
        x,
        weight,
        teacher_x,
        teacher_weight,
        mask,
        losses,
        reduced,
        stats,
        scratch,
        first_kept,
        teacher_kept,
        kept_for,
        order,
        gathered,
        teacher_gathered,
        reduction == "mean",
        DISTILLATION_LOSSES.index(kind),
        temperature,
        *_launch(x),
    )
    return losses if reduced is None else reduced, stats, kept


def _distillation_backward(
    grad_loss: Tensor,
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    stats: Tensor,
    kept: Tensor,
    reduction: str,
    kind: str,
    temperature: float,
    keep: bool,
    x_differentiated: bool,
    workspace: int | None,
    needed: list[bool],
) -> list[Tensor]:
    stats, kept = stats.contiguous(), kept.contiguous()
    count = _count(mask, reduction, stats)
    grad_losses = _unreduced(grad_loss, stats[0], count, reduction)
    workspace = get_workspace() if workspace is None else workspace
    deterministic = torch.are_deterministic_algorithms_enabled()
    if x.is_cuda:
        of_teacher = needed[2] or needed[3]
        of_head = workspace // 2 if of_teacher else workspace
        if of_teacher:  # kept local gradients are those of the student alone
            kept = kept[:, :0]
        own_columns = _own_columns(of_head, kept)
        tier, *_ = _C.distillation_backward_tier(
            x,
            weight,
            teacher_x,
            teacher_weight,
            temperature=temperature,
            workspace=of_head,
            deterministic=deterministic,
        )
        if tier != SIMT:
            inputs = (x, weight, teacher_x, teacher_weight)
            x, teacher_x = _padded(x), _padded(teacher_x)
            weight, teacher_weight = _padded_weight(weight, tier), _padded_weight(teacher_weight, tier)
            whole, upstream, order = kept.shape[1] >= len(weight), None, None
            hopper, uniform = tier == HOPPER, tier == HOPPER and reduction != "none"
            if uniform or kept.shape[1]:
                upstream = grad_losses if mask is None else torch.where(mask, grad_losses, 0)
            if hopper and mask is not None:
                order = order_rows(x, target=None, mask=mask)
            elif mask is not None and not whole:  # no token: it may hold anything, and 0 times NaN is NaN
                x, teacher_x = (torch.where(mask[:, None], t, 0) for t in (x, teacher_x))
            teacher = None
            if uniform:
                grad_losses = _unit_upstream(grad_losses, 1 / temperature)
            student = Head(
                x,
                weight,
                own_columns,
                [*needed[:2], False],
                hopper=hopper,
                kept=kept[:, : len(weight)],
                upstream=upstream,
                uniform=uniform,
                slope=1 / temperature,
                order=order,
            )
            if of_teacher:
                teacher = Head(
                    teacher_x,
                    teacher_weight,
                    own_columns,
                    [*needed[2:], False],
                    hopper=hopper,
                    upstream=upstream,
                    uniform=uniform,
                    slope=1 / temperature,
                    order=order,
                )
                teacher_x = teacher.rows
            elif order is not None and not whole:
                teacher_x = gather_rows(teacher_x, order)

            def store(part: slice) -> None:
                _C.distillation_local_gradient(
                    student.rows,
                    weight[part],
                    teacher_x,
                    teacher_weight[part],
                    mask,
                    grad_losses,
                    stats,
                    student.local(part),
                    None if teacher is None else teacher.local(part),
                    order,
                    DISTILLATION_LOSSES.index(kind),
                    temperature,
                    *_launch(x),
                )

            heads = [student] if teacher is None else [student, teacher]
            multiply_local_gradients(store, len(weight), heads)
            computed = [gradient for h in heads for gradient in (h.rows_gradient(), h.d_columns)]
            computed += [None] * (len(inputs) - len(computed))  # a teacher without gradients has no head
            return _rounded(computed, inputs, needed[:4])
    dx = _gradient(x, needed[0])
    dweight = _gradient(weight, needed[1])
    dteacher_x = _gradient(teacher_x, needed[2])
    dteacher_weight = _gradient(teacher_weight, needed[3])
    _C.distillation_backward(
        x,
        weight,
        teacher_x,
        teacher_weight,
        mask,
        grad_losses,
        stats,
        dx,
        dweight,
        dteacher_x,
        dteacher_weight,
        DISTILLATION_LOSSES.index(kind),
        temperature,
        workspace,
        *_launch(x),
        deterministic,
    )
    gradients = (dx, dweight, dteacher_x, dteacher_weight)
    return _rounded(gradients, (x, weight, teacher_x, teacher_weight), needed[:4])


linear_distillation = _register(
    "linear_distillation",
    inputs="Tensor x, Tensor weight, Tensor teacher_x, Tensor teacher_weight, Tensor? mask",
    options="str reduction, str kind, float temperature, bool keep, bool x_differentiated, int? workspace",
    outputs="loss, stats, kept",
    differentiable="loss",
    residuals="stats, kept",
    constants="mask",
    forward=_distillation,
    fake=_distillation_results,
    backward=_distillation_backward,
)


# MLP


def _mlp_result(x: Tensor, w1: Tensor, w2: Tensor, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], w2.shape[0]))


def _readable_mlp(
    x: Tensor, w1: Tensor, w2: Tensor, bias1: Tensor | None, bias2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The operands as tensor-core kernels read them."""
    if (x.shape[1] | w1.shape[0] | w2.shape[0]) % 8 == 0:
        return _mapped(x), _mapped(w1), _mapped(w2), bias1, bias2
    bias1, bias2 = (None if bias is None else _padded(bias) for bias in (bias1, bias2))
    return _padded(x), _padded(w1, 2), _padded(w2, 2), bias1, bias2


def _mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    activation: str,
    workspace: int | None,
) -> Tensor:
    kind, launch, tf32 = ACTIVATIONS.index(activation), _launch(x), allows_tf32(x)
    outputs, tier, elements, part, scratch = w2.shape[0], SIMT, 0, (0, 0), None
    if x.is_cuda:
        workspace = get_workspace() if workspace is None else workspace
        deterministic = torch.are_deterministic_algorithms_enabled()
        tier, _, elements, _, part = _C.mlp_forward_tier(
            x, w1, w2, bias1, workspace=workspace, deterministic=deterministic, tf32=tf32
        )
    if tier != SIMT:
        x, w1, w2, bias1, bias2 = _readable_mlp(x, w1, w2, bias1, bias2)
    out = _mlp_result(x, w1, w2)
    if all(part):

        def store(rows: Tensor, hidden: Tensor) -> None:
            _C.mlp_hidden(rows, w1, bias1, hidden, kind, *launch)

        multiply_hidden(store, part[0], x, w2, bias2, out)
    else:
        if elements:
            scratch = _statistics(x, elements)
        _C.mlp_forward(x, w1, w2, bias1, bias2, out, scratch, kind, workspace or 0, *launch, False, tf32)
    return out if out.shape[1] == outputs else _first(outputs, out)


def _mlp_backward(
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    activation: str,
    workspace: int | None,
    needed: list[bool],
) -> list[Tensor]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    kind, launch = ACTIVATIONS.index(activation), _launch(x)
    gradients: list[Tensor | None]
    tier, adds_rows, part, tf32 = SIMT, True, (0, 0), allows_tf32(x)
    if x.is_cuda:
        workspace = get_workspace() if workspace is None else workspace
        tier, _, _, adds_rows, part = _C.mlp_backward_tier(
            x, w1, w2, bias1, workspace=workspace, deterministic=deterministic, tf32=tf32
        )
    inputs = (x, w1, w2, bias1, bias2)
    if tier != SIMT:
        x, w1, w2, bias1, _ = _readable_mlp(x, w1, w2, bias1, None)
        grad_out = _padded(grad_out)
    dbias2 = grad_out.sum(0) if needed[4] else None  # in float32 where its result is of 16 bits
    if not any(needed[:4]):
        gradients = [None] * 4
    elif all(part):
        options: tuple[int, ...] = (kind, *launch)

        def store(*tensors: Any) -> None:
            _C.mlp_local_gradient(*tensors, *options)

        gradients = multiply_hidden_gradients(store, part, grad_out, x, w1, w2, bias1, needed)
    else:
        if tier != SIMT:  # the gradients all together, whatever is needed
            d_rows = _accumulator(x) if adds_rows else _new(x)
            gradients = [d_rows, _new(w1), _new(w2)]
        else:
            gradients = [_gradient(t, wanted) for t, wanted in zip((x, w1, w2), needed[:3], strict=True)]
        gradients.append(_bias_gradient(bias1, needed[3]))
        dx, dw1, dw2, dbias1 = gradients
        mode = (kind, workspace or 0, *launch, deterministic, tf32)
        _C.mlp_backward(x, w1, w2, bias1, grad_out, dx, dw1, dw2, dbias1, *mode)
    return _rounded((*gradients, dbias2), inputs, needed)


mlp = _register(
    "mlp",
    inputs="Tensor x, Tensor w1, Tensor w2, Tensor? bias1, Tensor? bias2",
    options="str activation, int? workspace",
    outputs="out",
    differentiable="out",
    residuals="",
    forward=_mlp,
    fake=_mlp_result,
    backward=_mlp_backward,
)


# logsumexp of a matrix product


def _logsumexp_results(a: Tensor, b: Tensor, scale: float, workspace: int | None) -> tuple[Tensor, Tensor]:
    lse = _statistics(a, a.shape[0])
    return lse, torch.empty_like(lse)


def _logsumexp(a: Tensor, b: Tensor, scale: float, workspace: int | None) -> tuple[Tensor, Tensor]:
    lse, lse_low = _logsumexp_results(a, b, scale, workspace)
    scratch = None
    if a.is_cuda:
        tier, _, elements, *_ = _C.logsumexp_forward_tier(a, b, scale=scale)
        if tier != SIMT:
            a, b, scratch = _padded(a), _padded_weight(b, tier), _statistics(a, elements)
    _C.logsumexp_forward(a, b, lse, lse_low, scratch, scale, *_launch(a))
    return lse, lse_low


def _logsumexp_backward(
    grad_lse: Tensor,
    a: Tensor,
    b: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    scale: float,
    workspace: int | None,
    needed: list[bool],
) -> list[Tensor]:
    lse, lse_low = lse.contiguous(), lse_low.contiguous()
    deterministic = torch.are_deterministic_algorithms_enabled()
    if a.is_cuda:
        workspace = get_workspace() if workspace is None else workspace
        tier, *_ = _C.logsumexp_backward_tier(
            a, b, scale=scale, workspace=workspace, deterministic=deterministic
        )
        if tier != SIMT:
            inputs = (a, b)
            a, b = _padded(a), _padded_weight(b, tier)
            own_columns = columns_in(workspace, len(a))
            head = Head(a, b, own_columns, [*needed, False], hopper=tier == HOPPER)

            def store(part: slice) -> None:
                local = head.local(part)
                _C.logsumexp_local_gradient(a, b[part], grad_lse, lse, lse_low, local, scale, *_launch(a))

            multiply_local_gradients(store, len(b), [head])
            return _rounded((head.rows_gradient(), head.d_columns), inputs, needed)
    da = _gradient(a, needed[0])
    db = _gradient(b, needed[1])
    options = (scale, workspace or 0, *_launch(a), deterministic)
    _C.logsumexp_backward(a, b, grad_lse, lse, lse_low, da, db, *options)
    return _rounded((da, db), (a, b), needed)


logsumexp_matmul = _register(
    "logsumexp_matmul",
    inputs="Tensor a, Tensor b",
    options="float scale, int? workspace",
    outputs="lse, lse_low",
    differentiable="lse",
    residuals="lse, lse_low",
    forward=_logsumexp,
    fake=_logsumexp_results,
    backward=_logsumexp_backward,
)

register_when_counted()
