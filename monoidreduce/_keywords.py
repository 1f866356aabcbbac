"""Errors for unknown keyword arguments, with hints for old ones and those of torch and other libraries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

__all__ = ["refuse"]

ATTENTION_BIAS = "write bias, which is bool (False excludes a pair) or is added to the scores"
PADDING = "write bias=mask[:, None, None, :], where mask [B, N] is False at the keys to be excluded"
SEQUENCES = "call attention_varlen"
LENGTHS = "leave it out: kernels read the lengths on the device"
WINDOW = "write window, (left, right), with None for all keys on a side"
DROPOUT = "there is no dropout here; attention has dropout_p"
HEADS = "leave it out: k and v may have fewer heads than q"
SCALE = "write scale"


def _over_ranks(*options: str) -> dict[str, str]:
    """Hints for keywords that are now fields of `Ranks`. options: the fields that the operator uses."""
    hints = {option: f"write ranks=mr.Ranks(group, {option}=...)" for option in options}
    return {"process_group": "write ranks, which takes a group too"} | hints


OF_COLUMNS = _over_ranks("classes", "sequence_parallel", "grad_dtype")
OF_POSITIONS = _over_ranks("method", "layout", "length", "grad_dtype")
# Only modules lack these keywords.
OF_MODULES = {"ranks": "call the function instead: modules compute on one rank"}

# For each operator: an old keyword, or one of another library -> a hint.
MEANT = {
    "attention": {
        "is_causal": "write causal, which aligns the last query with the last key (torch: the first ones)",
        "attn_mask": ATTENTION_BIAS,
        "attention_mask": ATTENTION_BIAS,
        "attn_bias": ATTENTION_BIAS,
        "mask": ATTENTION_BIAS,
        "key_padding_mask": PADDING,
        "padding_mask": PADDING,
        "dropout": "write dropout_p",
        "enable_gqa": HEADS,
        "softmax_scale": SCALE,
        "sm_scale": SCALE,
        "window_size": WINDOW,
        "sliding_window": WINDOW,
        "logits_soft_cap": "write softcap",
        "alibi_slopes": "write bias, slopes times distances",
        "s_aux": "write sinks",
        "cu_seqlens": SEQUENCES,
        "cu_seqlens_q": SEQUENCES,
        "cu_seqlens_k": SEQUENCES,
        "deterministic": "write torch.use_deterministic_algorithms(True) before",
        "return_attn_probs": "probabilities are not stored; return_lse=True returns their normaliser",
        **OF_POSITIONS,
        **OF_MODULES,
    },
    "attention_varlen": {
        "max_seqlen_q": LENGTHS,
        "max_seqlen_k": LENGTHS,
        "cu_seqlens": "write cu_seqlens_q",
        "softmax_scale": SCALE,
        "window_size": WINDOW,
        "s_aux": "write sinks",
        "alibi_slopes": "write score_mod, which adds slopes times distances",
        "block_mask": "write mask_mod: tiles that no sequence keeps are skipped",
        "return_attn_probs": "probabilities are not stored; return_lse=True returns their normaliser",
        **OF_POSITIONS,
    },
    "linear_cross_entropy": {
        "class_weights": "write class_weight",
        "ce_weight": "write class_weight",
        "linear_bias": "write bias",
        "lse_square_scale": "write z_loss",
        "shift": "shift x and target yourself",
        "temperature": "write logit_scale, its inverse",
        "size_average": "write reduction",
        "reduce": "write reduction",
        **OF_COLUMNS,
        **OF_MODULES,
    },
    "linear_distillation": {
        "T": "write temperature",
        "kind": "write loss",
        **OF_COLUMNS,
        **OF_MODULES,
    },
    "linear_log_probs": OF_COLUMNS,
    "linear_topk": OF_COLUMNS,
    "linear_sample": {
        "generator": "write seed, an int or a 0-d tensor",
        "top_k": "write kept, a bit for each class",
        "top_p": "write kept, a bit for each class",
        "bitmask": "write kept",
        **OF_COLUMNS,
    },
    "logsumexp_matmul": OF_COLUMNS,
    "statistics": OF_COLUMNS,
    "map_reduce": _over_ranks(),
    "all_fold": _over_ranks(),
    "mlp": {
        "act": "write activation",
        "approximate": 'write activation="gelu_tanh"',
        "bias": "write bias1 and bias2",
        "gate_proj": "write gate",
        "up_proj": "write w1",
        "down_proj": "write w2",
        "dropout": DROPOUT,
        **_over_ranks("sequence_parallel", "grad_dtype"),
    },
}


def refuse(function: str, keywords: Iterable[str], operator: str | None = None) -> NoReturn:
    """Raise Python's TypeError for an unknown keyword argument, with a hint if there is one in MEANT.

    operator: whose hints apply; by default those of `function`.
    """
    name = next(iter(keywords))
    meant = MEANT.get(operator or function, {}).get(name)
    hint = "" if meant is None else f"; {meant}"
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
