"""The rule by which a step of a model, its loss and its gradients, is that of another.

A loss differs by at most 2e-6 of it. A parameter's gradient differs by at most 2e-6 of its largest element.
If a tenth of the largest element of all gradients is more, the bound is 2e-6 of that. Some gradients are sums
over all tokens that nearly cancel, so that the other's own gradient has a larger error. There ours may have
twice that, beside float64.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

TOLERANCE = 2e-6

Step = tuple[Tensor, dict[str, Tensor]]


def errors(step: Step, expected: Step) -> dict[str, float]:
    """Of the loss, and of each gradient relative to its largest element or a tenth of the largest of all."""
    assert step[1].keys() == expected[1].keys() and expected[1]
    least = max(gradient.abs().max().item() for gradient in expected[1].values()) / 10
    relative = {"loss": abs(step[0] - expected[0]).item() / abs(expected[0]).item()}
    for name, gradient in expected[1].items():
        largest = max(gradient.abs().max().item(), least)
        relative[name] = (step[1][name] - gradient).abs().max().item() / largest
    return relative


def assert_same_step(ours: Step, other: Step, exact: Callable[[], Step] | None = None) -> None:
    """By the rule; exact takes the step in float64."""
    wrong = {name: error for name, error in errors(ours, other).items() if not error <= TOLERANCE}
    if wrong and exact is not None:
        truth = exact()
        of_ours, of_other = errors(ours, truth), errors(other, truth)
        wrong = {name: of_ours[name] for name in wrong if not of_ours[name] <= TOLERANCE + 2 * of_other[name]}
    assert not wrong, wrong
