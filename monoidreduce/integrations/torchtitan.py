"""A loss with the interface of torchtitan's `ChunkedLossWrapper`. torchtitan is not imported."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from monoidreduce._validate import mismatch
from monoidreduce.nn import LinearCrossEntropyHead

__all__ = ["LinearCrossEntropyLoss"]


class LinearCrossEntropyLoss:
    """Cross entropy for models that return the input of their head, as torchtitan's do for a chunked loss.

    The model's `lm_head` must be a `monoidreduce.nn.LinearCrossEntropyHead` with reduction="sum". It computes
    the loss in its own forward, because FSDP has gathered its weight there.
    """

    lm_head: LinearCrossEntropyHead | None = None

    def set_lm_head(self, lm_head: Any) -> None:
        """Set the head that computes the loss. To be called before the first loss.

        Raises:
            TypeError: lm_head is not a `LinearCrossEntropyHead`.
            ValueError: its reduction is not "sum".
        """
        if not isinstance(lm_head, LinearCrossEntropyHead):
            expected = "a monoidreduce.nn.LinearCrossEntropyHead"
            raise TypeError(mismatch("lm_head", expected, type(lm_head).__name__))
        reduction = lm_head.options["reduction"]
        if reduction != "sum":
            raise ValueError(mismatch("lm_head", 'a head with reduction="sum"', reduction))
        self.lm_head = lm_head

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss, divided by global_valid_tokens if given, and an empty dict of metrics.

        Args:
            pred: [..., D], the model's output, which is the head's input.
            labels: [...] class indices; -100, or the head's ignore_index, marks a token that does not count.
            global_valid_tokens: number of tokens that count, over all ranks.

        Raises:
            TypeError: an unknown argument.
            ValueError: no head was set.
        """
        if loss_inputs:
            raise TypeError(mismatch("loss_inputs", "none but global_valid_tokens", sorted(loss_inputs)))
        if self.lm_head is None:
            raise ValueError(mismatch("lm_head", "a head from set_lm_head", None))
        loss = self.lm_head(pred, labels)
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}
