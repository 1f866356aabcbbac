"""Sizes of known models are those that were published, by name and by config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monoidreduce.plan import MODELS, Experts, Model, model_of
from monoidreduce.theory.plan.models import find_model

# All parameters, and for experts those of a token, as the models' papers and cards have them.
PUBLISHED = {
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.6e9,
    "llama3-405b": 405.9e9,
    "llama2-7b": 6.74e9,
    "llama2-13b": 13.02e9,
    "llama2-70b": 68.98e9,
    "qwen3-8b": 8.19e9,
    "qwen3-32b": 32.76e9,
    "qwen3-30b-a3b": (30.53e9, 3.35e9),
    "qwen3-235b-a22b": (235.1e9, 22.2e9),
    "gemma3-12b": 11.77e9,
    "gemma3-27b": 27.0e9,
    # A token's, without the embedding, are 3.61e9 and 5.13e9.
    "gpt-oss-20b": (20.91e9, 3.61e9 + 0.58e9),
    "gpt-oss-120b": (116.83e9, 5.13e9 + 0.58e9),
    "deepseek-v3": (671e9, 37.6e9),
    "palm-540b": 540.35e9,
    "gpt3-175b": 174.6e9,
    "mt-nlg-530b": 529.6e9,
}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_of_known_models(name: str) -> None:
    model, published = MODELS[name], PUBLISHED[name]
    total, used = published if isinstance(published, tuple) else (published, None)
    assert model.parameters == pytest.approx(total, rel=3e-3)
    if used is not None:  # the embedding is not used in a product
        assert model.matmul_parameters + model.head_parameters == pytest.approx(used, rel=0.03)


def config(**entries: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "vocab_size": 100,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    } | entries


def test_a_config() -> None:
    assert model_of(config()) == Model(2, 32, 64, 100, 4, 2, head_width=model_of(config()).head_width)
    assert model_of(config(head_dim=16)).query_width == 64
    assert model_of(config(tie_word_embeddings=True)).tied
    assert not model_of(config(model_type="gpt_neox")).gated
    assert model_of({"text_config": config()}) == model_of(config())


def test_a_config_of_experts() -> None:
    entries = config(
        model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    )
    assert model_of(entries).experts == Experts(8, 2, 16)


def test_a_config_of_windows() -> None:
    kinds = ["sliding_attention", "full_attention"]
    windowed = model_of(config(model_type="gemma3_text", layer_types=kinds, sliding_window=8, head_dim=8))
    assert (windowed.window, windowed.windowed) == (8, 1)
    # Half of the layers: positions 0 to 7 see half of 8 keys, the others all 8.
    assert windowed.keys_per_query(64) == pytest.approx((8 * (1 - 8 / 128) + 32) / 2)
    assert windowed.keys_per_query(8) == 4


def test_configs_of_transformers() -> None:
    """The classes' own defaults are the sizes of the model that they are named after."""
    transformers = pytest.importorskip("transformers")
    found = model_of(transformers.AutoConfig.for_model("deepseek_v3"))
    published = MODELS["deepseek-v3"]
    assert (found.latent, found.head_width) == (published.latent, published.head_width)
    assert model_of(transformers.AutoConfig.for_model("gpt_oss")) == MODELS["gpt-oss-120b"]
    gpt2 = model_of({"model_type": "gpt2"})
    assert (gpt2.layers, gpt2.width, gpt2.hidden, gpt2.tied, gpt2.gated) == (12, 768, 3072, True, False)


def test_models_by_name_and_by_file(tmp_path: Path) -> None:
    assert find_model("llama3-8b") is MODELS["llama3-8b"]
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert find_model(str(tmp_path)) == find_model(str(tmp_path / "config.json")) == model_of(config())
    with pytest.raises(ValueError, match=r"model: expected one of llama3-8b, .*a config.json, got 'llama9'"):
        find_model("llama9")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a config.json of a decoder \(config: expected hidden"):
        find_model(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        find_model(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        (dict(heads=3, kv_heads=1), "heads: expected a divisor of width 32, got 3"),
        (dict(heads=4, kv_heads=3), "kv_heads: expected a divisor of heads 4, got 3"),
        (dict(windowed=1), "windowed: expected at most the 2 layers, 0 without a window, got 1"),
        (dict(window=8, windowed=3), "windowed: expected at most the 2 layers"),
        (dict(head_width=0), "head_width: expected an int >= 1, got 0"),
    ],
)
def test_sizes_that_are_refused(entries: dict[str, Any], complaint: str) -> None:
    sizes = dict(layers=2, width=32, hidden=64, vocabulary=100, heads=4, kv_heads=2) | entries
    with pytest.raises(ValueError, match=complaint):
        Model(**sizes)
    with pytest.raises(ValueError, match="chosen: expected at most the 4 experts, got 5"):
        Experts(4, 5, 16)
