"""Models by name, and from the config.json of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monoidreduce._validate import check_choice, mismatch
from monoidreduce.theory.plan.transformer import Experts, Latent, Model

__all__ = ["MODELS", "find_model", "gpt", "model_of"]


def gpt(layers: int, width: int, heads: int, vocabulary: int = 51200, tied: bool = True) -> Model:
    """A model as GPT-3: a feedforward layer of four widths, no gate, one weight for embedding and head."""
    return Model(layers, width, 4 * width, vocabulary, heads, heads, gated=False, tied=tied)


def _gpt_oss(layers: int, experts: int) -> Model:
    return Model(
        layers,
        2880,
        2880,
        201088,
        heads=64,
        kv_heads=8,
        head_width=64,
        window=128,
        windowed=layers // 2,
        experts=Experts(experts, 4, 2880),
        sinks=True,
    )


# Sizes are those of the checkpoints' config.json, except where the line above says otherwise.
MODELS: dict[str, Model] = {
    # "The Llama 3 Herd of Models", arXiv 2407.21783, Table 3; vocabularies as published with the weights.
    "llama3-8b": Model(32, 4096, 14336, 128256, heads=32, kv_heads=8),
    "llama3-70b": Model(80, 8192, 28672, 128256, heads=64, kv_heads=8),
    "llama3-405b": Model(126, 16384, 53248, 128256, heads=128, kv_heads=8),
    "llama2-7b": Model(32, 4096, 11008, 32000, heads=32, kv_heads=32),
    "llama2-13b": Model(40, 5120, 13824, 32000, heads=40, kv_heads=40),
    "llama2-70b": Model(80, 8192, 28672, 32000, heads=64, kv_heads=8),
    "qwen3-8b": Model(36, 4096, 12288, 151936, heads=32, kv_heads=8, head_width=128),
    "qwen3-32b": Model(64, 5120, 25600, 151936, heads=64, kv_heads=8, head_width=128),
    "qwen3-30b-a3b": Model(
        48, 2048, 6144, 151936, heads=32, kv_heads=4, head_width=128, experts=Experts(128, 8, 768)
    ),
    "qwen3-235b-a22b": Model(
        94, 4096, 12288, 151936, heads=64, kv_heads=4, head_width=128, experts=Experts(128, 8, 1536)
    ),
    # Five layers of six have a window.
    "gemma3-12b": Model(
        48, 3840, 15360, 262208, heads=16, kv_heads=8, tied=True, head_width=256, window=1024, windowed=40
    ),
    "gemma3-27b": Model(
        62, 5376, 21504, 262208, heads=32, kv_heads=16, tied=True, head_width=128, window=1024, windowed=52
    ),
    # Every second layer has a window.
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v3": Model(
        61,
        7168,
        18432,
        129280,
        heads=128,
        kv_heads=128,
        head_width=192,
        value_width=128,
        experts=Experts(256, 8, 2048, shared=1, dense=3, nodes=4),
        latent=Latent(queries=1536, keys=512, rotary=64),
    ),
    # "PaLM", arXiv 2204.02311, Table 1: heads of 256 columns, one head of keys, parallel layers.
    "palm-540b": Model(
        118, 18432, 73728, 256000, heads=48, kv_heads=1, tied=True, head_width=256, parallel=True
    ),
    # "Language Models are Few-Shot Learners", arXiv 2005.14165, Table 2.1; GPT-2's vocabulary, padded.
    "gpt3-175b": gpt(96, 12288, 96),
    # "Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B", arXiv 2201.11990, section 2.2.
    "mt-nlg-530b": gpt(105, 20480, 128),
}


def find_model(name: str) -> Model:
    """The model of this name, or of the config.json at this path.

    Raises ValueError for a name that is neither in `MODELS` nor a file, and for a file that is no such
    configuration; OSError if it cannot be read.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json":
        check_choice("model", name, (*MODELS, "a config.json"))
    try:
        config = json.loads(path.read_text("utf-8"))
        return model_of(config)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(mismatch("model", f"a config.json of a decoder ({error})", name)) from error


def model_of(config: Any) -> Model:
    """The sizes in a configuration of transformers, or in the dict of a config.json.

    With transformers installed, its classes fill in what the dict leaves out. Of a model of text and images,
    the text's part counts.

    Raises ValueError if a size that is needed is missing, or a size is not as `Model` says.
    """
    entries: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    if isinstance(entries.get("text_config"), Mapping):
        return model_of(entries["text_config"])
    entries = {**_defaults(entries), **entries}

    def size(*names: str) -> Any:
        return next((entries[name] for name in names if entries.get(name) is not None), None)

    def needed(*names: str) -> Any:
        if (found := size(*names)) is None:
            raise ValueError(mismatch("config", " or ".join(names), "none"))
        return found

    width, heads = (
        needed("hidden_size", "n_embd", "d_model"),
        needed("num_attention_heads", "n_head", "n_heads"),
    )
    layers = needed("num_hidden_layers", "n_layer", "n_layers")
    hidden = size("intermediate_size", "n_inner", "ffn_dim") or 4 * width
    windows = entries.get("layer_types") or ()
    windowed = sum(kind == "sliding_attention" for kind in windows)
    window = size("sliding_window") if entries.get("use_sliding_window") is not False else None
    if window is not None and not windows:
        windowed = layers
    latent = None
    head_width, value_width = size("head_dim"), size("v_head_dim")
    if keys := size("kv_lora_rank"):
        latent = Latent(size("q_lora_rank"), keys, needed("qk_rope_head_dim"))
        head_width = needed("qk_nope_head_dim") + latent.rotary
    return Model(
        layers=layers,
        width=width,
        hidden=hidden,
        vocabulary=needed("vocab_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads") or heads,
        gated=str(entries.get("model_type")) not in _UNGATED,
        tied=bool(entries.get("tie_word_embeddings", False)),
        head_width=head_width,
        value_width=value_width,
        window=window if windowed else None,
        windowed=windowed if window else 0,
        experts=_experts(entries, layers, hidden),
        latent=latent,
        sinks=entries.get("model_type") == "gpt_oss",
    )


# By `model_type`; the others' feedforward layers have a gate.
_UNGATED = (
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "opt",
    "bloom",
    "mpt",
    "falcon",
    "phi",
    "starcoder2",
    "nemotron",
)


def _experts(entries: Mapping[str, Any], layers: int, hidden: int) -> Experts | None:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    count = next((entries[name] for name in names if entries.get(name)), None)
    if not count:
        return None
    of_one = entries.get("moe_intermediate_size") or hidden
    shared = entries.get("n_shared_experts") or 0
    if wide := entries.get("shared_expert_intermediate_size"):
        shared = -(-wide // of_one)
    dense = entries.get("first_k_dense_replace") or len(entries.get("mlp_only_layers") or ())
    return Experts(count, entries["num_experts_per_tok"], of_one, shared, min(dense, layers))


def _defaults(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config's entries, completed by the defaults of transformers' class for its `model_type`.

    Empty if there is no such class, or no transformers.
    """
    try:
        from transformers import AutoConfig

        found = AutoConfig.for_model(**entries)
    except (ImportError, TypeError, ValueError, KeyError, AttributeError):
        return {}
    return dict(found.to_dict())
