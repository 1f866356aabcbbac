"""Attention over packed sequences with the tokens sharded over ranks, by the methods of
`distributed.attention`.

A shard of a sequence cannot be passed to the op as a shorter sequence: the op aligns the last query of a
sequence with its last key, but under a window a shard may also see keys behind the one that its last query is
aligned with. So each rank passes the cu_seqlens of all sequences, and the index of its first query.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from torch import Tensor

from monoidreduce import varlen
from monoidreduce.distributed.attention import Checked, Whole, over_ranks
from monoidreduce.distributed.group import facts_of, key_of
from monoidreduce.distributed.messages import Facts
from monoidreduce.ranks import RanksOrGroup

__all__ = ["varlen_over_ranks"]


def varlen_over_ranks(
    ranks: RanksOrGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    sinks: Tensor | None,
    return_lse: bool,
    **options: Any,
) -> Any:
    """`varlen.attention_varlen` with the tokens sharded over ranks."""

    def check(_: Whole) -> Checked:
        (*qkv, of_queries, of_keys), of_op = varlen.check_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, **options
        )

        starts = {"cu_seqlens_q": of_queries, "cu_seqlens_k": of_keys}

        def facts() -> dict[str, Any]:
            parts = {name: t[0].transpose(0, 1) for name, t in zip("qkv", qkv, strict=True)}
            found = facts_of((*parts.items(), ("sinks", sinks), *starts.items()), dict.fromkeys(parts, 0))
            return found if of_queries.is_cuda else found | values()

        def values() -> dict[str, Any]:
            return {name: _values(t) for name, t in starts.items()}

        key = key_of((*qkv, sinks, *starts.values()))
        if not of_queries.is_cuda:
            key += tuple(tuple(t.tolist()) for t in starts.values())
        return Checked((*qkv, None, of_queries, of_keys), of_op, None, Facts(key, facts, values))

    found = over_ranks("attention_varlen", ranks, check, sinks, return_lse)
    if found is None:
        tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k)
        return varlen.attention_varlen(*tensors, sinks=sinks, return_lse=return_lse, **options)
    out, lse = found
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def _values(tensor: Tensor) -> str:
    """A digest of a tensor's values, to compare between ranks. For a GPU tensor the host waits."""
    values = tensor.tolist()
    digest = sha256(repr(values).encode()).hexdigest()[:12]
    return f"{tensor.dtype} {list(tensor.shape)} up to {values[-1]}, digest {digest}"
