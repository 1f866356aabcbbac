"""Schedules of pipeline stages: how long chips wait, and how many microbatches are in flight."""

from __future__ import annotations

__all__ = ["SCHEDULES", "bubble", "in_flight"]

# gpipe: all forward passes, then all backward passes. 1f1b: one of each in turn. dualpipe: microbatches
# enter at both ends, and a forward pass runs beside a backward pass (DeepSeek-V3, section 3.2.1).
SCHEDULES = ("1f1b", "gpipe", "dualpipe")


def bubble(schedule: str, stages: int, chunks: int, forward: float, backward: float) -> float:
    """Seconds that a chip waits in a step.

    chunks: parts of the model that each chip has; more than one interleave, and divide the wait by as much.
    forward, backward: seconds of a microbatch on a chip, all its chunks together.
    """
    if stages == 1:
        return 0.0
    if schedule == "dualpipe":
        # (p/2 - 1)(F&B + B - 3W), W the gradients of weights: about half of backward.
        return max(stages / 2 - 1, 0) * max(forward + 2 * backward - 1.5 * backward, 0.0)
    return (stages - 1) / chunks * (forward + backward)


def in_flight(schedule: str, stages: int, chunks: int, microbatches: int) -> float:
    """Microbatches whose activations the first chip holds, in units of all its chunks."""
    if stages == 1:
        return 1
    if schedule == "gpipe":
        return microbatches
    if schedule == "dualpipe":
        return min(microbatches, stages + 1)
    most = stages if chunks == 1 else stages * (1 + (stages - 1) / (stages * chunks))
    return min(microbatches, most)
