"""Tiny models of every architecture of the installed transformers. A step takes milliseconds.

A tiny config is the default config with its sizes replaced, chosen by their names. Two layers are kept, or
one of each kind, at most four. Architectures that can not be built that way are left out.
"""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

VOCABULARY = 99
LENGTH = 12
MOST_PARAMETERS = 3_000_000

SIZES = [
    (
        r"(decoder_|unpadded_|src_|tgt_|audio_|t2u_)?vocab_size(_per_layer_input)?|shape_vocab_size"
        r"|pronunciation_vocab_size|encoder_hash_byte_group_vocab",
        VOCABULARY,
    ),
    (
        r"(text_|image_text_|encoder_|attention_|backbone_|audio_|image_|out_|projector_|downsample_"
        r"|cross_attention_)?hidden_size|d_model|n_embd|(word_)?embed(ding)?_(dim|size|proj_dim)|hidden_dim|dim"
        r"|emb_dim|output_dim|projection_dim|lru_width|hidden_size_global|d_embed|adapter_(out_dim|input_size)"
        r"|(in|out)put_embedding_size|vision_output_dim|(shape|pronunciation)_embed_dim",
        32,
    ),
    (
        r".*intermediate_size.*|.*ffn_dim|d_ff|n_inner|.*ffn_hidden_size|dim_ff|dff|mlp_dim|feed_forward_size"
        r"|d_inner|.*ffn_embed_dim|ffn_size",
        48,
    ),
    (r".*key_value_heads|num_kv_heads|num_query_groups|multi_query_group_num|index_n_heads", 2),
    (r"(.*_)?attention_heads|.*num_heads|n_heads?|linear_num_(key_|value_)?heads|mamba_n(um)?_heads", 4),
    (
        r"(global_|.*swa_|mamba_|linear_|linear_key_|linear_value_|v_|qk_nope_|index_)?head_dim|kv_channels"
        r"|attention_head_size|d_kv|d_head|dim_head|mamba_headdim|mamba_d_head|query_pre_attn_scalar|patch_size"
        r"|state_size|mamba_d_state|ssm_state_size",
        8,
    ),
    (r"(q|kv|o)_lora_rank|image_size", 16),
    (r"qk_head_dim", 12),
    (r"qk_rope_head_dim|rotary_dim|n_routed_experts|num_(local_)?experts|moe_num_experts|index_topk", 4),
    (r"num_experts_per_tok(en)?|moe_(top)?k|.*(layers|layer|depth|blocks)", 2),
    (r"n_groups?|topk_group|num_expert_group|mamba_n_groups|o_groups", 1),
    (
        r".*max_position_embeddings|n_positions|max_(source|target)_positions|n_ctx|context_length"
        r"|model_max_length|max_seq_len|max_length",
        64,
    ),
    (
        r"sliding_window(_size)?|(local_)?attention(_window)?(_size|_len)?|local_radius|.*attn?_chunk_(size|length)|attention_chunk_size",
        6,
    ),
]
LAYERS = r"num_hidden_layers|n_layers?|num_layers|depth|encoder_layers|decoder_layers|layers"
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
# Model type -> replacements, for configs with sizes that depend on each other.
OTHERS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}
KINDS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ")


def architectures() -> dict[str, str]:
    """The model type of each class that transformers' auto classes for these tasks know."""
    found: dict[str, str] = {}
    for kind in KINDS:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, model_type)
    return found


def _kept_layers(config: dict[str, Any]) -> tuple[int, list[int], set[str]]:
    """The number of layers, the layers kept, and the names of lists with an element for each layer."""
    sizes = [v for k, v in config.items() if re.fullmatch(LAYERS, k) and type(v) is int]
    number = max(sizes, default=0)
    lists = {k: v for k, v in config.items() if isinstance(v, list) and len(v) == number > 3}
    kinds = [str([v[i] for v in lists.values() if isinstance(v[i], str)]) for i in range(number)]
    kept = [i for i, kind in enumerate(kinds) if kinds.index(kind) == i][:4]
    kept += [i for i in range(number) if i not in kept][: max(0, 2 - len(kept))]
    return number, sorted(kept), set(lists)


def _shrunk(config: dict[Any, Any]) -> dict[Any, Any]:
    named = {k: v for k, v in config.items() if isinstance(k, str)}
    number, kept, lists = _kept_layers(named)
    found = dict(config)
    for key, value in named.items():
        if key in ("transformers_version", "dtype", "torch_dtype"):
            del found[key]
        elif key in lists:
            found[key] = [value[i] for i in kept]
        elif key == "per_layer_config" and isinstance(value, dict):
            own = {int(i): v for i, v in value.items()}
            found[key] = {str(at): _shrunk(own[i]) for at, i in enumerate(kept) if i in own}
        elif isinstance(value, dict) and key not in ("id2label", "label2id"):
            found[key] = _shrunk(value)
        elif type(value) is int:
            size = next((size for names, size in SIZES if re.fullmatch(names, key)), None)
            if key in TOKENS:
                found[key] = TOKENS[key]
            elif key.endswith(("token_id", "token_index")):
                found[key] = min(value, VOCABULARY - 1 - sum(map(ord, key)) % 20)
            elif kept and value == number and re.fullmatch(LAYERS, key):
                found[key] = len(kept)
            elif size is not None:
                found[key] = min(value, size)
        elif type(value) is float and "drop" in key:
            found[key] = 0.0
        elif type(value) is float and key in ("initializer_range", "init_std") and value < 0.2:
            found[key] = 0.12  # so that attention is far from uniform
    if type(found.get("kv_lora_rank")) is int and "num_attention_heads" in found:  # MLA
        found["num_key_value_heads"] = found["num_attention_heads"]
        found["head_dim"] = found.get("qk_rope_head_dim")
    return found


def tiny_config(name: str, model_type: str) -> Any:
    kind = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[model_type])
    own = getattr(getattr(transformers, name), "config_class", None)
    kind = own if isinstance(own, type) else kind
    config = kind.from_dict({**_shrunk(kind().to_dict()), **OTHERS.get(kind.model_type, {})})
    if not config.is_encoder_decoder and hasattr(config, "is_decoder"):
        config.is_decoder = True
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def tiny_model(name: str, model_type: str) -> Any:
    """A model with eager attention, in training mode; None if it can not be made small enough."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = tiny_config(name, model_type)
            kind = getattr(transformers, name)
            with torch.device("meta"):
                parameters = kind(copy.deepcopy(config)).parameters()
            if sum(p.numel() for p in parameters) > MOST_PARAMETERS:
                return None
            config._attn_implementation = config._experts_implementation = "eager"
            return _initialised(kind, config)
        except Exception:  # inconsistent configs raise errors of any type
            return None


def _initialised(kind: Any, config: Any) -> Any:
    """A model with all parameters initialised.

    Some models leave parameters uninitialised. In torch's deterministic mode they are filled with NaN, so
    that they can be found and replaced by random numbers.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        torch.manual_seed(0)
        model = kind(config).train()
    finally:
        torch.use_deterministic_algorithms(before)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.isfinite().all():
                parameter.normal_(std=0.1)
    return model


def tiny_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Two sequences of token ids, with labels; some labels are ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 70, (2, LENGTH), generator=generator)
    labels = ids.clone()
    labels[1, 3:5] = -100
    inputs = {"input_ids": ids, "labels": labels}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, 70, (2, LENGTH), generator=generator)
    return inputs
