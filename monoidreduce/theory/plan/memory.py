"""Bytes that the fullest chip holds during a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from monoidreduce.theory.plan.pipeline import in_flight

if TYPE_CHECKING:
    from monoidreduce.theory.plan.planner import Plan

__all__ = ["Memory", "memory_of"]

# Bytes of a logit: it and its gradient in 16 bits, and without a fused loss two copies in float32.
FUSED_LOGITS, LOGITS = 4, 12


@dataclass(frozen=True)
class Memory:
    """Bytes that a chip holds during a step.

    Attributes:
        weights, gradients, optimizer: for the parameters that the chip owns; with FSDP in a pipeline,
            gradients of all of the stage's.
        gathered: FSDP's gathered weights: two layers, or with a pipeline all of the chip's.
        activations: saved for backward, of all microbatches in flight, and one layer's that runs again.
        workspace: logits; with cost=True, the peak scratch memory of one of this library's operators.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    workspace: float = 0

    @property
    def total(self) -> float:
        state = self.weights + self.gradients + self.optimizer
        return state + self.gathered + self.activations + self.workspace


def memory_of(plan: Plan) -> Memory:
    mesh, precision = plan.mesh, plan.precision
    fsdp, stages, parameters = plan.state_chips, mesh.size("pipeline"), plan.chip_parameters
    replicas = mesh.size(*plan.replica_axes)
    owned = parameters / fsdp
    # With FSDP the shard of weights is the optimizer's copy; what computes is gathered.
    weights = 0.0 if fsdp > 1 else precision.weights * owned
    gathered = 0.0
    if fsdp > 1:
        two = 2 * max(layer.parameters for layer, _ in plan.stage_layers)
        gathered = precision.weights * (parameters if stages > 1 else min(two, parameters))
    # With FSDP in a pipeline, gradients are summed whole and sent once a step.
    summed = parameters if fsdp > 1 and stages > 1 else owned / (replicas if plan.zero == 2 else 1)
    gradients = precision.gradients * summed
    if plan.schedule == "dualpipe":
        weights, gradients = 2 * weights, 2 * gradients
    if plan.cost:
        logits: float = max(taken.memory for taken in plan.operators.values())
    else:
        classes = plan.model.vocabulary / mesh.size("tp", "vocab")
        logits = (FUSED_LOGITS if plan.fused_loss else LOGITS) * plan.microbatch_tokens * classes
    one = sum(count * plan.kept(layer) for layer, count in plan.stage_layers)
    flight = in_flight(plan.schedule, stages, plan.chunks, plan.microbatches)
    again = max(
        layer.working + (0 if plan.recompute == "none" else layer.kept("attention"))
        for layer, _ in plan.stage_layers
    )
    # The first stage holds most microbatches, the last the logits.
    activations, workspace = flight * one + again, logits if stages == 1 else 0.0
    if stages > 1 and one + again + logits > activations:
        activations, workspace = one + again, logits
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=precision.optimizer * plan.owned_parameters,
        gathered=gathered,
        activations=activations,
        workspace=workspace,
    )
