"""The rule by which two training steps of a model (the loss and the gradients) count as equal.

The relative difference of losses is at most 2e-6. A parameter's gradient differs by at most 2e-6 times its
largest element, or times a tenth of the largest element of all gradients if that is more. Some gradients are
sums over all tokens that nearly cancel, so that the other step's own error is larger than that. For these,
our error against a float64 step may exceed 2e-6 by twice the other's.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

TOLERANCE = 2e-6

Step = tuple[Tensor, dict[str, Tensor]]


def errors(step: Step, expected: Step) -> dict[str, float]:
    """Relative errors of the loss and of each gradient.

    A gradient's is relative to its largest element, or to a tenth of the largest of all if that is more.
    """
    assert step[1].keys() == expected[1].keys() and expected[1]
    least = max(gradient.abs().max().item() for gradient in expected[1].values()) / 10
    relative = {"loss": abs(step[0] - expected[0]).item() / abs(expected[0]).item()}
    for name, gradient in expected[1].items():
        largest = max(gradient.abs().max().item(), least)
        relative[name] = (step[1][name] - gradient).abs().max().item() / largest
    return relative


def assert_same_step(ours: Step, other: Step, exact: Callable[[], Step] | None = None) -> None:
    """Assert that two steps are equal by the rule. exact: takes the step in float64."""
    wrong = {name: error for name, error in errors(ours, other).items() if not error <= TOLERANCE}
    if wrong and exact is not None:
        truth = exact()
        of_ours, of_other = errors(ours, truth), errors(other, truth)
        wrong = {name: of_ours[name] for name in wrong if not of_ours[name] <= TOLERANCE + 2 * of_other[name]}
    assert not wrong, wrong
