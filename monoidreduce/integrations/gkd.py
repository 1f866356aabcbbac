"""TRL's experimental `GKDTrainer` (tested with 1.15 and 1.16), without logits of student and teacher.

from monoidreduce.integrations.gkd import GKDTrainer
"""

from __future__ import annotations

from typing import Any

import trl
from torch import nn

from monoidreduce._validate import mismatch
from monoidreduce.integrations.trl import VERSION, replace, without_entropy

if VERSION < (1, 15):
    raise ImportError(
        f"trl: expected version 1.15 or later for GKDTrainer, got {trl.__version__}. With 1.10 or later"
        " monoidreduce.integrations.trl.apply() replaces the loss of DistillationTrainer"
    )

from trl import DistillationTrainer
from trl.experimental.gkd import GKDTrainer as TrlGKDTrainer
from trl.models.utils import _ForwardRedirection

__all__ = ["GKDTrainer"]


class GKDTrainer(TrlGKDTrainer):  # type: ignore[misc]
    """TRL's `GKDTrainer` with the loss of TRL's `DistillationTrainer`, computed from hidden states and heads.

    It takes TRL's arguments. Creating a trainer also does what `monoidreduce.integrations.trl.apply` does. As
    in TRL, the temperature of `GKDConfig` is for sampling only; the loss is at temperature 1. If
    `compute_loss` is called with return_outputs, TRL's own runs, with logits.

    Raises:
        TypeError: a model's head is not a `torch.nn.Linear` (it has an adapter, for example).
        ValueError: the model has prompts that PEFT learns. In the first step: a model caps its logits.
    """

    _compute_loss = DistillationTrainer._compute_loss
    _get_last_hidden_state = DistillationTrainer._get_last_hidden_state
    _forward_redirection = _ForwardRedirection()  # runs a function inside the forward of FSDP or DDP
    model_kwarg_keys = ()  # no extra arguments for the model's body: hidden states of all tokens are needed

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        replace()
        super().__init__(*args, **kwargs)
        for name, model in {"model": self.model, "teacher_model": self.teacher_model}.items():
            unwrapped = self.accelerator.unwrap_model(model)
            head = unwrapped.get_output_embeddings()
            if not isinstance(head, nn.Linear):
                raise TypeError(mismatch(f"{name}: its head", "a torch.nn.Linear", type(head).__name__))
            if any(adapter.is_prompt_learning for adapter in getattr(unwrapped, "peft_config", {}).values()):
                raise ValueError(mismatch(name, "no prompts that PEFT learns", unwrapped.peft_config))
        self.temperature = 1.0  # read by _compute_loss; generation has its own

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        ids, attended = inputs["input_ids"], inputs["attention_mask"]
        of_distillation = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": attended[:, :1],
            "completion_ids": ids[:, 1:],  # all tokens but the first are predicted
            "completion_mask": attended[:, 1:],
            "tool_mask": inputs["labels"][:, 1:] != -100,  # which predictions count
        }
        student = self.accelerator.unwrap_model(model)
        given = self._compute_loss, student, of_distillation, num_items_in_batch
        with without_entropy():  # this trainer does not log it
            loss, _, _ = self._forward_redirection(model, student, *given)
        return loss
