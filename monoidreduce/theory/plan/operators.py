"""Rows of Table 3 for the operators of this library, whose partial results combine by their monoid.

The paper has none of these. Two bytes an element; statistics are float32.
"""

from __future__ import annotations

from monoidreduce.theory.plan._positive import check_numbers
from monoidreduce.theory.plan.collectives import sent
from monoidreduce.theory.plan.roofline import Work
from monoidreduce.theory.plan.strategies import Phases, tensor_parallel

__all__ = ["STATE_BYTES", "context_parallel", "hidden_parallel", "vocabulary_parallel"]

BF16 = 2
STATE_BYTES = 3 * 4  # of a token's state of cross entropy: frame, mass and target score, in float32


def vocabulary_parallel(
    tokens: float, width: float, vocabulary: float, chips: float, recompute: bool = True
) -> Phases:
    """Cross entropy with the weight's classes sharded; all chips hold the same tokens: I_I >= V / K.

    Forward, the states of three floats a token are all-reduced: 24 B bytes. Backward, the gradient of the
    tokens [tokens, width] is: 4 B d bytes.

    recompute: backward computes the logits again, 6 B d V / K FLOPs; if not, local gradients were kept, 4.
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
    """Attention with each sequence sharded; keys and values go round a ring: I_I = T / K, causal half.

    A chip attends from its T / K queries to one shard after another and merges the results
    (`monoidreduce.merge_attention`). All-gathered, the shards are keys and values of `kv_width` columns;
    backward gathers them again and reduce-scatters their gradients. Fewer heads of keys send less, so I_I is
    width / kv_width times as large. Causal work is taken to be balanced between chips.
    """
    check_numbers(sequences=sequences, length=length, width=width, kv_width=kv_width, chips=chips)
    flops = sequences * length**2 * width / chips / (2 if causal else 1)
    keys_and_values = 2 * BF16 * sequences * length * kv_width
    return Phases(
        Work(4 * flops, sent("all-gather", keys_and_values)),
        Work(8 * flops, sent("all-gather", keys_and_values) + sent("reduce-scatter", keys_and_values)),
    )


def hidden_parallel(tokens: float, width: float, hidden: float, chips: float) -> Phases:
    """The MLP with its hidden width sharded: I_I = D / K of tensor parallelism. Its monoid is the sum.

    Hidden values are computed again in backward: 10 B d D / K FLOPs where the paper has 8.
    """
    stored = tensor_parallel(tokens, width, hidden, chips)
    return Phases(stored.forward, stored.backward + Work(stored.forward.flops / 2, 0))
