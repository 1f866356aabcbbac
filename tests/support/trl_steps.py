"""Trainers of the installed TRL, for three steps of a tiny Llama, with and without this library.

`python trl_steps.py NAME ...` compares logs and gradients of trainers before and after `apply`. It prints the
numbers of calls of the library's functions as JSON.
"""

from __future__ import annotations

import json
import queue
import sys
import tempfile
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
import trl
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import monoidreduce.integrations.trl as integration

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

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(298))]


def tokenizer() -> Any:
    """A tokenizer with a token for each word."""
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    inner = tokenizers.Tokenizer(words)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def examples(*columns: str) -> Any:
    """A dataset of eight examples of random words. Column "label" is True in every other example."""
    torch.manual_seed(1)
    rows = []
    for n in range(8):
        texts = {c: " ".join(WORDS[3 + int(i)] for i in torch.randint(298, (6 + n,))) for c in columns}
        rows.append(texts | ({"label": n % 2 == 0} if "label" in columns else {}))
    return datasets.Dataset.from_list(rows)


def reward(completions: list[str], **others: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def teacher(**options: Any) -> Any:
    """A teacher with a different hidden size from the student's."""
    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(**SIZES | {"hidden_size": 48, **options}, pad_token_id=0, eos_token_id=1)
    )


def messages() -> Any:
    """A dataset of eight examples in GKD's format: prompts, token ids and masks of completions."""
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


class Rollouts:
    """A worker that has samples ready, scored by a teacher of which five classes of each token are
    known; stands in for processes with vLLM. Of odd samples the second teacher's. It is also what sends the
    student's weights nowhere."""

    def __init__(self, teachers: tuple[str, ...]) -> None:
        sample = experimental("async_distillation.async_rollout_worker", "RolloutSample")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        torch.manual_seed(2)
        for n in range(20):  # more than are trained on: batches are read ahead
            length = 9 + n
            ids = torch.randint(3, 301, (length,))
            log_p = (2 * torch.randn(length, 301)).log_softmax(1)
            best = log_p.topk(4).indices
            candidates = torch.cat((best, torch.where((best == ids[:, None]).any(1), -1, ids)[:, None]), 1)
            known = log_p.gather(1, candidates.clamp(min=0)).masked_fill(candidates < 0, -torch.inf)
            self.rollout_buffer.put(
                sample(
                    prompt=[],
                    completion=[],
                    input_ids=ids.numpy(),
                    completion_mask=(np.arange(length) >= 4).astype(np.int64),
                    teacher_topk_ids=candidates.numpy(),
                    teacher_topk_logprobs=known.numpy(),
                    model_version=0,
                    metrics={},
                    teacher_id=teachers[n % len(teachers)],
                    prompt_id=n,
                )
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: None


def experimental(module: str, name: str) -> Any:
    return getattr(import_module(f"trl.experimental.{module}"), name)


# Name -> columns of the dataset, options of the configuration, options of the trainer. `class_of` finds the
# classes from the name up to "_".
TRAINERS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    **{
        f"distillation_{beta}": (
            ("prompt",),
            {"beta": beta, "temperature": 0.8, "max_completion_length": 8},
            {"teacher_model": teacher},
        )
        for beta in (0.0, 0.3, 1.0)
    },
    **{
        f"gkd_{beta}": (
            (),
            {"beta": beta, "lmbda": 0.5, "max_new_tokens": 8},
            {"teacher_model": teacher},
        )
        for beta in (0.0, 0.3, 1.0)
    },
    **{
        f"asyncdistillation_{beta}": (
            ("prompt",),
            {
                "beta": beta,
                "add_tail_bucket": beta > 0,
                "teacher_temperature": 0.8,
                "teacher_server_urls": {"one": "", "two": ""},
                "token_budget": 0,
                "model_init_kwargs": {"attn_implementation": "eager"},
            },
            {"rollout_worker": Rollouts, "weight_transfer": Rollouts},
        )
        for beta in (0.0, 0.3, 1.0)
    },
    "sft": (("prompt", "completion"), {}, {}),
    "dpo": (("prompt", "chosen", "rejected"), {}, {}),
    "kto": (("prompt", "completion", "label"), {}, {}),
    "grpo": (
        ("prompt",),
        {"num_generations": 4, "max_completion_length": 8, "beta": 0.1},
        {"reward_funcs": reward},
    ),
    "gmpo": (("prompt",), {"num_generations": 4, "max_completion_length": 8}, {"reward_funcs": reward}),
    "rloo": (
        ("prompt",),
        {"num_generations": 4, "max_completion_length": 8, "beta": 0.1},
        {"reward_funcs": reward},
    ),
    "orpo": (("prompt", "chosen", "rejected"), {"max_length": 32}, {}),
    "cpo": (("prompt", "chosen", "rejected"), {"max_length": 32}, {}),
    "onlinedpo": (("prompt",), {"max_new_tokens": 8}, {"reward_funcs": reward}),
}
MODULES = {"gkd": "gkd", "gmpo": "gmpo", "orpo": "orpo", "cpo": "cpo", "onlinedpo": "online_dpo"}
MODULES["asyncdistillation"] = "async_distillation"
NAMES = {"sft": "SFT", "distillation": "Distillation", "onlinedpo": "OnlineDPO"}
NAMES["asyncdistillation"] = "AsyncDistillation"


def class_of(name: str, kind: str = "Trainer") -> Any:
    """The trainer's class; with kind "Config", the class of its configuration."""
    of = name.partition("_")[0]
    wanted = f"{NAMES.get(of, of.upper())}{kind}"
    return experimental(MODULES[of], wanted) if of in MODULES else getattr(trl, wanted)


def trainer(name: str, folder: Path, made_by: Any = None, **more: Any) -> Any:
    """A trainer for three steps. made_by: its class, if not TRL's. more: options of the configuration."""
    columns, of_config, of_trainer = TRAINERS[name]
    config = class_of(name, "Config")(
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
    student: Any = model()
    if "rollout_worker" in of_trainer:
        worker = Rollouts(tuple(config.teacher_server_urls))
        of_trainer |= {"rollout_worker": worker, "weight_transfer": worker}
        student = str(folder / "model")
    with pytest.MonkeyPatch.context() as patched:
        if "rollout_worker" in of_trainer:  # which asks for the name of a GPU
            module = import_module("trl.experimental.async_distillation.async_distillation_trainer")
            patched.setattr(module, "get_peak_flops_per_device", lambda *given: None)
        return (made_by or class_of(name))(
            model=student, args=config, processing_class=tokenizer(), **of_trainer
        )


class Gradients(transformers.TrainerCallback):
    """Records the gradients of the first step."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, *args: Any, model: Any, **others: Any) -> None:
        named = model.named_parameters()
        self.found = self.found or {n: p.grad.clone() for n, p in named if p.grad is not None}


def history(name: str, folder: Path, made_by: Any = None) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The logs of a trainer's three steps, and the gradients of the first step."""
    made, gradients = trainer(name, folder, made_by), Gradients()
    made.add_callback(gradients)
    made.train()
    steps = [step for step in made.state.log_history if "loss" in step]
    logged = [
        {k: v for k, v in step.items() if not ("time" in k or k.startswith("perf/")) and v is not None}
        for step in steps
    ]
    return logged, gradients.found


def check_same(
    found: tuple[list[dict[str, float]], dict[str, Tensor]],
    expected: tuple[list[dict[str, float]], dict[str, Tensor]],
) -> None:
    """Assert that two results of `history` agree in all logged numbers and in each parameter's gradient."""
    assert len(found[0]) == len(expected[0]) == 3 and found[1].keys() == expected[1].keys() != set()
    assert any(step["grad_norm"] > 1e-3 for step in expected[0])
    for step, theirs in zip(found[0], expected[0], strict=True):
        assert step == pytest.approx(theirs, rel=1e-4, abs=2e-5)
    for parameter, gradient in expected[1].items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(found[1][parameter], gradient, rtol=0, atol=1e-4 * largest + 1e-7)


class LogProbsByTorch:
    """Stands in for TRL 1.15's function of log-probabilities, which exists only if Triton is installed."""

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None,
        logit_scale: float,
        outputs: Any,
    ) -> tuple[Tensor, ...]:
        assert final_logit_softcapping is None
        logits = logit_scale * F.linear(hidden, weight, bias) / temperature
        log_p = logits.log_softmax(-1)
        entropy, is_top1 = -(log_p.exp() * log_p).sum(-1), log_p.argmax(-1) == targets
        chosen = log_p.gather(-1, targets[:, None])[:, 0]
        return chosen, entropy, (2 * log_p).logsumexp(-1), logits.mean(-1), is_top1

    apply = forward


class DivergenceByTorch:
    """Stands in for TRL 1.15's function of divergences between two heads (student and teacher)."""

    @staticmethod
    def apply(*given: Any) -> tuple[Tensor, Tensor]:
        (x, w, b, teacher_x, teacher_w, teacher_b, beta, temperature), scales = given[:8], given[8:]
        assert scales == (1.0, None, 1.0, None)
        log_p = (F.linear(x, w, b) / temperature).log_softmax(-1)
        log_q = (F.linear(teacher_x, teacher_w, teacher_b) / temperature).log_softmax(-1).detach()
        p, q = log_p.exp(), log_q.exp()
        log_m = ((1 - beta) * p + beta * q).log()
        mixed = beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)
        found = {0.0: q * (log_q - log_p), 1.0: p * (log_p - log_q)}.get(beta, mixed)
        return found.sum(-1), -(p * log_p).sum(-1).detach()


def without_triton() -> None:
    """Give TRL 1.15 the functions that it lacks if Triton is not installed."""
    import trl.trainer.utils as utils

    if utils._ChunkedLogProbFunction is None:
        utils._ChunkedLogProbFunction = LogProbsByTorch
        module = types.ModuleType("trl.kernels.chunked_divergence")
        vars(module).update(ChunkedDivergenceFunction=DivergenceByTorch)
        sys.modules[module.__name__] = module


def counted_calls(monkeypatch: Any) -> list[str]:
    """A list that records the names of this library's functions as trainers call them."""
    calls: list[str] = []

    def counting(function: str) -> None:
        ours = getattr(integration, function)

        def call(*args: Any, **options: Any) -> Any:
            calls.append(function)
            return ours(*args, **options)

        monkeypatch.setattr(integration, function, call)

    for function in ("log_probs", "divergence", "divergence_of_candidates"):
        counting(function)
    return calls


def main(names: list[str]) -> None:
    without_triton()
    calls = counted_calls(pytest.MonkeyPatch())
    counts = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            expected = history(name, Path(folder) / "theirs")
            assert not calls
            integration.apply()
            try:
                found = history(name, Path(folder) / "ours")
            finally:
                integration.undo()
        check_same(found, expected)
        counts[name] = len(calls)
        calls.clear()
    reached, others = integration.trainers()
    print(json.dumps({"version": trl.__version__, "calls": counts, "reached": reached, "others": others}))


if __name__ == "__main__":
    main(sys.argv[1:])
