"""The results that the demo shows: a table, and a plot if matplotlib is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from monoidreduce._command_line import replacing

from .sweep import Sweep
from .train import Run

# The lines of the first and the second model. The first is wide, so that it shows if the second covers it.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "tab:gray", "linewidth": 4, "alpha": 0.6},
    {"color": "tab:blue", "linewidth": 1.5},
)


def table(runs: dict[str, Run], sweeps: list[Sweep]) -> str:
    """The comparison, one column for each of two models; memory at both ends of each sweep."""
    first, second = (run.losses for run in runs.values())
    difference = max(abs(a - b) for a, b in zip(first, second, strict=True))
    rows = [
        _row("", *runs),
        _row("loss, first step", *(f"{run.losses[0]:.4f}" for run in runs.values())),
        _row("loss, last step", *(f"{run.losses[-1]:.4f}" for run in runs.values())),
        _row("time per step, median", *(f"{run.step_seconds * 1e3:.1f} ms" for run in runs.values())),
    ]
    for sweep in sweeps:
        for place in (0, -1):
            growth = (f"{sweep.growth[name][place] / 2**20:.1f} MiB" for name in runs)
            rows.append(_row(f"memory of the {sweep.layer}, {sweep.axis} {sweep.sizes[place]}", *growth))
    rows.append(f"largest difference of the two loss curves: {difference:.2g}")
    if sweeps:
        rows.append("memory: peak of forward and backward, beyond inputs, outputs and gradients")
    return "\n".join(rows)


def _row(label: str, *values: str) -> str:
    return f"{label:48}" + "".join(f"{value:>16}" for value in values)


def list_paths(paths: Mapping[str, int]) -> str:
    """The kernels that MonoidReduce's layers took during training, and how often."""
    lines = [f"  {path:46}{calls:>16}" for path, calls in sorted(paths.items())]
    return "\n".join([_row("monoidreduce's layers in training ran on", "times"), *lines])


def save_plot(path: Path, runs: dict[str, Run], sweeps: list[Sweep]) -> None:
    """Both loss curves and a panel for each sweep. Raises ImportError where matplotlib is not installed."""
    styles = dict(zip(runs, _STYLES, strict=True))
    with panels(path, 1 + len(sweeps)) as (loss, *memory):
        for name, run in runs.items():
            loss.plot(run.losses, label=name, **styles[name])
        loss.set(title="training loss", xlabel="step", ylabel="nats per byte")
        for axes, sweep in zip(memory, sweeps, strict=True):
            draw_memory(axes, sweep, styles)


@contextmanager
def panels(path: Path, count: int) -> Iterator[list[Any]]:
    """Axes side by side to draw on, saved at the end. Raises ImportError where there is no matplotlib."""
    figure_type = importlib.import_module("matplotlib.figure").Figure
    figure = figure_type(figsize=(5 * count, 4), layout="constrained")
    drawn = list(figure.subplots(1, count, squeeze=False)[0])
    yield drawn
    for axes in drawn:
        axes.legend()
        axes.grid(alpha=0.3)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=120)


def draw_memory(axes: Any, sweep: Sweep, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """The peaks of a sweep, a line for each model or layer."""
    for name, growth in sweep.growth.items():
        axes.plot(sweep.sizes, [size / 2**20 for size in growth], marker="o", label=name, **styles[name])
    axes.set_xscale("log", base=2)
    axes.set(title=f"peak memory of the {sweep.layer}", xlabel=sweep.axis, ylabel="MiB")


def tell_plot(path: Path, save: Callable[[], None]) -> None:
    """Saves a plot and says where, or why there is none."""
    try:
        save()
        print(f"plot: {path}")
    except ImportError:
        print("no plot: matplotlib is not installed")


def name_of(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads"
