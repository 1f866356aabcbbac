"""transformers' attention and mask interfaces over `mr.attention`.

transformers calls the mask function once per forward pass and kind of layer, and passes the result to the
attention function of every layer. The result is one of:

- Band: a window around the diagonal, and a padding mask [B, N]. Nothing of size M x N is stored.
- Packed: several sequences packed in each row of the batch, as cu_seqlens.
- Stored: a bool tensor [B, 1, M, N], for masks with no shorter form (chunked attention, static caches).

It is never None: transformers takes None to mean that the layer itself decides whether it is causal. A layer
that computes with its mask gets the tensor that eager attention would get. Users' own masks arrive as tensors
[B, 1, M, N].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function

from monoidreduce._torch_private import tree_map
from monoidreduce._validate import mismatch
from monoidreduce.functional import attention
from monoidreduce.varlen import attention_varlen

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # before 5.2
    _active_collector = None
# Whether a layer can see that the caller asked for attention weights. If not, a hook of the model checks.
CAPTURES = _active_collector is not None

# Arguments with which other attention implementations change the result; they are refused here. Any other
# unknown argument comes from the model's caller and is ignored, as eager attention ignores it.
OF_OTHERS = ("block_indices", "cache", "head_mask", "indices", "sinks")


@dataclass(frozen=True)
class Mask:
    """A mask in compact form. It turns into eager attention's tensor once something computes with it."""

    make: Callable[[], Tensor] = field(kw_only=True)

    def dense(self) -> Tensor:
        """[B, 1, M, N]: 0 where a query sees a key, and the lowest finite number of the dtype elsewhere."""
        if "made" not in vars(self):
            object.__setattr__(self, "made", self.make())
        return vars(self)["made"]  # type: ignore[no-any-return]

    # With a static cache generate() makes the masks before it calls the model. It treats them as tensors, and
    # the model passes them through its own mask function again.
    @property
    def ndim(self) -> int:
        return 4

    def contiguous(self) -> Mask:
        return self

    # accelerate calls this to move a layer's arguments, if the model's layers are on several GPUs.
    def to(self, *place: Any, **options: Any) -> Any:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: t.to(*place, **options) for name, t in given.items() if isinstance(t, Tensor)}
        return replace(self, make=lambda: self.dense().to(*place, **options), **tensors)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def dense(given: Any) -> Any:
            return given.dense() if isinstance(given, Mask) else given

        return function(*tree_map(dense, args), **tree_map(dense, kwargs or {}))


def _of_tensors(name: str) -> Any:
    return lambda self, *others: getattr(self.dense(), name)(*others)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "rand", "or", "ror", "invert", "neg",
              "getitem", "eq", "ne", "lt", "le", "gt", "ge", "truediv", "len", "iter"):  # fmt: skip
    setattr(Mask, f"__{_name}__", _of_tensors(f"__{_name}__"))
Mask.__hash__ = object.__hash__  # type: ignore[method-assign]


@dataclass(frozen=True, eq=False)
class Band(Mask):
    """The keys inside `window` (as in `mr.attention`) that are not padding.

    The last query is aligned with the last key. With from_first the first query is aligned with the first
    key instead: a static cache has room for keys that do not exist yet.
    """

    window: tuple[int | None, int | None]
    keys: Tensor | None = None  # [B, N] bool, False at padding
    from_first: bool = False


@dataclass(frozen=True, eq=False)
class Packed(Mask):
    """Packed sequences with a `window` as in `mr.attention_varlen`.

    The batch is flattened to B * L tokens.
    """

    window: tuple[int | None, int | None]
    starts: Tensor  # cu_seqlens over the B * L tokens


@dataclass(frozen=True, eq=False)
class Stored(Mask):
    pairs: Tensor  # [B, 1, M, N] bool, True where the query sees the key


# Before transformers 5.4 mask functions get the positions of their queries as a tensor, cache_position [M].
BY_POSITION = "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters


def _made_by(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a mask function of any transformers version so that it takes the arguments of 5.4 and later."""

    def mask(
        batch: int, q_length: int, keys: int, q_offset: Any, kv_offset: int, *others: Any,
        cache_position: Tensor, **options: Any,
    ) -> Any:  # fmt: skip
        return make(batch, cache_position, keys, kv_offset, *others, **options)

    return mask if BY_POSITION else make


sdpa_mask, eager_mask = _made_by(masking_utils.sdpa_mask), _made_by(masking_utils.eager_mask)


def attention_mask_by_position(
    cache_position: Tensor, kv_length: int, kv_offset: int = 0, **options: Any
) -> Mask:
    """`attention_mask` with the signature of transformers before 5.4.

    With a cache, the host waits for the device to read the first position.
    """
    queries = len(cache_position)
    offset: Tensor | int = kv_offset
    if queries != kv_length:
        unread = torch.compiler.is_compiling() or (
            cache_position.is_cuda and torch.cuda.is_current_stream_capturing()
        )
        offset = cache_position[0] if unread else int(cache_position[0])
    return attention_mask(
        q_length=queries, kv_length=kv_length, q_offset=offset, kv_offset=kv_offset,
        cache_position=cache_position, **options,
    )  # fmt: skip


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **options: Any,
) -> Mask:
    """The mask of one kind of layer, with the signature of transformers' `AttentionMaskInterface`.

    Query i is at position q_offset + i, key j at kv_offset + j; attention_mask [B, all keys] marks padding.

    If transformers allows the mask to be skipped, it is known to be causal or bidirectional, with at most a
    window of local_size: a Band. A causal mask of packed sequences is recognised by the functions that
    transformers composed it of: Packed. Any other mask is evaluated from mask_function and stored. So is the
    mask of a static cache, because its last key does not belong to the last query.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    lengths = batch_size, q_length, kv_length, q_offset, kv_offset
    make = partial(eager_mask, *lengths, mask_function, attention_mask, **options)
    # torch.compile cannot trace through closures' cells.
    ids = None if torch.compiler.is_compiling() else _sequence_ids(mask_function, local_size)
    if ids is not None and attention_mask is None:
        return Packed((None if local_size is None else local_size - 1, 0), _starts(ids), make=make)
    plain = allow_is_causal_skip or allow_is_bidirectional_skip
    chunked = local_size is not None and getattr(config, "attention_chunk_size", None) is not None
    # Without a window a bidirectional mask does not depend on alignment; cross attention has such masks.
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    aligned = aligned or (allow_is_bidirectional_skip and local_size is None)
    if not plain or chunked or not aligned:
        options |= {"allow_is_causal_skip": allow_is_causal_skip, "config": config}
        options |= {"allow_is_bidirectional_skip": allow_is_bidirectional_skip}
        pairs = sdpa_mask(*lengths, mask_function, attention_mask, local_size, **options)
        if pairs is not None:
            return Stored(pairs, make=make)
        # sdpa_mask returned None: only causality excludes keys. A single query is the last one and sees all
        # keys; several queries are the first ones of a static cache.
        causal = allow_is_causal_skip and q_length > 1
        return Band((None, 0 if causal else None), from_first=causal, make=make)
    keys = _padding(attention_mask, kv_offset, kv_length)
    if local_size is not None and local_size >= kv_length:
        local_size = None
    if allow_is_causal_skip:
        return Band((None if local_size is None else local_size - 1, 0), keys, make=make)
    return Band((local_size, local_size), keys, make=make)


def _closure(function: Any, name: str) -> dict[str, Any]:
    """Closure variables of a function made by transformers' `masking_utils.name`; empty for any other."""
    known = getattr(function, "__module__", None) == masking_utils.__name__
    if not known or function.__qualname__ != f"{name}.<locals>.{function.__name__}":
        return {}
    return {
        n: cell.cell_contents
        for n, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    }


def _sequence_ids(mask_function: Any, local_size: int | None) -> Tensor | None:
    """The sequence index of each token [B, L] if the mask is exactly "causal within packed sequences", with a
    window of local_size if that is not None. Otherwise None."""

    def both(function: Any) -> tuple[Any, ...]:
        parts = _closure(function, "and_masks").get("mask_functions", ())
        return parts if len(parts) == 2 else (None, None)

    of_sequences, of_positions = both(mask_function)
    within = _closure(of_positions, "remap_positions_for_packed_sequence").get("mask_function")
    if within is None:  # transformers 5.4 swaps the two parts, and does not remap positions
        within, of_sequences = of_sequences, of_positions
    if local_size is not None:
        window, within = both(within)
        if _closure(window, "sliding_window_overlay") != {"sliding_window": local_size}:
            return None
    if within is not causal_mask_function:
        return None
    return _closure(of_sequences, "packed_sequence_mask_function").get("packed_sequence_mask")


def _starts(ids: Tensor) -> Tensor:
    """cu_seqlens over the flattened batch, with B * L sequences, most of them empty.

    B * L is the most there can be, so the host need not wait to learn how many there are.
    """
    batch, length = ids.shape
    flat = (ids + length * torch.arange(batch, device=ids.device)[:, None]).flatten()
    return torch.searchsorted(flat, torch.arange(batch * length + 1, device=ids.device))


def _padding(mask: Tensor | None, offset: int, length: int) -> Tensor | None:
    """[B, length], True for keys that are not padding; None if no key is.

    Keys beyond the mask are padding.
    """
    if mask is None:
        return None
    keys = mask[:, offset : offset + length]
    keys = nn.functional.pad(keys, (0, length - keys.shape[1])) if keys.shape[1] < length else keys
    if torch.compiler.is_compiling() or (keys.is_cuda and torch.cuda.is_current_stream_capturing()):
        return keys  # their values cannot be read here
    return None if keys.all() else keys


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, with the signature of transformers' `AttentionInterface`.

    Args:
        module: the layer. If there is no mask and is_causal is None, its attribute `is_causal` decides.
        dropout: the probability with which a weight is dropped, which the layer gives as 0 in evaluation.
        query: [B, H, M, F].
        key, value: [B, Hkv, N, F] and [B, Hkv, N, D].
        attention_mask: the result of the function `attention_mask` of this module, or a tensor
            [B or 1, H or 1, M, N], bool or additive. A tensor alone decides which keys are seen, without
            further causality or window.
        sliding_window: the layer's window. The mask already contains it.
        s_aux: [H] sinks. A sink is one more score in each row's softmax, and its value vector is 0.
        position_bias: [B or 1, H, M, N], added to the scores before the mask. Beside dropout, one that
            requires a gradient lets torch compute the layer.
        cu_seq_lens_q, cu_seq_lens_k: [sequences + 1], cu_seqlens of the packed sequences in each row of the
            batch. With a stored mask or a position_bias each sequence becomes a call of its own, and the host
            waits for the device to read the lengths.
        others: further arguments of the model's call; ignored, as in eager attention.

    Returns:
        The output [B, M, H, D], and None in place of the attention weights.

    Raises:
        ValueError, TypeError: an unsupported argument that would change the result.
    """
    if _weights_are_captured():
        refuse_weights(None, (), {"output_attentions": True})
    refuse_weights(None, (), others)
    for name in OF_OTHERS:
        if others.get(name) is not None:
            expected = "None: monoidreduce's attention has no such argument"
            raise TypeError(mismatch(name, expected, type(others[name]).__name__))

    rows, columns = query.shape[2], key.shape[2]
    bias = position_bias
    window: tuple[int | None, int | None] = None, None
    from_first = False
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        packed = cu_seq_lens_q is not None or cu_seq_lens_k is not None
        from_first = causal and rows > 1 and not packed  # torch's causal attention aligns the first key
        if sliding_window is not None and sliding_window < columns and rows > 1:
            expected = f"a mask of this window, or one of at least the {columns} keys"
            raise ValueError(mismatch("sliding_window", expected, f"{sliding_window} and no mask"))
        window = None, 0 if causal else None
    elif isinstance(attention_mask, Band):
        window, from_first = attention_mask.window, attention_mask.from_first
        if attention_mask.keys is not None:
            bias = _masked(bias, attention_mask.keys[:, None, None, :])
    elif isinstance(attention_mask, Packed):
        window = attention_mask.window
        if bias is not None:
            bias = bias + attention_mask.dense()
    elif isinstance(attention_mask, Stored):
        bias = _masked(bias, attention_mask.pairs)
    elif isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        bias = _masked(bias, attention_mask)
    else:
        mask = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask)
        raise TypeError(mismatch("attention_mask", "None or a tensor [B, 1, M, N]", mask))

    if from_first and rows < columns:  # a static cache: its other keys are not filled yet
        key, value, columns = key[:, :, :rows], value[:, :, :rows], rows
        bias = bias if bias is None or bias.shape[-1] == 1 else bias[..., :rows]
    options: Any = {"scale": scaling, "window": window, "softcap": softcap, "sinks": s_aux}
    options["dropout_p"] = dropout
    compute: Callable[..., Tensor] = attention
    learns = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    if dropout and learns and softcap is None and s_aux is None:
        compute = _dropout_beside_learned_bias
    sequences = [(0, rows, 0, columns)]
    of_mask = attention_mask.starts if isinstance(attention_mask, Packed) and bias is None else None
    starts = None if of_mask is None else (of_mask, of_mask)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        given = _both(cu_seq_lens_q, cu_seq_lens_k, query)
        on_host = not (query.is_cuda or torch.compiler.is_compiling())
        if bias is not None or on_host:
            sequences = _sequences(*given, rows, columns)
        if bias is None:
            lengths = zip(given, (rows, columns), strict=True)
            found = [_of_all_rows(each, len(query), length, of_mask) for each, length in lengths]
            starts = found[0], found[1]
    if starts is not None:
        return _varlen(query, key, value, starts, options), None
    outs = []
    for q0, q1, k0, k1 in sequences:
        out = compute(
            query[:, :, q0:q1],
            key[:, :, k0:k1],
            value[:, :, k0:k1],
            bias=None if bias is None else _part(bias, q0, q1, k0, k1),
            **options,
        )
        outs.append(out)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
    return out.transpose(1, 2).contiguous(), None


# Keyword arguments that a layer may pass to attention. head_mask (transformers 4) is checked in the call; the
# other six in this list are ignored, as in eager attention.
KEYWORDS = frozenset(inspect.signature(attention_forward).parameters) | {
    "head_mask", "cache_position", "deterministic", "max_length_k", "max_length_q", "output_attentions",
    "position_ids",
}  # fmt: skip


def refuse_weights(_: Any, args: Any, others: dict[str, Any]) -> None:
    """Forward pre-hook that raises ValueError if the call asks for attention weights."""
    if others.get("output_attentions"):
        expected = (
            "None or False: monoidreduce stores no weights (monoidreduce.integrations.transformers.undo"
        )
        expected += '(model), or attn_implementation="eager", gives them)'
        raise ValueError(mismatch("output_attentions", expected, True))


def _weights_are_captured() -> bool:
    """Whether the running model was called with output_attentions, which collects weights from its layers."""
    if _active_collector is None or torch.compiler.is_compiling():
        return False
    return any("attentions" in name for name in _active_collector.get() or ())


def _dropout_beside_learned_bias(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    scale: float | None,
    window: tuple[int | None, int | None],
    dropout_p: float,
    **others: Any,
) -> Tensor:
    """Attention by torch, which may store the weights; the bias is as large.

    `attention` finds the gradient of a bias beside dropout as that of a captured table. On a CPU, and in the
    deterministic mode without tensor cores, torch does so, one head at a time (14 times as long as this for
    4 x 6 heads of 128 tokens on a CPU). Otherwise kernels do, which was not measured. others: None.
    """
    rows, columns = q.shape[2], k.shape[2]
    row, column = (torch.arange(n, device=q.device) for n in (rows, columns))
    distance = column - (row[:, None] + columns - rows)
    left, right = window
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen = seen if left is None else seen & (distance >= -left)
    seen = seen if right is None else seen & (distance <= right)
    # The lowest number, as in eager attention: with -inf a query that sees no key would be NaN.
    bias = bias.clamp(min=torch.finfo(bias.dtype).min)
    bias = torch.where(seen, bias, torch.finfo(bias.dtype).min).to(q.dtype)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, bias, dropout_p, scale=scale)


def _varlen(query: Tensor, key: Tensor, value: Tensor, starts: tuple[Tensor, Tensor], options: Any) -> Tensor:
    """`attention_varlen` of the batch flattened to B * M tokens; returns [B, M, H, D]."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    out: Tensor = attention_varlen(q, k, v, *starts, **options)
    return out.reshape(len(query), query.shape[2], *out.shape[1:]).contiguous()


def _of_all_rows(starts: Tensor, batch: int, length: int, others: Tensor | None) -> Tensor:
    """cu_seqlens over the flattened batch, from cu_seqlens that hold in every row.

    others: starts over the flattened batch, which are merged in. The end of a row equals the start of the
    next row, so an empty sequence lies between them.
    """
    if batch == 1 and others is None:
        return starts
    rows = length * torch.arange(batch, device=starts.device)
    found = (rows[:, None] + starts).flatten()
    return found if others is None else torch.cat((found, others)).sort().values


def _masked(bias: Tensor | None, mask: Tensor) -> Tensor:
    """One additive or bool bias from a bias of the scores and a mask, bool or additive; they broadcast."""
    if bias is None:
        return mask
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _part(bias: Tensor, q0: int, q1: int, k0: int, k1: int) -> Tensor:
    """Queries q0 to q1 and keys k0 to k1 of a bias; an axis of size 1 broadcasts and stays."""
    bias = bias[..., q0:q1, :] if bias.shape[-2] > 1 else bias
    return bias[..., k0:k1] if bias.shape[-1] > 1 else bias


def _both(of_queries: Tensor | None, of_keys: Tensor | None, query: Tensor) -> list[Tensor]:
    found = []
    for name, starts in (("cu_seq_lens_q", of_queries), ("cu_seq_lens_k", of_keys)):
        if starts is None:
            raise ValueError(mismatch(name, "a tensor [sequences + 1], as the other's is given", None))
        integers = isinstance(starts, Tensor) and starts.dtype in (torch.int32, torch.int64)
        if not integers or starts.dim() != 1:
            given = f"{starts.dtype} {list(starts.shape)}" if isinstance(starts, Tensor) else type(starts)
            raise TypeError(mismatch(name, "a tensor [sequences + 1] of int32 or int64", given))
        if starts.device != query.device:
            raise ValueError(mismatch(name, f"a tensor on {query.device} as the queries", starts.device))
        found.append(starts)
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled graph can not read where sequences begin
def _sequences(
    of_queries: Tensor, of_keys: Tensor, rows: int, columns: int
) -> list[tuple[int, int, int, int]]:
    """(first query, last query + 1, first key, last key + 1) of each sequence."""
    q, k = of_queries.tolist(), of_keys.tolist()
    for name, starts, end in (("cu_seq_lens_q", q, rows), ("cu_seq_lens_k", k, columns)):
        if starts[:1] != [0] or starts[-1] != end or starts != sorted(starts) or len(starts) != len(q):
            expected = f"{len(q)} numbers that ascend from 0 to {end}"
            raise ValueError(mismatch(name, expected, starts))
    return list(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True))
