"""Models of transformers, made from configs, beside their own eager attention and loss.

tests/support/training_steps.py has the rule.
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dropout import dropped
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from inductor import leave_out_code
from packaging.version import Version
from sampled import sampled
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from training_steps import assert_same_step

import monoidreduce as mr

transformers = pytest.importorskip("transformers", minversion="4.57")

from monoidreduce.integrations import _attention, _layers, _mlp  # noqa: E402
from monoidreduce.integrations._layers import layers_of  # noqa: E402
from monoidreduce.integrations.transformers import Replaced, apply, register, replaced, undo  # noqa: E402

# Older ones have BERT and T5 without AttentionInterface, and experts that torch.compile does not take.
needs_newer = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="this transformers has not what is tested"
)

VOCABULARY = 301

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.12,  # so that attention is far from uniform
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 6}
MLA = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
# The name of the classes, and what its config has beside COMMON.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", WINDOW),
    "gemma2": (
        "Gemma2",
        {
            **WINDOW,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **WINDOW,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": ("GptOss", {**WINDOW, "head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", MLA),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "granite": ("Granite", {"logits_scaling": 3.0, "initializer_range": 0.1}),
    "mixtral": ("Mixtral", {"num_local_experts": 2, "output_router_logits": True}),
}
MAIN = tuple(FAMILIES)[:8]


def made(family: str, **options: Any) -> Any:
    """A model with eager attention, in training."""
    name, own = FAMILIES[family]
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config_class(**{**COMMON, **own, **options}, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name or "bias" in parameter_name:
                parameter.normal_(std=1.0 if "sinks" in parameter_name else 0.1)
    return model.train()


def applied(model: Any, **options: bool) -> Any:
    return apply(copy.deepcopy(model), **options)


def doubled(model: Any) -> Any:
    """In float64, which experts take one by one."""
    copied = copy.deepcopy(model).double()
    copied.config._experts_implementation = "eager"
    return copied


def batch(case: str = "plain") -> dict[str, Tensor]:
    """Of 24 tokens: two sequences, one of them padded on the left or none, or three that are packed."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    labels = ids.clone()
    labels[1, 3:5] = -100
    if case == "padded":
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        labels[0, :5] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}
    if case == "packed":
        positions = torch.cat([torch.arange(5), torch.arange(12), torch.arange(7)])[None]
        return {"input_ids": ids.view(1, -1), "labels": labels.view(1, -1), "position_ids": positions}
    return {"input_ids": ids, "labels": labels}


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(model: Any, called: Any = None, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of the parameters. `called` is what is called in the model's place."""
    model.zero_grad()
    loss = (model if called is None else called)(use_cache=False, **inputs).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that layers are given."""
    given: list[Any] = []
    attention_forward = _attention.attention_forward

    def noting(*arguments: Any, **options: Any) -> Any:
        given.append(arguments[4])
        return attention_forward(*arguments, **options)

    monkeypatch.setattr("monoidreduce.integrations.transformers.attention_forward", noting)
    yield given
    monkeypatch.undo()
    register()


class LargeTensors(TorchDispatchMode):
    """Counts results with an axis of all classes that are no parameter's: logits and what is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (VOCABULARY,) and tensor.dim() > 1:
                self.found.append((str(function), list(tensor.shape)))
        return result


# ---- training


@pytest.mark.parametrize("case", ["plain", "padded", "packed"])
@pytest.mark.parametrize("family", MAIN)
def test_loss_and_gradients_are_those_of_eager(family: str, case: str, masks: list[Any]) -> None:
    eager = made(family)
    ours = applied(eager)
    inputs = batch(case)
    expected = step(eager, **inputs)
    for _ in range(2):  # the second knows what the model does to its logits
        assert_same_step(step(ours, **inputs), expected, lambda: step(doubled(eager), **inputs))
    packed = [mask for mask in masks if isinstance(mask, _attention.Packed)]
    assert len(masks) == 2 * eager.config.num_hidden_layers
    # transformers 4 takes all rows without padding for packed ones.
    by_default = case == "plain" and Version(transformers.__version__) < Version("5")
    are_packed = case == "packed" or by_default
    assert len(packed) == (len(masks) if are_packed and family != "gpt_oss" else 0)
    assert not any(isinstance(mask, _attention.Stored) for mask in masks)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_packed_sequences_of_several_batches(family: str) -> None:
    """Each batch has its own, which are of other lengths."""
    eager = made(family)
    ours = applied(eager)
    inputs = batch()
    lengths = ((5, 7), (1, 2, 9))
    inputs["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in lengths])
    assert_same_step(step(ours, **inputs), step(eager, **inputs))


@pytest.mark.skipif(not hasattr(transformers.masking_utils, "bidirectional_mask_function"), reason="5.0")
def test_only_plain_masks_of_packed_sequences_are_known() -> None:
    """Whatever else a mask has, it is made, and nothing of it is left out."""
    from transformers import masking_utils as made_by

    ids = torch.tensor([[0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 0, 1, 2]])

    def packed_by_positions(function: Any) -> Any:
        return made_by.and_masks(function, made_by.packed_sequence_mask_function(ids))  # as in 5.4

    def packed(function: Any) -> Any:
        if hasattr(made_by, "packed_sequence_compatibility_function"):
            return made_by.packed_sequence_compatibility_function(function, positions, ids)
        return packed_by_positions(function)

    causal, windowed = made_by.causal_mask_function, made_by.sliding_window_causal_mask_function(2)
    for of_sequences in (packed, packed_by_positions):
        assert _attention._sequence_ids(of_sequences(causal), None) is ids
        assert _attention._sequence_ids(of_sequences(windowed), 2) is ids
    other = made_by.and_masks(causal, made_by.padding_mask_function(ids.bool()))
    for function, window in (
        (causal, None),
        (packed(windowed), None),
        (packed(causal), 2),
        (packed(windowed), 3),
        (packed(other), None),
        (made_by.or_masks(packed(causal), other), None),
        (made_by.and_masks(packed(causal), other), None),
        (packed(made_by.bidirectional_mask_function), None),
    ):
        assert _attention._sequence_ids(function, window) is None


@pytest.mark.parametrize("family", ["cohere", "granite", "mixtral"])
def test_scaled_logits_and_losses_of_routers(family: str) -> None:
    eager = made(family)
    ours = applied(eager)
    inputs = batch()
    for _ in range(2):
        assert_same_step(step(ours, **inputs), step(eager, **inputs))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_no_logits_are_made(family: str) -> None:
    ours, inputs = applied(made(family)), batch()
    with LargeTensors() as large:
        out = ours(**inputs)
        out.loss.backward()
    assert out.logits is None and "logits" not in out
    assert large.found == []
    with LargeTensors() as large:
        ours(**inputs, skip_logits=False)
    assert large.found != []


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"ignore_index": 5},
        {"shift_labels": torch.arange(24).view(2, 12)},
        {"logits_to_keep": 4},
        {"logits_to_keep": torch.tensor([1, 2, 7, 11])},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_arguments_of_the_loss(options: dict[str, Any]) -> None:
    eager = made("gemma2")
    ours = applied(eager)
    inputs = batch()
    if "logits_to_keep" in options:
        inputs["labels"] = inputs["labels"][:, -4:]
    if "ignore_index" in options:
        inputs["labels"] = inputs["labels"].clamp(min=0).index_fill(1, torch.tensor([3]), 5)
    assert_same_step(step(ours, **inputs, **options), step(eager, **inputs, **options))


def test_a_wrong_number_of_labels_is_an_error() -> None:
    with pytest.raises(ValueError, match="target: expected shape"):
        applied(made("llama"))(**batch(), logits_to_keep=4)


def test_a_batch_without_targets_has_loss_0() -> None:
    ours, inputs = applied(made("llama")), batch()
    loss, gradients = step(ours, **inputs | {"labels": torch.full_like(inputs["labels"], -100)})
    assert loss == 0 and all(not g.any() for g in gradients.values())


def test_logits_where_they_are_wanted() -> None:
    eager = made("gemma2")
    ours = applied(eager)
    inputs = batch()
    without = {"input_ids": inputs["input_ids"]}

    def same(model_inputs: dict[str, Any], **options: Any) -> None:
        out, expected = ours(**model_inputs, **options), eager(**model_inputs)
        torch.testing.assert_close(out.logits, expected.logits, atol=2e-5, rtol=2e-5)
        assert (out.loss is None) == (expected.loss is None)

    same(without)
    same(inputs, skip_logits=False)
    eager.eval(), ours.eval()
    same(inputs)
    same(without)
    out = ours(**inputs, skip_logits=True)
    assert out.logits is None
    torch.testing.assert_close(out.loss, eager(**inputs).loss)


def test_positional_labels_and_tuples() -> None:
    eager = made("llama")
    ours = applied(eager)
    inputs = batch()
    given = inputs["input_ids"], None, None, None, None, inputs["labels"], False
    (loss,) = ours(*given, return_dict=False)
    torch.testing.assert_close(loss, eager(*given).loss)


def test_a_copy_of_a_model_has_a_loss_of_its_own() -> None:
    """As the reference model of a preference loss."""
    first = applied(made("llama"))
    second = copy.deepcopy(first)
    with torch.no_grad():
        first.lm_head.weight.zero_()
    inputs = batch()
    loss, gradients = step(second, **inputs)
    assert_same_step((loss, gradients), step(made("llama"), **inputs))
    assert all(p.grad is None for p in first.parameters())


def test_the_last_apply_is_the_whole_truth() -> None:
    eager = made("llama")
    ours, inputs = applied(eager), batch()
    apply(ours)
    assert_same_step(step(ours, **inputs), step(eager, **inputs))
    assert replaced(ours).loss and replaced(ours).attention == LAYERS
    apply(ours, loss=False)
    assert ours(**inputs).logits is not None
    assert not replaced(ours).loss and replaced(ours).attention == LAYERS
    apply(ours, attention=False)
    assert ours(**inputs).logits is None and ours.config._attn_implementation == "eager"
    assert replaced(ours).loss and replaced(ours).attention == ()


LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")


def forwards(model: Any) -> dict[str, Any]:
    """What of a model is not that of its classes."""
    return {name: vars(part).get("forward") for name, part in model.named_modules()}


@pytest.mark.parametrize("hooked", [False, True])
def test_undo_gives_the_model_back(hooked: bool) -> None:
    model, inputs = made("gemma2"), batch()
    if hooked:
        hooks = pytest.importorskip("accelerate.hooks")
        for module in model.modules():
            hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
    before, attributes, expected = forwards(model), set(vars(model)), step(model, **inputs)
    apply(model, compile_layers=None if hooked else True)
    mlps = (
        ()
        if hooked or not _mlp._WITHIN_FORWARD
        else tuple(name.replace("self_attn", "mlp") for name in LAYERS)
    )
    assert replaced(model) == Replaced(LAYERS, (), True, mlps)
    assert undo(model) is model
    assert forwards(model) == before and set(vars(model)) == attributes
    assert replaced(model) == Replaced((), LAYERS, False, ())
    assert model.config._attn_implementation == "eager"
    assert model.loss_function is transformers.loss.loss_utils.ForCausalLMLoss
    found = step(model, **inputs)
    assert torch.equal(found[0], expected[0]) and model(**inputs).logits is not None
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())
    assert forwards(undo(model)) == before


def test_undo_of_a_copy_leaves_the_first() -> None:
    first = applied(made("llama"))
    second = undo(copy.deepcopy(first))
    assert first(**batch()).logits is None and second(**batch()).logits is not None
    assert first.config._attn_implementation == "monoidreduce"
    assert second.config._attn_implementation == "eager"


def test_what_came_after_apply_is_undone_first() -> None:
    ours = applied(made("llama"))
    patched = ours.forward
    ours.forward = lambda *args, **kwargs: patched(*args, **kwargs)
    with pytest.raises(RuntimeError, match="forward of LlamaForCausalLM: expected that of apply"):
        undo(ours)


@needs_newer
def test_apply_logs_what_it_replaces(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    apply(made("llama"))
    assert "LlamaForCausalLM: replaced attention in 2 layers, the loss" in caplog.text
    assert caplog.records[-1].levelname == "INFO"
    apply(made("llama"), attention=False)
    assert "LlamaForCausalLM: replaced the loss" in caplog.text
    config = transformers.MambaConfig(vocab_size=9, hidden_size=8, state_size=4, num_hidden_layers=1)
    apply(transformers.MambaForCausalLM(config))
    assert "MambaForCausalLM: replaced the loss (it has no attention that can be)" in caplog.text
    assert caplog.records[-1].levelname == "WARNING"
    config = transformers.LongT5Config(
        vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    longt5 = apply(transformers.LongT5ForConditionalGeneration(config), loss=False)
    assert "left as it is: encoder.block.0.layer.0.LocalSelfAttention" in caplog.text
    assert replaced(longt5).attention == (
        "decoder.block.0.layer.0.SelfAttention",
        "decoder.block.0.layer.1.EncDecAttention",
    )


def test_the_signature_of_a_model_stays() -> None:
    """Trainers read it to see which columns of a data set a model takes."""
    eager = made("llama")
    assert inspect.signature(applied(eager).forward) == inspect.signature(eager.forward)


def test_hooks_of_accelerate() -> None:
    """Which replace forward, as on models that are spread over devices."""
    hooks = pytest.importorskip("accelerate.hooks")
    eager = made("llama")
    hooked = copy.deepcopy(eager)
    for module in hooked.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
    apply(hooked)
    assert inspect.signature(hooked.forward) == inspect.signature(eager.forward)
    inputs = batch()
    given = inputs["input_ids"], None, None, None, None, inputs["labels"]
    torch.testing.assert_close(hooked(*given).loss, eager(*given).loss)
    assert_same_step(step(hooked, **inputs), step(eager, **inputs))


# ---- generation and masks


def greedy(model: Any, inputs: dict[str, Any], **options: Any) -> Tensor:
    model.eval()
    return model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None, **options)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", MAIN)
def test_greedy_tokens_are_those_of_eager(family: str, cache: str, padded: bool) -> None:
    eager = made(family)
    inputs = batch("padded" if padded else "plain")
    prompt = {"input_ids": inputs["input_ids"]}
    prompt["attention_mask"] = inputs.get("attention_mask", torch.ones_like(prompt["input_ids"]))
    expected = greedy(eager, prompt, cache_implementation=cache)
    assert torch.equal(greedy(applied(eager), prompt, cache_implementation=cache), expected)
    assert len(expected[:, 12:].unique()) >= 4


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_prompts_in_parts(family: str, cache: str, padded: bool) -> None:
    """Several queries after keys in a cache, as in chunked prefill and speculative decoding."""
    eager = made(family).eval()
    inputs = batch("padded" if padded else "plain")
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")

    def logits(model: Any) -> Tensor:
        options = {"max_cache_len": 16} if cache == "StaticCache" else {}
        past = getattr(transformers, cache)(config=model.config, **options)
        parts = []
        for begin, end in ((0, 5), (5, 9), (9, 12)):
            seen = None if mask is None else mask[:, :end]
            positions = torch.arange(begin, end)[None].expand(2, -1)
            part = {"attention_mask": seen, "position_ids": positions, "past_key_values": past}
            parts.append(model(ids[:, begin:end], **part).logits)
        return torch.cat(parts, 1)

    with torch.no_grad():
        ours, expected = logits(applied(eager)), logits(eager)
    rows = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(ours[rows], expected[rows], atol=2e-5, rtol=2e-5)


def test_masks_of_users() -> None:
    eager = made("llama")
    ours = applied(eager)
    inputs = batch()
    allowed = torch.ones(12, 12, dtype=torch.bool).tril()
    allowed[7:, :3] = False
    added = torch.zeros(12, 12).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected = step(eager, **inputs, attention_mask=added.expand(2, 1, 12, 12))
    for mask in (allowed, added):
        assert_same_step(step(ours, **inputs, attention_mask=mask.expand(2, 1, 12, 12)), expected)


def test_lengths_of_packed_sequences(masks: list[Any]) -> None:
    """cu_seq_lens, as the collator without padding gives them, with or without position_ids."""
    eager = made("mistral")
    ours = applied(eager)
    inputs = batch("packed")
    expected = step(eager, **inputs)
    bounds = torch.tensor([0, 5, 17, 24], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 12, "max_length_k": 12}
    assert_same_step(step(ours, **inputs, **lengths), expected)
    assert all(isinstance(mask, _attention.Packed) for mask in masks)
    register()


@pytest.mark.parametrize("compiling", (False, True))
@pytest.mark.parametrize("packed", (False, True))
def test_lengths_of_several_rows(packed: bool, compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of a batch is cut at the same places, and where its own positions begin again. The host may
    not read either."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    q, k, v = torch.randn(3, 2, 4, 24, 8)
    bounds = torch.tensor([0, 5, 17, 24])
    own: list[set[int]] = [{9}, {5, 20}] if packed else [set(), set()]
    starts = torch.tensor([0, *sorted(own[0]), 24, *(24 + n for n in sorted(own[1])), 48])
    mask = _attention.Packed((None, 0), starts, make=starts.clone) if packed else None
    found, _ = _attention.attention_forward(
        nn.Identity(), q, k, v, mask, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds
    )
    assert found.is_contiguous()
    for row, cuts in enumerate(own):
        parts = [
            F.scaled_dot_product_attention(*(t[row, :, begin:end] for t in (q, k, v)), is_causal=True)
            for begin, end in pairwise(sorted({*bounds.tolist(), *cuts}))
        ]
        torch.testing.assert_close(found[row], torch.cat(parts, 1).transpose(0, 1))


def test_lengths_of_other_keys() -> None:
    """More keys than queries, as the lengths say: no cache is cut."""
    q, k, v = (torch.randn(1, 2, n, 8) for n in (10, 30, 30))
    of_queries, of_keys = torch.tensor([0, 5, 10]), torch.tensor([0, 15, 30])
    found, _ = _attention.attention_forward(
        nn.Identity(), q, k, v, None, cu_seq_lens_q=of_queries, cu_seq_lens_k=of_keys
    )
    parts = [
        mr.attention(
            q[:, :, 5 * n : 5 * n + 5], *(t[:, :, 15 * n : 15 * n + 15] for t in (k, v)), causal=True
        )
        for n in range(2)
    ]
    torch.testing.assert_close(found, torch.cat(parts, 2).transpose(1, 2))


@pytest.mark.parametrize(
    "mask",
    (
        _attention.Band((3, 0), torch.ones(2, 5, dtype=torch.bool), make=torch.Tensor),
        _attention.Packed((None, 0), torch.tensor([0, 5, 10]), make=torch.Tensor),
        _attention.Stored(torch.ones(2, 1, 5, 5, dtype=torch.bool), make=torch.Tensor),
    ),
    ids=lambda mask: type(mask).__name__,
)
def test_masks_move_with_the_layers(mask: Any) -> None:
    """accelerate sends the arguments of a layer to the GPU that has it."""
    from accelerate.utils import send_to_device

    moved = send_to_device({"mask": mask}, "meta")["mask"]
    assert type(moved) is type(mask)
    names = {_attention.Band: "keys", _attention.Packed: "starts", _attention.Stored: "pairs"}
    assert getattr(moved, names[type(mask)]).is_meta
    assert moved.dense().is_meta


def test_packed_sequences_of_a_model_whose_masks_do_not_know_them() -> None:
    """transformers makes gpt-oss no masks of packed position_ids. The lengths keep the sequences apart."""
    eager = made("gpt_oss")
    inputs = batch("packed")
    bounds = [0, 5, 17, 24]
    inputs["labels"][:, bounds[:-1]] = -100
    lengths = {"cu_seq_lens_q": torch.tensor(bounds), "cu_seq_lens_k": torch.tensor(bounds)}
    ours = step(applied(eager), **inputs, **lengths, num_items_in_batch=20)
    eager.zero_grad()
    loss = sum(
        eager(**{name: t[:, begin:end] for name, t in inputs.items()}, num_items_in_batch=20).loss
        for begin, end in pairwise(bounds)
    )
    loss.backward()
    assert_same_step(ours, (loss.detach(), gradients_of(eager)))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"cu_seq_lens_q": [0, 5, 24]}, "cu_seq_lens_k: expected"),
        ({"cu_seq_lens_q": [0.0, 24.0], "cu_seq_lens_k": [0.0, 24.0]}, "cu_seq_lens_q: expected"),
        ({"cu_seq_lens_q": [0, 5, 23], "cu_seq_lens_k": [0, 5, 23]}, "cu_seq_lens_q: expected"),
        ({"cu_seq_lens_q": [0, 9, 5, 24], "cu_seq_lens_k": [0, 9, 5, 24]}, "cu_seq_lens_q: expected"),
        ({"cu_seq_lens_q": [0, 5, 24], "cu_seq_lens_k": [0, 5, 9, 24]}, "cu_seq_lens_k: expected"),
    ],
)
def test_wrong_lengths_of_packed_sequences(bounds: dict[str, list[int]], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        applied(made("llama"))(**batch("packed"), **{name: torch.tensor(b) for name, b in bounds.items()})


def test_chunked_attention() -> None:
    """Llama 4's, whose masks are stored."""
    config = transformers.Llama4TextConfig(
        **COMMON, head_dim=8, attention_chunk_size=5, num_local_experts=2, intermediate_size_mlp=48,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    eager = transformers.Llama4ForCausalLM(config).train()
    inputs = batch()
    assert_same_step(step(applied(eager), **inputs), step(eager, **inputs))


# ---- other models


def encoder(name: str) -> Any:
    known = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
    known |= {"local_attention": 6} if name == "ModernBert" else {}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = getattr(transformers, f"{name}Config")(**known, **dropout, attn_implementation="eager")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForMaskedLM")(config).train()


@pytest.mark.parametrize("case", ["plain", "padded"])
@pytest.mark.parametrize(
    "name", [pytest.param("Bert", marks=needs_newer), pytest.param("ModernBert", marks=needs_newer)]
)
def test_encoders(name: str, case: str, masks: list[Any]) -> None:
    eager = encoder(name)
    ours = applied(eager, loss=False)
    inputs = batch(case)
    ours.zero_grad(), eager.zero_grad()
    results = []
    for one in (ours, eager):
        loss = one(**inputs).loss
        loss.backward()
        results.append((loss.detach(), gradients_of(one)))
    assert_same_step(*results)
    assert not any(isinstance(mask, _attention.Stored) for mask in masks) and masks


def test_decoders_that_are_not_causal() -> None:
    """As embedding models use them."""
    eager = made("llama", is_causal=False)
    inputs = batch()
    assert_same_step(step(applied(eager), **inputs), step(eager, **inputs))


@needs_newer
def test_position_biases() -> None:
    """Of T5, which are learned, with cross attention."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    eager = transformers.T5ForConditionalGeneration(config).train()
    ours = applied(eager, loss=False)
    inputs = batch("padded")
    assert_same_step(step(ours, **inputs), step(eager, **inputs))


# ---- what is around a model


def test_gradient_checkpointing() -> None:
    eager = made("gemma2")
    ours = applied(eager)
    inputs = batch("padded")
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_step(step(ours, **inputs), step(eager, **inputs))


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", pytest.param("gpt_oss", marks=needs_newer)])
def test_compiled_without_graph_breaks(family: str) -> None:
    eager = made(family, num_hidden_layers=1)
    ours = applied(eager)
    inputs = batch("padded")
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    expected = step(eager, **inputs)
    for _ in range(2):
        assert_same_step(step(ours, compiled, **inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(["plain", "padded", "packed"], ["packed"]))
@pytest.mark.parametrize("checkpointing", sampled([False, True], [True]))
def test_compiled_layers(checkpointing: bool, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layers are compiled once, a copy has its own, and generation compiles nothing. C++ is compiled for
    plain layers that are not recomputed."""
    eager = made("llama")
    ours = copy.deepcopy(applied(eager, compile_layers=True))
    if checkpointing:
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if checkpointing or case != "plain":
        leave_out_code(monkeypatch)
    inputs = batch(case)
    torch.compiler.reset()
    expected = step(eager, **inputs)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert_same_step(step(ours, **inputs), expected)
        prompt, options = inputs["input_ids"][:, :5], {"max_new_tokens": 3, "do_sample": False}
        with torch.no_grad():
            torch.testing.assert_close(
                ours.eval().generate(prompt, **options), eager.eval().generate(prompt, **options)
            )


def kept_bytes(model: Any, inputs: Any) -> int:
    """Of what a step saves for its backward pass, each tensor counted once, without the weights."""
    found: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        found[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(**inputs).loss
    loss.backward()
    model.zero_grad()
    return sum(found.values()) - sum(found.get(p.data_ptr(), 0) for p in model.parameters())


@pytest.mark.release
@pytest.mark.slow
def test_compiled_layers_keep_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers with an MLP as wide as in a Llama, less than nine tenths of what torch would keep."""
    inputs, kept = batch(), {}
    for share in (1.0, _layers.KEPT):
        monkeypatch.setattr(_layers, "KEPT", share)
        leave_out_code(monkeypatch)
        torch.compiler.reset()
        ours = applied(made("llama", intermediate_size=256), compile_layers=True)
        kept[share] = kept_bytes(ours, inputs)
    assert kept[_layers.KEPT] < 0.9 * kept[1.0]


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_layer_is_compiled_twice_or_never(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in the forward pass and once in the backward, whichever way transformers recomputes."""
    ran: list[str] = []
    forward = type(made("llama").model.layers[0]).forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        ran.append("compiled")
        return forward(*args, **kwargs)

    monkeypatch.setattr(_layers, "_compiled", lambda kind: counted)
    ours = applied(made("llama"), compile_layers=True)
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ours.enable_input_require_grads()
    step(ours, **batch())
    # transformers 5.4 recomputes around the call of a layer, later ones within its forward.
    around = "__call__" in vars(transformers.modeling_layers.GradientCheckpointingLayer)
    assert ran == ["compiled"] * 2 * (2 if around else 1)
    ran.clear()
    with torch.no_grad():
        ours.generate(batch()["input_ids"][:, :5], max_new_tokens=2, do_sample=False)
    # 5.4 takes the cache away: such a call is as the first of a layer that will be recomputed.
    assert not ran or around


def ops_of_a_recomputed_layer(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[set[str]]]:
    """A step whose layers are compiled and recomputed; and our ops in the graphs of both its passes."""
    graphs: list[set[str]] = []

    def look(graph: Any, inputs: Any) -> Any:
        targets = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        graphs.append({name.split(".")[1] for name in targets if name.startswith("monoidreduce.")})
        return make_boxed_func(graph.forward)

    partition: Any = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=look, bw_compiler=look, partition_fn=partition)
    monkeypatch.setattr(_layers, "_compiled", lambda kind: torch.compile(kind.forward, backend=backend))
    torch.compiler.reset()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return step(model, **batch()), graphs


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.skipif(not _mlp._WITHIN_FORWARD, reason="transformers recomputes around compiled layers")
@pytest.mark.parametrize(
    "options", [{}, {"hidden_act": "gelu_pytorch_tanh", "mlp_bias": True}, {"hidden_act": "relu"}], ids=str
)
def test_gated_mlps_of_recomputed_layers(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are ours, and their results are not computed again; other activations are left to the model."""
    eager = made("llama", **options)
    found, (forward, backward) = ops_of_a_recomputed_layer(applied(eager, compile_layers=True), monkeypatch)
    ours = options.get("hidden_act") != "relu"
    assert forward == {"attention"} | ({"gated_mlp"} if ours else set())
    assert backward == {"attention", "attention_backward"} | ({"gated_mlp_backward"} if ours else set())
    assert_same_step(found, step(eager, **batch()))


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.skipif(not _mlp._WITHIN_FORWARD, reason="transformers recomputes around compiled layers")
@pytest.mark.parametrize("what", ["a hook", "a quantized layer", "a parameter of another kind"])
def test_mlps_that_others_look_into_are_left(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(nn.Linear):
        pass

    class OtherParameter(nn.Parameter):
        pass

    model = applied(made("llama"), compile_layers=True)
    for layer in model.model.layers:
        up = layer.mlp.up_proj
        if what == "a hook":
            up.register_forward_hook(lambda module, inputs, result: result * 1.0)
        elif what == "a quantized layer":
            up.__class__ = Other
        else:
            up.weight = OtherParameter(up.weight.detach())
    forward, backward = ops_of_a_recomputed_layer(model, monkeypatch)[1]
    assert forward == {"attention"} and backward == {"attention", "attention_backward"}


class OnGpu(Tensor):
    """A tensor on a CPU that says it is on a GPU."""

    is_cuda = True


def test_by_default_layers_are_compiled_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compile_(kind: Any) -> Any:
        compiled.append(kind)
        return kind.forward

    monkeypatch.setattr(_layers, "_compiled", compile_)
    model = applied(made("llama"))
    step(model, **batch())
    assert not compiled
    layer = model.model.layers[0]
    # Whether torch can compile for a GPU; whether it compiles the model already; what is compiled.
    for there, traced, expected in ((False, False, []), (True, True, []), (True, False, [type(layer)])):
        monkeypatch.setattr(_layers, "_compiles_for_gpus", lambda there=there: there)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda traced=traced: traced)
        with pytest.raises(TypeError):  # position embeddings are missing
            layer(torch.zeros(1, 3, 32).as_subclass(OnGpu))
        assert compiled == expected


@pytest.mark.slow
@needs_newer
@pytest.mark.parametrize("family", sampled(FAMILIES, ["llama"]))
def test_layers_of_all_families_are_compiled(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of layer as one graph; Mixtral's router records what a compiler does not trace."""
    monkeypatch.setattr(_layers, "inductor_keeping", lambda share: "aot_eager")
    _layers._compiled.cache_clear()
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    eager = made(family)
    assert_same_step(step(applied(eager, compile_layers=True), **batch()), step(eager, **batch()))
    _layers._compiled.cache_clear()
    assert family == "mixtral" or (counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"])


def test_a_gpu_without_triton_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_layers.importlib.util, "find_spec", lambda name: None)
    _layers._compiles_for_gpus.cache_clear()
    with pytest.warns(UserWarning, match="layers of a model run as they are.*Triton"):
        assert not _layers._compiles_for_gpus()
    assert not _layers._compiles_for_gpus()
    _layers._compiles_for_gpus.cache_clear()


def test_layers_that_are_not_compiled() -> None:
    model = made("llama")
    with pytest.raises(TypeError, match=r"model: .*that transformers can checkpoint.*got Linear"):
        layers_of(torch.nn.Linear(2, 2))
    model.model.layers[1].forward = lambda *args, **kwargs: args[0]  # as a hook does
    with pytest.raises(TypeError, match="with the forward of its class"):
        apply(model, compile_layers=True)
    assert model.config._attn_implementation == "eager"
    hooked = model.model.layers[1].forward
    apply(model)  # by default it leaves them
    assert model.model.layers[1].forward is hooked and "forward" not in vars(model.model.layers[0])


def test_autocast() -> None:
    eager = made("llama")
    ours = applied(eager)
    inputs = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients = step(ours, **inputs)
    expected, expected_gradients = step(eager, **inputs)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, atol=0.0, rtol=0.02)
    for name, gradient in expected_gradients.items():
        assert (gradients[name] - gradient).norm() < 0.1 * gradient.norm(), name


def test_a_trainer(tmp_path: Any) -> None:
    """Which divides by the number of targets of all batches that it accumulates."""
    pytest.importorskip("accelerate")
    inputs = batch()
    examples = [
        {
            "input_ids": inputs["input_ids"][i % 2],
            "labels": inputs["labels"][i % 2, : 12 - i].tolist() + i * [-100],
        }
        for i in range(8)
    ]
    losses = []
    for model in (made("llama"), applied(made("llama"))):
        options = transformers.TrainingArguments(
            tmp_path, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
            report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=1e-2,
        )  # fmt: skip
        trainer = transformers.Trainer(model, options, train_dataset=examples)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        assert trainer.evaluate(examples)["eval_loss"] < losses[-1][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len(losses[0]) == 2


@pytest.fixture
def one_process(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    gc.collect()


@pytest.mark.parametrize("head_apart", [True, False], ids=["head apart", "head in the root"])
def test_fully_sharded(head_apart: bool, one_process: None) -> None:
    """FSDP2: the head's weight is whole only while its forward and backward run."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    eager = made("gemma2")
    ours = applied(eager)
    mesh = init_device_mesh("cpu", (1,))
    parts = [*ours.model.layers, *([ours.lm_head] if head_apart else []), ours]
    for part in parts:
        fully_shard(part, mesh=mesh)
    inputs = batch("padded")
    expected = step(eager, **inputs)
    for _ in range(2):
        loss, gradients = step(ours, **inputs)
        assert_same_step((loss, {name: g.full_tensor() for name, g in gradients.items()}), expected)


# ---- PEFT


def adapted(model: Any, **options: Any) -> Any:
    """With adapters whose gradients are not 0."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, **options)
    torch.manual_seed(2)
    result = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_(std=0.1)
    return result.train()


@pytest.mark.parametrize("first", ["apply", "adapt"])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["layers", "head", "saved head"],
)
def test_adapters(options: dict[str, Any], first: str) -> None:
    eager = adapted(made("llama"), **options)
    ours = (
        apply(adapted(made("llama"), **options))
        if first == "adapt"
        else adapted(applied(made("llama")), **options)
    )
    inputs = batch("padded")
    with LargeTensors() as large:
        mine = step(ours, **inputs)
    assert [found for found in large.found if found[1] == [2, 12, VOCABULARY]] == []
    assert_same_step(mine, step(eager, **inputs))
    with eager.disable_adapter(), ours.disable_adapter():
        without = ours(**inputs).loss
        torch.testing.assert_close(without, eager(**inputs).loss)
    assert abs(without - mine[0]) > 1e-3


def test_merged_adapters() -> None:
    ours = apply(adapted(made("llama"), target_modules=["lm_head"]))
    inputs = batch()
    expected = ours(**inputs).loss
    with ours.disable_adapter():
        without = ours(**inputs).loss
    ours.merge_adapter()
    torch.testing.assert_close(ours(**inputs).loss, expected)
    with ours.disable_adapter():
        torch.testing.assert_close(ours(**inputs).loss, without)
    assert abs(without - expected) > 1e-3


def assert_is_left_to_transformers(ours: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """The loss of a model that does with its logits what no fused loss knows: the same, with one warning."""
    inputs = batch()
    expected = step(ours, **inputs, skip_logits=False)
    caplog.clear()
    for _ in range(3):
        found = step(ours, **inputs)
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())
    assert len(caplog.records) == 1 and re.search(reason, caplog.text)
    assert not replaced(ours).loss and ours(**inputs).logits is not None


def test_adapters_of_another_kind_on_the_head(caplog: pytest.LogCaptureFixture) -> None:
    ours = apply(adapted(made("llama"), target_modules=["lm_head"], use_dora=True))
    assert_is_left_to_transformers(ours, "lm_head: expected a plain LoRA", caplog)


# ---- what is refused


def layer(**attributes: Any) -> nn.Module:
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"output_attentions": True}, ValueError, "output_attentions: expected None or False"),
        ({"head_mask": torch.ones(2)}, TypeError, "head_mask: expected None"),
        ({"cache": object()}, TypeError, "cache: expected None"),
        ({"indices": torch.ones(2)}, TypeError, "indices: expected None"),
        ({"sliding_window": 3}, ValueError, "sliding_window: expected a mask of this window"),
        ({"attention_mask": torch.ones(5, 5)}, TypeError, r"attention_mask: expected None or a tensor"),
        ({"attention_mask": "causal"}, TypeError, r"attention_mask: expected None or a tensor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_arguments_of_attention_that_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    q = torch.randn(5, 2, 5, 8)
    with pytest.raises(error, match=message):
        _attention.attention_forward(layer(), q, q, q, arguments.pop("attention_mask", None), **arguments)


WITH_DROPOUT = {
    "LlamaForCausalLM": "attention_dropout",
    "GPT2LMHeadModel": "attn_pdrop",
    "BertForMaskedLM": "attention_probs_dropout_prob",
    "BartForConditionalGeneration": "attention_dropout",
    "T5ForConditionalGeneration": "dropout_rate",
    "PersimmonForCausalLM": "attention_dropout",
}


@needs_newer
@pytest.mark.parametrize("padded", (False, True), ids=("whole", "padded"))
@pytest.mark.parametrize(("name", "key"), WITH_DROPOUT.items(), ids=WITH_DROPOUT)
def test_dropout_of_attention(name: str, key: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step, beside one with stored weights and the same seeds; and none in evaluation."""
    kind = getattr(transformers, name)
    sizes = {"d_model": 32, "decoder_start_token_id": 0} if "Bart" in name or "T5" in name else {}
    known = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
    config = kind.config_class(**{**known, **sizes, key: 0.25})
    torch.manual_seed(0)
    eager = kind(config)
    ours = applied(eager, loss=False)
    inputs = batch("padded" if padded else "plain")

    def trained() -> dict[str, Tensor]:
        torch.manual_seed(1)
        ours.zero_grad()
        loss = ours.train()(**inputs).loss
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in ours.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **gradients}

    def stored(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, **options: Any) -> Tensor:
        seed = torch.randint(2**63 - 1, ())
        return dropped(q, k, v, dropout_p=dropout_p, seed=int(seed), **options)

    found = trained()
    with monkeypatch.context() as patch:
        patch.setattr(_attention, "attention", stored)
        expected = trained()
    assert found.keys() == expected.keys() and len(found) > 5
    for parameter, value in found.items():
        torch.testing.assert_close(value, expected[parameter], rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(ours.eval()(**inputs).loss, eager.eval()(**inputs).loss)
    assert not torch.equal(found["loss"], ours.eval()(**inputs).loss)


def test_dropout_of_packed_sequences() -> None:
    """It differs from step to step."""
    q = torch.randn(2, 2, 9, 8)
    packed = _attention.Packed((None, 0), torch.tensor([0, 4, 9, 9, 18]), make=lambda: torch.zeros(1))
    one, two = (_attention.attention_forward(layer(), q, q, q, packed, dropout=0.5)[0] for _ in range(2))
    assert one.isfinite().all() and not torch.equal(one, two)


def test_dropout_beside_a_learned_bias() -> None:
    """Torch computes it, unless there are sinks."""
    q, bias = torch.randn(2, 2, 9, 8), torch.zeros(1, 2, 9, 9, requires_grad=True)
    given: dict[str, Any] = {"dropout": 0.5, "position_bias": bias}
    for sinks in (None, torch.zeros(2)):
        bias.grad = None
        out, _ = _attention.attention_forward(layer(), q, q, q, None, **given, s_aux=sinks)
        out.square().sum().backward()
        assert bias.grad is not None and bias.grad.isfinite().all() and bias.grad.any()


@pytest.mark.parametrize("name", ["Llama", "GPT2", "OPT", "StableLm", "Nemotron", "Persimmon", "GPTBigCode"])
def test_weights_are_refused(name: str) -> None:
    """Of models that hand the question to their layers, and of those whose layers are listened to."""
    dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout"), 0.0)
    known = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
    config = getattr(transformers, f"{name}Config")(
        **known, **dropout, head_dim=8, word_embed_proj_dim=32, ffn_dim=48, num_key_value_heads=4
    )
    kind = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    if not kind._can_set_attn_implementation():
        pytest.skip("this transformers has an attention of its own in it")
    ours = apply(kind(config).eval())
    ids = batch()["input_ids"]
    assert ours(ids).logits is not None
    with pytest.raises(ValueError, match=r"output_attentions: expected None or False: .*undo"):
        ours(ids, output_attentions=True)
    assert (
        len(undo(ours).set_attn_implementation("eager") or ours(ids, output_attentions=True).attentions) == 2
    )
    ours.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions: expected False in the config"):
        apply(ours)


def test_outputs_without_logits_say_how_to_get_them() -> None:
    """As a Trainer's subclass would read them."""
    out = applied(made("llama"))(**batch())
    assert isinstance(out, transformers.modeling_outputs.CausalLMOutputWithPast) and "logits" not in out
    with pytest.raises(KeyError, match="skip_logits=False"):
        out["logits"]
    assert out["loss"] is out.loss is out[0]


class Clipped(transformers.LlamaForCausalLM):
    """Does to its logits what a loss without logits does not know."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        logits = self.operation(self.lm_head(self.model(input_ids, **options).last_hidden_state))
        loss = self.loss_function(logits, labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def shifted(logits: Any) -> Any:
    logits[..., 0] -= 1.0
    return logits * 2.0


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (lambda logits: logits.clamp(-1, 1), "clamp"),
        (torch.relu, "relu"),
        (lambda logits: logits * torch.full((), 2.0), "*"),
        (lambda logits: logits / torch.full((), 2.0), "/"),
        (lambda logits: logits + 1, "__add__"),
        (lambda logits: torch.stack([logits, logits]).sum(0), "stack"),
        (lambda logits: logits.tanh().tanh(), "tanh of tanh"),
        (lambda logits: (logits * 3.0).sigmoid(), "sigmoid"),
        (shifted, "[...]"),
    ],
)
def test_other_operations_on_logits_are_done(
    operation: Callable[[Any], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = apply(Clipped(transformers.LlamaConfig(**COMMON)).train())
    model.operation = operation
    assert_is_left_to_transformers(
        model, f"Clipped: its loss is left to transformers, .*\\({re.escape(reason)}\\)", caplog
    )


@pytest.mark.parametrize(
    "operation",
    [
        lambda logits: logits.to(logits.device) if logits.shape == (2, 12, VOCABULARY) else None,
        lambda logits: logits.to(torch.float32) if logits.dtype == torch.float32 else None,
        lambda logits: (
            logits if logits.size() == (2, logits.size(1), logits.size(-1)) and logits.dim() == 3 else None
        ),
    ],
)
def test_what_logits_are_is_known_without_them(operation: Callable[[Any], Any]) -> None:
    eager = Clipped(transformers.LlamaConfig(**COMMON)).train()
    eager.operation = operation
    ours = applied(eager)
    assert_same_step(step(ours, **batch()), step(eager, **batch()))
    assert replaced(ours).loss


def test_the_first_classes_of_logits() -> None:
    """As of a head that is padded to a round number of them."""
    eager = Clipped(transformers.LlamaConfig(**COMMON)).train()
    eager.operation = lambda logits: logits[..., :250]
    eager.config.vocab_size = 250
    ours, inputs = applied(eager), batch()
    inputs["labels"] = inputs["labels"].clamp(max=249)
    for _ in range(2):
        assert_same_step(step(ours, **inputs), step(eager, **inputs))
    assert replaced(ours).loss


@needs_newer
def test_models_that_are_refused() -> None:
    with pytest.raises(TypeError, match="model: expected a PreTrainedModel"):
        apply(nn.Linear(2, 2))
    with pytest.raises(
        TypeError, match=r"LlamaModel: model: expected a head and labels.*loss=False\) replaces its attention"
    ):
        apply(made("llama").model)
    with pytest.raises(TypeError, match=r"BertForMaskedLM: .*self\.loss_function.*loss=False\) replaces"):
        apply(encoder("Bert"))
    other = made("llama")
    other.loss_function = transformers.loss.loss_utils.ForMaskedLMLoss
    with pytest.raises(TypeError, match="loss_function: expected ForCausalLMLoss, got ForMaskedLMLoss"):
        apply(other)
    with pytest.raises(TypeError, match="loss: expected"):
        apply(made("llama"), loss=1)
    odd = made("llama")
    odd.lm_head = nn.Sequential(odd.lm_head)
    with pytest.raises(TypeError, match=r"lm_head: expected a torch\.nn\.Linear or its LoRA, got Sequential"):
        apply(odd)
    mpt = transformers.MptForCausalLM(transformers.MptConfig(vocab_size=9, d_model=8, n_heads=2, n_layers=1))
    with pytest.raises(
        TypeError, match=r"MptForCausalLM: .*AttentionInterface.*attention=False\) replaces its loss"
    ):
        apply(mpt)
    assert mpt.config._attn_implementation == "eager" and set(forwards(mpt).values()) == {None}
    config = transformers.TrOCRConfig(vocab_size=9, d_model=8, decoder_layers=1, decoder_attention_heads=2)
    with pytest.raises(TypeError, match=r"TrOCRForCausalLM: .*nor can its loss be replaced"):
        apply(transformers.TrOCRForCausalLM(config))


def test_each_part_alone() -> None:
    attention = applied(made("llama"), loss=False)
    assert attention.config._attn_implementation == "monoidreduce"
    assert attention(**batch()).logits is not None
    loss = applied(made("llama"), attention=False)
    assert loss.config._attn_implementation == "eager"
    assert loss(**batch()).logits is None


def test_a_model_made_with_the_registered_name() -> None:
    register()
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**COMMON, attn_implementation="monoidreduce")
    )
    before = mr._C.path_counts()
    model(**batch())
    assert sum(mr._C.path_counts().values()) > sum(before.values())


def test_the_guides_examples_run() -> None:
    names: dict[str, object] = {}
    guide = (Path(__file__).parents[2] / "docs/integrations.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, "docs/integrations.md", "exec"), names)


def test_versions_that_are_too_old(tmp_path: Path) -> None:
    """They are refused by name and version, with what to install, whatever they lack."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/__init__.py").write_text('__version__ = "4.53.3"')
    command = [sys.executable, "-c", "import monoidreduce.integrations.transformers"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    expected = "transformers: expected version 4.57 or later (pip install 'transformers>=4.57'), got 4.53.3"
    assert done.stderr.rstrip().endswith(f"ImportError: {expected}")
