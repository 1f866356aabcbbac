"""A bar chart that compares plans."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from monoidreduce._command_line import replacing
from monoidreduce.theory.plan.planner import Plan

__all__ = ["save_figure"]


def save_figure(path: Path, plans: Sequence[Plan]) -> None:
    """Draw the seconds of a step, one stacked bar for each plan: arithmetic, waits, bubble, gradients,
    optimizer.

    Args:
        path: file to write; its suffix must be a format that matplotlib writes.
        plans: one or more plans.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    found = [_parts(plan) for plan in plans]
    names = dict.fromkeys(name for parts in found for name in parts)
    bottom = [0.0] * len(plans)
    for name in names:
        heights = [parts.get(name, 0.0) for parts in found]
        axes.bar(range(len(plans)), heights, 0.7, bottom=bottom, label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    labels = ["\n".join(f"{axis.strategy} {axis.size}" for axis in plan.mesh.axes) for plan in plans]
    axes.set_xticks(range(len(plans)), labels, fontsize="small")
    first = plans[0]
    chips = f"{first.mesh.chips} x {first.mesh.hardware.name}"
    axes.set(title=f"A step of {first.batch.tokens:.4g} tokens on {chips}", ylabel="seconds")
    figure.legend(loc="outside right upper", fontsize="small")
    axes.grid(axis="y", alpha=0.3)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=110)


def _parts(plan: Plan) -> dict[str, float]:
    step = plan.step
    times = {name: (times.forward + times.backward) for name, times in step.arithmetic.items()}
    times["recompute"] = sum(times.again for times in step.arithmetic.values())
    times |= {f"waits for {name}": wait.total for name, wait in step.waits.items()}
    found = {name: step.microbatches * seconds for name, seconds in times.items()}
    found |= {"bubble": step.bubble, "gradients": step.gradients, "optimizer": step.optimizer}
    return {name: seconds for name, seconds in found.items() if seconds}
