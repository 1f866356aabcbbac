"""Trains the models of the demo side by side."""

from __future__ import annotations

import math
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .data import batches

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


@dataclass(frozen=True)
class Settings:
    """How both models are trained, on sequences of `length` tokens.

    `autocast` is the dtype of matrix products, None for float32.
    """

    length: int
    batch: int
    steps: int
    learning_rate: float
    autocast: torch.dtype | None
    device: torch.device
    seed: int


@dataclass(frozen=True)
class Run:
    """The result of training: the loss of every step, and the median time of a step in seconds."""

    losses: list[float]
    step_seconds: float


class Progress:
    """A tqdm bar, or a line for every tenth of the way where tqdm is not installed."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.bar: Any = tqdm(total=steps, desc="training", unit="step", mininterval=0.5) if tqdm else None

    def step(self, losses: str) -> None:
        """One more step is done."""
        self.done += 1
        if self.bar is not None:
            self.bar.set_postfix_str(losses, refresh=False)
            self.bar.update()
        elif self.done * 10 // self.steps > (self.done - 1) * 10 // self.steps:
            print(f"training: step {self.done} of {self.steps}, loss {losses}", file=sys.stderr)

    def close(self) -> None:
        """Ends the bar's line in the terminal."""
        if self.bar is not None:
            self.bar.close()


def _rate(step: int, steps: int) -> float:
    """Share of the learning rate: linear warm-up over a tenth of the steps, then half a cosine to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


class Trainee:
    """One model and its optimizer."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self.model = model.to(settings.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95)
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: _rate(step, settings.steps)
        )

    def step(self, tokens: Tensor, target: Tensor) -> float:
        """One step of training; returns the loss, and with it waits for the device."""
        device, autocast = self.settings.device, self.settings.autocast
        with torch.autocast(device.type, autocast) if autocast else nullcontext():
            loss = self.model(tokens.to(device), target.to(device))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return float(loss.item())


def train_both(text: Tensor, models: dict[str, nn.Module], settings: Settings) -> dict[str, Run]:
    """Trains the models on the same batches. Each maps tokens and next tokens to a loss.

    They take their steps alternately, so that other load on the machine affects both timings alike.
    """
    trainees = {name: Trainee(model, settings) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    progress = Progress(settings.steps)
    try:
        for tokens, target in batches(text, settings.steps, settings.batch, settings.length, settings.seed):
            for name, trainee in trainees.items():
                start = time.perf_counter()
                losses[name].append(trainee.step(tokens, target))
                seconds[name].append(time.perf_counter() - start)
            progress.step(", ".join(f"{name} {losses[name][-1]:.3f}" for name in models))
    finally:
        progress.close()
    return {name: Run(losses[name], statistics.median(seconds[name])) for name in models}
