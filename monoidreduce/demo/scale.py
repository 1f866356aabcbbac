"""The settings of a demo: two models with the same initial weights, their training, and the memory sweeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from .model import ModelSize
from .sweep import Sweep


@dataclass(frozen=True)
class Scale(ABC):
    """The settings on a device: the models' size, their training, the vocabularies at which memory is
    measured.

    `autocast` is the dtype of matrix products in training, None for float32.
    """

    size: ModelSize
    batch: int
    steps: int
    learning_rate: float
    autocast: torch.dtype | None
    vocabularies: list[int]

    @property
    def measured_dtype(self) -> torch.dtype:
        """The dtype in which memory is measured."""
        return self.autocast or torch.float32

    @abstractmethod
    def title(self) -> str:
        """The model in words."""

    @abstractmethod
    def models(self, seed: int) -> dict[str, nn.Module]:
        """Both models by name, MonoidReduce's last. Each maps tokens and next tokens [B, L] to a mean
        loss."""

    @abstractmethod
    def sweeps(self, device: torch.device) -> list[Sweep]:
        """The memory of both on `device`, measured in fresh processes."""
