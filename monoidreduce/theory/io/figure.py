"""Figure 1 of the paper with all algorithms: I/O against cache size."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

from monoidreduce._command_line import replacing

from .algorithms import ALGORITHMS
from .bounds import large_cache_theta, small_cache_theta
from .comparison import compare

__all__ = ["save_figure"]

LEFT_OUT = ("Algorithm 1", "FlashAttention-2 forward")  # needs a cache of 3 n^2 words; solves another problem


def save_figure(path: Path, n: int, d: int) -> None:
    """Draw the algorithms for the gradient and the bounds on it, for M from 64 to 4 n d.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11, 6), layout="constrained")
    largest = max(4 * n * d, 128)
    cache = sorted({round(64 * (largest / 64) ** (step / 200)) for step in range(201)})
    comparison = compare(n, d, cache)
    axes = figure.subplots()
    for name, counts in comparison.algorithms.items():
        if name not in LEFT_OUT:
            algorithm = ALGORITHMS[name]
            label = name if algorithm.computes == "g" else f"{name}: {algorithm.computes}"
            label += "" if algorithm.fits else ": holds more than M"
            values = [math.nan if count is None else count for count in counts]
            axes.plot(cache, values, "-" if algorithm.fits else "--", linewidth=1.2, label=label)
    bounds = comparison.bounds
    axes.plot(cache, bounds["theta"], color="red", linewidth=3, alpha=0.5, label="theta, Theorem 1.1")
    for bound in (large_cache_theta, small_cache_theta):
        values = [bound(n, d, words).words for words in cache]
        axes.plot(cache, values, ":", color="blue", linewidth=0.8, label=bound.__name__)
    axes.plot(cache, bounds["segment"], color="black", linestyle="-.", label="bound: segment")
    axes.plot(cache, bounds["compulsory"], color="black", linestyle=":", label="bound: compulsory")
    axes.axvline(d * d, color="gray", linewidth=0.8)
    axes.annotate(" M = d²", (d * d, 1), xycoords=("data", "axes fraction"), va="top")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(
        title=f"I/O of the backward pass of attention, n = {n}, d = {d}",
        xlabel="cache M, words",
        ylabel="words moved",
        ylim=(0.3 * bounds["compulsory"][0], None),
    )
    figure.legend(loc="outside right upper", fontsize="small")
    axes.grid(alpha=0.3)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=110)
