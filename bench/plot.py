"""Plots of results, and the README's chart (bars of time and memory).

The plots show speed and memory against sizes, time against memory, and errors against the standard deviation
of scores.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.report import accuracy_parts, accuracy_sweeps, in_words
from monoidreduce._command_line import replacing

Row = dict[str, Any]
Panel = Callable[[Any], None]  # draws on a matplotlib Axes
HALF = "bfloat16"  # the dtype that is drawn, as peers are measured in it
# Colors of the README's chart: ours, others and text, legible on white and on black, as the background is
# transparent.
OURS, OTHERS, TEXT = "#2f81f7", "#9198a1", "#767676"
FONTS = ["DejaVu Sans", "Verdana", "Arial"]
SWEEPS = {"attention": ("L", "d"), "mlp": ("d",), "cross_entropy": ("V",)}


def _color(name: str, names: list[str]) -> Any:
    """The color of a contender, the same in all panels. Ours are black and grays."""
    own = [other for other in names if other.startswith("monoidreduce")]
    if name in own:
        return str(0.7 * own.index(name) / len(own))
    peers = [other for other in names if other not in own]
    return importlib.import_module("matplotlib").colormaps["tab20"](peers.index(name))


def _fixed(row: Row, axis: str) -> dict[str, Any]:
    """The parameters that are constant in a sweep over `axis`."""
    swept = {axis, "B", "H"}  # batch and heads follow from length and width
    return {name: value for name, value in row["parameters"].items() if name not in swept}


def sweeps(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """The sweeps of results: (parameter, rows of one operator that differ only in it, in its order).

    A sweep has several rows.
    """
    groups: dict[str, tuple[str, list[Row]]] = {}
    for row in rows:
        if row["dtype"] == HALF:
            for axis in SWEEPS.get(row["op"], ()):
                groups.setdefault(f"{row['op']} {axis} {_fixed(row, axis)}", (axis, []))[1].append(row)
    return [
        (axis, sorted(group, key=lambda row: row["parameters"][axis]))
        for axis, group in groups.values()
        if len(group) > 1
    ]


def _swept(
    axes: Any, axis: str, rows: list[Row], value: Callable[[Row, str], float | None], names: list[str]
) -> None:
    """Draw a line for each contender: its values against the swept parameter."""
    for name in names:
        points = [(row["parameters"][axis], y) for row in rows if (y := value(row, name)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name, color=_color(name, names))
    axes.set_xscale("log", base=2)
    axes.set(xlabel=axis)


def _speed(axis: str, rows: list[Row], phase: str, roof: float, names: list[str]) -> Panel:
    """TFLOP/s of each contender, and the roof: the rate of products, as no case here is bound by memory."""

    def rate(row: Row, name: str) -> float | None:
        measured = row["phases"][phase]
        if name not in measured["speedup"]:
            return None
        return float(measured["gflops"] / measured["speedup"][name] / 1e3)

    def draw(axes: Any) -> None:
        _swept(axes, axis, rows, rate, names)
        axes.axhline(roof / 1e3, color="gray", linestyle="--", label="roofline: matrix product")
        title = f"{rows[0]['op']} {phase}\n{in_words(_fixed(rows[0], axis))}"
        axes.set(title=title, ylabel="TFLOP/s", ylim=(0, None))

    return draw


def _peaks(axis: str, rows: list[Row], names: list[str]) -> Panel:
    """Peak memory of each contender beyond inputs, outputs and gradients."""

    def mebibytes(row: Row, name: str) -> float | None:
        peak = row["peak_bytes"].get(name)
        return None if peak is None else float(peak / 2**20)

    def draw(axes: Any) -> None:
        _swept(axes, axis, rows, mebibytes, names)
        axes.set_yscale("symlog", linthresh=1)
        axes.set(title=f"{rows[0]['op']}\n{in_words(_fixed(rows[0], axis))}", ylabel="peak MiB")

    return draw


def is_of_workspaces(name: str) -> bool:
    """Whether a contender is ours, with some workspace, on the tier that dispatch chooses."""
    return name.startswith("monoidreduce") and name != "monoidreduce, sm80"


def _memory(row: Row, names: list[str]) -> Panel:
    """Milliseconds of forward and backward against peak memory; ours are a curve over workspaces."""

    def draw(axes: Any) -> None:
        times = row["phases"]["total"]["milliseconds"]
        points = {name: (row["peak_bytes"][name] / 2**20, times[name]["median"]) for name in times}
        own = sorted(point for name, point in points.items() if is_of_workspaces(name))
        axes.plot(*zip(*own, strict=True), marker="o", label="monoidreduce", color="black")
        for name, (mebibytes, milliseconds) in points.items():
            if not is_of_workspaces(name):
                axes.plot(mebibytes, milliseconds, "o", label=name, color=_color(name, names))
        axes.set_xscale("log")
        axes.set(
            title=f"{row['op']}\n{in_words(row['parameters'])}",
            xlabel="peak MiB",
            ylabel="ms, forward and backward",
            ylim=(0, None),
        )

    return draw


def _errors(rows: list[Row], part: str, names: list[str]) -> Panel:
    """Relative error of one result against the standard deviation of the logits or scores."""

    def draw(axes: Any) -> None:
        for name in names:
            points = [(row["std"], row["errors"][name][part]) for row in rows if name in row["errors"]]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name, color=_color(name, names))
        axes.set_yscale("log")
        axes.set(
            title=f"{rows[0]['op']}: {part}\n{in_words(rows[0]['parameters'])}",
            xlabel="standard deviation of the logits or scores",
            ylabel="relative error",
        )

    return draw


def panels(document: Row) -> list[Panel]:
    """All panels of a document, in order."""
    speed, accuracy = document["speed"], document["accuracy"]
    roof = document["environment"]["product_gflops"][HALF]
    names = list(
        dict.fromkeys(
            [name for row in speed for name in row["phases"]["total"]["speedup"]]
            + [name for row in accuracy for name in row["errors"]]
        )
    )
    drawn = []
    for axis, rows in sweeps(speed):
        drawn += [_speed(axis, rows, phase, roof, names) for phase in ("forward", "backward")]
        if all("peak_bytes" in row for row in rows):
            drawn.append(_peaks(axis, rows, names))
    drawn += [
        _memory(row, names)
        for row in speed
        if row["op"] in ("cross_entropy", "distillation") and "peak_bytes" in row
    ]
    for rows in accuracy_sweeps(accuracy):
        drawn += [_errors(rows, part, names) for part in accuracy_parts(rows[0])]
    return drawn


def save_plot(path: Path, document: Row) -> bool:
    """Draw all panels; returns False if there are none. Raises ImportError without matplotlib."""
    drawn = panels(document)
    if not drawn:
        return False
    columns = 4
    lines = -(-len(drawn) // columns)
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(6 * columns, 4.5 * lines), layout="constrained"
    )
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for draw, axes in zip(drawn, grid, strict=False):
        draw(axes)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    for axes in grid[len(drawn) :]:
        axes.set_axis_off()
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=100)
    return True


class Bar(NamedTuple):
    """Time and memory of a contender's step."""

    name: str
    milliseconds: float
    mebibytes: float

    @property
    def time(self) -> str:
        return f"{self.milliseconds:.3g} ms"

    @property
    def memory(self) -> str:
        return f"{self.mebibytes:.0f} MiB"


def _draw_bars(axes: Any, bars: list[Bar], values: list[float], labels: list[str], gid: str) -> None:
    """Draw bars below each other, each with its label and the id `gid`-index."""
    colors = [OURS if bar.name.startswith("monoidreduce") else OTHERS for bar in bars]
    drawn = axes.barh(range(len(bars)), values, color=colors, height=0.7)
    for index, patch in enumerate(drawn):
        patch.set_gid(f"{gid}-{index}")
    axes.bar_label(drawn, labels, padding=3, color=TEXT)
    axes.set(xlim=(0, 1.25 * max(values)), xticks=[], ylim=(len(bars) - 0.4, -0.6))
    axes.set_frame_on(False)


def save_bars(path: Path, groups: dict[str, list[Bar]]) -> None:
    """Draw groups of bars under their titles, times to the left and memory to the right, as SVG.

    Text stays text, the background is transparent, and the same groups give the same bytes.
    """
    heights = [len(bars) + 1.5 for bars in groups.values()]
    with importlib.import_module("matplotlib").rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "monoidreduce", "font.size": 9, "font.sans-serif": FONTS}
    ):
        figure = importlib.import_module("matplotlib.figure").Figure(
            figsize=(9, 0.21 * sum(heights)), layout="constrained"
        )
        grid = figure.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
        for index, ((title, bars), (left, right)) in enumerate(zip(groups.items(), grid, strict=True)):
            times, memory = [bar.milliseconds for bar in bars], [bar.mebibytes for bar in bars]
            _draw_bars(left, bars, times, [bar.time for bar in bars], f"time-{index}")
            _draw_bars(right, bars, memory, [bar.memory for bar in bars], f"memory-{index}")
            left.set_yticks(range(len(bars)), [bar.name for bar in bars], color=TEXT)
            left.tick_params(length=0)
            right.set_yticks([])
            left.set_title(title, loc="left", color=TEXT, fontweight="bold", fontsize="medium")
        with replacing(path) as file:
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
