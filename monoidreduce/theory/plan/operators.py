"""Rows like those of Table 3 for this library's operators over ranks: partial results combine by the monoid.

The paper does not have these. Elements have two bytes; states are float32.
"""

from __future__ import annotations

from monoidreduce.theory.plan._positive import check_numbers
from monoidreduce.theory.plan.collectives import sent
from monoidreduce.theory.plan.roofline import Work
from monoidreduce.theory.plan.strategies import Phases, tensor_parallel

__all__ = ["STATE_BYTES", "context_parallel", "hidden_parallel", "vocabulary_parallel"]

BF16 = 2
# Cross entropy's state of a token: row max, sum of exponentials and target score, in float32.
STATE_BYTES = 3 * 4


def vocabulary_parallel(
    tokens: float, width: float, vocabulary: float, chips: float, recompute: bool = True
) -> Phases:
    """Vocabulary-parallel cross entropy; all chips hold the same tokens: I_I >= V / K.

    Forward all-reduces states of three floats per token: 24 B bytes. Backward all-reduces the gradient of the
    tokens [tokens, width]: 4 B d bytes.

    recompute: backward recomputes the logits, 6 B d V / K FLOPs. Otherwise forward saved dlogits: 4 B d V /
    K.
    """
    check_numbers(tokens=tokens, width=width, vocabulary=vocabulary, chips=chips)
    flops = tokens * width * vocabulary / chips
    return Phases(
        Work(2 * flops, sent("all-reduce", STATE_BYTES * tokens)),
        Work((6 if recompute else 4) * flops, sent("all-reduce", BF16 * tokens * width)),
    )


def context_parallel(
    sequences: float, length: float, width: float, kv_width: float, chips: float, causal: bool = True
) -> Phases:
    """Attention with sharded sequences (context parallelism): I_I = T / K, half of it if causal.

    A chip attends from its T / K queries to one shard of keys after another and merges the results
    (`monoidreduce.merge_attention`). The shards of keys and values, `kv_width` columns each, are all-gathered
    or go round a ring, which sends the same bytes. Backward gathers them again and reduce-scatters their
    gradients. With fewer key heads less is sent, so I_I is width / kv_width times as large. Causal work is
    assumed to be balanced between chips.
    """
    check_numbers(sequences=sequences, length=length, width=width, kv_width=kv_width, chips=chips)
    flops = sequences * length**2 * width / chips / (2 if causal else 1)
    keys_and_values = 2 * BF16 * sequences * length * kv_width
    return Phases(
        Work(4 * flops, sent("all-gather", keys_and_values)),
        Work(8 * flops, sent("all-gather", keys_and_values) + sent("reduce-scatter", keys_and_values)),
    )


def hidden_parallel(tokens: float, width: float, hidden: float, chips: float) -> Phases:
    """The MLP with its hidden width sharded, combined by the sum monoid: I_I = D / K, as tensor parallelism.

    Backward recomputes hidden values: 10 B d D / K FLOPs, where the paper has 8.
    """
    stored = tensor_parallel(tokens, width, hidden, chips)
    return Phases(stored.forward, stored.backward + Work(stored.forward.flops / 2, 0))
