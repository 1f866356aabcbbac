"""transformers' attention and mask interfaces over `mr.attention`.

transformers calls the mask function once per forward pass and kind of layer, and hands what it returns to the
attention function of every layer. What it returns is one of:

- a Band: which keys lie near enough, and which are padding. Nothing of queries times keys is stored.
- Packed: sequences that are packed in the rows of a batch.
- Stored: which pairs of queries and keys count, where nothing less says it: chunks, static caches.

It is never None, so that a layer need not be causal by itself. Layers that compute something of a mask get
the tensor that transformers' eager attention would have. Masks of users come as tensors [B, 1, M, N].
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
from monoidreduce.integrations._sources import dropout_error
from monoidreduce.varlen import attention_varlen

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # before 5.2
    _active_collector = None
CAPTURES = _active_collector is not None  # else layers do not know that their weights are wanted

# What other implementations of attention take in place of a mask, or beside it. All other arguments that are
# not known come from the model's caller: eager attention makes nothing of them either.
OF_OTHERS = ("block_indices", "cache", "head_mask", "indices", "sinks")


@dataclass(frozen=True)
class Mask:
    """Takes little memory until something computes with it, which turns it into eager attention's tensor."""

    make: Callable[[], Tensor] = field(kw_only=True)

    def dense(self) -> Tensor:
        """[B, 1, M, N]: 0 where a key counts, and the least number of the dtype elsewhere."""
        if "made" not in vars(self):
            object.__setattr__(self, "made", self.make())
        return vars(self)["made"]  # type: ignore[no-any-return]

    # generate() makes masks before it calls a model with a static cache. It takes them for tensors, and the
    # model hands the one that it got to its own mask function.
    @property
    def ndim(self) -> int:
        return 4

    def contiguous(self) -> Mask:
        return self

    # accelerate moves the arguments of a layer to its GPU, where a model's layers are on several.
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
    """`window` of `mr.attention` around the key that a query is aligned with, less the padding.

    The last query is aligned with the last key, or the first with the first: more keys are to come then.
    """

    window: tuple[int | None, int | None]
    keys: Tensor | None = None  # [B, N] bool, False at padding
    from_first: bool = False


@dataclass(frozen=True, eq=False)
class Packed(Mask):
    """`window` of `mr.attention_varlen` within sequences of the tokens of all batches [B * L]."""

    window: tuple[int | None, int | None]
    starts: Tensor  # its cu_seqlens


@dataclass(frozen=True, eq=False)
class Stored(Mask):
    pairs: Tensor  # [B, 1, M, N] bool, True where a key counts


# Before transformers 5.4 masks are told where their queries are by a tensor, cache_position [queries].
BY_POSITION = "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters


def _made_by(make: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function of transformers with the arguments that it has since 5.4."""

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
    """`attention_mask` as transformers before 5.4 calls for it.

    The host waits for the first position where there is a cache.
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
    """The mask of one kind of layer, as `AttentionMaskInterface` calls for it.

    Where transformers allows a mask to be skipped, it is causal or bidirectional. It has a window of
    local_size or none, and the padding that attention_mask [B, all keys] has. Query i is at q_offset + i, and
    key j at kv_offset + j. Causal masks of packed sequences are known by their functions. Other masks are
    made of mask_function, and so are masks of static caches, whose last key is not the last query's.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    lengths = batch_size, q_length, kv_length, q_offset, kv_offset
    make = partial(eager_mask, *lengths, mask_function, attention_mask, **options)
    # torch.compile can not look into functions.
    ids = None if torch.compiler.is_compiling() else _sequence_ids(mask_function, local_size)
    if ids is not None and attention_mask is None:
        return Packed((None if local_size is None else local_size - 1, 0), _starts(ids), make=make)
    plain = allow_is_causal_skip or allow_is_bidirectional_skip
    chunked = local_size is not None and getattr(config, "attention_chunk_size", None) is not None
    # A bidirectional mask without a window needs no alignment: it is that of cross attention too.
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    aligned = aligned or (allow_is_bidirectional_skip and local_size is None)
    if not plain or chunked or not aligned:
        options |= {"allow_is_causal_skip": allow_is_causal_skip, "config": config}
        options |= {"allow_is_bidirectional_skip": allow_is_bidirectional_skip}
        pairs = sdpa_mask(*lengths, mask_function, attention_mask, local_size, **options)
        if pairs is not None:
            return Stored(pairs, make=make)
        # Nothing but what is causal excludes a key. A single query sees all; more are the first of a cache.
        causal = allow_is_causal_skip and q_length > 1
        return Band((None, 0 if causal else None), from_first=causal, make=make)
    keys = _padding(attention_mask, kv_offset, kv_length)
    if local_size is not None and local_size >= kv_length:
        local_size = None
    if allow_is_causal_skip:
        return Band((None if local_size is None else local_size - 1, 0), keys, make=make)
    return Band((local_size, local_size), keys, make=make)


def _closure(function: Any, name: str) -> dict[str, Any]:
    """The variables around a function that one of transformers' masking_utils made, if that is its name."""
    known = getattr(function, "__module__", None) == masking_utils.__name__
    if not known or function.__qualname__ != f"{name}.<locals>.{function.__name__}":
        return {}
    return {
        n: cell.cell_contents
        for n, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    }


def _sequence_ids(mask_function: Any, local_size: int | None) -> Tensor | None:
    """The number of each token's sequence [B, L] where a mask is causal within packed sequences, with this
    window or none, and nothing else."""

    def both(function: Any) -> tuple[Any, ...]:
        parts = _closure(function, "and_masks").get("mask_functions", ())
        return parts if len(parts) == 2 else (None, None)

    of_sequences, of_positions = both(mask_function)
    within = _closure(of_positions, "remap_positions_for_packed_sequence").get("mask_function")
    if within is None:  # transformers 5.4: in the other order, and of positions among all tokens
        within, of_sequences = of_sequences, of_positions
    if local_size is not None:
        window, within = both(within)
        if _closure(window, "sliding_window_overlay") != {"sliding_window": local_size}:
            return None
    if within is not causal_mask_function:
        return None
    return _closure(of_sequences, "packed_sequence_mask_function").get("packed_sequence_mask")


def _starts(ids: Tensor) -> Tensor:
    """Where sequences start among the tokens of all batches: as many as there could be, most of them empty.

    The host need not know how many there are.
    """
    batch, length = ids.shape
    flat = (ids + length * torch.arange(batch, device=ids.device)[:, None]).flatten()
    return torch.searchsorted(flat, torch.arange(batch * length + 1, device=ids.device))


def _padding(mask: Tensor | None, offset: int, length: int) -> Tensor | None:
    """Which of the keys are not padding [B, length], None if all are. Keys beyond the mask are padding."""
    if mask is None:
        return None
    keys = mask[:, offset : offset + length]
    keys = nn.functional.pad(keys, (0, length - keys.shape[1])) if keys.shape[1] < length else keys
    if torch.compiler.is_compiling() or (keys.is_cuda and torch.cuda.is_current_stream_capturing()):
        return keys  # whose values can not be read
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
    """Attention of one layer, as `AttentionInterface` calls for it.

    Args:
        module: the layer. Where a model makes no mask, its `is_causal` says what that means, unless is_causal
            is given.
        query: [B, H, M, F].
        key, value: [B, Hkv, N, F] and [B, Hkv, N, D].
        attention_mask: what `attention_mask` above returned, or a mask [B or 1, H or 1, M, N], bool or
            additive. Such a mask is then all that limits the keys.
        sliding_window: of the layer. The mask has it already.
        s_aux: [H] sinks, one more score of each row, whose value is 0.
        position_bias: [B or 1, H, M, N], added to the scores before the mask.
        cu_seq_lens_q, cu_seq_lens_k: [sequences + 1] where packed sequences of each row of the batch begin,
            and the end. With a mask that is stored or a position_bias each is a call of its own, for which
            the host waits for the lengths.
        others: what else the model was called with. eager attention makes nothing of it either.

    Returns:
        [B, M, H, D], and None in place of the weights.

    Raises:
        ValueError, TypeError: an argument that would change the result is not supported.
    """
    if dropout:
        raise ValueError(f"{type(module).__name__}: {dropout_error(module, dropout)}")
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
        from_first = causal and rows > 1 and not packed  # as torch's attention aligns them
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

    if from_first and rows < columns:  # more keys are to come: a static cache
        key, value, columns = key[:, :, :rows], value[:, :, :rows], rows
        bias = bias if bias is None or bias.shape[-1] == 1 else bias[..., :rows]
    options: Any = {"scale": scaling, "window": window, "softcap": softcap, "sinks": s_aux}
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
        out = attention(
            query[:, :, q0:q1],
            key[:, :, k0:k1],
            value[:, :, k0:k1],
            bias=None if bias is None else _part(bias, q0, q1, k0, k1),
            **options,
        )
        outs.append(out)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
    return out.transpose(1, 2).contiguous(), None


# Arguments that a model may give attention by name. eager attention makes nothing of the last six; head_mask,
# of transformers 4, is checked in the call.
KEYWORDS = frozenset(inspect.signature(attention_forward).parameters) | {
    "head_mask", "cache_position", "deterministic", "max_length_k", "max_length_q", "output_attentions",
    "position_ids",
}  # fmt: skip


def refuse_weights(_: Any, args: Any, others: dict[str, Any]) -> None:
    """Raise ValueError if a call is to return weights; a hook before it."""
    if others.get("output_attentions"):
        expected = (
            "None or False: monoidreduce stores no weights (monoidreduce.integrations.transformers.undo"
        )
        expected += '(model), or attn_implementation="eager", gives them)'
        raise ValueError(mismatch("output_attentions", expected, True))


def _weights_are_captured() -> bool:
    """Whether the model that runs was asked for its attention weights, which it takes from its layers."""
    if _active_collector is None or torch.compiler.is_compiling():
        return False
    return any("attentions" in name for name in _active_collector.get() or ())


def _varlen(query: Tensor, key: Tensor, value: Tensor, starts: tuple[Tensor, Tensor], options: Any) -> Tensor:
    """[B, M, H, D] of packed sequences among the tokens of all batches."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    out: Tensor = attention_varlen(q, k, v, *starts, **options)
    return out.reshape(len(query), query.shape[2], *out.shape[1:]).contiguous()


def _of_all_rows(starts: Tensor, batch: int, length: int, others: Tensor | None) -> Tensor:
    """The starts in every row of a batch, as among the tokens of all rows, and others that are so already.

    The end of a row is the start of the next: between them is an empty sequence.
    """
    if batch == 1 and others is None:
        return starts
    rows = length * torch.arange(batch, device=starts.device)
    found = (rows[:, None] + starts).flatten()
    return found if others is None else torch.cat((found, others)).sort().values


def _masked(bias: Tensor | None, mask: Tensor) -> Tensor:
    """Both, broadcast: what is added to the scores, and a mask that is bool or is added too."""
    if bias is None:
        return mask
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _part(bias: Tensor, q0: int, q1: int, k0: int, k1: int) -> Tensor:
    """Rows and columns of a bias, whose axes of size 1 are broadcast."""
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
    """The ranges of queries and of keys of each sequence."""
    q, k = of_queries.tolist(), of_keys.tolist()
    for name, starts, end in (("cu_seq_lens_q", q, rows), ("cu_seq_lens_k", k, columns)):
        if starts[:1] != [0] or starts[-1] != end or starts != sorted(starts) or len(starts) != len(q):
            expected = f"{len(q)} numbers that ascend from 0 to {end}"
            raise ValueError(mismatch(name, expected, starts))
    return list(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True))
