"""A small Llama of transformers, made from a config, as it is and after `apply`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import transformers
from torch import Tensor, nn

from monoidreduce.integrations.transformers import apply

from .memory import Problem
from .model import VOCABULARY, ModelSize
from .scale import Scale
from .sweep import Sweep, dtype_name, growth

BACKENDS = ("transformers", "monoidreduce")


class CausalLM(nn.Module):
    """The causal language model; forward returns the mean cross entropy."""

    def __init__(self, size: ModelSize, vocabulary: int, backend: str) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=size.dim,
            intermediate_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 2,
            max_position_embeddings=size.length,
            tie_word_embeddings=True,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(config)
        self.model = apply(model) if backend == "monoidreduce" else model
        self.train()  # the mode in which the loss is computed without logits

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        """tokens [B, L] and target [B, L] integer -> loss [], float32."""
        target = target.contiguous()  # transformers takes a view of it
        loss: Tensor = self.model(input_ids=tokens, labels=target, shift_labels=target).loss
        return loss.float()


@dataclass(frozen=True)
class ModelScale(Scale):
    """The memory of a whole step of training is measured at `vocabularies`."""

    def title(self) -> str:
        return f"LlamaForCausalLM of transformers {transformers.__version__}, {self.size}"

    def models(self, seed: int) -> dict[str, nn.Module]:
        made: dict[str, nn.Module] = {}
        for backend in BACKENDS:
            torch.manual_seed(seed)
            made[backend] = CausalLM(self.size, VOCABULARY, backend)
        return made

    def sweeps(self, device: torch.device) -> list[Sweep]:
        common = {
            "size": asdict(self.size),
            "batch": self.batch,
            "device": str(device),
            "dtype": dtype_name(self.measured_dtype),
        }
        sizes = [common | {"vocabulary": vocabulary} for vocabulary in self.vocabularies]
        measured = growth(f"{__name__}:model_problem", BACKENDS, sizes[0] | {"batch": 1}, sizes)
        return [Sweep("model", "vocabulary", self.vocabularies, measured)]


def model_problem(
    backend: str, size: dict[str, int], batch: int, vocabulary: int, device: str, dtype: str
) -> Problem:
    """The whole model over `batch` sequences. Its weights get gradients."""
    shape = ModelSize(**size)
    model = CausalLM(shape, vocabulary, backend).to(torch.device(device), getattr(torch, dtype))
    tokens, target = torch.randint(vocabulary, (2, batch, shape.length), device=device)
    return Problem(lambda: model(tokens, target), tuple(model.parameters()), torch.ones((), device=device))


SCALES = {
    # Two cores need less than a minute. In float32 the two loss curves differ by rounding alone.
    "cpu": ModelScale(
        size=ModelSize(layers=3, dim=128, heads=4, hidden=384, length=256),
        batch=8,
        steps=50,
        learning_rate=3e-3,
        autocast=None,
        vocabularies=[256, 4096, 65536],
    ),
    "cuda": ModelScale(
        size=ModelSize(layers=6, dim=1024, heads=16, hidden=4096, length=1024),
        batch=32,
        steps=200,
        learning_rate=1e-3,
        autocast=torch.bfloat16,
        vocabularies=[256, 1024, 4096, 16384, 65536],
    ),
}
