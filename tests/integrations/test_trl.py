"""Log-probabilities in TRL's fused head and trainers, beside TRL's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

trl = pytest.importorskip("trl")

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
import trl.trainer.utils as trl_utils  # noqa: E402
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

import monoidreduce.integrations.trl as integration  # noqa: E402
from monoidreduce.integrations.trl import OPTIONAL, REPLACED, apply, log_probs  # noqa: E402

THEIRS = getattr(trl_utils, REPLACED)
SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
}


def operands(dtype: torch.dtype, bias: bool) -> list[Tensor | None]:
    """x, weight, bias; logits have about unit variance."""
    shapes = [(40, 24), (301, 24), (301,)]
    factors = (1, 24**-0.5, 1)
    made = [(torch.randn(s) * f).to(dtype).requires_grad_() for s, f in zip(shapes, factors, strict=True)]
    return [*made[:2], made[2] if bias else None]


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("softcap", (None, 3.0))
def test_the_function(softcap: float | None, bias: bool, dtype: torch.dtype) -> None:
    """All results and gradients; TRL's rounds each logit to the dtype, and sums in float32."""
    leaves, targets = operands(dtype, bias), torch.randint(301, (40,))
    options = (targets, 0.7, 64, softcap, 1.3, OPTIONAL)
    ours, theirs = log_probs(*leaves, *options), THEIRS.apply(*leaves, *options)  # type: ignore[arg-type]
    tolerance = 0.05 if dtype == torch.bfloat16 else 2e-5
    near: dict[str, Any] = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    for name, found, expected in zip(("log_probs", *OPTIONAL), ours, theirs, strict=True):
        if name == "is_top1" and dtype == torch.bfloat16:
            continue  # of logits that are rounded there, and not here
        torch.testing.assert_close(found, expected, **near, msg=lambda m, name=name: f"{name}: {m}")
    upstream = [torch.randn(40), torch.randn(40)]
    wanted = [t for t in leaves if t is not None]
    gradients = (
        torch.autograd.grad(y[:2], wanted, [g.to(t.dtype) for g, t in zip(upstream, y[:2], strict=True)])  # type: ignore[arg-type, union-attr]
        for y in (ours, theirs)
    )
    for found, expected in zip(*gradients, strict=True):
        largest = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * largest)


def test_only_what_is_asked_for() -> None:
    found = log_probs(
        *operands(torch.float32, True), torch.randint(301, (40,)), 1.0, 64, None, 1.0, ("log_probs",)
    )  # type: ignore[arg-type]
    assert found[0].shape == (40,) and found[1:] == (None,) * 4


def test_a_version_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trl_utils, REPLACED)
    with pytest.raises(ImportError, match="trl: expected a version that has"):
        apply()


MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, final_logit_softcapping=5.0, attn_implementation="eager")
    ),
}


@pytest.mark.parametrize("cast", (False, True), ids=("as_is", "float32_head"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_fused_head(name: str, dtype: torch.dtype, cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses and gradients of a model are TRL's, also where the prompt has no labels."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    ids = torch.randint(301, (2, 20))
    labels = ids.masked_fill(torch.arange(20) < 5, -100)
    results = []
    for ours in (False, True):
        monkeypatch.setattr(trl_utils, REPLACED, THEIRS)
        if ours:
            apply()
        copied = copy.deepcopy(model)
        outputs = ("log_probs", *OPTIONAL)
        trl_utils.add_fused_lm_head(copied, temperature=0.8, cast_lm_head_to_fp32=cast, outputs=outputs)
        out = copied(input_ids=ids, labels=labels, fused_lm_head=True)
        (out.loss + out.entropy.mean()).backward()
        results.append((out, {n: p.grad for n, p in copied.named_parameters()}))
    (theirs, expected), (ours_out, found) = results
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    near: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    for field in ("loss", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits"):
        torch.testing.assert_close(getattr(ours_out, field), getattr(theirs, field), **near)
    assert not ours_out.log_probs[:, :4].any() and torch.equal(ours_out.label_mask, theirs.label_mask)
    for parameter, gradient in expected.items():
        largest = max(float(gradient.abs().max()), 1e-3)
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=tolerance * largest)


WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(298))]


def tokenizer() -> Any:
    """Words are tokens."""
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    inner = tokenizers.Tokenizer(words)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def examples(*columns: str) -> Any:
    """Eight of random words; a label is every other one's."""
    torch.manual_seed(1)
    rows = []
    for n in range(8):
        texts = {c: " ".join(WORDS[3 + int(i)] for i in torch.randint(298, (6 + n,))) for c in columns}
        rows.append(texts | ({"label": n % 2 == 0} if "label" in columns else {}))
    return datasets.Dataset.from_list(rows)


def reward(completions: list[str], **others: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


# Trainer, configuration, columns; options of the configuration and of the trainer.
TRAINERS: dict[str, tuple[Any, Any, tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, ("prompt", "completion"), {}, {}),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, ("prompt", "chosen", "rejected"), {}, {}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, ("prompt", "completion", "label"), {}, {}),
    "grpo": (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        ("prompt",),
        {"num_generations": 4, "max_completion_length": 8, "beta": 0.1},
        {"reward_funcs": reward},
    ),
}


def history(name: str, folder: Path) -> list[dict[str, float]]:
    """What a trainer logs of three steps."""
    trainer_of, config_of, columns, of_config, of_trainer = TRAINERS[name]
    config = config_of(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **of_config,
    )

    def model() -> Any:
        torch.manual_seed(0)
        of = LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=0, eos_token_id=1, bos_token_id=1))
        of.save_pretrained(folder / "model")
        return LlamaForCausalLM.from_pretrained(folder / "model")

    of_trainer = of_trainer | ({"ref_model": model()} if name in ("dpo", "kto") else {})
    of_trainer |= {"train_dataset": examples(*columns), "processing_class": tokenizer()}
    trainer = trainer_of(model=model(), args=config, **of_trainer)
    trainer.train()
    steps = [step for step in trainer.state.log_history if "loss" in step]
    return [{k: v for k, v in step.items() if "time" not in k and v is not None} for step in steps]


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that they log of three steps, the loss and the norm of gradients among it, is as with TRL's own."""
    monkeypatch.setattr(trl_utils, REPLACED, THEIRS)
    expected = history(name, tmp_path / "theirs")
    apply()
    calls = []
    ours = integration.log_probs
    monkeypatch.setattr(integration, "log_probs", lambda *args: calls.append(1) or ours(*args))
    found = history(name, tmp_path / "ours")
    assert len(calls) >= 3 and len(found) == len(expected) == 3
    assert any(step["grad_norm"] > 1e-3 for step in expected)
    for step, theirs in zip(found, expected, strict=True):
        assert step == pytest.approx(theirs, rel=1e-4, abs=2e-5)
