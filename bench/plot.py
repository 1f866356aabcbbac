"""Draws results: speed against length and width, time against memory, error against scale of the logits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report import in_words

Row = dict[str, Any]
Panel = Callable[[Any], None]  # draws on a matplotlib Axes
HALF = "bfloat16"  # what is drawn: the dtype in which there are peers
SWEEPS = {"attention": "L", "mlp": "d", "cross_entropy": "V"}


def _color(name: str, names: list[str]) -> Any:
    """Of a contender, the same in all panels; ours are black and grays."""
    own = [other for other in names if other.startswith("monoidreduce")]
    if name in own:
        return str(0.7 * own.index(name) / len(own))
    peers = [other for other in names if other not in own]
    return importlib.import_module("matplotlib").colormaps["tab20"](peers.index(name))


def _fixed(row: Row) -> dict[str, Any]:
    """The parameters that a sweep leaves as they are."""
    swept = {SWEEPS[row["op"]], "B", "H"}  # batch and heads follow from length and width
    return {name: value for name, value in row["parameters"].items() if name not in swept}


def sweeps(rows: list[Row]) -> list[list[Row]]:
    """The rows of one operator that differ in what it sweeps over alone, where there are several."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["dtype"] == HALF and row["op"] in SWEEPS:
            groups.setdefault(f"{row['op']} {_fixed(row)}", []).append(row)
    return [group for group in groups.values() if len(group) > 1]


def _speed(rows: list[Row], phase: str, roof: float, names: list[str]) -> Panel:
    """TFLOP/s of each contender against what is swept over, under the rate of a matrix product."""
    axis = SWEEPS[rows[0]["op"]]
    rows = sorted(rows, key=lambda row: row["parameters"][axis])

    def draw(axes: Any) -> None:
        for name in names:
            points = [
                (
                    row["parameters"][axis],
                    row["phases"][phase]["gflops"] / row["phases"][phase]["speedup"][name] / 1e3,
                )
                for row in rows
                if name in row["phases"][phase]["speedup"]
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name, color=_color(name, names))
        axes.axhline(roof / 1e3, color="gray", linestyle="--", label="matrix product")
        title = f"{rows[0]['op']} {phase}\n{in_words(_fixed(rows[0]))}"
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel=axis, ylabel="TFLOP/s", ylim=(0, None))

    return draw


def _memory(row: Row, names: list[str]) -> Panel:
    """Milliseconds of forward and backward against peak memory; ours is a curve over the workspace."""

    def draw(axes: Any) -> None:
        times = row["phases"]["total"]["milliseconds"]
        points = {name: (row["peak_bytes"][name] / 2**20, times[name]["median"]) for name in times}
        own = sorted(point for name, point in points.items() if name.startswith("monoidreduce"))
        axes.plot(*zip(*own, strict=True), marker="o", label="monoidreduce", color="black")
        for name, (mebibytes, milliseconds) in points.items():
            if not name.startswith("monoidreduce"):
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
    """Relative error of one result against the standard deviation of the logits."""

    def draw(axes: Any) -> None:
        for name in names:
            points = [(row["std"], row["errors"][name][part]) for row in rows if name in row["errors"]]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name, color=_color(name, names))
        axes.set_yscale("log")
        axes.set(
            title=f"{rows[0]['op']}: {part}",
            xlabel="standard deviation of the logits",
            ylabel="relative error",
        )

    return draw


def panels(document: Row) -> list[Panel]:
    """What there is to draw, in order."""
    speed, accuracy = document["speed"], document["accuracy"]
    roof = document["environment"]["product_gflops"][HALF]
    names = list(
        dict.fromkeys(
            [name for row in speed for name in row["phases"]["total"]["speedup"]]
            + [name for row in accuracy for name in row["errors"]]
        )
    )
    drawn = [_speed(rows, phase, roof, names) for rows in sweeps(speed) for phase in ("forward", "backward")]
    drawn += [
        _memory(row, names)
        for row in speed
        if row["op"] in ("cross_entropy", "distillation") and "peak_bytes" in row
    ]
    for op in dict.fromkeys(row["op"] for row in accuracy):
        rows = [row for row in accuracy if row["op"] == op]
        drawn += [_errors(rows, part, names) for part in ("loss", "dX", "dW")]
    return drawn


def save_plot(path: Path, document: Row) -> bool:
    """Draws all panels; False where there are none. Raises ImportError where matplotlib is not installed."""
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
    figure.savefig(path, dpi=100)
    return True
