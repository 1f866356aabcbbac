"""The public operators: arguments checked, defaults filled in, leading axes flattened, then one op of `_ops`.

Common to all of them:

- Tensors have any strides, one dtype of float64, float32, bfloat16 and float16, and are on one device.
  Under autocast they are cast as torch casts the operands of `linear` and `scaled_dot_product_attention`.
- Sums, statistics and losses have the accumulation dtype: float32, or float64 for float64 inputs.
- An empty fold (no key, no class, a fully masked row) gives output 0, log-sum-exp -inf and gradients of
  exactly 0.
- A wrong argument raises TypeError (its type or dtype) or ValueError (its shape, device or value) before any
  work is done.
- Gradients can be taken once: differentiating a gradient raises RuntimeError.
- With `ranks` (a `monoidreduce.Ranks`, or a ProcessGroup or one-dimensional DeviceMesh alone) the columns
  that a row meets (classes, hidden units) are sharded over a group of ranks, in rank order; of attention the
  sequence is. All ranks make the call, with the same rows and upstream gradients. Results and gradients of
  rows are bit for bit the same on all ranks; a gradient of columns is for the rank's own shard. An error of
  one rank is raised on all. See docs/distributed.md.
- Without `ranks` the tensors of the losses, `linear_log_probs`, `logsumexp_matmul` and `mlp` may all be
  DTensors on one mesh. Other operators take plain tensors. See docs/distributed.md.
- `torch.vmap` and batches of upstream gradients (`torch.func.jacrev`, `is_grads_batched`) make one call for
  each member of the batch, one after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias, TypedDict, TypeVar, overload

import torch
from torch import Tensor

from monoidreduce import _yards
from monoidreduce._keywords import refuse
from monoidreduce._ops.attention import in_full
from monoidreduce._ops.cross_entropy import CrossEntropyNumbers
from monoidreduce._ops.distillation import DISTILLATION_LOSSES
from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._ops.mlp import ACTIVATIONS
from monoidreduce._ops.registry import any_requires_grad, call_op
from monoidreduce._results import exported
from monoidreduce._torch_private import is_captured
from monoidreduce._validate import (
    check_axes,
    check_bool,
    check_choice,
    check_factor,
    check_finite,
    check_floating,
    check_int,
    check_like,
    check_positive,
    check_tensor,
    is_dtensor,
    mismatch,
    number_of,
)
from monoidreduce.workspace import get_workspace, traced_workspace

__all__ = [
    "attention",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_log_probs",
    "logsumexp_matmul",
    "merge_attention",
    "mlp",
]

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from monoidreduce.distributed.operators import Sharded
    from monoidreduce.folds.block_mask import BlockMask
    from monoidreduce.folds.distillation import Distillation
    from monoidreduce.ranks import RanksOrGroup

Window = Sequence[int | None]
ScoreMod: TypeAlias = Callable[..., Any]  # of a score and its batch, head, query and key
MaskMod: TypeAlias = Callable[..., Any]  # of these four
Rest = TypeVar("Rest")
Checked: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...]]  # the tensors and the first options of an op

REDUCTIONS = ("none", "mean", "sum")
INTEGERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
FAR = 1 << 62  # more keys than there are: positions plus windows still fit 64 bits
DEVICES = ("cpu", "cuda", "meta")


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast, if it is on where the tensor is, computes matrix products in."""
    if not (tensor.is_cpu or tensor.is_cuda):
        check_choice("device", tensor.device.type, DEVICES)
        return None
    device = "cuda" if tensor.is_cuda else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


def _operands(optional: tuple[str, ...] = (), **tensors: Tensor | None) -> list[Any]:
    """The tensors, cast if autocast says so, of one dtype and on one device; None only where optional."""
    operands: list[Tensor | None] = []
    first_name, first, dtype = "", None, None
    dtypes: tuple[torch.dtype, ...] = ()
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            operands.append(None)
            continue
        operand = check_floating(name, tensor)
        if first is None:
            dtype = autocast_dtype(operand)
        if dtype is not None:
            operand = autocast(operand, dtype)
        if first is None:
            first_name, first, dtypes = name, operand, (operand.dtype,)
        else:
            check_like(name, operand, first_name, first, dtypes)
        operands.append(operand)
    return operands


def _rows(name: str, tensor: Tensor, width: str) -> Tensor:
    """[..., width] -> [rows, width]."""
    axes = tensor.dim()
    if axes == 2:
        return tensor
    if axes == 0:
        raise ValueError(mismatch(name, f"shape [..., {width}]", []))
    return tensor.unsqueeze(0) if axes == 1 else tensor.flatten(0, -2)


def _per_row(name: str, tensor: Tensor, x: Tensor, x_name: str = "x") -> Tensor:
    """A tensor of the leading shape of x, checked -> [rows]."""
    shape = x.shape[:-1]
    if tensor.shape != shape:
        expected = f"shape {list(shape)} as {x_name} is {list(x.shape)}"
        raise ValueError(mismatch(name, expected, list(tensor.shape)))
    if tensor.device != x.device:
        raise ValueError(mismatch(name, f"a tensor on {x.device} as {x_name}", tensor.device))
    return tensor if len(shape) == 1 else tensor.reshape(-1)


def _targets(target: Tensor, ignore_index: int, x: Tensor) -> tuple[Tensor, int]:
    """Class indices of the leading shape of x, checked -> [rows] int64; and the one that counts as none."""
    check_tensor("target", target)
    if target.dtype not in INTEGERS:
        raise TypeError(mismatch("target", "class indices of an integer dtype", target.dtype))
    targets = _per_row("target", target, x)
    ignore_index = check_index("ignore_index", ignore_index)
    if targets.dtype == torch.uint64:  # those beyond int64 are no class, and not the one that is ignored
        none = (1 << 63) - 1 - (ignore_index == (1 << 63) - 1)
        targets = targets.view(torch.int64)
        targets = torch.where(targets < 0, none, targets)
    elif targets.dtype != torch.int64:
        targets = targets.long()
    return targets, ignore_index


def check_index(name: str, value: int) -> int:
    value = check_int(name, value)
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(mismatch(name, "an int of 64 bits", value))
    return value


def _like_rows(result: Tensor, x: Tensor) -> Tensor:
    """[rows] or [rows, N] -> [...] or [..., N], with the leading axes of x."""
    return result if x.dim() == 2 else result.view((*x.shape[:-1], *result.shape[1:]))


def _constant(tensor: Tensor) -> Tensor:
    """The tensor, cut from the graph where it is part of one."""
    return tensor.detach() if tensor.requires_grad else tensor


def bounds(causal: bool, window: Window | None) -> tuple[int, int]:
    """How many keys to the left and to the right of the aligned one a query sees; -1 is all."""
    causal = check_bool("causal", causal)
    if window is None:
        return -1, 0 if causal else -1
    expected = "None or (left, right), each None or an int >= 0"
    if not isinstance(window, (tuple, list, Sequence)) or len(window) != 2:
        raise TypeError(mismatch("window", expected, repr(window)))
    left, right = (-1 if side is None else _side(side, expected, window) for side in window)
    return left, 0 if causal else right


def _side(side: Any, expected: str, window: Window) -> int:
    """One side of a window, which may be a symbol of a size that a traced graph keeps open."""
    side = number_of("window", side, expected)
    if isinstance(side, bool) or not isinstance(side, (int, Integral, torch.SymInt)):
        raise TypeError(mismatch("window", expected, repr(window)))
    if side < 0:
        raise ValueError(mismatch("window", expected, repr(window)))
    if isinstance(side, torch.SymInt):
        return torch.sym_min(side, FAR)  # type: ignore[no-untyped-call, no-any-return]
    return min(side if isinstance(side, int) else index(side), FAR)


def softcap_value(softcap: float | None) -> float:
    return 0.0 if softcap is None else check_positive("softcap", softcap)


def score_factors(scale: float | None, softcap: float | None) -> tuple[float | None, float]:
    """scale and softcap of attention, as its op takes them."""
    if scale is not None:
        scale = check_factor("scale", scale)
    if softcap is None:
        return scale, 0.0
    softcap = check_positive("softcap", softcap)
    # Kernels multiply by the quotient, in float32.
    if scale and not 2.0**-120 <= abs(scale / softcap) <= 2.0**120:
        raise ValueError(mismatch("scale / softcap", "a magnitude from 2^-120 to 2^120", scale / softcap))
    return scale, softcap


def _differentiated(*tensors: Tensor) -> bool:
    """Does autograd record what is computed from one of them."""
    return torch.is_grad_enabled() and any_requires_grad(tensors)


def _check_no_ranks_beside_dtensors(ranks: RanksOrGroup | None) -> None:
    """Raise TypeError if a call with DTensors has `ranks`: their mesh and placements say the same."""
    if ranks is not None:
        raise TypeError(mismatch("ranks", "None, where an argument is a DTensor", ranks))


def _checked(
    operator: str,
    check: Callable[..., Checked],
    arguments: tuple[Any, ...],
    ranks: RanksOrGroup | None,
    rest: Callable[[], Rest],
) -> tuple[tuple[Any, ...], tuple[Any, ...], Rest, Sharded | None]:
    """What check makes of the arguments: tensors and options of the op; what rest does of others; and what
    runs the op over several ranks, which all raise what one of them does here.
    """
    if ranks is None:
        others = rest()
        return *check(*arguments), others, None
    found: list[Rest] = []

    def checked() -> Checked:
        found.append(rest())
        return check(*arguments)

    sharded = _yards.ranks().Sharded.of(operator, checked, ranks)
    return sharded.tensors, sharded.options, found[0], None if sharded.group.size == 1 else sharded


def refuse_over_ranks(ranks: RanksOrGroup, operator: str, error: Exception) -> NoReturn:
    """Raise the error on all ranks, even if the others make a call that is right."""
    of_ranks = _yards.ranks()

    def refuse() -> NoReturn:
        raise error

    try:
        group = of_ranks.Sharding.of(ranks).group
    except (TypeError, ValueError):
        raise error from None
    of_ranks.together(group, operator, refuse)
    raise error


def workspace_bytes(workspace: int | None) -> int | None:
    """None, in a traced call in no block, stands for what get_workspace() says when the backward runs."""
    if workspace is None:
        limit = traced_workspace() if torch.compiler.is_compiling() else get_workspace()
        return None if limit is None else min(limit, FAR)
    workspace = check_int("workspace", workspace, "None or an int >= 0")
    if workspace < 0:
        raise ValueError(mismatch("workspace", "None or an int >= 0", workspace))
    return min(workspace, FAR)


class AttentionTensors(TypedDict, total=False):
    """What a call of `nn.Attention` may have beside q, k and v."""

    bias: Tensor | None
    sinks: Tensor | None
    block_mask: BlockMask | None


class AttentionOptions(TypedDict, total=False):
    """What `nn.Attention` holds, beside return_lse."""

    causal: bool
    scale: float | None
    window: Window | None
    softcap: float | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    compensated: bool


class AttentionKeywords(AttentionTensors, AttentionOptions, total=False):
    """Keywords of `attention` in its overloads, beside return_lse."""

    ranks: RanksOrGroup | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionKeywords],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[AttentionKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    compensated: bool = False,
    return_lse: bool = False,
    ranks: RanksOrGroup | None = None,
    **others: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(mask(softcap(scale * q @ k^T) + bias)) @ v, without the score matrix.

    Args:
        q: [B, H, M, F] queries; of [B, M, H, F] this is `transpose(1, 2)`.
        k: [B, Hkv, N, F] keys; H is a multiple of Hkv and query head h reads key head h // (H // Hkv).
        v: [B, Hkv, N, D] values.
        causal: a query sees no key to the right of the one it is aligned with. The last query is aligned with
            the last key.
        scale: of the scores, 1 / sqrt(F) by default. Here and in the other operators a scale is 0 or has a
            magnitude from 2^-100 to 2^100.
        window: (left, right), how many keys on either side of the aligned one are seen; None is all of them.
        softcap: c, from 2^-100 to 2^100, replaces each score by c * tanh(score / c), before bias and masks.
        bias: broadcastable to [B, H, M, N]. Floating, of the dtype of q or the accumulation dtype: added to
            the scores, differentiable. Bool: False excludes the pair. Two axes are [M, N]: a padding mask
            [B, N] is written mask[:, None, None, :].
        sinks: [H], of the dtype of q or the accumulation dtype, differentiable. Each query's fold has one
            more element, of score sinks[h] and value 0. No scale, softcap, bias or mask reaches it.
        score_mod: `score_mod(score, batch, head, q_idx, kv_idx)`, the new score of one element, as torch's
            flex_attention takes it. q_idx and kv_idx are indices of q and k as they are; causal and window
            are aligned.
        mask_mod: `mask_mod(batch, head, q_idx, kv_idx)`, whether an element is kept.
        block_mask: in place of mask_mod, what `monoidreduce.block_mask` made of it, or torch's BlockMask:
            blocks that keep nothing are skipped. See docs/score_mod.md.
        compensated: keep what rounding an output of 16 bits loses, in 2 bytes an element, until the backward
            pass: d_q and d_k of queries that look at almost one key alone are several times as accurate
            (docs/numerics.md, saturated rows). Without effect on other dtypes.
        return_lse: return the log-sum-exp of each query's scores too, that of its sink included.
        ranks: q, k and v are this rank's shard of the queries and keys, as `distributed.shard` makes it along
            axis 2, and so are the results. bias is for all queries and keys, on every rank, and sinks for all
            heads. Causal masks and windows apply to the whole sequence. score_mod, mask_mod and block_mask
            are not supported. Uses the options method, layout, length and grad_dtype of `Ranks`.

    Returns:
        out [B, H, M, D] in the dtype of q. With return_lse also lse [B, H, M] in the accumulation dtype, in
        natural units and differentiable. A query that sees no key has out 0 and lse -inf, or its sink.

    Raises:
        TraceError: score_mod or mask_mod does what kernels cannot.
        TypeError, ValueError: an argument is not as above.
    """
    if others:
        refuse("attention", others)
    modifies = (score_mod, mask_mod, block_mask)
    if ranks is not None:
        for name, mod in zip(("score_mod", "mask_mod", "block_mask"), modifies, strict=True):
            if mod is not None:
                error = ValueError(mismatch(name, "None beside ranks", type(mod)))
                refuse_over_ranks(ranks, "attention", error)
        tensors = (q, k, v, bias, sinks)
        found: Tensor | tuple[Tensor, Tensor] = _yards.ranks().attention_over_ranks(
            ranks,
            *tensors,
            return_lse,
            causal=causal,
            scale=scale,
            window=window,
            softcap=softcap,
            compensated=compensated,
        )
        return found
    return_lse, compensated = check_bool("return_lse", return_lse), check_bool("compensated", compensated)
    if score_mod is not None or mask_mod is not None or block_mask is not None:
        q, k, v, _ = attention_operands(q, k, v)
        check_sinks(sinks, q)
        exact = compensated or _shows_rounding(q, sinks)
        out, lse = _yards.folds().modified_attention(
            q, k, v, modifies, causal, scale, window, softcap, bias, sinks, exact
        )
    else:
        of_call = (causal, scale, window, softcap, compensated)
        (q, k, v, bias), options, of_rows = check_attention(q, k, v, bias, sinks, *of_call)
        in_kernels = sinks if of_rows is None else None  # behind a bias by rows, which does not reach them
        out, lse, _, low = call_op("attention", q, k, v, bias, in_kernels, *options)
        if of_rows is not None:
            out, lse = finished(in_full(out, low), lse, q.dtype, of_rows, sinks)
    return (out, lse) if return_lse else out


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    scale: float | None,
    window: Window | None,
    softcap: float | None,
    compensated: bool,
    whole: Callable[[int, int], tuple[int, int]] = lambda queries, keys: (queries, keys),
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], tuple[Any, ...], Tensor | None]:
    """The tensors and options of the op; and a bias by rows, which is left to `finished`.

    whole: of how many queries and keys the bias is, if q and k have so many.
    """
    q, k, v, sizes = attention_operands(q, k, v)
    of_bias = whole(sizes["M"], sizes["N"])
    if bias is not None:
        check_tensor("bias", bias)
        if bias.dtype != torch.bool:
            check_floating("bias", bias)
            bias = autocast(bias, autocast_dtype(q))
        check_like("bias", bias, "q", q, (q.dtype, accumulation_dtype(q.dtype), torch.bool))
        _check_broadcast(bias, (sizes["B"], sizes["H"], *of_bias))
    check_sinks(sinks, q)
    scale, softcap = score_factors(scale, softcap)
    of_rows = bias if bias is not None and raises_rows(bias) else None
    bias = None if of_rows is not None else bias
    compensated = compensated or _shows_rounding(q, bias, sinks)
    return (q, k, v, bias), (scale, softcap, *bounds(causal, window), compensated), of_rows


def _shows_rounding(q: Tensor, *others: Tensor | None) -> bool:
    """Has one of these a gradient that is not rounded to the dtype of q.

    Then it shows what rounding the output costs the centre of a row.
    """
    for t in others:  # noqa: SIM110 - half the time of any()
        if t is not None and t.dtype not in (q.dtype, torch.bool) and _differentiated(t):
            return True
    return False


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Are these sinks of q, one a head."""
    if sinks is not None:
        of_q: dict[Any, Any] = {"H": q.shape[1], ("q",): (("H",), q.shape)}
        check_axes("sinks", check_floating("sinks", sinks), ("H",), of_q)
        check_like("sinks", sinks, "q", q, (q.dtype, accumulation_dtype(q.dtype)))


def finished(
    out: Tensor, lse: Tensor, dtype: torch.dtype, of_rows: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the op returns, with a bias by rows added to all scores, with sinks, and rounded to the dtype."""
    if of_rows is not None:
        out, lse = _raised(out, lse, of_rows)
    if sinks is not None:
        out, lse = _with_sinks(out, lse, sinks)
    return out if out.dtype == dtype else out.to(dtype), lse


def attention_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, int]]:
    """q, k and v, checked, and the sizes of their axes."""
    q, k, v = _operands(q=q, k=k, v=v)
    sizes: dict[Any, Any] = {}
    check_axes("q", q, ("B", "H", "M", "F"), sizes)
    check_axes("k", k, ("B", "Hkv", "N", "F"), sizes)
    check_heads(k, sizes, "[B, Hkv, N, F]")
    check_axes("v", v, ("B", "Hkv", "N", "D"), sizes)
    return q, k, v, sizes


def check_heads(k: Tensor, sizes: dict[Any, Any], axes: str) -> None:
    """Does the number of key heads divide the number of query heads. axes: of the keys."""
    heads, key_heads = sizes["H"], sizes["Hkv"]
    if heads % key_heads if key_heads else heads:
        q = list(sizes["q",][1])
        expected = f"a number of heads that divides the {heads} of q, on axis 1 of {axes}, as q is {q}"
        raise ValueError(mismatch("k", expected, f"{key_heads} of {list(k.shape)}"))


def _check_broadcast(bias: Tensor, full: tuple[int, int, int, int]) -> None:
    shape = tuple(bias.shape)
    if len(shape) <= 4 and all(b in (1, f) for b, f in zip(shape, full[4 - len(shape) :], strict=True)):
        return
    expected = f"a shape broadcastable to {list(full)}"
    batch, _, rows, columns = full
    if shape == (batch, columns):
        expected += "; of a padding mask [B, N] this is bias[:, None, None, :]"
    if shape == (batch, rows, columns):
        expected += "; of [B, M, N] this is bias[:, None]"
    raise ValueError(mismatch("bias", expected, list(shape)))


def raises_rows(bias: Tensor) -> bool:
    """Does a bias of attention raise all scores of a row alike."""
    return bias.dtype != torch.bool and (bias.dim() == 0 or bias.shape[-1] == 1)


def _raised(out: Tensor, lse: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The results once all scores of a row are raised alike: its lse by as much, its output not at all."""
    by = (bias.squeeze(-1) if bias.dim() else bias).to(lse.dtype).expand(lse.shape)
    empty = (lse == -math.inf) | (by == -math.inf)
    by = by.masked_fill(empty, 0)
    # 1, with derivative 0; NaN, and so are derivatives, where by is NaN or +inf: no score is a number.
    share = by[..., None].softmax(-1)
    lse = torch.where(by == math.inf, by, lse * share[..., 0] + by).masked_fill(empty, -math.inf)
    return (out * share.to(out.dtype)).masked_fill(empty[..., None], 0), lse


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The results with one more element in each row's fold; out [B, H, M, D] in the accumulation dtype."""
    sink = sinks.to(lse.dtype)[:, None]
    none, infinite = sink == -math.inf, sink == math.inf
    sink = sink.masked_fill(none, 0)
    # Of the keys. The derivative of a sigmoid, share (1 - share), would lose digits of a share close to 1.
    share = torch.nn.functional.logsigmoid(lse - sink).exp()
    share = share.masked_fill(none, 1).masked_fill(infinite, math.nan)
    return out * share[..., None], torch.where(none, lse, torch.logaddexp(lse, sink))


@overload
def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]: ...
@overload
def merge_attention(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], /
) -> tuple[Tensor, Tensor]: ...
@overload
def merge_attention(
    *, outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]: ...
def merge_attention(
    out_a: Any = None,
    lse_a: Any = None,
    out_b: Any = None,
    lse_b: Any = None,
    *,
    outs: Any = None,
    lses: Any = None,
) -> tuple[Tensor, Tensor]:
    """The monoid's combine: attention over disjoint sets of keys from the results over each.

    Written `merge_attention(outs, lses)` for any number of states, and
    `merge_attention(out_a, lse_a, out_b, lse_b)` for two.

    Args:
        outs: a sequence of at least one tensor [..., M, D], or these stacked on axis 0; of one dtype.
        lses: a sequence of as many tensors [..., M], or these stacked on axis 0, in the accumulation dtype.
            -inf marks the result over no key: the identity, which is exactly neutral whatever its out holds.

    Returns:
        out [..., M, D] in the dtype of outs and lse [..., M], differentiable any number of times. Where all
        states are over no key, out is 0 and lse -inf.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    if out_b is None and lse_b is None:
        of_out = _states("outs", out_a if outs is None else outs)
        of_lse = _states("lses", lse_a if lses is None else lses)
    else:
        of_out, of_lse = {"out_a": out_a, "out_b": out_b}, {"lse_a": lse_a, "lse_b": lse_b}
    for name, tensor in (*of_out.items(), *of_lse.items()):
        check_floating(name, tensor)
    (first_name, first), *_ = of_out.items()
    if len(of_lse) != len(of_out):
        raise ValueError(mismatch("lses", f"{len(of_out)} states as outs", len(of_lse)))
    if first.dim() == 0:
        raise ValueError(mismatch(first_name, "shape [..., M, D]", []))
    for tensors, dtype, shape in (
        (of_out, first.dtype, first.shape),
        (of_lse, accumulation_dtype(first.dtype), first.shape[:-1]),
    ):
        for name, tensor in tensors.items():
            check_like(name, tensor, first_name, first, (dtype,))
            if tensor.shape != shape:
                expected = f"shape {list(shape)} as {first_name} is {list(first.shape)}"
                raise ValueError(mismatch(name, expected, list(tensor.shape)))

    lse = torch.stack(tuple(of_lse.values()))
    peak = lse.amax(0)
    # The result does not depend on the frame, so nothing flows through it. From +inf all masses are NaN, as
    # softmax's, also that of an empty state.
    frame = peak.detach()
    infinite = frame == math.inf
    counted = (lse != -math.inf) | infinite
    count = counted.sum(0)
    nothing, settled = count == 0, count <= 1  # settled: the only state, bit for bit, or the identity
    mass = (lse - frame).masked_fill(settled, 0.0).exp()
    total = mass.sum(0)
    merged = (frame + total.log()).masked_fill(infinite, math.inf)
    # -0, not 0, is what changes no bit of what it is added to.
    terms = [
        share[..., None] * out.masked_fill(empty[..., None], -0.0)
        for share, out, empty in zip(
            torch.where(settled, counted, mass / total), of_out.values(), ~counted, strict=True
        )
    ]
    out = reduce(torch.add, terms).masked_fill(nothing[..., None], 0.0)
    return out.to(first.dtype), torch.where(settled, peak, merged).masked_fill(nothing, -math.inf)


def _states(name: str, given: Any) -> dict[str, Tensor]:
    """The states by name: of a sequence, or stacked on axis 0."""
    expected = "a sequence of at least one tensor, or tensors stacked on axis 0"
    if isinstance(given, Tensor):
        given = check_tensor(name, given).unbind() if given.dim() else ()
    if not isinstance(given, (tuple, list, Sequence)):
        raise TypeError(mismatch(name, expected, repr(given)))
    if not given:
        raise ValueError(mismatch(name, expected, "none"))
    return {f"{name}[{i}]": tensor for i, tensor in enumerate(given)}


def _check_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[tuple[Any, ...], CrossEntropyNumbers]:
    if class_weight is not None and torch.is_grad_enabled() and class_weight.requires_grad:
        raise ValueError(mismatch("class_weight", "a tensor that requires no gradient", "one that does"))
    x, weight, bias, class_weight = _operands(
        ("bias", "class_weight"), x=x, weight=weight, bias=bias, class_weight=class_weight
    )
    sizes: dict[Any, Any] = {}
    rows = _rows("x", x, "D")
    check_axes("x", rows, ("tokens", "D"), sizes, x)
    check_axes("weight", weight, ("V", "D"), sizes)
    if bias is not None:
        check_axes("bias", bias, ("V",), sizes)
    if class_weight is not None:
        check_axes("class_weight", class_weight, ("V",), sizes)
    targets, ignore_index = _targets(target, ignore_index, x)
    check_choice("reduction", reduction, REDUCTIONS)
    logit_scale = check_factor("logit_scale", logit_scale)
    z_loss = check_factor("z_loss", z_loss)
    label_smoothing = check_finite("label_smoothing", label_smoothing, "a number in [0, 1]")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(mismatch("label_smoothing", "a number in [0, 1]", label_smoothing))
    numbers = CrossEntropyNumbers(
        reduction, logit_scale, softcap_value(softcap), ignore_index, label_smoothing, z_loss
    )
    return (rows, weight, bias, targets, class_weight), numbers


class CrossEntropyTensors(TypedDict, total=False):
    """What a call of `nn.LinearCrossEntropyLoss` may have beside x, weight and target."""

    bias: Tensor | None
    class_weight: Tensor | None


class CrossEntropyOptions(TypedDict, total=False):
    """What `nn.LinearCrossEntropyLoss` holds, beside return_lse."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    workspace: int | None


class CrossEntropyKeywords(CrossEntropyTensors, CrossEntropyOptions, total=False):
    """Keywords of `linear_cross_entropy` in its overloads, beside return_lse."""

    ranks: RanksOrGroup | None


@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CrossEntropyKeywords],
) -> Tensor: ...
@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[CrossEntropyKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[CrossEntropyKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_lse: bool = False,
    workspace: int | None = None,
    ranks: RanksOrGroup | None = None,
    **others: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of softcap(logit_scale * x @ weight^T + bias) against class indices, without the logits.

    The values are as in `torch.nn.functional.cross_entropy`, but for one: where every target is ignored,
    "mean" is 0, not NaN.

    Args:
        x: [..., D] one row per token.
        weight: [V, D] one row per class.
        target: [...] class indices, of any integer dtype.
        bias: [V].
        class_weight: [V], as torch's `weight`: multiplies a class's part in each loss, and "mean" divides by
            the sum of the targets' weights. It does not multiply the z-loss, and has no gradient.
        ignore_index: tokens with this target have loss and gradients 0 and do not count in the mean. On a
            Hopper GPU their logits are not computed, unless return_lse is True.
        reduction: "none", "mean" or "sum".
        label_smoothing: the share in [0, 1] of the target's probability that is spread over all classes.
        z_loss: adds z_loss * lse^2 to the loss of each token. 0, or a magnitude from 2^-100 to 2^100.
        softcap: c, from 2^-100 to 2^100, replaces each logit by c * tanh(logit / c).
        logit_scale: of x @ weight^T, before the bias. 0, or a magnitude from 2^-100 to 2^100.
        return_lse: return the log-sum-exp of each token's logits too.
        ranks: weight, bias and class_weight are this rank's shard of the classes. Uses the options classes,
            sequence_parallel and grad_dtype of `Ranks`.
        workspace: bytes for local gradients, `get_workspace()` by default. On a Hopper GPU the forward keeps
            local gradients in them if a backward is to follow. The backward computes all others again, some
            at a time. These need the workspace only if there is no room where gradients will be written
            later. Less is slower, never wrong.

    Returns:
        The loss, [...] for reduction "none" or a scalar. With return_lse also the differentiable lse [...] of
        every token. Both have the accumulation dtype.

    Raises:
        TypeError, ValueError: an argument is not as above, or class_weight requires a gradient.
        IndexError: a target is neither in [0, V) nor ignore_index. On a CUDA device the token's loss is NaN
            instead, unless the environment variable MONOIDREDUCE_DEBUG is 1.
    """
    if others:
        refuse("linear_cross_entropy", others)
    if is_dtensor(weight) or is_dtensor(x):
        _check_no_ranks_beside_dtensors(ranks)
        found: Any = _yards.ranks().dtensor.linear_cross_entropy(
            x,
            weight,
            target,
            bias=bias,
            class_weight=class_weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            return_lse=return_lse,
            workspace=workspace,
        )
        return found  # type: ignore[no-any-return]
    numbers = (reduction, logit_scale, softcap, ignore_index, label_smoothing, z_loss)
    tensors, options, (return_lse, workspace), sharded = _checked(
        "linear_cross_entropy",
        _check_cross_entropy,
        (x, weight, bias, target, class_weight, *numbers),
        ranks,
        lambda: (check_bool("return_lse", return_lse), workspace_bytes(workspace)),
    )
    rows, columns, *_ = tensors
    differentiated = _differentiated(rows), _differentiated(columns)
    if sharded is None:
        keep = rows.is_cuda and any(differentiated)
        loss, lse, *_ = call_op(
            "linear_cross_entropy", *tensors, *options, 0, -1, return_lse, keep, differentiated[0], workspace
        )
    else:
        loss, lse = sharded.linear_cross_entropy(return_lse, differentiated, workspace)
    if reduction == "none":
        loss = _like_rows(loss, x)
    return (loss, _like_rows(lse, x)) if return_lse else loss


def _check_distillation(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None,
    reduction: str,
    loss: str,
    temperature: float,
    teacher_grad: bool,
) -> Checked:
    x, weight, teacher_x, teacher_weight = _operands(
        x=x, weight=weight, teacher_x=teacher_x, teacher_weight=teacher_weight
    )
    sizes: dict[Any, Any] = {}
    rows = _rows("x", x, "D")
    check_axes("x", rows, ("tokens", "D"), sizes, x)
    check_axes("weight", weight, ("V", "D"), sizes)
    teacher_rows = _rows("teacher_x", teacher_x, "E")
    if teacher_x.shape[:-1] != x.shape[:-1]:
        leading = ", ".join(str(size) for size in x.shape[:-1])
        raise ValueError(
            mismatch("teacher_x", f"shape [{leading}, E] as x is {list(x.shape)}", list(teacher_x.shape))
        )
    check_axes("teacher_x", teacher_rows, ("tokens", "E"), sizes, teacher_x)
    check_axes("teacher_weight", teacher_weight, ("V", "E"), sizes)
    keep = None
    if mask is not None:
        check_tensor("mask", mask)
        if mask.dtype != torch.bool:
            raise TypeError(mismatch("mask", "torch.bool", mask.dtype))
        keep = _per_row("mask", mask, x)
    check_choice("loss", loss, (*DISTILLATION_LOSSES, "jsd"))
    check_choice("reduction", reduction, REDUCTIONS)
    temperature = check_positive("temperature", temperature)
    if not check_bool("teacher_grad", teacher_grad):
        teacher_rows, teacher_weight = _constant(teacher_rows), _constant(teacher_weight)
    return (rows, weight, teacher_rows, teacher_weight, keep), (reduction, loss, temperature)


def distils_by_statistics(
    loss: str, bias: Tensor | None, teacher_bias: Tensor | None, target: Tensor | None, hard_weight: float
) -> bool:
    """Has a call what the built-in fold of `linear_distillation` has not."""
    given = bias is not None or teacher_bias is not None or target is not None
    return given or loss == "jsd" or hard_weight != 0


def check_mixture(
    beta: float, target: Tensor | None, hard_weight: float, ignore_index: int
) -> tuple[float, float]:
    """beta and hard_weight of distillation."""
    beta, hard_weight = check_finite("beta", beta), check_finite("hard_weight", hard_weight)
    check_int("ignore_index", ignore_index)
    if not 0 < beta < 1:
        raise ValueError(mismatch("beta", "a number between 0 and 1", beta))
    if not 0 <= hard_weight <= 1 or (target is None and hard_weight):
        expected = "a number from 0 to 1" if target is not None else "0 without target"
        raise ValueError(mismatch("hard_weight", expected, hard_weight))
    return beta, hard_weight


def distillation_folds(
    of_call: tuple[Any, ...],
    biases: tuple[Tensor | None, Tensor | None],
    beta: float,
    hard: tuple[Tensor | None, float, int],
    workspace: int | None,
) -> Distillation:
    """What `linear_distillation` folds with a bias, a target or the loss "jsd". of_call: see its check."""
    (*tensors, keep), (_, loss, temperature) = _check_distillation(*of_call)
    x, teacher_grad = of_call[0], of_call[-1]
    classes: dict[Any, Any] = {"V": len(tensors[1]), ("weight",): (("V",), tensors[1].shape)}
    for name, bias in zip(("bias", "teacher_bias"), biases, strict=True):
        if bias is not None:
            check_axes(name, check_floating(name, bias), ("V",), classes)
            check_like(name, bias, "x", tensors[0], (tensors[0].dtype, accumulation_dtype(tensors[0].dtype)))
    if not teacher_grad:
        biases = biases[0], None if biases[1] is None else _constant(biases[1])
    target, hard_weight, ignore_index = hard
    labels = None
    if target is not None:
        labels, ignore_index = _targets(target, ignore_index, x)
        counted = labels != ignore_index
        keep = counted if keep is None else keep & counted
    bytes = workspace_bytes(workspace)
    options = (loss, temperature, beta, labels, keep, hard_weight, bytes)
    found: Distillation = _yards.folds().Distillation(tuple(tensors), biases, *options)
    return found


class DistillationTensors(TypedDict, total=False):
    """What a call of `nn.LinearDistillationLoss` may have beside its operands."""

    bias: Tensor | None
    teacher_bias: Tensor | None
    mask: Tensor | None
    target: Tensor | None


class DistillationOptions(TypedDict, total=False):
    """What `nn.LinearDistillationLoss` holds."""

    loss: str
    beta: float
    temperature: float
    hard_weight: float
    ignore_index: int
    reduction: str
    teacher_grad: bool
    workspace: int | None


def linear_distillation(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    loss: str = "cross_entropy",
    beta: float = 0.5,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    target: Tensor | None = None,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    teacher_grad: bool = False,
    workspace: int | None = None,
    ranks: RanksOrGroup | None = None,
    **others: NoReturn,
) -> Tensor:
    """A loss between a student's and a teacher's distribution over the same classes, without their logits.

    p_s = softmax((x @ weight^T + bias) / temperature), and p_t is the same of the teacher.

    Args:
        x: [..., D] one row per token.
        weight: [V, D].
        teacher_x: [..., E] with the leading axes of x.
        teacher_weight: [V, E].
        bias, teacher_bias: [V], of the dtype of x or the accumulation dtype.
        loss: "cross_entropy" -sum p_t log p_s, "forward_kl" sum p_t (log p_t - log p_s), "reverse_kl"
            sum p_s (log p_s - log p_t), or "jsd". That is the generalized Jensen-Shannon divergence, with
            m = beta p_t + (1 - beta) p_s. It is the sum of beta times the KL divergence of p_t from m and
            1 - beta times that of p_s from m. Not multiplied by temperature^2.
        beta: of "jsd", between 0 and 1.
        temperature: from 2^-100 to 2^100.
        mask: [...] bool, False excludes a token: its loss and gradients are 0, it does not count in the mean.
        target: [...] class indices. A token whose target is ignore_index is excluded as by mask.
        hard_weight: h, from 0 to 1. The result is (1 - h) * loss + h * cross entropy of the student's logits,
            at temperature 1, against target.
        reduction: "none", "mean" or "sum"; the mean over no token is 0.
        teacher_grad: whether teacher_x and teacher_weight receive gradients.
        ranks: weight and teacher_weight are this rank's shard of the classes. Uses the options classes,
            sequence_parallel and grad_dtype of `Ranks`. Not with biases, target or the loss "jsd".
        workspace: bytes for local gradients, `get_workspace()` by default. On a Hopper GPU the forward keeps
            local gradients in them if a backward is to follow. The backward computes all others again, some
            at a time. These need the workspace only if there is no room where gradients will be written
            later. Less is slower, never wrong.

    Returns:
        The loss, [...] for reduction "none" or a scalar, in the accumulation dtype.

    Raises:
        IndexError: a target is neither in [0, V) nor ignore_index, and hard_weight is not 0. On a CUDA device
            the token's loss is NaN instead.
        TypeError, ValueError: an argument is not as above.

    Biases, "jsd" and target are folds of `monoidreduce.statistics`, whose kernels the first call on a GPU
    compiles. On Hopper "jsd" in bfloat16 has kernels of its own where its losses are reduced, without biases,
    hard labels and gradients of the teacher. It stores scores in the workspace, and computes gradients in the
    forward pass. See `mr.explain`.
    """
    if others:
        refuse("linear_distillation", others)
    biases = bias, teacher_bias
    if distils_by_statistics(loss, *biases, target, hard_weight):
        if ranks is not None:
            expected = "None beside bias, teacher_bias, target or the loss jsd"
            error = ValueError(mismatch("ranks", expected, ranks))
            refuse_over_ranks(ranks, "linear_distillation", error)
        beta, hard_weight = check_mixture(beta, target, hard_weight, ignore_index)
        hard = (target, hard_weight, ignore_index)
        of_call = (x, weight, teacher_x, teacher_weight, mask, reduction, loss, temperature, teacher_grad)
        result = distillation_folds(of_call, biases, beta, hard, workspace).reduced(reduction)
        return _like_rows(result, x) if reduction == "none" else result
    if is_dtensor(weight) or is_dtensor(x):
        _check_no_ranks_beside_dtensors(ranks)
        found: Tensor = _yards.ranks().dtensor.linear_distillation(
            x,
            weight,
            teacher_x,
            teacher_weight,
            mask=mask,
            reduction=reduction,
            loss=loss,
            temperature=temperature,
            beta=beta,
            hard_weight=hard_weight,
            teacher_grad=teacher_grad,
            workspace=workspace,
        )
        return found
    tensors, options, (_, workspace), sharded = _checked(
        "linear_distillation",
        _check_distillation,
        (x, weight, teacher_x, teacher_weight, mask, reduction, loss, temperature, teacher_grad),
        ranks,
        lambda: (check_mixture(beta, target, hard_weight, ignore_index), workspace_bytes(workspace)),
    )
    if sharded is None:
        rows = tensors[0]
        result, _, _ = call_op(
            "linear_distillation",
            *tensors,
            *options,
            rows.is_cuda and _differentiated(*tensors[:2]) and not _differentiated(*tensors[2:4]),
            _differentiated(rows),
            workspace,
        )
    else:
        of_x, of_weight = map(_differentiated, tensors[:2])
        differentiated = (of_x, of_weight, _differentiated(*tensors[2:4]))
        result = sharded.linear_distillation(differentiated, workspace)
    return _like_rows(result, x) if reduction == "none" else result


@exported
class LogProbs(NamedTuple):
    """What `linear_log_probs` returns, [...] each, in the accumulation dtype unless said otherwise.

    Attributes:
        log_probs: of the targets.
        entropy: of the softmax, in nats; None unless it was asked for.
        top1: int64, the index of the largest logit, the least one among equals; None unless it was asked for.
        lse: the log-sum-exp of the logits divided by the temperature.
    """

    log_probs: Tensor
    entropy: Tensor | None
    top1: Tensor | None
    lse: Tensor


def _temperatures(given: float | Tensor, x: Tensor) -> Tensor | None:
    """[rows] temperatures; None where one number is that of all tokens.

    A floating one without axes, on the device of the tokens, needs not be read: it is written out for each.
    """
    if not isinstance(given, Tensor):
        return None
    if not given.dim() and not (given.is_floating_point() and given.device == x.device):
        return None
    check_floating("temperature", given)
    if torch.is_grad_enabled() and given.requires_grad:
        raise ValueError(mismatch("temperature", "a tensor that requires no gradient", "one that does"))
    given = given if given.dim() else given.expand(x.shape[:-1])
    return _per_row("temperature", given, x).to(accumulation_dtype(x.dtype))


def _check_log_probs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    top1: bool,
) -> Checked:
    x, weight, bias = _operands(("bias",), x=x, weight=weight, bias=bias)
    sizes: dict[Any, Any] = {}
    rows = _rows("x", x, "D")
    check_axes("x", rows, ("tokens", "D"), sizes, x)
    check_axes("weight", weight, ("V", "D"), sizes)
    if bias is not None:
        check_axes("bias", bias, ("V",), sizes)
    targets, ignore_index = _targets(target, ignore_index, x)
    temperatures = _temperatures(temperature, x)
    temperature = 1.0 if temperatures is not None else temperature
    numbers = (check_factor("logit_scale", logit_scale), softcap_value(softcap))
    options = (*numbers, check_positive("temperature", temperature), ignore_index, check_bool("top1", top1))
    return (rows, weight, bias, targets, temperatures), options


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    top1: bool = False,
    workspace: int | None = None,
    ranks: RanksOrGroup | None = None,
    **others: NoReturn,
) -> LogProbs:
    """Log-probabilities of targets under softmax(softcap(logit_scale * x @ weight^T + bias) / temperature).

    Policy gradients and preference losses (PPO, GRPO, DPO, KTO) are made of these. One pass over the head
    gives all results, and no logits are stored. The backward pass computes logits again.

    Args:
        x: [..., D] one row per token.
        weight: [V, D] one row per class.
        target: [...] class indices, of any integer dtype.
        bias: [V].
        temperature: a number, or a floating tensor [...] with one of each token, or without axes and on any
            device, which has no gradient. From 2^-100 to 2^100.
        softcap: c, from 2^-100 to 2^100, replaces each logit by c * tanh(logit / c).
        logit_scale: of x @ weight^T, before the bias. 0, or a magnitude from 2^-100 to 2^100.
        ignore_index: tokens with this target have log_probs, entropy and lse 0, top1 -1, and no gradient. On
            a Hopper GPU their logits are not computed.
        entropy: return the entropy of each token, -sum p log p, differentiable.
        top1: return the index of each token's largest logit, as float32 logits tell; -1 where one is NaN. Not
            where classes are split over ranks.
        workspace: bytes for local gradients, `get_workspace()` by default. On a Hopper GPU the forward keeps
            softmax weights of the first classes in them if a backward is to follow, but not in a call that
            torch.compile traces or a CUDA graph captures. Where the graph is retained these stay, and the
            backward computes all logits again, in as much memory more. Less is slower, never wrong.
        ranks: weight and bias are this rank's shard of the classes. Uses the options classes,
            sequence_parallel and grad_dtype of `Ranks`.

    Returns:
        LogProbs(log_probs, entropy, top1, lse). Gradients reach x, weight and bias from log_probs, entropy
        and lse.

    Raises:
        TypeError, ValueError: an argument is not as above, or temperature requires a gradient. On a CUDA
            device a temperature in a tensor that is not as above makes its token's results NaN instead.
        IndexError: a target is neither in [0, V) nor ignore_index. On a CUDA device the token's log_probs is
            NaN instead, unless the environment variable MONOIDREDUCE_DEBUG is 1.
    """
    if others:
        refuse("linear_log_probs", others)
    if is_dtensor(weight) or is_dtensor(x):
        _check_no_ranks_beside_dtensors(ranks)
        of_ranks: LogProbs = _yards.ranks().dtensor.linear_log_probs(
            x,
            weight,
            target,
            bias=bias,
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            ignore_index=ignore_index,
            entropy=entropy,
            top1=top1,
            workspace=workspace,
        )
        return of_ranks
    tensors, options, (entropy, workspace), sharded = _checked(
        "linear_log_probs",
        _check_log_probs,
        (x, weight, bias, target, temperature, logit_scale, softcap, ignore_index, top1),
        ranks,
        lambda: (check_bool("entropy", entropy), workspace_bytes(workspace)),
    )
    if sharded is None:
        rows, columns = tensors[:2]
        keep = rows.is_cuda and _differentiated(rows, columns) and not torch.compiler.is_compiling()
        keep = keep and not is_captured()  # a backward pass may be replayed alone
        results = call_op(
            "linear_log_probs", *tensors, *options, 0, -1, keep, _differentiated(rows), workspace
        )
    elif top1 and ranks is not None:
        error = ValueError(mismatch("top1", "False where classes are split over ranks", True))
        refuse_over_ranks(ranks, "linear_log_probs", error)
    else:
        results = sharded.linear_log_probs(workspace)
    log_probs, entropies, lse = results[:3]
    return LogProbs(
        _like_rows(log_probs, x),
        _like_rows(entropies, x) if entropy else None,
        _like_rows(results[4], x) if top1 else None,
        _like_rows(lse, x),
    )


def _check_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    gate: Tensor | None,
    bias1: Tensor | None,
    gate_bias: Tensor | None,
    bias2: Tensor | None,
    activation: str,
) -> Checked:
    if gate is None and gate_bias is not None:
        raise ValueError(mismatch("gate_bias", "None, where gate is", "a tensor"))
    x, w1, w2, gate, bias1, gate_bias, bias2 = _operands(
        ("gate", "bias1", "gate_bias", "bias2"),
        x=x,
        w1=w1,
        w2=w2,
        gate=gate,
        bias1=bias1,
        gate_bias=gate_bias,
        bias2=bias2,
    )
    sizes: dict[Any, Any] = {}
    rows = _rows("x", x, "M")
    check_axes("x", rows, ("rows", "M"), sizes, x)
    check_axes("w1", w1, ("K", "M"), sizes)
    check_axes("w2", w2, ("N", "K"), sizes)
    if gate is not None:
        check_axes("gate", gate, ("K", "M"), sizes)
    for name, bias, axis in (("bias1", bias1, "K"), ("gate_bias", gate_bias, "K"), ("bias2", bias2, "N")):
        if bias is not None:
            check_axes(name, bias, (axis,), sizes)
    check_choice("activation", activation, ACTIVATIONS)
    of_gate = () if gate is None else (gate,)
    biases = (bias1, bias2) if gate is None else (bias1, gate_bias, bias2)
    return (rows, w1, w2, *of_gate, *biases), (activation,)


def mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    activation: str = "gelu_tanh",
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    gate: Tensor | None = None,
    gate_bias: Tensor | None = None,
    ranks: RanksOrGroup | None = None,
    **others: NoReturn,
) -> Tensor:
    """activation(x @ w1^T + bias1) @ w2^T + bias2, without the hidden [..., K], forward or backward.

    With a gate it is (activation(x @ gate^T + gate_bias) * (x @ w1^T + bias1)) @ w2^T + bias2. That is SwiGLU
    with "silu", GeGLU with "gelu" (Shazeer, GLU Variants Improve Transformer, 2020).

    Parts of up to `get_workspace()` bytes of the hidden are stored where M or N is too wide for one kernel of
    a GPU. They are also stored where backward K is too small to keep one busy. With a gate they always are,
    on the CPU too. A part then has 128 rows or hidden units at least. torch takes the products, on the CPU in
    the accumulation dtype.

    Args:
        x: [..., M].
        w1: [K, M] and w2: [N, K], as `torch.nn.Linear` stores them.
        activation: "relu", "relu2", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid" or "identity".
        bias1: [K].
        bias2: [N].
        gate: [K, M], gate_bias: [K], only with a gate.
        ranks: w1, w2, bias1, gate and gate_bias are this rank's shard of the hidden units, of any size. Uses
            the options sequence_parallel and grad_dtype of `Ranks`.

    Returns:
        [..., N] in the dtype of x; bias2 (or 0) where K is 0.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    if others:
        refuse("mlp", others)
    if is_dtensor(w1) or is_dtensor(x):
        _check_no_ranks_beside_dtensors(ranks)
        biases = {"bias1": bias1, "bias2": bias2, "gate": gate, "gate_bias": gate_bias}
        found: Tensor = _yards.ranks().dtensor.mlp(x, w1, w2, activation=activation, **biases)
        return found
    operator = "mlp" if gate is None else "gated_mlp"
    tensors, options, workspace, sharded = _checked(
        operator,
        _check_mlp,
        (x, w1, w2, gate, bias1, gate_bias, bias2, activation),
        ranks,
        lambda: workspace_bytes(None),
    )
    if sharded is None:
        op = torch.ops.monoidreduce.mlp if gate is None else torch.ops.monoidreduce.gated_mlp
        out = op.default(*tensors, *options, False, workspace)
    else:
        out = sharded.mlp(operator, workspace)
    return _like_rows(out, x)


def _check_logsumexp(a: Tensor, b: Tensor, scale: float) -> Checked:
    a, b = _operands(a=a, b=b)
    sizes: dict[Any, Any] = {}
    rows = _rows("a", a, "F")
    check_axes("a", rows, ("rows", "F"), sizes, a)
    check_axes("b", b, ("N", "F"), sizes)
    return (rows, b), (check_factor("scale", scale),)


def logsumexp_matmul(
    a: Tensor,
    b: Tensor,
    *,
    scale: float = 1.0,
    ranks: RanksOrGroup | None = None,
    **others: NoReturn,
) -> Tensor:
    """log sum_j exp(scale * <a_i, b_j>), without the products: the scalar fold.

    Args:
        a: [..., F] one row per result.
        b: [N, F] what is folded.
        scale: of the products.
        ranks: b is this rank's shard of the columns. Uses the options classes, sequence_parallel and
            grad_dtype of `Ranks`.

    Returns:
        [...] in the accumulation dtype; -inf where N is 0.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    if others:
        refuse("logsumexp_matmul", others)
    if is_dtensor(b) or is_dtensor(a):
        _check_no_ranks_beside_dtensors(ranks)
        found: Tensor = _yards.ranks().dtensor.logsumexp_matmul(a, b, scale)
        return found
    tensors, options, workspace, sharded = _checked(
        "logsumexp_matmul",
        _check_logsumexp,
        (a, b, scale),
        ranks,
        lambda: workspace_bytes(None),
    )
    if sharded is None:
        lse, *_ = call_op(
            "logsumexp_matmul",
            *tensors,
            *options,
            tensors[0].is_cuda and _differentiated(tensors[0]),
            workspace,
        )
    else:
        lse = sharded.logsumexp_matmul(workspace)
    return _like_rows(lse, a)
