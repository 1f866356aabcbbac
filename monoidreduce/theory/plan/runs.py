"""A published training run beside what the planner predicts of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from monoidreduce.theory.hardware import HARDWARE
from monoidreduce.theory.plan.mesh import Axis, Mesh
from monoidreduce.theory.plan.planner import Batch, Plan
from monoidreduce.theory.plan.transformer import Model

__all__ = ["GIB", "Run", "bounds", "planned", "table_of_runs"]

GIB = 1 << 30


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        name: its model, chips and what sets it apart.
        source: where the figures are from.
        plan: the run as the planner sees it.
        seconds: published time of a step, or that of the published tokens or FLOPs per second.
        memory: published bytes of a chip; None if not published.
        fitted: whether `rates.py` was fitted to it. The others were held out.
        assumed: what the source does not say.
    """

    name: str
    source: str
    plan: Plan
    seconds: float
    memory: float | None = None
    fitted: bool = False
    assumed: str = ""

    @property
    def error(self) -> float:
        """Predicted over published time of a step, less 1."""
        return self.plan.step_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over published bytes, less 1."""
        return None if self.memory is None else self.plan.memory.total / self.memory - 1


def planned(
    model: Model, hardware: str, tokens: float, sequence: float, axes: dict[str, int], **options: Any
) -> Plan:
    """A plan of so many tokens in sequences; axes: sizes by strategy.

    options: those of `Plan`, and `microbatch`, `network`, and `links` by strategy.
    """
    links = options.pop("links", {})
    mesh = Mesh(
        HARDWARE[hardware],
        tuple(Axis(name, size, links.get(name, 1)) for name, size in axes.items()),
        options.pop("network", None),
    )
    return Plan(model, Batch(tokens, sequence, options.pop("microbatch", None)), mesh, **options)


def bounds(runs: Sequence[Run]) -> tuple[float, float]:
    """The median and the largest error of step times, without signs."""
    errors = [abs(run.error) for run in runs]
    return median(errors), max(errors)


def table_of_runs(runs: Sequence[Run]) -> str:
    """Predicted beside published, one line a run; * marks those that constants were fitted to."""
    lines = [f"{'':<44}{'published':>11}{'predicted':>11}{'':>8}{'memory':>10}{'predicted':>11}"]
    source = None
    for run in runs:
        if run.source != source:
            source = run.source
            lines += ["", source]
        name = run.name + (" *" if run.fitted else "")
        line = f"  {name:<42}{run.seconds:>9.4g} s{run.plan.step_seconds:>9.4g} s{run.error:>+8.1%}"
        if run.memory is not None:
            line += f"{run.memory / GIB:>6.1f} GiB{run.plan.memory.total / GIB:>7.1f} GiB"
        lines.append(line)
    lines.append("")
    for what, fitted in (("fitted to", True), ("held out", False)):
        some = [run for run in runs if run.fitted == fitted]
        middle, worst = bounds(some)
        lines.append(f"{len(some)} runs {what}: errors of {middle:.1%} in the median, {worst:.1%} at worst")
    return "\n".join(lines)
