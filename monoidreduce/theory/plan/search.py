"""Which meshes to take: all of some strategies, or proposals for a number of chips."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from monoidreduce._validate import mismatch
from monoidreduce.theory.hardware import Hardware
from monoidreduce.theory.plan._positive import check_counts
from monoidreduce.theory.plan.mesh import Axis, Mesh, meshes
from monoidreduce.theory.plan.planner import Batch, Plan
from monoidreduce.theory.plan.transformer import Model

__all__ = ["Proposals", "best", "plans", "propose"]

_MOST_STAGES = 64
_MICROBATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32, 40)  # sequences
_MOST_CHUNKS = 20
_LONG = 32768  # tokens of a sequence from which on sequences are sharded


def plans(
    model: Model,
    batch: Batch,
    hardware: Hardware,
    chips: int,
    strategies: Sequence[str] | Sequence[Axis],
    *,
    network: str | None = None,
    **options: Any,
) -> list[Plan]:
    """Plans for all meshes of `chips` with these strategies, shortest step first.

    strategies: names or axes, the last one's chips lie together; sizes of axes are ignored. Meshes that the
    model or the hardware cannot have are left out. network, options: those of `Mesh` and `Plan`.

    Raises TypeError or ValueError for an argument that is not as above, and if no mesh is left.
    """
    found, refused = [], None
    for mesh in meshes(hardware, chips, strategies, network):
        try:
            found.append(Plan(model, batch, mesh, **options))
        except ValueError as error:
            refused = error
    if not found:
        names = ",".join(axis.strategy if isinstance(axis, Axis) else axis for axis in strategies)
        expected = f"strategies that share the chips ({refused or 'links join too few'})"
        raise ValueError(mismatch("mesh", expected, f"{names or 'none'} of {chips} chips"))
    return sorted(found, key=_seconds)


def best(candidates: Iterable[Plan], memory: float | None = None) -> Plan:
    """The plan with the shortest step that fits into `memory` bytes per chip (None: the chip's own memory).

    Raises ValueError if none fits, or if there are no candidates.
    """
    found = list(candidates)
    if not found:
        raise ValueError(mismatch("candidates", "at least one plan", "none"))
    fit = [plan for plan in found if plan.memory.total <= _room(plan, memory)]
    if not fit:
        least = min(found, key=lambda plan: plan.memory.total)
        expected = f"at least {least.memory.total:.3g} bytes, which {least.mesh} needs"
        raise ValueError(mismatch("memory", expected, f"{_room(least, memory):.3g}"))
    return min(fit, key=_seconds)


def _room(plan: Plan, memory: float | None) -> float:
    return plan.mesh.hardware.memory if memory is None else memory


def _seconds(plan: Plan) -> float:
    return plan.step_seconds


@dataclass(frozen=True)
class Proposals:
    """Meshes for a number of chips, shortest step first.

    Attributes:
        plans: the best plan of each mesh that fits into the chips' memory.
        unfit: the plan that needs least memory, of each mesh that does not fit.
    """

    plans: tuple[Plan, ...]
    unfit: tuple[Plan, ...]

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def why(self) -> tuple[str, ...]:
        """For each strategy, the step's time, or the memory, with the next smaller and larger size."""
        return tuple(self._reasons())

    def _reasons(self) -> Iterator[str]:
        best = self.best
        for strategy in ("tp", "pipeline", "expert", "context"):  # replicas are what is left
            size = best.mesh.size(strategy)
            sizes = {plan.mesh.size(strategy) for plan in self.plans + self.unfit}
            smaller = max((n for n in sizes if n < size), default=0)
            larger = min((n for n in sizes if n > size), default=0)
            told = [self._told(strategy, other) for other in (smaller, larger) if other]
            if told:
                yield f"{strategy} {size}: {'; '.join(told)}"

    def _told(self, strategy: str, size: int) -> str:
        fit = [plan for plan in self.plans if plan.mesh.size(strategy) == size]
        if not fit:
            least = min(
                (plan for plan in self.unfit if plan.mesh.size(strategy) == size),
                key=lambda p: p.memory.total,
            )
            return f"{size} needs {least.memory.total:.3g} B"
        slower = fit[0].step_seconds / self.best.step_seconds - 1
        return f"{size} takes {slower:.1%} longer ({_main_loss(self.best, fit[0])})"


def _main_loss(best: Plan, other: Plan) -> str:
    """The part of a step that grew most."""

    def parts(plan: Plan) -> dict[str, float]:
        step = plan.step
        found = {
            name: step.microbatches * t.forward + step.microbatches * t.backward
            for name, t in step.arithmetic.items()
        }
        found |= {f"waits for {name}": step.microbatches * t.total for name, t in step.waits.items()}
        again = step.microbatches * sum(t.again for t in step.arithmetic.values())
        return found | {"recompute": again, "bubble": step.bubble, "gradients": step.gradients}

    before, after = parts(best), parts(other)
    return max(after, key=lambda name: after[name] - before.get(name, 0.0))


def propose(
    model: Model,
    batch: Batch,
    hardware: Hardware,
    chips: int,
    *,
    network: str | None = None,
    **options: Any,
) -> Proposals:
    """Meshes of `chips` for a model, with microbatches, recomputation and chunks that fit into memory.

    Tensor parallelism stays within a node. Without a pipeline state is sharded (fsdp), with one the
    optimizer's (dp with ZeRO 1). Sequences are sharded if they are long, or fewer than their shards. Of each
    mesh, the least recomputation that fits is taken.

    Args:
        model, batch, hardware, chips: what to train, on what. A microbatch that is given is kept.
        network, options: those of `Mesh` and `Plan`, other than recompute, chunks and zero.

    Raises ValueError if no mesh fits, with the least memory that one needs; TypeError or ValueError for
    arguments that are not as above.
    """
    check_counts(chips=chips)
    fit: list[Plan] = []
    unfit: list[Plan] = []
    for mesh in _candidates(model, batch, hardware, chips, network):
        fits, least = _of_mesh(model, batch, mesh, options)
        if fits is not None:
            fit.append(fits)
        elif least is not None:
            unfit.append(least)
    if not fit and not unfit:
        expected = f"chips that strategies for {batch.tokens / batch.sequence:g} sequences can share"
        raise ValueError(mismatch("chips", expected, chips))
    if not fit:
        best(unfit)  # says what is needed
    return Proposals(tuple(sorted(fit, key=_seconds)), tuple(unfit))


def _candidates(
    model: Model, batch: Batch, hardware: Hardware, chips: int, network: str | None
) -> Iterator[Mesh]:
    torus = hardware.axes > 1
    # Several tori, each with all strategies, if one has too few chips.
    tori = next((n for n in _divisors(chips, chips) if chips // n <= hardware.joined), 1) if torus else 1
    chips, sequences = chips // tori, batch.tokens / batch.sequence / tori
    for tp in _divisors(chips, 16 if torus else hardware.joined):
        for stages in (1,) if torus else _divisors(chips // tp, min(_MOST_STAGES, model.layers)):
            for experts in _expert_sizes(model, chips // tp // stages):
                rest = chips // tp // stages // experts
                for context in _contexts(batch, sequences, rest, experts):
                    kinds = ("dp",) if stages > 1 else ("fsdp",) if tori > 1 else ("fsdp", "dp")
                    for kind in kinds:
                        sizes = {"dp": tori} if tori > 1 else {}
                        sizes |= {
                            kind: rest // context,
                            "pipeline": stages,
                            "expert": experts,
                            "context": context,
                            "tp": tp,
                        }
                        yield from _mesh(hardware, sizes, kind, network)


def _mesh(hardware: Hardware, sizes: dict[str, int], kind: str, network: str | None) -> Iterator[Mesh]:
    """The mesh with these axes if there can be one. kind: of the first one; on a torus it has all axes but
    one."""
    links: dict[str, float | str] = {"dp": "dcn"} if hardware.axes > 1 else {}
    links[kind] = max(hardware.axes - 1, 1)
    axes = tuple(Axis(name, n, links.get(name, 1)) for name, n in sizes.items() if n > 1 or name == kind)
    with suppress(ValueError):
        yield Mesh(hardware, axes, network)


def _expert_sizes(model: Model, chips: int) -> Iterator[int]:
    yield 1
    if model.experts is not None:
        yield from (
            n for n in _divisors(chips, model.experts.count) if n > 1 and model.experts.count % n == 0
        )


def _contexts(batch: Batch, sequences: float, rest: int, experts: int) -> Iterator[int]:
    """Sizes of context: enough that each shard of the batch has a sequence; more only for long ones."""
    for context in _divisors(rest, 64):
        needed = sequences >= rest // context * experts
        if needed and (context == 1 or batch.sequence >= _LONG or sequences < rest // context * experts * 2):
            yield context


def _of_mesh(
    model: Model, batch: Batch, mesh: Mesh, options: dict[str, Any]
) -> tuple[Plan | None, Plan | None]:
    """The fastest plan of a mesh that fits, and the one that needs least memory."""
    fits: Plan | None = None
    least: Plan | None = None
    stages = mesh.size("pipeline")
    per_stage = -(-model.layers // stages)
    chunks = [n for n in range(_MOST_CHUNKS, 0, -1) if per_stage % n == 0] if stages > 1 else [1]
    sequences = batch.tokens / batch.sequence / mesh.size("dp", "fsdp", "expert")
    sizes: list[float | None] = [batch.microbatch]
    if batch.microbatch is None and sequences >= 1:
        sizes = [n for n in _MICROBATCHES if n <= sequences and sequences % n == 0] or [1]
    replicated = not any(axis.strategy == "fsdp" for axis in mesh.axes)
    for size in sizes:
        one_fits = False
        for recompute, parts in product(("none", "attention", "alternate", "full"), chunks):
            if recompute == "attention" and not options.get("stored_scores"):
                continue
            try:
                plan = Plan(
                    model,
                    Batch(batch.tokens, batch.sequence, size),
                    mesh,
                    recompute=recompute,
                    chunks=parts,
                    zero=1 if replicated and mesh.size("dp", "context", "expert") > 1 else 0,
                    **options,
                )
            except ValueError:
                continue
            if least is None or plan.memory.total < least.memory.total:
                least = plan
            if plan.memory.total <= mesh.hardware.memory:
                one_fits = True
                if fits is None or plan.step_seconds < fits.step_seconds:
                    fits = plan
        if not one_fits:
            break  # larger ones need more
    return fits, least


def _divisors(number: int, most: int) -> Iterator[int]:
    yield from (n for n in range(1, min(number, most) + 1) if number % n == 0)
