"""The demo's own language model, with layers of PyTorch and of MonoidReduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .model import BACKENDS, ModelSize, Transformer
from .scale import Scale
from .sweep import Sweep, sweep_loss, sweep_mlp


@dataclass(frozen=True)
class LayerScale(Scale):
    """The memory of the MLP is measured at `lengths`, and that of the loss at `vocabularies`."""

    lengths: list[int]

    def title(self) -> str:
        return str(self.size)

    def models(self, seed: int) -> dict[str, nn.Module]:
        made: dict[str, nn.Module] = {}
        for backend in BACKENDS:
            torch.manual_seed(seed)
            made[backend] = Transformer(self.size, backend)
        return made

    def sweeps(self, device: torch.device) -> list[Sweep]:
        dtype, tokens = self.measured_dtype, self.batch * self.size.length
        return [
            sweep_mlp(self.size, self.lengths, device, dtype),
            sweep_loss(self.size, tokens, self.vocabularies, device, dtype),
        ]


SCALES = {
    # Two cores need about two minutes. In float32 the two loss curves differ by rounding alone.
    "cpu": LayerScale(
        size=ModelSize(layers=4, dim=128, heads=4, hidden=512, length=256),
        batch=8,
        steps=200,
        learning_rate=2e-3,
        autocast=None,
        lengths=[2048, 4096, 8192, 16384, 32768],
        vocabularies=[256, 1024, 4096, 16384, 65536],
    ),
    # bfloat16 products with float32 weights, as models are trained on GPUs. The model is large enough that a
    # step takes the GPU longer than the host.
    "cuda": LayerScale(
        size=ModelSize(layers=6, dim=1024, heads=16, hidden=4096, length=1024),
        batch=32,
        steps=200,
        learning_rate=1e-3,
        autocast=torch.bfloat16,
        lengths=[8192, 16384, 32768, 65536, 131072],
        vocabularies=[256, 1024, 4096, 16384, 65536],
    ),
}
