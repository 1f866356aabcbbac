"""Log-probabilities and divergences in TRL's fused head and trainers, beside TRL's own."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

trl = pytest.importorskip("trl")

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
import trl.trainer.distillation_trainer as trl_distillation  # noqa: E402
import trl.trainer.utils as trl_utils  # noqa: E402
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402
from trl.experimental.gkd import GKDConfig  # noqa: E402
from trl.experimental.gkd import GKDTrainer as TrlGKDTrainer  # noqa: E402

import monoidreduce.integrations._divergence as of_divergence  # noqa: E402
import monoidreduce.integrations.trl as integration  # noqa: E402
from monoidreduce.integrations.gkd import GKDTrainer  # noqa: E402
from monoidreduce.integrations.trl import (  # noqa: E402
    OPTIONAL,
    REPLACED,
    REPLACED_DIVERGENCE,
    apply,
    divergence,
    log_probs,
)

THEIRS = getattr(trl_utils, REPLACED)
THEIR_DIVERGENCE = getattr(trl_distillation, REPLACED_DIVERGENCE)
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


def use_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own functions, for now; and again after the test, which may call apply()."""
    monkeypatch.setattr(trl_utils, REPLACED, THEIRS)
    monkeypatch.setattr(trl_distillation, REPLACED_DIVERGENCE, THEIR_DIVERGENCE)


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


@pytest.mark.parametrize("module, name", ((trl_utils, REPLACED), (trl_distillation, REPLACED_DIVERGENCE)))
def test_a_version_without_the_function(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is replaced then."""
    use_theirs(monkeypatch)
    monkeypatch.delattr(module, name)
    with pytest.raises(ImportError, match=rf"trl: expected a version that has {module.__name__}.{name}"):
        apply()
    other = {trl_utils: (trl_distillation, REPLACED_DIVERGENCE), trl_distillation: (trl_utils, REPLACED)}
    assert getattr(*other[module]) in (THEIRS, THEIR_DIVERGENCE)


def pair(dtype: torch.dtype, teacher_dtype: torch.dtype, biases: tuple[bool, bool]) -> list[Tensor | None]:
    """Hidden states, weight and bias of a student [40, 24] and a teacher [40, 16]."""
    made: list[Tensor | None] = []
    for width, of, bias in ((24, dtype, biases[0]), (16, teacher_dtype, biases[1])):
        shapes = (40, width), (301, width), (301,)
        factors = (1, width**-0.5, 1)
        of_model: list[Tensor | None] = [
            (torch.randn(s) * f).to(of) for s, f in zip(shapes, factors, strict=True)
        ]
        made += of_model if bias else [*of_model[:2], None]
    return [t if t is None or i > 2 else t.requires_grad_() for i, t in enumerate(made)]


@pytest.mark.parametrize("beta", (0.0, 0.2, 0.5, 1.0))
@pytest.mark.parametrize("biases", ((False, False), (True, False), (True, True)), ids=("none", "one", "both"))
@pytest.mark.parametrize("scales", ((1.0, 1.0), (0.5, 1.3)), ids=("unscaled", "scaled"))
@pytest.mark.parametrize(
    "dtypes",
    ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)),
    ids=("float32", "bfloat16", "mixed"),
)
def test_the_divergence(
    dtypes: tuple[torch.dtype, torch.dtype],
    scales: tuple[float, float],
    biases: tuple[bool, bool],
    beta: float,
) -> None:
    """Values and gradients for each token, and the entropy of the student, which has none."""
    leaves, (of_student, of_teacher) = pair(*dtypes, biases), scales
    options = (beta, 0.7, of_student, None, of_teacher, None)
    ours, theirs = divergence(*leaves, *options), THEIR_DIVERGENCE.apply(*leaves, *options)  # type: ignore[arg-type]
    # In bfloat16 hidden states times of_teacher / of_student are rounded here, gradients of logits there.
    exact, narrow = 2e-5, 2e-2
    in_bfloat16 = dtypes[0] == torch.bfloat16
    tolerance = narrow if in_bfloat16 and of_student != of_teacher else exact
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours[1], theirs[1], rtol=exact, atol=exact)
    assert not ours[1].requires_grad
    wanted, upstream = [t for t in leaves[:3] if t is not None], torch.randn(40)
    gradients = (torch.autograd.grad(y[0], wanted, upstream) for y in (ours, theirs))
    for found, expected in zip(*gradients, strict=True):
        assert found.dtype == expected.dtype
        largest = float(expected.abs().max())
        tolerance = narrow if in_bfloat16 else exact
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("beta", (0.0, 0.2))
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
def test_the_divergence_under_autocast(bias: bool, beta: float) -> None:
    """Float32 weights and hidden states, as in mixed precision, take part in bfloat16."""
    leaves = pair(torch.float32, torch.float32, (bias, bias))
    wanted = [t for t in leaves[:3] if t is not None]
    results = []
    for function in (divergence, THEIR_DIVERGENCE.apply):
        with torch.autocast("cpu", torch.bfloat16):
            found, entropy = function(*leaves, beta, 0.7)  # type: ignore[operator]
        results.append([found, entropy, *torch.autograd.grad(found.sum(), wanted)])
    (found, entropy, *gradients), (expected, their_entropy, *their_gradients) = results
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    of_entropy = 2e-2 if bias else 2e-5  # whose bias is rounded here
    torch.testing.assert_close(entropy, their_entropy, rtol=of_entropy, atol=of_entropy)
    for gradient, theirs in zip(gradients, their_gradients, strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=0, atol=2e-2 * float(theirs.abs().max()))


def test_the_divergence_without_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = pair(torch.float32, torch.float32, (False, False))
    expected, _ = divergence(*leaves, 0.5)  # type: ignore[arg-type]
    monkeypatch.setattr(of_divergence, "linear_log_probs", None)
    found, entropy = divergence(*leaves, 0.5, entropy=False)  # type: ignore[arg-type]
    assert entropy is None and torch.equal(found, expected)
    with pytest.raises(TypeError, match="entropy: expected True or False"):
        divergence(*leaves, 0.5, entropy=None)  # type: ignore[arg-type]


def test_the_divergence_refuses() -> None:
    leaves = pair(torch.float32, torch.float32, (False, False))
    for name in ("student", "teacher"):
        for argument, given in ((f"{name}_final_logit_softcapping", 30.0), (f"{name}_logit_scale", 0.0)):
            with pytest.raises(ValueError, match=f"{argument}: expected"):
                divergence(*leaves, 0.5, **{argument: given})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"{name}_logit_scale: expected"):
            divergence(*leaves, 0.5, **{f"{name}_logit_scale": None})  # type: ignore[arg-type]


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
        use_theirs(monkeypatch)
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


def teacher(**options: Any) -> Any:
    """Of another width than the student."""
    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(**SIZES | {"hidden_size": 48, **options}, pad_token_id=0, eos_token_id=1)
    )


def messages() -> Any:
    """Eight examples as GKD has them, with tokens and where completions begin."""
    torch.manual_seed(1)
    rows = []
    for n in range(8):
        ids = torch.randint(3, 301, (9 + n,)).tolist()
        prompt = 3 + n % 3
        text = " ".join(WORDS[i] for i in ids[:prompt])
        rows.append(
            {"prompt": text, "input_ids": ids, "completion_mask": [0] * prompt + [1] * (len(ids) - prompt)}
        )
    return datasets.Dataset.from_list(rows)


# Trainer, configuration, columns; options of the configuration and of the trainer.
TRAINERS: dict[str, tuple[Any, Any, tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    **{
        f"distillation_{beta}": (
            trl.DistillationTrainer,
            trl.DistillationConfig,
            ("prompt",),
            {"beta": beta, "temperature": 0.8, "max_completion_length": 8},
            {"teacher_model": teacher},
        )
        for beta in (0.0, 0.3, 1.0)
    },
    **{
        f"gkd_{beta}": (
            TrlGKDTrainer,
            GKDConfig,
            (),
            {"beta": beta, "lmbda": 0.5, "max_new_tokens": 8},
            {"teacher_model": teacher},
        )
        for beta in (0.0, 0.3, 1.0)
    },
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


def trainer(name: str, folder: Path, made_by: Any = None, **more: Any) -> Any:
    """For three steps. made_by: its class, if not TRL's. more: options of the configuration."""
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
        **of_config | more,
    )

    def model() -> Any:
        torch.manual_seed(0)
        of = LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=0, eos_token_id=1, bos_token_id=1))
        of.save_pretrained(folder / "model")
        return LlamaForCausalLM.from_pretrained(folder / "model")

    of_trainer = of_trainer | ({"ref_model": model()} if name in ("dpo", "kto") else {})
    of_trainer |= {"teacher_model": teacher()} if "teacher_model" in of_trainer else {}
    of_trainer |= {"train_dataset": examples(*columns) if columns else messages()}
    return (made_by or trainer_of)(model=model(), args=config, processing_class=tokenizer(), **of_trainer)


def history(name: str, folder: Path, made_by: Any = None) -> list[dict[str, float]]:
    """What a trainer logs of three steps."""
    made = trainer(name, folder, made_by)
    made.train()
    steps = [step for step in made.state.log_history if "loss" in step]
    return [{k: v for k, v in step.items() if "time" not in k and v is not None} for step in steps]


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that they log of three steps, the loss and the norm of gradients among it, is as with TRL's own."""
    use_theirs(monkeypatch)
    expected = history(name, tmp_path / "theirs")
    apply()
    calls = []
    function = "divergence" if "teacher_model" in TRAINERS[name][-1] else "log_probs"
    ours = getattr(integration, function)
    monkeypatch.setattr(
        integration, function, lambda *args, **options: calls.append(1) or ours(*args, **options)
    )
    found = history(name, tmp_path / "ours", GKDTrainer if name.startswith("gkd") else None)
    assert len(calls) >= 3 and len(found) == len(expected) == 3
    assert any(step["grad_norm"] > 1e-3 for step in expected)
    for step, theirs in zip(found, expected, strict=True):
        assert step == pytest.approx(theirs, rel=1e-4, abs=2e-5)


def test_gkd_makes_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except where outputs are asked for, and then the loss is the same."""
    use_theirs(monkeypatch)
    made = trainer("gkd_0.3", tmp_path, GKDTrainer, lmbda=0.0)
    calls: list[int] = []
    for model in (made.model, made.teacher_model):
        model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    made.train()
    assert made.state.global_step == 3 and not calls
    batch = made.data_collator(list(made.train_dataset)[:4])
    made.model.eval()
    with torch.no_grad():
        loss = made.compute_loss(made.model, batch)
        theirs, outputs = made.compute_loss(made.model, batch, return_outputs=True)
    assert len(calls) == 2 and outputs.logits.shape[-1] == 301
    torch.testing.assert_close(loss, theirs)


@pytest.mark.parametrize("name", ("gkd_0.3", "distillation_0.3"))
def test_who_logs_no_entropy_computes_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_theirs(monkeypatch)
    apply()
    calls: list[int] = []
    entropy_of = of_divergence.linear_log_probs
    monkeypatch.setattr(
        of_divergence,
        "linear_log_probs",
        lambda *args, **options: calls.append(1) or entropy_of(*args, **options),
    )
    steps = history(name, tmp_path, GKDTrainer if name.startswith("gkd") else None)
    assert len(steps) == 3 and len(calls) == (0 if name.startswith("gkd") else 3)
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert all(("entropy" in step) == (len(calls) > 0) for step in steps)


def test_gkd_refuses_a_softcap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_theirs(monkeypatch)
    made = trainer("gkd_0.3", tmp_path, GKDTrainer, lmbda=0.0)
    made.model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="student_final_logit_softcapping: expected None"):
        made.train()


def test_gkd_refuses_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the teacher's head and of prompts, which a loss of hidden states would leave out."""
    peft = pytest.importorskip("peft")
    use_theirs(monkeypatch)
    head = peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    adapted: list[tuple[Any, str, dict[str, Any]]] = [
        (
            TypeError,
            r"teacher_model: its head: .*Linear",
            {"teacher_model": peft.get_peft_model(teacher(), head)},
        ),
        (ValueError, "model: expected no prompts that PEFT learns", {"peft_config": prompts}),
    ]
    for error, message, options in adapted:
        with pytest.raises(error, match=message):
            trainer("gkd_0.3", tmp_path, lambda options=options, **given: GKDTrainer(**given | options))
