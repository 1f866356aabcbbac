"""Every architecture of the installed transformers that a tiny config can build, as it is and after `apply`.

Common ones are built in every check, all of them before a release.

What `apply` accepts has the same loss, gradients, logits and tokens, and no logit sees a later token. What it
refuses is named, and what the error offers instead works.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.23")

from tiny_models import LENGTH, architectures, tiny_inputs, tiny_model  # noqa: E402
from training_steps import Step, assert_same_step  # noqa: E402

from monoidreduce.integrations.transformers import apply, replaced  # noqa: E402

transformers.logging.set_verbosity_error()

ARCHITECTURES = architectures()
# Common architectures, and what of them `apply` replaces.
COMMON = {
    "all": """
        ApertusForCausalLM ArceeForCausalLM BambaForCausalLM Cohere2ForCausalLM DeepseekV3ForCausalLM
        Ernie4_5ForCausalLM Exaone4ForCausalLM FalconH1ForCausalLM GPT2LMHeadModel GPTNeoXForCausalLM
        Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration Glm4ForCausalLM
        GptOssForCausalLM GraniteMoeForCausalLM HunYuanDenseV1ForCausalLM JambaForCausalLM
        Lfm2ForCausalLM LlamaForCausalLM Llama4ForCausalLM LlavaForConditionalGeneration
        Mamba2ForCausalLM MistralForCausalLM MixtralForCausalLM MllamaForConditionalGeneration
        NemotronHForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM PhiForCausalLM
        Phi3ForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
        Qwen3NextForCausalLM Qwen3VLForConditionalGeneration SmolLM3ForCausalLM StableLmForCausalLM
        Starcoder2ForCausalLM
    """,
    "without attention": "BloomForCausalLM FalconForCausalLM GPTJForCausalLM",
    "without loss": "BartForConditionalGeneration T5ForConditionalGeneration WhisperForCausalLM",
}
REPLACED = {name: part for part, names in COMMON.items() for name in names.split()}


def step(model: Any, inputs: dict[str, Tensor]) -> Step:
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def exact_step(eager: Any, inputs: dict[str, Tensor]) -> Step:
    """In float64; by torch's fused attention where eager attention is not finite for masked rows."""
    found = step(copy.deepcopy(eager).double(), inputs)
    if found[0].isfinite():
        return found
    fused = copy.deepcopy(eager).double()
    fused.set_attn_implementation("sdpa")
    return step(fused, inputs)


def assert_same(ours: Any, eager: Any, inputs: dict[str, Tensor], expected: Step) -> None:
    assert_same_step(step(ours, inputs), expected, lambda: exact_step(eager, inputs))


def cases(eager: Any) -> dict[str, tuple[dict[str, Tensor], Step]]:
    """Inputs that the model takes as it is, and its step with them."""
    plain = tiny_inputs(eager)
    ids = plain["input_ids"]
    padded = {**plain, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    padded["attention_mask"][0, -4:] = 0
    lengths = ((5, 7), (1, 2, 9))
    packed = {
        **plain,
        "position_ids": torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]),
    }
    without_types = {name: t for name, t in padded.items() if name != "token_type_ids"}
    result = {}
    for name, choices in {"plain": [plain], "padded": [padded, without_types], "packed": [packed]}.items():
        if name == "packed" and "position_ids" not in inspect.signature(eager.forward).parameters:
            continue
        for inputs in choices:
            try:
                result[name] = inputs, step(eager, inputs)
            except Exception:  # of any kind: the model has not what it needs
                continue
            break
    return result


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**{name: t for name, t in inputs.items() if name != "labels"}).logits


def assert_no_leak(ours: Any, eager: Any, inputs: dict[str, Tensor]) -> None:
    """Logits are those of eager, and none before a token depends on it."""
    ours.eval(), eager.eval()
    before = logits(ours, inputs)
    torch.testing.assert_close(before, logits(eager, inputs), atol=2e-5, rtol=2e-5)
    changed = dict(inputs)
    last = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    changed[last] = inputs[last].clone()
    changed[last][:, LENGTH - 4] = 71
    by_eager = (logits(eager, changed) - logits(eager, inputs)).abs().amax(-1)
    moved = (logits(ours, changed) - before).abs().amax(-1)
    rounding = max(1e-6, 2 * float(by_eager[:, : LENGTH - 4].max()))  # it moves those of eager too
    assert moved[:, : LENGTH - 4].max() <= rounding < moved[:, LENGTH - 4 :].max()


def assert_same_tokens(ours: Any, eager: Any, inputs: dict[str, Tensor]) -> None:
    prompt = {name: t for name, t in inputs.items() if name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "use_cache": True}
    try:
        expected = eager.generate(**prompt, **options)
    except Exception:  # of any kind: the model does not generate from text alone
        return
    assert torch.equal(ours.generate(**prompt, **options), expected)


def applied(model: Any, name: str) -> str:
    """What `apply` replaces: "all", "nothing", or what its error offers. An error changes no model."""
    before = {name: vars(part).get("forward") for name, part in model.named_modules()}
    try:
        apply(model)
    except (TypeError, ValueError) as error:
        message = str(error)
        assert message.startswith(f"{name}: ")
        assert model.config._attn_implementation == "eager"
        assert {name: vars(part).get("forward") for name, part in model.named_modules()} == before
        offered = [part for part in ("attention", "loss") if f"apply(model, {part}=False)" in message]
        if not offered:
            assert "nor can its" in message
            for part in ("attention", "loss"):
                with pytest.raises((TypeError, ValueError), match="nor can its"):
                    apply(model, **{part: False})
            return "nothing"
        apply(model, **{offered[0]: False})
        return f"without {offered[0]}"
    return "all"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in REPLACED else pytest.mark.release) for name in ARCHITECTURES],
)
def test_an_architecture(name: str) -> None:
    eager = tiny_model(name, ARCHITECTURES[name])
    if eager is None:
        assert name not in REPLACED
        pytest.skip("no tiny config builds it")
    ours = tiny_model(name, ARCHITECTURES[name])
    tried = cases(eager)
    if "plain" not in tried:
        assert name not in REPLACED
        pytest.skip("it does not train on tokens alone")
    replaces = applied(ours, name)
    assert replaces == REPLACED.get(name, replaces)
    if replaces == "nothing":
        return
    patched = replaced(ours)
    for inputs, expected in tried.values():
        assert_same(ours, eager, inputs, expected)
    assert_same(ours, eager, *tried["plain"])  # the first steps have told what the model does to its logits
    assert replaced(ours) == patched
    assert_no_leak(ours, eager, tried["plain"][0])
    assert_same_tokens(ours, eager, tried.get("padded", tried["plain"])[0])


def test_common_architectures_are_there() -> None:
    assert ARCHITECTURES.keys() >= REPLACED.keys()
