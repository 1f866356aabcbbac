"""A bar chart that compares plans."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from monoidreduce._command_line import replacing
from monoidreduce.theory.plan.planner import Plan

__all__ = ["save_figure"]


def save_figure(path: Path, plans: Sequence[Plan]) -> None:
    """Draw the seconds of arithmetic, of each strategy's communication, and of the whole step, for each plan.

    Args:
        path: file to write; its suffix must be a format that matplotlib writes.
        plans: one or more plans, whose meshes use the same strategies.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    first = plans[0]
    parts = {"arithmetic": [sum(plan.compute_seconds) for plan in plans]}
    for name in first.send_seconds:
        parts[f"links of {name}"] = [sum(plan.send_seconds[name]) for plan in plans]
    width = 0.8 / len(parts)
    for at, (name, seconds) in enumerate(parts.items()):
        begin = (at + 0.5) * width - 0.4
        axes.bar([place + begin for place in range(len(plans))], seconds, width, label=name)
    for place, plan in enumerate(plans):
        label = {"label": "step"} if place == 0 else {}
        axes.hlines(plan.step_seconds, place - 0.45, place + 0.45, color="black", **label)
    names = [", ".join(f"{axis.strategy} {axis.size}" for axis in plan.mesh.axes) for plan in plans]
    axes.set_xticks(range(len(plans)), names, fontsize="small")
    chips = f"{first.mesh.chips} x {first.mesh.hardware.name}"
    axes.set(title=f"A step of {first.batch.tokens:.4g} tokens on {chips}", ylabel="seconds")
    figure.legend(loc="outside right upper", fontsize="small")
    axes.grid(axis="y", alpha=0.3)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=110)
