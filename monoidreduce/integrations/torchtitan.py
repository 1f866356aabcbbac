"""A loss with the interface of torchtitan's `ChunkedLossWrapper`. torchtitan is not imported."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from monoidreduce._validate import mismatch
from monoidreduce.nn import LinearCrossEntropyHead

__all__ = ["LinearCrossEntropyLoss"]


class LinearCrossEntropyLoss:
    """Cross entropy of models that return their head's input, as torchtitan's do for a chunked loss.

    The head computes the loss in its own forward, where FSDP has gathered its weight. It is the model's
    `lm_head`, a `monoidreduce.nn.LinearCrossEntropyHead` with reduction="sum".
    """

    lm_head: LinearCrossEntropyHead | None = None

    def set_lm_head(self, lm_head: Any) -> None:
        """Say which head computes the loss, before the first call.

        Raises:
            TypeError: lm_head is no `LinearCrossEntropyHead`.
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
        """The sum of the losses over global_valid_tokens, or the sum itself; and no metrics.

        Args:
            pred: [..., D], what the model returned: the head's input.
            labels: [...] class indices; -100, or ignore_index of the head, for a token that does not count.
            global_valid_tokens: how many tokens of all ranks count.

        Raises:
            TypeError: an argument that is not known here.
            ValueError: no head was set.
        """
        if loss_inputs:
            raise TypeError(mismatch("loss_inputs", "none but global_valid_tokens", sorted(loss_inputs)))
        if self.lm_head is None:
            raise ValueError(mismatch("lm_head", "a head from set_lm_head", None))
        loss = self.lm_head(pred, labels)
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}
