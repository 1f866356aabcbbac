"""The public operators. Each checks its arguments, fills in defaults, flattens leading axes, and calls an op
of `_ops`.

All of them have in common:

- Tensors may have any strides. They share one dtype (float64, float32, bfloat16 or float16) and one device.
  Under autocast they are cast as torch casts the operands of `linear` and `scaled_dot_product_attention`.
  The gradient of a float32 weight of a loss or of `linear_log_probs` is then summed in float32 and never
  rounded to 16 bits.
- Sums, statistics and losses have the accumulation dtype: float32, or float64 for float64 inputs.
- An empty fold (no key, no class, a fully masked row) gives output 0, log-sum-exp -inf and gradients of
  exactly 0.
- Before any work is done, an argument of a wrong type or dtype raises TypeError, and one of a wrong shape,
  device or value raises ValueError.
- Gradients can be taken once: differentiating a gradient raises RuntimeError.
- With `ranks` (a `monoidreduce.Ranks`, or a ProcessGroup or one-dimensional DeviceMesh alone) the classes of
  a loss or the hidden units of an MLP are sharded over a group of ranks, in rank order. All ranks make the
  call, with the same rows (tokens) and upstream gradients. Results and gradients of rows have the same bits
  on all ranks; gradients of weights are for the rank's own shard. Attention shards the sequence instead. If
  one rank raises an error, all do. See docs/distributed.md.
- Instead of `ranks`, the tensors of the losses, `linear_log_probs`, `logsumexp_matmul` and `mlp` may all be
  DTensors on one mesh. Other operators take plain tensors only. See docs/distributed.md.
- Under `torch.vmap`, and with batches of upstream gradients (`torch.func.jacrev`, `is_grads_batched`), the
  members of a batch are computed one after another, each by a call of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from numbers import Integral
from operator import index
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeAlias,
    TypedDict,
    TypeVar,
    cast,
    overload,
)

import torch
from torch import Tensor

from monoidreduce import _yards
from monoidreduce._keywords import refuse
from monoidreduce._ops import cross_entropy_parts, distillation_parts
from monoidreduce._ops.attention_passes import in_full
from monoidreduce._ops.cross_entropy import CrossEntropyNumbers
from monoidreduce._ops.distillation import DISTILLATION_LOSSES
from monoidreduce._ops.forward_gradients import has_float32_gradient
from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._ops.mlp import ACTIVATIONS
from monoidreduce._ops.registry import any_requires_grad, call_op
from monoidreduce._ops.summed_weights import call_adding
from monoidreduce._results import exported
from monoidreduce._soft_targets import SoftTargets
from monoidreduce._torch_private import has_tangent, in_forward_mode, is_captured
from monoidreduce._validate import (
    INTEGERS,
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
    remembering,
)
from monoidreduce.classes import check_words, words_of_rows
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
ScoreMod: TypeAlias = Callable[..., Any]  # (score, batch, head, q_idx, kv_idx) -> score
MaskMod: TypeAlias = Callable[..., Any]  # (batch, head, q_idx, kv_idx) -> bool
Rest = TypeVar("Rest")
Checked: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...]]  # an op's tensors and its first options

REDUCTIONS = ("none", "mean", "sum")
SEED = "an int of 64 bits, or a 0-d tensor of an integer dtype"
FAR = 1 << 62  # stands for any larger number of keys or bytes; a position plus a window still fits in 64 bits
DEVICES = ("cpu", "cuda", "meta")


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype of matrix products under autocast; None if autocast is off on the tensor's device."""
    if not (tensor.is_cpu or tensor.is_cuda):
        check_choice("device", tensor.device.type, DEVICES)
        return None
    device = "cuda" if tensor.is_cuda else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


def _operands(
    optional: tuple[str, ...] = (), master: str | None = None, **tensors: Tensor | None
) -> list[Any]:
    """Check that the tensors have one dtype and device, and return them, cast if autocast is on.

    optional: names of arguments that may be None. master: the name of a weight that stays float32 under
    autocast if it gets a gradient, so that the gradient is not rounded to 16 bits; the op casts it.
    """
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
        allowed = dtypes
        if dtype is not None:
            if name == master and dtypes == (dtype,) and _is_master(operand):
                allowed = (dtype, torch.float32)
            else:
                operand = autocast(operand, dtype)
        if first is None:
            first_name, first, dtypes = name, operand, (operand.dtype,)
        else:
            check_like(name, operand, first_name, first, allowed)
        operands.append(operand)
    return operands


@remembering
def _head(
    x: Tensor, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, master: str | None = None
) -> tuple[list[Any], dict[Any, Any]]:
    of_classes = {"bias": bias, "class_weight": class_weight}
    operands = _operands((*of_classes,), master, x=x, weight=weight, **of_classes)
    sizes: dict[Any, Any] = {}
    x, weight, *vectors = operands
    check_axes("x", _rows("x", x, "D"), ("tokens", "D"), sizes, x)
    check_axes("weight", weight, ("V", "D"), sizes)
    for name, vector in zip(of_classes, vectors, strict=True):
        if vector is not None:
            check_axes(name, vector, ("V",), sizes)
    return operands, sizes


def head_operands(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    master: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The checked operands of a linear head: x [..., D] as [rows, D], weight [V, D], bias and class_weight
    [V].

    master: as of `_operands`, which casts them.
    """
    (x, weight, bias, class_weight), _ = _head(x, weight, bias, class_weight, master=master)
    return _rows("x", x, "D"), weight, bias, class_weight


def _is_master(weight: Tensor) -> bool:
    """Whether a weight is float32 and gets a gradient."""
    return weight.dtype == torch.float32 and weight.requires_grad and torch.is_grad_enabled()


def _main_grad(weight: Tensor) -> Tensor | None:
    """Megatron's float32 `main_grad` of a weight that gets a gradient; None if it has no such tensor."""
    found = getattr(weight, "main_grad", None)
    if found is None or not isinstance(found, Tensor) or torch.compiler.is_compiling():
        return None
    alike = found.shape == weight.shape and found.device == weight.device and found.is_contiguous()
    alike = alike and found.dtype == torch.float32 and weight.dtype != torch.float64
    return found if alike and weight.requires_grad and torch.is_grad_enabled() else None


def _sum_of_gradients(given: Tensor | None, weight: Tensor) -> Tensor | None:
    """The tensor to which the gradient of weight is added: `given`, or main_grad of the weight; else None."""
    if given is None:
        return _main_grad(weight)
    check_floating("weight", weight)
    check_tensor("weight_grad", given)
    check_like("weight_grad", given, "weight", weight, (accumulation_dtype(weight.dtype),))
    if given.shape != weight.shape:
        raise ValueError(mismatch("weight_grad", f"shape {list(weight.shape)} as weight", list(given.shape)))
    if not given.is_contiguous():
        raise ValueError(mismatch("weight_grad", "a contiguous tensor", f"strides {list(given.stride())}"))
    if given.requires_grad:
        raise ValueError(mismatch("weight_grad", "a tensor that requires no gradient", "one that does"))
    if not torch.is_grad_enabled():
        return None
    if not weight.requires_grad:
        raise ValueError(mismatch("weight_grad", "None where weight requires no gradient", "a tensor"))
    return given


def _rows(name: str, tensor: Tensor, width: str) -> Tensor:
    """[..., width] -> [rows, width]."""
    axes = tensor.dim()
    if axes == 2:
        return tensor
    if axes == 0:
        raise ValueError(mismatch(name, f"shape [..., {width}]", []))
    return tensor.unsqueeze(0) if axes == 1 else tensor.flatten(0, -2)


def _per_row(name: str, tensor: Tensor, x: Tensor, x_name: str = "x") -> Tensor:
    """Check that the tensor has the leading shape of x, and flatten it: [...] -> [rows]."""
    shape = x.shape[:-1]
    if tensor.shape != shape:
        expected = f"shape {list(shape)} as {x_name} is {list(x.shape)}"
        raise ValueError(mismatch(name, expected, list(tensor.shape)))
    if tensor.device != x.device:
        raise ValueError(mismatch(name, f"a tensor on {x.device} as {x_name}", tensor.device))
    return tensor if len(shape) == 1 else tensor.reshape(-1)


def _targets(target: Tensor, ignore_index: int, x: Tensor) -> tuple[Tensor, int]:
    """Checked class indices [rows] int64, and the checked ignore_index. target: [...], as x is [..., D]."""
    check_tensor("target", target)
    if target.dtype not in INTEGERS:
        raise TypeError(mismatch("target", "class indices of an integer dtype", target.dtype))
    targets = _per_row("target", target, x)
    ignore_index = check_index("ignore_index", ignore_index)
    return _integers(targets, ignore_index), ignore_index


def _integers(targets: Tensor, ignore_index: int) -> Tensor:
    """Class indices as int64."""
    if targets.dtype == torch.uint64:
        # Numbers that int64 cannot hold become an index that is neither a class nor ignore_index.
        none = (1 << 63) - 1 - (ignore_index == (1 << 63) - 1)
        targets = targets.view(torch.int64)
        targets = torch.where(targets < 0, none, targets)
    elif targets.dtype != torch.int64:
        targets = targets.long()
    return targets


def check_index(name: str, value: int) -> int:
    value = check_int(name, value)
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(mismatch(name, "an int of 64 bits", value))
    return value


def _like_rows(result: Tensor, x: Tensor) -> Tensor:
    """[rows] or [rows, N] -> [...] or [..., N], with the leading axes of x."""
    return result if x.dim() == 2 else result.view((*x.shape[:-1], *result.shape[1:]))


def _constant(tensor: Tensor) -> Tensor:
    """The tensor without its autograd history and tangent."""
    return tensor.detach() if tensor.requires_grad or has_tangent((tensor,)) else tensor


def bounds(causal: bool, window: Window | None) -> tuple[int, int]:
    """(left, right): how many keys a query sees to either side of the key it is aligned with; -1 for all."""
    causal = check_bool("causal", causal)
    if window is None:
        return -1, 0 if causal else -1
    expected = "None or (left, right), each None or an int >= 0"
    if not isinstance(window, (tuple, list, Sequence)) or len(window) != 2:
        raise TypeError(mismatch("window", expected, repr(window)))
    left, right = (-1 if side is None else _side(side, expected, window) for side in window)
    return left, 0 if causal else right


def _side(side: Any, expected: str, window: Window) -> int:
    """One side of a window, checked: an int, or a SymInt if torch.compile traces with dynamic sizes."""
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
    """Check scale and softcap of attention. The op takes None as the default scale, and softcap 0 as none."""
    if scale is not None:
        scale = check_factor("scale", scale)
    if softcap is None:
        return scale, 0.0
    softcap = check_positive("softcap", softcap)
    # Kernels multiply by this quotient in float32.
    if scale and not 2.0**-120 <= abs(scale / softcap) <= 2.0**120:
        raise ValueError(mismatch("scale / softcap", "a magnitude from 2^-120 to 2^120", scale / softcap))
    return scale, softcap


def _differentiated(*tensors: Tensor) -> bool:
    """True if autograd records operations on one of the tensors."""
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
    """Check a call's arguments: by `check`, which takes `arguments`, and by `rest`, which takes none.

    Returns the op's tensors and options from `check`, the result of `rest`, and an object that runs the op
    over ranks; None if there is one rank. If a check fails on one rank, all ranks raise.
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


def _called(operator: str, sum_to: Tensor | None, weight: Tensor, given: tuple[Any, ...]) -> Any:
    """Call an op with the arguments `given`.

    sum_to: from `_sum_of_gradients`. weight: as the user gave it.
    """
    if sum_to is None:
        return call_op(operator, *given)
    return call_adding(operator, sum_to, weight, *given)


def refuse_over_ranks(ranks: RanksOrGroup, operator: str, error: Exception) -> NoReturn:
    """Raise the error on all ranks, including those whose own arguments are right."""
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
    """The checked number of bytes; by default `get_workspace()`.

    While torch.compile traces outside of a `workspace` block, the default is None, which stands for what
    `get_workspace()` returns when the backward pass runs.
    """
    if workspace is None:
        limit = traced_workspace() if torch.compiler.is_compiling() else get_workspace()
        return None if limit is None else min(limit, FAR)
    workspace = check_int("workspace", workspace, "None or an int >= 0")
    if workspace < 0:
        raise ValueError(mismatch("workspace", "None or an int >= 0", workspace))
    return min(workspace, FAR)


class AttentionTensors(TypedDict, total=False):
    """Optional tensors of `attention`, and the seed. `nn.Attention` takes them in a call too."""

    bias: Tensor | None
    sinks: Tensor | None
    block_mask: BlockMask | None
    seed: int | Tensor | None


class AttentionOptions(TypedDict, total=False):
    """Options of `attention` that `nn.Attention` takes when it is made, in addition to return_lse."""

    causal: bool
    scale: float | None
    window: Window | None
    softcap: float | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    compensated: bool
    dropout_p: float


class AttentionKeywords(AttentionTensors, AttentionOptions, total=False):
    """All keywords of `attention` but return_lse, which decides the type of its result."""

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
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    ranks: RanksOrGroup | None = None,
    **others: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(mask(softcap(scale * q @ k^T) + bias)) @ v, without the score matrix.

    Args:
        q: [B, H, M, F] queries. If they are [B, M, H, F], pass `q.transpose(1, 2)`.
        k: [B, Hkv, N, F] keys. H is a multiple of Hkv; query head h uses key head h // (H // Hkv).
        v: [B, Hkv, N, D] values.
        causal: a query sees no key to the right of the key it is aligned with. The last query is aligned with
            the last key.
        scale: factor of the scores, 1 / sqrt(F) by default. Here and in the other operators a scale is 0, or
            its magnitude is from 2^-100 to 2^100.
        window: (left, right): how many keys a query sees to the left and right of the key it is aligned with.
            None on a side means all keys there.
        softcap: c, from 2^-100 to 2^100. Each score becomes c * tanh(score / c), before bias and masks.
        bias: broadcastable to [B, H, M, N]. A floating bias, of the dtype of q or the accumulation dtype, is
            added to the scores and is differentiable. A bool bias excludes pairs where it is False. A bias
            with two axes is [M, N]; write a padding mask [B, N] as mask[:, None, None, :].
        sinks: [H], of the dtype of q or the accumulation dtype, differentiable. Each query sees one more key,
            whose score is sinks[h] and whose value is 0. Scale, softcap, bias and masks do not apply to it.
        score_mod: `score_mod(score, batch, head, q_idx, kv_idx)` returns the new score of one pair, as for
            torch's flex_attention. q_idx and kv_idx are indices into q and k; they are not aligned as causal
            and window are. A bias is added afterwards.
        mask_mod: `mask_mod(batch, head, q_idx, kv_idx)` returns whether a pair is kept.
        block_mask: instead of mask_mod: a mask made by `monoidreduce.block_mask`, or torch's BlockMask.
            Blocks that keep nothing are skipped. See docs/score_mod.md.
        compensated: save what a 16-bit output loses by rounding for the backward pass, in 2 bytes per
            element. d_q and d_k of queries that attend to almost one key only become several times more
            accurate (docs/numerics.md, saturated rows). No effect for other dtypes.
        dropout_p: from 0 to below 1, as in torch's scaled_dot_product_attention: each softmax weight becomes
            0 with this probability, and the others are multiplied by 1 / (1 - dropout_p). It is rounded to a
            multiple of 2^-16, as 16 random bits decide; at most to 1 - 2^-16. lse does not change. Nothing is
            stored: the backward pass finds the same bits, by the generator of `stat.uniform`. Give 0 where a
            model is not in training.
        seed: of dropout, an int of 64 bits or a 0-d tensor of integers. By default torch's generator of the
            device draws it, without a wait.
        return_lse: also return the log-sum-exp of each query's scores, including its sink.
        ranks: q, k and v are this rank's shard of the queries and keys, as `distributed.shard` makes it along
            axis 2, and so are the results. bias is for all queries and keys, on every rank, and sinks for all
            heads. Causal masks and windows apply to the whole sequence. score_mod, mask_mod, block_mask and
            dropout are not supported. Uses the options method, layout, length and grad_dtype of `Ranks`.

    Returns:
        out [B, H, M, D] in the dtype of q. With return_lse also lse [B, H, M] in the accumulation dtype, with
        natural logarithm and differentiable. A query that sees no key has out 0 and lse -inf (or its sink).

    Raises:
        TraceError: score_mod or mask_mod does something that kernels cannot do.
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
        if dropout_p != 0:
            error = ValueError(mismatch("dropout_p", "0 beside ranks", dropout_p))
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
    if not (isinstance(dropout_p, float) and dropout_p == 0.0 and seed is None):
        dropout_p, seed = check_dropout(dropout_p, seed, q)
    if score_mod is not None or mask_mod is not None or block_mask is not None or dropout_p:
        q, k, v, sizes = attention_operands(q, k, v)
        bias = _checked_bias(bias, q, (sizes["B"], sizes["H"], sizes["M"], sizes["N"]))
        check_sinks(sinks, q)
        exact = compensated or _shows_rounding(q, sinks)
        out, lse = _yards.folds().modified_attention(
            q, k, v, modifies, causal, scale, window, softcap, bias, sinks, exact, None, dropout_p, seed
        )
    else:
        of_call = (causal, scale, window, softcap, compensated)
        (q, k, v, bias), options, of_rows = check_attention(q, k, v, bias, sinks, *of_call)
        # A bias that is constant along keys is applied after the op, and does not apply to sinks. So then
        # they are joined after it.
        in_kernels = sinks if of_rows is None else None
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
    """Check the arguments; return the op's tensors and options, and a bias for `finished` to apply.

    That bias is constant along keys. Any other is among the tensors. whole: maps the numbers of queries and
    keys of q and k to those that the bias covers, which differ over ranks.
    """
    q, k, v, sizes = attention_operands(q, k, v)
    bias = _checked_bias(bias, q, (sizes["B"], sizes["H"], *whole(sizes["M"], sizes["N"])))
    check_sinks(sinks, q)
    scale, softcap = score_factors(scale, softcap)
    of_rows = bias if bias is not None and raises_rows(bias) else None
    bias = None if of_rows is not None else bias
    # Forward mode subtracts out times how the log-sum-exp moves from a sum of about the same size.
    compensated = compensated or in_forward_mode() or _shows_rounding(q, bias, sinks)
    return (q, k, v, bias), (scale, softcap, *bounds(causal, window), compensated), of_rows


def check_dropout(dropout_p: float, seed: int | Tensor | None, q: Tensor) -> tuple[float, Tensor | None]:
    """The checked probability of dropout, and the seed on the device of q; (0, None) for no dropout."""
    expected = "a number from 0 to below 1"
    dropout_p = check_finite("dropout_p", dropout_p, expected)
    if not 0 <= dropout_p < 1:
        raise ValueError(mismatch("dropout_p", expected, dropout_p))
    if isinstance(seed, Tensor):
        if seed.dim() or seed.dtype not in INTEGERS or seed.dtype == torch.uint64:
            raise TypeError(mismatch("seed", SEED, f"a tensor of shape {list(seed.shape)}, {seed.dtype}"))
    elif seed is not None:
        seed = check_int("seed", seed, SEED)
        if not -(2**63) <= seed < 2**63:
            raise ValueError(mismatch("seed", SEED, seed))
    if dropout_p == 0:
        return 0.0, None
    if seed is None:
        return dropout_p, torch.randint(2**63 - 1, (), device=q.device)
    if isinstance(seed, Tensor):
        return dropout_p, seed.to(q.device, torch.int64)
    return dropout_p, torch.full((), seed, dtype=torch.int64, device=q.device)


def _checked_bias(bias: Tensor | None, q: Tensor, full: tuple[int, int, int, int]) -> Tensor | None:
    """Check a bias, and cast it as autocast says. full: the shape to which it is broadcast."""
    if bias is None:
        return None
    check_tensor("bias", bias)
    if bias.dtype != torch.bool:
        check_floating("bias", bias)
        bias = autocast(bias, autocast_dtype(q))
    check_like("bias", bias, "q", q, (q.dtype, accumulation_dtype(q.dtype), torch.bool))
    _check_broadcast(bias, full)
    return bias


def _shows_rounding(q: Tensor, *others: Tensor | None) -> bool:
    """True if one of the tensors gets a gradient in a wider dtype than q has.

    Such a gradient is precise enough to show the error of delta (the row sum of out * d_out) that comes from
    rounding out, so the call needs a compensated output.
    """
    for t in others:  # noqa: SIM110 - half the time of any()
        if t is not None and t.dtype not in (q.dtype, torch.bool) and _differentiated(t):
            return True
    return False


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Raise unless sinks are None or [H], on the device of q and of its dtype or the accumulation dtype."""
    if sinks is not None:
        of_q: dict[Any, Any] = {"H": q.shape[1], ("q",): (("H",), q.shape)}
        check_axes("sinks", check_floating("sinks", sinks), ("H",), of_q)
        check_like("sinks", sinks, "q", q, (q.dtype, accumulation_dtype(q.dtype)))


def finished(
    out: Tensor, lse: Tensor, dtype: torch.dtype, of_rows: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The op's results after a bias that is constant along keys and sinks are applied, rounded to `dtype`."""
    if of_rows is not None:
        out, lse = _raised(out, lse, of_rows)
    if sinks is not None:
        out, lse = _with_sinks(out, lse, sinks)
    return out if out.dtype == dtype else out.to(dtype), lse


@remembering
def _qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Any], dict[Any, Any]]:
    q, k, v = operands = _operands(q=q, k=k, v=v)
    sizes: dict[Any, Any] = {}
    check_axes("q", q, ("B", "H", "M", "F"), sizes)
    check_axes("k", k, ("B", "Hkv", "N", "F"), sizes)
    check_heads(k, sizes, "[B, Hkv, N, F]")
    check_axes("v", v, ("B", "Hkv", "N", "D"), sizes)
    return operands, sizes


def attention_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, int]]:
    """Check q, k and v; return them and their sizes by axis name."""
    (q, k, v), sizes = _qkv(q, k, v)
    return q, k, v, sizes


def check_heads(k: Tensor, sizes: dict[Any, Any], axes: str) -> None:
    """Raise ValueError unless the number of key heads divides that of query heads. axes: those of k."""
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
    """True if the bias adds one number to all scores of a row."""
    return bias.dtype != torch.bool and (bias.dim() == 0 or bias.shape[-1] == 1)


def _raised(out: Tensor, lse: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a bias that is constant along keys: it shifts lse and leaves the output unchanged."""
    by = (bias.squeeze(-1) if bias.dim() else bias).to(lse.dtype).expand(lse.shape)
    empty = (lse == -math.inf) | (by == -math.inf)
    by = by.masked_fill(empty, 0)
    # The softmax of one number: 1, with derivative 0. If the bias is NaN or +inf it is NaN, as the softmax of
    # such scores is, and so are results and gradients.
    share = by[..., None].softmax(-1)
    lse = torch.where(by == math.inf, by, lse * share[..., 0] + by).masked_fill(empty, -math.inf)
    return (out * share.to(out.dtype)).masked_fill(empty[..., None], 0), lse


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add each row's sink to its softmax. out: [B, H, M, D] in the accumulation dtype."""
    sink = sinks.to(lse.dtype)[:, None]
    none, infinite = sink == -math.inf, sink == math.inf
    sink = sink.masked_fill(none, 0)
    # A row without keys has an lse of -inf, at which second derivatives would be NaN. 0 stands in for it.
    empty, of_keys = lse == -math.inf, lse
    lse = lse.masked_fill(empty, 0)
    # The keys' part of the softmax. Not by sigmoid, whose derivative share * (1 - share) loses digits of a
    # share close to 1.
    share = torch.nn.functional.logsigmoid(lse - sink).exp()
    share = share.masked_fill(none, 1).masked_fill(infinite, math.nan)
    joined = torch.where(empty, sink, torch.logaddexp(lse, sink))
    return out * share[..., None], torch.where(none, of_keys, joined)


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
    """Attention over several disjoint sets of keys together, from the results for each set.

    This is the combine of attention's monoid; (out, lse) is its state. Call it as
    `merge_attention(outs, lses)` for any number of states, or `merge_attention(out_a, lse_a, out_b, lse_b)`
    for two.

    Args:
        outs: at least one tensor [..., M, D], in a sequence or stacked on axis 0, all of one dtype.
        lses: as many tensors [..., M], in a sequence or stacked on axis 0, in the accumulation dtype. A state
            with lse -inf is over no key: it is the identity and does not change a bit of the result, whatever
            its out holds.

    Returns:
        out [..., M, D] in the dtype of outs and lse [..., M], differentiable any number of times. If all
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
    # The result does not depend on the maximum that is subtracted, so no gradient flows through it. A lse of
    # +inf makes all weights NaN, as in torch's softmax, also those of states over no key.
    row_max = peak.detach()
    infinite = row_max == math.inf
    counted = (lse != -math.inf) | infinite
    count = counted.sum(0)
    # Rows of at most one state that is over a key: the result is that state, bit for bit, or the identity.
    nothing, settled = count == 0, count <= 1
    mass = (lse - row_max).masked_fill(settled, 0.0).exp()
    total = mass.sum(0)
    merged = (row_max + total.log()).masked_fill(infinite, math.inf)
    # Adding -0 changes no bit of any number; adding 0 would change -0.
    terms = [
        share[..., None] * out.masked_fill(empty[..., None], -0.0)
        for share, out, empty in zip(
            torch.where(settled, counted, mass / total), of_out.values(), ~counted, strict=True
        )
    ]
    out = reduce(torch.add, terms).masked_fill(nothing[..., None], 0.0)
    return out.to(first.dtype), torch.where(settled, peak, merged).masked_fill(nothing, -math.inf)


def _states(name: str, given: Any) -> dict[str, Tensor]:
    """The tensors of a sequence, or of one stacked on axis 0, by their names in error messages."""
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
    rows, weight, bias, class_weight = head_operands(x, weight, bias, class_weight, master="weight")
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


def _check_soft_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    target_probs: Tensor,
    class_weight: Tensor | None,
    *numbers: Any,
) -> tuple[tuple[Any, ...], CrossEntropyNumbers]:
    """Check a call with soft targets. The tensors are x, weight, bias and target [rows, K]."""
    check_tensor("target", target)
    if not target.dim() or target.shape[:-1] != x.shape[:-1]:
        expected = f"shape {[*x.shape[:-1], 'K']} beside target_probs, as x is {list(x.shape)}"
        raise ValueError(mismatch("target", expected, list(target.shape)))
    check_floating("target_probs", target_probs)
    if target_probs.shape != target.shape:
        expected = f"shape {list(target.shape)} as target"
        raise ValueError(mismatch("target_probs", expected, list(target_probs.shape)))
    if target_probs.device != target.device:
        raise ValueError(
            mismatch("target_probs", f"a tensor on {target.device} as target", target_probs.device)
        )
    # All but target is checked as beside class indices.
    indices = target[..., 0] if target.shape[-1] else target.new_zeros(target.shape[:-1])
    tensors, checked = _check_cross_entropy(x, weight, bias, indices, class_weight, *numbers)
    if checked.label_smoothing:
        expected = "0 beside target_probs: smooth these instead"
        raise ValueError(mismatch("label_smoothing", expected, checked.label_smoothing))
    rows, weight, bias, *_ = tensors
    of_rows = _integers(target.reshape(len(rows), target.shape[-1]), checked.ignore_index)
    return (rows, weight, bias, of_rows), checked


def target_logits(
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    label: Tensor,
    temperatures: Tensor | None,
    numbers: tuple[float, float, float],
    lse_of_ignored: bool,
    workspace: int | None,
    sum_to: Tensor | None = None,
    parameter: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each row's logits [N], and the logits of a few classes of it [N, K]; differentiable.

    The arguments are checked. rows [N, D], columns [V, D], bias [V]. label: [N, K] distinct classes of each
    row; NO_TARGET for none, whose logit is 0. temperatures: [N]. numbers: logit_scale, softcap (0 for none),
    and the temperature of all rows. lse_of_ignored: rows without a class have a log-sum-exp too. sum_to,
    parameter: as of `_called`.
    """
    keep = rows.is_cuda and _differentiated(rows, columns) and not torch.compiler.is_compiling()
    keep = keep and not is_captured()  # as in linear_log_probs
    options = (*numbers, 0, -1, lse_of_ignored, keep, _differentiated(rows), workspace)
    given = (rows, columns, bias, label, temperatures, *options)
    parameter = columns if parameter is None else parameter
    lse, logits, *_ = _called("linear_target_logits", sum_to, parameter, given)
    return lse, logits


def _soft_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    target_probs: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    numbers: tuple[Any, ...],
    return_lse: bool,
    workspace: int | None,
    ranks: RanksOrGroup | None,
    weight_grad: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`linear_cross_entropy` with target_probs. numbers: the arguments reduction to z_loss."""
    tensors, of_call, (return_lse, workspace, sum_to), sharded = _checked(
        "linear_target_logits",
        _check_soft_cross_entropy,
        (x, weight, bias, target, target_probs, class_weight, *numbers),
        ranks,
        lambda: (
            check_bool("return_lse", return_lse),
            workspace_bytes(workspace),
            _sum_of_gradients(weight_grad, weight),
        ),
    )
    options = CrossEntropyNumbers(*of_call)
    rows, columns, _, targets = tensors
    probs = target_probs.reshape(targets.shape).to(accumulation_dtype(rows.dtype))
    if sharded is not None:
        loss, lse = sharded.soft_cross_entropy(probs, class_weight, return_lse, workspace, sum_to, weight)
    else:
        soft = SoftTargets.of(targets, probs, options.ignore_index, len(columns), class_weight)
        of_logits = (options.logit_scale, options.softcap, 1.0)
        of_op = (soft.label, None, of_logits, return_lse, workspace, sum_to, weight)
        lse, logits = target_logits(rows, columns, tensors[2], *of_op)
        loss = soft.reduced(lse, logits, options.z_loss, options.reduction)
    if options.reduction == "none":
        loss = _like_rows(loss, x)
    return (loss, _like_rows(lse, x)) if return_lse else loss


class CrossEntropyTensors(TypedDict, total=False):
    """Optional tensors of `linear_cross_entropy`. `nn.LinearCrossEntropyLoss` takes them in a call too."""

    bias: Tensor | None
    class_weight: Tensor | None
    target_probs: Tensor | None
    weight_grad: Tensor | None


class CrossEntropyOptions(TypedDict, total=False):
    """Options that `nn.LinearCrossEntropyLoss` takes when it is made, in addition to return_lse."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    workspace: int | None


class CrossEntropyKeywords(CrossEntropyTensors, CrossEntropyOptions, total=False):
    """All keywords of `linear_cross_entropy` but return_lse, which decides the type of its result."""

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
    target_probs: Tensor | None = None,
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
    weight_grad: Tensor | None = None,
    **others: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of softcap(logit_scale * x @ weight^T + bias) against class indices, without the logits.

    The values are those of `torch.nn.functional.cross_entropy` on these logits, with one exception: if every
    target is ignored, "mean" is 0 and not NaN.

    With target_probs each token has K targets, as those of a teacher that are most likely, and its loss is
    -sum_k p_k log_softmax(logits)[target_k]. Their logits are dot products of their own. The backward pass
    needs no more products than that of class indices.

    Args:
        x: [..., D] one row per token.
        weight: [V, D] one row per class.
        target: [...] class indices, of any integer dtype; or [..., K] with target_probs.
        target_probs: [..., K] floating, the probabilities p of soft targets, which need not sum to 1; they
            have gradients. Targets equal to ignore_index are left out, and the probabilities of equal targets
            of a token are added. "mean" divides by the tokens that have a target. Not for DTensors.
        bias: [V].
        class_weight: [V], as torch's `weight`: a factor of each class's part in the loss, and "mean" divides
            by the sum of the targets' weights, but not if there are target_probs. It does not apply to the
            z-loss, and gets no gradient.
        ignore_index: a target, -100 by default. Tokens that have it get loss 0 and gradients 0, and do not
            count in the mean. On a Hopper GPU their logits are not computed, unless return_lse is True.
        reduction: "none", "mean" (the default) or "sum".
        label_smoothing: how much of the target's probability, from 0 to 1, is spread over all classes; 0
            beside target_probs.
        z_loss: adds z_loss * lse^2 to the loss of each token. It is 0, or its magnitude is from 2^-100 to
            2^100.
        softcap: c, from 2^-100 to 2^100. Each logit becomes c * tanh(logit / c).
        logit_scale: factor of x @ weight^T, before the bias is added; 1 by default. It is 0, or its magnitude
            is from 2^-100 to 2^100.
        return_lse: also return the log-sum-exp of each token's logits.
        ranks: weight, bias and class_weight are this rank's shard of the classes. Uses the options classes,
            sequence_parallel and grad_dtype of `Ranks`.
        workspace: bytes for dlogits, `get_workspace()` by default. If a backward pass is to follow, the
            forward pass on a Hopper GPU saves as many dlogits as fit. The backward pass computes all others,
            a slice at a time, in memory of gradients that are not written yet, or else in the workspace. A
            smaller workspace is slower, never wrong.
        weight_grad: a contiguous tensor like weight in the accumulation dtype. The backward pass adds the
            gradient of weight to it, never rounded to 16 bits; weight.grad stays None. It needs a weight that
            requires a gradient. By default it is `weight.main_grad` (Megatron), if that is such a tensor in
            float32. Not for DTensors, gradients of gradients, or inside of graphs of torch.compile.

    Returns:
        The loss: [...] for reduction "none", else a scalar. With return_lse also lse [...], differentiable.
        Both are in the accumulation dtype.

    Raises:
        TypeError, ValueError: an argument is not as above, or class_weight requires a gradient.
        IndexError: a target is neither in [0, V) nor ignore_index. The token's loss is NaN instead on a CUDA
            device, unless the environment variable MONOIDREDUCE_DEBUG is 1; in forward mode; and with
            target_probs also where torch.compile or make_fx traces the call or torch.func transforms it.
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
            weight_grad=weight_grad,
            target_probs=target_probs,
        )
        return found  # type: ignore[no-any-return]
    numbers = (reduction, logit_scale, softcap, ignore_index, label_smoothing, z_loss)
    if target_probs is not None:
        rest = (numbers, return_lse, workspace, ranks, weight_grad)
        return _soft_cross_entropy(x, weight, target, target_probs, bias, class_weight, *rest)
    tensors, options, (return_lse, workspace, sum_to), sharded = _checked(
        "linear_cross_entropy",
        _check_cross_entropy,
        (x, weight, bias, target, class_weight, *numbers),
        ranks,
        lambda: (
            check_bool("return_lse", return_lse),
            workspace_bytes(workspace),
            _sum_of_gradients(weight_grad, weight),
        ),
    )
    rows, columns, *_ = tensors
    differentiated = _differentiated(rows), _differentiated(columns)
    if sharded is None:
        if sum_to is None and any(differentiated) and has_float32_gradient(rows, columns):
            how = (bias, tensors[4], cast(CrossEntropyNumbers, options), return_lse, workspace)
            if cross_entropy_parts.takes(rows, columns, *how):
                given = (rows, columns, *tensors[3:], *options, *differentiated, workspace)
                return call_op("linear_cross_entropy_parts", *given)[0]  # type: ignore[no-any-return]
        keep = rows.is_cuda and rows.dtype != torch.float32 and any(differentiated)
        given = (*tensors, *options, 0, -1, return_lse, keep, differentiated[0], workspace)
        loss, lse, *_ = _called("linear_cross_entropy", sum_to, weight, given)
    else:
        loss, lse = sharded.linear_cross_entropy(return_lse, differentiated, workspace, sum_to, weight)
    if reduction == "none":
        loss = _like_rows(loss, x)
    return (loss, _like_rows(lse, x)) if return_lse else loss


@remembering
def _two_heads(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor
) -> tuple[list[Any], dict[Any, Any]]:
    x, weight, teacher_x, teacher_weight = operands = _operands(
        (), "weight", x=x, weight=weight, teacher_x=teacher_x, teacher_weight=teacher_weight
    )
    sizes: dict[Any, Any] = {}
    check_axes("x", _rows("x", x, "D"), ("tokens", "D"), sizes, x)
    check_axes("weight", weight, ("V", "D"), sizes)
    teacher_rows = _rows("teacher_x", teacher_x, "E")
    if teacher_x.shape[:-1] != x.shape[:-1]:
        leading = ", ".join(str(size) for size in x.shape[:-1])
        raise ValueError(
            mismatch("teacher_x", f"shape [{leading}, E] as x is {list(x.shape)}", list(teacher_x.shape))
        )
    check_axes("teacher_x", teacher_rows, ("tokens", "E"), sizes, teacher_x)
    check_axes("teacher_weight", teacher_weight, ("V", "E"), sizes)
    return operands, sizes


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
    (x, weight, teacher_x, teacher_weight), _ = _two_heads(x, weight, teacher_x, teacher_weight)
    rows, teacher_rows = _rows("x", x, "D"), _rows("teacher_x", teacher_x, "E")
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
    """True if the call uses options that the fused kernels lack (biases, hard labels, the loss "jsd")."""
    given = bias is not None or teacher_bias is not None or target is not None
    return given or loss == "jsd" or hard_weight != 0


def check_mixture(
    beta: float, target: Tensor | None, hard_weight: float, ignore_index: int
) -> tuple[float, float]:
    """Check the options that weigh the terms of a distillation loss; return beta and hard_weight."""
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
    """Check a call with biases, a target or the loss "jsd", and return its loss as folds of statistics.

    of_call: the arguments of `_check_distillation`. hard: (target, hard_weight, ignore_index).
    """
    (*tensors, keep), (_, loss, temperature) = _check_distillation(*of_call)
    tensors = [tensors[0], tensors[1].to(tensors[0].dtype), *tensors[2:]]  # a float32 master under autocast
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
    """Optional tensors of `linear_distillation`. `nn.LinearDistillationLoss` takes them in a call too."""

    bias: Tensor | None
    teacher_bias: Tensor | None
    mask: Tensor | None
    target: Tensor | None
    weight_grad: Tensor | None


class DistillationOptions(TypedDict, total=False):
    """Options that `nn.LinearDistillationLoss` takes when it is made."""

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
    weight_grad: Tensor | None = None,
    **others: NoReturn,
) -> Tensor:
    """A loss between a student's and a teacher's distribution over the same classes, without their logits.

    The student's distribution is p_s = softmax((x @ weight^T + bias) / temperature). The teacher's, p_t, is
    the same function of the teacher's tensors.

    Args:
        x: [..., D] one row per token.
        weight: [V, D].
        teacher_x: [..., E] with the leading axes of x.
        teacher_weight: [V, E].
        bias, teacher_bias: [V], of the dtype of x or the accumulation dtype.
        loss: "cross_entropy" is -sum p_t log p_s, "forward_kl" is sum p_t (log p_t - log p_s), "reverse_kl"
            is sum p_s (log p_s - log p_t). "jsd" is the generalized Jensen-Shannon divergence
            beta * KL(p_t || m) + (1 - beta) * KL(p_s || m) with m = beta * p_t + (1 - beta) * p_s. No loss is
            multiplied by temperature^2.
        beta: weight of the teacher in "jsd", between 0 and 1.
        temperature: from 2^-100 to 2^100.
        mask: [...] bool. A token where it is False gets loss 0 and gradients 0, and does not count in the
            mean.
        target: [...] class indices (hard labels). A token whose target is ignore_index is excluded as by
            mask.
        hard_weight: h, from 0 to 1. The result is (1 - h) * loss + h * (cross entropy of the student's logits
            at temperature 1 against target).
        ignore_index: the target of excluded tokens, -100 by default.
        reduction: "none", "mean" (the default) or "sum". The mean over no token is 0.
        teacher_grad: whether teacher_x and teacher_weight receive gradients.
        ranks: weight and teacher_weight are this rank's shard of the classes. Uses the options classes,
            sequence_parallel and grad_dtype of `Ranks`. Not with biases, target or the loss "jsd".
        workspace: bytes for dlogits, `get_workspace()` by default. If a backward pass is to follow, the
            forward pass on a Hopper GPU saves as many dlogits as fit. The backward pass computes all others,
            a slice at a time, in memory of gradients that are not written yet, or else in the workspace. A
            smaller workspace is slower, never wrong.
        weight_grad: as in `linear_cross_entropy`, and not with biases, target or the loss "jsd".

    Returns:
        The loss in the accumulation dtype: [...] for reduction "none", else a scalar.

    Raises:
        IndexError: a target is neither in [0, V) nor ignore_index, and hard_weight is not 0. The token's loss
            is NaN instead on a CUDA device, and where torch.compile or make_fx traces the call or torch.func
            transforms it.
        TypeError, ValueError: an argument is not as above.

    Calls with biases, "jsd" or a target are computed by folds of `monoidreduce.statistics`, whose kernels are
    compiled in the first call on a GPU. One case has precompiled kernels: "jsd" in bfloat16 on Hopper with a
    reduced loss, without biases, hard labels or gradients of the teacher. They store logits in the workspace,
    and compute gradients in the forward pass. `mr.explain` tells which kernels a call runs.
    """
    if others:
        refuse("linear_distillation", others)
    biases = bias, teacher_bias
    if distils_by_statistics(loss, *biases, target, hard_weight):
        expected = "None beside bias, teacher_bias, target or the loss jsd"
        if ranks is not None:
            error = ValueError(mismatch("ranks", expected, ranks))
            refuse_over_ranks(ranks, "linear_distillation", error)
        if weight_grad is not None:
            raise ValueError(mismatch("weight_grad", expected, "a tensor"))
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
            weight_grad=weight_grad,
        )
        return found
    tensors, options, (_, workspace, sum_to), sharded = _checked(
        "linear_distillation",
        _check_distillation,
        (x, weight, teacher_x, teacher_weight, mask, reduction, loss, temperature, teacher_grad),
        ranks,
        lambda: (
            check_mixture(beta, target, hard_weight, ignore_index),
            workspace_bytes(workspace),
            _sum_of_gradients(weight_grad, weight),
        ),
    )
    if sharded is None:
        rows, of_teacher = tensors[0], _differentiated(*tensors[2:4])
        of_x, of_weight = map(_differentiated, tensors[:2])
        columns, how = tensors[1], (loss, reduction, workspace)
        is_master = columns.dtype != rows.dtype and sum_to is None and not of_teacher
        if is_master and distillation_parts.takes(rows, columns, tensors[2], *how):
            given = (*tensors, *options, of_x, of_weight, workspace)
            return call_op("linear_distillation_parts", *given)[0]  # type: ignore[no-any-return]
        keep = rows.is_cuda and (of_x or of_weight) and not of_teacher
        given = (*tensors, *options, keep, of_x, workspace)
        result, _, _ = _called("linear_distillation", sum_to, weight, given)
    else:
        of_x, of_weight = map(_differentiated, tensors[:2])
        differentiated = (of_x, of_weight, _differentiated(*tensors[2:4]))
        result = sharded.linear_distillation(differentiated, workspace, sum_to, weight)
    return _like_rows(result, x) if reduction == "none" else result


@exported
class LogProbs(NamedTuple):
    """Results of `linear_log_probs`, [...] each. All but top1 are in the accumulation dtype.

    Attributes:
        log_probs: log-probability of the target.
        entropy: entropy of the softmax in nats; None if it was not asked for.
        top1: int64, the index of the largest logit, the smallest index among equal ones; None if it was not
            asked for.
        lse: log-sum-exp of the logits divided by the temperature.
    """

    log_probs: Tensor
    entropy: Tensor | None
    top1: Tensor | None
    lse: Tensor


def _temperatures(given: float | Tensor, x: Tensor) -> Tensor | None:
    """Temperatures [rows], or None if `given` is one number for all tokens.

    A floating tensor without axes on the device of x is expanded to all rows: reading its number would make
    the host wait.
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
    kept: Tensor | None,
) -> Checked:
    rows, weight, bias, _ = head_operands(x, weight, bias, master="weight")
    targets, ignore_index = _targets(target, ignore_index, x)
    temperatures = _temperatures(temperature, x)
    temperature = 1.0 if temperatures is not None else temperature
    numbers = (check_factor("logit_scale", logit_scale), softcap_value(softcap))
    options = (*numbers, check_positive("temperature", temperature), ignore_index, check_bool("top1", top1))
    return (
        rows,
        weight,
        bias,
        targets,
        temperatures,
        None if kept is None else words_of_rows(kept, x),
    ), options


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
    kept: Tensor | None = None,
    workspace: int | None = None,
    ranks: RanksOrGroup | None = None,
    weight_grad: Tensor | None = None,
    **others: NoReturn,
) -> LogProbs:
    """Log-probabilities of targets under softmax(softcap(logit_scale * x @ weight^T + bias) / temperature).

    For policy gradients and preference losses (PPO, GRPO, DPO, KTO). One pass over the head's weight computes
    all results, and no logits are stored. The backward pass computes them again.

    Args:
        x: [..., D] one row per token.
        weight: [V, D] one row per class.
        target: [...] class indices, of any integer dtype.
        bias: [V].
        temperature: a number, a floating tensor [...] with one temperature per token, or a tensor without
            axes on any device. Each is from 2^-100 to 2^100. A tensor must not require a gradient.
        softcap: c, from 2^-100 to 2^100. Each logit becomes c * tanh(logit / c).
        logit_scale: factor of x @ weight^T, before the bias is added; 1 by default. It is 0, or its magnitude
            is from 2^-100 to 2^100.
        ignore_index: a target, -100 by default. Tokens that have it get log_probs, entropy and lse 0, top1 -1
            and no gradient. On a Hopper GPU their logits are not computed.
        entropy: also return the entropy of each token, -sum p log p, differentiable.
        top1: also return the index of each token's largest logit, which float32 logits decide; -1 if a logit
            is NaN. Not over several ranks.
        kept: [..., ceil(V / 32)] int32, the classes that the sampler of each token kept (top-p, top-k, a
            grammar): bit c % 32 of word c // 32 is set if class c is kept. `pack_classes` makes it of lists
            of classes; bitmasks of xgrammar and vLLM are of this form. The softmax, entropy, top1 and all
            gradients are those of the kept classes alone. A target that is not kept has log_probs -inf, which
            have no gradient. A token that keeps no class is an empty fold: lse -inf, entropy 0, top1 -1. Over
            ranks it has the bits of the classes of all ranks.
        workspace: bytes for dlogits, `get_workspace()` by default. If a backward pass is to follow, the
            forward pass on a Hopper GPU saves softmax weights of as many classes as fit, except while
            torch.compile traces or a CUDA graph captures. With retain_graph the saved weights stay, and the
            backward pass computes all logits again in as much extra memory. A smaller workspace is slower,
            never wrong.
        ranks: weight and bias are this rank's shard of the classes. Uses the options classes,
            sequence_parallel and grad_dtype of `Ranks`.
        weight_grad: as in `linear_cross_entropy`.

    Returns:
        LogProbs(log_probs, entropy, top1, lse). log_probs, entropy and lse are differentiable in x, weight
        and bias.

    Raises:
        TypeError, ValueError: an argument is not as above, or temperature requires a gradient. On a CUDA
            device a temperature out of range in a tensor makes its token's results NaN instead.
        IndexError: a target is neither in [0, V) nor ignore_index. The token's log_probs is NaN instead on a
            CUDA device, unless the environment variable MONOIDREDUCE_DEBUG is 1, and in forward mode.
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
            kept=kept,
            workspace=workspace,
            weight_grad=weight_grad,
        )
        return of_ranks
    tensors, options, (entropy, workspace, sum_to), sharded = _checked(
        "linear_log_probs",
        _check_log_probs,
        (x, weight, bias, target, temperature, logit_scale, softcap, ignore_index, top1, kept),
        ranks,
        lambda: (
            check_bool("entropy", entropy),
            workspace_bytes(workspace),
            _sum_of_gradients(weight_grad, weight),
        ),
    )
    if sharded is None:
        rows, columns = tensors[:2]
        check_words(tensors[5], len(columns))
        keep = rows.is_cuda and _differentiated(rows, columns) and not torch.compiler.is_compiling()
        keep = keep and not is_captured()  # a captured backward pass may be replayed without its forward pass
        given = (*tensors, *options, 0, -1, keep, _differentiated(rows), workspace)
        results = _called("linear_log_probs", sum_to, weight, given)
    elif top1 and ranks is not None:
        error = ValueError(mismatch("top1", "False where classes are split over ranks", True))
        refuse_over_ranks(ranks, "linear_log_probs", error)
    else:
        results = sharded.linear_log_probs(workspace, sum_to, weight)
    log_probs, entropies, lse = results[:3]
    return LogProbs(
        _like_rows(log_probs, x),
        _like_rows(entropies, x) if entropy else None,
        _like_rows(results[4], x) if top1 else None,
        _like_rows(lse, x),
    )


@remembering
def _mlp_operands(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    gate: Tensor | None,
    bias1: Tensor | None,
    gate_bias: Tensor | None,
    bias2: Tensor | None,
) -> tuple[list[Any], dict[Any, Any]]:
    optional = {"gate": gate, "bias1": bias1, "gate_bias": gate_bias, "bias2": bias2}
    x, w1, w2, gate, bias1, gate_bias, bias2 = operands = _operands(
        (*optional,), None, x=x, w1=w1, w2=w2, **optional
    )
    sizes: dict[Any, Any] = {}
    check_axes("x", _rows("x", x, "M"), ("rows", "M"), sizes, x)
    check_axes("w1", w1, ("K", "M"), sizes)
    check_axes("w2", w2, ("N", "K"), sizes)
    if gate is not None:
        check_axes("gate", gate, ("K", "M"), sizes)
    for name, bias, axis in (("bias1", bias1, "K"), ("gate_bias", gate_bias, "K"), ("bias2", bias2, "N")):
        if bias is not None:
            check_axes(name, bias, (axis,), sizes)
    return operands, sizes


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
    operands, _ = _mlp_operands(x, w1, w2, gate, bias1, gate_bias, bias2)
    x, w1, w2, gate, bias1, gate_bias, bias2 = operands
    check_choice("activation", activation, ACTIVATIONS)
    of_gate = () if gate is None else (gate,)
    biases = (bias1, bias2) if gate is None else (bias1, gate_bias, bias2)
    return (_rows("x", x, "M"), w1, w2, *of_gate, *biases), (activation,)


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
    """activation(x @ w1^T + bias1) @ w2^T + bias2, without storing the hidden values [..., K].

    With a gate it is (activation(x @ gate^T + gate_bias) * (x @ w1^T + bias1)) @ w2^T + bias2: SwiGLU with
    activation "silu", GeGLU with "gelu" (Shazeer, GLU Variants Improve Transformer, 2020).

    Some calls store slices of the hidden values, of up to `get_workspace()` bytes: on a GPU if M or N is too
    wide for one kernel; large float32 calls without tensor cores; in the backward pass if K is too small to
    keep one kernel busy; and all calls with a gate, on the CPU too. A slice has at least 128 rows or hidden
    units, even if that is more than the limit. Only float32 calls without a gate are not sliced if the limit
    is less: kernels that store no hidden value then take them. torch computes the matrix products of a slice,
    on the CPU in the accumulation dtype; of float32 with `float32("emulated")` the library's kernels do,
    where they can.

    Args:
        x: [..., M].
        w1: [K, M], and w2: [N, K], as `torch.nn.Linear` stores its weight.
        activation: "relu", "relu2", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid" or "identity".
        bias1: [K].
        bias2: [N].
        gate: [K, M], and gate_bias: [K], which needs a gate.
        ranks: w1, w2, bias1, gate and gate_bias are this rank's shard of the hidden units, of any size. Uses
            the options sequence_parallel and grad_dtype of `Ranks`.

    Returns:
        [..., N] in the dtype of x; bias2 (or 0) if K is 0.

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
        out = call_op(operator, *tensors, *options, False, workspace)
    else:
        out = sharded.mlp(operator, workspace)
    return _like_rows(out, x)


@remembering
def _logsumexp_operands(a: Tensor, b: Tensor) -> tuple[list[Any], dict[Any, Any]]:
    a, b = operands = _operands(a=a, b=b)
    sizes: dict[Any, Any] = {}
    check_axes("a", _rows("a", a, "F"), ("rows", "F"), sizes, a)
    check_axes("b", b, ("N", "F"), sizes)
    return operands, sizes


def _check_logsumexp(a: Tensor, b: Tensor, scale: float) -> Checked:
    (a, b), _ = _logsumexp_operands(a, b)
    return (_rows("a", a, "F"), b), (check_factor("scale", scale),)


def logsumexp_matmul(
    a: Tensor,
    b: Tensor,
    *,
    scale: float = 1.0,
    ranks: RanksOrGroup | None = None,
    **others: NoReturn,
) -> Tensor:
    """log sum_j exp(scale * <a_i, b_j>), without storing the products.

    If a backward pass is to follow, the forward pass on a Hopper GPU may hold up to `get_workspace()` bytes
    of local gradients for it, where that saves time; `workspace(0)` prevents it.

    Args:
        a: [..., F] one row per result.
        b: [N, F] the columns that each row is folded over.
        scale: factor of the products.
        ranks: b is this rank's shard of the columns. Uses the options classes, sequence_parallel and
            grad_dtype of `Ranks`.

    Returns:
        [...] in the accumulation dtype; -inf if N is 0.

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
        keep, a_differentiated = (
            tensors[0].is_cuda and _differentiated(*of) for of in (tensors, tensors[:1])
        )
        # The mode of float32 is read when a compiled function runs, and with it what would be saved.
        keep = keep and not (tensors[0].dtype == torch.float32 and torch.compiler.is_compiling())
        lse, *_ = call_op("logsumexp_matmul", *tensors, *options, keep, a_differentiated, workspace)
    else:
        lse = sharded.logsumexp_matmul(workspace)
    return _like_rows(lse, a)
