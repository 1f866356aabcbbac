"""A plan as text, and as a dict for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monoidreduce.theory.plan.planner import Plan

__all__ = ["as_dict", "table"]


def table(plan: Plan) -> str:
    """The mesh, the step part by part, and memory."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    batch, step = plan.batch, plan.step
    yield str(plan.mesh)
    passes = "1 microbatch" if step.microbatches == 1 else f"{step.microbatches} microbatches"
    yield (
        f"{batch.tokens:.4g} tokens a step in sequences of {batch.sequence:g}; a chip computes {passes} of "
        f"{plan.microbatch_tokens:.4g}"
    )
    yield f"recompute {plan.recompute}{_how(plan)}"
    yield ""
    yield f"{'':<20}{'forward':>11}{'again':>11}{'backward':>11}{'of the step':>14}"
    whole = step.seconds
    for name, times in step.arithmetic.items():
        yield _row(name, step.microbatches, times, whole)
    for name, times in step.waits.items():
        if times.total:
            yield _row(f"waits for {name}", step.microbatches, times, whole)
    for name, seconds in (
        ("bubble", step.bubble),
        ("gradients", step.gradients),
        ("optimizer", step.optimizer),
    ):
        if seconds >= 5e-4 * whole:
            yield f"{name:<20}{'':>33}{seconds / whole:>14.1%}"
    if step.links:
        busy = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in step.links.items())
        yield f"links               {busy} in all"
    yield ""
    yield f"step                {whole:.3g} s, {plan.tokens_per_second:.4g} tokens/s, MFU {plan.mfu:.1%}"
    parts = ", ".join(f"{name} {size:.3g}" for name, size in vars(plan.memory).items() if size)
    yield f"memory              {plan.memory.total:.3g} B a chip: {parts}"
    for note in plan.notes:
        yield f"note                {note}"


def _row(name: str, microbatches: int, times: Any, whole: float) -> str:
    columns = (times.forward, times.again, times.backward)
    cells = "".join(f"{microbatches * seconds:>9.3g} s" if seconds else f"{'':>11}" for seconds in columns)
    return f"{name:<20}{cells}{microbatches * times.total / whole:>14.1%}"


def _how(plan: Plan) -> str:
    """What is not the default."""
    found = []
    if plan.precision.float8:
        found.append("float8 products")
    if plan.zero:
        found.append(f"ZeRO {plan.zero}")
    if plan.mesh.size("pipeline") > 1:
        chunks = f" of {plan.chunks} chunks" if plan.chunks > 1 else ""
        found.append(f"{plan.schedule}{chunks}")
    if plan.cost:
        found.append("this library's operators")
    if plan.model.experts and not plan.dispatch.grouped:
        found.append("experts launched one by one")
    return "".join(f"; {entry}" for entry in found)


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan's inputs and what comes of them: bytes, seconds and tokens."""
    step, memory = plan.step, plan.memory
    return {
        "hardware": plan.mesh.hardware.name,
        "chips": plan.mesh.chips,
        "mesh": {axis.strategy: axis.size for axis in plan.mesh.axes},
        "batch": {
            "tokens": plan.batch.tokens,
            "sequence": plan.batch.sequence,
            "microbatch": plan.microbatch,
            "microbatches": plan.microbatches,
        },
        "recompute": plan.recompute,
        "overlap": list(plan.overlap),
        "zero": plan.zero,
        "schedule": plan.schedule,
        "chunks": plan.chunks,
        "float8": plan.precision.float8,
        "dispatch": {**vars(plan.dispatch)},
        "seconds": {
            "step": step.seconds,
            "arithmetic": {name: step.microbatches * t.total for name, t in step.arithmetic.items()},
            "waits": {name: step.microbatches * t.total for name, t in step.waits.items()},
            "bubble": step.bubble,
            "gradients": step.gradients,
            "optimizer": step.optimizer,
        },
        "links": dict(step.links),
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "memory": {**vars(memory), "total": memory.total},
        "notes": list(plan.notes),
    }
